//! Regard for [Burn]: exact fused attention, and the other operations that a transformer spends a CPU's time on, each with its own way
//! back.
//!
//! Burn trains attention by holding queries x keys weights, and runs norms, losses and activations as many small steps on one thread.
//! Here each is one step forward and one backward, on all threads where that pays, and takes part in Burn's autodiff like any other:
//! tensors go in and come out as [`burn::tensor::Tensor`], on the Flex backend, Burn's own for CPUs.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use regard::Mask;
//! use regard_burn::{Attention, attention};
//!
//! # fn main() -> Result<(), regard_burn::Error> {
//! let device = Device::flex().autodiff();
//! let leaf = |heads: usize| {
//!     let sizes = [2, 10, heads, 16]; // batch, length, heads, features
//!     Tensor::<4>::random(sizes, Distribution::Default, &device).require_grad()
//! };
//! let (q, k, v) = (leaf(4), leaf(2), leaf(2)); // 4 query heads share 2 key heads
//! let heads = |x: &Tensor<4>| x.clone().swap_dims(1, 2); // [batch, heads, length, features], no copy
//!
//! let options = Attention { mask: Mask::causal().window(8), ..Attention::default() };
//! let attended = attention(heads(&q), heads(&k), heads(&v), &options)?;
//! assert_eq!(attended.out.dims(), [2, 4, 10, 16]);
//!
//! let grads = attended.out.sum().backward();
//! assert_eq!(q.grad(&grads).map(|grad| grad.dims()), Some([2, 10, 4, 16]));
//! # Ok(())
//! # }
//! ```
//!
//! | operation | what it is |
//! |---|---|
//! | [`attention()`] | the masks, scores, similarities and normalizers of the engine; gradients for every tensor among them |
//! | [`rope()`] | rotary positions |
//! | [`linear()`], [`gated`] | `activation(x W^T + bias)`; `silu(gate) * up` |
//! | [`layer_norm`], [`rms_norm`] | over the last axis |
//! | [`cross_entropy`] | with label smoothing and ignored targets |
//! | [`embedding()`] | rows of a table |
//! | [`gru()`], [`gru_with_attention`] | a sequence through a recurrent net, which may look at a memory before each step |
//! | [`residual()`], [`dropout`] | what is dropped is a function of a seed, so nothing is kept for the way back |
//! | [`with_products`] | for training: products of linear layers and recurrent nets in bf16, much faster with AMX |
//! | [`keep_heap`] | for programs, once: memory is kept for the next step |
//!
//! Attention and `rope` compute in f32, f64, f16 and bf16, the others in f32.
//!
//! [Burn]: https://burn.dev

#![deny(unsafe_code)]

// The map. A module imports only modules that are listed before it.
//
// Ground
//   error      every way a call can be wrong
//   heap       memory that is kept
//   rows       rows of a matrix, some on each thread
//   product    products of matrices: many rows by gemm or, rounded to bf16, on AMX, few by reading weights once
//   tensors    Burn's tensors as slices and views, and back
//   op         an operation with its own way back: the only file that knows Burn's graph
//
// Operations, each with its forward and its backward
//   attention  with every option of the engine
//   rope       rotary positions
//   linear     product, bias and activation; the gate of SwiGLU
//   norm       layer norm, RMS norm
//   loss       cross entropy
//   embedding  rows of a table
//   residual   sums, dropout
//   gru        a sequence through a recurrent net; look: what it sees of a memory

mod attention;
mod embedding;
mod error;
mod gru;
mod heap;
mod linear;
mod loss;
mod norm;
mod op;
mod product;
mod residual;
mod rope;
mod rows;
mod tensors;

pub use attention::{Attention, AttentionOutput, Buckets, Relative, Similarity, attention};
pub use embedding::embedding;
pub use error::Error;
pub use gru::{GruAttention, Steps, gru, gru_with_attention};
pub use heap::keep_heap;
pub use linear::{Activation, gated, linear};
pub use loss::{CrossEntropy, cross_entropy};
pub use norm::{layer_norm, rms_norm};
pub use product::{Products, with_products};
pub use residual::{ElementDropout, dropout, residual};
pub use rope::{RopePositions, rope};
