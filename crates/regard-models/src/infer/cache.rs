//! The KV cache of a layer, in the type that the model asks for.

use crate::error::Error;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use regard::cache::{CacheShape, Quantization};
use regard::{Element, KvCache, Sequence, View};
use safetensors::Dtype;
use std::ops::Range;

/// The type of numbers in a KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvDtype {
    /// As exact as the model computes.
    #[default]
    F32,
    /// Half the memory; keys, values and queries have 8 significant bits. On AMX faster over long contexts.
    Bf16,
    /// A little more than a quarter of the memory: integers from -127 to 127 with a scale for each key and value of a head. Queries stay f32.
    Int8,
    /// A quarter of the memory: numbers of 4 significant bits (OCP E4M3), at most 448. Queries stay f32.
    Fp8E4m3,
}

impl KvDtype {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::F32, Self::Bf16, Self::Int8, Self::Fp8E4m3];

    /// As `f32`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => f32::NAME,
            Self::Bf16 => bf16::NAME,
            Self::Int8 => Quantization::Int8.name(),
            Self::Fp8E4m3 => Quantization::Fp8E4m3.name(),
        }
    }
}

/// The cache of one layer.
#[derive(Debug)]
pub(super) enum LayerCache {
    /// Of numbers, or in 8 bits.
    F32(KvCache<f32>),
    Bf16(KvCache<bf16>),
}

/// The same of a cache of either type.
macro_rules! of {
    ($self:expr, $cache:ident => $do:expr) => {
        match $self {
            LayerCache::F32($cache) => $do,
            LayerCache::Bf16($cache) => $do,
        }
    };
}

impl LayerCache {
    pub(super) fn new(dtype: KvDtype, shape: CacheShape, budget: usize) -> Result<Self, Error> {
        let in_8_bits = |quantization| KvCache::quantized(shape, quantization, budget);
        Ok(match dtype {
            KvDtype::Int8 => Self::F32(in_8_bits(Quantization::Int8)?),
            KvDtype::Fp8E4m3 => Self::F32(in_8_bits(Quantization::Fp8E4m3)?),
            KvDtype::F32 => Self::F32(KvCache::new(shape, budget)?),
            KvDtype::Bf16 => Self::Bf16(KvCache::new(shape, budget)?),
        })
    }

    pub(super) fn start(&mut self) -> Result<Sequence, Error> {
        Ok(of!(self, cache => cache.start())?)
    }

    pub(super) fn fork(&mut self, sequence: Sequence) -> Result<Sequence, Error> {
        Ok(of!(self, cache => cache.fork(sequence))?)
    }

    pub(super) fn free(&mut self, sequence: Sequence) -> Result<(), Error> {
        Ok(of!(self, cache => cache.free(sequence))?)
    }

    pub(super) fn truncate(&mut self, sequence: Sequence, len: usize) -> Result<(), Error> {
        Ok(of!(self, cache => cache.truncate(sequence, len))?)
    }

    /// The type of its numbers, as files name it, and the sizes `[heads, dim]` of a position. What is in 8 bits is an `f32`, and is stored
    /// as it was when it is appended again.
    pub(super) fn layout(&self) -> (Dtype, [usize; 2]) {
        let dtype = match self {
            Self::F32(_) => Dtype::F32,
            Self::Bf16(_) => Dtype::BF16,
        };
        (dtype, of!(self, cache => [cache.shape().heads, cache.shape().qk_dim]))
    }

    /// Pages, and positions in each.
    pub(super) fn pages(&self) -> [usize; 2] {
        of!(self, cache => [cache.capacity(), cache.shape().page])
    }

    /// Appends rows `[rows, heads, dim]` of keys and of values.
    pub(super) fn append(
        &mut self,
        sequence: Sequence,
        rows: [&[f32]; 2],
        [heads, dim]: [usize; 2],
    ) -> Result<(), Error> {
        match self {
            Self::F32(cache) => append(cache, sequence, rows, [heads, dim]),
            Self::Bf16(cache) => {
                let [k, v] = rows.map(|rows| {
                    let mut narrow = Vec::new();
                    narrow_into(rows, &mut narrow);
                    narrow
                });
                append(cache, sequence, [&k, &v], [heads, dim])
            }
        }
    }

