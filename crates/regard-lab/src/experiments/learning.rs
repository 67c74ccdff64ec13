//! E11: how attention comes to look where it should.
//!
//! The task is to spell words backwards: at place i of n, the letter at place n - 1 - i is wanted. A token is its letter and its place,
//! each as a vector with a single 1. There are three matrices and nothing else: X W_Q and X W_K decide who looks at whom, and what
//! attention returns of X W_V are the scores of letters.
//!
//! All three begin small, so all scores are near 0. The softmax of equal scores is 1 / n for every key: the right one has 1 / n of the
//! weight, and the entropy of a row is ln n. Scores of letters are near 0 too, so each of A letters has the chance 1 / A, and the loss is
//! ln A: guessing. Nothing in the model says where to look; only the gradient of the loss does. After training, nearly all weight must be
//! on the anti-diagonal, and all three matrices must have moved.

use crate::learn::{Descent, normal, numbers, through};
use crate::measure::single;
use crate::{Error, Experiment, ExperimentRun, Fault, Parameter, Picture, Report};
use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use regard_burn::{Attention, CrossEntropy, attention, cross_entropy};
use regard_scope::{Axis, Map};
use regard_testkit::Noise;

pub(crate) const LEARNING: Experiment = Experiment {
    id: "E11",
    name: "learning",
    claim: "before training every key has the same weight; training moves W_Q, W_K and W_V until the weight is on the key that matters",
    parameters: &[
        Parameter { name: "length", what: "letters of a word", full: 12, quick: 8, range: (4, 24) },
        Parameter { name: "steps", what: "of training", full: 800, quick: 400, range: (400, 5000) },
    ],
    faults: &[Fault { name: "frozen", what: "W_Q and W_K do not learn" }],
    next: &["regard lab run learning --length 24"],
    body: run,
};

const LETTERS: usize = 10;
/// Words of a step.
const BATCH: usize = 32;
/// Features of queries and keys.
const FEATURES: usize = 32;
/// What the matrices begin with: a score is then a sum of products that are small of small.
const SMALL: f64 = 0.1;

#[derive(Module, Debug)]
struct Speller {
    /// `[LETTERS + n, FEATURES]`
    w_q: Param<Tensor<2>>,
    w_k: Param<Tensor<2>>,
    /// `[LETTERS + n, LETTERS]`
    w_v: Param<Tensor<2>>,
    #[module(skip)]
    frozen: bool,
}

/// Words, as tokens `[words, n, LETTERS + n]`, and the letters of them backwards `[words x n]`.
struct Words(Tensor<3>, Tensor<1, Int>);

/// What weights a model gave, `[words, n, n]`, and when.
struct WeightsAtStep {
    step: usize,
    weights: Vec<f64>,
}

fn run(run: &ExperimentRun<'_>) -> Result<Report, Error> {
    let (n, steps) = (run.parameter("length"), run.parameter("steps"));
    let mut noise = run.noise("matrices");
    let mut small = |outputs| Param::from_tensor(normal(&mut noise, [LETTERS + n, outputs], SMALL));
    let (w_q, w_k, w_v) = (small(FEATURES), small(FEATURES), small(LETTERS));
    let first = Speller { w_q, w_k, w_v, frozen: run.has_fault("frozen") };

    let unseen = Words::new(&mut run.noise("unseen"), BATCH, n);
    let mut noise = run.noise("words");
    let mut seen: Vec<WeightsAtStep> = Vec::new();
    let (last, _) = Descent { steps, rate: 0.02 }.run(first.clone(), |model, step| {
        if step % 4 == 0 {
            seen.push(WeightsAtStep { step, weights: model.weights(&unseen)? });
            run.done(step, steps);
        }
        model.loss(&Words::new(&mut noise, BATCH, n))
    })?;
    seen.push(WeightsAtStep { step: steps, weights: last.weights(&unseen)? });
    run.done(steps, steps);

    let (before, after) = (&seen[0], &seen[seen.len() - 1]);
    let half = seen.iter().find(|seen| right(&seen.weights, n) >= 0.5);
    let during = half.unwrap_or(&seen[seen.len() / 2]);
    let maps = [("before", before), ("during", during), ("after", after)];
    let maps = maps.map(|(name, seen)| (format!("{name}: step {}", seen.step), seen.map(n)));
    let mut report = Report::new(
        Picture::Maps("Learning to spell backwards".into(), maps.to_vec()),
        "Who looks at whom in a word that training never saw. The right keys lie on the anti-diagonal, and only the loss tells of them.",
    );
    // Scores begin with a deviation of 2 SMALL^2 = 0.02, so weights differ from 1 / n by about 2 % of it.
    let (even, guess) = (1.0 / n as f64, (LETTERS as f64).ln());
    report.near("weight of the right key, before", even, right(&before.weights, n), 0.05);
    report.at_least("weight of the right key, after", 0.9, right(&after.weights, n));
    report.near("entropy of a row before, nats", (n as f64).ln(), before.entropy(n), 0.01);
    report.at_most("entropy of a row after, nats", 0.2 * (n as f64).ln(), after.entropy(n));
    let loss = |model: &Speller| Ok::<f64, Error>(numbers(model.loss(&unseen)?)[0]);
    report.near("loss before, nats", guess, loss(&first)?, 0.02);
    report.at_most("loss after, nats", 0.1 * guess, loss(&last)?);
    let moved = [
        ("W_Q", &first.w_q, &last.w_q),
        ("W_K", &first.w_k, &last.w_k),
        ("W_V", &first.w_v, &last.w_v),
    ];
    for (name, from, to) in moved {
        let size = |x: Tensor<2>| numbers(x).iter().map(|x| x * x).sum::<f64>().sqrt();
        let change = size(to.val() - from.val()) / size(from.val());
        report.at_least(format!("|change of {name}| / |{name} before|"), 0.1, change);
    }
    Ok(report)
}

