//! Other engines, each a child in Python that is asked for one sample at a time.

use super::case::{Bias, Cached, Case, Pass, Rule};
use super::{LONG, SAMPLE};
use crate::args::Dtype;
use anyhow::{Context, Result, anyhow, bail};
use clap::ValueEnum;
use regard::problem::Normalizer;
use regard::score::alibi_slopes;
use regard::{Layout, Machine};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

/// What all children share: the protocol, and the choice of the fastest form.
const CHILD: &str = include_str!("child.py");

/// What to do about a Python that lacks something.
pub(crate) const REMEDY: &str =
    "`bench/environment DIR` makes an environment that has all, DIR/bin/python";

/// An engine that `--against` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Engine {
    /// PyTorch: the fastest of its forms, FlexAttention among them
    Torch,
    /// vLLM's kernels for CPUs, and SGLang's
    Vllm,
    /// OpenVINO's operator
    Openvino,
    /// onnxruntime's operators (f32)
    Onnxruntime,
    /// auto-round-lib (bf16)
    AutoRound,
}

impl Engine {
    pub(crate) const ALL: [Self; 5] =
        [Self::Torch, Self::Vllm, Self::Openvino, Self::Onnxruntime, Self::AutoRound];

    /// As `--against` names it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Torch => "torch",
            Self::Vllm => "vllm",
            Self::Openvino => "openvino",
            Self::Onnxruntime => "onnxruntime",
            Self::AutoRound => "auto-round",
        }
    }

    const fn script(self) -> &'static str {
        match self {
            Self::Torch => include_str!("torch.py"),
            Self::Vllm => include_str!("vllm.py"),
            Self::Openvino => include_str!("openvino.py"),
            Self::Onnxruntime => include_str!("onnxruntime.py"),
            Self::AutoRound => include_str!("auto_round.py"),
        }
    }

    /// The Python that has it: vLLM needs a PyTorch of its own, which `bench/environment` puts into a folder of the other.
    fn python(self, given: &Path) -> PathBuf {
        let own = given.parent().and_then(Path::parent).map(|dir| dir.join("vllm/bin/python"));
        match own {
            Some(own) if self == Self::Vllm && own.exists() => own,
            _ => given.into(),
        }
    }
}

/// A baseline of this run, whether it works or not.
pub(crate) struct Baseline {
    pub(crate) engine: Engine,
    python: PathBuf,
    child: Result<Running, String>,
}

impl Baseline {
    pub(crate) fn start(engine: Engine, python: &Path) -> Self {
        let python = engine.python(python);
        let child = Running::start(&python, engine.script(), engine.name())
            .and_then(|mut child| child.awake(|_| Ok(())).map(|()| child));
        Self { engine, python, child: child.map_err(|why| format!("{why:#}")) }
    }

    /// Why it does not run, if so.
    pub(crate) fn error(&self) -> Option<&str> {
        self.child.as_ref().err().map(String::as_str)
    }

    /// Has it prepare a case. What it says is part of the row, errors too.
    pub(crate) fn load(&mut self, case: &Case, machine: Machine) -> Against {
        let engine = self.engine.name().into();
        let loaded = match &mut self.child {
            Ok(child) => child.awake(|child| child.load(&Request::new(case, machine))),
            Err(why) => return Against { engine, error: Some(why.clone()), ..Against::default() },
        };
        let name = self.child.as_ref().ok().map(|child| child.name.clone());
        match loaded {
            Ok(Ok(ready)) => Against { engine, name, ready: Some(ready), ..Against::default() },
            Ok(Err(why)) => Against { engine, name, error: Some(why), ..Against::default() },
            Err(why) => {
                self.restart();
                Against { engine, name, error: Some(format!("{why:#}")), ..Against::default() }
            }
        }
    }

    /// Seconds of one call.
    pub(crate) fn sample(&mut self) -> Result<f64> {
        match &mut self.child {
            Ok(child) => child.awake(|child| child.sample("go")),
            Err(why) => bail!("{why}"),
        }
    }

    /// After its end, for the next case.
    pub(crate) fn restart(&mut self) {
        *self = Self::start(self.engine, &self.python);
    }
}

/// What is known of a baseline in a case.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Against {
    pub(crate) engine: String,
    /// With its version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    /// Why there is no comparison.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    #[serde(flatten)]
    pub(crate) ready: Option<Ready>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) median_ms: Option<f64>,
    /// Its time by ours, of neighbouring samples: above 1, we are faster.
    #[serde(flatten)]
    pub(crate) ratio: Option<Ratio>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Ratio {
    pub(crate) ratio: f64,
    pub(crate) ratio_low: f64,
    pub(crate) ratio_high: f64,
}

/// What a child says of a case that it has prepared.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// The fastest form, which is what is measured.
    pub(crate) form: String,
    pub(crate) forms_ms: BTreeMap<String, f64>,
    /// Forms that do not run, and why.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) refused: BTreeMap<String, String>,
    /// Seconds of the first call of that form, in which some compile.
    pub(crate) setup_s: f64,
    /// MiB of a call beyond what was there before and what it returns.
    pub(crate) extra_rss_mb: Option<f64>,
}

