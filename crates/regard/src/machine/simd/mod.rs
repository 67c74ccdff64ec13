//! Numbers ([`Number`]), the types that hold them in memory ([`Element`]), vectors of them, with as few operations as
//! attention needs ([`Simd`]), and the choice of instructions ([`Isa`]).
//!
//! Loops take the instruction set as a value, [`Isa`], and are compiled once for each type of number. What they call are leaves:
//! written once over `S: Simd<N>` ([`leaf`], [`Task`]), compiled once for each instruction set, and entered through
//! [`Number::enter`]. A variant of `Isa` holds a token that only detection can make: the value is the proof that the instructions
//! exist. Everything between an entry and the intrinsics is `#[inline(always)]`, so it melts into a function that carries
//! `#[target_feature]`. A call of a leaf costs a few nanoseconds, its work microseconds.

mod element;
pub(crate) mod math;
mod number;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use element::{Any, Family, Visitor, covariant, each, map_any, of_e4m3};
pub use element::{Element, Precision};
use half::{bf16, f16};
pub(crate) use number::AmxKernel;
pub use number::Number;
pub(crate) use portable::Portable;
use std::mem::MaybeUninit;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{
    amx::{Amx, TileShape, Tiles},
    avx2::Avx2,
    avx512::Avx512,
};

/// How many rows (queries) stand side by side in one group: four AVX-512 vectors, eight AVX2 vectors of `f32`.
pub(crate) const GROUP: usize = 64;

/// A weight of `f32` below `2^-NEGLIGIBLE` of the largest one of its row is 0: far below what rounding takes from the sum, and far
/// above the denormal numbers, so that products with values do not meet those either.
pub(crate) const NEGLIGIBLE: f32 = 64.0;

/// Lanes of the widest vector.
pub(crate) const MAX_LANES: usize = 16;

/// One number for each row of a group.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))] // a cache line: no vector load of a group ever straddles two
pub(crate) struct Lanes<N>(pub(crate) [N; GROUP]);

/// The vector operations of one instruction set on one type of number.
pub trait Simd<N: Number>: Copy {
    /// A vector of `LANES` numbers.
    type V: Copy;
    /// A choice of lanes.
    type M: Copy;
    /// `LANES` vectors, for `transpose`.
    type Block: AsMut<[Self::V]>;
    /// Numbers in a vector; divides `GROUP`.
    const LANES: usize;
    /// Whether 24 accumulators and their operands fit in the registers (32 of them); else 12 are used.
    const WIDE: bool;

