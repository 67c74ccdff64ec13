//! Non-blocking calls of MPI: the memory that they use, whether they have ended, what their codes mean.
//!
//! A request that is given up at a deadline cannot be canceled safely: MPI may still read and write its memory, whenever the other
//! rank goes on. So requests never use memory of a caller, only [`Memory`], which is leaked with a request that is given up.

use mpi::ffi;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::raw::{c_char, c_int};

/// Bytes of one call. Counts and offsets of MPI are 32-bit numbers; more is transferred in several calls.
pub(crate) const PIECE: usize = 64 << 20;

/// A number of at most [`PIECE`], or a rank, for MPI.
pub(crate) fn int(number: usize) -> c_int {
    c_int::try_from(number).expect("a piece has less than 2^31 bytes, and a job fewer ranks")
}

/// What MPI reads and writes until a request ends. The memory of a `Vec` stays where it is when the `Vec` is moved.
#[derive(Default)]
pub(crate) struct Memory {
    pub(crate) send: Vec<u8>,
    pub(crate) receive: Vec<u8>,
    pub(crate) to: Layout,
    pub(crate) from: Layout,
}

impl Memory {
    /// What is sent: these ranges of `bytes`, one after another.
    pub(crate) fn pack(&mut self, bytes: &[u8], ranges: &[Range<usize>]) {
        self.send.clear();
        ranges.iter().for_each(|range| self.send.extend_from_slice(&bytes[range.clone()]));
        self.to.set(ranges);
    }

    /// Memory for what comes for such ranges.
    pub(crate) fn expect(&mut self, ranges: &[Range<usize>]) {
        let length = ranges.iter().map(Range::len).sum();
        if self.receive.len() < length {
            self.receive.resize(length, 0);
        }
        self.from.set(ranges);
    }

    /// Writes what has come to its ranges of `bytes`.
    pub(crate) fn unpack(&self, bytes: &mut [u8], ranges: &[Range<usize>]) {
        let mut rest = self.receive.as_slice();
        for range in ranges {
            let part;
            (part, rest) = rest.split_at(range.len());
            bytes[range.clone()].copy_from_slice(part);
        }
    }
}

/// The parts of all ranks in a buffer that has one after another.
#[derive(Default)]
pub(crate) struct Layout {
    pub(crate) counts: Vec<c_int>,
    pub(crate) starts: Vec<c_int>,
}

impl Layout {
    fn set(&mut self, ranges: &[Range<usize>]) {
        self.counts.clear();
        self.starts.clear();
        let mut start = 0;
        for range in ranges {
            self.counts.push(int(range.len()));
            self.starts.push(int(start));
            start += range.len();
        }
    }
}

/// Parts of `counts` bytes lie one after another: of each, bytes `at..at + step`, as ranges of the whole.
pub(crate) fn cut(counts: &[usize], at: usize, step: usize) -> Vec<Range<usize>> {
    let mut start = 0;
    let part = |count: &usize| {
        let range = start + at.min(*count)..start + (at + step).min(*count);
        start += count;
        range
    };
    counts.iter().map(part).collect()
}

/// The status of a request that has ended, `None` while it has not, or the code of an error.
///
/// # Safety
///
/// MPI is initialized, this is the thread that may call it, and the memory of the request is valid.
pub(crate) unsafe fn test(
    request: &mut ffi::MPI_Request,
) -> Result<Option<ffi::MPI_Status>, c_int> {
    let (mut ended, mut status) = (0, MaybeUninit::zeroed());
    // SAFETY: as the caller has promised; `ended` and `status` are written only during the call.
    let code = unsafe { ffi::MPI_Test(request, &raw mut ended, status.as_mut_ptr()) };
    if code != 0 {
        return Err(code);
    }
    // SAFETY: a status is integers, for which zeros (`MaybeUninit::zeroed`) are values as well.
    Ok((ended != 0).then(|| unsafe { status.assume_init() }))
}

/// What a return code means, in the words of the library.
///
/// # Safety
///
/// MPI is initialized, and this is the thread that may call it.
pub(crate) unsafe fn meaning(code: c_int) -> String {
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut length = 0;
    let into = text.as_mut_ptr().cast::<c_char>();
    // SAFETY: as the caller has promised; `text` is as long as the standard demands, `MPI_MAX_ERROR_STRING`.
    let told = unsafe { ffi::MPI_Error_string(code, into, &raw mut length) };
    let length = usize::try_from(length).unwrap_or(0).min(text.len());
    match told {
        0 => String::from_utf8_lossy(&text[..length]).into_owned(),
        _ => format!("error {code}, for which the library has no text"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_cut_at_offsets_beyond_32_bits() {
        let counts = [3 << 30, 0, 5, 1 << 32];
        let step = PIECE / counts.len();
        let mut next = [0, 3 << 30, 3 << 30, (3 << 30) + 5];
        let ends = [3 << 30, 3 << 30, (3 << 30) + 5, (7 << 30) + 5];
        for at in (0..1 << 32).step_by(step) {
            let ranges = cut(&counts, at, step);
            assert!(ranges.iter().map(Range::len).sum::<usize>() <= PIECE);
            for (next, range) in next.iter_mut().zip(ranges).filter(|(_, range)| !range.is_empty())
            {
                assert_eq!(range.start, *next);
                *next = range.end;
            }
        }
        assert_eq!(next, ends);
    }

    #[test]
    fn what_is_packed_by_one_is_unpacked_by_the_other() {
        let bytes: Vec<u8> = (0..40).collect();
        let (counts, mut memory, mut back) = ([7, 0, 30, 3], Memory::default(), vec![0; 40]);
        for at in (0..30).step_by(4) {
            let ranges = cut(&counts, at, 4);
            memory.pack(&bytes, &ranges);
            memory.expect(&ranges);
            assert_eq!(memory.to.counts, memory.from.counts);
            let sent = memory.send.len();
            memory.receive[..sent].copy_from_slice(&memory.send);
            memory.unpack(&mut back, &ranges);
        }
        assert_eq!(back, bytes);
        assert_eq!((memory.to.counts, memory.to.starts), (vec![0, 0, 2, 0], vec![0, 0, 0, 2]));
    }
}
