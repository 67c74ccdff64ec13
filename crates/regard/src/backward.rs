//! The backward walk: forward's, step by step undone, with the weights recomputed from `lse`.
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

use crate::cells::{CELL, Cell, lanes_of};
use crate::element::{Element, Number};
use crate::lanes::{fetch, multiply, pack, turn, turn_back, turn_queries};
use crate::mask::{RowTile, Scope};
use crate::micro::{Dots, Packed, ScoreGrads, Seen, Weights, add_rows, add_values, dot_tile, low};
use crate::problem::Problem;
use crate::score::{LOG2_E, Similarity, Slopes, in_log2};
use crate::simd::{GROUP, Lanes, Simd, Span, Task, math};
use crate::softmax::{FAR, LARGE, TileSums};
use crate::view::{self, TileMut, View};
use crate::walk::{Call, Piece, Tiling, Visit, Walk, Way};
use std::ops::Range;

/// A factor so small that what it was multiplied into cannot be had back by division.
const TINY: f64 = 1e-20;

/// One call: what was computed, and what the loss says of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Back<'c, E: Element> {
    pub(crate) call: Call<'c, E>,
    pub(crate) out: View<'c, E>,
    pub(crate) d_out: View<'c, E>,
    /// `[batch, heads.q, q_len]`, like all that follow.
    pub(crate) lse: &'c [E::Num],
    /// `m` and `l` of each row; nothing where they are not known.
    pub(crate) states: &'c [[E::Num; 2]],
    pub(crate) d_lse: Option<&'c [E::Num]>,
    /// The entropies and their gradients.
    pub(crate) entropy: Option<[&'c [E::Num]; 2]>,
}

/// Where one head's gradient by its queries goes.
#[derive(Debug)]
pub(crate) struct Rows<'t, E: Element> {
    /// `[batch, heads.q, q_len, q_dim]`
    pub(crate) d_q: TileMut<'t, E>,
    /// `[batch, heads.q, q_len, 2]`: what each row adds to the gradients of the scale and of the ALiBi slope.
    pub(crate) options: TileMut<'t, E::Num>,
}

/// Columns that follow the features in a row of the parts of `d_q`: see [`Rows::options`].
pub(crate) const OPTIONS: usize = 2;

/// What one task writes: `d_k`, `d_v` of its keys, and of each of its query heads the sums over those keys.
#[derive(Debug)]
pub(crate) struct Target<'t, E: Element> {
    /// `[batch, heads.kv, k_len, qk_dim]`
    pub(crate) d_k: TileMut<'t, E>,
    /// `[batch, heads.kv, k_len, v_dim]`
    pub(crate) d_v: TileMut<'t, E>,
    /// The rows of all query heads, for a task that finishes them.
    pub(crate) rows: Option<Rows<'t, E>>,
    /// `[items, heads.q x parts, q_len, qk_dim + OPTIONS]`, a part for each way, for a task that does not.
    pub(crate) parts: Vec<TileMut<'t, E::Num>>,
    /// `[batch, heads.q, q_len, 1]`: what each row adds to the gradient of its sink.
    pub(crate) sinks: Option<TileMut<'t, E::Num>>,
    /// `[items, heads.q x parts, 1, buckets]`
    pub(crate) relative: Option<TileMut<'t, f64>>,
    /// `[batch or 1, heads.q or 1, q_len or 1, k_len]`, of the task's keys, or one feature that is the task's.
    pub(crate) bias: Option<TileMut<'t, E::Num>>,
}

/// Memory of one thread, reused from task to task.
#[derive(Debug)]
pub(crate) struct Scratch<N> {
    groups: Vec<Group<N>>,
    /// The weights of a piece, and the gradients of its scores, `[keys][lanes]`.
    weights: Vec<Lanes<N>>,
    d_scores: Vec<Lanes<N>>,
    slopes: Slopes<N>,
    /// What dropout multiplies a piece by, where there is dropout.
    factors: Vec<Lanes<N>>,
    /// Outputs, or projected gradients, `[features][lanes]`.
    other: Vec<Lanes<N>>,
    walk: Walk<N>,
    /// Keys of a piece, where their differences from the queries are needed.
    keys: Packed<N>,
    d_k: Packed<N>,
    d_v: Packed<N>,
}

