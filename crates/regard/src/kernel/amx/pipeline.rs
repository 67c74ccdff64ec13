//! Tiles and vectors at once: the one make products while the other turn the results of those before into operands.

use super::backward::{BlockAt, ScoreOperands};
use super::product::{Operand, Product, ProductSizes};
use super::{CHUNKS, Halves, ROWS, WIDTH};
use crate::kernel::block_loop::TILE_ROWS;
use crate::machine::simd::{Avx512, GROUP, Lanes, Simd, Task, Tiles, math, prefetch_l2};
use crate::tensor::index::{BLOCK_KEYS, RowMask, low};
use std::ops::Range;

/// Groups of a tile of rows.
pub(crate) const GROUPS: usize = TILE_ROWS / GROUP;
/// Bytes of a cache line.
const LINE: usize = 64;

/// Scores, before they are times the scale, and gradients of weights of 32 keys and 32 rows: small enough to stay in the
/// nearest cache until they are used.
#[derive(Debug)]
pub(crate) struct Block {
    scores: Box<Halves<WIDTH>>,
    d_weights: Box<Halves<WIDTH>>,
}

impl Block {
    pub(crate) fn new() -> Self {
        Self { scores: Halves::new(), d_weights: Halves::new() }
    }
}

/// One group of rows on its way to the operands of a key block.
pub(crate) struct Side<'t> {
    pub(crate) queries: Operand<'t>,
    pub(crate) d_out: Operand<'t>,
    pub(crate) visible: &'t [RowMask; BLOCK_KEYS],
    pub(crate) lse: &'t Lanes<f32>,
    pub(crate) delta: &'t Lanes<f32>,
    /// Its rows.
    pub(crate) count: usize,
}

/// From keys, values and rows to operands, in blocks of 32 keys and 32 rows.
pub(crate) struct Make<'t> {
    pub(crate) from: Source<'t>,
    pub(crate) blocks: &'t mut [Block; 2],
    pub(crate) to: &'t mut ScoreOperands,
}

/// What operands are made from.
pub(crate) struct Source<'t> {
    pub(crate) s: Avx512,
    /// Keys and values, and the chunks of their features.
    pub(crate) keys: (Operand<'t>, usize),
    pub(crate) values: (Operand<'t>, usize),
    /// Keys of the key block.
    pub(crate) n: usize,
    pub(crate) sides: [Option<Side<'t>>; GROUPS],
    pub(crate) factor: f32,
    /// Memory that will be needed soon, and how many bytes of it.
    pub(crate) ahead: [(*const u8, usize); 3],
}

/// Products on the tiles, step by step.
pub(crate) struct Steps<'t> {
    pub(crate) t: &'t Tiles,
    pub(crate) products: [Option<Product<'t>>; 2 + GROUPS],
    /// The product that is on.
    pub(crate) at: usize,
}

impl<'t> Steps<'t> {
    fn count(&self) -> usize {
        self.products.iter().flatten().map(Product::steps).sum()
    }

    /// The product that the next step belongs to; there must be one.
    #[inline(always)]
    fn current(&mut self) -> Option<&mut Product<'t>> {
        while self.products[self.at].as_ref().is_none_or(Product::is_done) {
            self.at += 1;
        }
        self.products[self.at].as_mut()
    }

    /// The first number of steps, from `n` on, after which all sums that were begun are stored.
    fn whole(&self, n: usize) -> usize {
        let mut before = 0;
        for product in self.products.iter().flatten() {
            if n <= before + product.steps() {
                return before + (n - before).next_multiple_of(product.block_steps());
            }
            before += product.steps();
        }
        before
    }

    /// Takes some steps, with nothing between them.
    #[inline(never)]
    fn run(&mut self, n: usize) {
        for _ in 0..n {
            let t = self.t;
            if let Some(product) = self.current() {
                product.step(t);
            }
        }
    }
}

/// Steps of the products of one key block, then those of the first products of the next block.
struct Mixed<'m, 't> {
    steps: &'m mut Steps<'t>,
    left: usize,
    coming: [Option<Product<'m>>; 2],
}

impl Mixed<'_, '_> {
    fn count(&self) -> usize {
        self.left + self.coming.iter().flatten().map(Product::steps).sum::<usize>()
    }

    /// The next step; there must be one.
    #[inline(always)]
    fn take(&mut self) {
        let t = self.steps.t;
        if self.left > 0 {
            self.left -= 1;
            if let Some(product) = self.steps.current() {
                product.step(t);
            }
        } else {
            let [first, second] = &mut self.coming;
            let done = first.as_ref().is_none_or(Product::is_done);
            if let Some(product) = if done { second } else { first } {
                product.step(t);
            }
        }
    }
}

/// Products on the tiles while the vectors make the operands of the next key block.
pub(crate) struct Pipelined<'t, const TERMS: usize> {
    pub(crate) steps: Steps<'t>,
    pub(crate) make: Option<Make<'t>>,
}

impl<const TERMS: usize> Task<f32> for Pipelined<'_, TERMS> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        let Self { mut steps, make } = self;
        let (count, mut taken) = (steps.count(), 0);
        if let Some(make) = make {
            taken = make.run::<TERMS>(&mut steps, count);
        }
        steps.run(count - taken);
    }
}

/// One of `count` equal shares of some work.
#[derive(Clone, Copy)]
struct Share {
    index: usize,
    count: usize,
}

