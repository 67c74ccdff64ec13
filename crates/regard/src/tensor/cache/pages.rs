//! The pool that the pages of a cache live in.
//!
//! A page has the keys `[heads][page][qk_dim]` of its positions, then their values `[heads][page][v_dim]`, unless those are the first features
//! of the keys: as elements, or in 8 bits, with the scales `[heads][page]` of both. It counts the sequences that hold it; when nobody does, it
//! waits to be used again.

use super::quantized::{CodePage, Quantization, QuantizedHead};
use crate::error::Error;
use crate::machine::simd::{Element, Number};
use crate::tensor::view::View;
use std::ops::Range;

/// Positions in a page, unless something speaks for another number: one head's keys are then 16 to 32 KiB, which a
/// kernel reads without a jump and a core's first cache holds, and the half page that a sequence leaves empty is little.
pub const PAGE: usize = 64;

/// What each page of a [`KvCache`](crate::KvCache) holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheShape {
    /// Heads of the keys and values.
    pub heads: usize,
    /// Features of a key.
    pub qk_dim: usize,
    /// Features of a value; may be 0.
    pub v_dim: usize,
    /// Positions in a page, at least 1; [`PAGE`] is a good number.
    pub page: usize,
}

impl CacheShape {
    /// Numbers of a page, of `bytes` each, if it can be held at all. `latent`: values are features of the keys.
    fn numbers(self, latent: bool, bytes: usize) -> Result<usize, Error> {
        let Self { heads, qk_dim, v_dim, page } = self;
        if heads == 0 {
            return Err(Error::Zero { option: "heads" });
        }
        if qk_dim == 0 {
            return Err(Error::NoFeatures { tensor: "k" });
        }
        if page == 0 {
            return Err(Error::Zero { option: "page" });
        }
        let fits = |n: &usize| isize::try_from(n.saturating_mul(bytes)).is_ok();
        if latent {
            Error::unless_below("features of v", v_dim, qk_dim.saturating_add(1))?;
        }
        let features = qk_dim.checked_add(if latent { 0 } else { v_dim });
        features
            .and_then(|n| n.checked_mul(heads)?.checked_mul(page))
            .filter(fits)
            .ok_or(Error::ShapeOverflow { shape: [1, heads, page, features.unwrap_or(usize::MAX)] })
    }
}

/// Which of the two a page holds.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    /// `[heads][page][qk_dim]`, at the start.
    Keys,
    /// `[heads][page][v_dim]`, behind them.
    Values,
}

/// One page. What no sequence has written is left from before.
#[derive(Debug)]
struct Page<E> {
    /// Its keys and values; none in 8 bits.
    data: Vec<E>,
    /// Sequences that hold it.
    holders: usize,
}

/// All pages of a cache.
#[derive(Debug)]
pub(super) struct Pages<E> {
    shape: CacheShape,
    /// Whether values are the first features of their keys.
    latent: bool,
    /// How numbers are stored, if not as elements.
    quantization: Option<Quantization>,
    /// Numbers of a page.
    numbers: usize,
    /// Scales of a page.
    scales: usize,
    /// Bytes that all pages together may have.
    budget: usize,
    pages: Vec<Page<E>>,
    /// The same in 8 bits, if they are.
    codes: Vec<CodePage>,
    /// The pages that nobody holds; has room for all, so that letting go never allocates.
    free: Vec<usize>,
}

impl<E: Element> Pages<E> {
    /// An empty pool, if the budget is enough for one page.
    pub(super) fn new(
        shape: CacheShape,
        latent: bool,
        quantization: Option<Quantization>,
        budget: usize,
    ) -> Result<Self, Error> {
        let parts = if latent { 1 } else { 2 };
        let (bytes, each) = match quantization {
            // A key of one feature has scales beside it: its own, and that of its value.
            Some(quantization) => (1 + 8 * quantization.scales(), parts * quantization.scales()),
            None => (size_of::<E>(), 0),
        };
        let numbers = shape.numbers(latent, bytes)?;
        let scales = shape.heads * shape.page * each;
        let (pages, codes, free) = (Vec::new(), Vec::new(), Vec::new());
        let pool =
            Self { shape, latent, quantization, numbers, scales, budget, pages, codes, free };
        pool.affords(1)?;
        Ok(pool)
    }

    /// Whether values are the first features of their keys.
    pub(super) fn is_latent(&self) -> bool {
        self.latent
    }

    /// What a page holds.
    pub(super) fn shape(&self) -> CacheShape {
        self.shape
    }

    /// How numbers are stored, if not as elements.
    pub(super) fn quantization(&self) -> Option<Quantization> {
        self.quantization
    }

    /// Bytes that all pages together may have.
    pub(super) fn budget(&self) -> usize {
        self.budget
    }

    /// Bytes of all pages.
    pub(super) fn bytes(&self) -> usize {
        self.pages.len() * self.bytes_each()
    }

    /// Bytes of the pages that somebody holds.
    pub(super) fn bytes_in_use(&self) -> usize {
        self.in_use() * self.bytes_each()
    }

