//! Local attention around a predicted position (Luong et al. 2015, local-p).

use crate::error::Error;
use crate::index::{At, Scope, Span};
use crate::mask::{Mask, MaskRule};
use crate::score::LOG2_E;
use crate::simd::{GROUP, Lanes, Number, Simd, Task, math};
use std::ops::Range;
use std::sync::Arc;

/// Each row looks at the keys around a position of its own, `p`, that a model has predicted: it sees those with
/// `|key - p| <= reach`, and each weight of the softmax over them is multiplied by `e^(-(key - p)^2 / (2 s^2))`, `s = reach / 2`
/// (Luong et al. 2015, local-p). The weights then sum to less than 1. Gradients reach the centres.
///
/// A centre counts in keys, from 0 to `k_len - 1`, and need not be whole; keys that no centre is near cost nothing. A centre
/// that is NaN sees nothing. Where the position is the row's own (local-m), the window is a mask: `Mask::full().window(reach + 1)`.
#[derive(Clone, Copy, Debug)]
pub struct Local<'a, N> {
    centres: &'a [N],
    reach: usize,
}

impl<'a, N: Number> Local<'a, N> {
    /// Around `centres [batch, heads.q, q_len]`, up to `reach` keys away, at least 1.
    #[must_use]
    pub fn new(centres: &'a [N], reach: usize) -> Self {
        Self { centres, reach }
    }

    /// How far a row sees.
    #[must_use]
    pub fn reach(&self) -> usize {
        self.reach
    }

    /// Refuses centres that do not fit so many rows, or none that are packed.
    pub(crate) fn check(&self, rows: usize, packed: bool) -> Result<(), Error> {
        if self.reach == 0 {
            return Err(Error::Zero { option: "reach" });
        }
        if packed {
            return Err(Error::Packed { option: "local" });
        }
        Error::unless_one_each_row("centres", rows, self.centres.len())
    }

    /// The keys that a local problem lets rows see.
    pub(crate) fn mask(&self, heads: usize) -> Mask {
        let centres = self.centres.iter().map(|x| Number::to_f64(*x)).collect();
        Mask::custom(Around { centres, reach: self.reach as f64, heads })
    }

    /// `key - p`, for a row counted over all heads and items.
    pub(crate) fn beyond<M: Number>(&self, row: usize, key: usize) -> M {
        M::of_len(key) - M::from_f64(self.centres[row].to_f64())
    }

    /// What the weight of a pair is multiplied by, by definition.
    pub(crate) fn factor<M: Number>(&self, row: usize, key: usize) -> M {
        let far: M = self.beyond(row, key);
        (-far * far * M::from_f64(self.narrowness())).exp()
    }

    /// What the sum of `weight d_weight (key - p)` is multiplied by to be the gradient of a centre.
    pub(crate) fn grad_factor(&self) -> f64 {
        2.0 * self.narrowness()
    }

    /// The centres of rows counted over all heads and items; 0 in lanes that are not computed.
    pub(crate) fn centres(&self, rows: &[usize; GROUP], span: Span) -> Lanes<N> {
        let mut centres = Lanes([N::zero(); GROUP]);
        let lanes = centres.0.iter_mut().zip(rows).take(span.end).skip(span.start);
        lanes.for_each(|(centre, row)| *centre = self.centres[*row]);
        centres
    }

    /// Multiplies the factors of a tile, `[keys][rows]`, by those of the distances from the centres.
    #[inline(always)]
    pub(crate) fn multiply<S: Simd<N>>(
        &self,
        s: S,
        (at, centres): (At<'_>, Lanes<N>),
        to: &mut [Lanes<N>],
    ) {
        let narrowness = N::from_f64(-self.narrowness() * LOG2_E);
        s.call(Near { centres, narrowness, at, to });
    }

    /// `1 / (2 s^2)`
    fn narrowness(&self) -> f64 {
        let s = self.reach as f64 / 2.0;
        0.5 / (s * s)
    }
}

/// Keys near the centre of each row.
#[derive(Debug)]
struct Around {
    centres: Arc<[f64]>,
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
        let centre = self.centres[(scope.batch * self.heads + scope.head) * scope.q_len + row];
        let (first, last) = ((centre - self.reach).ceil(), (centre + self.reach).floor());
        if first <= last && last >= 0.0 {
            ranges.push(first.max(0.0) as usize..(last as usize).saturating_add(1));
        }
    }
}

/// Multiplies by what the distance from the centre makes of a weight.
struct Near<'t, N> {
    centres: Lanes<N>,
    narrowness: N,
    at: At<'t>,
    to: &'t mut [Lanes<N>],
}

impl<N: Number> Task<N> for Near<'_, N> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(self, s: S) {
        let Self { centres, narrowness, at, to } = self;
        for (i, to) in to.iter_mut().enumerate() {
            let key = s.splat(N::of_len(at.keys.get(i)));
            for lane in at.span.vectors::<N, S>() {
                let far = s.sub(key, s.load(&centres.0[lane..]));
                let factor = math::weight(s, s.mul(s.mul(far, far), s.splat(narrowness)));
                let to = &mut to.0[lane..];
                s.store(s.mul(s.load(to), factor), to);
            }
        }
    }
}
