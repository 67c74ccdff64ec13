//! Locality-sensitive hashing of rows into buckets by random directions.
//!
//! A digit is `argmax [x R, -x R]` (Andoni et al. 2015): rows at a small angle mostly get the same digit, whatever their
//! norms. A bucket number has several digits, so the cost grows with the logarithm of the number of buckets. Buckets that
//! share their first digits are adjacent in the sorted order: a row and a key that differ in the last digits may still be
//! candidates through an adjacent block.

use crate::description::dropout::{halves, philox};
use crate::error::Error;
use crate::kernel::lanes::load_transposed;
use crate::kernel::micro::{Dots, dot_tile};
use crate::machine::Machine;
use crate::machine::simd::{Element, GROUP, Isa, Lanes, Number, Simd, Task};
use crate::tensor::index::Span;
use crate::tensor::view::{Rows, Shape, TileMut, View, ViewMut};

/// Random directions per digit, without their negatives: one register tile of `dot_tile`.
const DIRECTIONS: usize = 8;
/// Number of values of a digit: the directions and their negatives.
const BASE: u32 = 16;

/// Random directions of all rounds.
#[derive(Debug)]
pub(super) struct Hash<N> {
    /// `[rounds, digits, DIRECTIONS, dim]`
    directions: Vec<N>,
    rounds: usize,
    digits: u32,
    dim: usize,
}

impl<N: Number> Hash<N> {
    /// Rounds the number of buckets up to a power of 16: at least `buckets`, and fewer than 16 times that.
    pub(super) fn new(seed: u64, rounds: usize, buckets: usize, dim: usize) -> Self {
        let digits = if buckets <= 1 { 0 } else { 1 + (buckets - 1).ilog(BASE as usize) };
        let entries = digits as usize * DIRECTIONS * dim;
        let of_round = |round| (0..entries).map(move |i| N::from_f64(normal(seed, round, i)));
        let directions = (0..rounds).flat_map(of_round).collect();
        Self { directions, rounds, digits, dim }
    }

    pub(super) fn buckets(&self) -> usize {
        (BASE as usize).pow(self.digits)
    }

    /// Bucket numbers of all rows of `x [batch, heads, len, dim]`, as `[batch, heads, len, rounds]`.
    pub(super) fn of<E: Element<Num = N>>(
        &self,
        machine: Machine,
        x: View<'_, E>,
    ) -> Result<Vec<u32>, Error> {
        let Shape { batch, heads, len, .. } = x.shape();
        let mut codes = vec![0; batch * heads * len * self.rounds];
        if self.digits == 0 {
            return Ok(codes);
        }
        let scratch = || Scratch {
            lanes: vec![Lanes([N::default(); GROUP]); self.dim],
            tile: [Lanes([N::default(); GROUP]); DIRECTIONS],
        };
        let mut view = ViewMut::bhsd(&mut codes, [batch, heads, len, self.rounds])?;
        view.change(machine.threads, GROUP, scratch, |scratch, b, mut codes| {
            for head in 0..heads {
                let (rows, codes) = (x.head(b, head), &mut codes);
                HashRows { hash: self, rows, head, codes, scratch }.run(machine.isa);
            }
        });
        Ok(codes)
    }
}

/// A standard normal number per round and entry (Box and Muller 1958).
fn normal(seed: u64, round: usize, entry: usize) -> f64 {
    let [[low, high], [place, more]] = [round, entry].map(|x| halves(x as u64));
    let words =
        philox([[place], [more], [low], [high]], halves(seed)).map(|word| f64::from(word[0]));
    let unit = |x: f64| (x + 0.5) / (f64::from(u32::MAX) + 1.0);
    (-2.0 * unit(words[0]).ln()).sqrt() * (std::f64::consts::TAU * unit(words[1])).cos()
}

struct Scratch<N> {
    lanes: Vec<Lanes<N>>,
    tile: [Lanes<N>; DIRECTIONS],
}

/// Computes the buckets of up to [`GROUP`] rows of a head.
struct HashRows<'t, 'v, E: Element> {
    hash: &'t Hash<E::Num>,
    rows: Rows<'t, E>,
    head: usize,
    codes: &'t mut TileMut<'v, u32>,
    scratch: &'t mut Scratch<E::Num>,
}

impl<E: Element> HashRows<'_, '_, E> {
    fn run(self, isa: Isa) {
        let Self { hash, rows, head, codes, scratch: Scratch { lanes, tile } } = self;
        let (digits, dim) = (hash.digits as usize, hash.dim);
        let own = codes.rows();
        load_transposed(isa, |i| rows.row(own.row(i)), own.count, E::Num::from_f64(1.0), lanes);
        let span = Span::first(own.count);
        for (i, data) in hash.directions.chunks_exact(DIRECTIONS * dim).enumerate() {
            let directions = Rows { data, stride: dim, len: DIRECTIONS, dim };
            dot_tile(isa, (directions, lanes), span, tile, &mut Dots);
            let most = E::Num::enter(isa, Most { tile, span });
            for (lane, digit) in most[..own.count].iter().enumerate() {
                let code = &mut codes.update(head, lane)[i / digits];
                *code = *code * BASE + digit;
            }
        }
    }
}

/// Index of the largest dot product in each lane; the negated directions follow the directions.
struct Most<'t, N> {
    tile: &'t [Lanes<N>; DIRECTIONS],
    span: Span,
}

impl<N: Number> Task<N> for Most<'_, N> {
    type Out = [u32; GROUP];
    #[inline(always)]
    fn run<S: Simd<N>>(self, s: S) -> [u32; GROUP] {
        let mut most = [0; GROUP];
        let mut found = Lanes([N::zero(); GROUP]);
        for lane in self.span.vectors::<N, S>() {
            let (mut best, mut at) = (s.splat(N::neg_infinity()), s.splat(N::zero()));
            for (i, x) in self.tile.iter().enumerate() {
                let along = s.load(&x.0[lane..]);
                let against = s.sub(s.splat(N::zero()), along);
                for (x, i) in [(along, i), (against, i + self.tile.len())] {
                    let larger = s.less(best, x);
                    best = s.select(larger, x, best);
                    at = s.select(larger, s.splat(N::of_len(i)), at);
                }
            }
            s.store(at, &mut found.0[lane..]);
        }
        let whole = |x: N| x.to_u32().unwrap_or(0);
        most.iter_mut().zip(found.0).for_each(|(most, x)| *most = whole(x));
        most
    }
}
