//! Reference backward pass, derived by hand from the formulas of the forward pass.

use super::{Keys, Outcome, Row, dot, matrix_row, rows, widened};
use crate::description::problem::Problem;
use crate::description::similarity::{Additive, Similarity};
use crate::machine::simd::{Element, Number};
use crate::tensor::index::Pair;
use crate::tensor::view::{Inputs, View, serving};

/// Gradients of a loss with respect to every input and option of attention. Vectors of unused options are empty.
#[derive(Clone, Debug, Default)]
pub struct Grads<N> {
    /// `[batch, heads.q, q_len, q_dim]`
    pub q: Vec<N>,
    /// `[batch, heads.kv, k_len, qk_dim]`
    pub k: Vec<N>,
    /// `[batch, heads.kv, k_len, v_dim]`
    pub v: Vec<N>,
    /// Gradient of the effective scale, that is, the scale after division by the temperature.
    pub scale: N,
    /// Gradient of the temperature.
    pub temperature: N,
    /// Gradient of the dense bias, in the bias's own broadcast shape.
    pub bias: Vec<N>,
    /// Gradient of the ALiBi slopes, `[heads.q]`.
    pub alibi: Vec<N>,
    /// Gradient of the relative bias, `[buckets, heads.q]`.
    pub relative: Vec<N>,
    /// Gradient of the sinks, `[heads.q]`.
    pub sinks: Vec<N>,
    /// Gradient of the window centers of local attention, `[batch, heads.q, q_len]`.
    pub centers: Vec<N>,
    /// Gradient of `W` of `Similarity::General`, `[1, heads.q or 1, q_dim, qk_dim]`.
    pub w: Vec<N>,
    /// Gradients of `w_q`, `w_k` and `v` of `Similarity::Additive`, each in its own shape.
    pub additive: [Vec<N>; 3],
    /// Largest `a (|d_a| + |row mean of d_a|)` over all pairs. A score gradient is the difference of two terms of this
    /// size, so its rounding error is relative to `size`, however small the difference is.
    pub size: N,
}

/// Gradients of `sum(out * d.out) + sum(lse * d.lse) + sum(entropy * d.entropy)`, computed from the definition.
///
/// Each step differentiates one step of [`forward`](super::forward). `out_i = sum_j z_ij a_ij v_j` gives `d_v` and `d_a`.
/// The softmax gives `d_score_ij = a_ij (d_a_ij - sum_j a_ij d_a_ij + d_lse_i - d_H_i (ln a_ij + H_i))`. The score
/// derivatives propagate `d_score` to the similarity and to the score options, and the similarity propagates it to q, k and
/// W.
pub fn backward<N: Number, E: Element>(
    problem: &Problem<'_, E>,
    inputs: Inputs<'_, E>,
    d: &Outcome<N>,
) -> Grads<N> {
    backward_in_steps(problem, inputs, d, |x| x)
}

/// [`backward`] with intermediate results rounded: see [`forward_in_steps`](super::forward_in_steps).
#[inline(never)]
pub fn backward_in_steps<N: Number, E: Element>(
    problem: &Problem<'_, E>,
    (q, k, v): Inputs<'_, E>,
    d: &Outcome<N>,
    round: fn(N) -> N,
) -> Grads<N> {
    let (problem, dims) = (&problem.clone().with_local_mask(), problem.dims());
    let (score, mut g) = (&problem.score, Grads::<N>::zeros(problem));
    let keys = problem.keys(&k, round);
    let hidden = problem.similarity.hidden();
    let kv = dims.batch * dims.heads.kv * dims.k_len;
    let mut d_hidden = Hidden { q: vec![N::zero(); hidden], keys: vec![N::zero(); kv * hidden] };
    for (r, (batch, head, row)) in rows(problem).enumerate() {
        let at = Pair { batch, head, row, key: 0 };
        let query = problem.query(&q, at, round);
        let scores = problem.scores(&keys, &query, at, round);
        let softmax = problem.softmax(head, &scores);
        if softmax.saw_nothing() {
            continue; // fully masked row: all its gradients are 0
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
        // a_ij = e^(score_ij - lse_i), lse_i and H_i
        let mean: N = if problem.bends() {
            // Sparsemax: a = score - t, where t depends on all scores in the support.
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
                let by_center = problem.beyond_center::<N>(at) * N::from_f64(factor);
                g.centers[r] = g.centers[r] + a * d_a * by_center;
            }
            // Sparsemax replaces the score by ln(score - t), whose derivative is 1 / (score - t).
            let bent = if problem.bends() { (-steps.score).exp() } else { N::one() };
            g.size = g.size.max(bent * a * (d_a.abs() + mean.abs()));
            let d_score = round(bent * d_score(steps.score, a, d_a));
            let (by_scaled, by_bias) = score.derivative(at, steps);
            g.add_to_options(problem, at, d_score * by_bias);
            // scaled = similarity * scale
            let d_scaled = d_score * by_scaled;
            let scale = N::from_f64(problem.scale());
            let k = &problem.keys_of(&keys, at)[key];
            g.scale = g.scale + d_scaled * problem.similarity_of(head, &query, k);
            let pair = PairRows { head, q_row: r, query: &query, k_row: kv_row(key), key: k };
            g.add_to_similarity(problem, pair, d_scaled * scale, &mut d_hidden);
        }
        g.query_projection_backward(problem, (r, head), &query, &mut d_hidden.q);
    }
    g.key_projection_backward(problem, &keys, d_hidden.keys);
    g.finish(problem, round);
    g
}

