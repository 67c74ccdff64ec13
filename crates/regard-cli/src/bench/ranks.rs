//! `regard bench ranks`: attention over one sequence that is spread over ranks, beside what the cost model says of it.

use super::memory::MemoryMonitor;
use crate::args::{Dtype, Format, RanksArgs, Scheme};
use crate::job::flops;
use crate::plan::rate;
use crate::ranks::on_ranks;
use anyhow::{Result, bail};
use bytemuck::Pod;
use regard::{Element, Layout, Machine, Number, Output, Plan, Problem, Shape, Tensor};
use regard_ranks::context::{ContextError, Shards, attend, ring};
use regard_ranks::{Call, Cluster, Cost, Ranks, gather};
use regard_scope::parse_mask;
use regard_testkit::Noise;
use serde::Serialize;
use std::io::Write;
use std::time::Instant;

/// What was measured, the slowest rank's where they differ.
#[derive(Serialize)]
struct Line {
    scheme: &'static str,
    ranks: usize,
    seconds: f64,
    /// Waiting for the network: all of it before the computation, or what a ring could not hide.
    exposed_seconds: f64,
    /// The most memory that a rank needed: its tensors, what it received, scratch.
    peak_mib: f64,
    /// Of the output and the lse, in the order of rows.
    digest: String,
    predicted_seconds: f64,
    predicted_exposed_seconds: f64,
    predicted_mib: f64,
}

pub(crate) fn run(args: &RanksArgs, format: Format) -> Result<()> {
    on_ranks(args.mpi, |ranks| match args.dtype {
        Dtype::F32 => measure::<f32>(&*ranks, args, format),
        Dtype::Bf16 => measure::<regard::bf16>(&*ranks, args, format),
        Dtype::F16 => measure::<regard::f16>(&*ranks, args, format),
        Dtype::F64 => bail!("--dtype f64: a sequence is spread over ranks in f32, f16 or bf16"),
    })
}

fn measure<E: Element + Pod>(ranks: &dyn Ranks, args: &RanksArgs, format: Format) -> Result<()> {
    let RanksArgs { heads, dim, queries: len, .. } = *args;
    let kv_heads = args.kv_heads.unwrap_or(heads);
    let q_shape = Shape { batch: 1, heads, len, dim };
    let k_shape = Shape { heads: kv_heads, ..q_shape };
    let problem = Problem::<E>::of_shapes(q_shape, k_shape, k_shape).mask(parse_mask(&args.mask)?);
    let machine = Machine::detect();
    let plan = Plan::new(problem, machine)?;
    // All ranks measure at once, as they compute; the slowest is waited for.
    let flops = flops(args.gflops)?.map_or_else(|| rate::<E>(machine), Ok)?;
    let flops =
        gather(ranks, &[flops], &vec![1; ranks.count()])?.into_iter().fold(f64::INFINITY, f64::min);
    let shards = Shards::new(&plan, ranks.count())?;
    let memory = MemoryMonitor::start();
    let own = |seed, shape| own_rows::<E>(&shards, ranks.rank(), shape, seed);
    let (q, k, v) = (own(1, q_shape)?, own(2, k_shape)?, own(3, k_shape)?);
    let mut best: Option<[f64; 2]> = None;
    let mut output = None;
    for _ in 0..args.repeat {
        let waited = ranks.waited();
        // All begin together.
        gather(ranks, &[0u8], &vec![1; ranks.count()])?;
        let start = Instant::now();
        output = Some(call(ranks, args.scheme, &plan, [&q, &k, &v])?);
        let seconds = start.elapsed().as_secs_f64();
        let own = [seconds, ranks.waited() - waited];
        let all = gather(ranks, &[own], &vec![1; ranks.count()])?;
        let slowest = [0, 1].map(|i| all.iter().map(|one| one[i]).fold(0.0, f64::max));
        if best.is_none_or(|best| slowest[0] < best[0]) {
            best = Some(slowest);
        }
    }
    let (Some([seconds, exposed]), Some(output)) = (best, output) else {
        bail!("--repeat 0: nothing was measured; give 1 or more");
    };
    let used = memory.and_then(|memory| memory.stop(0.0)).map_or(f64::NAN, |used| used.extra);
    let used = gather(ranks, &[used], &vec![1; ranks.count()])?;
    let digest = digest(ranks, &shards, &output, heads)?;
    let cluster = Cluster { ranks: ranks.count(), flops, network: args.network / 8.0 };
    let call = Call::of_shapes::<E>([q_shape, k_shape, k_shape], plan.work().flops);
    let Cost { compute, exposed: waits, memory: predicted_bytes, .. } = match args.scheme {
        Scheme::Gather => call.gathered(cluster),
        Scheme::Ring => call.ring(cluster),
    };
    let line = Line {
        scheme: args.scheme.name(),
        ranks: ranks.count(),
        seconds,
        exposed_seconds: exposed,
        peak_mib: used.into_iter().fold(0.0, f64::max),
        digest,
        predicted_seconds: compute + waits,
        predicted_exposed_seconds: waits,
        predicted_mib: predicted_bytes / (1u64 << 20) as f64,
    };
    if ranks.rank() == 0 { print(&line, format) } else { Ok(()) }
}

