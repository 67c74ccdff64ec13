//! Encoders: vectors of texts.

use super::text::{Vocabulary, finite, some, words};
use crate::batches::{Batch, POSITIONS, in_batches};
use crate::error::Error;
use crate::files::Tokens;
use crate::infer::Transformer;
use regard_scope::{Labels, Trace};

/// A model that makes a vector of a text: BERT and its like.
#[derive(Debug)]
pub struct Encoder {
    pub(super) vocabulary: Vocabulary,
    pub(super) model: Transformer,
}

/// Texts that are read together.
pub(super) const BATCH: Batch = Batch { rows: 32, positions: POSITIONS };

impl Encoder {
    /// The network.
    #[must_use]
    pub fn transformer(&self) -> &Transformer {
        &self.model
    }

    /// How its text is divided.
    #[must_use]
    pub fn tokens(&self) -> &Tokens {
        &self.vocabulary.tokens
    }

    /// The tokens of a text that the model can hold; one at least.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>, Error> {
        some(self.vocabulary.fitting(text)?)
    }

    /// A vector of length 1 for each text, by the pooling of the model. Texts of like length share a batch.
    pub fn embed(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, Error> {
        let rows = texts.iter().map(|text| self.prompt(text));
        self.embed_tokens(&rows.collect::<Result<Vec<_>, _>>()?)
    }

    /// The same of texts that are tokens.
    pub fn embed_tokens(&self, rows: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, Error> {
        let lengths: Vec<usize> = rows.iter().map(Vec::len).collect();
        in_batches(&lengths, BATCH, |some| {
            let batch: Vec<Vec<u32>> = some.iter().map(|i| rows[*i].clone()).collect();
            let mut vectors = self.model.pooled(&batch)?;
            for vector in &mut vectors {
                finite("embed", vector)?;
                let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-12);
                vector.iter_mut().for_each(|x| *x /= length);
            }
            Ok(vectors)
        })
    }

    /// What every head looks at in a text.
    pub fn look(&self, text: &str) -> Result<Trace, Error> {
        look(&self.vocabulary, &self.model, text)
    }
}

pub(super) fn look(
    vocabulary: &Vocabulary,
    model: &Transformer,
    text: &str,
) -> Result<Trace, Error> {
    let tokens = some(vocabulary.fitting(text)?)?;
    let labels = Labels::new("source", words(&vocabulary.tokens, &tokens));
    let layers = model.look(None, &tokens)?;
    Ok(Trace {
        title: vocabulary.title.clone(),
        axes: [("source".to_owned(), labels)].into(),
        layers,
        ..Trace::default()
    })
}
