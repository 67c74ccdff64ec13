//! Stories for children: a decoder as Llama's (5 layers, 260,032 parameters) that Andrej Karpathy trained on TinyStories. Token by
//! token, greedily.

use crate::dense::{DenseWeights, Matrix, Outcome, Run, Weights, attend, json, largest, round};
use serde_json::from_value;

pub(crate) const FOLDER: &str = "stories260K";
const LAYERS: usize = 5;
const D_MODEL: usize = 64;
const DIM: usize = D_MODEL / Stories::HEADS;
const ROPE_THETA: f64 = 10_000.0;
/// How far the model was trained to look back.
const CONTEXT: usize = 512;
/// Id of `<s>`: a story begins, so one that writes it has ended.
const BEGIN: usize = 1;

pub(crate) struct Stories {
    weights: Weights,
    tokens: Vec<String>,
}

/// What one layer's attention has seen so far, `[tokens, heads * DIM]` each; queries and keys are rotated already.
struct Past {
    q: Matrix,
    k: Matrix,
    v: Matrix,
}

impl Stories {
    pub(crate) const HEADS: usize = 8;
    pub(crate) const KV_HEADS: usize = 4;

    pub(crate) fn load() -> Outcome<Self> {
        let mut tokens: Vec<String> =
            from_value(json(FOLDER, "tokenizer_tok512.json")?["tokens"].clone())?;
        tokens.iter_mut().take(3).for_each(|mark| *mark = mark.trim().to_owned());
        Ok(Self { weights: Weights::load(FOLDER)?, tokens })
    }

    /// Tells a story of at most so many tokens, from nothing.
    pub(crate) fn tell(&self, steps: usize) -> Outcome<Run> {
        let mut layers = Past::nothing();
        let (mut read, mut written) = (vec![BEGIN], Vec::new());
        for _ in 0..steps.min(CONTEXT) {
            let scores = self.forward(&read[written.len()..], &mut layers)?;
            let next = largest(scores.row(scores.len() - 1));
            written.push(next);
            if next == BEGIN {
                break;
            }
            read.push(next);
        }
        read.truncate(written.len());
        let labels = |ids: &[usize]| ids.iter().map(|id| self.tokens[*id].clone()).collect();
        let seen = layers.iter().enumerate().map(|(layer, past)| past.seen(layer)).collect();
        let text = self.text(&written)?;
        Ok(Run { source: Vec::new(), target: labels(&read), written: labels(&written), text, seen })
    }

    /// The score of each token, after each of `ids`, which follow what the layers have seen.
    fn forward(&self, ids: &[usize], layers: &mut [Past]) -> Outcome<Matrix> {
        let table = self.weights.get("model.embed_tokens.weight")?;
        let rows = ids.iter().flat_map(|id| table.row(*id).iter().copied());
        let mut x = Matrix { cols: D_MODEL, data: rows.collect() };
        for (layer, past) in layers.iter_mut().enumerate() {
            let at = format!("model.layers.{layer}");
            x = x.plus(&self.attention(&at, &x, past)?);
            x = x.plus(&self.feed_forward(&at, &x)?);
        }
        let x = self.weights.rms_norm("model.norm", &x)?;
        self.weights.times("model.embed_tokens", &x)
    }

    fn attention(&self, at: &str, x: &Matrix, past: &mut Past) -> Outcome<Matrix> {
        let x = self.weights.rms_norm(&format!("{at}.input_layernorm"), x)?;
        let project = |name| self.weights.times(&format!("{at}.self_attn.{name}_proj"), &x);
        let first = past.k.len();
        let q = rotated(&project("q")?, first);
        past.q.append(&q);
        past.k.append(&rotated(&project("k")?, first));
        past.v.append(&project("v")?);
        let out = attend([&q, &past.k, &past.v], DIM, true);
        self.weights.times(&format!("{at}.self_attn.o_proj"), &out)
    }

    /// W_down (silu(W_gate x) · W_up x)
    fn feed_forward(&self, at: &str, x: &Matrix) -> Outcome<Matrix> {
        let x = self.weights.rms_norm(&format!("{at}.post_attention_layernorm"), x)?;
        let gate = self.weights.times(&format!("{at}.mlp.gate_proj"), &x)?;
        let up = self.weights.times(&format!("{at}.mlp.up_proj"), &x)?;
        let inner = gate.zip(&up, |gate, up| gate / (1.0 + (-gate).exp()) * up);
        self.weights.times(&format!("{at}.mlp.down_proj"), &inner)
    }

    /// What the tokens spell. Some are single bytes, `<0x0A>`; the space before the first word is not part of the text.
    fn text(&self, ids: &[usize]) -> Outcome<String> {
        let mut bytes = Vec::new();
        for token in ids.iter().filter(|id| **id != BEGIN).map(|id| &self.tokens[*id]) {
            match token.strip_prefix("<0x").and_then(|byte| byte.strip_suffix('>')) {
                Some(byte) => bytes.push(u8::from_str_radix(byte, 16)?),
                None => bytes.extend(token.bytes()),
            }
        }
        let text = String::from_utf8(bytes)?;
        Ok(text.strip_prefix(' ').unwrap_or(&text).to_owned())
    }
}

impl Past {
    /// Of all layers, before the first token.
    fn nothing() -> Vec<Self> {
        let [q, kv] = [Stories::HEADS, Stories::KV_HEADS].map(|heads| Matrix::empty(heads * DIM));
        (0..LAYERS).map(|_| Self { q: q.clone(), k: kv.clone(), v: kv.clone() }).collect()
    }

    fn seen(&self, layer: usize) -> DenseWeights {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| x.heads(DIM));
        let (q_len, k_len) = (self.q.len(), self.k.len());
        DenseWeights { kind: "self", layer, q, k, v, q_len, k_len, causal: true }
    }
}

/// Rotary positions: in each head, features 2i and 2i + 1 turn by place · theta^(-2i / dim).
fn rotated(x: &Matrix, first: usize) -> Matrix {
    let mut out = Matrix::empty(x.cols);
    for (place, row) in (first..).zip(x.rows()) {
        for (i, pair) in row.chunks_exact(2).enumerate() {
            let turns = ROPE_THETA.powf(-((2 * i % DIM) as f64) / DIM as f64);
            let (sin, cos) = (place as f64 * turns).sin_cos();
            let [a, b] = [f64::from(pair[0]), f64::from(pair[1])];
            out.data.extend([round(a * cos - b * sin), round(a * sin + b * cos)]);
        }
    }
    out
}

#[test]
fn tokens_read_one_by_one_or_at_once_score_the_same() -> Outcome<()> {
    let (model, ids) = (Stories::load()?, [BEGIN, 403, 407, 261, 378, 432]);
    let at_once = model.forward(&ids, &mut Past::nothing())?;
    let mut layers = Past::nothing();
    for (i, id) in ids.iter().enumerate() {
        assert_eq!(model.forward(&[*id], &mut layers)?.data, at_once.row(i));
    }
    Ok(())
}
