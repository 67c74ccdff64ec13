//! Whole models against PyTorch, slice by slice in turns: `race [train] [generate-1] [generate-8] [encode] --python DIR/bin/python`.
//!
//! The baseline is `bench/models.py`, in a Python made by `python/environment DIR`. Without `--python` only ours is timed. `encode` wants the
//! folder of MiniLM as `--minilm DIR` and a list of sentences as `--sentences FILE`.

#![expect(clippy::print_stdout, reason = "a program")]

use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor};
use regard_burn::{CrossEntropy, cross_entropy, keep_heap};
use regard_models::files::{
    Activation, Architecture, Config, Heads, ModelFiles, PairLayout, Positions,
};
use regard_models::generate::{DecodingStrategy, StoppingCriteria, generate};
use regard_models::{Bert, DropoutRates, Gpt, Pass, Transformer, ids, load};
use regard_scope::python;
use serde_json::{Value, json};
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Instant;

type Outcome<T> = Result<T, Box<dyn Error>>;

const THREADS: usize = 2;

/// Numbers below `limit` that are the same in every run.
fn random(n: usize, limit: u32, seed: u32) -> Vec<u32> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % limit
    };
    (0..n).map(next).collect()
}

fn rows(batch: usize, length: usize, limit: u32, seed: u32) -> Vec<Vec<u32>> {
    random(batch * length, limit, seed).chunks(length).map(<[u32]>::to_vec).collect()
}

/// One case: what the baseline is told, and one run of ours, which returns its tokens.
struct Case {
    name: &'static str,
    request: Value,
    run: Box<dyn FnMut() -> Outcome<usize>>,
}

/// The 3 + 3 layers of PEERS.md: d 256, 4 heads, vocabulary 8000, 128 pairs of 25 + 25 tokens.
fn train() -> Outcome<Case> {
    let (vocab, d_model, batch, length) = (8000u32, 256, 128, 25);
    let config = Config {
        architecture: Architecture::Transformer,
        d_model,
        n_layers: 3,
        decoder_layers: Some(3),
        heads: Heads { q: 4, kv: 4 },
        head_dim: 64,
        d_ff: Some(1024),
        vocab: vocab as usize,
        target_vocab: Some(vocab as usize),
        token_types: None,
        context: None,
        norm_eps: Some(1e-5),
        pre_norm: true,
        positions: Positions::Sinusoidal {
            pairs: PairLayout::Interleaved,
            first: 0,
            inclusive: false,
        },
        activation: Some(Activation::Relu),
        attention_bias: true,
        feed_forward_bias: true,
        tie_embeddings: false,
        embedding_scale: Some(16.0),
        bos: None,
        eos: vec![],
        pad: None,
        ..Config::of(Architecture::Transformer)
    };
    let device = Device::flex().autodiff();
    let [source, target, labels] = [1, 2, 3].map(|seed| rows(batch, length, vocab, seed));
    let request = json!({
        "case": "train", "threads": THREADS, "source": source, "target": target, "labels": labels, "vocab": vocab,
        "d_model": d_model, "n_heads": 4, "d_ff": 1024, "n_layers": 3,
    });
    let mut model = Some(Transformer::new(&config, DropoutRates::default(), &device)?);
    let mut adam = AdamConfig::new().init();
    let [source, target, labels] = [source, target, labels].map(|rows| ids(&rows, &device));
    let labels: Tensor<1, Int> = labels.reshape([batch * length]);
    let run = move || {
        let now = model.take().ok_or("a model")?;
        let start = Instant::now();
        let memory = now.encode(source.clone(), None, &mut Pass::default())?;
        let scores = now.decode(&memory, None, target.clone(), &mut Pass::default())?;
        let scores = scores.reshape([batch * length, vocab as usize]);
        let loss = cross_entropy(scores, labels.clone(), CrossEntropy::default())?;
        let ahead = start.elapsed();
        let grads = GradientsParams::from_grads(loss.backward(), &now);
        let back = start.elapsed();
        model = Some(adam.step(1e-4f64, now, grads));
        if std::env::var_os("REGARD_PHASES").is_some() {
            let ms = |t: std::time::Duration| t.as_secs_f64() * 1e3;
            println!(
                "    forward {:.0} backward {:.0} step {:.0} ms",
                ms(ahead),
                ms(back - ahead),
                ms(start.elapsed() - back)
            );
        }
        Ok(2 * batch * length)
    };
    Ok(Case { name: "train", request, run: Box::new(run) })
}

