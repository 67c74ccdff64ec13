//! E10: looking at fewer keys, what that saves and what it loses.
//!
//! A sparse pattern names the pairs that may meet, and is attention over those, exactly. What it loses is the weight outside. Let a row of
//! full attention give the weight a to the keys of the pattern. Then full = a sparse + (1 - a) rest, where the rest is attention to all
//! other keys, and the pattern is off by
//!
//! ```text
//! full - sparse = (1 - a) (rest - sparse)
//! ```
//!
//! Where keys are all alike to a query, a pattern of 6 % of the pairs keeps 6 % of the weight. It keeps more where the data has a structure
//! that it knows of: what is near (windows, blocks, strides), or what points the same way, wherever it is (hashing).
//!
//! What it saves: a window of w takes about n (2 w - 1) pairs. The strided and the fixed pattern of Child et al. 2019 connect all places
//! in two steps, and take about n^1.5 pairs with blocks of sqrt(n). Hashing with buckets of b lets a row meet 3 b keys a round.
//!
//! Linear attention is another function. Its weights are products of f features of a query with f features of a key, which are summed for
//! all queries at once: the cost is linear in n. But a matrix of such products has rank f, and a matrix B of rank f is off from the
//! weights A of a softmax by |A - B|^2 >= |A|^2 - (the f largest squared singular values of A). No such square is above the largest sum
//! of a column of A times the largest sum of a row, which is 1. So it cannot hold apart many more things than it has features.

mod linear;
mod patterns;

use crate::measure::{distance, single, wide};
use crate::{Error, Experiment, ExperimentRun, Fault, Parameter, Picture, Report};
use linear::Linear;
use patterns::{Pattern, patterns};
use regard::mask::Bits;
use regard::{AttentionView, Machine, Mask, Output, Plan, Problem, Shape, View, reference};
use regard_approx::LshAttention;
use regard_scope::{Chart, ChartAxis, Measure, Series};

pub(crate) const SPARSE: Experiment = Experiment {
    id: "E10",
    name: "sparse",
    claim: "a sparse pattern is exact over the pairs it names and loses the weight outside; linear attention is another function, of low rank",
    parameters: &[Parameter {
        name: "length",
        what: "positions; made the square of a multiple of 8",
        full: 4096,
        quick: 1024,
        range: (1024, 4096),
    }],
    faults: &[
        Fault { name: "dense", what: "full attention runs in the place of everything" },
        Fault { name: "leaky", what: "masks let through every 97th key besides those they name" },
    ],
    next: &[
        "regard lab run sparse --length 2304",
        "regard plan --queries 4096 --mask 'strided 64'",
    ],
    body: run,
};

/// Features: 24 of what a token is, 8 of where it is.
const D: usize = 32;
const BUCKET: usize = 16;
/// What rounding may take from an output: f32 rounds by 2^-24, scores are up to 20, sums have a thousand terms.
const ROUNDING: f64 = 1e-5;

/// What runs where a mask should.
fn mechanism(run: &ExperimentRun<'_>, mask: Mask) -> Mask {
    let wrong = run.has_fault("leaky").then(|| Mask::columns(97, 1));
    let wrong = wrong.or(run.has_fault("dense").then(Mask::full));
    wrong.into_iter().fold(mask, Mask::or)
}

/// Full attention among some tokens, which everything is compared with.
struct Full<'a> {
    x: View<'a, f32>,
    v: View<'a, f32>,
    plan: Plan<'a, f32>,
    output: Output<f32>,
}

/// What a pattern gave.
struct PatternResult {
    name: &'static str,
    /// Predicted (by hashing: at most), and counted.
    pairs: (f64, f64),
    /// Of all pairs, how many are computed: some are though they are hidden, since keys come in cells.
    computed: f64,
    /// From the definition with all other pairs hidden, relative to it.
    differs: f64,
    /// Of the weight of full attention.
    kept: f64,
    /// From full attention, relative to it: by the weight that was lost, and measured.
    error: (f64, f64),
}