/// A group of rows on its way; lanes are `[features][lanes]`.
#[derive(Debug)]
struct Group<N> {
    rows: RowTile,
    /// Queries as given, when they are projected, and as they meet the keys.
    raw: Vec<Lanes<N>>,
    q: Vec<Lanes<N>>,
    d_out: Vec<Lanes<N>>,
    d_q: Vec<Lanes<N>>,
    /// Queries and output gradients once more, as rows.
    q_rows: Packed<N>,
    d_out_rows: Packed<N>,
    /// Times `log2 e`.
    lse: Lanes<N>,
    /// `d_out . out - d_lse`
    delta: Lanes<N>,
    /// The entropies and their gradients.
    entropy: Option<[Lanes<N>; 2]>,
    by_scale: Lanes<N>,
    by_slope: Lanes<N>,
}

impl<N: Number> Scratch<N> {
    /// For tasks of up to `keys` keys.
    pub(crate) fn new<E: Element<Num = N>>(
        problem: &Problem<'_, E>,
        rows: usize,
        keys: usize,
    ) -> Self {
        let dims = problem.dims();
        let zeros = |n| vec![Lanes([N::zero(); GROUP]); n];
        let zero = Lanes([N::zero(); GROUP]);
        let projects = matches!(problem.similarity, Similarity::General(_));
        let group = || Group {
            rows: RowTile { first: 0, step: 1, count: 0 },
            raw: zeros(if projects { dims.q_dim } else { 0 }),
            q: zeros(dims.qk_dim),
            d_out: zeros(dims.v_dim),
            d_q: zeros(dims.qk_dim),
            q_rows: Packed::new(GROUP, dims.qk_dim),
            d_out_rows: Packed::new(GROUP, dims.v_dim),
            lse: zero,
            delta: zero,
            entropy: None,
            by_scale: zero,
            by_slope: zero,
        };
        let distances = matches!(problem.similarity, Similarity::Distance);
        Self {
            groups: (0..rows.min(dims.q_len).div_ceil(GROUP)).map(|_| group()).collect(),
            weights: zeros(CELL),
            d_scores: zeros(CELL),
            slopes: Slopes::new(problem, CELL),
            factors: zeros(if problem.dropout.is_some() { CELL } else { 0 }),
            other: zeros(dims.v_dim.max(dims.q_dim).max(dims.qk_dim)),
            walk: Walk::new(),
            keys: Packed::new(if distances { CELL } else { 0 }, dims.qk_dim),
            d_k: Packed::new(keys, dims.qk_dim),
            d_v: Packed::new(keys, dims.v_dim),
        }
    }
}

/// A task of the way back.
#[expect(clippy::large_enum_variant, reason = "made once for each task, and never kept")]
#[derive(Debug)]
pub enum Backward<'t, 'c, E: Element> {
    /// The gradients of some keys and values, and what they say of the queries.
    Keys(ByKeys<'t, 'c, E>),
    /// The gradients of some queries, from what the keys have said.
    Join(Join<'t, 'c, E>),
    /// The gradient of W.
    Projection(ByProjection<'t, 'c, E>),
}

impl<E: Element> Task<E::Num> for Backward<'_, '_, E> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<E::Num>>(self, s: S) {
        match self {
            Self::Keys(task) => task.run(s),
            Self::Join(task) => task.run(s),
            Self::Projection(task) => task.run(s),
        }
    }
}

/// Some keys of one head, and all rows that see them.
#[derive(Debug)]
pub struct ByKeys<'t, 'c, E: Element> {
    pub(crate) back: Back<'c, E>,
    pub(crate) batch: usize,
    pub(crate) kv_head: usize,
    pub(crate) keys: Range<usize>,
    pub(crate) ways: &'t [(Tiling, Way<'t>)],
    pub(crate) target: Target<'t, E>,
    pub(crate) scratch: &'t mut Scratch<E::Num>,
}

