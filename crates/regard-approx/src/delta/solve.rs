//! Triangular systems of a chunk, `(I + L) x = y` for strictly lower `L`, by blocked substitution: the inverse of the UT
//! transform (Joffrain et al. 2006; Yang et al. 2024, section 3.2) is applied and never formed.
//!
//! Halves of the system are solved in turn, with a matrix product between them, down to [`LEAF`] rows: `n^2` flops for each
//! column.

use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2, Axis};
use regard::Number;

/// Rows that are solved one by one. Products of fewer rows take longer to pack than to compute.
const LEAF: usize = 8;

/// Where the halves of `n` rows meet.
fn middle(n: usize) -> usize {
    (n / 2).next_multiple_of(LEAF).min(n - 1)
}

/// `y -= l x` for the rows `i` of `y` and `j` of `x`, without a product of matrices.
fn subtract<N: Number>(l: N, x: &[N], y: &mut [N]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y = *y - l * *x);
}

/// Rows `i` and `j` of `y`, `j` before `i`; `None` if they are not contiguous.
fn pair<'y, N>(
    y: &'y mut ArrayViewMut2<'_, N>,
    j: usize,
    i: usize,
) -> Option<(&'y mut [N], &'y mut [N])> {
    let (before, after) = y.view_mut().split_at(Axis(0), i);
    let earlier = before.index_axis_move(Axis(0), j).into_slice();
    let later = after.index_axis_move(Axis(0), 0).into_slice();
    earlier.zip(later)
}

/// Replaces `y` by the solution of `(I + L) x = y`. Only entries of `l` below its diagonal are read.
pub(super) fn solve_lower<N: Number>(l: ArrayView2<'_, N>, mut y: ArrayViewMut2<'_, N>) {
    let n = y.nrows();
    if n <= LEAF {
        for (i, j) in (1..n).flat_map(|i| (0..i).map(move |j| (i, j))) {
            if let Some((x, y)) = pair(&mut y, j, i) {
                subtract(l[[i, j]], x, y);
            }
        }
        return;
    }
    let h = middle(n);
    let (upper, lower) = l.split_at(Axis(0), h);
    let (cross, last) = lower.split_at(Axis(1), h);
    let (mut first, mut second) = y.split_at(Axis(0), h);
    solve_lower(upper.split_at(Axis(1), h).0, first.view_mut());
    general_mat_mul(-N::one(), &cross, &first, N::one(), &mut second);
    solve_lower(last, second);
}

/// Replaces `y` by the solution of `(I + L^T) x = y`.
pub(super) fn solve_transposed<N: Number>(l: ArrayView2<'_, N>, mut y: ArrayViewMut2<'_, N>) {
    let n = y.nrows();
    if n <= LEAF {
        for (i, j) in (1..n).rev().flat_map(|i| (0..i).map(move |j| (i, j))) {
            if let Some((y, x)) = pair(&mut y, j, i) {
                subtract(l[[i, j]], x, y);
            }
        }
        return;
    }
    let h = middle(n);
    let (upper, lower) = l.split_at(Axis(0), h);
    let (cross, last) = lower.split_at(Axis(1), h);
    let (mut first, mut second) = y.split_at(Axis(0), h);
    solve_transposed(last, second.view_mut());
    general_mat_mul(-N::one(), &cross.t(), &second, N::one(), &mut first);
    solve_transposed(upper.split_at(Axis(1), h).0, first);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Array2;

    #[test]
    fn solutions_solve_their_systems() {
        for n in [1, 2, 7, 8, 9, 15, 16, 17, 33, 63, 64] {
            let l = Array2::from_shape_fn([n, n], |(i, j)| ((i * 7 + j * 3) as f64).sin() / 4.0);
            let unit = Array2::from_shape_fn([n, n], |(i, j)| match i.cmp(&j) {
                std::cmp::Ordering::Greater => l[[i, j]],
                std::cmp::Ordering::Equal => 1.0,
                std::cmp::Ordering::Less => 0.0,
            });
            let y = Array2::from_shape_fn([n, 5], |(i, j)| ((i + 11 * j) as f64).cos());
            let (mut lower, mut transposed) = (y.clone(), y.clone());
            solve_lower(l.view(), lower.view_mut());
            solve_transposed(l.view(), transposed.view_mut());
            for (matrix, x) in [(unit.view(), lower), (unit.t(), transposed)] {
                let far = (matrix.dot(&x) - &y).fold(0.0, |far: f64, x| far.max(x.abs()));
                assert!(far < 1e-9 * x.fold(1.0, |size: f64, x| size.max(x.abs())), "{n}: {far}");
            }
        }
    }
}
