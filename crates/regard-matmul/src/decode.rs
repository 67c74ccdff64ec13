//! Blocks of a file into codes and scales. The definitions are those of ggml (`ggml-quants.c`, `dequantize_row_*`).

use crate::error::Error;
use crate::format::{Format, Layout, SubScales};
use half::{bf16, f16};

/// One block of a row, of any quantised format.
#[derive(Debug)]
pub(crate) struct Codes {
    /// Unsigned codes: the first 32 of them, or all.
    pub(crate) codes: [u8; 256],
    /// Scale of the block, an `f16`.
    pub(crate) scale: u16,
    /// Min of the block, an `f16`.
    pub(crate) min: u16,
    /// Factors of the scales of sub-blocks.
    pub(crate) sub_scales: [i8; 16],
    /// Factors of the mins of sub-blocks.
    pub(crate) sub_mins: [u8; 16],
}

impl Codes {
    pub(crate) fn new() -> Self {
        Self { codes: [0; 256], scale: 0, min: 0, sub_scales: [1; 16], sub_mins: [1; 16] }
    }

    /// Reads a block, of [`Format::block_bytes`]. Not for float formats.
    pub(crate) fn read(&mut self, format: Format, block: &[u8]) {
        let half = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
        match format {
            Format::F32 | Format::F16 | Format::Bf16 => {}
            Format::Q4_0 | Format::Q4_1 | Format::Q5_0 | Format::Q5_1 => {
                self.scale = half(0);
                let layout = format.layout();
                let mut at = 2;
                if layout.min {
                    self.min = half(2) ^ 0x8000; // stored as what is added
                    at = 4;
                }
                nibbles(&block[at + 4 * layout.high..], &mut self.codes[..32]);
                if layout.high == 1 {
                    for (i, code) in self.codes[..32].iter_mut().enumerate() {
                        *code |= (block[at + i / 8] >> (i % 8) & 1) << 4;
                    }
                }
            }
            Format::Q8_0 => {
                self.scale = half(0);
                self.codes.iter_mut().zip(&block[2..]).for_each(|(code, q)| *code = q ^ 0x80);
            }
            Format::Q2K => {
                (self.scale, self.min) = (half(80), half(82));
                for (i, &byte) in block[..16].iter().enumerate() {
                    (self.sub_scales[i], self.sub_mins[i]) = ((byte & 15).cast_signed(), byte >> 4);
                }
                pairs(&block[16..], &mut self.codes);
            }
            Format::Q3K => {
                self.scale = half(108);
                let six = &block[96..108];
                for (i, scale) in self.sub_scales.iter_mut().enumerate() {
                    let low = six[i % 8] >> (4 * (i / 8)) & 15;
                    let high = six[8 + i % 4] >> (2 * (i / 4)) & 3;
                    *scale = (low | high << 4).cast_signed() - 32;
                }
                pairs(&block[32..], &mut self.codes);
                high_bits(&block[..32], &mut self.codes, 2);
            }
            Format::Q4K | Format::Q5K => {
                (self.scale, self.min) = (half(0), half(2));
                self.six_bits(&block[4..16]);
                let at = if format == Format::Q5K { 48 } else { 16 };
                for (bytes, codes) in block[at..].chunks(32).zip(self.codes.chunks_mut(64)) {
                    nibbles(bytes, codes);
                }
                if format == Format::Q5K {
                    high_bits(&block[16..48], &mut self.codes, 4);
                }
            }
            Format::Q6K => {
                self.scale = half(208);
                for (i, &byte) in block[192..208].iter().enumerate() {
                    self.sub_scales[i] = byte.cast_signed();
                }
                for (i, code) in self.codes.iter_mut().enumerate() {
                    let (half, quarter, lane) = (i / 128, i / 32 % 4, i % 32);
                    let low = block[64 * half + 32 * (quarter % 2) + lane] >> (4 * (quarter / 2));
                    let high = block[128 + 32 * half + lane] >> (2 * quarter);
                    *code = low & 15 | (high & 3) << 4;
                }
            }
        }
    }

