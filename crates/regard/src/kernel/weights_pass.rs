//! The pass that looks at weights: they are made again from queries, keys and the softmax that a forward pass has left, added
//! up in the key ranges asked for, and forgotten.
//!
//! Cost: the products of queries and keys and one power for each pair, as in forward, of values nothing; then one pass over
//! `n x 64` numbers for each thing asked for. Memory: what is asked for.

use crate::description::problem::Problem;
use crate::description::score::in_log2;
use crate::kernel::best::{BestKeys, Candidate, take_best};
use crate::kernel::block_loop::{BlockLoop, Call, KeyRange, ScoreTile, Visit};
use crate::kernel::micro::{Weights, dot_tile};
use crate::kernel::queries::Queries;
use crate::kernel::softmax::{States, TileSums, exp_and_sum};
use crate::machine::simd::{GROUP, Isa, Lanes, MAX_LANES, Number, Simd, leaf};
use crate::tensor::index::{At, BLOCK_KEYS, RowMask, RowTile, Scope, Span, low};
use std::ops::Range;

/// What is looked for in the weights of rows.
#[derive(Clone, Debug, Default)]
pub(crate) struct WeightsQuery {
    /// `-sum of a ln a`
    pub(crate) entropy: bool,
    /// `sum of a |key - position|`
    pub(crate) distance: bool,
    /// The keys with the largest weights.
    pub(crate) top: usize,
    /// Sums or maxima of weights that fall into the same cell.
    pub(crate) grids: Vec<Grid>,
    /// `log2 a` of every pair.
    pub(crate) logs: bool,
}

/// A grid of cells over some queries and keys.
#[derive(Clone, Debug)]
pub(crate) struct Grid {
    pub(crate) rows: Cut,
    pub(crate) keys: Cut,
    /// The largest weight of a cell, not the sum.
    pub(crate) max: bool,
}

/// A range, cut into cells that are as equal as can be.
#[derive(Clone, Debug)]
pub(crate) struct Cut {
    /// May reach beyond what there is.
    range: Range<usize>,
    /// At least one, and at most as many as the range is long.
    of_range: usize,
    /// Those that something falls into.
    pub(crate) cells: usize,
}

impl Cut {
    /// None where there would be no cell; what there is ends at `end`.
    pub(crate) fn new(range: Range<usize>, cells: usize, end: usize) -> Option<Self> {
        // So that no product of a place and a number of cells is too large.
        let range = range.start..range.end.min(range.start.saturating_add(1 << 31).max(end));
        let of_range = cells.min(range.len());
        if range.start >= end.min(range.end) || of_range == 0 {
            return None;
        }
        let mut cut = Self { range, of_range, cells: of_range };
        cut.cells = cut.cell(end.min(cut.range.end) - 1) + 1;
        Some(cut)
    }

    /// The first of the range.
    pub(crate) fn start(&self) -> usize {
        self.range.start
    }

    /// The cell that something of the range falls into.
    #[inline(always)]
    pub(crate) fn cell(&self, i: usize) -> usize {
        let (i, n) = (i - self.range.start, self.range.len());
        if self.of_range == n { i } else { i * self.of_range / n }
    }

    /// What falls into a cell.
    #[inline(always)]
    pub(crate) fn of_cell(&self, cell: usize) -> Range<usize> {
        let n = self.range.len();
        if self.of_range == n {
            return self.range.start + cell..self.range.start + cell + 1;
        }
        let begin = |cell: usize| self.range.start + (cell * n).div_ceil(self.of_range);
        begin(cell)..begin(cell + 1)
    }
}

/// What was found in the rows of a strip, one after another.
#[derive(Clone, Debug)]
pub(crate) struct RowStats<N> {
    /// `sum of a`
    pub(crate) mass: Vec<N>,
    pub(crate) entropy: Vec<N>,
    pub(crate) distance: Vec<N>,
    /// Of each row so many, the best first; weights in the place of scores, 0 where there are no more.
    pub(crate) top: Vec<Candidate<N>>,
    pub(crate) cells: Vec<Cells>,
    /// `[rows, keys]`, `-inf` where a row does not see a key.
    pub(crate) logs: Vec<f64>,
}

/// Some rows of a grid's cells, from the first one on that a strip has something in.
#[derive(Clone, Debug)]
pub(crate) struct Cells {
    pub(crate) first: usize,
    pub(crate) values: Vec<f64>,
}

