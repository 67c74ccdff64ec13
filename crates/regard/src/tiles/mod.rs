//! The products on AMX tiles: 16 x 16 sums of 32 products in one instruction, for numbers of 8 digits (bf16).
//!
//! The orientation is that of the vector kernels, rows (queries) in the lanes, so masks, scores and softmax are the same
//! code. What differs is how operands lie: the left one in rows of 32, the right one in pairs, both woven (see [`pack`]),
//!
//! ```text
//! scores  [keys][lanes]     = keys   [key][32 features]      x queries [feature pair][16 lanes x 2]
//! outputs [features][lanes] = values [feature][32 keys]      x weights [key pair][16 lanes x 2]
//! ```
//!
//! and that a number of more digits is split into parts of 8 that are multiplied each with each, the smallest products left
//! out: one part is bf16 itself, two hold an `f16` (or two thirds of an `f32`), three an `f32` exactly.

mod backward;
mod few;
mod forward;
mod pack;
mod product;
mod weave;
mod woven;

pub(crate) use backward::{BackRoom, backward};
pub(crate) use few::FewTiles;
pub(crate) use forward::forward;
pub(crate) use pack::Prepared;

use crate::cells::CELL;
use crate::simd::{GROUP, Lanes};

/// One row of a tile: 32 numbers of 16 bits.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct TileRow([u16; WIDTH]);

/// Rows of zeros.
fn zeros(n: usize) -> Vec<TileRow> {
    vec![TileRow([0; WIDTH]); n]
}

/// Numbers in a row of a tile.
const WIDTH: usize = 32;
/// Rows of a tile.
const ROWS: usize = 16;

/// Chunks of 32 keys of a cell.
const CHUNKS: usize = CELL / WIDTH;
/// Tiles of 16 lanes of a group.
const LANE_TILES: usize = GROUP / ROWS;

/// Lanes that are on their way together: queries, scores, weights and sums of 32 rows fit in the first-level cache beside a
/// cell, those of 64 do not.
const HALF: usize = GROUP / 2;
/// Tiles of 16 lanes of half a group.
const HALF_TILES: usize = HALF / ROWS;

/// Numbers of some keys and half a group of rows, side by side.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
struct Halves<const KEYS: usize>([[f32; HALF]; KEYS]);

impl<const KEYS: usize> Halves<KEYS> {
    fn new() -> Box<Self> {
        Box::new(Self([[0.0; HALF]; KEYS]))
    }

    /// Where a product leaves them.
    fn sums(&mut self) -> product::Sums<'_> {
        product::Sums::rows((self.0.as_flattened_mut(), HALF))
    }
}

/// Sizes of packed operands, in tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Parts that each number is split into.
    pub(crate) parts: usize,
    /// Chunks of 32 features of a key.
    chunks: usize,
    /// Tiles of 16 features of a value.
    features: usize,
}

impl Sizes {
    pub(crate) fn new(parts: usize, qk_dim: usize, v_dim: usize) -> Self {
        Self { parts, chunks: qk_dim.div_ceil(WIDTH), features: v_dim.div_ceil(ROWS) }
    }

    /// Rows of the packed keys of a cell.
    fn key_rows(self) -> usize {
        self.parts * self.chunks * CELL
    }

    /// Rows of the packed values of a cell.
    fn value_rows(self) -> usize {
        self.parts * CHUNKS * self.features * ROWS
    }

    /// Features of a value, up to whole tiles.
    pub(crate) fn padded(self) -> usize {
        self.features * ROWS
    }
}

/// Memory of one thread for its products.
#[derive(Debug)]
pub(crate) struct Room {
    sizes: Sizes,
    /// Queries of each group, in pairs of features.
    queries: Vec<Vec<TileRow>>,
    /// Scores of a piece that is done in a row.
    tile: Vec<Lanes<f32>>,
    /// Its weights, in pairs of keys.
    pairs: Vec<TileRow>,
    /// Scores of two half pieces: one is being made while the other is weighed.
    scores: [Box<Halves<CELL>>; 2],
    /// Weights of two half pieces, in pairs of keys.
    weights: [Vec<TileRow>; 2],
    /// The first keys of cells that wait for their turn.
    queue: Vec<usize>,
    /// A cell that is not prepared.
    cell: pack::Packed,
}

impl Room {
    /// Parts that each number is split into.
    pub(crate) fn parts(&self) -> usize {
        self.sizes.parts
    }

    pub(crate) fn new(sizes: Sizes, groups: usize) -> Self {
        let lanes = |n| vec![Lanes([0.0; GROUP]); n];
        Self {
            sizes,
            queries: (0..groups).map(|_| zeros(sizes.key_rows())).collect(),
            tile: lanes(CELL),
            pairs: zeros(sizes.parts * CHUNKS * LANE_TILES * ROWS),
            scores: [Halves::new(), Halves::new()],
            weights: [0, 1].map(|_| zeros(sizes.parts * CHUNKS * HALF_TILES * ROWS)),
            queue: Vec::new(),
            cell: pack::Packed::new(sizes),
        }
    }
}
