//! Cells of equal size over the queries and keys of a head.

use regard::inspect::{WEIGHT_TILE_ROWS, WeightTile};
use regard::{AttentionView, Number};
use std::ops::Range;

/// What a view is a part of: a map of some rows and keys of a larger call.
#[derive(Clone, Debug)]
pub(crate) struct MapPart {
    pub(crate) rows: Range<usize>,
    pub(crate) keys: Range<usize>,
    /// The row and the key of the larger call that are row 0 and key 0 of the view.
    pub(crate) first: [usize; 2],
    /// Of the map, at most.
    pub(crate) cells: [usize; 2],
}

/// A grid of cells over some queries and keys.
#[derive(Clone, Debug)]
pub(super) struct Grid {
    rows: Cut,
    keys: Cut,
    /// The largest weight of a cell instead of the sum.
    max: bool,
}

/// A range, cut into cells as equal as possible; of these, the ones that a view has.
#[derive(Clone, Debug)]
struct Cut {
    /// May reach beyond the last index.
    range: Range<usize>,
    /// At least 1, at most the length of the range.
    of_range: usize,
    /// Where in the range index 0 of the view stands.
    offset: usize,
    /// The first one that the view has.
    first: usize,
    /// Those that hold an existing index.
    cells: usize,
}

impl Cut {
    /// The cells of the indices `own` of a view; index 0 stands at `offset` of the range. `None` if there is no cell.
    fn new(
        range: Range<usize>,
        cells: usize,
        (own, offset): (Range<usize>, usize),
    ) -> Option<Self> {
        let end = offset.checked_add(own.end)?;
        // Bounds the product of an index and a number of cells.
        let range = range.start..range.end.min(range.start.saturating_add(1 << 31).max(end));
        let of_range = cells.min(range.len());
        if own.is_empty() || of_range == 0 {
            return None;
        }
        let mut cut = Self { range, of_range, offset, first: 0, cells: of_range };
        cut.first = cut.cell(own.start);
        cut.cells = cut.cell(own.end - 1) + 1;
        Some(cut)
    }

    /// The cell of an index.
    fn cell(&self, i: usize) -> usize {
        let (i, n) = (i + self.offset - self.range.start, self.range.len());
        (if self.of_range == n { i } else { i * self.of_range / n }) - self.first
    }

    /// The indices of a cell, those before the view left out.
    fn of_cell(&self, cell: usize) -> Range<usize> {
        let n = self.range.len();
        let begin = |cell: usize| {
            let begin = ((self.first + cell) * n).div_ceil(self.of_range);
            (self.range.start + begin).saturating_sub(self.offset)
        };
        begin(cell)..begin(cell + 1)
    }
}

impl Grid {
    /// At most `cells` cells over the rows and keys of a view in one item; `None` if there are none.
    pub(super) fn new<N: Number>(
        view: &AttentionView<'_, N>,
        batch: usize,
        cells: [usize; 2],
        max: bool,
    ) -> Option<Self> {
        let scope = view.problem().scope(batch, 0);
        let [rows, keys] = view.ranges();
        let (own_rows, own_keys) = (view.rows_of(batch).0, view.keys_of(batch));
        let rows = Cut::new(rows.unwrap_or(0..scope.q_len), cells[0], (own_rows, 0))?;
        let keys = Cut::new(keys.unwrap_or(0..scope.k_len), cells[1], (own_keys, 0))?;
        Some(Self { rows, keys, max })
    }

    /// The cells of a larger map that the rows and keys of a view fall into, with the largest weight of each.
    pub(super) fn of_part<N: Number>(view: &AttentionView<'_, N>, part: &MapPart) -> Option<Self> {
        let MapPart { rows, keys, first, cells } = part;
        let rows = Cut::new(rows.clone(), cells[0], (view.rows_of(0).0, first[0]))?;
        let keys = Cut::new(keys.clone(), cells[1], (view.keys_of(0), first[1]))?;
        Some(Self { rows, keys, max: true })
    }

    /// The first cell down and across, among those of the whole.
    pub(super) fn first(&self) -> [usize; 2] {
        [self.rows.first, self.keys.first]
    }

    /// Rows and columns of cells.
    pub(super) fn size(&self) -> [usize; 2] {
        [self.rows.cells, self.keys.cells]
    }

    pub(super) fn zeros(&self) -> Vec<f64> {
        vec![0.0; self.rows.cells * self.keys.cells]
    }

