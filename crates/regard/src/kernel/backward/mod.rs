//! The backward pass: forward's, step by step undone, with the weights recomputed from `lse`.
//!
//! A task owns some keys of one key head. Every row that sees them passes by: the tile's weights `a` and the gradients of
//! its scores `d_score` are made in the cache and go into three sums at once,
//!
//! ```text
//! out_i    = sum_j a_ij v_j                d_v_j  += sum_i a_ij d_out_i
//! a_ij     = e^(score_ij - lse_i)          d_score = a_ij (d_out_i . v_j - delta_i),  delta_i = d_out_i . out_i - d_lse_i
//! score_ij = scale q_i . k_j               d_q_i  += scale sum_j d_score_ij k_j
//!                                          d_k_j  += scale sum_i d_score_ij q_i
//! ```
//!
//! so five products for each pair, against forward's two. `d_k` and `d_v` belong to the task alone. `d_q` is the task's
//! too if it owns all keys of its head; else each task leaves its part, and the parts are added in order. No sum ever
//! depends on who came first.
//!
//! Memory of a task: `d_k` and `d_v` of its keys, and a tile.

#[cfg(target_arch = "x86_64")]
mod amx;
mod group;
mod join;

use crate::description::options::OptionsBackward;
use crate::description::problem::Problem;
use crate::description::score::{BiasGrads, Derivatives};
use crate::description::similarity::Similarity;
use crate::kernel::amx::AmxBackwardScratch;
use crate::kernel::block_loop::{BlockLoop, Call, KeyRange, ScoreTile, Tiling, Visit};
use crate::kernel::lanes::store_row;
use crate::kernel::micro::{
    HiddenGrads, Projected, RowBuffer, RowSums, SimilaritiesBackward, Values,
};
use crate::machine::simd::{GROUP, Isa, Lanes, Number};
use crate::tensor::index::{At, BLOCK_KEYS, HeadRows, RowMask, RowTile, Span};
use crate::tensor::view::{self, OutTile, TileMut, View};
pub(crate) use group::Group;
pub(crate) use join::{ByProjection, Join, Parts};
use std::ops::Range;

/// One call: what was computed, and what the loss says of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackwardCall<'c, N: Number> {
    pub(crate) call: Call<'c, N>,
    pub(crate) out: View<'c, N>,
    pub(crate) d_out: View<'c, N>,
    /// `[batch, heads.q, q_len]`, like all that follow.
    pub(crate) lse: &'c [N],
    /// `max` and `sum` of each row; nothing where they are not known.
    pub(crate) states: &'c [[N; 2]],
    pub(crate) d_lse: Option<&'c [N]>,
    /// The entropies and their gradients.
    pub(crate) entropy: Option<[&'c [N]; 2]>,
}

/// Where one head's gradient by its queries goes.
#[derive(Debug)]
pub(crate) struct QueryGrads<'t, N: Number> {
    /// `[batch, heads.q, q_len, q_dim]`
    pub(crate) d_q: OutTile<'t, N>,
    /// `[batch, heads.q, q_len, OPTIONS]`: what each row adds to the gradients of the scale and of the ALiBi slope, and the
    /// gradient of its center.
    pub(crate) options: TileMut<'t, N>,
}

/// Columns that follow the features in a row of the parts of `d_q`: see [`QueryGrads::options`].
pub(crate) const OPTIONS: usize = 3;

