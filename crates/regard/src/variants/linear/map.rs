//! Feature maps of linear attention.

use crate::description::dropout::{halves, philox};
use crate::description::score::LOG2_E;
use crate::error::Error;
use crate::kernel::lanes::{load_transposed, scale_lanes};
use crate::kernel::micro::{Dots, add_values, dot_tile};
use crate::machine::simd::{Element, GROUP, Isa, Lanes, Number, leaf, math};
use crate::tensor::index::Span;
use crate::tensor::view::Rows;
use std::f64::consts::{LN_2, TAU};

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
    pub(crate) fn check(self, dim: usize) -> Result<(), Error> {
        match self {
            Self::PositiveRandom { features: 0, .. } => {
                Err(Error::Zero { option: "random features" })
            }
            Self::PositiveRandom { features, .. } if features > MAX_FEATURES => {
                let (option, limit) = ("random features", MAX_FEATURES + 1);
                Err(Error::OutOfRange { option, found: features, limit })
            }
            Self::PositiveRandom { features, .. } if dim > ENTRIES / features => {
                let (option, limit) =
                    ("features of a row under a random map", ENTRIES / features + 1);
                Err(Error::OutOfRange { option, found: dim, limit })
            }
            _ => Ok(()),
        }
    }

    /// Directions of a random map, `[features][dim]`; empty for the other maps.
    pub(crate) fn directions(self, dim: usize) -> Vec<f64> {
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
        let words = philox([[low], [high], [at], [0]], halves(seed));
        let unit = |a: u32, b: u32| {
            ((u64::from(a) << 21 ^ u64::from(b) >> 11) as f64 + 0.5) / 2f64.powi(53)
        };
        let [[a], [b], [c], [d]] = words;
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
pub(crate) enum Side {
    Queries,
    Keys,
}

/// A feature map prepared for rows of `dim` features.
#[derive(Clone, Debug)]
pub(crate) struct Map<N> {
    map: FeatureMap,
    dim: usize,
    /// `[features][dim]`, times `dim^(-1/4)` and `log2 e`, which makes exponentials base 2.
    directions: Vec<N>,
}

impl<N: Number> Map<N> {
    pub(crate) fn new(map: FeatureMap, dim: usize) -> Self {
        let factor = LOG2_E * (dim as f64).powf(-0.25);
        let directions = map.directions(dim);
        let directions = directions.into_iter().map(|w| N::from_f64(w * factor)).collect();
        Self { map, dim, directions }
    }

    pub(crate) fn features(&self) -> usize {
        self.map.features(self.dim)
    }

    /// Features to transpose into lanes before the map is applied; 0 for elementwise maps.
    pub(crate) fn inputs(&self) -> usize {
        if self.is_random() { self.dim } else { 0 }
    }

    fn is_random(&self) -> bool {
        matches!(self.map, FeatureMap::PositiveRandom { .. })
    }

    fn rows(&self) -> Rows<'_, N> {
        Rows { data: &self.directions, stride: self.dim, len: self.features(), dim: self.dim }
    }

    /// Arguments of the features of `count` rows, `[features][lanes]`: the rows themselves, or base-2 logarithms of the
    /// features. For random maps, `x` receives the rows in lanes.
    pub(crate) fn arguments<'r, E: Element<Num = N>>(
        &self,
        isa: Isa,
        (row, count): (impl Fn(usize) -> &'r [E], usize),
        side: Side,
        x: &mut [Lanes<N>],
        to: &mut [Lanes<N>],
    ) {
        if !self.is_random() {
            return load_transposed(isa, row, count, N::one(), to);
        }
        let span = Span::first(count);
        load_transposed(isa, row, count, N::one(), x);
        dot_tile(isa, (self.rows(), x), span, to, &mut Dots);
        if side == Side::Queries {
            return; // the norm of a query scales all its features, which the normalization cancels
        }
        let half = N::from_f64(0.5 * LOG2_E / (self.dim as f64).sqrt());
        take_squares(isa, x, half, span, to);
    }

    /// Smallest integer whose power of two bounds the features of `count` keys; 0 unless the map is random.
    pub(crate) fn reference(&self, arguments: &[Lanes<N>], count: usize) -> N {
        if !self.is_random() {
            return N::zero();
        }
        let mut largest = [N::neg_infinity(); GROUP];
        for x in arguments {
            for (largest, x) in largest[..count].iter_mut().zip(&x.0) {
                *largest = if *x > *largest { *x } else { *largest };
            }
        }
        largest.into_iter().fold(N::neg_infinity(), |a, b| if b > a { b } else { a }).ceil()
    }

    /// Largest argument of each row, to which its exponentials are relative.
    pub(crate) fn largest(&self, arguments: &[Lanes<N>], count: usize) -> Lanes<N> {
        let mut largest = Lanes([N::zero(); GROUP]);
        if self.is_random() {
            largest.0[..count].fill(N::neg_infinity());
            for x in arguments {
                for (largest, x) in largest.0.iter_mut().zip(&x.0) {
                    *largest = if *x > *largest { *x } else { *largest };
                }
            }
        }
        largest
    }

    /// Turns arguments into features. Exponentials are relative to `top`.
    pub(crate) fn map(&self, isa: Isa, span: Span, top: &Lanes<N>, x: &mut [Lanes<N>]) {
        features(isa, self.map, span, top, x);
    }

    /// Turns gradients of features into gradients of arguments. The derivative of every map is a function of the feature
    /// alone.
    pub(crate) fn derivative(
        &self,
        isa: Isa,
        span: Span,
        features: &[Lanes<N>],
        d: &mut [Lanes<N>],
    ) {
        derivatives(isa, self.map, span, features, d);
    }

    /// Gradient of the rows, `[dim][lanes]`, from the gradient `d` of the arguments: `d` itself, or for a random map the
    /// sum over the directions, which overwrites `inputs`.
    ///
    /// Scaling all features of a query changes nothing, so its norm contributes no gradient.
    pub(crate) fn back<'d>(
        &self,
        isa: Isa,
        span: Span,
        d: &'d [Lanes<N>],
        (side, inputs): (Side, &'d mut [Lanes<N>]),
    ) -> &'d [Lanes<N>] {
        if !self.is_random() {
            return d;
        }
        // Backward pass of `w . x - |x|^2 / 2`: d w - d x, each summed over the directions. `ln 2` undoes their factor
        // `log2 e`.
        let mut factor = Lanes([N::zero(); GROUP]);
        let size = N::from_f64(-LOG2_E / (self.dim as f64).sqrt());
        for d in d.iter().filter(|_| side == Side::Keys) {
            factor.0.iter_mut().zip(&d.0).for_each(|(sum, d)| *sum = *sum + *d);
        }
        factor.0.iter_mut().for_each(|x| *x = *x * size);
        let rows = (self.rows(), &[][..]);
        add_values(isa, rows, (d, &[]), span, (&factor, inputs));
        scale_lanes(isa, inputs, &Lanes([N::from_f64(LN_2); GROUP]), span);
        inputs
    }
}

