//! Activations, quantised.

use crate::error::Error;
use crate::format::BLOCK;
use crate::memory::{Block, TILE};
use crate::simd::{Isa, Simd, Task};
use rayon::prelude::*;
use std::ops::Range;

/// Activations: rows of `f32`, and the same rows in blocks of 32 8-bit integers. Keeps its memory from call to call.
#[derive(Clone, Debug, Default)]
pub struct Rows {
    rows: usize,
    inputs: usize,
    /// Tiles of 16 rows, the last one of fewer. A tile is one block of each row, then the next.
    blocks: Vec<Block>,
    /// The same blocks, not quantised, the last of a row padded by zeros.
    floats: Vec<[f32; BLOCK]>,
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
        let blocks = inputs.div_ceil(BLOCK);
        self.blocks.resize(rows * blocks, Block::default());
        self.floats.resize(rows * blocks, [0.0; BLOCK]);
        let isa = Isa::detect().without_tiles();
        // Below this, a thread takes longer to wake up.
        let grain = (1_usize << 15).div_ceil(inputs).next_multiple_of(TILE);
        if rows <= grain {
            isa.run(Quantise { inputs, x, to: &mut self.blocks, floats: &mut self.floats });
        } else {
            x.par_chunks(grain * inputs)
                .zip(self.blocks.par_chunks_mut(grain * blocks))
                .zip(self.floats.par_chunks_mut(grain * blocks))
                .for_each(|((x, to), floats)| isa.run(Quantise { inputs, x, to, floats }));
        }
        Ok(())
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

    /// The tile that holds a row: the same block of as many rows as are returned, then the next.
    pub(crate) fn tile(&self, row: usize) -> (&[Block], usize) {
        let (range, rows) = self.tile_range(row);
        (&self.blocks[range], rows)
    }

    /// As [`tile`](Self::tile), not quantised.
    pub(crate) fn float_tile(&self, row: usize) -> (&[[f32; BLOCK]], usize) {
        let (range, rows) = self.tile_range(row);
        (&self.floats[range], rows)
    }

    fn tile_range(&self, row: usize) -> (Range<usize>, usize) {
        let first = row / TILE * TILE;
        let end = (first + TILE).min(self.rows);
        let blocks = self.inputs.div_ceil(BLOCK);
        (first * blocks..end * blocks, end - first)
    }
}

struct Quantise<'a> {
    inputs: usize,
    x: &'a [f32],
    to: &'a mut [Block],
    floats: &'a mut [[f32; BLOCK]],
}

impl Task for Quantise<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let blocks = self.inputs.div_ceil(BLOCK);
        let tiles = self.x.chunks(self.inputs * TILE).zip(self.floats.chunks_mut(blocks * TILE));
        for ((x, floats), to) in tiles.zip(self.to.chunks_mut(blocks * TILE)) {
            let rows = x.len() / self.inputs;
            for (row, x) in x.chunks_exact(self.inputs).enumerate() {
                for (i, x) in x.chunks(BLOCK).enumerate() {
                    let floats = &mut floats[i * rows + row];
                    if let Some(whole) = x.first_chunk() {
                        *floats = *whole;
                    } else {
                        *floats = [0.0; BLOCK];
                        floats[..x.len()].copy_from_slice(x);
                    }
                    to[i * rows + row] = quantise(floats);
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
