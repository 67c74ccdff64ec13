//! Additive similarities (Bahdanau et al. 2015) of a tile, and their backward pass. The `tanh` values of a pair are computed
//! where they are used and never stored: there are as many as multiplications in a dot product.
//!
//! `tanh(q + k) = (p - 1) / (p + 1)` with `p = e^2q e^2k`. The exponentials of queries and keys are computed once, which leaves
//! one product and one division per pair and hidden unit, and one division serves four units (`1/a = b c d / (a b c d)`). The
//! absolute error is one rounding error of 1, not of the result. A score is only exponentiated, so its absolute error is what
//! matters. For rows and keys whose exponentials would overflow or underflow, and for `f64`, `tanh` is computed directly. The
//! result of a row does not depend on the other rows of its vector.

use super::RowBuffer;
use crate::machine::simd::{GROUP, Isa, Lanes, MAX_LANES, Number, Simd, Task, leaf, math};
use crate::tensor::index::{RowMask, Span, low};
use crate::tensor::view::Rows;

/// The hidden layer of an additive similarity, for one group of rows.
#[derive(Debug)]
pub(crate) struct Layer<N> {
    v: Vec<N>,
    /// `e^2q` of the projected queries, `[units][lanes]`.
    q: Vec<Lanes<N>>,
    /// `e^2k` of the projected keys of a tile.
    k: RowBuffer<N>,
    /// Rows whose exponentials are out of range.
    rows: RowMask,
    /// For each key of the tile, the rows for which `tanh` is computed directly.
    apart: Vec<RowMask>,
}

/// Projected keys and queries of a tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Projected<'t, N> {
    /// `[keys][units]`
    pub(crate) k: Rows<'t, N>,
    /// `[units][lanes]`
    pub(crate) q: &'t [Lanes<N>],
}

/// Largest `|q|` and `|k|` for which exponentials are used: `e^80` and `e^-80` are normal `f32` numbers.
const FARTHEST: f64 = 40.0;
/// Upper bound of `p`: `tanh` rounds to 1 there, and the product of four such numbers does not overflow.
const LARGEST: f64 = (1u32 << 30) as f64;
/// Hidden units that share one division.
const UNITS_PER_PASS: usize = 4;

impl<N: Number> Layer<N> {
    /// For tiles of up to `keys` keys; `units` is 0 if there is no hidden layer.
    pub(crate) fn new(units: usize, keys: usize) -> Self {
        let q = vec![Lanes([N::one(); GROUP]); units];
        let keys = if units == 0 { 0 } else { keys };
        let apart = vec![RowMask::MAX; keys];
        Self {
            v: vec![N::zero(); units],
            q,
            k: RowBuffer::new(keys, units),
            rows: RowMask::MAX,
            apart,
        }
    }

    /// `v`; must be written before a pass.
    pub(crate) fn v_mut(&mut self) -> &mut [N] {
        &mut self.v
    }

    /// Computes the exponentials of the projected queries.
    pub(crate) fn take_queries(&mut self, isa: Isa, q: &[Lanes<N>], count: usize) {
        if !self.v.is_empty() {
            query_powers(isa, self, q, count);
        }
    }

    /// Computes the exponentials of the projected keys of a tile.
    #[inline(always)]
    fn take_keys<S: Simd<N>>(&mut self, s: S, k: Rows<'_, N>) {
        for (key, apart) in self.apart[..k.len].iter_mut().enumerate() {
            let (from, to) = (k.row(key), self.k.row_mut(key));
            to[..from.len()].copy_from_slice(from);
            to[from.len()..].fill(N::zero());
            let mut far = 0;
            for first in (0..to.len()).step_by(S::LANES) {
                let (e, too_far) = power_of(s, s.load(&to[first..]));
                far |= too_far;
                s.store(e, &mut to[first..]);
            }
            *apart = if far == 0 { self.rows } else { RowMask::MAX };
        }
    }