impl Words {
    fn new(noise: &mut Noise, words: usize, n: usize) -> Self {
        let letters: Vec<usize> = (0..words * n).map(|_| noise.below(LETTERS)).collect();
        let mut tokens = vec![0f32; words * n * (LETTERS + n)];
        for (at, token) in tokens.chunks_mut(LETTERS + n).enumerate() {
            token[letters[at]] = 1.0;
            token[LETTERS + at % n] = 1.0;
        }
        let device = Device::flex().autodiff();
        let backwards = letters.chunks(n).flat_map(|word| word.iter().rev());
        let wanted: Vec<i64> = backwards.map(|&letter| letter.cast_signed() as i64).collect();
        Self(
            Tensor::from_data(TensorData::new(tokens, [words, n, LETTERS + n]), &device),
            Tensor::from_data(TensorData::new(wanted, [words * n]), &device.inner()),
        )
    }
}

impl Speller {
    fn side(&self, words: &Words, w: &Param<Tensor<2>>) -> Tensor<4> {
        let w = if self.frozen { w.val().detach() } else { w.val() };
        through(&words.0, w).unsqueeze_dim(1)
    }

    fn loss(&self, words: &Words) -> Result<Tensor<1>, Error> {
        let [batch, n, _] = words.0.dims();
        let v = through(&words.0, self.w_v.val()).unsqueeze_dim(1);
        let (q, k) = (self.side(words, &self.w_q), self.side(words, &self.w_k));
        let scores = attention(q, k, v, &Attention::default())?.out.reshape([batch * n, LETTERS]);
        Ok(cross_entropy(scores, words.1.clone(), CrossEntropy::default())?)
    }

    /// Attention to the rows of the identity returns its weights.
    fn weights(&self, words: &Words) -> Result<Vec<f64>, Error> {
        let [batch, n, _] = words.0.dims();
        let eye = Tensor::<2>::eye(n, &Device::flex().autodiff()).unsqueeze::<4>();
        let (q, k) = (self.side(words, &self.w_q), self.side(words, &self.w_k));
        Ok(numbers(attention(q, k, eye.repeat_dim(0, batch), &Attention::default())?.out))
    }
}

/// The mean weight of the right keys: those on the anti-diagonal.
fn right(weights: &[f64], n: usize) -> f64 {
    let of_word = |word: &[f64]| (0..n).map(|i| word[i * n + n - 1 - i]).sum::<f64>();
    weights.chunks(n * n).map(of_word).sum::<f64>() / (weights.len() / n) as f64
}

impl WeightsAtStep {
    /// Of a row, the mean.
    fn entropy(&self, n: usize) -> f64 {
        let terms = self.weights.iter().filter(|&&a| a > 0.0).map(|a| -a * a.ln());
        terms.sum::<f64>() / (self.weights.len() / n) as f64
    }

    /// Of the first word.
    fn map(&self, n: usize) -> Map {
        let places: Vec<String> = (0..n).map(|i| i.to_string()).collect();
        Map {
            title: String::new(),
            values: self.weights[..n * n].iter().map(|&a| single(a)).collect(),
            rows: Axis::new("query", places.clone()),
            cols: Axis::new("key", places),
        }
    }
}
