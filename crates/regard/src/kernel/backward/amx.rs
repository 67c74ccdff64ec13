//! The backward pass on tiles: five products for each key block of keys and group of rows,
//!
//! ```text
//! scores  [keys][rows]     = keys     [keys][features]  x queries  [features][rows]
//! d_a     [keys][rows]     = values   [keys][features]  x d_out    [features][rows]
//! d_v     [keys][features] += weights  [keys][rows]     x d_out    [rows][features]
//! d_k     [keys][features] += d_scores [keys][rows]     x queries  [rows][features]
//! d_q     [features][rows] += keys    [features][keys]  x d_scores [keys][rows]
//! ```
//!
//! and between the second and the third one pass of the vectors, over blocks of 32 keys and 32 rows. While that goes on, the
//! tiles make the first two products of the next block, and the last three of the key block before. All groups of a tile of rows
//! are added to a key at once: tile loads are what limits this, and the sums of keys are the most of them.

use super::{AddGrads, ByKeys, Group, MaskedTile, Products, TilePass};
use crate::kernel::amx::backward::{PackScores, SplitScores, read};
use crate::kernel::amx::pack::LeftOut;
use crate::kernel::amx::pipeline::{GROUPS, Make, Pipelined, Side, Source, Steps};
use crate::kernel::amx::product::{Operand, Product, ProductSizes, Sums};
use crate::kernel::amx::{AmxBackwardScratch, CHUNKS, ROWS, WIDTH, with_terms};
use crate::kernel::block_loop::{ScoreTile, Visit, apply_mask};
use crate::kernel::key_blocks::KeyBlock;
use crate::kernel::lanes::{load_head, scale_lanes};
use crate::kernel::micro::RowBuffer;
use crate::machine::simd::{
    Amx, AmxKernel, Avx512, GROUP, Isa, Lanes, Number, Simd, Task, TileShape, Tiles,
};
use crate::tensor::index::{At, BLOCK_KEYS, HeadRows, Keys, RowMask, RowTile, Scope, Span};
use crate::tensor::source::AnyHead;

impl<'t, 'c> AmxKernel for ByKeys<'t, 'c, f32> {
    type Task<N: Number> = ByKeys<'t, 'c, N>;
    type Out = ();

    fn run(amx: Amx, task: Self) {
        let products = AmxProducts { s: amx.vectors(), t: amx.configure([TileShape::WHOLE; 8]) };
        task.run_by(Isa::Amx(amx), &products);
    }
}

struct AmxProducts {
    s: Avx512,
    t: Tiles,
}

impl Products<f32> for AmxProducts {
    fn block_loop(
        &self,
        isa: Isa,
        pass: TilePass<'_, '_, f32>,
        grads: AddGrads<'_, '_, f32>,
        scratch: Option<&mut AmxBackwardScratch>,
    ) {
        let Self { s, t } = self;
        let TilePass { block_loop, call, rows: tile, key_range } = pass;
        let HeadRows { scope, rows } = tile;
        let Some(scratch) = scratch else { return }; // a plan that uses AMX has made room for them
        let factor = f32::from_f64(call.problem.query_factor());
        let q = call.queries(scope.batch, scope.head);
        for (g, group) in grads.groups.iter().enumerate() {
            let rows = group.q.rows;
            load_head(isa, q, rows, 1.0, &mut scratch.transposed);
            let lanes = [&scratch.transposed[..], &group.d_out];
            let as_rows = [&group.q_rows, &group.d_out_rows];
            scratch.rows.fill(*s, g, lanes, as_rows, rows.count);
        }
        let inputs = call.elements(scope);
        let (s, weighed) = (*s, None);
        let mut visitor =
            Passing { isa, s, t, inputs, scope, rows, grads, scratch, factor, weighed };
        block_loop.for_each_block(isa, &call, tile, &key_range, &mut visitor);
        visitor.flush();
    }
}

/// Takes the gradients of each key block.
struct Passing<'t, 'c> {
    isa: Isa,
    s: Avx512,
    t: &'t Tiles,
    inputs: (AnyHead<'c, f32>, AnyHead<'c, f32>),
    scope: Scope,
    rows: RowTile,
    grads: AddGrads<'t, 'c, f32>,
    scratch: &'t mut AmxBackwardScratch,
    /// What makes a score of a product.
    factor: f32,
    /// A key block whose weights, and gradients of scores, are there.
    weighed: Option<Waiting>,
}

