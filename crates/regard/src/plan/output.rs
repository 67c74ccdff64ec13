//! What a call returns, and how results over different keys become one.

use crate::description::normalizer::Selection;
use crate::error::Error;
use crate::kernel::softmax::State;
use crate::machine::Machine;
use crate::machine::simd::{Element, Number};
use crate::tensor::view::{Shape, Tensor, TileMut, View, ViewMut};

/// Rows that are merged at a time.
const ROWS: usize = 64;

/// The result of attention: the weighted values, and what is needed to recompute any weight.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Output<E: Element> {
    /// `[batch, heads.q, q_len, v_dim]`, in the layout of q, packed if q is. Rows that see nothing are 0.
    pub out: Tensor<E>,
    /// `ln(sum of e^score)` of each row, `[batch, heads.q, q_len]`; `-inf` for rows that see nothing.
    /// The weight of a pair is `e^(score - lse)`.
    ///
    /// If q is packed, this and all that follow are `[total, heads.q]`: row `t` of the tensor and head `h` are at
    /// `t * heads.q + h`.
    pub lse: Vec<E::Num>,
    /// `max` and `sum` of each row, `[batch, heads.q, q_len]`: the sum of `2^(score log2 e - m)` over its keys is `sum`. Where
    /// scores are so large that lse cannot hold what they differ by, [`Plan::backward`](crate::Plan::backward) takes the
    /// weights from here; empty where it is not known.
    pub states: Vec<[E::Num; 2]>,
    /// The entropy of each row's weights (and sink), `-sum of a ln a = lse - E[score]`, `[batch, heads.q, q_len]`, if
    /// the problem asked for it: 0 where one key has all the weight, `ln n` where n keys share it. Before dropout.
    pub entropy: Option<Vec<E::Num>>,
    /// The largest score of each row, sinks left out, `[batch, heads.q, q_len]`, wherever there is an entropy: scores that grow
    /// and entropies that fall are the first that is seen of a training that fails. `-inf` for rows that see nothing.
    pub max_score: Option<Vec<E::Num>>,
    /// What each row has chosen, where the [`Normalizer`](crate::problem::Normalizer) is not the softmax; backward needs it.
    pub selection: Option<Selection<E::Num>>,
}

/// What a call has returned, as it lies in the caller's memory: all that the backward pass needs of it. See [`Output`] for each
/// of the fields; `&output` becomes one.
#[derive(Clone, Copy, Debug)]
pub struct OutputView<'a, E: Element> {
    /// The weighted values.
    pub out: View<'a, E>,
    /// `ln(sum of e^score)` of each row.
    pub lse: &'a [E::Num],
    /// `max` and `sum` of each row; may be empty.
    pub states: &'a [[E::Num; 2]],
    /// The entropy of each row.
    pub entropy: Option<&'a [E::Num]>,
    /// What each row has chosen.
    pub selection: Option<&'a Selection<E::Num>>,
}

impl<'a, E: Element> From<&'a Output<E>> for OutputView<'a, E> {
    fn from(output: &'a Output<E>) -> Self {
        Self {
            out: output.out.view(),
            lse: &output.lse,
            states: &output.states,
            entropy: output.entropy.as_deref(),
            selection: output.selection.as_ref(),
        }
    }
}

impl<E: Element> OutputView<'_, E> {
    /// Refuses one whose lse or states are not those of so many rows.
    pub(crate) fn check_rows(&self, rows: usize) -> Result<(), Error> {
        Error::unless_one_each_row("lse", rows, self.lse.len())?;
        let states = self.states.len();
        Error::unless_one_each_row("states", if states == 0 { 0 } else { rows }, states)
    }
}

impl<E: Element> Output<E> {
    /// Of what was kept of a call: enough for the backward pass, and for merging.
    #[must_use]
    pub fn new(out: Tensor<E>, lse: Vec<E::Num>) -> Self {
        Self { out, lse, states: Vec::new(), entropy: None, max_score: None, selection: None }
    }

