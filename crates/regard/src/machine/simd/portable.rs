//! Vectors as arrays of four numbers, written so that the compiler vectorizes them on any target.

use super::{Enter, Number, Simd, Task};
use std::mem::MaybeUninit;

/// The portable instruction set, available on every target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Portable;

/// The portable lanes, for functions compiled with fused multiply-add.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fused<A>(pub(crate) A);

impl Enter for Portable {
    #[inline(never)]
    fn enter<N: Number, S: Simd<N>, T: Task<N>>(self, task: T, s: S) -> T::Out {
        task.run(s)
    }
}

const LANES: usize = 4; // 128 bits of f32: the baseline width of SSE2 and NEON

macro_rules! plain_lanes {
    ($isa:ty, $entry:expr, $fma:expr $(, $param:ident)?) => {
        impl<N: Number $(, $param: Enter)?> Simd<N> for $isa {
            type V = [N; LANES];
            type M = u32;
            type Block = [[N; LANES]; LANES];
            const LANES: usize = LANES;
            const WIDE: bool = false;

            #[inline(always)]
            fn call<T: Task<N>>(self, task: T) -> T::Out {
                let entry = $entry;
                entry(self).enter(task, self)
            }
            #[inline(always)]
            fn splat(self, x: N) -> Self::V {
                [x; LANES]
            }
            #[inline(always)]
            fn load(self, src: &[N]) -> Self::V {
                [src[0], src[1], src[2], src[3]]
            }
            #[inline(always)]
            fn store(self, v: Self::V, dst: &mut [N]) {
                dst[..LANES].copy_from_slice(&v);
            }
            #[inline(always)]
            fn write(self, v: Self::V, dst: &mut [MaybeUninit<N>]) {
                dst[..LANES].iter_mut().zip(v).for_each(|(dst, x)| {
                    dst.write(x);
                });
            }
            #[inline(always)]
            fn add(self, a: Self::V, b: Self::V) -> Self::V {
                zip(a, b, |a, b| a + b)
            }
            #[inline(always)]
            fn sub(self, a: Self::V, b: Self::V) -> Self::V {
                zip(a, b, |a, b| a - b)
            }
            #[inline(always)]
            fn mul(self, a: Self::V, b: Self::V) -> Self::V {
                zip(a, b, |a, b| a * b)
            }
            #[inline(always)]
            fn div(self, a: Self::V, b: Self::V) -> Self::V {
                zip(a, b, |a, b| a / b)
            }
            #[inline(always)]
            fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
                let fma: fn(N, N, N) -> N = $fma;
                [
                    fma(a[0], b[0], c[0]),
                    fma(a[1], b[1], c[1]),
                    fma(a[2], b[2], c[2]),
                    fma(a[3], b[3], c[3]),
                ]
            }
            #[inline(always)]
            fn max(self, a: Self::V, b: Self::V) -> Self::V {
                zip(a, b, |a, b| if a > b { a } else { b })
            }
            #[inline(always)]
            fn less(self, a: Self::V, b: Self::V) -> u32 {
                (0..LANES).fold(0, |m, i| m | u32::from(a[i] < b[i]) << i)
            }
            #[inline(always)]
            fn bits(self, m: u32) -> u32 {
                m
            }
            #[inline(always)]
            fn lanes(self, bits: u32) -> u32 {
                bits
            }
            #[inline(always)]
            fn select(self, m: u32, yes: Self::V, no: Self::V) -> Self::V {
                let mut out = no;
                for i in 0..LANES {
                    if m >> i & 1 == 1 {
                        out[i] = yes[i];
                    }
                }
                out
            }
            #[inline(always)]
            fn remainder(self, x: Self::V) -> Self::V {
                // Adding and subtracting 1.5 * 2^(mantissa bits) rounds to the nearest integer, ties to even.
                let big = N::from_f64(1.5) / N::epsilon();
                x.map(|x| if x < N::from_f64(-4096.0) { N::zero() } else { x - ((x + big) - big) })
            }
            #[inline(always)]
            fn scale(self, x: Self::V, e: Self::V) -> Self::V {
                let limit = N::from_f64(2.0 * N::POWERS);
                zip(x, e, |x, e| {
                    let e = if e < -limit { -limit } else { e };
                    let e = if e > limit { limit } else { e };
                    // Split `e` in two, so that each power of two is a normal number.
                    let half = (e * N::from_f64(0.5)).floor();
                    x * half.whole_power_of_two() * (e - half).whole_power_of_two()
                })
            }
            #[inline(always)]
            fn block(self) -> Self::Block {
                [[N::zero(); LANES]; LANES]
            }
            #[inline(always)]
            fn transpose(self, b: &mut Self::Block) {
                let a = *b;
                for i in 0..LANES {
                    for j in 0..LANES {
                        b[i][j] = a[j][i];
                    }
                }
            }
        }
    };
}
plain_lanes!(Portable, |s: Self| s, |a, b, c| a * b + c);
plain_lanes!(Fused<A>, |s: Self| s.0, |a, b, c| a.mul_add(b, c), A);

#[inline(always)]
fn zip<N: Number>(a: [N; LANES], b: [N; LANES], f: impl Fn(N, N) -> N) -> [N; LANES] {
    [f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])]
}
