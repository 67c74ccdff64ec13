//! Positions of rows and keys, and their partition into chunks (one step of the products) and parts (tasks).

use super::map::Side;
use regard::problem::Dims;
use regard::{Element, Problem};
use std::ops::Range;

/// Positions of a chunk. Pairs within a chunk are computed directly, which costs `2 CHUNK (features + payload)` flops per
/// position; products of smaller matrices take longer to pack than that saves.
pub(super) const CHUNK: usize = 64;
/// Minimum number of positions per part: each part costs one more pass over its keys.
const PART_ROWS: usize = 1024;
/// Parts per item over all heads, if the sequences are long enough: lets a few heads occupy many threads.
const TASKS_PER_ITEM: usize = 8;

/// Some chunks of one key head of an item.
///
/// Rows and keys of the item stand on one axis of positions. If causal, the last row and the last key share the last
/// position. Otherwise both start at position 0, and positions have no meaning.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) item: usize,
    pub(super) head: usize,
    /// Number of queries and of keys of the item.
    lens: [usize; 2],
    causal: bool,
    chunks: Range<usize>,
}

/// Up to [`CHUNK`] consecutive positions.
#[derive(Clone, Debug)]
pub(super) struct Chunk {
    /// Rows at these positions that are not fully masked.
    pub(super) rows: Range<usize>,
    pub(super) keys: Range<usize>,
    /// Number of positions from the first key to the first row.
    ahead: usize,
}

impl Part {
    /// All parts of a call, by item, then by head. None without keys, where every row is fully masked.
    pub(super) fn all<E: Element>(problem: &Problem<'_, E>, causal: bool) -> Vec<Self> {
        let Dims { batch, heads, k_len, .. } = problem.dims();
        let items = 0..if k_len == 0 { 0 } else { batch };
        let of_item = |item| (0..heads.kv).map(move |head| (item, head));
        let of_head = |(item, head)| {
            let scope = problem.scope(item, head);
            let lens = [scope.q_len, scope.k_len];
            Self { item, head, lens, causal, chunks: 0..0 }.cut(heads.kv)
        };
        items.flat_map(of_item).flat_map(of_head).collect()
    }

    /// The parts of one of `heads` heads; at least one.
    fn cut(self, heads: usize) -> Vec<Self> {
        let (chunks, most) = (self.count(), TASKS_PER_ITEM.div_ceil(heads.max(1)));
        let each = chunks.div_ceil((chunks * CHUNK / PART_ROWS).clamp(1, most)).max(1);
        let firsts = (0..chunks.max(1)).step_by(each);
        let part = |i: usize| Self { chunks: i..(i + each).min(chunks), ..self.clone() };
        firsts.map(part).collect()
    }

    /// Chunks of the head.
    fn count(&self) -> usize {
        self.lens[0].max(self.lens[1]).div_ceil(CHUNK)
    }

    /// Whether both are parts of the same head.
    pub(super) fn is_beside(&self, other: &Self) -> bool {
        (self.item, self.head) == (other.item, other.head)
    }

    pub(super) fn is_first(&self) -> bool {
        self.chunks.start == 0
    }

    pub(super) fn is_last(&self) -> bool {
        self.chunks.end == self.count()
    }

    /// Number of queries or keys of the item.
    pub(super) fn len(&self, side: Side) -> usize {
        self.lens[usize::from(side == Side::Keys)]
    }

    pub(super) fn chunks(&self) -> impl ExactSizeIterator<Item = Chunk> + DoubleEndedIterator {
        self.chunks.clone().map(|i| self.chunk(i))
    }

    fn chunk(&self, i: usize) -> Chunk {
        let [q_len, k_len] = self.lens;
        // First position of the rows and of the keys.
        let (row, key) = if self.causal {
            (k_len.saturating_sub(q_len), q_len.saturating_sub(k_len))
        } else {
            (0, 0)
        };
        let within = |from: usize, first: usize, len: usize| {
            let place = |at: usize| at.max(from).saturating_sub(first).min(len);
            place(i * CHUNK)..place((i + 1) * CHUNK)
        };
        // Rows before the first key are fully masked, and so are all rows if there are no keys.
        let rows = within(key, row, if k_len == 0 { 0 } else { q_len });
        let keys = within(0, key, k_len);
        let ahead = (rows.start + row).saturating_sub(keys.start + key);
        Chunk { rows, keys, ahead }
    }
}

impl Chunk {
    pub(super) fn range(&self, side: Side) -> Range<usize> {
        if side == Side::Keys { self.keys.clone() } else { self.rows.clone() }
    }

    /// Rows of the chunk to which its key `key` is visible.
    pub(super) fn seeing(&self, key: usize) -> Range<usize> {
        key.saturating_sub(self.ahead).min(self.rows.len())..self.rows.len()
    }

    /// Keys of the chunk that are visible to its row `row`.
    pub(super) fn visible(&self, row: usize) -> Range<usize> {
        0..(row + self.ahead + 1).min(self.keys.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(lens: [usize; 2]) -> Part {
        Part { item: 0, head: 0, lens, causal: true, chunks: 0..0 }
    }

    #[test]
    fn every_row_sees_exactly_the_keys_up_to_its_position() {
        for (q_len, k_len) in [(1, 1), (70, 70), (3, 200), (200, 3), (130, 65), (65, 130), (0, 5)] {
            let mut visited = vec![false; q_len];
            for chunk in head([q_len, k_len]).cut(8)[0].chunks() {
                for (at, row) in chunk.rows.clone().enumerate() {
                    let last = row + k_len - q_len.min(row + k_len);
                    visited[row] = true;
                    for (j, key) in chunk.keys.clone().enumerate() {
                        assert_eq!(chunk.visible(at).contains(&j), key <= last, "{row} {key}");
                        assert_eq!(chunk.seeing(j).contains(&at), key <= last, "{row} {key}");
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
        for (len, heads, count) in
            [(0, 1, 1), (1, 1, 1), (2047, 1, 2), (1 << 17, 1, 8), (1 << 17, 8, 1)]
        {
            let parts = head([len; 2]).cut(heads);
            assert_eq!(parts.len(), count, "{len} {heads}");
            assert!(parts[0].is_first() && parts[count - 1].is_last());
            assert!(parts.windows(2).all(|pair| pair[0].chunks.end == pair[1].chunks.start));
        }
    }
}
