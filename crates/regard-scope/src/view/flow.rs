//! Words beside words, and lines from those that look to those that are looked at.

use super::Style;
use super::heat::describe;
use super::number::{count, short};
use super::pool::at;
use super::sheet::Sheet;
use crate::color::{Emphasis, byte};
use crate::map::{Axis, Map};
use crate::scene::{Anchor, Line, Metrics, Scene};

/// The strongest weights as lines from rows (left) to columns (right), as wide and as solid as the weight is large.
///
/// If there are more words than lines of the page, only those are written that a line touches.
#[must_use]
pub fn flow(map: &Map, most_lines: usize, style: &Style) -> Scene {
    let mut sheet = Sheet::new(&map.title, style);
    let m = sheet.metrics();
    let pitch = pitch(map.rows.len().max(map.cols.len()), m);
    let places = places(m.height / pitch);
    let mut lines = strongest(map, most_lines);
    let (left, right) = (shown(&mut lines, 0, map.rows.len(), places), map.cols.len());
    let right = shown(&mut lines, 1, right, places);
    let room = sheet.room();
    let widest = |axis: &Axis, of: &[usize]| {
        let widths = of.iter().map(|&i| m.text_width(&m.fit(&axis.labels[i], room * 0.3)));
        widths.fold(m.text_width(&m.fit(&axis.title, room * 0.3)), f32::max)
    };
    let gap = m.gap.0;
    let x0 = sheet.margin.0 + widest(&map.rows, &left) + gap;
    let rest = room - (x0 - sheet.margin.0) - gap - widest(&map.cols, &right);
    let x1 = x0 + rest.min(if m.is_terminal() { 60.0 } else { 360.0 }).max(1.0);
    let (top, half) = (sheet.y + m.line, m.line / 2.0);
    let side =
        [(&map.rows, &left, x0 - gap, Anchor::End), (&map.cols, &right, x1 + gap, Anchor::Start)];
    for (axis, of, x, anchor) in side {
        let title = m.fit(&axis.title, room * 0.3);
        sheet.text((x, sheet.y + m.line / 2.0), title, anchor, Emphasis::Quiet);
        for (place, &i) in of.iter().enumerate() {
            let y = top + place as f32 * pitch + half;
            sheet.text((x, y), m.fit(&axis.labels[i], room * 0.3), anchor, Emphasis::Plain);
        }
    }
    let y = |of: &[usize], i: usize| top + of.binary_search(&i).unwrap_or(0) as f32 * pitch + half;
    // Weak lines first, so that strong ones lie over them.
    for &(row, col) in lines.iter().rev() {
        let part = style.scale.part(at(map, row, col));
        let (strength, color) = (single(part), byte(110.0 + 145.0 * part));
        let (from, to) = ((x0, y(&left, row)), (x1, y(&right, col)));
        sheet.line(Line { from, to, strength, curved: true, color });
    }
    sheet.y = top + left.len().max(right.len()) as f32 * pitch + m.gap.1;
    notes(map, &lines, (left.len(), right.len()), &mut sheet);
    sheet.finish(&map.title, describe(map))
}

/// From word to word. Lines between words need room, and a terminal has few dots: every other line, if that fits.
fn pitch(words: usize, m: &Metrics) -> f32 {
    if !m.is_terminal() {
        1.25 * m.line
    } else if 2.0 * words as f32 <= m.height {
        2.0
    } else {
        1.0
    }
}

#[expect(clippy::cast_possible_truncation, reason = "0 to 1; few digits are enough")]
fn single(part: f64) -> f32 {
    part as f32
}

#[expect(clippy::cast_possible_truncation, reason = "a count of lines")]
fn places(x: f32) -> usize {
    (x.floor() as usize).max(2)
}

/// The places of the largest weights, largest first. Cost: a pass over the map, and sorting what is kept.
fn strongest(map: &Map, most: usize) -> Vec<(usize, usize)> {
    let cols = map.cols.len().max(1);
    let within = map.values.len().min(map.rows.len() * map.cols.len());
    let mut places: Vec<usize> = (0..within).filter(|&i| map.values[i] > 0.0).collect();
    let order = |x: &usize, y: &usize| map.values[*y].total_cmp(&map.values[*x]).then(x.cmp(y));
    if most == 0 {
        return Vec::new();
    }
    if places.len() > most {
        places.select_nth_unstable_by(most - 1, order);
        places.truncate(most);
    }
    places.sort_unstable_by(order);
    places.into_iter().map(|i| (i / cols, i % cols)).collect()
}

/// Which words of a side are written, in order; lines to others are dropped.
fn shown(lines: &mut Vec<(usize, usize)>, side: usize, n: usize, places: usize) -> Vec<usize> {
    if n <= places {
        return (0..n).collect();
    }
    let mut out: Vec<usize> = Vec::new();
    lines.retain(|&(row, col)| {
        let i = if side == 0 { row } else { col };
        match out.binary_search(&i) {
            Ok(_) => true,
            Err(at) if out.len() < places => {
                out.insert(at, i);
                true
            }
            Err(_) => false,
        }
    });
    out
}

fn notes(map: &Map, lines: &[(usize, usize)], words: (usize, usize), sheet: &mut Sheet<'_>) {
    let value = |line: Option<&(usize, usize)>| line.map_or(f32::NAN, |l| at(map, l.0, l.1));
    let seen = map.values.iter().filter(|v| **v > 0.0).count();
    let unit = sheet.style.unit.clone();
    sheet.caption(&match lines.len() {
        0 => format!("no {unit} is above 0"),
        n => format!(
            "the {} strongest of {} {unit}s: {} down to {}",
            count(n),
            count(seen),
            short(value(lines.first())),
            short(value(lines.last()))
        ),
    });
    let all = (map.rows.len(), map.cols.len());
    if words != all {
        sheet.caption(&format!(
            "{} of {} on the left and {} of {} on the right are shown: those that lines touch",
            count(words.0),
            count(all.0),
            count(words.1),
            count(all.1)
        ));
    }
}
