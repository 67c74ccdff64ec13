//! Normalizers other than softmax: their properties, and the accuracy of their gradient estimators.

use regard::plan::OutputGrads;
use regard::problem::Normalizer;
use regard::reference::{self, Outcome};
use regard::{Error, Grads, Isa, Machine, Number, Output, Plan, Problem, Score, View};
use regard_testkit::run::{both_ways, forward};
use regard_testkit::{Case, Data, Noise, cases::dims};

fn matrix(data: &[f32], features: usize) -> View<'_, f32> {
    View::matrix(data, [data.len() / features, features]).expect("whole rows")
}

fn small() -> (Case, Data<f32>) {
    let case = Case::new(dims([2, 2, 1, 20, 70, 8, 6]));
    let data = Data::new(&case);
    (case, data)
}

fn with(data: &Data<f32>, case: &Case, normalizer: Normalizer) -> Output<f32> {
    forward(&data.problem(case).normalizer(normalizer), data.inputs(), Isa::best(), 2)
}

#[test]
fn as_many_as_there_are_is_the_softmax() {
    let (case, data) = small();
    let (all, soft) =
        (with(&data, &case, Normalizer::TopK(70)), with(&data, &case, Normalizer::Softmax));
    for (a, b) in all.out.data().iter().zip(soft.out.data()) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }
}

#[test]
fn the_best_one_of_all_is_hard() {
    let (case, data) = small();
    let (one, hard) =
        (with(&data, &case, Normalizer::TopK(1)), with(&data, &case, Normalizer::Hard));
    assert_eq!((one.out, one.selection), (hard.out, hard.selection));
}

#[test]
fn a_hard_row_is_a_value_and_says_which() {
    let (case, data) = small();
    let Output { out, selection: choice, lse, .. } = with(&data, &case, Normalizer::Hard);
    let (choice, scores) =
        (choice.unwrap(), reference::scores::<f64, f32>(&data.problem(&case), data.inputs()));
    for row in 0..80 {
        let (item, i) = (row / 20, row % 20);
        let (b, head) = (item / 2, item % 2);
        let [key] = *choice.keys(row) else { panic!("row {row} chose {:?}", choice.keys(row)) };
        assert_eq!(out.view().row(b, head, i), data.v.view().row(b, 0, key));
        let score = scores[row].iter().find(|(k, _)| *k == key).unwrap().1;
        assert!((f64::from(lse[row]) - score).abs() < 1e-5);
        assert!((choice.threshold(row) - score).abs() < 1e-5);
    }
}

#[test]
fn equal_scores_prefer_the_earlier_key() {
    let (q, k) = (vec![0f32; 3 * 4], vec![1f32; 150 * 4]);
    let v: Vec<f32> = (0..150u8).map(f32::from).collect();
    let (q, k, v) = (matrix(&q, 4), matrix(&k, 4), matrix(&v, 1));
    for isa in Isa::available() {
        let problem = Problem::new(&q, &k, &v).normalizer(Normalizer::TopK(5));
        let output = forward(&problem, (q, k, v), isa, 1);
        assert_eq!(output.selection.unwrap().keys(1), [0, 1, 2, 3, 4]);
        assert!(output.out.data().iter().all(|x| (x - 2.0).abs() < 1e-6));
    }
}

#[test]
fn a_score_that_is_no_number_stays_one_that_is_none() {
    let mut k = vec![0.5f32; 100 * 4];
    k[70 * 4] = f32::NAN;
    let (q, v) = (vec![1f32; 4], vec![1f32; 100]);
    let (q, k, v) = (matrix(&q, 4), matrix(&k, 4), matrix(&v, 1));
    let all = [
        Normalizer::TopK(3),
        Normalizer::Hard,
        Normalizer::Sampled { seed: 1 },
        Normalizer::Sparsemax,
    ];
    for normalizer in all {
        let problem = Problem::new(&q, &k, &v).normalizer(normalizer);
        let output = forward(&problem, (q, k, v), Isa::best(), 1);
        assert!(output.out.data()[0].is_nan(), "{normalizer}: {:?}", output.out.data());
    }
}

