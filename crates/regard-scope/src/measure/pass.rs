//! The pass over the weights: strips of queries on all threads, tile by tile.

use super::grid::{Cells, Grid};
use super::{Labels, Measure, SomeKeys};
use regard::inspect::{WEIGHT_TILE_ROWS, WeightTile};
use regard::{AttentionView, Error, Isa, Number};
use std::f64::consts::LN_2;
use std::ops::Range;

/// Queries of a strip, at least: bounds how often cells of strips are added up.
const STRIP_ROWS: usize = 1024;
/// Strips of a head, at most: bounds how many copies of its cells there are.
const MAX_STRIPS: usize = 32;
/// Strips in memory at a time.
const WAVE_STRIPS: usize = 64;

/// One number for each query of a tile.
type Lanes<N> = [N; WEIGHT_TILE_ROWS];

/// Reads all weights of a view and passes on the strips of each head, in order. A strip is computed by one thread whatever their
/// number, so that the results do not depend on it.
pub(super) fn run<N: Number>(
    measure: &Measure,
    view: &AttentionView<'_, N>,
    counts: Option<&[N]>,
    mut then: impl FnMut(usize, Vec<Strip<N>>),
) -> Result<(), Error> {
    let longest = view.heads().map(|(batch, _)| view.row_count(batch)).max().unwrap_or(0);
    let strip = longest.div_ceil(MAX_STRIPS).max(STRIP_ROWS).next_multiple_of(2 * WEIGHT_TILE_ROWS);
    let heads: Vec<_> = view.heads().collect();
    let logs = measure.entropy || measure.top.is_some();
    for wave in heads.chunks((WAVE_STRIPS / longest.div_ceil(strip).max(1)).max(1)) {
        let mut parts = Vec::new();
        for (batch, head) in wave {
            parts.push(view.head(*batch, *head)?.parts(strip));
        }
        let grids: Vec<_> = wave.iter().map(|(batch, _)| measure.grids(view, *batch)).collect();
        let tasks: Vec<_> = parts
            .iter()
            .zip(&grids)
            .flat_map(|(parts, grids)| parts.iter().map(move |part| (part, &grids[..])))
            .collect();
        // Late strips first: under a causal mask they cost the most.
        let mut strips = view.machine().collect(
            tasks.len(),
            || view.scratch(logs),
            |scratch, i| {
                let (part, grids) = tasks[tasks.len() - 1 - i];
                let mut strip = Strip::new(measure, part, grids);
                let mut visit = |tile: WeightTile<'_, N>| {
                    strip.add(&tile, grids, (measure, counts), part.machine().isa);
                };
                part.for_each_tile(scratch, &mut visit);
                strip.finish(part, measure);
                strip
            },
        );
        for ((batch, _), parts) in wave.iter().zip(&parts) {
            let own = strips.split_off(strips.len() - parts.len());
            then(*batch, own.into_iter().rev().collect());
        }
    }
    Ok(())
}

/// Statistics of consecutive queries of one head.
#[derive(Debug)]
pub(super) struct Strip<N> {
    first: usize,
    step: usize,
    count: usize,
    /// The sums of weights, 64 queries after another, as all that follows.
    pub(super) mass: Vec<Lanes<N>>,
    /// Sums of `a log2 a`.
    log_sum: Option<Vec<Lanes<N>>>,
    /// Sums of `a |key - position|`.
    distance: Option<Vec<Lanes<N>>>,
    /// Sums of the weights of each span.
    pub(super) spans: Vec<Vec<Lanes<N>>>,
    /// Sums of the weights of keys with the label of the query.
    pub(super) matches: Vec<Vec<Lanes<N>>>,
    top: Option<TopK<N>>,
    /// The largest weights of each query and their keys, once the strip is finished.
    pub(super) best: Vec<Vec<(N, usize)>>,
    pub(super) cells: Vec<Cells>,
}

impl<N: Number> Strip<N> {
    fn new(measure: &Measure, part: &AttentionView<'_, N>, grids: &[Option<Grid>]) -> Self {
        let batch = part.heads().next().map_or(0, |(batch, _)| batch);
        let (rows, step) = part.rows_of(batch);
        let (first, count) = (rows.start, part.row_count(batch));
        let zeros = || vec![[N::zero(); WEIGHT_TILE_ROWS]; count.div_ceil(WEIGHT_TILE_ROWS)];
        let k = measure.top.map(|k| k.min(part.problem().dims().k_len));
        Self {
            first,
            step,
            count,
            mass: zeros(),
            log_sum: measure.entropy.then(zeros),
            distance: measure.mean_distance.then(zeros),
            spans: measure.spans.iter().map(|_| zeros()).collect(),
            matches: measure.matches.iter().map(|_| zeros()).collect(),
            top: k.map(|k| TopK::new(k, count)),
            best: Vec::new(),
            cells: grids.iter().map(|grid| Cells::new(grid.as_ref(), &rows)).collect(),
        }
    }