    /// Runs a task as a function of its own, from within a leaf, or from a loop that has this instruction set alone.
    fn call<T: Task<N>>(self, task: T) -> T::Out;
    /// All lanes `x`.
    fn splat(self, x: N) -> Self::V;
    /// The first `LANES` numbers of `src`.
    fn load(self, src: &[N]) -> Self::V;
    /// Writes the first `LANES` numbers of `dst`.
    fn store(self, v: Self::V, dst: &mut [N]);
    /// As `store`, into memory that may not be initialised yet.
    fn write(self, v: Self::V, dst: &mut [MaybeUninit<N>]);
    /// The first `LANES` numbers of `src`, widened.
    #[inline(always)]
    fn load_f16(self, src: &[f16]) -> Self::V {
        self.load_each(src)
    }
    /// The first `LANES` numbers of `src`, widened.
    #[inline(always)]
    fn load_bf16(self, src: &[bf16]) -> Self::V {
        self.load_each(src)
    }
    /// The first `LANES` codes of `src` as the whole numbers that they are in two's complement.
    #[inline(always)]
    fn load_i8(self, src: &[u8]) -> Self::V {
        self.load_codes(src, |code| f32::from(code.cast_signed()))
    }
    /// The first `LANES` codes of `src` as E4M3 numbers.
    #[inline(always)]
    fn load_e4m3(self, src: &[u8]) -> Self::V {
        self.load_codes(src, of_e4m3)
    }
    /// Widens lane by lane, where there is no instruction for it.
    #[inline(always)]
    fn load_codes(self, src: &[u8], number: impl Fn(u8) -> f32) -> Self::V {
        let mut lanes = [N::zero(); MAX_LANES];
        for (lane, code) in lanes.iter_mut().zip(&src[..Self::LANES]) {
            *lane = N::from_f64(number(*code).into());
        }
        self.load(&lanes)
    }
    /// Narrows into the first `LANES` numbers of `dst`, rounding to nearest even.
    #[inline(always)]
    fn write_f16(self, v: Self::V, dst: &mut [MaybeUninit<f16>]) {
        self.write_each(v, dst);
    }
    /// Narrows into the first `LANES` numbers of `dst`, rounding to nearest even.
    #[inline(always)]
    fn write_bf16(self, v: Self::V, dst: &mut [MaybeUninit<bf16>]) {
        self.write_each(v, dst);
    }
    /// Widens lane by lane, where there is no instruction for it.
    #[inline(always)]
    fn load_each<E: Element>(self, src: &[E]) -> Self::V {
        let mut lanes = [N::zero(); MAX_LANES];
        for (lane, x) in lanes.iter_mut().zip(&src[..Self::LANES]) {
            *lane = N::from_f64(x.widen().to_f64());
        }
        self.load(&lanes)
    }
    /// Narrows lane by lane, where there is no instruction for it.
    #[inline(always)]
    fn write_each<E: Element>(self, v: Self::V, dst: &mut [MaybeUninit<E>]) {
        let mut lanes = [N::zero(); MAX_LANES];
        self.store(v, &mut lanes);
        for (x, lane) in dst[..Self::LANES].iter_mut().zip(lanes) {
            x.write(E::narrow(E::Num::from_f64(lane.to_f64())));
        }
    }
    /// `a + b`
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`; fused wherever the instruction set can.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// Lanes where `a < b`.
    fn less(self, a: Self::V, b: Self::V) -> Self::M;
    /// A bit for each lane, lowest first.
    fn bits(self, m: Self::M) -> u32;
    /// Lanes whose bit is set, lowest bit first.
    fn lanes(self, bits: u32) -> Self::M;
    /// `yes` in the lanes of `m`, `no` elsewhere.
    fn select(self, m: Self::M, yes: Self::V, no: Self::V) -> Self::V;
    /// `a * b + c` in the lanes of `m`, `c` untouched elsewhere, whatever `a` and `b` hold there.
    #[inline(always)]
    fn fma_where(self, m: Self::M, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        self.select(m, self.fma(a, b, c), c)
    }
    /// `x` minus the nearest whole number, which is exact; 0 for `x = -inf`.
    fn remainder(self, x: Self::V) -> Self::V;
    /// `x * 2^e` for a whole `e`; 0 for `e = -inf`.
    fn scale(self, x: Self::V, e: Self::V) -> Self::V;
    /// The same for the weights of a softmax: 0 for `e` below `-NEGLIGIBLE`, where there are vectors of `f32`, and anything above
    /// 2^100 may stand for a larger one. A NaN in `e` must be one in `x` too.
    ///
    /// Plain lanes keep them: denormal numbers of `f64` are too far off, and the compiler does not make vectors of another select.
    #[inline(always)]
    fn scale_weight(self, x: Self::V, e: Self::V) -> Self::V {
        self.scale(x, e)
    }
    /// A block of zeros.
    fn block(self) -> Self::Block;
    /// Swaps rows and columns.
    fn transpose(self, block: &mut Self::Block);
    /// The sum of the lanes of each vector, that of the first one in lane 0: lanes `i` and `i + LANES / 2` are added, and so on with
    /// halves of what is left.
    #[inline(always)]
    fn sums(self, mut block: Self::Block) -> Self::V {
        self.transpose(&mut block);
        let vectors = block.as_mut();
        let mut half = Self::LANES / 2;
        while half > 0 {
            for i in 0..half {
                vectors[i] = self.add(vectors[i], vectors[i + half]);
            }
            half /= 2;
        }
        vectors[0]
    }
}

/// Asks for the cache line of `x`, which will be needed soon.
#[inline(always)]
pub(crate) fn prefetch_l1<T>(x: *const T) {
    #[cfg(target_arch = "x86_64")]
    x86::prefetch::<T, { std::arch::x86_64::_MM_HINT_T0 }>(x);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = x;
}

/// The same, into the second-level cache: for much that will be needed later. Any address will do.
#[inline(always)]
pub(crate) fn prefetch_l2<T>(x: *const T) {
    #[cfg(target_arch = "x86_64")]
    x86::prefetch::<T, { std::arch::x86_64::_MM_HINT_T1 }>(x);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = x;
}

/// Leaf kernels: the only code that is compiled for each instruction set. `fn name<'t, N>(s: S, a: &'t A) { body }` declares
/// `fn name(isa, a)`, which runs `body` with vectors `s` of that instruction set. Loops call leaves and are compiled once.
macro_rules! leaf {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$($life:lifetime,)* $N:ident>(
        $s:ident: $S:ident, $($arg:ident: $type:ty),* $(,)?
    ) $body:block) => {
        $crate::machine::simd::leaf! { $(#[$meta])* $vis fn $name<$($life,)* $N>($s: $S, $($arg: $type),*) -> () $body }
    };
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$($life:lifetime,)* $N:ident>(
        $s:ident: $S:ident, $($arg:ident: $type:ty),* $(,)?
    ) -> $out:ty $body:block) => {
        $(#[$meta])*
        $vis fn $name<$($life,)* $N: $crate::machine::simd::Number>(
            isa: $crate::machine::simd::Isa, $($arg: $type),*
        ) -> $out {
            struct Leaf<$($life,)* $N: $crate::machine::simd::Number> { $($arg: $type),* }
            impl<$($life,)* $N: $crate::machine::simd::Number> $crate::machine::simd::Task<$N> for Leaf<$($life,)* $N> {
                type Out = $out;
                #[inline(always)]
                fn run<$S: $crate::machine::simd::Simd<$N>>(self, $s: $S) -> $out {
                    let Self { $($arg),* } = self;
                    $body
                }
            }
            <$N as $crate::machine::simd::Number>::enter(isa, Leaf { $($arg),* })
        }
    };
}
pub(crate) use leaf;

/// A task that any instruction set can run.
pub trait Task<N: Number> {
    /// What it returns.
    type Out;
    /// The work; must be `#[inline(always)]`.
    fn run<S: Simd<N>>(self, s: S) -> Self::Out;
}

