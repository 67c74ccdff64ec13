//! Turns the mask of a row tile into the key blocks that are computed, as block-sparse FlashAttention does (Dao et al. 2022).
//!
//! Keys are divided on a fixed grid of `BLOCK_KEYS` keys. A block without a visible pair is skipped; a block in which every
//! pair is visible needs no row set per key. If only a few keys of a block are visible (columns, strides, scattered global
//! positions), they are gathered into full blocks.
//!
//! Cost: proportional to the runs of a tile of 128 rows and the blocks they touch; nothing for blocks without a visible pair.

use crate::description::mask::Run;
use crate::machine::simd::GROUP;
use crate::tensor::index::{BLOCK_KEYS, Keys, LaneSet, RowMask, RowTile, Span};
use std::ops::Range;

/// Keys that are computed together.
#[derive(Clone, Debug)]
pub(crate) struct KeyBlock {
    pub(crate) len: usize,
    /// The rows for which each key is visible; not used if `full`.
    pub(crate) lanes: [LaneSet; BLOCK_KEYS],
    /// Every key is visible to every row.
    pub(crate) full: bool,
    first: usize,
    gathered: [usize; BLOCK_KEYS],
    is_gathered: bool,
}

impl KeyBlock {
    pub(crate) fn new() -> Self {
        let (lanes, gathered) = ([0; BLOCK_KEYS], [0; BLOCK_KEYS]);
        Self { len: 0, lanes, full: false, first: 0, gathered, is_gathered: false }
    }

    /// Sets the block to `len` consecutive keys from `first` on, visible to all rows.
    pub(crate) fn set(&mut self, first: usize, len: usize) {
        (self.first, self.len, self.is_gathered, self.full) = (first, len, false, true);
    }

    pub(crate) fn keys(&self) -> Keys<'_> {
        if self.is_gathered {
            Keys::Gathered(&self.gathered[..self.len])
        } else {
            Keys::From(self.first)
        }
    }
}

/// The part of a block that is computed for some lanes of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VisibleBlock {
    /// Keys within the block. No other key of the block is visible to the lanes.
    pub(crate) keys: Range<usize>,
    pub(crate) span: Span,
    /// Whether some of the pairs are masked.
    pub(crate) hidden: bool,
}

/// Lanes of a partly visible block that are narrowed together: two AVX-512 vectors of `f32`.
const HALF: usize = GROUP / 2;

impl KeyBlock {
    /// The tiles that group `g`, of `count` rows, computes: one tile if none of its pairs is masked or `count` is at most `HALF`,
    /// otherwise one for each half of the group, so that blocks at the edge of a mask cost little more than their visible pairs.
    /// Unless the block is `full`, `visible` receives the rows for which each key is visible.
    #[inline(always)]
    pub(crate) fn visible_tiles(
        &self,
        g: usize,
        count: usize,
        visible: &mut [RowMask; BLOCK_KEYS],
    ) -> [Option<VisibleBlock>; 2] {
        let all = Span::first(count);
        if self.full {
            return [Some(VisibleBlock { keys: 0..self.len, span: all, hidden: false }), None];
        }
        self.visible_rows(g, all, visible);
        let visible = &visible[..self.len];
        let whole = narrowed(visible, all);
        if count <= HALF || whole.as_ref().is_none_or(|w| !w.hidden) {
            return [whole, None];
        }
        let low = Span::first(HALF);
        [narrowed(visible, low), narrowed(visible, Span { start: HALF, end: count })]
    }

    /// Writes the lanes of `span` in group `g` for which each key is visible. Returns whether any pair is visible.
    #[inline(always)]
    pub(crate) fn visible_rows(
        &self,
        g: usize,
        span: Span,
        visible: &mut [RowMask; BLOCK_KEYS],
    ) -> bool {
        let everyone = span.set();
        let mut any = 0;
        if self.full {
            visible[..self.len].fill(everyone);
            return true;
        }
        #[expect(clippy::cast_possible_truncation, reason = "the bits of the group")]
        for (visible, lanes) in visible.iter_mut().zip(&self.lanes[..self.len]) {
            *visible = (lanes >> (g * GROUP)) as RowMask & everyone;
            any |= *visible;
        }
        any != 0
    }

    /// Number of pairs that are computed for the rows, masked ones included.
    pub(crate) fn computed(&self, rows: RowTile) -> u128 {
        let groups = (0..rows.count.div_ceil(GROUP)).flat_map(|g| {
            let count = (rows.count - g * GROUP).min(GROUP);
            self.visible_tiles(g, count, &mut [0; BLOCK_KEYS]).into_iter().flatten()
        });
        groups.map(|s| s.keys.len() * s.span.len()).sum::<usize>() as u128
    }
}

