//! Texts that models read, within limits: of an argument, a file, the standard input.

use crate::text::{decoded, read};
use anyhow::{Context, Result, bail};
use std::io::{BufRead, Read};
use std::path::Path;

/// Bytes of a text that a model reads, at most: a book has about as many. What a model has room for may be less.
pub(crate) const LONGEST: u64 = 1 << 20;

/// The text that an argument means: what was typed, the text of `@FILE`, or of the standard input for `-`. A line ending at the end of a
/// file is not part of the text.
fn text_of(argument: &str) -> Result<String> {
    let read = match argument.strip_prefix('@') {
        Some(file) => read(Path::new(file), LONGEST)?,
        None if argument == "-" => standard_input()?,
        None => return short(argument.into()),
    };
    let line = read.strip_suffix('\n').unwrap_or(&read);
    Ok(line.strip_suffix('\r').unwrap_or(line).into())
}

/// The texts of several arguments.
pub(crate) fn texts_of(arguments: &[String]) -> Result<Vec<String>> {
    if arguments.iter().filter(|argument| *argument == "-").count() > 1 {
        bail!("-: standard input can be read only once; give other texts as @FILE");
    }
    arguments.iter().map(|argument| text_of(argument)).collect()
}

fn standard_input() -> Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin().take(LONGEST + 1).read_to_end(&mut bytes).context("standard input")?;
    short(decoded(bytes, 1).context("standard input")?).context("standard input")
}

/// A text that is no longer than a model may read.
fn short(text: String) -> Result<String> {
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
    std::iter::from_fn(move || next().context("standard input").transpose())
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
            format!("{:#}", all[2].as_ref().unwrap_err()).find("standard input: line 3: "),
            Some(0)
        );
    }

    #[test]
    fn lines_and_texts_have_a_limit() {
        let long = vec![b'a'; (1 << 20) + 1];
        let line = format!("{:#}", lines(&long[..]).next().unwrap().unwrap_err());
        assert!(line.contains("line 1: more than 1048576 bytes"), "{line}");
        let text = String::from_utf8(long).unwrap();
        assert!(text_of(&text).unwrap_err().to_string().contains("1048577 bytes: at most 1048576"));
        assert!(text_of(&text[1..]).is_ok());
    }
}
