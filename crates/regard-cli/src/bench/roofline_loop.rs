//! The machine's own roofline, on as many threads as the case uses, all at once.

use super::case::Bound;
use super::clock::Clock;
use regard::machine::roofline::{self, TILE_ROUND};
use regard::{Element, Isa, Machine, Plan};
use std::hint::black_box;
use std::sync::Barrier;

/// A loop that does nothing but what the case can run out of.
pub(crate) struct Roofline {
    bound: Bound,
    machine: Machine,
    units: Units,
    /// As large as the keys and values of the case.
    memory: Vec<f32>,
    /// Units a second on one thread, as seen last: says how long a sample must be.
    rate: f64,
}

/// What the roofline of multiply-adds is counted in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Units {
    /// Whether they go by tiles.
    tiles: bool,
    /// Flops of a kernel for each flop of the loop: a vector holds half as many `f64` as `f32`, and a number that is split
    /// takes several products.
    fraction: f64,
}

impl Units {
    pub(crate) fn of<E: Element>(plan: &Plan<'_, E>) -> Self {
        let products = |n| Self { tiles: true, fraction: 1.0 / n as f64 };
        plan.tile_products().map_or_else(Self::of_vectors::<E>, products)
    }

    /// Of what never goes by tiles.
    pub(crate) fn of_vectors<E: Element>() -> Self {
        let fraction = size_of::<f32>() as f64 / size_of::<E::Num>() as f64;
        Self { tiles: false, fraction }
    }
}

/// Rounds of the multiply-add loop to measure it by the first time: some microseconds.
const FIRST_ROUNDS: usize = 1000;

impl Roofline {
    /// `bytes`: those of the keys and values of the case.
    pub(crate) fn new(bound: Bound, machine: Machine, units: Units, bytes: usize) -> Self {
        let numbers = if bound == Bound::Read { bytes / size_of::<f32>() } else { 0 };
        let memory = vec![1.0; numbers];
        let mut roofline = Self { bound, machine, units, memory, rate: f64::INFINITY };
        roofline.rate = roofline.one_thread(0, 0.0).max(1.0);
        roofline
    }

    /// Flops or bytes a second over some `seconds`, all threads together.
    pub(crate) fn sample(&mut self, seconds: f64) -> f64 {
        let threads = self.machine.threads;
        let total = if threads == 1 {
            self.one_thread(0, seconds)
        } else {
            // Each thread times itself from the moment all have started: waking them is not the machine's roofline.
            let (start, this) = (Barrier::new(threads), &*self);
            std::thread::scope(|scope| {
                let begin = |thread| {
                    let start = &start;
                    scope.spawn(move || {
                        start.wait();
                        this.one_thread(thread, seconds)
                    })
                };
                let running: Vec<_> = (0..threads).map(begin).collect();
                running.into_iter().map(|t| t.join().unwrap_or(f64::NAN)).sum()
            })
        };
        self.rate = total / threads as f64;
        total
    }

    /// Flops or bytes a second of one thread.
    fn one_thread(&self, thread: usize, seconds: f64) -> f64 {
        let clock = Clock::of(self.machine);
        match self.bound {
            Bound::Fma => {
                let Units { tiles, fraction } = self.units;
                let wanted = seconds * self.rate / fraction;
                let isa = self.machine.isa;
                let each = if tiles { TILE_ROUND } else { roofline::vector_round(isa) };
                let rounds = if wanted.is_finite() { wanted / each } else { 0.0 };
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a count of rounds"
                )]
                let rounds = (rounds as usize).max(FIRST_ROUNDS);
                let rounds = black_box(rounds);
                let time = clock.time(|| {
                    if tiles {
                        roofline::tile_multiply_adds(isa, rounds);
                    } else {
                        roofline::multiply_adds(isa, rounds);
                    }
                });
                rounds as f64 * each * fraction / time
            }
            Bound::Read => {
                let part = part(&self.memory, thread, self.machine.threads);
                let (mut time, mut bytes) = (0.0, 0.0);
                while time <= seconds {
                    time += clock.time(|| {
                        black_box(read(self.machine.isa, black_box(part)));
                    });
                    bytes += size_of_val(part) as f64;
                }
                bytes / time
            }
        }
    }
}

/// Reads `data` once, but for a last incomplete block, and returns the sum.
fn read(isa: Isa, data: &[f32]) -> f32 {
    const BLOCK: usize = 128;
    isa.run(
        #[inline(always)]
        || {
            let mut sums = [0.0; BLOCK];
            for block in data.chunks_exact(BLOCK) {
                sums.iter_mut().zip(block).for_each(|(sum, x)| *sum += x);
            }
            sums.into_iter().sum()
        },
    )
}

/// The fraction of one of several threads.
fn part<E>(memory: &[E], thread: usize, threads: usize) -> &[E] {
    let each = memory.len().div_ceil(threads);
    &memory[(thread * each).min(memory.len())..((thread + 1) * each).min(memory.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_the_memory_once() {
        let memory: Vec<f32> = (0..11u8).map(f32::from).collect();
        for threads in 1..14 {
            let parts: Vec<f32> =
                (0..threads).flat_map(|t| part(&memory, t, threads)).copied().collect();
            assert_eq!(parts, memory);
        }
    }

    #[test]
    fn limits_are_positive_on_any_number_of_threads() {
        for threads in [1, 2] {
            for bound in [Bound::Fma, Bound::Read] {
                let machine = Machine::detect().threads(threads);
                let units = Units { tiles: false, fraction: 1.0 };
                let rate = Roofline::new(bound, machine, units, 1 << 18).sample(1e-3);
                assert!(rate.is_finite() && rate > 1e8, "{bound:?} {threads}: {rate}");
            }
        }
    }
}
