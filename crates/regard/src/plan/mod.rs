//! How a problem will be run: pure arithmetic of the problem and the machine, printable before it happens.

mod backward;
#[cfg(not(test))]
mod compiled;
mod estimators;
mod forward;
pub(crate) mod grads;
pub(crate) mod output;
mod part;
mod select;
mod shared;
mod sums;
mod work;

use crate::description::mask::Mask;
use crate::description::normalizer::{Rule, Selection};
use crate::description::problem::{Dims, Heads, Problem};
use crate::error::Error;
use crate::kernel::amx::{AmxDecodeScratch, Sizes};
use crate::kernel::block_loop::{DECODE_MAX_ROWS, KeyRange, TILE_ROWS, Tiling};
use crate::kernel::forward::{Scratch, Stage};
use crate::machine::Machine;
use crate::machine::simd::{Element, GROUP, Number};
use crate::tensor::index::RowTile;
use crate::tensor::view::{Shape, ViewMut};
pub use forward::{KeysValues, OutputMut};
pub use grads::{AdditiveGrads, Grads, OutputGrads};
pub use output::{Output, OutputView};
pub use part::Partial;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
pub use work::Work;

/// A checked problem and the way to run it. Make it once, use it for every layer of the same shape: a plan keeps the memory that
/// its threads worked in, so the next call does not allocate it again. Calls from several threads at once share a plan.
#[derive(Clone, Debug)]
pub struct Plan<'a, E: Element> {
    problem: Problem<'a, E>,
    core: Core<'a, E::Num>,
}

/// A plan for whatever type of element: tensors are data of the call.
#[derive(Clone, Debug)]
pub(crate) struct Core<'a, N: Number> {
    problem: Problem<'a, N>,
    machine: Machine,
    /// Rows of a tile, of items as long as the longest.
    pub(crate) rows: usize,
    /// The first key that is looked at.
    first: usize,
    /// How items are run: those of a class together. One class where all have the same sizes.
    classes: Vec<ItemClass>,
    /// The stride of diagonals that may be visited on their own, and the mask without them.
    diagonal: Option<(usize, Mask)>,
    scratch: ScratchPool<N>,
}

/// Scratch memory of forward passes, kept for the next call: for short calls, allocating it takes as long as using it.
///
/// A plan has a pool of its own. A layer whose parameters (bias, ALiBi slopes, sinks, ...) change between calls owns a pool, and makes
/// a plan for each call that uses it: [`Plan::with_scratch`]. A clone shares the memory of the original. Plans of any sizes may
/// share a pool; it holds the 64 most recent blocks of scratch, one for each thread of a call.
#[derive(Clone, Debug)]
pub struct ScratchPool<N: Number>(Arc<Mutex<Vec<Pooled<N>>>>);

/// Scratch that waits for a call of its sizes.
type Pooled<N> = (ScratchSizes, Scratch<N>);

/// Blocks of scratch that a pool holds at most.
const POOL_MAX: usize = 64;

/// What the size of a [`Scratch`] depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ScratchSizes {
    dims: Dims,
    rows: usize,
    tiles: Option<Sizes>,
    decode: Option<usize>,
    /// Whether rows are decoded together: see [`Problem::treats_rows_alike`].
    alike: bool,
    /// Whether weights have factors.
    factors: bool,
    /// Whether queries are projected.
    projected: bool,
    /// Units of an additive similarity.
    hidden: usize,
}

impl ScratchSizes {
    fn new<N: Number>(problem: &Problem<'_, N>, schedule: Schedule) -> Self {
        Self {
            dims: Dims { batch: 0, k_len: 0, ..problem.dims() },
            rows: schedule.rows,
            tiles: schedule.tiles,
            decode: schedule.decode,
            alike: problem.treats_rows_alike(),
            factors: problem.has_factors(),
            projected: problem.similarity.of_queries().is_some(),
            hidden: problem.similarity.hidden(),
        }
    }
}

impl<N: Number> Default for ScratchPool<N> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Vec::new())))
    }
}

