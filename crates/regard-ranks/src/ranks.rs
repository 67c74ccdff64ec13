//! Processes that work together, and what is built from their three calls.

use bytemuck::Pod;
use std::fmt;
use std::ops::Range;

/// Processes that work together. Every rank makes the same calls in the same order; a rank that fails is dropped, and the calls of the
/// others then fail as well.
///
/// Counts are bytes. All ranks of a job have the same byte order and floating-point format.
pub trait Ranks: fmt::Debug {
    /// Which one this is, from 0.
    fn rank(&self) -> usize;

    /// How many there are.
    fn count(&self) -> usize;

    /// Sends each rank its part of `send`, which is cut into `to`; what rank 0, 1, .. sent here is written to `receive`, which is cut
    /// into `from`. `MPI_Ialltoallv`.
    fn exchange(
        &self,
        send: &[u8],
        to: &[usize],
        receive: &mut [u8],
        from: &[usize],
    ) -> Result<(), RanksError>;

    /// Writes the parts of all ranks to `all`, one after another, `counts` long. `MPI_Iallgatherv`.
    fn gather(&self, mine: &[u8], counts: &[usize], all: &mut [u8]) -> Result<(), RanksError>;

    /// Sends to the next rank and receives from the one before it, in a ring, while `meanwhile` computes. `MPI_Isend`, `MPI_Irecv`.
    fn shift(
        &self,
        send: &[u8],
        receive: &mut [u8],
        meanwhile: &mut (dyn FnMut() + Send),
    ) -> Result<(), RanksError>;

    /// Seconds so far in which nothing was computed for the sake of communication: all of `exchange` and `gather`, and of `shift` what came after
    /// its computation. 0 where it is not measured.
    fn waited(&self) -> f64 {
        0.0
    }
}

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RanksError {
    /// Which rank tells.
    pub rank: usize,
    /// The call.
    pub call: String,
    /// What went wrong.
    pub why: String,
}

impl fmt::Display for RanksError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, call, why } = self;
        write!(f, "{call} on rank {rank}: {why}")
    }
}

impl std::error::Error for RanksError {}

impl RanksError {
    /// Whether ranks do not fit together: starting them again as they are would not help.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        self.call == AGREE
    }
}

/// What [`agree`] calls itself.
const AGREE: &str = "start";

/// One process.
#[derive(Clone, Copy, Debug)]
pub struct Alone;

impl Ranks for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn count(&self) -> usize {
        1
    }

    fn exchange(
        &self,
        send: &[u8],
        _: &[usize],
        receive: &mut [u8],
        _: &[usize],
    ) -> Result<(), RanksError> {
        receive.copy_from_slice(send);
        Ok(())
    }

    fn gather(&self, mine: &[u8], _: &[usize], all: &mut [u8]) -> Result<(), RanksError> {
        all.copy_from_slice(mine);
        Ok(())
    }

    fn shift(
        &self,
        send: &[u8],
        receive: &mut [u8],
        meanwhile: &mut (dyn FnMut() + Send),
    ) -> Result<(), RanksError> {
        receive.copy_from_slice(send);
        meanwhile();
        Ok(())
    }
}

/// The run of `items` that a rank gets: all of them are dealt, in order, and no rank has more than one more than another.
#[must_use]
pub fn share(items: usize, rank: usize, count: usize) -> Range<usize> {
    rank * items / count..(rank + 1) * items / count
}

/// How many of `items` each rank gets.
#[must_use]
pub fn shares(items: usize, count: usize) -> Vec<usize> {
    (0..count).map(|rank| share(items, rank, count).len()).collect()
}

/// The numbers of all ranks, in their order; `counts` says how many each has.
pub fn gather<T: Pod>(
    ranks: &dyn Ranks,
    mine: &[T],
    counts: &[usize],
) -> Result<Vec<T>, RanksError> {
    let mut all = vec![T::zeroed(); counts.iter().sum()];
    let bytes: Vec<usize> = counts.iter().map(|count| count * size_of::<T>()).collect();
    ranks.gather(bytemuck::cast_slice(mine), &bytes, bytemuck::cast_slice_mut(&mut all))?;
    Ok(all)
}

/// What all ranks have, where none knows how long the others' is.
pub fn gather_varied(ranks: &dyn Ranks, mine: &[u8]) -> Result<Vec<Vec<u8>>, RanksError> {
    let lengths = gather(ranks, &[mine.len()], &vec![1; ranks.count()])?;
    let mut all = vec![0; lengths.iter().sum()];
    ranks.gather(mine, &lengths, &mut all)?;
    let mut rest = all.as_slice();
    let mut part = |length: &usize| {
        let (part, behind) = rest.split_at(*length);
        rest = behind;
        part.to_vec()
    };
    Ok(lengths.iter().map(&mut part).collect())
}

/// What rank 0 has; what the others give is not looked at.
pub fn broadcast(ranks: &dyn Ranks, bytes: Vec<u8>) -> Result<Vec<u8>, RanksError> {
    let first = ranks.rank() == 0;
    let mine = if first { bytes.as_slice() } else { &[] };
    let length = gather(ranks, &[mine.len()], &vec![1; ranks.count()])?[0];
    let mut counts = vec![0; ranks.count()];
    counts[0] = length;
    let mut all = vec![0; length];
    ranks.gather(mine, &counts, &mut all)?;
    Ok(all)
}

/// Whether it is so on any rank.
pub fn any(ranks: &dyn Ranks, mine: bool) -> Result<bool, RanksError> {
    Ok(gather(ranks, &[u8::from(mine)], &vec![1; ranks.count()])?.contains(&1))
}

/// Refuses to go on where ranks differ in something that would change the result.
pub fn agree(ranks: &dyn Ranks, what: &str, mine: &str) -> Result<(), RanksError> {
    let all = gather_varied(ranks, mine.as_bytes())?;
    let Some(other) = all.iter().position(|value| *value != all[0]) else { return Ok(()) };
    let [first, second] = [0, other].map(|rank| String::from_utf8_lossy(&all[rank]));
    let why = format!(
        "{what} is {first} on rank 0 and {second} on rank {other}, and results would differ; make them the same on every machine"
    );
    Err(RanksError { rank: ranks.rank(), call: AGREE.into(), why })
}
