//! Feature maps of linear attention.

use crate::random::{halves, philox};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, ArrayViewMut2};
use regard::{Error, Machine, Number};
use std::f64::consts::{LN_2, LOG2_E, TAU};

/// Maps a query or a key to non-negative features.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FeatureMap {
    /// `elu(x) + 1`, elementwise: `x + 1` above 0, `e^x` below (Katharopoulos et al. 2020).
    EluPlusOne,
    /// `max(x, 0)`, elementwise. A query that shares no positive feature with any visible key has weights of 0 and an
    /// output of 0.
    Relu,
    /// Positive orthogonal random features (FAVOR+, Choromanski et al. 2021): `e^(w . x - |x|^2 / 2)` for random directions
    /// `w`, with `x` divided by the fourth root of its number of features. Dot products of features estimate
    /// `e^(q . k / sqrt(dim))`, the unnormalized softmax weights. Directions are orthogonal in blocks of `dim`, each with
    /// the norm of a standard normal vector.
    ///
    /// All heads share the directions. Exponentials of a query are relative to its largest one, those of keys to the
    /// largest of the keys up to the end of the row's chunk of 64 positions, rounded up to a power of two. The
    /// normalization cancels these factors, so that no exponential overflows. A key whose features are all `2^126` times
    /// smaller than those of another key in its chunk contributes nothing there, not even to a row before that other key.
    PositiveRandom {
        /// Number of directions. The error of the estimate falls with its square root.
        features: usize,
        /// Seed of the directions.
        seed: u64,
    },
}

/// Upper limit of the number of random features.
const MAX_FEATURES: usize = 1 << 20;
/// Upper limit of the entries of all random directions.
const ENTRIES: usize = 1 << 30;

impl FeatureMap {
    /// Number of features of a mapped row that has `dim` features of its own.
    #[must_use]
    pub fn features(self, dim: usize) -> usize {
        match self {
            Self::EluPlusOne | Self::Relu => dim,
            Self::PositiveRandom { features, .. } => features,
        }
    }

    /// Short name: `elu`, `relu` or, for 256 random features, `random256`.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::EluPlusOne => "elu".into(),
            Self::Relu => "relu".into(),
            Self::PositiveRandom { features, .. } => format!("random{features}"),
        }
    }

    /// Validates the map for rows of `dim` features.
    fn check(self, dim: usize) -> Result<(), Error> {
        let Self::PositiveRandom { features, .. } = self else { return Ok(()) };
        if features == 0 {
            return Err(Error::Zero { option: "random features" });
        }
        Error::unless_below("random features", features, MAX_FEATURES + 1)?;
        Error::unless_below("features of a row under a random map", dim, ENTRIES / features + 1)
    }

    /// Directions of a random map, `[features][dim]`; empty for the other maps.
    pub(super) fn directions(self, dim: usize) -> Vec<f64> {
        let Self::PositiveRandom { features, seed } = self else { return Vec::new() };
        let mut all = Vec::with_capacity(features * dim);
        for first in (0..features).step_by(dim.max(1)) {
            let block = first..(first + dim).min(features);
            let normal = |draw: usize| normals(seed, draw as u64, dim);
            let rows = orthonormal(block.clone().map(|row| normal(2 * row)).collect());
            for (row, direction) in block.zip(rows) {
                let length = norm(&normal(2 * row + 1));
                all.extend(direction.iter().map(|x| x * length));
            }
        }
        all
    }
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// `count` standard normal numbers (Box and Muller 1958); each `draw` gives others.
fn normals(seed: u64, draw: u64, count: usize) -> Vec<f64> {
    let [low, high] = halves(draw);
    let pair = |i: usize| {
        let [at, _] = halves(i as u64);
        let [a, b, c, d] = philox([low, high, at, 0], halves(seed));
        let unit = |a: u32, b: u32| {
            ((u64::from(a) << 21 ^ u64::from(b) >> 11) as f64 + 0.5) / 2f64.powi(53)
        };
        let (radius, angle) = ((-2.0 * unit(a, b).ln()).sqrt(), TAU * unit(c, d));
        [radius * angle.cos(), radius * angle.sin()]
    };
    (0..count.div_ceil(2)).flat_map(pair).take(count).collect()
}

