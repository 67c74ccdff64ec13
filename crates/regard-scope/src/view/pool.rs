//! Maps too large for their page, made smaller without losing what matters: the peaks.

use crate::map::Map;
use crate::palette::PaletteKind;

/// A map in which each cell stands for `by` rows and columns of another.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PooledCells {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) by: (usize, usize),
    /// `[rows, cols]`; NaN where all are hidden.
    pub(crate) values: Vec<f32>,
}

/// The number at a place; NaN outside, so that a map whose numbers are too few is a picture with holes.
pub(crate) fn at(map: &Map, row: usize, col: usize) -> f32 {
    map.values.get(row * map.cols.len() + col).copied().unwrap_or(f32::NAN)
}

/// The largest of each `by.0 x by.1` cells; of differences the one farthest from 0. Reads the map once.
pub(crate) fn pool(map: &Map, by: (usize, usize), kind: PaletteKind) -> PooledCells {
    let by = (by.0.max(1), by.1.max(1));
    let (rows, cols) = (map.rows.len().div_ceil(by.0), map.cols.len().div_ceil(by.1));
    let mut values = vec![f32::NAN; rows * cols];
    for row in 0..map.rows.len() {
        for col in 0..map.cols.len() {
            let (old, new) = (&mut values[row / by.0 * cols + col / by.1], at(map, row, col));
            let larger = match kind {
                PaletteKind::Amount => new > *old,
                PaletteKind::Difference => new.abs() > old.abs(),
            };
            if larger || old.is_nan() {
                *old = new;
            }
        }
    }
    PooledCells { rows, cols, by, values }
}

/// How many queries and keys a cell of a map stands for that was pooled once more by so many.
pub(crate) fn pairs_each(map: &Map, by: (usize, usize)) -> (usize, usize) {
    (by.0 * map.rows.positions_each(), by.1 * map.cols.positions_each())
}

/// What was done to a map, for its caption; nothing if nothing was.
pub(crate) fn caption(by: (usize, usize), unit: &str, kind: PaletteKind) -> Option<String> {
    let which = match kind {
        PaletteKind::Amount => "largest",
        PaletteKind::Difference => "farthest from 0",
    };
    (by != (1, 1)).then(|| format!("each cell is the {which} of {} x {} {unit}s", by.0, by.1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Axis;

    fn map(rows: usize, cols: usize, values: &[f32]) -> Map {
        let axis = |n: usize| Axis::new("", vec![String::new(); n]);
        Map { title: String::new(), values: values.to_vec(), rows: axis(rows), cols: axis(cols) }
    }

    #[test]
    fn peaks_survive_and_what_is_hidden_does_not_count() {
        let n = f32::NAN;
        let m = map(3, 3, &[0.1, n, n, 0.9, 0.2, n, 0.3, -0.4, 0.5]);
        let p = pool(&m, (2, 2), PaletteKind::Amount);
        assert_eq!((p.rows, p.cols), (2, 2));
        assert_eq!(p.values[0], 0.9);
        assert!(p.values[1].is_nan());
        assert_eq!(p.values[2..], [0.3, 0.5]);
        assert_eq!(pool(&m, (2, 2), PaletteKind::Difference).values[2], -0.4);
    }

    #[test]
    fn too_few_numbers_are_holes() {
        assert!(
            pool(&map(2, 2, &[1.0]), (1, 1), PaletteKind::Amount).values[1..]
                .iter()
                .all(|x| x.is_nan())
        );
        assert!(pool(&map(0, 5, &[]), (3, 3), PaletteKind::Amount).values.is_empty());
    }
}
