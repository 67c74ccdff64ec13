//! Paged KV cache (PagedAttention, Kwon et al. 2023): keys and values of past positions, in pages that sequences can share.
//!
//! A sequence is a list of pages. A fork is a second list of the same pages; writing to a shared page copies it first
//! (copy-on-write). The kernels read one head of one sequence at a time, through [`Paged`].
//!
//! | file | contents |
//! |---|---|
//! | `mod` | the operations on a cache |
//! | `sequence` | sequence handles and page tables |
//! | `pages` | the page pool: memory, budget, reference counts |
//! | `quantized` | keys and values in 8 bits |

mod pages;
mod quantized;
mod sequence;

pub use pages::{CacheShape, PAGE};
pub use quantized::Quantization;
pub use sequence::Sequence;

pub(crate) use pages::Paged;
pub(crate) use quantized::{CodeRows, QuantizedHead};

use crate::error::Error;
use crate::machine::simd::{Element, Number};
use crate::tensor::view::{Shape, View};
use pages::{Pages, Part};
use sequence::{Slots, Table};
use std::ops::Range;

/// A paged KV cache: the keys and values of many sequences, within a memory budget.
///
/// ```
/// use regard::cache::{CacheShape, PAGE};
/// use regard::{KvCache, View};
/// # fn main() -> Result<(), regard::Error> {
/// let shape = CacheShape { heads: 2, qk_dim: 4, v_dim: 3, page: PAGE };
/// let mut cache = KvCache::<f32>::new(shape, 1 << 20)?;
/// let prompt = cache.start()?;
/// let (k, v) = (vec![0.5; 100 * 2 * 4], vec![0.5; 100 * 2 * 3]);
/// cache.append(prompt, View::bhsd(&k, [1, 2, 100, 4])?, View::bhsd(&v, [1, 2, 100, 3])?)?;
/// let answer = cache.fork(prompt)?; // the same pages, no copy
/// assert_eq!(cache.shared_prefix(&[prompt, answer])?, 0..64);
/// assert_eq!(cache.len(answer)?, 100);
/// # Ok(())
/// # }
/// ```
///
/// A page holds [`CacheShape::page`] consecutive positions of all heads. The memory of all pages never exceeds the budget;
/// the page tables, a few bytes for each page, are not counted. A page that no sequence holds any more is reused before a
/// new one is allocated. A call that returns an error leaves the cache unchanged.
#[derive(Debug)]
pub struct KvCache<E> {
    pages: Pages<E>,
    slots: Slots,
}

impl<E: Element> KvCache<E> {
    /// An empty cache whose pages take up to `budget` bytes, which must be enough for one page. Allocates nothing.
    pub fn new(shape: CacheShape, budget: usize) -> Result<Self, Error> {
        Ok(Self { pages: Pages::new(shape, false, None, budget)?, slots: Slots::default() })
    }