impl<N: Number> ScratchPool<N> {
    /// An empty pool.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Memory of these sizes: that of an earlier call, or new.
    fn take(&self, problem: &Problem<'_, N>, sizes: ScratchSizes) -> Scratch<N> {
        let mut pool = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(i) = pool.iter().rposition(|(of, _)| *of == sizes) {
            return pool.remove(i).1;
        }
        drop(pool);
        Scratch::new(problem, sizes.rows, sizes.tiles, sizes.decode)
    }

    fn put_back(&self, sizes: ScratchSizes, scratch: Scratch<N>) {
        let mut pool = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if pool.len() == POOL_MAX {
            pool.remove(0);
        }
        pool.push((sizes, scratch));
    }
}

/// How an item is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Schedule {
    /// Rows of a tile.
    rows: usize,
    /// Whether keys are split into parts.
    parted: bool,
    /// Query heads of a task, if the rows of several that one key head serves are done together.
    decode: Option<usize>,
    /// How products use AMX, if they do.
    tiles: Option<Sizes>,
    /// Whether several tiles of rows meet the same keys: so that these are packed before.
    shared: bool,
    /// Whether diagonals are visited on their own.
    diagonal: bool,
}

/// Items that are run in the same way.
#[derive(Clone, Debug)]
struct ItemClass {
    schedule: Schedule,
    /// Which ones, ascending; all where none is named.
    items: Option<Vec<usize>>,
    /// Parts that the keys of one of them are split into, at most.
    parts: usize,
}

/// Keys of one part when few rows meet many keys: enough to outweigh the merge by far.
const PART_KEYS: usize = 1024;

/// Rows of a head that are decoded over any number of keys, and over long keys: draft tokens. More rows over few keys are short sequences, of
/// which there are many, and which are trained: their rows fill the lanes better, and their backward pass may use AMX. Over 32,768 keys on
/// AVX-512, 32/8 heads of d 128, 8 rows decoded take 0.78 of the time with rows in the lanes, 16 rows 1.5 times as long.
const DECODE_MAX_QUERIES: [usize; 2] = [4, 8];
/// Keys from which on they are long.
const DECODE_LONG_KEYS: usize = 1024;

/// Rows of a tile whose rows have other keys each: one vector of `f32`, which costs the same with fewer rows.
const LISTED_MIN_ROWS: usize = 16;

impl<'a, E: Element> Plan<'a, E> {
    /// Checks the problem and decides how to run it. After this nothing can fail but a mismatch of tensors and plan.
    #[inline(never)]
    pub fn new(problem: Problem<'a, E>, machine: Machine) -> Result<Self, Error> {
        problem.check()?;
        let problem = problem.with_local_mask();
        Ok(Self { core: Core::new(problem.erase(), machine), problem })
    }

    /// The problem.
    #[must_use]
    pub fn problem(&self) -> &Problem<'a, E> {
        &self.problem
    }

    /// The machine.
    #[must_use]
    pub fn machine(&self) -> Machine {
        self.core.machine
    }

    /// The products of bf16 tiles that one product of numbers takes, if that is how they are made: 1, 3 or 6, as the
    /// [`Precision`](crate::machine::Precision) and the type of the tensors have it.
    #[must_use]
    pub fn tile_products(&self) -> Option<usize> {
        self.core.tile_products()
    }

    /// The same plan with its scratch memory in `pool`, which other plans may share.
    #[must_use]
    pub fn with_scratch(mut self, pool: &ScratchPool<E::Num>) -> Self {
        self.core.scratch = pool.clone();
        self
    }

    pub(crate) fn core(&self) -> &Core<'a, E::Num> {
        &self.core
    }

    /// The same where rows have made their selection.
    pub(crate) fn selecting<'b>(&self, selection: &'b Selection<E::Num>, rule: Rule) -> Plan<'b, E>
    where
        'a: 'b,
    {
        Plan {
            problem: self.problem.selecting(selection, rule),
            core: self.core.selecting(selection, rule),
        }
    }

    /// The same with the softmax in the place of a normalizer.
    fn soft(&self) -> Self {
        let problem = self.problem.soft();
        Self { core: self.core.with_problem(problem.erase()), problem }
    }
}