/// What one task writes: `d_k`, `d_v` of its keys, and of each of its query heads the sums over those keys.
#[derive(Debug)]
pub(crate) struct Target<'t, N: Number> {
    /// `[batch, heads.kv, k_len, qk_dim]`
    pub(crate) d_k: OutTile<'t, N>,
    /// `[batch, heads.kv, k_len, v_dim]`
    pub(crate) d_v: OutTile<'t, N>,
    /// The rows of all query heads, for a task that finishes them.
    pub(crate) rows: Option<QueryGrads<'t, N>>,
    /// `[items, heads.q x parts, q_len, qk_dim + OPTIONS]`, a part for each way, for a task that does not.
    pub(crate) parts: Vec<TileMut<'t, N>>,
    /// `[batch, heads.q, q_len, 1]`: what each row adds to the gradient of its sink.
    pub(crate) sinks: Option<TileMut<'t, N>>,
    /// `[items, heads.q x parts, 1, buckets + hidden]`: what the task adds to the gradients of the relative bias and of `v`.
    pub(crate) tables: Option<TileMut<'t, f64>>,
    /// `[batch or 1, heads.q or 1, q_len or 1, k_len]`, of the task's keys, or one feature that is the task's.
    pub(crate) bias: Option<TileMut<'t, N>>,
}

/// Memory of one thread, reused from task to task.
#[derive(Debug)]
pub(crate) struct Scratch<N> {
    groups: Vec<Group<N>>,
    /// The weights of a tile, and the gradients of its scores, `[keys][lanes]`.
    weights: Vec<Lanes<N>>,
    d_scores: Vec<Lanes<N>>,
    derivatives: Derivatives<N>,
    /// What the weights of a tile are multiplied by, where they are.
    factors: Vec<Lanes<N>>,
    /// Outputs, or projected gradients, `[features][lanes]`.
    other: Vec<Lanes<N>>,
    block_loop: BlockLoop<N>,
    /// Keys of a tile, where their differences from the queries are needed.
    keys: RowBuffer<N>,
    d_k: RowBuffer<N>,
    d_v: RowBuffer<N>,
    /// For products on tiles.
    amx: Option<AmxBackwardScratch>,
}

impl<N: Number> Scratch<N> {
    /// For tasks of up to `keys` keys, with numbers in so many bf16 terms if their products are made on tiles.
    pub(crate) fn new(
        problem: &Problem<'_, N>,
        rows: usize,
        keys: usize,
        terms: Option<usize>,
    ) -> Self {
        let dims = problem.dims();
        let zeros = |n| vec![Lanes([N::zero(); GROUP]); n];
        let distances = matches!(problem.similarity, Similarity::Distance);
        let groups = rows.min(dims.q_len).div_ceil(GROUP);
        let amx = terms.map(|terms| AmxBackwardScratch::new(terms, dims, groups, keys));
        let (features, rows) = amx.as_ref().map_or((0, keys), |amx| amx.padded(keys));
        Self {
            groups: (0..groups).map(|_| Group::new(problem, features)).collect(),
            weights: zeros(BLOCK_KEYS),
            d_scores: zeros(BLOCK_KEYS),
            derivatives: problem.derivatives(BLOCK_KEYS),
            factors: zeros(if problem.has_factors() { BLOCK_KEYS } else { 0 }),
            other: zeros(dims.v_dim.max(dims.q_dim).max(dims.qk_dim)),
            block_loop: BlockLoop::new(),
            keys: RowBuffer::new(if distances { BLOCK_KEYS } else { 0 }, dims.qk_dim),
            d_k: RowBuffer::new(rows, dims.qk_dim),
            d_v: RowBuffer::new(rows, dims.v_dim),
            amx,
        }
    }
}

/// How the products of the backward pass are made.
pub(crate) trait Products<N: Number> {
    /// Leads a tile of rows over the keys of a task.
    fn block_loop(
        &self,
        isa: Isa,
        pass: TilePass<'_, '_, N>,
        grads: AddGrads<'_, '_, N>,
        scratch: Option<&mut AmxBackwardScratch>,
    );
}

/// A tile of rows and the way it goes.
pub(crate) struct TilePass<'t, 'c, N: Number> {
    pub(crate) block_loop: &'t mut BlockLoop<N>,
    pub(crate) call: Call<'c, N>,
    pub(crate) rows: HeadRows,
    pub(crate) key_range: KeyRange<'t>,
}

/// By vectors.
struct VectorProducts;

