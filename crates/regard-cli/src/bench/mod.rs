//! `regard bench`: our time, the machine's own roofline and the times of other engines, taken in turns.
//!
//! Shared machines change their speed from one moment to the next, so a number means nothing alone: each sample of
//! ours stands between two of the roofline and beside one of each baseline, ratios are taken between such neighbours,
//! and their median and range are what is told.

mod baseline;
mod case;
mod clock;
mod compared;
mod context;
mod input;
mod linear;
mod list;
mod look;
mod lsh;
mod memory;
#[cfg(feature = "models")]
mod models;
pub(crate) mod ranks;
mod report;
mod roofline_loop;
mod suite;
mod summary;
mod whole;

use crate::args::{BenchListArgs, Dtype, Format};
use crate::job::BenchJob;
use crate::say;
use anyhow::{Context, Result, bail};
use baseline::Baseline;
pub(crate) use baseline::Engine;
pub(crate) use case::Case;
use case::{Bound, Cached, Pass};
use clock::Clock;
use compared::BaselineComparison;
use indicatif::{ProgressBar, ProgressStyle};
use input::Input;
pub(crate) use list::choose;
use regard::problem::Dims;
use regard::{Element, Error, Machine, Plan};
use report::{Kernel, Report, Row};
use roofline_loop::{Roofline, Units};
use std::hint::black_box;
use std::io::Write;
use std::time::Instant;
pub(crate) use suite::{Record, items as suite};
use summary::{FEWEST_OF_A_PERCENTILE, SampleSummary};

/// Seconds of a sample, at least: short against the host's changes of mood, long against the clock and waking threads.
const SAMPLE: f64 = 2e-3;
/// Seconds of a sample of the roofline, at most.
const LONGEST_ROOFLINE: f64 = 20e-3;
/// Seconds of a call from which on what lies in a cache before it makes no difference. Shorter ones are preceded by a call that does not
/// count, ours and those of all baselines.
const LONG: f64 = 20e-3;
/// Samples of ours, at least, however slow.
const FEWEST: usize = 3;
/// How many times the seconds of a case may be exceeded for samples enough.
const PATIENCE: f64 = 12.0;

/// Whether `samples` in `elapsed` of the `seconds` of a case will do: of percentiles, if they can be had in reasonable time.
fn enough(samples: usize, elapsed: f64, seconds: f64) -> bool {
    let fewest = if elapsed < PATIENCE * seconds { FEWEST_OF_A_PERCENTILE } else { FEWEST };
    samples >= fewest && elapsed >= seconds
}

/// What is measured: a call of the engine, or something from Python, by its name.
#[derive(Clone, Debug)]
pub(crate) enum Item {
    Kernel(Box<Case>),
    Whole(&'static str),
}

impl Item {
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Kernel(case) => &case.name,
            Self::Whole(name) => name,
        }
    }
}

