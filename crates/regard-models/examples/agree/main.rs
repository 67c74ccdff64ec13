//! Compares models with what Transformers computed of them: folders that `tests/hub/make.py` wrote.
//!
//! `cargo run --example agree -- [--out FILE] FOLDER..` prints the largest error of logits, of gradients and of attention weights of each, and
//! whether greedy and beam search write the same tokens; it ends with 1 if any disagrees. FILE gets the same as one line of JSON for each
//! folder. Gradients are those of modules that learn, which need the feature `burn`: a dash where there is none for an architecture.

#![expect(clippy::print_stdout, reason = "it prints a table")]

#[cfg(feature = "burn")]
mod gradients;

use regard_models::files::TransformerFiles;
use regard_models::generate::{DecodingStrategy, StoppingCriteria, generate};
use regard_models::infer::Transformer;
use regard_models::{Image, ImageClassifier, Model};
use regard_scope::{Layer, LayerData};
use serde_json::{Value, json};
use std::error::Error;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Largest error that is accepted, relative to the largest number.
const TOLERANCE: f32 = 1e-4;

fn main() -> Result<()> {
    let mut folders: Vec<PathBuf> = std::env::args_os().skip(1).map(Into::into).collect();
    let out = (folders.first() == Some(&"--out".into()) && folders.len() > 1)
        .then(|| folders.drain(..2).nth(1))
        .flatten();
    let (mut disagree, mut lines) = (0, String::new());
    println!("{:22} {:>9} {:>9} {:>9}  greedy  beam", "model", "logits", "gradients", "attention");
    for path in &folders {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match compare(path) {
            Ok(found) => {
                println!("{name:22} {}", found.line());
                lines += &format!("{}\n", found.json(&name));
                disagree += usize::from(!found.agrees());
            }
            Err(error) => {
                println!("{name:22} {error}");
                disagree += 1;
            }
        }
    }
    if let Some(out) = out {
        std::fs::write(out, lines)?;
    }
    if disagree > 0 {
        println!("{disagree} disagree");
        std::process::exit(1);
    }
    Ok(())
}

/// What a comparison found.
struct Found {
    family: String,
    logits: f32,
    /// None where no module learns.
    gradients: Option<f32>,
    attention: f32,
    greedy: Option<bool>,
    beam: Option<bool>,
}

impl Found {
    fn agrees(&self) -> bool {
        let errors = [Some(self.logits), self.gradients, Some(self.attention)];
        let small = errors.into_iter().flatten().all(|error| error <= TOLERANCE);
        small && self.greedy.unwrap_or(true) && self.beam.unwrap_or(true)
    }

    fn line(&self) -> String {
        let word = |same: Option<bool>| match same {
            None => "-",
            Some(true) => "same",
            Some(false) => "OTHER",
        };
        let Self { logits, attention, greedy, beam, .. } = self;
        let gradients = self.gradients.map_or("-".into(), |error| format!("{error:.1e}"));
        let (greedy, beam) = (word(*greedy), word(*beam));
        format!("{logits:9.1e} {gradients:>9} {attention:9.1e}  {greedy:6}  {beam}")
    }

    fn json(&self, name: &str) -> Value {
        let Self { family, logits, gradients, attention, greedy, beam } = self;
        let digits = |error: f32| format!("{error:.1e}").parse::<f64>().ok();
        json!({
            "model": name, "family": family, "logits": digits(*logits), "gradients": gradients.and_then(digits),
            "attention": digits(*attention), "greedy": greedy, "beam": beam,
        })
    }
}

/// The largest error of gradients, where a module learns.
fn gradients_of(path: &Path, sequences: &[Vec<u32>]) -> Result<Option<f32>> {
    #[cfg(feature = "burn")]
    return gradients::compare(path, sequences);
    #[cfg(not(feature = "burn"))]
    {
        let _ = (path, sequences);
        Ok(None)
    }
}

fn compare(path: &Path) -> Result<Found> {
    let expected: Value = serde_json::from_slice(&std::fs::read(path.join("expected.json"))?)?;
    let files = TransformerFiles::open(path)?;
    if files.image_processor.is_some() {
        return compare_images(path, &expected, Model::of_transformer(files)?.image_classifier()?);
    }
    let config = files.config.clone();
    let model = Transformer::new(files.config, files.weights)?;
    let sources: Vec<Vec<u32>> = serde_json::from_value(expected["ids"].clone())?;
    let targets: Option<Vec<Vec<u32>>> = serde_json::from_value(expected["decoder_ids"].clone())?;
    let (mut logits, mut attention) = (0f32, 0f32);
    for (i, ids) in sources.iter().enumerate() {
        let (source, tokens) = match &targets {
            Some(targets) => (Some(ids.as_slice()), &targets[i]),
            None => (None, ids),
        };
        let key = if expected["logits"].is_null() { "hidden" } else { "logits" };
        let found = match config.labels.is_empty() {
            true => model.logits(source, tokens)?,
            false => model.classify(std::slice::from_ref(ids))?.remove(0),
        };
        logits = logits.max(error(&found, &numbers(&expected[key][i])));
        let layers = model.look(source, tokens)?;
        for (theirs, ours) in
            [("self", "decoder"), ("self", "encoder"), ("encoder", "encoder"), ("cross", "cross")]
        {
            let of_kind: Vec<&Layer> = layers.iter().filter(|layer| layer.kind == ours).collect();
            let rows = &expected["attention"][theirs];
            if rows.is_null()
                || of_kind.is_empty()
                || (theirs == "self" && ours == "encoder" && targets.is_some())
            {
                continue;
            }
            attention = attention.max(attention_error(&of_kind, rows, i));
        }
    }
    let search = |key: &str, search: DecodingStrategy| -> Result<Option<bool>> {
        let want: Option<Vec<Vec<u32>>> = serde_json::from_value(expected[key].clone())?;
        let Some(want) = want else { return Ok(None) };
        let max_tokens = 12;
        let start: Vec<u32> = config.bos.into_iter().chain(config.forced_bos).collect();
        let prompts = if targets.is_some() { vec![start; sources.len()] } else { sources.clone() };
        let read = if targets.is_some() { sources.as_slice() } else { &[] };
        let mut session = model.session(read, 1 << 28)?;
        let stop = StoppingCriteria { max_tokens, end: config.eos.clone() };
        let mut silent = |_: usize, _: u32| ControlFlow::Continue(());
        let found = generate(&mut session, &prompts, &search, &stop, &mut silent)?;
        let whole =
            |(one, prompt): (&regard_models::generate::GeneratedSequence, &Vec<u32>)| match targets
            {
                Some(_) => prompt.iter().chain(&one.tokens).copied().collect(),
                None => one.tokens.clone(),
            };
        let found: Vec<Vec<u32>> = found.iter().zip(&prompts).map(whole).collect();
        if found != want && std::env::var_os("REGARD_SHOW").is_some() {
            println!("{key}: {found:?}\n  not {want:?}");
        }
        Ok(Some(found == want))
    };
    let greedy = search("greedy", DecodingStrategy::Greedy)?;
    let beam = search("beam", DecodingStrategy::Beam { width: 4, length_penalty: 1.0 })?;
    let gradients = gradients_of(path, &sources)?;
    Ok(Found { family: config.family, logits, gradients, attention, greedy, beam })
}

