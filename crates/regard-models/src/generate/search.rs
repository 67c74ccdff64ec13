//! How tokens are chosen and when to stop, as data; and what comes out.

use super::{AttentionProbe, Constraint, GenerateError, LogitsProcessors};
use std::fmt;

/// All that a call can be told.
#[derive(Clone, Debug)]
pub struct GenerationOptions {
    /// How tokens are chosen.
    pub strategy: DecodingStrategy,
    /// When a row ends.
    pub stop: StoppingCriteria,
    /// What changes the scores before.
    pub processors: LogitsProcessors,
    /// What the tokens of each row must be a sentence of. It needs an end token to end by.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Speculates by prompt lookup: where the last 2 or 3 tokens were there before, up to so many of those that followed are fed
    /// together, and those that the strategy would have chosen are kept. The tokens are the same where a decoder's scores do not depend
    /// on how many tokens it is fed at once. 0: never; and never in a beam search, nor by decoders without [`Decoder::speculates`].
    ///
    /// [`Decoder::speculates`]: super::Decoder::speculates
    pub prompt_lookup: usize,
    /// For each token, the likeliest so many are told with their log-probabilities. Not in a beam search.
    pub top_log_probabilities: usize,
    /// What is told of attention with each token. Then nothing is speculated. Not in a beam search.
    pub attention: Option<AttentionProbe>,
}

impl GenerationOptions {
    /// With nothing but these.
    pub fn new(strategy: DecodingStrategy, stop: StoppingCriteria) -> Self {
        let processors = LogitsProcessors::default();
        Self {
            strategy,
            stop,
            processors,
            constraint: None,
            prompt_lookup: 0,
            top_log_probabilities: 0,
            attention: None,
        }
    }

    /// Whether a model with so many tokens can be asked so.
    pub fn check(&self, vocab: usize) -> Result<(), GenerateError> {
        self.strategy.check()?;
        self.stop.check(vocab)?;
        self.processors.check(vocab)?;
        let lookup = self.prompt_lookup;
        field(lookup <= MAX_LOOKUP, "prompt_lookup", lookup, format!("at most {MAX_LOOKUP}"))?;
        let top = self.top_log_probabilities;
        field(top <= MAX_TOP, "top_log_probabilities", top, format!("at most {MAX_TOP}"))?;
        let fine = self.constraint.is_none() || !self.stop.end.is_empty();
        field(fine, "end", "none", "one token at least, where a constraint says when to end")
    }

    /// Whether scores are chosen from as they are.
    pub(super) fn plain(&self) -> bool {
        self.constraint.is_none() && self.processors == LogitsProcessors::default()
    }
}

/// How many tokens a call had and how long they took, over all its rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// The rows.
    pub prompts: usize,
    /// Tokens of the prompts.
    pub prompt_tokens: usize,
    /// Those of them that a prompt cache had.
    pub cached_tokens: usize,
    /// Tokens of the returned sequences, without those of `others`.
    pub generated_tokens: usize,
    /// Until the first token of each row was chosen.
    pub prompt_seconds: f64,
    /// From then on.
    pub generation_seconds: f64,
}

impl Usage {
    /// Tokens of the prompts that were fed in a second; 0 if there were none.
    #[must_use]
    pub fn prompt_tokens_per_second(&self) -> f64 {
        rate(self.prompt_tokens.saturating_sub(self.cached_tokens), self.prompt_seconds)
    }

    /// Generated tokens in a second, without the first of each row, which comes of its prompt; 0 if there were none.
    #[must_use]
    pub fn generated_tokens_per_second(&self) -> f64 {
        rate(self.generated_tokens.saturating_sub(self.prompts), self.generation_seconds)
    }
}

fn rate(tokens: usize, seconds: f64) -> f64 {
    if tokens == 0 { 0.0 } else { tokens as f64 / seconds }
}

/// How tokens are chosen. Where scores are equal, the lowest id comes first, in every search.
#[derive(Clone, Debug, PartialEq)]
pub enum DecodingStrategy {
    /// The likeliest token, each time.
    Greedy,
    /// A token by chance, as likely as the model says.
    Sample(Sampling),
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

/// How a token is drawn. The options work in the order of the fields, as in Hugging Face. By default the model's own probabilities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the scores: above 1 for more surprise, below for less.
    pub temperature: f32,
    /// Only so many of the likeliest tokens. Exactly so many: of tokens with equal scores at the last place, those of lowest id.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens of what is left, until their probabilities add up to this: a token stays if those before it
    /// have less. So the likeliest always stays, and at 1 all do.
    pub top_p: Option<f32>,
    /// Only tokens with at least this share of the probability of the likeliest.
    pub min_p: Option<f32>,
    /// The beginning of chance. Each row draws from a stream of its own, which is that of (seed, row).
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: None, min_p: None, seed: 0 }
    }
}

impl DecodingStrategy {
    /// Whether the numbers make sense; [`generate`](super::generate()) asks it, and whoever reads options may do so earlier.
    pub fn check(&self) -> Result<(), GenerateError> {
        match *self {
            Self::Greedy => Ok(()),
            Self::Sample(Sampling { temperature, top_k, top_p, min_p, seed: _ }) => {
                let fine = temperature.is_finite() && temperature > 0.0;
                field(fine, "temperature", temperature, "finite and above 0; or search greedily")?;
                field(top_k != Some(0), "top_k", 0, "1 or more; or leave it out")?;
                let p = top_p.unwrap_or(1.0);
                field(p > 0.0 && p <= 1.0, "top_p", p, "above 0 and at most 1; or leave it out")?;
                let p = min_p.unwrap_or(0.0);
                field((0.0..=1.0).contains(&p), "min_p", p, "from 0 to 1; or leave it out")
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

/// Tokens that are guessed at once: each has scores of all tokens.
const MAX_LOOKUP: usize = 64;

/// Log-probabilities, or attention weights of a head, that are told with a token, at most.
pub(super) const MAX_TOP: usize = 64;

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

pub(super) fn field(
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
    /// The sum of the tokens' log-probabilities (natural logarithm) in the model itself: before temperature, `top_k`, `top_p`,
    /// length penalty, [`LogitsProcessors`](super::LogitsProcessors) and constraint. So scores of different searches can be compared.
    /// One exception: a beam search with processors or a constraint ranks by the scores that they leave, and tells that sum.
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
    /// The text has one of the stop strings.
    StopString,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_that_makes_no_sense_is_named_with_its_value_and_what_it_may_be() {
        let sample = |temperature, top_k, top_p| {
            let sampling = Sampling { temperature, top_k, top_p, ..Sampling::default() };
            DecodingStrategy::Sample(sampling).check()
        };
        let min_p =
            |p| DecodingStrategy::Sample(Sampling { min_p: Some(p), ..Sampling::default() });
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
        says(min_p(1.5).check(), "min_p: 1.5; it must be from 0 to 1");
        says(min_p(f32::NAN).check(), "min_p: NaN");
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
