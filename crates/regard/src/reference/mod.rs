//! Reference implementation of attention and of its backward pass. Read this first: it defines what the engine computes.
//!
//! It evaluates one pair of query and key at a time, without tiles or threads, and recomputes whatever it can instead of
//! storing it. In `f64` it is the ground truth of all tests; in `f32` it is the plain evaluation whose error the kernels
//! are compared with.
//!
//! For query `i` and its visible keys `j`:
//!
//! ```text
//! score_ij = score(similarity(q_i, k_j))              scale, softcap, biases
//! lse_i    = ln( sum_j e^score_ij  +  e^sink )        the sink, if there is one, has no value
//! a_ij     = e^(score_ij - lse_i)                     the weights
//! out_i    = sum_j z_ij a_ij v_j                      z: 1, or what dropout and local attention make of it
//! H_i      = -sum_j a_ij ln a_ij                      the entropy, the sink counted as one of the keys
//! ```
//! The largest score is subtracted before any exponential, so that none overflows. A score of `-inf` masks its pair. A
//! fully masked row has `out = 0`, `lse = -inf` (with a sink: `lse = sink`) and `H = 0`.

mod backward;
mod steps;
mod weights;

use crate::description::dropout::uniform;
use crate::description::normalizer::Normalizer;
use crate::description::problem::Problem;
use crate::description::score::Scored;
use crate::description::similarity::{Additive, Similarity};
use crate::machine::simd::{Element, Number};
use crate::rope::{Positions, Rope};
use crate::tensor::index::Pair;
pub use crate::tensor::view::Inputs;
use crate::tensor::view::{Shape, View, serving};
pub use backward::{Grads, backward, backward_in_steps};
pub use steps::{Steps, steps};
pub use weights::{RowWeights, weights};

/// Result of the reference forward pass: dense tensors `[batch, heads.q, q_len, ...]`. Packed items follow one another.
#[derive(Clone, Debug)]
pub struct Outcome<N> {
    /// `[batch, heads.q, q_len, v_dim]`
    pub out: Vec<N>,
    /// `[batch, heads.q, q_len]`
    pub lse: Vec<N>,
    /// `[batch, heads.q, q_len]`
    pub entropy: Vec<N>,
    /// Largest score of each row, `[batch, heads.q, q_len]`
    pub max_score: Vec<N>,
}

fn dot<N: Number>(a: &[N], b: &[N]) -> N {
    a.iter().zip(b).map(|(a, b)| *a * *b).sum()
}

/// A query or a key, widened to `N`, and its projection.
struct Row<N> {
    given: Vec<N>,
    /// `W^T given` if the similarity has a `W` for this side, otherwise a copy of `given`.
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

/// Row `i` of the matrix of a head; a matrix with one head is shared by all heads.
fn matrix_row<'a, E: Element>(w: View<'a, E>, head: usize, i: usize) -> &'a [E] {
    w.row(0, serving(head, w.shape().heads), i)
}

