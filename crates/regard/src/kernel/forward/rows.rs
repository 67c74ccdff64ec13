//! Rows whose sums stand as rows, not in lanes: those of decoding, and those of parts that are merged. Saved, merged and finished
//! without a transposition.
//!
//! Cost: one pass over the sums of a row.

use super::{Finished, Forward, STATE};
use crate::description::score::in_log2;
use crate::kernel::softmax::State;
use crate::machine::simd::{Element, Isa, Number, Simd, Task, Visitor, leaf};
use crate::tensor::view::{OutTile, TileMut, TilesMut};
use std::mem::MaybeUninit;

impl<N: Number> Forward<'_, '_, N> {
    /// Leaves a row as a part, or finishes it.
    pub(super) fn put_row(&mut self, isa: Isa, row: usize, state: State<N>, sums: &[N]) {
        let Some(part) = self.stage.into else { return self.finish_row(isa, row, state, sums) };
        let Some(partial) = &mut self.target.partial else { return };
        let (to, of_state) = partial.row(part + self.part, row).split_at_mut(sums.len());
        to.write_copy_of_slice(sums);
        let State { max, sum, sum_x_log, true_max } = state;
        of_state.write_copy_of_slice(&[max, sum, sum_x_log, true_max]);
    }

    /// Merges the parts of each row in order, and finishes it.
    pub(super) fn merge_rows(&mut self, isa: Isa) {
        let v_dim = self.call.problem.dims().v_dim;
        let mut sums = std::mem::take(&mut self.scratch.row);
        for row in 0..self.rows.count {
            sums.fill(N::zero());
            let mut state = State::empty();
            for part in self.stage.from.clone() {
                let Some(partial) = &self.target.partial else { continue };
                let (other, of_state) = partial.written(part, row).split_at(v_dim);
                let [max, sum, sum_x_log, true_max] =
                    *of_state.as_array::<STATE>().unwrap_or(&[N::zero(); STATE]);
                let (merged, mine, theirs) = state.merge(State { max, sum, sum_x_log, true_max });
                state = merged;
                merge_row(isa, &mut sums, other, [mine, theirs]);
            }
            self.finish_row(isa, row, state, &sums);
        }
        self.scratch.row = sums;
    }

    /// Divides the sums of a row and writes them with their lse.
    fn finish_row(&mut self, isa: Isa, row: usize, state: State<N>, sums: &[N]) {
        let Some(to) = &mut self.target.finished else { return };
        let (mut state, mut factor) = (state, N::one());
        if let Some(sinks) = self.call.problem.score.sinks {
            // A score without a value, and no score of a key.
            let max = in_log2(sinks[self.scope.head]);
            let true_max = N::neg_infinity();
            let sink = State { max, sum: N::one(), sum_x_log: N::zero(), true_max };
            (state, factor, _) = state.merge(sink);
        }
        to.write_state(self.part, row, state);
        let factor = factor * state.share();
        N::visit(to.out.as_mut(), StoreRow { isa, sums, factor, place: (self.part, row) });
    }
}

impl<N: Number> Finished<OutTile<'_, N>, TileMut<'_, N>> {
    /// Writes what a row has besides its sums.
    #[inline(always)]
    pub(super) fn write_state(&mut self, part: usize, row: usize, state: State<N>) {
        self.lse.row(part, row)[0].write(state.lse());
        if let Some(states) = &mut self.states {
            states.row(part, row).write_copy_of_slice(&[state.max, state.sum]);
        }
        if let Some(entropy) = &mut self.entropy {
            entropy.row(part, row)[0].write(state.entropy());
        }
        if let Some(max_score) = &mut self.max_score {
            max_score.row(part, row)[0].write(state.max_score());
        }
    }
}

leaf! {
    /// `sums = sums * factors[0] + other * factors[1]`
    fn merge_row<'t, N>(s: S, sums: &'t mut [N], other: &'t [N], factors: [N; 2]) {
        let [mine, theirs] = factors.map(|factor| s.splat(factor));
        let whole = sums.len() / S::LANES * S::LANES;
        for d in (0..whole).step_by(S::LANES) {
            let other = s.mul(s.load(&other[d..]), theirs);
            s.store(s.fma(s.load(&sums[d..]), mine, other), &mut sums[d..]);
        }
        for (sum, other) in sums[whole..].iter_mut().zip(&other[whole..]) {
            *sum = sum.mul_add(factors[0], *other * factors[1]);
        }
    }
}

/// Writes the sums of a row, times a factor, into an output of any type.
struct StoreRow<'t, N> {
    isa: Isa,
    sums: &'t [N],
    factor: N,
    /// Part and row.
    place: (usize, usize),
}

impl<'m, 'o: 'm, N: Number> Visitor<TilesMut<'m, 'o>, N> for StoreRow<'_, N> {
    type Out = ();
    fn visit<E: Element<Num = N>>(self, out: &'m mut TileMut<'o, E>) {
        let Self { isa, sums, factor, place: (part, row) } = self;
        N::enter(isa, Store::<E> { sums, factor, to: out.row(part, row) });
    }
}

/// The same once the type of the output is known.
struct Store<'t, E: Element> {
    sums: &'t [E::Num],
    factor: E::Num,
    to: &'t mut [MaybeUninit<E>],
}

impl<E: Element> Task<E::Num> for Store<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<E::Num>>(self, s: S) {
        let Self { sums, factor, to } = self;
        let (by, whole) = (s.splat(factor), to.len() / S::LANES * S::LANES);
        for d in (0..whole).step_by(S::LANES) {
            E::write(s, s.mul(s.load(&sums[d..]), by), &mut to[d..]);
        }
        for (to, sum) in to[whole..].iter_mut().zip(&sums[whole..]) {
            to.write(E::narrow(*sum * factor));
        }
    }
}
