//! Numbers in memory: indices, tensors of four axes, the KV cache, and heads of either.

pub(crate) mod cache;
pub(crate) mod index;
pub(crate) mod source;
pub(crate) mod view;

pub use crate::machine::simd::{Element, Number};
pub use half::{bf16, f16};
pub use view::{Layout, Shape, Strides, Tensor, View, ViewMut};