    /// Divides the sums of cells by their number of pairs, of the queries in the view.
    pub(super) fn divide_by_pairs<N: Number>(
        &self,
        view: &AttentionView<'_, N>,
        batch: usize,
        values: &mut [f64],
    ) {
        let (scope, (_, step)) = (view.problem().scope(batch, 0), view.rows_of(batch));
        for (i, row) in values.chunks_mut(self.keys.cells).enumerate() {
            let cell = self.rows.of_cell(i);
            // Rows `start + n step` in the cell.
            let before = |end: usize| (end.min(scope.q_len) - self.rows.range.start).div_ceil(step);
            let queries = before(cell.end) - before(cell.start);
            for (j, x) in row.iter_mut().enumerate() {
                let cell = self.keys.of_cell(j);
                let pairs = queries * (cell.end.min(scope.k_len) - cell.start);
                *x = if pairs == 0 { *x } else { *x / pairs as f64 };
            }
        }
    }
}

/// Some rows of cells of a grid.
#[derive(Clone, Debug)]
pub(super) struct Cells {
    first: usize,
    values: Vec<f64>,
}

impl Cells {
    /// The cells of some rows; none without a grid.
    pub(super) fn new(grid: Option<&Grid>, rows: &Range<usize>) -> Self {
        let Some(grid) = grid else { return Self { first: 0, values: Vec::new() } };
        let (first, last) = (grid.rows.cell(rows.start), grid.rows.cell(rows.end - 1));
        Self { first, values: vec![0.0; (last + 1 - first) * grid.keys.cells] }
    }

    /// Adds these cells to those of the whole grid.
    pub(super) fn join_into(&self, grid: &Grid, to: &mut [f64]) {
        let to = &mut to[self.first * grid.keys.cells..][..self.values.len()];
        to.iter_mut().zip(&self.values).for_each(|(to, x)| join(to, *x, grid.max));
    }

    /// Adds the weights of a tile, each times the count of its query.
    #[inline(always)]
    pub(super) fn add<N: Number>(
        &mut self,
        grid: &Grid,
        tile: &WeightTile<'_, N>,
        counts: &[N; WEIGHT_TILE_ROWS],
    ) {
        let n = tile.rows();
        let mut rows = [0; WEIGHT_TILE_ROWS];
        (0..n).for_each(|lane| rows[lane] = grid.rows.cell(tile.row(lane)) - self.first);
        let mut i = 0;
        while i < tile.keys() {
            let column = grid.keys.cell(tile.key(i));
            let end = grid.keys.of_cell(column).end;
            let mut sums = [N::zero(); WEIGHT_TILE_ROWS];
            while i < tile.keys() && tile.key(i) < end {
                for (sum, x) in sums.iter_mut().zip(tile.weights(i)) {
                    *sum = if !grid.max {
                        *sum + *x
                    } else if x.is_nan() | (*x > *sum) {
                        *x
                    } else {
                        *sum
                    };
                }
                i += 1;
            }
            sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum = *sum * *count);
            let cell = |row: usize| row * grid.keys.cells + column;
            if rows[0] == rows[n - 1] {
                join(&mut self.values[cell(rows[0])], over_rows(&sums, grid.max), grid.max);
            } else {
                for (row, sum) in rows.iter().zip(&sums).take(n) {
                    join(&mut self.values[cell(*row)], Number::to_f64(*sum), grid.max);
                }
            }
        }
    }
}

/// Adds a number to a cell, or keeps the larger one. A NaN stays.
fn join(cell: &mut f64, x: f64, max: bool) {
    if !max {
        *cell += x;
    } else if x.is_nan() || x > *cell {
        *cell = x;
    }
}

/// The sum over all rows of a tile, by halves, or the largest.
#[inline(always)]
fn over_rows<N: Number>(sums: &[N; WEIGHT_TILE_ROWS], max: bool) -> f64 {
    if max {
        let mut most = 0.0;
        sums.iter().for_each(|x| join(&mut most, Number::to_f64(*x), true));
        return most;
    }
    let mut sums = *sums;
    let mut half = WEIGHT_TILE_ROWS / 2;
    while half > 0 {
        let (low, high) = sums.split_at_mut(half);
        low.iter_mut().zip(high).for_each(|(a, b)| *a = *a + *b);
        half /= 2;
    }
    Number::to_f64(sums[0])
}
