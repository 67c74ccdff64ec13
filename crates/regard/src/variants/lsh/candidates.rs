//! Candidate pairs of a round that are candidates in no earlier round, one bit each.

use super::buckets::Buckets;
use crate::description::mask::Bits;
use crate::description::problem::Dims;
use crate::error::Error;
use crate::machine::Machine;
use crate::machine::simd::{Number, Simd, Task};
use crate::tensor::view::{TileMut, ViewMut};
use std::ops::Range;

/// Bits of a word, one per key.
pub(super) const WORD_BITS: usize = 64;

/// Mask of the candidate pairs of `round`, in bucket order. Excludes candidates of earlier rounds, so that every pair
/// counts once.
pub(super) fn candidate_pairs(
    buckets: &Buckets,
    machine: Machine,
    round: usize,
    (keys, rows): (&Lists, &Lists),
) -> Result<Bits, Error> {
    let Dims { batch, heads, q_len, k_len, .. } = buckets.dims;
    let padded = k_len.next_multiple_of(WORD_BITS);
    // For the keys in bucket order: their indices, then their ranks in each earlier round.
    let mut before = Lists::new([batch * heads.kv, 1 + round, padded]);
    before.fill(machine, Vec::new, |_: &mut Vec<u32>, (item, earlier), list| {
        let (b, head) = (item / heads.kv, item % heads.kv);
        let keys = keys.of(b, head);
        match earlier.checked_sub(1) {
            None => list[..k_len].copy_from_slice(keys),
            Some(earlier) => {
                let places = buckets.places(earlier, b, head);
                let each = list.iter_mut().zip(keys);
                each.for_each(|(place, key)| *place = places[*key as usize]);
            }
        }
    })?;
    let width = buckets.how.words(k_len);
    let mut words = vec![0; batch * heads.q * q_len * (1 + width)];
    let mut view = ViewMut::bhsd(&mut words, [batch, heads.q, q_len, 1 + width])?;
    view.change(machine.threads, WORD_BITS, Vec::new, |windows, batch, tile| {
        let before = &before;
        f32::enter(machine.isa, See { buckets, rows, before, batch, windows, tile });
    });
    let each = words.chunks_exact(1 + width);
    let first = |row: &[u64]| usize::try_from(row[0]).unwrap_or(usize::MAX);
    let firsts: Vec<usize> = each.clone().map(first).collect();
    let words: Vec<u64> = each.flat_map(|row| &row[1..]).copied().collect();
    Bits::windowed(&firsts, &words, [batch, heads.q, q_len, k_len])
}

/// Computes the bits of some rows.
struct See<'t, 'v> {
    buckets: &'t Buckets,
    rows: &'t Lists,
    /// For each KV head, in the order of this round: the key indices, then the ranks of the keys in each earlier round.
    before: &'t Lists,
    batch: usize,
    windows: &'t mut Vec<Range<u32>>,
    tile: TileMut<'v, u64>,
}

impl<N: Number> Task<N> for See<'_, '_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(self, _: S) {
        let Self { buckets, rows, before, batch, windows, mut tile } = self;
        let Dims { heads, k_len, .. } = buckets.dims;
        let (of, [_, lists, _]) = (tile.rows(), before.sizes);
        for (head, lane) in (0..heads.q).flat_map(|h| (0..of.count).map(move |i| (h, i))) {
            let item = batch * heads.kv + head / (heads.q / heads.kv);
            let row = rows.of(batch, head)[of.row(lane)] as usize;
            let window = |round: usize| {
                let block = buckets.blocks(round, batch, head)[row];
                buckets.how.window(block, k_len)
            };
            // Ranges to exclude: later keys, then the row's windows of earlier rounds.
            windows.clear();
            windows.push(index(buckets.keys_before(row))..u32::MAX);
            windows.extend((0..lists - 1).map(window).map(|w| index(w.start)..index(w.end)));
            let (own, to) = (window(lists - 1), tile.update(head, lane));
            let first = own.start / WORD_BITS;
            to[0] = first as u64;
            for (i, to) in to[1..].iter_mut().enumerate() {
                *to = within(&own, (first + i) * WORD_BITS);
                if *to != 0 {
                    let hides = |(list, window): (usize, &Range<u32>)| {
                        let list = before.of(item, list)[(first + i) * WORD_BITS..].first_chunk();
                        (list, window.clone())
                    };
                    *to &= !hidden(windows.iter().enumerate().map(hides));
                }
            }
        }
    }
}

/// Ranks fit into `u32`: `LshAttention::check` limits the number of keys.
fn index(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX)
}

/// Bits of a range in the word that starts at `at`.
fn within(range: &Range<usize>, at: usize) -> u64 {
    let below = |n: usize| match n.saturating_sub(at) {
        n if n >= WORD_BITS => u64::MAX,
        n => (1 << n) - 1,
    };
    below(range.end) & !below(range.start)
}

/// Bit `i` is set if entry `i` of any list lies in the range given with that list.
#[inline(always)]
fn hidden<'l>(lists: impl Iterator<Item = (Option<&'l [u32; WORD_BITS]>, Range<u32>)>) -> u64 {
    let mut inside = [0u32; WORD_BITS];
    for (list, Range { start, end }) in lists {
        let Some(list) = list else { continue };
        for (inside, place) in inside.iter_mut().zip(list) {
            *inside |= u32::from(place.wrapping_sub(start) < end - start);
        }
    }
    inside.iter().enumerate().fold(0, |bits, (i, inside)| bits | u64::from(*inside) << i)
}

/// One list per item and head, `[batch, heads, len]`.
#[derive(Debug)]
pub(super) struct Lists {
    pub(super) data: Vec<u32>,
    sizes: [usize; 3],
}

impl Lists {
    pub(super) fn new(sizes: [usize; 3]) -> Self {
        Self { data: vec![0; sizes.iter().product()], sizes }
    }

    pub(super) fn of(&self, batch: usize, head: usize) -> &[u32] {
        let [_, heads, len] = self.sizes;
        &self.data[(batch * heads + head) * len..][..len]
    }

    /// Fills the lists in parallel, one task per list.
    pub(super) fn fill<M>(
        &mut self,
        machine: Machine,
        scratch: impl Fn() -> M + Sync,
        task: impl Fn(&mut M, (usize, usize), &mut [u32]) + Sync,
    ) -> Result<(), Error> {
        let [batch, heads, len] = self.sizes;
        let mut view = ViewMut::bhsd(&mut self.data, [batch * heads, 1, 1, len])?;
        view.change(machine.threads, 1, scratch, |scratch, i, mut list| {
            task(scratch, (i / heads, i % heads), list.update(0, 0));
        });
        Ok(())
    }
}
