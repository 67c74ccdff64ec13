//! The pass that recomputes attention weights, tile by tile, from queries, keys and what a forward pass has left of each softmax.
//!
//! Cost: the dot products of queries and keys and one power for each pair, as in the forward pass; nothing for values. Memory:
//! one tile.

use crate::description::problem::Problem;
use crate::description::score::in_log2;
use crate::kernel::block_loop::{BlockLoop, Call, KeyRange, ScoreTile, Visit};
use crate::kernel::queries::Queries;
use crate::machine::simd::{GROUP, Isa, Lanes, Number, leaf, math};
use crate::tensor::index::{At, BLOCK_KEYS, HeadRows, RowMask, RowTile, Scope, Span, low};

/// Rows of a [`WeightTile`], at most.
pub const WEIGHT_TILE_ROWS: usize = GROUP;

/// The weights of up to 64 queries of one head for up to 64 keys.
#[derive(Clone, Copy, Debug)]
pub struct WeightTile<'t, N> {
    at: At<'t>,
    weights: &'t [Lanes<N>],
    logs: &'t [Lanes<N>],
}

impl<N> WeightTile<'_, N> {
    /// The head, and the sizes of its attention matrix.
    #[must_use]
    pub fn scope(&self) -> Scope {
        self.at.scope
    }

    /// Number of queries.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.at.rows.count
    }

    /// Index of the `i`-th query.
    #[must_use]
    #[inline]
    pub fn row(&self, i: usize) -> usize {
        self.at.rows.row(i)
    }

    /// Number of keys.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.weights.len()
    }

    /// Index of the `i`-th key.
    #[must_use]
    #[inline]
    pub fn key(&self, i: usize) -> usize {
        self.at.keys.get(i)
    }

    /// The weights of all queries for the `i`-th key; 0 for a query to which it is not visible, for one whose weight for it is in
    /// another tile, and beyond the last query.
    #[must_use]
    #[inline]
    pub fn weights(&self, i: usize) -> &[N; WEIGHT_TILE_ROWS] {
        &self.weights[i].0
    }

    /// `log2` of [`weights`](Self::weights), `-inf` where they are 0 for one of these reasons.
    ///
    /// # Panics
    /// If the logarithms were not asked for.
    #[must_use]
    #[inline]
    pub fn log2_weights(&self, i: usize) -> &[N; WEIGHT_TILE_ROWS] {
        &self.logs[i].0
    }
}

/// Memory of one thread, reused from call to call.
#[derive(Debug)]
pub struct WeightScratch<N> {
    groups: Vec<Group<N>>,
    tile: Vec<Lanes<N>>,
    logs: Vec<Lanes<N>>,
    block_loop: BlockLoop<N>,
}

/// A group of queries and their softmaxes: a weight is `2^(score - max) / sum`.
#[derive(Debug)]
struct Group<N> {
    q: Queries<N>,
    max: Lanes<N>,
    /// `1 / sum`
    share: Lanes<N>,
    log_share: Lanes<N>,
}

impl<N: Number> WeightScratch<N> {
    /// `logs`: whether logarithms of weights are asked for.
    pub(crate) fn new(problem: &Problem<'_, N>, logs: bool) -> Self {
        let zeros = |n| vec![Lanes([N::zero(); GROUP]); n];
        let [max, share, log_share] = [Lanes([N::zero(); GROUP]); 3];
        let group = || Group { q: Queries::new(problem), max, share, log_share };
        Self {
            groups: (0..2).map(|_| group()).collect(),
            tile: zeros(BLOCK_KEYS),
            logs: zeros(if logs { BLOCK_KEYS } else { 0 }),
            block_loop: BlockLoop::new(),
        }
    }
}

/// The softmax of every row, as a forward pass has left it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Softmaxes<'c, N> {
    pub(crate) lse: &'c [N],
    /// Empty, or one for each row.
    pub(crate) states: &'c [[N; 2]],
}

impl<N: Number> Softmaxes<'_, N> {
    /// `max` and `1 / sum` of a row. The weights of a fully masked row are 0; that of a row with a NaN is in `max` alone, so that
    /// the weights of masked keys stay 0.
    pub(crate) fn of_row(&self, row: usize) -> (N, N) {
        match self.states.get(row) {
            Some([max, sum]) if max.is_nan() || sum.is_nan() => (N::nan(), N::one()),
            Some([max, sum]) if *sum != N::zero() => (*max, sum.recip()),
            None if self.lse[row] != N::neg_infinity() => (in_log2(self.lse[row]), N::one()),
            _ => (N::max_value(), N::one()),
        }
    }
}

