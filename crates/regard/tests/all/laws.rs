//! Mathematical properties of attention that hold for any inputs.

use proptest::prelude::*;
use regard::plan::OutputMut;
use regard::problem::Align;
use regard::reference::Inputs;
use regard::{
    Element, Isa, Machine, Mask, Number, Output, Plan, Problem, Score, Shape, View, ViewMut, bf16,
};
use regard_testkit::cases::dims;
use regard_testkit::masks::named;
use regard_testkit::run::{forward, same_bits};
use regard_testkit::scores::{SCORES, ScoreOption};
use regard_testkit::{Arrangement, Case, Data, Noise, OutputCheck, TestTensor};

/// Cases of moderate size: random dimensions, one entry of the score table, a seed.
fn cases() -> impl Strategy<Value = Case> {
    let sizes = (1..3usize, 1..3usize, 1..3usize, 1..70usize, 1..140usize, 1..20usize, 1..20usize);
    // Excludes lowest biases: these properties do not hold for numbers that large.
    let ordinary: Vec<usize> = (0..SCORES.len())
        .filter(|i| !SCORES[*i].iter().any(|option| option.to_string().contains("lowest")))
        .collect();
    (sizes, prop::sample::select(ordinary), any::<u32>()).prop_map(|(sizes, scores, seed)| {
        let (batch, group, kv, q_len, k_len, qk_dim, v_dim) = sizes;
        let dims = dims([batch, group * kv, kv, q_len, k_len, qk_dim, v_dim]);
        Case { seed: seed.into(), ..Case::new(dims).scores(SCORES[scores]) }
    })
}

/// Cases whose mask is a random tree of rules.
fn masked() -> impl Strategy<Value = (Case, Data<f32>)> {
    (cases(), crate::strategies::masks()).prop_map(|(case, tree)| {
        let mut data = Data::new(&case);
        data.mask = tree.build(&case.dims, &mut Noise::new(case.seed));
        (case, data)
    })
}

fn run(case: &Case, data: &Data<f32>) -> Output<f32> {
    forward(&data.problem(case), data.inputs(), Isa::best(), 2)
}

/// Repeats keys and values once per query head that uses them.
fn repeated<E: Element>(case: &Case, data: &Data<E>) -> Data<E> {
    let (q, kv) = (case.dims.heads.q, case.dims.heads.kv);
    let mut repeated = data.clone();
    for tensor in [&mut repeated.k, &mut repeated.v] {
        let Shape { batch, len, dim, .. } = tensor.shape;
        let rows = (0..batch).flat_map(|b| (0..q).map(move |h| (b, h * kv / q)));
        let view = tensor.view();
        let values: Vec<E> = rows
            .flat_map(|(b, h)| (0..len).flat_map(move |i| view.row(b, h, i).iter().copied()))
            .collect();
        *tensor = TestTensor::new(&values, Shape { batch, heads: q, len, dim }, Arrangement::Bhsd);
    }
    repeated
}

/// Decoding: a few rows are processed together with those of other heads.
#[test]
fn few_rows_have_the_same_bits_beside_others() {
    fn of_type<E: Element>(case: &Case) {
        let data = Data::<E>::new(case);
        for isa in Isa::available() {
            let [a, b] = [&data, &repeated(case, &data)]
                .map(|data| forward(&data.problem(case), data.inputs(), isa, 2));
            assert!(same_bits(&a, &b), "{case} {} on {}", E::NAME, isa.name());
        }
    }
    for heads in [2, 3, 4, 5, 8, 12, 16] {
        for keys in [1, 20, 64, 84, 200, 700] {
            for mask in ["full", "lengths"] {
                let case = Case::new(dims([2, heads, 1, 1, keys, 32, 64])).mask(named(mask));
                of_type::<f32>(&case);
                of_type::<bf16>(&case);
            }
        }
    }
}

