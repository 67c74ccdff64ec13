//! What a head looks at: weights made again from queries, keys and the softmax that a forward pass has left, and measured
//! without ever being stored.
//!
//! Cost of a look at `n` queries with `m` visible keys each: `2 n m qk_dim` flops and one power for each pair, on all threads,
//! whatever is asked for in one [`Measure`]. Memory: the answer, and 32 numbers for each key where sums run over queries.

mod audit;
mod diff;
mod measure;
mod rollout;

use crate::description::mask::Mask;
use crate::description::problem::Problem;
use crate::description::score::in_log2;
use crate::error::Error;
use crate::kernel::block_loop::{Call, KeyRange};
use crate::kernel::weights_pass::{
    Counts, Cut, Grid, RowStats, Scratch, Softmaxes, WeightsPass, WeightsQuery,
};
use crate::machine::Machine;
use crate::machine::simd::{Element, Number};
use crate::plan::output::{Output, OutputView};
use crate::plan::{Core, Plan};
use crate::tensor::cache::{KvCache, Sequence};
use crate::tensor::index::RowTile;
use crate::tensor::source::Source;
use crate::tensor::view::{Tensor, View};
pub use audit::{Audit, HeadAudit, Pattern};
pub use diff::Divergence;
pub use measure::{Measure, Measured, Pool, Pooled, Top};
pub use rollout::rollout;
use std::ops::Range;
use std::sync::Arc;

/// The weights of a call, to be looked at: `a_ij = e^(score_ij - lse_i)`, before dropout and before what
/// [`Local`](crate::Local) multiplies them by in its window.
///
/// Weights are made again, exact to rounding, from queries, keys and `lse`, whenever something is asked for; none is ever
/// stored that the answer does not hold. So any length can be looked at, and forward has no slower mode for it.
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
/// Results are one head after another, items outermost, and one query after another in each: as `lse` is, unless queries are
/// packed. Narrow a view to one [`head`](Self::head), to some [`rows`](Self::rows), or to [`every`](Self::every) n-th of them.
#[derive(Clone, Debug)]
pub struct AttentionView<'a, N: Number> {
    problem: Problem<'a, N>,
    machine: Machine,
    q: View<'a, N>,
    k: Source<'a, N>,
    /// Keys times what the similarity multiplies them by.
    projected: Option<Arc<Tensor<N>>>,
    softmaxes: Softmaxes<'a, N>,
    /// Of `batch x heads.q`.
    heads: Range<usize>,
    /// All where none are named; may reach beyond what there is.
    rows: Option<Range<usize>>,
    step: usize,
}

impl<'a, N: Number> AttentionView<'a, N> {
    /// The weights behind an output: `plan`, `q` and `k` are those it was made with.
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

