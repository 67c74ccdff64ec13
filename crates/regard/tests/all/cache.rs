//! A KV cache holds the same rows as a plain list, within its budget, after any sequence of calls.

use proptest::prelude::*;
use regard::cache::{CacheShape, PAGE, Quantization};
use regard::tensor::Strides;
use regard::{Error, KvCache, Sequence, Shape, View};
use regard_testkit::{CacheModel, Noise};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_cache_holds_what_lists_of_rows_would(
        cache in any::<[u8; 4]>(),
        calls in proptest::collection::vec(any::<[u8; 4]>(), 0..120),
    ) {
        let mut model = CacheModel::new(cache);
        for call in calls {
            model.step(call);
            model.check_all();
        }
        model.free_all();
    }
}

#[test]
fn a_cache_holds_what_lists_of_rows_would_for_a_million_calls() {
    let mut noise = Noise::new(20);
    for round in 0..10u8 {
        // From 9 to 16 pages of 2 to 5 positions.
        let mut model = CacheModel::new([round, round * 5, round % 4 + 1, 15 - round % 8]);
        for _ in 0..100_000 {
            let [a, b, c, d, ..] = noise.bits().to_le_bytes();
            model.step([a, b, c, d]);
        }
        model.check_all();
        let seen = model.counts();
        let least = [seen.over_budget, seen.copied, seen.shortened, seen.stale].into_iter().min();
        assert!(least > Some(1000), "{seen:?}");
        model.free_all();
    }
}

/// A page holds 3 positions of 2 heads with 2 key features and 1 value feature: 72 bytes.
const SHAPE: CacheShape = CacheShape { heads: 2, qk_dim: 2, v_dim: 1, page: 3 };
const BYTES: usize = 72;

/// Appends `n` rows filled with `x`.
fn append(cache: &mut KvCache<f32>, to: Sequence, n: usize, x: f32) -> Result<(), Error> {
    let data = vec![x; n * 2 * 2];
    let (k, v) = (View::bhsd(&data, [1, 2, n, 2])?, View::bhsd(&data, [1, 2, n, 1])?);
    cache.append(to, k, v)
}

/// The rows of a sequence, one number each.
fn rows(cache: &KvCache<f32>, of: Sequence) -> Result<Vec<f32>, Error> {
    let row = |i| {
        let x = cache.row(of, 0, i)?.1[0];
        for head in 0..2 {
            assert_eq!(cache.row(of, head, i)?, (&[x; 2][..], &[x][..]));
        }
        Ok(x)
    };
    (cache.first(of)?..cache.len(of)?).map(row).collect()
}

#[test]
fn the_first_to_write_to_a_shared_page_copies_that_page_alone() {
    let mut cache = KvCache::new(SHAPE, 100 * BYTES).unwrap();
    let a = cache.start().unwrap();
    append(&mut cache, a, 8, 1.0).unwrap();
    assert_eq!(cache.bytes_in_use(), 3 * BYTES);
    let [b, c] = [cache.fork(a).unwrap(), cache.fork(a).unwrap()];
    assert_eq!(cache.bytes_in_use(), 3 * BYTES, "a fork copies nothing");
    append(&mut cache, a, 1, 2.0).unwrap();
    assert_eq!(cache.bytes_in_use(), 4 * BYTES, "one page is copied, not three");
    append(&mut cache, b, 1, 3.0).unwrap();
    assert_eq!(cache.bytes_in_use(), 5 * BYTES);
    append(&mut cache, c, 1, 4.0).unwrap();
    assert_eq!(cache.bytes_in_use(), 5 * BYTES, "the last one to hold it writes in place");
    for (sequence, x) in [(a, 2.0), (b, 3.0), (c, 4.0)] {
        assert_eq!(rows(&cache, sequence), Ok([vec![1.0; 8], vec![x]].concat()));
    }
    assert_eq!(cache.shared_prefix(&[a, b, c]), Ok(0..6));
    // All pages are full: the next row needs a new page and no copy.
    let d = cache.fork(a).unwrap();
    append(&mut cache, d, 1, 5.0).unwrap();
    assert_eq!(cache.bytes_in_use(), 6 * BYTES);
    assert_eq!(cache.shared_prefix(&[a, d]), Ok(0..9));
    // Truncate into a page shared with another sequence: appending there copies it.
    cache.truncate(d, 4).unwrap();
    append(&mut cache, d, 1, 6.0).unwrap();
    assert_eq!(rows(&cache, d), Ok(vec![1.0, 1.0, 1.0, 1.0, 6.0]));
    assert_eq!(rows(&cache, a), Ok([vec![1.0; 8], vec![2.0]].concat()));
}

