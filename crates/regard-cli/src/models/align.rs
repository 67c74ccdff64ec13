//! `regard align`: which heads of cross-attention align words, and the alignments of some.

use super::args::{AlignArgs, Column, Export};
use super::open;
use crate::args::Format;
use crate::show::progress;
use crate::text::{WORDS, read};
use anyhow::{Context, Result, anyhow, bail};
use regard::Machine;
use regard_models::Model;
use regard_scope::{
    AlignmentErrors, AlignmentHead, AlignmentWeights, GoldLinks, Trace, pharaoh, words_of_tokens,
};
use serde_json::json;
use std::io::Write;
use std::ops::Range;
use std::path::Path;

/// A text of words.
struct Side {
    text: String,
    /// Their bytes.
    words: Vec<Range<usize>>,
}

struct Pair {
    /// The number of its line, and what a message names it.
    line: usize,
    place: String,
    source: Side,
    target: Side,
    links: GoldLinks,
}

/// What a model looks at in a pair, and the words that each of its tokens belongs to, of the source and of the target.
struct Looked {
    trace: Trace,
    words: [Vec<Range<usize>>; 2],
    counts: [usize; 2],
}

pub(crate) fn run(args: &AlignArgs, format: Format) -> Result<()> {
    let (path, has_links) = match (&args.gold, &args.pairs) {
        (Some(gold), _) => (gold, true),
        (None, Some(pairs)) => (pairs, false),
        (None, None) => bail!("give a file of pairs: --gold FILE with links, or --pairs FILE"),
    };
    let pairs = pairs(path, args, has_links)?;
    if has_links && !pairs.iter().any(|pair| pair.links.has_sure()) {
        bail!("{}: no sure links; mark those that are right as i-j", path.display());
    }
    let mut model = open::open(&args.model.model)?;
    model.translator()?;
    if args.from.is_some() || args.to.is_some() {
        model.set_languages(args.from.as_deref(), args.to.as_deref())?;
    }
    match has_links {
        true => rank(&model, &pairs, args, format),
        false => export(&model, &pairs, args, format),
    }
}

/// The alignment error rate of each head, or of the mean of some.
fn rank(model: &Model, pairs: &[Pair], args: &AlignArgs, format: Format) -> Result<()> {
    let mut all: Vec<(Vec<AlignmentHead>, AlignmentErrors)> = Vec::new();
    let mut told = progress("pairs")?;
    for (done, pair) in pairs.iter().enumerate() {
        let looked = Looked::new(model, pair)?;
        if all.is_empty() {
            let heads = match args.heads.as_slice() {
                [] => {
                    AlignmentHead::all(&looked.trace).into_iter().map(|head| vec![head]).collect()
                }
                some => vec![some.to_vec()],
            };
            all = heads.into_iter().map(|heads| (heads, AlignmentErrors::default())).collect();
        }
        for (heads, errors) in &mut all {
            errors.add(&looked.weights(heads)?.links(), &pair.links);
        }
        told(done + 1, pairs.len());
    }
    // Of equal rates the first head comes first.
    all.sort_by(|a, b| a.1.aer().total_cmp(&b.1.aer()));
    let mut out = std::io::stdout().lock();
    let name = |heads: &[AlignmentHead]| {
        heads.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    };
    let names: Vec<String> = all.iter().map(|(heads, _)| name(heads)).collect();
    let width = names.iter().map(String::len).max().unwrap_or(0).max("heads".len());
    if format == Format::Text {
        writeln!(out, "{:width$}    AER  precision  recall", "heads")?;
    }
    for (name, (_, errors)) in names.iter().zip(&all) {
        let (aer, precision, recall) = (errors.aer(), errors.precision(), errors.recall());
        match format {
            Format::Json => {
                let line =
                    json!({"heads": name, "aer": aer, "precision": precision, "recall": recall});
                writeln!(out, "{line}")?;
            }
            Format::Text => {
                writeln!(out, "{name:width$}  {aer:5.3}  {precision:9.3}  {recall:6.3}")?;
            }
        }
    }
    Ok(())
}

