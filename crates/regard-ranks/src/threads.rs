//! Ranks that are threads of one process, with a channel from each to each: for tests of what is built on [`Ranks`].

use crate::ranks::{Ranks, RanksError};
use std::sync::mpsc::{Receiver, Sender, channel};

/// One rank of several that are threads. Dropping one ends the calls of the others with an error.
#[derive(Debug)]
pub struct Threads {
    rank: usize,
    to: Vec<Sender<Vec<u8>>>,
    from: Vec<Receiver<Vec<u8>>>,
}

impl Threads {
    /// `count` ranks, each for a thread of its own.
    #[must_use]
    pub fn new(count: usize) -> Vec<Self> {
        let mut all: Vec<Self> =
            (0..count).map(|rank| Self { rank, to: vec![], from: vec![] }).collect();
        for from in 0..count {
            for to in 0..count {
                let (sender, receiver) = channel();
                all[from].to.push(sender);
                all[to].from.push(receiver);
            }
        }
        all
    }

    fn send(&self, call: &str, to: usize, bytes: &[u8]) -> Result<(), RanksError> {
        self.to[to].send(bytes.to_vec()).map_err(|_| self.gone(call, to))
    }

    fn receive(&self, call: &str, from: usize, into: &mut [u8]) -> Result<(), RanksError> {
        let bytes = self.from[from].recv().map_err(|_| self.gone(call, from))?;
        if bytes.len() != into.len() {
            let why = format!("{} bytes from rank {from}, not {}", bytes.len(), into.len());
            return Err(RanksError { rank: self.rank, call: call.into(), why });
        }
        into.copy_from_slice(&bytes);
        Ok(())
    }

    fn gone(&self, call: &str, other: usize) -> RanksError {
        let why = format!("rank {other} has ended");
        RanksError { rank: self.rank, call: call.into(), why }
    }
}

impl Ranks for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn count(&self) -> usize {
        self.to.len()
    }

    fn exchange(
        &self,
        mut send: &[u8],
        to: &[usize],
        mut receive: &mut [u8],
        from: &[usize],
    ) -> Result<(), RanksError> {
        for (rank, length) in to.iter().enumerate() {
            let part;
            (part, send) = send.split_at(*length);
            self.send("exchange", rank, part)?;
        }
        for (rank, length) in from.iter().enumerate() {
            let part;
            (part, receive) = receive.split_at_mut(*length);
            self.receive("exchange", rank, part)?;
        }
        Ok(())
    }

    fn gather(&self, mine: &[u8], counts: &[usize], all: &mut [u8]) -> Result<(), RanksError> {
        let to_each = vec![mine.len(); self.count()];
        self.exchange(&mine.repeat(self.count()), &to_each, all, counts)
    }

    fn shift(
        &self,
        send: &[u8],
        receive: &mut [u8],
        meanwhile: &mut (dyn FnMut() + Send),
    ) -> Result<(), RanksError> {
        let (rank, count) = (self.rank, self.count());
        self.send("shift", (rank + 1) % count, send)?;
        meanwhile();
        self.receive("shift", (rank + count - 1) % count, receive)
    }
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "numbers of ranks and parts are small")]
mod tests {
    use super::*;
    use crate::ranks::{agree, any, broadcast, gather, gather_varied};

    /// What a function returns on each of `count` ranks.
    fn on<T: Send>(count: usize, work: impl Fn(Threads) -> T + Sync) -> Vec<T> {
        let work = &work;
        std::thread::scope(|scope| {
            let own = |ranks| scope.spawn(move || work(ranks));
            let threads: Vec<_> = Threads::new(count).into_iter().map(own).collect();
            threads.into_iter().map(|thread| thread.join().expect("it ends")).collect()
        })
    }

    #[test]
    fn every_call_brings_what_the_others_have_in_the_order_of_ranks() {
        for count in [1, 2, 3, 5] {
            on(count, |ranks| {
                let rank = ranks.rank();
                let own = vec![rank as u32; rank];
                let counts: Vec<usize> = (0..count).collect();
                let wanted: Vec<u32> = (0..count).flat_map(|r| vec![r as u32; r]).collect();
                assert_eq!(gather(&ranks, &own, &counts), Ok(wanted));
                let texts = gather_varied(&ranks, "x".repeat(rank).as_bytes()).expect("texts");
                assert!(texts.iter().enumerate().all(|(r, text)| text.len() == r));
                assert_eq!(broadcast(&ranks, vec![rank as u8 + 7; 3]), Ok(vec![7; 3]));
                assert_eq!(any(&ranks, rank + 1 == count), Ok(true));
                assert_eq!(any(&ranks, false), Ok(false));
                // To rank r goes r + 1 times the number of the sender.
                let to: Vec<usize> = (1..=count).collect();
                let send = vec![rank as u8; to.iter().sum()];
                let mut receive = vec![0; count * (rank + 1)];
                ranks.exchange(&send, &to, &mut receive, &vec![rank + 1; count]).expect("bytes");
                assert!(
                    receive.chunks(rank + 1).enumerate().all(|(r, part)| part[0] as usize == r)
                );
                let (mut before, mut computed) = ([0], false);
                ranks.shift(&[rank as u8], &mut before, &mut || computed = true).expect("a byte");
                assert_eq!((before[0] as usize, computed), ((rank + count - 1) % count, true));
            });
        }
    }

    #[test]
    fn ranks_that_differ_are_told_with_both_values() {
        let told = on(3, |ranks| {
            let isa = if ranks.rank() == 2 { "avx2" } else { "amx" };
            agree(&ranks, "the instruction set", "amx").expect("the same");
            agree(&ranks, "the instruction set", isa).expect_err("another").to_string()
        });
        assert!(told.iter().all(|text| text.contains("amx on rank 0 and avx2 on rank 2")));
    }

    #[test]
    fn a_rank_that_ends_ends_the_calls_of_the_others() {
        let ended = on(3, |ranks| {
            if ranks.rank() == 1 {
                return Ok(false);
            }
            any(&ranks, true)
        });
        let told = ended[0].as_ref().expect_err("it waits no longer").to_string();
        assert_eq!(told, "exchange on rank 0: rank 1 has ended");
        assert!(ended[2].is_err());
    }
}
