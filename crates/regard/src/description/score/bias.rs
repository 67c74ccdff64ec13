//! The dense bias: one number for each pair, or for all that share an axis of size 1.

use super::pass::{Bias, pass};
use crate::machine::simd::{Element, GROUP, Lanes, MAX_LANES, Number, Simd, Visitor, prefetch_l2};
use crate::tensor::index::{At, Keys, Pair};
use crate::tensor::source::{Head, Heads, rows};
use crate::tensor::view::{Shape, TileMut, View, serving};

/// The bias of a pair, where axes of size 1 serve all.
pub(super) fn bias_at<E: Element>(bias: &View<'_, E>, at: Pair) -> E::Num {
    let shape = bias.shape();
    let head = rows(bias.serving_head(at.batch, at.head));
    head.number(serving(at.row, shape.len), serving(at.key, shape.dim))
}

/// Adds the biases to a tile of scores.
#[inline(always)]
pub(super) fn add_bias<E: Element, S: Simd<E::Num>>(
    s: S,
    bias: &View<'_, E>,
    at: At<'_>,
    tile: &mut [Lanes<E::Num>],
) {
    let head = rows(bias.serving_head(at.scope.batch, at.scope.head));
    E::Num::visit(head, AddBias { s, shape: bias.shape(), at, tile });
}

struct AddBias<'t, N, S> {
    s: S,
    shape: Shape,
    at: At<'t>,
    tile: &'t mut [Lanes<N>],
}

impl<'c, N: Number, S: Simd<N>> Visitor<Heads<'c>, N> for AddBias<'_, N, S> {
    type Out = ();
    #[inline(always)]
    fn visit<E: Element<Num = N>>(self, head: Head<'c, E>) {
        let Self { s, shape, at, tile } = self;
        let line = |lane: usize| head.row(serving(at.rows.row(lane), shape.len));
        if let Keys::From(key) = at.keys {
            // The lines lie a whole row apart, where no hardware prefetcher follows: ask for those of the next keys.
            for lane in at.span.start..at.span.end {
                for next in (key + tile.len()..key + 2 * tile.len()).step_by(MAX_LANES) {
                    line(lane).get(next).into_iter().for_each(|x| prefetch_l2(x));
                }
            }
        }
        let mut transposed = [Lanes([E::Num::default(); GROUP]); MAX_LANES];
        for (block, scores) in tile.chunks_mut(S::LANES).enumerate() {
            let first = block * S::LANES;
            let transposed = &mut transposed[..scores.len()];
            for lane in (0..at.rows.count).step_by(S::LANES) {
                let whole =
                    scores.len() == S::LANES && lane + S::LANES <= at.rows.count && shape.dim != 1;
                let lines = lane..(lane + S::LANES).min(at.span.end);
                if let (true, Keys::From(key)) = (whole, at.keys) {
                    // Neighbours in memory: transposed on vectors.
                    let mut vectors = s.block();
                    for (v, l) in vectors.as_mut().iter_mut().zip(lines) {
                        *v = E::load(s, &line(l)[key + first..]);
                    }
                    s.transpose(&mut vectors);
                    for (v, row) in vectors.as_mut().iter().zip(transposed.iter_mut()) {
                        s.store(*v, &mut row.0[lane..]);
                    }
                    continue;
                }
                for (i, row) in transposed.iter_mut().enumerate() {
                    let key = serving(at.keys.get(first + i), shape.dim);
                    for l in lines.clone() {
                        row.0[l] = line(l)[key].widen();
                    }
                }
            }
            pass(s, at, scores, &Bias(transposed));
        }
    }
}

/// score = ... + bias: adds to the gradient of a bias of this shape, whose rows `to` are, from key `first_key` on.
#[inline(always)]
pub(super) fn add_grads<N: Number, S: Simd<N>>(
    s: S,
    shape: Shape,
    (at, first_key): (At<'_>, usize),
    d_scores: &[Lanes<N>],
    to: &mut TileMut<'_, N>,
) {
    let add = |to: &mut N, x: N| *to = *to + x;
    let (lanes, zero) = (at.span.start..at.span.end, N::zero());
    // Sums of the tile first where an entry serves many pairs.
    if shape.len == 1 {
        let mut all = zero;
        for (i, d) in d_scores.iter().enumerate() {
            let sum = d.0[lanes.clone()].iter().fold(zero, |sum, x| sum + *x);
            if shape.dim == 1 {
                all = all + sum;
            } else {
                add(&mut to.update(0, 0)[at.keys.get(i) - first_key], sum);
            }
        }
        if shape.dim == 1 {
            add(&mut to.update(0, 0)[0], all);
        }
        return;
    }
    if shape.dim == 1 {
        for lane in lanes {
            let sum = d_scores.iter().fold(zero, |sum, d| sum + d.0[lane]);
            add(&mut to.update(0, at.rows.row(lane))[0], sum);
        }
        return;
    }
    if let Keys::From(key) = at.keys {
        // As in `AddBias`; they are changed a whole tile later.
        let next = key - first_key + d_scores.len();
        for lane in lanes {
            let row = &*to.update(0, at.rows.row(lane));
            let line = |at: usize| row.get(at).into_iter().for_each(|x| prefetch_l2(x));
            (next..next + d_scores.len()).step_by(MAX_LANES).for_each(line);
        }
    }
    for lane in at.span.vectors::<N, S>() {
        let lanes = lane..(lane + S::LANES).min(at.span.end);
        let mut done = 0;
        while let Keys::From(key) = at.keys
            && lanes.len() == S::LANES
            && done + S::LANES <= d_scores.len()
        {
            // Neighbours in memory: transposed on vectors.
            let mut block = s.block();
            for (v, d) in block.as_mut().iter_mut().zip(&d_scores[done..]) {
                *v = s.load(&d.0[lane..]);
            }
            s.transpose(&mut block);
            for (i, v) in block.as_mut().iter().enumerate() {
                let row = &mut to.update(0, at.rows.row(lane + i))[key - first_key + done..];
                s.store(s.add(s.load(row), *v), row);
            }
            done += S::LANES;
        }
        for (i, d) in d_scores.iter().enumerate().skip(done) {
            for lane in lanes.clone() {
                let row = to.update(0, at.rows.row(lane));
                add(&mut row[at.keys.get(i) - first_key], d.0[lane]);
            }
        }
    }
}
