//! The two products of decoding on vectors, features side by side.
//!
//! Sums over features are kept in 16 parts, whatever the vector width, and added up in a fixed tree: so AVX2 and AVX-512
//! agree to the bit here too.

#![expect(
    clippy::needless_range_loop,
    reason = "indices over constants keep the register tiles in registers"
)]

use super::decode::{BlockRows, DecodeRows, Products, Weighted, weights_from};
use crate::kernel::dequantize::{E4m3, Format, Int8, Plain, scale_of};
use crate::kernel::lanes::LINE;
use crate::machine::simd::{self, Element, Isa, MAX_LANES, Number, Simd, Task, Visitor, each};
use crate::tensor::cache::{CodeRows, Quantization};
use crate::tensor::view::{Rows, RowsOf};
use std::ops::Range;

/// The products on vectors.
pub(crate) struct Vectors;

impl<N: Number> Products<N> for Vectors {
    fn start(&mut self, rows: &mut DecodeRows<N>, factor: N) {
        // Rows up to a whole tile are 0, whatever a task before has left there: their products are computed beside those of the others, and not used.
        for row in 0..rows.count.next_multiple_of(ROWS) {
            let parts = rows.q_parts.row_mut(row / ROWS).chunks_exact_mut(ROWS * PARTIAL);
            for (to, from) in parts.zip(rows.q.row(row).chunks_exact(PARTIAL)) {
                let to = &mut to[row % ROWS * PARTIAL..][..PARTIAL];
                match row < rows.count {
                    true => to.iter_mut().zip(from).for_each(|(to, x)| *to = *x * factor),
                    false => to.fill(N::zero()),
                }
            }
        }
    }

    fn dots(
        &mut self,
        isa: Isa,
        rows: &DecodeRows<N>,
        keys: BlockRows<'_, N>,
        next_rows: BlockRows<'_, N>,
        to: &mut [N],
    ) {
        visit(keys, Dots { isa, rows, next: NextRows::of(next_rows), to });
    }

    fn add(&mut self, isa: Isa, rows: &mut DecodeRows<N>, work: Weighted<'_, N>) {
        visit(work.values, Add { isa, rows, next: NextRows::of(work.next_rows), work });
    }

    fn finish(&mut self, _: &mut DecodeRows<N>) -> bool {
        true
    }
}

/// Rows, however they are stored.
struct Stored<'r, C> {
    rows: Rows<'r, C>,
    scales: &'r [f32],
}

/// What is done with rows once their format is known.
trait Product<N: Number>: for<'r> Visitor<RowsOf<'r>, N, Out = ()> {
    fn run<F: Format<N>>(self, rows: Stored<'_, F::Code>);
}

/// Finds out how rows are stored.
fn visit<N: Number, P: Product<N>>(rows: BlockRows<'_, N>, product: P) {
    match rows {
        BlockRows::Elements(rows) => N::visit(rows, product),
        BlockRows::Codes(CodeRows { codes: rows, scales, quantization }) => {
            if N::OF_CODES {
                match quantization {
                    Quantization::Int8 => product.run::<Int8>(Stored { rows, scales }),
                    Quantization::Fp8E4m3 => product.run::<E4m3>(Stored { rows, scales }),
                }
            }
        }
    }
}

/// [`DotRows`] of keys in any format.
struct Dots<'t, N: Number> {
    isa: Isa,
    rows: &'t DecodeRows<N>,
    next: NextRows,
    to: &'t mut [N],
}

impl<'r, N: Number> Visitor<RowsOf<'r>, N> for Dots<'_, N> {
    type Out = ();
    fn visit<E: Element<Num = N>>(self, rows: Rows<'r, E>) {
        self.run::<Plain<E>>(Stored { rows, scales: &[] });
    }
}

impl<N: Number> Product<N> for Dots<'_, N> {
    fn run<F: Format<N>>(self, keys: Stored<'_, F::Code>) {
        let Self { isa, rows, next, to } = self;
        N::enter(isa, DotRows::<N, F> { rows, keys, next, to });
    }
}

