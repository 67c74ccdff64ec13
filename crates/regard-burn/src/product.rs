//! Products of matrices of f32.
//!
//! Many rows go to `gemm`, whose packed tiles reach the arithmetic limit. Few rows are bound by reading the weights once, which
//! packing would do twice: each row of weights is read where it lies and meets all rows while it is in the first cache. If numbers may
//! be rounded to bf16, many rows go to the tiles of AMX.

#[cfg(target_arch = "x86_64")]
mod amx;

use crate::rows::{RowWork, changed};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;
use std::cell::Cell;

/// What products of matrices round their numbers to; sums are f32 in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Products {
    /// Nothing is rounded.
    #[default]
    F32,
    /// Both matrices are rounded to bf16, 8 digits of 24, to the nearest, as autocast does in PyTorch: about four times as fast on CPUs
    /// with AMX. Others take the time of [`F32`](Self::F32) and a little more, and find the same up to the order of sums. Products
    /// of up to 12 rows are bound by memory and stay as they are.
    Bf16,
}

thread_local! {
    static PRODUCTS: Cell<Products> = const { Cell::new(Products::F32) };
}

impl Products {
    /// What operations get that are called on this thread now.
    pub(crate) fn here() -> Self {
        PRODUCTS.get()
    }

    /// `a [m, k] x b [k, n]`, rows one after another.
    pub(crate) fn multiply(self, a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
        if self == Self::F32 || a.sizes[0] <= FEW_ROWS {
            multiply(a, b)
        } else {
            on_tiles(a, b).unwrap_or_else(|| of_rounded(a, b))
        }
    }
}

/// Runs `work`, in which operations that are called on this thread have such products, on their way back too, wherever and whenever that
/// is taken. After it, also after a panic, all is as before.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use regard_burn::{Activation, Products, linear, with_products};
///
/// let ones = |sizes: [usize; 2]| Tensor::<2>::ones(sizes, &Device::flex());
/// let (x, weight) = (ones([16, 8]), ones([4, 8]) * 1.001);
/// let y = with_products(Products::Bf16, || linear(x, weight, None, Activation::None));
/// assert_eq!(y.max().into_scalar::<f32>(), 8.0); // 1.001 is 1 in bf16
/// ```
pub fn with_products<T>(products: Products, work: impl FnOnce() -> T) -> T {
    struct Before(Products);
    impl Drop for Before {
        fn drop(&mut self) {
            PRODUCTS.set(self.0);
        }
    }
    let _before = Before(PRODUCTS.replace(products));
    work()
}

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

    /// Some columns of rows that are a distance apart, from this column on.
    pub(crate) fn part(data: &'a [f32], sizes: [usize; 2], stride: usize, first: usize) -> Self {
        let last = sizes[0].checked_sub(1).map_or(0, |last| last * stride + first + sizes[1]);
        assert!(last <= data.len(), "a matrix has rows x columns numbers");
        let data = &data[first.min(data.len())..];
        Self { data, sizes, strides: [stride, 1] }
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

/// `a [m, k] x b [k, n]`, rows one after another; nothing is rounded.
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

/// On AMX, if there is.
fn on_tiles(a: Matrix<'_>, b: Matrix<'_>) -> Option<Vec<f32>> {
    #[cfg(target_arch = "x86_64")]
    return amx::multiply_bf16(a, b);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (a, b);
        None
    }
}

/// The same without: rounded first.
fn of_rounded(a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
    let [a_data, b_data] = [a, b].map(|x| changed(x.data, ROUNDED, &Nearest));
    multiply(Matrix { data: &a_data, ..a }, Matrix { data: &b_data, ..b })
}

/// Numbers that are rounded at a time.
const ROUNDED: usize = 1 << 10;

/// Rounds to bf16.
struct Nearest;

impl RowWork for Nearest {
    #[inline(always)]
    fn row(&self, _: usize, row: &mut [f32]) {
        for x in row {
            *x = nearest_bf16(*x);
        }
    }
}

/// The nearest bf16, of two the even one; 0 for denormal numbers, as the instructions have it.
#[inline(always)]
fn nearest_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    // Half of the last digit that stays, or just less if that digit is even; what overflows becomes infinite.
    let near = f32::from_bits(bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000);
    if x.abs() < f32::MIN_POSITIVE {
        0.0f32.copysign(x)
    } else if x.is_nan() {
        x
    } else {
        near
    }
}

#[expect(unsafe_code, reason = "gemm takes pointers")]
fn many_rows(a: Matrix<'_>, b: Matrix<'_>) -> Vec<f32> {
    let ([m, k], n) = (a.sizes, b.sizes[1]);
    let [[a_rows, a_columns], [b_rows, b_columns]] =
        [a.strides, b.strides].map(|strides| strides.map(usize::cast_signed));
    let mut to = Vec::with_capacity(m * n);
    // SAFETY: `Matrix::rows` and `Matrix::part` have checked that their slices hold rows x columns numbers at their distances,
    // `multiply` that inner sizes agree and are not 0, and `with_capacity` made room for m n numbers, to which nothing else
    // refers. Told not to read it, gemm writes all of it.
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

    #[test]
    fn tiles_and_rounding_first_agree() {
        let (m, k, n) = (70, 1100, 45);
        let noise = |n: usize, by: usize| -> Vec<f32> {
            (0..n).map(|i| (i * by % 1009) as f32 / 500.0 - 1.0).collect()
        };
        let (a, b) = (noise(m * k, 37), noise(k * n, 101));
        let (a, b) = (Matrix::rows(&a, [m, k]), Matrix::rows(&b, [k, n]));
        let (found, right) = (Products::Bf16.multiply(a, b), of_rounded(a, b));
        let plain = Products::F32.multiply(a, b);
        let apart = |other: &[f32]| {
            found.iter().zip(other).fold(0.0f32, |most, (x, y)| most.max((x - y).abs()))
        };
        assert!(apart(&right) < 1e-3, "{}", apart(&right));
        assert!(apart(&plain) > 1e-2, "nothing was rounded: {}", apart(&plain));
    }

    #[test]
    fn numbers_are_rounded_to_the_nearest_and_ties_to_even() {
        for (x, right) in [
            (1.0, 1.0),
            (1.0 + 1.0 / 256.0, 1.0),
            (1.0 + 3.0 / 256.0, 1.0 + 4.0 / 256.0),
            (-1.0 - 1.001 / 256.0, -1.0 - 2.0 / 256.0),
            (f32::MAX, f32::INFINITY),
            (f32::NEG_INFINITY, f32::NEG_INFINITY),
            (1e-39, 0.0),
            (-1e-39, -0.0),
        ] {
            assert_eq!(nearest_bf16(x).to_bits(), f32::to_bits(right), "{x}");
        }
        assert!(nearest_bf16(f32::NAN).is_nan());
        assert!(nearest_bf16(f32::from_bits(0x7f80_0001)).is_nan());
    }

    #[test]
    fn products_are_as_before_after_their_scope_and_after_a_panic() {
        let inner = with_products(Products::Bf16, || {
            let panics = || with_products(Products::F32, || panic!("on purpose"));
            assert!(std::panic::catch_unwind(panics).is_err());
            Products::here()
        });
        assert_eq!((inner, Products::here()), (Products::Bf16, Products::F32));
    }
}
