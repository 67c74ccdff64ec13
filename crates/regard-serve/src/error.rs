//! Errors as OpenAI's objects: `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use regard_models::Error;
use regard_models::generate::GenerateError;
use serde_json::{Value, json};

/// What a client is told instead of an answer.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) kind: &'static str,
    pub(crate) message: String,
    pub(crate) param: Option<String>,
    pub(crate) code: Option<&'static str>,
    /// Seconds after which to try again.
    pub(crate) retry_after: Option<u64>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status, kind, message, param: None, code: None, retry_after: None }
    }

    /// A request that makes no sense.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A field that makes no sense: its name, what it is and what it may be.
    pub(crate) fn field(name: &str, message: impl Into<String>) -> Self {
        Self { param: Some(name.into()), ..Self::invalid(message) }
    }

    /// Something that is right and that this server does not do.
    pub(crate) fn unsupported(name: &str, why: &str) -> Self {
        let message = format!("`{name}` is not supported: {why}");
        Self { code: Some("unsupported_parameter"), ..Self::field(name, message) }
    }

    pub(crate) fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// The engine failed; the request may be right.
    pub(crate) fn internal() -> Self {
        let message = "the engine failed while it worked on this request; try again";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    pub(crate) fn unavailable(message: &str) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
        Self { retry_after: Some(1), ..error }
    }

    pub(crate) fn busy(message: impl Into<String>, retry_after: u64) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        Self { retry_after: Some(retry_after), ..error }.with_code("queue_full")
    }

    /// The server ends, and with it what has not begun.
    pub(crate) fn stopping() -> Self {
        Self::unavailable("the server is shutting down; ask another")
    }

    /// No token came in time.
    pub(crate) fn late() -> Self {
        let message = "the deadline of the request passed before its answer began; try again later, \
                       or raise the time limit (`x-request-timeout`, `--timeout`)";
        Self::new(StatusCode::GATEWAY_TIMEOUT, "server_error", message).with_code("deadline")
    }

    /// What generation refused. What comes of the request is its fault; scores that are none are not.
    pub(crate) fn generate(error: &GenerateError) -> Self {
        match error {
            GenerateError::NotFinite { .. } | GenerateError::Scores { .. } => {
                let kind = "server_error";
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, kind, error.to_string())
            }
            GenerateError::TooLong { .. } => {
                Self::field("prompt", error.to_string()).with_code("context_length_exceeded")
            }
            GenerateError::Field { field, .. } => Self::field(field, error.to_string()),
            GenerateError::Memory { .. } => Self::field("max_tokens", error.to_string()),
            GenerateError::Grammar { .. } | GenerateError::Constraint { .. } => {
                Self::field("response_format", error.to_string())
            }
            _ => Self::field("prompt", error.to_string()),
        }
    }

    /// A text that a model cannot read.
    pub(crate) fn text(name: &str, error: &Error) -> Self {
        Self::field(name, format!("{name}: {error}"))
    }

    pub(crate) fn json(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.json())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        // The middleware counts refusals by it.
        response.extensions_mut().insert(Refused(self.code.unwrap_or(self.kind)));
        response
    }
}

/// Why a request was refused, for metrics.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refused(pub(crate) &'static str);
