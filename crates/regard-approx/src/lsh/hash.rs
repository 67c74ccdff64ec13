//! Locality-sensitive hashing of rows into buckets by random directions.
//!
//! A digit is `argmax [x R, -x R]` (Andoni et al. 2015): rows at a small angle mostly get the same digit, whatever their
//! norms. A bucket number has several digits, so the cost grows with the logarithm of the number of buckets. Buckets that
//! share their first digits are adjacent in the sorted order: a row and a key that differ in the last digits may still be
//! candidates through an adjacent block.

use super::rows::ROWS;
use crate::random::{halves, philox};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView1};
use regard::{Element, Machine, Number, Shape, View};

/// Random directions per digit, without their negatives.
const DIRECTIONS: u32 = 8;
/// Number of values of a digit: the directions and their negatives.
const BASE: u32 = 2 * DIRECTIONS;

/// Random directions of all rounds.
#[derive(Debug)]
pub(super) struct Hash<N> {
    /// `[rounds x digits x DIRECTIONS, dim]`
    directions: Array2<N>,
    rounds: usize,
    digits: u32,
    /// Number of buckets of a round.
    pub(super) buckets: usize,
}

impl<N: Number> Hash<N> {
    /// Rounds the number of buckets up to a power of 16: at least `buckets`, and fewer than 16 times that.
    pub(super) fn new(seed: u64, rounds: usize, buckets: usize, dim: usize) -> Self {
        let digits = if buckets <= 1 { 0 } else { 1 + (buckets - 1).ilog(BASE as usize) };
        let each = (digits * DIRECTIONS) as usize;
        let directions = Array2::from_shape_fn((rounds * each, dim), |(i, feature)| {
            N::from_f64(normal(seed, i / each, i % each * dim + feature))
        });
        Self { directions, rounds, digits, buckets: (BASE as usize).pow(digits) }
    }

    /// Bucket numbers of all rows of `x [batch, heads, len, dim]`, as `[batch, heads, len, rounds]`. Cost: one product of
    /// `[ROWS, dim]` and `[dim, rounds x digits x DIRECTIONS]` for each block of rows.
    pub(super) fn of<E: Element<Num = N>>(&self, machine: Machine, x: View<'_, E>) -> Vec<u32> {
        let Shape { batch, heads, len, dim } = x.shape();
        let rows = batch * heads * len;
        if self.digits == 0 {
            return vec![0; rows * self.rounds];
        }
        let scratch =
            || (Array2::zeros((ROWS, dim)), Array2::zeros((ROWS, self.directions.nrows())));
        // The product always has the same shape: the bucket of a row depends on no other row, nor on the number of rows.
        let buckets = machine.collect(rows.div_ceil(ROWS), scratch, |(wide, dots), block| {
            let own = block * ROWS..rows.min((block + 1) * ROWS);
            for (mut to, row) in wide.rows_mut().into_iter().zip(own.clone()) {
                let from = x.row(row / len / heads, row / len % heads, row % len);
                to.zip_mut_with(&ArrayView1::from(from), |to, x| *to = x.widen());
            }
            general_mat_mul(N::one(), wide, &self.directions.t(), N::zero(), dots);
            let (dots, _) = dots.as_slice().unwrap_or(&[]).as_chunks();
            let number = |dots: &[_]| dots.iter().map(largest).fold(0, |n, digit| n * BASE + digit);
            let numbers = dots.chunks_exact(self.digits as usize).map(number);
            numbers.take(own.len() * self.rounds).collect::<Vec<_>>()
        });
        buckets.concat()
    }
}

/// Index of the largest of some products and their negatives, which follow them: the first of several, 0 if all are NaN.
fn largest<N: Number>(dots: &[N; DIRECTIONS as usize]) -> u32 {
    let (mut most, mut at) = (N::neg_infinity(), 0);
    for (i, x) in (0..).zip(dots) {
        if x.abs() > most {
            (most, at) = (x.abs(), i);
        }
    }
    if dots[at as usize] < N::zero() { at + DIRECTIONS } else { at }
}

/// A standard normal number per round and entry (Box and Muller 1958).
fn normal(seed: u64, round: usize, entry: usize) -> f64 {
    let [[low, high], [place, more]] = [round, entry].map(|x| halves(x as u64));
    let words = philox([place, more, low, high], halves(seed)).map(f64::from);
    let unit = |x: f64| (x + 0.5) / (f64::from(u32::MAX) + 1.0);
    (-2.0 * unit(words[0]).ln()).sqrt() * (std::f64::consts::TAU * unit(words[1])).cos()
}
