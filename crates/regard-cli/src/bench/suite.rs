//! The suite: cases that stand for real use, and the record that an interrupted run goes on with.

use super::case::Case;
use super::report::Row;
use super::{Item, list, whole};
use anyhow::{Context, Result, bail};
use regard::Machine;
use serde::Deserialize;
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

/// The names of all cases.
fn names() -> Vec<String> {
    let mut names = Vec::new();
    for dtype in ["f32", "bf16"] {
        for d in [64, 128] {
            for n in [512, 2048, 8192] {
                names
                    .extend(["", "-causal"].map(|mask| format!("prefill-{dtype}-n{n}-d{d}{mask}")));
            }
            names.push(format!("prefill-{dtype}-n8192-d{d}-causal-window512"));
            let options =
                ["causal-softcap", "causal-sinks", "b4-padding", "causal-bshd", "causal-kv2"];
            names.extend(options.map(|option| format!("prefill-{dtype}-n2048-d{d}-{option}")));
        }
        for n in [1024, 8192, 32768] {
            names.extend(["", "-q4-causal"].map(|more| format!("decode-{dtype}-n{n}-d128{more}")));
        }
        names.extend(
            ["paged", "b16-shared"].map(|cache| format!("decode-{dtype}-n8192-d128-{cache}")),
        );
        // As many query heads to a key head as fill no register tile: SmolLM2, Qwen2.
        names
            .extend(["h9-kv3", "h14-kv2"].map(|heads| format!("decode-{dtype}-n2048-d64-{heads}")));
        names.extend([32, 64, 128].map(|n| format!("short-{dtype}-n{n}-d64")));
        for d in [64, 128] {
            let options = ["causal", "causal-dropout", "headbias", "causal-window512"];
            names.extend(options.map(|option| format!("backward-{dtype}-n2048-d{d}-{option}")));
        }
        names.extend([32, 128].map(|n| format!("backward-{dtype}-n{n}-d64-b64")));
    }
    names
}

/// The cases that a pattern of `*` and `?` chooses, or all.
pub(crate) fn items(pattern: Option<&str>) -> Result<Vec<Item>> {
    let chosen = |name: &str| pattern.is_none_or(|pattern| list::matches(pattern, name));
    let mut items = Vec::new();
    for name in names().iter().filter(|name| chosen(name)) {
        items.push(Item::Kernel(Box::new(Case::parse(name)?)));
    }
    items.extend(whole::names().filter(|name| chosen(name)).map(Item::Whole));
    match pattern {
        Some(pattern) if items.is_empty() => {
            bail!(
                "--case {pattern}: no case of the suite matches; see them with `regard bench list --suite`"
            )
        }
        _ => Ok(items),
    }
}

/// A file of rows, one a line, to which a run adds what it has not.
#[derive(Debug)]
pub(crate) struct Record {
    file: File,
    done: HashSet<(String, usize, String)>,
}

/// How a row of a record begins.
const BEGINS: &str = "{\"case\":";

/// What tells rows apart.
#[derive(Deserialize)]
struct RecordedCase {
    case: String,
    threads: usize,
    isa: String,
    #[serde(default)]
    error: Option<String>,
}

impl Record {
    /// Opens a record, or begins it. The end of a row that a killed run left unfinished goes; a file of anything else is left as it is.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let shown = path.display();
        let mut options = OpenOptions::new();
        let open = options.read(true).write(true).create(true).truncate(false).open(path);
        let mut file = open.with_context(|| format!("--out {shown}"))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).with_context(|| format!("--out {shown}"))?;
        let (whole, end) =
            bytes.split_at(bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1));
        let stranger = |line: usize| {
            format!(
                "--out {shown}: line {line} is not of a record of `regard bench`; give another file"
            )
        };
        let mut done = HashSet::new();
        let lines = whole.split(|b| *b == b'\n').enumerate();
        for (i, line) in lines.filter(|(_, line)| !line.is_empty()) {
            let known: RecordedCase =
                serde_json::from_slice(line).with_context(|| stranger(i + 1))?;
            // What failed is tried again.
            if known.error.is_none() {
                done.insert((known.case, known.threads, known.isa));
            }
        }
        let begun = end.len().min(BEGINS.len());
        if end[..begun] != BEGINS.as_bytes()[..begun] {
            bail!(stranger(whole.iter().filter(|b| **b == b'\n').count() + 1));
        }
        file.set_len(whole.len() as u64)?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self { file, done })
    }

    pub(crate) fn has(&self, case: &str, machine: Machine) -> bool {
        self.done.contains(&(case.into(), machine.threads, machine.isa.name().into()))
    }

    pub(crate) fn add(&mut self, row: &Row) -> Result<()> {
        let line = serde_json::to_string(row)? + "\n";
        self.file.write_all(line.as_bytes())?;
        Ok(self.file.flush()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_of_the_suite_is_one_and_stands_once() {
        let items = items(None).unwrap();
        let names: HashSet<_> = items.iter().map(Item::name).collect();
        assert_eq!(names.len(), items.len());
        assert!(super::items(Some("short-*")).unwrap().len() == 6);
        assert!(super::items(Some("none*")).unwrap_err().to_string().contains("list --suite"));
    }

    #[test]
    fn a_record_goes_on_where_it_was_cut_off() {
        let path = std::env::temp_dir().join(format!("regard-record-{}.jsonl", std::process::id()));
        let machine = Machine::detect().threads(1);
        let row = Row::timed("prefill-f32-n8-d8", machine, &[1.0]).unwrap();
        Record::open(&path).unwrap().add(&row).unwrap();
        std::fs::OpenOptions::new()
            .append(true)
            .open(&path)
            .unwrap()
            .write_all(b"{\"case\":\"cut")
            .unwrap();
        let mut record = Record::open(&path).unwrap();
        assert!(
            record.has("prefill-f32-n8-d8", machine)
                && !record.has("prefill-f32-n8-d8", machine.threads(2))
        );
        record.add(&Row::failed("prefill-f32-n9-d8", machine, "memory".into())).unwrap();
        let record = Record::open(&path).unwrap();
        assert!(!record.has("prefill-f32-n9-d8", machine));
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 2);
        std::fs::write(&path, "hello\n").unwrap();
        assert!(format!("{:#}", Record::open(&path).unwrap_err()).contains("line 1"));
        // A file of somebody else is left as it is.
        std::fs::write(&path, "hello").unwrap();
        assert!(format!("{:#}", Record::open(&path).unwrap_err()).contains("line 1"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "hello");
        std::fs::remove_file(&path).unwrap();
    }
}
