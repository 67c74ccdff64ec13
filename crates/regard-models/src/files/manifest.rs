//! Every tensor that a Transformer has, with its shape.
//!
//! A configuration may claim any size. All tensors that follow from it are held against those that are there, whose bytes are in the
//! file, before anything is allocated: so what a model takes is bounded by its files.

use super::config::{
    AddedPositions, HeadConfig, NormOrder, QkNorm, StackConfig, TransformerConfig,
};
use super::weights::Weights;
use crate::error::Error;
use std::collections::BTreeSet;

/// Our names and the shapes of tensors.
type Tensors = Vec<(String, Vec<usize>)>;

impl TransformerConfig {
    /// Every tensor of the model: our name and its shape.
    #[must_use]
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let mut all = Vec::new();
        match (&self.encoder, &self.decoder) {
            (Some(encoder), Some(decoder)) => {
                stack(&mut all, encoder, ["source", "encoder_", "encoder."], true, None);
                let table = !self.shared_embedding;
                let width = Some(encoder.d_model);
                stack(&mut all, decoder, ["target", "decoder_", "decoder."], table, width);
            }
            (Some(one), None) | (None, Some(one)) => {
                stack(&mut all, one, ["embedding", "", "blocks."], true, None);
            }
            (None, None) => {}
        }
        let last = self.decoder.as_ref().or(self.encoder.as_ref());
        if let (Some(config), Some(last)) = (self.head, last) {
            head(&mut all, config, last, self.labels.len());
        }
        all
    }

    /// Refuses weights that are not exactly those of this configuration.
    pub(crate) fn fits(&self, weights: &Weights) -> Result<(), Error> {
        let wanted = self.tensors();
        for (name, shape) in &wanted {
            let there = weights.shape(name).ok_or_else(|| weights.missing(name))?;
            if there != shape {
                let (there, wanted) = (there.to_vec(), shape.clone());
                return Err(Error::Shape { tensor: name.clone(), there, wanted });
            }
        }
        let known: BTreeSet<_> = wanted.iter().map(|(name, _)| name.as_str()).collect();
        match weights.names().find(|name| !known.contains(name)) {
            Some(name) => {
                let why = "the configuration has no such tensor; does it belong to these weights?";
                Err(Error::format(format!("tensor `{name}`"), why))
            }
            None => Ok(()),
        }
    }
}

fn linear(all: &mut Tensors, name: &str, outputs: usize, inputs: usize, bias: bool) {
    all.push((format!("{name}.weight"), vec![outputs, inputs]));
    if bias {
        all.push((format!("{name}.bias"), vec![outputs]));
    }
}

fn norm(all: &mut Tensors, name: &str, config: &StackConfig) {
    all.push((format!("{name}.weight"), vec![config.d_model]));
    if config.norm.bias && !config.norm.rms {
        all.push((format!("{name}.bias"), vec![config.d_model]));
    }
}

/// `memory` is the width of the encoder that a decoder looks at.
fn stack(
    all: &mut Tensors,
    config: &StackConfig,
    [embedding, part, blocks]: [&str; 3],
    own_table: bool,
    memory: Option<usize>,
) {
    let d = config.d_model;
    if own_table {
        all.push((format!("{embedding}.weight"), vec![config.vocab, d]));
    }
    if let Some(patches) = config.patches {
        linear(all, &format!("{part}patches"), d, patches.inputs(), true);
    }
    if let AddedPositions::Learned { entries, .. } = config.positions {
        all.push((format!("{part}positions.weight"), vec![entries, d]));
    }
    if let Some(types) = config.token_types {
        all.push((format!("{part}token_types.weight"), vec![types, d]));
    }
    if config.embedding_norm {
        norm(all, &format!("{part}embedding_norm"), config);
    }
    for (i, layer) in config.layers.iter().enumerate() {
        block(all, config, &format!("{blocks}{i}."), !layer.no_attention_norm, memory);
    }
    if config.final_norm {
        norm(all, &format!("{part}norm"), config);
    }
    if let Some(relative) = config.relative {
        all.push((format!("{part}relative.weight"), vec![relative.buckets, config.heads.q]));
    }
}

fn block(
    all: &mut Tensors,
    config: &StackConfig,
    name: &str,
    attention_norm: bool,
    memory: Option<usize>,
) {
    let (d, order) = (config.d_model, config.order);
    let before = !matches!(order, NormOrder::OutputOnly);
    let after = matches!(order, NormOrder::PreAndPost | NormOrder::OutputOnly);
    let mut norms = |layer: &str, there: bool| {
        if before && there {
            norm(all, &format!("{name}{layer}_norm"), config);
        }
        if after {
            norm(all, &format!("{name}{layer}_post_norm"), config);
        }
    };
    norms("attention", attention_norm);
    norms("feed_forward", order != NormOrder::ParallelShared);
    if memory.is_some() {
        norms("cross", true);
    }
    let [q, k] = [config.heads.q, config.heads.kv].map(|n| n.saturating_mul(config.head_dim));
    for (layer, inputs) in [("attention", Some(d)), ("cross", memory)] {
        let Some(inputs) = inputs else { continue };
        let name = format!("{name}{layer}");
        linear(all, &format!("{name}.q"), q, d, config.qkv_bias);
        linear(all, &format!("{name}.k"), k, inputs, config.qkv_bias);
        linear(all, &format!("{name}.v"), k, inputs, config.qkv_bias);
        linear(all, &format!("{name}.out"), d, q, config.out_bias);
        if let Some(kind) = config.qk_norm {
            let [q, k] = if kind == QkNorm::Head { [config.head_dim; 2] } else { [q, k] };
            all.push((format!("{name}.q_norm.weight"), vec![q]));
            all.push((format!("{name}.k_norm.weight"), vec![k]));
        }
    }
    let (d_ff, bias) = (config.d_ff, config.feed_forward_bias);
    if config.gated {
        linear(all, &format!("{name}feed_forward.gate"), d_ff, d, bias);
    }
    linear(all, &format!("{name}feed_forward.up"), d_ff, d, bias);
    linear(all, &format!("{name}feed_forward.down"), d, d_ff, bias);
}

fn head(all: &mut Tensors, config: HeadConfig, last: &StackConfig, classes: usize) {
    let outputs = if classes > 0 { classes } else { last.vocab };
    if let Some(dense) = config.dense {
        linear(all, "head_dense", last.d_model, last.d_model, dense.bias);
        if dense.norm {
            norm(all, "head_norm", last);
        }
    }
    if !config.tied {
        all.push(("head.weight".into(), vec![outputs, last.d_model]));
    }
    if config.bias {
        all.push(("head.bias".into(), vec![outputs]));
    }
}
