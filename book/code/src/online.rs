//! The softmax in one pass (Milakov and Gimelshein 2018): weights are used the moment they are made.
//!
//! Cost: the flops of the definition, and `v_dim + 2` numbers for the row at hand.

use crate::{AttentionOutput, Head, add_times, dot};

// ANCHOR: partial
/// What must be remembered of the keys that a row has met so far.
#[derive(Clone, Debug, PartialEq)]
pub struct Partial {
    /// The sum of `e^(score - max) value`, `[v_dim]`
    pub out: Vec<f32>,
    /// The largest score. The lowest number before there is one, so that `max - max` is 0 and never NaN.
    pub max: f32,
    /// The sum of `e^(score - max)`
    pub sum: f32,
}

impl Partial {
    /// Of a row that has met no key.
    #[must_use]
    pub fn nothing_seen(v_dim: usize) -> Self {
        Self { out: vec![0.0; v_dim], max: f32::MIN, sum: 0.0 }
    }

    /// One more key.
    pub fn add(&mut self, score: f32, value: &[f32]) {
        if score > self.max {
            self.shrink_to(score);
        }
        let weight = (score - self.max).exp();
        self.sum += weight;
        add_times(&mut self.out, weight, value);
    }

    /// What was added relative to one maximum becomes relative to a larger one.
    pub fn shrink_to(&mut self, max: f32) {
        let shrink = (self.max - max).exp();
        self.max = max;
        self.sum *= shrink;
        self.out.iter_mut().for_each(|x| *x *= shrink);
    }

    /// Divides by the sum, which nobody knew before the last key, and gives the row's lse.
    pub fn finish(self, out: &mut [f32]) -> f32 {
        if self.sum != 0.0 {
            out.iter_mut().zip(self.out).for_each(|(to, x)| *to = x / self.sum);
        }
        self.max + self.sum.ln()
    }
}
// ANCHOR_END: partial

// ANCHOR: merge
impl Partial {
    /// The same row over the keys of both.
    #[must_use]
    pub fn merge(mut self, mut other: Self) -> Self {
        let max = self.max.max(other.max);
        self.shrink_to(max);
        other.shrink_to(max);
        self.sum += other.sum;
        add_times(&mut self.out, 1.0, &other.out);
        self
    }
}
// ANCHOR_END: merge

// ANCHOR: attend
/// Attention, row by row, each in one pass over its keys.
#[must_use]
pub fn attend(head: &Head<'_>) -> AttentionOutput {
    let mut out = vec![0.0; head.q_len() * head.v_dim];
    let rows = out.chunks_exact_mut(head.v_dim).enumerate().map(|(i, out)| {
        let mut row = Partial::nothing_seen(head.v_dim);
        for j in 0..head.visible(i) {
            row.add(dot(head.query(i), head.key(j)) * head.scale(), head.value(j));
        }
        row.finish(out)
    });
    let lse = rows.collect();
    AttentionOutput { out, lse }
}
// ANCHOR_END: attend
