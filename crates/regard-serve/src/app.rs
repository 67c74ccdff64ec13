//! What all routes share: models, limits, and what is done around every request.

use crate::engine::Common;
use crate::error::{ApiError, Refused};
use crate::fields::Fields;
use crate::host::is_local;
use crate::keys::{KeyId, Keys};
use crate::looks::Looks;
use crate::metrics::Metrics;
use crate::models::Models;
use crate::options::Options;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, ORIGIN};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The state of a server.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) options: Options,
    pub(crate) keys: Keys,
    pub(crate) common: Arc<Common>,
    /// Set when all are open.
    pub(crate) models: OnceLock<Models>,
    pub(crate) looks: Arc<Looks>,
    pub(crate) draining: AtomicBool,
}

/// How long a body may take to arrive.
const BODY: Duration = Duration::from_secs(10);
/// Routes that need no key: those that ask whether the server is well.
const PROBES: [&str; 3] = ["/livez", "/readyz", "/health"];
/// LibreTranslate's clients give the key in the body: the route checks it.
pub(crate) const TRANSLATE: &str = "/translate";

/// Seconds that a request may give itself at least: nothing is answered much sooner.
const SHORTEST: f64 = 0.1;

impl App {
    pub(crate) fn metrics(&self) -> &Metrics {
        &self.common.metrics
    }

    pub(crate) fn models(&self) -> Result<&Models, ApiError> {
        self.models
            .get()
            .ok_or_else(|| ApiError::unavailable("the models are being opened; try again"))
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.models.get().is_some() && !self.draining.load(Ordering::Relaxed)
    }

    /// When a request must be answered: after `x-request-timeout` seconds, or `--timeout`, whichever is sooner.
    pub(crate) fn deadline(&self, headers: &HeaderMap) -> Result<Instant, ApiError> {
        let most = self.options.timeout;
        let asked = match headers.get("x-request-timeout") {
            None => most,
            Some(value) => {
                let seconds = value.to_str().ok().and_then(|text| text.parse::<f64>().ok());
                let seconds = seconds.filter(|seconds| (SHORTEST..=f64::MAX).contains(seconds));
                let seconds = seconds.ok_or_else(|| {
                    let shown = value.to_str().unwrap_or("?");
                    ApiError::invalid(format!(
                        "x-request-timeout: {shown}; give seconds from {SHORTEST} on, as in 2.5"
                    ))
                })?;
                Duration::try_from_secs_f64(seconds).unwrap_or(most)
            }
        };
        Ok(Instant::now() + asked.min(most))
    }

    /// The fields of a request, and when it must be answered: the time of its body counts.
    pub(crate) async fn fields(&self, request: Request) -> Result<(Fields, Instant), ApiError> {
        let deadline = self.deadline(request.headers())?;
        if !is_of(request.headers(), "application/json") {
            let message = "content-type: only application/json is read; send `content-type: application/json`";
            let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            return Err(ApiError::new(status, "invalid_request_error", message));
        }
        Ok((Fields::of_body(&self.body(request).await?)?, deadline))
    }

    /// The same where they may also be a form.
    pub(crate) async fn fields_or_form(
        &self,
        request: Request,
    ) -> Result<(Fields, Instant), ApiError> {
        if !is_of(request.headers(), "application/x-www-form-urlencoded") {
            return self.fields(request).await;
        }
        // Browsers send the forms of any page anywhere, without asking first as they do for JSON.
        let origin = request.headers().get(ORIGIN).map(|origin| origin.to_str().unwrap_or("?"));
        let foreign = origin.is_some_and(|origin| {
            !origin.strip_prefix("http://").is_some_and(|host| is_local(host, None))
        });
        if foreign && self.options.keys.is_empty() {
            let message = "Origin: without API keys, forms of pages from elsewhere are not answered; send JSON";
            return Err(ApiError::new(StatusCode::FORBIDDEN, "permission_error", message));
        }
        let deadline = self.deadline(request.headers())?;
        Ok((Fields::of_form(&self.body(request).await?)?, deadline))
    }

    /// The bytes of a body.
    async fn body(&self, request: Request) -> Result<Vec<u8>, ApiError> {
        let body = Limited::new(request.into_body(), self.options.max_body);
        let late = |_| {
            let message = format!("the body did not arrive within {} s", BODY.as_secs());
            ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
        };
        let collected = tokio::time::timeout(BODY, body.collect()).await.map_err(late)?;
        match collected {
            Ok(body) => Ok(body.to_bytes().into()),
            Err(error) if error.is::<LengthLimitError>() => {
                let message =
                    format!("the body has more than {} bytes; shorten it", self.options.max_body);
                let status = StatusCode::PAYLOAD_TOO_LARGE;
                Err(ApiError::new(status, "invalid_request_error", message))
            }
            Err(_) => Err(ApiError::invalid("the body ended too early")),
        }
    }
}

/// Whether a body is of this type.
fn is_of(headers: &HeaderMap, wanted: &str) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let kind = kind.unwrap_or_default().split(';').next().unwrap_or_default();
    kind.trim().eq_ignore_ascii_case(wanted)
}

/// Counts a request while it is answered.
struct InFlight<'a>(&'a App);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.metrics().in_flight(-1.0);
    }
}

/// Checks who asks, then counts and logs what came of it: the route, and never what was sent.
pub(crate) async fn around(
    State(app): State<Arc<App>>,
    mut request: Request,
    next: Next,
) -> Response {
    let start = Instant::now();
    app.metrics().in_flight(1.0);
    let in_flight = InFlight(&app);
    let matched = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let route = matched.unwrap_or_else(|| "other".into());
    let method = request.method().clone();
    let checked = match route.as_str() {
        route if PROBES.contains(&route) => Ok(KeyId(0)),
        // Without keys, `Host` is checked here as everywhere.
        TRANSLATE if !app.options.keys.is_empty() => Ok(KeyId(0)),
        _ => app.keys.check(request.headers(), request.uri()),
    };
    let mut response = match checked {
        Err(error) => error.into_response(),
        Ok(key) => {
            request.extensions_mut().insert(key);
            next.run(request).await
        }
    };
    drop(in_flight);
    let (status, seconds) = (response.status().as_u16(), start.elapsed().as_secs_f64());
    app.metrics().answered(&route, status, seconds);
    if let Some(Refused(reason)) = response.extensions().get::<Refused>() {
        app.metrics().count("regard_rejected_total", ("reason", (*reason).into()), 1);
    }
    tracing::info!(%method, route, status, seconds, "request");
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// A handler panicked: a fault of ours.
pub(crate) fn panicked(_: Box<dyn std::any::Any + Send>) -> Response<Body> {
    ApiError::internal().into_response()
}

/// 64 bits that differ each time: for ids, and for seeds where none is given. No secret depends on them.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(0)
}
