//! Activations, as kernels take them.

use crate::error::Error;
use crate::format::{BLOCK, Format};
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
    x: Vec<f32>,
    /// Tiles of 16 rows, or of all if there are fewer: one block of each row, then the next. The last block of a row is padded by
    /// zeros, and the last tile by rows of any numbers. This, as what follows, is made when it is first needed.
    floats: Lazy<[f32; BLOCK]>,
    /// The same blocks, quantised.
    blocks: Lazy<Block>,
    /// The same blocks in bf16 terms: the first of a block of each row, the next of each, the last of each, then the next block.
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
        self.reset(rows, inputs)?.copy_from_slice(x);
        Ok(())
    }

    /// Room for rows of `inputs` numbers, of any content, in which to compute activations: they need not be copied then.
    ///
    /// # Errors
    ///
    /// If there are no inputs, or more numbers than memory can have.
    pub fn reset(&mut self, rows: usize, inputs: usize) -> Result<&mut [f32], Error> {
        let len = rows.checked_mul(inputs).filter(|_| inputs > 0);
        let len = len.ok_or(Error::Sizes { outputs: rows, inputs })?;
        (self.rows, self.inputs) = (rows, inputs);
        self.floats.clear();
        self.blocks.clear();
        self.terms.clear();
        self.x.resize(len, 0.0);
        Ok(&mut self.x)
    }

    /// Makes what products with a format read with these instructions, if it is not made yet.
    pub(crate) fn prepare(&self, format: Format, isa: Isa) {
        let vectors = Isa::detect().without_tiles();
        match (format.block_len(), isa.has_terms()) {
            (1, false) => self.floats.fill(|to| self.make::<Plain>(vectors, to)),
            (1, true) => self.terms.fill(|to| self.make::<Split>(isa, to)),
            _ => self.blocks.fill(|to| self.make::<Quantised>(vectors, to)),
        }
    }

    fn make<F: Form>(&self, isa: Isa, to: &mut Vec<F::To>) {
        let (inputs, tile_rows) = (self.inputs, self.tile_rows());
        let tile = tile_rows * inputs.div_ceil(BLOCK) * F::COUNT;
        to.resize(self.rows.div_ceil(TILE) * tile, F::To::default());
        // Below this, a thread takes longer to wake up.
        let grain = (1_usize << 15).div_ceil(inputs).div_ceil(TILE);
        let run = |x: &[f32], to: &mut [F::To]| {
            isa.run(Make::<F> { inputs, tile_rows, x, to });
        };
        if self.rows <= grain * TILE {
            run(&self.x, to);
        } else {
            let x = self.x.par_chunks(grain * TILE * inputs);
            x.zip(to.par_chunks_mut(grain * tile)).for_each(|(x, to)| run(x, to));
        }
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

    /// The rows of a tile. Of few rows there is no more to read than there are.
    pub(crate) fn tile_rows(&self) -> usize {
        self.rows.min(TILE)
    }

    /// The tile that holds a row, quantised: the same block of as many rows as are returned, then the next.
    pub(crate) fn tile(&self, row: usize) -> (&[Block], usize) {
        (&self.blocks.get()[self.tile_range(row)], self.tile_rows())
    }

    /// As [`tile`](Self::tile), not quantised.
    pub(crate) fn float_tile(&self, row: usize) -> (&[[f32; BLOCK]], usize) {
        (&self.floats.get()[self.tile_range(row)], self.tile_rows())
    }

    /// Some blocks of the terms of a tile: [`TERMS`] times [`tile_rows`](Self::tile_rows) lines each.
    pub(crate) fn term_tile(&self, tile: usize, blocks: Range<usize>) -> &[Line] {
        let block = TERMS * self.tile_rows();
        let first = tile * self.inputs.div_ceil(BLOCK);
        &self.terms.get()[(first + blocks.start) * block..(first + blocks.end) * block]
    }

    fn tile_range(&self, row: usize) -> Range<usize> {
        let tile = self.tile_rows() * self.inputs.div_ceil(BLOCK);
        row / TILE * tile..(row / TILE + 1) * tile
    }
}

/// What a block of a row is made into.
trait Form {
    type To: Clone + Default + Send;
    /// How many of them.
    const COUNT: usize;

    /// Writes what is made of a block to `to[0]`, `to[stride]` and so on. To be `#[inline(always)]`.
    fn make<S: Simd>(s: S, x: &[f32; BLOCK], to: &mut [Self::To], stride: usize);
}

struct Plain;

impl Form for Plain {
    type To = [f32; BLOCK];
    const COUNT: usize = 1;

    #[inline(always)]
    fn make<S: Simd>(_: S, x: &[f32; BLOCK], to: &mut [Self::To], _: usize) {
        to[0] = *x;
    }
}

struct Quantised;

impl Form for Quantised {
    type To = Block;
    const COUNT: usize = 1;

    #[inline(always)]
    fn make<S: Simd>(_: S, x: &[f32; BLOCK], to: &mut [Block], _: usize) {
        to[0] = quantise(x);
    }
}

struct Split;

impl Form for Split {
    type To = Line;
    const COUNT: usize = TERMS;

    #[inline(always)]
    fn make<S: Simd>(s: S, x: &[f32; BLOCK], to: &mut [Line], stride: usize) {
        for (i, term) in s.terms::<TERMS>(s.apart(x)).into_iter().enumerate() {
            s.store(term, &mut to[i * stride]);
        }
    }
}

/// Tiles of rows, to be made into a form.
struct Make<'a, F: Form> {
    inputs: usize,
    tile_rows: usize,
    x: &'a [f32],
    to: &'a mut [F::To],
}

impl<F: Form> Task for Make<'_, F> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { inputs, tile_rows, x, to } = self;
        let block = tile_rows * F::COUNT;
        let tiles = x.chunks(inputs * TILE).zip(to.chunks_mut(inputs.div_ceil(BLOCK) * block));
        for (x, to) in tiles {
            for (row, x) in x.chunks_exact(inputs).enumerate() {
                for (x, to) in x.chunks(BLOCK).zip(to.chunks_exact_mut(block)) {
                    let to = &mut to[row..];
                    if let Some(whole) = x.first_chunk() {
                        F::make(s, whole, to, tile_rows);
                    } else {
                        let mut padded = [0.0; BLOCK];
                        padded[..x.len()].copy_from_slice(x);
                        F::make(s, &padded, to, tile_rows);
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
