//! What attention sees, kept for the microscope.

use super::cache::LayerCache;
use crate::error::Error;
use crate::files::StackConfig;
use crate::generate::{AttentionProbe, AttentionRow};
use rayon::prelude::*;
use regard::{AttentionView, Machine, Mask, Plan, Problem, Sequence, View};
use regard_scope::{Inputs, Layer, LayerData, Weights};
use std::sync::Arc;

/// Keeps what each attention saw: all of one sequence, or what probes ask for. One that does neither costs nothing.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    is_on: bool,
    /// Whether norms of values are recorded too.
    value_norms: bool,
    place: Place,
    pub(super) layers: Vec<Layer>,
    /// Numbers of the weights that are kept as they are.
    kept: usize,
    /// With the number of their sequence in the batch.
    probes: Vec<(usize, Arc<AttentionProbe>)>,
    /// What they saw.
    pub(super) seen: Vec<(usize, AttentionRow)>,
}

/// Weights that are kept as they are, of all layers: 1 GiB.
const MAX_WEIGHTS: usize = 1 << 28;

/// Where in a model attention happens, and between which axes.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    layer: usize,
    kind: &'static str,
    axes: [&'static str; 2],
}

impl Recorder {
    /// Keeps everything.
    pub(super) fn on(value_norms: bool) -> Self {
        Self { is_on: true, value_norms, ..Self::default() }
    }

    /// Whether norms of values are asked for.
    pub(super) fn takes_value_norms(&self) -> bool {
        self.value_norms
    }

    /// The norms of the values of the last call, `[heads, keys]`.
    pub(super) fn record_value_norms(&mut self, norms: Vec<f32>) {
        if let Some(layer) = self.layers.last_mut() {
            layer.value_norms = norms;
        }
    }

    /// Keeps what is asked of sequences of the batch, in its last rows.
    pub(super) fn probing(probes: Vec<(usize, Arc<AttentionProbe>)>) -> Self {
        Self { probes, ..Self::default() }
    }

    /// What follows happens in this layer, between rows of this axis.
    pub(super) fn at(&mut self, layer: usize, kind: &'static str, axis: &'static str) {
        self.place = Place { layer, kind, axes: [axis; 2] };
    }

    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// What happens within is over the source.
    pub(super) fn over_source<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.place;
        self.place = Place { kind: "cross", axes: [before.axes[0], "source"], ..before };
        let result = work(self);
        self.place = before;
        result
    }

    /// Whether a probe asks for this layer.
    pub(super) fn is_probed(&self) -> bool {
        let asks = |probe: &AttentionProbe| probe.layers.contains(&self.place.layer);
        self.place.kind != "cross" && self.probes.iter().any(|(_, probe)| asks(probe))
    }

    /// Keeps what probes ask for, of the last row of each sequence.
    pub(super) fn probe(&mut self, view: &AttentionView<'_, f32>) -> Result<(), Error> {
        let layer = self.place.layer;
        let asked = self.probes.iter().filter(|(_, one)| one.layers.contains(&layer));
        let asked: Vec<_> =
            asked.flat_map(|(item, one)| one.heads.iter().map(move |h| (*item, *h, one))).collect();
        let look = |(item, head, probe): (usize, usize, &Arc<AttentionProbe>)| {
            let last = view.rows_of(item).0.end.saturating_sub(1);
            let weights = view.head(item, head)?.row(last)?;
            Ok((item, AttentionRow::new([layer, head], &weights, probe)))
        };
        let seen: Vec<_> = asked.into_par_iter().map(look).collect::<Result<_, Error>>()?;
        self.seen.extend(seen);
        Ok(())
    }

    /// Keeps a call: `q [rows, heads, dim]`, `k [rows, heads, dim]` unless it is what a sequence has in a cache, and `lse [heads, rows]`.
    pub(super) fn record<'p>(
        &mut self,
        [q, k, lse]: [&[f32]; 3],
        cached: Option<(&LayerCache, Sequence)>,
        config: &StackConfig,
        is_causal: bool,
        problem: impl Fn(&View<'_, f32>, &View<'_, f32>) -> Problem<'p, f32>,
    ) -> Result<(), Error> {
        let Place { layer, kind, axes: [rows, cols] } = self.place;
        let (heads, dim) = (config.heads, config.head_dim);
        let q = by_head(q, [heads.q, dim]);
        let k = match cached {
            Some((cache, sequence)) => cache.keys(sequence)?,
            None => by_head(k, [heads.kv, dim]),
        };
        let [q_len, k_len] = [q.len() / (heads.q * dim), k.len() / (heads.kv * dim)];
        let (q_shape, k_shape) = ([heads.q, q_len, dim], [heads.kv, k_len, dim]);
        let queries = View::bhsd(&q, [1, heads.q, q_len, dim])?;
        let keys = View::bhsd(&k, [1, heads.kv, k_len, dim])?;
        let problem = problem(&queries, &keys);
        // A window that reaches over all keys is none; a source has none.
        let is_wide = kind == "cross" || config.layers[layer].window.is_none_or(|n| n >= k_len);
        let mask = match (is_wide, is_causal) {
            (true, true) => Mask::causal(),
            (true, false) => Mask::full(),
            (false, _) => problem.mask.clone(),
        };
        let mask = mask.to_string();
        let is_plain = config.relative.is_none();
        let data = if is_plain && ["full", "causal"].contains(&mask.as_str()) {
            let (scale, softcap) = (config.scale, config.softcap);
            LayerData::Inputs(Inputs {
                lse: lse.to_vec(),
                q,
                k,
                q_shape,
                k_shape,
                mask,
                scale,
                softcap,
                ..Inputs::default()
            })
        } else {
            // A trace cannot tell of such scores: the weights themselves.
            self.kept =
                self.kept.saturating_add(heads.q.saturating_mul(q_len).saturating_mul(k_len));
            if self.kept > MAX_WEIGHTS {
                let why = format!(
                    "attention weights of {q_len} tokens with a window or a bias take more than {} MB up to layer {layer}; shorten it",
                    MAX_WEIGHTS >> 18
                );
                return Err(Error::Tokens { what: "the text".into(), why });
            }
            let plan = Plan::new(problem, Machine::detect())?;
            let view = AttentionView::from_lse(&plan, queries, keys, lse)?;
            let mut values = Vec::with_capacity(heads.q * q_len * k_len);
            for head in 0..heads.q {
                let head = view.head(0, head)?;
                for row in 0..q_len {
                    values.extend(head.row(row)?);
                }
            }
            LayerData::Weights(Weights { values, shape: [heads.q, q_len, k_len] })
        };
        self.layers.push(Layer {
            layer,
            kind: kind.into(),
            rows: rows.into(),
            cols: cols.into(),
            data,
            value_norms: Vec::new(),
        });
        Ok(())
    }
}

/// `[rows, heads, dim]` as `[heads, rows, dim]`.
pub(super) fn by_head(rows: &[f32], [heads, dim]: [usize; 2]) -> Vec<f32> {
    let of_head =
        |head: usize| rows.chunks_exact(heads * dim).flat_map(move |row| &row[head * dim..][..dim]);
    (0..heads).flat_map(of_head).copied().collect()
}
