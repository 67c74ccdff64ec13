//! `POST /v1/chat/completions`: the answer to a conversation.

use super::answer::{Log, Shape};
use super::ask::{Ask, TOP};
use super::generation::{Prompts, answer};
use crate::app::App;
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::keys::KeyId;
use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use regard_models::files::Message;
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) async fn route(
    State(app): State<Arc<App>>,
    Extension(key): Extension<KeyId>,
    request: Request,
) -> Result<Response, ApiError> {
    let (mut fields, deadline) = app.fields(request).await?;
    let model: Option<String> = fields.take("model", "the name of a model")?;
    let messages = fields.need::<Vec<Value>>("messages", "a list of messages")?;
    if messages.is_empty() {
        return Err(ApiError::field("messages", "messages: an empty list; give one at least"));
    }
    let messages = messages.into_iter().enumerate().map(|(i, value)| message(i, value));
    let messages = messages.collect::<Result<Vec<_>, _>>()?;
    for (name, same) in [
        ("tools", json!([])),
        ("functions", json!([])),
        ("tool_choice", json!("none")),
        ("modalities", json!(["text"])),
    ] {
        fields.only(name, &[same], "models only answer with text; leave it out")?;
    }
    let wanted = fields.take::<bool>("logprobs", "true or false")?.unwrap_or(false);
    let top = fields.count("top_logprobs", [0, TOP])?;
    if top.is_some() && !wanted {
        let why = "top_logprobs: only where `logprobs` is true; set it, or leave this out";
        return Err(ApiError::field("top_logprobs", why));
    }
    let mut ask = Ask::take(&mut fields, &app.options)?;
    fields.finish()?;
    ask.options.top_log_probabilities = top.unwrap_or(0);
    let shape = Shape { chat: true, log_probabilities: wanted };
    answer(&app, (model, Prompts::Chat(messages)), ask, (key, deadline), shape).await
}

fn message(i: usize, value: Value) -> Result<Message, ApiError> {
    let mut fields = Fields::of_value(&format!("messages[{i}]"), value)?;
    let roles = "`system`, `user` or `assistant`";
    let role: String = fields.need("role", roles)?;
    let role = match role.as_str() {
        // What OpenAI calls the system message of newer models.
        "developer" => "system".to_owned(),
        "system" | "user" | "assistant" => role,
        _ => return Err(wrong(&fields.name("role"), &json!(role), roles)),
    };
    let kinds = "a string, or a list of {\"type\": \"text\", \"text\": ..}";
    let name = fields.name("content");
    let content = match fields.take::<Value>("content", kinds)? {
        Some(Value::String(content)) => content,
        Some(Value::Array(parts)) => {
            let parts = parts.into_iter().map(|part| text(&name, part, kinds));
            parts.collect::<Result<String, _>>()?
        }
        None if role == "assistant" => String::new(),
        other => return Err(wrong(&name, &json!(other), kinds)),
    };
    fields.ignore(&["name", "refusal"]);
    fields.finish()?;
    Ok(Message { role, content })
}

fn text(name: &str, part: Value, kinds: &str) -> Result<String, ApiError> {
    let mut fields = Fields::of_value(name, part)?;
    let kind: String = fields.need("type", "`text`")?;
    if kind != "text" {
        return Err(wrong(&fields.name("type"), &json!(kind), kinds));
    }
    let text = fields.need("text", "a string")?;
    fields.finish()?;
    Ok(text)
}

/// Log-probabilities in the form of chats.
pub(super) fn logs(logs: &[Log]) -> Value {
    // Of tokens that are part of a character, the bytes are not known here.
    let bytes = |token: &str| (!token.contains('\u{FFFD}')).then(|| token.as_bytes().to_vec());
    let of =
        |token: &str, value: f64| json!({"token": token, "logprob": value, "bytes": bytes(token)});
    let one = |log: &Log| {
        let mut one = of(&log.token, log.value);
        one["top_logprobs"] = log.top.iter().map(|(token, value)| of(token, *value)).collect();
        one
    };
    json!({"content": logs.iter().map(one).collect::<Vec<_>>(), "refusal": null})
}
