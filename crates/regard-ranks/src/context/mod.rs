//! Context parallelism: exact attention over one sequence whose rows are spread over ranks.
//!
//! Every rank has the same [`Plan`], that of the whole call, as one process would make it, and the rows of q, k and v that [`Shards`]
//! deals to it. What runs on a rank is a [part](Plan::part) of that plan, which computes its rows as the whole would.
//!
//! | function | memory of a rank | compared with one process |
//! |---|---|---|
//! | [`attend`] | all keys and values | the same bits, for any number of ranks |
//! | [`attend_backward`] | all keys and values, and their gradients | the same bits for a given number of ranks |
//! | [`ring`] | two blocks of the keys and values | the same bits for a given number of ranks |
//! | [`decode`] | its run of the keys and values | the same bits, for any number of ranks, from 2048 keys on |
//!
//! "The same bits for a given number of ranks": repeated calls agree, and differ from one process by the rounding of sums in another order.

mod backward;
mod decode;
mod ring;
mod shards;

use crate::ranks::{Ranks, RanksError};
pub use backward::{ContextGrads, attend_backward};
use bytemuck::Pod;
pub use decode::decode;
use regard::{Element, Error, Layout, Output, Plan, Shape, Tensor, View};
pub use ring::ring;
pub use shards::Shards;
use std::fmt;
use std::ops::Range;

/// Why a call over several ranks failed.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ContextError {
    /// The ranks could not communicate.
    Ranks(RanksError),
    /// The engine refused the call.
    Engine(Error),
    /// The microscope refused the call.
    Scope(regard_scope::Error),
    /// There are more ranks than pairs of row tiles.
    TooManyRanks {
        /// Rows of the sequence.
        rows: usize,
        /// Rows of a tile, which is not divided.
        tile: usize,
        /// Ranks.
        ranks: usize,
    },
    /// A tensor of a rank does not have the size of its share.
    Share {
        /// The tensor.
        tensor: &'static str,
        /// Batch, heads, rows and features of the share.
        expected: [usize; 4],
        /// Those of the tensor.
        found: [usize; 4],
    },
}

impl fmt::Display for ContextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ranks(error) => error.fmt(f),
            Self::Engine(error) => error.fmt(f),
            Self::Scope(error) => error.fmt(f),
            Self::TooManyRanks { rows, tile, ranks } => {
                let tiles = rows.div_ceil(*tile);
                write!(
                    f,
                    "rows: {rows} rows make {tiles} tiles of {tile}, and {ranks} ranks need {} for two chunks each; use at most {} ranks",
                    2 * ranks,
                    (tiles / 2).max(1)
                )
            }
            Self::Share { tensor, expected, found } => write!(
                f,
                "{tensor}: the share of this rank is {expected:?} [batch, heads, rows, features], the tensor is {found:?}; cut it with Shards::take"
            ),
        }
    }
}

impl std::error::Error for ContextError {}

impl From<RanksError> for ContextError {
    fn from(error: RanksError) -> Self {
        Self::Ranks(error)
    }
}

impl From<Error> for ContextError {
    fn from(error: Error) -> Self {
        Self::Engine(error)
    }
}

impl From<regard_scope::Error> for ContextError {
    fn from(error: regard_scope::Error) -> Self {
        Self::Scope(error)
    }
}

