//! Can attention learn to reverse a sequence?
//!
//! `cargo run --release --example reverse_task`
//!
//! A small transformer is shown random letters and what they are in reverse. Nobody tells it where to look. Afterwards it reverses
//! sequences that it has never seen, and its attention over what was read has become an anti-diagonal: for the first letter it looks
//! at the last one, and so on. Look at the map at the end: a row for each letter that is written, a column for each that was read.
//!
//! Try next: 100 `STEPS` instead of 600, to see the map on its way. Another answer in `task`, such as the same letters in the order of
//! the alphabet: the map is then another one for each sequence. OutputCheck it by lengths that it has not learned from: it fails. Why?

#![expect(clippy::print_stdout, reason = "a program")]

use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor};
use regard::Machine;
use regard_burn::{CrossEntropy, cross_entropy};
use regard_models::files::{Activation, Architecture, Config, Heads, PairLayout, Positions};
use regard_models::generate::{DecodingStrategy, StoppingCriteria, generate};
use regard_models::{DropoutRates, Pass, Recorder, Transformer, ids};
use regard_scope::render::{Depth, term};
use regard_scope::{Map, Metrics, Style, Theme, heat};
use regard_testkit::Noise;
use std::error::Error;
use std::io::{IsTerminal, stdout};
use std::ops::ControlFlow;

const STEPS: usize = 600;
const LENGTHS: [usize; 4] = [5, 6, 7, 8];
/// Tokens: letters, and what a target begins and ends with.
const TOKENS: [&str; 28] = [
    "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p", "q", "r", "s",
    "t", "u", "v", "w", "x", "y", "z", "^", "$",
];
const BEGIN: u32 = 26;
const END: u32 = 27;

/// Letters to read, and what is to be written. Those whose numbers sum to a multiple of 5 are kept from learning.
fn task(length: usize, judged: bool, noise: &mut Noise) -> [Vec<u32>; 2] {
    let letters: Vec<u32> = (0..BEGIN).collect();
    let mut source: Vec<u32> = vec![];
    while source.is_empty() || source.iter().sum::<u32>().is_multiple_of(5) != judged {
        source = (0..length).map(|_| *noise.pick(&letters)).collect();
    }
    let target = source.iter().rev().copied().chain([END]).collect();
    [source, target]
}

/// What a decoder sees of a target: all of it, one place later.
fn given(target: &[u32]) -> Vec<u32> {
    [&[BEGIN], &target[..target.len() - 1]].concat()
}

/// One block that reads, one that writes, one head each.
fn model(device: &Device) -> Result<Transformer, regard_models::Error> {
    let config = Config {
        d_model: 48,
        heads: Heads { q: 1, kv: 1 },
        head_dim: 48,
        d_ff: Some(96),
        vocab: TOKENS.len(),
        pre_norm: true,
        positions: Positions::Sinusoidal {
            pairs: PairLayout::Interleaved,
            first: 0,
            inclusive: false,
        },
        activation: Some(Activation::Relu),
        attention_bias: true,
        feed_forward_bias: true,
        embedding_scale: Some(48f64.sqrt()),
        ..Config::of(Architecture::Transformer)
    };
    device.seed(7);
    Transformer::new(&config, DropoutRates::default(), device)
}

// ANCHOR: heart
/// Learns from pairs: at each place of a target its next token is asked for, given those before it.
fn learn(mut model: Transformer, noise: &mut Noise) -> Result<Transformer, Box<dyn Error>> {
    let (device, mut adam) = (Device::flex(), AdamConfig::new().init());
    for step in 0..STEPS {
        let length = *noise.pick(&LENGTHS);
        let pairs = (0..64).map(|_| <(_, _)>::from(task(length, false, noise)));
        let (sources, targets): (Vec<_>, Vec<_>) = pairs.unzip();
        let given: Vec<_> = targets.iter().map(|target| given(target)).collect();

        let mut pass = Pass::default();
        let memory = model.encode(ids(&sources, &device), None, &mut pass)?;
        let scores = model.decode(&memory, None, ids(&given, &device), &mut pass)?;
        let scores: Tensor<2> = scores.flatten(0, 1); // a row for each place of each target
        let answers: Tensor<1, Int> = ids(&targets, &device).flatten(0, 1);
        let loss = cross_entropy(scores, answers, CrossEntropy::default())?;

        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let rate = 5e-3 * (1.0 - step as f64 / STEPS as f64);
        model = adam.step(rate, model, gradients);
        if step % 100 == 0 || step + 1 == STEPS {
            println!("step {:3}   loss {:.3}", step + 1, loss.into_scalar::<f32>());
        }
    }
    Ok(model)
}

/// What each token that is written looks at, of those that were read.
fn look(model: &Transformer, [source, target]: &[Vec<u32>; 2]) -> Result<Map, Box<dyn Error>> {
    let (device, mut pass) = (Device::flex(), Pass::default());
    pass.recorder = Recorder::on();
    let memory = model.encode(ids(&[source], &device), None, &mut pass)?;
    model.decode(&memory, None, ids(&[given(target)], &device), &mut pass)?;
    let names = |of: &[u32]| of.iter().map(|id| TOKENS[*id as usize].into()).collect();
    let trace = pass.recorder.trace("", &[("source", names(source)), ("target", names(target))]);
    let cross = trace.sites().into_iter().find(|site| site.kind == "cross");
    Ok(trace.map(Machine::detect(), &cross.ok_or("no such head")?, 0..target.len(), [100; 2])?)
}
// ANCHOR_END: heart

fn main() -> Result<(), Box<dyn Error>> {
    let mut noise = Noise::new(1);
    let model = learn(model(&Device::flex().autodiff())?, &mut noise)?;

    let new = |i: usize| task(LENGTHS[i % LENGTHS.len()], true, &mut noise);
    let unseen: Vec<_> = (0..200).map(new).collect();
    let sources: Vec<_> = unseen.iter().map(|[source, _]| source.clone()).collect();
    let (prompts, stop) =
        (vec![vec![BEGIN]; 200], StoppingCriteria { max_tokens: 20, end: vec![END] });
    let copy = model.inference()?;
    let mut session = copy.session(&sources, 1 << 26)?;
    let told = &mut |_, _| ControlFlow::Continue(());
    let written = generate(&mut session, &prompts, &DecodingStrategy::Greedy, &stop, told)?;
    let right = written.iter().zip(&unseen).filter(|(said, [_, target])| said.tokens == *target);
    let (right, mut mirrored, mut letters) = (right.count(), 0, 0);
    for pair in &unseen {
        let (map, n) = (look(&model, pair)?, pair[0].len());
        letters += n;
        let most = |row: usize| map.row(row).iter().copied().fold(0.0, f32::max);
        mirrored += (0..n).filter(|row| map.row(*row)[n - 1 - row] == most(*row)).count();
    }
    println!("{right} of 200 unseen sequences are written backwards without a mistake.");
    println!("{mirrored} of their {letters} letters look most at their mirror image:\n");

    let colors = stdout().is_terminal();
    let style = Style { theme: Theme::Dark, ..Style::new(Metrics::terminal(80, colors)) };
    let depth = if colors { Depth::Indexed } else { Depth::Ascii };
    print!("{}", term(&heat(&look(&model, &unseen[11])?, &style), depth));
    match right >= 190 && 10 * mirrored >= 9 * letters {
        true => Ok(()),
        false => Err("it has not learned to read backwards".into()),
    }
}
