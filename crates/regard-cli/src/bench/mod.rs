//! `regard bench`: our time, the machine's own limit and a rival's time, taken in turns.
//!
//! Shared machines change their speed from one moment to the next, so a number means nothing alone: each slice of
//! ours stands between two of the limit and beside one of the rival, ratios are taken between such neighbours, and
//! their median and spread are what is told.

mod case;
mod clock;
mod compared;
mod input;
mod limit;
mod linear;
mod list;
mod look;
mod lsh;
mod memory;
mod report;
mod spread;
mod torch;

use crate::args::{Dtype, Format};
use crate::job::BenchJob;
use anyhow::{Context, Result};
pub(crate) use case::Case;
use case::{Bound, Cached, Pass};
use clock::Clock;
use compared::Compared;
use indicatif::{ProgressBar, ProgressStyle};
use input::Input;
use limit::{Limit, Units};
pub(crate) use list::choose;
use regard::{Dims, Element, Error, Machine, Plan};
use report::{Report, Row};
use spread::Spread;
use std::hint::black_box;
use std::io::Write;
use std::time::Instant;
use torch::Torch;

/// Seconds of a slice, at least: short against the host's changes of mood, long against the clock and waking threads.
const SLICE: f64 = 2e-3;
/// Seconds of a slice of the limit, at most.
const LONGEST_LIMIT: f64 = 20e-3;
/// Slices of ours, at least, however slow.
const FEWEST: usize = 3;

pub(crate) fn run(job: BenchJob, format: Format) -> Result<()> {
    let mut rival = job.rival.as_deref().map(Torch::start).transpose()?;
    let names = job.cases.iter().map(|c| c.name.as_str());
    let another = |case: &Case| case.linear.is_some() || case.lsh || case.pass == Pass::Look;
    let compared = rival.is_some() || job.cases.iter().any(another);
    let mut report = Report::new(format, names, compared);
    // Draws on a terminal only, and only between measurements.
    let progress = ProgressBar::new((job.cases.len() * job.machines.len()) as u64);
    progress.set_style(ProgressStyle::with_template("{pos}/{len} {msg} [{elapsed}, {eta} left]")?);
    for case in &job.cases {
        for machine in &job.machines {
            progress.set_message(case.name.clone());
            progress.tick();
            let row = match case.dtype {
                Dtype::F32 => measure::<f32>(case, *machine, job.seconds, rival.as_mut()),
                Dtype::F64 => measure::<f64>(case, *machine, job.seconds, rival.as_mut()),
                Dtype::F16 => measure::<regard::f16>(case, *machine, job.seconds, rival.as_mut()),
                Dtype::Bf16 => measure::<regard::bf16>(case, *machine, job.seconds, rival.as_mut()),
            };
            let row = row.with_context(|| case.name.clone())?;
            progress.suspend(|| report.row(&row))?;
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    report.finish(job.seconds)
}

/// Prints the names that `--case` patterns choose from.
pub(crate) fn list(format: Format) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for case in list::listed() {
        match format {
            Format::Json => {
                let line = serde_json::json!({ "case": case.name, "default": !case.slow });
                writeln!(out, "{line}")?;
            }
            Format::Text => {
                let note = if case.slow { "  (slow: only with --case)" } else { "" };
                writeln!(out, "{}{note}", case.name)?;
            }
        }
    }
    Ok(())
}

fn measure<E: Element>(
    case: &Case,
    machine: Machine,
    seconds: f64,
    rival: Option<&mut Torch>,
) -> Result<Row> {
    let input = Input::<E>::new(case)?;
    let cached = case.cached.map(|how| input.cache(how)).transpose()?;
    let plan = Plan::new(input.problem(case, cached.as_ref())?, machine)?;
    let compared = Compared { case, input: &input, plan: &plan, seconds };
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
            drop(black_box(plan.backward(q, k, v, output, input.upstream())?));
        }
        drop(black_box(new));
        Ok(())
    };
    let seen = first_call(case, call)?;
    let (work, visible) = (plan.work(), visible(case, &plan));
    let flops = case.flops(work.pairs as f64);
    let (units, memory) = match case.bound {
        Bound::Fma => (flops, [&[][..]; 2]),
        Bound::Read => {
            // What all sequences share is read once.
            let times = if case.cached == Some(Cached::Shared) { case.dims.batch } else { 1 };
            let memory = input.keys_and_values().map(|m| &m[..m.len() / times]);
            (work.bytes * visible / times as f64, memory)
        }
    };
    let limit = Limit::new(case.bound, machine, Units::of(&plan), memory);
    let mut turns = Turns { clock: Clock::of(machine), limit, units, seconds };
    let (mut rival, mut rival_error, mut rival_extra) = (rival, None, None);
    if let Some(torch) = rival.as_mut() {
        match torch.load(case, machine, SLICE)? {
            Ok(extra) => rival_extra = extra,
            Err(why) => rival_error = Some(why),
        }
    }
    let rival = rival.filter(|_| rival_error.is_none());
    let rival_name = rival.as_ref().map(|torch| torch.name.clone());
    let rival = rival.map(|torch| || torch.slice());
    // The first call went well, so this one does.
    let samples = turns.take(|| drop(call()), rival)?;
    let row = Row::new(case, machine, &samples, Facts { flops, units, visible, seen })?;
    Ok(Row { rival: rival_name, rival_error, rival_extra_rss_mb: rival_extra, ..row })
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
    /// What a call takes of what the limit counts: flops or bytes.
    units: f64,
    visible: f64,
    seen: Option<memory::Seen>,
}

