//! Attention over packed sequences is bit-identical to separate calls for each sequence.

#![expect(clippy::unwrap_used, reason = "what cannot be set up has failed")]

use proptest::prelude::*;
use regard::cache::CacheShape;
use regard::plan::{OutputGrads, OutputMut};
use regard::problem::{Additive, Align, Normalizer, Similarity};
use regard::score::{RelativeBias, alibi_slopes};
use regard::{
    Element, Error, Grads, Isa, KvCache, Machine, Mask, Number, Output, Plan, Problem, Score,
    Tensor, View, ViewMut, bf16,
};
use regard_testkit::Noise;
use regard_testkit::close::wide;
use regard_testkit::run::same_bits;

const HEADS: usize = 2;
const SERVED: usize = 3;
const Q_HEADS: usize = HEADS * SERVED;
const DIM: usize = 24;
const V_DIM: usize = 40;

/// Options under test.
#[derive(Clone, Copy, Debug)]
enum Asked {
    Nothing,
    Causal,
    Window,
    Alibi,
    Softcap,
    Sinks,
    Diagonals,
    FromTheStart,
    Relative,
    Projected,
    Distances,
    Additive,
    Best,
}

const ALL: [Asked; 13] = [
    Asked::Nothing,
    Asked::Causal,
    Asked::Window,
    Asked::Alibi,
    Asked::Softcap,
    Asked::Sinks,
    Asked::Diagonals,
    Asked::FromTheStart,
    Asked::Relative,
    Asked::Projected,
    Asked::Distances,
    Asked::Additive,
    Asked::Best,
];

/// Largest distance with its own bias.
const REACH: usize = 4;

/// Learned parameters: one entry per query head, and `W`.
struct Each<E: Element> {
    slopes: Vec<E::Num>,
    sinks: Vec<E::Num>,
    table: Vec<E::Num>,
    w: Vec<E>,
}

impl<E: Element> Each<E> {
    fn new() -> Self {
        let number = |x: f32| E::Num::from_f64(f64::from(x));
        let mut noise = Noise::new(2);
        let slopes = alibi_slopes(Q_HEADS).into_iter().map(number).collect();
        let sinks = (0..Q_HEADS).map(|h| number(h as f32 * 0.5 - 1.0)).collect();
        let table = noise.normals((2 * REACH + 1) * Q_HEADS);
        Self { slopes, sinks, table, w: noise.normals(DIM * DIM) }
    }
}

impl Asked {
    fn of<'a, E: Element>(self, problem: Problem<'a, E>, each: &'a Each<E>) -> Problem<'a, E> {
        let causal = Mask::causal();
        match self {
            Self::Nothing => problem,
            Self::Causal => problem.mask(causal).entropy(),
            Self::Window => problem.mask(causal.window(70)),
            Self::Alibi => problem.mask(causal).score(Score::new().alibi(&each.slopes)),
            Self::Softcap => problem.score(Score::new().softcap(5.0)),
            Self::Sinks => problem.mask(causal).score(Score::new().sinks(&each.sinks)),
            Self::Diagonals => problem.mask(causal.and(Mask::strided(9))),
            Self::FromTheStart => problem.mask(causal).align(Align::Start),
            Self::Relative => {
                problem.score(Score::new().relative(RelativeBias::clipped(&each.table, REACH)))
            }
            Self::Projected => {
                let w = View::matrix(&each.w, [DIM, DIM]).unwrap();
                problem.mask(causal).similarity(Similarity::General(w))
            }
            Self::Distances => problem.similarity(Similarity::Distance),
            Self::Additive => {
                let w = View::matrix(&each.w, [DIM, DIM]).unwrap();
                let v = View::matrix(&each.w[..DIM], [1, DIM]).unwrap();
                let layer = Additive { w_q: w, w_k: Some(w), v };
                problem.mask(causal).similarity(Similarity::Additive(layer))
            }
            Self::Best => problem.mask(causal).normalizer(Normalizer::TopK(5)),
        }
    }
}

