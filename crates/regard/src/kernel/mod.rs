//! What computes: loops over the blocks of keys that rows see, and the leaves that they call.

#[cfg_attr(not(target_arch = "x86_64"), path = "no_amx.rs")]
pub(crate) mod amx;
pub(crate) mod backward;
pub(crate) mod best;
pub(crate) mod block_loop;
pub(crate) mod dequantize;
pub(crate) mod forward;
pub(crate) mod key_blocks;
pub(crate) mod lanes;
pub(crate) mod micro;
pub(crate) mod project;
pub(crate) mod queries;
pub(crate) mod select;
pub(crate) mod softmax;
pub(crate) mod weights_pass;
