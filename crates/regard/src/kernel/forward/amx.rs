//! The forward pass on tiles: while the vectors weigh one tile, the tiles score the next and add up the one before.
//!
//! Cost: the products of the pass on vectors, `bf16 terms (bf16 terms + 1) / 2` times over, each up to 16 times as fast. What limits it is
//! loading tiles, 32 times for 64 keys, 32 rows and 64 features.

use super::{Forward, Group, Scratch, decode_amx};
use crate::kernel::amx::pack::{
    LeftOut, OwnBlock, PackPairs, PackQueryHead, PackedBlock, pack_pairs, write_interleaved,
};
use crate::kernel::amx::product::{Between, Operand, Product, ProductSizes, Sums};
use crate::kernel::amx::{
    AmxScratch, CHUNKS, HALF, HALF_TILES, Halves, LANE_TILES, PackedKv, ROWS, TileRow, WIDTH,
    with_terms,
};
use crate::kernel::block_loop::{Call, ScoreTile, Visit, apply_mask};
use crate::kernel::key_blocks::KeyBlock;
use crate::kernel::lanes::{multiply_tile, scale_lanes};
use crate::kernel::softmax::{MAX_TILE_SUM, SoftmaxTile};
use crate::machine::simd::{
    Amx, AmxKernel, Avx512, GROUP, Isa, Lanes, Number, Simd, Task, TileShape, Tiles, math,
};
use crate::tensor::index::{At, BLOCK_KEYS, HeadRows, Keys, RowTile, Scope, Span};
use crate::tensor::source::AnyHead;
use std::arch::x86_64::__m512;

impl<'t, 'c> AmxKernel for Forward<'t, 'c, f32> {
    type Task<N: Number> = Forward<'t, 'c, N>;
    type Out = ();

    fn run(amx: Amx, mut task: Self) {
        let isa = Isa::Amx(amx);
        if let Some(mut scratch) = task.scratch.decode.as_mut().and_then(|decode| decode.amx.take())
        {
            task.decode(isa, &mut decode_amx::OnAmx::new(amx, &mut scratch));
            if let Some(decode) = &mut task.scratch.decode {
                decode.amx = Some(scratch);
            }
            return;
        }
        let t = amx.configure([TileShape::WHOLE; 8]);
        let used = task.rows.groups();
        for g in 0..used {
            task.start(isa, g);
        }
        if let Some(key_range) = &task.stage.keys {
            let (call, scope, rows, packed_kv) = (task.call, task.scope, task.rows, task.packed_kv);
            let Scratch { groups, factors, block_loop, amx: Some(scratch), .. } =
                &mut *task.scratch
            else {
                return; // a plan that uses AMX has made room for them
            };
            let mut visitor = Adding {
                isa,
                s: amx.vectors(),
                t: &t,
                call,
                scope,
                rows,
                groups,
                scratch,
                factors,
                packed_kv,
                head: (scope.batch, call.problem.kv_head(scope.head)),
                factor: f32::from_f64(call.problem.query_factor()),
            };
            visitor.pack_queries();
            block_loop.for_each_block(
                isa,
                &call,
                HeadRows { scope, rows },
                key_range,
                &mut visitor,
            );
            visitor.flush();
        }
        drop(t);
        for g in 0..used {
            match task.stage.into {
                Some(part) => task.save(isa, g, part),
                None => task.finish(isa, g),
            }
        }
    }
}

/// Adds each block to the sums of the groups.
struct Adding<'t, 'c> {
    isa: Isa,
    s: Avx512,
    t: &'t Tiles,
    call: Call<'c, f32>,
    scope: Scope,
    rows: RowTile,
    groups: &'t mut [Group<f32>],
    scratch: &'t mut AmxScratch,
    factors: &'t mut [Lanes<f32>],
    packed_kv: Option<&'c PackedKv>,
    /// Item and key head.
    head: (usize, usize),
    /// What similarities are multiplied by.
    factor: f32,
}

