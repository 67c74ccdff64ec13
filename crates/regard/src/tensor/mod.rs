//! Numbers in memory: indices, tensors of four axes, the KV cache, and heads of either.

pub(crate) mod cache;
pub(crate) mod index;
pub(crate) mod source;
pub(crate) mod view;
