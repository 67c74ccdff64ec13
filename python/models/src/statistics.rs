//! Attention statistics of a trace: numbers of each head, means over its queries.
//!
//! A strip of rows at a time, so memory is linear in the length. Cost: that of the weights, and a pass over them.

use regard::Machine;
use regard_scope::{Error, Layer, LayerData, Trace};
use serde::Deserialize;
use std::ops::Range;

/// What is asked.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Question {
    /// `self`, `encoder`, `decoder`, `cross`, as the model has them; all where there is none.
    pub(crate) kinds: Option<Vec<String>>,
    pub(crate) layers: Option<Vec<usize>>,
    pub(crate) heads: Option<Vec<usize>>,
    /// Largest weights of a query that are added up.
    pub(crate) top_k: usize,
    /// First keys that are sinks.
    pub(crate) sink: usize,
    /// Keys at most so far from a query are near.
    pub(crate) span: usize,
}

/// Entropy in nats, distance, sink mass, mass of the largest weights, mass of near keys.
pub(crate) const NUMBERS: usize = 5;

/// The numbers of a head.
pub(crate) type Head = (String, usize, usize, [f32; NUMBERS]);

/// Rows of weights that are computed at once.
const STRIP: usize = 64;

impl Question {
    /// Of every head that is asked for, in the order of the trace.
    pub(crate) fn of(&self, trace: &Trace) -> Result<Vec<Head>, Error> {
        let machine = Machine::detect();
        let mut all = Vec::new();
        for layer in trace.layers.iter().filter(|layer| self.has(layer)) {
            let heads = 0..layer.data.heads();
            let asked = |head: &usize| self.heads.as_ref().is_none_or(|own| own.contains(head));
            for head in heads.filter(asked) {
                all.push((
                    layer.kind.clone(),
                    layer.layer,
                    head,
                    self.head(machine, &layer.data, head)?,
                ));
            }
        }
        Ok(all)
    }

    fn has(&self, layer: &Layer) -> bool {
        self.kinds.as_ref().is_none_or(|own| own.contains(&layer.kind))
            && self.layers.as_ref().is_none_or(|own| own.contains(&layer.layer))
    }

    /// Means over the queries that see a key; NaN if there is none.
    fn head(
        &self,
        machine: Machine,
        data: &LayerData,
        head: usize,
    ) -> Result<[f32; NUMBERS], Error> {
        let [q_len, k_len] = data.size();
        let (mut sums, mut rows) = ([0.0; NUMBERS], 0.0);
        for start in (0..q_len).step_by(STRIP) {
            let strip = start..q_len.min(start + STRIP);
            let weights = weights(machine, data, head, strip.clone())?;
            for (row, weights) in strip.zip(weights.chunks_exact(k_len.max(1))) {
                // Queries end where keys do.
                let position = (row + k_len) as f64 - q_len as f64;
                if weights.iter().any(|weight| *weight > 0.0) {
                    rows += 1.0;
                    let row = self.row(weights, position);
                    sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
                }
            }
        }
        #[expect(clippy::cast_possible_truncation, reason = "numbers are f32 outside")]
        Ok(sums.map(|sum| (sum / rows) as f32))
    }

    fn row(&self, weights: &[f32], position: f64) -> [f64; NUMBERS] {
        let [mut entropy, mut distance, mut sink, mut near] = [0.0; 4];
        for (key, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
            let (weight, far) = (f64::from(*weight), (key as f64 - position).abs());
            entropy -= weight * weight.ln();
            distance += weight * far;
            if key < self.sink {
                sink += weight;
            }
            if far <= self.span as f64 {
                near += weight;
            }
        }
        [entropy, distance, sink, self.top(weights), near]
    }

    /// The sum of the largest weights, largest first.
    fn top(&self, weights: &[f32]) -> f64 {
        let mut weights = weights.to_vec();
        let descending = |a: &f32, b: &f32| b.total_cmp(a);
        if self.top_k < weights.len() {
            weights.select_nth_unstable_by(self.top_k, descending);
            weights.truncate(self.top_k);
        }
        weights.sort_unstable_by(descending);
        weights.iter().map(|weight| f64::from(*weight)).sum()
    }
}

/// The weights of some rows of a head, `[rows, keys]`.
pub(crate) fn weights(
    machine: Machine,
    data: &LayerData,
    head: usize,
    rows: Range<usize>,
) -> Result<Vec<f32>, Error> {
    let k_len = data.size()[1];
    Ok(match data {
        LayerData::Inputs(inputs) => inputs.view(machine)?.head(0, head)?.tile(rows, 0..k_len)?,
        LayerData::Weights(all) => all.head(head)[rows.start * k_len..rows.end * k_len].to_vec(),
    })
}