#[test]
fn sparsemax_weights_are_the_nearest_that_sum_to_one() {
    // Computed by hand: of the scores 1, 0.8 and 0.1, the first two are in the support, with t = 0.4.
    let (q, k) = ([1f32], [1f32, 0.8, 0.1]);
    let v = [1f32, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0];
    let (q, k, v) = (matrix(&q, 1), matrix(&k, 1), matrix(&v, 3));
    let problem = Problem::new(&q, &k, &v).normalizer(Normalizer::Sparsemax);
    let output = forward(&problem, (q, k, v), Isa::best(), 1);
    for (a, b) in output.out.data().iter().zip([0.6, 0.4, 0.0]) {
        assert!((a - b).abs() < 1e-6, "{:?}", output.out.data());
    }
    assert!((output.selection.unwrap().threshold(0) - 0.4).abs() < 1e-6);
}

#[test]
fn a_sparsemax_of_many_equal_scores_is_their_mean_however_large_they_are() {
    for (n, size) in [(3, 0.0), (16384, 0.0), (16384, 20.0), (2, 1e8), (70, 1e30)] {
        let (q, k) = ([1f32], vec![size; n]);
        let v: Vec<f32> = (0..n).map(|i| (i % 2) as f32).collect();
        let (q, k, v) = (matrix(&q, 1), matrix(&k, 1), matrix(&v, 1));
        let problem = Problem::new(&q, &k, &v).normalizer(Normalizer::Sparsemax);
        for isa in Isa::available() {
            let out = forward(&problem, (q, k, v), isa, 1).out.data()[0];
            let mean = (n / 2) as f32 / n as f32;
            assert!((out - mean).abs() < 1e-4, "{n} scores of {size}: {out} instead of {mean}");
        }
    }
    // A score far above all others gets all the weight.
    let (q, k, v) = ([1e4f32], [1e4f32, 0.0], [3f32, 5.0]);
    let (q, k, v) = (matrix(&q, 1), matrix(&k, 1), matrix(&v, 1));
    let problem = Problem::new(&q, &k, &v).normalizer(Normalizer::Sparsemax);
    assert_eq!(forward(&problem, (q, k, v), Isa::best(), 1).out.data(), [3.0]);
}

/// Equal rows over 70 random keys with scalar values.
struct One {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl One {
    fn new(rows: usize) -> Self {
        let mut noise = Noise::new(11);
        let (k, v) = (noise.normals(70 * 2), noise.normals(70));
        Self { q: [0.8, -0.6].repeat(rows), k, v }
    }

    fn views(&self) -> (View<'_, f32>, View<'_, f32>, View<'_, f32>) {
        (matrix(&self.q, 2), matrix(&self.k, 2), matrix(&self.v, 1))
    }

    fn problem(&self, normalizer: Normalizer) -> Problem<'_, f32> {
        let (q, k, v) = self.views();
        Problem::new(&q, &k, &v).score(Score::new().scale(1.5)).normalizer(normalizer)
    }
}

/// Independent draws, one per row; all rows are equal.
const DRAWS: usize = 40_000;

#[test]
fn keys_are_drawn_as_often_as_the_softmax_says() {
    let one = One::new(DRAWS);
    let output =
        forward(&one.problem(Normalizer::Sampled { seed: 3 }), one.views(), Isa::best(), 2);
    let scores = &reference::scores::<f64, f32>(
        &One::new(1).problem(Normalizer::Softmax),
        One::new(1).views(),
    )[0];
    let sum: f64 = scores.iter().map(|(_, score)| score.exp()).sum();
    let mut counts = vec![0.0; 70];
    let choice = output.selection.unwrap();
    (0..DRAWS).for_each(|row| counts[choice.keys(row)[0]] += 1.0);
    let chi: f64 = scores
        .iter()
        .map(|(key, score)| {
            let expected = score.exp() / sum * DRAWS as f64;
            (counts[*key] - expected) * (counts[*key] - expected) / expected
        })
        .sum();
    // 69 degrees of freedom: 69 +- 11.7. The seed is fixed, so the test is deterministic.
    assert!((30.0..120.0).contains(&chi), "{chi}");
    let other = forward(&one.problem(Normalizer::Sampled { seed: 4 }), one.views(), Isa::best(), 2);
    assert_ne!(choice, other.selection.unwrap());
}