pub(crate) fn run(mut job: BenchJob, format: Format) -> Result<()> {
    // Whole models start what they are measured beside themselves.
    let is_kernel = |item: &Item| matches!(item, Item::Kernel(_));
    let engines = job.engines.iter().filter(|_| job.items.iter().any(is_kernel));
    let mut baselines: Vec<_> =
        engines.map(|engine| Baseline::start(*engine, &job.python)).collect();
    for one in &baselines {
        match one.error() {
            // A suite goes on without, and its record says why.
            Some(why) if job.record.is_some() => say::say(why),
            Some(why) => bail!("{why}"),
            None => {}
        }
    }
    let names = job.items.iter().map(Item::name);
    let another = |item: &Item| match item {
        Item::Kernel(case) => case.linear.is_some() || case.lsh || case.pass == Pass::Look,
        Item::Whole(_) => true,
    };
    let compared = !baselines.is_empty() || job.items.iter().any(another);
    let mut report = Report::new(format, names, compared);
    // Draws on a terminal only, and only between measurements.
    let progress = say::bar(ProgressBar::new((job.items.len() * job.machines.len()) as u64));
    progress.set_style(ProgressStyle::with_template("{pos}/{len} {msg} [{elapsed}, {eta} left]")?);
    for item in &job.items {
        for machine in &job.machines {
            progress.set_message(item.name().to_owned());
            progress.tick();
            if job.record.as_ref().is_some_and(|record| record.has(item.name(), *machine)) {
                progress.inc(1);
                continue;
            }
            let row = match item {
                Item::Whole(name) => whole::measure(name, *machine, job.seconds, &job.python),
                Item::Kernel(case) => {
                    let baselines = &mut baselines;
                    match case.dtype {
                        Dtype::F32 => measure::<f32>(case, *machine, job.seconds, baselines),
                        Dtype::F64 => measure::<f64>(case, *machine, job.seconds, baselines),
                        Dtype::F16 => {
                            measure::<regard::f16>(case, *machine, job.seconds, baselines)
                        }
                        Dtype::Bf16 => {
                            measure::<regard::bf16>(case, *machine, job.seconds, baselines)
                        }
                    }
                }
            };
            let row = match (row, &mut job.record) {
                (Ok(row), None) => row,
                (Err(why), None) => return Err(why.context(item.name().to_owned())),
                (row, Some(record)) => {
                    // A child that ended is one case that is missing.
                    let row = row.unwrap_or_else(|why| {
                        baselines.iter_mut().for_each(Baseline::restart);
                        Row::failed(item.name(), *machine, format!("{why:#}"))
                    });
                    record.add(&row)?;
                    row
                }
            };
            progress.suspend(|| report.row(&row))?;
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    report.finish(job.seconds)
}

/// Prints the names that `--case` patterns choose from.
pub(crate) fn list(args: &BenchListArgs, format: Format) -> Result<()> {
    let pattern = args.case.as_deref();
    // A name, and whether it runs without being named.
    let names: Vec<(String, bool)> = if args.suite {
        suite::items(pattern)?.iter().map(|item| (item.name().into(), true)).collect()
    } else {
        let chosen = |name: &str| pattern.is_none_or(|pattern| list::matches(pattern, name));
        let cases = list::listed().into_iter().filter(|case| chosen(&case.name));
        cases.map(|case| (case.name, !case.slow)).collect()
    };
    if let (Some(pattern), true) = (pattern, names.is_empty()) {
        bail!("--case {pattern}: no listed case matches; see them with `regard bench list`");
    }
    let mut out = std::io::stdout().lock();
    for (name, default) in names {
        match format {
            Format::Json => {
                writeln!(out, "{}", serde_json::json!({ "case": name, "default": default }))?;
            }
            Format::Text => {
                let note = if default { "" } else { "  (slow: only with --case)" };
                writeln!(out, "{name}{note}")?;
            }
        }
    }
    Ok(())
}

fn measure<E: Element>(
    case: &Case,
    machine: Machine,
    seconds: f64,
    baselines: &mut [Baseline],
) -> Result<Row> {
    let input = Input::<E>::new(case)?;
    let cached = case.cached.map(|how| input.cache(how, case.quantization)).transpose()?;
    let plan = Plan::new(input.problem(case, cached.as_ref())?, machine)?;
    let compared = BaselineComparison { case, input: &input, plan: &plan, seconds };
    if let Some(map) = case.linear {
        return linear::measure(&compared, map);
    }
    if case.pass == Pass::Look {
        return look::measure(&compared);
    }
    if case.lsh {
        return lsh::measure(&compared);
    }
    let (q, k, v) = input.views();
    let forward = || match (&cached, case.cached) {
        (Some((cache, sequences)), Some(Cached::Shared)) => {
            plan.forward_shared(q, cache, sequences)
        }
        (Some((cache, sequences)), _) => plan.forward_cached(q, cache, sequences),
        (None, _) => plan.forward(q, k, v),
    };
    let before = match case.pass {
        Pass::Backward => Some(forward()?),
        _ => None,
    };
    let call = || -> Result<(), Error> {
        let new = if before.is_none() { Some(forward()?) } else { None };
        if let (false, Some(output)) =
            (case.pass == Pass::Forward, before.as_ref().or(new.as_ref()))
        {
            drop(black_box(plan.backward(q, k, v, output, input.output_grads())?));
        }
        drop(black_box(new));
        Ok(())
    };
    let seen = first_call(case, call)?;
    let (work, visible) = (plan.work(), visible(case, &plan));
    let flops = case.flops(work.pairs as f64);
    // What all sequences share is read once.
    let times = if case.cached == Some(Cached::Shared) { case.dims.batch } else { 1 };
    let units = match case.bound {
        Bound::Fma => flops,
        Bound::Read => work.bytes * visible / times as f64,
    };
    let bytes = match &cached {
        Some((cache, _)) if case.quantization.is_some() => cache.bytes_in_use(),
        _ => input.bytes() / times,
    };
    let roofline = Roofline::new(case.bound, machine, Units::of(&plan), bytes);
    let clock = if baselines.is_empty() { Clock::of(machine) } else { Clock::Wall };
    let mut turns = Turns { clock, roofline, units, seconds };
    let mut against: Vec<_> = baselines.iter_mut().map(|b| b.load(case, machine)).collect();
    let ready = baselines.iter_mut().zip(&against).filter(|(_, told)| told.ready.is_some());
    let mut asked: Vec<Sampled<'_>> =
        ready.map(|(baseline, _)| Box::new(|| baseline.sample()) as Sampled<'_>).collect();
    // The first call went well, so this one does.
    let samples = turns.take(|| drop(call()), &mut asked)?;
    let measured = against.iter_mut().filter(|told| told.ready.is_some());
    for ((told, seconds), ratios) in measured.zip(&samples.theirs).zip(&samples.ratios) {
        told.measured(seconds, ratios);
    }
    let row = Row::new(case, machine, &samples, Facts { flops, units, visible, seen })?;
    Ok(Row { baselines: against, ..row })
}

/// Visible pairs as a share of all.
fn visible<E: Element>(case: &Case, plan: &Plan<'_, E>) -> f64 {
    let Dims { batch, heads, q_len, k_len, .. } = case.dims;
    let all = batch as f64 * heads.q as f64 * q_len as f64 * k_len as f64;
    plan.work().pairs as f64 / all
}

/// What is known of a case beside its samples.
#[derive(Clone, Copy, Debug)]
struct Facts {
    flops: f64,
    /// What a call takes of what the roofline counts: flops or bytes.
    units: f64,
    visible: f64,
    seen: Option<memory::MemoryUse>,
}

impl Row {
    fn new(case: &Case, machine: Machine, samples: &Samples, facts: Facts) -> Result<Self> {
        let middle = |samples: &[f64]| SampleSummary::of(samples).context("nothing was measured");
        let (ours, roofline, of_roofline) =
            (middle(&samples.ours)?, middle(&samples.roofline)?, middle(&samples.of_roofline)?);
        let Facts { flops, units, visible, seen } = facts;
        let Dims { batch, heads, q_len, .. } = case.dims;
        let kernel = Kernel {
            row_ns: ours.median * 1e9 / (batch * heads.q * q_len) as f64,
            gflops: flops / ours.median * 1e-9,
            roofline: case.bound,
            roofline_gflops: roofline.median * flops / units * 1e-9,
            of_roofline: of_roofline.median,
            of_roofline_low: of_roofline.low,
            of_roofline_high: of_roofline.high,
            visible,
            peak_rss_mb: seen.map(|s| s.peak),
            extra_rss_mb: seen.map(|s| s.extra),
        };
        let row = Self::timed(&case.name, machine, &samples.ours)?;
        Ok(Self { kernel: Some(kernel.rounded()), ..row })
    }
}

/// Shows that the case runs and how much memory it takes beyond what it returns, where that can be known.
fn first_call(
    case: &Case,
    call: impl FnOnce() -> Result<(), Error>,
) -> Result<Option<memory::MemoryUse>> {
    let watch = memory::MemoryMonitor::start();
    call()?;
    Ok(watch.and_then(|watch| watch.stop(memory::mib(case.returned_bytes()))))
}

/// Seconds of a call of a baseline, each time it is asked.
type Sampled<'a> = Box<dyn FnMut() -> Result<f64> + 'a>;

/// How samples alternate.
struct Turns {
    clock: Clock,
    roofline: Roofline,
    /// What a call takes of what the roofline counts: flops or bytes.
    units: f64,
    seconds: f64,
}

/// One entry a turn.
#[derive(Default)]
struct Samples {
    /// Seconds of a call.
    ours: Vec<f64>,
    /// Units a second.
    roofline: Vec<f64>,
    of_roofline: Vec<f64>,
    /// Seconds of a call of each baseline.
    theirs: Vec<Vec<f64>>,
    /// Those by ours.
    ratios: Vec<Vec<f64>>,
}

impl Turns {
    /// Roofline, ours, roofline, each baseline; roofline, ours, ...
    fn take(&mut self, call: impl Fn(), others: &mut [Sampled<'_>]) -> Result<Samples> {
        let once = self.clock.time(&call).max(1e-9);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "at most the nanoseconds of a sample"
        )]
        let repetitions = ((SAMPLE / once).ceil() as u32).max(1);
        let roofline_seconds = (once / 2.0).clamp(SAMPLE, LONGEST_ROOFLINE);
        let none = vec![Vec::new(); others.len()];
        let mut samples = Samples { theirs: none.clone(), ratios: none, ..Samples::default() };
        let start = Instant::now();
        while !enough(samples.ours.len(), start.elapsed().as_secs_f64(), self.seconds) {
            let before = self.roofline.sample(roofline_seconds);
            if once < LONG {
                call();
            }
            let ours = self.clock.time(|| (0..repetitions).for_each(|_| call()));
            let ours = ours / f64::from(repetitions);
            let roofline = (before + self.roofline.sample(roofline_seconds)) / 2.0;
            samples.ours.push(ours);
            samples.roofline.push(roofline);
            samples.of_roofline.push(self.units / (ours * roofline));
            for (i, other) in others.iter_mut().enumerate() {
                let theirs = other()?;
                samples.theirs[i].push(theirs);
                samples.ratios[i].push(theirs / ours);
            }
        }
        Ok(samples)
    }
}
