//! The operations of kernels on AVX2 and AVX-512.
//!
//! A method is a few intrinsics, inlined into a function that is compiled with the instructions ([`Avx512::run`]).

use crate::amx;
use crate::memory::{Block, Line, TILE};
use crate::simd::{Simd, Task};
use std::arch::x86_64::*;

/// A processor with AVX-512 F, BW, VL and VNNI; if `TILES`, with AMX-INT8 and AMX-BF16 as well.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512<const TILES: bool>(());

impl<const TILES: bool> Avx512<TILES> {
    pub(crate) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && (!TILES || amx::is_allowed()))
        .then_some(Self(()))
    }

    pub(crate) fn run<T: Task>(self, task: T) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
        fn enter<T: Task, const TILES: bool>(simd: Avx512<TILES>, task: T) {
            task.run(simd);
        }
        // Released when the task ends: other code on this thread may use tiles of other shapes.
        let _tiles = TILES.then(|| amx::Configured::new(shapes(&task)));
        // SAFETY: `new` found the instructions.
        unsafe { enter(self, task) }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "at most 16")]
fn shapes<T: Task>(task: &T) -> amx::Shapes {
    let rows = |rows: usize| amx::Shapes::Terms(rows.min(TILE) as u8);
    task.term_rows().map_or(amx::Shapes::Integers, rows)
}

/// A processor with AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn new() -> Option<Self> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }

    pub(crate) fn run<T: Task>(self, task: T) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn enter<T: Task>(simd: Avx2, task: T) {
            task.run(simd);
        }
        // SAFETY: `new` found the instructions.
        unsafe { enter(self, task) }
    }
}

/// Methods of a [`Simd`]. The bodies are intrinsics of the processor that `self` proves, and of loads and stores of references.
macro_rules! methods {
    ($($name:ident($($arg:ident: $type:ty),*) -> $out:ty { $($body:tt)* })*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $type),*) -> $out {
            // SAFETY: `self` proves the instructions. Pointers that are loaded from or stored to come from references to as
            // many bytes, and the accesses need no alignment, or are to lines. Tiles are configured while `run` runs, from which
            // alone tasks get their `self`.
            unsafe { $($body)* }
        }
    )*};
}

impl<const TILES: bool> Simd for Avx512<TILES> {
    type Ints = __m512i;
    type Floats = __m512;
    const ROWS: usize = 8;
    const TILES: bool = TILES;

