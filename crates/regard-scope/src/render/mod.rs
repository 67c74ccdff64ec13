//! Scenes drawn: as SVG, as PNG, and in a terminal.
//!
//! ```
//! use regard_scope::render::{Depth, Fonts, svg, term};
//! use regard_scope::{Axis, Map, Metrics, Style, heat};
//!
//! let words = |title: &str| Axis::new(title, vec!["to".into(), "be".into()]);
//! let values = vec![1.0, f32::NAN, 0.3, 0.7]; // "to" may not see "be"
//! let map = Map { title: "A head".into(), values, rows: words("query"), cols: words("key") };
//!
//! let scene = heat(&map, &Style::new(Metrics::pixels(600.0)));
//! assert!(svg(&scene).starts_with("<svg"));
//! let fonts = Fonts::bundled();
//! assert!(fonts.missing(&scene).is_empty());
//! let png: Vec<u8> = fonts.png(&scene, 2.0)?;
//!
//! let scene = heat(&map, &Style::new(Metrics::terminal(80, false)));
//! assert!(term(&scene, Depth::Ascii).contains("be --##"));
//! # Ok::<(), regard_scope::render::PngError>(())
//! ```

mod canvas;
mod image;
#[cfg(feature = "png")]
mod png;
mod svg;
mod term;

pub(crate) use image::{indexed_png, png_uri};
#[cfg(feature = "png")]
pub use png::{Fonts, PngError};
pub use svg::svg;
pub use term::{Depth, term};
