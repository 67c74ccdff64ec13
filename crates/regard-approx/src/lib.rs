#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod lsh;
mod random;

pub use lsh::{Buckets, LshAttention, LshOutput, Recall, Share};