impl<'a, N: Number> Core<'a, N> {
    /// Decides how to run a problem that has been checked.
    #[inline(never)]
    fn new(problem: Problem<'a, N>, machine: Machine) -> Self {
        let diagonal = problem.mask.diagonal();
        let schedule = |q_len, k_len| Schedule::new(&problem, machine, &diagonal, [q_len, k_len]);
        let parts = |schedule: Schedule, k_len: usize| {
            if schedule.parted { k_len.div_ceil(PART_KEYS) } else { 1 }
        };
        let Dims { batch, q_len, k_len, .. } = problem.dims();
        let longest = schedule(q_len, k_len);
        let mut classes: Vec<ItemClass> = Vec::new();
        if problem.has_items_alike() {
            classes.push(ItemClass {
                schedule: longest,
                items: None,
                parts: parts(longest, k_len),
            });
        } else {
            for item in 0..batch {
                let k_len = problem.k_len(item);
                let schedule = schedule(problem.q_len(item), k_len);
                let parts = parts(schedule, k_len);
                match classes.iter_mut().find(|class| class.schedule == schedule) {
                    Some(class) => {
                        class.items.get_or_insert_default().push(item);
                        class.parts = class.parts.max(parts);
                    }
                    None => classes.push(ItemClass { schedule, items: Some(vec![item]), parts }),
                }
            }
        }
        let scratch = ScratchPool::default();
        let rows = lane_rows(&problem, q_len);
        Self { rows, problem, machine, first: 0, classes, diagonal, scratch }
    }

