//! Linear maps and norms, taken from files.

use super::ops::{self, each_row};
use crate::error::Error;
use crate::files::{NormConfig, Weights};
use regard_matmul::{Isa, Matrix, Rows, multiply};

/// `x W^T + b`, with the weights as they are stored.
#[derive(Debug)]
pub(super) struct Linear {
    matrix: Matrix,
}

impl Linear {
    /// `name.weight [outputs, inputs]`, and `name.bias` if there is to be one.
    pub(super) fn take(
        weights: &mut Weights,
        name: &str,
        [outputs, inputs]: [usize; 2],
        bias: bool,
    ) -> Result<Self, Error> {
        let mut matrix = weights.matrix(&format!("{name}.weight"), [outputs, inputs])?;
        if bias {
            matrix = matrix.with_bias(&weights.finite(&format!("{name}.bias"), &[outputs])?)?;
        }
        Ok(Self { matrix })
    }

    pub(super) fn inputs(&self) -> usize {
        self.matrix.inputs()
    }

    pub(super) fn outputs(&self) -> usize {
        self.matrix.outputs()
    }

    /// `W^T` without the bias, `[inputs, outputs]`: what the map makes of unit vectors. Weights are stored for products alone.
    pub(super) fn transposed(&self) -> Result<Vec<f32>, Error> {
        let [inputs, outputs] = [self.inputs(), self.outputs()];
        let mut rows = Rows::new();
        // The last row stays 0: the map makes the bias of it.
        let unit = rows.reset(inputs + 1, inputs)?;
        unit.fill(0.0);
        unit.chunks_exact_mut(inputs).enumerate().take(inputs).for_each(|(i, row)| row[i] = 1.0);
        let mut made = vec![0.0; (inputs + 1) * outputs];
        project(&rows, &mut [(self, &mut made)])?;
        let bias = made.split_off(inputs * outputs);
        for row in made.chunks_exact_mut(outputs) {
            row.iter_mut().zip(&bias).for_each(|(x, bias)| *x -= bias);
        }
        Ok(made)
    }
}

/// Several maps of the same rows, together: one start of the threads.
pub(super) fn project(x: &Rows, jobs: &mut [(&Linear, &mut [f32])]) -> Result<(), Error> {
    let mut products: Vec<(&Matrix, &mut [f32])> =
        jobs.iter_mut().map(|(linear, out)| (&linear.matrix, &mut **out)).collect();
    multiply(x, &mut products, Isa::detect())?;
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
        each_row(rows, width, &self.work());
    }

    /// What is done to each row.
    pub(super) fn work(&self) -> ops::Norm<'_> {
        ops::Norm { weight: &self.weight, bias: self.bias.as_deref(), config: self.config }
    }
}
