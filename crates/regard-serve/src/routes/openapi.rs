//! `GET /openapi.json`: the document of this server, with the names, languages and limits of its models.

use crate::app::App;
use crate::models::Models;
use axum::extract::State;
use axum::response::{IntoResponse, Json, Response};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What is the same for all servers.
const DOCUMENT: &str = include_str!("openapi.json");

pub(super) async fn route(State(app): State<Arc<App>>) -> Response {
    let Ok(mut document) = serde_json::from_str::<Value>(DOCUMENT) else {
        return crate::error::ApiError::internal().into_response();
    };
    let schemas = &mut document["components"]["schemas"];
    if let Ok(models) = app.models() {
        generation(schemas, models, &app);
        embeddings(schemas, models);
        translation(schemas, models);
    }
    Json(document).into_response()
}

/// A field of a request has one of these values, or is null if it may be. Without any, no model has the field, and it stays as it is.
fn one_of<T: Into<Value>>(field: &mut Value, values: impl IntoIterator<Item = T>) {
    let mut values: Vec<Value> = values.into_iter().map(Into::into).collect();
    if values.is_empty() {
        return;
    }
    if field["type"].is_array() {
        values.push(Value::Null);
    }
    field["enum"] = Value::Array(values);
}

/// Token ids of an input are below the smallest of these.
fn ids(input: &mut Value, vocabularies: impl Iterator<Item = usize>) {
    let Some(last) = vocabularies.min().and_then(|n| n.checked_sub(1)) else { return };
    for form in input["oneOf"].as_array_mut().into_iter().flatten() {
        for place in ["/items", "/items/items"] {
            if let Some(id) = form.pointer_mut(place).filter(|id| id["type"] == "integer") {
                id["maximum"] = json!(last);
            }
        }
    }
}

/// A pattern of the numbers from 0 to this, without zeros before them.
fn up_to(last: usize) -> String {
    let digits = last.to_string();
    let mut ways = vec!["0".to_owned()];
    if digits.len() > 1 {
        ways.push(format!("[1-9][0-9]{{0,{}}}", digits.len() - 2));
    }
    // As long as the last: the same up to a digit, that one smaller, any others.
    for (at, digit) in digits.char_indices() {
        let least = if at == 0 { '1' } else { '0' };
        if digit > least {
            let (before, below) = (&digits[..at], char::from(digit as u8 - 1));
            ways.push(format!("{before}[{least}-{below}][0-9]{{{}}}", digits.len() - 1 - at));
        }
    }
    ways.push(digits);
    format!("^({})$", ways.join("|"))
}

fn generation(schemas: &mut Value, models: &Models, app: &App) {
    let decoders =
        models.entries.iter().filter_map(|entry| Some((entry, entry.causal_lm().ok()?.0)));
    let stacks =
        decoders.clone().filter_map(|(_, model)| model.transformer().config().decoder.as_ref());
    let prompt = &mut schemas["CompletionRequest"]["properties"]["prompt"];
    ids(prompt, stacks.clone().map(|stack| stack.vocab));
    for name in ["CompletionRequest", "ChatRequest"] {
        let fields = &mut schemas[name]["properties"];
        if let Some(last) = stacks.clone().map(|stack| stack.vocab.saturating_sub(1)).min() {
            fields["logit_bias"]["propertyNames"]["pattern"] = json!(up_to(last));
        }
        one_of(&mut fields["model"], decoders.clone().map(|(entry, _)| entry.name.as_str()));
        for limit in ["max_tokens", "max_completion_tokens"] {
            fields[limit]["maximum"] = json!(app.options.max_tokens);
        }
        let sizes = stacks.clone().map(|stack| [stack.layers.len(), stack.heads.q]);
        let fewest = sizes.reduce(|a, b| [a[0].min(b[0]), a[1].min(b[1])]);
        match fewest.filter(|_| app.options.attention) {
            Some([layers, heads]) => {
                let asked = &mut fields["attention"]["properties"];
                let last = layers.saturating_sub(1);
                asked["layers"]["items"]["minimum"] = json!(-i64::try_from(layers).unwrap_or(0));
                asked["layers"]["items"]["maximum"] = json!(last);
                asked["heads"]["items"]["maximum"] = json!(heads.saturating_sub(1));
            }
            None => drop(fields.as_object_mut().map(|fields| fields.remove("attention"))),
        }
    }
}

fn embeddings(schemas: &mut Value, models: &Models) {
    let encoders = models.entries.iter().filter_map(|entry| Some((entry, entry.encoder().ok()?.0)));
    let stacks =
        encoders.clone().filter_map(|(_, model)| model.transformer().config().encoder.as_ref());
    let sizes: BTreeSet<usize> = stacks.clone().map(|stack| stack.d_model).collect();
    let names = encoders.map(|(entry, _)| entry.name.as_str());
    one_of(&mut schemas["EmbeddingRequest"]["properties"]["model"], names);
    for (name, input) in [("EmbeddingRequest", "input"), ("EmbedRequest", "inputs")] {
        let fields = &mut schemas[name]["properties"];
        one_of(&mut fields["dimensions"], sizes.iter().copied());
        ids(&mut fields[input], stacks.clone().map(|stack| stack.vocab));
    }
}

fn translation(schemas: &mut Value, models: &Models) {
    let translators = models.entries.iter().filter(|entry| entry.translator().is_ok());
    let pairs: Vec<(&str, &str)> = translators.filter_map(|entry| entry.languages()).collect();
    let sources: BTreeSet<&str> = pairs.iter().map(|pair| pair.0).collect();
    let targets: BTreeSet<&str> = pairs.iter().map(|pair| pair.1).collect();
    // `auto` is one more, where one model only translates into a target.
    let auto = (!pairs.is_empty() && pairs.len() == targets.len()).then_some("auto");
    for name in ["TranslateRequest", "TranslateForm"] {
        let fields = &mut schemas[name]["properties"];
        one_of(&mut fields["source"], sources.iter().copied().chain(auto));
        one_of(&mut fields["target"], targets.iter().copied());
    }
}

#[cfg(test)]
mod tests {
    use super::up_to;

    #[test]
    fn a_pattern_has_all_numbers_up_to_the_last() {
        assert_eq!(up_to(0), "^(0|0)$");
        assert_eq!(up_to(1), "^(0|1)$");
        assert_eq!(up_to(7), "^(0|[1-6][0-9]{0}|7)$");
        assert_eq!(
            up_to(30_521),
            "^(0|[1-9][0-9]{0,3}|[1-2][0-9]{4}|30[0-4][0-9]{2}|305[0-1][0-9]{1}|3052[0-0][0-9]{0}|30521)$"
        );
    }
}