impl<N: Number> RowStats<N> {
    /// Nothing yet, of these rows.
    pub(crate) fn new(query: &WeightsQuery, rows: &Range<usize>) -> Self {
        let cells = |grid: &Grid| {
            let (first, last) = (grid.rows.cell(rows.start), grid.rows.cell(rows.end - 1));
            Cells { first, values: vec![0.0; (last + 1 - first) * grid.keys.cells] }
        };
        let cells = query.grids.iter().map(cells).collect();
        let (mass, entropy, distance, top) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { mass, entropy, distance, top, cells, logs: Vec::new() }
    }
}

/// Memory of one thread, reused from task to task.
#[derive(Debug)]
pub(crate) struct Scratch<N> {
    groups: Vec<Group<N>>,
    tile: Vec<Lanes<N>>,
    block_loop: BlockLoop<N>,
}

/// A group of rows: its softmax, and what it has found so far.
#[derive(Debug)]
struct Group<N> {
    q: Queries<N>,
    /// `max` of the whole softmax, with sums of what was visited.
    states: States<N>,
    /// What `2^(score - max)` is multiplied by to be a weight.
    share: Lanes<N>,
    /// The same for what goes into cells, where rows count differently.
    passed: Lanes<N>,
    /// Where each row stands among the keys.
    positions: Lanes<N>,
    distance: Lanes<N>,
    best: Option<BestKeys<N>>,
}

