//! What a picture shows: numbers in rows and columns, and what stands beside them.

use std::ops::Range;

/// Weights of some queries (rows) for some keys (columns), or other numbers laid out in the same way.
#[derive(Clone, Debug, PartialEq)]
pub struct Map {
    /// What it is, as a heading.
    pub title: String,
    /// `[rows.len(), cols.len()]`; NaN where a query may not see a key.
    pub values: Vec<f32>,
    /// What stands at the rows: queries.
    pub rows: Axis,
    /// What stands at the columns: keys.
    pub cols: Axis,
}

/// One side of a map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// What all of it is: `query`, `source`, `layer`.
    pub title: String,
    /// One label for each row or column.
    pub labels: Vec<String>,
    /// The positions that they stand for, several each if the map is pooled.
    pub positions: Range<usize>,
}

impl Axis {
    /// A label for each position, from the first on.
    #[must_use]
    pub fn new(title: impl Into<String>, labels: Vec<String>) -> Self {
        Self { title: title.into(), positions: 0..labels.len(), labels }
    }

    /// Positions that a row or column stands for, at most.
    #[must_use]
    pub fn positions_each(&self) -> usize {
        self.positions.len().div_ceil(self.labels.len().max(1)).max(1)
    }

    /// How many rows or columns there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }
}

impl Map {
    /// The numbers of a row.
    #[must_use]
    pub fn row(&self, row: usize) -> &[f32] {
        let n = self.cols.len();
        &self.values[row * n..][..n]
    }

    /// The largest number; 0 where there is none.
    #[must_use]
    pub fn most(&self) -> f32 {
        self.values.iter().copied().fold(0.0, f32::max)
    }
}
