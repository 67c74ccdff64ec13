//! The definition of attention: read this first.
//!
//! One pair at a time, nothing stored that could be recomputed, no tiles, no threads. In `f64` it judges everything
//! else; in `f32` it is the plain evaluation whose error the kernels are compared with.
//!
//! For row `i` and the keys `j` it may see:
//!
//! ```text
//! score_ij = score(similarity(q_i, k_j))              scale, softcap, biases
//! lse_i    = ln( sum_j e^score_ij  +  e^sink )        the sink, if there is one, has no value
//! a_ij     = e^(score_ij - lse_i)                     the weights
//! out_i    = sum_j z_ij a_ij v_j                      z: 1, or what dropout makes of it: 0 or 1 / (1 - rate)
//! H_i      = -sum_j a_ij ln a_ij                      the entropy, the sink counted as one of the keys
//! ```
//! with the largest score subtracted before any power is taken, so that none overflows. A score of `-inf` hides its
//! pair. A row that sees nothing has `out = 0`, `lse = -inf` (with a sink: `lse = sink`) and `H = 0`.

pub mod linear;

use crate::element::{Element, Number};
use crate::problem::Problem;
use crate::rope::{Positions, Rope};
use crate::score::{Pair, Similarity, Steps};
use crate::view::{Shape, View, serving};

/// The result of the definition, `[batch, heads.q, q_len, ...]`, dense; of packed items one after another.
#[derive(Clone, Debug)]
pub struct Outcome<N> {
    /// `[batch, heads.q, q_len, v_dim]`
    pub out: Vec<N>,
    /// `[batch, heads.q, q_len]`
    pub lse: Vec<N>,
    /// `[batch, heads.q, q_len]`
    pub entropy: Vec<N>,
}

/// Gradients of a loss by everything that attention depends on; empty where an option is not in use.
#[derive(Clone, Debug, Default)]
pub struct Grads<N> {
    /// `[batch, heads.q, q_len, q_dim]`
    pub q: Vec<N>,
    /// `[batch, heads.kv, k_len, qk_dim]`
    pub k: Vec<N>,
    /// `[batch, heads.kv, k_len, v_dim]`
    pub v: Vec<N>,
    /// By the scale after the temperature.
    pub scale: N,
    /// By the temperature.
    pub temperature: N,
    /// By the dense bias, in its own broadcast shape.
    pub bias: Vec<N>,
    /// By the ALiBi slopes, `[heads.q]`.
    pub alibi: Vec<N>,
    /// By the relative bias, `[buckets, heads.q]`.
    pub relative: Vec<N>,
    /// By the sinks, `[heads.q]`.
    pub sinks: Vec<N>,
    /// By `W` of `Similarity::General`, `[1, heads.q or 1, q_dim, qk_dim]`.
    pub w: Vec<N>,
    /// The largest `a (|d_a| + |mean of d_a|)`: a gradient of a score is the difference of two such numbers, so rounding
    /// is relative to this, however small the difference is.
    pub size: N,
}

/// q, k and v of one call.
pub type Inputs<'a, E> = (View<'a, E>, View<'a, E>, View<'a, E>);

fn dot<N: Number>(a: &[N], b: &[N]) -> N {
    a.iter().zip(b).map(|(a, b)| *a * *b).sum()
}

/// The head of one pair's similarity: its rows widened, and `W` applied.
struct Rows<N> {
    /// As given.
    q: Vec<N>,
    /// `W^T q` where there is a `W`, else `q`.
    projected: Vec<N>,
}

