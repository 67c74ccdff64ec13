//! Arbitrary masks, one bit for each (query, key) pair.

use super::runs::{Run, push};
use crate::error::Error;
use crate::tensor::index::{LaneSet, RowTile, Scope};
use std::sync::Arc;

/// A bit mask `[batch or 1, heads or 1, q_len, k_len]`; a set bit means visible. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Bits {
    words: Arc<[u64]>,
    shape: [usize; 4],
}

impl Bits {
    /// From booleans `[batch or 1, heads or 1, q_len, k_len]`; `true` means visible.
    pub fn from_bools(visible: &[bool], shape: [usize; 4]) -> Result<Self, Error> {
        let [batch, heads, q_len, k_len] = shape;
        let needed = [heads, q_len, k_len].iter().try_fold(batch, |n, axis| n.checked_mul(*axis));
        let needed = needed.ok_or(Error::ShapeOverflow { shape })?;
        if visible.len() != needed {
            return Err(Error::DataLength { needed, found: visible.len() });
        }
        let words = visible.chunks_exact(k_len.max(1)).flat_map(|row| {
            row.chunks(64).map(|chunk| {
                chunk.iter().enumerate().fold(0, |word, (i, bit)| word | u64::from(*bit) << i)
            })
        });
        Ok(Self { words: words.collect(), shape })
    }

    pub(super) fn check(&self, scores: [usize; 4]) -> Result<(), Error> {
        let found = self.shape;
        let fits = |i: usize| found[i] == scores[i] || (i < 2 && found[i] == 1);
        if (0..4).all(fits) {
            Ok(())
        } else {
            Err(Error::Broadcast { option: "bits", found, scores })
        }
    }

    fn row(&self, batch: usize, head: usize, row: usize) -> &[u64] {
        let [b, h, q_len, k_len] = self.shape;
        let width = k_len.div_ceil(64);
        let (batch, head) = (if b == 1 { 0 } else { batch }, if h == 1 { 0 } else { head });
        &self.words[((batch * h + head) * q_len + row) * width..][..width]
    }

    pub(super) fn get(&self, batch: usize, head: usize, row: usize, key: usize) -> bool {
        self.row(batch, head, row)[key / 64] >> (key % 64) & 1 == 1
    }

    pub(super) fn runs(&self, scope: &Scope, rows: RowTile, out: &mut Vec<Run>) {
        for word in 0..scope.k_len.div_ceil(64) {
            let of_row = |row| self.row(scope.batch, scope.head, row)[word];
            push_word(scope, rows, out, (word, of_row));
        }
    }
}

/// A bit mask that stores a fixed number of 64-bit words for each row, starting at a word index of the row's own. Memory is
/// O(rows x width) instead of O(rows x keys). LSH attention stores its candidate pairs in one.
#[derive(Clone, Debug)]
pub(crate) struct NearBits {
    rows: Arc<[u64]>,
    sizes: [usize; 3],
}

impl NearBits {
    /// `rows [batch, heads, q_len, 1 + width]`: the index of a row's first word, then its words; `sizes`: heads, q_len, width.
    /// No bit may be set at or beyond `k_len`.
    pub(crate) fn new(rows: Vec<u64>, sizes: [usize; 3]) -> Self {
        Self { rows: rows.into(), sizes }
    }

    /// The index of a row's first word, and its words.
    fn row(&self, scope: &Scope, row: usize) -> (usize, &[u64]) {
        let [heads, q_len, width] = self.sizes;
        let row = (scope.batch * heads + scope.head) * q_len + row;
        let row = &self.rows[row * (1 + width)..][..1 + width];
        (usize::try_from(row[0]).unwrap_or(usize::MAX), &row[1..])
    }

    fn word(&self, scope: &Scope, row: usize, word: usize) -> u64 {
        let (first, words) = self.row(scope, row);
        word.checked_sub(first).and_then(|i| words.get(i)).copied().unwrap_or(0)
    }

    pub(super) fn get(&self, scope: &Scope, row: usize, key: usize) -> bool {
        self.word(scope, row, key / 64) >> (key % 64) & 1 == 1
    }

    pub(super) fn runs(&self, scope: &Scope, rows: RowTile, out: &mut Vec<Run>) {
        let firsts = || (0..rows.count).map(|lane| self.row(scope, rows.row(lane)).0);
        let (Some(first), Some(last)) = (firsts().min(), firsts().max()) else { return };
        for word in first..scope.k_len.div_ceil(64).min(last + self.sizes[2]) {
            push_word(scope, rows, out, (word, |row| self.word(scope, row, word)));
        }
    }
}

/// Pushes the 64 keys of one word, each with the set of rows of the tile for which it is visible. The rows' words form a
/// 64 x 64 bit matrix for each 64 rows, which is transposed.
#[inline(always)]
fn push_word(
    scope: &Scope,
    rows: RowTile,
    out: &mut Vec<Run>,
    (word, of_row): (usize, impl Fn(usize) -> u64),
) {
    let mut halves = [[0u64; 64]; 2];
    for lane in 0..rows.count {
        halves[lane / 64][lane % 64] = of_row(rows.row(lane));
    }
    halves.iter_mut().for_each(transpose);
    let keys = word * 64..scope.k_len.min(word * 64 + 64);
    for (key, (low, high)) in keys.zip(halves[0].iter().zip(&halves[1])) {
        push(out, key..key + 1, LaneSet::from(*low) | LaneSet::from(*high) << 64);
    }
}

/// Transposes a 64 x 64 bit matrix, lowest bit first, by swapping halves, quarters, ... (Warren, Hacker's Delight, 7-3).
fn transpose(m: &mut [u64; 64]) {
    let (mut width, mut keep) = (32, 0x0000_0000_ffff_ffff_u64);
    while width > 0 {
        for i in (0..64).filter(|i| i & width == 0) {
            let swap = (m[i] >> width ^ m[i + width]) & keep;
            m[i] ^= swap << width;
            m[i + width] ^= swap;
        }
        width /= 2;
        keep ^= keep << width;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposing_swaps_rows_and_columns() {
        let mut state = 1u64;
        let m: [u64; 64] = std::array::from_fn(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state ^ state >> 29
        });
        let mut t = m;
        transpose(&mut t);
        for (i, row) in m.iter().enumerate() {
            for (j, column) in t.iter().enumerate() {
                assert_eq!(row >> j & 1, column >> i & 1);
            }
        }
    }
}
