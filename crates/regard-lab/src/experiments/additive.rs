//! E5: additive scores, v^T tanh(W_q^T q + W_k^T k), beside multiplicative ones, q . k and q^T W k.
//!
//! **Parameters.** A dot product has none of its own. The general form has a matrix, d_q d_k numbers. The additive form has two and a
//! vector, d_q a + d_k a + a for a hidden units.
//!
//! **Cost.** For each pair: d multiplications for the dot product, and for the general form too, since W^T q is made once for each query; a
//! hyperbolic tangents for the additive form, whatever d is.
//!
//! **As d grows.** q . k has a standard deviation of sqrt(d), and saturates the softmax; divided by sqrt(d) it has 1 (see E1). Additive
//! scores need no scale: they never leave the interval of +- sum |v_i|. With matrices of variance 1 / d, as networks begin with, the input
//! of each tanh is x + y, one part from the query and one from the key, both normal of variance 1. So with |v| = 1
//!
//! ```text
//! variance of scores            g     = E[tanh^2(x + y)]                          0.520
//! shared by a row               h     = E[m^2(x)],   m(x) = E[tanh(x + y) | x]    0.236      and as much by all rows for a key
//! left for the pair alone       g - 2h                                            0.048
//! ```
//!
//! The softmax cancels what a row shares, so its entropy is about ln(keys) - (g - h) / 2. Of a dot product the pair has all the variance.
//! Of the additive form it has a tenth, and would have nothing if there were no tanh: every query would look at the same keys.
//!
//! Rows of unscaled dot products are decided by their few largest scores. The largest of m normal numbers are about b standard deviations
//! large, b^2 = 2 ln m - ln(4 pi ln m), with 1 / (b j) on average between the j-th and the next. Then the entropy is the sum over j of c /
//! (j (j - c)), c = b / sqrt(d) (the random energy model of Derrida 1981, frozen).

use crate::measure::{timed, wide};
use crate::{Error, Experiment, ExperimentRun, Fault, Parameter, Picture, Report};
use regard::problem::{Additive, Similarity};
use regard::{Machine, Plan, Problem, Score, View, reference};
use regard_scope::{Chart, ChartAxis, Series};
use regard_testkit::Noise;

pub(crate) const ADDITIVE: Experiment = Experiment {
    id: "E5",
    name: "additive",
    claim: "additive attention has d_q a + d_k a + a parameters and a tanh for each unit and pair; its scores keep their size as d grows, dot products only if scaled",
    parameters: &[
        Parameter {
            name: "dim",
            what: "the most features",
            full: 1024,
            quick: 256,
            range: (64, 4096),
        },
        Parameter {
            name: "samples",
            what: "queries, keys",
            full: 128,
            quick: 64,
            range: (32, 128),
        },
    ],
    faults: &[
        Fault { name: "scaled", what: "the unscaled dot product is scaled after all" },
        Fault { name: "unshrunk", what: "weights of the hidden layer do not shrink with d" },
        Fault { name: "linear", what: "the hidden layer has no tanh" },
    ],
    next: &["regard lab run additive --dim 4096", "regard steps --similarity additive"],
    body: run,
};

/// Hidden units, and how many networks each number is a mean over.
const HIDDEN: usize = 64;
const NETWORKS: usize = 16;

/// What is seen of scores, in the mean over networks.
#[derive(Default)]
struct ScoreStatistics {
    variance: f64,
    /// The part of the variance that is neither the query's nor the key's.
    of_pairs: f64,
    /// Of rows, in nats, by the engine.
    entropy: f64,
    largest: f64,
}

