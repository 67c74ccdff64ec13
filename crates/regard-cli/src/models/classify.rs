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
    for (text, found) in all.iter().zip(model.classifier()?.classify(&all)?) {
        let Classification { label, probabilities, sentences, class } = &found;
        match format {
            Format::Json => {
                let sentences: Vec<_> = sentences
                    .iter()
                    .map(|one| json!({"weight": one.weight, "words": one.words, "weights": one.word_weights}))
                    .collect();
                let line = json!({"text": text, "label": label, "probabilities": probabilities, "sentences": sentences});
                writeln!(out, "{line}")?;
            }
            Format::Text => {
                let best = probabilities.get(*class).copied().unwrap_or(f32::NAN);
                writeln!(out, "{} ({:.0} %)", printable(label), 100.0 * best)?;
                let mut order: Vec<_> = sentences.iter().collect();
                order.sort_by(|a, b| b.weight.total_cmp(&a.weight));
                for one in order.into_iter().take(args.sentences) {
                    let words = printable(&one.words.join(" "));
                    writeln!(out, "    {:4.2}  {words}", one.weight)?;
                }
            }
        }
    }
    Ok(())
}
