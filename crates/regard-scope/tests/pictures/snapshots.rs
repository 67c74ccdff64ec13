//! What pictures of small maps look like, as text. `INSTA_UPDATE=always` writes them anew; look before you commit.

use crate::common::{all, ascii, long, pixels, small};
use regard_scope::render::{Depth, svg, term};
use regard_scope::{Metrics, PaletteKind, Scale, Style, Theme, heat};

#[test]
fn views_in_ascii() {
    for (name, scene) in all(&small(), &ascii(80)) {
        insta::assert_snapshot!(format!("ascii_{name}"), term(&scene, Depth::Ascii));
    }
}

/// How well images are compressed is not ours to fix.
fn without_images(text: &str) -> String {
    let mut parts = text.split("base64,");
    let first = parts.next().unwrap_or_default().to_string();
    parts.fold(first, |out, part| out + "base64,.." + part.trim_start_matches(|c| c != '"'))
}

#[test]
fn views_in_svg() {
    for (name, scene) in all(&small(), &pixels()) {
        insta::assert_snapshot!(format!("svg_{name}"), without_images(&svg(&scene)));
    }
}

#[test]
fn a_long_map_says_that_it_is_pooled() {
    let style = Style { scale: Scale::Log { decades: 2.0 }, ..ascii(60) };
    insta::assert_snapshot!("ascii_long", term(&heat(&long(), &style), Depth::Ascii));
}

#[test]
fn colors_of_a_terminal() {
    let style = Style { theme: Theme::Dark, ..Style::new(Metrics::terminal(80, true)) };
    for (name, depth) in [("true", Depth::True), ("indexed", Depth::Indexed)] {
        let text = term(&heat(&small(), &style), depth);
        insta::assert_snapshot!(format!("color_{name}"), text.replace('\x1b', "ESC"));
    }
}

#[test]
fn differences_in_ascii() {
    let mut map = small();
    for (i, x) in map.values.iter_mut().enumerate() {
        *x *= if i % 2 == 0 { 1.0 } else { -1.0 };
    }
    let style = Style { kind: PaletteKind::Difference, unit: "difference".into(), ..ascii(80) };
    insta::assert_snapshot!("ascii_difference", term(&heat(&map, &style), Depth::Ascii));
}