fn run(run: &ExperimentRun<'_>) -> Result<Report, Error> {
    let (most, n) = (run.parameter("dim"), run.parameter("samples"));
    let short = (2..).map(|i| 4usize.pow(i)).take_while(|&d| d < most);
    let dims: Vec<usize> = short.chain([most]).collect();
    let mut seen = Vec::new();
    for (i, &d) in dims.iter().enumerate() {
        seen.push(look(run, (n, d), 1.0)?);
        run.done(i + 1, dims.len());
    }
    let [_, _, loud] = look(run, (n, most), 100.0)?;
    let (g, h) = theory();
    let mut report = Report::new(
        Picture::Chart(picture(&dims, &seen, g.sqrt())),
        "Scores of queries and keys with features of variance 1. Those of the dot product grow with the number of features, unless it is \
         scaled; additive ones do not.",
    );
    parameters(run, &mut report)?;
    // Four standard errors of a standard deviation; a variance has twice as much. They come from the draw of queries and keys (see E1),
    // and for the additive form from units that are alike by chance, 1 / d, and the effects of queries and keys, 1 / n.
    let (rows, last) = (n as f64, most as f64);
    let off = |of_one: f64| 2.0 * (of_one / NETWORKS as f64).sqrt();
    let of_dot = |d: f64| off(4.0 / (rows * d) + 2.0 / (rows * rows));
    let of_additive = |d: f64| off(1.0 / d + 1.0 / rows);
    for (d, [dot, scaled, additive]) in dims.iter().map(|&d| d as f64).zip(&seen) {
        let mut spread = |what: &str, predicted: f64, seen: &ScoreStatistics, part: f64| {
            let what = format!("standard deviation of {what}, d = {d}");
            report.near(what, predicted, seen.variance.sqrt(), part);
        };
        spread("q . k", d.sqrt(), dot, of_dot(d));
        spread("q . k / sqrt(d)", 1.0, scaled, of_dot(d));
        spread("additive scores", g.sqrt(), additive, of_additive(d));
    }
    // |v| = 1, so sum |v_i| is at most the root of the number of units.
    report.at_most("largest additive score, inputs x 100", (HIDDEN as f64).sqrt(), loud.largest);
    let [dot, scaled, additive] = &seen[seen.len() - 1];
    let (dot_off, additive_off) = (2.0 * of_dot(last), 2.0 * of_additive(last));
    report.near("variance of pairs alone: q . k / sqrt(d)", 1.0, scaled.of_pairs, dot_off);
    report.near("variance of pairs alone: additive", g - 2.0 * h, additive.of_pairs, additive_off);
    // Chance moves the variance within rows, and each row by the draw of its few large weights.
    let mut entropy = |what: &str, predicted: f64, seen: &ScoreStatistics, off: f64| {
        report.within(format!("entropy: {what}"), predicted, seen.entropy, off + 2.0 / rows);
    };
    entropy("q . k / sqrt(d)", open(rows, 1.0), scaled, 0.5 * dot_off);
    entropy("additive", open(rows, g - h), additive, 0.5 * (g - h) * additive_off);
    entropy("q . k", frozen(rows, last), dot, 0.2 * frozen(rows, last));
    cost(run, &mut report).map(|()| report)
}

/// A hidden layer as networks begin: inputs of variance 1 give units of variance 1. `|v| = 1`.
struct Network {
    w_q: Vec<f32>,
    w_k: Vec<f32>,
    v: Vec<f32>,
}

impl Network {
    fn new(run: &ExperimentRun<'_>, d: [usize; 2], hidden: usize, noise: &mut Noise) -> Self {
        // The tanh of small numbers is the numbers themselves.
        let small = if run.has_fault("linear") { 1e-3 } else { 1.0 };
        let mut matrix = |d: usize| {
            let shrink = if run.has_fault("unshrunk") { 1.0 } else { 1.0 / (d as f32).sqrt() };
            times(small * shrink, &noise.normals::<f32>(d * hidden))
        };
        let (w_q, w_k) = (matrix(d[0]), matrix(d[1]));
        let v = noise.normals::<f32>(hidden);
        let length = v.iter().map(|v| v * v).sum::<f32>().sqrt();
        Self { w_q, w_k, v: times(1.0 / length / small, &v) }
    }

    fn similarity(&self) -> Result<Similarity<'_, f32>, Error> {
        let a = self.v.len();
        let [w_q, w_k, v] =
            [&self.w_q, &self.w_k, &self.v].map(|x| View::matrix(x, [x.len() / a, a]));
        Ok(Similarity::Additive(Additive { w_q: w_q?, w_k: Some(w_k?), v: v? }))
    }
}

