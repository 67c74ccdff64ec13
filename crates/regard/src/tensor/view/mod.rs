//! Tensors as they lie in the caller's memory: a checked borrow, no copy.
//!
//! A [`View`] is four axes, batch, heads, length and features, over a slice. The features of one position are
//! contiguous; the other strides are free, so `[batch, heads, len, dim]` and `[batch, len, heads, dim]` are the same
//! to everything below. The kernels see one head at a time, as [`Rows`].
//!
//! Items of different lengths may lie one after another, `[total, heads, dim]`, with the offsets at which they begin and
//! end: such a tensor is packed, and the length in its shape is that of the longest item.

mod tensor;
mod write;

use crate::error::Error;
use crate::machine::simd::{Any, Element, Family, covariant, map_any};
use std::marker::PhantomData;
use std::sync::Arc;
pub use tensor::Tensor;
pub(crate) use tensor::Unwritten;
pub use write::ViewMut;
pub(crate) use write::{OutTile, OutView, TileHeads, TileMut, TilesMut};

/// The order in which the axes lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `[batch, heads, len, dim]`
    Bhsd,
    /// `[batch, len, heads, dim]`
    Bshd,
}

/// Sizes of the four axes, whatever their order in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

    /// Refuses a tensor of another shape than the one `of` somebody.
    pub(crate) fn unless_same(
        self,
        of: &'static str,
        name: &'static str,
        found: Self,
    ) -> Result<(), Error> {
        let axes = ["batch", "heads", "length", "features"];
        let both = self.to_array().into_iter().zip(found.to_array());
        axes.into_iter()
            .zip(both)
            .try_for_each(|(axis, (a, b))| Error::unless_same(axis, (of, a), (name, b)))
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
        // At most `elements` if there is a row of this size; else 0, or more than can be counted.
        let each = heads.checked_mul(dim).filter(|each| *each > 0);
        return match each.map(|each| (elements / each, elements % each)) {
            Some((rows, 0)) => wrong(offsets.len() - 1, rows, "not the number of rows in the data"),
            _ => Err(Error::DataLength { needed, found: elements }),
        };
    }
    let len = pairs().map(|(begin, end)| end - begin).max().unwrap_or(0);
    let shape = Shape { batch: offsets.len() - 1, len, ..whole };
    Ok((shape, Strides { batch: 0, ..whole.dense(Layout::Bshd) }))
}

/// Slices of elements.
#[derive(Clone, Copy, Debug)]
pub struct Slices<'a>(PhantomData<&'a ()>);

impl<'a> Family for Slices<'a> {
    type Of<T: Element> = &'a [T];
}

type Slice<'a, T> = &'a [T];
covariant!(
    #[derive(Clone, Copy, Debug)]
    /// The elements of a view.
    Data,
    Slices,
    Slice
);

/// A borrowed tensor.
#[derive(Clone, Copy, Debug)]
pub struct View<'a, E: Element> {
    /// Elements of type `E`, unless the view is [erased](Self::erase).
    data: Data<'a, E::Num>,
    shape: Shape,
    strides: Strides,
    layout: Layout,
    /// Where each item begins, and the end, if they are packed.
    offsets: Option<&'a [usize]>,
    element: PhantomData<E>,
}

impl<'a, E: Element> View<'a, E> {
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
    /// let output = Plan::new(problem, Machine::detect())?.forward(x, x, x)?;
    /// assert_eq!(output.out.view().offsets(), Some(&offsets[..]));
    /// assert_eq!(output.lse.len(), 9 * 2);
    /// # Ok::<(), regard::Error>(())
    /// ```
    pub fn packed(data: &'a [E], offsets: &'a [usize], sizes: [usize; 2]) -> Result<Self, Error> {
        let (shape, strides) = packed_shape(offsets, sizes, data.len())?;
        let (data, element) = (E::erase(data).into(), PhantomData);
        Ok(Self { data, shape, strides, layout: Layout::Bshd, offsets: Some(offsets), element })
    }

