//! The two products of decoding on vectors, features side by side.
//!
//! Sums over features are kept in 16 parts, whatever the vector width, and added up in a fixed tree: so AVX2 and AVX-512
//! agree to the bit here too.

#![expect(
    clippy::needless_range_loop,
    reason = "indices over constants keep the register tiles in registers"
)]

use super::decode::{AnyRows, DecodeRows, Products, Weighted};
use crate::kernel::lanes::prefetch_l2;
use crate::machine::simd::{Element, Isa, MAX_LANES, Number, Simd, Task, Visitor, each};
use crate::tensor::view::{Rows, RowsOf};

/// The products on vectors.
pub(crate) struct Vectors;

impl<N: Number> Products<N> for Vectors {
    fn start(&mut self, rows: &mut DecodeRows<N>, factor: N) {
        for row in 0..rows.count {
            rows.q.row_mut(row).iter_mut().for_each(|x| *x = *x * factor);
        }
    }

    fn dots(
        &mut self,
        isa: Isa,
        rows: &DecodeRows<N>,
        keys: AnyRows<'_, N>,
        next_rows: AnyRows<'_, N>,
        to: &mut [N],
    ) {
        N::visit(keys, Dots { isa, rows, next_rows, to });
    }

    fn add(&mut self, isa: Isa, rows: &mut DecodeRows<N>, work: Weighted<'_, N>) {
        N::visit(work.values, Add { isa, rows, work });
    }

    fn finish(&mut self, _: &mut DecodeRows<N>) -> bool {
        true
    }
}

/// [`DotRows`] of keys of any type.
struct Dots<'t, 'n, N: Number> {
    isa: Isa,
    rows: &'t DecodeRows<N>,
    next_rows: AnyRows<'n, N>,
    to: &'t mut [N],
}

impl<'r, N: Number> Visitor<RowsOf<'r>, N> for Dots<'_, '_, N> {
    type Out = ();
    fn visit<E: Element<Num = N>>(self, keys: Rows<'r, E>) {
        let Self { isa, rows, next_rows, to } = self;
        N::enter(isa, DotRows { rows, keys, next_rows, to });
    }
}

/// [`AddRows`] of values of any type.
struct Add<'t, 'w, N: Number> {
    isa: Isa,
    rows: &'t mut DecodeRows<N>,
    work: Weighted<'w, N>,
}

impl<'r, N: Number> Visitor<RowsOf<'r>, N> for Add<'_, '_, N> {
    type Out = ();
    fn visit<T: Element<Num = N>>(self, values: Rows<'r, T>) {
        let Self { isa, rows, work } = self;
        match work.visible {
            Some(_) => N::enter(isa, AddRows::<N, T, true> { rows, values, work }),
            None => N::enter(isa, AddRows::<N, T, false> { rows, values, work }),
        }
    }
}

/// Parts that a sum over features is kept in.
const PARTIAL: usize = 16;
/// Rows of a register tile.
const ROWS: usize = 4;

/// `to[key][row] = keys[key] . q[row]`
struct DotRows<'t, 'r, 'n, E: Element> {
    rows: &'t DecodeRows<E::Num>,
    keys: Rows<'r, E>,
    /// Rows that are needed next.
    next_rows: AnyRows<'n, E::Num>,
    to: &'t mut [E::Num],
}

impl<E: Element> Task<E::Num> for DotRows<'_, '_, '_, E> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<E::Num>>(mut self, s: S) {
        let mut row = 0;
        while row + ROWS <= self.rows.count {
            let mut key = 0;
            // As many results as a vector has lanes, so that they are added up together.
            if S::LANES == 16 {
                while key + 4 <= self.keys.len {
                    self.block::<S, 4, ROWS>(s, key, row);
                    key += 4;
                }
            } else if S::LANES == 8 {
                while key + 2 <= self.keys.len {
                    self.block::<S, 2, ROWS>(s, key, row);
                    key += 2;
                }
            }
            while key < self.keys.len {
                self.block::<S, 1, ROWS>(s, key, row);
                key += 1;
            }
            row += ROWS;
        }
        while row < self.rows.count {
            let mut key = 0;
            while S::LANES >= 8 && key + 8 <= self.keys.len {
                self.block::<S, 8, 1>(s, key, row);
                key += 8;
            }
            while key < self.keys.len {
                self.block::<S, 1, 1>(s, key, row);
                key += 1;
            }
            row += 1;
        }
    }
}

