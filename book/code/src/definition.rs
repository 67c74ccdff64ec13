//! Attention as it is defined: score, scale, softmax, weighted sum.
//!
//! Cost: `2 q_len k_len (dim + v_dim)` flops, and a matrix of `q_len k_len` numbers.

use crate::{AttentionOutput, Head, add_times, dot};

// ANCHOR: attend
/// Attention, with the matrix of weights in memory.
#[must_use]
pub fn attend(head: &Head<'_>) -> AttentionOutput {
    let (weights, lse) = weights(head);
    let mut out = vec![0.0; head.q_len() * head.v_dim];
    for (i, out) in out.chunks_exact_mut(head.v_dim).enumerate() {
        // 4: the mean of the values, by the weights of the row
        for j in 0..head.visible(i) {
            add_times(out, weights[i * head.k_len() + j], head.value(j));
        }
    }
    AttentionOutput { out, lse }
}

/// The matrix of weights `[q_len, k_len]`, 0 where a query does not see a key, and the lse of each row.
#[must_use]
pub fn weights(head: &Head<'_>) -> (Vec<f32>, Vec<f32>) {
    let mut weights = vec![0.0; head.q_len() * head.k_len()];
    let rows = (0..head.q_len()).map(|i| {
        let row = &mut weights[i * head.k_len()..][..head.visible(i)];
        // 1, 2: the similarity of the query with each key, times the scale
        for (j, x) in row.iter_mut().enumerate() {
            *x = dot(head.query(i), head.key(j)) * head.scale();
        }
        // 3: the softmax; with the largest score subtracted no power overflows
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        row.iter_mut().for_each(|x| *x = (*x - max).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|x| *x /= sum);
        max + sum.ln()
    });
    let lse = rows.collect();
    (weights, lse)
}
// ANCHOR_END: attend
