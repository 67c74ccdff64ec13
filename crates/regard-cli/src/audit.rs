//! `regard audit`: which head tolerates which sparsity.

use crate::args::{AuditArgs, Format};
use crate::source;
use anyhow::{Result, anyhow, bail};
use regard::{LshAttention, Pattern, Share};
use regard_scope::{Inputs, Seen, parse_mask, printable};
use serde_json::{Map, Value, json};
use std::io::Write;

/// Characters of a column.
const WIDTH: usize = 11;

pub(crate) fn run(args: &AuditArgs, format: Format) -> Result<()> {
    let (trace, machine) = (source::read(&args.source)?, source::machine(args.source.threads));
    let mut out = std::io::stdout().lock();
    let mut first = true;
    for layer in &trace.layers {
        let Seen::Inputs(heads) = &layer.seen else {
            bail!(
                "{} layer {}: it holds weights; an audit needs queries and keys",
                printable(&layer.kind),
                layer.layer
            );
        };
        let patterns = patterns(args, heads)?;
        if format == Format::Text && first {
            write!(out, "{:8} {:>5} {:>4}", "kind", "layer", "head")?;
            for name in patterns.iter().map(short) {
                write!(out, " {name:>WIDTH$}")?;
            }
            writeln!(out)?;
            first = false;
        }
        for head in heads.view(machine)?.audit(&patterns)?.heads {
            let shares = patterns.iter().map(ToString::to_string).zip(&head.kept);
            if format == Format::Json {
                let kept: Map<String, Value> = shares
                    .map(|(name, Share { mean, worst, .. })| {
                        (name, json!({ "mean": mean, "worst": worst }))
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
            for (_, Share { mean, worst, .. }) in shares {
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

fn patterns(args: &AuditArgs, heads: &Inputs) -> Result<Vec<Pattern>> {
    let mut patterns: Vec<Pattern> =
        args.windows.iter().map(|keys| Pattern::Window(*keys)).collect();
    patterns.extend(args.top.iter().map(|keys| Pattern::TopK(*keys)));
    for text in &args.pattern {
        patterns.push(Pattern::Mask(parse_mask(text).map_err(|e| anyhow!("--pattern: {e}"))?));
    }
    if args.lsh {
        let lsh = LshAttention::new();
        let causal = heads.mask.trim() == "causal";
        patterns.push(Pattern::Lsh(if causal { lsh.causal() } else { lsh }));
    }
    Ok(patterns)
}

/// The name of a pattern as a column can hold it.
fn short(pattern: &Pattern) -> String {
    pattern.to_string().chars().take(WIDTH).collect()
}
