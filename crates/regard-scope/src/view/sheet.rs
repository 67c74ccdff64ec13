//! A page while it is being laid out: it grows with what is put on it.

use super::{Style, number};
use crate::color::Emphasis;
use crate::scene::{Anchor, Area, Cells, Ink, Line, Mark, Metrics, Scene, Text};

/// Headings are larger, and bolder, than what their width is measured by.
const LARGER: f32 = 1.35;

pub(crate) struct Sheet<'s> {
    pub(crate) style: &'s Style,
    pub(crate) margin: (f32, f32),
    /// Where the next part begins.
    pub(crate) y: f32,
    right: f32,
    marks: Vec<Mark>,
}

impl<'s> Sheet<'s> {
    /// A page with its title.
    pub(crate) fn new(title: &str, style: &'s Style) -> Self {
        let m = &style.metrics;
        let margin = if m.is_terminal() { (0.0, 0.0) } else { (16.0, 12.0) };
        let mut sheet = Self { style, margin, y: margin.1, right: 0.0, marks: Vec::new() };
        if !title.is_empty() {
            let text = m.fit(title, sheet.room() / if m.is_terminal() { 1.0 } else { LARGER });
            sheet.text((margin.0, sheet.y + m.line / 2.0), text, Anchor::Start, Emphasis::Strong);
            sheet.y += m.line + m.gap.1;
        }
        sheet
    }

    pub(crate) fn metrics(&self) -> &'s Metrics {
        &self.style.metrics
    }

    /// How wide the page is between its margins.
    pub(crate) fn room(&self) -> f32 {
        self.metrics().width - 2.0 * self.margin.0
    }

    /// Text on the page, level. Its place is on the middle of its height.
    pub(crate) fn text(&mut self, at: (f32, f32), text: String, anchor: Anchor, loud: Emphasis) {
        let m = self.metrics();
        let larger = if loud == Emphasis::Strong && !m.is_terminal() { LARGER } else { 1.0 };
        let part = match anchor {
            Anchor::Start => 1.0,
            Anchor::Middle => 0.5,
            Anchor::End => 0.0,
        };
        self.reach(at.0 + m.text_width(&text) * larger * part);
        self.marks.push(Mark::Text(Text {
            at,
            text,
            anchor,
            rotated: false,
            ink: Ink::Page(loud),
        }));
    }

    /// A label that runs upward from its place.
    pub(crate) fn rotated(&mut self, at: (f32, f32), text: String) {
        let ink = Ink::Page(Emphasis::Plain);
        self.reach(at.0 + self.metrics().line / 2.0);
        self.marks.push(Mark::Text(Text { at, text, anchor: Anchor::Start, rotated: true, ink }));
    }

    /// A number in a cell.
    pub(crate) fn text_on(&mut self, at: (f32, f32), text: String, color: u8) {
        let (anchor, ink) = (Anchor::Middle, Ink::On(color));
        self.marks.push(Mark::Text(Text { at, text, anchor, rotated: false, ink }));
    }

    pub(crate) fn cells(&mut self, cells: Cells) {
        self.reach(cells.at.x + cells.at.w);
        self.marks.push(Mark::Cells(cells));
    }

    pub(crate) fn outline(&mut self, at: Area) {
        self.marks.push(Mark::Outline(at));
    }

    pub(crate) fn line(&mut self, line: Line) {
        self.reach(line.from.0.max(line.to.0));
        self.marks.push(Mark::Line(line));
    }

    /// Something reaches this far to the right.
    pub(crate) fn reach(&mut self, x: f32) {
        self.right = self.right.max(x);
    }

    /// A quiet line below what is there; long ones are broken between words.
    pub(crate) fn caption(&mut self, text: &str) {
        let m = self.metrics();
        let mut line = String::new();
        for word in text.split(' ') {
            let longer = if line.is_empty() { word.into() } else { format!("{line} {word}") };
            if m.text_width(&longer) > self.room() && !line.is_empty() {
                self.caption_line(&line);
                line = word.into();
            } else {
                line = longer;
            }
        }
        self.caption_line(&line);
    }

    fn caption_line(&mut self, line: &str) {
        let (m, x) = (self.metrics(), self.margin.0);
        let text = m.fit(line, self.room());
        self.text((x, self.y + m.line / 2.0), text, Anchor::Start, Emphasis::Quiet);
        self.y += m.line;
    }

    /// Which color is which number: a bar, and numbers below it.
    pub(crate) fn legend(&mut self) {
        let m = self.metrics();
        let name = m.fit(&self.style.unit, self.room() / 3.0);
        let x = self.margin.0 + m.text_width(&name) + m.gap.0;
        let wanted: f32 = if m.is_terminal() { 40.0 } else { 300.0 };
        let w = wanted.min(self.room() - (x - self.margin.0)).max(m.line);
        let y = self.y + m.line / 2.0;
        self.text((self.margin.0, y), name, Anchor::Start, Emphasis::Quiet);
        let bar = if m.is_terminal() { 1.0 } else { 10.0 };
        let at = Area { x, y: y - bar / 2.0, w, h: bar };
        self.cells(Cells { at, rows: 1, cols: 255, colors: (1..=255).collect(), tips: Vec::new() });
        let ticks = number::legend(self.style.scale, self.style.kind);
        let mut free = self.margin.0;
        for (part, text) in ticks {
            let width = m.text_width(&text);
            // The ends stay within the bar, and in a terminal every text starts on a column.
            let start = (x + w * part - width / 2.0).min(x + w - width).max(x);
            let start = if m.is_terminal() { start.round() } else { start };
            if start >= free {
                free = start + width + m.gap.0;
                self.text((start, y + m.line), text, Anchor::Start, Emphasis::Quiet);
            }
        }
        self.y += 2.0 * m.line;
    }

    /// The finished page.
    pub(crate) fn finish(self, title: &str, description: String) -> Scene {
        let m = self.metrics();
        let width = (self.right + self.margin.0).min(m.width).max(1.0);
        Scene {
            size: (width.ceil(), (self.y + self.margin.1).ceil().max(1.0)),
            theme: self.style.theme,
            kind: self.style.kind,
            title: m.fit(title, f32::INFINITY),
            description,
            marks: self.marks,
        }
    }
}
