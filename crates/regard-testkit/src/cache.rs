//! Model-based test of [`KvCache`]: a plain list of rows for each sequence is the model.
//!
//! Any four bytes encode a call, so property tests, the long seeded run and the fuzzer all drive the same [`CacheModel`].

use crate::data::{Arrangement, TestTensor};
use crate::noise::Noise;
use regard::cache::{CacheShape, Quantization};
use regard::{Error, KvCache, Sequence, Shape, View};
use std::ops::Range;

/// Maximum number of live sequences.
const MOST: usize = 7;

/// Maximum number of stale handles kept for later calls.
const STALE: usize = 16;

/// A cache and its model. Every call checks the cache and panics if the two differ.
#[derive(Debug)]
pub struct CacheModel {
    cache: KvCache<f32>,
    shape: CacheShape,
    /// Whether values are features of keys.
    latent: bool,
    /// Bytes per page.
    page_bytes: usize,
    /// Number of pages that the budget allows.
    most_pages: usize,
    live: Vec<SequenceModel>,
    stale: Vec<Sequence>,
    /// Number of rows appended so far, which is the id of the next row.
    rows: u64,
    /// Number of pages allocated so far, which is the id of the next page.
    pages: u64,
    /// Peak number of pages in use. The cache allocates no more than these if it reuses free pages first.
    peak: usize,
    counts: EventCounts,
}

/// Model of one sequence.
#[derive(Clone, Debug)]
struct SequenceModel {
    handle: Sequence,
    /// Id of each row, including evicted rows.
    rows: Vec<u64>,
    /// Id of each page, including evicted pages.
    pages: Vec<u64>,
    /// Number of evicted pages.
    evicted: usize,
}

impl SequenceModel {
    /// Ids of the pages that are not evicted.
    fn pages(&self) -> &[u64] {
        &self.pages[self.evicted..]
    }
}

/// Counts of events, so that a test can assert that they occurred.
#[derive(Clone, Copy, Debug, Default)]
pub struct EventCounts {
    /// Calls rejected because of the budget.
    pub over_budget: usize,
    /// Shared pages copied before a write.
    pub copied: usize,
    /// Sequences evicted from or truncated.
    pub shortened: usize,
    /// Stale handles rejected.
    pub stale: usize,
}

/// One call on the live sequence `of`.
#[derive(Clone, Copy, Debug)]
enum Call {
    Start,
    Append { of: usize, n: usize, arrangement: Arrangement },
    Misfit { of: usize, axis: usize },
    Fork { of: usize },
    Truncate { of: usize, len: usize },
    Evict { of: usize, before: usize },
    Free { of: usize },
    Stale { sequence: Sequence },
}

impl CacheModel {
    /// Creates a cache of up to 3 heads, 3 key features, 3 value features, 5 positions per page and 16 pages, of elements or in 8 bits,
    /// with values or latent.
    ///
    /// # Panics
    /// If the cache rejects these sizes.
    #[must_use]
    pub fn new(bytes: [u8; 4]) -> Self {
        let [a, b, c, d] = bytes.map(usize::from);
        let shape =
            CacheShape { heads: a % 3 + 1, qk_dim: b % 3 + 1, v_dim: b / 3 % 4, page: c % 5 + 1 };
        let quantization =
            [None, Some(Quantization::Int8), Some(Quantization::Fp8E4m3)][b / 12 % 3];
        let latent = b / 36 % 2 == 1 && (1..=shape.qk_dim).contains(&shape.v_dim);
        let (row, parts) = if latent { (shape.qk_dim, 1) } else { (shape.qk_dim + shape.v_dim, 2) };
        let row_bytes = match quantization {
            None => row * size_of::<f32>(),
            Some(Quantization::Int8) => row + parts * size_of::<f32>(),
            Some(_) => row,
        };
        let page_bytes = shape.heads * shape.page * row_bytes;
        let most_pages = d % 16 + 1;
        // The budget includes some bytes that do not suffice for another page.
        let budget = most_pages * page_bytes + a * b % page_bytes;
        let cache = match (quantization, latent) {
            (None, false) => KvCache::new(shape, budget),
            (None, true) => KvCache::latent(shape, budget),
            (Some(bits), false) => KvCache::quantized(shape, bits, budget),
            (Some(bits), true) => KvCache::latent_quantized(shape, bits, budget),
        };
        let cache = cache.expect("a small shape and a budget for its page");
        assert_eq!(cache.quantization(), quantization);
        assert_eq!((cache.shape(), cache.budget(), cache.bytes()), (shape, budget, 0));
        let (live, stale, counts) = (Vec::new(), Vec::new(), EventCounts::default());
        let (rows, pages, peak) = (0, 0, 0);
        Self {
            cache,
            shape,
            latent,
            page_bytes,
            most_pages,
            live,
            stale,
            rows,
            pages,
            peak,
            counts,
        }
    }

