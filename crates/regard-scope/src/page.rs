//! Pages that need nothing but themselves: template, style, script and data in one file.

use crate::color::Theme;
use crate::error::Error;
use crate::head_diff::head_diffs;
use crate::heads::{HeadLabel, head_labels};
use crate::map::{Axis, Map};
use crate::measure::Pool;
use crate::palette::PaletteKind;
use crate::render::png_uri;
use crate::spans::SpanRows;
use crate::stats::{HeadStats, stats};
use crate::trace::{Labels, Trace};
use crate::zoom::{Info, Palettes, SpanPlace, TILE, Zoom, max_level};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use regard::Machine;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::Range;

const STYLE: &str = include_str!("../assets/style.css");
/// What both pages share, and the margins of the map to zoom into.
const SHARED: &str = include_str!("../assets/shared.js");
const MARKS: &str = include_str!("../assets/marks.js");
const TRACE: &str = include_str!("../assets/trace.html");
const WEIGHTS: &str = include_str!("../assets/weights.js");
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
    interventions: &'t [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<AgainstData<'t>>,
}

#[derive(Serialize)]
struct AxisData {
    title: String,
    labels: Vec<String>,
    spans: Vec<SpanData>,
}

/// A span, and where it begins and ends in rows or columns of the map, which stand for several positions each if it is pooled.
#[derive(Serialize)]
struct SpanData {
    #[serde(flatten)]
    place: SpanPlace,
    cells: [f64; 2],
}

#[derive(Serialize)]
struct SiteData {
    layer: usize,
    kind: String,
    head: usize,
    rows: String,
    cols: String,
    #[serde(flatten)]
    run: RunData,
    /// The same head of the other trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    after: Option<RunData>,
    /// The mean Jensen-Shannon divergence between the two.
    #[serde(skip_serializing_if = "Option::is_none")]
    change: Option<f64>,
}

/// A head as one run of the model has it.
#[derive(Serialize)]
struct RunData {
    stats: BTreeMap<&'static str, f64>,
    labels: Vec<HeadLabel>,
    /// Of each span of the keys: the mean mass, and that of the last query.
    spans: Vec<[f64; 2]>,
    /// `[rows, spans]`, in 16 bits each.
    masses: String,
    /// `[rows, cols]`, in 16 bits each.
    weights: String,
}

/// The trace that another one is compared with.
#[derive(Serialize)]
struct AgainstData<'t> {
    title: &'t str,
    interventions: &'t [String],
    /// Of differences.
    palettes: Palettes,
}

