//! Who meets whom: keys sorted by their buckets, and where each row stands among them.

use super::LshAttention;
use super::hash::Hash;
use crate::element::{Element, Number};
use crate::error::Error;
use crate::machine::Machine;
use crate::mask::{Mask, NearBits};
use crate::problem::Dims;
use crate::simd::{Simd, Task};
use crate::view::{TileMut, View, ViewMut};
use std::ops::Range;

/// Which keys each row met, in any round. Holds `rounds (rows + keys)` numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buckets {
    how: Neighbours,
    rounds: usize,
    dims: Dims,
    /// For each round, item and key head: the place of each key in the sorted order, then the block of that order at which
    /// each row of the query heads it serves stands.
    lists: Vec<u32>,
}

/// Which sorted keys a row sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Neighbours {
    size: usize,
    causal: bool,
}

impl Neighbours {
    /// The places of the keys of a block and of those beside it; of those before it alone if nothing that comes later is
    /// seen, for the own block then ends with what does.
    fn window(self, block: u32, k_len: usize) -> Range<usize> {
        let block = block as usize;
        let end = block.saturating_add(if self.causal { 1 } else { 2 });
        let start = block.saturating_sub(1).saturating_mul(self.size);
        start.min(k_len)..end.saturating_mul(self.size).min(k_len)
    }

    /// Words of bits that hold any window.
    fn words(self, k_len: usize) -> usize {
        let keys = self.size.saturating_mul(if self.causal { 2 } else { 3 }).min(k_len);
        (keys.div_ceil(WORD) + 1).min(k_len.div_ceil(WORD))
    }
}

/// Keys of a word of bits.
const WORD: usize = 64;

impl Buckets {
    /// Hashes and sorts.
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
        let each = k_len + served * q_len;
        let items = batch * heads.kv;
        let mut lists = vec![0; rounds * items * each];
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

    /// The sizes of the call.
    #[must_use]
    pub fn dims(&self) -> Dims {
        self.dims
    }

    /// How many rounds there were.
    #[must_use]
    pub fn rounds(&self) -> usize {
        self.rounds
    }

    /// Whether a row sees a key: whether they met in any round and, if that was asked for, the key does not come later.
    ///
    /// # Panics
    /// For an item, query head, row or key that is not there.
    #[must_use]
    pub fn sees(&self, batch: usize, head: usize, row: usize, key: usize) -> bool {
        let Dims { batch: items, heads, q_len, k_len, .. } = self.dims;
        assert!(batch < items && head < heads.q && row < q_len && key < k_len);
        let kv_head = head / (heads.q / heads.kv);
        let met = |round| {
            let place = self.places(round, batch, kv_head)[key] as usize;
            self.how.window(self.blocks(round, batch, head)[row], k_len).contains(&place)
        };
        self.may_see(row, key) && (0..self.rounds).any(met)
    }

    /// Whether time lets a row see a key.
    pub(super) fn may_see(&self, row: usize, key: usize) -> bool {
        let Dims { q_len, k_len, .. } = self.dims;
        !self.how.causal || key + q_len <= row + k_len
    }

    fn list(&self, round: usize, batch: usize, kv_head: usize) -> &[u32] {
        let Dims { batch: items, heads, q_len, k_len, .. } = self.dims;
        let each = k_len + heads.q / heads.kv * q_len;
        &self.lists[((round * items + batch) * heads.kv + kv_head) * each..][..each]
    }

    /// Where each key of a head stands in the sorted order of a round.
    pub(super) fn places(&self, round: usize, batch: usize, kv_head: usize) -> &[u32] {
        &self.list(round, batch, kv_head)[..self.dims.k_len]
    }

    /// The block of sorted keys at which each row of a query head stands.
    fn blocks(&self, round: usize, batch: usize, head: usize) -> &[u32] {
        let Dims { heads, q_len, k_len, .. } = self.dims;
        let served = heads.q / heads.kv;
        &self.list(round, batch, head / served)[k_len + head % served * q_len..][..q_len]
    }

    /// Rows and keys of a round in the order of their buckets, and which of them see each other for the first time.
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
        let mask = Mask::near_bits(self.meetings(machine, round, (&keys, &rows))?);
        Ok(Round { order: Order { keys, rows, q_len }, mask })
    }

    /// Who sees whom in the order of a round and met in none before.
    fn meetings(
        &self,
        machine: Machine,
        round: usize,
        (keys, rows): (&Lists, &Lists),
    ) -> Result<NearBits, Error> {
        let Dims { batch, heads, q_len, k_len, .. } = self.dims;
        let padded = k_len.next_multiple_of(WORD);
        // Of the keys in this order: themselves, then where they stood in each round before.
        let mut before = Lists::new([batch * heads.kv, 1 + round, padded]);
        before.fill(machine, Vec::new, |_: &mut Vec<u32>, (item, earlier), list| {
            let (b, head) = (item / heads.kv, item % heads.kv);
            let keys = keys.of(b, head);
            match earlier.checked_sub(1) {
                None => list[..k_len].copy_from_slice(keys),
                Some(earlier) => {
                    let places = self.places(earlier, b, head);
                    let each = list.iter_mut().zip(keys);
                    each.for_each(|(place, key)| *place = places[*key as usize]);
                }
            }
        })?;
        let width = self.how.words(k_len);
        let mut words = vec![0; batch * heads.q * q_len * (1 + width)];
        let mut view = ViewMut::bhsd(&mut words, [batch, heads.q, q_len, 1 + width])?;
        view.change(machine.threads, WORD, Vec::new, |windows, batch, tile| {
            let (buckets, before) = (self, &before);
            f32::enter(machine.isa, See { buckets, rows, before, batch, windows, tile });
        });
        Ok(NearBits::new(words, [heads.q, q_len, width]))
    }
}

