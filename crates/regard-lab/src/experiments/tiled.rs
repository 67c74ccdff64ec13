//! E9: attention a tile of keys at a time.
//!
//! Let A and B be disjoint sets of keys, out_A and out_B what a query makes of each alone, and L_A and L_B the logarithms of its sums of
//! e^score (`lse`). A softmax over both is a mean of the two, each with the weight of its own sum:
//!
//! ```text
//! out = (e^L_A out_A + e^L_B out_B) / (e^L_A + e^L_B)        L = ln(e^L_A + e^L_B)
//! ```
//!
//! Nothing is approximated, and the order does not matter. Going over the keys a tile at a time is this with one set after another, and
//! needs no weights but those of the tile. What remains is rounding, and theory says how much of it there is.
//!
//! A sum that takes n numbers one after another rounds n times, each time by about c = sqrt(3 / (8 ln 2) / 12) of what it has so far, in
//! units of 2^-23: the error is even between two neighbours, the number is anywhere between two powers of 2. Weighed values are as often
//! negative as positive: the sum of t of them is as large as sqrt(t), and the error of n is c sqrt(n / 2) of the result. Weights are
//! positive: the sum of t is as large as t, and the error of n is c sqrt(n / 3). Scores that count most are near 2 (their variance is 1,
//! and the squares of weights lean that way): t of d products sum to about 2 t / sqrt(d), give or take sqrt(t), which makes an error of
//! c sqrt(d / 2 + 4 d / 3). Together, where sums take n numbers,
//!
//! ```text
//! error(n) = c sqrt(11 d / 6 + 5 n / 6)
//! ```
//!
//! Tiles of 64 keys are summed first, then their n / 64 sums: error(64 + n / 64). So tiled is nearer to the truth than plain.

use crate::measure::{distance, peak, single, timed, ulps};
use crate::{Error, Experiment, ExperimentRun, Fault, Parameter, Picture, Report};
use regard::{Isa, Machine, Output, Plan, Problem, View, reference};
use regard_scope::{Chart, ChartAxis, Series};

pub(crate) const TILED: Experiment = Experiment {
    id: "E9",
    name: "tiled",
    claim: "attention over tiles of keys is attention over all of them: the same but for rounding, in any order, and without a matrix of weights",
    parameters: &[
        Parameter {
            name: "length",
            what: "the most queries and keys",
            full: 4096,
            quick: 1024,
            range: (256, 16384),
        },
        Parameter { name: "dim", what: "features", full: 64, quick: 64, range: (16, 256) },
    ],
    faults: &[
        Fault { name: "merge-without-lse", what: "parts are averaged, whatever their sums" },
        Fault {
            name: "stale-maximum",
            what: "sums of parts are compared though each is relative to a maximum of its own",
        },
    ],
    next: &["regard lab run tiled --length 16384"],
    body: run,
};

/// Rows of all that are compared with the definition.
const ROWS: usize = 64;
/// Keys of a tile. `regard plan` prints it: 128x64 is rows x keys.
const TILE: f64 = 64.0;

/// What one length gives.
struct RoundingErrors {
    n: usize,
    plain: Off,
    tiled: Off,
    /// Made of five parts.
    merged: Off,
    /// Ulps that another order of the parts makes, at worst.
    reordered: f64,
    /// How many times longer a row takes the plain way.
    faster: f64,
    /// Bytes that the tiled way held at its worst moment.
    bytes: f64,
}

/// How far outputs are from the truth.
struct Off {
    /// Relative, in units of 2^-23.
    error: f64,
    /// Steps from one number of f32 to the next between the output and the truth: the median, and the worst.
    ulps: (f64, f64),
}

fn run(run: &ExperimentRun<'_>) -> Result<Report, Error> {
    let most = run.parameter("length");
    let lengths: Vec<usize> =
        (3..).map(|i| 4usize.pow(i)).take_while(|&n| n < most).chain([most]).collect();
    let mut seen = Vec::new();
    for (i, &n) in lengths.iter().enumerate() {
        seen.push(look(run, n)?);
        run.done(i + 1, lengths.len());
    }
    let d = run.parameter("dim") as f64;
    let mut report = Report::new(
        Picture::Chart(picture(d, &seen)),
        "Both ways compute the same; what differs is rounding. One key after another it grows as the root of their number; by tiles of \
         64 keys the same growth begins 64 times later.",
    );
    for RoundingErrors { n, plain, tiled, merged, reordered, .. } in &seen {
        // Rounding is taken for chance, and rows for so long that the scores that count are near 2: theory is good for a third.
        let [by_plain, by_tiles] = [plain_error, tiled_error].map(|error| error(d, *n as f64));
        report.near(format!("error, n = {n}, plain"), by_plain, plain.error, 0.33);
        report.near(format!("error, n = {n}, tiled"), by_tiles, tiled.error, 0.33);
        // What all of this project is held to: at most twice as far off as plain.
        report.at_most(format!("error, n = {n}, 5 parts merged"), 2.0 * plain.error, merged.error);
        report.at_most(format!("ulps, other order of parts, n = {n}"), 1.0, *reordered);
        report.at_most(format!("ulps, median, n = {n}"), 2.0 * plain.ulps.0 + 1.0, tiled.ulps.0);
        // Some outputs are nearly 0, where ulps are tiny: how many there are at worst is chance, in both ways.
        report.record(format!("ulps, worst, n = {n}, beside plain's"), plain.ulps.1, tiled.ulps.1);
    }
    bits(run, most.min(1024), &mut report)?;
    costs(run, &seen, &mut report);
    Ok(report)
}

