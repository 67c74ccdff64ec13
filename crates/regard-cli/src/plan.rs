//! `regard plan`: what would run for a problem that exists as flags alone. No tensor is allocated: options that need
//! data get one row that repeats.

use crate::args::{Dtype, Format, LayoutArg, SimilarityArg};
use crate::job::{PlanJob, SpreadJob};
use anyhow::{Result, anyhow};
use regard::plan::Work;
use regard::problem::{Additive, Similarity};
use regard::score::alibi_slopes;
use regard::tensor::Strides;
use regard::{Element, Error, Machine, Mask, Plan, Problem, Shape, View};
use regard_ranks::{Call, Cluster, Cost};
use regard_testkit::Noise;
use serde::Serialize;
use std::io::Write;
use std::time::Instant;

pub(crate) fn run(job: PlanJob, format: Format) -> Result<()> {
    match job.dtype {
        Dtype::F32 => describe::<f32>(job, format),
        Dtype::F64 => describe::<f64>(job, format),
        Dtype::F16 => describe::<regard::f16>(job, format),
        Dtype::Bf16 => describe::<regard::bf16>(job, format),
    }
}

/// One line for a program.
#[derive(Serialize)]
struct Line {
    plan: String,
    problem: String,
    pairs: u128,
    computed: u128,
    full: u128,
    partial: u128,
    skipped: u128,
    flops: f64,
    bytes: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    ranks: Option<Spread>,
}

/// The call on several machines.
#[derive(Serialize)]
struct Spread {
    flops_per_second: f64,
    network_bytes_per_second: f64,
    /// Up to which a ring hides its communication.
    most_ranks: f64,
    costs: Vec<SpreadCost>,
}

#[derive(Serialize)]
struct SpreadCost {
    ranks: usize,
    gathered: CostLine,
    ring: CostLine,
}

#[derive(Serialize)]
struct CostLine {
    compute_seconds: f64,
    exposed_seconds: f64,
    received_bytes: f64,
    memory_bytes: f64,
}

impl From<Cost> for CostLine {
    fn from(cost: Cost) -> Self {
        Self {
            compute_seconds: cost.compute,
            exposed_seconds: cost.exposed,
            received_bytes: cost.received,
            memory_bytes: cost.memory,
        }
    }
}

/// Estimates for 1, 2, 4, .. machines, and for as many as were asked for.
fn spread<E: Element>(
    job: &SpreadJob,
    shapes: [Shape; 3],
    flops: f64,
    machine: Machine,
) -> Result<Spread> {
    let call = Call::of_shapes::<E>(shapes, flops);
    let rate = job.flops.map_or_else(|| rate::<E>(machine), Ok)?;
    let cluster = |ranks| Cluster { ranks, flops: rate, network: job.network };
    let mut counts: Vec<usize> =
        std::iter::successors(Some(1), |n| Some(2 * n)).take_while(|n| *n < job.ranks).collect();
    counts.push(job.ranks);
    let cost = |ranks| SpreadCost {
        ranks,
        gathered: call.gathered(cluster(ranks)).into(),
        ring: call.ring(cluster(ranks)).into(),
    };
    Ok(Spread {
        flops_per_second: rate,
        network_bytes_per_second: job.network,
        most_ranks: call.most_ranks(cluster(1)),
        costs: counts.into_iter().map(cost).collect(),
    })
}

/// FLOP/s of a causal call on this machine: the best of several, for others may be working on it.
pub(crate) fn rate<E: Element>(machine: Machine) -> Result<f64> {
    const SHAPE: Shape = Shape { batch: 1, heads: 8, len: 2048, dim: 64 };
    let data: Vec<E> = Noise::new(1).normals(8 * 2048 * 64);
    let view = View::bhsd(&data, SHAPE.to_array())?;
    let plan = Plan::new(Problem::new(&view, &view, &view).mask(Mask::causal()), machine)?;
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        plan.forward(view, view, view)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(plan.work().flops / best)
}

