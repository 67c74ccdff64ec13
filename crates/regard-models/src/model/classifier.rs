//! Models that tell texts apart.

use super::encoder::{BATCH, look};
use super::text::{Vocabulary, finite, probabilities, some};
use crate::batches::in_batches;
use crate::error::Error;
use crate::infer::Transformer;
use regard_scope::Trace;

/// A model that knows classes of texts: an encoder with a head, or hierarchical attention.
#[derive(Debug)]
pub struct Classifier {
    pub(super) vocabulary: Vocabulary,
    pub(super) labels: Vec<String>,
    pub(super) kind: Kind,
}

#[derive(Debug)]
pub(super) enum Kind {
    Transformer(Box<Transformer>),
    #[cfg(feature = "burn")]
    Han(Box<crate::Han>),
}

/// What a model says a text or an image is.
#[derive(Clone, Debug, PartialEq)]
pub struct Classification {
    /// The likeliest class.
    pub class: usize,
    /// Its name.
    pub label: String,
    /// Of each class, in their order.
    pub probabilities: Vec<f32>,
    /// Sentences with their weights, of models with hierarchical attention.
    pub sentences: Vec<WeightedSentence>,
}

/// A sentence as hierarchical attention read it.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightedSentence {
    /// Its weight among the sentences.
    pub weight: f32,
    /// Its words, as the model divides them.
    pub words: Vec<String>,
    /// Their weights within it.
    pub word_weights: Vec<f32>,
}

impl Classifier {
    /// The tokens of a text that the model can hold; one at least.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>, Error> {
        some(self.vocabulary.fitting(text)?)
    }

    /// What each text is, of the classes that the model knows.
    pub fn classify(&self, texts: &[&str]) -> Result<Vec<Classification>, Error> {
        match &self.kind {
            Kind::Transformer(model) => {
                let rows = texts.iter().map(|text| self.prompt(text));
                let rows = rows.collect::<Result<Vec<_>, _>>()?;
                let lengths: Vec<usize> = rows.iter().map(Vec::len).collect();
                in_batches(&lengths, BATCH, |some| {
                    let batch: Vec<Vec<u32>> = some.iter().map(|i| rows[*i].clone()).collect();
                    let scores = model.classify(&batch)?;
                    scores
                        .iter()
                        .map(|scores| classified(&self.labels, scores, Vec::new()))
                        .collect()
                })
            }
            #[cfg(feature = "burn")]
            Kind::Han(model) => super::recurrent::classify(self, model, texts),
        }
    }

    /// The Transformer that it is.
    pub(super) fn transformer(&mut self) -> Option<&mut Transformer> {
        match &mut self.kind {
            Kind::Transformer(model) => Some(model),
            #[cfg(feature = "burn")]
            Kind::Han(_) => None,
        }
    }

    /// What every head looks at in a text.
    pub fn look(&self, text: &str) -> Result<Trace, Error> {
        match &self.kind {
            Kind::Transformer(model) => look(&self.vocabulary, model, text),
            #[cfg(feature = "burn")]
            Kind::Han(_) => {
                let known = "hierarchical attention has no heads; its weights are in the output of classify";
                Err(Error::unsupported("look", &"han", known))
            }
        }
    }
}

/// The class by its scores.
pub(super) fn classified(
    labels: &[String],
    scores: &[f32],
    sentences: Vec<WeightedSentence>,
) -> Result<Classification, Error> {
    finite("classify", scores)?;
    let probabilities = probabilities(scores);
    let better = |a: usize, b: usize| if probabilities[b] > probabilities[a] { b } else { a };
    let class = (0..probabilities.len()).reduce(better).unwrap_or(0);
    let label = labels.get(class).cloned().unwrap_or_else(|| class.to_string());
    Ok(Classification { class, label, probabilities, sentences })
}
