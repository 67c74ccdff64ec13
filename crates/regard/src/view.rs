//! Tensors as they lie in the caller's memory: a checked borrow, no copy.
//!
//! A [`View`] is four axes, batch, heads, length and features, over a slice. The features of one position are
//! contiguous; the other strides are free, so `[batch, heads, len, dim]` and `[batch, len, heads, dim]` are the same
//! to everything below. The kernels see one head at a time, as [`Rows`].
//!
//! Items of different lengths may lie one after another, `[total, heads, dim]`, with the offsets at which they begin and
//! end: such a tensor is packed, and the length in its shape is that of the longest item.

use crate::element::Element;
use crate::error::Error;
use crate::mask::RowTile;
use crate::run::run;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;

/// The order in which the axes lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `[batch, heads, len, dim]`
    Bhsd,
    /// `[batch, len, heads, dim]`
    Bshd,
}

/// Sizes of the four axes, whatever their order in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Independent items.
    pub batch: usize,
    /// Heads of each item.
    pub heads: usize,
    /// Positions: queries or keys. Those of the longest item, where items are packed.
    pub len: usize,
    /// Features of a position.
    pub dim: usize,
}

impl Shape {
    /// Elements in all, if that can be counted.
    fn elements(self) -> Result<usize, Error> {
        [self.heads, self.len, self.dim]
            .iter()
            .try_fold(self.batch, |n, axis| n.checked_mul(*axis))
            .filter(|n| isize::try_from(*n).is_ok())
            .ok_or(Error::ShapeOverflow { shape: self.to_array() })
    }

    /// Batch, heads, length, features.
    #[must_use]
    pub fn to_array(self) -> [usize; 4] {
        [self.batch, self.heads, self.len, self.dim]
    }

    /// Strides of batch, heads and length when the tensor is dense in this layout.
    fn dense(self, layout: Layout) -> Strides {
        // Wraps only for a tensor without elements, whose strides are never used.
        let dense = |axes: [usize; 2]| axes[0].wrapping_mul(axes[1]);
        let (heads, len) = match layout {
            Layout::Bhsd => (dense([self.len, self.dim]), self.dim),
            Layout::Bshd => (self.dim, dense([self.heads, self.dim])),
        };
        Strides { batch: dense([self.heads, dense([self.len, self.dim])]), heads, len }
    }

    /// Elements that these strides reach over.
    fn reach(self, strides: Strides) -> Result<usize, Error> {
        if self.elements()? == 0 {
            return Ok(0);
        }
        let last = |n: usize, stride: usize| (n - 1).checked_mul(stride);
        last(self.batch, strides.batch)
            .and_then(|n| n.checked_add(last(self.heads, strides.heads)?))
            .and_then(|n| n.checked_add(last(self.len, strides.len)?))
            .and_then(|n| n.checked_add(self.dim))
            .filter(|n| isize::try_from(*n).is_ok())
            .ok_or(Error::ShapeOverflow { shape: self.to_array() })
    }
}

/// Elements from one entry of an axis to the next; features are always contiguous. 0 repeats an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// From one item to the next.
    pub batch: usize,
    /// From one head to the next.
    pub heads: usize,
    /// From one position to the next.
    pub len: usize,
}

impl Strides {
    fn at(self, batch: usize, head: usize, row: usize) -> usize {
        batch * self.batch + head * self.heads + row * self.len
    }

    fn layout(self) -> Layout {
        if self.heads < self.len { Layout::Bshd } else { Layout::Bhsd }
    }
}

