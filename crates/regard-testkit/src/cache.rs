//! What a cache should do: a plain list of rows for each sequence, and a [`KvCache`] held against it.
//!
//! Four random bytes are a call, whatever they are: property tests, the long seeded run and the fuzzer drive the same
//! [`CacheModel`].

use crate::data::{Arrangement, Stored};
use regard::{CacheShape, Error, KvCache, Sequence, Shape};
use std::ops::Range;

/// Sequences alive at once.
const MOST: usize = 7;

/// Stale handles kept to be tried again.
const STALE: usize = 16;

/// A cache, and what it should hold. Every call checks the cache and panics where the two differ.
#[derive(Debug)]
pub struct CacheModel {
    cache: KvCache<f64>,
    shape: CacheShape,
    /// Bytes of a page.
    page_bytes: usize,
    /// Pages that the budget allows.
    most_pages: usize,
    live: Vec<Held>,
    stale: Vec<Sequence>,
    /// Rows appended so far: the name of the next one.
    rows: u64,
    /// Pages taken so far: the name of the next one.
    pages: u64,
    /// Pages in use at once, at most: so many are allocated, if those that wait are taken first.
    peak: usize,
    seen: Seen,
}

/// One sequence.
#[derive(Clone, Debug)]
struct Held {
    handle: Sequence,
    /// The name of each row, with the evicted ones.
    rows: Vec<u64>,
    /// The name of each page, with the evicted ones.
    pages: Vec<u64>,
    /// Pages evicted.
    evicted: usize,
}

impl Held {
    /// The pages that it holds.
    fn pages(&self) -> &[u64] {
        &self.pages[self.evicted..]
    }
}

/// How often something happened, so that a test can ask whether it happened at all.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Calls that the budget did not allow.
    pub over_budget: usize,
    /// Shared pages that were copied before they were written.
    pub copied: usize,
    /// Sequences that were evicted or cut.
    pub shortened: usize,
    /// Stale handles that were refused.
    pub stale: usize,
}

