//! Where keys and values come from: a tensor, or the pages of a cache. The kernels read one head at a time, as [`AnyHead`].

use crate::machine::simd::{Any, Element, Family, Number, covariant, each, map_any};
use crate::tensor::cache::{KvCache, Paged, QuantizedHead, Sequence};
use crate::tensor::view::{Rows, RowsOf, View};
use std::marker::PhantomData;

/// Caches, borrowed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Caches<'c>(PhantomData<&'c ()>);

impl<'c> Family for Caches<'c> {
    type Of<T: Element> = &'c KvCache<T>;
}

type CacheOf<'c, T> = &'c KvCache<T>;
covariant!(
    #[derive(Clone, Copy, Debug)]
    /// A cache of elements of any type.
    AnyCache,
    Caches,
    CacheOf
);

/// The keys, or the values, of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source<'c, E: Element> {
    Tensor(View<'c, E>),
    /// Item `i` is the positions that `sequences[i]` holds.
    Cache {
        cache: AnyCache<'c, E::Num>,
        sequences: &'c [Sequence],
        values: bool,
    },
}

impl<'c, N: Number> Source<'c, N> {
    /// What sequences hold in a cache.
    pub(crate) fn cache<E: Element<Num = N>>(
        cache: &'c KvCache<E>,
        sequences: &'c [Sequence],
        values: bool,
    ) -> Self {
        let cache = E::erase::<Caches<'c>>(cache).into();
        Self::Cache { cache, sequences, values }
    }
}

impl<'c, E: Element> Source<'c, E> {
    /// The tensor, if it is one.
    pub(crate) fn tensor(&self) -> Option<View<'c, E>> {
        match self {
            Self::Tensor(view) => Some(*view),
            Self::Cache { .. } => None,
        }
    }

    /// One head of one item.
    pub(crate) fn head(&self, batch: usize, head: usize) -> KvHead<'c, E::Num> {
        match *self {
            Self::Tensor(view) => KvHead::Elements(rows(view.any_head(batch, head))),
            Self::Cache { cache, sequences, values } => {
                let (sequence, part) = (sequences[batch], usize::from(values));
                let quantized =
                    each!(Any::from(cache), cache => cache.quantized_head(sequence, head));
                if let Ok(Some(both)) = quantized {
                    return KvHead::Quantized(both[part]);
                }
                KvHead::Elements(map_any!(Any::from(cache), cache => {
                    let paged = cache.paged(sequence, head);
                    // The plan checked the sequences; one that is not in the cache has no rows.
                    paged.map_or(Head::Rows(Rows::none()), |both| Head::Paged(both[part]))
                }))
            }
        }
    }
}

/// The keys or the values of a head.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KvHead<'c, N: Number> {
    Elements(AnyHead<'c, N>),
    /// In 8 bits, which are computed in `f32`.
    Quantized(QuantizedHead<'c>),
}

impl<'c, N: Number> KvHead<'c, N> {
    /// The same where nothing is in 8 bits: AMX, the backward pass.
    pub(crate) fn elements(self) -> AnyHead<'c, N> {
        match self {
            Self::Elements(head) => head,
            Self::Quantized(_) => {
                unreachable!("a plan for a cache in 8 bits uses vectors, and has no backward pass")
            }
        }
    }

    /// Features of a row.
    pub(crate) fn dim(&self) -> usize {
        match self {
            Self::Elements(head) => head.dim(),
            Self::Quantized(head) => head.dim,
        }
    }
}

/// Heads, wherever their rows lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads<'c>(PhantomData<&'c ()>);

impl<'c> Family for Heads<'c> {
    type Of<T: Element> = Head<'c, T>;
}

/// One head of elements of any type.
pub(crate) type AnyHead<'c, N> = Any<Heads<'c>, N>;

/// A matrix as a head.
pub(crate) fn rows<'c, N: Number>(rows: Any<RowsOf<'c>, N>) -> AnyHead<'c, N> {
    map_any!(rows, rows => Head::Rows(rows))
}

impl<'c, N: Number> AnyHead<'c, N> {
    /// Rows.
    pub(crate) fn len(&self) -> usize {
        each!(self, head => head.len())
    }

    /// Features of a row.
    pub(crate) fn dim(&self) -> usize {
        each!(self, head => head.dim())
    }

    /// Feature `d` of row `i`, widened.
    pub(crate) fn number(&self, i: usize, d: usize) -> N {
        each!(self, head => N::from_f64(Number::to_f64(head.row(i)[d].widen())))
    }
}

/// One head: rows of features, wherever they lie.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Head<'c, E> {
    Rows(Rows<'c, E>),
    Paged(Paged<'c, E>),
}

impl<'c, E> Head<'c, E> {
    /// Rows.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Rows(rows) => rows.len,
            Self::Paged(paged) => paged.len,
        }
    }

    /// Features of a row.
    pub(crate) fn dim(&self) -> usize {
        match self {
            Self::Rows(rows) => rows.dim,
            Self::Paged(paged) => paged.dim,
        }
    }

    /// The features of row `i`.
    #[inline(always)]
    pub(crate) fn row(&self, i: usize) -> &'c [E] {
        match self {
            Self::Rows(rows) => rows.row(i),
            Self::Paged(paged) => paged.row(i),
        }
    }

    /// Rows `first..first + len`, if they lie a fixed distance apart.
    #[inline(always)]
    pub(crate) fn run(&self, first: usize, len: usize) -> Option<Rows<'c, E>> {
        match self {
            Self::Rows(rows) => Some(rows.slice(first, len)),
            Self::Paged(paged) => {
                let data = paged.run(first, len)?;
                Some(Rows { data, stride: paged.stride, len, dim: paged.dim })
            }
        }
    }
}
