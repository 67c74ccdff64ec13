//! Pages for a browser on this machine: what `regard look --serve` shows.

use crate::host::is_local;
use crate::listen::{Limits, listen};
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_TYPE, HOST, ORIGIN, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode};
use axum::response::Response;
use std::net::TcpListener;
use std::sync::Arc;

/// An answer.
#[derive(Clone, Debug)]
pub struct Page {
    /// As 200 or 404.
    pub status: u16,
    /// As `text/html`.
    pub kind: &'static str,
    /// One more header.
    pub header: Option<(&'static str, String)>,
    /// What it says.
    pub body: Vec<u8>,
}

impl Page {
    /// Says why there is no page.
    #[must_use]
    pub fn refused(status: u16, why: &str) -> Self {
        Self { status, kind: "text/plain; charset=utf-8", header: None, body: why.into() }
    }
}

/// Threads that make pages at once; a page may be a second of work.
const MAKERS: usize = 16;

/// Answers `GET` requests of this machine, by path and query, until the process ends. Another `Host` or `Origin` gets a 403: a page from
/// elsewhere must not read what is served here, whatever name it reaches this machine by.
///
/// # Errors
/// If the system refuses.
pub fn pages(
    listener: TcpListener,
    limits: Limits,
    answer: impl Fn(&str, &str) -> Page + Send + Sync + 'static,
) -> std::io::Result<()> {
    let port = listener.local_addr()?.port();
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(MAKERS)
        .build()?;
    let answer = Arc::new(answer);
    let router = Router::new().fallback(move |request: Request| {
        let answer = answer.clone();
        async move {
            let made = match refusal(&request, port) {
                Some(refused) => Ok(refused),
                None => {
                    let (path, query) = (request.uri().path(), request.uri().query());
                    let (path, query) = (path.to_owned(), query.unwrap_or_default().to_owned());
                    tokio::task::spawn_blocking(move || answer(&path, &query)).await
                }
            };
            // The error is a panic.
            response(
                made.unwrap_or_else(|_| Page::refused(500, "this request could not be answered")),
            )
        }
    });
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        listen(listener, router, limits, std::future::pending()).await;
        Ok(())
    })
}

fn refusal(request: &Request, port: u16) -> Option<Page> {
    let header =
        |name| request.headers().get(name).map(|value: &HeaderValue| value.to_str().unwrap_or("?"));
    let own = |host: &str| is_local(host, Some(port));
    let origin =
        header(ORIGIN).is_none_or(|origin| origin.strip_prefix("http://").is_some_and(own));
    if !origin || !header(HOST).is_some_and(own) {
        return Some(Page::refused(403, "only for this machine"));
    }
    (request.method() != Method::GET).then(|| Page::refused(405, "give GET and a path"))
}

pub(crate) fn response(page: Page) -> Response {
    let mut response = Response::new(Body::from(page.body));
    *response.status_mut() = StatusCode::from_u16(page.status).unwrap_or_default();
    let corp = HeaderName::from_static("cross-origin-resource-policy");
    let headers = response.headers_mut();
    for (name, value) in [
        (CONTENT_TYPE, page.kind),
        // Another run may serve something else under the same address.
        (CACHE_CONTROL, "no-store"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (corp, "same-origin"),
        (REFERRER_POLICY, "no-referrer"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    if let Some((name, value)) = page.header
        && let Ok(value) = HeaderValue::try_from(value)
    {
        headers.insert(HeaderName::from_static(name), value);
    }
    response
}
