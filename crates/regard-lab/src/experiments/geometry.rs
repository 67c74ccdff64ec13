//! E4: what a dot product sees: direction and length, and how that differs from nearness.
//!
//! ```text
//! q . k = |q| |k| cos(angle)
//! ```
//!
//! A key that is turned away from the query loses score as the cosine of the angle. A key that is made longer gains score without end, if
//! it points less than 90 degrees away: so a long key in about the right direction beats a short one in exactly the right direction. The
//! cosine alone would not see lengths, and the distance would prefer whichever key is nearest. They are three different questions:
//!
//! ```text
//! -|q - k|^2 = 2 q . k - |q|^2 - |k|^2
//! ```
//!
//! The softmax of a row cancels what all keys of the row share, and |q|^2 is such a term. So attention by distance with scale s is
//! attention by dot products with scale 2s and a bias of -s |k|^2 for each key. With keys of one length that bias cancels too: then dot
//! product, distance and cosine rank the keys alike, and with scales to match give the same weights. Otherwise they do not.
//!
//! All of it is computed in f64, where rounding is so small that nothing hides behind it.

use crate::{Error, Experiment, ExperimentRun, Fault, Parameter, Picture, Report};
use regard::problem::Similarity;
use regard::reference::steps;
use regard::{Machine, Plan, Problem, Score, View};
use regard_scope::{Chart, ChartAxis, Series};
use regard_testkit::Noise;

pub(crate) const GEOMETRY: Experiment = Experiment {
    id: "E4",
    name: "geometry",
    claim: "q . k = |q| |k| cos(angle): direction and length both count, so it is neither cosine nor nearness, unless all keys are equally long",
    parameters: &[
        Parameter { name: "dim", what: "features", full: 64, quick: 64, range: (2, 1024) },
        Parameter {
            name: "samples",
            what: "queries, keys",
            full: 256,
            quick: 128,
            range: (64, 512),
        },
    ],
    faults: &[
        Fault { name: "forgotten-lengths", what: "a cosine in the place of the dot product" },
        Fault { name: "forgotten-squares", what: "distance without |k|^2: 2 q . k alone" },
    ],
    next: &["regard lab run geometry --dim 2"],
    body: run,
};

/// How a query and a key are compared.
#[derive(Clone, Copy)]
enum ScoreFunction {
    /// `2 s q . k`
    Dot,
    /// `-s |q - k|^2`
    Distance,
}
use ScoreFunction::{Distance, Dot};

impl ScoreFunction {
    /// The score of a key of this length and angle, for a query of length 1.
    fn predicted(self, s: f64, (length, angle): (f64, f64)) -> f64 {
        let cos = angle.to_radians().cos();
        match self {
            Dot => 2.0 * s * length * cos,
            Distance => -s * (1.0 + length * length - 2.0 * length * cos),
        }
    }
}

type SimilarityScores = Result<Vec<f64>, Error>;
const NO_BIAS: &[f64] = &[0.0];

struct Bench<'t> {
    run: &'t ExperimentRun<'t>,
    d: usize,
}

fn run(run: &ExperimentRun<'_>) -> Result<Report, Error> {
    let bench = Bench { run, d: run.parameter("dim") };
    let plane = Plane::new(bench.d, &mut run.noise("plane"));
    let mut report = Report::new(
        Picture::Chart(bench.picture(&plane)?),
        "A key of some length and direction beside three keys as long as the query and at right angles to it. By dot product longer is \
         better without end; by distance the best key is the nearest. Where all keys are equally long, at 1, both agree.",
    );
    bench.direction_and_length(&plane, &mut report)?;
    bench.three_winners(&plane, &mut report)?;
    run.done(1, 2);
    bench.theorem(run.parameter("samples"), &mut report)?;
    Ok(report)
}

