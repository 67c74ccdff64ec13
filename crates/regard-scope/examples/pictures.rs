//! What do the pictures look like? Draws every view of a made-up map, to files and to the terminal.
//!
//! `cargo run -p regard-scope --example pictures -- DIRECTORY [COLUMNS]`

use regard_scope::render::{Depth, Fonts, svg, term};
use regard_scope::{Axis, GridItem, Map, Metrics, PaletteKind, Scale, Scene, Style, Theme};
use regard_scope::{alignment, flow, grid, heat, table};
use std::error::Error;
use std::io::Write;
use std::path::Path;

const SOURCE: &str = "The cat sat on the mat because it was tired of chasing the mouse .";
const MIXED: &str = "Attention 注意力 机制 は とても 便利 الانتباه هو كل ما تحتاجه ؟ внимание";

fn axis(title: &str, labels: impl Iterator<Item = String>) -> Axis {
    Axis::new(title, labels.collect())
}

fn words(title: &str, text: &str) -> Axis {
    axis(title, text.split(' ').map(String::from))
}

/// Weights of a head that looks a little back, at the first word, and sometimes elsewhere.
fn weights(title: &str, rows: Axis, cols: Axis, causal: bool, seed: usize) -> Map {
    let mut values = Vec::new();
    for row in 0..rows.len() {
        let sees = |col: usize| !causal || col <= row;
        let score = |col: usize| {
            let there = row as f32 * cols.len() as f32 / rows.len().max(1) as f32;
            let far = (there - col as f32 - (seed % 3) as f32).abs();
            let noise = ((row * 31 + col * 17 + seed * 101) % 29) as f32 / 29.0;
            (2.5 * noise - far * (0.3 + 0.2 * (seed % 5) as f32)).exp()
                + if col == 0 { 0.2 } else { 0.0 }
        };
        let sum: f32 = (0..cols.len()).filter(|&c| sees(c)).map(score).sum();
        values.extend((0..cols.len()).map(|c| if sees(c) { score(c) / sum } else { f32::NAN }));
    }
    Map { title: title.into(), values, rows, cols }
}

fn entropies() -> Map {
    let values = (0..48).map(|i| ((i * 37 + 11) % 60) as f32 / 12.0).collect();
    let rows = axis("layer", (0..6).map(|i| i.to_string()));
    let cols = axis("head", (0..8).map(|i| i.to_string()));
    Map { title: "How widely each head looks".into(), values, rows, cols }
}

fn heads() -> Vec<GridItem> {
    let mut out = Vec::new();
    for (kind, causal, n) in [("self", true, 24), ("cross", false, 17)] {
        for (layer, head) in (0..6).flat_map(|l| (0..8).map(move |h| (l, h))) {
            let rows = axis("query", (0..24).map(|i| i.to_string()));
            let cols = axis("key", (0..n).map(|i| i.to_string()));
            let map = weights("", rows, cols, causal, layer * 8 + head);
            out.push(GridItem { layer, head, kind: kind.into(), map });
        }
    }
    out
}

fn scenes(style: &Style) -> Vec<(&'static str, Scene)> {
    let own = weights("Layer 3, head 1", words("query", SOURCE), words("key", SOURCE), true, 7);
    let mixed = weights("Many scripts", words("target", MIXED), words("source", SOURCE), false, 4);
    let positions = |title: &str| axis(title, (0..1500).map(|i| format!("w{i}")));
    let long = weights("1,500 words", positions("query"), positions("key"), true, 2);
    let logarithmic = Style { scale: Scale::Log { decades: 4.0 }, ..style.clone() };
    let bits = Style { scale: Scale::Linear { most: 5.0 }, unit: "bit".into(), ..style.clone() };
    let half = Style { scale: Scale::Linear { most: 0.5 }, ..style.clone() };
    let mut change =
        weights("Before and after", words("query", SOURCE), words("key", SOURCE), true, 3);
    for (x, y) in change.values.iter_mut().zip(&own.values) {
        *x -= y;
    }
    let differences =
        Style { kind: PaletteKind::Difference, unit: "difference".into(), ..half.clone() };
    vec![
        ("heat", heat(&own, &half)),
        ("long", heat(&long, &logarithmic)),
        ("change", heat(&change, &differences)),
        ("grid", grid("All heads", &heads(), &half)),
        ("flow", flow(&own, 40, &half)),
        ("flow-mixed", flow(&mixed, 30, &half)),
        ("table", table(&entropies(), &bits)),
        ("alignment", alignment(&mixed, &half)),
    ]
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let directory = args.next().ok_or("usage: pictures DIRECTORY [COLUMNS]")?;
    let columns: u16 = args.next().map_or(Ok(80), |c| c.parse())?;
    std::fs::create_dir_all(&directory)?;
    let fonts = Fonts::system();
    for (theme, name) in [(Theme::Dark, "dark"), (Theme::Light, "light")] {
        let style = Style { theme, ..Style::new(Metrics::pixels(900.0)) };
        for (view, scene) in scenes(&style) {
            let path = Path::new(&directory).join(format!("{view}-{name}"));
            std::fs::write(path.with_extension("svg"), svg(&scene))?;
            std::fs::write(path.with_extension("png"), fonts.png(&scene, 2.0)?)?;
            let missing = fonts.missing(&scene);
            if !missing.is_empty() {
                eprintln!("{view}: no font here can draw {missing:?}");
            }
        }
    }
    for (depth, name) in [(Depth::True, "color"), (Depth::Indexed, "256"), (Depth::Ascii, "ascii")]
    {
        let metrics = Metrics::terminal(columns, depth != Depth::Ascii);
        let style = Style { theme: Theme::Dark, ..Style::new(metrics) };
        for (view, scene) in scenes(&style) {
            let path = Path::new(&directory).join(format!("{view}-{name}-{columns}.txt"));
            let text = term(&scene, depth);
            if depth == Depth::True {
                std::io::stdout().write_all(text.as_bytes())?;
            }
            std::fs::write(path, text)?;
        }
    }
    Ok(())
}
