//! What a layer adds to the stream that runs past it, some of it dropped while training.

use crate::error::Error;
use crate::op::{BackwardArgs, Operation, run};
use crate::rows::{RowWork, changed};
use crate::tensors::{dense, numbers, only_f32, rows, sizes, tensor};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use std::sync::Arc;

/// Which numbers are dropped: a function of the seed and of the place alone, so that the way back knows it too and nothing is
/// kept. A dropped number is 0; the others grow by `1 / (1 - rate)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ElementDropout {
    /// The probability, below 1.
    pub rate: f64,
    /// Another draw for every seed.
    pub seed: u64,
}

impl ElementDropout {
    /// Words below it are dropped, and what the others are multiplied by.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of 2^32")]
    fn limits(self) -> (u32, f32) {
        let rate = self.rate.clamp(0.0, 1.0 - 1e-9);
        ((rate * 2f64.powi(32)) as u32, (1.0 / (1.0 - rate)) as f32)
    }

    /// Multiplies each number by 0 or by the growth.
    #[inline(always)]
    fn apply(self, first: usize, numbers: &mut [f32]) {
        let (threshold, growth) = self.limits();
        for (i, x) in numbers.iter_mut().enumerate() {
            *x *= if word(self.seed, (first + i) as u64) < threshold { 0.0 } else { growth };
        }
    }
}

/// A random word of a place: SplitMix64 (Steele et al. 2014), of which the upper half is taken.
#[inline(always)]
fn word(seed: u64, place: u64) -> u32 {
    let x = seed.wrapping_add(place.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ (x >> 31)) >> 32) as u32
}

/// `stream + dropped(x)`.
///
/// # Panics
/// If sizes differ, or numbers are not f32 on the Flex backend.
#[must_use]
pub fn residual<const D: usize>(
    stream: Tensor<D>,
    x: Tensor<D>,
    drop: Option<ElementDropout>,
) -> Tensor<D> {
    let (found, other) = (stream.dims(), x.dims());
    assert!(
        found == other,
        "sizes: the stream has {found:?}, the layer {other:?}; they must be equal"
    );
    run(Arc::new(Residual { drop }), vec![stream.into_dispatch(), x.into_dispatch()])
}

/// `x` with some of its numbers dropped.
///
/// # Panics
/// If numbers are not f32 on the Flex backend.
#[must_use]
pub fn dropout<const D: usize>(x: Tensor<D>, drop: Option<ElementDropout>) -> Tensor<D> {
    match drop {
        Some(drop) => run(Arc::new(DropoutOp { drop }), vec![x.into_dispatch()]),
        None => x,
    }
}

#[derive(Debug)]
struct Residual {
    drop: Option<ElementDropout>,
}

impl Operation for Residual {
    fn forward(&self, inputs: &[FlexTensor], _: bool) -> Result<FlexTensor, Error> {
        only_f32("residual", inputs);
        let [stream, x] = [dense(&inputs[0]), dense(&inputs[1])];
        let [_, width] = rows(&x);
        let y = changed(
            numbers(&x),
            width,
            &AddWithDropout { drop: self.drop, stream: numbers(&stream) },
        );
        Ok(tensor(y, &sizes(&x)))
    }

    fn backward(&self, back: BackwardArgs<'_>) -> Vec<Option<FlexTensor>> {
        let by_x = match self.drop {
            Some(drop) => back.needs_grad[1].then(|| dropped(&back.output_grad, drop)),
            None => back.needs_grad[1].then(|| back.output_grad.clone()),
        };
        vec![back.needs_grad[0].then_some(back.output_grad), by_x]
    }
}

#[derive(Debug)]
struct DropoutOp {
    drop: ElementDropout,
}

impl Operation for DropoutOp {
    fn forward(&self, inputs: &[FlexTensor], _: bool) -> Result<FlexTensor, Error> {
        only_f32("dropout", inputs);
        Ok(dropped(&inputs[0], self.drop))
    }

    fn backward(&self, back: BackwardArgs<'_>) -> Vec<Option<FlexTensor>> {
        vec![back.needs_grad[0].then(|| dropped(&back.output_grad, self.drop))]
    }
}

fn dropped(x: &FlexTensor, drop: ElementDropout) -> FlexTensor {
    let x = dense(x);
    let [_, width] = rows(&x);
    let y = changed(numbers(&x), width, &drop);
    tensor(y, &sizes(&x))
}

impl RowWork for ElementDropout {
    #[inline(always)]
    fn row(&self, i: usize, y: &mut [f32]) {
        self.apply(i * y.len(), y);
    }
}

/// Drops, then adds the stream.
struct AddWithDropout<'a> {
    drop: Option<ElementDropout>,
    stream: &'a [f32],
}

impl RowWork for AddWithDropout<'_> {
    #[inline(always)]
    fn row(&self, i: usize, y: &mut [f32]) {
        let first = i * y.len();
        if let Some(drop) = self.drop {
            drop.apply(first, y);
        }
        for (y, x) in y.iter_mut().zip(&self.stream[first..]) {
            *y += x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_dropped_as_was_said() {
        for rate in [0.0, 0.1, 0.5, 0.9] {
            let mut x = vec![1.0f32; 100_000];
            ElementDropout { rate, seed: 7 }.apply(0, &mut x);
            let dropped = x.iter().filter(|x| **x == 0.0).count() as f64 / 1e5;
            assert!((dropped - rate).abs() < 0.005, "{rate}: {dropped}");
            let mean = f64::from(x.iter().sum::<f32>()) / 1e5;
            assert!((mean - 1.0).abs() < 0.03, "{rate}: {mean}");
        }
    }
}
