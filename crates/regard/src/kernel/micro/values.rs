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
/// the lanes of `span`.
pub(crate) struct Values<'t, N> {
    pub(crate) v: Rows<'t, N>,
    /// If not empty, `v[key][d] - q[d][lane]` replaces the value; then `visible` must be given.
    pub(crate) q: &'t [Lanes<N>],
    pub(crate) p: &'t [Lanes<N>],
    /// If not empty, masked keys of a row are left out of its sum, so that not even a NaN in their values reaches the row.
    pub(crate) visible: &'t [RowMask],
    pub(crate) span: Span,
    pub(crate) rescale: &'t Lanes<N>,
    pub(crate) out: &'t mut [Lanes<N>],
}

impl<N: Number> Values<'_, N> {
    pub(crate) fn add(self, isa: Isa) {
        match (self.visible.is_empty(), self.q.is_empty()) {
            (true, _) => N::enter(isa, AddValues::<N, false, false>(self)),
            (false, true) => N::enter(isa, AddValues::<N, true, false>(self)),
            (false, false) => N::enter(isa, AddValues::<N, true, true>(self)),
        }
    }
}

/// `HIDDEN`: some keys are masked; `AWAY`: differences from the queries are added.
struct AddValues<'t, N, const HIDDEN: bool, const AWAY: bool>(Values<'t, N>);

impl<N: Number, const HIDDEN: bool, const AWAY: bool> Task<N> for AddValues<'_, N, HIDDEN, AWAY> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(mut self, s: S) {
        let span = self.0.span;
        if !S::WIDE {
            for lane in (span.start..span.end).step_by(2 * S::LANES) {
                self.add_lanes::<S, 6, 2>(s, lane);
            }
        } else if span.len() <= S::LANES {
            self.add_lanes::<S, 8, 1>(s, span.start);
        } else if span.len() <= 2 * S::LANES {
            self.add_lanes::<S, 8, 2>(s, span.start);
        } else {
            self.add_lanes::<S, 4, 4>(s, span.start);
        }
    }
}

impl<N: Number, const HIDDEN: bool, const AWAY: bool> AddValues<'_, N, HIDDEN, AWAY> {
    #[inline(always)]
    fn add_lanes<S: Simd<N>, const DIMS: usize, const VECTORS: usize>(
        &mut self,
        s: S,
        lane: usize,
    ) {
        let (mut d, dim) = (0, self.0.out.len());
        while d + DIMS <= dim {
            self.add_block::<S, DIMS, VECTORS>(s, d, lane);
            d += DIMS;
        }
        if DIMS > 4 && d + 4 <= dim {
            self.add_block::<S, 4, VECTORS>(s, d, lane);
            d += 4;
        }
        while d < dim {
            self.add_block::<S, 1, VECTORS>(s, d, lane);
            d += 1;
        }
    }

    #[inline(always)]
    fn add_block<S: Simd<N>, const DIMS: usize, const VECTORS: usize>(
        &mut self,
        s: S,
        d: usize,
        lane: usize,
    ) {
        let Values { v, q, p, visible, rescale, ref mut out, .. } = self.0;
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
        let seen = |key: usize| if HIDDEN { visible[key] >> lane } else { 0 };
        let (fours, rest) = p.as_chunks::<UNROLL>();
        for (i, p) in fours.iter().enumerate() {
            for u in 0..UNROLL {
                let key = i * UNROLL + u;
                let p = &p[u].0[lane..];
                Self::add_round::<S, DIMS, VECTORS>(s, row(key), p, seen(key), &away, &mut sums);
            }
        }
        for (i, p) in rest.iter().enumerate() {
            let key = fours.len() * UNROLL + i;
            let p = &p.0[lane..];
            Self::add_round::<S, DIMS, VECTORS>(s, row(key), p, seen(key), &away, &mut sums);
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
    fn add_round<S: Simd<N>, const DIMS: usize, const VECTORS: usize>(
        s: S,
        x: &[N],
        p: &[N],
        visible: RowMask,
        away: &[[S::V; VECTORS]; DIMS],
        sums: &mut [[S::V; VECTORS]; DIMS],
    ) {
        let mut y = [s.splat(N::zero()); VECTORS];
        for j in 0..VECTORS {
            y[j] = s.load(&p[j * S::LANES..]);
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
}
