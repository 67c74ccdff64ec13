//! `regard data`: what the presets learn from, under which licence, and whether it is here.

use super::args::DataVerb;
use crate::args::Format;
use anyhow::{Result, anyhow, bail};
use regard_train::{PRESETS, Settings};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

/// A data set, in a folder of its name.
struct Set {
    name: &'static str,
    what: &'static str,
    licence: &'static str,
    how: &'static str,
}

const CLONE: &str = "work in a clone of Regard's repository, which contains it: git clone https://github.com/regard-attention/regard";

const SETS: [Set; 5] = [
    Set {
        name: "tatoeba-zh-en",
        what: "29,055 pairs of Chinese and English sentences",
        licence: "CC BY 2.0 FR",
        how: CLONE,
    },
    Set {
        name: "chinese-poetry",
        what: "18,261 poems of the Tang dynasty; 11,200 poems of four genres",
        licence: "MIT; the poems are in the public domain",
        how: CLONE,
    },
    Set {
        name: "tinyshakespeare",
        what: "1,115,394 characters of Shakespeare",
        licence: "public domain",
        how: CLONE,
    },
    Set {
        name: "movie-reviews-polarity2",
        what: "2,000 film reviews, half of them positive",
        licence: "CC BY 4.0",
        how: CLONE,
    },
    Set {
        name: "multi30k-ende",
        what: "29,000 image captions in English and German",
        licence: "none; non-commercial research and education",
        how: "in a clone of Regard's repository, run data/get-multi30k, which needs Python 3, git and the internet",
    },
];

impl Set {
    /// Where it is, if it is.
    fn path(&self) -> Option<PathBuf> {
        let folder = Path::new("data").join(self.name);
        folder.is_dir().then_some(folder)
    }

    /// The presets that read a file of its folder.
    fn presets(&self) -> Result<Vec<&'static str>> {
        let mut found = Vec::new();
        for (name, text) in PRESETS {
            let data = Settings::new(text, &[])?.data;
            let files = data.parts.iter().map(|part| Path::new(&data.folder).join(&part.train));
            if files.into_iter().any(|file| file.parent().is_some_and(|at| at.ends_with(self.name)))
            {
                found.push(*name);
            }
        }
        Ok(found)
    }
}

pub(crate) fn run(what: Option<&DataVerb>, format: Format) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if let Some(DataVerb::Get { name }) = what {
        let set = SETS.iter().find(|set| set.name == name).ok_or_else(|| {
            let names = SETS.map(|set| set.name).join(", ");
            anyhow!("{name}: unknown data set; known data sets: {names}")
        })?;
        let Some(path) = set.path() else {
            bail!("data/{name} is not here; to get it: {}", set.how)
        };
        return Ok(writeln!(out, "{}", path.display())?);
    }
    for set in &SETS {
        let Set { name, what, licence, how } = set;
        let (presets, path) = (set.presets()?, set.path());
        if format == Format::Json {
            let line = json!({
                "name": name, "what": what, "licence": licence, "presets": presets, "path": path, "how": how,
            });
            writeln!(out, "{line}")?;
            continue;
        }
        writeln!(out, "{name:24} {what}")?;
        writeln!(out, "{:24} license: {licence}", "")?;
        writeln!(out, "{:24} presets: {}", "", presets.join(", "))?;
        match path {
            Some(path) => writeln!(out, "{:24} here: {}", "", path.display())?,
            None => writeln!(out, "{:24} to get it: {how}", "")?,
        }
    }
    Ok(())
}
