//! What the arithmetic is done in: `f32` and `f64`.

#[cfg(target_arch = "x86_64")]
use super::Amx;
use super::{Any, Element, Family, Isa, Task, Visitor};
use half::{bf16, f16};
use num_traits::Float;
use std::fmt::Display;

/// A number the kernels compute in: `f32` (also for narrower storage) or `f64`.
pub trait Number: Float + Element<Num = Self> + Default + Display + std::iter::Sum {
    /// `2^f - 1 = f * (c0 + c1 f + ...)` for `f` in `[-1/2, 1/2]`, lowest order first.
    #[doc(hidden)]
    const EXP2: &'static [Self];
    /// `tanh x = x + x z (c0 + c1 z + ...)` with `z = x^2`, for `|x|` up to `TANH_SMALL`, lowest order first.
    #[doc(hidden)]
    const TANH: &'static [Self];
    #[doc(hidden)]
    const TANH_SMALL: f64;

    /// `2^-POWERS * 2^-POWERS` is 0 and `2^POWERS` is normal.
    #[doc(hidden)]
    const POWERS: f64;

    /// Rounds an `f64` to this type.
    fn from_f64(x: f64) -> Self;
    /// Widens to `f64`, exactly.
    fn to_f64(self) -> f64;
    #[doc(hidden)]
    fn of_len(n: usize) -> Self {
        Self::from_f64(n as f64)
    }
    /// `log2` of a non-negative number, written so that a loop over it vectorises.
    #[doc(hidden)]
    fn log2_of_sum(self) -> Self;
    /// `2^self` for a whole number whose power is normal, by its exponent field; NaN stays NaN.
    #[doc(hidden)]
    fn whole_power_of_two(self) -> Self;
    /// Runs `task` with the instructions of `isa`. Never inlined, so that one compiled elsewhere can serve (`compiled.rs`).
    #[doc(hidden)]
    fn enter<T: Task<Self>>(isa: Isa, task: T) -> T::Out;
    /// Runs a kernel on AMX tiles, if `isa` has some and they compute in this type; else gives the task back.
    #[doc(hidden)]
    fn on_amx<K: AmxKernel>(isa: Isa, task: K::Task<Self>) -> Result<K::Out, K::Task<Self>>;
    /// Whether what is stored in 8 bits is computed in this type: code for it is compiled for no other one.
    #[doc(hidden)]
    const OF_CODES: bool;
    /// Finds out what type of element a container holds.
    #[doc(hidden)]
    fn visit<F: Family, V: Visitor<F, Self>>(any: Any<F, Self>, visitor: V) -> V::Out;
}

/// A kernel on AMX tiles, whose products are sums in `f32`.
pub trait AmxKernel {
    /// What it runs.
    type Task<N: Number>;
    /// What it returns.
    type Out;
    /// The work.
    #[cfg(target_arch = "x86_64")]
    fn run(amx: Amx, task: Self::Task<f32>) -> Self::Out;
}

impl Number for f32 {
    // Minimax for relative error (2.0e-9) with the constant term fixed at 1, so that 2^0 is exactly 1.
    const EXP2: &'static [Self] = &[
        std::f32::consts::LN_2,
        0.240_226_48,
        0.055_503_324,
        0.009_618_437,
        0.001_339_887_4,
        0.000_153_533_63,
    ];
    // Minimax (4.1e-9 relative).
    const TANH: &'static [Self] =
        &[-0.333_332_84, 0.133_314_91, -0.053_743_497, 0.020_650_588, -0.005_717_045];
    const TANH_SMALL: f64 = 0.625;
    const OF_CODES: bool = true;
    const POWERS: f64 = 126.0;

    #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is the purpose")]
    fn from_f64(x: f64) -> Self {
        x as Self
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    /// Mantissa in `[sqrt(1/2), sqrt(2))`, then `log2 m = 2/ln2 * atanh((m-1)/(m+1))` by its series: the first term
    /// left out is below 3e-9.
    #[inline(always)]
    fn log2_of_sum(self) -> Self {
        const SQRT_HALF: u32 = 0x3f35_04f3;
        let e = (self.to_bits().wrapping_sub(SQRT_HALF) as i32) >> 23;
        let m = Self::from_bits(self.to_bits().wrapping_sub((e << 23) as u32));
        let s = (m - 1.0) / (m + 1.0);
        let z = s * s;
        let series = 1.0 + z * (1.0 / 3.0 + z * (0.2 + z * (1.0 / 7.0 + z * (1.0 / 9.0))));
        let y = e as Self + s * (2.0 * std::f32::consts::LOG2_E) * series;
        if self == 0.0 {
            Self::NEG_INFINITY
        } else if self < Self::INFINITY {
            y
        } else {
            self
        }
    }
    #[expect(clippy::cast_possible_truncation, reason = "a whole number within +-POWERS")]
    #[inline(always)]
    fn whole_power_of_two(self) -> Self {
        let power = Self::from_bits(((self as i32 + 127) as u32) << 23);
        if self.is_nan() { self } else { power }
    }
    #[inline(never)]
    fn enter<T: Task<Self>>(isa: Isa, task: T) -> T::Out {
        isa.run_f32(task)
    }
    fn on_amx<K: AmxKernel>(isa: Isa, task: K::Task<Self>) -> Result<K::Out, K::Task<Self>> {
        #[cfg(target_arch = "x86_64")]
        if let Isa::Amx(amx) = isa {
            return Ok(K::run(amx, task));
        }
        let _ = isa;
        Err(task)
    }
    #[inline(always)]
    fn visit<F: Family, V: Visitor<F, Self>>(any: Any<F, Self>, visitor: V) -> V::Out {
        match any {
            Any::Own(x) => visitor.visit::<Self>(x),
            Any::F16(x) => visitor.visit::<f16>(x),
            Any::Bf16(x) => visitor.visit::<bf16>(x),
        }
    }
}

