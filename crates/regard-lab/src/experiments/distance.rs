//! E8: what attention is for when sequences are long.
//!
//! A word of n random letters is read, from both sides, and then written down again. Without attention all that the writer has of the word
//! is the state that reading ended with: 2 dim numbers for n log2(A) bits of letters. As numbers of 32 bits they would be room enough.
//! But every letter has to be put where those that are read after it do not overwrite it, and to be found there again, and what gradients
//! find of that in a given number of steps is room for some letters, however long the word is. With attention the writer looks at the
//! states after each letter (Bahdanau et al. 2015): what lies n steps back is as near as what lies one step back, and a longer word brings
//! more states. So the letters that arrive should be n for every n with attention, and fall behind n without it, the more the longer the
//! word is. That is a wall for learning, not for computing: with more steps or a wider state it moves on.
//!
//! Both models have the same states, the same letters to learn from and the same number of steps. A share a of right letters is worth
//! n (a - 1 / A) / (1 - 1 / A) letters, as one of A is right by chance.

use crate::learn::{Descent, drawn};
use crate::{Error, Experiment, ExperimentRun, Fault, Parameter, Picture, Report};
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use regard_burn::{CrossEntropy, cross_entropy};
use regard_models::{AttentionScore, DropoutRates, Pass, Seq2Seq, Seq2SeqConfig, ids};
use regard_scope::{Chart, ChartAxis, Series};
use regard_testkit::Noise;

pub(crate) const DISTANCE: Experiment = Experiment {
    id: "E8",
    name: "distance",
    claim: "a recurrent net that must keep a whole sequence in one state loses more of it the longer it is; with attention it does not",
    parameters: &[
        Parameter {
            name: "length",
            what: "letters of the longest word",
            full: 32,
            quick: 20,
            range: (20, 48),
        },
        Parameter {
            name: "dim",
            what: "features of the state that reading ends with, from each side",
            full: 16,
            quick: 16,
            range: (16, 24),
        },
        Parameter { name: "steps", what: "of training", full: 600, quick: 500, range: (400, 800) },
    ],
    faults: &[Fault { name: "no-attention", what: "the model with attention is built without it" }],
    next: &[
        "regard lab run distance --length 48",
        "regard lab run distance --dim 24",
        "regard train --preset tatoeba-zh-en-gru-without-attention --help",
    ],
    body: run,
};

const LETTERS: u32 = 10;
/// What is written before the first letter.
const BEGIN: u32 = LETTERS;
const SHORTEST: usize = 4;
/// Words of a step.
const BATCH: usize = 32;

/// How good a model became.
struct Learned {
    parameters: usize,
    /// The share of letters of unseen words that it writes as they were.
    right: f64,
    /// Of the weight of a letter that is written, how much lies on its own place and the two beside it; without attention nothing.
    near: f64,
}

fn run(run: &ExperimentRun<'_>) -> Result<Report, Error> {
    let longest = run.parameter("length");
    let doubled = (0..).map(|i| SHORTEST << i).take_while(|&n| n < longest);
    // A quick run has no time for what lies between the ends.
    let doubled = doubled.take(if run.full() { usize::MAX } else { 1 });
    let lengths: Vec<usize> = doubled.chain([longest]).collect();
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for (i, &n) in lengths.iter().enumerate() {
        without.push(learned(run, n, false)?);
        run.done(2 * i + 1, 2 * lengths.len());
        with.push(learned(run, n, !run.has_fault("no-attention"))?);
        run.done(2 * i + 2, 2 * lengths.len());
    }
    let mut report = Report::new(
        Picture::Chart(picture(&lengths, &with, &without)),
        "Letters that arrive, of words of so many letters. Without attention they have to pass one state of fixed size.",
    );
    let last = lengths.len() - 1;
    for (i, n) in lengths.iter().enumerate() {
        report.at_least(format!("right letters of {n}, with attention"), 0.9, with[i].right);
        let what = format!("right letters of {n}, without");
        match i {
            0 => report.at_least(what, 0.9, without[i].right),
            _ if i == last => report.at_most(what, 0.8, without[i].right),
            _ => report.record(what, 1.0, without[i].right),
        }
    }
    let lost = |i: usize| with[i].right - without[i].right;
    report.at_least(
        "more lost without, at the longest than at the shortest",
        0.15,
        lost(last) - lost(0),
    );
    // LayerEntropy evenly it would be 3 / n.
    report.at_least("weight on a letter's own place and beside it", 0.5, with[last].near);
    let sizes = [&with, &without].map(|models| models[last].parameters as f64);
    report.record("parameters, with / without", 1.0, sizes[0] / sizes[1]);
    Ok(report)
}

