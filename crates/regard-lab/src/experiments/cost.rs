//! E3: what attention costs.
//!
//! A query meets a key in d_k multiplications and as many additions, and the weight that comes of it meets a value in d_v of each. There
//! are n queries and m keys, so that attention takes 2 n m (d_k + d_v) operations: twice as long a sequence costs four times as much.
//! The softmax adds a few for each pair, however many features there are; they are not counted. Whoever hides pairs and skips them pays
//! for those that are left: a causal mask leaves n (n + 1) / 2 of n n.
//!
//! Memory is another matter. The plain way writes n m weights down before it uses them. But a row needs its largest score so far, the
//! sum of e^(score - largest) so far and the values weighed so far; when a larger score comes, sum and values are multiplied by
//! e^(old - new). So keys can pass by a tile at a time, and what is kept of a row does not depend on their number: n, not n m.

use super::tiled::plain;
use crate::measure::{exponent, peak, timed};
use crate::{Error, Experiment, ExperimentRun, Fault, Parameter, Picture, Report};
use regard::{Machine, Mask, Plan, Problem, View};
use regard_scope::{Chart, ChartAxis, Series};

pub(crate) const COST: Experiment = Experiment {
    id: "E3",
    name: "cost",
    claim: "n queries over m keys take 2 n m (d_k + d_v) operations, and memory for n m numbers if weights are stored, for n if they are not",
    parameters: &[
        Parameter {
            name: "length",
            what: "queries and keys to begin with; up to 16 times as many are timed",
            full: 256,
            quick: 256,
            range: (256, 512),
        },
        Parameter {
            name: "dim",
            what: "features of keys and values to begin with; up to 31 times as many are timed",
            full: 32,
            quick: 32,
            range: (32, 64),
        },
    ],
    faults: &[
        Fault { name: "windowed", what: "a window hides all keys but the 63 around each query" },
        Fault { name: "stored", what: "the engine is replaced by loops that store all weights" },
    ],
    next: &[
        "regard plan --queries 4096 --mask causal",
        "regard plan --queries 4096 --mask 'causal & window 512'",
    ],
    body: run,
};

/// Queries, keys, features of a key, features of a value.
type Sizes = [usize; 4];

/// One thing varies: by 1, 4 and 16 times the work, all else being equal.
struct Sweep {
    what: &'static str,
    sizes: [Sizes; 3],
    /// The shortest of several times, of each.
    seconds: [f64; 3],
}

impl Sweep {
    fn new(what: &'static str, sizes: impl Fn(usize) -> Sizes) -> Self {
        Self { what, sizes: [0, 1, 2].map(sizes), seconds: [f64::INFINITY; 3] }
    }
}

fn operations([n, m, d_k, d_v]: Sizes) -> f64 {
    2.0 * (n * m * (d_k + d_v)) as f64
}

fn run(run: &ExperimentRun<'_>) -> Result<Report, Error> {
    let (n, d) = (run.parameter("length"), run.parameter("dim"));
    let mut sweeps = [
        Sweep::new("n", |i| [n << (2 * i), n, d, d]),
        Sweep::new("m", |i| [n, n << (2 * i), d, d]),
        // d_k + d_v is 2 d, 8 d, 32 d.
        Sweep::new("d_k", |i| [n, n, (2 << (2 * i)) * d - d, d]),
        Sweep::new("d_v", |i| [n, n, d, (2 << (2 * i)) * d - d]),
        Sweep::new("n = m", |i| [n << i, n << i, d, d]),
    ];
    let most = sweeps.iter().flat_map(|sweep| sweep.sizes).chain(lengths(run).map(square));
    let inputs = Inputs::new(run, most);
    // What disturbs a machine makes calls slower, never faster: the shortest of many times is the nearest to the cost. All sizes
    // take turns, so that a disturbance of seconds does not fall on one of them, and calls take milliseconds, so that some of each
    // are not interrupted even where others use the machine.
    let rounds = rounds(run);
    for round in 0..rounds {
        for sweep in &mut sweeps {
            for (&sizes, best) in sweep.sizes.iter().zip(&mut sweep.seconds) {
                let (call, time) =
                    inputs.of(sizes, |plan, [q, k, v]| Ok(timed(|| plan.forward(q, k, v))))?;
                call?;
                *best = best.min(time);
            }
        }
        run.done(round + 1, rounds + LENGTHS);
    }
    let mut report = Report::new(
        Picture::Chart(picture(&sweeps)),
        "However the work comes about, by more queries, more keys or more features, the time follows it: all points are near one \
         line, whose slope is 1.",
    );
    counted(&inputs, &sweeps, &mut report)?;
    followed(run, &sweeps, &mut report);
    held(run, &inputs, &mut report)?;
    Ok(report)
}