/// A whole block and half a group, on their way.
#[derive(Clone, Copy)]
struct Waiting {
    group: usize,
    /// The first of its lanes.
    lane: usize,
    /// How many of them have rows.
    count: usize,
    /// The first key.
    first: usize,
    /// Which of the two rooms for scores and for weights it has.
    buffer: usize,
}

impl Waiting {
    fn span(self) -> Span {
        Span { start: self.lane, end: self.lane + self.count }
    }

    fn tiles(self) -> usize {
        self.count.div_ceil(ROWS)
    }
}

/// KeyBlocks that wait until it is their turn: about half a megabyte of keys and values, which stay in the second-level cache
/// while one half group after the other passes over them, its own numbers in the first.
const QUEUE: usize = 16;

impl Visit<f32> for Adding<'_, '_> {
    fn take(&mut self, _: Isa, block: &KeyBlock) -> bool {
        let problem = self.call.problem;
        let plain = problem.is_plain_dot_at(&self.scope, self.rows, (block.keys(), block.len))
            && !problem.has_factors()
            && !problem.entropy;
        let whole = plain && block.full && block.len == BLOCK_KEYS;
        let first = match block.keys() {
            Keys::From(first) if first.is_multiple_of(BLOCK_KEYS) => Some(first),
            _ => None,
        };
        if let (Some(packed_kv), Some(first)) = (self.packed_kv, first) {
            let packed = packed_kv.key_block(self.head, first);
            if whole && packed.non_finite == 0 {
                self.scratch.queue.push(first);
                if self.scratch.queue.len() == QUEUE {
                    self.flush();
                }
            } else {
                self.flush();
                self.step_all(packed, block);
            }
            return true;
        }
        self.flush();
        let rows = self.call.elements(self.scope);
        self.scratch.key_block.fill(self.s, rows, block);
        if let (None, Some(first), true) = (self.packed_kv, first, whole)
            && self.scratch.key_block.get().non_finite == 0
        {
            self.scratch.queue.push(first);
            self.flush();
            return true;
        }
        let own =
            std::mem::replace(&mut self.scratch.key_block, OwnBlock::none(self.scratch.sizes));
        self.step_all(own.get(), block);
        self.scratch.key_block = own;
        true
    }

    fn visit(&mut self, _: Isa, _: ScoreTile<'_, f32>) {}
}

impl Adding<'_, '_> {
    /// Queries into tiles. They stay as they are: the scale comes after the product.
    fn pack_queries(&mut self) {
        let q = self.call.queries(self.scope.batch, self.scope.head);
        let AmxScratch { queries, sizes, .. } = &mut *self.scratch;
        for (group, to) in self.groups[..self.rows.groups()].iter().zip(queries) {
            let (s, rows, terms, chunks) = (self.s, group.q.rows, sizes.terms, sizes.chunks);
            f32::visit(q, PackQueryHead { s, terms, rows, chunks, to });
        }
    }

    /// Works off what waits.
    fn flush(&mut self) {
        if !self.scratch.queue.is_empty() {
            self.s.call(Flush(self));
        }
    }

    #[inline(always)]
    fn flush_queue(&mut self) {
        let queue = std::mem::take(&mut self.scratch.queue);
        let (mut scored, mut weighed, mut buffer) = (None, None, 0);
        for group in 0..self.rows.groups() {
            let rows = self.groups[group].q.rows.count;
            for lane in (0..rows).step_by(HALF) {
                let count = (rows - lane).min(HALF);
                for first in &queue {
                    let next = Waiting { group, lane, count, first: *first, buffer };
                    self.pipelined(Some(next), scored, weighed);
                    (weighed, scored, buffer) = (scored, Some(next), 1 - buffer);
                }
            }
        }
        self.pipelined(None, scored, weighed);
        self.pipelined(None, None, scored);
        self.scratch.queue = queue;
        self.scratch.queue.clear();
    }

