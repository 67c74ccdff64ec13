//! Attention: from a plan and tensors to an output.

use super::part::Partial;
use super::{Core, Grid, ItemClass, Plan, Schedule, ScratchSizes, cumulated};
use crate::description::normalizer::Selection;
use crate::description::problem::Dims;
use crate::error::Error;
use crate::kernel::amx::{PackKv, PackedKv};
use crate::kernel::block_loop::{Call, KeyRange, Tiling};
use crate::kernel::forward::{Finished, Forward, STATE, Stage, Target};
use crate::kernel::project::project;
use crate::machine::memory::filled;
use crate::machine::run::run_then;
use crate::machine::simd::{Element, Number};
use crate::plan::output::Output;
use crate::tensor::cache::{KvCache, Quantization, Sequence};
use crate::tensor::index::RowTile;
use crate::tensor::source::Source;
use crate::tensor::view::{OutView, Tensor, TileHeads, Unwritten, View, ViewMut};

/// Multiply-adds of a call below which one thread has done them before another has woken up: about 10 us of `f32`.
const PARALLEL_MIN_PRODUCTS: usize = 1 << 19;
/// Multiply-adds that take as long as to read a number from memory.
const READ_COST: usize = 8;

/// Where the outputs of a call go.
pub(super) type Outputs<'o, N> = Finished<OutView<'o, N>, ViewMut<'o, N>>;

