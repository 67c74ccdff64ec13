//! Statistics and maps of attention over a sequence that is longer than one machine holds.
//!
//! Rows are dealt to ranks in stripes; all keys pass every rank twice, block after block, in the order of the sequence. Stripes and blocks
//! do not depend on the number of ranks, and neither do the bits of the results.
//!
//! Where rows and keys come from is the caller's: a function that returns some positions of q or of k, `[heads, positions, dim]`. It may read
//! a file that all ranks see, or have the rank that owns a block send it to all; every rank asks for the same blocks of keys in the
//! same order. Memory of a rank: its rows of q, a few numbers for each, one block of keys, and the results.

use crate::context::ContextError;
use crate::ranks::{Ranks, gather};
use regard::problem::Dims;
use regard::{Layout, Plan, Shape, Tensor};
use regard_scope::{BlockedRows, CellMaps, HeadSums, RowStats};
use std::fmt;
use std::ops::Range;

/// Rows of a stripe, at most.
const STRIPE_ROWS: usize = 4096;
/// Stripes of a sequence, at least, where tiles are small enough: each rank has several, also of short sequences.
const STRIPES: usize = 64;

/// Some positions of a tensor, `[heads, positions, dim]`.
pub type Positions<'f, X> = &'f mut dyn FnMut(Range<usize>) -> Result<Vec<f32>, X>;

/// Where queries and keys come from.
pub struct Source<'f, X> {
    /// Rows that this rank computes.
    pub q: Positions<'f, X>,
    /// Blocks of keys.
    pub k: Positions<'f, X>,
    /// Keys of a block, rounded up to what the engine can cut at ([`Plan::key_step`]).
    pub block: usize,
}

impl<X> fmt::Debug for Source<'_, X> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Source").field("block", &self.block).finish_non_exhaustive()
    }
}

/// The sums of all rows of each head, on every rank; [`HeadSums::stats`] makes means of them. `plan` is that of the whole call, with values
/// without features; `progress` is called with the number of blocks done and in all.
pub fn stats<X: From<ContextError>>(
    ranks: &dyn Ranks,
    plan: &Plan<'_, f32>,
    source: Source<'_, X>,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<HeadSums>, X> {
    let Source { q, k, block } = source;
    let stripes = Stripes::new(plan, block);
    let mut own = stripes.first_pass(ranks, plan, (q, &mut *k), progress)?;
    let mut found: Vec<RowStats> = own.iter().map(|_| RowStats::default()).collect();
    stripes.second_pass(k, progress, |keys, block| {
        for (rows, found) in own.iter().zip(&mut found) {
            found.add(rows, keys.clone(), block).map_err(ContextError::from)?;
        }
        Ok(())
    })?;
    // The sums of each stripe, added in the order of rows.
    let heads = plan.problem().dims().heads.q;
    let mine: Vec<[f64; HeadSums::LEN]> = own
        .drain(..)
        .zip(found)
        .flat_map(|(rows, found)| found.sums(&rows))
        .map(HeadSums::to_array)
        .collect();
    let counts: Vec<usize> =
        (0..ranks.count()).map(|rank| heads * stripes.of(rank, ranks.count()).count()).collect();
    let all = gather(ranks, &mine, &counts).map_err(ContextError::from)?;
    let mut rest = all.chunks_exact(heads.max(1));
    let mut in_order = vec![&[][..]; stripes.count()];
    for rank in 0..ranks.count() {
        stripes.of(rank, ranks.count()).for_each(|i| in_order[i] = rest.next().unwrap_or(&[]));
    }
    let mut total = vec![HeadSums::default(); heads];
    for stripe in in_order {
        for (total, sums) in total.iter_mut().zip(stripe) {
            total.add(&HeadSums::from_array(*sums));
        }
    }
    Ok(total)
}

