//! Word alignments from cross-attention: weights of words, links and monotone paths, and how well a head aligns.
//!
//! Costs: one pass over the weights of a head, and memory for the words of one pair, target times source.
//!
//! | what | definition | from |
//! |---|---|---|
//! | row of a token | the decoder row that predicts it (naive), or the one that reads it, one later (Shift-Att) | [Chen et al. 2020](https://arxiv.org/abs/2004.14837) |
//! | weight of words | sum over the tokens of the source word, mean over those of the target word | [Clark et al. 2019](https://arxiv.org/abs/1906.04341), 4.1 |
//! | links | for each target word the source word of the largest weight | [Garg et al. 2019](https://arxiv.org/abs/1909.02074) |
//! | AER | `1 - (\|A ∩ S\| + \|A ∩ P\|) / (\|A\| + \|S\|)` of links `A`, sure links `S` and possible links `P`, with `S` in `P` | [Och and Ney 2003](https://aclanthology.org/J03-1002) |
//! | path | dynamic time warping from the first words to the last, of the least sum of `1 - weight` | [Sakoe and Chiba 1978](https://doi.org/10.1109/TASSP.1978.1163055) |

use crate::error::Error;
use crate::trace::{Layer, Trace};
use regard::Machine;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// The kind of layers that align.
const CROSS: &str = "cross";

/// Which row of the decoder aligns a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum DecoderRow {
    /// The one that predicts it.
    #[default]
    Predicts,
    /// The one that reads it: the next.
    Reads,
}

/// A head of cross-attention that aligns, or the mean of the heads of a layer: `1.2`, `1.mean`, `1.2:reads`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AlignmentHead {
    /// Its layer.
    pub layer: usize,
    /// Its number in the layer; none is the mean.
    pub head: Option<usize>,
    /// Which row counts.
    pub row: DecoderRow,
}

impl AlignmentHead {
    /// Every head of cross-attention and the mean of every layer of several heads, by both rows.
    #[must_use]
    pub fn all(trace: &Trace) -> Vec<Self> {
        let mut all = Vec::new();
        for own in trace.layers.iter().filter(|layer| layer.kind == CROSS) {
            let heads = own.data.heads();
            for head in (0..heads).map(Some).chain((heads > 1).then_some(None)) {
                let row = |row| Self { layer: own.layer, head, row };
                all.extend([DecoderRow::Predicts, DecoderRow::Reads].map(row));
            }
        }
        all
    }
}

impl fmt::Display for AlignmentHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.head {
            Some(head) => write!(f, "{}.{head}", self.layer)?,
            None => write!(f, "{}.mean", self.layer)?,
        }
        match self.row {
            DecoderRow::Predicts => Ok(()),
            DecoderRow::Reads => write!(f, ":reads"),
        }
    }
}

impl FromStr for AlignmentHead {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            let why = "give LAYER.HEAD or LAYER.mean, as in 3.1, both may end with :reads";
            Error::format(format!("`{text}`"), why)
        };
        let (place, row) = match text.strip_suffix(":reads") {
            Some(place) => (place, DecoderRow::Reads),
            None => (text, DecoderRow::Predicts),
        };
        let (layer, head) = place.split_once('.').ok_or_else(wrong)?;
        let head = match head {
            "mean" => None,
            number => Some(number.parse().map_err(|_| wrong())?),
        };
        Ok(Self { layer: layer.parse().map_err(|_| wrong())?, head, row })
    }
}

/// Weights of the tokens or words of a target for those of its source.
#[derive(Clone, Debug, PartialEq)]
pub struct AlignmentWeights {
    /// `[targets, sources]`
    values: Vec<f64>,
    sources: usize,
}

impl AlignmentWeights {
    /// Of `[targets, sources]` weights.
    ///
    /// # Errors
    ///
    /// If the rows are not equally long.
    pub fn new(values: Vec<f64>, sources: usize) -> Result<Self, Error> {
        if values.len().checked_rem(sources).unwrap_or(values.len()) != 0 {
            let why =
                format!("{} weights; give a multiple of {sources}, the sources", values.len());
            return Err(Error::format("alignment", why));
        }
        Ok(Self { values, sources })
    }

