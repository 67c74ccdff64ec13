#![doc = include_str!("../README.md")]
#![cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "AMX is x86-64 only"))]

// The map. A call is a straight line: description -> check -> plan -> kernel -> output. A module imports only modules that
// are listed before it, which `tests/all/house.rs` holds against the sources. Read `reference` first.
//
// Ground
//   error       every way a call can be wrong
//   run         tasks to threads
//   simd        numbers, the types that hold them in memory, vectors of them, instruction sets
//   index       indices: heads, pairs, rows, keys, lanes
//   machine     the computer as a value
//   roofline    loops that measure peak arithmetic and memory bandwidth
//   view        tensors: borrowed, to be written, owned
//   cache       the KV cache, in pages
//   source      heads of tensors and of caches, of any type of element
//
// The description
//   mask        the attention mask
//   score       what happens to a similarity before the softmax: each option's definition, pass and backward pass
//   similarity  how a query and a key make a number
//   dropout     which weights are dropped
//   local       windows around predicted centres
//   normalizer  from scores to weights, and what a selection does to the scores
//   problem     one call, described and checked
//   options     all options of a problem together, in their order
//
// Parts of kernels
//   softmax     the softmax of a row, block by block
//   micro       the products of a tile: the only hot loops
//   key_blocks  from a mask to the ranges of keys that are computed
//   lanes       rows into lanes and back
//   project     rows multiplied by a matrix
//   best        the best keys of each row
//   queries     a group of queries in lanes, projected and scaled
//   block_loop  rows over the blocks of keys that they see
//   amx         operands and products on AMX tiles
//
// Kernels
//   select      the pass that finds what a normalizer must know
//   weights_pass  the pass that makes weights again, and adds up statistics of them
//   forward     the pass that makes outputs: prefill, decode, on vectors, on AMX
//   backward    the pass that makes gradients
//
// Plan and results
//   output      what a call returns, and merging
//   grads       what a loss says, and what follows
//   plan        how a problem is run: stages, tasks, threads; counted and told
//
// Other key ranges
//   rope        rotary positions
//   linear      linear attention
//   lsh         attention among the candidate pairs of locality-sensitive hashing
//
// Inspection
//   microscope  weights made again, and measured
//
// Beside it
//   reference   the definition that judges everything
//   compiled    every call of every type, compiled once

#[cfg_attr(not(target_arch = "x86_64"), path = "no_amx.rs")]
mod amx;
mod backward;
mod best;
mod block_loop;
mod cache;
#[cfg(not(test))]
mod compiled;
mod dropout;
mod error;
mod forward;
mod grads;
mod index;
mod key_blocks;
mod lanes;
mod linear;
mod local;
mod lsh;
mod machine;
mod mask;
mod micro;
mod microscope;
mod normalizer;
mod options;
mod output;
mod plan;
mod problem;
mod project;
mod queries;
pub mod reference;
pub mod roofline;
mod rope;
mod run;
mod score;
mod select;
mod simd;
mod similarity;
mod softmax;
mod source;
mod view;
mod weights_pass;

pub use cache::{CacheShape, KvCache, PAGE, Sequence};
pub use dropout::Dropout;
pub use error::Error;
pub use grads::{AdditiveGrads, Grads, OutputGrads};
pub use half::{bf16, f16};
pub use index::{Pair, Scope};
pub use linear::{FeatureMap, LinearAttention, LinearGrads, LinearOutput, LinearState};
pub use local::Local;
pub use lsh::{Buckets, LshAttention, LshOutput, Recall, Share};
pub use machine::Machine;
pub use mask::{Bits, Mask, MaskRule};
pub use microscope::{
    AttentionView, Audit, Divergence, HeadAudit, Measure, Measured, Pattern, Pool, Pooled, Top,
    rollout,
};
pub use normalizer::{Normalizer, Selection};
pub use output::{Output, OutputView};
pub use plan::{Plan, Work};
pub use problem::{Align, Dims, Heads, Problem};
pub use reference::steps::{Steps, steps};
pub use rope::{Positions, Rope, RopePairs};
pub use score::{RelativeBias, Score, ScoreRule, alibi_slopes};
pub use simd::{Element, Isa, Number, Precision};
pub use similarity::{Additive, Similarity};
pub use view::{Layout, Shape, Strides, Tensor, View, ViewMut};

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
