//! A map on a page: how large its cells are, and what stands beside them.

use super::Style;
use super::number::{round_step, short};
use super::pool::{PooledCells, pool};
use super::sheet::Sheet;
use crate::color::Emphasis;
use crate::map::{Axis, Map};
use crate::scene::{Anchor, Area, Cells, Metrics};

/// Beyond so many cells words for each would make the file large, and nobody finds a cell with a mouse.
const MOST_TIPS: usize = 1500;

/// Where everything of a map stands.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    pub(crate) pooled: PooledCells,
    pub(crate) cell: (f32, f32),
    /// The upper left corner of the cells.
    pub(crate) origin: (f32, f32),
    rows: Vec<(usize, String)>,
    cols: Vec<(usize, String)>,
    rotated: bool,
    /// Each row has its label, or some have their number.
    words: bool,
}

impl Matrix {
    /// Lays a map out below what is on the sheet. `cell` is the size that cells must have, if something is to be
    /// written in them.
    pub(crate) fn new(map: &Map, sheet: &Sheet<'_>, cell: Option<(f32, f32)>) -> Self {
        let (m, room) = (sheet.metrics(), sheet.room());
        let n = (map.rows.len(), map.cols.len());
        let pitch = pitch(m);
        let mut words = n.0 as f32 * pitch <= m.height;
        let mut left = row_room(map, m, words, room);
        // Words must not cost columns.
        if words && is_squarish(n) && n.1 as f32 * narrow(m, words) > room - left - m.gap.0 {
            words = false;
            left = row_room(map, m, words, room);
        }
        let room = (room - left - m.gap.0).max(m.least.0);
        let limit = (m.height, room);
        let (cell, by) = match cell {
            Some(cell) => (cell, (1, 1)),
            None => size(n, limit, m, words),
        };
        let pooled = pool(map, by, sheet.style.kind);
        let mut out = Self {
            pooled,
            cell,
            origin: (sheet.margin.0 + left + m.gap.0, sheet.y),
            rows: Vec::new(),
            cols: Vec::new(),
            rotated: false,
            words: words && by.0 == 1,
        };
        out.label_rows(&map.rows, m, left);
        let above = out.label_cols(&map.cols, m);
        let title =
            if map.cols.title.is_empty() && map.rows.title.is_empty() { 0.0 } else { m.line };
        // Whole pixels: edges between them would be blurred.
        out.origin.1 += (title + above).ceil();
        out
    }

    /// The box of a cell.
    pub(crate) fn area(&self, row: usize, col: usize) -> Area {
        let (w, h) = self.cell;
        Area { x: self.origin.0 + col as f32 * w, y: self.origin.1 + row as f32 * h, w, h }
    }

    fn label_rows(&mut self, axis: &Axis, m: &Metrics, left: f32) {
        self.rows = if self.words {
            axis.labels.iter().map(|l| m.fit(l, left)).enumerate().collect()
        } else {
            // Two lines from number to number: they are read as a scale, not as a list.
            let apart = 2.0 * m.line / self.cell.1;
            let mut ticks = ticks(axis, self.pooled.by.0, apart);
            // Half lines: two cells share a line, so that odd steps would look uneven.
            if m.is_terminal() && self.cell.1 < 1.0 && ticks.get(1).is_some_and(|t| t.0 % 2 == 1) {
                ticks = ticks.into_iter().step_by(2).collect();
            }
            ticks
        };
    }

    /// How high the labels of the columns are.
    fn label_cols(&mut self, axis: &Axis, m: &Metrics) -> f32 {
        let longest = if m.is_terminal() { 14.0 } else { 120.0 };
        let cut: Vec<String> = axis.labels.iter().map(|l| m.fit_rotated(l, longest)).collect();
        let max = |f: &dyn Fn(&str) -> f32| cut.iter().map(|l| f(l)).fold(0.0, f32::max);
        let gap = if m.is_terminal() { 1.0 } else { 4.0 };
        let room = if m.is_terminal() {
            // Words that run down beside each other need a space between them, or both columns for wide letters.
            2.0
        } else {
            // Letters are a little lower than their font.
            0.9 * m.font
        };
        if self.pooled.by.1 == 1 && max(&|l| m.text_width(l)) + gap <= self.cell.0 {
            self.cols = cut.into_iter().enumerate().collect();
            m.line
        } else if self.pooled.by.1 == 1 && room <= self.cell.0 {
            self.rotated = true;
            let high = max(&|l| m.rotated_length(l));
            self.cols = cut.into_iter().enumerate().collect();
            high + if m.is_terminal() { 0.0 } else { 6.0 }
        } else {
            let widest = m.text_width(&axis.labels.len().to_string()).max(tick_width(axis, m));
            self.cols = ticks(axis, self.pooled.by.1, (widest + 2.0 * m.gap.0) / self.cell.0);
            m.line
        }
    }