impl Bench<'_> {
    /// The similarity of each pair by definition.
    fn similarities(&self, function: ScoreFunction, q: &[f64], k: &[f64]) -> SimilarityScores {
        let (k, similarity) = self.prepared(function, k);
        let (q, k) = (self.rows(q)?, self.rows(&k)?);
        let problem = Problem::new(&q, &k, &k).similarity(similarity);
        Ok(steps(&problem, q, k, k)?.similarities.into_data())
    }

    /// The weights of the engine: what it gives for values that are the unit vectors.
    fn weights(
        &self,
        (function, s): (ScoreFunction, f64),
        [q, k]: [&[f64]; 2],
        bias: &[f64],
    ) -> SimilarityScores {
        let (k, similarity) = self.prepared(function, k);
        let (q, k) = (self.rows(q)?, self.rows(&k)?);
        let n = k.shape().len;
        let mut v = vec![0.0; n * n];
        v.iter_mut().step_by(n + 1).for_each(|x| *x = 1.0);
        let v = View::matrix(&v, [n, n])?;
        let scale = if matches!(similarity, Similarity::Distance) { s } else { 2.0 * s };
        let score = Score::new().scale(scale).bias(View::matrix(bias, [1, bias.len()])?);
        let problem = Problem::new(&q, &k, &v).similarity(similarity).score(score);
        Ok(Plan::new(problem, Machine::detect())?.forward(q, k, v)?.out.into_data())
    }

    /// The keys and the similarity that a function of comparing stands for: where the faults are.
    fn prepared(&self, function: ScoreFunction, k: &[f64]) -> (Vec<f64>, Similarity<'static, f64>) {
        match function {
            Dot if self.run.has_fault("forgotten-lengths") => (self.shortened(k), Similarity::Dot),
            Distance if !self.run.has_fault("forgotten-squares") => {
                (k.into(), Similarity::Distance)
            }
            Dot | Distance => (k.into(), Similarity::Dot),
        }
    }

    fn rows<'a>(&self, x: &'a [f64]) -> Result<View<'a, f64>, Error> {
        Ok(View::matrix(x, [x.len() / self.d, self.d])?)
    }

    /// Rows of length 1.
    fn shortened(&self, x: &[f64]) -> Vec<f64> {
        x.chunks(self.d).flat_map(|row| times(1.0 / length(row), row)).collect()
    }

    /// What products of vectors are off by at worst: one rounding for each of d terms, and some for those that made the vectors.
    fn rounding(&self, size: f64) -> f64 {
        (self.d + 8) as f64 * f64::EPSILON * size
    }

    fn direction_and_length(&self, plane: &Plane, report: &mut Report) -> Result<(), Error> {
        let (long, angles) = (1.7, (0..=36).map(|i| 5.0 * f64::from(i)));
        let keys: Vec<f64> = angles.clone().flat_map(|angle| plane.key((long, angle))).collect();
        let found = self.similarities(Dot, &plane.q, &keys)?;
        let off = angles.zip(&found).map(|(a, x)| (x - long * a.to_radians().cos()).abs());
        let bound = self.rounding(long);
        report.at_most("|q . k - |q| |k| cos|, most of 37 angles", bound, off.fold(0.0, f64::max));
        report.within("score at 60 degrees / at 0", 0.5, found[12] / found[0], bound);

        let keys = [plane.key((1.3, 40.0)), plane.key((2.6, 40.0))].concat();
        let found = self.similarities(Dot, &plane.q, &keys)?;
        // To double a number changes its exponent and none of its digits.
        report.within("score of a key twice as long / as it was", 2.0, found[1] / found[0], 0.0);
        Ok(())
    }

    /// Three keys, each the best in one function: one that points exactly right but is short, one that is near, one that is long.
    fn three_winners(&self, plane: &Plane, report: &mut Report) -> Result<(), Error> {
        // Scores are at most 4 (1 + 2.5^2), so roundings are those of numbers below 50.
        let (s, keys) = (4.0, [(0.4, 0.0), (1.0, 25.0), (2.5, 50.0)]);
        // The cosine is the dot product of keys whose lengths are all 1.
        let units = keys.map(|(_, angle)| (1.0, angle));
        for (function, keys, winner, what) in [
            (Dot, keys, 2, "weight of the long key, 50 degrees off, by dot product"),
            (Distance, keys, 1, "weight of the near key, 25 degrees off, by distance"),
            (Dot, units, 0, "weight of the short key, 0 degrees off, by cosine"),
        ] {
            let rows = keys.map(|key| plane.key(key)).concat();
            let found = self.weights((function, s), [&plane.q, &rows], NO_BIAS)?;
            let predicted = softmax(&keys.map(|key| function.predicted(s, key)));
            report.within(what, predicted[winner], found[winner], self.rounding(50.0));
        }
        Ok(())
    }

    /// The equation between distance and dot product, and what follows, with random queries and keys.
    fn theorem(&self, n: usize, report: &mut Report) -> Result<(), Error> {
        let (mut noise, s) = (self.run.noise("theorem"), 2.0);
        let (q, q_lengths) = self.random(n, (0.5, 1.5), &mut noise);
        let (k, k_lengths) = self.random(n, (0.5, 2.0), &mut noise);
        let dots = self.similarities(Dot, &q, &k)?;
        let distances = self.similarities(Distance, &q, &k)?;
        let left = (0..n * n).map(|pair| {
            let (q, k) = (q_lengths[pair / n].powi(2), k_lengths[pair % n].powi(2));
            (distances[pair] - (2.0 * dots[pair] - q - k)).abs()
        });
        let bound = self.rounding(1.5 * 1.5 + 2.0 * 2.0 + 2.0 * 1.5 * 2.0);
        let what = "-|q - k|^2 less 2 q . k - |q|^2 - |k|^2, most of all pairs";
        report.at_most(what, bound, left.fold(0.0, f64::max));

        // The engine computes distances by this very equation, so here their weights are taken from the definition. Weights are off by
        // at most twice what scores are off by, and two calls are compared.
        let bound = 4.0 * s * bound;
        let defined = |distances: &[f64]| -> Vec<f64> {
            distances.chunks(n).flat_map(|row| softmax(&times(s, row))).collect()
        };
        let dot = |s, k: &[f64], bias: &[f64]| self.weights((Dot, s), [&q, k], bias);
        let (one, unit) = (1.5, self.shortened(&k));
        let equal = times(one, &unit);
        let (by_dot, by_cosine) = (dot(s, &equal, NO_BIAS)?, dot(one * s, &unit, NO_BIAS)?);
        let by_distance = defined(&self.similarities(Distance, &q, &equal)?);
        let (distance, cosine) = (apart(&by_dot, &by_distance, n), apart(&by_dot, &by_cosine, n));
        report.at_most("keys of one length: dot product against distance", bound, distance);
        report.at_most("keys of one length: dot product against cosine", bound, cosine);

        let bias: Vec<f64> = k_lengths.iter().map(|length| -s * length * length).collect();
        let (by_dot, with_bias) = (dot(s, &k, NO_BIAS)?, dot(s, &k, &bias)?);
        let by_distance = defined(&distances);
        let what = "keys of all lengths: dot product with bias against distance";
        report.at_most(what, bound, apart(&with_bias, &by_distance, n));
        let (predicted, found) = (apart(&by_dot, &with_bias, n), apart(&by_dot, &by_distance, n));
        report.within("keys of all lengths: dot product against distance", predicted, found, bound);

        // Queries are shorter than keys in the mean: a usual key is too long to be near.
        let mean = k_lengths.iter().sum::<f64>() / n as f64;
        let (dot, distance) = (winners(&by_dot, &k_lengths), winners(&by_distance, &k_lengths));
        report.at_least("mean length of winning keys, by dot product", mean, dot);
        report.at_most("mean length of winning keys, by distance", mean, distance);
        Ok(())
    }

    /// Rows in any direction, of any length between two, and their lengths.
    fn random(&self, n: usize, ends: (f64, f64), noise: &mut Noise) -> (Vec<f64>, Vec<f64>) {
        let directions = self.shortened(&noise.normals::<f64>(n * self.d));
        let lengths: Vec<f64> = (0..n).map(|_| ends.0 + (ends.1 - ends.0) * noise.unit()).collect();
        let rows = directions.chunks(self.d).zip(&lengths);
        (rows.flat_map(|(row, length)| times(*length, row)).collect(), lengths)
    }

    fn picture(&self, plane: &Plane) -> Result<Chart, Error> {
        let mut series = Vec::new();
        for (function, angle, name) in [
            (Dot, 0.0, "dot product, 0 degrees off"),
            (Dot, 60.0, "dot product, 60 degrees off"),
            (Distance, 0.0, "distance, 0 degrees off"),
            (Distance, 60.0, "distance, 60 degrees off"),
        ] {
            let (s, one) = (1.0, (1.0, 90.0));
            let keys = |length| [(length, angle), one, one, one];
            let predicted =
                |length| softmax(&keys(length).map(|key| function.predicted(s, key)))[0];
            let mut measured = Vec::new();
            for length in (1..=12).map(|i| 0.25 * f64::from(i)) {
                let rows = keys(length).map(|key| plane.key(key)).concat();
                measured
                    .push((length, self.weights((function, s), [&plane.q, &rows], NO_BIAS)?[0]));
            }
            let lengths = (0..=60).map(|i| 0.05 * f64::from(i));
            let predicted = lengths.map(|x| (x, predicted(x))).collect();
            series.push(Series { name: name.into(), measured, predicted });
        }
        Ok(Chart {
            title: "The weight of a key by its length".into(),
            x: ChartAxis::linear("length of the key / length of the query"),
            y: ChartAxis::linear("weight"),
            series,
        })
    }
}

