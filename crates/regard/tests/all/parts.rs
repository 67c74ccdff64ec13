//! Plans of some rows or keys of a problem: the bits of the whole.

#![expect(clippy::unwrap_used, reason = "a call that is refused has failed")]

use regard::mask::{Bits, MaskRule};
use regard::problem::{Align, Dropout, Normalizer, Scope};
use regard::reference::Inputs;
use regard::score::Intervention;
use regard::{
    Element, Error, Isa, Layout, Machine, Mask, Number, Output, Plan, Problem, Score, Shape,
    Tensor, View, bf16, f16,
};
use regard_testkit::run::same_bits;
use regard_testkit::{Noise, OutputCheck};
use std::ops::Range;

/// Batch, query heads, key heads, queries, keys.
type Sizes = [usize; 5];
const DIM: usize = 16;

fn tensor<E: Element>(
    noise: &mut Noise,
    [batch, heads, len]: [usize; 3],
    spread: f64,
) -> Tensor<E> {
    let shape = Shape { batch, heads, len, dim: DIM };
    let data = (0..batch * heads * len * DIM)
        .map(|_| E::narrow(E::Num::from_f64(noise.normal() * spread)))
        .collect();
    Tensor::new(data, shape, Layout::Bhsd).unwrap()
}

/// Scores of a standard deviation of 4: the largest score of a row changes while keys go by.
fn inputs<E: Element>([batch, q, kv, q_len, k_len]: Sizes) -> [Tensor<E>; 3] {
    let mut noise = Noise::new(7);
    let q = tensor(&mut noise, [batch, q, q_len], 2.0);
    let [k, v] = [2.0, 1.0].map(|spread| tensor(&mut noise, [batch, kv, k_len], spread));
    [q, k, v]
}

fn rows<E: Element>(x: &Tensor<E>, range: Range<usize>) -> Tensor<E> {
    let (view, shape) = (x.view(), Shape { len: range.len(), ..x.shape() });
    let heads = (0..shape.batch * shape.heads).map(|i| (i / shape.heads, i % shape.heads));
    let row = |(b, h)| range.clone().flat_map(move |i| view.row(b, h, i).iter().copied());
    Tensor::new(heads.flat_map(row).collect(), shape, Layout::Bhsd).unwrap()
}

/// The rows of an output.
fn rows_of<E: Element>(output: &Output<E>, range: Range<usize>) -> Output<E> {
    let len = output.out.shape().len;
    let mut part = Output::new(rows(&output.out, range.clone()), Vec::new());
    for first in (0..output.lse.len()).step_by(len) {
        part.lse.extend(&output.lse[first..][range.clone()]);
        part.states.extend(&output.states[first..][range.clone()]);
    }
    part
}

/// Keys of the row's remainder by 3, by number: of no use if rows are numbered anew.
#[derive(Debug)]
struct Thirds;

impl MaskRule for Thirds {
    fn visible(&self, scope: &Scope, row: usize, ranges: &mut Vec<Range<usize>>) {
        let third = scope.k_len / 3;
        ranges.push(row % 3 * third..(row % 3 + 1) * third);
    }
}

fn masks(n: usize) -> Vec<Mask> {
    let documents: Vec<u32> =
        (0..n).map(|i| u32::from(i >= n / 3) + u32::from(i >= n / 2 + 9)).collect();
    let mut noise = Noise::new(3);
    let bits: Vec<bool> = (0..n * n).map(|_| noise.chance(0.4)).collect();
    vec![
        Mask::full(),
        Mask::causal(),
        // The first row of a tile sees two keys of its first block, which are gathered.
        Mask::causal().window(258),
        Mask::full().window(40),
        Mask::causal().and(Mask::segments(&documents)),
        Mask::segments_between(&documents, &documents),
        Mask::causal().or(Mask::prefix(70)),
        Mask::causal().and(Mask::strided(5)),
        Mask::longformer(30, &[0, 77]),
        Mask::bits(Bits::from_bools(&bits, [1, 1, n, n]).unwrap()),
        Mask::custom(Thirds),
    ]
}

/// Across the borders of parts, before and behind them.
fn interventions() -> Vec<Intervention> {
    vec![
        Intervention::scale(3.0).heads(0..1).rows(60..140).keys(50..1500),
        Intervention::drop().rows(1..4).keys(1..4000),
        Intervention::add(-2.0).keys(4090..4100),
    ]
}

