//! Checks rules of `ARCHITECTURE.md` and `CONTRIBUTING.md` against the sources.

#![expect(clippy::unwrap_used, reason = "a file that cannot be read has failed")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All Rust files in a directory of the workspace: path relative to the directory, and text.
fn sources(folder: &str) -> Vec<(String, String)> {
    files(folder, &["rs"])
}

/// [`sources`] for files with the given extensions.
pub(crate) fn files(folder: &str, endings: &[&str]) -> Vec<(String, String)> {
    fn collect(dir: &Path, endings: &[&str], found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("target") {
                collect(&path, endings, found);
            } else if path.extension().is_some_and(|ext| endings.iter().any(|end| ext == *end)) {
                found.push(path);
            }
        }
    }
    let (base, mut found) = (root().join(folder), Vec::new());
    collect(&base, endings, &mut found);
    let read = |path: PathBuf| {
        let name = path.strip_prefix(&base).unwrap().to_str().unwrap().to_owned();
        (name, fs::read_to_string(path).unwrap())
    };
    found.into_iter().map(read).collect()
}

#[test]
fn no_file_is_longer_than_800_lines() {
    let folders = ["crates", "fuzz", "examples", "book/code"];
    for (name, text) in folders.into_iter().flat_map(sources) {
        let lines = text.lines().count();
        assert!(lines <= 800, "{name} has {lines} lines");
    }
}

/// By how much a character changes the number of open brackets.
fn opens(c: char) -> i32 {
    i32::from("([{<".contains(c)) - i32::from(")]}>".contains(c))
}

/// Where the bracket that is open before a text closes.
fn closing(text: &str) -> usize {
    let mut depth = 1;
    let closes = |c: char| {
        depth += opens(c);
        depth == 0
    };
    text.find(closes).unwrap_or(text.len())
}

/// The number of parameters in a list. A tuple that is taken apart counts as its elements: it is no group that has a name.
fn parameters(list: &str) -> usize {
    let (mut count, mut rest) = (0, list.trim_start());
    while !rest.is_empty() {
        let tuple = rest.strip_prefix('(');
        count += tuple.map_or(1, |tuple| parameters(&tuple[..closing(tuple)]));
        let mut depth = 0;
        let ends = |c: char| {
            depth += opens(c);
            c == ',' && depth == 0
        };
        rest = rest.find(ends).map_or("", |comma| rest[comma + 1..].trim_start());
    }
    count
}

#[test]
fn a_function_of_the_engine_has_at_most_6_parameters() {
    let counts =
        ["", "&self, x: N,", "s: S, (a, (b, c)): (A, (B, C)), [d, e]: [D; 2]"].map(parameters);
    assert_eq!(counts, [0, 2, 5]);
    let (mut functions, mut long) = (0, Vec::new());
    for (file, text) in sources("crates/regard/src") {
        let text = text.replace("->", "  "); // no bracket
        for after in text.split("fn ").skip(1) {
            let (name, rest) = after.split_at(after.find(['<', '(']).unwrap_or(0));
            let generics = rest.strip_prefix('<');
            let rest = generics.map_or(rest, |generics| &generics[closing(generics) + 1..]);
            // Other text may have this word, such as a macro that makes functions.
            let is_name = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_');
            let Some(list) = rest.strip_prefix('(').filter(|_| is_name) else { continue };
            let count = parameters(&list[..closing(list)]);
            functions += 1;
            if count > 6 {
                long.push(format!("{file}: {name} has {count}"));
            }
        }
    }
    assert!(functions > 1000, "only {functions} found: has their form changed?");
    assert!(long.is_empty(), "parameters that belong together are a struct: {}", long.join(", "));
}

/// Modules in the map in `lib.rs`, lowest first.
fn map() -> Vec<String> {
    let text = fs::read_to_string(root().join("crates/regard/src/lib.rs")).unwrap();
    let entries = text.lines().filter_map(|line| line.strip_prefix("//   "));
    entries.map(|line| line.split_whitespace().next().unwrap().to_owned()).collect()
}