impl<E: Element> ByKeys<'_, '_, E> {
    #[inline(always)]
    fn run<S: Simd<E::Num>>(mut self, s: S) {
        let problem = self.back.call.problem;
        self.scratch.d_k.clear();
        self.scratch.d_v.clear();
        let heads = problem.dims().heads;
        let served = heads.q / heads.kv;
        for h in 0..served {
            let scope = problem.scope(self.batch, self.kv_head * served + h);
            for way in 0..self.ways.len() {
                // Late tiles first, as forward has them.
                let tiling = self.ways[way].0;
                for rows in (0..tiling.count()).rev().map(|i| tiling.tile(i)) {
                    if rows.count > 0 {
                        self.pass(s, (scope, h), way, rows);
                    }
                }
            }
        }
        let by_k = E::Num::from_f64(problem.key_grad_factor());
        write_rows(&self.scratch.d_k, by_k, &mut self.target.d_k);
        write_rows(&self.scratch.d_v, E::Num::from_f64(1.0), &mut self.target.d_v);
    }

    /// One tile of rows passes by the keys.
    #[inline(always)]
    fn pass<S: Simd<E::Num>>(
        &mut self,
        s: S,
        (scope, h): (Scope, usize),
        way: usize,
        rows: RowTile,
    ) {
        let Self { back, target, scratch, .. } = self;
        let Scratch { groups, weights, d_scores, slopes, factors, other, walk, keys, d_k, d_v } =
            &mut **scratch;
        let groups = &mut groups[..rows.groups()];
        for (g, group) in groups.iter_mut().enumerate() {
            group.start(s, back, (scope, rows.group(g)), other);
            if way == 0
                && let Some(sinks) = &mut target.sinks
            {
                group.write_sink_grads(&back.call, scope, &mut sinks.part(h, group.rows));
            }
        }
        let way_here = Way { keys: self.keys.clone(), ..self.ways[way].1.clone() };
        let mut visitor = Undoing {
            problem: back.call.problem,
            first: self.keys.start,
            groups,
            tiles: Tiles { weights, d_scores, slopes, factors },
            keys,
            relative: target.relative.as_mut().map(|r| r.update(h, 0)),
            bias: target.bias.as_mut().map(|bias| bias.part(h, bias.rows())),
            d_k,
            d_v,
        };
        walk.lead(s, &back.call, (scope, rows), &way_here, &mut visitor);
        for group in groups {
            if let Some(part) = target.parts.get_mut(way) {
                group.save(s, &mut part.part(h, group.rows));
            } else if let Some(to) = &mut target.rows {
                group.finish(s, &back.call, scope, other, &mut to.part(h, group.rows));
            }
        }
    }
}

impl<E: Element> Rows<'_, E> {
    fn part(&mut self, h: usize, rows: RowTile) -> Rows<'_, E> {
        Rows { d_q: self.d_q.part(h, rows), options: self.options.part(h, rows) }
    }
}

/// What is made of a piece, `[keys][lanes]`: see [`Scratch`].
struct Tiles<'t, N> {
    weights: &'t mut [Lanes<N>],
    d_scores: &'t mut [Lanes<N>],
    slopes: &'t mut Slopes<N>,
    factors: &'t mut [Lanes<N>],
}

/// Takes the gradients of each piece.
struct Undoing<'t, 'c, E: Element> {
    problem: &'c Problem<'c, E>,
    /// The first key of the task.
    first: usize,
    groups: &'t mut [Group<E::Num>],
    tiles: Tiles<'t, E::Num>,
    keys: &'t mut Packed<E::Num>,
    relative: Option<&'t mut [f64]>,
    bias: Option<TileMut<'t, E::Num>>,
    d_k: &'t mut Packed<E::Num>,
    d_v: &'t mut Packed<E::Num>,
}

