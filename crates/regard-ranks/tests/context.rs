//! Attention over a sequence that is spread over ranks, compared with one process on the same tensors.

use bytemuck::Pod;
use regard::problem::{Dims, Dropout};
use regard::reference::{self, Inputs, Outcome};
use regard::{
    Element, Layout, Machine, Mask, Number, Output, Plan, Problem, Score, Shape, Tensor, View,
    bf16, f16,
};
use regard_ranks::context::{ContextError, Shards, attend, attend_backward, decode, ring};
use regard_ranks::{Ranks, Threads, share};
use regard_testkit::run::same_bits;
use regard_testkit::{Noise, OutputCheck};

/// Batch, query heads, key heads, rows.
type Sizes = [usize; 4];
const DIM: usize = 16;
const RANKS: [usize; 5] = [1, 2, 3, 4, 8];
/// 17 tiles: of 128 rows, and of 64, the last one not whole.
const LONG: Sizes = [1, 4, 2, 2100];
const SHORT: Sizes = [1, 1, 1, 1030];
/// 10 tiles of 64 rows, for comparisons with the definition.
const SMALL: Sizes = [1, 2, 1, 600];

struct Whole<E: Element> {
    q: Tensor<E>,
    k: Tensor<E>,
    v: Tensor<E>,
    d_out: Tensor<E>,
}

impl<E: Element> Whole<E> {
    /// Scores of a standard deviation of 4: the largest score of a row changes while keys go by.
    fn new([batch, q, kv, rows]: Sizes, keys: usize) -> Self {
        let mut noise = Noise::new(11);
        let mut tensor = |heads, len, spread: f64| {
            let numbers = batch * heads * len * DIM;
            let data = (0..numbers).map(|_| E::narrow(E::Num::from_f64(noise.normal() * spread)));
            Tensor::new(data.collect(), Shape { batch, heads, len, dim: DIM }, Layout::Bhsd)
                .expect("sizes")
        };
        Self {
            q: tensor(q, rows, 2.0),
            k: tensor(kv, keys, 2.0),
            v: tensor(kv, keys, 1.0),
            d_out: tensor(q, rows, 1.0),
        }
    }

    fn inputs(&self) -> Inputs<'_, E> {
        (self.q.view(), self.k.view(), self.v.view())
    }

    fn problem(&self, mask: &Mask) -> Problem<'static, E> {
        Problem::of_shapes(self.q.shape(), self.k.shape(), self.v.shape()).mask(mask.clone())
    }
}

fn plan<'a, E: Element>(problem: &Problem<'a, E>) -> Plan<'a, E> {
    Plan::new(problem.clone(), Machine::detect().threads(1)).expect("a problem")
}

fn masks(n: usize) -> [Mask; 5] {
    let document = |i: usize| u32::from(i >= n / 3) + u32::from(i >= n / 2 + 9);
    let documents: Vec<u32> = (0..n).map(document).collect();
    [
        Mask::full(),
        Mask::causal(),
        // The first row of a tile sees two keys of its first block: the order of sums depends on where tiles begin.
        Mask::causal().window(258),
        Mask::causal().and(Mask::segments(&documents)),
        Mask::segments(&documents),
    ]
}

/// What a function returns on each of so many ranks.
fn on<T: Send>(count: usize, work: impl Fn(Threads) -> T + Sync) -> Vec<T> {
    let work = &work;
    std::thread::scope(|scope| {
        let own = |ranks| scope.spawn(move || work(ranks));
        let threads: Vec<_> = Threads::new(count).into_iter().map(own).collect();
        threads.into_iter().map(|thread| thread.join().expect("it ends")).collect()
    })
}

/// The outputs of all ranks as one.
fn whole<E: Element>(shards: &Shards, outputs: &[Output<E>]) -> Output<E> {
    let Shape { batch, heads, dim, .. } = outputs[0].out.shape();
    let out: Vec<E> = outputs.iter().flat_map(|o| o.out.data().to_vec()).collect();
    let lse: Vec<E::Num> = outputs.iter().flat_map(|o| o.lse.clone()).collect();
    let states: Vec<[E::Num; 2]> = outputs.iter().flat_map(|o| o.states.clone()).collect();
    let lse = shards.join(&lse, [batch, heads, 1]).expect("one each row").into_data();
    let mut output = Output::new(shards.join(&out, [batch, heads, dim]).expect("rows"), lse);
    output.states = shards.join(&states, [batch, heads, 1]).expect("one each row").into_data();
    let watched = |of: fn(&Output<E>) -> &Option<Vec<E::Num>>| {
        let all: Option<Vec<_>> = outputs.iter().map(|output| of(output).clone()).collect();
        let all = all?.concat();
        Some(shards.join(&all, [batch, heads, 1]).expect("one each row").into_data())
    };
    output.entropy = watched(|output| &output.entropy);
    output.max_score = watched(|output| &output.max_score);
    output
}

