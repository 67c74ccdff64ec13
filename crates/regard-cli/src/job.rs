//! Arguments, checked as a whole: every mistake that can be named is named here, before any work.

use crate::args::{
    BenchArgs, Dtype, Format, LayoutArg, PlanArgs, ScoreArgs, SimilarityArg, StepsArgs, SuiteArgs,
    THREADS,
};
use crate::bench::{self, Case, Engine, Item, Record, choose};

use anyhow::{Context, Result, anyhow, bail};
use regard::problem::Normalizer;
use regard::{Element, Isa, Machine, Mask, Score, Shape};
use regard_scope::parse_mask;
use std::path::PathBuf;

/// From a query and a key to their score.
#[derive(Debug)]
pub(crate) struct ScoreJob {
    pub(crate) mask: Mask,
    pub(crate) similarity: SimilarityArg,
    pub(crate) scale: Option<f64>,
    pub(crate) temperature: Option<f64>,
    pub(crate) softcap: Option<f64>,
}

impl ScoreJob {
    fn new(args: &ScoreArgs) -> Result<Self> {
        let ScoreArgs { similarity, scale, temperature, softcap, .. } = *args;
        let mask = parse_mask(&args.mask).map_err(|e| anyhow!("--mask: {e}"))?;
        Ok(Self { mask, similarity, scale, temperature, softcap })
    }

    /// What happens to a similarity.
    pub(crate) fn score<'a, E: Element>(&self) -> Score<'a, E> {
        let score = self.scale.into_iter().fold(Score::new(), Score::scale);
        let score = self.temperature.into_iter().fold(score, Score::temperature);
        self.softcap.into_iter().fold(score, Score::softcap)
    }
}

/// What `regard plan` describes.
#[derive(Debug)]
pub(crate) struct PlanJob {
    /// Of q, k and v.
    pub(crate) shapes: [Shape; 3],
    pub(crate) dtype: Dtype,
    pub(crate) layout: LayoutArg,
    pub(crate) score: ScoreJob,
    pub(crate) alibi: bool,
    pub(crate) sinks: bool,
    pub(crate) bias: bool,
    pub(crate) machine: Machine,
    pub(crate) spread: Option<SpreadJob>,
}

/// Machines that a call is to be spread over.
#[derive(Debug)]
pub(crate) struct SpreadJob {
    /// The most of them.
    pub(crate) ranks: usize,
    /// Bytes a second of the network of each.
    pub(crate) network: f64,
    /// FLOP/s of each, where they are given.
    pub(crate) flops: Option<f64>,
}

/// What `regard steps` shows.
#[derive(Debug)]
pub(crate) struct StepsJob {
    /// Of q, k and v.
    pub(crate) shapes: [Shape; 3],
    pub(crate) score: ScoreJob,
    pub(crate) normalizer: Normalizer,
    pub(crate) seed: u64,
}

/// What `regard bench` measures.
#[derive(Debug)]
pub(crate) struct BenchJob {
    pub(crate) items: Vec<Item>,
    /// Each runs on each of these.
    pub(crate) machines: Vec<Machine>,
    /// Of each case.
    pub(crate) seconds: f64,
    /// What to measure against.
    pub(crate) engines: Vec<Engine>,
    /// A Python that has them.
    pub(crate) python: PathBuf,
    /// Where rows go, if not only to the terminal.
    pub(crate) record: Option<Record>,
}

pub(crate) fn plan(args: PlanArgs) -> Result<PlanJob> {
    let PlanArgs { batch, heads, queries, dim, .. } = args;
    let keys = args.keys.unwrap_or(queries);
    let kv_heads = args.kv_heads.unwrap_or(heads);
    let v_dim = args.v_dim.unwrap_or(dim);
    let shapes = [
        Shape { batch, heads, len: queries, dim },
        Shape { batch, heads: kv_heads, len: keys, dim },
        Shape { batch, heads: kv_heads, len: keys, dim: v_dim },
    ];
    let output = Shape { dim: v_dim, ..shapes[0] };
    fits_a_row(&args, heads, keys, dim)?;
    let [q, k, v] = shapes;
    for (name, shape) in [("q", q), ("k", k), ("v", v), ("the output", output)] {
        fits_in_memory(name, shape)?;
    }
    Ok(PlanJob {
        shapes,
        dtype: args.dtype,
        layout: args.layout,
        score: ScoreJob::new(&args.score)?,
        alibi: args.alibi,
        sinks: args.sinks,
        bias: args.bias,
        machine: machine(args.isa.as_deref())?,
        spread: args.ranks.map(|ranks| spread(ranks, args.network, args.gflops)).transpose()?,
    })
}

/// FLOP/s, where they are given.
pub(crate) fn flops(gflops: Option<f64>) -> Result<Option<f64>> {
    if let Some(x) = gflops.filter(|x| !x.is_finite() || *x <= 0.0) {
        bail!("--gflops {x}: must be a number above 0");
    }
    Ok(gflops.map(|x| 1e9 * x))
}

fn spread(ranks: usize, network: f64, gflops: Option<f64>) -> Result<SpreadJob> {
    Ok(SpreadJob { ranks, network: network / 8.0, flops: flops(gflops)? })
}

/// Numbers that `regard plan` holds at once: no tensor, but a row of one, and a number for each head.
const ROW: usize = 1 << 26;

