//! The formats, their sizes, and how each is packed.

use crate::error::Error;

/// How weights are stored: as in GGUF, where ggml defines the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names of the formats")]
pub enum Format {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
}

impl Format {
    /// Every format.
    pub const ALL: [Self; 13] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// The elements of a block: 1, 32 or 256.
    #[must_use]
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            _ => self.layout().unit,
        }
    }

    /// The bytes of a block.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// The bytes of a row of `inputs` elements.
    ///
    /// # Errors
    ///
    /// If `inputs` is not a whole number of blocks, or the bytes do not fit in memory.
    pub fn row_bytes(self, inputs: usize) -> Result<usize, Error> {
        if !inputs.is_multiple_of(self.block_len()) {
            return Err(Error::Blocks { format: self, inputs });
        }
        (inputs / self.block_len())
            .checked_mul(self.block_bytes())
            .filter(|&bytes| bytes <= isize::MAX as usize)
            .ok_or(Error::Sizes { outputs: 1, inputs })
    }

    /// How the format is packed. Of float formats, only the size of a line is used.
    pub(crate) const fn layout(self) -> Layout {
        const PLAIN: Layout = Layout {
            low: 4,
            high: 0,
            offset: 0,
            sub: 32,
            unit: 32,
            min: false,
            scales: SubScales::None,
        };
        const SUPER: Layout = Layout { unit: 256, scales: SubScales::Bytes, ..PLAIN };
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => PLAIN,
            Self::Q4_0 => Layout { offset: 8, ..PLAIN },
            Self::Q4_1 => Layout { min: true, ..PLAIN },
            Self::Q5_0 => Layout { high: 1, offset: 16, ..PLAIN },
            Self::Q5_1 => Layout { high: 1, min: true, ..PLAIN },
            Self::Q8_0 => Layout { low: 8, offset: 128, ..PLAIN },
            Self::Q2K => Layout { low: 2, sub: 16, min: true, scales: SubScales::Nibbles, ..SUPER },
            Self::Q3K => Layout { low: 2, high: 1, offset: 4, sub: 16, ..SUPER },
            Self::Q4K => Layout { min: true, ..SUPER },
            Self::Q5K => Layout { high: 1, min: true, ..SUPER },
            Self::Q6K => Layout { high: 2, offset: 32, sub: 16, ..SUPER },
        }
    }
}

/// Outputs of a group: the lanes of a kernel.
pub(crate) const LANES: usize = 16;

/// Inputs of a block of activations.
pub(crate) const BLOCK: usize = 32;

/// A quantised format, as numbers. A weight is `scale * (code - offset) - min`: the scale and min of a sub-block are those of
/// the block, or in a super-block, products of the block's with small integers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Bits of a code in the first plane: 2, 4 or 8.
    pub(crate) low: usize,
    /// Bits of a code in the second plane: 0, 1 or 2.
    pub(crate) high: usize,
    /// What a code must be lowered by: a power of two, or 0.
    pub(crate) offset: i32,
    /// Elements of a sub-block: 16 or 32.
    pub(crate) sub: usize,
    /// Elements of a block in the file: 32 or 256.
    pub(crate) unit: usize,
    /// If there are mins.
    pub(crate) min: bool,
    /// The integers of the sub-blocks.
    pub(crate) scales: SubScales,
}

/// The small integers of the sub-blocks of a super-block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SubScales {
    /// The block has no sub-blocks.
    None,
    /// A signed byte for the scale, and one for the min.
    Bytes,
    /// 4 bits for the scale, and 4 for the min.
    Nibbles,
}

impl Layout {
    /// Lines of 64 bytes that hold the codes of 32 inputs and 16 outputs.
    pub(crate) const fn lines(self) -> usize {
        self.low + self.high
    }

    /// Blocks of 32 inputs in a unit.
    pub(crate) const fn blocks(self) -> usize {
        self.unit / BLOCK
    }

    /// Sub-blocks in a unit.
    pub(crate) const fn subs(self) -> usize {
        self.unit / self.sub
    }

    /// Bytes of the `f16` scales and mins of a unit of 16 outputs.
    pub(crate) const fn head(self) -> usize {
        2 * LANES * (1 + self.min as usize)
    }

    /// Bytes of the integers of a sub-block of 16 outputs.
    pub(crate) const fn sub_bytes(self) -> usize {
        match self.scales {
            SubScales::None => 0,
            SubScales::Bytes => LANES * (1 + self.min as usize),
            SubScales::Nibbles => LANES,
        }
    }

    /// Bytes of all scales of a unit of 16 outputs.
    pub(crate) const fn scale_bytes(self) -> usize {
        self.head() + self.subs() * self.sub_bytes()
    }
}