    /// The same with keys and values in 8 bits, which [`append`](Self::append) rounds them to.
    ///
    /// `E` is the type that is appended, of queries and of outputs: `f32`, `f16` or `bf16`. Attention over the cache has the bits of attention in `f32` over the
    /// [`numbers`](Self::numbers) that it holds. There is no backward pass over a cache.
    ///
    /// ```
    /// use regard::cache::{CacheShape, PAGE, Quantization};
    /// use regard::{KvCache, View};
    /// # fn main() -> Result<(), regard::Error> {
    /// let shape = CacheShape { heads: 1, qk_dim: 4, v_dim: 4, page: PAGE };
    /// let mut cache = KvCache::<f32>::quantized(shape, Quantization::Int8, 1 << 20)?;
    /// let sequence = cache.start()?;
    /// let row = [127.0, 0.4, -2.5, 0.0];
    /// cache.append(sequence, View::matrix(&row, [1, 4])?, View::matrix(&row, [1, 4])?)?;
    /// assert_eq!(cache.numbers(sequence, 0, 0)?[0], [127.0, 0.0, -2.0, 0.0]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn quantized(
        shape: CacheShape,
        quantization: Quantization,
        budget: usize,
    ) -> Result<Self, Error> {
        Self::in_8_bits(shape, false, quantization, budget)
    }

    /// As [`new`](Self::new), for latent attention (MLA, DeepSeek-V2 2024): values are the first `v_dim` features of their keys and
    /// take no memory. Positions are appended with [`append_keys`](Self::append_keys).
    ///
    /// ```
    /// use regard::cache::{CacheShape, PAGE};
    /// use regard::{KvCache, View};
    /// let shape = CacheShape { heads: 1, qk_dim: 72, v_dim: 64, page: PAGE };
    /// let mut cache = KvCache::<f32>::latent(shape, 1 << 20)?;
    /// let sequence = cache.start()?;
    /// cache.append_keys(sequence, View::matrix(&vec![0.5; 100 * 72], [100, 72])?)?;
    /// let (k, v) = cache.row(sequence, 0, 99)?;
    /// assert_eq!(v, &k[..64]);
    /// # Ok::<(), regard::Error>(())
    /// ```
    pub fn latent(shape: CacheShape, budget: usize) -> Result<Self, Error> {
        Ok(Self { pages: Pages::new(shape, true, None, budget)?, slots: Slots::default() })
    }

    /// [`latent`](Self::latent) in 8 bits: the number of a value is that of its key, so the scale of `int8` is one for both.
    pub fn latent_quantized(
        shape: CacheShape,
        quantization: Quantization,
        budget: usize,
    ) -> Result<Self, Error> {
        Self::in_8_bits(shape, true, quantization, budget)
    }

    fn in_8_bits(
        shape: CacheShape,
        latent: bool,
        quantization: Quantization,
        budget: usize,
    ) -> Result<Self, Error> {
        if !E::Num::OF_CODES {
            let (dtype, storage) = (E::NAME, quantization.name());
            return Err(Error::NotQuantized { dtype, storage });
        }
        let pages = Pages::new(shape, latent, Some(quantization), budget)?;
        Ok(Self { pages, slots: Slots::default() })
    }

    /// How numbers are stored in 8 bits; `None` if they are stored as elements.
    #[must_use]
    pub fn quantization(&self) -> Option<Quantization> {
        self.pages.quantization()
    }

    /// The name of what numbers are stored as: that of the element type, or of the quantization.
    #[must_use]
    pub fn storage(&self) -> &'static str {
        self.quantization().map_or(E::NAME, Quantization::name)
    }

    /// Starts a new, empty sequence.
    pub fn start(&mut self) -> Result<Sequence, Error> {
        self.slots.insert(Table::default())
    }

    /// Appends `n` positions: `k [1, heads, n, qk_dim]` and `v [1, heads, n, v_dim]`, in any layout.
    ///
    /// Needs a page for every [`CacheShape::page`] positions. If the last page is partly filled and shared with other sequences,
    /// it is copied first, which needs one more page.
    pub fn append(
        &mut self,
        sequence: Sequence,
        k: View<'_, E>,
        v: View<'_, E>,
    ) -> Result<(), Error> {
        if self.pages.is_latent() {
            let right = ("a latent cache, which takes append_keys,", 0);
            Error::unless_same("features", ("v", v.shape().dim), right)?;
            return self.append_both(sequence, k, None);
        }
        self.append_both(sequence, k, Some(v))
    }

    /// Appends `n` positions to a [`latent`](Self::latent) cache: `k [1, heads, n, qk_dim]`.
    pub fn append_keys(&mut self, sequence: Sequence, k: View<'_, E>) -> Result<(), Error> {
        if !self.pages.is_latent() {
            let CacheShape { v_dim, .. } = self.pages.shape();
            let left = ("append_keys", 0);
            Error::unless_same("features", left, ("a value of the cache", v_dim))?;
        }
        self.append_both(sequence, k, None)
    }

    fn append_both(
        &mut self,
        sequence: Sequence,
        k: View<'_, E>,
        v: Option<View<'_, E>>,
    ) -> Result<(), Error> {
        self.check(&k, v.as_ref())?;
        let CacheShape { page, .. } = self.pages.shape();
        let n = k.shape().len;
        let table = self.slots.get_mut(sequence)?;
        prepare(&mut self.pages, table, n)?;
        let mut done = 0;
        while done < n {
            let (to, at) = ((table.len + done) / page, (table.len + done) % page);
            let count = (page - at).min(n - done);
            self.pages.write(table.page(to), at, (k, v), done..done + count);
            done += count;
        }
        table.len += n;
        Ok(())
    }

    /// Checks that the shapes of `k` and `v` match the cache and each other, with a batch size of 1.
    fn check(&self, k: &View<'_, E>, v: Option<&View<'_, E>>) -> Result<(), Error> {
        let CacheShape { heads, qk_dim, v_dim, .. } = self.pages.shape();
        for (tensor, view, dim) in [("k", Some(k), qk_dim), ("v", v, v_dim)] {
            let Some(view) = view else { continue };
            let shape = view.shape();
            Error::unless_same("batch", (tensor, shape.batch), ("a sequence", 1))?;
            Error::unless_same("heads", (tensor, shape.heads), ("the cache", heads))?;
            Error::unless_same("features", (tensor, shape.dim), ("the cache", dim))?;
        }
        let v_len = v.map_or(k.shape().len, |v| v.shape().len);
        Error::unless_same("keys", ("k", k.shape().len), ("v", v_len))
    }

    /// Creates a second sequence with the same positions, in the same pages. Copies no keys or values.
    pub fn fork(&mut self, sequence: Sequence) -> Result<Sequence, Error> {
        let twin = self.slots.get(sequence)?.twin()?;
        let fork = self.slots.insert(twin)?;
        for page in &self.slots.get(fork)?.pages {
            self.pages.hold(*page);
        }
        Ok(fork)
    }

    /// Removes the positions from `len` on. `len` must be at least [`first`](Self::first): evicted positions cannot be restored.
    pub fn truncate(&mut self, sequence: Sequence, len: usize) -> Result<(), Error> {
        let CacheShape { page, .. } = self.pages.shape();
        let table = self.slots.get_mut(sequence)?;
        in_reach("truncate", len, table.evicted * page, table.len.saturating_add(1))?;
        for page in table.pages.drain(len.div_ceil(page) - table.evicted..) {
            self.pages.release(page);
        }
        table.len = len;
        Ok(())
    }

    /// Drops the pages that lie entirely before position `before`, as a sliding window does, and returns the first position
    /// that is still held. The remaining positions keep their indices. A page that is not full yet is kept.
    pub fn evict(&mut self, sequence: Sequence, before: usize) -> Result<usize, Error> {
        let CacheShape { page, .. } = self.pages.shape();
        let table = self.slots.get_mut(sequence)?;
        let count = (before.min(table.len) / page).saturating_sub(table.evicted);
        for page in table.pages.drain(..count) {
            self.pages.release(page);
        }
        table.evicted += count;
        Ok(table.evicted * page)
    }

    /// Frees a sequence and releases its pages. Its handle becomes stale.
    pub fn free(&mut self, sequence: Sequence) -> Result<(), Error> {
        for page in self.slots.remove(sequence)?.pages {
            self.pages.release(page);
        }
        Ok(())
    }

    /// Length of a sequence in positions, evicted ones included: the index of the next position.
    pub fn len(&self, sequence: Sequence) -> Result<usize, Error> {
        Ok(self.slots.get(sequence)?.len)
    }

    /// The first position that is not evicted; equal to the length if the sequence holds no positions.
    pub fn first(&self, sequence: Sequence) -> Result<usize, Error> {
        Ok(self.slots.get(sequence)?.evicted * self.pages.shape().page)
    }

    /// Positions that a sequence holds.
    pub(crate) fn held(&self, sequence: Sequence) -> Result<usize, Error> {
        Ok(self.len(sequence)? - self.first(sequence)?)
    }

    /// The shapes of keys and values as long as those of the longest of some sequences.
    pub(crate) fn shapes(&self, sequences: &[Sequence]) -> Result<[Shape; 2], Error> {
        let CacheShape { heads, qk_dim, v_dim, .. } = self.shape();
        let mut len = 0;
        for sequence in sequences {
            len = len.max(self.held(*sequence)?);
        }
        let k = Shape { batch: sequences.len(), heads, len, dim: qk_dim };
        Ok([k, Shape { dim: v_dim, ..k }])
    }

    /// Number of pages that a sequence holds, shared ones included.
    pub fn pages_held(&self, sequence: Sequence) -> Result<usize, Error> {
        Ok(self.slots.get(sequence)?.pages.len())
    }

    /// The range of positions that all these sequences store in the same full pages, so that attention can read them once for
    /// all sequences. Empty if there are none, or if `sequences` is empty.
    ///
    /// The range starts at the largest [`first`](Self::first) of the sequences. Older positions, which only some of the sequences
    /// still hold, are excluded.
    pub fn shared_prefix(&self, sequences: &[Sequence]) -> Result<Range<usize>, Error> {
        let CacheShape { page, .. } = self.pages.shape();
        let Some((first, others)) = sequences.split_first() else { return Ok(0..0) };
        let longest = self.slots.get(*first)?;
        let (mut start, mut end) = (longest.evicted, longest.len / page);
        for other in others {
            let table = self.slots.get(*other)?;
            start = start.max(table.evicted);
            end = end.min(table.len / page);
        }
        for other in others {
            let table = self.slots.get(*other)?;
            end = (start..end).find(|i| table.page(*i) != longest.page(*i)).unwrap_or(end);
        }
        Ok(start * page..end.max(start) * page)
    }

    /// The key and the value of one head at one position. Keys and values in 8 bits are no elements: see [`numbers`](Self::numbers).
    pub fn row(
        &self,
        sequence: Sequence,
        head: usize,
        position: usize,
    ) -> Result<(&[E], &[E]), Error> {
        let [k, v] = self.paged(sequence, head)?;
        let row = self.row_of(sequence, position)?;
        if self.quantization().is_some() {
            let (option, storage) = ("KvCache::row", self.storage());
            return Err(Error::Quantized { option, storage });
        }
        Ok((k.row(row), v.row(row)))
    }

    /// The numbers of the key and of the value of one head at one position, in whatever way they are stored.
    pub fn numbers(
        &self,
        sequence: Sequence,
        head: usize,
        position: usize,
    ) -> Result<[Vec<E::Num>; 2], Error> {
        let [k, v] = self.paged(sequence, head)?;
        let row = self.row_of(sequence, position)?;
        Ok(match self.quantized_head(sequence, head)? {
            Some(both) => {
                both.map(|of| of.numbers(row).map(|x| Number::from_f64(x.into())).collect())
            }
            None => [k, v].map(|of| of.row(row).iter().map(|x| x.widen()).collect()),
        })
    }

    /// The row of a position that is held.
    fn row_of(&self, sequence: Sequence, position: usize) -> Result<usize, Error> {
        let first = self.first(sequence)?;
        in_reach("position", position, first, self.len(sequence)?)?;
        Ok(position - first)
    }

    /// The keys and the values of one head, if they are in 8 bits.
    pub(crate) fn quantized_head(
        &self,
        sequence: Sequence,
        head: usize,
    ) -> Result<Option<[QuantizedHead<'_>; 2]>, Error> {
        let list = &self.slots.get(sequence)?.pages;
        let [k, v] = [Part::Keys, Part::Values].map(|part| self.pages.quantized(list, part, head));
        Ok(k.zip(v).map(|(k, v)| [k, v]))
    }

    /// The keys and the values of one head, read from the pages without a copy.
    pub(crate) fn paged(
        &self,
        sequence: Sequence,
        head: usize,
    ) -> Result<[Paged<'_, E>; 2], Error> {
        let CacheShape { heads, page, .. } = self.pages.shape();
        let table = self.slots.get(sequence)?;
        in_reach("head", head, 0, heads)?;
        let held = table.len - table.evicted * page;
        Ok([Part::Keys, Part::Values].map(|part| self.pages.paged(&table.pages, part, head, held)))
    }

    /// The shape of a page.
    #[must_use]
    pub fn shape(&self) -> CacheShape {
        self.pages.shape()
    }

    /// Bytes of all allocated pages, in use or free. Never decreases.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.pages.bytes()
    }

    /// Bytes of the pages held by sequences; a shared page counts once.
    #[must_use]
    pub fn bytes_in_use(&self) -> usize {
        self.pages.bytes_in_use()
    }

    /// Number of pages that the budget allows.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.pages.capacity()
    }

    /// Upper bound on the bytes of all pages.
    #[must_use]
    pub fn budget(&self) -> usize {
        self.pages.budget()
    }
}

