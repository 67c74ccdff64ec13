//! Tensors that a call writes, and the rows of them that one task alone may touch.

use super::{Layout, Shape, Strides, packed_shape};
use crate::error::Error;
use crate::machine::run::run;
use crate::machine::simd::{Any, Element, Family, Number, covariant, each, map_any};
use crate::tensor::index::RowTile;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

/// A tensor that a call writes; no two of its elements share memory.
#[derive(Debug)]
pub struct ViewMut<'a, E> {
    data: *mut MaybeUninit<E>,
    shape: Shape,
    strides: Strides,
    /// Where each item begins, and the end, if they are packed.
    offsets: Option<&'a [usize]>,
    /// Whether every element has a value.
    written: bool,
    memory: PhantomData<&'a mut [E]>,
}

// SAFETY: a ViewMut is an exclusive borrow of plain elements; `tile` is unsafe and states who may call it.
unsafe impl<E: Send> Sync for ViewMut<'_, E> {}
// SAFETY: as for a `&mut [E]`.
unsafe impl<E: Send> Send for ViewMut<'_, E> {}

impl<'a, E> ViewMut<'a, E> {
    /// `data [batch, heads, len, dim]`, dense.
    pub fn bhsd(data: &'a mut [E], [batch, heads, len, dim]: [usize; 4]) -> Result<Self, Error> {
        let shape = Shape { batch, heads, len, dim };
        shape.elements()?;
        Self::strided(data, shape, shape.dense(Layout::Bhsd))
    }

    /// `data [batch, len, heads, dim]`, dense.
    pub fn bshd(data: &'a mut [E], [batch, len, heads, dim]: [usize; 4]) -> Result<Self, Error> {
        let shape = Shape { batch, heads, len, dim };
        shape.elements()?;
        Self::strided(data, shape, shape.dense(Layout::Bshd))
    }

    /// Sequences of different lengths one after another, `data [total, heads, dim]`, dense: see [`View::packed`](super::View::packed).
    pub fn packed(
        data: &'a mut [E],
        offsets: &'a [usize],
        sizes: [usize; 2],
    ) -> Result<Self, Error> {
        let checked = packed_shape(offsets, sizes, data.len())?;
        // SAFETY: `packed_shape` has checked that the items lie one after another and end where the data does.
        Ok(unsafe { Self::of_checked(data, checked, Some(offsets)) })
    }

    /// Of a shape and strides that have been checked.
    ///
    /// # Safety
    /// They must stay inside `data` and keep its elements apart, with the offsets of the items, if they are packed.
    pub(super) unsafe fn of_checked(
        data: &'a mut [E],
        (shape, strides): (Shape, Strides),
        offsets: Option<&'a [usize]>,
    ) -> Self {
        let data = data.as_mut_ptr().cast();
        Self { data, shape, strides, offsets, written: true, memory: PhantomData }
    }

    /// The same memory as items one after another.
    ///
    /// # Safety
    /// Together they must be as many rows as there are.
    pub(super) unsafe fn of_items(self, shape: Shape, offsets: Option<&'a [usize]>) -> Self {
        Self { shape, offsets, ..self }
    }

    /// Any strides that keep the elements apart.
    pub fn strided(data: &'a mut [E], shape: Shape, strides: Strides) -> Result<Self, Error> {
        // SAFETY: `MaybeUninit<E>` lies in memory as `E` does; nothing uninitialised is ever written through it: `TileMut` gives
        // the slices out, and its users call `write`, `fill` or `copy_from_slice` on them.
        let data = unsafe { &mut *(std::ptr::from_mut(data) as *mut [MaybeUninit<E>]) };
        Ok(Self { written: true, ..Self::unwritten(data, shape, strides)? })
    }

