//! Rows in and out of the lanes: a group of rows, `[row][feature]` in memory, stands as `[feature][lane]` in the kernels.

use crate::kernel::dequantize::dequantize;
use crate::kernel::key_blocks::KeyBlock;
use crate::kernel::micro::{RowBuffer, lanes_used};
use crate::machine::simd::{
    self, Any, Element, Isa, Lanes, MAX_LANES, Number, Simd, Task, Visitor, leaf,
};
use crate::tensor::index::{Keys, RowTile, Span};
use crate::tensor::source::{AnyHead, Head, Heads, KvHead};
use crate::tensor::view::{OutTile, Rows, TileMut, TilesMut};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Asks for the cache lines of a row.
#[inline(always)]
pub(crate) fn prefetch_l1<T>(row: &[T]) {
    lines(row).for_each(|x| simd::prefetch_l1(x));
}

/// One element of each cache line of a row.
#[inline(always)]
fn lines<T>(row: &[T]) -> impl Iterator<Item = &T> {
    row.iter().step_by(LINE / std::mem::size_of::<T>().clamp(1, LINE))
}

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// The rows of a block: where they lie if they are neighbours and need no widening, else copied into `copies`.
pub(crate) fn fetch<'r, 'c: 'r, N: Number>(
    isa: Isa,
    rows: KvHead<'c, N>,
    block: &KeyBlock,
    copies: &'r mut Vec<N>,
) -> Rows<'r, N> {
    let (len, dim) = (block.len, rows.dim());
    if let (Keys::From(first), KvHead::Elements(Any::Own(rows))) = (block.keys(), rows)
        && let Some(rows) = rows.run(first, len)
    {
        return rows;
    }
    if copies.len() < len * dim {
        copies.resize(len * dim, N::zero());
    }
    let keys = block.keys();
    let to = &mut copies[..len * dim];
    match rows {
        KvHead::Elements(rows) => {
            N::visit(rows, WidenRows { isa, keys, step: 1, len, stride: dim, to });
        }
        KvHead::Quantized(head) => dequantize(isa, head, (keys, len), to),
    }
    Rows { data: &copies[..len * dim], stride: dim, len, dim }
}

/// Rows of a head as numbers, side by side.
pub(crate) fn pack_head<N: Number>(
    isa: Isa,
    head: AnyHead<'_, N>,
    rows: RowTile,
    to: &mut RowBuffer<N>,
) {
    N::visit(head, WidenRows::side_by_side(isa, rows, to));
}

/// Widens some rows of a head.
struct WidenRows<'t, N> {
    isa: Isa,
    /// The rows, the first of them if they are not gathered, and from one to the next then.
    keys: Keys<'t>,
    step: usize,
    len: usize,
    /// From one row of `to` to the next.
    stride: usize,
    to: &'t mut [N],
}

impl<'t, N: Number> WidenRows<'t, N> {
    fn side_by_side(isa: Isa, rows: RowTile, to: &'t mut RowBuffer<N>) -> Self {
        let (to, stride) = to.rows_from(0);
        let RowTile { first, step, count: len } = rows;
        Self { isa, keys: Keys::From(first), step, len, stride, to }
    }
}

impl<'c, N: Number> Visitor<Heads<'c>, N> for WidenRows<'_, N> {
    type Out = ();
    fn visit<E: Element<Num = N>>(self, head: Head<'c, E>) {
        N::enter(self.isa, Widen { head, rows: self });
    }
}

/// The same once the type of their elements is known.
struct Widen<'t, 'c, E: Element> {
    head: Head<'c, E>,
    rows: WidenRows<'t, E::Num>,
}

impl<E: Element> Task<E::Num> for Widen<'_, '_, E> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<E::Num>>(self, s: S) {
        let Self { head, rows: WidenRows { keys, step, len, stride, to, .. } } = self;
        for i in 0..len {
            let row = head.row(keys.get(i * step));
            let to = &mut to[i * stride..][..row.len()];
            if let Some(row) = E::as_numbers(row) {
                to.copy_from_slice(row);
                continue;
            }
            let whole = row.len() / S::LANES * S::LANES;
            for d in (0..whole).step_by(S::LANES) {
                s.store(E::load(s, &row[d..]), &mut to[d..]);
            }
            row[whole..].iter().zip(&mut to[whole..]).for_each(|(x, to)| *to = x.widen());
        }
    }
}

/// Rows of a head into lanes: `lanes[d][i] = head[rows.row(i)][d] * factor`, 0 where there is no row.
pub(crate) fn load_head<N: Number>(
    isa: Isa,
    head: AnyHead<'_, N>,
    rows: RowTile,
    factor: N,
    lanes: &mut [Lanes<N>],
) {
    load_features(isa, head, rows, 0..lanes.len(), factor, lanes);
}

/// The same of some features.
pub(crate) fn load_features<N: Number>(
    isa: Isa,
    head: AnyHead<'_, N>,
    rows: RowTile,
    features: Range<usize>,
    factor: N,
    lanes: &mut [Lanes<N>],
) {
    N::visit(head, LoadHead { isa, rows, features, factor, lanes });
}

struct LoadHead<'t, N> {
    isa: Isa,
    rows: RowTile,
    features: Range<usize>,
    factor: N,
    lanes: &'t mut [Lanes<N>],
}

impl<'c, N: Number> Visitor<Heads<'c>, N> for LoadHead<'_, N> {
    type Out = ();
    fn visit<E: Element<Num = N>>(self, head: Head<'c, E>) {
        let Self { isa, rows, features, factor, lanes } = self;
        let row = |i| &head.row(rows.row(i))[features.clone()];
        load_transposed(isa, row, rows.count, factor, lanes);
    }
}

