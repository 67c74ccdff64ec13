//! The two products of a tile, the only hot loops.
//!
//! Queries stand in the vector lanes: a tile of scores is `[keys][rows]`, an output `[features][rows]`. Keys and values
//! are read as they lie in memory, one scalar broadcast each, so nothing is packed, and every reduction of the softmax
//! is between vectors, never inside one. A lane's sums run over features, or over keys, in ascending order whatever
//! the vector width: that is why AVX2 and AVX-512 agree to the bit.
//!
//! Register tiles: 6 broadcasts x 4 vectors with 32 registers (8 x 2 and 8 x 1 for fewer rows), 6 x 2 with 16: all
//! accumulators stay in registers. A bounds check inside the loops is one more branch in each round, which hides the
//! loop's end from the branch predictor: a few per cent. The checks stand before the loops instead. Loads are what a busy neighbour on the core slows down, and 6 x 4 needs the fewest:
//! 10 for 24 multiply-adds, where 8 x 2 needs 10 for 16.

use crate::element::Number;
use crate::simd::{Lanes, Simd, math};
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

/// Similarities of a tile, and what `then` makes of them: `tile[key][lane]` from `k[key]` and `q[lane]`, for the first
/// `lanes` lanes.
#[inline(always)]
pub(crate) fn dot_tile<N: Number, S: Simd<N>, T: Then<N>>(
    s: S,
    (k, q): (Rows<'_, N>, &[Lanes<N>]),
    lanes: usize,
    tile: &mut [Lanes<N>],
    then: &mut T,
) {
    if !S::WIDE {
        for lane in (0..lanes).step_by(2 * S::LANES) {
            dot_lanes::<N, S, T, 6, 2>(s, (k, q), lane, tile, then);
        }
    } else if lanes <= S::LANES {
        dot_lanes::<N, S, T, 8, 1>(s, (k, q), 0, tile, then);
    } else if lanes <= 2 * S::LANES {
        dot_lanes::<N, S, T, 8, 2>(s, (k, q), 0, tile, then);
    } else {
        dot_lanes::<N, S, T, 4, 4>(s, (k, q), 0, tile, then);
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
    let mut rows: [&[N]; KEYS] = [&[]; KEYS];
    for r in 0..KEYS {
        rows[r] = &k.row(key + r)[..q.len()];
    }
    let zero = s.splat(N::zero());
    let mut sums = [[zero; KEYS]; VECTORS];
    for (d, q) in q.iter().enumerate() {
        let mut y = [zero; VECTORS];
        for j in 0..VECTORS {
            y[j] = s.load(&q.0[lane + j * S::LANES..]);
        }
        for r in 0..KEYS {
            // SAFETY: each row was cut to the length of `q`, which `d` counts.
            let x = s.splat(unsafe { *rows[r].get_unchecked(d) });
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
    let tile = &mut tile[key..key + KEYS];
    for j in 0..VECTORS {
        let at = lane + j * S::LANES;
        let done = then.take(s, at, sums[j]);
        for r in 0..KEYS {
            s.store(done[r], &mut tile[r].0[at..]);
        }
    }
}

/// Which rows of a group see a key, one bit each.
pub(crate) type Seen = u64;

/// The bits of the first vector.
#[expect(clippy::cast_possible_truncation, reason = "a vector has at most 32 lanes")]
#[inline(always)]
pub(crate) fn low(seen: Seen) -> u32 {
    seen as u32
}

/// Adds a tile to the outputs: `out[d][lane] = out[d][lane] * shrink[lane] + sum over keys of v[key][d] * p[key][lane]`,
/// for the first `lanes` lanes. With `HIDDEN`, a key that a row does not see (`seen`) is left out of its sum, so that
/// not even a NaN in its value can reach the row.
#[inline(always)]
pub(crate) fn add_values<N: Number, S: Simd<N>, const HIDDEN: bool>(
    s: S,
    v: Rows<'_, N>,
    p: &[Lanes<N>],
    seen: &[Seen],
    lanes: usize,
    (shrink, out): (&Lanes<N>, &mut [Lanes<N>]),
) {
    if !S::WIDE {
        for lane in (0..lanes).step_by(2 * S::LANES) {
            add_lanes::<N, S, HIDDEN, 6, 2>(s, v, p, seen, lane, (shrink, &mut *out));
        }
    } else if lanes <= S::LANES {
        add_lanes::<N, S, HIDDEN, 8, 1>(s, v, p, seen, 0, (shrink, out));
    } else if lanes <= 2 * S::LANES {
        add_lanes::<N, S, HIDDEN, 8, 2>(s, v, p, seen, 0, (shrink, out));
    } else {
        add_lanes::<N, S, HIDDEN, 4, 4>(s, v, p, seen, 0, (shrink, out));
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
    assert!(p.is_empty() || (p.len() - 1) * v.stride + d + DIMS <= v.data.len());
    assert!(!HIDDEN || p.len() <= seen.len());
    for (key, p) in p.iter().enumerate() {
        // SAFETY: the assertion above bounds the last key's row.
        let x = unsafe { v.data.get_unchecked(key * v.stride + d..key * v.stride + d + DIMS) };
        let mut y = [zero; VECTORS];
        for j in 0..VECTORS {
            y[j] = s.load(&p.0[lane + j * S::LANES..]);
        }
        for r in 0..DIMS {
            let x = s.splat(x[r]);
            for j in 0..VECTORS {
                sums[r][j] = if HIDDEN {
                    let sees = s.lanes(low(seen[key] >> (lane + j * S::LANES)));
                    s.fma_where(sees, x, y[j], sums[r][j])
                } else {
                    s.fma(x, y[j], sums[r][j])
                };
            }
        }
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
