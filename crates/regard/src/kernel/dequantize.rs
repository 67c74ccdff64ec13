//! Keys and values in 8 bits as numbers: how products read a vector of them.
//!
//! Cost: 3 instructions for a vector of int8, 9 for one of e4m3. Every number is exact, so that what is computed of it has the bits that
//! it has of a tensor of `f32`.

use crate::machine::simd::{Element, Isa, Number, Simd, Task, of_e4m3};
use crate::tensor::cache::{CodeRows, Quantization, QuantizedHead};
use crate::tensor::index::Keys;
use std::marker::PhantomData;

/// How rows are stored: as elements, or as codes with a scale for each row.
pub(crate) trait Format<N: Number>: Copy {
    /// What stands in memory for a number.
    type Code: Copy;
    /// Whether rows have scales; one that has none has 1.
    const SCALED: bool;

    /// The first vector of `src` as numbers.
    fn load<S: Simd<N>>(s: S, src: &[Self::Code], scale: S::V) -> S::V;
    /// The number of a code.
    fn number(code: Self::Code, scale: N) -> N;
}

/// Elements as they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain<E>(PhantomData<E>);
/// See [`Quantization::Int8`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Int8;
/// See [`Quantization::Fp8E4m3`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct E4m3;

impl<E: Element> Format<E::Num> for Plain<E> {
    type Code = E;
    const SCALED: bool = false;
    #[inline(always)]
    fn load<S: Simd<E::Num>>(s: S, src: &[E], _: S::V) -> S::V {
        E::load(s, src)
    }
    #[inline(always)]
    fn number(code: E, _: E::Num) -> E::Num {
        code.widen()
    }
}

impl<N: Number> Format<N> for Int8 {
    type Code = u8;
    const SCALED: bool = true;
    #[inline(always)]
    fn load<S: Simd<N>>(s: S, src: &[u8], scale: S::V) -> S::V {
        s.mul(s.load_i8(src), scale)
    }
    #[inline(always)]
    fn number(code: u8, scale: N) -> N {
        N::from_f64(code.cast_signed().into()) * scale
    }
}

impl<N: Number> Format<N> for E4m3 {
    type Code = u8;
    const SCALED: bool = false;
    #[inline(always)]
    fn load<S: Simd<N>>(s: S, src: &[u8], _: S::V) -> S::V {
        s.load_e4m3(src)
    }
    #[inline(always)]
    fn number(code: u8, _: N) -> N {
        N::from_f64(of_e4m3(code).into())
    }
}

/// The first `len` of some keys, or of their values, side by side.
pub(crate) fn dequantize<N: Number>(
    isa: Isa,
    head: QuantizedHead<'_>,
    (keys, len): (Keys<'_>, usize),
    to: &mut [N],
) {
    let mut rest = to;
    let mut key = 0;
    while key < len && head.dim > 0 {
        // Rows that lie one after another.
        let most = if matches!(keys, Keys::From(_)) { len - key } else { 1 };
        let rows = head.run(keys.get(key), most);
        let (to, after) = rest.split_at_mut(rows.codes.len * head.dim);
        if N::OF_CODES {
            N::enter(isa, Dequantize { rows, to });
        }
        (key, rest) = (key + rows.codes.len, after);
    }
}

struct Dequantize<'t, 'c, N> {
    rows: CodeRows<'c>,
    to: &'t mut [N],
}

impl<N: Number> Task<N> for Dequantize<'_, '_, N> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(self, s: S) {
        match self.rows.quantization {
            Quantization::Int8 => self.of::<S, Int8>(s),
            Quantization::Fp8E4m3 => self.of::<S, E4m3>(s),
        }
    }
}

impl<N: Number> Dequantize<'_, '_, N> {
    #[inline(always)]
    fn of<S: Simd<N>, F: Format<N, Code = u8>>(self, s: S) {
        let Self { rows: CodeRows { codes, scales, .. }, to } = self;
        for (row, to) in to.chunks_exact_mut(codes.dim).enumerate() {
            let (row, scale) = (codes.row(row), scale_of::<N, F>(scales, row));
            let whole = row.len() / S::LANES * S::LANES;
            for d in (0..whole).step_by(S::LANES) {
                s.store(F::load(s, &row[d..], s.splat(scale)), &mut to[d..]);
            }
            for (code, to) in row[whole..].iter().zip(&mut to[whole..]) {
                *to = F::number(*code, scale);
            }
        }
    }
}

/// The scale of a row.
#[inline(always)]
pub(crate) fn scale_of<N: Number, F: Format<N>>(scales: &[f32], row: usize) -> N {
    if F::SCALED { N::from_f64(scales[row].into()) } else { N::one() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::simd::MAX_LANES;

    /// Vectors of numbers, and the sums of the lanes of vectors.
    struct Read<'t>(&'t [u8; 256], &'t mut [[f32; 256]; 2]);

    impl Task<f32> for Read<'_> {
        type Out = Vec<[f32; 2]>;
        #[inline(always)]
        fn run<S: Simd<f32>>(self, s: S) -> Vec<[f32; 2]> {
            let scale = s.splat(0.375);
            for at in (0..256).step_by(S::LANES) {
                s.store(Int8::load(s, &self.0[at..], scale), &mut self.1[0][at..]);
                s.store(E4m3::load(s, &self.0[at..], scale), &mut self.1[1][at..]);
            }
            let (mut block, mut expected) = (s.block(), Vec::new());
            for (i, to) in block.as_mut().iter_mut().enumerate() {
                let mut lanes: Vec<f32> =
                    (0..S::LANES).map(|j| (17 * i + j) as f32 * 0.1).collect();
                *to = s.load(&lanes);
                while lanes.len() > 1 {
                    let upper = lanes.split_off(lanes.len() / 2);
                    lanes.iter_mut().zip(upper).for_each(|(x, y)| *x += y);
                }
                expected.push(lanes[0]);
            }
            let mut sums = [0.0; MAX_LANES];
            s.store(s.sums(block), &mut sums);
            sums.into_iter().zip(expected).map(|(sum, expected)| [sum, expected]).collect()
        }
    }

    #[test]
    fn every_code_is_the_same_number_in_a_vector_and_lanes_are_added_in_one_order() {
        let codes: [u8; 256] = std::array::from_fn(|i| i.to_le_bytes()[0]);
        for isa in Isa::available() {
            let mut found = [[0.0; 256]; 2];
            let sums = f32::enter(isa, Read(&codes, &mut found));
            for [sum, expected] in sums {
                assert_eq!(sum.to_bits(), expected.to_bits(), "{}", isa.name());
            }
            let same = |x: f32, y: f32| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
            for (i, code) in codes.into_iter().enumerate() {
                let int8 = Quantization::Int8.number(code, 0.375);
                assert!(same(found[0][i], int8), "{} {code}: {}", isa.name(), found[0][i]);
                let e4m3 = Quantization::Fp8E4m3.number(code, 1.0);
                assert!(same(found[1][i], e4m3), "{} {code}: {}", isa.name(), found[1][i]);
            }
        }
    }
}
