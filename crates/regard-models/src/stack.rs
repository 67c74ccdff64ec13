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

/// How much is worked on at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch {
    /// Rows at most.
    pub(crate) rows: usize,
    /// Rows times the longest of them at most, unless one alone is longer.
    pub(crate) positions: usize,
}

/// Positions of a batch, those that only fill it up among them: at a thousand numbers for each, 128 MB.
pub(crate) const POSITIONS: usize = 1 << 15;

/// Works through all in batches of like length; results are in the order of what was given.
pub(crate) fn in_batches<T>(
    lengths: &[usize],
    Batch { rows, positions }: Batch,
    mut work: impl FnMut(&[usize]) -> Result<Vec<T>, Error>,
) -> Result<Vec<T>, Error> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    let longest = lengths.iter().copied().max().unwrap_or(0);
    if lengths.len() > rows || lengths.len().saturating_mul(longest) > positions {
        order.sort_by_key(|i| lengths[*i]);
    }
    let (mut all, mut rest) = (Vec::with_capacity(order.len()), order.as_slice());
    while !rest.is_empty() {
        let fits = |n: &usize| (n + 1).saturating_mul(lengths[rest[*n]]) <= positions;
        let n = (0..rest.len().min(rows)).take_while(fits).count().max(1);
        let (some, after) = rest.split_at(n);
        all.extend(some.iter().copied().zip(work(some)?));
        rest = after;
    }
    all.sort_by_key(|(i, _)| *i);
    Ok(all.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_their_order_whatever_shares_a_batch() {
        let lengths = [5, 1, 4, 1, 3, 9, 2];
        let mut batches: Vec<Vec<usize>> = Vec::new();
        let found = in_batches(&lengths, Batch { rows: 3, positions: 100 }, |some| {
            batches.push(some.to_vec());
            Ok(some.iter().map(|i| 10 * i).collect())
        });
        assert_eq!(found, Ok(vec![0, 10, 20, 30, 40, 50, 60]));
        assert_eq!(batches, [vec![1, 3, 6], vec![4, 2, 0], vec![5]]);
        batches.clear();
        let found = in_batches(&lengths, Batch { rows: 9, positions: 8 }, |some| {
            batches.push(some.to_vec());
            Ok(some.to_vec())
        });
        assert_eq!(found, Ok((0..7).collect()));
        assert_eq!(batches, [vec![1, 3, 6], vec![4, 2], vec![0], vec![5]]);
    }
}