/// The largest error of the pixels and logits of images, and of attention.
fn compare_images(path: &Path, expected: &Value, model: &ImageClassifier) -> Result<Found> {
    let (mut logits, mut attention) = (0f32, 0f32);
    let files: Vec<String> = serde_json::from_value(expected["images"].clone())?;
    for (i, file) in files.iter().enumerate() {
        let image = Image::open(&path.join(file))?;
        let pixels = image.pixels(model.processor())?;
        logits = logits.max(error(&pixels, &numbers(&expected["pixels"][i])));
        let found = model.transformer().classify_images(&[pixels])?.remove(0);
        logits = logits.max(error(&found, &numbers(&expected["logits"][i])));
        let trace = model.look(&image)?;
        let layers: Vec<&Layer> = trace.layers.iter().collect();
        attention = attention.max(attention_error(&layers, &expected["attention"]["self"], i));
    }
    let family = model.transformer().config().family.clone();
    Ok(Found { family, logits, gradients: None, attention, greedy: None, beam: None })
}

/// The largest error of the last rows of the first and the last layer, of one sequence.
fn attention_error(layers: &[&Layer], rows: &Value, sequence: usize) -> f32 {
    let of =
        |(place, layer): (&str, &Layer)| error(&last_row(layer), &numbers(&rows[place][sequence]));
    [("first", layers[0]), ("last", layers[layers.len() - 1])]
        .map(of)
        .into_iter()
        .fold(0.0, f32::max)
}

/// All numbers of a nested list.
fn numbers(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(list) => list.iter().flat_map(numbers).collect(),
        #[expect(clippy::cast_possible_truncation, reason = "it was written as f32")]
        other => other.as_f64().map(|x| x as f32).into_iter().collect(),
    }
}

/// The largest difference, of the largest number.
fn error(found: &[f32], want: &[f32]) -> f32 {
    error_of(found, want, largest(want))
}

/// The largest of some numbers, without their signs.
fn largest(numbers: &[f32]) -> f32 {
    numbers.iter().fold(1e-6, |most, x| most.max(x.abs()))
}

/// The largest difference, as a part of `most`.
fn error_of(found: &[f32], want: &[f32], most: f32) -> f32 {
    if found.len() != want.len() {
        return f32::INFINITY;
    }
    let differences = found.iter().zip(want).map(|(a, b)| (a - b).abs() / most);
    // A NaN is an error.
    differences.fold(0.0, |most, x| if x <= most { most } else { x })
}

/// The weights of the last query, `[heads, keys]`: it sees all keys, or those of a stored row.
fn last_row(layer: &Layer) -> Vec<f32> {
    match &layer.data {
        LayerData::Weights(weights) => {
            let [_, rows, keys] = weights.shape;
            let rows =
                weights.values.chunks_exact(rows * keys).map(|head| &head[(rows - 1) * keys..]);
            rows.flatten().copied().collect()
        }
        LayerData::Inputs(seen) => {
            let ([heads, rows, dim], [kv, keys, _]) = (seen.q_shape, seen.k_shape);
            let scale = seen.scale.unwrap_or_else(|| 1.0 / (dim as f64).sqrt());
            let mut all = Vec::new();
            for head in 0..heads {
                let q = &seen.q[(head * rows + rows - 1) * dim..][..dim];
                let group = head * kv / heads;
                let score = |key: usize| {
                    let k = &seen.k[(group * keys + key) * dim..][..dim];
                    let dot: f64 =
                        q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    match seen.softcap {
                        Some(cap) => cap * (scale * dot / cap).tanh(),
                        None => scale * dot,
                    }
                };
                let scores: Vec<f64> = (0..keys).map(score).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let powers: Vec<f64> = scores.iter().map(|x| (x - most).exp()).collect();
                let sum: f64 = powers.iter().sum();
                #[expect(clippy::cast_possible_truncation, reason = "weights are f32")]
                all.extend(powers.iter().map(|x| (x / sum) as f32));
            }
            all
        }
    }
}