impl<N: Number> Products<N> for VectorProducts {
    fn block_loop(
        &self,
        isa: Isa,
        pass: TilePass<'_, '_, N>,
        mut grads: AddGrads<'_, '_, N>,
        _: Option<&mut AmxBackwardScratch>,
    ) {
        let TilePass { block_loop, call, rows, key_range } = pass;
        block_loop.for_each_block(isa, &call, rows, &key_range, &mut grads);
    }
}

/// Some keys of one head, and all rows that see them.
#[derive(Debug)]
pub(crate) struct ByKeys<'t, 'c, N: Number> {
    pub(crate) back: BackwardCall<'c, N>,
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    pub(crate) keys: Range<usize>,
    pub(crate) key_ranges: &'t [(Tiling, KeyRange<'t>)],
    pub(crate) target: Target<'t, N>,
    pub(crate) scratch: &'t mut Scratch<N>,
}

impl<N: Number> ByKeys<'_, '_, N> {
    /// Computes the gradients with the products that the scratch was made for.
    pub(crate) fn run(self, isa: Isa) {
        if let Some(task) = on_amx(isa, self) {
            task.run_by(isa, &VectorProducts);
        }
    }

    fn run_by(mut self, isa: Isa, products: &impl Products<N>) {
        let problem = self.back.call.problem;
        self.scratch.d_k.clear();
        self.scratch.d_v.clear();
        if let Some(amx) = &mut self.scratch.amx {
            amx.clear();
        }
        let heads = problem.dims().heads;
        let served = heads.q / heads.kv;
        for h in 0..served {
            let scope = problem.scope(self.batch, self.kv_head * served + h);
            for key_range in 0..self.key_ranges.len() {
                // Late tiles first, as forward has them.
                let tiling = self.key_ranges[key_range].0;
                for rows in (0..tiling.count()).rev().map(|i| tiling.tile(i)) {
                    if rows.count > 0 {
                        self.pass(isa, products, HeadRows { scope, rows }, key_range);
                    }
                }
            }
        }
        let by_k = N::from_f64(problem.key_grad_factor());
        write_rows(isa, &self.scratch.d_k, by_k, &mut self.target.d_k);
        write_rows(isa, &self.scratch.d_v, N::from_f64(1.0), &mut self.target.d_v);
    }

    /// One tile of rows passes by the keys of the task, those of one of its key ranges.
    fn pass(&mut self, isa: Isa, products: &impl Products<N>, tile: HeadRows, key_range: usize) {
        let HeadRows { scope, rows } = tile;
        let heads = self.back.call.problem.dims().heads;
        let h = scope.head % (heads.q / heads.kv); // among those of the key head
        let Self { back, target, scratch, .. } = self;
        let Scratch {
            groups,
            weights,
            d_scores,
            derivatives,
            factors,
            other,
            block_loop,
            keys,
            d_k,
            d_v,
            amx,
        } = &mut **scratch;
        let groups = &mut groups[..rows.groups()];
        for (g, group) in groups.iter_mut().enumerate() {
            group.start(isa, back, tile.group(g), other);
            if key_range == 0
                && let Some(sinks) = &mut target.sinks
            {
                group.write_sink_grads(&back.call, scope, &mut sinks.part(h, group.q.rows));
            }
        }
        let own_keys = KeyRange { keys: self.keys.clone(), ..self.key_ranges[key_range].1.clone() };
        let grads = AddGrads {
            problem: back.call.problem,
            first: self.keys.start,
            groups: &mut *groups,
            tiles: GradTiles { weights, d_scores, derivatives, factors },
            keys,
            tables: target.tables.as_mut().map_or(&mut [], |tables| tables.update(h, 0)),
            bias: target.bias.as_mut().map(|bias| bias.part(h, bias.rows())),
            d_k,
            d_v,
        };
        let pass = TilePass { block_loop, call: back.call, rows: tile, key_range: own_keys };
        products.block_loop(isa, pass, grads, amx.as_mut());
        for group in groups {
            if let Some(part) = target.parts.get_mut(key_range) {
                group.save(isa, &mut part.part(h, group.q.rows));
            } else if let Some(to) = &mut target.rows {
                group.finish(isa, &back.call, scope, other, &mut to.part(h, group.q.rows));
            }
        }
    }
}

