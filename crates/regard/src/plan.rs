//! How a problem will be run: pure arithmetic of the problem and the machine, printable before it happens.

use crate::cache::{KvCache, Sequence};
use crate::cells::{CELL, Cell, Cells};
use crate::element::Element;
use crate::error::Error;
use crate::few::FEW;
use crate::forward::{Finished, Forward, STATE, Scratch, Stage, Target};
use crate::machine::Machine;
use crate::mask::Mask;
use crate::output::Output;
use crate::problem::{Dims, Problem};
use crate::run::run;
use crate::simd::GROUP;
use crate::source::Source;
use crate::tiles::{Prepared, Sizes};
use crate::view::{Heads, Shape, Unwritten, View, ViewMut};
use crate::walk::{Call, TILE_ROWS, Tiling, Way};
use std::fmt;
use std::ops::Range;

/// A checked problem and the way to run it. Make it once, use it for every layer of the same shape.
#[derive(Clone, Debug)]
pub struct Plan<'a, E: Element> {
    problem: Problem<'a, E>,
    machine: Machine,
    pub(crate) rows: usize,
    parts: usize,
    /// The first key that is looked at.
    first: usize,
    /// Whether all rows that a key head serves are done together.
    few: bool,
    /// How products go by tiles, if they do.
    tiles: Option<Sizes>,
    /// The stride of diagonals that are walked on their own, and the mask without them.
    diagonal: Option<(usize, Mask)>,
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
    /// Multiplications and additions for the visible pairs.
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
        let Dims { heads, q_len, k_len, .. } = problem.dims();
        // All choices that touch the order of arithmetic depend on one item's sizes alone, never on the batch, the
        // threads or the instruction set: so neither do the results.
        let rows = if q_len.saturating_mul(heads.q) >= 2048 { TILE_ROWS } else { GROUP };
        let diagonal = problem.mask.diagonal().filter(|(stride, _)| q_len / stride >= 8);
        let few_rows = q_len <= TILE_ROWS && diagonal.is_none();
        let parts = if few_rows && k_len >= 2 * PART_KEYS { k_len.div_ceil(PART_KEYS) } else { 1 };
        let Dims { qk_dim, v_dim, .. } = problem.dims();
        let together = q_len.saturating_mul(heads.q) <= heads.kv.saturating_mul(FEW);
        let few = q_len <= FEW_OF_A_HEAD && together && diagonal.is_none() && problem.is_dot();
        let tiles = problem.parts().filter(|_| machine.isa.has_tiles() && !few);
        let tiles = tiles.map(|parts| Sizes::new(parts, qk_dim, v_dim));
        Ok(Self { problem, machine, rows, parts, first: 0, few, tiles, diagonal })
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
        self.tiles.map(|sizes| sizes.parts * (sizes.parts + 1) / 2)
    }

    /// The parts that numbers are split into, if products go by tiles.
    pub(crate) fn parts_on_tiles(&self) -> Option<usize> {
        self.tiles.map(|sizes| sizes.parts)
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
        let (k, v) = (Source::Tensor(k), Source::Tensor(v));
        self.forward_from(Call { problem: &self.problem, q, k, v })
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
        for ((name, planned), found) in
            ["q", "k", "v"].into_iter().zip(self.problem.shapes()).zip(now.shapes())
        {
            same_shape(name, planned, found)?;
        }
        for item in 0..sequences.len() {
            let (planned, found) = (self.problem.k_len(item), now.k_len(item));
            Error::unless_same("keys", ("the plan", planned), ("the sequence", found))?;
        }
        let source = |values| Source::Cache { cache, sequences, values };
        Ok(Call { problem: &self.problem, q, k: source(false), v: source(true) })
    }

    /// The same for the keys from `first` on.
    pub(crate) fn beyond(self, first: usize) -> Self {
        Self { first, ..self }
    }

    pub(crate) fn forward_from(&self, call: Call<'_, E>) -> Result<Output<E>, Error> {
        let shape = self.out_shape();
        let rows = vec![E::Num::default(); shape.batch * shape.heads * shape.len];
        let mut entropy = self.problem.entropy.then(|| rows.clone());
        let (mut states, mut lse) = (vec![[E::Num::default(); 2]; rows.len()], rows);
        let mut out = Unwritten::new(shape, call.q.layout())?;
        let view = out.view()?;
        let to = self.finished(
            &view,
            &mut lse,
            Some(states.as_flattened_mut()),
            entropy.as_deref_mut(),
        )?;
        self.compute(call, &to);
        // SAFETY: `compute` finishes every row of every head and item.
        Ok(Output { out: unsafe { out.written() }, lse, states, entropy })
    }

    /// Attention into memory of the caller: `out [batch, heads.q, q_len, v_dim]`, `lse [batch, heads.q, q_len]`, and
    /// `entropy [batch, heads.q, q_len]` if the problem asks for it.
    pub fn forward_into(
        &self,
        (q, k, v): (View<'_, E>, View<'_, E>, View<'_, E>),
        out: &mut ViewMut<'_, E>,
        lse: &mut [E::Num],
        entropy: Option<&mut [E::Num]>,
    ) -> Result<(), Error> {
        self.check_inputs(&q, &k, &v)?;
        let shape = self.out_shape();
        same_shape("the output", shape, out.shape())?;
        let rows = shape.batch * shape.heads * shape.len;
        Error::unless_one_each_row("lse", rows, lse.len())?;
        let found = entropy.as_ref().map_or(0, |entropy| entropy.len());
        Error::unless_one_each_row("entropy", if self.problem.entropy { rows } else { 0 }, found)?;
        let entropy = entropy.filter(|_| self.problem.entropy);
        let to = self.finished(out, lse, None, entropy)?;
        let (k, v) = (Source::Tensor(k), Source::Tensor(v));
        self.compute(Call { problem: &self.problem, q, k, v }, &to);
        Ok(())
    }

    /// Checked memory for the outputs.
    fn finished<'o>(
        &self,
        out: &'o ViewMut<'o, E>,
        lse: &'o mut [E::Num],
        states: Option<&'o mut [E::Num]>,
        entropy: Option<&'o mut [E::Num]>,
    ) -> Result<Outputs<'o, E>, Error> {
        let shape = Shape { dim: 1, ..self.out_shape() }.to_array();
        let entropy = entropy.map(|entropy| ViewMut::bhsd(entropy, shape)).transpose()?;
        let pairs = Shape { dim: 2, ..self.out_shape() }.to_array();
        let states = states.map(|states| ViewMut::bhsd(states, pairs)).transpose()?;
        Ok(Finished { out, lse: ViewMut::bhsd(lse, shape)?, states, entropy })
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
        for ((name, planned), view) in ["q", "k", "v"].into_iter().zip(planned).zip([q, k, v]) {
            same_shape(name, planned, view.shape())?;
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
        let (mask, keys) = (&self.problem.mask, self.first..self.problem.dims().k_len);
        let Some((stride, rest)) = &self.diagonal else {
            return vec![(self.tiling(1), Way { mask, without: None, keys })];
        };
        let near = Way { mask: rest, without: None, keys: keys.clone() };
        let far = Way { mask, without: Some(rest), keys };
        vec![(self.tiling(1), near), (self.tiling(*stride), far)]
    }

    /// The stages of the call: each waits for the one before, the tasks inside it are independent.
    fn stages(&self) -> Vec<(Tiling, Stage<'_>)> {
        let ways = self.ways();
        if self.parts > 1 {
            let join = (self.tiling(1), Stage { from: 0..self.parts, walk: None, into: None });
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

    /// The keys of a part of an item. One with few keys has all of them in its first part, whatever the others have: so its
    /// results do not depend on them.
    fn part(&self, part: usize, item: usize) -> Range<usize> {
        let k_len = self.problem.k_len(item);
        let keys = if k_len >= 2 * PART_KEYS {
            (part * PART_KEYS).min(k_len)..((part + 1) * PART_KEYS).min(k_len)
        } else if part == 0 {
            0..k_len
        } else {
            0..0
        };
        keys.start.max(self.first).min(keys.end)..keys.end
    }

    fn compute(&self, call: Call<'_, E>, to: &Outputs<'_, E>) {
        let Dims { batch, heads, q_len, v_dim, .. } = self.problem.dims();
        if batch == 0 || heads.q == 0 || q_len == 0 {
            return;
        }
        let stages = self.stages();
        let saved = Shape { batch, heads: self.parts * heads.q, len: q_len, dim: v_dim + STATE };
        let mut room = Vec::new();
        if stages.len() > 1 {
            room = vec![E::Num::default(); saved.to_array().iter().product()];
        }
        let partial = ViewMut::bhsd(&mut room, saved.to_array()).ok();
        let prepared = self.prepare(&call);
        let prepared = prepared.as_ref();
        for (tiling, stage) in stages {
            let tiles = tiling.count();
            let parts = if stage.into.is_some() { self.parts } else { 1 };
            // Few rows: a task has all heads that a key head serves.
            let few = self.few && stage.walk.is_some();
            let served = if few { heads.q / heads.kv } else { 1 };
            run(
                self.machine.threads,
                batch * (heads.q / served) * parts * tiles,
                || Scratch::new(&self.problem, self.rows, self.tiles, few),
                |scratch, i| {
                    // Heads outermost, so that neighbours in time share keys; late tiles first, for a causal mask
                    // gives them the most to do.
                    let (rest, tile) = (i / tiles, tiles - 1 - i % tiles);
                    let (rest, part) = (rest / parts, rest % parts);
                    let (b, head) = (rest / (heads.q / served), rest % (heads.q / served));
                    let head = head * served;
                    let rows = tiling.tile(tile);
                    if rows.count == 0 {
                        return;
                    }
                    let mut stage = stage.clone();
                    if parts > 1 {
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
                            partial: partial.as_ref().map(|p| p.tile(b, held, rows)),
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
    fn prepare(&self, call: &Call<'_, E>) -> Option<Prepared> {
        let Dims { heads, q_len, .. } = self.problem.dims();
        let meet = q_len.div_ceil(self.rows) * (heads.q / heads.kv);
        let sizes = self.tiles.filter(|_| meet > 1)?;
        E::prepare(self.machine.isa, sizes, call, self.machine.threads)
    }

    /// Counts what will be computed: walks the mask, not the data.
    #[must_use]
    pub fn work(&self) -> Work {
        let Dims { batch, heads, q_len, k_len, qk_dim, v_dim, .. } = self.problem.dims();
        let mut work = Work::default();
        if [batch, heads.q, q_len, k_len].contains(&0) {
            return work;
        }
        let (mut runs, mut cell) = (Vec::new(), Cell::new());
        for (tiling, stage) in self.stages() {
            let Some(Way { mask, without, .. }) = stage.walk else { continue };
            for (b, head) in (0..batch).flat_map(|b| (0..heads.q).map(move |h| (b, h))) {
                let scope = self.problem.scope(b, head);
                for rows in tiling.tiles() {
                    mask.runs_beyond(without, &scope, rows, &mut runs);
                    let pairs = runs
                        .iter()
                        .map(|s| s.keys.len() as u128 * u128::from(s.lanes.count_ones()));
                    work.pairs += pairs.sum::<u128>();
                    let mut visited = 0;
                    for part in 0..self.parts {
                        let mut cells = Cells::new(&runs, self.part(part, b), rows.lanes());
                        while cells.next(&mut cell) {
                            visited += 1;
                            work.full += u64::from(cell.full);
                            work.partial += u64::from(!cell.full);
                            work.computed += cell.computed(rows);
                        }
                    }
                    let cells = k_len.div_ceil(CELL) as u64;
                    work.skipped +=
                        if without.is_none() { cells.saturating_sub(visited) } else { 0 };
                }
            }
        }
        let features = qk_dim as f64 + v_dim as f64;
        work.flops = 2.0 * work.pairs as f64 * features;
        let rows = (heads.q as f64 * q_len as f64 + heads.kv as f64 * k_len as f64) * batch as f64;
        work.bytes = rows * features * std::mem::size_of::<E>() as f64;
        work
    }
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
        let (rows, parts) = (self.rows, self.parts);
        write!(f, "forward {} {} {rows}x{CELL} t{threads} s{parts}", isa.name(), E::NAME)?;
        if !f.alternate() {
            return Ok(());
        }
        let work = self.work();
        let share = |n: u128, of: u128| if of == 0 { 100.0 } else { 100.0 * n as f64 / of as f64 };
        let Dims { batch, heads, q_len, k_len, .. } = self.problem.dims();
        let all = [batch, heads.q, q_len, k_len]
            .iter()
            .fold(1u128, |n, axis| n.saturating_mul(*axis as u128));
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
        if let Some((stride, rest)) = &self.diagonal {
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
