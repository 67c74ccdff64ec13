//! The chunks of linear attention: a step over up to 64 positions of one key head, as products of small matrices.
//!
//! With `v~_j = [v_j, 1]` and `u_i = [d_out_i, -d_out_i . out_i] / l_i`, where `l_i` is the sum of row `i`'s weights, all four
//! results are the same sum, over the keys that are visible to a row or the rows to which a key is visible:
//!
//! ```text
//! [l_i out_i, l_i] = sum_j (phi(q_i) . phi(k_j)) v~_j
//! d_phi(q_i)       = sum_j (u_i . v~_j) phi(k_j)
//! d_phi(k_j)       = sum_i (v~_j . u_i) phi(q_i)
//! d_v_j            = sum_i (phi(k_j) . phi(q_i)) u_i          without its last entry
//! ```
//! So a key is a pair of features and payload `(phi(k), v~)`, a row is `(phi(q), u)`. The terms of other chunks are a product
//! with the [`Sums`] of such pairs, those of the same chunk two products with a mask between them ([`Terms`]).
//!
//! Cost for `n` positions with `m` features and `d` of payload, forward: `4 n m d` flops for the sums, `2 n 64 (m + d)` for the
//! chunks, of which a quarter is skipped.

use super::grid::{CHUNK, Chunk, Part};
use super::map::{Map, Side};
use super::sums::{Sums, TARGETS, Terms};
use crate::matrix::{rows, rows_mut};
use ndarray::{Array2, ArrayView1, ArrayView2, ArrayViewMut3, Axis, Slice};
use regard::{Element, Machine, Number, View};
use std::ops::Range;

/// Rows of an output that a chunk writes: `[rows, heads, dim]`.
pub(super) type Tile<'t, E> = ArrayViewMut3<'t, E>;

/// The tensors of a call, and how it runs.
#[derive(Debug)]
pub(super) struct Call<'c, E: Element> {
    pub(super) q: View<'c, E>,
    pub(super) k: View<'c, E>,
    pub(super) v: View<'c, E>,
    pub(super) map: &'c Map<E::Num>,
    pub(super) causal: bool,
    pub(super) machine: Machine,
    pub(super) parts: Vec<Part>,
}

/// The output of a call, and the gradient of a loss by it.
#[derive(Debug)]
pub(super) struct OutputGrads<'c, E: Element> {
    pub(super) out: View<'c, E>,
    pub(super) sums: View<'c, E::Num>,
    pub(super) d_out: View<'c, E>,
}

impl<E: Element> Call<'_, E> {
    /// Query heads of a key head.
    fn group(&self) -> usize {
        self.q.shape().heads.checked_div(self.k.shape().heads).unwrap_or(0)
    }

    /// Features and payload.
    pub(super) fn size(&self) -> [usize; 2] {
        [self.map.features(), self.v.shape().dim + 1]
    }
}

/// Keys of a chunk, or its rows: those of all query heads of the key head at one position, then those at the next.
#[derive(Debug)]
struct Pairs<N> {
    /// As given.
    x: Array2<N>,
    features: Array2<N>,
    payload: Array2<N>,
}

impl<N: Number> Pairs<N> {
    /// Up to `n` pairs. Their payload is 1, which stays behind every value.
    fn new(n: usize, dim: usize, [features, payload]: [usize; 2]) -> Self {
        let ones = |width| Array2::ones([n, width]);
        Self { x: ones(dim), features: ones(features), payload: ones(payload) }
    }

    /// Features and payload of the first `n`.
    fn views(&self, n: usize) -> (ArrayView2<'_, N>, ArrayView2<'_, N>) {
        (rows(&self.features, 0..n), rows(&self.payload, 0..n))
    }

    /// Makes features of the first `n`. Exponentials are relative to the reference that `reference` makes of the smallest one
    /// that bounds them.
    fn map<E: Element<Num = N>>(
        &mut self,
        call: &Call<'_, E>,
        side: Side,
        n: usize,
        reference: impl FnOnce(N) -> N,
    ) {
        let (x, mut to) = (rows(&self.x, 0..n), rows_mut(&mut self.features, 0..n));
        let top = reference(call.map.arguments(x, side, to.view_mut()));
        call.map.finish(call.machine, x, top, to);
    }
}

/// Memory of one thread.
#[derive(Debug)]
pub(super) struct Scratch<N> {
    keys: Pairs<N>,
    rows: Pairs<N>,
    /// Results for keys or rows.
    found: Pairs<N>,
    /// Products of rows and keys.
    tile: Array2<N>,
}

