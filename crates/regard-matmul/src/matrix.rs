//! Weights, packed: groups of 16 outputs, so that a vector of 16 lanes is one input, or 4 inputs, of 16 outputs.
//!
//! Codes of 32 inputs: in a plane of `b` bits, byte `4 * output + i % 4` of the `b` lines is a little-endian integer of `8 * b` bits,
//! of which the bits from `b * (i / 4)` on are those of input `i`. Scales are apart, so that codes stay aligned.

use crate::decode::{self, Codes};
use crate::error::Error;
use crate::format::{BLOCK, Format, LANES, Layout, SubScales};
use crate::memory::{self, Line};
use crate::simd::Simd;
use rayon::prelude::*;

/// The weights of a linear map, `outputs` rows of `inputs` numbers, in their own format.
#[derive(Clone, Debug)]
pub struct Matrix {
    format: Format,
    outputs: usize,
    inputs: usize,
    /// Codes, or floats, of one group after the other.
    lines: Vec<Line>,
    /// Lines of a group.
    group_lines: usize,
    scales: Vec<Line>,
    /// Lines of scales of a group.
    group_scales: usize,
    /// What is added to the outputs, a line for each group; or nothing.
    bias: Vec<Line>,
}

/// Packed weights of 16 outputs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group<'a> {
    pub(crate) lines: &'a [Line],
    /// Of quantised formats: one unit after the other.
    pub(crate) scales: &'a [u8],
}

impl Matrix {
    /// Packs `[outputs, inputs]` weights, row-major as in GGUF and safetensors. Takes the memory of `bytes`, up to 4 % more, with the
    /// outputs padded to a multiple of 16, and the inputs of float formats to one of 32.
    ///
    /// # Errors
    ///
    /// If an axis is 0, a row is not a whole number of blocks, or `bytes` has another length than the sizes say.
    pub fn new(format: Format, [outputs, inputs]: [usize; 2], bytes: &[u8]) -> Result<Self, Error> {
        if outputs == 0 || inputs == 0 {
            return Err(Error::Sizes { outputs, inputs });
        }
        let row = format.row_bytes(inputs)?;
        let expected = row.checked_mul(outputs).ok_or(Error::Sizes { outputs, inputs })?;
        if bytes.len() != expected {
            return Err(Error::Length { buffer: "bytes", found: bytes.len(), expected });
        }
        let layout = format.layout();
        let (group_lines, group_scales) = if format.block_len() == 1 {
            (inputs.next_multiple_of(BLOCK) * LANES * format.block_bytes() / 64, 0)
        } else {
            let scales = inputs / layout.unit * layout.scale_bytes();
            (inputs / BLOCK * layout.lines(), scales.div_ceil(64))
        };
        let groups = outputs.div_ceil(LANES);
        let mut lines = vec![Line([0; 64]); groups * group_lines];
        let mut scales = vec![Line([0; 64]); groups * group_scales];
        let rows = bytes.par_chunks(row * LANES);
        if group_scales == 0 {
            rows.zip(lines.par_chunks_mut(group_lines)).for_each(|(rows, lines)| {
                pack_floats(format, rows.chunks_exact(row), memory::bytes_mut(lines));
            });
        } else {
            rows.zip(lines.par_chunks_mut(group_lines))
                .zip(scales.par_chunks_mut(group_scales))
                .for_each(|((rows, lines), scales)| {
                    let scales = memory::bytes_mut(scales);
                    for (output, row) in rows.chunks_exact(row).enumerate() {
                        pack_row(format, row, output, lines, scales);
                    }
                });
        }
        let bias = vec![];
        Ok(Self { format, outputs, inputs, lines, group_lines, scales, group_scales, bias })
    }

    /// With numbers that products add to the outputs when they write them: `x W^T + b`.
    ///
    /// # Errors
    ///
    /// If there are not as many as outputs.
    pub fn with_bias(mut self, bias: &[f32]) -> Result<Self, Error> {
        if bias.len() != self.outputs {
            let (found, expected) = (bias.len(), self.outputs);
            return Err(Error::Length { buffer: "bias", found, expected });
        }
        self.bias = vec![Line::default(); self.groups()];
        let to = memory::bytes_mut(&mut self.bias).as_chunks_mut::<4>().0;
        to.iter_mut().zip(bias).for_each(|(to, bias)| *to = bias.to_le_bytes());
        Ok(self)
    }

    /// The rows.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// The elements of a row.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// The format.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// The bytes of memory that it holds.
    #[must_use]
    pub fn bytes(&self) -> usize {
        [&self.lines, &self.scales, &self.bias].iter().map(|lines| size_of_val(&***lines)).sum()
    }

    /// The numbers of one row, as [`dequantize`](crate::dequantize) makes them.
    ///
    /// # Errors
    ///
    /// If there is no such row, or `out` has another length than a row.
    pub fn row(&self, output: usize, out: &mut [f32]) -> Result<(), Error> {
        if output >= self.outputs {
            return Err(Error::Output { output, outputs: self.outputs });
        }
        if out.len() != self.inputs {
            return Err(Error::Length { buffer: "out", found: out.len(), expected: self.inputs });
        }
        let (group, lane) = (self.group(output / LANES), output % LANES);
        if self.group_scales == 0 {
            let size = self.format.block_bytes();
            let bytes = memory::bytes(group.lines);
            for (input, out) in out.iter_mut().enumerate() {
                *out =
                    decode::float(self.format, &bytes[size * float_at(self.format, input, lane)..]);
            }
            return Ok(());
        }
        let layout = self.format.layout();
        let lines = group.lines.chunks_exact(layout.lines() * layout.blocks());
        let scales = group.scales.chunks_exact(layout.scale_bytes());
        let mut codes = Codes::new();
        for ((out, lines), scales) in out.chunks_exact_mut(layout.unit).zip(lines).zip(scales) {
            unpack(layout, lane, lines, scales, &mut codes);
            codes.numbers(layout, out);
        }
        Ok(())
    }

