//! The states of a call: they are fed together, and freed whatever happens.

use super::{Decoder, GenerateError};
use std::mem::take;

/// All states that are alive. Dropping it frees them: on errors, and on panics of `on_token`.
pub(super) struct Batch<'d, D: Decoder> {
    decoder: &'d mut D,
    states: Vec<D::State>,
}

impl<'d, D: Decoder> Batch<'d, D> {
    /// An empty state for each of so many rows.
    pub(super) fn start(decoder: &'d mut D, rows: usize) -> Result<Self, D::Error> {
        let mut batch = Self { decoder, states: Vec::with_capacity(rows) };
        for row in 0..rows {
            let state = batch.decoder.start(row)?;
            batch.states.push(state);
        }
        Ok(batch)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// Feeds every state; scores `[states, vocab]`.
    pub(super) fn feed(&mut self, tokens: &[&[u32]]) -> Result<Vec<f32>, D::Error> {
        let scores = self.decoder.feed(&mut self.states, tokens)?;
        self.check(scores, self.states.len())
    }

    /// The same with scores of every token; none if the decoder cannot.
    pub(super) fn feed_all(&mut self, tokens: &[&[u32]]) -> Result<Option<Vec<f32>>, D::Error> {
        let Some(scores) = self.decoder.feed_all(&mut self.states, tokens)? else {
            return Ok(None);
        };
        self.check(scores, tokens.iter().map(|tokens| tokens.len()).sum()).map(Some)
    }

    fn check(&self, scores: Vec<f32>, states: usize) -> Result<Vec<f32>, D::Error> {
        let (got, vocab) = (scores.len(), self.decoder.vocab());
        match states.checked_mul(vocab) == Some(got) {
            true => Ok(scores),
            false => Err(GenerateError::Scores { got, states, vocab }.into()),
        }
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

impl<D: Decoder> Drop for Batch<'_, D> {
    fn drop(&mut self) {
        for state in self.states.drain(..) {
            // Another error is on its way; this one would hide it.
            drop(self.decoder.free(state));
        }
    }
}