impl<E: Element> Problem<'_, E> {
    fn query<N: Number>(&self, q: &View<'_, E>, batch: usize, head: usize, row: usize) -> Rows<N> {
        let q: Vec<N> = widened(q.row(batch, head, row));
        let projected = match self.similarity {
            Similarity::General(w) => {
                let head = serving(head, w.shape().heads);
                let w: Vec<Vec<N>> =
                    (0..w.shape().len).map(|i| widened(w.row(0, head, i))).collect();
                (0..w[0].len()).map(|d| q.iter().zip(&w).map(|(q, w)| *q * w[d]).sum()).collect()
            }
            _ => q.clone(),
        };
        Rows { q, projected }
    }

    fn similarity_of<N: Number>(&self, q: &Rows<N>, k: &[N]) -> N {
        match self.similarity {
            Similarity::Distance => {
                -q.q.iter().zip(k).map(|(q, k)| (*q - *k) * (*q - *k)).sum::<N>()
            }
            _ => dot(&q.projected, k),
        }
    }

    /// The keys that a row sees, with their scores.
    fn scores<N: Number>(
        &self,
        k: &View<'_, E>,
        q: &Rows<N>,
        at: Pair,
        round: fn(N) -> N,
    ) -> Vec<(usize, Steps<N>)> {
        let scope = self.scope(at.batch, at.head);
        let kv_head = self.kv_head(at.head);
        let seen = (0..scope.k_len).filter(|key| self.mask.sees(&scope, at.row, *key));
        let scored = seen.map(|key| {
            let k: Vec<N> = widened(k.row(at.batch, kv_head, key));
            let steps = self.define(Pair { key, ..at }, round(self.similarity_of(q, &k)));
            (key, Steps { score: round(steps.score), ..steps })
        });
        scored.filter(|(_, steps)| steps.score != N::neg_infinity()).collect()
    }

    /// The scores that a row's weights are made of.
    fn and_sink<N: Number>(
        &self,
        head: usize,
        scores: &[(usize, Steps<N>)],
    ) -> impl Iterator<Item = N> {
        let sink = self.score.sinks.map(|sinks| N::from_f64(sinks[head].to_f64()));
        scores.iter().map(|(_, s)| s.score).chain(sink)
    }

    /// What dropout makes of a weight.
    fn dropped<N: Number>(&self, at: Pair) -> N {
        self.dropout.map_or(N::one(), |dropout| {
            N::from_f64(if dropout.keeps(at) { dropout.growth() } else { 0.0 })
        })
    }

    /// The softmax over what a row sees and its sink.
    fn softmax<N: Number>(&self, head: usize, scores: &[(usize, Steps<N>)]) -> Softmax<N> {
        let all = || self.and_sink(head, scores);
        let m = all().fold(N::neg_infinity(), |a, b| if b.is_nan() { b } else { a.max(b) });
        Softmax { m, sum: all().map(|s| (s - m).exp()).sum() }
    }
}

/// The largest score of a row, and the sum of `e^(score - m)`.
struct Softmax<N> {
    m: N,
    sum: N,
}

impl<N: Number> Softmax<N> {
    fn saw_nothing(&self) -> bool {
        self.m == N::neg_infinity()
    }

    fn lse(&self) -> N {
        if self.saw_nothing() { self.m } else { self.m + self.sum.ln() }
    }

    fn weight(&self, score: N) -> N {
        (score - self.m).exp() / self.sum
    }

    /// `ln` of the weight.
    fn log(&self, score: N) -> N {
        (score - self.m) - self.sum.ln()
    }

    /// `-sum of a ln a`
    fn entropy(&self, scores: impl Iterator<Item = N>) -> N {
        let terms = scores.map(|s| (self.weight(s), self.log(s))).filter(|(a, _)| *a != N::zero());
        if self.saw_nothing() { N::zero() } else { -terms.map(|(a, log)| a * log).sum::<N>() }
    }
}

fn widened<N: Number, E: Element>(row: &[E]) -> Vec<N> {
    row.iter().map(|x| N::from_f64(x.widen().to_f64())).collect()
}

/// Attention, by definition.
pub fn forward<N: Number, E: Element>(
    problem: &Problem<'_, E>,
    inputs: Inputs<'_, E>,
) -> Outcome<N> {
    forward_in_steps(problem, inputs, |x| x)
}

/// Attention as single operations on tensors of a narrower type make it: what each of them leaves in memory, similarities,
/// scores, weights and outputs, is rounded. What the kernels are compared with for half types.
pub fn forward_in_steps<N: Number, E: Element>(
    problem: &Problem<'_, E>,
    (q, k, v): Inputs<'_, E>,
    round: fn(N) -> N,
) -> Outcome<N> {
    let dims = problem.dims();
    let mut result = Outcome { out: Vec::new(), lse: Vec::new(), entropy: Vec::new() };
    for (batch, head, row) in rows(problem) {
        let at = Pair { batch, head, row, key: 0 };
        let scores = problem.scores(&k, &problem.query::<N>(&q, batch, head, row), at, round);
        let softmax = problem.softmax(head, &scores);
        result.lse.push(softmax.lse());
        result.entropy.push(softmax.entropy(problem.and_sink(head, &scores)));
        let mut out = vec![N::zero(); dims.v_dim];
        for (key, steps) in scores {
            let a = round(softmax.weight(steps.score)) * problem.dropped(Pair { key, ..at });
            let v = v.row(batch, problem.kv_head(head), key);
            for (out, v) in out.iter_mut().zip(v) {
                *out = *out + a * N::from_f64(v.widen().to_f64());
            }
        }
        result.out.extend(out.into_iter().map(round));
    }
    result
}