/// The range of keys visible to the lanes of a span. The span is halved if only one half of it has a visible key.
#[inline(always)]
fn narrowed(visible: &[RowMask], Span { mut start, mut end }: Span) -> Option<VisibleBlock> {
    let lanes = |start, end| Span { start, end }.set();
    let mask = lanes(start, end);
    let first = visible.iter().position(|s| s & mask != 0)?;
    let last = visible.iter().rposition(|s| s & mask != 0)?;
    let any = visible[first..=last].iter().fold(0, |any, s| any | s) & mask;
    let middle = start + HALF / 2;
    if end - start <= HALF && end > middle {
        if any & lanes(middle, end) == 0 {
            end = middle;
        } else if any & lanes(start, middle) == 0 {
            start = middle;
        }
    }
    let (mask, span) = (lanes(start, end), Span { start, end });
    let keys = first..last + 1;
    if keys.len().is_multiple_of(8) || visible.len() < 8 {
        let hidden = visible[keys.clone()].iter().any(|s| s & mask != mask);
        return Some(VisibleBlock { keys, span, hidden });
    }
    // A full register tile costs less than a remainder loop: extend the range with masked keys to a multiple of 8.
    let len = keys.len().next_multiple_of(8).min(visible.len());
    let first = first.min(visible.len() - len);
    let keys = first..first + len;
    let hidden = visible[keys.clone()].iter().any(|s| s & mask != mask);
    Some(VisibleBlock { keys, span, hidden })
}

/// Divides runs into blocks in ascending order. A gathered block follows as soon as it is full, the last one at the end.
#[derive(Debug)]
pub(crate) struct KeyBlocks<'a> {
    runs: &'a [Run],
    at: usize,
    end: usize,
    all: LaneSet,
    sparse: &'a mut Vec<SparseKey>,
}

/// A key that few rows see, and these rows; it waits to be gathered.
pub(crate) type SparseKey = (usize, LaneSet);

impl<'a> KeyBlocks<'a> {
    /// The blocks of the parts of `runs` that lie in `keys`; `all` is the set of all rows, `sparse` memory for keys that are gathered.
    pub(crate) fn new(
        runs: &'a [Run],
        keys: Range<usize>,
        all: LaneSet,
        sparse: &'a mut Vec<SparseKey>,
    ) -> Self {
        sparse.clear();
        Self { runs, at: keys.start, end: keys.end, all, sparse }
    }

    /// Fills `block` with the next block; returns `false` if there is none.
    pub(crate) fn next(&mut self, block: &mut KeyBlock) -> bool {
        loop {
            if self.sparse.len() >= BLOCK_KEYS {
                self.gather(block);
                return true;
            }
            while self.runs.first().is_some_and(|s| s.keys.end <= self.at) {
                self.runs = &self.runs[1..];
            }
            let next = self.runs.first().filter(|s| s.keys.start < self.end);
            let Some(run) = next.filter(|_| self.at < self.end) else {
                if self.sparse.is_empty() {
                    return false;
                }
                self.gather(block);
                return true;
            };
            self.at = self.at.max(run.keys.start);
            let end = ((self.at / BLOCK_KEYS + 1) * BLOCK_KEYS).min(self.end);
            let from = self.at;
            let full = run.lanes == self.all && run.keys.end >= end;
            self.at = end;
            if full {
                block.set(from, end - from);
                return true;
            }
            if self.fill(block, from..end) {
                return true;
            }
        }
    }

    /// Skips the next blocks that lie in the same run as `block`, the last one filled, and returns their number. Used to count
    /// work without a visit to every block.
    pub(crate) fn skip_alike(&mut self, block: &KeyBlock) -> usize {
        let Some(run) = self.runs.first().filter(|_| !block.is_gathered) else { return 0 };
        let whole = block.first.is_multiple_of(BLOCK_KEYS) && block.len == BLOCK_KEYS;
        if !whole || run.keys.start > block.first || run.keys.end < self.at {
            return 0;
        }
        let n = (run.keys.end.min(self.end) - self.at) / BLOCK_KEYS;
        self.at += n * BLOCK_KEYS;
        n
    }

    /// Fills a partly visible block; returns `false` if its visible keys were set aside for gathering instead.
    fn fill(&mut self, block: &mut KeyBlock, keys: Range<usize>) -> bool {
        let within = self.runs.iter().take_while(|s| s.keys.start < keys.end);
        let clip = |s: &Run| s.keys.start.max(keys.start)..s.keys.end.min(keys.end);
        let (mut last, mut visible) = (keys.start, 0);
        for s in within.clone() {
            let part = clip(s);
            visible += part.len();
            last = part.end;
        }
        // Gathering costs a copy of the key and of the value. A masked key costs as much to compute as a visible one, and so
        // does a visit for only a few keys.
        if visible < BLOCK_KEYS / 4 || 2 * visible <= last - keys.start {
            self.sparse.extend(within.flat_map(|s| clip(s).map(|key| (key, s.lanes))));
            return false;
        }
        block.lanes[..last - keys.start].fill(0);
        for s in within {
            let part = clip(s);
            block.lanes[part.start - keys.start..part.end - keys.start].fill(s.lanes);
        }
        block.set(keys.start, last - keys.start);
        block.full = false;
        true
    }

    fn gather(&mut self, block: &mut KeyBlock) {
        let n = self.sparse.len().min(BLOCK_KEYS);
        for (i, (key, lanes)) in self.sparse.drain(..n).enumerate() {
            (block.gathered[i], block.lanes[i]) = (key, lanes);
        }
        block.full = block.lanes[..n].iter().all(|lanes| *lanes == self.all);
        (block.len, block.is_gathered) = (n, true);
    }
}
