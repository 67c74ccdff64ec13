//! How much memory a call takes beyond what it was given, as Linux counts it.

/// Resident bytes, from a moment on.
pub(crate) struct MemoryMonitor {
    before: u64,
}

/// What was seen meanwhile, in MiB.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryUse {
    pub(crate) peak: f64,
    /// The peak without what was resident before and what was returned.
    pub(crate) extra: f64,
}

const MIB: f64 = (1u64 << 20) as f64;

impl MemoryMonitor {
    /// Forgets earlier peaks. `None` where that is not possible.
    pub(crate) fn start() -> Option<Self> {
        std::fs::write("/proc/self/clear_refs", "5").ok()?;
        Some(Self { before: status("VmRSS:")? })
    }

    /// Looks back; `returned` MiB are still held.
    pub(crate) fn stop(self, returned: f64) -> Option<MemoryUse> {
        let peak = status("VmHWM:")?;
        let added = peak.saturating_sub(self.before) as f64 / MIB;
        Some(MemoryUse { peak: peak as f64 / MIB, extra: (added - returned).max(0.0) })
    }
}

pub(crate) fn mib(bytes: usize) -> f64 {
    bytes as f64 / MIB
}

/// Bytes that this process can have: of the machine, of the group that Linux has put it in, and of its own address space.
pub(crate) fn most() -> f64 {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let after = |text: &str, field: &str, unit: f64| -> Option<f64> {
        let rest = text.lines().find_map(|line| line.strip_prefix(field))?;
        Some(rest.split_whitespace().next()?.parse::<f64>().ok()? * unit)
    };
    let found = [
        after(&read("/proc/meminfo"), "MemTotal:", 1024.0),
        after(&read("/sys/fs/cgroup/memory.max"), "", 1.0),
        after(&read("/proc/self/limits"), "Max address space", 1.0),
    ];
    found.into_iter().flatten().fold(f64::INFINITY, f64::min)
}

fn status(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_that_is_held_and_let_go_is_seen() {
        // Other tests of this process take a few MiB meanwhile.
        let watch = MemoryMonitor::start().unwrap();
        drop(std::hint::black_box(vec![1u8; 512 << 20]));
        let seen = watch.stop(128.0).unwrap();
        assert!(seen.peak > 512.0 && (320.0..480.0).contains(&seen.extra), "{seen:?}");
    }
}
