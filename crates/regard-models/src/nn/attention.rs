//! Multi-head attention: over itself, over a memory, over a cache.

use super::linear::Linear;
use crate::error::Error;
use crate::pass::Pass;
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Tensor};
use regard::Mask;
use regard::problem::{Dropout, Heads};
use regard::rope::Rope;
use regard::score::alibi_slopes;
use regard_burn::{Attention, Buckets, Relative, RopePositions};

/// What a [`MultiHead`] is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct MultiHeadConfig {
    /// Features of the rows that ask, and of what comes out.
    pub d_model: usize,
    /// Features of the rows that are looked at; `d_model` in attention over itself.
    pub d_memory: usize,
    /// Heads that ask, and heads that are looked at.
    pub heads: Heads,
    /// Features of a head.
    pub head_dim: usize,
    /// Whether q, k, v and the output have biases.
    pub bias: bool,
    /// Positions that queries and keys turn by.
    pub rope: Option<Rope>,
    /// What is added to scores by distance.
    pub by_distance: Bias,
    /// Multiplies scores; `1 / sqrt(head_dim)` unless given.
    pub scale: Option<f64>,
}

impl MultiHeadConfig {
    /// As published: `n` heads that share `d_model` features, with biases.
    #[must_use]
    pub fn new(d_model: usize, n: usize) -> Self {
        Self {
            d_model,
            d_memory: d_model,
            heads: Heads { q: n, kv: n },
            head_dim: d_model / n.max(1),
            bias: true,
            rope: None,
            by_distance: Bias::None,
            scale: None,
        }
    }
}

/// What is added to scores by distance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bias {
    /// Nothing.
    #[default]
    None,
    /// A fixed slope for each head (Press et al. 2022).
    Alibi,
    /// A table learned for buckets of distances (Raffel et al. 2020).
    T5 {
        /// Rows of the table.
        buckets: usize,
        /// From here on all distances share a bucket.
        max_distance: usize,
        /// Whether keys ahead have buckets of their own.
        bidirectional: bool,
    },
}

/// Where the keys and values come from.
#[derive(Debug)]
pub enum KeySource<'a> {
    /// One another: they stand at positions 0 and on.
    Itself,
    /// The rows of a memory, `[batch, length, d_memory]`.
    Memory(&'a Tensor<3>),
}

/// Attention with several heads (Vaswani et al. 2017), which may share keys and values (Ainslie et al. 2023).
#[derive(Module, Debug)]
pub struct MultiHead {
    /// To queries, `heads.q x head_dim`.
    pub q: Linear,
    /// To keys, `heads.kv x head_dim`.
    pub k: Linear,
    /// To values.
    pub v: Linear,
    /// What heads found, back to `d_model`.
    pub out: Linear,
    /// `[buckets, heads.q]`, where a bias is learned by distance.
    pub table: Option<Param<Tensor<2>>>,
    #[module(skip)]
    config: MultiHeadConfig,
}

impl MultiHead {
    /// With random weights.
    #[must_use]
    pub fn new(config: &MultiHeadConfig, device: &Device) -> Self {
        let MultiHeadConfig { d_model, d_memory, heads, head_dim, bias, .. } = *config;
        let layer = |sizes| Linear::new(sizes, bias, device);
        let table = match config.by_distance {
            Bias::T5 { buckets, .. } => Some(Initializer::Zeros.init([buckets, heads.q], device)),
            Bias::None | Bias::Alibi => None,
        };
        Self {
            q: layer([d_model, heads.q * head_dim]),
            k: layer([d_memory, heads.kv * head_dim]),
            v: layer([d_memory, heads.kv * head_dim]),
            out: layer([heads.q * head_dim, d_model]),
            table,
            config: config.clone(),
        }
    }

    /// `x [batch, length, d_model]`, each row of which sees what the mask lets it. Of the weights, `dropout` says which are dropped.
    pub fn forward(
        &self,
        x: Tensor<3>,
        over: KeySource<'_>,
        mask: &Mask,
        dropout: Option<Dropout>,
        pass: &mut Pass,
    ) -> Result<Tensor<3>, Error> {
        let Heads { q, kv } = self.config.heads;
        let options = Attention { dropout, ..self.options(mask, pass) };
        // ANCHOR: over
        match over {
            KeySource::Itself => {
                let places = || RopePositions::From(0);
                let keys = self.turned(split(self.k.forward(x.clone()), kv), places())?;
                let values = split(self.v.forward(x.clone()), kv);
                let queries = self.turned(split(self.q.forward(x), q), places())?;
                self.attend([queries, keys, values], &options, pass)
            }
            KeySource::Memory(memory) => {
                let keys = split(self.k.forward(memory.clone()), kv);
                let values = split(self.v.forward(memory.clone()), kv);
                self.attend([split(self.q.forward(x), q), keys, values], &options, pass)
            }
        }
        // ANCHOR_END: over
    }

    pub(crate) fn options(&self, mask: &Mask, pass: &Pass) -> Attention {
        let usual = || 1.0 / (self.config.head_dim.max(1) as f64).sqrt();
        let scale = match pass.temperature {
            1.0 => self.config.scale,
            temperature => Some(self.config.scale.unwrap_or_else(usual) / temperature),
        };
        let relative = match (self.config.by_distance, &self.table) {
            (Bias::T5 { max_distance, bidirectional, .. }, Some(table)) => Some(Relative {
                table: table.val(),
                buckets: Buckets::T5 { max_distance, bidirectional },
            }),
            _ => None,
        };
        let alibi = (self.config.by_distance == Bias::Alibi).then(|| {
            let slopes: Vec<f32> = alibi_slopes(self.config.heads.q);
            Tensor::from_data(slopes.as_slice(), &self.q.weight.val().device().inner())
        });
        Attention {
            mask: mask.clone(),
            scale,
            relative,
            alibi,
            entropy: pass.entropies.is_some(),
            ..Attention::default()
        }
    }

    fn turned(&self, x: Tensor<4>, places: RopePositions) -> Result<Tensor<4>, Error> {
        match &self.config.rope {
            Some(rope) => Ok(regard_burn::rope(x, rope, places)?),
            None => Ok(x),
        }
    }

    pub(crate) fn attend(
        &self,
        [q, k, v]: [Tensor<4>; 3],
        options: &Attention,
        pass: &mut Pass,
    ) -> Result<Tensor<3>, Error> {
        let seen = pass.recorder.is_on().then(|| (q.clone(), k.clone()));
        let attended = regard_burn::attention(q, k, v, options)?;
        if let Some((q, k)) = seen {
            pass.recorder.record(q, k, &attended, options)?;
        }
        pass.record_entropy(&attended)?;
        Ok(self.out.forward(joined(attended.out)))
    }
}

// ANCHOR: heads
/// `[batch, length, heads x features]` as `[batch, heads, length, features]`, without a copy.
pub(crate) fn split(x: Tensor<3>, heads: usize) -> Tensor<4> {
    let [batch, length, features] = x.dims();
    x.reshape([batch, length, heads, features / heads.max(1)]).swap_dims(1, 2)
}

/// And back.
pub(crate) fn joined(x: Tensor<4>) -> Tensor<3> {
    let [batch, heads, length, features] = x.dims();
    x.swap_dims(1, 2).reshape([batch, length, heads * features])
}
// ANCHOR_END: heads