type Call<E> = fn(
    &dyn Ranks,
    &Plan<'_, E>,
    View<'_, E>,
    View<'_, E>,
    View<'_, E>,
) -> Result<Output<E>, ContextError>;

/// The output of a call on so many ranks.
fn spread<E: Element>(
    data: &Whole<E>,
    problem: &Problem<'_, E>,
    count: usize,
    call: Call<E>,
) -> Output<E> {
    let shards = Shards::new(&plan(problem), count).expect("enough tiles");
    let outputs = on(count, |ranks| {
        let [q, k, v] = [&data.q, &data.k, &data.v]
            .map(|x| shards.take(ranks.rank(), &x.view()).expect("the rows of a rank"));
        call(&ranks, &plan(problem), q.view(), k.view(), v.view()).expect("an output")
    });
    whole(&shards, &outputs)
}

fn forward_has_the_bits_of_one_process<E: Element + Pod>(sizes: Sizes) {
    let data = Whole::<E>::new(sizes, sizes[3]);
    let slopes = vec![E::Num::from_f64(0.01); sizes[1]];
    for mask in masks(sizes[3]) {
        let problem = data.problem(&mask);
        let biased =
            problem.clone().score(Score::new().scale(0.2).softcap(30.0).alibi(&slopes)).entropy();
        let problems = if sizes == SHORT { vec![problem, biased] } else { vec![problem] };
        for problem in problems {
            let (q, k, v) = data.inputs();
            let one = plan(&problem).forward(q, k, v).expect("an output");
            for count in RANKS {
                let found = spread(&data, &problem, count, attend);
                assert!(same_bits(&found, &one), "{problem}: {count} ranks");
            }
        }
    }
}

#[test]
fn forward_has_the_bits_of_one_process_for_any_number_of_ranks() {
    for sizes in [LONG, SHORT] {
        forward_has_the_bits_of_one_process::<f32>(sizes);
        forward_has_the_bits_of_one_process::<bf16>(sizes);
    }
    forward_has_the_bits_of_one_process::<f16>(SHORT);
    forward_has_the_bits_of_one_process::<f32>([2, 2, 1, 1000]);
}

/// Chunks of 128 rows over 2048 keys and more, and a last one of 2 rows: alone, the engine would compute these in another order.
#[test]
fn small_chunks_have_the_bits_of_one_process() {
    fn of_type<E: Element + Pod>(sizes: Sizes, count: usize) {
        let data = Whole::<E>::new(sizes, sizes[3]);
        let problem = data.problem(&Mask::causal().window(700));
        let plan = plan(&problem);
        let shards = Shards::new(&plan, count).expect("enough tiles");
        let last = shards.chunks(0)[1].clone();
        assert!(last.len() <= 130 && last.end == sizes[3], "{last:?}");
        let (q, k, v) = data.inputs();
        let one = plan.forward(q, k, v).expect("an output");
        assert!(same_bits(&spread(&data, &problem, count, attend), &one), "{problem}");
    }
    // 65 tiles for 64 chunks: all but one are of one tile.
    of_type::<f32>([1, 1, 1, 64 * 128 + 2], 32);
    of_type::<bf16>([1, 1, 1, 64 * 128 + 2], 32);
}

#[test]
fn shards_are_dealt_zigzag_at_the_borders_of_tiles_and_joined_again() {
    let data = Whole::<f32>::new(LONG, LONG[3]);
    let plan = plan(&data.problem(&Mask::causal()));
    for count in RANKS {
        let shards = Shards::new(&plan, count).expect("enough tiles");
        assert_eq!(shards.count(), count);
        let mut chunks: Vec<_> = (0..count).map(|rank| shards.chunks(rank)[0].clone()).collect();
        chunks.extend((0..count).rev().map(|rank| shards.chunks(rank)[1].clone()));
        assert_eq!((chunks[0].start, chunks[2 * count - 1].end), (0, LONG[3]));
        assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert!(chunks.iter().all(|chunk| chunk.start.is_multiple_of(128) && !chunk.is_empty()));
        let all = (0..count)
            .flat_map(|rank| shards.take(rank, &data.k.view()).expect("rows").into_data());
        let all: Vec<f32> = all.collect();
        assert_eq!(shards.join(&all, [1, 2, DIM]), Ok(data.k.clone()));
        assert!(shards.join(&all[1..], [1, 2, DIM]).is_err());
    }
}

