//! The block that encoders and decoders are stacks of.

use super::attention::{KeySource, MultiHead, MultiHeadConfig};
use super::feed_forward::{FeedForward, FeedForwardConfig};
use super::norm::{Norm, NormKind};
use crate::error::Error;
use crate::pass::Pass;
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use regard::Mask;
use regard_burn::{ElementDropout, residual};
use serde::{Deserialize, Serialize};

/// Where the norms of a block stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormPlace {
    /// Before each layer: `x + layer(norm(x))`. Trains without a warm-up (Xiong et al. 2020).
    Pre,
    /// After each sum: `norm(x + layer(x))`, as first published.
    Post,
}

/// What is dropped while training: shares from 0 to below 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DropoutRates {
    /// Of the output of each layer, and of embeddings.
    pub rate: f64,
    /// Of the weights of attention.
    pub attention: f64,
}

/// What a [`Block`] is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockConfig {
    /// Attention over itself.
    pub attention: MultiHeadConfig,
    /// Attention over a memory, in decoders that have one.
    pub cross: Option<MultiHeadConfig>,
    /// The layers after it.
    pub feed_forward: FeedForwardConfig,
    /// Which norm.
    pub norm: NormKind,
    /// Where it stands.
    pub place: NormPlace,
    /// Keeps the norm from dividing by nothing.
    pub eps: f64,
    /// What is dropped while training.
    pub dropout: DropoutRates,
}

/// Attention over itself, attention over a memory if there is one, and a feed-forward layer, each added to the stream.
#[derive(Module, Debug)]
pub struct Block {
    /// Of the attention over itself.
    pub attention_norm: Norm,
    /// KeySource itself.
    pub attention: MultiHead,
    /// Of the attention over a memory.
    pub cross_norm: Option<Norm>,
    /// KeySource a memory.
    pub cross: Option<MultiHead>,
    /// Of the feed-forward layer.
    pub feed_forward_norm: Norm,
    /// Each position alone.
    pub feed_forward: FeedForward,
    #[module(skip)]
    dropout: DropoutRates,
    #[module(skip)]
    place: NormPlace,
}

/// Inputs of a block besides the residual stream.
#[derive(Debug)]
pub struct BlockInputs<'a> {
    /// Attention mask of the self-attention.
    pub mask: &'a Mask,
    /// What is looked at beside them.
    pub memory: Option<Memory<'a>>,
    /// The number of the block in its model: no two drop the same.
    pub place: u64,
    /// What the pass drops, and what it keeps.
    pub pass: &'a mut Pass,
}

/// What is looked at beside the rows themselves: rows, and who sees what there.
#[derive(Clone, Copy, Debug)]
pub struct Memory<'a> {
    /// `[batch, length, d_model]`
    pub rows: &'a Tensor<3>,
    /// Which of them each row sees.
    pub mask: &'a Mask,
}

impl Block {
    /// With random weights.
    #[must_use]
    pub fn new(config: &BlockConfig, device: &Device) -> Self {
        let norm = || Norm::new(config.norm, config.attention.d_model, config.eps, device);
        Self {
            attention_norm: norm(),
            attention: MultiHead::new(&config.attention, device),
            cross_norm: config.cross.is_some().then(norm),
            cross: config.cross.as_ref().map(|cross| MultiHead::new(cross, device)),
            feed_forward_norm: norm(),
            feed_forward: FeedForward::new(&config.feed_forward, device),
            dropout: config.dropout,
            place: config.place,
        }
    }

    /// `x [batch, length, d_model]`, its rows over one another.
    pub fn forward(&self, x: Tensor<3>, around: BlockInputs<'_>) -> Result<Tensor<3>, Error> {
        let BlockInputs { mask, memory, place, pass } = around;
        let part = |part: u64| place.wrapping_mul(8).wrapping_add(part);
        let DropoutRates { rate, attention } = self.dropout;
        let [after, after_cross, last] = [0, 1, 2].map(|i| pass.drops(rate, part(i)));
        let [weights, cross_weights] = [3, 4].map(|i| pass.drops_weights(attention, part(i)));
        let x = self.add(x, &self.attention_norm, after, |x| {
            self.attention.forward(x, KeySource::Itself, mask, weights, pass)
        })?;
        let x = match (&self.cross, &self.cross_norm, memory) {
            (Some(cross), Some(norm), Some(Memory { rows, mask })) => {
                pass.within("cross", |pass| {
                    self.add(x, norm, after_cross, |x| {
                        cross.forward(x, KeySource::Memory(rows), mask, cross_weights, pass)
                    })
                })?
            }
            (Some(_), _, None) => {
                return Err(Error::unsupported(
                    "memory",
                    &"none",
                    "a block with cross-attention looks at one",
                ));
            }
            _ => x,
        };
        self.add(x, &self.feed_forward_norm, last, |x| Ok(self.feed_forward.forward(x)))
    }

    /// What a layer makes of the stream, added to it.
    fn add(
        &self,
        x: Tensor<3>,
        norm: &Norm,
        drop: Option<ElementDropout>,
        layer: impl FnOnce(Tensor<3>) -> Result<Tensor<3>, Error>,
    ) -> Result<Tensor<3>, Error> {
        Ok(match self.place {
            NormPlace::Pre => residual(x.clone(), layer(norm.forward(x))?, drop),
            NormPlace::Post => norm.forward(residual(x.clone(), layer(x)?, drop)),
        })
    }
}
