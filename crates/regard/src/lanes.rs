//! Rows in and out of the lanes: a group of rows, `[row][feature]` in memory, stands as `[feature][lane]` in the kernels.

use crate::index::{Keys, RowTile, Span};
use crate::key_blocks::KeyBlock;
use crate::micro::{RowBuffer, lanes_used};
use crate::simd::{Any, Element, Lanes, MAX_LANES, Number, Simd, Task, Visitor};
use crate::source::{AnyHead, Head, Heads};
use crate::view::{OutTile, Rows, TileMut, TilesMut};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Asks for the cache lines of a row.
#[inline(always)]
pub(crate) fn prefetch_l1<N: Number, S: Simd<N>, T>(s: S, row: &[T]) {
    for x in lines(row) {
        s.prefetch_l1(x);
    }
}

/// The same, of a row that is needed later.
#[inline(always)]
pub(crate) fn prefetch_l2<N: Number, S: Simd<N>, T>(s: S, row: &[T]) {
    for x in lines(row) {
        s.prefetch_l2(x);
    }
}

/// One element of each cache line of a row.
#[inline(always)]
fn lines<T>(row: &[T]) -> impl Iterator<Item = &T> {
    row.iter().step_by(LINE / std::mem::size_of::<T>().clamp(1, LINE))
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// The rows of a block: where they lie if they are neighbours and need no widening, else copied into `copies`.
#[inline(always)]
pub(crate) fn fetch<'r, 'c: 'r, N: Number, S: Simd<N>>(
    s: S,
    rows: AnyHead<'c, N>,
    block: &KeyBlock,
    copies: &'r mut Vec<N>,
) -> Rows<'r, N> {
    let (len, dim) = (block.len, rows.dim());
    if let (Keys::From(first), Any::Own(rows)) = (block.keys(), rows)
        && let Some(rows) = rows.run(first, len)
    {
        return rows;
    }
    if copies.len() < len * dim {
        copies.resize(len * dim, N::zero());
    }
    N::visit(rows, WidenRows { s, keys: block.keys(), len, to: &mut copies[..len * dim] });
    Rows { data: &copies[..len * dim], stride: dim, len, dim }
}

/// Widens some rows of a head.
struct WidenRows<'t, N, S> {
    s: S,
    keys: Keys<'t>,
    len: usize,
    /// `[len][dim]`
    to: &'t mut [N],
}

impl<'c, N: Number, S: Simd<N>> Visitor<Heads<'c>, N> for WidenRows<'_, N, S> {
    type Out = ();
    #[inline(always)]
    fn visit<E: Element<Num = N>>(self, head: Head<'c, E>) {
        let dim = head.dim();
        for i in 0..self.len {
            let to = &mut self.to[i * dim..][..dim];
            self.s.call(Widen { row: head.row(self.keys.get(i)), to });
        }
    }
}

/// A row as numbers.
struct Widen<'t, E: Element> {
    row: &'t [E],
    to: &'t mut [E::Num],
}

impl<E: Element> Task<E::Num> for Widen<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<E::Num>>(self, s: S) {
        let Self { row, to } = self;
        if let Some(row) = E::as_numbers(row) {
            return to[..row.len()].copy_from_slice(row);
        }
        let whole = row.len() / S::LANES * S::LANES;
        for d in (0..whole).step_by(S::LANES) {
            s.store(E::load(s, &row[d..]), &mut to[d..]);
        }
        row[whole..].iter().zip(&mut to[whole..]).for_each(|(x, to)| *to = x.widen());
    }
}

/// Rows of a head into lanes: `lanes[d][i] = head[rows.row(i)][d] * factor`, 0 where there is no row.
#[inline(always)]
pub(crate) fn load_head<N: Number, S: Simd<N>>(
    s: S,
    head: AnyHead<'_, N>,
    rows: RowTile,
    factor: N,
    lanes: &mut [Lanes<N>],
) {
    load_features(s, head, rows, 0..lanes.len(), factor, lanes);
}

/// The same of some features.
#[inline(always)]
pub(crate) fn load_features<N: Number, S: Simd<N>>(
    s: S,
    head: AnyHead<'_, N>,
    rows: RowTile,
    features: Range<usize>,
    factor: N,
    lanes: &mut [Lanes<N>],
) {
    N::visit(head, LoadHead { s, rows, features, factor, lanes });
}

struct LoadHead<'t, N, S> {
    s: S,
    rows: RowTile,
    features: Range<usize>,
    factor: N,
    lanes: &'t mut [Lanes<N>],
}

