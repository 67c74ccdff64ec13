//! What a tensor may hold: how a type widens to the number that arithmetic is done in, and narrows back.
//!
//! A dtype is one line of `element!`. Scores, softmax and sums are always held in the number, never in the stored type.

use super::{Number, Simd};
use half::{bf16, f16};
use std::convert::identity;
use std::fmt::Debug;
use std::mem::MaybeUninit;

/// Evaluates an expression for a container of any type of element; it must not depend on what that is computed in.
macro_rules! each {
    ($any:expr, $x:pat => $work:expr) => {
        each!($any, $crate::machine::simd::Any, $x => $work)
    };
    ($any:expr, $of:path, $x:pat => $work:expr) => {{
        use $of as Of;
        match $any {
            Of::Own($x) => $work,
            Of::F16($x) => $work,
            Of::Bf16($x) => $work,
        }
    }};
}
pub(crate) use each;

/// The same from one container to another with the same type of element.
macro_rules! map_any {
    ($any:expr, $x:pat => $work:expr) => {
        map_any!($any, $crate::machine::simd::Any => $crate::machine::simd::Any, $x => $work)
    };
    ($any:expr, $from:path => $to:path, $x:pat => $work:expr) => {{
        use {$from as From, $to as To};
        match $any {
            From::Own($x) => To::Own($work),
            From::F16($x) => To::F16($work),
            From::Bf16($x) => To::Bf16($work),
        }
    }};
}
pub(crate) use map_any;

