//! Masked keys never affect a row, and visible keys and values may have any magnitude.

use regard::machine::Precision;
use regard::problem::Align;
use regard::{Element, Isa, Machine, Number, Output, Plan, Problem, Score, View, bf16, f16};
use regard_testkit::cases::dims;
use regard_testkit::masks::{MASKS, named};
use regard_testkit::run::{forward, same_bits};
use regard_testkit::scores::{Entries, ScoreOption, bias};
use regard_testkit::{Case, Data, OutputCheck};

fn run<E: Element>(case: &Case, data: &Data<E>, isa: Isa) -> Output<E> {
    forward(&data.problem(case), data.inputs(), isa, 2)
}

/// Whether a key is visible to a row: neither the mask nor a bias of `-inf` hides it.
fn sees<E: Element>(case: &Case, data: &Data<E>, [b, h, row, key]: [usize; 4]) -> bool {
    let scope = data.problem(case).scope(b, h);
    let on = |i: usize, n: usize| if n == 1 { 0 } else { i };
    let s = data.bias.shape;
    let hidden = s.dim > 0
        && wide(
            data.bias.view().row(on(b, s.batch), on(h, s.heads), on(row, s.len))[on(key, s.dim)],
        ) == f64::NEG_INFINITY;
    data.mask.is_visible(&scope, row, key) && !hidden
}

/// Puts `poison` into key `key` and its value, and checks that rows to which it is masked keep their bits.
fn poison_one<E: Element>(
    case: &Case,
    data: &Data<E>,
    clean: &Output<E>,
    (key, isa): (usize, Isa),
) {
    let d = case.dims;
    for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let narrow = E::narrow(E::Num::from_f64(poison));
        let mut poisoned = data.clone();
        for (b, h) in (0..d.batch).flat_map(|b| (0..d.heads.kv).map(move |h| (b, h))) {
            poisoned.k.row_mut(b, h, key).fill(narrow);
            poisoned.v.row_mut(b, h, key).fill(narrow);
        }
        let output = run(case, &poisoned, isa);
        for (i, lse) in output.lse.iter().enumerate() {
            let (item, row) = (i / d.q_len, i % d.q_len);
            let (b, h) = (item / d.heads.q, item % d.heads.q);
            if sees(case, data, [b, h, row, key]) {
                continue;
            }
            let rows = [&output, clean].map(|o| o.out.view().row(b, h, row));
            let same = bits(*lse) == bits(clean.lse[i])
                && rows[0].iter().zip(rows[1]).all(|(a, b)| bits(*a) == bits(*b));
            let [now, before] = rows;
            assert!(
                same,
                "{case} on {}: {poison} in key {key} changed row {row} from {before:?} to {now:?}",
                isa.name()
            );
        }
    }
}

fn wide<E: Element>(x: E) -> f64 {
    Number::to_f64(x.widen())
}

fn bits<E: Element>(x: E) -> u64 {
    wide(x).to_bits()
}

/// `f32` on every instruction set, all other dtypes and precisions where AMX tiles are used.
fn hidden_keys_change_nothing(case: &Case) {
    of_type::<f32>(case, false);
    for precision in [Precision::Full, Precision::High] {
        of_type::<f32>(&Case { precision: Some(precision), ..case.clone() }, true);
    }
    of_type::<f16>(case, true);
    of_type::<bf16>(case, true);
}

fn of_type<E: Element>(case: &Case, tiles: bool) {
    let data = Data::<E>::new(case);
    for isa in Isa::available() {
        let plan = Plan::new(data.problem(case), Machine::detect().isa(isa));
        if tiles && plan.is_ok_and(|plan| plan.tile_products().is_none()) {
            continue;
        }
        let clean = run(case, &data, isa);
        for key in [0, 1, case.dims.k_len / 2, case.dims.k_len - 1] {
            poison_one(case, &data, &clean, (key, isa));
        }
    }
}

#[test]
fn hidden_keys_are_never_touched() {
    for shape in [
        [2, 2, 1, 33, 40, 8, 8],
        [1, 1, 1, 70, 67, 16, 3],
        [1, 1, 1, 1, 130, 4, 16],
        [1, 3, 1, 2, 90, 32, 32],
    ] {
        for mask in MASKS {
            hidden_keys_change_nothing(&Case::new(dims(shape)).mask(*mask));
            let scores = [ScoreOption::Softcap(4.0), ScoreOption::Alibi, ScoreOption::Sinks];
            hidden_keys_change_nothing(&Case::new(dims(shape)).mask(*mask).scores(&scores));
        }
        for align in [Align::Start, Align::Offset(-5), Align::Offset(7)] {
            let case = Case::new(dims(shape)).align(align);
            hidden_keys_change_nothing(&case.clone().mask(named("causal")));
            hidden_keys_change_nothing(&case.mask(named("strided_causal")));
        }
    }
}