    /// Scores `next`, weighs what is scored, adds up what is weighed, all at once.
    #[inline(always)]
    fn pipelined(
        &mut self,
        next: Option<Waiting>,
        scored: Option<Waiting>,
        weighed: Option<Waiting>,
    ) {
        let (s, t, factor) = (self.s, self.t, self.factor);
        // The first tile of a group, and one with scores far above those before, is not worth trying.
        let mut quick = scored;
        if let Some(scored) = scored {
            let states = &self.groups[scored.group].states;
            if states.max_is_stale || states.sum.0[scored.lane] == 0.0 {
                quick = None;
            }
        }
        let max = match quick {
            Some(quick) => self.groups[quick.group].states.max,
            None => Lanes([0.0; GROUP]),
        };
        let AmxScratch {
            sizes,
            queries,
            scores: [scores_0, scores_1],
            weights: [weights_0, weights_1],
            key_block,
            ..
        } = &mut *self.scratch;
        // What is scored has one room, the next tile and the weighed one share the other.
        let other = match (scored, next, weighed) {
            (Some(score_tile), ..) => 1 - score_tile.buffer,
            (None, Some(score_tile), _) | (None, None, Some(score_tile)) => score_tile.buffer,
            (None, None, None) => 0,
        };
        let (to_score, to_weigh) =
            if other == 0 { (scores_0, scores_1) } else { (scores_1, scores_0) };
        let (done, to) = if other == 0 { (weights_0, weights_1) } else { (weights_1, weights_0) };
        let mut score = match next {
            Some(next) => {
                let keys = key_block.or(self.packed_kv, self.head, next.first).keys;
                let queries =
                    Operand { data: &queries[next.group], chunks: sizes.chunks, tiles: LANE_TILES };
                let operands = (keys, queries.skip(0, next.lane / ROWS));
                let of = ProductSizes {
                    terms: sizes.terms,
                    chunks: sizes.chunks,
                    rows: BLOCK_KEYS / ROWS,
                    lanes: next.tiles(),
                };
                Some(Product::new(of, operands, to_score.sums()))
            }
            None => None,
        };
        let mut add = match weighed {
            Some(weighed) => {
                let values = key_block.or(self.packed_kv, self.head, weighed.first).values;
                let weights = Operand { data: done, chunks: CHUNKS, tiles: HALF_TILES };
                let to = Sums::lanes(&mut self.groups[weighed.group].sums, weighed.lane);
                let of = ProductSizes {
                    terms: sizes.terms,
                    chunks: CHUNKS,
                    rows: sizes.features,
                    lanes: weighed.tiles(),
                };
                Some(Product::new(of, (values, weights), to.accumulate(true)))
            }
            None => None,
        };
        let mut sums = [0.0; HALF];
        let products = [add.as_mut(), score.as_mut()];
        let max = quick.map_or(&[][..], |quick| &max.0[quick.lane..]);
        let (vectors, sums_to) = (quick.map_or(0, Waiting::tiles), &mut sums);
        let work = Pipelined {
            s,
            t,
            products,
            scores: to_weigh,
            max,
            factor,
            vectors,
            sums: sums_to,
            weights: to,
        };
        let enough = work.run(sizes.terms);
        match scored {
            Some(scored) if quick.is_some() && enough => self.count(scored, &sums),
            Some(scored) => self.exp_and_sum_with_max(scored),
            None => {}
        }
    }

    /// Adds the sums of the weights of a tile.
    #[inline(always)]
    fn count(&mut self, score_tile: Waiting, sums: &[f32; HALF]) {
        let to = &mut self.groups[score_tile.group].states.sum.0[score_tile.lane..];
        to[..score_tile.count].iter_mut().zip(sums).for_each(|(to, sum)| *to += sum);
    }