    /// Adds the weights of a tile.
    fn add(
        &mut self,
        tile: &WeightTile<'_, N>,
        grids: &[Option<Grid>],
        (measure, counts): (&Measure, Option<&[N]>),
        isa: Isa,
    ) {
        let group = (tile.row(0) - self.first) / self.step / WEIGHT_TILE_ROWS;
        let mut weighting = [N::one(); WEIGHT_TILE_ROWS];
        if let Some(counts) = counts {
            let lanes = weighting.iter_mut().take(tile.rows()).enumerate();
            lanes.for_each(|(lane, count)| *count = counts[tile.row(lane)]);
        }
        isa.run(
            #[inline(always)]
            || {
                add_mass(tile, &mut self.mass[group]);
                if let Some(log_sum) = &mut self.log_sum {
                    add_logs(tile, &mut log_sum[group]);
                }
                if let Some(distance) = &mut self.distance {
                    add_distances(tile, &mut distance[group]);
                }
                for (mass, span) in self.spans.iter_mut().zip(&measure.spans) {
                    add_span(tile, span, &mut mass[group]);
                }
                for (mass, labels) in self.matches.iter_mut().zip(&measure.matches) {
                    add_matches(tile, labels, &mut mass[group]);
                }
                for (cells, grid) in self.cells.iter_mut().zip(grids) {
                    if let Some(grid) = grid {
                        cells.add(grid, tile, &weighting);
                    }
                }
                if let Some(top) = &mut self.top {
                    top.add(tile, group);
                }
            },
        );
    }

    /// Adds the sinks to the entropies, and sorts the largest weights.
    fn finish(&mut self, part: &AttentionView<'_, N>, measure: &Measure) {
        let sinks = measure.some_keys != Some(SomeKeys::Later);
        if let Some(log_sum) = self.log_sum.as_mut().filter(|_| sinks) {
            let sinks = part.sink_log2_weights();
            for (sum, log) in log_sum.as_flattened_mut().iter_mut().zip(sinks) {
                *sum = *sum + times_log(log.exp2(), log);
            }
        }
        self.best = self.top.take().map_or_else(Vec::new, TopK::sorted);
    }

    /// The numbers of the strip's queries.
    pub(super) fn rows<'s>(&self, lanes: &'s [Lanes<N>]) -> &'s [N] {
        &lanes.as_flattened()[..self.count]
    }

    /// In nats.
    pub(super) fn entropy(&self) -> impl Iterator<Item = N> + '_ {
        let bits = self.log_sum.as_ref().map_or(&[][..], |sums| self.rows(sums));
        // Rounding can give a value below 0; NaN stays.
        let nats = |bits: &N| -*bits * N::from_f64(LN_2);
        bits.iter().map(nats).map(|nats| if nats < N::zero() { N::zero() } else { nats })
    }

    /// Sums of `a |key - position|`.
    pub(super) fn distance_sums(&self) -> &[N] {
        self.distance.as_ref().map_or(&[][..], |sums| self.rows(sums))
    }

    pub(super) fn mean_distance(&self) -> impl Iterator<Item = N> + '_ {
        let mean = |(sum, mass): (&N, &N)| if *mass == N::zero() { *sum } else { *sum / *mass };
        self.distance_sums().iter().zip(self.rows(&self.mass)).map(mean)
    }
}

/// `a log2 a`, 0 where `a` is 0.
#[inline(always)]
fn times_log<N: Number>(a: N, log: N) -> N {
    if a == N::zero() { N::zero() } else { a * log }
}

#[inline(always)]
fn add_mass<N: Number>(tile: &WeightTile<'_, N>, to: &mut Lanes<N>) {
    let mut sums = [N::zero(); WEIGHT_TILE_ROWS];
    for i in 0..tile.keys() {
        sums.iter_mut().zip(tile.weights(i)).for_each(|(sum, a)| *sum = *sum + *a);
    }
    to.iter_mut().zip(sums).for_each(|(to, sum)| *to = *to + sum);
}

#[inline(always)]
fn add_span<N: Number>(tile: &WeightTile<'_, N>, span: &Range<usize>, to: &mut Lanes<N>) {
    let n = tile.keys();
    if n == 0 || tile.key(n - 1) < span.start || span.end <= tile.key(0) {
        return;
    }
    let mut sums = [N::zero(); WEIGHT_TILE_ROWS];
    for i in (0..n).filter(|i| span.contains(&tile.key(*i))) {
        sums.iter_mut().zip(tile.weights(i)).for_each(|(sum, a)| *sum = *sum + *a);
    }
    to.iter_mut().zip(sums).for_each(|(to, sum)| *to = *to + sum);
}