    /// Counts of the events so far.
    #[must_use]
    pub fn counts(&self) -> EventCounts {
        self.counts
    }

    /// Makes the call that the bytes encode, on the cache and on the model, and compares the sequences it affects.
    ///
    /// # Panics
    /// If the cache differs from the model.
    pub fn step(&mut self, bytes: [u8; 4]) {
        let call = self.call(bytes);
        let touched = match call {
            Call::Start => self.start(),
            Call::Append { of, n, arrangement } => self.append(of, n, arrangement),
            Call::Misfit { of, axis } => self.misfit(of, axis),
            Call::Fork { of } => self.fork(of),
            Call::Truncate { of, len } => self.truncate(of, len),
            Call::Evict { of, before } => self.evict(of, before),
            Call::Free { of } => self.free(of),
            Call::Stale { sequence } => self.stale(sequence),
        };
        for of in touched {
            self.check(of, &call);
        }
        let in_use = self.in_use();
        self.peak = self.peak.max(in_use);
        assert!(self.cache.bytes() <= self.cache.budget(), "{call:?}");
        assert_eq!(self.cache.bytes(), self.peak * self.page_bytes, "bytes: {call:?}");
        assert_eq!(self.cache.bytes_in_use(), in_use * self.page_bytes, "in use: {call:?}");
    }

    /// Decodes a call.
    fn call(&self, bytes: [u8; 4]) -> Call {
        let CacheShape { page, .. } = self.shape;
        let [kind, of, a, b] = bytes.map(usize::from);
        let number = a << 8 | b;
        if self.live.is_empty() {
            return Call::Start;
        }
        let of = of % self.live.len();
        let (len, first) = (self.live[of].rows.len(), self.live[of].evicted * page);
        match kind % 16 {
            0..3 if self.live.len() == MOST => Call::Free { of },
            0 => Call::Start,
            1 | 2 => Call::Fork { of },
            3 => Call::Free { of },
            // From below the first position to beyond the end.
            4 | 5 => Call::Truncate { of, len: (first + number % (len - first + 3)).max(1) - 1 },
            6 | 7 => Call::Evict { of, before: number % (len + page + 2) },
            8 => Call::Misfit { of, axis: a },
            9 if !self.stale.is_empty() => {
                Call::Stale { sequence: self.stale[a % self.stale.len()] }
            }
            _ => {
                let of_all = [Arrangement::Bhsd, Arrangement::Bshd, Arrangement::Slice];
                Call::Append { of, n: a % (3 * page + 1), arrangement: of_all[b % 3] }
            }
        }
    }

    /// Whose features a value has.
    fn value(&self) -> Part {
        if self.latent { Part::Key } else { Part::Value }
    }

    fn start(&mut self) -> Range<usize> {
        let handle = self.cache.start().expect("a start needs no page");
        self.join(SequenceModel { handle, rows: Vec::new(), pages: Vec::new(), evicted: 0 })
    }

