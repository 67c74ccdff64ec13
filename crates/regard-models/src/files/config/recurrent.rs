//! The sizes of recurrent models.

use super::{Architecture, Config};
use crate::error::Error;
use serde::{Deserialize, Serialize};

/// The attention score of a [`Seq2Seq`](crate::Seq2Seq), and with it the decoder: Bahdanau's or Luong's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionScore {
    /// `v . tanh(W q + U k)` of Bahdanau et al. 2015; the query is the previous state of the decoder.
    #[default]
    Additive,
    /// `q . k` of Luong et al. 2015; in all three of theirs the query is the current state of the decoder.
    Dot,
    /// `q . W k`
    General,
    /// `v . tanh(W [q; k])`
    Concat,
}

impl AttentionScore {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
    fn is_additive(&self) -> bool {
        *self == Self::Additive
    }
}

/// How Luong's attention scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LuongScore {
    /// `q . k`
    Dot,
    /// `q . W k`
    General,
    /// `score . tanh(W [q; k])`
    Concat {
        /// Features of the hidden layer.
        hidden: usize,
    },
}

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
    /// Units of the hidden layer of an additive or concat score; dot and general have none. An additive score without it is a model
    /// without attention: the decoder knows of the source what both ways of the encoder ended with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_hidden: Option<usize>,
    /// The attention score.
    #[serde(default, skip_serializing_if = "AttentionScore::is_additive")]
    pub attention_score: AttentionScore,
    /// Tokens of the source.
    pub source_vocab: usize,
    /// Tokens of the target.
    pub target_vocab: usize,
}

impl Seq2SeqConfig {
    /// Luong's score, if it is one of his. Refuses sizes that the score cannot have.
    pub(crate) fn luong(&self) -> Result<Option<LuongScore>, Error> {
        let (states, decoder) = (self.encoder_hidden.saturating_mul(2), self.decoder_hidden);
        match (self.attention_score, self.attention_hidden) {
            (AttentionScore::Additive, _) => Ok(None),
            (AttentionScore::Concat, Some(hidden)) => Ok(Some(LuongScore::Concat { hidden })),
            (AttentionScore::Concat, None) => {
                let why = "there is none; attention_score `concat` needs it, 1 or more";
                Err(Error::format("attention_hidden", why))
            }
            (AttentionScore::Dot | AttentionScore::General, Some(hidden)) => {
                let why = "attention_score `dot` or `general` has no hidden layer";
                let why = format!("{hidden}, but {why}; leave it out");
                Err(Error::format("attention_hidden", why))
            }
            (AttentionScore::Dot, None) if decoder != states => {
                let why = format!("{decoder}, but states of the encoder have {states} features");
                let remedy = "attention_score `dot` needs 2 x encoder_hidden: make them equal, or use `general`";
                Err(Error::format("decoder_hidden", format!("{why}; {remedy}")))
            }
            (AttentionScore::Dot, None) => Ok(Some(LuongScore::Dot)),
            (AttentionScore::General, None) => Ok(Some(LuongScore::General)),
        }
    }
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
