//! Ring attention (Liu et al. 2023): keys and values go round while they are used.

use super::{ContextError, Shards, join, rows};
use crate::ranks::Ranks;
use bytemuck::Pod;
use regard::plan::Partial;
use regard::problem::Dims;
use regard::tensor::Strides;
use regard::{Element, Output, Plan, Shape, Tensor, View};
use std::ops::Range;

/// As [`attend`](super::attend), with memory for two blocks of keys and values, not for all of them: they go from rank to rank while
/// the block that is present is computed. Blocks that no row of this rank sees are sent on, and not computed.
///
/// Blocks are merged as unnormalized sums in `f32` (`f64` for `f64`), also for `f16` and `bf16`, in the order of their coming, which is another
/// one on each rank: the same bits for a given number of ranks, and those of one process up to the rounding of these sums.
///
/// Cost: the numbers sent are those of `attend`, in `p - 1` messages that overlap with computation.
pub fn ring<E: Element + Pod>(
    ranks: &dyn Ranks,
    plan: &Plan<'_, E>,
    q: View<'_, E>,
    k: View<'_, E>,
    v: View<'_, E>,
) -> Result<Output<E>, ContextError> {
    let (rank, count) = (ranks.rank(), ranks.count());
    let shards = Shards::new(plan, count)?;
    shards.check(plan, rank, [&q, &k, &v])?;
    let [first, second] = shards.chunks(rank);
    let [first_own, second_own] = shards.own_rows(rank);
    let mut own = [
        RowChunk::new(plan, first, rows(&q, first_own)?)?,
        RowChunk::new(plan, second, rows(&q, second_own)?)?,
    ];
    // Keys, then values.
    let mut block = rows(&k, 0..shards.len(rank))?.into_data();
    block.extend_from_slice(rows(&v, 0..shards.len(rank))?.data());
    for step in 0..count {
        let source = (rank + count - step) % count;
        let mut computed = Ok(());
        let mut compute = || {
            let present = Block { plan, shards: &shards, source, data: &block };
            computed = own.iter_mut().try_for_each(|chunk| chunk.add(&present));
        };
        if step + 1 == count {
            compute();
        } else {
            let next = shards.len((source + count - 1) % count);
            let mut received = vec![E::zeroed(); block.len() / shards.len(source) * next];
            let (send, to) =
                (bytemuck::cast_slice(&block), bytemuck::cast_slice_mut(&mut received));
            ranks.shift(send, to, &mut compute)?;
            block = received;
        }
        computed?;
    }
    let [first, second] = own.map(|chunk| chunk.plan.finish(chunk.q.view(), &chunk.partial));
    join(&[first?, second?])
}

/// One of the two row chunks of this rank, and its softmax over the keys so far.
struct RowChunk<'a, E: Element> {
    /// Over all keys.
    plan: Plan<'a, E>,
    rows: Range<usize>,
    q: Tensor<E>,
    partial: Partial<E::Num>,
}

/// Keys and values of a rank.
struct Block<'b, 'a, E: Element> {
    plan: &'b Plan<'a, E>,
    shards: &'b Shards,
    source: usize,
    data: &'b [E],
}

impl<'a, E: Element> RowChunk<'a, E> {
    fn new(plan: &Plan<'a, E>, rows: Range<usize>, q: Tensor<E>) -> Result<Self, ContextError> {
        let plan = plan.part(rows.clone(), 0..plan.problem().dims().k_len)?;
        let partial = plan.partial(Vec::new())?;
        Ok(Self { plan, rows, q, partial })
    }

    /// Adds what the rows see of a block.
    fn add<'b>(&mut self, block: &Block<'b, 'a, E>) -> Result<(), ContextError> {
        let Dims { batch, heads, qk_dim, v_dim, .. } = block.plan.problem().dims();
        let len = block.shards.len(block.source);
        let (k, v) = block.data.split_at(batch * heads.kv * len * qk_dim);
        let (chunks, own) =
            (block.shards.chunks(block.source), block.shards.own_rows(block.source));
        for (keys, own) in chunks.into_iter().zip(own) {
            let part = block.plan.part(self.rows.clone(), keys)?;
            if part.work().pairs == 0 {
                continue;
            }
            // Some rows of each head, where they are.
            let of = |data: &'b [E], dim: usize| {
                let (from, len) = (&data[own.start * dim..], len * dim);
                let shape = Shape { batch, heads: heads.kv, len: own.len(), dim };
                View::strided(from, shape, Strides { batch: heads.kv * len, heads: len, len: dim })
            };
            let (k, v) = (of(k, qk_dim)?, of(v, v_dim)?);
            self.partial.merge(&part.forward_partial(self.q.view(), k, v)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use regard::{Layout, Machine, Mask, Problem};

    #[test]
    fn a_block_that_no_row_sees_is_not_computed() {
        let shape = Shape { batch: 1, heads: 1, len: 300, dim: 4 };
        let problem = Problem::<f32>::of_shapes(shape, shape, shape).mask(Mask::causal());
        let plan = Plan::new(problem, Machine::detect()).expect("a problem");
        let shards = Shards::new(&plan, 2).expect("five tiles for four chunks");
        // Rank 0 has the chunks 0 and 3, rank 1 the chunks 1 and 2.
        for (chunk, source, seen) in [(0, 0, true), (0, 1, false), (1, 0, true), (2, 1, true)] {
            let rows = shards.chunk(chunk);
            let q = Tensor::new(
                vec![1.0; rows.len() * 4],
                Shape { len: rows.len(), ..shape },
                Layout::Bhsd,
            );
            let mut own = RowChunk::new(&plan, rows, q.expect("rows")).expect("a part");
            let data = vec![1.0; 2 * shards.len(source) * 4];
            own.add(&Block { plan: &plan, shards: &shards, source, data: &data }).expect("keys");
            assert_eq!(
                !own.partial.data().is_empty(),
                seen,
                "chunk {chunk}, keys of rank {source}"
            );
        }
    }
}
