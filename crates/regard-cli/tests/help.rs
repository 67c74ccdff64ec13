//! The help of every command, as it is printed by `-h` and `--help`, is in `tests/help`: a change of it is seen where it is reviewed.
//!
//! `REGARD_UPDATE_HELP=1 cargo test -p regard-cli --all-features --test help` writes the files anew.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

/// What the command prints with these words.
fn told(words: &[String], flag: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
    let output = command.args(words).arg(flag).output().expect("it starts");
    assert!(
        output.status.success(),
        "{words:?} {flag}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("text")
}

/// The subcommands that a help text lists.
fn subcommands(help: &str) -> Vec<String> {
    let list = help.split_once("\nCommands:\n").map_or("", |(_, rest)| rest);
    let lines = list.lines().take_while(|line| line.starts_with("  "));
    let names = lines.filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(Into::into).collect()
}

/// Adds the pages of a command and of all below it.
fn pages(words: &[String], all: &mut Vec<(String, String)>) {
    let [short, long] = ["-h", "--help"].map(|flag| told(words, flag));
    let call = [&["regard".to_string()], words].concat();
    all.push((
        format!("{}.txt", call.join("-")),
        format!("$ {0} -h\n{short}\n$ {0} --help\n{long}", call.join(" ")),
    ));
    for name in subcommands(&short) {
        pages(&[words, &[name]].concat(), all);
    }
}

/// The lines that only one of two texts has.
fn difference(old: &str, new: &str) -> String {
    let mut lines = String::new();
    for (sign, one, other) in [('-', old, new), ('+', new, old)] {
        let other: BTreeSet<&str> = other.lines().collect();
        for line in one.lines().filter(|line| !other.contains(line)) {
            let _ = writeln!(lines, "{sign} {line}");
        }
    }
    lines
}

#[test]
fn the_help_of_every_command_is_as_reviewed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/help");
    let mut all = Vec::new();
    pages(&[], &mut all);
    let names: BTreeSet<_> = all.iter().map(|(name, _)| name.clone()).collect();
    let there = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    let there = there.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let gone: Vec<_> = there.filter(|name| !names.contains(name)).collect();
    if std::env::var_os("REGARD_UPDATE_HELP").is_some() {
        std::fs::create_dir_all(&folder).expect("a folder");
        gone.iter().for_each(|name| std::fs::remove_file(folder.join(name)).expect("a file"));
        all.iter()
            .for_each(|(name, text)| std::fs::write(folder.join(name), text).expect("a file"));
        return;
    }
    let mut wrong = String::new();
    for (name, text) in &all {
        let old = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        if old != *text {
            let _ = write!(wrong, "{name}\n{}", difference(&old, text));
        }
    }
    assert!(
        wrong.is_empty() && gone.is_empty(),
        "help texts have changed; if they should: REGARD_UPDATE_HELP=1 cargo test -p regard-cli --all-features --test help\n\
         commands that are gone: {gone:?}\n{wrong}"
    );
}

#[test]
fn every_command_has_an_example() {
    let mut all = Vec::new();
    pages(&[], &mut all);
    assert!(all.len() > 30, "{}", all.len());
    for (name, text) in &all {
        assert!(text.contains("Examples:\n  "), "{name} has no example");
    }
}