/// Dot products, scaled ones, additive scores.
fn look(
    run: &ExperimentRun<'_>,
    (n, d): (usize, usize),
    loud: f32,
) -> Result<[ScoreStatistics; 3], Error> {
    let mut noise = run.noise(&format!("{d} features, {loud}"));
    let mut all = [(); 3].map(|()| ScoreStatistics::default());
    for _ in 0..NETWORKS {
        let [q, k] = [(); 2].map(|()| times(loud, &noise.normals::<f32>(n * d)));
        let (q, k) = (View::matrix(&q, [n, d])?, View::matrix(&k, [n, d])?);
        let network = Network::new(run, [d, d], HIDDEN, &mut noise);
        let scale = 1.0 / (d as f64).sqrt();
        let unscaled = if run.has_fault("scaled") { scale } else { 1.0 };
        let ways =
            [(Similarity::Dot, unscaled), (Similarity::Dot, scale), (network.similarity()?, 1.0)];
        for ((similarity, scale), seen) in ways.into_iter().zip(&mut all) {
            let problem = Problem::new(&q, &k, &k).similarity(similarity);
            let problem = problem.score(Score::new().scale(scale)).entropy();
            let scores = reference::scores::<f64, f32>(&problem, (q, k, k));
            let scores: Vec<f64> = scores.into_iter().flatten().map(|(_, score)| score).collect();
            let output = Plan::new(problem, Machine::detect())?.forward(q, k, k)?;
            let (rows, of_all) = (n as f64, NETWORKS as f64);
            seen.variance += scores.iter().map(|s| s * s).sum::<f64>() / (rows * rows) / of_all;
            seen.of_pairs += of_pairs(&scores, n) / of_all;
            seen.entropy +=
                wide(&output.entropy.unwrap_or_default()).iter().sum::<f64>() / rows / of_all;
            seen.largest = scores.iter().fold(seen.largest, |most, score| most.max(score.abs()));
        }
    }
    Ok(all)
}

/// What is left of the variance of `n` rows of `n` scores if the mean of its row and of its column is taken from each.
fn of_pairs(scores: &[f64], n: usize) -> f64 {
    let mean = |first: usize, step: usize| {
        scores[first..].iter().step_by(step).take(n).sum::<f64>() / n as f64
    };
    let rows: Vec<f64> = (0..n).map(|row| mean(row * n, 1)).collect();
    let columns: Vec<f64> = (0..n).map(|column| mean(column, n)).collect();
    let all = rows.iter().sum::<f64>() / n as f64;
    let left = (0..n * n).map(|i| scores[i] - rows[i / n] - columns[i % n] + all);
    left.map(|x| x * x).sum::<f64>() / ((n - 1) * (n - 1)) as f64
}

/// Parameters are what a loss has a gradient by; counted where it is not 0.
fn parameters(run: &ExperimentRun<'_>, report: &mut Report) -> Result<(), Error> {
    let (n, mut noise) = (8, run.noise("parameters"));
    for [d_q, d_k, a] in [[32, 32, 64], [48, 80, 20]] {
        let (q, k) = (noise.normals::<f32>(n * d_q), noise.normals::<f32>(n * d_k));
        let (q, k) = (View::matrix(&q, [n, d_q])?, View::matrix(&k, [n, d_k])?);
        let w = times(0.1, &noise.normals::<f32>(d_q * d_k));
        let general = Similarity::General(View::matrix(&w, [d_q, d_k])?);
        let network = Network::new(run, [d_q, d_k], a, &mut noise);
        for (what, q, similarity, predicted) in [
            ("dot product", k, Similarity::Dot, 0),
            ("general", q, general, d_q * d_k),
            ("additive", q, network.similarity()?, d_q * a + d_k * a + a),
        ] {
            let plan =
                Plan::new(Problem::new(&q, &k, &k).similarity(similarity), Machine::detect())?;
            let output = plan.forward(q, k, k)?;
            let grads = plan.backward(q, k, k, &output, k)?;
            let additive = grads.additive.map(|g| [Some(g.w_q), g.w_k, Some(g.v)]);
            let all = additive.into_iter().flatten().chain([grads.w]).flatten();
            let found = all.map(|g| g.data().iter().filter(|&&g| g != 0.0).count()).sum::<usize>();
            let what = format!("parameters: {what}, d_q = {}, d_k = {d_k}, a = {a}", q.shape().dim);
            report.within(what, predicted as f64, found as f64, 0.0);
        }
    }
    Ok(())
}

