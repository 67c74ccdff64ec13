//! Decoders without an encoder.

use super::super::fields::{Fields, missing};
use super::super::{
    Activation, AddedPositions, HeadConfig, Heads, LayerConfig, NormConfig, NormOrder, Pooling,
    QkNorm, StackConfig, TransformerConfig,
};
use super::rope::{RopeKeys, ropes};
use super::{Scores, biased, head_dim, layer_count, model, root, scores, with_ids};
use crate::error::Error;
use serde_json::Value;

/// How a family differs from Llama.
#[derive(Clone, Copy)]
pub(super) struct Family {
    rope: RopeKeys,
    tied: bool,
    eps: f64,
    /// Features of a head, if nothing is said and they are not the equal share.
    head_dim: Option<usize>,
    /// Whether q, k and v have biases whatever is said, and the output none (Qwen2).
    qkv_bias: bool,
    qk_norm: Option<QkNorm>,
    order: NormOrder,
    windows: Windows,
    /// Embeddings times `sqrt(d_model)`, norms that store the weight less one, and a tanh GELU.
    gemma: bool,
    softcaps: [Option<f64>; 2],
}

/// Which layers have a window.
#[derive(Clone, Copy)]
enum Windows {
    None,
    /// All, if there is one.
    All,
    /// Those from `max_window_layers` on, if `use_sliding_window` says so (Qwen).
    Later,
    /// All but every n-th (Gemma 2: 2, Gemma 3: 6).
    Between(usize),
    /// Those without rotation, if `use_sliding_window` says so (SmolLM3).
    Unrotated,
}

pub(super) const LLAMA: Family = Family {
    rope: RopeKeys::theta(1e4),
    tied: false,
    eps: 1e-6,
    head_dim: None,
    qkv_bias: false,
    qk_norm: None,
    order: NormOrder::Pre,
    windows: Windows::None,
    gemma: false,
    softcaps: [None; 2],
};
pub(super) const MISTRAL: Family = Family { windows: Windows::All, ..LLAMA };
pub(super) const QWEN2: Family = Family { qkv_bias: true, windows: Windows::Later, ..LLAMA };
pub(super) const QWEN3: Family =
    Family { head_dim: Some(128), qk_norm: Some(QkNorm::Head), windows: Windows::Later, ..LLAMA };
pub(super) const PHI3: Family = Family { eps: 1e-5, windows: Windows::All, ..LLAMA };
pub(super) const SMOLLM3: Family =
    Family { rope: RopeKeys::theta(2e6), tied: true, windows: Windows::Unrotated, ..LLAMA };
pub(super) const OLMO2: Family =
    Family { eps: 1e-5, qk_norm: Some(QkNorm::Token), order: NormOrder::OutputOnly, ..LLAMA };
pub(super) const GEMMA: Family = Family { tied: true, head_dim: Some(256), gemma: true, ..LLAMA };
pub(super) const GEMMA2: Family = Family {
    order: NormOrder::PreAndPost,
    windows: Windows::Between(2),
    softcaps: [Some(50.0), Some(30.0)],
    ..GEMMA
};
pub(super) const GEMMA3: Family = Family {
    rope: RopeKeys {
        theta: ("rope_theta", 1e6),
        local: Some(("rope_local_base_freq", 1e4, false)),
        partial: ("partial_rotary_factor", 1.0),
    },
    qk_norm: Some(QkNorm::Head),
    windows: Windows::Between(6),
    softcaps: [None; 2],
    ..GEMMA2
};

pub(super) fn llama(
    fields: &mut Fields,
    family: &Family,
    notes: &mut Vec<String>,
) -> Result<TransformerConfig, Error> {
    let d_model = fields.size("hidden_size")?;
    let q = fields.size("num_attention_heads")?;
    let kv = fields.optional_size("num_key_value_heads")?.unwrap_or(q);
    let head_dim = head_dim(fields.optional_size("head_dim")?.or(family.head_dim), d_model, q)?;
    let context = fields.optional_size("max_position_embeddings")?;
    let (layers, cut) = layers(fields, family, head_dim, context, notes)?;
    let bias = fields.bool("attention_bias")?.unwrap_or(false);
    let (activation, scale) = if family.gemma { gemma(fields)? } else { plain(fields)? };
    let gemma2 = family.gemma && family.order == NormOrder::PreAndPost;
    let [softcap, of_head] = if gemma2 { softcaps(fields, family)? } else { [None; 2] };
    let stack = StackConfig {
        embedding_scale: family.gemma.then(|| root(d_model)),
        context: cut.or(context),
        heads: Heads { q, kv },
        d_ff: fields.size("intermediate_size")?,
        activation,
        gated: true,
        norm: NormConfig {
            rms: true,
            bias: false,
            eps: fields.number("rms_norm_eps")?.unwrap_or(family.eps),
            plus_one: family.gemma,
        },
        order: family.order,
        qk_norm: family.qk_norm,
        qkv_bias: bias || family.qkv_bias,
        out_bias: bias && !family.qkv_bias,
        feed_forward_bias: fields.bool("mlp_bias")?.unwrap_or(false),
        scale,
        softcap,
        layers,
        ..biased(fields.size("vocab_size")?, d_model, q, head_dim)
    };
    let config = causal(fields, stack, family.tied)?;
    let head = config.head.map(|head| HeadConfig { softcap: of_head, ..head });
    Ok(TransformerConfig { head, ..config })
}

