//! Attention mass lost by hashing, measured on a sample of rows.

use super::LshOutput;
use super::unless_packed;
use crate::description::problem::{Dims, Problem};
use crate::error::Error;
use crate::machine::Machine;
use crate::machine::simd::{Element, Number};
use crate::tensor::view::{View, ViewMut};

/// Fraction of full attention that [`LshOutput`] retains, measured on a sample of rows.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Recall {
    /// Retained attention mass: the sum of a row's full attention weights over its candidate keys.
    pub mass: Share,
    /// Retained fraction of the top-k mass: of the largest full attention weights of a row, the sum over candidate keys
    /// divided by the sum over all.
    pub top: Share,
    /// Number of sampled rows, over all heads and items.
    pub rows: usize,
}

/// Statistics of a fraction over rows.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Share {
    /// Mean over the rows.
    pub mean: f64,
    /// Smallest value of any row.
    pub worst: f64,
}

impl Share {
    /// 1 if there are no rows: nothing is lost.
    pub(crate) fn of(shares: impl ExactSizeIterator<Item = f64> + Clone) -> Self {
        let n = shares.len().max(1) as f64;
        let mean = if shares.len() == 0 { 1.0 } else { shares.clone().sum::<f64>() / n };
        Self { mean, worst: shares.fold(1.0, f64::min) }
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
        let own = self.buckets.dims();
        Problem::new(&q, &k, &k).check()?;
        let dims = Dims { v_dim: own.v_dim, ..Problem::new(&q, &k, &k).dims() };
        self.check(dims)?;
        unless_packed([q.offsets(), k.offsets()])?;
        for (option, found) in [("top", top), ("rows", rows)] {
            if found == 0 {
                return Err(Error::Zero { option });
            }
        }
        let Dims { batch, heads, q_len, .. } = dims;
        let each = rows.min(q_len);
        let mut shares = vec![f64::NAN; batch * heads.q * each * 2];
        let mut view = ViewMut::bhsd(&mut shares, [batch * heads.q, 1, each, 2])?;
        view.change(machine.threads, 1, Vec::new, |scores, i, mut tile| {
            let row = tile.rows().first * q_len / each;
            let at = (i / heads.q, i % heads.q, row);
            if let Some(found) = self.shares((q, k), at, top, scores) {
                tile.update(0, 0).copy_from_slice(&found);
            }
        });
        let visible: Vec<[f64; 2]> =
            shares.as_chunks().0.iter().copied().filter(|x| !x[0].is_nan()).collect();
        let share = |i: usize| Share::of(visible.iter().map(|shares| shares[i]));
        Ok(Recall { mass: share(0), top: share(1), rows: visible.len() })
    }

    /// Retained fractions of the mass and of the top-k mass of one row; `None` if the row is fully masked or not finite.
    fn shares(
        &self,
        (q, k): (View<'_, E>, View<'_, E>),
        (batch, head, row): (usize, usize, usize),
        top: usize,
        scores: &mut Vec<(f64, usize)>,
    ) -> Option<[f64; 2]> {
        let Dims { heads, q_len, .. } = self.buckets.dims();
        let kv_head = head / (heads.q / heads.kv);
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
        let kept = self.output.lse[(batch * heads.q + head) * q_len + row].to_f64();
        if !lse.is_finite() || kept.is_nan() {
            return None;
        }
        let top = top.min(scores.len());
        scores.select_nth_unstable_by(top - 1, |a, b| b.0.total_cmp(&a.0));
        let (mut found, mut all) = (0.0, 0.0);
        for (score, key) in &scores[..top] {
            all += weight(*score);
            found +=
                if self.buckets.is_visible(batch, head, row, *key) { weight(*score) } else { 0.0 };
        }
        // Rounding can push the ratio slightly above 1.
        Some([(kept - lse).exp().min(1.0), found / all])
    }
}
