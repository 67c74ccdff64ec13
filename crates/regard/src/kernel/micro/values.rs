//! Sums over the keys of a tile: outputs, and gradients of queries.

#![expect(
    clippy::needless_range_loop,
    reason = "indices over constants keep the register tiles in registers"
)]

use super::UNROLL;
use crate::machine::simd::{GROUP, Isa, Lanes, Number, Simd, Task};
use crate::tensor::index::{RowMask, Span, low};
use crate::tensor::view::Rows;

/// Adds a tile to the outputs: `out[d][lane] = out[d][lane] * rescale[lane] + sum over keys of v[key][d] * p[key][lane]`, for
/// the lanes of `span`. If `visible` is not empty, masked keys of a row are left out of its sum, so that not even a NaN in
/// their values reaches the row. If `q` is not empty, `v[key][d] - q[d][lane]` replaces the value.
pub(crate) fn add_values<N: Number>(
    isa: Isa,
    (v, q): (Rows<'_, N>, &[Lanes<N>]),
    (p, visible): (&[Lanes<N>], &[RowMask]),
    span: Span,
    (rescale, out): (&Lanes<N>, &mut [Lanes<N>]),
) {
    let work = Values { v, q, p, visible, span, rescale, out };
    match (visible.is_empty(), q.is_empty()) {
        (true, true) => N::enter(isa, AddValues::<N, false, false>(work)),
        (true, false) => N::enter(isa, AddValues::<N, false, true>(work)),
        (false, true) => N::enter(isa, AddValues::<N, true, false>(work)),
        (false, false) => N::enter(isa, AddValues::<N, true, true>(work)),
    }
}

/// [`add_values`] of keys that all rows see, from within a leaf.
#[inline(always)]
pub(crate) fn add_within<N: Number, S: Simd<N>>(
    s: S,
    v: Rows<'_, N>,
    p: &[Lanes<N>],
    span: Span,
    (rescale, out): (&Lanes<N>, &mut [Lanes<N>]),
) {
    let work = Values { v, q: &[], p, visible: &[], span, rescale, out };
    s.call(AddValues::<N, false, false>(work));
}

/// The operands of [`add_values`].
struct Values<'t, N> {
    v: Rows<'t, N>,
    q: &'t [Lanes<N>],
    p: &'t [Lanes<N>],
    visible: &'t [RowMask],
    span: Span,
    rescale: &'t Lanes<N>,
    out: &'t mut [Lanes<N>],
}

/// `HIDDEN`: some keys are masked; `AWAY`: differences from the queries are added.
struct AddValues<'t, N, const HIDDEN: bool, const AWAY: bool>(Values<'t, N>);

impl<N: Number, const HIDDEN: bool, const AWAY: bool> Task<N> for AddValues<'_, N, HIDDEN, AWAY> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(self, s: S) {
        let Values { v, q, p, visible, span, rescale, out } = self.0;
        let p = (p, visible);
        if !S::WIDE {
            for lane in (span.start..span.end).step_by(2 * S::LANES) {
                let to = (rescale, &mut *out);
                add_lanes::<N, S, HIDDEN, AWAY, 6, 2>(s, (v, q), p, lane, to);
            }
        } else if span.len() <= S::LANES {
            add_lanes::<N, S, HIDDEN, AWAY, 8, 1>(s, (v, q), p, span.start, (rescale, out));
        } else if span.len() <= 2 * S::LANES {
            add_lanes::<N, S, HIDDEN, AWAY, 8, 2>(s, (v, q), p, span.start, (rescale, out));
        } else {
            add_lanes::<N, S, HIDDEN, AWAY, 4, 4>(s, (v, q), p, span.start, (rescale, out));
        }
    }
}

#[inline(always)]
fn add_lanes<
    N: Number,
    S: Simd<N>,
    const HIDDEN: bool,
    const AWAY: bool,
    const DIMS: usize,
    const VECTORS: usize,
