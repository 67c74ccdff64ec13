//! What a tensor may hold: how a type widens to the number that arithmetic is done in, and narrows back.
//!
//! A dtype is one line of `element!`. Scores, softmax and sums are always held in the number, never in the stored type.

#[cfg(target_arch = "x86_64")]
use super::Amx;
use super::{Isa, Number, Simd};
use half::{bf16, f16};
use std::convert::identity;
use std::fmt::Debug;
use std::mem::MaybeUninit;

/// How exact the products are: what may be traded for speed, and what may not.
///
/// On a machine with tiles (AMX) products of `bf16` numbers are up to 16 times as fast as those of `f32`, and a number of
/// more significant bits can be split into several of them, its bf16 terms. Elsewhere all three mean the same. Whatever is chosen, results are the same
/// bits for any number of threads and any batch.
///
/// A number that is split must be finite: an infinite query or key has a score of NaN, where `Strict` has an infinite one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Precision {
    /// The arithmetic of `f32` (`f64` for `f64`) on every machine: the same bits wherever there is a fused multiply-add.
    /// The default for `f32` and `f64`.
    Strict,
    /// Whatever is at least as exact as evaluating the definition in the type of the tensors: `f32` in three bf16 terms, `f16` in
    /// two, `bf16` as it is. The default for `f16` and `bf16`.
    F32,
    /// `f32` in two bf16 terms of 8 bits each: about 16 significant bits, 20 times the error of `F32`, twice its speed. The same as `F32`
    /// for the other types.
    High,
}

impl Precision {
    /// Its name: `strict`, `f32`, `high`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::F32 => "f32",
            Self::High => "high",
        }
    }
}

/// A type that tensors are stored in: `f32`, `f64`, [`f16`](struct@f16) or [`bf16`]. Only this crate can make another one.
pub trait Element: Copy + Send + Sync + Debug + PartialEq + 'static {
    /// What arithmetic on this type is done in.
    type Num: Number;
    /// The name in plans, benchmarks and errors: `f32`, `bf16`, ...
    const NAME: &'static str;
    /// How exact products are unless a problem says otherwise.
    const PRECISION: Precision;
    /// Widens to the number.
    fn widen(self) -> Self::Num;
    /// Narrows from the number, rounding to nearest even.
    fn narrow(x: Self::Num) -> Self;
    /// The slice as numbers, when nothing needs to be widened.
    fn as_numbers(s: &[Self]) -> Option<&[Self::Num]>;
    /// The first vector of `src`, widened.
    #[doc(hidden)]
    fn load<S: Simd<Self::Num>>(s: S, src: &[Self]) -> S::V;
    /// Narrows a vector into the start of `dst`, rounding to nearest even.
    #[doc(hidden)]
    fn write<S: Simd<Self::Num>>(s: S, v: S::V, dst: &mut [MaybeUninit<Self>]);
    /// The bf16 terms that a number is split into for products on tiles, if the precision allows those.
    #[doc(hidden)]
    fn terms(precision: Precision) -> Option<usize>;
    /// Runs a task on tiles, if it belongs there and `isa` has some; else gives it back.
    #[doc(hidden)]
    fn on_amx<T: AmxTask<Stored = Self>>(isa: Isa, task: T) -> Result<T::Out, T>;
}

/// A task whose products may use AMX, for types that are computed in `f32`.
pub trait AmxTask: Sized {
    /// What its tensors are stored in.
    type Stored: Element;
    /// What it returns.
    type Out;
    /// The bf16 terms that each number is split into, if this is to use AMX.
    fn terms(&self) -> Option<usize>;
    /// The work.
    #[cfg(target_arch = "x86_64")]
    fn run_on_amx<const TERMS: usize>(self, amx: Amx) -> Self::Out
    where
        Self::Stored: Element<Num = f32>;
}

/// A type in memory, and how a vector of it is loaded and written; `tiles`: the bf16 terms it may be split into there, fewer for
/// less precision.
macro_rules! element {
    ($t:ty, $number:ty, $precision:ident, $widen:expr, $narrow:expr, $numbers:expr, $load:ident, $write:ident, tiles $terms:tt) => {
        impl Element for $t {
            type Num = $number;
            const NAME: &'static str = stringify!($t);
            const PRECISION: Precision = Precision::$precision;
            #[inline(always)]
            fn widen(self) -> $number {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(x: $number) -> Self {
                $narrow(x)
            }
            #[inline(always)]
            fn as_numbers(s: &[Self]) -> Option<&[$number]> {
                $numbers(s)
            }
            #[inline(always)]
            fn load<S: Simd<$number>>(s: S, src: &[Self]) -> S::V {
                s.$load(src)
            }
            #[inline(always)]
            fn write<S: Simd<$number>>(s: S, v: S::V, dst: &mut [MaybeUninit<Self>]) {
                s.$write(v, dst);
            }
            fn terms(precision: Precision) -> Option<usize> {
                const TERMS: &[usize] = &$terms;
                match precision {
                    Precision::Strict => None,
                    Precision::F32 => TERMS.last().copied(),
                    Precision::High => TERMS.first().copied(),
                }
            }
            #[inline(always)]
            fn on_amx<T: AmxTask<Stored = Self>>(isa: Isa, task: T) -> Result<T::Out, T> {
                on_amx!(isa, task, $terms)
            }
        }
    };
}

macro_rules! on_amx {
    ($isa:ident, $task:ident, [$($terms:literal),*]) => {{
        #[cfg(target_arch = "x86_64")]
        if let (Isa::Amx(_amx), Some(_terms)) = ($isa, $task.terms()) {
            $(if _terms == $terms {
                return Ok($task.run_on_amx::<$terms>(_amx));
            })*
        }
        let _ = $isa;
        Err($task)
    }};
}

element!(f32, f32, Strict, identity, identity, Some, load, write, tiles [2, 3]);
element!(f64, f64, Strict, identity, identity, Some, load, write, tiles []);
element!(f16, f32, F32, Self::to_f32, Self::from_f32, no_numbers, load_f16, write_f16, tiles[2]);
element!(bf16, f32, F32, Self::to_f32, Self::from_f32, no_numbers, load_bf16, write_bf16, tiles[1]);

fn no_numbers<E>(_: &[E]) -> Option<&[f32]> {
    None
}