    /// Draws the cells and what stands beside them.
    pub(crate) fn draw(&self, map: &Map, sheet: &mut Sheet<'_>) {
        let m = sheet.metrics();
        let (x, y) = self.origin;
        let aside = x - m.gap.0;
        for (row, text) in &self.rows {
            let area = self.area(*row, 0);
            // A number stands beside the place where its row begins, as on a ruler.
            let middle = area.y + area.h.max(if self.words { 0.0 } else { m.least.1 }) / 2.0;
            sheet.text((aside, middle), text.clone(), Anchor::End, Emphasis::Plain);
        }
        for (col, text) in &self.cols {
            let area = self.area(0, *col);
            let middle = area.x + area.w / 2.0;
            if self.rotated {
                let lift = if m.is_terminal() { 0.0 } else { 5.0 };
                sheet.rotated((middle, y - lift), text.clone());
            } else {
                let width = m.text_width(text);
                let start = (middle - width / 2.0).max(0.0).min(m.width - width);
                let start = if m.is_terminal() { start.floor() } else { start };
                sheet.text((start, y - m.line / 2.0), text.clone(), Anchor::Start, Emphasis::Plain);
            }
        }
        self.name_axes(map, sheet);
        let (w, h) = (self.pooled.cols as f32 * self.cell.0, self.pooled.rows as f32 * self.cell.1);
        let at = Area { x, y, w, h };
        sheet.cells(self.cells(map, sheet.style, at));
        sheet.y = (y + h).max(y + m.line);
        sheet.y = if m.is_terminal() { sheet.y.ceil() } else { sheet.y } + m.gap.1;
    }

    /// The names of the axes stand where their labels begin: what is across above, what is down beside it.
    fn name_axes(&self, map: &Map, sheet: &mut Sheet<'_>) {
        let m = sheet.metrics();
        let (x, y) = self.origin;
        let left = x - m.gap.0 - sheet.margin.0;
        let rows = m.fit(&pointed(&map.rows.title, '↓'), left);
        // Words begin a line lower than numbers, whose first stands at the very edge.
        let above = if self.words { y } else { sheet.y + m.line };
        sheet.text((x - m.gap.0, above - m.line / 2.0), rows, Anchor::End, Emphasis::Quiet);
        let cols = m.fit(&pointed(&map.cols.title, '→'), sheet.room() - left - m.gap.0);
        sheet.text((x, sheet.y + m.line / 2.0), cols, Anchor::Start, Emphasis::Quiet);
    }

    fn cells(&self, map: &Map, style: &Style, at: Area) -> Cells {
        let PooledCells { rows, cols, values, by } = &self.pooled;
        let palette = style.palette();
        let colors = values.iter().map(|&v| palette.index(v, style.scale)).collect();
        let few = !style.metrics.is_terminal() && values.len() <= MOST_TIPS && *by == (1, 1);
        let names = |axis: &Axis| -> Vec<String> {
            axis.labels.iter().map(|l| style.metrics.fit(l, 240.0)).collect()
        };
        let (down, across) = (names(&map.rows), names(&map.cols));
        let tip =
            |i: usize| format!("{} → {}: {}", down[i / cols], across[i % cols], short(values[i]));
        let tips = if few { (0..values.len()).map(tip).collect() } else { Vec::new() };
        Cells { at, rows: *rows, cols: *cols, colors, tips }
    }
}

/// The name of an axis, and where it runs.
fn pointed(title: &str, arrow: char) -> String {
    if title.is_empty() { String::new() } else { format!("{title} {arrow}") }
}

