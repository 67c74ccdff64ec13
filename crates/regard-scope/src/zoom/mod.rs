//! A map of any size as a pyramid of tiles, each made when somebody looks at it.
//!
//! Level `L` of a map of `n` pairs each way has a pixel for `2^(max_level - L)` queries and as many keys; a tile has 256 x 256
//! pixels. A fine tile covers few pairs and is exact at once. A coarse one covers too many to make while somebody waits: it is
//! made from a sample of its rows first, each of them exact, and a walk over the whole map in the background
//! ([`Zoom::survey`]) replaces all such tiles by exact ones.

mod survey;

use crate::color::Theme;
use crate::error::Error;
use crate::heads::{HeadLabel, head_labels};
use crate::measure::{Measure, Pool};
use crate::palette::{Palette, PaletteKind, Scale};
use crate::render::indexed_png;
use crate::spans::SpanRows;
use crate::trace::{Labels, Layer, LayerData, Site, Trace};
use regard::Machine;
use serde::Serialize;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use survey::{PixelStats, Survey};

/// Pixels of a tile, each way.
pub(crate) const TILE: usize = 256;

/// Surveys that are kept: of the heads looked at last. A large one takes 180 MB.
const KEPT: usize = 4;

/// The heads of a trace, to be explored.
#[derive(Debug)]
pub struct Zoom {
    trace: Trace,
    machine: Machine,
    sites: Vec<Site>,
    /// By site, the one used last at the end.
    surveys: Mutex<Vec<(usize, Arc<Survey>)>>,
}

/// What a viewer must know of a head.
#[derive(Clone, Debug, Serialize)]
pub struct Info {
    title: String,
    q_len: usize,
    k_len: usize,
    tile: usize,
    max_level: u32,
    sites: Vec<Site>,
    q_title: String,
    k_title: String,
    q_spans: Vec<SpanPlace>,
    k_spans: Vec<SpanPlace>,
    palettes: Palettes,
    decades: u32,
    progress: f64,
    exact: bool,
}

impl Info {
    /// What the trace is.
    #[must_use]
    pub fn title(&self) -> &str {
        &self.title
    }

    /// Of a page with one head alone.
    pub(crate) fn alone(mut self, site: usize) -> Self {
        self.sites = self.sites.drain(..).skip(site).take(1).collect();
        self
    }
}

/// A span of an axis that has so many positions.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SpanPlace {
    pub(crate) name: String,
    pub(crate) positions: [usize; 2],
}

impl SpanPlace {
    pub(crate) fn all(labels: &Labels, len: usize) -> Vec<Self> {
        let place = |(name, range): &(String, Range<usize>)| Self {
            name: name.clone(),
            positions: [range.start, range.end].map(|at| at.min(len)),
        };
        labels.spans.iter().map(place).collect()
    }
}

/// All 256 colors of a palette, dark and light, for a page.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Palettes {
    dark: String,
    light: String,
}

impl Palettes {
    pub(crate) fn new(kind: PaletteKind) -> Self {
        let hex = |theme| Palette::of(theme, kind).hex();
        Self { dark: hex(Theme::Dark), light: hex(Theme::Light) }
    }
}

/// Some pixels of a level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Pixels across.
    pub width: usize,
    /// Pixels down.
    pub height: usize,
    /// `[height, width]`, of the palette; 0 for no weight at all.
    pub colors: Vec<u8>,
    /// Rows that were looked at, of how many, if not at all.
    pub sampled: Option<[usize; 2]>,
}

impl Tile {
    /// The tile as a PNG.
    #[must_use]
    pub fn png(&self, theme: Theme) -> Vec<u8> {
        let palette = Palette::of(theme, PaletteKind::Amount);
        indexed_png([self.width, self.height], &self.colors, palette).unwrap_or_default()
    }
}

/// One pair.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hover {
    row: usize,
    key: usize,
    query: String,
    word: String,
    weight: f64,
    hidden: bool,
}

/// One query.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RowFacts {
    row: usize,
    query: String,
    entropy: f64,
    distance: f64,
    top: Vec<TopKey>,
    /// The mass on each span of the keys.
    spans: Vec<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct TopKey {
    key: usize,
    word: String,
    weight: f64,
}

/// Keys of a query that are named.
const TOP: usize = 8;

impl Zoom {
    /// Of all heads of a trace.
    #[must_use]
    pub fn new(trace: Trace, machine: Machine) -> Self {
        let sites = trace.sites();
        Self { trace, machine, sites, surveys: Mutex::new(Vec::new()) }
    }

