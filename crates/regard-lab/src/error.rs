//! Every way that an experiment can fail to run. One that runs and does not hold is no error.

use std::fmt;

/// Why there is no report.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// No experiment, parameter or fault of this name.
    Unknown {
        /// What was looked for.
        what: &'static str,
        /// What was given.
        found: String,
        /// What there is.
        known: Vec<String>,
    },
    /// A parameter beyond its ends.
    Range {
        /// Which one.
        parameter: &'static str,
        /// What was given.
        found: usize,
        /// The least that it may be.
        least: usize,
        /// The most.
        most: usize,
    },
    /// From the engine.
    Attention(regard::Error),
    /// From operations on tensors.
    Burn(regard_burn::Error),
    /// From a model.
    Model(regard_models::Error),
    /// From training.
    Train(regard_train::Error),
    /// From a picture.
    Scope(regard_scope::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { what, found, known } => {
                let known = known.join(", ");
                let known = if known.is_empty() { "none".into() } else { known };
                write!(f, "{what}: no {found:?} here; there are {known}")
            }
            Self::Range { parameter, found, least, most } => {
                write!(f, "{parameter}: {found} is outside {least} to {most}")
            }
            Self::Attention(error) => error.fmt(f),
            Self::Burn(error) => error.fmt(f),
            Self::Model(error) => error.fmt(f),
            Self::Train(error) => error.fmt(f),
            Self::Scope(error) => error.fmt(f),
        }
    }
}

/// A message contains that of its source.
impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Attention(error) => Some(error),
            Self::Burn(error) => Some(error),
            Self::Model(error) => Some(error),
            Self::Train(error) => Some(error),
            Self::Scope(error) => Some(error),
            _ => None,
        }
    }
}

impl From<regard::Error> for Error {
    fn from(error: regard::Error) -> Self {
        Self::Attention(error)
    }
}

impl From<regard_burn::Error> for Error {
    fn from(error: regard_burn::Error) -> Self {
        Self::Burn(error)
    }
}

impl From<regard_models::Error> for Error {
    fn from(error: regard_models::Error) -> Self {
        Self::Model(error)
    }
}

impl From<regard_train::Error> for Error {
    fn from(error: regard_train::Error) -> Self {
        Self::Train(error)
    }
}

impl From<regard_scope::Error> for Error {
    fn from(error: regard_scope::Error) -> Self {
        Self::Scope(error)
    }
}