impl<N: Number> Scratch<N> {
    pub(super) fn new<E: Element<Num = N>>(call: &Call<'_, E>) -> Self {
        let (most, size) = (CHUNK * call.group().max(1), call.size());
        let pairs = |n, dim| Pairs::new(n, dim, size);
        let (keys, rows) = (pairs(CHUNK, call.k.shape().dim), pairs(most, call.k.shape().dim));
        let found = pairs(most, call.v.shape().dim);
        Self { keys, rows, found, tile: Array2::zeros([TARGETS, most]) }
    }
}

/// Heads and positions of rows: all heads at one position, then at the next.
fn by_position(
    heads: &Range<usize>,
    positions: &Range<usize>,
) -> impl Iterator<Item = (usize, usize)> {
    positions.clone().flat_map(|row| heads.clone().map(move |head| (head, row)))
}

/// Writes rows into the first columns of `to`, in the order of [`by_position`]. Returns how many there are.
fn load<E: Element>(
    view: &View<'_, E>,
    item: usize,
    heads: Range<usize>,
    positions: &Range<usize>,
    to: &mut Array2<E::Num>,
) -> usize {
    let mut to = to.slice_axis_mut(Axis(1), Slice::from(..view.shape().dim));
    for ((head, row), mut to) in by_position(&heads, positions).zip(to.rows_mut()) {
        to.zip_mut_with(&ArrayView1::from(view.row(item, head, row)), |to, x| *to = x.widen());
    }
    heads.len() * positions.len()
}

/// Writes the first columns of `from`.
fn store<E: Element>(from: ArrayView2<'_, E::Num>, to: &mut Tile<'_, E>) {
    let from = from.slice_axis(Axis(1), Slice::from(..to.dim().2));
    for (from, mut to) in from.rows().into_iter().zip(to.rows_mut()) {
        to.zip_mut_with(&from, |to, x| *to = E::narrow(*x));
    }
}

/// `1 / l`, or 0 if that is no number: where so little weight is left that it is as good as none.
fn inverse_of<N: Number>(l: N) -> N {
    if l < N::min_positive_value() { N::zero() } else { N::one() / l }
}

/// A part on its way. Methods of one chunk each; keys of the chunk are pairs only if causal.
#[derive(Debug)]
pub(super) struct ChunkLoop<'t, E: Element> {
    pub(super) call: &'t Call<'t, E>,
    pub(super) part: &'t Part,
    pub(super) scratch: &'t mut Scratch<E::Num>,
}

