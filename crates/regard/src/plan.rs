//! How a problem will be run: pure arithmetic of the problem and the machine, printable before it happens.

use crate::cache::{KvCache, Sequence};
use crate::cells::{CELL, Cell, Cells};
use crate::element::Element;
use crate::error::Error;
use crate::few::FEW;
use crate::forward::{Finished, Forward, STATE, Scratch, Stage, Target};
use crate::machine::Machine;
use crate::mask::Mask;
use crate::normaliser::{Choice, Rule};
use crate::output::Output;
use crate::problem::{Dims, Problem};
use crate::project::project;
use crate::run::run;
use crate::simd::GROUP;
use crate::source::Source;
use crate::tiles::{FewTiles, Prepared, Sizes};
use crate::view::{Heads, Shape, Tensor, Unwritten, View, ViewMut};
use crate::walk::{Call, TILE_ROWS, Tiling, Way};
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

/// A checked problem and the way to run it. Make it once, use it for every layer of the same shape.
#[derive(Clone, Debug)]
pub struct Plan<'a, E: Element> {
    problem: Problem<'a, E>,
    machine: Machine,
    /// Rows of a tile, of items as long as the longest.
    pub(crate) rows: usize,
    /// The first key that is looked at.
    first: usize,
    /// How items are run: those of a kind together. One kind where all have the same sizes.
    kinds: Vec<Kind>,
    /// The stride of diagonals that may be walked on their own, and the mask without them.
    diagonal: Option<(usize, Mask)>,
}

/// How an item is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct How {
    /// Rows of a tile.
    rows: usize,
    /// Whether keys are split into parts.
    parted: bool,
    /// Whether all rows that a key head serves are done together.
    few: bool,
    /// How products go by tiles, if they do.
    tiles: Option<Sizes>,
    /// Whether several tiles of rows meet the same keys: so that these are packed before.
    shared: bool,
    /// Whether diagonals are walked on their own.
    diagonal: bool,
}

/// Items that are run in the same way.
#[derive(Clone, Debug)]
struct Kind {
    how: How,
    /// Which ones, ascending; all where none is named.
    items: Option<Vec<usize>>,
    /// Parts that the keys of one of them are split into, at most.
    parts: usize,
}

/// Where the outputs of a call go.
type Outputs<'o, E> = Finished<&'o ViewMut<'o, E>, ViewMut<'o, <E as Element>::Num>>;

/// What a plan will compute, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Pairs of query and key that see each other.
    pub pairs: u128,
    /// Pairs that are computed, the hidden ones inside partly seen cells included.
    pub computed: u128,
    /// Cells of keys that all rows of a tile see.
    pub full: u64,
    /// Cells that some rows see some of.
    pub partial: u64,
    /// Cells that are never visited.
    pub skipped: u64,
    /// Multiplications and additions for the visible pairs; a hyperbolic tangent counts as one of each. Projections, and what
    /// a normaliser walks before, are not counted.
    pub flops: f64,
    /// Bytes of q, k, v and the output.
    pub bytes: f64,
}

/// Keys of one part when few rows meet many keys: enough to outweigh the merge by far.
const PART_KEYS: usize = 4096;

/// Rows of a head beyond which they fill the lanes well enough.
const FEW_OF_A_HEAD: usize = 4;

impl<'a, E: Element> Plan<'a, E> {
    /// Checks the problem and decides how to run it. After this nothing can fail but a mismatch of tensors and plan.
    pub fn new(problem: Problem<'a, E>, machine: Machine) -> Result<Self, Error> {
        problem.check()?;
        let problem = problem.with_local_mask();
        let diagonal = problem.mask.diagonal();
        let how = |q_len, k_len| How::new(&problem, machine, &diagonal, [q_len, k_len]);
        let parts = |how: How, k_len: usize| if how.parted { k_len.div_ceil(PART_KEYS) } else { 1 };
        let Dims { batch, q_len, k_len, .. } = problem.dims();
        let longest = how(q_len, k_len);
        let mut kinds: Vec<Kind> = Vec::new();
        if problem.has_items_alike() {
            kinds.push(Kind { how: longest, items: None, parts: parts(longest, k_len) });
        } else {
            for item in 0..batch {
                let k_len = problem.k_len(item);
                let how = how(problem.q_len(item), k_len);
                let parts = parts(how, k_len);
                match kinds.iter_mut().find(|kind| kind.how == how) {
                    Some(kind) => {
                        kind.items.get_or_insert_default().push(item);
                        kind.parts = kind.parts.max(parts);
                    }
                    None => kinds.push(Kind { how, items: Some(vec![item]), parts }),
                }
            }
        }
        Ok(Self { rows: longest.rows, problem, machine, first: 0, kinds, diagonal })
    }

