//! `regard embed`: vectors of texts, and how alike texts are.

use super::args::EmbedArgs;
use super::open;
use super::text::texts_of;
use crate::args::Format;
use anyhow::Result;
use regard_scope::printable;
use serde_json::json;
use std::io::Write;

/// Letters of a text before its numbers.
const WIDTH: usize = 32;

pub(crate) fn run(args: &EmbedArgs, format: Format) -> Result<()> {
    let texts = texts_of(&args.texts)?;
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let model = open::open(&args.model.model)?;
    let vectors = model.encoder()?.embed(&texts)?;
    let mut out = std::io::stdout().lock();
    if format == Format::Json {
        for (text, vector) in texts.iter().zip(&vectors) {
            writeln!(out, "{}", json!({"text": text, "vector": vector}))?;
        }
        return Ok(());
    }
    writeln!(
        out,
        "Cosines of {} texts, {} features each:",
        texts.len(),
        vectors.first().map_or(0, Vec::len)
    )?;
    for (text, a) in texts.iter().zip(&vectors) {
        let short: String = printable(text).chars().take(WIDTH).collect();
        write!(out, "{short:WIDTH$}")?;
        for b in &vectors {
            let cosine: f32 = a.iter().zip(b).map(|(x, y)| x * y).sum();
            write!(out, " {cosine:7.3}")?;
        }
        writeln!(out)?;
    }
    Ok(())
}
