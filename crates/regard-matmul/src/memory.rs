//! Aligned lines of bytes, blocks of activations, and outputs shared between threads.

use std::marker::PhantomData;
use std::ops::Range;

/// A cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [u8; 64]);

impl Default for Line {
    fn default() -> Self {
        Self([0; 64])
    }
}

/// Rows of a tile.
pub(crate) const TILE: usize = 16;

/// bf16 numbers that add up to an `f32`.
pub(crate) const TERMS: usize = 3;

/// 32 inputs of a row: a cache line, with all that a kernel reads of them.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Block {
    /// Integers in -127..=127, 4 in each word.
    pub(crate) quads: [i32; 8],
    /// What an integer stands for.
    pub(crate) scale: f32,
    /// Sums of the integers: of each half, and of all.
    pub(crate) sums: [i32; 3],
    /// The sums, scaled.
    pub(crate) scaled: [f32; 3],
}

/// The bytes of lines.
pub(crate) fn bytes(lines: &[Line]) -> &[u8] {
    // SAFETY: a `Line` is 64 initialised bytes without padding, and the lifetime is that of `lines`.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), size_of_val(lines)) }
}

/// The bytes of lines, to be written.
pub(crate) fn bytes_mut(lines: &mut [Line]) -> &mut [u8] {
    // SAFETY: as in `bytes`; all values of bytes are valid in a `Line`.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), size_of_val(lines)) }
}

/// Some columns of a row-major matrix, to be written by one thread while others write the other columns.
#[derive(Debug)]
pub(crate) struct Columns<'a> {
    first: *mut f32,
    rows: usize,
    stride: usize,
    columns: Range<usize>,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `Columns` is the only one that accesses its columns, as `Columns::split` makes them disjoint.
unsafe impl Send for Columns<'_> {}

impl<'a> Columns<'a> {
    /// All columns of a matrix with `stride` columns.
    pub(crate) fn new(out: &'a mut [f32], stride: usize) -> Self {
        let rows = out.len() / stride.max(1);
        Self { first: out.as_mut_ptr(), rows, stride, columns: 0..stride, lifetime: PhantomData }
    }

    /// Splits off the columns before `end`.
    pub(crate) fn split(&mut self, end: usize) -> Self {
        let end = end.clamp(self.columns.start, self.columns.end);
        let columns = self.columns.start..end;
        self.columns.start = end;
        Self { columns, ..*self }
    }

    /// The columns.
    pub(crate) fn range(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Writes those of `values` that lie in these columns to a row, the first of them to `column`.
    #[inline]
    pub(crate) fn write(&mut self, row: usize, column: usize, values: &[f32; 16]) {
        assert!(row < self.rows && self.columns.contains(&column));
        let count = (self.columns.end - column).min(16);
        // SAFETY: `row` and the columns are within the matrix by the check above, so the offset is too; `values` is a borrow
        // and cannot overlap; no other `Columns` holds these columns, and the matrix is borrowed mutably for `'a`.
        unsafe {
            let to = self.first.add(row * self.stride + column);
            if count == 16 {
                to.cast::<[f32; 16]>().write_unaligned(*values);
            } else {
                some(values, to, count);
            }
        }
    }
}

/// Copies the first few values. Not inlined: the compiler would make one call of this and of the store of all 16.
///
/// # Safety
///
/// `count` must be at most 16, and `to` valid for writes of as many.
#[cold]
#[inline(never)]
unsafe fn some(values: &[f32; 16], to: *mut f32, count: usize) {
    // SAFETY: as the caller guarantees; `values` is a borrow and cannot overlap what is written.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), to, count) };
}
