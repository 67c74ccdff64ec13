//! A scene in a terminal: cells as half blocks, lines as dots of braille, text as text.

use super::canvas::{Canvas, Pen, Place};
use crate::color::{Emphasis, Lab, Rgb};
use crate::palette::PaletteKind;
use crate::scene::{Anchor, Area, Cells, Ink, Line, Mark, Scene, Text};
use crate::text::{clean, columns, from_right};
use std::sync::LazyLock;

/// What a terminal can show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Depth {
    /// 24 bits of color.
    True,
    /// The 256 colors that nearly all have.
    Indexed,
    /// No colors and no blocks: shades of ASCII characters, without any escape sequence, for files and pipes.
    Ascii,
}

/// A scene that was laid out for a terminal, as lines that end in `\n`.
///
/// Text outside cells has the colors of the terminal, whatever the theme is.
#[must_use]
pub fn term(scene: &Scene, depth: Depth) -> String {
    // More is not a terminal, but a scene in pixels by mistake.
    let mut canvas = Canvas::new(whole(scene.size.0, 1000), whole(scene.size.1, 10_000));
    // Numbers among shades would be hard to read, and they say more.
    let written = |m: &Mark| matches!(m, Mark::Text(Text { ink: Ink::On(_), .. }));
    let numbers = depth == Depth::Ascii && scene.marks.iter().any(written);
    for mark in &scene.marks {
        match mark {
            Mark::Cells(cells) if numbers && cells.rows > 1 => {}
            Mark::Cells(cells) => draw_cells(cells, &mut canvas),
            Mark::Text(text) => draw_text(text, &mut canvas),
            Mark::Line(line) => draw_line(line, &mut canvas),
            Mark::Outline(area) => draw_outline(*area, &mut canvas),
        }
    }
    let mut out = String::new();
    for y in 0..canvas.height {
        write_row(canvas.row(y), scene, depth, &mut out);
    }
    out
}

#[expect(clippy::cast_possible_truncation, reason = "clamped; NaN is 0")]
fn whole(x: f32, most: u16) -> usize {
    x.ceil().clamp(0.0, f32::from(most)) as usize
}

/// The nearest whole number; casts saturate.
#[expect(clippy::cast_possible_truncation, reason = "far outside every canvas")]
fn near(x: f32) -> i64 {
    x.round().clamp(-1e6, 1e6) as i64
}

/// Each half of a place shows the strongest of the cells that it covers.
fn draw_cells(cells: &Cells, canvas: &mut Canvas) {
    let Area { x, y, w, h } = cells.at;
    let (left, right) = (near(x), near(x + w));
    let (top, bottom) = (near(2.0 * y), near(2.0 * (y + h)));
    let (wide, high) = (right - left, bottom - top);
    if cells.rows == 0 || cells.cols == 0 || cells.colors.len() < cells.rows * cells.cols {
        return;
    }
    let range = |i: i64, n: usize, of: i64| {
        let at = |i: i64| {
            usize::try_from(i128::from(i) * n as i128 / i128::from(of)).unwrap_or(0).min(n)
        };
        at(i)..at(i + 1).max(at(i) + 1).min(n)
    };
    for sy in 0..high.min(2 * canvas.height as i64) {
        for sx in 0..wide.min(canvas.width as i64) {
            let rows = range(sy, cells.rows, high);
            let cols = range(sx, cells.cols, wide);
            let colors =
                rows.flat_map(|r| cols.clone().map(move |c| cells.colors[r * cells.cols + c]));
            canvas.half(left + sx, top + sy, colors.max().unwrap_or(0));
        }
    }
}

