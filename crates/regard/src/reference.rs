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
//! out_i    = sum_j z_ij a_ij v_j                      z: 1, or what dropout and local attention make of it
//! H_i      = -sum_j a_ij ln a_ij                      the entropy, the sink counted as one of the keys
//! ```
//! with the largest score subtracted before any power is taken, so that none overflows. A score of `-inf` hides its
//! pair. A row that sees nothing has `out = 0`, `lse = -inf` (with a sink: `lse = sink`) and `H = 0`.

pub mod linear;
pub(crate) mod steps;

use crate::dropout::uniform;
use crate::normaliser::Normaliser;
use crate::place::Pair;
use crate::problem::Problem;
use crate::rope::{Positions, Rope};
use crate::score::Scored;
use crate::simd::{Element, Number};
use crate::similarity::{Additive, Similarity};
pub use crate::view::Inputs;
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
    /// By the centres of local attention, `[batch, heads.q, q_len]`.
    pub centres: Vec<N>,
    /// By `W` of `Similarity::General`, `[1, heads.q or 1, q_dim, qk_dim]`.
    pub w: Vec<N>,
    /// By `w_q`, `w_k` and `v` of `Similarity::Additive`, each in its own shape.
    pub additive: [Vec<N>; 3],
    /// The largest `a (|d_a| + |mean of d_a|)`: a gradient of a score is the difference of two such numbers, so rounding
    /// is relative to this, however small the difference is.
    pub size: N,
}

fn dot<N: Number>(a: &[N], b: &[N]) -> N {
    a.iter().zip(b).map(|(a, b)| *a * *b).sum()
}

/// A query or a key, widened, and what the similarity multiplies it by.
struct Row<N> {
    given: Vec<N>,
    /// `W^T` times what is given where there is a `W`, else the same.
    projected: Vec<N>,
}

impl<N: Number> Row<N> {
    fn new<E: Element>(given: &[E], w: Option<(View<'_, E>, usize)>) -> Self {
        let given: Vec<N> = widened(given);
        let Some((w, head)) = w else { return Self { projected: given.clone(), given } };
        let mut projected = vec![N::zero(); w.shape().dim];
        for (i, x) in given.iter().enumerate() {
            let row: Vec<N> = widened(matrix_row(w, head, i));
            projected.iter_mut().zip(row).for_each(|(sum, w)| *sum = *sum + *x * w);
        }
        Self { given, projected }
    }
}

/// Row `i` of the matrix that serves a head.
fn matrix_row<'a, E>(w: View<'a, E>, head: usize, i: usize) -> &'a [E] {
    w.row(0, serving(head, w.shape().heads), i)
}

/// The keys of all heads, `[batch, heads.kv, k_len]`.
type Keys<N> = Vec<Vec<Row<N>>>;

