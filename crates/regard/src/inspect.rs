//! Attention weights, recomputed from queries, keys and the log-sum-exp of a forward pass, and never stored as a whole.
//!
//! Cost for `n` queries with `m` visible keys each: `2 n m qk_dim` flops and one power for each pair.

use crate::description::mask::Mask;
use crate::description::problem::Problem;
use crate::description::score::in_log2;
use crate::error::Error;
use crate::kernel::block_loop::{Call, KeyRange, TILE_ROWS};
use crate::kernel::weights_pass::{Softmaxes, WeightsPass};
pub use crate::kernel::weights_pass::{WEIGHT_TILE_ROWS, WeightScratch, WeightTile};
use crate::machine::Machine;
use crate::machine::simd::{Element, Number};
use crate::plan::output::{Output, OutputView};
use crate::plan::{Core, Plan};
use crate::tensor::cache::{KvCache, Sequence};
use crate::tensor::index::RowTile;
use crate::tensor::source::Source;
use crate::tensor::view::{Tensor, View};
use std::ops::Range;
use std::sync::Arc;

/// The attention weights of a call: `a_ij = e^(score_ij - lse_i)`, before dropout and before the factor of
/// [`Local`](crate::problem::Local) in its window.
///
/// Weights are recomputed, exact to rounding, from queries, keys and `lse` whenever they are read, so that sequences of any
/// length can be inspected, and the forward pass needs no slower mode for it.
///
/// ```
/// use regard::{AttentionView, Machine, Mask, Plan, Problem, View};
/// let data: Vec<f32> = (0..2 * 10 * 8).map(|i| (i as f32).sin()).collect();
/// let x = View::bhsd(&data, [1, 2, 10, 8])?;
/// let plan = Plan::new(Problem::new(&x, &x, &x).mask(Mask::causal()), Machine::detect())?;
/// let output = plan.forward(x, x, x)?;
/// let view = AttentionView::new(&plan, x, x, &output)?;
/// let row = view.head(0, 1)?.row(4)?;
/// assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-5);
/// assert_eq!(row[5..], [0.0; 5]);
/// # Ok::<(), regard::Error>(())
/// ```
///
/// A view can be narrowed to one [`head`](Self::head), some [`rows`](Self::rows), [`every`](Self::every) n-th of them, some
/// [`keys`](Self::keys), or the pairs of another [`mask`](Self::mask). [`row`](Self::row) and [`tile`](Self::tile) return weights;
/// [`for_each_tile`](Self::for_each_tile) streams them to code that needs no copy. Statistics, comparisons and pictures are in
/// the crate `regard-scope`.
#[derive(Clone, Debug)]
pub struct AttentionView<'a, N: Number> {
    problem: Problem<'a, N>,
    machine: Machine,
    q: View<'a, N>,
    k: Source<'a, N>,
    /// Keys times the matrix of the similarity, if it has one.
    projected: Option<Arc<Tensor<N>>>,
    softmaxes: Softmaxes<'a, N>,
    /// Of `batch x heads.q`.
    heads: Range<usize>,
    /// All if `None`; may reach beyond the last one.
    rows: Option<Range<usize>>,
    step: usize,
    /// All if `None`; may reach beyond the last one.
    keys: Option<Range<usize>>,
    /// The pairs that are read: those of the problem, or fewer.
    mask: Mask,
}

impl<'a, N: Number> AttentionView<'a, N> {
    /// The weights behind an output: `plan`, `q` and `k` are those it was computed with.
    #[inline(never)]
    pub fn new<'p: 'a, E: Element<Num = N>>(
        plan: &Plan<'p, E>,
        q: View<'a, E>,
        k: View<'a, E>,
        output: &'a Output<E>,
    ) -> Result<Self, Error> {
        let (core, q, k) = (plan.core(), q.erase(), k.erase());
        core.check_tensors(&[&q, &k])?;
        let mut view = Self::over(core, q, Source::Tensor(k), &output.lse)?;
        view.take(plan, output)?;
        view.project(core, &k)?;
        Ok(view)
    }