impl<E: Element> DotRows<'_, '_, '_, E> {
    #[inline(always)]
    fn block<S: Simd<E::Num>, const KEYS: usize, const ROWS: usize>(
        &mut self,
        s: S,
        key: usize,
        row: usize,
    ) {
        // Before the accumulators are set up: its branches would put them on the stack.
        for i in 0..if row == 0 { KEYS } else { 0 } {
            prefetch_row(self.next_rows, key + i);
        }
        let zero = s.splat(E::Num::default());
        // One vector for each of the parts' slices; the lower ones first.
        let mut sums = [[[zero; ROWS]; KEYS]; 4];
        let vectors = PARTIAL / S::LANES;
        // Cut to the same number of parts, which spares the loop all checks.
        let whole = self.keys.dim / PARTIAL;
        let mut keys: [(&[[E; PARTIAL]], &[E]); KEYS] = [(&[], &[]); KEYS];
        let mut q: [&[[E::Num; PARTIAL]]; ROWS] = [&[]; ROWS];
        for i in 0..KEYS {
            let (parts, tail) = self.keys.row(key + i).as_chunks();
            keys[i] = (&parts[..whole], tail);
        }
        for r in 0..ROWS {
            q[r] = &self.rows.q.row(row + r).as_chunks().0[..whole];
        }
        for part in 0..whole {
            for j in 0..vectors {
                let mut y = [zero; ROWS];
                for r in 0..ROWS {
                    y[r] = s.load(&q[r][part][j * S::LANES..]);
                }
                for i in 0..KEYS {
                    let x = E::load(s, &keys[i].0[part][j * S::LANES..]);
                    for r in 0..ROWS {
                        sums[j][i][r] = s.fma(x, y[r], sums[j][i][r]);
                    }
                }
            }
        }
        if whole * PARTIAL < self.keys.dim {
            for i in 0..KEYS {
                let mut tail = [E::Num::default(); PARTIAL];
                keys[i].1.iter().zip(&mut tail).for_each(|(x, to)| *to = x.widen());
                for j in 0..vectors {
                    let x = s.load(&tail[j * S::LANES..]);
                    for r in 0..ROWS {
                        let y = &self.rows.q.row(row + r)[whole * PARTIAL..];
                        sums[j][i][r] = s.fma(x, s.load(&y[j * S::LANES..]), sums[j][i][r]);
                    }
                }
            }
        }
        let sums = add_parts(s, sums);
        let width = self.rows.width;
        let to = &mut self.to[key * width + row..];
        if width == ROWS && KEYS * ROWS == S::LANES {
            return s.store(sums, to);
        }
        let mut results = [E::Num::default(); MAX_LANES];
        s.store(sums, &mut results);
        for i in 0..KEYS {
            for r in 0..ROWS {
                to[i * width + r] = results[i * ROWS + r];
            }
        }
    }
}

/// The sums of all parts, one lane for each key and row, in a tree: part i and i + 8, i and i + 4, i and i + 2, i and i + 1.
#[inline(always)]
fn add_parts<N: Number, S: Simd<N>, const KEYS: usize, const ROWS: usize>(
    s: S,
    mut sums: [[[S::V; ROWS]; KEYS]; 4],
) -> S::V {
    // Every bound is a constant: of any other loop over them, the compiler would keep the sums in memory.
    let vectors = PARTIAL / S::LANES;
    for i in 0..KEYS {
        for r in 0..ROWS {
            if vectors == 4 {
                sums[0][i][r] = s.add(sums[0][i][r], sums[2][i][r]);
                sums[1][i][r] = s.add(sums[1][i][r], sums[3][i][r]);
            }
            if vectors >= 2 {
                sums[0][i][r] = s.add(sums[0][i][r], sums[1][i][r]);
            }
        }
    }
    let mut block = s.block();
    for i in 0..KEYS {
        for r in 0..ROWS {
            block.as_mut()[i * ROWS + r] = sums[0][i][r];
        }
    }
    s.transpose(&mut block);
    fold::<N, S, 8>(s, block.as_mut());
    fold::<N, S, 4>(s, block.as_mut());
    fold::<N, S, 2>(s, block.as_mut());
    fold::<N, S, 1>(s, block.as_mut());
    block.as_mut()[0]
}

/// Adds the second `HALF` vectors to the first, if there are so many.
#[inline(always)]
fn fold<N: Number, S: Simd<N>, const HALF: usize>(s: S, vectors: &mut [S::V]) {
    if HALF < S::LANES {
        for i in 0..HALF {
            vectors[i] = s.add(vectors[i], vectors[i + HALF]);
        }
    }
}