/// Keys of all heads, `[batch, heads.kv, k_len]`, with the first two axes flattened.
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

    /// Keys of the KV head that a query head uses.
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

    /// Visible keys of a row with their scores, after the selection of the normalizer.
    fn scores<N: Number>(
        &self,
        keys: &Keys<N>,
        q: &Row<N>,
        at: Pair,
        round: fn(N) -> N,
    ) -> Vec<(usize, Scored<N>)> {
        let scope = self.scope(at.batch, at.head);
        let keys = self.keys_of(keys, at);
        let visible = (0..scope.k_len).filter(|key| self.mask.is_visible(&scope, at.row, *key));
        let scored = visible.map(|key| {
            let similarity = round(self.similarity_of(at.head, q, &keys[key]));
            let steps = self.define(Pair { key, ..at }, similarity);
            (key, Scored { score: round(steps.score), ..steps })
        });
        let scored = scored.filter(|(_, steps)| steps.score != N::neg_infinity());
        self.chosen(at, scored.filter(|(key, _)| self.keeps(Pair { key: *key, ..at })).collect())
    }

    /// Applies the selection of the normalizer to the scores of a row. Sparsemax scores become logarithms of weights, so
    /// that the softmax that follows reproduces the weights.
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
        match self.normalizer {
            _ if self.selection.is_some() => {}
            Normalizer::TopK(_) | Normalizer::Hard => {
                // Stable sort: of equal scores, the earlier key comes first.
                scores.sort_by(|a, b| b.1.score.to_f64().total_cmp(&a.1.score.to_f64()));
                scores.truncate(self.normalizer.most(usize::MAX));
            }
            Normalizer::Sampled { seed } => {
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

    /// Whether scores are replaced by logarithms of sparsemax weights.
    fn bends(&self) -> bool {
        self.normalizer == Normalizer::Sparsemax
    }

    /// Scores of the visible keys, followed by the score of the sink, if any.
    fn and_sink<N: Number>(
        &self,
        head: usize,
        scores: &[(usize, Scored<N>)],
    ) -> impl Iterator<Item = N> {
        let sink = self.score.sinks.map(|sinks| N::from_f64(sinks[head].to_f64()));
        scores.iter().map(|(_, s)| s.score).chain(sink)
    }

    /// Softmax statistics over the visible keys and the sink.
    fn softmax<N: Number>(&self, head: usize, scores: &[(usize, Scored<N>)]) -> Softmax<N> {
        let all = || self.and_sink(head, scores);
        let m = all().fold(N::neg_infinity(), |a, b| if b.is_nan() { b } else { a.max(b) });
        Softmax { m, sum: all().map(|s| (s - m).exp()).sum() }
    }
}

/// Threshold `t` of sparsemax (Martins and Astudillo 2016): the weights `max(score - t, 0)` sum to 1. With the scores in
/// descending order, the support is the longest prefix whose last score exceeds
/// `(sum of the prefix - 1) / (length of the prefix)`, and `t` is that quotient.
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

/// Row maximum `m`, and the sum of `e^(score - m)`.
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

    /// Entropy `-sum_j a_j ln a_j`.
    fn entropy(&self, scores: impl Iterator<Item = N>) -> N {
        let terms = scores.map(|s| (self.weight(s), self.log(s))).filter(|(a, _)| *a != N::zero());
        if self.saw_nothing() { N::zero() } else { -terms.map(|(a, log)| a * log).sum::<N>() }
    }
}

fn widened<N: Number, E: Element>(row: &[E]) -> Vec<N> {
    row.iter().map(|x| N::from_f64(x.widen().to_f64())).collect()
}

/// Reference forward pass.
pub fn forward<N: Number, E: Element>(
    problem: &Problem<'_, E>,
    inputs: Inputs<'_, E>,
) -> Outcome<N> {
    forward_in_steps(problem, inputs, |x| x)
}

/// [`forward`] with similarities, scores, weights and outputs rounded by `round`, as separate tensor operations in a
/// narrower dtype round what they store. For half-precision dtypes the kernels are compared with this.
#[inline(never)]
pub fn forward_in_steps<N: Number, E: Element>(
    problem: &Problem<'_, E>,
    (q, k, v): Inputs<'_, E>,
    round: fn(N) -> N,
) -> Outcome<N> {
    let (problem, dims) = (&problem.clone().with_local_mask(), problem.dims());
    let [out, lse, entropy, max_score] = [const { Vec::new() }; 4];
    let mut result = Outcome { out, lse, entropy, max_score };
    let keys = problem.keys(&k, round);
    for (batch, head, row) in rows(problem) {
        let at = Pair { batch, head, row, key: 0 };
        let scores = problem.scores(&keys, &problem.query(&q, at, round), at, round);
        let softmax = problem.softmax(head, &scores);
        result.lse.push(softmax.lse());
        result.entropy.push(softmax.entropy(problem.and_sink(head, &scores)));
        let all = scores.iter().map(|(_, steps)| steps.score);
        // `max` alone would drop a NaN.
        let larger = |a: N, b: N| if a.is_nan() || b.is_nan() { a + b } else { a.max(b) };
        result.max_score.push(all.fold(N::neg_infinity(), larger));
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

/// Visible keys of each row with the scores that the normalizer takes as input. Rows are ordered as in [`Outcome`].
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

/// All triples `(batch, head, row)`, in order.
fn rows<E: Element>(
    problem: &Problem<'_, E>,
) -> impl Iterator<Item = (usize, usize, usize)> + use<E> {
    let dims = problem.dims();
    // Packed items differ in their number of rows.
    let lens: Vec<usize> = (0..dims.batch).map(|b| problem.q_len(b)).collect();
    lens.into_iter().enumerate().flat_map(move |(b, len)| {
        (0..dims.heads.q).flat_map(move |h| (0..len).map(move |i| (b, h, i)))
    })
}

/// Rotary position embedding (RoPE, Su et al. 2021) of `x [batch, heads, len, features]`, as a dense tensor: features `a`
/// and `b` of a pair become `a cos t - b sin t` and `a sin t + b cos t`, where `t` is the position of the row times the
/// frequency of the pair.
///
/// # Panics
/// If `rope` or `positions` do not fit `x`: see [`Rope::apply`].
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
