//! Draft tokens, key lists and latent attention: what the case table cannot say of them.

use regard::cache::{CacheShape, Quantization};
use regard::mask::KeyLists;
use regard::problem::Scope;
use regard::{
    Element, Error, Isa, KvCache, Machine, Mask, Number, Output, Plan, Problem, Shape, View, bf16,
};
use regard_testkit::Noise;
use regard_testkit::run::same_bits;

/// Parents of a tree with several roots.
fn parents(n: usize, noise: &mut Noise) -> Vec<Option<usize>> {
    (0..n).map(|i| Some(noise.below(i + 1)).filter(|parent| *parent < i)).collect()
}

fn forward<'a, E: Element>(
    (q, k, v): (View<'a, E>, View<'a, E>, View<'a, E>),
    mask: Mask,
    machine: Machine,
) -> Output<E> {
    let problem = Problem::new(&q, &k, &v).mask(mask);
    Plan::new(problem, machine).expect("fits").forward(q, k, v).expect("fits")
}

fn chain<E: Element>(isa: Isa) {
    let mut noise = Noise::new(3);
    for (q_len, drafts, k_len) in [(1, 1, 70), (5, 3, 130), (16, 16, 8300), (70, 12, 200)] {
        let parents: Vec<Option<usize>> = (0..drafts).map(|i: usize| i.checked_sub(1)).collect();
        let [q, k, v] = [4 * q_len, 2 * k_len, 2 * k_len].map(|n| noise.normals::<E>(n * 32));
        let views = || {
            let k = [&k, &v].map(|x| View::bhsd(x, [1, 2, k_len, 32]).expect("fits"));
            (View::bhsd(&q, [1, 4, q_len, 32]).expect("fits"), k[0], k[1])
        };
        let machine = Machine::detect().isa(isa).threads(2);
        let tree = forward(views(), Mask::tree(&parents), machine);
        let causal = forward(views(), Mask::causal(), machine);
        assert!(same_bits(&tree, &causal), "{}: {q_len} queries, {drafts} drafts", isa.name());
    }
}

#[test]
fn a_chain_of_draft_tokens_is_causal() {
    for isa in Isa::available() {
        chain::<f32>(isa);
        chain::<bf16>(isa);
    }
}

#[test]
fn a_token_whose_parent_comes_later_ends_its_path() {
    let mask = Mask::tree(&[Some(0), Some(2), Some(1)]);
    let scope = Scope { batch: 0, head: 0, q_len: 3, k_len: 5, offset: 2 };
    assert_eq!(mask.visible(&scope, 0), *std::slice::from_ref(&(0..3)));
    assert_eq!(mask.visible(&scope, 2), [0..2, 3..5]);
}

/// `Problem::check` refuses that; the mask alone answers all the same.
#[test]
fn a_tree_of_more_tokens_than_rows_does_not_panic() {
    let mask = Mask::tree(&[None, Some(0), Some(1)]);
    let scope = Scope { batch: 0, head: 0, q_len: 2, k_len: 2, offset: 0 };
    assert_eq!(mask.visible(&scope, 1), *std::slice::from_ref(&(0..2)));
    assert!(mask.is_visible(&scope, 1, 0));
}

