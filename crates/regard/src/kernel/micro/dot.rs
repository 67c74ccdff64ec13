//! Similarities of a tile, with an epilogue ([`Then`]) that is applied while they are in registers.

#![expect(
    clippy::needless_range_loop,
    reason = "indices over constants keep the register tiles in registers"
)]

use super::UNROLL;
use crate::machine::simd::{GROUP, Isa, Lanes, Number, Simd, Task, math};
use crate::tensor::index::Span;
use crate::tensor::view::Rows;

/// Epilogue: transforms a register tile of similarities before it is stored.
pub(crate) trait Then<N: Number> {
    /// Whether to sum squared differences instead of products.
    const DISTANCE: bool;
    /// Transforms the similarities of the keys from `key` on, in ascending order, and the vector of rows from `lane` on. The
    /// default returns them unchanged.
    #[inline(always)]
    fn take<S: Simd<N>, const KEYS: usize>(
        &mut self,
        s: S,
        (key, lane): (usize, usize),
        x: [S::V; KEYS],
    ) -> [S::V; KEYS] {
        let _ = (s, key, lane);
        x
    }
}

/// `q . k`
pub(crate) struct Dots;
/// `|q - k|^2`
pub(crate) struct Distances;
/// `2^(q . k - max)` and their sums: the softmax reads the dot products from registers. The entropy is not supported: a run-time
/// branch next to the register tile would spill all of its accumulators to memory.
pub(crate) struct Weights<'t, N> {
    pub(crate) max: &'t Lanes<N>,
    pub(crate) sum: Lanes<N>,
}

impl<N: Number> Then<N> for Dots {
    const DISTANCE: bool = false;
}

impl<N: Number> Then<N> for Distances {
    const DISTANCE: bool = true;
}

impl<N: Number> Then<N> for Weights<'_, N> {
    const DISTANCE: bool = false;
    #[inline(always)]
    fn take<S: Simd<N>, const KEYS: usize>(
        &mut self,
        s: S,
        (_, lane): (usize, usize),
        mut x: [S::V; KEYS],
    ) -> [S::V; KEYS] {
        let (max, mut sum) = (s.load(&self.max.0[lane..]), s.load(&self.sum.0[lane..]));
        for x in &mut x {
            *x = math::weight(s, s.sub(*x, max));
            sum = s.add(sum, *x);
        }
        s.store(sum, &mut self.sum.0[lane..]);
        x
    }
}

/// `a (d_out . v - delta)`: the gradient of the score from that of the weight, `dS = P (dP - D)` in FlashAttention (Dao et al.
/// 2022), computed in registers.
pub(crate) struct ScoreGrads<'t, N> {
    /// The weights, `[keys][rows]`.
    pub(crate) weights: &'t [Lanes<N>],
    pub(crate) delta: &'t Lanes<N>,
}

impl<N: Number> Then<N> for ScoreGrads<'_, N> {
    const DISTANCE: bool = false;
    #[inline(always)]
    fn take<S: Simd<N>, const KEYS: usize>(
        &mut self,
        s: S,
        (key, lane): (usize, usize),
        mut x: [S::V; KEYS],
    ) -> [S::V; KEYS] {
        let delta = s.load(&self.delta.0[lane..]);
        let weights = &self.weights[key..key + KEYS];
        for r in 0..KEYS {
            x[r] = s.mul(s.load(&weights[r].0[lane..]), s.sub(x[r], delta));
        }
        x
    }
}

