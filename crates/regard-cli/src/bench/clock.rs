//! Time, by the clock that disturbs least.

use regard::Machine;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::time::Instant;

/// One thread is timed by the CPU time it got, so that being put aside by others does not count; several must be
/// timed by the wall.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Clock {
    Cpu,
    Wall,
}

impl Clock {
    pub(crate) fn of(machine: Machine) -> Self {
        if machine.threads == 1 { Self::Cpu } else { Self::Wall }
    }

    /// Seconds that `work` takes.
    pub(crate) fn time(self, work: impl FnOnce()) -> f64 {
        match self {
            Self::Cpu => {
                let start = thread_seconds();
                work();
                thread_seconds() - start
            }
            Self::Wall => {
                let start = Instant::now();
                work();
                start.elapsed().as_secs_f64()
            }
        }
    }
}

fn thread_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn sleep_counts_on_the_wall_only() {
        let sleep = || std::thread::sleep(Duration::from_millis(20));
        assert!(Clock::Cpu.time(sleep) < 0.01);
        assert!(Clock::Wall.time(sleep) >= 0.02);
    }
}
