//! E1: why scores are divided by the square root of the number of features.
//!
//! Let the features of q and k be independent, with mean 0 and variance 1. Then q . k is a sum of d products of variance 1 each, so its
//! variance is d. Scores of that size push all weight to one key: the softmax is saturated, and hardly any gradient passes it. Divided by
//! sqrt(d), scores have variance 1 for every d. Then a row of m keys has an entropy of about ln m - 1/2 (the logarithm of the sum of
//! e^score is near ln m + 1/2, and the mean score under the weights is near 1), and each row can still move: the trace of the softmax's
//! Jacobian, 1 minus the sum of squared weights, is near 1 - e / m.
//!
//! Saturation does not make all gradients small. A row with two keys that compete for all of its weight has a larger one than any scaled
//! row, so the mean over rows hardly falls. It is the typical row, the median, that learns nothing.

use crate::measure::wide;
use crate::{Error, Experiment, ExperimentRun, Fault, Parameter, Picture, Report};
use regard::reference::steps;
use regard::{Machine, Plan, Problem, Score, View};
use regard_scope::{Chart, ChartAxis, Series};

pub(crate) const SCALING: Experiment = Experiment {
    id: "E1",
    name: "scaling",
    claim: "q . k has variance d; divided by sqrt(d) it has variance 1, which keeps the softmax from saturating and gradients from vanishing",
    parameters: &[
        Parameter {
            name: "dim",
            what: "the most features",
            full: 1024,
            quick: 256,
            range: (256, 4096),
        },
        Parameter {
            name: "samples",
            what: "queries and keys",
            full: 512,
            quick: 128,
            range: (64, 4096),
        },
    ],
    faults: &[Fault { name: "wrong-scale", what: "scores are divided by d instead of sqrt(d)" }],
    next: &["regard lab run scaling --dim 4096", "regard steps --dim 12 --scale 1"],
    body: run,
};

/// What one number of features gives, under one scale.
struct ScoreStatistics {
    variance: f64,
    /// Of a row, in nats.
    entropy: f64,
    /// 1 - sum of squared weights of a row: how far its softmax can still move.
    moves: f64,
    /// The size of the gradient that reaches the scores of a row: the median, and the mean.
    gradient: (f64, f64),
}

// ANCHOR: heart
fn run(run: &ExperimentRun<'_>) -> Result<Report, Error> {
    let (most, n) = (run.parameter("dim"), run.parameter("samples"));
    let dims: Vec<usize> =
        (1..).map(|i| 4usize.pow(i)).take_while(|&d| d < most).chain([most]).collect();
    let divided = |d: f64| if run.has_fault("wrong-scale") { 1.0 / d } else { 1.0 / d.sqrt() };
    let mut raw = Vec::new();
    let mut scaled = Vec::new();
    for (i, &d) in dims.iter().enumerate() {
        raw.push(look(run, d, n, 1.0)?);
        scaled.push(look(run, d, n, divided(d as f64))?);
        run.done(i + 1, dims.len());
    }

    let mut report = Report::new(
        Picture::Chart(picture(&dims, &raw, &scaled)),
        "Without the scale the variance of scores grows as the number of features; with it, it stays at 1.",
    );
    // What the variance of n x n scores, made of n queries and n keys, differs by from one draw to the next; four of that is allowed.
    let chance = |d: f64| 4.0 * (4.0 / (n as f64 * d) + 2.0 / (n * n) as f64).sqrt();
    for (i, d) in dims.iter().map(|&d| d as f64).enumerate() {
        report.near(format!("variance of q . k, d = {d}"), d, raw[i].variance, chance(d));
        report.near(format!("variance of scores, d = {d}"), 1.0, scaled[i].variance, chance(d));
    }
    let (raw, scaled) = (&raw[raw.len() - 1], &scaled[scaled.len() - 1]);
    let full = (n as f64).ln();
    report.within("entropy of scaled rows, nats", full - 0.5, scaled.entropy, 0.15);
    report.at_most("entropy of unscaled rows, nats", 0.1 * full, raw.entropy);
    let even = 1.0 - 1f64.exp() / n as f64;
    report.within("room to move of scaled rows", even, scaled.moves, 0.02);
    report.at_most("room to move of unscaled rows", 0.25, raw.moves);
    let (typical, mean) = (raw.gradient.0 / scaled.gradient.0, raw.gradient.1 / scaled.gradient.1);
    report.at_most("gradient of the median row, unscaled / scaled", 0.5, typical);
    report.record("gradient of the mean row, unscaled / scaled", 1.0, mean);
    Ok(report)
}
// ANCHOR_END: heart

/// Random queries, keys and values, seen step by step.
fn look(run: &ExperimentRun<'_>, d: usize, n: usize, scale: f64) -> Result<ScoreStatistics, Error> {
    let mut noise = run.noise(&format!("{d} features"));
    let shape = [1, 1, n, d];
    let [q, k, v, upstream] = [(); 4].map(|()| noise.normals::<f32>(n * d));
    let (q, k, v) = (View::bhsd(&q, shape)?, View::bhsd(&k, shape)?, View::bhsd(&v, shape)?);
    let problem = Problem::new(&q, &k, &v).score(Score::new().scale(scale));
    let seen = steps(&problem, q, k, v)?;
    let scores = wide(seen.scores.data());
    let weights = wide(seen.weights.data());

    let plan = Plan::new(problem, Machine::detect())?;
    let output = plan.forward(q, k, v)?;
    let grads = plan.backward(q, k, v, &output, View::bhsd(&upstream, shape)?)?;
    // A row of dq is scale times a mix of keys, each of length sqrt(d), by the gradient at its scores.
    let size = |row: &[f32]| row.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let mut sizes: Vec<f64> =
        grads.q.data().chunks(d).map(|row| size(row) / scale / (d as f64).sqrt()).collect();
    sizes.sort_by(f64::total_cmp);
    let rows = n as f64;
    Ok(ScoreStatistics {
        variance: scores.iter().map(|x| x * x).sum::<f64>() / scores.len() as f64,
        entropy: weights.iter().filter(|&&a| a > 0.0).map(|a| -a * a.ln()).sum::<f64>() / rows,
        moves: 1.0 - weights.iter().map(|a| a * a).sum::<f64>() / rows,
        gradient: (sizes[n / 2], sizes.iter().sum::<f64>() / rows),
    })
}

fn picture(dims: &[usize], raw: &[ScoreStatistics], scaled: &[ScoreStatistics]) -> Chart {
    let series = |name: &str, seen: &[ScoreStatistics], theory: fn(f64) -> f64| {
        let xs = || dims.iter().map(|&d| d as f64);
        Series {
            name: name.into(),
            measured: xs().zip(seen).map(|(x, seen)| (x, seen.variance)).collect(),
            predicted: xs().map(|x| (x, theory(x))).collect(),
        }
    };
    Chart {
        title: "The variance of scores".into(),
        x: ChartAxis::log("features of a query"),
        y: ChartAxis::log("variance"),
        series: vec![series("q . k", raw, |d| d), series("q . k / sqrt(d)", scaled, |_| 1.0)],
    }
}
