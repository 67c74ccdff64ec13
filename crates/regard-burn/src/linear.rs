//! A linear layer with its bias and its activation in one step.

use crate::error::Error;
use crate::op::{BackwardArgs, Operation, run};
use crate::product::{Matrix, Products};
use crate::rows::{RowWork, by_rows, changed, column_sums};
use crate::tensors::{dense, numbers, only_f32, rows, sizes, tensor};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use regard_matmul::math::{erf, exp, sigmoid};
use std::sync::{Arc, OnceLock};

/// What happens to each number of a layer's output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// Nothing.
    #[default]
    None,
    /// `max(x, 0)`
    Relu,
    /// `x` times the share of a normal distribution below it.
    Gelu,
    /// The same by a hyperbolic tangent, as GPT-2 has it.
    GeluTanh,
    /// `x / (1 + e^-x)`
    Silu,
}

impl Activation {
    #[inline(always)]
    fn apply(self, x: f32) -> f32 {
        match self {
            Self::None => x,
            Self::Relu => x.max(0.0),
            Self::Gelu => 0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2)),
            Self::GeluTanh => x * sigmoid(tanh_argument(x)),
            Self::Silu => x * sigmoid(x),
        }
    }

    /// The derivative.
    #[inline(always)]
    fn slope(self, x: f32) -> f32 {
        match self {
            Self::None => 1.0,
            Self::Relu => f32::from(u8::from(x > 0.0)),
            Self::Gelu => {
                let below = 0.5 * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2));
                // The density of a normal distribution: 1 / sqrt(2 pi) e^(-x^2 / 2).
                x.mul_add(0.398_942_3 * exp(-0.5 * x * x), below)
            }
            Self::GeluTanh => {
                let s = sigmoid(tanh_argument(x));
                let inner = 2.0 * GELU_SCALE * (3.0 * GELU_CUBE * x).mul_add(x, 1.0);
                (x * s * (1.0 - s)).mul_add(inner, s)
            }
            Self::Silu => {
                let s = sigmoid(x);
                (x * s).mul_add(1.0 - s, s)
            }
        }
    }

    /// [`apply`](Self::apply) to many; the match stands outside of the loops, so that each becomes vectors.
    #[inline(always)]
    fn apply_all(self, row: &mut [f32]) {
        macro_rules! each {
            ($kind:ident) => {
                for x in row {
                    *x = Self::$kind.apply(*x);
                }
            };
        }
        match self {
            Self::None => {}
            Self::Relu => each!(Relu),
            Self::Gelu => each!(Gelu),
            Self::GeluTanh => each!(GeluTanh),
            Self::Silu => each!(Silu),
        }
    }

    /// `d *= slope(x)` for many.
    #[inline(always)]
    fn slope_all(self, x: &[f32], d: &mut [f32]) {
        macro_rules! each {
            ($kind:ident) => {
                for (d, x) in d.iter_mut().zip(x) {
                    *d *= Self::$kind.slope(*x);
                }
            };
        }
        match self {
            Self::None => {}
            Self::Relu => each!(Relu),
            Self::Gelu => each!(Gelu),
            Self::GeluTanh => each!(GeluTanh),
            Self::Silu => each!(Silu),
        }
    }
}

/// `sqrt(2 / pi)` and the factor of the cube, of Hendrycks and Gimpel 2016.
const GELU_SCALE: f32 = 0.797_884_6;
const GELU_CUBE: f32 = 0.044_715;

/// `(1 + tanh u) / 2` is the sigmoid of `2 u`, which loses nothing where the tangent nears -1.
#[inline(always)]
fn tanh_argument(x: f32) -> f32 {
    2.0 * GELU_SCALE * (GELU_CUBE * x * x).mul_add(x, x)
}

/// `activation(x W^T + bias)`: `x [.., in]`, `weight [out, in]`, `bias [out]`; the result is `[.., out]`.
///
/// Cost: `2 rows in out` flops forward, twice that backward. Kept for the way back: the sums before the activation. Products are those of
/// [`with_products`](crate::with_products).
///
/// # Panics
/// If features disagree, or numbers are not f32 on the Flex backend.
#[must_use]
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    activation: Activation,
) -> Tensor<D> {
    let ([out, features], found) = (weight.dims(), x.dims()[D - 1]);
    assert!(
        found == features,
        "features: x has {found}, the weights have {features}; they must be equal"
    );
    let mut inputs = vec![x.into_dispatch(), weight.into_dispatch()];
    if let Some(bias) = bias {
        let [found] = bias.dims();
        assert!(
            found == out,
            "outputs: the bias has {found}, the weights have {out}; they must be equal"
        );
        inputs.push(bias.into_dispatch());
    }
    let op = Linear { activation, products: Products::here(), sums: OnceLock::new() };
    run(Arc::new(op), inputs)
}

#[derive(Debug)]
struct Linear {
    activation: Activation,
    products: Products,
    /// What the activation saw.
    sums: OnceLock<Vec<f32>>,
}

impl Operation for Linear {
    fn forward(&self, inputs: &[FlexTensor], keep: bool) -> Result<FlexTensor, Error> {
        only_f32("linear", inputs);
        let [x, weight] = [dense(&inputs[0]), dense(&inputs[1])];
        let ([m, features], out) = (rows(&x), sizes(&weight)[0]);
        let weights = Matrix::rows(numbers(&weight), [out, features]).turned();
        let mut y = self.products.multiply(Matrix::rows(numbers(&x), [m, features]), weights);
        let bias = inputs.get(2).map(dense);
        let bias: Option<&[f32]> = bias.as_ref().map(numbers);
        if let Some(bias) = bias {
            by_rows(&mut y, out, &BiasAdd(bias));
        }
        if self.activation != Activation::None {
            if keep {
                let applied = changed(&y, out, &self.activation);
                let _ = self.sums.set(std::mem::replace(&mut y, applied));
            } else {
                by_rows(&mut y, out, &self.activation);
            }
        }
        let mut shape = sizes(&x);
        *shape.last_mut().expect("a tensor has at least one axis") = out;
        Ok(tensor(y, &shape))
    }

