//! Operands into tiles.

use super::product::Operand;
use super::{CHUNKS, ROWS, Sizes, TileRow, WIDTH, zeros};
use crate::cells::{CELL, Cell};
use crate::element::Element;
use crate::lanes::turn;
use crate::mask::RowTile;
use crate::run::run;
use crate::simd::{Avx512, GROUP, Lanes, Simd, Task};
use crate::source::Head;
use crate::view::{Heads, ViewMut};
use crate::walk::Call;
use std::arch::x86_64::__m512;
use std::ops::Range;

/// A number as a sum of parts of 8 digits each; the last is rounded, unless three parts hold it all.
///
/// Of two parts the first is rounded too: the second is then half as large and of either sign, so that the product of second
/// parts, which is left out, is a quarter and does not add up.
#[inline(always)]
pub(super) fn split<const PARTS: usize>(s: Avx512, mut x: __m512) -> [__m512; PARTS] {
    let mut parts = [x; PARTS];
    for part in &mut parts[..PARTS - 1] {
        *part = s.upper(if PARTS == 2 { s.nearest(x) } else { x });
        x = s.sub(x, *part);
    }
    parts[PARTS - 1] = if PARTS == 3 { x } else { s.nearest(x) };
    parts
}

/// 0 where a number is not finite, and a bit there.
#[inline(always)]
pub(super) fn only_finite(s: Avx512, x: __m512) -> (__m512, u16) {
    let size = s.max(x, s.sub(s.splat(0.0), x));
    // NaN is not less either.
    let finite = s.less(size, s.splat(f32::INFINITY));
    (s.select(finite, x, s.splat(0.0)), !finite)
}

/// A vector of `lanes`, from `first` on; those from `count` on may hold anything, and count as 0.
#[inline(always)]
pub(super) fn load_first(s: Avx512, lanes: &Lanes<f32>, first: usize, count: usize) -> __m512 {
    let here = match count.saturating_sub(first) {
        0 => 0,
        n => u16::MAX >> (ROWS - n.min(ROWS)),
    };
    s.select(here, s.load(&lanes.0[first..]), s.splat(0.0))
}

/// Keys and values of one cell.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedCell<'c> {
    pub(super) keys: Operand<'c>,
    pub(super) values: Operand<'c>,
    /// A bit for each key whose value holds a number that is not finite. Such numbers are 0 in `values`: a weight of 0 must
    /// not meet them, so they are added one by one to the rows that see them.
    pub(super) odd: u64,
}

/// A cell in memory of its own.
#[derive(Debug)]
pub(super) struct Packed {
    sizes: Sizes,
    rows: Vec<TileRow>,
    odd: u64,
}

impl Packed {
    pub(super) fn new(sizes: Sizes) -> Self {
        let rows = zeros(sizes.key_rows() + sizes.value_rows());
        Self { sizes, rows, odd: 0 }
    }

    /// No memory at all.
    pub(super) fn none(sizes: Sizes) -> Self {
        Self { sizes, rows: Vec::new(), odd: 0 }
    }

    pub(super) fn get(&self) -> PackedCell<'_> {
        cell(self.sizes, &self.rows, self.odd)
    }

    #[inline(always)]
    pub(super) fn fill<E: Element<Num = f32>, const PARTS: usize>(
        &mut self,
        s: Avx512,
        (k, v): (Head<'_, E>, Head<'_, E>),
        at: &Cell,
        turned: &mut [Lanes<f32>],
    ) {
        let rows = &mut self.rows[..];
        self.odd = s.call(PackCell::<E, PARTS> { s, sizes: self.sizes, k, v, at, turned, rows });
    }
}

fn cell(sizes: Sizes, rows: &[TileRow], odd: u64) -> PackedCell<'_> {
    let (keys, values) = rows.split_at(sizes.key_rows());
    PackedCell {
        keys: Operand { data: keys, chunks: sizes.chunks, tiles: CELL / ROWS },
        values: Operand { data: values, chunks: CHUNKS, tiles: sizes.features },
        odd,
    }
}

/// Packs keys and values of a cell; returns [`PackedCell::odd`].
struct PackCell<'t, E: Element, const PARTS: usize> {
    s: Avx512,
    sizes: Sizes,
    k: Head<'t, E>,
    v: Head<'t, E>,
    at: &'t Cell,
    turned: &'t mut [Lanes<f32>],
    rows: &'t mut [TileRow],
}

impl<E: Element<Num = f32>, const PARTS: usize> Task<f32> for PackCell<'_, E, PARTS> {
    type Out = u64;
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) -> u64 {
        let Self { s, sizes, k, v, at, turned, rows } = self;
        let (keys, values) = rows.split_at_mut(sizes.key_rows());
        for i in 0..CELL {
            let row = if i < at.len { k.row(at.keys().get(i)) } else { &[] };
            pack_row::<E, PARTS>(s, row, sizes.chunks, i, keys);
        }
        turn(s, |i| v.row(at.keys().get(i)), at.len, 1.0, turned);
        let mut odd = 0;
        for (d, lanes) in turned.iter().enumerate() {
            for chunk in 0..CHUNKS {
                for half in 0..2 {
                    let first = chunk * WIDTH + half * 16;
                    let (x, bits) = only_finite(s, load_first(s, lanes, first, at.len));
                    odd |= u64::from(bits) << first;
                    for (part, x) in split::<PARTS>(s, x).into_iter().enumerate() {
                        let tile = (part * CHUNKS + chunk) * sizes.features + d / ROWS;
                        s.write_upper(x, &mut values[tile * ROWS + d % ROWS].0[half * 16..]);
                    }
                }
            }
        }
        odd
    }
}

