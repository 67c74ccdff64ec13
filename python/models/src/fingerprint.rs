//! What the results of a model depend on, as one number.

use regard::Isa;
use regard_cli::Shipped;
use sha2::{Digest, Sha256};
use std::io::Read;
use std::path::{Path, PathBuf};

/// Endings of the files of a folder that a model is read from: weights, configurations, vocabularies, templates.
const FILES: [&str; 7] = ["safetensors", "json", "txt", "spm", "model", "jinja", "gguf"];

/// Where the files of a model are.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Path(PathBuf),
    Shipped(&'static Shipped),
}

impl Source {
    /// The SHA-256 of the files by name, the version of Regard and the instruction set. Where a folder is does not count, nor what
    /// else is in it.
    pub(crate) fn fingerprint(&self) -> std::io::Result<String> {
        let mut all = Sha256::new();
        let mut add = |name: &str, digest: String| all.update(format!("{name} {digest}\n"));
        match self {
            Self::Shipped(model) => {
                for (name, bytes) in model.files() {
                    add(name, hex(Sha256::digest(bytes).as_ref()));
                }
            }
            Self::Path(path) if path.is_dir() => {
                for file in files(path)? {
                    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    add(&name, of_file(&file)?);
                }
            }
            // One file is what it is by any name.
            Self::Path(path) => add("model", of_file(path)?),
        }
        add("version", env!("CARGO_PKG_VERSION").to_owned());
        add("isa", isa().to_owned());
        Ok(hex(all.finalize().as_ref()))
    }
}

/// The instruction set that products and attention run on.
pub(crate) fn isa() -> &'static str {
    Isa::available().last().map_or("none", |isa| isa.name())
}

fn files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let ending = path.extension().and_then(|ending| ending.to_str());
        if path.is_file() && ending.is_some_and(|ending| FILES.contains(&ending)) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn of_file(path: &Path) -> std::io::Result<String> {
    let (mut file, mut hash) = (std::fs::File::open(path)?, Sha256::new());
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return Ok(hex(hash.finalize().as_ref()));
        }
        hash.update(&buffer[..n]);
    }
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
