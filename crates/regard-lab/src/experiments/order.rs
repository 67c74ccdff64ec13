//! E2: what attention knows of the order of its inputs: nothing, until a mask tells it.
//!
//! Let P put rows into another order. The scores of PQ and PK are P S P^T: the same numbers, rows and columns moved. The softmax of a row
//! does not care where in the row a score stands, so the weights are P A P^T, and
//!
//! ```text
//! Attention(PQ, PK, PV) = P A P^T P V = P Attention(Q, K, V)       equivariance: outputs move with their inputs
//! Attention( Q, PK, PV) =   A P^T P V =   Attention(Q, K, V)       keys and values are a set of pairs, not a list
//! ```
//!
//! Equivariance is often called invariance, which it is not: outputs do move. KeySource all P, the mean square of P O - O is twice the variance
//! of the rows of O. In exact arithmetic both equations are exact. A computer adds in another order, so there each side has its own
//! rounding, and they may differ by the sum of what each differs by from the exact result, and by no more.
//!
//! A causal mask speaks of positions, and moves with no P. Row i then is a mean over i keys (counted from 1, weights about equal), so of
//! the size 1 / sqrt(i); elsewhere the same row meets j keys, of which about i j / n are those it met before. Means over two such sets
//! differ by 1/i + 1/j - 2/n in the square, which is 2 (H - 1) / n in the mean over all i and j, where H = 1 + 1/2 + ... + 1/n; outputs
//! themselves have H / n. So the difference is sqrt(2 - 2 / H) times as large as the outputs. What comes after a row must not matter to it
//! at all: not to the last bit, not even if it is NaN.

use super::tiled::tiled_error;
use crate::measure::wide;
use crate::{Error, Experiment, ExperimentRun, Fault, Parameter, Picture, Report};
use regard::{Mask, Problem, View, attend, reference};
use regard_scope::{Chart, ChartAxis, Series};
use regard_testkit::Noise;

pub(crate) const ORDER: Experiment = Experiment {
    id: "E2",
    name: "order",
    claim: "Attention(PQ, PK, PV) = P Attention(Q, K, V), so attention alone knows no order; a causal mask brings one, and what follows a row changes none of its bits",
    parameters: &[
        Parameter {
            name: "length",
            what: "the most positions",
            full: 1024,
            quick: 256,
            range: (64, 2048),
        },
        Parameter {
            name: "dim",
            what: "features of a head",
            full: 64,
            quick: 64,
            range: (16, 256),
        },
    ],
    faults: &[
        Fault { name: "wrong-permutation", what: "values stay where they are when keys move" },
        Fault { name: "leaky-mask", what: "the causal mask lets each row see one key ahead" },
    ],
    next: &["regard steps --mask causal"],
    body: run,
};

/// Queries, keys and values.
type Inputs = [Vec<f32>; 3];

/// Differences between outputs, relative to the size of the outputs.
struct PermutationErrors {
    n: usize,
    /// Of both sides of the equation: by definition in f64, by the engine in f32.
    exact: f64,
    engine: f64,
    /// Of both engine calls from f64, together.
    rounding: f64,
    /// If only keys and values move, and the roundings of those two calls.
    keys: f64,
    keys_rounding: f64,
    /// If nothing is moved back, relative to the spread of the rows.
    unmoved: f64,
    /// As `engine`, under the mask.
    causal: f64,
}

