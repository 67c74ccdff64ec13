//! Top-k keys of each row of a group: the keys with the highest scores; of equal scores, the earlier key.
//!
//! Cost: one vector comparison for a key whose score is below all kept ones, which holds for nearly every key. Memory: the kept
//! keys.

use crate::machine::simd::{GROUP, Lanes, Number, leaf};
use crate::tensor::index::{At, low};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Running top-k of each row of a group.
#[derive(Debug)]
pub(crate) struct BestKeys<N> {
    most: usize,
    /// One heap per row, with the worst kept key on top.
    heaps: Vec<BinaryHeap<Candidate<N>>>,
    /// The worst kept score of each row, `-inf` until its heap is full. Keys with lower scores are skipped.
    least: Box<Lanes<N>>,
}

/// A key with its score. Ordered from best to worst, so that the top of a max-heap is the worst.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate<N> {
    pub(crate) score: N,
    pub(crate) key: usize,
}

impl<N: Number> BestKeys<N> {
    pub(crate) fn new(most: usize) -> Self {
        let heaps = (0..GROUP).map(|_| BinaryHeap::new()).collect();
        Self { most, heaps, least: Box::new(Lanes([N::neg_infinity(); GROUP])) }
    }

    /// Largest number of kept keys per row.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// The kept keys of a row, best first.
    pub(crate) fn of_row(&self, lane: usize) -> Vec<Candidate<N>> {
        self.heaps[lane].clone().into_sorted_vec()
    }
}

leaf! {
    /// Adds the scores of a tile. A key below `least` in all lanes of a vector costs one comparison.
    pub(crate) fn take_best<'t, N>(
        s: S,
        best: &'t mut BestKeys<N>,
        at: At<'t>,
        tile: &'t [Lanes<N>],
    ) {
        let everyone = at.span.set();
        for (i, scores) in tile.iter().enumerate() {
            for first in at.span.vectors::<N, S>() {
                let below = s.less(s.load(&scores.0[first..]), s.load(&best.least.0[first..]));
                let mut some =
                    low(everyone >> first) & !s.bits(below) & (u32::MAX >> (32 - S::LANES));
                while some != 0 {
                    let lane = first + some.trailing_zeros() as usize;
                    some &= some - 1;
                    // Keys do not always arrive in ascending order, so a key with an equal score may be better.
                    let new = Candidate { score: scores.0[lane], key: at.keys.get(i) };
                    if new.score > N::neg_infinity() {
                        new.join(&mut best.heaps[lane], best.most, &mut best.least.0[lane]);
                    }
                }
            }
        }
    }
}

impl<N: Number> Candidate<N> {
    /// Inserts the candidate if it is among the best `most` of the row.
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
