//! Operands of the backward pass, interleaved (see [`pack`](super::pack)).

#![expect(
    clippy::needless_range_loop,
    reason = "indices over constants keep the vectors in registers"
)]

use super::pack::{
    PackLeft, PackPairs, PackTransposed, load_first, only_finite, pack_pairs, write_interleaved,
};
use super::product::Operand;
use super::{CHUNKS, LANE_TILES, ROWS, TileRow, WIDTH, zeros};
use crate::description::problem::Dims;
use crate::kernel::key_blocks::KeyBlock;
use crate::kernel::micro::RowBuffer;
use crate::machine::simd::{Avx512, Lanes, Number, Simd, Task};
use crate::tensor::index::{BLOCK_KEYS, Keys};
use crate::tensor::source::AnyHead;
use std::arch::x86_64::__m512;

/// Features, in tiles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Features {
    /// Chunks of 32; one of zeros where there are no features.
    pub(crate) chunks: usize,
    /// Tiles of 16.
    pub(crate) tiles: usize,
}

impl Features {
    fn new(n: usize) -> Self {
        Self { chunks: n.div_ceil(WIDTH).max(1), tiles: n.div_ceil(ROWS) }
    }
}

/// Sizes of the operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackwardSizes {
    /// Parts that each number is split into.
    pub(crate) terms: usize,
    pub(crate) qk: Features,
    pub(crate) v: Features,
}

impl BackwardSizes {
    pub(crate) fn new(terms: usize, dims: Dims) -> Self {
        Self { terms, qk: Features::new(dims.qk_dim), v: Features::new(dims.v_dim) }
    }

    /// Rows of the three operands of a key block.
    fn block_rows(self) -> [usize; 3] {
        [self.qk.chunks * BLOCK_KEYS, self.v.chunks * BLOCK_KEYS, CHUNKS * self.qk.tiles * ROWS]
            .map(|n| n * self.terms)
    }
}

/// The operands of a key block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackwardBlock<'c> {
    /// `[keys][features]`
    pub(crate) keys: Operand<'c>,
    /// `[keys][features]`
    pub(crate) values: Operand<'c>,
    /// Keys as `[features][keys]`, interleaved.
    pub(crate) transposed: Operand<'c>,
    /// A bit for each key that holds a number that is not finite. Such numbers are 0 in `transposed`: a gradient of 0 must not
    /// meet them, so they are added one by one to the rows that see them.
    pub(crate) non_finite: u64,
}

/// The key_blocks of a task, packed when they are first met.
#[derive(Debug)]
pub(crate) struct BackwardBlocks {
    sizes: BackwardSizes,
    rows: Vec<TileRow>,
    /// Of those that are packed. The last place is for key_blocks that do not stand on the grid.
    non_finite: Vec<Option<u64>>,
}

impl BackwardBlocks {
    pub(crate) fn new(sizes: BackwardSizes, keys: usize) -> Self {
        let count = keys.div_ceil(BLOCK_KEYS) + 1;
        let size: usize = sizes.block_rows().iter().sum();
        Self { sizes, rows: zeros(count * size), non_finite: vec![None; count] }
    }

    pub(crate) fn clear(&mut self) {
        self.non_finite.fill(None);
    }

    /// Packs a key block, unless that is done; tells its place. `first` is the first key of the task.
    pub(crate) fn find(
        &mut self,
        s: Avx512,
        (k, v): (AnyHead<'_, f32>, AnyHead<'_, f32>),
        key_block: &KeyBlock,
        first: usize,
    ) -> usize {
        let spare = self.non_finite.len() - 1;
        let (i, keys, n) = match key_block.keys() {
            // All keys of the place on the grid, whatever is seen of them now.
            Keys::From(key) if key.is_multiple_of(BLOCK_KEYS) => {
                ((key - first) / BLOCK_KEYS, key_block.keys(), (k.len() - key).min(BLOCK_KEYS))
            }
            keys => (spare, keys, key_block.len),
        };
        if self.non_finite[i].is_none() || i == spare {
            let size: usize = self.sizes.block_rows().iter().sum();
            let (sizes, rows) = (self.sizes, &mut self.rows[i * size..][..size]);
            let lens = sizes.block_rows();
            let (to_keys, rest) = rows.split_at_mut(lens[0]);
            let (to_values, to_transposed) = rest.split_at_mut(lens[1]);
            // What stands beyond the keys may be anything.
            let padded = n;
            let (terms, chunks) = (sizes.terms, sizes.qk.chunks);
            f32::visit(k, PackLeft { s, terms, keys, n, padded, chunks, to: to_keys });
            let chunks = sizes.v.chunks;
            f32::visit(v, PackLeft { s, terms, keys, n, padded, chunks, to: to_values });
            let tiles = sizes.qk.tiles;
            let task = PackTransposed { s, terms, keys, n, tiles, to: to_transposed };
            self.non_finite[i] = Some(f32::visit(k, task));
        }
        i
    }

