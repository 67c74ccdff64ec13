//! Rows multiplied by a matrix before attention meets them, and the backward pass: what a similarity does to its keys.
//!
//! `y = W^T x` for `x [batch, heads, len, from]` and `W [1, heads or 1, from, to]`. Cost: `2 from to` flops a row, each way.

use crate::error::Error;
use crate::kernel::key_blocks::KeyBlock;
use crate::kernel::lanes::{fetch, load_features, load_head, pack_head, store_output};
use crate::kernel::micro::{RowBuffer, RowSums, Values, dot_tile};
use crate::machine::Machine;
use crate::machine::run::run;
use crate::machine::simd::{GROUP, Isa, Lanes, Number};
use crate::tensor::index::{BLOCK_KEYS, RowTile, Span};
use crate::tensor::source::{AnyHead, KvHead, rows};
use crate::tensor::view::{
    Layout, OutTile, OutView, Shape, Tensor, TileHeads, TileMut, Unwritten, View, ViewMut,
};
use std::ops::Range;

/// `W^T x` of every row, in the layout of x.
pub(crate) fn project<N: Number>(
    machine: Machine,
    x: &View<'_, N>,
    w: View<'_, N>,
) -> Result<Tensor<N>, Error> {
    let mut out = Unwritten::like(x, w.shape().dim)?;
    by_rows(machine, x, w, Transpose::Yes, N::erase(&out.view()?).into());
    // SAFETY: `by_rows` writes every row.
    Ok(unsafe { out.written() })
}

/// From the gradient by `W^T x` to that by x, which is written to `d_x`, and, `[1, heads or 1, from, to]`, to that by W.
pub(crate) fn project_backward<N: Number>(
    machine: Machine,
    x: &View<'_, N>,
    w: View<'_, N>,
    d_y: &View<'_, N>,
    d_x: OutView<'_, N>,
) -> Result<Tensor<N>, Error> {
    by_rows(machine, d_y, w, Transpose::No, d_x);
    let Shape { heads, len, dim, .. } = w.shape();
    let mut d_w = vec![N::zero(); heads * len * dim];
    // A batch of nothing may be as long as it likes.
    let blocks = if x.shape().len == 0 { 0 } else { len.div_ceil(BLOCK_KEYS) };
    let to = ViewMut::bhsd(&mut d_w, [1, heads, len, dim])?;
    run(machine.threads, heads * blocks, Scratch::new, |scratch, i| {
        let (head, first) = (i / blocks, i % blocks * BLOCK_KEYS);
        let rows = RowTile { first, step: 1, count: (len - first).min(BLOCK_KEYS) };
        let all = if heads == 1 { 0..x.shape().heads } else { head..head + 1 };
        // SAFETY: `i / blocks` and `i % blocks` give each block of each head to one task, so nobody else holds these rows;
        // `d_w` was made of zeros.
        let to = unsafe { to.tile(0, TileHeads::one(head), rows) };
        ByWeights { x: *x, d_y: *d_y, heads: all, to, scratch }.run(machine.isa);
    });
    Tensor::new(d_w, w.shape(), Layout::Bhsd)
}

/// Which way rows go.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Transpose {
    /// `W^T x`
    Yes,
    /// `W x`
    No,
}

/// Writes every row of `to`.
fn by_rows<N: Number>(
    machine: Machine,
    x: &View<'_, N>,
    w: View<'_, N>,
    direction: Transpose,
    to: OutView<'_, N>,
) {
    let Shape { batch, heads, len, .. } = x.shape();
    let groups = len.div_ceil(GROUP);
    let tasks = if groups == 0 { 0 } else { batch * heads * groups };
    run(machine.threads, tasks, Scratch::new, |scratch, i| {
        let (item, first) = (i / groups, i % groups * GROUP);
        let (b, head) = (item / heads, item % heads);
        let count = x.len(b).saturating_sub(first).min(GROUP);
        let group = RowTile { first, step: 1, count };
        let x = rows(x.any_head(b, head));
        let projection = Projection { w: rows(w.serving_head(0, head)), direction };
        // SAFETY: `i / groups` and `i % groups` give each group of each head to one task, so nobody else holds these rows.
        let to = unsafe { to.tile(b, TileHeads::one(head), group) };
        ByRows { x, projection, rows: group, to, scratch }.run(machine.isa);
    });
}

/// Memory of one thread, reused from task to task.
#[derive(Debug)]
pub(crate) struct Scratch<N> {
    from: Vec<Lanes<N>>,
    to: Vec<Lanes<N>>,
    packed: Vec<N>,
}

impl<N> Scratch<N> {
    fn new() -> Self {
        Self { from: Vec::new(), to: Vec::new(), packed: Vec::new() }
    }
}

/// A group of rows of one head.
#[derive(Debug)]
struct ByRows<'t, 'x, 'w, 'o, N: Number> {
    x: AnyHead<'x, N>,
    projection: Projection<'w, N>,
    rows: RowTile,
    to: OutTile<'o, N>,
    scratch: &'t mut Scratch<N>,
}

