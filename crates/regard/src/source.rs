//! Where keys and values come from: a tensor, or the pages of a cache. The kernels see one head at a time, as [`Head`].

use crate::cache::{KvCache, Paged, Sequence};
use crate::simd::Element;
use crate::view::{Rows, View};

/// The keys, or the values, of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source<'c, E: Element> {
    Tensor(View<'c, E>),
    /// Item by item the positions that a sequence holds.
    Cache {
        cache: &'c KvCache<E>,
        sequences: &'c [Sequence],
        values: bool,
    },
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
    pub(crate) fn head(&self, batch: usize, head: usize) -> Head<'c, E> {
        match *self {
            Self::Tensor(view) => Head::Rows(view.head(batch, head)),
            Self::Cache { cache, sequences, values } => {
                let paged = cache.paged(sequences[batch], head);
                // Checked when the call began; a sequence that is not there has no rows.
                paged.map_or(Head::Rows(Rows { data: &[], stride: 0, len: 0, dim: 0 }), |both| {
                    Head::Paged(both[usize::from(values)])
                })
            }
        }
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
                Some(Rows { data, stride: paged.dim, len, dim: paged.dim })
            }
        }
    }
}
