//! All heads of all layers at once, small: where to look first.

use super::Style;
use super::number::count;
use super::pool::{caption, pairs_each, pool};
use super::sheet::Sheet;
use crate::color::Emphasis;
use crate::map::Map;
use crate::scene::{Anchor, Area, Cells, Scene};
use std::collections::BTreeMap;

/// One head of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct GridItem {
    /// Which layer, from 0.
    pub layer: usize,
    /// Which head, from 0.
    pub head: usize,
    /// Which attention of the layer: `self`, `cross`. Each has a block of its own.
    pub kind: String,
    /// Its weights.
    pub map: Map,
}

/// Maps of all layers (down) and heads (across), a block for each kind in the order in which they come. Heads that do
/// not fit beside each other go on below.
#[must_use]
pub fn grid(title: &str, items: &[GridItem], style: &Style) -> Scene {
    let mut sheet = Sheet::new(title, style);
    let mut kinds: Vec<&str> = Vec::new();
    for item in items {
        if !kinds.contains(&item.kind.as_str()) {
            kinds.push(&item.kind);
        }
    }
    let (mut by, at) = ((1, 1), arrange(items, &sheet));
    for kind in &kinds {
        let of: Vec<&GridItem> = items.iter().filter(|i| i.kind == *kind).collect();
        let largest = block(kind, &of, &at, &mut sheet);
        by = (by.0.max(largest.0), by.1.max(largest.1));
    }
    sheet.legend();
    if let Some(text) = caption(by, &style.unit, style.kind) {
        sheet.caption(&text.replace(" of ", " of up to "));
    }
    let description = format!("{} maps of {} kinds", count(items.len()), count(kinds.len()));
    sheet.finish(title, description)
}

/// Where small maps stand: the same in all blocks, so that blocks can be compared.
struct GridLayout {
    /// Left edge of the first map.
    x: f32,
    /// Width and height of a cell; less than the page can draw, if maps have to be pooled.
    cell: (f32, f32),
    /// From one map to the next.
    step: (f32, f32),
    /// How many stand beside each other.
    across: usize,
}

/// Draws the maps of a kind; says by how much the largest of them had to be pooled.
fn block(
    kind: &str,
    items: &[&GridItem],
    at: &GridLayout,
    sheet: &mut Sheet<'_>,
) -> (usize, usize) {
    let m = sheet.metrics();
    if !kind.is_empty() {
        let at = (sheet.margin.0, sheet.y + m.line / 2.0);
        sheet.text(at, m.fit(kind, sheet.room()), Anchor::Start, Emphasis::Plain);
        sheet.y += m.line;
    }
    let mut layers: BTreeMap<usize, BTreeMap<usize, &GridItem>> = BTreeMap::new();
    for item in items {
        layers.entry(item.layer).or_default().insert(item.head, item);
    }
    let mut heads: Vec<usize> = items.iter().map(|i| i.head).collect();
    heads.sort_unstable();
    heads.dedup();
    let mut by = (1, 1);
    for (part, heads) in heads.chunks(at.across).enumerate() {
        let corner = if part == 0 { "layer  head" } else { "head" };
        let y = sheet.y + m.line / 2.0;
        let corner = m.fit(corner, at.x - sheet.margin.0 - m.gap.0);
        sheet.text((at.x - m.gap.0, y), corner, Anchor::End, Emphasis::Quiet);
        for (i, head) in heads.iter().enumerate() {
            let x = at.x + i as f32 * at.step.0;
            sheet.text((x, y), head.to_string(), Anchor::Start, Emphasis::Quiet);
        }
        sheet.y += m.line;
        for (layer, of) in &layers {
            let y = sheet.y + m.line / 2.0;
            sheet.text((at.x - m.gap.0, y), layer.to_string(), Anchor::End, Emphasis::Quiet);
            for (i, head) in heads.iter().enumerate() {
                let Some(item) = of.get(head) else { continue };
                let used = thumb(&item.map, at.x + i as f32 * at.step.0, at.cell, sheet);
                let used = pairs_each(&item.map, used);
                by = (by.0.max(used.0), by.1.max(used.1));
            }
            sheet.y += at.step.1;
        }
        sheet.y += m.gap.1;
    }
    by
}

/// How large the small maps are, and how many stand beside each other.
fn arrange(items: &[GridItem], sheet: &Sheet<'_>) -> GridLayout {
    let m = sheet.metrics();
    let most = |f: fn(&GridItem) -> usize| items.iter().map(f).max().unwrap_or(1).max(1) as f32;
    let widest = items.iter().map(|i| m.text_width(&i.layer.to_string())).fold(0.0, f32::max);
    let left = widest.max(m.text_width("layer  head")) + m.gap.0;
    let gap = if m.is_terminal() { 1.0 } else { 5.0 };
    let room = (sheet.room() - left).max(m.thumb);
    let fit = ((room + gap) / (m.thumb + gap)).floor().max(1.0);
    // As many rows of heads as needed, and all of them equally long.
    let mut heads: Vec<usize> = items.iter().map(|i| i.head).collect();
    heads.sort_unstable();
    heads.dedup();
    let heads = heads.len().max(1) as f32;
    let across = (heads / (heads / fit).ceil()).ceil();
    let largest = if m.is_terminal() { 16.0 } else { 130.0 };
    let w = ((room + gap) / across - gap).floor().clamp(m.thumb.min(room), largest);
    let (rows, cols) = (most(|i| i.map.rows.len()), most(|i| i.map.cols.len()));
    // Small maps grow by whole steps, so that their cells are equally wide.
    let cell = if cols < w { (w / cols).floor() } else { w / cols };
    // A place of a terminal is twice as high as wide.
    let high = if m.is_terminal() { cell / 2.0 } else { cell };
    let h = (high * rows).min(2.0 * w).max(m.line);
    let down = if m.is_terminal() { (h + 0.5).ceil() } else { h + gap };
    GridLayout {
        x: sheet.margin.0 + left,
        cell: (cell, h / rows),
        step: (cell * cols + gap, down),
        across: count_of(across),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a count")]
fn count_of(x: f32) -> usize {
    (x as usize).max(1)
}

/// Draws a small map; says by how much it was pooled.
pub(super) fn thumb(map: &Map, x: f32, cell: (f32, f32), sheet: &mut Sheet<'_>) -> (usize, usize) {
    let (m, style) = (sheet.metrics(), sheet.style);
    // A pixel for a cell is enough here; a terminal has no more than its places.
    let least = if m.is_terminal() { (1.0, m.least.1) } else { (1.0, 1.0) };
    let whole = |x: f32, least: f32| (x / least).ceil().max(1.0) * least;
    let w = whole(map.cols.len() as f32 * cell.0, least.0);
    let h = whole(map.rows.len() as f32 * cell.1, least.1);
    let share = |n: usize, room: f32, least: f32| n.div_ceil(count_of(room / least));
    let by = (share(map.rows.len(), h, least.1), share(map.cols.len(), w, least.0));
    let pooled = pool(map, by, style.kind);
    let palette = style.palette();
    let colors = pooled.values.iter().map(|&v| palette.index(v, style.scale)).collect();
    let at = Area { x, y: sheet.y, w, h };
    let (rows, cols) = (pooled.rows, pooled.cols);
    sheet.cells(Cells { at, rows, cols, colors, tips: Vec::new() });
    pooled.by
}
