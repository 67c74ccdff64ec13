//! Attention over a paged KV cache is bit-identical to attention over contiguous keys; in 8 bits, over the numbers that the cache holds.

use regard::cache::{CacheShape, Quantization};
use regard::{
    AttentionView, Element, Error, Isa, KvCache, Machine, Mask, Output, Plan, Problem, Score,
    Sequence, View, bf16,
};
use regard_testkit::Noise;
use regard_testkit::run::same_bits;

const HEADS: usize = 2;
const SERVED: usize = 3;
const DIM: usize = 24;
const V_DIM: usize = 40;

/// Keys and values of one sequence, `[1, HEADS, len, dim]`.
struct Past<E> {
    k: Vec<E>,
    v: Vec<E>,
    len: usize,
}

impl<E: Element> Past<E> {
    fn new(noise: &mut Noise, len: usize) -> Self {
        Self { k: noise.normals(HEADS * len * DIM), v: noise.normals(HEADS * len * V_DIM), len }
    }

    fn views(&self) -> (View<'_, E>, View<'_, E>) {
        let k = View::bhsd(&self.k, [1, HEADS, self.len, DIM]).expect("fits");
        (k, View::bhsd(&self.v, [1, HEADS, self.len, V_DIM]).expect("fits"))
    }
}

fn cache<E: Element>(page: usize) -> KvCache<E> {
    let shape = CacheShape { heads: HEADS, qk_dim: DIM, v_dim: V_DIM, page };
    KvCache::new(shape, 1 << 26).expect("fits")
}

