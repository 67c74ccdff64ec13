//! Every way that generating can go wrong, but for those of the model.

use std::fmt;

/// Why nothing could be generated. A message names the place, what is there and what may be.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum GenerateError {
    /// A field of [`GenerationOptions`](super::GenerationOptions), or of what is in them, that makes no sense.
    Field {
        /// Which one.
        field: &'static str,
        /// What it is.
        value: String,
        /// What it may be.
        allowed: String,
    },
    /// A prompt without tokens.
    Empty {
        /// Which prompt.
        row: usize,
    },
    /// A prompt that a state cannot hold.
    TooLong {
        /// Which prompt.
        row: usize,
        /// Its tokens.
        len: usize,
        /// The most that a state can hold.
        context: usize,
    },
    /// A token that the model does not have.
    Unknown {
        /// Which prompt.
        row: usize,
        /// The token.
        token: u32,
        /// How many the model has.
        vocab: usize,
    },
    /// The decoder returned too many scores, or too few.
    Scores {
        /// How many it returned.
        got: usize,
        /// How many tokens were to be scored.
        expected: usize,
        /// How many tokens there are.
        vocab: usize,
    },
    /// A score that has no probability: NaN or +inf.
    NotFinite {
        /// Of which prompt.
        row: usize,
        /// Of which token.
        token: u32,
    },
    /// All scores are -inf.
    NoSelection {
        /// Of which prompt.
        row: usize,
    },
    /// A constraint could not go on.
    Constraint {
        /// Of which prompt.
        row: usize,
        /// What it said.
        why: String,
    },
    /// A grammar that could not be made.
    Grammar {
        /// What is wrong with it.
        why: String,
    },
    /// A decoder that speculates, and without `truncate`.
    NoTruncate,
    /// A request for which there is not enough memory even if it is alone.
    Memory {
        /// Of which prompt.
        row: usize,
        /// Tokens that its states may come to hold.
        needed: usize,
        /// Tokens that all states together can hold.
        available: usize,
    },
}

impl fmt::Display for GenerateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field { field, value, allowed } => {
                write!(f, "{field}: {value}; it must be {allowed}")
            }
            Self::Empty { row } => {
                write!(f, "prompt {row}: it is empty; give at least a start token")
            }
            Self::TooLong { row, len, context } => write!(
                f,
                "prompt {row}: it has {len} tokens, the model can hold {context}; shorten it"
            ),
            Self::Unknown { row, token, vocab } => write!(
                f,
                "prompt {row}: token {token}, the model has {vocab}; ids must be below that"
            ),
            Self::Scores { got, expected, vocab } => write!(
                f,
                "decoder: it returned {got} scores after {expected} tokens, of a vocabulary of {vocab}; \
                 it must return one for each token of the vocabulary after each"
            ),
            Self::NotFinite { row, token } => write!(
                f,
                "prompt {row}: the model's score of token {token} is NaN or infinite; \
                 look at its weights and their number type"
            ),
            Self::NoSelection { row } => write!(
                f,
                "prompt {row}: the scores are all -inf; the model, the suppressed tokens and the constraint must allow one token"
            ),
            Self::Constraint { row, why } => write!(f, "prompt {row}: constraint: {why}"),
            Self::Grammar { why } => write!(f, "grammar: {why}"),
            Self::NoTruncate => {
                write!(f, "decoder: it speculates, and has no `truncate`; that needs both")
            }
            Self::Memory { row, needed, available } => write!(
                f,
                "prompt {row}: with what may be generated it needs a KV cache of {needed} tokens, {available} fit into memory; \
                 lower the tokens to generate, the beams, or raise the memory of the cache"
            ),
        }
    }
}

impl std::error::Error for GenerateError {}

/// Whether a model of such a size can be asked to continue a prompt.
pub(super) fn check_prompt(
    row: usize,
    prompt: &[u32],
    vocab: usize,
    context: Option<usize>,
) -> Result<(), GenerateError> {
    if prompt.is_empty() {
        return Err(GenerateError::Empty { row });
    }
    if let Some(context) = context.filter(|context| prompt.len() > *context) {
        return Err(GenerateError::TooLong { row, len: prompt.len(), context });
    }
    match prompt.iter().find(|token| **token as usize >= vocab) {
        Some(&token) => Err(GenerateError::Unknown { row, token, vocab }),
        None => Ok(()),
    }
}

/// Whether one token at least has a probability, and none has a nonsensical one.
pub(super) fn check_scores(row: usize, scores: &[f32]) -> Result<(), GenerateError> {
    let nonsense = |score: f32| score.is_nan() || score == f32::INFINITY;
    // Nearly always there is none: one look at all of them is faster than one at each.
    if scores.iter().fold(false, |found, score| found | nonsense(*score)) {
        let token = (0..).zip(scores).find(|(_, score)| nonsense(**score));
        return Err(GenerateError::NotFinite { row, token: token.map_or(0, |(token, _)| token) });
    }
    match scores.iter().any(|score| *score > f32::NEG_INFINITY) {
        true => Ok(()),
        false => Err(GenerateError::NoSelection { row }),
    }
}