impl<E: Element> Problem<'_, E> {
    fn query<N: Number>(&self, q: &View<'_, E>, at: Pair, round: fn(N) -> N) -> Row<N> {
        let w = self.similarity.of_queries().map(|w| (w, at.head));
        let mut row = Row::new(q.row(at.batch, at.head, at.row), w);
        if let Similarity::Additive(_) = self.similarity {
            row.projected.iter_mut().for_each(|x| *x = round(*x));
        }
        row
    }

    fn keys<N: Number>(&self, k: &View<'_, E>, round: fn(N) -> N) -> Keys<N> {
        let heads = self.dims().heads.kv;
        let all = (0..self.dims().batch).flat_map(|b| (0..heads).map(move |head| (b, head)));
        let of_head = |(b, head): (usize, usize)| {
            let w = self.similarity.of_keys().map(|w| (w, head));
            let keys = (0..self.k_len(b)).map(|key| Row::new(k.row(b, head, key), w));
            let rounded = keys.map(|mut row| {
                if w.is_some() {
                    row.projected.iter_mut().for_each(|x| *x = round(*x));
                }
                row
            });
            rounded.collect()
        };
        all.map(of_head).collect()
    }

    /// The keys that serve a query head.
    fn keys_of<'k, N>(&self, keys: &'k Keys<N>, at: Pair) -> &'k [Row<N>] {
        &keys[at.batch * self.dims().heads.kv + self.kv_head(at.head)]
    }

    fn similarity_of<N: Number>(&self, head: usize, q: &Row<N>, k: &Row<N>) -> N {
        let pairs = q.projected.iter().zip(&k.projected);
        match self.similarity {
            Similarity::Distance => -pairs.map(|(q, k)| (*q - *k) * (*q - *k)).sum::<N>(),
            Similarity::Additive(Additive { v, .. }) => {
                let v: Vec<N> = widened(matrix_row(v, head, 0));
                pairs.zip(v).map(|((q, k), v)| v * (*q + *k).tanh()).sum()
            }
            _ => dot(&q.projected, &k.projected),
        }
    }

    /// The keys that a row sees, with their scores.
    fn scores<N: Number>(
        &self,
        keys: &Keys<N>,
        q: &Row<N>,
        at: Pair,
        round: fn(N) -> N,
    ) -> Vec<(usize, Scored<N>)> {
        let scope = self.scope(at.batch, at.head);
        let keys = self.keys_of(keys, at);
        let seen = (0..scope.k_len).filter(|key| self.mask.sees(&scope, at.row, *key));
        let scored = seen.map(|key| {
            let similarity = round(self.similarity_of(at.head, q, &keys[key]));
            let steps = self.define(Pair { key, ..at }, similarity);
            (key, Scored { score: round(steps.score), ..steps })
        });
        let scored = scored.filter(|(_, steps)| steps.score != N::neg_infinity());
        self.chosen(at, scored.filter(|(key, _)| self.keeps(Pair { key: *key, ..at })).collect())
    }

    /// What a normaliser keeps of the scores of a row; those of a sparsemax become logarithms of weights.
    fn chosen<N: Number>(
        &self,
        at: Pair,
        mut scores: Vec<(usize, Scored<N>)>,
    ) -> Vec<(usize, Scored<N>)> {
        if self.bends() {
            let t = sparsemax_threshold(scores.iter().map(|(_, steps)| steps.score).collect());
            let above = |(key, steps): (usize, Scored<N>)| {
                let score = steps.score - t;
                (score > N::zero()).then(|| (key, Scored { score: score.ln(), ..steps }))
            };
            return scores.into_iter().filter_map(above).collect();
        }
        match self.normaliser {
            _ if self.kept.is_some() => {}
            Normaliser::TopK(_) | Normaliser::Hard => {
                // Stable: the earlier key first where scores are equal.
                scores.sort_by(|a, b| b.1.score.to_f64().total_cmp(&a.1.score.to_f64()));
                scores.truncate(self.normaliser.most(usize::MAX));
            }
            Normaliser::Sampled { seed } => {
                let softmax = self.softmax(at.head, &scores);
                let mut left = N::from_f64(uniform(seed, Pair { key: 0, ..at }));
                let drawn = scores.iter().position(|(_, steps)| {
                    left = left - softmax.weight(steps.score);
                    left < N::zero()
                });
                let last = scores.len().saturating_sub(1);
                let drawn = drawn.unwrap_or(last);
                scores = scores.into_iter().skip(drawn).take(1).collect();
            }
            _ => {}
        }
        scores
    }

    /// Whether scores become logarithms of the weights of a sparsemax.
    fn bends(&self) -> bool {
        self.normaliser == Normaliser::Sparsemax
    }

    /// The scores that a row's weights are made of.
    fn and_sink<N: Number>(
        &self,
        head: usize,
        scores: &[(usize, Scored<N>)],
    ) -> impl Iterator<Item = N> {
        let sink = self.score.sinks.map(|sinks| N::from_f64(sinks[head].to_f64()));
        scores.iter().map(|(_, s)| s.score).chain(sink)
    }

    /// The softmax over what a row sees and its sink.
    fn softmax<N: Number>(&self, head: usize, scores: &[(usize, Scored<N>)]) -> Softmax<N> {
        let all = || self.and_sink(head, scores);
        let m = all().fold(N::neg_infinity(), |a, b| if b.is_nan() { b } else { a.max(b) });
        Softmax { m, sum: all().map(|s| (s - m).exp()).sum() }
    }
}

