//! Rows of matrices.

use ndarray::{ArrayRef2, ArrayView2, ArrayViewMut2, Axis, Slice};
use std::ops::Range;

/// Some rows of a matrix.
pub(crate) fn rows<N>(x: &ArrayRef2<N>, range: Range<usize>) -> ArrayView2<'_, N> {
    x.slice_axis(Axis(0), Slice::from(range))
}

/// Some rows of a matrix, to be written.
pub(crate) fn rows_mut<N>(x: &mut ArrayRef2<N>, range: Range<usize>) -> ArrayViewMut2<'_, N> {
    x.slice_axis_mut(Axis(0), Slice::from(range))
}