/// The place in the map of a module, by its path, or else of the folder that it lies in.
fn place(map: &[String], path: &[&str]) -> Option<usize> {
    let of = |name: String| map.iter().position(|known| *known == name);
    (1..=path.len().min(2)).rev().find_map(|n| of(path[..n].join("::")))
}

/// Paths that a text names as `crate::...`.
fn named(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for line in text.lines().map(str::trim_start).filter(|line| !line.starts_with("//")) {
        for after in line.split("crate::").skip(1) {
            let part = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
            let path: String = after.chars().take_while(|c| part(*c)).collect();
            let modules = path.split("::").take_while(|name| name.starts_with(char::is_lowercase));
            let modules: Vec<_> = modules.collect();
            if !modules.is_empty() {
                found.insert(modules.join("::"));
            }
        }
    }
    found
}

#[test]
fn a_module_imports_only_modules_that_stand_above_it_in_the_map() {
    let map = map();
    for (name, text) in sources("crates/regard/src") {
        let path: Vec<_> = name.trim_end_matches(".rs").split('/').collect();
        let path = path.strip_suffix(&["mod"]).unwrap_or(&path);
        let only_declares = path.len() == 1 && !text.contains("use ");
        if only_declares || path == ["lib"] || path == ["kernel", "no_amx"] {
            continue;
        }
        let own = place(&map, path).unwrap_or_else(|| panic!("the map of lib.rs lacks {name}"));
        assert!(!text.contains("use crate::{"), "{name}: one `use` for each module, to be read");
        let used = text.split("#[cfg(test)]\nmod ").next().unwrap(); // tests may import any module
        for other in named(used) {
            let at = place(&map, &other.split("::").collect::<Vec<_>>());
            let at = at.unwrap_or_else(|| panic!("{name}: the map lacks {other}"));
            assert!(at <= own, "{name} imports {other}, which stands below it in the map");
        }
    }
}

#[test]
fn the_folder_of_the_engine_shows_its_map() {
    let folder = root().join("crates/regard/src");
    let entries = fs::read_dir(folder).unwrap().count();
    assert!(entries <= 10, "{entries} entries: which folder does the new one belong to?");
}

#[test]
fn every_unsafe_block_names_the_check_that_makes_it_true() {
    // As listed in `ARCHITECTURE.md`.
    let places = [
        "machine/simd/x86/",
        "kernel/amx/product.rs",
        "kernel/amx/pack.rs",
        "kernel/forward/decode_amx.rs",
        "kernel/micro/",
        "tensor/view/",
        "plan/",
        "kernel/project.rs",
        "machine/memory.rs",
    ];
    let mut blocks = 0;
    for (name, text) in sources("crates/regard/src") {
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let is_unsafe = code.clone().any(|line| line.contains("unsafe "));
        let allowed = places.iter().any(|place| name.starts_with(place));
        assert!(!is_unsafe || allowed, "{name}: no place for unsafe code");
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        for (i, _) in lines.iter().enumerate().filter(|(_, line)| line.starts_with("// SAFETY:")) {
            let comment = lines[i..].iter().take_while(|line| line.starts_with("//"));
            let comment: String = comment.copied().collect();
            let names = comment.contains('`') || comment.contains("asserted above");
            assert!(names, "{name}:{}: name the check: {comment}", i + 1);
            blocks += 1;
        }
    }
    assert!(blocks > 40, "only {blocks} found: has the form of the comments changed?");
}

/// Links of the form [`name`](../path#L12).
fn links(page: &str) -> Vec<(String, String, usize)> {
    let parse = |link: &str| {
        let (name, rest) = link.split_once("`](../")?;
        let (path, rest) = rest.split_once("#L")?;
        Some((name.to_owned(), path.to_owned(), rest.split_once(')')?.0.parse().ok()?))
    };
    page.split("[`").skip(1).filter_map(parse).collect()
}

