//! `POST /v1/completions`: a prompt goes on.

use super::answer::Shape;
use super::ask::{Ask, TOP};
use super::generation::{Prompts, answer};
use crate::app::App;
use crate::error::ApiError;
use crate::keys::KeyId;
use axum::Extension;
use axum::extract::{Request, State};
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Tokens that are generated unless the request says how many, as in OpenAI's API.
const TOKENS: usize = 16;
/// Prompts of a request.
const PROMPTS: usize = 64;

/// Texts or tokens, one or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Input {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

pub(super) const INPUT: &str =
    "a string, a list of strings, a list of token ids, or a list of such lists";

/// A text, or tokens.
#[derive(Clone, Debug)]
pub(super) enum Text {
    Text(String),
    Tokens(Vec<u32>),
}

impl Input {
    /// One at least.
    pub(super) fn texts(self, name: &str, most: usize) -> Result<Vec<Text>, ApiError> {
        let texts: Vec<Text> = match self {
            Self::Text(text) => vec![Text::Text(text)],
            Self::Tokens(tokens) if tokens.is_empty() => Vec::new(),
            Self::Tokens(tokens) => vec![Text::Tokens(tokens)],
            Self::Texts(texts) => texts.into_iter().map(Text::Text).collect(),
            Self::TokenLists(lists) => lists.into_iter().map(Text::Tokens).collect(),
        };
        let empty = |text: &Text| matches!(text, Text::Tokens(tokens) if tokens.is_empty());
        if texts.is_empty() || texts.iter().any(empty) {
            return Err(ApiError::field(name, format!("{name}: an empty list; give one at least")));
        }
        if texts.len() > most {
            let why = format!("{name}: {} texts; give {most} at most", texts.len());
            return Err(ApiError::field(name, why));
        }
        Ok(texts)
    }
}

pub(super) async fn route(
    State(app): State<Arc<App>>,
    Extension(key): Extension<KeyId>,
    request: Request,
) -> Result<Response, ApiError> {
    let (mut fields, deadline) = app.fields(request).await?;
    let model: Option<String> = fields.take("model", "the name of a model")?;
    let prompts = fields.need::<Input>("prompt", INPUT)?.texts("prompt", PROMPTS)?;
    fields.only("echo", &[json!(false)], "prompts are not repeated; put it before the text")?;
    fields.only("suffix", &[json!("")], "texts only go on at their end")?;
    let log_probabilities = fields.count("logprobs", [0, TOP])?;
    let mut ask = Ask::take(&mut fields, &app.options)?;
    fields.finish()?;
    ask.max_tokens.get_or_insert(TOKENS.min(app.options.max_tokens));
    ask.options.top_log_probabilities = log_probabilities.unwrap_or(0);
    let shape = Shape { chat: false, log_probabilities: log_probabilities.is_some() };
    answer(&app, (model, Prompts::Texts(prompts)), ask, (key, deadline), shape).await
}

/// Log-probabilities in the form of completions.
pub(super) fn logs(logs: &[super::answer::Log]) -> Value {
    let top = |log: &super::answer::Log| {
        let top = log.top.iter().map(|(token, value)| (token.clone(), json!(value)));
        Value::Object(top.collect())
    };
    json!({
        "tokens": logs.iter().map(|log| &log.token).collect::<Vec<_>>(),
        "token_logprobs": logs.iter().map(|log| log.value).collect::<Vec<_>>(),
        "top_logprobs": logs.iter().map(top).collect::<Vec<_>>(),
        "text_offset": logs.iter().map(|log| log.offset).collect::<Vec<_>>(),
    })
}