fn offsets(lens: &[usize]) -> Vec<usize> {
    let ends = lens.iter().scan(0, |end, len| {
        *end += len;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// Queries, keys and values of packed sequences.
struct Batch<E> {
    q: Vec<E>,
    k: Vec<E>,
    v: Vec<E>,
    /// Offsets of the queries and of the keys.
    offsets: [Vec<usize>; 2],
}

type Inputs<'b, E> = (View<'b, E>, View<'b, E>, View<'b, E>);

impl<E: Element> Batch<E> {
    fn new(q_lens: &[usize], k_lens: &[usize]) -> Self {
        let (offsets, mut noise) = ([offsets(q_lens), offsets(k_lens)], Noise::new(5));
        let [rows, keys] = offsets.each_ref().map(|o| *o.last().unwrap());
        Self {
            q: noise.normals(rows * Q_HEADS * DIM),
            k: noise.normals(keys * HEADS * DIM),
            v: noise.normals(keys * HEADS * V_DIM),
            offsets,
        }
    }

    fn len(&self) -> usize {
        self.offsets[0].len() - 1
    }

    fn packed(&self) -> Inputs<'_, E> {
        let [of_q, of_k] = &self.offsets;
        (
            View::packed(&self.q, of_q, [Q_HEADS, DIM]).unwrap(),
            View::packed(&self.k, of_k, [HEADS, DIM]).unwrap(),
            View::packed(&self.v, of_k, [HEADS, V_DIM]).unwrap(),
        )
    }

    fn alone(&self, item: usize) -> Inputs<'_, E> {
        let [of_q, of_k] = self.offsets.each_ref().map(|o| &o[item..item + 2]);
        (
            part(&self.q, of_q, [Q_HEADS, DIM]),
            part(&self.k, of_k, [HEADS, DIM]),
            part(&self.v, of_k, [HEADS, V_DIM]),
        )
    }
}

/// Rows `from[0]..from[1]` as a tensor of one item.
fn part<'a, E: Element>(data: &'a [E], from: &[usize], [heads, dim]: [usize; 2]) -> View<'a, E> {
    let size = heads * dim;
    View::bshd(&data[from[0] * size..from[1] * size], [1, from[1] - from[0], heads, dim]).unwrap()
}

/// Entries `[total, heads]` of an item as `[heads, len]`.
fn by_head<T: Copy>(entries: &[T], from: &[usize]) -> Vec<T> {
    let of = |head| (from[0]..from[1]).map(move |row| entries[row * Q_HEADS + head]);
    (0..Q_HEADS).flat_map(of).collect()
}

/// The output of one item of a packed output.
fn item<E: Element>(output: &Output<E>, from: &[usize]) -> Output<E> {
    let own = part(output.out.data(), from, [Q_HEADS, V_DIM]);
    let (shape, size) = (own.shape(), Q_HEADS * V_DIM);
    let data = output.out.data()[from[0] * size..from[1] * size].to_vec();
    let out = Tensor::new(data, shape, own.layout()).unwrap();
    let mut item = Output::new(out, by_head(&output.lse, from));
    item.states = by_head(&output.states, from);
    item.entropy = output.entropy.as_ref().map(|e| by_head(e, from));
    item.max_score = output.max_score.as_ref().map(|m| by_head(m, from));
    item
}

/// Gradients of a loss with respect to an output.
struct Told<E: Element> {
    out: Vec<E>,
    lse: Vec<E::Num>,
    entropy: Vec<E::Num>,
}

impl<E: Element> Told<E> {
    fn new(rows: usize) -> Self {
        let mut noise = Noise::new(9);
        Self {
            out: noise.normals(rows * Q_HEADS * V_DIM),
            lse: noise.normals(rows * Q_HEADS),
            entropy: noise.normals(rows * Q_HEADS),
        }
    }

    fn output_grads<'a>(&'a self, d_out: View<'a, E>, output: &Output<E>) -> OutputGrads<'a, E> {
        let output_grads = OutputGrads::new(d_out).lse(&self.lse);
        if output.entropy.is_some() { output_grads.entropy(&self.entropy) } else { output_grads }
    }

    fn item(&self, from: &[usize]) -> Self {
        let size = Q_HEADS * V_DIM;
        Self {
            out: self.out[from[0] * size..from[1] * size].to_vec(),
            lse: by_head(&self.lse, from),
            entropy: by_head(&self.entropy, from),
        }
    }
}

fn bits<E: Element>(data: &[E]) -> Vec<u64> {
    data.iter().map(|x| wide(*x).to_bits()).collect()
}

