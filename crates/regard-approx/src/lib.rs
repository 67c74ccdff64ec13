#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod linear;
mod random;

pub use linear::reference as linear_reference;
pub use linear::{FeatureMap, LinearAttention, LinearGrads, LinearOutput, LinearState};
