//! E6: why queries and keys have a matrix each.
//!
//! The scores of tokens X are one bilinear form: (X W_Q)(X W_K)^T = X (W_Q W_K^T) X^T, and W_Q W_K^T may be any matrix. With one W in both
//! places it is W W^T, which is its own transpose: the score of i for j is that of j for i. Two matrices whose numbers have variance
//! 1 / d give scores of variance 1 for normal tokens, and S_ij and S_ji have the covariance 1 / d, which is that of the d diagonal
//! numbers of the form. So the root of the mean square of S_ij - S_ji is sqrt(2 - 2 / d).
//!
//! What that costs: three tokens stand in a circle, and each has to look at its successor and not at its predecessor (at itself it may
//! not look). If scores are symmetric, there are only three of them, a, b and c. A token with a towards its successor and b towards its
//! predecessor loses -ln(e^a / (e^a + e^b)) = ln(1 + e^(b - a)). BlockInputs the circle the three differences b - a, c - b and a - c sum to 0,
//! and ln(1 + e^x) is convex, so the mean loss is at least ln(1 + e^0) = ln 2, that of a coin: the best is not to decide. Nor can a > b,
//! b > c and c > a all be true, so at most two of three are right. Neither bound knows of features, of steps or of chance: more parameters
//! do not help, and here the one matrix is twice as wide, to have as many. With two matrices and tokens that are linearly independent,
//! every score can be reached, and the loss goes to 0.

use crate::learn::{Descent, matrix, normal, numbers, through};
use crate::{Error, Experiment, ExperimentRun, Fault, Parameter, Picture, Report};
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use regard::Mask;
use regard::mask::Bits;
use regard_burn::{Attention, attention};
use regard_scope::{Chart, ChartAxis, Series};
use std::f64::consts::LN_2;

pub(crate) const SYMMETRY: Experiment = Experiment {
    id: "E6",
    name: "symmetry",
    claim: "with one matrix for queries and keys scores are symmetric, so who looks at whom cannot be learned if it is not mutual; with two it can",
    parameters: &[
        Parameter {
            name: "dim",
            what: "features of a token; a fourth of them is the number of circles",
            full: 64,
            quick: 32,
            range: (16, 128),
        },
        Parameter { name: "steps", what: "of training", full: 300, quick: 200, range: (200, 5000) },
    ],
    faults: &[Fault {
        name: "symmetric-w",
        what: "the model with two matrices uses one for queries and keys",
    }],
    next: &["regard lab run symmetry --steps 5000"],
    body: run,
};

/// What decides who looks at whom.
#[derive(Module, Debug)]
struct Looks {
    w_q: Param<Tensor<2>>,
    /// Without it, w_q is in both places.
    w_k: Option<Param<Tensor<2>>>,
}

/// What a model came to.
struct Learned {
    parameters: usize,
    /// Before each step.
    losses: Vec<f64>,
    /// The share of tokens that look at their successor, the most at any step.
    right: f64,
}

fn run(run: &ExperimentRun<'_>) -> Result<Report, Error> {
    let (d, steps) = (run.parameter("dim"), run.parameter("steps"));
    let mut noise = run.noise("matrices");
    let one = Looks { w_q: matrix(&mut noise, [d, 2 * d]), w_k: None };
    let w_k = (!run.has_fault("symmetric-w")).then(|| matrix(&mut noise, [d, d]));
    let two = Looks { w_q: matrix(&mut noise, [d, d]), w_k };
    let any = normal(&mut run.noise("any tokens"), [1, 128, d], 1.0);
    let (even, uneven) = (one.asymmetry(&any), two.asymmetry(&any));

    // Three tokens for four features: independent, so that nothing but symmetry is in the way.
    let tokens = normal(&mut run.noise("circles"), [d / 4, 3, d], 1.0);
    let one = learned(one, &tokens, steps)?;
    run.done(1, 2);
    let two = learned(two, &tokens, steps)?;
    run.done(2, 2);

    let mut report = Report::new(
        Picture::Chart(picture(&one, &two)),
        "Each of three tokens in a circle must look at the next. One matrix ends at the loss of a coin, whatever it does; two find the way.",
    );
    report.within("largest |S_ij - S_ji|, one matrix", 0.0, even.0, 1e-4);
    // Random forms differ by about 0.3 / sqrt(d) of it from seed to seed; five of that is allowed.
    let (apart, chance) = ((2.0 - 2.0 / d as f64).sqrt(), 1.5 / (d as f64).sqrt());
    report.near("root mean square of S_ij - S_ji, two matrices", apart, uneven.1, chance);
    let sizes = [&two, &one].map(|learned| learned.parameters as f64);
    report.within("parameters, one matrix as many as two", sizes[0], sizes[1], 0.0);
    let least = one.losses.iter().copied().fold(f64::INFINITY, f64::min);
    report.at_least("loss at its best step, one matrix", LN_2 - 1e-5, least);
    report.within("loss after training, one matrix", LN_2, one.losses[steps - 1], 0.01);
    report.at_most("loss after training, two matrices", 0.05, two.losses[steps - 1]);
    report.at_most("most right looks at any step, one matrix", 2.0 / 3.0, one.right);
    report.at_least("most right looks at any step, two matrices", 1.0, two.right);
    Ok(report)
}

