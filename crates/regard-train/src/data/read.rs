//! Reading: pairs, documents and plain text, packed or not, with the line in every complaint.

use crate::error::Error;
use flate2::bufread::MultiGzDecoder;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// The longest line, in bytes: beyond it a file is hardly one text a line.
const LONGEST: usize = 1 << 20;
/// Bytes of a file, unpacked, and its rows: a small packed file may hold more than any memory.
const LARGEST: u64 = 1 << 30;
const ROWS: usize = 1 << 25;
/// What a file begins with that `gzip` has packed.
const GZIP: [u8; 2] = [0x1F, 0x8B];
const BYTE_ORDER_MARK: char = '\u{FEFF}';

/// A text and its translation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// What is translated.
    pub source: String,
    /// Its translation.
    pub target: String,
}

/// A text of several sentences, and the class it belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// The name of its class.
    pub label: String,
    /// Its sentences, none of them empty; at least one.
    pub sentences: Vec<String>,
}

/// Where in a line something stands: `0` in a table, `"sents"` in an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Column {
    /// A column of a table divided by tabs, counted from 0. Such a table has no line of headings.
    Index(usize),
    /// A key of the JSON object that each line is.
    Name(String),
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(column) => write!(f, "column {column}"),
            Self::Name(name) => write!(f, "`{name}`"),
        }
    }
}

/// The pairs of a file, one a line, source and target from the two `columns`. Empty lines are passed over; an empty side is an
/// error.
pub fn pairs(path: &Path, columns: &[Column; 2]) -> Result<Vec<Pair>, Error> {
    first_pairs(path, columns, usize::MAX)
}

/// The first [`pairs`] of a file, so many at most. What comes after them is not read.
pub fn first_pairs(path: &Path, columns: &[Column; 2], most: usize) -> Result<Vec<Pair>, Error> {
    let mut pairs = Vec::new();
    each_row(path, columns, most, |[source, target]| {
        pairs.push(Pair { source: words(&source)?, target: words(&target)? });
        Ok(())
    })?;
    some(path, pairs)
}

/// The documents of a file, one a line, label and sentences from the two `columns`: a label is a text, a whole number, or true or
/// false; sentences are a list of texts, or one text with a sentence a line. Empty sentences are left out.
pub fn documents(path: &Path, columns: &[Column; 2]) -> Result<Vec<Document>, Error> {
    first_documents(path, columns, usize::MAX)
}

/// The first [`documents`] of a file, so many at most. What comes after them is not read.
pub fn first_documents(
    path: &Path,
    columns: &[Column; 2],
    most: usize,
) -> Result<Vec<Document>, Error> {
    let mut documents = Vec::new();
    each_row(path, columns, most, |[label, text]| {
        let label = match label {
            Value::Number(number) if !number.is_f64() => number.to_string(),
            Value::Bool(yes) => yes.to_string(),
            other => words(&other)?,
        };
        let sentences = match &text {
            Value::Array(list) => list.iter().map(string).collect::<Result<Vec<_>, _>>()?,
            other => string(other)?.lines().collect(),
        };
        let sentences = sentences.into_iter().map(str::trim).filter(|text| !text.is_empty());
        let sentences: Vec<_> = sentences.map(str::to_owned).collect();
        if sentences.is_empty() {
            return Err("no sentence".into());
        }
        documents.push(Document { label, sentences });
        Ok(())
    })?;
    some(path, documents)
}

/// The texts of a file, one a line, without the white space around them. Empty lines are passed over.
pub fn texts(path: &Path) -> Result<Vec<String>, Error> {
    let mut texts = Vec::new();
    each_line(path, usize::MAX, |line| {
        let line = line.trim();
        if !line.is_empty() {
            texts.push(line.to_owned());
        }
        Ok(())
    })?;
    some(path, texts)
}

/// The whole of a file as one text, its line ends `\n`.
pub fn text(path: &Path) -> Result<String, Error> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes).map_err(|e| Error::file(path, &e))?;
    let text = String::from_utf8(bytes).map_err(|e| {
        let before = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        Error::line(path, line, "not UTF-8; convert the file first")
    })?;
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(&text).replace("\r\n", "\n");
    if text.is_empty() { Err(Error::file(path, &"the file is empty")) } else { Ok(text) }
}

