//! Compares the gradients of the reference with finite differences of the reference.

use regard::problem::{Normalizer, Similarity};
use regard::reference::{Grads, Outcome, backward, forward};
use regard::{Problem, Shape, View};
use regard_testkit::cases::{SimilarityCase, dims};
use regard_testkit::masks::named;
use regard_testkit::scores::{SCORES, ScoreOption};
use regard_testkit::{Arrangement, Case, Data, Noise};

/// 2 items, 4 query heads over 2 key heads, 3 queries, 5 keys.
fn case() -> Case {
    Case::new(dims([2, 4, 2, 3, 5, 3, 2]))
}

/// Coefficients of `out`, `lse` and the entropy in the loss.
fn weights(case: &Case) -> Outcome<f64> {
    let mut noise = Noise::new(99);
    let rows = case.dims.batch * case.dims.heads.q * case.dims.q_len;
    let (out, lse) = (noise.normals(rows * case.dims.v_dim), noise.normals(rows));
    if case.normalizer == Normalizer::Sparsemax {
        // Sparsemax has neither lse nor entropy.
        let zeros = vec![0.0; rows];
        return Outcome { out, lse: zeros.clone(), entropy: zeros, max_score: Vec::new() };
    }
    Outcome { out, lse, entropy: noise.normals(rows), max_score: Vec::new() }
}

/// Sum of all results times their coefficients; infinite lse of fully masked rows is left out.
fn loss(case: &Case, data: &Data<f64>) -> f64 {
    let outcome = forward::<f64, f64>(&data.problem(case), data.inputs());
    let d = weights(case);
    let dot = |a: &[f64], b: &[f64]| {
        a.iter().zip(b).filter(|(a, _)| a.is_finite()).map(|(a, b)| a * b).sum::<f64>()
    };
    dot(&outcome.out, &d.out) + dot(&outcome.lse, &d.lse) + dot(&outcome.entropy, &d.entropy)
}

fn gradients(case: &Case, data: &Data<f64>) -> Grads<f64> {
    backward(&data.problem(case), data.inputs(), &weights(case))
}

/// Step of the central differences. Their truncation error is about `STEP^2`, their rounding error about `1e-16 / STEP`.
const STEP: f64 = 1e-5;
const CLOSE: f64 = 1e-7;

fn assert_slope(case: &Case, what: &str, gradient: f64, at: impl Fn(f64) -> f64) {
    let slope = (at(STEP) - at(-STEP)) / (2.0 * STEP);
    let error = (gradient - slope).abs() / slope.abs().max(1.0);
    assert!(error < CLOSE, "{case}: by {what} {gradient}, by differences {slope}");
}

/// Compares the gradient of one array of the data, entry by entry.
fn by_entries(
    (case, data): (&Case, &Data<f64>),
    what: &str,
    gradient: &[f64],
    piece: impl Fn(&mut Data<f64>) -> &mut Vec<f64>,
) {
    assert_eq!(gradient.len(), piece(&mut data.clone()).len(), "{case}: entries of {what}");
    for (i, gradient) in gradient.iter().enumerate() {
        if !piece(&mut data.clone())[i].is_finite() {
            assert_eq!(*gradient, 0.0, "{case}: {what} {i} hides its pairs");
            continue;
        }
        assert_slope(case, &format!("{what} {i}"), *gradient, |step| {
            let mut moved = data.clone();
            piece(&mut moved)[i] += step;
            loss(case, &moved)
        });
    }
}

/// Compares the gradients of everything that a case depends on.
fn all_slopes(case: &Case) {
    let data = Data::new(case);
    let g = gradients(case, &data);
    let at = (case, &data);
    by_entries(at, "q", &g.q, |d| &mut d.q.data);
    by_entries(at, "k", &g.k, |d| &mut d.k.data);
    by_entries(at, "v", &g.v, |d| &mut d.v.data);
    // `d.w` is `W` or `w_q`, depending on the similarity.
    let [w_q, w_k, v] = &g.additive;
    by_entries(at, "w", if v.is_empty() { &g.w } else { w_q }, |d| &mut d.w.data);
    by_entries(at, "w_k", w_k, |d| &mut d.hidden[0].data);
    by_entries(at, "v of additive", v, |d| &mut d.hidden[1].data);
    by_entries(at, "bias", &g.bias, |d| &mut d.bias.data);
    by_entries(at, "relative", &g.relative, |d| &mut d.table);
    if case.scores.contains(&ScoreOption::Sinks) {
        by_entries(at, "sinks", &g.sinks, |d| &mut d.sinks);
    }
    if case.scores.contains(&ScoreOption::Alibi) {
        by_entries(at, "slopes", &g.alibi, |d| &mut d.slopes);
    }
    by_entries(at, "centers", &g.centers, |d| &mut d.centers);
    let (scale, temperature) = (data.problem(case).scale(), temperature(case));
    // `g.scale` is the gradient of the scale after division by the temperature, so the option moves by `step` times the
    // temperature.
    let with = |option| {
        let mut scores = case.scores.clone();
        scores.push(option);
        loss(&case.clone().scores(&scores), &data)
    };
    assert_slope(case, "scale", g.scale, |step| {
        with(ScoreOption::Scale((scale + step) * temperature))
    });
    assert_slope(case, "temperature", g.temperature, |step| {
        with(ScoreOption::Temperature(temperature + step))
    });
}