/// A decoder of the shape of GPT-2 small with random weights: greedy, 64 tokens after 32.
fn write(name: &'static str, batch: usize) -> Outcome<Case> {
    let config = Config::from_json(
        r#"{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_ctx": 1024, "n_positions": 1024,
            "vocab_size": 50257, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}"#,
    )?;
    let model = Gpt::new(&config, DropoutRates::default(), &Device::flex())?.inference()?;
    let (prompts, new) = (rows(batch, 32, 50257, 4), 64);
    let request = json!({"case": "generate", "threads": THREADS, "ids": prompts, "new": new});
    let run = move || {
        let mut session = model.session(&[], 1 << 30)?;
        let stop = StoppingCriteria { max_tokens: new, end: vec![] };
        let told = &mut |_, _| ControlFlow::Continue(());
        let all = generate(&mut session, &prompts, &DecodingStrategy::Greedy, &stop, told)?;
        Ok(all.iter().map(|row| row.tokens.len()).sum())
    };
    Ok(Case { name, request, run: Box::new(run) })
}

/// 256 sentences through MiniLM, in batches of 32 of like length.
fn encode(minilm: &PathBuf, sentences: &PathBuf) -> Outcome<Case> {
    let mut files = ModelFiles::open(minilm)?;
    let tokens = files.tokens.take().ok_or("MiniLM has tokens")?;
    let text = std::fs::read_to_string(sentences)?;
    let encoded = text.lines().map(|line| tokens.encode(line)).collect::<Result<Vec<_>, _>>()?;
    let mut all: Vec<Vec<u32>> =
        encoded.into_iter().filter(|ids| (8..=48).contains(&ids.len())).take(256).collect();
    let model = std::path::absolute(minilm)?;
    let request =
        json!({"case": "encode", "threads": THREADS, "ids": all, "batch": 32, "model": model});
    all.sort_by_key(Vec::len);
    let model = load(Bert::new(&files.config, &Device::flex())?, &mut files.weights)?;
    let run = move || {
        for batch in all.chunks(32) {
            model.embed(batch)?;
        }
        Ok(all.iter().map(Vec::len).sum())
    };
    Ok(Case { name: "encode", request, run: Box::new(run) })
}

/// The other side of the pipe.
struct Baseline {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Baseline {
    fn start(program: &str) -> Outcome<Self> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/models.py");
        let mut child = python(Path::new(program))
            .args(["-u", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (to, from) =
            (child.stdin.take().ok_or("a pipe")?, child.stdout.take().ok_or("a pipe")?);
        let mut baseline = Self { child, to, from: BufReader::new(from) };
        println!("against {}", baseline.receive()?["ready"]);
        Ok(baseline)
    }

    fn receive(&mut self) -> Outcome<Value> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        let answer: Value = serde_json::from_str(&line)?;
        match answer.get("error") {
            Some(why) => Err(format!("the baseline: {why}").into()),
            None => Ok(answer),
        }
    }

    fn request(&mut self, line: &str) -> Outcome<Value> {
        writeln!(self.to, "{line}")?;
        self.to.flush()?;
        self.receive()
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn race(mut case: Case, baseline: Option<&mut Baseline>, rounds: usize) -> Outcome<()> {
    let mut baseline = baseline;
    if let Some(baseline) = baseline.as_deref_mut() {
        baseline.request(&case.request.to_string())?;
    }
    (case.run)()?;
    let (mut ours, mut theirs, mut tokens) = (vec![], vec![], 0);
    for _ in 0..rounds {
        let start = Instant::now();
        tokens = (case.run)()?;
        ours.push(start.elapsed().as_secs_f64());
        if let Some(baseline) = baseline.as_deref_mut() {
            theirs.push(baseline.request("go")?["seconds"].as_f64().ok_or("seconds")?);
        }
    }
    let ratios: Vec<f64> = ours.iter().zip(&theirs).map(|(ours, theirs)| theirs / ours).collect();
    let speed = tokens as f64 / median(ours.clone());
    print!("{:12} {:8.3} s {speed:9.1} tokens/s", case.name, median(ours));
    if !ratios.is_empty() {
        print!("   baseline {:8.3} s   {:.2}x", median(theirs), median(ratios));
    }
    println!();
    Ok(())
}

fn main() -> Outcome<()> {
    keep_heap();
    let mut args = std::env::args().skip(1);
    let (mut names, mut python, mut minilm, mut sentences, mut rounds) =
        (vec![], None, None, None, 7);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--python" => python = args.next(),
            "--minilm" => minilm = args.next().map(PathBuf::from),
            "--sentences" => sentences = args.next().map(PathBuf::from),
            "--rounds" => rounds = args.next().ok_or("a number")?.parse()?,
            _ => names.push(arg),
        }
    }
    let mut baseline = python.as_deref().map(Baseline::start).transpose()?;
    for name in &names {
        let case = match name.as_str() {
            "train" => train()?,
            "generate-1" => write("generate-1", 1)?,
            "generate-8" => write("generate-8", 8)?,
            "encode" => encode(
                minilm.as_ref().ok_or("--minilm")?,
                sentences.as_ref().ok_or("--sentences")?,
            )?,
            other => {
                return Err(format!("`{other}`: train, generate-1, generate-8 or encode").into());
            }
        };
        race(case, baseline.as_mut(), rounds)?;
    }
    if let Some(mut baseline) = baseline {
        drop(baseline.to);
        baseline.child.wait()?;
    }
    Ok(())
}