/// The constants of [`Simd`], for loops.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vectors {
    pub(crate) lanes: usize,
    pub(crate) wide: bool,
}

/// A proof of instructions, and the way to code that is compiled for them.
pub(crate) trait Enter: Copy {
    /// Runs a task inside a function that is compiled for these instructions.
    fn enter<N: Number, S: Simd<N>, T: Task<N>>(self, task: T, s: S) -> T::Out;
}

/// An instruction set this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust that the compiler vectorises for the baseline of any target; no fused multiply-add.
    Portable(Portable),
    /// 256-bit vectors with fused multiply-add.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// 512-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// 512-bit vectors, and tiles for products of bf16 numbers where the [`Precision`](crate::machine::Precision) allows them.
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
}

impl Isa {
    /// Every instruction set of this machine, the best last.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let found = [Some(Self::Portable(Portable))].into_iter();
        #[cfg(target_arch = "x86_64")]
        let found = found.chain([
            Avx2::detect().map(Self::Avx2),
            Avx512::detect().map(Self::Avx512),
            Amx::detect().map(Self::Amx),
        ]);
        found.flatten().collect()
    }

    /// The best of this machine.
    #[must_use]
    pub fn best() -> Self {
        Self::available().pop().unwrap_or(Self::Portable(Portable))
    }

    /// `portable`, `avx2`, `avx512`, `amx`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Amx(_) => "amx",
        }
    }

    /// Whether it has a fused multiply-add: all that have agree to the bit at [`Precision::Strict`].
    #[must_use]
    pub fn is_fused(self) -> bool {
        !matches!(self, Self::Portable(_))
    }

    /// Runs a closure in a function that is compiled for this instruction set, so that the compiler may vectorize its loops
    /// with it. The closure, and what it calls, must be `#[inline(always)]`. No operation is fused or reordered: the result is
    /// the same for every instruction set.
    pub fn run<T>(self, f: impl FnOnce() -> T) -> T {
        struct Closure<F>(F);
        impl<T, F: FnOnce() -> T> Task<f32> for Closure<F> {
            type Out = T;
            #[inline(always)]
            fn run<S: Simd<f32>>(self, _: S) -> T {
                (self.0)()
            }
        }
        f32::enter(self, Closure(f))
    }

    /// Whether it has tiles.
    #[must_use]
    pub(crate) fn has_amx(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self, Self::Amx(_));
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// Numbers of type `N` in one vector.
    #[must_use]
    pub fn lanes<N: Number>(self) -> usize {
        self.vectors::<N>().lanes
    }

    /// What loops must know of the vectors that their leaves use.
    pub(crate) fn vectors<N: Number>(self) -> Vectors {
        struct Describe;
        impl<N: Number> Task<N> for Describe {
            type Out = Vectors;
            #[inline(always)]
            fn run<S: Simd<N>>(self, _: S) -> Vectors {
                Vectors { lanes: S::LANES, wide: S::WIDE }
            }
        }
        N::enter(self, Describe)
    }

    #[inline(always)]
    pub(crate) fn run_f32<T: Task<f32>>(self, task: T) -> T::Out {
        match self {
            Self::Portable(s) => task.run(s),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(s) => s.enter(task, s),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(s) => s.enter(task, s),
            #[cfg(target_arch = "x86_64")]
            Self::Amx(s) => s.vectors().enter(task, s.vectors()),
        }
    }

    /// `f64` has no intrinsics of its own: four plain lanes, compiled for AVX2 where there are any vectors.
    #[inline(always)]
    pub(crate) fn run_f64<T: Task<f64>>(self, task: T) -> T::Out {
        match self {
            Self::Portable(s) => task.run(s),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(s) => s.enter(task, portable::Fused(s)),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(s) => s.avx2().enter(task, portable::Fused(s.avx2())),
            #[cfg(target_arch = "x86_64")]
            Self::Amx(s) => s.vectors().avx2().enter(task, portable::Fused(s.vectors().avx2())),
        }
    }
}

/// Calls code of the user (a rule of a score or a mask) from within a kernel. It may do whatever safe code may do, such as
/// call the engine, or rayon, which may run another task of the engine on this thread: each releases the AMX tiles.
#[inline(always)]
pub(crate) fn call_user<T>(rule: impl FnOnce() -> T) -> T {
    #[cfg(target_arch = "x86_64")]
    let _saved = x86::amx::SavedTiles::new();
    rule()
}
