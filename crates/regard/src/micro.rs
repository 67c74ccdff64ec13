//! The products of a tile, the only hot loops.
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
use crate::simd::{GROUP, Lanes, MAX_LANES, Simd, Span, Task};
use crate::softmax::TileSums;
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
    /// Of the similarities of the keys from `key` on and the rows from `lane` on, keys ascending.
    fn take<S: Simd<N>, const KEYS: usize>(
        &mut self,
        s: S,
        at: (usize, usize),
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
    pub(crate) sums: TileSums<N>,
}

impl<N: Number> Then<N> for Dots {
    const DISTANCE: bool = false;
    #[inline(always)]
    fn take<S: Simd<N>, const KEYS: usize>(
        &mut self,
        _: S,
        _: (usize, usize),
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
        _: (usize, usize),
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
        (_, lane): (usize, usize),
        mut x: [S::V; KEYS],
    ) -> [S::V; KEYS] {
        let m = s.load(&self.m.0[lane..]);
        for x in &mut x {
            *x = s.sub(*x, m);
        }
        self.sums.weigh(s, lane, &mut x);
        x
    }
}

/// `a (d_out . v - delta)`: the gradient of the score, from that of the weight, right out of the registers.
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
        let done = then.take(s, (key, at), sums[j]);
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
/// not even a NaN in its value can reach the row. With `AWAY`, the value's difference from `q[d][lane]` takes its place.
#[inline(always)]
pub(crate) fn add_values<N: Number, S: Simd<N>, const HIDDEN: bool, const AWAY: bool>(
    s: S,
    (v, q): (Rows<'_, N>, &[Lanes<N>]),
    (p, seen): (&[Lanes<N>], &[Seen]),
    span: Span,
    (shrink, out): (&Lanes<N>, &mut [Lanes<N>]),
) {
    s.call(AddValues::<N, HIDDEN, AWAY> { v, q, p, seen, span, shrink, out });
}

struct AddValues<'t, N, const HIDDEN: bool, const AWAY: bool> {
    v: Rows<'t, N>,
    q: &'t [Lanes<N>],
    p: &'t [Lanes<N>],
    seen: &'t [Seen],
    span: Span,
    shrink: &'t Lanes<N>,
    out: &'t mut [Lanes<N>],
}

impl<N: Number, const HIDDEN: bool, const AWAY: bool> Task<N> for AddValues<'_, N, HIDDEN, AWAY> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(self, s: S) {
        let Self { v, q, p, seen, span, shrink, out } = self;
        let p = (p, seen);
        if !S::WIDE {
            for lane in (span.start..span.end).step_by(2 * S::LANES) {
                let to = (shrink, &mut *out);
                add_lanes::<N, S, HIDDEN, AWAY, 6, 2>(s, (v, q), p, lane, to);
            }
        } else if span.len() <= S::LANES {
            add_lanes::<N, S, HIDDEN, AWAY, 8, 1>(s, (v, q), p, span.start, (shrink, out));
        } else if span.len() <= 2 * S::LANES {
            add_lanes::<N, S, HIDDEN, AWAY, 8, 2>(s, (v, q), p, span.start, (shrink, out));
        } else {
            add_lanes::<N, S, HIDDEN, AWAY, 4, 4>(s, (v, q), p, span.start, (shrink, out));
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
    p: (&[Lanes<N>], &[Seen]),
    lane: usize,
    (shrink, out): (&Lanes<N>, &mut [Lanes<N>]),
) {
    let mut d = 0;
    while d + DIMS <= out.len() {
        add_block::<N, S, HIDDEN, AWAY, DIMS, VECTORS>(s, (v, q, d), p, lane, (shrink, &mut *out));
        d += DIMS;
    }
    if DIMS > 4 && d + 4 <= out.len() {
        add_block::<N, S, HIDDEN, AWAY, 4, VECTORS>(s, (v, q, d), p, lane, (shrink, &mut *out));
        d += 4;
    }
    while d < out.len() {
        add_block::<N, S, HIDDEN, AWAY, 1, VECTORS>(s, (v, q, d), p, lane, (shrink, &mut *out));
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
    (p, seen): (&[Lanes<N>], &[Seen]),
    lane: usize,
    (shrink, out): (&Lanes<N>, &mut [Lanes<N>]),
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
            let p = (&p[u], lane);
            add_round::<N, S, HIDDEN, AWAY, DIMS, VECTORS>(
                s,
                row(key),
                p,
                (seen, &away),
                &mut sums,
            );
        }
    }
    for (i, p) in rest.iter().enumerate() {
        let key = fours.len() * UNROLL + i;
        let seen = if HIDDEN { seen[key] >> lane } else { 0 };
        let p = (p, lane);
        add_round::<N, S, HIDDEN, AWAY, DIMS, VECTORS>(s, row(key), p, (seen, &away), &mut sums);
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
    (seen, away): (Seen, &[[S::V; VECTORS]; DIMS]),
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
                s.fma_where(s.lanes(low(seen >> (j * S::LANES))), x, y[j], sums[r][j])
            } else {
                s.fma(x, y[j], sums[r][j])
            };
        }
    }
}