impl<'c, N: Number, S: Simd<N>> Visitor<Heads<'c>, N> for LoadHead<'_, N, S> {
    type Out = ();
    #[inline(always)]
    fn visit<E: Element<Num = N>>(self, head: Head<'c, E>) {
        let Self { s, rows, features, factor, lanes } = self;
        let row = |i| &head.row(rows.row(i))[features.clone()];
        load_transposed(s, row, rows.count, factor, lanes);
    }
}

/// Rows into lanes: `lanes[d][i] = row(i)[d] * factor` for `count` rows, 0 where there is no row.
#[inline(always)]
pub(crate) fn load_transposed<'r, E: Element, S: Simd<E::Num>>(
    s: S,
    row: impl Fn(usize) -> &'r [E],
    count: usize,
    factor: E::Num,
    lanes: &mut [Lanes<E::Num>],
) {
    for lane in (0..lanes_used::<E::Num, S>(count)).step_by(S::LANES) {
        let mut rows: [&[E]; MAX_LANES] = [&[]; MAX_LANES];
        for (i, r) in rows[..S::LANES].iter_mut().enumerate().take(count.saturating_sub(lane)) {
            *r = &row(lane + i)[..lanes.len()];
        }
        s.call(LoadTransposed { rows, lane, whole: lane + S::LANES <= count, factor, lanes });
    }
}

/// At most a vector of rows into the lanes from `lane` on; rows that are not there are empty.
struct LoadTransposed<'t, E: Element> {
    rows: [&'t [E]; MAX_LANES],
    lane: usize,
    /// Whether all rows are there.
    whole: bool,
    factor: E::Num,
    lanes: &'t mut [Lanes<E::Num>],
}

impl<E: Element> Task<E::Num> for LoadTransposed<'_, E> {
    type Out = ();
    #[expect(
        clippy::needless_range_loop,
        reason = "indices over constants keep the block in registers"
    )]
    #[inline(always)]
    fn run<S: Simd<E::Num>>(self, s: S) {
        let Self { rows, lane, whole, factor, lanes } = self;
        let (scale, mut d) = (s.splat(factor), 0);
        while whole && d + S::LANES <= lanes.len() {
            let mut block = s.block();
            for i in 0..S::LANES {
                block.as_mut()[i] = s.mul(E::load(s, &rows[i][d..]), scale);
            }
            s.transpose(&mut block);
            for i in 0..S::LANES {
                s.store(block.as_mut()[i], &mut lanes[d + i].0[lane..]);
            }
            d += S::LANES;
        }
        for (i, row) in rows[..S::LANES].iter().enumerate() {
            for (d, lanes) in lanes.iter_mut().enumerate().skip(d) {
                lanes.0[lane + i] = row.get(d).map_or(E::Num::default(), |x| x.widen() * factor);
            }
        }
    }
}

/// Lanes back into rows of an output of any type: see [`store_transposed`].
#[inline(always)]
pub(crate) fn store_output<'m, 'o: 'm, N: Number, S: Simd<N>>(
    s: S,
    lanes: &[Lanes<N>],
    count: usize,
    skipped: usize,
    (out, part): (&'m mut OutTile<'o, N>, usize),
) {
    N::visit(out.as_mut(), StoreOutput { s, lanes, count, skipped, part });
}

struct StoreOutput<'t, N, S> {
    s: S,
    lanes: &'t [Lanes<N>],
    count: usize,
    skipped: usize,
    part: usize,
}

impl<'m, 'o: 'm, N: Number, S: Simd<N>> Visitor<TilesMut<'m, 'o>, N> for StoreOutput<'_, N, S> {
    type Out = ();
    #[inline(always)]
    fn visit<E: Element<Num = N>>(self, out: &'m mut TileMut<'o, E>) {
        let Self { s, lanes, count, skipped, part } = self;
        store_transposed(s, lanes, count, skipped, (out, part));
    }
}

