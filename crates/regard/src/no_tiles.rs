//! What stands in for `tiles` on targets that have none: no plan ever asks for it there.

use crate::block_loop::Call;
use crate::problem::Dims;
use crate::simd::{Element, TileTask};

/// Sizes of packed operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) limbs: usize,
    v_dim: usize,
}

impl Sizes {
    pub(crate) fn new(limbs: usize, _: usize, v_dim: usize) -> Self {
        Self { limbs, v_dim }
    }

    pub(crate) fn padded(self) -> usize {
        self.v_dim
    }
}

/// RowBuffer keys and values.
#[derive(Debug)]
pub(crate) enum Prepared {}

/// Packs keys and values.
pub(crate) struct Prepare<'t, 'c, E: Element> {
    pub(crate) sizes: Sizes,
    pub(crate) call: &'t Call<'c, E>,
    pub(crate) items: &'t [usize],
    pub(crate) threads: usize,
}

impl<E: Element> TileTask for Prepare<'_, '_, E> {
    type Stored = E;
    type Out = Option<Prepared>;

    fn limbs(&self) -> Option<usize> {
        None
    }
}

/// Memory of one thread.
#[derive(Debug)]
pub(crate) struct Room(Sizes);

impl Room {
    pub(crate) fn new(sizes: Sizes, _: usize) -> Self {
        Self(sizes)
    }

    pub(crate) fn limbs(&self) -> usize {
        self.0.limbs
    }
}

/// Memory of one thread in the backward pass.
#[derive(Debug)]
pub(crate) struct BackwardRoom(usize);

impl BackwardRoom {
    pub(crate) fn new(limbs: usize, _: Dims, _: usize, _: usize) -> Self {
        Self(limbs)
    }

    pub(crate) fn limbs(&self) -> usize {
        self.0
    }

    pub(crate) fn padded(&self, keys: usize) -> (usize, usize) {
        (0, keys)
    }

    pub(crate) fn clear(&mut self) {}
}

/// Memory of one thread for decoding.
#[derive(Debug)]
pub(crate) struct DecodeTiles;

impl DecodeTiles {
    pub(crate) fn new(_: Sizes) -> Self {
        Self
    }

    pub(crate) fn fit(_: usize, _: usize, _: usize) -> bool {
        false
    }
}