    /// Whether a place is that of key_blocks that do not stand on the grid, and lose it to the next one.
    pub(crate) fn is_spare(&self, i: usize) -> bool {
        i + 1 == self.non_finite.len()
    }

    /// Where the operands of a place lie, and how many bytes they are.
    pub(crate) fn bytes_at(&self, i: usize) -> (*const u8, usize) {
        let size = self.sizes.block_rows().iter().sum::<usize>();
        let first = self.rows.as_ptr().wrapping_add(i * size);
        (first.cast(), size * size_of::<TileRow>())
    }

    /// The operands of a key block that is packed.
    pub(crate) fn at(&self, i: usize) -> BackwardBlock<'_> {
        let sizes = self.sizes.block_rows();
        let size: usize = sizes.iter().sum();
        let (keys, rest) = self.rows[i * size..][..size].split_at(sizes[0]);
        let (values, transposed) = rest.split_at(sizes[1]);
        let BackwardSizes { qk, v, .. } = self.sizes;
        let operand = |data, chunks, tiles| Operand { data, chunks, tiles };
        BackwardBlock {
            keys: operand(keys, qk.chunks, BLOCK_KEYS / ROWS),
            values: operand(values, v.chunks, BLOCK_KEYS / ROWS),
            transposed: operand(transposed, CHUNKS, qk.tiles),
            non_finite: self.non_finite[i].unwrap_or(0),
        }
    }
}

/// The operands of a tile of rows.
#[derive(Debug)]
pub(crate) struct BackwardRows {
    sizes: BackwardSizes,
    /// Chunks of 32 rows.
    chunks: usize,
    /// Of each group.
    queries: Vec<Vec<TileRow>>,
    d_out: Vec<Vec<TileRow>>,
    /// Of all groups.
    query_rows: Vec<TileRow>,
    d_out_rows: Vec<TileRow>,
    /// A bit for each row of each group whose query, and whose gradient, holds a number that is not finite. Such numbers are 0
    /// where they would meet the weights and gradients of other keys.
    pub(crate) non_finite: Vec<[u64; 2]>,
}

impl BackwardRows {
    pub(crate) fn new(sizes: BackwardSizes, groups: usize) -> Self {
        let chunks = groups * CHUNKS;
        let pairs = |n: Features| zeros(sizes.terms * n.chunks * LANE_TILES * ROWS);
        let rows = |n: Features| zeros(sizes.terms * chunks * n.tiles * ROWS);
        let BackwardSizes { qk, v, .. } = sizes;
        Self {
            sizes,
            chunks,
            queries: (0..groups).map(|_| pairs(qk)).collect(),
            d_out: (0..groups).map(|_| pairs(v)).collect(),
            query_rows: rows(qk),
            d_out_rows: rows(v),
            non_finite: vec![[0; 2]; groups],
        }
    }

