//! One pass over a score tile, for one option.

use super::LOG2_E;
use crate::machine::simd::{Lanes, Number, Simd};
use crate::tensor::index::At;

/// Elementwise transformation of scores by one option.
pub(crate) trait Pass<N: Number> {
    /// Transforms the scores `x` of key `i` of the tile and of the rows from `lane` on.
    fn apply<S: Simd<N>>(&self, s: S, i: usize, lane: usize, x: S::V) -> S::V;
}

/// Applies an option to all scores of a tile, for the rows in `at.span`.
#[inline(always)]
pub(crate) fn pass<N: Number, S: Simd<N>>(
    s: S,
    at: At<'_>,
    tile: &mut [Lanes<N>],
    option: &impl Pass<N>,
) {
    for (i, scores) in tile.iter_mut().enumerate() {
        for lane in at.span.vectors::<N, S>() {
            let x = s.load(&scores.0[lane..]);
            s.store(option.apply(s, i, lane, x), &mut scores.0[lane..]);
        }
    }
}

pub(crate) struct Factor<N>(pub(crate) N);

impl<N: Number> Pass<N> for Factor<N> {
    #[inline(always)]
    fn apply<S: Simd<N>>(&self, s: S, _: usize, _: usize, x: S::V) -> S::V {
        s.mul(x, s.splat(self.0))
    }
}

/// Multiplies by the result of another pass over another tile. Accumulates score derivatives.
pub(super) struct Times<'t, N, P>(pub(super) &'t [Lanes<N>], pub(super) P);

impl<N: Number, P: Pass<N>> Pass<N> for Times<'_, N, P> {
    #[inline(always)]
    fn apply<S: Simd<N>>(&self, s: S, i: usize, lane: usize, x: S::V) -> S::V {
        s.mul(x, self.1.apply(s, i, lane, s.load(&self.0[i].0[lane..])))
    }
}

/// Adds a bias per key and row. Biases are in natural units, scores are multiplied by `log2 e`.
pub(crate) struct Bias<'t, N>(pub(crate) &'t [Lanes<N>]);

impl<N: Number> Pass<N> for Bias<'_, N> {
    /// A finite bias on a finite score stays finite after the change of unit. `-inf` stays `-inf` and masks the pair.
    #[inline(always)]
    fn apply<S: Simd<N>>(&self, s: S, i: usize, lane: usize, x: S::V) -> S::V {
        let (bias, lowest) = (s.load(&self.0[i].0[lane..]), s.splat(-N::max_value()));
        let sum = s.max(lowest, s.fma(bias, s.splat(N::from_f64(LOG2_E)), x));
        let lower = s.select(s.less(x, bias), x, bias);
        s.select(s.less(lower, lowest), s.splat(N::neg_infinity()), sum)
    }
}
