//! What is measured beside Python: a tiny call and whole models of Transformers, where Regard and the baseline run in the same process, and models
//! that this command runs itself.

use super::baseline::{Against, Running};
use super::report::Row;
use super::{LONG, SAMPLE, enough};
use anyhow::Result;
use regard::Machine;
use serde::Serialize;
use std::path::Path;
use std::time::{Duration, Instant};

/// GNU OpenMP lets idle threads spin for some milliseconds.
const REST: Duration = Duration::from_millis(20);

/// Names of what runs in Python, as the suite and records have them.
const PYTHON: [&str; 16] = [
    "call-f32-tiny",
    "call-bf16-tiny",
    "model-f32-llama-prefill",
    "model-bf16-llama-prefill",
    "model-f32-llama-generate",
    "model-bf16-llama-generate",
    "model-f32-bert-training",
    "model-bf16-bert-training",
    "model-f32-gemma2-prefill",
    "model-bf16-gemma2-prefill",
    "model-f32-gpt-oss-prefill",
    "model-bf16-gpt-oss-prefill",
    "model-f32-minilm-encode",
    "model-f32-minilm-ctranslate2",
    "model-q4-smollm2-prompt",
    "model-q4-smollm2-generate",
];

/// Those of models that this command runs itself. Weights of a `shape` are random: there is no file of them to be had by its name.
const OWN: [&str; 5] = [
    "model-f32-minilm-embed",
    "model-bf16-smollm2-shape-prompt",
    "model-bf16-smollm2-shape-generate",
    "model-f32-marian-shape-greedy",
    "model-f32-marian-shape-beam4",
];

/// All names.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    PYTHON.into_iter().chain(OWN)
}

const SCRIPT: &str = include_str!("baseline/whole.py");

/// A case as the child reads it.
#[derive(Serialize)]
struct Request<'a> {
    name: &'a str,
    dtype: &'a str,
    threads: usize,
    sample: f64,
    long: f64,
    /// Of the weights; forms that drop are not compared, for each draws for itself.
    dropout: f64,
    /// This command, for models that it runs itself.
    regard: Option<String>,
}

/// Measures one of [`names`].
pub(crate) fn measure(name: &str, machine: Machine, seconds: f64, python: &Path) -> Result<Row> {
    match OWN.contains(&name) {
        #[cfg(feature = "models")]
        true => super::models::measure(name, machine, seconds, python),
        #[cfg(not(feature = "models"))]
        true => {
            let why = format!("built without models; {}", crate::args::remedy("models"));
            Ok(Row::failed(name, machine, why))
        }
        false => in_python(name, machine, seconds, python),
    }
}

/// Measures one of [`PYTHON`] in a Python that has the package `regard`.
fn in_python(name: &str, machine: Machine, seconds: f64, python: &Path) -> Result<Row> {
    let started = Running::start(python, SCRIPT, "package `regard`");
    let mut child = match started {
        Ok(child) => child,
        Err(why) => return Ok(Row::failed(name, machine, format!("{why:#}"))),
    };
    let asked = Request {
        name,
        dtype: name.split('-').nth(1).unwrap_or_default(),
        threads: machine.threads,
        sample: SAMPLE,
        long: LONG,
        dropout: if name.ends_with("training") { 0.1 } else { 0.0 },
        regard: std::env::current_exe().ok().map(|path| path.display().to_string()),
    };
    let ready = match child.load(&asked)? {
        Ok(ready) => ready,
        Err(why) => return Ok(Row::failed(name, machine, why)),
    };
    let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let start = Instant::now();
    while !enough(ours.len(), start.elapsed().as_secs_f64(), seconds) {
        let mut sample = |whose| {
            std::thread::sleep(REST);
            child.sample(whose)
        };
        let (own, other) = (sample("ours")?, sample("go")?);
        ours.push(own);
        theirs.push(other);
        ratios.push(other / own);
    }
    let mut row = Row::timed(name, machine, &ours)?;
    let engine = match ready.form.as_str() {
        form if form.starts_with("llama.cpp") => "llama.cpp",
        "ctranslate2" => "ctranslate2",
        _ => "torch",
    }
    .to_owned();
    let mut against = Against {
        name: (engine == "torch").then(|| child.name.clone()),
        engine,
        ready: Some(ready),
        ..Against::default()
    };
    against.measured(&theirs, &ratios);
    row.baselines.push(against);
    Ok(row)
}
