//! An HTTP server for models: the APIs of OpenAI (completions, chat, embeddings), Text Embeddings Inference and LibreTranslate.
//!
//! A request takes one straight line: bytes ─► fields (strict) ─► tokens ─► admission (bounded queue) ─► an engine ─► events ─► JSON or SSE.
//! An engine is one OS thread with its own pool of compute threads, apart from the single thread of tokio that speaks HTTP. Requests of
//! a model are generated together by continuous batching; the tokens and log-probabilities of an answer do not depend on what else is
//! served. Prompts are never logged.
//!
//! Without the feature `models` only the accept loop, [`listen`], and [`pages`] are left.

#![forbid(unsafe_code)]

// The map: a module imports only modules that are listed before it.
//
//   listen     connections: limits, time limits, graceful end
//   host       names of this machine in a Host header
//   pages      pages for a browser on this machine
//   options    what a server is told at its start
//   error      errors as OpenAI's objects
//   fields     JSON bodies, field by field
//   metrics    counters and histograms for Prometheus
//   queue      bounded admission
//   keys       who may ask
//   engine     threads that compute
//   models     models by name, with their engines
//   looks      answers that a page may be asked of
//   app        what all routes share
//   routes     requests and answers
//   server     start, signals, drain

#[cfg(feature = "models")]
mod app;
#[cfg(feature = "models")]
mod engine;
#[cfg(feature = "models")]
mod error;
#[cfg(feature = "models")]
mod fields;
mod host;
#[cfg(feature = "models")]
mod keys;
mod listen;
#[cfg(feature = "models")]
mod looks;
#[cfg(feature = "models")]
mod metrics;
#[cfg(feature = "models")]
mod models;
#[cfg(feature = "models")]
mod options;
mod pages;
#[cfg(feature = "models")]
mod queue;
#[cfg(feature = "models")]
mod routes;
#[cfg(feature = "models")]
mod server;

pub use host::is_local;
pub use listen::{Limits, listen};
#[cfg(feature = "models")]
pub use options::{NamedModel, Options, ServeError};
pub use pages::{Page, pages};
#[cfg(feature = "models")]
pub use routes::ROUTES;
#[cfg(feature = "models")]
pub use server::{serve, serve_until};
