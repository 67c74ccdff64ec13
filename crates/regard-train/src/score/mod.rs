//! BLEU and chrF of translations, equal to sacrebleu's in every digit that it prints.
//!
//! A score can be compared only with one that was counted alike, so each comes with a signature that tells how:
//!
//! ```
//! use regard_train::score::{Bleu, Chrf};
//!
//! let (hypotheses, references) = (["the cat sat on the mat"], ["the cat sat on a mat"]);
//! let bleu = Bleu::default();
//! let score = bleu.corpus(&hypotheses, &references)?;
//! assert_eq!(
//!     score.to_string(),
//!     "BLEU = 53.73 83.3/60.0/50.0/33.3 (BP = 1.000 ratio = 1.000 hyp_len = 6 ref_len = 6)"
//! );
//! assert_eq!(bleu.signature(), "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0");
//! assert_eq!(Chrf::default().corpus(&hypotheses, &references)?.to_string(), "chrF2 = 72.08");
//! # Ok::<(), regard_train::score::ScoreError>(())
//! ```

mod bleu;
mod chrf;
mod error;
mod tokenize;

pub use bleu::{Bleu, BleuScore};
pub use chrf::{Chrf, ChrfScore};
pub use error::ScoreError;
pub use tokenize::Tokenize;

use std::borrow::Cow;
use std::cmp::Ordering;

/// The sacrebleu whose numbers these are, as signatures name it.
const VERSION: &str = "2.6.0";

/// Each hypothesis with its reference.
fn pairs<'a>(
    hypotheses: &'a [impl AsRef<str>],
    references: &'a [impl AsRef<str>],
) -> Result<impl Iterator<Item = (&'a str, &'a str)>, ScoreError> {
    if hypotheses.len() != references.len() {
        let [hypotheses, references] = [hypotheses.len(), references.len()];
        return Err(ScoreError::Counts { hypotheses, references });
    }
    if hypotheses.is_empty() {
        return Err(ScoreError::Empty);
    }
    Ok(hypotheses.iter().map(AsRef::as_ref).zip(references.iter().map(AsRef::as_ref)))
}

/// What a signature says of case.
fn case(lowercase: bool) -> &'static str {
    if lowercase { "lc" } else { "mixed" }
}

fn cased(line: &str, lowercase: bool) -> Cow<'_, str> {
    if lowercase { line.to_lowercase().into() } else { line.into() }
}

/// How many runs of `n` items are in both, each counted as often as it is in the one that has fewer of it.
fn common<T: Ord>(a: &[T], b: &[T], n: usize) -> usize {
    let [a, b] = [a, b].map(|items| {
        let mut runs: Vec<&[T]> = items.windows(n).collect();
        runs.sort_unstable();
        runs
    });
    let (mut a, mut b) = (a.as_slice(), b.as_slice());
    let mut found = 0;
    while let ([x, rest_a @ ..], [y, rest_b @ ..]) = (a, b) {
        let order = x.cmp(y);
        if order.is_le() {
            a = rest_a;
        }
        if order.is_ge() {
            b = rest_b;
        }
        found += usize::from(order == Ordering::Equal);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_counts_as_often_as_both_have_it() {
        assert_eq!(common(&['a', 'a', 'b', 'a'], &['b', 'a', 'a'], 1), 3);
        assert_eq!(common(&['a', 'a', 'b', 'a'], &['b', 'a', 'a'], 2), 2);
        assert_eq!(common(&['a'], &['a', 'a'], 2), 0);
        assert_eq!(common::<char>(&[], &[], 1), 0);
    }

    #[test]
    fn unequal_numbers_of_lines_are_refused_with_both_numbers() {
        let refused = Bleu::default().corpus(&["a", "b"], &["a"]).unwrap_err();
        assert!(refused.to_string().contains("2 hypotheses and 1 references"), "{refused}");
        assert_eq!(Chrf::default().corpus(&["a"], &["a", "b", "c"]).unwrap_err(), {
            ScoreError::Counts { hypotheses: 1, references: 3 }
        });
    }

    #[test]
    fn no_lines_have_no_score() {
        let none: [&str; 0] = [];
        assert_eq!(Bleu::default().corpus(&none, &none).unwrap_err(), ScoreError::Empty);
        assert_eq!(Chrf::default().corpus(&none, &none).unwrap_err(), ScoreError::Empty);
    }
}