    /// The mean of heads of a trace, for each token of the target after the first, which every target begins with.
    ///
    /// # Errors
    ///
    /// If the trace has no such head, or heads of layers over other tokens.
    pub fn of_heads(
        trace: &Trace,
        machine: Machine,
        heads: &[AlignmentHead],
    ) -> Result<Self, Error> {
        let mut sum: Option<Self> = None;
        for one in heads {
            let own = |layer: &&Layer| layer.kind == CROSS && layer.layer == one.layer;
            let layer = trace.layers.iter().find(own);
            let layer = layer.filter(|layer| one.head.is_none_or(|head| head < layer.data.heads()));
            let layer = layer.ok_or_else(|| missing(trace, one))?;
            let [rows, sources] = layer.data.size();
            let targets = match one.row {
                DecoderRow::Predicts => 0..rows.saturating_sub(1),
                DecoderRow::Reads => 1..rows.max(1),
            };
            let own = one.head.map_or(0..layer.data.heads(), |head| head..head + 1);
            let share = 1.0 / (own.len() * heads.len()) as f64;
            let zeros = || Self { values: vec![0.0; targets.len() * sources], sources };
            let sum = sum.get_or_insert_with(zeros);
            if [sum.values.len(), sum.sources] != [targets.len() * sources, sources] {
                let why = format!(
                    "{} targets and {sources} sources, others have {} and {}; give heads over the same tokens",
                    targets.len(),
                    sum.rows().len(),
                    sum.sources
                );
                return Err(Error::format(format!("alignment head {one}"), why));
            }
            if targets.is_empty() {
                continue;
            }
            for head in own {
                let weights = layer.data.weights(machine, head, targets.clone())?;
                let each = sum.values.iter_mut().zip(&weights);
                each.for_each(|(sum, weight)| *sum += f64::from(*weight) * share);
            }
        }
        let none = || Error::format("alignment heads", "none; give at least one, as in 3.1");
        sum.ok_or_else(none)
    }

    /// The weights of words, given the counts of source and target words and the words of each token: the sum over the tokens of a source
    /// word, the mean over those of a target word. A word without tokens has no weight.
    ///
    /// # Errors
    ///
    /// If a token has a word beyond the count.
    pub fn words(
        &self,
        [sources, targets]: [usize; 2],
        [source, target]: [&[Range<usize>]; 2],
    ) -> Result<Self, Error> {
        for (side, count, words) in [("source", sources, source), ("target", targets, target)] {
            if let Some(token) =
                words.iter().find(|words| words.end > count || words.start > words.end)
            {
                let why = format!("a token of {side} words {token:?}, of {count}");
                return Err(Error::format("alignment", why));
            }
        }
        let mut values = vec![0.0; targets * sources];
        let mut tokens = vec![0.0; targets];
        for (words, weights) in target.iter().zip(self.rows()) {
            for word in words.clone() {
                tokens[word] += 1.0;
                for (keys, weight) in source.iter().zip(weights) {
                    let row = &mut values[word * sources..][..sources];
                    row[keys.clone()].iter_mut().for_each(|sum| *sum += weight);
                }
            }
        }
        for (row, tokens) in values.chunks_mut(sources.max(1)).zip(tokens) {
            row.iter_mut().for_each(|sum| *sum /= f64::max(tokens, 1.0));
        }
        Ok(Self { values, sources })
    }

    /// The weights of each target for all sources.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f64]> {
        self.values.chunks(self.sources.max(1))
    }

    /// For each target the source of the largest weight, the first of equal ones, as `(source, target)`; none for a target without weight.
    #[must_use]
    pub fn links(&self) -> Vec<(usize, usize)> {
        let best = |(target, row): (usize, &[f64])| {
            let mut best = (None, 0.0);
            for (source, weight) in row.iter().enumerate() {
                if *weight > best.1 {
                    best = (Some(source), *weight);
                }
            }
            best.0.map(|source| (source, target))
        };
        self.rows().enumerate().filter_map(best).collect()
    }

    /// Dynamic time warping: the path from the first source and target to the last ones, by steps of one source, one target or both, with
    /// the least sum of `1 - weight`, as `(source, target)`. Of equal steps the diagonal one is preferred, from the end.
    #[must_use]
    pub fn path(&self) -> Vec<(usize, usize)> {
        let mut costs: Vec<f64> = Vec::with_capacity(self.values.len());
        for (at, weight) in self.values.iter().enumerate() {
            let before = self.before(at).map(|at| costs[at]);
            costs.push(1.0 - weight + before.reduce(f64::min).unwrap_or(0.0));
        }
        let mut path = Vec::new();
        let mut last = self.values.len().checked_sub(1);
        while let Some(at) = last {
            path.push((at % self.sources, at / self.sources));
            last =
                self.before(at).reduce(|best, at| if costs[at] < costs[best] { at } else { best });
        }
        path.reverse();
        path
    }

    /// Where a path can come from: the diagonal first.
    fn before(&self, at: usize) -> impl Iterator<Item = usize> {
        let [has_row, has_col] = [at >= self.sources, !at.is_multiple_of(self.sources)];
        let steps = [(has_row && has_col, self.sources + 1), (has_row, self.sources), (has_col, 1)];
        steps.into_iter().filter(|(is_there, _)| *is_there).map(move |(_, step)| at - step)
    }
}

