//! What a server is told at its start.

use regard_models::{Error, Model};
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

/// A model and the name that requests give it.
#[derive(Debug)]
pub struct NamedModel {
    /// As in `"model": "smollm2"`. Of a translator, `zh-en` at its end tells the languages.
    pub name: String,
    /// The model.
    pub model: Model,
}

/// What bounds a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where it listens. An address that is not of the loopback needs `keys`.
    pub listen: SocketAddr,
    /// API keys. Without any, everybody on this machine may ask.
    pub keys: Vec<String>,
    /// Requests that wait, of each model.
    pub max_queued: usize,
    /// Their prompt tokens.
    pub max_queued_tokens: usize,
    /// Tokens that a request may generate.
    pub max_tokens: usize,
    /// Requests that an engine generates at once.
    pub max_batch: usize,
    /// How long a request may take.
    pub timeout: Duration,
    /// Bytes of all KV caches together.
    pub kv_memory: usize,
    /// Whether the beginnings of prompts are kept for later requests of the same key.
    pub prefix_cache: bool,
    /// Whether answers tell what the model looked at, where a request asks for it.
    pub attention: bool,
    /// After a signal to end: how long connections are still taken.
    pub drain_delay: Duration,
    /// After that: how long requests may still take.
    pub drain: Duration,
    /// Engines of each model.
    pub engines: usize,
    /// Compute threads of each engine; none: the CPUs, divided by the engines.
    pub threads: Option<usize>,
    /// Bytes of a request body.
    pub max_body: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            keys: Vec::new(),
            max_queued: 64,
            max_queued_tokens: 16384,
            max_tokens: 2048,
            max_batch: 32,
            timeout: Duration::from_secs(60),
            kv_memory: 2 << 30,
            prefix_cache: true,
            attention: false,
            drain_delay: Duration::from_secs(5),
            drain: Duration::from_secs(50),
            engines: 1,
            threads: None,
            max_body: 1 << 20,
        }
    }
}

impl Options {
    /// Whether a server may be started so.
    pub(crate) fn check(&self) -> Result<(), ServeError> {
        if !self.listen.ip().is_loopback() && self.keys.is_empty() {
            return Err(ServeError::NoKeys(self.listen));
        }
        let counts = [
            ("max_queued", self.max_queued),
            ("max_queued_tokens", self.max_queued_tokens),
            ("max_tokens", self.max_tokens),
            ("max_batch", self.max_batch),
            ("engines", self.engines),
            ("threads", self.threads.unwrap_or(1)),
            ("max_body", self.max_body),
        ];
        match counts.into_iter().find(|(_, count)| *count == 0) {
            Some((field, _)) => Err(ServeError::Option(format!("{field}: 0; give 1 or more"))),
            None => Ok(()),
        }
    }
}

/// Why a server could not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum ServeError {
    /// An address that others can reach, and no key.
    NoKeys(SocketAddr),
    /// An option that makes no sense.
    Option(String),
    /// The system refused.
    Io(String, std::io::Error),
    /// A model that could not be opened, or that no route serves.
    Model(String),
}

impl fmt::Display for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoKeys(address) => write!(
                f,
                "--listen {address}: others can reach this address; give --key-file, or listen on 127.0.0.1"
            ),
            Self::Option(why) | Self::Model(why) => f.write_str(why),
            Self::Io(what, error) => write!(f, "{what}: {error}"),
        }
    }
}

impl std::error::Error for ServeError {}

impl From<Error> for ServeError {
    fn from(error: Error) -> Self {
        Self::Model(error.to_string())
    }
}
