//! Traces on disk: written whole or not at all, read without trust.
//!
//! A file may come from anywhere. Every number in it is held against the bytes that are there before anything is made of it, so
//! memory never exceeds a small multiple of the file, and the worst that reading can end with is an error. Where `lse` is missing it is
//! made again, which takes as long as the attention of so many queries and keys does.

use super::{Inputs, Labels, Layer, LayerData, Trace, Weights};
use crate::error::Error;
use crate::mask::parse_mask;
use crate::write::write_atomically;
use regard::{Machine, bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::Path;

/// What the metadata says, as it stands in the file.
#[derive(Serialize, Deserialize)]
struct Header {
    version: u32,
    #[serde(default)]
    title: String,
    axes: BTreeMap<String, Labels>,
    layers: Vec<LayerHeader>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    interventions: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct LayerHeader {
    layer: usize,
    kind: String,
    rows: String,
    cols: String,
    #[serde(flatten)]
    seen: SeenHeader,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value_norms: Option<String>,
}

/// Names of tensors, and the options of the attention.
#[derive(Default, Serialize, Deserialize)]
struct SeenHeader {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    q: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    k: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lse: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    weights: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mask: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scale: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    softcap: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key_bias: Option<String>,
}

/// The format that is written, and the newest that is read.
const VERSION: u32 = 1;

/// The entry of the metadata.
const ENTRY: &str = "regard";

/// Positions of an axis without labels: beyond any tensor.
const MAX_POSITIONS: usize = 1 << 40;

/// Spans of an axis: a number for each query, head and span is computed.
const MAX_SPANS: usize = 64;

impl Trace {
    /// Reads a trace; where `lse` is missing it is made on this machine.
    pub fn load(path: &Path, machine: Machine) -> Result<Self, Error> {
        let bytes = std::fs::read(path).map_err(|e| Error::file(path, &e))?;
        Self::from_bytes_on(machine, &bytes).map_err(|e| Error::file(path, &e))
    }

    /// Reads a trace from memory. Whatever the bytes are, the worst that can happen is an error.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        Self::from_bytes_on(Machine::detect(), bytes)
    }

    /// The same where `lse` is made on this machine, if it is missing.
    pub fn from_bytes_on(machine: Machine, bytes: &[u8]) -> Result<Self, Error> {
        let refused = |e: safetensors::SafeTensorError| Error::format("safetensors", e.to_string());
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(refused)?;
        let entry = metadata.metadata().as_ref().and_then(|entries| entries.get(ENTRY));
        let entry = entry.ok_or_else(|| {
            let why = "the metadata has no entry `regard`; write one as docs/trace.md says";
            Error::format("safetensors", why)
        })?;
        let header: Header =
            serde_json::from_str(entry).map_err(|e| Error::format(ENTRY, e.to_string()))?;
        if header.version > VERSION {
            let why = format!("{}; this program reads up to {VERSION}", header.version);
            return Err(Error::format("version", why));
        }
        let tensors = SafeTensors::deserialize(bytes).map_err(refused)?;
        let mut taken = BTreeSet::new();
        let mut layers = Vec::new();
        for layer in header.layers {
            layers.push(layer.read(machine, &tensors, &mut taken)?);
        }
        let Header { title, axes, interventions, .. } = header;
        let trace = Self { title, axes, layers, interventions };
        trace.check()?;
        Ok(trace)
    }

    /// Refuses a trace that does not hang together.
    fn check(&self) -> Result<(), Error> {
        for (name, labels) in &self.axes {
            labels.check(name)?;
        }
        let mut sites = BTreeSet::new();
        for layer in &self.layers {
            let place = format!("{} layer {}", layer.kind, layer.layer);
            if !sites.insert((&layer.kind, layer.layer)) {
                let why = "there are two of them; give each layer of a kind its own number";
                return Err(Error::format(place, why));
            }
            let [q_len, k_len] = layer.data.size();
            for (axis, len, which) in [(&layer.rows, q_len, "rows"), (&layer.cols, k_len, "cols")] {
                let Some(labels) = self.axes.get(axis) else {
                    return Err(Error::format(
                        place,
                        format!("{which}: there is no axis `{axis}`"),
                    ));
                };
                if labels.len() != len {
                    let own = labels.len();
                    let why = format!("{which}: the tensor has {len}, axis `{axis}` has {own}");
                    return Err(Error::format(place, format!("{why}; they must be equal")));
                }
            }
        }
        Ok(())
    }

    /// Writes a trace: whole, or not at all.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        write_atomically(path, &self.to_bytes()?)
    }

    /// A trace as it stands in a file.
    pub fn to_bytes(&self) -> Result<Vec<u8>, Error> {
        self.check()?;
        let mut tensors = Vec::new();
        let mut layers = Vec::new();
        for layer in &self.layers {
            let name = |what: &str| format!("{}.{}.{what}", layer.kind, layer.layer);
            let mut put = |what: &str, shape: &[usize], data: &[f32]| {
                let bytes = data.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
                tensors.push((name(what), shape.to_vec(), bytes));
                Some(name(what))
            };
            let by_key = [layer.data.heads(), layer.data.size()[1]];
            let value_norms = (!layer.value_norms.is_empty())
                .then(|| put("value_norms", &by_key, &layer.value_norms))
                .flatten();
            let seen = match &layer.data {
                LayerData::Inputs(inputs) => SeenHeader {
                    q: put("q", &inputs.q_shape, &inputs.q),
                    k: put("k", &inputs.k_shape, &inputs.k),
                    lse: put("lse", &inputs.q_shape[..2], &inputs.lse),
                    mask: Some(inputs.mask.clone()),
                    scale: inputs.scale,
                    softcap: inputs.softcap,
                    key_bias: (!inputs.key_bias.is_empty())
                        .then(|| put("key_bias", &by_key, &inputs.key_bias))
                        .flatten(),
                    weights: None,
                },
                LayerData::Weights(weights) => {
                    let weights = put("weights", &weights.shape, &weights.values);
                    SeenHeader { weights, ..SeenHeader::default() }
                }
            };
            let Layer { layer, kind, rows, cols, .. } = layer.clone();
            layers.push(LayerHeader { layer, kind, rows, cols, seen, value_norms });
        }
        let Self { title, axes, interventions, .. } = self;
        let header = Header {
            version: VERSION,
            title: title.clone(),
            axes: axes.clone(),
            layers,
            interventions: interventions.clone(),
        };
        let json =
            serde_json::to_string(&header).map_err(|e| Error::format(ENTRY, e.to_string()))?;
        let refused = |e: safetensors::SafeTensorError| Error::format("safetensors", e.to_string());
        let views: Result<Vec<_>, _> = tensors
            .iter()
            .map(|(name, shape, bytes)| {
                Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?))
            })
            .collect();
        let metadata = Some(HashMap::from([(ENTRY.to_string(), json)]));
        safetensors::serialize(views.map_err(refused)?, metadata).map_err(refused)
    }
}