/// A loss that is not linear in the output of a row: its value and its gradient.
fn loss(out: f32) -> (f64, f32) {
    let x = f64::from(out);
    (x * x * x + x + 2.0, f32::from_f64(3.0 * x * x + 1.0))
}

/// Mean over draws of the estimated gradient of the keys, and its standard error.
fn estimate(baseline: f64) -> (Vec<f64>, Vec<f64>) {
    let one = One::new(500);
    let (mut sums, mut squares, mut n) = (vec![0.0; 140], vec![0.0; 140], 0.0);
    for seed in 0..200 {
        let problem = one.problem(Normalizer::Sampled { seed });
        let plan = Plan::new(problem, Machine::detect()).expect("a problem that fits");
        let (q, k, v) = one.views();
        let output = plan.forward(q, k, v).expect("tensors that fit");
        let losses: Vec<_> = output.out.data().iter().map(|x| loss(*x)).collect();
        let d_out: Vec<f32> = losses.iter().map(|(_, d)| *d).collect();
        let advantage: Vec<f32> = losses.iter().map(|(l, _)| f32::from_f64(l - baseline)).collect();
        let output_grads = OutputGrads::new(matrix(&d_out, 1)).advantage(&advantage);
        let Grads { k, .. } =
            plan.backward(q, k, v, &output, output_grads).expect("a gradient that fits");
        // The sum over 500 rows is one draw of the estimate.
        for (i, x) in k.data().iter().enumerate() {
            let x = f64::from(*x) / 500.0;
            sums[i] += x;
            squares[i] += x * x;
        }
        n += 1.0;
    }
    let means: Vec<f64> = sums.iter().map(|s| s / n).collect();
    let errors = squares.iter().zip(&means).map(|(s, m)| ((s / n - m * m) / (n - 1.0)).sqrt());
    (means.clone(), errors.collect())
}

/// Expected loss over draws.
fn expected_loss() -> f64 {
    let one = One::new(1);
    let scores = &reference::scores::<f64, f32>(&one.problem(Normalizer::Softmax), one.views())[0];
    let sum: f64 = scores.iter().map(|(_, score)| score.exp()).sum();
    scores.iter().map(|(key, score)| score.exp() / sum * loss(one.v[*key]).0).sum()
}

/// Gradient of the expected loss with respect to the keys: the sum over keys of `d p_j loss(v_j)`.
fn exact() -> Vec<f64> {
    let one = One::new(1);
    // With the loss of each key as its value, the expected loss is the softmax output.
    let values: Vec<f32> = one.v.iter().map(|v| f32::from_f64(loss(*v).0)).collect();
    let (q, k, _) = one.views();
    let v = matrix(&values, 1);
    let problem = Problem::new(&q, &k, &v).score(Score::new().scale(1.5));
    let d = Outcome { out: vec![1.0], lse: vec![0.0], entropy: vec![0.0], max_score: vec![] };
    reference::backward::<f64, f32>(&problem, (q, k, v), &d).k
}

#[test]
fn the_score_function_is_right_on_average_whatever_the_baseline() {
    let exact = exact();
    let mut spread = Vec::new();
    for baseline in [0.0, expected_loss()] {
        let (means, errors) = estimate(baseline);
        let z: Vec<f64> =
            means.iter().zip(&exact).zip(&errors).map(|((m, x), e)| (m - x) / e).collect();
        let square = z.iter().map(|z| z * z).sum::<f64>() / z.len() as f64;
        let worst = z.iter().fold(0f64, |a, z| a.max(z.abs()));
        // Of 140 z-scores, the mean square is about 1 and the largest about 3. The largest gradients are 30 standard
        // errors.
        assert!(
            (0.5..1.7).contains(&square) && worst < 4.5,
            "baseline {baseline}: {square} {worst}"
        );
        let signal = exact.iter().zip(&errors).fold(0f64, |a, (x, e)| a.max((x / e).abs()));
        assert!(signal > 10.0, "the test could not see a wrong gradient: {signal}");
        spread.push(errors.iter().sum::<f64>());
    }
    assert!(spread[1] < spread[0], "a baseline near the mean loss makes less noise: {spread:?}");
}