    fn backward(&self, back: BackwardArgs<'_>) -> Vec<Option<FlexTensor>> {
        let [x, weight] = [dense(&back.inputs[0]), dense(&back.inputs[1])];
        let ([m, features], out) = (rows(&x), sizes(&weight)[0]);
        let output_grad = dense(&back.output_grad);
        let through;
        // y = activation(sums)
        let d: &[f32] = if let Some(sums) = self.sums.get() {
            let undo = ActivationBackward { activation: self.activation, sums };
            through = changed(numbers(&output_grad), out, &undo);
            &through
        } else {
            numbers(&output_grad)
        };
        let d = Matrix::rows(d, [m, out]);
        // sums = x W^T + bias
        let by_x = || {
            let weights = Matrix::rows(numbers(&weight), [out, features]);
            tensor(self.products.multiply(d, weights), &sizes(&x))
        };
        let by_weight = || {
            let x = Matrix::rows(numbers(&x), [m, features]);
            tensor(self.products.multiply(d.turned(), x), &[out, features])
        };
        let by_bias = || tensor(column_sums(d.data(), out), &[out]);
        let mut gradients = vec![back.needs_grad[0].then(by_x), back.needs_grad[1].then(by_weight)];
        if let Some(needs_grad) = back.needs_grad.get(2) {
            gradients.push(needs_grad.then(by_bias));
        }
        gradients
    }
}

/// Adds a bias.
struct BiasAdd<'a>(&'a [f32]);

impl RowWork for BiasAdd<'_> {
    #[inline(always)]
    fn row(&self, _: usize, row: &mut [f32]) {
        for (x, bias) in row.iter_mut().zip(self.0) {
            *x += bias;
        }
    }
}

impl RowWork for Activation {
    #[inline(always)]
    fn row(&self, _: usize, row: &mut [f32]) {
        self.apply_all(row);
    }
}

/// Multiplies gradients by the slopes of an activation.
struct ActivationBackward<'a> {
    activation: Activation,
    sums: &'a [f32],
}

impl RowWork for ActivationBackward<'_> {
    #[inline(always)]
    fn row(&self, i: usize, d: &mut [f32]) {
        self.activation.slope_all(&self.sums[i * d.len()..][..d.len()], d);
    }
}

/// `silu(gate) * up`, the gate of a SwiGLU layer (Shazeer 2020): both `[.., features]`.
///
/// # Panics
/// If their sizes differ, or numbers are not f32 on the Flex backend.
#[must_use]
pub fn gated<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    let (found, other) = (gate.dims(), up.dims());
    assert!(
        found == other,
        "sizes: the gate has {found:?}, the other has {other:?}; they must be equal"
    );
    run(Arc::new(SwiGlu), vec![gate.into_dispatch(), up.into_dispatch()])
}

#[derive(Debug)]
struct SwiGlu;

impl Operation for SwiGlu {
    fn forward(&self, inputs: &[FlexTensor], _: bool) -> Result<FlexTensor, Error> {
        only_f32("gated", inputs);
        let [gate, up] = [dense(&inputs[0]), dense(&inputs[1])];
        let [_, width] = rows(&gate);
        let y = changed(numbers(&gate), width, &Gate(numbers(&up)));
        Ok(tensor(y, &sizes(&gate)))
    }

    fn backward(&self, back: BackwardArgs<'_>) -> Vec<Option<FlexTensor>> {
        let [gate, up, output_grad] =
            [dense(&back.inputs[0]), dense(&back.inputs[1]), dense(&back.output_grad)];
        let ([_, width], shape) = (rows(&gate), sizes(&gate));
        let (gates, ups): (&[f32], &[f32]) = (numbers(&gate), numbers(&up));
        let by_gate = || tensor(changed(numbers(&output_grad), width, &ByGate(gates, ups)), &shape);
        let by_up = || tensor(changed(numbers(&output_grad), width, &ByUp(gates)), &shape);
        vec![back.needs_grad[0].then(by_gate), back.needs_grad[1].then(by_up)]
    }
}

/// `silu(y) * up`
struct Gate<'a>(&'a [f32]);

impl RowWork for Gate<'_> {
    #[inline(always)]
    fn row(&self, i: usize, y: &mut [f32]) {
        let up = &self.0[i * y.len()..][..y.len()];
        for (y, up) in y.iter_mut().zip(up) {
            *y = *y * sigmoid(*y) * up;
        }
    }
}

/// `d * silu'(gate) * up`
struct ByGate<'a>(&'a [f32], &'a [f32]);

impl RowWork for ByGate<'_> {
    #[inline(always)]
    fn row(&self, i: usize, d: &mut [f32]) {
        let at = i * d.len()..(i + 1) * d.len();
        for ((d, gate), up) in d.iter_mut().zip(&self.0[at.clone()]).zip(&self.1[at]) {
            *d *= Activation::Silu.slope(*gate) * up;
        }
    }
}

/// `d * silu(gate)`
struct ByUp<'a>(&'a [f32]);

impl RowWork for ByUp<'_> {
    #[inline(always)]
    fn row(&self, i: usize, d: &mut [f32]) {
        let gates = &self.0[i * d.len()..][..d.len()];
        for (d, gate) in d.iter_mut().zip(gates) {
            *d *= gate * sigmoid(*gate);
        }
    }
}
