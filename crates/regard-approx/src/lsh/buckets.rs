//! Candidate selection of LSH attention: keys sorted by bucket, and the rank of each query in that order.

use super::LshAttention;
use super::hash::Hash;
use super::index;
use regard::mask::MaskRule;
use regard::problem::{Dims, Scope};
use regard::{Element, Machine, Mask, View};
use std::fmt;
use std::ops::Range;

/// Candidate keys of each query, over all rounds. Stores one `u32` per round and query or key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buckets {
    /// Keys per block of the sorted order.
    pub(super) size: usize,
    causal: bool,
    rounds: usize,
    dims: Dims,
    /// `[rounds, batch, heads.kv]`; empty if there are no pairs.
    ranks: Vec<Ranks>,
}

/// One round of one KV head.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ranks {
    /// Rank of each key in the sorted order.
    keys: Vec<u32>,
    /// For each row of the query heads that use the KV head, the block of that order that contains the row's rank.
    blocks: Vec<u32>,
}

impl Buckets {
    /// Hashes queries and keys, and sorts the keys in each round.
    pub(super) fn new<E: Element>(
        lsh: &LshAttention,
        machine: Machine,
        dims: Dims,
        [q, k]: [View<'_, E>; 2],
    ) -> Self {
        let &LshAttention { rounds, bucket_size: size, causal, seed, .. } = lsh;
        let empty = Self { size, causal, rounds, dims, ranks: Vec::new() };
        if [dims.batch, dims.heads.q, dims.q_len, dims.k_len].contains(&0) {
            return empty;
        }
        let hash = Hash::<E::Num>::new(seed, rounds, dims.k_len.div_ceil(size), dims.qk_dim);
        let (rows, keys) = (hash.of(machine, q), hash.of(machine, k));
        let items = dims.batch * dims.heads.kv;
        let scratch = || vec![0; hash.buckets];
        let ranks = machine.collect(rounds * items, scratch, |next, i| {
            let (round, item) = (i / items, i % items);
            let own = |buckets: &[u32], count: usize| -> Vec<usize> {
                let own = buckets[item * count * rounds..][..count * rounds].iter();
                own.skip(round).step_by(rounds).map(|bucket| *bucket as usize).collect()
            };
            let (rows, keys) = (own(&rows, empty.served() * dims.q_len), own(&keys, dims.k_len));
            Ranks::new(next, &keys, &rows, (dims.q_len, size))
        });
        Self { ranks, ..empty }
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
        let head = batch * heads.q + head;
        let found = |round| {
            let rank = self.key_ranks(round, head / self.served())[key];
            self.window(round, head, row).contains(&(rank as usize))
        };
        key < self.keys_before(row) && (0..self.rounds).any(found)
    }

    /// The candidate pairs as a mask over the tensors of the call, for example to measure how much of its attention mass full
    /// attention has on them.
    #[must_use]
    pub fn mask(&self) -> Mask {
        let order = |ranks: &Ranks| {
            let mut order = vec![0; ranks.keys.len()];
            (0..).zip(&ranks.keys).for_each(|(key, rank)| order[*rank as usize] = key);
            order
        };
        Mask::custom(Candidates {
            orders: self.ranks.iter().map(order).collect(),
            buckets: self.clone(),
        })
    }

    /// Whether there are no (query, key) pairs.
    pub(super) fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Query heads of all items.
    pub(super) fn heads(&self) -> usize {
        self.dims.batch * self.dims.heads.q
    }

    /// Query heads that use a KV head.
    pub(super) fn served(&self) -> usize {
        self.dims.heads.q.checked_div(self.dims.heads.kv).unwrap_or(0)
    }

    /// Number of leading keys that the causal mask leaves visible to a row; all keys if not causal.
    pub(super) fn keys_before(&self, row: usize) -> usize {
        let Dims { q_len, k_len, .. } = self.dims;
        if self.causal { (row + k_len + 1).saturating_sub(q_len) } else { k_len }
    }

    /// Rank of each key in the sorted order of a round, for a KV head numbered over all items.
    pub(super) fn key_ranks(&self, round: usize, kv_head: usize) -> &[u32] {
        &self.ranks[round * self.dims.batch * self.dims.heads.kv + kv_head].keys
    }

    /// Block of the sorted keys that contains the rank of each row, for a query head numbered over all items.
    pub(super) fn blocks(&self, round: usize, head: usize) -> &[u32] {
        let (served, q_len) = (self.served(), self.dims.q_len);
        let items = self.dims.batch * self.dims.heads.kv;
        &self.ranks[round * items + head / served].blocks[head % served * q_len..][..q_len]
    }

    /// Ranks of the candidates of a row in a round: the keys of its block and of both adjacent blocks. The following block is
    /// left out if causal: within a bucket, keys after the row have later positions.
    pub(super) fn window(&self, round: usize, head: usize, row: usize) -> Range<usize> {
        let block = self.blocks(round, head)[row] as usize;
        let end = block.saturating_add(if self.causal { 1 } else { 2 });
        let start = block.saturating_sub(1).saturating_mul(self.size);
        start.min(self.dims.k_len)..end.saturating_mul(self.size).min(self.dims.k_len)
    }

    /// Upper limit of the keys in a window.
    pub(super) fn window_keys(&self) -> usize {
        self.size.saturating_mul(if self.causal { 2 } else { 3 }).min(self.dims.k_len)
    }
}

/// The rule of [`Buckets::mask`].
struct Candidates {
    buckets: Buckets,
    /// The keys in the sorted order of each round, as [`Buckets::ranks`].
    orders: Vec<Vec<usize>>,
}

impl fmt::Debug for Candidates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lsh")
    }
}

