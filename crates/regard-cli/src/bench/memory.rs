//! How much memory a call takes beyond what it was given, as Linux counts it.

/// Resident bytes, from a moment on.
pub(crate) struct Watch {
    before: u64,
}

/// What was seen meanwhile, in MiB.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) peak: f64,
    /// The peak without what was resident before.
    pub(crate) added: f64,
}

const MIB: f64 = (1u64 << 20) as f64;

impl Watch {
    /// Forgets earlier peaks. `None` where that is not possible.
    pub(crate) fn start() -> Option<Self> {
        std::fs::write("/proc/self/clear_refs", "5").ok()?;
        Some(Self { before: status("VmRSS:")? })
    }

    pub(crate) fn stop(self) -> Option<Seen> {
        let peak = status("VmHWM:")?;
        let added = peak.saturating_sub(self.before);
        Some(Seen { peak: peak as f64 / MIB, added: added as f64 / MIB })
    }
}

/// Bytes of elements as MiB.
pub(crate) fn mib<T>(data: &[T]) -> f64 {
    size_of_val(data) as f64 / MIB
}

fn status(field: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
}
