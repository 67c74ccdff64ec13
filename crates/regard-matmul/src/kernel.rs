//! Products of a few rows with 16 outputs: the only hot loops.
//!
//! The order of every sum is fixed: integers are exact, blocks are added in order, and of float formats even and odd inputs are
//! summed apart. So the bits of an output do not depend on how rows are grouped.

use crate::floats::{TermTiles, pair, pair_lines};
use crate::format::{BLOCK, Format, LANES, Layout, SubScales};
use crate::matrix::{Group, Matrix};
use crate::memory::{Block, Columns, Line, TILE};
use crate::rows::Rows;
use crate::simd::{Isa, Simd, Task};

/// Some outputs of a matrix, for all rows.
#[derive(Debug)]
pub(crate) struct Piece<'a> {
    pub(crate) x: &'a Rows,
    pub(crate) matrix: &'a Matrix,
    /// Starts at a group.
    pub(crate) out: Columns<'a>,
}

/// Bytes of activations that stay in the L2 cache while groups of outputs pass.
const RESIDENT: usize = 1 << 19;

impl Piece<'_> {
    pub(crate) fn run(self, isa: Isa) {
        if isa.has_terms() && self.matrix.format().block_len() == 1 {
            return self.run_terms(isa);
        }
        let isa = if self.x.rows() < TILE { isa.without_tiles() } else { isa };
        macro_rules! each {
            ($($leaf:ident: $($format:ident)*;)*) => {
                match self.matrix.format() {
                    $($(Format::$format => {
                        isa.run(Tiles { piece: self, leaf: $leaf::<{ Format::$format as u8 }> });
                    })*)*
                }
            };
        }
        each!(
            Quantised: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2K Q3K Q4K Q5K Q6K;
            Floats: F32 F16 Bf16;
        );
    }

    /// A float format on matrix instructions, for any number of rows: another order of sums.
    fn run_terms(self, isa: Isa) {
        const F32: u8 = Format::F32 as u8;
        const F16: u8 = Format::F16 as u8;
        const BF16: u8 = Format::Bf16 as u8;
        let Self { x, matrix, out } = self;
        match matrix.format() {
            Format::F16 => isa.run(TermTiles::<F16, 2> { x, matrix, out }),
            Format::Bf16 => isa.run(TermTiles::<BF16, 1> { x, matrix, out }),
            _ => isa.run(TermTiles::<F32, 3> { x, matrix, out }),
        }
    }
}

/// A piece with the code of its format.
struct Tiles<'a, L> {
    piece: Piece<'a>,
    leaf: L,
}

impl<L: Leaf> Task for Tiles<'_, L> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.piece.tiles(s, self.leaf);
    }
}

impl Piece<'_> {
    #[inline(always)]
    fn tiles<S: Simd, L: Leaf>(mut self, s: S, leaf: L) {
        let row_bytes = 2 * self.x.inputs().next_multiple_of(BLOCK);
        let resident = (RESIDENT / row_bytes).max(TILE) / TILE * TILE;
        let (rows, columns) = (self.x.rows(), self.out.range());
        let mut unpacked = Unpacked::new();
        for first in (0..rows).step_by(resident) {
            let end = (first + resident).min(rows);
            for column in columns.clone().step_by(LANES) {
                let group = self.matrix.group(column / LANES);
                let mut row = first;
                if S::TILES && L::INTEGERS {
                    leaf.unpack(s, group, &mut unpacked);
                    while row + TILE <= end {
                        let sums = leaf.wide(s, &mut unpacked, self.x.tile(row).0);
                        self.write(s, [row, column], sums);
                        row += TILE;
                    }
                }
                while row < end {
                    row += match (end - row).min(S::ROWS) {
                        8.. => self.tile::<S, L, 8>(s, leaf, group, [row, column]),
                        4.. => self.tile::<S, L, 4>(s, leaf, group, [row, column]),
                        2.. => self.tile::<S, L, 2>(s, leaf, group, [row, column]),
                        _ => self.tile::<S, L, 1>(s, leaf, group, [row, column]),
                    };
                }
            }
        }
    }

    /// Computes `R` rows from `row` on of a group, and returns `R`.
    #[inline(always)]
    fn tile<S: Simd, L: Leaf, const R: usize>(
        &mut self,
        s: S,
        leaf: L,
        group: Group<'_>,
        [row, column]: [usize; 2],
    ) -> usize {
        let sums = leaf.tile::<S, R>(s, group, self.x, row);
        self.write(s, [row, column], sums);
        R
    }

    #[inline(always)]
    fn write<S: Simd, const R: usize>(
        &mut self,
        s: S,
        [row, column]: [usize; 2],
        sums: [S::Floats; R],
    ) {
        for (r, &sum) in sums.iter().enumerate() {
            self.out.write(row + r, column, &self.matrix.finish(s, column / LANES, sum));
        }
    }
}