fn print(out: &mut impl Write, spread: &Spread) -> Result<()> {
    let Spread { flops_per_second, network_bytes_per_second, most_ranks, costs } = spread;
    writeln!(
        out,
        "  ranks    {:.0} GFLOP/s and {:.2} GB/s of network each; estimates",
        flops_per_second / 1e9,
        network_bytes_per_second / 1e9
    )?;
    writeln!(
        out,
        "           {:>6} {:>12} {:>12} {:>18} {:>10} {:>16} {:>10}",
        "ranks", "compute", "received", "exposed: gather", "memory", "exposed: ring", "memory"
    )?;
    for SpreadCost { ranks, gathered, ring } in costs {
        writeln!(
            out,
            "           {ranks:>6} {:>10.3} s {:>9.3} GB {:>16.3} s {:>7.2} GB {:>14.3} s {:>7.2} GB",
            gathered.compute_seconds,
            gathered.received_bytes / 1e9,
            gathered.exposed_seconds,
            gathered.memory_bytes / 1e9,
            ring.exposed_seconds,
            ring.memory_bytes / 1e9
        )?;
    }
    writeln!(
        out,
        "           a ring hides its communication up to {most_ranks:.0} ranks; more do not pay"
    )?;
    Ok(())
}

fn describe<E: Element>(job: PlanJob, format: Format) -> Result<()> {
    let [q, k, v] = job.shapes;
    let zero = E::narrow(E::Num::default());
    // Of the longest that is asked for below.
    let longest = if job.bias { k.len.max(k.dim) } else { k.dim };
    let (row, sinks) = (vec![zero; longest], vec![E::Num::default(); q.heads]);
    let slopes: Vec<E::Num> = alibi_slopes(q.heads);
    let repeated = |shape| View::strided(&row, shape, Strides { batch: 0, heads: 0, len: 0 });

    let mut score = job.score.score();
    if job.alibi {
        score = score.alibi(&slopes);
    }
    if job.sinks {
        score = score.sinks(&sinks);
    }
    if job.bias {
        score = score.bias(repeated(Shape { len: q.len, dim: k.len, ..q })?);
    }
    let similarity = match job.score.similarity {
        SimilarityArg::Dot => Similarity::Dot,
        SimilarityArg::Distance => Similarity::Distance,
        SimilarityArg::Additive => {
            let w = repeated(Shape { batch: 1, heads: 1, len: q.dim, dim: k.dim })?;
            let v = repeated(Shape { batch: 1, heads: 1, len: 1, dim: k.dim })?;
            Similarity::Additive(Additive { w_q: w, w_k: Some(w), v })
        }
        SimilarityArg::General => {
            Similarity::General(repeated(Shape { batch: 1, heads: 1, len: q.dim, dim: k.dim })?)
        }
    };
    let problem =
        Problem::of_shapes(q, k, v).mask(job.score.mask).score(score).similarity(similarity);
    let plan = Plan::new(problem, job.machine).map_err(name_the_flag)?;
    let spread = job.spread.as_ref();
    let ranks = spread
        .map(|spread| self::spread::<E>(spread, job.shapes, plan.work().flops, job.machine))
        .transpose()?;
    let mut out = std::io::stdout().lock();
    if format == Format::Json {
        let Work { pairs, computed, full, partial, skipped, flops, bytes, .. } = plan.work();
        let (problem, plan) = (plan.problem().to_string(), plan.to_string());
        let line =
            Line { plan, problem, pairs, computed, full, partial, skipped, flops, bytes, ranks };
        writeln!(out, "{}", serde_json::to_string(&line)?)?;
        return Ok(());
    }
    let layout = match job.layout {
        LayoutArg::Bhsd => "[batch, heads, len, dim]",
        LayoutArg::Bshd => "[batch, len, heads, dim]",
    };
    writeln!(out, "{plan:#}\n  memory   {layout}: read where it lies, the output laid out like q")?;
    ranks.map_or(Ok(()), |ranks| print(&mut out, &ranks))
}

/// The library speaks of options; people typed flags.
fn name_the_flag(error: Error) -> anyhow::Error {
    match &error {
        Error::HeadGroups { q, kv } => anyhow!(
            "--heads {q} --kv-heads {kv}: the first must be a multiple of the second; give --kv-heads a divisor of {q}"
        ),
        Error::Value { .. } => anyhow!("--{error}"),
        Error::Count { .. } | Error::OutOfRange { .. } | Error::Zero { .. } => {
            anyhow!("--mask: {error}")
        }
        _ => error.into(),
    }
}
