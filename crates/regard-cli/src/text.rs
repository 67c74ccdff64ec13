//! Texts of files, within limits.

use anyhow::{Context, Result, anyhow, bail};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// What an argument that is a text may be, and its default: the help of every one.
macro_rules! a_text {
    ($what:literal) => {
        $crate::text::a_text!($what, "")
    };
    ($what:literal, $default:literal) => {
        concat!(
            $what,
            ": a text, @FILE for the text of a file, or - for standard input; at most 1 MiB",
            $default
        )
    };
}
pub(crate) use a_text;

/// Bytes of a file of words, one a line: some tens of millions.
pub(crate) const WORDS: u64 = 1 << 28;

/// The text of a file of so many bytes at most.
pub(crate) fn read(path: &Path, most: u64) -> Result<String> {
    let name = || path.display().to_string();
    let file = File::open(path).with_context(name)?;
    // Of a pipe, 0: what comes is counted below.
    let told = file.metadata().map_or(0, |about| about.len());
    let mut bytes = Vec::new();
    if told <= most {
        file.take(most + 1).read_to_end(&mut bytes).with_context(name)?;
    }
    let held = told.max(bytes.len() as u64);
    if held > most {
        bail!("{}: {held} bytes or more, at most {most} are read; give parts of it", name());
    }
    decoded(bytes, 1).with_context(name)
}

/// A text whose first line has this number.
pub(crate) fn decoded(bytes: Vec<u8>, first: usize) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let line = first + error.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count();
        let byte = error.as_bytes()[at];
        anyhow!("line {line}: the byte 0x{byte:02x} is not UTF-8; save it as UTF-8")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_encoding_name_the_line() {
        let why = |bytes: &[u8]| decoded(bytes.to_vec(), 1).unwrap_err().to_string();
        assert_eq!(why(b"\xff"), "line 1: the byte 0xff is not UTF-8; save it as UTF-8");
        assert!(why(b"a\nb\r\n\xe4\xb8\n").starts_with("line 3: the byte 0xe4"));
    }

    #[test]
    fn files_have_a_limit() {
        let endless = read(Path::new("/dev/zero"), 1000).unwrap_err().to_string();
        assert!(endless.contains("/dev/zero: 1001 bytes or more, at most 1000"), "{endless}");
    }
}
