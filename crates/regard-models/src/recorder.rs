//! What attention sees, kept for the microscope: queries, keys and `lse`, from which any weight can be made again.

use crate::error::Error;
use crate::stack::numbers;
use burn::tensor::Tensor;
use regard::problem::Normalizer;
use regard_burn::{Attention, AttentionOutput, Similarity};
use regard_scope::{Inputs, Labels, Layer, LayerData, Trace, Weights};
use std::collections::BTreeMap;

/// Keeps what each attention saw of the first item of a batch. One that is [`off`](Self::off) costs nothing.
#[derive(Debug, Default)]
pub struct Recorder {
    on: bool,
    place: Place,
    layers: Vec<Layer>,
}

/// Where in a model attention happens, and what it is between.
#[derive(Clone, Debug, Default)]
pub(crate) struct Place {
    layer: usize,
    kind: &'static str,
    axes: [&'static str; 2],
}

impl Recorder {
    /// Keeps nothing.
    #[must_use]
    pub fn off() -> Self {
        Self::default()
    }

    /// Keeps everything.
    #[must_use]
    pub fn on() -> Self {
        Self { on: true, ..Self::default() }
    }

    /// Whether anything is kept.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.on
    }

    /// The layer and the kind of what happens now.
    pub(crate) fn place(&self) -> (usize, &'static str) {
        (self.place.layer, self.place.kind)
    }

    /// What follows happens in this layer, between rows of this axis: `source` or `target`.
    pub fn at(&mut self, layer: usize, kind: &'static str, axis: &'static str) {
        self.place = Place { layer, kind, axes: [axis; 2] };
    }

    /// What happens within is of this kind, and over the source.
    pub fn within<T>(&mut self, kind: &'static str, work: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.enter(kind);
        let result = work(self);
        self.leave(before);
        result
    }

    /// What follows is of this kind and over the source. Returns where it was before.
    pub(crate) fn enter(&mut self, kind: &'static str) -> Place {
        let Place { layer, axes: [rows, _], .. } = self.place;
        std::mem::replace(&mut self.place, Place { layer, kind, axes: [rows, "source"] })
    }

    /// And back.
    pub(crate) fn leave(&mut self, before: Place) {
        self.place = before;
    }

    /// Keeps `q`, `k [batch, heads, length, features]` of a call.
    pub(crate) fn record(
        &mut self,
        q: Tensor<4>,
        k: Tensor<4>,
        attended: &AttentionOutput,
        options: &Attention,
    ) -> Result<(), Error> {
        let refuse = |what: &str| Err(Error::NotRecorded { what: what.into() });
        let plain =
            options.sinks.is_none() && options.centers.is_none() && options.dropout.is_none();
        if options.alibi.is_some() || options.relative.is_some() || options.bias.is_some() || !plain
        {
            return refuse("a bias, a sink, a center or dropout");
        }
        if !matches!(
            (&options.similarity, options.normalizer),
            (Similarity::Dot, Normalizer::Softmax)
        ) {
            return refuse("another similarity or normalizer");
        }
        let mask = options.mask.to_string();
        if !["full", "causal"].contains(&mask.as_str()) {
            return refuse(&format!("the mask `{mask}`"));
        }
        let ([_, heads, q_len, dim], [_, kv, k_len, _]) = (q.dims(), k.dims());
        let mut lse = attended.lse();
        lse.truncate(heads * q_len);
        let seen = Inputs {
            q: numbers(q.narrow(0, 0, 1)),
            k: numbers(k.narrow(0, 0, 1)),
            lse,
            q_shape: [heads, q_len, dim],
            k_shape: [kv, k_len, dim],
            mask,
            scale: options.scale,
            softcap: options.softcap,
            ..Inputs::default()
        };
        let Place { layer, kind, axes: [rows, cols] } = self.place;
        let seen = LayerData::Inputs(seen);
        self.layers.push(Layer {
            layer,
            kind: kind.into(),
            rows: rows.into(),
            cols: cols.into(),
            data: seen,
            value_norms: Vec::new(),
        });
        Ok(())
    }

    /// Keeps weights `[heads, rows, cols]` themselves, of scores that a trace cannot tell of.
    pub(crate) fn keep(&mut self, weights: Tensor<3>) {
        if !self.on {
            return;
        }
        let Place { layer, kind, axes: [rows, cols] } = self.place;
        let (shape, values) = (weights.dims(), numbers(weights));
        let seen = LayerData::Weights(Weights { values, shape });
        let (kind, rows, cols) = (kind.into(), rows.into(), cols.into());
        let value_norms = Vec::new();
        self.layers.push(Layer { layer, kind, rows, cols, data: seen, value_norms });
    }

    /// All of it, with the tokens of each axis.
    #[must_use]
    pub fn trace(self, title: impl Into<String>, axes: &[(&str, Vec<String>)]) -> Trace {
        let labels = |(name, tokens): &(&str, Vec<String>)| {
            (name.to_string(), Labels::new(*name, tokens.clone()))
        };
        let axes: BTreeMap<String, Labels> = axes.iter().map(labels).collect();
        Trace { title: title.into(), axes, layers: self.layers, ..Trace::default() }
    }
}