/// Activation, and the scale of scores if it is not the usual one.
fn plain(fields: &mut Fields) -> Result<(Activation, Option<f64>), Error> {
    // What Phi-4-mini says of itself beside Phi-3, and what Granite adds to Llama.
    fields.only("lm_head_bias", &[false.into()])?;
    for name in ["full_attn_mod", "interpolate_factor"] {
        fields.only(name, &[1.into()])?;
    }
    Ok((fields.activation("hidden_act")?.unwrap_or(Activation::Silu), None))
}

fn gemma(fields: &mut Fields) -> Result<(Activation, Option<f64>), Error> {
    fields.only("use_bidirectional_attention", &[false.into()])?;
    // `gelu` was published with the first Gemma, and not meant.
    let old = fields.activation("hidden_act")?.filter(|act| *act != Activation::Gelu);
    let activation = fields.activation("hidden_activation")?.or(old);
    let scalar = fields.number("query_pre_attn_scalar")?;
    let scale = scalar.map(|scalar| scalar.sqrt().recip());
    Ok((activation.unwrap_or(Activation::GeluTanh), scale))
}

fn softcaps(fields: &mut Fields, family: &Family) -> Result<[Option<f64>; 2], Error> {
    let mut cap = |name: &str, unsaid: Option<f64>| match fields.map.get(name) {
        None => Ok(unsaid),
        Some(_) => fields.number(name),
    };
    let [scores, head] = family.softcaps;
    Ok([cap("attn_logit_softcapping", scores)?, cap("final_logit_softcapping", head)?])
}

/// Window and rotation of each layer, and the context that the frequencies are of, if they are of less than all.
fn layers(
    fields: &mut Fields,
    family: &Family,
    head_dim: usize,
    context: Option<usize>,
    notes: &mut Vec<String>,
) -> Result<(Vec<LayerConfig>, Option<usize>), Error> {
    let n = layer_count(fields, "num_hidden_layers")?;
    let ropes = ropes(fields, &family.rope, head_dim, context, notes)?;
    let mut window = fields.optional_size("sliding_window")?;
    let used = fields.bool("use_sliding_window")?;
    let unrotated = unrotated(fields, family, n)?;
    let later = fields.optional_size("max_window_layers")?.unwrap_or(n);
    let pattern = fields.optional_size("sliding_window_pattern")?;
    let pattern = fields.optional_size("_sliding_window_pattern")?.or(pattern);
    if matches!(family.windows, Windows::Later | Windows::Unrotated) && used != Some(true) {
        window = None;
    }
    let usual = |layer: usize| match family.windows {
        Windows::None => false,
        Windows::All => true,
        Windows::Later => layer >= later,
        Windows::Between(n) => !(layer + 1).is_multiple_of(pattern.unwrap_or(n)),
        Windows::Unrotated => unrotated[layer],
    };
    let kinds = layer_types(fields, family, n)?;
    let layer = |i: usize| {
        let sliding = kinds.as_ref().map_or_else(|| usual(i), |kinds| kinds[i]);
        if sliding && window.is_none() && matches!(family.windows, Windows::Between(_)) {
            return Err(missing("sliding_window"));
        }
        let rope = if sliding { &ropes.sliding } else { &ropes.full };
        Ok(LayerConfig {
            window: window.filter(|_| sliding),
            rope: (!unrotated[i]).then(|| rope.clone()),
            no_attention_norm: false,
        })
    };
    if matches!(family.windows, Windows::None) && window.is_some() {
        let known = "this family has no window";
        return Err(Error::unsupported("sliding_window", &window.unwrap_or_default(), known));
    }
    Ok(((0..n).map(layer).collect::<Result<_, _>>()?, ropes.context))
}

