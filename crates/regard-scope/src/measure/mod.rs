//! Statistics of attention weights, all of them in one pass that stores no attention matrix.

mod audit;
mod diff;
mod grid;
mod pass;
mod rollout;

pub use audit::{HeadAudit, Pattern, RetainedMass, audit};
pub use diff::{Divergence, diff};
use grid::Grid;
pub(crate) use grid::MapPart;
use pass::Strip;
use regard::{AttentionView, Error, Mask, Number};
pub use rollout::rollout;
use std::ops::Range;
use std::sync::Arc;

/// Statistics to compute, all in one pass over the weights of a view.
///
/// ```
/// # use regard::{AttentionView, Machine, Plan, Problem, View};
/// use regard_scope::{Measure, Pool};
/// # let data: Vec<f32> = (0..10 * 8).map(|i| (i as f32).sin()).collect();
/// # let x = View::bhsd(&data, [1, 1, 10, 8])?;
/// # let plan = Plan::new(Problem::new(&x, &x, &x), Machine::detect())?;
/// # let output = plan.forward(x, x, x)?;
/// let view = AttentionView::new(&plan, x, x, &output)?;
/// let found = Measure::new().entropy().top_k(3).pooled(5, 5, Pool::Mean).of(&view)?;
/// assert_eq!(found.top.keys(0).len(), 3);
/// assert_eq!(found.pooled[0].values.len(), 25);
/// # Ok::<(), regard::Error>(())
/// ```
///
/// Cost: that of the weights ([`AttentionView`]) and a few operations for each pair and statistic; one more pass for each mask.
/// Memory: the results, and up to 32 numbers for each key with [`col_sum`](Self::col_sum). The results are the same bits for
/// any number of threads.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Measure {
    entropy: bool,
    mean_distance: bool,
    col_sum: bool,
    sink_mass: bool,
    top: Option<usize>,
    pooled: Vec<([usize; 2], Pool)>,
    masks: Vec<Mask>,
    spans: Vec<Range<usize>>,
    matches: Vec<Labels>,
    some_keys: Option<SomeKeys>,
    part: Option<MapPart>,
}

/// A label for each query and each key of an item.
#[derive(Clone, Debug)]
struct Labels {
    rows: Arc<[u32]>,
    keys: Arc<[u32]>,
}

/// What a view has of the keys of its rows. Distances are sums then, not divided by the weight of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SomeKeys {
    /// The first ones, and the sinks with them.
    First,
    /// Others.
    Later,
}

/// What a cell of a pooled attention map holds of its weights; those of masked pairs are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pool {
    /// Their mean.
    Mean,
    /// The largest.
    Max,
    /// Their sum.
    Sum,
}

impl Labels {
    /// Whether there is one for each query and each key of an item.
    fn check(&self, [q_len, k_len]: [usize; 2]) -> Result<(), Error> {
        for (option, expected, found) in [
            ("match_mass, labels of queries", (q_len, "one for each query"), self.rows.len()),
            ("match_mass, labels of keys", (k_len, "one for each key"), self.keys.len()),
        ] {
            if found != expected.0 {
                return Err(Error::Count { option, expected, found });
            }
        }
        Ok(())
    }
}

impl Measure {
    /// No statistics yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The entropy of each query's weights, `-sum of a ln a`; a sink counts as a key.
    pub fn entropy(self) -> Self {
        Self { entropy: true, ..self }
    }

    /// The mean of `|key - position|` over each query's weights; 0 for a fully masked query.
    pub fn mean_distance(self) -> Self {
        Self { mean_distance: true, ..self }
    }

    /// The sum of the weights of each key over all queries.
    pub fn col_sum(self) -> Self {
        Self { col_sum: true, ..self }
    }

    /// The weight that the [sink](regard::Score::sinks) of its head takes of each query; 0 without sinks.
    pub fn sink_mass(self) -> Self {
        Self { sink_mass: true, ..self }
    }

    /// The `k` largest weights of each query, and their keys.
    pub fn top_k(self, k: usize) -> Self {
        Self { top: Some(k), ..self }
    }

    /// The attention map in at most `rows x cols` cells of equal size. May be called several times. If the rows or keys of the
    /// view reach beyond the last one, cells are as large as if these were there.
    pub fn pooled(mut self, rows: usize, cols: usize, pool: Pool) -> Self {
        self.pooled.push(([rows, cols], pool));
        self
    }

    /// The sum of each query's weights over the keys that a mask leaves visible. The weight of the first tokens, attention
    /// sinks in many models, is `mass(Mask::prefix(n))`. May be called several times; each mask costs a pass over its pairs.
    pub fn mass(mut self, mask: Mask) -> Self {
        self.masks.push(mask);
        self
    }