    pub(super) fn unwritten(
        data: &'a mut [MaybeUninit<E>],
        shape: Shape,
        strides: Strides,
    ) -> Result<Self, Error> {
        let needed = shape.reach(strides)?;
        if data.len() < needed {
            return Err(Error::DataLength { needed, found: data.len() });
        }
        // Sorted by stride, each axis must step over everything inside it.
        let Shape { batch, heads, len, dim } = shape;
        let mut axes = [(strides.batch, batch), (strides.heads, heads), (strides.len, len)];
        axes.sort_unstable();
        let mut inside = dim;
        for (stride, n) in axes {
            if needed > 0 && n > 1 {
                if stride < inside {
                    let strides = [strides.batch, strides.heads, strides.len];
                    return Err(Error::OutputOverlap { strides });
                }
                inside += (n - 1) * stride;
            }
        }
        let data = data.as_mut_ptr();
        Ok(Self { data, shape, strides, offsets: None, written: false, memory: PhantomData })
    }

    /// The sizes of the axes; of the items, if they are packed, the longest.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Where each item begins, and the end, if they are packed.
    #[must_use]
    pub fn offsets(&self) -> Option<&'a [usize]> {
        self.offsets
    }

    /// Where an item begins, in elements, and how many positions it has.
    fn item(&self, batch: usize) -> (usize, usize) {
        assert!(batch < self.shape.batch);
        match self.offsets {
            Some(offsets) => {
                let (begin, end) = (offsets[batch], offsets[batch + 1]);
                (begin.wrapping_mul(self.strides.len), end - begin)
            }
            // Wraps only for a tensor without elements, of which no place is asked for.
            None => (batch.wrapping_mul(self.strides.batch), self.shape.len),
        }
    }

    /// Hands all rows to tasks on up to `threads` threads, up to `count` rows of an item at a time, with a part for each
    /// head: `task(memory, batch, rows)`.
    pub(crate) fn change<M>(
        &mut self,
        threads: usize,
        count: usize,
        memory: impl Fn() -> M + Sync,
        task: impl Fn(&mut M, usize, TileMut<'_, E>) + Sync,
    ) where
        E: Send,
    {
        assert!(self.written);
        let (view, Shape { batch, heads, len, .. }) = (&*self, self.shape);
        let blocks = len.div_ceil(count);
        run(threads, batch * blocks, memory, |memory, i| {
            let (b, first) = (i / blocks, i % blocks * count);
            let own = view.item(b).1; // at most `len`
            if own <= first {
                return;
            }
            let rows = RowTile { first, step: 1, count: count.min(own - first) };
            let all = TileHeads { head: 0, apart: 1, parts: 0..heads };
            // SAFETY: `&mut self` is borrowed for this call alone, `i / blocks` and `i % blocks` give each block of rows of an
            // item to one task, and all elements have values (`written`, asserted above).
            task(memory, b, unsafe { view.tile(b, all, rows) });
        });
    }

    /// Makes all rows of an item 0.
    ///
    /// # Safety
    /// Nobody else may hold a row of this item.
    pub(crate) unsafe fn clear(&self, batch: usize)
    where
        E: Element,
    {
        let rows = RowTile { first: 0, step: 1, count: self.item(batch).1 };
        let all = TileHeads { head: 0, apart: 1, parts: 0..self.shape.heads };
        // SAFETY: as the caller of `clear` promises; nothing is read.
        let mut tile = unsafe { self.tile(batch, all, rows) };
        for (head, lane) in (0..self.shape.heads).flat_map(|h| (0..rows.count).map(move |i| (h, i)))
        {
            tile.row(head, lane).fill(MaybeUninit::new(E::narrow(E::Num::default())));
        }
    }

    /// The given rows of a head, to be written; of `parts` heads with the same rows, `heads` apart.
    ///
    /// # Safety
    /// While it lives, nobody else may hold these rows of these parts, and rows that are read must have been written.
    pub(crate) unsafe fn tile(
        &self,
        batch: usize,
        heads: TileHeads,
        rows: RowTile,
    ) -> TileMut<'_, E> {
        // SAFETY: `block` of all features; the rest as the caller of `tile` promises.
        unsafe { self.block(batch, heads, rows, 0..self.shape.dim) }
    }

    /// The same of some features alone.
    ///
    /// # Safety
    /// As for [`tile`](Self::tile), of these features.
    pub(crate) unsafe fn block(
        &self,
        batch: usize,
        heads: TileHeads,
        rows: RowTile,
        features: Range<usize>,
    ) -> TileMut<'_, E> {
        assert!(features.start <= features.end && features.end <= self.shape.dim);
        let (item, len) = self.item(batch);
        TileMut { view: self, item, len, heads, rows, features }
    }
}