fn rows_have_the_bits_of_the_whole<E: Element>(sizes: Sizes, mask: Mask) {
    let [q, k, v] = inputs::<E>(sizes);
    let slopes = [E::Num::from_f64(0.02); 16];
    let score = Score::new().softcap(40.0).alibi(&slopes[..sizes[1]]);
    let problem = Problem::new(&q.view(), &k.view(), &v.view()).mask(mask);
    let rules = Score::new().interventions(interventions());
    for (problem, isa) in [problem.clone(), problem.clone().score(score), problem.score(rules)]
        .iter()
        .flat_map(|p| Isa::available().into_iter().map(move |isa| (p, isa)))
    {
        let plan = Plan::new(problem.clone(), Machine::detect().isa(isa)).unwrap();
        let (step, n, keys) = (plan.row_step(), sizes[3], sizes[4]);
        let whole = plan.forward(q.view(), k.view(), v.view()).unwrap();
        for range in [0..step, step..n, n.saturating_sub(1) / step * step..n] {
            let range = range.start.min(n)..range.end.min(n);
            let part = plan.part(range.clone(), 0..keys).unwrap();
            let found = part.forward(rows(&q, range.clone()).view(), k.view(), v.view()).unwrap();
            let same = same_bits(&found, &rows_of(&whole, range.clone()));
            assert!(same, "{problem}: rows {range:?} on {}", isa.name());
        }
    }
}

#[test]
fn some_rows_have_the_bits_of_the_whole() {
    // Tiles of 128 rows, and of 64; a last tile that is not whole, and one of 2 rows.
    for sizes in [[1, 8, 2, 390, 390], [2, 2, 1, 194, 194]] {
        for mask in masks(sizes[3]) {
            rows_have_the_bits_of_the_whole::<f32>(sizes, mask.clone());
            rows_have_the_bits_of_the_whole::<bf16>(sizes, mask);
        }
    }
    rows_have_the_bits_of_the_whole::<f16>([1, 8, 2, 390, 390], Mask::causal().window(258));
    // So few rows alone would be computed over keys in parts.
    rows_have_the_bits_of_the_whole::<f32>([1, 2, 2, 200, 8300], Mask::causal());
    rows_have_the_bits_of_the_whole::<bf16>([1, 2, 2, 200, 8300], Mask::causal());
}

/// What [`Plan::part`] is for: a plan of its own for the same rows chooses another order of arithmetic.
#[test]
fn a_plan_of_its_own_for_some_rows_has_other_bits() {
    fn differs<E: Element>(sizes: Sizes, mask: Mask, range: Range<usize>) {
        let [q, k, v] = inputs::<E>(sizes);
        let machine = Machine::detect();
        let whole =
            Plan::new(Problem::new(&q.view(), &k.view(), &v.view()).mask(mask.clone()), machine)
                .unwrap();
        let offset = (sizes[4] - sizes[3] + range.start) as i64;
        let part = rows(&q, range.clone());
        let own = Problem::new(&part.view(), &k.view(), &v.view())
            .mask(mask)
            .align(Align::Offset(offset));
        let own =
            Plan::new(own, machine).unwrap().forward(part.view(), k.view(), v.view()).unwrap();
        let wanted = rows_of(&whole.forward(q.view(), k.view(), v.view()).unwrap(), range);
        assert!(!same_bits(&own, &wanted));
    }
    // Keys in parts, decode, tiles of 64 rows in the place of 128 with keys that are gathered.
    differs::<f32>([1, 2, 2, 256, 8300], Mask::causal(), 128..256);
    differs::<f32>([1, 2, 1, 258, 258], Mask::causal(), 256..258);
    differs::<f32>([1, 8, 2, 640, 640], Mask::causal().window(258), 512..640);
}

fn keys_have_the_bits_of_the_whole<E: Element>(sizes: Sizes, mask: Mask, entropy: bool) {
    let [q, k, v] = inputs::<E>(sizes);
    let sinks = [E::Num::from_f64(0.5); 16];
    let problem = Problem::new(&q.view(), &k.view(), &v.view()).mask(mask);
    let problem = match entropy {
        true => {
            let score = Score::new().sinks(&sinks[..sizes[1]]).interventions(interventions());
            problem.score(score).entropy()
        }
        false => problem,
    };
    let n = sizes[4];
    for isa in Isa::available() {
        let plan = Plan::new(problem.clone(), Machine::detect().isa(isa)).unwrap();
        let step = plan.key_step();
        assert_eq!(step, 1024);
        let whole = plan.forward(q.view(), k.view(), v.view()).unwrap();
        for borders in [vec![0, n], vec![0, step, n], vec![0, step, step, 2 * step, n]] {
            let mut data = Vec::new();
            for pair in borders.windows(2) {
                let part = plan.part(0..sizes[3], pair[0]..pair[1]).unwrap();
                let [k, v] = [&k, &v].map(|x| rows(x, pair[0]..pair[1]));
                let partial = part.forward_partial(q.view(), k.view(), v.view()).unwrap();
                assert_eq!(partial.data().len(), part.partial_len());
                data.extend_from_slice(partial.data());
            }
            let found = plan.finish(q.view(), &plan.partial(data).unwrap()).unwrap();
            assert!(same_bits(&found, &whole), "{problem}: keys {borders:?} on {}", isa.name());
        }
    }
}

