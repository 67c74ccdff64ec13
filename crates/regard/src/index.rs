//! Names of places: a head, a pair, a tile of rows, lanes of a group, keys of a tile.

use crate::simd::{GROUP, Number, Simd};
use std::iter::StepBy;
use std::ops::Range;

/// Which head is asked about, and the sizes around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scope {
    /// The item of the batch.
    pub batch: usize,
    /// The query head.
    pub head: usize,
    /// Queries.
    pub q_len: usize,
    /// Keys.
    pub k_len: usize,
    /// Row `i` stands at key position `i + offset`.
    pub offset: i64,
}

impl Scope {
    /// Where a row stands among the keys; may lie outside them.
    #[must_use]
    pub fn position(&self, row: usize) -> i64 {
        signed(row).saturating_add(self.offset)
    }

    /// `key - position`
    pub(crate) fn distance(&self, row: usize, key: usize) -> i64 {
        key.cast_signed() as i64 - self.position(row)
    }
}

/// A size as a distance; what does not fit is farther than any key.
pub(crate) fn signed(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// A query and a key of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pair {
    /// The item of the batch.
    pub batch: usize,
    /// The query head.
    pub head: usize,
    /// The query.
    pub row: usize,
    /// The key.
    pub key: usize,
}

/// Keys of a block. 64 keys of 64 features are a third of a 48 KiB L1 cache, so keys and values of a block stay there
/// while several groups of rows pass over them; 32..256 measured within 3 %.
pub(crate) const BLOCK_KEYS: usize = 64;

/// A set of rows of a tile, one bit each.
pub(crate) type LaneSet = u128;

/// Lanes `start..end`.
#[inline(always)]
pub(crate) fn lane_range(start: usize, end: usize) -> LaneSet {
    let below = |n: usize| if n >= 128 { LaneSet::MAX } else { (1 << n) - 1 };
    below(end) & !below(start)
}

/// Rows that are computed together: `first`, `first + step`, ..., at most 128 of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowTile {
    pub(crate) first: usize,
    pub(crate) step: usize,
    pub(crate) count: usize,
}

impl RowTile {
    /// No rows.
    pub(crate) const NONE: Self = Self { first: 0, step: 1, count: 0 };

    #[inline(always)]
    pub(crate) fn row(self, lane: usize) -> usize {
        self.first + lane * self.step
    }

    /// Groups of rows that stand in the lanes together.
    pub(crate) fn groups(self) -> usize {
        self.count.div_ceil(GROUP)
    }

    /// The rows of one of them.
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

/// Neighbouring lanes of a group; starts at a whole vector of the widest instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// The first lane.
    pub(crate) start: usize,
    /// The lane after the last.
    pub(crate) end: usize,
}

impl Span {
    /// So many lanes, from the first on.
    #[inline(always)]
    pub(crate) fn first(count: usize) -> Self {
        Self { start: 0, end: count }
    }

    /// The first lane of each vector.
    #[inline(always)]
    pub(crate) fn vectors<N: Number, S: Simd<N>>(self) -> StepBy<Range<usize>> {
        (self.start..self.end).step_by(S::LANES)
    }

    /// How many lanes.
    #[inline(always)]
    pub(crate) fn len(self) -> usize {
        self.end - self.start
    }

    /// A bit for each of them.
    #[inline(always)]
    pub(crate) fn set(self) -> RowMask {
        RowMask::MAX >> (GROUP - self.len()) << self.start
    }
}

/// Which rows of a group see a key, one bit each.
pub(crate) type RowMask = u64;

/// The bits of the first vector.
#[expect(clippy::cast_possible_truncation, reason = "a vector has at most 32 lanes")]
#[inline(always)]
pub(crate) fn low(visible: RowMask) -> u32 {
    visible as u32
}

/// Which keys a tile holds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Keys<'t> {
    /// Neighbours, from this one on.
    From(usize),
    /// Gathered ones.
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

/// One group of rows against some keys: what is to be known of a tile of scores `[keys][rows]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct At<'t> {
    pub(crate) scope: Scope,
    /// The rows of the group, at most `GROUP`.
    pub(crate) rows: RowTile,
    /// Those of them that are computed.
    pub(crate) span: Span,
    /// The key of each row of the tile.
    pub(crate) keys: Keys<'t>,
}

impl At<'_> {
    /// A key of the tile and a row of the group.
    #[inline(always)]
    pub(crate) fn pair(&self, i: usize, lane: usize) -> Pair {
        let Scope { batch, head, .. } = self.scope;
        Pair { batch, head, row: self.rows.row(lane), key: self.keys.get(i) }
    }
}
