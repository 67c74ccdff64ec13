//! What holds for any map, however odd: nothing panics, files are well formed, lines fit.

use crate::common::{all, pixels, small};
use proptest::prelude::*;
use regard_scope::render::{Depth, Fonts, PngError, svg, term};
use regard_scope::{Axis, Map, Metrics, PaletteKind, Scale, Scene, Style, Theme, flow, heat};
use unicode_width::UnicodeWidthChar;

fn number() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => 0.0f32..1.0,
        2 => Just(f32::NAN),
        1 => any::<f32>(),
        1 => prop::sample::select(vec![0.0, -0.0, 1e-30, f32::INFINITY, f32::NEG_INFINITY, f32::MAX]),
    ]
}

fn label() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "[a-z]{0,12}",
        2 => any::<String>(),
        1 => prop::sample::select(vec![
            "\x1b[31mred\x1b]0;title\x07", "</text><script>", "]]>&amp;\"'", "\u{202e}right", "注意力机制",
            "الانتباه", "👩\u{200d}👩\u{200d}👧", "e\u{301}\u{301}\u{301}\u{301}\u{301}", "\r\n\t", " ", "\u{9b}2J",
        ]).prop_map(String::from),
        1 => "[a-z注]{300,400}",
    ]
}

fn axis(most: usize) -> impl Strategy<Value = Axis> {
    (label(), prop::collection::vec(label(), 0..most))
        .prop_map(|(title, labels)| Axis::new(title, labels))
}

fn map() -> impl Strategy<Value = Map> {
    (label(), axis(24), axis(24), prop::collection::vec(number(), 0..600), any::<bool>()).prop_map(
        |(title, rows, cols, mut values, whole)| {
            if whole {
                values.resize(rows.len() * cols.len(), 0.25);
            }
            Map { title, values, rows, cols }
        },
    )
}

fn style(metrics: Metrics) -> impl Strategy<Value = Style> {
    let scale = (any::<bool>(), number()).prop_map(|(linear, x)| {
        if linear { Scale::Linear { most: x } } else { Scale::Log { decades: x } }
    });
    (any::<bool>(), any::<bool>(), scale, label()).prop_map(move |(dark, amount, scale, unit)| {
        Style {
            theme: if dark { Theme::Dark } else { Theme::Light },
            kind: if amount { PaletteKind::Amount } else { PaletteKind::Difference },
            scale,
            unit,
            metrics,
        }
    })
}

fn in_pixels() -> impl Strategy<Value = Style> {
    (0.0f32..1500.0).prop_flat_map(|w| style(Metrics::pixels(w)))
}

fn in_terminal() -> impl Strategy<Value = (u16, Depth, Style)> {
    let depth = prop::sample::select(vec![Depth::True, Depth::Indexed, Depth::Ascii]);
    (20u16..220, depth).prop_flat_map(|(columns, depth)| {
        let metrics = Metrics::terminal(columns, depth != Depth::Ascii);
        (Just(columns), Just(depth), style(metrics))
    })
}

/// A line without our own sequences, which are all `ESC [ digits ; .. m`.
fn bare(line: &str) -> String {
    let mut out = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("\x1b[") {
        out.push_str(before);
        let end = after.find(|c: char| !c.is_ascii_digit() && c != ';').unwrap_or(0);
        assert_eq!(after.as_bytes()[end], b'm', "{line:?}");
        rest = &after[end + 1..];
    }
    out + rest
}

fn well_formed(scene: &Scene) {
    let text = svg(scene);
    let tree = roxmltree::Document::parse(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    let names = ["svg", "title", "desc", "rect", "text", "g", "path", "image"];
    for node in tree.descendants().filter(|n| n.is_element()) {
        assert!(names.contains(&node.tag_name().name()), "{:?}", node.tag_name());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn svg_is_well_formed(map in map(), style in in_pixels()) {
        for (_, scene) in all(&map, &style) {
            well_formed(&scene);
        }
    }

    #[test]
    fn nothing_is_drawn_outside_the_page(map in map(), style in in_pixels()) {
        for (name, scene) in all(&map, &style) {
            for mark in &scene.marks {
                if let regard_scope::scene::Mark::Cells(cells) = mark {
                    let at = cells.at;
                    prop_assert!(at.x >= 0.0 && at.y >= 0.0, "{name}: {at:?}");
                    prop_assert!(at.x + at.w <= scene.size.0 + 0.5, "{name}: {at:?} {:?}", scene.size);
                    prop_assert!(at.y + at.h <= scene.size.1 + 0.5, "{name}: {at:?} {:?}", scene.size);
                }
            }
        }
    }

    #[test]
    fn lines_of_a_terminal_fit_and_hold_no_foreign_sequences(
        map in map(), (columns, depth, style) in in_terminal(),
    ) {
        for (name, scene) in all(&map, &style) {
            let text = term(&scene, depth);
            prop_assert!(depth != Depth::Ascii || !text.contains('\x1b'));
            for line in text.lines() {
                let line = bare(line);
                prop_assert!(!line.contains(|c: char| c.is_control()), "{line:?}");
                let width: usize = line.chars().map(|c| c.width().unwrap_or(0)).sum();
                prop_assert!(width <= usize::from(columns), "{name}: {width} > {columns}: {line}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn png_is_drawn(map in map(), style in in_pixels()) {
        let fonts = Fonts::bundled();
        for (_, scene) in all(&map, &style) {
            let png = fonts.png(&scene, 1.0).unwrap();
            prop_assert!(png.starts_with(b"\x89PNG"));
        }
    }
}

#[test]
fn large_maps_fit_any_page() {
    let axis = |n: usize| Axis::new("query", vec!["word".into(); n]);
    for (rows, cols) in [(1, 5000), (5000, 1), (1500, 1500), (3, 3000), (400, 50)] {
        let values = (0..rows * cols).map(|i| i as f32 / (rows * cols) as f32).collect();
        let map = Map { title: "large".into(), values, rows: axis(rows), cols: axis(cols) };
        for columns in [20, 80, 200] {
            let text =
                term(&heat(&map, &Style::new(Metrics::terminal(columns, true))), Depth::True);
            let width = |l: &str| bare(l).chars().count();
            assert!(text.lines().all(|l| width(l) <= usize::from(columns)), "{rows} x {cols}");
            assert!(text.lines().count() < 90, "{rows} x {cols}: {}", text.lines().count());
            assert!(text.contains("each cell is the"), "{rows} x {cols}: {text}");
        }
        let scene = heat(&map, &pixels());
        assert!(
            scene.size.0 <= 480.0 && scene.size.1 <= 900.0,
            "{rows} x {cols}: {:?}",
            scene.size
        );
        well_formed(&scene);
        let lines = flow(&map, 30, &pixels());
        assert!(lines.size.1 <= 900.0, "{rows} x {cols}: {:?}", lines.size);
    }
}

#[test]
fn cells_with_tooltips_say_their_words_and_number() {
    let text = svg(&heat(&small(), &pixels()));
    assert!(text.contains("<title>注意 → look: 0.3</title>"), "{text}");
}

#[test]
fn png_has_a_size_that_can_be_drawn() {
    let fonts = Fonts::bundled();
    let scene = heat(&small(), &pixels());
    for zoom in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e9] {
        assert!(matches!(fonts.png(&scene, zoom), Err(PngError::Size { .. })), "{zoom}");
    }
}

#[test]
fn fonts_say_what_they_cannot_draw() {
    let scene = heat(&small(), &pixels());
    assert_eq!(Fonts::bundled().missing(&scene), ['意', '注']);
}