#[inline(always)]
fn add_matches<N: Number>(tile: &WeightTile<'_, N>, labels: &Labels, to: &mut Lanes<N>) {
    let mut rows = [0; WEIGHT_TILE_ROWS];
    for (lane, label) in rows.iter_mut().enumerate().take(tile.rows()) {
        *label = labels.rows[tile.row(lane)];
    }
    let mut sums = [N::zero(); WEIGHT_TILE_ROWS];
    for i in 0..tile.keys() {
        let label = labels.keys[tile.key(i)];
        let pairs = tile.weights(i).iter().zip(&rows);
        sums.iter_mut().zip(pairs).for_each(|(sum, (a, row))| {
            *sum = *sum + if *row == label { *a } else { N::zero() };
        });
    }
    to.iter_mut().zip(sums).for_each(|(to, sum)| *to = *to + sum);
}

#[inline(always)]
fn add_logs<N: Number>(tile: &WeightTile<'_, N>, to: &mut Lanes<N>) {
    let mut sums = [N::zero(); WEIGHT_TILE_ROWS];
    for i in 0..tile.keys() {
        let pairs = tile.weights(i).iter().zip(tile.log2_weights(i));
        sums.iter_mut().zip(pairs).for_each(|(sum, (a, log))| *sum = *sum + times_log(*a, *log));
    }
    to.iter_mut().zip(sums).for_each(|(to, sum)| *to = *to + sum);
}

#[inline(always)]
fn add_distances<N: Number>(tile: &WeightTile<'_, N>, to: &mut Lanes<N>) {
    let scope = tile.scope();
    let mut positions = [N::zero(); WEIGHT_TILE_ROWS];
    for (lane, position) in positions.iter_mut().enumerate() {
        *position = N::from_f64(scope.position(tile.row(lane)) as f64);
    }
    let mut sums = [N::zero(); WEIGHT_TILE_ROWS];
    for i in 0..tile.keys() {
        let key = N::from_f64(tile.key(i) as f64);
        let pairs = tile.weights(i).iter().zip(&positions);
        sums.iter_mut().zip(pairs).for_each(|(sum, (a, at))| *sum = *sum + *a * (key - *at).abs());
    }
    to.iter_mut().zip(sums).for_each(|(to, sum)| *to = *to + sum);
}

/// The `k` best keys of each query: candidates are kept in a buffer of `2 k`, whose worse half is dropped when it is full, so
/// that a key costs one comparison unless it is better than the `k`-th best so far.
#[derive(Debug)]
struct TopK<N> {
    k: usize,
    rows: Vec<Vec<Candidate<N>>>,
    /// Smallest `log2` of a weight that is still a candidate, 64 queries after another; above that of masked keys.
    least: Vec<Lanes<N>>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate<N> {
    log: N,
    weight: N,
    key: usize,
}

impl<N: Number> TopK<N> {
    fn new(k: usize, rows: usize) -> Self {
        let least = vec![[N::min_value(); WEIGHT_TILE_ROWS]; rows.div_ceil(WEIGHT_TILE_ROWS)];
        Self { k, rows: vec![Vec::new(); rows], least }
    }

    #[inline(always)]
    fn add(&mut self, tile: &WeightTile<'_, N>, group: usize) {
        let least = &mut self.least[group];
        for i in 0..tile.keys() {
            let logs = tile.log2_weights(i);
            // Keys ascend: of equal weights the earlier one stays, and heads that weight all keys alike cost nothing here.
            let any =
                logs.iter().zip(&*least).fold(false, |any, (log, least)| any | (*log > *least));
            if any {
                for lane in 0..tile.rows() {
                    if logs[lane] > least[lane] {
                        let (log, weight) = (logs[lane], tile.weights(i)[lane]);
                        let row = &mut self.rows[group * WEIGHT_TILE_ROWS + lane];
                        row.push(Candidate { log, weight, key: tile.key(i) });
                        if row.len() >= 2 * self.k {
                            row.select_nth_unstable_by(self.k - 1, Candidate::order);
                            row.truncate(self.k);
                            least[lane] = row[self.k - 1].log;
                        }
                    }
                }
            }
        }
    }

    /// Weights and keys of each query, the best first.
    fn sorted(self) -> Vec<Vec<(N, usize)>> {
        let sort = |mut row: Vec<Candidate<N>>| {
            row.sort_unstable_by(Candidate::order);
            row.iter().take(self.k).map(|c| (c.weight, c.key)).collect()
        };
        self.rows.into_iter().map(sort).collect()
    }
}

impl<N: Number> Candidate<N> {
    /// Better candidates first: of higher weight, then of earlier position.
    fn order(&self, other: &Self) -> std::cmp::Ordering {
        let by_weight = other.log.partial_cmp(&self.log).unwrap_or(std::cmp::Ordering::Equal);
        by_weight.then(self.key.cmp(&other.key))
    }
}
