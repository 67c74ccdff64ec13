//! The tasks of linear attention: a part of the positions of one key head, chunk by chunk.
//!
//! With `v~_j = [v_j, 1]` and `u_i = [d_out_i, -d_out_i . out_i] / l_i`, where `l_i` is the sum of row `i`'s weights, all four
//! results are the same sum, over the keys that a row sees or the rows that see a key:
//!
//! ```text
//! [l_i out_i, l_i] = sum_j (phi(q_i) . phi(k_j)) v~_j
//! d_phi(q_i)       = sum_j (u_i . v~_j) phi(k_j)
//! d_phi(k_j)       = sum_i (v~_j . u_i) phi(q_i)
//! d_v_j            = sum_i (phi(k_j) . phi(q_i)) u_i          without its last entry
//! ```
//! So a key is a pair of features and payload `(phi(k), v~)`, a row is `(phi(q), u)`, and [`Sums`] of such pairs answer for all of
//! them but those of the own chunk, which are intra_chunk pair by pair.
//!
//! Cost for `n` positions with `m` features and `d` of payload, forward: `4 n m d` flops for the sums, `2 n 64 (m + d)` for the
//! chunks, of which a quarter is skipped.

use super::grid::{Chunk, Grid};
use super::map::{Map, Side};
use super::sums::{IntraChunk, Pairs, Sums};
use crate::kernel::lanes::{load_transposed, pack_rows, scale_lanes, store_rows, store_transposed};
use crate::machine::simd::{Element, GROUP, Isa, Lanes, Number, leaf};
use crate::tensor::index::{RowMask, RowTile, Span};
use crate::tensor::view::{TileMut, View};
use num_traits::{One, Zero};
use std::ops::Range;

/// What the tasks of a call share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call<'c, E: Element> {
    pub(crate) q: View<'c, E>,
    pub(crate) k: View<'c, E>,
    pub(crate) v: View<'c, E>,
    pub(crate) map: &'c Map<E::Num>,
    /// On the backward pass.
    pub(crate) backward: Option<BackwardInputs<'c, E>>,
}

/// What came out, and the gradient of a loss by it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackwardInputs<'c, E: Element> {
    pub(crate) out: View<'c, E>,
    pub(crate) sums: View<'c, E::Num>,
    pub(crate) d_out: View<'c, E>,
}

impl<E: Element> Call<'_, E> {
    /// Query heads of a key head.
    pub(crate) fn group(&self) -> usize {
        self.q.shape().heads.checked_div(self.k.shape().heads).unwrap_or(0)
    }

    /// Features and payload.
    pub(crate) fn size(&self) -> [usize; 2] {
        [self.map.features(), self.v.shape().dim + 1]
    }
}

/// Some chunks of one key head of an item.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) item: usize,
    pub(crate) head: usize,
    pub(crate) grid: Grid,
    pub(crate) chunks: Range<usize>,
}

impl Part {
    /// Whether both are of the same head.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        (self.item, self.head) == (other.item, other.head)
    }
}

/// What a task does.
#[derive(Debug)]
pub(crate) enum Work<'t, E: Element> {
    /// Sums its keys.
    Sum,
    /// Computes its rows, from the sums of the keys before them; or of all keys.
    Rows { before: Sums<E::Num>, out: TileMut<'t, E>, sums: TileMut<'t, E::Num> },
    /// Computes the gradients of its queries, from the same, and sums its rows.
    Queries { before: Sums<E::Num>, d_q: TileMut<'t, E> },
    /// Computes the gradients of its keys and values, from the sums of the rows behind them; or of all rows.
    Keys { behind: Sums<E::Num>, d_k: TileMut<'t, E>, d_v: TileMut<'t, E> },
}

/// Memory of one thread.
#[derive(Debug)]
pub(crate) struct LinearScratch<N> {
    keys: Pairs<N>,
    rows: Pairs<N>,
    /// Keys and queries as given, `[dim][lanes]`, where a map needs them.
    key_inputs: Vec<Lanes<N>>,
    query_inputs: Vec<Lanes<N>>,
    /// What was fetched, `[features][lanes]` and `[payload][lanes]`.
    features: Vec<Lanes<N>>,
    payload: Vec<Lanes<N>>,
    /// `[payload][lanes]`
    spare: Vec<Lanes<N>>,
    tile: Vec<Lanes<N>>,
    visible: Vec<RowMask>,
    /// The features, counted.
    all: Vec<usize>,
}

