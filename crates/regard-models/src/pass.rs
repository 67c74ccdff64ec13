//! One pass through a model: what is dropped, how sharply attention looks, and what is kept of it.

use crate::error::Error;
use crate::recorder::Recorder;
use burn::tensor::{Tensor, TensorData};
use regard::problem::Dropout;
use regard_burn::{AttentionOutput, ElementDropout};

/// What one pass through a model is: nothing, or training, or being looked at.
///
/// ```
/// use regard_models::{Entropies, Pass};
///
/// let pass = Pass { seed: Some(7), ..Pass::default() }; // drops what this seed says
/// let watched = Pass { entropies: Some(Entropies::default()), ..pass }; // and knows how widely heads look
/// assert!(watched.entropy().is_none()); // after the model: their mean, with a gradient
/// ```
#[derive(Debug)]
pub struct Pass {
    /// The seed of what is dropped; `None` drops nothing. The same seed drops the same, wherever a model stands in training.
    pub seed: Option<u64>,
    /// Divides the scores of every attention: above 1 heads look more widely, below more sharply. 1 unless given.
    pub temperature: f64,
    /// What attention saw.
    pub recorder: Recorder,
    /// How widely heads look, if it is asked for.
    pub entropies: Option<Entropies>,
}

impl Default for Pass {
    fn default() -> Self {
        Self { seed: None, temperature: 1.0, recorder: Recorder::off(), entropies: None }
    }
}

/// Attention entropies of a pass.
#[derive(Debug, Default)]
pub struct Entropies {
    /// The lengths of targets that are padded. Rows of the target beyond them do not count; those of a source that is padded never do.
    pub targets: Option<Vec<usize>>,
    /// The lengths of the rows that look now.
    rows: Option<Vec<usize>>,
    layer_entropies: Vec<LayerEntropy>,
}

/// Attention entropy of the heads of one layer.
#[derive(Clone, Debug)]
pub struct LayerEntropy {
    /// Which layer of its stack.
    pub layer: usize,
    /// `encoder`, `decoder` or `cross`.
    pub kind: &'static str,
    /// The mean entropy of the rows of each head in nats, `[heads]`; it has a gradient.
    pub entropy: Tensor<1>,
    /// The largest score of each head.
    pub max_score: Vec<f32>,
}

/// Whose rows look.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RowSide<'a> {
    Source(Option<&'a [usize]>),
    Target,
}

impl Entropies {
    /// Of targets that are padded to one length, each of so many tokens.
    #[must_use]
    pub fn of(targets: &[usize]) -> Self {
        Self { targets: Some(targets.to_vec()), ..Self::default() }
    }
}

impl Pass {
    /// The mean entropy of all heads of all layers so far, `[1]`, as a term of a loss: times a positive number it sharpens
    /// attention, times a negative one it layer_entropies it. `None` if it was not asked for, or nothing has looked yet.
    ///
    /// Each head counts the same; within it, each row that is not padding does.
    #[must_use]
    pub fn entropy(&self) -> Option<Tensor<1>> {
        let layer_entropies = self.layer_entropies();
        let all: Vec<Tensor<1>> =
            layer_entropies.iter().map(|spread| spread.entropy.clone()).collect();
        (!all.is_empty()).then(|| Tensor::cat(all, 0).mean())
    }

    /// The same head by head, in the order in which they looked.
    #[must_use]
    pub fn layer_entropies(&self) -> &[LayerEntropy] {
        self.entropies.as_ref().map_or(&[], |entropies| &entropies.layer_entropies)
    }

    /// Whose rows look from now on.
    pub(crate) fn now(&mut self, looks: RowSide<'_>) {
        if let Some(entropies) = &mut self.entropies {
            entropies.rows = match looks {
                RowSide::Source(lengths) => lengths.map(<[usize]>::to_vec),
                RowSide::Target => entropies.targets.clone(),
            };
        }
    }

    /// What happens within is of this kind, and over the source.
    pub(crate) fn within<T>(&mut self, kind: &'static str, work: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.recorder.enter(kind);
        let result = work(self);
        self.recorder.leave(before);
        result
    }

