//! The pass that forward and backward share: a tile of rows passes over the blocks of keys that it sees, 64 rows at a
//! time, so that a block is brought from memory once and read from the cache the second time.
//!
//! Cost: keys and values are read once for 128 rows; they are copied only where they must be widened or gathered.

use crate::description::mask::{Mask, Run};
use crate::description::problem::Problem;
use crate::description::score::Derivatives;
use crate::description::similarity::Similarity;
use crate::kernel::key_blocks::{KeyBlock, KeyBlocks, SparseKey, VisibleBlock};
use crate::kernel::lanes::{fetch, prefetch_l1};
use crate::kernel::micro::{distance_tile, dot_tile};
use crate::kernel::queries::Queries;
use crate::machine::simd::{GROUP, Isa, Lanes, Number, Simd, each, leaf};
use crate::tensor::index::{At, BLOCK_KEYS, HeadRows, Keys, RowMask, RowTile, Scope, Span, low};
use crate::tensor::source::{AnyHead, KvHead, Source, rows};
use crate::tensor::view::{Rows, View};
use std::ops::Range;

/// Groups of rows that block loop together.
const GROUPS: usize = 2;
/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = GROUPS * GROUP;

/// Rows of one key head, in all its query heads together, that are decode: they go another way than the lanes.
pub(crate) const DECODE_MAX_ROWS: usize = 16;

/// One call: what is computed, from what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'c, N: Number> {
    pub(crate) problem: &'c Problem<'c, N>,
    pub(crate) q: View<'c, N>,
    pub(crate) k: Source<'c, N>,
    pub(crate) v: Source<'c, N>,
}

impl<'c, N: Number> Call<'c, N> {
    /// Keys and values of the head that serves a query head.
    pub(crate) fn keys_and_values(&self, scope: Scope) -> (KvHead<'c, N>, KvHead<'c, N>) {
        let kv_head = self.problem.kv_head(scope.head);
        (self.k.head(scope.batch, kv_head), self.v.head(scope.batch, kv_head))
    }

    /// The same where nothing is in 8 bits.
    pub(crate) fn elements(&self, scope: Scope) -> (AnyHead<'c, N>, AnyHead<'c, N>) {
        let (k, v) = self.keys_and_values(scope);
        (k.elements(), v.elements())
    }

    /// The queries of a head.
    pub(crate) fn queries(&self, batch: usize, head: usize) -> AnyHead<'c, N> {
        rows(self.q.any_head(batch, head))
    }
}

/// How the rows of a head fall into tiles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiling {
    pub(crate) q_len: usize,
    /// Rows of a tile, at most.
    pub(crate) rows: usize,
    /// From one row of a tile to the next.
    pub(crate) stride: usize,
}

impl Tiling {
    /// Tiles of the rows that leave the same remainder.
    fn each(self) -> usize {
        self.q_len.div_ceil(self.stride).div_ceil(self.rows)
    }

    pub(crate) fn count(self) -> usize {
        self.stride.min(self.q_len) * self.each()
    }

    /// The rows of a tile; none for some of the last if rows stand apart.
    pub(crate) fn tile(self, i: usize) -> RowTile {
        let Self { q_len, rows, stride: step } = self;
        let first = i / self.each() + i % self.each() * rows * step;
        let count = q_len.saturating_sub(first).div_ceil(step).min(rows);
        RowTile { first, step, count }
    }

    /// All tiles that have rows.
    pub(crate) fn tiles(self) -> impl Iterator<Item = RowTile> {
        (0..self.count()).map(move |i| self.tile(i)).filter(|rows| rows.count > 0)
    }
}

/// Which keys are visited: those in the range that the first mask lets a row see and the second does not.
#[derive(Clone, Debug)]
pub(crate) struct KeyRange<'c> {
    pub(crate) mask: &'c Mask,
    pub(crate) without: Option<&'c Mask>,
    pub(crate) keys: Range<usize>,
}

/// One group of rows against some keys of a block.
pub(crate) struct ScoreTile<'p, N> {
    pub(crate) group: usize,
    pub(crate) k: Rows<'p, N>,
    pub(crate) v: Rows<'p, N>,
    pub(crate) at: At<'p>,
    /// Which rows see each key, if not all do.
    pub(crate) visible: Option<&'p mut [RowMask]>,
}

/// What is done with each tile, keys ascending.
pub(crate) trait Visit<N: Number> {
    /// Whether it looks at values; if not, tiles hold the keys in their place.
    const VALUES: bool = true;
    /// A whole block; `false` if it is to come in tiles.
    fn take(&mut self, isa: Isa, block: &KeyBlock) -> bool {
        let _ = (isa, block);
        false
    }
    fn visit(&mut self, isa: Isa, score_tile: ScoreTile<'_, N>);
}

/// Memory of a pass, reused from one to the next.
#[derive(Debug)]
pub(crate) struct BlockLoop<N> {
    keys: Vec<N>,
    values: Vec<N>,
    runs: Vec<Run>,
    sparse: Vec<SparseKey>,
    pub(crate) block: KeyBlock,
}

impl<N: Number> BlockLoop<N> {
    pub(crate) fn new() -> Self {
        Self {
            keys: Vec::new(),
            values: Vec::new(),
            runs: Vec::new(),
            sparse: Vec::new(),
            block: KeyBlock::new(),
        }
    }