/// Checks that the gradients of each item are bit-identical to those of its own call, and that summed gradients are the
/// sums over all calls.
fn check_grads<E: Element>(batch: &Batch<E>, found: &Grads<E>, alone: &[Grads<E>], what: &str) {
    let [of_q, of_k] = &batch.offsets;
    assert_eq!(
        [&found.q, &found.k, &found.v].map(|t| t.offsets()),
        [of_q, of_k, of_k].map(|o| Some(&o[..]))
    );
    for (b, alone) in alone.iter().enumerate() {
        let same = |packed: &Tensor<E>, alone: &Tensor<E>, from: &[usize], name: &str| {
            let size = packed.shape().heads * packed.shape().dim;
            let own = &packed.data()[from[b] * size..from[b + 1] * size];
            assert!(bits(own) == bits(alone.data()), "{name} {what} item {b}");
        };
        same(&found.q, &alone.q, of_q, "q");
        same(&found.k, &alone.k, of_k, "k");
        same(&found.v, &alone.v, of_k, "v");
    }
    let sum = |of: &dyn Fn(&Grads<E>) -> f64, name: &str| {
        let terms: Vec<f64> = alone.iter().map(of).collect();
        let size: f64 = terms.iter().map(|x| x.abs()).sum();
        let off = (of(found) - terms.iter().sum::<f64>()).abs();
        // The gradient of `w_k` is one sum over the keys of all items.
        let share = if name == "w_k" { 1e-4 } else { 1e-6 };
        assert!(off <= share * size, "{name} {what}: off by {off} of {size}");
    };
    sum(&|g| g.scale, "scale");
    sum(&|g| g.temperature, "temperature");
    for head in 0..found.alibi.len() {
        sum(&|g| wide(g.alibi[head]), "alibi");
    }
    for head in 0..found.sinks.len() {
        sum(&|g| wide(g.sinks[head]), "sinks");
    }
    for entry in 0..found.relative.len() {
        sum(&|g| wide(g.relative[entry]), "relative");
    }
    let w_k = |g: &Grads<E>| g.additive.as_ref().and_then(|g| g.w_k.clone());
    for entry in 0..w_k(found).map_or(0, |w| w.data().len()) {
        sum(&|g| w_k(g).map_or(0.0, |w| wide(w.data()[entry])), "w_k");
    }
    for entry in 0..found.w.as_ref().map_or(0, |w| w.data().len()) {
        sum(&|g| g.w.as_ref().map_or(0.0, |w| wide(w.data()[entry])), "w");
    }
}

/// Compares packed sequences with a call for each, forward and backward.
fn compare<E: Element>(q_lens: &[usize], k_lens: &[usize], asked: Asked, isa: Isa) {
    let (batch, each) = (Batch::<E>::new(q_lens, k_lens), Each::new());
    let machine = Machine::detect().isa(isa);
    let told = Told::<E>::new(q_lens.iter().sum());
    let alone = |b: usize| {
        let (q, k, v) = batch.alone(b);
        let problem = asked.of(Problem::new(&q, &k, &v), &each);
        let plan = Plan::new(problem, machine.threads(1)).unwrap();
        let output = plan.forward(q, k, v).unwrap();
        let told = told.item(&batch.offsets[0][b..b + 2]);
        let d_out = View::bshd(&told.out, [1, q_lens[b], Q_HEADS, V_DIM]).unwrap();
        let grads = plan.backward(q, k, v, &output, told.output_grads(d_out, &output)).unwrap();
        (output, grads)
    };
    let (alone, grads_alone): (Vec<_>, Vec<_>) = (0..batch.len()).map(alone).unzip();
    let (q, k, v) = batch.packed();
    for threads in [1, 2, 7] {
        let problem = asked.of(Problem::new(&q, &k, &v), &each);
        let plan = Plan::new(problem, machine.threads(threads)).unwrap();
        let what = format!("{plan} {asked:?} queries {q_lens:?} keys {k_lens:?}");
        let output = plan.forward(q, k, v).unwrap();
        assert_eq!(output.out.offsets(), q.offsets());
        for (b, alone) in alone.iter().enumerate() {
            let found = item(&output, &batch.offsets[0][b..b + 2]);
            // A selection is allocated for the longest item, so its size differs. The selected keys show in the bits of the
            // output.
            let mut alone = alone.clone();
            alone.selection = None;
            assert!(same_bits(&found, &alone), "{what} item {b}");
        }
        let d_out = View::packed(&told.out, &batch.offsets[0], [Q_HEADS, V_DIM]).unwrap();
        let grads = plan.backward(q, k, v, &output, told.output_grads(d_out, &output)).unwrap();
        check_grads(&batch, &grads, &grads_alone, &what);
    }
}