impl<E: Element> Visit<E::Num> for Undoing<'_, '_, E> {
    #[inline(always)]
    fn visit<S: Simd<E::Num>>(&mut self, s: S, mut piece: Piece<'_, E::Num>) {
        let (n, at) = (piece.k.len, piece.at);
        let group = &mut self.groups[piece.group];
        group.differentiate(s, self.problem, &mut piece, &mut self.tiles);
        let Tiles { weights, d_scores, slopes, .. } = &mut self.tiles;
        let (weights, d_scores) = (&mut weights[..n], &mut d_scores[..n]);
        let seen = piece.seen.as_deref();
        let (by_slope, by_scale) = (&mut group.by_slope, &mut group.by_scale);
        self.problem.add_bias_grads(s, at, d_scores, by_slope, self.relative.as_deref_mut());
        if let Some(bias) = &mut self.bias {
            self.problem.add_dense_bias_grads(s, (at, self.first), d_scores, bias);
        }
        self.problem.undo_softcap(s, (at, seen), d_scores, slopes, by_scale);

        let everyone = lanes_of(at.span);
        let hidden = seen.filter(|seen| seen.iter().any(|s| s & everyone != everyone));
        let mut places = [0; CELL];
        places[..n].iter_mut().enumerate().for_each(|(i, p)| *p = at.keys.get(i) - self.first);
        let products = Products {
            piece: (piece.k, hidden.unwrap_or(&[])),
            span: at.span,
            places: &places[..n],
            tiles: (weights, d_scores),
            group,
            keys: self.keys,
            d_k: self.d_k,
            d_v: self.d_v,
        };
        match (self.problem.similarity, hidden) {
            (Similarity::Distance, None) => products.add::<S, false, true>(s),
            (Similarity::Distance, Some(_)) => products.add::<S, true, true>(s),
            (_, None) => products.add::<S, false, false>(s),
            (_, Some(_)) => products.add::<S, true, false>(s),
        }
    }
}

/// A piece with its weights and the gradients of its scores, and the sums they go into.
struct Products<'t, N> {
    /// Its keys, and which rows see each.
    piece: (view::Rows<'t, N>, &'t [Seen]),
    span: Span,
    /// Where each key stands in `d_k` and `d_v`.
    places: &'t [usize],
    tiles: (&'t [Lanes<N>], &'t [Lanes<N>]),
    group: &'t mut Group<N>,
    keys: &'t mut Packed<N>,
    d_k: &'t mut Packed<N>,
    d_v: &'t mut Packed<N>,
}

impl<N: Number> Products<'_, N> {
    /// The three products. With `AWAY`, keys and queries count by their difference from each other.
    #[inline(always)]
    fn add<S: Simd<N>, const HIDDEN: bool, const AWAY: bool>(self, s: S) {
        let ((k, seen), (weights, d_scores), span) = (self.piece, self.tiles, self.span);
        let Group { q, d_q, q_rows, d_out_rows, .. } = self.group;
        if AWAY {
            pack(|i| k.row(i), k.len, self.keys);
        }
        let one = Lanes([N::one(); GROUP]);
        add_values::<_, S, HIDDEN, AWAY>(s, (k, q), (d_scores, seen), span, (&one, d_q));
        let (d_k, d_v) = ((self.places, self.d_k), (self.places, self.d_v));
        let keys = &*self.keys;
        add_rows::<_, S, HIDDEN, AWAY>(s, (d_scores, seen), (q_rows, span), keys, d_k);
        add_rows::<_, S, HIDDEN, false>(s, (weights, seen), (d_out_rows, span), keys, d_v);
    }
}

impl<N: Number> Group<N> {
    /// Queries into lanes, as forward has them.
    #[inline(always)]
    fn take_queries<E: Element<Num = N>, S: Simd<N>>(
        &mut self,
        s: S,
        call: &Call<'_, E>,
        (scope, rows): (Scope, RowTile),
    ) {
        self.rows = rows;
        let q = call.q.head(scope.batch, scope.head);
        turn_queries(s, call.problem, scope.head, (q, rows), &mut self.raw, &mut self.q);
    }

