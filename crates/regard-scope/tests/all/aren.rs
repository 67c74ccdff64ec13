//! Arabic names in Latin letters: a Transformer of encoder and decoder (6 + 6 layers, norms first, 182,731 parameters) that
//! OpenNMT trained and CTranslate2 ships with its tests. Letter by letter, greedily.

use crate::dense::{DenseWeights, Matrix, Outcome, Run, Weights, attend, json, largest, round};
use serde_json::from_value;

pub(crate) const FOLDER: &str = "aren-transliteration";
const LAYERS: usize = 6;
const D_MODEL: usize = 32;
/// Names are short; a model that never ends should.
const MOST_STEPS: usize = 64;

pub(crate) struct Aren {
    weights: Weights,
    /// What the ids stand for; the last is for all letters that are not among them.
    source: Vec<String>,
    target: Vec<String>,
}

/// Which attention it is; what it saw, it adds to the others.
struct Site<'a> {
    kind: &'static str,
    layer: usize,
    causal: bool,
    seen: &'a mut Vec<DenseWeights>,
}

impl Aren {
    pub(crate) const HEADS: usize = 8;

    pub(crate) fn load() -> Outcome<Self> {
        let config = json(FOLDER, "config.json")?;
        let source = from_value(config["source_vocab"].clone())?;
        let target = from_value(config["target_vocab"].clone())?;
        Ok(Self { weights: Weights::load(FOLDER)?, source, target })
    }

    /// The decoder reads all that is written so far, anew at each step: the last time, it sees everything.
    pub(crate) fn transliterate(&self, name: &str) -> Outcome<Run> {
        let source: Vec<String> = name.chars().map(String::from).collect();
        let unknown = self.source.len() - 1;
        let id = |letter| self.source.iter().position(|known| known == letter).unwrap_or(unknown);
        let ids: Vec<usize> = source.iter().map(id).collect();
        let mut seen = Vec::new();
        let memory = self.encode(&ids, &mut seen)?;

        let mark = |mark: &str| {
            let at = self.target.iter().position(|known| known == mark);
            at.ok_or_else(|| format!("no {mark} among the letters"))
        };
        let (begin, end) = (mark("<s>")?, mark("</s>")?);
        let mut ids = vec![begin];
        let decoded = loop {
            let mut decoded = Vec::new();
            let scores = self.decode(&ids, &memory, &mut decoded)?;
            let next = largest(scores.row(scores.len() - 1));
            ids.push(next);
            if next == end || ids.len() > MOST_STEPS {
                break decoded;
            }
        };
        seen.extend(decoded);
        let letters = |ids: &[usize]| ids.iter().map(|id| self.target[*id].clone()).collect();
        let (target, written): (Vec<_>, Vec<_>) =
            (letters(&ids[..ids.len() - 1]), letters(&ids[1..]));
        let text = written.iter().filter(|letter| *letter != "</s>").map(String::as_str).collect();
        Ok(Run { source, target, written, text, seen })
    }

    fn encode(&self, ids: &[usize], seen: &mut Vec<DenseWeights>) -> Outcome<Matrix> {
        let mut x = self.embed("encoder", ids)?;
        for layer in 0..LAYERS {
            let at = format!("encoder.layer_{layer}");
            let site = Site { kind: "encoder", layer, causal: false, seen };
            x = x.plus(&self.self_attention(&at, &x, site)?);
            x = x.plus(&self.feed_forward(&at, &x)?);
        }
        self.weights.layer_norm("encoder.norm", &x)
    }

    /// The score of each letter, after each of `ids`.
    fn decode(
        &self,
        ids: &[usize],
        memory: &Matrix,
        seen: &mut Vec<DenseWeights>,
    ) -> Outcome<Matrix> {
        let mut x = self.embed("decoder", ids)?;
        for layer in 0..LAYERS {
            let at = format!("decoder.layer_{layer}");
            let site = Site { kind: "decoder", layer, causal: true, seen };
            x = x.plus(&self.self_attention(&at, &x, site)?);
            let site = Site { kind: "cross", layer, causal: false, seen };
            x = x.plus(&self.cross_attention(&at, &x, memory, site)?);
            x = x.plus(&self.feed_forward(&at, &x)?);
        }
        let x = self.weights.layer_norm("decoder.norm", &x)?;
        self.weights.linear("decoder.projection", &x)
    }

    /// E[id] · sqrt(d) + position
    fn embed(&self, side: &str, ids: &[usize]) -> Outcome<Matrix> {
        let table = self.weights.get(&format!("{side}.embeddings.weight"))?;
        let mut x = Matrix::empty(D_MODEL);
        for (i, id) in ids.iter().enumerate() {
            let scaled = table.row(*id).iter().map(|e| f64::from(*e) * (D_MODEL as f64).sqrt());
            x.data.extend(scaled.zip(position(i + 1)).map(|(e, p)| round(e + p)));
        }
        Ok(x)
    }

    fn self_attention(&self, at: &str, x: &Matrix, site: Site<'_>) -> Outcome<Matrix> {
        let x = self.weights.layer_norm(&format!("{at}.self_attention.norm"), x)?;
        let qkv = self.weights.linear(&format!("{at}.self_attention.linear_0"), &x)?;
        let part = |i: usize| qkv.columns(i * D_MODEL..(i + 1) * D_MODEL);
        let out = site.attend([&part(0), &part(1), &part(2)]);
        self.weights.linear(&format!("{at}.self_attention.linear_1"), &out)
    }

    /// The decoder asks, the encoder's output answers.
    fn cross_attention(
        &self,
        at: &str,
        x: &Matrix,
        memory: &Matrix,
        site: Site<'_>,
    ) -> Outcome<Matrix> {
        let x = self.weights.layer_norm(&format!("{at}.attention.norm"), x)?;
        let q = self.weights.linear(&format!("{at}.attention.linear_0"), &x)?;
        let kv = self.weights.linear(&format!("{at}.attention.linear_1"), memory)?;
        let (k, v) = (kv.columns(0..D_MODEL), kv.columns(D_MODEL..2 * D_MODEL));
        self.weights.linear(&format!("{at}.attention.linear_2"), &site.attend([&q, &k, &v]))
    }

    /// W₁ max(0, W₀ x)
    fn feed_forward(&self, at: &str, x: &Matrix) -> Outcome<Matrix> {
        let x = self.weights.layer_norm(&format!("{at}.ffn.norm"), x)?;
        let mut inner = self.weights.linear(&format!("{at}.ffn.linear_0"), &x)?;
        inner.data.iter_mut().for_each(|x| *x = x.max(0.0));
        self.weights.linear(&format!("{at}.ffn.linear_1"), &inner)
    }
}

impl Site<'_> {
    fn attend(self, [q, k, v]: [&Matrix; 3]) -> Matrix {
        let Self { kind, layer, causal, seen } = self;
        let dim = D_MODEL / Aren::HEADS;
        let (q_len, k_len) = (q.len(), k.len());
        let out = attend([q, k, v], dim, causal);
        let [q, k, v] = [q, k, v].map(|x| x.heads(dim));
        seen.push(DenseWeights { kind, layer, q, k, v, q_len, k_len, causal });
        out
    }
}

/// Sines, then cosines, of one place; the first place is 1.
fn position(place: usize) -> impl Iterator<Item = f64> {
    let half = D_MODEL / 2;
    let step = 10_000f64.ln() / (half - 1) as f64;
    let angle = move |i: usize| place as f64 * (-(i as f64) * step).exp();
    (0..half).map(move |i| angle(i).sin()).chain((0..half).map(move |i| angle(i).cos()))
}
