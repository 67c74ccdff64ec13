//! The computer a plan is made for. A value: tests and users may describe another one.

use crate::simd::Isa;
use std::sync::OnceLock;

/// Instructions, threads and caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Machine {
    /// The instruction set to use.
    pub isa: Isa,
    /// Threads to use, the caller's included.
    pub threads: usize,
    /// Bytes of first-level data cache of a core.
    pub l1: usize,
    /// Bytes of second-level cache of a core.
    pub l2: usize,
}

impl Machine {
    /// This machine: its best instructions and all the threads it offers.
    #[must_use]
    pub fn detect() -> Self {
        static HERE: OnceLock<Machine> = OnceLock::new();
        *HERE.get_or_init(|| Self {
            isa: Isa::best(),
            threads: std::thread::available_parallelism().map_or(1, Into::into),
            l1: cache_bytes(1).unwrap_or(32 << 10),
            l2: cache_bytes(2).unwrap_or(1 << 20),
        })
    }

    /// The same with another instruction set.
    #[must_use]
    pub fn isa(self, isa: Isa) -> Self {
        Self { isa, ..self }
    }

    /// The same with another number of threads; at least 1 is used.
    #[must_use]
    pub fn threads(self, threads: usize) -> Self {
        Self { threads: threads.max(1), ..self }
    }
}

/// The size of the data cache of a level, as Linux tells it.
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
