//! AVX-512: 16 `f32` lanes, 32 registers, lane masks in mask registers.

use super::super::element::E4M3_OF_F16;
use super::super::{Enter, NEGLIGIBLE, Number, Simd, Task};
use super::avx2::Avx2;
use half::{bf16, f16};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Proof that this machine has AVX-512 (F, DQ, BW, VL) and AVX2, and that the operating system saves their registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Avx512(Avx2);

impl Avx512 {
    /// The proof, if the features are available.
    #[must_use]
    pub fn detect() -> Option<Self> {
        let all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        Avx2::detect().filter(|_| all).map(Self)
    }

    pub(crate) fn avx2(self) -> Avx2 {
        self.0
    }
}

impl Enter for Avx512 {
    #[inline(always)]
    fn enter<N: Number, S: Simd<N>, T: Task<N>>(self, task: T, s: S) -> T::Out {
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
        fn inside<N: Number, S: Simd<N>, T: Task<N>>(task: T, s: S) -> T::Out {
            task.run(s)
        }
        // SAFETY: `self` exists, so `detect` has found these features.
        unsafe { inside(task, s) }
    }
}

/// Every intrinsic below needs only the features that `Avx512` proves; pointers come from slices whose length is asserted just
/// before.
macro_rules! intrinsic {
    ($e:expr) => {{
        // SAFETY: each method takes `self`, the proof of the features; the caller of the macro asserts the slice length.
        unsafe { $e }
    }};
}

/// Conversion to bf16 (8 significant bits) in the upper 16 bits of `f32` lanes, for AMX tiles.
impl Avx512 {
    /// Truncates to bf16: clears the lower 16 bits.
    #[inline(always)]
    pub(crate) fn upper(self, x: __m512) -> __m512 {
        let mask = intrinsic!(_mm512_set1_epi32(!0xffff));
        intrinsic!(_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), mask)))
    }
    /// Rounds to the nearest bf16, ties away from 0; the lower 16 bits are not cleared. For numbers that the kernel computed: the
    /// lower 16 bits of a NaN must be 0 ([`Self::plain_nan`]), or rounding may turn it into a number.
    #[inline(always)]
    pub(crate) fn nearest(self, x: __m512) -> __m512 {
        let half = intrinsic!(_mm512_set1_epi32(0x8000));
        intrinsic!(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), half)))
    }
    /// As [`Self::nearest`] for any number: a number that would round to infinity is left unrounded, and NaN stays NaN.
    #[inline(always)]
    pub(crate) fn nearest_of_any(self, x: __m512) -> __m512 {
        // Halfway between the largest finite bf16 number and infinity.
        let limit = self.splat(f32::from_bits(0x7f7f_8000));
        let size = intrinsic!(_mm512_abs_ps(x));
        self.plain_nan(self.select(self.less(size, limit), self.nearest(x), x))
    }
    /// Replaces every NaN by the default quiet NaN, whose lower 16 bits are 0.
    #[inline(always)]
    pub(crate) fn plain_nan(self, x: __m512) -> __m512 {
        let nan = intrinsic!(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x));
        self.select(nan, self.splat(f32::NAN), x)
    }
    /// Interleaves the upper 16 bits of the lanes of two vectors: first, second, first, second, ...
    #[inline(always)]
    pub(crate) fn pairs(self, first: __m512, second: __m512) -> __m512 {
        intrinsic!({
            let first = _mm512_srli_epi32::<16>(_mm512_castps_si512(first));
            let second = _mm512_castps_si512(second);
            _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaa_aaaa, first, second))
        })
    }
    #[inline(always)]
    pub(crate) fn write_tile_row(self, pairs: __m512, to: &mut [u16; 32]) {
        intrinsic!(_mm512_storeu_ps(to.as_mut_ptr().cast(), pairs));
    }
    /// Stores the interleaved upper 16 bits of the lanes of two vectors.
    #[inline(always)]
    pub(crate) fn write_pairs(self, first: __m512, second: __m512, to: &mut [u16; 32]) {
        self.write_tile_row(self.pairs(first, second), to);
    }
    /// The even lanes of two vectors, and the odd lanes.
    #[inline(always)]
    pub(crate) fn unzip(self, a: __m512, b: __m512) -> (__m512, __m512) {
        intrinsic!({
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
            (_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b))
        })
    }
}

impl Simd<f32> for Avx512 {
    type V = __m512;
    type M = __mmask16;
    type Block = [__m512; 16];
    const LANES: usize = 16;
    const WIDE: bool = true;

