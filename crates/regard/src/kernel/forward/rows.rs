//! Rows whose sums stand as rows, not in lanes: those of decoding, and those of parts that are merged. Saved, merged and finished
//! without a transposition.
//!
//! Cost: one pass over the sums of a row.

use super::{Finished, Forward, Scratch, merge_sums};
use crate::description::score::in_log2;
use crate::kernel::lanes::store_row;
use crate::kernel::softmax::State;
use crate::machine::simd::{GROUP, Isa, Lanes, Number};
use crate::tensor::index::Span;
use crate::tensor::view::{OutTile, TileMut};

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
        let mut row = std::mem::take(&mut self.scratch.row);
        for i in 0..self.rows.count {
            let Scratch { merged, other, .. } = &mut *self.scratch;
            merged.iter_mut().for_each(|sums| sums.0.fill(N::zero()));
            let mut state = State::empty();
            for part in self.stage.from.clone() {
                let Some(partial) = &self.target.partial else { continue };
                let (sums, of_state) = partial.written(part, i).split_at(v_dim);
                other.iter_mut().zip(sums.chunks(GROUP)).for_each(|(to, sums)| {
                    to.0[..sums.len()].copy_from_slice(sums);
                });
                let [max, sum, sum_x_log, true_max] = [0, 1, 2, 3].map(|i| of_state[i]);
                let (both, mine, theirs) = state.merge(State { max, sum, sum_x_log, true_max });
                state = both;
                let factors = [mine, theirs].map(|factor| Lanes([factor; GROUP]));
                let count = merged.len();
                merge_sums(isa, merged, &other[..count], &factors, Span::first(GROUP));
            }
            row.chunks_mut(GROUP).zip(&*merged).for_each(|(to, sums)| {
                to.copy_from_slice(&sums.0[..to.len()]);
            });
            self.finish_row(isa, i, state, &row);
        }
        self.scratch.row = row;
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
        store_row(isa, sums, factor, (to.out.as_mut(), self.part, row));
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