/// Every batch, head and row.
fn rows<E: Element>(
    problem: &Problem<'_, E>,
) -> impl Iterator<Item = (usize, usize, usize)> + use<E> {
    let dims = problem.dims();
    // Packed items have their own number of rows.
    let lens: Vec<usize> = (0..dims.batch).map(|b| problem.q_len(b)).collect();
    lens.into_iter().enumerate().flat_map(move |(b, len)| {
        (0..dims.heads.q).flat_map(move |h| (0..len).map(move |i| (b, h, i)))
    })
}

/// Rotary position embedding of `x [batch, heads, len, features]`, dense, by definition: features `a` and `b` of a pair
/// become `a cos t - b sin t` and `a sin t + b cos t`, with `t` the row's position times the pair's frequency.
///
/// # Panics
/// If `rope` or `positions` do not fit: see [`Rope::apply`].
pub fn rotate<N: Number, E: Element>(
    rope: &Rope,
    x: View<'_, E>,
    positions: Positions<'_>,
) -> Vec<N> {
    let Shape { batch, heads, len, .. } = x.shape();
    let mut result = Vec::new();
    for (b, head) in (0..batch).flat_map(|b| (0..heads).map(move |head| (b, head))) {
        for row in 0..len {
            let position = positions.at(x.shape(), b, row) as f64;
            let mut x: Vec<N> = widened(x.row(b, head, row));
            for (pair, [i, j]) in rope.pairs().enumerate() {
                let (sin, cos) = (position * rope.frequency(pair)).sin_cos();
                let (sin, cos) = (N::from_f64(sin), N::from_f64(cos));
                (x[i], x[j]) = (x[i] * cos - x[j] * sin, x[i] * sin + x[j] * cos);
            }
            result.extend(x);
        }
    }
    result
}

/// The gradients of `sum(out * d.out) + sum(lse * d.lse) + sum(entropy * d.entropy)`, by definition.
///
/// Each line undoes one of [`forward`]: from `out_i = sum_j z_ij a_ij v_j` come `d_v` and `d_a`; the softmax gives
/// `d_score_ij = a_ij (d_a_ij - sum_j a_ij d_a_ij + d_lse_i - d_H_i (ln a_ij + H_i))`; the score's slopes carry that to
/// the similarity and to the options; the similarity to q, k and W.
pub fn backward<N: Number, E: Element>(
    problem: &Problem<'_, E>,
    inputs: Inputs<'_, E>,
    d: &Outcome<N>,
) -> Grads<N> {
    backward_in_steps(problem, inputs, d, |x| x)
}

/// The gradients with every step rounded: see [`forward_in_steps`].
pub fn backward_in_steps<N: Number, E: Element>(
    problem: &Problem<'_, E>,
    (q, k, v): Inputs<'_, E>,
    d: &Outcome<N>,
    round: fn(N) -> N,
) -> Grads<N> {
    let dims = problem.dims();
    let score = &problem.score;
    let zeros = |n: usize| vec![N::zero(); n];
    let kv = dims.batch * dims.heads.kv * dims.k_len;
    let mut g = Grads {
        q: zeros(dims.batch * dims.heads.q * dims.q_len * dims.q_dim),
        k: zeros(kv * dims.qk_dim),
        v: zeros(kv * dims.v_dim),
        bias: zeros(score.bias.map_or(0, |b| b.shape().to_array().iter().product())),
        alibi: zeros(score.alibi.map_or(0, <[_]>::len)),
        relative: zeros(score.relative.as_ref().map_or(0, |r| r.table().len())),
        sinks: zeros(score.sinks.map_or(0, <[_]>::len)),
        w: match problem.similarity {
            Similarity::General(w) => zeros(w.shape().to_array().iter().product()),
            _ => Vec::new(),
        },
        ..Grads::default()
    };
    for (r, (batch, head, row)) in rows(problem).enumerate() {
        let at = Pair { batch, head, row, key: 0 };
        let query = problem.query::<N>(&q, batch, head, row);
        let scores = problem.scores(&k, &query, at, round);
        let softmax = problem.softmax(head, &scores);
        if softmax.saw_nothing() {
            continue; // nothing was seen: nothing depends on anything
        }
        let d_out = &d.out[r * dims.v_dim..][..dims.v_dim];
        let kv_head = problem.kv_head(head);
        let kv_row = |key: usize| (batch * dims.heads.kv + kv_head) * dims.k_len + key;
        let entropy = softmax.entropy(problem.and_sink(head, &scores));
        // out_i = sum_j z_ij a_ij v_j
        let mut weights = Vec::new();
        for (key, steps) in scores {
            let a = round(softmax.weight(steps.score));
            let z = problem.dropped::<N>(Pair { key, ..at });
            let v: Vec<N> = widened(v.row(batch, kv_head, key));
            for (d_v, d_out) in g.v[kv_row(key) * dims.v_dim..][..dims.v_dim].iter_mut().zip(d_out)
            {
                *d_v = *d_v + z * a * *d_out;
            }
            weights.push((key, steps, a, round(z * dot(d_out, &v))));
        }
        // a_ij = e^(score_ij - lse_i), lse_i itself, and H_i
        let mean: N = weights.iter().map(|(_, _, a, d_a)| *a * *d_a).sum();
        let d_score = |score: N, a: N, d_a: N| {
            let fall = if a == N::zero() { N::zero() } else { softmax.log(score) + entropy };
            a * (d_a - mean + d.lse[r] - d.entropy[r] * fall)
        };
        if let Some(sinks) = score.sinks {
            let sink = N::from_f64(sinks[head].to_f64());
            g.sinks[head] = g.sinks[head] + d_score(sink, softmax.weight(sink), N::zero());
        }
        for (key, steps, a, d_a) in weights {
            g.size = g.size.max(a * (d_a.abs() + mean.abs()));
            let at = Pair { key, ..at };
            let d_score = round(d_score(steps.score, a, d_a));
            let (by_scaled, by_bias) = problem.slope(at, steps);
            g.add_to_options(problem, at, d_score * by_bias);
            // scaled = similarity * scale
            let d_scaled = d_score * by_scaled;
            let scale = N::from_f64(problem.scale());
            let k: Vec<N> = widened(k.row(batch, kv_head, key));
            let similarity = problem.similarity_of(&query, &k);
            g.scale = g.scale + d_scaled * similarity;
            g.add_to_similarity(problem, (r, kv_row(key)), head, (&query, &k), d_scaled * scale);
        }
    }
    for grad in [&mut g.q, &mut g.k, &mut g.v] {
        grad.iter_mut().for_each(|x| *x = round(*x));
    }
    // scale = given / temperature
    g.temperature = -g.scale * N::from_f64(problem.scale() / score.temperature);
    g
}

