//! The pasts of a call: they are fed together, and freed whatever happens.

use super::{Decoder, GenerateError};
use std::mem::take;

/// All pasts that are alive. Dropping it frees them: on errors, and on panics of `on_token`.
pub(super) struct Batch<'d, D: Decoder> {
    decoder: &'d mut D,
    pasts: Vec<D::Past>,
}

impl<'d, D: Decoder> Batch<'d, D> {
    /// An empty past for each of so many rows.
    pub(super) fn start(decoder: &'d mut D, rows: usize) -> Result<Self, D::Error> {
        let mut batch = Self { decoder, pasts: Vec::with_capacity(rows) };
        for row in 0..rows {
            let past = batch.decoder.start(row)?;
            batch.pasts.push(past);
        }
        Ok(batch)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pasts.is_empty()
    }

    /// Feeds every past; scores `[pasts, vocab]`.
    pub(super) fn feed(&mut self, tokens: &[&[u32]]) -> Result<Vec<f32>, D::Error> {
        let scores = self.decoder.feed(&mut self.pasts, tokens)?;
        let (got, pasts, vocab) = (scores.len(), self.pasts.len(), self.decoder.vocab());
        match pasts.checked_mul(vocab) == Some(got) {
            true => Ok(scores),
            false => Err(GenerateError::Scores { got, pasts, vocab }.into()),
        }
    }

    /// Goes on with a past for each of `parents`: the past of that number, or a fork of it where it is named again.
    /// Those that are not named are freed, and that first: their memory serves the forks.
    pub(super) fn keep(&mut self, parents: &[usize]) -> Result<(), D::Error> {
        let mut children = vec![0_usize; self.pasts.len()];
        for parent in parents {
            children[*parent] += 1;
        }
        let (mut freed, mut places) = (Ok(()), Vec::with_capacity(children.len()));
        for (past, children) in take(&mut self.pasts).into_iter().zip(children) {
            places.push(self.pasts.len());
            match children {
                0 => freed = freed.and(self.decoder.free(past)),
                _ => self.pasts.push(past),
            }
        }
        freed?;

        let mut taken = vec![false; self.pasts.len()];
        let mut order = Vec::with_capacity(parents.len());
        for parent in parents {
            let place = places[*parent];
            if taken[place] {
                let fork = self.decoder.fork(&self.pasts[place])?;
                order.push(self.pasts.len());
                self.pasts.push(fork);
            } else {
                taken[place] = true;
                order.push(place);
            }
        }
        let mut pasts: Vec<_> = take(&mut self.pasts).into_iter().map(Some).collect();
        self.pasts = order.into_iter().filter_map(|place| pasts[place].take()).collect();
        Ok(())
    }
}

impl<D: Decoder> Drop for Batch<'_, D> {
    fn drop(&mut self) {
        for past in self.pasts.drain(..) {
            // Another error is on its way; this one would hide it.
            drop(self.decoder.free(past));
        }
    }
}