/// `REGARD_UPDATE_LINES=1` rewrites wrong line numbers to the nearest definition of the name.
#[test]
fn the_page_on_how_a_call_travels_names_the_right_lines() {
    let path = root().join("docs/how-one-call-travels.md");
    let mut page = fs::read_to_string(&path).unwrap();
    let (links, mut wrong) = (links(&page), Vec::new());
    assert!(links.len() > 20, "only {} links found: has their form changed?", links.len());
    for (name, file, line) in links {
        let text = fs::read_to_string(root().join(&file)).unwrap_or_else(|_| panic!("no {file}"));
        let item = name.rsplit("::").next().unwrap();
        let defines = |text: &str| {
            let kinds = ["fn", "struct", "enum", "trait", "const", "type", "mod", "macro_rules!"];
            kinds.iter().any(|kind| {
                let after = text.split(&format!("{kind} {item}")).nth(1);
                after.is_some_and(|after| {
                    !after.starts_with(|c: char| c.is_alphanumeric() || c == '_')
                })
            })
        };
        if text.lines().nth(line - 1).is_some_and(&defines) {
            continue;
        }
        let right: Vec<usize> = text
            .lines()
            .enumerate()
            .filter(|(_, text)| defines(text))
            .map(|(i, _)| i + 1)
            .collect();
        let nearest = right.iter().min_by_key(|right| right.abs_diff(line));
        if let (Some(right), Some(_)) = (nearest, std::env::var_os("REGARD_UPDATE_LINES")) {
            let link = |line: usize| format!("[`{name}`](../{file}#L{line})");
            page = page.replace(&link(line), &link(*right));
        } else {
            wrong.push(format!("{name} is not defined in {file}:{line}, but in lines {right:?}"));
        }
    }
    if std::env::var_os("REGARD_UPDATE_LINES").is_some() {
        fs::write(&path, page).unwrap();
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Private words of the first edition. The field's words stand in their place: backward, derivative, output gradients, decode,
/// key block, score tile, block loop, bf16 term, interleaved, transpose, prefetch, visible, selection, scratch; KV cache, generation
/// session, finish reason, callback, trainable model, selection metric, summary writer, baseline, parameter, fault, result, front end,
/// dropout, positions. American spelling.
const PRIVATE_WORDS: [&str; 69] = [
    "undo",
    "upstream",
    "few",
    "bundle",
    "piece",
    "walk",
    "way",
    "woven",
    "weave",
    "limb",
    "limbs",
    "meetings",
    "turn",
    "turned",
    "soon",
    "later",
    "odd",
    "picked",
    "wanted",
    "room",
    "here",
    "grows",
    "shrink",
    "weigh",
    "cargo",
    "handed",
    "asked",
    "sight",
    "hiding",
    "sees",
    "seen",
    "kept",
    "choice",
    "chosen",
    "joint",
    "division",
    "past",
    "pasts",
    "written",
    "ended",
    "ear",
    "watch",
    "watcher",
    "told",
    "hears",
    "judge",
    "judged",
    "board",
    "net",
    "rival",
    "knob",
    "knobs",
    "finding",
    "findings",
    "trial",
    "door",
    "doors",
    "dropping",
    "places",
    "harmless",
    "bare",
    "longest",
    "lowest",
    "colour",
    "center",
    "licence",
    "neighbours",
    "normaliser",
    "optimiser",
];

/// Words of [`PRIVATE_WORDS`] that are ordinary English in a sentence, and no name.
const ORDINARY_WORDS: [&str; 8] =
    ["chosen", "few", "later", "longest", "lowest", "neighbours", "past", "trial"];

/// Keys of settings and metrics of the first edition: lr, `min_lr`, `ema_decay`, .. stand in their place.
const PRIVATE_KEYS: [&str; 16] = [
    "average",
    "bare",
    "beams",
    "by",
    "clip",
    "fields",
    "half",
    "joint",
    "keep",
    "licence",
    "longest",
    "lowest",
    "optimiser",
    "rate",
    "start",
    "tied",
];

/// The words of a name: `next_rows`, `KeyBlock`.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for c in name.chars() {
        if c == '_' || c.is_uppercase() {
            words.push(String::new());
        }
        words.last_mut().unwrap().extend(c.to_lowercase().filter(|c| c.is_alphanumeric()));
    }
    words
}

