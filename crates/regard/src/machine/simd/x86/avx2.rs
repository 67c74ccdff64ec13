//! AVX2 with FMA: 8 `f32` lanes, 16 registers, lane masks in sign bits.

use super::super::element::E4M3_OF_F16;
use super::super::{Enter, NEGLIGIBLE, Number, Simd, Task};
use half::{bf16, f16};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Proof that this machine has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Avx2(());

impl Avx2 {
    /// The proof, if the features are available.
    #[must_use]
    pub fn detect() -> Option<Self> {
        let all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        all.then_some(Self(()))
    }
}

impl Enter for Avx2 {
    #[inline(always)]
    fn enter<N: Number, S: Simd<N>, T: Task<N>>(self, task: T, s: S) -> T::Out {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn inside<N: Number, S: Simd<N>, T: Task<N>>(task: T, s: S) -> T::Out {
            task.run(s)
        }
        // SAFETY: `self` exists, so `detect` has found these features.
        unsafe { inside(task, s) }
    }
}

/// Every intrinsic below needs only the features that `Avx2` proves; pointers come from slices whose length is asserted just
/// before.
macro_rules! intrinsic {
    ($e:expr) => {{
        // SAFETY: each method takes `self`, the proof of the features; the caller of the macro asserts the slice length.
        unsafe { $e }
    }};
}

impl Avx2 {
    /// `2^n` for integers `n` for which it is a normal number.
    #[inline(always)]
    fn power_of_two(self, n: __m256i) -> __m256 {
        intrinsic!(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(
            n,
            _mm256_set1_epi32(127)
        ))))
    }
}

impl Simd<f32> for Avx2 {
    type V = __m256;
    type M = __m256;
    type Block = [__m256; 8];
    const LANES: usize = 8;
    const WIDE: bool = false;

