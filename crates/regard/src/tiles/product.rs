//! A product of packed operands, one step at a time, so that vector work can go on between the steps.

use super::{ROWS, TileRow};
use crate::simd::{GROUP, Lanes, Tiles};
use std::marker::PhantomData;

/// A packed operand: `[part][chunk][tile][16 rows]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand<'p> {
    pub(super) data: &'p [TileRow],
    pub(super) chunks: usize,
    pub(super) tiles: usize,
}

impl Operand<'_> {
    /// Whether so many parts, chunks and tiles are there.
    fn holds(&self, parts: usize, chunks: usize, tiles: usize) -> bool {
        let last = ((parts - 1) * self.chunks + chunks.max(1) - 1) * self.tiles + tiles;
        chunks <= self.chunks && tiles <= self.tiles && last * ROWS <= self.data.len()
    }

    /// The operand from a chunk and a tile on.
    pub(super) fn skip(self, chunks: usize, tiles: usize) -> Self {
        Self { data: &self.data[(chunks * self.tiles + tiles) * ROWS..], ..self }
    }

    /// Where a tile begins.
    ///
    /// # Safety
    /// The tile must be one that the operand [holds](Self::holds).
    #[inline(always)]
    unsafe fn at(&self, part: usize, chunk: usize, tile: usize) -> *const u8 {
        let tile = (part * self.chunks + chunk) * self.tiles + tile;
        // SAFETY: the tile is inside the slice, as the caller promises.
        unsafe { self.data.as_ptr().add(tile * ROWS).cast() }
    }
}

/// Where a result goes: rows of numbers, `stride` apart.
#[derive(Debug)]
pub(super) struct Sums<'p> {
    first: *mut f32,
    stride: usize,
    /// Rows, and numbers in each, that are there.
    size: (usize, usize),
    borrowed: PhantomData<&'p mut [f32]>,
}

impl<'p> Sums<'p> {
    /// Rows of `stride` numbers.
    pub(super) fn rows((to, stride): (&'p mut [f32], usize)) -> Self {
        let size = (to.len().checked_div(stride).unwrap_or(0), stride);
        Self { first: to.as_mut_ptr(), stride, size, borrowed: PhantomData }
    }

    pub(super) fn lanes(to: &'p mut [Lanes<f32>]) -> Self {
        let size = (to.len(), GROUP);
        Self { first: to.as_mut_ptr().cast(), stride: GROUP, size, borrowed: PhantomData }
    }
}

/// `to [rows][lanes] (+)= left [rows][inner] x right [inner][lanes]`, all sizes in tiles (of 32 numbers for `inner`).
///
#[derive(Debug)]
pub(super) struct Product<'p, const PARTS: usize> {
    left: Operand<'p>,
    right: Operand<'p>,
    to: Sums<'p>,
    /// Tiles of the result.
    rows: usize,
    lanes: usize,
    /// Chunks of 32 numbers that each sum is over.
    chunks: usize,
    /// Whether the result is added to what is there.
    add: bool,
    row: usize,
    lane: usize,
    chunk: usize,
}

/// Which part of the left operand meets which of the right one: small products first, neighbours share a part.
const fn meetings(parts: usize) -> &'static [(usize, usize)] {
    match parts {
        1 => &[(0, 0)],
        2 => &[(0, 1), (0, 0), (1, 0)],
        _ => &[(0, 2), (0, 1), (1, 1), (1, 0), (0, 0), (2, 0)],
    }
}