/// A group as matrix instructions take it: unpacked once for all rows.
struct Unpacked {
    /// Signed codes, 4 inputs of 16 outputs in a line.
    codes: Vec<Line>,
    /// Scale and min of each sub-block, in `f32`.
    scales: Vec<[Line; 2]>,
    /// Products of sub-blocks with 16 rows. Several at a time: what an instruction has just stored cannot be loaded for a while.
    products: [[Line; TILE]; BATCH],
}

/// Sub-blocks whose products are computed before any is added.
const BATCH: usize = 8;

impl Unpacked {
    fn new() -> Self {
        Self { codes: vec![], scales: vec![], products: [[Line([0; 64]); TILE]; BATCH] }
    }
}

/// What only formats differ in.
trait Leaf: Copy {
    /// If products are integers, which matrix instructions compute.
    const INTEGERS: bool;

    /// Unpacks a group for [`wide`](Self::wide). Only if `INTEGERS`.
    fn unpack<S: Simd>(self, _: S, _: Group<'_>, _: &mut Unpacked) {}

    /// The product of the 16 rows of a tile with an unpacked group, on matrix instructions. Only if `INTEGERS`.
    fn wide<S: Simd>(self, s: S, _: &mut Unpacked, _: &[Block]) -> [S::Floats; TILE] {
        [s.floats(0.0); TILE]
    }

    /// The product of `R` rows with a group.
    fn tile<S: Simd, const R: usize>(
        self,
        s: S,
        group: Group<'_>,
        x: &Rows,
        row: usize,
    ) -> [S::Floats; R];
}

/// Of the quantised format with this number.
#[derive(Clone, Copy)]
struct Quantised<const F: u8>;

impl<const F: u8> Quantised<F> {
    const LAYOUT: Layout = Format::ALL[F as usize].layout();

    /// Where a block of activations has the sum of a sub-block: that of all inputs is after those of halves.
    #[inline(always)]
    fn part_sum(part: usize) -> usize {
        if Self::LAYOUT.sub == BLOCK { 2 } else { part }
    }

    /// Adds the products of a sub-block, given its scale and min.
    #[inline(always)]
    fn add<S: Simd, const R: usize>(
        s: S,
        lines: &[Line],
        part: usize,
        x: &[Block; R],
        [scale, min]: [S::Floats; 2],
        sums: &mut [S::Floats; R],
    ) {
        let layout = Self::LAYOUT;
        let quads = layout.sub / 4;
        let part_sum = Self::part_sum(part);
        let mut dots = [s.ints(0); R];
        for r in 0..R {
            dots[r] = s.ints(-layout.offset * x[r].sums[part_sum]);
        }
        for quad in part * quads..(part + 1) * quads {
            let codes = Self::codes(s, lines, quad);
            for r in 0..R {
                dots[r] = s.dot(dots[r], codes, x[r].quads[quad], layout.low == 8);
            }
        }
        for r in 0..R {
            let factor = s.mul(scale, s.floats(x[r].scale));
            sums[r] = s.mul_add(s.convert(dots[r]), factor, sums[r]);
            if layout.min {
                sums[r] = s.mul_sub(min, s.floats(x[r].scaled[part_sum]), sums[r]);
            }
        }
    }