/// Sequences of these lengths in a cache, and each of them alone.
fn cached<E: Element>(lens: &[usize], q_len: usize, isa: Isa) {
    const DIM: usize = 32;
    let mut noise = Noise::new(11);
    let shape = CacheShape { heads: 1, qk_dim: DIM, v_dim: DIM, page: 64 };
    let mut cache = KvCache::<E>::new(shape, 1 << 26).expect("fits");
    let pasts: Vec<[Vec<E>; 2]> =
        lens.iter().map(|n| [(); 2].map(|()| noise.normals(n * DIM))).collect();
    let mut sequences = Vec::new();
    for (past, len) in pasts.iter().zip(lens) {
        let [k, v] = [0, 1].map(|i| View::matrix(&past[i], [*len, DIM]).expect("fits"));
        sequences.push(cache.start().expect("fits"));
        cache.append(sequences[sequences.len() - 1], k, v).expect("fits");
    }
    let q: Vec<E> = noise.normals(lens.len() * 4 * q_len * DIM);
    let view = View::bhsd(&q, [lens.len(), 4, q_len, DIM]).expect("fits");
    let trees: Vec<_> = lens.iter().map(|_| parents(q_len, &mut noise)).collect();
    let lists: Vec<Vec<Vec<usize>>> = lens
        .iter()
        .map(|n| (0..q_len).map(|_| (0..50).map(|_| noise.below(*n)).collect()).collect())
        .collect();
    let machine = Machine::detect().isa(isa).threads(3);
    let of_lists = |items: &[Vec<Vec<usize>>]| {
        let shape = [items.len(), 1, q_len];
        Mask::keys(KeyLists::new(&items.concat(), shape).expect("fits"))
    };
    for (name, all, one) in
        [("tree", Mask::trees(&trees), None), ("keys", of_lists(&lists), Some(()))]
    {
        let problem = Problem::cached(&view, &cache, &sequences).expect("fits").mask(all);
        let plan = Plan::new(problem, machine).expect("fits");
        let paged = plan.forward_cached(view, &cache, &sequences).expect("fits");
        for (b, len) in lens.iter().enumerate() {
            let own = &q[b * 4 * q_len * DIM..][..4 * q_len * DIM];
            let own = View::bhsd(own, [1, 4, q_len, DIM]).expect("fits");
            let [k, v] = [0, 1].map(|i| View::matrix(&pasts[b][i], [*len, DIM]).expect("fits"));
            let mask = match one {
                None => Mask::tree(&trees[b]),
                Some(()) => of_lists(&lists[b..=b]),
            };
            let alone = forward((own, k, v), mask, machine);
            let rows = 4 * q_len;
            let out = &paged.out.data()[b * rows * DIM..][..rows * DIM];
            let wide =
                |x: &[E]| -> Vec<f64> { x.iter().map(|x| Number::to_f64(x.widen())).collect() };
            assert_eq!(wide(out), wide(alone.out.data()), "{name} on {}: item {b}", isa.name());
        }
    }
}

#[test]
fn draft_tokens_and_key_lists_over_a_cache_have_the_bits_of_tensors() {
    for isa in Isa::available() {
        cached::<f32>(&[130, 64, 201], 4, isa);
        cached::<f32>(&[8300, 100], 8, isa);
        cached::<bf16>(&[300, 77], 16, isa);
        cached::<f32>(&[300, 200], 33, isa);
    }
}

fn latent<E: Element>(isa: Isa) {
    let mut noise = Noise::new(5);
    for (heads, q_len, k_len, [dim, v_dim]) in [
        (16, 1, 130, [72, 64]),
        (128, 1, 8300, [72, 64]),
        (16, 3, 200, [576, 512]),
        (8, 40, 200, [72, 64]),
    ] {
        let (q, k): (Vec<E>, Vec<E>) =
            (noise.normals(heads * q_len * dim), noise.normals(k_len * dim));
        let copy: Vec<E> = k.chunks(dim).flat_map(|row| row[..v_dim].to_vec()).collect();
        let q = View::bhsd(&q, [1, heads, q_len, dim]).expect("fits");
        let k = View::matrix(&k, [k_len, dim]).expect("fits");
        let machine = Machine::detect().isa(isa).threads(2);
        let v = View::matrix(&copy, [k_len, v_dim]).expect("fits");
        let expected = forward((q, k, v), Mask::causal(), machine);
        let view = forward((q, k, k.first_features(v_dim).expect("fits")), Mask::causal(), machine);
        assert!(same_bits(&view, &expected), "{}: {heads} heads of {dim}", isa.name());

        let shape = CacheShape { heads: 1, qk_dim: dim, v_dim, page: 64 };
        let mut cache = KvCache::<E>::latent(shape, 1 << 26).expect("fits");
        let sequence = cache.start().expect("fits");
        let first = View::matrix(k.row(0, 0, 0), [1, dim]).expect("fits");
        cache.append_keys(sequence, first).expect("fits");
        let rest: Vec<E> = (1..k_len).flat_map(|i| k.row(0, 0, i).to_vec()).collect();
        let rest = View::matrix(&rest, [k_len - 1, dim]).expect("fits");
        cache.append_keys(sequence, rest).expect("fits");
        assert_eq!(cache.bytes(), k_len.div_ceil(64) * 64 * dim * size_of::<E>());
        let fork = cache.fork(sequence).expect("fits");
        cache.append_keys(sequence, first).expect("fits"); // copies the last page, if it is not full
        let problem = Problem::cached(&q, &cache, &[fork]).expect("fits").mask(Mask::causal());
        let plan = Plan::new(problem, machine).expect("fits");
        let paged = plan.forward_cached(q, &cache, &[fork]).expect("fits");
        assert!(same_bits(&paged, &expected), "{}: {heads} heads of {dim}, paged", isa.name());
    }
}

