//! What a call returns, and how results over different keys become one.

use crate::element::{Element, Number};
use crate::error::Error;
use crate::machine::Machine;
use crate::simd::{Simd, Task};
use crate::softmax::State;
use crate::view::{Layout, Shape, Tensor, View};

/// Rows that are merged at a time.
const ROWS: usize = 64;

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
    /// parts have it.
    pub fn merge(parts: &[Self]) -> Result<Self, Error> {
        let layout = parts.first().map_or(Layout::Bhsd, |part| part.out.layout());
        Self::merge_on(Machine::here().threads(1), parts, layout, |_, row| row)
    }

    /// The same on several threads, into any layout if nothing is packed, of parts that may have their rows in other orders:
    /// row `row` of the result is row `place(part, row)` of a part, counted over all heads and items.
    pub(crate) fn merge_on(
        machine: Machine,
        parts: &[Self],
        layout: Layout,
        place: impl Fn(usize, usize) -> usize + Sync,
    ) -> Result<Self, Error> {
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
        let whole = first.out.view().joined().shape();
        let rows = whole.batch * whole.heads * whole.len;
        let with_entropy = parts.iter().all(|p| p.entropy.is_some());
        for part in parts {
            part.check_rows(rows)?;
            let entropy = part.entropy.as_ref().map_or(rows, Vec::len);
            Error::unless_one_each_row("entropy", rows, entropy)?;
        }
        let with_states = parts.iter().all(|p| p.states.len() == rows);
        // In f64, relative to the largest: the weights of the parts are exact, what is left is the rounding of each part.
        let state = |(i, p): (usize, &Self), row: usize| {
            let row = place(i, row);
            let [m, l] =
                if with_states { p.states[row] } else { [p.lse[row], E::Num::from_f64(1.0)] };
            let seen = p.lse[row].to_f64() > f64::NEG_INFINITY;
            (if seen { m.to_f64() } else { f64::NEG_INFINITY }, l.to_f64())
        };
        let weights = |row: usize| {
            let each = || parts.iter().enumerate();
            let m = each().map(|p| state(p, row).0).fold(f64::NEG_INFINITY, f64::max);
            let weight = move |p: (usize, &Self)| {
                let (of_part, l) = state(p, row);
                match of_part - m {
                    _ if of_part == f64::NEG_INFINITY => 0.0,
                    below if with_states => below.exp2() * l,
                    below => below.exp() * l,
                }
            };
            let sum: f64 = each().map(weight).sum();
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
                let shares = parts.iter().enumerate().map(|p| (p, weight(p) / sum));
                let terms = shares.filter(|(_, a)| *a > 0.0).map(|((i, p), a)| {
                    let of_part = |entropy: &Vec<E::Num>| entropy[place(i, row)].to_f64();
                    a * (p.entropy.as_ref().map_or(0.0, of_part) - a.ln())
                });
                entropy.push(E::Num::from_f64(terms.sum()));
            }
        }
        let mut out = match packed {
            Some(_) => Tensor::zeros_like(&first.out.view())?,
            None => {
                Tensor::new(vec![E::narrow(E::Num::default()); rows * shape.dim], shape, layout)?
            }
        };
        out.view_mut().change(machine.threads, ROWS, Vec::new, |sums, b, mut tile| {
            let rows = tile.rows();
            for (head, lane) in (0..shape.heads).flat_map(|h| (0..rows.count).map(move |i| (h, i)))
            {
                let i = rows.row(lane);
                let row = match packed {
                    Some(offsets) => (offsets[b] + i) * shape.heads + head,
                    None => (b * shape.heads + head) * shape.len + i,
                };
                let (_, sum, weight) = weights(row);
                sums.clear();
                sums.resize(shape.dim, 0.0);
                for (i, part) in parts.iter().enumerate() {
                    let weight = weight((i, part));
                    if weight > 0.0 {
                        let row =
                            flat_row(part.out.view().joined(), packed.is_some(), place(i, row));
                        E::Num::enter(machine.isa, AddWeighed { row, weight, sums });
                    }
                }
                for (x, total) in tile.update(head, lane).iter_mut().zip(&*sums) {
                    let mean = if sum == 0.0 { 0.0 } else { *total / sum };
                    *x = E::narrow(E::Num::from_f64(mean));
                }
            }
        });
        Ok(Self { out, lse, states, entropy: with_entropy.then_some(entropy) })
    }
}

/// A row by its number among those of all heads and items, packed ones as one.
fn flat_row<E>(x: View<'_, E>, packed: bool, row: usize) -> &[E] {
    let Shape { heads, len, .. } = x.shape();
    if packed {
        return x.row(0, row % heads, row / heads);
    }
    x.row(row / len / heads, row / len % heads, row % len)
}

/// Adds a row times its weight.
struct AddWeighed<'t, E> {
    row: &'t [E],
    weight: f64,
    sums: &'t mut [f64],
}

impl<E: Element> Task<E::Num> for AddWeighed<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<E::Num>>(self, _: S) {
        let Self { row, weight, sums } = self;
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += weight * x.widen().to_f64());
    }
}
