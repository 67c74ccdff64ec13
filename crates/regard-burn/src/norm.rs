//! Layer norm (Ba et al. 2016) and RMS norm (Zhang and Sennrich 2019).

use crate::error::Error;
use crate::op::{BackwardArgs, Operation, run};
use crate::rows::{RowSums, RowWork, changed, summed};
use crate::tensors::{dense, numbers, only_f32, rows, sizes, tensor};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use regard_matmul::sum;
use std::ops::Range;
use std::sync::Arc;

/// `(x - mean) / sqrt(variance + eps) * weight + bias`, over the last axis: `weight`, `bias [features]`.
///
/// # Panics
/// If features disagree, or numbers are not f32 on the Flex backend.
#[must_use]
pub fn layer_norm<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    bias: Tensor<1>,
    eps: f64,
) -> Tensor<D> {
    norm(x, weight, Some(bias), eps)
}

/// `x / sqrt(mean of squares + eps) * weight`, over the last axis: `weight [features]`.
///
/// # Panics
/// If features disagree, or numbers are not f32 on the Flex backend.
#[must_use]
pub fn rms_norm<const D: usize>(x: Tensor<D>, weight: Tensor<1>, eps: f64) -> Tensor<D> {
    norm(x, weight, None, eps)
}

fn norm<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<1>,
    bias: Option<Tensor<1>>,
    eps: f64,
) -> Tensor<D> {
    let features = x.dims()[D - 1];
    for (what, found) in
        [("weight", Some(weight.dims())), ("bias", bias.as_ref().map(Tensor::dims))]
    {
        let found = found.map_or(features, |[n]| n);
        assert!(
            found == features,
            "features: x has {features}, the {what} has {found}; they must be equal"
        );
    }
    #[expect(clippy::cast_possible_truncation, reason = "numbers are f32")]
    let op = Norm { centered: bias.is_some(), eps: eps as f32 };
    let inputs = [x.into_dispatch(), weight.into_dispatch()];
    run(Arc::new(op), inputs.into_iter().chain(bias.map(Tensor::into_dispatch)).collect())
}

#[derive(Debug)]
struct Norm {
    /// Whether the mean is subtracted, and a bias added.
    centered: bool,
    eps: f32,
}

impl Norm {
    /// The mean that is subtracted and the factor that follows. Computed again on the way back: two sums over a row that is
    /// read anyway cost less than keeping them.
    #[inline(always)]
    fn of(&self, x: &[f32]) -> [f32; 2] {
        let n = x.len() as f32;
        let mean = if self.centered { sum!(x in x => x) / n } else { 0.0 };
        let variance = sum!(x in x => (x - mean) * (x - mean)) / n;
        [mean, 1.0 / (variance + self.eps).sqrt()]
    }
}

/// What the norm of a row needs beside it.
struct NormArgs<'a> {
    norm: &'a Norm,
    x: &'a [f32],
    d: &'a [f32],
    weight: &'a [f32],
    bias: &'a [f32],
}

/// The norm of each row.
struct NormRows<'a>(NormArgs<'a>);

impl RowWork for NormRows<'_> {
    #[inline(always)]
    fn row(&self, _: usize, y: &mut [f32]) {
        let around = &self.0;
        let [mean, factor] = around.norm.of(y);
        for (y, weight) in y.iter_mut().zip(around.weight) {
            *y = (*y - mean) * factor * weight;
        }
        for (y, bias) in y.iter_mut().zip(around.bias) {
            *y += bias;
        }
    }
}

/// Gradients by the rows.
struct ByRow<'a>(&'a NormArgs<'a>);

impl RowWork for ByRow<'_> {
    #[inline(always)]
    fn row(&self, i: usize, d: &mut [f32]) {
        let around = self.0;
        let (width, n) = (d.len(), d.len() as f32);
        let (x, weight) = (&around.x[i * width..][..width], &around.weight[..width]);
        let [mean, factor] = around.norm.of(x);
        // With h = (x - mean) factor and g = d weight: factor (g - mean of g - h mean of g h).
        let along = sum!(d in d, w in weight, x in x => d * w * (x - mean)) / n * factor * factor;
        let across =
            if around.norm.centered { sum!(d in d, w in weight => d * w) / n } else { 0.0 };
        for ((d, x), weight) in d.iter_mut().zip(x).zip(weight) {
            *d = factor * (*d * weight - across - (x - mean) * along);
        }
    }
}

/// Gradients by the weights, and after them by the biases if there are any.
struct ByParameters<'a>(&'a NormArgs<'a>);

impl RowSums for ByParameters<'_> {
    #[inline(always)]
    fn add(&self, rows: Range<usize>, sums: &mut [f32]) {
        let around = self.0;
        let width = around.weight.len();
        let (weight, bias) = sums.split_at_mut(width);
        for i in rows {
            let (x, d) = (&around.x[i * width..][..width], &around.d[i * width..][..width]);
            let [mean, factor] = around.norm.of(x);
            for ((sum, x), d) in weight.iter_mut().zip(x).zip(d) {
                *sum += d * (x - mean) * factor;
            }
            for (sum, d) in bias.iter_mut().zip(d) {
                *sum += d;
            }
        }
    }
}

impl Operation for Norm {
    fn forward(&self, inputs: &[FlexTensor], _: bool) -> Result<FlexTensor, Error> {
        only_f32("norm", inputs);
        let [x, weight] = [dense(&inputs[0]), dense(&inputs[1])];
        let bias = inputs.get(2).map(dense);
        let bias = bias.as_ref().map_or(&[][..], numbers);
        let (x_numbers, weight) = (numbers(&x), numbers(&weight));
        let around = NormArgs { norm: self, x: x_numbers, d: &[], weight, bias };
        Ok(tensor(changed(x_numbers, weight.len(), &NormRows(around)), &sizes(&x)))
    }

    fn backward(&self, back: BackwardArgs<'_>) -> Vec<Option<FlexTensor>> {
        let [x, weight, output_grad] =
            [dense(&back.inputs[0]), dense(&back.inputs[1]), dense(&back.output_grad)];
        let ([m, width], d) = (rows(&x), numbers(&output_grad));
        let around =
            NormArgs { norm: self, x: numbers(&x), d, weight: numbers(&weight), bias: &[] };
        let by_x = || tensor(changed(d, width, &ByRow(&around)), &sizes(&x));
        let both = if self.centered { 2 * width } else { width };
        let mut by_weight = summed(m, both, &ByParameters(&around));
        let by_bias = by_weight.split_off(width);
        let mut gradients = vec![
            back.needs_grad[0].then(by_x),
            back.needs_grad[1].then(|| tensor(by_weight, &[width])),
        ];
        if let Some(needs_grad) = back.needs_grad.get(2) {
            gradients.push(needs_grad.then(|| tensor(by_bias, &[width])));
        }
        gradients
    }
}
