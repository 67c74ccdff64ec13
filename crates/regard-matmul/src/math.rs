//! Functions of one number as plain arithmetic, so that loops over them become vectors. libm's are calls, one number each.

/// Runs a piece of work compiled for the best instructions of this machine. All that it calls must be `#[inline(always)]`, which
/// closures cannot be: what is not inlined is compiled for the least of machines, where a fused multiply-add is a call.
#[inline(always)]
pub fn vectorized<W: pulp::NullaryFnOnce>(work: W) -> W::Output {
    pulp::Arch::new().dispatch(work)
}

/// `e^x` within 2 units in the last place; 0 below -87.3, where the result has no normal number, and large above 88.3.
#[must_use]
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // To the nearest whole number: what is added leaves no bits for a fraction.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.336_54, 88.376_26);
    let n = clamped.mul_add(std::f32::consts::LOG2_E, ROUND) - ROUND;
    // ln 2 in two parts, the first of which makes an exact product with n.
    let r = n.mul_add(-0.693_359_4, clamped);
    let r = n.mul_add(2.121_944_4e-4, r);
    // Cephes' polynomial for e^r - 1 - r.
    let p = 1.987_569_2e-4f32;
    let p = p.mul_add(r, 1.398_2e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 0.166_666_65);
    let p = p.mul_add(r, 0.5);
    let p = (p * r).mul_add(r, r) + 1.0;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "-126 to 127")]
    let power = f32::from_bits(((n as i32 + 127) as u32) << 23);
    if x < -87.336_54 { 0.0 } else { p * power }
}

/// `1 / (1 + e^-x)`
#[must_use]
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The hyperbolic tangent within `3e-7`: a quotient of polynomials on [-7.9, 7.9], where it has become 1 in f32.
#[must_use]
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let x = x.clamp(-7.905_311, 7.905_311);
    let s = x * x;
    let p = -2.760_768_5e-16f32;
    let p = p.mul_add(s, 2.000_188e-13);
    let p = p.mul_add(s, -8.604_672e-11);
    let p = p.mul_add(s, 5.122_297e-8);
    let p = p.mul_add(s, 1.485_722_4e-5);
    let p = p.mul_add(s, 6.372_619e-4);
    let p = p.mul_add(s, 4.893_525e-3);
    let q = 1.198_258_4e-6f32;
    let q = q.mul_add(s, 1.185_347_1e-4);
    let q = q.mul_add(s, 2.268_434_6e-3);
    let q = q.mul_add(s, 4.893_525e-3);
    x * p / q
}

/// The error function within `4e-7`: a quotient of polynomials on [-4, 4], where it has become 1 in f32.
#[must_use]
#[inline(always)]
pub fn erf(x: f32) -> f32 {
    let x = x.clamp(-4.0, 4.0);
    let s = x * x;
    let p = -2.726_142_3e-10f32;
    let p = p.mul_add(s, 2.770_681_4e-8);
    let p = p.mul_add(s, -2.101_024e-6);
    let p = p.mul_add(s, -5.692_506_4e-5);
    let p = p.mul_add(s, -7.349_906_3e-4);
    let p = p.mul_add(s, -2.954_6e-3);
    let p = p.mul_add(s, -1.609_603_3e-2);
    let q = -1.456_607_2e-5f32;
    let q = q.mul_add(s, -2.133_740_6e-4);
    let q = q.mul_add(s, -1.682_827e-3);
    let q = q.mul_add(s, -7.373_329e-3);
    let q = q.mul_add(s, -1.426_473_9e-2);
    x * p / q
}

/// Numbers that are summed side by side, one lane each, and at last together: an order that does not depend on the machine.
pub const LANES: usize = 16;

/// All lanes together, half by half: in sequence each sum would wait for the one before.
#[must_use]
#[inline(always)]
pub fn total(mut lanes: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

/// The sum of a function of each number of some lists of equal length.
#[macro_export]
macro_rules! sum {
    ($($x:ident in $list:expr),+ => $of:expr) => {{
        let mut lanes = [0.0f32; $crate::math::LANES];
        $(let $x: &[f32] = $list;)+
        let n = [$($x.len()),+].into_iter().min().unwrap_or(0);
        let mut start = 0;
        while start + $crate::math::LANES <= n {
            $(let $x = &$x[start..start + $crate::math::LANES];)+
            for lane in 0..$crate::math::LANES {
                $(let $x = $x[lane];)+
                lanes[lane] += $of;
            }
            start += $crate::math::LANES;
        }
        let mut last = 0.0;
        for at in start..n {
            $(let $x = $x[at];)+
            last += $of;
        }
        $crate::math::total(lanes) + last
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By its series: alternating, so summed in f64 up to where its terms vanish.
    fn erf_f64(x: f64) -> f64 {
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            let n = f64::from(n);
            term *= -x * x / n;
            sum += term / (2.0 * n + 1.0);
        }
        sum * 2.0 / std::f64::consts::PI.sqrt()
    }

    #[test]
    fn exp_is_right_to_two_units() {
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            let (found, right) = (f64::from(exp(x)), f64::from(x).exp());
            assert!(
                (found - right).abs() <= 2.0 * right * f64::from(f32::EPSILON),
                "{x}: {found} {right}"
            );
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_right_to_3e_7() {
        for i in -100_000..100_000 {
            let x = i as f32 * 1e-4;
            let (found, right) = (f64::from(tanh(x)), f64::from(x).tanh());
            assert!((found - right).abs() <= 3e-7, "{x}: {found} {right}");
        }
        for x in [1e-3f32, 1e-5, 1e-20] {
            assert!((tanh(x) / x - 1.0).abs() < 1e-6, "{x}: {}", tanh(x));
        }
        assert!(tanh(f32::NAN).is_nan());
    }

    #[test]
    fn erf_is_right_to_4e_7() {
        for i in -40_000..40_000 {
            let x = i as f32 * 1e-4;
            let (found, right) = (f64::from(erf(x)), erf_f64(f64::from(x)));
            assert!((found - right).abs() <= 4e-7, "{x}: {found} {right}");
        }
        assert!((erf(9.0) - 1.0).abs() < 1e-6);
    }
}