#[test]
fn what_would_not_have_the_bits_of_one_process_is_refused() {
    fn refused<T>(result: Result<T, ContextError>, words: &[&str]) {
        let message = result.err().expect("it is refused").to_string();
        for word in words {
            assert!(message.contains(word), "`{message}` does not say `{word}`");
        }
    }
    let data = Whole::<f32>::new(SMALL, SMALL[3]);
    let causal = plan(&data.problem(&Mask::causal()));
    // 10 tiles of 64 rows.
    refused(
        Shards::new(&causal, 6),
        &["600 rows make 10 tiles of 64", "6 ranks need 12", "at most 5 ranks"],
    );
    assert!(Shards::new(&causal, 5).is_ok());
    // 4 rows are one tile.
    let few = Whole::<f32>::new([1, 1, 1, 4], 4);
    refused(Shards::new(&plan(&few.problem(&Mask::causal())), 2), &["4 rows", "at most 1 ranks"]);
    // Queries of another sequence.
    let other = Whole::<f32>::new(SMALL, 700);
    refused(Shards::new(&plan(&other.problem(&Mask::full())), 2), &["length", "600", "700"]);
    let dropout = data.problem(&Mask::full()).dropout(Dropout::new(0.1, 1, 2));
    let shards = Shards::new(&causal, 1).expect("one rank");
    let own = [&data.q, &data.k, &data.v].map(|x| shards.take(0, &x.view()).expect("rows"));
    let [q, k, v] = [&own[0], &own[1], &own[2]].map(Tensor::view);
    let alone = regard_ranks::Alone;
    refused(attend(&alone, &plan(&dropout), q, k, v), &["dropout", "leave it out"]);
    refused(
        attend(&alone, &causal, q, k, q),
        &["v: the share of this rank is [1, 1, 600, 16]", "take"],
    );
}

/// The largest difference, relative to the largest number.
fn difference<E: Element<Num = f32>>(found: &[E], wanted: &[E]) -> f64 {
    assert_eq!(found.len(), wanted.len());
    let largest = wanted.iter().map(|x| x.widen().abs()).fold(0.0, f32::max);
    let pairs = found.iter().zip(wanted).map(|(a, b)| (a.widen() - b.widen()).abs());
    f64::from(pairs.fold(0.0, f32::max)) / f64::from(largest)
}

/// The gradients on so many ranks, each as a whole.
fn spread_grads<E: Element<Num = f32> + Pod>(
    data: &Whole<E>,
    problem: &Problem<'_, E>,
    count: usize,
) -> [Vec<E>; 3] {
    let shards = Shards::new(&plan(problem), count).expect("enough tiles");
    let grads = on(count, |ranks| {
        let plan = plan(problem);
        let own = |x: &Tensor<E>| shards.take(ranks.rank(), &x.view()).expect("the rows of a rank");
        let [q, k, v, d_out] = [&data.q, &data.k, &data.v, &data.d_out].map(own);
        let output = attend(&ranks, &plan, q.view(), k.view(), v.view()).expect("an output");
        let inputs = (q.view(), k.view(), v.view());
        attend_backward(&ranks, &plan, inputs, &output, d_out.view()).expect("gradients")
    });
    let Dims { batch, heads, .. } = problem.dims();
    let of = |tensor: fn(&regard_ranks::context::ContextGrads<E>) -> &Tensor<E>, heads| {
        let all: Vec<E> = grads.iter().flat_map(|grads| tensor(grads).data().to_vec()).collect();
        shards.join(&all, [batch, heads, DIM]).expect("rows").into_data()
    };
    [of(|g| &g.q, heads.q), of(|g| &g.k, heads.kv), of(|g| &g.v, heads.kv)]
}

#[test]
fn gradients_are_those_of_one_process_up_to_rounding() {
    let mut differ = false;
    for (sizes, ranks) in [(LONG, &[2, 8][..]), ([2, 2, 1, 1000], &[1, 2, 3, 4])] {
        let data = Whole::<f32>::new(sizes, sizes[3]);
        for mask in masks(sizes[3]) {
            let problem = data.problem(&mask);
            let ((q, k, v), plan) = (data.inputs(), plan(&problem));
            let output = plan.forward(q, k, v).expect("an output");
            let one = plan.backward(q, k, v, &output, data.d_out.view()).expect("gradients");
            for count in ranks {
                let found = spread_grads(&data, &problem, *count);
                for (name, (found, one)) in
                    ["q", "k", "v"].iter().zip(found.iter().zip([&one.q, &one.k, &one.v]))
                {
                    let off = difference(found, one.data());
                    assert!(off <= 1e-6, "{problem}, {count} ranks: {off:e} by {name}");
                    differ |= off > 0.0;
                }
                assert_eq!(found, spread_grads(&data, &problem, *count), "once more");
            }
        }
    }
    assert!(differ, "sums over ranks are sums in another order");
}

