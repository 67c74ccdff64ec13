//! Loops that measure the peak arithmetic throughput of vectors and of AMX tiles, for benchmarks.

use crate::machine::simd::{Isa, Number, Simd, Task};
use std::hint::black_box;

/// Independent chains of multiply-adds: a latency of 4 cycles on 2 ports needs 8; 12 leave a margin and fit in 16 registers.
const CHAINS: usize = 12;

/// Flops of one round of [`multiply_adds`].
#[must_use]
pub fn vector_round(isa: Isa) -> f64 {
    (2 * CHAINS * isa.lanes::<f32>()) as f64
}

/// Runs `rounds` rounds of independent `f32` multiply-adds on registers.
pub fn multiply_adds(isa: Isa, rounds: usize) {
    struct Loop(usize);
    impl Task<f32> for Loop {
        type Out = ();
        #[inline(always)]
        fn run<S: Simd<f32>>(self, s: S) {
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
        }
    }
    f32::enter(isa, Loop(rounds));
}

/// Flops of one round of [`tile_multiply_adds`]: four AMX products of 16 x 16 x 32.
pub const TILE_ROUND: f64 = (4 * 16 * 16 * 32 * 2) as f64;

/// Runs `rounds` rounds of independent bf16 products of AMX tiles; does nothing if `isa` has no AMX.
pub fn tile_multiply_adds(isa: Isa, rounds: usize) {
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
    }
    let _ = (isa, rounds);
}
