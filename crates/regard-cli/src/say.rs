//! What is told beside a result, on the standard error.

use regard_scope::printable;
use std::fmt::Display;
use std::io::Write;

/// Tells the user something, without anything that controls a terminal: names and texts of files may be in it. Whoever read us may have
/// gone, and the disk of a log may be full: no reason to end the work that is told of.
pub(crate) fn say(line: impl Display) {
    let _ = writeln!(std::io::stderr().lock(), "{}", printable(&line.to_string()));
}
