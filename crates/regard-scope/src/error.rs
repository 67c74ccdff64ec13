//! Every way that looking can go wrong.

use crate::mask::MaskError;
use std::fmt;
use std::path::{Path, PathBuf};

/// Why something could not be read, shown or written. A message names the place and the remedy.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read or written.
    File {
        /// Which one.
        path: PathBuf,
        /// What the system said.
        why: String,
    },
    /// A file is not what it should be.
    Format {
        /// Where in it.
        place: String,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// A mask that makes no sense.
    Mask(MaskError),
    /// The engine refused a call.
    Engine(regard::Error),
    /// Something was asked for that a trace does not hold.
    NotThere {
        /// What, as it was asked for.
        what: String,
        /// What there is.
        there: String,
    },
}

impl Error {
    pub(crate) fn file(path: &Path, why: &impl fmt::Display) -> Self {
        Self::File { path: path.into(), why: why.to_string() }
    }

    pub(crate) fn format(place: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Format { place: place.into(), why: why.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, why } => write!(f, "{}: {why}", path.display()),
            Self::Format { place, why } => write!(f, "{place}: {why}"),
            Self::Mask(error) => write!(f, "mask: {error}"),
            Self::Engine(error) => write!(f, "{error}"),
            Self::NotThere { what, there } => write!(f, "{what}: not found; available: {there}"),
        }
    }
}

/// A message contains that of its source.
impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Mask(error) => Some(error),
            Self::Engine(error) => Some(error),
            _ => None,
        }
    }
}

impl From<regard::Error> for Error {
    fn from(error: regard::Error) -> Self {
        Self::Engine(error)
    }
}

impl From<MaskError> for Error {
    fn from(error: MaskError) -> Self {
        Self::Mask(error)
    }
}