#[test]
fn a_latent_cache_has_the_bits_of_tensors() {
    for isa in Isa::available() {
        latent::<f32>(isa);
        latent::<bf16>(isa);
    }
}

/// Draft tokens, key lists and latent keys in 8 bits, and the same in `f32` over the numbers that the cache holds.
fn in_8_bits((quantization, latent): (Quantization, bool), [q_len, k_len]: [usize; 2], isa: Isa) {
    const HEADS: usize = 2;
    const SERVED: usize = 4;
    const DIM: usize = 72;
    const V_DIM: usize = 64;
    let mut noise = Noise::new(17);
    let shape = CacheShape { heads: HEADS, qk_dim: DIM, v_dim: V_DIM, page: 7 };
    let new = if latent { KvCache::<f32>::latent_quantized } else { KvCache::quantized };
    let mut cache = new(shape, quantization, 1 << 26).expect("fits");
    let mut sequence = cache.start().expect("fits");
    for n in [k_len - 1, 1] {
        sequence = cache.fork(sequence).expect("fits"); // copies the last page, if it is not full
        let [k, v] = [DIM, V_DIM].map(|dim| noise.normals::<f32>(HEADS * n * dim));
        let k = View::bhsd(&k, [1, HEADS, n, DIM]).expect("fits");
        let v = View::bhsd(&v, [1, HEADS, n, V_DIM]).expect("fits");
        let done =
            if latent { cache.append_keys(sequence, k) } else { cache.append(sequence, k, v) };
        done.expect("fits");
    }
    let (mut k, mut v) = (Vec::new(), Vec::new());
    for (head, i) in (0..HEADS).flat_map(|head| (0..k_len).map(move |i| (head, i))) {
        let [key, value] = cache.numbers(sequence, head, i).expect("held");
        assert!(!latent || value == key[..V_DIM]);
        k.extend(key);
        v.extend(value);
    }
    let k = View::bhsd(&k, [1, HEADS, k_len, DIM]).expect("fits");
    let v = View::bhsd(&v, [1, HEADS, k_len, V_DIM]).expect("fits");
    let q: Vec<f32> = noise.normals(HEADS * SERVED * q_len * DIM);
    let q = View::bhsd(&q, [1, HEADS * SERVED, q_len, DIM]).expect("fits");
    let mut lists = |heads: usize, n: usize| {
        let lists: Vec<Vec<usize>> =
            (0..heads * q_len).map(|_| (0..n).map(|_| noise.below(k_len)).collect()).collect();
        KeyLists::new(&lists, [1, heads, q_len]).expect("fits")
    };
    let masks = [
        Mask::keys(lists(1, 50)),
        Mask::keys(lists(HEADS, 100).head_block(SERVED)),
        Mask::keys(lists(HEADS * SERVED, 10)),
        Mask::tree(&parents(q_len.min(k_len), &mut noise)),
        Mask::causal().and(Mask::dilated(3)),
        Mask::causal(),
    ];
    for (mask, threads) in masks.iter().flat_map(|mask| [(mask, 1), (mask, 3)]) {
        let machine = Machine::detect().isa(isa).threads(threads);
        let problem = Problem::cached(&q, &cache, &[sequence]).expect("fits").mask(mask.clone());
        let plan = Plan::new(problem, machine).expect("fits");
        let found = plan.forward_cached(q, &cache, &[sequence]).expect("fits");
        let expected = forward((q, k, v), mask.clone(), machine);
        let name = quantization.name();
        assert!(same_bits(&found, &expected), "{}: {name} {mask} {q_len} {k_len}", isa.name());
    }
}

