//! Local attention around a predicted position (Luong et al. 2015, local-p).

use crate::element::{Element, Number};
use crate::error::Error;
use crate::mask::{Mask, MaskRule, Scope};
use crate::problem::Problem;
use crate::score::{At, LOG2_E, Pair};
use crate::simd::{GROUP, Lanes, Simd, Task, math};
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

    /// The keys that a local problem lets rows see.
    pub(crate) fn mask(&self, heads: usize) -> Mask {
        let centres = self.centres.iter().map(|x| Number::to_f64(*x)).collect();
        Mask::custom(Around { centres, reach: self.reach as f64, heads })
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

impl<E: Element> Problem<'_, E> {
    /// Refuses centres that do not fit.
    pub(crate) fn check_local(&self) -> Result<(), Error> {
        let Some(local) = &self.local else { return Ok(()) };
        if local.reach == 0 {
            return Err(Error::Zero { option: "reach" });
        }
        if self.packed().contains(&true) {
            return Err(Error::Packed { option: "local" });
        }
        Error::unless_one_each_row("centres", self.rows(), local.centres.len())
    }

    /// Whether weights are multiplied by something after the softmax.
    #[inline(always)]
    pub(crate) fn has_factors(&self) -> bool {
        self.dropout.is_some() || self.local.is_some()
    }

    /// What a weight is multiplied by after the softmax, by definition.
    pub(crate) fn factor<N: Number>(&self, at: Pair) -> N {
        let dropped = self
            .dropout
            .map_or(1.0, |dropout| if dropout.keeps(at) { dropout.growth() } else { 0.0 });
        let Some(local) = &self.local else { return N::from_f64(dropped) };
        let far: N = self.beyond_centre(at);
        N::from_f64(dropped) * (-far * far * N::from_f64(local.narrowness())).exp()
    }

    /// `key - p`
    pub(crate) fn beyond_centre<N: Number>(&self, at: Pair) -> N {
        let row = self.row_index(self.scope(at.batch, at.head), at.row);
        let centre = self.local.as_ref().map_or(0.0, |local| local.centres[row].to_f64());
        N::of_len(at.key) - N::from_f64(centre)
    }

    /// What the sum of `weight d_weight (key - p)` is multiplied by to be the gradient of a centre.
    pub(crate) fn centre_grad_factor(&self) -> f64 {
        self.local.as_ref().map_or(0.0, |local| 2.0 * local.narrowness())
    }

    /// What the weights of a tile are multiplied by after the softmax, `[keys][rows]`.
    #[inline(always)]
    pub(crate) fn factors<S: Simd<E::Num>>(&self, s: S, at: At<'_>, to: &mut [Lanes<E::Num>]) {
        match &self.dropout {
            Some(dropout) => dropout.factors(s, at, to),
            None => to.fill(Lanes([E::Num::from_f64(1.0); GROUP])),
        }
        if let Some(local) = &self.local {
            let narrowness = E::Num::from_f64(-local.narrowness() * LOG2_E);
            s.call(Near { centres: self.centres(at), narrowness, at, to });
        }
    }

    /// The centres of a group of rows.
    pub(crate) fn centres(&self, at: At<'_>) -> Lanes<E::Num> {
        let mut centres = Lanes([E::Num::default(); GROUP]);
        if let Some(local) = &self.local {
            for lane in at.span.start..at.span.end {
                centres.0[lane] = local.centres[self.row_index(at.scope, at.rows.row(lane))];
            }
        }
        centres
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
                let factor = math::exp2(s, s.mul(s.mul(far, far), s.splat(narrowness)));
                let to = &mut to.0[lane..];
                s.store(s.mul(s.load(to), factor), to);
            }
        }
    }
}
