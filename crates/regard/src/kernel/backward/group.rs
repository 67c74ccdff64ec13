//! A group of rows on its backward pass: what it brings, what a tile makes of it, what it leaves.

use super::{BackwardCall, GradTiles, MaskedTile, QueryGrads};
use crate::description::problem::Problem;
use crate::description::score::{LOG2_E, in_log2};
use crate::description::similarity::Similarity;
use crate::kernel::block_loop::{Call, ScoreTile};
use crate::kernel::lanes::{
    load_head, load_transposed, multiply_lanes, pack_head, scale_lanes, store_output,
    store_transposed,
};
use crate::kernel::micro::{RowBuffer, dot_tile};
use crate::kernel::project::{Projection, Transpose};
use crate::kernel::queries::Queries;
use crate::kernel::softmax::{LSE_LOSES_BITS, MIN_LOG2_WEIGHT};
use crate::machine::simd::{GROUP, Isa, Lanes, Number, leaf, math};
use crate::tensor::index::{HeadRows, Keys, RowMask, Scope, Span, low};
use crate::tensor::source::rows as head;
use crate::tensor::view::{self, TileMut};

/// A factor so small that what it was multiplied into cannot be had back by division.
const MIN_SCALE: f64 = 1e-20;

/// A group of rows on its way; lanes are `[features][lanes]`.
#[derive(Debug)]
pub(crate) struct Group<N> {
    pub(crate) q: Queries<N>,
    pub(crate) d_out: Vec<Lanes<N>>,
    /// Up to whole tiles of features, where tiles are in use.
    pub(crate) d_q: Vec<Lanes<N>>,
    /// Queries and output gradients once more, as rows.
    pub(crate) q_rows: RowBuffer<N>,
    pub(crate) d_out_rows: RowBuffer<N>,
    /// Times `log2 e`.
    pub(crate) lse: Lanes<N>,
    /// `d_out . out - d_lse`
    pub(crate) delta: Lanes<N>,
    /// The entropies and their gradients.
    pub(crate) entropy: Option<[Lanes<N>; 2]>,
    pub(crate) by_scale: Lanes<N>,
    pub(crate) by_slope: Lanes<N>,
    pub(crate) by_center: Lanes<N>,
}

impl<N: Number> Group<N> {
    /// With sums of so many features, at least.
    pub(super) fn new(problem: &Problem<'_, N>, features: usize) -> Self {
        let dims = problem.dims();
        let (zeros, zero) = (|n| vec![Lanes([N::zero(); GROUP]); n], Lanes([N::zero(); GROUP]));
        Self {
            q: Queries::new(problem),
            d_out: zeros(dims.v_dim),
            d_q: zeros(dims.qk_dim.max(features)),
            q_rows: RowBuffer::new(GROUP, dims.qk_dim),
            d_out_rows: RowBuffer::new(GROUP, dims.v_dim),
            lse: zero,
            delta: zero,
            entropy: None,
            by_scale: zero,
            by_slope: zero,
            by_center: zero,
        }
    }

    /// Queries into lanes, as forward has them; sums to 0.
    pub(super) fn take_queries(
        &mut self,
        isa: Isa,
        call: &Call<'_, N>,
        HeadRows { scope, rows }: HeadRows,
    ) {
        let zero = Lanes([N::zero(); GROUP]);
        self.d_q.fill(zero);
        (self.by_scale, self.by_slope, self.by_center) = (zero, zero, zero);
        let q = call.queries(scope.batch, scope.head);
        self.q.take(isa, call.problem, scope.head, (q, rows));
    }