/// Layers without rotation: 0 in a list that has 1 for the others.
fn unrotated(fields: &mut Fields, family: &Family, n: usize) -> Result<Vec<bool>, Error> {
    if !matches!(family.windows, Windows::Unrotated) {
        return Ok(vec![false; n]);
    }
    let list = |value: &Value| {
        let rotated = value.as_array()?.iter().map(Value::as_u64);
        rotated.map(|one| Some(one? == 0)).collect::<Option<Vec<bool>>>()
    };
    let given = fields.read("no_rope_layers", "a list of 0 and 1", list)?;
    let every = fields.optional_size("no_rope_layer_interval")?.unwrap_or(4);
    let list = given.unwrap_or_else(|| (1..=n).map(|i| i.is_multiple_of(every)).collect());
    let why = format!("{} layers; the model has {n}", list.len());
    if list.len() == n { Ok(list) } else { Err(Error::format("no_rope_layers", why)) }
}

/// Which layers have a window, if the configuration has them one by one.
fn layer_types(fields: &mut Fields, family: &Family, n: usize) -> Result<Option<Vec<bool>>, Error> {
    if matches!(family.windows, Windows::None | Windows::All) {
        // Transformers does not follow it in these families.
        fields.only("layer_types", &[])?;
        return Ok(None);
    }
    super::sliding(fields, n)
}

pub(super) fn gpt2(fields: &mut Fields) -> Result<TransformerConfig, Error> {
    let d_model = fields.size("n_embd")?;
    let heads = fields.size("n_head")?;
    let entries = fields.optional_size("n_positions")?;
    let old = fields.optional_size("n_ctx")?;
    let entries = entries.or(old).ok_or_else(|| missing("n_positions"))?;
    fields.only("scale_attn_by_inverse_layer_idx", &[false.into()])?;
    fields.only("add_cross_attention", &[false.into()])?;
    // The same numbers, in another order.
    fields.map.remove("reorder_and_upcast_attn");
    let scaled = fields.bool("scale_attn_weights")?.unwrap_or(true);
    let layers = layer_count(fields, "n_layer")?;
    let head_dim = head_dim(None, d_model, heads)?;
    let stack = biased(fields.size("vocab_size")?, d_model, heads, head_dim);
    let activation = fields.activation("activation_function")?;
    let stack = StackConfig {
        positions: AddedPositions::Learned { entries, offset: 0 },
        context: Some(entries),
        d_ff: fields.optional_size("n_inner")?.unwrap_or(stack.d_ff),
        activation: activation.unwrap_or(Activation::GeluTanh),
        norm: NormConfig {
            eps: fields.number("layer_norm_epsilon")?.unwrap_or(1e-5),
            ..stack.norm
        },
        scale: (!scaled).then_some(1.0),
        layers: vec![LayerConfig::default(); layers],
        ..stack
    };
    causal(fields, stack, true)
}

pub(super) fn gpt_neox(
    fields: &mut Fields,
    notes: &mut Vec<String>,
) -> Result<TransformerConfig, Error> {
    const KEYS: RopeKeys =
        RopeKeys { theta: ("rotary_emb_base", 1e4), local: None, partial: ("rotary_pct", 0.25) };
    let (d_model, heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
    let context = fields.optional_size("max_position_embeddings")?;
    let layers = layer_count(fields, "num_hidden_layers")?;
    let head_dim = head_dim(None, d_model, heads)?;
    let stack = biased(fields.size("vocab_size")?, d_model, heads, head_dim);
    let ropes = ropes(fields, &KEYS, head_dim, context, notes)?;
    let parallel = fields.bool("use_parallel_residual")?.unwrap_or(true);
    let bias = fields.bool("attention_bias")?.unwrap_or(true);
    fields.only("is_decoder", &[false.into(), true.into()])?;
    let rotated = LayerConfig { rope: Some(ropes.full), ..LayerConfig::default() };
    let stack = StackConfig {
        context: ropes.context.or(context),
        d_ff: fields.size("intermediate_size")?,
        activation: fields.activation("hidden_act")?.unwrap_or(Activation::Gelu),
        norm: NormConfig { eps: fields.number("layer_norm_eps")?.unwrap_or(1e-5), ..stack.norm },
        order: if parallel { NormOrder::Parallel } else { NormOrder::Pre },
        qkv_bias: bias,
        out_bias: bias,
        layers: vec![rotated; layers],
        ..stack
    };
    causal(fields, stack, false)
}

/// A decoder with its head and its special tokens.
fn causal(
    fields: &mut Fields,
    decoder: StackConfig,
    tied: bool,
) -> Result<TransformerConfig, Error> {
    let scored = scores(fields, Scores::Tokens, &[Scores::Nothing, Scores::Tokens])?;
    let tied = fields.bool("tie_word_embeddings")?.unwrap_or(tied);
    let head = HeadConfig { tied, ..HeadConfig::default() };
    let config = model((scored == Scores::Tokens).then_some(head));
    with_ids(fields, TransformerConfig { decoder: Some(decoder), pooling: Pooling::Last, ..config })
}
