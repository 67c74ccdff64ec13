//! What a call returns, and how results over different keys become one.

use crate::element::{Element, Number};
use crate::error::Error;
use crate::mask::RowTile;
use crate::view::{Heads, Tensor, ViewMut};

/// The result of attention: the weighted values, and what is needed to recompute any weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Output<E: Element> {
    /// `[batch, heads.q, q_len, v_dim]`, in the layout of q. Rows that see nothing are 0.
    pub out: Tensor<E>,
    /// `ln(sum of e^score)` of each row, `[batch, heads.q, q_len]`; `-inf` for rows that see nothing.
    /// The weight of a pair is `e^(score - lse)`.
    pub lse: Vec<E::Num>,
}

impl<E: Element> Output<E> {
    /// Joins results of the same queries over disjoint keys into the result over all of them.
    ///
    /// Associative and commutative up to rounding; a part that sees nothing changes nothing.
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
        if let Some(found) = parts.iter().map(|p| p.lse.len()).find(|n| *n != rows) {
            let expected = (rows, "batch x query heads x queries");
            return Err(Error::Count { option: "lse", expected, found });
        }
        let largest = |row: usize| {
            parts.iter().map(|p| p.lse[row].to_f64()).fold(f64::NEG_INFINITY, f64::max)
        };
        let mut lse = Vec::with_capacity(first.lse.len());
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
            lse.push(E::Num::from_f64(if sum == 0.0 { m } else { m + sum.ln() }));
        }
        let write = |out: ViewMut<'_, E>| {
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
        };
        // SAFETY: every row of every head and item is written once.
        let out = unsafe { Tensor::written_by(shape, first.out.layout(), write)? };
        Ok(Self { out, lse })
    }
}
