//! A call of linear attention: its passes, their tasks, and the tensors that these write.
//!
//! A task computes a part. Where a head has several, their own sums are found first, and each part starts from the sums of
//! those before it.

use super::chunk::{Call, ChunkLoop, OutputGrads, Scratch, Tile};
use super::grid::Part;
use super::map::Side;
use super::sums::Sums;
use super::{LinearGrads, LinearOutput};
use crate::tasks::run_each;
use ndarray::{ArrayViewMut3, Axis};
use regard::{Element, Error, Layout, Number, Shape, Tensor};

impl<N: Number, E: Element<Num = N>> Call<'_, E> {
    /// Computes rows. `state`, if there is one, holds the sums that each head starts from, and gets those that it ends with.
    pub(super) fn forward(&self, state: Option<&mut [Sums<N>]>) -> Result<LinearOutput<E>, Error> {
        let mut out = Tensor::zeros(&self.q, self.v.shape().dim)?;
        let mut sums = Tensor::zeros(&self.q, 2)?;
        let tiles = self.tiles(&mut out, Side::Queries)?;
        let tiles = tiles.into_iter().zip(self.tiles(&mut sums, Side::Queries)?);
        let own = self.sums_before(state.as_deref()).into_iter().zip(tiles).collect();
        let own = self.run(own, |mut chunks, (before, (out, sums))| {
            for (chunk, (out, sums)) in chunks.part.chunks().zip(out.iter_mut().zip(sums)) {
                chunks.rows(&chunk, before, out, sums);
            }
        });
        let ends = self.parts.iter().zip(own).filter(|(part, _)| part.is_last());
        for (state, (_, (end, _))) in state.into_iter().flatten().zip(ends) {
            *state = end;
        }
        Ok(LinearOutput { out, sums })
    }

    pub(super) fn backward(&self, grads: &OutputGrads<'_, E>) -> Result<LinearGrads<E>, Error> {
        let mut q = Tensor::zeros(&self.q, self.q.shape().dim)?;
        let mut k = Tensor::zeros(&self.k, self.k.shape().dim)?;
        let mut v = Tensor::zeros(&self.v, self.v.shape().dim)?;
        let starts = self.sums_before(None).into_iter().zip(self.tiles(&mut q, Side::Queries)?);
        // No keys stand before a causal head's first part, so nobody needs the sum of its rows.
        let own = self.sums_where(|part| !self.causal || !part.is_first());
        let own = self.run(starts.zip(own).collect(), |mut chunks, ((before, d_q), after)| {
            for (chunk, d_q) in chunks.part.chunks().zip(d_q) {
                chunks.query_grads(grads, &chunk, before, after, d_q);
            }
        });
        let own: Vec<_> = own.into_iter().map(|(_, after)| after).collect();
        let tiles =
            self.tiles(&mut k, Side::Keys)?.into_iter().zip(self.tiles(&mut v, Side::Keys)?);
        let starts = self.starts(&own, None, true).into_iter();
        self.run(starts.zip(tiles).collect(), |mut chunks, (after, (d_k, d_v))| {
            for (chunk, (d_k, d_v)) in chunks.part.chunks().zip(d_k.iter_mut().zip(d_v)).rev() {
                chunks.key_grads(grads, &chunk, after, d_k, d_v);
            }
        });
        Ok(LinearGrads { q, k, v })
    }

    /// Empty sums for the parts that need some.
    fn sums_where(&self, needed: impl Fn(&Part) -> bool) -> Vec<Option<Sums<N>>> {
        self.parts.iter().map(|part| needed(part).then(|| Sums::new(self.size()))).collect()
    }

    /// The sums of keys that each part starts from.
    fn sums_before(&self, state: Option<&[Sums<N>]>) -> Vec<Sums<N>> {
        // No rows stand after a causal head's last part, so nobody needs the sum of its keys.
        let mut own = self.sums_where(|part| !self.causal || !part.is_last());
        if own.iter().any(Option::is_some) {
            own = self.run(own, |mut chunks, own| {
                let Some(sums) = own else { return };
                chunks.part.chunks().for_each(|chunk| chunks.sum_keys(&chunk, sums));
            });
        }
        self.starts(&own, state, false)
    }

    /// What each part starts from: the sums of the parts of its head before it (`back`: after it), added in order; of all of
    /// them if not causal.
    fn starts(
        &self,
        own: &[Option<Sums<N>>],
        state: Option<&[Sums<N>]>,
        back: bool,
    ) -> Vec<Sums<N>> {
        let empty = || Sums::new(self.size());
        let mut starts: Vec<_> = own.iter().map(|_| empty()).collect();
        let mut first = 0;
        for (head, parts) in self.parts.chunk_by(Part::is_beside).enumerate() {
            let mut order: Vec<usize> = (first..first + parts.len()).collect();
            first += parts.len();
            if back {
                order.reverse();
            }
            let mut sums = state.map_or_else(empty, |state| state[head].clone());
            for i in &order {
                if self.causal {
                    starts[*i].add(&sums);
                }
                own[*i].iter().for_each(|own| sums.add(own));
            }
            if !self.causal {
                order.into_iter().for_each(|i| starts[i].add(&sums));
            }
        }
        starts
    }

    /// Runs a task for each part, with what is its own, which is returned.
    fn run<T: Send>(&self, own: Vec<T>, task: impl Fn(ChunkLoop<'_, E>, &mut T) + Sync) -> Vec<T> {
        let scratch = || Scratch::new(self);
        run_each(self.machine, own, scratch, |scratch, i, own| {
            task(ChunkLoop { call: self, part: &self.parts[i], scratch }, own);
        })
    }

    /// The tiles of each part's chunks.
    fn tiles<'d, T>(
        &self,
        tensor: &'d mut Tensor<T>,
        side: Side,
    ) -> Result<Vec<Vec<Tile<'d, T>>>, Error> {
        let (shape, layout) = (tensor.shape(), tensor.layout());
        let (Shape { heads, dim, .. }, mut data) = (shape, tensor.data_mut());
        let mut tiles = Vec::new();
        for parts in self.parts.chunk_by(|a, b| a.item == b.item) {
            let len = parts[0].len(side);
            let (item, others) = data.split_at_mut(heads * len * dim);
            data = others;
            let item = match layout {
                Layout::Bshd => ArrayViewMut3::from_shape([len, heads, dim], item),
                Layout::Bhsd => ArrayViewMut3::from_shape([heads, len, dim], item)
                    .map(|item| item.permuted_axes([1, 0, 2])),
            };
            let mut item = item.map_err(|_| Error::ShapeOverflow { shape: shape.to_array() })?;
            for parts in parts.chunk_by(Part::is_beside) {
                let (mut head, others) = item.split_at(Axis(1), heads / self.k.shape().heads);
                item = others;
                let mut end = 0;
                for part in parts {
                    let mut of_part = Vec::new();
                    for range in part.chunks().map(|chunk| chunk.range(side)) {
                        // Rows before those of the first chunk are fully masked.
                        let (_, after) = head.split_at(Axis(0), range.start - end);
                        let (tile, after) = after.split_at(Axis(0), range.len());
                        (head, end) = (after, range.end);
                        of_part.push(tile);
                    }
                    tiles.push(of_part);
                }
            }
        }
        Ok(tiles)
    }
}
