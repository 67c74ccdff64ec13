//! Small maps that tests share.

use regard_scope::{Axis, GridItem, Map, Metrics, Scale, Scene, Style};
use regard_scope::{alignment, flow, grid, heat, table};

pub(crate) fn axis(title: &str, labels: &str) -> Axis {
    let labels = labels.split_whitespace().map(String::from).collect();
    Axis::new(title, labels)
}

/// Weights of a causal head over four words of four scripts.
pub(crate) fn small() -> Map {
    let n = f32::NAN;
    let values = vec![1.0, n, n, n, 0.3, 0.7, n, n, 0.05, 0.15, 0.8, n, 0.5, 0.2, 0.1, 0.2];
    let words = "look 注意 انتبه смотри";
    Map {
        title: "Small <&> map".into(),
        values,
        rows: axis("query", words),
        cols: axis("key", words),
    }
}

/// 300 positions that look at themselves, and a little at the first.
pub(crate) fn long() -> Map {
    let position = |row: usize, col: usize| match (row, col) {
        (r, c) if r == c => 0.9,
        (_, 0) => 0.1,
        (r, c) if c > r => f32::NAN,
        _ => 0.0,
    };
    let values = (0..300 * 300).map(|i| position(i / 300, i % 300)).collect();
    let axis = |title: &str| Axis::new(title, (0..300).map(|i| format!("w{i}")).collect());
    Map { title: "300 words".into(), values, rows: axis("query"), cols: axis("key") }
}

/// Every view of a map.
pub(crate) fn all(map: &Map, style: &Style) -> Vec<(&'static str, Scene)> {
    let items: Vec<GridItem> = (0..6)
        .map(|i| {
            let kind = if i < 4 { "self" } else { "cross" };
            GridItem { layer: i % 4 / 2, head: i % 2, kind: kind.into(), map: map.clone() }
        })
        .collect();
    vec![
        ("heat", heat(map, style)),
        ("grid", grid(&map.title, &items, style)),
        ("flow", flow(map, 12, style)),
        ("table", table(map, style)),
        ("alignment", alignment(map, style)),
    ]
}

pub(crate) fn pixels() -> Style {
    Style::new(Metrics::pixels(480.0))
}

pub(crate) fn ascii(columns: u16) -> Style {
    Style { scale: Scale::Linear { most: 1.0 }, ..Style::new(Metrics::terminal(columns, false)) }
}
