//! What the models of a [`Config`] have in common.

use crate::error::Error;
use crate::files::{Activation as Named, Config, Pairs, Positions};
use crate::nn::{
    Around, Bias, Block, BlockConfig, FeedForwardConfig, MultiHeadConfig, NormKind, NormPlace,
    Sinusoid,
};
use crate::recorder::Recorder;
use burn::tensor::{Device, Int, Tensor, TensorData};
use regard::{Heads, Mask, Rope, RopePairs};
use regard_burn::Activation;
use std::fmt;

/// What one pass through a model is: nothing, or training, or being looked at.
#[derive(Debug, Default)]
pub struct Pass {
    /// The seed of what is dropped; `None` drops nothing.
    pub seed: Option<u64>,
    /// What attention saw.
    pub recorder: Recorder,
}

/// What the blocks of a model are made of, without attention over a memory.
pub(crate) fn block_of(config: &Config, kind: NormKind) -> BlockConfig {
    let rope = match config.positions {
        Positions::Rotary { theta, pairs } => {
            let pairs = match pairs {
                Pairs::Halves => RopePairs::Halves,
                Pairs::Neighbours => RopePairs::Interleaved,
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
        dropout: 0.0,
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
            halves: pairs == Pairs::Halves,
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
    memory: Option<(&Tensor<3>, &Mask)>,
    pass: &mut Pass,
) -> Result<Tensor<3>, Error> {
    blocks.iter().enumerate().try_fold(x, |x, (layer, block)| {
        pass.recorder.at(layer, kind, axis);
        // A decoder drops other numbers than the encoder beside it.
        let place = 2 * layer as u64 + u64::from(memory.is_some());
        let seed = pass.seed.map(|seed| seed.wrapping_mul(0x9e37_79b9).wrapping_add(place));
        block.forward(x, Around { mask, memory, seed, recorder: &mut pass.recorder })
    })
}

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
