//! What a plan will compute, counted, and told.

use super::{Kind, PART_KEYS, Plan};
use crate::cells::{Cell, Cells};
use crate::machine::Machine;
use crate::place::CELL;
use crate::problem::Dims;
use crate::simd::{Element, GROUP};
use crate::walk::{TILE_ROWS, Tiling, Way};
use std::fmt;

/// What a plan will compute, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
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

impl<E: Element> Plan<'_, E> {
    /// Counts what will be computed: walks the mask, not the data.
    #[must_use]
    #[inline(never)]
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

/// One line: `forward avx512 f32 128x64 t2 s1`: rows x keys of a tile, threads, parts that the keys are split into.
/// With `{:#}`, the reasons too.
impl<E: Element> fmt::Display for Plan<'_, E> {
    #[inline(never)]
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
            Some(n) => writeln!(f, "  products on tiles, {n} of bf16 limbs for each")?,
            None if isa.has_tiles() => {
                let precision = self.problem.precision.name();
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
