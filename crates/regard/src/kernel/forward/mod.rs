//! The forward pass: many rows against the keys they see, without ever holding their scores.
//!
//! Cost for `n` rows and `m` visible keys each: `2 n m (qk_dim + v_dim)` flops, keys and values read `n / 128` times,
//! scratch of `128 (qk_dim + v_dim)` numbers. Two groups of 64 rows pass over each block of 64 keys, so a block is
//! brought from memory once and read from the cache the second time.

#[cfg(target_arch = "x86_64")]
mod amx;
mod decode;
#[cfg(target_arch = "x86_64")]
mod decode_amx;
mod decode_vectors;
mod group;
mod rows;

use crate::description::problem::Problem;
use crate::description::score::in_log2;
use crate::kernel::amx::{AmxScratch, PackedKv, Sizes};
use crate::kernel::block_loop::{BlockLoop, Call, KeyRange};
use crate::kernel::lanes::{
    load_transposed, prefetch_l1, scale_lanes, store_output, store_transposed,
};
use crate::kernel::micro::lanes_used;
use crate::kernel::queries::Queries;
use crate::kernel::softmax::{State, States, share_of};
use crate::machine::simd::{GROUP, Isa, Lanes, Number, leaf};
use crate::tensor::index::{BLOCK_KEYS, HeadRows, RowTile, Scope, Span};
use crate::tensor::view::{OutTile, TileMut};
use decode::DecodeScratch;
use decode_vectors::Vectors;
use group::{Adding, Group};
use std::ops::Range;

/// The rows that one task owns.
#[derive(Debug)]
pub(crate) struct Target<'t, N: Number> {
    /// For a task that finishes its rows.
    pub(crate) finished: Option<FinishedTile<'t, N>>,
    /// `[batch, parts x heads.q, q_len, v_dim + STATE]`: sums and states of rows that are not finished in one go.
    pub(crate) partial: Option<TileMut<'t, N>>,
}

/// A task's share of the outputs of a call.
type FinishedTile<'t, N> = Finished<OutTile<'t, N>, TileMut<'t, N>>;

/// The outputs of a call, or a task's share of them.
#[derive(Debug)]
pub(crate) struct Finished<O, L> {
    /// `[batch, heads.q, q_len, v_dim]`
    pub(crate) out: O,
    /// `[batch, heads.q, q_len, 1]`
    pub(crate) lse: L,
    /// `[batch, heads.q, q_len, 2]`: `max` and `sum` of each [`State`], where they are asked for.
    pub(crate) states: Option<L>,
    /// `[batch, heads.q, q_len, 1]`, where it is asked for.
    pub(crate) entropy: Option<L>,
    /// The same.
    pub(crate) max_score: Option<L>,
}

/// Columns of a [`State`] in a row of parts.
pub(crate) const STATE: usize = 4;

/// What one task does with its rows.
#[derive(Clone, Debug)]
pub(crate) struct Stage<'c> {
    /// Takes over these parts, merged in order; an empty range starts anew.
    pub(crate) from: Range<usize>,
    /// Walks over these keys.
    pub(crate) keys: Option<KeyRange<'c>>,
    /// Leaves the result as this part; `None` finishes the rows.
    pub(crate) into: Option<usize>,
}

/// Memory of one thread, reused from task to task.
#[derive(Debug)]
pub(crate) struct Scratch<N> {
    /// Sums of another part, `[features][lanes]`.
    other: Vec<Lanes<N>>,
    /// Sums of a row whose parts are merged, a group of features in each, and as a row.
    merged: Vec<Lanes<N>>,
    row: Vec<N>,
    pub(crate) groups: Vec<Group<N>>,
    tile: Vec<Lanes<N>>,
    /// What a tile of weights is multiplied by, where they are.
    pub(crate) factors: Vec<Lanes<N>>,
    pub(crate) block_loop: BlockLoop<N>,
    /// For products on tiles.
    pub(crate) amx: Option<AmxScratch>,
    /// For decoding.
    pub(crate) decode: Option<Box<DecodeScratch<N>>>,
}