    /// `tile[key][lane] = sum over units of v tanh(k[key] + q[lane])`, for the lanes of `span`.
    pub(crate) fn similarities(
        &mut self,
        isa: Isa,
        (k, q): (Rows<'_, N>, &[Lanes<N>]),
        span: Span,
        tile: &mut [Lanes<N>],
    ) {
        similarities(isa, self, Projected { k, q }, span, tile);
    }

    /// `tanh` of `UNITS` hidden units from `unit` on, for one key and one vector of rows.
    #[inline(always)]
    fn tangents<S: Simd<N>, const UNITS: usize>(
        &self,
        s: S,
        Projected { k, q }: Projected<'_, N>,
        key: usize,
        unit: usize,
        lane: usize,
    ) -> [S::V; UNITS] {
        let (powers, largest) =
            (&self.k.row(key)[unit..unit + UNITS], s.splat(N::from_f64(LARGEST)));
        let mut x = [largest; UNITS];
        for ((x, k), q) in x.iter_mut().zip(powers).zip(&self.q[unit..]) {
            let p = s.mul(s.splat(*k), s.load(&q.0[lane..]));
            *x = s.select(s.less(p, largest), p, largest);
        }
        x = quotients(s, x);
        let apart = low(self.apart[key] >> lane) & (u32::MAX >> (32 - S::LANES));
        if apart != 0 {
            let mut each = [Lanes([N::zero(); GROUP]); UNITS_PER_PASS];
            let k = &k.row(key)[unit..];
            s.call(OneByOne { k, q: &q[unit..], lane, to: &mut each[..UNITS] });
            for (x, each) in x.iter_mut().zip(&each) {
                *x = s.select(s.lanes(apart), s.load(&each.0[lane..]), *x);
            }
        }
        x
    }
}

leaf! {
    fn query_powers<'t, N>(s: S, layer: &'t mut Layer<N>, q: &'t [Lanes<N>], count: usize) {
        layer.rows = if N::NAME == "f32" { 0 } else { RowMask::MAX };
        for (power, q) in layer.q.iter_mut().zip(q) {
            for lane in (0..count).step_by(S::LANES) {
                let (e, far) = power_of(s, s.load(&q.0[lane..]));
                layer.rows |= RowMask::from(far) << lane;
                s.store(e, &mut power.0[lane..]);
            }
        }
    }
}

/// `tanh(k + q)` of some units, computed directly.
struct OneByOne<'t, N> {
    k: &'t [N],
    q: &'t [Lanes<N>],
    lane: usize,
    to: &'t mut [Lanes<N>],
}

impl<N: Number> Task<N> for OneByOne<'_, N> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(self, s: S) {
        for ((k, q), to) in self.k.iter().zip(self.q).zip(self.to) {
            let sum = s.add(s.splat(*k), s.load(&q.0[self.lane..]));
            s.store(math::tanh(s, sum), &mut to.0[self.lane..]);
        }
    }
}

/// `e^2x`, and the lanes in which `|x|` is not below `FARTHEST`.
#[inline(always)]
fn power_of<N: Number, S: Simd<N>>(s: S, x: S::V) -> (S::V, u32) {
    // 2 / ln 2 as a sum of two floats. The rounding error of the product corrects the power to first order.
    let (high, exact) =
        (N::from_f64(2.0 * std::f64::consts::LOG2_E), 2.0 * std::f64::consts::LOG2_E);
    let low = s.splat(N::from_f64(exact - high.to_f64()));
    let (high, zero) = (s.splat(high), s.splat(N::zero()));
    let y = s.mul(x, high);
    let rest = s.fma(x, low, s.fma(x, high, s.sub(zero, y)));
    let power = math::exp2(s, y);
    let e = s.fma(power, s.mul(rest, s.splat(N::from_f64(std::f64::consts::LN_2))), power);
    let size = s.max(x, s.sub(zero, x));
    let near = s.bits(s.less(size, s.splat(N::from_f64(FARTHEST))));
    (e, !near & (u32::MAX >> (32 - S::LANES)))
}

/// `(p - 1) / (p + 1)`. `UNITS_PER_PASS` units share one division.
#[inline(always)]
fn quotients<N: Number, S: Simd<N>, const UNITS: usize>(s: S, p: [S::V; UNITS]) -> [S::V; UNITS] {
    let one = s.splat(N::one());
    // Loops, because a closure would not be inlined.
    let mut below = p;
    for x in &mut below {
        *x = s.add(*x, one);
    }
    let mut inverse = below;
    if UNITS == UNITS_PER_PASS {
        let (a, b) = (s.mul(below[0], below[1]), s.mul(below[2], below[3]));
        let all = s.div(one, s.mul(a, b));
        let (a, b) = (s.mul(all, b), s.mul(all, a));
        inverse[0] = s.mul(a, below[1]);
        inverse[1] = s.mul(a, below[0]);
        inverse[2] = s.mul(b, below[3]);
        inverse[3] = s.mul(b, below[2]);
    } else {
        for x in &mut inverse {
            *x = s.div(one, *x);
        }
    }
    let mut x = p;
    for (x, inverse) in x.iter_mut().zip(inverse) {
        *x = s.mul(s.sub(*x, one), inverse);
    }
    x
}

leaf! {
    fn similarities<'t, N>(
        s: S,
        layer: &'t mut Layer<N>,
        projected: Projected<'t, N>,
        span: Span,
        tile: &'t mut [Lanes<N>],
    ) {
        layer.take_keys(s, projected.k);
        let (units, whole) = (layer.v.len(), layer.v.len() / UNITS_PER_PASS * UNITS_PER_PASS);
        for (key, tile) in tile.iter_mut().enumerate() {
            for lane in span.vectors::<N, S>() {
                let mut sum = s.splat(N::zero());
                for unit in (0..whole).step_by(UNITS_PER_PASS) {
                    let t = layer.tangents::<S, UNITS_PER_PASS>(s, projected, key, unit, lane);
                    for (v, t) in layer.v[unit..].iter().zip(t) {
                        sum = s.fma(s.splat(*v), t, sum);
                    }
                }
                for unit in whole..units {
                    let [t] = layer.tangents::<S, 1>(s, projected, key, unit, lane);
                    sum = s.fma(s.splat(layer.v[unit]), t, sum);
                }
                s.store(sum, &mut tile.0[lane..]);
            }
        }
    }
}