    /// Joins results of the same queries over disjoint keys into the result over all of them.
    ///
    /// Associative and commutative up to rounding; a part that sees nothing changes nothing. The entropy is merged if all
    /// parts have it. What rows have chosen among some keys says nothing of their choice among all: results of a
    /// [`Normalizer`](crate::problem::Normalizer) other than the softmax are refused.
    #[inline(never)]
    pub fn merge(machine: Machine, parts: &[Self]) -> Result<Self, Error> {
        let first = Self::check_parts(parts)?;
        let (out, rows) = (first.out.view(), first.lse.len());
        let with_states = parts.iter().all(|part| part.states.len() == rows);
        let with_entropy = parts.iter().all(|part| part.entropy.is_some());
        let with_max_score = parts.iter().all(|part| part.max_score.is_some());
        let highest = |row| {
            let larger =
                |a: E::Num, b: E::Num| if b > a || Number::to_f64(b).is_nan() { b } else { a };
            let of_part = |part: &Self| Some(part.max_score.as_ref()?[row]);
            parts.iter().filter_map(of_part).fold(State::empty().true_max, larger)
        };
        let max_score = with_max_score.then(|| (0..rows).map(highest).collect());
        let merge = Merge::new(machine, parts, with_states)?;
        let (mut lse, mut states, mut entropy) = (Vec::with_capacity(rows), Vec::new(), Vec::new());
        for row in 0..rows {
            let (m, sum) = (merge.of_row(row)[0], merge.sum(row));
            if with_states {
                let [m, l] = [m, sum].map(E::Num::from_f64);
                let merged = if sum == 0.0 {
                    State::empty()
                } else {
                    State { max: m, sum: l, sum_x_log: l, true_max: m }
                };
                lse.push(merged.lse());
                states.push([merged.max, merged.sum]);
            } else {
                let m = E::Num::from_f64(m).to_f64();
                lse.push(E::Num::from_f64(if sum == 0.0 { m } else { m + sum.ln() }));
            }
            if with_entropy {
                entropy.push(E::Num::from_f64(merge.entropy(row)));
            }
        }
        let mut to = Tensor::zeros_like(&out)?;
        to.view_mut().change(machine.threads, ROWS, Vec::new, |sums, item, mut tile| {
            merge.rows(item, &mut tile, sums);
        });
        let entropy = with_entropy.then_some(entropy);
        Ok(Self { out: to, lse, states, entropy, max_score, selection: None })
    }

    /// The first of parts that have everything in common but their keys.
    fn check_parts(parts: &[Self]) -> Result<&Self, Error> {
        let Some(first) = parts.first() else { return Err(Error::NothingToMerge) };
        if parts.iter().any(|part| part.selection.is_some()) {
            return Err(Error::NotMergeable);
        }
        let same =
            |axis, a, b| Error::unless_same(axis, ("the first part", a), ("another part", b));
        for part in parts {
            let axes = ["batch", "heads", "queries", "features"];
            let shapes = [first, part].map(|part| part.out.shape().to_array());
            for (axis, (a, b)) in axes.into_iter().zip(shapes[0].into_iter().zip(shapes[1])) {
                same(axis, a, b)?;
            }
        }
        for part in parts {
            let offsets = [first, part].map(|part| part.out.offsets().unwrap_or(&[]));
            same("offsets", offsets[0].len(), offsets[1].len())?;
            for (a, b) in offsets[0].iter().zip(offsets[1]) {
                same("offset", *a, *b)?;
            }
        }
        let whole = first.out.view().joined().shape();
        let rows = whole.batch * whole.heads * whole.len;
        for part in parts {
            OutputView::from(part).check_rows(rows)?;
            let entropy = part.entropy.as_ref().map_or(rows, Vec::len);
            Error::unless_one_each_row("entropy", rows, entropy)?;
            let max_score = part.max_score.as_ref().map_or(rows, Vec::len);
            Error::unless_one_each_row("max_score", rows, max_score)?;
        }
        Ok(first)
    }
}

/// Parts, and the weight of each in each row.
struct Merge<'p, E: Element> {
    parts: &'p [Output<E>],
    /// `[rows, 1 + parts]`: the largest exponent of the parts, then what each of them weighs relative to that. In `f64`: these
    /// are exact, what is left is the rounding of each part.
    weights: Vec<f64>,
}

