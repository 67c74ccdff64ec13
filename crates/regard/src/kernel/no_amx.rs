//! Stands in for `amx` on targets without AMX, where no plan uses it.

use crate::description::problem::Dims;
use crate::kernel::block_loop::Call;
use crate::machine::simd::{AmxKernel, Number};

/// Sizes of packed operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) terms: usize,
    v_dim: usize,
}

impl Sizes {
    pub(crate) fn new(terms: usize, _: usize, v_dim: usize) -> Self {
        Self { terms, v_dim }
    }

    pub(crate) fn padded(self) -> usize {
        self.v_dim
    }
}

/// Packed keys and values.
#[derive(Debug)]
pub(crate) enum PackedKv {}

/// Packs keys and values.
pub(crate) struct PackKv<'t, 'c, N: Number> {
    pub(crate) sizes: Sizes,
    pub(crate) call: &'t Call<'c, N>,
    pub(crate) items: &'t [usize],
    pub(crate) threads: usize,
}

impl<'t, 'c> AmxKernel for PackKv<'t, 'c, f32> {
    type Task<N: Number> = PackKv<'t, 'c, N>;
    type Out = Option<PackedKv>;
}

/// Memory of one thread.
#[derive(Debug)]
pub(crate) struct AmxScratch(Sizes);

impl AmxScratch {
    pub(crate) fn new(sizes: Sizes, _: usize) -> Self {
        Self(sizes)
    }
}

/// Memory of one thread in the backward pass.
#[derive(Debug)]
pub(crate) struct AmxBackwardScratch(usize);

impl AmxBackwardScratch {
    pub(crate) fn new(terms: usize, _: Dims, _: usize, _: usize) -> Self {
        Self(terms)
    }

    pub(crate) fn padded(&self, keys: usize) -> (usize, usize) {
        (0, keys)
    }

    pub(crate) fn clear(&mut self) {}
}

/// Memory of one thread for decoding.
#[derive(Debug)]
pub(crate) struct AmxDecodeScratch;

impl AmxDecodeScratch {
    pub(crate) fn new(_: Sizes) -> Self {
        Self
    }

    pub(crate) fn fit(_: usize, _: usize, _: usize) -> bool {
        false
    }
}