    fn bytes_each(&self) -> usize {
        match self.quantization {
            Some(_) => self.numbers + self.scales * size_of::<f32>(),
            None => self.numbers * size_of::<E>(),
        }
    }

    /// Pages that the budget allows.
    pub(super) fn capacity(&self) -> usize {
        self.budget / self.bytes_each()
    }

    fn in_use(&self) -> usize {
        self.pages.len() - self.free.len()
    }

    /// Refuses `count` more pages than are in use, if the budget is less than that.
    fn affords(&self, count: usize) -> Result<(), Error> {
        let (pages, budget) = (self.in_use().saturating_add(count), self.budget);
        if pages <= self.capacity() {
            return Ok(());
        }
        Err(Error::Budget { needed: pages.saturating_mul(self.bytes_each()), budget })
    }

    /// Appends `count` pages to `list`, each held once: those that wait, before new ones. All or nothing.
    pub(super) fn claim(&mut self, count: usize, list: &mut Vec<usize>) -> Result<(), Error> {
        self.affords(count)?;
        make_room(list, count)?;
        self.allocate(count.saturating_sub(self.free.len()))?;
        for page in self.free.drain(self.free.len() - count..) {
            self.pages[page].holders = 1;
            list.push(page);
        }
        Ok(())
    }

    /// `count` new pages that nobody holds. All or nothing.
    fn allocate(&mut self, count: usize) -> Result<(), Error> {
        let (first, in_use) = (self.pages.len(), self.in_use());
        make_room(&mut self.pages, count)?;
        make_room(&mut self.free, in_use + count)?;
        let mut new = Vec::new();
        make_room(&mut new, count)?;
        let mut new_codes = Vec::new();
        let (elements, in_8_bits) = match self.quantization {
            Some(_) => (0, count),
            None => (self.numbers, 0),
        };
        make_room(&mut self.codes, in_8_bits)?;
        make_room(&mut new_codes, in_8_bits)?;
        let refused = Error::OutOfMemory { bytes: self.bytes_each() };
        for _ in 0..count {
            let data = filled(elements, E::narrow(E::Num::default()), &refused)?;
            new.push(Page { data, holders: 0 });
        }
        for _ in 0..in_8_bits {
            let codes = filled(self.numbers, 0, &refused)?;
            new_codes.push(CodePage { codes, scales: filled(self.scales, 0.0, &refused)? });
        }
        self.pages.append(&mut new);
        self.codes.append(&mut new_codes);
        self.free.extend(first..first + count);
        Ok(())
    }

    /// One sequence more holds the page.
    pub(super) fn hold(&mut self, page: usize) {
        self.pages[page].holders += 1;
    }

    /// One sequence less holds the page.
    pub(super) fn release(&mut self, page: usize) {
        self.pages[page].holders -= 1;
        if self.pages[page].holders == 0 {
            self.free.push(page);
        }
    }

    /// Whether several sequences hold the page.
    pub(super) fn is_shared(&self, page: usize) -> bool {
        self.pages[page].holders > 1
    }

    /// Features of a key or of a value.
    fn dim(&self, part: Part) -> usize {
        match part {
            Part::Keys => self.shape.qk_dim,
            Part::Values => self.shape.v_dim,
        }
    }

    /// Elements from one row to the next.
    fn stride(&self, part: Part) -> usize {
        self.dim(if self.latent { Part::Keys } else { part })
    }

    /// Where in a page `rows` of a head lie.
    fn place(&self, part: Part, head: usize, rows: Range<usize>) -> Range<usize> {
        let CacheShape { heads, qk_dim, page, .. } = self.shape;
        let before = match part {
            Part::Values if !self.latent => heads * page * qk_dim,
            _ => 0,
        };
        let [start, end] =
            [rows.start, rows.end].map(|row| before + (head * page + row) * self.stride(part));
        start..end
    }

    /// Where in a page the scales of `rows` of a head lie.
    fn place_of_scales(&self, part: Part, head: usize, rows: Range<usize>) -> Range<usize> {
        let CacheShape { heads, page, .. } = self.shape;
        let first = match part {
            Part::Values if !self.latent => (heads + head) * page,
            _ => head * page,
        };
        let each = self.quantization.map_or(0, Quantization::scales);
        (first + rows.start) * each..(first + rows.end) * each
    }

    /// Copies the first `rows` positions of one page to another.
    pub(super) fn copy(&mut self, from: usize, to: usize, rows: usize) {
        if self.quantization.is_some() {
            let mut codes = std::mem::take(&mut self.codes[to]);
            for (part, head) in self.parts_of_heads() {
                let place = self.place(part, head, 0..rows);
                codes.codes[place.clone()].copy_from_slice(&self.codes[from].codes[place]);
                let place = self.place_of_scales(part, head, 0..rows);
                codes.scales[place.clone()].copy_from_slice(&self.codes[from].scales[place]);
            }
            self.codes[to] = codes;
            return;
        }
        let mut data = std::mem::take(&mut self.pages[to].data);
        for (part, head) in self.parts_of_heads() {
            let place = self.place(part, head, 0..rows);
            data[place.clone()].copy_from_slice(&self.pages[from].data[place]);
        }
        self.pages[to].data = data;
    }