#[test]
fn the_budget_is_used_to_its_last_page_and_no_further() {
    let mut cache = KvCache::new(SHAPE, 3 * BYTES + BYTES - 1).unwrap();
    let [a, b] = [cache.start().unwrap(), cache.start().unwrap()];
    let over =
        |pages: usize| Err(Error::Budget { needed: pages * BYTES, budget: 3 * BYTES + BYTES - 1 });
    assert_eq!(append(&mut cache, a, 10, 1.0), over(4));
    assert_eq!((cache.bytes(), cache.len(a)), (0, Ok(0)), "nothing was done");
    append(&mut cache, a, 8, 1.0).unwrap();
    assert_eq!(cache.bytes(), 3 * BYTES);
    assert_eq!(append(&mut cache, b, 1, 2.0), over(4));
    append(&mut cache, a, 1, 1.0).unwrap();
    assert_eq!(append(&mut cache, a, 1, 1.0), over(4));
    assert_eq!(append(&mut cache, a, 0, 1.0), Ok(()), "nothing needs no page");
    // A copied page counts against the budget.
    cache.truncate(a, 8).unwrap();
    let c = cache.fork(a).unwrap();
    assert_eq!(append(&mut cache, c, 1, 3.0), over(4));
    assert_eq!(append(&mut cache, c, 4, 3.0), over(5));
    assert_eq!([rows(&cache, c), rows(&cache, a)], [Ok(vec![1.0; 8]), Ok(vec![1.0; 8])]);
    // Freeing or evicting pages makes room.
    cache.free(a).unwrap();
    append(&mut cache, c, 1, 3.0).unwrap();
    assert_eq!(append(&mut cache, b, 1, 2.0), over(4));
    assert_eq!(cache.evict(c, 5), Ok(3));
    append(&mut cache, b, 1, 2.0).unwrap();
    assert_eq!(rows(&cache, c), Ok(vec![1.0, 1.0, 1.0, 1.0, 1.0, 3.0]));
    assert_eq!(rows(&cache, b), Ok(vec![2.0]));
    assert_eq!(cache.bytes(), 3 * BYTES, "a page that waits is used before a new one");
}

#[test]
fn a_window_slides_by_whole_pages_and_positions_keep_their_numbers() {
    let mut cache = KvCache::new(SHAPE, 3 * BYTES).unwrap();
    let a = cache.start().unwrap();
    for i in 0..1000u16 {
        append(&mut cache, a, 1, f32::from(i)).unwrap();
        let len = cache.len(a).unwrap();
        let first = cache.evict(a, len.saturating_sub(4)).unwrap();
        assert!(len - first < 4 + 3 && first.is_multiple_of(3));
        assert!(rows(&cache, a).unwrap().into_iter().eq((first..len).map(|i| i as f32)));
    }
    // Eviction stops at the end of the sequence and never removes a page that is not full.
    assert_eq!(cache.evict(a, usize::MAX), Ok(999));
    assert_eq!((cache.len(a), cache.pages_held(a)), (Ok(1000), Ok(1)));
    cache.truncate(a, 999).unwrap();
    assert_eq!((cache.first(a), cache.len(a), cache.bytes_in_use()), (Ok(999), Ok(999), 0));
}

#[test]
fn what_one_sequence_evicted_is_not_shared() {
    let mut cache = KvCache::new(SHAPE, 9 * BYTES).unwrap();
    let a = cache.start().unwrap();
    append(&mut cache, a, 13, 1.0).unwrap();
    let b = cache.fork(a).unwrap();
    assert_eq!(cache.shared_prefix(&[a, b]), Ok(0..12));
    assert_eq!(cache.shared_prefix(&[a]), Ok(0..12));
    cache.evict(b, 7).unwrap();
    assert_eq!(cache.shared_prefix(&[a, b]), Ok(6..12));
    let empty = cache.start().unwrap();
    assert_eq!(cache.shared_prefix(&[a, b, empty]), Ok(6..6));
    assert_eq!(cache.shared_prefix(&[]), Ok(0..0));
}