    methods! {
        line(line: &Line) -> __m512i { _mm512_load_si512((&raw const line.0).cast()) }
        ints(x: i32) -> __m512i { _mm512_set1_epi32(x) }
        floats(x: f32) -> __m512 { _mm512_set1_ps(x) }
        field(x: __m512i, right: i32, mask: u8) -> __m512i {
            let moved = if right < 0 {
                _mm512_sllv_epi32(x, _mm512_set1_epi32(-right))
            } else {
                _mm512_srlv_epi32(x, _mm512_set1_epi32(right))
            };
            _mm512_and_si512(moved, _mm512_set1_epi8(mask.cast_signed()))
        }
        or(a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        nibble(x: __m512i, right: i32) -> __m512i {
            _mm512_and_si512(_mm512_srlv_epi32(x, _mm512_set1_epi32(right)), _mm512_set1_epi32(15))
        }
        dot(sum: __m512i, w: __m512i, x: i32, _wide: bool) -> __m512i {
            _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(x))
        }
        convert(x: __m512i) -> __m512 { _mm512_cvtepi32_ps(x) }
        mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        mul_add(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        mul_sub(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fnmadd_ps(a, b, c) }
        bytes(x: &[u8; 16]) -> __m512i { _mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast())) }
        f16(x: &[u8; 32]) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
        bf16(x: &Line) -> [__m512; 2] {
            let pairs = _mm512_load_si512((&raw const x.0).cast());
            let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(UPPER));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(odd)]
        }
        prefetch(line: &Line) -> () { _mm_prefetch::<_MM_HINT_T0>((&raw const line.0).cast()) }
        apart(x: &[f32; 32]) -> [__m512; 2] {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            let (a, b) = (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x[16..].as_ptr()));
            [_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b)]
        }
        f32(x: &Line) -> __m512 { _mm512_load_ps((&raw const x.0).cast()) }
        array(x: __m512) -> [f32; 16] {
            let mut out = [0.0; 16];
            _mm512_storeu_ps(out.as_mut_ptr(), x);
            out
        }
        store(x: __m512i, to: &mut Line) -> () { _mm512_store_si512((&raw mut to.0).cast(), x) }
        lower(x: __m512i, by: i32) -> __m512i {
            if by == 0 { x } else { _mm512_sub_epi8(x, _mm512_set1_epi8(by.to_le_bytes()[0].cast_signed())) }
        }
        store_f32(x: __m512, to: &mut Line) -> () { _mm512_store_ps((&raw mut to.0).cast(), x) }
        products(x: &[Block; 16], codes: &[Line], i: usize, to: &mut [Line; 16]) -> () {
            if TILES {
                // Within `run`, which has configured the tiles.
                amx::products(x, codes, i, to);
            }
        }
    }

    #[inline(always)]
    fn terms<const N: usize>(self, mut x: [__m512; 2]) -> [__m512i; N] {
        // SAFETY: `self` proves the instructions, which access no memory.
        unsafe {
            let upper = _mm512_set1_epi32(UPPER);
            let mut terms = [_mm512_setzero_si512(); N];
            for (i, to) in terms.iter_mut().enumerate() {
                let mut pair = [_mm512_castps_si512(x[0]), _mm512_castps_si512(x[1])];
                // To the nearest, ties away from 0: of truncated terms, the products that are left out would all have the sign
                // of the whole. The last term has no bits to round, and keeps a NaN, which rounding may overflow.
                if i + 1 < N {
                    for j in 0..2 {
                        pair[j] = _mm512_add_epi32(pair[j], _mm512_set1_epi32(0x8000));
                        let term = _mm512_and_si512(pair[j], upper);
                        x[j] = _mm512_sub_ps(x[j], _mm512_castsi512_ps(term));
                    }
                }
                let even = _mm512_srli_epi32::<16>(pair[0]);
                *to = _mm512_mask_blend_epi16(0xaaaa_aaaa, even, pair[1]);
            }
            terms
        }
    }

    #[inline(always)]
    fn term_products<const R: usize, const C: usize, const T: usize>(
        self,
        rows: usize,
        x: [&[Line]; R],
        w: [&[Line]; C],
        sums: &mut [[Line; TILE]],
        first: bool,
    ) {
        if TILES {
            // SAFETY: within `run`, which has configured the tiles, for as many rows as the task has said.
            unsafe { amx::term_products::<R, C, T>(rows, x, w, sums, first) };
        }
    }
}

/// The upper half of each lane.
const UPPER: i32 = !0xffff;

/// Half of a line, `i` 0 or 1.
#[inline(always)]
fn half<const N: usize, const M: usize>(x: &[u8; N], i: usize) -> &[u8; M] {
    x.as_chunks::<M>().0.get(i).unwrap_or(&[0; M])
}

/// Both halves of 16 lanes.
macro_rules! both {
    (|$i:ident| $body:expr) => {
        [
            {
                let $i = 0;
                $body
            },
            {
                let $i = 1;
                $body
            },
        ]
    };
}

impl Simd for Avx2 {
    type Ints = [__m256i; 2];
    type Floats = [__m256; 2];
    const ROWS: usize = 2;

