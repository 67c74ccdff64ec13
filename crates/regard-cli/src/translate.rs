//! `regard translate`: texts in another language or script.

use crate::args::{Format, TranslateArgs};
use crate::model;
use anyhow::Result;
use regard_scope::printable;
use serde_json::json;
use std::io::Write;

pub(crate) fn run(args: &TranslateArgs, format: Format) -> Result<()> {
    let search = model::search(&args.search);
    search.check()?;
    let model = model::open(&args.model.model)?;
    let texts: Vec<&str> = args.texts.iter().map(String::as_str).collect();
    let written = model.translate(&texts, &search, args.search.max_tokens)?;
    let mut out = std::io::stdout().lock();
    for (text, one) in texts.iter().zip(&written) {
        match format {
            Format::Json => {
                let line = json!({"text": text, "translation": one.text, "tokens": one.tokens, "score": one.score});
                writeln!(out, "{line}")?;
            }
            Format::Text => writeln!(out, "{}", printable(&one.text))?,
        }
    }
    Ok(())
}
