//! Every way that training can fail.

use std::fmt;
use std::path::{Path, PathBuf};

/// Why something could not be trained. A message names the place, what is there and what would be right.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read or written, or is not what it should be.
    File {
        /// Which one.
        path: PathBuf,
        /// The line, from 1; 0 where it is about the whole.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// A setting that makes no sense.
    Setting {
        /// Its key, as `training.lr`.
        key: String,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// Data that nothing can be learned from.
    Data(String),
    /// Something is no number any more.
    Diverged {
        /// At which step.
        step: u64,
        /// What: the loss, its gradient.
        what: &'static str,
        /// What it is.
        value: f64,
    },
    /// Of the models.
    Model(regard_models::Error),
    /// Of an operation.
    Layer(regard_burn::Error),
    /// Of the microscope.
    Scope(String),
    /// Of what ranks do together.
    Ranks(regard_ranks::RanksError),
}

impl Error {
    pub(crate) fn file(path: &Path, why: &impl fmt::Display) -> Self {
        Self::File { path: path.into(), line: 0, why: why.to_string() }
    }

    pub(crate) fn line(path: &Path, line: usize, why: impl Into<String>) -> Self {
        Self::File { path: path.into(), line, why: why.into() }
    }

    pub(crate) fn setting(key: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Setting { key: key.into(), why: why.into() }
    }

    pub(crate) fn data(why: impl Into<String>) -> Self {
        Self::Data(why.into())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, line: 0, why } => write!(f, "{}: {why}", path.display()),
            Self::File { path, line, why } => write!(f, "{}, line {line}: {why}", path.display()),
            Self::Setting { key, why } => write!(f, "{key}: {why}"),
            Self::Data(why) | Self::Scope(why) => f.write_str(why),
            Self::Diverged { step, what, value } => write!(
                f,
                "step {step}: {what} is {value}; training diverged; lower the learning rate (training.lr), or lengthen the warm-up"
            ),
            Self::Model(error) => error.fmt(f),
            Self::Layer(error) => error.fmt(f),
            Self::Ranks(error) => error.fmt(f),
        }
    }
}

/// A message contains that of its source.
impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Model(error) => Some(error),
            Self::Layer(error) => Some(error),
            Self::Ranks(error) => Some(error),
            _ => None,
        }
    }
}

impl From<regard_models::Error> for Error {
    fn from(error: regard_models::Error) -> Self {
        Self::Model(error)
    }
}

impl From<regard_burn::Error> for Error {
    fn from(error: regard_burn::Error) -> Self {
        Self::Layer(error)
    }
}

impl From<regard_ranks::RanksError> for Error {
    fn from(error: regard_ranks::RanksError) -> Self {
        Self::Ranks(error)
    }
}
