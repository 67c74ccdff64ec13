//! Recurrent models, which run on Burn.

use super::classifier::{Classification, Classifier, WeightedSentence, classified};
use super::text::{short, words};
use crate::error::Error;
use crate::pass::Pass;
use crate::recorder::Recorder;
use crate::stack::ids;
use crate::{E2k, Han, Seq2Seq};
use burn::tensor::Device;
use regard_scope::Layer;

pub(super) fn look_seq2seq(
    model: &Seq2Seq,
    source: Vec<u32>,
    target: Vec<u32>,
) -> Result<Vec<Layer>, Error> {
    let (device, mut recorder) = (Device::flex(), Recorder::on());
    let memory = model.encode(ids(&[source], &device), None, &mut Pass::default())?;
    recorder.at(0, "decoder", "target");
    let weights = model.weights(&memory, ids(&[target], &device))?;
    recorder.within("cross", |recorder| recorder.keep(weights));
    Ok(recorder.trace("", &[]).layers)
}

pub(super) fn look_e2k(
    model: &E2k,
    source: Vec<u32>,
    target: Vec<u32>,
) -> Result<Vec<Layer>, Error> {
    let (device, mut pass) = (Device::flex(), Pass { recorder: Recorder::on(), ..Pass::default() });
    let memory = model.encode(ids(&[source], &device), None)?;
    model.decode(&memory, ids(&[target], &device), &mut pass)?;
    Ok(pass.recorder.trace("", &[]).layers)
}

/// Sentences are those of [`sentences`].
pub(super) fn classify(
    classifier: &Classifier,
    model: &Han,
    texts: &[&str],
) -> Result<Vec<Classification>, Error> {
    let vocabulary = &classifier.vocabulary;
    let read = |text: &&str| -> Result<Vec<Vec<u32>>, Error> {
        short(text)?;
        sentences(text).map(|sentence| vocabulary.fitting(sentence)).collect()
    };
    let documents = texts.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    let looked = model.look(&documents)?.into_iter().zip(&documents);
    looked
        .map(|((scores, weights), document)| {
            let each = weights.sentences.iter().zip(weights.words).zip(document);
            let sentences = each.map(|((weight, word_weights), ids)| WeightedSentence {
                weight: *weight,
                words: words(&vocabulary.tokens, ids),
                word_weights,
            });
            classified(&classifier.labels, &scores, sentences.collect())
        })
        .collect()
}

/// The sentences of a text, as a [`Han`] is given them: a line each, and lines are cut behind full stops and what is like them.
/// What has no letters in it still counts; what is only space does not.
pub fn sentences(text: &str) -> impl Iterator<Item = &str> {
    text.lines().flat_map(cut_behind_stops).map(str::trim).filter(|sentence| !sentence.is_empty())
}

fn cut_behind_stops(line: &str) -> Vec<&str> {
    let (mut parts, mut from) = (Vec::new(), 0);
    let mut after = line.char_indices().skip(1).map(|(_, c)| c).chain([' ']);
    for (at, c) in line.char_indices() {
        let next = after.next().unwrap_or(' ');
        // In scripts without spaces a stop is an end wherever it stands.
        let ends = match c {
            '.' | '!' | '?' | '…' => next.is_whitespace(),
            '。' | '！' | '？' => !matches!(next, '。' | '！' | '？' | '”' | '」' | '’'),
            _ => false,
        };
        if ends {
            parts.push(&line[from..at + c.len_utf8()]);
            from = at + c.len_utf8();
        }
    }
    parts.push(&line[from..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_into_its_sentences() {
        let cut = |text: &'static str| sentences(text).collect::<Vec<_>>();
        assert_eq!(cut("A cat. It is 3.5 m!\n\nLong?  "), ["A cat.", "It is 3.5 m!", "Long?"]);
        assert_eq!(cut("你好。“再见！”他说"), ["你好。", "“再见！”他说"]);
        assert_eq!(cut("..."), ["..."]);
        assert_eq!(cut(" \n"), [""; 0]);
    }
}
