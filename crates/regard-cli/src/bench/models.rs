//! Whole models that this command runs itself, beside engines that run the same weights from Python.
//!
//! Python makes the weights and the tokens ([`WEIGHTS`]), we compute them once, and an engine that finds something else is not measured.
//! Then the samples alternate: ours in this process, those of each engine in one of its own, which is stopped between.

use super::baseline::{Against, REMEDY, Running};
use super::report::Row;
use super::{LONG, SAMPLE, enough};
use crate::models::place;
use anyhow::{Context, Result, anyhow, bail};
use regard::Machine;
use regard_models::files::TransformerFiles;
use regard_models::generate::{
    Decoder, DecodingStrategy, GenerationOptions, StoppingCriteria, generate_with,
};
use regard_models::infer::Transformer;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

const WEIGHTS: &str = include_str!("baseline/weights.py");
const ENGINES: &str = include_str!("baseline/models.py");

/// Bytes of KV caches, as in the commands for models.
const CACHE_BYTES: usize = 4 << 30;
/// Texts of a batch, as in `regard embed`.
const BATCH: usize = 32;

/// A case as both scripts read it.
#[derive(Serialize)]
struct Request<'a> {
    name: &'a str,
    dtype: &'a str,
    folder: &'a Path,
    minilm: &'a str,
    threads: usize,
    sample: f64,
    long: f64,
    dropout: f64,
}

/// What is run.
#[derive(Clone, Copy)]
enum Task {
    Embed,
    Prompt,
    Generate,
    Translate,
}

/// What a name stands for: the task, and the engines beside us.
fn item(name: &str) -> Result<(Task, &'static [&'static str])> {
    let ends = |end| name.ends_with(end);
    match name {
        _ if ends("-embed") => Ok((Task::Embed, &["torch", "onnxruntime"])),
        _ if ends("-prompt") => Ok((Task::Prompt, &["torch"])),
        _ if ends("-generate") => Ok((Task::Generate, &["torch"])),
        _ if ends("-greedy") || ends("-beam4") => Ok((Task::Translate, &["ctranslate2"])),
        _ => bail!("{name}: no such model"),
    }
}

/// Measures one of the models of `whole::OWN`.
pub(crate) fn measure(name: &str, machine: Machine, seconds: f64, python: &Path) -> Result<Row> {
    let failed = |why: anyhow::Error| Row::failed(name, machine, format!("{why:#}"));
    let folder = Folder::new()?;
    let (task, engines) = item(name)?;
    let minilm = match task {
        Task::Embed => match place(Path::new("minilm")) {
            Ok(path) => path.display().to_string(),
            Err(why) => return Ok(failed(why)),
        },
        _ => String::new(),
    };
    let request = Request {
        name,
        dtype: name.split('-').nth(1).unwrap_or_default(),
        folder: &folder.0,
        minilm: &minilm,
        threads: machine.threads,
        sample: SAMPLE,
        long: LONG,
        dropout: 0.0,
    };
    let ours = match make(python, &request).and_then(|()| Run::open(task, &folder.0)) {
        Ok(run) => run,
        Err(why) => return Ok(failed(why)),
    };
    std::fs::write(folder.0.join("ours.json"), serde_json::to_vec(&ours.check()?)?)?;
    let mut beside: Vec<Beside> =
        engines.iter().map(|engine| Beside::start(python, engine, &request)).collect();
    let (mut own, start) = (Vec::new(), Instant::now());
    while !enough(own.len(), start.elapsed().as_secs_f64(), seconds) {
        let before = Instant::now();
        ours.run()?;
        let taken = before.elapsed().as_secs_f64();
        own.push(taken);
        beside.iter_mut().try_for_each(|one| one.sample(taken))?;
    }
    let row = Row::timed(name, machine, &own)?;
    Ok(Row { baselines: beside.into_iter().map(Beside::finish).collect(), ..row })
}

/// Has Python make the weights and the tokens of a case.
fn make(python: &Path, request: &Request<'_>) -> Result<()> {
    let shown = python.display();
    let mut child = regard_scope::python(python)
        .args(["-c", WEIGHTS])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|why| anyhow!("--python {shown}: it does not start ({why}); {REMEDY}"))?;
    let mut input = child.stdin.take().context("the child's input")?;
    // A child that has ended says why below.
    let _ = writeln!(input, "{}", serde_json::to_string(request)?);
    drop(input);
    let done = child.wait_with_output()?;
    if done.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    let last = said.lines().last().unwrap_or("no reason given");
    bail!("--python {shown}: it has made no weights ({last}); {REMEDY}")
}

/// A folder for one case, removed with it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("regard-bench-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| path.display().to_string())?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed lies among temporary files.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An engine beside us, its samples and their ratios to ours.
struct Beside {
    child: Result<Running, String>,
    against: Against,
    seconds: Vec<f64>,
    ratios: Vec<f64>,
}

