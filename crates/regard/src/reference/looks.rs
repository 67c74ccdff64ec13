//! What can be seen in weights, by definition: all of them first, then what is asked for.

use super::{Inputs, Problem, rows};
use crate::index::Pair;
use crate::mask::Mask;
use crate::simd::{Element, Number};

/// The weights of a row for the keys that it sees, ascending, and of its sink.
#[derive(Clone, Debug)]
pub struct RowWeights<N> {
    /// The item of the batch, the query head and the query.
    pub at: [usize; 3],
    /// Where the row stands among the keys.
    pub position: i64,
    /// Keys, with their weights and the natural logarithms of these.
    pub keys: Vec<(usize, N, N)>,
    /// The weight of the sink, and its logarithm.
    pub sink: Option<(N, N)>,
    /// Whether a key of each mask asked about is seen, in the order of `keys`.
    masks: Vec<Vec<bool>>,
}

/// The weights of every row, one head after another; similarities, scores and weights are rounded, as single operations on
/// tensors of a narrower type leave them. `masks` are those that [`RowWeights::mass`] is to be asked about.
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
    /// `-sum of a ln a`, the sink counted as one of the keys.
    #[must_use]
    pub fn entropy(&self) -> N {
        let all = self.keys.iter().map(|(_, a, log)| (*a, *log)).chain(self.sink);
        -all.filter(|(a, _)| *a != N::zero()).map(|(a, log)| a * log).sum::<N>()
    }

    /// `sum of a |key - position|` over the sum of `a`; 0 if there is none.
    #[must_use]
    pub fn mean_distance(&self) -> N {
        let far = |key: usize| N::from_f64((key as f64 - self.position as f64).abs());
        let sum: N = self.keys.iter().map(|(key, a, _)| *a * far(*key)).sum();
        let mass: N = self.keys.iter().map(|(_, a, _)| *a).sum();
        if mass == N::zero() { sum } else { sum / mass }
    }

    /// The sum over the keys that the `i`-th mask lets through.
    ///
    /// # Panics
    /// If there is no such mask.
    #[must_use]
    pub fn mass(&self, i: usize) -> N {
        let all = self.keys.iter().zip(&self.masks[i]);
        all.filter(|(_, visible)| **visible).map(|((_, a, _), _)| *a).sum()
    }
}
