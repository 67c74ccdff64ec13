//! How far apart the weights of two runs are.

use regard::inspect::WeightScratch;
use regard::{AttentionView, Error, Number};
use std::f64::consts::LN_2;

/// How far apart the weights of a query are in two runs, in nats. A sink counts as one of the keys.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Divergence {
    /// Kullback-Leibler divergence, `sum of p ln(p / q)`; infinite if a key of the first run is masked in the second.
    pub kl: f64,
    /// Jensen-Shannon divergence, the mean of `KL(p | m)` and `KL(q | m)` with `m = (p + q) / 2`; from 0 to `ln 2`.
    pub js: f64,
}

/// Queries of a task.
const ROWS: usize = 128;
/// Keys whose logarithms are in memory at a time.
const KEYS: usize = 1024;

/// The divergence of each query's weights in one run from those in another over as many queries and keys, `[heads, rows]`: of
/// another checkpoint, another precision, another mask. That of a query which is fully masked in both runs is 0.
///
/// Costs the weights of both runs, and for each pair that is visible in either two powers and a logarithm.
pub fn diff<N: Number>(
    first: &AttentionView<'_, N>,
    second: &AttentionView<'_, N>,
) -> Result<Vec<Divergence>, Error> {
    let same = |axis, a, b| Error::unless_same(axis, ("the first run", a), ("the second", b));
    same("heads", first.heads().count(), second.heads().count())?;
    for ((a, _), (b, _)) in first.heads().zip(second.heads()) {
        same("queries", first.row_count(a), second.row_count(b))?;
        same("keys", first.keys_of(a).len(), second.keys_of(b).len())?;
    }
    let parts = [first.parts(ROWS), second.parts(ROWS)];
    let scratch = || [first.scratch(true), second.scratch(true)];
    let tasks = parts[0].len();
    let divergences = first
        .machine()
        .collect(tasks, scratch, |scratch, i| compare([&parts[0][i], &parts[1][i]], scratch));
    Ok(divergences.concat())
}

/// The divergences of up to [`ROWS`] queries of one head.
fn compare<N: Number>(
    views: [&AttentionView<'_, N>; 2],
    scratch: &mut [WeightScratch<N>; 2],
) -> Vec<Divergence> {
    let batch = |view: &AttentionView<'_, N>| view.heads().next().map_or(0, |(batch, _)| batch);
    let [keys, other_keys] = views.map(|view| view.keys_of(batch(view)));
    let sinks = views.map(AttentionView::sink_log2_weights);
    let mut all = vec![Divergence::default(); sinks[0].len()];
    let [mut logs, mut other_logs] = [const { Vec::new() }; 2];
    let [scratch, other_scratch] = scratch;
    for from in (0..keys.len()).step_by(KEYS) {
        let n = KEYS.min(keys.len() - from);
        let start = keys.start + from;
        let any = log_weights(&views[0].keys(start..start + n), scratch, &mut logs);
        let start = other_keys.start + from;
        let any_other =
            log_weights(&views[1].keys(start..start + n), other_scratch, &mut other_logs);
        if any || any_other {
            for (i, (p, q)) in logs.iter().zip(&other_logs).enumerate() {
                all[i / n].add(*p, *q);
            }
        }
    }
    for ((divergence, p), q) in all.iter_mut().zip(&sinks[0]).zip(&sinks[1]) {
        divergence.add(Number::to_f64(*p), Number::to_f64(*q));
        *divergence = divergence.at_least_zero();
    }
    all
}

/// `log2` of the weights of a view of one head, `[rows, keys]`; whether any pair is visible.
fn log_weights<N: Number>(
    view: &AttentionView<'_, N>,
    scratch: &mut WeightScratch<N>,
    to: &mut Vec<f64>,
) -> bool {
    let Some((batch, _)) = view.heads().next() else { return false };
    let ((rows, step), keys) = (view.rows_of(batch), view.keys_of(batch));
    to.clear();
    to.resize(view.row_count(batch) * keys.len(), f64::NEG_INFINITY);
    let mut any = false;
    view.for_each_tile(scratch, &mut |tile| {
        any = true;
        for i in 0..tile.keys() {
            let key = tile.key(i) - keys.start;
            for (lane, log) in tile.log2_weights(i)[..tile.rows()].iter().enumerate() {
                if *log != N::neg_infinity() {
                    let row = (tile.row(lane) - rows.start) / step;
                    to[row * keys.len() + key] = Number::to_f64(*log);
                }
            }
        }
    });
    any
}

impl Divergence {
    /// Of the weights of one query in two runs.
    pub(crate) fn of_rows(first: &[f32], second: &[f32]) -> Self {
        let mut all = Self::default();
        for (a, b) in first.iter().zip(second) {
            all.add(f64::from(*a).log2(), f64::from(*b).log2());
        }
        all.at_least_zero()
    }

    /// Rounding can give a value below 0; NaN stays.
    fn at_least_zero(self) -> Self {
        let least = |x: f64| if x < 0.0 { 0.0 } else { x };
        Self { kl: least(self.kl), js: least(self.js) }
    }

    /// Adds one pair, by the `log2` of its weights.
    fn add(&mut self, p: f64, q: f64) {
        if p == f64::NEG_INFINITY && q == f64::NEG_INFINITY {
            return;
        }
        let (a, b) = (p.exp2(), q.exp2());
        let middle = (0.5 * (a + b)).log2();
        let term =
            |a: f64, log: f64, other: f64| if a == 0.0 { 0.0 } else { a * (log - other) * LN_2 };
        self.kl += term(a, p, q);
        self.js += 0.5 * (term(a, p, middle) + term(b, q, middle));
    }
}