    /// Weighs a tile whose scores are there with a look for the largest of them.
    #[inline(always)]
    fn exp_and_sum_with_max(&mut self, scored: Waiting) {
        let (s, t, factor, span) = (self.s, self.t, self.factor, scored.span());
        let Waiting { group, lane, buffer, .. } = scored;
        let AmxScratch { sizes, scores, weights, .. } = &mut *self.scratch;
        let (scores, weights) = (&scores[buffer], &mut weights[buffer][..]);
        let mut top = [Lanes([0.0; GROUP])];
        s.call(Largest { scores, factor, to: &mut top[0].0[lane..lane + HALF] });
        let group = &mut self.groups[group];
        group.update_max(self.isa, &top, (&Lanes([f32::INFINITY; GROUP]), span));
        let (max, mut sums) = (group.states.max, [0.0; HALF]);
        let (max, vectors, sums_to) = (&max.0[lane..], scored.tiles(), &mut sums);
        let products = [None, None];
        let work =
            Pipelined { s, t, products, scores, max, factor, vectors, sums: sums_to, weights };
        work.run(sizes.terms);
        self.count(scored, &sums);
    }

    /// Any block.
    fn step_all(&mut self, packed: PackedBlock<'_>, block: &KeyBlock) {
        for group in 0..self.rows.groups() {
            self.step(packed, block, group);
        }
    }

    /// Any block, one group: all in a row.
    fn step(&mut self, packed: PackedBlock<'_>, block: &KeyBlock, g: usize) {
        let Self { isa, s, t, factor, .. } = *self;
        let problem = self.call.problem;
        let group = &mut self.groups[g];
        let (n, rows) = (block.len, group.q.rows);
        let span = Span::first(rows.count);
        let mut visible = [0; BLOCK_KEYS];
        if !block.visible_rows(g, span, &mut visible) {
            return;
        }
        let at = At { scope: self.scope, rows, span, keys: block.keys() };
        let hides = !block.full || problem.may_hide();
        let AmxScratch { sizes, queries, tile, pairs, .. } = &mut *self.scratch;
        let queries = Operand { data: &queries[g], chunks: sizes.chunks, tiles: LANE_TILES };
        let Group { states, sums: out, .. } = group;
        let (terms, lanes) = (sizes.terms, rows.count.div_ceil(ROWS));
        let softmax_tile = SoftmaxTile { lanes: tile, keys: n, span };
        let rescale = states.weigh(isa, softmax_tile, problem.entropy, |tile| {
            // Whole tiles, which may reach beyond the keys.
            let of = ProductSizes { terms, chunks: sizes.chunks, rows: n.div_ceil(ROWS), lanes };
            Product::new(of, (packed.keys, queries), Sums::lanes(tile, 0)).run(t);
            let scores = &mut tile[..n];
            scale_lanes(isa, scores, &Lanes([factor; GROUP]), span);
            problem.apply(isa, at, scores, None);
            if hides {
                apply_mask(isa, scores, &mut visible[..n], span);
            }
        });
        if let Some(rescale) = rescale {
            scale_lanes(isa, out, &rescale, span);
        }
        let tile = &mut tile[..n];
        if problem.has_factors() {
            let factors = &mut self.factors[..n];
            problem.factors(isa, at, factors);
            multiply_tile(isa, tile, factors, span);
        }
        let (tiles, to) = (0..LANE_TILES, &mut pairs[..]);
        pack_pairs(s, terms, PackPairs { lanes: tile, tiles, chunks: CHUNKS, to });
        let weights = Operand { data: pairs, chunks: CHUNKS, tiles: LANE_TILES };
        let of = ProductSizes { terms, chunks: CHUNKS, rows: sizes.features, lanes };
        let to = Sums::lanes(&mut group.sums, 0).accumulate(true);
        Product::new(of, (packed.values, weights), to).run(t);
        if packed.non_finite != 0 {
            let (_, v) = self.call.elements(self.scope);
            let left_out = LeftOut { non_finite: packed.non_finite, visible: &visible, keys: n };
            add_non_finite(v, at.keys, left_out, tile, &mut group.sums);
        }
    }
}

/// The numbers that were left out of the values because they are not finite, for the rows that see them.
#[inline(never)]
fn add_non_finite(
    v: AnyHead<'_, f32>,
    keys: Keys<'_>,
    left_out: LeftOut<'_>,
    weights: &[Lanes<f32>],
    sums: &mut [Lanes<f32>],
) {
    for i in (0..left_out.keys).filter(|i| left_out.holds(*i)) {
        let row = (0..v.dim()).map(|d| v.number(keys.get(i), d));
        for (x, sum) in row.zip(&mut *sums).filter(|(x, _)| !x.is_finite()) {
            for lane in (0..GROUP).filter(|lane| left_out.is_visible(i, *lane)) {
                sum.0[lane] += weights[i].0[lane] * x;
            }
        }
    }
}

/// [`Adding::flush`], compiled for AVX-512: little work between many leaves.
struct Flush<'a, 't, 'c>(&'a mut Adding<'t, 'c>);