    /// The same where only `lse [batch, heads.q, q_len]` was kept. The [`Normalizer`](crate::Normalizer) must be the softmax.
    /// Scores above about 1000 need all of the output: their `lse` cannot hold what they differ by.
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
        view.unless_chosen()?;
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
            problem,
        })
    }

    /// Takes all that an output knows of its weights.
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
        self.unless_chosen()
    }

    fn unless_chosen(&self) -> Result<(), Error> {
        let normalizer = self.problem.normalizer.name();
        if self.problem.selects() { Err(Error::NoSelection { normalizer }) } else { Ok(()) }
    }

    /// Multiplies keys by what the similarity multiplies them by.
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

    /// One head of one item alone.
    pub fn head(&self, batch: usize, head: usize) -> Result<Self, Error> {
        let dims = self.problem.dims();
        below("batch", batch, dims.batch)?;
        below("head", head, dims.heads.q)?;
        let head = batch * dims.heads.q + head;
        Ok(Self { heads: head..head + 1, ..self.clone() })
    }

    /// Some queries alone; what lies beyond the last one is cut off. Cells of a [`pooled`](Self::pooled) map are as large as if it were
    /// there.
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

    /// The queries of a head that are looked at.
    fn rows_of(&self, batch: usize) -> Range<usize> {
        let q_len = self.problem.q_len(batch);
        let rows = self.rows.clone().unwrap_or(0..q_len);
        let end = rows.end.min(q_len);
        rows.start.min(end)..end
    }

    /// Looks at a tile of rows of a head.
    fn tile_stats(
        &self,
        (batch, head): (usize, usize),
        rows: RowTile,
        (key_range, query): (&KeyRange<'_>, &WeightsQuery),
        counts: Counts<'_, N>,
        (scratch, stats): (&mut Scratch<N>, &mut RowStats<N>),
    ) {
        let (call, softmaxes) = (self.call(), self.softmaxes);
        let scope = self.problem.scope(batch, head);
        WeightsPass { call, softmaxes, scope, rows, key_range, query, counts, scratch, stats }
            .run(self.machine.isa);
    }

    fn call(&self) -> Call<'_, N> {
        let k = self.projected.as_deref().map_or(self.k, |keys| Source::Tensor(keys.view()));
        Call { problem: &self.problem, q: self.q, k, v: k }
    }

    /// The weights of one query for every key of its item, `[heads, k_len]`; 0 where it does not see them.
    pub fn row(&self, row: usize) -> Result<Vec<N>, Error> {
        for (batch, _) in self.each_head() {
            below("row", row, self.problem.q_len(batch))?;
        }
        self.tile(row..row + 1, 0..self.problem.dims().k_len)
    }

    /// The weights of some queries for some keys, `[heads, rows, keys]`; 0 where they do not see each other. What lies beyond
    /// the last query and key is cut off.
    pub fn tile(&self, rows: Range<usize>, keys: Range<usize>) -> Result<Vec<N>, Error> {
        let one = Self { rows: Some(rows), step: 1, ..self.clone() };
        let cells = [usize::MAX; 2];
        let pooled =
            one.measure(&Measure::new().keys(keys).pooled(cells[0], cells[1], Pool::Sum))?.pooled;
        Ok(pooled.into_iter().flat_map(|pooled| pooled.values).collect())
    }

    /// The whole map in at most `rows x cols` cells of equal size, one map for each head: the mean, the largest or the sum of the
    /// weights of each.
    pub fn pooled(&self, rows: usize, cols: usize, pool: Pool) -> Result<Vec<Pooled<N>>, Error> {
        Ok(self.measure(&Measure::new().pooled(rows, cols, pool))?.pooled)
    }

    /// The `k` largest weights of each query, and their keys.
    pub fn top_k(&self, k: usize) -> Result<Top<N>, Error> {
        Ok(self.measure(&Measure::new().top_k(k))?.top.unwrap_or_default())
    }

    /// The entropy of each query's weights (and sink), `-sum of a ln a`.
    pub fn entropy(&self) -> Result<Vec<N>, Error> {
        Ok(self.measure(&Measure::new().entropy())?.entropy.unwrap_or_default())
    }

    /// What each key receives, the sum of its weights over all queries, `[heads, k_len]`.
    pub fn col_sum(&self) -> Result<Vec<N>, Error> {
        Ok(self.measure(&Measure::new().col_sum())?.col_sum.unwrap_or_default())
    }

    /// How far each query looks: the mean of `|key - position|` over its weights; 0 for one that sees nothing.
    pub fn mean_distance(&self) -> Result<Vec<N>, Error> {
        Ok(self.measure(&Measure::new().mean_distance())?.mean_distance.unwrap_or_default())
    }

    /// How much of each query's weight a mask would keep: the sum over the keys that it lets through. The weight of the
    /// first tokens, where models often leave what they do not need, is `mass(Mask::prefix(n))`.
    pub fn mass(&self, mask: Mask) -> Result<Vec<N>, Error> {
        Ok(self.measure(&Measure::new().mass(mask))?.masses.pop().unwrap_or_default())
    }

    /// What the [sink](crate::Score::sinks) of its head takes of each query's weight; 0 where there is none.
    pub fn sink_mass(&self) -> Vec<N> {
        let sinks = self.problem.score.sinks;
        let mut stats = Vec::new();
        for (batch, head) in self.each_head() {
            let scope = self.problem.scope(batch, head);
            for row in self.rows_of(batch).step_by(self.step) {
                let (m, share) = self.softmaxes.of_row(self.problem.row_index(scope, row));
                let weight = |sinks: &[N]| num_traits::Float::exp2(in_log2(sinks[head]) - m);
                stats.push(sinks.map_or_else(N::default, weight) * share);
            }
        }
        stats
    }

    /// Items and heads that are looked at.
    fn each_head(&self) -> impl Iterator<Item = (usize, usize)> + use<N> {
        let heads = self.problem.dims().heads.q;
        self.heads.clone().map(move |i| (i / heads, i % heads))
    }

    /// A grid of cells over what is looked at of a head; none if there is nothing to look at.
    fn grid(
        &self,
        batch: usize,
        keys: Option<Range<usize>>,
        cells: [usize; 2],
        max: bool,
    ) -> Option<Grid> {
        let (q_len, k_len) = (self.problem.q_len(batch), self.problem.k_len(batch));
        let rows = Cut::new(self.rows.clone().unwrap_or(0..q_len), cells[0], q_len)?;
        Some(Grid { rows, keys: Cut::new(keys.unwrap_or(0..k_len), cells[1], k_len)?, max })
    }
}

/// Refuses an index beyond an axis.
fn below(option: &'static str, found: usize, limit: usize) -> Result<(), Error> {
    if found < limit { Ok(()) } else { Err(Error::OutOfRange { option, found, limit }) }
}