    /// Groups of 16 outputs.
    pub(crate) fn groups(&self) -> usize {
        self.outputs.div_ceil(LANES)
    }

    /// The lines of a group and of those after it; nothing after the last.
    pub(crate) fn lines_from(&self, group: usize) -> &[Line] {
        self.lines.get(group * self.group_lines..).unwrap_or_default()
    }

    /// Outputs of a group, given the sums of products.
    #[inline(always)]
    pub(crate) fn finish<S: Simd>(&self, s: S, group: usize, sums: S::Floats) -> [f32; LANES] {
        let bias = self.bias.get(group);
        s.array(bias.map_or(sums, |bias| s.add(sums, s.f32(bias))))
    }

    pub(crate) fn group(&self, i: usize) -> Group<'_> {
        Group {
            lines: &self.lines[i * self.group_lines..][..self.group_lines],
            scales: memory::bytes(&self.scales[i * self.group_scales..][..self.group_scales]),
        }
    }
}

/// Where a group has a float: 16 outputs of an input, then those of the next; of bf16, pairs of inputs as matrix instructions take
/// them.
fn float_at(format: Format, input: usize, output: usize) -> usize {
    match format {
        Format::Bf16 => 2 * (input / 2 * LANES + output) + input % 2,
        _ => input * LANES + output,
    }
}

fn pack_floats<'a>(format: Format, rows: impl Iterator<Item = &'a [u8]>, to: &mut [u8]) {
    let size = format.block_bytes();
    for (output, row) in rows.enumerate() {
        for (input, bytes) in row.chunks_exact(size).enumerate() {
            to[size * float_at(format, input, output)..][..size].copy_from_slice(bytes);
        }
    }
}

fn pack_row(format: Format, row: &[u8], output: usize, lines: &mut [Line], scales: &mut [u8]) {
    let layout = format.layout();
    let lines = lines.chunks_exact_mut(layout.lines() * layout.blocks());
    let scales = scales.chunks_exact_mut(layout.scale_bytes());
    let mut codes = Codes::new();
    for ((block, lines), scales) in row.chunks_exact(format.block_bytes()).zip(lines).zip(scales) {
        codes.read(format, block);
        pack(layout, output, &codes, lines, scales);
    }
}

/// One unit of one output.
fn pack(layout: Layout, output: usize, codes: &Codes, lines: &mut [Line], scales: &mut [u8]) {
    let blocks = lines.chunks_exact_mut(layout.lines());
    for (lines, codes) in blocks.zip(codes.codes.as_chunks::<BLOCK>().0) {
        let (low, high) = lines.split_at_mut(layout.low);
        for (i, code) in codes.iter().enumerate() {
            let (quad, byte) = (i / 4, 4 * output + i % 4);
            let at = layout.low * quad;
            low[at / 8].0[byte] |= (code & u8::MAX >> (8 - layout.low)) << (at % 8);
            if layout.high != 0 {
                let at = layout.high * quad;
                high[at / 8].0[byte] |= code >> layout.low << (at % 8);
            }
        }
    }
    let (head, subs) = scales.split_at_mut(layout.head());
    head[2 * output..][..2].copy_from_slice(&codes.scale.to_le_bytes());
    if layout.min {
        head[2 * (LANES + output)..][..2].copy_from_slice(&codes.min.to_le_bytes());
    }
    for (i, sub) in subs.chunks_exact_mut(layout.sub_bytes().max(1)).enumerate() {
        sub[output] = codes.sub_scales[i].cast_unsigned();
        match layout.scales {
            SubScales::Nibbles => sub[output] |= codes.sub_mins[i] << 4,
            _ if layout.min => sub[LANES + output] = codes.sub_mins[i],
            _ => {}
        }
    }
}

/// The reverse of [`pack`].
fn unpack(layout: Layout, output: usize, lines: &[Line], scales: &[u8], codes: &mut Codes) {
    let blocks = lines.chunks_exact(layout.lines());
    for (lines, codes) in blocks.zip(codes.codes.as_chunks_mut::<BLOCK>().0) {
        let (low, high) = lines.split_at(layout.low);
        for (i, code) in codes.iter_mut().enumerate() {
            let (quad, byte) = (i / 4, 4 * output + i % 4);
            let plane = |lines: &[Line], bits: usize| {
                let at = bits * quad;
                lines[at / 8].0[byte] >> (at % 8) & (u8::MAX >> (8 - bits))
            };
            *code = plane(low, layout.low);
            if layout.high != 0 {
                *code |= plane(high, layout.high) << layout.low;
            }
        }
    }
    let (head, subs) = scales.split_at(layout.head());
    let half = |at: usize| u16::from_le_bytes([head[2 * at], head[2 * at + 1]]);
    codes.scale = half(output);
    if layout.min {
        codes.min = half(LANES + output);
    }
    for (i, sub) in subs.chunks_exact(layout.sub_bytes().max(1)).enumerate() {
        codes.sub_scales[i] = sub[output].cast_signed();
        match layout.scales {
            SubScales::Nibbles => {
                codes.sub_scales[i] &= 15;
                codes.sub_mins[i] = sub[output] >> 4;
            }
            _ if layout.min => codes.sub_mins[i] = sub[LANES + output],
            _ => {}
        }
    }
}
