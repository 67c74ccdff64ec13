//! What a GGUF file says of its model.

use super::{Activation, Architecture, Config, Heads, PairLayout, Positions};
use crate::error::Error;
use crate::files::gguf::{Gguf, Metadata};

/// What is read of `llama.`; anything else there is an error.
const READ: &[&str] = &[
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
];

pub(super) fn read(file: &Gguf) -> Result<Config, Error> {
    let metadata = &file.metadata;
    let architecture = metadata.text("general.architecture")?;
    if architecture != Some("llama") {
        let value = architecture.unwrap_or("nothing");
        return Err(Error::unsupported("general.architecture", &value, "`llama` is known"));
    }
    for (name, value) in &metadata.values {
        if let Some(field) = name.strip_prefix("llama.")
            && !READ.contains(&field)
        {
            return Err(Error::unsupported(name, value, "nothing here follows it"));
        }
    }
    let size = |field: &str| size(metadata, &format!("llama.{field}"));
    let needed = |field: &str| {
        let missing = || Error::format(format!("llama.{field}"), "missing in the file");
        size(field)?.ok_or_else(missing)
    };
    let d_model = needed("embedding_length")?;
    let q = needed("attention.head_count")?;
    let kv = size("attention.head_count_kv")?.unwrap_or(q);
    let key = size("attention.key_length")?;
    let head_dim = key.map_or_else(|| Config::head_dim(d_model, q), Ok)?;
    for field in ["rope.dimension_count", "attention.value_length"] {
        if let Some(other) = size(field)?.filter(|other| *other != head_dim) {
            let known = format!("{head_dim}, all features of a head, is known");
            return Err(Error::unsupported(format!("llama.{field}"), &other, known));
        }
    }
    let vocab = match size("vocab_size")? {
        Some(vocab) => Some(vocab),
        None => metadata.texts("tokenizer.ggml.tokens")?.map(|tokens| tokens.len()),
    };
    let theta = metadata.number("llama.rope.freq_base")?.unwrap_or(1e4);
    let eps = "llama.attention.layer_norm_rms_epsilon";
    let eps = metadata.number(eps)?.ok_or_else(|| Error::format(eps, "missing in the file"))?;
    let id = |name: &str| {
        let name = format!("tokenizer.ggml.{name}_token_id");
        let id = metadata.whole(&name)?;
        let id = id.map(|id| u32::try_from(id).map_err(|e| Error::format(name, e.to_string())));
        id.transpose()
    };
    let has = |ending: &str| file.weights.names().any(|name| name.ends_with(ending));
    Ok(Config {
        architecture: Architecture::Llama,
        d_model,
        n_layers: needed("block_count")?,
        decoder_layers: None,
        heads: Heads { q, kv },
        head_dim,
        d_ff: Some(needed("feed_forward_length")?),
        vocab: vocab.ok_or_else(|| Error::format("llama.vocab_size", "missing in the file"))?,
        target_vocab: None,
        token_types: None,
        context: size("context_length")?,
        norm_eps: Some(round(eps)),
        pre_norm: true,
        // llama.cpp sorts the rows of queries and keys for this when it writes a Llama.
        positions: Positions::Rotary { theta, pairs: PairLayout::Interleaved },
        activation: Some(Activation::Silu),
        attention_bias: has(".attn_q.bias"),
        feed_forward_bias: has(".ffn_up.bias"),
        tie_embeddings: file.weights.shape("output.weight").is_none(),
        embedding_scale: None,
        bos: id("bos")?,
        eos: id("eos")?.into_iter().collect(),
        pad: id("padding")?,
        ..Config::of(Architecture::Llama)
    })
}

fn size(metadata: &Metadata, name: &str) -> Result<Option<usize>, Error> {
    let size = metadata.whole(name)?;
    size.map(|n| usize::try_from(n).map_err(|e| Error::format(name, e.to_string()))).transpose()
}

/// The shortest number that is the same `f32`: the file has 1e-5 as 0.00000999999974.
fn round(x: f64) -> f64 {
    #[expect(clippy::cast_possible_truncation, reason = "it was written as f32")]
    let narrow = x as f32;
    narrow.to_string().parse().unwrap_or(x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::gguf::Value;
    use crate::files::weights::Weights;

    fn file(more: &[(&str, Value)]) -> Gguf {
        let mut metadata = Metadata::default();
        let sizes = [
            ("embedding_length", 64),
            ("attention.head_count", 8),
            ("block_count", 5),
            ("feed_forward_length", 172),
            ("vocab_size", 512),
        ];
        let sizes = sizes.map(|(name, size)| (format!("llama.{name}"), Value::Unsigned(size)));
        metadata.values.extend(sizes);
        let eps = Value::Float(f64::from(1e-5f32));
        metadata.values.insert("llama.attention.layer_norm_rms_epsilon".into(), eps);
        metadata.values.insert("general.architecture".into(), Value::Text("llama".into()));
        metadata.values.extend(more.iter().map(|(name, value)| ((*name).into(), value.clone())));
        Gguf { metadata, weights: Weights::new([]).unwrap() }
    }

    #[test]
    fn numbers_are_as_they_were_meant() {
        let config = Config::from_gguf(&file(&[])).unwrap();
        assert_eq!(
            (config.norm_eps, config.head_dim, config.tie_embeddings),
            (Some(1e-5), 8, true)
        );
    }

    #[test]
    fn what_nothing_follows_is_refused() {
        for (name, value) in [
            ("llama.rope.scaling.type", Value::Text("yarn".into())),
            ("llama.attention.sliding_window", Value::Unsigned(4096)),
            ("llama.expert_count", Value::Unsigned(8)),
            ("llama.rope.dimension_count", Value::Unsigned(4)),
            ("general.architecture", Value::Text("qwen2".into())),
        ] {
            let error = Config::from_gguf(&file(&[(name, value)])).unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{name}: {error}");
        }
        let kv = ("llama.attention.head_count_kv", Value::List(Vec::new()));
        assert!(Config::from_gguf(&file(&[kv])).is_err());
    }
}
