//! Encoders without a decoder.

use super::super::fields::Fields;
use super::super::{
    Activation, AddedPositions, DenseActivation, DenseConfig, HeadConfig, LayerConfig, NormConfig,
    NormOrder, Pooling, StackConfig, TransformerConfig,
};
use super::rope::{RopeKeys, ropes};
use super::{Scores, biased, head_dim, labels, layer_count, model, scores, sliding, with_ids};
use crate::error::Error;
use serde_json::Value;

/// BERT; RoBERTa and its kin count positions from `pad + 1`.
pub(super) fn bert(fields: &mut Fields, roberta: bool) -> Result<TransformerConfig, Error> {
    let (d_model, heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
    let entries = fields.size("max_position_embeddings")?;
    fields.only("position_embedding_type", &["absolute".into()])?;
    fields.only("is_decoder", &[false.into()])?;
    fields.only("add_cross_attention", &[false.into()])?;
    // Settings of the pooler of TensorFlow's BERT, which nothing reads.
    for name in ["fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type"] {
        fields.map.remove(&format!("pooler_{name}"));
    }
    let layers = layer_count(fields, "num_hidden_layers")?;
    let head_dim = head_dim(None, d_model, heads)?;
    let activation = fields.activation("hidden_act")?.unwrap_or(Activation::Gelu);
    let stack = post_norm(fields, [d_model, heads, head_dim, layers], activation)?;
    let config = with_ids(
        fields,
        TransformerConfig {
            bos: roberta.then_some(0),
            eos: if roberta { vec![2] } else { Vec::new() },
            pad: Some(u32::from(roberta)),
            ..model(None)
        },
    )?;
    let pad = config.pad.and_then(|pad| usize::try_from(pad).ok()).unwrap_or(0);
    let offset = if roberta { pad.saturating_add(1) } else { 0 };
    let stack = StackConfig {
        token_types: Some(fields.optional_size("type_vocab_size")?.unwrap_or(2)),
        positions: AddedPositions::Learned { entries, offset },
        context: Some(entries.saturating_sub(offset)),
        d_ff: fields.size("intermediate_size")?,
        norm: NormConfig { eps: fields.number("layer_norm_eps")?.unwrap_or(1e-12), ..stack.norm },
        ..stack
    };
    let predicts = DenseActivation::Of(if roberta { Activation::Gelu } else { activation });
    headed(fields, config, stack, [predicts, DenseActivation::Tanh])
}

pub(super) fn distilbert(fields: &mut Fields) -> Result<TransformerConfig, Error> {
    let (d_model, heads) = (fields.size("dim")?, fields.size("n_heads")?);
    let entries = fields.size("max_position_embeddings")?;
    // The table is in the file either way.
    fields.map.remove("sinusoidal_pos_embds");
    // Of the model that it was made of.
    fields.map.remove("tie_weights_");
    let layers = layer_count(fields, "n_layers")?;
    let head_dim = head_dim(None, d_model, heads)?;
    let activation = fields.activation("activation")?.unwrap_or(Activation::Gelu);
    let stack = post_norm(fields, [d_model, heads, head_dim, layers], activation)?;
    let stack = StackConfig {
        positions: AddedPositions::Learned { entries, offset: 0 },
        context: Some(entries),
        d_ff: fields.size("hidden_dim")?,
        norm: NormConfig { eps: 1e-12, ..stack.norm },
        ..stack
    };
    let config = with_ids(fields, TransformerConfig { pad: Some(0), ..model(None) })?;
    let dense = [DenseActivation::Of(activation), DenseActivation::Of(Activation::Relu)];
    headed(fields, config, stack, dense)
}

fn post_norm(
    fields: &mut Fields,
    [d_model, heads, head_dim, layers]: [usize; 4],
    activation: Activation,
) -> Result<StackConfig, Error> {
    Ok(StackConfig {
        embedding_norm: true,
        activation,
        order: NormOrder::Post,
        final_norm: false,
        layers: vec![LayerConfig::default(); layers],
        ..biased(fields.size("vocab_size")?, d_model, heads, head_dim)
    })
}

/// The head that the architecture has: its projection has these activations before scores of tokens and of classes.
fn headed(
    fields: &mut Fields,
    config: TransformerConfig,
    stack: StackConfig,
    [tokens, classes]: [DenseActivation; 2],
) -> Result<TransformerConfig, Error> {
    let all = [Scores::Nothing, Scores::Tokens, Scores::Classes];
    let scored = scores(fields, Scores::Nothing, &all)?;
    let tied = fields.bool("tie_word_embeddings")?.unwrap_or(true);
    let dense = |activation, norm| Some(DenseConfig { activation, bias: true, norm });
    let of_tokens =
        HeadConfig { tied, bias: true, dense: dense(tokens, true), ..HeadConfig::default() };
    let of_classes =
        HeadConfig { bias: true, dense: dense(classes, false), ..HeadConfig::default() };
    let config = TransformerConfig { encoder: Some(stack), ..config };
    Ok(match scored {
        Scores::Nothing => config,
        Scores::Tokens => TransformerConfig { head: Some(of_tokens), ..config },
        Scores::Classes => TransformerConfig {
            head: Some(of_classes),
            pooling: Pooling::First,
            labels: labels(fields)?,
            ..config
        },
    })
}

pub(super) fn modernbert(
    fields: &mut Fields,
    notes: &mut Vec<String>,
) -> Result<TransformerConfig, Error> {
    const KEYS: RopeKeys = RopeKeys {
        theta: ("global_rope_theta", 160_000.0),
        local: Some(("local_rope_theta", 1e4, true)),
        partial: ("partial_rotary_factor", 1.0),
    };
    let (d_model, heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
    let head_dim = head_dim(None, d_model, heads)?;
    let context = fields.optional_size("max_position_embeddings")?;
    let n = layer_count(fields, "num_hidden_layers")?;
    // Published, and read by nothing.
    for name in ["position_embedding_type", "layer_norm_eps"] {
        fields.map.remove(name);
    }
    let ropes = ropes(fields, &KEYS, head_dim, context, notes)?;
    let every = fields.optional_size("global_attn_every_n_layers")?.unwrap_or(3);
    let side = fields.optional_size("local_attention")?.unwrap_or(128) / 2;
    let kinds = sliding(fields, n)?;
    let layer = |i: usize| {
        let local = kinds.as_ref().map_or_else(|| !i.is_multiple_of(every), |kinds| kinds[i]);
        LayerConfig {
            window: local.then_some(side),
            rope: Some(if local { &ropes.sliding } else { &ropes.full }.clone()),
            no_attention_norm: i == 0,
        }
    };
    let eps = fields.number("norm_eps")?.unwrap_or(1e-5);
    let bias = fields.bool("attention_bias")?.unwrap_or(false);
    let stack = StackConfig {
        embedding_norm: true,
        context: ropes.context.or(context),
        d_ff: fields.size("intermediate_size")?,
        activation: fields.activation("hidden_activation")?.unwrap_or(Activation::Gelu),
        gated: true,
        norm: NormConfig {
            rms: false,
            bias: fields.bool("norm_bias")?.unwrap_or(false),
            eps,
            plus_one: false,
        },
        qkv_bias: bias,
        out_bias: bias,
        feed_forward_bias: fields.bool("mlp_bias")?.unwrap_or(false),
        layers: (0..n).map(layer).collect(),
        ..biased(fields.size("vocab_size")?, d_model, heads, head_dim)
    };
    let activation = fields.activation("classifier_activation")?.unwrap_or(Activation::Gelu);
    let dense = DenseConfig {
        activation: DenseActivation::Of(activation),
        bias: fields.bool("classifier_bias")?.unwrap_or(false),
        norm: true,
    };
    let predicts = fields.bool("decoder_bias")?.unwrap_or(true);
    let mean = fields.map.get("classifier_pooling").is_some_and(|pooling| pooling == "mean");
    fields.only("classifier_pooling", &["cls".into(), Value::from("mean")])?;
    let config = with_ids(fields, model(None))?;
    let config = headed(fields, config, stack, [dense.activation; 2])?;
    let classifies = !config.labels.is_empty();
    let head = config.head.map(|head| HeadConfig {
        dense: Some(dense),
        bias: classifies || predicts,
        ..head
    });
    let pooling = if classifies && !mean { Pooling::First } else { Pooling::Mean };
    Ok(TransformerConfig { head, pooling, ..config })
}