    /// Takes a group of rows in.
    #[inline(always)]
    fn start<E: Element<Num = N>, S: Simd<N>>(
        &mut self,
        s: S,
        back: &Back<'_, E>,
        (scope, rows): (Scope, RowTile),
        other: &mut [Lanes<N>],
    ) {
        let Back { call, out, d_out, lse, states, d_lse, entropy } = *back;
        self.take_queries(s, &call, (scope, rows));
        let (out, d_out) = (out.head(scope.batch, scope.head), d_out.head(scope.batch, scope.head));
        // Rows that saw nothing, and lanes without a row, weigh nothing.
        self.lse = Lanes([N::max_value(); GROUP]);
        let first = call.problem.first_row(scope);
        let mut rests = [N::zero(); GROUP];
        for (i, rest) in rests[..rows.count].iter_mut().enumerate() {
            let row = first + rows.row(i);
            let large = lse[row].abs() > N::from_f64(LARGE) && lse[row].is_finite();
            if let Some([m, l]) = states.get(row).filter(|_| large) {
                (self.lse.0[i], *rest) = (*m, l.ln());
            } else if lse[row] != N::neg_infinity() {
                self.lse.0[i] = in_log2(lse[row]);
            }
        }
        let other = &mut other[..self.d_out.len()];
        turn(s, |i| d_out.row(rows.row(i)), rows.count, N::one(), &mut self.d_out);
        turn(s, |i| out.row(rows.row(i)), rows.count, N::one(), other);
        pack(|i| d_out.row(rows.row(i)), rows.count, &mut self.d_out_rows);
        if let Similarity::General(_) = call.problem.similarity {
            // Projected queries stand in the lanes alone, times `log2 e`.
            let unit = N::from_f64(1.0 / LOG2_E);
            for i in 0..rows.count {
                let row = self.q_rows.row_mut(i).iter_mut();
                row.zip(&self.q).for_each(|(x, lanes)| *x = lanes.0[i] * unit);
            }
        } else {
            let q = call.q.head(scope.batch, scope.head);
            pack(|i| q.row(rows.row(i)), rows.count, &mut self.q_rows);
        }
        let zero = Lanes([N::zero(); GROUP]);
        self.d_q.fill(zero);
        (self.by_scale, self.by_slope, self.delta) = (zero, zero, zero);
        for lane in (Span { start: 0, end: rows.count }).vectors::<N, S>() {
            let mut delta = s.splat(N::zero());
            for (out, d_out) in other.iter().zip(&self.d_out) {
                delta = s.fma(s.load(&out.0[lane..]), s.load(&d_out.0[lane..]), delta);
            }
            s.store(delta, &mut self.delta.0[lane..]);
        }
        for i in 0..rows.count {
            let d_lse = d_lse.map_or(N::zero(), |d| d[first + rows.row(i)]);
            // What a loss says of the output of a row that sees nothing may be anything, and must not reach its sink.
            if self.delta.0[i].is_nan() && is_zero(other, i) {
                self.delta.0[i] = N::zero();
            }
            self.delta.0[i] = self.delta.0[i] - d_lse;
        }
        self.entropy = entropy.map(|both| {
            both.map(|x| Lanes(std::array::from_fn(|i| x[first + rows.row(i.min(rows.count - 1))])))
        });
        if rests != [N::zero(); GROUP] {
            self.lower_weights(&rests);
        }
    }

    /// Lowers the logarithms of all weights of each row: done to the gradients, each of which meets a weight once.
    fn lower_weights(&mut self, rests: &[N; GROUP]) {
        let Self { d_out, d_out_rows, delta, entropy, .. } = self;
        for (i, rest) in rests.iter().enumerate().filter(|(_, rest)| **rest != N::zero()) {
            let share = (-*rest).exp();
            let scale = |x: &mut N| *x = *x * share;
            d_out.iter_mut().chain([&mut *delta]).for_each(|lanes| scale(&mut lanes.0[i]));
            d_out_rows.row_mut(i).iter_mut().for_each(scale);
            if let Some([entropy, d_entropy]) = entropy {
                // Stands beside the logarithm of a weight.
                entropy.0[i] = entropy.0[i] - *rest;
                scale(&mut d_entropy.0[i]);
            }
        }
    }

