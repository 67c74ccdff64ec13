//! The same sums in another order: a group of rows meets a tile of keys while the tile is in the cache.
//!
//! Cost: the flops of the definition; keys and values come from memory once for each group of rows, not for each row.

use crate::online::Partial;
use crate::{AttentionOutput, Head, dot};
use std::ops::Range;

// ANCHOR: attend
/// Rows that meet a tile before the next one comes.
pub const ROWS: usize = 64;
/// Keys of a tile: of 64 features each, 16 KiB of keys and 16 KiB of values, in a first-level cache of 48 KiB.
pub const KEYS: usize = 64;

/// Attention, a tile of keys at a time.
#[must_use]
pub fn attend(head: &Head<'_>) -> AttentionOutput {
    let mut out = vec![0.0; head.q_len() * head.v_dim];
    let mut lse = Vec::with_capacity(head.q_len());
    for (group, out) in out.chunks_mut(ROWS * head.v_dim).enumerate() {
        let (first, count) = (group * ROWS, out.len() / head.v_dim);
        let mut rows = vec![Partial::nothing_seen(head.v_dim); count];
        // Tiles that lie behind all that the last row sees are never met.
        for tile in (0..head.visible(first + count - 1)).step_by(KEYS) {
            for (i, row) in rows.iter_mut().enumerate() {
                let seen = head.visible(first + i).min(tile + KEYS);
                meet(head, first + i, row, tile..seen);
            }
        }
        let outs = out.chunks_exact_mut(head.v_dim);
        lse.extend(rows.into_iter().zip(outs).map(|(row, out)| row.finish(out)));
    }
    AttentionOutput { out, lse }
}

/// One row, and the keys of a tile that it sees. The maximum moves at most once for the tile, not once for each key.
fn meet(head: &Head<'_>, i: usize, row: &mut Partial, keys: Range<usize>) {
    let mut scores = [0.0; KEYS];
    let mut max = row.max;
    for (score, j) in scores.iter_mut().zip(keys.clone()) {
        *score = dot(head.query(i), head.key(j)) * head.scale();
        max = max.max(*score);
    }
    if max > row.max {
        row.shrink_to(max);
    }
    for (score, j) in scores.into_iter().zip(keys) {
        row.add(score, head.value(j));
    }
}
// ANCHOR_END: attend
