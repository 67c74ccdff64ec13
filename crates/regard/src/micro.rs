//! The two products of a tile, the only hot loops.
//!
//! Queries stand in the vector lanes: a tile of scores is `[keys][rows]`, an output `[features][rows]`. Keys and values
//! are read as they lie in memory, one scalar broadcast each, so nothing is packed, and every reduction of the softmax
//! is between vectors, never inside one. A lane's sums run over features, or over keys, in ascending order whatever
//! the vector width: that is why AVX2 and AVX-512 agree to the bit.
//!
//! Register tiles: 4 broadcasts x 4 vectors with 32 registers (8 x 2 and 8 x 1 for fewer rows), 6 x 2 with 16: all
//! accumulators stay in registers. A bounds check inside the loops is one more branch in each round, which hides the
//! loop's end from the branch predictor: a few per cent. The checks stand before the loops instead. Loads are what a busy neighbour on the core slows down, and 4 x 4 needs few:
//! 8 for 16 multiply-adds, where 8 x 2 needs 10.

#![expect(
    clippy::needless_range_loop,
    reason = "indices over constants keep the register tiles in registers"
)]

use crate::element::Number;
use crate::simd::{GROUP, Lanes, Simd, Span, math};
use crate::view::Rows;

/// The lanes that the products touch for `rows` rows: up to whole register tiles.
#[inline(always)]
pub(crate) fn lanes_used<N: Number, S: Simd<N>>(rows: usize) -> usize {
    match rows {
        _ if !S::WIDE => rows.next_multiple_of(2 * S::LANES),
        _ if rows <= 2 * S::LANES => rows.next_multiple_of(S::LANES),
        _ => 4 * S::LANES,
    }
}

/// What becomes of a register tile of similarities.
pub(crate) trait Then<N: Number> {
    /// Whether the difference is squared and summed, instead of the product.
    const DISTANCE: bool;
    /// Of the similarities of some keys and the rows from `lane` on, keys ascending.
    fn take<S: Simd<N>, const KEYS: usize>(
        &mut self,
        s: S,
        lane: usize,
        x: [S::V; KEYS],
    ) -> [S::V; KEYS];
}

/// Similarities as they are: `q . k`.
pub(crate) struct Dots;
/// `|q - k|^2`
pub(crate) struct Distances;
/// `2^(q . k - m)`, and their sums: the softmax takes the dot products right out of the registers.
pub(crate) struct Weights<'t, N> {
    pub(crate) m: &'t Lanes<N>,
    pub(crate) sums: Lanes<N>,
}

impl<N: Number> Then<N> for Dots {
    const DISTANCE: bool = false;
    #[inline(always)]
    fn take<S: Simd<N>, const KEYS: usize>(
        &mut self,
        _: S,
        _: usize,
        x: [S::V; KEYS],
    ) -> [S::V; KEYS] {
        x
    }
}

impl<N: Number> Then<N> for Distances {
    const DISTANCE: bool = true;
    #[inline(always)]
    fn take<S: Simd<N>, const KEYS: usize>(
        &mut self,
        _: S,
        _: usize,
        x: [S::V; KEYS],
    ) -> [S::V; KEYS] {
        x
    }
}

impl<N: Number> Then<N> for Weights<'_, N> {
    const DISTANCE: bool = false;
    #[inline(always)]
    fn take<S: Simd<N>, const KEYS: usize>(
        &mut self,
        s: S,
        lane: usize,
        mut x: [S::V; KEYS],
    ) -> [S::V; KEYS] {
        let (m, mut sum) = (s.load(&self.m.0[lane..]), s.load(&self.sums.0[lane..]));
        for x in &mut x {
            *x = math::exp2(s, s.sub(*x, m));
            sum = s.add(sum, *x);
        }
        s.store(sum, &mut self.sums.0[lane..]);
        x
    }
}