impl<N: Number> Scratch<N> {
    pub(crate) fn new(
        problem: &Problem<'_, N>,
        rows: usize,
        tiles: Option<Sizes>,
        decode: Option<usize>,
    ) -> Self {
        let dims = problem.dims();
        // Rows that are decoded have memory of their own.
        let groups = if decode.is_some() { 0 } else { rows.min(dims.q_len).div_ceil(GROUP) };
        let zeros = |n| vec![Lanes([N::zero(); GROUP]); n];
        let group = || Group {
            q: if tiles.is_some() { Queries::elsewhere(0) } else { Queries::new(problem) },
            states: States::empty(),
            sums: zeros(tiles.map_or(dims.v_dim, Sizes::padded)),
        };
        Self {
            other: zeros(dims.v_dim),
            merged: zeros(dims.v_dim.div_ceil(GROUP)),
            row: vec![N::zero(); dims.v_dim],
            groups: (0..groups).map(|_| group()).collect(),
            tile: zeros(BLOCK_KEYS),
            factors: zeros(if problem.has_factors() { BLOCK_KEYS } else { 0 }),
            block_loop: BlockLoop::new(),
            amx: tiles.filter(|_| decode.is_none()).map(|sizes| AmxScratch::new(sizes, groups)),
            decode: decode.map(|heads| Box::new(DecodeScratch::new(problem, heads, tiles))),
        }
    }
}

/// One tile of rows of one head.
#[derive(Debug)]
pub(crate) struct Forward<'t, 'c, N: Number> {
    pub(crate) call: Call<'c, N>,
    pub(crate) scope: Scope,
    pub(crate) rows: RowTile,
    pub(crate) stage: Stage<'t>,
    /// Keys and values packed into tiles, if products use AMX and many rows meet them.
    pub(crate) packed_kv: Option<&'c PackedKv>,
    pub(crate) target: Target<'t, N>,
    /// Which of the target's heads it is.
    pub(crate) part: usize,
    pub(crate) scratch: &'t mut Scratch<N>,
}

impl<N: Number> Forward<'_, '_, N> {
    /// Computes the rows with the products that the scratch was made for.
    pub(crate) fn run(self, isa: Isa) {
        if let Some(task) = on_amx(isa, self) {
            task.run_on_vectors(isa);
        }
    }

    fn run_on_vectors(mut self, isa: Isa) {
        if self.stage.keys.is_none() {
            return self.merge_rows(isa);
        }
        if self.scratch.decode.is_some() {
            return self.decode(isa, &mut Vectors);
        }
        let used = self.rows.groups();
        for g in 0..used {
            self.start(isa, g);
        }
        if let Some(key_range) = &self.stage.keys {
            let (call, scope) = (self.call, self.scope);
            let q = call.queries(scope.batch, scope.head);
            let Scratch { groups, tile, factors, block_loop, .. } = &mut *self.scratch;
            for group in &mut groups[..used] {
                let rows = group.q.rows;
                group.q.take(isa, call.problem, scope.head, (q, rows));
            }
            let mut visitor = Adding { problem: call.problem, groups, tile, factors };
            let rows = HeadRows { scope, rows: self.rows };
            block_loop.for_each_block(isa, &call, rows, key_range, &mut visitor);
        }
        for g in 0..used {
            match self.stage.into {
                Some(part) => self.save(isa, g, part),
                None => self.finish(isa, g),
            }
        }
    }