impl Share {
    /// Part `i` of `n` of this share.
    #[inline(always)]
    fn part(self, i: usize, n: usize) -> Self {
        Self { index: self.index * n + i, count: self.count * n }
    }

    /// Which of `len` things belong to it.
    #[inline(always)]
    fn range(self, len: usize) -> Range<usize> {
        len * self.index / self.count..len * (self.index + 1) / self.count
    }
}

impl Make<'_> {
    /// All blocks, with steps of other products on the way; tells how many.
    #[inline(always)]
    fn run<const TERMS: usize>(self, steps: &mut Steps<'_>, count: usize) -> usize {
        let Self { from, blocks: [first, second], to } = self;
        let mut order = [BlockAt::default(); GROUPS * CHUNKS * CHUNKS];
        let mut len = 0;
        for (group, side) in from.sides.iter().enumerate() {
            let rows = side.as_ref().map_or(0, |side| side.count.div_ceil(WIDTH));
            for at in 0..rows * from.n.div_ceil(WIDTH) {
                order[len] = BlockAt { group, row_chunk: at % rows, key_chunk: at / rows };
                len += 1;
            }
        }
        let (mut now, mut next) = (first, second);
        let products = from.products(TERMS, order[0], now);
        let [scores, d_weights] = products;
        let products = [scores, d_weights, None, None];
        let mut early = Steps { t: steps.t, products, at: 0 };
        early.run(early.count());
        let mut taken = 0;
        for b in 0..len {
            let until = steps.whole(count * (b + 1) / len).max(taken);
            let coming =
                if b + 1 < len { from.products(TERMS, order[b + 1], next) } else { [None, None] };
            let mixed = Mixed { steps: &mut *steps, left: until - taken, coming };
            let share = Share { index: b, count: len };
            from.differentiate::<TERMS>(mixed, order[b], share, now, to);
            taken = until;
            (now, next) = (next, now);
        }
        taken
    }
}

impl Source<'_> {
    /// The first products of a block.
    fn products<'p>(
        &'p self,
        terms: usize,
        at: BlockAt,
        to: &'p mut Block,
    ) -> [Option<Product<'p>>; 2] {
        let Some(side) = &self.sides[at.group] else { return [None, None] };
        let (key, lane) = (2 * at.key_chunk, 2 * at.row_chunk);
        let rows = (self.n.div_ceil(ROWS) - key).min(2);
        let lanes = (side.count.div_ceil(ROWS) - lane).min(2);
        let sizes = |chunks| ProductSizes { terms, chunks, rows, lanes };
        let ((keys, qk_chunks), (values, v_chunks)) = (self.keys, self.values);
        let scores = (keys.skip(0, key), side.queries.skip(0, lane));
        let d_weights = (values.skip(0, key), side.d_out.skip(0, lane));
        [
            Some(Product::new(sizes(qk_chunks), scores, to.scores.sums())),
            Some(Product::new(sizes(v_chunks), d_weights, to.d_weights.sums())),
        ]
    }

    /// Asks for a share of what will be needed soon.
    #[inline(always)]
    fn prefetch_head(&self, share: Share) {
        for (first, bytes) in self.ahead {
            for line in share.range(bytes / LINE) {
                prefetch_l2(first.wrapping_add(line * LINE));
            }
        }
    }

    /// `a = 2^(score factor - lse)`, `d_score = a (d_a - delta)` of a block; on the way steps of products, and a share of the
    /// prefetches.
    #[inline(always)]
    fn differentiate<const TERMS: usize>(
        &self,
        mut mixed: Mixed<'_, '_>,
        at: BlockAt,
        share: Share,
        block: &Block,
        to: &mut ScoreOperands,
    ) {
        let BlockAt { group, row_chunk, key_chunk } = at;
        let Some(side) = &self.sides[group] else { return };
        let (s, count, mut taken) = (self.s, mixed.count(), 0);
        let (factor, zero) = (s.splat(self.factor), s.splat(0.0));
        let (mut less_lse, mut delta) = ([zero; 2], [zero; 2]);
        for j in 0..2 {
            let lane = row_chunk * WIDTH + j * ROWS;
            less_lse[j] = s.sub(zero, s.load(&side.lse.0[lane..]));
            delta[j] = s.load(&side.delta.0[lane..]);
        }
        for i in 0..ROWS {
            while taken * ROWS < (i + 1) * count {
                mixed.take();
                taken += 1;
            }
            self.prefetch_head(share.part(i, ROWS));
            let (mut weights, mut d_scores) = ([[zero; 2]; 2], [[zero; 2]; 2]);
            for half in 0..2 {
                let key = half * ROWS + i;
                let visible = low(side.visible[key_chunk * WIDTH + key] >> (row_chunk * WIDTH));
                for j in 0..2 {
                    let visible = s.lanes(visible >> (j * ROWS));
                    let x = s.load(&block.scores.0[key][j * ROWS..]);
                    let x = s.fma(x, factor, less_lse[j]);
                    let a = if TERMS < 3 { math::weight_coarse(s, x) } else { math::weight(s, x) };
                    let d_a = s.sub(s.load(&block.d_weights.0[key][j * ROWS..]), delta[j]);
                    weights[half][j] = s.select(visible, a, zero);
                    d_scores[half][j] = s.select(visible, s.mul(a, d_a), zero);
                }
            }
            to.write::<TERMS>(s, at, i, weights, d_scores);
        }
    }
}
