//! Products of matrices of f32.
//!
//! Many rows go to `gemm`, whose packed tiles reach the arithmetic limit. Few rows are bound by reading the weights once, which
//! packing would do twice: each row of weights is read where it lies and meets all rows while it is in the first cache.

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

/// A matrix of `rows x columns` somewhere in a slice: entry `(i, j)` is at `i * strides[0] + j * strides[1]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    sizes: [usize; 2],
    strides: [usize; 2],
}

impl<'a> Matrix<'a> {
    /// Rows one after another.
    pub(crate) fn rows(data: &'a [f32], sizes: [usize; 2]) -> Self {
        assert!(sizes[0] * sizes[1] == data.len(), "a matrix has rows x columns numbers");
        Self { data, sizes, strides: [sizes[1], 1] }
    }

    /// All of its numbers.
    pub(crate) fn data(self) -> &'a [f32] {
        self.data
    }

    /// Its rows as columns.
    pub(crate) fn turned(self) -> Self {
        let ([rows, columns], [down, right]) = (self.sizes, self.strides);
        Self { sizes: [columns, rows], strides: [right, down], ..self }
    }
}

/// Rows up to which reading the weights costs more than the arithmetic.
const FEW_ROWS: usize = 12;
/// Rows of weights that one task of few rows reads.
const TASK: usize = 64;

/// `a [m, k] x b [k, n]`, rows one after another.
pub(crate) fn multiply(a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
    let ([m, k], n) = (a.sizes, b.sizes[1]);
    assert!(k == b.sizes[0], "columns of a: {k}, rows of b: {}; they must be equal", b.sizes[0]);
    if k == 0 {
        return vec![0.0; m * n];
    }
    if m <= FEW_ROWS && a.strides[1] == 1 && b.strides[0] == 1 {
        few_rows(a, b)
    } else {
        many_rows(a, b)
    }
}

#[expect(unsafe_code, reason = "gemm takes pointers")]
fn many_rows(a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
    let ([m, k], n) = (a.sizes, b.sizes[1]);
    let [[a_rows, a_columns], [b_rows, b_columns]] =
        [a.strides, b.strides].map(|strides| strides.map(usize::cast_signed));
    let mut to = Vec::with_capacity(m * n);
    // SAFETY: `Matrix::rows` has checked that its slice holds rows x columns numbers, `multiply` that inner sizes agree and are not 0,
    // and `with_capacity` made room for m n numbers, to which nothing else refers. Told not to read it, gemm writes all of it.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            to.as_mut_ptr(),
            1,
            n.cast_signed(),
            false,
            a.data.as_ptr(),
            a_columns,
            a_rows,
            b.data.as_ptr(),
            b_columns,
            b_rows,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(0),
        );
        to.set_len(m * n);
    }
    to
}

/// Each row of `a` with each column of `b`, both of which lie in one piece.
fn few_rows(a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
    let ([m, k], n) = (a.sizes, b.sizes[1]);
    let mut columns = vec![0.0; n * m];
    columns.par_chunks_mut(TASK * m.max(1)).enumerate().for_each(|(task, to)| {
        pulp::Arch::new().dispatch(Columns { a, b, first: task * TASK, k, to });
    });
    if m <= 1 || n == 0 {
        return columns;
    }
    (0..m).flat_map(|i| columns[i..].iter().step_by(m)).copied().collect()
}

/// Some columns of `b` with all rows of `a`.
struct Columns<'a> {
    a: Matrix<'a>,
    b: Matrix<'a>,
    first: usize,
    k: usize,
    to: &'a mut [f32],
}

impl WithSimd for Columns<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { a, b, first, k, to } = self;
        for (j, results) in to.chunks_mut(a.sizes[0]).enumerate() {
            let column = &b.data[(first + j) * b.strides[1]..][..k];
            let (fours, rest) = results.as_chunks_mut::<4>();
            let done = 4 * fours.len();
            for (i, four) in fours.iter_mut().enumerate() {
                let first = 4 * i * a.strides[0];
                let rows = [0, 1, 2, 3].map(|i| &a.data[first + i * a.strides[0]..][..k]);
                *four = four_dots(simd, rows, column);
            }
            for (i, result) in rest.iter_mut().enumerate() {
                *result = dot(simd, &a.data[(done + i) * a.strides[0]..][..k], column);
            }
        }
    }
}

