//! How do I define a custom score function?
//!
//! `cargo run --release --example custom_score`
//!
//! A score is what the softmax turns into a weight. Look at what the last of 24 queries sees by four scores: plain scaled products, a
//! softcap, ALiBi, and a function of one's own, which comes with its derivative. Then all gradients are held against differences of the
//! loss, and the same function with a wrong derivative against them too, to see that the check would notice.
//!
//! Try next: `rate: 0.0`; `Score::sinks`, which take weight from all keys; the same in `f32`, where differences are worth far less.

#![expect(clippy::print_stdout, reason = "a program")]

use regard::problem::Pair;
use regard::score::ScoreRule;
use regard::{AttentionView, Error, Machine, Mask, Plan, Problem, Score, View};
use regard_scope::Measure;
use regard_testkit::Noise;

const LEN: usize = 24;
const DIM: usize = 8;
const SHAPE: [usize; 4] = [1, 2, LEN, DIM];

// ANCHOR: heart
/// Bounds scores by `cap s / (cap + |s|)`, and forgets: a key loses `rate` times the logarithm of how far back it lies.
#[derive(Debug)]
struct Forgetful {
    cap: f64,
    rate: f64,
}

impl ScoreRule for Forgetful {
    fn apply(&self, at: Pair, score: f64) -> f64 {
        let back = at.row.abs_diff(at.key) as f64;
        self.cap * score / (self.cap + score.abs()) - self.rate * back.ln_1p()
    }

    fn derivative(&self, _: Pair, score: f64) -> f64 {
        (self.cap / (self.cap + score.abs())).powi(2)
    }
}

/// The same, by one who has forgotten the derivative.
#[derive(Debug)]
struct Careless(Forgetful);

impl ScoreRule for Careless {
    fn apply(&self, at: Pair, score: f64) -> f64 {
        self.0.apply(at, score)
    }

    fn derivative(&self, _: Pair, _: f64) -> f64 {
        1.0
    }
}
// ANCHOR_END: heart

/// q, k, v and the loss's gradient by the output, each `[1, 2, LEN, DIM]`.
type Tensors = [Vec<f64>; 4];

/// The loss, `sum of d_out * out`.
fn loss(data: &Tensors, score: &Score<'_, f64>) -> Result<f64, Error> {
    let [q, k, v, _] = data.each_ref().map(|x| View::bhsd(x, SHAPE));
    let (q, k, v) = (q?, k?, v?);
    let problem = Problem::new(&q, &k, &v).mask(Mask::causal()).score(score.clone());
    let out = Plan::new(problem, Machine::detect().threads(1))?.forward(q, k, v)?.out;
    Ok(out.data().iter().zip(&data[3]).map(|(x, d)| x * d).sum())
}

// ANCHOR: gradients
/// Its gradients by q, k and v.
fn gradients(data: &Tensors, score: &Score<'_, f64>) -> Result<[Vec<f64>; 3], Error> {
    let [q, k, v, d_out] = data.each_ref().map(|x| View::bhsd(x, SHAPE));
    let (q, k, v) = (q?, k?, v?);
    let problem = Problem::new(&q, &k, &v).mask(Mask::causal()).score(score.clone());
    let plan = Plan::new(problem, Machine::detect())?;
    let output = plan.forward(q, k, v)?;
    let grads = plan.backward(q, k, v, &output, d_out?)?;
    Ok([grads.q, grads.k, grads.v].map(|grad| grad.data().to_vec()))
}
// ANCHOR_END: gradients

/// How far gradients are from central differences of the loss, at most, compared with the largest gradient.
fn error(data: &Tensors, score: &Score<'_, f64>) -> Result<f64, Error> {
    let step = 1e-5;
    let mut moved = data.clone();
    let (mut worst, mut largest) = (0f64, 0f64);
    for (tensor, grad) in gradients(data, score)?.iter().enumerate() {
        for (at, grad) in grad.iter().enumerate() {
            let mut loss_with = |x: f64| {
                moved[tensor][at] = x;
                loss(&moved, score)
            };
            let x = data[tensor][at];
            let difference = (loss_with(x + step)? - loss_with(x - step)?) / (2.0 * step);
            moved[tensor][at] = x;
            (worst, largest) = (worst.max((difference - grad).abs()), largest.max(grad.abs()));
        }
    }
    Ok(worst / largest)
}

fn main() -> Result<(), Error> {
    let mut noise = Noise::new(3);
    let mut data: Tensors = std::array::from_fn(|_| noise.normals(SHAPE.iter().product()));
    data[0].iter_mut().for_each(|x| *x *= 3.0); // so that some scores are large
    let slopes = [0.5, 0.125];
    let own = Forgetful { cap: 3.0, rate: 0.7 };
    let careless = Careless(Forgetful { ..own });
    // ANCHOR: scores
    let scores = [
        ("plain", Score::new()),
        ("softcap 2", Score::new().softcap(2.0)),
        ("alibi", Score::new().alibi(&slopes)),
        ("our own", Score::new().custom(&own)),
    ];
    // ANCHOR_END: scores

    println!("What the last of {LEN} queries sees, from the first key to its own:");
    let (q, k) = (View::bhsd(&data[0], SHAPE)?, View::bhsd(&data[1], SHAPE)?);
    for (name, score) in &scores {
        let problem = Problem::new(&q, &k, &k).mask(Mask::causal()).score(score.clone());
        let plan = Plan::new(problem, Machine::detect())?;
        let output = plan.forward(q, k, k)?;
        let view = AttentionView::new(&plan, q, k, &output)?.head(0, 0)?;
        let (row, found) = (view.row(LEN - 1)?, Measure::new().entropy().of(&view)?);
        let entropy = found.entropy[LEN - 1];
        let marks: String = row.iter().map(|weight| bar(*weight)).collect();
        let far = row[..LEN / 2].iter().sum::<f64>();
        println!("  {name:10} {marks}  first half {far:4.2}, entropy {entropy:4.2}");
        assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-12);
    }
    let count = 3 * data[0].len();
    println!(
        "\nThe worst of {count} gradients, by differences of the loss, in parts of the largest:"
    );
    for (name, score) in &scores {
        let error = error(&data, score)?;
        println!("  {name:10} {error:.0e}");
        assert!(error < 1e-7, "{name}: `derivative` is that of `apply`");
    }
    let wrong = error(&data, &Score::new().custom(&careless))?;
    println!("  {:10} {wrong:.0e}  (a derivative of 1 for {own:?})", "careless");
    assert!(wrong > 1e-2, "a wrong derivative is noticed");
    Ok(())
}

/// A weight as a mark, eight heights up to a half.
fn bar(weight: f64) -> char {
    let heights = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let most = (0..8).rev().find(|height| weight * 16.0 >= f64::from(*height) + 0.25);
    heights[most.map_or(0, |height| height as usize + 1)]
}
