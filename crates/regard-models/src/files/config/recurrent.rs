//! The sizes of recurrent models.

use super::{Architecture, Config};
use serde::{Deserialize, Serialize};

/// What a [`Seq2Seq`](crate::Seq2Seq) is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seq2SeqConfig {
    /// Features of a token.
    pub embedding: usize,
    /// Features of a state of the encoder, each way.
    pub encoder_hidden: usize,
    /// Features of a state of the decoder.
    pub decoder_hidden: usize,
    /// Units of the hidden layer of the attention. Without attention the decoder knows of the source what both ways of the encoder
    /// ended with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_hidden: Option<usize>,
    /// Tokens of the source.
    pub source_vocab: usize,
    /// Tokens of the target.
    pub target_vocab: usize,
}

/// What a [`Han`](crate::Han) is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HanConfig {
    /// Features of a word.
    pub embedding: usize,
    /// Features of a state over words, each way.
    pub word_hidden: usize,
    /// Units of the attention over words.
    pub word_attention: usize,
    /// Features of a state over sentences, each way.
    pub sentence_hidden: usize,
    /// Units of the attention over sentences.
    pub sentence_attention: usize,
    /// Words.
    pub vocab: usize,
    /// What documents are told apart into.
    pub classes: usize,
}

impl Config {
    /// A recurrent translator of these sizes. Where both languages share their tokens, `target_vocab` of the result is to be `None`.
    #[must_use]
    pub fn seq2seq(sizes: Seq2SeqConfig) -> Self {
        Self {
            d_model: sizes.decoder_hidden,
            vocab: sizes.source_vocab,
            target_vocab: Some(sizes.target_vocab),
            seq2seq: Some(sizes),
            ..Self::of(Architecture::Seq2Seq)
        }
    }

    /// A hierarchical attention network of these sizes, with a name for each class.
    #[must_use]
    pub fn han(sizes: HanConfig, labels: Vec<String>) -> Self {
        Self {
            d_model: 2 * sizes.sentence_hidden,
            vocab: sizes.vocab,
            labels,
            han: Some(sizes),
            ..Self::of(Architecture::Han)
        }
    }
}