fn run(run: &ExperimentRun<'_>) -> Result<Report, Error> {
    let (most, d) = (run.parameter("length"), run.parameter("dim"));
    let short = (2..).map(|i| 4usize.pow(i)).take_while(|&n| n < most);
    let lengths: Vec<usize> = short.chain([most]).collect();
    let mut seen = Vec::new();
    for (i, &n) in lengths.iter().enumerate() {
        seen.push(look(run, n, d)?);
        run.done(i + 1, lengths.len() + 1);
    }
    let mut report = Report::new(
        Picture::Chart(picture(&seen)),
        "Outputs of permuted inputs, moved back, against outputs of the inputs as given. Without a mask they differ by rounding alone; \
         under a causal mask by more than their own size. Not moved back, they differ with or without one.",
    );
    for seen in &seen {
        let n = seen.n;
        let exact = rounding_at_worst(n as f64, d as f64);
        report.at_most(format!("all permuted, n = {n}: definition, f64"), exact, seen.exact);
        // Each call rounds as theory says (see E9), and the next two may differ by what both calls round.
        let most = 4.0 * tiled_error(d as f64, n as f64) * f64::from(f32::EPSILON);
        let roundings = seen.rounding.max(seen.keys_rounding);
        report.at_most(format!("rounding of two calls, n = {n}: engine, f32"), most, roundings);
        report.at_most(format!("all permuted, n = {n}: engine, f32"), seen.rounding, seen.engine);
        let what = format!("only keys and values permuted, n = {n}: engine");
        report.at_most(what, seen.keys_rounding, seen.keys);
        // The first rows see few keys and weigh most: chance falls with the number of rows.
        let what = format!("all permuted, n = {n}: engine, causal mask");
        report.near(what, by_mask(n), seen.causal, 2.0 / (n as f64).sqrt() + 0.1);
    }
    let last = &seen[seen.len() - 1];
    // One permutation instead of all: four standard errors, each at most 2 / sqrt(n d).
    let chance = 8.0 / ((last.n * d) as f64).sqrt();
    let what = "all permuted, not moved back, over the spread of rows";
    report.near(what, 2f64.sqrt(), last.unmoved, chance);
    future(run, (last.n, d), &mut report)?;
    run.done(lengths.len() + 1, lengths.len() + 1);
    Ok(report)
}

fn look(run: &ExperimentRun<'_>, n: usize, d: usize) -> Result<PermutationErrors, Error> {
    let mut noise = run.noise(&format!("{n} positions"));
    let given: Inputs = [(); 3].map(|()| noise.normals::<f32>(n * d));
    let order = shuffled(n, &mut noise);
    let stay: Vec<usize> = (0..n).collect();
    let of_values = if run.has_fault("wrong-permutation") { &stay } else { &order };
    let [q, k, v] = &given;
    let all = [moved(q, &order), moved(k, &order), moved(v, of_values)];
    let some = [q.clone(), moved(k, &order), moved(v, of_values)];

    let definition = |inputs: &Inputs| definition(inputs, (n, d));
    let engine = |inputs: &Inputs, mask: Mask| engine(inputs, (n, d), mask);
    let (exact, exact_all, exact_some) =
        (definition(&given)?, definition(&all)?, definition(&some)?);
    let (out, out_all) = (engine(&given, Mask::full())?, engine(&all, Mask::full())?);
    let out_some = engine(&some, Mask::full())?;
    let (causal, causal_all) = (engine(&given, causal(run))?, engine(&all, causal(run))?);

    let back = |out: &[f64]| moved(out, &order);
    let own = apart(&out, &exact);
    Ok(PermutationErrors {
        n,
        exact: apart(&exact_all, &back(&exact)),
        engine: apart(&out_all, &back(&out)),
        rounding: own + apart(&out_all, &exact_all),
        keys: apart(&out_some, &out),
        keys_rounding: own + apart(&out_some, &exact_some),
        unmoved: apart(&out_all, &out) * size(&out) / spread(&out, d),
        causal: apart(&causal_all, &back(&causal)),
    })
}

/// Everything after some row becomes NaN, or noise a thousand times as loud: which numbers of the rows up to it notice?
fn future(
    run: &ExperimentRun<'_>,
    (n, d): (usize, usize),
    report: &mut Report,
) -> Result<(), Error> {
    let mut noise = run.noise("the future");
    let given: Inputs = [(); 3].map(|()| noise.normals::<f32>(n * d));
    let bits = |xs: &[f64]| xs.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let out = engine(&given, (n, d), causal(run))?;
    let (mut changed, mut later, mut reached) = (0, 0, 0);
    for last in [0, n / 3, n / 2, n - 2] {
        for loud in [f32::NAN, 1000.0] {
            let [q, mut k, mut v] = given.clone();
            for x in [&mut k, &mut v] {
                x[(last + 1) * d..].iter_mut().for_each(|x| *x *= loud);
            }
            let other = engine(&[q, k, v], (n, d), causal(run))?;
            let (kept, rest) = other.split_at((last + 1) * d);
            changed += bits(&out).iter().zip(bits(kept)).filter(|(a, b)| **a != *b).count();
            later += n - 1 - last;
            let differs = |(a, b): (&[f64], &[f64])| bits(a) != bits(b);
            let rows = rest.chunks(d).zip(out.chunks(d).skip(last + 1));
            reached += rows.filter(|rows| differs(*rows)).count();
        }
    }
    let what = "causal: numbers before noise or NaN with a changed bit";
    report.within(what, 0.0, changed as f64, 0.0);
    report.within("causal: changed rows after it", later as f64, reached as f64, 0.0);
    Ok(())
}