/// Compares the error, and looks for each word in its message.
fn refused<T: std::fmt::Debug>(result: Result<T, Error>, expected: Error, words: &[&str]) {
    let error = result.expect_err("it should be refused");
    for word in words {
        assert!(error.to_string().contains(word), "`{error}` does not say `{word}`");
    }
    assert_eq!(error, expected);
}

#[test]
fn shapes_that_no_page_can_have_are_errors() {
    let new = |shape| KvCache::<f32>::new(shape, usize::MAX);
    let heads = CacheShape { heads: 0, ..SHAPE };
    refused(new(heads), Error::Zero { option: "heads" }, &["heads: 0", "at least 1"]);
    let page = CacheShape { page: 0, ..SHAPE };
    refused(new(page), Error::Zero { option: "page" }, &["page: 0", "at least 1"]);
    let keys = CacheShape { qk_dim: 0, ..SHAPE };
    refused(new(keys), Error::NoFeatures { tensor: "k" }, &["k has 0", "at least 1"]);
    let max = usize::MAX;
    for (shape, found) in [
        (CacheShape { page: max, ..SHAPE }, [1, 2, max, 3]),
        (CacheShape { heads: max, ..SHAPE }, [1, max, 3, 3]),
        (CacheShape { qk_dim: max, ..SHAPE }, [1, 2, 3, max]),
        (CacheShape { v_dim: max - 2, ..SHAPE }, [1, 2, 3, max]),
        // The number of elements fits into `usize`, the number of bytes does not.
        (CacheShape { page: max / 16, ..SHAPE }, [1, 2, max / 16, 3]),
    ] {
        let e = Error::ShapeOverflow { shape: found };
        refused(new(shape), e, &[&format!("{found:?}"), "memory"]);
    }
    let e = Error::Budget { needed: BYTES, budget: BYTES - 1 };
    let words = ["72 bytes", "budget is 71", "raise the budget"];
    refused(KvCache::<f32>::new(SHAPE, BYTES - 1), e, &words);
}

#[test]
fn memory_that_the_system_does_not_give_is_an_error_and_changes_nothing() {
    // 2^60 bytes: more than any machine can address.
    let shape = CacheShape { heads: 1, qk_dim: 1, v_dim: 1, page: 1 << 57 };
    let mut cache = KvCache::<f32>::new(shape, usize::MAX).unwrap();
    let a = cache.start().unwrap();
    let x = View::matrix(&[1.0], [1, 1]).unwrap();
    let e = Error::OutOfMemory { bytes: 1 << 60 };
    refused(cache.append(a, x, x), e, &["1152921504606846976 bytes could not", "reduce the size"]);
    assert_eq!((cache.bytes(), cache.len(a), cache.pages_held(a)), (0, Ok(0), Ok(0)));
}

#[test]
fn more_positions_than_the_budget_holds_are_an_error_however_many() {
    let shape = CacheShape { heads: 1, qk_dim: 1, v_dim: 0, page: PAGE };
    let mut cache = KvCache::<f32>::new(shape, 1 << 20).unwrap();
    let a = cache.start().unwrap();
    let (repeated, len) = (Strides { batch: 0, heads: 0, len: 0 }, isize::MAX.unsigned_abs());
    let view =
        |dim| View::strided(&[1.0], Shape { batch: 1, heads: 1, len, dim }, repeated).unwrap();
    let e = Error::Budget { needed: usize::MAX, budget: 1 << 20 };
    refused(cache.append(a, view(1), view(0)), e, &["budget is 1048576"]);
    // Values without features take no memory.
    let k = View::matrix(&[1.0, 2.0], [2, 1]).unwrap();
    cache.append(a, k, View::matrix(&[], [2, 0]).unwrap()).unwrap();
    assert_eq!(cache.row(a, 0, 1), Ok((&[2.0][..], &[][..])));
}