/// The `t` above which the weights `score - t` sum to 1: with the scores in descending order, that of the longest start
/// whose mean, less 1 over its number, is below its last.
fn sparsemax_threshold<N: Number>(mut scores: Vec<N>) -> N {
    scores.sort_by(|a, b| Number::to_f64(*b).total_cmp(&Number::to_f64(*a)));
    let (mut sum, mut t) = (N::zero(), N::zero());
    for (i, score) in scores.into_iter().enumerate() {
        sum = sum + score;
        let next = (sum - N::one()) / N::of_len(i + 1);
        if score > next {
            t = next;
        }
    }
    t
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
#[inline(never)]
pub fn forward_in_steps<N: Number, E: Element>(
    problem: &Problem<'_, E>,
    (q, k, v): Inputs<'_, E>,
    round: fn(N) -> N,
) -> Outcome<N> {
    let (problem, dims) = (&problem.clone().with_local_mask(), problem.dims());
    let mut result = Outcome { out: Vec::new(), lse: Vec::new(), entropy: Vec::new() };
    let keys = problem.keys(&k, round);
    for (batch, head, row) in rows(problem) {
        let at = Pair { batch, head, row, key: 0 };
        let scores = problem.scores(&keys, &problem.query(&q, at, round), at, round);
        let softmax = problem.softmax(head, &scores);
        result.lse.push(softmax.lse());
        result.entropy.push(softmax.entropy(problem.and_sink(head, &scores)));
        let mut out = vec![N::zero(); dims.v_dim];
        for (key, steps) in scores {
            let a = round(softmax.weight(steps.score)) * problem.factor(Pair { key, ..at });
            let v = v.row(batch, problem.kv_head(head), key);
            for (out, v) in out.iter_mut().zip(v) {
                *out = *out + a * N::from_f64(v.widen().to_f64());
            }
        }
        result.out.extend(out.into_iter().map(round));
    }
    result
}

/// The keys that each row sees, with the scores that the normaliser makes weights of: rows as in [`Outcome`].
#[inline(never)]
pub fn scores<N: Number, E: Element>(
    problem: &Problem<'_, E>,
    (q, k, _): Inputs<'_, E>,
) -> Vec<Vec<(usize, N)>> {
    let soft = problem.soft().with_local_mask();
    let keys = soft.keys(&k, |x| x);
    let of_row = |(batch, head, row)| {
        let at = Pair { batch, head, row, key: 0 };
        let scores = soft.scores(&keys, &soft.query(&q, at, |x| x), at, |x: N| x);
        scores.into_iter().map(|(key, steps)| (key, steps.score)).collect()
    };
    rows(problem).map(of_row).collect()
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
#[inline(never)]
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
#[inline(never)]
pub fn backward_in_steps<N: Number, E: Element>(
    problem: &Problem<'_, E>,
    (q, k, v): Inputs<'_, E>,
    d: &Outcome<N>,
    round: fn(N) -> N,
) -> Grads<N> {
    let (problem, dims) = (&problem.clone().with_local_mask(), problem.dims());
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
        centres: zeros(problem.local.map_or(0, |_| problem.rows())),
        w: match problem.similarity {
            Similarity::General(w) => zeros(w.shape().to_array().iter().product()),
            _ => Vec::new(),
        },
        additive: match problem.similarity {
            Similarity::Additive(Additive { w_q, w_k, v }) => {
                let size = |w: View<'_, E>| zeros(w.shape().to_array().iter().product());
                [size(w_q), w_k.map_or_else(Vec::new, size), size(v)]
            }
            _ => Default::default(),
        },
        ..Grads::default()
    };
    let keys = problem.keys(&k, round);
    let hidden = problem.similarity.hidden();
    let mut d_hidden = Hidden { q: zeros(hidden), keys: zeros(kv * hidden) };
    for (r, (batch, head, row)) in rows(problem).enumerate() {
        let at = Pair { batch, head, row, key: 0 };
        let query = problem.query(&q, at, round);
        let scores = problem.scores(&keys, &query, at, round);
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
            let z = problem.factor::<N>(Pair { key, ..at });
            let v: Vec<N> = widened(v.row(batch, kv_head, key));
            for (d_v, d_out) in g.v[kv_row(key) * dims.v_dim..][..dims.v_dim].iter_mut().zip(d_out)
            {
                *d_v = *d_v + z * a * *d_out;
            }
            weights.push((key, steps, a, round(z * dot(d_out, &v))));
        }
        // a_ij = e^(score_ij - lse_i), lse_i itself, and H_i
        let mean: N = if problem.bends() {
            // score -> score - t, and t moves with all that are above it
            weights.iter().map(|(_, _, _, d_a)| *d_a).sum::<N>() / N::of_len(weights.len())
        } else {
            weights.iter().map(|(_, _, a, d_a)| *a * *d_a).sum()
        };
        let d_score = |score: N, a: N, d_a: N| {
            let fall = if a == N::zero() { N::zero() } else { softmax.log(score) + entropy };
            a * (d_a - mean + d.lse[r] - d.entropy[r] * fall)
        };
        if let Some(sinks) = score.sinks {
            let sink = N::from_f64(sinks[head].to_f64());
            g.sinks[head] = g.sinks[head] + d_score(sink, softmax.weight(sink), N::zero());
        }
        for (key, steps, a, d_a) in weights {
            let at = Pair { key, ..at };
            if let Some(factor) = problem.centre_grad_factor() {
                // z = e^(-(key - p)^2 / (2 s^2))
                let by_centre = problem.beyond_centre::<N>(at) * N::from_f64(factor);
                g.centres[r] = g.centres[r] + a * d_a * by_centre;
            }
            // ln(score - t)
            let bent = if problem.bends() { (-steps.score).exp() } else { N::one() };
            g.size = g.size.max(bent * a * (d_a.abs() + mean.abs()));
            let d_score = round(bent * d_score(steps.score, a, d_a));
            let (by_scaled, by_bias) = score.slope(at, steps);
            g.add_to_options(problem, at, d_score * by_bias);
            // scaled = similarity * scale
            let d_scaled = d_score * by_scaled;
            let scale = N::from_f64(problem.scale());
            let k = &problem.keys_of(&keys, at)[key];
            g.scale = g.scale + d_scaled * problem.similarity_of(head, &query, k);
            let (at, d) = ((r, kv_row(key)), d_scaled * scale);
            g.add_to_similarity(problem, at, head, (&query, k), d, &mut d_hidden);
        }
        if let Similarity::Additive(Additive { w_q, .. }) = problem.similarity {
            let d_q = &mut g.q[r * dims.q_dim..][..dims.q_dim];
            undo_projection((w_q, head), &query, &d_hidden.q, d_q, &mut g.additive[0]);
            d_hidden.q.fill(N::zero());
        }
    }
    if let Some(w_k) = problem.similarity.of_keys() {
        for (row, d) in d_hidden.keys.chunks_exact(hidden).enumerate() {
            let (item, key) = (row / dims.k_len, row % dims.k_len);
            let d_k = &mut g.k[row * dims.qk_dim..][..dims.qk_dim];
            let w = (w_k, item % dims.heads.kv);
            undo_projection(w, &keys[item][key], d, d_k, &mut g.additive[1]);
        }
    } else if hidden > 0 {
        g.k = d_hidden.keys;
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

    /// similarity = q . k, or q^T W k, or -|q - k|^2, or v^T tanh(W_q^T q + W_k^T k)
    fn add_to_similarity<E: Element>(
        &mut self,
        problem: &Problem<'_, E>,
        (q_row, k_row): (usize, usize),
        head: usize,
        (query, key): (&Row<N>, &Row<N>),
        d: N,
        hidden: &mut Hidden<N>,
    ) {
        let dims = problem.dims();
        let d_q = &mut self.q[q_row * dims.q_dim..][..dims.q_dim];
        let d_k = &mut self.k[k_row * dims.qk_dim..][..dims.qk_dim];
        let (q, k) = (&query.given, &key.given);
        match problem.similarity {
            Similarity::Dot => {
                for (i, k) in k.iter().enumerate() {
                    d_q[i] = d_q[i] + d * *k;
                    d_k[i] = d_k[i] + d * q[i];
                }
            }
            Similarity::Distance => {
                let two = N::one() + N::one();
                for (i, k) in k.iter().enumerate() {
                    let difference = q[i] - *k;
                    d_q[i] = d_q[i] - d * two * difference;
                    d_k[i] = d_k[i] + d * two * difference;
                }
            }
            Similarity::General(w) => {
                let of_head = serving(head, w.shape().heads);
                for (i, d_q) in d_q.iter_mut().enumerate() {
                    *d_q = *d_q + d * dot(&widened(matrix_row(w, head, i)), k);
                    let d_w = &mut self.w[(of_head * dims.q_dim + i) * dims.qk_dim..];
                    for (d_w, k) in d_w.iter_mut().zip(k) {
                        *d_w = *d_w + d * q[i] * *k;
                    }
                }
                for (d_k, projected) in d_k.iter_mut().zip(&query.projected) {
                    *d_k = *d_k + d * *projected;
                }
            }
            Similarity::Additive(Additive { v, .. }) => {
                let units = v.shape().dim;
                let d_v = &mut self.additive[2][serving(head, v.shape().heads) * units..];
                let v: Vec<N> = widened(matrix_row(v, head, 0));
                for (i, v) in v.into_iter().enumerate() {
                    let t = (query.projected[i] + key.projected[i]).tanh();
                    d_v[i] = d_v[i] + d * t;
                    let slope = d * v * (N::one() - t * t);
                    hidden.q[i] = hidden.q[i] + slope;
                    let d_k = &mut hidden.keys[k_row * units + i];
                    *d_k = *d_k + slope;
                }
            }
        }
    }
}

/// Gradients by what goes into the hidden layer of an additive similarity.
struct Hidden<N> {
    /// By the projected query of this row.
    q: Vec<N>,
    /// By all projected keys.
    keys: Vec<N>,
}

/// projected = W^T x
fn undo_projection<N: Number, E: Element>(
    (w, head): (View<'_, E>, usize),
    x: &Row<N>,
    d: &[N],
    d_x: &mut [N],
    d_w: &mut [N],
) {
    if d.iter().all(|d| *d == N::zero()) {
        return; // nobody saw it: it may hold anything
    }
    let first = serving(head, w.shape().heads) * d_x.len();
    for (i, (d_x, x)) in d_x.iter_mut().zip(&x.given).enumerate() {
        *d_x = *d_x + dot(&widened(matrix_row(w, head, i)), d);
        for (d_w, d) in d_w[(first + i) * d.len()..].iter_mut().zip(d) {
            *d_w = *d_w + *x * *d;
        }
    }
}