/// Rows into lanes: `lanes[d][i] = row(i)[d] * factor` for `count` rows, 0 where there is no row.
pub(crate) fn load_transposed<'r, E: Element>(
    isa: Isa,
    row: impl Fn(usize) -> &'r [E],
    count: usize,
    factor: E::Num,
    lanes: &mut [Lanes<E::Num>],
) {
    let width = isa.vectors::<E::Num>();
    for lane in (0..lanes_used(width, count)).step_by(width.lanes) {
        let mut rows: [&[E]; MAX_LANES] = [&[]; MAX_LANES];
        for (i, r) in rows[..width.lanes].iter_mut().enumerate().take(count.saturating_sub(lane)) {
            *r = &row(lane + i)[..lanes.len()];
        }
        let whole = lane + width.lanes <= count;
        E::Num::enter(isa, LoadTransposed { rows, lane, whole, factor, lanes });
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
pub(crate) fn store_output<'m, 'o: 'm, N: Number>(
    isa: Isa,
    lanes: &[Lanes<N>],
    count: usize,
    skipped: usize,
    (out, part): (&'m mut OutTile<'o, N>, usize),
) {
    N::visit(out.as_mut(), StoreOutput { isa, lanes, count, skipped, part });
}

struct StoreOutput<'t, N> {
    isa: Isa,
    lanes: &'t [Lanes<N>],
    count: usize,
    skipped: usize,
    part: usize,
}

impl<'m, 'o: 'm, N: Number> Visitor<TilesMut<'m, 'o>, N> for StoreOutput<'_, N> {
    type Out = ();
    fn visit<E: Element<Num = N>>(self, out: &'m mut TileMut<'o, E>) {
        let Self { isa, lanes, count, skipped, part } = self;
        store_transposed(isa, lanes, count, skipped, (out, part));
    }
}

/// Lanes back into rows: row `skipped + i` of a part starts with `lanes[..][i]`, for `count` rows.
pub(crate) fn store_transposed<E: Element>(
    isa: Isa,
    lanes: &[Lanes<E::Num>],
    count: usize,
    skipped: usize,
    (out, part): (&mut TileMut<'_, E>, usize),
) {
    let width = isa.lanes::<E::Num>();
    for lane in (0..count).step_by(width) {
        let rows = lane..(lane + width).min(count);
        let to = out.several(part, skipped + lane, rows.len());
        E::Num::enter(isa, StoreTransposed { lanes, rows, to });
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

/// Writes a row of numbers, times a factor, as row `row` of a part of an output of any type.
pub(crate) fn store_row<'m, 'o: 'm, N: Number>(
    isa: Isa,
    numbers: &[N],
    factor: N,
    (out, part, row): (Any<TilesMut<'m, 'o>, N>, usize, usize),
) {
    N::visit(out, StoreRow { isa, numbers, factor, place: (part, row) });
}

struct StoreRow<'t, N> {
    isa: Isa,
    numbers: &'t [N],
    factor: N,
    /// Part and row.
    place: (usize, usize),
}

impl<'m, 'o: 'm, N: Number> Visitor<TilesMut<'m, 'o>, N> for StoreRow<'_, N> {
    type Out = ();
    fn visit<E: Element<Num = N>>(self, out: &'m mut TileMut<'o, E>) {
        let Self { isa, numbers, factor, place: (part, row) } = self;
        N::enter(isa, StoreTyped::<E> { numbers, factor, to: out.row(part, row) });
    }
}

/// The same once the type of the output is known.
struct StoreTyped<'t, E: Element> {
    numbers: &'t [E::Num],
    factor: E::Num,
    to: &'t mut [MaybeUninit<E>],
}

impl<E: Element> Task<E::Num> for StoreTyped<'_, E> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd<E::Num>>(self, s: S) {
        let Self { numbers, factor, to } = self;
        let (by, whole) = (s.splat(factor), to.len() / S::LANES * S::LANES);
        for d in (0..whole).step_by(S::LANES) {
            E::write(s, s.mul(s.load(&numbers[d..]), by), &mut to[d..]);
        }
        for (to, x) in to[whole..].iter_mut().zip(&numbers[whole..]) {
            to.write(E::narrow(*x * factor));
        }
    }
}

leaf! {
    /// Multiplies a tile by another, lane by lane.
    pub(crate) fn multiply_tile<'t, N>(
        s: S,
        tile: &'t mut [Lanes<N>],
        by: &'t [Lanes<N>],
        span: Span,
    ) {
        multiply_lanes(s, tile, by, span);
    }
}

leaf! {
    /// Multiplies each row of lanes by the same factors.
    pub(crate) fn scale_lanes<'t, N>(
        s: S,
        rows: &'t mut [Lanes<N>],
        by: &'t Lanes<N>,
        span: Span,
    ) {
        for lane in span.vectors::<N, S>() {
            let by = s.load(&by.0[lane..]);
            for row in rows.iter_mut() {
                s.store(s.mul(s.load(&row.0[lane..]), by), &mut row.0[lane..]);
            }
        }
    }
}

/// [`multiply_tile`] as a part of a leaf.
#[inline(always)]
pub(crate) fn multiply_lanes<N: Number, S: Simd<N>>(
    s: S,
    tile: &mut [Lanes<N>],
    by: &[Lanes<N>],
    span: Span,
) {
    for (x, by) in tile.iter_mut().zip(by) {
        for lane in span.vectors::<N, S>() {
            let x = &mut x.0[lane..];
            s.store(s.mul(s.load(x), s.load(&by.0[lane..])), x);
        }
    }
}
