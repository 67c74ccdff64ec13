//! Traces, pages and pictures of what a lens has seen.

use crate::array::{Array, refused};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use regard::Machine;
use regard_scope::render::svg;
use regard_scope::{
    GridItem, Inputs, Labels, Layer, LayerData, Map, Metrics, Scale, Scene, Style, Theme, Weights,
    difference_page, grid, heat, table, trace_page, write_atomically,
};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What the arrays beside it are.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct About {
    title: String,
    axes: BTreeMap<String, Labels>,
    layers: Vec<AboutLayer>,
    #[serde(default)]
    interventions: Vec<String>,
}

/// One attention: q, k and lse with their options, or weights alone.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AboutLayer {
    layer: usize,
    kind: String,
    rows: String,
    cols: String,
    /// Of q and k; where there is none, weights are what was seen.
    mask: Option<String>,
    scale: Option<f64>,
    softcap: Option<f64>,
    /// Whether there is a bias of each head and key.
    #[serde(default)]
    key_bias: bool,
}

/// What a model saw, in memory of ours.
#[pyclass(frozen, module = "regard._regard")]
#[derive(Debug)]
pub(crate) struct Trace(regard_scope::Trace);

#[pymethods]
impl Trace {
    /// From JSON and, for each layer in turn, its arrays of f32 that are dense: `q [heads, q_len, dim]`, `k [kv_heads, k_len,
    /// dim]`, `lse [heads, q_len]` and perhaps `key_bias [heads, k_len]` where it has a mask, `weights [heads, rows, cols]` where it has none.
    #[new]
    fn new(about: &str, arrays: Vec<Array>) -> PyResult<Self> {
        let about: About = serde_json::from_str(about).map_err(refused)?;
        let mut arrays = arrays.iter();
        let mut layers = Vec::new();
        for layer in about.layers {
            layers.push(layer.with(&mut arrays)?);
        }
        let About { title, axes, interventions, .. } = about;
        Ok(Self(regard_scope::Trace { title, axes, layers, interventions }))
    }

    /// Writes the file: whole, or not at all.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| self.0.save(&path)).map_err(refused)
    }

    /// A page with every head, maps of at most `cells` cells each way; of the difference from another trace, if there is one.
    #[pyo3(signature = (cells, against=None))]
    fn page(&self, py: Python<'_>, cells: usize, against: Option<&Self>) -> PyResult<String> {
        let (own, machine) = (&self.0, Machine::detect());
        let page = py.detach(|| match against {
            Some(Self(after)) => difference_page(own, after, machine, cells, &mut |_, _| {}),
            None => trace_page(own, machine, cells, &mut |_, _| {}),
        });
        page.map_err(refused)
    }
}

impl AboutLayer {
    fn with<'a>(self, arrays: &mut impl Iterator<Item = &'a Array>) -> PyResult<Layer> {
        let Self { layer, kind, rows, cols, mask, scale, softcap, key_bias } = self;
        let mut next = |name: &str| {
            let missing =
                || PyValueError::new_err(format!("{kind} layer {layer}: {name} is missing"));
            arrays.next().ok_or_else(missing)
        };
        let seen = if let Some(mask) = mask {
            let (q, q_shape) = numbers::<3>(next("q")?, "q")?;
            let (k, k_shape) = numbers::<3>(next("k")?, "k")?;
            let (lse, _) = numbers::<2>(next("lse")?, "lse")?;
            let key_bias = match key_bias {
                true => numbers::<2>(next("key_bias")?, "key_bias")?.0,
                false => Vec::new(),
            };
            let inputs = Inputs { q, k, lse, q_shape, k_shape, mask, scale, softcap, key_bias };
            LayerData::Inputs(inputs)
        } else {
            let (values, shape) = numbers(next("weights")?, "weights")?;
            LayerData::Weights(Weights { values, shape })
        };
        Ok(Layer { layer, kind, rows, cols, data: seen, value_norms: Vec::new() })
    }
}

/// The numbers of an array of f32 that is dense and has so many axes.
fn numbers<const N: usize>(array: &Array, name: &str) -> PyResult<(Vec<f32>, [usize; N])> {
    let axes =
        |_| PyValueError::new_err(format!("{name}: expected {N} axes, found {:?}", array.shape()));
    let shape = <[usize; N]>::try_from(array.shape()).map_err(axes)?;
    Ok((array.list::<f32>(name)?.to_vec(), shape))
}

/// How a picture is to look, and what stands at the sides of its maps.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Picture {
    /// `heat`, `table` or `grid`
    view: String,
    title: String,
    /// What one of the numbers is called.
    unit: String,
    dark: bool,
    width: f32,
    /// The number that gets the last color.
    most: f32,
    maps: Vec<AboutMap>,
}

/// One map; layer, head and kind say where it stands in a grid.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AboutMap {
    #[serde(default)]
    layer: usize,
    #[serde(default)]
    head: usize,
    #[serde(default)]
    kind: String,
    rows: Labels,
    cols: Labels,
}

impl AboutMap {
    fn with(&self, title: &str, array: &Array) -> PyResult<Map> {
        let (values, [down, across]) = numbers(array, "map")?;
        let (rows, cols) = (&self.rows, &self.cols);
        let (rows, cols) = (rows.cells(0..rows.len(), down), cols.cells(0..cols.len(), across));
        if [rows.len(), cols.len()] != [down, across] {
            let sides = format!("{} x {} positions", self.rows.len(), self.cols.len());
            return Err(PyValueError::new_err(format!("map: {down} x {across} cells for {sides}")));
        }
        Ok(Map { title: title.into(), values, rows, cols })
    }
}

/// Numbers as a picture in SVG: JSON, and an array `[down, across]` of f32 for each of its maps.
#[pyfunction]
pub(crate) fn picture(about: &str, arrays: Vec<Array>) -> PyResult<String> {
    let about: Picture = serde_json::from_str(about).map_err(refused)?;
    let mut style = Style::new(Metrics::pixels(about.width));
    style.theme = if about.dark { Theme::Dark } else { Theme::Light };
    style.scale = Scale::Linear { most: about.most };
    style.unit.clone_from(&about.unit);
    let named = about.maps.iter().zip(&arrays);
    let maps = named.map(|(map, array)| map.with(&about.title, array));
    let maps = maps.collect::<PyResult<Vec<Map>>>()?;
    Ok(svg(&scene(&about, &maps, &style)?))
}

fn scene(about: &Picture, maps: &[Map], style: &Style) -> PyResult<Scene> {
    let one = || match maps {
        [map] => Ok(map),
        others => {
            Err(PyValueError::new_err(format!("{}: one map, found {}", about.view, others.len())))
        }
    };
    match &about.view[..] {
        "heat" => Ok(heat(one()?, style)),
        "table" => Ok(table(one()?, style)),
        "grid" => {
            let item = |(about, map): (&AboutMap, &Map)| {
                let (layer, head, kind) = (about.layer, about.head, about.kind.clone());
                GridItem { layer, head, kind, map: map.clone() }
            };
            let items: Vec<_> = about.maps.iter().zip(maps).map(item).collect();
            Ok(grid(&about.title, &items, style))
        }
        other => Err(PyValueError::new_err(format!(
            "view: expected heat, table or grid, found {other:?}"
        ))),
    }
}

/// Writes a text beside its place and moves it there, so that nobody ever sees half of it.
#[pyfunction]
pub(crate) fn write(path: PathBuf, text: &str) -> PyResult<()> {
    write_atomically(&path, text.as_bytes()).map_err(refused)
}