/// Runs a task on AMX, if its scratch was made for that; else gives it back.
#[cfg(target_arch = "x86_64")]
fn on_amx<'t, 'c, N: Number>(isa: Isa, task: ByKeys<'t, 'c, N>) -> Option<ByKeys<'t, 'c, N>> {
    match task.scratch.amx {
        Some(_) => N::on_amx::<ByKeys<'t, 'c, f32>>(isa, task).err(),
        None => Some(task),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn on_amx<T>(_: Isa, task: T) -> Option<T> {
    Some(task)
}

impl<N: Number> QueryGrads<'_, N> {
    fn part(&mut self, h: usize, rows: RowTile) -> QueryGrads<'_, N> {
        QueryGrads { d_q: self.d_q.part(h, rows), options: self.options.part(h, rows) }
    }
}

/// What is made of a tile, `[keys][lanes]`: see [`Scratch`].
pub(crate) struct GradTiles<'t, N> {
    pub(crate) weights: &'t mut [Lanes<N>],
    pub(crate) d_scores: &'t mut [Lanes<N>],
    pub(crate) derivatives: &'t mut Derivatives<N>,
    pub(crate) factors: &'t mut [Lanes<N>],
}

/// A score tile of `n` keys: where it is, and which rows see each key (`None` if all do).
#[derive(Clone, Copy, Debug)]
pub(crate) struct MaskedTile<'t> {
    pub(crate) at: At<'t>,
    pub(crate) n: usize,
    pub(crate) visible: Option<&'t [RowMask]>,
}

impl<'t> MaskedTile<'t> {
    fn of<N>(tile: &'t ScoreTile<'_, N>) -> Self {
        Self { at: tile.at, n: tile.k.len, visible: tile.visible.as_deref() }
    }
}

/// Takes the gradients of each tile.
pub(crate) struct AddGrads<'t, 'c, N: Number> {
    pub(crate) problem: &'c Problem<'c, N>,
    /// The first key of the task.
    pub(crate) first: usize,
    pub(crate) groups: &'t mut [Group<N>],
    pub(crate) tiles: GradTiles<'t, N>,
    keys: &'t mut RowBuffer<N>,
    tables: &'t mut [f64],
    bias: Option<TileMut<'t, N>>,
    pub(crate) d_k: &'t mut RowBuffer<N>,
    pub(crate) d_v: &'t mut RowBuffer<N>,
}

impl<N: Number> AddGrads<'_, '_, N> {
    /// Carries the gradients of the scores of a tile back to those of the products, and to the options on the way.
    pub(crate) fn backward(&mut self, isa: Isa, group: usize, tile: MaskedTile<'_>) {
        let MaskedTile { at, n, visible } = tile;
        if self.problem.is_plain_dot() {
            return;
        }
        let group = &mut self.groups[group];
        let GradTiles { d_scores, derivatives, .. } = &mut self.tiles;
        let biases = BiasGrads {
            slope: &mut group.by_slope,
            table: &mut *self.tables,
            dense: self.bias.as_mut().map(|bias| (bias.part(0, bias.rows()), self.first)),
        };
        let (d_scores, by_scale) = (&mut d_scores[..n], &mut group.by_scale);
        let undo = OptionsBackward { at, visible, d_scores, derivatives, by_scale, biases };
        self.problem.backward(isa, undo);
    }
}