/// Attention of this rank's rows over all keys, which are gathered: q, k and v are the [shares](Shards::take) of this rank, and so are the
/// output and the lse. The bits are those of `plan.forward` in one process.
///
/// Cost: sends and receives the keys and values once, `2 n heads.kv dim` numbers, before any computation; holds all of them.
///
/// ```
/// use regard::{Machine, Mask, Plan, Problem, Shape};
/// use regard_ranks::{Alone, context::{attend, Shards}};
/// let shape = Shape { batch: 1, heads: 2, len: 300, dim: 8 };
/// let x = regard::Tensor::new(vec![0.5f32; 2 * 300 * 8], shape, regard::Layout::Bhsd)?;
/// let plan = Plan::new(Problem::of_shapes(shape, shape, shape).mask(Mask::causal()), Machine::detect())?;
/// let own = Shards::new(&plan, 1)?.take(0, &x.view())?; // of 1 rank
/// let output = attend(&Alone, &plan, own.view(), own.view(), own.view())?;
/// assert_eq!(output, plan.forward(x.view(), x.view(), x.view())?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn attend<E: Element + Pod>(
    ranks: &dyn Ranks,
    plan: &Plan<'_, E>,
    q: View<'_, E>,
    k: View<'_, E>,
    v: View<'_, E>,
) -> Result<Output<E>, ContextError> {
    let shards = Shards::new(plan, ranks.count())?;
    shards.check(plan, ranks.rank(), [&q, &k, &v])?;
    let (k, v) = (shards.gather(ranks, &k)?, shards.gather(ranks, &v)?);
    let [first, second] = shards.chunks(ranks.rank());
    let [first_own, second_own] = shards.own_rows(ranks.rank());
    let output = |chunk: Range<usize>, own: Range<usize>| {
        let part = plan.part(chunk, 0..plan.problem().dims().k_len)?;
        part.forward(rows(&q, own)?.view(), k.view(), v.view())
    };
    join(&[output(first, first_own)?, output(second, second_own)?])
}

/// Copies some rows of a tensor.
fn rows<E: Element>(
    x: &View<'_, E>,
    numbers: impl Iterator<Item = usize> + Clone,
) -> Result<Tensor<E>, Error> {
    let (Shape { batch, heads, dim, .. }, len) = (x.shape(), numbers.clone().count());
    let mut data = Vec::with_capacity(batch * heads * len * dim);
    for (b, head) in (0..batch).flat_map(|b| (0..heads).map(move |head| (b, head))) {
        numbers.clone().for_each(|row| data.extend_from_slice(x.row(b, head, row)));
    }
    Tensor::new(data, Shape { batch, heads, len, dim }, Layout::Bhsd)
}

/// Entries `[batch, heads, len]`, those of some positions.
fn entries<T: Copy>(x: &[T], len: usize, range: &Range<usize>) -> Vec<T> {
    x.chunks_exact(len.max(1)).flat_map(|head| &head[range.clone()]).copied().collect()
}

/// Numbers of two chunks, `[heads, rows, ..]` each, as one: rows after rows.
fn interleaved<'c, T: Copy>(heads: usize, chunks: [&'c [T]; 2]) -> Vec<T> {
    let of_head = |head: usize, chunk: &'c [T]| {
        let each = chunk.len() / heads;
        &chunk[head * each..(head + 1) * each]
    };
    let parts: Vec<&[T]> =
        (0..heads).flat_map(|head| chunks.map(|chunk| of_head(head, chunk))).collect();
    parts.concat()
}

/// The outputs of the two chunks of a rank as one.
fn join<E: Element>(chunks: &[Output<E>; 2]) -> Result<Output<E>, ContextError> {
    let [first, second] = chunks;
    let (shape, len) = (first.out.shape(), first.out.shape().len + second.out.shape().len);
    let heads = shape.batch * shape.heads;
    let both = |of: fn(&Output<E>) -> &Option<Vec<E::Num>>| {
        Some(interleaved(heads, [of(first).as_deref()?, of(second).as_deref()?]))
    };
    let out = interleaved(heads, [first.out.data(), second.out.data()]);
    let out = Tensor::new(out, Shape { len, ..shape }, Layout::Bhsd)?;
    let mut output = Output::new(out, interleaved(heads, [&first.lse, &second.lse]));
    output.states = interleaved(heads, [&first.states, &second.states]);
    output.entropy = both(|output| &output.entropy);
    output.max_score = both(|output| &output.max_score);
    Ok(output)
}