    /// Adds a live sequence.
    fn join(&mut self, held: SequenceModel) -> Range<usize> {
        let mut handles = self.live.iter().map(|h| &h.handle).chain(&self.stale);
        assert!(handles.all(|handle| *handle != held.handle), "a handle given twice");
        self.live.push(held);
        self.live.len() - 1..self.live.len()
    }

    fn append(&mut self, of: usize, n: usize, arrangement: Arrangement) -> Range<usize> {
        let CacheShape { heads, qk_dim, v_dim, page } = self.shape;
        let names: Vec<u64> = (self.rows..).take(n).collect();
        let value = self.value();
        let [k, v] = [(Part::Key, qk_dim), (value, v_dim)].map(|(part, dim)| {
            let rows = (0..heads).flat_map(|head| names.iter().map(move |name| (head, *name)));
            let stored = self.cache.quantization();
            let values: Vec<f32> =
                rows.flat_map(|(head, name)| features(stored, (name, head, part), dim)).collect();
            TestTensor::new(&values, Shape { batch: 1, heads, len: n, dim }, arrangement)
        });

        let SequenceModel { handle, ref rows, ref pages, .. } = self.live[of];
        let copied = match pages.last() {
            Some(last) if n > 0 && rows.len() % page > 0 => {
                self.live.iter().filter(|h| h.pages().contains(last)).count() > 1
            }
            _ => false,
        };
        let more = (rows.len() + n).div_ceil(page) - pages.len() + usize::from(copied);
        let needed = self.in_use() + more;
        let over = Error::Budget { needed: needed * self.page_bytes, budget: self.cache.budget() };
        let expected = if needed > self.most_pages { Err(over) } else { Ok(()) };
        let v = (!self.latent).then(|| v.view());
        assert_eq!(append(&mut self.cache, handle, k.view(), v), expected, "append {n}");
        if expected.is_err() {
            self.counts.over_budget += 1;
        } else {
            let held = &mut self.live[of];
            if copied {
                held.pages.pop();
                self.counts.copied += 1;
            }
            held.pages.extend((self.pages..).take(more));
            held.rows.extend(names);
            self.rows += n as u64;
            self.pages += more as u64;
        }
        // Includes the sequences that shared the page.
        if copied { 0..self.live.len() } else { of..of + 1 }
    }

    /// Appends keys and values that do not fit the cache or each other.
    fn misfit(&mut self, of: usize, axis: usize) -> Range<usize> {
        let CacheShape { heads, qk_dim, v_dim, .. } = self.shape;
        let mut shapes = [qk_dim, v_dim].map(|dim| Shape { batch: 1, heads, len: 2, dim });
        let shape = &mut shapes[axis / 4 % 2];
        match axis % 4 {
            0 => shape.batch = axis / 8 % 2 * 2,
            1 => shape.heads += 1,
            2 => shape.len -= 1,
            _ => shape.dim += 1,
        }
        let [k, v] = shapes.map(|shape| {
            let values = vec![f32::NAN; shape.to_array().iter().product()];
            TestTensor::new(&values, shape, Arrangement::Bhsd)
        });
        // Fewer keys alone do fit a latent cache.
        let alone = self.latent && (axis / 4).is_multiple_of(2) && axis % 4 != 2;
        let v = (!alone).then(|| v.view());
        let result = append(&mut self.cache, self.live[of].handle, k.view(), v);
        assert!(matches!(result, Err(Error::Axis { .. })), "{shapes:?}: {result:?}");
        of..of + 1
    }

    fn fork(&mut self, of: usize) -> Range<usize> {
        let held = self.live[of].clone();
        let handle = self.cache.fork(held.handle).expect("a fork needs no page");
        self.join(SequenceModel { handle, ..held })
    }

