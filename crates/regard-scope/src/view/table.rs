//! Numbers in cells of color: the color finds, the number tells.

use super::Style;
use super::heat::{describe, foot};
use super::matrix::Matrix;
use super::number::digits;
use super::pool::at;
use super::sheet::Sheet;
use crate::map::Map;
use crate::scene::Scene;

/// Statistics of layers and heads: each number is written in its cell. If the page is too narrow for the numbers, it is
/// a heat map, and a caption says so.
#[must_use]
pub fn table(map: &Map, style: &Style) -> Scene {
    let mut sheet = Sheet::new(&map.title, style);
    let m = sheet.metrics();
    let most =
        map.values.iter().copied().filter(|v| v.is_finite()).fold(0.0f32, |x, v| x.max(v.abs()));
    let digits = digits(most);
    let write = |v: f32| if v.is_nan() { String::new() } else { format!("{v:.digits$}") };
    let widest = map.values.iter().map(|&v| m.text_width(&write(v))).fold(0.0, f32::max);
    let (pad, high) = if m.is_terminal() { (2.0, 1.0) } else { (12.0, m.line + 8.0) };
    let cell = ((widest + pad).ceil().max(m.most.0), high);
    let mut matrix = Matrix::new(map, &sheet, Some(cell));
    let fits = matrix.origin.0 + cell.0 * map.cols.len() as f32 <= m.width - sheet.margin.0
        && map.rows.len() as f32 * cell.1 <= 4.0 * m.height;
    if !fits {
        matrix = Matrix::new(map, &sheet, None);
    }
    matrix.draw(map, &mut sheet);
    for row in 0..if fits { map.rows.len() } else { 0 } {
        for col in 0..map.cols.len() {
            let (value, area) = (at(map, row, col), matrix.area(row, col));
            let middle = (area.x + area.w / 2.0, area.y + area.h / 2.0);
            if !value.is_nan() {
                sheet.text_on(middle, write(value), style.palette().index(value, style.scale));
            }
        }
    }
    let note = "the page is too narrow for the numbers themselves";
    foot(map, &matrix, &mut sheet, (!fits && !map.values.is_empty()).then_some(note));
    sheet.finish(&map.title, describe(map))
}
