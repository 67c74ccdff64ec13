//! What is done to rows between products: norms, activations, rotations.
//!
//! A row is changed by itself, in an order of operations that is fixed: its bits do not depend on other rows or on threads.

use crate::files::{Activation, NormConfig, PairLayout, RopeConfig};
use pulp::NullaryFnOnce;
use rayon::prelude::*;
use regard_matmul::math::{erf, exp, tanh, vectorized};
use regard_matmul::sum;

/// What is done to each row; its method must be `#[inline(always)]`, see [`vectorized`].
pub(super) trait RowWork: Sync {
    /// Changes the row of this number.
    fn row(&self, number: usize, row: &mut [f32]);
}

struct SomeRows<'a, W> {
    rows: &'a mut [f32],
    width: usize,
    first: usize,
    work: &'a W,
}

impl<W: RowWork> NullaryFnOnce for SomeRows<'_, W> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (i, row) in self.rows.chunks_mut(self.width).enumerate() {
            self.work.row(self.first + i, row);
        }
    }
}

/// Numbers from which on threads share the work: less is done before another thread wakes up.
const PARALLEL: usize = 1 << 14;

/// Changes all rows, of `width` numbers each.
pub(super) fn each_row<W: RowWork>(rows: &mut [f32], width: usize, work: &W) {
    let all = rows.len() / width.max(1);
    if rows.len() < PARALLEL {
        return vectorized(SomeRows { rows, width, first: 0, work });
    }
    let some = all.div_ceil(4 * rayon::current_num_threads()).max(1);
    rows.par_chunks_mut(some * width).enumerate().for_each(|(i, rows)| {
        vectorized(SomeRows { rows, width, first: i * some, work });
    });
}

/// One after the other, while the row is in the cache.
pub(super) struct Then<A, B>(pub(super) A, pub(super) B);

impl<A: RowWork, B: RowWork> RowWork for Then<A, B> {
    #[inline(always)]
    fn row(&self, number: usize, row: &mut [f32]) {
        self.0.row(number, row);
        self.1.row(number, row);
    }
}

/// The norm of each group of `weight.len()` numbers of a row.
pub(super) struct Norm<'a> {
    pub(super) weight: &'a [f32],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) config: NormConfig,
}

impl RowWork for Norm<'_> {
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "numbers are f32")]
    fn row(&self, _: usize, row: &mut [f32]) {
        let n = self.weight.len();
        for x in row.chunks_exact_mut(n) {
            let mean = if self.config.rms { 0.0 } else { sum!(a in &*x => a) / n as f32 };
            let square = sum!(a in &*x => (a - mean) * (a - mean)) / n as f32;
            let scale = 1.0 / (square + self.config.eps as f32).sqrt();
            for (x, weight) in x.iter_mut().zip(self.weight) {
                *x = (*x - mean) * scale * weight;
            }
            if let Some(bias) = self.bias {
                for (x, bias) in x.iter_mut().zip(bias) {
                    *x += bias;
                }
            }
        }
    }
}

#[inline(always)]
fn activated(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::Relu => x.max(0.0),
        Activation::Gelu => 0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2)),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + tanh(0.797_884_6 * (0.044_715 * x * x).mul_add(x, x)))
        }
        Activation::Silu => x / (1.0 + exp(-x)),
    }
}

/// `activation(x)`, times `other` if there is one: a gate.
pub(super) struct Activate<'a> {
    pub(super) activation: Activation,
    pub(super) other: Option<&'a [f32]>,
}

impl RowWork for Activate<'_> {
    #[inline(always)]
    fn row(&self, number: usize, row: &mut [f32]) {
        let other = self.other.map(|other| &other[number * row.len()..][..row.len()]);
        // One loop for each: a branch within would keep it from becoming vectors.
        macro_rules! loops {
            ($($activation:ident),+) => {
                match (self.activation, other) {
                    $((Activation::$activation, None) => {
                        row.iter_mut().for_each(|x| *x = activated(Activation::$activation, *x));
                    })+
                    $((Activation::$activation, Some(other)) => {
                        for (x, other) in row.iter_mut().zip(other) {
                            *x = activated(Activation::$activation, *x) * other;
                        }
                    })+
                }
            };
        }
        loops!(Relu, Gelu, GeluTanh, Silu);
    }
}

