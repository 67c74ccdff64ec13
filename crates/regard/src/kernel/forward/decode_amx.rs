//! The two products of decoding: keys and values go from memory straight into tiles, as they lie.
//!
//! A tile of 16 keys x 32 features is a left operand already, and the queries are packed once. On the way to the sums, a tile
//! of 16 values x 32 features lies as a right operand lies, but where that has a pair of neighbours down a column, this one
//! has two features of one value. So each row of weights comes twice, once beside zeros and once behind them,
//!
//! ```text
//! even features [row][16] = weights [row][key: weight, 0] x values [key][16 x (even, odd)]
//! odd features  [row][16] = weights [row][key: 0, weight] x values [key][16 x (even, odd)]
//! ```
//!
//! which for decoding costs nothing: the tile has room for 8.
//!
//! Zero times a number that is not finite is not zero. Such a number shows in the sums; then the pass is taken once more with
//! these numbers left out of the tiles and added one by one to the rows that see them.

use super::decode::{AnyRows, BlockRows, DecodeRows, Products, Weighted, weights_from};
use crate::kernel::amx::{
    AmxDecodeScratch, KEY_GROUPS, ROWS, ROWS_PER_WEIGHT_TILE, SumRow, TileRow, WIDTH,
};
use crate::kernel::block_loop::DECODE_MAX_ROWS;
use crate::kernel::lanes;
use crate::machine::simd::{Amx, Any, Avx512, Isa, Lanes, Simd, Task, TileShape, Tiles, each};
use crate::tensor::view::Rows;
use half::bf16;

/// Keys and values, whole tiles of 16 x 32.
const X: [usize; 2] = [0, 1];
/// Queries and scores: as many columns as rows of the task.
const QUERIES: usize = 2;
const SCORES: [usize; 2] = [3, 4];
/// Weights and sums: twice the rows.
const WEIGHTS: usize = 5;
const SUMS: [usize; 2] = [6, 7];

/// See [`AmxDecodeScratch::fit`].
const ONLY_BF16: &str = "a plan decodes on AMX only what is stored as bf16";

/// The products of one task.
pub(super) struct OnAmx<'t> {
    amx: Amx,
    scratch: &'t mut AmxDecodeScratch,
    /// Set up once the rows are known.
    tiles: Option<Tiles>,
    factor: f32,
    /// Whether numbers that are not finite have shown.
    non_finite: bool,
}

impl<'t> OnAmx<'t> {
    pub(super) fn new(amx: Amx, scratch: &'t mut AmxDecodeScratch) -> Self {
        Self { amx, scratch, tiles: None, factor: 1.0, non_finite: false }
    }
}

