//! Keys and values in 8 bits: how a row of numbers is stored, and which numbers it then holds.
//!
//! Every stored number is an `f32`, exactly: an int8 code times a scale of at most 17 significant bits, or an e4m3 number. So attention
//! over such a cache is attention over those numbers, and storing them once more changes nothing.
//!
//! Cost: a page has a quarter of the bytes of `f32`; int8 adds 4 bytes for each key and each value of a head.

use crate::machine::simd::of_e4m3;
use crate::tensor::view::Rows;

/// How a [`KvCache`](crate::KvCache) stores numbers in 8 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Quantization {
    /// Integers from -127 to 127 times one scale for each key and each value of a head: the largest magnitude of the row / 127, rounded to 17
    /// significant bits. Rounds to nearest even; the error of a number is at most 1/254 of the largest of its row. A row with a number that is
    /// not finite holds NaN.
    Int8,
    /// Floating point with 4 bits of exponent and 3 of mantissa (OCP E4M3, `float8_e4m3fn`), without a scale: a relative error of at most
    /// 1/16 for magnitudes from 2^-6 to 448. Rounds to nearest even; larger magnitudes become 448, and NaN stays NaN.
    Fp8E4m3,
}

impl Quantization {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Int8, Self::Fp8E4m3];

    /// `int8`, `fp8_e4m3`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Fp8E4m3 => "fp8_e4m3",
        }
    }

    /// Scales of a row.
    pub(super) fn scales(self) -> usize {
        match self {
            Self::Int8 => 1,
            Self::Fp8E4m3 => 0,
        }
    }

    /// Stores a row. The scale is 1 where none is stored.
    pub(super) fn store(self, row: &[f32], codes: &mut [u8]) -> f32 {
        match self {
            Self::Int8 => {
                let scale = int8_scale(row);
                if scale.is_nan() {
                    codes.fill(0);
                    return scale;
                }
                for (x, code) in row.iter().zip(codes) {
                    *code = whole(x / scale);
                }
                scale
            }
            Self::Fp8E4m3 => {
                row.iter().zip(codes).for_each(|(x, code)| *code = to_e4m3(*x));
                1.0
            }
        }
    }

    /// The number that a code stands for.
    #[inline(always)]
    pub(crate) fn number(self, code: u8, scale: f32) -> f32 {
        match self {
            Self::Int8 => f32::from(code.cast_signed()) * scale,
            Self::Fp8E4m3 => of_e4m3(code),
        }
    }
}

/// Adding it rounds a number of less than 2^22 to a whole one, to nearest even, which the lowest bits of the sum then hold.
const TO_WHOLE: f32 = 12_582_912.0; // 1.5 * 2^23

/// The nearest whole number of magnitude below 128, in two's complement.
#[expect(clippy::cast_possible_truncation, reason = "the lowest bits are the number")]
#[inline(always)]
fn whole(x: f32) -> u8 {
    (x + TO_WHOLE).to_bits() as u8
}

/// Bits of a scale that are 0, so that its product with 7 bits is exact.
const SCALE_SPARE: u32 = 7;

/// NaN if a number is not finite.
fn int8_scale(row: &[f32]) -> f32 {
    // The bits of magnitudes are ordered as they are, infinity and NaN above all.
    let largest = row.iter().fold(0, |most, x| x.abs().to_bits().max(most));
    let largest = f32::from_bits(largest);
    if !largest.is_finite() {
        return f32::NAN;
    }
    let (half, spare) = (1 << (SCALE_SPARE - 1), (1 << SCALE_SPARE) - 1);
    let scale = (largest / 127.0).max(f32::MIN_POSITIVE);
    let rounded = f32::from_bits((scale.to_bits() + half) & !spare);
    // 127 times the scale must not overflow.
    if rounded > f32::MAX / 127.0 { f32::from_bits(scale.to_bits() & !spare) } else { rounded }
}

/// The largest E4M3 number.
const E4M3_MAX: f32 = 448.0;

/// Rounds to nearest even; saturates; NaN stays NaN.
#[expect(clippy::cast_possible_truncation, reason = "7 bits")]
#[inline(always)]
fn to_e4m3(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let size = x.abs().min(E4M3_MAX);
    let code = if x.is_nan() {
        0x7f
    } else if size < 1.0 / 64.0 {
        // Multiples of 2^-9; 8 of them are the code of the smallest number with a leading 1.
        whole(size * 512.0)
    } else {
        let bits = size.to_bits();
        let even = bits + 0x7_ffff + (bits >> 20 & 1);
        ((even >> 20) - (120 << 3)) as u8
    };
    sign | code
}

/// What a page has in 8 bits.
#[derive(Debug, Default)]
pub(super) struct CodePage {
    pub(super) codes: Vec<u8>,
    pub(super) scales: Vec<f32>,
}

/// Rows of codes, and a scale for each, unless these have none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CodeRows<'c> {
    pub(crate) codes: Rows<'c, u8>,
    pub(crate) scales: &'c [f32],
    pub(crate) quantization: Quantization,
}

/// The keys or the values of one head of a sequence, in 8 bits: rows of `dim` codes, in pages.
///
/// Row 0 is the first position that is still held, which is the first of its page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuantizedHead<'c> {
    pub(super) pages: &'c [CodePage],
    /// The pages of the sequence, in order.
    pub(super) list: &'c [usize],
    /// Where in each page the codes of the head begin, and its scales.
    pub(super) start: [usize; 2],
    pub(super) page: usize,
    pub(crate) dim: usize,
    /// Codes from one row to the next.
    pub(super) stride: usize,
    pub(crate) quantization: Quantization,
}

