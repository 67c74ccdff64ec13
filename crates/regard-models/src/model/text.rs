//! Between texts and tokens, for all tasks.

use crate::error::Error;
use crate::files::{Tokens, TransformerConfig};
use crate::generate::{FinishReason, GeneratedSequence};

/// What a model writes.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationOutput {
    /// The text, without its prompt.
    pub text: String,
    /// Its tokens, the end among them.
    pub tokens: Vec<u32>,
    /// The sum of their log-probabilities.
    pub score: f64,
    /// Why it ended.
    pub finish_reason: FinishReason,
}

impl GenerationOutput {
    pub(super) fn new(text: String, one: GeneratedSequence) -> Self {
        let GeneratedSequence { tokens, score, finish_reason, .. } = one;
        Self { text, tokens, score, finish_reason }
    }
}

/// The vocabulary of a model, with what limits its texts.
#[derive(Debug)]
pub(super) struct Vocabulary {
    pub(super) title: String,
    pub(super) tokens: Tokens,
    /// Of what it writes, if that is another text than it reads.
    pub(super) target: Option<Tokens>,
    pub(super) context: Option<usize>,
    pub(super) bos: Option<u32>,
    pub(super) eos: Vec<u32>,
    /// What was left out when the files were read.
    pub(super) notes: Vec<String>,
}

impl Vocabulary {
    pub(super) fn new(
        title: String,
        tokens: Option<Tokens>,
        target: Option<Tokens>,
        config: &TransformerConfig,
    ) -> Result<Self, Error> {
        let stacks = config.encoder.iter().chain(&config.decoder);
        let context = stacks.filter_map(|stack| stack.context).min();
        Ok(Self {
            tokens: present(&title, tokens)?,
            title,
            target,
            context,
            bos: config.bos,
            eos: config.eos.clone(),
            notes: Vec::new(),
        })
    }

    /// The tokens of a text that the model can hold.
    pub(super) fn fitting(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.fitting_of(&self.tokens, text)
    }

    /// The same of the tokens that it reads, or of those that it writes.
    pub(super) fn fitting_of(&self, tokens: &Tokens, text: &str) -> Result<Vec<u32>, Error> {
        short(text)?;
        let tokens = tokens.encode(text)?;
        let most = self.context.unwrap_or(MAX_TOKENS);
        if tokens.len() > most {
            let why = format!("it has {} tokens, the model holds {most}; shorten it", tokens.len());
            return Err(Error::Tokens { what: "the text".into(), why });
        }
        Ok(tokens)
    }

    /// The tokens of what it writes.
    pub(super) fn written(&self) -> &Tokens {
        self.target.as_ref().unwrap_or(&self.tokens)
    }

    /// The first token of what a translator writes.
    pub(super) fn begin(&self) -> Result<u32, Error> {
        let why = "missing in the configuration; a translator starts with it";
        self.bos.ok_or_else(|| Error::format("bos", why))
    }
}

/// Refuses a model without a vocabulary.
pub(super) fn present(title: &str, tokens: Option<Tokens>) -> Result<Tokens, Error> {
    let why = "the model has no vocabulary beside it";
    tokens.ok_or_else(|| Error::Tokens { what: title.into(), why: why.into() })
}

/// Refuses a text that is longer than any that is read, before time is spent on its tokens.
pub(super) fn short(text: &str) -> Result<(), Error> {
    if text.len() <= MAX_TEXT {
        return Ok(());
    }
    let why = format!("it has {} bytes, {MAX_TEXT} are read at most; shorten it", text.len());
    Err(Error::Tokens { what: "the text".into(), why })
}

/// Refuses a text without tokens where there is nothing to do with it.
pub(super) fn some(tokens: Vec<u32>) -> Result<Vec<u32>, Error> {
    match tokens.is_empty() {
        true => {
            let why = "it has no tokens in the vocabulary of this model; give at least one";
            Err(Error::Tokens { what: "the text".into(), why: why.into() })
        }
        false => Ok(tokens),
    }
}

/// Refuses results that are not finite: weights that are finite may still be too large to compute with.
pub(super) fn finite(what: &str, numbers: &[f32]) -> Result<(), Error> {
    match numbers.iter().find(|x| !x.is_finite()) {
        None => Ok(()),
        Some(x) => {
            let why = format!("{x} came out; the weights of the model are too large for f32");
            Err(Error::format(what, why))
        }
    }
}

/// The softmax of scores; of a single one, as a reranker has it, the sigmoid.
pub(super) fn probabilities(scores: &[f32]) -> Vec<f32> {
    if let [score] = scores {
        return vec![1.0 / (1.0 + (-score).exp())];
    }
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f32> = scores.iter().map(|score| (score - most).exp()).collect();
    let sum: f32 = powers.iter().sum();
    powers.into_iter().map(|power| power / sum).collect()
}

/// Tokens as labels.
pub(super) fn words(tokens: &Tokens, ids: &[u32]) -> Vec<String> {
    ids.iter().map(|id| tokens.token(*id).unwrap_or_else(|| id.to_string())).collect()
}

/// Bytes of a text.
const MAX_TEXT: usize = 1 << 20;
/// Tokens of a text where a model has no context length of its own.
const MAX_TOKENS: usize = 1 << 14;
