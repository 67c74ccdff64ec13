//! Sparsity audit: the exact attention mass that each head retains under a sparse pattern.

use super::Measure;
use regard::{AttentionView, Error, Mask, Number};
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
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Window(keys) => write!(f, "window {keys}"),
            Self::TopK(keys) => write!(f, "top-{keys}"),
            Self::Mask(mask) => write!(f, "{mask}"),
        }
    }
}

/// Attention mass that one head retains under each pattern, over its queries.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadAudit {
    /// Batch item.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// One entry per pattern. Fully masked queries are left out. The weight of a sink counts as lost under every pattern.
    pub retained: Vec<RetainedMass>,
}

/// The attention mass that the queries of a head retain.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetainedMass {
    /// Mean over the queries; 1 if there are none.
    pub mean: f64,
    /// Smallest of any query.
    pub worst: f64,
}

/// Computes the attention mass that each head of a view would retain under each pattern.
///
/// Costs one pass over the weights for the mass, one for all `TopK` together, and one over the visible pairs of each mask.
pub fn audit<N: Number>(
    view: &AttentionView<'_, N>,
    patterns: &[Pattern],
) -> Result<Vec<HeadAudit>, Error> {
    let mut measure = Measure::new().mass(Mask::full());
    let most = patterns.iter().map(|p| if let Pattern::TopK(k) = p { *k } else { 0 }).max();
    if let Some(k) = most.filter(|k| *k > 0) {
        measure = measure.top_k(k);
    }
    for pattern in patterns {
        measure = match pattern {
            Pattern::Window(keys) => measure.mass(Mask::full().window(*keys)),
            Pattern::Mask(mask) => measure.mass(mask.clone()),
            Pattern::TopK(_) => measure,
        };
    }
    let stats = measure.of(view)?;
    let mut masses = stats.masses.iter();
    let all = masses.next().map_or(&[][..], |all| all);
    let mut mass_of = Vec::new();
    for pattern in patterns {
        mass_of.push(match pattern {
            Pattern::TopK(0) => vec![0.0; all.len()],
            Pattern::TopK(k) => {
                let top = |row| stats.top.weights(row).iter().take(*k);
                let sum = |row| top(row).map(|a| Number::to_f64(*a)).sum();
                (0..all.len()).map(sum).collect()
            }
            _ => masses.next().into_iter().flatten().map(|a| Number::to_f64(*a)).collect(),
        });
    }
    Ok(by_head(view, all, &mass_of))
}

fn by_head<N: Number>(
    view: &AttentionView<'_, N>,
    all: &[N],
    mass_of: &[Vec<f64>],
) -> Vec<HeadAudit> {
    let mut first = 0;
    let heads = view.heads().map(|(batch, head)| {
        let rows = first..first + view.row_count(batch);
        first = rows.end;
        let visible: Vec<usize> = rows.filter(|row| all[*row] != N::zero()).collect();
        let retained = |mass: &Vec<f64>| {
            let of_rows = || visible.iter().map(|row| mass[*row]);
            let n = visible.len() as f64;
            let mean = if visible.is_empty() { 1.0 } else { of_rows().sum::<f64>() / n };
            RetainedMass { mean, worst: of_rows().fold(1.0, f64::min) }
        };
        HeadAudit { batch, head, retained: mass_of.iter().map(retained).collect() }
    });
    heads.collect()
}