#[test]
fn straight_through_is_the_gradient_of_the_softmax_but_for_the_values() {
    let (case, data) = small();
    let output_grads = || OutputGrads::new(data.d_out.view());
    let soft = both_ways(&data.problem(&case), data.inputs(), output_grads(), Isa::best(), 2).1;
    for normalizer in [Normalizer::Hard, Normalizer::Sampled { seed: 2 }] {
        let problem = data.problem(&case).normalizer(normalizer);
        let (_, grads) =
            both_ways(&problem, data.inputs(), output_grads().straight_through(), Isa::best(), 2);
        let (_, plain) = both_ways(&problem, data.inputs(), output_grads(), Isa::best(), 2);
        // `f32` does not use AMX tiles here, so the bits agree.
        assert_eq!((&grads.q, &grads.k), (&soft.q, &soft.k));
        assert_eq!(grads.v, plain.v);
        assert!(plain.q.data().iter().chain(plain.k.data()).all(|x| x.abs() < 1e-5));
        assert_ne!(grads.v, soft.v);
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let (case, data) = small();
    let (q, k, v) = data.inputs();
    let plan = |normalizer| {
        Plan::new(data.problem(&case).normalizer(normalizer), Machine::detect()).unwrap()
    };
    let refused = |problem: Problem<'_, f32>| Plan::new(problem, Machine::detect()).unwrap_err();
    let problem = || data.problem(&case);
    assert_eq!(refused(problem().normalizer(Normalizer::TopK(0))), Error::Zero { option: "top k" });
    let sinks = problem().score(Score::new().sinks(&data.sinks));
    let error = refused(sinks.normalizer(Normalizer::Hard));
    assert_eq!(error, Error::OnlySoftmax { option: "sinks", normalizer: "hard" });
    let error = refused(problem().entropy().normalizer(Normalizer::Sparsemax));
    assert_eq!(error, Error::OnlySoftmax { option: "entropy", normalizer: "sparsemax" });
    let rows = vec![0f32; 80];
    let output_grads = || OutputGrads::new(data.d_out.view());
    let (soft, top) = (plan(Normalizer::Softmax), plan(Normalizer::TopK(2)));
    let (of_soft, of_top) = (soft.forward(q, k, v).unwrap(), top.forward(q, k, v).unwrap());
    let estimate = |plan: &Plan<'_, f32>, output, output_grads| {
        plan.backward(q, k, v, output, output_grads).unwrap_err().to_string()
    };
    assert!(estimate(&soft, &of_soft, output_grads().straight_through()).contains("softmax"));
    assert!(estimate(&soft, &of_soft, output_grads().advantage(&rows)).contains("advantage"));
    assert!(estimate(&top, &of_top, output_grads().advantage(&rows)).contains("top k"));
    assert!(estimate(&top, &of_soft, output_grads()).contains("selected keys"));
    assert!(
        estimate(&plan(Normalizer::TopK(3)), &of_top, output_grads())
            .contains("keys of a selection")
    );
    let sampled = plan(Normalizer::Sampled { seed: 0 });
    let of_sampled = sampled.forward(q, k, v).unwrap();
    assert!(
        estimate(&sampled, &of_sampled, output_grads().advantage(&rows[..3]))
            .contains("advantage: 3")
    );
    let both = output_grads().advantage(&rows).straight_through();
    assert!(estimate(&sampled, &of_sampled, both).contains("beside an advantage"));
    let chosen = of_top.selection.clone().unwrap();
    let planned = data.problem(&case).normalizer(Normalizer::TopK(2));
    assert!(Plan::new(planned.with_selection(&chosen), Machine::detect()).is_err());
    assert_eq!(
        Output::merge(Machine::detect(), &[of_top.clone(), of_top]).unwrap_err(),
        Error::NotMergeable
    );
}