    pub(crate) fn problem(&self) -> &Problem<'a, N> {
        &self.problem
    }

    fn tile_products(&self) -> Option<usize> {
        let terms = self.classes.iter().find_map(|class| class.schedule.tiles)?.terms;
        Some(terms * (terms + 1) / 2)
    }

    /// The bf16 terms that numbers are split into in the backward pass, if products are made on tiles there.
    pub(crate) fn backward_terms(&self) -> Option<usize> {
        let many = self.classes.iter().filter(|class| class.schedule.decode.is_none());
        many.filter_map(|class| class.schedule.tiles).map(|sizes| sizes.terms).next()
    }

    pub(crate) fn machine(&self) -> Machine {
        self.machine
    }

    /// The same for the backward pass of one item of a packed problem, on so many threads.
    pub(crate) fn of_item(&self, item: usize, threads: usize) -> Self {
        let problem = self.problem.as_long_as(item);
        let Dims { q_len, k_len, .. } = problem.dims();
        let (machine, diagonal) = (self.machine.threads(threads), self.diagonal.clone());
        let schedule = Schedule::new(&problem, machine, &diagonal, [q_len, k_len]);
        let classes = vec![ItemClass { schedule, items: Some(vec![item]), parts: 1 }];
        let (rows, scratch) = (lane_rows(&problem, q_len), ScratchPool::default());
        Self { problem, machine, rows, first: 0, classes, diagonal, scratch }
    }

    /// The same for the keys from `first` on.
    pub(crate) fn beyond(self, first: usize) -> Self {
        Self { first, ..self }
    }

    /// The same where rows have made their choice.
    pub(crate) fn selecting<'b>(&self, selection: &'b Selection<N>, rule: Rule) -> Core<'b, N>
    where
        'a: 'b,
    {
        Core { problem: self.problem.selecting(selection, rule), ..self.clone() }
    }

    /// The same way for a problem of the same sizes.
    pub(crate) fn with_problem(&self, problem: Problem<'a, N>) -> Self {
        Self { problem, ..self.clone() }
    }

    /// `dim` numbers for each row, `[batch, heads.q, q_len, dim]`, or `[total, heads.q, dim]` if queries are packed.
    pub(crate) fn by_row<'o, T>(
        &'o self,
        data: &'o mut [T],
        dim: usize,
    ) -> Result<ViewMut<'o, T>, Error> {
        let shape = Shape { dim, ..self.problem.dims().out_shape() };
        match self.problem.q_offsets() {
            Some(offsets) => ViewMut::packed(data, offsets, [shape.heads, dim]),
            None => ViewMut::bhsd(data, shape.to_array()),
        }
    }

    /// Rows into tiles, a tile's rows `stride` apart.
    pub(crate) fn tiling(&self, stride: usize) -> Tiling {
        Tiling { q_len: self.problem.dims().q_len, rows: self.rows, stride }
    }

    /// The key ranges over all keys that visit each visible pair once, and the tiles of rows that go them.
    pub(crate) fn key_ranges(&self) -> Vec<(Tiling, KeyRange<'_>)> {
        let diagonal = self.diagonal.as_ref();
        let apart = diagonal.is_some_and(|(stride, _)| apart(*stride, self.problem.dims().q_len));
        self.key_ranges_of(self.rows, apart).into_iter().flatten().collect()
    }

    /// The same in tiles of so many rows, with diagonals on their own or not.
    fn key_ranges_of(&self, rows: usize, diagonal: bool) -> [Option<(Tiling, KeyRange<'_>)>; 2] {
        let (mask, keys) = (&self.problem.mask, self.first..self.problem.dims().k_len);
        let tiling = |stride| Tiling { rows, ..self.tiling(stride) };
        let Some((stride, rest)) = self.diagonal.as_ref().filter(|_| diagonal) else {
            return [Some((tiling(1), KeyRange { mask, without: None, keys })), None];
        };
        let near = KeyRange { mask: rest, without: None, keys: keys.clone() };
        let far = KeyRange { mask, without: Some(rest), keys };
        [Some((tiling(1), near)), Some((tiling(*stride), far))]
    }

    /// The stages of a class of items: each waits for the one before, the tasks inside it are independent.
    fn stages<'s>(
        &'s self,
        class: &ItemClass,
    ) -> impl Iterator<Item = (Tiling, Stage<'s>)> + use<'s, 'a, N> {
        let Schedule { rows, parted, diagonal, .. } = class.schedule;
        let key_ranges = self.key_ranges_of(rows, diagonal);
        let last = if key_ranges[1].is_some() { 1 } else { 0 };
        let stage = move |(i, (tiling, key_range))| {
            let (from, into) = match parted {
                true => (0..0, Some(0)),
                false => (0..i, (i < last).then_some(0)),
            };
            (tiling, Stage { from, keys: Some(key_range), into })
        };
        let tiling = Tiling { rows, ..self.tiling(1) };
        let merge = (tiling, Stage { from: 0..class.parts, keys: None, into: None });
        let stages = key_ranges.into_iter().flatten().enumerate().map(stage);
        stages.chain(parted.then_some(merge))
    }

    /// The keys of a part of an item; none for the last parts of one with fewer keys than another of its class.
    fn part(&self, part: usize, item: usize) -> Range<usize> {
        let k_len = self.problem.k_len(item);
        let keys = (part * PART_KEYS).min(k_len)..((part + 1) * PART_KEYS).min(k_len);
        keys.start.max(self.first).min(keys.end)..keys.end
    }
}

impl ItemClass {
    /// Items of the class, of a problem with so many.
    fn count(&self, batch: usize) -> usize {
        self.items.as_ref().map_or(batch, Vec::len)
    }

    /// An item of the class.
    fn item(&self, i: usize) -> usize {
        self.items.as_ref().map_or(i, |items| items[i])
    }
}

impl Schedule {
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
        let diagonal = diagonal.as_ref().is_some_and(|(stride, _)| apart(*stride, q_len));
        // Key lists are short, however many keys there are to choose from.
        let listed = problem.mask.row_block().is_some();
        let parted = q_len <= TILE_ROWS && !diagonal && !listed && k_len >= 2 * PART_KEYS;
        // Rows that are decoded together: all, or those that have a list of keys in common.
        let together = problem.mask.row_block().map_or(q_len, |block| block.clamp(1, q_len.max(1)));
        let most = DECODE_MAX_QUERIES[usize::from(k_len >= DECODE_LONG_KEYS)];
        let most = if listed { DECODE_MAX_ROWS } else { most };
        let decode = !diagonal && together <= most && problem.is_dot() && problem.is_softmax();
        let decode = if decode { decode_heads(&problem.mask, heads, together) } else { None };
        let rows = match decode {
            Some(_) if together < q_len => together,
            _ => lane_rows(problem, q_len),
        };
        let tiles = problem.terms().filter(|terms| {
            machine.isa.has_amx()
                && (decode.is_none() || AmxDecodeScratch::fit(*terms, qk_dim, v_dim))
        });
        let tiles = tiles.map(|terms| Sizes::new(terms, qk_dim, v_dim));
        // Of listed keys few are needed: packing all would cost more than they do.
        let shared = !listed && q_len.div_ceil(rows).saturating_mul(heads.q) > heads.kv;
        Self { rows, parted, decode, tiles, shared, diagonal }
    }
}

