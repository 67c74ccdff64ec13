//! Lists of visible keys, one for a row or for a block of rows: attention over retrieved keys.

use super::runs::{Run, push, push_keys};
use crate::error::Error;
use crate::tensor::index::{LaneSet, RowTile, Scope, lane_range};
use std::sync::Arc;

/// The visible keys of each row, or of each block of rows, as sorted lists. Cheap to clone. Memory: the lists.
#[derive(Clone, Debug)]
pub struct KeyLists {
    keys: Arc<[u32]>,
    /// Where each list ends in `keys`, `[batch or 1, heads or 1, lists]`.
    ends: Arc<[usize]>,
    shape: [usize; 3],
    /// Rows, and query heads, that share a list.
    row_block: usize,
    head_block: usize,
}

impl KeyLists {
    /// From one list for each row, `[batch or 1, heads or 1, rows]`. The order of a list and keys listed twice make no difference.
    pub fn new<L: AsRef<[usize]>>(lists: &[L], shape: [usize; 3]) -> Result<Self, Error> {
        let [batch, heads, rows] = shape;
        let needed = batch.checked_mul(heads).and_then(|n| n.checked_mul(rows));
        if needed != Some(lists.len()) {
            let expected =
                (needed.unwrap_or(usize::MAX), "one list for each row of each head of each item");
            return Err(Error::Count { option: "keys", expected, found: lists.len() });
        }
        let (mut keys, mut ends) = (Vec::new(), Vec::with_capacity(lists.len()));
        let mut sorted = Vec::new();
        for list in lists {
            let list = list.as_ref();
            sorted.clear();
            for key in list {
                let narrow = u32::try_from(*key).ok().filter(|key| *key < u32::MAX);
                let limit = u32::MAX as usize;
                sorted.push(narrow.ok_or(Error::OutOfRange {
                    option: "keys",
                    found: *key,
                    limit,
                })?);
            }
            if !sorted.is_sorted() {
                sorted.sort_unstable();
            }
            sorted.dedup();
            keys.extend_from_slice(&sorted);
            ends.push(keys.len());
        }
        let (keys, ends) = (keys.into(), ends.into());
        Ok(Self { keys, ends, shape, row_block: 1, head_block: 1 })
    }

    /// Each list is that of `rows` consecutive rows; the last block of a head may be shorter.
    #[must_use]
    pub fn row_block(self, rows: usize) -> Self {
        Self { row_block: rows, ..self }
    }

    /// Each list is that of `heads` consecutive query heads: those that share a key head, for example.
    #[must_use]
    pub fn head_block(self, heads: usize) -> Self {
        Self { head_block: heads, ..self }
    }

    /// Rows that share a list.
    pub(super) fn rows(&self) -> usize {
        self.row_block
    }

    /// Whether heads of a group of consecutive ones have lists of their own.
    pub(super) fn tells_heads_apart(&self, group: usize) -> bool {
        self.shape[1] > 1 && !self.head_block.is_multiple_of(group)
    }

    pub(super) fn tells_apart(&self) -> [bool; 2] {
        [self.shape[0] > 1, self.shape[1] > 1]
    }

    /// See [`Mask::check`](super::Mask::check).
    pub(super) fn check(
        &self,
        [batch, heads]: [usize; 2],
        items: usize,
        len: &dyn Fn(usize) -> [usize; 2],
    ) -> Result<(), Error> {
        let [own_batch, own_heads, lists] = self.shape;
        for (option, block) in [("row_block", self.row_block), ("head_block", self.head_block)] {
            if block == 0 {
                return Err(Error::Zero { option });
            }
        }
        if own_batch != 1 {
            Error::unless_same("batch", ("the key lists", own_batch), ("the scores", batch))?;
        }
        if own_heads != 1 {
            let own = own_heads.saturating_mul(self.head_block);
            Error::unless_same("heads", ("the key lists", own), ("the scores", heads))?;
        }
        for item in 0..if own_batch == 1 { items } else { batch } {
            let [q_len, k_len] = len(item);
            if q_len > 0 {
                let blocks = ("the queries, in blocks", q_len.div_ceil(self.row_block));
                Error::unless_same("rows", ("the key lists", lists), blocks)?;
            }
            for head in 0..own_heads {
                let first = (if own_batch == 1 { 0 } else { item } * own_heads + head) * lists;
                for list in first..first + lists {
                    if let Some(last) = self.list(list).last() {
                        Error::unless_below("keys", *last as usize, k_len)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn list(&self, i: usize) -> &[u32] {
        let first = i.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.keys[first..self.ends[i]]
    }

    /// Where the list of a row is.
    fn of_row(&self, scope: &Scope, row: usize) -> usize {
        let [batch, heads, lists] = self.shape;
        let batch = if batch == 1 { 0 } else { scope.batch };
        let head = if heads == 1 { 0 } else { scope.head / self.head_block };
        (batch * heads + head) * lists + row / self.row_block
    }

    pub(super) fn get(&self, scope: &Scope, row: usize, key: usize) -> bool {
        let list = self.list(self.of_row(scope, row));
        u32::try_from(key).is_ok_and(|key| list.binary_search(&key).is_ok())
    }

    /// Cost: the lists of the tile, sorted if it has several.
    pub(super) fn runs(&self, scope: &Scope, rows: RowTile, out: &mut Vec<Run>) {
        let mut found: Vec<(usize, LaneSet)> = Vec::new();
        for lane in 0..rows.count {
            let list = self.of_row(scope, rows.row(lane));
            let lane = lane_range(lane, lane + 1);
            match found.last_mut() {
                Some((last, lanes)) if *last == list => *lanes |= lane,
                _ => found.push((list, lane)),
            }
        }
        if let [(list, lanes)] = found[..] {
            for key in self.list(list) {
                push(out, *key as usize..*key as usize + 1, lanes);
            }
            return;
        }
        let mut all = Vec::new();
        for (i, (list, _)) in found.iter().enumerate() {
            all.extend(self.list(*list).iter().map(|key| (*key as usize, i)));
        }
        push_keys(&mut all, |i| found[i].1, out);
    }
}