impl<N: Number> Visit<N> for AddGrads<'_, '_, N> {
    fn visit(&mut self, isa: Isa, mut score_tile: ScoreTile<'_, N>) {
        let (n, at) = (score_tile.k.len, score_tile.at);
        self.groups[score_tile.group].differentiate(
            isa,
            self.problem,
            &mut score_tile,
            &mut self.tiles,
        );
        self.backward(isa, score_tile.group, MaskedTile::of(&score_tile));
        let GradTiles { weights, d_scores, .. } = &mut self.tiles;
        let (weights, d_scores) = (&mut weights[..n], &mut d_scores[..n]);
        let group = &mut self.groups[score_tile.group];
        let hidden = score_tile.partial_mask();
        let mut places = [0; BLOCK_KEYS];
        places[..n].iter_mut().enumerate().for_each(|(i, p)| *p = at.keys.get(i) - self.first);
        let sums = TileGrads {
            score_tile: (score_tile.k, hidden.unwrap_or(&[])),
            span: at.span,
            places: &places[..n],
            tiles: (weights, d_scores),
            group,
            keys: self.keys,
            d_k: self.d_k,
            d_v: self.d_v,
        };
        match self.problem.similarity {
            Similarity::Additive(_) => {
                let buckets = self.tables.len() - self.problem.similarity.hidden();
                sums.add_hidden(isa, &mut self.tables[buckets..]);
            }
            Similarity::Distance => sums.add(isa, true),
            _ => sums.add(isa, false),
        }
    }
}

/// A tile with its weights and the gradients of its scores, and the sums they go into.
struct TileGrads<'t, N> {
    /// Its keys, and which rows see each.
    score_tile: (view::Rows<'t, N>, &'t [RowMask]),
    span: Span,
    /// Where each key stands in `d_k` and `d_v`.
    places: &'t [usize],
    tiles: (&'t [Lanes<N>], &'t [Lanes<N>]),
    group: &'t mut Group<N>,
    keys: &'t mut RowBuffer<N>,
    d_k: &'t mut RowBuffer<N>,
    d_v: &'t mut RowBuffer<N>,
}

impl<N: Number> TileGrads<'_, N> {
    /// The three products. With `away`, keys and queries count by their difference from each other.
    fn add(self, isa: Isa, away: bool) {
        let ((k, visible), (weights, d_scores), span) = (self.score_tile, self.tiles, self.span);
        let Group { q, d_q, q_rows, d_out_rows, .. } = self.group;
        let (mut queries, mut keys) = (&[][..], None);
        let all = [RowMask::MAX; BLOCK_KEYS];
        let mut visible = visible;
        if away {
            // Differences are rare: their products are compiled for masked keys alone.
            visible = if visible.is_empty() { &all[..k.len] } else { visible };
            for i in 0..k.len {
                self.keys.row_mut(i)[..k.dim].copy_from_slice(k.row(i));
            }
            (queries, keys) = (&q.lanes, Some(&*self.keys));
        }
        let one = Lanes([N::one(); GROUP]);
        Values { v: k, q: queries, p: d_scores, visible, span, rescale: &one, out: d_q }.add(isa);
        let at = self.places;
        RowSums { tile: d_scores, visible, rows: q_rows, span, keys, at, sums: self.d_k }.add(isa);
        let (rows, sums) = (&*d_out_rows, self.d_v);
        RowSums { tile: weights, visible, rows, span, keys: None, at, sums }.add(isa);
    }

    /// The same where similarities are additive.
    fn add_hidden(self, isa: Isa, by_v: &mut [f64]) {
        let ((k, visible), (weights, d_scores), span) = (self.score_tile, self.tiles, self.span);
        let Group { q, d_q, d_out_rows, .. } = self.group;
        let visible_rows = if visible.is_empty() { None } else { Some(visible) };
        let to = HiddenGrads { d_q, d_k: (self.places, self.d_k), d_v: by_v };
        let (layer, projected) = (&q.layer, Projected { k, q: &q.lanes });
        let d = d_scores;
        SimilaritiesBackward { layer, projected, d, visible: visible_rows, span, to }.add(isa);
        let (rows, at, sums) = (&*d_out_rows, self.places, self.d_v);
        RowSums { tile: weights, visible, rows, span, keys: None, at, sums }.add(isa);
    }
}

/// Writes sums as rows of a gradient.
fn write_rows<N: Number>(isa: Isa, from: &RowBuffer<N>, factor: N, to: &mut OutTile<'_, N>) {
    for i in 0..to.rows().count {
        store_row(isa, from.row(i), factor, (to.as_mut(), 0, i));
    }
}
