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
use regard_scope::{AlignmentHead, AlignmentWeights, DecoderRow, Trace, printable};
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
            true => {
                let trace = model.look_at(text, one.text.trim())?;
                Some(alignment(&trace, &args.alignment_heads)?)
            }
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
    weight: f64,
}

impl Link {
    fn json(&self) -> Value {
        json!({"target": self.target, "source": self.source, "weight": self.weight})
    }
}

/// What each token of a translation looked at most, in the mean over these heads; without any, over all while it was chosen.
fn alignment(trace: &Trace, heads: &[AlignmentHead]) -> Result<Vec<Link>> {
    let all = AlignmentHead::all(trace);
    if all.is_empty() {
        bail!("--alignment: {} has no attention from what it writes to what it reads", trace.title);
    }
    let is_plain = |one: &&AlignmentHead| one.head.is_some() && one.row == DecoderRow::Predicts;
    let heads = match heads {
        [] => all.iter().filter(is_plain).copied().collect(),
        some => some.to_vec(),
    };
    let weights = AlignmentWeights::of_heads(trace, Machine::detect(), &heads)?;
    let [target, source] = ["target", "source"].map(|axis| trace.labels(axis));
    let link = |(token, weights): (usize, &[f64])| {
        let best = weights.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        let (key, weight) = best.map_or((0, f64::NAN), |(key, weight)| (key, *weight));
        // The first label is what every target begins with.
        Link { target: target.label(token + 1), source: source.label(key), weight }
    };
    Ok(weights.rows().enumerate().map(link).collect())
}