    /// From a piece to its weights, and to the gradients of its scores before a custom rule.
    #[inline(always)]
    fn differentiate<E: Element<Num = N>, S: Simd<N>>(
        &self,
        s: S,
        problem: &Problem<'_, E>,
        piece: &mut Piece<'_, N>,
        tiles: &mut Tiles<'_, N>,
    ) {
        let (n, span) = (piece.k.len, piece.at.span);
        let (weights, d_scores) = (&mut tiles.weights[..n], &mut tiles.d_scores[..n]);
        let plain = problem.is_plain_dot() && problem.dropout.is_none() && self.entropy.is_none();
        if plain && piece.seen.is_none() {
            let mut then = Weights { m: &self.lse, sums: TileSums::zero(false) };
            dot_tile(s, (piece.k, &self.q), span, weights, &mut then);
            let mut then = ScoreGrads { weights, delta: &self.delta };
            return dot_tile(s, (piece.v, &self.d_out), span, d_scores, &mut then);
        }
        piece.scores(s, problem, &self.q, weights, Some(&mut *tiles.slopes));
        dot_tile(s, (piece.v, &self.d_out), span, d_scores, &mut Dots);
        if let Some(dropout) = problem.dropout {
            dropout.factors(s, piece.at, &mut tiles.factors[..n]);
            multiply(s, (d_scores, tiles.factors), span);
        }
        let (zero, ln_2) = (s.splat(N::zero()), s.splat(N::from_f64(std::f64::consts::LN_2)));
        let (seen, everyone) = (piece.seen.as_deref(), lanes_of(span));
        for (i, (weights, d_scores)) in weights.iter_mut().zip(d_scores).enumerate() {
            for lane in span.vectors::<N, S>() {
                let seen = s.lanes(low(seen.map_or(everyone, |seen| seen[i]) >> lane));
                let x = s.sub(s.load(&weights.0[lane..]), s.load(&self.lse.0[lane..]));
                let a = s.select(seen, math::exp2(s, x), zero);
                let mut d_a = s.sub(s.load(&d_scores.0[lane..]), s.load(&self.delta.0[lane..]));
                if let Some([entropy, d_entropy]) = &self.entropy {
                    // entropy = -sum of a ln a: falls by (ln a + entropy) where a score rises.
                    let log = s.max(x, s.splat(N::from_f64(FAR)));
                    let fall = s.fma(log, ln_2, s.load(&entropy.0[lane..]));
                    d_a = s.sub(d_a, s.mul(s.load(&d_entropy.0[lane..]), fall));
                }
                let mut d = s.mul(a, d_a);
                if let Some(slope) = tiles.slopes.custom.get(i) {
                    d = s.mul(d, s.load(&slope.0[lane..]));
                }
                s.store(a, &mut weights.0[lane..]);
                s.store(s.select(seen, d, zero), &mut d_scores.0[lane..]);
            }
        }
        if problem.dropout.is_some() {
            multiply(s, (weights, tiles.factors), span);
        }
    }

    /// What each row adds to the gradient of its sink, a score whose value is 0.
    fn write_sink_grads<E: Element<Num = N>>(
        &self,
        call: &Call<'_, E>,
        scope: Scope,
        to: &mut TileMut<'_, N>,
    ) {
        let sink = call.problem.score.sinks.map_or(N::zero(), |sinks| in_log2(sinks[scope.head]));
        for i in 0..self.rows.count {
            let log = sink - self.lse.0[i];
            let by_entropy = self.entropy.as_ref().map_or(N::zero(), |[entropy, d_entropy]| {
                let fall = log.max(N::from_f64(FAR)) * N::from_f64(std::f64::consts::LN_2);
                d_entropy.0[i] * (fall + entropy.0[i])
            });
            let (a, d) = (log.exp2(), self.delta.0[i] + by_entropy);
            to.row(0, i)[0].write(if a == N::zero() { a } else { -a * d });
        }
    }

    /// Leaves a part of the sums.
    #[inline(always)]
    fn save<S: Simd<N>>(&self, s: S, to: &mut TileMut<'_, N>) {
        for lane in (0..self.rows.count).step_by(S::LANES) {
            let rows = lane..(lane + S::LANES).min(self.rows.count);
            turn_back(s, &self.d_q, rows, 0, (to, 0));
        }
        for i in 0..self.rows.count {
            let options = &mut to.row(0, i)[self.d_q.len()..];
            options[0].write(self.by_scale.0[i]);
            options[1].write(self.by_slope.0[i]);
        }
    }

    /// Takes a part of the sums back in, after those before it.
    #[inline(always)]
    fn add<S: Simd<N>>(&mut self, s: S, from: view::Rows<'_, N>, other: &mut [Lanes<N>]) {
        let rows = self.rows;
        let other = &mut other[..self.d_q.len()];
        turn(s, |i| from.row(rows.row(i)), rows.count, N::one(), other);
        for (sum, other) in self.d_q.iter_mut().zip(other) {
            for lane in (Span { start: 0, end: self.rows.count }).vectors::<N, S>() {
                let sum = &mut sum.0[lane..];
                s.store(s.add(s.load(sum), s.load(&other.0[lane..])), sum);
            }
        }
        for i in 0..self.rows.count {
            let options = &from.row(rows.row(i))[self.d_q.len()..];
            self.by_scale.0[i] = self.by_scale.0[i] + options[0];
            self.by_slope.0[i] = self.by_slope.0[i] + options[1];
        }
    }