impl<'c> QuantizedHead<'c> {
    /// The rows from `first` on that lie in its page, at most `len`, which is not 0.
    #[inline(always)]
    pub(crate) fn run(&self, first: usize, len: usize) -> CodeRows<'c> {
        let (page, at) = (first / self.page, first % self.page);
        let n = len.min(self.page - at);
        let CodePage { codes, scales } = &self.pages[self.list[page]];
        let [codes_start, scales_start] = self.start;
        let Self { stride, dim, quantization, .. } = *self;
        let data = &codes[codes_start + at * stride..][..(n - 1) * stride + dim];
        let each = quantization.scales();
        let scales = &scales[scales_start + at * each..][..n * each];
        CodeRows { codes: Rows { data, stride, len: n, dim }, scales, quantization }
    }

    /// The numbers of a row.
    pub(crate) fn numbers(&self, row: usize) -> impl Iterator<Item = f32> + use<'c> {
        let CodeRows { codes, scales, quantization } = self.run(row, 1);
        let scale = scales.first().copied().unwrap_or(1.0);
        codes.data.iter().map(move |code| quantization.number(*code, scale))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::simd::Number;

    fn stored(quantization: Quantization, row: &[f32]) -> (Vec<u8>, f32, Vec<f32>) {
        let mut codes = vec![0; row.len()];
        let scale = quantization.store(row, &mut codes);
        let numbers = codes.iter().map(|code| quantization.number(*code, scale)).collect();
        (codes, scale, numbers)
    }

    #[test]
    fn e4m3_is_the_nearest_number_of_the_format() {
        // All magnitudes, by the definition of the format.
        let size = |code: u8| match (code >> 3, f64::from(code & 7)) {
            (0, m) => m / 512.0,
            (e, m) => (1.0 + m / 8.0) * f64::from(e).mul_add(1.0, -7.0).exp2(),
        };
        for code in 0..0x7f {
            for (code, sign) in [(code, 1.0), (code | 0x80, -1.0)] {
                let x = Quantization::Fp8E4m3.number(code, 1.0);
                assert_eq!(f64::from(x), sign * size(code & 0x7f), "{code:#x}");
                assert_eq!(to_e4m3(x), code, "{x}");
            }
            let (low, high) = (size(code), size((code + 1).min(0x7e)));
            let middle = f32::from_f64(f64::midpoint(low, high));
            assert_eq!(to_e4m3(middle), if code & 1 == 0 { code } else { (code + 1).min(0x7e) });
            assert_eq!(to_e4m3(f32::from_bits(middle.to_bits() + 1)), (code + 1).min(0x7e));
            assert_eq!(to_e4m3(-middle * (1.0 - f32::EPSILON)), code | 0x80);
        }
        for x in [448.0, 449.0, 1e30, f32::INFINITY] {
            assert_eq!([to_e4m3(x), to_e4m3(-x)], [0x7e, 0xfe]);
        }
        assert_eq!([to_e4m3(f32::NAN) & 0x7f, to_e4m3(0.0), to_e4m3(-0.0)], [0x7f, 0, 0x80]);
        assert!(Quantization::Fp8E4m3.number(0xff, 1.0).is_nan());
    }

    #[test]
    fn int8_rounds_to_nearest_even_and_its_products_are_exact() {
        let mut seed = 1u32;
        for exponent in -149..=127 {
            let largest = f32::from_f64(f64::from(exponent).exp2());
            let mut row: Vec<f32> = (0..257)
                .map(|_| {
                    seed = seed.wrapping_mul(0x915f_77f5).wrapping_add(1);
                    f32::from_f64(f64::from(seed) / f64::from(u32::MAX) * 2.0 - 1.0) * largest
                })
                .collect();
            row.push(largest * 1.999_999_9);
            let (codes, scale, numbers) = stored(Quantization::Int8, &row);
            assert!(scale.is_normal() && scale.to_bits().trailing_zeros() >= SCALE_SPARE);
            for ((x, code), number) in row.iter().zip(&codes).zip(&numbers) {
                let (code, x) = (f64::from(code.cast_signed()), f64::from(*x));
                assert_eq!(f64::from(*number), code * f64::from(scale));
                // The quotient is rounded to f32 before it is rounded to a whole number.
                assert!((x / f64::from(scale) - code).abs() <= 0.500_01, "{x} {code} {scale}");
            }
            assert!(
                exponent < -110
                    || codes.iter().any(|code| code.cast_signed().unsigned_abs() == 127)
            );
            assert_eq!(stored(Quantization::Int8, &numbers), (codes, scale, numbers));
        }
        let (codes, scale, numbers) = stored(Quantization::Int8, &[f32::MAX, -f32::MAX, 0.0]);
        assert_eq!(codes, [127, 129, 0]);
        assert!(scale.is_finite() && numbers.iter().all(|x| x.is_finite()));
        // Halves of a scale of 1, ties to even.
        let (codes, scale, _) = stored(Quantization::Int8, &[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]);
        assert_eq!((codes, scale), (vec![127, 0, 2, 2, 0, 254], 1.0));
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(stored(Quantization::Int8, &[1.0, x]).2.iter().all(|x| x.is_nan()));
        }
        assert_eq!(stored(Quantization::Int8, &[0.0, -0.0]).2, [0.0, 0.0]);
        assert_eq!(stored(Quantization::Int8, &[]).0, [0u8; 0]);
    }
}