fn call<E: Element + Pod>(
    ranks: &dyn Ranks,
    scheme: Scheme,
    plan: &Plan<'_, E>,
    [q, k, v]: [&Tensor<E>; 3],
) -> Result<Output<E>, ContextError> {
    let of = match scheme {
        Scheme::Gather => attend,
        Scheme::Ring => ring,
    };
    of(ranks, plan, q.view(), k.view(), v.view())
}

/// The rows of a rank, of a tensor that follows from the seed: no rank has more.
fn own_rows<E: Element>(
    shards: &Shards,
    rank: usize,
    shape: Shape,
    seed: u64,
) -> Result<Tensor<E>> {
    let Shape { heads, dim, .. } = shape;
    let mut data = Vec::with_capacity(heads * shards.len(rank) * dim);
    for head in 0..heads as u64 {
        for row in shards.chunks(rank).into_iter().flatten() {
            let mut noise = Noise::new(seed << 56 ^ head << 40 ^ row as u64);
            data.extend(noise.normals::<E>(dim));
        }
    }
    Ok(Tensor::new(data, Shape { len: shards.len(rank), ..shape }, Layout::Bhsd)?)
}

/// A hash over the bits of each row, in the order of heads and rows of the whole.
fn digest<E: Element>(
    ranks: &dyn Ranks,
    shards: &Shards,
    output: &Output<E>,
    heads: usize,
) -> Result<String> {
    let (dim, own) = (output.out.shape().dim, shards.len(ranks.rank()));
    let step = |hash: u64, bits: u64| (hash ^ bits).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
    let of_row = |i: usize| {
        let row = output.out.data()[i * dim..][..dim].iter();
        let hash =
            row.fold(0xcbf2_9ce4_8422_2325, |hash, x| step(hash, x.widen().to_f64().to_bits()));
        step(hash, output.lse[i].to_f64().to_bits())
    };
    let hashes: Vec<u64> = (0..heads * own).map(of_row).collect();
    let counts: Vec<usize> = (0..ranks.count()).map(|rank| heads * shards.len(rank)).collect();
    let all = shards.join(&gather(ranks, &hashes, &counts)?, [1, heads, 1])?;
    Ok(format!("{:016x}", all.data().iter().fold(0, |hash, row| step(hash, *row))))
}

fn print(line: &Line, format: Format) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if format == Format::Json {
        writeln!(out, "{}", serde_json::to_string(line)?)?;
        return Ok(());
    }
    let Line { scheme, ranks, digest, .. } = line;
    writeln!(out, "{scheme}, {ranks} ranks{:>22} {:>12}", "measured", "predicted")?;
    let rows = [
        ("seconds", line.seconds, line.predicted_seconds),
        ("  exposed", line.exposed_seconds, line.predicted_exposed_seconds),
        ("MiB of a rank", line.peak_mib, line.predicted_mib),
    ];
    for (name, measured, predicted) in rows {
        writeln!(out, "{name:24} {measured:>12.3} {predicted:>12.3}")?;
    }
    writeln!(out, "digest of the output     {digest}")?;
    Ok(())
}
