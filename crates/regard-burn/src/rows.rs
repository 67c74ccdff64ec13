//! Work on the rows of a matrix, some on each thread; results do not depend on how many threads there are.
//!
//! Work is a type with a method that is inlined, not a closure: see [`vectorized`].

use pulp::NullaryFnOnce;
use rayon::prelude::*;
use regard_matmul::math::vectorized;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Numbers of one task: enough to outweigh handing it over, few enough to stay in the second cache.
const TASK: usize = 1 << 15;
/// Rows of one task where each takes long to make.
const FEW: usize = 16;
/// Rows that are summed by one task. Not a matter of threads: sums have an order.
const SUMMED: usize = 64;

/// What is done to each row; its method must be `#[inline(always)]`.
pub(crate) trait RowWork: Sync {
    /// To the row of this number.
    fn row(&self, number: usize, row: &mut [f32]);
}

/// What is summed over rows; its method must be `#[inline(always)]`.
pub(crate) trait RowSums: Sync {
    /// Adds these rows to the sums.
    fn add(&self, rows: Range<usize>, sums: &mut [f32]);
}

/// Some rows in place.
struct InPlace<'a, W> {
    rows: &'a mut [f32],
    width: usize,
    first: usize,
    work: &'a W,
}

impl<W: RowWork> NullaryFnOnce for InPlace<'_, W> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (i, row) in self.rows.chunks_mut(self.width).enumerate() {
            self.work.row(self.first + i, row);
        }
    }
}

/// Some rows, each as a changed copy of another.
struct Copies<'a, W> {
    to: &'a mut [MaybeUninit<f32>],
    from: &'a [f32],
    width: usize,
    first: usize,
    work: &'a W,
}

impl<W: RowWork> NullaryFnOnce for Copies<'_, W> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let pairs = self.to.chunks_mut(self.width).zip(self.from.chunks(self.width));
        for (i, (to, from)) in pairs.enumerate() {
            self.work.row(self.first + i, to.write_copy_of_slice(from));
        }
    }
}

/// Sums over some rows.
struct Sums<'a, W> {
    rows: Range<usize>,
    sums: &'a mut [f32],
    work: &'a W,
}

impl<W: RowSums> NullaryFnOnce for Sums<'_, W> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.work.add(self.rows, self.sums);
    }
}

/// Makes rows of `width` numbers, each as a copy of a row of `from` that `work` then changes while it is in the cache. Nothing is
/// written twice to memory, and nothing is cleared first.
pub(crate) fn changed(from: &[f32], width: usize, work: &impl RowWork) -> Vec<f32> {
    let mut to = Vec::with_capacity(from.len());
    let room = &mut to.spare_capacity_mut()[..from.len()];
    let width = width.max(1);
    let rows = (TASK / width).max(1);
    let pieces = room.par_chunks_mut(rows * width).zip(from.par_chunks(rows * width));
    pieces.enumerate().for_each(|(task, (to, from))| {
        vectorized(Copies { to, from, width, first: task * rows, work });
    });
    #[expect(unsafe_code, reason = "what was written has to be told")]
    // SAFETY: `with_capacity` made room for `from.len()` numbers, and the pieces above, as many and as long as those of `from`, have
    // each been written by `write_copy_of_slice`, which checks that lengths are equal.
    unsafe {
        to.set_len(from.len());
    }
    to
}

/// The same in place.
pub(crate) fn by_rows(data: &mut [f32], width: usize, work: &impl RowWork) {
    let width = width.max(1);
    in_tasks(data, width, (TASK / width).max(1), work);
}

/// The same for rows of a few numbers each that take long to make.
pub(crate) fn by_few(data: &mut [f32], width: usize, work: &impl RowWork) {
    in_tasks(data, width.max(1), FEW, work);
}

fn in_tasks(data: &mut [f32], width: usize, rows: usize, work: &impl RowWork) {
    data.par_chunks_mut(rows * width).enumerate().for_each(|(task, piece)| {
        vectorized(InPlace { rows: piece, width, first: task * rows, work });
    });
}

/// For pieces of rows a list of `width` numbers each, and these added up in the order of the pieces.
pub(crate) fn summed(rows: usize, width: usize, work: &impl RowSums) -> Vec<f32> {
    let pieces = rows.div_ceil(SUMMED);
    let mut parts = vec![0.0; pieces * width];
    parts.par_chunks_mut(width.max(1)).enumerate().for_each(|(piece, sums)| {
        let rows = piece * SUMMED..((piece + 1) * SUMMED).min(rows);
        vectorized(Sums { rows, sums, work });
    });
    let mut sums = vec![0.0; width];
    for part in parts.chunks(width.max(1)) {
        for (sum, part) in sums.iter_mut().zip(part) {
            *sum += part;
        }
    }
    sums
}

/// The sum of each column.
pub(crate) fn column_sums(data: &[f32], width: usize) -> Vec<f32> {
    struct Columns<'a>(&'a [f32]);
    impl RowSums for Columns<'_> {
        #[inline(always)]
        fn add(&self, rows: Range<usize>, sums: &mut [f32]) {
            let width = sums.len();
            for i in rows {
                for (sum, x) in sums.iter_mut().zip(&self.0[i * width..][..width]) {
                    *sum += x;
                }
            }
        }
    }
    summed(data.len().checked_div(width).unwrap_or(0), width, &Columns(data))
}
