//! Pages that need nothing but themselves: template, style, script and data in one file.

use crate::color::Theme;
use crate::error::Error;
use crate::measure::Pool;
use crate::render::png_uri;
use crate::stats::{HeadStats, stats};
use crate::trace::Trace;
use crate::zoom::{Info, Palettes, TILE, Zoom, max_level};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use regard::Machine;
use serde::Serialize;
use std::collections::BTreeMap;

const STYLE: &str = include_str!("../assets/style.css");
/// What both pages share, and the margins of the map to zoom into.
const SHARED: &str = include_str!("../assets/shared.js");
const MARKS: &str = include_str!("../assets/marks.js");
const TRACE: &str = include_str!("../assets/trace.html");
const TRACE_SCRIPT: &str = include_str!("../assets/trace.js");
const ZOOM: &str = include_str!("../assets/zoom.html");
const ZOOM_SCRIPT: &str = include_str!("../assets/zoom.js");
/// OpenSeadragon; its licence lies beside it.
const VIEWER: &str = include_str!("../assets/openseadragon.min.js");

/// Puts everything into a template. What is put in is never looked at again, whatever it says.
fn fill(template: &str, parts: &[(&str, &str)]) -> String {
    let mut page = String::new();
    let mut rest = template;
    let next = |rest: &str| {
        let found = parts.iter().filter_map(|part| Some((rest.find(part.0)?, *part)));
        found.min_by_key(|(at, _)| *at)
    };
    while let Some((at, (mark, text))) = next(rest) {
        page.push_str(&rest[..at]);
        page.push_str(text);
        rest = &rest[at + mark.len()..];
    }
    page + rest
}

/// Text as it may stand in HTML.
#[must_use]
pub fn escaped(text: &str) -> String {
    let escape = |c: char| match c {
        '&' => "&amp;".into(),
        '<' => "&lt;".into(),
        '>' => "&gt;".into(),
        '"' => "&quot;".into(),
        c => c.to_string(),
    };
    text.chars().map(escape).collect()
}

/// JSON that cannot end the script it stands in.
fn json(data: &impl Serialize) -> Result<String, Error> {
    let text = serde_json::to_string(data).map_err(|e| Error::format("page", e.to_string()))?;
    Ok(text.replace('<', "\\u003c"))
}

#[derive(Serialize)]
struct TraceData<'t> {
    title: &'t str,
    axes: BTreeMap<String, AxisData>,
    palettes: Palettes,
    sites: Vec<SiteData>,
}

#[derive(Serialize)]
struct AxisData {
    title: String,
    labels: Vec<String>,
}

#[derive(Serialize)]
struct SiteData {
    layer: usize,
    kind: String,
    head: usize,
    rows: String,
    cols: String,
    stats: BTreeMap<&'static str, f64>,
    weights: String,
}

