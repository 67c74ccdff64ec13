//! Products of a tile on vectors, the only hot loops: similarities (`dot_tile`, `Layer`), sums over keys (`Values`), sums
//! over rows (`RowSums`).
//!
//! Queries are in the vector lanes: a score tile is `[keys][rows]`, an output `[features][rows]`. Keys and values are read in
//! their memory layout, one scalar broadcast per element, so nothing is packed, and every reduction of the softmax is between
//! vectors, never within one. Each lane sums over features, or over keys, in ascending order for every vector width, so AVX2
//! and AVX-512 agree bitwise.
//!
//! Register tiles: 4 broadcasts x 4 vectors with 32 registers (8 x 2 and 8 x 1 for fewer rows), 6 x 2 with 16 registers. All
//! accumulators stay in registers. A bounds check inside a loop adds a branch to each iteration, with which the branch
//! predictor misses the loop exit; this costs a few per cent, so the checks are before the loops. A busy hyperthread on the same
//! core slows down loads, and 4 x 4 needs few of them: 8 for 16 multiply-adds, where 8 x 2 needs 10.
//!
//! Each product is a leaf, compiled once for each instruction set.

mod additive;
mod dot;
mod rows;
mod values;

use crate::machine::simd::Vectors;
pub(crate) use additive::{HiddenGrads, Layer, Projected, SimilaritiesBackward};
pub(crate) use dot::{distance_tile, dot_tile};
pub(crate) use rows::{RowBuffer, RowSums};
pub(crate) use values::Values;

/// Number of lanes that the products access for `rows` rows, rounded up to whole register tiles.
pub(crate) fn lanes_used(vectors: Vectors, rows: usize) -> usize {
    let Vectors { lanes, wide, .. } = vectors;
    match rows {
        _ if !wide => rows.next_multiple_of(2 * lanes),
        _ if rows <= 2 * lanes => rows.next_multiple_of(lanes),
        _ => 4 * lanes,
    }
}

/// Unroll factor of the products: 64 features take 16 jumps, few enough for the branch predictor to predict the loop exit.
const UNROLL: usize = 4;
