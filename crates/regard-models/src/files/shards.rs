//! Weights of a folder: one safetensors file, or several by an index.

use super::folder::{WEIGHTS, listing, read_text};
use super::weights::Weights;
use crate::error::Error;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const INDEX: &str = "model.safetensors.index.json";

impl Weights {
    /// The tensors of a folder: `model.safetensors`, or the files of `model.safetensors.index.json`.
    pub fn open_folder(folder: &Path) -> Result<Self, Error> {
        let (single, index) = (folder.join(WEIGHTS), folder.join(INDEX));
        if single.is_file() {
            return Self::open(&single);
        }
        if index.is_file() {
            let shards = weight_map(&read_text(&index)?).map_err(|e| e.of(&index))?;
            return Self::shards(folder, &shards).map(|weights| weights.of_file(&index));
        }
        let old = |name: &str| folder.join(name).is_file();
        if old("pytorch_model.bin") || old("pytorch_model.bin.index.json") {
            let remedy = "AutoModel.from_pretrained(folder).save_pretrained(folder) of Transformers writes model.safetensors";
            let why = format!("pytorch_model.bin may run programs and is not read; {remedy}");
            return Err(Error::format("folder", why));
        }
        let wanted = format!("no {WEIGHTS} and no {INDEX}; there is {}", listing(folder));
        Err(Error::format("folder", wanted))
    }

    fn shards(folder: &Path, shards: &BTreeMap<String, BTreeSet<String>>) -> Result<Self, Error> {
        let mut all: Option<Self> = None;
        for (file, tensors) in shards {
            let path = folder.join(file);
            if !path.is_file() {
                let why = format!("{INDEX} names it, and it is not there; fetch all files");
                return Err(Error::file(&path, &why));
            }
            let own = Self::open(&path)?;
            if let Some(name) = tensors.iter().find(|name| own.shape(name).is_none()) {
                let why = format!("{INDEX} says that it is here; it is not");
                return Err(Error::format(format!("tensor `{name}`"), why).of(&path));
            }
            all = Some(match all {
                Some(all) => all.join(own).map_err(|e| e.of(&path))?,
                None => own,
            });
        }
        all.ok_or_else(|| Error::format(INDEX, "names no file"))
    }
}

/// The tensors of each file of an index.
fn weight_map(json: &str) -> Result<BTreeMap<String, BTreeSet<String>>, Error> {
    let wrong = |why: &str| Error::format("weight_map", why.to_owned());
    let value: Value = serde_json::from_str(json).map_err(|e| wrong(&e.to_string()))?;
    let map = value.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| wrong("an object of names of tensors and of files is wanted"))?;
    let mut shards: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (tensor, file) in map {
        // A file of this folder, not a path out of it.
        let plain = |name: &&str| !name.contains(['/', '\\']) && !name.starts_with('.');
        let file = file.as_str().filter(plain);
        let file = file.ok_or_else(|| wrong(&format!("`{tensor}`: a name of a file is wanted")))?;
        shards.entry(file.to_owned()).or_default().insert(tensor.clone());
    }
    Ok(shards)
}
