//! A table of rows by number.

use crate::error::Error;
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Int, Tensor};

/// A row of features for each number.
#[derive(Module, Debug)]
pub struct Embedding {
    /// `[entries, features]`
    pub weight: Param<Tensor<2>>,
}

impl Embedding {
    /// Rows of normal numbers with this deviation.
    #[must_use]
    pub fn new([entries, features]: [usize; 2], deviation: f64, device: &Device) -> Self {
        let start = Initializer::Normal { mean: 0.0, std: deviation };
        Self { weight: start.init([entries, features], device) }
    }

    /// `ids [batch, length]` to `[batch, length, features]`.
    pub fn forward(&self, ids: Tensor<2, Int>) -> Result<Tensor<3>, Error> {
        Ok(regard_burn::embedding(self.weight.val(), ids)?)
    }

    /// The scores of all entries for `x [batch, length, features]`: the head of a model whose output shares the table of its input.
    #[must_use]
    pub fn scores(&self, x: Tensor<3>) -> Tensor<3> {
        regard_burn::linear(x, self.weight.val(), None, regard_burn::Activation::None)
    }
}
