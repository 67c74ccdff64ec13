//! Encoders with a decoder.

use super::super::fields::{Fields, missing};
use super::super::{
    Activation, AddedPositions, HeadConfig, LayerConfig, NormConfig, NormOrder, PairLayout,
    RelativeConfig, StackConfig, TransformerConfig,
};
use super::{MAX_HEAD_DIM, Scores, biased, head_dim, layer_count, model, root, scores, with_ids};
use crate::error::Error;

/// T5 and mT5; `proj` is the feed-forward net of the family.
pub(super) fn t5(fields: &mut Fields, proj: &str) -> Result<TransformerConfig, Error> {
    let (d_model, heads) = (fields.size("d_model")?, fields.size("num_heads")?);
    let head_dim = head_dim(Some(fields.size("d_kv")?), d_model, heads)?;
    let layers = layer_count(fields, "num_layers")?;
    let decoder_layers = match fields.map.get("num_decoder_layers") {
        Some(n) if !n.is_null() => layer_count(fields, "num_decoder_layers")?,
        _ => layers,
    };
    let (activation, gated) = feed_forward(fields, proj)?;
    let relative = RelativeConfig {
        buckets: fields.optional_size("relative_attention_num_buckets")?.unwrap_or(32),
        max_distance: fields.optional_size("relative_attention_max_distance")?.unwrap_or(128),
    };
    let (buckets, distance) = (relative.buckets, relative.max_distance);
    if !(4..=MAX_HEAD_DIM).contains(&buckets) || distance <= buckets / 2 {
        let why = format!("{buckets} buckets up to a distance of {distance}");
        return Err(Error::format("relative_attention_num_buckets", why));
    }
    fields.only("is_decoder", &[false.into()])?;
    fields.only("is_encoder_decoder", &[true.into()])?;
    // A size that positions by distance do not have.
    fields.map.remove("n_positions");
    scores(fields, Scores::Tokens, &[Scores::Nothing, Scores::Tokens])?;
    let encoder = StackConfig {
        d_ff: fields.size("d_ff")?,
        activation,
        gated,
        norm: NormConfig {
            rms: true,
            bias: false,
            eps: fields.number("layer_norm_epsilon")?.unwrap_or(1e-6),
            plus_one: false,
        },
        qkv_bias: false,
        out_bias: false,
        feed_forward_bias: false,
        scale: Some(1.0),
        relative: Some(relative),
        layers: vec![LayerConfig::default(); layers],
        ..biased(fields.size("vocab_size")?, d_model, heads, head_dim)
    };
    // Version 1.0 shares the embedding with the head and scales its input; 1.1 does neither. Transformers 5 has a field for the scale.
    let tied = fields.bool("tie_word_embeddings")?.unwrap_or(true);
    let scaled = fields.bool("scale_decoder_outputs")?.unwrap_or(tied);
    let scale = scaled.then(|| root(d_model).recip());
    let config = TransformerConfig { eos: vec![1], pad: Some(0), ..model(None) };
    let start = fields.id("decoder_start_token_id")?;
    let config = with_ids(fields, config)?;
    Ok(TransformerConfig {
        bos: start.or(config.pad),
        decoder: Some(StackConfig {
            layers: vec![LayerConfig::default(); decoder_layers],
            ..encoder.clone()
        }),
        encoder: Some(encoder),
        head: Some(HeadConfig { tied, scale, ..HeadConfig::default() }),
        shared_embedding: true,
        ..config
    })
}

/// `relu`, or `gated-gelu`, which is meant with a tanh.
fn feed_forward(fields: &mut Fields, usual: &str) -> Result<(Activation, bool), Error> {
    let name = fields.text("feed_forward_proj")?.unwrap_or_else(|| usual.into());
    // Both follow from it.
    for derived in ["dense_act_fn", "is_gated_act"] {
        fields.map.remove(derived);
    }
    let (activation, gated) = match name.strip_prefix("gated-") {
        Some("gelu") => ("gelu_new", true),
        Some(other) => (other, true),
        None => (name.as_str(), false),
    };
    fields.map.insert("feed_forward_proj".into(), activation.into());
    let activation = fields.activation("feed_forward_proj")?;
    Ok((activation.ok_or_else(|| missing("feed_forward_proj"))?, gated))
}

/// How a family differs from BART.
#[derive(Clone, Copy)]
pub(super) struct Family {
    positions: Positions,
    order: NormOrder,
    /// Norms after the last block of both stacks.
    final_norm: bool,
    embedding_norm: bool,
    /// Whether scores have a bias.
    bias: bool,
    activation: Activation,
    scaled: bool,
    /// `bos`, `pad` and `eos` if nothing is said.
    ids: [Option<u32>; 3],
}

#[derive(Clone, Copy)]
enum Positions {
    /// A table with two rows more at its beginning.
    Table,
    Sines,
    /// Counted from `pad + 1`.
    SinesFromPad,
}

