//! Candidate selection of LSH attention: keys sorted by bucket, and the rank of each query in that order.

use super::LshAttention;
use super::candidates::{Lists, WORD_BITS, candidate_pairs};
use super::hash::Hash;
use crate::description::mask::Mask;
use crate::description::problem::Dims;
use crate::error::Error;
use crate::machine::Machine;
use crate::machine::simd::Element;
use crate::tensor::view::{View, ViewMut};
use std::ops::Range;

/// Candidate keys of each query, over all rounds. Stores one `u32` per round and query or key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buckets {
    pub(super) how: Neighbours,
    rounds: usize,
    pub(super) dims: Dims,
    /// For each round, item and KV head: the rank of each key in the sorted order, then, for each row of the query heads
    /// that use it, the block of that order that contains the row's rank.
    lists: Vec<u32>,
}

/// Which sorted keys are candidates of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Neighbours {
    size: usize,
    causal: bool,
}

impl Neighbours {
    /// Ranks of the keys of a block and of both adjacent blocks. The following block is left out if causal: within a
    /// bucket, keys ranked after the row have later positions.
    pub(super) fn window(self, block: u32, k_len: usize) -> Range<usize> {
        let block = block as usize;
        let end = block.saturating_add(if self.causal { 1 } else { 2 });
        let start = block.saturating_sub(1).saturating_mul(self.size);
        start.min(k_len)..end.saturating_mul(self.size).min(k_len)
    }

    /// Number of words that hold the bits of any window.
    pub(super) fn words(self, k_len: usize) -> usize {
        let keys = self.size.saturating_mul(if self.causal { 2 } else { 3 }).min(k_len);
        (keys.div_ceil(WORD_BITS) + 1).min(k_len.div_ceil(WORD_BITS))
    }
}

impl Buckets {
    /// Hashes queries and keys, and sorts the keys in each round.
    pub(super) fn new<E: Element>(
        lsh: &LshAttention,
        machine: Machine,
        dims: Dims,
        (q, k): (View<'_, E>, View<'_, E>),
    ) -> Result<Self, Error> {
        let Dims { batch, heads, q_len, k_len, .. } = dims;
        let (rounds, size) = (lsh.rounds, lsh.bucket_size);
        let hash = Hash::<E::Num>::new(lsh.seed, rounds, k_len.div_ceil(size), dims.qk_dim);
        let (q_codes, k_codes) = (hash.of(machine, q)?, hash.of(machine, k)?);
        let served = heads.q.checked_div(heads.kv).unwrap_or(0);
        let each = k_len + served.saturating_mul(q_len);
        let items = batch * heads.kv;
        let count = [items, each].iter().try_fold(rounds, |n: usize, x| n.checked_mul(*x));
        let shape = [batch, heads.kv, each, rounds];
        let mut lists = vec![0; count.ok_or(Error::ShapeOverflow { shape })?];
        let mut view = ViewMut::bhsd(&mut lists, [rounds * items, 1, 1, each])?;
        view.change(
            machine.threads,
            1,
            || vec![0; hash.buckets() + 1],
            |next, i, mut list| {
                let (round, item) = (i / items, i % items);
                let of = |codes: &'_ [u32], rows: usize, row: usize| {
                    codes[(item * rows + row) * rounds + round] as usize
                };
                let sort = Sort { q_len, k_len, size };
                let key = |j| of(&k_codes, k_len, j);
                sort.run(next, list.update(0, 0), key, |row| of(&q_codes, served * q_len, row));
            },
        );
        let how = Neighbours { size, causal: lsh.causal };
        Ok(Self { how, rounds, dims, lists })
    }

    /// Dimensions of the call.
    #[must_use]
    pub fn dims(&self) -> Dims {
        self.dims
    }

    /// Number of hash rounds.
    #[must_use]
    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// Whether a query attends to a key: the key is a candidate in some round and, if causal, is not at a later position.
    ///
    /// # Panics
    /// If an index is out of range.
    #[must_use]
    pub fn is_visible(&self, batch: usize, head: usize, row: usize, key: usize) -> bool {
        let Dims { batch: items, heads, q_len, k_len, .. } = self.dims;
        assert!(batch < items && head < heads.q && row < q_len && key < k_len);
        let kv_head = head / (heads.q / heads.kv);
        let met = |round| {
            let place = self.places(round, batch, kv_head)[key] as usize;
            self.how.window(self.blocks(round, batch, head)[row], k_len).contains(&place)
        };
        key < self.keys_before(row) && (0..self.rounds).any(met)
    }

    /// Number of leading keys that the causal mask leaves visible to a row; all keys if not causal.
    pub(super) fn keys_before(&self, row: usize) -> usize {
        let Dims { q_len, k_len, .. } = self.dims;
        if self.how.causal { (row + k_len + 1).saturating_sub(q_len) } else { k_len }
    }

    fn list(&self, round: usize, batch: usize, kv_head: usize) -> &[u32] {
        let Dims { batch: items, heads, q_len, k_len, .. } = self.dims;
        let each = k_len + heads.q / heads.kv * q_len;
        &self.lists[((round * items + batch) * heads.kv + kv_head) * each..][..each]
    }

    /// Rank of each key of a head in the sorted order of a round.
    pub(super) fn places(&self, round: usize, batch: usize, kv_head: usize) -> &[u32] {
        &self.list(round, batch, kv_head)[..self.dims.k_len]
    }

    /// Block of the sorted keys that contains the rank of each row of a query head.
    pub(super) fn blocks(&self, round: usize, batch: usize, head: usize) -> &[u32] {
        let Dims { heads, q_len, k_len, .. } = self.dims;
        let served = heads.q / heads.kv;
        &self.list(round, batch, head / served)[k_len + head % served * q_len..][..q_len]
    }

    /// Rows and keys in the bucket order of a round, and the mask of the pairs that become candidates in this round for the
    /// first time.
    pub(super) fn round(&self, machine: Machine, round: usize) -> Result<Round, Error> {
        let Dims { batch, heads, q_len, k_len, .. } = self.dims;
        let mut keys = Lists::new([batch, heads.kv, k_len]);
        keys.fill(machine, Vec::new, |_: &mut Vec<u32>, (b, head), keys| {
            for (key, place) in (0..).zip(self.places(round, b, head)) {
                keys[*place as usize] = key;
            }
        })?;
        let blocks = k_len.div_ceil(self.how.size);
        let mut rows = Lists::new([batch, heads.q, 2 * q_len]);
        rows.fill(
            machine,
            || vec![0; blocks.max(1)],
            |next, (b, head), lists| {
                let (rows, places) = lists.split_at_mut(q_len);
                let blocks = self.blocks(round, b, head);
                count(next, blocks.iter().map(|block| *block as usize));
                for ((row, block), place) in (0..).zip(blocks).zip(places) {
                    *place = next[*block as usize];
                    rows[*place as usize] = row;
                    next[*block as usize] += 1;
                }
            },
        )?;
        let mask = Mask::bits(candidate_pairs(self, machine, round, (&keys, &rows))?);
        Ok(Round { order: Order { keys, rows, q_len }, mask })
    }
}

