//! Arbitrary masks, one bit for each (query, key) pair.

use super::runs::{Run, push};
use crate::error::Error;
use crate::tensor::index::{LaneSet, RowTile, Scope};
use std::sync::Arc;

/// A bit mask `[batch or 1, heads or 1, q_len, k_len]`; a set bit means visible. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Bits {
    /// `[batch or 1, heads or 1, q_len, width]`; bit `i` of the word with index `w` among all words of a row is key `64 w + i`.
    words: Arc<[u64]>,
    /// Index of the first stored word of each row, `[batch or 1, heads or 1, q_len]`; empty: all words are stored.
    firsts: Arc<[usize]>,
    width: usize,
    shape: [usize; 4],
}

impl Bits {
    /// Heads that have bits of their own.
    pub(super) fn heads(&self) -> usize {
        self.shape[1]
    }

    /// From booleans `[batch or 1, heads or 1, q_len, k_len]`; `true` means visible.
    pub fn from_bools(visible: &[bool], shape: [usize; 4]) -> Result<Self, Error> {
        let [_, _, _, k_len] = shape;
        let needed = rows(shape)?.checked_mul(k_len).ok_or(Error::ShapeOverflow { shape })?;
        if visible.len() != needed {
            return Err(Error::DataLength { needed, found: visible.len() });
        }
        let words = visible.chunks_exact(k_len.max(1)).flat_map(|row| {
            row.chunks(64).map(|chunk| {
                chunk.iter().enumerate().fold(0, |word, (i, bit)| word | u64::from(*bit) << i)
            })
        });
        let (words, firsts) = (words.collect(), Arc::default());
        Ok(Self { words, firsts, width: k_len.div_ceil(64), shape })
    }

    /// From windows: each row stores the same number of words of 64 bits, and no key outside them is visible. Memory is
    /// O(rows x window) instead of O(rows x keys). `shape` is `[batch or 1, heads or 1, q_len, k_len]`.
    ///
    /// `words [batch or 1, heads or 1, q_len, any]` are those of row `i` from index `firsts[i]` on,
    /// `firsts [batch or 1, heads or 1, q_len]`: bit `j` of the word with index `w` is key `64 w + j`.
    ///
    /// ```
    /// use regard::mask::Bits;
    /// use regard::{Mask, Problem, View};
    /// let data = vec![0.5f32; 200 * 8];
    /// let (q, k) = (View::matrix(&data[..2 * 8], [2, 8])?, View::matrix(&data, [200, 8])?);
    /// // Row 0 sees keys 1 and 64, row 1 key 130.
    /// let mask = Mask::bits(Bits::windowed(&[0, 1], &[0b10, 0b1, 0, 0b100], [1, 1, 2, 200])?);
    /// let scope = Problem::new(&q, &k, &k).scope(0, 0);
    /// assert_eq!(mask.visible(&scope, 0), [1..2, 64..65]);
    /// assert_eq!(mask.visible(&scope, 1), [130..131]);
    /// # Ok::<(), regard::Error>(())
    /// ```
    pub fn windowed(firsts: &[usize], words: &[u64], shape: [usize; 4]) -> Result<Self, Error> {
        let (rows, [_, _, _, k_len]) = (rows(shape)?, shape);
        if firsts.len() != rows {
            let expected = (rows, "the first word of each row");
            return Err(Error::Count { option: "bits", expected, found: firsts.len() });
        }
        let width = words.len().div_ceil(rows.max(1));
        if words.len() != rows * width {
            return Err(Error::DataLength { needed: rows * width, found: words.len() });
        }
        for (first, words) in firsts.iter().zip(words.chunks_exact(width.max(1))) {
            Error::unless_below("the first word of a row of bits", *first, k_len / 64 + 1)?;
            if let Some(last) = words.iter().rposition(|word| *word != 0) {
                let key = (first + last) * 64 + words[last].ilog2() as usize;
                Error::unless_below("the last key of a row of bits", key, k_len)?;
            }
        }
        Ok(Self { words: words.into(), firsts: firsts.into(), width, shape })
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

    /// The index of a row's first stored word, and its stored words.
    #[inline(always)]
    fn row(&self, scope: &Scope, row: usize) -> (usize, &[u64]) {
        let [b, h, q_len, _] = self.shape;
        let batch = if b == 1 { 0 } else { scope.batch };
        let head = if h == 1 { 0 } else { scope.head };
        let row = (batch * h + head) * q_len + row;
        let first = self.firsts.get(row).copied().unwrap_or(0);
        (first, &self.words[row * self.width..][..self.width])
    }

    #[inline(always)]
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
        for word in first..scope.k_len.div_ceil(64).min(last + self.width) {
            push_word(scope, rows, out, (word, |row| self.word(scope, row, word)));
        }
    }
}

/// Rows of a bit mask, over all of its heads and items.
fn rows(shape: [usize; 4]) -> Result<usize, Error> {
    let [batch, heads, q_len, _] = shape;
    let rows = batch.checked_mul(heads).and_then(|n| n.checked_mul(q_len));
    rows.ok_or(Error::ShapeOverflow { shape })
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

    /// Random words.
    fn noise() -> impl FnMut() -> u64 {
        let mut state = 1u64;
        move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state ^ state >> 29
        }
    }

    #[test]
    fn windows_show_the_keys_that_booleans_show() {
        let ([heads, q_len, k_len, width], mut noise) = ([2, 90, 300, 3], noise());
        let firsts: Vec<usize> = (0..heads * q_len).map(|row| row * 7 % 5).collect();
        let mut word = |row: usize, i: usize| match k_len.saturating_sub((firsts[row] + i) * 64) {
            inside if inside >= 64 => noise(),
            inside => noise() & ((1 << inside) - 1),
        };
        let words: Vec<u64> =
            (0..heads * q_len * width).map(|i| word(i / width, i % width)).collect();
        let visible = |row: usize, key: usize| {
            let word = (key / 64).checked_sub(firsts[row]).filter(|word| *word < width);
            word.is_some_and(|word| words[row * width + word] >> (key % 64) & 1 == 1)
        };
        let bools = (0..heads * q_len * k_len).map(|i| visible(i / k_len, i % k_len));
        let shape = [1, heads, q_len, k_len];
        let dense = Bits::from_bools(&bools.collect::<Vec<_>>(), shape).unwrap();
        let windowed = Bits::windowed(&firsts, &words, shape).unwrap();
        for head in 0..heads {
            let scope = Scope { batch: 0, head, q_len, k_len, offset: 0 };
            let (mut a, mut b) = (Vec::new(), Vec::new());
            let rows = RowTile { first: 0, step: 1, count: q_len };
            dense.runs(&scope, rows, &mut a);
            windowed.runs(&scope, rows, &mut b);
            assert!(a == b && a.len() > 100);
            for (row, key) in (0..q_len).flat_map(|row| (0..k_len).map(move |key| (row, key))) {
                assert_eq!(windowed.get(&scope, row, key), visible(head * q_len + row, key));
            }
        }
    }

    #[test]
    fn transposing_swaps_rows_and_columns() {
        let mut noise = noise();
        let m: [u64; 64] = std::array::from_fn(|_| noise());
        let mut t = m;
        transpose(&mut t);
        for (i, row) in m.iter().enumerate() {
            for (j, column) in t.iter().enumerate() {
                assert_eq!(row >> j & 1, column >> i & 1);
            }
        }
    }
}