/// Similarities of a tile, and what `then` makes of them: `tile[key][lane]` from `k[key]` and `q[lane]`, for the lanes of
/// `span`.
#[inline(always)]
pub(crate) fn dot_tile<N: Number, S: Simd<N>, T: Then<N>>(
    s: S,
    (k, q): (Rows<'_, N>, &[Lanes<N>]),
    span: Span,
    tile: &mut [Lanes<N>],
    then: &mut T,
) {
    if !S::WIDE {
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
            // SAFETY: each row was cut to the length of `q`, which `d * UNROLL + u` counts.
            let x = unsafe { column(&rows, d * UNROLL + u) };
            dot_round::<N, S, T, KEYS, VECTORS>(s, x, (&q[u], lane), &mut sums);
        }
    }
    for (d, q) in rest.iter().enumerate() {
        // SAFETY: as above, for the features after the last whole chunk.
        let x = unsafe { column(&rows, fours.len() * UNROLL + d) };
        dot_round::<N, S, T, KEYS, VECTORS>(s, x, (q, lane), &mut sums);
    }
    let tile = &mut tile[key..key + KEYS];
    for j in 0..VECTORS {
        let at = lane + j * S::LANES;
        let done = then.take(s, at, sums[j]);
        for r in 0..KEYS {
            s.store(done[r], &mut tile[r].0[at..]);
        }
    }
}

/// The `d`-th number of each row.
///
/// # Safety
/// Every row must be longer than `d`.
#[inline(always)]
unsafe fn column<N: Number, const KEYS: usize>(rows: &[&[N]; KEYS], d: usize) -> [N; KEYS] {
    let mut x = [N::zero(); KEYS];
    for r in 0..KEYS {
        // SAFETY: the caller promises that `d` is in bounds.
        x[r] = unsafe { *rows[r].get_unchecked(d) };
    }
    x
}

/// One feature of some keys and of the rows.
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

/// Rounds of a product written out in a row: 16 jumps for 64 features are few enough for the branch predictor to see
/// the end of the loop coming.
const UNROLL: usize = 4;

/// Which rows of a group see a key, one bit each.
pub(crate) type Seen = u64;

/// The bits of the first vector.
#[expect(clippy::cast_possible_truncation, reason = "a vector has at most 32 lanes")]
#[inline(always)]
pub(crate) fn low(seen: Seen) -> u32 {
    seen as u32
}

/// Adds a tile to the outputs: `out[d][lane] = out[d][lane] * shrink[lane] + sum over keys of v[key][d] * p[key][lane]`,
/// for the lanes of `span`. With `HIDDEN`, a key that a row does not see (`seen`) is left out of its sum, so that
/// not even a NaN in its value can reach the row.
#[inline(always)]
pub(crate) fn add_values<N: Number, S: Simd<N>, const HIDDEN: bool>(
    s: S,
    v: Rows<'_, N>,
    p: &[Lanes<N>],
    seen: &[Seen],
    span: Span,
    (shrink, out): (&Lanes<N>, &mut [Lanes<N>]),
) {
    if !S::WIDE {
        for lane in (span.start..span.end).step_by(2 * S::LANES) {
            add_lanes::<N, S, HIDDEN, 6, 2>(s, v, p, seen, lane, (shrink, &mut *out));
        }
    } else if span.len() <= S::LANES {
        add_lanes::<N, S, HIDDEN, 8, 1>(s, v, p, seen, span.start, (shrink, out));
    } else if span.len() <= 2 * S::LANES {
        add_lanes::<N, S, HIDDEN, 8, 2>(s, v, p, seen, span.start, (shrink, out));
    } else {
        add_lanes::<N, S, HIDDEN, 4, 4>(s, v, p, seen, span.start, (shrink, out));
    }
}

