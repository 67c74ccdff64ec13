//! The mask of some rows and keys of a larger problem. The rows and keys keep their numbers, so that every rule, also one that stores
//! an entry per row or key, means what it meant there.

use super::Mask;
use super::runs::Run;
use crate::tensor::index::{RowTile, Scope};
use std::ops::Range;

/// Some rows and keys of a mask.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) whole: Mask,
    /// The sizes of the whole, and where its row 0 stands.
    pub(super) scope: Scope,
    pub(super) first_row: usize,
    pub(super) keys: Range<usize>,
}

impl Part {
    /// The head of the whole that a head of the part belongs to.
    pub(super) fn scope(&self, scope: &Scope) -> Scope {
        Scope { batch: scope.batch, head: scope.head, ..self.scope }
    }

    pub(super) fn is_visible(&self, scope: &Scope, row: usize, key: usize) -> bool {
        let (row, key) = (row + self.first_row, key + self.keys.start);
        self.whole.is_visible(&self.scope(scope), row, key)
    }

    pub(super) fn runs(&self, scope: &Scope, rows: RowTile, out: &mut Vec<Run>) {
        let rows = RowTile { first: rows.first + self.first_row, ..rows };
        self.whole.runs(&self.scope(scope), rows, out);
        let Range { start, end } = self.keys;
        out.retain_mut(|run| {
            run.keys =
                run.keys.start.clamp(start, end) - start..run.keys.end.clamp(start, end) - start;
            !run.keys.is_empty()
        });
    }
}