#[test]
fn gradients_in_bf16_are_those_of_one_process_up_to_the_rounding_of_each_rank() {
    let data = Whole::<bf16>::new(SMALL, SMALL[3]);
    let problem = data.problem(&Mask::causal());
    let ((q, k, v), plan) = (data.inputs(), plan(&problem));
    let output = plan.forward(q, k, v).expect("an output");
    let one = plan.backward(q, k, v, &output, data.d_out.view()).expect("gradients");
    for count in [1, 2, 4] {
        let found = spread_grads(&data, &problem, count);
        for (found, one) in found.iter().zip([&one.q, &one.k, &one.v]) {
            // Chunks are rounded before they are added, and both results after: two units in the last place, of 2^-7 each.
            let off = difference(found, one.data());
            assert!(off <= 4.0 / 256.0, "{count} ranks: {off:e}");
        }
    }
}

/// Measured with the definition in `f64`.
#[test]
fn ring_and_gradients_are_as_close_to_the_definition_as_one_process() {
    let data = Whole::<f32>::new(SMALL, SMALL[3]);
    for mask in masks(SMALL[3]) {
        let problem = data.problem(&mask);
        let ratio = OutputCheck::new(&problem, data.inputs())
            .ratio(&spread(&data, &problem, 4, ring))
            .expect("rows that see what they should");
        assert!(ratio.is_close(), "{problem}: {ratio:?}");
        let exact = Outcome::<f64> {
            out: data.d_out.data().iter().map(|x| f64::from(*x)).collect(),
            lse: vec![0.0; 1200],
            entropy: vec![0.0; 1200],
            max_score: vec![0.0; 1200],
        };
        let exact = reference::backward(&problem, data.inputs(), &exact);
        let ((q, k, v), plan) = (data.inputs(), plan(&problem));
        let output = plan.forward(q, k, v).expect("an output");
        let one = plan.backward(q, k, v, &output, data.d_out.view()).expect("gradients");
        let error = |found: &[f32], exact: &[f64]| {
            let pairs = found.iter().zip(exact).map(|(a, b)| (f64::from(*a) - b).abs());
            pairs.fold(0.0, f64::max)
        };
        let found = spread_grads(&data, &problem, 4);
        let [q, k, v] = [(&one.q, &exact.q), (&one.k, &exact.k), (&one.v, &exact.v)];
        for (name, found, (one, exact)) in
            [("q", &found[0], q), ("k", &found[1], k), ("v", &found[2], v)]
        {
            let (found, one) = (error(found, exact), error(one.data(), exact));
            assert!(found <= 1.5 * one, "{problem} by {name}: {found:e}, one process: {one:e}");
        }
    }
}

#[test]
fn a_ring_gives_the_output_of_one_process_up_to_rounding() {
    let mut differ = false;
    for (sizes, ranks) in [(LONG, &[3, 8][..]), (SHORT, &RANKS), ([2, 2, 1, 1000], &[2])] {
        let data = Whole::<f32>::new(sizes, sizes[3]);
        for mask in masks(sizes[3]) {
            let problem = data.problem(&mask);
            let (q, k, v) = data.inputs();
            let one = plan(&problem).forward(q, k, v).expect("an output");
            for count in ranks {
                let found = spread(&data, &problem, *count, ring);
                let out = difference(found.out.data(), one.out.data());
                let lse = difference(&found.lse, &one.lse);
                assert!(out <= 1e-6 && lse <= 1e-6, "{problem}, {count} ranks: {out:e}, {lse:e}");
                differ |= !same_bits(&found, &one);
                assert!(same_bits(&found, &spread(&data, &problem, *count, ring)), "once more");
            }
        }
    }
    assert!(differ, "blocks come in another order on each rank");
}

/// Blocks are merged before they are rounded to the type of the tensors, so that their number does not show in the error.
#[test]
fn a_ring_in_bf16_rounds_once() {
    let data = Whole::<bf16>::new(SHORT, SHORT[3]);
    let problem = data.problem(&Mask::causal());
    let (q, k, v) = data.inputs();
    let exact = reference::forward::<f64, bf16>(&problem, (q, k, v)).out;
    let error = |output: &Output<bf16>| {
        let squares = output.out.data().iter().zip(&exact).map(|(x, y)| (x.to_f64() - y).powi(2));
        (squares.sum::<f64>() / exact.len() as f64).sqrt()
    };
    let one = error(&plan(&problem).forward(q, k, v).expect("an output"));
    for count in [2, 8] {
        let found = error(&spread(&data, &problem, count, ring));
        assert!(found <= 1.05 * one, "{count} ranks: {found:e}, one process: {one:e}");
    }
}