/// Lanes back into rows: row `skipped + i` of a part starts with `lanes[..][i]`, for `count` rows.
#[inline(always)]
pub(crate) fn store_transposed<E: Element, S: Simd<E::Num>>(
    s: S,
    lanes: &[Lanes<E::Num>],
    count: usize,
    skipped: usize,
    (out, part): (&mut TileMut<'_, E>, usize),
) {
    for lane in (0..count).step_by(S::LANES) {
        let rows = lane..(lane + S::LANES).min(count);
        let to = out.several(part, skipped + lane, rows.len());
        s.call(StoreTransposed { lanes, rows, to });
    }
}

/// The same for at most a vector of rows.
struct StoreTransposed<'t, E: Element> {
    lanes: &'t [Lanes<E::Num>],
    rows: Range<usize>,
    to: [&'t mut [MaybeUninit<E>]; MAX_LANES],
}

impl<E: Element> Task<E::Num> for StoreTransposed<'_, E> {
    type Out = ();
    #[expect(
        clippy::needless_range_loop,
        reason = "indices over constants keep the block in registers"
    )]
    #[inline(always)]
    fn run<S: Simd<E::Num>>(self, s: S) {
        let Self { lanes, rows, mut to } = self;
        let mut d = 0;
        while rows.len() == S::LANES && d + S::LANES <= lanes.len() {
            let mut block = s.block();
            for i in 0..S::LANES {
                block.as_mut()[i] = s.load(&lanes[d + i].0[rows.start..]);
            }
            s.transpose(&mut block);
            for i in 0..S::LANES {
                E::write(s, block.as_mut()[i], &mut to[i][d..]);
            }
            d += S::LANES;
        }
        for (i, row) in rows.zip(&mut to) {
            for (x, lanes) in row[d..].iter_mut().zip(&lanes[d..]) {
                x.write(E::narrow(lanes.0[i]));
            }
        }
    }
}

/// Lanes back into rows side by side: `to[i][d] = lanes[d][i] * factor` for `count` rows.
#[inline(always)]
pub(crate) fn store_rows<N: Number, S: Simd<N>>(
    s: S,
    lanes: &[Lanes<N>],
    count: usize,
    factor: N,
    to: &mut RowBuffer<N>,
) {
    for lane in (0..count).step_by(S::LANES) {
        s.call(StoreRows { lanes, rows: lane..(lane + S::LANES).min(count), factor, to });
    }
}

/// The same for at most a vector of rows.
struct StoreRows<'t, N> {
    lanes: &'t [Lanes<N>],
    rows: Range<usize>,
    factor: N,
    to: &'t mut RowBuffer<N>,
}

impl<N: Number> Task<N> for StoreRows<'_, N> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<N>>(self, s: S) {
        let Self { lanes, rows, factor, to } = self;
        let (scale, mut d) = (s.splat(factor), 0);
        while rows.len() == S::LANES && d + S::LANES <= lanes.len() {
            let mut block = s.block();
            for i in 0..S::LANES {
                block.as_mut()[i] = s.mul(s.load(&lanes[d + i].0[rows.start..]), scale);
            }
            s.transpose(&mut block);
            for i in 0..S::LANES {
                s.store(block.as_mut()[i], &mut to.row_mut(rows.start + i)[d..]);
            }
            d += S::LANES;
        }
        for i in rows {
            for (x, lanes) in to.row_mut(i)[d..].iter_mut().zip(&lanes[d..]) {
                *x = lanes.0[i] * factor;
            }
        }
    }
}

/// Rows of a head as they are, side by side.
#[inline(always)]
pub(crate) fn pack_head<N: Number, S: Simd<N>>(
    s: S,
    head: AnyHead<'_, N>,
    rows: RowTile,
    to: &mut RowBuffer<N>,
) {
    N::visit(head, PackHead { s, rows, to });
}

struct PackHead<'t, N, S> {
    s: S,
    rows: RowTile,
    to: &'t mut RowBuffer<N>,
}

impl<'c, N: Number, S: Simd<N>> Visitor<Heads<'c>, N> for PackHead<'_, N, S> {
    type Out = ();
    #[inline(always)]
    fn visit<E: Element<Num = N>>(self, head: Head<'c, E>) {
        pack(self.s, |i| head.row(self.rows.row(i)), self.rows.count, self.to);
    }
}

/// Rows as they are, side by side.
#[inline(always)]
pub(crate) fn pack<'r, E: Element, S: Simd<E::Num>>(
    s: S,
    row: impl Fn(usize) -> &'r [E],
    count: usize,
    to: &mut RowBuffer<E::Num>,
) {
    for i in 0..count {
        s.call(Widen { row: row(i), to: to.row_mut(i) });
    }
}

/// Multiplies a tile by another, lane by lane.
#[inline(always)]
pub(crate) fn multiply_tile<N: Number, S: Simd<N>>(
    s: S,
    (tile, by): (&mut [Lanes<N>], &[Lanes<N>]),
    span: Span,
) {
    for (x, by) in tile.iter_mut().zip(by) {
        for lane in span.vectors::<N, S>() {
            let x = &mut x.0[lane..];
            s.store(s.mul(s.load(x), s.load(&by.0[lane..])), x);
        }
    }
}