    #[inline(always)]
    fn call<T: Task<f32>>(self, task: T) -> T::Out {
        self.enter(task, self)
    }
    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        intrinsic!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, src: &[f32]) -> __m512 {
        assert!(src.len() >= 16);
        intrinsic!(_mm512_loadu_ps(src.as_ptr()))
    }
    #[inline(always)]
    fn store(self, v: __m512, dst: &mut [f32]) {
        assert!(dst.len() >= 16);
        intrinsic!(_mm512_storeu_ps(dst.as_mut_ptr(), v));
    }
    #[inline(always)]
    fn write(self, v: __m512, dst: &mut [MaybeUninit<f32>]) {
        assert!(dst.len() >= 16);
        intrinsic!(_mm512_storeu_ps(dst.as_mut_ptr().cast(), v));
    }
    #[inline(always)]
    fn load_f16(self, src: &[f16]) -> __m512 {
        assert!(src.len() >= 16);
        intrinsic!(_mm512_cvtph_ps(_mm256_loadu_si256(src.as_ptr().cast())))
    }
    #[inline(always)]
    fn load_bf16(self, src: &[bf16]) -> __m512 {
        assert!(src.len() >= 16);
        intrinsic!({
            let x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(src.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x))
        })
    }
    #[inline(always)]
    fn load_i8(self, src: &[u8]) -> __m512 {
        assert!(src.len() >= 16);
        intrinsic!({
            let codes = _mm_loadu_si128(src.as_ptr().cast());
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))
        })
    }
    /// By way of `f16`, whose denormal numbers cost nothing to widen.
    #[inline(always)]
    fn load_e4m3(self, src: &[u8]) -> __m512 {
        assert!(src.len() >= 16);
        intrinsic!({
            let codes = _mm_loadu_si128(src.as_ptr().cast());
            let wide = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(codes));
            let fields = _mm256_and_si256(wide, _mm256_set1_epi16(0xbf80_u16.cast_signed()));
            let size = _mm256_set1_epi16(0x3f80);
            let nan = _mm256_cmpeq_epi16(_mm256_and_si256(fields, size), size);
            // A NaN of `f16` where the code is one: a blend of the results would be moved behind each of their products.
            const OR_AND: i32 = 0xf8;
            let fields =
                _mm256_ternarylogic_epi32::<OR_AND>(fields, nan, _mm256_set1_epi16(0x7e00));
            _mm512_mul_ps(_mm512_cvtph_ps(fields), _mm512_set1_ps(E4M3_OF_F16))
        })
    }
    #[inline(always)]
    fn write_f16(self, v: __m512, dst: &mut [MaybeUninit<f16>]) {
        assert!(dst.len() >= 16);
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
        intrinsic!(_mm256_storeu_si256(dst.as_mut_ptr().cast(), _mm512_cvtps_ph::<NEAREST>(v)));
    }
    #[inline(always)]
    fn write_bf16(self, v: __m512, dst: &mut [MaybeUninit<bf16>]) {
        assert!(dst.len() >= 16);
        intrinsic!({
            let x = _mm512_castps_si512(v);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(x), _mm512_set1_epi32(1));
            let even = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7fff)), odd);
            // Rounding must not turn a NaN into an infinity or a number.
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let quiet = _mm512_or_si512(x, _mm512_set1_epi32(0x40_0000));
            let x = _mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, even, quiet));
            _mm256_storeu_si256(dst.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(x));
        });
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        intrinsic!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        intrinsic!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn less(self, a: __m512, b: __m512) -> __mmask16 {
        intrinsic!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    fn bits(self, m: __mmask16) -> u32 {
        u32::from(m)
    }
    #[expect(clippy::cast_possible_truncation, reason = "the low 16 bits are the lanes")]
    #[inline(always)]
    fn lanes(self, bits: u32) -> __mmask16 {
        bits as __mmask16
    }
    #[inline(always)]
    fn select(self, m: __mmask16, yes: __m512, no: __m512) -> __m512 {
        intrinsic!(_mm512_mask_blend_ps(m, no, yes))
    }
    #[inline(always)]
    fn fma_where(self, m: __mmask16, a: __m512, b: __m512, c: __m512) -> __m512 {
        intrinsic!(_mm512_mask3_fmadd_ps(a, b, c, m))
    }
    #[inline(always)]
    fn remainder(self, x: __m512) -> __m512 {
        intrinsic!(_mm512_reduce_ps::<0>(x)) // rounds to nearest even with 0 fraction bits
    }
    #[inline(always)]
    fn scale(self, x: __m512, e: __m512) -> __m512 {
        intrinsic!(_mm512_scalef_ps(x, e))
    }
    #[inline(always)]
    fn scale_weight(self, x: __m512, e: __m512) -> __m512 {
        let lowest = self.splat(-NEGLIGIBLE);
        // "Not less than" is true for NaN, so a NaN propagates.
        intrinsic!(_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(e, lowest), x, e))
    }
    #[inline(always)]
    fn block(self) -> [__m512; 16] {
        [self.splat(0.0); 16]
    }
    /// Interleaves floats, then pairs of floats, then 128-bit quarters in two steps: 64 shuffles.
    #[inline(always)]
    fn transpose(self, r: &mut [__m512; 16]) {
        let mut t = *r;
        for i in 0..8 {
            t[2 * i] = intrinsic!(_mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]));
            t[2 * i + 1] = intrinsic!(_mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]));
        }
        for i in (0..16).step_by(4) {
            let d = intrinsic!([
                _mm512_castps_pd(t[i]),
                _mm512_castps_pd(t[i + 1]),
                _mm512_castps_pd(t[i + 2]),
                _mm512_castps_pd(t[i + 3]),
            ]);
            r[i] = intrinsic!(_mm512_castpd_ps(_mm512_unpacklo_pd(d[0], d[2])));
            r[i + 1] = intrinsic!(_mm512_castpd_ps(_mm512_unpackhi_pd(d[0], d[2])));
            r[i + 2] = intrinsic!(_mm512_castpd_ps(_mm512_unpacklo_pd(d[1], d[3])));
            r[i + 3] = intrinsic!(_mm512_castpd_ps(_mm512_unpackhi_pd(d[1], d[3])));
        }
        for i in 0..4 {
            t[i] = intrinsic!(_mm512_shuffle_f32x4::<0x88>(r[i], r[4 + i]));
            t[4 + i] = intrinsic!(_mm512_shuffle_f32x4::<0xdd>(r[i], r[4 + i]));
            t[8 + i] = intrinsic!(_mm512_shuffle_f32x4::<0x88>(r[8 + i], r[12 + i]));
            t[12 + i] = intrinsic!(_mm512_shuffle_f32x4::<0xdd>(r[8 + i], r[12 + i]));
        }
        for i in 0..4 {
            r[i] = intrinsic!(_mm512_shuffle_f32x4::<0x88>(t[i], t[8 + i]));
            r[8 + i] = intrinsic!(_mm512_shuffle_f32x4::<0xdd>(t[i], t[8 + i]));
            r[4 + i] = intrinsic!(_mm512_shuffle_f32x4::<0x88>(t[4 + i], t[12 + i]));
            r[12 + i] = intrinsic!(_mm512_shuffle_f32x4::<0xdd>(t[4 + i], t[12 + i]));
        }
    }
    /// Each step adds the halves of two vectors and keeps both results in one: 30 shuffles, where a transposed block takes 64.
    #[inline(always)]
    fn sums(self, r: [__m512; 16]) -> __m512 {
        let (mut a, mut b, mut c) = ([r[0]; 8], [r[0]; 4], [r[0]; 2]);
        // Of the 16 lanes of vectors i and i + 4, 8 each.
        for i in 0..8 {
            let (x, y) = (r[i / 4 * 8 + i % 4], r[i / 4 * 8 + i % 4 + 4]);
            a[i] = intrinsic!(_mm512_add_ps(
                _mm512_shuffle_f32x4::<0x44>(x, y),
                _mm512_shuffle_f32x4::<0xee>(x, y)
            ));
        }
        // A quarter of the lanes for each of i, i + 4, i + 8, i + 12.
        for i in 0..4 {
            b[i] = intrinsic!(_mm512_add_ps(
                _mm512_shuffle_f32x4::<0x88>(a[i], a[i + 4]),
                _mm512_shuffle_f32x4::<0xdd>(a[i], a[i + 4])
            ));
        }
        // Within quarters, two lanes each.
        for i in 0..2 {
            let (x, y) = intrinsic!((_mm512_castps_pd(b[2 * i]), _mm512_castps_pd(b[2 * i + 1])));
            c[i] = intrinsic!(_mm512_add_ps(
                _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                _mm512_castpd_ps(_mm512_unpackhi_pd(x, y))
            ));
        }
        intrinsic!(_mm512_add_ps(
            _mm512_shuffle_ps::<0x88>(c[0], c[1]),
            _mm512_shuffle_ps::<0xdd>(c[0], c[1])
        ))
    }
}