leaf! {
    /// Subtracts `half` times the squared norm of the inputs from the arguments.
    fn take_squares<'t, N>(
        s: S,
        x: &'t [Lanes<N>],
        half: N,
        span: Span,
        to: &'t mut [Lanes<N>],
    ) {
        let half = s.splat(half);
        for lane in span.vectors::<N, S>() {
            let mut squares = s.splat(N::zero());
            for x in x {
                let x = s.load(&x.0[lane..]);
                squares = s.fma(x, x, squares);
            }
            let squares = s.mul(squares, half);
            for to in &mut *to {
                let to = &mut to.0[lane..];
                s.store(s.sub(s.load(to), squares), to);
            }
        }
    }
}

leaf! {
    /// [`Map::map`]
    fn features<'t, N>(
        s: S,
        map: FeatureMap,
        span: Span,
        top: &'t Lanes<N>,
        x: &'t mut [Lanes<N>],
    ) {
        let (zero, one) = (s.splat(N::zero()), s.splat(N::one()));
        let log2_e = s.splat(N::from_f64(LOG2_E));
        for x in x {
            for lane in span.vectors::<N, S>() {
                let to = &mut x.0[lane..];
                let x = s.load(to);
                let phi = match map {
                    FeatureMap::EluPlusOne => {
                        let power = math::exp2(s, s.mul(x, log2_e));
                        s.select(s.less(zero, x), s.add(x, one), power)
                    }
                    FeatureMap::Relu => s.max(zero, x),
                    FeatureMap::PositiveRandom { .. } => {
                        math::exp2(s, s.sub(x, s.load(&top.0[lane..])))
                    }
                };
                s.store(phi, to);
            }
        }
    }
}

leaf! {
    /// [`Map::derivative`]
    fn derivatives<'t, N>(
        s: S,
        map: FeatureMap,
        span: Span,
        features: &'t [Lanes<N>],
        d: &'t mut [Lanes<N>],
    ) {
        let (zero, one) = (s.splat(N::zero()), s.splat(N::one()));
        for (phi, d) in features.iter().zip(d) {
            for lane in span.vectors::<N, S>() {
                let phi = s.load(&phi.0[lane..]);
                let derivative = match map {
                    FeatureMap::EluPlusOne => s.select(s.less(one, phi), one, phi),
                    FeatureMap::Relu => s.select(s.less(zero, phi), one, zero),
                    FeatureMap::PositiveRandom { .. } => phi,
                };
                let d = &mut d.0[lane..];
                s.store(s.mul(s.load(d), derivative), d);
            }
        }
    }
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
