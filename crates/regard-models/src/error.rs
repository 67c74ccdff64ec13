//! Every way that a model can fail to be had.

use crate::generate::GenerateError;
use std::fmt;
use std::path::{Path, PathBuf};

/// Why a model could not be read, written or fetched. A message names the thing, both numbers and the remedy.
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
    /// A tensor has another shape than the model asks for.
    Shape {
        /// Its name.
        tensor: String,
        /// The shape in the file.
        there: Vec<usize>,
        /// The shape that was asked for.
        wanted: Vec<usize>,
    },
    /// A tensor was asked for that the file does not have.
    Missing {
        /// Its name.
        tensor: String,
        /// The names in the file that are most like it.
        near: Vec<String>,
    },
    /// A setting that would change the numbers, and that nothing here knows how to follow.
    Unsupported {
        /// The name of the setting.
        field: String,
        /// What it is set to.
        value: String,
        /// What would be understood.
        known: String,
    },
    /// A text that has no tokens, or a token that has no text.
    Tokens {
        /// What could not be turned.
        what: String,
        /// Why not.
        why: String,
    },
    /// The engine refused a call.
    Engine(regard::Error),
    /// A product of matrices was refused.
    Product(regard_matmul::Error),
    /// A layer refused its input.
    #[cfg(feature = "burn")]
    Layer(regard_burn::Error),
    /// Generation was refused, or a model gave scores that are none.
    Generate(GenerateError),
    /// What attention saw cannot be told in a trace.
    NotRecorded {
        /// What stands in the way.
        what: String,
    },
    /// A model could not be fetched.
    Fetch {
        /// Which one.
        model: String,
        /// What the program that should fetch it said last.
        why: String,
    },
}

impl Error {
    pub(crate) fn file(path: &Path, why: &impl fmt::Display) -> Self {
        Self::File { path: path.into(), why: why.to_string() }
    }

    pub(crate) fn format(place: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Format { place: place.into(), why: why.into() }
    }

    pub(crate) fn unsupported(
        field: impl Into<String>,
        value: &impl fmt::Display,
        known: impl Into<String>,
    ) -> Self {
        Self::Unsupported { field: field.into(), value: value.to_string(), known: known.into() }
    }

    /// Of a prompt that has no source.
    pub(crate) fn no_source(row: usize, sources: usize) -> Self {
        let why =
            format!("it has no source, there are {sources}; there must be one for each prompt");
        Self::format(format!("prompt {row}"), why)
    }

    /// The same, with the file that it is about.
    pub(crate) fn of(self, path: &Path) -> Self {
        match self {
            Self::File { .. } | Self::Fetch { .. } => self,
            other => Self::file(path, &other),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, why } => write!(f, "{}: {why}", path.display()),
            Self::Format { place, why } => write!(f, "{place}: {why}"),
            Self::Shape { tensor, there, wanted } => write!(
                f,
                "tensor `{tensor}`: the file has shape {there:?}, the model asks for {wanted:?}; \
                 does the configuration belong to these weights?"
            ),
            Self::Missing { tensor, near } if near.is_empty() => {
                write!(f, "tensor `{tensor}`: not found in the file")
            }
            Self::Missing { tensor, near } => {
                write!(f, "tensor `{tensor}`: not in the file; it has `{}`", near.join("`, `"))
            }
            Self::Unsupported { field, value, known } => {
                write!(f, "{field} = {value}: not supported; {known}")
            }
            Self::Tokens { what, why } => write!(f, "{what}: {why}"),
            Self::Engine(error) => error.fmt(f),
            Self::Product(error) => error.fmt(f),
            #[cfg(feature = "burn")]
            Self::Layer(error) => error.fmt(f),
            Self::Generate(error) => error.fmt(f),
            Self::NotRecorded { what } => {
                write!(
                    f,
                    "recording: a trace stores scaled dot products with a full or causal mask, not {what}"
                )
            }
            Self::Fetch { model, why } => write!(f, "{model}: could not be fetched: {why}"),
        }
    }
}

/// A message contains that of its source.
impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Engine(error) => Some(error),
            Self::Product(error) => Some(error),
            #[cfg(feature = "burn")]
            Self::Layer(error) => Some(error),
            Self::Generate(error) => Some(error),
            _ => None,
        }
    }
}

#[cfg(feature = "burn")]
impl From<regard_burn::Error> for Error {
    fn from(error: regard_burn::Error) -> Self {
        Self::Layer(error)
    }
}

impl From<regard::Error> for Error {
    fn from(error: regard::Error) -> Self {
        Self::Engine(error)
    }
}

impl From<regard_matmul::Error> for Error {
    fn from(error: regard_matmul::Error) -> Self {
        Self::Product(error)
    }
}

impl From<GenerateError> for Error {
    fn from(error: GenerateError) -> Self {
        Self::Generate(error)
    }
}
