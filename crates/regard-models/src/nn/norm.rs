//! Norms.

use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};

/// Which norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// Mean 0 and variance 1, then a weight and a bias for each feature.
    Layer,
    /// Mean square 1, then a weight for each feature.
    Rms,
}

/// A norm over the features of each row.
#[derive(Module, Debug)]
pub struct Norm {
    /// `[features]`
    pub weight: Param<Tensor<1>>,
    /// `[features]`; a layer norm has it, an RMS norm has not.
    pub bias: Option<Param<Tensor<1>>>,
    eps: f64,
}

impl Norm {
    /// Weights of 1, and biases of 0 where there are any.
    #[must_use]
    pub fn new(kind: NormKind, features: usize, eps: f64, device: &Device) -> Self {
        // Made when first used, as all parameters are: nothing is allocated for a model before its weights are looked at.
        let of = |value: f64| Initializer::Constant { value }.init([features], device);
        Self { weight: of(1.0), bias: (kind == NormKind::Layer).then(|| of(0.0)), eps }
    }

    /// `x [.., features]`
    #[must_use]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match &self.bias {
            Some(bias) => regard_burn::layer_norm(x, self.weight.val(), bias.val(), self.eps),
            None => regard_burn::rms_norm(x, self.weight.val(), self.eps),
        }
    }
}
