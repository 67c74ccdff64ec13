//! Positions of rows and keys, and their partition into chunks (computed pair by pair) and parts (tasks).

use crate::machine::simd::GROUP;
use crate::tensor::index::RowMask;
use std::ops::Range;

/// Minimum number of positions per part: each part costs one more pass over its keys.
const PART_ROWS: usize = 1024;
/// Parts per item over all heads, if the sequences are long enough: lets a few heads occupy many threads.
const TASKS_PER_ITEM: usize = 8;

/// Rows and keys of an item on one axis of positions. If causal, the last row and the last key share the last position.
/// Otherwise both start at position 0, and positions have no meaning.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) q_len: usize,
    pub(crate) k_len: usize,
    pub(crate) causal: bool,
}

/// Up to [`GROUP`] consecutive positions.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    /// Rows at these positions that are not fully masked.
    pub(crate) rows: Range<usize>,
    pub(crate) keys: Range<usize>,
    /// Number of positions from the first key to the first row.
    ahead: usize,
}

impl Grid {
    /// First position of the rows and of the keys.
    fn firsts(self) -> [usize; 2] {
        let Self { q_len, k_len, causal } = self;
        if causal { [k_len.saturating_sub(q_len), q_len.saturating_sub(k_len)] } else { [0; 2] }
    }

    fn chunks(self) -> usize {
        self.q_len.max(self.k_len).div_ceil(GROUP)
    }

    pub(crate) fn chunk(self, i: usize) -> Chunk {
        let [row, key] = self.firsts();
        let within = |from: usize, first: usize, len: usize| {
            let place = |at: usize| at.max(from).saturating_sub(first).min(len);
            place(i * GROUP)..place((i + 1) * GROUP)
        };
        // Rows before the first key are fully masked, and so are all rows if there are no keys.
        let q_len = if self.k_len == 0 { 0 } else { self.q_len };
        let (rows, keys) = (within(key, row, q_len), within(0, key, self.k_len));
        let ahead = (rows.start + row).saturating_sub(keys.start + key);
        Chunk { rows, keys, ahead }
    }

    /// Parts of one of `heads` heads, as ranges of chunks; at least one.
    pub(crate) fn parts(self, heads: usize) -> Vec<Range<usize>> {
        let chunks = self.chunks();
        let most = TASKS_PER_ITEM.div_ceil(heads.max(1));
        let each = chunks.div_ceil((chunks * GROUP / PART_ROWS).clamp(1, most)).max(1);
        let firsts = (0..chunks.max(1)).step_by(each);
        firsts.map(|first| first..(first + each).min(chunks)).collect()
    }

    pub(crate) fn rows(self, chunks: &Range<usize>) -> Range<usize> {
        self.over(chunks, |chunk| chunk.rows)
    }

    pub(crate) fn keys(self, chunks: &Range<usize>) -> Range<usize> {
        self.over(chunks, |chunk| chunk.keys)
    }

    fn over(self, chunks: &Range<usize>, of: impl Fn(Chunk) -> Range<usize>) -> Range<usize> {
        if chunks.is_empty() {
            return 0..0;
        }
        of(self.chunk(chunks.start)).start..of(self.chunk(chunks.end - 1)).end
    }
}

impl Chunk {
    /// Rows of the chunk to which its key `key` is visible.
    pub(crate) fn seeing(&self, key: usize) -> RowMask {
        let first = u32::try_from(key.saturating_sub(self.ahead)).unwrap_or(u32::MAX);
        RowMask::MAX.checked_shl(first).unwrap_or(0)
    }

    /// Keys of the chunk that are visible to its row `row`.
    pub(crate) fn visible(&self, row: usize) -> RowMask {
        let hidden = u32::try_from(row + self.ahead + 1).unwrap_or(u32::MAX);
        !RowMask::MAX.checked_shl(hidden).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_sees_exactly_the_keys_up_to_its_position() {
        for (q_len, k_len) in [(1, 1), (70, 70), (3, 200), (200, 3), (130, 65), (65, 130), (0, 5)] {
            let grid = Grid { q_len, k_len, causal: true };
            let mut visited = vec![false; q_len];
            for i in 0..grid.chunks() {
                let chunk = grid.chunk(i);
                for (lane, row) in chunk.rows.clone().enumerate() {
                    let last = row + k_len - q_len.min(row + k_len);
                    visited[row] = true;
                    for (j, key) in chunk.keys.clone().enumerate() {
                        assert_eq!(chunk.visible(lane) >> j & 1 == 1, key <= last, "{row} {key}");
                        assert_eq!(chunk.seeing(j) >> lane & 1 == 1, key <= last, "{row} {key}");
                    }
                    assert!(chunk.keys.start <= last && last < chunk.keys.end, "{row} {chunk:?}");
                }
            }
            for (row, visited) in visited.into_iter().enumerate() {
                assert_eq!(visited, row + k_len >= q_len, "{row} of {q_len}x{k_len}");
            }
        }
    }

    #[test]
    fn parts_cover_all_chunks_whatever_the_number_of_heads() {
        for (len, heads, parts) in
            [(0, 1, 1), (1, 1, 1), (2047, 1, 2), (1 << 17, 1, 8), (1 << 17, 8, 1)]
        {
            let grid = Grid { q_len: len, k_len: len, causal: true };
            let cut = grid.parts(heads);
            assert_eq!(cut.len(), parts, "{len} {heads}");
            assert_eq!((cut[0].start, cut[parts - 1].end), (0, grid.chunks()));
            assert!(cut.windows(2).all(|pair| pair[0].end == pair[1].start));
        }
    }
}