impl<N: Number> LinearScratch<N> {
    pub(crate) fn new<E: Element<Num = N>>(call: &Call<'_, E>) -> Self {
        let size @ [features, payload] = call.size();
        let zeros = |n| vec![Lanes([N::zero(); GROUP]); n];
        let mut keys = Pairs::new(size);
        // The 1 behind every value.
        keys.payload[payload - 1].0.fill(N::one());
        (0..GROUP).for_each(|i| keys.payload_rows.row_mut(i)[payload - 1] = N::one());
        Self {
            keys,
            rows: Pairs::new(size),
            key_inputs: zeros(call.map.inputs()),
            query_inputs: zeros(call.map.inputs()),
            features: zeros(features),
            payload: zeros(payload),
            spare: zeros(payload),
            tile: zeros(GROUP),
            visible: vec![0; GROUP],
            all: (0..features).collect(),
        }
    }
}

/// One part.
#[derive(Debug)]
pub(crate) struct Linear<'t, E: Element> {
    pub(crate) call: &'t Call<'t, E>,
    pub(crate) part: &'t Part,
    pub(crate) work: Work<'t, E>,
    pub(crate) scratch: &'t mut LinearScratch<E::Num>,
}

/// Returns the sums of its keys with those before; of its rows, where it makes the gradients of queries.
impl<E: Element> Linear<'_, E> {
    pub(crate) fn run(self, isa: Isa) -> Sums<E::Num> {
        let Self { call, part, work, scratch } = self;
        let mut chunk_loop = ChunkLoop { call, part, scratch };
        let Part { grid, ref chunks, .. } = *part;
        let chunks = chunks.clone().map(|i| grid.chunk(i));
        match work {
            Work::Sum => {
                let mut sums = Sums::new(call.size());
                for chunk in chunks {
                    chunk_loop.load_keys(isa, &chunk, &mut sums);
                    chunk_loop.add_keys(isa, &chunk, &mut sums);
                }
                sums
            }
            Work::Rows { mut before, mut out, mut sums } => {
                for chunk in chunks {
                    chunk_loop.rows(isa, &chunk, &mut before, (&mut out, &mut sums));
                }
                before
            }
            Work::Queries { mut before, mut d_q } => {
                let mut rows = Sums::new(call.size());
                for chunk in chunks {
                    chunk_loop.query_grads(isa, &chunk, (&mut before, &mut rows), &mut d_q);
                }
                rows
            }
            Work::Keys { mut behind, mut d_k, mut d_v } => {
                for chunk in chunks.rev().filter(|chunk| !chunk.keys.is_empty()) {
                    chunk_loop.key_grads(isa, &chunk, &mut behind, (&mut d_k, &mut d_v));
                }
                behind
            }
        }
    }
}

fn span(rows: &Range<usize>) -> Span {
    Span::first(rows.len())
}

/// A part on its way.
struct ChunkLoop<'t, E: Element> {
    call: &'t Call<'t, E>,
    part: &'t Part,
    scratch: &'t mut LinearScratch<E::Num>,
}

