//! Vector functions, one implementation for all instruction sets: the same operations, so the results are bitwise equal
//! wherever `fma` is fused.

use super::{MAX_LANES, Number, Simd, leaf};

/// `2^x`, exactly 1 at 0 and 0 at `-inf`. Error at most 3 ulp for `f32`.
#[inline(always)]
pub(crate) fn exp2<N: Number, S: Simd<N>>(s: S, x: S::V) -> S::V {
    let (power, e) = parts(s, x);
    s.scale(power, e)
}

leaf! {
    /// [`exp2`] of each number of a slice.
    pub(crate) fn exp2_each<'t, N>(s: S, x: &'t mut [N]) {
        let mut vectors = x.chunks_exact_mut(S::LANES);
        for x in &mut vectors {
            s.store(exp2(s, s.load(x)), x);
        }
        let (rest, mut last) = (vectors.into_remainder(), [N::zero(); MAX_LANES]);
        last[..rest.len()].copy_from_slice(rest);
        s.store(exp2(s, s.load(&last)), &mut last);
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// `2^x` for softmax weights: as [`exp2`], but 0 where negligible ([`Simd::scale_weight`]). Otherwise a sum over widely spread
/// scores would contain many denormal numbers, each of which costs a microcode assist.
#[inline(always)]
pub(crate) fn weight<N: Number, S: Simd<N>>(s: S, x: S::V) -> S::V {
    let (power, e) = parts(s, x);
    s.scale_weight(power, e)
}

/// Range reduction: `2^f` and `e` with `x = e + f`, `e` an integer and `|f| <= 1/2`.
#[inline(always)]
fn parts<N: Number, S: Simd<N>>(s: S, x: S::V) -> (S::V, S::V) {
    let f = s.remainder(x);
    let mut p = s.splat(N::EXP2[N::EXP2.len() - 1]);
    for c in N::EXP2.iter().rev().skip(1) {
        p = s.fma(p, f, s.splat(*c));
    }
    (s.fma(p, f, s.splat(N::one())), s.sub(x, f))
}

/// As [`weight`] with a relative error of 3e-6, for weights that are rounded to at most 16 significant bits (two bf16 terms).
#[inline(always)]
pub(crate) fn weight_coarse<S: Simd<f32>>(s: S, x: S::V) -> S::V {
    // Minimax polynomial for the relative error (2.8e-6), exactly 1 at 0.
    const C: [f32; 4] = [0.693_124_2, 0.240_241, 0.055_906_42, 0.009_582_85];
    let f = s.remainder(x);
    let mut p = s.splat(C[3]);
    for c in [C[2], C[1], C[0], 1.0] {
        p = s.fma(p, f, s.splat(c));
    }
    s.scale_weight(p, s.sub(x, f))
}

/// `tanh x`: a polynomial near 0, where `1 - 2 / (e^2x + 1)` would cancel.
#[inline(always)]
pub(crate) fn tanh<N: Number, S: Simd<N>>(s: S, x: S::V) -> S::V {
    let (zero, one) = (s.splat(N::zero()), s.splat(N::one()));
    let size = s.max(s.sub(zero, x), x);
    let z = s.mul(x, x);
    let mut p = s.splat(N::TANH[N::TANH.len() - 1]);
    for c in N::TANH.iter().rev().skip(1) {
        p = s.fma(p, z, s.splat(*c));
    }
    let near = s.fma(s.mul(p, z), x, x);
    // Beyond 40 tanh rounds to 1 in f64 too; the bound keeps e^2x finite.
    let bound = s.splat(N::from_f64(40.0));
    let bounded = s.select(s.less(bound, size), bound, size);
    let e = exp2(s, s.mul(bounded, s.splat(N::from_f64(2.0 * std::f64::consts::LOG2_E))));
    let far = s.sub(one, s.div(s.splat(N::from_f64(2.0)), s.add(e, one)));
    let far = s.select(s.less(x, zero), s.sub(zero, far), far);
    s.select(s.less(size, s.splat(N::from_f64(N::TANH_SMALL))), near, far)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::simd::{Isa, Task};

    /// Applies `f` to all numbers of a slice whose length is a multiple of the widest vector.
    struct Map<'a, N, F>(&'a mut [N], F);

    #[derive(Clone, Copy)]
    enum Function {
        Exp2,
        Weight,
        Tanh,
    }

    impl<N: Number> Task<N> for Map<'_, N, Function> {
        type Out = ();
        #[inline(always)]
        fn run<S: Simd<N>>(self, s: S) {
            for chunk in self.0.chunks_exact_mut(S::LANES) {
                let x = s.load(chunk);
                let y = match self.1 {
                    Function::Exp2 => exp2(s, x),
                    Function::Weight => weight(s, x),
                    Function::Tanh => tanh(s, x),
                };
                s.store(y, chunk);
            }
        }
    }

    /// The largest error over the floats `bits`, in ulp of the exact result. Asserts that all instruction sets with a fused
    /// multiply-add agree bitwise.
    fn worst_ulp(f: Function, exact: fn(f64) -> f64, bits: impl Iterator<Item = u32>) -> f64 {
        let mut worst = 0f64;
        let xs: Vec<f32> = bits.map(f32::from_bits).collect();
        for xs in xs.chunks(1 << 16) {
            let mut before: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                let mut ys = xs.to_vec();
                ys.resize(xs.len().next_multiple_of(16), 0.0);
                f32::enter(isa, Map(&mut ys, f));
                for (x, y) in xs.iter().zip(&ys) {
                    let want = exact(f64::from(*x));
                    if want.abs() < f64::from(f32::MIN_POSITIVE) {
                        assert!(f64::from(*y).abs() <= f64::from(f32::MIN_POSITIVE), "{x} {y}");
                        continue;
                    }
                    let exponent = want.abs().log2().floor();
                    let ulp = (exponent - 23.0).exp2();
                    worst = worst.max((f64::from(*y) - want).abs() / ulp);
                }
                if isa.is_fused() {
                    let ys: Vec<f32> = ys;
                    if let Some(before) = &before {
                        for (x, (a, b)) in xs.iter().zip(before.iter().zip(&ys)) {
                            assert_eq!(a.to_bits(), b.to_bits(), "{} differs at {x:e}", isa.name());
                        }
                    }
                    before = Some(ys);
                }
            }
        }
        worst
    }

    /// Every `step`-th float from `-0` down to `lowest`.
    fn negatives(lowest: f32, step: usize) -> impl Iterator<Item = u32> {
        (0x8000_0000..=lowest.to_bits()).step_by(step)
    }

    #[test]
    fn exp2_of_a_slice_of_any_length_is_that_of_its_numbers() {
        for isa in Isa::available() {
            for n in [0, 1, 15, 16, 17, 100] {
                let exact: Vec<f32> = (0..n).map(|i| (i as f32 / 8.0 - 3.0).exp2()).collect();
                let mut x: Vec<f32> = (0..n).map(|i| i as f32 / 8.0 - 3.0).collect();
                exp2_each(isa, &mut x);
                let close = |(x, y): (&f32, &f32)| (x - y).abs() <= 3.0 * f32::EPSILON * y;
                assert!(x.iter().zip(&exact).all(close), "{n} on {}: {x:?}", isa.name());
            }
        }
    }

    #[test]
    fn exp2_is_within_three_ulp() {
        let worst = worst_ulp(Function::Exp2, f64::exp2, negatives(-160.0, 997));
        println!("exp2: {worst:.3} ulp");
        assert!(worst <= 3.0);
    }

    #[test]
    #[ignore = "every float of the range: a minute in release"]
    fn exp2_is_within_three_ulp_for_every_float() {
        for part in 0..64 {
            let bits = (0x8000_0000u32 + part..=(-160f32).to_bits()).step_by(64);
            let worst = worst_ulp(Function::Exp2, f64::exp2, bits);
            println!("exp2, part {part}: {worst:.3} ulp");
            assert!(worst <= 3.0);
        }
    }

    #[test]
    fn exp2_keeps_its_special_values() {
        for isa in Isa::available() {
            let mut x = [f32::NEG_INFINITY; 16];
            (x[1], x[2], x[3], x[4]) = (0.0, -1e30, f32::NAN, -f32::MAX);
            f32::enter(isa, Map(&mut x, Function::Exp2));
            assert_eq!((x[0], x[1], x[2], x[4]), (0.0, 1.0, 0.0, 0.0), "{}", isa.name());
            assert!(x[3].is_nan(), "{}", isa.name());
        }
    }

    #[test]
    fn a_weight_is_its_power_or_nothing() {
        for isa in Isa::available() {
            let xs: Vec<f32> = (0..1600).map(|i| 20.0 - i as f32 * 0.1).collect();
            let [mut weights, mut powers] = [xs.clone(), xs.clone()];
            f32::enter(isa, Map(&mut weights, Function::Weight));
            f32::enter(isa, Map(&mut powers, Function::Exp2));
            for (x, (weight, power)) in xs.iter().zip(weights.iter().zip(&powers)) {
                let nothing = x.round_ties_even() < -64.0 && isa.is_fused();
                let expected = if nothing { 0.0 } else { *power };
                assert_eq!(weight.to_bits(), expected.to_bits(), "{} at {x}", isa.name());
            }
            let mut x = [f32::NEG_INFINITY; 16];
            (x[1], x[2], x[3], x[4]) = (0.0, 1e9, f32::NAN, -f32::MAX);
            f32::enter(isa, Map(&mut x, Function::Weight));
            assert_eq!((x[0], x[1], x[4]), (0.0, 1.0, 0.0), "{}", isa.name());
            assert!(x[2] > 1e30 && x[3].is_nan(), "{}", isa.name());
        }
    }

    #[test]
    fn tanh_is_within_two_ulp() {
        let both = negatives(-50.0, 997).flat_map(|b| [b, b & 0x7fff_ffff]);
        let worst = worst_ulp(Function::Tanh, f64::tanh, both);
        println!("tanh: {worst:.3} ulp");
        assert!(worst <= 2.0);
    }

    #[test]
    fn f64_functions_are_within_eight_ulp() {
        for isa in Isa::available() {
            for (f, exact) in
                [(Function::Exp2, f64::exp2 as fn(f64) -> f64), (Function::Tanh, f64::tanh)]
            {
                let xs: Vec<f64> = (0..40_000).map(|i| -f64::from(i) * 0.001).collect();
                let mut ys = xs.clone();
                f64::enter(isa, Map(&mut ys, f));
                for (x, y) in xs.iter().zip(&ys) {
                    let want = exact(*x);
                    assert!((y - want).abs() <= 8.0 * f64::EPSILON * want.abs(), "{x}: {y} {want}");
                }
            }
        }
    }
}
