//! Operands into tiles.
//!
//! A sum over features, keys or rows may run in any order inside a chunk of 32, as long as both operands agree. Here it is
//! interleaved: 0, 16, 1, 17, ..., so that two vectors of neighbours become a row of a tile by one shift and one blend. What must be
//! transposed is transposed after that, two numbers at a time.

use super::product::Operand;
use super::{CHUNKS, LANE_TILES, ROWS, Sizes, TileRow, WIDTH, split_into, zeros};
use crate::kernel::block_loop::Call;
use crate::kernel::key_blocks::KeyBlock;
use crate::machine::run::run;
use crate::machine::simd::{
    Amx, AmxKernel, Avx512, Element, GROUP, Lanes, Number, Simd, Task, Visitor,
};
use crate::tensor::index::{BLOCK_KEYS, Keys, RowMask, RowTile};
use crate::tensor::source::{AnyHead, Head, Heads};
use crate::tensor::view::{TileHeads, ViewMut};
use std::arch::x86_64::__m512;
use std::ops::Range;

/// A number as a sum of bf16 terms of 8 digits each; the last is rounded, unless three bf16 terms hold it all.
///
/// Of two bf16 terms the first is rounded too: the second is then half as large and of either sign, so that the product of second
/// bf16 terms, which is left out, is a quarter and does not add up.
///
/// `ANY` for numbers of the user: of any size, and NaN with any payload ([`Avx512::nearest_of_any`]).
#[inline(always)]
pub(crate) fn split<const TERMS: usize, const ANY: bool>(
    s: Avx512,
    mut x: __m512,
) -> [__m512; TERMS] {
    if ANY && TERMS > 1 {
        x = s.plain_nan(x);
    }
    let mut terms = [x; TERMS];
    for term in &mut terms[..TERMS - 1] {
        *term = s.upper(if TERMS == 2 { nearest::<ANY>(s, x) } else { x });
        x = s.sub(x, *term);
    }
    terms[TERMS - 1] = if TERMS == 3 { x } else { nearest::<ANY>(s, x) };
    terms
}

/// Numbers as they are stored: one bf16 term holds a `bf16` as it is, any NaN too.
#[inline(always)]
fn split_stored<const TERMS: usize>(s: Avx512, x: __m512) -> [__m512; TERMS] {
    if TERMS == 1 { [x; TERMS] } else { split::<TERMS, true>(s, x) }
}

#[inline(always)]
fn nearest<const ANY: bool>(s: Avx512, x: __m512) -> __m512 {
    if ANY { s.nearest_of_any(x) } else { s.nearest(x) }
}

/// 0 where a number is not finite, and a bit there.
#[inline(always)]
pub(crate) fn only_finite(s: Avx512, x: __m512) -> (__m512, u16) {
    let size = s.max(x, s.sub(s.splat(0.0), x));
    // NaN is not less either.
    let finite = s.less(size, s.splat(f32::INFINITY));
    (s.select(finite, x, s.splat(0.0)), !finite)
}

/// A vector of `lanes`, from `first` on; those from `count` on may hold anything, and count as 0.
#[inline(always)]
pub(crate) fn load_first(s: Avx512, lanes: &Lanes<f32>, first: usize, count: usize) -> __m512 {
    let here = match count.saturating_sub(first) {
        0 => 0,
        n => u16::MAX >> (ROWS - n.min(ROWS)),
    };
    s.select(here, s.load(&lanes.0[first..]), s.splat(0.0))
}

/// Keys and values of one key block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedBlock<'c> {
    pub(crate) keys: Operand<'c>,
    pub(crate) values: Operand<'c>,
    /// A bit for each key whose value holds a number that is not finite. Such numbers are 0 in `values`: a weight of 0 must
    /// not meet them, so they are added one by one to the rows that see them.
    pub(crate) non_finite: u64,
}

/// A key block in memory of its own.
#[derive(Debug)]
pub(crate) struct OwnBlock {
    sizes: Sizes,
    rows: Vec<TileRow>,
    non_finite: u64,
}

impl OwnBlock {
    pub(crate) fn new(sizes: Sizes) -> Self {
        let rows = zeros(sizes.key_rows() + sizes.value_rows());
        Self { sizes, rows, non_finite: 0 }
    }

    /// No memory at all.
    pub(crate) fn none(sizes: Sizes) -> Self {
        Self { sizes, rows: Vec::new(), non_finite: 0 }
    }