/// [`AddRows`] of values in any format.
struct Add<'t, 'w, N: Number> {
    isa: Isa,
    rows: &'t mut DecodeRows<N>,
    next: NextRows,
    work: Weighted<'w, N>,
}

impl<'r, N: Number> Visitor<RowsOf<'r>, N> for Add<'_, '_, N> {
    type Out = ();
    fn visit<E: Element<Num = N>>(self, rows: Rows<'r, E>) {
        self.run::<Plain<E>>(Stored { rows, scales: &[] });
    }
}

impl<N: Number> Product<N> for Add<'_, '_, N> {
    fn run<F: Format<N>>(self, values: Stored<'_, F::Code>) {
        let Self { isa, rows, next, work } = self;
        match work.visible {
            Some(_) => N::enter(isa, AddRows::<N, F, true> { rows, values, next, work }),
            None => N::enter(isa, AddRows::<N, F, false> { rows, values, next, work }),
        }
    }
}

/// Parts that a sum over features is kept in.
pub(super) const PARTIAL: usize = 16;
/// Rows of a register tile.
pub(super) const ROWS: usize = 4;

/// Rows of the register tile for so many that are left: a whole one for two or three, since to read each key once more costs more than
/// products that nobody needs.
#[inline(always)]
const fn tile_rows(left: usize) -> usize {
    if left == 1 { 1 } else { ROWS }
}

/// `to[key][row] = keys[key] . q[row]`
struct DotRows<'t, 'r, N: Number, F: Format<N>> {
    rows: &'t DecodeRows<N>,
    keys: Stored<'r, F::Code>,
    next: NextRows,
    to: &'t mut [N],
}

impl<N: Number, F: Format<N>> Task<N> for DotRows<'_, '_, N, F> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(mut self, s: S) {
        self.next.step = self.next.bytes / (self.keys.rows.dim / PARTIAL).max(1);
        let mut row = 0;
        while row < self.rows.count {
            let rows = tile_rows(self.rows.count - row);
            // As many results as a vector has lanes, or half as many, so that they are added up together.
            match (S::LANES, rows) {
                (16, ROWS) => self.keys::<S, 4, ROWS>(s, row),
                (8, ROWS) => self.keys::<S, 2, ROWS>(s, row),
                (_, ROWS) => self.keys::<S, 1, ROWS>(s, row),
                (16, _) => self.keys::<S, 8, 1>(s, row),
                (8, _) => self.keys::<S, 4, 1>(s, row),
                _ => self.keys::<S, 1, 1>(s, row),
            }
            row += rows;
            self.next = NextRows::NONE;
        }
    }
}

impl<N: Number, F: Format<N>> DotRows<'_, '_, N, F> {
    /// All keys, `KEYS` at a time, with the rows of a tile.
    #[inline(always)]
    fn keys<S: Simd<N>, const KEYS: usize, const ROWS: usize>(&mut self, s: S, row: usize) {
        let mut key = 0;
        while key + KEYS <= self.keys.rows.len {
            self.block::<S, KEYS, ROWS>(s, key, row);
            key += KEYS;
        }
        while key < self.keys.rows.len {
            self.block::<S, 1, ROWS>(s, key, row);
            key += 1;
        }
    }

