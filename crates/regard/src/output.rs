//! What a call returns, and how results over different keys become one.

use crate::element::{Element, Number};
use crate::error::Error;
use crate::mask::RowTile;
use crate::normaliser::Choice;
use crate::softmax::State;
use crate::view::{Heads, Tensor, Unwritten};

/// The result of attention: the weighted values, and what is needed to recompute any weight.
#[derive(Clone, Debug, PartialEq)]
pub struct Output<E: Element> {
    /// `[batch, heads.q, q_len, v_dim]`, in the layout of q, packed if q is. Rows that see nothing are 0.
    pub out: Tensor<E>,
    /// `ln(sum of e^score)` of each row, `[batch, heads.q, q_len]`; `-inf` for rows that see nothing.
    /// The weight of a pair is `e^(score - lse)`.
    ///
    /// If q is packed, this and all that follow are `[total, heads.q]`: row `t` of the tensor and head `h` are at
    /// `t * heads.q + h`.
    pub lse: Vec<E::Num>,
    /// `m` and `l` of each row, `[batch, heads.q, q_len]`: the sum of `2^(score log2 e - m)` over its keys is `l`. Where
    /// scores are so large that lse cannot hold what they differ by, [`Plan::backward`](crate::Plan::backward) takes the
    /// weights from here; empty where it is not known.
    pub states: Vec<[E::Num; 2]>,
    /// The entropy of each row's weights (and sink), `-sum of a ln a = lse - E[score]`, `[batch, heads.q, q_len]`, if
    /// the problem asked for it: 0 where one key has all the weight, `ln n` where n keys share it. Before dropout.
    pub entropy: Option<Vec<E::Num>>,
    /// What each row has chosen, where the [`Normaliser`](crate::Normaliser) is not the softmax; backward needs it.
    pub choice: Option<Choice<E::Num>>,
}

impl<E: Element> Output<E> {
    /// Refuses one whose lse or states are not those of so many rows.
    pub(crate) fn check_rows(&self, rows: usize) -> Result<(), Error> {
        Error::unless_one_each_row("lse", rows, self.lse.len())?;
        let states = self.states.len();
        Error::unless_one_each_row("states", if states == 0 { 0 } else { rows }, states)
    }

    /// Joins results of the same queries over disjoint keys into the result over all of them.
    ///
    /// Associative and commutative up to rounding; a part that sees nothing changes nothing. The entropy is merged if all
    /// parts have it. What rows have chosen among some keys says nothing of their choice among all: results of a
    /// [`Normaliser`](crate::Normaliser) other than the softmax are refused.
    pub fn merge(parts: &[Self]) -> Result<Self, Error> {
        let Some(first) = parts.first() else { return Err(Error::NothingToMerge) };
        let shape = first.out.shape();
        if parts.iter().any(|part| part.choice.is_some()) {
            return Err(Error::Chosen);
        }
        for part in parts {
            let axes = ["batch", "heads", "queries", "features"];
            for (axis, (a, b)) in
                axes.iter().zip(shape.to_array().iter().zip(part.out.shape().to_array()))
            {
                Error::unless_same(axis, ("the first part", *a), ("another part", b))?;
            }
        }
        let packed = first.out.offsets();
        for part in parts {
            let offsets = [packed, part.out.offsets()].map(|o| o.unwrap_or(&[]));
            Error::unless_same(
                "offsets",
                ("the first part", offsets[0].len()),
                ("another part", offsets[1].len()),
            )?;
            for (a, b) in offsets[0].iter().zip(offsets[1]) {
                Error::unless_same("offset", ("the first part", *a), ("another part", *b))?;
            }
        }
        // Packed items are merged as one.
        let shape = first.out.view().joined().shape();
        let rows = shape.batch * shape.heads * shape.len;
        let with_entropy = parts.iter().all(|p| p.entropy.is_some());
        for part in parts {
            part.check_rows(rows)?;
            let entropy = part.entropy.as_ref().map_or(rows, Vec::len);
            Error::unless_one_each_row("entropy", rows, entropy)?;
        }
        let with_states = parts.iter().all(|p| p.states.len() == rows);
        // In f64, relative to the largest: the weights of the parts are exact, what is left is the rounding of each part.
        let state = |p: &Self, row: usize| {
            let [m, l] =
                if with_states { p.states[row] } else { [p.lse[row], E::Num::from_f64(1.0)] };
            let seen = p.lse[row].to_f64() > f64::NEG_INFINITY;
            (if seen { m.to_f64() } else { f64::NEG_INFINITY }, l.to_f64())
        };
        let weights = |row: usize| {
            let m = parts.iter().map(|p| state(p, row).0).fold(f64::NEG_INFINITY, f64::max);
            let weight = move |p: &Self| {
                let (of_part, l) = state(p, row);
                match of_part - m {
                    _ if of_part == f64::NEG_INFINITY => 0.0,
                    below if with_states => below.exp2() * l,
                    below => below.exp() * l,
                }
            };
            let sum: f64 = parts.iter().map(weight).sum();
            (m, sum, weight)
        };
        let (mut lse, mut states, mut entropy) = (Vec::with_capacity(rows), Vec::new(), Vec::new());
        for row in 0..first.lse.len() {
            let (m, sum, weight) = weights(row);
            let [m, l] = [m, sum].map(E::Num::from_f64);
            if with_states {
                let merged = if sum == 0.0 { State::nothing_seen() } else { State { m, l, t: l } };
                lse.push(merged.lse());
                states.push([merged.m, merged.l]);
            } else {
                lse.push(E::Num::from_f64(if sum == 0.0 {
                    m.to_f64()
                } else {
                    m.to_f64() + sum.ln()
                }));
            }
            if with_entropy {
                // -sum of a ln a, where each weight of a part is its share times what it was.
                let shares = parts.iter().map(|p| (p, weight(p) / sum)).filter(|(_, a)| *a > 0.0);
                let terms = shares.map(|(p, a)| {
                    let of_part = p.entropy.as_ref().map_or(0.0, |entropy| entropy[row].to_f64());
                    a * (of_part - a.ln())
                });
                entropy.push(E::Num::from_f64(terms.sum()));
            }
        }
        let mut out = Unwritten::new(shape, first.out.layout())?;
        {
            let out = out.view()?;
            for row in 0..first.lse.len() {
                let (_, sum, weight) = weights(row);
                let seen: Vec<_> =
                    parts.iter().map(|p| (p, weight(p))).filter(|(_, w)| *w > 0.0).collect();
                let (b, head, i) = if packed.is_some() {
                    (0, row % shape.heads, row / shape.heads)
                } else {
                    let (item, i) = (row / shape.len, row % shape.len);
                    (item / shape.heads, item % shape.heads, i)
                };
                // SAFETY: nobody else holds a row of `out`, and none is read.
                let mut tile = unsafe {
                    out.tile(b, Heads::one(head), RowTile { first: i, step: 1, count: 1 })
                };
                for (d, x) in tile.row(0, 0).iter_mut().enumerate() {
                    let total: f64 = seen
                        .iter()
                        .map(|(p, weight)| {
                            weight * p.out.view().joined().row(b, head, i)[d].widen().to_f64()
                        })
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
        let mut out = unsafe { out.written() };
        if let Some(offsets) = packed {
            out = Tensor::packed(out.into_data(), offsets, [shape.heads, shape.dim])?;
        }
        Ok(Self { out, lse, states, entropy: with_entropy.then_some(entropy), choice: None })
    }
}