impl<N: Number, E: Element<Num = N>> ChunkLoop<'_, E> {
    /// Features and payload of the keys, and how many there are.
    fn load_keys(&mut self, chunk: &Chunk, reference: impl FnOnce(N) -> N) -> usize {
        let (Call { k, v, .. }, &Part { item, head, .. }) = (self.call, self.part);
        let keys = &mut self.scratch.keys;
        load(v, item, head..head + 1, &chunk.keys, &mut keys.payload);
        let n = load(k, item, head..head + 1, &chunk.keys, &mut keys.x);
        keys.map(self.call, Side::Keys, n, reference);
        n
    }

    /// The same of keys that rows of the chunk see as pairs: none unless causal.
    fn load_own_keys(&mut self, chunk: &Chunk, before: &mut Sums<N>) -> usize {
        if self.call.causal { self.load_keys(chunk, |bound| before.raise(bound)) } else { 0 }
    }

    /// Query heads of the key head.
    fn heads(&self) -> Range<usize> {
        let group = self.call.group();
        self.part.head * group..(self.part.head + 1) * group
    }

    /// Features of the rows, and how many there are.
    fn load_rows(&mut self, chunk: &Chunk) -> usize {
        let (heads, rows) = (self.heads(), &mut self.scratch.rows);
        let n = load(&self.call.q, self.part.item, heads, &chunk.rows, &mut rows.x);
        rows.map(self.call, Side::Queries, n, |_| N::zero());
        n
    }

    /// `u` of the rows. Returns the reference of their sums of weights; infinity if there are no rows.
    fn load_output_grads(&mut self, grads: &OutputGrads<'_, E>, chunk: &Chunk) -> N {
        let (item, heads, mut reference) = (self.part.item, self.heads(), N::infinity());
        let Scratch { rows: Pairs { payload, .. }, found: Pairs { x: out, .. }, .. } =
            &mut *self.scratch;
        load(&grads.d_out, item, heads.clone(), &chunk.rows, payload);
        load(&grads.out, item, heads.clone(), &chunk.rows, out);
        let found = payload.rows_mut().into_iter().zip(out.rows());
        for ((head, row), (u, out)) in by_position(&heads, &chunk.rows).zip(found) {
            let l = grads.sums.row(item, head, row);
            let by = inverse_of(l[0]);
            let (mut d_out, mut delta) = u.split_at(Axis(0), out.len());
            delta.fill(-by * d_out.dot(&out));
            d_out.mapv_inplace(|d| d * by);
            reference = l[1];
        }
        reference
    }

    /// Adds the keys to the sums.
    pub(super) fn sum_keys(&mut self, chunk: &Chunk, sums: &mut Sums<N>) {
        let n = self.load_keys(chunk, |bound| sums.raise(bound));
        sums.take(self.scratch.keys.views(n), sums.reference);
    }

    /// `out_i`, and `l_i` with its reference; adds the keys to the sums if causal.
    pub(super) fn rows(
        &mut self,
        chunk: &Chunk,
        before: &mut Sums<N>,
        out: &mut Tile<'_, E>,
        sums: &mut Tile<'_, N>,
    ) {
        let (own, n) = (self.load_own_keys(chunk, before), self.load_rows(chunk));
        let (Scratch { keys, rows: Pairs { features, .. }, found, tile }, group) =
            (&mut *self.scratch, self.call.group());
        let (by, what) = keys.views(own);
        let terms = Terms { sums: before.sums.view(), by, what };
        let mut to = rows_mut(&mut found.payload, 0..n);
        terms.sum(rows(features, 0..n), |i| chunk.visible(i / group), tile, to.view_mut());
        for (mut row, mut sums) in to.rows_mut().into_iter().zip(sums.rows_mut()) {
            let l = row[row.len() - 1];
            (sums[0], sums[1]) = (l, before.reference);
            // 0 by which nothing can be divided leaves 0.
            let by = inverse_of(l);
            row.mapv_inplace(|x| x * by);
        }
        store(to.view(), out);
        before.take(keys.views(own), before.reference);
    }

    /// `d_q_i`, from `d_phi(q_i)`; adds the rows to their sums, if these are needed, and the keys to theirs if causal.
    pub(super) fn query_grads(
        &mut self,
        grads: &OutputGrads<'_, E>,
        chunk: &Chunk,
        before: &mut Sums<N>,
        after: &mut Option<Sums<N>>,
        d_q: &mut Tile<'_, E>,
    ) {
        let (own, n) = (self.load_own_keys(chunk, before), self.load_rows(chunk));
        let reference = self.load_output_grads(grads, chunk);
        let (Scratch { keys, rows, found, tile }, group) = (&mut *self.scratch, self.call.group());
        if let Some(after) = after {
            // Sums of rows are over their references, those of keys times theirs.
            after.take(rows.views(n), -reference);
        }
        let ((what, by), (phi, u)) = (keys.views(own), rows.views(n));
        let mut d_phi = rows_mut(&mut found.features, 0..n);
        let terms = Terms { sums: before.sums.t(), by, what };
        terms.sum(u, |i| chunk.visible(i / group), tile, d_phi.view_mut());
        let map = self.call.map;
        map.derivative(phi, d_phi.view_mut());
        let mut d_x = rows_mut(&mut rows.x, 0..n);
        map.back(d_phi.view(), Side::Queries, d_x.view_mut());
        store(d_x.view(), d_q);
        before.take(keys.views(own), before.reference);
    }

    /// `d_k_j`, from `d_phi(k_j)`, and `d_v_j`; adds the rows to the sums if causal.
    pub(super) fn key_grads(
        &mut self,
        grads: &OutputGrads<'_, E>,
        chunk: &Chunk,
        after: &mut Sums<N>,
        d_k: &mut Tile<'_, E>,
        d_v: &mut Tile<'_, E>,
    ) {
        let (mut own, group) = (0, self.call.group());
        if self.call.causal {
            own = self.load_rows(chunk);
            // References ascend with positions, so the rows of this chunk are relative to the result.
            after.raise(-self.load_output_grads(grads, chunk));
        }
        let n = self.load_keys(chunk, |_| -after.reference);
        let Scratch { keys, rows, found, tile } = &mut *self.scratch;
        let ((phi, v), (phi_q, u)) = (keys.views(n), rows.views(own));
        let seeing = |key| {
            let Range { start, end } = chunk.seeing(key);
            start * group..end * group
        };
        let mut d_value = rows_mut(&mut found.x, 0..n);
        let [sums, what] = [after.sums.view(), u].map(|x| x.split_at(Axis(1), d_value.ncols()).0);
        Terms { sums, by: phi_q, what }.sum(phi, seeing, tile, d_value.view_mut());
        store(d_value.view(), d_v);
        let mut d_phi = rows_mut(&mut found.features, 0..n);
        let terms = Terms { sums: after.sums.t(), by: u, what: phi_q };
        terms.sum(v, seeing, tile, d_phi.view_mut());
        self.call.map.derivative(phi, d_phi.view_mut());
        let mut d_x = rows_mut(&mut keys.x, 0..n);
        self.call.map.back(d_phi.view(), Side::Keys, d_x.view_mut());
        store(d_x.view(), d_k);
        after.take(rows.views(own), after.reference);
    }
}