/// A page with every head of a trace: maps of at most `cells` cells each way, flows, statistics. One file of about
/// `2.7 x heads x cells^2` bytes at most, and 50 kB.
pub fn trace_page(
    trace: &Trace,
    machine: Machine,
    cells: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<String, Error> {
    let numbers = stats(trace, machine, &mut |_, _| {})?;
    let mut axes = BTreeMap::new();
    let mut sites = Vec::new();
    for (i, HeadStats { site, .. }) in numbers.iter().enumerate() {
        let layer = trace.layer(site)?;
        let map = trace.map(machine, site, 0..layer.data.size()[0], [cells; 2])?;
        for (name, axis) in [(&layer.rows, &map.rows), (&layer.cols, &map.cols)] {
            // Its name, not the title of one map: maps of self-attention call the same axis query and key.
            let (title, labels) = (name.clone(), axis.labels.clone());
            axes.entry(name.clone()).or_insert(AxisData { title, labels });
        }
        let codes: Vec<u8> = map.values.iter().flat_map(|a| code(*a).to_le_bytes()).collect();
        let of = |name| Some((name, numbers[i].get(name)?));
        sites.push(SiteData {
            layer: site.layer,
            kind: site.kind.clone(),
            head: site.head,
            rows: layer.rows.clone(),
            cols: layer.cols.clone(),
            stats: HeadStats::NAMES.into_iter().filter_map(of).collect(),
            weights: STANDARD.encode(codes),
        });
        progress(i + 1, numbers.len());
    }
    let data = TraceData { title: &trace.title, axes, palettes: Palettes::new(), sites };
    let (title, data) = (escaped(&trace.title), json(&data)?);
    let parts = [
        ("{{TITLE}}", title.as_str()),
        ("/*STYLE*/", STYLE),
        ("/*SHARED*/", SHARED),
        ("/*SCRIPT*/", TRACE_SCRIPT),
        ("/*DATA*/", &data),
    ];
    Ok(fill(TRACE, &parts))
}

/// A weight in 16 bits, small ones more finely than large ones; 65535 is a hidden pair.
fn code(weight: f32) -> u16 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 65534")]
    let code = (weight.clamp(0.0, 1.0).sqrt() * 65534.0).round() as u16;
    if weight.is_nan() { u16::MAX } else { code }
}

/// The page of a viewer that asks its own server for tiles: see [`Zoom`].
#[must_use]
pub fn zoom_page(title: &str) -> String {
    filled_zoom(title, "null")
}

fn filled_zoom(title: &str, data: &str) -> String {
    let title = escaped(title);
    let parts = [
        ("{{TITLE}}", title.as_str()),
        ("/*STYLE*/", STYLE),
        ("/*VIEWER*/", VIEWER),
        ("/*SHARED*/", SHARED),
        ("/*MARKS*/", MARKS),
        ("/*SCRIPT*/", ZOOM_SCRIPT),
        ("/*DATA*/", data),
    ];
    fill(ZOOM, &parts)
}

#[derive(Serialize)]
struct StaticZoom {
    info: Info,
    tiles: BTreeMap<String, String>,
    labels: BTreeMap<&'static str, Vec<String>>,
}

/// Pixels each way that a page without a server holds: beyond that its finest level shows several pairs in a pixel.
const MOST_PIXELS: usize = 4096;

/// A page that holds the tiles of one head itself, up to 4096 pixels each way: a pixel for each pair up to so many, else the
/// largest of several. At most 45 MB, of noise; 12 MB of 100,000 tokens with a causal mask.
pub fn zoom_page_of(
    zoom: &Zoom,
    site: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<String, Error> {
    zoom.survey(site, &|| false)?;
    let size = zoom.size(site)?;
    let most = max_level(size);
    let finest = most.min(MOST_PIXELS.ilog2());
    let mut places = Vec::new();
    for level in 0..=finest {
        let [down, across] = size.map(|n| n.div_ceil(1 << (most - level)).div_ceil(TILE));
        places.extend((0..down).flat_map(|y| (0..across).map(move |x| (level, x, y))));
    }
    let mut tiles = BTreeMap::new();
    for (i, (level, x, y)) in places.iter().enumerate() {
        let tile = zoom.tile(site, Pool::Max, *level, [*x, *y])?;
        for (theme, name) in [(Theme::Dark, "dark"), (Theme::Light, "light")] {
            tiles.insert(format!("0/max/{name}/{level}/{x}/{y}"), png_uri(&tile.png(theme)));
        }
        progress(i + 1, places.len());
    }
    // Words are seen where pairs are.
    let words = |keys: bool| {
        zoom.words(site, keys, 0..if finest == most { size[usize::from(keys)] } else { 0 })
    };
    let labels = BTreeMap::from([("q", words(false)?), ("k", words(true)?)]);
    let info = zoom.info(site)?.alone(site);
    let title = info.title().to_string();
    Ok(filled_zoom(&title, &json(&StaticZoom { info, tiles, labels })?))
}