/// A plane by two vectors of length 1 at right angles, the query and another.
struct Plane {
    q: Vec<f64>,
    across: Vec<f64>,
}

impl Plane {
    fn new(d: usize, noise: &mut Noise) -> Self {
        let (q, mut across) = (noise.normals::<f64>(d), noise.normals::<f64>(d));
        let q = times(1.0 / length(&q), &q);
        // Twice, for what is left of a vector that was nearly parallel has few exact digits.
        for _ in 0..2 {
            let along: f64 = q.iter().zip(&across).map(|(q, x)| q * x).sum();
            q.iter().zip(&mut across).for_each(|(q, x)| *x -= along * q);
            across = times(1.0 / length(&across), &across);
        }
        Self { q, across }
    }

    /// A key of this length, so many degrees off the query.
    fn key(&self, (length, angle): (f64, f64)) -> Vec<f64> {
        let (sin, cos) = angle.to_radians().sin_cos();
        self.q.iter().zip(&self.across).map(|(q, x)| length * (cos * q + sin * x)).collect()
    }
}

fn length(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn times(factor: f64, x: &[f64]) -> Vec<f64> {
    x.iter().map(|x| factor * x).collect()
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let sum: f64 = scores.iter().map(|score| score.exp()).sum();
    scores.iter().map(|score| score.exp() / sum).collect()
}

/// How much weight of a row would have to move, in the mean over `rows`: 0 if weights are the same, 1 if they share no key.
fn apart(a: &[f64], b: &[f64], rows: usize) -> f64 {
    a.iter().zip(b).map(|(a, b)| 0.5 * (a - b).abs()).sum::<f64>() / rows as f64
}

/// The mean length of the keys with the largest weight of each row.
fn winners(weights: &[f64], lengths: &[f64]) -> f64 {
    let rows = weights.chunks(lengths.len());
    let count = rows.len() as f64;
    let best = rows.filter_map(|row| row.iter().zip(lengths).max_by(|a, b| a.0.total_cmp(b.0)));
    best.map(|(_, length)| length).sum::<f64>() / count
}