    /// Codes of 4 inputs and 16 outputs.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "at most 8")]
    fn codes<S: Simd>(s: S, lines: &[Line], quad: usize) -> S::Ints {
        let Layout { low, high, .. } = Self::LAYOUT;
        let at = low * quad;
        let line = s.line(&lines[at / 8]);
        if low == 8 {
            return line;
        }
        let codes = s.field(line, (at % 8) as i32, (1 << low) - 1);
        if high == 0 {
            return codes;
        }
        let at = high * quad;
        let line = s.line(&lines[low + at / 8]);
        s.or(codes, s.field(line, (at % 8) as i32 - low as i32, ((1 << high) - 1) << low))
    }
}

impl<const F: u8> Leaf for Quantised<F> {
    const INTEGERS: bool = true;

    #[inline(always)]
    fn unpack<S: Simd>(self, s: S, group: Group<'_>, to: &mut Unpacked) {
        let layout = Self::LAYOUT;
        let units = group.lines.len() / (layout.lines() * layout.blocks());
        to.codes.resize(units * layout.unit / 4, Line([0; 64]));
        to.scales.resize(units * layout.subs(), [Line([0; 64]); 2]);
        let blocks = group.lines.chunks_exact(layout.lines());
        for (lines, to) in blocks.zip(to.codes.as_chunks_mut::<{ BLOCK / 4 }>().0) {
            for (quad, to) in to.iter_mut().enumerate() {
                s.store(s.lower(Self::codes(s, lines, quad), layout.offset), to);
            }
        }
        let scales = group.scales.chunks_exact(layout.scale_bytes());
        for (scales, to) in scales.zip(to.scales.chunks_exact_mut(layout.subs())) {
            let scales = Scales::new(s, layout, scales);
            for (i, [scale, min]) in to.iter_mut().enumerate() {
                let of_sub = scales.sub(s, layout, i);
                s.store_f32(of_sub[0], scale);
                s.store_f32(of_sub[1], min);
            }
        }
    }

    #[inline(always)]
    fn wide<S: Simd>(self, s: S, unpacked: &mut Unpacked, x: &[Block]) -> [S::Floats; TILE] {
        let layout = Self::LAYOUT;
        let parts = BLOCK / layout.sub;
        let (x, _) = x.as_chunks::<TILE>();
        let Unpacked { codes, scales, products } = unpacked;
        let mut sums = [s.floats(0.0); TILE];
        let batches = codes.chunks(BATCH * layout.sub / 4).zip(scales.chunks(BATCH));
        for ((codes, scales), x) in batches.zip(x.chunks(BATCH / parts)) {
            let codes = codes.chunks_exact(layout.sub / 4);
            for (i, (codes, products)) in codes.zip(&mut *products).enumerate() {
                s.products(&x[i / parts], codes, i, products);
            }
            for (i, ([scale, min], products)) in scales.iter().zip(&*products).enumerate() {
                let (scale, min, x) = (s.f32(scale), s.f32(min), &x[i / parts]);
                for r in 0..TILE {
                    let factor = s.mul(scale, s.floats(x[r].scale));
                    sums[r] = s.mul_add(s.convert(s.line(&products[r])), factor, sums[r]);
                    if layout.min {
                        let sum = x[r].scaled[Self::part_sum(i % parts)];
                        sums[r] = s.mul_sub(min, s.floats(sum), sums[r]);
                    }
                }
            }
        }
        sums
    }