/// A key block on its way.
#[derive(Clone, Copy)]
struct Waiting {
    /// The place among the packed key_blocks.
    key_block: usize,
    /// Where the keys stand among those of the task; nowhere for gathered ones.
    place: Option<usize>,
    keys: usize,
    /// The first group that sees any of them, and the one after the last.
    groups: (usize, usize),
    /// Which of the two rooms it has.
    buffer: usize,
}

/// Which rows of each group see each key; none where there is no key.
type GroupMasks = [[RowMask; BLOCK_KEYS]; GROUPS];

impl Visit<f32> for Passing<'_, '_> {
    fn take(&mut self, _: Isa, key_block: &KeyBlock) -> bool {
        let mut visible = [[0; BLOCK_KEYS]; GROUPS];
        let groups = look(key_block, self.rows, &mut visible);
        if groups.0 >= groups.1 {
            return true;
        }
        let (first, keys) = (self.grads.first, key_block.len);
        let place = match key_block.keys() {
            Keys::From(key) => Some(key - first),
            Keys::Gathered(_) => None,
        };
        let packed = self.scratch.key_blocks.find(self.s, self.inputs, key_block, first);
        let buffer = self.weighed.map_or(0, |weighed| 1 - weighed.buffer);
        let next = Waiting { key_block: packed, place, keys, groups, buffer };
        let problem = self.grads.problem;
        let plain = problem.is_plain_dot_at(&self.scope, self.rows, (key_block.keys(), keys))
            && !problem.has_factors();
        if plain && self.grads.groups[0].entropy.is_none() {
            self.s.call(Overlapped(self, Some((next, &visible))));
        } else {
            self.flush();
            for (group, visible) in visible.iter_mut().enumerate().take(groups.1).skip(groups.0) {
                self.step(key_block, (next, group), visible);
            }
        }
        self.weighed = Some(next);
        let (key_blocks, non_finite) =
            (&self.scratch.key_blocks, &self.scratch.rows.non_finite[groups.0..groups.1]);
        let non_finite = key_blocks.at(packed).non_finite != 0
            || non_finite.iter().any(|non_finite| *non_finite != [0; 2]);
        if non_finite || key_blocks.is_spare(packed) {
            self.flush();
            self.put_in_place(key_block.keys());
            for group in (groups.0..groups.1).filter(|_| non_finite) {
                self.add_non_finite(key_block, (next, group), &visible[group]);
            }
        }
        true
    }

    fn visit(&mut self, _: Isa, _: ScoreTile<'_, f32>) {}
}

/// Writes what each group sees of a key block; tells the first group that sees any key, and the one after the last.
fn look(key_block: &KeyBlock, rows: RowTile, visible: &mut GroupMasks) -> (usize, usize) {
    let (mut first, mut end) = (usize::MAX, 0);
    for (g, visible) in visible.iter_mut().enumerate().take(rows.groups()) {
        if key_block.visible_rows(g, Span::first(rows.group(g).count), visible) {
            (first, end) = (first.min(g), g + 1);
        }
    }
    (first, end)
}

impl Passing<'_, '_> {
    /// Finishes what is on its way.
    fn flush(&mut self) {
        if self.weighed.is_some() {
            self.s.call(Overlapped(self, None));
            self.weighed = None;
        }
    }