impl<N: Number> Scratch<N> {
    pub(crate) fn new(problem: &Problem<'_, N>, query: &WeightsQuery) -> Self {
        let zero = Lanes([N::zero(); GROUP]);
        let group = || Group {
            q: Queries::new(problem),
            states: States::empty(),
            share: zero,
            passed: zero,
            positions: zero,
            distance: zero,
            best: (query.top > 0).then(|| BestKeys::new(query.top)),
        };
        Self {
            groups: (0..2).map(|_| group()).collect(),
            tile: vec![zero; BLOCK_KEYS],
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

/// How much each row of a head counts in what goes into cells; all 1 where there are none.
pub(crate) type Counts<'c, N> = Option<&'c [N]>;

impl<N: Number> Softmaxes<'_, N> {
    /// `max` and `1 / l` of a row: a weight is `2^(score - max) / l`. One that saw nothing weighs nothing; one that met a NaN has it
    /// in `max` alone, so that what it does not see stays 0.
    pub(crate) fn of_row(&self, row: usize) -> (N, N) {
        match self.states.get(row) {
            Some([m, l]) if m.is_nan() || l.is_nan() => (N::nan(), N::one()),
            Some([m, l]) if *l != N::zero() => (*m, l.recip()),
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
    pub(crate) query: &'t WeightsQuery,
    pub(crate) counts: Counts<'t, N>,
    pub(crate) scratch: &'t mut Scratch<N>,
    pub(crate) stats: &'t mut RowStats<N>,
}

impl<N: Number> WeightsPass<'_, '_, N> {
    pub(crate) fn run(self, isa: Isa) {
        let Self { call, softmaxes, scope, rows, key_range, query, counts, scratch, stats } = self;
        let Scratch { groups, tile, block_loop } = scratch;
        let groups = &mut groups[..rows.groups()];
        for (g, group) in groups.iter_mut().enumerate() {
            let q = call.queries(scope.batch, scope.head);
            group.q.take(isa, call.problem, scope.head, (q, rows.group(g)));
            group.start(call.problem, scope, softmaxes, counts);
        }
        let (cells, logs) = (&mut stats.cells, (&mut stats.logs[..], &key_range.keys));
        let mut visitor =
            WeightsVisitor { problem: call.problem, query, groups, tile, cells, logs };
        block_loop.for_each_block(isa, &call, (scope, rows), key_range, &mut visitor);
        for group in groups {
            group.finish(query, call.problem.score.sinks.map(|sinks| sinks[scope.head]), stats);
        }
    }
}

/// Looks at the weights of each tile.
struct WeightsVisitor<'t, 'c, N: Number> {
    problem: &'c Problem<'c, N>,
    query: &'t WeightsQuery,
    groups: &'t mut [Group<N>],
    tile: &'t mut [Lanes<N>],
    cells: &'t mut [Cells],
    /// And the keys that they are of.
    logs: (&'t mut [f64], &'t Range<usize>),
}

impl<N: Number> Visit<N> for WeightsVisitor<'_, '_, N> {
    const VALUES: bool = false;

    fn visit(&mut self, isa: Isa, mut score_tile: ScoreTile<'_, N>) {
        let Self { problem, query, groups, tile, cells, logs } = self;
        let (group, tile) = (&mut groups[score_tile.group], &mut tile[..score_tile.k.len]);
        let (at, mut sums) = (score_tile.at, TileSums::zero(query.entropy));
        let more = query.logs || group.best.is_some() || query.entropy;
        let plain = score_tile.visible.is_none() && problem.is_plain_dot() && !more;
        if plain && isa.vectors::<N>().fuses {
            let mut weights = Weights { max: &group.states.max, sum: sums.sum };
            dot_tile(isa, (score_tile.k, &group.q.lanes), at.span, tile, &mut weights);
            sums.sum = weights.sum;
        } else {
            score_tile.scores(isa, problem, &mut group.q, tile, None);
            if let Some(best) = &mut group.best {
                take_best(isa, best, at, tile);
            }
            if query.logs {
                group.write_logs(at, tile, (score_tile.group, &mut *logs.0, logs.1));
            }
            exp_and_sum(isa, &group.states, tile, at.span, &mut sums);
            if let Some(visible) = score_tile.partial_mask() {
                clear_hidden(isa, tile, visible, at.span);
            }
        }
        group.states.add(&sums, at.span);
        if query.distance {
            add_distances(isa, at, tile, &group.positions, &mut group.distance);
        }
        for (grid, to) in query.grids.iter().zip(&mut **cells) {
            add_cells(isa, at, tile, &group.passed, grid, to);
        }
    }
}

impl<N: Number> Group<N> {
    /// Takes the softmax of its rows; nothing is found yet.
    fn start(
        &mut self,
        problem: &Problem<'_, N>,
        scope: Scope,
        softmaxes: Softmaxes<'_, N>,
        counts: Counts<'_, N>,
    ) {
        let zero = Lanes([N::zero(); GROUP]);
        (self.states.sum, self.states.sum_x_log, self.distance) = (zero, zero, zero);
        // Lanes without a row weigh nothing.
        self.states.max = Lanes([N::max_value(); GROUP]);
        for lane in 0..self.q.rows.count {
            let row = self.q.rows.row(lane);
            (self.states.max.0[lane], self.share.0[lane]) =
                softmaxes.of_row(problem.row_index(scope, row));
            self.passed.0[lane] =
                counts.map_or(N::one(), |counts| counts[row]) * self.share.0[lane];
            self.positions.0[lane] = N::from_f64(scope.position(row) as f64);
        }
        self.best.iter_mut().for_each(BestKeys::clear);
    }

    /// Writes `log2 a` of the pairs of a tile.
    fn write_logs(
        &self,
        at: At<'_>,
        tile: &[Lanes<N>],
        (g, to, keys): (usize, &mut [f64], &Range<usize>),
    ) {
        for lane in at.span.start..at.span.end {
            let (max, share) = (self.states.max.0[lane].to_f64(), self.share.0[lane].to_f64());
            let to = &mut to[(g * GROUP + lane) * keys.len()..][..keys.len()];
            let hidden = |x: f64| x == f64::NEG_INFINITY;
            let scores = tile.iter().map(|scores| scores.0[lane].to_f64()).enumerate();
            for (i, score) in scores.filter(|(_, score)| !hidden(*score)) {
                to[at.keys.get(i) - keys.start] = score - max + share.log2();
            }
        }
    }

    /// Leaves what was found in each row. The sink counts as a key where the entropy is concerned.
    fn finish(&self, query: &WeightsQuery, sink: Option<N>, stats: &mut RowStats<N>) {
        for lane in 0..self.q.rows.count {
            let (share, state) = (self.share.0[lane], self.states.get(lane));
            let mass = state.sum * share;
            stats.mass.push(mass);
            if query.entropy {
                // log2 a = score - max + log2 share
                let mut bits = state.sum_x_log * share + mass * share.log2();
                if let Some(log) = sink.map(|sink| in_log2(sink) - state.max + share.log2()) {
                    let a = log.exp2();
                    bits = bits + if a == N::zero() { a } else { a * log };
                }
                let nats = -bits * N::from_f64(std::f64::consts::LN_2);
                // Rounding may fall below 0; NaN stays.
                stats.entropy.push(if nats < N::zero() { N::zero() } else { nats });
            }
            if query.distance {
                stats.distance.push(self.distance.0[lane] * share);
            }
            let Some(best) = &self.best else { continue };
            let best = best.of_row(lane);
            let weight = |c: &Candidate<N>| (c.score - state.max).exp2() * share;
            stats.top.extend(best.iter().map(|c| Candidate { score: weight(c), ..*c }));
            let none = Candidate { score: N::zero(), key: usize::MAX };
            stats.top.extend(std::iter::repeat_n(none, query.top - best.len()));
        }
    }
}

leaf! {
    /// Makes the weights of pairs that do not see each other 0, in rows that met a NaN too.
    fn clear_hidden<'t, N>(
        s: S,
        tile: &'t mut [Lanes<N>],
        visible: &'t [RowMask],
        span: Span,
    ) {
        for (weights, visible) in tile.iter_mut().zip(visible) {
            for lane in span.vectors::<N, S>() {
                let x = &mut weights.0[lane..];
                s.store(s.select(s.lanes(low(*visible >> lane)), s.load(x), s.splat(N::zero())), x);
            }
        }
    }
}

leaf! {
    /// `to += sum of weight |key - position|`, lane by lane.
    fn add_distances<'t, N>(
        s: S,
        at: At<'t>,
        tile: &'t [Lanes<N>],
        positions: &'t Lanes<N>,
        to: &'t mut Lanes<N>,
    ) {
        for lane in at.span.vectors::<N, S>() {
            let position = s.load(&positions.0[lane..]);
            let mut sum = s.splat(N::zero());
            for (i, weights) in tile.iter().enumerate() {
                let key = s.splat(N::of_len(at.keys.get(i)));
                let distance = s.max(s.sub(key, position), s.sub(position, key));
                sum = s.fma(s.load(&weights.0[lane..]), distance, sum);
            }
            s.store(s.add(s.load(&to.0[lane..]), sum), &mut to.0[lane..]);
        }
    }
}

leaf! {
    /// Adds the weights of a tile to the cells that they fall into.
    fn add_cells<'t, N>(
        s: S,
        at: At<'t>,
        tile: &'t [Lanes<N>],
        share: &'t Lanes<N>,
        grid: &'t Grid,
        to: &'t mut Cells,
    ) {
        let Span { start, end } = at.span;
        let row = |lane: usize| grid.rows.cell(at.rows.row(lane)) - to.first;
        let mut rows = [0; GROUP];
        (start..end).for_each(|lane| rows[lane] = row(lane));
        let mut i = 0;
        while i < tile.len() {
            let column = grid.keys.cell(at.keys.get(i));
            let keys = grid.keys.of_cell(column);
            let mut n = 1;
            while i + n < tile.len() && at.keys.get(i + n) < keys.end {
                n += 1;
            }
            let sums = over_keys(s, &tile[i..i + n], (at.span, grid.max), share);
            let cell = |row: usize| row * grid.keys.cells + column;
            if rows[start] == rows[end - 1] {
                join(&mut to.values[cell(rows[start])], over_rows(s, &sums, grid.max), grid.max);
            } else {
                for (row, sum) in rows.iter().zip(&sums.0).take(end).skip(start) {
                    join(&mut to.values[cell(*row)], Number::to_f64(*sum), grid.max);
                }
            }
            i += n;
        }
    }
}

/// Takes one more number into a cell. A NaN stays.
#[inline(always)]
pub(crate) fn join(cell: &mut f64, x: f64, max: bool) {
    if !max {
        *cell += x;
    } else if x.is_nan() || x > *cell {
        *cell = x;
    }
}

/// The sum over some keys, or the largest, of the weights of each row; 0 outside the span.
#[inline(always)]
fn over_keys<N: Number, S: Simd<N>>(
    s: S,
    tile: &[Lanes<N>],
    (span, max): (Span, bool),
    share: &Lanes<N>,
) -> Lanes<N> {
    let zero = s.splat(N::zero());
    let mut sums = Lanes([N::zero(); GROUP]);
    for lane in span.vectors::<N, S>() {
        let mut sum = zero;
        for weights in tile {
            let x = s.load(&weights.0[lane..]);
            // The second where either is NaN; all weights of a row are, or none.
            sum = if max { s.max(sum, x) } else { s.add(sum, x) };
        }
        let inside = s.lanes(low(span.set() >> lane) & (u32::MAX >> (32 - S::LANES)));
        let sum = s.mul(sum, s.load(&share.0[lane..]));
        s.store(s.select(inside, sum, zero), &mut sums.0[lane..]);
    }
    sums
}

/// The sum over all rows of a group, or the largest: in an order that does not depend on the width of a vector.
#[inline(always)]
fn over_rows<N: Number, S: Simd<N>>(s: S, lanes: &Lanes<N>, max: bool) -> f64 {
    if max {
        let mut most = 0.0;
        lanes.0.iter().for_each(|x| join(&mut most, Number::to_f64(*x), true));
        return most;
    }
    let mut sums = [N::zero(); MAX_LANES];
    for first in (0..MAX_LANES).step_by(S::LANES) {
        let mut sum = s.load(&lanes.0[first..]);
        for lane in (first + MAX_LANES..GROUP).step_by(MAX_LANES) {
            sum = s.add(sum, s.load(&lanes.0[lane..]));
        }
        s.store(sum, &mut sums[first..]);
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            sums[i] = sums[i] + sums[i + half];
        }
    }
    sums[0].to_f64()
}
