//! What a model saw: queries, keys and `lse` of its attention, or maps of weights, and what they stand for.
//!
//! On disk a trace is one safetensors file. Its tensors are `f32`, `f16`, `bf16` or `f64`; the entry `regard` of its metadata is
//! JSON and says what they are, so that any program can write one (`docs/trace.md` has an example in ten lines of Python):
//!
//! ```json
//! { "version": 1, "title": "a sentence",
//!   "axes": { "source": { "title": "source", "labels": ["the", "cat"] } },
//!   "layers": [
//!     { "layer": 0, "kind": "self", "rows": "source", "cols": "source", "q": "l0.q", "k": "l0.k", "lse": "l0.lse",
//!       "mask": "causal", "scale": 0.125 },
//!     { "layer": 1, "kind": "self", "rows": "source", "cols": "source", "weights": "l1.weights" } ] }
//! ```
//!
//! `q [heads, q_len, dim]`, `k [kv_heads, k_len, dim]`, `lse [heads, q_len]` (made again if missing) and perhaps `key_bias [heads, k_len]`,
//! which is added to scores; or `weights [heads, rows, cols]`. Either may have `value_norms [heads, k_len]`. An axis without labels may say its
//! `len` instead; positions are its labels then. An axis may have `spans`, named ranges of its positions, and a trace `interventions`, texts that
//! say under which rules the model ran.

mod file;

use crate::error::Error;
use crate::map::{Axis, Map};
use crate::mask::parse_mask;
use crate::measure::{Measure, Pool};
use regard::{AttentionView, Machine, Plan, Problem, Score, Shape, View};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// What a model saw.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// What it is, as a heading.
    pub title: String,
    /// What queries and keys stand for, by name.
    pub axes: BTreeMap<String, Labels>,
    /// Every attention of the model, all heads of one together.
    pub layers: Vec<Layer>,
    /// The rules under which the model ran, as texts; empty without interventions.
    pub interventions: Vec<String>,
}

/// What the positions of an axis are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Labels {
    /// What all of them are: `source`, `prompt`.
    #[serde(default)]
    pub title: String,
    /// One for each position, or none at all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// How many positions, where they have no labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub len: Option<usize>,
    /// Named ranges of positions, such as the instruction and the context; they may overlap and reach beyond the last position.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<(String, Range<usize>)>,
}

/// One attention of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Which layer of its kind.
    pub layer: usize,
    /// What it is in its model: `self`, `encoder`, `cross`.
    pub kind: String,
    /// The axis of the queries.
    pub rows: String,
    /// The axis of the keys.
    pub cols: String,
    /// What the trace stores of it.
    pub data: LayerData,
    /// `||v_j W_O||`, what a key adds to a row for each unit of weight, `[heads, keys]`; empty if unknown. See
    /// [`Trace::value_weighted`].
    pub value_norms: Vec<f32>,
}

/// What a trace stores of an attention layer.
#[derive(Clone, Debug, PartialEq)]
pub enum LayerData {
    /// All that its weights can be made of again.
    Inputs(Inputs),
    /// Weights, or means of them, as they were written by some program.
    Weights(Weights),
}

/// Queries, keys and `lse` of all heads of an attention.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inputs {
    /// `[heads, q_len, dim]`
    pub q: Vec<f32>,
    /// `[kv_heads, k_len, dim]`
    pub k: Vec<f32>,
    /// `[heads, q_len]`
    pub lse: Vec<f32>,
    /// Heads, queries and features.
    pub q_shape: [usize; 3],
    /// Key heads, keys and features.
    pub k_shape: [usize; 3],
    /// Who may see whom: see [`parse_mask`].
    pub mask: String,
    /// What dot products are multiplied by, if not by `1 / sqrt(dim)`.
    pub scale: Option<f64>,
    /// The bound of scores, if there is one.
    pub softcap: Option<f64>,
    /// Added to the scores of each key, `[heads, k_len]`; empty if nothing is.
    pub key_bias: Vec<f32>,
}

/// Weights of all heads.
#[derive(Clone, Debug, PartialEq)]
pub struct Weights {
    /// `[heads, rows, cols]`
    pub values: Vec<f32>,
    /// Heads, rows and columns.
    pub shape: [usize; 3],
}

/// One head of a trace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Site {
    /// Which layer of its kind.
    pub layer: usize,
    /// What it is in its model.
    pub kind: String,
    /// Which head of its layer.
    pub head: usize,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} layer {} head {}", self.kind, self.layer, self.head)
    }
}

impl Labels {
    /// Of these labels.
    #[must_use]
    pub fn new(title: impl Into<String>, labels: Vec<String>) -> Self {
        Self { title: title.into(), labels, ..Self::default() }
    }

