//! Attention over a paged KV cache is bit-identical to attention over contiguous keys.

use regard::cache::CacheShape;
use regard::{
    Element, Error, Isa, KvCache, Machine, Mask, Output, Plan, Problem, Score, Sequence, View, bf16,
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
