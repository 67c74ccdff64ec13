//! Which rows of a sequence a rank has.

use super::{ContextError, rows};
use crate::ranks::{Ranks, gather};
use bytemuck::Pod;
use regard::problem::Dims;
use regard::{Element, Error, Layout, Plan, Shape, Tensor, View};
use std::ops::Range;

/// Rows dealt zigzag: of `2 p` chunks, rank `r` has the chunks `r` and `2 p - 1 - r`. Under a causal mask a chunk costs the more the later
/// it is, and an early and a late one together cost the same on every rank.
///
/// Chunks are cut between tiles of rows ([`Plan::row_step`]), so that every tile is computed as in one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shards {
    /// Where each chunk begins, and the end.
    borders: Vec<usize>,
}

impl Shards {
    /// Deals the rows of a sequence to `ranks` ranks. Refuses more ranks than there are tiles for, and a plan whose queries
    /// and keys are not those of one sequence.
    pub fn new<E: Element>(plan: &Plan<'_, E>, ranks: usize) -> Result<Self, ContextError> {
        let Dims { q_len, k_len, .. } = plan.problem().dims();
        Error::unless_same("length", ("q", q_len), ("k", k_len))?;
        let tile = plan.row_step();
        let (tiles, chunks) = (q_len.div_ceil(tile), 2 * ranks);
        if ranks > 1 && tiles < chunks {
            return Err(ContextError::TooManyRanks { rows: q_len, tile, ranks });
        }
        let border = |chunk: usize| (chunk * tiles / chunks * tile).min(q_len);
        Ok(Self { borders: (0..=chunks).map(border).collect() })
    }

    /// How many ranks there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.borders.len() / 2
    }

    /// The rows of a rank, which are one after the other in its tensors.
    #[must_use]
    pub fn chunks(&self, rank: usize) -> [Range<usize>; 2] {
        [rank, 2 * self.count() - 1 - rank].map(|chunk| self.chunk(chunk))
    }

    /// The rows of a chunk.
    pub(super) fn chunk(&self, chunk: usize) -> Range<usize> {
        self.borders[chunk]..self.borders[chunk + 1]
    }

    /// The same as they are numbered in its tensors.
    pub(super) fn own_rows(&self, rank: usize) -> [Range<usize>; 2] {
        let [first, second] = self.chunks(rank).map(|chunk| chunk.len());
        [0..first, first..first + second]
    }

    /// How many rows a rank has.
    #[must_use]
    pub fn len(&self, rank: usize) -> usize {
        self.chunks(rank).iter().map(Range::len).sum()
    }

    /// Whether there are no rows at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.borders.last() == Some(&0)
    }

    /// Copies the rows of a rank out of a whole tensor.
    pub fn take<E: Element>(
        &self,
        rank: usize,
        whole: &View<'_, E>,
    ) -> Result<Tensor<E>, ContextError> {
        let len = self.borders.last().copied().unwrap_or(0);
        Error::unless_same("rows", ("the sequence", len), ("the tensor", whole.shape().len))?;
        Ok(rows(whole, self.chunks(rank).into_iter().flatten())?)
    }

    /// The inverse: a whole tensor from the numbers of all ranks, one after another, each `[batch, heads, rows, dim]`.
    pub fn join<T: Copy>(
        &self,
        all: &[T],
        [batch, heads, dim]: [usize; 3],
    ) -> Result<Tensor<T>, ContextError> {
        let len = self.borders.last().copied().unwrap_or(0);
        let needed = batch * heads * len * dim;
        if all.len() != needed {
            return Err(Error::DataLength { needed, found: all.len() }.into());
        }
        // Every number is written below; there is no other one to begin with.
        let mut data = all.to_vec();
        let mut rest = all;
        for rank in 0..self.count() {
            for head in 0..batch * heads {
                for chunk in self.chunks(rank) {
                    let from;
                    (from, rest) = rest.split_at(chunk.len() * dim);
                    data[(head * len + chunk.start) * dim..][..from.len()].copy_from_slice(from);
                }
            }
        }
        Ok(Tensor::new(data, Shape { batch, heads, len, dim }, Layout::Bhsd)?)
    }

    /// The whole tensor, from the rows of all ranks.
    pub fn gather<E: Element + Pod>(
        &self,
        ranks: &dyn Ranks,
        own: &View<'_, E>,
    ) -> Result<Tensor<E>, ContextError> {
        let Shape { batch, heads, len, dim } = own.shape();
        let counts = (0..self.count()).map(|rank| batch * heads * self.len(rank) * dim);
        let all = gather(ranks, rows(own, 0..len)?.data(), &counts.collect::<Vec<_>>())?;
        self.join(&all, [batch, heads, dim])
    }

    /// Refuses tensors that are not the shares of a rank.
    pub(super) fn check<E: Element>(
        &self,
        plan: &Plan<'_, E>,
        rank: usize,
        [q, k, v]: [&View<'_, E>; 3],
    ) -> Result<(), ContextError> {
        let (Dims { batch, heads, q_dim, qk_dim, v_dim, .. }, len) =
            (plan.problem().dims(), self.len(rank));
        let shares = [
            ("q", [batch, heads.q, len, q_dim], q),
            ("k", [batch, heads.kv, len, qk_dim], k),
            ("v", [batch, heads.kv, len, v_dim], v),
        ];
        shares.into_iter().try_for_each(|(tensor, expected, view)| share(tensor, expected, view))
    }
}

/// Refuses a tensor that is not the share of a rank.
pub(super) fn share<E: Element>(
    tensor: &'static str,
    expected: [usize; 4],
    view: &View<'_, E>,
) -> Result<(), ContextError> {
    let found = view.shape().to_array();
    if expected == found { Ok(()) } else { Err(ContextError::Share { tensor, expected, found }) }
}
