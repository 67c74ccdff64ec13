//! Interventions: edges between queries and keys that are dropped, scaled or biased, as data.

use super::pass::{Bias, pass};
use crate::error::Error;
use crate::machine::simd::{GROUP, Lanes, Number, Simd};
use crate::tensor::index::{At, Keys, Pair, RowTile, Scope};
use std::ops::Range;

/// A change of the scores of some edges, those between some queries and some keys of some heads: attention knockout
/// ([Geva et al. 2023](https://arxiv.org/abs/2304.14767)) and its soft forms. See [`Score::interventions`](super::Score::interventions).
///
/// Ranges are indices of the call, of all there are unless they are narrowed, and may reach beyond the last one.
///
/// ```
/// use regard::score::Intervention;
/// // Queries 40 to 59 of head 3 do not attend to keys 0 to 39.
/// let rule = Intervention::drop().heads(3..4).rows(40..60).keys(0..40);
/// // All heads weight key 7 twice as much; the weights of a query still sum to 1.
/// let other = Intervention::scale(2.0).keys(7..8);
/// # let _ = (rule, other);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Intervention {
    /// Batch items, heads, queries, keys.
    ranges: [Range<usize>; 4],
    bias: f64,
}

impl Intervention {
    /// Hides the edges, as a mask does.
    #[must_use]
    pub fn drop() -> Self {
        Self::add(f64::NEG_INFINITY)
    }

    /// Multiplies the weights by a factor of at least 0 before they are normalized: adds `ln factor` to the scores.
    #[must_use]
    pub fn scale(factor: f64) -> Self {
        Self::add(factor.ln())
    }

    /// Adds a bias to the scores; `-inf` hides the edges.
    #[must_use]
    pub fn add(bias: f64) -> Self {
        Self { ranges: [const { 0..usize::MAX }; 4], bias }
    }

    /// Of some batch items alone.
    #[must_use]
    pub fn items(self, items: Range<usize>) -> Self {
        self.narrow(0, items)
    }

    /// Of some query heads alone.
    #[must_use]
    pub fn heads(self, heads: Range<usize>) -> Self {
        self.narrow(1, heads)
    }

    /// Of some queries alone, by their index in their item.
    #[must_use]
    pub fn rows(self, rows: Range<usize>) -> Self {
        self.narrow(2, rows)
    }

    /// Of some keys alone, by their index in their item.
    #[must_use]
    pub fn keys(self, keys: Range<usize>) -> Self {
        self.narrow(3, keys)
    }

    fn narrow(mut self, axis: usize, range: Range<usize>) -> Self {
        self.ranges[axis] = range;
        self
    }

    /// The same where rows and keys are counted from others.
    pub(super) fn part(self, first_row: usize, first_key: usize) -> Self {
        let from = |range: &Range<usize>, first: usize| {
            range.start.saturating_sub(first)..range.end.saturating_sub(first)
        };
        let [items, heads, rows, keys] = self.ranges;
        Self { ranges: [items, heads, from(&rows, first_row), from(&keys, first_key)], ..self }
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        if self.bias.is_nan() || self.bias == f64::INFINITY {
            let accepted = "a factor of at least 0 or a bias, finite or -inf";
            return Err(Error::Value { option: "intervention", found: self.bias, accepted });
        }
        let starts = [
            "first item of an intervention",
            "first head of an intervention",
            "first row of an intervention",
            "first key of an intervention",
        ];
        starts.into_iter().zip(&self.ranges).try_for_each(|(option, range)| {
            Error::unless_below(option, range.start, range.end.saturating_add(1))
        })
    }

    fn is_of_head(&self, batch: usize, head: usize) -> bool {
        self.ranges[0].contains(&batch) && self.ranges[1].contains(&head)
    }

    /// What is added to the score of a pair.
    pub(super) fn bias_at(&self, at: Pair) -> f64 {
        let [.., rows, keys] = &self.ranges;
        let is_of_pair = rows.contains(&at.row) && keys.contains(&at.key);
        if self.is_of_head(at.batch, at.head) && is_of_pair { self.bias } else { 0.0 }
    }

    /// Whether it may change a score between these rows and a block of keys.
    pub(super) fn reaches(
        &self,
        scope: &Scope,
        rows: RowTile,
        (keys, n): (Keys<'_>, usize),
    ) -> bool {
        let [.., own_rows, own_keys] = &self.ranges;
        let ends = |range: &Range<usize>, first: usize, last: usize| {
            range.start <= last && first < range.end && !range.is_empty()
        };
        self.is_of_head(scope.batch, scope.head)
            && rows.count > 0
            && n > 0
            && ends(own_rows, rows.first, rows.row(rows.count - 1))
            && ends(own_keys, keys.get(0), keys.get(n - 1))
    }

    /// Adds its bias to a tile of scores.
    #[inline(always)]
    pub(super) fn add_to<N: Number, S: Simd<N>>(&self, s: S, at: At<'_>, tile: &mut [Lanes<N>]) {
        if !self.reaches(&at.scope, at.rows, (at.keys, tile.len())) {
            return;
        }
        let [.., rows, keys] = &self.ranges;
        let mut line = [Lanes([N::zero(); GROUP])];
        for (lane, bias) in line[0].0.iter_mut().enumerate().take(at.rows.count) {
            if rows.contains(&at.rows.row(lane)) {
                *bias = N::from_f64(self.bias);
            }
        }
        for (i, scores) in tile.iter_mut().enumerate() {
            if keys.contains(&at.keys.get(i)) {
                pass(s, at, std::slice::from_mut(scores), &Bias(&line));
            }
        }
    }
}