impl Task<f32> for Flush<'_, '_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        self.0.flush_queue();
    }
}

/// The largest score of each row, times `factor`.
struct Largest<'t> {
    scores: &'t Halves<BLOCK_KEYS>,
    factor: f32,
    to: &'t mut [f32],
}

impl Task<f32> for Largest<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, s: S) {
        let factor = s.splat(self.factor);
        for lane in (0..HALF).step_by(S::LANES) {
            let mut top = s.splat(f32::NEG_INFINITY);
            for row in &self.scores.0 {
                top = s.max(top, s.mul(s.load(&row[lane..]), factor));
            }
            s.store(top, &mut self.to[lane..]);
        }
    }
}

/// Products on the tiles while the vectors turn scores into weights: `2^(score factor - max)`, in pairs of keys.
struct Pipelined<'t> {
    s: Avx512,
    t: &'t Tiles,
    /// By reference: a copy would have to wait for all stores before it.
    products: [Option<&'t mut Product<'t>>; 2],
    scores: &'t Halves<BLOCK_KEYS>,
    max: &'t [f32],
    factor: f32,
    /// Vectors of lanes; 0 if there is nothing to weigh.
    vectors: usize,
    sums: &'t mut [f32; HALF],
    weights: &'t mut [TileRow],
}

impl Pipelined<'_> {
    /// With weights of so many bf16 terms; tells whether they are small enough to be used: see `States::weigh`.
    fn run(self, terms: usize) -> bool {
        with_terms!(terms, TERMS => self.s.call(SplitWeights::<TERMS>(self)))
    }
}

struct SplitWeights<'t, const TERMS: usize>(Pipelined<'t>);

impl<const TERMS: usize> Task<f32> for SplitWeights<'_, TERMS> {
    type Out = bool;
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) -> bool {
        match self.0.vectors {
            0 => {
                for product in self.0.products.into_iter().flatten() {
                    product.run(self.0.t);
                }
                false
            }
            1 => self.0.exp_and_sum::<TERMS, 1>(),
            _ => self.0.exp_and_sum::<TERMS, 2>(),
        }
    }
}

impl Pipelined<'_> {
    #[inline(always)]
    fn exp_and_sum<const TERMS: usize, const VECTORS: usize>(self) -> bool {
        let Self { s, t, products, scores, max, weights, .. } = self;
        let [mut first, mut second] = products;
        let mut vectors = ExpAndSum::<TERMS, VECTORS> {
            s,
            scores,
            weights,
            factor: s.splat(self.factor),
            less_max: [s.splat(0.0); VECTORS],
            sums: [s.splat(0.0); VECTORS],
            pair: 0,
        };
        for (j, less_max) in vectors.less_max.iter_mut().enumerate() {
            *less_max = s.plain_nan(s.sub(s.splat(0.0), s.load(&max[j * 16..])));
        }
        match (&mut first, &mut second) {
            (Some(first), Some(second)) if first.is_even() && second.is_even() => {
                match first.steps() + second.steps() {
                    16 => vectors.between::<8>(t, [first, second]),
                    32 => vectors.between::<4>(t, [first, second]),
                    64 => vectors.between::<2>(t, [first, second]),
                    128 => vectors.between::<1>(t, [first, second]),
                    _ => vectors.spread(t, [Some(first), Some(second)]),
                }
            }
            (first, second) => vectors.spread(t, [first.as_deref_mut(), second.as_deref_mut()]),
        }
        let mut enough = true;
        for (j, sums) in vectors.sums.into_iter().enumerate() {
            s.store(sums, &mut self.sums[j * 16..]);
            enough &= s.bits(s.less(sums, s.splat(f32::from_f64(MAX_TILE_SUM)))) == 0xffff;
        }
        enough
    }
}