impl Beside {
    fn start(python: &Path, engine: &str, request: &Request<'_>) -> Self {
        let mut against = Against { engine: engine.into(), ..Against::default() };
        let mut load = || -> Result<Running> {
            let script = format!("ENGINE = \"{engine}\"\n\n{ENGINES}");
            let mut child = Running::start(python, &script, engine)?;
            let loaded = child.awake(|child| child.load(request))?;
            against.name = Some(child.name.clone());
            against.ready = Some(loaded.map_err(|why| anyhow!(why))?);
            Ok(child)
        };
        let child = load().map_err(|why| format!("{why:#}"));
        against.error = child.as_ref().err().cloned();
        Self { child, against, seconds: Vec::new(), ratios: Vec::new() }
    }

    /// One more sample, beside one of ours. An engine that cannot run the case is left out.
    fn sample(&mut self, ours: f64) -> Result<()> {
        let Ok(child) = &mut self.child else { return Ok(()) };
        let seconds = child.awake(|child| child.sample("go"))?;
        self.seconds.push(seconds);
        self.ratios.push(seconds / ours);
        Ok(())
    }

    fn finish(mut self) -> Against {
        self.against.measured(&self.seconds, &self.ratios);
        self.against
    }
}

/// What [`WEIGHTS`] wrote.
#[derive(Deserialize)]
struct Inputs {
    model: PathBuf,
    ids: Vec<Vec<u32>>,
    new: usize,
    beams: usize,
}

/// What comes of a case: tokens, which must be the same, and numbers, which must be near.
#[derive(Default, Serialize)]
struct Computed {
    tokens: Vec<u32>,
    numbers: Vec<f64>,
}

impl Computed {
    fn of(numbers: Vec<f32>) -> Self {
        Self { numbers: numbers.into_iter().map(f64::from).collect(), ..Self::default() }
    }
}

/// Our side of a case.
struct Run {
    task: Task,
    model: Transformer,
    inputs: Inputs,
}

impl Run {
    fn open(task: Task, folder: &Path) -> Result<Self> {
        let inputs: Inputs = serde_json::from_slice(&std::fs::read(folder.join("inputs.json"))?)?;
        let files = TransformerFiles::open(&inputs.model)?;
        Ok(Self { task, model: Transformer::new(files.config, files.weights)?, inputs })
    }

    /// What is measured.
    fn run(&self) -> Result<Computed> {
        match self.task {
            Task::Embed => self.embed().map(Computed::of),
            Task::Prompt => self.scores().map(Computed::of),
            Task::Generate | Task::Translate => self.write(),
        }
    }

    /// What others are compared with.
    fn check(&self) -> Result<Computed> {
        match self.task {
            Task::Generate => self.scores().map(Computed::of),
            _ => self.run(),
        }
    }

    /// A vector of length 1 for each text.
    fn embed(&self) -> Result<Vec<f32>> {
        let mut all = Vec::new();
        for batch in self.inputs.ids.chunks(BATCH) {
            for vector in self.model.pooled(batch)? {
                let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
                all.extend(vector.iter().map(|x| x / length));
            }
        }
        Ok(all)
    }

    /// Scores of what comes after the prompt.
    fn scores(&self) -> Result<Vec<f32>> {
        let mut session = self.model.session(&[], CACHE_BYTES)?;
        let mut states = [session.start(0)?];
        Ok(session.feed(&mut states, &[&self.inputs.ids[0]], &[1])?)
    }

    /// Tokens, as many as were asked for, as none of them is the end; and the score of each row.
    fn write(&self) -> Result<Computed> {
        let (config, Inputs { ids, new, beams, .. }) = (self.model.config(), &self.inputs);
        let search = match *beams {
            1 => DecodingStrategy::Greedy,
            width => DecodingStrategy::Beam { width, length_penalty: 1.0 },
        };
        let stop = StoppingCriteria { max_tokens: *new, end: Vec::new() };
        let mut options = GenerationOptions::new(search, stop);
        options.processors.suppressed.extend(config.suppressed.iter().chain(&config.eos));
        let (sources, prompts) = match self.task {
            Task::Translate => (ids.as_slice(), vec![config.bos.into_iter().collect(); ids.len()]),
            _ => (&[][..], ids.clone()),
        };
        let mut session = self.model.session(sources, CACHE_BYTES)?;
        let mut silent = |_: usize, _: u32| ControlFlow::Continue(());
        let (rows, _) = generate_with(&mut session, &prompts, &options, &mut silent)?;
        let tokens = rows.iter().flat_map(|row| &row.tokens).copied().collect();
        Ok(Computed { tokens, numbers: rows.iter().map(|row| row.score).collect() })
    }
}