/// A page with every head of a trace: maps of at most `cells` cells each way, flows, statistics, the mass on the spans of its axes, and
/// labels by [`HeadScores`](crate::HeadScores). One file of about `2.7 x heads x cells^2` bytes at most, and 60 kB. Four passes over the
/// weights, one more with spans.
pub fn trace_page(
    trace: &Trace,
    machine: Machine,
    cells: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<String, Error> {
    page(trace, None, machine, cells, progress)
}

/// A page of two traces of the same layers, heads and tokens, before and after an intervention or of two models: [`trace_page`] of either,
/// and their difference. Twice as large.
pub fn difference_page(
    before: &Trace,
    after: &Trace,
    machine: Machine,
    cells: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<String, Error> {
    page(before, Some(after), machine, cells, progress)
}

fn page(
    trace: &Trace,
    after: Option<&Trace>,
    machine: Machine,
    cells: usize,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<String, Error> {
    let numbers = |trace: &Trace| stats(trace, machine, &mut |_, _| {});
    let own = numbers(trace)?;
    let changes = after.map(|after| head_diffs(trace, after, machine, &mut |_, _| {}));
    let (changes, after_numbers) = (changes.transpose()?, after.map(numbers).transpose()?);
    let mut axes = BTreeMap::new();
    let mut sites = Vec::new();
    for (i, numbers) in own.iter().enumerate() {
        let site = &numbers.site;
        let layer = trace.layer(site)?;
        // Masses of both runs are on the spans that the page shows.
        let spans = trace.labels(&layer.cols).spans.as_slice();
        let (run, map) = RunData::new(trace, numbers, spans, (machine, cells))?;
        for (name, axis) in [(&layer.rows, &map.rows), (&layer.cols, &map.cols)] {
            let new = || AxisData::new(name, trace.labels(name), axis);
            axes.entry(name.clone()).or_insert_with(new);
        }
        let other = after_numbers.iter().flatten().find(|numbers| numbers.site == *site);
        let after_run = after
            .zip(other)
            .map(|(after, numbers)| RunData::new(after, numbers, spans, (machine, cells)));
        sites.push(SiteData {
            layer: site.layer,
            kind: site.kind.clone(),
            head: site.head,
            rows: layer.rows.clone(),
            cols: layer.cols.clone(),
            run,
            after: after_run.transpose()?.map(|(run, _)| run),
            change: changes.as_ref().map(|changes| told_change(changes[i].mean.js)),
        });
        progress(i + 1, own.len());
    }
    let against = after.map(|after| AgainstData {
        title: &after.title,
        interventions: &after.interventions,
        palettes: Palettes::new(PaletteKind::Difference),
    });
    let palettes = Palettes::new(PaletteKind::Amount);
    let (title, interventions) = (&trace.title, trace.interventions.as_slice());
    let data = TraceData { title, axes, palettes, sites, interventions, against };
    let (title, data) = (escaped(&trace.title), json(&data)?);
    let parts = [
        ("{{TITLE}}", title.as_str()),
        ("/*STYLE*/", STYLE),
        ("/*SHARED*/", SHARED),
        ("/*WEIGHTS*/", WEIGHTS),
        ("/*SCRIPT*/", TRACE_SCRIPT),
        ("/*DATA*/", &data),
    ];
    Ok(fill(TRACE, &parts))
}

/// The divergence of equal weights is a rounding error; a page says 0.
fn told_change(js: f64) -> f64 {
    if js < 1e-9 { 0.0 } else { js }
}

impl AxisData {
    fn new(name: &str, labels: &Labels, axis: &Axis) -> Self {
        let (positions, cells) = (axis.positions.len(), axis.len() as f64);
        let span = |place: SpanPlace| {
            let cells = place.positions.map(|at| at as f64 * cells / positions.max(1) as f64);
            SpanData { place, cells }
        };
        // Its name, not the title of one map: maps of self-attention call the same axis query and key.
        let title = name.to_string();
        let spans = SpanPlace::all(labels, positions).into_iter().map(span).collect();
        Self { title, labels: axis.labels.clone(), spans }
    }
}

impl RunData {
    /// With the map whose weights these are.
    fn new(
        trace: &Trace,
        numbers: &HeadStats,
        spans: &[(String, Range<usize>)],
        (machine, cells): (Machine, usize),
    ) -> Result<(Self, Map), Error> {
        let site = &numbers.site;
        let layer = trace.layer(site)?;
        let q_len = layer.data.size()[0];
        let map = trace.map(machine, site, 0..q_len, [cells; 2])?;
        let down = map.rows.len();
        let begin = |cell: usize| (cell * q_len).div_ceil(down.max(1));
        let (mut means, mut masses) = (Vec::new(), Vec::new());
        if !spans.is_empty() {
            let rows = SpanRows::of(&layer.data, machine, site.head, spans)?;
            means.extend(rows.means());
            for cell in 0..down {
                #[expect(clippy::cast_possible_truncation, reason = "16 bits are kept of it")]
                let of_cell = |span| rows.mean(span, begin(cell)..begin(cell + 1)) as f32;
                masses.extend((0..spans.len()).map(of_cell));
            }
        }
        let stat = |name| Some((name, numbers.get(name)?));
        let run = Self {
            stats: HeadStats::NAMES.into_iter().filter_map(stat).collect(),
            labels: head_labels(trace, layer, site.head, machine)?,
            spans: means,
            masses: encoded(&masses),
            weights: encoded(&map.values),
        };
        Ok((run, map))
    }
}

/// Base64 of numbers from 0 to 1, in 16 bits each.
fn encoded(values: &[f32]) -> String {
    let codes: Vec<u8> = values.iter().flat_map(|a| code(*a).to_le_bytes()).collect();
    STANDARD.encode(codes)
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
    /// Of each span of the keys: the mean mass, and that of the last query.
    masses: Vec<[f64; 2]>,
    names: Vec<HeadLabel>,
}

/// Pixels each way that a page without a server holds: beyond that its finest level shows several pairs in a pixel.
const MOST_PIXELS: usize = 4096;

/// A page that contains the tiles of one head, the mass on the spans of the keys and the labels of the head. Up to 4096 pixels each way: a
/// pixel for each pair, beyond that the largest of several. Costs four passes over the weights besides the tiles; at most 45 MB, of noise,
/// 12 MB of 100,000 tokens with a causal mask.
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
    let (masses, names) = zoom.head_facts(site)?;
    let info = zoom.info(site)?.alone(site);
    let title = info.title().to_string();
    Ok(filled_zoom(&title, &json(&StaticZoom { info, tiles, labels, masses, names })?))
}