    /// Refuses what only attention by products can do.
    pub(crate) fn without_products(&self) -> Result<(), Error> {
        if self.recorder.is_on() {
            return Err(Error::NotRecorded { what: "the scores of a hidden layer".into() });
        }
        self.unchanged()
    }

    /// Refuses what no recurrent model follows.
    pub(crate) fn unchanged(&self) -> Result<(), Error> {
        let known = "transformers follow it, recurrent models do not";
        if self.temperature != 1.0 {
            return Err(Error::unsupported("temperature", &self.temperature, known));
        }
        match self.entropies {
            Some(_) => Err(Error::unsupported("entropies", &"asked for", known)),
            None => Ok(()),
        }
    }

    /// The seed of one thing that drops: another for every place of a model, and for every seed of the pass.
    fn seed_of(&self, place: u64) -> Option<u64> {
        // The finaliser of SplitMix64, so that neighbouring seeds and places have nothing in common.
        let mixed = |x: u64| {
            let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ (x >> 31)
        };
        let golden = 0x9e37_79b9_7f4a_7c15u64;
        self.seed.map(|seed| {
            mixed(mixed(seed.wrapping_add(golden)).wrapping_add(place.wrapping_mul(golden)))
        })
    }

    /// What is dropped of a layer's output.
    pub(crate) fn drops(&self, rate: f64, place: u64) -> Option<ElementDropout> {
        self.seed_of(place).filter(|_| rate > 0.0).map(|seed| ElementDropout { rate, seed })
    }

    /// Which weights of an attention are dropped.
    pub(crate) fn drops_weights(&self, rate: f64, place: u64) -> Option<Dropout> {
        self.seed_of(place).filter(|_| rate > 0.0).map(|seed| Dropout::new(rate, seed, 0))
    }

    /// Keeps how widely the heads of a call looked, if it is asked for.
    pub(crate) fn record_entropy(&mut self, attended: &AttentionOutput) -> Result<(), Error> {
        let (Some(entropies), Some(entropy)) = (&mut self.entropies, &attended.entropy) else {
            return Ok(());
        };
        let [batch, heads, length] = entropy.dims();
        let lengths = entropies.rows.clone().unwrap_or_else(|| vec![length; batch]);
        if lengths.len() != batch {
            let why = format!("there are {} for a batch of {batch}; give one each", lengths.len());
            return Err(Error::format("lengths of the rows whose entropy is asked for", why));
        }
        let counts = |i: usize| i % length.max(1) < lengths[i / length.max(1)];
        let weights: Vec<f32> =
            (0..batch * length).map(|i| if counts(i) { 1.0 } else { 0.0 }).collect();
        let total = weights.iter().sum::<f32>().max(1.0);
        let weights = TensorData::new(weights, [batch, 1, length]);
        let weights: Tensor<3> = Tensor::from_data(weights, &entropy.device().inner());
        let entropy = entropy.clone() * weights.expand([batch, heads, length]);
        let entropy = entropy.sum_dim(2).sum_dim(0).reshape([heads]) / total;
        let mut max_score = vec![f32::NEG_INFINITY; heads];
        for (i, score) in attended.max_score().into_iter().enumerate() {
            let (item, head, row) = (i / (heads * length), i / length % heads, i % length);
            if row < lengths[item] {
                max_score[head] = max_score[head].max(score);
            }
        }
        let (layer, kind) = self.recorder.place();
        entropies.layer_entropies.push(LayerEntropy { layer, kind, entropy, max_score });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_place_and_every_seed_drops_something_else() {
        let seeds = (0..50).flat_map(|seed| {
            let pass = Pass { seed: Some(seed), ..Pass::default() };
            (0..50).map(move |place| pass.seed_of(place))
        });
        assert_eq!(seeds.collect::<BTreeSet<_>>().len(), 2500);
        assert_eq!(Pass::default().drops(0.5, 3), None);
        assert_eq!(Pass { seed: Some(1), ..Pass::default() }.drops(0.0, 3), None);
    }
}