    /// The heads, in the order of their numbers here.
    #[must_use]
    pub fn sites(&self) -> &[Site] {
        &self.sites
    }

    fn site(&self, site: usize) -> Result<(&Site, &Layer), Error> {
        let missing = || Error::NotThere {
            what: format!("head number {site}"),
            there: format!("{} heads, from 0 on", self.sites.len()),
        };
        let own = self.sites.get(site).ok_or_else(missing)?;
        Ok((own, self.trace.layer(own)?))
    }

    fn labels(&self, site: usize) -> Result<[&Labels; 2], Error> {
        let (_, layer) = self.site(site)?;
        Ok([&layer.rows, &layer.cols].map(|axis| self.trace.labels(axis)))
    }

    /// The queries and keys of a head.
    pub fn size(&self, site: usize) -> Result<[usize; 2], Error> {
        Ok(self.site(site)?.1.data.size())
    }

    /// What a viewer must know of a head.
    pub fn info(&self, site: usize) -> Result<Info, Error> {
        let ([q_len, k_len], [q, k]) = (self.size(site)?, self.labels(site)?);
        let survey = self.survey_of(site)?;
        let name = |labels: &Labels, usual: &str| match labels.title.as_str() {
            "" => usual.to_string(),
            title => title.to_string(),
        };
        Ok(Info {
            title: self.trace.title.clone(),
            q_len,
            k_len,
            tile: TILE,
            max_level: max_level([q_len, k_len]),
            sites: self.sites.clone(),
            q_title: name(q, "query"),
            k_title: name(k, "key"),
            q_spans: SpanPlace::all(q, q_len),
            k_spans: SpanPlace::all(k, k_len),
            palettes: Palettes::new(PaletteKind::Amount),
            decades: decades(k_len),
            progress: survey.progress(),
            exact: survey.is_done(),
        })
    }

    /// The survey of a head; one that is done if none is needed.
    fn survey_of(&self, site: usize) -> Result<Arc<Survey>, Error> {
        let mut surveys = self.surveys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(i) = surveys.iter().position(|(own, _)| *own == site) {
            let known = surveys.remove(i);
            surveys.push(known.clone());
            return Ok(known.1);
        }
        let new = Arc::new(Survey::new(self.size(site)?, self.visible(site)?));
        surveys.push((site, new.clone()));
        if surveys.len() > KEPT {
            let idle = surveys.iter().position(|(_, survey)| !survey.is_busy());
            idle.into_iter().for_each(|i| drop(surveys.remove(i)));
        }
        Ok(new)
    }

    /// Walks over the whole map of a head, so that coarse tiles become exact; returns at once if that is done, or somebody is at
    /// it. `stop` is asked now and then whether to give up.
    pub fn survey(&self, site: usize, stop: &dyn Fn() -> bool) -> Result<(), Error> {
        let survey = self.survey_of(site)?;
        survey.run(stop, |rows, pixels| {
            let all = 0..pixels[1] * rows.len().div_ceil(pixels[0].max(1));
            let [max, sum] = self.cells(site, rows, all, pixels, 1)?;
            Ok(PixelStats { max, sum })
        })
    }

    /// A tile of a head: of several pairs, a pixel shows the largest weight, the mean or the sum.
    pub fn tile(
        &self,
        site: usize,
        pool: Pool,
        level: u32,
        [x, y]: [usize; 2],
    ) -> Result<Tile, Error> {
        let size = self.size(site)?;
        let place = Place::new(size, level, [x, y]).ok_or_else(|| Error::NotThere {
            what: format!("tile {x}, {y} of level {level}"),
            there: format!("{} levels of tiles of {TILE} pixels", max_level(size) + 1),
        })?;
        let (width, height) = (place.pixels[1], place.pixels[0]);
        let scale = Scale::Log { decades: decades(size[1]) as f32 };
        let survey = self.survey_of(site)?;
        if let Some(values) = survey.tile(&place, pool) {
            return Ok(Tile { width, height, colors: colors(&values, scale), sampled: None });
        }
        let Place { rows, keys, pixels, .. } = place.clone();
        let step = survey.step(place.scale);
        let [max, sum] = self.cells(site, rows, keys, pixels, step)?;
        let values = match pool {
            Pool::Max => max,
            Pool::Mean => place.means(&sum, step),
            Pool::Sum => sum,
        };
        let sampled = (step > 1).then(|| [place.scale.div_ceil(step), place.scale]);
        Ok(Tile { width, height, colors: colors(&values, scale), sampled })
    }

