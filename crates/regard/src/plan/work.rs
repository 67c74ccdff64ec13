//! What a plan will compute, counted, and told.

use super::forward::{StageTask, StageTasks};
use super::{Core, ItemClass, PART_KEYS, Plan};
use crate::description::mask::{Edges, Mask, Run};
use crate::description::problem::Dims;
use crate::kernel::block_loop::{KeyRange, TILE_ROWS, Tiling};
use crate::kernel::forward::Stage;
use crate::kernel::key_blocks::{KeyBlock, KeyBlocks};
use crate::machine::Machine;
use crate::machine::run::finish_time;
use crate::machine::simd::{Element, GROUP, Number};
use crate::tensor::index::{BLOCK_KEYS, RowTile, Scope, signed};
use std::fmt;
use std::ops::Range;

/// What a plan will compute, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Work {
    /// Pairs of query and key that see each other.
    pub pairs: u128,
    /// Pairs that are computed, the hidden ones inside partly seen blocks included.
    pub computed: u128,
    /// KeyBlocks of keys that all rows of a tile see.
    pub full: u128,
    /// KeyBlocks that some rows see some of.
    pub partial: u128,
    /// KeyBlocks that are never visited.
    pub skipped: u128,
    /// Multiplications and additions for the visible pairs; a hyperbolic tangent counts as one of each. Projections, and what
    /// a normalizer passes before, are not counted.
    pub flops: f64,
    /// Bytes of q, k, v and the output.
    pub bytes: f64,
}

impl<E: Element> Plan<'_, E> {
    /// Counts what will be computed: passes the mask, not the data. Masks made of bands and spans (all keys, causal, windows,
    /// lengths, prefixes) are counted in the same time whatever the sizes are.
    #[must_use]
    #[inline(never)]
    pub fn work(&self) -> Work {
        self.core().work()
    }

    /// For how many of so many threads a forward pass has work at a time, on the mean: its time on one thread divided by its time on these, if
    /// a task takes as long as it computes pairs, and memory and the wake-up of threads cost nothing. 1 for a call that is too small for more.
    ///
    /// A simulation of the tasks in the order in which threads claim them, so it takes longer for a call with more of them. With more than
    /// 65,536 tasks there is work for all threads.
    #[must_use]
    #[inline(never)]
    pub fn parallelism(&self, threads: usize) -> f64 {
        self.core().parallelism(threads)
    }
}

/// Tasks that are simulated: with more of them, how the last ones fall does not matter.
const MAX_SIMULATED_TASKS: usize = 1 << 16;