/// The sizes of a packed tensor of so many elements, if the offsets are those of its items.
fn packed_shape(
    offsets: &[usize],
    [heads, dim]: [usize; 2],
    elements: usize,
) -> Result<(Shape, Strides), Error> {
    let (Some(first), Some(last)) = (offsets.first(), offsets.last()) else {
        let expected = (1, "where each sequence begins, and the end");
        return Err(Error::Count { option: "offsets", expected, found: 0 });
    };
    let wrong = |index, expected, wrong| {
        Err(Error::Offsets { index, found: offsets[index], expected, wrong })
    };
    if *first != 0 {
        return wrong(0, 0, "not where the data begins");
    }
    let pairs = || offsets.windows(2).map(|pair| (pair[0], pair[1]));
    if let Some(i) = pairs().position(|(begin, end)| end < begin) {
        return wrong(i + 1, offsets[i], "before the beginning of its sequence");
    }
    let whole = Shape { batch: 1, heads, len: *last, dim };
    let needed = whole.elements()?;
    if needed != elements {
        return match elements.checked_div(heads * dim) {
            Some(rows) if elements == rows * heads * dim => {
                wrong(offsets.len() - 1, rows, "not the number of rows in the data")
            }
            _ => Err(Error::DataLength { needed, found: elements }),
        };
    }
    let len = pairs().map(|(begin, end)| end - begin).max().unwrap_or(0);
    let shape = Shape { batch: offsets.len() - 1, len, ..whole };
    Ok((shape, Strides { batch: 0, ..whole.dense(Layout::Bshd) }))
}

/// A borrowed tensor.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, E> {
    data: &'a [E],
    shape: Shape,
    strides: Strides,
    layout: Layout,
    /// Where each item begins, and the end, if they are packed.
    offsets: Option<&'a [usize]>,
}

impl<'a, E> View<'a, E> {
    /// `data [batch, heads, len, dim]`, dense.
    pub fn bhsd(data: &'a [E], [batch, heads, len, dim]: [usize; 4]) -> Result<Self, Error> {
        Self::dense(data, Shape { batch, heads, len, dim }, Layout::Bhsd)
    }

    /// `data [batch, len, heads, dim]`, dense.
    pub fn bshd(data: &'a [E], [batch, len, heads, dim]: [usize; 4]) -> Result<Self, Error> {
        Self::dense(data, Shape { batch, heads, len, dim }, Layout::Bshd)
    }

    /// One head: `data [len, dim]`, dense.
    pub fn matrix(data: &'a [E], [len, dim]: [usize; 2]) -> Result<Self, Error> {
        Self::bhsd(data, [1, 1, len, dim])
    }

    /// Sequences of different lengths one after another, `data [total, heads, dim]`, dense: item `b` is rows
    /// `offsets[b]..offsets[b + 1]`. The offsets ascend from 0 to the number of rows; a sequence may be empty.
    ///
    /// ```
    /// use regard::{Machine, Mask, Plan, Problem, View};
    /// let (data, offsets) = (vec![0.5f32; 9 * 2 * 8], [0, 4, 4, 9]); // 4, 0 and 5 positions of 2 heads
    /// let x = View::packed(&data, &offsets, [2, 8])?;
    /// let problem = Problem::new(&x, &x, &x).mask(Mask::causal());
    /// let output = Plan::new(problem, Machine::here())?.forward(x, x, x)?;
    /// assert_eq!(output.out.view().offsets(), Some(&offsets[..]));
    /// assert_eq!(output.lse.len(), 9 * 2);
    /// # Ok::<(), regard::Error>(())
    /// ```
    pub fn packed(data: &'a [E], offsets: &'a [usize], sizes: [usize; 2]) -> Result<Self, Error> {
        let (shape, strides) = packed_shape(offsets, sizes, data.len())?;
        Ok(Self { data, shape, strides, layout: Layout::Bshd, offsets: Some(offsets) })
    }

    fn dense(data: &'a [E], shape: Shape, layout: Layout) -> Result<Self, Error> {
        shape.elements()?; // the dense strides below cannot overflow
        Ok(Self { layout, ..Self::strided(data, shape, shape.dense(layout))? })
    }

