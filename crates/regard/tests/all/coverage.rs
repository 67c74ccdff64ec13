//! Checks `docs/coverage.md` against the tree: every requirement has a row; every file, test and page that it names exists; and
//! each test calls what its row names as code, and does not return before it has asserted something.

#![expect(clippy::unwrap_used, reason = "a file that cannot be read has failed")]

mod bodies;

use crate::house::{files, root};
use bodies::{Item, Source, leaves_early, plain, words};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

/// Groups of requirements: a letter, and the number of requirements.
const IDS: [(char, usize); 6] = [('A', 10), ('B', 9), ('C', 9), ('D', 5), ('E', 11), ('F', 10)];

/// One row of a table: its id (in the table of Python, `python` and its number), and its cells for code, test and page.
struct Row {
    id: String,
    cells: [String; 3],
}

fn rows(page: &str) -> Vec<Row> {
    let mut found = Vec::new();
    let (page, python) = page.split_once("\n## Python\n").unwrap_or((page, ""));
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
    let python = python.lines().filter(|line| line.starts_with("| ")).skip(1);
    for (i, line) in python.enumerate() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        assert_eq!(cells.len(), 4, "{line}: what, code, test and page are four cells");
        let cells = [1, 2, 3].map(|i| cells[i].to_string());
        found.push(Row { id: format!("python {}", i + 1), cells });
    }
    found
}

/// The crate that the paths of a row are relative to, before it names another.
fn first_of(id: &str) -> &'static str {
    match id.chars().next() {
        Some('C') => "regard-models",
        Some('E') => "regard-lab",
        Some('p') => "python",
        _ => "regard",
    }
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

/// A path that exists, relative to the root or to the crate that was named last.
fn resolve(path: &str, of: &str) -> Option<PathBuf> {
    let own = match of {
        "python" => PathBuf::from("python"),
        "examples" => PathBuf::from("examples"),
        name => PathBuf::from("crates").join(name),
    };
    let below = ["src", "tests", "tests/all", "regard", ""].map(|folder| own.join(folder));
    let mut bases = below.into_iter().chain([PathBuf::new()]).map(|base| base.join(path));
    bases.find(|path| root().join(path).exists())
}