fn draw_text(text: &Text, canvas: &mut Canvas) {
    let words = clean(&text.text);
    let pen = match text.ink {
        Ink::Page(Emphasis::Quiet) => Pen::Quiet,
        Ink::Page(Emphasis::Plain) => Pen::Plain,
        Ink::Page(Emphasis::Strong) => Pen::Strong,
        Ink::On(color) => Pen::On(color),
    };
    if text.rotated {
        let high = words.chars().filter(|&c| columns(c) > 0).count() as f32;
        let mut y = near(text.at.1.ceil() - high);
        for c in words.chars() {
            let x = near((text.at.0 - columns(c).max(1) as f32 / 2.0).floor());
            if columns(c) == 0 {
                canvas.put(x + 1, y - 1, c, pen);
            } else {
                canvas.put(x, y, c, pen);
                y += 1;
            }
        }
        return;
    }
    let width: usize = words.chars().map(columns).sum();
    let part = match text.anchor {
        Anchor::Start => 0.0,
        Anchor::Middle => 0.5,
        Anchor::End => 1.0,
    };
    let (mut x, y) = (near((text.at.0 - part * width as f32).floor()), near(text.at.1.floor()));
    for c in words.chars() {
        x = canvas.put(x, y, c, pen);
    }
    // A terminal that orders text by direction must not carry the next part of the line along.
    if from_right(&words) {
        canvas.put(x, y, '\u{200e}', pen);
    }
}

/// The edge of a box: brackets, for boxes of one line.
fn draw_outline(area: Area, canvas: &mut Canvas) {
    let (left, right, y) = (near(area.x), near(area.x + area.w) - 1, near(area.y.floor()));
    if area.h < 1.0 {
        return;
    }
    let marks = if left == right { vec![(left, 'o')] } else { vec![(left, '['), (right, ']')] };
    for (x, c) in marks {
        let on = canvas.place(x, y).and_then(|p| p.halves[0]);
        canvas.put(x, y, c, on.map_or(Pen::Accent, Pen::On));
    }
}

/// Strong lines are two dots wide.
fn draw_line(line: &Line, canvas: &mut Canvas) {
    let ((x0, y0), (x1, y1)) = (line.from, line.to);
    let long = (2.0 * (x1 - x0)).abs().max((4.0 * (y1 - y0)).abs()) * 2.0;
    let steps = near(long).clamp(1, 100_000);
    for i in 0..=steps {
        let t = i as f32 / steps as f32;
        // The curve of the SVG, whose middle points lie at half the way across, is near to this one.
        let down = if line.curved { t * t * (3.0 - 2.0 * t) } else { t };
        let (x, y) = (2.0 * (x0 + (x1 - x0) * t), 4.0 * (y0 + (y1 - y0) * down));
        // Places of words lie on an edge between dots; a line must not step over it at its very end.
        let (x, y) = (near(x.floor()).min(near(2.0 * x1) - 1), near((y - 0.25).floor()));
        canvas.dot(x, y, line.color);
        if line.strength >= 0.5 {
            canvas.dot(x, y - 1, line.color);
        }
    }
}

/// What a place looks like: the color in front, the color behind, bold or dim, and the character.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
struct CellStyle {
    front: Option<Rgb>,
    back: Option<Rgb>,
    loud: Option<bool>,
}

fn write_row(row: &[Place], scene: &Scene, depth: Depth, out: &mut String) {
    let used = row.iter().rposition(|p| *p != Place::default()).map_or(0, |i| i + 1);
    let mut line = String::new();
    let mut now = CellStyle::default();
    for place in row[..used].iter().filter(|p| !p.covered) {
        let (look, text) = look(place, scene, depth);
        if depth != Depth::Ascii && look != now {
            line.push_str(&sequence(&look, depth));
            now = look;
        }
        if depth == Depth::Ascii {
            line.extend(text.chars().map(plain));
        } else {
            line.push_str(&text);
        }
    }
    if now != CellStyle::default() {
        line.push_str("\x1b[0m");
    }
    out.push_str(if depth == Depth::Ascii { line.trim_end() } else { &line });
    out.push('\n');
}

