//! The products on AMX tiles: 16 x 16 sums of 32 products in one instruction, for numbers of 8 significant bits (bf16).
//!
//! The orientation is that of the vector kernels, rows (queries) in the lanes, so masks, scores and softmax are the same
//! code. What differs is how operands lie: the left one in rows of 32, the right one in pairs, both interleaved (see [`pack`]),
//!
//! ```text
//! scores  [keys][lanes]     = keys   [key][32 features]      x queries [feature pair][16 lanes x 2]
//! outputs [features][lanes] = values [feature][32 keys]      x weights [key pair][16 lanes x 2]
//! ```
//!
//! and that a number of more bits is split into bf16 terms of 8 that are multiplied each with each, the smallest products left
//! out: one bf16 term is bf16 itself, two hold an `f16` (or two thirds of an `f32`), three an `f32` exactly. Packing reads each number
//! once and writes two bytes for each of its bf16 terms.

/// Evaluates an expression with a constant number of bf16 terms: leaves keep the terms of a number in as many registers.
macro_rules! with_terms {
    ($terms:expr, $TERMS:ident => $work:expr) => {
        match $terms {
            1 => {
                const $TERMS: usize = 1;
                $work
            }
            2 => {
                const $TERMS: usize = 2;
                $work
            }
            _ => {
                const $TERMS: usize = 3;
                $work
            }
        }
    };
}
pub(crate) use with_terms;

/// The same for leaves that read elements of type `E`: only the numbers of terms that it is ever split into are compiled.
macro_rules! with_terms_of {
    ($E:ty, $terms:expr, $TERMS:ident => $work:expr) => {
        with_terms!($terms, $TERMS => {
            if const { split_into::<$E>($TERMS) } {
                $work
            } else {
                unreachable!("the plan splits {} into other terms", <$E>::NAME)
            }
        })
    };
}

/// Whether numbers of a type are ever split into so many bf16 terms.
pub(crate) const fn split_into<E: Element>(terms: usize) -> bool {
    let mut i = 0;
    while i < E::TERMS.len() {
        if E::TERMS[i] == terms {
            return true;
        }
        i += 1;
    }
    false
}

pub(crate) mod backward;
pub(crate) mod pack;
pub(crate) mod pipeline;
pub(crate) mod product;

pub(crate) use pack::{PackKv, PackedKv};

use crate::description::problem::Dims;
use crate::kernel::block_loop::DECODE_MAX_ROWS;
use crate::kernel::micro::RowBuffer;
use crate::machine::simd::{Element, GROUP, Lanes};
use crate::tensor::index::BLOCK_KEYS;
use backward::{BackwardBlocks, BackwardRows, BackwardSizes, ScoreOperands};
use pipeline::Block;

/// One row of a tile: 32 numbers of 16 bits.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct TileRow(pub(crate) [u16; WIDTH]);

/// Rows of zeros.
fn zeros(n: usize) -> Vec<TileRow> {
    vec![TileRow([0; WIDTH]); n]
}

/// Numbers in a row of a tile.
pub(crate) const WIDTH: usize = 32;
/// Rows of a tile.
pub(crate) const ROWS: usize = 16;

/// Chunks of 32 keys of a key block.
pub(crate) const CHUNKS: usize = BLOCK_KEYS / WIDTH;
/// Tiles of 16 lanes of a group.
pub(crate) const LANE_TILES: usize = GROUP / ROWS;

/// Lanes that are on their way together: queries, scores, weights and sums of 32 rows fit in the first-level cache beside a
/// key block, those of 64 do not.
pub(crate) const HALF: usize = GROUP / 2;
/// Tiles of 16 lanes of half a group.
pub(crate) const HALF_TILES: usize = HALF / ROWS;

/// Numbers of some keys and half a group of rows, side by side.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub(crate) struct Halves<const KEYS: usize>(pub(crate) [[f32; HALF]; KEYS]);

impl<const KEYS: usize> Halves<KEYS> {
    pub(crate) fn new() -> Box<Self> {
        Box::new(Self([[0.0; HALF]; KEYS]))
    }

    /// Where a product leaves them.
    pub(crate) fn sums(&mut self) -> product::Sums<'_> {
        product::Sums::rows((self.0.as_flattened_mut(), HALF))
    }
}

/// Sizes of packed operands, in tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Parts that each number is split into.
    pub(crate) terms: usize,
    /// Chunks of 32 features of a key.
    pub(crate) chunks: usize,
    /// Tiles of 16 features of a value.
    pub(crate) features: usize,
}

impl Sizes {
    pub(crate) fn new(terms: usize, qk_dim: usize, v_dim: usize) -> Self {
        Self { terms, chunks: qk_dim.div_ceil(WIDTH), features: v_dim.div_ceil(ROWS) }
    }

    /// Rows of the packed keys of a key block.
    pub(crate) fn key_rows(self) -> usize {
        self.terms * self.chunks * BLOCK_KEYS
    }

    /// Rows of the packed values of a key block.
    pub(crate) fn value_rows(self) -> usize {
        self.terms * CHUNKS * self.features * ROWS
    }

    /// Features of a value, up to whole tiles.
    pub(crate) fn padded(self) -> usize {
        self.features * ROWS
    }
}

