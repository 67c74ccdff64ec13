//! The directory of a run: what it was asked for, how it went, where it stands, and the model that it leaves behind.
//!
//! ```text
//! settings.toml         all settings, defaults too
//! tokens.json           vocabularies, as they were made for this run
//! target_tokens.json
//! metrics.jsonl         a line for each step that was logged, and for each validation
//! times.jsonl           how long it took
//! last.safetensors      weights, moments, where in the data: what --resume goes on from
//! best/step-*.safetensors
//! model/                what `regard translate`, `generate`, `classify`, `look` open
//! ```
//!
//! Every file is written beside its place, flushed to the disk and moved there, so a run that is killed at any moment can go on. All but
//! `times.jsonl` are the same bytes for every number of threads and ranks, and for a run that was killed and resumed.

use crate::corpus::Vocabularies;
use crate::data::text;
use crate::error::Error;
use crate::optim::{AdamW, Slot, Snapshot};
use crate::settings::Settings;
use regard_models::files::{Config, Tokens, WeightFormat, Weights, save, save_as};
use regard_scope::{is_temporary, remove_temporaries, write_atomically};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

const SETTINGS: &str = "settings.toml";
const TOKENS: &str = "tokens.json";
const TARGET_TOKENS: &str = "target_tokens.json";
const METRICS: &str = "metrics.jsonl";
const TIMES: &str = "times.jsonl";
const LAST: &str = "last.safetensors";
const BEST: &str = "best";
const MODEL: &str = "model";
const WEIGHTS: &str = "model.safetensors";
/// What vocabularies are called in the folder of a model.
const TABLE: &str = "tokenizer.json";
const SOURCE_TABLE: &str = "source_tokenizer.json";
const TARGET_TABLE: &str = "target_tokenizer.json";
/// The entries of a checkpoint that say where the run stands, and what it was asked for.
const ENTRY: &str = "progress";
const ASKED: &str = "settings";

/// Where a run stands: with the weights all that it goes on from. Chance has no state: it follows from the seed and the step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// Steps that were made.
    pub step: u64,
    /// The epoch, from 0.
    pub epoch: u64,
    /// The next batch of the epoch.
    pub batch: usize,
    /// Tokens that were read and written.
    pub tokens: u64,
    /// The best weights so far, the very best first.
    pub best: Vec<BestCheckpoint>,
    /// Validations since the last that was better.
    pub waited: u64,
    /// What is to be in the next line of metrics.
    pub since: IntervalSums,
    /// Bytes of `metrics.jsonl` that belong to all this.
    pub metrics: u64,
    /// What it learned from when it began: [`crate::Corpus::fingerprints`].
    pub data: u64,
    /// What it was judged by.
    pub validation: u64,
}

/// Sums since the last line of metrics.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IntervalSums {
    /// Of losses, each times its answers.
    #[serde(with = "bits")]
    pub loss: f64,
    /// Of answers.
    pub answers: u64,
    /// Of tokens.
    pub tokens: u64,
}

/// A line of `times.jsonl`: what differs between runs of the same settings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// After which step.
    pub step: u64,
    /// Seconds of work since the run began.
    pub seconds: f64,
    /// Tokens that were read and written in a second since the last line of metrics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
}

/// Weights that were kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BestCheckpoint {
    /// Of which step.
    pub step: u64,
    /// What they were judged by; higher is better.
    #[serde(with = "bits")]
    pub value: f64,
}

/// A number as the 16 hexadecimal digits of its bits. `serde_json` may read a decimal number as its neighbour, and a best score that comes
/// back one unit lower makes the next equal one look better: the run would end with another model.
mod bits {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(x: &f64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&format!("{:016x}", x.to_bits()))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        let text = String::deserialize(from)?;
        let bits = u64::from_str_radix(&text, 16).ok().filter(|_| text.len() == 16);
        let wrong = || D::Error::custom(format!("`{text}` is not 16 hexadecimal digits"));
        bits.map(f64::from_bits).ok_or_else(wrong)
    }
}