    /// Any strides, for slices of larger tensors; a stride of 0 repeats an entry.
    pub fn strided(data: &'a [E], shape: Shape, strides: Strides) -> Result<Self, Error> {
        let needed = shape.reach(strides)?;
        if data.len() < needed {
            return Err(Error::DataLength { needed, found: data.len() });
        }
        Ok(Self { data, shape, strides, layout: strides.layout(), offsets: None })
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

    /// The order of the axes in memory.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Positions of an item.
    pub(crate) fn len(&self, batch: usize) -> usize {
        let own = |offsets: &[usize]| offsets[batch + 1] - offsets[batch];
        self.offsets.map_or(self.shape.len, own)
    }

    /// Positions of each item, if they are packed.
    pub(crate) fn lens(&self) -> Option<Arc<[usize]>> {
        self.offsets.map(|offsets| offsets.windows(2).map(|pair| pair[1] - pair[0]).collect())
    }

    /// The rows of all items as those of one, if they are packed.
    pub(crate) fn joined(self) -> Self {
        let Some(offsets) = self.offsets else { return self };
        let len = offsets.last().copied().unwrap_or(0);
        Self { shape: Shape { batch: 1, len, ..self.shape }, offsets: None, ..self }
    }

    /// The single rows of all items as the rows of one: `[batch, heads, 1, dim]` as `[1, heads, batch, dim]`.
    pub(crate) fn items_as_rows(self) -> Self {
        let Shape { batch, heads, dim, .. } = self.shape;
        let shape = Shape { batch: 1, heads, len: batch, dim };
        let strides = Strides { batch: 0, heads: self.strides.heads, len: self.strides.batch };
        Self { shape, strides, ..self }
    }

    /// The features of one position.
    #[must_use]
    pub fn row(&self, batch: usize, head: usize, row: usize) -> &'a [E] {
        self.head(batch, head).row(row)
    }

    /// The head that serves item `batch` and head `head`, where axes of size 1 serve all.
    pub(crate) fn serving_head(&self, batch: usize, head: usize) -> Rows<'a, E> {
        self.head(serving(batch, self.shape.batch), serving(head, self.shape.heads))
    }

    /// One head as a matrix.
    pub(crate) fn head(&self, batch: usize, head: usize) -> Rows<'a, E> {
        assert!(batch < self.shape.batch && head < self.shape.heads);
        let (len, dim) = (self.len(batch), self.shape.dim);
        let before = self.offsets.map_or(0, |offsets| offsets[batch]);
        let data = if len == 0 || dim == 0 {
            &[]
        } else {
            let first = self.strides.at(batch, head, before);
            &self.data[first..first + (len - 1) * self.strides.len + dim]
        };
        Rows { data, stride: self.strides.len, len, dim }
    }
}

/// The entry of an axis of size `n` that serves entry `i`: an axis of size 1 serves all.
#[inline(always)]
pub(crate) fn serving(i: usize, n: usize) -> usize {
    if n == 1 { 0 } else { i }
}

/// One head: `len` rows of `dim` features, `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a, E> {
    pub(crate) data: &'a [E],
    pub(crate) stride: usize,
    pub(crate) len: usize,
    pub(crate) dim: usize,
}