#[inline(always)]
fn add_lanes<N: Number, S: Simd<N>, const HIDDEN: bool, const DIMS: usize, const VECTORS: usize>(
    s: S,
    v: Rows<'_, N>,
    p: &[Lanes<N>],
    seen: &[Seen],
    lane: usize,
    (shrink, out): (&Lanes<N>, &mut [Lanes<N>]),
) {
    let mut d = 0;
    while d + DIMS <= out.len() {
        add_block::<N, S, HIDDEN, DIMS, VECTORS>(s, (v, d), p, seen, lane, (shrink, &mut *out));
        d += DIMS;
    }
    if DIMS > 4 && d + 4 <= out.len() {
        add_block::<N, S, HIDDEN, 4, VECTORS>(s, (v, d), p, seen, lane, (shrink, &mut *out));
        d += 4;
    }
    while d < out.len() {
        add_block::<N, S, HIDDEN, 1, VECTORS>(s, (v, d), p, seen, lane, (shrink, &mut *out));
        d += 1;
    }
}

#[inline(always)]
fn add_block<N: Number, S: Simd<N>, const HIDDEN: bool, const DIMS: usize, const VECTORS: usize>(
    s: S,
    (v, d): (Rows<'_, N>, usize),
    p: &[Lanes<N>],
    seen: &[Seen],
    lane: usize,
    (shrink, out): (&Lanes<N>, &mut [Lanes<N>]),
) {
    let zero = s.splat(N::zero());
    let mut sums = [[zero; VECTORS]; DIMS];
    assert!(lane <= GROUP - VECTORS * S::LANES);
    assert!(p.is_empty() || (p.len() - 1) * v.stride + d + DIMS <= v.data.len());
    assert!(!HIDDEN || p.len() <= seen.len());
    let row = |key: usize| {
        // SAFETY: the assertion above bounds the last key's row.
        unsafe { v.data.get_unchecked(key * v.stride + d..key * v.stride + d + DIMS) }
    };
    let (fours, rest) = p.as_chunks::<UNROLL>();
    for (i, p) in fours.iter().enumerate() {
        for u in 0..UNROLL {
            let key = i * UNROLL + u;
            let seen = if HIDDEN { seen[key] >> lane } else { 0 };
            add_round::<N, S, HIDDEN, DIMS, VECTORS>(s, row(key), (&p[u], lane), seen, &mut sums);
        }
    }
    for (i, p) in rest.iter().enumerate() {
        let key = fours.len() * UNROLL + i;
        let seen = if HIDDEN { seen[key] >> lane } else { 0 };
        add_round::<N, S, HIDDEN, DIMS, VECTORS>(s, row(key), (p, lane), seen, &mut sums);
    }
    // The tile's own sum first, then one addition to the running one: half the rounding error of adding key by key.
    for r in 0..DIMS {
        for j in 0..VECTORS {
            let at = lane + j * S::LANES;
            let sum = s.fma(s.load(&out[d + r].0[at..]), s.load(&shrink.0[at..]), sums[r][j]);
            s.store(sum, &mut out[d + r].0[at..]);
        }
    }
}

/// One key: some features of its value, and its weights for the rows.
#[inline(always)]
fn add_round<N: Number, S: Simd<N>, const HIDDEN: bool, const DIMS: usize, const VECTORS: usize>(
    s: S,
    x: &[N],
    (p, lane): (&Lanes<N>, usize),
    seen: Seen,
    sums: &mut [[S::V; VECTORS]; DIMS],
) {
    let mut y = [s.splat(N::zero()); VECTORS];
    for j in 0..VECTORS {
        y[j] = s.load(&p.0[lane + j * S::LANES..]);
    }
    for r in 0..DIMS {
        let x = s.splat(x[r]);
        for j in 0..VECTORS {
            sums[r][j] = if HIDDEN {
                s.fma_where(s.lanes(low(seen >> (j * S::LANES))), x, y[j], sums[r][j])
            } else {
                s.fma(x, y[j], sums[r][j])
            };
        }
    }
}
