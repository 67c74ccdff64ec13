//! Regard for [Candle]: exact fused attention and rotary positions, each with its own way back.
//!
//! The fused operations of Candle have none. A gradient that comes to its layer norm, its rope or its softmax over the last axis ends
//! there, without an error, and what lies before learns nothing. Here a gradient either arrives or is refused:
//!
//! - [`attention`] has gradients for q, k and v, and [`rope`] for what it turns;
//! - an operation of Candle has gradients for three tensors at most, so a bias, a table or sinks that a variable stands behind are an
//!   [`Error`] that names them;
//! - so is a [`Normalizer`](regard::problem::Normalizer) that nothing could be learned through;
//! - so is a gradient that variables stand behind, on its way back through attention, which has first derivatives only. Candle makes
//!   such gradients where `CANDLE_GRAD_DO_NOT_DETACH` is set.
//!
//! Masks, scores and all else are the options of the engine, as data: see [`Attention`] and the crate [`regard`]. Tensors are read
//! where they lie, `[batch, heads, length, features]` with any strides of the first three axes, in f32, f64, f16 and bf16, on the CPU.
//! Memory is linear in the length, forward and backward.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use regard::rope::{Rope, RopePairs};
//! use regard::Mask;
//! use regard_candle::{Attention, RopePositions, attention, rope};
//!
//! fn main() -> candle_core::Result<()> {
//!     let (batch, length, heads, dim) = (2, 10, 4, 16);
//!     let x = Tensor::randn(0f32, 1.0, (batch * length, heads * dim), &Device::Cpu)?;
//!     let w = Var::randn(0f32, 0.1, (heads * dim, 3 * heads * dim), &Device::Cpu)?;
//!     let qkv = x.matmul(&w)?.reshape((batch, length, 3, heads, dim))?;
//!     // [batch, heads, length, dim], where it lies: no copies.
//!     let part = |i| qkv.narrow(2, i, 1)?.squeeze(2)?.transpose(1, 2);
//!     let turn = Rope::new(dim, RopePairs::HalfSplit);
//!     let q = rope(&part(0)?, &turn, RopePositions::From(0))?;
//!     let k = rope(&part(1)?, &turn, RopePositions::From(0))?;
//!     let options = Attention { mask: Mask::causal().window(8), ..Default::default() };
//!     let attended = attention(&q, &k, &part(2)?, &options)?;
//!     let grads = attended.out.sqr()?.mean_all()?.backward()?;
//!     assert!(grads.get(&w).is_some());
//!     Ok(())
//! }
//! ```
//!
//! [Candle]: https://github.com/huggingface/candle

#![forbid(unsafe_code)]

mod attention;
mod error;
mod rope;
mod tensors;

pub use attention::{Attention, AttentionOutput, Buckets, Relative, Similarity, attention};
pub use error::Error;
pub use rope::{RopePositions, rope};