    /// The problem.
    #[must_use]
    pub fn problem(&self) -> &Problem<'a, E> {
        &self.problem
    }

    /// The products of bf16 tiles that one product of numbers takes, if that is how they are made: 1, 3 or 6, as the
    /// [`Precision`](crate::Precision) and the type of the tensors have it.
    #[must_use]
    pub fn tile_products(&self) -> Option<usize> {
        let parts = self.kinds.iter().find_map(|kind| kind.how.tiles)?.parts;
        Some(parts * (parts + 1) / 2)
    }

    /// The parts that numbers are split into on the way back, if products go by tiles there.
    pub(crate) fn parts_on_way_back(&self) -> Option<usize> {
        let many = self.kinds.iter().filter(|kind| !kind.how.few);
        many.filter_map(|kind| kind.how.tiles).map(|sizes| sizes.parts).next()
    }

    /// The machine.
    #[must_use]
    pub fn machine(&self) -> Machine {
        self.machine
    }

    /// Attention. The views must have the sizes that the plan was made for.
    pub fn forward(
        &self,
        q: View<'_, E>,
        k: View<'_, E>,
        v: View<'_, E>,
    ) -> Result<Output<E>, Error> {
        self.check_inputs(&q, &k, &v)?;
        if let Some((plan, keys)) = self.with_projected_keys(&k)? {
            return plan.forward(q, keys.view(), v);
        }
        let (k, v) = (Source::Tensor(k), Source::Tensor(v));
        self.forward_from(Call { problem: &self.problem, q, k, v })
    }

    /// If the similarity multiplies keys by something: the products, and the plan of what is left to do.
    pub(crate) fn with_projected_keys(
        &self,
        k: &View<'_, E>,
    ) -> Result<Option<(Self, Tensor<E>)>, Error> {
        let Some(w) = self.problem.similarity.of_keys() else { return Ok(None) };
        let plan = self.with_problem(self.problem.with_projected_keys());
        Ok(Some((plan, project(self.machine, k, w)?)))
    }

    /// Attention over what sequences have in a cache, for a problem made by [`Problem::cached`] of the same sequences.
    pub fn forward_cached(
        &self,
        q: View<'_, E>,
        cache: &KvCache<E>,
        sequences: &[Sequence],
    ) -> Result<Output<E>, Error> {
        self.forward_from(self.check_cached(q, cache, sequences)?)
    }

    /// The call over what sequences have in a cache, if it is the one that was planned.
    pub(crate) fn check_cached<'c>(
        &'c self,
        q: View<'c, E>,
        cache: &'c KvCache<E>,
        sequences: &'c [Sequence],
    ) -> Result<Call<'c, E>, Error> {
        let now = Problem::cached(&q, cache, sequences)?;
        if self.problem.similarity.of_keys().is_some() {
            return Err(Error::NotInCache { option: "Additive::w_k" });
        }
        for ((name, planned), found) in
            ["q", "k", "v"].into_iter().zip(self.problem.shapes()).zip(now.shapes())
        {
            same_shape(name, planned, found)?;
        }
        self.problem.same_packing("q", 0, q.offsets())?;
        for item in 0..sequences.len() {
            let (planned, found) = (self.problem.k_len(item), now.k_len(item));
            Error::unless_same("keys", ("the plan", planned), ("the sequence", found))?;
        }
        let source = |values| Source::Cache { cache, sequences, values };
        Ok(Call { problem: &self.problem, q, k: source(false), v: source(true) })
    }

    /// The same for the way back of one item of a packed problem, on so many threads.
    pub(crate) fn of_item(&self, item: usize, threads: usize) -> Self {
        let problem = self.problem.as_long_as(item);
        let Dims { q_len, k_len, .. } = problem.dims();
        let (machine, diagonal) = (self.machine.threads(threads), self.diagonal.clone());
        let how = How::new(&problem, machine, &diagonal, [q_len, k_len]);
        let kinds = vec![Kind { how, items: Some(vec![item]), parts: 1 }];
        Self { problem, machine, rows: how.rows, first: 0, kinds, diagonal }
    }

    /// The same for the keys from `first` on.
    pub(crate) fn beyond(self, first: usize) -> Self {
        Self { first, ..self }
    }

    /// The same where rows have made their choice.
    pub(crate) fn keeping<'b>(&self, choice: &'b Choice<E::Num>, rule: Rule) -> Plan<'b, E>
    where
        'a: 'b,
    {
        Plan { problem: self.problem.keeping(choice, rule), ..self.clone() }
    }

    /// The same way for a problem of the same sizes.
    pub(crate) fn with_problem(&self, problem: Problem<'a, E>) -> Self {
        Self { problem, ..self.clone() }
    }

    pub(crate) fn forward_from(&self, call: Call<'_, E>) -> Result<Output<E>, Error> {
        if self.problem.chooses() {
            let choice = self.choose(call)?;
            let plan = self.keeping(&choice, self.problem.normaliser.rule());
            let output = plan.forward_from(Call { problem: plan.problem(), ..call })?;
            return Ok(Output { choice: Some(choice), ..output });
        }
        let rows = vec![E::Num::default(); self.problem.rows()];
        let mut entropy = self.problem.entropy.then(|| rows.clone());
        let (mut states, mut lse) = (vec![[E::Num::default(); 2]; rows.len()], rows);
        let mut out = Unwritten::like(&call.q, self.problem.dims().v_dim)?;
        let view = out.view()?;
        let to = self.finished(
            &view,
            &mut lse,
            Some(states.as_flattened_mut()),
            entropy.as_deref_mut(),
        )?;
        self.compute(call, &to);
        // SAFETY: `compute` finishes every row of every head and item.
        Ok(Output { out: unsafe { out.written() }, lse, states, entropy, choice: None })
    }

    /// Attention into memory of the caller: `out [batch, heads.q, q_len, v_dim]`, `lse [batch, heads.q, q_len]`, and
    /// `entropy [batch, heads.q, q_len]` if the problem asks for it. What rows have chosen is not kept, so there is no way back
    /// from here but for the softmax. For packed queries `out` is packed like them, and the
    /// others are `[total, heads.q]`.
    pub fn forward_into(
        &self,
        (q, k, v): (View<'_, E>, View<'_, E>, View<'_, E>),
        out: &mut ViewMut<'_, E>,
        lse: &mut [E::Num],
        entropy: Option<&mut [E::Num]>,
    ) -> Result<(), Error> {
        self.check_inputs(&q, &k, &v)?;
        if let Some((plan, keys)) = self.with_projected_keys(&k)? {
            return plan.forward_into((q, keys.view(), v), out, lse, entropy);
        }
        same_shape("the output", self.out_shape(), out.shape())?;
        self.problem.same_packing("the output", 0, out.offsets())?;
        let rows = self.problem.rows();
        Error::unless_one_each_row("lse", rows, lse.len())?;
        let found = entropy.as_ref().map_or(0, |entropy| entropy.len());
        Error::unless_one_each_row("entropy", if self.problem.entropy { rows } else { 0 }, found)?;
        let entropy = entropy.filter(|_| self.problem.entropy);
        let to = self.finished(out, lse, None, entropy)?;
        let (k, v) = (Source::Tensor(k), Source::Tensor(v));
        let call = Call { problem: &self.problem, q, k, v };
        if self.problem.chooses() {
            let choice = self.choose(call)?;
            let plan = self.keeping(&choice, self.problem.normaliser.rule());
            plan.compute(Call { problem: plan.problem(), ..call }, &to);
        } else {
            self.compute(call, &to);
        }
        Ok(())
    }

    /// Checked memory for the outputs.
    fn finished<'o>(
        &'o self,
        out: &'o ViewMut<'o, E>,
        lse: &'o mut [E::Num],
        states: Option<&'o mut [E::Num]>,
        entropy: Option<&'o mut [E::Num]>,
    ) -> Result<Outputs<'o, E>, Error> {
        let entropy = entropy.map(|entropy| self.by_row(entropy, 1)).transpose()?;
        let states = states.map(|states| self.by_row(states, 2)).transpose()?;
        Ok(Finished { out, lse: self.by_row(lse, 1)?, states, entropy })
    }

    /// `dim` numbers for each row, `[batch, heads.q, q_len, dim]`, or `[total, heads.q, dim]` if queries are packed.
    pub(crate) fn by_row<'o, N>(
        &'o self,
        data: &'o mut [N],
        dim: usize,
    ) -> Result<ViewMut<'o, N>, Error> {
        let shape = Shape { dim, ..self.out_shape() };
        match self.problem.q_offsets() {
            Some(offsets) => ViewMut::packed(data, offsets, [shape.heads, dim]),
            None => ViewMut::bhsd(data, shape.to_array()),
        }
    }

    pub(crate) fn check_inputs(
        &self,
        q: &View<'_, E>,
        k: &View<'_, E>,
        v: &View<'_, E>,
    ) -> Result<(), Error> {
        if self.problem.is_cached() {
            return Err(Error::OnlyCached);
        }
        let planned = self.problem.shapes();
        for (i, (planned, view)) in planned.into_iter().zip([q, k, v]).enumerate() {
            let name = ["q", "k", "v"][i];
            same_shape(name, planned, view.shape())?;
            self.problem.same_packing(name, i, view.offsets())?;
        }
        Ok(())
    }

    pub(crate) fn out_shape(&self) -> Shape {
        let Dims { batch, heads, q_len, v_dim, .. } = self.problem.dims();
        Shape { batch, heads: heads.q, len: q_len, dim: v_dim }
    }

    /// Rows into tiles, a tile's rows `stride` apart.
    pub(crate) fn tiling(&self, stride: usize) -> Tiling {
        Tiling { q_len: self.problem.dims().q_len, rows: self.rows, stride }
    }

    /// The ways over all keys that visit each visible pair once, and the tiles of rows that go them.
    pub(crate) fn ways(&self) -> Vec<(Tiling, Way<'_>)> {
        let diagonal = self.diagonal.as_ref();
        let apart = diagonal.is_some_and(|(stride, _)| apart(*stride, self.problem.dims().q_len));
        self.ways_of(self.rows, apart)
    }

    /// The same in tiles of so many rows, with diagonals on their own or not.
    fn ways_of(&self, rows: usize, diagonal: bool) -> Vec<(Tiling, Way<'_>)> {
        let (mask, keys) = (&self.problem.mask, self.first..self.problem.dims().k_len);
        let tiling = |stride| Tiling { rows, ..self.tiling(stride) };
        let Some((stride, rest)) = self.diagonal.as_ref().filter(|_| diagonal) else {
            return vec![(tiling(1), Way { mask, without: None, keys })];
        };
        let near = Way { mask: rest, without: None, keys: keys.clone() };
        let far = Way { mask, without: Some(rest), keys };
        vec![(tiling(1), near), (tiling(*stride), far)]
    }

    /// The stages of a kind of items: each waits for the one before, the tasks inside it are independent.
    fn stages(&self, kind: &Kind) -> Vec<(Tiling, Stage<'_>)> {
        let How { rows, parted, diagonal, .. } = kind.how;
        let ways = self.ways_of(rows, diagonal);
        if parted {
            let tiling = Tiling { rows, ..self.tiling(1) };
            let join = (tiling, Stage { from: 0..kind.parts, walk: None, into: None });
            let part =
                |(tiling, way)| (tiling, Stage { from: 0..0, walk: Some(way), into: Some(0) });
            return ways.into_iter().map(part).chain([join]).collect();
        }
        let last = ways.len() - 1;
        let stage = |(i, (tiling, way))| {
            let into = if i == last { None } else { Some(0) };
            (tiling, Stage { from: 0..i, walk: Some(way), into })
        };
        ways.into_iter().enumerate().map(stage).collect()
    }

    /// The keys of a part of an item; none for the last parts of one with fewer keys than another of its kind.
    fn part(&self, part: usize, item: usize) -> Range<usize> {
        let k_len = self.problem.k_len(item);
        let keys = (part * PART_KEYS).min(k_len)..((part + 1) * PART_KEYS).min(k_len);
        keys.start.max(self.first).min(keys.end)..keys.end
    }

    /// The items of a kind.
    fn items<'k>(&self, kind: &'k Kind) -> Cow<'k, [usize]> {
        match &kind.items {
            Some(items) => items.into(),
            None => (0..self.problem.dims().batch).collect(),
        }
    }

    fn compute(&self, call: Call<'_, E>, to: &Outputs<'_, E>) {
        if self.problem.rows() > 0 {
            self.kinds.iter().for_each(|kind| self.compute_kind(kind, call, to));
        }
    }

    /// The outputs of all items of a kind.
    fn compute_kind(&self, kind: &Kind, call: Call<'_, E>, to: &Outputs<'_, E>) {
        let Dims { heads, v_dim, .. } = self.problem.dims();
        let (how, items) = (kind.how, self.items(kind));
        let stages = self.stages(kind);
        let q_len = |slot: usize| self.problem.q_len(items[slot]);
        // Parts are kept of the items of this kind alone, one after another.
        let offsets = cumulated(items.len(), q_len);
        let saved = [kind.parts * heads.q, v_dim + STATE];
        let mut room: Vec<E::Num>;
        let mut partial = None;
        if stages.len() > 1 {
            room = vec![E::Num::default(); offsets[items.len()] * saved[0] * saved[1]];
            partial = match self.problem.q_offsets() {
                Some(_) => ViewMut::packed(&mut room, &offsets, saved).ok(),
                None => ViewMut::bhsd(&mut room, [items.len(), saved[0], q_len(0), saved[1]]).ok(),
            };
        }
        let prepared = self.prepare(kind, &items, &call);
        let prepared = prepared.as_ref();
        for (tiling, stage) in stages {
            let tiling = |slot| Tiling { q_len: q_len(slot), ..tiling };
            let parts = if stage.into.is_some() { kind.parts } else { 1 };
            // Few rows: a task has all heads that a key head serves.
            let few = how.few && stage.walk.is_some();
            let served = if few { heads.q / heads.kv } else { 1 };
            let each = heads.q / served * parts;
            let tasks = cumulated(items.len(), |slot| each * tiling(slot).count());
            run(
                self.machine.threads,
                tasks[items.len()],
                || {
                    Scratch::new(
                        &self.problem,
                        how.rows,
                        how.tiles.filter(|_| stage.walk.is_some()),
                        few,
                    )
                },
                |scratch, i| {
                    let slot = tasks.partition_point(|first| *first <= i) - 1;
                    let (b, i, tiling) = (items[slot], i - tasks[slot], tiling(slot));
                    let tiles = tiling.count();
                    // Heads outermost, so that neighbours in time share keys; late tiles first, for a causal mask
                    // gives them the most to do.
                    let (rest, tile) = (i / tiles, tiles - 1 - i % tiles);
                    let (head, part) = (rest / parts * served, rest % parts);
                    let rows = tiling.tile(tile);
                    if rows.count == 0 {
                        return;
                    }
                    let mut stage = stage.clone();
                    if how.parted && stage.into.is_some() {
                        stage.into = Some(part);
                        stage.walk = stage.walk.map(|way| Way { keys: self.part(part, b), ..way });
                    }
                    let one = || Heads { head, apart: 1, parts: 0..served };
                    let held = match stage.into {
                        // The heads of the task side by side, in their part.
                        Some(part) => Heads { head: part * heads.q + head, ..one() },
                        None => Heads { head, apart: heads.q, parts: stage.from.clone() },
                    };
                    stage.into = stage.into.map(|_| 0);
                    // SAFETY: within a stage the tiles of a head cover each row once, so no other task holds these
                    // rows of these parts; parts that are read were written by the stage before, which has ended.
                    let target = unsafe {
                        let finished = || Finished {
                            out: to.out.tile(b, one(), rows),
                            lse: to.lse.tile(b, one(), rows),
                            states: to.states.as_ref().map(|s| s.tile(b, one(), rows)),
                            entropy: to.entropy.as_ref().map(|e| e.tile(b, one(), rows)),
                        };
                        Target {
                            finished: stage.into.is_none().then(finished),
                            partial: partial.as_ref().map(|p| p.tile(slot, held, rows)),
                        }
                    };
                    let scope = self.problem.scope(b, head);
                    E::forward(
                        self.machine.isa,
                        Forward { call, scope, rows, stage, prepared, target, part: 0, scratch },
                    );
                },
            );
        }
    }

    /// Keys and values in tiles, where several tiles of rows meet them.
    fn prepare(&self, kind: &Kind, items: &[usize], call: &Call<'_, E>) -> Option<Prepared> {
        let sizes = kind.how.tiles.filter(|_| kind.how.shared && !kind.how.few)?;
        E::prepare(self.machine.isa, sizes, call, items, self.machine.threads)
    }

    /// Counts what will be computed: walks the mask, not the data.
    #[must_use]
    pub fn work(&self) -> Work {
        let Dims { heads, qk_dim, v_dim, .. } = self.problem.dims();
        let mut work = Work::default();
        if self.problem.rows() > 0 {
            self.kinds.iter().for_each(|kind| self.count(kind, &mut work));
        }
        let hidden = self.problem.similarity.hidden();
        let features = if hidden > 0 { hidden } else { qk_dim } as f64 + v_dim as f64;
        work.flops = 2.0 * work.pairs as f64 * features;
        let keys = self.problem.sum_over_items(|_, k_len| k_len as u128);
        let rows = self.problem.rows() as f64 + heads.kv as f64 * keys as f64;
        work.bytes = rows * features * std::mem::size_of::<E>() as f64;
        work
    }

    /// Adds what the items of a kind take to the work.
    fn count(&self, kind: &Kind, work: &mut Work) {
        let heads = self.problem.dims().heads;
        let items = self.items(kind);
        let (mut runs, mut cell) = (Vec::new(), Cell::new());
        for (tiling, stage) in self.stages(kind) {
            let Some(Way { mask, without, .. }) = stage.walk else { continue };
            for (b, head) in items.iter().flat_map(|b| (0..heads.q).map(move |h| (*b, h))) {
                let scope = self.problem.scope(b, head);
                for rows in (Tiling { q_len: scope.q_len, ..tiling }).tiles() {
                    mask.runs_beyond(without, &scope, rows, &mut runs);
                    let pairs = runs
                        .iter()
                        .map(|s| s.keys.len() as u128 * u128::from(s.lanes.count_ones()));
                    work.pairs += pairs.sum::<u128>();
                    let mut visited = 0;
                    for part in 0..kind.parts {
                        let keys =
                            if kind.how.parted { self.part(part, b) } else { 0..scope.k_len };
                        let mut cells = Cells::new(&runs, keys, rows.lanes());
                        while cells.next(&mut cell) {
                            visited += 1;
                            work.full += u64::from(cell.full);
                            work.partial += u64::from(!cell.full);
                            work.computed += cell.computed(rows);
                        }
                    }
                    let cells = scope.k_len.div_ceil(CELL) as u64;
                    work.skipped +=
                        if without.is_none() { cells.saturating_sub(visited) } else { 0 };
                }
            }
        }
    }
}