fn is_private(name: &str) -> bool {
    words(name).iter().any(|word| PRIVATE_WORDS.contains(&word.as_str()))
}

/// A private word of a sentence.
fn private_word(sentence: &str) -> Option<String> {
    let lower = sentence.to_lowercase();
    let mut words = lower.split(|c: char| !c.is_alphanumeric());
    let private = |word: &&str| PRIVATE_WORDS.contains(word) && !ORDINARY_WORDS.contains(word);
    words.find(private).map(str::to_owned)
}

/// The name of a public item or of a public field that a line of Rust declares.
fn public_name(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub ")?;
    let mut parts = rest.split(|c: char| !c.is_alphanumeric() && c != '_');
    let kinds = ["fn", "struct", "enum", "trait", "type", "mod", "static"];
    match parts.clone().find(|part| kinds.contains(part)) {
        Some(kind) => parts.skip_while(|part| *part != kind).nth(1),
        None => parts.next().filter(|name| rest[name.len()..].starts_with(": ")),
    }
}

/// The name of a class or function that a line of Python declares, unless it is private.
fn python_name(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let rest = line.strip_prefix("def ").or_else(|| line.strip_prefix("class "))?;
    rest.split(|c: char| !c.is_alphanumeric() && c != '_')
        .next()
        .filter(|name| !name.starts_with('_'))
}

/// The headings of a Markdown page; code blocks have none.
fn headings(page: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    page.lines().filter(move |line| {
        in_code ^= line.starts_with("```");
        !in_code && line.starts_with('#')
    })
}

#[test]
fn public_names_and_headings_use_the_words_of_the_field() {
    let mut found = Vec::new();
    let rust = sources("crates").into_iter().filter(|(name, _)| name.contains("/src/"));
    for (file, text) in rust.chain(sources("python/src")) {
        let text = text.split("#[cfg(test)]\nmod ").next().unwrap();
        let names = text.lines().filter_map(public_name).filter(|name| is_private(name));
        found.extend(names.map(|name| format!("{file}: {name}")));
    }
    for (file, text) in files("python/regard", &["py", "pyi"]) {
        let names = text.lines().filter_map(python_name).filter(|name| is_private(name));
        found.extend(names.map(|name| format!("python/regard/{file}: {name}")));
    }
    // Help texts are the doc comments of arguments and commands.
    let arguments = |text: &str| text.contains("#[arg(") || text.contains("#[command(");
    for (file, text) in sources("crates/regard-cli/src").iter().filter(|(_, text)| arguments(text))
    {
        for line in text.lines().filter_map(|line| line.trim_start().strip_prefix("/// ")) {
            found.extend(private_word(line).map(|word| format!("{file}: `{word}` in {line}")));
        }
    }
    for folder in ["docs", "book/en/src"] {
        for (file, text) in files(folder, &["md"]) {
            // Errors of the engine are headings of their page.
            for line in headings(&text).filter(|line| !line.starts_with("### `Error::")) {
                let word = private_word(line);
                found.extend(word.map(|word| format!("{folder}/{file}: `{word}` in {line}")));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn settings_use_the_words_of_the_field() {
    let mut found = Vec::new();
    for name in ["settings.rs", "schedule.rs", "optim.rs", "train.rs", "validation.rs"] {
        let text = fs::read_to_string(root().join("crates/regard-train/src").join(name)).unwrap();
        let names = text.lines().filter_map(public_name).filter(|name| PRIVATE_KEYS.contains(name));
        found.extend(names.map(|key| format!("{name}: {key}")));
    }
    for (name, text) in files("crates/regard-train/presets", &["toml"]) {
        let keys = text.lines().filter_map(|line| line.split(['=', ']']).next());
        let keys = keys.map(|key| key.trim_matches(['[', ' ']));
        let old = keys.filter(|key| PRIVATE_KEYS.contains(key));
        found.extend(old.map(|key| format!("{name}: {key}")));
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
