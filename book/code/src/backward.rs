//! The gradients of attention, by hand: with the matrix of weights, and without it.
//!
//! A loss says how it changes with the output, `d_out`. Each function says how it changes with queries, keys and values.
//!
//! Cost: `2 q_len k_len (3 dim + 2 v_dim)` flops: the similarities once more, and four products.

use crate::definition::weights;
use crate::{AttentionOutput, Head, add_times, dot};

/// The gradients of a loss.
#[derive(Clone, Debug, PartialEq)]
pub struct Grads {
    /// By the queries, `[q_len, dim]`
    pub q: Vec<f32>,
    /// By the keys, `[k_len, dim]`
    pub k: Vec<f32>,
    /// By the values, `[k_len, v_dim]`
    pub v: Vec<f32>,
}

impl Grads {
    fn zeros(head: &Head<'_>) -> Self {
        let zeros = |x: &[f32]| vec![0.0; x.len()];
        Self { q: zeros(head.q), k: zeros(head.k), v: zeros(head.v) }
    }
}

// ANCHOR: plain
/// The gradients from the matrix of weights: each step of forward undone, the last one first.
#[must_use]
pub fn plain(head: &Head<'_>, d_out: &[f32]) -> Grads {
    let (weights, _) = weights(head);
    let mut grads = Grads::zeros(head);
    for (i, d_out) in d_out.chunks_exact(head.v_dim).enumerate() {
        let a = &weights[i * head.k_len()..][..head.visible(i)];
        // out_i = sum_j a_ij v_j
        let d_a: Vec<f32> = (0..a.len()).map(|j| dot(d_out, head.value(j))).collect();
        for (j, a) in a.iter().enumerate() {
            add_times(&mut grads.v[j * head.v_dim..][..head.v_dim], *a, d_out);
        }
        // a_ij = e^score_ij / sum_j e^score_ij
        let mean = dot(a, &d_a);
        for (j, (a, d_a)) in a.iter().zip(d_a).enumerate() {
            let d_score = a * (d_a - mean);
            // score_ij = scale q_i . k_j
            let d = d_score * head.scale();
            add_times(&mut grads.q[i * head.dim..][..head.dim], d, head.key(j));
            add_times(&mut grads.k[j * head.dim..][..head.dim], d, head.query(i));
        }
    }
    grads
}
// ANCHOR_END: plain

// ANCHOR: recompute
/// The same from what forward gave: a weight is made again where it is needed, and nothing of size `q_len k_len` exists.
#[must_use]
pub fn recompute(head: &Head<'_>, attended: &AttentionOutput, d_out: &[f32]) -> Grads {
    let mut grads = Grads::zeros(head);
    let rows = attended.out.chunks_exact(head.v_dim).zip(d_out.chunks_exact(head.v_dim));
    for (i, ((out, d_out), lse)) in rows.zip(&attended.lse).enumerate() {
        // sum_j a_ij d_a_ij = d_out_i . (sum_j a_ij v_j): the mean is known before the first key
        let mean = dot(d_out, out);
        for j in 0..head.visible(i) {
            let a = (dot(head.query(i), head.key(j)) * head.scale() - lse).exp();
            add_times(&mut grads.v[j * head.v_dim..][..head.v_dim], a, d_out);
            let d_score = a * (dot(d_out, head.value(j)) - mean);
            let d = d_score * head.scale();
            add_times(&mut grads.q[i * head.dim..][..head.dim], d, head.key(j));
            add_times(&mut grads.k[j * head.dim..][..head.dim], d, head.query(i));
        }
    }
    grads
}
// ANCHOR_END: recompute