impl Labels {
    fn check(&self, name: &str) -> Result<(), Error> {
        match self.len {
            Some(len) if !self.labels.is_empty() && len != self.labels.len() => Err(Error::format(
                format!("axis {name}"),
                format!("len is {len}, and there are {} labels; leave one out", self.labels.len()),
            )),
            Some(len) if len > MAX_POSITIONS => Err(Error::format(
                format!("axis {name}"),
                format!("{len} positions; {MAX_POSITIONS} are the most"),
            )),
            _ => self.check_spans(name),
        }
    }

    fn check_spans(&self, name: &str) -> Result<(), Error> {
        let place = || format!("axis {name}: spans");
        if self.spans.len() > MAX_SPANS {
            let why = format!("{}; {MAX_SPANS} are the most", self.spans.len());
            return Err(Error::format(place(), why));
        }
        match self.spans.iter().find(|(_, Range { start, end })| start > end) {
            Some((span, Range { start, end })) => {
                let why = format!("`{span}` is {start} to {end}; start must not exceed end");
                Err(Error::format(place(), why))
            }
            None => Ok(()),
        }
    }
}

impl LayerHeader {
    fn read(
        self,
        machine: Machine,
        tensors: &SafeTensors<'_>,
        taken: &mut BTreeSet<String>,
    ) -> Result<Layer, Error> {
        let Self { layer, kind, rows, cols, seen, value_norms } = self;
        let place = format!("{kind} layer {layer}");
        // A tensor serves one layer: else a small file could ask for much memory.
        let names = [&seen.q, &seen.k, &seen.lse, &seen.weights, &seen.key_bias, &value_norms];
        for name in names.into_iter().flatten() {
            if !taken.insert(name.clone()) {
                let why = format!("tensor `{name}` is named twice; give each its own");
                return Err(Error::format(place, why));
            }
        }
        let seen = seen.read(machine, tensors, &place)?;
        let by_key = [seen.heads(), seen.size()[1]];
        let value_norms = value_norms.map(|name| for_each_key(tensors, &name, by_key));
        let value_norms = value_norms.transpose()?.unwrap_or_default();
        let layer = Layer { layer, kind, rows, cols, data: seen, value_norms };
        layer.check_norms()?;
        Ok(layer)
    }
}

