//! Where and when a row was measured.

use serde::Serialize;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Context {
    /// Of the day, in UTC.
    date: String,
    /// Of the sources that the command was built from, if they are still there; `-dirty` if they have changed since.
    #[serde(skip_serializing_if = "Option::is_none")]
    commit: Option<String>,
    version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<String>,
    /// Processes that wanted to run in the last minute, ours among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    load: Option<f64>,
}

impl Context {
    pub(crate) fn now() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            date: date(since.as_secs() / 86_400),
            commit: commit(),
            version: env!("CARGO_PKG_VERSION"),
            cpu: after("/proc/cpuinfo", "model name"),
            load: first_number("/proc/loadavg"),
        }
    }
}

fn commit() -> Option<String> {
    let told = Command::new("git")
        .args(["-C", env!("CARGO_MANIFEST_DIR")])
        .args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])
        .output()
        .ok()?;
    let text = String::from_utf8(told.stdout).ok()?;
    (told.status.success() && !text.trim().is_empty()).then(|| text.trim().into())
}

fn after(path: &str, field: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    Some(line.split_once(':')?.1.trim().into())
}

fn first_number(path: &str) -> Option<f64> {
    std::fs::read_to_string(path).ok()?.split_whitespace().next()?.parse().ok()
}

/// The date of a day since 1970, in the Gregorian calendar. Years are counted from March here: a leap day is the last of one.
fn date(days: u64) -> String {
    let days = days + 719_468; // since March 1st of the year 0
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) =
        (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    format!("{:04}-{month:02}-{day:02}", era * 400 + year + u64::from(month <= 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (days, text) in
            [(0, "1970-01-01"), (59, "1970-03-01"), (11_016, "2000-02-29"), (20_774, "2026-11-17")]
        {
            assert_eq!(date(days), text);
        }
    }
}