    /// Leads the rows of one head over the keys of `way`.
    pub(crate) fn for_each_block<V: Visit<N>>(
        &mut self,
        isa: Isa,
        call: &Call<'_, N>,
        HeadRows { scope, rows }: HeadRows,
        key_range: &KeyRange<'_>,
        visitor: &mut V,
    ) {
        let Self { keys, values, runs, sparse, block } = self;
        key_range.mask.runs_beyond(key_range.without, &scope, rows, runs);
        let (all_k, all_v) = call.keys_and_values(scope);
        let mut blocks = KeyBlocks::new(runs, key_range.keys.clone(), rows.lanes(), sparse);
        while blocks.next(block) {
            if let Keys::Gathered(gathered) = block.keys() {
                // Rows far apart: no hardware prefetcher follows them.
                gathered.iter().for_each(|key| {
                    prefetch_row(all_k, *key);
                    if V::VALUES {
                        prefetch_row(all_v, *key);
                    }
                });
            }
            if visitor.take(isa, block) {
                continue;
            }
            let k = fetch(isa, all_k, block, keys);
            let v = if V::VALUES { fetch(isa, all_v, block, values) } else { k };
            for group in 0..rows.groups() {
                let rows = rows.group(group);
                let mut visible = [0; BLOCK_KEYS];
                let parts = block.visible_tiles(group, rows.count, &mut visible);
                for VisibleBlock { keys, span, hidden } in parts.into_iter().flatten() {
                    let (k, v) = (k.slice(keys.start, keys.len()), v.slice(keys.start, keys.len()));
                    let at = At { scope, rows, span, keys: block.keys().skip(keys.start) };
                    // A bias or a choice may hide pairs that the mask lets through.
                    let biased = call.problem.may_hide();
                    let mut all = [span.set(); BLOCK_KEYS];
                    let visible =
                        if hidden { &mut visible[keys.clone()] } else { &mut all[keys.clone()] };
                    let visible = (hidden || biased).then_some(visible);
                    visitor.visit(isa, ScoreTile { group, k, v, at, visible });
                }
            }
        }
    }
}

/// Asks for a row of keys or values that is needed next.
#[inline(always)]
pub(crate) fn prefetch_row<N: Number>(head: KvHead<'_, N>, i: usize) {
    match head {
        KvHead::Elements(head) => each!(head, head => prefetch_l1(head.row(i))),
        KvHead::Quantized(head) => prefetch_l1(head.run(i, 1).codes.data),
    }
}

impl<N: Number> ScoreTile<'_, N> {
    /// Which rows see each key, if some do not see some.
    #[inline(always)]
    pub(crate) fn partial_mask(&self) -> Option<&[RowMask]> {
        let everyone = self.at.span.set();
        self.visible.as_deref().filter(|visible| visible.iter().any(|s| s & everyone != everyone))
    }

    /// The scores of a tile, times `log2 e`, `-inf` where a row does not see the key.
    pub(crate) fn scores(
        &mut self,
        isa: Isa,
        problem: &Problem<'_, N>,
        queries: &mut Queries<N>,
        tile: &mut [Lanes<N>],
        derivatives: Option<&mut Derivatives<N>>,
    ) {
        let at = self.at;
        let Queries { lanes: q, layer, .. } = queries;
        let q = &q[..];
        match problem.similarity {
            Similarity::Distance => distance_tile(isa, (self.k, q), at.span, tile),
            Similarity::Additive(_) => layer.similarities(isa, (self.k, q), at.span, tile),
            _ => dot_tile(isa, (self.k, q), at.span, tile),
        }
        problem.apply(isa, at, tile, derivatives);
        let Some(visible) = self.visible.as_deref_mut() else { return };
        apply_mask(isa, tile, visible, at.span);
    }
}

leaf! {
    /// Makes the scores of pairs that do not see each other `-inf`.
    pub(crate) fn apply_mask<'t, N>(
        s: S,
        tile: &'t mut [Lanes<N>],
        visible: &'t mut [RowMask],
        span: Span,
    ) {
        mask_within(s, tile, visible, span);
    }
}

/// [`apply_mask`] from within a leaf.
#[inline(always)]
pub(crate) fn mask_within<N: Number, S: Simd<N>>(
    s: S,
    tile: &mut [Lanes<N>],
    visible: &mut [RowMask],
    span: Span,
) {
    let (hidden, lowest) = (s.splat(N::neg_infinity()), s.splat(-N::max_value()));
    for (scores, visible) in tile.iter_mut().zip(visible) {
        for lane in span.vectors::<N, S>() {
            let x = s.load(&scores.0[lane..]);
            // A bias of -inf hides a pair too: then not even a NaN in its value may reach the row.
            let by_bias = RowMask::from(s.bits(s.less(x, lowest))) << lane;
            *visible &= !by_bias;
            s.store(s.select(s.lanes(low(*visible >> lane)), x, hidden), &mut scores.0[lane..]);
        }
    }
}