#[test]
fn states_of_parts_of_the_keys_finish_to_the_bits_of_the_whole() {
    let n = 2 * 1024 + 300;
    let documents: Vec<u32> = (0..n).map(|i| u32::from(i >= 4000)).collect();
    let masks = [
        Mask::full(),
        Mask::causal(),
        Mask::causal().window(1500),
        Mask::causal().and(Mask::segments(&documents)),
    ];
    for mask in masks {
        keys_have_the_bits_of_the_whole::<f32>([1, 4, 1, 1, n], mask.clone(), true);
        keys_have_the_bits_of_the_whole::<f32>([2, 2, 2, 4, n], mask.clone(), false);
        keys_have_the_bits_of_the_whole::<bf16>([2, 4, 2, 1, n], mask, false);
    }
    // Many rows, that are not decoded.
    keys_have_the_bits_of_the_whole::<f32>([1, 2, 1, 70, n], Mask::causal(), true);
    keys_have_the_bits_of_the_whole::<bf16>([1, 2, 1, 70, n], Mask::causal(), false);
}

#[test]
fn partial_results_over_any_keys_merge_to_the_whole() {
    let sizes = [2, 2, 1, 100, 300];
    let [q, k, v] = inputs::<f32>(sizes);
    for mask in masks(300).into_iter().take(5) {
        let inputs: Inputs<'_, f32> = (q.view(), k.view(), v.view());
        let problem = Problem::new(&q.view(), &k.view(), &v.view()).mask(mask).entropy();
        let check = OutputCheck::new(&problem, inputs);
        let plan = Plan::new(problem.clone(), Machine::detect()).unwrap();
        let mut merged = plan.partial(Vec::new()).unwrap();
        for keys in [0..0, 0..30, 30..217, 217..300] {
            let [k, v] = [&k, &v].map(|x| rows(x, keys.clone()));
            let part = plan.part(0..100, keys).unwrap();
            merged.merge(&part.forward_partial(q.view(), k.view(), v.view()).unwrap()).unwrap();
        }
        let ratio = check.ratio(&plan.finish(q.view(), &merged).unwrap()).unwrap();
        assert!(ratio.is_close(), "{problem}: {ratio:?}");
    }
    // No key at all.
    let plan = Plan::new(Problem::new(&q.view(), &k.view(), &v.view()), Machine::detect()).unwrap();
    let nothing = plan.finish(q.view(), &plan.partial(Vec::new()).unwrap()).unwrap();
    assert!(nothing.lse.iter().all(|lse| *lse == f32::NEG_INFINITY));
    assert!(nothing.out.data().iter().all(|x| *x == 0.0));
}

#[test]
fn parts_that_would_have_other_bits_are_refused() {
    fn refused<T>(result: Result<T, Error>, words: &[&str]) {
        let message = result.err().expect("it is refused").to_string();
        for word in words {
            assert!(message.contains(word), "`{message}` does not say `{word}`");
        }
    }
    let plan = |[batch, q, kv, q_len, k_len]: Sizes,
                of: &dyn Fn(Problem<'static, f32>) -> Problem<'static, f32>| {
        let shape = |heads, len| Shape { batch, heads, len, dim: DIM };
        let problem = Problem::of_shapes(shape(q, q_len), shape(kv, k_len), shape(kv, k_len));
        Plan::new(of(problem), Machine::detect()).unwrap()
    };
    let many = plan([1, 8, 8, 1000, 1000], &|p| p);
    assert_eq!((many.row_step(), many.key_step()), (128, 1));
    refused(many.part(128..200, 0..1000), &["rows", "200", "128", "cut at 128 or 256"]);
    refused(many.part(100..1000, 0..1000), &["rows", "100", "cut at 0 or 128"]);
    refused(many.part(0..1001, 0..1000), &["rows: 1001", "below 1001"]);
    refused(many.part(Range { start: 256, end: 128 }, 0..1000), &["rows: 256", "below 129"]);
    let few = plan([1, 8, 8, 1, 9000], &|p| p);
    refused(few.part(0..1, 0..5000), &["keys", "5000", "1024", "cut at 4096 or 5120"]);
    assert!(few.part(0..1, 4096..9000).is_ok());
    let dropout = |p: Problem<'static, f32>| p.dropout(Dropout::new(0.1, 1, 0));
    refused(plan([1, 1, 1, 9, 9], &dropout).part(0..9, 0..9), &["dropout", "leave it out"]);
    static BIAS: [f32; 81] = [0.0; 81];
    let bias =
        |p: Problem<'static, f32>| p.score(Score::new().bias(View::matrix(&BIAS, [9, 9]).unwrap()));
    refused(plan([1, 1, 1, 9, 9], &bias).part(0..9, 0..9), &["bias", "leave it out"]);
    let top = |p: Problem<'static, f32>| p.normalizer(Normalizer::TopK(3));
    refused(plan([1, 1, 1, 9, 9], &top).part(0..9, 0..9), &["softmax"]);
    refused(few.partial(vec![0.0; 7]), &["partial: 7", "give 160"]);
}
