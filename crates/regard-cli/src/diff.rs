//! `regard diff`: how far apart the weights of two runs are.

use crate::args::{DiffArgs, Format};
use crate::source;
use anyhow::{Result, bail};
use regard::Machine;
use regard_scope::{Divergence, Layer, LayerData, Site, diff, printable};
use serde_json::json;
use std::io::Write;

pub(crate) fn run(args: &DiffArgs, format: Format) -> Result<()> {
    let machine = Machine::detect();
    let (first, second) = (source::read_trace(&args.first)?, source::read_trace(&args.second)?);
    if let Some(more) = second.sites().iter().find(|site| first.layer(site).is_err()) {
        bail!(
            "{}: only the second trace has it; compare runs of the same model",
            printable(&more.to_string())
        );
    }
    let mut out = std::io::stdout().lock();
    if format == Format::Text {
        writeln!(
            out,
            "{:12} {:>5} {:>5} {:>10} {:>10} {:>10} {:>10}  worst query",
            "kind", "layer", "head", "mean KL", "max KL", "mean JS", "max JS"
        )?;
    }
    for layer in &first.layers {
        let site = |head| Site { layer: layer.layer, kind: layer.kind.clone(), head };
        let other = second.layer(&site(0))?;
        if first.labels(&layer.rows).labels != second.labels(&other.rows).labels {
            bail!(
                "{}: the words are not the same; compare runs over the same text",
                printable(&site(0).to_string())
            );
        }
        let (LayerData::Inputs(a), LayerData::Inputs(b)) = (&layer.data, &other.data) else {
            bail!(
                "{} layer {}: it holds weights; a comparison needs queries and keys",
                layer.kind,
                layer.layer
            );
        };
        let all = diff(&a.view(machine)?, &b.view(machine)?)?;
        for (head, rows) in all.chunks(layer.data.size()[0].max(1)).enumerate() {
            let found = Summary::of(rows);
            let line = match format {
                Format::Json => found.json(&site(head)).to_string(),
                Format::Text => found.line(&site(head), &word(&first, layer, found.worst)),
            };
            writeln!(out, "{line}")?;
        }
    }
    if format == Format::Text {
        writeln!(
            out,
            "In nats, over queries. KL: of the first run from the second; JS: from 0 to ln 2 = 0.693."
        )?;
    }
    Ok(())
}

fn word(trace: &regard_scope::Trace, layer: &Layer, row: usize) -> String {
    format!("{row} {}", trace.labels(&layer.rows).label(row).escape_debug())
}

/// The rows of a head together.
struct Summary {
    mean: Divergence,
    most: Divergence,
    /// By Jensen-Shannon.
    worst: usize,
}

impl Summary {
    fn of(rows: &[Divergence]) -> Self {
        let mut all = Self { mean: Divergence::default(), most: Divergence::default(), worst: 0 };
        for (i, row) in rows.iter().enumerate() {
            all.mean.kl += row.kl / rows.len() as f64;
            all.mean.js += row.js / rows.len() as f64;
            if row.js > all.most.js {
                all.worst = i;
            }
            all.most = Divergence { kl: all.most.kl.max(row.kl), js: all.most.js.max(row.js) };
        }
        all
    }

    fn json(&self, site: &Site) -> serde_json::Value {
        // JSON has no infinity.
        let number = |x: f64| if x.is_finite() { json!(x) } else { json!(null) };
        json!({
            "kind": site.kind, "layer": site.layer, "head": site.head,
            "kl_mean": number(self.mean.kl), "kl_max": number(self.most.kl),
            "js_mean": self.mean.js, "js_max": self.most.js, "worst_query": self.worst,
        })
    }

    fn line(&self, site: &Site, word: &str) -> String {
        let Self { mean, most, .. } = self;
        let (Site { layer, head, .. }, kind) = (site, printable(&site.kind));
        format!(
            "{kind:12} {layer:5} {head:5} {:10.3e} {:10.3e} {:10.3e} {:10.3e}  {word}",
            mean.kl, most.kl, mean.js, most.js
        )
    }
}
