//! A few maps side by side, each below what it is called: before and after.

use super::Style;
use super::grid::thumb;
use super::number::count;
use super::sheet::Sheet;
use crate::color::Emphasis;
use crate::map::Map;
use crate::scene::{Anchor, Scene};

/// Maps beside each other, all in one scale, with their names above. Those that do not fit go on below.
#[must_use]
pub fn beside(title: &str, maps: &[(String, Map)], style: &Style) -> Scene {
    let mut sheet = Sheet::new(title, style);
    let m = sheet.metrics();
    let (least, most) = if m.is_terminal() { (20.0, 34.0) } else { (160.0, 280.0) };
    let gap = 2.0 * m.gap.0;
    let across = (1..=maps.len()).rev().find(|&n| n as f32 * (least + gap) <= sheet.room() + gap);
    let across = across.unwrap_or(1);
    let room = ((sheet.room() + gap) / across as f32 - gap).min(most);
    for line in maps.chunks(across) {
        let (top, mut lowest) = (sheet.y, 0f32);
        for (i, (name, map)) in line.iter().enumerate() {
            let x = sheet.margin.0 + i as f32 * (room + gap).floor();
            let name = m.fit(name, room);
            sheet.text((x, top + m.line / 2.0), name, Anchor::Start, Emphasis::Plain);
            let (rows, cols) = (map.rows.len().max(1) as f32, map.cols.len().max(1) as f32);
            // Cells grow by whole steps, so that they are equally wide; a place of a terminal is twice as high as wide.
            let cell = if cols < room { (room / cols).floor() } else { room / cols };
            let high = if m.is_terminal() { cell / 2.0 } else { cell };
            sheet.y = top + m.line;
            thumb(map, x, (cell, high), &mut sheet);
            lowest = lowest.max(m.line + high * rows);
        }
        sheet.y = (top + lowest).ceil() + m.gap.1;
    }
    sheet.legend();
    sheet.finish(title, format!("{} maps side by side", count(maps.len())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Axis;
    use crate::render::{Depth, svg, term};
    use crate::scene::Metrics;

    #[test]
    fn maps_stand_beside_each_other_below_their_names() {
        let axis = || Axis::new("letter", ["a", "b", "c"].map(String::from).to_vec());
        let map = |at: usize| {
            let values = (0..9).map(|i| if i % 4 == at { 1.0 } else { 0.1 }).collect();
            Map { title: String::new(), values, rows: axis(), cols: axis() }
        };
        let maps = [("before".to_string(), map(1)), ("after".to_string(), map(0))];
        let words =
            term(&beside("two", &maps, &Style::new(Metrics::terminal(80, false))), Depth::Ascii);
        let names = words.lines().find(|line| line.contains("before"));
        assert!(names.is_some_and(|line| line.contains("after")), "{words}");
        assert!(words.lines().all(|line| line.chars().count() <= 80), "{words}");
        let drawn = svg(&beside("two", &maps, &Style::new(Metrics::pixels(800.0))));
        assert!(drawn.contains("before") && drawn.contains("after") && !drawn.contains("NaN"));
        let narrow = beside("two", &maps, &Style::new(Metrics::terminal(24, false)));
        assert!(term(&narrow, Depth::Ascii).lines().all(|line| line.chars().count() <= 24));
        let _ = beside("none", &[], &Style::new(Metrics::pixels(200.0)));
    }
}