    pub(crate) fn get(&self) -> PackedBlock<'_> {
        key_block(self.sizes, &self.rows, self.non_finite)
    }

    /// The key block that begins at key `first` of a head, if all blocks are packed; else this one.
    #[inline(always)]
    pub(crate) fn or<'c>(
        &'c self,
        packed_kv: Option<&'c PackedKv>,
        head: (usize, usize),
        first: usize,
    ) -> PackedBlock<'c> {
        match packed_kv {
            Some(packed_kv) => packed_kv.key_block(head, first),
            None => self.get(),
        }
    }

    pub(crate) fn fill(
        &mut self,
        s: Avx512,
        heads: (AnyHead<'_, f32>, AnyHead<'_, f32>),
        at: &KeyBlock,
    ) {
        self.non_finite = pack_block(s, self.sizes, heads, at, &mut self.rows);
    }
}

fn key_block(sizes: Sizes, rows: &[TileRow], non_finite: u64) -> PackedBlock<'_> {
    let (keys, values) = rows.split_at(sizes.key_rows());
    PackedBlock {
        keys: Operand { data: keys, chunks: sizes.chunks, tiles: BLOCK_KEYS / ROWS },
        values: Operand { data: values, chunks: CHUNKS, tiles: sizes.features },
        non_finite,
    }
}

/// Packs keys and values of a key block; returns [`PackedBlock::non_finite`].
fn pack_block(
    s: Avx512,
    sizes: Sizes,
    (k, v): (AnyHead<'_, f32>, AnyHead<'_, f32>),
    at: &KeyBlock,
    rows: &mut [TileRow],
) -> u64 {
    let (keys, values) = rows.split_at_mut(sizes.key_rows());
    let (block, n) = (at.keys(), at.len);
    let padded = BLOCK_KEYS;
    let (terms, chunks, tiles) = (sizes.terms, sizes.chunks, sizes.features);
    f32::visit(k, PackLeft { s, terms, keys: block, n, padded, chunks, to: keys });
    f32::visit(v, PackTransposed { s, terms, keys: block, n, tiles, to: values })
}

/// Work on a head whose type of element is known, as a function of its own.
struct OfHead<'c, E, W, const TERMS: usize>(Head<'c, E>, W);

/// `n` rows of a head as a left operand, with rows of 0 up to `padded`: see [`pack_row`].
pub(crate) struct PackLeft<'t> {
    pub(crate) s: Avx512,
    pub(crate) terms: usize,
    pub(crate) keys: Keys<'t>,
    pub(crate) n: usize,
    pub(crate) padded: usize,
    pub(crate) chunks: usize,
    pub(crate) to: &'t mut [TileRow],
}

impl<'c> Visitor<Heads<'c>, f32> for PackLeft<'_> {
    type Out = ();
    fn visit<E: Element<Num = f32>>(self, head: Head<'c, E>) {
        with_terms_of!(E, self.terms, TERMS => self.s.call(OfHead::<E, Self, TERMS>(head, self)));
    }
}

impl<E: Element<Num = f32>, const TERMS: usize> Task<f32> for OfHead<'_, E, PackLeft<'_>, TERMS> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        let Self(head, PackLeft { s, keys, n, padded, chunks, to, .. }) = self;
        for i in 0..padded {
            let row = if i < n { head.row(keys.get(i)) } else { &[] };
            pack_row::<E, TERMS>(s, row, chunks, i, to);
        }
    }
}

/// Rows of a head as a transposed left operand: see [`pack_transposed`].
pub(crate) struct PackTransposed<'t> {
    pub(crate) s: Avx512,
    pub(crate) terms: usize,
    pub(crate) keys: Keys<'t>,
    pub(crate) n: usize,
    pub(crate) tiles: usize,
    pub(crate) to: &'t mut [TileRow],
}

impl<'c> Visitor<Heads<'c>, f32> for PackTransposed<'_> {
    type Out = u64;
    fn visit<E: Element<Num = f32>>(self, head: Head<'c, E>) -> u64 {
        with_terms_of!(E, self.terms, TERMS => self.s.call(OfHead::<E, Self, TERMS>(head, self)))
    }
}

