//! The second stage: parts of `d_q` become one, and say what W learns.

use super::{QueryGrads, Scratch};
use crate::kernel::block_loop::{Call, Tiling};
use crate::kernel::lanes::load_features;
use crate::kernel::project::add_outer;
use crate::machine::simd::{Isa, Number};
use crate::tensor::index::{HeadRows, RowTile, Scope};
use crate::tensor::view::{self, TileMut, View};
use std::ops::Range;

/// What the tasks of different keys have left of the gradients of queries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts<'t, N: Number> {
    /// `[items, heads.q x parts, q_len, qk_dim + OPTIONS]`
    pub(crate) view: View<'t, N>,
    /// Of each head.
    pub(crate) count: usize,
    /// The item of the batch that is the first here.
    pub(crate) first: usize,
}

impl<'t, N: Number> Parts<'t, N> {
    fn of(self, batch: usize, head: usize) -> impl Iterator<Item = view::Rows<'t, N>> {
        let heads = head * self.count..(head + 1) * self.count;
        heads.map(move |head| self.view.head(batch - self.first, head))
    }
}

/// Adds the parts of some rows of one head, and finishes them.
#[derive(Debug)]
pub(crate) struct Join<'t, 'c, N: Number> {
    pub(crate) call: Call<'c, N>,
    pub(crate) scope: Scope,
    pub(crate) rows: RowTile,
    pub(crate) parts: Parts<'t, N>,
    pub(crate) target: QueryGrads<'t, N>,
    pub(crate) scratch: &'t mut Scratch<N>,
}

impl<N: Number> Join<'_, '_, N> {
    pub(crate) fn run(mut self, isa: Isa) {
        let Scratch { groups, other, .. } = &mut *self.scratch;
        for (g, group) in groups[..self.rows.groups()].iter_mut().enumerate() {
            let rows = self.rows.group(g);
            group.take_queries(isa, &self.call, HeadRows { scope: self.scope, rows });
            for part in self.parts.of(self.scope.batch, self.scope.head) {
                group.add(isa, part, other);
            }
            group.finish(isa, &self.call, self.scope, other, &mut self.target.part(0, rows));
        }
    }
}

/// Some rows of the gradient of one head's W (of all heads', if they share it), from some items.
#[derive(Debug)]
pub(crate) struct ByProjection<'t, 'c, N: Number> {
    pub(crate) call: Call<'c, N>,
    pub(crate) items: Range<usize>,
    pub(crate) heads: Range<usize>,
    pub(crate) tiling: Tiling,
    pub(crate) parts: Parts<'t, N>,
    /// Features of the queries, at most `BLOCK_KEYS`.
    pub(crate) features: Range<usize>,
    /// Those rows of `[1, heads.q or 1, q_dim, qk_dim]`; what they hold is added to.
    pub(crate) target: TileMut<'t, N>,
    pub(crate) scratch: &'t mut Scratch<N>,
}

impl<N: Number> ByProjection<'_, '_, N> {
    /// projected = W^T q: d_w = sum over rows of q d_projected^T
    pub(crate) fn run(mut self, isa: Isa) {
        let Scratch { groups, weights, d_k, .. } = &mut *self.scratch;
        let (q_lanes, packed) = (&mut weights[..self.features.len()], &mut groups[0].q_rows);
        let dim = self.call.problem.dims().qk_dim;
        for i in 0..self.features.len() {
            d_k.row_mut(i)[..dim].copy_from_slice(self.target.update(0, i));
        }
        let factor = N::from_f64(self.call.problem.scale());
        for (b, head) in self.items.flat_map(|b| self.heads.clone().map(move |h| (b, h))) {
            let q = self.call.queries(b, head);
            for rows in self.tiling.tiles().flat_map(|t| (0..t.groups()).map(move |g| t.group(g))) {
                load_features(isa, q, rows, self.features.clone(), factor, q_lanes);
                for i in 0..rows.count {
                    packed.row_mut(i).fill(N::default());
                    for part in self.parts.of(b, head) {
                        let part = &part.row(rows.row(i))[..dim];
                        packed
                            .row_mut(i)
                            .iter_mut()
                            .zip(part)
                            .for_each(|(sum, x)| *sum = *sum + *x);
                    }
                }
                add_outer(isa, q_lanes, (packed, rows.count), d_k);
            }
        }
        for i in 0..self.features.len() {
            self.target.update(0, i).copy_from_slice(&d_k.row(i)[..dim]);
        }
    }
}
