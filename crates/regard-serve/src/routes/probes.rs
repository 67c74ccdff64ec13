//! What is served, and whether all is well.

use crate::app::App;
use crate::error::ApiError;
use crate::models::Entry;
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) async fn models(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let data: Vec<Value> = app.models()?.entries.iter().map(|entry| described(entry)).collect();
    Ok(Json(json!({"object": "list", "data": data})))
}

pub(super) async fn model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(described(app.models()?.get(Some(&name), |_| true)?)))
}

fn described(entry: &Entry) -> Value {
    json!({"id": entry.name, "object": "model", "created": entry.created, "owned_by": "regard"})
}

/// Whether the process is well; a supervisor starts it anew otherwise.
pub(super) async fn livez(State(app): State<Arc<App>>) -> Response {
    match app.common.is_sick() {
        false => "ok".into_response(),
        true => ApiError::unavailable("engines fail again and again").into_response(),
    }
}

/// Whether requests should come here.
pub(super) async fn readyz(State(app): State<Arc<App>>) -> Response {
    match app.is_ready() {
        true => "ok".into_response(),
        false => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

/// The same for clients of llama.cpp and TEI.
pub(super) async fn health(State(app): State<Arc<App>>) -> Response {
    match app.models() {
        _ if app.is_ready() => Json(json!({"status": "ok"})).into_response(),
        Err(opening) => opening.into_response(),
        Ok(_) => ApiError::stopping().into_response(),
    }
}

pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(CONTENT_TYPE, kind)], app.metrics().render()).into_response()
}