/// A plan keeps the memory its threads worked in: nothing of an earlier call may show, not even where that met NaN.
#[test]
fn a_plan_that_has_run_before_gives_the_bits_of_a_new_one() {
    fn of_type<E: Element>(case: &Case) {
        let data = Data::<E>::new(case);
        let mut other = data.clone();
        let nan = E::narrow(E::Num::from_f64(f64::NAN));
        for tensor in [&mut other.q, &mut other.k, &mut other.v] {
            tensor.data.fill(nan);
        }
        for isa in Isa::available() {
            let machine = Machine::detect().isa(isa).threads(2);
            let plan = Plan::new(data.problem(case), machine).unwrap();
            let of = |(q, k, v): Inputs<'_, E>| plan.forward(q, k, v).unwrap();
            let first = of(data.inputs());
            let _ = of(other.inputs());
            assert!(same_bits(&first, &of(data.inputs())), "{case} {} {}", E::NAME, isa.name());
        }
    }
    for sizes in [[2, 4, 2, 70, 140, 32, 64], [2, 8, 2, 1, 200, 32, 64], [1, 2, 1, 130, 130, 20, 9]]
    {
        for scores in SCORES.iter().step_by(3) {
            let case = Case::new(dims(sizes)).mask(named("lengths")).scores(scores);
            of_type::<f32>(&case);
            of_type::<bf16>(&case);
        }
    }
}

/// Copies the queries or keys `part` of a tensor.
fn slice(tensor: &TestTensor<f32>, part: std::ops::Range<usize>) -> TestTensor<f32> {
    let Shape { batch, heads, .. } = tensor.shape;
    let rows = (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h)));
    let view = tensor.view();
    let values: Vec<f32> = rows
        .flat_map(|(b, h)| part.clone().flat_map(move |i| view.row(b, h, i).iter().copied()))
        .collect();
    TestTensor::new(&values, Shape { len: part.len(), ..tensor.shape }, Arrangement::Bhsd)
}

/// A problem over a part of the keys, with unchanged positions and with the entropy.
fn over<'a>(inputs: &Inputs<'a, f32>, mask: &Mask, offset: i64) -> Problem<'a, f32> {
    let (q, k, v) = inputs;
    Problem::new(q, k, v).mask(mask.clone()).align(Align::Offset(offset)).entropy()
}

