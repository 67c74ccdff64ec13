//! `regard heads`: what each head does, by published definitions.

use crate::args::{Format, HeadsArgs, SourceArgs};
use crate::show::{Target, progress, told};
use crate::source;
use anyhow::{Result, anyhow, bail};
use regard::Machine;
use regard_scope::{HeadScores, Needle, heads_page, printable, write_atomically};
use regard_testkit::Noise;
use std::io::Write;
use std::path::Path;

/// Words of the text that is read where none is given.
const WORDS: &str = "time year people way day man thing woman life child world school state family student group country problem hand part \
    place case week company system program question work number night point home water room mother area money story fact month lot right \
    study book eye job word business issue side kind head house service friend father power hour game line end member law car city name \
    team minute idea body back parent face level office door health person art war history party result change morning reason research girl";
/// How many of them, drawn at random; the text has them twice.
const DRAWN: usize = 96;

pub(crate) fn run(args: &HeadsArgs, format: Format) -> Result<()> {
    if args
        .out
        .as_deref()
        .map(|out| Target::of(Some(out)))
        .transpose()?
        .is_some_and(|to| to != Target::Html)
    {
        bail!("--out: a page is .html; for one score as .svg or .png use the page's own drawings");
    }
    let trace = source::read(&with_text(&args.source))?;
    let needle = args.needle.as_deref().map(|sentence| {
        let own = trace.layers.iter().find(|layer| layer.rows == layer.cols);
        let layer =
            own.ok_or_else(|| anyhow!("--needle: {} has no self-attention", trace.title))?;
        Needle::find(trace.labels(&layer.rows), sentence).map_err(|e| anyhow!("--needle: {e}"))
    });
    let needle = needle.transpose()?;
    let all = HeadScores::of(&trace, Machine::detect(), needle.as_ref(), &mut progress("layers")?)?;
    if let Some(path) = &args.out {
        write_atomically(path, heads_page(&trace.title, &all).as_bytes())?;
        return told(path);
    }
    let mut out = std::io::stdout().lock();
    if format == Format::Json {
        for scores in &all {
            writeln!(out, "{}", serde_json::to_string(scores)?)?;
        }
        return Ok(());
    }
    write!(out, "{:12} {:>5} {:>5}", "kind", "layer", "head")?;
    let names =
        HeadScores::NAMES.into_iter().filter(|name| needle.is_some() || *name != "retrieval");
    let names: Vec<_> = names.collect();
    for name in &names {
        write!(out, " {name:>10}")?;
    }
    writeln!(out)?;
    for scores in &all {
        let site = &scores.site;
        write!(out, "{:12} {:5} {:5}", printable(&site.kind), site.layer, site.head)?;
        for name in &names {
            let score = scores.get(name).filter(|score| !score.is_nan());
            let text = score.map_or("-".into(), |score| format!("{score:.3}"));
            match *name {
                "positional" => write!(out, " {:>10}", format!("{text} {:+}", scores.distance))?,
                _ => write!(out, " {text:>10}")?,
            }
        }
        writeln!(out)?;
    }
    for name in names {
        let mut best: Vec<_> =
            all.iter().filter(|one| one.get(name).is_some_and(|x| x > 0.0)).collect();
        best.sort_by(|a, b| {
            f64::total_cmp(&b.get(name).unwrap_or(0.0), &a.get(name).unwrap_or(0.0))
        });
        let told = best.iter().take(args.top).map(|one| {
            let (layer, head, score) =
                (one.site.layer, one.site.head, one.get(name).unwrap_or(0.0));
            format!("{layer}.{head} {score:.2}")
        });
        let told: Vec<_> = told.collect();
        let told = if told.is_empty() { "none".into() } else { told.join(", ") };
        writeln!(out, "{name}: {told}")?;
    }
    writeln!(out, "Scores from 0 to 1, `layer.head`; `regard help heads` has their definitions.")?;
    Ok(())
}

/// A model without a text reads random words, twice: only there is induction told apart from memory (Olsson et al. 2022).
fn with_text(args: &SourceArgs) -> SourceArgs {
    let mut args = args.clone();
    let is_file = |path: &Path| ["safetensors", "npy"].iter().any(|e| source::has_ending(path, e));
    if let ([model], None) = (args.files.as_slice(), &args.image)
        && !is_file(model)
    {
        let words: Vec<&str> = WORDS.split_whitespace().collect();
        let mut noise = Noise::new(0);
        let once: Vec<&str> = (0..DRAWN).map(|_| *noise.pick(&words)).collect();
        args.files.push(format!(" {0} {0}", once.join(" ")).into());
    }
    args
}