/// Rows side by side in memory, each padded with zeros to whole vectors, which never straddle two cache lines.
#[derive(Debug)]
pub(crate) struct Packed<N> {
    data: Vec<N>,
    /// Where the first whole cache line begins.
    first: usize,
    /// Numbers from one row to the next: a multiple of the widest vector.
    width: usize,
}

impl<N: Number> Packed<N> {
    pub(crate) fn new(rows: usize, features: usize) -> Self {
        let width = features.next_multiple_of(MAX_LANES);
        let data = vec![N::zero(); rows * width + MAX_LANES];
        let first = data.as_ptr().align_offset(64).min(MAX_LANES);
        Self { data, first, width }
    }

    pub(crate) fn rows(&self) -> usize {
        (self.data.len() - MAX_LANES).checked_div(self.width).unwrap_or(0)
    }

    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> &[N] {
        &self.data[self.first + i * self.width..][..self.width]
    }

    #[inline(always)]
    pub(crate) fn row_mut(&mut self, i: usize) -> &mut [N] {
        &mut self.data[self.first + i * self.width..][..self.width]
    }

    pub(crate) fn clear(&mut self) {
        self.data.fill(N::zero());
    }
}

/// The third product, over rows: `sums[at(key)] += sum over rows of tile[key][row] * rows[row]`, for the rows of `span`.
/// With `HIDDEN`, a row that does not see a key (`seen`) is left out of its sum. With `AWAY`, each row's difference from
/// `keys[key]` takes the place of the row.
#[inline(always)]
pub(crate) fn add_rows<N: Number, S: Simd<N>, const HIDDEN: bool, const AWAY: bool>(
    s: S,
    (tile, seen): (&[Lanes<N>], &[Seen]),
    (rows, span): (&Packed<N>, Span),
    keys: &Packed<N>,
    (at, sums): (&[usize], &mut Packed<N>),
) {
    s.call(AddRows::<N, HIDDEN, AWAY> { work: Sums { tile, seen, rows, span, keys, at }, sums });
}

/// The operands of [`add_rows`].
struct Sums<'t, N> {
    tile: &'t [Lanes<N>],
    seen: &'t [Seen],
    rows: &'t Packed<N>,
    span: Span,
    keys: &'t Packed<N>,
    at: &'t [usize],
}

struct AddRows<'t, N, const HIDDEN: bool, const AWAY: bool> {
    work: Sums<'t, N>,
    sums: &'t mut Packed<N>,
}

impl<N: Number, const HIDDEN: bool, const AWAY: bool> Task<N> for AddRows<'_, N, HIDDEN, AWAY> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(self, s: S) {
        let Self { work, sums } = self;
        let width = work.rows.width;
        assert!(work.span.end <= GROUP && width == sums.width);
        assert!(width == 0 || work.span.end <= work.rows.rows());
        assert!(!HIDDEN || work.tile.len() <= work.seen.len());
        let mut f = 0;
        while f < width {
            let vectors = (width - f) / S::LANES;
            if !S::WIDE {
                work.add_keys::<S, HIDDEN, AWAY, 6, 2>(s, f, sums);
                f += 2 * S::LANES;
            } else if vectors >= 4 {
                work.add_keys::<S, HIDDEN, AWAY, 4, 4>(s, f, sums);
                f += 4 * S::LANES;
            } else if vectors >= 2 {
                work.add_keys::<S, HIDDEN, AWAY, 8, 2>(s, f, sums);
                f += 2 * S::LANES;
            } else {
                work.add_keys::<S, HIDDEN, AWAY, 8, 1>(s, f, sums);
                f += S::LANES;
            }
        }
    }
}

