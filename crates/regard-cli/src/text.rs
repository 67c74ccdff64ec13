//! Texts from outside, within limits: of an argument, of a file, of lines that come in.

use anyhow::{Context, Result, anyhow, bail};
use std::fs::File;
use std::io::{BufRead, Read};
use std::path::Path;

/// Bytes of a text that a model reads, at most: a book has about as many. What a model has room for may be less.
pub(crate) const LONGEST: u64 = 1 << 20;
/// Bytes of a file of words, one a line: some tens of millions.
pub(crate) const WORDS: u64 = 1 << 28;

/// A text as it was typed, or that of `@FILE`.
pub(crate) fn text_of(text: &str) -> Result<String> {
    match text.strip_prefix('@') {
        Some(file) => read(Path::new(file), LONGEST),
        None => short(text).map(Into::into),
    }
}

/// A text that is no longer than a model may read.
pub(crate) fn short(text: &str) -> Result<&str> {
    if text.len() as u64 > LONGEST {
        bail!("a text of {} bytes: at most {LONGEST} are read; give parts of it", text.len());
    }
    Ok(text)
}

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

/// Each line as it comes, without space around it.
pub(crate) fn lines(mut input: impl BufRead) -> impl Iterator<Item = Result<String>> {
    let mut number = 0;
    let mut next = move || -> Result<Option<String>> {
        number += 1;
        let mut bytes = Vec::new();
        if input.by_ref().take(LONGEST + 1).read_until(b'\n', &mut bytes)? == 0 {
            return Ok(None);
        }
        if bytes.len() as u64 > LONGEST {
            bail!("line {number}: more than {LONGEST} bytes; give shorter lines");
        }
        decoded(bytes, number).map(|line| Some(line.trim().into()))
    };
    std::iter::from_fn(move || next().context("the input").transpose())
}

/// A text whose first line has this number.
fn decoded(bytes: Vec<u8>, first: usize) -> Result<String> {
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
        let all: Vec<_> = lines(&b"a \n\n\xe4\n"[..]).collect();
        assert_eq!(
            (all[0].as_ref().unwrap().as_str(), all[1].as_ref().unwrap().as_str()),
            ("a", "")
        );
        assert_eq!(
            format!("{:#}", all[2].as_ref().unwrap_err()).find("the input: line 3: "),
            Some(0)
        );
    }

    #[test]
    fn lines_and_texts_have_a_limit() {
        let long = vec![b'a'; (1 << 20) + 1];
        let line = format!("{:#}", lines(&long[..]).next().unwrap().unwrap_err());
        assert!(line.contains("line 1: more than 1048576 bytes"), "{line}");
        let text = String::from_utf8(long).unwrap();
        assert!(short(&text).unwrap_err().to_string().contains("1048577 bytes: at most 1048576"));
        assert!(short(&text[1..]).is_ok());
        let endless = read(Path::new("/dev/zero"), 1000).unwrap_err().to_string();
        assert!(endless.contains("/dev/zero: 1001 bytes or more, at most 1000"), "{endless}");
    }
}
