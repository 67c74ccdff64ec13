//! A group of rows on its way over the keys: the step that is the heart of it.
//!
//! Cost of a step of `n` keys: `2 n 64 (qk_dim + v_dim)` flops in two products, one pass over `n x 64` numbers for each option that is
//! on, and one power for each pair.

use crate::description::problem::Problem;
use crate::kernel::block_loop::{ScoreTile, Visit};
use crate::kernel::lanes::{multiply_tile, scale_lanes};
use crate::kernel::micro::{Values, Weights, dot_within};
use crate::kernel::queries::Queries;
use crate::kernel::softmax::{States, TileSums, exp_and_sum, update_max};
use crate::machine::simd::{GROUP, Isa, Lanes, Number, leaf};
use crate::tensor::index::Span;
use crate::tensor::view::Rows;

/// A group of rows: queries, states and sums, `[features][lanes]`.
#[derive(Debug)]
pub(crate) struct Group<N> {
    pub(crate) q: Queries<N>,
    pub(crate) states: States<N>,
    /// Up to whole tiles of features, where tiles are in use.
    pub(crate) sums: Vec<Lanes<N>>,
}

leaf! {
    /// The step where scores are dot products, all rows see all keys, and `max` is current: from products to weights in
    /// registers; the values are added if they are given. False if `max` is not current; then nothing is added, and `sums` holds the
    /// sums of the weights, or is infinite in lanes whose `max` is not set yet.
    fn plain_step<'t, N>(
        s: S,
        group: &'t mut Group<N>,
        kv: (Rows<'t, N>, Option<Rows<'t, N>>),
        tile: &'t mut [Lanes<N>],
        span: Span,
        sums: &'t mut Lanes<N>,
    ) -> bool {
        let Group { q, states, sums: out, .. } = group;
        if !S::FUSES || !states.max_is_set(s, span) {
            *sums = states.infinite_where_empty();
            return false;
        }
        let mut weights = Weights { max: &states.max, sum: Lanes([N::zero(); GROUP]) };
        dot_within(s, (kv.0, &q.lanes), span, tile, &mut weights);
        *sums = weights.sum;
        if !states.add_if_current(s, sums, span) {
            return false;
        }
        if let Some(v) = kv.1 {
            let rescale = &Lanes([N::one(); GROUP]);
            Values { v, q: &[], p: tile, visible: &[], span, rescale, out }.add_within(s);
        }
        true
    }
}

/// Adds each tile to the sums of its group.
pub(super) struct Adding<'t, 'c, N: Number> {
    pub(super) problem: &'c Problem<'c, N>,
    pub(super) groups: &'t mut [Group<N>],
    pub(super) tile: &'t mut [Lanes<N>],
    pub(super) factors: &'t mut [Lanes<N>],
}

impl<N: Number> Visit<N> for Adding<'_, '_, N> {
    fn visit(&mut self, isa: Isa, score_tile: ScoreTile<'_, N>) {
        let n = score_tile.k.len;
        let factors = self.factors.get_mut(..n).unwrap_or_default();
        self.groups[score_tile.group].step(
            isa,
            self.problem,
            score_tile,
            (&mut self.tile[..n], factors),
        );
    }
}

impl<N: Number> Group<N> {
    /// One group against one tile of a block: the heart of it all.
    fn step(
        &mut self,
        isa: Isa,
        problem: &Problem<'_, N>,
        mut score_tile: ScoreTile<'_, N>,
        (tile, factors): (&mut [Lanes<N>], &mut [Lanes<N>]),
    ) {
        let span = score_tile.at.span;
        let entropy = problem.entropy;
        let plain = score_tile.visible.is_none() && problem.is_plain_dot() && !entropy;
        let has_factors = problem.has_factors();
        let mut sums = Lanes([N::zero(); GROUP]);
        let mut rescale = None;
        let kv = (score_tile.k, Some(score_tile.v).filter(|_| !has_factors));
        let fused = plain && !self.states.max_is_stale;
        if fused && plain_step(isa, self, kv, tile, span, &mut sums) {
            if !has_factors {
                return;
            }
        } else {
            let sums = if fused { sums } else { self.states.infinite_where_empty() };
            let n = tile.len();
            rescale = self.states.weigh(isa, (tile, n, span), sums, entropy, |tile| {
                score_tile.scores(isa, problem, &mut self.q, tile, None);
            });
        }
        if has_factors {
            problem.factors(isa, score_tile.at, factors);
            multiply_tile(isa, tile, factors, span);
        }
        let rescale = &rescale.unwrap_or(Lanes([N::one(); GROUP]));
        let visible = score_tile.partial_mask().unwrap_or(&[]);
        let (v, out) = (score_tile.v, &mut self.sums[..]);
        Values { v, q: &[], p: tile, visible, span, rescale, out }.add(isa);
    }

    /// Lets a score without a value join every row.
    pub(super) fn add_sink(&mut self, isa: Isa, sink: N, entropy: bool) {
        let span = Span::first(self.q.rows.count);
        let mut tile = [Lanes([sink; GROUP])];
        // Sums that never suffice: `max` becomes the larger of itself and the sink.
        self.update_max(isa, &tile, (&Lanes([N::infinity(); GROUP]), span));
        let mut sums = TileSums::zero(entropy);
        exp_and_sum(isa, &self.states, &mut tile, span, &mut sums);
        // It is no score of a key.
        let most = self.states.true_max;
        self.states.add(&sums, span);
        self.states.true_max = most;
    }

    /// Raises `max` in the lanes whose sums do not suffice, and shrinks what has been added up so far.
    pub(crate) fn update_max(
        &mut self,
        isa: Isa,
        tile: &[Lanes<N>],
        (sums, span): (&Lanes<N>, Span),
    ) {
        let mut rescale = Lanes([N::one(); GROUP]);
        update_max(isa, &mut self.states, tile, sums, span, &mut rescale);
        scale_lanes(isa, &mut self.sums, &rescale, span);
    }
}