/// Calls `each` with what the two `columns` say on each of the first lines, `most` at most. What it complains of is told with the line.
fn each_row(
    path: &Path,
    columns: &[Column; 2],
    most: usize,
    mut each: impl FnMut([Value; 2]) -> Result<(), String>,
) -> Result<(), Error> {
    match columns {
        [Column::Index(a), Column::Index(b)] => each_line(path, most, |line| {
            let columns: Vec<_> = line.split('\t').collect();
            let at = |column: usize| match columns.get(column) {
                Some(text) => Ok(Value::from(*text)),
                None => Err(format!(
                    "column {column} is asked for, counted from 0, and the line has {}",
                    columns.len()
                )),
            };
            each([at(*a)?, at(*b)?])
        }),
        [Column::Name(a), Column::Name(b)] => each_line(path, most, |line| {
            let object: Map<String, Value> = serde_json::from_str(line).map_err(|e| {
                // The line that it would name is always the first.
                let why = e.to_string();
                let why = why.split(" at line ").next().unwrap_or_default();
                format!("no JSON object: {why}, at byte {}", e.column())
            })?;
            let at = |name: &String| {
                object.get(name).cloned().ok_or_else(|| {
                    let keys: Vec<_> = object.keys().map(String::as_str).collect();
                    format!("no `{name}` among its keys, {}", keys.join(", "))
                })
            };
            each([at(a)?, at(b)?])
        }),
        [a, b] => {
            let why = format!("{a} and {b}; give two columns, of a table, or two keys, of objects");
            Err(Error::setting("columns", why))
        }
    }
}

/// Calls `each` with the first lines that are not empty, `most` at most. What it complains of is told with the number of the line, counted
/// from 1.
fn each_line(
    path: &Path,
    most: usize,
    mut each: impl FnMut(&str) -> Result<(), String>,
) -> Result<(), Error> {
    let mut reader = open(path)?;
    let mut found = 0;
    let mut bytes = Vec::new();
    // Two more than allowed: `\r\n` does not count.
    let limit = u64::try_from(LONGEST).map_or(u64::MAX, |limit| limit + 2);
    for number in 1.. {
        if found == most {
            break;
        }
        bytes.clear();
        let wrong = |why: String| Error::line(path, number, why);
        let read = reader.by_ref().take(limit).read_until(b'\n', &mut bytes);
        if read.map_err(|e| wrong(format!("cannot be read: {e}")))? == 0 {
            break;
        }
        let line = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.len() > LONGEST {
            return Err(wrong(format!("longer than {LONGEST} bytes; divide it")));
        }
        let line =
            str::from_utf8(line).map_err(|_| wrong("not UTF-8; convert the file first".into()))?;
        let line =
            if number == 1 { line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line) } else { line };
        // A line of tabs is a row of empty columns.
        if !line.trim_matches(' ').is_empty() {
            found += 1;
            if found > ROWS {
                let why = format!("more than {ROWS} rows; divide the file into several data.parts");
                return Err(wrong(why));
            }
            each(line).map_err(wrong)?;
        }
    }
    Ok(())
}

/// A file unpacked, if it begins as packed ones do, whatever its name.
fn open(path: &Path) -> Result<BufReader<LimitedReader>, Error> {
    let file = File::open(path).map_err(|e| Error::file(path, &e))?;
    let mut reader = BufReader::new(file);
    let packed = reader.fill_buf().map_err(|e| Error::file(path, &e))?.starts_with(&GZIP);
    let inner: Box<dyn Read> =
        if packed { Box::new(MultiGzDecoder::new(reader)) } else { Box::new(reader) };
    Ok(BufReader::new(LimitedReader { inner, left: LARGEST }))
}

/// A reader that fails where there is more than it may give.
struct LimitedReader {
    inner: Box<dyn Read>,
    left: u64,
}

impl Read for LimitedReader {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        // One more than allowed, to see that it is there.
        let room = usize::try_from(self.left + 1).map_or(to.len(), |room| room.min(to.len()));
        let count = self.inner.read(&mut to[..room])?;
        self.left = self.left.checked_sub(count as u64).ok_or_else(|| {
            let remedy = "divide the file into several data.parts";
            std::io::Error::other(format!("more than {LARGEST} bytes unpacked; {remedy}"))
        })?;
        Ok(count)
    }
}