fn learned(model: Looks, tokens: &Tensor<3>, steps: usize) -> Result<Learned, Error> {
    let parameters = model.num_params();
    let mut right = 0f64;
    let (_, losses) = Descent { steps, rate: 0.002 }.run(model, |model, _| {
        let weights = model.weights(tokens)?;
        // Row i has its successor's weight at column i + 1: on the diagonal, if the columns are turned by one.
        let turned = Tensor::cat(vec![weights.clone().narrow(2, 1, 2), weights.narrow(2, 0, 1)], 2);
        let next = (turned * eye()).sum_dim(2);
        // Half and half, to rounding, is no look at the successor.
        let looks = numbers(next.clone()).iter().filter(|&&weight| weight > 0.501).count();
        right = right.max(looks as f64 / (3 * tokens.dims()[0]) as f64);
        Ok(-next.log().mean())
    })?;
    Ok(Learned { parameters, losses, right })
}

impl Looks {
    /// Queries and keys of `tokens [circles, 3, d]`.
    fn sides(&self, tokens: &Tensor<3>) -> [Tensor<3>; 2] {
        let w_k = self.w_k.as_ref().unwrap_or(&self.w_q);
        [&self.w_q, w_k].map(|w| through(tokens, w.val()))
    }

    /// Who looks at whom, `[circles, 3, 3]`. The values are the rows of the identity, so what attention returns are its weights.
    fn weights(&self, tokens: &Tensor<3>) -> Result<Tensor<3>, Error> {
        let [q, k] = self.sides(tokens).map(|x| x.unsqueeze_dim::<4>(1));
        let v = eye().unsqueeze_dim::<4>(1).repeat_dim(0, tokens.dims()[0]);
        let others: Vec<bool> = (0..9).map(|at| at / 3 != at % 3).collect();
        let mask = Mask::bits(Bits::from_bools(&others, [1, 1, 3, 3])?);
        let attended = attention(q, k, v, &Attention { mask, ..Attention::default() })?;
        Ok(attended.out.squeeze_dim(1))
    }

    /// Of S - S^T for `tokens [1, n, d]`: the largest number, and the root of the mean square.
    fn asymmetry(&self, tokens: &Tensor<3>) -> (f64, f64) {
        let [q, k] = self.sides(tokens);
        let (n, d) = (q.dims()[1] as f64, q.dims()[2] as f64);
        let scores = q.matmul(k.transpose()) / d.sqrt();
        let off = numbers(scores.clone() - scores.transpose());
        let largest = off.iter().fold(0f64, |most, x| most.max(x.abs()));
        // The diagonal is the same in both, and does not count.
        (largest, (off.iter().map(|x| x * x).sum::<f64>() / (n * (n - 1.0))).sqrt())
    }
}

fn eye() -> Tensor<3> {
    Tensor::<2>::eye(3, &Device::flex().autodiff()).unsqueeze()
}

fn picture(one: &Learned, two: &Learned) -> Chart {
    let series = |name: &str, learned: &Learned, limit: f64| {
        let n = learned.losses.len();
        let points = learned.losses.iter().enumerate().step_by(n.div_ceil(50));
        Series {
            name: name.into(),
            measured: points.map(|(step, loss)| (step as f64, *loss)).collect(),
            predicted: vec![(0.0, limit), (n as f64, limit)],
        }
    };
    Chart {
        title: "Learning who looks at whom".into(),
        x: ChartAxis::linear("steps of training"),
        y: ChartAxis::linear("loss"),
        series: vec![
            series("one matrix; ln 2 is as low as it can go", one, LN_2),
            series("a matrix each; 0 is", two, 0.0),
        ],
    }
}