/// Scores of half a tile on their way to weights, a pair of keys at a time.
struct ExpAndSum<'t, const TERMS: usize, const VECTORS: usize> {
    s: Avx512,
    scores: &'t Halves<BLOCK_KEYS>,
    weights: &'t mut [TileRow],
    factor: __m512,
    less_max: [__m512; VECTORS],
    sums: [__m512; VECTORS],
    pair: usize,
}

/// Pairs of keys of a block.
const PAIRS: usize = BLOCK_KEYS / 2;

impl<const TERMS: usize, const VECTORS: usize> ExpAndSum<'_, TERMS, VECTORS> {
    /// The next pair.
    #[inline(always)]
    fn next(&mut self) {
        let (s, pair) = (self.s, self.pair % PAIRS);
        self.pair += 1;
        let key = pair / ROWS * WIDTH + pair % ROWS;
        let rows = [&self.scores.0[key], &self.scores.0[key + ROWS]];
        for j in 0..VECTORS {
            let mut both = [s.splat(0.0); 2];
            for i in 0..2 {
                let x = s.fma(s.load(&rows[i][j * 16..]), self.factor, self.less_max[j]);
                both[i] = if TERMS < 3 { math::weight_coarse(s, x) } else { math::weight(s, x) };
            }
            self.sums[j] = s.add(self.sums[j], s.add(both[0], both[1]));
            let at = (pair / ROWS * HALF_TILES + j) * ROWS + pair % ROWS;
            write_interleaved::<TERMS, false>(
                s,
                both,
                (&mut *self.weights, at, CHUNKS * HALF_TILES * ROWS),
            );
        }
    }

    /// All pairs, and the steps of both products spread evenly over them.
    #[inline(always)]
    fn spread(&mut self, t: &Tiles, [mut first, mut second]: [Option<&mut Product<'_>>; 2]) {
        let steps = [&first, &second].map(|p| p.as_ref().map_or(0, |p| p.steps()));
        let all = steps[0] + steps[1];
        let mut taken = 0;
        for pair in 0..PAIRS {
            while taken * PAIRS < (pair + 1) * all {
                let product = if taken < steps[0] { &mut first } else { &mut second };
                if let Some(product) = product {
                    product.step(t);
                }
                taken += 1;
            }
            self.next();
        }
    }

    /// The same for even products, where so many pairs fall to the four steps of a chunk.
    #[inline(always)]
    fn between<const EACH: usize>(&mut self, t: &Tiles, products: [&mut Product<'_>; 2]) {
        for product in products {
            product.run_between(t, &mut Each::<EACH, TERMS, VECTORS>(self));
        }
    }
}

/// `EACH` pairs for four steps.
struct Each<'w, 't, const EACH: usize, const TERMS: usize, const VECTORS: usize>(
    &'w mut ExpAndSum<'t, TERMS, VECTORS>,
);

impl<const EACH: usize, const TERMS: usize, const VECTORS: usize> Between
    for Each<'_, '_, EACH, TERMS, VECTORS>
{
    #[inline(always)]
    fn after(&mut self, step: usize) {
        for _ in step * EACH / 4..(step + 1) * EACH / 4 {
            self.0.next();
        }
    }
}