/// Sorts the keys of a head by bucket, then by position, and finds where rows would stand among them.
struct Sort {
    q_len: usize,
    k_len: usize,
    size: usize,
}

impl Sort {
    /// `next` has room for a number of each bucket; `list`: see [`Buckets::lists`]; `key` and `row` tell buckets.
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
        // The last row stands at the last key: rows may stand before all keys.
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

/// Where the entries of each bucket begin when they are sorted.
fn count(next: &mut [u32], buckets: impl Iterator<Item = usize>) {
    next.fill(0);
    buckets.for_each(|bucket| next[bucket] += 1);
    let mut sum = 0;
    next.iter_mut().for_each(|n| (*n, sum) = (sum, sum + *n));
}

/// One round.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) order: Order,
    /// Of rows and keys in this order.
    pub(super) mask: Mask,
}

/// Rows and keys in the order of their buckets.
#[derive(Debug)]
pub(super) struct Order {
    keys: Lists,
    /// The rows in order, then where each of them stands in it.
    rows: Lists,
    q_len: usize,
}

impl Order {
    /// The keys of a head in order.
    pub(super) fn keys(&self, batch: usize, kv_head: usize) -> &[u32] {
        self.keys.of(batch, kv_head)
    }

    /// The rows of a head in order.
    pub(super) fn rows(&self, batch: usize, head: usize) -> &[u32] {
        &self.rows.of(batch, head)[..self.q_len]
    }

    /// Where a row stands, both counted over all heads and items.
    pub(super) fn place(&self, row: usize) -> usize {
        let [item, i] = [row / self.q_len, row % self.q_len];
        item * self.q_len + self.rows.data[(2 * item + 1) * self.q_len + i] as usize
    }

    /// Where each row of a head stands.
    pub(super) fn row_places(&self, batch: usize, head: usize) -> &[u32] {
        &self.rows.of(batch, head)[self.q_len..]
    }
}

/// A list for each head, `[batch, heads, len]`.
#[derive(Debug)]
struct Lists {
    data: Vec<u32>,
    sizes: [usize; 3],
}

impl Lists {
    fn new(sizes: [usize; 3]) -> Self {
        Self { data: vec![0; sizes.iter().product()], sizes }
    }

    fn of(&self, batch: usize, head: usize) -> &[u32] {
        let [_, heads, len] = self.sizes;
        &self.data[(batch * heads + head) * len..][..len]
    }

    /// Each list by a task of its own.
    fn fill<M>(
        &mut self,
        machine: Machine,
        memory: impl Fn() -> M + Sync,
        task: impl Fn(&mut M, (usize, usize), &mut [u32]) + Sync,
    ) -> Result<(), Error> {
        let [batch, heads, len] = self.sizes;
        let mut view = ViewMut::bhsd(&mut self.data, [batch * heads, 1, 1, len])?;
        view.change(machine.threads, 1, memory, |memory, i, mut list| {
            task(memory, (i / heads, i % heads), list.update(0, 0));
        });
        Ok(())
    }
}

/// The bits of some rows.
struct See<'t, 'v> {
    buckets: &'t Buckets,
    rows: &'t Lists,
    /// Of each key head, in the order of the round: the keys, and where they stood in each round before.
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
        let Dims { heads, q_len, k_len, .. } = buckets.dims;
        let (of, [_, lists, _]) = (tile.rows(), before.sizes);
        for head in 0..heads.q {
            let item = batch * heads.kv + head / (heads.q / heads.kv);
            for lane in 0..of.count {
                let row = rows.of(batch, head)[of.row(lane)] as usize;
                let window = |round: usize| {
                    let block = buckets.blocks(round, batch, head)[row];
                    buckets.how.window(block, k_len)
                };
                let own = window(lists - 1);
                // What came later, and whom the row met before.
                let ends = if buckets.how.causal {
                    (row + k_len + 1).saturating_sub(q_len)
                } else {
                    k_len
                };
                windows.clear();
                windows.push(index(ends)..u32::MAX);
                windows.extend((0..lists - 1).map(|round| {
                    let Range { start, end } = window(round);
                    index(start)..index(end)
                }));
                let to = tile.update(head, lane);
                let first = own.start / WORD;
                to[0] = first as u64;
                for (i, to) in to[1..].iter_mut().enumerate() {
                    *to = within(&own, (first + i) * WORD);
                    if *to != 0 {
                        let hides = |(list, window): (usize, &Range<u32>)| {
                            let list = before.of(item, list)[(first + i) * WORD..].first_chunk();
                            (list, window.clone())
                        };
                        *to &= !hidden(windows.iter().enumerate().map(hides));
                    }
                }
            }
        }
    }
}

/// A place as it is kept; there are never more.
fn index(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX)
}

/// The bits of a range in the word that begins at `at`.
fn within(range: &Range<usize>, at: usize) -> u64 {
    let below = |n: usize| match n.saturating_sub(at) {
        n if n >= WORD => u64::MAX,
        n => (1 << n) - 1,
    };
    below(range.end) & !below(range.start)
}

/// Which of 64 keys are in a window of any list.
#[inline(always)]
fn hidden<'l>(lists: impl Iterator<Item = (Option<&'l [u32; WORD]>, Range<u32>)>) -> u64 {
    let mut inside = [0u32; WORD];
    for (list, Range { start, end }) in lists {
        let Some(list) = list else { continue };
        for (inside, place) in inside.iter_mut().zip(list) {
            *inside |= u32::from(place.wrapping_sub(start) < end - start);
        }
    }
    inside.iter().enumerate().fold(0, |bits, (i, inside)| bits | u64::from(*inside) << i)
}