fn fits_a_row(args: &PlanArgs, heads: usize, keys: usize, dim: usize) -> Result<()> {
    let biased = if args.bias { keys } else { 1 };
    for (flag, n) in [("--heads", heads), ("--dim", dim), ("--keys with --bias", biased)] {
        if n > ROW {
            bail!("{flag}: {n} is above the maximum of {ROW}");
        }
    }
    Ok(())
}

/// Numbers of a tensor that `regard steps` shows, at most.
const SHOWN: usize = 4096;
/// Columns that fit a terminal.
const COLUMNS: usize = 12;

pub(crate) fn steps(args: StepsArgs, format: Format) -> Result<StepsJob> {
    let StepsArgs { heads, queries, dim, seed, .. } = args;
    let (keys, v_dim) = (args.keys.unwrap_or(queries), args.v_dim.unwrap_or(dim));
    let flags = [("--keys", keys), ("--dim", dim), ("--v-dim", v_dim)];
    if let Some((flag, n)) = flags.into_iter().find(|(_, n)| *n > COLUMNS && format == Format::Text)
    {
        bail!("{flag} {n}: at most {COLUMNS} columns fit a terminal; use --format json");
    }
    let rows = heads.saturating_mul(queries.max(keys));
    if rows.saturating_mul(keys.max(dim).max(v_dim)) > SHOWN {
        bail!(
            "--heads {heads} --queries {queries} --keys {keys}: more than {SHOWN} numbers a step; give less of each"
        );
    }
    let shape = |len, dim| Shape { batch: 1, heads, len, dim };
    Ok(StepsJob {
        shapes: [shape(queries, dim), shape(keys, dim), shape(keys, v_dim)],
        score: ScoreJob::new(&args.score)?,
        normalizer: match args.normalizer {
            Normalizer::Sampled { .. } => Normalizer::Sampled { seed },
            other => other,
        },
        seed,
    })
}

pub(crate) fn bench(args: BenchArgs) -> Result<BenchJob> {
    let seconds = checked_seconds(args.seconds)?;
    let here = machine(args.isa.as_deref())?;
    let mut machines: Vec<_> = args.threads.iter().map(|n| here.threads(*n)).collect();
    if machines.is_empty() {
        machines.push(here);
    }
    let python = args.python.unwrap_or_else(|| "python3".into());
    let cases = choose(args.case.as_deref())?;
    cases.iter().try_for_each(Case::fits)?;
    let items = cases.into_iter().map(|case| Item::Kernel(Box::new(case))).collect();
    Ok(BenchJob { items, machines, seconds, engines: args.against, python, record: None })
}

pub(crate) fn bench_suite(args: SuiteArgs) -> Result<BenchJob> {
    let record = Some(Record::open(&args.out)?);
    let engines = if args.against.is_empty() { Engine::ALL.into() } else { args.against };
    Ok(BenchJob {
        items: bench::suite(args.case.as_deref())?,
        machines: vec![Machine::detect()],
        seconds: checked_seconds(args.seconds)?,
        engines,
        python: args.python.unwrap_or_else(|| "python3".into()),
        record,
    })
}

fn checked_seconds(seconds: f64) -> Result<f64> {
    if !(seconds > 0.0 && seconds <= 3600.0) {
        bail!("--seconds {seconds}: give a number above 0, at most 3600");
    }
    Ok(seconds)
}

/// This machine with another instruction set.
fn machine(isa: Option<&str>) -> Result<Machine> {
    let here = Machine::detect();
    Ok(here.isa(isa.map_or(Ok(here.isa), isa_named)?))
}

/// Runs a verb within a pool of threads, so that all of it, the engine and Burn, runs on so many: those that were asked for, or those that
/// the environment asks for, or one for each CPU.
pub(crate) fn on_threads<T: Send>(
    asked: Option<usize>,
    variable: impl Fn(&str) -> Option<String>,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    // The second is the old name of the first; rayon reads both.
    let names = ["RAYON_NUM_THREADS", "RAYON_RS_NUM_CPUS"];
    for name in names.into_iter().filter(|_| asked.is_none()) {
        let number = variable(name).and_then(|text| text.parse::<usize>().ok());
        if let Some(number) = number.filter(|number| *number > THREADS) {
            bail!("{name}={number}: at most {THREADS} threads are supported");
        }
    }
    // 0 is rayon's own choice, by the environment.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(asked.unwrap_or(0)).stack_size(STACK);
    let pool =
        pool.build().context("cannot start threads; lower --threads or RAYON_NUM_THREADS")?;
    pool.install(work)
}

/// Bytes of the stack of a thread, as the first thread of a process has on Linux.
const STACK: usize = 8 << 20;

fn isa_named(name: &str) -> Result<Isa> {
    let available = Isa::available();
    available.iter().copied().find(|isa| isa.name() == name).ok_or_else(|| {
        let names: Vec<_> = available.iter().map(|isa| isa.name()).collect();
        anyhow!("--isa {name}: this machine has {}; give one of these", names.join(", "))
    })
}

/// Refuses tensors whose elements cannot even be counted.
pub(crate) fn fits_in_memory(name: &str, shape: Shape) -> Result<()> {
    let most = isize::MAX.unsigned_abs() / size_of::<f64>();
    let elements = shape.to_array().into_iter().try_fold(1usize, |n, axis| n.checked_mul(axis));
    if elements.is_none_or(|n| n > most) {
        let [batch, heads, len, dim] = shape.to_array();
        bail!(
            "{name} would be {batch} x {heads} x {len} x {dim} [batch, heads, len, dim], more than memory can \
             address; give a smaller --batch, --heads, --queries, --keys or --dim"
        );
    }
    Ok(())
}