    /// The same from `lse [batch, heads.q, q_len]` alone. The [`Normalizer`](crate::problem::Normalizer) must be the softmax. Scores above
    /// about 1000 need the whole output: the rounding error of their `lse` is the relative error of all weights.
    #[inline(never)]
    pub fn from_lse<'p: 'a, E: Element<Num = N>>(
        plan: &Plan<'p, E>,
        q: View<'a, E>,
        k: View<'a, E>,
        lse: &'a [N],
    ) -> Result<Self, Error> {
        let (core, q, k) = (plan.core(), q.erase(), k.erase());
        core.check_tensors(&[&q, &k])?;
        let mut view = Self::over(core, q, Source::Tensor(k), lse)?;
        view.check_selection()?;
        view.project(core, &k)?;
        Ok(view)
    }

    /// The weights behind an output of [`Plan::forward_cached`]; the sequences hold what they held then.
    #[inline(never)]
    pub fn cached<'p: 'a, E: Element<Num = N>>(
        plan: &'a Plan<'p, E>,
        q: View<'a, E>,
        (cache, sequences): (&'a KvCache<E>, &'a [Sequence]),
        output: &'a Output<E>,
    ) -> Result<Self, Error> {
        let call = plan.check_cached(q, cache, sequences)?;
        let mut view = Self::over(plan.core(), call.q, call.k, &output.lse)?;
        view.take(plan, output)?;
        Ok(view)
    }

    /// The same from `lse` alone, as [`from_lse`](Self::from_lse) has it.
    #[inline(never)]
    pub fn cached_from_lse<'p: 'a, E: Element<Num = N>>(
        plan: &'a Plan<'p, E>,
        q: View<'a, E>,
        (cache, sequences): (&'a KvCache<E>, &'a [Sequence]),
        lse: &'a [N],
    ) -> Result<Self, Error> {
        let call = plan.check_cached(q, cache, sequences)?;
        let view = Self::over(plan.core(), call.q, call.k, lse)?;
        view.check_selection()?;
        Ok(view)
    }

    fn over<'p: 'a>(
        plan: &Core<'p, N>,
        q: View<'a, N>,
        k: Source<'a, N>,
        lse: &'a [N],
    ) -> Result<Self, Error> {
        let problem: Problem<'a, N> = plan.problem().clone();
        Error::unless_one_each_row("lse", problem.rows(), lse.len())?;
        let dims = problem.dims();
        Ok(Self {
            machine: plan.machine(),
            q,
            k,
            projected: None,
            softmaxes: Softmaxes { lse, states: &[] },
            heads: 0..dims.batch * dims.heads.q,
            rows: None,
            step: 1,
            keys: None,
            mask: problem.mask.clone(),
            problem,
        })
    }

    /// Takes the states and the selection of an output.
    fn take<E: Element<Num = N>>(
        &mut self,
        plan: &Plan<'_, E>,
        output: &'a Output<E>,
    ) -> Result<(), Error> {
        OutputView::from(output).check_rows(self.problem.rows())?;
        self.softmaxes.states = &output.states;
        if let Some(selection) = output.selection.as_ref().filter(|_| self.problem.selects()) {
            plan.check_selection(selection)?;
            self.problem = self.problem.selecting(selection, self.problem.normalizer.rule());
        }
        self.check_selection()
    }

    fn check_selection(&self) -> Result<(), Error> {
        let normalizer = self.problem.normalizer.name();
        if self.problem.selects() { Err(Error::NoSelection { normalizer }) } else { Ok(()) }
    }

    /// Multiplies keys by the matrix of the similarity, if it has one.
    fn project(&mut self, plan: &Core<'_, N>, k: &View<'a, N>) -> Result<(), Error> {
        if let Some((_, keys)) = plan.with_projected_keys(k)? {
            self.problem = self.problem.with_projected_keys();
            self.projected = Some(Arc::new(keys));
        }
        Ok(())
    }

