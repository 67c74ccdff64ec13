//! What a call returns, and how results over different keys become one.

use crate::element::{Element, Number};
use crate::error::Error;
use crate::mask::RowTile;
use crate::view::{Heads, Tensor, Unwritten};

/// The result of attention: the weighted values, and what is needed to recompute any weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Output<E: Element> {
    /// `[batch, heads.q, q_len, v_dim]`, in the layout of q. Rows that see nothing are 0.
    pub out: Tensor<E>,
    /// `ln(sum of e^score)` of each row, `[batch, heads.q, q_len]`; `-inf` for rows that see nothing.
    /// The weight of a pair is `e^(score - lse)`.
    pub lse: Vec<E::Num>,
    /// What rounding took from each lse: `lse + lse_rest` has twice the digits. [`Plan::backward`](crate::Plan::backward)
    /// takes weights from it that sum to 1 however large the scores are; empty where it is not known.
    pub lse_rest: Vec<E::Num>,
    /// The entropy of each row's weights (and sink), `-sum of a ln a = lse - E[score]`, `[batch, heads.q, q_len]`, if
    /// the problem asked for it: 0 where one key has all the weight, `ln n` where n keys share it. Before dropout.
    pub entropy: Option<Vec<E::Num>>,
}

impl<E: Element> Output<E> {
    /// Joins results of the same queries over disjoint keys into the result over all of them.
    ///
    /// Associative and commutative up to rounding; a part that sees nothing changes nothing. The entropy is merged if all
    /// parts have it.
    pub fn merge(parts: &[Self]) -> Result<Self, Error> {
        let Some(first) = parts.first() else { return Err(Error::NothingToMerge) };
        let shape = first.out.shape();
        for part in parts {
            let axes = ["batch", "heads", "queries", "features"];
            for (axis, (a, b)) in
                axes.iter().zip(shape.to_array().iter().zip(part.out.shape().to_array()))
            {
                Error::unless_same(axis, ("the first part", *a), ("another part", b))?;
            }
        }
        let rows = shape.batch * shape.heads * shape.len;
        parts.iter().try_for_each(|p| Error::unless_one_each_row("lse", rows, p.lse.len()))?;
        let largest = |row: usize| {
            parts.iter().map(|p| p.lse[row].to_f64()).fold(f64::NEG_INFINITY, f64::max)
        };
        let with_entropy = parts.iter().all(|p| p.entropy.is_some());
        for entropy in parts.iter().filter_map(|p| p.entropy.as_ref()) {
            Error::unless_one_each_row("entropy", rows, entropy.len())?;
        }
        let (mut lse, mut lse_rest) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
        let mut entropy = Vec::new();
        // In f64: the weights of the parts are exact, what is left is the rounding of each part's own lse.
        let weights = |row: usize| {
            let m = largest(row);
            let weight = move |p: &Self| {
                if m == f64::NEG_INFINITY { 0.0 } else { (p.lse[row].to_f64() - m).exp() }
            };
            let sum: f64 = parts.iter().map(weight).sum();
            (m, sum, weight)
        };
        for row in 0..first.lse.len() {
            let (m, sum, _) = weights(row);
            let total = if sum == 0.0 { m } else { m + sum.ln() };
            let rounded = E::Num::from_f64(total);
            lse.push(rounded);
            let rest = if sum == 0.0 { 0.0 } else { (m - rounded.to_f64()) + sum.ln() };
            lse_rest.push(E::Num::from_f64(rest));
            if with_entropy {
                // lse - E[score], and each part's E[score] is its lse less its entropy.
                let seen = parts.iter().filter(|p| p.lse[row].to_f64() > f64::NEG_INFINITY);
                let shares = seen.map(|p| {
                    let of_part = p.entropy.as_ref().map_or(0.0, |entropy| entropy[row].to_f64());
                    (p.lse[row].to_f64() - total).exp() * (of_part + total - p.lse[row].to_f64())
                });
                entropy.push(E::Num::from_f64(shares.sum()));
            }
        }
        let mut out = Unwritten::new(shape, first.out.layout())?;
        {
            let out = out.view()?;
            for row in 0..first.lse.len() {
                let (_, sum, weight) = weights(row);
                let (item, i) = (row / shape.len, row % shape.len);
                let (b, head) = (item / shape.heads, item % shape.heads);
                // SAFETY: nobody else holds a row of `out`, and none is read.
                let mut tile = unsafe {
                    out.tile(
                        b,
                        Heads { head, apart: 0, parts: 0..1 },
                        RowTile { first: i, step: 1, count: 1 },
                    )
                };
                for (d, x) in tile.row(0, 0).iter_mut().enumerate() {
                    let seen = parts.iter().filter(|p| weight(p) > 0.0);
                    let total: f64 = seen
                        .map(|p| weight(p) * p.out.view().row(b, head, i)[d].widen().to_f64())
                        .sum();
                    x.write(E::narrow(E::Num::from_f64(if sum == 0.0 {
                        0.0
                    } else {
                        total / sum
                    })));
                }
            }
        }
        // SAFETY: every row of every head and item is written once.
        let out = unsafe { out.written() };
        Ok(Self { out, lse, lse_rest, entropy: with_entropy.then_some(entropy) })
    }
}