    /// Of so many positions without labels.
    #[must_use]
    pub fn counted(title: impl Into<String>, len: usize) -> Self {
        Self { title: title.into(), len: Some(len), ..Self::default() }
    }

    /// How many positions there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len.filter(|_| self.labels.is_empty()).unwrap_or(self.labels.len())
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The label of a position: its number where it has none.
    #[must_use]
    pub fn label(&self, at: usize) -> String {
        self.labels.get(at).cloned().unwrap_or_else(|| at.to_string())
    }

    /// The side of a map with so many cells: a cell of several positions has the first one's label and how many there are.
    #[must_use]
    pub fn cells(&self, range: Range<usize>, cells: usize) -> Axis {
        let (n, cells) = (range.len(), cells.min(range.len()));
        let begin = |cell: usize| range.start + (cell * n).div_ceil(cells.max(1));
        let label = |cell| match begin(cell + 1) - begin(cell) {
            1 => self.label(begin(cell)),
            more => format!("{} +{}", self.label(begin(cell)), more - 1),
        };
        let labels = (0..cells).map(label).collect();
        Axis { title: self.title.clone(), labels, positions: range.clone() }
    }
}

impl LayerData {
    /// How many heads there are.
    #[must_use]
    pub fn heads(&self) -> usize {
        match self {
            Self::Inputs(inputs) => inputs.q_shape[0],
            Self::Weights(weights) => weights.shape[0],
        }
    }

    /// Queries and keys.
    #[must_use]
    pub fn size(&self) -> [usize; 2] {
        match self {
            Self::Inputs(inputs) => [inputs.q_shape[1], inputs.k_shape[1]],
            Self::Weights(weights) => [weights.shape[1], weights.shape[2]],
        }
    }

    /// The weights of some rows of a head, `[rows, keys]`.
    pub(crate) fn weights(
        &self,
        machine: Machine,
        head: usize,
        rows: Range<usize>,
    ) -> Result<Vec<f32>, Error> {
        let k_len = self.size()[1];
        Ok(match self {
            Self::Inputs(inputs) => inputs.view(machine)?.head(0, head)?.tile(rows, 0..k_len)?,
            Self::Weights(weights) => {
                weights.head(head)[rows.start * k_len..rows.end * k_len].to_vec()
            }
        })
    }
}

impl Inputs {
    /// Of `q [heads, q_len, dim]` and `k [kv_heads, k_len, dim]`, scaled dot products; `lse` is made here.
    pub fn new(
        (q, q_shape): (Vec<f32>, [usize; 3]),
        (k, k_shape): (Vec<f32>, [usize; 3]),
        mask: &str,
    ) -> Result<Self, Error> {
        let heads = Self { q, k, q_shape, k_shape, mask: mask.into(), ..Self::default() };
        heads.with_lse(Machine::detect())
    }

    /// The same with `lse` made again.
    pub fn with_lse(self, machine: Machine) -> Result<Self, Error> {
        let (q, k) = (self.queries()?, self.keys()?);
        let v = Shape { dim: 0, ..k.shape() };
        let lse = self.plan(machine)?.forward(q, k, View::bhsd(&[], v.to_array())?)?.lse;
        Ok(Self { lse, ..self })
    }

    /// The same with weights multiplied by a number for each head and key, `[heads, k_len]`, and divided by their sum over a row: the
    /// softmax of the scores plus the logarithm of the number.
    fn weighted_by(mut self, factors: &[f32], machine: Machine) -> Result<Self, Error> {
        self.key_bias.resize(factors.len(), 0.0);
        self.key_bias.iter_mut().zip(factors).for_each(|(bias, factor)| *bias += factor.ln());
        self.with_lse(machine)
    }

    fn queries(&self) -> Result<View<'_, f32>, Error> {
        let [heads, len, dim] = self.q_shape;
        Ok(View::bhsd(&self.q, [1, heads, len, dim])?)
    }

    fn keys(&self) -> Result<View<'_, f32>, Error> {
        let [heads, len, dim] = self.k_shape;
        Ok(View::bhsd(&self.k, [1, heads, len, dim])?)
    }

    /// Of attention without values.
    fn plan(&self, machine: Machine) -> Result<Plan<'_, f32>, Error> {
        let score = self.scale.into_iter().fold(Score::new(), Score::scale);
        let score = self.softcap.into_iter().fold(score, Score::softcap);
        let [[heads, ..], [_, k_len, _]] = [self.q_shape, self.k_shape];
        let score = match self.key_bias.as_slice() {
            [] => score,
            bias => score.bias(View::bhsd(bias, [1, heads, 1, k_len])?),
        };
        let (q, k) = (self.queries()?.shape(), self.keys()?.shape());
        let problem = Problem::of_shapes(q, k, Shape { dim: 0, ..k });
        Ok(Plan::new(problem.mask(parse_mask(&self.mask)?).score(score), machine)?)
    }

    /// The weights of all heads, to be looked at.
    pub fn view(&self, machine: Machine) -> Result<AttentionView<'_, f32>, Error> {
        let (plan, q, k) = (self.plan(machine)?, self.queries()?, self.keys()?);
        Ok(AttentionView::from_lse(&plan, q, k, &self.lse)?)
    }
}

