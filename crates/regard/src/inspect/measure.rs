//! One look, many answers: what is asked for, what was found, and the pass in between.

use super::AttentionView;
use crate::description::mask::Mask;
use crate::error::Error;
use crate::kernel::block_loop::{KeyRange, TILE_ROWS};
use crate::kernel::weights_pass::{Cells, Counts, Grid, RowStats, Scratch, WeightsQuery, join};
use crate::machine::run::collect;
use crate::machine::simd::Number;
use crate::tensor::index::RowTile;
use std::ops::Range;

/// What is asked of weights, all found in one pass over them. Each has a method of [`AttentionView`] for it alone.
///
/// ```
/// # use regard::{AttentionView, Machine, Measure, Plan, Pool, Problem, View};
/// # let data: Vec<f32> = (0..10 * 8).map(|i| (i as f32).sin()).collect();
/// # let x = View::bhsd(&data, [1, 1, 10, 8])?;
/// # let plan = Plan::new(Problem::new(&x, &x, &x), Machine::detect())?;
/// # let output = plan.forward(x, x, x)?;
/// let view = AttentionView::new(&plan, x, x, &output)?;
/// let found = view.measure(&Measure::new().entropy().top_k(3).pooled(5, 5, Pool::Mean))?;
/// assert_eq!(found.top.unwrap().keys(0).len(), 3);
/// assert_eq!(found.pooled[0].values.len(), 25);
/// # Ok::<(), regard::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Measure {
    entropy: bool,
    mean_distance: bool,
    col_sum: bool,
    top: Option<usize>,
    keys: Option<Range<usize>>,
    pooled: Vec<([usize; 2], Pool)>,
    masks: Vec<Mask>,
}

/// What a cell of a pooled map holds of its weights; pairs that do not see each other count as 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pool {
    /// Their mean.
    Mean,
    /// The largest.
    Max,
    /// Their sum.
    Sum,
}

impl Measure {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The entropy of each query's weights: see [`AttentionView::entropy`].
    pub fn entropy(self) -> Self {
        Self { entropy: true, ..self }
    }

    /// How far each query looks: see [`AttentionView::mean_distance`].
    pub fn mean_distance(self) -> Self {
        Self { mean_distance: true, ..self }
    }

    /// What each key receives: see [`AttentionView::col_sum`].
    pub fn col_sum(self) -> Self {
        Self { col_sum: true, ..self }
    }

    /// The `k` largest weights of each query: see [`AttentionView::top_k`].
    pub fn top_k(self, k: usize) -> Self {
        Self { top: Some(k), ..self }
    }

    /// The whole map in few cells: see [`AttentionView::pooled`]. May be asked for several times.
    pub fn pooled(mut self, rows: usize, cols: usize, pool: Pool) -> Self {
        self.pooled.push(([rows, cols], pool));
        self
    }

    /// Looks at some keys alone, whatever is asked for; what lies beyond the last one is cut off. Cells are as large as if it
    /// were there.
    pub fn keys(self, keys: Range<usize>) -> Self {
        Self { keys: Some(keys), ..self }
    }

    /// How much of each query's weight a mask would keep: see [`AttentionView::mass`]. May be asked for several masks; each is
    /// a pass of its own, over what the mask lets through alone.
    pub fn mass(mut self, mask: Mask) -> Self {
        self.masks.push(mask);
        self
    }

    /// Whether all pairs must be looked at.
    fn looks_at_all(&self) -> bool {
        let Self { entropy, mean_distance, col_sum, top, keys: _, pooled, masks: _ } = self;
        *entropy || *mean_distance || *col_sum || top.is_some() || !pooled.is_empty()
    }
}

/// What was found: one head after another, and one query after another in each.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Measured<N> {
    /// `[heads, rows]`
    pub entropy: Option<Vec<N>>,
    /// `[heads, rows]`
    pub mean_distance: Option<Vec<N>>,
    /// `[heads, keys]`
    pub col_sum: Option<Vec<N>>,
    /// `[heads, rows]`
    pub top: Option<Top<N>>,
    /// One map for each head and each time it was asked for, the maps of a head side by side.
    pub pooled: Vec<Pooled<N>>,
    /// `[heads, rows]` for each mask.
    pub masses: Vec<Vec<N>>,
}