impl Products<f32> for OnAmx<'_> {
    fn start(&mut self, rows: &mut DecodeRows<f32>, factor: f32) {
        #[expect(clippy::cast_possible_truncation, reason = "at most 16")]
        let width = rows.width as u8;
        let columns = TileShape { row_bytes: 4 * u16::from(width), ..TileShape::WHOLE };
        let twice = TileShape { rows: (2 * width).min(16), ..TileShape::WHOLE };
        let mut shapes = [TileShape::WHOLE; 8];
        shapes[QUERIES] = columns;
        SCORES.into_iter().for_each(|i| shapes[i] = columns);
        shapes[WEIGHTS] = twice;
        SUMS.into_iter().for_each(|i| shapes[i] = twice);
        self.tiles = None;
        self.tiles = Some(self.amx.configure(shapes));
        self.factor = factor;
        let AmxDecodeScratch { queries, sums, .. } = &mut *self.scratch;
        for (pair, to) in queries.iter_mut().enumerate() {
            *to = TileRow([0; WIDTH]);
            for row in 0..rows.count {
                let q = &rows.q.row(row)[2 * pair..][..2];
                for (to, x) in to.0[2 * row..].iter_mut().zip(q) {
                    *to = bf16::from_f32(*x).to_bits();
                }
            }
        }
        sums.fill(SumRow([0.0; ROWS]));
    }

    fn dots(
        &mut self,
        _: Isa,
        rows: &DecodeRows<f32>,
        keys: BlockRows<'_, f32>,
        next_rows: BlockRows<'_, f32>,
        to: &mut [f32],
    ) {
        let next_rows = next_rows.elements();
        let Any::Bf16(keys) = keys.elements() else { unreachable!("{ONLY_BF16}") };
        let Some(t) = &self.tiles else { unreachable!("`start` has configured the tiles") };
        let (s, scratch, factor) = (self.amx.vectors(), &mut *self.scratch, self.factor);
        s.call(Dots { s, t, scratch, rows, keys, next_rows, factor, to });
    }

    fn add(&mut self, _: Isa, rows: &mut DecodeRows<f32>, work: Weighted<'_, f32>) {
        let Any::Bf16(values) = work.values.elements() else { unreachable!("{ONLY_BF16}") };
        let Some(t) = &self.tiles else { unreachable!("`start` has configured the tiles") };
        let (s, scratch, non_finite) = (self.amx.vectors(), &mut *self.scratch, self.non_finite);
        match rows.width {
            1 => s.call(Add::<1> { s, t, scratch, rows, values, work, non_finite }),
            4 => s.call(Add::<4> { s, t, scratch, rows, values, work, non_finite }),
            8 => s.call(Add::<8> { s, t, scratch, rows, values, work, non_finite }),
            _ => s.call(Add::<16> { s, t, scratch, rows, values, work, non_finite }),
        }
    }

    fn finish(&mut self, rows: &mut DecodeRows<f32>) -> bool {
        self.tiles = None;
        let sums = &self.scratch.sums;
        let bad = |row: &SumRow| row.0.iter().any(|x| !x.is_finite());
        if !self.non_finite && sums.iter().any(bad) {
            self.non_finite = true;
            return false;
        }
        let (each, chunks) = (
            rows.width.min(ROWS_PER_WEIGHT_TILE),
            sums.len() / (DECODE_MAX_ROWS / ROWS_PER_WEIGHT_TILE * ROWS),
        );
        for row in 0..rows.count {
            let to = rows.sums.row_mut(row);
            for chunk in 0..chunks {
                let first = (row / each * chunks + chunk) * ROWS + row % each;
                let pairs = sums[first].0.iter().zip(&sums[first + each].0);
                for (to, (even, odd)) in to[chunk * WIDTH..].chunks_exact_mut(2).zip(pairs) {
                    (to[0], to[1]) = (to[0] + even, to[1] + odd);
                }
            }
        }
        self.non_finite = false;
        true
    }
}

/// Where 16 rows lie that tiles are loaded from, a chunk of 64 bytes each.
#[derive(Clone, Copy)]
struct Matrix {
    first: *const u8,
    /// Bytes from one row to the next.
    stride: usize,
}

impl Matrix {
    /// Rows `16 group..` of 16-bit numbers: where they lie, or, of the last ones, a copy up to 16 rows.
    #[inline(always)]
    fn group(from: Rows<'_, bf16>, group: usize, copies: &mut [TileRow]) -> Self {
        assert!(from.dim.is_multiple_of(WIDTH));
        let first = group * ROWS;
        if first + ROWS <= from.len {
            let rows = from.slice(first, ROWS);
            return Self { first: rows.data.as_ptr().cast(), stride: 2 * from.stride };
        }
        let chunks = from.dim / WIDTH;
        let to = &mut copies[..ROWS * chunks];
        to.fill(TileRow([0; WIDTH]));
        for i in first..from.len {
            copy_row(from.row(i), &mut to[(i - first) * chunks..]);
        }
        Self { first: to.as_ptr().cast(), stride: chunks * size_of::<TileRow>() }
    }

    #[inline(always)]
    fn chunk(self, chunk: usize) -> *const u8 {
        self.first.wrapping_add(chunk * size_of::<TileRow>())
    }
}

/// A row of bf16 numbers as they are.
fn copy_row(from: &[bf16], to: &mut [TileRow]) {
    for (from, to) in from.chunks(WIDTH).zip(to) {
        for (x, to) in from.iter().zip(&mut to.0) {
            *to = x.to_bits();
        }
    }
}

/// Asks for the rows that are needed soon, at one of so many steps: a few at a time keep memory busy and the way to it free.
#[inline(always)]
fn prefetch_part(next_rows: AnyRows<'_, f32>, step: usize, steps: usize) {
    each!(next_rows, rows => for i in rows.len * step / steps..rows.len * (step + 1) / steps {
        lanes::prefetch_l1(rows.row(i));
    });
}