/// Whether a map is about as high as wide: then its cells are, too, and what lies on the diagonal looks so.
fn is_squarish(n: (usize, usize)) -> bool {
    n.0 <= 4 * n.1 && n.1 <= 4 * n.0
}

/// The narrowest cell; beside words a terminal can do with one column.
fn narrow(m: &Metrics, words: bool) -> f32 {
    if words && m.is_terminal() { 1.0 } else { m.least.0 }
}

/// How far apart rows must stand for each to have its label.
fn pitch(m: &Metrics) -> f32 {
    if m.is_terminal() { 1.0 } else { m.font + 1.0 }
}

/// How much room stands to the left of the cells.
fn row_room(map: &Map, m: &Metrics, words: bool, room: f32) -> f32 {
    let title = m.text_width(&m.fit(&pointed(&map.rows.title, '↓'), room / 4.0));
    let widest = if words {
        let longest = room * if m.is_terminal() { 0.25 } else { 0.22 };
        map.rows.labels.iter().map(|l| m.text_width(&m.fit(l, longest))).fold(0.0, f32::max)
    } else {
        m.text_width(&map.rows.len().to_string()).max(tick_width(&map.rows, m))
    };
    widest.max(title).ceil()
}

/// The size of cells, and how many rows and columns share one.
fn size(
    n: (usize, usize),
    limit: (f32, f32),
    m: &Metrics,
    words: bool,
) -> ((f32, f32), (usize, usize)) {
    let share = |n: usize, room: f32, least: f32| whole(n as f32 * least / room.max(least)).max(1);
    let narrow = narrow(m, words);
    let mut by =
        (if words { 1 } else { share(n.0, limit.0, m.least.1) }, share(n.1, limit.1, narrow));
    // Maps that are nearly square stay so: their diagonal is what one looks for.
    if !words && is_squarish(n) {
        by = (by.0.max(by.1), by.0.max(by.1));
    }
    let cols = n.1.div_ceil(by.1).max(1) as f32;
    let rows = n.0.div_ceil(by.0).max(1) as f32;
    let w = (limit.1 / cols).floor().clamp(narrow, m.most.0);
    if words {
        return ((w, (w * m.most.1 / m.most.0).max(pitch(m))), by);
    }
    // Square cells, in steps that the page can draw.
    let k = (w / m.least.0).floor().min((limit.0 / rows / m.least.1).floor()).max(1.0);
    if is_squarish(n) {
        ((k * m.least.0, k * m.least.1), by)
    } else {
        (((w / m.least.0).floor().max(1.0) * m.least.0, k * m.least.1), by)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a count, rounded up")]
fn whole(x: f32) -> usize {
    x.ceil().max(0.0) as usize
}

fn is_number(label: &str) -> bool {
    !label.is_empty() && label.len() <= 12 && label.bytes().all(|b| b.is_ascii_digit())
}

/// How wide the labels are that stand at ticks, if they are numbers.
fn tick_width(axis: &Axis, m: &Metrics) -> f32 {
    let numbers = axis.labels.iter().all(|l| is_number(l));
    let width = |l: Option<&String>| l.map_or(0.0, |l| m.text_width(l));
    if numbers { width(axis.labels.first()).max(width(axis.labels.last())) } else { 0.0 }
}

/// Numbers at round steps, at least `apart` cells from each other: positions, or the labels if those are numbers.
fn ticks(axis: &Axis, by: usize, apart: f32) -> Vec<(usize, String)> {
    let (by, n) = (by.max(1), axis.len().max(1));
    let (first, all) = (axis.positions.start, axis.positions.len());
    let step = whole_step(f64::from(apart) * by as f64 * all as f64 / n as f64).max(1);
    let numbers = all == n && axis.labels.iter().all(|l| is_number(l));
    let named = |position: usize| {
        let i = (position - first) * n / all.max(1);
        let own = axis.labels.get(i).filter(|_| numbers);
        (i / by, own.cloned().unwrap_or_else(|| position.to_string()))
    };
    (first.next_multiple_of(step)..axis.positions.end).step_by(step).map(named).collect()
}

#[expect(clippy::cast_possible_truncation, reason = "a round number of cells")]
fn whole_step(least: f64) -> usize {
    round_step(least).ceil() as usize
}