impl<N: Number> Grads<N> {
    fn zeros<E: Element>(problem: &Problem<'_, E>) -> Self {
        let (dims, score) = (problem.dims(), &problem.score);
        let zeros = |n: usize| vec![N::zero(); n];
        let size = |w: View<'_, E>| zeros(w.shape().to_array().iter().product());
        let kv = dims.batch * dims.heads.kv * dims.k_len;
        Self {
            q: zeros(dims.batch * dims.heads.q * dims.q_len * dims.q_dim),
            k: zeros(kv * dims.qk_dim),
            v: zeros(kv * dims.v_dim),
            bias: score.bias.map_or_else(Vec::new, size),
            alibi: zeros(score.alibi.map_or(0, <[_]>::len)),
            relative: zeros(score.relative.as_ref().map_or(0, |r| r.table().len())),
            sinks: zeros(score.sinks.map_or(0, <[_]>::len)),
            centers: zeros(problem.local.map_or(0, |_| problem.rows())),
            w: match problem.similarity {
                Similarity::General(w) => size(w),
                _ => Vec::new(),
            },
            additive: match problem.similarity {
                Similarity::Additive(Additive { w_q, w_k, v }) => {
                    [size(w_q), w_k.map_or_else(Vec::new, size), size(v)]
                }
                _ => Default::default(),
            },
            ..Self::default()
        }
    }

    /// Backward pass of the query projection: adds the gradients of the query and of `w_q`, then resets `d_projected` to 0.
    fn query_projection_backward<E: Element>(
        &mut self,
        problem: &Problem<'_, E>,
        (row, head): (usize, usize),
        query: &Row<N>,
        d_projected: &mut [N],
    ) {
        let q_dim = problem.dims().q_dim;
        if let Similarity::Additive(Additive { w_q, .. }) = problem.similarity {
            let d_q = &mut self.q[row * q_dim..][..q_dim];
            projection_backward((w_q, head), query, d_projected, d_q, &mut self.additive[0]);
            d_projected.fill(N::zero());
        }
    }

    /// Rounds the gradients of q, k and v, and derives the temperature gradient from the scale gradient.
    fn finish<E: Element>(&mut self, problem: &Problem<'_, E>, round: fn(N) -> N) {
        for grad in [&mut self.q, &mut self.k, &mut self.v] {
            grad.iter_mut().for_each(|x| *x = round(*x));
        }
        // scale = given / temperature
        let factor = problem.scale() / problem.score.temperature;
        self.temperature = -self.scale * N::from_f64(factor);
    }

    /// Backward pass of the key projection: adds the gradients of the keys and of `w_k`.
    fn key_projection_backward<E: Element>(
        &mut self,
        problem: &Problem<'_, E>,
        keys: &Keys<N>,
        d_projected: Vec<N>,
    ) {
        let (dims, hidden) = (problem.dims(), problem.similarity.hidden());
        let Some(w_k) = problem.similarity.of_keys() else {
            if hidden > 0 {
                self.k = d_projected;
            }
            return;
        };
        for (row, d) in d_projected.chunks_exact(hidden).enumerate() {
            let (item, key) = (row / dims.k_len, row % dims.k_len);
            let d_k = &mut self.k[row * dims.qk_dim..][..dims.qk_dim];
            let w = (w_k, item % dims.heads.kv);
            projection_backward(w, &keys[item][key], d, d_k, &mut self.additive[1]);
        }
    }

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
        pair: PairRows<'_, N>,
        d: N,
        hidden: &mut Hidden<N>,
    ) {
        let PairRows { head, q_row, query, k_row, key } = pair;
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
                    let derivative = d * v * (N::one() - t * t);
                    hidden.q[i] = hidden.q[i] + derivative;
                    let d_k = &mut hidden.keys[k_row * units + i];
                    *d_k = *d_k + derivative;
                }
            }
        }
    }
}

/// A query and a key of one head: their features, and their rows among all queries and among all keys.
struct PairRows<'r, N> {
    head: usize,
    q_row: usize,
    query: &'r Row<N>,
    k_row: usize,
    key: &'r Row<N>,
}

/// Gradients of the inputs of the hidden layer of an additive similarity (Bahdanau et al. 2015).
struct Hidden<N> {
    /// Gradient of the projected query of the current row.
    q: Vec<N>,
    /// Gradients of all projected keys.
    keys: Vec<N>,
}

/// Backward pass of `projected = W^T x`.
fn projection_backward<N: Number, E: Element>(
    (w, head): (View<'_, E>, usize),
    x: &Row<N>,
    d: &[N],
    d_x: &mut [N],
    d_w: &mut [N],
) {
    if d.iter().all(|d| *d == N::zero()) {
        return; // masked row: skipped because `x` may hold NaN or infinity
    }
    let first = serving(head, w.shape().heads) * d_x.len();
    for (i, (d_x, x)) in d_x.iter_mut().zip(&x.given).enumerate() {
        *d_x = *d_x + dot(&widened(matrix_row(w, head, i)), d);
        for (d_w, d) in d_w[(first + i) * d.len()..].iter_mut().zip(d) {
            *d_w = *d_w + *x * *d;
        }
    }
}