impl<E: Element> ChunkLoop<'_, E> {
    /// Features and values of a chunk's keys; the reference of the sums is raised to theirs.
    fn load_keys(&mut self, isa: Isa, chunk: &Chunk, sums: &mut Sums<E::Num>) {
        let (&Part { item, head, .. }, map, keys) = (self.part, self.call.map, &chunk.keys);
        let (k, v) = (self.call.k.head(item, head), self.call.v.head(item, head));
        let LinearScratch { keys: to, key_inputs, .. } = &mut *self.scratch;
        let row = |i: usize| k.row(keys.start + i);
        map.arguments(isa, (row, keys.len()), Side::Keys, key_inputs, &mut to.features);
        sums.raise(map.reference(&to.features, keys.len()));
        map.map(isa, span(keys), &Lanes([sums.reference; GROUP]), &mut to.features);
        let rows = RowTile { first: keys.start, step: 1, count: keys.len() };
        pack_rows(isa, v, rows, &mut to.payload_rows);
    }

    fn add_keys(&mut self, isa: Isa, chunk: &Chunk, sums: &mut Sums<E::Num>) {
        sums.take(isa, &self.scratch.keys, span(&chunk.keys), &self.scratch.all);
    }

    /// The same as rows, to be intra_chunk, and who sees them.
    fn store_key_rows(&mut self, isa: Isa, chunk: &Chunk) {
        let LinearScratch { keys: Pairs { features, feature_rows, .. }, visible, .. } =
            &mut *self.scratch;
        store_rows(isa, features, chunk.keys.len(), E::Num::one(), feature_rows);
        visible.iter_mut().enumerate().for_each(|(key, visible)| *visible = chunk.seeing(key));
    }

    /// Features of a chunk's queries.
    fn load_queries(&mut self, isa: Isa, head: usize, rows: &Range<usize>) {
        let (map, q) = (self.call.map, self.call.q.head(self.part.item, head));
        let LinearScratch { rows: to, query_inputs, .. } = &mut *self.scratch;
        let row = |i: usize| q.row(rows.start + i);
        map.arguments(isa, (row, rows.len()), Side::Queries, query_inputs, &mut to.features);
        let top = map.largest(&to.features, rows.len());
        map.map(isa, span(rows), &top, &mut to.features);
    }

    /// `u` of a chunk's rows, and the reference of their sums.
    fn load_output_grads(
        &mut self,
        isa: Isa,
        back: &BackwardInputs<'_, E>,
        head: usize,
        rows: &Range<usize>,
    ) -> E::Num {
        let LinearScratch { rows: to, spare, .. } = &mut *self.scratch;
        let (one, zero) = (E::Num::one(), E::Num::zero());
        let [out, d_out] = [back.out, back.d_out].map(|view| view.head(self.part.item, head));
        let dim = out.dim;
        load_transposed(isa, |i| out.row(rows.start + i), rows.len(), one, &mut spare[..dim]);
        load_transposed(
            isa,
            |i| d_out.row(rows.start + i),
            rows.len(),
            one,
            &mut to.payload[..dim],
        );
        let sums = back.sums.head(self.part.item, head);
        let mut inverse = Lanes([zero; GROUP]);
        for (i, inverse) in inverse.0[..rows.len()].iter_mut().enumerate() {
            let l = sums.row(rows.start + i)[0];
            *inverse = inverse_of(l);
        }
        let (payload, last) = to.payload.split_at_mut(dim);
        divide_grads(isa, spare, payload, &inverse, &mut last[0], span(rows));
        sums.row(rows.start)[1]
    }

    /// `out_i`, and `l_i` with its reference.
    fn rows(
        &mut self,
        isa: Isa,
        chunk: &Chunk,
        before: &mut Sums<E::Num>,
        (out, sums): (&mut TileMut<'_, E>, &mut TileMut<'_, E::Num>),
    ) {
        let (&Part { head, grid, .. }, group) = (self.part, self.call.group());
        if grid.causal {
            self.load_keys(isa, chunk, before);
            self.store_key_rows(isa, chunk);
        }
        let (span, dim) = (span(&chunk.rows), self.call.v.shape().dim);
        for part in (0..group).filter(|_| !chunk.rows.is_empty()) {
            self.load_queries(isa, head * group + part, &chunk.rows);
            let LinearScratch { keys, rows, payload, tile, visible, .. } = &mut *self.scratch;
            let given = (&rows.features[..], span);
            before.payload(isa, given, payload);
            if grid.causal {
                let visible = &visible[..chunk.keys.len()];
                IntraChunk { pairs: keys, visible, tile }.payload(isa, given, payload);
            }
            let (payload, last) = payload.split_at_mut(dim);
            let l = &last[0];
            let skipped = chunk.rows.start - sums.rows().first;
            // 0 by which nothing can be divided leaves 0.
            scale_lanes(isa, payload, &Lanes(l.0.map(inverse_of)), span);
            store_transposed(isa, payload, chunk.rows.len(), skipped, (out, part));
            for lane in 0..chunk.rows.len() {
                let to = sums.row(part, skipped + lane);
                to[0].write(l.0[lane]);
                to[1].write(before.reference);
            }
        }
        if grid.causal {
            self.add_keys(isa, chunk, before);
        }
    }

    /// `d_q_i`, from `d_phi(q_i)`; and the rows into their sums.
    fn query_grads(
        &mut self,
        isa: Isa,
        chunk: &Chunk,
        (before, behind): (&mut Sums<E::Num>, &mut Sums<E::Num>),
        d_q: &mut TileMut<'_, E>,
    ) {
        let (&Part { head, grid, .. }, group) = (self.part, self.call.group());
        if grid.causal {
            self.load_keys(isa, chunk, before);
            self.store_key_rows(isa, chunk);
        }
        let (map, span) = (self.call.map, span(&chunk.rows));
        let Some(back) = self.call.backward else { return };
        for part in (0..group).filter(|_| !chunk.rows.is_empty()) {
            let head = head * group + part;
            self.load_queries(isa, head, &chunk.rows);
            let reference = self.load_output_grads(isa, &back, head, &chunk.rows);
            let LinearScratch { keys, rows, features, tile, visible, query_inputs, all, .. } =
                &mut *self.scratch;
            let given = (&rows.payload[..], span);
            before.features(isa, given, features);
            if grid.causal {
                let visible = &visible[..chunk.keys.len()];
                IntraChunk { pairs: keys, visible, tile }.features(isa, given, features);
            }
            map.derivative(isa, span, &rows.features, features);
            let by = map.back(isa, span, features, (Side::Queries, query_inputs));
            let skipped = chunk.rows.start - d_q.rows().first;
            store_transposed(isa, by, chunk.rows.len(), skipped, (d_q, part));
            // Sums of rows are over their references, those of keys times theirs.
            behind.raise(-reference);
            let factor = behind.factor(-reference);
            store_rows(isa, &rows.payload, chunk.rows.len(), factor, &mut rows.payload_rows);
            behind.take(isa, rows, span, all);
        }
        if grid.causal {
            self.add_keys(isa, chunk, before);
        }
    }

    /// `d_k_j`, from `d_phi(k_j)`, and `d_v_j`.
    fn key_grads(
        &mut self,
        isa: Isa,
        chunk: &Chunk,
        behind: &mut Sums<E::Num>,
        (d_k, d_v): (&mut TileMut<'_, E>, &mut TileMut<'_, E>),
    ) {
        let (&Part { item, head, grid, .. }, group) = (self.part, self.call.group());
        let Some(back) = self.call.backward else { return };
        let intra_chunk = grid.causal && !chunk.rows.is_empty() && group > 0;
        if intra_chunk {
            behind.raise(-back.sums.head(item, head * group).row(chunk.rows.start)[1]);
        }
        self.fetch_by_keys(isa, chunk, behind);
        for part in (0..group).filter(|_| intra_chunk) {
            let head = head * group + part;
            self.load_queries(isa, head, &chunk.rows);
            let reference = self.load_output_grads(isa, &back, head, &chunk.rows);
            let LinearScratch { keys, rows, features, payload, tile, visible, all, .. } =
                &mut *self.scratch;
            let (count, factor) = (chunk.rows.len(), behind.factor(-reference));
            store_rows(isa, &rows.features, count, E::Num::one(), &mut rows.feature_rows);
            store_rows(isa, &rows.payload, count, factor, &mut rows.payload_rows);
            visible.iter_mut().enumerate().for_each(|(row, visible)| *visible = chunk.visible(row));
            let mut intra_chunk = IntraChunk { pairs: &*rows, visible: &visible[..count], tile };
            intra_chunk.payload(isa, (&keys.features, span(&chunk.keys)), payload);
            intra_chunk.features(isa, (&keys.payload, span(&chunk.keys)), features);
            behind.take(isa, rows, span(&chunk.rows), all);
        }
        let (map, span) = (self.call.map, span(&chunk.keys));
        let LinearScratch { keys, features, payload, key_inputs, .. } = &mut *self.scratch;
        map.derivative(isa, span, &keys.features, features);
        let skipped = chunk.keys.start - d_k.rows().first;
        let dim = self.call.v.shape().dim;
        store_transposed(isa, &payload[..dim], chunk.keys.len(), skipped, (d_v, 0));
        let by = map.back(isa, span, features, (Side::Keys, key_inputs));
        store_transposed(isa, by, chunk.keys.len(), skipped, (d_k, 0));
    }

    /// What a chunk's keys fetch from the sums of rows, to whose reference their powers are relative.
    fn fetch_by_keys(&mut self, isa: Isa, chunk: &Chunk, behind: &Sums<E::Num>) {
        let (&Part { item, head, .. }, map, range) = (self.part, self.call.map, &chunk.keys);
        let (k, v) = (self.call.k.head(item, head), self.call.v.head(item, head));
        let LinearScratch { keys, key_inputs, features, payload, .. } = &mut *self.scratch;
        let row = |i: usize| k.row(range.start + i);
        map.arguments(isa, (row, range.len()), Side::Keys, key_inputs, &mut keys.features);
        map.map(isa, span(range), &Lanes([-behind.reference; GROUP]), &mut keys.features);
        let one = E::Num::one();
        load_transposed(
            isa,
            |i| v.row(range.start + i),
            range.len(),
            one,
            &mut keys.payload[..v.dim],
        );
        behind.payload(isa, (&keys.features, span(range)), payload);
        behind.features(isa, (&keys.payload, span(range)), features);
    }
}

/// `1 / l`, or 0 if that is no number: where so little weight is left that it is as good as none.
fn inverse_of<N: Number>(l: N) -> N {
    if l < N::min_positive_value() { N::zero() } else { N::one() / l }
}

leaf! {
    /// `payload = d_out / l`, and `last = -(d_out . out) / l`, lane by lane.
    fn divide_grads<'t, N>(
        s: S,
        out: &'t [Lanes<N>],
        payload: &'t mut [Lanes<N>],
        inverse: &'t Lanes<N>,
        last: &'t mut Lanes<N>,
        span: Span,
    ) {
        for lane in span.vectors::<N, S>() {
            let (by, mut delta) = (s.load(&inverse.0[lane..]), s.splat(N::zero()));
            for (out, d) in out.iter().zip(&mut *payload) {
                let d = &mut d.0[lane..];
                let x = s.load(d);
                delta = s.fma(x, s.load(&out.0[lane..]), delta);
                s.store(s.mul(x, by), d);
            }
            s.store(s.sub(s.splat(N::zero()), s.mul(delta, by)), &mut last.0[lane..]);
        }
    }
}