    /// The 6-bit scales and mins of 8 sub-blocks, in 12 bytes.
    fn six_bits(&mut self, bytes: &[u8]) {
        for i in 0..4 {
            self.sub_scales[i] = (bytes[i] & 63).cast_signed();
            self.sub_mins[i] = bytes[i + 4] & 63;
            self.sub_scales[i + 4] = (bytes[i + 8] & 15 | bytes[i] >> 6 << 4).cast_signed();
            self.sub_mins[i + 4] = bytes[i + 8] >> 4 | bytes[i + 4] >> 6 << 4;
        }
    }

    /// The numbers that the codes stand for.
    pub(crate) fn numbers(&self, layout: Layout, out: &mut [f32]) {
        let scale = f16::from_bits(self.scale).to_f32();
        let min = f16::from_bits(self.min).to_f32();
        for (sub, out) in out.chunks_mut(layout.sub).enumerate() {
            let (mut scale, mut min) = (scale, min);
            if layout.scales != SubScales::None {
                scale *= f32::from(self.sub_scales[sub]);
                min *= f32::from(self.sub_mins[sub]);
            }
            for (out, &code) in out.iter_mut().zip(&self.codes[sub * layout.sub..]) {
                #[expect(clippy::cast_precision_loss, reason = "at most 8 bits")]
                let code = (i32::from(code) - layout.offset) as f32;
                *out = if layout.min { scale * code - min } else { scale * code };
            }
        }
    }
}

/// Low nibbles into the first half, high nibbles into the second.
fn nibbles(bytes: &[u8], codes: &mut [u8]) {
    let (low, high) = codes.split_at_mut(codes.len() / 2);
    for ((&byte, low), high) in bytes.iter().zip(low).zip(high) {
        (*low, *high) = (byte & 15, byte >> 4);
    }
}

/// 2-bit codes: 4 planes of 32 codes in each 32 bytes.
fn pairs(bytes: &[u8], codes: &mut [u8; 256]) {
    for (i, code) in codes.iter_mut().enumerate() {
        *code = bytes[i / 128 * 32 + i % 32] >> (2 * (i / 32 % 4)) & 3;
    }
}

/// One more bit for each code: 8 planes of 32 bits.
fn high_bits(bytes: &[u8], codes: &mut [u8; 256], shift: u32) {
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= (bytes[i % 32] >> (i / 32) & 1) << shift;
    }
}

/// The numbers that stored weights stand for, by the definitions of ggml, to the bit.
///
/// # Errors
///
/// If `out` is not a whole number of blocks, or `bytes` has another length than `out` needs.
pub fn dequantize(format: Format, bytes: &[u8], out: &mut [f32]) -> Result<(), Error> {
    let expected = format.row_bytes(out.len())?;
    if bytes.len() != expected {
        return Err(Error::Length { buffer: "bytes", found: bytes.len(), expected });
    }
    match format {
        Format::F32 | Format::F16 | Format::Bf16 => {
            let blocks = bytes.chunks_exact(format.block_bytes());
            out.iter_mut().zip(blocks).for_each(|(out, bytes)| *out = float(format, bytes));
        }
        _ => {
            let mut codes = Codes::new();
            let blocks = bytes.chunks_exact(format.block_bytes());
            for (out, block) in out.chunks_exact_mut(format.block_len()).zip(blocks) {
                codes.read(format, block);
                codes.numbers(format.layout(), out);
            }
        }
    }
    Ok(())
}

/// A number of a float format.
pub(crate) fn float(format: Format, bytes: &[u8]) -> f32 {
    match (format, bytes) {
        (Format::F16, &[a, b, ..]) => f16::from_le_bytes([a, b]).to_f32(),
        (Format::Bf16, &[a, b, ..]) => bf16::from_le_bytes([a, b]).to_f32(),
        (_, &[a, b, c, d, ..]) => f32::from_le_bytes([a, b, c, d]),
        _ => 0.0,
    }
}
