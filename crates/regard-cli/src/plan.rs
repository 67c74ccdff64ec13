//! `regard plan`: what would run for a problem that exists as flags alone. No tensor is allocated: options that need
//! data get one row that repeats.

use crate::args::{Dtype, Format, LayoutArg, SimilarityArg};
use crate::job::PlanJob;
use anyhow::{Result, anyhow};
use regard::plan::Work;
use regard::problem::{Additive, Similarity};
use regard::score::alibi_slopes;
use regard::tensor::Strides;
use regard::{Element, Error, Plan, Problem, Shape, View};
use serde::Serialize;
use std::io::Write;

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
    let mut out = std::io::stdout().lock();
    if format == Format::Json {
        let Work { pairs, computed, full, partial, skipped, flops, bytes, .. } = plan.work();
        let (problem, plan) = (plan.problem().to_string(), plan.to_string());
        let line = Line { plan, problem, pairs, computed, full, partial, skipped, flops, bytes };
        writeln!(out, "{}", serde_json::to_string(&line)?)?;
        return Ok(());
    }
    let layout = match job.layout {
        LayoutArg::Bhsd => "[batch, heads, len, dim]",
        LayoutArg::Bshd => "[batch, len, heads, dim]",
    };
    writeln!(out, "{plan:#}\n  memory   {layout}: read where it lies, the output laid out like q")?;
    Ok(())
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