/// The row of the same number.
pub(super) struct Copy<'a>(pub(super) &'a [f32]);

impl RowWork for Copy<'_> {
    #[inline(always)]
    fn row(&self, number: usize, row: &mut [f32]) {
        row.copy_from_slice(&self.0[number * row.len()..][..row.len()]);
    }
}

/// The hyperbolic tangent.
pub(super) struct Tanh;

impl RowWork for Tanh {
    #[inline(always)]
    fn row(&self, _: usize, row: &mut [f32]) {
        for x in row {
            *x = tanh(*x);
        }
    }
}

/// Adds a row of the same number, times a factor, or one row to all.
pub(super) struct Add<'a> {
    pub(super) other: &'a [f32],
    pub(super) factor: f32,
}

impl RowWork for Add<'_> {
    #[inline(always)]
    fn row(&self, number: usize, row: &mut [f32]) {
        let n = row.len();
        let other = if self.other.len() == n { self.other } else { &self.other[number * n..][..n] };
        for (x, other) in row.iter_mut().zip(other) {
            *x = other.mul_add(self.factor, *x);
        }
    }
}

/// `cap * tanh(x / cap)`
pub(super) struct SoftCap(pub(super) f32);

impl RowWork for SoftCap {
    #[inline(always)]
    fn row(&self, _: usize, row: &mut [f32]) {
        for x in row {
            *x = self.0 * tanh(*x / self.0);
        }
    }
}

/// Cosines and sines of the rotations of some rows, for one kind of rotation.
#[derive(Debug)]
pub(super) struct Rotations {
    cos: Vec<f32>,
    sin: Vec<f32>,
    dim: usize,
    pairs: PairLayout,
}

impl Rotations {
    #[expect(clippy::cast_possible_truncation, reason = "numbers are f32")]
    pub(super) fn new(rope: &RopeConfig, positions: &[usize]) -> Self {
        let angles =
            || positions.iter().flat_map(|p| rope.frequencies.iter().map(move |f| f * (*p as f64)));
        Self {
            cos: angles().map(|angle| (angle.cos() * rope.magnitude) as f32).collect(),
            sin: angles().map(|angle| (angle.sin() * rope.magnitude) as f32).collect(),
            dim: rope.dim,
            pairs: rope.pairs,
        }
    }
}

/// Rotates each head of a row by the position of the row.
pub(super) struct Rotate<'a> {
    pub(super) rotations: &'a Rotations,
    /// The number of the first row among those that have rotations.
    pub(super) first: usize,
    pub(super) head_dim: usize,
}

impl RowWork for Rotate<'_> {
    #[inline(always)]
    fn row(&self, number: usize, row: &mut [f32]) {
        let Rotations { cos, sin, dim, pairs } = self.rotations;
        let half = dim / 2;
        let at = (self.first + number) * half;
        let (cos, sin) = (&cos[at..][..half], &sin[at..][..half]);
        for head in row.chunks_exact_mut(self.head_dim) {
            let head = &mut head[..*dim];
            match pairs {
                PairLayout::HalfSplit => {
                    let (first, second) = head.split_at_mut(half);
                    for i in 0..half {
                        let (a, b) = (first[i], second[i]);
                        first[i] = a * cos[i] - b * sin[i];
                        second[i] = b * cos[i] + a * sin[i];
                    }
                }
                PairLayout::Interleaved => {
                    for (i, pair) in head.chunks_exact_mut(2).enumerate() {
                        let (a, b) = (pair[0], pair[1]);
                        pair[0] = a * cos[i] - b * sin[i];
                        pair[1] = b * cos[i] + a * sin[i];
                    }
                }
            }
        }
    }
}