/// Gram-Schmidt orthonormalization. Projecting twice is enough for orthogonality to rounding.
fn orthonormal(mut rows: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    for i in 0..rows.len() {
        let (before, rest) = rows.split_at_mut(i);
        let row = &mut rest[0];
        for other in before.iter().chain(before.iter()) {
            let along: f64 = row.iter().zip(other).map(|(a, b)| a * b).sum();
            row.iter_mut().zip(other).for_each(|(a, b)| *a -= along * b);
        }
        let length = norm(row);
        row.iter_mut().for_each(|x| *x /= length);
    }
    rows
}

/// Whether queries or keys are mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Queries,
    Keys,
}

/// A feature map prepared for rows of `dim` features.
#[derive(Clone, Debug)]
pub(super) struct Map<N> {
    pub(super) map: FeatureMap,
    dim: usize,
    /// `[features, dim]`, times `dim^(-1/4)` and `log2 e`, which makes exponentials base 2. Empty unless the map is random.
    directions: Array2<N>,
}

impl<N: Number> Map<N> {
    /// Refuses a map that does not fit such rows.
    pub(super) fn new(map: FeatureMap, dim: usize) -> Result<Self, Error> {
        map.check(dim)?;
        let factor = LOG2_E * (dim as f64).powf(-0.25);
        let w = map.directions(dim);
        let size = if w.is_empty() { [0; 2] } else { [w.len() / dim, dim] };
        let scaled = |(i, j): (usize, usize)| N::from_f64(w[i * dim + j] * factor);
        Ok(Self { map, dim, directions: Array2::from_shape_fn(size, scaled) })
    }

    fn is_random(&self) -> bool {
        !self.directions.is_empty()
    }

    /// Features of a mapped row.
    pub(super) fn features(&self) -> usize {
        self.map.features(self.dim)
    }

    /// Arguments of the features of the rows `x`: of random features their base-2 logarithms, otherwise what
    /// [`finish`](Self::finish) needs. Logarithms of a query are relative to its largest.
    ///
    /// Returns the smallest integer whose power of two bounds the features of keys; 0 unless the map is random.
    pub(super) fn arguments(
        &self,
        x: ArrayView2<'_, N>,
        side: Side,
        mut to: ArrayViewMut2<'_, N>,
    ) -> N {
        let (zero, log2_e) = (N::zero(), N::from_f64(LOG2_E));
        // Conditions are such that NaN stays NaN.
        match self.map {
            FeatureMap::EluPlusOne => {
                to.zip_mut_with(&x, |to, x| *to = if *x > zero { zero } else { *x * log2_e });
            }
            FeatureMap::Relu => {
                to.zip_mut_with(&x, |to, x| *to = if *x < zero { zero } else { *x });
            }
            FeatureMap::PositiveRandom { features, .. } => {
                general_mat_mul(N::one(), &x, &self.directions.t(), zero, &mut to);
                let half = N::from_f64(0.5 * LOG2_E / (self.dim as f64).sqrt());
                let mut top = N::neg_infinity();
                for (to, x) in flat(&mut to).chunks_mut(features).zip(x.rows()) {
                    let most = largest(to);
                    // The norm of a query scales all its features, which the normalization cancels.
                    let by = if side == Side::Queries { most } else { half * x.dot(&x) };
                    to.iter_mut().for_each(|x| *x = *x - by);
                    top = larger(top, most - by);
                }
                return top.ceil();
            }
        }
        zero
    }

    /// Turns the arguments of the rows `x` into features. Exponentials are divided by `2^top`.
    pub(super) fn finish(
        &self,
        machine: Machine,
        x: ArrayView2<'_, N>,
        top: N,
        mut to: ArrayViewMut2<'_, N>,
    ) {
        if self.is_random() && top != N::zero() {
            to.mapv_inplace(|x| x - top);
        }
        if self.map != FeatureMap::Relu {
            machine.exp2(flat(&mut to));
        }
        if self.map == FeatureMap::EluPlusOne {
            // 2^0 + x above 0.
            let above = |x: N| if x > N::zero() { x } else { N::zero() };
            to.zip_mut_with(&x, |to, x| *to = *to + above(*x));
        }
    }