impl<E: Element<Num = f32>, const TERMS: usize> Task<f32>
    for OfHead<'_, E, PackTransposed<'_>, TERMS>
{
    type Out = u64;
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) -> u64 {
        let Self(head, PackTransposed { s, keys, n, tiles, to, .. }) = self;
        pack_transposed::<E, TERMS>(s, &rows_of(n, |i| head.row(keys.get(i))), tiles, to)
    }
}

/// The rows of a key block or of a group; nothing where there is none.
#[inline(always)]
pub(crate) fn rows_of<'r, E>(count: usize, row: impl Fn(usize) -> &'r [E]) -> [&'r [E]; GROUP] {
    let mut rows: [&[E]; GROUP] = [&[]; GROUP];
    for (i, to) in rows.iter_mut().enumerate().take(count) {
        *to = row(i);
    }
    rows
}

/// 16 rows of pairs as 16 columns of a tile.
#[inline(always)]
fn write_transposed(s: Avx512, block: &mut [__m512; ROWS], to: &mut [TileRow]) {
    s.transpose(block);
    for (to, row) in to[..ROWS].iter_mut().zip(block) {
        s.write_tile_row(*row, &mut to.0);
    }
}

/// 16 numbers of a row; 0 beyond its end.
#[inline(always)]
fn load_row<E: Element<Num = f32>>(s: Avx512, row: &[E], first: usize) -> __m512 {
    if first + 16 <= row.len() {
        return E::load(s, &row[first..]);
    }
    let mut lanes = [0.0; 16];
    row.iter().skip(first).zip(&mut lanes).for_each(|(x, lane)| *lane = x.widen());
    s.load(&lanes)
}

/// Row `i` of a left operand, interleaved, padded with 0.
#[inline(always)]
pub(crate) fn pack_row<E: Element<Num = f32>, const TERMS: usize>(
    s: Avx512,
    row: &[E],
    chunks: usize,
    i: usize,
    to: &mut [TileRow],
) {
    for chunk in 0..chunks {
        let halves = [0, ROWS].map(|half| chunk * WIDTH + half);
        let halves = [load_row(s, row, halves[0]), load_row(s, row, halves[1])];
        let at = (chunk * (BLOCK_KEYS / ROWS) + i / ROWS) * ROWS + i % ROWS;
        let terms = [split_stored::<TERMS>(s, halves[0]), split_stored::<TERMS>(s, halves[1])];
        write_terms(s, terms, (&mut *to, at, chunks * BLOCK_KEYS));
    }
}

/// Writes two vectors as one row of a tile from `at` on, the bf16 terms `apart` from each other.
#[inline(always)]
pub(crate) fn write_interleaved<const TERMS: usize, const ANY: bool>(
    s: Avx512,
    [first, second]: [__m512; 2],
    to: (&mut [TileRow], usize, usize),
) {
    let terms = [split::<TERMS, ANY>(s, first), split::<TERMS, ANY>(s, second)];
    write_terms(s, terms, to);
}

#[inline(always)]
fn write_terms<const TERMS: usize>(
    s: Avx512,
    [first, second]: [[__m512; TERMS]; 2],
    (to, at, apart): (&mut [TileRow], usize, usize),
) {
    for term in 0..TERMS {
        s.write_pairs(first[term], second[term], &mut to[at + term * apart].0);
    }
}

/// The rows of a key block as a left operand `[features][keys]`, interleaved, padded with 0. Returns a bit for each key that holds a
/// number that is not finite; such numbers are 0 in the operand.
#[inline(always)]
pub(crate) fn pack_transposed<E: Element<Num = f32>, const TERMS: usize>(
    s: Avx512,
    rows: &[&[E]; GROUP],
    tiles: usize,
    to: &mut [TileRow],
) -> u64 {
    let mut non_finite = 0;
    for chunk in 0..CHUNKS {
        let (first, second) = rows[chunk * WIDTH..][..WIDTH].split_at(ROWS);
        for tile in 0..tiles {
            let mut blocks = [s.block(); TERMS];
            for i in 0..ROWS {
                let mut halves = [s.splat(0.0); 2];
                for (half, rows) in [first, second].into_iter().enumerate() {
                    if !rows[i].is_empty() {
                        let (x, bits) = only_finite(s, load_row(s, rows[i], tile * ROWS));
                        non_finite |= u64::from(bits != 0) << (chunk * WIDTH + half * ROWS + i);
                        halves[half] = x;
                    }
                }
                let terms =
                    [split_stored::<TERMS>(s, halves[0]), split_stored::<TERMS>(s, halves[1])];
                for (term, block) in blocks.iter_mut().enumerate() {
                    block[i] = s.pairs(terms[0][term], terms[1][term]);
                }
            }
            for (term, block) in blocks.iter_mut().enumerate() {
                let at = ((term * CHUNKS + chunk) * tiles + tile) * ROWS;
                write_transposed(s, block, &mut to[at..]);
            }
        }
    }
    non_finite
}