    /// Packs queries and gradients of group `g`, in lanes and as rows.
    pub(crate) fn fill(
        &mut self,
        s: Avx512,
        g: usize,
        [queries, d_out]: [&[Lanes<f32>]; 2],
        rows: [&RowBuffer<f32>; 2],
        count: usize,
    ) {
        let BackwardSizes { terms, qk, v } = self.sizes;
        let (to_q, to_d) = (&mut self.queries[g][..], &mut self.d_out[g][..]);
        let tiles = 0..LANE_TILES;
        pack_pairs(s, terms, PackPairs { lanes: queries, tiles, chunks: qk.chunks, to: to_q });
        let tiles = 0..LANE_TILES;
        pack_pairs(s, terms, PackPairs { lanes: d_out, tiles, chunks: v.chunks, to: to_d });
        let chunks = (g * CHUNKS, self.chunks);
        let pack = |rows, n: Features, to| {
            let tiles = n.tiles;
            with_terms!(terms, TERMS => s.call(PackRows::<TERMS> { s, rows, count, chunks, tiles, to }))
        };
        self.non_finite[g] =
            [pack(rows[0], qk, &mut self.query_rows), pack(rows[1], v, &mut self.d_out_rows)];
    }

    /// `[features][rows]`, of a group.
    pub(crate) fn queries(&self, g: usize) -> Operand<'_> {
        Operand { data: &self.queries[g], chunks: self.sizes.qk.chunks, tiles: LANE_TILES }
    }

    /// `[features][rows]`, of a group.
    pub(crate) fn d_out(&self, g: usize) -> Operand<'_> {
        Operand { data: &self.d_out[g], chunks: self.sizes.v.chunks, tiles: LANE_TILES }
    }

    /// `[rows][features]`, interleaved.
    pub(crate) fn query_rows(&self) -> Operand<'_> {
        Operand { data: &self.query_rows, chunks: self.chunks, tiles: self.sizes.qk.tiles }
    }

    /// `[rows][features]`, interleaved.
    pub(crate) fn d_out_rows(&self) -> Operand<'_> {
        Operand { data: &self.d_out_rows, chunks: self.chunks, tiles: self.sizes.v.tiles }
    }
}

/// Rows as a right operand, interleaved; returns a bit for each row that holds a number that is not finite.
struct PackRows<'t, const TERMS: usize> {
    s: Avx512,
    rows: &'t RowBuffer<f32>,
    count: usize,
    /// The first chunk to be written, and all that there are.
    chunks: (usize, usize),
    tiles: usize,
    to: &'t mut [TileRow],
}

impl<const TERMS: usize> Task<f32> for PackRows<'_, TERMS> {
    type Out = u64;
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) -> u64 {
        let Self { s, rows, count, chunks: (first, chunks), tiles, to } = self;
        let mut non_finite = 0;
        for pair in 0..count.div_ceil(WIDTH) * ROWS {
            let (chunk, i) = (pair / ROWS, pair % ROWS);
            for tile in 0..tiles {
                let mut halves = [s.splat(0.0); 2];
                for half in 0..2 {
                    let row = chunk * WIDTH + half * ROWS + i;
                    if row < count {
                        let (x, bits) = only_finite(s, s.load(&rows.row(row)[tile * ROWS..]));
                        non_finite |= u64::from(bits != 0) << row;
                        halves[half] = x;
                    }
                }
                let at = ((first + chunk) * tiles + tile) * ROWS + i;
                write_interleaved::<TERMS, true>(s, halves, (&mut *to, at, chunks * tiles * ROWS));
            }
        }
        non_finite
    }
}

/// A block of 32 keys and 32 rows of a group.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BlockAt {
    pub(crate) group: usize,
    /// Which 32 rows of the group.
    pub(crate) row_chunk: usize,
    /// Which 32 keys of the key block.
    pub(crate) key_chunk: usize,
}

/// The operands that a key block and a tile of rows make: weights and gradients of scores.
#[derive(Debug)]
pub(crate) struct ScoreOperands {
    /// Chunks of 32 rows.
    chunks: usize,
    weights: Vec<TileRow>,
    d_scores: Vec<TileRow>,
    /// Of each group.
    transposed: Vec<Vec<TileRow>>,
}

impl ScoreOperands {
    pub(crate) fn new(terms: usize, groups: usize) -> Self {
        let operand = |n: usize| zeros(terms * n * CHUNKS * LANE_TILES * ROWS);
        Self {
            chunks: groups * CHUNKS,
            weights: operand(groups),
            d_scores: operand(groups),
            transposed: (0..groups).map(|_| operand(1)).collect(),
        }
    }