fn missing(trace: &Trace, head: &AlignmentHead) -> Error {
    let all = AlignmentHead::all(trace);
    let heads = all.iter().filter(|one| one.head.is_some());
    let there = match (heads.clone().next(), heads.clone().next_back()) {
        (Some(first), Some(last)) => {
            let last = AlignmentHead { row: DecoderRow::Predicts, ..*last };
            format!("{first} to {last}")
        }
        _ => "no cross-attention".into(),
    };
    Error::NotThere { what: format!("alignment head {head}"), there }
}

/// The words that each token overlaps, by their bytes in the text, both in order; a token that covers nothing overlaps none.
#[must_use]
pub fn words_of_tokens(words: &[Range<usize>], tokens: &[Range<usize>]) -> Vec<Range<usize>> {
    let overlapped = |token: &Range<usize>| {
        let first = words.partition_point(|word| word.end <= token.start);
        let end = words.partition_point(|word| word.start < token.end);
        first..end.max(first)
    };
    let of = |token| if Range::is_empty(token) { 0..0 } else { overlapped(token) };
    tokens.iter().map(of).collect()
}

/// Links as Pharaoh writes them: `0-0 1-2`, numbers of words from 0, the source first.
#[must_use]
pub fn pharaoh(links: &[(usize, usize)]) -> String {
    let link = |(source, target): &(usize, usize)| format!("{source}-{target}");
    links.iter().map(link).collect::<Vec<_>>().join(" ")
}

/// Links that people have made between the words of a pair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GoldLinks {
    sure: BTreeSet<(usize, usize)>,
    /// The sure ones among them.
    possible: BTreeSet<(usize, usize)>,
}

impl GoldLinks {
    /// Reads `0-0 1-2 3?4`, word numbers from 0 below the counts of source and target words: sure links with `-`, possible ones with `?` or `p`.
    ///
    /// # Errors
    ///
    /// If something is not a link, or of words that are not there.
    pub fn parse(text: &str, [sources, targets]: [usize; 2]) -> Result<Self, Error> {
        let mut links = Self::default();
        for link in text.split_whitespace() {
            let place = || format!("the link `{link}`");
            let wrong = || Error::format(place(), "give i-j (sure), i?j or ipj (possible)");
            let at = link.find(['-', '?', 'p']).ok_or_else(wrong)?;
            let number = |text: &str| text.parse::<usize>().map_err(|_| wrong());
            let (source, target) = (number(&link[..at])?, number(&link[at + 1..])?);
            if source >= sources || target >= targets {
                let why = format!(
                    "there are {sources} source and {targets} target words, numbered from 0, the source first"
                );
                return Err(Error::format(place(), why));
            }
            links.possible.insert((source, target));
            if &link[at..=at] == "-" {
                links.sure.insert((source, target));
            }
        }
        Ok(links)
    }

    /// Whether there is a sure link. Without any, no error rate is defined.
    #[must_use]
    pub fn has_sure(&self) -> bool {
        !self.sure.is_empty()
    }
}

/// How many links are right, over all pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AlignmentErrors {
    links: usize,
    sure: usize,
    right_and_sure: usize,
    right: usize,
}

impl AlignmentErrors {
    /// Adds the links of a pair.
    pub fn add(&mut self, links: &[(usize, usize)], gold: &GoldLinks) {
        let within = |set: &BTreeSet<_>| links.iter().filter(|link| set.contains(*link)).count();
        self.links += links.len();
        self.sure += gold.sure.len();
        self.right_and_sure += within(&gold.sure);
        self.right += within(&gold.possible);
    }

    /// Alignment error rate: from 0, all right, to 1. NaN without links.
    #[must_use]
    pub fn aer(&self) -> f64 {
        1.0 - (self.right_and_sure + self.right) as f64 / (self.links + self.sure) as f64
    }

    /// The share of the links that are right: sure or possible.
    #[must_use]
    pub fn precision(&self) -> f64 {
        self.right as f64 / self.links as f64
    }

