//! How numbers stand in files, and how they become `f32`.

use half::{bf16, f16};
use std::fmt;

/// How the numbers of a tensor are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// Four bytes each.
    F32,
    /// Eight bytes each; rounded when they are taken.
    F64,
    /// Two bytes each, as IEEE 754 has them.
    F16,
    /// Two bytes each: the upper half of an `f32`.
    Bf16,
    /// 32 numbers of 4 bits share a scale: `(q - 8) * d`.
    Q4_0,
    /// 32 numbers of 4 bits share a scale and a least value: `q * d + m`.
    Q4_1,
    /// 32 numbers of 8 bits share a scale: `q * d`.
    Q8_0,
    /// Something that is not read, by the name that its file gives it.
    Other(String),
}

/// Numbers that share a scale, in every quantised kind of GGUF that is read here.
const BLOCK: usize = 32;

impl Dtype {
    /// How many numbers stand together, and in how many bytes. None for what is not read.
    pub(crate) fn block(&self) -> Option<(usize, usize)> {
        Some(match self {
            Self::F32 => (1, 4),
            Self::F64 => (1, 8),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (BLOCK, 2 + BLOCK / 2),
            Self::Q4_1 => (BLOCK, 4 + BLOCK / 2),
            Self::Q8_0 => (BLOCK, 2 + BLOCK),
            Self::Other(_) => return None,
        })
    }

    /// The bytes of so many numbers. None if they are not whole blocks, or too many.
    pub(crate) fn bytes(&self, numbers: usize) -> Option<usize> {
        let (together, bytes) = self.block()?;
        numbers.is_multiple_of(together).then_some(numbers / together)?.checked_mul(bytes)
    }

    /// The numbers of whole blocks. None for what is not read.
    pub(crate) fn decode(&self, bytes: &[u8]) -> Option<Vec<f32>> {
        #[expect(clippy::cast_possible_truncation, reason = "models compute in f32")]
        let narrowed = |x: &[u8; 8]| f64::from_le_bytes(*x) as f32;
        Some(match self {
            Self::F32 => bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
            Self::F64 => bytes.as_chunks().0.iter().map(narrowed).collect(),
            Self::F16 => bytes.as_chunks().0.iter().map(half16).collect(),
            Self::Bf16 => {
                bytes.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect()
            }
            Self::Q4_0 => blocks::<18>(bytes, |block, out| {
                let ([d], q) = scales(block);
                nibbles(q, out, |q| (f32::from(q) - 8.0) * d);
            }),
            Self::Q4_1 => blocks::<20>(bytes, |block, out| {
                let ([d, m], q) = scales(block);
                nibbles(q, out, |q| f32::from(q) * d + m);
            }),
            Self::Q8_0 => blocks::<34>(bytes, |block, out| {
                let ([d], q) = scales(block);
                for (out, q) in out.iter_mut().zip(q) {
                    *out = f32::from(q.cast_signed()) * d;
                }
            }),
            Self::Other(_) => return None,
        })
    }
}

fn half16(x: &[u8; 2]) -> f32 {
    f16::from_le_bytes(*x).to_f32()
}

/// Opens one block after the other: `N` bytes are 32 numbers.
fn blocks<const N: usize>(bytes: &[u8], open: impl Fn(&[u8; N], &mut [f32; BLOCK])) -> Vec<f32> {
    let blocks = bytes.as_chunks::<N>().0;
    let mut out = vec![[0.0; BLOCK]; blocks.len()];
    for (block, out) in blocks.iter().zip(&mut out) {
        open(block, out);
    }
    out.into_flattened()
}

/// The `f16` numbers that a block begins with, and the rest of it.
fn scales<const N: usize, const M: usize>(block: &[u8; N]) -> ([f32; M], &[u8]) {
    let halves = block.as_chunks().0;
    (std::array::from_fn(|i| half16(&halves[i])), &block[2 * M..])
}

/// The lower halves of 16 bytes are the first 16 numbers, the upper halves the others.
fn nibbles(bytes: &[u8], out: &mut [f32; BLOCK], number: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(BLOCK / 2);
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = number(byte & 15);
        *high = number(byte >> 4);
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other(name) => f.write_str(name),
            Self::Bf16 => f.write_str("BF16"),
            known => write!(f, "{known:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_of_four_bits_holds_its_first_half_below() {
        let mut block = f16::from_f32(0.5).to_le_bytes().to_vec();
        block.extend((0..16).map(|i| i | ((15 - i) << 4)));
        let numbers = Dtype::Q4_0.decode(&block).unwrap();
        assert_eq!(numbers.len(), 32);
        assert_eq!((numbers[0], numbers[15], numbers[16], numbers[31]), (-4.0, 3.5, 3.5, -4.0));

        block.splice(2..2, f16::from_f32(-1.0).to_le_bytes());
        let numbers = Dtype::Q4_1.decode(&block).unwrap();
        assert_eq!((numbers[0], numbers[15], numbers[16], numbers[31]), (-1.0, 6.5, 6.5, -1.0));
    }

    #[test]
    fn a_block_of_eight_bits_has_signs() {
        let mut block = f16::from_f32(2.0).to_le_bytes().to_vec();
        block.extend((0..32u8).map(|i| i.wrapping_sub(16)));
        let numbers = Dtype::Q8_0.decode(&block).unwrap();
        assert_eq!((numbers[0], numbers[16], numbers[31]), (-32.0, 0.0, 30.0));
    }

    #[test]
    fn floats_of_every_width_are_the_same_number() {
        for (dtype, bytes) in [
            (Dtype::F32, 1.5f32.to_le_bytes().to_vec()),
            (Dtype::F64, 1.5f64.to_le_bytes().to_vec()),
            (Dtype::F16, f16::from_f32(1.5).to_le_bytes().to_vec()),
            (Dtype::Bf16, bf16::from_f32(1.5).to_le_bytes().to_vec()),
        ] {
            assert_eq!(dtype.decode(&bytes), Some(vec![1.5]), "{dtype}");
            assert_eq!(dtype.bytes(1), Some(bytes.len()), "{dtype}");
        }
    }

    #[test]
    fn parts_of_blocks_have_no_size() {
        assert_eq!(Dtype::Q8_0.bytes(64), Some(68));
        assert_eq!(Dtype::Q8_0.bytes(33), None);
        assert_eq!(Dtype::F64.bytes(usize::MAX), None);
        assert_eq!(Dtype::Other("I64".into()).decode(&[0; 8]), None);
    }
}