/// A case as a child reads it.
#[derive(Serialize)]
pub(crate) struct Request<'a> {
    dtype: Dtype,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    queries: usize,
    keys: usize,
    dim: usize,
    v_dim: usize,
    layout: &'static str,
    rules: &'a [Rule],
    bias: Option<Bias>,
    slopes: Vec<f32>,
    softcap: Option<f64>,
    sinks: bool,
    dropout: f64,
    pass: Pass,
    q_scale: f64,
    additive: bool,
    /// 0 where scores become weights by the softmax over all.
    top: usize,
    cached: Option<Cached>,
    latent: bool,
    /// What no baseline has, if there is something.
    unknown: Option<&'static str>,
    threads: usize,
    /// Seconds of a sample, at least.
    sample: f64,
    /// Seconds of a call that needs none before it.
    long: f64,
}

impl<'a> Request<'a> {
    fn new(case: &'a Case, machine: Machine) -> Self {
        let dims = case.dims;
        Self {
            dtype: case.dtype,
            batch: dims.batch,
            heads: dims.heads.q,
            kv_heads: dims.heads.kv,
            queries: dims.q_len,
            keys: dims.k_len,
            dim: dims.qk_dim,
            v_dim: dims.v_dim,
            layout: if case.layout == Layout::Bshd { "bshd" } else { "bhsd" },
            rules: &case.rules,
            bias: case.bias,
            slopes: alibi_slopes(dims.heads.q),
            softcap: case.softcap,
            sinks: case.sinks,
            dropout: case.dropout.unwrap_or(0.0),
            pass: case.pass,
            q_scale: case.q_scale,
            additive: case.additive,
            top: if let Normalizer::TopK(k) = case.normalizer { k } else { 0 },
            cached: case.cached,
            latent: case.latent,
            unknown: match case.normalizer {
                _ if case.quantization.is_some() => Some("a cache in 8 bits"),
                Normalizer::Softmax | Normalizer::TopK(_) if case.local.is_some() => {
                    Some("local attention")
                }
                Normalizer::Softmax | Normalizer::TopK(_) => None,
                other => Some(other.name()),
            },
            threads: machine.threads,
            sample: SAMPLE,
            long: LONG,
        }
    }
}

/// A child that has started.
pub(crate) struct Running {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    /// With its version.
    pub(crate) name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Answer<T> {
    Ready(T),
    Seconds(f64),
    Error(String),
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

impl Running {
    /// Starts the script of `engine` after what all share.
    pub(crate) fn start(python: &Path, script: &str, engine: &str) -> Result<Self> {
        let shown = python.display();
        let mut child = regard_scope::python(python)
            .args(["-u", "-c", &format!("{CHILD}\n\n{script}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|why| anyhow!("--python {shown}: it does not start ({why}); {REMEDY}"))?;
        let to = child.stdin.take().context("the child's input")?;
        let from = BufReader::new(child.stdout.take().context("the child's output")?);
        let mut running = Self { child, to, from, name: engine.into() };
        match running.answer::<Named>() {
            Ok(Answer::Ready(Named { name })) => running.name = name,
            Ok(Answer::Error(why)) => {
                bail!("--python {shown}: it has no {engine} ({why}); {REMEDY}")
            }
            _ => bail!("--python {shown}: it did not answer as Python does; {REMEDY}"),
        }
        Ok(running)
    }

    /// Lets the child run for as long as it is asked something. Between, idle threads of OpenMP, TBB and onnxruntime would spin, on cores that
    /// are ours by then: 1.7 times our time was seen.
    pub(crate) fn awake<T>(&mut self, ask: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.signal(Signal::CONT)?;
        let answer = ask(self)?;
        self.signal(Signal::STOP)?;
        Ok(answer)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        Ok(kill_process(pid.context("the child's number")?, signal)?)
    }

    /// Has the child build a case, try its forms and warm up. The inner error says why this case cannot be compared.
    pub(crate) fn load(&mut self, asked: &impl Serialize) -> Result<Result<Ready, String>> {
        self.ask(&serde_json::to_string(asked)?)?;
        match self.answer()? {
            Answer::Ready(ready) => Ok(Ok(ready)),
            Answer::Error(why) => Ok(Err(why)),
            Answer::Seconds(_) => bail!("{} lost track of what it was asked", self.name),
        }
    }

    /// Seconds of one call: `go` is the baseline's, `ours` that of Regard in the same process.
    pub(crate) fn sample(&mut self, whose: &str) -> Result<f64> {
        self.ask(whose)?;
        match self.answer::<Ready>()? {
            Answer::Seconds(seconds) => Ok(seconds),
            Answer::Error(why) => bail!("{}: {why}", self.name),
            Answer::Ready(_) => bail!("{} lost track of what it was asked", self.name),
        }
    }

    fn ask(&mut self, line: &str) -> Result<()> {
        let sent = writeln!(self.to, "{line}").and_then(|()| self.to.flush());
        // Not the pipe that a reader of our own output closes: see `main`.
        sent.map_err(|why| anyhow!("{} has ended ({why}); perhaps memory ran out", self.name))
    }

    fn answer<T: serde::de::DeserializeOwned>(&mut self) -> Result<Answer<T>> {
        let mut line = String::new();
        if self.from.read_line(&mut line)? == 0 {
            bail!("{} has ended; perhaps memory ran out", self.name);
        }
        serde_json::from_str(&line).with_context(|| format!("{} answered {line:?}", self.name))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself; then there is nothing to stop and nobody to tell.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
