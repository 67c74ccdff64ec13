//! `regard classify`: which class a document is of, and what that was read from.

use super::args::ClassifyArgs;
use super::open;
use super::text::texts_of;
use crate::args::Format;
use anyhow::Result;
use regard_models::Classification;
use regard_scope::printable;
use serde_json::json;
use std::io::Write;

pub(crate) fn run(args: &ClassifyArgs, format: Format) -> Result<()> {
    let texts = texts_of(&args.texts)?;
    let model = open::open(&args.model.model)?;
    let all: Vec<&str> = texts.iter().map(String::as_str).collect();
    let mut out = std::io::stdout().lock();
    for (text, found) in all.iter().zip(model.classify(&all)?) {
        let Classification { label, probabilities, words, weights, class } = &found;
        let sentences = weights.sentences.iter().zip(words).zip(&weights.words);
        match format {
            Format::Json => {
                let sentences: Vec<_> = sentences
                    .map(|((weight, words), each)| json!({"weight": weight, "words": words, "weights": each}))
                    .collect();
                let line = json!({"text": text, "label": label, "probabilities": probabilities, "sentences": sentences});
                writeln!(out, "{line}")?;
            }
            Format::Text => {
                let best = probabilities.get(*class).copied().unwrap_or(f32::NAN);
                writeln!(out, "{} ({:.0} %)", printable(label), 100.0 * best)?;
                let mut order: Vec<_> =
                    sentences.map(|((weight, words), _)| (weight, words)).collect();
                order.sort_by(|a, b| b.0.total_cmp(a.0));
                for (weight, words) in order.into_iter().take(args.sentences) {
                    writeln!(out, "    {weight:4.2}  {}", printable(&words.join(" ")))?;
                }
            }
        }
    }
    Ok(())
}
