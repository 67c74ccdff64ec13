//! Sparsity audit: the exact attention mass that each head retains under a sparse pattern.

use super::AttentionView;
use super::measure::Measure;
use crate::description::mask::Mask;
use crate::description::problem::Align;
use crate::error::Error;
use crate::machine::simd::Number;
use crate::tensor::view::Tensor;
use crate::variants::lsh::{LshAttention, Share};
use std::fmt;

/// A sparse attention pattern.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Pattern {
    /// Sliding window: keys less than this far from the query. See [`Mask::window`].
    Window(usize),
    /// Top-k: this number of keys per query, those with the largest weights.
    TopK(usize),
    /// Keys that a mask leaves visible.
    Mask(Mask),
    /// Candidate keys of LSH attention (Reformer, Kitaev et al. 2020). Requires scaled dot products with a full or a causal
    /// mask, and no other option.
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

/// Attention mass that each head retains under each pattern.
#[derive(Clone, Debug, PartialEq)]
pub struct Audit {
    /// One entry per item and head, in the order of the view.
    pub heads: Vec<HeadAudit>,
}

/// Attention mass that one head retains under each pattern, over its queries.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadAudit {
    /// Batch item.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// One entry per pattern. Fully masked rows are excluded. The weight of a sink counts as lost under every pattern.
    pub kept: Vec<Share>,
}

impl<N: Number> AttentionView<'_, N> {
    /// Computes the attention mass that each head would retain under each pattern: the mean over rows and the worst row.
    ///
    /// Costs one pass over the weights, one more for all `TopK` together, one over the visible pairs of each mask, and one
    /// [`LshAttention::forward`] per `Lsh`.
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
                    let sum =
                        |row| top.weights(row).iter().take(*k).map(|w| Number::to_f64(*w)).sum();
                    (0..all.len()).map(sum).collect()
                }
                (Pattern::Lsh(lsh), _) => self.kept_by_hashing(lsh)?,
                _ => masses.next().unwrap_or_default().into_iter().map(Number::to_f64).collect(),
            });
        }
        Ok(self.by_head(&all, &kept))
    }

    /// `e^(lse over the candidate keys - lse over all keys)` of each row.
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
        let (q, k) = (Tensor::widened(&self.q)?, Tensor::widened(&k)?);
        let (q, k) = (q.view(), k.view());
        let stats = lsh.forward(self.machine, q, k, k)?;
        let mut kept = Vec::new();
        for (batch, head) in self.each_head() {
            let scope = problem.scope(batch, head);
            for row in self.rows_of(batch).step_by(self.step) {
                let row = problem.row_index(scope, row);
                let [part, all] =
                    [&stats.output.lse, self.softmaxes.lse].map(|lse| lse[row].to_f64());
                // Rounding can push the ratio slightly above 1.
                kept.push(if part == f64::NEG_INFINITY {
                    0.0
                } else {
                    (part - all).exp().min(1.0)
                });
            }
        }
        Ok(kept)
    }

    fn by_head(&self, all: &[N], kept: &[Vec<f64>]) -> Audit {
        let mut first = 0;
        let heads = self.each_head().map(|(batch, head)| {
            let rows = first..first + self.rows_of(batch).len().div_ceil(self.step);
            first = rows.end;
            let share = |kept: &Vec<f64>| {
                let seeing = rows.clone().filter(|row| all[*row] != N::zero());
                Share::of(seeing.map(|row| kept[row]).collect::<Vec<_>>().into_iter())
            };
            HeadAudit { batch, head, kept: kept.iter().map(share).collect() }
        });
        Audit { heads: heads.collect() }
    }
}
