//! `GET /v1/look/{id}`: what every head looked at in an answer, as a page. Its tokens go through the model once more.

use crate::app::App;
use crate::engine::{pool, threads};
use crate::error::ApiError;
use crate::keys::KeyId;
use crate::looks::{Look, Looks, id};
use crate::models::Entry;
use crate::pages::{Page, response};
use axum::Extension;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use regard::Machine;
use regard_models::generate::Request;
use regard_scope::{Trace, trace_page};
use sha2::{Digest, Sha256};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

/// Choices of a call with pages.
const CHOICES: usize = 16;
/// Cells of the map of a head, each way: as `regard look` has them.
const CELLS: usize = 128;
/// Seconds after which to try again while another page is made.
const RETRY: u64 = 2;

/// The choices of a call whose pages are asked for: tokens, as far as they are known, and ids.
#[derive(Debug)]
pub(super) struct Pages {
    looks: Arc<Looks>,
    key: KeyId,
    /// A chat template and a system prompt may be before what the client said: words of prompts are not told.
    chat: bool,
    choices: Vec<(String, Vec<u32>)>,
}

impl Pages {
    pub(super) fn new(
        app: &App,
        key: KeyId,
        chat: bool,
        requests: &[Request],
    ) -> Result<Self, ApiError> {
        let count = requests.len();
        if count > CHOICES {
            let why = format!(
                "attention.page: {count} choices; {CHOICES} at most have pages; ask for fewer"
            );
            return Err(ApiError::field("attention.page", why));
        }
        let choice = |request: &Request| {
            let id = id().map_err(|error| {
                tracing::error!(%error, "the system has no random numbers");
                ApiError::internal()
            })?;
            Ok((id, request.prompt.clone()))
        };
        let choices = requests.iter().map(choice).collect::<Result<_, ApiError>>()?;
        Ok(Self { looks: app.looks.clone(), key, chat, choices })
    }

    /// A token was generated.
    pub(super) fn push(&mut self, index: usize, token: u32) {
        if let Some((_, tokens)) = self.choices.get_mut(index) {
            tokens.push(token);
        }
    }

    /// Keeps a choice that has ended after so many tokens of a prompt. Returns where its page is.
    pub(super) fn keep(
        &mut self,
        index: usize,
        prompt: usize,
        entry: &Arc<Entry>,
    ) -> Option<String> {
        let (id, tokens) = std::mem::take(self.choices.get_mut(index)?);
        let path = format!("/v1/look/{id}");
        let unnamed = if self.chat { prompt } else { 0 };
        let look = Look { entry: entry.clone(), tokens, unnamed };
        self.looks.keep(id, self.key, look, Instant::now());
        Some(path)
    }
}

pub(super) async fn route(
    State(app): State<Arc<App>>,
    Extension(key): Extension<KeyId>,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let deadline = app.deadline(&headers)?;
    // What is no text is no id.
    let found = id.ok().and_then(|Path(id)| app.looks.find(&id, key, Instant::now()));
    let look = found.ok_or_else(|| {
        let message = "no such page; one is kept for 10 minutes, for the key whose request asked for it by `attention.page`";
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
            .with_code("look_not_found")
    })?;
    let Ok(turn) = app.looks.making.clone().try_acquire_owned() else {
        let message = format!("another page is being made; try again in {RETRY} s");
        return Err(ApiError::busy(message, RETRY));
    };
    let threads = threads(&app.options);
    let making = tokio::task::spawn_blocking(move || {
        let made = page(&look, threads);
        // Also where nobody waits for it any more.
        drop(turn);
        made
    });
    let made = tokio::time::timeout_at(deadline.into(), making).await;
    let page = made.map_err(|_| ApiError::late())?.map_err(|_| ApiError::internal())??;
    let header = Some(("content-security-policy", POLICY.clone()));
    let kind = "text/html; charset=utf-8";
    Ok(response(Page { status: 200, kind, header, body: page.into_bytes() }))
}

/// The page that `regard look` makes of a text, with a pool of its own: engines go on.
fn page(look: &Look, threads: usize) -> Result<String, ApiError> {
    #[cfg(feature = "failpoints")]
    fail::fail_point!("look");
    let failed = |why: &dyn std::fmt::Display| {
        tracing::error!(model = look.entry.name, %why, "a page could not be made");
        ApiError::internal()
    };
    let pool = pool(threads).map_err(|e| failed(&e))?;
    pool.install(|| {
        let trace = trace(look).map_err(|e| failed(&e))?;
        let made = trace_page(&trace, Machine::detect(), CELLS, &mut |_, _| ());
        made.map_err(|e| failed(&e))
    })
}

fn trace(look: &Look) -> Result<Trace, regard_models::Error> {
    let mut trace = look.entry.model.causal_lm()?.look_tokens(&look.tokens)?;
    trace.title.clone_from(&look.entry.name);
    if look.unnamed > 0 {
        trace.title.push_str(" (·n: token n of the prompt)");
    }
    for axis in trace.axes.values_mut() {
        for (position, label) in axis.labels.iter_mut().enumerate().take(look.unnamed) {
            *label = format!("·{position}");
        }
    }
    Ok(trace)
}

/// What a browser may do with a page: run its script and use its style, which are known by their hashes, and nothing else. Both are of a
/// page without data: what a model writes never becomes a script.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let empty = trace_page(&Trace::default(), Machine::detect(), CELLS, &mut |_, _| ());
    let empty = empty.unwrap_or_default();
    let hash = |[begin, end]: [&str; 2]| {
        let found = empty.split_once(begin).and_then(|(_, rest)| rest.split_once(end));
        let digest = Sha256::digest(found.map_or("", |(text, _)| text));
        format!("'sha256-{}'", STANDARD.encode(digest))
    };
    let script = hash(["<script type=\"module\">", "</script>"]);
    let style = hash(["<style>", "</style>"]);
    format!(
        "default-src 'none'; script-src {script}; style-src {style}; img-src data:; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'"
    )
});