    /// The problem.
    #[must_use]
    pub fn problem(&self) -> &Problem<'a, N> {
        &self.problem
    }

    /// The machine of the plan.
    #[must_use]
    pub fn machine(&self) -> Machine {
        self.machine
    }

    /// One head of one item alone.
    pub fn head(&self, batch: usize, head: usize) -> Result<Self, Error> {
        let dims = self.problem.dims();
        Error::unless_below("batch", batch, dims.batch)?;
        Error::unless_below("head", head, dims.heads.q)?;
        let head = batch * dims.heads.q + head;
        Ok(Self { heads: head..head + 1, ..self.clone() })
    }

    /// Some queries alone; the range may reach beyond the last one.
    #[must_use]
    pub fn rows(&self, rows: Range<usize>) -> Self {
        Self { rows: Some(rows), ..self.clone() }
    }

    /// Every `step`-th query alone, from the first on: a sample of evenly spaced rows, each of them exact.
    pub fn every(&self, step: usize) -> Result<Self, Error> {
        if step == 0 {
            return Err(Error::Zero { option: "step" });
        }
        // Beyond the last query all steps are alike.
        Ok(Self { step: step.min(self.problem.dims().q_len.max(1)), ..self.clone() })
    }

    /// Some keys alone; the range may reach beyond the last one.
    #[must_use]
    pub fn keys(&self, keys: Range<usize>) -> Self {
        Self { keys: Some(keys), ..self.clone() }
    }

    /// The pairs that another mask leaves visible alone; other weights are left out, and those that remain are not normalized
    /// again. Costs what these pairs cost.
    pub fn mask(&self, mask: Mask) -> Result<Self, Error> {
        self.problem.check_mask(&mask)?;
        Ok(Self { mask: self.mask.clone().and(mask), ..self.clone() })
    }

    /// The heads of the view: batch item and query head, items outermost.
    pub fn heads(&self) -> impl Iterator<Item = (usize, usize)> + use<N> {
        let heads = self.problem.dims().heads.q;
        self.heads.clone().map(move |i| (i / heads, i % heads))
    }

    /// The queries of the view in a batch item, and from one of them to the next.
    #[must_use]
    pub fn rows_of(&self, batch: usize) -> (Range<usize>, usize) {
        (clip(self.rows.as_ref(), self.problem.q_len(batch)), self.step)
    }

    /// Number of queries of the view in a batch item.
    #[must_use]
    pub fn row_count(&self, batch: usize) -> usize {
        self.rows_of(batch).0.len().div_ceil(self.step)
    }

    /// The keys of the view in a batch item.
    #[must_use]
    pub fn keys_of(&self, batch: usize) -> Range<usize> {
        clip(self.keys.as_ref(), self.problem.k_len(batch))
    }

    /// Rows and keys as [`rows`](Self::rows) and [`keys`](Self::keys) were given them, which may reach beyond the last ones.
    #[must_use]
    pub fn ranges(&self) -> [Option<Range<usize>>; 2] {
        [self.rows.clone(), self.keys.clone()]
    }

    /// The view in parts of one head and at most `rows` queries each, in order: for threads that work on them in parallel.
    #[must_use]
    pub fn parts(&self, rows: usize) -> Vec<Self> {
        let (heads, each) = (self.problem.dims().heads.q, rows.max(1).saturating_mul(self.step));
        let mut parts = Vec::new();
        for (batch, head) in self.heads() {
            let (rows, head) = (self.rows_of(batch).0, batch * heads + head);
            for first in rows.clone().step_by(each) {
                let rows = Some(first..first.saturating_add(each).min(rows.end));
                parts.push(Self { heads: head..head + 1, rows, ..self.clone() });
            }
        }
        parts
    }

    /// Memory for [`for_each_tile`](Self::for_each_tile) of this view or a narrower one; `logs`: for
    /// [`WeightTile::log2_weights`] as well.
    #[must_use]
    pub fn scratch(&self, logs: bool) -> WeightScratch<N> {
        WeightScratch::new(&self.problem, logs)
    }

    /// Computes the weights of the view on the calling thread and passes them to `visit`, tile by tile. Tiles without a visible
    /// pair are left out. A visible pair is in exactly one tile; other tiles may hold its query and its key with a weight of 0.
    pub fn for_each_tile(
        &self,
        scratch: &mut WeightScratch<N>,
        visit: &mut dyn FnMut(WeightTile<'_, N>),
    ) {
        for (batch, head) in self.heads() {
            let (scope, rows) = (self.problem.scope(batch, head), self.rows_of(batch).0);
            let key_range = KeyRange { mask: &self.mask, without: None, keys: self.keys_of(batch) };
            for first in rows.clone().step_by(TILE_ROWS * self.step) {
                let count = (rows.end - first).div_ceil(self.step).min(TILE_ROWS);
                let rows = RowTile { first, step: self.step, count };
                let (call, softmaxes) = (self.call(), self.softmaxes);
                WeightsPass { call, softmaxes, scope, rows, key_range: &key_range }.run(
                    self.machine.isa,
                    scratch,
                    visit,
                );
            }
        }
    }

    fn call(&self) -> Call<'_, N> {
        let k = self.projected.as_deref().map_or(self.k, |keys| Source::Tensor(keys.view()));
        Call { problem: &self.problem, q: self.q, k, v: k }
    }

    /// The weights of one query for every key of its item, `[heads, k_len]`; 0 for masked keys.
    pub fn row(&self, row: usize) -> Result<Vec<N>, Error> {
        for (batch, _) in self.heads() {
            Error::unless_below("row", row, self.problem.q_len(batch))?;
        }
        self.tile(row..row + 1, 0..self.problem.dims().k_len)
    }

    /// The weights of some queries for some keys, `[heads, rows, keys]`; 0 for masked keys. Ranges are clipped to the last query
    /// and key.
    #[inline(never)]
    pub fn tile(&self, rows: Range<usize>, keys: Range<usize>) -> Result<Vec<N>, Error> {
        let all = Self { rows: Some(rows), keys: Some(keys), step: 1, ..self.clone() };
        let size = |batch| (all.rows_of(batch).0.len() as u128) * all.keys_of(batch).len() as u128;
        let numbers = all.heads().map(|(batch, _)| size(batch)).sum::<u128>();
        let bytes = numbers.saturating_mul(size_of::<N>() as u128);
        let refused = || Error::OutOfMemory { bytes: usize::try_from(bytes).unwrap_or(usize::MAX) };
        let mut weights = Vec::new();
        let numbers = usize::try_from(numbers).map_err(|_| refused())?;
        weights.try_reserve_exact(numbers).map_err(|_| refused())?;
        let parts = all.parts(TILE_PART_ROWS);
        let scratch = || all.scratch(false);
        let found = all.machine.collect(parts.len(), scratch, |scratch, i| parts[i].dense(scratch));
        found.iter().for_each(|part| weights.extend_from_slice(part));
        Ok(weights)
    }

    /// The weights of a view of one head, `[rows, keys]`.
    fn dense(&self, scratch: &mut WeightScratch<N>) -> Vec<N> {
        let Some((batch, _)) = self.heads().next() else { return Vec::new() };
        let (rows, keys) = (self.rows_of(batch).0, self.keys_of(batch));
        let mut weights = vec![N::zero(); rows.len() * keys.len()];
        self.for_each_tile(scratch, &mut |tile| {
            for i in 0..tile.keys() {
                let key = tile.key(i) - keys.start;
                for (lane, weight) in tile.weights(i)[..tile.rows()].iter().enumerate() {
                    let to = &mut weights[(tile.row(lane) - rows.start) * keys.len() + key];
                    *to = *to + *weight;
                }
            }
        });
        weights
    }

    /// `log2` of the weight that the [sink](crate::Score::sinks) of its head takes of each query; `-inf` without sinks. One head
    /// after another, items outermost, one query after another.
    #[must_use]
    pub fn sink_log2_weights(&self) -> Vec<N> {
        let mut logs = Vec::new();
        for (batch, head) in self.heads() {
            let scope = self.problem.scope(batch, head);
            let sink = self.problem.score.sinks.map(|sinks| in_log2(sinks[head]));
            let (rows, step) = self.rows_of(batch);
            for row in rows.step_by(step) {
                let (max, share) = self.softmaxes.of_row(self.problem.row_index(scope, row));
                logs.push(sink.map_or(N::neg_infinity(), |sink| sink - max + share.log2()));
            }
        }
        logs
    }
}

/// Rows of a part of [`AttentionView::tile`].
const TILE_PART_ROWS: usize = 512;

/// The part of a range that exists.
fn clip(range: Option<&Range<usize>>, end: usize) -> Range<usize> {
    let Some(Range { start, end: last }) = range else { return 0..end };
    let end = end.min(*last);
    (*start).min(end)..end
}