fn run(run: &ExperimentRun<'_>) -> Result<Report, Error> {
    let s = (run.parameter("length").isqrt() + 4) / 8 * 8;
    let n = s * s;
    let (x, v) = tokens(run, n);
    let (x, v) = (View::matrix(&x, [n, D])?, View::matrix(&v, [n, D])?);
    let plan = Plan::new(Problem::new(&x, &x, &v), Machine::detect())?;
    let full = Full { output: plan.forward(x, x, v)?, x, v, plan };
    let mut found = Vec::new();
    let budgets: &[usize] = if run.full() { &[1, 2, 4] } else { &[1, 4] };
    for (i, &t) in budgets.iter().enumerate() {
        for pattern in patterns(s, t) {
            found.push(full.masked(run, pattern)?);
        }
        found.push(full.hashed(run, t)?);
        run.done(i + 1, budgets.len() + 1);
    }
    let linear = Linear::new(run, (x, v), full.output.out.data())?;
    let mut report = Report::new(
        Picture::Chart(picture(&found, &linear)),
        "Each pattern with up to four times the pairs. What only knows of places stops gaining: much of the weight is on tokens of \
         the same kind far away, which hashing finds. Linear attention, upper left, is cheapest and hardly related, for nothing was \
         trained to use it.",
    );
    for PatternResult { name, pairs, differs, kept, error, .. } in found.iter().take(6) {
        let (predicted, counted) = *pairs;
        if *name == "hashing" {
            report.at_most(format!("pairs, {name}"), predicted, counted);
        } else {
            report.within(format!("pairs, {name}"), predicted, counted, 0.0);
        }
        report.at_most(format!("off from its definition, {name}"), ROUNDING, *differs);
        report.at_least(format!("weight kept, {name}"), counted / (n * n) as f64, *kept);
        report.near(format!("off from full attention, {name}"), error.0, error.1, 0.01);
    }
    on_noise(run, s, &mut report)?;
    growth(run, s, &mut report)?;
    linear.judge(run, &mut report);
    run.done(budgets.len() + 1, budgets.len() + 1);
    Ok(report)
}

/// Keys and values of tokens in random order, about 32 of each kind. Tokens of a kind are alike, and so are near ones; a kind has a
/// value.
fn tokens(run: &ExperimentRun<'_>, n: usize) -> (Vec<f32>, Vec<f32>) {
    let (mut noise, kinds) = (run.noise("tokens"), n / 32);
    let (what, says): (Vec<f64>, Vec<f64>) = (noise.normals(kinds * 24), noise.normals(kinds * D));
    let (mut x, mut v) = (Vec::new(), Vec::new());
    for i in 0..n {
        let kind = noise.below(kinds);
        x.extend(what[kind * 24..][..24].iter().map(|x| single(1.2 * x + 0.3 * noise.normal())));
        for period in [8.0, 16.0, 32.0, 64.0] {
            let (sin, cos) = (i as f64 / period).sin_cos();
            x.extend([sin, cos].map(|x| single(2.4 * x)));
        }
        v.extend(says[kind * D..][..D].iter().map(|x| single(x + 0.5 * noise.normal())));
    }
    (x, v)
}

impl Full<'_> {
    fn problem(&self, mask: Mask) -> Problem<'static, f32> {
        Problem::new(&self.x, &self.x, &self.v).mask(mask)
    }

    fn masked(&self, run: &ExperimentRun<'_>, pattern: Pattern) -> Result<PatternResult, Error> {
        let Pattern { name, mask, sees, pairs } = pattern;
        let plan = Plan::new(self.problem(mechanism(run, mask)), Machine::detect())?;
        let (work, output) = (plan.work(), plan.forward(self.x, self.x, self.v)?);
        let n = self.x.shape().len;
        let inside: Vec<bool> = (0..n * n).map(|pair| sees(pair / n, pair % n)).collect();
        let pairs = (pairs as f64, work.pairs as f64);
        let found = self.compare(name, &output, &inside)?;
        Ok(PatternResult { pairs, computed: work.computed as f64 / (n * n) as f64, ..found })
    }

    /// Which pairs meet is a matter of the data and of random directions: the hashing tells.
    fn hashed(&self, run: &ExperimentRun<'_>, rounds: usize) -> Result<PatternResult, Error> {
        let n = self.x.shape().len;
        let bucket = if run.has_fault("dense") { n } else { BUCKET };
        let lsh = LshAttention::new().seed(run.noise("directions").bits());
        let lsh = lsh.rounds(rounds).bucket_size(bucket);
        let found = lsh.forward(Machine::detect(), self.x, self.x, self.v)?;
        let met = |pair: usize| found.buckets.is_visible(0, 0, pair / n, pair % n);
        let inside: Vec<bool> = (0..n * n).map(met).collect();
        let most = (n * 3 * BUCKET * rounds) as f64;
        let pairs = (most, inside.iter().filter(|met| **met).count() as f64);
        let found = self.compare("hashing", &found.output, &inside)?;
        Ok(PatternResult { pairs, computed: most / (n * n) as f64, ..found })
    }

    /// What a pattern gave, beside what it should give and beside full attention; pairs are not its business.
    fn compare(
        &self,
        name: &'static str,
        output: &Output<f32>,
        inside: &[bool],
    ) -> Result<PatternResult, Error> {
        let (n, inputs) = (self.x.shape().len, (self.x, self.x, self.v));
        let outside: Vec<bool> = inside.iter().map(|inside| !inside).collect();
        let inside = Mask::bits(Bits::from_bools(inside, [1, 1, n, n])?);
        let outside = Mask::bits(Bits::from_bools(&outside, [1, 1, n, n])?);
        let view = AttentionView::new(&self.plan, self.x, self.x, &self.output)?;
        let kept = wide(&Measure::new().mass(inside.clone()).of(&view)?.masses[0]);
        let sparse = reference::forward::<f64, f32>(&self.problem(inside), inputs).out;
        let rest = Plan::new(self.problem(outside), Machine::detect())?;
        let rest = rest.forward(self.x, self.x, self.v)?.out;

        let full = wide(self.output.out.data());
        // full + (1 - a) (sparse - rest)
        let each = (0..n * D)
            .map(|i| full[i] + (1.0 - kept[i / D]) * (sparse[i] - f64::from(rest.data()[i])));
        let predicted: Vec<f32> = each.map(single).collect();
        let error = (distance(&predicted, &full), distance(output.out.data(), &full));
        let differs = distance(output.out.data(), &sparse);
        let kept = kept.iter().sum::<f64>() / n as f64;
        Ok(PatternResult { name, pairs: (0.0, 0.0), computed: 0.0, differs, kept, error })
    }
}