/// Decode over runs of the keys, as the borders have them: all ranks have the output of one process?
fn decoded<E: Element<Num: Pod>>(
    data: &Whole<E>,
    problem: &Problem<'_, E>,
    borders: &[usize],
) -> Vec<Output<E>> {
    on(borders.len() - 1, |ranks| {
        let own = borders[ranks.rank()]..borders[ranks.rank() + 1];
        let [k, v] = [&data.k, &data.v].map(|x| {
            let (view, shape) = (x.view(), x.shape());
            let heads = (0..shape.batch * shape.heads).map(|i| (i / shape.heads, i % shape.heads));
            let rows = |(b, h)| own.clone().flat_map(move |i| view.row(b, h, i).iter().copied());
            let shape = Shape { len: own.len(), ..shape };
            Tensor::new(heads.flat_map(rows).collect(), shape, Layout::Bhsd).expect("a run")
        });
        decode(&ranks, &plan(problem), data.q.view(), k.view(), v.view()).expect("an output")
    })
}

fn decode_has_the_bits_of_one_process<E: Element<Num: Pod>>(sizes: Sizes) {
    let n = 3 * 1024 + 123;
    let data = Whole::<E>::new(sizes, n);
    let sinks = vec![E::Num::from_f64(0.5); sizes[1]];
    for mask in [Mask::full(), Mask::causal(), Mask::causal().window(1500)] {
        let problem = data.problem(&mask).score(Score::new().sinks(&sinks));
        let (q, k, v) = data.inputs();
        let one = plan(&problem).forward(q, k, v).expect("an output");
        for count in RANKS {
            let border = |rank: usize| (share(4, rank, count).start * 1024).min(n);
            let borders: Vec<usize> = (0..count).map(border).chain([n]).collect();
            for found in decoded(&data, &problem, &borders) {
                assert!(same_bits(&found, &one), "{problem}: keys {borders:?}");
            }
        }
    }
}

#[test]
fn decode_has_the_bits_of_one_process_for_any_number_of_ranks() {
    for sizes in [[1, 4, 2, 1], [2, 2, 2, 3]] {
        decode_has_the_bits_of_one_process::<f32>(sizes);
        decode_has_the_bits_of_one_process::<bf16>(sizes);
    }
    decode_has_the_bits_of_one_process::<f16>([1, 8, 1, 20]);
}

#[test]
fn decode_over_few_keys_is_that_of_one_process_up_to_rounding() {
    let data = Whole::<f32>::new([1, 4, 2, 1], 1500);
    let problem = data.problem(&Mask::causal());
    let (q, k, v) = data.inputs();
    let one = plan(&problem).forward(q, k, v).expect("an output");
    for borders in [&[0, 1500][..], &[0, 500, 500, 1250, 1500]] {
        for found in decoded(&data, &problem, borders) {
            let off = difference(found.out.data(), one.out.data());
            assert!(off <= 1e-6, "keys {borders:?}: {off:e}");
            assert_eq!(borders.len() == 2, same_bits(&found, &one), "keys {borders:?}");
        }
    }
}

#[test]
fn runs_of_keys_that_would_have_other_bits_are_refused_on_all_ranks() {
    let data = Whole::<f32>::new([1, 4, 2, 1], 2300);
    let problem = data.problem(&Mask::causal());
    let told = |lens: [usize; 3]| {
        on(3, |ranks| {
            let shape = Shape { len: lens[ranks.rank()], ..data.k.shape() };
            let run =
                Tensor::new(vec![0.0; 2 * shape.len * DIM], shape, Layout::Bhsd).expect("a run");
            decode(&ranks, &plan(&problem), data.q.view(), run.view(), run.view())
                .err()
                .map(|e| e.to_string())
        })
    };
    for message in told([1300, 500, 500]) {
        let message = message.expect("it is refused");
        assert!(
            message.contains("ends at 1300") && message.contains("cut at 1024 or 2048"),
            "{message}"
        );
    }
    for message in told([1024, 1024, 244]) {
        let message = message.expect("it is refused");
        assert!(message.contains("the plan has 2300, all ranks together has 2292"), "{message}");
    }
}
