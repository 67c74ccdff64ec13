//! A product of packed operands, one step at a time, so that vector work can go on between the steps.

use super::{ROWS, TileRow};
use crate::machine::simd::{GROUP, Lanes, Tiles};
use std::marker::PhantomData;

/// A packed operand: `[bf16 term][chunk][tile][16 rows]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand<'p> {
    pub(crate) data: &'p [TileRow],
    pub(crate) chunks: usize,
    pub(crate) tiles: usize,
}

impl Operand<'_> {
    /// Whether so many bf16 terms, chunks and tiles are there.
    fn holds(&self, terms: usize, chunks: usize, tiles: usize) -> bool {
        let last = ((terms - 1) * self.chunks + chunks.max(1) - 1) * self.tiles + tiles;
        chunks <= self.chunks && tiles <= self.tiles && last * ROWS <= self.data.len()
    }

    /// The operand from a chunk and a tile on.
    pub(crate) fn skip(self, chunks: usize, tiles: usize) -> Self {
        Self { data: &self.data[(chunks * self.tiles + tiles) * ROWS..], ..self }
    }
}

/// Where a product goes: rows of sums, a fixed number of bytes apart.
#[derive(Debug)]
pub(crate) struct Sums<'p> {
    first: *mut f32,
    rows: usize,
    /// Numbers of a row that may be written.
    width: usize,
    stride: usize,
    /// Whether a product is added to what is there, or overwrites it.
    add: bool,
    scratch: PhantomData<&'p mut [f32]>,
}

impl<'p> Sums<'p> {
    /// The lanes from `lane` on, to be overwritten.
    pub(crate) fn lanes(rows: &'p mut [Lanes<f32>], lane: usize) -> Self {
        assert!(lane <= GROUP);
        // SAFETY: at most the end of the first row, for `lane` is at most `GROUP` (asserted above), or of nothing.
        let first =
            unsafe { rows.as_mut_ptr().cast::<f32>().add(if rows.is_empty() { 0 } else { lane }) };
        let stride = size_of::<Lanes<f32>>();
        let (rows, width) = (rows.len(), GROUP - lane);
        Self { first, rows, width, stride, add: false, scratch: PhantomData }
    }

    /// Rows of `stride` numbers, to be overwritten.
    pub(crate) fn rows((to, stride): (&'p mut [f32], usize)) -> Self {
        let rows = to.len().checked_div(stride).unwrap_or(0);
        let (first, bytes) = (to.as_mut_ptr(), stride * size_of::<f32>());
        Self { first, rows, width: stride, stride: bytes, add: false, scratch: PhantomData }
    }

    /// The same, but what is there is added to, if `add`.
    #[inline(always)]
    pub(crate) fn accumulate(self, add: bool) -> Self {
        Self { add, ..self }
    }
}

/// Sizes of a product, in tiles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductSizes {
    /// bf16 terms of each operand.
    pub(crate) terms: usize,
    /// Chunks of 32 numbers that each sum is over.
    pub(crate) chunks: usize,
    /// Of the result.
    pub(crate) rows: usize,
    pub(crate) lanes: usize,
}

/// `to [rows][lanes] (+)= left [rows][inner] x right [inner][lanes]`, all sizes in tiles (of 32 numbers for `inner`).
#[derive(Debug)]
pub(crate) struct Product<'p> {
    /// Where the tiles of the next step are.
    left: *const u8,
    right: *const u8,
    to: *mut u8,
    /// Bytes from one bf16 term, and from one chunk, to the next.
    left_strides: [usize; 2],
    right_strides: [usize; 2],
    stride: usize,
    /// Tiles of the result that are not begun, counted from this row; and of this row, from this step.
    rows: usize,
    lanes: usize,
    all_lanes: usize,
    /// Chunks of 32 numbers that each sum is over, and how many of them are left.
    chunks: usize,
    left_chunks: usize,
    /// Which bf16 term of the left operand meets which of the right one, which meeting is next, and which tile of it.
    meetings: &'static [(usize, usize)],
    meeting: usize,
    tile: usize,
    /// Whether the result is added to what is there.
    add: bool,
    scratch: PhantomData<(&'p [TileRow], &'p mut [f32])>,
}

