//! `regard info`: this machine, and what a typical call would run on it.

use crate::args::Format;
use anyhow::{Context, Result};
use regard::{Isa, Machine, Plan, Problem, Shape};
use serde_json::json;
use std::io::Write;

/// The shape that most people would try first.
const TYPICAL: (&str, Shape) =
    ("prefill-f32-n2048-d64", Shape { batch: 1, heads: 8, len: 2048, dim: 64 });

pub(crate) fn run(format: Format) -> Result<()> {
    let machine = Machine::detect();
    let (name, shape) = TYPICAL;
    let plan = Plan::new(Problem::<f32>::of_shapes(shape, shape, shape), machine)
        .context("planning the typical call")?;
    let version = env!("CARGO_PKG_VERSION");
    let cpu = cpu_name();
    let lanes = |isa: Isa| (isa.lanes::<f32>(), isa.lanes::<f64>());
    let mut out = std::io::stdout().lock();
    let available = Isa::available();
    if format == Format::Json {
        let isas: Vec<_> = available
            .iter()
            .map(|isa| json!({ "name": isa.name(), "f32_lanes": lanes(*isa).0, "f64_lanes": lanes(*isa).1 }))
            .collect();
        let line = json!({
            "version": version, "cpu": cpu, "threads": machine.threads,
            "l1_bytes": machine.l1, "l2_bytes": machine.l2,
            "isa": machine.isa.name(), "isas": isas,
            "typical": name, "plan": plan.to_string(),
        });
        writeln!(out, "{line}")?;
        return Ok(());
    }
    writeln!(out, "regard {version}")?;
    writeln!(out, "  cpu      {}", cpu.as_deref().unwrap_or("unknown"))?;
    writeln!(out, "  threads  {}", machine.threads)?;
    writeln!(out, "  caches   {} KiB L1 and {} KiB L2 a core", machine.l1 >> 10, machine.l2 >> 10)?;
    for isa in available.into_iter().rev() {
        let used = if isa == machine.isa { "used" } else { "also available: --isa" };
        let (f32s, f64s) = lanes(isa);
        writeln!(out, "  isa      {:<8} {f32s:>2} f32 or {f64s:>2} f64 lanes, {used}", isa.name())?;
    }
    writeln!(out, "\nA typical call, {name} (batch 1, heads 8), would run:\n{plan:#}")?;
    Ok(())
}

/// As Linux tells it.
fn cpu_name() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}