    /// The same elements for kernels, which are compiled for what they compute in: its type says that alone.
    pub(crate) fn erase(self) -> View<'a, E::Num> {
        let Self { data, shape, strides, layout, offsets, .. } = self;
        View { data, shape, strides, layout, offsets, element: PhantomData }
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
        let (data, layout) = (E::erase(data).into(), strides.layout());
        Ok(Self { data, shape, strides, layout, offsets: None, element: PhantomData })
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

    /// The first features of each row, in the same memory. In latent attention (MLA, DeepSeek-V2 2024) values are the first features
    /// of their keys.
    ///
    /// ```
    /// use regard::{Machine, Plan, Problem, View};
    /// let (latent, query) = (vec![0.5f32; 20 * 72], vec![0.5; 16 * 72]);
    /// let k = View::bhsd(&latent, [1, 1, 20, 72])?; // one key head
    /// let v = k.first_features(64)?;
    /// let q = View::bhsd(&query, [1, 16, 1, 72])?;
    /// let out = Plan::new(Problem::new(&q, &k, &v), Machine::detect())?.forward(q, k, v)?.out;
    /// assert_eq!(out.shape().to_array(), [1, 16, 1, 64]);
    /// # Ok::<(), regard::Error>(())
    /// ```
    pub fn first_features(self, dim: usize) -> Result<Self, Error> {
        Error::unless_below("features", dim, self.shape.dim + 1)?;
        Ok(Self { shape: Shape { dim, ..self.shape }, ..self })
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
    ///
    /// # Panics
    /// For an item, head or position that is not there.
    #[must_use]
    pub fn row(&self, batch: usize, head: usize, row: usize) -> &'a [E] {
        self.head(batch, head).row(row)
    }

    /// One head as a matrix.
    pub(crate) fn head(&self, batch: usize, head: usize) -> Rows<'a, E> {
        match E::typed::<RowsOf<'a>>(self.any_head(batch, head)) {
            Some(rows) => rows,
            None => unreachable!("only kernels have erased views, and they read any head"),
        }
    }

    /// The head that serves item `batch` and head `head`, where axes of size 1 serve all.
    pub(crate) fn serving_head(&self, batch: usize, head: usize) -> Any<RowsOf<'a>, E::Num> {
        self.any_head(serving(batch, self.shape.batch), serving(head, self.shape.heads))
    }

    /// One head as a matrix of elements of any type.
    pub(crate) fn any_head(&self, batch: usize, head: usize) -> Any<RowsOf<'a>, E::Num> {
        assert!(batch < self.shape.batch && head < self.shape.heads);
        let (len, dim) = (self.len(batch), self.shape.dim);
        let before = self.offsets.map_or(0, |offsets| offsets[batch]);
        let used = if len == 0 || dim == 0 {
            0..0
        } else {
            let first = self.strides.at(batch, head, before);
            first..first + (len - 1) * self.strides.len + dim
        };
        map_any!(Any::from(self.data), data => Rows { data: &data[used], stride: self.strides.len, len, dim })
    }
}

/// q, k and v of one call.
pub type Inputs<'a, E> = (View<'a, E>, View<'a, E>, View<'a, E>);

/// The entry of an axis of size `n` that serves entry `i`: an axis of size 1 serves all.
#[inline(always)]
pub(crate) fn serving(i: usize, n: usize) -> usize {
    if n == 1 { 0 } else { i }
}

/// Heads as matrices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowsOf<'a>(PhantomData<&'a ()>);

impl<'a> Family for RowsOf<'a> {
    type Of<T: Element> = Rows<'a, T>;
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
    pub(crate) fn none() -> Self {
        Self { data: &[], stride: 0, len: 0, dim: 0 }
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layouts_give_the_same_rows() {
        let shape = [2usize, 3, 4, 5];
        let [b, h, s, d] = shape;
        let value = |x: [usize; 4]| ((x[0] * h + x[1]) * s + x[2]) * d + x[3];
        let bhsd: Vec<f64> = (0..b * h * s * d).map(|i| i as f64).collect();
        let mut bshd = vec![0.0; bhsd.len()];
        for i in 0..b {
            for j in 0..h {
                for k in 0..s {
                    for l in 0..d {
                        bshd[((i * s + k) * h + j) * d + l] = value([i, j, k, l]) as f64;
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
}