    #[inline(always)]
    fn block<S: Simd<N>, const KEYS: usize, const ROWS: usize>(
        &mut self,
        s: S,
        key: usize,
        row: usize,
    ) {
        let zero = s.splat(N::zero());
        // One vector for each of the parts' slices; the lower ones first.
        let mut sums = [[[zero; ROWS]; KEYS]; 4];
        let vectors = PARTIAL / S::LANES;
        // Cut to the same number of parts, which spares the loop all checks.
        let whole = self.keys.rows.dim / PARTIAL;
        let mut keys: [&[[F::Code; PARTIAL]]; KEYS] = [&[]; KEYS];
        let mut scales = [N::one(); KEYS];
        for i in 0..KEYS {
            keys[i] = &self.keys.rows.row(key + i).as_chunks().0[..whole];
            scales[i] = scale_of::<N, F>(self.keys.scales, key + i);
        }
        let (first, q) = (row % self::ROWS * PARTIAL, self.rows.q_parts.row(row / self::ROWS));
        let (q, _) = q.as_chunks::<{ self::ROWS * PARTIAL }>();
        let next = self.next.take(KEYS);
        // Spread over the parts or, where 16 registers have no room for more addresses, before the sums are set up.
        if !S::WIDE {
            (0..KEYS).for_each(|i| next.prefetch(i, 0..next.bytes));
        }
        // One vector of the parts after the other: the sums of all do not fit in 16 registers.
        for j in 0..vectors {
            let mut sum = [[zero; ROWS]; KEYS];
            for (part, q) in q[..whole].iter().enumerate() {
                if S::WIDE {
                    (0..KEYS).for_each(|i| next.prefetch_line(i, part * next.step + j * LINE));
                }
                let mut y = [zero; ROWS];
                for r in 0..ROWS {
                    y[r] = s.load(&q[first + r * PARTIAL + j * S::LANES..]);
                }
                for i in 0..KEYS {
                    let x = F::load(s, &keys[i][part][j * S::LANES..], s.splat(scales[i]));
                    for r in 0..ROWS {
                        sum[i][r] = s.fma(x, y[r], sum[i][r]);
                    }
                }
            }
            sums[j] = sum;
        }
        if whole * PARTIAL < self.keys.rows.dim {
            for i in 0..KEYS {
                let mut tail = [N::zero(); PARTIAL];
                let row = &self.keys.rows.row(key + i)[whole * PARTIAL..];
                row.iter().zip(&mut tail).for_each(|(x, to)| *to = F::number(*x, scales[i]));
                for j in 0..vectors {
                    let x = s.load(&tail[j * S::LANES..]);
                    for r in 0..ROWS {
                        let y = s.load(&q[whole][first + r * PARTIAL + j * S::LANES..]);
                        sums[j][i][r] = s.fma(x, y, sums[j][i][r]);
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
        let mut results = [N::zero(); MAX_LANES];
        s.store(sums, &mut results);
        for i in 0..KEYS {
            for r in 0..ROWS {
                to[i * width + r] = results[i * ROWS + r];
            }
        }
    }
}

/// Where the rows lie that are needed next: their lines are asked for one by one between products, so that memory does not rest.
#[derive(Clone, Copy)]
struct NextRows {
    /// The next one of them. Those behind the last one are asked for in vain.
    first: *const u8,
    /// From one row to the next, in bytes; 0 if there is none.
    stride: usize,
    bytes: usize,
    /// Bytes of a row that are asked for with one of the parts of a dot product.
    step: usize,
}

/// A line that is in the first cache: to ask for it costs nothing.
static HOT: u64 = 0;

impl NextRows {
    const NONE: Self = Self { first: (&raw const HOT).cast(), stride: 0, bytes: 0, step: 0 };

    #[inline(always)]
    fn of<N: Number>(rows: BlockRows<'_, N>) -> Self {
        match rows {
            BlockRows::Elements(rows) => each!(rows, rows => Self::of_rows(rows)),
            BlockRows::Codes(CodeRows { codes, scales, .. }) => {
                let lines = scales.chunks(LINE / size_of::<f32>());
                lines.for_each(|line| simd::prefetch_l2(line.as_ptr()));
                Self::of_rows(codes)
            }
        }
    }

    #[inline(always)]
    fn of_rows<T>(Rows { data, stride, len, dim }: Rows<'_, T>) -> Self {
        if len == 0 || dim == 0 {
            return Self::NONE;
        }
        let size = size_of::<T>();
        Self { first: data.as_ptr().cast(), stride: stride * size, bytes: dim * size, step: 0 }
    }

    /// The next `n` rows, which are none of these afterwards.
    #[inline(always)]
    fn take(&mut self, n: usize) -> Self {
        let taken = *self;
        self.first = self.first.wrapping_add(n * self.stride);
        taken
    }

    /// Asks for the lines of these bytes of a row.
    #[inline(always)]
    fn prefetch(self, row: usize, bytes: Range<usize>) {
        bytes.step_by(LINE).for_each(|byte| self.prefetch_line(row, byte));
    }

    /// Asks for the line of this byte of a row.
    #[inline(always)]
    fn prefetch_line(self, row: usize, byte: usize) {
        simd::prefetch_l2(self.first.wrapping_add(row * self.stride + byte));
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
    s.sums(block)
}

/// `sums[row] = sums[row] * shrink[row] + sum over keys of weights[key][row] * values[key]`. With `HIDDEN`, a key that a row
/// does not see is left out of its sum.
struct AddRows<'t, 'r, 'w, N: Number, F: Format<N>, const HIDDEN: bool> {
    rows: &'t mut DecodeRows<N>,
    values: Stored<'r, F::Code>,
    next: NextRows,
    work: Weighted<'w, N>,
}

impl<N: Number, F: Format<N>, const HIDDEN: bool> Task<N> for AddRows<'_, '_, '_, N, F, HIDDEN> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(mut self, s: S) {
        let (count, dim) = (self.rows.count, self.values.rows.dim);
        let mut row = 0;
        while row < count {
            let rows = tile_rows(count - row);
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
                    for key in 0..self.values.rows.len {
                        if !HIDDEN || self.is_visible(key, r) {
                            let x = self.number(key, d);
                            sum = fused::<N, S>(s, x, self.weight(key, r), sum);
                        }
                    }
                    let to = &mut self.rows.sums.row_mut(r)[d];
                    *to = fused::<N, S>(s, *to, self.work.rescale[r], sum);
                }
            }
            row += rows;
            self.next = NextRows::NONE;
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

impl<N: Number, F: Format<N>, const HIDDEN: bool> AddRows<'_, '_, '_, N, F, HIDDEN> {
    #[inline(always)]
    fn is_visible(&self, key: usize, row: usize) -> bool {
        self.work.visible.is_none_or(|visible| visible[key] >> row & 1 == 1)
    }

    #[inline(always)]
    fn number(&self, key: usize, d: usize) -> N {
        let Stored { rows, scales } = &self.values;
        F::number(rows.row(key)[d], scale_of::<N, F>(scales, key))
    }

    #[inline(always)]
    fn weight(&self, key: usize, row: usize) -> N {
        weights_from(self.work.weights, key * self.rows.width + row)[0]
    }

    #[inline(always)]
    fn block<S: Simd<N>, const ROWS: usize, const VECTORS: usize>(
        &mut self,
        s: S,
        row: usize,
        d: usize,
    ) {
        let Weighted { rescale, weights, .. } = self.work;
        let (Stored { rows: values, scales }, width) = (&self.values, self.rows.width);
        let mut next = self.next;
        let (lines, first_byte) =
            ((VECTORS * S::LANES * size_of::<F::Code>()).div_ceil(LINE), d * size_of::<F::Code>());
        let mut sums = [[s.splat(N::default()); VECTORS]; ROWS];
        for key in 0..values.len {
            let line = next.take(1);
            (0..lines).for_each(|i| line.prefetch_line(0, first_byte + i * LINE));
            let value = &values.data[key * values.stride + d..][..VECTORS * S::LANES];
            let weights = &weights_from(weights, key * width + row)[..ROWS];
            let scale = s.splat(scale_of::<N, F>(scales, key));
            let mut x = [s.splat(N::default()); VECTORS];
            for j in 0..VECTORS {
                x[j] = F::load(s, &value[j * S::LANES..], scale);
            }
            for r in 0..ROWS {
                if HIDDEN && !self.is_visible(key, row + r) {
                    continue;
                }
                let weight = s.splat(weights[r]);
                for j in 0..VECTORS {
                    sums[r][j] = s.fma(x[j], weight, sums[r][j]);
                }
            }
        }
        for r in 0..ROWS {
            let (rescale, to) = (s.splat(rescale[row + r]), self.rows.sums.row_mut(row + r));
            for j in 0..VECTORS {
                let to = &mut to[d + j * S::LANES..];
                s.store(s.fma(s.load(to), rescale, sums[r][j]), to);
            }
        }
    }
}
