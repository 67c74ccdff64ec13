//! What both models are made of, as the equations have it: rows of numbers, products, norms, attention. Numbers are stored as `f32`
//! and summed as `f64`, so that what differs from a golden is the golden's own rounding.

use serde_json::Value;
use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::ops::Range;
use std::path::Path;

pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;

/// Both models have it.
const NORM_EPS: f64 = 1e-5;

/// What one attention of a model saw, all heads: everything the microscope needs.
pub(crate) struct DenseWeights {
    /// `encoder`, `decoder`, `cross`; `self` where there is no other.
    pub(crate) kind: &'static str,
    pub(crate) layer: usize,
    /// `[heads.q, q_len, dim]`
    pub(crate) q: Vec<f32>,
    /// `[heads.kv, k_len, dim]`
    pub(crate) k: Vec<f32>,
    /// `[heads.kv, k_len, dim]`
    pub(crate) v: Vec<f32>,
    pub(crate) q_len: usize,
    pub(crate) k_len: usize,
    pub(crate) causal: bool,
}

/// A text that a model wrote, and all that its attentions saw meanwhile.
pub(crate) struct Run {
    /// What the encoder read; empty where there is none.
    pub(crate) source: Vec<String>,
    /// What the decoder read at each step: `<s>` first.
    pub(crate) target: Vec<String>,
    /// What it wrote at each step.
    pub(crate) written: Vec<String>,
    pub(crate) text: String,
    pub(crate) seen: Vec<DenseWeights>,
}

/// Rows of equal length, one after the other.
#[derive(Clone)]
pub(crate) struct Matrix {
    pub(crate) cols: usize,
    pub(crate) data: Vec<f32>,
}

impl Matrix {
    pub(crate) fn empty(cols: usize) -> Self {
        Self { cols, data: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.data.len() / self.cols
    }

    pub(crate) fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.cols..][..self.cols]
    }

    pub(crate) fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.data.chunks_exact(self.cols)
    }

    /// The columns of a range, of all rows.
    pub(crate) fn columns(&self, range: Range<usize>) -> Self {
        let data = self.rows().flat_map(|row| row[range.clone()].iter().copied()).collect();
        Self { cols: range.len(), data }
    }

    /// `[rows, heads * dim]` as `[heads, rows, dim]`.
    pub(crate) fn heads(&self, dim: usize) -> Vec<f32> {
        let starts = (0..self.cols).step_by(dim);
        starts.flat_map(|at| self.columns(at..at + dim).data).collect()
    }

    /// `f(a, b)` of each two numbers that stand at the same place.
    pub(crate) fn zip(&self, other: &Self, f: impl Fn(f32, f32) -> f32) -> Self {
        assert_eq!((self.cols, self.len()), (other.cols, other.len()), "the same rows");
        let data = self.data.iter().zip(&other.data).map(|(a, b)| f(*a, *b)).collect();
        Self { cols: self.cols, data }
    }

    pub(crate) fn plus(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    pub(crate) fn append(&mut self, rows: &Self) {
        assert_eq!(self.cols, rows.cols, "rows of the same length");
        self.data.extend(&rows.data);
    }
}

/// The tensors of a model, by name; a vector is a matrix of one row.
pub(crate) struct Weights(BTreeMap<String, Matrix>);