    /// The share of the sure links that were found.
    #[must_use]
    pub fn recall(&self) -> f64 {
        self.right_and_sure as f64 / self.sure as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{LayerData, Weights};
    use regard_testkit::Noise;

    fn weights(values: &[&[f64]]) -> AlignmentWeights {
        AlignmentWeights::new(values.concat(), values[0].len()).unwrap()
    }

    fn of(text: &str) -> AlignmentHead {
        text.parse().unwrap()
    }

    #[test]
    fn heads_are_written_as_they_are_read() {
        for text in ["0.0", "3.1", "3.1:reads", "5.mean", "5.mean:reads"] {
            assert_eq!(of(text).to_string(), text);
        }
        for text in ["", "3", "3.", ".1", "3.all", "3.1:", "3.1:writes", "-1.0", "3,1"] {
            let error = text.parse::<AlignmentHead>().unwrap_err().to_string();
            assert!(error.contains("LAYER.HEAD"), "{text}: {error}");
        }
    }

    /// Och and Ney: of 4 links 3 are possible and 2 of them sure, of 3 sure links: 1 - (2 + 3) / (4 + 3).
    #[test]
    fn the_error_rate_is_that_of_och_and_ney() {
        let gold = GoldLinks::parse("0-0 1-2 2-1 2?3 2p2 1-2", [3, 4]).unwrap();
        let mut errors = AlignmentErrors::default();
        errors.add(&[(0, 0), (2, 1), (0, 2), (2, 3)], &gold);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-15, "{a} for {b}");
        close(errors.aer(), 1.0 - 5.0 / 7.0);
        close(errors.precision(), 3.0 / 4.0);
        close(errors.recall(), 2.0 / 3.0);
        // A second pair is counted together with the first; possible links that are missed are no errors.
        errors.add(&[(1, 0)], &GoldLinks::parse("1-0 0?0", [2, 1]).unwrap());
        close(errors.aer(), 1.0 - 7.0 / 9.0);
        let mut perfect = AlignmentErrors::default();
        perfect.add(&[(0, 0)], &GoldLinks::parse("0-0 1?0", [2, 1]).unwrap());
        assert_eq!((perfect.aer(), perfect.precision(), perfect.recall()), (0.0, 1.0, 1.0));
        assert!(AlignmentErrors::default().aer().is_nan());
    }

    #[test]
    fn links_of_words_that_are_not_there_are_refused() {
        for (text, what) in [
            ("0-2", "2 target words"),
            ("3-0", "3 source"),
            ("1", "i-j"),
            ("a-0", "i-j"),
            ("0-", "i-j"),
        ] {
            let error = GoldLinks::parse(text, [3, 2]).unwrap_err().to_string();
            assert!(error.contains(what) && error.contains(text), "{error}");
        }
        assert_eq!(GoldLinks::parse(" ", [0, 0]).unwrap(), GoldLinks::default());
    }

    #[test]
    fn tokens_belong_to_the_words_that_they_overlap() {
        // 我 喜欢 咖啡 without spaces, with a token over the last two words; then a word with a space before it in its token.
        let (words, tokens) = ([0..3, 3..9, 9..15], [0..0, 0..3, 3..6, 6..15, 15..15]);
        assert_eq!(words_of_tokens(&words, &tokens), [0..0, 0..1, 1..2, 1..3, 0..0]);
        let (words, tokens) = ([0..1, 2..6], [0..1, 1..4, 4..6, 1..2]);
        let found = words_of_tokens(&words, &tokens);
        assert_eq!(found[..3], [0..1, 1..2, 1..2]);
        assert!(found[3].is_empty() && words_of_tokens(&[], &tokens).iter().all(Range::is_empty));
    }

    #[test]
    fn weights_of_words_are_sums_over_sources_and_means_over_targets() {
        let tokens =
            weights(&[&[0.1, 0.2, 0.3, 0.4], &[0.5, 0.1, 0.1, 0.3], &[0.0, 0.8, 0.1, 0.1]]);
        // Sources: a word of two tokens, one of a token, and a special token. Targets: a word of the first two tokens, and one of the last.
        let words = tokens.words([2, 2], [&[0..1, 0..1, 1..2, 0..0], &[0..1, 0..1, 1..2]]).unwrap();
        let expected = [[(0.3 + 0.6) / 2.0, (0.3 + 0.1) / 2.0], [0.8, 0.1]];
        for (row, expected) in words.rows().zip(expected) {
            for (x, expected) in row.iter().zip(expected) {
                assert!((x - expected).abs() < 1e-15, "{words:?}");
            }
        }
        assert_eq!(words.links(), [(0, 0), (0, 1)]);
        assert_eq!(pharaoh(&words.links()), "0-0 0-1");
        // A word without tokens has no link; of equal weights the first counts.
        let target = std::slice::from_ref(&(1..2));
        let gap = weights(&[&[0.5, 0.5]]).words([2, 3], [&[0..1, 1..2], target]).unwrap();
        assert_eq!((gap.links(), gap.rows().count()), (vec![(0, 1)], 3));
        assert!(AlignmentWeights::new(vec![0.0; 3], 2).is_err());
    }

