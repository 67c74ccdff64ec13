//! How long translators take, with random weights: `translate`, a beam search over 1,000 sentences; `gru`, a training step of a
//! recurrent one, `gru-bf16` with rounded products, `gru-plain` without attention.
//!
//! ```text
//! cargo run --release -p regard-models --example speed -- translate gru
//! ```

#![expect(clippy::print_stdout, reason = "a program")]

use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor};
use regard_burn::{CrossEntropy, Products, cross_entropy, with_products};
use regard_models::files::{Activation, Architecture, Config, Heads, PairLayout, Positions};
use regard_models::generate::{DecodingStrategy, StoppingCriteria, generate};
use regard_models::{AttentionScore, DropoutRates, Pass, Seq2Seq, Seq2SeqConfig, Transformer, ids};
use std::error::Error;
use std::ops::ControlFlow;
use std::time::Instant;

fn main() -> Result<(), Box<dyn Error>> {
    regard_burn::keep_heap();
    for case in std::env::args().skip(1) {
        match case.as_str() {
            "translate" => translate()?,
            "gru" => gru(Some(256))?,
            "gru-bf16" => with_products(Products::Bf16, || gru(Some(256)))?,
            "gru-plain" => gru(None)?,
            other => {
                let known = "translate, gru, gru-bf16 and gru-plain are known";
                return Err(format!("{other}: {known}").into());
            }
        }
    }
    Ok(())
}

/// Numbers that are the same in every run.
fn rows(n: usize, length: impl Fn(usize) -> usize, vocab: u32) -> Vec<Vec<u32>> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        3 + (state >> 8) % (vocab - 3)
    };
    (0..n).map(|row| (0..length(row)).map(|_| next()).collect()).collect()
}

/// d 256, 3 + 3 layers, a vocabulary of 8,000; 10 tokens in, 10 out, 5 beams.
fn translate() -> Result<(), Box<dyn Error>> {
    let config = Config {
        d_model: 256,
        n_layers: 3,
        heads: Heads { q: 4, kv: 4 },
        head_dim: 64,
        d_ff: Some(1024),
        vocab: 8000,
        pre_norm: true,
        positions: Positions::Sinusoidal {
            pairs: PairLayout::Interleaved,
            first: 0,
            inclusive: false,
        },
        activation: Some(Activation::Relu),
        attention_bias: true,
        feed_forward_bias: true,
        tie_embeddings: true,
        shared_vocabulary: true,
        embedding_scale: Some(16.0),
        ..Config::of(Architecture::Transformer)
    };
    let model = Transformer::new(&config, DropoutRates::default(), &Device::flex())?.inference()?;
    let sources = rows(1000, |row| 6 + row % 9, 8000);
    let search = DecodingStrategy::Beam { width: 5, length_penalty: 1.0 };
    let stop = StoppingCriteria { max_tokens: 10, end: vec![2] };
    let start = Instant::now();
    let (mut tokens, mut reading) = (0, 0.0);
    for some in sources.chunks(64) {
        let began = Instant::now();
        let mut session = model.session(some, 1 << 30)?;
        reading += began.elapsed().as_secs_f64();
        let begins = vec![vec![1]; some.len()];
        let mut hear = |_, _| ControlFlow::Continue(());
        let all = generate(&mut session, &begins, &search, &stop, &mut hear)?;
        tokens += all.iter().map(|one| one.tokens.len()).sum::<usize>();
    }
    let took = start.elapsed().as_secs_f64();
    println!(
        "translate: 1000 sentences, {tokens} tokens, {took:.2} s, of which reading {reading:.2} s"
    );
    Ok(())
}

/// Batch 64, 12 tokens in and out, 256 features, states of 256 each way and of 512, vocabularies of 5,000.
fn gru(attention_hidden: Option<usize>) -> Result<(), Box<dyn Error>> {
    let config = Seq2SeqConfig {
        embedding: 256,
        encoder_hidden: 256,
        decoder_hidden: 512,
        attention_hidden,
        attention_score: AttentionScore::Additive,
        source_vocab: 5000,
        target_vocab: 5000,
    };
    let device = Device::flex().autodiff();
    let model = Seq2Seq::new(&config, DropoutRates { rate: 0.2, attention: 0.0 }, &device)?;
    let sources = rows(64, |_| 12, 5000);
    let lengths: Vec<usize> = (0..64).map(|row| 6 + row % 7).collect();
    let targets = ids(&sources, &device);
    let labels: Tensor<1, Int> = targets.clone().reshape([64 * 12]);
    for step in 0..8 {
        let start = Instant::now();
        let mut pass = Pass { seed: Some(step), ..Pass::default() };
        let memory = model.encode(ids(&sources, &device), Some(&lengths), &mut pass)?;
        let read = start.elapsed().as_secs_f64();
        let scores = model.decode(&memory, targets.clone(), &mut pass)?.reshape([64 * 12, 5000]);
        let loss = cross_entropy(scores, labels.clone(), CrossEntropy::default())?;
        let ahead = start.elapsed().as_secs_f64();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let all = start.elapsed().as_secs_f64();
        println!(
            "gru: encode {:.0} ms, decode {:.0} ms, backward {:.0} ms, all {:.0} ms; {} gradients",
            read * 1e3,
            (ahead - read) * 1e3,
            (all - ahead) * 1e3,
            all * 1e3,
            grads.len()
        );
    }
    Ok(())
}