    /// Carries the sums through the projection and the scale, and writes them as rows.
    #[inline(always)]
    fn finish<E: Element<Num = N>, S: Simd<N>>(
        &mut self,
        s: S,
        call: &Call<'_, E>,
        scope: Scope,
        other: &mut [Lanes<N>],
        to: &mut Rows<'_, E>,
    ) {
        let (problem, rows) = (call.problem, self.rows);
        let span = Span { start: 0, end: rows.count };
        let (mut q, mut d_q) = (&mut self.q, &mut self.d_q[..]);
        if let Similarity::General(w) = problem.similarity {
            // projected = W^T q
            let w = w.head(0, if w.shape().heads == 1 { 0 } else { scope.head });
            let (mut packed, mut cell) = (Vec::new(), Cell::new());
            for first in (0..w.len).step_by(CELL) {
                let n = (w.len - first).min(CELL);
                cell.set(first, n);
                let w = fetch(w, &cell, &mut packed);
                dot_tile(s, (w, d_q), span, &mut other[first..first + n], &mut Dots);
            }
            (q, d_q) = (&mut self.raw, &mut other[..w.len]);
        }
        // score = scale * similarity, which is linear in q, unless it is a distance.
        let mut unit = problem.query_factor();
        if unit.abs() < TINY {
            let given = call.q.head(scope.batch, scope.head);
            turn(s, |i| given.row(rows.row(i)), rows.count, N::one(), q);
            unit = 1.0;
        }
        // A query of a row that sees nothing may hold anything: its gradient is 0, and so is what it says of the scale.
        for i in (0..rows.count).filter(|i| is_zero(d_q, *i)) {
            q.iter_mut().for_each(|q| q.0[i] = N::zero());
        }
        let (linear, unit) =
            (!matches!(problem.similarity, Similarity::Distance), s.splat(N::from_f64(1.0 / unit)));
        let factor = s.splat(N::from_f64(problem.query_grad_factor()));
        for lane in span.vectors::<N, S>() {
            let mut by_scale = s.splat(N::zero());
            for (q, d_q) in q.iter().zip(&mut *d_q) {
                let d = s.load(&d_q.0[lane..]);
                by_scale = s.fma(s.load(&q.0[lane..]), d, by_scale);
                s.store(s.mul(d, factor), &mut d_q.0[lane..]);
            }
            if linear {
                s.store(s.mul(by_scale, unit), &mut self.by_scale.0[lane..]);
            }
        }
        for lane in (0..rows.count).step_by(S::LANES) {
            let rows = lane..(lane + S::LANES).min(rows.count);
            turn_back(s, d_q, rows, 0, (&mut to.d_q, 0));
        }
        for i in 0..rows.count {
            let options = to.options.row(0, i);
            options[0].write(self.by_scale.0[i]);
            options[1].write(self.by_slope.0[i]);
        }
    }
}

/// What the tasks of different keys have left of the gradients of queries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts<'t, N> {
    /// `[items, heads.q x parts, q_len, qk_dim + OPTIONS]`
    pub(crate) view: View<'t, N>,
    /// Of each head.
    pub(crate) count: usize,
    /// The item of the batch that is the first here.
    pub(crate) first: usize,
}

impl<'t, N> Parts<'t, N> {
    fn of(self, batch: usize, head: usize) -> impl Iterator<Item = view::Rows<'t, N>> {
        let heads = head * self.count..(head + 1) * self.count;
        heads.map(move |head| self.view.head(batch - self.first, head))
    }
}

/// Adds the parts of some rows of one head, and finishes them.
#[derive(Debug)]
pub struct Join<'t, 'c, E: Element> {
    pub(crate) call: Call<'c, E>,
    pub(crate) scope: Scope,
    pub(crate) rows: RowTile,
    pub(crate) parts: Parts<'t, E::Num>,
    pub(crate) target: Rows<'t, E>,
    pub(crate) scratch: &'t mut Scratch<E::Num>,
}