    /// All monotone paths, by the definition.
    fn least(matrix: &AlignmentWeights, at: (usize, usize)) -> f64 {
        let (targets, sources) = (matrix.values.len() / matrix.sources, matrix.sources);
        let own = 1.0 - matrix.values[at.1 * sources + at.0];
        if at == (sources - 1, targets - 1) {
            return own;
        }
        let next = [(at.0 + 1, at.1 + 1), (at.0 + 1, at.1), (at.0, at.1 + 1)];
        let next = next.into_iter().filter(|next| next.0 < sources && next.1 < targets);
        own + next.map(|next| least(matrix, next)).fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn a_path_is_the_least_of_all_monotone_paths() {
        let mut noise = Noise::new(3);
        for [targets, sources] in [[1, 1], [1, 5], [6, 1], [2, 3], [4, 4], [5, 3], [5, 6]] {
            for _ in 0..20 {
                let values = (0..targets * sources).map(|_| noise.unit()).collect();
                let matrix = AlignmentWeights::new(values, sources).unwrap();
                let path = matrix.path();
                assert_eq!(path.first(), Some(&(0, 0)));
                assert_eq!(path.last(), Some(&(sources - 1, targets - 1)));
                for pair in path.windows(2) {
                    let step = (pair[1].0 - pair[0].0, pair[1].1 - pair[0].1);
                    assert!([(1, 1), (1, 0), (0, 1)].contains(&step), "{path:?}");
                }
                let cost = |(source, target): &(usize, usize)| {
                    1.0 - matrix.values[target * sources + source]
                };
                let cost: f64 = path.iter().map(cost).sum();
                assert!((cost - least(&matrix, (0, 0))).abs() < 1e-12, "{matrix:?}");
            }
        }
        let equal = weights(&[&[0.5; 3], &[0.5; 3], &[0.5; 3]]);
        assert_eq!(equal.path(), [(0, 0), (1, 1), (2, 2)]);
        assert_eq!(AlignmentWeights::new(Vec::new(), 0).unwrap().path(), []);
    }

    #[test]
    fn rows_that_predict_a_token_are_one_before_those_that_read_it() {
        let values = vec![0.9, 0.1, 0.2, 0.8, 0.7, 0.3, 0.5, 0.5, 0.4, 0.6, 0.0, 1.0];
        let data = LayerData::Weights(Weights { values, shape: [2, 3, 2] });
        let layer = |kind: &str, layer| Layer {
            layer,
            kind: kind.into(),
            rows: "target".into(),
            cols: "source".into(),
            data: data.clone(),
            value_norms: Vec::new(),
        };
        let layers = vec![layer("decoder", 0), layer("cross", 0), layer("cross", 1)];
        let trace = Trace { title: "a pair".into(), layers, ..Trace::default() };
        let names: Vec<_> = AlignmentHead::all(&trace).iter().map(ToString::to_string).collect();
        assert_eq!(names[..6], ["0.0", "0.0:reads", "0.1", "0.1:reads", "0.mean", "0.mean:reads"]);
        assert_eq!(names.len(), 12);
        let found = |heads: &[&str]| {
            let heads: Vec<_> = heads.iter().map(|text| of(text)).collect();
            AlignmentWeights::of_heads(&trace, Machine::detect(), &heads)
        };
        let close = |heads: &[&str], expected: &[f64]| {
            let found = found(heads).unwrap();
            let each = found.values.iter().zip(expected);
            assert!(each.into_iter().all(|(x, y)| (x - y).abs() < 1e-6), "{heads:?}: {found:?}");
            assert_eq!(found.values.len(), expected.len());
        };
        close(&["1.0"], &[0.9, 0.1, 0.2, 0.8]);
        close(&["0.0:reads"], &[0.2, 0.8, 0.7, 0.3]);
        close(&["1.mean"], &[0.7, 0.3, 0.3, 0.7]);
        close(&["0.0", "1.1:reads"], &[0.65, 0.35, 0.1, 0.9]);
        for (head, there) in
            [("2.0", "0.0 to 1.1"), ("1.2", "0.0 to 1.1"), ("2.mean", "0.0 to 1.1")]
        {
            let error = found(&[head]).unwrap_err().to_string();
            assert!(error.contains(head) && error.contains(there), "{error}");
        }
        assert!(found(&[]).is_err());
    }
}
