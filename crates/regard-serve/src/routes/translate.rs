//! `POST /translate` and `GET /languages`, as LibreTranslate has them.

use super::embeddings::{TEXTS, compute};
use crate::app::App;
use crate::engine::{Output, Work};
use crate::error::ApiError;
use crate::fields::wrong;
use crate::models::Entry;
use axum::Json;
use axum::extract::{Request, State};
use axum::http::header::AUTHORIZATION;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Deserialize)]
#[serde(untagged)]
enum Texts {
    One(String),
    Some(Vec<String>),
}

pub(super) async fn route(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    // A key in the body is LibreTranslate's way; one in the header is checked before the body is read.
    let header = request.headers().contains_key(AUTHORIZATION);
    if header {
        app.keys.check(request.headers(), request.uri())?;
    }
    let (mut fields, deadline) = app.fields_or_form(request).await?;
    let key: Option<String> = fields.take("api_key", "a string")?;
    if !header {
        app.keys.check_key(key.as_deref())?;
    }
    let (texts, one) = match fields.need("q", "a string, or a list of strings")? {
        Texts::One(text) => (vec![text], true),
        Texts::Some(texts) => (texts, false),
    };
    let source: String = fields.need("source", "the code of a language, or `auto`")?;
    let target: String = fields.need("target", "the code of a language")?;
    fields.only("format", &[json!("text")], "only plain text is translated")?;
    // A form has no numbers.
    fields.only("alternatives", &[json!(0), json!("0")], "only the best translation is told")?;
    fields.finish()?;
    if texts.is_empty() || texts.len() > TEXTS {
        return Err(wrong("q", &json!(format!("{} texts", texts.len())), &format!("1 to {TEXTS}")));
    }
    let entry = translator(&app, &source, &target)?;
    entry.queue.has_room()?;
    // There is nothing to translate where there are no words.
    let is_blank = |text: &String| text.trim().is_empty();
    let blank: Vec<bool> = texts.iter().map(is_blank).collect();
    let mut texts = texts;
    texts.retain(|text| !is_blank(text));
    let own = entry.clone();
    let counted = tokio::task::spawn_blocking(move || count(&own, &texts).map(|n| (texts, n)));
    let (texts, tokens) = counted.await.map_err(|_| ApiError::internal())??;
    let work = (Work::Translate(texts), tokens);
    let mut texts = match compute(&entry, entry.translator()?.1, work, deadline).await? {
        Output::Texts(texts) => texts.into_iter(),
        _ => return Err(ApiError::internal()),
    };
    let texts = blank.iter().map(|blank| if *blank { None } else { texts.next() });
    let mut texts: Vec<String> = texts.map(Option::unwrap_or_default).collect();
    let texts = if one { json!(texts.pop()) } else { json!(texts) };
    Ok(Json(json!({"translatedText": texts})))
}

/// Tokens of texts, none of which is too long.
fn count(entry: &Entry, texts: &[String]) -> Result<usize, ApiError> {
    let (model, _) = entry.translator()?;
    let mut all = 0;
    for text in texts {
        let tokens = model.prompt(text).map_err(|e| ApiError::text("q", &e))?;
        if tokens.is_empty() {
            return Err(wrong("q", &json!(text), "a text that the model has tokens for"));
        }
        all += tokens.len();
    }
    Ok(all)
}

/// The translator between two languages; from `auto`, the only one to the target.
fn translator(app: &App, source: &str, target: &str) -> Result<Arc<Entry>, ApiError> {
    let entries = app.models()?.entries.iter().filter(|entry| entry.translator().is_ok());
    let fits = |entry: &&Arc<Entry>| {
        entry
            .languages()
            .is_some_and(|(from, to)| to == target && (source == "auto" || from == source))
    };
    let mut fitting = entries.clone().filter(fits);
    match (fitting.next(), fitting.next()) {
        (Some(entry), None) => Ok(entry.clone()),
        (Some(_), Some(_)) => Err(wrong(
            "source",
            &json!(source),
            "the code of a language: several are translated into this target",
        )),
        (None, _) => {
            let known: Vec<String> = entries
                .filter_map(|entry| entry.languages().map(|(from, to)| format!("{from} to {to}")))
                .collect();
            let known = if known.is_empty() { "none".into() } else { known.join(", ") };
            let message = format!(
                "no model translates from {} to {}; known: {known}; a translator is known by a name that ends as zh-en does",
                json!(source),
                json!(target)
            );
            Err(ApiError::field("target", message))
        }
    }
}

pub(super) async fn languages(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let mut languages: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for entry in app.models()?.entries.iter().filter(|entry| entry.translator().is_ok()) {
        if let Some((source, target)) = entry.languages() {
            languages.entry(source).or_default().push(target);
            languages.entry(target).or_default();
        }
    }
    let one = |(code, targets): (&str, Vec<&str>)| json!({"code": code, "name": name(code), "targets": targets});
    Ok(Json(languages.into_iter().map(one).collect()))
}

/// A language by its code; the code where the name is not known.
fn name(code: &str) -> &str {
    const NAMES: &[(&str, &str)] = &[
        ("ar", "Arabic"),
        ("de", "German"),
        ("en", "English"),
        ("es", "Spanish"),
        ("fr", "French"),
        ("hi", "Hindi"),
        ("it", "Italian"),
        ("ja", "Japanese"),
        ("ko", "Korean"),
        ("nl", "Dutch"),
        ("pl", "Polish"),
        ("pt", "Portuguese"),
        ("ru", "Russian"),
        ("tr", "Turkish"),
        ("uk", "Ukrainian"),
        ("zh", "Chinese"),
    ];
    NAMES.iter().find(|(own, _)| *own == code).map_or(code, |(_, name)| name)
}
