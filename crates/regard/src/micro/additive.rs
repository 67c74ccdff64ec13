//! Additive similarities of a tile, and the way back through them. The hyperbolic tangents of a pair are made where they are
//! used and never kept: there are as many as multiplications in a dot product.

use super::{Packed, Seen, low};
use crate::element::Number;
use crate::simd::{GROUP, Lanes, Simd, Span, Task, math};
use crate::view::Rows;

/// The operands of additive similarities: projected keys, projected queries in their lanes, and `v`.
#[derive(Clone, Copy)]
pub(crate) struct Hidden<'t, N> {
    pub(crate) k: Rows<'t, N>,
    pub(crate) q: &'t [Lanes<N>],
    pub(crate) v: &'t [N],
}

/// `tile[key][lane] = sum over units of v tanh(k[key] + q[lane])`, for the lanes of `span`.
#[inline(always)]
pub(crate) fn tanh_tile<N: Number, S: Simd<N>>(
    s: S,
    hidden: Hidden<'_, N>,
    span: Span,
    tile: &mut [Lanes<N>],
) {
    s.call(TanhTile { hidden, span, tile });
}

struct TanhTile<'t, N> {
    hidden: Hidden<'t, N>,
    span: Span,
    tile: &'t mut [Lanes<N>],
}

impl<N: Number> Task<N> for TanhTile<'_, N> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(self, s: S) {
        let Self { hidden: Hidden { k, q, v }, span, tile } = self;
        for (key, tile) in tile.iter_mut().enumerate() {
            let row = k.row(key);
            for lane in span.vectors::<N, S>() {
                let mut sum = s.splat(N::zero());
                for ((k, q), v) in row.iter().zip(q).zip(v) {
                    let t = math::tanh(s, s.add(s.splat(*k), s.load(&q.0[lane..])));
                    sum = s.fma(s.splat(*v), t, sum);
                }
                s.store(sum, &mut tile.0[lane..]);
            }
        }
    }
}

/// What the gradients of a tile of additive similarities are carried back to.
pub(crate) struct HiddenGrads<'t, N> {
    /// By the projected queries, `[units][lanes]`.
    pub(crate) d_q: &'t mut [Lanes<N>],
    /// By the projected keys: where each one's row is, and the rows.
    pub(crate) d_k: (&'t [usize], &'t mut Packed<N>),
    /// By `v`.
    pub(crate) d_v: &'t mut [f64],
}

/// From the gradients of a tile of similarities to those of what they are made of. Pairs that do not see each other (`seen`,
/// if any do not) add nothing, whatever their key holds.
#[inline(always)]
pub(crate) fn undo_tanh_tile<N: Number, S: Simd<N>>(
    s: S,
    hidden: Hidden<'_, N>,
    (d, seen): (&[Lanes<N>], Option<&[Seen]>),
    span: Span,
    to: HiddenGrads<'_, N>,
) {
    s.call(UndoTanhTile { hidden, d, seen, span, to });
}

struct UndoTanhTile<'t, N> {
    hidden: Hidden<'t, N>,
    d: &'t [Lanes<N>],
    seen: Option<&'t [Seen]>,
    span: Span,
    to: HiddenGrads<'t, N>,
}

impl<N: Number> Task<N> for UndoTanhTile<'_, N> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(self, s: S) {
        let Self { hidden: Hidden { k, q, v }, d, seen, span, to } = self;
        let (zero, one) = (s.splat(N::zero()), s.splat(N::one()));
        let zeros = Lanes([N::zero(); GROUP]);
        let (places, d_k) = to.d_k;
        for (unit, (q, v)) in q.iter().zip(v).enumerate() {
            let (d_q, v) = (&mut to.d_q[unit], s.splat(*v));
            let (mut by_v, mut by_k) = (zeros, zeros);
            for (key, d) in d.iter().enumerate() {
                let k = s.splat(k.row(key)[unit]);
                let seen = seen.map(|seen| seen[key]);
                for lane in span.vectors::<N, S>() {
                    // similarity = ... + v tanh x,  x = k + q
                    let mut t = math::tanh(s, s.add(k, s.load(&q.0[lane..])));
                    if let Some(seen) = seen {
                        t = s.select(s.lanes(low(seen >> lane)), t, zero);
                    }
                    let d = s.load(&d.0[lane..]);
                    let slope = s.mul(v, s.sub(one, s.mul(t, t)));
                    let (by_v, by_q) = (&mut by_v.0[lane..], &mut d_q.0[lane..]);
                    s.store(s.fma(d, t, s.load(by_v)), by_v);
                    s.store(s.fma(d, slope, s.load(by_q)), by_q);
                    s.store(s.mul(d, slope), &mut by_k.0[lane..]);
                }
                let to = &mut d_k.row_mut(places[key])[unit];
                *to = *to + sum(by_k);
            }
            to.d_v[unit] += sum(by_v).to_f64();
        }
    }
}

/// The sum of all lanes, by halves: the same whatever the width of the vectors.
#[inline(always)]
fn sum<N: Number>(Lanes(mut x): Lanes<N>) -> N {
    let mut half = GROUP / 2;
    while half > 0 {
        for i in 0..half {
            x[i] = x[i] + x[i + half];
        }
        half /= 2;
    }
    x[0]
}
