//! A group of rows on its way over the keys: the step that is the heart of it.
//!
//! Cost of a step of `n` keys: `2 n 64 (qk_dim + v_dim)` flops in two products, one pass over `n x 64` numbers for each option that is
//! on, and one power for each pair.

use crate::description::problem::Problem;
use crate::kernel::block_loop::{ScoreTile, Visit};
use crate::kernel::lanes::{multiply_tile, scale_lanes};
use crate::kernel::micro::Values;
use crate::kernel::queries::Queries;
use crate::kernel::softmax::{SoftmaxTile, States, TileSums, exp_and_sum, update_max};
use crate::machine::simd::{GROUP, Isa, Lanes, Number};
use crate::tensor::index::Span;

/// A group of rows: queries, states and sums, `[features][lanes]`.
#[derive(Debug)]
pub(crate) struct Group<N> {
    pub(crate) q: Queries<N>,
    pub(crate) states: States<N>,
    /// Up to whole tiles of features, where tiles are in use.
    pub(crate) sums: Vec<Lanes<N>>,
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
        let softmax_tile = SoftmaxTile { keys: tile.len(), lanes: tile, span };
        let rescale = self.states.weigh(isa, softmax_tile, problem.entropy, |tile| {
            score_tile.scores(isa, problem, &mut self.q, tile, None);
        });
        if problem.has_factors() {
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
        // It is no score of a key.
        let most = self.states.true_max;
        exp_and_sum(isa, &mut self.states, &mut tile, span, &mut TileSums::new(entropy), true);
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