impl How {
    /// Decides how an item of so many queries and keys is run.
    ///
    /// All choices that touch the order of arithmetic depend on one item's sizes alone, never on the batch, the threads or
    /// the instruction set: so neither do the results.
    fn new<E: Element>(
        problem: &Problem<'_, E>,
        machine: Machine,
        diagonal: &Option<(usize, Mask)>,
        [q_len, k_len]: [usize; 2],
    ) -> Self {
        let Dims { heads, qk_dim, v_dim, .. } = problem.dims();
        let rows = tile_rows(q_len, heads.q);
        let diagonal = diagonal.as_ref().is_some_and(|(stride, _)| apart(*stride, q_len));
        let parted = q_len <= TILE_ROWS && !diagonal && k_len >= 2 * PART_KEYS;
        let together = q_len.saturating_mul(heads.q) <= heads.kv.saturating_mul(FEW);
        let few = q_len <= FEW_OF_A_HEAD && together && !diagonal;
        let few = few && problem.is_dot() && problem.is_softmax();
        let tiles = problem.parts().filter(|parts| {
            machine.isa.has_tiles() && (!few || FewTiles::fit(*parts, qk_dim, v_dim))
        });
        let tiles = tiles.map(|parts| Sizes::new(parts, qk_dim, v_dim));
        let shared = q_len.div_ceil(rows).saturating_mul(heads.q) > heads.kv;
        Self { rows, parted, few, tiles, shared, diagonal }
    }
}

