//! Operands into tiles of bf16.
//!
//! Four cases are two ways to read and two to write. If the depth lies in one piece, a vector holds pairs of one item; else two rows are
//! woven, and it holds one pair of 16 items. Tiles of `a` want the first, those of `b` the second: what differs is turned.

use super::super::Matrix;
use super::{Amx, PANEL, TILE};
use rayon::prelude::*;
use std::arch::x86_64::{
    __m512, __m512i, _mm512_castps_si512, _mm512_cvtne2ps_pbh, _mm512_loadu_ps,
    _mm512_maskz_loadu_ps, _mm512_permutexvar_epi16, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_shuffle_i32x4, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32,
    _mm512_unpacklo_epi64,
};
use std::mem::{MaybeUninit, transmute};

/// Numbers of the depth in a tile.
pub(super) const CHUNK: usize = 32;
/// Chunks of the depth in a block, at most: what one task packs.
const BLOCK: usize = 16;
/// Blocks that are summed before sums have to wait in memory: a panel of so many takes 128 KiB.
pub(super) const STEP: usize = 4;
/// Panels that a task packs at once, so that it reads a KiB of a row at a time.
const PACKED: usize = 8;
/// How the depth is cut: blocks of equally many chunks, the last filled up by zeros.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    pub(super) blocks: usize,
    /// Of each block.
    pub(super) chunks: usize,
}

impl Cut {
    pub(super) fn new(depth: usize) -> Self {
        let chunks = depth.div_ceil(CHUNK);
        let blocks = chunks.div_ceil(BLOCK);
        Self { blocks, chunks: chunks.div_ceil(blocks) }
    }

    /// Lines of a panel in a block.
    pub(super) fn lines(self) -> usize {
        self.chunks * PANEL
    }

    /// Lines of a panel in a step.
    pub(super) fn step_lines(self) -> usize {
        self.blocks.min(STEP) * self.lines()
    }
}

/// How a tile holds its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Order {
    /// A line for each row of `a`.
    Items,
    /// A line for each pair of depths.
    Pairs,
}

/// An operand as tiles: blocks of the depth, in each all panels, in each all chunks, of two tiles each.
#[derive(Debug)]
pub(super) struct PackedMatrix {
    lines: Vec<__m512i>,
    panels: usize,
    pub(super) cut: Cut,
}

impl PackedMatrix {
    /// `from [items, depth]`: rows of `a`, or columns of `b`.
    pub(super) fn new(amx: Amx, from: Matrix<'_>, cut: Cut, order: Order) -> Self {
        let panels = from.sizes[0].div_ceil(PANEL);
        let all = cut.blocks * panels * cut.lines();
        let mut lines = Vec::with_capacity(all);
        let room = &mut lines.spare_capacity_mut()[..all];
        let by_block = room.par_chunks_mut((panels * cut.lines()).max(1)).enumerate();
        by_block.for_each(|(block, to)| {
            let by_panels = to.par_chunks_mut(PACKED * cut.lines()).enumerate();
            by_panels.for_each(|(i, to)| {
                let first = [i * PACKED * PANEL, block * cut.chunks * CHUNK];
                let Amx(()) = amx;
                // SAFETY: `amx` proves the instructions (`detect`).
                unsafe { pack(from, first, order, cut.chunks, to) };
            });
        });
        // SAFETY: `with_capacity` made room, `par_chunks_mut` leaves out nothing of it, and `pack` writes all that it gets.
        unsafe { lines.set_len(all) };
        Self { lines, panels, cut }
    }

    /// A panel in a block.
    pub(super) fn panel(&self, block: usize, panel: usize) -> &[__m512i] {
        let size = self.cut.lines();
        &self.lines[(block * self.panels + panel) * size..][..size]
    }
}

/// Packs as many panels of `chunks` chunks as there is room for, from the item and the depth `first` on. What lies outside of the
/// matrix is 0.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(super) fn pack(
    from: Matrix<'_>,
    first: [usize; 2],
    order: Order,
    chunks: usize,
    to: &mut [MaybeUninit<__m512i>],
) {
    let (in_one_piece, halves) = (from.strides[1] == 1, to.len() / (chunks * TILE));
    assert!(in_one_piece || from.strides[0] == 1, "rows or columns must lie in one piece");
    // In the order in which numbers lie.
    let (outer, inner) = if in_one_piece { (halves, chunks) } else { (chunks, halves) };
    for i in 0..outer {
        for j in 0..inner {
            let (half, chunk) = if in_one_piece { (i, j) } else { (j, i) };
            let at = [first[0] + half * TILE, first[1] + chunk * CHUNK];
            let tile = if in_one_piece { by_items(from, at) } else { by_pairs(from, at) };
            let tile = if in_one_piece == (order == Order::Items) { tile } else { turn(tile) };
            let place = (half / 2 * chunks + chunk) * PANEL + half % 2 * TILE;
            for (to, line) in to[place..place + TILE].iter_mut().zip(tile) {
                to.write(line);
            }
        }
    }
}