fn rounds(run: &ExperimentRun<'_>) -> usize {
    if run.full() { 60 } else { 3 }
}

/// Numbers enough for the tensors of every call, and what is hidden in all of them: nothing.
struct Inputs {
    numbers: Vec<f32>,
    mask: Mask,
}

impl Inputs {
    fn new(run: &ExperimentRun<'_>, sizes: impl Iterator<Item = Sizes>) -> Self {
        let most = sizes.map(|[n, m, d_k, d_v]| n * d_k + m * d_k + m * d_v).max();
        let numbers = run.noise("inputs").normals(most.unwrap_or(0));
        let windowed = run.has_fault("windowed");
        Self { numbers, mask: if windowed { Mask::full().window(32) } else { Mask::full() } }
    }

    /// Random queries, keys and values of these sizes, and a plan for them.
    fn of<T>(
        &self,
        [n, m, d_k, d_v]: Sizes,
        look: impl FnOnce(&Plan<'_, f32>, [View<'_, f32>; 3]) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let (q, rest) = self.numbers.split_at(n * d_k);
        let (k, v) = rest.split_at(m * d_k);
        let q = View::matrix(q, [n, d_k])?;
        let (k, v) = (View::matrix(k, [m, d_k])?, View::matrix(&v[..m * d_v], [m, d_v])?);
        let problem = Problem::new(&q, &k, &v).mask(self.mask.clone());
        look(&Plan::new(problem, Machine::detect().threads(1))?, [q, k, v])
    }
}

/// What the plan counts as it goes over the pairs that it will compute.
fn counted(inputs: &Inputs, sweeps: &[Sweep], report: &mut Report) -> Result<(), Error> {
    for sweep in sweeps {
        let [n, m, d_k, d_v] = sweep.sizes[2];
        let what = format!("operations, n = {n}, m = {m}, d_k = {d_k}, d_v = {d_v}");
        let work = inputs.of(sweep.sizes[2], |plan, _| Ok(plan.work()))?;
        // Pairs are counted cell by cell, as the engine will go over them.
        report.within(format!("pairs, n = {n}, m = {m}"), (n * m) as f64, work.pairs as f64, 0.0);
        report.within(what, operations(sweep.sizes[2]), work.flops, 0.0);
    }
    let sizes = sweeps[4].sizes[2];
    let rows = sizes[0] as f64;
    let work = inputs.of(sizes, |plan, _| {
        let causal = plan.problem().clone().mask(inputs.mask.clone().and(Mask::causal()));
        Ok(Plan::new(causal, plan.machine())?.work())
    })?;
    let what = format!("pairs, n = m = {rows}, causal");
    report.within(what, rows * (rows + 1.0) / 2.0, work.pairs as f64, 0.0);
    // Keys are computed in cells of 64, so that a row meets fewer than 64 that it does not see.
    let hidden = (work.computed - work.pairs) as f64 / rows;
    report.at_most("hidden pairs computed, for each row, causal", 64.0, hidden);
    Ok(())
}

fn followed(run: &ExperimentRun<'_>, sweeps: &[Sweep], report: &mut Report) {
    // KeySource 16 times the work, a machine that is twice as fast at one end as at the other (data that fits a nearer cache, the softmax's
    // own share, somebody else's work on the same core) moves the exponent by ln 2 / ln 16.
    let mut judge = |what: String, predicted: f64, measured: f64| {
        report.within(what, predicted, measured, 0.25 * predicted);
        report.check_if(run.full());
    };
    for sweep in sweeps {
        let work = sweep.sizes.map(operations);
        judge(
            format!("time over work, {} varied: exponent", sweep.what),
            1.0,
            exponent(&work, &sweep.seconds),
        );
    }
    let both = &sweeps[4];
    let lengths = both.sizes.map(|sizes| sizes[0] as f64);
    judge("time over length, n = m: exponent".into(), 2.0, exponent(&lengths, &both.seconds));
}

