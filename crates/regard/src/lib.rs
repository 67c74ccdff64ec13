#![doc = include_str!("../README.md")]
#![cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "tiles are elsewhere"))]

mod backward;
mod cache;
mod cells;
mod choose;
#[cfg(not(test))]
mod compiled;
mod dropout;
mod error;
mod forward;
mod grads;
mod lanes;
pub mod limit;
mod linear;
mod local;
mod lsh;
mod machine;
mod mask;
mod micro;
mod normaliser;
mod options;
mod output;
mod place;
mod plan;
mod problem;
mod project;
mod queries;
pub mod reference;
mod rope;
mod run;
mod score;
mod simd;
mod similarity;
mod softmax;
mod source;
#[cfg_attr(not(target_arch = "x86_64"), path = "no_tiles.rs")]
mod tiles;
mod view;
mod walk;

pub use cache::{CacheShape, KvCache, PAGE, Sequence};
pub use dropout::Dropout;
pub use error::Error;
pub use grads::{AdditiveGrads, Grads, Upstream};
pub use half::{bf16, f16};
pub use linear::{FeatureMap, LinearAttention, LinearGrads, LinearOutput, LinearState};
pub use local::Local;
pub use lsh::{Buckets, LshAttention, LshOutput, Recall, Share};
pub use machine::Machine;
pub use mask::{Bits, Mask, MaskRule};
pub use normaliser::{Choice, Normaliser};
pub use output::Output;
pub use place::{Pair, Scope};
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
    Plan::new(Problem::new(&q, &k, &v).mask(mask), Machine::here())?.forward(q, k, v)
}
