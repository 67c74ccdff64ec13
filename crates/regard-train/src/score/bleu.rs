//! BLEU: which share of a translation's words, and of its runs of up to four words, is in the reference.

use super::tokenize::words;
use super::{ScoreError, Tokenize, VERSION, case, cased, common, pairs};
use std::fmt;

/// The longest run of words that is counted.
const ORDER: usize = 4;

/// BLEU with one reference a line, and smoothed exponentially: sacrebleu's defaults, and its numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bleu {
    /// What a word is.
    pub tokenize: Tokenize,
    /// Whether case is ignored.
    pub lowercase: bool,
}

/// A BLEU score and what it is made of; it prints as sacrebleu's does.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct BleuScore {
    /// From 0 to 100.
    pub score: f64,
    /// For runs of 1, 2, 3 and 4 words, how many of a hundred are in the reference. One for which none is found is smoothed.
    pub precisions: [f64; ORDER],
    /// How many runs of the hypotheses are in their references, before smoothing.
    pub matches: [usize; ORDER],
    /// How many runs the hypotheses have.
    pub totals: [usize; ORDER],
    /// What the score is multiplied by if the hypotheses are shorter than the references; 1 if they are not.
    pub brevity_penalty: f64,
    /// Words of all hypotheses.
    pub hypothesis_length: usize,
    /// Words of all references.
    pub reference_length: usize,
}

impl Bleu {
    /// The score of lines against the references at the same places.
    pub fn corpus(
        &self,
        hypotheses: &[impl AsRef<str>],
        references: &[impl AsRef<str>],
    ) -> Result<BleuScore, ScoreError> {
        let mut counts = Counts::default();
        for (hypothesis, reference) in pairs(hypotheses, references)? {
            self.count(hypothesis, reference, &mut counts);
        }
        Ok(counts.score(false))
    }

    /// The score of one line, as sacrebleu's `sentence_bleu`: of a line of fewer than four words, only the runs that it has
    /// room for are asked for. The mean over lines is not the score of a corpus.
    #[must_use]
    pub fn sentence(&self, hypothesis: &str, reference: &str) -> BleuScore {
        let mut counts = Counts::default();
        self.count(hypothesis, reference, &mut counts);
        counts.score(true)
    }

    /// How [`corpus`](Self::corpus) counts, as sacrebleu tells it: scores with the same signature can be compared.
    #[must_use]
    pub fn signature(&self) -> String {
        let Self { tokenize, lowercase } = *self;
        let case = case(lowercase);
        format!("nrefs:1|case:{case}|eff:no|tok:{tokenize}|smooth:exp|version:{VERSION}")
    }

    fn count(&self, hypothesis: &str, reference: &str, counts: &mut Counts) {
        let lines =
            [hypothesis, reference].map(|line| self.tokenize.apply(&cased(line, self.lowercase)));
        let [hypothesis, reference] = lines.each_ref().map(|line| words(line).collect::<Vec<_>>());
        counts.hypothesis_length += hypothesis.len();
        counts.reference_length += reference.len();
        for n in 1..=ORDER {
            counts.totals[n - 1] += (hypothesis.len() + 1).saturating_sub(n);
            counts.matches[n - 1] += common(&hypothesis, &reference, n);
        }
    }
}

/// All that the score of a corpus depends on.
#[derive(Default)]
struct Counts {
    matches: [usize; ORDER],
    totals: [usize; ORDER],
    hypothesis_length: usize,
    reference_length: usize,
}

impl Counts {
    /// `effective_order`: leave out the orders for which no hypothesis is long enough, and do not count them as failures.
    fn score(self, effective_order: bool) -> BleuScore {
        let Self { matches, totals, hypothesis_length, reference_length } = self;
        let brevity_penalty = match hypothesis_length {
            length if length >= reference_length => 1.0,
            0 => 0.0,
            length => (1.0 - reference_length as f64 / length as f64).exp(),
        };
        let mut precisions = [0.0; ORDER];
        let mut score = 0.0;
        if matches != [0; ORDER] {
            let long_enough = totals.iter().take_while(|&&total| total > 0).count();
            let mut smooth = 1.0;
            for n in 0..long_enough {
                let total = totals[n] as f64;
                precisions[n] = if matches[n] > 0 {
                    100.0 * matches[n] as f64 / total
                } else {
                    smooth *= 2.0;
                    100.0 / (smooth * total)
                };
            }
            let order = if effective_order { long_enough } else { ORDER };
            let logs: f64 = precisions[..order].iter().map(|p| p.ln()).sum();
            score = brevity_penalty * (logs / order as f64).exp();
        }
        BleuScore {
            score,
            precisions,
            matches,
            totals,
            brevity_penalty,
            hypothesis_length,
            reference_length,
        }
    }
}

impl BleuScore {
    /// How long the hypotheses are, with the references as 1; 0 if the references are empty.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        match self.reference_length {
            0 => 0.0,
            length => self.hypothesis_length as f64 / length as f64,
        }
    }
}

impl fmt::Display for BleuScore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d] = self.precisions;
        write!(f, "BLEU = {:.2} {a:.1}/{b:.1}/{c:.1}/{d:.1} ", self.score)?;
        write!(f, "(BP = {:.3} ratio = {:.3} ", self.brevity_penalty, self.ratio())?;
        write!(f, "hyp_len = {} ref_len = {})", self.hypothesis_length, self.reference_length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(hypothesis: &str, reference: &str) -> String {
        Bleu::default().corpus(&[hypothesis], &[reference]).unwrap().to_string()
    }

    #[test]
    fn the_cat_on_the_mat_has_its_known_score() {
        assert_eq!(
            printed("the cat sat on the mat", "the cat sat on a mat"),
            "BLEU = 53.73 83.3/60.0/50.0/33.3 (BP = 1.000 ratio = 1.000 hyp_len = 6 ref_len = 6)"
        );
    }

    #[test]
    fn nothing_said_scores_nothing() {
        let none = "BLEU = 0.00 0.0/0.0/0.0/0.0 (BP = 0.000 ratio = 0.000 hyp_len = 0 ref_len = 2)";
        assert_eq!(printed("", "a b"), none);
        let all = "BLEU = 0.00 0.0/0.0/0.0/0.0 (BP = 1.000 ratio = 0.000 hyp_len = 0 ref_len = 0)";
        assert_eq!(printed("", " "), all);
    }

    #[test]
    fn a_short_line_scores_alone_but_not_as_a_corpus() {
        let bleu = Bleu::default();
        assert_eq!(bleu.corpus(&["a b"], &["a b"]).unwrap().score, 0.0);
        assert!((bleu.sentence("a b", "a b").score - 100.0).abs() < 1e-9);
    }

    #[test]
    fn case_counts_unless_it_is_ignored() {
        let [hypotheses, references] = [["The Cat sat here ."], ["the cat sat here ."]];
        let lowercase = Bleu { lowercase: true, ..Bleu::default() };
        assert!(Bleu::default().corpus(&hypotheses, &references).unwrap().score < 60.0);
        assert!(lowercase.corpus(&hypotheses, &references).unwrap().score > 99.0);
        assert!(lowercase.signature().contains("case:lc"));
    }
}
