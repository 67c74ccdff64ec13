#![doc = include_str!("../README.md")]
//!
//! [`Additive`]: problem::Additive
//! [`Align`]: problem::Align
//! [`Local`]: problem::Local
//! [`MaskRule`]: mask::MaskRule
//! [`Normalizer`]: problem::Normalizer
//! [`Normalizer::Hard`]: problem::Normalizer::Hard
//! [`Normalizer::Sampled`]: problem::Normalizer::Sampled
//! [`Normalizer::Softmax`]: problem::Normalizer::Softmax
//! [`Normalizer::Sparsemax`]: problem::Normalizer::Sparsemax
//! [`Normalizer::TopK`]: problem::Normalizer::TopK
//! [`OutputGrads`]: plan::OutputGrads
//! [`OutputGrads::with_bias`]: plan::OutputGrads::with_bias
//! [`Precision`]: machine::Precision
//! [`RelativeBias::clipped`]: score::RelativeBias::clipped
//! [`RelativeBias::t5`]: score::RelativeBias::t5
//! [`ScoreRule`]: score::ScoreRule
//! [`Similarity::Additive`]: problem::Similarity::Additive
//! [`Similarity::Distance`]: problem::Similarity::Distance
//! [`Similarity::Dot`]: problem::Similarity::Dot
//! [`Similarity::General`]: problem::Similarity::General
//! [`steps`]: reference::steps()
#![cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "AMX is x86-64 only"))]

// The map. A call is a straight line: description -> check -> plan -> kernel -> output. A module imports only modules that
// are listed before it, which `tests/all/house.rs` holds against the sources. Read `reference` first.
//
//   error                 every way a call can be wrong
//
// The computer
//   machine::run          tasks to threads
//   machine::memory       memory for results
//   machine::simd         numbers, the types that hold them in memory, vectors of them, instruction sets
//   machine               the computer as a value
//   machine::roofline     loops that measure peak arithmetic throughput
//
// Numbers in memory
//   tensor::index         indices: heads, pairs, rows, keys, lanes
//   tensor::view          tensors: borrowed, to be written, owned
//   tensor::cache         the KV cache, in pages
//   tensor::source        heads of tensors and of caches, of any type of element
//   tensor                tensors and their elements, as they are public
//
// The description
//   description::mask        the attention mask
//   description::score       what happens to a similarity before the softmax: each option's definition, pass and backward pass
//   description::similarity  how a query and a key make a number
//   description::dropout     which weights are dropped
//   description::local       windows around predicted centers
//   description::normalizer  from scores to weights, and what a selection does to the scores
//   description::problem     one call, described and checked
//   description::options     all options of a problem together, in their order
//
// Kernels: their parts, then the passes
//   kernel::softmax       the softmax of a row, block by block
//   kernel::micro         the products of a tile: the only hot loops
//   kernel::key_blocks    from a mask to the ranges of keys that are computed
//   kernel::dequantize    keys and values in 8 bits as numbers
//   kernel::lanes         rows into lanes and back
//   kernel::project       rows multiplied by a matrix
//   kernel::best          the best keys of each row
//   kernel::queries       a group of queries in lanes, projected and scaled
//   kernel::block_loop    rows over the blocks of keys that they see
//   kernel::amx           operands and products on AMX tiles
//   kernel::select        the pass that finds what a normalizer must know
//   kernel::weights_pass  the pass that recomputes weights, tile by tile
//   kernel::forward       the pass that makes outputs: prefill, decode, on vectors, on AMX
//   kernel::backward      the pass that makes gradients
//
// Plan and results
//   plan::output          what a call returns, and merging
//   plan::grads           what a loss says, and what follows
//   plan                  how a problem is run: stages, tasks, threads; counted and told
//
// Beside attention
//   rope                  rotary position embedding
//
//   inspect               weights recomputed: of a row, of a tile, streamed
//   reference             the definition that judges everything
//   plan::compiled        every call of every type, compiled once

mod description;
mod error;
pub mod inspect;
mod kernel;
pub mod machine;
pub mod plan;
pub mod reference;
pub mod rope;
pub mod tensor;

/// Attention masks, and masks of your own.
pub mod mask {
    pub use crate::description::mask::{Bits, KeyLists, Mask, MaskRule};
}

/// Options of scores, and scores of your own.
pub mod score {
    pub use crate::description::score::{
        Intervention, RelativeBias, Score, ScoreRule, alibi_slopes,
    };
}

/// The description of a call: sizes, similarity, normalizer, dropout, local windows.
pub mod problem {
    pub use crate::description::dropout::Dropout;
    pub use crate::description::local::Local;
    pub use crate::description::normalizer::{Normalizer, Selection};
    pub use crate::description::problem::{Align, Dims, Heads, Problem};
    pub use crate::description::similarity::{Additive, Similarity};
    pub use crate::tensor::index::{Pair, Scope};
}

/// The KV cache.
pub mod cache {
    pub use crate::tensor::cache::{CacheShape, KvCache, PAGE, Quantization, Sequence};
}

/// What most programs need: `use regard::prelude::*`.
pub mod prelude {
    pub use super::attend;
    pub use crate::cache::{KvCache, Sequence};
    pub use crate::error::Error;
    pub use crate::inspect::AttentionView;
    pub use crate::machine::{Isa, Machine};
    pub use crate::mask::Mask;
    pub use crate::plan::{Grads, Output, Plan};
    pub use crate::problem::Problem;
    pub use crate::score::Score;
    pub use crate::tensor::{Element, Layout, Number, Shape, Tensor, View, ViewMut, bf16, f16};
}

pub use prelude::*;

/// Attention in one call, on all of this machine: scaled dot products of `q [batch, heads.q, q_len, dim]` with
/// `k [batch, heads.kv, k_len, dim]`, weighting `v [batch, heads.kv, k_len, v_dim]`.
///
/// [`Problem`] and [`Plan`] are the same in steps, with every option.
pub fn attend<E: Element>(
    q: View<'_, E>,
    k: View<'_, E>,
    v: View<'_, E>,
    mask: Mask,
) -> Result<Output<E>, Error> {
    Plan::new(Problem::new(&q, &k, &v).mask(mask), Machine::detect())?.forward(q, k, v)
}
