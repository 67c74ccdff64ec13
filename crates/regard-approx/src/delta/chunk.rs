//! The chunks of the delta rule: 64 positions of one state head as products of small matrices (the WY representation; Yang et
//! al. 2024, section 3; Yang et al. 2025, section 3.3).
//!
//! Queries and, with beta, keys read the state that a chunk begins with, `S`: they are stacked as readers `X`, and `X^` is
//! `X` times the decays from the first position on. With `T` the causal tile of weighted dot products of readers with keys,
//! split into `P` of queries and `A` of keys (which do not see themselves), `K^` the keys times the decays up to the end, and
//! `D` the decay of the chunk:
//!
//! ```text
//! Z   = X^ S                          what the state gives to queries, Z_q, and predicts of values, Z_k
//! E   = (I + A diag(beta))^-1 (V - Z_k)
//! U   = diag(beta) E                  U = V without beta
//! out = Z_q + P U
//! S'  = D S + K^^T U
//! ```
//! Cost for each position with `r` readers of `d` features and `e` of the value: forward `(2 r + 2) d e + 64 r (2 d + e) + 64
//! e` flops; backward this without `out`, then about twice as much again.

use super::decay::{
    Decay, PairGrads, Readers, add_prefix_sums, add_products, add_suffix_sums, causal_product,
    scale_rows,
};
use super::solve::{solve_lower, solve_transposed};
use super::{DeltaInputs, L2_EPSILON, Sizes};
use crate::matrix::{rows, rows_mut};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, Array3, ArrayView1, ArrayView2, ArrayViewMut2, Axis};
use regard::{Element, Machine, Number, View};
use std::ops::Range;

/// Positions of a chunk.
pub(super) const CHUNK: usize = 64;

/// The tensors of a call, and how it runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call<'c, E: Element> {
    pub(super) inputs: DeltaInputs<'c, E>,
    pub(super) sizes: Sizes,
    pub(super) scale: E::Num,
    pub(super) normalized: bool,
    pub(super) machine: Machine,
}

/// An item and a state head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) item: usize,
    pub(super) head: usize,
}

/// Memory of one thread.
#[derive(Debug)]
pub(super) struct Scratch<N> {
    /// Query heads that are loaded: none where only the states are computed.
    queries: usize,
    /// Positions of the chunk.
    c: usize,
    /// Queries times the scale, then keys.
    x: Array2<N>,
    /// `1 / |x|` of each row, if these are normalized.
    inverse: Vec<N>,
    scaled: Array2<N>,
    keys: Array2<N>,
    decay: Decay<N>,
    beta: Array2<N>,
    tile: Array2<N>,
    /// Columns of the tile of keys times beta.
    system: Array2<N>,
    z: Array2<N>,
    error: Array2<N>,
    u: Array2<N>,
}

/// More memory of one thread, for the backward pass.
#[derive(Debug)]
pub(super) struct BackScratch<N> {
    pub(super) forward: Scratch<N>,
    /// By `Z`.
    z: Array2<N>,
    /// By `U`.
    u: Array2<N>,
    tile: Array2<N>,
    x: Array2<N>,
    keys: Array2<N>,
    g: Array2<N>,
    beta: Array2<N>,
    pub(super) state: Array2<N>,
    /// The states before each chunk, `[chunks, dim, v_dim]`.
    states: Array3<N>,
}

/// Where the gradients of a chunk go, `[positions, features]`, those by q one for each query head.
#[derive(Debug)]
pub(super) struct GradRows<'t, E: Element, F> {
    pub(super) q: Vec<ArrayViewMut2<'t, F>>,
    pub(super) k: ArrayViewMut2<'t, F>,
    pub(super) v: ArrayViewMut2<'t, E>,
    pub(super) g: Option<ArrayViewMut2<'t, E::Num>>,
    pub(super) beta: Option<ArrayViewMut2<'t, E::Num>>,
}

/// Writes rows of a head.
fn load<E: Element>(
    view: &View<'_, E>,
    (item, head): (usize, usize),
    positions: &Range<usize>,
    mut to: ArrayViewMut2<'_, E::Num>,
) {
    for (row, mut to) in positions.clone().zip(to.rows_mut()) {
        to.zip_mut_with(&ArrayView1::from(view.row(item, head, row)), |to, x| *to = x.widen());
    }
}

pub(super) fn store<N: Number, F: Element<Num = N>>(
    from: ArrayView2<'_, N>,
    to: &mut ArrayViewMut2<'_, F>,
) {
    to.zip_mut_with(&from, |to, x| *to = F::narrow(*x));
}