    /// The sum of each query's weights over the keys of each span, which may overlap and reach beyond the last key: the attention
    /// mass on the parts of a text. All spans in the pass of the other statistics.
    pub fn span_mass(mut self, spans: impl IntoIterator<Item = Range<usize>>) -> Self {
        self.spans.extend(spans);
        self
    }

    /// The sum of each query's weights over the keys that have the same label as the query: one label for each query of an item, one
    /// for each key. May be called several times, all in the pass of the other statistics.
    pub fn match_mass(mut self, rows: &[u32], keys: &[u32]) -> Self {
        self.matches.push(Labels { rows: rows.into(), keys: keys.into() });
        self
    }

    /// Of a view that has some of the keys of its rows: sums, to be added to those of other keys.
    pub(crate) fn of_some_keys(self, some: SomeKeys) -> Self {
        Self { some_keys: Some(some), ..self }
    }

    /// The largest weights in the cells of a map that the view is a part of.
    pub(crate) fn part_of_map(self, part: MapPart) -> Self {
        Self { part: Some(part), ..self }
    }

    /// Computes the statistics.
    pub fn of<N: Number>(&self, view: &AttentionView<'_, N>) -> Result<MeasureOutput<N>, Error> {
        self.weighted(view, None)
    }

    /// As [`of`](Self::of), with the sums over queries weighted by `counts`, one number for each query of an item.
    fn weighted<N: Number>(
        &self,
        view: &AttentionView<'_, N>,
        counts: Option<&[N]>,
    ) -> Result<MeasureOutput<N>, Error> {
        self.check()?;
        for batch in view.heads().map(|(batch, _)| batch) {
            let lens = [view.problem().scope(batch, 0).q_len, view.problem().scope(batch, 0).k_len];
            self.matches.iter().try_for_each(|labels| labels.check(lens))?;
        }
        let masked: Vec<_> =
            self.masks.iter().map(|mask| view.mask(mask.clone())).collect::<Result<_, _>>()?;
        let mut measured = self.empty(view);
        if self.reads_all() {
            pass::run(self, view, counts, |batch, strips| {
                self.add(view, batch, strips, &mut measured);
            })?;
        }
        for view in masked {
            let mut mass = Vec::new();
            let none = Self::new();
            pass::run(&none, &view, None, |_, strips| {
                strips.iter().for_each(|strip| mass.extend(strip.rows(&strip.mass)));
            })?;
            measured.masses.push(mass);
        }
        if self.sink_mass {
            measured.sink_mass = view.sink_log2_weights().iter().map(|log| log.exp2()).collect();
        }
        Ok(measured)
    }

    fn check(&self) -> Result<(), Error> {
        let cells =
            self.pooled.iter().flat_map(|(cells, _)| ["rows", "cols"].into_iter().zip(*cells));
        let mut counts = cells.chain([("top_k", self.top.unwrap_or(1))]);
        match counts.find(|(_, n)| *n == 0) {
            Some((option, _)) => Err(Error::Zero { option }),
            None => Ok(()),
        }
    }

    /// Whether a pass over all pairs is needed.
    fn reads_all(&self) -> bool {
        let Self { entropy, mean_distance, col_sum, top, pooled, part, spans, matches, .. } = self;
        let maps = !pooled.is_empty() || part.is_some();
        let masses = !spans.is_empty() || !matches.is_empty();
        *entropy || *mean_distance || *col_sum || top.is_some() || maps || masses
    }

    fn empty<N: Number>(&self, view: &AttentionView<'_, N>) -> MeasureOutput<N> {
        let k = self.top.unwrap_or(0).min(view.problem().dims().k_len);
        MeasureOutput {
            top: Top { k, ..Top::default() },
            spans: vec![Vec::new(); self.spans.len()],
            matches: vec![Vec::new(); self.matches.len()],
            ..MeasureOutput::default()
        }
    }

    /// The grids of a head: the column sums, the part of a map, then the pooled maps; none where there is no cell.
    fn grids<N: Number>(&self, view: &AttentionView<'_, N>, batch: usize) -> Vec<Option<Grid>> {
        let col_sum = self.col_sum.then(|| Grid::new(view, batch, [1, usize::MAX], false));
        let pooled = self.pooled.iter();
        let pooled = pooled.map(|(cells, pool)| Grid::new(view, batch, *cells, *pool == Pool::Max));
        let part = self.part.as_ref().map(|part| Grid::of_part(view, part));
        col_sum.into_iter().chain(part).chain(pooled).collect()
    }