/// Million operations in a millisecond, of the sizes in the middle.
fn rate(sweeps: &[Sweep]) -> f64 {
    let mut rates: Vec<f64> =
        sweeps.iter().map(|s| operations(s.sizes[1]) / s.seconds[1] / 1e9).collect();
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

/// How many lengths memory is measured for.
const LENGTHS: usize = 3;

/// Long enough for n m numbers to be much more than anything else; tests have no time for that.
fn lengths(run: &ExperimentRun<'_>) -> [usize; LENGTHS] {
    if run.full() { [4096, 5792, 8192] } else { [512, 1024, 2048] }
}

fn square(n: usize) -> Sizes {
    [n, n, 16, 16]
}

/// What is kept after a call, and what is held in its worst moment, over the length.
fn held(run: &ExperimentRun<'_>, inputs: &Inputs, report: &mut Report) -> Result<(), Error> {
    let lengths = lengths(run);
    let mut peaks = [[0.0; LENGTHS]; 2];
    for (i, n) in lengths.into_iter().enumerate() {
        let kept = inputs.of(square(n), |plan, [q, k, v]| {
            let stored = || {
                let (weights, out) = plain(q, k, v);
                weights.len() + out.len()
            };
            let tiled = || -> Result<usize, Error> {
                if run.has_fault("stored") {
                    return Ok(stored());
                }
                let made = plan.forward(q, k, v)?;
                Ok(made.out.data().len() + made.lse.len() + 2 * made.states.len())
            };
            tiled()?; // The first call also brings the program itself into memory.
            let (kept_stored, of_stored) = peak(stored);
            let (kept_tiled, of_tiled) = peak(tiled);
            (peaks[0][i], peaks[1][i]) = (of_stored, of_tiled);
            Ok([kept_stored, kept_tiled?].map(|numbers| numbers as f64))
        })?;
        let [stored, tiled] = numbers(n);
        report.record(format!("numbers kept, n = m = {n}, stored"), stored, kept[0]);
        report.within(format!("numbers kept, n = m = {n}, tiled"), tiled, kept[1], 0.0);
        run.done(rounds(run) + i + 1, rounds(run) + LENGTHS);
    }
    for (i, way) in ["stored", "tiled"].into_iter().enumerate() {
        let (n, mib) = (lengths[LENGTHS - 1], f64::from(1 << 20));
        // Numbers of four bytes, and tiles that fit a cache.
        let most = 4.0 * numbers(n)[i] / mib + 1.0;
        let (memory, found) = (format!("MiB, n = m = {n}, {way}"), peaks[i][LENGTHS - 1] / mib);
        if run.full() && found.is_finite() {
            report.at_most(memory, most, found);
            let growth =
                exponent(&lengths.map(|n| n as f64), &peaks[i].map(|bytes| bytes.max(4096.0)));
            let what = format!("memory over length, {way}: exponent");
            match way {
                "stored" => report.within(what, 2.0, growth, 0.1),
                // Memory comes in pages. Tiles take a hundred here, and ten more or less move the exponent by 0.2.
                _ => report.at_most(what, 1.25, growth),
            }
        } else {
            report.record(memory, most, found);
        }
    }
    Ok(())
}

/// A row's weights and output; or its output, the logarithm of its sum, its largest score and its sum.
fn numbers(n: usize) -> [f64; 2] {
    let d_v = square(n)[3];
    [n * (n + d_v), n * (d_v + 3)].map(|numbers| numbers as f64)
}

fn picture(sweeps: &[Sweep]) -> Chart {
    let rate = rate(sweeps);
    let series = |sweep: &Sweep| {
        let work = sweep.sizes.map(|sizes| operations(sizes) / 1e6);
        Series {
            name: format!("{} varied", sweep.what),
            measured: work.into_iter().zip(sweep.seconds.map(|s| 1e3 * s)).collect(),
            predicted: work.into_iter().map(|work| (work, work / rate)).collect(),
        }
    };
    Chart {
        title: "Time follows the work".into(),
        x: ChartAxis::log("million operations: 2 n m (d_k + d_v)"),
        y: ChartAxis::log("milliseconds, one thread"),
        series: sweeps.iter().map(series).collect(),
    }
}