#[test]
fn a_value_that_is_not_finite_reaches_its_own_feature_alone() {
    fn of_type<E: Element>(case: &Case) {
        let (d, data) = (case.dims, Data::<E>::new(case));
        let step = if size_of::<E>() == 2 { 0.02 } else { 1e-5 };
        for isa in Isa::available() {
            let clean = run(case, &data, isa);
            for (key, feature) in [(0, 0), (17, 5), (d.k_len - 1, d.v_dim - 1)] {
                let mut poisoned = data.clone();
                let infinite = E::narrow(E::Num::from_f64(f64::INFINITY));
                poisoned.v.row_mut(0, 0, key)[feature] = infinite;
                let output = run(case, &poisoned, isa);
                let rows = d.heads.q / d.heads.kv;
                for (h, row) in (0..rows).flat_map(|h| (0..d.q_len).map(move |row| (h, row))) {
                    let [now, before] = [&output, &clean].map(|o| o.out.view().row(0, h, row));
                    for (i, (now, before)) in now.iter().zip(before).enumerate() {
                        let place = format!("{case} on {}: row {row} feature {i}", isa.name());
                        if i == feature && sees(case, &data, [0, h, row, key]) {
                            assert!(!wide(*now).is_finite(), "{place}");
                        } else {
                            // A key block with a non-finite value is processed separately and may round differently.
                            let error = (wide(*now) - wide(*before)).abs();
                            assert!(error <= step * wide(*before).abs().max(0.1), "{place}");
                        }
                    }
                }
            }
        }
    }
    for shape in [[1, 4, 1, 1, 200, 64, 64], [1, 2, 1, 70, 130, 16, 33], [1, 9, 1, 1, 70, 32, 32]] {
        for mask in ["full", "causal", "lengths", "bits"] {
            let case = Case::new(dims(shape)).mask(named(mask));
            of_type::<f32>(&case);
            of_type::<f32>(&Case { precision: Some(Precision::Full), ..case.clone() });
            of_type::<f16>(&case);
            of_type::<bf16>(&case);
        }
    }
}

#[test]
fn keys_hidden_by_a_bias_are_never_touched() {
    for axes in ["11qk", "b11k", "1hqk", "bhqk"] {
        for mask in ["full", "causal"] {
            let case = Case::new(dims([2, 2, 1, 33, 40, 8, 8])).mask(named(mask));
            hidden_keys_change_nothing(&case.scores(&[bias(axes, Entries::Hiding)]));
        }
    }
}

#[test]
fn a_relative_bias_does_not_bring_back_what_a_bias_hides() {
    let hiding = bias("111k", Entries::Hiding);
    let case = Case::new(dims([1, 1, 1, 1, 1, 1, 1]));
    for relative in [ScoreOption::Clipped(0), ScoreOption::T5 { bidirectional: true }] {
        let case = case.clone().scores(&[hiding, relative]);
        let mut data = Data::<f32>::new(&case);
        data.bias.data.fill(f32::NEG_INFINITY);
        for isa in Isa::available() {
            let output = run(&case, &data, isa);
            assert_eq!((output.lse[0], output.out.data()[0]), (f32::NEG_INFINITY, 0.0), "{case}");
        }
    }
}

#[test]
fn rows_that_see_nothing_are_zero() {
    for mask in ["nothing", "bits_hidden_rows"] {
        let case = Case::new(dims([2, 2, 1, 70, 9, 8, 8])).mask(named(mask));
        let sinks = case.clone().scores(&[ScoreOption::Sinks]);
        let data = Data::<f32>::new(&case);
        for isa in Isa::available() {
            let (plain, sunk) = (run(&case, &data, isa), run(&sinks, &data, isa));
            for (i, lse) in plain.lse.iter().enumerate() {
                let (item, row) = (i / 70, i % 70);
                let (b, h) = (item / 2, item % 2);
                if (0..9).any(|key| sees(&case, &data, [b, h, row, key])) {
                    continue;
                }
                assert_eq!(*lse, f32::NEG_INFINITY);
                let sink = data.sinks[h];
                let error = (sunk.lse[i] - sink).abs();
                assert!(error <= 2.0 * f32::EPSILON * sink.abs(), "{} {sink}", sunk.lse[i]);
                for output in [&plain, &sunk] {
                    assert!(output.out.view().row(b, h, row).iter().all(|x| *x == 0.0));
                }
            }
        }
    }
}

/// One head in which every row has the given scores (one feature, queries of 1) and values.
fn with_scores(scores: &[f32], values: &[f32], rows: usize, isa: Isa) -> Output<f32> {
    let ones = vec![1.0; rows];
    let column = |data| View::matrix(data, [<[f32]>::len(data), 1]).expect("one feature each");
    let (q, k, v) = (column(&ones), column(scores), column(values));
    let problem = Problem::new(&q, &k, &v).score(Score::new().scale(1.0));
    let output = forward(&problem, (q, k, v), isa, 2);
    assert!(output.lse.iter().all(|x| *x == output.lse[0]));
    assert!(output.out.data().iter().all(|x| *x == output.out.data()[0]));
    output
}

