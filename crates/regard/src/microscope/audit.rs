//! Which head tolerates which sparsity: the weight that a pattern would keep, exactly.

use super::AttentionView;
use super::measure::Measure;
use crate::error::Error;
use crate::lsh::{LshAttention, Share};
use crate::mask::Mask;
use crate::problem::Align;
use crate::simd::{Element, Number};
use std::fmt;

/// A way to look at fewer keys.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Pattern {
    /// Keys less than so many away: see [`Mask::window`].
    Window(usize),
    /// The keys with the largest weights, so many for each query.
    TopK(usize),
    /// Keys that a mask lets through.
    Mask(Mask),
    /// Keys that hashing puts together with a query. For scaled dot products with a full or a causal mask, and no other option.
    Lsh(LshAttention),
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Window(keys) => write!(f, "window {keys}"),
            Self::TopK(keys) => write!(f, "top {keys}"),
            Self::Mask(mask) => write!(f, "{mask}"),
            Self::Lsh(_) => write!(f, "lsh"),
        }
    }
}

/// How much of its weight each head keeps under each pattern.
#[derive(Clone, Debug, PartialEq)]
pub struct Audit {
    /// Items and heads, as the view has them.
    pub heads: Vec<HeadAudit>,
}

/// How much of its weight a head keeps under each pattern, over its queries.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadAudit {
    /// The item.
    pub batch: usize,
    /// The query head.
    pub head: usize,
    /// One for each pattern. Rows that see nothing are left out; a sink's weight is kept by no pattern.
    pub kept: Vec<Share>,
}

impl<E: Element> AttentionView<'_, E> {
    /// How much of its weight each head would keep under each pattern, on average and in the worst row.
    ///
    /// Costs one look, one more for all `TopK` together, one over the pairs it lets through for each mask, and one
    /// [`LshAttention::forward`] for each `Lsh`.
    pub fn audit(&self, patterns: &[Pattern]) -> Result<Audit, Error> {
        let mut measure = Measure::new();
        let most = patterns.iter().map(|p| if let Pattern::TopK(k) = p { *k } else { 0 }).max();
        if let Some(k) = most.filter(|k| *k > 0) {
            measure = measure.top_k(k);
        }
        let all = measure.mass(Mask::full());
        let measure = patterns.iter().fold(all, |measure, pattern| match pattern {
            Pattern::Window(keys) => measure.mass(Mask::full().window(*keys)),
            Pattern::Mask(mask) => measure.mass(mask.clone()),
            Pattern::TopK(_) | Pattern::Lsh(_) => measure,
        });
        let stats = self.measure(&measure)?;
        let mut masses = stats.masses.into_iter();
        let all = masses.next().unwrap_or_default();
        let mut kept = Vec::new();
        for pattern in patterns {
            kept.push(match (pattern, &stats.top) {
                (Pattern::TopK(0), _) => vec![0.0; all.len()],
                (Pattern::TopK(k), Some(top)) => {
                    let sum = |row| top.weights(row).iter().take(*k).map(|w| w.to_f64()).sum();
                    (0..all.len()).map(sum).collect()
                }
                (Pattern::Lsh(lsh), _) => self.kept_by_hashing(lsh)?,
                _ => masses.next().unwrap_or_default().into_iter().map(Number::to_f64).collect(),
            });
        }
        Ok(self.by_head(&all, &kept))
    }

    /// `e^(lse of what hashing sees - lse)`
    fn kept_by_hashing(&self, lsh: &LshAttention) -> Result<Vec<f64>, Error> {
        let problem = &self.problem;
        let causal = problem.mask.is_causal() && problem.align == Align::End;
        let plain = problem.is_plain_dot() && problem.score.sinks.is_none() && problem.is_dot();
        let same_keys = if lsh.causal { causal } else { problem.mask.is_full() };
        let same_scale = lsh.scale.is_none_or(|scale| scale == problem.scale());
        let Some(k) = self.k.tensor().filter(|_| plain && same_keys && same_scale) else {
            return Err(Error::NotHashed);
        };
        let lsh = lsh.scale(problem.scale());
        let stats = lsh.forward(self.machine, self.q, k, k)?;
        let mut kept = Vec::new();
        for (batch, head) in self.each_head() {
            let scope = problem.scope(batch, head);
            for row in self.rows_of(batch).step_by(self.step) {
                let row = problem.row_index(scope, row);
                let [part, all] =
                    [&stats.output.lse, self.softmaxes.lse].map(|lse| lse[row].to_f64());
                // Rounding may leave a little more than everything.
                kept.push(if part == f64::NEG_INFINITY {
                    0.0
                } else {
                    (part - all).exp().min(1.0)
                });
            }
        }
        Ok(kept)
    }

    fn by_head(&self, all: &[E::Num], kept: &[Vec<f64>]) -> Audit {
        let mut first = 0;
        let heads = self.each_head().map(|(batch, head)| {
            let rows = first..first + self.rows_of(batch).len().div_ceil(self.step);
            first = rows.end;
            let share = |kept: &Vec<f64>| {
                let seeing = rows.clone().filter(|row| all[*row] != E::Num::default());
                Share::of(seeing.map(|row| kept[row]).collect::<Vec<_>>().into_iter())
            };
            HeadAudit { batch, head, kept: kept.iter().map(share).collect() }
        });
        Audit { heads: heads.collect() }
    }
}