    /// The same of the bytes of such rows, which [`bytes`](Self::bytes) has given.
    pub(super) fn append_bytes(
        &mut self,
        sequence: Sequence,
        rows: [&[u8]; 2],
        sizes: [usize; 2],
    ) -> Result<(), Error> {
        match self {
            Self::F32(cache) => {
                let rows = rows.map(|rows| of_bytes(rows, f32::from_le_bytes));
                append(cache, sequence, rows.each_ref().map(Vec::as_slice), sizes)
            }
            Self::Bf16(cache) => {
                let rows = rows.map(|rows| of_bytes(rows, bf16::from_le_bytes));
                append(cache, sequence, rows.each_ref().map(Vec::as_slice), sizes)
            }
        }
    }

    /// Keys and values at these positions, `[positions, heads, dim]`, little-endian.
    pub(super) fn bytes(
        &self,
        sequence: Sequence,
        at: Range<usize>,
    ) -> Result<[Vec<u8>; 2], Error> {
        match self {
            Self::F32(cache) => bytes(cache, sequence, at, f32::to_le_bytes),
            Self::Bf16(cache) => bytes(cache, sequence, at, |x| bf16::from_f32(x).to_le_bytes()),
        }
    }

    /// The keys of a sequence, `[heads, length, dim]`.
    pub(super) fn keys(&self, sequence: Sequence) -> Result<Vec<f32>, Error> {
        of!(self, cache => rows(cache, sequence, 0))
    }

    /// The values of a sequence, `[heads, length, dim]`.
    pub(super) fn values(&self, sequence: Sequence) -> Result<Vec<f32>, Error> {
        of!(self, cache => rows(cache, sequence, 1))
    }
}

fn append<E: Element>(
    cache: &mut KvCache<E>,
    sequence: Sequence,
    [k, v]: [&[E]; 2],
    [heads, dim]: [usize; 2],
) -> Result<(), Error> {
    let view = |rows| View::bshd(rows, [1, k.len() / (heads * dim).max(1), heads, dim]);
    Ok(cache.append(sequence, view(k)?, view(v)?)?)
}

fn of_bytes<E, const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> E) -> Vec<E> {
    bytes.as_chunks().0.iter().map(|bytes| number(*bytes)).collect()
}

fn bytes<E: Element<Num = f32>, const N: usize>(
    cache: &KvCache<E>,
    sequence: Sequence,
    at: Range<usize>,
    bytes: impl Fn(f32) -> [u8; N],
) -> Result<[Vec<u8>; 2], Error> {
    let mut both = [Vec::new(), Vec::new()];
    for position in at {
        for head in 0..cache.shape().heads {
            for (list, row) in both.iter_mut().zip(cache.numbers(sequence, head, position)?) {
                list.extend(row.iter().flat_map(|x| bytes(*x)));
            }
        }
    }
    Ok(both)
}

/// Keys or values, the first or second of each position.
fn rows<E: Element<Num = f32>>(
    cache: &KvCache<E>,
    sequence: Sequence,
    which: usize,
) -> Result<Vec<f32>, Error> {
    let (len, heads) = (cache.len(sequence)?, cache.shape().heads);
    let mut rows = Vec::new();
    for head in 0..heads {
        for position in 0..len {
            rows.extend(&cache.numbers(sequence, head, position)?[which]);
        }
    }
    Ok(rows)
}

/// Rounds to the nearest.
pub(super) fn narrow_into(rows: &[f32], to: &mut Vec<bf16>) {
    to.resize(rows.len(), bf16::ZERO);
    to.convert_from_f32_slice(rows);
}

/// Exact.
pub(super) fn widen_into(rows: &[bf16], to: &mut [f32]) {
    rows.convert_to_f32_slice(to);
}