/// A model that was taught to repeat words of n letters.
fn learned(run: &ExperimentRun<'_>, n: usize, attention: bool) -> Result<Learned, Error> {
    let (dim, letters) = (run.parameter("dim"), LETTERS as usize);
    let config = Seq2SeqConfig {
        embedding: 16,
        encoder_hidden: dim,
        decoder_hidden: 2 * dim,
        attention_hidden: attention.then_some(16),
        attention_score: AttentionScore::Additive,
        source_vocab: letters,
        target_vocab: letters + 1,
    };
    let model = Seq2Seq::new(&config, DropoutRates::default(), &Device::flex().autodiff())?;
    let model = drawn(model, &mut run.noise("matrices"));
    let mut noise = run.noise(&format!("words of {n}"));
    let descent = Descent { steps: run.parameter("steps"), rate: 0.02 };
    let (model, _) = descent.run(model, |model, _| {
        let words = Words::new(&mut noise, BATCH, n);
        Ok(cross_entropy(words.scores(model)?, words.wanted(), CrossEntropy::default())?)
    })?;
    let unseen = Words::new(&mut run.noise(&format!("unseen words of {n}")), 8 * BATCH, n);
    let (said, wanted) =
        (unseen.scores(&model)?.argmax(1).into_data(), unseen.wanted().into_data());
    let right = said.iter::<i64>().zip(wanted.iter::<i64>()).filter(|(a, b)| a == b).count();
    Ok(Learned {
        parameters: model.num_params(),
        right: right as f64 / (8 * BATCH * n) as f64,
        near: if attention { unseen.near(&model)? } else { 0.0 },
    })
}

/// Random words of one length.
struct Words {
    read: Vec<Vec<u32>>,
    /// The same one place later: what the writer has written when a letter is due. It says nothing of that letter.
    written: Vec<Vec<u32>>,
}

impl Words {
    fn new(noise: &mut Noise, words: usize, n: usize) -> Self {
        let alphabet: Vec<u32> = (0..LETTERS).collect();
        let mut word = || (0..n).map(|_| *noise.pick(&alphabet)).collect();
        let read: Vec<Vec<u32>> = (0..words).map(|_| word()).collect();
        let later = |word: &Vec<u32>| [&[BEGIN], &word[..n - 1]].concat();
        Self { written: read.iter().map(later).collect(), read }
    }

    /// Of all letters at each place, `[words x n, LETTERS + 1]`.
    fn scores(&self, model: &Seq2Seq) -> Result<Tensor<2>, Error> {
        let mut pass = Pass::default();
        let memory = model.encode(ids(&self.read, &Device::flex()), None, &mut pass)?;
        let scores = model.decode(&memory, ids(&self.written, &Device::flex()), &mut pass)?;
        Ok(scores.flatten(0, 1))
    }

    fn wanted(&self) -> Tensor<1, Int> {
        ids(&self.read, &Device::flex()).flatten(0, 1)
    }

    fn near(&self, model: &Seq2Seq) -> Result<f64, Error> {
        let memory = model.encode(ids(&self.read, &Device::flex()), None, &mut Pass::default())?;
        let weights = model.weights(&memory, ids(&self.written, &Device::flex()))?;
        let [words, n, _] = weights.dims();
        let weights = weights.into_data();
        let at = |i: usize| (i / n % n, i % n);
        let near =
            weights.iter::<f64>().enumerate().filter(|(i, _)| at(*i).0.abs_diff(at(*i).1) <= 1);
        Ok(near.map(|(_, a)| a).sum::<f64>() / (words * n) as f64)
    }
}

fn picture(lengths: &[usize], with: &[Learned], without: &[Learned]) -> Chart {
    let chance = 1.0 / f64::from(LETTERS);
    let xs = || lengths.iter().map(|&n| n as f64);
    let arrived = |models: &[Learned]| {
        let worth = |(n, model): (f64, &Learned)| (n, n * (model.right - chance) / (1.0 - chance));
        xs().zip(models).map(worth).collect()
    };
    Chart {
        title: "Letters that arrive".into(),
        x: ChartAxis::linear("letters of a word"),
        y: ChartAxis::linear("letters that arrive"),
        series: vec![
            Series {
                name: "with attention".into(),
                measured: arrived(with),
                predicted: xs().map(|n| (n, n)).collect(),
            },
            Series { name: "without".into(), measured: arrived(without), predicted: vec![] },
        ],
    }
}
