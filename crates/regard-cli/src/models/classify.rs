//! `regard classify`: which class a document or an image is of, and what that was read from.

use super::args::ClassifyArgs;
use super::open;
use super::text::texts_of;
use crate::args::Format;
use anyhow::{Result, bail};
use regard_models::{Classification, Image, ImageClassifier, Model};
use regard_scope::printable;
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;

/// Images that are decoded at once: a photo has tens of megabytes.
const IMAGES: usize = 8;

pub(crate) fn run(args: &ClassifyArgs, format: Format) -> Result<()> {
    let texts = texts_of(&args.texts)?;
    let model = open::open(&args.model.model)?;
    if !args.images.is_empty() {
        return images(model.image_classifier()?, &args.images, format);
    }
    if let Model::ImageClassifier(_) = model {
        bail!("{}: it classifies images, not texts; give them by --image FILE", model.title());
    }
    let all: Vec<&str> = texts.iter().map(String::as_str).collect();
    let mut out = std::io::stdout().lock();
    for (text, found) in all.iter().zip(model.classifier()?.classify(&all)?) {
        let Classification { label, probabilities, sentences, .. } = &found;
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
                writeln!(out, "{}", best(&found))?;
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

fn images(model: &ImageClassifier, files: &[PathBuf], format: Format) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for files in files.chunks(IMAGES) {
        let open = |file: &PathBuf| Image::open(file);
        let images = files.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        for (file, found) in files.iter().zip(model.classify(&images)?) {
            let Classification { label, probabilities, .. } = &found;
            let file = file.display().to_string();
            match format {
                Format::Json => {
                    let line =
                        json!({"image": file, "label": label, "probabilities": probabilities});
                    writeln!(out, "{line}")?;
                }
                Format::Text => writeln!(out, "{}", best(&found))?,
            }
        }
    }
    Ok(())
}

/// The likeliest class with its probability.
fn best(found: &Classification) -> String {
    let best = found.probabilities.get(found.class).copied().unwrap_or(f32::NAN);
    format!("{} ({:.0} %)", printable(&found.label), 100.0 * best)
}
