//! The rival: PyTorch in a child process that is asked for one slice at a time.

use super::case::{Bias, Case, Pass, Rule};
use super::clock::Clock;
use crate::args::Dtype;
use anyhow::{Context, Result, anyhow, bail};
use regard::{Layout, Machine, Normaliser, alibi_slopes};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

/// GNU OpenMP lets the rival's idle threads spin for some milliseconds, on cores that are ours by then.
const REST: Duration = Duration::from_millis(20);

const SCRIPT: &str = include_str!("torch.py");

/// The running child.
pub(crate) struct Torch {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    /// With its version.
    pub(crate) name: String,
}

/// A case as the child reads it.
#[derive(Serialize)]
struct Asked<'a> {
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
    dropout: f64,
    pass: Pass,
    spread: f64,
    additive: bool,
    /// 0 where scores become weights by the softmax over all.
    top: usize,
    /// What it cannot do, if there is something.
    unknown: Option<&'static str>,
    threads: usize,
    clock: Clock,
    slice: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Ready(serde_json::Value),
    Seconds(f64),
    Error(String),
}

impl Torch {
    pub(crate) fn start(python: &Path) -> Result<Self> {
        const REMEDY: &str = "give one that has torch: `python3 -m venv DIR && DIR/bin/pip install torch`, then DIR/bin/python";
        let shown = python.display();
        let mut child = regard_scope::python(python)
            .args(["-u", "-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|why| anyhow!("--python {shown}: it does not start ({why}); {REMEDY}"))?;
        let to = child.stdin.take().context("the child's input")?;
        let from = BufReader::new(child.stdout.take().context("the child's output")?);
        let mut torch = Self { child, to, from, name: String::new() };
        match torch.answer() {
            Ok(Answer::Ready(name)) => torch.name = name.as_str().unwrap_or("torch").into(),
            Ok(Answer::Error(why)) => bail!("--python {shown}: it has no torch ({why}); {REMEDY}"),
            _ => bail!("--python {shown}: it did not answer as Python does; {REMEDY}"),
        }
        Ok(torch)
    }

    /// Builds the case and warms up: MiB that a call takes beyond what was there before, where that can be known. The inner
    /// error says why this case cannot be compared.
    pub(crate) fn load(
        &mut self,
        case: &Case,
        machine: Machine,
        slice: f64,
    ) -> Result<Result<Option<f64>, String>> {
        let dims = case.dims;
        let asked = Asked {
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
            dropout: case.dropout.unwrap_or(0.0),
            pass: case.pass,
            spread: case.spread,
            additive: case.additive,
            top: if let Normaliser::TopK(k) = case.normaliser { k } else { 0 },
            unknown: match case.normaliser {
                Normaliser::Softmax | Normaliser::TopK(_) if case.local.is_some() => {
                    Some("local attention")
                }
                Normaliser::Softmax | Normaliser::TopK(_) => None,
                other => Some(other.name()),
            },
            threads: machine.threads,
            clock: Clock::of(machine),
            slice,
        };
        self.ask(&serde_json::to_string(&asked)?)?;
        match self.answer()? {
            Answer::Ready(extra) => Ok(Ok(extra.as_f64())),
            Answer::Error(why) => Ok(Err(why)),
            Answer::Seconds(_) => bail!("{} lost track of what it was asked", self.name),
        }
    }

    /// Seconds of one repetition.
    pub(crate) fn slice(&mut self) -> Result<f64> {
        self.ask("go")?;
        match self.answer()? {
            Answer::Seconds(seconds) => {
                std::thread::sleep(REST);
                Ok(seconds)
            }
            Answer::Error(why) => bail!("{}: {why}", self.name),
            Answer::Ready(_) => bail!("{} lost track of what it was asked", self.name),
        }
    }

    fn ask(&mut self, line: &str) -> Result<()> {
        let sent = writeln!(self.to, "{line}").and_then(|()| self.to.flush());
        // Not the pipe that a reader of our own output closes: see `main`.
        sent.map_err(|why| anyhow!("{} has ended ({why}); perhaps memory ran out", self.name))
    }

    fn answer(&mut self) -> Result<Answer> {
        let mut line = String::new();
        if self.from.read_line(&mut line)? == 0 {
            bail!("{} has ended; perhaps memory ran out", self.name);
        }
        serde_json::from_str(&line).with_context(|| format!("{} answered {line:?}", self.name))
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        // It may have ended by itself; then there is nothing to stop and nobody to tell.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
