//! A group of rows on its way over the keys: the step that is the heart of it.
//!
//! Cost of a step of `n` keys: `2 n 64 (qk_dim + v_dim)` flops in two products, one pass over `n x 64` numbers for each option that is
//! on, and one power for each pair.

use crate::block_loop::{ScoreTile, Visit};
use crate::index::Span;
use crate::lanes::multiply_tile;
use crate::micro::{Weights, add_values, dot_tile};
use crate::problem::Problem;
use crate::queries::Queries;
use crate::simd::{Element, GROUP, Lanes, Number, Simd};
use crate::softmax::{SoftmaxPasses, States, TileSums};

/// A group of rows: queries, states and sums, `[features][lanes]`.
#[derive(Debug)]
pub(crate) struct Group<N> {
    pub(crate) q: Queries<N>,
    pub(crate) states: States<N>,
    /// Up to whole tiles of features, where tiles are in use.
    pub(crate) sums: Vec<Lanes<N>>,
    /// Whether the last tile had scores far above those before.
    pub(crate) max_is_stale: bool,
}

/// Adds each tile to the sums of its group.
pub(super) struct Adding<'t, 'c, E: Element> {
    pub(super) problem: &'c Problem<'c, E>,
    pub(super) groups: &'t mut [Group<E::Num>],
    pub(super) tile: &'t mut [Lanes<E::Num>],
    pub(super) factors: &'t mut [Lanes<E::Num>],
}

impl<E: Element> Visit<E::Num> for Adding<'_, '_, E> {
    #[inline(always)]
    fn visit<S: Simd<E::Num>>(&mut self, s: S, score_tile: ScoreTile<'_, E::Num>) {
        let n = score_tile.k.len;
        let factors = self.factors.get_mut(..n).unwrap_or_default();
        self.groups[score_tile.group].step(
            s,
            self.problem,
            score_tile,
            (&mut self.tile[..n], factors),
        );
    }
}

impl<N: Number> Group<N> {
    /// One group against one tile of a block: the heart of it all.
    #[inline(always)]
    fn step<E: Element<Num = N>, S: Simd<N>>(
        &mut self,
        s: S,
        problem: &Problem<'_, E>,
        mut score_tile: ScoreTile<'_, N>,
        (tile, factors): (&mut [Lanes<N>], &mut [Lanes<N>]),
    ) {
        let span = score_tile.at.span;
        let entropy = problem.entropy;
        let fused = S::FUSES && score_tile.visible.is_none() && problem.is_plain_dot() && !entropy;
        let mut rescale = Lanes([N::one(); GROUP]);
        let mut sums =
            TileSums { sum: self.states.infinite_where_empty(s, span), ..TileSums::zero(entropy) };
        let mut passes = SoftmaxPasses::new(self.max_is_stale);
        while let Some(max_is_current) = passes.next(s, &sums.sum, span) {
            if max_is_current && fused {
                let mut weights = Weights { max: &self.states.max, sum: Lanes([N::zero(); GROUP]) };
                dot_tile(s, (score_tile.k, &self.q.lanes), span, tile, &mut weights);
                sums.sum = weights.sum;
                continue;
            }
            score_tile.scores(s, problem, &mut self.q, tile, None);
            if !max_is_current {
                self.max_is_stale =
                    self.states.update_max(s, tile, (&sums.sum, span), &mut rescale);
            }
            sums = TileSums::zero(entropy);
            self.states.exp_and_sum(s, tile, span, &mut sums);
        }
        self.states.add(s, &sums, span);
        if problem.has_factors() {
            problem.factors(s, score_tile.at, factors);
            multiply_tile(s, (tile, factors), span);
        }
        let (v, to) = (score_tile.v, (&rescale, &mut self.sums[..]));
        match score_tile.partial_mask() {
            Some(visible) => {
                add_values::<N, S, true, false>(s, (v, &[]), (tile, visible), span, to);
            }
            None => add_values::<N, S, false, false>(s, (v, &[]), (tile, &[]), span, to),
        }
    }

    /// Lets a score without a value join every row.
    #[inline(always)]
    pub(super) fn add_sink<S: Simd<N>>(&mut self, s: S, sink: N, entropy: bool) {
        let span = Span::first(self.q.rows.count);
        let mut tile = [Lanes([sink; GROUP])];
        // Sums that never suffice: `max` becomes the larger of itself and the sink.
        self.update_max(s, &tile, (&Lanes([N::infinity(); GROUP]), span));
        let mut sums = TileSums::zero(entropy);
        self.states.exp_and_sum(s, &mut tile, span, &mut sums);
        // It is no score of a key.
        let most = self.states.true_max;
        self.states.add(s, &sums, span);
        self.states.true_max = most;
    }

    /// Raises `max` in the lanes whose sums do not suffice, and shrinks what has been added up so far.
    #[inline(always)]
    pub(crate) fn update_max<S: Simd<N>>(
        &mut self,
        s: S,
        tile: &[Lanes<N>],
        (sums, span): (&Lanes<N>, Span),
    ) {
        let mut rescale = Lanes([N::one(); GROUP]);
        self.max_is_stale = self.states.update_max(s, tile, (sums, span), &mut rescale);
        for sum in &mut self.sums {
            for lane in span.vectors::<N, S>() {
                let x = s.mul(s.load(&sum.0[lane..]), s.load(&rescale.0[lane..]));
                s.store(x, &mut sum.0[lane..]);
            }
        }
    }
}