/// Tiles of the result that are on their way together.
const TILES: usize = 4;

/// Bytes of a tile in an operand, and of its rows.
const TILE: usize = ROWS * ROW;
const ROW: usize = size_of::<TileRow>();

/// The meetings of so many bf16 terms: small products first, neighbours share a term.
fn term_products(terms: usize) -> &'static [(usize, usize)] {
    match terms {
        1 => &[(0, 0)],
        2 => &[(0, 1), (0, 0), (1, 0)],
        _ => &[(0, 2), (0, 1), (1, 1), (1, 0), (0, 0), (2, 0)],
    }
}

/// What the vectors do while the tiles multiply.
pub(crate) trait Between {
    /// After each of the four steps of a chunk.
    fn after(&mut self, step: usize);
}

impl<'p> Product<'p> {
    /// Checks that the operands and the result hold all tiles.
    #[inline(always)]
    pub(crate) fn new(
        sizes: ProductSizes,
        (left, right): (Operand<'p>, Operand<'p>),
        to: Sums<'p>,
    ) -> Self {
        let ProductSizes { terms, chunks, rows, lanes } = sizes;
        assert!(left.holds(terms, chunks, rows) && right.holds(terms, chunks, lanes));
        assert!(lanes == 0 || rows * ROWS <= to.rows);
        assert!(lanes * ROWS <= to.width && chunks > 0);
        let strides = |of: Operand<'_>| [of.chunks * of.tiles * TILE, of.tiles * TILE];
        Self {
            left: left.data.as_ptr().cast(),
            right: right.data.as_ptr().cast(),
            to: to.first.cast(),
            left_strides: strides(left),
            right_strides: strides(right),
            stride: to.stride,
            rows: if lanes == 0 { 0 } else { rows },
            lanes,
            all_lanes: lanes,
            chunks,
            left_chunks: chunks,
            meetings: term_products(terms),
            meeting: 0,
            tile: 0,
            add: to.add,
            scratch: PhantomData,
        }
    }

    /// Steps in all, of a product that is not begun.
    pub(crate) fn steps(&self) -> usize {
        self.rows.div_ceil(2) * self.lanes.div_ceil(2) * self.block_steps()
    }

    /// Steps from one block of the result to the next: after these, what was begun is stored.
    pub(crate) fn block_steps(&self) -> usize {
        self.chunks * self.meetings.len() * TILES
    }

    /// Whether all steps are taken.
    #[inline(always)]
    pub(crate) fn is_done(&self) -> bool {
        self.rows == 0
    }

    /// Takes all steps.
    #[inline(always)]
    pub(crate) fn run(&mut self, t: &Tiles) {
        while !self.is_done() {
            self.step(t);
        }
    }

    /// Whether all blocks of the result are 2 x 2 tiles side by side, and one bf16 term meets one.
    pub(crate) fn is_even(&self) -> bool {
        self.meetings.len() == 1
            && self.rows.is_multiple_of(2)
            && self.lanes == 2
            && self.all_lanes == 2
    }