    /// Adds the strips of one head.
    fn add<N: Number>(
        &self,
        view: &AttentionView<'_, N>,
        batch: usize,
        strips: Vec<Strip<N>>,
        to: &mut MeasureOutput<N>,
    ) {
        for strip in &strips {
            if self.entropy {
                to.entropy.extend(strip.entropy());
            }
            if self.some_keys.is_some() {
                to.mean_distance.extend(strip.distance_sums());
            } else if self.mean_distance {
                to.mean_distance.extend(strip.mean_distance());
            }
            let spans = to.spans.iter_mut().zip(&strip.spans);
            for (to, mass) in spans.chain(to.matches.iter_mut().zip(&strip.matches)) {
                to.extend(strip.rows(mass));
            }
        }
        let mut grids = self.grids(view, batch).into_iter().enumerate().map(|(i, grid)| {
            let grid = grid?;
            let mut values = grid.zeros();
            strips.iter().for_each(|strip| strip.cells[i].join_into(&grid, &mut values));
            Some((grid, values))
        });
        let narrow = |values: Vec<f64>| values.into_iter().map(N::from_f64).collect::<Vec<N>>();
        if self.col_sum {
            let sums = grids.next().flatten().map(|(_, sums)| narrow(sums));
            to.col_sum.extend(sums.unwrap_or_else(|| vec![N::zero(); view.keys_of(batch).len()]));
        }
        if self.part.is_some() {
            let cells = grids.next().flatten().map(|(grid, values)| {
                let [rows, cols] = grid.size();
                (grid.first(), PooledMap { rows, cols, values: narrow(values) })
            });
            to.parts.extend(cells);
        }
        for (grid, (_, pool)) in grids.zip(&self.pooled) {
            to.pooled.push(match grid {
                None => PooledMap { rows: 0, cols: 0, values: Vec::new() },
                Some((grid, mut values)) => {
                    if *pool == Pool::Mean {
                        grid.divide_by_pairs(view, batch, &mut values);
                    }
                    let [rows, cols] = grid.size();
                    PooledMap { rows, cols, values: narrow(values) }
                }
            });
        }
        for strip in strips {
            strip.best.into_iter().for_each(|best| to.top.push(best));
        }
    }
}

/// Statistics: one head after another, items outermost, and one query after another. Those that were not asked for are empty.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct MeasureOutput<N> {
    /// `[heads, rows]`
    pub entropy: Vec<N>,
    /// `[heads, rows]`
    pub mean_distance: Vec<N>,
    /// `[heads, keys]`
    pub col_sum: Vec<N>,
    /// `[heads, rows]`
    pub sink_mass: Vec<N>,
    /// `[heads, rows]`
    pub top: Top<N>,
    /// One map for each head and each [`Measure::pooled`], the maps of a head side by side.
    pub pooled: Vec<PooledMap<N>>,
    /// `[heads, rows]` for each mask.
    pub masses: Vec<Vec<N>>,
    /// `[heads, rows]` for each span.
    pub spans: Vec<Vec<N>>,
    /// `[heads, rows]` for each [`Measure::match_mass`].
    pub matches: Vec<Vec<N>>,
    /// For each head the cells of a map that the view is a part of, and which of them is the first.
    pub(crate) parts: Vec<([usize; 2], PooledMap<N>)>,
}

/// The largest weights of each query.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Top<N> {
    k: usize,
    keys: Vec<usize>,
    weights: Vec<N>,
}

impl<N: Number> Top<N> {
    /// Adds a query: its weights and keys, the largest first.
    fn push(&mut self, best: Vec<(N, usize)>) {
        let none = (N::zero(), usize::MAX);
        for (weight, key) in best.into_iter().chain(std::iter::repeat(none)).take(self.k) {
            self.weights.push(weight);
            self.keys.push(key);
        }
    }
}

impl<N> Top<N> {
    /// Number of queries.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.keys.len().checked_div(self.k).unwrap_or(0)
    }

    /// The keys of a query, the one with the largest weight first, the earlier one of equal scores; fewer than `k` if fewer are
    /// visible.
    ///
    /// # Panics
    /// If the row does not exist.
    #[must_use]
    pub fn keys(&self, row: usize) -> &[usize] {
        let keys = &self.keys[row * self.k..][..self.k];
        &keys[..keys.iter().position(|key| *key == usize::MAX).unwrap_or(self.k)]
    }

    /// The weights of these keys.
    ///
    /// # Panics
    /// If the row does not exist.
    #[must_use]
    pub fn weights(&self, row: usize) -> &[N] {
        &self.weights[row * self.k..][..self.keys(row).len()]
    }
}

/// The attention map of a head in cells.
#[derive(Clone, Debug, PartialEq)]
pub struct PooledMap<N> {
    /// Rows of cells.
    pub rows: usize,
    /// Columns of cells.
    pub cols: usize,
    /// `[rows, cols]`
    pub values: Vec<N>,
}