    /// Makes the operands of `next` while the key block that is weighed goes into the sums.
    #[inline(always)]
    fn pipelined(&mut self, next: Option<(Waiting, &GroupMasks)>) {
        let (s, t, weighed) = (self.s, self.t, self.weighed);
        let AmxBackwardScratch {
            sizes,
            key_blocks,
            rows: own,
            operands: [first, second],
            blocks,
            gathered,
            far,
            ..
        } = &mut *self.scratch;
        let to_first = next.map_or(weighed.is_none_or(|w| w.buffer == 1), |(n, _)| n.buffer == 0);
        let (to, from) = if to_first { (first, second) } else { (second, first) };
        let AddGrads { groups, d_k, d_v, .. } = &mut self.grads;
        let count = |g: usize| self.rows.group(g).count;
        let mut ahead = [(std::ptr::null(), 0); 3];
        if let Some((Waiting { key_block, place: Some(place), .. }, _)) = next
            && *far
        {
            // What the key block after the next one will need.
            let sums = |sums: &mut RowBuffer<f32>| {
                let (data, width) = sums.rows_from(place);
                let bytes = BLOCK_KEYS * width * size_of::<f32>();
                (data.as_ptr().cast::<u8>().wrapping_add(bytes), bytes)
            };
            ahead = [sums(d_k), sums(d_v), key_blocks.bytes_at(key_block + 1)];
        }
        let mut products = [const { None }; 2 + GROUPS];
        if let Some(weighed) = weighed {
            let [gathered_k, gathered_v] = gathered;
            let (to_k, to_v) = match weighed.place {
                Some(place) => (d_k.rows_from(place), d_v.rows_from(place)),
                None => (gathered_k.rows_from(0), gathered_v.rows_from(0)),
            };
            let (start, end) = weighed.groups;
            let chunk = start * CHUNKS;
            let chunks = (end - 1) * CHUNKS + count(end - 1).div_ceil(WIDTH) - chunk;
            let rows = weighed.keys.div_ceil(ROWS);
            let of = |lanes| ProductSizes { terms: sizes.terms, chunks, rows, lanes };
            let operands = (from.weights().skip(chunk, 0), own.d_out_rows().skip(chunk, 0));
            let to = Sums::rows(to_v).accumulate(weighed.place.is_some());
            products[0] = Some(Product::new(of(sizes.v.tiles), operands, to));
            let operands = (from.d_scores().skip(chunk, 0), own.query_rows().skip(chunk, 0));
            let to = Sums::rows(to_k).accumulate(weighed.place.is_some());
            products[1] = Some(Product::new(of(sizes.qk.tiles), operands, to));
        }
        let mut sides = [const { None }; GROUPS];
        for (g, group) in groups.iter_mut().enumerate() {
            let Group { d_q, lse, delta, q, .. } = group;
            let rows = q.rows;
            if let Some(weighed) = weighed
                && (weighed.groups.0..weighed.groups.1).contains(&g)
            {
                let operands = (key_blocks.at(weighed.key_block).transposed, from.transposed(g));
                let (chunks, lanes) = (weighed.keys.div_ceil(WIDTH), rows.count.div_ceil(ROWS));
                let of = ProductSizes { terms: sizes.terms, chunks, rows: sizes.qk.tiles, lanes };
                let to = Sums::lanes(d_q, 0).accumulate(true);
                products[2 + g] = Some(Product::new(of, operands, to));
            }
            if let Some((next, visible)) = next
                && (next.groups.0..next.groups.1).contains(&g)
            {
                sides[g] = Some(Side {
                    queries: own.queries(g),
                    d_out: own.d_out(g),
                    visible: &visible[g],
                    lse,
                    delta,
                    count: rows.count,
                });
            }
        }
        let key_block = next.map(|(next, _)| (key_blocks.at(next.key_block), next.keys));
        let make = key_block.map(|(key_block, n)| {
            let (keys, values) =
                ((key_block.keys, sizes.qk.chunks), (key_block.values, sizes.v.chunks));
            let from = Source { s, keys, values, n, sides, factor: self.factor, ahead };
            Make { from, blocks, to }
        });
        let steps = Steps { t, products, at: 0 };
        with_terms!(sizes.terms, TERMS => s.call(Pipelined::<TERMS> { steps, make }));
    }

    /// A key block and a group of a problem that is not plain: all in a row, but for the last products.
    fn step(
        &mut self,
        key_block: &KeyBlock,
        (next, g): (Waiting, usize),
        visible: &mut [RowMask; BLOCK_KEYS],
    ) {
        let Self { isa, s, t, scope, grads, scratch, factor, .. } = self;
        let (isa, s, problem, n) = (*isa, *s, grads.problem, next.keys);
        let rows = grads.groups[g].q.rows;
        let span = Span::first(rows.count);
        let AmxBackwardScratch { sizes, key_blocks, rows: own, operands, .. } = &mut **scratch;
        let packed = key_blocks.at(next.key_block);
        let (key_tiles, lanes) = (n.div_ceil(ROWS), rows.count.div_ceil(ROWS));
        let of = |chunks| ProductSizes { terms: sizes.terms, chunks, rows: key_tiles, lanes };
        let (keys, values) = ((packed.keys, own.queries(g)), (packed.values, own.d_out(g)));
        let to = Sums::lanes(grads.tiles.weights, 0);
        Product::new(of(sizes.qk.chunks), keys, to).run(t);
        let to = Sums::lanes(grads.tiles.d_scores, 0);
        Product::new(of(sizes.v.chunks), values, to).run(t);
        let at = At { scope: *scope, rows, span, keys: key_block.keys() };
        let scores = &mut grads.tiles.weights[..n];
        scale_lanes(isa, scores, &Lanes([*factor; GROUP]), span);
        problem.apply(isa, at, scores, Some(&mut *grads.tiles.derivatives));
        if !key_block.full || problem.may_hide() {
            apply_mask(isa, scores, &mut visible[..n], span);
        }
        let tile = MaskedTile { at, n, visible: Some(&visible[..n]) };
        grads.groups[g].exp_and_sum(isa, problem, tile, &mut grads.tiles);
        grads.backward(isa, g, tile);
        let (weights, d_scores) = (&grads.tiles.weights[..n], &grads.tiles.d_scores[..n]);
        let (group, count, to) = (g, rows.count, &mut operands[next.buffer]);
        let pack = PackScores { weights, d_scores, group, count, to };
        with_terms!(sizes.terms, TERMS => s.call(SplitScores::<TERMS>(s, pack)));
    }