/// `to[key][row] = factor * keys[key] . queries[row]`
struct Dots<'t, 'n> {
    s: Avx512,
    t: &'t Tiles,
    scratch: &'t mut AmxDecodeScratch,
    rows: &'t DecodeRows<f32>,
    keys: Rows<'t, bf16>,
    next_rows: AnyRows<'n, f32>,
    factor: f32,
    to: &'t mut [f32],
}

impl Task<f32> for Dots<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        let Self { s, t, scratch, rows, keys, next_rows, factor, to } = self;
        let AmxDecodeScratch { queries, copies, .. } = scratch;
        let (chunks, groups, width) = (keys.dim / WIDTH, keys.len.div_ceil(ROWS), rows.width);
        assert!(chunks * ROWS <= queries.len() && groups * ROWS * width <= to.len());
        for pair in (0..groups).step_by(2) {
            let two = pair + 1 < groups;
            let a = Matrix::group(keys, pair, copies);
            let b = if two { Matrix::group(keys, pair + 1, copies) } else { a };
            t.zero::<{ SCORES[0] }>();
            t.zero::<{ SCORES[1] }>();
            for chunk in 0..chunks {
                prefetch_part(next_rows, pair / 2 * chunks + chunk, groups.div_ceil(2) * chunks);
                // SAFETY: `Matrix::group` has 16 rows of all chunks, `queries` 16 of each (asserted above).
                unsafe {
                    t.load::<QUERIES>(queries[chunk * ROWS..].as_ptr().cast(), 64);
                    t.load::<{ X[0] }>(a.chunk(chunk), a.stride);
                    t.multiply::<{ SCORES[0] }, { X[0] }, QUERIES>();
                    t.load::<{ X[1] }>(b.chunk(chunk), b.stride);
                    t.multiply::<{ SCORES[1] }, { X[1] }, QUERIES>();
                }
            }
            let to = &mut to[pair * ROWS * width..];
            // SAFETY: `to` has room for the scores of whole groups, as asserted above.
            unsafe {
                t.store::<{ SCORES[0] }>(to.as_mut_ptr().cast(), 4 * width);
                if two {
                    t.store::<{ SCORES[1] }>(to[ROWS * width..].as_mut_ptr().cast(), 4 * width);
                }
            }
        }
        let factor = s.splat(factor);
        for x in to[..groups * ROWS * width].chunks_exact_mut(16) {
            s.store(s.mul(s.load(x), factor), x);
        }
    }
}

/// Adds the values of a block, times the weights of up to `WIDE` rows.
struct Add<'t, 'w, const WIDE: usize> {
    s: Avx512,
    t: &'t Tiles,
    scratch: &'t mut AmxDecodeScratch,
    rows: &'t mut DecodeRows<f32>,
    values: Rows<'t, bf16>,
    work: Weighted<'w, f32>,
    non_finite: bool,
}

impl<const WIDE: usize> Task<f32> for Add<'_, '_, WIDE> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(mut self, _: S) {
        let (s, t) = (self.s, self.t);
        let Weighted { next_rows, weights, rescale, .. } = self.work;
        let next_rows = next_rows.elements();
        let mut values = self.values;
        let (chunks, groups) = (values.dim / WIDTH, values.len.div_ceil(ROWS));
        let each = WIDE.min(ROWS_PER_WEIGHT_TILE);
        if rescale.iter().any(|x| *x != 1.0) {
            self.rescale();
        }
        let mut finite = Vec::new();
        if self.non_finite {
            self.add_non_finite();
            finite.extend(
                (0..values.len)
                    .flat_map(|i| values.row(i))
                    .map(|x| if x.is_finite() { *x } else { bf16::ZERO }),
            );
            values = Rows { data: &finite, stride: values.dim, ..values };
        }
        let AmxDecodeScratch { weights: packed, sums, copies, .. } = &mut *self.scratch;
        let mut here = [Matrix { first: std::ptr::null(), stride: 0 }; KEY_GROUPS];
        for group in 0..groups {
            // Only the last group is ever copied.
            here[group] = Matrix::group(values, group, copies);
            let first = group * ROWS * WIDE;
            pack_weights::<WIDE>(s, (weights, first), &mut packed[group * ROWS..]);
        }
        assert!(WIDE / each * chunks * ROWS <= sums.len());
        for eight in 0..WIDE / each {
            let packed = &packed[eight * KEY_GROUPS * ROWS..][..groups * ROWS];
            for chunk in (0..chunks).step_by(2) {
                let two = chunk + 1 < chunks;
                let first = (eight * chunks + chunk) * ROWS;
                let to = sums[first..].as_mut_ptr().cast::<u8>();
                // SAFETY: `Matrix::group` has 16 rows of all chunks for each group; weights are cut to whole tiles just above,
                // and `sums` holds all tiles, as asserted above.
                unsafe {
                    t.load::<{ SUMS[0] }>(to, 64);
                    if two {
                        t.load::<{ SUMS[1] }>(to.add(ROWS * 64), 64);
                    }
                    for (group, values) in here[..groups].iter().enumerate() {
                        if eight == 0 {
                            prefetch_part(
                                next_rows,
                                chunk / 2 * groups + group,
                                chunks.div_ceil(2) * groups,
                            );
                        }
                        t.load::<WEIGHTS>(packed[group * ROWS..].as_ptr().cast(), 64);
                        t.load::<{ X[0] }>(values.chunk(chunk), values.stride);
                        t.multiply::<{ SUMS[0] }, WEIGHTS, { X[0] }>();
                        if two {
                            t.load::<{ X[1] }>(values.chunk(chunk + 1), values.stride);
                            t.multiply::<{ SUMS[1] }, WEIGHTS, { X[1] }>();
                        }
                    }
                    t.store::<{ SUMS[0] }>(to, 64);
                    if two {
                        t.store::<{ SUMS[1] }>(to.add(ROWS * 64), 64);
                    }
                }
            }
        }
    }
}