impl<N: Number> Core<'_, N> {
    fn parallelism(&self, threads: usize) -> f64 {
        if threads <= 1 || self.is_small() || self.problem.rows() == 0 {
            return 1.0;
        }
        // No stage has more tasks than this, and to count those of a large one may overflow.
        let parts = self.classes.iter().map(|class| class.parts).max().unwrap_or(1);
        if self.problem.rows().saturating_mul(parts) > MAX_SIMULATED_TASKS * TILE_ROWS {
            return threads as f64;
        }
        let (mut alone, mut together) = (0, 0);
        for class in &self.classes {
            for (tiling, stage) in self.stages(class) {
                let tasks = self.stage_tasks(class, tiling, &stage);
                if tasks.count() > MAX_SIMULATED_TASKS {
                    return threads as f64;
                }
                let costs = (0..tasks.count()).map(|i| self.cost(class, &stage, &tasks, i));
                let costs: Vec<u128> = costs.collect();
                alone += costs.iter().sum::<u128>();
                together += finish_time(threads, &costs);
            }
        }
        if together == 0 { 1.0 } else { alone as f64 / together as f64 }
    }

    /// Pairs that a task computes, or parts of rows that it merges.
    fn cost(&self, class: &ItemClass, stage: &Stage<'_>, tasks: &StageTasks, i: usize) -> u128 {
        let StageTask { slot, head, part, rows } = tasks.at(i);
        if rows.count == 0 {
            return 0;
        }
        let Some(KeyRange { mask, without, .. }) = stage.keys.clone() else {
            return (rows.count * class.parts) as u128;
        };
        let item = class.item(slot);
        let (scope, mut runs) = (self.problem.scope(item, head), Vec::new());
        mask.runs_beyond(without, &scope, rows, &mut runs);
        let keys = if class.schedule.parted { self.part(part, item) } else { 0..scope.k_len };
        let [_, computed, ..] = count_blocks(&runs, keys, rows);
        computed.cast_unsigned() * tasks.served as u128
    }

    fn work(&self) -> Work {
        let Dims { heads, qk_dim, v_dim, .. } = self.problem.dims();
        let mut work = Work::default();
        if self.problem.rows() > 0 {
            self.classes.iter().for_each(|class| self.count(class, &mut work));
        }
        let hidden = self.problem.similarity.hidden();
        let features = if hidden > 0 { hidden } else { qk_dim } as f64 + v_dim as f64;
        work.flops = 2.0 * work.pairs as f64 * features;
        let keys = self.problem.sum_over_items(|_, k_len| k_len as u128);
        let (element, kv_rows) =
            (self.problem.element_bytes() as f64, heads.kv as f64 * keys as f64);
        let stored = if self.problem.quantization().is_some() { 1.0 } else { element };
        work.bytes = (self.problem.rows() as f64 * element + kv_rows * stored) * features;
        work
    }

    /// Adds what the items of a class take to the work.
    fn count(&self, class: &ItemClass, work: &mut Work) {
        let heads = self.problem.dims().heads.q;
        for (tiling, stage) in self.stages(class) {
            let Some(KeyRange { mask, without, .. }) = stage.keys else { continue };
            let of = |b, head| {
                let scope = self.problem.scope(b, head);
                let tiling = Tiling { q_len: scope.q_len, ..tiling };
                HeadTiles { plan: self, class, mask, without, scope, tiling }.count()
            };
            if class.items.is_none() && !mask.tells_apart() {
                let times = heads as i128 * self.problem.dims().batch as i128;
                work.add(of(0, 0).map(|n| n * times));
                continue;
            }
            for b in (0..class.count(self.problem.dims().batch)).map(|i| class.item(i)) {
                match mask.tells_heads_apart(usize::MAX) {
                    true => (0..heads).for_each(|head| work.add(of(b, head))),
                    false => work.add(of(b, 0).map(|n| n * heads as i128)),
                }
            }
        }
    }
}

/// Pairs that are seen and that are computed; blocks that are full, partial and skipped.
type Counts = [i128; 5];

impl Work {
    fn add(&mut self, counts: Counts) {
        let [pairs, computed, full, partial, skipped] = counts.map(i128::cast_unsigned);
        self.pairs += pairs;
        self.computed += computed;
        self.full += full;
        self.partial += partial;
        self.skipped += skipped;
    }
}

/// The tiles of rows of one head.
struct HeadTiles<'t, 'a, N: Number> {
    plan: &'t Core<'a, N>,
    class: &'t ItemClass,
    mask: &'t Mask,
    without: Option<&'t Mask>,
    scope: Scope,
    tiling: Tiling,
}

/// Rows and keys around an edge of a mask that a tile near it may count otherwise.
const EDGE_ROWS: i64 = (TILE_ROWS + 2 * BLOCK_KEYS) as i64;

impl<N: Number> HeadTiles<'_, '_, N> {
    /// All tiles. Far from where an edge that goes with the rows meets one that stays, each tile counts as much more than the one
    /// before as that one did: so the cost does not grow with the sizes, unless the mask itself does.
    fn count(&self) -> Counts {
        // An item of a packed problem may have no rows.
        let Some(last) = self.tiling.count().checked_sub(1) else { return [0; 5] };
        let Some(mut breakpoints) = self.breakpoints().filter(|_| self.without.is_none()) else {
            let tiles = (0..=last).map(|i| self.tile(i));
            return tiles.fold([0; 5], |sum, tile| add(sum, tile, 1));
        };
        breakpoints.sort_unstable();
        let rows = self.tiling.rows as i64;
        let tile_of = |row: i64| usize::try_from(row.div_euclid(rows)).unwrap_or(0).min(last);
        // Tiles near a turn one by one, and what lies between two of them as a series.
        let near = breakpoints.iter().map(|row| {
            tile_of(row.saturating_sub(EDGE_ROWS))..tile_of(row.saturating_add(EDGE_ROWS)) + 1
        });
        let (mut sum, mut at) = ([0; 5], 0);
        for Range { start, end } in near.chain(std::iter::once(last..last + 1)) {
            sum = add(sum, self.series(at..start), 1);
            for i in start.max(at)..end {
                sum = add(sum, self.tile(i), 1);
            }
            at = at.max(end);
        }
        sum
    }