>(
    s: S,
    (v, q): (Rows<'_, N>, &[Lanes<N>]),
    p: (&[Lanes<N>], &[RowMask]),
    lane: usize,
    (rescale, out): (&Lanes<N>, &mut [Lanes<N>]),
) {
    let mut d = 0;
    while d + DIMS <= out.len() {
        add_block::<N, S, HIDDEN, AWAY, DIMS, VECTORS>(s, (v, q, d), p, lane, (rescale, &mut *out));
        d += DIMS;
    }
    if DIMS > 4 && d + 4 <= out.len() {
        add_block::<N, S, HIDDEN, AWAY, 4, VECTORS>(s, (v, q, d), p, lane, (rescale, &mut *out));
        d += 4;
    }
    while d < out.len() {
        add_block::<N, S, HIDDEN, AWAY, 1, VECTORS>(s, (v, q, d), p, lane, (rescale, &mut *out));
        d += 1;
    }
}

#[inline(always)]
fn add_block<
    N: Number,
    S: Simd<N>,
    const HIDDEN: bool,
    const AWAY: bool,
    const DIMS: usize,
    const VECTORS: usize,
>(
    s: S,
    (v, q, d): (Rows<'_, N>, &[Lanes<N>], usize),
    (p, visible): (&[Lanes<N>], &[RowMask]),
    lane: usize,
    (rescale, out): (&Lanes<N>, &mut [Lanes<N>]),
) {
    let zero = s.splat(N::zero());
    let (mut sums, mut away) = ([[zero; VECTORS]; DIMS], [[zero; VECTORS]; DIMS]);
    for r in 0..DIMS {
        for j in 0..VECTORS {
            if AWAY {
                away[r][j] = s.load(&q[d + r].0[lane + j * S::LANES..]);
            }
        }
    }
    assert!(lane <= GROUP - VECTORS * S::LANES);
    assert!(p.is_empty() || (p.len() - 1) * v.stride + d + DIMS <= v.data.len());
    assert!(!HIDDEN || p.len() <= visible.len());
    let row = |key: usize| {
        // SAFETY: `key` is below `p.len()`, and the assertion on `v.data.len()` above covers the row of the last key.
        unsafe { v.data.get_unchecked(key * v.stride + d..key * v.stride + d + DIMS) }
    };
    let (fours, rest) = p.as_chunks::<UNROLL>();
    for (i, p) in fours.iter().enumerate() {
        for u in 0..UNROLL {
            let key = i * UNROLL + u;
            let visible = if HIDDEN { visible[key] >> lane } else { 0 };
            let p = (&p[u], lane);
            add_round::<N, S, HIDDEN, AWAY, DIMS, VECTORS>(
                s,
                row(key),
                p,
                (visible, &away),
                &mut sums,
            );
        }
    }
    for (i, p) in rest.iter().enumerate() {
        let key = fours.len() * UNROLL + i;
        let visible = if HIDDEN { visible[key] >> lane } else { 0 };
        let p = (p, lane);
        add_round::<N, S, HIDDEN, AWAY, DIMS, VECTORS>(s, row(key), p, (visible, &away), &mut sums);
    }
    // Sum the tile first, then add it to the running sum once: half the rounding error of adding key by key.
    for r in 0..DIMS {
        for j in 0..VECTORS {
            let at = lane + j * S::LANES;
            let sum = s.fma(s.load(&out[d + r].0[at..]), s.load(&rescale.0[at..]), sums[r][j]);
            s.store(sum, &mut out[d + r].0[at..]);
        }
    }
}

/// Accumulates one key: `DIMS` features of its value times its weights for the rows.
#[inline(always)]
fn add_round<
    N: Number,
    S: Simd<N>,
    const HIDDEN: bool,
    const AWAY: bool,
    const DIMS: usize,
    const VECTORS: usize,
>(
    s: S,
    x: &[N],
    (p, lane): (&Lanes<N>, usize),
    (visible, away): (RowMask, &[[S::V; VECTORS]; DIMS]),
    sums: &mut [[S::V; VECTORS]; DIMS],
) {
    let mut y = [s.splat(N::zero()); VECTORS];
    for j in 0..VECTORS {
        y[j] = s.load(&p.0[lane + j * S::LANES..]);
    }
    for r in 0..DIMS {
        let x = s.splat(x[r]);
        for j in 0..VECTORS {
            let x = if AWAY { s.sub(x, away[r][j]) } else { x };
            sums[r][j] = if HIDDEN {
                s.fma_where(s.lanes(low(visible >> (j * S::LANES))), x, y[j], sums[r][j])
            } else {
                s.fma(x, y[j], sums[r][j])
            };
        }
    }
}