impl Trace {
    /// Every head of every layer.
    #[must_use]
    pub fn sites(&self) -> Vec<Site> {
        let site =
            |layer: &Layer, head| Site { layer: layer.layer, kind: layer.kind.clone(), head };
        self.layers
            .iter()
            .flat_map(|l| (0..l.data.heads()).map(move |head| site(l, head)))
            .collect()
    }

    /// The kinds of its layers, in the order in which they come.
    #[must_use]
    pub fn kinds(&self) -> Vec<&str> {
        let mut kinds: Vec<&str> = Vec::new();
        for layer in &self.layers {
            if !kinds.contains(&layer.kind.as_str()) {
                kinds.push(&layer.kind);
            }
        }
        kinds
    }

    /// The attention that a site is a head of.
    pub fn layer(&self, site: &Site) -> Result<&Layer, Error> {
        let own =
            |l: &&Layer| l.layer == site.layer && l.kind == site.kind && site.head < l.data.heads();
        let there = || {
            let all: Vec<_> = self.sites().iter().map(ToString::to_string).collect();
            match all.as_slice() {
                [] => "nothing".into(),
                [one] => one.clone(),
                [first, .., last] => format!("{first} to {last}"),
            }
        };
        let missing = || Error::NotThere { what: site.to_string(), there: there() };
        self.layers.iter().find(own).ok_or_else(missing)
    }

    /// The trace of value-weighted attention: `a_ij ||v_j W_O||` in place of the weights `a_ij`, divided by the sum over the row (Kobayashi et
    /// al. 2020, "Attention is Not Only a Weight"). The norm is one number for each head and key, so whatever reads weights reads these.
    pub fn value_weighted(self, machine: Machine) -> Result<Self, Error> {
        let weighted = |layer: Layer| {
            let norms = &layer.value_norms;
            let place = || format!("{} layer {}", layer.kind, layer.layer);
            if norms.is_empty() {
                let why = "no norms of values; record them together with the trace";
                return Err(Error::format(place(), why));
            }
            layer.check_norms()?;
            let data = match layer.data {
                LayerData::Inputs(inputs) => LayerData::Inputs(inputs.weighted_by(norms, machine)?),
                LayerData::Weights(weights) => LayerData::Weights(weights.weighted_by(norms)),
            };
            Ok(Layer { data, value_norms: Vec::new(), ..layer })
        };
        let layers = self.layers.into_iter().map(weighted).collect::<Result<_, _>>()?;
        Ok(Self { layers, ..self })
    }

    /// The labels of an axis of a layer.
    #[must_use]
    pub fn labels(&self, axis: &str) -> &Labels {
        const NONE: &Labels =
            &Labels { title: String::new(), labels: Vec::new(), len: None, spans: Vec::new() };
        self.axes.get(axis).unwrap_or(NONE)
    }

    /// The weights of some queries of a head as a picture shows them, in at most so many cells down and across: the largest of each.
    /// Pairs that do not see each other are NaN where each has a cell of its own.
    pub fn map(
        &self,
        machine: Machine,
        site: &Site,
        rows: Range<usize>,
        [down, across]: [usize; 2],
    ) -> Result<Map, Error> {
        let layer = self.layer(site)?;
        let [q_len, k_len] = layer.data.size();
        if rows.start > rows.end || rows.end > q_len {
            let (what, there) =
                (format!("rows {}..{}", rows.start, rows.end), format!("0..{q_len}"));
            return Err(Error::NotThere { what, there });
        }
        let (mut row_axis, mut col_axis) = (
            self.labels(&layer.rows).cells(rows.clone(), down),
            self.labels(&layer.cols).cells(0..k_len, across),
        );
        // In self-attention both sides are the same text: their titles say which is which.
        if layer.rows == layer.cols && !row_axis.title.is_empty() {
            (row_axis.title, col_axis.title) = ("query".into(), "key".into());
        }
        let cells = [row_axis.len(), col_axis.len()];
        let values = match &layer.data {
            LayerData::Inputs(inputs) => inputs.cells(machine, site.head, rows, cells)?,
            LayerData::Weights(weights) => {
                let [largest, _] = weights.cells(site.head, (rows, 0..k_len), cells, 1);
                largest
            }
        };
        Ok(Map { title: site.to_string(), values, rows: row_axis, cols: col_axis })
    }
}

