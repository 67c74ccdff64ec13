//! Trees of draft tokens, for speculative decoding (Miao et al. 2023, SpecInfer; Cai et al. 2024, Medusa).
//!
//! Draft token `i` of `n` is the row with index `q_len - n + i` and the key at its position. So a chain is a causal mask.

use super::runs::{Run, monotone, push_keys};
use crate::error::Error;
use crate::tensor::index::{RowTile, Scope, lane_range, signed};

/// A tree of draft tokens: the parent of each, which comes before it.
#[derive(Debug)]
pub(super) struct Tree {
    parents: Box<[Option<usize>]>,
}

impl Tree {
    pub(super) fn new(parents: &[Option<usize>]) -> Self {
        Self { parents: parents.into() }
    }

    pub(super) fn check(&self, [q_len, k_len]: [usize; 2]) -> Result<(), Error> {
        for (token, parent) in self.parents.iter().enumerate() {
            if let Some(parent) = parent.filter(|parent| *parent >= token) {
                return Err(Error::Parent { token, parent });
            }
        }
        let n = self.parents.len();
        Error::unless_below("tree, tokens among the queries", n, q_len.saturating_add(1))?;
        Error::unless_below("tree, tokens among the keys", n, k_len.saturating_add(1))
    }

    /// The row of the first draft token, and its position. Row 0 if there are fewer rows than tokens, which is an error of `check`.
    fn first(&self, scope: &Scope) -> (usize, i64) {
        let row = scope.q_len.saturating_sub(self.parents.len());
        (row, scope.position(row))
    }

    /// A token, its parent, and so on. Ends also if a parent does not come before its token, which is an error of `check`.
    fn path(&self, token: usize) -> impl Iterator<Item = usize> {
        let parent = |token: &usize| self.parents[*token].filter(|parent| parent < token);
        std::iter::successors(Some(token), parent)
    }

    pub(super) fn is_visible(&self, scope: &Scope, row: usize, key: usize) -> bool {
        let (first, start) = self.first(scope);
        let key = signed(key);
        if row < first || key < start {
            return key <= scope.position(row);
        }
        self.path(row - first).any(|token| start.saturating_add(signed(token)) == key)
    }

    /// Cost: the paths of the rows, sorted.
    pub(super) fn runs(&self, scope: &Scope, rows: RowTile, out: &mut Vec<Run>) {
        let (first, start) = self.first(scope);
        let key = |at: i64| usize::try_from(at).unwrap_or(0).min(scope.k_len);
        monotone(rows, out, |row| 0..key(scope.position(row).saturating_add(1).min(start)));
        let mut drafts = Vec::new();
        for lane in 0..rows.count {
            let Some(token) = rows.row(lane).checked_sub(first) else { continue };
            let keys = self.path(token).map(|token| start.saturating_add(signed(token)));
            let keys = keys.filter_map(|key| usize::try_from(key).ok());
            drafts.extend(keys.filter(|key| *key < scope.k_len).map(|key| (key, lane)));
        }
        push_keys(&mut drafts, |lane| lane_range(lane, lane + 1), out);
    }
}
