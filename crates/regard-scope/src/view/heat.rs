//! Rows of cells, each as strong in color as its number is large.

use super::Style;
use super::matrix::Matrix;
use super::number::{count, short};
use super::pool::{at, caption, pairs_each};
use super::sheet::Sheet;
use crate::map::Map;
use crate::scene::Scene;

/// A map as cells of color, with what stands at its rows and columns. A map that is larger than the page is pooled
/// by its largest numbers, and a caption says so.
#[must_use]
pub fn heat(map: &Map, style: &Style) -> Scene {
    let mut sheet = Sheet::new(&map.title, style);
    let matrix = Matrix::new(map, &sheet, None);
    matrix.draw(map, &mut sheet);
    foot(map, &matrix, &mut sheet, None);
    sheet.finish(&map.title, describe(map))
}

/// Which source word each target word looks at: a heat map of targets (rows) and sources (columns), in which the
/// strongest source of each target is outlined.
#[must_use]
pub fn alignment(map: &Map, style: &Style) -> Scene {
    let mut sheet = Sheet::new(&map.title, style);
    let matrix = Matrix::new(map, &sheet, None);
    matrix.draw(map, &mut sheet);
    let outlined = matrix.pooled.by == (1, 1);
    for row in 0..if outlined { map.rows.len() } else { 0 } {
        let best = (0..map.cols.len()).filter(|&col| at(map, row, col) > 0.0);
        // The first of equals.
        let best = best.reduce(|x, y| if at(map, row, y) > at(map, row, x) { y } else { x });
        if let Some(col) = best {
            sheet.outline(matrix.area(row, col));
        }
    }
    let note = format!("outlined: the strongest {} of each {}", map.cols.title, map.rows.title);
    foot(map, &matrix, &mut sheet, outlined.then_some(note.as_str()));
    sheet.finish(&map.title, describe(map))
}

/// Legend and caption.
pub(crate) fn foot(map: &Map, matrix: &Matrix, sheet: &mut Sheet<'_>, note: Option<&str>) {
    sheet.legend();
    if let Some(text) =
        caption(pairs_each(map, matrix.pooled.by), &sheet.style.unit, sheet.style.kind)
    {
        sheet.caption(&text);
    }
    if let Some(text) = note {
        sheet.caption(text);
    }
    if map.values.iter().any(|v| v.is_nan()) {
        sheet.caption("empty: hidden");
    }
}

/// A map in words.
pub(crate) fn describe(map: &Map) -> String {
    let (rows, cols) = (count(map.rows.len()), count(map.cols.len()));
    let most = map.values.iter().copied().fold(f32::NAN, f32::max);
    let most =
        if most.is_nan() { String::new() } else { format!("; the largest is {}", short(most)) };
    format!("{rows} x {cols} numbers{most}")
}