/// Row `i` of a left operand with rows as they are, padded with 0.
#[inline(always)]
pub(super) fn pack_row<E: Element<Num = f32>, const PARTS: usize>(
    s: Avx512,
    row: &[E],
    chunks: usize,
    i: usize,
    to: &mut [TileRow],
) {
    for chunk in 0..chunks {
        for half in 0..2 {
            let first = chunk * WIDTH + half * 16;
            let x = if first + 16 <= row.len() {
                E::load(s, &row[first..])
            } else {
                let mut lanes = [0.0; 16];
                row.iter().skip(first).zip(&mut lanes).for_each(|(x, lane)| *lane = x.widen());
                s.load(&lanes)
            };
            for (part, x) in split::<PARTS>(s, x).into_iter().enumerate() {
                let tile = (part * chunks + chunk) * (CELL / ROWS) + i / ROWS;
                s.write_upper(x, &mut to[tile * ROWS + i % ROWS].0[half * 16..]);
            }
        }
    }
}

/// Lanes `[inner][lanes]` as a right operand, in pairs of `inner`; padded with 0 up to whole chunks.
pub(super) struct PackPairs<'t, const PARTS: usize> {
    pub(super) s: Avx512,
    pub(super) lanes: &'t [Lanes<f32>],
    /// Which tiles of lanes.
    pub(super) tiles: Range<usize>,
    pub(super) chunks: usize,
    pub(super) to: &'t mut [TileRow],
}

impl<const PARTS: usize> Task<f32> for PackPairs<'_, PARTS> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        let Self { s, lanes, tiles, chunks, to } = self;
        for pair in 0..chunks * ROWS {
            for tile in tiles.clone() {
                let load = |i: usize| {
                    let row = lanes.get(i);
                    row.map_or(s.splat(0.0), |row| s.load(&row.0[tile * 16..]))
                };
                let first = split::<PARTS>(s, load(2 * pair));
                let second = split::<PARTS>(s, load(2 * pair + 1));
                for part in 0..PARTS {
                    let at = (part * chunks + pair / ROWS) * tiles.len() + tile - tiles.start;
                    s.write_pairs(first[part], second[part], &mut to[at * ROWS + pair % ROWS].0);
                }
            }
        }
    }
}

/// Keys and values of all heads of some items, packed once for all the rows that meet them.
#[derive(Debug)]
pub struct Prepared {
    sizes: Sizes,
    /// Cells of one head of all items before each, and of all in the end.
    before: Vec<usize>,
    heads: usize,
    rows: Vec<TileRow>,
    odd: Vec<u64>,
}

impl Prepared {
    /// Packs `k` and `v` of the given items, which ascend.
    pub(crate) fn new<E: Element<Num = f32>, const PARTS: usize>(
        s: Avx512,
        sizes: Sizes,
        (call, items): (&Call<'_, E>, &[usize]),
        threads: usize,
    ) -> Option<Self> {
        let dims = call.problem.dims();
        let mut before = vec![0; dims.batch + 1];
        items.iter().for_each(|b| before[b + 1] = call.problem.k_len(*b).div_ceil(CELL));
        (0..dims.batch).for_each(|b| before[b + 1] += before[b]);
        let heads = dims.heads.kv;
        let (count, size) = (before[dims.batch] * heads, sizes.key_rows() + sizes.value_rows());
        let mut rows = Vec::new();
        rows.try_reserve_exact(count * size).ok()?;
        rows.resize(count * size, TileRow([0; WIDTH]));
        let mut odd = vec![0; count];
        let to = ViewMut::bhsd(&mut rows, [count, 1, 1, size]).ok()?;
        let to_odd = ViewMut::bhsd(&mut odd, [count, 1, 1, 1]).ok()?;
        run(
            threads,
            count,
            || (Cell::new(), vec![Lanes([0.0; GROUP]); dims.v_dim]),
            |(at, turned), i| {
                let b = before.partition_point(|cells| cells * heads <= i) - 1;
                let (cells, own) = (before[b + 1] - before[b], i - before[b] * heads);
                let (head, first) = (own / cells, own % cells * CELL);
                let (k, v) = (call.k.head(b, head), call.v.head(b, head));
                at.set(first, k.len().saturating_sub(first).min(CELL));
                let one = RowTile { first: 0, step: 1, count: 1 };
                // SAFETY: each cell belongs to one task, and all of it was written before.
                let (mut to, mut to_odd) =
                    unsafe { (to.tile(i, Heads::one(0), one), to_odd.tile(i, Heads::one(0), one)) };
                let rows = to.update(0, 0);
                let task = PackCell::<E, PARTS> { s, sizes, k, v, at, turned, rows };
                to_odd.update(0, 0)[0] = s.call(task);
            },
        );
        Some(Self { sizes, before, heads, rows, odd })
    }

    /// The cell that begins at key `first` of a head.
    #[inline(always)]
    pub(super) fn cell(&self, (batch, head): (usize, usize), first: usize) -> PackedCell<'_> {
        let (before, to) = (self.before[batch], self.before[batch + 1]);
        let i = before * self.heads + head * (to - before) + first / CELL;
        let size = self.sizes.key_rows() + self.sizes.value_rows();
        cell(self.sizes, &self.rows[i * size..][..size], self.odd[i])
    }
}