    /// The parts that are stored, of each head.
    fn parts_of_heads(&self) -> impl Iterator<Item = (Part, usize)> + use<E> {
        let heads = self.shape.heads;
        let parts: &'static [Part] =
            if self.latent { &[Part::Keys] } else { &[Part::Keys, Part::Values] };
        parts.iter().flat_map(move |part| (0..heads).map(move |head| (*part, head)))
    }

    /// Writes `rows` of `k`, and of `v` unless those are features of `k`, to a page, from its position `at` on.
    pub(super) fn write(
        &mut self,
        page: usize,
        at: usize,
        (k, v): (View<'_, E>, Option<View<'_, E>>),
        rows: Range<usize>,
    ) {
        let mut numbers: Vec<f32> = Vec::new();
        for (part, view) in [(Part::Keys, k)].into_iter().chain(v.map(|v| (Part::Values, v))) {
            for head in 0..self.shape.heads {
                let from = view.head(0, head);
                for (i, row) in rows.clone().enumerate() {
                    let to = at + i..at + i + 1;
                    let (place, row) = (self.place(part, head, to.clone()), from.row(row));
                    let Some(quantization) = self.quantization else {
                        self.pages[page].data[place].copy_from_slice(row);
                        continue;
                    };
                    numbers.clear();
                    numbers.extend(row.iter().map(|x| to_f32(x.widen())));
                    let scales = self.place_of_scales(part, head, to);
                    let to = &mut self.codes[page];
                    let scale = quantization.store(&numbers, &mut to.codes[place]);
                    to.scales[scales].fill(scale);
                }
            }
        }
    }

    /// The keys or values of a head in the pages of `list`, if they are in 8 bits.
    pub(super) fn quantized<'c>(
        &'c self,
        list: &'c [usize],
        part: Part,
        head: usize,
    ) -> Option<QuantizedHead<'c>> {
        let quantization = self.quantization?;
        let start = [self.place(part, head, 0..0), self.place_of_scales(part, head, 0..0)];
        let (start, page) = (start.map(|place| place.start), self.shape.page);
        let (pages, dim, stride) = (&self.codes[..], self.dim(part), self.stride(part));
        Some(QuantizedHead { pages, list, start, page, dim, stride, quantization })
    }

    /// The first `len` keys or values of a head in the pages of `list`.
    pub(super) fn paged<'c>(
        &'c self,
        list: &'c [usize],
        part: Part,
        head: usize,
        len: usize,
    ) -> Paged<'c, E> {
        let CacheShape { page, .. } = self.shape;
        let start = self.place(part, head, 0..0).start;
        let (dim, stride) = (self.dim(part), self.stride(part));
        Paged { pages: &self.pages, list, start, page, dim, stride, len }
    }
}

/// `n` times `x`.
fn filled<T: Copy>(n: usize, x: T, refused: &Error) -> Result<Vec<T>, Error> {
    let mut all = Vec::new();
    all.try_reserve_exact(n).map_err(|_| refused.clone())?;
    all.resize(n, x);
    Ok(all)
}

/// Exact: 8 bits are stored of `f32` alone.
#[expect(clippy::cast_possible_truncation, reason = "it was an f32")]
#[inline(always)]
fn to_f32<N: Number>(x: N) -> f32 {
    x.to_f64() as f32
}

/// The keys or the values of one head of a sequence: `len` rows of `dim` features, in pages of `page` rows.
///
/// Row 0 is the first position that is still held, which is the first of its page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paged<'c, E> {
    pages: &'c [Page<E>],
    /// The pages of the sequence, in order.
    list: &'c [usize],
    /// Where in each page the head begins.
    start: usize,
    pub(crate) page: usize,
    pub(crate) dim: usize,
    /// Elements from one row to the next.
    pub(crate) stride: usize,
    pub(crate) len: usize,
}

impl<'c, E> Paged<'c, E> {
    /// Row `i`.
    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> &'c [E] {
        debug_assert!(i < self.len);
        self.within_page(i, 1)
    }

    /// Rows `first..first + len`, [`stride`](Self::stride) apart, if all of them are held and lie in one page.
    #[inline(always)]
    pub(crate) fn run(&self, first: usize, len: usize) -> Option<&'c [E]> {
        if len == 0 {
            return Some(&[]);
        }
        let held = first < self.len && len <= self.len - first;
        (held && len <= self.page - first % self.page).then(|| self.within_page(first, len))
    }

    #[inline(always)]
    fn within_page(&self, first: usize, len: usize) -> &'c [E] {
        let page = &self.pages[self.list[first / self.page]];
        &page.data[self.start + first % self.page * self.stride..]
            [..(len - 1) * self.stride + self.dim]
    }
}

/// Makes room for `more` entries.
pub(super) fn make_room<T>(list: &mut Vec<T>, more: usize) -> Result<(), Error> {
    let bytes = more.saturating_mul(size_of::<T>());
    list.try_reserve(more).map_err(|_| Error::OutOfMemory { bytes })
}