    /// The largest weight and the sum of the weights in each of so many cells of equal size, looking at every `step`-th row.
    fn cells(
        &self,
        site: usize,
        rows: Range<usize>,
        keys: Range<usize>,
        pixels: [usize; 2],
        step: usize,
    ) -> Result<[Vec<f32>; 2], Error> {
        let (own, layer) = self.site(site)?;
        match &layer.data {
            LayerData::Inputs(inputs) => {
                let view = inputs.view(self.machine)?.head(0, own.head)?.rows(rows).every(step)?;
                let [down, across] = pixels;
                let both = Measure::new().pooled(down, across, Pool::Max);
                let found = both.pooled(down, across, Pool::Sum).of(&view.keys(keys))?;
                let mut maps = found.pooled.into_iter().map(|pooled| pooled.values);
                Ok([maps.next().unwrap_or_default(), maps.next().unwrap_or_default()])
            }
            LayerData::Weights(weights) => Ok(weights.cells(own.head, (rows, keys), pixels, step)),
        }
    }

    /// About how many pairs of a head see each other, from a few of its rows.
    fn visible(&self, site: usize) -> Result<usize, Error> {
        const ROWS: usize = 16;
        let (own, layer) = self.site(site)?;
        let [q_len, k_len] = layer.data.size();
        let LayerData::Inputs(inputs) = &layer.data else { return Ok(q_len * k_len) };
        if q_len == 0 {
            return Ok(0);
        }
        let view = inputs.view(self.machine)?;
        let (mask, scope) = (&view.problem().mask, view.problem().scope(0, own.head));
        let seen = |row: usize| mask.visible(&scope, row).iter().map(Range::len).sum::<usize>();
        let looked = (0..ROWS).map(|i| (2 * i + 1) * q_len / (2 * ROWS));
        Ok(looked.map(seen).sum::<usize>() * q_len / ROWS)
    }

    /// The exact weight of a pair, and its words.
    pub fn weight(&self, site: usize, row: usize, key: usize) -> Result<Hover, Error> {
        let (size, [q, k]) = (self.size(site)?, self.labels(site)?);
        below("query", row, size[0])?;
        below("key", key, size[1])?;
        let (query, word) = (q.label(row), k.label(key));
        let (own, layer) = self.site(site)?;
        let (weight, hidden) = match &layer.data {
            LayerData::Inputs(inputs) => {
                let view = inputs.view(self.machine)?.head(0, own.head)?;
                let scope = view.problem().scope(0, own.head);
                let hidden = !view.problem().mask.is_visible(&scope, row, key);
                (view.tile(row..row + 1, key..key + 1)?.first().copied().unwrap_or(0.0), hidden)
            }
            LayerData::Weights(weights) => (weights.row(own.head, row)[key], false),
        };
        Ok(Hover { row, key, query, word, weight: weight.into(), hidden })
    }