impl<'a, E> Rows<'a, E> {
    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> &'a [E] {
        debug_assert!(i < self.len);
        if self.dim == 0 {
            return &[]; // no memory stands behind such a row
        }
        &self.data[i * self.stride..][..self.dim]
    }

    /// Rows `start..start + len`.
    #[inline(always)]
    pub(crate) fn slice(&self, start: usize, len: usize) -> Self {
        if self.dim == 0 || len == 0 {
            return Self { data: &[], len, ..*self };
        }
        let data = &self.data[start * self.stride..][..(len - 1) * self.stride + self.dim];
        Self { data, len, ..*self }
    }
}

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

    /// Sequences of different lengths one after another, `data [total, heads, dim]`, dense: see [`View::packed`].
    pub fn packed(
        data: &'a mut [E],
        offsets: &'a [usize],
        sizes: [usize; 2],
    ) -> Result<Self, Error> {
        let (shape, strides) = packed_shape(offsets, sizes, data.len())?;
        let (data, offsets) = (data.as_mut_ptr().cast(), Some(offsets));
        Ok(Self { data, shape, strides, offsets, written: true, memory: PhantomData })
    }

    /// Any strides that keep the elements apart.
    pub fn strided(data: &'a mut [E], shape: Shape, strides: Strides) -> Result<Self, Error> {
        // SAFETY: the kernels only ever write initialised elements through the wider type.
        let data = unsafe { &mut *(std::ptr::from_mut(data) as *mut [MaybeUninit<E>]) };
        Ok(Self { written: true, ..Self::unwritten(data, shape, strides)? })
    }

    pub(crate) fn unwritten(
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
            let all = Heads { head: 0, apart: 1, parts: 0..heads };
            // SAFETY: `self` is borrowed for this call alone, no two tasks have a row of an item in common, and all
            // elements have values.
            task(memory, b, unsafe { view.tile(b, all, rows) });
        });
    }

    /// Cuts rows into tiles for tasks, in the order of items, of `groups` groups of neighbouring heads, and of the ranges that
    /// the rows of an item are cut into, which ascend. Tiles have a part for each head.
    pub(crate) fn divide(
        &mut self,
        groups: usize,
        ranges: impl Fn(usize) -> Vec<Range<usize>>,
    ) -> Vec<TileMut<'_, E>> {
        assert!(self.written);
        let (view, Shape { batch, heads, .. }) = (&*self, self.shape);
        let group = heads.checked_div(groups).unwrap_or(0);
        let mut tiles = Vec::new();
        for b in 0..batch {
            let ranges = ranges(b);
            assert!(ranges.iter().all(|rows| rows.start <= rows.end));
            assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
            for (g, rows) in (0..groups).flat_map(|g| ranges.iter().map(move |rows| (g, rows))) {
                let rows = RowTile { first: rows.start, step: 1, count: rows.len() };
                let heads = Heads { head: g * group, apart: 1, parts: 0..group };
                // SAFETY: `self` is borrowed for as long as the tiles live, no two of them have a row of a head in common,
                // and all elements have values.
                tiles.push(unsafe { view.tile(b, heads, rows) });
            }
        }
        tiles
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
        let all = Heads { head: 0, apart: 1, parts: 0..self.shape.heads };
        // SAFETY: as the caller promises.
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
    pub(crate) unsafe fn tile(&self, batch: usize, heads: Heads, rows: RowTile) -> TileMut<'_, E> {
        // SAFETY: of all features, as the caller promises.
        unsafe { self.block(batch, heads, rows, 0..self.shape.dim) }
    }

    /// The same of some features alone.
    ///
    /// # Safety
    /// As for [`tile`](Self::tile), of these features.
    pub(crate) unsafe fn block(
        &self,
        batch: usize,
        heads: Heads,
        rows: RowTile,
        features: Range<usize>,
    ) -> TileMut<'_, E> {
        assert!(features.start <= features.end && features.end <= self.shape.dim);
        let (item, len) = self.item(batch);
        TileMut { view: self, item, len, heads, rows, features }
    }
}

/// Which heads a task writes: `head`, `head + apart`, ... for each of its parts.
#[derive(Clone, Debug)]
pub(crate) struct Heads {
    pub(crate) head: usize,
    pub(crate) apart: usize,
    pub(crate) parts: Range<usize>,
}

impl Heads {
    pub(crate) fn one(head: usize) -> Self {
        Self { head, apart: 0, parts: 0..1 }
    }
}

/// Rows that one task alone may touch.
#[derive(Debug)]
pub(crate) struct TileMut<'a, E> {
    view: &'a ViewMut<'a, E>,
    /// Where its item begins, in elements.
    item: usize,
    /// Positions of its item.
    len: usize,
    heads: Heads,
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
        let (heads, features) = (Heads::one(head), self.features.clone());
        TileMut { view: self.view, item: self.item, len: self.len, heads, rows, features }
    }

    /// The features of a row that has been written, to be changed.
    #[inline(always)]
    pub(crate) fn update(&mut self, part: usize, lane: usize) -> &mut [E] {
        let (data, dim) = self.place(part, lane);
        // SAFETY: as for `row` and `written` together.
        unsafe { std::slice::from_raw_parts_mut(data.cast(), dim) }
    }

    /// The features of row `lane` of the tile.
    #[inline(always)]
    pub(crate) fn row(&mut self, part: usize, lane: usize) -> &mut [MaybeUninit<E>] {
        let (data, dim) = self.place(part, lane);
        // SAFETY: `place` is in bounds, no two rows overlap, whoever made this tile promised to be the only one with
        // these rows, and `self` is borrowed for as long as the slice lives.
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
        // SAFETY: `item` is where an item of the shape begins, the other indices are below the sizes of that item, and the
        // features at most as many as a row has.
        (
            unsafe { self.view.data.add(self.item + self.view.strides.at(0, head, row) + start) },
            end - start,
        )
    }
}