impl<E: Element> Plan<'_, E> {
    /// Attention. The views must have the sizes that the plan was made for.
    #[inline(never)]
    pub fn forward(
        &self,
        q: View<'_, E>,
        k: View<'_, E>,
        v: View<'_, E>,
    ) -> Result<Output<E>, Error> {
        let (q, k, v) = (q.erase(), k.erase(), v.erase());
        let core = self.core();
        core.check_inputs(&q, &k, &v)?;
        match core.with_projected_keys(&k)? {
            Some((core, keys)) => Self::forward_from(&core, core.call(q, keys.view(), v)),
            None => Self::forward_from(core, core.call(q, k, v)),
        }
    }

    /// Attention over what sequences have in a cache, for a problem made by [`Problem::cached`](crate::Problem::cached) of the same sequences.
    #[inline(never)]
    pub fn forward_cached(
        &self,
        q: View<'_, E>,
        cache: &KvCache<E>,
        sequences: &[Sequence],
    ) -> Result<Output<E>, Error> {
        Self::forward_from(self.core(), self.check_cached(q, cache, sequences)?)
    }

    /// The call over what sequences have in a cache, if it is the one that was planned.
    pub(crate) fn check_cached<'c>(
        &'c self,
        q: View<'c, E>,
        cache: &'c KvCache<E>,
        sequences: &'c [Sequence],
    ) -> Result<Call<'c, E::Num>, Error> {
        let problem = self.core().problem();
        let [k, v] = cache.shapes(sequences)?;
        if problem.similarity.of_keys().is_some() {
            return Err(Error::NotInCache { option: "Additive::w_k" });
        }
        for ((name, planned), found) in
            ["q", "k", "v"].into_iter().zip(problem.shapes()).zip([q.shape(), k, v])
        {
            planned.unless_same("the plan", name, found)?;
        }
        problem.same_packing("q", 0, q.offsets())?;
        for (item, sequence) in sequences.iter().enumerate() {
            let (planned, found) = (problem.k_len(item), cache.held(*sequence)?);
            Error::unless_same("keys", ("the plan", planned), ("the sequence", found))?;
        }
        let (planned, found) = (problem.quantization(), cache.quantization());
        if planned != found {
            let [planned, found] =
                [planned, found].map(|x| x.map_or("elements", Quantization::name));
            return Err(Error::Storage { planned, found });
        }
        let source = |values| Source::cache(cache, sequences, values);
        Ok(Call { problem, q: q.erase(), k: source(false), v: source(true) })
    }

    /// Computes a call into a new output.
    pub(crate) fn forward_from(
        core: &Core<'_, E::Num>,
        call: Call<'_, E::Num>,
    ) -> Result<Output<E>, Error> {
        Self::output_of(core, call, None)
    }

    /// The output of a call, or of what earlier calls have left of its rows.
    #[inline(never)]
    pub(super) fn output_of(
        core: &Core<'_, E::Num>,
        call: Call<'_, E::Num>,
        partial: Option<&Partial<E::Num>>,
    ) -> Result<Output<E>, Error> {
        let (zero, rows) = (E::Num::default(), [core.problem.rows()]);
        let watched = || core.problem.entropy.then(|| filled(zero, &rows)).transpose();
        let (mut entropy, mut max_score) = (watched()?, watched()?);
        let (mut states, mut lse) = (filled([zero; 2], &rows)?, filled(zero, &rows)?);
        let mut out = Unwritten::like(&call.q, core.problem.dims().v_dim)?;
        let view = out.view()?;
        let watched = [entropy.as_deref_mut(), max_score.as_deref_mut()];
        let to = core.finished(
            E::erase(&view).into(),
            &mut lse,
            Some(states.as_flattened_mut()),
            watched,
        )?;
        let selection = match partial {
            None => core.compute(call, &to)?,
            Some(partial) => core.finish_partial(call, partial, &to)?,
        };
        // SAFETY: `classes` hold every item (`Core::new`), and the last of their `stages`, or the one of `finish_partial`, finishes
        // every row of every head.
        Ok(Output { out: unsafe { out.written() }, lse, states, entropy, max_score, selection })
    }

    /// Attention into memory of the caller, over tensors or a cache: with `(k, v)` or `(&cache, sequences)` for `kv`. A repeated call
    /// on one thread allocates nothing, unless queries are packed, keys are split into parts, or keys are packed for AMX.
    ///
    /// The selections of a normalizer are not kept, so only the softmax has a backward pass from here.
    pub fn forward_into<'c>(
        &self,
        q: View<'c, E>,
        kv: impl Into<KeysValues<'c, E>>,
        to: OutputMut<'_, E>,
    ) -> Result<(), Error> {
        self.compute_into(q, kv.into(), to)
    }

    #[inline(never)]
    fn compute_into(
        &self,
        q: View<'_, E>,
        kv: KeysValues<'_, E>,
        to: OutputMut<'_, E>,
    ) -> Result<(), Error> {
        let (core, problem) = (self.core(), self.problem());
        let OutputMut { out, lse, entropy } = to;
        problem.dims().out_shape().unless_same("the plan", "the output", out.shape())?;
        problem.same_packing("the output", 0, out.offsets())?;
        let rows = problem.rows();
        Error::unless_one_each_row("lse", rows, lse.len())?;
        let found = entropy.as_ref().map_or(0, |entropy| entropy.len());
        Error::unless_one_each_row("entropy", if problem.entropy { rows } else { 0 }, found)?;
        let entropy = entropy.filter(|_| problem.entropy);
        let to = core.finished(E::erase(&out).into(), lse, None, [entropy, None])?;
        match kv {
            KeysValues::Cache(cache, sequences) => {
                core.compute(self.check_cached(q, cache, sequences)?, &to)?;
            }
            KeysValues::Tensors(k, v) => {
                let (q, k, v) = (q.erase(), k.erase(), v.erase());
                core.check_inputs(&q, &k, &v)?;
                match core.with_projected_keys(&k)? {
                    Some((core, keys)) => core.compute(core.call(q, keys.view(), v), &to),
                    None => core.compute(core.call(q, k, v), &to),
                }?;
            }
        }
        Ok(())
    }
}

/// The tasks of a stage, which are independent of each other.
pub(super) struct StageTasks {
    grid: Grid,
    /// Query heads of a task.
    pub(super) served: usize,
    /// Tasks that have all heads.
    groups: usize,
}