/// A checkpoint as it stands in its file.
#[derive(Debug)]
pub struct Checkpoint {
    pub(crate) file: PathBuf,
    weights: Weights,
    pub(crate) progress: Progress,
    pub(crate) settings: Settings,
}

impl Checkpoint {
    /// The bytes of its file.
    pub(crate) fn from_bytes(file: PathBuf, bytes: Vec<u8>) -> Result<Self, Error> {
        let wrong = |e: &dyn std::fmt::Display| {
            let remedy = "put a copy of the file back, or begin anew";
            Error::file(&file, &format!("this is no checkpoint of this version: {e}; {remedy}"))
        };
        let weights = Weights::safetensors(bytes).map_err(|e| wrong(&e))?;
        let entry = |name: &str| {
            let text = weights.metadata().get(name);
            text.ok_or_else(|| wrong(&format_args!("it has no entry `{name}`")))
        };
        let progress = serde_json::from_str(entry(ENTRY)?).map_err(|e| wrong(&e))?;
        let settings = Settings::new(entry(ASKED)?, &[]).map_err(|e| wrong(&e))?;
        Ok(Self { file, weights, progress, settings })
    }

    /// What it holds, for the parameters of an optimizer.
    pub(crate) fn restore(self, fresh: &AdamW) -> Result<(AdamW, Progress), Error> {
        let Self { file, mut weights, progress, .. } = self;
        let mut list = |kind: &str| {
            let mut all = Vec::with_capacity(fresh.value.len());
            for (path, Slot { shape, .. }) in &fresh.slots {
                let name = format!("{kind}.{path}");
                let list = weights.take(&name, shape).map_err(|e| Error::file(&file, &e))?;
                if let Some(x) =
                    list.iter().find(|x| !x.is_finite() || (kind == "square" && **x < 0.0))
                {
                    return Err(Error::file(&file, &damaged(&name, x, "a finite number")));
                }
                all.extend(list);
            }
            Ok(all)
        };
        let (value, mean, square) = (list("value")?, list("mean")?, list("square")?);
        let average = if fresh.average.is_empty() { vec![] } else { list("average")? };
        let lists = [value, mean, square, average];
        let slots = fresh.slots.clone();
        Ok((AdamW::restored(fresh.settings, progress.step, slots, lists), progress))
    }

    /// Refuses numbers that no run leaves behind: those of a file that was changed, or damaged where its format cannot tell. `batches`
    /// are those of its epoch, and `accumulate` of them make a step.
    pub fn check(&self, batches: usize, accumulate: usize) -> Result<(), Error> {
        /// Tokens of the longest run that anybody could wait for.
        const TOKENS: u64 = 1 << 60;
        let p = &self.progress;
        let made = p.step.saturating_mul(accumulate as u64);
        let mut counts = vec![
            ("step", p.step, 1 << 60),
            ("epoch", p.epoch, made),
            ("batch", p.batch as u64, batches.saturating_sub(1) as u64),
            ("tokens", p.tokens, TOKENS),
            ("since.tokens", p.since.tokens, TOKENS),
            ("since.answers", p.since.answers, TOKENS),
            ("waited", p.waited, p.step),
        ];
        counts.extend(p.best.iter().map(|best| ("best.step", best.step, p.step)));
        if let Some((field, found, most)) = counts.iter().find(|(_, found, most)| found > most) {
            let wanted = format!("at most {most} in this run");
            return Err(Error::file(&self.file, &damaged(field, found, &wanted)));
        }
        let mut numbers = vec![("since.loss", p.since.loss)];
        numbers.extend(p.best.iter().map(|best| ("best.value", best.value)));
        if let Some((field, found)) = numbers.iter().find(|(_, found)| !found.is_finite()) {
            return Err(Error::file(&self.file, &damaged(field, found, "a finite number")));
        }
        match p.best.windows(2).find(|two| two[0].value < two[1].value) {
            Some(two) => {
                let wanted = format!("at most {}, the one before it", two[0].value);
                Err(Error::file(&self.file, &damaged("best.value", &two[1].value, &wanted)))
            }
            None => Ok(()),
        }
    }
}

/// The position of weights among the best, and those that they put out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Kept {
    pub(crate) position: usize,
    pub(crate) dropped: Vec<BestCheckpoint>,
}