impl<N: Number> ByRows<'_, '_, '_, '_, N> {
    fn run(self, isa: Isa) {
        let Self { x, projection, rows, mut to, scratch: Scratch { from, to: lanes, packed } } =
            self;
        let zero = Lanes([N::zero(); GROUP]);
        from.resize(x.dim(), zero);
        lanes.resize(projection.features(), zero);
        load_head(isa, x, rows, N::one(), from);
        projection.multiply(isa, (from, rows.count), packed, lanes);
        store_output(isa, lanes, rows.count, 0, (&mut to, 0));
    }
}

/// Some rows of the gradient by W, from all rows of some heads.
#[derive(Debug)]
struct ByWeights<'t, N: Number> {
    x: View<'t, N>,
    d_y: View<'t, N>,
    heads: Range<usize>,
    to: TileMut<'t, N>,
    scratch: &'t mut Scratch<N>,
}

impl<N: Number> ByWeights<'_, N> {
    /// y = W^T x: d_w = sum over rows of x d_y^T
    fn run(self, isa: Isa) {
        let Self { x, d_y, heads, mut to, scratch: Scratch { from: lanes, .. } } = self;
        let RowTile { first, count: features, .. } = to.rows();
        let dim = d_y.shape().dim;
        lanes.resize(features, Lanes([N::zero(); GROUP]));
        let (mut rows, mut sums) = (RowBuffer::new(GROUP, dim), RowBuffer::new(features, dim));
        for (b, head) in (0..x.shape().batch).flat_map(|b| heads.clone().map(move |h| (b, h))) {
            let (x, d_y) = (self::rows(x.any_head(b, head)), self::rows(d_y.any_head(b, head)));
            for start in (0..x.len()).step_by(GROUP) {
                let count = (x.len() - start).min(GROUP);
                let own = RowTile { first: start, step: 1, count };
                load_features(isa, x, own, first..first + features, N::one(), lanes);
                pack_head(isa, d_y, own, &mut rows);
                add_outer(isa, lanes, (&rows, count), &mut sums);
            }
        }
        for i in 0..features {
            to.update(0, i).copy_from_slice(&sums.row(i)[..dim]);
        }
    }
}

/// `sums[i] += sum over rows of lanes[i][row] * rows[row]`, for up to [`BLOCK_KEYS`] lines of lanes. A row that is all 0 has no gradient:
/// nobody saw it, and what stands in its lanes, which may be anything, becomes 0.
pub(crate) fn add_outer<N: Number>(
    isa: Isa,
    lanes: &mut [Lanes<N>],
    (rows, count): (&RowBuffer<N>, usize),
    sums: &mut RowBuffer<N>,
) {
    let unseen = |i: &usize| rows.row(*i).iter().all(|d| *d == N::zero());
    for i in (0..count).filter(unseen) {
        lanes.iter_mut().for_each(|x| x.0[i] = N::zero());
    }
    let places: [usize; BLOCK_KEYS] = std::array::from_fn(|i| i);
    let (span, at) = (Span::first(count), &places[..lanes.len()]);
    RowSums { tile: lanes, visible: &[], rows, span, keys: None, at, sums }.add(isa);
}

/// One head of W, and which way rows go through it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Projection<'w, N: Number> {
    pub(crate) w: AnyHead<'w, N>,
    pub(crate) direction: Transpose,
}

impl<N: Number> Projection<'_, N> {
    /// Features of a row of the result.
    fn features(self) -> usize {
        match self.direction {
            Transpose::Yes => self.w.dim(),
            Transpose::No => self.w.len(),
        }
    }

    /// `W^T x` or `W x` of `count` rows, which stand in the lanes of both sides. `packed` is memory for rows of W that must be widened.
    pub(crate) fn multiply(
        self,
        isa: Isa,
        (x, count): (&[Lanes<N>], usize),
        packed: &mut Vec<N>,
        to: &mut [Lanes<N>],
    ) {
        let Self { w, direction } = self;
        let one = Lanes([N::one(); GROUP]);
        if matches!(direction, Transpose::Yes) {
            to.fill(Lanes([N::zero(); GROUP])); // sums over the blocks of W
        }
        let span = Span::first(count);
        let mut block = KeyBlock::new();
        for first in (0..w.len()).step_by(BLOCK_KEYS) {
            let n = (w.len() - first).min(BLOCK_KEYS);
            block.set(first, n);
            let w = fetch(isa, KvHead::Elements(w), &block, packed);
            match direction {
                Transpose::Yes => {
                    let p = &x[first..first + n];
                    Values { v: w, q: &[], p, visible: &[], span, rescale: &one, out: to }.add(isa);
                }
                Transpose::No => dot_tile(isa, (w, x), span, &mut to[first..first + n]),
            }
        }
    }
}
