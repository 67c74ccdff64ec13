//! From a run of a real model to a trace.

use crate::dense::{Outcome, Run};
use regard_scope::{Inputs, Labels, Layer, LayerData, Trace};
use std::collections::BTreeMap;

/// All attentions of a run of a real model.
pub(crate) fn trace_of(title: &str, run: &Run, dim: usize) -> Outcome<Trace> {
    let mut layers = Vec::new();
    for seen in &run.seen {
        let shape = |data: &[f32], len: usize| [data.len() / len / dim, len, dim];
        let mask = if seen.causal { "causal" } else { "full" };
        let q = (seen.q.clone(), shape(&seen.q, seen.q_len));
        let heads = Inputs::new(q, (seen.k.clone(), shape(&seen.k, seen.k_len)), mask)?;
        let (rows, cols) = match seen.kind {
            "encoder" => ("source", "source"),
            "cross" => ("target", "source"),
            _ => ("target", "target"),
        };
        let (kind, seen, layer) = (seen.kind.into(), LayerData::Inputs(heads), seen.layer);
        layers.push(Layer {
            layer,
            kind,
            rows: rows.into(),
            cols: cols.into(),
            data: seen,
            value_norms: Vec::new(),
        });
    }
    let mut axes = BTreeMap::new();
    for (name, words) in [("source", &run.source), ("target", &run.target)] {
        if !words.is_empty() {
            axes.insert(name.to_string(), Labels::new(name, words.clone()));
        }
    }
    Ok(Trace { title: title.into(), axes, layers, ..Trace::default() })
}