impl Progress {
    /// Keeps weights as the best of so many, the list in order, if they are.
    pub(crate) fn keep(&mut self, best: BestCheckpoint, most: usize) -> Option<Kept> {
        let position = self.best.iter().filter(|own| own.value >= best.value).count();
        if position >= most {
            return None;
        }
        self.best.insert(position, best);
        Some(Kept { position, dropped: self.best.split_off(most.min(self.best.len())) })
    }
}

fn damaged(field: &str, found: &dyn std::fmt::Display, wanted: &str) -> String {
    format!("{field} is {found}, and must be {wanted}; put a copy of the file back, or begin anew")
}

/// An open run.
#[derive(Debug)]
pub struct Run {
    path: PathBuf,
    metrics: BufWriter<File>,
    written: u64,
}

fn at<T>(path: &Path, result: std::io::Result<T>) -> Result<T, Error> {
    result.map_err(|e| Error::file(path, &e))
}

impl Run {
    /// A new directory, this process's alone before anything is written. One that has something in it is refused.
    pub fn create(path: &Path, settings: &Settings) -> Result<Self, Error> {
        Self::refuse_full(path)?;
        at(path, std::fs::create_dir_all(path))?;
        let run = Self::open(path)?;
        // Another process may have been here between the look and the lock.
        Self::refuse_full(path)?;
        write(&path.join(SETTINGS), settings.to_toml()?.as_bytes())?;
        Ok(run)
    }

    /// Refuses a directory that has something in it, but what a process has left that was killed before its first write.
    pub fn refuse_full(path: &Path) -> Result<(), Error> {
        if !path.exists() {
            return Ok(());
        }
        for entry in at(path, std::fs::read_dir(path))? {
            let entry = at(path, entry)?;
            let name = entry.file_name();
            let empty = name == METRICS && entry.metadata().is_ok_and(|there| there.len() == 0);
            if !empty && !name.to_str().is_some_and(is_temporary) {
                let why = "the directory is not empty; choose another, or use --resume";
                return Err(Error::file(path, &why));
            }
        }
        Ok(())
    }

    /// The settings of a run that was begun.
    pub fn settings(path: &Path) -> Result<Settings, Error> {
        let file = path.join(SETTINGS);
        if !file.exists() {
            return Err(Error::file(&file, &"not found; is this a run directory?"));
        }
        Settings::new(&text(&file)?, &[]).map_err(|e| Error::file(&file, &e))
    }