/// Names found in the sources: capitalized words, and names that count as tests (tests, fuzz targets, goldens, rows of the
/// case table).
struct Names {
    words: BTreeSet<String>,
    tests: BTreeSet<String>,
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

fn is_crate(token: &str) -> bool {
    let is_name = |c: char| c.is_ascii_lowercase() || c == '-';
    token.starts_with("regard-") && token.chars().all(is_name)
        || matches!(token, "regard" | "python" | "examples")
}

/// Names in a cell that do not exist in the tree.
fn faults(cell: &str, kind: &str, first: &str, names: &Names) -> Vec<String> {
    let (mut of, mut found) = (first, Vec::new());
    for token in quoted(cell) {
        let simple = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if is_crate(token) {
            of = token;
        } else if is_path(token) {
            let missing = spread(token).into_iter().filter(|path| resolve(path, of).is_none());
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
        if first_of(&id) == "python" {
            continue;
        }
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
        for (cell, kind) in cells.iter().zip(["code", "test", "page"]) {
            let missing = faults(cell, kind, first_of(&id), &names).into_iter();
            found.extend(missing.map(|what| format!("{id}, {kind}: no {what}")));
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// Names that say nothing about what is called.
const TOO_COMMON: [&str; 12] = [
    "new", "run", "fmt", "default", "len", "name", "main", "mod", "lib", "all", "regard", "python",
];

/// What a row names as code.
struct Code {
    /// As [`plain`] writes them.
    names: BTreeSet<String>,
    /// Sources, whole or in folders.
    paths: BTreeSet<String>,
}

impl Code {
    /// Whether it is among what an item of a source mentions. A test that lies beside its code may call what is private there.
    fn is_in(&self, source: &Source, mentioned: &BTreeSet<String>) -> bool {
        let is_own = |(name, item): (&String, &Item)| {
            !item.is_test
                && !TOO_COMMON.contains(&name.as_str())
                && mentioned.contains(&plain(name))
        };
        !mentioned.is_disjoint(&self.names)
            || self.paths.contains(&source.path) && source.items.iter().any(is_own)
    }
}

/// All sources that contain tests, or what tests call.
struct Tree {
    sources: Vec<Source>,
}

impl Tree {
    fn new() -> Self {
        let folders = ["crates", "python", "examples", "fuzz"];
        let read = |folder| {
            let found = files(folder, &["rs", "py"]).into_iter();
            found.map(move |(path, text)| Source::new(&format!("{folder}/{path}"), &text))
        };
        Self { sources: folders.into_iter().flat_map(read).collect() }
    }

    fn below<'a>(&'a self, path: &'a str) -> impl Iterator<Item = &'a Source> {
        self.sources.iter().filter(move |source| source.path.starts_with(path))
    }

    /// The names in a cell for code: types, functions, verbs of the command, and of a file or folder its name and its items.
    fn named(&self, cell: &str, first: &str) -> Code {
        let (mut of, mut found, mut paths) = (first, BTreeSet::new(), BTreeSet::new());
        for token in quoted(cell) {
            if is_crate(token) {
                of = token;
            } else if is_path(token) {
                for path in spread(token) {
                    let path = resolve(&path, of).unwrap().to_str().unwrap().replace('\\', "/");
                    for source in self.below(path.trim_end_matches('/')) {
                        let name = source.path.trim_end_matches("/mod.rs").rsplit('/').next();
                        let name = name.unwrap().trim_end_matches(".rs").trim_end_matches(".py");
                        found.insert(plain(name));
                        paths.insert(source.path.clone());
                        let public =
                            source.items.iter().filter(|(_, item)| item.is_public && !item.is_test);
                        found.extend(public.map(|(name, _)| plain(name)));
                    }
                }
            } else {
                // `regard steps`; `Type::{a, b}`, of which the last parts count, but for `new`.
                let token = token.strip_prefix("regard ").unwrap_or(token);
                let last = token.rsplit("::").next().unwrap();
                let last = if last == "new" { token } else { last };
                found.extend(words(last).map(plain));
            }
        }
        found.retain(|name| !TOO_COMMON.contains(&name.as_str()));
        Code { names: found, paths }
    }

    /// Whether an item of a source, or what it calls there, mentions a name of the code.
    fn calls(source: &Source, name: &str, code: &Code) -> bool {
        code.is_in(source, &source.mentions(name))
    }

    /// Whether a file or folder has a test that is as it should be; true of what is no source, such as `web/check.mjs`.
    fn is_tested(&self, path: &str, code: &Code) -> bool {
        let tests = self.below(path.trim_end_matches('/')).flat_map(|source| {
            let tests = source.items.iter().filter(|(_, item)| item.is_test);
            tests.map(move |(name, item)| (source, name, item))
        });
        let mut good = tests.filter(|(source, name, item)| {
            leaves_early(&item.body).is_none() && Self::calls(source, name, code)
        });
        !(path.ends_with(".rs") || path.ends_with(".py")) || good.next().is_some()
    }

    /// Whether a golden is read by a test that calls the code, or a row of the case table is built where the code is mentioned.
    fn is_used(&self, token: &str, code: &Code) -> bool {
        let golden = root().join(format!("goldens/{token}.safetensors")).exists();
        let place = if golden { "crates/" } else { "crates/regard-testkit/src/" };
        let of = |source: &Source, name: &String| {
            let mentioned = source.mentions(name);
            (name == token || mentioned.contains(&plain(token))) && code.is_in(source, &mentioned)
        };
        self.below(place).any(|source| {
            let items = source.items.iter().filter(|(_, item)| item.is_test || !golden);
            items.map(|(name, _)| name).any(|name| of(source, name))
        })
    }

    /// What is wrong with one name in a cell for tests, given the names of the code.
    fn wrong(&self, token: &str, of: &str, code: &Code) -> Option<String> {
        let idle = || format!("`{token}` mentions nothing that the row names as code");
        if is_path(token) {
            let paths = spread(token).into_iter().filter_map(|path| resolve(&path, of));
            let mut paths = paths.map(|path| path.to_str().unwrap().replace('\\', "/"));
            return (!paths.all(|path| self.is_tested(&path, code))).then(idle);
        }
        let token = token.strip_prefix("way ").map_or(token, |way| words(way).next().unwrap());
        let is_test = |source: &&Source| source.items.get(token).is_some_and(|item| item.is_test);
        // Of the crate that is named, if it has one of this name.
        let own = if of == "python" { "python/".into() } else { format!("crates/{of}/") };
        let own = if self.below(&own).any(|source| is_test(&source)) { own } else { String::new() };
        let mut tests = self.below(&own).filter(is_test).peekable();
        if tests.peek().is_some() {
            return tests.find_map(|source| {
                let how = leaves_early(&source.items[token].body);
                let early = how.map(|how| format!("`{token}` may leave before it asserts: {how}"));
                early.or_else(|| (!Self::calls(source, token, code)).then(idle))
            });
        }
        let target = format!("fuzz/fuzz_targets/{token}.rs");
        if let Some(target) = self.sources.iter().find(|source| source.path == target) {
            let called = target.items.keys().any(|name| Self::calls(target, name, code));
            return (!called).then(idle);
        }
        (!self.is_used(token, code)).then(idle)
    }
}

/// What is wrong with the tests of a row.
fn idle(tree: &Tree, Row { id, cells: [code, test, _] }: &Row) -> Vec<String> {
    let named = tree.named(code, first_of(id));
    let (mut of, mut found) = (first_of(id), Vec::new());
    // Outside of quotes, `table` and `fuzz` are all of their rows and targets.
    let unquoted: String = test.split('`').step_by(2).collect();
    for (word, place) in [("table", "crates/regard-testkit/src/"), ("fuzz", "fuzz/")] {
        let is_named = words(&unquoted).any(|found| found == word);
        let mut items = tree.below(place).flat_map(|s| s.items.keys().map(move |name| (s, name)));
        if is_named && !items.any(|(source, name)| Tree::calls(source, name, &named)) {
            found.push(format!("{id}: {word} mentions nothing that the row names as code"));
        }
    }
    for token in quoted(test) {
        if is_crate(token) {
            of = token;
        } else if test.contains(&format!("doc test of `{token}`")) {
            let has = tree.sources.iter().any(|source| source.doc_tests.contains(token));
            found.extend((!has).then(|| format!("{id}: `{token}` has no doc test")));
        } else if is_path(token) || !token.contains(['/', '*', '-']) && !token.contains("regard ") {
            found.extend(tree.wrong(token, of, &named).map(|what| format!("{id}: {what}")));
        }
    }
    found
}

#[test]
fn a_test_calls_what_its_row_names_and_does_not_return_early() {
    let page = fs::read_to_string(root().join("docs/coverage.md")).unwrap();
    let tree = Tree::new();
    let found: Vec<String> = rows(&page).iter().flat_map(|row| idle(&tree, row)).collect();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// A test that is as it should be, and five that are not.
const SAMPLE: &str = r#"
fn helper() -> f32 {
    attend(1.0)
}

/// ```
/// assert_eq!(attended(), 1.0);
/// ```
#[must_use]
pub fn attended() -> f32 {
    1.0
}

#[test]
fn good() {
    let x = helper();
    if x > 2.0 {
        assert!(x < 3.0);
        return;
    }
    assert!(x > 1.0);
}

#[test]
fn returns() {
    let Some(x) = model() else { return };
    assert_eq!(attend(x), 1.0);
}

#[test]
fn returns_if() {
    if attend(1.0) > 0.0 {
        return;
    }
    assert!(attend(1.0) > 0.0);
}

#[test]
#[ignore = "slow"]
fn ignored() {
    assert!(attend(1.0) > 0.0);
}

// It calls attend, it says.
#[test]
fn attend_is_right() {
    assert_eq!(other(), 1.0);
}
"#;

/// The same in Python.
const SAMPLE_OF_PYTHON: &str = "
def helper(
    x,
) -> float:
    return regard.attend(x)


def test_good():
    assert helper(1.0) == 1.0


@pytest.mark.skipif(True, reason='none')
def test_marked():
    assert helper(1.0) == 1.0


def test_skipped():
    torch = pytest.importorskip('torch')
    assert helper(1.0) == 1.0


def test_idle():
    assert other()
";

#[test]
fn a_test_that_returns_early_or_calls_something_else_is_found() {
    let tree = Tree {
        sources: vec![
            Source::new("crates/regard/tests/all/sample.rs", SAMPLE),
            Source::new("python/tests/test_sample.py", SAMPLE_OF_PYTHON),
        ],
    };
    let said = |test: &str| {
        let cells = ["`Plan::attend`".into(), format!("`{test}`"), String::new()];
        idle(&tree, &Row { id: "A1".into(), cells }).join("\n")
    };
    assert_eq!(said("good"), "");
    assert_eq!(said("test_good"), "");
    assert_eq!(said("good`, doc test of `helper"), "A1: `helper` has no doc test");
    assert_eq!(said("good`, doc test of `attended"), "");
    assert!(said("good`, fuzz `good").contains("fuzz mentions nothing"));
    for test in ["returns", "returns_if", "ignored", "test_marked", "test_skipped"] {
        assert!(said(test).contains("may leave before it asserts"), "{test}: {}", said(test));
    }
    for test in ["attend_is_right", "test_idle", "no_such_test"] {
        assert!(said(test).contains("mentions nothing"), "{test}: {}", said(test));
    }
}