/// Computes `tile[key][lane]` from `k[key]` and `q[lane]` and applies the epilogue `then`, for the lanes of `span`.
pub(crate) fn dot_tile<N: Number, T: Then<N>>(
    isa: Isa,
    (k, q): (Rows<'_, N>, &[Lanes<N>]),
    span: Span,
    tile: &mut [Lanes<N>],
    then: &mut T,
) {
    N::enter(isa, DotTile { k, q, span, tile, then });
}

/// [`dot_tile`] from within a leaf.
#[inline(always)]
pub(crate) fn dot_within<N: Number, S: Simd<N>, T: Then<N>>(
    s: S,
    (k, q): (Rows<'_, N>, &[Lanes<N>]),
    span: Span,
    tile: &mut [Lanes<N>],
    then: &mut T,
) {
    s.call(DotTile { k, q, span, tile, then });
}

struct DotTile<'t, N, T> {
    k: Rows<'t, N>,
    q: &'t [Lanes<N>],
    span: Span,
    tile: &'t mut [Lanes<N>],
    then: &'t mut T,
}

impl<N: Number, T: Then<N>> Task<N> for DotTile<'_, N, T> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(self, s: S) {
        let Self { k, q, span, tile, then } = self;
        if !S::WIDE && (S::LANES < 8 || T::DISTANCE) {
            // 12 accumulators do not fit in 16 registers if a difference needs one more, nor if vectors are plain arrays.
            for lane in (span.start..span.end).step_by(2 * S::LANES) {
                dot_lanes::<N, S, T, 4, 2>(s, (k, q), lane, tile, then);
            }
        } else if !S::WIDE {
            for lane in (span.start..span.end).step_by(2 * S::LANES) {
                dot_lanes::<N, S, T, 6, 2>(s, (k, q), lane, tile, then);
            }
        } else if span.len() <= S::LANES {
            dot_lanes::<N, S, T, 8, 1>(s, (k, q), span.start, tile, then);
        } else if span.len() <= 2 * S::LANES {
            dot_lanes::<N, S, T, 8, 2>(s, (k, q), span.start, tile, then);
        } else {
            dot_lanes::<N, S, T, 4, 4>(s, (k, q), span.start, tile, then);
        }
    }
}

#[inline(always)]
fn dot_lanes<N: Number, S: Simd<N>, T: Then<N>, const KEYS: usize, const VECTORS: usize>(
    s: S,
    (k, q): (Rows<'_, N>, &[Lanes<N>]),
    lane: usize,
    tile: &mut [Lanes<N>],
    then: &mut T,
) {
    let mut key = 0;
    while key + KEYS <= tile.len() {
        dot_block::<N, S, T, KEYS, VECTORS>(s, (k, q), key, lane, tile, then);
        key += KEYS;
    }
    if KEYS > 4 && key + 4 <= tile.len() {
        dot_block::<N, S, T, 4, VECTORS>(s, (k, q), key, lane, tile, then);
        key += 4;
    }
    while key < tile.len() {
        dot_block::<N, S, T, 1, VECTORS>(s, (k, q), key, lane, tile, then);
        key += 1;
    }
}

#[inline(always)]
fn dot_block<N: Number, S: Simd<N>, T: Then<N>, const KEYS: usize, const VECTORS: usize>(
    s: S,
    (k, q): (Rows<'_, N>, &[Lanes<N>]),
    key: usize,
    lane: usize,
    tile: &mut [Lanes<N>],
    then: &mut T,
) {
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
            dot_round::<N, S, T, KEYS, VECTORS>(s, x, (&q[u], lane), &mut sums);
        }
    }
    for (d, q) in rest.iter().enumerate() {
        // SAFETY: each of `rows` was sliced to `q.len()` above; the index is that of a feature after the last whole chunk.
        let x = unsafe { column(&rows, fours.len() * UNROLL + d) };
        dot_round::<N, S, T, KEYS, VECTORS>(s, x, (q, lane), &mut sums);
    }
    let tile = &mut tile[key..key + KEYS];
    for j in 0..VECTORS {
        let at = lane + j * S::LANES;
        let done = then.take(s, (key, at), sums[j]);
        for r in 0..KEYS {
            s.store(done[r], &mut tile[r].0[at..]);
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
fn dot_round<N: Number, S: Simd<N>, T: Then<N>, const KEYS: usize, const VECTORS: usize>(
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
            sums[j][r] = if T::DISTANCE {
                let difference = s.sub(x, y[j]);
                s.fma(difference, difference, sums[j][r])
            } else {
                s.fma(x, y[j], sums[j][r])
            };
        }
    }
}
