//! A scene as PNG: cells painted pixel by pixel, and over them the SVG of the rest, drawn with fonts that we have.

use super::svg;
use crate::color::Rgb;
use crate::scene::{Area, Cells, Mark, Scene};
use crate::text::clean;
use resvg::tiny_skia::{Color, ColorU8, Pixmap, Transform};
use resvg::usvg::fontdb::{Database, Style};
use resvg::usvg::{FontResolver, Options, Tree};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex};

/// Latin, Greek, Cyrillic, Arabic, Hebrew and many signs, so that labels are drawn on machines without any fonts.
const DEJAVU: &[u8] = include_bytes!("../../assets/DejaVuSans.ttf");

/// A side of 16,384 pixels, and in all a gigabyte while it is drawn: more is a mistake.
const MOST_PIXELS: f32 = 268_435_456.0;

/// Why there is no PNG.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PngError {
    /// The picture has no pixels, or too many.
    Size {
        /// Pixels across.
        width: u64,
        /// Pixels down.
        height: u64,
    },
    /// The SVG could not be drawn: a mistake of ours.
    Draw(String),
}

impl fmt::Display for PngError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size { width, height } => {
                write!(
                    f,
                    "a picture of {width} x {height} pixels cannot be drawn: choose another width or zoom"
                )
            }
            Self::Draw(why) => write!(f, "the picture cannot be drawn: {why}"),
        }
    }
}

impl std::error::Error for PngError {}

/// The fonts that pictures are drawn with. Finding them takes a while, so keep it.
#[derive(Clone, Debug)]
pub struct Fonts {
    known: Arc<Database>,
}

impl Fonts {
    /// The fonts of this system, and one that we bring.
    #[must_use]
    pub fn system() -> Self {
        let mut found = Database::new();
        found.load_system_fonts();
        // The first font that has a character is taken, and words should look alike whatever their script.
        let mut faces: Vec<_> = found.faces().cloned().collect();
        faces.sort_by_key(|face| {
            let sans = |name: &str| name.contains("Sans") && !name.contains("Mono");
            let bold = face.weight.0.abs_diff(400);
            (!face.families.iter().any(|(name, _)| sans(name)), face.style != Style::Normal, bold)
        });
        let mut known = Self::bundled_only();
        for face in faces {
            known.push_face_info(face);
        }
        Self { known: Arc::new(known) }
    }

    /// Only the one that we bring: the same pixels on every machine, but no Chinese, Japanese or Korean.
    #[must_use]
    pub fn bundled() -> Self {
        Self { known: Arc::new(Self::bundled_only()) }
    }

    fn bundled_only() -> Database {
        let mut known = Database::new();
        known.load_font_data(DEJAVU.to_vec());
        known.set_sans_serif_family("DejaVu Sans");
        known
    }

    /// A scene that was laid out in pixels, `zoom` times as large: 2 for screens of today.
    ///
    /// # Errors
    /// If it has no pixels, or too many.
    pub fn png(&self, scene: &Scene, zoom: f32) -> Result<Vec<u8>, PngError> {
        let (w, h) = ((scene.size.0 * zoom).ceil(), (scene.size.1 * zoom).ceil());
        let fits = w >= 1.0 && h >= 1.0 && w * h <= MOST_PIXELS && w.max(h) <= 65_535.0;
        #[expect(clippy::cast_possible_truncation, reason = "casts saturate")]
        let (width, height) = (w as u64, h as u64);
        let wrong = PngError::Size { width, height };
        let (Ok(w), Ok(h), true) = (u32::try_from(width), u32::try_from(height), fits) else {
            return Err(wrong);
        };
        let tree = self.tree(&svg::write(scene, false), FontResolver::default())?;
        let mut pixels = Pixmap::new(w, h).ok_or(wrong)?;
        let page = scene.theme.page();
        pixels.fill(Color::from_rgba8(page.0, page.1, page.2, 255));
        for mark in &scene.marks {
            if let Mark::Cells(cells) = mark {
                paint(cells, scene, zoom, &mut pixels);
            }
        }
        resvg::render(&tree, Transform::from_scale(zoom, zoom), &mut pixels.as_mut());
        pixels.encode_png().map_err(|e| PngError::Draw(e.to_string()))
    }

    /// The characters of a scene that no font here can draw, so that one can say so instead of drawing boxes.
    #[must_use]
    pub fn missing(&self, scene: &Scene) -> Vec<char> {
        let all: BTreeSet<char> =
            scene.texts().flat_map(|t| clean(t).chars().collect::<Vec<_>>()).collect();
        let missing = Arc::new(Mutex::new(BTreeSet::new()));
        let (usual, heard) = (FontResolver::default_fallback_selector(), Arc::clone(&missing));
        // Asked for a font only where the first one lacks a character.
        let resolver = FontResolver {
            select_font: FontResolver::default_font_selector(),
            select_fallback: Box::new(move |c, used, fonts| {
                let found = usual(c, used, fonts);
                if found.is_none()
                    && let Ok(mut heard) = heard.lock()
                {
                    heard.insert(c);
                }
                found
            }),
        };
        let mut page =
            String::from("<svg xmlns=\"http://www.w3.org/2000/svg\" font-family=\"DejaVu Sans\">");
        for c in all.iter().filter(|c| c.is_alphanumeric() || !c.is_ascii()) {
            page.push_str(&format!("<text>&#{};</text>", *c as u32));
        }
        page.push_str("</svg>");
        if self.tree(&page, resolver).is_err() {
            return Vec::new();
        }
        let missing = missing.lock().map(|m| m.iter().copied().collect());
        missing.unwrap_or_default()
    }

    fn tree(&self, text: &str, font_resolver: FontResolver<'_>) -> Result<Tree, PngError> {
        let fontdb = Arc::clone(&self.known);
        let options = Options {
            fontdb,
            font_resolver,
            font_family: "DejaVu Sans".into(),
            ..Options::default()
        };
        Tree::from_str(text, &options).map_err(|e| PngError::Draw(e.to_string()))
    }
}

/// Paints cells as whole pixels, so that their edges are sharp. Cost: each pixel once.
fn paint(cells: &Cells, scene: &Scene, zoom: f32, pixels: &mut Pixmap) {
    let Area { x, y, w, h } = cells.at;
    if cells.rows == 0 || cells.cols == 0 || cells.colors.len() < cells.rows * cells.cols {
        return;
    }
    let (across, down) = (pixels.width() as usize, pixels.height() as usize);
    let (left, right) = (pixel(x * zoom, across), pixel((x + w) * zoom, across));
    let (top, bottom) = (pixel(y * zoom, down), pixel((y + h) * zoom, down));
    let palette = scene.palette();
    let paints: Vec<_> = (0..=255u8).map(|i| palette.color(i)).map(solid).collect();
    for py in top..bottom {
        let row = ((py - top) * cells.rows / (bottom - top)).min(cells.rows - 1);
        for px in left..right {
            let col = ((px - left) * cells.cols / (right - left)).min(cells.cols - 1);
            let color = cells.colors[row * cells.cols + col];
            pixels.pixels_mut()[py * across + px] = paints[usize::from(color)];
        }
    }
}

fn solid(c: Rgb) -> resvg::tiny_skia::PremultipliedColorU8 {
    ColorU8::from_rgba(c.0, c.1, c.2, 255).premultiply()
}

/// The nearest pixel of a picture so many pixels wide.
#[expect(clippy::cast_possible_truncation, reason = "clamped; NaN is 0")]
fn pixel(x: f32, most: usize) -> usize {
    (x.round().max(0.0) as usize).min(most)
}