impl Number for f64 {
    // Taylor of 2^f about 0 in powers of ln 2; the remainder at 1/2 is below 1e-17.
    const EXP2: &'static [Self] = &[
        std::f64::consts::LN_2,
        0.240_226_506_959_100_72,
        0.055_504_108_664_821_58,
        0.009_618_129_107_628_477,
        0.001_333_355_814_642_844_4,
        0.000_154_035_303_933_816_1,
        1.525_273_380_405_984_e-5,
        1.321_548_679_014_431e-6,
        1.017_808_600_923_969_9e-7,
        7.054_911_620_801_123e-9,
        4.445_538_271_870_811_5e-10,
        2.567_843_599_348_820_5e-11,
        1.369_148_885_390_412_9e-12,
    ];
    // Taylor of tanh; the remainder at 1/4 is below 2e-17.
    const TANH: &'static [Self] = &[
        -0.333_333_333_333_333_3,
        0.133_333_333_333_333_33,
        -0.053_968_253_968_253_97,
        0.021_869_488_536_155_203,
        -0.008_863_235_529_902_197,
        0.003_592_128_036_572_481,
        -0.001_455_834_387_051_318_2,
        0.000_590_027_440_945_586,
        -0.000_239_129_114_243_552_5,
    ];
    const TANH_SMALL: Self = 0.25;
    const OF_CODES: bool = false;
    const POWERS: Self = 1022.0;

    fn from_f64(x: f64) -> Self {
        x
    }
    fn to_f64(self) -> f64 {
        self
    }
    fn log2_of_sum(self) -> Self {
        self.log2()
    }
    #[expect(clippy::cast_possible_truncation, reason = "a whole number within +-POWERS")]
    #[inline(always)]
    fn whole_power_of_two(self) -> Self {
        let power = Self::from_bits(((self as i64 + 1023) as u64) << 52);
        if self.is_nan() { self } else { power }
    }
    #[inline(never)]
    fn enter<T: Task<Self>>(isa: Isa, task: T) -> T::Out {
        isa.run_f64(task)
    }
    fn on_amx<K: AmxKernel>(_: Isa, task: K::Task<Self>) -> Result<K::Out, K::Task<Self>> {
        Err(task)
    }
    #[inline(always)]
    fn visit<F: Family, V: Visitor<F, Self>>(any: Any<F, Self>, visitor: V) -> V::Out {
        match any {
            Any::Own(x) => visitor.visit::<Self>(x),
            Any::F16(_) | Any::Bf16(_) => unreachable!("narrow types are computed in f32"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log2_of_a_sum_is_within_two_ulp() {
        for i in 0..2_000_000u32 {
            let x = f32::from_bits(0x0080_0000 + i * 1063);
            if !x.is_finite() {
                break;
            }
            let (y, exact) = (x.log2_of_sum(), f64::from(x).log2());
            let ulp = f64::from(f32::EPSILON) * exact.abs();
            assert!((f64::from(y) - exact).abs() <= 2.0 * ulp, "{x}: {y} {exact}");
        }
        assert_eq!(0f32.log2_of_sum(), f32::NEG_INFINITY);
        assert_eq!(f32::INFINITY.log2_of_sum(), f32::INFINITY);
        assert!(f32::NAN.log2_of_sum().is_nan());
    }
}
