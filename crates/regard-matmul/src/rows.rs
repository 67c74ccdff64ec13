//! Activations, as kernels take them.

use crate::error::Error;
use crate::format::BLOCK;
use crate::lazy::Lazy;
use crate::memory::{Block, Line, TERMS, TILE};
use crate::simd::{Isa, Simd, Task};
use rayon::prelude::*;
use std::ops::Range;

/// Activations: rows of `f32`, and what matrices need of them: blocks of 32 8-bit integers, or bf16 terms. Keeps its memory from call
/// to call.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    rows: usize,
    inputs: usize,
    /// Tiles of 16 rows, the last one of fewer. A tile is one block of each row, then the next. The last block of a row is padded by
    /// zeros.
    floats: Vec<[f32; BLOCK]>,
    /// The same blocks, quantised, once a matrix has needed them.
    blocks: Lazy<Block>,
    /// The same blocks in bf16 terms, once a matrix has needed them: of a tile, the first term of a block of each row, the next term,
    /// then the next block. If there are several tiles, the last one is padded by zeros.
    terms: Lazy<Line>,
}

impl Rows {
    /// No rows.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes over activations: rows of `inputs` numbers.
    ///
    /// # Errors
    ///
    /// If `x` is not a whole number of rows.
    pub fn set(&mut self, x: &[f32], inputs: usize) -> Result<(), Error> {
        if inputs == 0 {
            return Err(Error::Sizes { outputs: x.len(), inputs });
        }
        let (rows, rest) = (x.len() / inputs, x.len() % inputs);
        if rest != 0 {
            return Err(Error::Length { buffer: "x", found: x.len(), expected: rows * inputs });
        }
        (self.rows, self.inputs) = (rows, inputs);
        self.blocks.clear();
        self.terms.clear();
        let blocks = inputs.div_ceil(BLOCK);
        self.floats.resize(rows * blocks, [0.0; BLOCK]);
        let grain = self.grain();
        x.par_chunks(grain * inputs)
            .zip(self.floats.par_chunks_mut(grain * blocks))
            .for_each(|(x, floats)| arrange(x, inputs, floats));
        Ok(())
    }

    /// Rows for a thread: with fewer, it takes longer to wake up.
    fn grain(&self) -> usize {
        (1_usize << 15).div_ceil(self.inputs.max(1)).next_multiple_of(TILE)
    }

    /// Quantises the rows, if they are not yet.
    pub(crate) fn quantise(&self) {
        self.blocks.fill(|to| {
            to.resize(self.floats.len(), Block::default());
            let isa = Isa::detect().without_tiles();
            let grain = self.grain() * self.inputs.div_ceil(BLOCK);
            self.floats
                .par_chunks(grain)
                .zip(to.par_chunks_mut(grain))
                .for_each(|(floats, to)| isa.run(Quantise { floats, to }));
        });
    }

    /// Splits the rows in bf16 terms, if they are not yet. Only for AMX.
    pub(crate) fn split(&self) {
        self.terms.fill(|to| {
            let tiles = self.rows.div_ceil(TILE);
            let blocks = self.inputs.div_ceil(BLOCK);
            let tile_lines = blocks * TERMS * self.term_rows();
            to.resize(tiles * tile_lines, Line([0; 64]));
            let grain = self.grain() / TILE;
            self.floats
                .par_chunks(grain * TILE * blocks)
                .zip(to.par_chunks_mut((grain * tile_lines).max(1)))
                .for_each(|(floats, to)| {
                    Isa::Amx.run(Split { rows: self.term_rows(), blocks, floats, to });
                });
        });
    }

    /// The number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The elements of a row.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// The tile that holds a row: the same block of as many rows as are returned, then the next. The rows must be quantised.
    pub(crate) fn tile(&self, row: usize) -> (&[Block], usize) {
        let (range, rows) = self.tile_range(row);
        (&self.blocks.get()[range], rows)
    }

    /// As [`tile`](Self::tile), not quantised.
    pub(crate) fn float_tile(&self, row: usize) -> (&[[f32; BLOCK]], usize) {
        let (range, rows) = self.tile_range(row);
        (&self.floats[range], rows)
    }

    /// Some blocks of the terms of a tile, [`TERMS`] times [`term_rows`](Self::term_rows) lines each. The rows must be split.
    pub(crate) fn term_tile(&self, tile: usize, blocks: Range<usize>) -> &[Line] {
        let block = TERMS * self.term_rows();
        let first = tile * self.inputs.div_ceil(BLOCK);
        &self.terms.get()[(first + blocks.start) * block..(first + blocks.end) * block]
    }

