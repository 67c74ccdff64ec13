//! What is told beside a result, on the standard error.

use indicatif::{ProgressBar, ProgressDrawTarget};
use regard_scope::printable;
use std::fmt::Display;
use std::io::Write;
use std::sync::atomic::{AtomicU8, Ordering};

/// How much is told: errors alone, notes too, or details too.
static LEVEL: AtomicU8 = AtomicU8::new(NOTES);
const ERRORS: u8 = 0;
const NOTES: u8 = 1;
const DETAILS: u8 = 2;

/// Sets how much is told.
pub(crate) fn set_level(quiet: bool, verbose: bool) {
    let level = match (quiet, verbose) {
        (true, _) => ERRORS,
        (false, false) => NOTES,
        (false, true) => DETAILS,
    };
    LEVEL.store(level, Ordering::Relaxed);
}

/// Whether details are told.
#[cfg(feature = "serve")]
pub(crate) fn is_verbose() -> bool {
    LEVEL.load(Ordering::Relaxed) >= DETAILS
}

/// Tells of a failure, without anything that controls a terminal: names and texts of files may be in it. Whoever read us may have
/// gone, and the disk of a log may be full: no reason to end the work that is told of.
pub(crate) fn error(line: impl Display) {
    let _ = writeln!(std::io::stderr().lock(), "{}", printable(&line.to_string()));
}

/// Tells the user something, unless they want quiet.
pub(crate) fn say(line: impl Display) {
    if LEVEL.load(Ordering::Relaxed) >= NOTES {
        error(line);
    }
}

/// Tells what only some want to know.
pub(crate) fn detail(line: impl Display) {
    if LEVEL.load(Ordering::Relaxed) >= DETAILS {
        error(line);
    }
}

/// A bar that draws on a terminal only, and not for those who want quiet.
pub(crate) fn bar(bar: ProgressBar) -> ProgressBar {
    if LEVEL.load(Ordering::Relaxed) < NOTES {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    bar
}