impl<const WIDE: usize> Add<'_, '_, WIDE> {
    /// Makes the sums so far smaller. What [`add_non_finite`](Self::add_non_finite) has added stays what it is.
    #[inline(never)]
    fn rescale(&mut self) {
        let (each, rescale) = (WIDE.min(ROWS_PER_WEIGHT_TILE), self.work.rescale);
        let chunks = self.values.dim / WIDTH;
        for (i, sums) in self.scratch.sums.iter_mut().enumerate() {
            let row = i / (chunks * ROWS) * each + i % ROWS % each;
            if i % ROWS < 2 * each && row < DECODE_MAX_ROWS {
                sums.0.iter_mut().for_each(|x| *x *= rescale[row]);
            }
        }
    }

    /// Adds the numbers that are not finite to the rows that see them.
    #[inline(never)]
    fn add_non_finite(&mut self) {
        let Weighted { weights, visible, .. } = self.work;
        let values = self.values;
        for key in 0..values.len {
            for (d, x) in values.row(key).iter().map(|x| x.to_f32()).enumerate() {
                for row in (0..self.rows.count).filter(|_| !x.is_finite()) {
                    if visible.is_none_or(|visible| visible[key] >> row & 1 == 1) {
                        let weight = weights_from(weights, key * WIDE + row)[0];
                        self.rows.sums.row_mut(row)[d] += weight * x;
                    }
                }
            }
        }
    }
}

/// The weights of 16 keys, `[key][row]`, as tiles. Behind the last key may be anything finite: it meets values of 0.
#[inline(always)]
fn pack_weights<const WIDE: usize>(
    s: Avx512,
    (weights, first): (&[Lanes<f32>], usize),
    to: &mut [TileRow],
) {
    let mut rows = [s.splat(0.0); WIDE];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = s.load(weights_from(weights, first + i * 16));
    }
    // From `[key][row]` to `[row][key]`: even and odd lanes bf16 term, again and again.
    let mut half = WIDE / 2;
    while half > 0 {
        let before = rows;
        for (i, row) in rows.iter_mut().enumerate() {
            let (block, at) = (i / (2 * half), i % (2 * half));
            let from = block * 2 * half + at % half * 2;
            let (even, odd) = s.unzip(before[from], before[from + 1]);
            *row = if at < half { even } else { odd };
        }
        half /= 2;
    }
    let each = WIDE.min(ROWS_PER_WEIGHT_TILE);
    for (i, row) in rows.into_iter().enumerate() {
        // The bf16 terms stand in the order of their bits read backwards.
        let row_at = if WIDE == 1 { 0 } else { i.reverse_bits() >> (usize::BITS - WIDE.ilog2()) };
        let first = row_at / each * KEY_GROUPS * ROWS + row_at % each;
        let x = s.nearest(s.plain_nan(row));
        s.write_pairs(x, s.splat(0.0), &mut to[first].0);
        s.write_pairs(s.splat(0.0), x, &mut to[first + each].0);
    }
}
