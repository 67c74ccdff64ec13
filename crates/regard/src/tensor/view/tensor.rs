//! Tensors that own their memory.

use super::{Layout, Shape, Strides, View, ViewMut, packed_shape};
use crate::error::Error;
use crate::machine::memory::use_large_pages;
use crate::machine::simd::Element;
use std::marker::PhantomData;
use std::sync::Arc;

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

    /// All 0, in the layout of another tensor and packed if that is, with `dim` features.
    pub fn zeros<F: Element>(view: &View<'_, F>, dim: usize) -> Result<Self, Error>
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
    pub fn view(&self) -> View<'_, E>
    where
        E: Element,
    {
        let Self { ref data, shape, layout, ref offsets } = *self;
        let offsets = offsets.as_deref();
        let strides = strides(shape, layout, offsets);
        View {
            data: E::erase(&data[..]).into(),
            shape,
            strides,
            layout,
            offsets,
            element: PhantomData,
        }
    }

    /// Borrows it to be changed.
    #[must_use]
    pub fn view_mut(&mut self) -> ViewMut<'_, E> {
        let Self { ref mut data, shape, layout, ref offsets } = *self;
        let offsets = offsets.as_deref();
        let strides = strides(shape, layout, offsets);
        // SAFETY: `new`, `packed` and `zeros` have made the data as long as shape and offsets say, and it is dense.
        unsafe { ViewMut::of_checked(data, (shape, strides), offsets) }
    }

    /// The elements in memory order, to be changed.
    #[must_use]
    pub fn data_mut(&mut self) -> &mut [E] {
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
    pub(crate) fn like<F: Element>(view: &View<'_, F>, dim: usize) -> Result<Self, Error> {
        let View { shape, layout, offsets, .. } = *view;
        Self::of(Shape { dim, ..shape }, layout, offsets.map(Into::into))
    }

    fn of(shape: Shape, layout: Layout, offsets: Option<Arc<[usize]>>) -> Result<Self, Error> {
        let mut data = Vec::new();
        let refused = |_| Error::ShapeOverflow { shape: shape.to_array() };
        data.try_reserve_exact(elements(shape, offsets.as_deref())?).map_err(refused)?;
        use_large_pages(data.spare_capacity_mut());
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
        let whole = ViewMut::unwritten(data, whole, strides)?;
        // SAFETY: `whole` has as many rows as the last of the `offsets` says, or is of this shape.
        Ok(unsafe { whole.of_items(*shape, offsets) })
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