/// `sums[row] = sums[row] * shrink[row] + sum over keys of weights[key][row] * values[key]`. With `HIDDEN`, a key that a row
/// does not see is left out of its sum.
struct AddRows<'t, 'r, 'w, N: Number, T, const HIDDEN: bool> {
    rows: &'t mut DecodeRows<N>,
    values: Rows<'r, T>,
    work: Weighted<'w, N>,
}

/// Asks for a row, if it is there.
#[inline(always)]
fn prefetch_row<N: Number>(rows: AnyRows<'_, N>, i: usize) {
    each!(rows, rows => if i < rows.len {
        prefetch_l2(rows.row(i));
    });
}

impl<N: Number, T: Element<Num = N>, const HIDDEN: bool> Task<N>
    for AddRows<'_, '_, '_, N, T, HIDDEN>
{
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(mut self, s: S) {
        let (count, dim, first) = (self.rows.count, self.values.dim, self.work.first_feature);
        let mut row = 0;
        while row < count {
            let rows = if row + ROWS <= count { ROWS } else { 1 };
            let mut d = 0;
            while d + S::LANES <= dim {
                let vectors = (dim - d) / S::LANES;
                match (rows, S::WIDE && vectors >= 4, vectors >= 2) {
                    (ROWS, true, _) => self.block::<S, ROWS, 4>(s, row, d),
                    (ROWS, _, true) => self.block::<S, ROWS, 2>(s, row, d),
                    (ROWS, ..) => self.block::<S, ROWS, 1>(s, row, d),
                    (_, true, _) => self.block::<S, 1, 4>(s, row, d),
                    (_, _, true) => self.block::<S, 1, 2>(s, row, d),
                    _ => self.block::<S, 1, 1>(s, row, d),
                }
                d += S::LANES * if S::WIDE && vectors >= 4 { 4 } else { vectors.min(2) };
            }
            for d in d..dim {
                for r in row..row + rows {
                    let mut sum = N::default();
                    for key in 0..self.values.len {
                        if !HIDDEN || self.is_visible(key, r) {
                            let x = self.values.row(key)[d].widen();
                            sum = fused::<N, S>(s, x, self.weight(key, r), sum);
                        }
                    }
                    let to = &mut self.rows.sums.row_mut(r)[first + d];
                    *to = fused::<N, S>(s, *to, self.work.rescale[r], sum);
                }
            }
            row += rows;
        }
    }
}

/// `a * b + c` as the vectors have it.
#[inline(always)]
fn fused<N: Number, S: Simd<N>>(s: S, a: N, b: N, c: N) -> N {
    let mut out = [N::zero(); MAX_LANES];
    s.store(s.fma(s.splat(a), s.splat(b), s.splat(c)), &mut out);
    out[0]
}

impl<N: Number, T: Element<Num = N>, const HIDDEN: bool> AddRows<'_, '_, '_, N, T, HIDDEN> {
    #[inline(always)]
    fn is_visible(&self, key: usize, row: usize) -> bool {
        self.work.visible.is_none_or(|visible| visible[key] >> row & 1 == 1)
    }

    #[inline(always)]
    fn weight(&self, key: usize, row: usize) -> N {
        self.work.weights[key * self.rows.width + row]
    }

    #[inline(always)]
    fn block<S: Simd<N>, const ROWS: usize, const VECTORS: usize>(
        &mut self,
        s: S,
        row: usize,
        d: usize,
    ) {
        let Weighted { next_rows, rescale, first_feature, .. } = self.work;
        let values = self.values;
        let mut sums = [[s.splat(N::default()); VECTORS]; ROWS];
        for key in 0..values.len {
            if row == 0 && d == 0 {
                prefetch_row(next_rows, key);
            }
            let value = &values.row(key)[d..d + VECTORS * S::LANES];
            let mut x = [s.splat(N::default()); VECTORS];
            for j in 0..VECTORS {
                x[j] = T::load(s, &value[j * S::LANES..]);
            }
            for r in 0..ROWS {
                if HIDDEN && !self.is_visible(key, row + r) {
                    continue;
                }
                let weight = s.splat(self.weight(key, row + r));
                for j in 0..VECTORS {
                    sums[r][j] = s.fma(x[j], weight, sums[r][j]);
                }
            }
        }
        for r in 0..ROWS {
            let (rescale, to) = (s.splat(rescale[row + r]), self.rows.sums.row_mut(row + r));
            for j in 0..VECTORS {
                let to = &mut to[first_feature + d + j * S::LANES..];
                s.store(s.fma(s.load(to), rescale, sums[r][j]), to);
            }
        }
    }
}