    /// A directory that was made before, for this process alone. Half-written files of one that was killed are removed.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = path.join(METRICS);
        let metrics = at(&file, OpenOptions::new().create(true).append(true).open(&file))?;
        match metrics.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let why = "another process is training there; wait for it, or stop it";
                return Err(Error::file(path, &why));
            }
            Err(TryLockError::Error(e)) => {
                let why = format!("cannot be locked: {e}; choose a directory on another disk");
                return Err(Error::file(&file, &why));
            }
        }
        for folder in [path, &path.join(BEST), &path.join(MODEL)] {
            remove_temporaries(folder);
        }
        let written = at(&file, metrics.metadata())?.len();
        Ok(Self { path: path.into(), metrics: BufWriter::new(metrics), written })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Vocabularies, if they were made.
    pub fn vocabularies(&self) -> Result<Option<Vocabularies>, Error> {
        let read = |name: &str| {
            let file = self.path.join(name);
            if file.exists() { table(&file).map(Some) } else { Ok(None) }
        };
        // The target's is written first, so where there is one of the source there are all.
        let target = read(TARGET_TOKENS)?;
        Ok(read(TOKENS)?.map(|tokens| Vocabularies { tokens, target }))
    }

    /// Keeps vocabularies.
    pub fn save_vocabularies(&self, vocabularies: &Vocabularies) -> Result<(), Error> {
        if let Some(target) = &vocabularies.target {
            write(&self.path.join(TARGET_TOKENS), target)?;
        }
        write(&self.path.join(TOKENS), &vocabularies.tokens)
    }

    /// Adds a line to the metrics.
    pub fn log(&mut self, line: &impl Serialize) -> Result<(), Error> {
        let file = self.path.join(METRICS);
        let mut line = serde_json::to_string(line).map_err(|e| Error::file(&file, &e))?;
        line.push('\n');
        at(&file, self.metrics.write_all(line.as_bytes()).and_then(|()| self.metrics.flush()))?;
        self.written += line.len() as u64;
        Ok(())
    }

    /// Adds a line to the times.
    pub fn log_times(&self, times: &Times) -> Result<(), Error> {
        let file = self.path.join(TIMES);
        let mut line = serde_json::to_string(times).map_err(|e| Error::file(&file, &e))?;
        line.push('\n');
        let open = OpenOptions::new().create(true).append(true).open(&file);
        at(&file, open.and_then(|mut open| open.write_all(line.as_bytes())))
    }

    /// Seconds of work up to a step, by the times, of which those of later steps are forgotten. Times that are lost or damaged stop no run.
    pub(crate) fn seconds(&self, step: u64) -> f64 {
        let file = self.path.join(TIMES);
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let (mut length, mut seconds) = (0, 0.0);
        for line in text.split_inclusive('\n') {
            match serde_json::from_str::<Times>(line) {
                Ok(times) if times.step <= step && line.ends_with('\n') => {
                    seconds = times.seconds;
                    length += line.len();
                }
                _ => break,
            }
        }
        let _ =
            OpenOptions::new().write(true).open(&file).and_then(|open| open.set_len(length as u64));
        seconds
    }

    /// Keeps everything that the run goes on from.
    pub fn save_checkpoint(
        &mut self,
        settings: &Settings,
        optimizer: &AdamW,
        progress: &mut Progress,
    ) -> Result<(), Error> {
        at(&self.path.join(METRICS), self.metrics.get_ref().sync_all())?;
        progress.metrics = self.written;
        let mut tensors = Vec::new();
        let AdamW { slots, value, mean, square, average, .. } = optimizer;
        for (path, Slot { shape, range }) in slots {
            let lists =
                [("value", value), ("mean", mean), ("square", square), ("average", average)];
            for (kind, list) in lists.into_iter().filter(|(_, list)| !list.is_empty()) {
                tensors.push((format!("{kind}.{path}"), shape.clone(), &list[range.clone()]));
            }
        }
        let file = self.path.join(LAST);
        let json = serde_json::to_string(progress).map_err(|e| Error::file(&file, &e))?;
        let entries = [(ENTRY.to_owned(), json), (ASKED.to_owned(), settings.to_toml()?)];
        save(&file, tensors, &BTreeMap::from(entries))?;
        Ok(())
    }

    /// The bytes of the checkpoint.
    pub(crate) fn saved(&self) -> Result<Vec<u8>, Error> {
        let file = self.path.join(LAST);
        at(&file, std::fs::read(&file))
    }

    /// The checkpoint that the run goes on from.
    pub fn load_checkpoint(&self) -> Result<Checkpoint, Error> {
        let file = self.path.join(LAST);
        if !file.exists() {
            let why =
                "no checkpoint: the run ended before the first one; start again in a new directory";
            return Err(Error::file(&file, &why));
        }
        Checkpoint::from_bytes(file, self.saved()?)
    }

    /// Goes back to a checkpoint. Metrics of steps after it are forgotten.
    pub fn restore(
        &mut self,
        saved: Checkpoint,
        fresh: &AdamW,
    ) -> Result<(AdamW, Progress), Error> {
        let (optimizer, progress) = saved.restore(fresh)?;
        self.forget(progress.metrics)?;
        Ok((optimizer, progress))
    }

    fn forget(&mut self, length: u64) -> Result<(), Error> {
        self.written = self.written.min(length);
        at(&self.path.join(METRICS), self.metrics.get_ref().set_len(self.written))?;
        Ok(())
    }

    /// Writes weights that were kept as the best of some, and removes those that they put out.
    pub(crate) fn keep(
        &self,
        weights: &Snapshot<'_>,
        best: &BestCheckpoint,
        dropped: &[BestCheckpoint],
    ) -> Result<(), Error> {
        let folder = self.path.join(BEST);
        at(&folder, std::fs::create_dir_all(&folder))?;
        save_weights(&self.best_file(best), weights, WeightFormat::F32)?;
        for worse in dropped {
            // A run that was killed and went on may have dropped it before.
            let _ = std::fs::remove_file(self.best_file(worse));
        }
        Ok(())
    }

    /// Weights that were kept.
    #[must_use]
    pub fn best_file(&self, best: &BestCheckpoint) -> PathBuf {
        self.path.join(BEST).join(format!("step-{:07}.safetensors", best.step))
    }

    /// Where the settings of the run are.
    #[must_use]
    pub fn settings_file(&self) -> PathBuf {
        self.path.join(SETTINGS)
    }

    /// The folder of the model that the run has left so far, if there is one.
    #[must_use]
    pub fn model(&self) -> Option<PathBuf> {
        let folder = self.path.join(MODEL);
        folder.join(WEIGHTS).is_file().then_some(folder)
    }

    /// The folder that models are opened from: configuration, vocabularies, weights and a card.
    pub fn export(
        &self,
        config: &Config,
        vocabularies: &Vocabularies,
        weights: &Snapshot<'_>,
        (card, format): (&str, WeightFormat),
    ) -> Result<PathBuf, Error> {
        let folder = self.path.join(MODEL);
        at(&folder, std::fs::create_dir_all(&folder))?;
        match &vocabularies.target {
            Some(target) => {
                write(&folder.join(SOURCE_TABLE), &vocabularies.tokens)?;
                write(&folder.join(TARGET_TABLE), target)?;
            }
            None => write(&folder.join(TABLE), &vocabularies.tokens)?,
        }
        write(&folder.join("config.json"), config.to_json()?.as_bytes())?;
        write(&folder.join("README.md"), card.as_bytes())?;
        save_weights(&folder.join(WEIGHTS), weights, format)?;
        Ok(folder)
    }
}