fn some<T>(path: &Path, found: Vec<T>) -> Result<Vec<T>, Error> {
    if found.is_empty() { Err(Error::file(path, &"no line with text")) } else { Ok(found) }
}

fn string(value: &Value) -> Result<&str, String> {
    value.as_str().ok_or_else(|| format!("{value} where a text should be"))
}

/// A text that says something.
fn words(value: &Value) -> Result<String, String> {
    let text = string(value)?.trim();
    if text.is_empty() { Err("a text is empty".into()) } else { Ok(text.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::Write;
    use std::path::PathBuf;

    fn file(name: &str, bytes: &[u8]) -> PathBuf {
        let path = std::env::temp_dir().join(format!("regard-train-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn packed(bytes: &[u8]) -> Vec<u8> {
        let mut packer = GzEncoder::new(Vec::new(), Compression::fast());
        packer.write_all(bytes).unwrap();
        packer.finish().unwrap()
    }

    fn names(a: &str, b: &str) -> [Column; 2] {
        [Column::Name(a.into()), Column::Name(b.into())]
    }

    const COLUMNS: [Column; 2] = [Column::Index(2), Column::Index(0)];

    #[test]
    fn tables_and_objects_give_the_same_pairs() {
        let expected = [("好久不见。", "Long time, no see."), ("你好", "Hi. \"Tom\"")];
        let expected = expected.map(|(a, b)| Pair { source: a.into(), target: b.into() });
        let table = "\u{FEFF}Long time, no see. \t#1\t好久不见。\r\n\r\nHi. \"Tom\"\t#2\t 你好";
        let objects = concat!(
            r#"{"en": "Long time, no see.", "id": 1, "zh": "好久不见。"}"#,
            "\n\n",
            r#"{"zh": "\u4f60好", "en": "Hi. \"Tom\""}"#,
            "\n"
        );
        let plain = file("pairs.tsv.gz", table.as_bytes());
        assert_eq!(pairs(&plain, &COLUMNS).unwrap(), expected);
        let gz = file("pairs.tsv", &packed(table.as_bytes()));
        assert_eq!(pairs(&gz, &COLUMNS).unwrap(), expected);
        let two = [packed(&objects.as_bytes()[..9]), packed(&objects.as_bytes()[9..])].concat();
        let jsonl = file("pairs.jsonl", &two);
        assert_eq!(pairs(&jsonl, &names("zh", "en")).unwrap(), expected);
        for path in [plain, gz, jsonl] {
            std::fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn documents_are_lists_of_sentences_or_texts_of_lines() {
        let text = concat!(
            r#"{"label": "pos", "sents": ["one .", " ", " two . "]}"#,
            "\n",
            r#"{"label": 3, "sents": "one .\n\ntwo .\n"}"#,
            "\n",
            r#"{"label": true, "sents": "one .\r\ntwo ."}"#,
        );
        let path = file("documents.jsonl", text.as_bytes());
        let found = documents(&path, &names("label", "sents")).unwrap();
        let labels: Vec<_> = found.iter().map(|document| document.label.as_str()).collect();
        assert_eq!(labels, ["pos", "3", "true"]);
        assert!(found.iter().all(|document| document.sentences == ["one .", "two ."]));
        std::fs::remove_file(&path).unwrap();
        let path = file("documents.tsv", "neg\tone .\n".as_bytes());
        let found = documents(&path, &[Column::Index(0), Column::Index(1)]).unwrap();
        assert_eq!(found, [Document { label: "neg".into(), sentences: vec!["one .".into()] }]);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_text_is_kept_as_it_is_and_lines_are_trimmed() {
        let path = file("text.txt", "\u{FEFF}  First\r\n\n \t\nSecond \n".as_bytes());
        assert_eq!(text(&path).unwrap(), "  First\n\n \t\nSecond \n");
        assert_eq!(texts(&path).unwrap(), ["First", "Second"]);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn every_complaint_names_file_and_line() {
        let table = [Column::Index(0), Column::Index(1)];
        let objects = names("a", "b");
        let good = "a\tb\n".as_bytes();
        let cut = packed(&b"a\tb\n".repeat(10_000));
        let cases: [(&str, &[Column; 2], Vec<u8>, &str); 10] = [
            ("columns", &table, [good, b"a"].concat(), ", line 2: column 1 is asked for"),
            ("empty", &table, [good, b"\n \tb"].concat(), ", line 3: a text is empty"),
            ("tabs", &table, [good, b"\t"].concat(), ", line 2: a text is empty"),
            ("bytes", &table, [good, b"a\t\xFF"].concat(), ", line 2: not UTF-8"),
            ("json", &objects, b"{\"a\": 1,}".to_vec(), ", line 1: no JSON object: "),
            (
                "key",
                &objects,
                b"{\"a\": \"\", \"c\": 1}".to_vec(),
                "line 1: no `b` among its keys, a, c",
            ),
            ("number", &objects, b"{\"a\": 1, \"b\": \"b\"}".to_vec(), "line 1: 1 where a text"),
            ("list", &objects, b"[1]".to_vec(), "line 1: no JSON object"),
            ("cut", &table, cut[..cut.len() / 2].to_vec(), "cannot be read"),
            ("nothing", &table, b"\n\n".to_vec(), "no line with text"),
        ];
        for (name, columns, bytes, told) in cases {
            let path = file(name, &bytes);
            let message = pairs(&path, columns).unwrap_err().to_string();
            assert!(message.contains(told) && message.contains(name), "{message} / {told}");
            std::fs::remove_file(path).unwrap();
        }
        let path = file("whole", b"one\ntwo \xFF");
        assert!(text(&path).unwrap_err().to_string().contains(", line 2: not UTF-8"));
        assert!(texts(&path).unwrap_err().to_string().contains(", line 2: not UTF-8"));
        std::fs::remove_file(&path).unwrap();
        assert!(text(&path).unwrap_err().to_string().contains("whole"));
        let mixed = [Column::Index(0), Column::Name("b".into())];
        assert!(pairs(&path, &mixed).unwrap_err().to_string().contains("column 0 and `b`"));
    }

    #[test]
    fn a_line_may_be_a_megabyte_long_and_no_more() {
        let mut line = "a".repeat(LONGEST);
        let path = file("long", format!("{line}\r\n{line}\nb").as_bytes());
        assert_eq!(texts(&path).unwrap().len(), 3);
        line.push('a');
        for end in ["", "\n", "\r\n", "aaaa"] {
            std::fs::write(&path, format!("b\n{line}{end}")).unwrap();
            let message = texts(&path).unwrap_err().to_string();
            assert!(message.contains(", line 2: longer than 1048576 bytes"), "{message}");
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn nothing_is_read_after_the_rows_that_are_asked_for() {
        // What follows would be an error: so many bytes that they are decoded in a later turn, and then no gzip at all.
        let good = packed(&b"a\tb\n\n".repeat(21));
        let bad = packed(&b"a row without a tab\n".repeat(100_000));
        let path = file("bomb", &[good, bad, b"broken".to_vec()].concat());
        let table = [Column::Index(0), Column::Index(1)];
        assert_eq!(first_pairs(&path, &table, 21).unwrap().len(), 21);
        assert_eq!(first_documents(&path, &table, 20).unwrap().len(), 20);
        assert!(first_pairs(&path, &table, 22).is_err());
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_file_may_be_so_large_and_no_larger() {
        let read = |length: usize, left: u64| {
            let inner: Box<dyn Read> = Box::new(std::io::repeat(b'a').take(length as u64));
            let mut bytes = Vec::new();
            LimitedReader { inner, left }.read_to_end(&mut bytes).map(|_| bytes.len())
        };
        assert_eq!(read(100_000, 100_000).unwrap(), 100_000);
        let told = read(100_001, 100_000).unwrap_err().to_string();
        assert!(
            told.contains("more than 1073741824 bytes") && told.contains("data.parts"),
            "{told}"
        );
    }

    #[test]
    fn fields_are_numbers_or_names() {
        let columns: Vec<Column> = serde_json::from_str(r#"[0, "en"]"#).unwrap();
        assert_eq!(columns, [Column::Index(0), Column::Name("en".into())]);
        assert!(serde_json::from_str::<Column>("-1").is_err());
    }
}
