//! A toy that is learned in a second: letters, and the same backwards.

use std::path::{Path, PathBuf};

/// Writes the data, and settings with `more` in them; returns the file of the settings.
pub(crate) fn write(folder: &Path, more: &str) -> PathBuf {
    let _ = std::fs::remove_dir_all(folder);
    std::fs::create_dir_all(folder).expect("a folder");
    let words = ["ab", "bca", "cab", "dacb", "ebd", "fad", "gefa", "hag", "cafe", "beach"];
    let back = |word: &str| word.chars().rev().collect::<String>();
    let lines: String = words.iter().map(|word| format!("{word}\t{}\n", back(word))).collect();
    std::fs::write(folder.join("pairs.tsv"), lines).expect("pairs");
    let settings = format!(
        r#"
data.folder = {folder:?}
data.parts = [{{ train = "pairs.tsv", validation = "pairs.tsv", columns = [0, 1] }}]
vocabulary.kind = "char"
target_vocabulary.kind = "char"
{more}"#
    );
    let file = folder.join("toy.toml");
    std::fs::write(&file, settings).expect("settings");
    file
}