/// 16 items with 32 of the depth, which lies in one piece: a line for each item.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn by_items(from: Matrix<'_>, [item, depth]: [usize; 2]) -> [__m512i; TILE] {
    let mut lines = [_mm512_setzero_si512(); TILE];
    let [items, depths] = left(from, [item, depth]);
    for (i, line) in lines.iter_mut().enumerate().take(items) {
        let row = &from.data[(item + i) * from.strides[0] + depth..][..depths];
        let (low, high) = row.split_at(depths.min(TILE));
        *line = rounded(load(low), load(high));
    }
    lines
}

/// 16 items, which lie in one piece, with 32 of the depth: a line for each pair of depths.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn by_pairs(from: Matrix<'_>, [item, depth]: [usize; 2]) -> [__m512i; TILE] {
    /// Numbers of the first half and of the second in turns.
    static WEAVE: [u32; TILE] = {
        let (mut places, mut i) = ([0; TILE], 0);
        while i < 16 {
            places[i as usize] = i | (i + 16) << 16;
            i += 1;
        }
        places
    };
    // SAFETY: `WEAVE` has 64 bytes.
    let weave = _mm512_castps_si512(unsafe { _mm512_loadu_ps(WEAVE.as_ptr().cast()) });
    let mut lines = [_mm512_setzero_si512(); TILE];
    let [items, depths] = left(from, [item, depth]);
    for (pair, line) in lines.iter_mut().enumerate().take(depths.div_ceil(2)) {
        let row = |i: usize| &from.data[(depth + i) * from.strides[1] + item..][..items];
        let even = load(row(2 * pair));
        let odd = if 2 * pair + 1 < depths { load(row(2 * pair + 1)) } else { _mm512_setzero_ps() };
        *line = _mm512_permutexvar_epi16(weave, rounded(even, odd));
    }
    lines
}

/// Items and depths of a tile that the matrix has; no item if there is no depth, and the other way round.
#[inline(always)]
fn left(from: Matrix<'_>, [item, depth]: [usize; 2]) -> [usize; 2] {
    let items = from.sizes[0].saturating_sub(item).min(TILE);
    let depths = from.sizes[1].saturating_sub(depth).min(CHUNK);
    if items == 0 || depths == 0 { [0, 0] } else { [items, depths] }
}

/// Up to 16 numbers; the others are 0.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn load(from: &[f32]) -> __m512 {
    #[expect(clippy::cast_possible_truncation, reason = "a bit for each of 0 to 16 numbers")]
    let here = ((1u32 << from.len().min(TILE)) - 1) as u16;
    // SAFETY: only lanes below `from.len()` are read, as `here` has no other bits.
    unsafe { _mm512_maskz_loadu_ps(here, from.as_ptr()) }
}

/// As bf16, to the nearest, ties to even, denormal ones to 0: those of `low` first.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn rounded(low: __m512, high: __m512) -> __m512i {
    // SAFETY: both are vectors of 512 bits, and all bits are valid in them; `transmute` checks the sizes.
    unsafe { transmute(_mm512_cvtne2ps_pbh(high, low)) }
}

/// Lines as columns, of 16 x 16 pairs.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
fn turn(r: [__m512i; TILE]) -> [__m512i; TILE] {
    let (mut s, mut t) = (r, r);
    for i in [0, 2, 4, 6, 8, 10, 12, 14] {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    // Quarter q of t[i + c] is column 4 q + c of lines i to i + 3.
    for i in [0, 4, 8, 12] {
        t[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
        t[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
        t[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
        t[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
    // Even quarters of two vectors, and the odd ones.
    for i in [0, 1, 2, 3, 8, 9, 10, 11] {
        s[i] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0b10_00_10_00);
        s[i + 4] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0b11_01_11_01);
    }
    for i in 0..8 {
        t[i] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0b10_00_10_00);
        t[i + 8] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0b11_01_11_01);
    }
    t
}
