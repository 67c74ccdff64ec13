//! Reference statistics of attention weights: materializes all weights, then reduces them.

use super::{Inputs, Problem, rows};
use crate::description::mask::Mask;
use crate::machine::simd::{Element, Number};
use crate::tensor::index::Pair;

/// Attention weights of one row: its visible keys in ascending order, and its sink.
#[derive(Clone, Debug)]
pub struct RowWeights<N> {
    /// Batch item, query head and query.
    pub at: [usize; 3],
    /// Position of the row on the key axis.
    pub position: i64,
    /// `(key, weight, ln weight)` of each visible key.
    pub keys: Vec<(usize, N, N)>,
    /// Weight of the sink and its natural logarithm.
    pub sink: Option<(N, N)>,
    /// For each mask passed to [`weights`], which entries of `keys` it leaves visible.
    masks: Vec<Vec<bool>>,
}

/// Attention weights of every row, head by head. `round` is applied to similarities, scores and weights, as separate tensor
/// operations in a narrower dtype round them. [`RowWeights::mass`] indexes `masks`.
#[inline(never)]
pub fn weights<N: Number, E: Element>(
    problem: &Problem<'_, E>,
    (q, k, _): Inputs<'_, E>,
    masks: &[Mask],
    round: fn(N) -> N,
) -> Vec<RowWeights<N>> {
    let problem = &problem.clone().with_local_mask();
    let keys = problem.keys(&k, round);
    let of_row = |(batch, head, row)| {
        let at = Pair { batch, head, row, key: 0 };
        let scope = problem.scope(batch, head);
        let scores = problem.scores(&keys, &problem.query(&q, at, round), at, round);
        let softmax = problem.softmax(head, &scores);
        let both = |score: N| (round(softmax.weight(score)), softmax.log(score));
        let sink = problem.and_sink(head, &scores).nth(scores.len()).map(both);
        let mut keys: Vec<_> = scores.iter().map(|(key, s)| (*key, s.score)).collect();
        keys.sort_unstable_by_key(|(key, _)| *key);
        let visible =
            |mask: &Mask| keys.iter().map(|(key, _)| mask.is_visible(&scope, row, *key)).collect();
        RowWeights {
            at: [batch, head, row],
            position: scope.position(row),
            masks: masks.iter().map(visible).collect(),
            keys: keys.iter().map(|(key, score)| (*key, both(*score).0, both(*score).1)).collect(),
            sink,
        }
    };
    rows(problem).map(of_row).collect()
}

impl<N: Number> RowWeights<N> {
    /// Entropy `-sum_j a_j ln a_j`; the sink counts as one of the keys.
    #[must_use]
    pub fn entropy(&self) -> N {
        let all = self.keys.iter().map(|(_, a, log)| (*a, *log)).chain(self.sink);
        -all.filter(|(a, _)| *a != N::zero()).map(|(a, log)| a * log).sum::<N>()
    }

    /// Mean attention distance: `sum_j a_j |j - position| / sum_j a_j`, or 0 if all weights are 0.
    #[must_use]
    pub fn mean_distance(&self) -> N {
        let far = |key: usize| N::from_f64((key as f64 - self.position as f64).abs());
        let sum: N = self.keys.iter().map(|(key, a, _)| *a * far(*key)).sum();
        let mass: N = self.keys.iter().map(|(_, a, _)| *a).sum();
        if mass == N::zero() { sum } else { sum / mass }
    }

    /// Sum of the weights of the keys that mask `i` leaves visible.
    ///
    /// # Panics
    /// If `i` is not an index of a mask passed to [`weights`].
    #[must_use]
    pub fn mass(&self, i: usize) -> N {
        let all = self.keys.iter().zip(&self.masks[i]);
        all.filter(|(_, visible)| **visible).map(|((_, a, _), _)| *a).sum()
    }
}