/// One tile of rows of one head.
#[derive(Debug)]
pub(crate) struct WeightsPass<'t, 'c, N: Number> {
    pub(crate) call: Call<'c, N>,
    pub(crate) softmaxes: Softmaxes<'c, N>,
    pub(crate) scope: Scope,
    pub(crate) rows: RowTile,
    pub(crate) key_range: &'t KeyRange<'t>,
}

impl<N: Number> WeightsPass<'_, '_, N> {
    pub(crate) fn run(
        self,
        isa: Isa,
        scratch: &mut WeightScratch<N>,
        tiles: &mut dyn FnMut(WeightTile<'_, N>),
    ) {
        let Self { call, softmaxes, scope, rows, key_range } = self;
        let WeightScratch { groups, tile, logs, block_loop } = scratch;
        let groups = &mut groups[..rows.groups()];
        for (g, group) in groups.iter_mut().enumerate() {
            let q = call.queries(scope.batch, scope.head);
            group.q.take(isa, call.problem, scope.head, (q, rows.group(g)));
            group.take_softmaxes(call.problem, scope, softmaxes);
        }
        let mut visitor = WeightsVisitor { problem: call.problem, groups, tile, logs, tiles };
        block_loop.for_each_block(isa, &call, HeadRows { scope, rows }, key_range, &mut visitor);
    }
}

impl<N: Number> Group<N> {
    fn take_softmaxes(&mut self, problem: &Problem<'_, N>, scope: Scope, of: Softmaxes<'_, N>) {
        for lane in 0..self.q.rows.count {
            let row = problem.row_index(scope, self.q.rows.row(lane));
            (self.max.0[lane], self.share.0[lane]) = of.of_row(row);
            self.log_share.0[lane] = self.share.0[lane].log2();
        }
    }
}

/// Turns each tile of scores into one of weights.
struct WeightsVisitor<'t, 'c, N: Number> {
    problem: &'c Problem<'c, N>,
    groups: &'t mut [Group<N>],
    tile: &'t mut [Lanes<N>],
    logs: &'t mut [Lanes<N>],
    tiles: &'t mut dyn FnMut(WeightTile<'_, N>),
}

impl<N: Number> Visit<N> for WeightsVisitor<'_, '_, N> {
    const VALUES: bool = false;

    fn visit(&mut self, isa: Isa, mut score_tile: ScoreTile<'_, N>) {
        let Self { problem, groups, tile, logs, tiles } = self;
        let (group, n) = (&mut groups[score_tile.group], score_tile.k.len);
        let logs_len = n.min(logs.len());
        let (at, tile, logs) = (score_tile.at, &mut tile[..n], &mut logs[..logs_len]);
        score_tile.scores(isa, problem, &mut group.q, tile, None);
        let visible = score_tile.partial_mask();
        scores_to_weights(
            isa,
            tile,
            logs,
            [&group.max, &group.share, &group.log_share],
            visible,
            at.span,
        );
        tiles(WeightTile { at, weights: tile, logs });
    }
}

leaf! {
    /// Replaces scores by weights, and writes their `log2` if there is room for it. In rows with a NaN the weights of masked
    /// keys are 0 too, and so is all outside the span.
    fn scores_to_weights<'t, N>(
        s: S,
        tile: &'t mut [Lanes<N>],
        logs: &'t mut [Lanes<N>],
        softmax: [&'t Lanes<N>; 3],
        visible: Option<&'t [RowMask]>,
        span: Span,
    ) {
        let [max, share, log_share] = softmax;
        let (zero, hidden) = (s.splat(N::zero()), s.splat(N::neg_infinity()));
        for lane in (0..GROUP).step_by(S::LANES) {
            let max = s.load(&max.0[lane..]);
            let (share, log_share) = (s.load(&share.0[lane..]), s.load(&log_share.0[lane..]));
            for (i, row) in tile.iter_mut().enumerate() {
                let bits = visible.map_or(RowMask::MAX, |visible| visible[i]) & span.set();
                let (inside, x) = (s.lanes(low(bits >> lane)), &mut row.0[lane..]);
                let log = s.sub(s.load(x), max);
                s.store(s.select(inside, s.mul(math::weight(s, log), share), zero), x);
                if let Some(to) = logs.get_mut(i) {
                    s.store(s.select(inside, s.add(log, log_share), hidden), &mut to.0[lane..]);
                }
            }
        }
    }
}
