//! One description of a picture, whoever draws it.
//!
//! A view puts marks on a page; a renderer draws them. The page is measured in whatever [`Metrics`] says: pixels, or
//! columns and lines of a terminal. So each view is written once.

use crate::color::{Emphasis, Theme};
use crate::palette::{Palette, PaletteKind};
use crate::text;

/// A picture.
#[derive(Clone, Debug, PartialEq)]
pub struct Scene {
    /// Width and height, in the units of the metrics.
    pub size: (f32, f32),
    /// What it stands on.
    pub theme: Theme,
    /// What the colors of cells mean.
    pub kind: PaletteKind,
    /// What it is, in a line.
    pub title: String,
    /// What it shows, for those who cannot see it.
    pub description: String,
    /// What is drawn, from back to front.
    pub marks: Vec<Mark>,
}

/// One thing to draw.
#[derive(Clone, Debug, PartialEq)]
pub enum Mark {
    /// Colors in rows and columns. The legend is one of these, too.
    Cells(Cells),
    /// A line of text.
    Text(Text),
    /// A line between two places.
    Line(Line),
    /// The edge of a box.
    Outline(Area),
}

/// A box: left, top, width, height.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Area {
    /// The left edge.
    pub x: f32,
    /// The upper edge.
    pub y: f32,
    /// How wide.
    pub w: f32,
    /// How high.
    pub h: f32,
}

/// A grid of colors that fills a box.
#[derive(Clone, Debug, PartialEq)]
pub struct Cells {
    /// Where.
    pub at: Area,
    /// How many rows.
    pub rows: usize,
    /// How many columns.
    pub cols: usize,
    /// `[rows, cols]`, places in the palette.
    pub colors: Vec<u8>,
    /// `[rows, cols]`, what each cell is in words; or nothing, if there are too many for words.
    pub tips: Vec<String>,
}

/// A line of text.
#[derive(Clone, Debug, PartialEq)]
pub struct Text {
    /// The place on the middle of the line's height where the anchor is.
    pub at: (f32, f32),
    /// What it says, already harmless.
    pub text: String,
    /// Which part of the text stands at the place.
    pub anchor: Anchor,
    /// Whether it is rotated to run upward from the place; a terminal writes it downward to the place.
    pub rotated: bool,
    /// What it is written on, and how loud.
    pub ink: Ink,
}

/// Which part of a text stands at its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// The left end, or the lower one if rotated.
    Start,
    /// The middle.
    Middle,
    /// The right end, or the upper one if rotated.
    End,
}

/// What a text is written on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ink {
    /// The page.
    Page(Emphasis),
    /// A cell of this color: black or white, whichever reads better.
    On(u8),
}

/// A line between two places.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    /// Where it starts.
    pub from: (f32, f32),
    /// Where it ends.
    pub to: (f32, f32),
    /// 0 to 1: how wide and how solid.
    pub strength: f32,
    /// Whether it leaves and arrives level, as an S, or goes straight.
    pub curved: bool,
    /// Its place in the palette.
    pub color: u8,
}

/// How a page is measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metrics {
    /// How wide a picture may be.
    pub(crate) width: f32,
    /// How high the cells of a map may be, all together.
    pub(crate) height: f32,
    /// How high a line of text is.
    pub(crate) line: f32,
    /// The size of the font, which widths of text are measured by; 0 in a terminal, where text has columns.
    pub(crate) font: f32,
    /// The smallest cell.
    pub(crate) least: (f32, f32),
    /// The largest cell; also what cells of labelled rows grow to.
    pub(crate) most: (f32, f32),
    /// Space between parts.
    pub(crate) gap: (f32, f32),
    /// The smallest map in a grid of maps.
    pub(crate) thumb: f32,
}