/// Rows of a tile, for an item of so many queries.
pub(crate) fn tile_rows(q_len: usize, heads: usize) -> usize {
    if q_len.saturating_mul(heads) >= 2048 { TILE_ROWS } else { GROUP }
}

/// Whether so many rows are enough to walk diagonals of this stride on their own.
fn apart(stride: usize, q_len: usize) -> bool {
    q_len / stride >= 8
}

/// The sums of `n` sizes before each of them, and of all in the end.
pub(crate) fn cumulated(n: usize, size: impl Fn(usize) -> usize) -> Vec<usize> {
    let mut sums = vec![0; n + 1];
    (0..n).for_each(|i| sums[i + 1] = sums[i] + size(i));
    sums
}

pub(crate) fn same_shape(name: &'static str, planned: Shape, found: Shape) -> Result<(), Error> {
    let axes = ["batch", "heads", "length", "features"];
    for (axis, (a, b)) in axes.into_iter().zip(planned.to_array().into_iter().zip(found.to_array()))
    {
        Error::unless_same(axis, ("the plan", a), (name, b))?;
    }
    Ok(())
}

/// One line: `forward avx512 f32 128x64 t2 s1`: rows x keys of a tile, threads, parts that the keys are split into.
/// With `{:#}`, the reasons too.
impl<E: Element> fmt::Display for Plan<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { isa, threads, .. } = self.machine;
        let parts = self.kinds.iter().map(|kind| kind.parts).max().unwrap_or(1);
        let rows = self.rows;
        write!(f, "forward {} {} {rows}x{CELL} t{threads} s{parts}", isa.name(), E::NAME)?;
        if !f.alternate() {
            return Ok(());
        }
        let work = self.work();
        let share = |n: u128, of: u128| if of == 0 { 100.0 } else { 100.0 * n as f64 / of as f64 };
        let heads = self.problem.dims().heads.q as u128;
        let all = self.problem.sum_over_items(|q_len, k_len| q_len as u128 * k_len as u128);
        let all = all.saturating_mul(heads);
        writeln!(f, "\n  problem  {}", self.problem)?;
        writeln!(
            f,
            "  pairs    {} visible of {all} ({:.1} %), {} computed ({:.1} % of those visible)",
            work.pairs,
            share(work.pairs, all),
            work.computed,
            share(work.computed, work.pairs)
        )?;
        writeln!(
            f,
            "  cells    {} full, {} partial, {} skipped, of {rows} rows x {CELL} keys",
            work.full, work.partial, work.skipped
        )?;
        writeln!(
            f,
            "  work     {:.3} Gflop, {:.1} MiB",
            work.flops / 1e9,
            work.bytes / f64::from(1 << 20)
        )?;
        let why_rows = if rows == TILE_ROWS {
            "two groups of 64 rows share each cell while it is in the cache"
        } else {
            "few rows: smaller tiles fill more threads"
        };
        writeln!(f, "  rows     {rows}: {why_rows}")?;
        let lanes = isa.lanes::<E::Num>();
        writeln!(
            f,
            "  vectors  {lanes} rows side by side in each; {} registers a row group",
            GROUP / lanes
        )?;
        match self.tile_products() {
            Some(1) => writeln!(f, "  products on tiles, of bf16 numbers as they are")?,
            Some(n) => writeln!(f, "  products on tiles, {n} of bf16 parts for each")?,
            None if isa.has_tiles() => {
                let precision = self.problem.how_exact().name();
                writeln!(f, "  products by vectors: none on tiles at precision {precision}")?;
            }
            None => writeln!(f, "  products by vectors")?,
        }
        let diagonal = self.kinds.iter().any(|kind| kind.how.diagonal);
        if let Some((stride, rest)) = self.diagonal.as_ref().filter(|_| diagonal) {
            writeln!(
                f,
                "  stages   first `{rest}` with neighbouring rows, then the rest with rows {stride} apart, which share their keys"
            )?;
        }
        let why_parts = if parts == 1 {
            "rows alone fill the threads".into()
        } else {
            format!(
                "few rows, many keys: parts of {PART_KEYS} keys run in parallel and are merged in order"
            )
        };
        write!(f, "  parts    {parts}: {why_parts}")
    }
}
