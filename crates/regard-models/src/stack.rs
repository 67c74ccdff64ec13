//! What the models of a [`Config`] have in common.

use crate::error::Error;
use crate::files::{Activation as Named, Config, PairLayout, Positions};
use crate::nn::{
    Bias, Block, BlockConfig, BlockInputs, DropoutRates, FeedForwardConfig, Memory,
    MultiHeadConfig, NormKind, NormPlace, Sinusoid,
};
use crate::pass::Pass;
use burn::tensor::{Device, Int, Tensor, TensorData};
use regard::Mask;
use regard::problem::Heads;
use regard::rope::{Rope, RopePairs};
use regard_burn::Activation;
use std::fmt;

/// What the blocks of a model are made of, without attention over a memory.
pub(crate) fn block_of(config: &Config, kind: NormKind, dropout: DropoutRates) -> BlockConfig {
    let rope = match config.positions {
        Positions::Rotary { theta, pairs } => {
            let pairs = match pairs {
                PairLayout::HalfSplit => RopePairs::HalfSplit,
                PairLayout::Interleaved => RopePairs::Interleaved,
            };
            Some(Rope::new(config.head_dim, pairs).base(theta))
        }
        _ => None,
    };
    let activation = match config.activation {
        Some(Named::Relu) => Activation::Relu,
        Some(Named::Gelu) => Activation::Gelu,
        Some(Named::GeluTanh) => Activation::GeluTanh,
        Some(Named::Silu) => Activation::Silu,
        None => Activation::None,
    };
    BlockConfig {
        attention: MultiHeadConfig {
            d_model: config.d_model,
            d_memory: config.d_model,
            heads: Heads { q: config.heads.q, kv: config.heads.kv },
            head_dim: config.head_dim,
            bias: config.attention_bias,
            rope,
            by_distance: Bias::None,
            scale: None,
        },
        cross: None,
        feed_forward: FeedForwardConfig {
            d_model: config.d_model,
            d_ff: config.d_ff.unwrap_or(4 * config.d_model),
            activation,
            gate: kind == NormKind::Rms,
            bias: config.feed_forward_bias,
        },
        norm: kind,
        place: if config.pre_norm { NormPlace::Pre } else { NormPlace::Post },
        eps: config.norm_eps.unwrap_or(1e-5),
        dropout,
    }
}

/// Refuses a setting that a model would not follow.
pub(crate) fn only(
    field: &str,
    is_so: bool,
    found: &impl fmt::Debug,
    known: &str,
) -> Result<(), Error> {
    if is_so { Ok(()) } else { Err(Error::unsupported(field, &format!("{found:?}"), known)) }
}

/// The sines and cosines that a model adds to its embeddings, if it does.
pub(crate) fn sinusoid_of(config: &Config) -> Option<Sinusoid> {
    match config.positions {
        Positions::Sinusoidal { pairs, first, inclusive } => Some(Sinusoid {
            half_split: pairs == PairLayout::HalfSplit,
            first,
            inclusive,
            ..Sinusoid::default()
        }),
        _ => None,
    }
}

/// Blocks one after another.
pub(crate) fn through(
    blocks: &[Block],
    x: Tensor<3>,
    (kind, axis): (&'static str, &'static str),
    mask: &Mask,
    memory: Option<Memory<'_>>,
    pass: &mut Pass,
) -> Result<Tensor<3>, Error> {
    blocks.iter().enumerate().try_fold(x, |x, (layer, block)| {
        pass.recorder.at(layer, kind, axis);
        // A decoder drops other numbers than the encoder beside it.
        let place = 2 * layer as u64 + u64::from(memory.is_some());
        block.forward(x, BlockInputs { mask, memory, place, pass })
    })
}

/// Where embeddings are dropped: no block has such a number.
pub(crate) const EMBEDDINGS: u64 = u64::MAX;
/// And those of the target, beside a source.
pub(crate) const TARGET_EMBEDDINGS: u64 = u64::MAX - 1;

/// Rows of ids of one length.
#[must_use]
pub fn ids<R: AsRef<[u32]>>(rows: &[R], device: &Device) -> Tensor<2, Int> {
    let rows = || rows.iter().map(AsRef::as_ref);
    let length = rows().map(<[u32]>::len).max().unwrap_or(0);
    let padded = rows().flat_map(|row| {
        row.iter().map(|id| i64::from(*id)).chain(std::iter::repeat_n(0, length - row.len()))
    });
    let numbers: Vec<i64> = padded.collect();
    Tensor::from_data(TensorData::new(numbers, [rows().count(), length]), &device.clone().inner())
}

/// The numbers of a tensor, one after another.
pub(crate) fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().try_into_vec().expect("models compute in f32")
}