impl<'p, const PARTS: usize> Product<'p, PARTS> {
    /// Of `(rows, lanes)` tiles over `chunks`.
    pub(super) fn new(
        (left, right): (Operand<'p>, Operand<'p>),
        chunks: usize,
        (rows, lanes): (usize, usize),
        (to, add): (&'p mut [Lanes<f32>], bool),
    ) -> Self {
        Self::into_sums((left, right), chunks, (rows, lanes), (Sums::lanes(to), add))
    }

    /// The same, with the result anywhere.
    pub(super) fn into_sums(
        (left, right): (Operand<'p>, Operand<'p>),
        chunks: usize,
        (rows, lanes): (usize, usize),
        (to, add): (Sums<'p>, bool),
    ) -> Self {
        assert!(left.holds(PARTS, chunks, rows) && right.holds(PARTS, chunks, lanes));
        assert!(lanes * ROWS <= to.size.1 && (lanes == 0 || rows * ROWS <= to.size.0));
        Self { left, right, to, rows, lanes, chunks, add, row: 0, lane: 0, chunk: 0 }
    }

    /// Steps in all.
    pub(super) fn steps(&self) -> usize {
        self.rows.div_ceil(2) * self.lanes.div_ceil(2) * self.chunks
    }

    /// Chunks of each sum: the steps from one block of the result to the next.
    pub(super) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Whether all steps are taken.
    #[inline(always)]
    pub(super) fn is_done(&self) -> bool {
        self.row >= self.rows
    }

    /// Takes all steps.
    #[inline(always)]
    pub(super) fn run(mut self, t: &Tiles) {
        (0..self.steps()).for_each(|_| self.step(t));
    }

    /// The next step: up to 2 x 2 tiles of the result meet one chunk. At most [`steps`](Self::steps) may be taken.
    #[inline(always)]
    pub(super) fn step(&mut self, t: &Tiles) {
        let Self { left, right, rows, lanes, chunks, row, lane, chunk, .. } = *self;
        assert!(row < rows);
        // Whether there is a second tile of rows, of lanes.
        let (tall, wide) = (row + 1 < rows, lane + 1 < lanes);
        const STRIDE: usize = size_of::<TileRow>();
        let Sums { first, stride, .. } = self.to;
        let apart = stride * size_of::<f32>();
        let to = |i: usize, j: usize| {
            // SAFETY: `into_sums` has checked that the result has all these rows, and all these numbers in each.
            unsafe { first.add((row + i) * ROWS * stride + (lane + j) * ROWS).cast::<u8>() }
        };
        // SAFETY: `into_sums` has checked that both operands hold these tiles; every address is that of a whole tile inside a slice, whose rows lie `STRIDE` or `apart` apart;
        // second tiles are touched only where there are some.
        unsafe {
            if chunk == 0 {
                if self.add {
                    t.load::<0>(to(0, 0), apart);
                    if wide {
                        t.load::<1>(to(0, 1), apart);
                    }
                    if tall {
                        t.load::<2>(to(1, 0), apart);
                    }
                    if tall && wide {
                        t.load::<3>(to(1, 1), apart);
                    }
                } else {
                    t.zero::<0>();
                    t.zero::<1>();
                    t.zero::<2>();
                    t.zero::<3>();
                }
            }
            let mut held = (usize::MAX, usize::MAX);
            for &(a, b) in const { meetings(PARTS) } {
                let (new_left, new_right) = (held.0 != a, held.1 != b);
                held = (a, b);
                if new_left {
                    t.load::<4>(left.at(a, chunk, row), STRIDE);
                }
                if new_right {
                    t.load::<6>(right.at(b, chunk, lane), STRIDE);
                }
                t.multiply::<0, 4, 6>();
                if wide {
                    if new_right {
                        t.load::<7>(right.at(b, chunk, lane + 1), STRIDE);
                    }
                    t.multiply::<1, 4, 7>();
                }
                if tall {
                    if new_left {
                        t.load::<5>(left.at(a, chunk, row + 1), STRIDE);
                    }
                    t.multiply::<2, 5, 6>();
                    if wide {
                        t.multiply::<3, 5, 7>();
                    }
                }
            }
            if chunk + 1 == chunks {
                t.store::<0>(to(0, 0), apart);
                if wide {
                    t.store::<1>(to(0, 1), apart);
                }
                if tall {
                    t.store::<2>(to(1, 0), apart);
                }
                if tall && wide {
                    t.store::<3>(to(1, 1), apart);
                }
            }
        }
        self.chunk += 1;
        if self.chunk == chunks {
            (self.chunk, self.lane) = (0, lane + 2);
            if self.lane >= lanes {
                (self.lane, self.row) = (0, row + 2);
            }
        }
    }
}
