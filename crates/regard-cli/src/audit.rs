//! `regard audit`: which head tolerates which sparsity.

use crate::args::{AuditArgs, Format};
use crate::source;
use anyhow::{Result, anyhow, bail};
use regard::{Machine, View};
use regard_approx::LshAttention;
use regard_scope::{Inputs, LayerData, Pattern, RetainedMass, audit, parse_mask, printable};
use serde_json::{Map, Value, json};
use std::io::Write;

/// Characters of a column.
const WIDTH: usize = 11;

pub(crate) fn run(args: &AuditArgs, format: Format) -> Result<()> {
    let (trace, machine) = (source::read(&args.source)?, Machine::detect());
    let mut out = std::io::stdout().lock();
    let mut first = true;
    for layer in &trace.layers {
        let LayerData::Inputs(heads) = &layer.data else {
            bail!(
                "{} layer {}: it holds weights; an audit needs queries and keys",
                printable(&layer.kind),
                layer.layer
            );
        };
        let patterns = patterns(args, heads, machine)?;
        if format == Format::Text && first {
            write!(out, "{:8} {:>5} {:>4}", "kind", "layer", "head")?;
            for (name, _) in &patterns {
                let name: String = name.chars().take(WIDTH).collect();
                write!(out, " {name:>WIDTH$}")?;
            }
            writeln!(out)?;
            first = false;
        }
        let (names, patterns): (Vec<_>, Vec<_>) = patterns.into_iter().unzip();
        for head in audit(&heads.view(machine)?, &patterns)? {
            let retained = names.iter().zip(&head.retained);
            if format == Format::Json {
                let kept: Map<String, Value> = retained
                    .map(|(name, RetainedMass { mean, worst })| {
                        (name.clone(), json!({ "mean": mean, "worst": worst }))
                    })
                    .collect();
                writeln!(
                    out,
                    "{}",
                    json!({ "kind": layer.kind, "layer": layer.layer, "head": head.head, "kept": kept })
                )?;
                continue;
            }
            write!(out, "{:8} {:5} {:4}", printable(&layer.kind), layer.layer, head.head)?;
            for (_, RetainedMass { mean, worst }) in retained {
                write!(out, " {:>WIDTH$}", format!("{mean:.3} {worst:.2}"))?;
            }
            writeln!(out)?;
        }
    }
    if format == Format::Text {
        writeln!(
            out,
            "The weight that each pattern would keep: the mean over queries, and the worst of them."
        )?;
    }
    Ok(())
}

/// The patterns of the arguments, each with its name.
fn patterns(args: &AuditArgs, heads: &Inputs, machine: Machine) -> Result<Vec<(String, Pattern)>> {
    let mut patterns: Vec<Pattern> =
        args.windows.iter().map(|keys| Pattern::Window(*keys)).collect();
    patterns.extend(args.top.iter().map(|keys| Pattern::TopK(*keys)));
    for text in &args.pattern {
        patterns.push(Pattern::Mask(parse_mask(text).map_err(|e| anyhow!("--pattern: {e}"))?));
    }
    let mut named: Vec<_> = patterns.into_iter().map(|p| (p.to_string(), p)).collect();
    if args.lsh {
        let lsh = LshAttention::new();
        let lsh = if heads.mask.trim() == "causal" { lsh.causal() } else { lsh };
        let view = |data, [heads, len, dim]: [usize; 3]| View::bhsd(data, [1, heads, len, dim]);
        let (q, k) = (view(&heads.q, heads.q_shape)?, view(&heads.k, heads.k_shape)?);
        let mask = lsh.candidates(machine, q, k)?.mask();
        named.push(("lsh".into(), Pattern::Mask(mask)));
    }
    Ok(named)
}
