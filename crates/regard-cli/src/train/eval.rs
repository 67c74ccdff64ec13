//! `regard eval`: how good a model is on a test set, or how alike two files are.

use super::args::EvalArgs;
use crate::args::Format;
use crate::models;
use crate::say::say;
use anyhow::{Result, anyhow, bail};
use regard_models::Model;
use regard_train::data::{Column, Pair, first_documents, first_pairs, text};
use regard_train::score::{Bleu, Chrf, Tokenize};
use regard_train::{Run, decoding_strategy, translations};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub(crate) fn run(args: &EvalArgs, format: Format) -> Result<()> {
    let tokenize = args.tokenize.parse().map_err(|e| anyhow!("--tokenize: {e}"))?;
    let tests = tests(args)?;
    if let [first, second, ..] = &tests[..]
        && args.write.is_some()
    {
        let (first, second) = (first.0.display(), second.0.display());
        bail!("--write: the run has several test sets, {first} and {second}; name one by --test");
    }
    let opened = args.model.as_deref().map(models::open).transpose()?;
    for test in &tests {
        if tests.len() > 1 && format == Format::Text {
            writeln!(std::io::stdout(), "{}", test.0.display())?;
        }
        match opened.as_ref().filter(|model| model.classifier().is_ok()) {
            Some(model) => classes(model, test, args, format)?,
            None => translated(opened.as_ref(), test, tokenize, args, format)?,
        }
    }
    Ok(())
}

/// A file, and the columns of its two sides.
type Test = (PathBuf, [Column; 2]);

/// How near translations are to those of the test.
fn translated(
    model: Option<&Model>,
    (test, columns): &Test,
    tokenize: Tokenize,
    args: &EvalArgs,
    format: Format,
) -> Result<()> {
    let all = first_pairs(test, columns, args.examples.unwrap_or(usize::MAX))?;
    let start = Instant::now();
    let written = match (model, &args.hypotheses) {
        (Some(model), None) => {
            let busy = models::busy(format!("translating {} texts", all.len()));
            let strategy = decoding_strategy(args.beams, args.length_penalty);
            let written = translations(model, &all, &strategy, args.max_tokens)?;
            busy.finish_and_clear();
            written
        }
        (None, Some(file)) => lines(file, all.len())?,
        _ => bail!("name a model, or --hypotheses FILE with a translation on each line"),
    };
    let seconds = start.elapsed().as_secs_f64();
    if let Some(path) = &args.write {
        let text: String = written.iter().flat_map(|line| [line.as_str(), "\n"]).collect();
        regard_scope::write_atomically(path, text.as_bytes())?;
    }
    report((tokenize, args.lowercase), (test, &all), &written, seconds, format)
}

/// The test sets: the one that is named, or else those of the parts of a run's data.
fn tests(args: &EvalArgs) -> Result<Vec<Test>> {
    let run = args.model.as_deref().filter(|path| models::is_run(path));
    let settings = run.map(Run::settings).transpose()?;
    let parts = settings.as_ref().map_or(&[][..], |settings| &settings.data.parts);
    let columns = |own: Option<&Vec<Column>>| -> Result<[Column; 2]> {
        let default = || vec![Column::Index(0), Column::Index(1)];
        let columns = args.fields.as_ref().or(own).cloned().unwrap_or_else(default);
        columns.try_into().map_err(|found: Vec<Column>| {
            let found = found.len();
            anyhow!("--columns: {found} of them; name the source's and the target's, as 0,1")
        })
    };
    if let Some(test) = &args.test {
        return Ok(vec![(test.clone(), columns(parts.first().map(|part| &part.columns))?)]);
    }
    let folder = settings.as_ref().map_or("", |settings| &settings.data.folder);
    let own = parts.iter().filter(|part| !part.test.is_empty());
    let mut tests: Vec<Test> = Vec::new();
    for part in own {
        let test = (Path::new(folder).join(&part.test), columns(Some(&part.columns))?);
        if !tests.contains(&test) {
            tests.push(test);
        }
    }
    if tests.is_empty() {
        bail!("--test FILE is required, except for a run that has its own test set");
    }
    Ok(tests)
}

/// How many documents are told apart rightly.
fn classes(model: &Model, (test, fields): &Test, args: &EvalArgs, format: Format) -> Result<()> {
    let all = first_documents(test, fields, args.examples.unwrap_or(usize::MAX))?;
    let start = Instant::now();
    let mut right = 0;
    for some in all.chunks(DOCUMENTS) {
        let texts: Vec<String> =
            some.iter().map(|document| document.sentences.join("\n")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let found = model.classifier()?.classify(&texts)?;
        right += found.iter().zip(some).filter(|(found, own)| found.label == own.label).count();
    }
    let accuracy = right as f64 / all.len().max(1) as f64;
    let mut out = std::io::stdout().lock();
    match format {
        Format::Json => {
            let line = json!({"test": test, "accuracy": accuracy, "right": right, "documents": all.len(), "seconds": start.elapsed().as_secs_f64()});
            writeln!(out, "{line}")?;
        }
        Format::Text => {
            writeln!(out, "accuracy {:.3} ({right} of {})", accuracy, all.len())?;
        }
    }
    Ok(())
}

/// Documents that are read at once.
const DOCUMENTS: usize = 32;

/// The first lines of a file, as many as there are pairs if it has them.
fn lines(path: &Path, most: usize) -> Result<Vec<String>> {
    Ok(text(path)?.lines().take(most).map(str::to_owned).collect())
}

fn report(
    (tokenize, lowercase): (Tokenize, bool),
    (test, all): (&Path, &[Pair]),
    written: &[String],
    seconds: f64,
    format: Format,
) -> Result<()> {
    let bleu = Bleu { tokenize, lowercase };
    let chrf = Chrf { lowercase, ..Chrf::default() };
    let written: Vec<&str> = written.iter().map(String::as_str).collect();
    let targets: Vec<&str> = all.iter().map(|pair| pair.target.as_str()).collect();
    let (by_bleu, by_chrf) = (bleu.corpus(&written, &targets)?, chrf.corpus(&written, &targets)?);
    let mut out = std::io::stdout().lock();
    match format {
        Format::Json => {
            let line = json!({
                "test": test, "bleu": by_bleu.score, "precisions": by_bleu.precisions, "brevity_penalty": by_bleu.brevity_penalty,
                "bleu_signature": bleu.signature(), "chrf": by_chrf.score, "chrf_signature": chrf.signature(),
                "lines": all.len(), "seconds": seconds,
            });
            writeln!(out, "{line}")?;
        }
        Format::Text => {
            writeln!(out, "{by_bleu}\n    {}", bleu.signature())?;
            writeln!(out, "{by_chrf}\n    {}", chrf.signature())?;
            say(format_args!("{} lines in {seconds:.1} s", all.len()));
        }
    }
    Ok(())
}