    fn truncate(&mut self, of: usize, len: usize) -> Range<usize> {
        let CacheShape { page, .. } = self.shape;
        let held = &mut self.live[of];
        let (first, limit) = (held.evicted * page, held.rows.len() + 1);
        let (option, found) = ("truncate", len);
        let expected = if len >= limit {
            Err(Error::OutOfRange { option, found, limit })
        } else if len < first {
            Err(Error::Evicted { option, found, first })
        } else {
            held.rows.truncate(len);
            held.pages.truncate(len.div_ceil(page));
            self.counts.shortened += 1;
            Ok(())
        };
        assert_eq!(self.cache.truncate(held.handle, len), expected);
        of..of + 1
    }

    fn evict(&mut self, of: usize, before: usize) -> Range<usize> {
        let CacheShape { page, .. } = self.shape;
        let held = &mut self.live[of];
        // Evicts full pages that end at `before` or earlier.
        while (held.evicted + 1) * page <= before.min(held.rows.len()) {
            held.evicted += 1;
            self.counts.shortened += 1;
        }
        assert_eq!(self.cache.evict(held.handle, before), Ok(held.evicted * page));
        of..of + 1
    }

    fn free(&mut self, of: usize) -> Range<usize> {
        let held = self.live.swap_remove(of);
        assert_eq!(self.cache.free(held.handle), Ok(()));
        if self.stale.len() == STALE {
            self.stale.remove(0);
        }
        self.stale.push(held.handle);
        0..0
    }

    /// Every call rejects a stale handle.
    fn stale(&mut self, sequence: Sequence) -> Range<usize> {
        let CacheShape { heads, qk_dim, v_dim, .. } = self.shape;
        let [k, v] = [qk_dim, v_dim].map(|dim| {
            let shape = Shape { batch: 1, heads, len: 1, dim };
            TestTensor::new(&vec![f32::NAN; heads * dim], shape, Arrangement::Bhsd)
        });
        let v = (!self.latent).then(|| v.view());
        let cache = &mut self.cache;
        let asked = [
            append(cache, sequence, k.view(), v).err(),
            cache.fork(sequence).err(),
            cache.truncate(sequence, 0).err(),
            cache.evict(sequence, 0).err(),
            cache.free(sequence).err(),
            cache.len(sequence).err(),
            cache.first(sequence).err(),
            cache.pages_held(sequence).err(),
            cache.row(sequence, 0, 0).err(),
            cache.numbers(sequence, 0, 0).err(),
            cache.shared_prefix(&[sequence]).err(),
        ];
        for error in asked {
            assert!(matches!(error, Some(Error::StaleSequence { .. })), "{sequence:?}: {error:?}");
        }
        self.counts.stale += 1;
        0..0
    }

    /// Number of distinct pages of live sequences.
    fn in_use(&self) -> usize {
        let mut pages: Vec<u64> = self.live.iter().flat_map(|h| h.pages()).copied().collect();
        pages.sort_unstable();
        pages.dedup();
        pages.len()
    }

    /// Compares everything that can be queried about a sequence.
    fn check(&self, of: usize, call: &Call) {
        let CacheShape { heads, qk_dim, v_dim, page } = self.shape;
        let (cache, held) = (&self.cache, &self.live[of]);
        let (first, len) = (held.evicted * page, held.rows.len());
        assert_eq!(cache.len(held.handle), Ok(len), "len: {call:?}");
        assert_eq!(cache.first(held.handle), Ok(first), "first: {call:?}");
        assert_eq!(cache.pages_held(held.handle), Ok(held.pages().len()), "pages: {call:?}");
        for head in 0..heads {
            for (position, name) in held.rows.iter().enumerate().skip(first) {
                let stored = cache.quantization();
                let numbers = cache.numbers(held.handle, head, position);
                let [k, v] = numbers.expect("a position it holds");
                let of = |part, dim| features(stored, (*name, head, part), dim);
                let same = k.iter().copied().eq(of(Part::Key, qk_dim))
                    && v.iter().copied().eq(of(self.value(), v_dim));
                assert!(same, "{call:?}: head {head}, position {position}: {k:?} {v:?}");
                match cache.row(held.handle, head, position) {
                    Ok(row) => assert_eq!((row, stored), ((&k[..], &v[..]), None)),
                    Err(error) => assert!(matches!(error, Error::Quantized { .. }), "{error:?}"),
                }
            }
        }
        let option = "position";
        let beyond = Error::OutOfRange { option, found: len, limit: len };
        assert_eq!(cache.row(held.handle, 0, len), Err(beyond), "{call:?}");
        if let Some(found) = first.checked_sub(1) {
            let evicted = Error::Evicted { option, found, first };
            assert_eq!(cache.row(held.handle, 0, found), Err(evicted), "{call:?}");
        }
        for other in &self.live {
            self.check_shared(&[held, other]);
        }
        self.check_shared(&self.live.iter().collect::<Vec<_>>());
    }

