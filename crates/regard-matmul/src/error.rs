//! Every way a call can be wrong.

use crate::format::Format;
use crate::simd::Isa;
use std::fmt;

/// Why a call was refused. Raised before any work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// Rows that are not a whole number of blocks.
    Blocks {
        /// The format.
        format: Format,
        /// The elements of a row.
        inputs: usize,
    },
    /// An axis of size 0, or sizes whose product does not fit in memory.
    Sizes {
        /// The outputs, or rows.
        outputs: usize,
        /// The inputs.
        inputs: usize,
    },
    /// A buffer of another length than the sizes say.
    Length {
        /// The buffer.
        buffer: &'static str,
        /// Its length.
        found: usize,
        /// The length that fits.
        expected: usize,
    },
    /// Activations with another number of inputs than the weights.
    Inputs {
        /// Of the activations.
        rows: usize,
        /// Of the weights.
        matrix: usize,
    },
    /// A row that the matrix does not have.
    Output {
        /// The row.
        output: usize,
        /// The number of rows.
        outputs: usize,
    },
    /// Instructions that this processor does not have.
    Isa(Isa),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Blocks { format, inputs } => write!(
                f,
                "a row has {inputs} inputs, and {format:?} stores blocks of {}: pass a multiple of {}, or store this tensor as F16",
                format.block_len(),
                format.block_len()
            ),
            Self::Sizes { outputs, inputs } => write!(
                f,
                "a matrix of {outputs} rows and {inputs} inputs: both must be at least 1, and the product must fit in memory"
            ),
            Self::Length { buffer, found, expected } => {
                write!(
                    f,
                    "{buffer} has length {found}, expected {expected}: pass a buffer of that length"
                )
            }
            Self::Inputs { rows, matrix } => write!(
                f,
                "the activations have {rows} inputs and the weights {matrix}: pass activations of {matrix} inputs to `Rows::set`"
            ),
            Self::Output { output, outputs } => {
                write!(f, "row {output} of a matrix that has {outputs}: pass a row below {outputs}")
            }
            Self::Isa(isa) => {
                write!(
                    f,
                    "this processor has no {isa:?}: pass `Isa::detect()`, or one of `Isa::available()`"
                )
            }
        }
    }
}

impl std::error::Error for Error {}
