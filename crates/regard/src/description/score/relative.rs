//! Learned bias per relative position of key and query: bucket lookup, pass over a score tile, gradient.
//!
//! In a tile of consecutive rows and keys, the pairs of a diagonal share one distance: 127 diagonals for 4,096 pairs. So
//! the bias is looked up once per diagonal, and gradients are summed along a diagonal before they are added to its bucket.

use super::pass::{Bias, pass};
use crate::error::Error;
use crate::machine::simd::{GROUP, Lanes, MAX_LANES, Number, Simd};
use crate::tensor::index::{At, Keys};
use std::sync::Arc;

/// Bias looked up by the distance between key and query: `table [buckets, heads.q]`.
#[derive(Clone, Debug)]
pub struct RelativeBias<'a, N> {
    table: &'a [N],
    /// Bucket of each distance `key - position` from `-reach` to `reach`. Distances beyond are clamped.
    buckets: Arc<[usize]>,
    /// Number of buckets in the table.
    count: usize,
    /// The given reach. `buckets` stays empty if it exceeds [`MAX_REACH`], which `check` rejects.
    reach: usize,
}

/// Exceeds the reach of any published table, and is small enough to store one bucket per distance.
const MAX_REACH: usize = 1 << 20;

impl<'a, N: Number> RelativeBias<'a, N> {
    /// One bucket per distance `key - position` from `-reach` to `reach`; distances beyond are clamped.
    /// `table [2 reach + 1, heads.q]`.
    #[must_use]
    pub fn clipped(table: &'a [N], reach: usize) -> Self {
        let buckets = if reach <= MAX_REACH { (0..=2 * reach).collect() } else { Arc::default() };
        Self { table, buckets, count: reach.saturating_mul(2).saturating_add(1), reach }
    }

    /// Buckets of T5 (Raffel et al. 2020): one per distance for small distances, logarithmic up to `max_distance` for
    /// larger ones. `table [buckets, heads.q]`.
    #[must_use]
    pub fn t5(table: &'a [N], buckets: usize, max_distance: usize, bidirectional: bool) -> Self {
        let reach = max_distance.min(MAX_REACH).cast_signed();
        let bucket = |distance: isize| {
            let n = if bidirectional { buckets / 2 } else { buckets };
            let first = if bidirectional && distance > 0 { n } else { 0 };
            let size = if bidirectional {
                distance.unsigned_abs()
            } else {
                (-distance).max(0).unsigned_abs()
            };
            let exact = n / 2;
            if size < exact || exact == 0 {
                return first + size.min(n.saturating_sub(1));
            }
            // In `f32` and in this order of operations, to match the published models.
            let far = (size as f32 / exact as f32).ln() / (max_distance as f32 / exact as f32).ln();
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a floor, at most n"
            )]
            let step = (far * (n - exact) as f32) as usize;
            first + (exact + step).min(n - 1)
        };
        let all = (-reach..=reach).map(bucket);
        let map = if max_distance <= MAX_REACH { all.collect() } else { Arc::default() };
        Self { table, buckets: map, count: buckets, reach: max_distance }
    }

    pub(crate) fn check(&self, heads: usize) -> Result<(), Error> {
        let option = "relative bias";
        if self.reach > MAX_REACH {
            return Err(Error::OutOfRange { option, found: self.reach, limit: MAX_REACH + 1 });
        }
        if self.count == 0 {
            return Err(Error::Zero { option });
        }
        let (entries, found) = (self.count.saturating_mul(heads), self.table.len());
        if found == entries {
            return Ok(());
        }
        Err(Error::Count { option, expected: (entries, "buckets x query heads"), found })
    }

    pub(crate) fn buckets(&self) -> usize {
        self.count
    }

    pub(crate) fn table(&self) -> &'a [N] {
        self.table
    }

    fn bucket(&self, distance: i64) -> usize {
        let reach = self.reach.cast_signed() as i64;
        self.buckets[usize::try_from(distance.clamp(-reach, reach) + reach).unwrap_or(0)]
    }

    /// Index into the table of the bias for a distance and a head.
    pub(crate) fn entry(&self, distance: i64, head: usize) -> usize {
        self.bucket(distance) * (self.table.len() / self.count) + head
    }

    /// Adds the biases to a score tile.
    #[inline(always)]
    pub(crate) fn add<S: Simd<N>>(&self, s: S, at: At<'_>, tile: &mut [Lanes<N>]) {
        let mut diagonals = [N::zero(); DIAGONALS];
        let first = diagonal_distance(at);
        if let Some(first) = first {
            for (i, bias) in diagonals.iter_mut().enumerate() {
                *bias = self.table[self.entry(first - i.cast_signed() as i64, at.scope.head)];
            }
        }
        for (i, scores) in tile.iter_mut().enumerate() {
            let mut line = [Lanes([N::zero(); GROUP])];
            if first.is_some() {
                line[0].0.copy_from_slice(&diagonals[GROUP - 1 - i..][..GROUP]);
            } else {
                for lane in at.span.start..at.span.end {
                    line[0].0[lane] = self.table[self.entry(distance(at, i, lane), at.scope.head)];
                }
            }
            pass(s, at, std::slice::from_mut(scores), &Bias(&line));
        }
    }

    /// Adds the gradients of a score tile to the bucket gradients of one head.
    #[inline(always)]
    pub(crate) fn add_grads<S: Simd<N>>(
        &self,
        s: S,
        at: At<'_>,
        d_scores: &[Lanes<N>],
        by_bucket: &mut [f64],
    ) {
        let Some(first) = diagonal_distance(at) else {
            for (i, d) in d_scores.iter().enumerate() {
                for lane in at.span.start..at.span.end {
                    by_bucket[self.bucket(distance(at, i, lane))] += d.0[lane].to_f64();
                }
            }
            return;
        };
        let mut diagonals = [N::zero(); DIAGONALS];
        for (i, d) in d_scores.iter().enumerate() {
            for lane in at.span.vectors::<N, S>() {
                let sum = &mut diagonals[GROUP - 1 - i + lane..];
                s.store(s.add(s.load(sum), s.load(&d.0[lane..])), sum);
            }
        }
        for (i, d) in diagonals.iter().enumerate() {
            by_bucket[self.bucket(first - i.cast_signed() as i64)] += (*d).to_f64();
        }
    }
}

/// Diagonals of a tile, padded for the last vector.
const DIAGONALS: usize = 2 * GROUP + MAX_LANES;

/// Distance on the first diagonal, which pairs the last key with the first row. It decreases by 1 from one diagonal to the
/// next. `None` if rows or keys are not consecutive.
fn diagonal_distance(at: At<'_>) -> Option<i64> {
    match at.keys {
        Keys::From(key) if at.rows.step == 1 => {
            let key = (key + GROUP - 1).cast_signed() as i64;
            Some(key - at.scope.position(at.rows.first))
        }
        _ => None,
    }
}

/// `key - position`
fn distance(at: At<'_>, i: usize, lane: usize) -> i64 {
    at.scope.distance(at.rows.row(lane), at.keys.get(i))
}