/// Maps of the rows `rows` and all keys, in at most `cells` cells down and across, on every rank: the largest weight in each cell.
pub fn maps<X: From<ContextError>>(
    ranks: &dyn Ranks,
    plan: &Plan<'_, f32>,
    source: Source<'_, X>,
    (rows, cells): (Range<usize>, [usize; 2]),
    progress: &mut dyn FnMut(usize, usize),
) -> Result<CellMaps, X> {
    let Source { q, k, block } = source;
    let stripes = Stripes::new(plan, block);
    let own = stripes.first_pass(ranks, plan, (q, &mut *k), progress)?;
    let mut maps = CellMaps::new(plan, rows, cells);
    stripes.second_pass(k, progress, |keys, block| {
        let mut add = |rows| maps.add(rows, keys.clone(), block);
        Ok(own.iter().try_for_each(&mut add).map_err(ContextError::from)?)
    })?;
    let each = maps.values().len();
    let all =
        gather(ranks, maps.values(), &vec![each; ranks.count()]).map_err(ContextError::from)?;
    for values in all.chunks_exact(each.max(1)) {
        maps.merge(values).map_err(ContextError::from)?;
    }
    Ok(maps)
}

/// How rows and keys are cut.
struct Stripes {
    rows: usize,
    /// Of a stripe.
    stripe: usize,
    keys: usize,
    /// Of a block.
    block: usize,
}

impl Stripes {
    fn new(plan: &Plan<'_, f32>, block: usize) -> Self {
        let Dims { q_len, k_len, .. } = plan.problem().dims();
        let stripe = q_len.div_ceil(STRIPES).clamp(1, STRIPE_ROWS);
        Self {
            rows: q_len,
            stripe: stripe.next_multiple_of(plan.row_step()),
            keys: k_len,
            block: block.clamp(1, k_len.max(1)).next_multiple_of(plan.key_step()),
        }
    }

    fn count(&self) -> usize {
        self.rows.div_ceil(self.stripe)
    }

    /// The stripes of a rank: dealt to and fro, so that under a causal mask, where later rows cost more, all ranks have as much to do.
    fn of(&self, rank: usize, ranks: usize) -> impl Iterator<Item = usize> + use<> {
        let turn = 2 * ranks;
        (0..self.count()).filter(move |i| [rank, turn - 1 - rank].contains(&(i % turn)))
    }

    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<'_> {
        (0..self.keys).step_by(self.block).map(|first| first..(first + self.block).min(self.keys))
    }

    /// The rows of this rank, with their lse.
    fn first_pass<'a, X: From<ContextError>>(
        &self,
        ranks: &dyn Ranks,
        plan: &Plan<'a, f32>,
        (q, k): (Positions<'_, X>, Positions<'_, X>),
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Vec<BlockedRows<'a>>, X> {
        let whole = plan.problem().dims();
        let mut own = Vec::new();
        for i in self.of(ranks.rank(), ranks.count()) {
            let rows = i * self.stripe..((i + 1) * self.stripe).min(self.rows);
            let shape = Shape { batch: 1, heads: whole.heads.q, len: rows.len(), dim: whole.q_dim };
            let q =
                Tensor::new(q(rows.clone())?, shape, Layout::Bhsd).map_err(ContextError::from)?;
            own.push(BlockedRows::new(plan, rows, q).map_err(ContextError::from)?);
        }
        let blocks = self.blocks().count();
        for (i, keys) in self.blocks().enumerate() {
            let block = k(keys.clone())?;
            for rows in &mut own {
                rows.add(keys.clone(), &block).map_err(ContextError::from)?;
            }
            progress(i + 1, 2 * blocks);
        }
        own.iter_mut().try_for_each(BlockedRows::finish).map_err(ContextError::from)?;
        Ok(own)
    }

    fn second_pass<X>(
        &self,
        k: Positions<'_, X>,
        progress: &mut dyn FnMut(usize, usize),
        mut add: impl FnMut(Range<usize>, &[f32]) -> Result<(), X>,
    ) -> Result<(), X> {
        let blocks = self.blocks().count();
        for (i, keys) in self.blocks().enumerate() {
            add(keys.clone(), &k(keys)?)?;
            progress(blocks + i + 1, 2 * blocks);
        }
        Ok(())
    }
}