/// Counting sort of the keys of a head by bucket, then by position. Also computes the rank that each row would have among
/// the keys.
struct Sort {
    q_len: usize,
    k_len: usize,
    size: usize,
}

impl Sort {
    /// `next` holds at least one entry per bucket and is overwritten. For `list`, see [`Buckets::lists`]. `key` and `row`
    /// return bucket numbers.
    fn run(
        &self,
        next: &mut [u32],
        list: &mut [u32],
        key: impl Fn(usize) -> usize,
        row: impl Fn(usize) -> usize,
    ) {
        let Self { q_len, k_len, size } = *self;
        let (places, blocks) = list.split_at_mut(k_len);
        count(next, (0..k_len).map(&key));
        let last = k_len.saturating_sub(1);
        let mut stand = |next: &[u32], i: usize| {
            for at in (i..blocks.len()).step_by(q_len) {
                let place = next[row(at)] as usize;
                blocks[at] = u32::try_from(place.min(last) / size).unwrap_or(0);
            }
        };
        // The last row is aligned with the last key, so the first rows may precede all keys.
        (0..q_len.saturating_sub(k_len)).for_each(|i| stand(next, i));
        for j in 0..k_len {
            if let Some(i) = (j + q_len).checked_sub(k_len) {
                stand(next, i);
            }
            places[j] = next[key(j)];
            next[key(j)] += 1;
        }
    }
}

/// First rank of each bucket in the sorted order: exclusive prefix sum of the bucket sizes.
fn count(next: &mut [u32], buckets: impl Iterator<Item = usize>) {
    next.fill(0);
    buckets.for_each(|bucket| next[bucket] += 1);
    let mut sum = 0;
    next.iter_mut().for_each(|n| (*n, sum) = (sum, sum + *n));
}

/// Bucket order and candidate mask of one round.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) order: Order,
    /// Mask over rows and keys in this order.
    pub(super) mask: Mask,
}

/// Rows and keys in bucket order.
#[derive(Debug)]
pub(super) struct Order {
    keys: Lists,
    /// The rows in order, followed by the rank of each row.
    rows: Lists,
    q_len: usize,
}

impl Order {
    /// Keys of a head in bucket order.
    pub(super) fn keys(&self, batch: usize, kv_head: usize) -> &[u32] {
        self.keys.of(batch, kv_head)
    }

    /// Rows of a head in bucket order.
    pub(super) fn rows(&self, batch: usize, head: usize) -> &[u32] {
        &self.rows.of(batch, head)[..self.q_len]
    }

    /// Rank of a row; rows and ranks are indexed over all items and heads.
    pub(super) fn place(&self, row: usize) -> usize {
        let [item, i] = [row / self.q_len, row % self.q_len];
        item * self.q_len + self.rows.data[(2 * item + 1) * self.q_len + i] as usize
    }

    /// Rank of each row of a head.
    pub(super) fn row_places(&self, batch: usize, head: usize) -> &[u32] {
        &self.rows.of(batch, head)[self.q_len..]
    }
}