impl<N: Number> Scratch<N> {
    pub(super) fn new<E: Element<Num = N>>(call: &Call<'_, E>) -> Self {
        let Sizes { dim, v_dim, g_dim, .. } = call.sizes;
        let (chunk, readers) = (CHUNK.min(call.sizes.len), call.sizes.readers() + 1);
        let zeros = |blocks: usize, width: usize| Array2::zeros([blocks * chunk, width]);
        Self {
            queries: call.sizes.readers(),
            c: 0,
            x: zeros(readers, dim),
            inverse: vec![N::zero(); readers * chunk],
            scaled: zeros(readers, dim),
            keys: zeros(1, dim),
            decay: Decay::new(chunk, g_dim),
            beta: zeros(1, 1),
            tile: zeros(readers, chunk),
            system: zeros(1, chunk),
            z: zeros(readers, v_dim),
            error: zeros(1, v_dim),
            u: zeros(1, v_dim),
        }
    }

    /// Rows of queries.
    fn query_rows(&self) -> Range<usize> {
        0..self.queries * self.c
    }

    fn key_rows(&self) -> Range<usize> {
        self.queries * self.c..(self.queries + 1) * self.c
    }

    /// Rows that read the state.
    fn reader_rows<E: Element<Num = N>>(&self, call: &Call<'_, E>) -> Range<usize> {
        if call.inputs.beta.is_some() { 0..self.key_rows().end } else { self.query_rows() }
    }

