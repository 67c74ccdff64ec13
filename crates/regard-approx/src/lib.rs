#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod linear;
mod lsh;
mod random;

pub use linear::reference as linear_reference;
pub use linear::{FeatureMap, LinearAttention, LinearGrads, LinearOutput, LinearState};
pub use lsh::{Buckets, LshAttention, LshOutput, Recall, RowFraction};
