//! The block that encoders and decoders are stacks of.

use super::attention::{MultiHead, MultiHeadConfig, Over};
use super::feed_forward::{FeedForward, FeedForwardConfig};
use super::norm::{Norm, NormKind};
use crate::error::Error;
use crate::recorder::Recorder;
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use regard::Mask;
use regard_burn::{Drop, residual};
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
    /// The share of each layer's output that is dropped while training.
    pub dropout: f64,
}

/// Attention over itself, attention over a memory if there is one, and a feed-forward layer, each added to the stream.
#[derive(Module, Debug)]
pub struct Block {
    /// Of the attention over itself.
    pub attention_norm: Norm,
    /// Over itself.
    pub attention: MultiHead,
    /// Of the attention over a memory.
    pub cross_norm: Option<Norm>,
    /// Over a memory.
    pub cross: Option<MultiHead>,
    /// Of the feed-forward layer.
    pub feed_forward_norm: Norm,
    /// Each position alone.
    pub feed_forward: FeedForward,
    dropout: f64,
    #[module(skip)]
    place: NormPlace,
}

/// What a block is run with, beside its input.
#[derive(Debug)]
pub struct Around<'a> {
    /// Who sees whom among the rows themselves.
    pub mask: &'a Mask,
    /// What is looked at beside them, and who sees what there.
    pub memory: Option<(&'a Tensor<3>, &'a Mask)>,
    /// The seed of this pass's dropout; `None` where nothing is dropped.
    pub seed: Option<u64>,
    /// What attention saw.
    pub recorder: &'a mut Recorder,
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
    pub fn forward(&self, x: Tensor<3>, around: Around<'_>) -> Result<Tensor<3>, Error> {
        self.step(x, Over::Itself, around)
    }

    /// The same over what is told.
    pub fn step(
        &self,
        x: Tensor<3>,
        over: Over<'_>,
        around: Around<'_>,
    ) -> Result<Tensor<3>, Error> {
        let Around { mask, memory, seed, recorder } = around;
        let drop = |layer: u64| {
            let rate = self.dropout;
            seed.filter(|_| rate > 0.0)
                .map(|seed| Drop { rate, seed: seed.wrapping_mul(4).wrapping_add(layer) })
        };
        let x = self.add(x, &self.attention_norm, drop(0), |x| {
            self.attention.forward(x, over, mask, recorder)
        })?;
        let x = match (&self.cross, &self.cross_norm, memory) {
            (Some(cross), Some(norm), Some((memory, mask))) => {
                recorder.within("cross", |recorder| {
                    self.add(x, norm, drop(1), |x| {
                        cross.forward(x, Over::Memory(memory), mask, recorder)
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
        self.add(x, &self.feed_forward_norm, drop(2), |x| Ok(self.feed_forward.forward(x)))
    }

    /// What a layer makes of the stream, added to it.
    fn add(
        &self,
        x: Tensor<3>,
        norm: &Norm,
        drop: Option<Drop>,
        layer: impl FnOnce(Tensor<3>) -> Result<Tensor<3>, Error>,
    ) -> Result<Tensor<3>, Error> {
        Ok(match self.place {
            NormPlace::Pre => residual(x.clone(), layer(norm.forward(x))?, drop),
            NormPlace::Post => norm.forward(residual(x.clone(), layer(x)?, drop)),
        })
    }
}