fn described<E: Element>(problem: Problem<'_, E>, windowed: bool) -> Problem<'_, E> {
    let mask = if windowed { Mask::causal().window(70) } else { Mask::causal() };
    problem.mask(mask).score(Score::new().softcap(5.0))
}

/// Compares sequences of these lengths, with `q_len` queries each, in pages of `page` positions.
fn compare<E: Element>(lens: &[usize], q_len: usize, page: usize, isa: Isa) {
    let mut noise = Noise::new(7);
    let pasts: Vec<Past<E>> = lens.iter().map(|len| Past::new(&mut noise, *len)).collect();
    let mut cache = cache::<E>(page);
    let sequences: Vec<Sequence> = pasts
        .iter()
        .map(|past| {
            let sequence = cache.start().expect("fits");
            let (k, v) = past.views();
            cache.append(sequence, k, v).expect("fits");
            sequence
        })
        .collect();
    let heads = HEADS * SERVED;
    let q: Vec<E> = noise.normals(lens.len() * heads * q_len * DIM);
    let view = View::bhsd(&q, [lens.len(), heads, q_len, DIM]).expect("fits");
    for (threads, windowed) in [(1, false), (3, false), (2, true)] {
        let machine = Machine::detect().isa(isa).threads(threads);
        let problem =
            described(Problem::cached(&view, &cache, &sequences).expect("fits"), windowed);
        let plan = Plan::new(problem, machine).expect("fits");
        let paged = plan.forward_cached(view, &cache, &sequences).expect("fits");
        for (b, past) in pasts.iter().enumerate() {
            let rows = heads * q_len;
            let own = &q[b * rows * DIM..][..rows * DIM];
            let own = View::bhsd(own, [1, heads, q_len, DIM]).expect("fits");
            let (k, v) = past.views();
            let problem = described(Problem::new(&own, &k, &v), windowed);
            let alone =
                Plan::new(problem, machine).expect("fits").forward(own, k, v).expect("fits");
            let part = |x: &[E::Num]| x[b * rows..(b + 1) * rows].to_vec();
            let states = paged.states[b * rows..(b + 1) * rows].to_vec();
            let out = paged.out.data()[b * rows * V_DIM..(b + 1) * rows * V_DIM].to_vec();
            let out =
                regard::Tensor::new(out, alone.out.shape(), alone.out.layout()).expect("fits");
            let mut item = Output::new(out, part(&paged.lse));
            item.states = states;
            let name = isa.name();
            assert!(
                same_bits(&item, &alone),
                "{name} {lens:?} queries {q_len} page {page} item {b}"
            );
        }
    }
}

#[test]
fn pages_of_any_size_give_the_bits_of_one_piece() {
    for isa in Isa::available() {
        for page in [1, 7, 64, 100] {
            compare::<f32>(&[130, 64, 201], 1, page, isa);
            compare::<f32>(&[70, 129], 5, page, isa);
            compare::<f32>(&[140, 200], 70, page, isa);
            compare::<bf16>(&[130, 64, 201], 1, page, isa);
            compare::<bf16>(&[140, 200], 70, page, isa);
        }
    }
}

#[test]
fn a_long_neighbour_changes_nothing() {
    for isa in Isa::available() {
        compare::<f32>(&[100, 9000, 5000], 1, 64, isa);
    }
}

/// Largest difference between `forward_cached` and `forward_shared`, for sequences with a shared prefix of `common`
/// positions and `own` further positions each.
fn share<E: Element>(common: usize, own: &[usize]) -> f64 {
    let mut noise = Noise::new(11);
    let (past, mut cache) = (Past::<E>::new(&mut noise, common), cache::<E>(64));
    let first = cache.start().expect("fits");
    let (k, v) = past.views();
    cache.append(first, k, v).expect("fits");
    let sequences: Vec<Sequence> = own
        .iter()
        .map(|len| {
            let (sequence, own) =
                (cache.fork(first).expect("fits"), Past::<E>::new(&mut noise, *len));
            let (k, v) = own.views();
            cache.append(sequence, k, v).expect("fits");
            sequence
        })
        .collect();
    let heads = HEADS * SERVED;
    let q: Vec<E> = noise.normals(own.len() * heads * DIM);
    let q = View::bshd(&q, [own.len(), 1, heads, DIM]).expect("fits");
    let problem = Problem::cached(&q, &cache, &sequences).expect("fits").mask(Mask::causal());
    let plan = Plan::new(problem, Machine::detect()).expect("fits");
    let each = plan.forward_cached(q, &cache, &sequences).expect("fits");
    let shared = plan.forward_shared(q, &cache, &sequences).expect("fits");
    let wide = |x: &E| regard_testkit::close::wide(*x);
    let rows = |o: &Output<E>| {
        let view = o.out.view();
        let of = |b| (0..heads).flat_map(move |h| view.row(b, h, 0).iter());
        (0..own.len()).flat_map(of).map(wide).collect::<Vec<f64>>()
    };
    let lse =
        each.lse.iter().zip(&shared.lse).map(|(a, b)| {
            (regard_testkit::close::wide(*a) - regard_testkit::close::wide(*b)).abs()
        });
    assert!(lse.fold(0.0, f64::max) < 1e-5);
    let errors = rows(&each).into_iter().zip(rows(&shared)).map(|(a, b)| (a - b).abs());
    errors.fold(0.0, f64::max)
}

#[test]
fn a_shared_past_read_once_gives_the_same_results() {
    let worst = share::<f32>(640, &[1, 70, 130, 5]);
    assert!(worst > 0.0 && worst < 1e-6, "{worst}");
    let worst = share::<bf16>(640, &[1, 70, 130, 5]);
    assert!(worst < 1e-2, "{worst}");
    assert_eq!(share::<f32>(100, &[1, 70]), 0.0, "a past too short to be worth it");
}

#[test]
fn positions_that_sequences_do_not_share_cannot_be_spoken_of() {
    let (mut noise, mut cache) = (Noise::new(5), cache::<f32>(16));
    let sequences = [10, 20].map(|len| {
        let (past, sequence) = (Past::<f32>::new(&mut noise, len), cache.start().expect("fits"));
        let (k, v) = past.views();
        cache.append(sequence, k, v).expect("fits");
        sequence
    });
    let q: Vec<f32> = noise.normals(2 * HEADS * DIM);
    let q = View::bhsd(&q, [2, HEADS, 1, DIM]).expect("fits");
    let ids = vec![0; 2 * 20];
    let mask = Mask::segments_between(&[0, 0], &ids);
    let problem = Problem::cached(&q, &cache, &sequences).expect("fits").mask(mask);
    let why = Plan::new(problem, Machine::detect()).expect_err("refused");
    assert_eq!(why, Error::Packed { option: "segments" });
}

#[test]
fn a_plan_for_other_lengths_or_for_tensors_is_an_error() {
    let mut noise = Noise::new(3);
    let (past, mut cache) = (Past::<f32>::new(&mut noise, 10), cache::<f32>(4));
    let sequence = cache.start().expect("fits");
    let (k, v) = past.views();
    cache.append(sequence, k, v).expect("fits");
    let q: Vec<f32> = noise.normals(HEADS * DIM);
    let q = View::bhsd(&q, [1, HEADS, 1, DIM]).expect("fits");
    let problem = Problem::cached(&q, &cache, &[sequence]).expect("fits");
    let plan = Plan::new(problem, Machine::detect()).expect("fits");
    assert!(plan.forward_cached(q, &cache, &[sequence]).is_ok());
    assert_eq!(plan.forward(q, k, v).expect_err("refused"), Error::OnlyCached);
    cache.append(sequence, k, v).expect("fits");
    let why = plan.forward_cached(q, &cache, &[sequence]).expect_err("refused").to_string();
    assert!(why.contains("10") && why.contains("20"), "{why}");
}

/// What a cache holds of a sequence, as `f32` tensors `[1, HEADS, len, ..]`.
fn held<E: Element<Num = f32>>(cache: &KvCache<E>, sequence: Sequence) -> Past<f32> {
    let (len, mut past) = (cache.len(sequence).expect("fits"), (Vec::new(), Vec::new()));
    for (head, i) in (0..HEADS).flat_map(|head| (0..len).map(move |i| (head, i))) {
        let [k, v] = cache.numbers(sequence, head, i).expect("held");
        past.0.extend(k);
        past.1.extend(v);
    }
    Past { k: past.0, v: past.1, len }
}

/// Compares a cache in 8 bits with the numbers that it holds as tensors of `f32`, and the outputs after narrowing.
fn compare_in_8_bits<E: Element<Num = f32>>(
    (quantization, page): (Quantization, usize),
    lens: &[usize],
    q_len: usize,
    isa: Isa,
) {
    let mut noise = Noise::new(7);
    let shape = CacheShape { heads: HEADS, qk_dim: DIM, v_dim: V_DIM, page };
    let mut cache = KvCache::<E>::quantized(shape, quantization, 1 << 26).expect("fits");
    let mut sequences = Vec::new();
    for len in lens {
        let (past, sequence) = (Past::<E>::new(&mut noise, *len), cache.start().expect("fits"));
        let (k, v) = past.views();
        cache.append(sequence, k, v).expect("fits");
        sequences.push(sequence);
    }
    let heads = HEADS * SERVED;
    let q: Vec<E> = noise.normals(lens.len() * heads * q_len * DIM);
    let view = View::bhsd(&q, [lens.len(), heads, q_len, DIM]).expect("fits");
    for (threads, windowed) in [(1, false), (3, false), (2, true)] {
        let machine = Machine::detect().isa(isa).threads(threads);
        let problem = Problem::cached(&view, &cache, &sequences).expect("fits");
        let plan = Plan::new(described(problem, windowed), machine).expect("fits");
        let cached = plan.forward_cached(view, &cache, &sequences).expect("fits");
        let weights = AttentionView::cached(&plan, view, (&cache, &sequences[..]), &cached);
        let weights = weights.expect("fits").row(q_len - 1).expect("in range");
        for (b, sequence) in sequences.iter().enumerate() {
            let (past, rows) = (held(&cache, *sequence), heads * q_len);
            let own: Vec<f32> =
                q[b * rows * DIM..][..rows * DIM].iter().map(|x| x.widen()).collect();
            let own = View::bhsd(&own, [1, heads, q_len, DIM]).expect("fits");
            let (k, v) = past.views();
            let problem = described(Problem::new(&own, &k, &v), windowed);
            let plan = Plan::new(problem, machine).expect("fits");
            let alone = plan.forward(own, k, v).expect("fits");
            let name =
                format!("{} {} {lens:?} {q_len} {page} {b}", isa.name(), quantization.name());
            let narrowed: Vec<E> = alone.out.data().iter().map(|x| E::narrow(*x)).collect();
            assert_eq!(cached.out.data()[b * rows * V_DIM..][..rows * V_DIM], narrowed, "{name}");
            assert_eq!(cached.lse[b * rows..][..rows], alone.lse, "{name}");
            assert_eq!(cached.states[b * rows..][..rows], alone.states, "{name}");
            let row = AttentionView::new(&plan, own, k, &alone).expect("fits").row(q_len - 1);
            for (head, row) in row.expect("in range").chunks(past.len).enumerate() {
                let before = heads * lens[..b].iter().sum::<usize>();
                let found = &weights[before + head * past.len..][..past.len];
                assert_eq!(found, row, "weights, {name}");
            }
        }
    }
}

#[test]
fn a_cache_in_8_bits_has_the_bits_of_the_numbers_it_holds() {
    for (isa, quantization) in
        Isa::available().into_iter().flat_map(|isa| Quantization::ALL.map(|q| (isa, q)))
    {
        for page in [1, 7, 64, 100] {
            let of = (quantization, page);
            compare_in_8_bits::<f32>(of, &[130, 64, 201], 1, isa);
            compare_in_8_bits::<f32>(of, &[70, 129], 5, isa);
            compare_in_8_bits::<f32>(of, &[140, 200], 70, isa);
            compare_in_8_bits::<bf16>(of, &[130, 64, 201], 1, isa);
            compare_in_8_bits::<bf16>(of, &[140, 200], 70, isa);
        }
        compare_in_8_bits::<f32>((quantization, 64), &[100, 9000, 5000], 1, isa);
    }
}

#[test]
fn a_shared_past_in_8_bits_is_read_once() {
    for quantization in Quantization::ALL {
        let mut noise = Noise::new(11);
        let shape = CacheShape { heads: HEADS, qk_dim: DIM, v_dim: V_DIM, page: 64 };
        let mut cache = KvCache::<f32>::quantized(shape, quantization, 1 << 26).expect("fits");
        let first = cache.start().expect("fits");
        let past = Past::<f32>::new(&mut noise, 640);
        cache.append(first, past.views().0, past.views().1).expect("fits");
        let sequences = [70, 5].map(|len| {
            let (fork, own) = (cache.fork(first).expect("fits"), Past::new(&mut noise, len));
            cache.append(fork, own.views().0, own.views().1).expect("fits");
            fork
        });
        let q: Vec<f32> = noise.normals(2 * HEADS * SERVED * DIM);
        let q = View::bhsd(&q, [2, HEADS * SERVED, 1, DIM]).expect("fits");
        let problem = Problem::cached(&q, &cache, &sequences).expect("fits");
        let plan = Plan::new(problem, Machine::detect()).expect("fits");
        let each = plan.forward_cached(q, &cache, &sequences).expect("fits");
        let shared = plan.forward_shared(q, &cache, &sequences).expect("fits");
        let apart = each.out.data().iter().zip(shared.out.data()).map(|(a, b)| (a - b).abs());
        let worst = apart.fold(0.0, f32::max);
        assert!(worst > 0.0 && worst < 1e-6, "{worst}");
    }
}

#[test]
fn a_plan_for_a_cache_that_stores_numbers_in_another_way_is_an_error() {
    let (mut noise, mut one) = (Noise::new(3), cache::<bf16>(4));
    let past = Past::<bf16>::new(&mut noise, 10);
    let (k, v) = past.views();
    let mut other = KvCache::quantized(one.shape(), Quantization::Int8, 1 << 20).expect("fits");
    let sequence = one.start().expect("fits");
    assert_eq!(other.start().expect("fits"), sequence);
    one.append(sequence, k, v).expect("fits");
    other.append(sequence, k, v).expect("fits");
    let q: Vec<bf16> = noise.normals(HEADS * DIM);
    let q = View::bhsd(&q, [1, HEADS, 1, DIM]).expect("fits");
    for (planned, found) in [(&one, &other), (&other, &one)] {
        let problem = Problem::cached(&q, planned, &[sequence]).expect("fits");
        let plan = Plan::new(problem, Machine::detect()).expect("fits");
        let why = plan.forward_cached(q, found, &[sequence]).expect_err("refused").to_string();
        assert!(why.contains("int8") && why.contains("elements"), "{why}");
        assert_eq!(plan.forward(q, k, v).expect_err("refused"), Error::OnlyCached);
    }
    let why = KvCache::<f64>::quantized(one.shape(), Quantization::Fp8E4m3, 1 << 20);
    let why = why.expect_err("refused").to_string();
    assert!(why.contains("fp8_e4m3") && why.contains("f64") && why.contains("bf16"), "{why}");
    let why = other.row(sequence, 0, 0).expect_err("refused").to_string();
    assert!(why.contains("int8") && why.contains("numbers"), "{why}");
}
