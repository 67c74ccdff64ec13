//! Rotary position embedding (RoPE, Su et al. 2021), as a separate pass over queries and keys.
//!
//! Pair `i` of a row at position `p` is rotated by the angle `p * frequency_i`, so that the dot product of a query and a
//! key depends on their distance alone. Attention itself does not change: rotate q and k, then call it. A rotation is
//! orthogonal, so the backward pass is the inverse rotation of the gradient ([`Rope::inverse`]).
//!
//! Computing a sine costs more than rotating a pair in eight heads, so few sines are computed: a position is a multiple of
//! `GRID` plus a remainder, and its rotation is the product of their rotations. The grid is fixed: a position gives the
//! same bits wherever a call, a tile or a thread begins. No product is fused with a sum, so all instruction sets give the
//! same bits, too.

use crate::error::Error;
use crate::machine::Machine;
use crate::machine::simd::{Element, MAX_LANES, Number, Simd, Task};
use crate::tensor::view::{Shape, TileMut, ViewMut};
use std::ops::RangeFrom;

/// Which two features form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopePairs {
    /// `2i` and `2i + 1`, as published; used by GPT-J, and by Llama in Meta's checkpoints.
    Interleaved,
    /// `i` and `i + dim / 2`; used by GPT-NeoX, and by Llama in Hugging Face's checkpoints.
    HalfSplit,
}

impl RopePairs {
    /// Feature indices of a pair, of `dim` rotated features.
    pub(crate) fn features(self, pair: usize, dim: usize) -> [usize; 2] {
        match self {
            Self::Interleaved => [2 * pair, 2 * pair + 1],
            Self::HalfSplit => [pair, pair + dim / 2],
        }
    }
}

/// Positions of the rows of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions<'a> {
    /// Row `i` of every item has this position plus `i`; `first..` for short.
    From(i64),
    /// One position per row: `[batch, len]`, or `[len]` for all items.
    List(&'a [i64]),
}

impl From<RangeFrom<i64>> for Positions<'_> {
    fn from(rows: RangeFrom<i64>) -> Self {
        Self::From(rows.start)
    }
}

impl<'a> From<&'a [i64]> for Positions<'a> {
    fn from(list: &'a [i64]) -> Self {
        Self::List(list)
    }
}

/// Largest magnitude of a position: `f64` represents all integers up to here exactly.
const MAX_POSITION: i64 = 1 << f64::MANTISSA_DIGITS;

impl Positions<'_> {
    pub(crate) fn at(self, shape: Shape, batch: usize, row: usize) -> i64 {
        match self {
            Self::From(first) => first + row as i64,
            Self::List(list) if list.len() == shape.len => list[row],
            Self::List(list) => list[batch * shape.len + row],
        }
    }

    fn check(self, shape: Shape) -> Result<(), Error> {
        let option = "rope positions";
        let Shape { batch, len, .. } = shape;
        let near = |found: i128| {
            let accepted = "whole numbers from -2^53 to 2^53";
            let is_near = found.unsigned_abs() <= u128::from(MAX_POSITION.unsigned_abs());
            let far = Error::Value { option, found: found as f64, accepted };
            if is_near { Ok(()) } else { Err(far) }
        };
        match self {
            Self::From(first) => {
                near(first.into())?;
                near(i128::from(first) + len.max(1) as i128 - 1)
            }
            Self::List(list) => {
                let all = batch.saturating_mul(len);
                if list.len() != len && list.len() != all {
                    let expected = (all, "batch x length, or the length alone for all items");
                    return Err(Error::Count { option, expected, found: list.len() });
                }
                list.iter().try_for_each(|position| near((*position).into()))
            }
        }
    }
}

/// Parameters of a rotary position embedding.
///
/// ```
/// use regard::rope::{Rope, RopePairs};
/// use regard::{Machine, ViewMut};
/// let mut q = vec![1.0f32; 2 * 8 * 5 * 64];
/// let rope = Rope::new(64, RopePairs::HalfSplit).base(500_000.0);
/// rope.apply(Machine::detect(), &mut ViewMut::bhsd(&mut q, [2, 8, 5, 64])?, 0..)?;
/// # Ok::<(), regard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    dim: usize,
    pairs: RopePairs,
    base: f64,
    scaling: f64,
    frequencies: Option<Vec<f64>>,
    back: bool,
}