impl Weights {
    /// Reads `model.safetensors`: the length of a header (8 bytes), the header (JSON), the numbers.
    pub(crate) fn load(model: &str) -> Outcome<Self> {
        let bytes = read(model, "model.safetensors")?;
        let (len, rest) = bytes.split_first_chunk().ok_or("a file without a header")?;
        let len = usize::try_from(u64::from_le_bytes(*len))?;
        let (header, rest) = rest.split_at_checked(len).ok_or("a header that is cut off")?;
        let header: BTreeMap<String, Value> = serde_json::from_slice(header)?;
        let mut tensors = BTreeMap::new();
        for (name, of) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
            if of["dtype"] != "F32" {
                return Err(format!("{name} is of {}; only F32 is read", of["dtype"]).into());
            }
            let shape: Vec<usize> = serde_json::from_value(of["shape"].clone())?;
            let [from, to]: [usize; 2] = serde_json::from_value(of["data_offsets"].clone())?;
            let bytes = rest.get(from..to).ok_or_else(|| format!("{name} is cut off"))?;
            let (numbers, _) = bytes.as_chunks();
            let data = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            let cols = *shape.last().ok_or_else(|| format!("{name} has no axis"))?;
            tensors.insert(name, Matrix { cols, data });
        }
        Ok(Self(tensors))
    }

    pub(crate) fn get(&self, name: &str) -> Outcome<&Matrix> {
        self.0.get(name).ok_or_else(|| format!("the model has no {name}").into())
    }

    /// x Wᵀ
    pub(crate) fn times(&self, name: &str, x: &Matrix) -> Outcome<Matrix> {
        let weight = self.get(&format!("{name}.weight"))?;
        let row = |x| weight.rows().map(move |w| round(dot(x, w)));
        Ok(Matrix { cols: weight.len(), data: x.rows().flat_map(row).collect() })
    }

    /// x Wᵀ + b
    pub(crate) fn linear(&self, name: &str, x: &Matrix) -> Outcome<Matrix> {
        let bias = self.get(&format!("{name}.bias"))?;
        let product = self.times(name, x)?;
        Ok(product.plus(&Matrix { cols: bias.cols, data: bias.data.repeat(x.len()) }))
    }

    /// (x - mean) / sqrt(variance + eps) · gain + bias, of each row
    pub(crate) fn layer_norm(&self, name: &str, x: &Matrix) -> Outcome<Matrix> {
        let gain = self.get(&format!("{name}.weight"))?.row(0);
        let bias = self.get(&format!("{name}.bias"))?.row(0);
        let mut out = Matrix::empty(x.cols);
        for row in x.rows() {
            let mean = mean(row.iter().map(|x| f64::from(*x)));
            let variance = self::mean(row.iter().map(|x| (f64::from(*x) - mean).powi(2)));
            let unit = 1.0 / (variance + NORM_EPS).sqrt();
            let scaled =
                row.iter().zip(gain).map(|(x, g)| (f64::from(*x) - mean) * unit * f64::from(*g));
            out.data.extend(scaled.zip(bias).map(|(x, b)| round(x + f64::from(*b))));
        }
        Ok(out)
    }

    /// x / sqrt(mean of x² + eps) · gain, of each row
    pub(crate) fn rms_norm(&self, name: &str, x: &Matrix) -> Outcome<Matrix> {
        let gain = self.get(&format!("{name}.weight"))?.row(0);
        let mut out = Matrix::empty(x.cols);
        for row in x.rows() {
            let square = mean(row.iter().map(|x| f64::from(*x).powi(2)));
            let unit = 1.0 / (square + NORM_EPS).sqrt();
            out.data.extend(row.iter().zip(gain).map(|(x, g)| round(f64::from(*x) * unit) * g));
        }
        Ok(out)
    }
}

/// softmax(q kᵀ / sqrt(dim)) v, for each row and each head of `dim` columns. Where `k` has fewer heads, neighbours share one. Causal:
/// the last row sees the last key, each row before it one key less.
pub(crate) fn attend([q, k, v]: [&Matrix; 3], dim: usize, causal: bool) -> Matrix {
    let shared_by = q.cols / k.cols;
    let mut out = Matrix::empty(q.cols);
    for (i, row) in q.rows().enumerate() {
        let visible = if causal { k.len() - (q.len() - 1 - i) } else { k.len() };
        for (head, q) in row.chunks_exact(dim).enumerate() {
            let at = head / shared_by * dim;
            let weights = weights(q, k.rows().take(visible).map(|k| &k[at..][..dim]));
            for feature in at..at + dim {
                let values = v.rows().map(|v| f64::from(v[feature]));
                out.data.push(round(weights.iter().zip(values).map(|(w, v)| w * v).sum()));
            }
        }
    }
    out
}

/// softmax(q kᵀ / sqrt(dim)): what one query gives to each of these keys.
pub(crate) fn weights<'a>(q: &[f32], keys: impl Iterator<Item = &'a [f32]>) -> Vec<f64> {
    let scale = 1.0 / (q.len() as f64).sqrt();
    let scores: Vec<f64> = keys.map(|k| dot(q, k) * scale).collect();
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - most).exp()).sum();
    scores.iter().map(|score| (score - most).exp() / sum).collect()
}

/// Where the largest number stands: what greedy decoding writes.
pub(crate) fn largest(scores: &[f32]) -> usize {
    (0..scores.len()).reduce(|best, i| if scores[i] > scores[best] { i } else { best }).unwrap_or(0)
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len(), "vectors of the same length");
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn mean(numbers: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n = numbers.len() as f64;
    numbers.sum::<f64>() / n
}

#[expect(clippy::cast_possible_truncation, reason = "the models store f32")]
pub(crate) fn round(x: f64) -> f32 {
    x as f32
}

/// A file of a model.
fn read(model: &str, file: &str) -> Outcome<Vec<u8>> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let path = data.join(model).join(file);
    fs::read(&path).map_err(|error| format!("{}: {error}", path.display()).into())
}

pub(crate) fn json(model: &str, file: &str) -> Outcome<Value> {
    Ok(serde_json::from_slice(&read(model, file)?)?)
}

#[test]
fn heads_lie_one_after_the_other() {
    let x = Matrix { cols: 4, data: vec![1., 2., 3., 4., 5., 6., 7., 8.] };
    assert_eq!(x.heads(2), [1., 2., 5., 6., 3., 4., 7., 8.]);
}