/// Memory of one thread for its products.
#[derive(Debug)]
pub(crate) struct AmxScratch {
    pub(crate) sizes: Sizes,
    /// Queries of each group, in pairs of features.
    pub(crate) queries: Vec<Vec<TileRow>>,
    /// Scores of a tile that is done in a row.
    pub(crate) tile: Vec<Lanes<f32>>,
    /// Its weights, in pairs of keys.
    pub(crate) pairs: Vec<TileRow>,
    /// Scores of two half tiles: one is being made while the other is weighed.
    pub(crate) scores: [Box<Halves<BLOCK_KEYS>>; 2],
    /// Weights of two half tiles, in pairs of keys.
    pub(crate) weights: [Vec<TileRow>; 2],
    /// The first keys of key_blocks that wait for their turn.
    pub(crate) queue: Vec<usize>,
    /// A key block that is not prepared.
    pub(crate) key_block: pack::OwnBlock,
}

impl AmxScratch {
    pub(crate) fn new(sizes: Sizes, groups: usize) -> Self {
        let lanes = |n| vec![Lanes([0.0; GROUP]); n];
        Self {
            sizes,
            queries: (0..groups).map(|_| zeros(sizes.key_rows())).collect(),
            tile: lanes(BLOCK_KEYS),
            pairs: zeros(sizes.terms * CHUNKS * LANE_TILES * ROWS),
            scores: [Halves::new(), Halves::new()],
            weights: [0, 1].map(|_| zeros(sizes.terms * CHUNKS * HALF_TILES * ROWS)),
            queue: Vec::new(),
            key_block: pack::OwnBlock::new(sizes),
        }
    }
}

/// In decoding, those of one tile of weights: each comes twice.
pub(crate) const ROWS_PER_WEIGHT_TILE: usize = ROWS / 2;
/// Groups of 16 keys of a key block.
pub(crate) const KEY_GROUPS: usize = BLOCK_KEYS / ROWS;

/// Memory of one thread for the products of decoding.
#[derive(Debug)]
pub(crate) struct AmxDecodeScratch {
    /// Queries in pairs of features, `[chunk][16 pairs]`.
    pub(crate) queries: Vec<TileRow>,
    /// Weights, `[group][up to 8 rows beside zeros, then behind them]`, of all rows eight by eight.
    pub(crate) weights: Vec<TileRow>,
    /// `[eight rows][chunk][up to 8 rows of even features, then of odd ones]`
    pub(crate) sums: Vec<SumRow>,
    /// The last rows of a key block, up to whole tiles.
    pub(crate) copies: Vec<TileRow>,
}

/// A row of sums.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct SumRow(pub(crate) [f32; ROWS]);

impl AmxDecodeScratch {
    pub(crate) fn new(sizes: Sizes) -> Self {
        let value_chunks = sizes.features.div_ceil(2);
        Self {
            queries: zeros(sizes.chunks * ROWS),
            weights: zeros(DECODE_MAX_ROWS / ROWS_PER_WEIGHT_TILE * KEY_GROUPS * ROWS),
            sums: vec![
                SumRow([0.0; ROWS]);
                DECODE_MAX_ROWS / ROWS_PER_WEIGHT_TILE * value_chunks * ROWS
            ],
            copies: zeros(sizes.chunks.max(value_chunks) * ROWS),
        }
    }

    /// Whether keys and values of these sizes are whole tiles as they lie.
    pub(crate) fn fit(terms: usize, qk_dim: usize, v_dim: usize) -> bool {
        terms == 1 && qk_dim.is_multiple_of(WIDTH) && v_dim.is_multiple_of(WIDTH)
    }
}

/// Memory of one thread for the products of the backward pass.
#[derive(Debug)]
pub(crate) struct AmxBackwardScratch {
    pub(crate) sizes: BackwardSizes,
    pub(crate) key_blocks: BackwardBlocks,
    pub(crate) rows: BackwardRows,
    /// Of two key_blocks: one is being made while the other goes into the sums.
    pub(crate) operands: [ScoreOperands; 2],
    /// Of two blocks: one is being made while the other becomes operands.
    pub(crate) blocks: [Block; 2],
    /// Queries on their way, `[features][rows]`.
    pub(crate) transposed: Vec<Lanes<f32>>,
    /// Gradients of gathered keys and values, before they go to their places.
    pub(crate) gathered: [RowBuffer<f32>; 2],
    /// Whether a task is too large for the second level of the cache.
    pub(crate) far: bool,
}

/// Bytes of a task that stay in a second level of 2 MiB, beside the rows that pass by.
const L2_TASK_BYTES: usize = 1 << 20;

impl AmxBackwardScratch {
    /// For tiles of `groups` groups of rows, and tasks of up to `keys` keys.
    pub(crate) fn new(terms: usize, dims: Dims, groups: usize, keys: usize) -> Self {
        let sizes = BackwardSizes::new(terms, dims);
        // Three operands in bf16 terms of 2 bytes, and two sums of 4.
        let far = keys * dims.qk_dim.max(dims.v_dim) * (3 * 2 * terms + 2 * 4) > L2_TASK_BYTES;
        Self {
            sizes,
            key_blocks: BackwardBlocks::new(sizes, keys),
            rows: BackwardRows::new(sizes, groups),
            operands: [0, 1].map(|_| ScoreOperands::new(terms, groups)),
            blocks: [Block::new(), Block::new()],
            transposed: vec![Lanes([0.0; GROUP]); dims.qk_dim],
            gathered: [dims.qk_dim, dims.v_dim].map(|dim| RowBuffer::new(BLOCK_KEYS, dim)),
            far,
        }
    }

    /// Features of a query up to whole tiles, and `keys` up to where the last tile of a key block may end.
    pub(crate) fn padded(&self, keys: usize) -> (usize, usize) {
        (self.sizes.qk.tiles * ROWS, keys + ROWS)
    }

    /// For another task.
    pub(crate) fn clear(&mut self) {
        self.key_blocks.clear();
    }
}