fn look(place: &Place, scene: &Scene, depth: Depth) -> (CellStyle, String) {
    // What the terminal will show, so that ink is chosen for that.
    let color = |i: u8| match depth {
        Depth::Indexed => indexed(scene.palette().color(i)).1,
        _ => scene.palette().color(i),
    };
    let ascii = depth == Depth::Ascii;
    let [upper, lower] = place.halves.map(|half| half.map(color));
    if let Some((text, pen)) = &place.glyph {
        let (front, loud) = match pen {
            Pen::Quiet => (None, Some(false)),
            Pen::Plain => (None, None),
            Pen::Strong => (None, Some(true)),
            Pen::On(index) => (Some(color(*index).ink()), None),
            Pen::Accent => (Some(scene.theme.accent()), None),
        };
        let back = upper.or(lower);
        // On a painted cell the text of the page could vanish.
        let front = front.or_else(|| back.map(Rgb::ink));
        return (CellStyle { front, back, loud }, text.clone());
    }
    if place.dots != 0 {
        let dots = char::from_u32(0x2800 + u32::from(place.dots)).unwrap_or(' ');
        let shade = if place.dot_color > 220 {
            '#'
        } else if place.dot_color > 165 {
            '*'
        } else {
            '.'
        };
        let front = Some(color(place.dot_color));
        return (
            CellStyle { front, ..CellStyle::default() },
            if ascii { shade } else { dots }.into(),
        );
    }
    if ascii {
        let most = place.halves.into_iter().flatten().max();
        return (CellStyle::default(), most.map_or(' ', |i| shade(i, scene.kind)).into());
    }
    match (upper, lower) {
        (None, None) => (CellStyle::default(), " ".into()),
        (Some(x), Some(y)) if x == y => {
            (CellStyle { back: Some(x), ..CellStyle::default() }, " ".into())
        }
        (Some(x), back) => (CellStyle { front: Some(x), back, loud: None }, "▀".into()),
        (None, front) => (CellStyle { front, ..CellStyle::default() }, "▄".into()),
    }
}

/// Our own signs in ASCII. Labels stay what they are.
fn plain(c: char) -> char {
    match c {
        '→' => '>',
        '↑' => '^',
        '↓' => 'v',
        '—' => '-',
        '●' => 'o',
        '○' => 'x',
        '▲' => 'A',
        '△' => '+',
        '■' => '#',
        '□' => '%',
        '◆' => 'D',
        '◇' => '&',
        '…' => '~',
        c => c,
    }
}

/// A color as a character: darker ones for more; letters below zero, digits above.
fn shade(index: u8, kind: PaletteKind) -> char {
    let pick =
        |ramp: &[u8], part: usize| char::from(ramp[(part * ramp.len() / 256).min(ramp.len() - 1)]);
    match (index, kind) {
        (0, _) => ' ',
        (i, PaletteKind::Amount) => pick(b".:-=+*#%@", usize::from(i)),
        (i, PaletteKind::Difference) if i < 128 => pick(b".abcdefghi", 2 * usize::from(128 - i)),
        (i, PaletteKind::Difference) => pick(b".123456789", 2 * usize::from(i - 128)),
    }
}

fn sequence(look: &CellStyle, depth: Depth) -> String {
    let mut out = String::from("\x1b[0");
    match look.loud {
        Some(true) => out.push_str(";1"),
        Some(false) => out.push_str(";2"),
        None => {}
    }
    for (code, color) in [(38, look.front), (48, look.back)] {
        match color {
            Some(c) if depth == Depth::True => {
                out.push_str(&format!(";{code};2;{};{};{}", c.0, c.1, c.2));
            }
            Some(c) => out.push_str(&format!(";{code};5;{}", indexed(c).0)),
            None => {}
        }
    }
    out.push('m');
    out
}

/// xterm's 256 colors without the first 16, which users change: a cube of 6 x 6 x 6 from 16, 24 grays from 232.
static XTERM: LazyLock<Vec<(u8, Rgb, Lab)>> = LazyLock::new(|| {
    const LEVELS: [u8; 6] = [0, 95, 135, 175, 215, 255];
    let level = |n: u8| LEVELS[usize::from(n % 6)];
    let cube = (0..216).map(|i| (16 + i, Rgb(level(i / 36), level(i / 6), level(i))));
    let grays = (0..24).map(|i| (232 + i, Rgb(8 + 10 * i, 8 + 10 * i, 8 + 10 * i)));
    cube.chain(grays).map(|(i, c)| (i, c, Lab::from_linear(c.linear()))).collect()
});

/// The nearest of them, and what it is.
fn indexed(color: Rgb) -> (u8, Rgb) {
    let lab = Lab::from_linear(color.linear());
    let far = |c: &(u8, Rgb, Lab)| c.2.distance(lab);
    let best = XTERM.iter().min_by(|x, y| far(x).total_cmp(&far(y)));
    best.map_or((16, Rgb(0, 0, 0)), |c| (c.0, c.1))
}