/// Outputs, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct Outputs<'o>(PhantomData<&'o ()>);

impl<'o> Family for Outputs<'o> {
    type Of<T: Element> = &'o ViewMut<'o, T>;
}

type OutputOf<'o, T> = &'o ViewMut<'o, T>;
covariant!(
    #[derive(Clone, Copy, Debug)]
    /// A tensor of elements of any type that a call writes.
    OutView,
    Outputs,
    OutputOf
);

impl<'o, N: Number> OutView<'o, N> {
    /// See [`ViewMut::tile`].
    ///
    /// # Safety
    /// As for that.
    pub(crate) unsafe fn tile(
        self,
        batch: usize,
        heads: TileHeads,
        rows: RowTile,
    ) -> OutTile<'o, N> {
        // SAFETY: as the caller of this `tile` promises.
        map_any!(self, OutView => OutTile, view => unsafe { view.tile(batch, heads, rows) })
    }

    /// See [`ViewMut::clear`].
    ///
    /// # Safety
    /// As for that.
    pub(crate) unsafe fn clear(self, batch: usize) {
        // SAFETY: as the caller of this `clear` promises.
        each!(self, OutView, view => unsafe { view.clear(batch) });
    }
}

/// Tiles of outputs.
#[derive(Clone, Copy, Debug)]
pub struct Tiles<'t>(PhantomData<&'t ()>);

impl<'t> Family for Tiles<'t> {
    type Of<T: Element> = TileMut<'t, T>;
}

type TileOf<'t, T> = TileMut<'t, T>;
covariant!(
    #[derive(Debug)]
    /// Rows of an output of any type that one task alone may touch.
    OutTile,
    Tiles,
    TileOf
);

impl<'t, N: Number> OutTile<'t, N> {
    /// See [`TileMut::part`].
    pub(crate) fn part(&mut self, part: usize, rows: RowTile) -> OutTile<'_, N> {
        map_any!(self, OutTile => OutTile, tile => tile.part(part, rows))
    }

    pub(crate) fn rows(&self) -> RowTile {
        each!(self, OutTile, tile => tile.rows())
    }

    pub(crate) fn as_mut<'m>(&'m mut self) -> Any<TilesMut<'m, 't>, N> {
        map_any!(self, OutTile => Any, tile => tile)
    }
}

/// Tiles of outputs, borrowed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TilesMut<'m, 't>(PhantomData<(&'m (), &'t ())>);

impl<'m, 't: 'm> Family for TilesMut<'m, 't> {
    type Of<T: Element> = &'m mut TileMut<'t, T>;
}

/// Which heads a task writes: `head`, `head + apart`, ... for each of its parts.
#[derive(Clone, Debug)]
pub(crate) struct TileHeads {
    pub(crate) head: usize,
    pub(crate) apart: usize,
    pub(crate) parts: Range<usize>,
}

impl TileHeads {
    pub(crate) fn one(head: usize) -> Self {
        Self { head, apart: 0, parts: 0..1 }
    }
}

/// Rows that one task alone may touch.
#[derive(Debug)]
pub struct TileMut<'a, E> {
    view: &'a ViewMut<'a, E>,
    /// Where its item begins, in elements.
    item: usize,
    /// Positions of its item.
    len: usize,
    heads: TileHeads,
    rows: RowTile,
    features: Range<usize>,
}