impl Inputs {
    /// The largest weight of each of so many cells, at most one for each pair; NaN where a pair alone in its cell is hidden.
    fn cells(
        &self,
        machine: Machine,
        head: usize,
        rows: Range<usize>,
        [down, across]: [usize; 2],
    ) -> Result<Vec<f32>, Error> {
        if down * across == 0 {
            return Ok(Vec::new());
        }
        let view = self.view(machine)?.head(0, head)?;
        let found = Measure::new().pooled(down, across, Pool::Max).of(&view.rows(rows.clone()))?;
        let mut values: Vec<f32> = found.pooled.into_iter().flat_map(|map| map.values).collect();
        if [down, across] == [rows.len(), self.k_shape[1]] {
            let scope = view.problem().scope(0, head);
            for (row, values) in rows.zip(values.chunks_mut(across)) {
                let seen = view.problem().mask.visible(&scope, row);
                for (key, x) in values.iter_mut().enumerate() {
                    if !seen.iter().any(|keys| keys.contains(&key)) {
                        *x = f32::NAN;
                    }
                }
            }
        }
        Ok(values)
    }
}

impl Layer {
    /// Refuses norms of values that are none.
    fn check_norms(&self) -> Result<(), Error> {
        let place = || format!("{} layer {}: norms of values", self.kind, self.layer);
        let (own, [_, k_len]) = (self.value_norms.len(), self.data.size());
        let expected = self.data.heads() * k_len;
        if own != 0 && own != expected {
            let why = format!("{own} numbers; {expected} are needed, one for each head and key");
            return Err(Error::format(place(), why));
        }
        match self.value_norms.iter().find(|x| !x.is_finite() || **x < 0.0) {
            Some(x) => Err(Error::format(place(), format!("{x}; give numbers of at least 0"))),
            None => Ok(()),
        }
    }
}

impl Weights {
    /// Weights times a number for each head and key, divided by their sum over a row.
    fn weighted_by(mut self, factors: &[f32]) -> Self {
        let [_, q_len, k_len] = self.shape;
        for (i, row) in self.values.chunks_mut(k_len.max(1)).enumerate() {
            let own = &factors[i / q_len * k_len..][..k_len];
            row.iter_mut().zip(own).for_each(|(a, factor)| *a *= factor);
            let sum: f32 = row.iter().sum();
            if sum > 0.0 {
                row.iter_mut().for_each(|a| *a /= sum);
            }
        }
        self
    }

    /// The weights of a head.
    #[must_use]
    pub fn head(&self, head: usize) -> &[f32] {
        let n = self.shape[1] * self.shape[2];
        &self.values[head * n..][..n]
    }

    /// The weights of a row of a head.
    pub(crate) fn row(&self, head: usize, row: usize) -> &[f32] {
        let k_len = self.shape[2];
        &self.head(head)[row * k_len..][..k_len]
    }

    /// The largest weight and the sum of the weights of each of so many cells of equal size, of every `step`-th row. What lies
    /// beyond the last row and column is cut off. A NaN stays.
    pub(crate) fn cells(
        &self,
        head: usize,
        (rows, cols): (Range<usize>, Range<usize>),
        [down, across]: [usize; 2],
        step: usize,
    ) -> [Vec<f32>; 2] {
        let [_, q_len, k_len] = self.shape;
        let mut cells = [vec![0.0f32; down * across], vec![0.0f32; down * across]];
        for row in (rows.start..rows.end.min(q_len)).step_by(step) {
            for col in cols.start..cols.end.min(k_len) {
                let a = self.row(head, row)[col];
                let [i, j] = [(row, &rows, down), (col, &cols, across)]
                    .map(|(at, range, cells)| (at - range.start) * cells / range.len());
                let [max, sum] = cells.each_mut().map(|cells| &mut cells[i * across + j]);
                *max = if a.is_nan() || a > *max { a } else { *max };
                *sum += a;
            }
        }
        cells
    }

    /// Entropy, mean distance, weight of the first key and largest weight of a row; none for a row without weight.
    pub(crate) fn row_stats(&self, head: usize, row: usize) -> Option<[f64; 4]> {
        let [_, q_len, k_len] = self.shape;
        let weights = self.row(head, row).iter().map(|a| f64::from(*a));
        let mass: f64 = weights.clone().sum();
        let term = |a: f64| if a == 0.0 { 0.0 } else { -a * a.ln() };
        let position = row as f64 + k_len as f64 - q_len as f64;
        let far = weights.clone().enumerate().map(|(j, a)| a * (j as f64 - position).abs());
        let far = far.sum::<f64>() / mass;
        let largest =
            weights.clone().fold(0.0, |m: f64, a| if a.is_nan() || a > m { a } else { m });
        let first = weights.clone().next()?;
        (mass != 0.0).then(|| [weights.map(term).sum(), far, first, largest])
    }
}
