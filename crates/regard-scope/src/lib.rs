//! The microscope of Regard: what attention looks at, as numbers and pictures, at any length.
//!
//! A line as straight as the engine's: [`Trace`] (what was seen) ─► [`Map`] (numbers and words) ─► [`Scene`] (a view, laid out for a
//! page or a terminal) ─► SVG, PNG, terminal. Weights are made again from queries, keys and `lse` whenever a map is asked for, so a
//! trace of a million tokens is a file of its queries and keys, and no more.
//!
//! ```
//! use regard::Machine;
//! use regard_scope::render::{Depth, svg, term};
//! use regard_scope::{Inputs, Labels, Layer, Metrics, LayerData, Style, Trace, heat};
//! use std::collections::BTreeMap;
//!
//! # fn main() -> Result<(), regard_scope::Error> {
//! // What a program knows of one attention: q [heads, queries, features], k [key heads, keys, features].
//! let x: Vec<f32> = (0..2 * 4 * 8).map(|i| (i as f32).sin()).collect();
//! let inputs = Inputs::new((x.clone(), [2, 4, 8]), (x, [2, 4, 8]), "causal")?;
//! let (rows, cols) = ("words".to_string(), "words".to_string());
//! let (kind, data, value_norms) = ("self".into(), LayerData::Inputs(inputs), Vec::new());
//! let layer = Layer { layer: 0, kind, rows, cols, data, value_norms };
//! let words = ["to", "be", "or", "not"].map(String::from).to_vec();
//! let axes = BTreeMap::from([("words".to_string(), Labels::new("word", words))]);
//! let trace = Trace { title: "a question".into(), axes, layers: vec![layer], ..Trace::default() };
//!
//! let site = &trace.sites()[1]; // layer 0, head 1
//! let map = trace.map(Machine::detect(), site, 0..4, [100; 2])?;
//! println!("{}", term(&heat(&map, &Style::new(Metrics::terminal(80, false))), Depth::Ascii));
//! let picture = svg(&heat(&map, &Style::new(Metrics::pixels(600.0))));
//! assert!(picture.contains("not") && map.row(0)[1].is_nan()); // "to" may not see "be"
//! # Ok(())
//! # }
//! ```
//!
//! | to | begin with |
//! |---|---|
//! | save and load what was seen | [`Trace`], `docs/trace.md` |
//! | draw numbers over numbers | [`chart()`]; maps before and after: [`beside`] |
//! | draw it | [`heat`], [`grid()`], [`flow`], [`alignment`], [`table`]; [`render`] |
//! | measure heads | [`stats`], [`span_mass`], and [`regard::AttentionView`] for single queries |
//! | find induction heads, retrieval heads, sinks | [`HeadScores`] |
//! | align words, and find the heads that do | [`AlignmentWeights`], [`AlignmentErrors`] |
//! | compare two traces | [`head_diffs`], [`difference_page`] |
//! | write a page | [`trace_page`], [`zoom_page_of`] |
//! | explore a long map | [`Zoom`] |
//! | measure what does not fit into memory | [`NpyReader`], [`BlockedRows`] |

#![forbid(unsafe_code)]

mod align;
mod blocks;
mod color;
mod error;
mod head_diff;
mod heads;
mod map;
mod mask;
mod measure;
mod npy;
mod page;
mod palette;
mod python;
pub mod render;
pub mod scene;
mod spans;
mod stats;
mod text;
mod trace;
mod view;
mod write;
mod zoom;

pub use align::{
    AlignmentErrors, AlignmentHead, AlignmentWeights, DecoderRow, GoldLinks, pharaoh,
    words_of_tokens,
};
pub use blocks::{BlockedRows, CellMaps, RowStats};
pub use color::{Emphasis, Rgb, Theme};
pub use error::Error;
pub use head_diff::{HeadDiff, head_diffs};
pub use heads::{HeadScores, Needle, heads_page};
pub use map::{Axis, Map};
pub use mask::{MASK_HELP, MaskError, parse_mask, parse_mask_with};
pub use measure::{
    Divergence, HeadAudit, Measure, MeasureOutput, Pattern, Pool, PooledMap, RetainedMass, Top,
    audit, diff, rollout,
};
pub use npy::{NpyReader, read_npy};
pub use page::{difference_page, escaped, trace_page, zoom_page, zoom_page_of};
pub use palette::{Palette, PaletteKind, Scale};
pub use python::python;
pub use scene::{Metrics, Scene};
pub use spans::{SpanMass, span_mass};
pub use stats::{HeadStats, HeadSums, stats};
pub use text::printable;
pub use trace::{Inputs, Labels, Layer, LayerData, Site, Trace, Weights};
pub use view::{
    Chart, ChartAxis, GridItem, Series, Style, alignment, beside, chart, flow, grid, heat, table,
};
pub use write::{
    is_temporary, remove_temporaries, temporary, write_atomically, write_atomically_with,
};
pub use zoom::{Hover, Info, RowFacts, Tile, Zoom};