/// The tasks of a stage: for each of some items `each` heads, or heads and parts, and for each of those its tiles of rows.
enum Grid {
    /// Items of the same sizes.
    Uniform { tasks: usize, each: usize, tiling: Tiling },
    /// The tiling of each item; the tasks before those of each item, and all in the end.
    Ragged { tilings: Vec<Tiling>, before: Vec<usize> },
}

impl Grid {
    /// `uniform`: all items have the tiling of the first.
    fn new(items: usize, each: usize, uniform: bool, tiling: impl Fn(usize) -> Tiling) -> Self {
        if uniform && items > 0 {
            let tiling = tiling(0);
            let each = each * tiling.count();
            return Self::Uniform { tasks: items * each, each, tiling };
        }
        let tilings: Vec<_> = (0..items).map(tiling).collect();
        let before = cumulated(items, |item| each * tilings[item].count());
        Self::Ragged { tilings, before }
    }

    fn count(&self) -> usize {
        match self {
            Self::Uniform { tasks, .. } => *tasks,
            Self::Ragged { tilings, before } => before[tilings.len()],
        }
    }

    /// The item of a task, which of `each` it is, and its rows. Heads outermost, so that neighbours in time share keys; late
    /// tiles first, for a causal mask gives them the most to do.
    fn at(&self, task: usize) -> (usize, usize, RowTile) {
        let (item, i, tiling) = match self {
            Self::Uniform { each, tiling, .. } => (task / each, task % each, *tiling),
            Self::Ragged { tilings, before } => {
                let item = before.partition_point(|first| *first <= task) - 1;
                (item, task - before[item], tilings[item])
            }
        };
        let tiles = tiling.count();
        (item, i / tiles, tiling.tile(tiles - 1 - i % tiles))
    }
}

/// Query heads of a decoding task, if so many rows of each are decoded: as many of those that one key head serves as fit. One by one if the mask tells
/// them apart: which keys are in a block together depends on all that a task sees, and the bits must not depend on what heads share.
fn decode_heads(mask: &Mask, heads: Heads, rows: usize) -> Option<usize> {
    let served = heads.q.checked_div(heads.kv)?;
    let served = if mask.tells_heads_apart(served) { served.min(1) } else { served };
    let fits = |n: &usize| served.is_multiple_of(*n) && n.saturating_mul(rows) <= DECODE_MAX_ROWS;
    (1..=served.min(DECODE_MAX_ROWS)).rev().find(fits)
}

/// Rows of a tile where rows are in the lanes, for an item of so many queries. Rows that have other keys each keep few
/// neighbours: a tile visits the keys of all of its rows.
pub(crate) fn lane_rows<E: Element>(problem: &Problem<'_, E>, q_len: usize) -> usize {
    let rows = tile_rows(q_len, problem.dims().heads.q);
    problem.mask.row_block().map_or(rows, |block| block.clamp(LISTED_MIN_ROWS, rows))
}

/// Rows of a tile, for an item of so many queries.
fn tile_rows(q_len: usize, heads: usize) -> usize {
    if q_len.saturating_mul(heads) >= 2048 { TILE_ROWS } else { GROUP }
}

/// Whether so many rows are enough to block loop diagonals of this stride on their own.
fn apart(stride: usize, q_len: usize) -> bool {
    q_len / stride >= 8
}

/// The sums of `n` sizes before each of them, and of all in the end.
pub(crate) fn cumulated(n: usize, size: impl Fn(usize) -> usize) -> Vec<usize> {
    let mut sums = vec![0; n + 1];
    (0..n).for_each(|i| sums[i + 1] = sums[i] + size(i));
    sums
}
