//! Local attention around a predicted position (Luong et al. 2015, local-p).

use crate::description::mask::{Mask, MaskRule};
use crate::description::score::LOG2_E;
use crate::error::Error;
use crate::machine::simd::{GROUP, Isa, Lanes, Number, leaf, math};
use crate::tensor::index::{At, Scope, Span};
use std::ops::Range;
use std::sync::Arc;

/// Local attention around a predicted position `p` for each row (Luong et al. 2015, local-p). The keys with
/// `|key - p| <= reach` are visible, and each softmax weight is multiplied by `e^(-(key - p)^2 / (2 s^2))` with `s = reach / 2`.
/// The weights then sum to at most 1. The centers `p` receive gradients.
///
/// A center is a key index from 0 to `k_len - 1` and may be fractional. Key blocks outside every window cost nothing. For a
/// center that is NaN no key is visible. If `p` is the row's own position (local-m), use the mask
/// `Mask::full().window(reach + 1)` instead.
#[derive(Clone, Copy, Debug)]
pub struct Local<'a, N> {
    centers: &'a [N],
    reach: usize,
}

impl<'a, N: Number> Local<'a, N> {
    /// Windows around `centers [batch, heads.q, q_len]`, up to `reach` keys on each side; `reach` is at least 1.
    #[must_use]
    pub fn new(centers: &'a [N], reach: usize) -> Self {
        Self { centers, reach }
    }

    /// Largest distance of a visible key from the center.
    #[must_use]
    pub fn reach(&self) -> usize {
        self.reach
    }

    /// Checks `reach` and the number of centers. Packed sequences are not supported.
    pub(crate) fn check(&self, rows: usize, packed: bool) -> Result<(), Error> {
        if self.reach == 0 {
            return Err(Error::Zero { option: "reach" });
        }
        if packed {
            return Err(Error::Packed { option: "local" });
        }
        Error::unless_one_each_row("centers", rows, self.centers.len())
    }

    /// The mask of the keys within `reach` of each center.
    pub(crate) fn mask(&self, heads: usize) -> Mask {
        let centers = self.centers.iter().map(|x| Number::to_f64(*x)).collect();
        Mask::custom(Around { centers, reach: self.reach as f64, heads })
    }

    /// `key - p`; `row` is the flat index over batch, heads and queries.
    pub(crate) fn beyond<M: Number>(&self, row: usize, key: usize) -> M {
        M::of_len(key) - M::from_f64(self.centers[row].to_f64())
    }

    /// The definition of the factor of a weight, `e^(-(key - p)^2 / (2 s^2))`.
    pub(crate) fn factor<M: Number>(&self, row: usize, key: usize) -> M {
        let far: M = self.beyond(row, key);
        (-far * far * M::from_f64(self.narrowness())).exp()
    }

    /// The gradient of a center is this factor, `1 / s^2`, times the sum of `weight d_weight (key - p)`.
    pub(crate) fn grad_factor(&self) -> f64 {
        2.0 * self.narrowness()
    }

    /// Loads the centers of `rows` (flat indices over batch, heads and queries) into lanes; 0 outside `span`.
    pub(crate) fn centers(&self, rows: &[usize; GROUP], span: Span) -> Lanes<N> {
        let mut centers = Lanes([N::zero(); GROUP]);
        let lanes = centers.0.iter_mut().zip(rows).take(span.end).skip(span.start);
        lanes.for_each(|(center, row)| *center = self.centers[*row]);
        centers
    }

    /// Multiplies the factors of a tile, `[keys][rows]`, by the Gaussian factors of the distances from the centers.
    pub(crate) fn multiply(
        &self,
        isa: Isa,
        (at, centers): (At<'_>, &Lanes<N>),
        to: &mut [Lanes<N>],
    ) {
        let narrowness = N::from_f64(-self.narrowness() * LOG2_E);
        multiply_near(isa, at, centers, narrowness, to);
    }

    /// `1 / (2 s^2)`
    fn narrowness(&self) -> f64 {
        let s = self.reach as f64 / 2.0;
        0.5 / (s * s)
    }
}

/// The keys within `reach` of the center of each row.
#[derive(Debug)]
struct Around {
    centers: Arc<[f64]>,
    reach: f64,
    heads: usize,
}

impl MaskRule for Around {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "bounded by 0; beyond the largest key is cut off later"
    )]
    fn visible(&self, scope: &Scope, row: usize, ranges: &mut Vec<Range<usize>>) {
        let center = self.centers[(scope.batch * self.heads + scope.head) * scope.q_len + row];
        let (first, last) = ((center - self.reach).ceil(), (center + self.reach).floor());
        if first <= last && last >= 0.0 {
            ranges.push(first.max(0.0) as usize..(last as usize).saturating_add(1));
        }
    }
}

leaf! {
    /// Multiplies `to` by `2^(narrowness (key - center)^2)`.
    fn multiply_near<'t, N>(
        s: S,
        at: At<'t>,
        centers: &'t Lanes<N>,
        narrowness: N,
        to: &'t mut [Lanes<N>],
    ) {
        for (i, to) in to.iter_mut().enumerate() {
            let key = s.splat(N::of_len(at.keys.get(i)));
            for lane in at.span.vectors::<N, S>() {
                let far = s.sub(key, s.load(&centers.0[lane..]));
                let factor = math::weight(s, s.mul(s.mul(far, far), s.splat(narrowness)));
                let to = &mut to.0[lane..];
                s.store(s.mul(s.load(to), factor), to);
            }
        }
    }
}
