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
        for head in 0..layer.data.heads() {
            let rows = SpanRows::of(&layer.data, machine, head, spans)?;
            let site = Site { layer: layer.layer, kind: layer.kind.clone(), head };
            all.extend(spans.iter().enumerate().map(|(i, (span, _))| SpanMass {
                site: site.clone(),
                span: span.clone(),
                mean: rows.mean(i, 0..usize::MAX),
                last: rows.last(i),
            }));
        }
        progress(i + 1, trace.layers.len());
    }
    Ok(all)
}

/// The mass of each query of a head on spans of its keys.
pub(crate) struct SpanRows {
    /// By span, then by query.
    masses: Vec<Vec<f32>>,
    /// Which queries see anything.
    sees: Vec<bool>,
}

impl SpanRows {
    /// One pass over the weights of the head.
    pub(crate) fn of(
        data: &LayerData,
        machine: Machine,
        head: usize,
        spans: &[(String, Range<usize>)],
    ) -> Result<Self, Error> {
        let [q_len, _] = data.size();
        Ok(match data {
            LayerData::Inputs(inputs) => {
                let view = inputs.view(machine)?.head(0, head)?;
                let measure = Measure::new().span_mass(spans.iter().map(|(_, keys)| keys.clone()));
                let lse = &inputs.lse[head * q_len..][..q_len];
                let sees = lse.iter().map(|lse| *lse != f32::NEG_INFINITY).collect();
                Self { masses: measure.of(&view)?.spans, sees }
            }
            LayerData::Weights(weights) => {
                let row = |i| weights.row(head, i);
                let of_span = |keys: &Range<usize>| {
                    let own = |i| row(i).iter().take(keys.end).skip(keys.start).sum();
                    (0..q_len).map(own).collect::<Vec<f32>>()
                };
                let sees = (0..q_len).map(|i| row(i).iter().any(|a| *a != 0.0)).collect();
                Self { masses: spans.iter().map(|(_, keys)| of_span(keys)).collect(), sees }
            }
        })
    }

    /// The mean mass of some queries on a span, those that see nothing left out; NaN if there are none.
    pub(crate) fn mean(&self, span: usize, rows: Range<usize>) -> f64 {
        let all = self.masses[span].iter().zip(&self.sees).take(rows.end).skip(rows.start);
        let (mut sum, mut count) = (0.0, 0.0);
        for (mass, _) in all.filter(|(_, sees)| **sees) {
            sum += f64::from(*mass);
            count += 1.0;
        }
        sum / count
    }

    /// Of each span the mean mass, and that of the last query.
    pub(crate) fn means(&self) -> Vec<[f64; 2]> {
        (0..self.masses.len()).map(|i| [self.mean(i, 0..self.sees.len()), self.last(i)]).collect()
    }

    /// That of the last query.
    pub(crate) fn last(&self, span: usize) -> f64 {
        self.masses[span].last().map_or(f64::NAN, |mass| f64::from(*mass))
    }
}