impl<N: Number> Grads<N> {
    /// score = ... + bias - slope |distance| + table[bucket]
    fn add_to_options<E: Element>(&mut self, problem: &Problem<'_, E>, at: Pair, d: N) {
        let score = &problem.score;
        let distance = problem.distance(at);
        if let Some(bias) = &score.bias {
            let [b, h, q, k] = bias.shape().to_array();
            let head = serving(at.batch, b) * h + serving(at.head, h);
            let i = (head * q + serving(at.row, q)) * k + serving(at.key, k);
            self.bias[i] = self.bias[i] + d;
        }
        if score.alibi.is_some() {
            let size = N::from_f64(distance.unsigned_abs() as f64);
            self.alibi[at.head] = self.alibi[at.head] - d * size;
        }
        if let Some(r) = &score.relative {
            let i = r.entry(distance, at.head);
            self.relative[i] = self.relative[i] + d;
        }
    }

    /// similarity = q . k, or q^T W k, or -|q - k|^2
    fn add_to_similarity<E: Element>(
        &mut self,
        problem: &Problem<'_, E>,
        (q_row, k_row): (usize, usize),
        head: usize,
        (query, k): (&Rows<N>, &[N]),
        d: N,
    ) {
        let dims = problem.dims();
        let d_q = &mut self.q[q_row * dims.q_dim..][..dims.q_dim];
        let d_k = &mut self.k[k_row * dims.qk_dim..][..dims.qk_dim];
        match problem.similarity {
            Similarity::Dot => {
                for (i, k) in k.iter().enumerate() {
                    d_q[i] = d_q[i] + d * *k;
                    d_k[i] = d_k[i] + d * query.q[i];
                }
            }
            Similarity::Distance => {
                let two = N::one() + N::one();
                for (i, k) in k.iter().enumerate() {
                    let difference = query.q[i] - *k;
                    d_q[i] = d_q[i] - d * two * difference;
                    d_k[i] = d_k[i] + d * two * difference;
                }
            }
            Similarity::General(w) => {
                let head = serving(head, w.shape().heads);
                for (i, d_q) in d_q.iter_mut().enumerate() {
                    let row: Vec<N> = widened(w.row(0, head, i));
                    *d_q = *d_q + d * dot(&row, k);
                    let d_w = &mut self.w[(head * dims.q_dim + i) * dims.qk_dim..][..dims.qk_dim];
                    for (d_w, k) in d_w.iter_mut().zip(k) {
                        *d_w = *d_w + d * query.q[i] * *k;
                    }
                }
                for (d_k, projected) in d_k.iter_mut().zip(&query.projected) {
                    *d_k = *d_k + d * *projected;
                }
            }
        }
    }
}