/// Reserves unshared pages for the next `n` positions of a sequence. On error the table is unchanged.
fn prepare<E: Element>(pages: &mut Pages<E>, table: &mut Table, n: usize) -> Result<(), Error> {
    let CacheShape { heads, qk_dim, page, .. } = pages.shape();
    if n == 0 {
        return Ok(());
    }
    let overflow = Error::ShapeOverflow { shape: [1, heads, n, qk_dim] };
    let len = table.len.checked_add(n).ok_or(overflow)?;
    let (filled, has) = (table.len % page, table.pages.len());
    let shared = table.pages.last().copied().filter(|last| filled > 0 && pages.is_shared(*last));
    let more = len.div_ceil(page) - table.evicted - has;
    pages.claim(more + usize::from(shared.is_some()), &mut table.pages)?;
    if let Some(shared) = shared {
        table.pages.remove(has - 1); // the first new page takes its index
        pages.copy(shared, table.pages[has - 1], filled);
        pages.release(shared);
    }
    Ok(())
}

fn in_reach(option: &'static str, found: usize, first: usize, limit: usize) -> Result<(), Error> {
    if found >= limit {
        return Err(Error::OutOfRange { option, found, limit });
    }
    if found < first { Err(Error::Evicted { option, found, first }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_one_page_are_one_slice() {
        let shape = CacheShape { heads: 2, qk_dim: 2, v_dim: 0, page: 4 };
        let mut cache = KvCache::<f64>::new(shape, 1 << 10).unwrap();
        let sequence = cache.start().unwrap();
        let data: Vec<f64> = (0..40u8).map(f64::from).collect();
        let (k, v) = (View::bhsd(&data, [1, 2, 10, 2]), View::bhsd(&[], [1, 2, 10, 0]));
        cache.append(sequence, k.unwrap(), v.unwrap()).unwrap();
        cache.evict(sequence, 5).unwrap(); // row 0 is now position 4
        let [k, v] = cache.paged(sequence, 1).unwrap();
        assert_eq!((k.page, k.dim, k.len), (4, 2, 6));
        assert_eq!((v.page, v.dim, v.len), (4, 0, 6));
        for i in 0..6 {
            assert_eq!(k.row(i), &data[28 + 2 * i..][..2]);
            assert_eq!(v.row(i), &[0.0; 0]);
        }
        assert_eq!(k.run(0, 4), Some(&data[28..36]));
        assert_eq!(k.run(1, 2), Some(&data[30..34]));
        assert_eq!(k.run(4, 2), Some(&data[36..40]));
        assert_eq!(k.run(6, 0), Some(&[][..]));
        let across_or_beyond = [(0, 5), (3, 2), (4, 3), (5, 2), (6, 1), (usize::MAX, 2)];
        assert!(across_or_beyond.iter().all(|(first, len)| k.run(*first, *len).is_none()));
        assert_eq!(v.run(0, 4), Some(&[][..]));
    }
}