/// One of them: the item among those of its class, the first head, the part of the keys, and the rows.
pub(super) struct StageTask {
    pub(super) slot: usize,
    pub(super) head: usize,
    pub(super) part: usize,
    pub(super) rows: RowTile,
}

impl StageTasks {
    pub(super) fn count(&self) -> usize {
        self.grid.count()
    }

    /// Parts outermost: heads that share keys are neighbours in time.
    pub(super) fn at(&self, task: usize) -> StageTask {
        let (slot, rest, rows) = self.grid.at(task);
        StageTask { slot, head: rest % self.groups * self.served, part: rest / self.groups, rows }
    }
}

/// Keys and values of a call.
#[derive(Clone, Copy, Debug)]
pub enum KeysValues<'c, E: Element> {
    /// k and v.
    Tensors(View<'c, E>, View<'c, E>),
    /// What some sequences have in a cache.
    Cache(&'c KvCache<E>, &'c [Sequence]),
}

impl<'c, E: Element> From<(View<'c, E>, View<'c, E>)> for KeysValues<'c, E> {
    fn from((k, v): (View<'c, E>, View<'c, E>)) -> Self {
        Self::Tensors(k, v)
    }
}

impl<'c, E: Element> From<(&'c KvCache<E>, &'c [Sequence])> for KeysValues<'c, E> {
    fn from((cache, sequences): (&'c KvCache<E>, &'c [Sequence])) -> Self {
        Self::Cache(cache, sequences)
    }
}

/// Memory of the caller for the outputs of a call. If queries are packed, `out` is packed like them, and the others are
/// `[total, heads.q]`.
#[derive(Debug)]
pub struct OutputMut<'o, E: Element> {
    /// `[batch, heads.q, q_len, v_dim]`
    pub out: ViewMut<'o, E>,
    /// `[batch, heads.q, q_len]`
    pub lse: &'o mut [E::Num],
    /// `[batch, heads.q, q_len]`, if the problem has [`entropy`](crate::Problem::entropy).
    pub entropy: Option<&'o mut [E::Num]>,
}