    methods! {
        line(line: &Line) -> [__m256i; 2] {
            both!(|i| _mm256_loadu_si256(half::<64, 32>(&line.0, i).as_ptr().cast()))
        }
        ints(x: i32) -> [__m256i; 2] { [_mm256_set1_epi32(x); 2] }
        floats(x: f32) -> [__m256; 2] { [_mm256_set1_ps(x); 2] }
        field(x: [__m256i; 2], right: i32, mask: u8) -> [__m256i; 2] {
            let mask = _mm256_set1_epi8(mask.cast_signed());
            both!(|i| _mm256_and_si256(mask, if right < 0 {
                _mm256_sllv_epi32(x[i], _mm256_set1_epi32(-right))
            } else {
                _mm256_srlv_epi32(x[i], _mm256_set1_epi32(right))
            }))
        }
        or(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] { both!(|i| _mm256_or_si256(a[i], b[i])) }
        nibble(x: [__m256i; 2], right: i32) -> [__m256i; 2] {
            both!(|i| _mm256_and_si256(_mm256_srlv_epi32(x[i], _mm256_set1_epi32(right)), _mm256_set1_epi32(15)))
        }
        dot(sum: [__m256i; 2], w: [__m256i; 2], x: i32, wide: bool) -> [__m256i; 2] {
            let x = _mm256_set1_epi32(x);
            if wide {
                // Products of 8-bit codes do not fit in the 16 bits that `maddubs` saturates at.
                let low = _mm256_set1_epi16(255);
                let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x));
                let odd = _mm256_srai_epi16::<8>(x);
                both!(|i| {
                    let even = _mm256_madd_epi16(_mm256_and_si256(w[i], low), even);
                    let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(w[i]), odd);
                    _mm256_add_epi32(sum[i], _mm256_add_epi32(even, odd))
                })
            } else {
                // At most 2 * 63 * 127 = 16002 in 16 bits.
                let ones = _mm256_set1_epi16(1);
                both!(|i| _mm256_add_epi32(sum[i], _mm256_madd_epi16(_mm256_maddubs_epi16(w[i], x), ones)))
            }
        }
        convert(x: [__m256i; 2]) -> [__m256; 2] { both!(|i| _mm256_cvtepi32_ps(x[i])) }
        mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] { both!(|i| _mm256_mul_ps(a[i], b[i])) }
        add(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] { both!(|i| _mm256_add_ps(a[i], b[i])) }
        mul_add(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
            both!(|i| _mm256_fmadd_ps(a[i], b[i], c[i]))
        }
        mul_sub(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
            both!(|i| _mm256_fnmadd_ps(a[i], b[i], c[i]))
        }
        bytes(x: &[u8; 16]) -> [__m256i; 2] {
            both!(|i| _mm256_cvtepi8_epi32(_mm_loadl_epi64(half::<16, 8>(x, i).as_ptr().cast())))
        }
        f16(x: &[u8; 32]) -> [__m256; 2] {
            both!(|i| _mm256_cvtph_ps(_mm_loadu_si128(half::<32, 16>(x, i).as_ptr().cast())))
        }
        bf16(x: &Line) -> [[__m256; 2]; 2] {
            let pairs = both!(|i| _mm256_loadu_si256(half::<64, 32>(&x.0, i).as_ptr().cast()));
            let odd = _mm256_set1_epi32(UPPER);
            [
                both!(|i| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs[i]))),
                both!(|i| _mm256_castsi256_ps(_mm256_and_si256(pairs[i], odd))),
            ]
        }
        f32(x: &Line) -> [__m256; 2] { both!(|i| _mm256_loadu_ps(half::<64, 32>(&x.0, i).as_ptr().cast())) }
        array(x: [__m256; 2]) -> [f32; 16] {
            let mut out = [0.0; 16];
            for (out, x) in out.chunks_exact_mut(8).zip(x) {
                _mm256_storeu_ps(out.as_mut_ptr(), x);
            }
            out
        }
        store(x: [__m256i; 2], to: &mut Line) -> () {
            for (to, x) in to.0.chunks_exact_mut(32).zip(x) {
                _mm256_storeu_si256(to.as_mut_ptr().cast(), x);
            }
        }
        store_f32(x: [__m256; 2], to: &mut Line) -> () {
            for (to, x) in to.0.chunks_exact_mut(32).zip(x) {
                _mm256_storeu_ps(to.as_mut_ptr().cast(), x);
            }
        }
        lower(x: [__m256i; 2], by: i32) -> [__m256i; 2] {
            both!(|i| _mm256_sub_epi8(x[i], _mm256_set1_epi8(by.to_le_bytes()[0].cast_signed())))
        }
    }
}
