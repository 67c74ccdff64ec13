//! Bodies of tests: whether a test returns before it asserts anything, and which names it mentions.
//!
//! Sources are formatted (`cargo fmt`, four spaces in Python), so an item ends with the first line that is indented as its first
//! line is: no parser is needed. A wrong cut makes a body shorter, so that a check fails and does not pass.

use std::collections::{BTreeMap, BTreeSet};

pub(super) fn words(text: &str) -> impl Iterator<Item = &str> + Clone {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// A name as it is compared: `KvCache` and `kv_cache` are the same.
pub(super) fn plain(name: &str) -> String {
    name.chars().filter(|c| *c != '_').flat_map(char::to_lowercase).collect()
}

/// An item of a file: a function, constant, structure or macro, with its attributes.
#[derive(Default)]
pub(super) struct Item {
    pub(super) body: String,
    pub(super) is_test: bool,
    /// Whether other files may name it by itself: no method, no item of an inner module, nothing private.
    pub(super) is_public: bool,
}

/// One source file.
pub(super) struct Source {
    /// Relative to the root of the workspace.
    pub(super) path: String,
    pub(super) items: BTreeMap<String, Item>,
    /// Items with code in their documentation, which is a test.
    pub(super) doc_tests: BTreeSet<String>,
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// The name of the item that begins in this line.
fn begins(line: &str, is_rust: bool) -> Option<&str> {
    let (text, kinds): (&str, &[&str]) = if is_rust {
        (line, &["fn", "const", "static", "struct", "enum", "trait", "type", "macro_rules"])
    } else {
        (line, &["def", "class"])
    };
    let text = text.trim_start();
    let mut names =
        words(text).skip_while(|word| ["pub", "crate", "super", "unsafe"].contains(word));
    let mut kind = names.next()?;
    let mut name = names.next()?;
    if kind == "const" && name == "fn" {
        (kind, name) = (name, names.next()?);
    }
    let starts = text.starts_with("pub") || text.starts_with("unsafe") || text.starts_with(kind);
    // A constant of Python: `CASES = [`.
    if !is_rust && indent(line) == 0 && kind.starts_with(char::is_uppercase) && text.contains(" = ")
    {
        return Some(kind);
    }
    (starts && kinds.contains(&kind)).then_some(name)
}

/// The line after the last one of an item that begins in `lines[first]`.
fn ends(lines: &[&str], first: usize, is_rust: bool) -> usize {
    let own = indent(lines[first]);
    let last = lines[first].trim_end();
    if is_rust && (last.ends_with('}') || last.ends_with(';')) {
        return first + 1;
    }
    for (i, line) in lines.iter().enumerate().skip(first + 1) {
        let closes = line.trim_start().starts_with(['}', ')', ']']);
        if line.trim().is_empty() || indent(line) > own {
            continue;
        }
        // `) -> Result<(), Error> {` and `) -> None:` end a signature; `}` ends an item of Rust, and any line one of Python.
        if closes && !line.trim_end().ends_with(['{', ':', '(', '[']) {
            return i + 1;
        }
        if !closes {
            return i;
        }
    }
    lines.len()
}

/// A text without its comments.
fn code(text: &str, is_rust: bool) -> String {
    let mark = if is_rust { "//" } else { "#" };
    let is_code = |line: &&str| !line.trim_start().starts_with(mark) || line.contains("#[");
    text.lines().filter(is_code).flat_map(|line| [line, "\n"]).collect()
}

/// The items of Rust below a comment with code in it.
fn documented(text: &str) -> impl Iterator<Item = &str> {
    let mut has_code = false;
    text.lines().filter_map(move |line| {
        let (line, had_code) = (line.trim_start(), has_code);
        let is_above = line.starts_with("///") || line.starts_with("#[");
        has_code = is_above && (has_code || line.starts_with("/// ```"));
        if had_code && !is_above { begins(line, true) } else { None }
    })
}

impl Source {
    pub(super) fn new(path: &str, text: &str) -> Self {
        let is_rust = path.ends_with(".rs");
        let doc_tests = documented(text).map(str::to_string).collect();
        let text = code(text, is_rust);
        let lines: Vec<&str> = text.lines().collect();
        let mut items: BTreeMap<String, Item> = BTreeMap::new();
        for first in 0..lines.len() {
            let Some(name) = begins(lines[first], is_rust) else { continue };
            let is_attribute = |line: &&&str| line.trim_start().starts_with(['@', '#']);
            let attributes = lines[..first].iter().rev().take_while(is_attribute).count();
            let body = lines[first - attributes..ends(&lines, first, is_rust)].join("\n");
            let is_test =
                if is_rust { body.contains("#[test]") } else { name.starts_with("test_") };
            let is_public =
                indent(lines[first]) == 0 && (!is_rust || lines[first].starts_with("pub"));
            let item = items.entry(name.into()).or_default();
            (item.is_test, item.is_public) = (item.is_test || is_test, item.is_public || is_public);
            // A name may be that of several methods.
            item.body.push_str(&body);
            item.body.push('\n');
        }
        Self { path: path.into(), items, doc_tests }
    }

    /// The words of an item, and of all items of this file that it mentions, and so on; compared as [`plain`].
    pub(super) fn mentions(&self, name: &str) -> BTreeSet<String> {
        let (mut seen, mut left) = (BTreeSet::new(), vec![name]);
        while let Some(name) = left.pop() {
            let item = self.items.get(name).map_or("", |item| item.body.as_str());
            // Not the name that follows `fn`: a test is not what it is called.
            let pairs = words(item).zip(words(item).skip(1));
            let inside = pairs.filter(|(before, _)| !matches!(*before, "fn" | "def"));
            for (_, word) in inside {
                if seen.insert(word) && self.items.contains_key(word) {
                    left.push(word);
                }
            }
        }
        seen.into_iter().map(plain).collect()
    }
}

/// How a test leaves before it has asserted anything, or may never begin.
pub(super) fn leaves_early(body: &str) -> Option<String> {
    let mut inner = usize::MAX;
    for line in body.lines() {
        // What a function inside of it returns is another matter.
        if indent(line) > inner {
            continue;
        }
        let is_function = ["def ", "fn "].iter().any(|kind| line.trim_start().starts_with(kind));
        let is_inner = is_function && indent(line) > indent(body);
        inner = if is_inner { indent(line) } else { usize::MAX };
        let named = |word: &str| words(line).any(|found| found == word);
        let skips = ["skip", "skipif", "importorskip", "ignore"].into_iter().any(named)
            && (line.contains("pytest.") || line.contains("#[ignore"));
        // A failure is not a pass: `return Err(..)` and `raise`.
        if skips || named("return") && !line.contains("return Err") {
            return Some(line.trim().to_string());
        }
        if line.contains("assert") || line.contains("raises(") {
            return None;
        }
    }
    None
}