    /// Takes all steps of an even product that is not begun, and has something else done after each.
    #[inline(always)]
    pub(crate) fn run_between(&mut self, t: &Tiles, other: &mut impl Between) {
        assert!(self.is_even());
        if self.chunks == 2 {
            return self.run_between_two(t, other);
        }
        let ([_, left_chunk], [_, right_chunk]) = (self.left_strides, self.right_strides);
        let (mut rows, mut to) = (self.left, self.to);
        while self.rows > 0 {
            let (mut left, mut right) = (rows, self.right);
            // SAFETY: `new` has checked that both operands and the result hold all tiles, two by two.
            unsafe {
                self.to = to;
                self.begin(t, true, true);
                for _ in 0..self.chunks {
                    t.load::<4>(left, ROW);
                    t.load::<6>(right, ROW);
                    t.multiply::<0, 4, 6>();
                    other.after(0);
                    t.load::<7>(right.add(TILE), ROW);
                    t.multiply::<1, 4, 7>();
                    other.after(1);
                    t.load::<5>(left.add(TILE), ROW);
                    t.multiply::<2, 5, 6>();
                    other.after(2);
                    t.multiply::<3, 5, 7>();
                    other.after(3);
                    left = left.wrapping_add(left_chunk);
                    right = right.wrapping_add(right_chunk);
                }
                self.store(t, true, true);
            }
            rows = rows.wrapping_add(2 * TILE);
            to = to.wrapping_add(2 * ROWS * self.stride);
            self.rows -= 2;
        }
    }

    /// The same over two chunks: all four tiles of the right operand stay where they are.
    #[inline(always)]
    fn run_between_two(&mut self, t: &Tiles, other: &mut impl Between) {
        let ([_, left_chunk], [_, right_chunk]) = (self.left_strides, self.right_strides);
        let (right, stride) = (self.right, self.stride);
        // SAFETY: `new` has checked that both operands and the result hold all tiles, and `run_between` has asserted `is_even`: two
        // tiles of lanes, here over two chunks. The next tile of the left operand is loaded only while rows are left.
        unsafe {
            t.load::<4>(right, ROW);
            t.load::<5>(right.add(TILE), ROW);
            t.load::<6>(right.add(right_chunk), ROW);
            t.load::<7>(right.add(right_chunk + TILE), ROW);
            t.load::<2>(self.left, ROW);
            t.load::<3>(self.left.add(left_chunk), ROW);
            while self.rows > 0 {
                self.rows -= 1;
                self.left = self.left.wrapping_add(TILE);
                if self.add {
                    t.load::<0>(self.to, stride);
                    t.load::<1>(self.to.add(ROW), stride);
                } else {
                    t.zero::<0>();
                    t.zero::<1>();
                }
                t.multiply::<0, 2, 4>();
                other.after(0);
                t.multiply::<1, 2, 5>();
                if self.rows > 0 {
                    t.load::<2>(self.left, ROW);
                }
                other.after(1);
                t.multiply::<0, 3, 6>();
                other.after(2);
                t.multiply::<1, 3, 7>();
                if self.rows > 0 {
                    t.load::<3>(self.left.add(left_chunk), ROW);
                }
                other.after(3);
                t.store::<0>(self.to, stride);
                t.store::<1>(self.to.add(ROW), stride);
                self.to = self.to.wrapping_add(ROWS * stride);
            }
        }
    }

    /// The next step: one of up to 2 x 2 tiles of the result meets one chunk, in one of its bf16 terms. Nothing, if all steps are
    /// taken.
    #[inline(always)]
    pub(crate) fn step(&mut self, t: &Tiles) {
        if self.is_done() {
            return;
        }
        // Whether there is a second tile of rows, of lanes.
        let (tall, wide) = (self.rows > 1, self.lanes > 1);
        let (a, b) = self.meetings[self.meeting];
        // An operand that the step before had, too, is there already.
        let before = self.meeting.checked_sub(1).map(|before| self.meetings[before]);
        let (new_left, new_right) = match before {
            Some(before) => (before.0 != a, before.1 != b),
            None => (true, true),
        };
        let tile = self.tile;
        self.tile = (tile + 1) % TILES;
        // SAFETY: `new` has checked that both operands and the result hold all tiles; `left`, `right` and `to` stand at
        // tiles that are still to be met, and second tiles are touched only where there are some.
        unsafe {
            let left = self.left.add(a * self.left_strides[0]);
            let right = self.right.add(b * self.right_strides[0]);
            match tile {
                0 => {
                    if self.meeting == 0 && self.left_chunks == self.chunks {
                        self.begin(t, tall, wide);
                    }
                    if new_left {
                        t.load::<4>(left, ROW);
                    }
                    if new_right {
                        t.load::<6>(right, ROW);
                    }
                    t.multiply::<0, 4, 6>();
                }
                1 => {
                    if wide {
                        if new_right {
                            t.load::<7>(right.add(TILE), ROW);
                        }
                        t.multiply::<1, 4, 7>();
                    }
                }
                2 => {
                    if tall {
                        if new_left {
                            t.load::<5>(left.add(TILE), ROW);
                        }
                        t.multiply::<2, 5, 6>();
                    }
                }
                _ => {
                    if tall && wide {
                        t.multiply::<3, 5, 7>();
                    }
                    self.meeting += 1;
                    if self.meeting == self.meetings.len() {
                        self.meeting = 0;
                        self.next_chunk(t, tall, wide);
                    }
                }
            }
        }
    }