    /// What a query looks at.
    pub fn row(&self, site: usize, row: usize) -> Result<RowFacts, Error> {
        let (size, [q, k]) = (self.size(site)?, self.labels(site)?);
        below("query", row, size[0])?;
        let top_key =
            |key: usize, weight: f32| TopKey { key, word: k.label(key), weight: weight.into() };
        let (own, layer) = self.site(site)?;
        let (entropy, distance, top, spans) = match &layer.data {
            LayerData::Inputs(inputs) => {
                let view = inputs.view(self.machine)?.head(0, own.head)?;
                let all = Measure::new().entropy().mean_distance().top_k(TOP);
                let all = all.span_mass(k.spans.iter().map(|(_, keys)| keys.clone()));
                let found = all.of(&view.rows(row..row + 1))?;
                let first = |xs: Vec<f32>| f64::from(xs.first().copied().unwrap_or(0.0));
                let keys = found.top.keys(0).iter().zip(found.top.weights(0));
                let top = keys.map(|(key, weight)| top_key(*key, *weight)).collect();
                let spans = found.spans.into_iter().map(first).collect();
                (first(found.entropy), first(found.mean_distance), top, spans)
            }
            LayerData::Weights(all) => {
                let weights = all.row(own.head, row);
                let mut order: Vec<usize> = (0..weights.len()).collect();
                order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]).then(a.cmp(b)));
                let top = order.iter().take(TOP).map(|key| top_key(*key, weights[*key])).collect();
                let [entropy, distance, ..] = all.row_stats(own.head, row).unwrap_or_default();
                let mass = |keys: &Range<usize>| -> f64 {
                    weights.iter().take(keys.end).skip(keys.start).map(|a| f64::from(*a)).sum()
                };
                let spans = k.spans.iter().map(|(_, keys)| mass(keys)).collect();
                (entropy, distance, top, spans)
            }
        };
        Ok(RowFacts { row, query: q.label(row), entropy, distance, top, spans })
    }

    /// Of a head, for each span of its keys, the mean mass and that of the last query; and what detectors call it.
    pub(crate) fn head_facts(&self, site: usize) -> Result<(Vec<[f64; 2]>, Vec<HeadLabel>), Error> {
        let (own, layer) = self.site(site)?;
        let spans = &self.trace.labels(&layer.cols).spans;
        let masses = match spans.as_slice() {
            [] => Vec::new(),
            spans => SpanRows::of(&layer.data, self.machine, own.head, spans)?.means(),
        };
        Ok((masses, head_labels(&self.trace, layer, own.head, self.machine)?))
    }

    /// The labels of some positions: of the queries, or of the keys.
    pub fn words(
        &self,
        site: usize,
        keys: bool,
        range: Range<usize>,
    ) -> Result<Vec<String>, Error> {
        let (size, labels) = (self.size(site)?, self.labels(site)?);
        let i = usize::from(keys);
        let end = range.end.min(size[i]);
        Ok((range.start.min(end)..end).map(|at| labels[i].label(at)).collect())
    }
}

fn below(what: &str, found: usize, limit: usize) -> Result<(), Error> {
    let there = || format!("{limit}, from 0 on");
    let missing = || Error::NotThere { what: format!("{what} {found}"), there: there() };
    if found < limit { Ok(()) } else { Err(missing()) }
}

/// The level with a pixel for each pair.
pub(crate) fn max_level([q_len, k_len]: [usize; 2]) -> u32 {
    q_len.max(k_len).max(1).next_power_of_two().ilog2()
}

/// Powers of ten that the colors span: down to a tenth of what each key would get if all got the same.
fn decades(k_len: usize) -> u32 {
    (k_len.max(1).ilog10() + 2).max(4)
}

/// The colors of weights; none for no weight at all.
fn colors(values: &[f32], scale: Scale) -> Vec<u8> {
    // Of both themes a number has the same place in the palette.
    let palette = Palette::of(Theme::Dark, PaletteKind::Amount);
    values.iter().map(|a| if *a == 0.0 { 0 } else { palette.index(*a, scale) }).collect()
}

/// Which pairs a tile stands for.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    level: u32,
    /// Queries, and keys, of a pixel.
    scale: usize,
    /// May reach beyond the last one, up to a whole pixel.
    rows: Range<usize>,
    keys: Range<usize>,
    /// Down and across.
    pixels: [usize; 2],
    /// The tile's first pixel.
    first: [usize; 2],
    size: [usize; 2],
}

impl Place {
    fn new(size: [usize; 2], level: u32, [x, y]: [usize; 2]) -> Option<Self> {
        let scale = 1usize << max_level(size).checked_sub(level)?;
        let first = [y.checked_mul(TILE)?, x.checked_mul(TILE)?];
        let left = |i: usize| size[i].div_ceil(scale).checked_sub(first[i]).filter(|n| *n > 0);
        let pixels = [left(0)?.min(TILE), left(1)?.min(TILE)];
        let range = |i: usize| first[i] * scale..(first[i] + pixels[i]) * scale;
        Some(Self { level, scale, rows: range(0), keys: range(1), pixels, first, size })
    }

    /// Sums over the pairs of each pixel as means, where every `step`-th row was looked at.
    fn means(&self, sums: &[f32], step: usize) -> Vec<f32> {
        let count = |i: usize, at: usize| {
            let begin = (self.first[i] + at) * self.scale;
            self.scale.min(self.size[i] - begin)
        };
        let mean = |(i, sum): (usize, &f32)| {
            let (row, col) = (i / self.pixels[1], i % self.pixels[1]);
            sum / (count(0, row).div_ceil(step) * count(1, col)) as f32
        };
        sums.iter().enumerate().map(mean).collect()
    }
}