/// The gradients that the backward pass of additive similarities accumulates.
pub(crate) struct HiddenGrads<'t, N> {
    /// Of the projected queries, `[units][lanes]`.
    pub(crate) d_q: &'t mut [Lanes<N>],
    /// Of the projected keys: the row index of each key of the tile, and the rows.
    pub(crate) d_k: (&'t [usize], &'t mut RowBuffer<N>),
    /// Of `v`.
    pub(crate) d_v: &'t mut [f64],
}

/// Backward pass of [`Layer::similarities`], which must have run on the same tile.
pub(crate) struct SimilaritiesBackward<'t, N> {
    pub(crate) layer: &'t Layer<N>,
    pub(crate) projected: Projected<'t, N>,
    /// The gradients of the similarities, `[keys][lanes]`.
    pub(crate) d: &'t [Lanes<N>],
    /// Masked pairs (`None` if there are none) contribute nothing, even if their key contains NaN.
    pub(crate) visible: Option<&'t [RowMask]>,
    pub(crate) span: Span,
    pub(crate) to: HiddenGrads<'t, N>,
}

impl<N: Number> Task<N> for SimilaritiesBackward<'_, N> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(mut self, s: S) {
        let units = self.layer.v.len();
        let whole = units / UNITS_PER_PASS * UNITS_PER_PASS;
        for unit in (0..whole).step_by(UNITS_PER_PASS) {
            self.units::<S, UNITS_PER_PASS>(s, unit);
        }
        for unit in whole..units {
            self.units::<S, 1>(s, unit);
        }
    }
}

impl<N: Number> SimilaritiesBackward<'_, N> {
    pub(crate) fn add(self, isa: Isa) {
        N::enter(isa, self);
    }

    /// Backward pass of `UNITS` hidden units, for all keys and rows of the tile.
    #[inline(always)]
    fn units<S: Simd<N>, const UNITS: usize>(&mut self, s: S, unit: usize) {
        let Self { layer, projected, d, visible, span, to } = self;
        let (zero, one) = (s.splat(N::zero()), s.splat(N::one()));
        let mut by_v = [Lanes([N::zero(); GROUP]); UNITS];
        for (key, d) in d.iter().enumerate() {
            let visible = visible.map(|visible| visible[key]);
            let mut by_k = [Lanes([N::zero(); GROUP]); UNITS];
            for lane in span.vectors::<N, S>() {
                // similarity = ... + v tanh x,  x = k + q
                let mut t = layer.tangents::<S, UNITS>(s, *projected, key, unit, lane);
                if let Some(visible) = visible {
                    let visible = s.lanes(low(visible >> lane));
                    for t in &mut t {
                        *t = s.select(visible, *t, zero);
                    }
                }
                let d = s.load(&d.0[lane..]);
                for (u, t) in t.into_iter().enumerate() {
                    let derivative = s.mul(s.splat(layer.v[unit + u]), s.sub(one, s.mul(t, t)));
                    let (by_v, by_q) = (&mut by_v[u].0[lane..], &mut to.d_q[unit + u].0[lane..]);
                    let by_x = s.mul(d, derivative);
                    s.store(s.fma(d, t, s.load(by_v)), by_v);
                    s.store(s.add(by_x, s.load(by_q)), by_q);
                    s.store(by_x, &mut by_k[u].0[lane..]);
                }
            }
            let to = &mut to.d_k.1.row_mut(to.d_k.0[key])[unit..unit + UNITS];
            for (to, x) in to.iter_mut().zip(&by_k) {
                *to = *to + sum(s, x);
            }
        }
        for (to, by_v) in to.d_v[unit..].iter_mut().zip(&by_v) {
            *to += sum(s, by_v).to_f64();
        }
    }
}

/// The sum of all lanes, by halving. The order of additions does not depend on the vector width.
#[inline(always)]
fn sum<N: Number, S: Simd<N>>(s: S, Lanes(x): &Lanes<N>) -> N {
    let mut vectors = [s.splat(N::zero()); GROUP];
    let mut n = GROUP / S::LANES;
    for (i, v) in vectors[..n].iter_mut().enumerate() {
        *v = s.load(&x[i * S::LANES..]);
    }
    while n > 1 {
        n /= 2;
        for i in 0..n {
            vectors[i] = s.add(vectors[i], vectors[i + n]);
        }
    }
    let mut lanes = [N::zero(); MAX_LANES];
    s.store(vectors[0], &mut lanes);
    let mut half = S::LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = lanes[i] + lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}