    /// Sets the tiles of the result.
    ///
    /// # Safety
    /// Those that there are must be those of the result.
    #[inline(always)]
    unsafe fn begin(&self, t: &Tiles, tall: bool, wide: bool) {
        if !self.add {
            t.zero::<0>();
            t.zero::<1>();
            t.zero::<2>();
            t.zero::<3>();
            return;
        }
        let (to, stride) = (self.to, self.stride);
        // SAFETY: `to` stands at tiles of the result that `new` has checked; `wide` and `tall` tell which there are.
        unsafe {
            t.load::<0>(to, stride);
            if wide {
                t.load::<1>(to.add(ROW), stride);
            }
            if tall {
                let below = to.add(ROWS * stride);
                t.load::<2>(below, stride);
                if wide {
                    t.load::<3>(below.add(ROW), stride);
                }
            }
        }
    }

    /// Stores the tiles of the result.
    ///
    /// # Safety
    /// As for [`begin`](Self::begin).
    #[inline(always)]
    unsafe fn store(&self, t: &Tiles, tall: bool, wide: bool) {
        let (to, stride) = (self.to, self.stride);
        // SAFETY: as in `begin`.
        unsafe {
            t.store::<0>(to, stride);
            if wide {
                t.store::<1>(to.add(ROW), stride);
            }
            if tall {
                let below = to.add(ROWS * stride);
                t.store::<2>(below, stride);
                if wide {
                    t.store::<3>(below.add(ROW), stride);
                }
            }
        }
    }

    /// On to the next chunk; after the last, the tiles of the result are stored, and the next ones are up.
    ///
    /// # Safety
    /// As for [`begin`](Self::begin).
    #[inline(always)]
    unsafe fn next_chunk(&mut self, t: &Tiles, tall: bool, wide: bool) {
        let ([_, left_chunk], [_, right_chunk]) = (self.left_strides, self.right_strides);
        let (to, stride) = (self.to, self.stride);
        self.left_chunks -= 1;
        // SAFETY: `rows`, `lanes` and `left_chunks` count what `new` has checked, so what is stepped to is there; after the
        // last rows nothing is stepped to.
        unsafe {
            if self.left_chunks > 0 {
                self.left = self.left.add(left_chunk);
                self.right = self.right.add(right_chunk);
                return;
            }
            self.store(t, tall, wide);
            let done = self.chunks - 1;
            self.left_chunks = self.chunks;
            self.left = self.left.sub(done * left_chunk);
            self.right = self.right.sub(done * right_chunk);
            if self.lanes > 2 {
                self.lanes -= 2;
                self.right = self.right.add(2 * TILE);
                self.to = to.add(2 * ROW);
                return;
            }
            let back = self.all_lanes - self.lanes;
            self.lanes = self.all_lanes;
            self.rows = self.rows.saturating_sub(2);
            self.right = self.right.sub(back * TILE);
            if self.rows > 0 {
                self.left = self.left.add(2 * TILE);
                self.to = to.sub(back * ROW).add(2 * ROWS * stride);
            }
        }
    }
}