/// The links or paths of the mean of heads, a line for each pair.
fn export(model: &Model, pairs: &[Pair], args: &AlignArgs, format: Format) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let mut line = 1;
    for pair in pairs {
        let weights = Looked::new(model, pair)?.weights(&args.heads)?;
        let links = match args.export {
            Export::Pharaoh => weights.links(),
            Export::Dtw => weights.path(),
        };
        // An empty line stays one, so that lines of the input and the output belong together.
        while format == Format::Text && line < pair.line {
            writeln!(out)?;
            line += 1;
        }
        line += 1;
        match format {
            Format::Json => writeln!(out, "{}", json!({"line": pair.line, "links": links}))?,
            Format::Text => writeln!(out, "{}", pharaoh(&links))?,
        }
    }
    Ok(())
}

impl Looked {
    fn new(model: &Model, pair: &Pair) -> Result<Self> {
        let Pair { source, target, .. } = pair;
        let place = || pair.place.clone();
        let trace = model.look_at(&source.text, &target.text).with_context(place)?;
        if AlignmentHead::all(&trace).is_empty() {
            bail!("{} has no attention from what it writes to what it reads", model.title());
        }
        let offsets =
            model.translator()?.offsets(&source.text, &target.text).with_context(place)?;
        let [source_tokens, target_tokens] = &offsets;
        let target_tokens = target_tokens.get(1..).unwrap_or_default();
        let words = [
            words_of_tokens(&source.words, source_tokens),
            words_of_tokens(&target.words, target_tokens),
        ];
        Ok(Self { trace, words, counts: [source.words.len(), target.words.len()] })
    }

    /// The weights of words, in the mean of these heads.
    fn weights(&self, heads: &[AlignmentHead]) -> Result<AlignmentWeights> {
        let tokens = AlignmentWeights::of_heads(&self.trace, Machine::detect(), heads)?;
        Ok(tokens.words(self.counts, self.words.each_ref().map(Vec::as_slice))?)
    }
}

impl Side {
    /// Words between white space, joined by a space or by nothing.
    fn new(column: &str, is_unspaced: bool) -> Self {
        let (mut text, mut words) = (String::new(), Vec::new());
        for word in column.split_whitespace() {
            if !text.is_empty() && !is_unspaced {
                text.push(' ');
            }
            let start = text.len();
            text.push_str(word);
            words.push(start..text.len());
        }
        Self { text, words }
    }
}

/// Pairs of a file, a line each: source, target and links, separated by tabs.
fn pairs(path: &Path, args: &AlignArgs, has_links: bool) -> Result<Vec<Pair>> {
    let text = read(path, WORDS)?;
    let mut pairs = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let place = format!("{}: line {}", path.display(), i + 1);
        let columns: Vec<&str> = line.split('\t').collect();
        let (source, target, links) = match columns.as_slice() {
            [source, target, links] => (source, target, *links),
            [source, target] if !has_links => (source, target, ""),
            other => {
                let wanted =
                    if has_links { "source, target and links" } else { "source and target" };
                bail!("{place}: {} columns; give {wanted}, separated by tabs", other.len());
            }
        };
        let source = Side::new(source, args.unspaced.contains(&Column::Source));
        let target = Side::new(target, args.unspaced.contains(&Column::Target));
        if source.words.is_empty() || target.words.is_empty() {
            bail!("{place}: a column without words; leave the line out");
        }
        let links = match has_links {
            true => GoldLinks::parse(links, [source.words.len(), target.words.len()]),
            false => Ok(GoldLinks::default()),
        };
        let links = links.with_context(|| place.clone())?;
        pairs.push(Pair { line: i + 1, place, source, target, links });
    }
    match pairs.is_empty() {
        true => Err(anyhow!("{}: no pairs; give one a line", path.display())),
        false => Ok(pairs),
    }
}