#[test]
fn gathered_and_latent_keys_in_8_bits_have_the_bits_of_the_numbers_held() {
    for isa in Isa::available() {
        for of in Quantization::ALL.into_iter().flat_map(|of| [(of, false), (of, true)]) {
            for lens in [[1, 2], [1, 130], [4, 201], [3, 8300], [40, 300]] {
                in_8_bits(of, lens, isa);
            }
        }
    }
}

#[test]
fn a_latent_cache_in_8_bits_has_one_scale_for_a_key_and_its_value() {
    let shape = CacheShape { heads: 2, qk_dim: 5, v_dim: 3, page: 4 };
    for (quantization, bytes) in [(Quantization::Int8, 5 + 4), (Quantization::Fp8E4m3, 5)] {
        let mut cache =
            KvCache::<bf16>::latent_quantized(shape, quantization, 1 << 20).expect("fits");
        let sequence = cache.start().expect("fits");
        let k = [127.0, 0.0, -2.0, 9.0, 1.0, 0.0, 0.5, 1.0, 0.25, 31.75].map(bf16::from_f32);
        cache.append_keys(sequence, View::bhsd(&k, [1, 2, 1, 5]).expect("fits")).expect("fits");
        assert_eq!(cache.bytes(), 2 * 4 * bytes);
        let [key, value] = cache.numbers(sequence, 1, 0).expect("held");
        assert_eq!((&key[..3], value), (&[0.0, 0.5, 1.0][..], vec![0.0, 0.5, 1.0]));
    }
    let refused = KvCache::<f64>::latent_quantized(shape, Quantization::Int8, 1 << 20);
    assert!(matches!(refused, Err(Error::NotQuantized { .. })));
    let wider = CacheShape { v_dim: 6, ..shape };
    let refused = KvCache::<f32>::latent_quantized(wider, Quantization::Int8, 1 << 20);
    assert!(matches!(refused, Err(Error::OutOfRange { found: 6, limit: 6, .. })));
}

#[test]
fn key_lists_cost_what_they_hold() {
    let (q_len, k_len, n) = (40, 100_000, 1000);
    let mut noise = Noise::new(9);
    let shape = |heads, len| Shape { batch: 1, heads, len, dim: 64 };
    for row_block in [1, 20, 40] {
        let lists: Vec<Vec<usize>> =
            (0..q_len / row_block).map(|_| (0..n).map(|_| noise.below(k_len)).collect()).collect();
        let pairs: usize = lists
            .iter()
            .map(|list| {
                let mut keys = list.clone();
                keys.sort_unstable();
                keys.dedup();
                keys.len() * row_block * 16
            })
            .sum();
        let lists = KeyLists::new(&lists, [1, 1, q_len / row_block]).expect("fits");
        let problem = Problem::<f32>::of_shapes(shape(16, q_len), shape(1, k_len), shape(1, k_len));
        let problem = problem.mask(Mask::keys(lists.row_block(row_block)));
        let work = Plan::new(problem, Machine::detect()).expect("fits").work();
        assert_eq!(work.pairs, pairs as u128);
        assert!(work.computed <= work.pairs * 11 / 10, "{row_block}: {work:?}");
    }
}

#[test]
fn heads_beyond_a_task_have_the_bits_of_their_own_call() {
    let mut noise = Noise::new(13);
    let (q, k): (Vec<f32>, Vec<f32>) = (noise.normals(32 * 40), noise.normals(300 * 40));
    let k = View::matrix(&k, [300, 40]).expect("fits");
    for isa in Isa::available() {
        let machine = Machine::detect().isa(isa).threads(2);
        let all = View::bhsd(&q, [1, 32, 1, 40]).expect("fits");
        let all = forward((all, k, k), Mask::causal(), machine);
        for half in 0..2 {
            let q = View::bhsd(&q[half * 16 * 40..][..16 * 40], [1, 16, 1, 40]).expect("fits");
            let own = forward((q, k, k), Mask::causal(), machine);
            assert_eq!(own.out.data(), &all.out.data()[half * 16 * 40..][..16 * 40]);
        }
    }
}
