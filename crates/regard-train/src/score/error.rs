//! Every way that a score can be refused.

use std::fmt;

/// Why there is no score.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScoreError {
    /// There is not one reference for each hypothesis.
    Counts {
        /// How many lines were translated.
        hypotheses: usize,
        /// How many lines they were to be held against.
        references: usize,
    },
    /// There are no lines.
    Empty,
    /// A setting has a value that means nothing.
    Setting {
        /// Its name.
        name: &'static str,
        /// What it was set to.
        value: String,
        /// What would be understood.
        wanted: &'static str,
    },
}

impl fmt::Display for ScoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Counts { hypotheses, references } => write!(
                f,
                "{hypotheses} hypotheses and {references} references: give one reference for each hypothesis, \
                 in the same order; an empty translation is an empty line"
            ),
            Self::Empty => {
                write!(f, "0 hypotheses and 0 references: a score needs one line or more")
            }
            Self::Setting { name, value, wanted } => {
                write!(f, "{name} is {value:?}, and should be {wanted}")
            }
        }
    }
}

impl std::error::Error for ScoreError {}
