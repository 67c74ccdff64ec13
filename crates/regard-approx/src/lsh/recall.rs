//! Attention mass lost by hashing, measured on a sample of rows.

use super::{LshOutput, unless_packed, unless_zero};
use regard::problem::Dims;
use regard::{Element, Error, Machine, Number, Problem, View};

/// Fraction of full attention that [`LshOutput`] retains, measured on a sample of rows.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Recall {
    /// Retained attention mass: the sum of a row's full attention weights over its candidate keys.
    pub mass: RowFraction,
    /// Retained fraction of the top-k mass: of the largest full attention weights of a row, the sum over candidate keys
    /// divided by the sum over all.
    pub top: RowFraction,
    /// Number of sampled rows, over all heads and items.
    pub rows: usize,
}

/// Statistics of a fraction over rows.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct RowFraction {
    /// Mean over the rows.
    pub mean: f64,
    /// Smallest value of any row.
    pub worst: f64,
}

impl RowFraction {
    /// The mean and the smallest of some fractions; 1 if there are none: nothing is lost.
    #[must_use]
    pub fn of(shares: &[f64]) -> Self {
        let mean = shares.iter().sum::<f64>() / shares.len() as f64;
        let mean = if shares.is_empty() { 1.0 } else { mean };
        Self { mean, worst: shares.iter().copied().fold(1.0, f64::min) }
    }
}

impl<E: Element> LshOutput<E> {
    /// Compares up to `rows` evenly spaced rows of each head with full attention in `f64`: the retained mass, and the
    /// retained fraction of the mass of the `top` largest weights. Costs `rows x k_len` dot products per head. `q` and `k`
    /// must be those of the call.
    #[inline(never)]
    pub fn recall(
        &self,
        machine: Machine,
        q: View<'_, E>,
        k: View<'_, E>,
        top: usize,
        rows: usize,
    ) -> Result<Recall, Error> {
        let problem = Problem::new(&q, &k, &k);
        problem.check()?;
        let dims = Dims { v_dim: self.buckets.dims().v_dim, ..problem.dims() };
        self.check(dims)?;
        unless_packed([q.offsets(), k.offsets()])?;
        unless_zero([("top", top), ("rows", rows)])?;
        let Dims { batch, heads, q_len, .. } = dims;
        let each = rows.min(q_len);
        let shares = machine.collect(batch * heads.q * each, Vec::new, |scores, i| {
            self.shares([q, k], i / each, i % each * q_len / each, top, scores)
        });
        let (mass, top): (Vec<_>, Vec<_>) = shares.into_iter().flatten().unzip();
        Ok(Recall { mass: RowFraction::of(&mass), top: RowFraction::of(&top), rows: mass.len() })
    }

    /// Retained fractions of the mass and of the top-k mass of one row of a head, numbered over all items; `None` if the row
    /// is fully masked or not finite.
    fn shares(
        &self,
        [q, k]: [View<'_, E>; 2],
        head: usize,
        row: usize,
        top: usize,
        scores: &mut Vec<(f64, usize)>,
    ) -> Option<(f64, f64)> {
        let Dims { heads, q_len, .. } = self.buckets.dims();
        let kept = self.output.lse[head * q_len + row].to_f64();
        let (batch, head) = (head / heads.q, head % heads.q);
        let kv_head = head / self.buckets.served();
        let wide = |x: &E| x.widen().to_f64();
        let query: Vec<f64> = q.row(batch, head, row).iter().map(wide).collect();
        let score = |key| {
            let features = k.row(batch, kv_head, key).iter().map(wide).zip(&query);
            (features.map(|(k, q)| k * q).sum::<f64>() * self.scale, key)
        };
        scores.clear();
        scores.extend((0..self.buckets.keys_before(row)).map(score));
        let most = scores.iter().map(|(score, _)| *score).fold(f64::NEG_INFINITY, f64::max);
        if !most.is_finite() {
            return None;
        }
        let weight = |score: f64| (score - most).exp();
        let lse = most + scores.iter().map(|(score, _)| weight(*score)).sum::<f64>().ln();
        if !lse.is_finite() || kept.is_nan() {
            return None;
        }
        let top = top.min(scores.len());
        scores.select_nth_unstable_by(top - 1, |a, b| b.0.total_cmp(&a.0));
        let (mut found, mut all) = (0.0, 0.0);
        for (score, key) in &scores[..top] {
            let visible = self.buckets.is_visible(batch, head, row, *key);
            found += if visible { weight(*score) } else { 0.0 };
            all += weight(*score);
        }
        // Rounding can push the ratio slightly above 1.
        Some(((kept - lse).exp().min(1.0), found / all))
    }
}
