//! One round: rows and keys in bucket order, and the pairs that are candidates in no earlier round.

use super::buckets::{Buckets, starts};
use super::index;
use super::rows::{ROWS, nothing};
use regard::mask::Bits;
use regard::problem::Dims;
use regard::{Error, Machine, Mask};
use std::ops::Range;

/// Bits of a word, one per key.
const WORD_BITS: usize = 64;

/// An order of rows or keys, and its inverse.
#[derive(Debug)]
pub(super) struct Permutation {
    /// The index at each rank.
    pub(super) order: Vec<u32>,
    /// The rank of each index.
    pub(super) ranks: Vec<u32>,
}

impl Permutation {
    fn new(ranks: Vec<u32>) -> Self {
        let mut order = vec![0; ranks.len()];
        (0..).zip(&ranks).for_each(|(i, rank)| order[*rank as usize] = i);
        Self { order, ranks }
    }
}

/// Bucket order and candidate mask of one round.
#[derive(Debug)]
pub(super) struct Round {
    /// For each KV head of each item.
    pub(super) keys: Vec<Permutation>,
    /// For each query head of each item.
    pub(super) rows: Vec<Permutation>,
    /// Candidate pairs in this order.
    pub(super) mask: Mask,
}

impl Round {
    pub(super) fn new(buckets: &Buckets, machine: Machine, round: usize) -> Result<Self, Error> {
        let Dims { batch, heads, k_len, .. } = buckets.dims();
        let keys = machine.collect(batch * heads.kv, nothing, |(), head| {
            Permutation::new(buckets.key_ranks(round, head).to_vec())
        });
        let scratch = || vec![0; k_len.div_ceil(buckets.size)];
        // Counting sort of the rows by block, then by position.
        let rows = machine.collect(buckets.heads(), scratch, |next, head| {
            let blocks = || buckets.blocks(round, head).iter().map(|block| *block as usize);
            starts(next, blocks());
            let rank = |block: usize| {
                next[block] += 1;
                next[block] - 1
            };
            Permutation::new(blocks().map(rank).collect())
        });
        let mask = candidates(buckets, machine, round, (&keys, &rows))?;
        Ok(Self { keys, rows, mask })
    }
}

/// Mask of the candidate pairs of `round`, in bucket order. Excludes candidates of earlier rounds, so that every pair counts
/// once.
fn candidates(
    buckets: &Buckets,
    machine: Machine,
    round: usize,
    (keys, rows): (&[Permutation], &[Permutation]),
) -> Result<Mask, Error> {
    let Dims { batch, heads, q_len, k_len, .. } = buckets.dims();
    let all_words = k_len.div_ceil(WORD_BITS);
    // For the keys of a KV head in bucket order: their indices, then their ranks in each earlier round.
    let lists = machine.collect(keys.len() * (1 + round), nothing, |(), i| {
        let (head, earlier) = (i / (1 + round), (i % (1 + round)).checked_sub(1));
        let ranks = earlier.map(|earlier| buckets.key_ranks(earlier, head));
        let of_key = |key: &u32| ranks.map_or(*key, |ranks| ranks[*key as usize]);
        let mut list: Vec<u32> = keys[head].order.iter().map(of_key).collect();
        list.resize(all_words * WORD_BITS, 0);
        list
    });
    // A window need not start at the first key of a word.
    let width = (buckets.window_keys().div_ceil(WORD_BITS) + 1).min(all_words);
    let row = |i: usize| (i / q_len, rows[i / q_len].order[i % q_len] as usize);
    let first = |(head, row)| buckets.window(round, head, row).start / WORD_BITS;
    let all_rows = buckets.heads() * q_len;
    let words = machine.collect(all_rows.div_ceil(ROWS), Vec::new, |excluded, block| {
        let own = block * ROWS..all_rows.min((block + 1) * ROWS);
        let mut words = vec![0; own.len() * width];
        for ((head, row), words) in own.map(row).zip(words.chunks_exact_mut(width)) {
            let window = |round| buckets.window(round, head, row);
            // Later keys, and the row's windows of earlier rounds.
            excluded.clear();
            excluded.push(index(buckets.keys_before(row))..u32::MAX);
            excluded.extend((0..round).map(window).map(|w| index(w.start)..index(w.end)));
            let lists = &lists[head / buckets.served() * (1 + round)..][..1 + round];
            let own = window(round);
            for (word, to) in (own.start / WORD_BITS..).zip(words) {
                *to = within(&own, word * WORD_BITS);
                if *to != 0 {
                    let lists = lists.iter().map(|list| &list.as_chunks().0[word]);
                    *to &= !inside(lists.zip(&*excluded));
                }
            }
        }
        words
    });
    let firsts: Vec<usize> = (0..all_rows).map(row).map(first).collect();
    let shape = [batch, heads.q, q_len, k_len];
    Ok(Mask::bits(Bits::windowed(&firsts, &words.concat(), shape)?))
}

/// Bits of a range in the word that starts at `at`.
fn within(range: &Range<usize>, at: usize) -> u64 {
    let bit = |n: usize| 1u64.checked_shl(index(n.saturating_sub(at)));
    let below = |n| bit(n).map_or(u64::MAX, |bit| bit - 1);
    below(range.end) & !below(range.start)
}

/// Bit `i` is set if entry `i` of any list lies in the range given with that list. GenerationOutput so that the loops over the entries
/// vectorize.
fn inside<'l>(lists: impl Iterator<Item = (&'l [u32; WORD_BITS], &'l Range<u32>)>) -> u64 {
    let mut inside = [0u8; WORD_BITS];
    for (list, &Range { start, end }) in lists {
        for (inside, place) in inside.iter_mut().zip(list) {
            *inside |= u8::from(place.wrapping_sub(start) < end - start);
        }
    }
    // The product moves the lowest bit of byte `i` to bit `56 + i`.
    let bits =
        |bytes: &[u8; 8]| u64::from_le_bytes(*bytes).wrapping_mul(0x0102_0408_1020_4080) >> 56;
    inside.as_chunks().0.iter().rev().fold(0, |word, bytes| word << 8 | bits(bytes))
}