fn plain_error(d: f64, n: f64) -> f64 {
    (3.0 / (8.0 * 2f64.ln()) / 12.0 * (11.0 * d + 5.0 * n) / 6.0).sqrt()
}

/// What a call of the engine rounds, in units of 2^-23 of the result.
pub(super) fn tiled_error(d: f64, n: f64) -> f64 {
    plain_error(d, TILE + n / TILE)
}

fn inputs(run: &ExperimentRun<'_>, n: usize) -> [Vec<f32>; 3] {
    let mut noise = run.noise(&format!("{n} keys"));
    [(); 3].map(|()| noise.normals(n * run.parameter("dim")))
}

fn look(run: &ExperimentRun<'_>, n: usize) -> Result<RoundingErrors, Error> {
    let (d, [q, keys, values]) = (run.parameter("dim"), inputs(run, n));
    let q = View::matrix(&q, [n, d])?;
    let (k, v) = (View::matrix(&keys, [n, d])?, View::matrix(&values, [n, d])?);
    let plan = Plan::new(Problem::new(&q, &k, &v), Machine::detect().threads(1))?;
    plan.forward(q, k, v)?; // The first call also brings the program itself into memory.
    let (tiled, bytes) = peak(|| plan.forward(q, k, v));
    let tiled = some_rows(tiled?.out.view());

    let some = some_rows(q);
    let some = View::matrix(&some, [ROWS, d])?;
    let (_, by_plain) = plain(some, k, v);
    let truth = reference::forward::<f64, _>(&Problem::new(&some, &k, &v), (some, k, v)).out;

    let mut parts = parts(run, some, [&keys, &values])?;
    let merged = Output::merge(Machine::detect(), &parts)?.out;
    parts.rotate_left(2);
    parts.swap(0, 1);
    let other = Output::merge(Machine::detect(), &parts)?.out;
    let reordered = merged.data().iter().zip(other.data()).map(|(a, b)| ulps(*a, *b));

    let shortest = |call: &dyn Fn()| (0..3).map(|_| timed(call).1).fold(f64::INFINITY, f64::min);
    let of_plain = shortest(&|| drop(plain(some, k, v))) / ROWS as f64;
    let of_tiled = shortest(&|| drop(plan.forward(q, k, v))) / n as f64;
    Ok(RoundingErrors {
        n,
        plain: Off::new(&by_plain, &truth),
        tiled: Off::new(&tiled, &truth),
        merged: Off::new(merged.data(), &truth),
        reordered: reordered.fold(0.0, f64::max),
        faster: of_plain / of_tiled,
        bytes,
    })
}

/// The definition in three loops: the weights `[n, m]`, and the output.
pub(super) fn plain(q: View<'_, f32>, k: View<'_, f32>, v: View<'_, f32>) -> (Vec<f32>, Vec<f32>) {
    let (n, m, d) = (q.shape().len, k.shape().len, v.shape().dim);
    let scale = 1.0 / (q.shape().dim as f32).sqrt();
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let mut weights = vec![0.0; n * m];
    for (i, row) in weights.chunks_mut(m).enumerate() {
        for (j, score) in row.iter_mut().enumerate() {
            *score = scale * dot(q.row(0, 0, i), k.row(0, 0, j));
        }
    }
    for row in weights.chunks_mut(m) {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter_mut().for_each(|score| *score = (*score - most).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|weight| *weight /= sum);
    }
    let mut out = vec![0.0; n * d];
    for (row, out) in weights.chunks(m).zip(out.chunks_mut(d)) {
        for (j, weight) in row.iter().enumerate() {
            out.iter_mut().zip(v.row(0, 0, j)).for_each(|(out, v)| *out += weight * v);
        }
    }
    (weights, out)
}

