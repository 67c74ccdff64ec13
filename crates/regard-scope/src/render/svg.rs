//! A scene as SVG: text stays text, so that it can be selected, searched and read aloud.

use super::image;
use crate::color::Emphasis;
use crate::scene::{Anchor, Area, Cells, Ink, Line, Mark, Scene, Text};
use crate::text::{clean, from_right};
use std::fmt::Write;

/// DejaVu first: it is the one that widths are measured by. The others have the scripts that it lacks.
const FONTS: &str = "'DejaVu Sans','Noto Sans','Noto Sans CJK SC','Noto Sans CJK JP','Noto Sans Arabic',\
'Noto Sans Hebrew','Noto Sans Devanagari','PingFang SC','Hiragino Sans','Microsoft YaHei','Segoe UI',sans-serif";

/// The sizes of text. Headings are larger, but not by much.
fn font_size(ink: Ink) -> f32 {
    match ink {
        Ink::Page(Emphasis::Strong) => 14.5,
        Ink::Page(Emphasis::Quiet) => 11.5,
        _ => 12.0,
    }
}

/// A scene that was laid out in pixels, as an SVG file.
#[must_use]
pub fn svg(scene: &Scene) -> String {
    write(scene, true)
}

/// The same, with or without the page and the cells: PNG paints those itself.
pub(crate) fn write(scene: &Scene, whole: bool) -> String {
    let (w, h) = (number(scene.size.0), number(scene.size.1));
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{w}\" height=\"{h}\" viewBox=\"0 0 {w} {h}\" \
role=\"img\" font-family=\"{FONTS}\" font-size=\"12\">\n\
<title>{}</title>\n<desc>{}</desc>\n",
        escape(&scene.title),
        escape(&scene.description)
    );
    if whole {
        let page = scene.theme.page().css();
        let _ = writeln!(out, "<rect width=\"{w}\" height=\"{h}\" fill=\"{page}\"/>");
    }
    for mark in &scene.marks {
        match mark {
            Mark::Cells(cells) if whole => draw_cells(cells, scene, &mut out),
            Mark::Cells(_) => {}
            Mark::Text(text) => draw_text(text, scene, &mut out),
            Mark::Line(line) => draw_line(line, scene, &mut out),
            Mark::Outline(area) => draw_outline(*area, scene, &mut out),
        }
    }
    out.push_str("</svg>\n");
    out
}

fn draw_cells(cells: &Cells, scene: &Scene, out: &mut String) {
    let Area { x, y, w, h } = cells.at;
    let palette = scene.palette();
    if cells.tips.len() != cells.colors.len() || cells.colors.is_empty() {
        if let Some(uri) = image::data_uri(cells, palette) {
            let _ = writeln!(
                out,
                "<image x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" preserveAspectRatio=\"none\" \
style=\"image-rendering:pixelated\" href=\"{uri}\"/>",
                number(x),
                number(y),
                number(w),
                number(h)
            );
        }
        return;
    }
    let (cols, rows) = (cells.cols.max(1), cells.rows.max(1));
    let (w, h) = (w / cols as f32, h / rows as f32);
    out.push_str("<g shape-rendering=\"crispEdges\">\n");
    for (i, (&color, tip)) in cells.colors.iter().zip(&cells.tips).enumerate() {
        let _ = writeln!(
            out,
            "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"><title>{}</title></rect>",
            number(x + (i % cols) as f32 * w),
            number(y + (i / cols) as f32 * h),
            number(w),
            number(h),
            palette.color(color).css(),
            escape(tip)
        );
    }
    out.push_str("</g>\n");
}

fn draw_text(text: &Text, scene: &Scene, out: &mut String) {
    if text.text.is_empty() {
        return;
    }
    let size = font_size(text.ink);
    let color = match text.ink {
        Ink::Page(emphasis) => scene.theme.text(emphasis),
        Ink::On(index) => scene.palette().color(index).ink(),
    };
    // The middle of small letters and capitals lies about a third of the size above the base line.
    let down = 0.36 * size;
    let (x, y) = text.at;
    let place = if text.rotated {
        format!("transform=\"translate({} {}) rotate(-90)\"", number(x + down), number(y))
    } else {
        format!("x=\"{}\" y=\"{}\"", number(x), number(y + down))
    };
    let anchor = match text.anchor {
        Anchor::Start => "",
        Anchor::Middle => " text-anchor=\"middle\"",
        Anchor::End => " text-anchor=\"end\"",
    };
    let weight = if text.ink == Ink::Page(Emphasis::Strong) { " font-weight=\"600\"" } else { "" };
    // `direction` would swap start and end; this only says from where the words are read.
    let bidi = if from_right(&text.text) { " style=\"unicode-bidi:plaintext\"" } else { "" };
    let size =
        if size == 12.0 { String::new() } else { format!(" font-size=\"{}\"", number(size)) };
    let spaced = text.text.trim() != text.text || text.text.contains("  ");
    let space = if spaced { " xml:space=\"preserve\"" } else { "" };
    let _ = writeln!(
        out,
        "<text {place}{anchor}{size}{weight}{bidi} fill=\"{}\"{space}>{}</text>",
        color.css(),
        escape(&text.text)
    );
}

fn draw_line(line: &Line, scene: &Scene, out: &mut String) {
    let strength = unit(line.strength);
    let ((x0, y0), (x1, y1)) = (line.from, line.to);
    let middle = number((x0 + x1) / 2.0);
    let (x0, y0, x1, y1) = (number(x0), number(y0), number(x1), number(y1));
    let way = if line.curved {
        format!("M{x0} {y0}C{middle} {y0} {middle} {y1} {x1} {y1}")
    } else {
        format!("M{x0} {y0}L{x1} {y1}")
    };
    let _ = writeln!(
        out,
        "<path d=\"{way}\" fill=\"none\" stroke=\"{}\" stroke-width=\"{}\" stroke-opacity=\"{}\" \
stroke-linecap=\"round\"/>",
        scene.palette().color(line.color).css(),
        number(0.8 + 4.2 * strength),
        number(0.35 + 0.65 * strength)
    );
}

fn draw_outline(area: Area, scene: &Scene, out: &mut String) {
    let _ = writeln!(
        out,
        "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>",
        number(area.x + 1.0),
        number(area.y + 1.0),
        number((area.w - 2.0).max(0.0)),
        number((area.h - 2.0).max(0.0)),
        scene.theme.accent().css()
    );
}

fn unit(x: f32) -> f32 {
    if x.is_nan() { 0.0 } else { x.clamp(0.0, 1.0) }
}

/// A number as SVG takes it: two digits after the point are a hundredth of a pixel.
fn number(x: f32) -> String {
    let x = if x.is_finite() { x.clamp(-1e6, 1e6) } else { 0.0 };
    let text = format!("{x:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".into() } else { text.into() }
}

/// Text that cannot be taken for markup. Scenes can be built by hand, so it is made harmless here once more.
fn escape(text: &str) -> String {
    let mut out = String::new();
    for c in clean(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}
