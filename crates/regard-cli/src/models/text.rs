//! Texts that models read, within limits: of an argument, of lines that come in.

use crate::text::{decoded, read};
use anyhow::{Context, Result, bail};
use std::io::{BufRead, Read};
use std::path::Path;

/// Bytes of a text that a model reads, at most: a book has about as many. What a model has room for may be less.
pub(crate) const LONGEST: u64 = 1 << 20;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_encoding_name_the_line_of_the_input() {
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
    }
}
