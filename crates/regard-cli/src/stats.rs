//! `regard stats`: numbers of each head.

use crate::args::{Format, StatsArgs};
use crate::long_arrays::LongArrays;
use crate::ranks::on_ranks;
use crate::show::{Target, progress, show, style};
use crate::source::{self, Span};
use anyhow::{Result, bail};
use regard::Machine;
use regard_scope::{HeadStats, Scale, Site, Trace, printable, span_mass, stats, table};
use serde_json::json;
use std::io::Write;

pub(crate) fn run(args: &StatsArgs, format: Format) -> Result<()> {
    if let Some(file) = &args.spans {
        let spans = source::spans(file)?;
        return print_masses(&source::read(&args.source)?, &spans, format);
    }
    let target = Target::of(args.show.out.as_deref())?;
    on_ranks(args.mpi, |ranks| {
        let all = if args.mpi.mpi {
            LongArrays::open(&args.source)?.stats(&*ranks)?
        } else {
            let trace = source::read(&args.source)?;
            stats(&trace, Machine::detect(), &mut progress("layers")?)?
        };
        if ranks.rank() == 0 { print(&all, args, (target, format)) } else { Ok(()) }
    })
}

fn print(all: &[HeadStats], args: &StatsArgs, (target, format): (Target, Format)) -> Result<()> {
    if let Some(name) = args.view.as_ref().filter(|_| format == Format::Text) {
        let mut kinds: Vec<&str> = Vec::new();
        for stats in all {
            if !kinds.contains(&stats.site.kind.as_str()) {
                kinds.push(&stats.site.kind);
            }
        }
        if args.show.out.is_some() && kinds.len() > 1 {
            bail!(
                "--out: there are {} kinds of attention ({}); a file holds one",
                kinds.len(),
                printable(&kinds.join(", "))
            );
        }
        for kind in kinds {
            let map = HeadStats::map(all, kind, name);
            let mut style = style(&args.show, target);
            (style.scale, style.unit) = (Scale::up_to(&map), name.clone());
            show(&table(&map, &style), &args.show, target)?;
        }
        return Ok(());
    }
    if args.show.out.is_some() {
        bail!("--out: choose a statistic with --view, for example --view entropy");
    }
    let mut out = std::io::stdout().lock();
    if format == Format::Json {
        for stats in all {
            writeln!(out, "{}", serde_json::to_string(stats)?)?;
        }
        return Ok(());
    }
    writeln!(
        out,
        "{:12} {:>5} {:>5} {:>8} {:>8} {:>10} {:>7} {:>8}",
        "kind", "layer", "head", "entropy", "keys", "distance", "first", "largest"
    )?;
    for HeadStats { site, entropy, keys, distance, first, largest, .. } in all {
        writeln!(
            out,
            "{:12} {:5} {:5} {entropy:8.3} {keys:8.1} {distance:10.1} {first:7.3} {largest:8.3}",
            printable(&site.kind),
            site.layer,
            site.head
        )?;
    }
    writeln!(
        out,
        "Means over queries. entropy: of the weights, in nats; keys: e^entropy; distance: of a key from its"
    )?;
    writeln!(out, "query; first: weight of the first key; largest: weight of the strongest key.")?;
    Ok(())
}

/// Characters of a column.
const WIDTH: usize = 12;

fn print_masses(trace: &Trace, spans: &[Span], format: Format) -> Result<()> {
    let all = span_mass(trace, Machine::detect(), spans, &mut progress("layers")?)?;
    let mut out = std::io::stdout().lock();
    if format == Format::Text {
        write!(out, "{:12} {:>5} {:>5}", "kind", "layer", "head")?;
        for (name, _) in spans {
            let name: String = printable(name).chars().take(WIDTH).collect();
            write!(out, " {name:>WIDTH$}")?;
        }
        writeln!(out)?;
    }
    for head in all.chunks(spans.len()) {
        let Site { layer, kind, head: number } = &head[0].site;
        if format == Format::Json {
            let masses: serde_json::Map<_, _> = head
                .iter()
                .map(|one| (one.span.clone(), json!({"mean": one.mean, "last": one.last})))
                .collect();
            let line = json!({"layer": layer, "kind": kind, "head": number, "spans": masses});
            writeln!(out, "{line}")?;
            continue;
        }
        write!(out, "{:12} {layer:5} {number:5}", printable(kind))?;
        for one in head {
            write!(out, " {:>WIDTH$}", format!("{:.3} {:.3}", one.mean, one.last))?;
        }
        writeln!(out)?;
    }
    if format == Format::Text {
        writeln!(
            out,
            "Attention mass on each part: the mean over queries, and that of the last query."
        )?;
    }
    Ok(())
}