/// Four chains of sums, as many as hide the time that a sum takes. By vectors as such: the compiler does not find them in a loop
/// over arrays here.
#[inline(always)]
fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (S::as_simd_f32s(a), S::as_simd_f32s(b));
    let ((a, a_ends), (b, b_ends)) = (a.as_chunks::<4>(), b.as_chunks::<4>());
    let mut sums = [simd.splat_f32s(0.0); 4];
    for (a, b) in a.iter().zip(b) {
        sums[0] = simd.mul_add_f32s(a[0], b[0], sums[0]);
        sums[1] = simd.mul_add_f32s(a[1], b[1], sums[1]);
        sums[2] = simd.mul_add_f32s(a[2], b[2], sums[2]);
        sums[3] = simd.mul_add_f32s(a[3], b[3], sums[3]);
    }
    for (a, b) in a_ends.iter().zip(b_ends) {
        sums[0] = simd.mul_add_f32s(*a, *b, sums[0]);
    }
    let (a, b) = (simd.partial_load_f32s(a_rest), simd.partial_load_f32s(b_rest));
    sums[1] = simd.mul_add_f32s(a, b, sums[1]);
    let (left, right) = (simd.add_f32s(sums[0], sums[1]), simd.add_f32s(sums[2], sums[3]));
    simd.reduce_sum_f32s(simd.add_f32s(left, right))
}

/// Four rows at once: each vector of the column is loaded once for all of them.
#[inline(always)]
fn four_dots<S: Simd>(simd: S, a: [&[f32]; 4], b: &[f32]) -> [f32; 4] {
    let [(a0, r0), (a1, r1)] = [S::as_simd_f32s(a[0]), S::as_simd_f32s(a[1])];
    let [(a2, r2), (a3, r3)] = [S::as_simd_f32s(a[2]), S::as_simd_f32s(a[3])];
    let (b, rest) = S::as_simd_f32s(b);
    let zero = simd.splat_f32s(0.0);
    // Two chains for each row: one alone would wait for its last sum.
    let [mut even, mut odd] = [[zero; 4]; 2];
    let ends = b.len() - b.len() % 2;
    for i in (0..ends).step_by(2) {
        even[0] = simd.mul_add_f32s(a0[i], b[i], even[0]);
        even[1] = simd.mul_add_f32s(a1[i], b[i], even[1]);
        even[2] = simd.mul_add_f32s(a2[i], b[i], even[2]);
        even[3] = simd.mul_add_f32s(a3[i], b[i], even[3]);
        odd[0] = simd.mul_add_f32s(a0[i + 1], b[i + 1], odd[0]);
        odd[1] = simd.mul_add_f32s(a1[i + 1], b[i + 1], odd[1]);
        odd[2] = simd.mul_add_f32s(a2[i + 1], b[i + 1], odd[2]);
        odd[3] = simd.mul_add_f32s(a3[i + 1], b[i + 1], odd[3]);
    }
    if ends < b.len() {
        even[0] = simd.mul_add_f32s(a0[ends], b[ends], even[0]);
        even[1] = simd.mul_add_f32s(a1[ends], b[ends], even[1]);
        even[2] = simd.mul_add_f32s(a2[ends], b[ends], even[2]);
        even[3] = simd.mul_add_f32s(a3[ends], b[ends], even[3]);
    }
    let rest = simd.partial_load_f32s(rest);
    odd[0] = simd.mul_add_f32s(simd.partial_load_f32s(r0), rest, odd[0]);
    odd[1] = simd.mul_add_f32s(simd.partial_load_f32s(r1), rest, odd[1]);
    odd[2] = simd.mul_add_f32s(simd.partial_load_f32s(r2), rest, odd[2]);
    odd[3] = simd.mul_add_f32s(simd.partial_load_f32s(r3), rest, odd[3]);
    [
        simd.reduce_sum_f32s(simd.add_f32s(even[0], odd[0])),
        simd.reduce_sum_f32s(simd.add_f32s(even[1], odd[1])),
        simd.reduce_sum_f32s(simd.add_f32s(even[2], odd[2])),
        simd.reduce_sum_f32s(simd.add_f32s(even[3], odd[3])),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_few_and_many_rows_are_those_of_the_definition() {
        let noise = |n: usize, seed: usize| -> Vec<f32> {
            (0..n).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 50.0 - 1.0).collect()
        };
        for (m, n, k) in [
            (1, 7, 5),
            (3, 130, 67),
            (12, 64, 64),
            (13, 9, 70),
            (40, 33, 129),
            (2, 3, 0),
            (0, 4, 4),
        ] {
            let (a, b) = (noise(m * k, 1), noise(n * k, 2));
            let found = multiply(Matrix::rows(&a, [m, k]), Matrix::rows(&b, [n, k]).turned());
            for i in 0..m {
                for j in 0..n {
                    let right: f64 =
                        (0..k).map(|l| f64::from(a[i * k + l]) * f64::from(b[j * k + l])).sum();
                    assert!(
                        (f64::from(found[i * n + j]) - right).abs() < 1e-4,
                        "{m} {n} {k}: {i} {j}"
                    );
                }
            }
        }
    }
}