impl<N: Number> Sums<'_, N> {
    #[inline(always)]
    fn add_keys<
        S: Simd<N>,
        const HIDDEN: bool,
        const AWAY: bool,
        const KEYS: usize,
        const VECTORS: usize,
    >(
        &self,
        s: S,
        f: usize,
        sums: &mut Packed<N>,
    ) {
        let mut key = 0;
        while key + KEYS <= self.tile.len() {
            self.add_block::<S, HIDDEN, AWAY, KEYS, VECTORS>(s, key, f, sums);
            key += KEYS;
        }
        if KEYS > 4 && key + 4 <= self.tile.len() {
            self.add_block::<S, HIDDEN, AWAY, 4, VECTORS>(s, key, f, sums);
            key += 4;
        }
        while key < self.tile.len() {
            self.add_block::<S, HIDDEN, AWAY, 1, VECTORS>(s, key, f, sums);
            key += 1;
        }
    }

    #[inline(always)]
    fn add_block<
        S: Simd<N>,
        const HIDDEN: bool,
        const AWAY: bool,
        const KEYS: usize,
        const VECTORS: usize,
    >(
        &self,
        s: S,
        key: usize,
        f: usize,
        to: &mut Packed<N>,
    ) {
        let zero = s.splat(N::zero());
        let (mut sums, mut away) = ([[zero; VECTORS]; KEYS], [[zero; VECTORS]; KEYS]);
        let tile = &self.tile[key..key + KEYS];
        let (mut any, mut all, mut seen) = (0, Seen::MAX, [0; KEYS]);
        for r in 0..KEYS {
            if HIDDEN {
                seen[r] = self.seen[key + r];
                (any, all) = (any | seen[r], all & seen[r]);
            }
            for j in 0..VECTORS {
                if AWAY {
                    away[r][j] = s.load(&self.keys.row(key + r)[f + j * S::LANES..]);
                }
            }
        }
        if HIDDEN {
            for row in self.span.start..self.span.end {
                if any >> row & 1 == 1 {
                    let some = all >> row & 1 == 0;
                    let away = (&away, some, &seen);
                    self.add_round::<S, HIDDEN, AWAY, KEYS, VECTORS>(
                        s,
                        tile,
                        (row, f),
                        away,
                        &mut sums,
                    );
                }
            }
        } else {
            let away = (&away, false, &seen);
            let mut row = self.span.start;
            while row + UNROLL <= self.span.end {
                for u in 0..UNROLL {
                    let at = (row + u, f);
                    self.add_round::<S, HIDDEN, AWAY, KEYS, VECTORS>(s, tile, at, away, &mut sums);
                }
                row += UNROLL;
            }
            for row in row..self.span.end {
                self.add_round::<S, HIDDEN, AWAY, KEYS, VECTORS>(
                    s,
                    tile,
                    (row, f),
                    away,
                    &mut sums,
                );
            }
        }
        for r in 0..KEYS {
            let to = &mut to.row_mut(self.at[key + r])[f..f + VECTORS * S::LANES];
            for j in 0..VECTORS {
                let to = &mut to[j * S::LANES..];
                s.store(s.add(s.load(to), sums[r][j]), to);
            }
        }
    }
    /// One row: its weights for some keys, and some of its features.
    #[inline(always)]
    fn add_round<
        S: Simd<N>,
        const HIDDEN: bool,
        const AWAY: bool,
        const KEYS: usize,
        const VECTORS: usize,
    >(
        &self,
        s: S,
        tile: &[Lanes<N>],
        (row, f): (usize, usize),
        (away, some, seen): (&[[S::V; VECTORS]; KEYS], bool, &[Seen; KEYS]),
        sums: &mut [[S::V; VECTORS]; KEYS],
    ) {
        let first = self.rows.first + row * self.rows.width + f;
        // SAFETY: `add_rows` holds the last row of the span against the number of rows, and `f` and the vectors after
        // it stay below the width.
        let features = unsafe { self.rows.data.get_unchecked(first..first + VECTORS * S::LANES) };
        let mut y = [s.splat(N::zero()); VECTORS];
        for j in 0..VECTORS {
            y[j] = s.load(&features[j * S::LANES..]);
        }
        for r in 0..KEYS {
            if HIDDEN && some && seen[r] >> row & 1 == 0 {
                continue;
            }
            // SAFETY: the row is below `span.end`, which `add_rows` holds against the lanes of a group.
            let x = s.splat(unsafe { *tile[r].0.get_unchecked(row) });
            for j in 0..VECTORS {
                let y = if AWAY { s.sub(y[j], away[r][j]) } else { y[j] };
                sums[r][j] = s.fma(x, y, sums[r][j]);
            }
        }
    }
}