    /// Sets the states of a group: what earlier parts left, or nothing seen.
    pub(crate) fn start(&mut self, isa: Isa, g: usize) {
        let group = &mut self.scratch.groups[g];
        let skipped = g * GROUP;
        group.q.rows = self.rows.group(g);
        group.states.clear();
        let used = lanes_used(isa.vectors::<N>(), group.q.rows.count);
        group.sums.iter_mut().for_each(|sum| sum.0[..used].fill(N::zero()));
        let Some(partial) = &self.target.partial else { return };
        let v_dim = self.call.problem.dims().v_dim;
        let span = Span::first(group.q.rows.count);
        for part in self.stage.from.clone() {
            let row = |lane| partial.written(part, skipped + lane);
            if group.q.rows.step > 1 {
                (0..span.len()).for_each(|lane| prefetch_l1(row(lane)));
            }
            load_transposed(isa, row, span.len(), N::from_f64(1.0), &mut self.scratch.other);
            let mut factors = [Lanes([N::default(); GROUP]); 2];
            for lane in 0..span.len() {
                let [max, sum, sum_x_log, true_max] = [0, 1, 2, 3].map(|i| row(lane)[v_dim + i]);
                let (state, mine, theirs) =
                    group.states.get(lane).merge(State { max, sum, sum_x_log, true_max });
                group.states.set(lane, state);
                (factors[0].0[lane], factors[1].0[lane]) = (mine, theirs);
            }
            merge_sums(isa, &mut group.sums, &self.scratch.other, &factors, span);
        }
    }

    /// Leaves the states of a group for a later stage.
    pub(crate) fn save(&mut self, isa: Isa, g: usize, part: usize) {
        let part = part + self.part;
        let Some(partial) = &mut self.target.partial else { return };
        let group = &self.scratch.groups[g];
        let v_dim = self.call.problem.dims().v_dim;
        store_transposed(isa, &group.sums[..v_dim], group.q.rows.count, g * GROUP, (partial, part));
        for lane in 0..group.q.rows.count {
            let State { max, sum, sum_x_log, true_max } = group.states.get(lane);
            let row = &mut partial.row(part, g * GROUP + lane)[v_dim..];
            row.iter_mut().zip([max, sum, sum_x_log, true_max]).for_each(|(to, x)| {
                to.write(x);
            });
        }
    }

    /// Divides the sums, transposes them into rows and writes them with their lse.
    pub(crate) fn finish(&mut self, isa: Isa, g: usize) {
        let Self { call, scope, .. } = *self;
        let Some(to) = &mut self.target.finished else { return };
        let group = &mut self.scratch.groups[g];
        if let Some(sinks) = call.problem.score.sinks {
            group.add_sink(isa, in_log2(sinks[scope.head]), call.problem.entropy);
        }
        for lane in 0..group.q.rows.count {
            let (state, row) = (group.states.get(lane), g * GROUP + lane);
            to.write_state(self.part, row, state);
        }
        let shares = Lanes(group.states.sum.0.map(share_of));
        scale_lanes(isa, &mut group.sums, &shares, Span::first(group.q.rows.count));
        let v_dim = call.problem.dims().v_dim;
        store_output(
            isa,
            &group.sums[..v_dim],
            group.q.rows.count,
            g * GROUP,
            (&mut to.out, self.part),
        );
    }
}

/// Runs a task on AMX, if its scratch was made for that; else gives it back.
#[cfg(target_arch = "x86_64")]
fn on_amx<'t, 'c, N: Number>(isa: Isa, task: Forward<'t, 'c, N>) -> Option<Forward<'t, 'c, N>> {
    let decode = task.scratch.decode.as_ref().is_some_and(|decode| decode.amx.is_some());
    if !decode && task.scratch.amx.is_none() {
        return Some(task);
    }
    N::on_amx::<Forward<'t, 'c, f32>>(isa, task).err()
}

#[cfg(not(target_arch = "x86_64"))]
fn on_amx<T>(_: Isa, task: T) -> Option<T> {
    Some(task)
}

leaf! {
    /// `sums = sums * factors[0] + other * factors[1]`, lane by lane.
    fn merge_sums<'t, N>(
        s: S,
        sums: &'t mut [Lanes<N>],
        other: &'t [Lanes<N>],
        factors: &'t [Lanes<N>; 2],
        span: Span,
    ) {
        for (sum, other) in sums.iter_mut().zip(other) {
            for lane in span.vectors::<N, S>() {
                let theirs = s.mul(s.load(&other.0[lane..]), s.load(&factors[1].0[lane..]));
                let sum = &mut sum.0[lane..];
                s.store(s.fma(s.load(sum), s.load(&factors[0].0[lane..]), theirs), sum);
            }
        }
    }
}