impl<N: Number> Core<'_, N> {
    /// The call of some tensors.
    pub(super) fn call<'c>(
        &'c self,
        q: View<'c, N>,
        k: View<'c, N>,
        v: View<'c, N>,
    ) -> Call<'c, N> {
        Call { problem: &self.problem, q, k: Source::Tensor(k), v: Source::Tensor(v) }
    }

    /// If the similarity multiplies keys by something: the products, and the plan of what is left to do.
    #[inline(never)]
    pub(crate) fn with_projected_keys(
        &self,
        k: &View<'_, N>,
    ) -> Result<Option<(Self, Tensor<N>)>, Error> {
        let Some(w) = self.problem.similarity.of_keys() else { return Ok(None) };
        let plan = self.with_problem(self.problem.with_projected_keys());
        Ok(Some((plan, project(self.machine, k, w)?)))
    }

    /// Checked memory for the outputs.
    fn finished<'o>(
        &'o self,
        out: OutView<'o, N>,
        lse: &'o mut [N],
        states: Option<&'o mut [N]>,
        watched: [Option<&'o mut [N]>; 2],
    ) -> Result<Outputs<'o, N>, Error> {
        let [entropy, max_score] = watched.map(|x| x.map(|x| self.by_row(x, 1)).transpose());
        let states = states.map(|states| self.by_row(states, 2)).transpose()?;
        let lse = self.by_row(lse, 1)?;
        Ok(Finished { out, lse, states, entropy: entropy?, max_score: max_score? })
    }

    pub(crate) fn check_inputs(
        &self,
        q: &View<'_, N>,
        k: &View<'_, N>,
        v: &View<'_, N>,
    ) -> Result<(), Error> {
        self.check_tensors(&[q, k, v])
    }

    /// Refuses q, k and v, or the first of them, if they are not those planned for.
    pub(crate) fn check_tensors(&self, tensors: &[&View<'_, N>]) -> Result<(), Error> {
        if self.problem.is_cached() {
            return Err(Error::OnlyCached);
        }
        let planned = self.problem.shapes();
        for (i, (planned, view)) in planned.into_iter().zip(tensors).enumerate() {
            let name = ["q", "k", "v"][i];
            planned.unless_same("the plan", name, view.shape())?;
            self.problem.same_packing(name, i, view.offsets())?;
        }
        Ok(())
    }

    /// Makes all outputs; tells what rows have chosen before that, where they choose.
    #[inline(never)]
    fn compute(
        &self,
        call: Call<'_, N>,
        to: &Outputs<'_, N>,
    ) -> Result<Option<Selection<N>>, Error> {
        if self.problem.selects() {
            let selection = self.select(call)?;
            {
                let plan = self.selecting(&selection, self.problem.normalizer.rule());
                plan.compute(Call { problem: plan.problem(), ..call }, to)?;
            }
            return Ok(Some(selection));
        }
        if self.problem.rows() > 0 {
            self.classes.iter().try_for_each(|class| self.compute_class(class, call, to))?;
        }
        Ok(None)
    }

    /// The outputs of all items of a class.
    fn compute_class(
        &self,
        class: &ItemClass,
        call: Call<'_, N>,
        to: &Outputs<'_, N>,
    ) -> Result<(), Error> {
        let Dims { batch, heads, v_dim, .. } = self.problem.dims();
        let (schedule, items) = (class.schedule, class.count(batch));
        let q_len = |slot: usize| self.problem.q_len(class.item(slot));
        // Parts are kept of the items of this class alone, one after another.
        let offsets: Vec<usize>;
        let saved = [class.parts * heads.q, v_dim + STATE];
        let mut scratch: Vec<N>;
        let mut partial = None;
        if schedule.parted || schedule.diagonal {
            offsets = cumulated(items, q_len);
            scratch = filled(N::zero(), &[offsets[items], saved[0], saved[1]])?;
            partial = Some(match self.problem.q_offsets() {
                Some(_) => ViewMut::packed(&mut scratch, &offsets, saved)?,
                None => ViewMut::bhsd(&mut scratch, [items, saved[0], q_len(0), saved[1]])?,
            });
        }
        self.run_stages(class, call, &mut self.stages(class), Some(to), partial.as_ref());
        Ok(())
    }

    /// Runs the tasks of some stages of a class: rows are finished into `to`, and those that are not are left in `partial`,
    /// `[items, parts x heads.q, q_len, v_dim + STATE]`.
    pub(super) fn run_stages<'s>(
        &self,
        class: &ItemClass,
        call: Call<'_, N>,
        stages: &mut dyn Iterator<Item = (Tiling, Stage<'s>)>,
        to: Option<&Outputs<'_, N>>,
        partial: Option<&ViewMut<'_, N>>,
    ) {
        let heads = self.problem.dims().heads;
        let schedule = class.schedule;
        let packed_kv = self.pack_kv(class, &call);
        let packed_kv = packed_kv.as_ref();
        for (tiling, stage) in stages {
            let tasks = self.stage_tasks(class, tiling, &stage);
            let served = tasks.served;
            let with_keys = stage.keys.is_some();
            let (tiles, decode) =
                (schedule.tiles.filter(|_| with_keys), schedule.decode.filter(|_| with_keys));
            let sizes = ScratchSizes::new(&self.problem, Schedule { tiles, decode, ..schedule });
            run_then(
                self.threads(),
                tasks.count(),
                || self.scratch.take(&self.problem, sizes),
                |scratch, i| {
                    let StageTask { slot, head, part, rows } = tasks.at(i);
                    let b = class.item(slot);
                    if rows.count == 0 {
                        return;
                    }
                    let mut stage = stage.clone();
                    if schedule.parted && stage.into.is_some() {
                        stage.into = Some(part);
                        stage.keys = stage
                            .keys
                            .map(|key_range| KeyRange { keys: self.part(part, b), ..key_range });
                    }
                    let one = || TileHeads { head, apart: 1, parts: 0..served };
                    let held = match stage.into {
                        // The heads of the task side by side, in their part.
                        Some(part) => TileHeads { head: part * heads.q + head, ..one() },
                        None => TileHeads { head, apart: heads.q, parts: stage.from.clone() },
                    };
                    stage.into = stage.into.map(|_| 0);
                    // SAFETY: within a stage `Tiling::tile` gives each row of a head to one tile and `Grid::at` each tile and part
                    // to one task, so nobody else holds these rows of these parts; parts that are read were written by the
                    // stage before, for whose end `run` has waited.
                    let target = unsafe {
                        let finished = match to.filter(|_| stage.into.is_none()) {
                            Some(to) => Some(Finished {
                                out: to.out.tile(b, one(), rows),
                                lse: to.lse.tile(b, one(), rows),
                                states: to.states.as_ref().map(|s| s.tile(b, one(), rows)),
                                entropy: to.entropy.as_ref().map(|e| e.tile(b, one(), rows)),
                                max_score: to.max_score.as_ref().map(|m| m.tile(b, one(), rows)),
                            }),
                            None => None,
                        };
                        Target { finished, partial: partial.map(|p| p.tile(slot, held, rows)) }
                    };
                    let scope = self.problem.scope(b, head);
                    Forward { call, scope, rows, stage, packed_kv, target, part: 0, scratch }
                        .run(self.machine.isa);
                },
                |scratch| self.scratch.put_back(sizes, scratch),
            );
        }
    }

    /// The tasks of a stage of a class.
    pub(super) fn stage_tasks(
        &self,
        class: &ItemClass,
        tiling: Tiling,
        stage: &Stage<'_>,
    ) -> StageTasks {
        let Dims { batch, heads, .. } = self.problem.dims();
        let parts = if stage.into.is_some() { class.parts } else { 1 };
        // Few rows: a task has several heads that a key head serves.
        let served = class.schedule.decode.filter(|_| stage.keys.is_some()).unwrap_or(1);
        let groups = heads.q / served;
        let tiling = |slot| Tiling { q_len: self.problem.q_len(class.item(slot)), ..tiling };
        let uniform = self.problem.q_offsets().is_none();
        let grid = Grid::new(class.count(batch), groups * parts, uniform, tiling);
        StageTasks { grid, served, groups }
    }

    /// Threads that a call is worth.
    pub(super) fn threads(&self) -> usize {
        if self.is_small() { 1 } else { self.machine.threads }
    }

    /// Whether to wake a thread up, and to wait for it, takes longer than the call.
    pub(super) fn is_small(&self) -> bool {
        let Dims { batch, heads, q_len, k_len, qk_dim, v_dim, .. } = self.problem.dims();
        // Numbers of keys and values, each of which is read, and multiplied for each row that it meets.
        // Tensors without elements may have axes of any size.
        let features = qk_dim.saturating_add(v_dim);
        let numbers = [batch, k_len, features].into_iter().fold(1, usize::saturating_mul);
        let reads = heads.kv.saturating_mul(READ_COST);
        let rows = heads.q.saturating_mul(q_len).saturating_add(reads);
        numbers.saturating_mul(rows) < PARALLEL_MIN_PRODUCTS
    }

    /// Keys and values in tiles, where several tiles of rows meet them.
    fn pack_kv(&self, class: &ItemClass, call: &Call<'_, N>) -> Option<PackedKv> {
        let sizes = class
            .schedule
            .tiles
            .filter(|_| class.schedule.shared && class.schedule.decode.is_none())?;
        let batch = self.problem.dims().batch;
        let items: Vec<usize> = (0..class.count(batch)).map(|i| class.item(i)).collect();
        let (items, threads) = (&items[..], self.threads());
        let task = PackKv { sizes, call, items, threads };
        N::on_amx::<PackKv<'_, '_, f32>>(self.machine.isa, task).ok().flatten()
    }
}