#[test]
fn packed_sequences_give_the_bits_of_each_alone() {
    for isa in Isa::available() {
        for asked in ALL {
            let lens = [130, 1, 0, 64, 360, 3, 0, 90];
            compare::<f32>(&lens, &lens, asked, isa);
            compare::<bf16>(&lens, &lens, asked, isa);
        }
    }
}

#[test]
fn queries_and_keys_of_other_lengths_give_the_bits_of_each_alone() {
    for isa in Isa::available() {
        for asked in ALL {
            let (q, k) = ([5, 0, 130, 1, 70, 8], [9, 4, 0, 200, 333, 3]);
            compare::<f32>(&q, &k, asked, isa);
            compare::<bf16>(&q, &k, asked, isa);
        }
    }
}

#[test]
fn one_sequence_and_none_at_all() {
    for isa in Isa::available() {
        for lens in [&[150][..], &[1], &[0], &[0, 0], &[]] {
            compare::<f32>(lens, lens, Asked::Causal, isa);
            compare::<bf16>(lens, lens, Asked::Causal, isa);
        }
    }
}

#[test]
fn few_queries_of_long_and_short_sequences() {
    for isa in Isa::available() {
        for asked in [Asked::Causal, Asked::Sinks] {
            compare::<f32>(&[1, 2, 40, 1], &[9000, 100, 8195, 12300], asked, isa);
            compare::<bf16>(&[1, 2, 40, 1], &[9000, 100, 8195, 12300], asked, isa);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn any_lengths_give_the_bits_of_each_alone(
        lens in prop::collection::vec((0usize..150, 0usize..150), 0..6),
        asked in 0..ALL.len(),
    ) {
        let (q, k): (Vec<_>, Vec<_>) = lens.into_iter().unzip();
        let isa = Isa::available().last().copied().unwrap();
        compare::<f32>(&q, &k, ALL[asked], isa);
        compare::<bf16>(&q, &k, ALL[asked], isa);
    }
}

#[test]
fn memory_of_the_caller_is_filled_the_same() {
    let batch = Batch::<f32>::new(&[70, 0, 5], &[80, 3, 5]);
    let (q, k, v) = batch.packed();
    let plan = Plan::new(Problem::new(&q, &k, &v).entropy(), Machine::detect()).unwrap();
    let output = plan.forward(q, k, v).unwrap();
    let rows = 75 * Q_HEADS;
    let mut out = vec![f32::NAN; rows * V_DIM];
    let (mut lse, mut entropy) = (vec![f32::NAN; rows], vec![f32::NAN; rows]);
    let view = ViewMut::packed(&mut out, &batch.offsets[0], [Q_HEADS, V_DIM]).unwrap();
    let to = OutputMut { out: view, lse: &mut lse, entropy: Some(&mut entropy) };
    plan.forward_into(q, (k, v), to).unwrap();
    assert_eq!(out, output.out.data());
    assert_eq!((lse, Some(entropy)), (output.lse, output.entropy));
}

#[test]
fn packed_queries_over_a_cache() {
    let lens = [30, 0, 7, 1];
    let batch = Batch::<f32>::new(&lens, &[150, 9, 64, 300]);
    let shape = CacheShape { heads: HEADS, qk_dim: DIM, v_dim: V_DIM, page: 16 };
    let mut cache = KvCache::new(shape, 1 << 24).unwrap();
    let append = |b| {
        let (_, k, v) = batch.alone(b);
        let sequence = cache.start().unwrap();
        cache.append(sequence, k, v).unwrap();
        sequence
    };
    let sequences: Vec<_> = (0..lens.len()).map(append).collect();
    let (q, k, v) = batch.packed();
    let problem = Problem::cached(&q, &cache, &sequences).unwrap().mask(Mask::causal());
    let plan = Plan::new(problem, Machine::detect()).unwrap();
    let cached = plan.forward_cached(q, &cache, &sequences).unwrap();
    let problem = Problem::new(&q, &k, &v).mask(Mask::causal());
    let packed = Plan::new(problem, Machine::detect()).unwrap().forward(q, k, v).unwrap();
    assert!(same_bits(&cached, &packed));
    assert!(same_bits(&plan.forward_shared(q, &cache, &sequences).unwrap(), &packed));
}

#[test]
fn packed_outputs_are_merged_item_by_item() {
    let batch = Batch::<f32>::new(&[7, 0, 5], &[80, 3, 50]);
    let (q, k, v) = batch.packed();
    let over = |mask: Mask| {
        Plan::new(Problem::new(&q, &k, &v).mask(mask), Machine::detect())
            .unwrap()
            .forward(q, k, v)
            .unwrap()
    };
    let late = Mask::spans(&[20..80, 0..0, 20..50]);
    let merged = Output::merge(Machine::detect(), &[over(Mask::prefix(20)), over(late)]).unwrap();
    let whole = over(Mask::spans(&[0..80, 0..3, 0..50]));
    assert_eq!(merged.out.offsets(), q.offsets());
    let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
    assert!(close(merged.out.data(), whole.out.data()) && close(&merged.lse, &whole.lse));
}

#[test]
fn offsets_that_do_not_fit_are_errors() {
    let data = [0f32; 5 * 2 * 3];
    let why = |offsets: &[usize]| View::packed(&data, offsets, [2, 3]).unwrap_err();
    let wrong = |index, found, expected, wrong| Error::Offsets { index, found, expected, wrong };
    assert_eq!(why(&[1, 5]), wrong(0, 1, 0, "not where the data begins"));
    assert_eq!(why(&[0, 4, 3, 5]), wrong(2, 3, 4, "before the beginning of its sequence"));
    assert_eq!(why(&[0, 4]), wrong(1, 4, 5, "not the number of rows in the data"));
    assert_eq!(why(&[0, 6]), wrong(1, 6, 5, "not the number of rows in the data"));
    assert!(matches!(why(&[]), Error::Count { option: "offsets", found: 0, .. }));
    assert!(matches!(why(&[0, usize::MAX]), Error::ShapeOverflow { .. }));
    let short = View::packed(&data[1..], &[0, 5], [2, 3]).unwrap_err();
    assert_eq!(short, Error::DataLength { needed: 30, found: 29 });
    let told = why(&[0, 4]).to_string();
    assert!(told.contains("offsets[1]: 4") && told.contains("give 5"), "{told}");
}

#[test]
fn tensors_and_options_that_do_not_fit_are_errors() {
    let (data, of) = (vec![0f32; 9 * 3], [[0, 4, 9], [0, 5, 9]]);
    let view = |offsets| View::packed(&data, offsets, [1, 3]).unwrap();
    let (x, y) = (view(&of[0]), view(&of[1]));
    fn plan(problem: Problem<'_, f32>) -> Result<Plan<'_, f32>, Error> {
        Plan::new(problem, Machine::detect())
    }
    let why = plan(Problem::new(&x, &x, &y)).unwrap_err().to_string();
    assert!(why.starts_with("keys: k has 4, v has 5"), "{why}");
    let whole = View::bshd(&data, [1, 9, 1, 3]).unwrap();
    assert!(matches!(
        plan(Problem::new(&x, &whole, &whole)),
        Err(Error::Axis { axis: "batch", .. })
    ));
    let packed = plan(Problem::new(&x, &x, &x)).unwrap();
    let why = packed.forward(y, x, x).unwrap_err().to_string();
    assert!(why.starts_with("length: the plan has 4, q has 5"), "{why}");
    let data = vec![0f32; 2 * 5 * 3];
    let dense = View::bhsd(&data, [2, 1, 5, 3]).unwrap();
    let why = packed.forward(dense, x, x).unwrap_err().to_string();
    assert!(why.starts_with("packed sequences: the plan has 2, q has 0"), "{why}");
    let refused = |problem: Problem<'_, f32>| plan(problem).unwrap_err();
    let bias = View::bhsd(&data[..10], [2, 1, 1, 5]).unwrap();
    let biased = Problem::new(&x, &x, &x).score(Score::new().bias(bias));
    assert_eq!(refused(biased), Error::Packed { option: "bias" });
    let documents = Mask::causal().and(Mask::segments(&[0; 10]));
    let masked = Problem::new(&x, &x, &x).mask(documents);
    assert_eq!(refused(masked), Error::Packed { option: "segments" });
}

#[test]
fn an_item_without_rows_is_no_work() {
    let data = vec![0.5f32; 5 * 2 * 8];
    let pairs = |offsets: &[usize]| {
        let x = View::packed(&data, offsets, [2, 8]).unwrap();
        Plan::new(Problem::new(&x, &x, &x), Machine::detect()).unwrap().work().pairs
    };
    assert_eq!(pairs(&[0, 0, 5]), 2 * 25);
    assert_eq!(pairs(&[0, 5, 5, 5]), pairs(&[0, 5]));
}
