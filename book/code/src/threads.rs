//! Groups of rows go to threads.

use crate::lanes::{ROWS, attend_rows};
use crate::{AttentionOutput, Head};
use rayon::prelude::*;

// ANCHOR: attend
/// Attention on all threads of the pool that it is called in: the same bits for any number of them.
#[must_use]
pub fn attend(head: &Head<'_>) -> AttentionOutput {
    let q_len = head.q_len();
    let mut attended =
        AttentionOutput { out: vec![0.0; q_len * head.v_dim], lse: vec![0.0; q_len] };
    let outs = attended.out.par_chunks_mut(ROWS * head.v_dim);
    let tasks = outs.zip(attended.lse.par_chunks_mut(ROWS)).enumerate();
    tasks.for_each(|(i, (out, lse))| attend_rows(head, i * ROWS, out, lse));
    attended
}
// ANCHOR_END: attend