#[test]
fn handles_and_positions_that_are_not_there_are_errors() {
    let mut cache = KvCache::new(SHAPE, 9 * BYTES).unwrap();
    let a = cache.start().unwrap();
    append(&mut cache, a, 8, 1.0).unwrap();
    cache.evict(a, 4).unwrap();
    let e = |option, found| Error::Evicted { option, found, first: 3 };
    refused(cache.row(a, 0, 2), e("position", 2), &["position: 2 was evicted", "give 3 or more"]);
    refused(cache.truncate(a, 1), e("truncate", 1), &["truncate: 1 was evicted", "3 or more"]);
    let e = |option, found, limit| Error::OutOfRange { option, found, limit };
    refused(cache.row(a, 0, 8), e("position", 8, 8), &["position: 8", "below 8"]);
    refused(cache.row(a, 2, 5), e("head", 2, 2), &["head: 2", "below 2"]);
    refused(cache.truncate(a, 9), e("truncate", 9, 9), &["truncate: 9", "below 9"]);
    cache.free(a).unwrap();
    let stale = Error::StaleSequence { index: 0, generation: 0 };
    let words = ["sequence 0 (generation 0)", "freed", "start or fork"];
    refused(cache.free(a), stale.clone(), &words);
    let b = cache.start().unwrap();
    refused(cache.len(a), stale, &words);
    let mut other = KvCache::<f32>::new(SHAPE, BYTES).unwrap();
    let e = Error::StaleSequence { index: 0, generation: 1 };
    refused(other.len(b), e.clone(), &["generation 1", "another KV cache"]);
    let c = other.start().unwrap();
    refused(other.len(b), e, &["another KV cache"]);
    assert_eq!(a, c, "caches that were asked for the same sequences give equal handles");
}

#[test]
fn a_page_in_8_bits_has_a_byte_for_each_number_and_int8_a_scale_for_each_row() {
    // 2 heads of 3 positions of 2 + 1 features; a scale for each key and each value.
    for (quantization, bytes) in [(Quantization::Int8, 18 + 12 * 4), (Quantization::Fp8E4m3, 18)] {
        let new = |budget| KvCache::<f32>::quantized(SHAPE, quantization, budget);
        let e = Error::Budget { needed: bytes, budget: bytes - 1 };
        refused(new(bytes - 1), e, &["raise the budget"]);
        let mut cache = new(3 * bytes).unwrap();
        assert_eq!((cache.capacity(), cache.storage()), (3, quantization.name()));
        let a = cache.start().unwrap();
        append(&mut cache, a, 4, 1.5).unwrap();
        let b = cache.fork(a).unwrap();
        assert_eq!(cache.bytes_in_use(), 2 * bytes);
        append(&mut cache, b, 1, -2.5).unwrap(); // copies a page, with its scales
        assert_eq!((cache.bytes_in_use(), cache.bytes()), (3 * bytes, 3 * bytes));
        let e = Error::Budget { needed: 4 * bytes, budget: 3 * bytes };
        refused(append(&mut cache, a, 3, 1.0), e, &["raise the budget"]);
        for (sequence, expected) in [(a, &[1.5; 4][..]), (b, &[1.5, 1.5, 1.5, 1.5, -2.5])] {
            for (i, x) in expected.iter().enumerate() {
                let [k, v] = cache.numbers(sequence, 1, i).unwrap();
                // 1.5 / 127 times 127, the scale rounded to 17 bits.
                let near = |found: &f32| (found - x).abs() <= 3e-5;
                assert!(k.iter().chain(&v).all(near), "{k:?} {v:?} {x}");
                assert_eq!((k.len(), v.len()), (2, 1));
            }
        }
        cache.truncate(b, 4).unwrap();
        assert_eq!(cache.evict(b, 3), Ok(3));
        assert_eq!(
            cache.numbers(b, 0, 2),
            Err(Error::Evicted { option: "position", found: 2, first: 3 })
        );
    }
    let shape = CacheShape { heads: 1 << 40, page: 1 << 21, ..SHAPE };
    let e = Error::ShapeOverflow { shape: [1, 1 << 40, 1 << 21, 3] };
    refused(KvCache::<f32>::quantized(shape, Quantization::Int8, usize::MAX), e, &["memory"]);
}