/// Queries of any type as a right operand: see [`PackQueries`].
pub(crate) struct PackQueryHead<'t> {
    pub(crate) s: Avx512,
    pub(crate) terms: usize,
    pub(crate) rows: RowTile,
    pub(crate) chunks: usize,
    pub(crate) to: &'t mut [TileRow],
}

impl<'c> Visitor<Heads<'c>, f32> for PackQueryHead<'_> {
    type Out = ();
    fn visit<E: Element<Num = f32>>(self, head: Head<'c, E>) {
        let Self { s, terms, rows, chunks, to } = self;
        let rows = &rows_of(rows.count, |i| head.row(rows.row(i)));
        with_terms_of!(E, terms, TERMS => s.call(PackQueries::<E, TERMS> { s, rows, chunks, to }));
    }
}

/// Rows as a right operand `[features][lanes]`, interleaved, padded with 0.
struct PackQueries<'t, E: Element, const TERMS: usize> {
    s: Avx512,
    rows: &'t [&'t [E]; GROUP],
    chunks: usize,
    to: &'t mut [TileRow],
}

impl<E: Element<Num = f32>, const TERMS: usize> Task<f32> for PackQueries<'_, E, TERMS> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        let Self { s, rows, chunks, to } = self;
        for (tile, rows) in rows.chunks_exact(ROWS).enumerate() {
            for chunk in 0..chunks {
                let mut blocks = [s.block(); TERMS];
                for (i, row) in rows.iter().enumerate().filter(|(_, row)| !row.is_empty()) {
                    let first = split_stored::<TERMS>(s, load_row(s, row, chunk * WIDTH));
                    let second = split_stored::<TERMS>(s, load_row(s, row, chunk * WIDTH + ROWS));
                    for (term, block) in blocks.iter_mut().enumerate() {
                        block[i] = s.pairs(first[term], second[term]);
                    }
                }
                for (term, block) in blocks.iter_mut().enumerate() {
                    let at = ((term * chunks + chunk) * LANE_TILES + tile) * ROWS;
                    write_transposed(s, block, &mut to[at..]);
                }
            }
        }
    }
}

/// Lanes `[inner][lanes]` as a right operand, interleaved; padded with 0 up to whole chunks.
pub(crate) struct PackPairs<'t> {
    pub(crate) lanes: &'t [Lanes<f32>],
    /// Which tiles of lanes.
    pub(crate) tiles: Range<usize>,
    pub(crate) chunks: usize,
    pub(crate) to: &'t mut [TileRow],
}

pub(crate) fn pack_pairs(s: Avx512, terms: usize, pairs: PackPairs<'_>) {
    with_terms!(terms, TERMS => s.call(SplitPairs::<TERMS>(s, pairs)));
}

/// [`PackPairs`] in so many bf16 terms.
struct SplitPairs<'t, const TERMS: usize>(Avx512, PackPairs<'t>);

impl<const TERMS: usize> Task<f32> for SplitPairs<'_, TERMS> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<f32>>(self, _: S) {
        let Self(s, PackPairs { lanes, tiles, chunks, to }) = self;
        let apart = chunks * tiles.len() * ROWS;
        for (chunk, i) in (0..chunks).flat_map(|chunk| (0..ROWS).map(move |i| (chunk, i))) {
            for tile in tiles.clone() {
                let load = |i: usize| {
                    let row = lanes.get(i);
                    row.map_or(s.splat(0.0), |row| s.load(&row.0[tile * 16..]))
                };
                let first = chunk * WIDTH + i;
                let halves = [load(first), load(first + ROWS)];
                let at = (chunk * tiles.len() + tile - tiles.start) * ROWS + i;
                write_interleaved::<TERMS, true>(s, halves, (&mut *to, at, apart));
            }
        }
    }
}

/// Keys and values of all heads of some items, packed once for all the rows that meet them.
#[derive(Debug)]
pub(crate) struct PackedKv {
    sizes: Sizes,
    /// KeyBlocks of one head of all items before each, and of all in the end.
    before: Vec<usize>,
    heads: usize,
    rows: Vec<TileRow>,
    non_finite: Vec<u64>,
}