/// The largest weights of each query.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Top<N> {
    k: usize,
    keys: Vec<usize>,
    weights: Vec<N>,
}

impl<N> Top<N> {
    /// How many queries there are.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.keys.len().checked_div(self.k).unwrap_or(0)
    }

    /// The keys of a row, the one with the largest weight first, the earlier one where weights are equal: fewer than `k` if it
    /// sees fewer.
    ///
    /// # Panics
    /// For a row that is not there.
    #[must_use]
    pub fn keys(&self, row: usize) -> &[usize] {
        let keys = &self.keys[row * self.k..][..self.k];
        &keys[..keys.iter().position(|key| *key == usize::MAX).unwrap_or(self.k)]
    }

    /// Their weights.
    ///
    /// # Panics
    /// For a row that is not there.
    #[must_use]
    pub fn weights(&self, row: usize) -> &[N] {
        &self.weights[row * self.k..][..self.keys(row).len()]
    }
}

/// The weights of a head in few cells.
#[derive(Clone, Debug, PartialEq)]
pub struct Pooled<N> {
    /// Rows of cells.
    pub rows: usize,
    /// Columns of cells.
    pub cols: usize,
    /// `[rows, cols]`
    pub values: Vec<N>,
}

/// Queries of a strip, at least: its cells are added to those of others once for so many.
const STRIP_ROWS: usize = 1024;

/// Strips of a head, at most: so many times the keys are held, where each key has a cell.
const MAX_STRIPS: usize = 32;

/// Strips that are at work or done, at most, before they are added up.
const WAVE_STRIPS: usize = 64;

