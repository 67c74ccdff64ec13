//! `regard diff`: how far apart the weights of two runs are.

use crate::args::{DiffArgs, Format};
use crate::show::progress;
use crate::source;
use anyhow::Result;
use regard::Machine;
use regard_scope::{HeadDiff, Site, Trace, head_diffs, printable};
use serde_json::json;
use std::io::Write;

pub(crate) fn run(args: &DiffArgs, format: Format) -> Result<()> {
    let [first, second] = traces(args)?;
    let all = head_diffs(&first, &second, Machine::detect(), &mut progress("layers")?)?;
    let mut out = std::io::stdout().lock();
    if format == Format::Json {
        for found in &all {
            writeln!(out, "{}", json(found))?;
        }
        return Ok(());
    }
    writeln!(
        out,
        "{:12} {:>5} {:>5} {:>10} {:>10} {:>10} {:>10}  worst query",
        "kind", "layer", "head", "mean KL", "max KL", "mean JS", "max JS"
    )?;
    for HeadDiff { site, mean, most, worst } in &all {
        writeln!(
            out,
            "{:12} {:5} {:5} {:10.3e} {:10.3e} {:10.3e} {:10.3e}  {}",
            printable(&site.kind),
            site.layer,
            site.head,
            mean.kl,
            most.kl,
            mean.js,
            most.js,
            word(&first, site, *worst)?
        )?;
    }
    writeln!(
        out,
        "In nats, over queries. KL: of the first run from the second; JS: from 0 to ln 2 = 0.693."
    )?;
    Ok(())
}

fn traces(args: &DiffArgs) -> Result<[Trace; 2]> {
    #[cfg(feature = "models")]
    if let Some(dtype) = args.kv_dtype {
        return crate::models::look_with_caches(&args.first, &args.second, dtype);
    }
    Ok([source::read_trace(&args.first)?, source::read_trace(&args.second)?])
}

fn word(trace: &Trace, site: &Site, row: usize) -> Result<String> {
    let labels = trace.labels(&trace.layer(site)?.rows);
    Ok(format!("{row} {}", labels.label(row).escape_debug()))
}

fn json(found: &HeadDiff) -> serde_json::Value {
    // JSON has no infinity.
    let number = |x: f64| if x.is_finite() { json!(x) } else { json!(null) };
    let HeadDiff { site, mean, most, worst } = found;
    json!({
        "kind": site.kind, "layer": site.layer, "head": site.head,
        "kl_mean": number(mean.kl), "kl_max": number(most.kl),
        "js_mean": mean.js, "js_max": most.js, "worst_query": worst,
    })
}