impl<'p, E: Element> Merge<'p, E> {
    fn new(machine: Machine, parts: &'p [Output<E>], with_states: bool) -> Result<Self, Error> {
        let (rows, each) = (parts[0].lse.len(), 1 + parts.len());
        let mut weights = vec![0.0; rows * each];
        let state = |part: usize, row: usize| {
            let part = &parts[part];
            let one = E::Num::from_f64(1.0);
            let [m, l] = if with_states { part.states[row] } else { [part.lse[row], one] };
            // `-inf` where nothing was seen. A NaN stays one: what depends on it must not look like a number.
            let lse = part.lse[row].to_f64();
            let m = if lse.is_nan() || lse == f64::NEG_INFINITY { lse } else { m.to_f64() };
            (m, l.to_f64())
        };
        let mut view = ViewMut::bhsd(&mut weights, [1, 1, rows, each])?;
        view.change(machine.threads, ROWS, Vec::new, |states, _, mut tile| {
            for lane in 0..tile.rows().count {
                states.clear();
                states.extend((0..parts.len()).map(|part| state(part, tile.rows().row(lane))));
                let most = states.iter().map(|(m, _)| *m).fold(f64::NEG_INFINITY, f64::max);
                let to = tile.update(0, lane);
                to[0] = most;
                for (weight, (m, l)) in to[1..].iter_mut().zip(&*states) {
                    *weight = match m - most {
                        _ if *m == f64::NEG_INFINITY => 0.0,
                        below if with_states => below.exp2() * l,
                        below => below.exp() * l,
                    };
                }
            }
        });
        Ok(Self { parts, weights })
    }

    /// The largest exponent, and the weights.
    fn of_row(&self, row: usize) -> &[f64] {
        let each = 1 + self.parts.len();
        &self.weights[row * each..][..each]
    }

    fn sum(&self, row: usize) -> f64 {
        self.of_row(row)[1..].iter().sum()
    }

    /// -sum of a ln a, where each weight of a part is its share times what it was.
    fn entropy(&self, row: usize) -> f64 {
        let sum = self.sum(row);
        let shares = self.of_row(row)[1..].iter().map(|weight| weight / sum).enumerate();
        let terms = shares.filter(|(_, a)| *a > 0.0).map(|(i, a)| {
            let of_part = |entropy: &Vec<E::Num>| entropy[row].to_f64();
            a * (self.parts[i].entropy.as_ref().map_or(0.0, of_part) - a.ln())
        });
        terms.sum()
    }

    /// Merges some rows of an item.
    fn rows(&self, item: usize, tile: &mut TileMut<'_, E>, sums: &mut Vec<f64>) {
        let (first, rows) = (&self.parts[0].out, tile.rows());
        let Shape { heads, len, dim, .. } = first.shape();
        for (head, lane) in (0..heads).flat_map(|h| (0..rows.count).map(move |i| (h, i))) {
            let row = match first.offsets() {
                Some(offsets) => (offsets[item] + rows.row(lane)) * heads + head,
                None => (item * heads + head) * len + rows.row(lane),
            };
            sums.clear();
            sums.resize(dim, 0.0);
            let weights = self.of_row(row)[1..].iter().zip(self.parts);
            for (weight, part) in weights.filter(|(weight, _)| **weight > 0.0) {
                let each = sums.iter_mut().zip(flat_row(part.out.view(), row));
                each.for_each(|(sum, x)| *sum += weight * x.widen().to_f64());
            }
            let sum = self.sum(row);
            for (x, total) in tile.update(head, lane).iter_mut().zip(&*sums) {
                let mean = if sum == 0.0 { 0.0 } else { *total / sum };
                *x = E::narrow(E::Num::from_f64(mean));
            }
        }
    }
}

/// A row by its number among those of all heads and items.
fn flat_row<E: Element>(x: View<'_, E>, row: usize) -> &[E] {
    let Shape { heads, len, .. } = x.shape();
    if x.offsets().is_some() {
        return x.joined().row(0, row % heads, row / heads);
    }
    x.row(row / len / heads, row / len % heads, row % len)
}
