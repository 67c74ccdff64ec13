//! The products of a tile, the only hot loops: similarities (`dot_tile`, `Layer`), sums over keys (`add_values`), sums
//! over rows (`add_rows`).
//!
//! Queries stand in the vector lanes: a tile of scores is `[keys][rows]`, an output `[features][rows]`. Keys and values
//! are read as they lie in memory, one scalar broadcast each, so nothing is packed, and every reduction of the softmax
//! is between vectors, never inside one. A lane's sums run over features, or over keys, in ascending order whatever
//! the vector width: that is why AVX2 and AVX-512 agree to the bit.
//!
//! Register tiles: 4 broadcasts x 4 vectors with 32 registers (8 x 2 and 8 x 1 for fewer rows), 6 x 2 with 16: all
//! accumulators stay in registers. A bounds check inside the loops is one more branch in each round, which hides the
//! loop's end from the branch predictor: a few per cent. The checks stand before the loops instead. Loads are what a busy
//! neighbour on the core slows down, and 4 x 4 needs decode: 8 for 16 multiply-adds, where 8 x 2 needs 10.
//!
//! Each product is a function of its own ([`Simd::call`]), compiled once for each instruction set.

mod additive;
mod dot;
mod rows;
mod values;

use crate::simd::{Number, Simd};
pub(crate) use additive::{HiddenGrads, Layer};
pub(crate) use dot::{Distances, Dots, ScoreGrads, Weights, dot_tile};
pub(crate) use rows::{RowBuffer, add_rows};
pub(crate) use values::add_values;

/// The lanes that the products touch for `rows` rows: up to whole register tiles.
#[inline(always)]
pub(crate) fn lanes_used<N: Number, S: Simd<N>>(rows: usize) -> usize {
    match rows {
        _ if !S::WIDE => rows.next_multiple_of(2 * S::LANES),
        _ if rows <= 2 * S::LANES => rows.next_multiple_of(S::LANES),
        _ => 4 * S::LANES,
    }
}

/// Rounds of a product written out in a row: 16 jumps for 64 features are few enough for the branch predictor to see
/// the end of the loop coming.
const UNROLL: usize = 4;