    /// Compares the shared prefix of sequences.
    fn check_shared(&self, all: &[&SequenceModel]) {
        let CacheShape { page, .. } = self.shape;
        let start = all.iter().map(|h| h.evicted).max().unwrap_or(0);
        let whole = all.iter().map(|h| h.rows.len() / page).min().unwrap_or(0);
        let same = |i: &usize| all.iter().all(|h| h.pages[*i] == all[0].pages[*i]);
        let count = (start..whole).take_while(same).count();
        let handles: Vec<_> = all.iter().map(|h| h.handle).collect();
        let expected = start * page..(start + count) * page;
        assert_eq!(self.cache.shared_prefix(&handles), Ok(expected), "{handles:?}");
    }

    /// Compares all sequences.
    ///
    /// # Panics
    /// If the cache differs from the model.
    pub fn check_all(&self) {
        for of in 0..self.live.len() {
            self.check(of, &Call::Start);
        }
    }

    /// Frees every sequence and checks that no page is in use.
    ///
    /// # Panics
    /// If a page is still in use.
    pub fn free_all(&mut self) {
        while !self.live.is_empty() {
            self.free(0);
        }
        assert_eq!(self.cache.bytes_in_use(), 0, "a page leaked");
        assert_eq!(self.cache.bytes(), self.peak * self.page_bytes);
    }
}

/// Appends to a cache, keys alone if there are no values.
fn append(
    cache: &mut KvCache<f32>,
    sequence: Sequence,
    k: View<'_, f32>,
    v: Option<View<'_, f32>>,
) -> Result<(), Error> {
    match v {
        Some(v) => cache.append(sequence, k, v),
        None => cache.append_keys(sequence, k),
    }
}

#[derive(Clone, Copy, Debug)]
enum Part {
    Key,
    Value,
}

/// Features of a row: numbers that occur in no other row, head, key or value that is held; in 8 bits, hardly in another, and such that
/// they are stored exactly.
fn features(
    stored: Option<Quantization>,
    (name, head, part): (u64, usize, Part),
    dim: usize,
) -> impl Iterator<Item = f32> {
    let first = ((name * 4 + head as u64) * 2 + part as u64) * 4;
    let of_row = i32::try_from(Noise::new(first).below(41)).unwrap_or(0) - 20;
    (0..dim as u64).map(move |d| {
        let bits = Noise::new(first + d).bits() >> 32;
        let [low, high] = [bits & 0xff, bits >> 8 & 0xff].map(|x| x as f32);
        match stored {
            None => ((first + d) % (1 << 24)) as f32,
            // The largest is 127 times a power of two.
            Some(Quantization::Int8) if d == 0 => 127.0 * (of_row as f32).exp2(),
            Some(Quantization::Int8) => (low % 255.0 - 127.0) * (of_row as f32).exp2(),
            // 4 significant bits.
            Some(_) => (low % 31.0 - 15.0) * (high % 10.0 - 7.0).exp2(),
        }
    })
}