impl Row {
    fn new(case: &Case, machine: Machine, samples: &Samples, facts: Facts) -> Result<Self> {
        let middle = |samples: &[f64]| Spread::of(samples).context("nothing was measured");
        let (ours, limit, of_limit) =
            (middle(&samples.ours)?, middle(&samples.limit)?, middle(&samples.of_limit)?);
        let Facts { flops, units, visible, seen } = facts;
        let Dims { batch, heads, q_len, .. } = case.dims;
        let mut row = Self {
            case: case.name.clone(),
            isa: machine.isa.name(),
            threads: machine.threads,
            median_ms: ours.median * 1e3,
            row_ns: ours.median * 1e9 / (batch * heads.q * q_len) as f64,
            gflops: flops / ours.median * 1e-9,
            limit: case.bound,
            limit_gflops: limit.median * flops / units * 1e-9,
            of_limit: of_limit.median,
            of_limit_p10: of_limit.p10,
            of_limit_p90: of_limit.p90,
            rival: None,
            rival_error: None,
            rival_ms: None,
            vs_rival: None,
            vs_rival_p10: None,
            vs_rival_p90: None,
            recall_mass: None,
            recall_top: None,
            visible,
            slices: samples.ours.len(),
            peak_rss_mb: seen.map(|s| s.peak),
            extra_rss_mb: seen.map(|s| s.extra),
            rival_extra_rss_mb: None,
        };
        row.against(&samples.rival, &samples.vs_rival);
        Ok(row)
    }
}

/// Shows that the case runs and how much memory it takes beyond what it returns, where that can be known.
fn first_call(
    case: &Case,
    call: impl FnOnce() -> Result<(), Error>,
) -> Result<Option<memory::Seen>> {
    let watch = memory::Watch::start();
    call()?;
    Ok(watch.and_then(|watch| watch.stop(memory::mib(case.returned_bytes()))))
}

/// How slices alternate.
struct Turns<'a, E> {
    clock: Clock,
    limit: Limit<'a, E>,
    /// What a call takes of what the limit counts: flops or bytes.
    units: f64,
    seconds: f64,
}

/// One entry a turn.
#[derive(Default)]
struct Samples {
    /// Seconds of a call.
    ours: Vec<f64>,
    /// Units a second.
    limit: Vec<f64>,
    of_limit: Vec<f64>,
    /// Seconds of a call.
    rival: Vec<f64>,
    vs_rival: Vec<f64>,
}

impl<E: Element> Turns<'_, E> {
    /// Limit, ours, limit, rival; limit, ours, ...
    ///
    /// The rival tells the seconds of one of its calls.
    fn take(
        &mut self,
        call: impl Fn(),
        mut rival: Option<impl FnMut() -> Result<f64>>,
    ) -> Result<Samples> {
        let once = self.clock.time(&call).max(1e-9);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "at most the nanoseconds of a slice"
        )]
        let repetitions = ((SLICE / once).ceil() as u32).max(1);
        let limit_seconds = (once / 2.0).clamp(SLICE, LONGEST_LIMIT);
        let mut samples = Samples::default();
        let start = Instant::now();
        while samples.ours.len() < FEWEST || start.elapsed().as_secs_f64() < self.seconds {
            let before = self.limit.slice(limit_seconds);
            let ours = self.clock.time(|| (0..repetitions).for_each(|_| call()));
            let ours = ours / f64::from(repetitions);
            let limit = (before + self.limit.slice(limit_seconds)) / 2.0;
            samples.ours.push(ours);
            samples.limit.push(limit);
            samples.of_limit.push(self.units / (ours * limit));
            if let Some(rival) = &mut rival {
                let theirs = rival()?;
                samples.rival.push(theirs);
                samples.vs_rival.push(theirs / ours);
            }
        }
        Ok(samples)
    }
}