/// Packs `k` and `v` of the given items, which ascend; nothing if there is no memory for that.
pub(crate) struct PackKv<'t, 'c, N: Number> {
    pub(crate) sizes: Sizes,
    pub(crate) call: &'t Call<'c, N>,
    pub(crate) items: &'t [usize],
    pub(crate) threads: usize,
}

impl<'t, 'c> AmxKernel for PackKv<'t, 'c, f32> {
    type Task<N: Number> = PackKv<'t, 'c, N>;
    type Out = Option<PackedKv>;

    fn run(amx: Amx, task: Self) -> Option<PackedKv> {
        PackedKv::new(amx.vectors(), task.sizes, (task.call, task.items), task.threads)
    }
}

impl PackedKv {
    fn new(
        s: Avx512,
        sizes: Sizes,
        (call, items): (&Call<'_, f32>, &[usize]),
        threads: usize,
    ) -> Option<Self> {
        let dims = call.problem.dims();
        let mut before = vec![0; dims.batch + 1];
        items.iter().for_each(|b| before[b + 1] = call.problem.k_len(*b).div_ceil(BLOCK_KEYS));
        (0..dims.batch).for_each(|b| before[b + 1] += before[b]);
        let heads = dims.heads.kv;
        let (count, size) = (before[dims.batch] * heads, sizes.key_rows() + sizes.value_rows());
        let mut rows = Vec::new();
        rows.try_reserve_exact(count * size).ok()?;
        rows.resize(count * size, TileRow([0; WIDTH]));
        let mut non_finite = vec![0; count];
        let to = ViewMut::bhsd(&mut rows, [count, 1, 1, size]).ok()?;
        let to_non_finite = ViewMut::bhsd(&mut non_finite, [count, 1, 1, 1]).ok()?;
        run(threads, count, KeyBlock::new, |at, i| {
            let b = before.partition_point(|key_blocks| key_blocks * heads <= i) - 1;
            let (key_blocks, own) = (before[b + 1] - before[b], i - before[b] * heads);
            let (head, first) = (own / key_blocks, own % key_blocks * BLOCK_KEYS);
            let (k, v) = (call.k.head(b, head).elements(), call.v.head(b, head).elements());
            at.set(first, k.len().saturating_sub(first).min(BLOCK_KEYS));
            let one = RowTile { first: 0, step: 1, count: 1 };
            // SAFETY: key block `i` belongs to task `i` alone, and `rows` and `non_finite` were made of zeros.
            let (mut to, mut to_non_finite) = unsafe {
                (to.tile(i, TileHeads::one(0), one), to_non_finite.tile(i, TileHeads::one(0), one))
            };
            let rows = to.update(0, 0);
            to_non_finite.update(0, 0)[0] = pack_block(s, sizes, (k, v), at, rows);
        });
        Some(Self { sizes, before, heads, rows, non_finite })
    }

    /// The key block that begins at key `first` of a head.
    #[inline(always)]
    pub(crate) fn key_block(&self, (batch, head): (usize, usize), first: usize) -> PackedBlock<'_> {
        let (before, to) = (self.before[batch], self.before[batch + 1]);
        let i = before * self.heads + head * (to - before) + first / BLOCK_KEYS;
        let size = self.sizes.key_rows() + self.sizes.value_rows();
        key_block(self.sizes, &self.rows[i * size..][..size], self.non_finite[i])
    }
}

/// Numbers of some keys, or of some rows, that were left out of an operand because they are not finite, and the pairs of a key
/// block and a group that they count for. They are added one by one: 0 times such a number would be NaN.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeftOut<'t> {
    /// A bit for each key, or row, that holds such a number.
    pub(crate) non_finite: u64,
    /// Which rows see each key.
    pub(crate) visible: &'t [RowMask; BLOCK_KEYS],
    /// Keys of the key block.
    pub(crate) keys: usize,
}

impl LeftOut<'_> {
    /// Whether key, or row, `i` holds such a number.
    pub(crate) fn holds(self, i: usize) -> bool {
        self.non_finite >> i & 1 == 1
    }

    /// Whether a row sees a key.
    pub(crate) fn is_visible(self, key: usize, row: usize) -> bool {
        self.visible[key] >> row & 1 == 1
    }
}