impl Metrics {
    /// For SVG and PNG.
    #[must_use]
    pub fn pixels(width: f32) -> Self {
        Self {
            width: width.clamp(200.0, 8000.0),
            height: width.clamp(200.0, 8000.0),
            line: 16.0,
            font: 12.0,
            least: (2.0, 2.0),
            most: (24.0, 24.0),
            gap: (8.0, 8.0),
            thumb: 44.0,
        }
    }

    /// For a terminal of so many columns. A place of a terminal is twice as high as wide, so in color two cells
    /// share one (half blocks); `halves` says whether they may.
    #[must_use]
    pub fn terminal(columns: u16, halves: bool) -> Self {
        let width = f32::from(columns.clamp(20, 1000));
        Self {
            width,
            // More than a screen, so that words can be read; less than one scrolls for long.
            height: 64.0,
            line: 1.0,
            font: 0.0,
            least: if halves { (1.0, 0.5) } else { (2.0, 1.0) },
            most: (2.0, 1.0),
            gap: (1.0, 1.0),
            thumb: if halves { 6.0 } else { 8.0 },
        }
    }

    /// How wide a picture may be.
    #[must_use]
    pub fn width(&self) -> f32 {
        self.width
    }

    /// Whether the page is a terminal, where everything stands in columns and lines.
    #[must_use]
    pub fn is_terminal(&self) -> bool {
        self.font <= 0.0
    }

    /// How wide a harmless text is.
    #[must_use]
    pub fn text_width(&self, label: &str) -> f32 {
        label.chars().map(|c| self.char_width(c)).sum()
    }

    fn char_width(&self, c: char) -> f32 {
        if self.is_terminal() { text::columns(c) as f32 } else { text::em(c) * self.font }
    }

    /// How long a text is if it is rotated: in a terminal a line for each character.
    #[must_use]
    pub fn rotated_length(&self, label: &str) -> f32 {
        if self.is_terminal() {
            label.chars().filter(|&c| text::columns(c) > 0).count() as f32
        } else {
            self.text_width(label)
        }
    }

    /// A text made harmless and cut to a width; `…` says that something was cut.
    #[must_use]
    pub fn fit(&self, label: &str, width: f32) -> String {
        self.cut(label, width, false)
    }

    /// The same for a rotated text.
    #[must_use]
    pub fn fit_rotated(&self, label: &str, length: f32) -> String {
        self.cut(label, length, true)
    }

    fn cut(&self, label: &str, room: f32, rotated: bool) -> String {
        let width = |c: char| match (rotated && self.is_terminal(), text::columns(c)) {
            (true, 0) => 0.0,
            (true, _) => 1.0,
            (false, _) => self.char_width(c),
        };
        let whole = text::clean(label);
        if whole.chars().map(width).sum::<f32>() <= room {
            return whole;
        }
        let mut left = room - width('…');
        let kept = left >= 0.0;
        let fits = |c: &char| {
            left -= width(*c);
            left >= 0.0
        };
        if kept { whole.chars().take_while(fits).chain(['…']).collect() } else { String::new() }
    }
}

impl Scene {
    /// The colors of its cells.
    #[must_use]
    pub fn palette(&self) -> &'static Palette {
        Palette::of(self.theme, self.kind)
    }

    /// All texts, for those who ask whether a font can draw them.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        self.marks.iter().filter_map(|mark| match mark {
            Mark::Text(text) => Some(text.text.as_str()),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cut_says_so_and_fits() {
        let term = Metrics::terminal(80, true);
        assert_eq!(term.fit("attention", 9.0), "attention");
        assert_eq!(term.fit("attention", 5.0), "atte…");
        assert_eq!(term.fit("注意力機制", 6.0), "注意…");
        assert_eq!(term.fit_rotated("注意力機制", 4.0), "注意力…");
        assert_eq!(term.fit("attention", 0.0), "");
        let px = Metrics::pixels(800.0);
        for width in 0..60 {
            assert!(px.text_width(&px.fit("attention 注意", width as f32)) <= width as f32);
        }
    }
}