pub(super) const BART: Family = Family {
    positions: Positions::Table,
    order: NormOrder::Post,
    final_norm: false,
    embedding_norm: true,
    bias: true,
    activation: Activation::Gelu,
    scaled: false,
    ids: [Some(0), Some(1), Some(2)],
};
pub(super) const MBART: Family = Family { order: NormOrder::Pre, final_norm: true, ..BART };
pub(super) const MARIAN: Family = Family {
    positions: Positions::Sines,
    embedding_norm: false,
    ids: [None, None, Some(0)],
    ..BART
};
pub(super) const M2M_100: Family = Family {
    positions: Positions::SinesFromPad,
    order: NormOrder::Pre,
    final_norm: true,
    embedding_norm: false,
    bias: false,
    activation: Activation::Relu,
    scaled: true,
    ..BART
};

pub(super) fn bart(
    fields: &mut Fields,
    family: &Family,
    notes: &mut Vec<String>,
) -> Result<TransformerConfig, Error> {
    let d_model = fields.size("d_model")?;
    scores(fields, Scores::Tokens, &[Scores::Nothing, Scores::Tokens])?;
    said_otherwise(fields, family)?;
    let vocab = fields.size("vocab_size")?;
    let of_target = fields.optional_size("decoder_vocab_size")?.unwrap_or(vocab);
    let shared = fields.bool("share_encoder_decoder_embeddings")?.unwrap_or(true);
    if shared && of_target != vocab {
        let why = format!("{of_target}, vocab_size is {vocab}; a shared table has one size");
        return Err(Error::format("decoder_vocab_size", why));
    }
    let start = fields.id("decoder_start_token_id")?;
    let [bos, pad, eos] = family.ids;
    let eos = eos.into_iter().collect();
    let config = with_ids(fields, TransformerConfig { bos, pad, eos, ..model(None) })?;
    let pad = config.pad.and_then(|pad| usize::try_from(pad).ok()).unwrap_or(0);
    let activation = fields.activation("activation_function")?.unwrap_or(family.activation);
    let scaled = fields.bool("scale_embedding")?.unwrap_or(family.scaled);
    let context = fields.size("max_position_embeddings")?;
    let positions = match family.positions {
        Positions::Table => {
            AddedPositions::Learned { entries: context.saturating_add(2), offset: 2 }
        }
        Positions::Sines => {
            AddedPositions::Sinusoidal { pairs: PairLayout::HalfSplit, first: 0, inclusive: false }
        }
        Positions::SinesFromPad => AddedPositions::Sinusoidal {
            pairs: PairLayout::HalfSplit,
            first: pad.saturating_add(1),
            inclusive: true,
        },
    };
    let mut stack = |side: &str, vocab: usize| {
        let heads = fields.size(&format!("{side}_attention_heads"))?;
        let head_dim = head_dim(None, d_model, heads)?;
        let layers = layer_count(fields, &format!("{side}_layers"))?;
        Ok::<_, Error>(StackConfig {
            embedding_scale: scaled.then(|| root(d_model)),
            embedding_norm: family.embedding_norm,
            positions,
            context: Some(context),
            d_ff: fields.size(&format!("{side}_ffn_dim"))?,
            activation,
            order: family.order,
            final_norm: family.final_norm,
            layers: vec![LayerConfig::default(); layers],
            ..biased(vocab, d_model, heads, head_dim)
        })
    };
    let (encoder, decoder) = (stack("encoder", vocab)?, stack("decoder", of_target)?);
    let tied = fields.bool("tie_word_embeddings")?.unwrap_or(true);
    let forced_bos = fields.id("forced_bos_token_id")?;
    if fields.bool("force_bos_token_to_be_generated")? == Some(true) && forced_bos.is_none() {
        notes.push("force_bos_token_to_be_generated = true: the token after bos is free".into());
    }
    Ok(TransformerConfig {
        bos: start.or(config.eos.first().copied()),
        encoder: Some(encoder),
        decoder: Some(decoder),
        head: Some(HeadConfig { tied, bias: family.bias, ..HeadConfig::default() }),
        forced_bos,
        shared_embedding: shared,
        ..config
    })
}

/// What old configurations say of a family; another value is of no published model.
fn said_otherwise(fields: &mut Fields, family: &Family) -> Result<(), Error> {
    let sines = !matches!(family.positions, Positions::Table);
    fields.only("normalize_before", &[(family.order == NormOrder::Pre).into()])?;
    fields.only("add_final_layer_norm", &[family.final_norm.into()])?;
    fields.only("normalize_embedding", &[family.embedding_norm.into()])?;
    fields.only("static_position_embeddings", &[sines.into()])?;
    fields.only("add_bias_logits", &[false.into()])?;
    fields.only("is_encoder_decoder", &[true.into()])?;
    fields.only("is_decoder", &[false.into()])?;
    // Rows before the first position, which are 2 whatever is said; the number of layers is said for each stack.
    for name in ["extra_pos_embeddings", "num_hidden_layers"] {
        fields.map.remove(name);
    }
    Ok(())
}