impl<N: Number> AttentionView<'_, N> {
    /// Looks at all weights once, and once more at those that each mask lets through.
    #[inline(never)]
    pub fn measure(&self, measure: &Measure) -> Result<Measured<N>, Error> {
        self.measure_counting(measure, None)
    }

    /// The same where rows count differently in what keys receive.
    pub(super) fn measure_counting(
        &self,
        measure: &Measure,
        counts: Counts<'_, N>,
    ) -> Result<Measured<N>, Error> {
        self.check(measure)?;
        let mut measured = self.unmeasured(measure);
        let keys = measure.keys.clone().unwrap_or(0..self.problem.dims().k_len);
        if measure.looks_at_all() {
            let query = |batch| self.query(measure, batch);
            self.look((&self.problem.mask, &keys), counts, query, |batch, strips| {
                let query = self.query(measure, batch);
                let mut maps = measured.add(&query, strips).into_iter();
                if let (Some(all), true) = (&mut measured.col_sum, query.grids.is_empty()) {
                    let end = keys.end.min(self.problem.k_len(batch));
                    all.extend(vec![N::zero(); end.saturating_sub(keys.start)]);
                }
                let pools = measure.pooled.iter().map(|(_, pool)| *pool);
                measured.pooled.extend(pools.map(|pool| self.map(batch, maps.next(), pool)));
            });
        }
        for mask in &measure.masks {
            let (mask, mut mass) = (self.problem.mask.clone().and(mask.clone()), Vec::new());
            self.look(
                (&mask, &keys),
                None,
                |_| WeightsQuery::default(),
                |_, strips| {
                    strips.into_iter().for_each(|stats| mass.extend(stats.mass));
                },
            );
            measured.masses.push(mass);
        }
        Ok(measured)
    }

    fn check(&self, measure: &Measure) -> Result<(), Error> {
        let dims = self.problem.dims();
        for mask in &measure.masks {
            mask.check([dims.batch, dims.heads.q, dims.q_len, dims.k_len])?;
        }
        let cells =
            measure.pooled.iter().flat_map(|(cells, _)| ["rows", "cols"].into_iter().zip(*cells));
        let mut counts = cells.chain([("top_k", measure.top.unwrap_or(1))]);
        match counts.find(|(_, n)| *n == 0) {
            Some((option, _)) => Err(Error::Zero { option }),
            None => Ok(()),
        }
    }

    fn unmeasured(&self, measure: &Measure) -> Measured<N> {
        let (keys, weights) = (Vec::new(), Vec::new());
        let most = |k: usize| k.min(self.problem.dims().k_len);
        Measured {
            entropy: measure.entropy.then(Vec::new),
            mean_distance: measure.mean_distance.then(Vec::new),
            col_sum: measure.col_sum.then(Vec::new),
            top: measure.top.map(|k| Top { k: most(k), keys, weights }),
            ..Measured::default()
        }
    }

    /// What is looked for in a head of an item. A grid is missing where there is nothing to be in it.
    fn query(&self, measure: &Measure, batch: usize) -> WeightsQuery {
        let grid = |cells, max| self.grid(batch, measure.keys.clone(), cells, max);
        let col_sum = measure.col_sum.then(|| grid([1, usize::MAX], false)).flatten();
        let pools =
            measure.pooled.iter().filter_map(|(cells, pool)| grid(*cells, *pool == Pool::Max));
        WeightsQuery {
            entropy: measure.entropy,
            distance: measure.mean_distance,
            top: measure.top.unwrap_or(0).min(self.problem.dims().k_len),
            logs: false,
            grids: col_sum.into_iter().chain(pools).collect(),
        }
    }

    /// Walks all rows of all heads over the keys of a mask, in strips, and hands on what was found in the strips of each head.
    ///
    /// A strip is one task, whoever runs it, and strips are added up in their order: so the number of threads changes nothing.
    fn look(
        &self,
        over: (&Mask, &Range<usize>),
        counts: Counts<'_, N>,
        query: impl Fn(usize) -> WeightsQuery + Sync,
        mut then: impl FnMut(usize, Vec<RowStats<N>>),
    ) {
        let heads: Vec<_> = self.each_head().collect();
        let longest = heads.iter().map(|(batch, _)| self.rows_of(*batch).len()).max().unwrap_or(0);
        let strip = longest.div_ceil(MAX_STRIPS).max(STRIP_ROWS.saturating_mul(self.step));
        let strip = strip.next_multiple_of(TILE_ROWS.saturating_mul(self.step));
        let each = longest.div_ceil(strip);
        for wave in heads.chunks((WAVE_STRIPS / each.max(1)).max(1)) {
            let tasks = wave.len() * each;
            // Late strips first, for a causal mask gives them the most to do.
            let stats = collect(
                self.machine.threads,
                tasks,
                || None,
                |scratch, task| {
                    let (head, i) = (wave[task % wave.len()], each - 1 - task / wave.len());
                    let query = query(head.0);
                    let scratch =
                        scratch.get_or_insert_with(|| Scratch::new(&self.problem, &query));
                    self.strip_stats(
                        over,
                        head,
                        i * strip..(i + 1) * strip,
                        (&query, counts),
                        scratch,
                    )
                },
            );
            let mut by_head: Vec<Vec<_>> = wave.iter().map(|_| Vec::new()).collect();
            for (task, stats) in stats.into_iter().enumerate().rev() {
                by_head[task % wave.len()].extend(stats);
            }
            for ((batch, _), strips) in wave.iter().zip(by_head) {
                then(*batch, strips);
            }
        }
    }

    /// The tiles of a strip, one after another; nothing where a head has no such rows.
    fn strip_stats(
        &self,
        (mask, keys): (&Mask, &Range<usize>),
        (batch, head): (usize, usize),
        strip: Range<usize>,
        (query, counts): (&WeightsQuery, Counts<'_, N>),
        scratch: &mut Scratch<N>,
    ) -> Option<RowStats<N>> {
        let (scope, own) = (self.problem.scope(batch, head), self.rows_of(batch));
        let rows = own.start + strip.start.min(own.len())..own.start + strip.end.min(own.len());
        if rows.is_empty() {
            return None;
        }
        let keys = keys.start.min(scope.k_len)..keys.end.min(scope.k_len);
        let key_range = KeyRange { mask, without: None, keys: keys.start.min(keys.end)..keys.end };
        let mut stats = RowStats::new(query, &rows);
        for first in rows.clone().step_by(TILE_ROWS * self.step) {
            let count = (rows.end - first).div_ceil(self.step).min(TILE_ROWS);
            let rows = RowTile { first, step: self.step, count };
            self.tile_stats(
                (batch, head),
                rows,
                (&key_range, query),
                counts,
                (scratch, &mut stats),
            );
        }
        Some(stats)
    }

    /// The map of a head from what its cells hold; an empty one if it has no cells.
    fn map(&self, batch: usize, cells: Option<(Grid, Vec<N>)>, pool: Pool) -> Pooled<N> {
        let Some((grid, values)) = cells else {
            return Pooled { rows: 0, cols: 0, values: Vec::new() };
        };
        let mut map = Pooled { rows: grid.rows.cells, cols: grid.keys.cells, values };
        if pool == Pool::Mean {
            self.divide(&mut map, batch, &grid);
        }
        map
    }

    /// Divides the sums of cells by their pairs: of the queries that were looked at.
    fn divide(&self, pooled: &mut Pooled<N>, batch: usize, Grid { rows, keys, .. }: &Grid) {
        let (q_len, k_len) = (self.problem.q_len(batch), self.problem.k_len(batch));
        for (i, row) in pooled.values.chunks_mut(pooled.cols.max(1)).enumerate() {
            let cell = rows.of_cell(i);
            // Rows `start + n step` that fall into the cell.
            let before = |end: usize| (end.min(q_len) - rows.start()).div_ceil(self.step);
            let queries = before(cell.end) - before(cell.start);
            for (j, x) in row.iter_mut().enumerate() {
                let cell = keys.of_cell(j);
                let pairs = queries * (cell.end.min(k_len) - cell.start);
                *x = if pairs == 0 { *x } else { *x / N::of_len(pairs) };
            }
        }
    }
}

