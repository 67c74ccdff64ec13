//! Dot products and distances of a tile.

#![expect(
    clippy::needless_range_loop,
    reason = "indices over constants keep the register tiles in registers"
)]

use super::UNROLL;
use crate::machine::simd::{GROUP, Isa, Lanes, Number, Simd, Task};
use crate::tensor::index::Span;
use crate::tensor::view::Rows;

/// `tile[key][lane] = k[key] . q[lane]`, for the lanes of `span`.
pub(crate) fn dot_tile<N: Number>(
    isa: Isa,
    (k, q): (Rows<'_, N>, &[Lanes<N>]),
    span: Span,
    tile: &mut [Lanes<N>],
) {
    N::enter(isa, DotTile::<N, false> { k, q, span, tile });
}

/// `tile[key][lane] = |k[key] - q[lane]|^2`, for the lanes of `span`.
pub(crate) fn distance_tile<N: Number>(
    isa: Isa,
    (k, q): (Rows<'_, N>, &[Lanes<N>]),
    span: Span,
    tile: &mut [Lanes<N>],
) {
    N::enter(isa, DotTile::<N, true> { k, q, span, tile });
}

struct DotTile<'t, N, const DISTANCE: bool> {
    k: Rows<'t, N>,
    q: &'t [Lanes<N>],
    span: Span,
    tile: &'t mut [Lanes<N>],
}

impl<N: Number, const DISTANCE: bool> Task<N> for DotTile<'_, N, DISTANCE> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(mut self, s: S) {
        let span = self.span;
        if !S::WIDE && (S::LANES < 8 || DISTANCE) {
            // 12 accumulators do not fit in 16 registers if a difference needs one more, nor if vectors are plain arrays.
            for lane in (span.start..span.end).step_by(2 * S::LANES) {
                self.lanes::<S, 4, 2>(s, lane);
            }
        } else if !S::WIDE {
            for lane in (span.start..span.end).step_by(2 * S::LANES) {
                self.lanes::<S, 6, 2>(s, lane);
            }
        } else if span.len() <= S::LANES {
            self.lanes::<S, 8, 1>(s, span.start);
        } else if span.len() <= 2 * S::LANES {
            self.lanes::<S, 8, 2>(s, span.start);
        } else {
            self.lanes::<S, 4, 4>(s, span.start);
        }
    }
}

impl<N: Number, const DISTANCE: bool> DotTile<'_, N, DISTANCE> {
    #[inline(always)]
    fn lanes<S: Simd<N>, const KEYS: usize, const VECTORS: usize>(&mut self, s: S, lane: usize) {
        let (mut key, keys) = (0, self.tile.len());
        while key + KEYS <= keys {
            self.block::<S, KEYS, VECTORS>(s, key, lane);
            key += KEYS;
        }
        if KEYS > 4 && key + 4 <= keys {
            self.block::<S, 4, VECTORS>(s, key, lane);
            key += 4;
        }
        while key < keys {
            self.block::<S, 1, VECTORS>(s, key, lane);
            key += 1;
        }
    }

    #[inline(always)]
    fn block<S: Simd<N>, const KEYS: usize, const VECTORS: usize>(
        &mut self,
        s: S,
        key: usize,
        lane: usize,
    ) {
        let Self { k, q, tile, .. } = self;
        assert!(lane <= GROUP - VECTORS * S::LANES);
        let mut rows: [&[N]; KEYS] = [&[]; KEYS];
        for r in 0..KEYS {
            rows[r] = &k.row(key + r)[..q.len()];
        }
        let zero = s.splat(N::zero());
        let mut sums = [[zero; KEYS]; VECTORS];
        let (fours, rest) = q.as_chunks::<UNROLL>();
        for (d, q) in fours.iter().enumerate() {
            for u in 0..UNROLL {
                // SAFETY: each of `rows` was sliced to `q.len()` above, and `d * UNROLL + u` is below it.
                let x = unsafe { column(&rows, d * UNROLL + u) };
                round::<N, S, DISTANCE, KEYS, VECTORS>(s, x, (&q[u], lane), &mut sums);
            }
        }
        for (d, q) in rest.iter().enumerate() {
            // SAFETY: each of `rows` was sliced to `q.len()` above; the index is that of a feature after the last whole chunk.
            let x = unsafe { column(&rows, fours.len() * UNROLL + d) };
            round::<N, S, DISTANCE, KEYS, VECTORS>(s, x, (q, lane), &mut sums);
        }
        let tile = &mut tile[key..key + KEYS];
        for j in 0..VECTORS {
            for r in 0..KEYS {
                s.store(sums[j][r], &mut tile[r].0[lane + j * S::LANES..]);
            }
        }
    }
}

/// Element `d` of each row.
///
/// # Safety
/// Every row must be longer than `d`.
#[inline(always)]
unsafe fn column<N: Number, const KEYS: usize>(rows: &[&[N]; KEYS], d: usize) -> [N; KEYS] {
    let mut x = [N::zero(); KEYS];
    for r in 0..KEYS {
        // SAFETY: the caller of `column` guarantees that `d` is in bounds.
        x[r] = unsafe { *rows[r].get_unchecked(d) };
    }
    x
}

/// Accumulates one feature of `KEYS` keys and `VECTORS` vectors of rows.
#[inline(always)]
fn round<N: Number, S: Simd<N>, const DISTANCE: bool, const KEYS: usize, const VECTORS: usize>(
    s: S,
    x: [N; KEYS],
    (q, lane): (&Lanes<N>, usize),
    sums: &mut [[S::V; KEYS]; VECTORS],
) {
    let mut y = [s.splat(N::zero()); VECTORS];
    for j in 0..VECTORS {
        y[j] = s.load(&q.0[lane + j * S::LANES..]);
    }
    for r in 0..KEYS {
        let x = s.splat(x[r]);
        for j in 0..VECTORS {
            sums[j][r] = if DISTANCE {
                let difference = s.sub(x, y[j]);
                s.fma(difference, difference, sums[j][r])
            } else {
                s.fma(x, y[j], sums[j][r])
            };
        }
    }
}
