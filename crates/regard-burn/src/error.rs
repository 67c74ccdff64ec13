//! Every way a call can be wrong.

use std::fmt;

/// Why a call was refused, before any work.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// The engine refused it.
    Engine(regard::Error),
    /// An option has other sizes than the call.
    Sizes {
        /// Which one.
        option: &'static str,
        /// Its sizes.
        found: Vec<usize>,
        /// Those of the call.
        expected: Vec<usize>,
    },
    /// Tensors of different types.
    Types {
        /// Those of q, k and v.
        found: [String; 3],
    },
    /// A choice of keys through which nothing would be learned, and no estimate was asked for.
    NothingLearned,
    /// A target that is no class.
    Target {
        /// Its row.
        row: usize,
        /// The target.
        found: i64,
        /// Classes that there are.
        classes: usize,
    },
    /// Not one target for each row.
    Targets {
        /// Rows of scores.
        rows: usize,
        /// Targets.
        found: usize,
    },
    /// A share that is none.
    Smoothing {
        /// The share.
        found: f64,
    },
    /// A number that no row of the table has.
    Id {
        /// Which one of all, row after row.
        place: usize,
        /// The number.
        found: i64,
        /// Rows of the table.
        entries: usize,
    },
}

impl From<regard::Error> for Error {
    fn from(error: regard::Error) -> Self {
        Self::Engine(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Engine(error) => error.fmt(f),
            Self::Sizes { option, found, expected } => {
                write!(
                    f,
                    "{option}: its sizes are {found:?}, those of the call {expected:?}; they must be equal"
                )
            }
            Self::Types { found: [q, k, v] } => {
                write!(
                    f,
                    "types: q has {q}, k has {k}, v has {v}; cast them to one of f32, f64, f16 and bf16"
                )
            }
            Self::NothingLearned => write!(
                f,
                "a hard choice has no gradient by the scores: ask for straight_through, or detach q, k and v"
            ),
            Self::Target { row, found, classes } => write!(
                f,
                "target {found} of row {row}: there are {classes} classes, 0 to {}; rows that should not count need the target \
                 that is told as ignored",
                classes.saturating_sub(1)
            ),
            Self::Targets { rows, found } => {
                write!(
                    f,
                    "targets: there are {rows} rows and {found} targets; they must be equally many"
                )
            }
            Self::Smoothing { found } => {
                write!(f, "label smoothing: {found}; it must be at least 0 and below 1")
            }
            Self::Id { place, found, entries } => write!(
                f,
                "id {found} at place {place}: the table has {entries} rows, 0 to {}",
                entries.saturating_sub(1)
            ),
        }
    }
}

/// A message contains that of its source.
impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Engine(error) => Some(error),
            _ => None,
        }
    }
}
