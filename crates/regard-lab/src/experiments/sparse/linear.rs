//! Linear attention: what it is, what it cannot be, and what it costs.

use super::{D, ROUNDING};
use crate::measure::{distance, timed, wide};
use crate::{Error, ExperimentRun, Report};
use regard::{Machine, Mask, View, attend};
use regard_approx::{FeatureMap, LinearAttention, linear_reference};

/// What linear attention gave.
pub(super) struct Linear {
    /// As much work as so many pairs, of all.
    pub(super) computed: f64,
    /// From full attention, relative to it.
    pub(super) error: f64,
    /// From its definition, relative to it.
    differs: f64,
    /// How far its weights must be from those of a softmax, by rank, and how far they are, relative to those.
    weights: (f64, f64),
    /// Time over length: the exponent.
    growth: f64,
}

impl Linear {
    /// Queries that are the keys, values, and what full attention makes of them.
    pub(super) fn new(
        run: &ExperimentRun<'_>,
        (x, v): (View<'_, f32>, View<'_, f32>),
        full: &[f32],
    ) -> Result<Self, Error> {
        let linear = LinearAttention::new(FeatureMap::EluPlusOne);
        let call = |x: View<'_, f32>, v: View<'_, f32>| {
            if run.has_fault("dense") {
                return attend(x, x, v, Mask::full()).map(|output| output.out);
            }
            linear.forward(Machine::detect(), x, x, v).map(|output| output.out)
        };
        let out = call(x, v)?;
        let truth = linear_reference::forward::<f64, f32>(&linear, (x, x, v));

        // Values that are 1 at their own place and 0 elsewhere make outputs of weights.
        let m = 512;
        let ones: Vec<f32> = (0..m * m).map(|i| if i / m == i % m { 1.0 } else { 0.0 }).collect();
        let some: Vec<f32> = (0..m).flat_map(|i| x.row(0, 0, i)).copied().collect();
        let (some, ones) = (View::matrix(&some, [m, D])?, View::matrix(&ones, [m, m])?);
        let weights = wide(attend(some, some, ones, Mask::full())?.out.data());
        let column = |j| (0..m).map(|i| weights[i * m + j]).sum::<f64>();
        let largest = (0..m).map(column).fold(0.0, f64::max);
        let square: f64 = weights.iter().map(|x| x * x).sum();
        let least = (1.0 - D as f64 * largest / square).max(0.0).sqrt();

        // D features times D values and a sum, once for each key and once for each query; a pair takes D + D.
        let pairs = (2 * D * (D + 1)) as f64 / (D + D) as f64;
        Ok(Self {
            computed: pairs / x.shape().len as f64,
            error: distance(out.data(), &wide(full)),
            differs: distance(out.data(), &truth),
            weights: (least, distance(call(some, ones)?.data(), &weights)),
            growth: growth(run, linear)?,
        })
    }

    pub(super) fn judge(&self, run: &ExperimentRun<'_>, report: &mut Report) {
        let Self { differs, weights, growth, .. } = self;
        report.at_most("off from its definition, linear", ROUNDING, *differs);
        report.at_least("weights off from a softmax's, linear", weights.0, weights.1);
        let what = "time over length, linear: exponent";
        // A machine that is twice as fast at one end as at the other moves it by ln 2 / ln 16.
        report.within(what, 1.0, *growth, 0.25);
        report.check_if(run.full());
    }
}

/// The shortest of many times, for lengths that take turns: what disturbs a machine makes calls slower, never faster.
fn growth(run: &ExperimentRun<'_>, linear: LinearAttention) -> Result<f64, Error> {
    let sizes = if run.full() { [1024, 16384] } else { [256, 4096] };
    let x: Vec<f32> = run.noise("time").normals(sizes[1] * D);
    let mut best = [f64::INFINITY; 2];
    for _ in 0..if run.full() { 60 } else { 5 } {
        for (n, best) in sizes.into_iter().zip(&mut best) {
            let x = View::matrix(&x[..n * D], [n, D])?;
            let (call, time) = timed(|| linear.forward(Machine::detect().threads(1), x, x, x));
            call?;
            *best = best.min(time);
        }
    }
    Ok((best[1] / best[0]).ln() / 16f64.ln())
}
