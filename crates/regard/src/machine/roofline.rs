//! Roofline: loops that measure peak arithmetic throughput and memory bandwidth. The speed of a kernel is reported as a
//! fraction of these, measured at the same time.

use crate::machine::simd::{Element, Isa, MAX_LANES, Number, Simd, Task};
use std::hint::black_box;

/// Runs `rounds` iterations of independent multiply-adds on registers and returns the number of flops.
#[must_use]
pub fn multiply_adds(isa: Isa, rounds: usize) -> f64 {
    struct Loop(usize);
    impl Task<f32> for Loop {
        type Out = f64;
        #[inline(always)]
        fn run<S: Simd<f32>>(self, s: S) -> f64 {
            // A latency of 4 cycles on 2 ports needs 8 independent chains; 12 leave a margin and fit in 16 registers.
            const CHAINS: usize = 12;
            let (x, y) = (s.splat(black_box(0.999_999)), s.splat(black_box(1e-7)));
            let mut chains = [s.splat(1.0); CHAINS];
            for _ in 0..self.0 {
                for chain in &mut chains {
                    *chain = s.fma(*chain, x, y);
                }
            }
            let mut out = [0f32; 32];
            for chain in chains {
                s.store(chain, black_box(&mut out));
            }
            (self.0 * CHAINS * S::LANES * 2) as f64
        }
    }
    f32::enter(isa, Loop(rounds))
}

/// Flops of one iteration of [`tile_multiply_adds`]: four AMX products of 16 x 16 x 32.
pub const TILE_ROUND: f64 = (4 * 16 * 16 * 32 * 2) as f64;

/// As [`multiply_adds`], with bf16 products of AMX tiles. Returns 0 if `isa` has no AMX.
#[must_use]
pub fn tile_multiply_adds(isa: Isa, rounds: usize) -> f64 {
    #[cfg(target_arch = "x86_64")]
    if let Isa::Amx(amx) = isa {
        let tiles = amx.configure([crate::machine::simd::TileShape::WHOLE; 8]);
        tiles.zero::<6>();
        tiles.zero::<7>();
        for _ in 0..black_box(rounds) {
            tiles.multiply::<0, 6, 7>();
            tiles.multiply::<1, 6, 7>();
            tiles.multiply::<2, 6, 7>();
            tiles.multiply::<3, 6, 7>();
        }
        return rounds as f64 * TILE_ROUND;
    }
    let _ = (isa, rounds);
    0.0
}

/// Reads `data` once, in whole chunks of 8 vectors, and returns the sum. Measures memory bandwidth.
#[must_use]
pub fn read<E: Element>(isa: Isa, data: &[E]) -> E::Num {
    struct Sum<'a, E>(&'a [E]);
    impl<E: Element> Task<E::Num> for Sum<'_, E> {
        type Out = E::Num;
        #[inline(always)]
        fn run<S: Simd<E::Num>>(self, s: S) -> E::Num {
            const CHAINS: usize = 8;
            let zero = E::Num::default();
            let mut sums = [s.splat(zero); CHAINS];
            for chunk in self.0.chunks_exact(CHAINS * S::LANES) {
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = s.add(*sum, E::load(s, &chunk[i * S::LANES..]));
                }
            }
            let mut out = [zero; MAX_LANES];
            let total = sums.into_iter().reduce(|a, b| s.add(a, b)).unwrap_or(s.splat(zero));
            s.store(total, &mut out);
            out[..S::LANES].iter().fold(zero, |sum, x| sum + *x)
        }
    }
    E::Num::enter(isa, Sum(data))
}