    #[inline(always)]
    fn tile<S: Simd, const R: usize>(
        self,
        s: S,
        group: Group<'_>,
        x: &Rows,
        row: usize,
    ) -> [S::Floats; R] {
        let layout = Self::LAYOUT;
        let (x, rows) = x.tile(row);
        let mut sums = [s.floats(0.0); R];
        let units = group.lines.chunks_exact(layout.lines() * layout.blocks());
        let units = units.zip(x.chunks_exact(rows * layout.blocks()));
        for ((lines, x), scales) in units.zip(group.scales.chunks_exact(layout.scale_bytes())) {
            let scales = Scales::new(s, layout, scales);
            let blocks = lines.chunks_exact(layout.lines()).zip(x.chunks_exact(rows));
            for (i, (lines, x)) in blocks.enumerate() {
                let Some(x) = x[row % TILE..].first_chunk::<R>() else { continue };
                for part in 0..BLOCK / layout.sub {
                    let scale = scales.sub(s, layout, i * (BLOCK / layout.sub) + part);
                    Self::add(s, lines, part, x, scale, &mut sums);
                }
            }
        }
        sums
    }
}

/// Scales of a unit of 16 outputs.
struct Scales<'a, S: Simd> {
    scale: S::Floats,
    min: S::Floats,
    subs: &'a [u8],
}

impl<'a, S: Simd> Scales<'a, S> {
    #[inline(always)]
    fn new(s: S, layout: Layout, bytes: &'a [u8]) -> Self {
        let (head, subs) = bytes.split_at(layout.head());
        let (halves, _) = head.as_chunks::<{ 2 * LANES }>();
        let scale = s.f16(&halves[0]);
        Self { scale, min: if layout.min { s.f16(&halves[1]) } else { scale }, subs }
    }

    /// The scale and min of a sub-block.
    #[inline(always)]
    fn sub(&self, s: S, layout: Layout, i: usize) -> [S::Floats; 2] {
        let (lanes, _) = self.subs.as_chunks::<LANES>();
        let [scale, min] = match layout.scales {
            SubScales::None => return [self.scale, self.min],
            SubScales::Nibbles => {
                let both = s.bytes(&lanes[i]);
                [s.nibble(both, 0), s.nibble(both, 4)]
            }
            SubScales::Bytes if layout.min => [s.bytes(&lanes[2 * i]), s.bytes(&lanes[2 * i + 1])],
            SubScales::Bytes => [s.bytes(&lanes[i]); 2],
        };
        [s.mul(self.scale, s.convert(scale)), s.mul(self.min, s.convert(min))]
    }
}

/// Of the float format with this number.
#[derive(Clone, Copy)]
struct Floats<const F: u8>;

impl<const F: u8> Leaf for Floats<F> {
    const INTEGERS: bool = false;

    #[inline(always)]
    fn tile<S: Simd, const R: usize>(
        self,
        s: S,
        group: Group<'_>,
        x: &Rows,
        row: usize,
    ) -> [S::Floats; R] {
        let (x, rows) = x.float_tile(row);
        // Two sums: one alone would wait for the latency of each addition.
        let mut sums = [[s.floats(0.0); 2]; R];
        let blocks = group.lines.chunks(BLOCK / 2 * pair_lines(F));
        for (lines, x) in blocks.zip(x.chunks_exact(rows)) {
            let Some(x) = x[row % TILE..].first_chunk::<R>() else { continue };
            for (i, lines) in lines.chunks_exact(pair_lines(F)).enumerate() {
                let [even, odd] = pair::<S, F>(s, lines);
                let i = 2 * i % BLOCK; // which it is: now the compiler knows
                for r in 0..R {
                    sums[r][0] = s.mul_add(even, s.floats(x[r][i]), sums[r][0]);
                    sums[r][1] = s.mul_add(odd, s.floats(x[r][i + 1]), sums[r][1]);
                }
            }
        }
        let mut joined = [s.floats(0.0); R];
        for r in 0..R {
            joined[r] = s.add(sums[r][0], sums[r][1]);
        }
        joined
    }
}
