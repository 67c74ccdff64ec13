//! How numbers stand in files, and how they become `f32`.

use regard_matmul::{Format, dequantize};
use std::fmt;

/// How the numbers of a tensor are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// As products read them: floats, and the quantised kinds of GGUF.
    Packed(Format),
    /// Eight bytes each; rounded when they are taken.
    F64,
    /// Something that is not read, by the name that its file gives it.
    Other(String),
}

#[expect(non_upper_case_globals, reason = "named as the formats are")]
impl Dtype {
    /// Four bytes each.
    pub const F32: Self = Self::Packed(Format::F32);
    /// Two bytes each, as IEEE 754 has them.
    pub const F16: Self = Self::Packed(Format::F16);
    /// Two bytes each: the upper half of an `f32`.
    pub const Bf16: Self = Self::Packed(Format::Bf16);
    /// 32 numbers of 4 bits share a scale: `(q - 8) * d`.
    pub const Q4_0: Self = Self::Packed(Format::Q4_0);
    /// 32 numbers of 4 bits share a scale and a least value: `q * d + m`.
    pub const Q4_1: Self = Self::Packed(Format::Q4_1);
    /// 32 numbers of 8 bits share a scale: `q * d`.
    pub const Q8_0: Self = Self::Packed(Format::Q8_0);
}

impl Dtype {
    /// How many numbers stand together, and in how many bytes. None for what is not read.
    pub(crate) fn block(&self) -> Option<(usize, usize)> {
        match self {
            Self::Packed(format) => Some((format.block_len(), format.block_bytes())),
            Self::F64 => Some((1, 8)),
            Self::Other(_) => None,
        }
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
        match self {
            Self::Packed(format) => {
                let mut numbers =
                    vec![0.0; bytes.len() / format.block_bytes() * format.block_len()];
                dequantize(*format, bytes, &mut numbers).ok()?;
                Some(numbers)
            }
            Self::F64 => Some(bytes.as_chunks().0.iter().map(narrowed).collect()),
            Self::Other(_) => None,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Other(name) => f.write_str(name),
            Self::F64 => f.write_str("F64"),
            Self::Packed(Format::Bf16) => f.write_str("BF16"),
            Self::Packed(format) => write!(f, "{format:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

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