impl<N: Number> Measured<N> {
    /// Takes what was found in the strips of one more head, but for what its cells hold beside the sums over queries.
    fn add(&mut self, query: &WeightsQuery, strips: Vec<RowStats<N>>) -> Vec<(Grid, Vec<N>)> {
        let mut sums: Vec<Vec<f64>> = query.grids.iter().map(Grid::zeros).collect();
        for stats in strips {
            for ((sum, grid), cells) in sums.iter_mut().zip(&query.grids).zip(&stats.cells) {
                cells.join(grid, sum);
            }
            if let Some(all) = &mut self.mean_distance {
                let mean =
                    |(sum, mass): (&N, &N)| if *mass == N::zero() { *sum } else { *sum / *mass };
                all.extend(stats.distance.iter().zip(&stats.mass).map(mean));
            }
            self.entropy.iter_mut().for_each(|all| all.extend(&stats.entropy));
            if let Some(Top { keys, weights, .. }) = &mut self.top {
                keys.extend(stats.top.iter().map(|c| c.key));
                weights.extend(stats.top.iter().map(|c| c.score));
            }
        }
        let narrow = |sums: Vec<f64>| sums.into_iter().map(N::from_f64).collect::<Vec<N>>();
        let mut grids = query.grids.iter().cloned().zip(sums);
        if let Some(all) = &mut self.col_sum {
            all.extend(grids.next().map_or_else(Vec::new, |(_, sums)| narrow(sums)));
        }
        grids.map(|(grid, sums)| (grid, narrow(sums))).collect()
    }
}

impl Grid {
    fn zeros(&self) -> Vec<f64> {
        vec![0.0; self.rows.cells * self.keys.cells]
    }
}

impl Cells {
    /// Takes its cells into those of all strips.
    fn join(&self, grid: &Grid, to: &mut [f64]) {
        let to = &mut to[self.first * grid.keys.cells..][..self.values.len()];
        for (to, x) in to.iter_mut().zip(&self.values) {
            join(to, *x, grid.max);
        }
    }
}