    /// `[keys][rows]`, interleaved.
    pub(crate) fn weights(&self) -> Operand<'_> {
        Operand { data: &self.weights, chunks: self.chunks, tiles: BLOCK_KEYS / ROWS }
    }

    /// `[keys][rows]`, interleaved.
    pub(crate) fn d_scores(&self) -> Operand<'_> {
        Operand { data: &self.d_scores, chunks: self.chunks, tiles: BLOCK_KEYS / ROWS }
    }

    /// Gradients of scores as a right operand, interleaved, of a group.
    pub(crate) fn transposed(&self, g: usize) -> Operand<'_> {
        Operand { data: &self.transposed[g], chunks: CHUNKS, tiles: LANE_TILES }
    }

    /// Writes weights and gradients of keys `i` and `i + 16` of a block, `[key][vector]`.
    #[inline(always)]
    pub(crate) fn write<const TERMS: usize>(
        &mut self,
        s: Avx512,
        BlockAt { group, row_chunk, key_chunk }: BlockAt,
        i: usize,
        weights: [[__m512; 2]; 2],
        d_scores: [[__m512; 2]; 2],
    ) {
        let apart = self.chunks * (BLOCK_KEYS / ROWS) * ROWS;
        for half in 0..2 {
            let chunk = group * CHUNKS + row_chunk;
            let at = (chunk * (BLOCK_KEYS / ROWS) + 2 * key_chunk + half) * ROWS + i;
            write_interleaved::<TERMS, false>(s, weights[half], (&mut self.weights, at, apart));
            write_interleaved::<TERMS, false>(s, d_scores[half], (&mut self.d_scores, at, apart));
        }
        for vector in 0..2 {
            let at = (key_chunk * LANE_TILES + 2 * row_chunk + vector) * ROWS + i;
            let pair = [d_scores[0][vector], d_scores[1][vector]];
            let to = (&mut self.transposed[group][..], at, CHUNKS * LANE_TILES * ROWS);
            write_interleaved::<TERMS, false>(s, pair, to);
        }
    }
}

/// One number of an operand `[keys][rows]` that was packed by [`ScoreOperands::write`].
pub(crate) fn read(terms: usize, from: Operand<'_>, key: usize, row: usize) -> f32 {
    let term = |term: usize| {
        let tile = (term * from.chunks + row / WIDTH) * from.tiles + key / ROWS;
        let at = row % ROWS * 2 + row % WIDTH / ROWS;
        f32::from_bits(u32::from(from.data[tile * ROWS + key % ROWS].0[at]) << 16)
    };
    (0..terms).map(term).sum()
}

/// Packs weights and gradients that are there as numbers, `[keys][rows]`; 0 beyond them.
pub(crate) struct PackScores<'t> {
    pub(crate) weights: &'t [Lanes<f32>],
    pub(crate) d_scores: &'t [Lanes<f32>],
    pub(crate) group: usize,
    pub(crate) count: usize,
    pub(crate) to: &'t mut ScoreOperands,
}

/// [`PackScores`] in so many bf16 terms.
pub(crate) struct SplitScores<'t, const TERMS: usize>(pub(crate) Avx512, pub(crate) PackScores<'t>);

impl<const TERMS: usize> Task<f32> for SplitScores<'_, TERMS> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        let Self(s, PackScores { weights, d_scores, group, count, to }) = self;
        let n = weights.len();
        for pair in 0..n.div_ceil(WIDTH) * ROWS {
            let (key_chunk, i) = (pair / ROWS, pair % ROWS);
            for row_chunk in 0..count.div_ceil(WIDTH) {
                let zero = [[s.splat(0.0); 2]; 2];
                let (mut a, mut d) = (zero, zero);
                for half in 0..2 {
                    let key = key_chunk * WIDTH + half * ROWS + i;
                    for vector in 0..2 {
                        let lane = row_chunk * WIDTH + vector * ROWS;
                        if key < n {
                            // Biases and rules bring any NaN.
                            let (x, y) = (&weights[key], &d_scores[key]);
                            a[half][vector] = s.plain_nan(load_first(s, x, lane, count));
                            d[half][vector] = s.plain_nan(load_first(s, y, lane, count));
                        }
                    }
                }
                to.write::<TERMS>(s, BlockAt { group, row_chunk, key_chunk }, i, a, d);
            }
        }
    }
}
