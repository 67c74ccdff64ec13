//! Linear maps and norms, taken from files.

use super::ops::{self, each_row};
use crate::error::Error;
use crate::files::{NormConfig, Weights};
use regard_matmul::{Isa, Matrix, Rows, multiply};

/// `x W^T + b`, with the weights as they are stored.
#[derive(Debug)]
pub(super) struct Linear {
    matrix: Matrix,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// `name.weight [outputs, inputs]`, and `name.bias` if there is to be one.
    pub(super) fn take(
        weights: &mut Weights,
        name: &str,
        [outputs, inputs]: [usize; 2],
        bias: bool,
    ) -> Result<Self, Error> {
        let matrix = weights.matrix(&format!("{name}.weight"), [outputs, inputs])?;
        let take = |_| weights.finite(&format!("{name}.bias"), &[outputs]);
        Ok(Self { matrix, bias: bias.then_some(()).map(take).transpose()? })
    }

    pub(super) fn outputs(&self) -> usize {
        self.matrix.outputs()
    }

    fn add_bias(&self, out: &mut [f32]) {
        if let Some(bias) = &self.bias {
            each_row(out, bias.len(), &ops::Add { other: bias, factor: 1.0 });
        }
    }
}

/// Several maps of the same rows, together: one start of the threads.
pub(super) fn project(x: &Rows, jobs: &mut [(&Linear, &mut Vec<f32>)]) -> Result<(), Error> {
    let rows = x.rows();
    for (linear, out) in jobs.iter_mut() {
        out.resize(rows * linear.outputs(), 0.0);
    }
    let mut products: Vec<(&Matrix, &mut [f32])> =
        jobs.iter_mut().map(|(linear, out)| (&linear.matrix, out.as_mut_slice())).collect();
    multiply(x, &mut products, Isa::detect())?;
    for (linear, out) in jobs {
        linear.add_bias(out);
    }
    Ok(())
}

/// A norm of rows.
#[derive(Debug)]
pub(super) struct Norm {
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    config: NormConfig,
}

impl Norm {
    /// `name.weight`, and `name.bias` if norms have one.
    pub(super) fn take(
        weights: &mut Weights,
        name: &str,
        features: usize,
        config: NormConfig,
    ) -> Result<Self, Error> {
        let mut weight = weights.finite(&format!("{name}.weight"), &[features])?;
        if config.plus_one {
            weight.iter_mut().for_each(|x| *x += 1.0);
        }
        let has_bias = config.bias && !config.rms;
        let bias = |_| weights.finite(&format!("{name}.bias"), &[features]);
        Ok(Self { weight, bias: has_bias.then_some(()).map(bias).transpose()?, config })
    }

    /// Norms groups of as many numbers as there are weights: rows, or the heads of rows.
    pub(super) fn apply(&self, rows: &mut [f32], width: usize) {
        let (weight, bias) = (&self.weight, self.bias.as_deref());
        each_row(rows, width, &ops::Norm { weight, bias, config: self.config });
    }
}
