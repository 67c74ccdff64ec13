//! Description of the machine that a plan targets. A plain value, so tests and users can describe another machine.

pub(crate) mod memory;
pub mod roofline;
pub(crate) mod run;
pub(crate) mod simd;

use crate::machine::simd::{Number, math};
pub use run::{Executor, set_executor};
pub use simd::{Isa, Precision};
use std::sync::OnceLock;

/// Instruction set, number of threads and cache sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Machine {
    /// The instruction set to use.
    pub isa: Isa,
    /// The number of threads to use, the calling thread included.
    pub threads: usize,
    /// L1 data cache of a core, in bytes.
    pub l1: usize,
    /// L2 cache of a core, in bytes.
    pub l2: usize,
}

impl Machine {
    /// The current machine: its best instruction set and all available threads; within a thread pool of rayon, as many threads as
    /// the pool has. The rest is detected once per process.
    #[must_use]
    pub fn detect() -> Self {
        static HERE: OnceLock<Machine> = OnceLock::new();
        let here = *HERE.get_or_init(|| Self {
            isa: Isa::best(),
            threads: std::thread::available_parallelism().map_or(1, Into::into),
            l1: cache_bytes(1).unwrap_or(32 << 10),
            l2: cache_bytes(2).unwrap_or(1 << 20),
        });
        #[cfg(feature = "rayon")]
        if rayon::current_thread_index().is_some() {
            return here.threads(rayon::current_num_threads());
        }
        here
    }

    /// A copy with another instruction set.
    #[must_use]
    pub fn isa(self, isa: Isa) -> Self {
        Self { isa, ..self }
    }

    /// A copy with another number of threads, at least 1.
    #[must_use]
    pub fn threads(self, threads: usize) -> Self {
        Self { threads: threads.max(1), ..self }
    }

    /// Runs `task(scratch, i)` for each `i` in `0..tasks` on up to [`threads`](Self::threads) threads, the calling thread
    /// included. `scratch` is called once for each thread that runs a task.
    ///
    /// For what is computed around attention on the same threads. Results are the same for any number of threads if a task
    /// depends on nothing but `i`.
    pub fn run<M>(
        self,
        tasks: usize,
        scratch: impl Fn() -> M + Sync,
        task: impl Fn(&mut M, usize) + Sync,
    ) {
        run::run(self.threads, tasks, scratch, task);
    }

    /// As [`run`](Self::run), for tasks that return a value. The values are returned in task order.
    pub fn collect<M, T: Send>(
        self,
        tasks: usize,
        scratch: impl Fn() -> M + Sync,
        task: impl Fn(&mut M, usize) -> T + Sync,
    ) -> Vec<T> {
        run::collect(self.threads, tasks, scratch, task)
    }

    /// Replaces each number `x` by `2^x` with the instructions of [`isa`](Self::isa), on the calling thread: the exponential of
    /// the kernels. Exactly 1 at 0 and 0 at `-inf`; the error is at most 3 ulp for `f32`.
    pub fn exp2<N: Number>(self, x: &mut [N]) {
        math::exp2_each(self.isa, x);
    }
}

/// The size in bytes of the data or unified cache of a level, from Linux sysfs.
fn cache_bytes(level: u32) -> Option<usize> {
    (0..8).find_map(|index| {
        let read = |what: &str| {
            std::fs::read_to_string(format!(
                "/sys/devices/system/cpu/cpu0/cache/index{index}/{what}"
            ))
            .ok()
        };
        let right =
            read("level")?.trim() == level.to_string() && read("type")?.trim() != "Instruction";
        let size = read("size")?;
        let kib = size.trim().strip_suffix('K')?.parse::<usize>().ok()?;
        right.then_some(kib << 10)
    })
}

#[cfg(all(test, feature = "rayon"))]
mod tests {
    use super::*;

    #[test]
    fn a_pool_limits_the_threads() {
        let outside = Machine::detect();
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert_eq!(pool.install(Machine::detect), outside.threads(threads));
        }
    }
}