/// Elements of a dense tensor, its items packed or not.
fn elements(shape: Shape, offsets: Option<&[usize]>) -> Result<usize, Error> {
    match offsets {
        Some(offsets) => {
            let len = offsets.last().copied().unwrap_or(0);
            Shape { batch: 1, len, ..shape }.elements()
        }
        None => shape.elements(),
    }
}

/// Strides of a dense tensor, its items packed or not.
fn strides(shape: Shape, layout: Layout, offsets: Option<&[usize]>) -> Strides {
    match offsets {
        Some(_) => Strides { batch: 0, ..shape.dense(Layout::Bshd) },
        None => shape.dense(layout),
    }
}

/// A tensor that owns its memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor<E> {
    data: Vec<E>,
    shape: Shape,
    layout: Layout,
    /// Where each item begins, and the end, if they are packed.
    offsets: Option<Arc<[usize]>>,
}

impl<E> Tensor<E> {
    /// Takes `data`, dense in `layout`.
    pub fn new(data: Vec<E>, shape: Shape, layout: Layout) -> Result<Self, Error> {
        let needed = shape.elements()?;
        if data.len() != needed {
            return Err(Error::DataLength { needed, found: data.len() });
        }
        Ok(Self { data, shape, layout, offsets: None })
    }

    /// Takes `data [total, heads, dim]`, sequences of different lengths one after another: see [`View::packed`].
    pub fn packed(data: Vec<E>, offsets: &[usize], sizes: [usize; 2]) -> Result<Self, Error> {
        let (shape, _) = packed_shape(offsets, sizes, data.len())?;
        Ok(Self { data, shape, layout: Layout::Bshd, offsets: Some(offsets.into()) })
    }

    /// All 0, of the shape and layout of another.
    pub(crate) fn zeros_like(view: &View<'_, E>) -> Result<Self, Error>
    where
        E: Element,
    {
        Self::zeros(view, view.shape.dim)
    }

    /// All 0, in the layout of another tensor, with as many features as asked for.
    pub(crate) fn zeros<F>(view: &View<'_, F>, dim: usize) -> Result<Self, Error>
    where
        E: Element,
    {
        let &View { shape, layout, offsets, .. } = view;
        let shape = Shape { dim, ..shape };
        let n = elements(shape, offsets)?;
        // Asked for twice: an answer may be no, and memory that is 0 from the start comes in one step only.
        let refused = |_| Error::ShapeOverflow { shape: shape.to_array() };
        Vec::<E>::new().try_reserve_exact(n).map_err(refused)?;
        let data = vec![E::narrow(E::Num::default()); n];
        Ok(Self { data, shape, layout, offsets: offsets.map(Into::into) })
    }

    /// Borrows it.
    #[must_use]
    pub fn view(&self) -> View<'_, E> {
        let Self { ref data, shape, layout, ref offsets } = *self;
        let offsets = offsets.as_deref();
        let strides = strides(shape, layout, offsets);
        View { data, shape, strides, layout, offsets }
    }

    /// Borrows it to be changed.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_, E> {
        let Self { ref mut data, shape, layout, ref offsets } = *self;
        let offsets = offsets.as_deref();
        let (data, strides) = (data.as_mut_ptr().cast(), strides(shape, layout, offsets));
        ViewMut { data, shape, strides, offsets, written: true, memory: PhantomData }
    }

    pub(crate) fn data_mut(&mut self) -> &mut [E] {
        &mut self.data
    }

    /// The elements in memory order.
    #[must_use]
    pub fn data(&self) -> &[E] {
        &self.data
    }

    /// Where each item begins, and the end, if they are packed.
    #[must_use]
    pub fn offsets(&self) -> Option<&[usize]> {
        self.offsets.as_deref()
    }

    /// Gives the memory back.
    #[must_use]
    pub fn into_data(self) -> Vec<E> {
        self.data
    }

    /// The sizes of the axes.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The order of the axes in memory.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }
}