    fn readers(&self, count: usize) -> Readers<'_, N> {
        let x = rows(&self.x, 0..count);
        Readers { x, keys: rows(&self.x, self.key_rows()), queries: self.query_rows().end }
    }

    fn load<E: Element<Num = N>>(
        &mut self,
        call: &Call<'_, E>,
        at: Place,
        positions: &Range<usize>,
    ) {
        let DeltaInputs { q, k, v, g, beta, .. } = &call.inputs;
        let Place { item, head } = at;
        self.c = positions.len();
        let c = self.c;
        for (block, head) in call.sizes.queries(head).take(self.queries).enumerate() {
            load(q, (item, head), positions, rows_mut(&mut self.x, block * c..(block + 1) * c));
        }
        let keys = self.key_rows();
        load(k, (item, call.sizes.key(head)), positions, rows_mut(&mut self.x, keys.clone()));
        if call.normalized {
            let mut x = rows_mut(&mut self.x, 0..keys.end);
            for (mut x, inverse) in x.rows_mut().into_iter().zip(&mut self.inverse) {
                *inverse = (x.dot(&x) + N::from_f64(L2_EPSILON)).sqrt().recip();
                let by = *inverse;
                x.mapv_inplace(|x| x * by);
            }
        }
        let scale = call.scale;
        rows_mut(&mut self.x, 0..keys.start).mapv_inplace(|x| x * scale);
        load(v, (item, head), positions, rows_mut(&mut self.error, 0..c));
        if let Some(beta) = beta {
            load(beta, (item, head), positions, rows_mut(&mut self.beta, 0..c));
        }
        self.decay.load(c, |mut e| {
            let Some(g) = g else { return e.fill(N::one()) };
            load(g, (item, head), positions, e.view_mut());
            if e.ncols() == 1 {
                return e.mapv_inplace(N::exp);
            }
            e.mapv_inplace(|g| g * N::from_f64(std::f64::consts::LOG2_E));
            e.rows_mut()
                .into_iter()
                .filter_map(|e| e.into_slice())
                .for_each(|e| call.machine.exp2(e));
        });
    }

    /// Everything up to `U`, from the state that the chunk begins with.
    pub(super) fn solve<E: Element<Num = N>>(
        &mut self,
        call: &Call<'_, E>,
        (at, positions): (Place, Range<usize>),
        state: ArrayView2<'_, N>,
    ) {
        self.load(call, at, &positions);
        let (c, readers) = (self.c, self.reader_rows(call));
        let (queries, keys) = (self.query_rows(), self.key_rows());
        let view = Readers {
            x: rows(&self.x, readers.clone()),
            keys: rows(&self.x, keys.clone()),
            queries: queries.end,
        };
        let tile = rows_mut(&mut self.tile, readers.clone());
        let mut tile = tile.split_at(Axis(1), c).0;
        self.decay.pairs(view, tile.view_mut());
        let mut scaled = rows_mut(&mut self.scaled, readers.clone());
        scaled.assign(&rows(&self.x, readers.clone()));
        scale_rows(scaled.view_mut(), self.decay.up_to_each());
        let mut to_end = rows_mut(&mut self.keys, 0..c);
        to_end.assign(&rows(&self.x, keys.clone()));
        scale_rows(to_end, self.decay.to_end());
        let mut z = rows_mut(&mut self.z, readers);
        general_mat_mul(N::one(), &scaled, &state, N::zero(), &mut z);
        let (mut error, mut u) = (rows_mut(&mut self.error, 0..c), rows_mut(&mut self.u, 0..c));
        if call.inputs.beta.is_some() {
            error.zip_mut_with(&rows(&z, keys.clone()), |error, z| *error = *error - *z);
            let mut system = rows_mut(&mut self.system, 0..c).split_at(Axis(1), c).0;
            system.assign(&rows(&tile, keys));
            let beta = rows(&self.beta, 0..c);
            let beta = beta.index_axis(Axis(1), 0);
            for mut row in system.rows_mut() {
                row.zip_mut_with(&beta, |a, beta| *a = *a * *beta);
            }
            solve_lower(system.view(), error.view_mut());
        }
        u.assign(&error);
        if call.inputs.beta.is_some() {
            scale_rows(u, rows(&self.beta, 0..c));
        }
    }

    /// The outputs, one tensor of rows for each query head.
    pub(super) fn store_outputs<E: Element<Num = N>>(&mut self, outs: &mut [ArrayViewMut2<'_, E>]) {
        let (c, queries) = (self.c, self.query_rows());
        let tile = rows(&self.tile, queries.clone()).split_at(Axis(1), c).0;
        let mut z = rows_mut(&mut self.z, queries);
        causal_product(tile, rows(&self.u, 0..c), z.view_mut());
        for (out, z) in outs.iter_mut().zip(z.axis_chunks_iter(Axis(0), c)) {
            store(z, out);
        }
    }

    /// The state after the chunk, in place of the one before.
    pub(super) fn advance(&self, mut state: ArrayViewMut2<'_, N>) {
        self.decay.scale_state(state.view_mut());
        let (keys, u) = (rows(&self.keys, 0..self.c), rows(&self.u, 0..self.c));
        general_mat_mul(N::one(), &keys.t(), &u, N::one(), &mut state);
    }

    /// One position, without products of matrices: two passes over the state.
    pub(super) fn step<E: Element<Num = N>>(
        &mut self,
        call: &Call<'_, E>,
        at: Place,
        mut state: ArrayViewMut2<'_, N>,
        outs: &mut [ArrayViewMut2<'_, E>],
    ) {
        self.load(call, at, &(0..1));
        let (key, whole) = (self.key_rows().start, self.decay.whole());
        let mut predicted = rows_mut(&mut self.z, 0..1).index_axis_move(Axis(0), 0);
        predicted.fill(N::zero());
        for (c, mut row) in state.rows_mut().into_iter().enumerate() {
            let by = whole[c % whole.len()];
            row.mapv_inplace(|s| s * by);
            if call.inputs.beta.is_some() {
                predicted.scaled_add(self.x[[key, c]], &row);
            }
        }
        let mut u = self.error.index_axis_mut(Axis(0), 0);
        if call.inputs.beta.is_some() {
            let beta = self.beta[[0, 0]];
            u.zip_mut_with(&predicted, |u, z| *u = beta * (*u - *z));
        }
        let mut z = rows_mut(&mut self.z, 0..outs.len());
        z.fill(N::zero());
        for (c, mut row) in state.rows_mut().into_iter().enumerate() {
            row.scaled_add(self.x[[key, c]], &u);
            for (q, mut z) in z.rows_mut().into_iter().enumerate() {
                z.scaled_add(self.x[[q, c]], &row);
            }
        }
        for (out, z) in outs.iter_mut().zip(z.axis_chunks_iter(Axis(0), 1)) {
            store(z, out);
        }
    }
}

impl<N: Number> BackScratch<N> {
    pub(super) fn new<E: Element<Num = N>>(call: &Call<'_, E>) -> Self {
        let forward = Scratch::new(call);
        let zeros = |like: &Array2<N>| Array2::zeros(like.dim());
        let Sizes { dim, v_dim, g_dim, .. } = call.sizes;
        Self {
            z: zeros(&forward.z),
            u: zeros(&forward.u),
            tile: zeros(&forward.tile),
            x: zeros(&forward.x),
            keys: zeros(&forward.keys),
            g: Array2::zeros([forward.beta.nrows(), g_dim]),
            beta: zeros(&forward.beta),
            state: Array2::zeros([dim, v_dim]),
            states: Array3::zeros([call.sizes.len.div_ceil(CHUNK), dim, v_dim]),
            forward,
        }
    }

    /// Computes the states before all chunks of a head.
    pub(super) fn load_states<E: Element<Num = N>>(
        &mut self,
        call: &Call<'_, E>,
        at: Place,
        chunks: impl ExactSizeIterator<Item = Range<usize>>,
    ) {
        let (forward, states) = (&mut self.forward, &mut self.states);
        forward.queries = 0;
        let mut first = states.index_axis_mut(Axis(0), 0);
        match &call.inputs.state {
            Some(state) => load(state, (at.item, at.head), &(0..call.sizes.dim), first),
            None => first.fill(N::zero()),
        }
        let count = chunks.len().saturating_sub(1);
        for (i, positions) in chunks.take(count).enumerate() {
            let (before, after) = states.view_mut().split_at(Axis(0), i + 1);
            let (before, mut after) =
                (before.index_axis_move(Axis(0), i), after.index_axis_move(Axis(0), 0));
            forward.solve(call, (at, positions), before.view());
            after.assign(&before);
            forward.advance(after);
        }
        forward.queries = call.sizes.readers();
    }

    /// The gradients of chunk `i`, from that of its outputs and, in `self.state`, that by the state after it, which becomes
    /// that by the state before.
    pub(super) fn chunk<E: Element<Num = N>, F: Element<Num = N>>(
        &mut self,
        call: &Call<'_, E>,
        (at, positions): (Place, Range<usize>),
        (i, d_out): (usize, &View<'_, E>),
        grads: GradRows<'_, E, F>,
    ) {
        let state = self.states.index_axis(Axis(0), i);
        self.forward.solve(call, (at, positions.clone()), state);
        self.by_u(call, (at, positions), d_out);
        self.by_readers(call, i);
        self.by_state(call, i);
        self.store(call, grads);
    }

    /// The gradients by `U`, `V`, beta and `Z`.
    fn by_u<E: Element<Num = N>>(
        &mut self,
        call: &Call<'_, E>,
        (at, positions): (Place, Range<usize>),
        d_out: &View<'_, E>,
    ) {
        let forward = &self.forward;
        let (c, queries, keys) = (forward.c, forward.query_rows(), forward.key_rows());
        let first = at.head * call.sizes.readers();
        for block in 0..call.sizes.readers() {
            let to = rows_mut(&mut self.z, block * c..(block + 1) * c);
            load(d_out, (at.item, first + block), &positions, to);
        }
        let mut u = rows_mut(&mut self.u, 0..c);
        let tile = rows(&forward.tile, queries.clone()).split_at(Axis(1), c).0;
        let to_end = rows(&forward.keys, 0..c);
        general_mat_mul(N::one(), &to_end, &self.state, N::zero(), &mut u);
        general_mat_mul(N::one(), &tile.t(), &rows(&self.z, queries), N::one(), &mut u);
        if call.inputs.beta.is_none() {
            return;
        }
        // U = diag(beta) E and E = V - Z_k - A U: the transposed system is that of A^T diag(beta).
        let mut system = rows_mut(&mut self.forward.system, 0..c).split_at(Axis(1), c).0;
        system.assign(&rows(&self.forward.tile, keys.clone()).split_at(Axis(1), c).0);
        scale_rows(system.view_mut(), rows(&self.forward.beta, 0..c));
        solve_transposed(system.view(), u.view_mut());
        for ((mut to, d), error) in
            self.beta.rows_mut().into_iter().zip(u.rows()).zip(self.forward.error.rows())
        {
            to[0] = d.dot(&error);
        }
        scale_rows(u.view_mut(), rows(&self.forward.beta, 0..c));
        rows_mut(&mut self.z, keys).zip_mut_with(&u, |z, u| *z = -*u);
    }

    /// The gradients by readers, keys and g.
    fn by_readers<E: Element<Num = N>>(&mut self, call: &Call<'_, E>, i: usize) {
        let state = self.states.index_axis(Axis(0), i);
        let readers = self.forward.reader_rows(call);
        let c = self.forward.c;
        let (z, u) = (rows(&self.z, readers.clone()), rows(&self.forward.u, 0..c));
        let mut g = rows_mut(&mut self.g, 0..c);
        g.fill(N::zero());
        let mut x = rows_mut(&mut self.x, readers.clone());
        general_mat_mul(N::one(), &z, &state.t(), N::zero(), &mut x);
        scale_rows(x.view_mut(), self.forward.decay.up_to_each());
        let mut keys = rows_mut(&mut self.keys, 0..c);
        general_mat_mul(N::one(), &u, &self.state.t(), N::zero(), &mut keys);
        scale_rows(keys.view_mut(), self.forward.decay.to_end());
        let view = self.forward.readers(readers.len());
        if call.inputs.g.is_some() {
            let mut sums = Array2::zeros(g.dim());
            for (r, (d, x)) in x.rows().into_iter().zip(view.x.rows()).enumerate() {
                add_products(sums.index_axis_mut(Axis(0), r % c), d, x);
            }
            add_suffix_sums(sums.view(), g.view_mut());
            sums.fill(N::zero());
            for (mut sum, (d, key)) in
                sums.rows_mut().into_iter().zip(keys.rows().into_iter().zip(view.keys.rows()))
            {
                add_products(sum.view_mut(), d, key);
            }
            add_prefix_sums(sums.view(), g.view_mut());
        }
        let mut d_tile = rows_mut(&mut self.tile, readers.clone()).split_at(Axis(1), c).0;
        general_mat_mul(N::one(), &z, &u.t(), N::zero(), &mut d_tile);
        let grads = PairGrads { x, keys, g };
        let forward = &mut self.forward;
        let (queries, key_rows) = (forward.query_rows(), forward.key_rows());
        let view = Readers {
            x: rows(&forward.x, readers.clone()),
            keys: rows(&forward.x, key_rows),
            queries: queries.end,
        };
        let tile = rows(&forward.tile, readers).split_at(Axis(1), c).0;
        forward.decay.pairs_back(view, tile, d_tile, grads);
    }

    /// The gradient by the state before the chunk, and what the decay of all of it adds to that by g.
    fn by_state<E: Element<Num = N>>(&mut self, call: &Call<'_, E>, i: usize) {
        let state = self.states.index_axis(Axis(0), i);
        let readers = self.forward.reader_rows(call);
        self.forward.decay.scale_state(self.state.view_mut());
        if call.inputs.g.is_some() {
            let mut all = Array2::zeros([1, self.g.ncols()]);
            for (i, (d, s)) in self.state.rows().into_iter().zip(state.rows()).enumerate() {
                let all = &mut all[[0, i % self.g.ncols()]];
                *all = *all + d.dot(&s);
            }
            rows_mut(&mut self.g, 0..self.forward.c).zip_mut_with(&all, |g, all| *g = *g + *all);
        }
        let (scaled, z) = (rows(&self.forward.scaled, readers.clone()), rows(&self.z, readers));
        general_mat_mul(N::one(), &scaled.t(), &z, N::one(), &mut self.state);
    }

    fn store<E: Element<Num = N>, F: Element<Num = N>>(
        &mut self,
        call: &Call<'_, E>,
        mut to: GradRows<'_, E, F>,
    ) {
        let forward = &self.forward;
        let (c, keys) = (forward.c, forward.key_rows());
        if call.inputs.beta.is_some() {
            let read = rows(&self.x, keys.clone());
            rows_mut(&mut self.keys, 0..c).zip_mut_with(&read, |key, read| *key = *key + *read);
        }
        let mut x = rows_mut(&mut self.x, 0..keys.end);
        rows_mut(&mut x, keys.clone()).assign(&rows(&self.keys, 0..c));
        if call.normalized {
            // x of queries has the scale, and so has the gradient by the normalized row.
            let factors = |r: usize| if r < keys.start { call.scale } else { N::one() };
            let both = x.rows_mut().into_iter().zip(forward.x.rows()).zip(&forward.inverse);
            for (r, ((mut d, x), inverse)) in both.enumerate() {
                let by = factors(r);
                let along = if by == N::zero() { by } else { d.dot(&x) / by };
                d.zip_mut_with(&x, |d, x| *d = *inverse * (*d * by - *x * along));
            }
        } else {
            rows_mut(&mut x, 0..keys.start).mapv_inplace(|d| d * call.scale);
        }
        for (to, d) in to.q.iter_mut().zip(x.axis_chunks_iter(Axis(0), c)) {
            store(d, to);
        }
        store(rows(&x, keys), &mut to.k);
        store(rows(&self.u, 0..c), &mut to.v);
        to.g.iter_mut().for_each(|to| store(rows(&self.g, 0..c), to));
        to.beta.iter_mut().for_each(|to| store(rows(&self.beta, 0..c), to));
    }
}
