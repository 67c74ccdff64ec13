//! From what a mask says of a tile of rows to the ranges of keys that are computed.
//!
//! Keys are cut on a fixed grid of `BLOCK_KEYS` keys. A block that nobody sees is never visited; one that everybody sees
//! carries no per-key row sets. Where a block holds only a few seen keys (columns, strides, scattered globals), those
//! keys are gathered and full blocks are made of them.
//!
//! Cost: in proportion to the runs of a tile of 128 rows and the blocks they touch; nothing for what nobody sees.

use crate::index::{BLOCK_KEYS, Keys, LaneSet, RowMask, RowTile, Span};
use crate::mask::Run;
use crate::simd::GROUP;
use std::ops::Range;

/// Keys to be computed together.
#[derive(Clone, Debug)]
pub(crate) struct KeyBlock {
    pub(crate) len: usize,
    /// The rows that see each key; nothing where `full`.
    pub(crate) lanes: [LaneSet; BLOCK_KEYS],
    /// Every row sees every key.
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

    /// `len` neighbours from `first` on, seen by all.
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

/// Keys of a block that some lanes of a group see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VisibleBlock {
    /// The keys; nobody among the lanes sees any other.
    pub(crate) keys: Range<usize>,
    pub(crate) span: Span,
    /// Whether some lanes do not see some of the keys.
    pub(crate) hidden: bool,
}

/// Lanes of a partly seen block that are narrowed down together: two AVX-512 vectors.
const HALF: usize = GROUP / 2;

impl KeyBlock {
    /// What group `g`, of `count` rows, sees: all rows together if they see the same keys, else in halves, so that
    /// the edges of a mask cost little more than what is visible. Writes which rows see each key.
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

    /// Writes which lanes of the span of group `g` see each key; whether any sees any.
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

    /// Pairs that the rows will compute.
    pub(crate) fn computed(&self, rows: RowTile) -> u128 {
        let groups = (0..rows.count.div_ceil(GROUP)).flat_map(|g| {
            let count = (rows.count - g * GROUP).min(GROUP);
            self.visible_tiles(g, count, &mut [0; BLOCK_KEYS]).into_iter().flatten()
        });
        groups.map(|s| s.keys.len() * s.span.len()).sum::<usize>() as u128
    }
}

/// What the lanes of a span see: the range of keys, and the half of the span if only that sees any.
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
    // Whole register tiles cost less than their tails: let unseen neighbours fill the last one.
    let len = keys.len().next_multiple_of(8).min(visible.len());
    let first = first.min(visible.len() - len);
    let keys = first..first + len;
    let hidden = visible[keys.clone()].iter().any(|s| s & mask != mask);
    Some(VisibleBlock { keys, span, hidden })
}

/// Cuts runs into blocks, in ascending order, the gathered ones last.
#[derive(Debug)]
pub(crate) struct KeyBlocks<'a> {
    runs: &'a [Run],
    at: usize,
    end: usize,
    all: LaneSet,
    sparse: Vec<(usize, LaneSet)>,
}

impl<'a> KeyBlocks<'a> {
    /// Of the keys in `keys`, those that `runs` name; `all` is the set of all rows.
    pub(crate) fn new(runs: &'a [Run], keys: Range<usize>, all: LaneSet) -> Self {
        Self { runs, at: keys.start, end: keys.end, all, sparse: Vec::new() }
    }

    /// Fills `block` with the next one; `false` when there is none.
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

    /// How many of the next blocks are like this one, the last that was filled, and none of them is filled: those that lie in
    /// the same run. For counting.
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

    /// Writes the keys of a partly seen block; `false` if they were put aside to be gathered.
    fn fill(&mut self, block: &mut KeyBlock, keys: Range<usize>) -> bool {
        let within = self.runs.iter().take_while(|s| s.keys.start < keys.end);
        let clip = |s: &Run| s.keys.start.max(keys.start)..s.keys.end.min(keys.end);
        let (mut last, mut visible) = (keys.start, 0);
        for s in within.clone() {
            let part = clip(s);
            visible += part.len();
            last = part.end;
        }
        // Gathering copies a key and a value; computing an unseen key costs as much as a seen one, and so does a visit
        // for a few keys only.
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
