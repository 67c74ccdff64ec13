//! Requests and answers.

mod answer;
mod ask;
mod attention;
mod chat;
mod completions;
mod embeddings;
mod generation;
mod look;
mod openapi;
mod probes;
mod sse;
mod translate;

use crate::app::{App, TRANSLATE, around, panicked};
use crate::error::ApiError;
use axum::Router;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use std::sync::Arc;
use tower_http::catch_panic::CatchPanicLayer;

/// Method and path of everything that is served; `/openapi.json` describes the same.
pub const ROUTES: &[(&str, &str)] = &[
    ("get", "/v1/models"),
    ("get", "/v1/models/{model}"),
    ("post", "/v1/completions"),
    ("post", "/v1/chat/completions"),
    ("get", "/v1/look/{id}"),
    ("post", "/v1/embeddings"),
    ("post", "/embed"),
    ("post", "/translate"),
    ("get", "/languages"),
    ("get", "/livez"),
    ("get", "/readyz"),
    ("get", "/health"),
    ("get", "/metrics"),
    ("get", "/openapi.json"),
];

pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/models", get(probes::models))
        .route("/v1/models/{*model}", get(probes::model))
        .route("/v1/completions", post(completions::route))
        .route("/v1/chat/completions", post(chat::route))
        .route("/v1/look/{id}", get(look::route))
        .route("/v1/embeddings", post(embeddings::route))
        .route("/embed", post(embeddings::tei))
        .route(TRANSLATE, post(translate::route))
        .route("/languages", get(translate::languages))
        .route("/livez", get(probes::livez))
        .route("/readyz", get(probes::readyz))
        .route("/health", get(probes::health))
        .route("/metrics", get(probes::metrics))
        .route("/openapi.json", get(openapi::route))
        .fallback(async || {
            let message = "no such path; GET /openapi.json lists all";
            ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
        })
        .method_not_allowed_fallback(async || {
            let message = "this path has another method; GET /openapi.json lists all";
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
        })
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(app.clone(), around))
        .with_state(app)
}
