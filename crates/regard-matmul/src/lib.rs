#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

// The map. A module imports only modules that are listed before it.
//
//   error      every way a call can be wrong
//   math       functions of one number that become vectors, for what is done between products
//   format     the formats, their sizes, and how each is packed
//   decode     blocks of a file into codes and scales
//   memory     aligned lines of bytes, blocks of activations, and outputs shared between threads: unsafe
//   amx        products on tiles: unsafe
//   simd       the operations that kernels are written in; portable lanes; instruction sets
//   x86        the same operations on AVX2 and AVX-512: unsafe
//   lazy       what is computed when it is first needed
//   rows       activations, quantised or split in bf16 terms
//   matrix     weights, packed
//   floats     products with float weights on bf16 matrix instructions
//   kernel     products of a few rows with 16 outputs
//   multiply   jobs to threads

#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "instructions that the processor must have")]
mod amx;
mod decode;
mod error;
mod floats;
mod format;
mod kernel;
mod lazy;
pub mod math;
mod matrix;
#[expect(unsafe_code, reason = "views of memory that the borrow checker cannot express")]
mod memory;
mod multiply;
mod rows;
mod simd;
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "instructions that the processor must have")]
mod x86;

pub use decode::dequantize;
pub use error::Error;
pub use format::Format;
pub use matrix::Matrix;
pub use multiply::multiply;
pub use rows::Rows;
pub use simd::Isa;