impl<E: Element> Join<'_, '_, E> {
    #[inline(always)]
    fn run<S: Simd<E::Num>>(mut self, s: S) {
        let Scratch { groups, other, .. } = &mut *self.scratch;
        for (g, group) in groups[..self.rows.groups()].iter_mut().enumerate() {
            let rows = self.rows.group(g);
            group.take_queries(s, &self.call, (self.scope, rows));
            let zero = Lanes([E::Num::default(); GROUP]);
            group.d_q.fill(zero);
            (group.by_scale, group.by_slope) = (zero, zero);
            for part in self.parts.of(self.scope.batch, self.scope.head) {
                group.add(s, part, other);
            }
            group.finish(s, &self.call, self.scope, other, &mut self.target.part(0, rows));
        }
    }
}

/// Some rows of the gradient of one head's W (of all heads', if they share it), from some items.
#[derive(Debug)]
pub struct ByProjection<'t, 'c, E: Element> {
    pub(crate) call: Call<'c, E>,
    pub(crate) items: Range<usize>,
    pub(crate) heads: Range<usize>,
    pub(crate) tiling: Tiling,
    pub(crate) parts: Parts<'t, E::Num>,
    /// Features of the queries, at most `CELL`.
    pub(crate) features: Range<usize>,
    /// Those rows of `[1, heads.q or 1, q_dim, qk_dim]`; what they hold is added to.
    pub(crate) target: TileMut<'t, E::Num>,
    pub(crate) scratch: &'t mut Scratch<E::Num>,
}

impl<E: Element> ByProjection<'_, '_, E> {
    /// projected = W^T q: d_w = sum over rows of q d_projected^T
    #[inline(always)]
    fn run<S: Simd<E::Num>>(mut self, s: S) {
        let Scratch { groups, weights, keys, d_k, .. } = &mut *self.scratch;
        let (q_lanes, packed) = (&mut weights[..self.features.len()], &mut groups[0].q_rows);
        let places: [usize; CELL] = std::array::from_fn(|i| i);
        let dim = self.call.k.shape().dim;
        for i in 0..self.features.len() {
            d_k.row_mut(i)[..dim].copy_from_slice(self.target.update(0, i));
        }
        let factor = E::Num::from_f64(self.call.problem.scale());
        for (b, head) in self.items.flat_map(|b| self.heads.clone().map(move |h| (b, h))) {
            let q = self.call.q.head(b, head);
            for rows in self.tiling.tiles().flat_map(|t| (0..t.groups()).map(move |g| t.group(g))) {
                let row = |i| &q.row(rows.row(i))[self.features.clone()];
                turn(s, row, rows.count, factor, q_lanes);
                for i in 0..rows.count {
                    packed.row_mut(i).fill(E::Num::default());
                    for part in self.parts.of(b, head) {
                        let part = &part.row(rows.row(i))[..dim];
                        packed
                            .row_mut(i)
                            .iter_mut()
                            .zip(part)
                            .for_each(|(sum, x)| *sum = *sum + *x);
                    }
                    // As for the scale: a query of a row that sees nothing may hold anything.
                    if packed.row(i).iter().all(|x| *x == E::Num::default()) {
                        q_lanes.iter_mut().for_each(|q| q.0[i] = E::Num::default());
                    }
                }
                let span = Span { start: 0, end: rows.count };
                let to = (&places[..q_lanes.len()], &mut *d_k);
                add_rows::<_, S, false, false>(s, (q_lanes, &[]), (packed, span), keys, to);
            }
        }
        for i in 0..self.features.len() {
            self.target.update(0, i).copy_from_slice(&d_k.row(i)[..dim]);
        }
    }
}

/// Whether all features of one row are 0.
#[inline(always)]
fn is_zero<N: Number>(lanes: &[Lanes<N>], row: usize) -> bool {
    lanes.iter().all(|x| x.0[row] == N::zero())
}

/// Writes sums as rows of a gradient.
#[inline(always)]
fn write_rows<E: Element>(from: &Packed<E::Num>, factor: E::Num, to: &mut TileMut<'_, E>) {
    for i in 0..to.rows().count {
        for (to, x) in to.row(0, i).iter_mut().zip(from.row(i)) {
            to.write(E::narrow(*x * factor));
        }
    }
}
