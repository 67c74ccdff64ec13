#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod delta;
mod linear;
mod lsh;
mod matrix;
mod random;
mod tasks;

pub use delta::reference as delta_reference;
pub use delta::{DeltaGrads, DeltaInputs, DeltaOutput, DeltaRule, DeltaState};
pub use linear::reference as linear_reference;
pub use linear::{FeatureMap, LinearAttention, LinearGrads, LinearOutput, LinearState};
pub use lsh::{Buckets, LshAttention, LshOutput, Recall, RowFraction};
