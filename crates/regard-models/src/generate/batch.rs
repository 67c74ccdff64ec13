//! The states of a call: they are fed together, and freed whatever happens.

use super::{AttentionProbe, AttentionRow, Decoder, GenerateError};
use std::mem::take;

/// All states that are alive. Dropping it frees them: on errors, and on panics of who is told.
pub(super) struct Batch<D: Decoder> {
    decoder: D,
    states: Vec<D::State>,
}

impl<D: Decoder> Batch<D> {
    pub(super) fn new(decoder: D) -> Self {
        Self { decoder, states: Vec::new() }
    }

    pub(super) fn decoder(&self) -> &D {
        &self.decoder
    }

    pub(super) fn decoder_mut(&mut self) -> &mut D {
        &mut self.decoder
    }

    /// One more state: empty, for a row, or a fork of one that is kept apart.
    pub(super) fn start(&mut self, row: usize, from: Option<&D::State>) -> Result<(), D::Error> {
        let state = match from {
            Some(state) => self.decoder.fork(state),
            None => self.decoder.start(row),
        };
        self.states.push(state?);
        Ok(())
    }

    /// The last state that was started keeps what it looks at.
    pub(super) fn probe(&mut self, probe: &AttentionProbe) {
        if let Some(state) = self.states.last_mut() {
            self.decoder.probe(state, probe);
        }
    }

    /// What the state of this number looked at.
    pub(super) fn seen(&mut self, state: usize) -> Vec<AttentionRow> {
        self.decoder.seen(&mut self.states[state])
    }

    /// A fork of the state of this number, to be kept apart. It must come to [`free`](Self::free).
    pub(super) fn fork(&mut self, state: usize) -> Result<D::State, D::Error> {
        self.decoder.fork(&self.states[state])
    }

    pub(super) fn free(&mut self, state: D::State) -> Result<(), D::Error> {
        self.decoder.free(state)
    }

    /// Feeds every state; scores `[Σ scored, vocab]`.
    pub(super) fn feed(
        &mut self,
        tokens: &[&[u32]],
        scored: &[usize],
    ) -> Result<Vec<f32>, D::Error> {
        let scores = self.decoder.feed(&mut self.states, tokens, scored)?;
        let (got, vocab, expected) = (scores.len(), self.decoder.vocab(), scored.iter().sum());
        match vocab.checked_mul(expected) == Some(got) {
            true => Ok(scores),
            false => Err(GenerateError::Scores { got, expected, vocab }.into()),
        }
    }

    /// Gives the memory of scores back.
    pub(super) fn recycle(&mut self, scores: Vec<f32>) {
        self.decoder.recycle(scores);
    }

    /// The state of this number forgets all but its first `len` tokens.
    pub(super) fn truncate(&mut self, state: usize, len: usize) -> Result<(), D::Error> {
        self.decoder.truncate(&mut self.states[state], len)
    }

    /// Goes on with a state for each of `parents`: the state of that number, or a fork of it where it is named again.
    /// Those that are not named are freed, and that first: their memory serves the forks.
    pub(super) fn keep(&mut self, parents: &[usize]) -> Result<(), D::Error> {
        let mut children = vec![0_usize; self.states.len()];
        for parent in parents {
            children[*parent] += 1;
        }
        let (mut freed, mut places) = (Ok(()), Vec::with_capacity(children.len()));
        for (state, children) in take(&mut self.states).into_iter().zip(children) {
            places.push(self.states.len());
            match children {
                0 => freed = freed.and(self.decoder.free(state)),
                _ => self.states.push(state),
            }
        }
        freed?;

        let mut taken = vec![false; self.states.len()];
        let mut order = Vec::with_capacity(parents.len());
        for parent in parents {
            let place = places[*parent];
            if taken[place] {
                let fork = self.decoder.fork(&self.states[place])?;
                order.push(self.states.len());
                self.states.push(fork);
            } else {
                taken[place] = true;
                order.push(place);
            }
        }
        let mut states: Vec<_> = take(&mut self.states).into_iter().map(Some).collect();
        self.states = order.into_iter().filter_map(|place| states[place].take()).collect();
        Ok(())
    }
}

impl<D: Decoder> Drop for Batch<D> {
    fn drop(&mut self) {
        for state in self.states.drain(..) {
            // Another error is on its way; this one would hide it.
            drop(self.decoder.free(state));
        }
    }
}
