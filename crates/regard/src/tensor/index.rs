//! Index types: a head, a (query, key) pair, a tile of rows, the lanes of a group, the keys of a tile.

use crate::machine::simd::{GROUP, Number, Simd};
use std::iter::StepBy;
use std::ops::Range;

/// One query head of one batch item, and the sizes of its score matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scope {
    /// Batch item.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Number of queries.
    pub q_len: usize,
    /// Number of keys.
    pub k_len: usize,
    /// Row `i` has position `i + offset` on the key axis.
    pub offset: i64,
}

impl Scope {
    /// Position of a row on the key axis; may be outside the keys.
    #[must_use]
    pub fn position(&self, row: usize) -> i64 {
        signed(row).saturating_add(self.offset)
    }

    /// `key - position`
    pub(crate) fn distance(&self, row: usize, key: usize) -> i64 {
        key.cast_signed() as i64 - self.position(row)
    }
}

/// A size as a signed distance. Saturates: `i64::MAX` is farther than any key.
pub(crate) fn signed(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// A (query, key) pair of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pair {
    /// Batch item.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Index of the query.
    pub row: usize,
    /// Index of the key.
    pub key: usize,
}

/// Keys per block. 64 keys of 64 `f32` features take 16 KiB, a third of a 48 KiB L1 cache, so the keys and values of a block
/// stay there while several groups of rows use them. Block sizes from 32 to 256 measured within 3 %.
pub(crate) const BLOCK_KEYS: usize = 64;

/// A set of rows of a tile, one bit per row.
pub(crate) type LaneSet = u128;

/// The set of lanes `start..end`.
#[inline(always)]
pub(crate) fn lane_range(start: usize, end: usize) -> LaneSet {
    let below = |n: usize| if n >= 128 { LaneSet::MAX } else { (1 << n) - 1 };
    below(end) & !below(start)
}

/// Rows that are computed together: `first`, `first + step`, ...; at most 128 rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowTile {
    pub(crate) first: usize,
    pub(crate) step: usize,
    pub(crate) count: usize,
}

impl RowTile {
    pub(crate) const NONE: Self = Self { first: 0, step: 1, count: 0 };

    #[inline(always)]
    pub(crate) fn row(self, lane: usize) -> usize {
        self.first + lane * self.step
    }

    /// Number of groups of up to `GROUP` rows.
    pub(crate) fn groups(self) -> usize {
        self.count.div_ceil(GROUP)
    }

    /// The rows of group `g`.
    pub(crate) fn group(self, g: usize) -> Self {
        let Self { first, step, count } = self;
        let skipped = g * GROUP;
        Self { first: first + skipped * step, step, count: (count - skipped).min(GROUP) }
    }

    pub(crate) fn lanes(self) -> LaneSet {
        lane_range(0, self.count)
    }

    pub(crate) fn lanes_where(self, holds: impl Fn(usize) -> bool) -> LaneSet {
        (0..self.count).filter(|lane| holds(self.row(*lane))).fold(0, |set, lane| set | 1 << lane)
    }
}

/// A tile of rows of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeadRows {
    pub(crate) scope: Scope,
    pub(crate) rows: RowTile,
}

impl HeadRows {
    /// Group `g` of its rows.
    pub(crate) fn group(self, g: usize) -> Self {
        Self { rows: self.rows.group(g), ..self }
    }
}

/// A range of lanes of a group. `start` is a multiple of the widest vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: usize,
    /// Exclusive.
    pub(crate) end: usize,
}

impl Span {
    /// The first `count` lanes.
    #[inline(always)]
    pub(crate) fn first(count: usize) -> Self {
        Self { start: 0, end: count }
    }

    /// The first lane of each vector of the span.
    #[inline(always)]
    pub(crate) fn vectors<N: Number, S: Simd<N>>(self) -> StepBy<Range<usize>> {
        (self.start..self.end).step_by(S::LANES)
    }

    #[inline(always)]
    pub(crate) fn len(self) -> usize {
        self.end - self.start
    }

    /// The lanes as a bit set.
    #[inline(always)]
    pub(crate) fn set(self) -> RowMask {
        RowMask::MAX >> (GROUP - self.len()) << self.start
    }
}

/// The rows of a group for which a key is visible, one bit per row.
pub(crate) type RowMask = u64;

/// The low 32 bits, which contain the lanes of the first vector.
#[expect(clippy::cast_possible_truncation, reason = "a vector has at most 32 lanes")]
#[inline(always)]
pub(crate) fn low(visible: RowMask) -> u32 {
    visible as u32
}

/// The keys of a tile.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Keys<'t> {
    /// Consecutive keys from this index on.
    From(usize),
    /// Indices of gathered keys.
    Gathered(&'t [usize]),
}

impl Keys<'_> {
    #[inline(always)]
    pub(crate) fn get(&self, i: usize) -> usize {
        match self {
            Self::From(first) => first + i,
            Self::Gathered(keys) => keys[i],
        }
    }

    /// The keys from the `n`-th on.
    pub(crate) fn skip(self, n: usize) -> Self {
        match self {
            Self::From(first) => Self::From(first + n),
            Self::Gathered(keys) => Self::Gathered(&keys[n..]),
        }
    }
}

/// Coordinates of a score tile `[keys][rows]`: a group of rows and some keys of one head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At<'t> {
    pub(crate) scope: Scope,
    /// The rows of the group, at most `GROUP`.
    pub(crate) rows: RowTile,
    /// The lanes that are computed.
    pub(crate) span: Span,
    pub(crate) keys: Keys<'t>,
}

impl At<'_> {
    /// The pair of the `i`-th key of the tile and the row in `lane`.
    #[inline(always)]
    pub(crate) fn pair(&self, i: usize, lane: usize) -> Pair {
        let Scope { batch, head, .. } = self.scope;
        Pair { batch, head, row: self.rows.row(lane), key: self.keys.get(i) }
    }
}
