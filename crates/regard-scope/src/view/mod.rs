//! From numbers to pictures.

mod beside;
mod chart;
mod flow;
mod grid;
mod heat;
mod matrix;
mod number;
mod pool;
mod sheet;
mod table;

pub use beside::beside;
pub use chart::{Chart, ChartAxis, Series, chart};
pub use flow::flow;
pub use grid::{GridItem, grid};
pub use heat::{alignment, heat};
pub use table::table;

use crate::color::Theme;
use crate::palette::{Palette, PaletteKind, Scale};
use crate::scene::Metrics;

/// How a picture is to look.
#[derive(Clone, Debug, PartialEq)]
pub struct Style {
    /// What it stands on.
    pub theme: Theme,
    /// Whether the numbers are amounts or differences.
    pub kind: PaletteKind,
    /// Which number gets which color.
    pub scale: Scale,
    /// What one of the numbers is called: `weight`.
    pub unit: String,
    /// What the page is measured in, and how wide it is.
    pub metrics: Metrics,
}

impl Style {
    /// Weights on a light page, evenly from 0 to 1.
    #[must_use]
    pub fn new(metrics: Metrics) -> Self {
        Self {
            theme: Theme::Light,
            kind: PaletteKind::Amount,
            scale: Scale::Linear { most: 1.0 },
            unit: "weight".into(),
            metrics,
        }
    }

    pub(crate) fn palette(&self) -> &'static Palette {
        Palette::of(self.theme, self.kind)
    }
}
