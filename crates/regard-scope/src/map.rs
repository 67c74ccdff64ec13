//! What a picture shows: numbers in rows and columns, and what stands beside them.

use crate::trace::Site;
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
    /// A number of each head of a kind, layers down, heads across.
    pub(crate) fn of_heads(
        title: String,
        kind: &str,
        numbers: impl Iterator<Item = (Site, f64)>,
    ) -> Self {
        let own: Vec<_> = numbers.filter(|(site, _)| site.kind == kind).collect();
        let mut layers: Vec<usize> = own.iter().map(|(site, _)| site.layer).collect();
        layers.dedup();
        let heads = own.iter().map(|(site, _)| site.head + 1).max().unwrap_or(0);
        let mut values = vec![f32::NAN; layers.len() * heads];
        for (site, number) in own {
            let row = layers.iter().position(|layer| *layer == site.layer).unwrap_or(0);
            #[expect(clippy::cast_possible_truncation, reason = "a picture shows fewer digits")]
            let value = number as f32;
            values[row * heads + site.head] = value;
        }
        let layers = layers.iter().map(ToString::to_string).collect();
        let heads = (0..heads).map(|head| head.to_string()).collect();
        let (rows, cols) = (Axis::new("layer", layers), Axis::new("head", heads));
        Self { title, values, rows, cols }
    }

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
