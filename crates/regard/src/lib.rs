#![doc = include_str!("../README.md")]
#![cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "AMX is x86-64 only"))]

// The map. A call is a straight line: description -> check -> plan -> kernel -> output. A module imports only modules that
// are listed before it, which `tests/all/house.rs` holds against the sources. Read `reference` first.
//
//   error                 every way a call can be wrong
//
// The computer
//   machine::run          tasks to threads
//   machine::simd         numbers, the types that hold them in memory, vectors of them, instruction sets
//   machine               the computer as a value
//   machine::roofline     loops that measure peak arithmetic and memory bandwidth
//
// Numbers in memory
//   tensor::index         indices: heads, pairs, rows, keys, lanes
//   tensor::view          tensors: borrowed, to be written, owned
//   tensor::cache         the KV cache, in pages
//   tensor::source        heads of tensors and of caches, of any type of element
//
// The description
//   description::mask        the attention mask
//   description::score       what happens to a similarity before the softmax: each option's definition, pass and backward pass
//   description::similarity  how a query and a key make a number
//   description::dropout     which weights are dropped
//   description::local       windows around predicted centres
//   description::normalizer  from scores to weights, and what a selection does to the scores
//   description::problem     one call, described and checked
//   description::options     all options of a problem together, in their order
//
// Kernels: their parts, then the passes
//   kernel::softmax       the softmax of a row, block by block
//   kernel::micro         the products of a tile: the only hot loops
//   kernel::key_blocks    from a mask to the ranges of keys that are computed
//   kernel::lanes         rows into lanes and back
//   kernel::project       rows multiplied by a matrix
//   kernel::best          the best keys of each row
//   kernel::queries       a group of queries in lanes, projected and scaled
//   kernel::block_loop    rows over the blocks of keys that they see
//   kernel::amx           operands and products on AMX tiles
//   kernel::select        the pass that finds what a normalizer must know
//   kernel::weights_pass  the pass that makes weights again, and adds up statistics of them
//   kernel::forward       the pass that makes outputs: prefill, decode, on vectors, on AMX
//   kernel::backward      the pass that makes gradients
//
// Plan and results
//   plan::output          what a call returns, and merging
//   plan::grads           what a loss says, and what follows
//   plan                  how a problem is run: stages, tasks, threads; counted and told
//
// Beside exact attention
//   variants::rope        rotary positions
//   variants::lsh         attention among the candidate pairs of locality-sensitive hashing
//
//   inspect               weights made again, and measured
//   reference             the definition that judges everything
//   plan::compiled        every call of every type, compiled once

mod description;
mod error;
mod inspect;
mod kernel;
mod machine;
mod plan;
pub mod reference;
mod tensor;
mod variants;

pub use description::dropout::Dropout;
pub use description::local::Local;
pub use description::mask::{Bits, Mask, MaskRule};
pub use description::normalizer::{Normalizer, Selection};
pub use description::problem::{Align, Dims, Heads, Problem};
pub use description::score::{RelativeBias, Score, ScoreRule, alibi_slopes};
pub use description::similarity::{Additive, Similarity};
pub use error::Error;
pub use half::{bf16, f16};
pub use inspect::{
    AttentionView, Audit, Divergence, HeadAudit, Measure, Measured, Pattern, Pool, Pooled, Top,
    rollout,
};
pub use machine::simd::{Element, Isa, Number, Precision};
pub use machine::{Machine, roofline};
pub use plan::grads::{AdditiveGrads, Grads, OutputGrads};
pub use plan::output::{Output, OutputView};
pub use plan::{Plan, Work};
pub use reference::steps::{Steps, steps};
pub use tensor::cache::{CacheShape, KvCache, PAGE, Sequence};
pub use tensor::index::{Pair, Scope};
pub use tensor::view::{Layout, Shape, Strides, Tensor, View, ViewMut};
pub use variants::lsh::{Buckets, LshAttention, LshOutput, Recall, Share};
pub use variants::rope::{Positions, Rope, RopePairs};

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