/// An [`Any`] to be kept in a struct: unlike a family's containers, these may be borrowed for shorter.
macro_rules! covariant {
    ($(#[$doc:meta])* $name:ident, $family:ident, $of:ident) => {
        $(#[$doc])*
        pub enum $name<'a, N: $crate::machine::simd::Number> {
            #[doc(hidden)]
            Own($of<'a, N>),
            #[doc(hidden)]
            F16($of<'a, half::f16>),
            #[doc(hidden)]
            Bf16($of<'a, half::bf16>),
        }

        impl<'a, N: $crate::machine::simd::Number> From<$crate::machine::simd::Any<$family<'a>, N>> for $name<'a, N> {
            #[inline(always)]
            fn from(any: $crate::machine::simd::Any<$family<'a>, N>) -> Self {
                match any {
                    $crate::machine::simd::Any::Own(x) => Self::Own(x),
                    $crate::machine::simd::Any::F16(x) => Self::F16(x),
                    $crate::machine::simd::Any::Bf16(x) => Self::Bf16(x),
                }
            }
        }

        impl<'a, N: $crate::machine::simd::Number> From<$name<'a, N>> for $crate::machine::simd::Any<$family<'a>, N> {
            #[inline(always)]
            fn from(x: $name<'a, N>) -> Self {
                match x {
                    $name::Own(x) => Self::Own(x),
                    $name::F16(x) => Self::F16(x),
                    $name::Bf16(x) => Self::Bf16(x),
                }
            }
        }
    };
}
pub(crate) use covariant;

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
    /// Whatever is at least as accurate as evaluating the definition in the type of the tensors: `f32` in three bf16 terms, `f16` in
    /// two, `bf16` as it is. The default for `f16` and `bf16`.
    Full,
    /// `f32` in two bf16 terms of 8 bits each: about 16 significant bits, 20 times the error of `Full`, twice its speed; as "high" of
    /// `torch.set_float32_matmul_precision`. The same as `Full` for the other types.
    High,
}

impl Precision {
    /// Its name: `strict`, `full`, `high`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Full => "full",
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
    /// The numbers of bf16 terms that a number may be split into for products on tiles, ascending.
    #[doc(hidden)]
    const TERMS: &'static [usize];
    /// The bf16 terms that a number is split into, if the precision allows products on tiles.
    #[doc(hidden)]
    fn terms(precision: Precision) -> Option<usize> {
        match precision {
            Precision::Strict => None,
            Precision::Full => Self::TERMS.last().copied(),
            Precision::High => Self::TERMS.first().copied(),
        }
    }
    /// Forgets the type of what holds elements, but for the number that they are computed in.
    #[doc(hidden)]
    fn erase<F: Family>(x: F::Of<Self>) -> Any<F, Self::Num>;
    /// The inverse of [`erase`](Self::erase); `None` for another type.
    #[doc(hidden)]
    fn typed<F: Family>(any: Any<F, Self::Num>) -> Option<F::Of<Self>>;
}

/// A type of container, for any type of element: slices, heads, output tiles.
pub trait Family {
    /// The container of elements `T`.
    type Of<T: Element>;
}

/// A container of elements, of any type that is computed in `N`. Kernels are compiled once for each `N`; only what reads or
/// writes elements is compiled for each type of element ([`Number::visit`]).
pub enum Any<F: Family, N: Number> {
    /// Elements of type `N` itself.
    Own(F::Of<N>),
    /// `f16`, where `N` is `f32`.
    F16(F::Of<f16>),
    /// `bf16`, where `N` is `f32`.
    Bf16(F::Of<bf16>),
}

impl<F: Family, N: Number> Copy for Any<F, N>
where
    F::Of<N>: Copy,
    F::Of<f16>: Copy,
    F::Of<bf16>: Copy,
{
}

impl<F: Family, N: Number> Clone for Any<F, N>
where
    F::Of<N>: Copy,
    F::Of<f16>: Copy,
    F::Of<bf16>: Copy,
{
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Family, N: Number> Debug for Any<F, N>
where
    F::Of<N>: Debug,
    F::Of<f16>: Debug,
    F::Of<bf16>: Debug,
{
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        each!(self, x => x.fmt(f))
    }
}

/// What is done with a container once its type of element is known.
pub trait Visitor<F: Family, N: Number> {
    /// What it returns.
    type Out;
    /// The work; must be `#[inline(always)]`.
    fn visit<E: Element<Num = N>>(self, x: F::Of<E>) -> Self::Out;
}

/// A type in memory, and how a vector of it is loaded and written; `tiles`: the bf16 terms it may be split into there, fewer for
/// less precision.
macro_rules! element {
    ($t:ty, $number:ty, $precision:ident, $widen:expr, $narrow:expr, $numbers:expr, $load:ident, $write:ident, tiles $terms:tt, $any:ident) => {
        impl Element for $t {
            type Num = $number;
            const NAME: &'static str = stringify!($t);
            const PRECISION: Precision = Precision::$precision;
            const TERMS: &'static [usize] = &$terms;
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
            #[inline(always)]
            fn erase<F: Family>(x: F::Of<Self>) -> Any<F, $number> {
                Any::$any(x)
            }
            #[inline(always)]
            fn typed<F: Family>(any: Any<F, $number>) -> Option<F::Of<Self>> {
                match any {
                    Any::$any(x) => Some(x),
                    _ => None,
                }
            }
        }
    };
}

element!(f32, f32, Strict, identity, identity, Some, load, write, tiles [2, 3], Own);
element!(f64, f64, Strict, identity, identity, Some, load, write, tiles [], Own);
element!(
    f16,
    f32,
    Full,
    Self::to_f32,
    Self::from_f32,
    no_numbers,
    load_f16,
    write_f16,
    tiles[2],
    F16
);
element!(
    bf16,
    f32,
    Full,
    Self::to_f32,
    Self::from_f32,
    no_numbers,
    load_bf16,
    write_bf16,
    tiles[1],
    Bf16
);

fn no_numbers<E>(_: &[E]) -> Option<&[f32]> {
    None
}

/// What the fields of an E4M3 number in those of an `f16` are to be multiplied by: the difference of the exponents' biases.
pub(crate) const E4M3_OF_F16: f32 = 256.0;

/// An E4M3 number: 4 bits of exponent, 3 of mantissa; all of them set is NaN.
#[inline(always)]
pub(crate) fn of_e4m3(code: u8) -> f32 {
    if code & 0x7f == 0x7f {
        return f32::NAN;
    }
    let wide = i16::from(code.cast_signed()).cast_unsigned();
    f16::from_bits(wide << 7 & 0xbf80).to_f32() * E4M3_OF_F16
}
