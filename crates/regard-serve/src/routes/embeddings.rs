//! `POST /v1/embeddings`, and `/embed` of Text Embeddings Inference: vectors of texts.

use super::completions::{INPUT, Input, Text};
use crate::app::App;
use crate::engine::{BatchJob, Engines, Output, Work};
use crate::error::ApiError;
use crate::fields::wrong;
use crate::models::Entry;
use axum::Json;
use axum::extract::{Request, State};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use regard_models::Encoder;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// Texts of a request, as in OpenAI's API.
pub(super) const TEXTS: usize = 2048;

pub(super) async fn route(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let (mut fields, deadline) = app.fields(request).await?;
    let model: Option<String> = fields.take("model", "the name of a model")?;
    let texts = fields.need::<Input>("input", INPUT)?.texts("input", TEXTS)?;
    let kinds = "`float` or `base64`";
    let format: Option<String> = fields.take("encoding_format", kinds)?;
    let base64 = match format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => return Err(wrong("encoding_format", &json!(other), kinds)),
    };
    let dimensions: Option<usize> = fields.take("dimensions", "a whole number")?;
    fields.ignore(&["user"]);
    fields.finish()?;
    let entry = encoder(&app, model.as_deref())?;
    check_dimensions(&entry, dimensions)?;
    let (vectors, tokens) = embed(entry.clone(), texts, deadline).await?;
    let data = vectors.iter().enumerate().map(|(index, vector)| {
        let vector = match base64 {
            true => {
                let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                json!(STANDARD.encode(bytes))
            }
            false => json!(vector),
        };
        json!({"object": "embedding", "index": index, "embedding": vector})
    });
    Ok(Json(json!({
        "object": "list", "data": data.collect::<Vec<_>>(), "model": entry.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    })))
}

pub(super) async fn tei(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let (mut fields, deadline) = app.fields(request).await?;
    let texts = fields.need::<Input>("inputs", INPUT)?.texts("inputs", TEXTS)?;
    fields.only("normalize", &[json!(true)], "vectors have length 1")?;
    fields.only("truncate", &[json!(false)], "a text that is too long is refused; shorten it")?;
    fields.ignore(&["truncation_direction"]);
    let dimensions: Option<usize> = fields.take("dimensions", "a whole number")?;
    fields.finish()?;
    let entry = encoder(&app, None)?;
    check_dimensions(&entry, dimensions)?;
    Ok(Json(json!(embed(entry, texts, deadline).await?.0)))
}

fn encoder(app: &App, name: Option<&str>) -> Result<Arc<Entry>, ApiError> {
    let entry = app.models()?.get(name, |entry| entry.encoder().is_ok())?;
    entry.encoder()?;
    entry.queue.has_room()?;
    Ok(entry.clone())
}

fn check_dimensions(entry: &Entry, asked: Option<usize>) -> Result<(), ApiError> {
    let stack = entry.encoder()?.0.transformer().config().encoder.as_ref();
    let own = stack.map_or(0, |stack| stack.d_model);
    match asked.filter(|asked| *asked != own) {
        Some(_) => {
            Err(ApiError::unsupported("dimensions", &format!("vectors of this model have {own}")))
        }
        None => Ok(()),
    }
}

/// Vectors of texts, and how many tokens they had.
async fn embed(
    entry: Arc<Entry>,
    texts: Vec<Text>,
    deadline: Instant,
) -> Result<(Vec<Vec<f32>>, usize), ApiError> {
    let own = entry.clone();
    let rows = tokio::task::spawn_blocking(move || {
        let (model, _) = own.encoder()?;
        texts.into_iter().map(|text| tokens(model, text)).collect::<Result<Vec<_>, ApiError>>()
    });
    let rows = rows.await.map_err(|_| ApiError::internal())??;
    let tokens = rows.iter().map(Vec::len).sum();
    match compute(&entry, entry.encoder()?.1, (Work::Embed(rows), tokens), deadline).await? {
        Output::Vectors(vectors) => Ok((vectors, tokens)),
        Output::Texts(_) => Err(ApiError::internal()),
    }
}

/// The tokens of a text; those of a client must be of the model.
fn tokens(model: &Encoder, text: Text) -> Result<Vec<u32>, ApiError> {
    let tokens = match text {
        Text::Text(text) => return model.prompt(&text).map_err(|e| ApiError::text("input", &e)),
        Text::Tokens(tokens) => tokens,
    };
    let Some(stack) = &model.transformer().config().encoder else { return Ok(tokens) };
    if let Some(id) = tokens.iter().find(|id| **id as usize >= stack.vocab) {
        let why =
            format!("input: token {id}, the model has {}; ids must be below that", stack.vocab);
        return Err(ApiError::field("input", why));
    }
    match stack.context.filter(|context| tokens.len() > *context) {
        Some(most) => {
            let why = format!("input: {} tokens, the model holds {most}; shorten it", tokens.len());
            Err(ApiError::field("input", why).with_code("context_length_exceeded"))
        }
        None => Ok(tokens),
    }
}

/// Hands texts with so many tokens to the batch lane, and waits.
pub(super) async fn compute(
    entry: &Entry,
    engines: &Engines<BatchJob>,
    (work, tokens): (Work, usize),
    deadline: Instant,
) -> Result<Output, ApiError> {
    let Some(place) = entry.queue.enter(&[tokens])?.pop() else { return Err(ApiError::internal()) };
    let (tell, told) = oneshot::channel();
    let came = Instant::now();
    let job = |load| BatchJob { work, tokens, came, deadline, tell, place, load };
    if !engines.submit(job) {
        return Err(ApiError::unavailable("the engine has ended; try again"));
    }
    told.await.map_err(|_| ApiError::internal())?
}