fn within_twice_its_error(whole: &Problem<'_, f32>, inputs: Inputs<'_, f32>, merged: &Output<f32>) {
    let ratio =
        OutputCheck::new(whole, inputs).ratio(merged).expect("rows that see what they should");
    assert!(ratio.is_close(), "{whole}: {ratio:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_weights_of_a_row_sum_to_one((case, mut data) in masked()) {
        let without: Vec<ScoreOption> =
            case.scores.iter().copied().filter(|s| *s != ScoreOption::Sinks).collect();
        let case = case.scores(&without);
        data.v.data.fill(1.0);
        let output = run(&case, &data);
        let v_dim = case.dims.v_dim;
        for (lse, out) in output.lse.iter().zip(output.out.data().chunks_exact(v_dim)) {
            let sum = if *lse == f32::NEG_INFINITY { 0.0 } else { 1.0 };
            prop_assert!(out.iter().all(|x| (x - sum).abs() < 1e-5), "{}: {:?}", case, out);
        }
    }

    #[test]
    fn the_order_of_keys_does_not_matter(case in cases()) {
        let case = case.scores(&[]);
        let data = Data::<f32>::new(&case);
        let mut turned = data.clone();
        let Shape { batch, heads, len, .. } = data.k.shape;
        for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            for key in 0..len {
                let other = (key * 3 + 1) % len;
                let other = if len % 3 == 0 { len - 1 - key } else { other };
                turned.k.row_mut(b, h, other).copy_from_slice(data.k.view().row(b, h, key));
                turned.v.row_mut(b, h, other).copy_from_slice(data.v.view().row(b, h, key));
            }
        }
        within_twice_its_error(&data.problem(&case), data.inputs(), &run(&case, &turned));
    }

    #[test]
    fn a_constant_added_to_all_scores_is_added_to_the_lse((case, data) in masked(), c in -20f32..20.0) {
        let case = case.scores(&[]);
        let (q, k, v) = data.inputs();
        let bias = [c];
        let score = Score::new().bias(View::matrix(&bias, [1, 1]).unwrap());
        let problem = Problem::new(&q, &k, &v).mask(data.mask.clone()).score(score);
        let (plain, moved) = (run(&case, &data), forward(&problem, (q, k, v), Isa::best(), 1));
        let near = |a: f32, b: f32| a == b || (a - b).abs() < 1e-5 * (c.abs() + a.abs()).max(1.0);
        prop_assert!(plain.lse.iter().zip(&moved.lse).all(|(a, b)| near(a + c, *b)));
        prop_assert!(plain.out.data().iter().zip(moved.out.data()).all(|(a, b)| near(*a, *b)));
    }

    #[test]
    fn the_entropy_is_at_most_the_logarithm_of_what_a_row_sees((case, data) in masked()) {
        let case = Case { entropy: true, ..case };
        let sunk = usize::from(case.scores.contains(&ScoreOption::Sinks));
        let (problem, entropy) = (data.problem(&case), run(&case, &data).entropy.unwrap());
        let (heads, q_len) = (case.dims.heads.q, case.dims.q_len);
        for (i, entropy) in entropy.iter().enumerate() {
            let scope = problem.scope(i / q_len / heads, i / q_len % heads);
            let seen: usize = data.mask.visible(&scope, i % q_len).iter().map(ExactSizeIterator::len).sum();
            let most = ((seen + sunk) as f32).ln().max(0.0);
            prop_assert!((0.0..=most + 1e-5).contains(entropy), "{}: {} of {}", case, entropy, most);
        }
    }

    #[test]
    fn equal_scores_have_the_logarithm_of_their_number_as_entropy((case, mut data) in masked()) {
        let case = Case { entropy: true, ..case.scores(&[]) };
        data.q.data.fill(0.0);
        let output = run(&case, &data);
        for (lse, entropy) in output.lse.iter().zip(output.entropy.unwrap()) {
            let expected = lse.max(0.0); // ln n, or 0 for a fully masked row
            prop_assert!((entropy - expected).abs() < 1e-6, "{}: {} {}", case, entropy, expected);
        }
    }

    #[test]
    fn the_entropy_of_one_key_is_zero((case, mut data) in masked()) {
        let case = Case { entropy: true, ..case.scores(&[]) };
        data.mask = Mask::full().window(1);
        prop_assert!(run(&case, &data).entropy.unwrap().iter().all(|x| *x == 0.0), "{}", case);
    }

    // ANCHOR: merge
    #[test]
    fn merging_parts_of_the_keys_gives_the_whole(
        case in cases(), parts in prop::sample::select(vec![2, 3, 16]), causal: bool,
    ) {
        let data = Data::<f32>::new(&case);
        let mask = if causal { Mask::causal() } else { Mask::full() };
        let (q_len, k_len) = (case.dims.q_len, case.dims.k_len);
        let offset = k_len as i64 - q_len as i64;
        let results: Vec<Output<f32>> = (0..parts).map(|i| {
            let part = k_len * i / parts..k_len * (i + 1) / parts;
            let (k, v) = (slice(&data.k, part.clone()), slice(&data.v, part.clone()));
            let inputs = (data.q.view(), k.view(), v.view());
            forward(&over(&inputs, &mask, offset - part.start as i64), inputs, Isa::best(), 1)
        }).collect();
        let inputs = data.inputs();
        let merged = Output::merge(Machine::detect(), &results).unwrap();
        prop_assert!(merged.entropy.is_some());
        within_twice_its_error(&over(&inputs, &mask, offset), inputs, &merged);
    }
    // ANCHOR_END: merge

    #[test]
    fn merging_with_a_part_that_sees_nothing_changes_nothing((case, mut data) in masked()) {
        let some = run(&case, &data);
        data.mask = Mask::full().window(0);
        let without: Vec<ScoreOption> =
            case.scores.iter().copied().filter(|s| *s != ScoreOption::Sinks).collect();
        let nothing = run(&case.scores(&without), &data);
        for parts in [vec![some.clone()], vec![some.clone(), nothing.clone()], vec![nothing, some.clone()]] {
            prop_assert!(same_bits(&Output::merge(Machine::detect(), &parts).unwrap(), &some));
        }
    }

    #[test]
    fn the_last_row_of_a_causal_call_is_the_decoding_of_that_row(case in cases()) {
        let case = case.scores(&[ScoreOption::Alibi]).mask(regard_testkit::masks::named("causal"));
        let data = Data::<f32>::new(&case);
        let q_len = case.dims.q_len;
        let mut alone = data.clone();
        alone.q = slice(&data.q, q_len - 1..q_len);
        let (all, one) = (run(&case, &data), run(&case, &alone));
        let judge = OutputCheck::new(&alone.problem(&case), alone.inputs());
        let last: Vec<f32> = all.lse.chunks_exact(q_len).map(|rows| rows[q_len - 1]).collect();
        let values: Vec<f32> =
            all.out.data().chunks_exact(q_len * case.dims.v_dim)
                .flat_map(|rows| rows[(q_len - 1) * case.dims.v_dim..].to_vec()).collect();
        let out = regard::Tensor::new(values, one.out.shape(), one.out.layout()).unwrap();
        for output in [Output::new(out, last), one] {
            prop_assert!(judge.ratio(&output).unwrap().is_close(), "{}", case);
        }
    }

    #[test]
    fn an_item_does_not_depend_on_its_batch(case in cases()) {
        let case = Case { dims: regard::problem::Dims { batch: 5, ..case.dims }, ..case };
        let case = case.scores(&[ScoreOption::Alibi, ScoreOption::Sinks]).mask(regard_testkit::masks::named("causal"));
        let data = Data::<f32>::new(&case);
        let all = run(&case, &data);
        for b in 0..5 {
            let mut alone = data.clone();
            for tensor in [&mut alone.q, &mut alone.k, &mut alone.v] {
                let n = tensor.data.len() / 5;
                tensor.data = tensor.data[b * n..(b + 1) * n].to_vec();
                tensor.shape.batch = 1;
            }
            let one = run(&case, &alone);
            let (n, rows) = (one.out.data().len(), one.lse.len());
            let bits = |xs: &[f32]| xs.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&all.lse[b * rows..(b + 1) * rows]), bits(&one.lse));
            prop_assert_eq!(bits(&all.out.data()[b * n..(b + 1) * n]), bits(one.out.data()));
        }
    }

    #[test]
    fn grouped_heads_are_repeated_keys_and_values((case, data) in masked()) {
        prop_assert!(same_bits(&run(&case, &data), &run(&case, &repeated(&case, &data))), "{}", case);
    }

    #[test]
    fn the_layout_changes_no_bit((case, data) in masked()) {
        let expected = run(&case, &data);
        for arrangement in [Arrangement::Bshd, Arrangement::Slice] {
            let mut other = Data::<f32>::new(&case.clone().arrangement(arrangement));
            other.mask = data.mask.clone();
            let output = run(&case, &other);
            prop_assert_eq!(&output.lse, &expected.lse);
            let Shape { batch, heads, len, .. } = output.out.shape();
            for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
                for i in 0..len {
                    prop_assert_eq!(output.out.view().row(b, h, i), expected.out.view().row(b, h, i));
                }
            }
        }
    }

    #[test]
    fn the_visible_ranges_are_what_a_mask_sees(
        (case, data) in masked(),
        align in prop_oneof![Just(Align::End), Just(Align::Start), (-80i64..150).prop_map(Align::Offset)],
    ) {
        let problem = data.problem(&case).align(align);
        let last = problem.scope(case.dims.batch - 1, case.dims.heads.q - 1);
        for scope in [problem.scope(0, 0), last] {
            for row in 0..scope.q_len {
                let ranges = data.mask.visible(&scope, row);
                prop_assert!(ranges.iter().all(|r| r.start < r.end && r.end <= scope.k_len));
                prop_assert!(ranges.windows(2).all(|w| w[0].end < w[1].start), "{:?}", ranges);
                for key in 0..scope.k_len {
                    let seen = ranges.iter().any(|r| r.contains(&key));
                    let sees = data.mask.is_visible(&scope, row, key);
                    prop_assert_eq!(seen, sees, "{} row {} key {}", data.mask, row, key);
                }
            }
        }
    }
}

#[test]
fn memory_of_the_caller_gets_the_same_bits() {
    let case = Case::new(dims([2, 3, 1, 33, 40, 8, 5]));
    let data = Data::<f32>::new(&case);
    let expected = run(&case, &data);
    let shape = expected.out.shape();
    let strides = regard::tensor::Strides { batch: 5000, heads: 6, len: 20 };
    let (mut out, mut lse) = (vec![7.0; 10_000], vec![7.0; expected.lse.len()]);
    let plan = regard::Plan::new(data.problem(&case), regard::Machine::detect()).unwrap();
    let target = ViewMut::strided(&mut out, shape, strides).unwrap();
    let (q, k, v) = data.inputs();
    let to = OutputMut { out: target, lse: &mut lse, entropy: None };
    plan.forward_into(q, (k, v), to).unwrap();
    assert_eq!(lse, expected.lse);
    let written = View::strided(&out, shape, strides).unwrap();
    for (b, h) in [(0, 0), (0, 2), (1, 1)] {
        for i in 0..33 {
            assert_eq!(written.row(b, h, i), expected.out.view().row(b, h, i));
        }
    }
    assert_eq!(out.iter().filter(|x| **x == 7.0).count(), out.len() - expected.out.data().len());
}
