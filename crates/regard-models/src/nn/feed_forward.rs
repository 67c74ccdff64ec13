//! The two layers that each position goes through alone.

use super::linear::Linear;
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use regard_burn::Activation;

/// What a [`FeedForward`] is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeedForwardConfig {
    /// Features in and out.
    pub d_model: usize,
    /// Features between.
    pub d_ff: usize,
    /// Between the layers; of the gate where there is one, which is then a SiLU.
    pub activation: Activation,
    /// Whether a second layer says how much of the first comes through (SwiGLU, Shazeer 2020).
    pub gate: bool,
    /// Whether layers have biases.
    pub bias: bool,
}

/// `down(activation(up x))`, or `down(silu(gate x) * up x)`.
#[derive(Module, Debug)]
pub struct FeedForward {
    /// Present in gated ones.
    pub gate: Option<Linear>,
    /// To the features between.
    pub up: Linear,
    /// And back.
    pub down: Linear,
}

impl FeedForward {
    /// With random weights.
    #[must_use]
    pub fn new(config: &FeedForwardConfig, device: &Device) -> Self {
        let FeedForwardConfig { d_model, d_ff, activation, gate, bias } = *config;
        let layer = |sizes| Linear::new(sizes, bias, device);
        let up = layer([d_model, d_ff]);
        Self {
            gate: gate.then(|| layer([d_model, d_ff])),
            up: if gate { up } else { up.activation(activation) },
            down: layer([d_ff, d_model]),
        }
    }

    /// `x [.., d_model]`
    #[must_use]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let inner = match &self.gate {
            Some(gate) => regard_burn::gated(gate.forward(x.clone()), self.up.forward(x)),
            None => self.up.forward(x),
        };
        self.down.forward(inner)
    }
}