fn causal(run: &ExperimentRun<'_>) -> Mask {
    if run.has_fault("leaky-mask") { Mask::band(None, Some(1)) } else { Mask::causal() }
}

fn views(inputs: &Inputs, n: usize, d: usize) -> Result<[View<'_, f32>; 3], Error> {
    let [q, k, v] = inputs;
    Ok([View::matrix(q, [n, d])?, View::matrix(k, [n, d])?, View::matrix(v, [n, d])?])
}

fn engine(inputs: &Inputs, (n, d): (usize, usize), mask: Mask) -> Result<Vec<f64>, Error> {
    let [q, k, v] = views(inputs, n, d)?;
    Ok(wide(attend(q, k, v, mask)?.out.data()))
}

fn definition(inputs: &Inputs, (n, d): (usize, usize)) -> Result<Vec<f64>, Error> {
    let [q, k, v] = views(inputs, n, d)?;
    Ok(reference::forward::<f64, f32>(&Problem::new(&q, &k, &v), (q, k, v)).out)
}

/// Row `i` of the result is row `order[i]` of `x`.
fn moved<T: Copy>(x: &[T], order: &[usize]) -> Vec<T> {
    let d = x.len() / order.len();
    order.iter().flat_map(|&row| x[row * d..][..d].iter().copied()).collect()
}

/// An order of `n` rows, each as likely as the next (Fisher and Yates).
fn shuffled(n: usize, noise: &mut Noise) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    (1..n).rev().for_each(|i| order.swap(i, noise.below(i + 1)));
    order
}

fn size(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// How far rows are from their mean, all together.
fn spread(x: &[f64], d: usize) -> f64 {
    let rows = x.len() / d;
    let mean = |i: usize| x.iter().skip(i).step_by(d).sum::<f64>() / rows as f64;
    let means: Vec<f64> = (0..d).map(mean).collect();
    size(&x.iter().zip(means.iter().cycle()).map(|(x, mean)| x - mean).collect::<Vec<_>>())
}

/// `|a - b| / |b|`
fn apart(a: &[f64], b: &[f64]) -> f64 {
    size(&a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<_>>()) / size(b)
}

/// What both sides may differ by in f64: each of the n terms of a sum, above and below the line of the softmax and in both calls, brings a
/// rounding at worst, each of the d terms of a score one of the size of the score, and outputs are smaller than values by sqrt(n).
fn rounding_at_worst(n: f64, d: f64) -> f64 {
    4.0 * (n + d * d.sqrt()) * f64::EPSILON * n.sqrt()
}

/// What a causal mask makes of a permutation: see the head of this file.
fn by_mask(n: usize) -> f64 {
    let harmonic: f64 = (1..=n).map(|i| 1.0 / i as f64).sum();
    (2.0 - 2.0 / harmonic).sqrt()
}

fn picture(seen: &[PermutationErrors]) -> Chart {
    let series =
        |name: &str, of: fn(&PermutationErrors) -> f64, theory: Option<fn(usize) -> f64>| Series {
            name: name.into(),
            measured: seen.iter().map(|s| (s.n as f64, of(s))).collect(),
            predicted: theory
                .iter()
                .flat_map(|theory| seen.iter().map(|s| (s.n as f64, theory(s.n))))
                .collect(),
        };
    Chart {
        title: "What a permutation of all inputs changes".into(),
        x: ChartAxis::log("positions"),
        y: ChartAxis::log("difference, relative to the outputs"),
        series: vec![
            series("causal mask, f32", |s| s.causal, Some(by_mask)),
            series("no mask, f32", |s| s.engine, None),
            series("no mask, definition in f64", |s| s.exact, None),
        ],
    }
}