    /// Turns gradients of features into gradients of arguments. The derivative of every map is a function of the feature
    /// alone.
    pub(super) fn derivative(&self, features: ArrayView2<'_, N>, mut d: ArrayViewMut2<'_, N>) {
        let (zero, one) = (N::zero(), N::one());
        let of = |phi: N| match self.map {
            FeatureMap::EluPlusOne if phi > one => one,
            FeatureMap::Relu if phi > zero => one,
            FeatureMap::Relu => zero,
            FeatureMap::EluPlusOne | FeatureMap::PositiveRandom { .. } => phi,
        };
        d.zip_mut_with(&features, |d, phi| *d = *d * of(*phi));
    }

    /// Replaces the rows `x` by their gradient, from the gradient `d` of their arguments.
    ///
    /// Scaling all features of a query changes nothing, so its norm contributes no gradient.
    pub(super) fn back(&self, d: ArrayView2<'_, N>, side: Side, mut x: ArrayViewMut2<'_, N>) {
        if !self.is_random() {
            return x.assign(&d);
        }
        // Backward pass of `w . x - |x|^2 / 2`: d w - d x, each summed over the directions. `ln 2` undoes their factor
        // `log2 e`.
        let size = match side {
            Side::Queries => N::zero(),
            Side::Keys => N::from_f64(-1.0 / (self.dim as f64).sqrt()),
        };
        for (mut x, d) in x.rows_mut().into_iter().zip(d.rows()) {
            let factor = size * d.sum();
            x.mapv_inplace(|x| x * factor);
        }
        general_mat_mul(N::from_f64(LN_2), &d, &self.directions, N::one(), &mut x);
    }
}

/// The numbers of the first rows of a matrix.
fn flat<'a, N>(rows: &'a mut ArrayViewMut2<'_, N>) -> &'a mut [N] {
    match rows.as_slice_mut() {
        Some(numbers) => numbers,
        None => unreachable!("rows of scratch lie one after another"),
    }
}

fn larger<N: Number>(a: N, b: N) -> N {
    if b > a { b } else { a }
}

/// The largest number, NaN ignored; `-inf` if there is none. Each lane has a maximum of its own, so that the compiler uses
/// vectors.
fn largest<N: Number>(x: &[N]) -> N {
    let mut lanes = [N::neg_infinity(); 16];
    let (chunks, rest) = x.as_chunks();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip::<&[N; 16]>(chunk) {
            *lane = larger(*lane, *x);
        }
    }
    lanes.iter().chain(rest).fold(N::neg_infinity(), |a, b| larger(a, *b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directions_are_orthogonal_in_blocks_and_as_long_as_normal_vectors() {
        let (dim, features) = (16, 40);
        let w = FeatureMap::PositiveRandom { features, seed: 3 }.directions(dim);
        assert_eq!(w.len(), features * dim);
        let row = |i: usize| &w[i * dim..][..dim];
        for i in 0..features {
            for j in 0..i {
                let along: f64 = row(i).iter().zip(row(j)).map(|(a, b)| a * b).sum();
                assert!(i / dim != j / dim || along.abs() < 1e-12, "{i} {j} {along}");
                assert!(along.abs() < 0.9 * norm(row(i)) * norm(row(j)), "{i} {j} alike");
            }
        }
        let mean = w.iter().map(|x| x * x).sum::<f64>() / w.len() as f64;
        assert!((mean - 1.0).abs() < 0.3, "{mean}");
    }

    /// Uses rows of small norm: the variance of the estimate grows exponentially with the norm.
    #[test]
    fn products_of_random_features_estimate_the_softmax_kernel() {
        let (dim, features, seeds) = (8, 1 << 12, 0..8);
        let row = |draw: u64| -> Vec<f64> {
            normals(77, draw, dim).iter().map(|x| 0.5 * x / (dim as f64).powf(0.25)).collect()
        };
        let (q, k) = (row(1), row(2));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let phi = |x: &[f64], w: &[f64]| (dot(w, x) - dot(x, x) / 2.0).exp();
        let sum: f64 = seeds
            .clone()
            .flat_map(|seed| {
                let w = FeatureMap::PositiveRandom { features, seed }.directions(dim);
                w.chunks(dim).map(|w| phi(&q, w) * phi(&k, w)).collect::<Vec<f64>>()
            })
            .sum();
        let (estimate, exact) = (sum / (features * seeds.count()) as f64, dot(&q, &k).exp());
        assert!((estimate - exact).abs() < 0.06 * exact, "{estimate} {exact}");
    }
}