impl Vocabularies {
    /// Those of a model that a run has left behind.
    pub fn of_model(folder: &Path) -> Result<Self, Error> {
        let read = |name: &str| table(&folder.join(name));
        if folder.join(TABLE).exists() {
            return Ok(Self { tokens: read(TABLE)?, target: None });
        }
        Ok(Self { tokens: read(SOURCE_TABLE)?, target: Some(read(TARGET_TABLE)?) })
    }
}

/// The bytes of a vocabulary, read once for the error that names its file.
fn table(file: &Path) -> Result<Vec<u8>, Error> {
    let bytes = at(file, std::fs::read(file))?;
    Tokens::from_json(&bytes).map_err(|e| Error::file(file, &e))?;
    Ok(bytes)
}

fn save_weights(path: &Path, weights: &Snapshot<'_>, format: WeightFormat) -> Result<(), Error> {
    let weights = weights.iter();
    let weights = weights.map(|(path, shape, list)| (path.to_owned(), shape.to_vec(), list));
    Ok(save_as(format, path, weights, &BTreeMap::new())?)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    write_atomically(path, bytes).map_err(|e| Error::file(path, &e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(x: f64) -> Progress {
        Progress {
            since: IntervalSums { loss: x, ..IntervalSums::default() },
            best: vec![BestCheckpoint { step: 1, value: x }],
            ..Progress::default()
        }
    }

    fn again(progress: &Progress) -> Progress {
        serde_json::from_str(&serde_json::to_string(progress).unwrap()).unwrap()
    }

    #[test]
    fn a_score_comes_back_from_a_checkpoint_to_the_last_bit() {
        // As a decimal number, serde_json reads it one unit in the last place lower.
        let progress = of(98.949_985_784_243_41);
        assert_eq!(again(&progress), progress);
    }

    proptest! {
        #[test]
        fn every_number_comes_back_from_a_checkpoint(bits: u64) {
            let x = f64::from_bits(bits);
            let found = again(&of(x));
            let numbers = [found.since.loss, found.best[0].value];
            prop_assert_eq!(numbers.map(f64::to_bits), [bits; 2]);
        }
    }
}