/// Where no key is more to a query than another, weight is kept as pairs are.
fn on_noise(run: &ExperimentRun<'_>, s: usize, report: &mut Report) -> Result<(), Error> {
    let (n, mut noise) = (s * s, run.noise("noise"));
    let [q, k]: [Vec<f32>; 2] = [(); 2].map(|()| noise.normals(n * D));
    let (q, k) = (View::matrix(&q, [n, D])?, View::matrix(&k, [n, D])?);
    let plan = Plan::new(Problem::new(&q, &k, &k), Machine::detect())?;
    let output = plan.forward(q, k, k)?;
    let view = AttentionView::new(&plan, q, k, &output)?;
    for Pattern { name, mask, pairs, .. } in patterns(s, 1) {
        let found = Measure::new().mass(mechanism(run, mask)).of(&view)?;
        let kept = wide(&found.masses[0]).iter().sum::<f64>() / n as f64;
        // The length of a key makes its weights larger or smaller by e^(1/8), by chance. Half of a pattern's pairs may be in s columns:
        // 1/8 over the root of 32, halved, is 0.01, and four of that are allowed.
        let what = format!("weight kept on noise, {name}");
        report.near(what, pairs as f64 / (n * n) as f64, kept, 0.05);
    }
    Ok(())
}

/// What a pattern is called, how its pairs grow with the length, and its mask for s s positions.
type Growth = (&'static str, f64, fn(usize) -> Mask);

/// How the number of pairs grows with the length.
fn growth(run: &ExperimentRun<'_>, s: usize, report: &mut Report) -> Result<(), Error> {
    let ways: [Growth; 3] = [
        ("a window of 32", 1.0, |_| Mask::full().window(32)),
        ("strided by sqrt(n)", 1.5, Mask::strided),
        ("fixed, blocks of sqrt(n)", 1.5, |s| Mask::fixed(s, 1)),
    ];
    for (name, predicted, mask) in ways {
        let mut pairs = [0.0; 2];
        for (s, pairs) in [s / 2, 2 * s].into_iter().zip(&mut pairs) {
            let shape = Shape { batch: 1, heads: 1, len: s * s, dim: 1 };
            let problem = Problem::<f32>::of_shapes(shape, shape, shape);
            let problem = problem.mask(mechanism(run, mask(s)));
            *pairs = Plan::new(problem, Machine::detect())?.work().pairs as f64;
        }
        // The first and the last rows see fewer keys, and are more of all where there are few.
        let what = format!("pairs over length, {name}: exponent");
        report.within(what, predicted, (pairs[1] / pairs[0]).ln() / 16f64.ln(), 0.05);
    }
    Ok(())
}

fn picture(found: &[PatternResult], linear: &Linear) -> Chart {
    let series = |name: &'static str| {
        let own = found.iter().filter(|found| found.name == name);
        let measured = own.map(|found| (found.computed, found.error.1)).collect();
        Series { name: name.into(), measured, predicted: Vec::new() }
    };
    let measured = vec![(linear.computed, linear.error)];
    let linear = Series { name: "linear".into(), measured, predicted: Vec::new() };
    Chart {
        title: "What is computed, and what is lost".into(),
        x: ChartAxis::log("pairs computed, of all"),
        y: ChartAxis::log("distance from full attention"),
        series: found.iter().take(6).map(|found| series(found.name)).chain([linear]).collect(),
    }
}