impl Rope {
    /// Rotates the first `dim` features of a row, an even number, and leaves the others unchanged. Pair `i` has the
    /// frequency `10000^(-2i / dim)`, in radians per position.
    #[must_use]
    pub fn new(dim: usize, pairs: RopePairs) -> Self {
        Self { dim, pairs, base: 10_000.0, scaling: 1.0, frequencies: None, back: false }
    }

    /// Sets the base, 10000 by default. A larger base slows the rotation of the last pairs.
    #[must_use]
    pub fn base(self, base: f64) -> Self {
        Self { base, ..self }
    }

    /// Position interpolation (Chen et al. 2023): divides positions by `factor`, so that sequences longer by that factor
    /// stay within the angles seen in training.
    #[must_use]
    pub fn scaling(self, factor: f64) -> Self {
        Self { scaling: factor, ..self }
    }

    /// Sets the frequency of each pair, in radians per position, instead of powers of the base: `[dim / 2]`.
    ///
    /// For other frequency schedules, such as those of Llama 3 and YaRN. YaRN also multiplies q and k by a factor, which is
    /// not a rotation: include its square in the scale of the score.
    #[must_use]
    pub fn frequencies(self, frequencies: Vec<f64>) -> Self {
        Self { frequencies: Some(frequencies), ..self }
    }

    /// The inverse rotation, which is also the backward pass.
    #[must_use]
    pub fn inverse(self) -> Self {
        Self { back: !self.back, ..self }
    }

    /// Frequency of a pair after scaling, in radians per position; negative if inverse.
    pub(crate) fn frequency(&self, pair: usize) -> f64 {
        let forth = match &self.frequencies {
            Some(given) => given[pair],
            None => self.base.powf(-((2 * pair) as f64) / self.dim as f64),
        };
        (if self.back { -forth } else { forth }) / self.scaling
    }

    pub(crate) fn pairs(&self) -> impl ExactSizeIterator<Item = [usize; 2]> {
        (0..self.dim / 2).map(|pair| self.pairs.features(pair, self.dim))
    }

    /// Validates the parameters. [`apply`](Self::apply) calls it first.
    pub fn check(&self) -> Result<(), Error> {
        let pairs = self.dim / 2;
        if self.dim % 2 == 1 {
            return Err(Error::OddDim { option: "rope dim", found: self.dim });
        }
        for (option, found) in [("rope base", self.base), ("rope scaling", self.scaling)] {
            if !(found > 0.0 && found.is_finite()) {
                return Err(Error::Value { option, found, accepted: "a finite number above 0" });
            }
        }
        let option = "rope frequencies";
        if let Some(found) = self.frequencies.as_ref().map(Vec::len).filter(|n| *n != pairs) {
            let expected = (pairs, "one for each pair of features");
            return Err(Error::Count { option, expected, found });
        }
        let accepted = "finite numbers, small enough for finite angles";
        let most = f64::MAX / MAX_POSITION as f64;
        let unusable = |found: &f64| found.is_nan() || found.abs() > most;
        match (0..pairs).map(|pair| self.frequency(pair)).find(unusable) {
            Some(found) => Err(Error::Value { option, found, accepted }),
            None => Ok(()),
        }
    }

    /// Rotates each row of `x [batch, heads, len, features]` by its position, in place. All heads are rotated alike.
    ///
    /// Costs one read and one write of the rotated features. On x86, subnormal numbers count as 0, as in all kernels.
    #[inline(never)]
    pub fn apply<'p, E: Element>(
        &self,
        machine: Machine,
        x: &mut ViewMut<'_, E>,
        positions: impl Into<Positions<'p>>,
    ) -> Result<(), Error> {
        let (shape, positions) = (x.shape(), positions.into());
        self.check()?;
        if self.dim > shape.dim {
            return Err(Error::TooFewFeatures { needed: self.dim, found: shape.dim });
        }
        positions.check(shape)?;
        if self.dim == 0 || shape.to_array().contains(&0) {
            return Ok(());
        }
        let near = Near::new(self, positions, shape);
        let call = Call { rope: self, near: &near, positions, shape };
        let scratch = || Scratch {
            place: None,
            far: Rotations::new(1, self),
            rows: Rotations::new(ROWS.min(shape.len), self),
        };
        x.change(machine.threads, ROWS, scratch, |scratch, batch, tile| {
            E::Num::enter(machine.isa, RotateRows { call, batch, tile, scratch });
        });
        Ok(())
    }
}