/// The shortest of many times, on one thread: calls take turns and are short, so that some are not disturbed. Scores take most of it.
fn cost(run: &ExperimentRun<'_>, report: &mut Report) -> Result<(), Error> {
    let (n, [few, some, many]) = (256, [16, 64, 256]);
    let mut noise = run.noise("cost");
    let (data, w) = (noise.normals::<f32>(n * many), noise.normals::<f32>(many * many));
    let mut network = |d, a| Network::new(run, [d, d], a, &mut noise);
    let [small, same, high] = [network(some, few), network(some, some), network(many, some)];
    let ways = [
        (some, Similarity::Dot),
        (many, Similarity::Dot),
        (many, Similarity::General(View::matrix(&w, [many, many])?)),
        (some, small.similarity()?),
        (some, same.similarity()?),
        (many, high.similarity()?),
    ];
    let mut best = [f64::INFINITY; 6];
    for _ in 0..if run.full() { 60 } else { 3 } {
        for ((d, similarity), best) in ways.iter().zip(&mut best) {
            let x = View::matrix(&data[..n * d], [n, *d])?;
            let v = View::matrix(&data[..n * 8], [n, 8])?;
            let problem = Problem::new(&x, &x, &v).similarity(*similarity);
            let plan = Plan::new(problem, Machine::detect().threads(1))?;
            let (output, seconds) = timed(|| plan.forward(x, x, v));
            output?;
            *best = best.min(seconds);
        }
    }
    let [dot, dot_many, general, small, same, high] = best;
    // All of these factors are 4. Scores are not all there is to do, and machines are shared: 0.3.
    for (what, predicted, found) in [
        ("dot product over d", 1.0, dot_many / dot),
        ("additive over a", 1.0, same / small),
        ("additive over d", 0.0, high / same),
    ] {
        let (what, found) = (format!("time: {what}, exponent"), found.ln() / 4f64.ln());
        report.within(what, predicted, found, 0.3);
        report.check_if(run.full());
    }
    // W^T q is made once for each query: d products more for n pairs. For each pair it would be d times as much; twice is for chance.
    let (what, most) =
        ("time: general / dot product, d = 256", 2.0 * (1.0 + many as f64 / n as f64));
    report.at_most(what, most, general / dot_many);
    report.check_if(run.full());
    report.record("time: additive / dot product, d = 64, a tanh for a product", 1.0, same / dot);
    Ok(())
}

fn times(factor: f32, x: &[f32]) -> Vec<f32> {
    x.iter().map(|x| factor * x).collect()
}

/// The variance g of additive scores, and the part h of it that rows share.
fn theory() -> (f64, f64) {
    let m = |x: f64| mean(|y| (x + y).tanh());
    (mean(|z| (2f64.sqrt() * z).tanh().powi(2)), mean(|x| m(x).powi(2)))
}

/// KeySource a standard normal number.
fn mean(f: impl Fn(f64) -> f64) -> f64 {
    let density = |x: f64| (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
    (-160..=160).map(|i| 0.05 * f64::from(i)).map(|x| 0.05 * density(x) * f(x)).sum()
}

/// The entropy of rows of `m` scores of a variance near 1 or below it: ln m - variance / 2, to the next order in 1 / m.
fn open(m: f64, variance: f64) -> f64 {
    let grown = variance.exp();
    m.ln() - 0.5 * variance + (variance * grown - 0.5 * (grown - 1.0)) / m
}

/// The entropy of rows of `m` scores of variance `d`, far above 1: see the head of this file.
fn frozen(m: f64, d: f64) -> f64 {
    let b = (2.0 * m.ln() - (4.0 * std::f64::consts::PI * m.ln()).ln()).sqrt();
    let c = b / d.sqrt();
    (1..10_000).map(f64::from).map(|j| c / (j * (j - c))).sum()
}

fn picture(dims: &[usize], seen: &[[ScoreStatistics; 3]], additive: f64) -> Chart {
    let xs = || dims.iter().map(|&d| d as f64);
    let series = |name: &str, i: usize, predicted: &dyn Fn(f64) -> f64| Series {
        name: name.into(),
        measured: xs().zip(seen).map(|(x, seen)| (x, seen[i].variance.sqrt())).collect(),
        predicted: xs().map(|x| (x, predicted(x))).collect(),
    };
    Chart {
        title: "How far scores spread".into(),
        x: ChartAxis::log("features of a query"),
        y: ChartAxis::log("standard deviation of scores"),
        series: vec![
            series("q . k", 0, &f64::sqrt),
            series("q . k / sqrt(d)", 1, &|_| 1.0),
            series("additive", 2, &|_| additive),
        ],
    }
}