/// One call, of the live sequence `of`.
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
    /// A cache of up to 3 heads, 3 features, 5 positions in a page and 16 pages.
    ///
    /// # Panics
    /// If the cache refuses that.
    #[must_use]
    pub fn new(bytes: [u8; 4]) -> Self {
        let [a, b, c, d] = bytes.map(usize::from);
        let shape =
            CacheShape { heads: a % 3 + 1, qk_dim: b % 3 + 1, v_dim: b / 3 % 4, page: c % 5 + 1 };
        let page_bytes = shape.heads * shape.page * (shape.qk_dim + shape.v_dim) * size_of::<f64>();
        let most_pages = d % 16 + 1;
        // Bytes that are not enough for another page.
        let budget = most_pages * page_bytes + a * b % page_bytes;
        let cache = KvCache::new(shape, budget).expect("a small shape and a budget for its page");
        assert_eq!((cache.shape(), cache.budget(), cache.bytes()), (shape, budget, 0));
        let (live, stale, seen) = (Vec::new(), Vec::new(), Seen::default());
        let (rows, pages, peak) = (0, 0, 0);
        Self { cache, shape, page_bytes, most_pages, live, stale, rows, pages, peak, seen }
    }

    /// What happened so far.
    #[must_use]
    pub fn seen(&self) -> Seen {
        self.seen
    }

    /// Makes the call that the bytes stand for, on both sides, and compares the sequences it touched.
    ///
    /// # Panics
    /// If the cache does not do what it should.
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

    /// The call that the bytes stand for.
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
            // From one too small to one too large.
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

    fn start(&mut self) -> Range<usize> {
        let handle = self.cache.start().expect("a start needs no page");
        self.join(Held { handle, rows: Vec::new(), pages: Vec::new(), evicted: 0 })
    }

    /// A sequence more.
    fn join(&mut self, held: Held) -> Range<usize> {
        let mut handles = self.live.iter().map(|h| &h.handle).chain(&self.stale);
        assert!(handles.all(|handle| *handle != held.handle), "a handle given twice");
        self.live.push(held);
        self.live.len() - 1..self.live.len()
    }

    fn append(&mut self, of: usize, n: usize, arrangement: Arrangement) -> Range<usize> {
        let CacheShape { heads, qk_dim, v_dim, page } = self.shape;
        let names: Vec<u64> = (self.rows..).take(n).collect();
        let [k, v] = [(Part::Key, qk_dim), (Part::Value, v_dim)].map(|(part, dim)| {
            let rows = (0..heads).flat_map(|head| names.iter().map(move |name| (head, *name)));
            let values: Vec<f64> =
                rows.flat_map(|(head, name)| features(name, head, part, dim)).collect();
            Stored::new(&values, Shape { batch: 1, heads, len: n, dim }, arrangement)
        });

        let Held { handle, ref rows, ref pages, .. } = self.live[of];
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
        assert_eq!(self.cache.append(handle, k.view(), v.view()), expected, "append {n}");
        if expected.is_err() {
            self.seen.over_budget += 1;
        } else {
            let held = &mut self.live[of];
            if copied {
                held.pages.pop();
                self.seen.copied += 1;
            }
            held.pages.extend((self.pages..).take(more));
            held.rows.extend(names);
            self.rows += n as u64;
            self.pages += more as u64;
        }
        // Those that shared the page, too.
        if copied { 0..self.live.len() } else { of..of + 1 }
    }

    /// Keys and values that do not fit the cache or each other.
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
            let values = vec![f64::NAN; shape.to_array().iter().product()];
            Stored::new(&values, shape, Arrangement::Bhsd)
        });
        let result = self.cache.append(self.live[of].handle, k.view(), v.view());
        assert!(matches!(result, Err(Error::Axis { .. })), "{shapes:?}: {result:?}");
        of..of + 1
    }

    fn fork(&mut self, of: usize) -> Range<usize> {
        let held = self.live[of].clone();
        let handle = self.cache.fork(held.handle).expect("a fork needs no page");
        self.join(Held { handle, ..held })
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
            self.seen.shortened += 1;
            Ok(())
        };
        assert_eq!(self.cache.truncate(held.handle, len), expected);
        of..of + 1
    }

    fn evict(&mut self, of: usize, before: usize) -> Range<usize> {
        let CacheShape { page, .. } = self.shape;
        let held = &mut self.live[of];
        // The last page that ends at `before` or earlier and is full.
        while (held.evicted + 1) * page <= before.min(held.rows.len()) {
            held.evicted += 1;
            self.seen.shortened += 1;
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

    /// A stale handle is refused by every call.
    fn stale(&mut self, sequence: Sequence) -> Range<usize> {
        let CacheShape { heads, qk_dim, v_dim, .. } = self.shape;
        let [k, v] = [qk_dim, v_dim].map(|dim| {
            let shape = Shape { batch: 1, heads, len: 1, dim };
            Stored::new(&vec![f64::NAN; heads * dim], shape, Arrangement::Bhsd)
        });
        let cache = &mut self.cache;
        let asked = [
            cache.append(sequence, k.view(), v.view()).err(),
            cache.fork(sequence).err(),
            cache.truncate(sequence, 0).err(),
            cache.evict(sequence, 0).err(),
            cache.free(sequence).err(),
            cache.len(sequence).err(),
            cache.first(sequence).err(),
            cache.pages_held(sequence).err(),
            cache.row(sequence, 0, 0).err(),
            cache.shared_prefix(&[sequence]).err(),
        ];
        for error in asked {
            assert!(matches!(error, Some(Error::StaleSequence { .. })), "{sequence:?}: {error:?}");
        }
        self.seen.stale += 1;
        0..0
    }

    /// Pages that live sequences hold, each once.
    fn in_use(&self) -> usize {
        let mut pages: Vec<u64> = self.live.iter().flat_map(|h| h.pages()).copied().collect();
        pages.sort_unstable();
        pages.dedup();
        pages.len()
    }

    /// Compares all that can be asked about a sequence.
    fn check(&self, of: usize, call: &Call) {
        let CacheShape { heads, qk_dim, v_dim, page } = self.shape;
        let (cache, held) = (&self.cache, &self.live[of]);
        let (first, len) = (held.evicted * page, held.rows.len());
        assert_eq!(cache.len(held.handle), Ok(len), "len: {call:?}");
        assert_eq!(cache.first(held.handle), Ok(first), "first: {call:?}");
        assert_eq!(cache.pages_held(held.handle), Ok(held.pages().len()), "pages: {call:?}");
        for head in 0..heads {
            for (position, name) in held.rows.iter().enumerate().skip(first) {
                let (k, v) = cache.row(held.handle, head, position).expect("a position it holds");
                let same = k.iter().copied().eq(features(*name, head, Part::Key, qk_dim))
                    && v.iter().copied().eq(features(*name, head, Part::Value, v_dim));
                assert!(same, "{call:?}: head {head}, position {position}: {k:?} {v:?}");
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

    /// Compares the pages that sequences share.
    fn check_shared(&self, all: &[&Held]) {
        let CacheShape { page, .. } = self.shape;
        let start = all.iter().map(|h| h.evicted).max().unwrap_or(0);
        let whole = all.iter().map(|h| h.rows.len() / page).min().unwrap_or(0);
        let same = |i: &usize| all.iter().all(|h| h.pages[*i] == all[0].pages[*i]);
        let count = (start..whole).take_while(same).count();
        let handles: Vec<_> = all.iter().map(|h| h.handle).collect();
        let expected = start * page..(start + count) * page;
        assert_eq!(self.cache.shared_prefix(&handles), Ok(expected), "{handles:?}");
    }

    /// Compares everything.
    ///
    /// # Panics
    /// If the cache does not hold what it should.
    pub fn check_all(&self) {
        for of in 0..self.live.len() {
            self.check(of, &Call::Start);
        }
    }

    /// Frees every sequence: no page may be in use then.
    ///
    /// # Panics
    /// If one is.
    pub fn free_all(&mut self) {
        while !self.live.is_empty() {
            self.free(0);
        }
        assert_eq!(self.cache.bytes_in_use(), 0, "a page leaked");
        assert_eq!(self.cache.bytes(), self.peak * self.page_bytes);
    }
}

/// Which half of a row.
#[derive(Clone, Copy, Debug)]
enum Part {
    Key,
    Value,
}

/// The features of a row: numbers that no other row, head or half has.
fn features(name: u64, head: usize, part: Part, dim: usize) -> impl Iterator<Item = f64> {
    let first = ((name * 4 + head as u64) * 2 + part as u64) * 4;
    (0..dim as u64).map(move |d| (first + d) as f64)
}