    /// The rows of each tile of terms. Of few rows there is no more to read than there are.
    pub(crate) fn term_rows(&self) -> usize {
        self.rows.min(TILE)
    }

    fn tile_range(&self, row: usize) -> (Range<usize>, usize) {
        let first = row / TILE * TILE;
        let end = (first + TILE).min(self.rows);
        let blocks = self.inputs.div_ceil(BLOCK);
        (first * blocks..end * blocks, end - first)
    }
}

/// Rows to tiles of blocks.
fn arrange(x: &[f32], inputs: usize, to: &mut [[f32; BLOCK]]) {
    let blocks = inputs.div_ceil(BLOCK);
    for (x, to) in x.chunks(inputs * TILE).zip(to.chunks_mut(blocks * TILE)) {
        let rows = x.len() / inputs;
        for (row, x) in x.chunks_exact(inputs).enumerate() {
            for (i, x) in x.chunks(BLOCK).enumerate() {
                let to = &mut to[i * rows + row];
                if let Some(whole) = x.first_chunk() {
                    *to = *whole;
                } else {
                    *to = [0.0; BLOCK];
                    to[..x.len()].copy_from_slice(x);
                }
            }
        }
    }
}

struct Quantise<'a> {
    floats: &'a [[f32; BLOCK]],
    to: &'a mut [Block],
}

impl Task for Quantise<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (floats, to) in self.floats.iter().zip(self.to) {
            *to = quantise(floats);
        }
    }
}

struct Split<'a> {
    /// Of each tile of terms.
    rows: usize,
    blocks: usize,
    floats: &'a [[f32; BLOCK]],
    to: &'a mut [Line],
}

impl Task for Split<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { rows, blocks, floats, to } = self;
        let tiles = floats.chunks(blocks * TILE).zip(to.chunks_exact_mut(blocks * TERMS * rows));
        for (floats, to) in tiles {
            let given = floats.len() / blocks;
            for (floats, to) in floats.chunks_exact(given).zip(to.chunks_exact_mut(TERMS * rows)) {
                for row in 0..rows {
                    let terms = match floats.get(row) {
                        Some(floats) => s.terms(s.apart(floats)),
                        None => [s.ints(0); TERMS],
                    };
                    for (i, term) in terms.into_iter().enumerate() {
                        s.store(term, &mut to[i * rows + row]);
                    }
                }
            }
        }
    }
}

/// Plain operations, each rounded once: the same bits with all instructions.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "small integers")]
fn quantise(x: &[f32; BLOCK]) -> Block {
    // As integers, the bits of magnitudes are in the order of the numbers, and NaN is above all.
    let mut magnitude = 0;
    for x in x {
        magnitude = magnitude.max((x.to_bits() & 0x7fff_ffff).cast_signed());
    }
    let max = f32::from_bits(magnitude.cast_unsigned());
    if !max.is_finite() {
        // The outputs are to be NaN as well, whatever the weights are.
        return Block { scale: f32::NAN, scaled: [f32::NAN; 3], ..Block::default() };
    }
    let scale = max / 127.0;
    // Of subnormal numbers the reciprocal is infinite: they are taken as zeros.
    let inverse = if max > 1e-36 { 127.0 / max } else { 0.0 };
    // Rounds to the nearest, ties to even, without an instruction for it: the sum has no fractional bits.
    const MAGIC: f32 = 12_582_912.0;
    // Loops, not `map`: it is not inlined, and would be compiled without the instructions.
    let (mut codes, mut bytes) = ([0_i32; BLOCK], [0_u8; BLOCK]);
    for i in 0..BLOCK {
        codes[i] = (x[i] * inverse + MAGIC).to_bits().cast_signed() - MAGIC.to_bits().cast_signed();
        bytes[i] = codes[i] as u8;
    }
    let mut block = Block { scale, ..Block::default() };
    for (quad, bytes) in block.quads.iter_mut().zip(bytes.as_chunks().0) {
        *quad = i32::from_le_bytes(*bytes);
    }
    let (mut first, mut second) = (0, 0);
    for i in 0..BLOCK / 2 {
        first += codes[i];
        second += codes[i + BLOCK / 2];
    }
    block.sums = [first, second, first + second];
    for i in 0..3 {
        block.scaled[i] = block.sums[i] as f32 * scale;
    }
    block
}
