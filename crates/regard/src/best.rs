//! The best keys of each row of a group: those with the highest scores, the earlier one where scores are equal.
//!
//! Cost: one comparison of vectors for a key that is below all that are kept, which is nearly every one. Memory: what is kept.

use crate::index::{At, low};
use crate::simd::{GROUP, Lanes, Number, Simd};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// The best so far of each row.
#[derive(Debug)]
pub(crate) struct BestKeys<N> {
    most: usize,
    /// The worst of them first to go.
    heaps: Vec<BinaryHeap<Candidate<N>>>,
    /// The score that a better one must have at least.
    least: Box<Lanes<N>>,
}

/// A key that may be among the best; the greater, the worse.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate<N> {
    pub(crate) score: N,
    pub(crate) key: usize,
}

impl<N: Number> BestKeys<N> {
    /// None yet, of up to `most`.
    pub(crate) fn new(most: usize) -> Self {
        let heaps = (0..GROUP).map(|_| BinaryHeap::new()).collect();
        Self { most, heaps, least: Box::new(Lanes([N::neg_infinity(); GROUP])) }
    }

    /// How many are kept of each row, at most.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// None again.
    pub(crate) fn clear(&mut self) {
        self.heaps.iter_mut().for_each(BinaryHeap::clear);
        self.least.0.fill(N::neg_infinity());
    }

    /// Takes the scores of some keys in. Most are below the best so far: one comparison of vectors.
    #[inline(always)]
    pub(crate) fn take<S: Simd<N>>(&mut self, s: S, at: At<'_>, tile: &[Lanes<N>]) {
        let everyone = at.span.set();
        for (i, scores) in tile.iter().enumerate() {
            for first in at.span.vectors::<N, S>() {
                let below = s.less(s.load(&scores.0[first..]), s.load(&self.least.0[first..]));
                let mut some =
                    low(everyone >> first) & !s.bits(below) & (u32::MAX >> (32 - S::LANES));
                while some != 0 {
                    let lane = first + some.trailing_zeros() as usize;
                    some &= some - 1;
                    // Keys do not always ascend, so an equal may be better.
                    let new = Candidate { score: scores.0[lane], key: at.keys.get(i) };
                    if new.score > N::neg_infinity() {
                        new.join(&mut self.heaps[lane], self.most, &mut self.least.0[lane]);
                    }
                }
            }
        }
    }

    /// Those of a row, the best first.
    pub(crate) fn of_row(&self, lane: usize) -> Vec<Candidate<N>> {
        self.heaps[lane].clone().into_sorted_vec()
    }
}

impl<N: Number> Candidate<N> {
    /// Takes its place among the best, if it is one of them.
    fn join(self, heap: &mut BinaryHeap<Self>, most: usize, least: &mut N) {
        if heap.len() < most {
            heap.push(self);
        } else if let Some(mut worst) = heap.peek_mut()
            && self < *worst
        {
            *worst = self;
        }
        if heap.len() == most {
            *least = heap.peek().map_or(*least, |worst| worst.score);
        }
    }
}

impl<N: Number> Eq for Candidate<N> {}

impl<N: Number> Ord for Candidate<N> {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_score = other.score.partial_cmp(&self.score).unwrap_or(Ordering::Equal);
        by_score.then(self.key.cmp(&other.key))
    }
}

impl<N: Number> PartialOrd for Candidate<N> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
