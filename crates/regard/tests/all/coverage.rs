//! Checks `docs/coverage.md` against the tree: every requirement has a row, and every file, test and page that it names
//! exists.

#![expect(clippy::unwrap_used, reason = "a file that cannot be read has failed")]

use crate::house::{files, root};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

/// Groups of requirements: a letter, and the number of requirements.
const IDS: [(char, usize); 6] = [('A', 10), ('B', 9), ('C', 9), ('D', 4), ('E', 11), ('F', 10)];

/// One row of a table: its id, and its cells for code, test and page.
struct Row {
    id: String,
    cells: [String; 3],
}

fn rows(page: &str) -> Vec<Row> {
    let mut found = Vec::new();
    for line in page.lines().filter(|line| line.starts_with("| ")) {
        // A bar inside a formula is written `\|`.
        let line = line.replace("\\|", "/");
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let id = cells[0];
        let digits = id.get(1..).unwrap_or("");
        if !id.starts_with(|c: char| c.is_ascii_uppercase()) || digits.parse::<usize>().is_err() {
            continue;
        }
        assert_eq!(cells.len(), 5, "{id}: id, what, code, test and page are five cells");
        let cells = [2, 3, 4].map(|i| cells[i].to_string());
        found.push(Row { id: id.to_string(), cells });
    }
    found
}

/// The texts between backquotes.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// Expands `a/{b,c}.rs` to `a/b.rs` and `a/c.rs`.
fn spread(path: &str) -> Vec<String> {
    let Some((before, rest)) = path.split_once('{') else { return vec![path.to_string()] };
    let (inside, after) = rest.split_once('}').unwrap();
    inside.split(',').map(|one| format!("{before}{}{after}", one.trim())).collect()
}

fn is_path(word: &str) -> bool {
    let ends = [".rs", ".py", ".md", ".mjs", ".toml", ".json", "/"];
    ends.iter().any(|end| word.ends_with(end)) && !word.contains(' ') || word.contains(".rs ")
}

/// Whether a path exists, relative to the root or to the crate that was named last.
fn resolves(path: &str, of: &str) -> bool {
    let own = match of {
        "python" => PathBuf::from("python"),
        "examples" => PathBuf::from("examples"),
        name => PathBuf::from("crates").join(name),
    };
    let below =
        ["", "src", "tests", "tests/all", "regard"].map(|folder| root().join(&own).join(folder));
    below.iter().chain([&root()]).any(|base| base.join(path).exists())
}

/// Names found in the sources: capitalized words, and names that count as tests (tests, fuzz targets, goldens, rows of the
/// case table).
struct Names {
    words: BTreeSet<String>,
    tests: BTreeSet<String>,
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
}

fn names() -> Names {
    let mut names = Names { words: BTreeSet::new(), tests: BTreeSet::new() };
    for folder in ["crates", "python", "examples", "book/code", "fuzz/fuzz_targets"] {
        for (path, text) in files(folder, &["rs", "py"]) {
            let table = path.starts_with("regard-testkit/");
            for word in words(&text) {
                if word.starts_with(char::is_uppercase) {
                    names.words.insert(word.to_string());
                } else if table || word.starts_with("test_") {
                    names.tests.insert(word.to_string());
                }
            }
            for test in text.split("#[test]").skip(1) {
                let name = words(test).skip_while(|word| *word != "fn").nth(1);
                names.tests.extend(name.map(str::to_string));
            }
        }
    }
    for folder in ["fuzz/fuzz_targets", "goldens"] {
        for entry in fs::read_dir(root().join(folder)).unwrap().flatten() {
            let path = entry.path();
            names.tests.insert(path.file_stem().unwrap().to_str().unwrap().to_string());
        }
    }
    names
}

/// Names in a cell that do not exist in the tree.
fn faults(cell: &str, kind: &str, first: &str, names: &Names) -> Vec<String> {
    let (mut of, mut found) = (first, Vec::new());
    for token in quoted(cell) {
        let simple = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if token == "regard"
            || token.starts_with("regard-")
            || matches!(token, "python" | "examples")
        {
            of = token;
        } else if is_path(token) {
            let missing = spread(token).into_iter().filter(|path| !resolves(path, of));
            found.extend(missing.map(|path| format!("{path} in {of}")));
        } else if kind == "test" && token.chars().all(simple) && !names.tests.contains(token) {
            found.push(format!("test {token}"));
        } else if kind == "code" {
            let named =
                words(token).filter(|word| word.starts_with(char::is_uppercase) && word.len() > 2);
            found.extend(named.filter(|word| !names.words.contains(*word)).map(str::to_string));
        }
    }
    let decisions: Vec<String> = fs::read_dir(root().join("docs/adr"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    for number in
        cell.split([' ', ',', ';', '(', ')']).filter(|w| w.len() == 4 && w.starts_with('0'))
    {
        if !decisions.iter().any(|file| file.starts_with(number)) {
            found.push(format!("decision {number}"));
        }
    }
    found
}

#[test]
fn every_requirement_has_a_row_with_code_a_test_and_a_page() {
    let page = fs::read_to_string(root().join("docs/coverage.md")).unwrap();
    let mut found: BTreeMap<String, usize> = BTreeMap::new();
    for Row { id, cells } in rows(&page) {
        *found.entry(id.clone()).or_default() += 1;
        for (cell, name) in cells.iter().zip(["code", "test", "page"]) {
            assert!(!cell.is_empty() && !cell.contains("not yet"), "{id} has no {name}: {cell:?}");
        }
    }
    for (letter, count) in IDS {
        for i in 1..=count {
            assert!(found.remove(&format!("{letter}{i}")).is_some(), "{letter}{i} is missing");
        }
    }
    assert!(found.is_empty(), "no requirement has these ids: {found:?}");
}

#[test]
fn what_coverage_names_is_there() {
    let page = fs::read_to_string(root().join("docs/coverage.md")).unwrap();
    let names = names();
    let mut found = Vec::new();
    for Row { id, cells } in rows(&page) {
        let first = match id.chars().next() {
            Some('C') => "regard-models",
            Some('E') => "regard-lab",
            _ => "regard",
        };
        for (cell, kind) in cells.iter().zip(["code", "test", "page"]) {
            let missing = faults(cell, kind, first, &names).into_iter();
            found.extend(missing.map(|what| format!("{id}, {kind}: no {what}")));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
