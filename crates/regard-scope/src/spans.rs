//! Attention mass on named parts of a text: how much of each head goes to the instruction, the context, the answer.

use crate::error::Error;
use crate::measure::Measure;
use crate::trace::{LayerData, Site, Trace};
use regard::Machine;
use serde::Serialize;
use std::ops::Range;

/// The attention mass of one head on one span of keys.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SpanMass {
    /// Which head.
    #[serde(flatten)]
    pub site: Site,
    /// The name of the span.
    pub span: String,
    /// The mean over the queries, those that see nothing left out; NaN if there are none.
    pub mean: f64,
    /// That of the last query, which in a language model chooses the next token.
    pub last: f64,
}

/// The mass of every head of a trace on each span, spans innermost. Spans may overlap and reach beyond the last key.
pub fn span_mass(
    trace: &Trace,
    machine: Machine,
    spans: &[(String, Range<usize>)],
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<SpanMass>, Error> {
    let mut all = Vec::new();
    for (i, layer) in trace.layers.iter().enumerate() {
        let [q_len, _] = layer.data.size();
        for head in 0..layer.data.heads() {
            // For each span the mass of each query, and which queries see anything.
            let (masses, sees) = match &layer.data {
                LayerData::Inputs(inputs) => {
                    let view = inputs.view(machine)?.head(0, head)?;
                    let measure =
                        Measure::new().span_mass(spans.iter().map(|(_, keys)| keys.clone()));
                    let lse = &inputs.lse[head * q_len..][..q_len];
                    let sees = lse.iter().map(|lse| *lse != f32::NEG_INFINITY).collect();
                    (measure.of(&view)?.spans, sees)
                }
                LayerData::Weights(weights) => {
                    let row = |i| weights.row(head, i);
                    let of_span = |keys: &Range<usize>| {
                        let own = |i| row(i).iter().take(keys.end).skip(keys.start).sum();
                        (0..q_len).map(own).collect::<Vec<f32>>()
                    };
                    let sees: Vec<bool> =
                        (0..q_len).map(|i| row(i).iter().any(|a| *a != 0.0)).collect();
                    (spans.iter().map(|(_, keys)| of_span(keys)).collect(), sees)
                }
            };
            let site = Site { layer: layer.layer, kind: layer.kind.clone(), head };
            for ((name, _), mass) in spans.iter().zip(masses) {
                let (mut sum, mut count) = (0.0, 0.0);
                for (mass, _) in mass.iter().zip(&sees).filter(|(_, sees)| **sees) {
                    sum += f64::from(*mass);
                    count += 1.0;
                }
                let last = mass.last().map_or(f64::NAN, |mass| f64::from(*mass));
                let (site, span) = (site.clone(), name.clone());
                all.push(SpanMass { site, span, mean: sum / count, last });
            }
        }
        progress(i + 1, trace.layers.len());
    }
    Ok(all)
}
