//! How tokens are chosen and when to stop, as data; and what comes out.

use super::GenerateError;
use std::fmt;

/// How tokens are chosen. Where scores are equal, the lowest id comes first, in every search.
#[derive(Clone, Debug, PartialEq)]
pub enum DecodingStrategy {
    /// The likeliest token, each time.
    Greedy,
    /// A token by chance, as likely as the model says. The options work in the order of the fields, as in Hugging Face.
    Sample {
        /// Divides the scores: above 1 for more surprise, below for less.
        temperature: f32,
        /// Only so many of the likeliest tokens. Exactly so many: of tokens with equal scores at the last place, those of lowest id.
        top_k: Option<usize>,
        /// Only the likeliest tokens of what is left, until their probabilities add up to this: a token stays if those before it
        /// have less. So the likeliest always stays, and at 1 all do.
        top_p: Option<f32>,
        /// The beginning of chance. Each row draws from a stream of its own, which is that of (seed, row).
        seed: u64,
    },
    /// The likeliest sequence that a search through the best few at each length finds.
    ///
    /// A hypothesis is finished by an end token if that is one of the `width` best next steps of the row. The row ends when `width`
    /// hypotheses are finished and the best unfinished one, as it stands, is no better than the worst of them. With a penalty it
    /// could still become better by growing, but to wait for that is to search up to `max_tokens` always (Hugging Face decides the
    /// same by default). Width 1 is greedy search.
    Beam {
        /// How many unfinished hypotheses go on, and the most that are returned: from 1 to 256.
        width: usize,
        /// Hypotheses are compared by score / length^penalty; the length is that of the generated tokens with the end token, and
        /// without the prompt. At 0 short ones tend to win; at 1 it is the mean of a token.
        length_penalty: f32,
    },
}

impl DecodingStrategy {
    /// Whether the numbers make sense; [`generate`](super::generate()) asks it, and whoever reads options may do so earlier.
    pub fn check(&self) -> Result<(), GenerateError> {
        match *self {
            Self::Greedy => Ok(()),
            Self::Sample { temperature, top_k, top_p, seed: _ } => {
                let fine = temperature.is_finite() && temperature > 0.0;
                field(fine, "temperature", temperature, "finite and above 0; or search greedily")?;
                field(top_k != Some(0), "top_k", 0, "1 or more; or leave it out")?;
                let p = top_p.unwrap_or(1.0);
                field(p > 0.0 && p <= 1.0, "top_p", p, "above 0 and at most 1; or leave it out")
            }
            Self::Beam { width, length_penalty } => {
                let fine = (1..=MAX_WIDTH).contains(&width);
                field(fine, "width", width, format!("from 1 to {MAX_WIDTH} (beams)"))?;
                let fine = length_penalty.is_finite() && length_penalty >= 0.0;
                field(fine, "length_penalty", length_penalty, "finite and 0 or more")
            }
        }
    }
}

/// Beams of a search: more than any gains from. Each has a state of its own, and scores of all tokens at every step.
pub(crate) const MAX_WIDTH: usize = 256;

/// When a row ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoppingCriteria {
    /// After so many generated tokens at the latest.
    pub max_tokens: usize,
    /// After any of these. None: a row goes on until another reason ends it.
    pub end: Vec<u32>,
}

impl StoppingCriteria {
    /// Whether a model with so many tokens can stop so.
    pub fn check(&self, vocab: usize) -> Result<(), GenerateError> {
        field(self.max_tokens > 0, "max_tokens", self.max_tokens, "1 or more")?;
        match self.end.iter().find(|token| **token as usize >= vocab) {
            Some(token) => field(false, "end", token, format!("below {vocab}, as all ids")),
            None => Ok(()),
        }
    }
}

fn field(
    fine: bool,
    field: &'static str,
    value: impl fmt::Display,
    allowed: impl Into<String>,
) -> Result<(), GenerateError> {
    match fine {
        true => Ok(()),
        false => {
            Err(GenerateError::Field { field, value: value.to_string(), allowed: allowed.into() })
        }
    }
}

/// How a prompt goes on.
#[derive(Clone, Debug, PartialEq)]
pub struct GeneratedSequence {
    /// The tokens after the prompt, and the end token if that is why it ended.
    pub tokens: Vec<u32>,
    /// The sum of the tokens' log-probabilities (natural logarithm) in the model itself: before temperature, `top_k`, `top_p` and
    /// length penalty. So scores of different searches can be compared.
    pub score: f64,
    /// Why there are no more tokens.
    pub finish_reason: FinishReason,
    /// What else a beam search found, best first; empty in all other cases.
    pub others: Vec<Self>,
}

/// Why a row ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// By an end token.
    EndToken,
    /// There are `max_tokens`.
    MaxTokens,
    /// The state is full. The last token was chosen, and could not be fed any more.
    Context,
    /// `on_token` said so.
    Interrupted,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_that_makes_no_sense_is_named_with_its_value_and_what_it_may_be() {
        let sample = |temperature, top_k, top_p| {
            DecodingStrategy::Sample { temperature, top_k, top_p, seed: 0 }.check()
        };
        let beam = |width, length_penalty| DecodingStrategy::Beam { width, length_penalty }.check();
        let says = |result: Result<(), GenerateError>, start: &str| {
            let message = result.unwrap_err().to_string();
            assert!(message.starts_with(start), "{message}");
        };
        says(sample(0.0, None, None), "temperature: 0; it must be finite and above 0");
        says(sample(f32::NAN, None, None), "temperature: NaN");
        says(sample(f32::INFINITY, None, None), "temperature: inf");
        says(sample(1.0, Some(0), None), "top_k: 0; it must be 1 or more");
        says(sample(1.0, None, Some(0.0)), "top_p: 0; it must be above 0 and at most 1");
        says(sample(1.0, None, Some(1.5)), "top_p: 1.5");
        says(sample(1.0, None, Some(f32::NAN)), "top_p: NaN");
        says(beam(0, 1.0), "width: 0; it must be from 1 to 256 (beams)");
        says(beam(257, 1.0), "width: 257; it must be from 1 to 256");
        says(beam(usize::MAX, 1.0), "width: 18446744073709551615");
        says(beam(4, -1.0), "length_penalty: -1; it must be finite and 0 or more");
        says(
            StoppingCriteria { max_tokens: 0, end: vec![] }.check(5),
            "max_tokens: 0; it must be 1 or more",
        );
        says(
            StoppingCriteria { max_tokens: 1, end: vec![2, 5] }.check(5),
            "end: 5; it must be below 5",
        );
        assert_eq!(sample(0.7, Some(1), Some(1.0)), Ok(()));
        assert_eq!(beam(1, 0.0), Ok(()));
    }
}