impl SeenHeader {
    fn read(
        self,
        machine: Machine,
        tensors: &SafeTensors<'_>,
        place: &str,
    ) -> Result<LayerData, Error> {
        let three = |name: &str| numbers::<3>(tensors, name);
        match (&self.q, &self.k, &self.weights) {
            (None, None, Some(weights)) => {
                let (values, shape) = three(weights)?;
                Ok(LayerData::Weights(Weights { values, shape }))
            }
            (Some(q), Some(k), None) => {
                let ((q, q_shape), (k, k_shape)) = (three(q)?, three(k)?);
                let mask = self.mask.unwrap_or_else(|| "full".into());
                parse_mask(&mask)?;
                let Self { scale, softcap, key_bias, .. } = self;
                let key_bias =
                    key_bias.map(|name| for_each_key(tensors, &name, [q_shape[0], k_shape[1]]));
                let key_bias = key_bias.transpose()?.unwrap_or_default();
                let lse = Vec::new();
                let heads = Inputs { q, k, lse, q_shape, k_shape, mask, scale, softcap, key_bias };
                let Some(name) = &self.lse else {
                    return heads.with_lse(machine).map(LayerData::Inputs);
                };
                let (lse, shape) = numbers::<2>(tensors, name)?;
                if shape != q_shape[..2] {
                    let why = format!(
                        "lse has shape {shape:?}, q has {q_shape:?}; give [heads, queries]"
                    );
                    return Err(Error::format(place, why));
                }
                let heads = Inputs { lse, ..heads };
                heads.view(machine)?;
                Ok(LayerData::Inputs(heads))
            }
            _ => Err(Error::format(place, "give either q and k, or weights")),
        }
    }
}

/// A tensor with a number for each head and key.
fn for_each_key(
    tensors: &SafeTensors<'_>,
    name: &str,
    by_key: [usize; 2],
) -> Result<Vec<f32>, Error> {
    let (values, shape) = numbers::<2>(tensors, name)?;
    if shape != by_key {
        let why = format!("shape {shape:?}; it needs {by_key:?}, one number for each head and key");
        return Err(Error::format(format!("tensor `{name}`"), why));
    }
    Ok(values)
}

/// A tensor as numbers, with as many axes as asked for.
fn numbers<const N: usize>(
    tensors: &SafeTensors<'_>,
    name: &str,
) -> Result<(Vec<f32>, [usize; N]), Error> {
    let place = || format!("tensor `{name}`");
    let tensor = tensors.tensor(name).map_err(|_| Error::format(place(), "not in the file"))?;
    if tensor.shape().contains(&0) {
        let why = format!("shape {:?}; leave out what is empty", tensor.shape());
        return Err(Error::format(place(), why));
    }
    let shape = <[usize; N]>::try_from(tensor.shape()).map_err(|_| {
        Error::format(place(), format!("shape {:?}; it needs {N} axes", tensor.shape()))
    })?;
    let bytes = tensor.data();
    #[expect(clippy::cast_possible_truncation, reason = "pictures show no more digits")]
    let values = match tensor.dtype() {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect(),
        Dtype::F64 => bytes.as_chunks().0.iter().map(|x| f64::from_le_bytes(*x) as f32).collect(),
        Dtype::F16 => bytes.as_chunks().0.iter().map(|x| f16::from_le_bytes(*x).to_f32()).collect(),
        Dtype::BF16 => {
            bytes.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32()).collect()
        }
        other => {
            let why = format!("{other:?}; give F32, F16, BF16 or F64");
            return Err(Error::format(place(), why));
        }
    };
    Ok((values, shape))
}