fn temperature(case: &Case) -> f64 {
    let given = case.scores.iter().find_map(|option| match option {
        ScoreOption::Temperature(t) => Some(*t),
        _ => None,
    });
    given.unwrap_or(1.0)
}

#[test]
fn gradients_are_finite_differences_for_every_score() {
    for scores in SCORES {
        // With lowest biases, rounding hides the step.
        let lowest = scores.iter().any(|option| option.to_string().contains("lowest"));
        for mask in ["full", "causal"].into_iter().filter(|_| !lowest) {
            all_slopes(&case().scores(scores).mask(named(mask)));
        }
    }
}

#[test]
fn gradients_are_finite_differences_for_every_similarity() {
    for similarity in SimilarityCase::ALL {
        for scores in [SCORES[0], SCORES[SCORES.len() - 2]] {
            all_slopes(&case().similarity(similarity).scores(scores).mask(named("lengths_causal")));
        }
    }
}

#[test]
fn gradients_are_finite_differences_for_every_normalizer() {
    let all = [
        Normalizer::TopK(2),
        Normalizer::Hard,
        Normalizer::Sampled { seed: 8 },
        Normalizer::Sparsemax,
    ];
    let with_options = [ScoreOption::Softcap(2.0), ScoreOption::Alibi, ScoreOption::Custom];
    for (normalizer, scores) in all.iter().flat_map(|n| [(*n, &[][..]), (*n, &with_options)]) {
        let case = Case { normalizer, ..case() };
        all_slopes(&case.scores(scores).mask(named("causal")));
    }
}

#[test]
fn gradients_are_finite_differences_around_centers() {
    for (reach, dropout) in [(1, None), (3, Some(0.4))] {
        let case = Case { reach: Some(reach), dropout, ..case() };
        all_slopes(&case.clone().scores(SCORES[SCORES.len() - 2]));
        all_slopes(&case.similarity(SimilarityCase::Additive));
    }
}

#[test]
fn gradients_are_finite_differences_under_dropout() {
    for scores in [SCORES[0], SCORES[SCORES.len() - 2]] {
        all_slopes(&Case { dropout: Some(0.4), ..case() }.scores(scores).mask(named("causal")));
    }
}

#[test]
fn the_gradient_of_a_value_is_the_weighted_sum_of_output_gradients() {
    let case = case().mask(named("causal")).scores(&[ScoreOption::Alibi, ScoreOption::Sinks]);
    let data = Data::<f64>::new(&case);
    let d_out = weights(&case).out;
    let g = gradients(&case, &data);
    // With one-hot values and as many features as keys, the output is the row of weights.
    let [b, h, n] = [case.dims.batch, case.dims.heads.kv, case.dims.k_len];
    let hot: Vec<f64> =
        (0..b * h * n * n).map(|i| if i / n % n == i % n { 1.0 } else { 0.0 }).collect();
    let mut one_hot = data.clone();
    let shape = Shape { batch: b, heads: h, len: n, dim: n };
    one_hot.v = regard_testkit::TestTensor::new(&hot, shape, Arrangement::Bhsd);
    let a = forward::<f64, f64>(&one_hot.problem(&case), one_hot.inputs()).out;
    let (rows, v_dim, groups) = (case.dims.q_len, case.dims.v_dim, case.dims.heads.q / h);
    for (i, gradient) in g.v.iter().enumerate() {
        let (d, key, head) = (i % v_dim, i / v_dim % n, i / v_dim / n);
        let sum: f64 = (0..groups * rows)
            .map(|r| head * groups * rows + r)
            .map(|r| a[r * n + key] * d_out[r * v_dim + d])
            .sum();
        assert!((gradient - sum).abs() < 1e-14, "{gradient} {sum}");
    }
}

#[test]
fn rows_that_see_nothing_have_no_gradient() {
    let case = case().mask(named("nothing")).scores(SCORES[SCORES.len() - 2]);
    let case = Case { scores: case.scores[..7].to_vec(), ..case }; // all but the sinks
    let g = gradients(&case, &Data::new(&case));
    let all = [g.q, g.k, g.v, g.bias, g.alibi, g.relative, vec![g.scale, g.temperature]];
    assert!(all.iter().flatten().all(|x| *x == 0.0));
    // Only the fully masked rows have gradients of 0.
    let case =
        Case { align: regard::problem::Align::Offset(-1), ..self::case() }.mask(named("causal"));
    let g = gradients(&case, &Data::new(&case));
    let (rows, dim) = (case.dims.q_len, case.dims.q_dim);
    for (i, d_q) in g.q.chunks_exact(dim).enumerate() {
        assert_eq!(d_q.iter().all(|x| *x == 0.0), i % rows == 0, "row {i}");
    }
}

#[test]
fn a_general_similarity_with_the_identity_is_a_dot_product() {
    let case = case();
    let data = Data::<f64>::new(&case);
    let identity = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0];
    let w = View::matrix(&identity, [3, 3]).unwrap();
    let (q, k, v) = data.inputs();
    let general = Problem::new(&q, &k, &v).similarity(Similarity::General(w));
    let b = backward::<f64, f64>(&general, data.inputs(), &weights(&case));
    let a = gradients(&case, &data);
    assert_eq!((a.q, a.k, a.v), (b.q, b.k, b.v));
}