/// Rows whose rotations are computed at once and used by all heads: at most 16 KiB of `f32` for 128 features, which stays
/// in the L1 cache with the rows of a head.
const ROWS: usize = 16;

/// Positions from one grid point to the next. In a call of `GRID^2` = 4096 positions, the sines are divided evenly between
/// grid points and remainders.
const GRID: usize = 64;

/// Grid point at or below a position, and the remainder.
#[expect(clippy::cast_possible_truncation, reason = "the rest is below GRID")]
fn on_grid(position: i64) -> (i64, usize) {
    let rest = position.rem_euclid(GRID as i64);
    (position - rest, rest as usize)
}

/// Cosines and sines of the angles of some rows.
///
/// `HalfSplit` stores one of each per pair. `Interleaved` stores one of each per feature, the first sine of a pair negated: a
/// rotated feature is its product with the cosine plus its neighbor's product with the sine, without deinterleaving
/// vectors.
#[derive(Debug)]
struct Rotations<N> {
    cos: Vec<N>,
    sin: Vec<N>,
    /// Entries per row.
    width: usize,
}

impl<N: Number> Rotations<N> {
    fn new(rows: usize, rope: &Rope) -> Self {
        let width = match rope.pairs {
            RopePairs::Interleaved => rope.dim,
            RopePairs::HalfSplit => rope.dim / 2,
        };
        let zeros = || vec![N::zero(); rows * width];
        Self { cos: zeros(), sin: zeros(), width }
    }

    #[inline(always)]
    fn row(&self, row: usize) -> (&[N], &[N]) {
        let row = row * self.width..(row + 1) * self.width;
        (&self.cos[row.clone()], &self.sin[row])
    }

    #[inline(always)]
    fn row_mut(&mut self, row: usize) -> (&mut [N], &mut [N]) {
        let row = row * self.width..(row + 1) * self.width;
        (&mut self.cos[row.clone()], &mut self.sin[row])
    }

    /// Sets a row to the product of two rotations.
    #[inline(always)]
    fn join(&mut self, row: usize, (a_cos, a_sin): (&[f64], &[f64]), b: (&[f64], &[f64])) {
        let (cos, sin) = self.row_mut(row);
        let n = cos.len();
        let (sin, a_cos, a_sin) = (&mut sin[..n], &a_cos[..n], &a_sin[..n]);
        let (b_cos, b_sin) = (&b.0[..n], &b.1[..n]);
        for i in 0..n {
            cos[i] = N::from_f64(a_cos[i] * b_cos[i] - a_sin[i] * b_sin[i]);
            sin[i] = N::from_f64(a_sin[i] * b_cos[i] + a_cos[i] * b_sin[i]);
        }
    }
}

impl Rotations<f64> {
    /// Sets a row to the rotations of a position.
    fn set(&mut self, row: usize, position: i64, pairs: RopePairs, frequencies: &[f64]) {
        let (cos, sin) = self.row_mut(row);
        for (i, frequency) in frequencies.iter().enumerate() {
            let (c, s) = cos_sin(position as f64, *frequency);
            match pairs {
                RopePairs::Interleaved => {
                    cos[2 * i..][..2].copy_from_slice(&[c, c]);
                    sin[2 * i..][..2].copy_from_slice(&[-s, s]);
                }
                RopePairs::HalfSplit => (cos[i], sin[i]) = (c, s),
            }
        }
    }
}

/// Cosine and sine of `position * frequency`.
///
/// At position 10^6, the product in `f64` has a rounding error of up to 6e-11, so the result is rotated by that error
/// afterwards: to the last bit, its cosine is 1 and its sine is the error itself.
fn cos_sin(position: f64, frequency: f64) -> (f64, f64) {
    let angle = position * frequency;
    let rest = position.mul_add(frequency, -angle);
    let (sin, cos) = angle.sin_cos();
    (cos - rest * sin, sin + rest * cos)
}

/// Rotations that are computed once per call.
#[derive(Debug)]
struct Near {
    frequencies: Vec<f64>,
    /// `[GRID]`: the rotations of each remainder that occurs.
    rotations: Rotations<f64>,
}

