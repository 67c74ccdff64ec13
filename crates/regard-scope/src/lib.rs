//! The microscope of Regard: what attention looks at, as numbers and pictures, at any length.

#![forbid(unsafe_code)]

mod colour;
mod error;
mod map;
mod mask;
mod page;
mod palette;
pub mod render;
pub mod scene;
mod stats;
mod text;
mod trace;
mod view;
mod zoom;

pub use colour::{Emphasis, Rgb, Theme};
pub use error::Error;
pub use map::{Axis, Map};
pub use mask::{MASK_HELP, MaskError, parse_mask};
pub use page::{trace_page, zoom_page, zoom_page_of};
pub use palette::{Kind, Palette, Scale};
pub use scene::{Metrics, Scene};
pub use stats::{HeadStats, stats};
pub use trace::{Heads, Labels, Layer, Seen, Site, Trace, Weights, write_atomically};
pub use view::{GridItem, Style, alignment, flow, grid, heat, table};
pub use zoom::{Hover, Info, Pixel, RowFacts, Tile, Zoom};
