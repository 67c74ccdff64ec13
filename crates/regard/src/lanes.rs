//! Rows in and out of the lanes: a group of rows, `[row][feature]` in memory, stands as `[feature][lane]` in the kernels.

use crate::cells::{CELL, Cell};
use crate::element::{Element, Number};
use crate::mask::RowTile;
use crate::micro::{Packed, add_values, lanes_used};
use crate::problem::Problem;
use crate::score::{Keys, Similarity};
use crate::simd::{GROUP, Lanes, MAX_LANES, Simd, Span};
use crate::view::{Rows, TileMut};
use std::mem::MaybeUninit;
use std::ops::Range;

/// Queries into lanes: turned, projected if the similarity asks for it, and scaled. `raw` gets the queries as given when
/// they are projected.
#[inline(always)]
pub(crate) fn turn_queries<E: Element, S: Simd<E::Num>>(
    s: S,
    problem: &Problem<'_, E>,
    head: usize,
    (q, rows): (Rows<'_, E>, RowTile),
    raw: &mut [Lanes<E::Num>],
    lanes: &mut [Lanes<E::Num>],
) {
    if rows.step > 1 {
        (0..rows.count).for_each(|i| soon(s, q.row(rows.row(i))));
    }
    let factor = E::Num::from_f64(problem.query_factor());
    let Similarity::General(w) = problem.similarity else {
        return turn(s, |i| q.row(rows.row(i)), rows.count, factor, lanes);
    };
    turn(s, |i| q.row(rows.row(i)), rows.count, factor, raw);
    let w = w.serving_head(0, head);
    lanes.fill(Lanes([E::Num::default(); GROUP]));
    let one = Lanes([E::Num::from_f64(1.0); GROUP]);
    let span = Span { start: 0, end: rows.count };
    let (mut packed, mut cell) = (Vec::new(), Cell::new());
    for first in (0..w.len).step_by(CELL) {
        let n = (w.len - first).min(CELL);
        cell.set(first, n);
        let w = fetch(w, &cell, &mut packed);
        let raw = (&raw[first..first + n], &[][..]);
        add_values::<_, S, false, false>(s, (w, &[]), raw, span, (&one, lanes));
    }
}

/// Asks for the cache lines of a row.
#[inline(always)]
pub(crate) fn soon<N: Number, S: Simd<N>, T>(s: S, row: &[T]) {
    for x in row.iter().step_by(LINE / std::mem::size_of::<T>().clamp(1, LINE)) {
        s.prefetch(x);
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// The rows of a cell: where they lie if they are neighbours and need no widening, else copied into `room`.
#[inline(always)]
pub(crate) fn fetch<'r, E: Element>(
    rows: Rows<'r, E>,
    cell: &Cell,
    room: &'r mut Vec<E::Num>,
) -> Rows<'r, E::Num> {
    let Rows { stride, dim, .. } = rows;
    let len = cell.len;
    if let Keys::From(first) = cell.keys()
        && let Some(data) = E::as_numbers(rows.slice(first, len).data)
    {
        return Rows { data, stride, len, dim };
    }
    room.clear();
    for i in 0..len {
        room.extend(rows.row(cell.keys().get(i)).iter().map(|x| x.widen()));
    }
    Rows { data: room, stride: dim, len, dim }
}

/// Rows into lanes: `lanes[d][i] = row(i)[d] * factor` for `count` rows, 0 where there is no row.
#[expect(
    clippy::needless_range_loop,
    reason = "indices over constants keep the block in registers"
)]
#[inline(always)]
pub(crate) fn turn<'r, E: Element, S: Simd<E::Num>>(
    s: S,
    row: impl Fn(usize) -> &'r [E],
    count: usize,
    factor: E::Num,
    lanes: &mut [Lanes<E::Num>],
) {
    let scale = s.splat(factor);
    for lane in (0..lanes_used::<E::Num, S>(count)).step_by(S::LANES) {
        let mut rows: [&[E]; MAX_LANES] = [&[]; MAX_LANES];
        for (i, r) in rows[..S::LANES].iter_mut().enumerate().take(count.saturating_sub(lane)) {
            *r = &row(lane + i)[..lanes.len()];
        }
        let mut d = 0;
        let whole = lane + S::LANES <= count && E::as_numbers(&[]).is_some();
        while whole && d + S::LANES <= lanes.len() {
            let mut block = s.block();
            for i in 0..S::LANES {
                let row = E::as_numbers(&rows[i][d..]).unwrap_or(&[]);
                block.as_mut()[i] = s.mul(s.load(row), scale);
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

/// Lanes back into rows: row `skipped + i` of a part starts with `lanes[..][i]`, for `count` rows.
#[inline(always)]
pub(crate) fn turn_back<E: Element, S: Simd<E::Num>>(
    s: S,
    lanes: &[Lanes<E::Num>],
    count: usize,
    skipped: usize,
    (out, part): (&mut TileMut<'_, E>, usize),
) {
    for lane in (0..count).step_by(S::LANES) {
        let rows = lane..(lane + S::LANES).min(count);
        let to = out.several(part, skipped + lane, rows.len());
        turn_vector_back(s, lanes, rows, to);
    }
}

/// The same for at most a vector of rows.
#[expect(
    clippy::needless_range_loop,
    reason = "indices over constants keep the block in registers"
)]
#[inline(always)]
fn turn_vector_back<E: Element, S: Simd<E::Num>>(
    s: S,
    lanes: &[Lanes<E::Num>],
    rows: Range<usize>,
    mut to: [&mut [MaybeUninit<E>]; MAX_LANES],
) {
    let mut d = 0;
    while rows.len() == S::LANES && d + S::LANES <= lanes.len() && E::as_numbers(&[]).is_some() {
        let mut block = s.block();
        for i in 0..S::LANES {
            block.as_mut()[i] = s.load(&lanes[d + i].0[rows.start..]);
        }
        s.transpose(&mut block);
        for i in 0..S::LANES {
            if let Some(row) = E::as_numbers_mut(&mut to[i][d..]) {
                s.write(block.as_mut()[i], row);
            }
        }
        d += S::LANES;
    }
    for (i, row) in rows.zip(&mut to) {
        for (x, lanes) in row[d..].iter_mut().zip(&lanes[d..]) {
            x.write(E::narrow(lanes.0[i]));
        }
    }
}

/// Rows as they are, side by side.
#[inline(always)]
pub(crate) fn pack<'r, E: Element>(
    row: impl Fn(usize) -> &'r [E],
    count: usize,
    to: &mut Packed<E::Num>,
) {
    for i in 0..count {
        let (row, to) = (row(i), to.row_mut(i));
        match E::as_numbers(row) {
            Some(row) => to[..row.len()].copy_from_slice(row),
            None => to.iter_mut().zip(row).for_each(|(to, x)| *to = x.widen()),
        }
    }
}

/// Multiplies a tile by another, lane by lane.
#[inline(always)]
pub(crate) fn multiply<N: Number, S: Simd<N>>(
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