impl Near {
    fn new(rope: &Rope, positions: Positions<'_>, shape: Shape) -> Self {
        let frequencies: Vec<f64> = (0..rope.dim / 2).map(|pair| rope.frequency(pair)).collect();
        let mut rotations = Rotations::new(GRID, rope);
        let mut occurs = [false; GRID];
        match positions {
            Positions::From(first) => (0..shape.len.min(GRID))
                .for_each(|row| occurs[on_grid(first + row as i64).1] = true),
            Positions::List(list) => list.iter().for_each(|p| occurs[on_grid(*p).1] = true),
        }
        for rest in (0..GRID).filter(|rest| occurs[*rest]) {
            rotations.set(rest, rest as i64, rope.pairs, &frequencies);
        }
        Self { frequencies, rotations }
    }
}

/// Inputs that the tasks of a call share.
#[derive(Clone, Copy, Debug)]
struct Call<'t> {
    rope: &'t Rope,
    near: &'t Near,
    positions: Positions<'t>,
    shape: Shape,
}

/// Scratch that a thread keeps from one task to the next.
#[derive(Debug)]
struct Scratch<N> {
    /// The last grid point.
    place: Option<i64>,
    /// Rotations of that grid point.
    far: Rotations<f64>,
    /// Rotations of the rows of a task.
    rows: Rotations<N>,
}

/// Rotates some rows of all heads of an item.
struct RotateRows<'t, E: Element> {
    call: Call<'t>,
    batch: usize,
    tile: TileMut<'t, E>,
    scratch: &'t mut Scratch<E::Num>,
}

impl<E: Element> Task<E::Num> for RotateRows<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<E::Num>>(mut self, _: S) {
        self.fill_rotations();
        let Self { call: Call { rope, shape, .. }, tile, scratch: Scratch { rows, .. }, .. } =
            &mut self;
        for head in 0..shape.heads {
            for lane in 0..tile.rows().count {
                let row = &mut tile.update(head, lane)[..rope.dim];
                match rope.pairs {
                    RopePairs::Interleaved => interleaved(row, rows.row(lane)),
                    RopePairs::HalfSplit => halves(row, rows.row(lane)),
                }
            }
        }
    }
}

impl<E: Element> RotateRows<'_, E> {
    #[inline(always)]
    fn fill_rotations(&mut self) {
        let Call { rope, near, positions, shape } = self.call;
        let (Scratch { place, far, rows: rotations }, rows) =
            (&mut *self.scratch, self.tile.rows());
        for lane in 0..rows.count {
            let (at, rest) = on_grid(positions.at(shape, self.batch, rows.row(lane)));
            if *place != Some(at) {
                *place = Some(at);
                far.set(0, at, rope.pairs, &near.frequencies);
            }
            rotations.join(lane, far.row(0), near.rotations.row(rest));
        }
    }
}

/// Rotates interleaved pairs. Each result is rounded to the stored dtype once.
#[inline(always)]
fn side_by_side<E: Element, const N: usize>(x: &mut [E; N], cos: &[E::Num; N], sin: &[E::Num; N]) {
    let wide = x.map(E::widen);
    *x = std::array::from_fn(|i| E::narrow(wide[i] * cos[i] + wide[i ^ 1] * sin[i]));
}

#[inline(always)]
fn interleaved<E: Element>(row: &mut [E], (cos, sin): (&[E::Num], &[E::Num])) {
    let ((x, x_rest), (cos, cos_rest)) = (row.as_chunks_mut::<MAX_LANES>(), cos.as_chunks());
    let (sin, sin_rest) = sin.as_chunks();
    for (x, (cos, sin)) in x.iter_mut().zip(cos.iter().zip(sin)) {
        // Otherwise the compiler vectorizes 8 iterations at once with gathers: 3 times slower from 128 features on.
        std::hint::black_box(());
        side_by_side(x, cos, sin);
    }
    let (x, cos, sin) =
        (x_rest.as_chunks_mut::<2>().0, cos_rest.as_chunks().0, sin_rest.as_chunks().0);
    for (x, (cos, sin)) in x.iter_mut().zip(cos.iter().zip(sin)) {
        side_by_side(x, cos, sin);
    }
}

#[inline(always)]
fn halves<E: Element>(row: &mut [E], (cos, sin): (&[E::Num], &[E::Num])) {
    let (xs, ys) = row.split_at_mut(row.len() / 2);
    for ((x, y), (cos, sin)) in xs.iter_mut().zip(ys).zip(cos.iter().zip(sin)) {
        let (a, b) = (x.widen(), y.widen());
        (*x, *y) = (E::narrow(a * *cos - b * *sin), E::narrow(a * *sin + b * *cos));
    }
}