    /// Tiles that count as an arithmetic series.
    fn series(&self, tiles: Range<usize>) -> Counts {
        if tiles.len() < 2 {
            return tiles.fold([0; 5], |sum, i| add(sum, self.tile(i), 1));
        }
        let (first, n) = (self.tile(tiles.start), tiles.len() as i128);
        let growth = add(self.tile(tiles.start + 1), first, -1);
        add(first.map(|x| x * n), growth, n * (n - 1) / 2)
    }

    /// The rows at which an edge of the mask that goes with the rows meets one that stays, if the mask has no others.
    fn breakpoints(&self) -> Option<Vec<i64>> {
        let mut edges = Edges { fixed: vec![0, signed(self.scope.k_len)], moving: Vec::new() };
        let known = self.mask.edges(&self.scope, &mut edges);
        let Edges { fixed, moving } = edges;
        let rows = fixed.iter().flat_map(|fixed| {
            let meet = |moving: &i64| fixed.saturating_sub(*moving);
            moving.iter().map(move |m| meet(m).saturating_sub(self.scope.offset))
        });
        known.then(|| rows.collect())
    }

    /// One tile.
    fn tile(&self, i: usize) -> Counts {
        let (rows, scope, mut runs) = (self.tiling.tile(i), self.scope, Vec::new());
        if rows.count == 0 {
            return [0; 5];
        }
        self.mask.runs_beyond(self.without, &scope, rows, &mut runs);
        let pairs = runs.iter().map(|s| s.keys.len() as i128 * i128::from(s.lanes.count_ones()));
        let mut sum = [pairs.sum(), 0, 0, 0, 0];
        let mut part = 0;
        while part < self.class.parts {
            let keys = match self.class.schedule.parted {
                true => self.plan.part(part, scope.batch),
                false => 0..scope.k_len,
            };
            // Parts that lie in one run or between two of them are alike.
            let before = runs.partition_point(|run| run.keys.end <= keys.start);
            let until = runs.get(before).map_or(scope.k_len, |run| match run.keys.start {
                start if start <= keys.start => run.keys.end,
                start => start,
            });
            let alike = (until.saturating_sub(keys.start) / PART_KEYS).max(1);
            let alike = if self.class.schedule.parted { alike } else { 1 };
            sum = add(sum, count_blocks(&runs, keys, rows), alike as i128);
            part += alike;
        }
        let blocks = scope.k_len.div_ceil(BLOCK_KEYS) as i128;
        sum[4] = if self.without.is_none() { (blocks - sum[2] - sum[3]).max(0) } else { 0 };
        sum
    }
}

/// The blocks that some runs make of some keys.
fn count_blocks(runs: &[Run], keys: Range<usize>, rows: RowTile) -> Counts {
    let (mut sparse, mut block) = (Vec::new(), KeyBlock::new());
    let mut blocks = KeyBlocks::new(runs, keys, rows.lanes(), &mut sparse);
    let mut sum = [0; 5];
    while blocks.next(&mut block) {
        let alike = 1 + blocks.skip_alike(&block) as i128;
        let (full, computed) = (i128::from(block.full), block.computed(rows).cast_signed());
        sum = add(sum, [0, computed, full, 1 - full, 0], alike);
    }
    sum
}

fn add(sum: Counts, counts: Counts, times: i128) -> Counts {
    std::array::from_fn(|i| sum[i] + counts[i] * times)
}

/// One line: `forward avx512 f32 128x64 t2 s1`: rows x keys of a tile, threads, parts that the keys are split into.
/// With `{:#}`, the reasons too.
impl<E: Element> fmt::Display for Plan<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.core().fmt(f)
    }
}