/// A dense tensor whose elements have not been written yet.
#[derive(Debug)]
pub(crate) struct Unwritten<E> {
    data: Vec<E>,
    shape: Shape,
    layout: Layout,
    offsets: Option<Arc<[usize]>>,
}

impl<E> Unwritten<E> {
    /// In the layout of another tensor, with as many features as asked for.
    pub(crate) fn like<F>(view: &View<'_, F>, dim: usize) -> Result<Self, Error> {
        let View { shape, layout, offsets, .. } = *view;
        Self::of(Shape { dim, ..shape }, layout, offsets.map(Into::into))
    }

    fn of(shape: Shape, layout: Layout, offsets: Option<Arc<[usize]>>) -> Result<Self, Error> {
        let mut data = Vec::new();
        let refused = |_| Error::ShapeOverflow { shape: shape.to_array() };
        data.try_reserve_exact(elements(shape, offsets.as_deref())?).map_err(refused)?;
        Ok(Self { data, shape, layout, offsets })
    }

    /// Its rows, to be written.
    pub(crate) fn view(&mut self) -> Result<ViewMut<'_, E>, Error> {
        let Self { data, shape, layout, offsets } = self;
        let offsets = offsets.as_deref();
        let n = elements(*shape, offsets)?;
        let strides = strides(*shape, *layout, offsets);
        let data = &mut data.spare_capacity_mut()[..n];
        // All items as one, if they are packed.
        let len = offsets.and_then(<[_]>::last).copied();
        let whole = len.map_or(*shape, |len| Shape { batch: 1, len, ..*shape });
        Ok(ViewMut { shape: *shape, offsets, ..ViewMut::unwritten(data, whole, strides)? })
    }

    /// The tensor.
    ///
    /// # Safety
    /// Every row of every head and item must have been written.
    pub(crate) unsafe fn written(self) -> Tensor<E> {
        let Self { mut data, shape, layout, offsets } = self;
        // Counted by `of` before.
        let n = elements(shape, offsets.as_deref()).unwrap_or(0);
        // SAFETY: `of` has made room for `n` elements, and the caller promises that all rows were written.
        unsafe { data.set_len(n) };
        Tensor { data, shape, layout, offsets }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layouts_give_the_same_rows() {
        let shape = [2usize, 3, 4, 5];
        let [b, h, s, d] = shape;
        let value = |x: [usize; 4]| ((x[0] * h + x[1]) * s + x[2]) * d + x[3];
        let bhsd: Vec<usize> = (0..b * h * s * d).collect();
        let mut bshd = vec![0; bhsd.len()];
        for i in 0..b {
            for j in 0..h {
                for k in 0..s {
                    for l in 0..d {
                        bshd[((i * s + k) * h + j) * d + l] = value([i, j, k, l]);
                    }
                }
            }
        }
        let a = View::bhsd(&bhsd, shape).unwrap();
        let c = View::bshd(&bshd, [b, s, h, d]).unwrap();
        assert_eq!((a.layout(), c.layout()), (Layout::Bhsd, Layout::Bshd));
        for i in 0..b {
            for j in 0..h {
                for k in 0..s {
                    assert_eq!(a.row(i, j, k), c.row(i, j, k));
                }
            }
        }
    }

    #[test]
    fn short_memory_and_huge_shapes_are_errors() {
        let data = [0f32; 10];
        let short = View::bhsd(&data, [1, 1, 4, 3]).unwrap_err();
        assert_eq!(short, Error::DataLength { needed: 12, found: 10 });
        let huge = View::bhsd(&data, [usize::MAX, 2, 4, 3]).unwrap_err();
        assert_eq!(huge, Error::ShapeOverflow { shape: [usize::MAX, 2, 4, 3] });
        let shape = Shape { batch: 2, heads: 2, len: 2, dim: 2 };
        let far = Strides { batch: usize::MAX / 2, heads: usize::MAX, len: 3 };
        assert!(matches!(View::strided(&data, shape, far), Err(Error::ShapeOverflow { .. })));
        assert!(View::bhsd(&data, [0, usize::MAX, 4, 3]).is_ok());
    }

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