    #[inline(always)]
    fn call<T: Task<f32>>(self, task: T) -> T::Out {
        self.enter(task, self)
    }
    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        intrinsic!(_mm256_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, src: &[f32]) -> __m256 {
        assert!(src.len() >= 8);
        intrinsic!(_mm256_loadu_ps(src.as_ptr()))
    }
    #[inline(always)]
    fn store(self, v: __m256, dst: &mut [f32]) {
        assert!(dst.len() >= 8);
        intrinsic!(_mm256_storeu_ps(dst.as_mut_ptr(), v));
    }
    #[inline(always)]
    fn write(self, v: __m256, dst: &mut [MaybeUninit<f32>]) {
        assert!(dst.len() >= 8);
        intrinsic!(_mm256_storeu_ps(dst.as_mut_ptr().cast(), v));
    }
    #[inline(always)]
    fn load_f16(self, src: &[f16]) -> __m256 {
        assert!(src.len() >= 8);
        intrinsic!(_mm256_cvtph_ps(_mm_loadu_si128(src.as_ptr().cast())))
    }
    #[inline(always)]
    fn load_bf16(self, src: &[bf16]) -> __m256 {
        assert!(src.len() >= 8);
        intrinsic!({
            let x = _mm256_cvtepu16_epi32(_mm_loadu_si128(src.as_ptr().cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x))
        })
    }
    #[inline(always)]
    fn load_i8(self, src: &[u8]) -> __m256 {
        assert!(src.len() >= 8);
        intrinsic!({
            let codes = _mm_loadl_epi64(src.as_ptr().cast());
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes))
        })
    }
    /// By way of `f16`, whose denormal numbers cost nothing to widen.
    #[inline(always)]
    fn load_e4m3(self, src: &[u8]) -> __m256 {
        assert!(src.len() >= 8);
        intrinsic!({
            let codes = _mm_loadl_epi64(src.as_ptr().cast());
            let wide = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(codes));
            let fields = _mm_and_si128(wide, _mm_set1_epi16(0xbf80_u16.cast_signed()));
            let size = _mm_set1_epi16(0x3f80);
            let nan = _mm_cmpeq_epi16(_mm_and_si128(fields, size), size);
            // A NaN of `f16` where the code is one: a blend of the results would be moved behind each of their products.
            let fields = _mm_or_si128(fields, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
            _mm256_mul_ps(_mm256_cvtph_ps(fields), _mm256_set1_ps(E4M3_OF_F16))
        })
    }
    #[inline(always)]
    fn write_f16(self, v: __m256, dst: &mut [MaybeUninit<f16>]) {
        assert!(dst.len() >= 8);
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;
        intrinsic!(_mm_storeu_si128(dst.as_mut_ptr().cast(), _mm256_cvtps_ph::<NEAREST>(v)));
    }
    #[inline(always)]
    fn write_bf16(self, v: __m256, dst: &mut [MaybeUninit<bf16>]) {
        assert!(dst.len() >= 8);
        intrinsic!({
            let x = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(x), _mm256_set1_epi32(1));
            let even = _mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7fff)), odd);
            // Rounding must not turn a NaN into an infinity or a number.
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let quiet = _mm256_or_si256(x, _mm256_set1_epi32(0x40_0000));
            let x = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(even, quiet, nan));
            let x = _mm256_packus_epi32(x, x);
            let x = _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b1000>(x));
            _mm_storeu_si128(dst.as_mut_ptr().cast(), x);
        });
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        intrinsic!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        intrinsic!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        intrinsic!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        intrinsic!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        intrinsic!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        intrinsic!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn less(self, a: __m256, b: __m256) -> __m256 {
        intrinsic!(_mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    fn bits(self, m: __m256) -> u32 {
        intrinsic!(_mm256_movemask_ps(m)).cast_unsigned()
    }
    #[inline(always)]
    fn lanes(self, bits: u32) -> __m256 {
        intrinsic!({
            let each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = _mm256_and_si256(_mm256_set1_epi32(bits.cast_signed()), each);
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, each))
        })
    }
    #[inline(always)]
    fn select(self, m: __m256, yes: __m256, no: __m256) -> __m256 {
        intrinsic!(_mm256_blendv_ps(no, yes, m))
    }
    #[inline(always)]
    fn remainder(self, x: __m256) -> __m256 {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        // Constant first: `max` returns its second operand if either is NaN, so a NaN in `x` propagates.
        let x = self.max(self.splat(-4096.0), x);
        intrinsic!(_mm256_sub_ps(x, _mm256_round_ps::<NEAREST>(x)))
    }
    #[inline(always)]
    fn scale(self, x: __m256, e: __m256) -> __m256 {
        // `e` is split in two, so that each power of two is a normal number. A NaN in `e` implies a NaN in `x`.
        let e = self.max(self.splat(-252.0), e);
        intrinsic!({
            let n = _mm256_cvtps_epi32(_mm256_min_ps(e, _mm256_set1_ps(254.0)));
            let half = _mm256_srai_epi32::<1>(n);
            let rest = self.power_of_two(_mm256_sub_epi32(n, half));
            _mm256_mul_ps(_mm256_mul_ps(x, self.power_of_two(half)), rest)
        })
    }
    #[inline(always)]
    fn scale_weight(self, x: __m256, e: __m256) -> __m256 {
        intrinsic!({
            let lowest = _mm256_set1_ps(-NEGLIGIBLE);
            // Clamped, so that no product is denormal.
            let whole = _mm256_max_ps(_mm256_min_ps(e, _mm256_set1_ps(126.0)), lowest);
            let n = _mm256_cvtps_epi32(whole);
            let weight = _mm256_mul_ps(x, self.power_of_two(n));
            // "Not less than" is true for NaN, so a NaN propagates.
            _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(e, lowest), weight)
        })
    }
    #[inline(always)]
    fn block(self) -> [__m256; 8] {
        [self.splat(0.0); 8]
    }
    /// Interleaves floats, then pairs of floats, then 128-bit halves: 24 shuffles.
    #[inline(always)]
    fn transpose(self, r: &mut [__m256; 8]) {
        let mut t = *r;
        for i in 0..4 {
            t[2 * i] = intrinsic!(_mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]));
            t[2 * i + 1] = intrinsic!(_mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]));
        }
        for i in (0..8).step_by(4) {
            r[i] = intrinsic!(_mm256_shuffle_ps::<0x44>(t[i], t[i + 2]));
            r[i + 1] = intrinsic!(_mm256_shuffle_ps::<0xee>(t[i], t[i + 2]));
            r[i + 2] = intrinsic!(_mm256_shuffle_ps::<0x44>(t[i + 1], t[i + 3]));
            r[i + 3] = intrinsic!(_mm256_shuffle_ps::<0xee>(t[i + 1], t[i + 3]));
        }
        for i in 0..4 {
            t[i] = intrinsic!(_mm256_permute2f128_ps::<0x20>(r[i], r[4 + i]));
            t[4 + i] = intrinsic!(_mm256_permute2f128_ps::<0x31>(r[i], r[4 + i]));
        }
        *r = t;
    }
    /// Each step adds the halves of two vectors and keeps both results in one: 14 shuffles, where a transposed block takes 24.
    #[inline(always)]
    fn sums(self, r: [__m256; 8]) -> __m256 {
        let (mut a, mut b) = ([r[0]; 4], [r[0]; 2]);
        // Of the 8 lanes of vectors i and i + 4, 4 each.
        for i in 0..4 {
            a[i] = intrinsic!(_mm256_add_ps(
                _mm256_permute2f128_ps::<0x20>(r[i], r[i + 4]),
                _mm256_permute2f128_ps::<0x31>(r[i], r[i + 4])
            ));
        }
        // Within halves, two lanes each.
        for i in 0..2 {
            let (x, y) = (a[2 * i], a[2 * i + 1]);
            b[i] = intrinsic!(_mm256_add_ps(
                _mm256_shuffle_ps::<0x44>(x, y),
                _mm256_shuffle_ps::<0xee>(x, y)
            ));
        }
        intrinsic!(_mm256_add_ps(
            _mm256_shuffle_ps::<0x88>(b[0], b[1]),
            _mm256_shuffle_ps::<0xdd>(b[0], b[1])
        ))
    }
}
