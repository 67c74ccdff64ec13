//! Encoders of images.

use super::super::fields::Fields;
use super::super::images::sides;
use super::super::{
    Activation, AddedPositions, HeadConfig, LayerConfig, NormConfig, PatchConfig, Pooling,
    StackConfig, TransformerConfig,
};
use super::{biased, head_dim, labels, layer_count, model};
use crate::error::Error;
use serde_json::json;

/// Pixels of a side of an image, and patches of an image, that are believed: what is made of an image takes memory for each of them.
const MAX_SIDE: usize = 2048;
const MAX_PATCHES: usize = 1 << 14;

/// ViT: an encoder that norms first, of which the class token is classified.
pub(super) fn vit(fields: &mut Fields) -> Result<TransformerConfig, Error> {
    let (d_model, heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
    let head_dim = head_dim(None, d_model, heads)?;
    fields.only("architectures", &[json!(["ViTForImageClassification"])])?;
    fields.only("num_channels", &[PatchConfig::CHANNELS.into()])?;
    // Of the pooler and of masked patches, which a classifier does not have.
    for name in ["encoder_stride", "pooler_act", "pooler_output_size"] {
        fields.map.remove(name);
    }
    let image = sides(fields, "image_size")?.unwrap_or([224; 2]);
    let patch = sides(fields, "patch_size")?.unwrap_or([16; 2]);
    let (patches, rows) = patches(image, patch)?;
    let layers = layer_count(fields, "num_hidden_layers")?;
    let stack = biased(1, d_model, heads, head_dim);
    let stack = StackConfig {
        patches: Some(patches),
        positions: AddedPositions::Learned { entries: rows, offset: 0 },
        context: Some(rows),
        d_ff: fields.size("intermediate_size")?,
        activation: fields.activation("hidden_act")?.unwrap_or(Activation::Gelu),
        norm: NormConfig { eps: fields.number("layer_norm_eps")?.unwrap_or(1e-12), ..stack.norm },
        qkv_bias: fields.bool("qkv_bias")?.unwrap_or(true),
        layers: vec![LayerConfig::default(); layers],
        ..stack
    };
    Ok(TransformerConfig {
        encoder: Some(stack),
        pooling: Pooling::First,
        labels: labels(fields)?,
        ..model(Some(HeadConfig { bias: true, ..HeadConfig::default() }))
    })
}

/// Patches that cover an image, and how many rows they make with the class token.
fn patches(image: [usize; 2], patch: [usize; 2]) -> Result<(PatchConfig, usize), Error> {
    for (image, patch) in image.into_iter().zip(patch) {
        if !(1..=MAX_SIDE).contains(&image) {
            let why = format!("{image}; it must be from 1 to {MAX_SIDE}");
            return Err(Error::format("image_size", why));
        }
        if patch == 0 || !image.is_multiple_of(patch) {
            let why = format!("{patch}; it must divide image_size, {image}");
            return Err(Error::format("patch_size", why));
        }
    }
    let patches = PatchConfig { image, patch };
    let [down, across] = patches.grid();
    let count = down * across;
    if count > MAX_PATCHES {
        let why = format!("{patch:?} makes {count} patches of {image:?}; at most {MAX_PATCHES}");
        return Err(Error::format("patch_size", format!("{why} are read")));
    }
    Ok((patches, count + 1))
}