/// Attention of some rows to five parts of the keys, cut where chance has it.
fn parts(
    run: &ExperimentRun<'_>,
    q: View<'_, f32>,
    [keys, values]: [&[f32]; 2],
) -> Result<Vec<Output<f32>>, Error> {
    let (d, mut noise) = (q.shape().dim, run.noise("cuts"));
    let n = keys.len() / d;
    // One cut in each fifth, so that no part is empty.
    let cut = |i| if i % 5 == 0 { i * n / 5 } else { i * n / 5 - noise.below(n / 5) };
    let cuts: Vec<usize> = (0..=5).map(cut).collect();
    let mut parts = Vec::new();
    for cut in cuts.windows(2) {
        let (part, size) = (cut[0] * d..cut[1] * d, [cut[1] - cut[0], d]);
        let (k, v) = (View::matrix(&keys[part.clone()], size)?, View::matrix(&values[part], size)?);
        let problem = Problem::new(&q, &k, &v).entropy(); // With it comes the largest score of each row.
        let mut found = Plan::new(problem, Machine::detect())?.forward(q, k, v)?;
        if run.has_fault("merge-without-lse") {
            found = Output::new(found.out, vec![0.0; ROWS]);
        } else if run.has_fault("stale-maximum") {
            let largest = found.max_score.unwrap_or_default();
            let relative = found.lse.iter().zip(largest).map(|(lse, largest)| lse - largest);
            found = Output::new(found.out, relative.collect());
        }
        parts.push(found);
    }
    Ok(parts)
}

/// Whether threads or instructions change a bit.
fn bits(run: &ExperimentRun<'_>, n: usize, report: &mut Report) -> Result<(), Error> {
    let (d, [q, k, v]) = (run.parameter("dim"), inputs(run, n));
    let q = View::matrix(&q, [n, d])?;
    let (k, v) = (View::matrix(&k, [n, d])?, View::matrix(&v, [n, d])?);
    let call = |machine| Plan::new(Problem::new(&q, &k, &v), machine)?.forward(q, k, v);
    let one = call(Machine::detect().threads(1))?.out;
    let differing = |machine| -> Result<f64, Error> {
        let other = call(machine)?.out;
        let pairs = one.data().iter().zip(other.data());
        Ok(pairs.filter(|(a, b)| a.to_bits() != b.to_bits()).count() as f64)
    };
    for threads in 2..=4 {
        let found = differing(Machine::detect().threads(threads))?;
        report.within(format!("outputs that differ, 1 and {threads} threads"), 0.0, found, 0.0);
    }
    let best = Isa::best();
    for isa in Isa::available().into_iter().filter(|&isa| isa != best) {
        let what = format!("outputs that differ, {} and {}", isa.name(), best.name());
        let found = differing(Machine::detect().isa(isa))?;
        // Portable code cannot multiply and add in one rounding, and promises other bits than the rest.
        match isa.is_fused() {
            false => report.record(what, 0.0, found),
            true => report.within(what, 0.0, found, 0.0),
        }
    }
    Ok(())
}

/// Time and memory over the length.
fn costs(run: &ExperimentRun<'_>, seen: &[RoundingErrors], report: &mut Report) {
    let mib = f64::from(1 << 20);
    for RoundingErrors { n, faster, bytes, .. } in seen {
        let time = format!("time of a row, plain / tiled, n = {n}");
        let memory =
            format!("MiB, n = {n}, where weights take {:.2}", 4.0 * (*n as f64).powi(2) / mib);
        // The output, three numbers more for each row, and tiles that fit a cache.
        let most = 4.0 * (n * (run.parameter("dim") + 3)) as f64 / mib + 1.0;
        // What is over in microseconds, or fits a few pages, says little.
        let judged = run.full() && *n >= 1024 && bytes.is_finite();
        report.at_least(time, 1.0, *faster);
        report.check_if(judged);
        report.at_most(memory, most, bytes / mib);
        report.check_if(judged);
    }
}

impl Off {
    fn new(found: &[f32], truth: &[f64]) -> Self {
        let pairs = found.iter().zip(truth);
        let mut each: Vec<f64> = pairs.map(|(x, truth)| ulps(*x, single(*truth))).collect();
        each.sort_by(f64::total_cmp);
        let error = distance(found, truth) / f64::from(f32::EPSILON);
        Self { error, ulps: (each[each.len() / 2], each[each.len() - 1]) }
    }
}

fn some_rows(x: View<'_, f32>) -> Vec<f32> {
    (0..ROWS).flat_map(|i| x.row(0, 0, i * x.shape().len / ROWS)).copied().collect()
}

fn picture(d: f64, seen: &[RoundingErrors]) -> Chart {
    let series = |name: &str, of: fn(&RoundingErrors) -> f64, theory: fn(f64, f64) -> f64| {
        let lengths = || seen.iter().map(|seen| seen.n as f64);
        Series {
            name: name.into(),
            measured: lengths().zip(seen.iter().map(of)).collect(),
            predicted: lengths().map(|n| (n, theory(d, n))).collect(),
        }
    };
    Chart {
        title: "How far attention in f32 is from the truth".into(),
        x: ChartAxis::log("keys"),
        y: ChartAxis::log("error of the output, in units of 2^-23"),
        series: vec![
            series("plain: one key after another", |seen| seen.plain.error, plain_error),
            series("tiled: 64 keys at a time", |seen| seen.tiled.error, tiled_error),
        ],
    }
}
