//! E7: why there are heads.
//!
//! Tokens stand in a circle, and each has to report the values of r others: of the neighbour on its left, of that on its right, of the
//! next but one, and so on. Each is a relation of its own. Queries and keys are made of positions, values are fresh normal numbers.
//!
//! A head of a token has one row of weights w, so all it can tell is one mix, the sum of w_j u_j over tokens j; how many features it has
//! for that does not matter. Let the values u_j be independent with variance 1. The mix correlates with u_k by w_k / sqrt(sum of w_j^2), so
//! the best estimate of u_k from it explains w_k^2 / (sum of w_j^2) of the variance of u_k, and that of all u_k together exactly 1:
//! whether the head looks at one token or layer_entropies over many, it explains at most one of the r. In the same way h heads give h mixes, a
//! projection to at most h dimensions, which explains at most h of the r. The rest is lost:
//!
//! ```text
//! relative error >= 1 - h / r
//! ```
//!
//! Values are normal, so no read-out does better than the linear one. Cutting one head of d features into h of d / h leaves all four
//! matrices as they are: the number of parameters is the same.

use crate::learn::{Descent, matrix, normal, numbers, through};
use crate::{Error, Experiment, ExperimentRun, Fault, Parameter, Picture, Report};
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use regard_burn::{Attention, attention};
use regard_scope::{Chart, ChartAxis, Series};
use regard_testkit::Noise;

pub(crate) const HEADS: Experiment = Experiment {
    id: "E7",
    name: "heads",
    claim: "h heads have as many parameters as one wide head, and learn h relations at once where that one learns one",
    parameters: &[
        Parameter {
            name: "heads",
            what: "the most heads, and relations to learn",
            full: 4,
            quick: 4,
            range: (2, 8),
        },
        Parameter {
            name: "steps",
            what: "of training",
            full: 1000,
            quick: 300,
            range: (300, 10_000),
        },
    ],
    faults: &[Fault {
        name: "tied-heads",
        what: "all heads use the queries and keys of the first",
    }],
    next: &["regard lab run heads --heads 8"],
    body: run,
};

const TOKENS: usize = 10;
/// Features of a value, and of each of the most heads.
const VALUE: usize = 8;
/// Sequences of a step.
const BATCH: usize = 16;

/// One layer of attention between tokens that know where they are and what they hold.
#[derive(Module, Debug)]
struct Layer {
    /// `[TOKENS, d]`, as positions are numbers from 0 on.
    w_q: Param<Tensor<2>>,
    w_k: Param<Tensor<2>>,
    /// `[VALUE, d]`
    w_v: Param<Tensor<2>>,
    /// `[d, relations x VALUE]`
    w_o: Param<Tensor<2>>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    tied: bool,
}

fn run(run: &ExperimentRun<'_>) -> Result<Report, Error> {
    let (most, steps) = (run.parameter("heads"), run.parameter("steps"));
    let all: Vec<usize> = (1..=most).filter(|h| most.is_multiple_of(*h)).collect();
    let tied = run.has_fault("tied-heads");
    let (mut sizes, mut curves, mut ends) = (Vec::new(), Vec::new(), Vec::new());
    for (i, &heads) in all.iter().enumerate() {
        let layer = Layer::new(&mut run.noise("matrices"), most, heads, tied);
        sizes.push(layer.num_params());
        let mut noise = run.noise("values");
        let (layer, errors) = Descent { steps, rate: 0.02 }
            .run(layer, |layer, _| layer.error(&mut noise, most, BATCH))?;
        curves.push(errors);
        // What is judged are values that were never seen.
        ends.extend(numbers(layer.error(&mut run.noise("unseen"), most, 32 * BATCH)?));
        run.done(i + 1, all.len());
    }
    let mut report = Report::new(
        Picture::Chart(picture(&all, &curves)),
        "Each line is the least error that so many heads can have, of the same number of parameters. Training finds it.",
    );
    for ((&heads, &size), &error) in all.iter().zip(&sizes).zip(&ends) {
        let told = if heads == 1 { "1 head".into() } else { format!("{heads} heads") };
        // Four matrices, and nothing in their sizes knows of heads.
        let known = most * VALUE * (2 * TOKENS + VALUE + most * VALUE);
        report.within(format!("parameters, {told}"), known as f64, size as f64, 0.0);
        // 40960 unseen numbers leave a standard error below 0.01; the rest is for what training has not found.
        let least = 1.0 - heads as f64 / most as f64;
        report.within(format!("relative error, {told} for {most} relations"), least, error, 0.03);
    }
    Ok(report)
}

impl Layer {
    fn new(noise: &mut Noise, most: usize, heads: usize, tied: bool) -> Self {
        let d = most * VALUE;
        Self {
            w_q: matrix(noise, [TOKENS, d]),
            w_k: matrix(noise, [TOKENS, d]),
            w_v: matrix(noise, [VALUE, d]),
            w_o: matrix(noise, [d, most * VALUE]),
            heads,
            tied,
        }
    }

    /// What is wrong about fresh values, as a part of their variance.
    fn error(&self, noise: &mut Noise, relations: usize, batch: usize) -> Result<Tensor<1>, Error> {
        let values = normal(noise, [batch, TOKENS, VALUE], 1.0);
        let d = self.w_q.dims()[1];
        let split = |x: Tensor<3>| {
            let [batch, n, _] = x.dims();
            x.reshape([batch, n, self.heads, d / self.heads]).swap_dims(1, 2)
        };
        // A position as a vector with a single 1 picks its row of the matrix.
        let [q, k] = [&self.w_q, &self.w_k].map(|w| {
            let x = split(w.val().unsqueeze::<3>().repeat_dim(0, batch));
            if self.tied { x.narrow(1, 0, 1).repeat_dim(1, self.heads) } else { x }
        });
        let v = split(through(&values, self.w_v.val()));
        let attended = attention(q, k, v, &Attention::default())?.out;
        let joined = attended.swap_dims(1, 2).reshape([batch, TOKENS, d]);
        let reported = through(&joined, self.w_o.val());
        // Relation 0 is the neighbour on the left, 1 that on the right, 2 the next but one on the left, and so on.
        let wanted = (0..relations).map(|i| {
            let far = i / 2 + 1;
            let left = if i % 2 == 0 { far } else { TOKENS - far };
            let (end, start) = (values.clone().narrow(1, TOKENS - left, left), values.clone());
            Tensor::cat(vec![end, start.narrow(1, 0, TOKENS - left)], 1)
        });
        let wanted = Tensor::cat(wanted.collect(), 2);
        Ok((reported - wanted.clone()).powi_scalar(2).mean() / wanted.powi_scalar(2).mean())
    }
}

fn picture(all: &[usize], curves: &[Vec<f64>]) -> Chart {
    let most = all[all.len() - 1] as f64;
    let series = |(&heads, errors): (&usize, &Vec<f64>)| {
        let (n, least) = (errors.len(), 1.0 - heads as f64 / most);
        let points = errors.iter().enumerate().step_by(n.div_ceil(50));
        Series {
            name: format!("{heads} x {} features", VALUE * all[all.len() - 1] / heads),
            measured: points.map(|(step, error)| (step as f64, *error)).collect(),
            predicted: vec![(0.0, least), (n as f64, least)],
        }
    };
    Chart {
        title: format!("Learning {most} relations at once"),
        x: ChartAxis::linear("steps of training"),
        y: ChartAxis::linear("relative error"),
        series: all.iter().zip(curves).map(series).collect(),
    }
}