    /// Adds the gradients of gathered keys to those of the task.
    fn put_in_place(&mut self, keys: Keys<'_>) {
        let Keys::Gathered(keys) = keys else { return };
        let ([k, v], AddGrads { first, d_k, d_v, .. }) = (&self.scratch.gathered, &mut self.grads);
        for (i, key) in keys.iter().enumerate() {
            for (row, to) in
                [(k.row(i), d_k.row_mut(key - *first)), (v.row(i), d_v.row_mut(key - *first))]
            {
                row.iter().zip(to).for_each(|(x, to)| *to += x);
            }
        }
    }

    /// Adds what was left out of the operands of a key block that is done, for those that see it.
    fn add_non_finite(
        &mut self,
        key_block: &KeyBlock,
        (score_tile, g): (Waiting, usize),
        visible: &[RowMask; BLOCK_KEYS],
    ) {
        let left_out = |non_finite| LeftOut { non_finite, visible, keys: score_tile.keys };
        let non_finite_k = self.scratch.key_blocks.at(score_tile.key_block).non_finite;
        let from = &self.scratch.operands[score_tile.buffer];
        let weights = from.weights().skip(g * CHUNKS, 0);
        let d_scores = from.d_scores().skip(g * CHUNKS, 0);
        let AddGrads { groups, first, d_k, d_v, .. } = &mut self.grads;
        let (group, k) = (&mut groups[g], self.inputs.0);
        let keys = (k, key_block.keys());
        let terms = self.scratch.sizes.terms;
        add_non_finite_keys(left_out(non_finite_k), keys, (terms, d_scores), &mut group.d_q);
        let [non_finite_q, non_finite_d_out] = self.scratch.rows.non_finite[g];
        let at = |i| key_block.keys().get(i) - *first;
        let (d_scores, weights) = ((terms, d_scores), (terms, weights));
        add_non_finite_rows(left_out(non_finite_q), &group.q_rows, d_scores, &at, d_k);
        add_non_finite_rows(left_out(non_finite_d_out), &group.d_out_rows, weights, &at, d_v);
    }
}

/// [`Passing::pipelined`], compiled for AVX-512.
struct Overlapped<'a, 't, 'c, 'm>(&'a mut Passing<'t, 'c>, Option<(Waiting, &'m GroupMasks)>);

impl Task<f32> for Overlapped<'_, '_, '_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        self.0.pipelined(self.1);
    }
}

/// The numbers that were left out of the keys because they are not finite, for the rows that see them.
#[inline(never)]
fn add_non_finite_keys(
    left_out: LeftOut<'_>,
    (k, keys): (AnyHead<'_, f32>, Keys<'_>),
    (terms, d_scores): (usize, Operand<'_>),
    d_q: &mut [Lanes<f32>],
) {
    for i in (0..left_out.keys).filter(|i| left_out.holds(*i)) {
        let features = (0..k.dim()).map(|d| k.number(keys.get(i), d));
        for (x, d_q) in features.zip(&mut *d_q).filter(|(x, _)| !x.is_finite()) {
            for row in (0..GROUP).filter(|row| left_out.is_visible(i, *row)) {
                d_q.0[row] += read(terms, d_scores, i, row) * x;
            }
        }
    }
}

/// The numbers that were left out of some rows because they are not finite, for the keys that they see.
#[inline(never)]
fn add_non_finite_rows(
    left_out: LeftOut<'_>,
    rows: &RowBuffer<f32>,
    (terms, from): (usize, Operand<'_>),
    at: &dyn Fn(usize) -> usize,
    to: &mut RowBuffer<f32>,
) {
    for row in (0..GROUP).filter(|row| left_out.holds(*row)) {
        for i in (0..left_out.keys).filter(|i| left_out.is_visible(*i, row)) {
            let by = read(terms, from, i, row);
            let both = rows.row(row).iter().zip(to.row_mut(at(i)));
            both.filter(|(x, _)| !x.is_finite()).for_each(|(x, to)| *to += by * x);
        }
    }
}