#[test]
fn huge_scores_stay_finite() {
    for isa in Isa::available() {
        for keys in [1, 2, 65, 200, 8200] {
            for size in [1e10f32, 1e30, 1e37] {
                let signs = [1.0, -1.0, 0.0];
                let scores: Vec<f32> = (0..keys).map(|i| size * signs[i % 3]).collect();
                let values: Vec<f32> = (0..keys).map(|i| (i % 3) as f32 + 1.0).collect();
                for (scores, best) in [
                    (scores.clone(), 1.0), // the largest score belongs to the values of 1
                    (scores.iter().map(|s| -s - size).collect(), if keys > 1 { 2.0 } else { 1.0 }),
                ] {
                    let output = with_scores(&scores, &values, 3, isa);
                    assert!(output.lse[0].is_finite(), "{} {keys} {size}", isa.name());
                    assert_eq!(output.out.data()[0], best, "{} {keys} {size}", isa.name());
                }
            }
        }
    }
}

#[test]
fn huge_sinks_stay_finite() {
    let case = Case::new(dims([1, 1, 1, 3, 9, 4, 4])).scores(&[ScoreOption::Sinks]);
    for (isa, sink) in
        Isa::available().into_iter().flat_map(|isa| [1e30f32, -1e30].map(|s| (isa, s)))
    {
        let mut data = Data::<f32>::new(&case);
        data.sinks.fill(sink);
        let judge = OutputCheck::new(&data.problem(&case), data.inputs());
        let ratio = judge.ratio(&run(&case, &data, isa)).unwrap();
        assert!(ratio.is_close(), "{} {sink}: {ratio:?}", isa.name());
    }
}

#[test]
fn scores_that_grow_along_the_keys_stay_exact() {
    for (isa, step) in
        Isa::available().into_iter().flat_map(|isa| [0.01f32, 0.3, 2.0, 40.0].map(|s| (isa, s)))
    {
        for (rows, keys) in [(1, 300), (70, 1000), (3, 9000)] {
            let scores: Vec<f32> = (0..keys).map(|i| step * i as f32).collect();
            let values: Vec<f32> = (0..keys).map(|i| (i as f32 * 0.37).sin()).collect();
            let output = with_scores(&scores, &values, rows, isa);
            let (q, one) = ([1.0f32], [1, 1]);
            let q = View::matrix(&q, one).unwrap();
            let k = View::matrix(&scores, [keys, 1]).unwrap();
            let v = View::matrix(&values, [keys, 1]).unwrap();
            let problem = Problem::new(&q, &k, &v).score(Score::new().scale(1.0));
            let judge = OutputCheck::new(&problem, (q, k, v));
            let first = with_scores(&scores, &values, 1, isa);
            let ratio = judge.ratio(&first).unwrap();
            assert!(ratio.is_close(), "{} {step} {rows}x{keys}: {ratio:?}", isa.name());
            let near = |a: f32, b: f32| (a - b).abs() <= 4.0 * f32::EPSILON * b.abs().max(1.0);
            assert!(near(output.lse[0], first.lse[0]));
        }
    }
}

#[test]
fn huge_values_stay_finite() {
    for isa in Isa::available() {
        for keys in [1, 64, 1000, 9000] {
            let scores: Vec<f32> = (0..keys).map(|i| (i as f32 * 0.7).sin()).collect();
            let output = with_scores(&scores, &vec![1e30; keys], 5, isa);
            let out = output.out.data()[0];
            assert!((out / 1e30 - 1.0).abs() < 1e-5, "{} {keys}: {out}", isa.name());
        }
    }
}

/// Scores of the first tile are low, so that later weights are nearly as large as they can get without an update of the
/// running maximum. Their sum must not overflow either.
#[test]
fn huge_values_stay_finite_when_later_scores_are_higher() {
    for isa in Isa::available() {
        for (rows, keys) in [(5, 4000), (200, 30_000), (1, 40_000)] {
            let score = |i: usize| if i < 64 { 0.0 } else { 9.5 };
            let scores: Vec<f32> = (0..keys).map(score).collect();
            let output = with_scores(&scores, &vec![1e30; keys], rows, isa);
            let out = output.out.data()[0];
            assert!((out / 1e30 - 1.0).abs() < 1e-4, "{} {rows}x{keys}: {out}", isa.name());
        }
    }
}

#[test]
fn results_do_not_depend_on_what_other_rows_hold() {
    let case = Case::new(dims([1, 1, 1, 70, 70, 8, 8])).mask(named("causal"));
    for isa in Isa::available() {
        let mut data = Data::<f32>::new(&case);
        let clean = run(&case, &data, isa);
        data.q.row_mut(0, 0, 13).fill(f32::NAN);
        let mut output = run(&case, &data, isa);
        // Row 13 is NaN, all others keep their bits.
        assert!(output.lse[13].is_nan());
        output.lse[13] = clean.lse[13];
        output.states[13] = clean.states[13];
        let mut values = output.out.clone().into_data();
        values[13 * 8..14 * 8].copy_from_slice(clean.out.view().row(0, 0, 13));
        output.out = regard::Tensor::new(values, clean.out.shape(), clean.out.layout()).unwrap();
        assert!(same_bits(&output, &clean), "{}", isa.name());
    }
}