impl MaskRule for Candidates {
    fn visible(&self, scope: &Scope, row: usize, ranges: &mut Vec<Range<usize>>) {
        let Self { buckets, orders } = self;
        if buckets.is_empty() {
            return;
        }
        let Dims { batch, heads, .. } = buckets.dims;
        let head = scope.batch * heads.q + scope.head;
        let mut keys = Vec::new();
        for round in 0..buckets.rounds {
            let order = &orders[round * batch * heads.kv + head / buckets.served()];
            keys.extend_from_slice(&order[buckets.window(round, head, row)]);
        }
        keys.retain(|key| *key < buckets.keys_before(row));
        keys.sort_unstable();
        keys.dedup();
        ranges.extend(keys.chunk_by(|a, b| a + 1 == *b).map(|run| run[0]..run[0] + run.len()));
    }
}

impl Ranks {
    /// Counting sort of keys by bucket, then by position, and the blocks of the ranks that rows would have among them.
    /// `next` has an entry for each bucket and is overwritten; `keys` and `rows` are bucket numbers.
    fn new(
        next: &mut [u32],
        keys: &[usize],
        rows: &[usize],
        (q_len, size): (usize, usize),
    ) -> Self {
        let (mut ranks, mut blocks) = (vec![0; keys.len()], vec![0; rows.len()]);
        starts(next, keys.iter().copied());
        let mut rank_rows = |next: &[u32], i: usize| {
            for at in (i..rows.len()).step_by(q_len) {
                blocks[at] = index((next[rows[at]] as usize).min(keys.len() - 1) / size);
            }
        };
        // The last row is aligned with the last key, so the first rows may precede all keys.
        (0..q_len.saturating_sub(keys.len())).for_each(|i| rank_rows(next, i));
        for (j, key) in keys.iter().enumerate() {
            if let Some(i) = (j + q_len).checked_sub(keys.len()) {
                rank_rows(next, i);
            }
            ranks[j] = next[*key];
            next[*key] += 1;
        }
        Self { keys: ranks, blocks }
    }
}

/// First rank of each bucket in the sorted order: exclusive prefix sum of the bucket sizes.
pub(super) fn starts(next: &mut [u32], buckets: impl Iterator<Item = usize>) {
    next.fill(0);
    buckets.for_each(|bucket| next[bucket] += 1);
    let mut sum = 0;
    next.iter_mut().for_each(|n| (*n, sum) = (sum, sum + *n));
}