    /// Takes a group of rows in.
    pub(super) fn start(
        &mut self,
        isa: Isa,
        back: &BackwardCall<'_, N>,
        HeadRows { scope, rows }: HeadRows,
        other: &mut [Lanes<N>],
    ) {
        let BackwardCall { call, out, d_out, lse, states, d_lse, entropy } = *back;
        self.take_queries(isa, &call, HeadRows { scope, rows });
        let [out, d_out] = [out, d_out].map(|x| head(x.any_head(scope.batch, scope.head)));
        // QueryGrads that saw nothing, and lanes without a row, weigh nothing.
        self.lse = Lanes([N::max_value(); GROUP]);
        let index = |i| call.problem.row_index(scope, rows.row(i));
        let mut rests = [N::zero(); GROUP];
        for (i, rest) in rests[..rows.count].iter_mut().enumerate() {
            let row = index(i);
            let large = lse[row].abs() > N::from_f64(LSE_LOSES_BITS) && lse[row].is_finite();
            if let Some([m, l]) = states.get(row).filter(|_| large) {
                (self.lse.0[i], *rest) = (*m, l.ln());
            } else if lse[row] != N::neg_infinity() {
                self.lse.0[i] = in_log2(lse[row]);
            }
        }
        let other = &mut other[..self.d_out.len()];
        load_head(isa, d_out, rows, N::one(), &mut self.d_out);
        load_head(isa, out, rows, N::one(), other);
        pack_head(isa, d_out, rows, &mut self.d_out_rows);
        match call.problem.similarity {
            // Projected queries stand in the lanes alone, times `log2 e`.
            Similarity::General(_) => {
                let unit = N::from_f64(1.0 / LOG2_E);
                for i in 0..rows.count {
                    let row = self.q_rows.row_mut(i).iter_mut();
                    row.zip(&self.q.lanes).for_each(|(x, lanes)| *x = lanes.0[i] * unit);
                }
            }
            // No product needs them as rows.
            Similarity::Additive(_) => {}
            _ => {
                let q = call.queries(scope.batch, scope.head);
                pack_head(isa, q, rows, &mut self.q_rows);
            }
        }
        self.delta = dot_lanes(isa, other, &self.d_out, Span::first(rows.count));
        for i in 0..rows.count {
            let d_lse = d_lse.map_or(N::zero(), |d| d[index(i)]);
            // What a loss says of the output of a row that sees nothing may be anything, and must not reach its sink.
            if self.delta.0[i].is_nan() && is_zero(other, i) {
                self.delta.0[i] = N::zero();
            }
            self.delta.0[i] = self.delta.0[i] - d_lse;
        }
        self.entropy = entropy.map(|both| {
            both.map(|x| Lanes(std::array::from_fn(|i| x[index(i.min(rows.count - 1))])))
        });
        if rests != [N::zero(); GROUP] {
            self.lower_weights(&rests);
        }
        // Any NaN as the one that tiles can round.
        for x in self.lse.0.iter_mut().chain(&mut self.delta.0).filter(|x| x.is_nan()) {
            *x = N::nan();
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

    /// From a tile to its weights, and to the gradients of its scores before a custom rule.
    pub(super) fn differentiate(
        &mut self,
        isa: Isa,
        problem: &Problem<'_, N>,
        score_tile: &mut ScoreTile<'_, N>,
        tiles: &mut GradTiles<'_, N>,
    ) {
        let (n, span) = (score_tile.k.len, score_tile.at.span);
        let (weights, d_scores) = (&mut tiles.weights[..n], &mut tiles.d_scores[..n]);
        score_tile.scores(isa, problem, &mut self.q, weights, Some(&mut *tiles.derivatives));
        dot_tile(isa, (score_tile.v, &self.d_out), span, d_scores);
        self.exp_and_sum(isa, problem, MaskedTile::of(score_tile), tiles);
    }

    /// From the scores of a tile and the gradients of its weights before dropout to what `differentiate` makes.
    pub(crate) fn exp_and_sum(
        &mut self,
        isa: Isa,
        problem: &Problem<'_, N>,
        MaskedTile { at, n, visible }: MaskedTile<'_>,
        tiles: &mut GradTiles<'_, N>,
    ) {
        let GradTiles { weights, d_scores, derivatives, factors } = tiles;
        let factors = match problem.has_factors() {
            true => {
                problem.factors(isa, at, &mut factors[..n]);
                &factors[..n]
            }
            false => &[],
        };
        let centers = problem.centers(at).map(|centers| (centers, at.keys));
        let (weights, d_scores) = (&mut weights[..n], &mut d_scores[..n]);
        let (span, derivatives) = (at.span, &derivatives.custom[..]);
        let work = WeightGrads { centers, span, visible, weights, d_scores, derivatives, factors };
        weight_grads(isa, self, work);
    }

    /// What each row adds to the gradient of its sink, a score whose value is 0.
    pub(super) fn write_sink_grads(
        &self,
        call: &Call<'_, N>,
        scope: Scope,
        to: &mut TileMut<'_, N>,
    ) {
        let sink = call.problem.score.sinks.map_or(N::zero(), |sinks| in_log2(sinks[scope.head]));
        for i in 0..self.q.rows.count {
            let log = sink - self.lse.0[i];
            let by_entropy = self.entropy.as_ref().map_or(N::zero(), |[entropy, d_entropy]| {
                let fall =
                    log.max(N::from_f64(MIN_LOG2_WEIGHT)) * N::from_f64(std::f64::consts::LN_2);
                d_entropy.0[i] * (fall + entropy.0[i])
            });
            let (a, d) = (log.exp2(), self.delta.0[i] + by_entropy);
            to.row(0, i)[0].write(if a == N::zero() { a } else { -a * d });
        }
    }

    /// Leaves a part of the sums.
    pub(super) fn save(&self, isa: Isa, to: &mut TileMut<'_, N>) {
        let features = self.q.lanes.len();
        store_transposed(isa, &self.d_q[..features], self.q.rows.count, 0, (to, 0));
        self.write_options(to, features);
    }

    /// Writes what each row adds to the gradients of the options, from a column on.
    fn write_options(&self, to: &mut TileMut<'_, N>, first: usize) {
        for i in 0..self.q.rows.count {
            let options = &mut to.row(0, i)[first..];
            options[0].write(self.by_scale.0[i]);
            options[1].write(self.by_slope.0[i]);
            options[2].write(self.by_center.0[i]);
        }
    }

    /// Takes a part of the sums back in, after those before it.
    pub(super) fn add(&mut self, isa: Isa, from: view::Rows<'_, N>, other: &mut [Lanes<N>]) {
        let rows = self.q.rows;
        let other = &mut other[..self.q.lanes.len()];
        load_transposed(isa, |i| from.row(rows.row(i)), rows.count, N::one(), other);
        for (sum, other) in self.d_q.iter_mut().zip(other) {
            sum.0.iter_mut().zip(&other.0).for_each(|(sum, x)| *sum = *sum + *x);
        }
        for i in 0..self.q.rows.count {
            let options = &from.row(rows.row(i))[self.q.lanes.len()..];
            self.by_scale.0[i] = self.by_scale.0[i] + options[0];
            self.by_slope.0[i] = self.by_slope.0[i] + options[1];
            self.by_center.0[i] = self.by_center.0[i] + options[2];
        }
    }

    /// Carries the sums through the projection and the scale, and writes them as rows.
    pub(super) fn finish(
        &mut self,
        isa: Isa,
        call: &Call<'_, N>,
        scope: Scope,
        other: &mut [Lanes<N>],
        to: &mut QueryGrads<'_, N>,
    ) {
        let (problem, rows) = (call.problem, self.q.rows);
        let span = Span::first(rows.count);
        let features = self.q.lanes.len();
        let (mut q, mut d_q) = (&mut self.q.lanes, &mut self.d_q[..features]);
        if let Some(w) = problem.similarity.of_queries() {
            // projected = W^T q
            let w = head(w.serving_head(0, scope.head));
            let projection = Projection { w, direction: Transpose::No };
            projection.multiply(isa, (d_q, rows.count), &mut Vec::new(), other);
            (q, d_q) = (&mut self.q.raw, &mut other[..w.len()]);
        }
        // score = scale * similarity, which is linear in q more often than not.
        let mut unit = problem.query_factor();
        if unit.abs() < MIN_SCALE {
            let given = call.queries(scope.batch, scope.head);
            load_head(isa, given, rows, N::one(), q);
            unit = 1.0;
        }
        // A query of a row that sees nothing may hold anything: its gradient is 0, and so is what it says of the scale.
        for i in (0..rows.count).filter(|i| is_zero(d_q, *i)) {
            q.iter_mut().for_each(|q| q.0[i] = N::zero());
        }
        if problem.similarity.is_linear() {
            let unit = N::from_f64(1.0 / unit);
            self.by_scale = Lanes(dot_lanes(isa, q, d_q, span).0.map(|x| x * unit));
        }
        let factor = Lanes([N::from_f64(problem.query_grad_factor()); GROUP]);
        scale_lanes(isa, d_q, &factor, span);
        store_output(isa, d_q, rows.count, 0, (&mut to.d_q, 0));
        self.write_options(&mut to.options, 0);
    }
}

/// The operands of [`weight_grads`].
struct WeightGrads<'t, N> {
    /// Of local attention: the centers, and which keys they are.
    centers: Option<(Lanes<N>, Keys<'t>)>,
    span: Span,
    visible: Option<&'t [RowMask]>,
    weights: &'t mut [Lanes<N>],
    d_scores: &'t mut [Lanes<N>],
    /// Of a custom rule, and of a sparsemax; empty where there is none.
    derivatives: &'t [Lanes<N>],
    /// What weights are multiplied by; empty where they are not.
    factors: &'t [Lanes<N>],
}

leaf! {
    /// Scores into weights, and gradients of weights into those of scores.
    fn weight_grads<'t, N>(s: S, group: &'t mut Group<N>, work: WeightGrads<'t, N>) {
        let WeightGrads { centers, span, visible, weights, d_scores, derivatives, factors } = work;
        multiply_lanes(s, d_scores, factors, span);
        let (zero, ln_2) = (s.splat(N::zero()), s.splat(N::from_f64(std::f64::consts::LN_2)));
        let everyone = span.set();
        for (i, (weights, d_scores)) in weights.iter_mut().zip(d_scores).enumerate() {
            for lane in span.vectors::<N, S>() {
                let visible = s.lanes(low(visible.map_or(everyone, |visible| visible[i]) >> lane));
                let x = s.sub(s.load(&weights.0[lane..]), s.load(&group.lse.0[lane..]));
                let a = s.select(visible, math::weight(s, x), zero);
                let d_factored = s.load(&d_scores.0[lane..]);
                if let Some((centers, keys)) = &centers {
                    // factor = e^(-(key - p)^2 / (2 s^2)): grows by (key - p) / s^2 as p does.
                    let far = s.sub(s.splat(N::of_len(keys.get(i))), s.load(&centers.0[lane..]));
                    let sum = &mut group.by_center.0[lane..];
                    s.store(s.fma_where(visible, s.mul(a, d_factored), far, s.load(sum)), sum);
                }
                let mut d_a = s.sub(d_factored, s.load(&group.delta.0[lane..]));
                if let Some([entropy, d_entropy]) = &group.entropy {
                    // entropy = -sum of a ln a: falls by (ln a + entropy) where a score rises.
                    let log = s.max(x, s.splat(N::from_f64(MIN_LOG2_WEIGHT)));
                    let fall = s.fma(log, ln_2, s.load(&entropy.0[lane..]));
                    d_a = s.sub(d_a, s.mul(s.load(&d_entropy.0[lane..]), fall));
                }
                let mut d = s.mul(a, d_a);
                if let Some(derivative) = derivatives.get(i) {
                    d = s.mul(d, s.load(&derivative.0[lane..]));
                }
                s.store(a, &mut weights.0[lane..]);
                s.store(s.select(visible, d, zero), &mut d_scores.0[lane..]);
            }
        }
        multiply_lanes(s, weights, factors, span);
    }
}

leaf! {
    /// The dot products of the rows of two groups, lane by lane; 0 outside the span.
    fn dot_lanes<'t, N>(s: S, a: &'t [Lanes<N>], b: &'t [Lanes<N>], span: Span) -> Lanes<N> {
        let mut dots = Lanes([N::zero(); GROUP]);
        for lane in span.vectors::<N, S>() {
            let mut dot = s.splat(N::zero());
            for (a, b) in a.iter().zip(b) {
                dot = s.fma(s.load(&a.0[lane..]), s.load(&b.0[lane..]), dot);
            }
            s.store(dot, &mut dots.0[lane..]);
        }
        dots
    }
}

/// Whether all features of one row are 0.
#[inline(always)]
fn is_zero<N: Number>(lanes: &[Lanes<N>], row: usize) -> bool {
    lanes.iter().all(|x| x.0[row] == N::zero())
}
