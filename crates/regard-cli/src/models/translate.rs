//! `regard translate`: texts in another language or script.

use super::args::TranslateArgs;
use super::open;
use super::text::{lines, texts_of};
use crate::args::Format;
use crate::say::say;
use anyhow::{Result, anyhow, bail};
use regard::Machine;
use regard_models::Model;
use regard_models::generate::DecodingStrategy;
use regard_scope::{Trace, printable};
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};

pub(crate) fn run(args: &TranslateArgs, format: Format) -> Result<()> {
    let search = open::search(&args.search);
    search.check()?;
    let texts = texts_of(&args.texts)?;
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let mut model = open::open(&args.model.model)?;
    if args.from.is_some() || args.to.is_some() {
        model.set_languages(args.from.as_deref(), args.to.as_deref())?;
    }
    if !texts.is_empty() {
        return told(&model, &texts, &search, args, format);
    }
    let input = std::io::stdin();
    if input.is_terminal() {
        say("a text on each line; end with Ctrl-D");
    }
    // Each line is answered as it comes: whoever writes to us may be waiting for it.
    for line in lines(input.lock()) {
        told(&model, &[&line?], &search, args, format)?;
    }
    Ok(())
}

fn told(
    model: &Model,
    texts: &[&str],
    search: &DecodingStrategy,
    args: &TranslateArgs,
    format: Format,
) -> Result<()> {
    let full: Vec<&str> = texts.iter().copied().filter(|text| !text.trim().is_empty()).collect();
    let mut written =
        model.translator()?.translate(&full, search, args.search.max_tokens)?.into_iter();
    let mut out = std::io::stdout().lock();
    for text in texts {
        // An empty line stays one, so that lines of the input and the output belong together.
        if text.trim().is_empty() {
            match format {
                Format::Json => writeln!(out, "{}", json!({"text": text, "translation": ""}))?,
                Format::Text => writeln!(out)?,
            }
            continue;
        }
        let one = written.next().ok_or_else(|| anyhow!("{text}: no translation"))?;
        let links = match args.alignment {
            true => Some(alignment(&model.look_at(text, one.text.trim())?)?),
            false => None,
        };
        match format {
            Format::Json => {
                let mut line = json!({"text": text, "translation": one.text, "tokens": one.tokens, "score": one.score});
                if let Some(links) = links {
                    line["alignment"] = links.iter().map(Link::json).collect();
                }
                writeln!(out, "{line}")?;
            }
            Format::Text => {
                writeln!(out, "{}", printable(one.text.trim()))?;
                for link in links.iter().flatten() {
                    let Link { target, source, weight } = link;
                    writeln!(
                        out,
                        "    {weight:4.2}  {} <- {}",
                        printable(target),
                        printable(source)
                    )?;
                }
            }
        }
        out.flush()?;
    }
    Ok(())
}

/// A token that was written and the one that it looked at most.
struct Link {
    target: String,
    source: String,
    weight: f32,
}

impl Link {
    fn json(&self) -> Value {
        json!({"target": self.target, "source": self.source, "weight": self.weight})
    }
}

/// What each token of a translation looked at most while it was chosen, over all heads between target and source in the mean.
fn alignment(trace: &Trace) -> Result<Vec<Link>> {
    let sites: Vec<_> = trace.sites().into_iter().filter(|site| site.kind == "cross").collect();
    let Some(first) = sites.first() else {
        bail!("--alignment: {} has no attention from what it writes to what it reads", trace.title);
    };
    let [rows, cols] = trace.layer(first)?.data.size();
    let mut mean = vec![0.0; rows * cols];
    for site in &sites {
        let map = trace.map(Machine::detect(), site, 0..rows, [rows, cols])?;
        for (sum, weight) in mean.iter_mut().zip(&map.values) {
            *sum += weight / sites.len() as f32;
        }
    }
    let [target, source] = ["target", "source"].map(|axis| trace.labels(axis));
    let link = |(row, weights): (usize, &[f32])| {
        let best = weights.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        let (key, weight) = best.map_or((0, f32::NAN), |(key, weight)| (key, *weight));
        // A row chooses the token after its own.
        Link { target: target.label(row + 1), source: source.label(key), weight }
    };
    Ok(mean.chunks(cols.max(1)).take(rows.saturating_sub(1)).enumerate().map(link).collect())
}
