//! chrF: which share of the characters, and of runs of them, a translation and its reference have in common.

use super::tokenize::{is_space, words};
use super::{ScoreError, VERSION, case, cased, common, pairs};
use std::fmt;

/// chrF with one reference a line; with a `word_order` of 2 it is chrF++. sacrebleu's defaults, and its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chrf {
    /// The longest run of characters that is counted; white space does not count.
    pub char_order: usize,
    /// The longest run of words that is counted, 0 for none.
    pub word_order: usize,
    /// How many times as much recall weighs as precision.
    pub beta: f64,
    /// Whether case is ignored.
    pub lowercase: bool,
}

impl Default for Chrf {
    fn default() -> Self {
        Self { char_order: 6, word_order: 0, beta: 2.0, lowercase: false }
    }
}

/// A chrF score; it prints as sacrebleu's does.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct ChrfScore {
    /// From 0 to 100.
    pub score: f64,
    /// The longest run of words that was counted: as many `+` are in the name.
    pub word_order: usize,
    /// How many times as much recall weighs as precision.
    pub beta: f64,
}

impl Chrf {
    /// chrF++: runs of up to two words count as well.
    #[must_use]
    pub fn plus_plus() -> Self {
        Self { word_order: 2, ..Self::default() }
    }

    /// The score of lines against the references at the same places.
    pub fn corpus(
        &self,
        hypotheses: &[impl AsRef<str>],
        references: &[impl AsRef<str>],
    ) -> Result<ChrfScore, ScoreError> {
        self.check()?;
        let (mut of_chars, mut of_words) = (Vec::new(), Vec::new());
        for (hypothesis, reference) in pairs(hypotheses, references)? {
            let lines = [hypothesis, reference].map(|line| cased(line, self.lowercase));
            let [a, b] = lines
                .each_ref()
                .map(|line| line.chars().filter(|&c| !is_space(c)).collect::<Vec<_>>());
            count(&a, &b, self.char_order, &mut of_chars);
            if self.word_order > 0 {
                let [a, b] = lines.each_ref().map(|line| parts(line));
                count(&a, &b, self.word_order, &mut of_words);
            }
        }
        let score = f_score(of_chars.iter().chain(&of_words), self.beta);
        Ok(ChrfScore { score, word_order: self.word_order, beta: self.beta })
    }

    /// How it counts, as sacrebleu tells it: scores with the same signature can be compared. It does not tell `beta`, which
    /// is in the name of the score.
    #[must_use]
    pub fn signature(&self) -> String {
        let Self { char_order, word_order, lowercase, .. } = *self;
        let case = case(lowercase);
        format!(
            "nrefs:1|case:{case}|eff:yes|nc:{char_order}|nw:{word_order}|space:no|version:{VERSION}"
        )
    }

    fn check(&self) -> Result<(), ScoreError> {
        let refuse = |name, value, wanted| Err(ScoreError::Setting { name, value, wanted });
        if !(0.0..=1e100).contains(&self.beta) {
            return refuse("beta", self.beta.to_string(), "a number from 0 to 1e100, most often 2");
        }
        if self.char_order == 0 && self.word_order == 0 {
            return refuse("char_order", "0".into(), "above 0 if word_order is 0, most often 6");
        }
        Ok(())
    }
}

/// How many runs of one length there are.
#[derive(Clone, Default)]
struct Runs {
    hypothesis: usize,
    reference: usize,
    common: usize,
}

/// Adds the runs of up to `order` items; `counts[n - 1]` is of those of `n`. Lengths of which the reference has none are
/// left out, even if the hypothesis has some.
fn count<T: Ord>(hypothesis: &[T], reference: &[T], order: usize, counts: &mut Vec<Runs>) {
    let order = order.min(reference.len());
    counts.resize(order.max(counts.len()), Runs::default());
    for (n, runs) in (1..=order).zip(counts) {
        runs.hypothesis += (hypothesis.len() + 1).saturating_sub(n);
        runs.reference += reference.len() + 1 - n;
        runs.common += common(hypothesis, reference, n);
    }
}

/// The words of a line for chrF++: one sign of punctuation is cut from the end of a word or, if there is none, from its
/// beginning.
fn parts(line: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    for word in words(line) {
        let last = word.char_indices().last().map_or(0, |(at, _)| at);
        let at = if last > 0 && word.ends_with(is_punctuation) {
            last
        } else if last > 0 && word.starts_with(is_punctuation) {
            1
        } else {
            0
        };
        let (before, after) = word.split_at(at);
        parts.extend((at > 0).then_some(before));
        parts.push(after);
    }
    parts
}

fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation()
}

/// The F score of the mean precision and the mean recall, over those lengths of which both sides have runs.
fn f_score<'a>(counts: impl Iterator<Item = &'a Runs>, beta: f64) -> f64 {
    let [mut precision, mut recall, mut orders] = [0.0; 3];
    for runs in counts.filter(|runs| runs.hypothesis > 0 && runs.reference > 0) {
        precision += runs.common as f64 / runs.hypothesis as f64;
        recall += runs.common as f64 / runs.reference as f64;
        orders += 1.0;
    }
    if precision + recall == 0.0 {
        return 0.0;
    }
    precision /= orders;
    recall /= orders;
    let factor = beta * beta;
    100.0 * ((1.0 + factor) * precision * recall / (factor * precision + recall))
}

impl fmt::Display for ChrfScore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chrF{}", self.beta)?;
        (0..self.word_order).try_for_each(|_| f.write_str("+"))?;
        write!(f, " = {:.2}", self.score)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn punctuation_is_cut_from_one_end_of_a_word() {
        assert_eq!(
            parts("(hi) \"so \"so, a-b . ... ？好？"),
            ["(hi", ")", "\"", "so", "\"so", ",", "a-b", ".", "..", ".", "？好？"]
        );
    }

    #[test]
    fn white_space_does_not_count() {
        let score = Chrf::default().corpus(&["a b\u{3000}c"], &[" abc\t"]).unwrap();
        assert_eq!(score.to_string(), "chrF2 = 100.00");
        assert!(Chrf::plus_plus().corpus(&["a b c"], &["abc"]).unwrap().score < 100.0);
    }

    #[test]
    fn nothing_in_common_scores_nothing() {
        let score = |a, b| Chrf::plus_plus().corpus(&[a], &[b]).unwrap().to_string();
        assert_eq!(score("abc", "xyz"), "chrF2++ = 0.00");
        assert_eq!(score("", ""), "chrF2++ = 0.00");
        assert_eq!(score("a", ""), "chrF2++ = 0.00");
    }

    #[test]
    fn settings_without_meaning_are_refused() {
        let refused = |chrf: Chrf| chrf.corpus(&["a"], &["a"]).unwrap_err().to_string();
        let beta = refused(Chrf { beta: f64::NAN, ..Chrf::default() });
        assert_eq!(beta, "beta is \"NaN\", and should be a number from 0 to 1e100, most often 2");
        assert!(refused(Chrf { char_order: 0, ..Chrf::default() }).starts_with("char_order is"));
    }

    #[test]
    fn an_order_that_no_line_has_costs_nothing() {
        let score = |char_order| {
            Chrf { char_order, ..Chrf::default() }.corpus(&["abc"], &["abd"]).unwrap().score
        };
        assert_eq!(score(usize::MAX), score(3));
    }
}
