//! Running sums over keys or rows, the state of linear attention (Katharopoulos et al. 2020), and products with them.

use crate::matrix::{rows, rows_mut};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, ArrayViewMut2, Axis, Slice};
use regard::Number;
use std::ops::Range;

/// Targets per product of [`Terms::sum`]. With a causal mask, half of the pairs of a chunk are visible to half of the
/// targets only, so a quarter of the work is skipped.
pub(super) const TARGETS: usize = 32;

/// Sum of the outer products `features x payload` over keys or rows, divided by `2^reference`.
///
/// The payload of a key is `[v, 1]`, so the last column is the sum of the features alone. The payload of a row is
/// `[d_out, -d_out . out] / l`, where `l` is the sum of its weights.
#[derive(Clone, Debug)]
pub(super) struct Sums<N> {
    /// `[features, payload]`
    pub(super) sums: Array2<N>,
    pub(super) reference: N,
}

impl<N: Number> Sums<N> {
    /// The empty sum. 2 to its reference is 0 relative to any other, and differences from it are finite.
    pub(super) fn new(size: [usize; 2]) -> Self {
        Self { sums: Array2::zeros(size), reference: N::min_value() / N::from_f64(4.0) }
    }

    /// Raises the reference to at least `to`, rescales the sums, and returns the reference.
    pub(super) fn raise(&mut self, to: N) -> N {
        if to > self.reference {
            let factor = (self.reference - to).exp2();
            self.reference = to;
            if factor != N::one() {
                self.sums.mapv_inplace(|x| x * factor);
            }
        }
        self.reference
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.raise(other.reference);
        self.sums.scaled_add((other.reference - self.reference).exp2(), &other.sums);
    }

    /// Adds the pairs of a chunk, which are relative to `reference`; raises its own to that.
    pub(super) fn take(
        &mut self,
        (features, payload): (ArrayView2<'_, N>, ArrayView2<'_, N>),
        reference: N,
    ) {
        let factor = (reference - self.raise(reference)).exp2();
        general_mat_mul(factor, &features.t(), &payload, N::one(), &mut self.sums);
    }
}

/// What results are sums of: the sums of other chunks, or their transpose, and the pairs `(by, what)` of the same chunk.
#[derive(Debug)]
pub(super) struct Terms<'t, N> {
    pub(super) sums: ArrayView2<'t, N>,
    pub(super) by: ArrayView2<'t, N>,
    pub(super) what: ArrayView2<'t, N>,
}

impl<N: Number> Terms<'_, N> {
    /// `to = x sums + (x by^T, 0 where not visible) what`. Row `i` of `x` sees the pairs `visible(i)`; both ends ascend with
    /// `i`. `tile` is scratch.
    ///
    /// A hidden pair contributes nothing, whatever it holds: where `what` is not finite, rows are computed one by one, because
    /// the product of 0 with infinity or NaN is NaN.
    pub(super) fn sum(
        &self,
        x: ArrayView2<'_, N>,
        visible: impl Fn(usize) -> Range<usize>,
        tile: &mut Array2<N>,
        mut to: ArrayViewMut2<'_, N>,
    ) {
        let Self { sums, by, what } = self;
        general_mat_mul(N::one(), &x, sums, N::zero(), &mut to);
        // Without an early exit, which would keep the compiler from using vectors.
        let finite = what.fold(true, |finite, x| finite & x.is_finite());
        let step = if finite { TARGETS } else { 1 };
        for first in (0..if by.is_empty() { 0 } else { x.nrows() }).step_by(step) {
            let targets = first..(first + step).min(x.nrows());
            let pairs = visible(first).start..visible(targets.end - 1).end;
            let mut tile = rows_mut(tile, 0..targets.len());
            let mut tile = tile.slice_axis_mut(Axis(1), Slice::from(..pairs.len()));
            let (x, by) = (rows(&x, targets.clone()), rows(by, pairs.clone()));
            general_mat_mul(N::one(), &x, &by.t(), N::zero(), &mut tile);
            for (target, weights) in targets.clone().zip(tile.rows_mut()) {
                let Range { start, end } = visible(target);
                let (mut hidden, weights) = weights.split_at(Axis(0), start - pairs.start);
                hidden.fill(N::zero());
                weights.split_at(Axis(0), end - start).1.fill(N::zero());
            }
            let (what, mut to) = (rows(what, pairs), rows_mut(&mut to, targets));
            general_mat_mul(N::one(), &tile, &what, N::one(), &mut to);
        }
    }
}
