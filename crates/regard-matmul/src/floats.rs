//! Products with float weights on bf16 matrix instructions.
//!
//! A number is split in bf16 terms that add up to it: 3 for `f32`, 2 for `f16`. Six products of terms of two `f32` are as accurate
//! as one in `f32`, and take about half of the time. Weights are split when they are needed: their terms take more memory than
//! they do.
//!
//! The order of every sum is fixed: for each 32 inputs in turn, one product of terms after the other is added to the same sum.

use crate::format::{BLOCK, Format, LANES};
use crate::matrix::Matrix;
use crate::memory::{Columns, Line, TERMS, TILE};
use crate::rows::Rows;
use crate::simd::{Simd, Task};

/// Weights of an even input and of the next, of the float format with this number.
#[inline(always)]
pub(crate) fn pair<S: Simd, const F: u8>(s: S, lines: &[Line]) -> [S::Floats; 2] {
    match Format::ALL[F as usize] {
        Format::Bf16 => s.bf16(&lines[0]),
        Format::F16 => {
            let (halves, _) = lines[0].0.as_chunks::<{ 2 * LANES }>();
            [s.f16(&halves[0]), s.f16(&halves[1])]
        }
        _ => [s.f32(&lines[0]), s.f32(&lines[1])],
    }
}

/// Lines of such a pair.
pub(crate) const fn pair_lines(format: u8) -> usize {
    2 * LANES * Format::ALL[format as usize].block_bytes() / 64
}

/// Some outputs, for all rows, which must be split, of a matrix of the format with number `F`, whose weights have `T` terms.
pub(crate) struct TermTiles<'a, const F: u8, const T: usize> {
    pub(crate) x: &'a Rows,
    pub(crate) matrix: &'a Matrix,
    /// Starts at a group.
    pub(crate) out: Columns<'a>,
}

/// Bytes of activations that stay in the L2 cache while groups of outputs pass.
const RESIDENT: usize = 5 << 18;

/// Groups of 16 outputs that are computed at a time.
const GROUPS: usize = 2;

/// Memory for a few groups.
struct Work {
    /// Terms of some blocks of each group.
    weights: [Vec<Line>; GROUPS],
    /// Of each tile of rows and group.
    sums: Vec<[Line; TILE]>,
}

impl<const F: u8, const T: usize> Task for TermTiles<'_, F, T> {
    fn term_rows(&self) -> Option<usize> {
        Some(self.x.tile_rows())
    }

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let all = self.x.rows().div_ceil(TILE);
        let tile_bytes = 2 * TERMS * TILE * self.x.inputs().next_multiple_of(BLOCK);
        // Of about the same size: weights are split for each.
        let chunks = (all * tile_bytes).div_ceil(RESIDENT).min(all);
        let chunk = all.div_ceil(chunks).next_multiple_of(2);
        let empty = Line([0; 64]);
        let weights = [(); GROUPS].map(|()| vec![empty; Self::DEPTH * T * TILE]);
        let mut work = Work { weights, sums: vec![[empty; TILE]; GROUPS * chunk] };
        for first in (0..all).step_by(chunk) {
            let tiles = [first, (first + chunk).min(all)];
            let mut column = self.out.range().start;
            while column + LANES < self.out.range().end {
                self.groups::<S, 2>(s, &mut work, tiles, column);
                column += 2 * LANES;
            }
            if column < self.out.range().end {
                self.groups::<S, 1>(s, &mut work, tiles, column);
            }
        }
    }
}

impl<const F: u8, const T: usize> TermTiles<'_, F, T> {
    /// Lines of a block of 32 inputs of a group.
    const LINES: usize = pair_lines(F) * BLOCK / 2;

    /// Blocks of 32 inputs that pass at a time: their terms of two groups stay in the L1 cache while tiles of rows pass.
    const DEPTH: usize = 12 / T;

    /// Computes `C` groups, for some tiles of rows.
    #[inline(always)]
    fn groups<S: Simd, const C: usize>(
        &mut self,
        s: S,
        Work { weights, sums }: &mut Work,
        [first_tile, end_tile]: [usize; 2],
        column: usize,
    ) {
        let rows = self.x.tile_rows();
        let blocks = self.x.inputs().div_ceil(BLOCK);
        // One tile is computed as fast as its weights come from memory: one block is split while the products of the last are
        // computed.
        let depth = if end_tile - first_tile == 1 { 1 } else { Self::DEPTH };
        for first in (0..blocks).step_by(depth) {
            let end = (first + depth).min(blocks);
            let mut w: [&[Line]; C] = [&[]; C];
            for ((i, w), to) in w.iter_mut().enumerate().zip(&mut *weights) {
                let group = column / LANES + i;
                let lines = &self.matrix.group(group).lines[first * Self::LINES..];
                let (lines, next) = lines.split_at((end - first) * Self::LINES);
                // What is split after the products of these. Memory would wait for the products, and these for memory.
                let next = if end < blocks { next } else { self.matrix.lines_from(group + C) };
                *w = Self::split(s, lines, next, to);
            }
            let mut tile = first_tile;
            for sums in sums.chunks_mut(2 * GROUPS) {
                let x = |tile: usize| self.x.term_tile(tile, first..end);
                if tile + 1 < end_tile {
                    let x = [x(tile), x(tile + 1)];
                    s.term_products::<2, C, T>(rows, x, w, sums, first == 0);
                } else if tile < end_tile {
                    s.term_products::<1, C, T>(rows, [x(tile)], w, sums, first == 0);
                }
                tile += 2;
            }
        }
        for (tile, sums) in (first_tile..end_tile).zip(sums.chunks_exact(GROUPS)) {
            for row in tile * TILE..((tile + 1) * TILE).min(self.x.rows()) {
                for (i, sums) in sums[..C].iter().enumerate() {
                    let column = column + i * LANES;
                    let sums = s.f32(&sums[row % TILE]);
                    self.out.write(row, column, &self.matrix.finish(s, column / LANES, sums));
                }
            }
        }
    }

    /// The terms of weights, 16 lines each. Has the weights that come next brought from memory.
    #[inline(always)]
    fn split<'a, S: Simd>(
        s: S,
        lines: &'a [Line],
        next: &[Line],
        to: &'a mut [Line],
    ) -> &'a [Line] {
        if T == 1 {
            return lines;
        }
        let blocks = lines.len() / Self::LINES;
        let mut next = next.iter();
        for (lines, to) in lines.chunks_exact(Self::LINES).zip(to.chunks_exact_mut(T * TILE)) {
            for (i, lines) in lines.chunks_exact(pair_lines(F)).enumerate() {
                next.by_ref().take(pair_lines(F)).for_each(|line| s.prefetch(line));
                let terms = s.terms::<T>(pair::<S, F>(s, lines));
                for (j, &term) in terms.iter().enumerate() {
                    s.store(term, &mut to[j * TILE + i]);
                }
            }
        }
        &to[..blocks * T * TILE]
    }
}