impl<N: Number> fmt::Display for Core<'_, N> {
    #[inline(never)]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { isa, threads, .. } = self.machine;
        let parts = self.classes.iter().map(|class| class.parts).max().unwrap_or(1);
        let rows = self.rows;
        write!(
            f,
            "forward {} {} {rows}x{BLOCK_KEYS} t{threads} s{parts}",
            isa.name(),
            self.problem.dtype()
        )?;
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
            "  blocks   {} full, {} partial, {} skipped, of {rows} rows x {BLOCK_KEYS} keys",
            work.full, work.partial, work.skipped
        )?;
        writeln!(
            f,
            "  work     {:.3} Gflop, {:.1} MiB",
            work.flops / 1e9,
            work.bytes / f64::from(1 << 20)
        )?;
        let why_rows = if self.problem.mask.row_block().is_some() {
            "rows with key lists of their own: a tile visits the keys of all of its rows"
        } else if rows == TILE_ROWS {
            "two groups of 64 rows share each block while it is in the cache"
        } else {
            "few rows: smaller tiles fill more threads"
        };
        writeln!(f, "  rows     {rows}: {why_rows}")?;
        let lanes = isa.lanes::<N>();
        writeln!(
            f,
            "  vectors  {lanes} rows side by side in each; {} registers a row group",
            GROUP / lanes
        )?;
        match self.tile_products() {
            Some(1) => writeln!(f, "  products on tiles, of bf16 numbers as they are")?,
            Some(n) => writeln!(f, "  products on tiles, {n} of bf16 terms for each")?,
            None if isa.has_amx() => {
                let precision = self.problem.precision.name();
                writeln!(f, "  products by vectors: none on tiles at precision {precision}")?;
            }
            None => writeln!(f, "  products by vectors")?,
        }
        let diagonal = self.classes.iter().any(|class| class.schedule.diagonal);
        if let Some((stride, rest)) = self.diagonal.as_ref().filter(|_| diagonal) {
            writeln!(
                f,
                "  stages   first `{rest}` with neighbouring rows, then the rest with rows {stride} apart, which share their keys"
            )?;
        }
        match self.threads() {
            1 if threads > 1 => writeln!(f, "  threads  1: too small a call to wake up another")?,
            1 => {}
            n => writeln!(f, "  threads  {n}: tasks for {:.1} of them", self.parallelism(n))?,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::problem::Problem;
    use crate::tensor::view::Shape;
    use proptest::prelude::*;

    fn mask() -> impl Strategy<Value = Mask> {
        let size = || 0..3000usize;
        let one = prop_oneof![
            Just(Mask::full()),
            Just(Mask::causal()),
            (size(), size()).prop_map(|(back, ahead)| Mask::band(Some(back), Some(ahead))),
            size().prop_map(Mask::prefix),
            (size(), size())
                .prop_map(|(start, len)| Mask::spans(std::slice::from_ref(&(start..start + len)))),
            (1..300usize).prop_map(|n| Mask::full().window(n)),
        ];
        let two = (one.clone(), one.clone());
        prop_oneof![one, two.clone().prop_map(|(a, b)| a.and(b)), two.prop_map(|(a, b)| a.or(b))]
    }

    proptest! {
        #[test]
        fn a_series_counts_what_its_tiles_do(
            mask in mask(),
            (q_len, k_len) in (1..4000usize, 1..12_000usize),
            heads in 1..3usize,
        ) {
            let q = Shape { batch: 2, heads, len: q_len, dim: 8 };
            let k = Shape { len: k_len, ..q };
            let problem = Problem::<f32>::of_shapes(q, k, k).mask(mask);
            let plan = Plan::new(problem, Machine::detect());
            prop_assume!(plan.is_ok(), "a span beyond the keys");
            let plan = plan.expect("a problem").core;
            let mut each = Work::default();
            let class = &plan.classes[0];
            for (tiling, stage) in plan.stages(class) {
                let Some(KeyRange { mask, without, .. }) = stage.keys else { continue };
                let scope = plan.problem.scope(0, 0);
                let tiles = HeadTiles { plan: &plan, class, mask, without, scope, tiling };
                for i in 0..tiling.count() {
                    each.add(tiles.tile(i).map(|n| n * 2 * heads as i128));
                }
            }
            let work = plan.work();
            let counts = |w: Work| [w.pairs, w.computed, w.full, w.partial, w.skipped];
            prop_assert_eq!(counts(work), counts(each));
        }
    }

    #[test]
    fn the_sizes_cost_no_time() {
        let long = 1_000_000_000_000;
        let shape = |len| Shape { batch: 1, heads: 32, len, dim: 64 };
        for (mask, q_len) in [
            (Mask::causal(), long),
            (Mask::causal().window(4096).or(Mask::prefix(4)), long),
            (Mask::full(), 1),
        ] {
            let problem = Problem::<f32>::of_shapes(shape(q_len), shape(long), shape(long));
            let plan = Plan::new(problem.mask(mask), Machine::detect()).expect("a problem");
            assert!(plan.work().pairs >= long as u128 * 32);
        }
    }
}