impl<E> TileMut<'_, E> {
    /// Its rows.
    pub(crate) fn rows(&self) -> RowTile {
        self.rows
    }

    /// Some rows of one part, of a tile whose rows are neighbours.
    #[inline(always)]
    pub(crate) fn part(&mut self, part: usize, rows: RowTile) -> TileMut<'_, E> {
        let RowTile { first, step, count } = self.rows;
        assert!(step == 1 && self.heads.parts.contains(&part));
        assert!(rows.first >= first && rows.row(rows.count.max(1) - 1) < first + count);
        let head = part * self.heads.apart + self.heads.head;
        let (heads, features) = (TileHeads::one(head), self.features.clone());
        TileMut { view: self.view, item: self.item, len: self.len, heads, rows, features }
    }

    /// The features of a row that has been written, to be changed.
    #[inline(always)]
    pub(crate) fn update(&mut self, part: usize, lane: usize) -> &mut [E] {
        let (data, dim) = self.place(part, lane);
        // SAFETY: as for `row`, and as for `written`: whoever made this tile promised that rows which are read have values.
        unsafe { std::slice::from_raw_parts_mut(data.cast(), dim) }
    }

    /// The features of row `lane` of the tile.
    #[inline(always)]
    pub(crate) fn row(&mut self, part: usize, lane: usize) -> &mut [MaybeUninit<E>] {
        let (data, dim) = self.place(part, lane);
        // SAFETY: `place` has checked the bounds, no two rows overlap (`ViewMut::unwritten`), whoever made this tile promised to
        // be the only one with these rows (`ViewMut::block`), and `self` is borrowed for as long as the slice lives.
        unsafe { std::slice::from_raw_parts_mut(data, dim) }
    }

    /// The features of `count` rows from `lane` on; the rest of the array is empty.
    #[inline(always)]
    pub(crate) fn several<const MAX: usize>(
        &mut self,
        part: usize,
        lane: usize,
        count: usize,
    ) -> [&mut [MaybeUninit<E>]; MAX] {
        let mut rows: [&mut [MaybeUninit<E>]; MAX] = std::array::from_fn(|_| &mut [][..]);
        for (i, row) in rows[..count].iter_mut().enumerate() {
            let (data, dim) = self.place(part, lane + i);
            // SAFETY: as for `row`; different lanes are different rows, which do not overlap.
            *row = unsafe { std::slice::from_raw_parts_mut(data, dim) };
        }
        rows
    }

    /// The features of a row that an earlier stage wrote.
    #[inline(always)]
    pub(crate) fn written(&self, part: usize, lane: usize) -> &[E] {
        let (data, dim) = self.place(part, lane);
        // SAFETY: as for `row`, and whoever made this tile promised that rows which are read have been written.
        unsafe { std::slice::from_raw_parts(data.cast(), dim) }
    }

    /// Where a row lies and how long it is: in the memory of the view, whose constructor checked that it covers every
    /// index below the shape.
    #[inline(always)]
    fn place(&self, part: usize, lane: usize) -> (*mut MaybeUninit<E>, usize) {
        assert!(lane < self.rows.count && self.heads.parts.contains(&part));
        let Shape { heads, dim, .. } = self.view.shape;
        let Range { start, end } = self.features;
        let (head, row) = (part * self.heads.apart + self.heads.head, self.rows.row(lane));
        assert!(head < heads && row < self.len);
        if dim == 0 {
            return (std::ptr::dangling_mut(), 0); // an empty tensor reaches no memory at all
        }
        // SAFETY: `ViewMut::item` has checked where the item begins, the assertions above hold the other indices against the
        // sizes of that item, and `ViewMut::block` the features against those of a row; the memory covers all of them
        // (`Shape::reach`).
        (
            unsafe { self.view.data.add(self.item + self.view.strides.at(0, head, row) + start) },
            end - start,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_that_overlap_are_errors() {
        let mut data = [0f32; 64];
        let shape = Shape { batch: 1, heads: 2, len: 3, dim: 4 };
        let strides = Strides { batch: 0, heads: 4, len: 4 };
        let err = ViewMut::strided(&mut data, shape, strides).unwrap_err();
        assert_eq!(err, Error::OutputOverlap { strides: [0, 4, 4] });
        let strides = Strides { batch: 0, heads: 4, len: 8 };
        assert!(ViewMut::strided(&mut data, shape, strides).is_ok());
    }
}
