//! A linear layer.

use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Tensor};
use regard_burn::Activation;

/// `activation(x W^T + bias)`.
#[derive(Module, Debug)]
pub struct Linear {
    /// `[out, in]`
    pub weight: Param<Tensor<2>>,
    /// `[out]`
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    activation: Activation,
}

impl Linear {
    /// From `inputs` features to `outputs`, with numbers between `-1 / sqrt(inputs)` and `1 / sqrt(inputs)`.
    #[must_use]
    pub fn new([inputs, outputs]: [usize; 2], bias: bool, device: &Device) -> Self {
        let reach = 1.0 / (inputs.max(1) as f64).sqrt();
        let start = Initializer::Uniform { min: -reach, max: reach };
        Self {
            weight: start.init([outputs, inputs], device),
            bias: bias.then(|| start.init([outputs], device)),
            activation: Activation::None,
        }
    }

    /// The same with an activation.
    #[must_use]
    pub fn activation(self, activation: Activation) -> Self {
        Self { activation, ..self }
    }

    /// `x [.., in]` to `[.., out]`.
    #[must_use]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        regard_burn::linear(
            x,
            self.weight.val(),
            self.bias.as_ref().map(Param::val),
            self.activation,
        )
    }
}
