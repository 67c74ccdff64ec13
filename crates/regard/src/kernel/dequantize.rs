//! Keys and values in 8 bits as numbers.
//!
//! Cost: 3 instructions for a vector of int8, 6 for one of e4m3, and a store. What follows reads the numbers from the first cache, as it
//! would those of a tensor of `f32`: it has the same bits.

use crate::machine::simd::{self, Isa, MAX_LANES, Number, Simd, Task};
use crate::tensor::cache::{E4M3_OF_F16, Quantization, QuantizedHead, e4m3_in_f16, is_nan};
use crate::tensor::index::Keys;
use half::f16;
use std::ops::Range;

/// Some features of the first `len` of some keys, or of their values, side by side.
pub(crate) fn dequantize<N: Number>(
    isa: Isa,
    head: QuantizedHead<'_>,
    (keys, len): (Keys<'_>, usize),
    features: Range<usize>,
    to: &mut [N],
) {
    if let Some(to) = N::as_f32(to).filter(|_| !features.is_empty()) {
        f32::enter(isa, Dequantize { head, keys, len, features, to });
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Asks for rows of a head that are needed soon, as far as it has them.
pub(crate) fn prefetch_rows(head: QuantizedHead<'_>, rows: Range<usize>) {
    let (mut first, end) = (rows.start, rows.end.min(head.len));
    while first < end {
        let (codes, scales) = head.run(first, end - first);
        codes.chunks(LINE).for_each(|line| simd::prefetch_l2(line.as_ptr()));
        scales.chunks(LINE / 4).for_each(|line| simd::prefetch_l2(line.as_ptr()));
        first += codes.len().div_ceil(head.stride.max(1)).max(1);
    }
}

struct Dequantize<'t, 'c> {
    head: QuantizedHead<'c>,
    keys: Keys<'t>,
    len: usize,
    features: Range<usize>,
    to: &'t mut [f32],
}

impl Task<f32> for Dequantize<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, s: S) {
        let Self { head, keys, len, features, to } = self;
        let mut rows = to.chunks_exact_mut(features.len());
        let mut key = 0;
        while key < len {
            // Rows that lie one after another.
            let most = if matches!(keys, Keys::From(_)) { len - key } else { 1 };
            let (codes, scales) = head.run(keys.get(key), most);
            let codes = codes.chunks(head.stride);
            key += codes.len();
            match head.quantization {
                Quantization::Int8 => {
                    for ((codes, scale), to) in codes.zip(scales).zip(&mut rows) {
                        int8(&codes[features.clone()], *scale, to);
                    }
                }
                Quantization::Fp8E4m3 => {
                    for (codes, to) in codes.zip(&mut rows) {
                        e4m3(s, &codes[features.clone()], to);
                    }
                }
            }
        }
    }
}

/// A row of int8. The compiler vectorizes it: there is nothing to sum.
#[inline(always)]
fn int8(codes: &[u8], scale: f32, to: &mut [f32]) {
    for (code, to) in codes.iter().zip(to) {
        *to = f32::from(code.cast_signed()) * scale;
    }
}

/// A row of e4m3.
#[inline(always)]
fn e4m3<S: Simd<f32>>(s: S, codes: &[u8], to: &mut [f32]) {
    let factor = s.splat(E4M3_OF_F16);
    let whole = codes.len() / S::LANES * S::LANES;
    for d in (0..whole).step_by(S::LANES) {
        let mut in_f16 = [f16::ZERO; MAX_LANES];
        let codes = &codes[d..d + S::LANES];
        for (code, to) in codes.iter().zip(&mut in_f16) {
            *to = e4m3_in_f16(*code);
        }
        s.store(s.mul(s.load_f16(&in_f16), factor), &mut to[d..]);
    }
    for (code, to) in codes[whole..].iter().zip(&mut to[whole..]) {
        *to = Quantization::Fp8E4m3.number(*code, 1.0);
    }
    if codes.iter().fold(false, |any, code| any | is_nan(*code)) {
        let nan = codes.iter().zip(to).filter(|(code, _)| is_nan(**code));
        nan.for_each(|(_, to)| *to = f32::NAN);
    }
}
