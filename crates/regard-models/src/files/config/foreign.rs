//! Configurations that others have written: Hugging Face's, CTranslate2's as we keep it, and e2k's.

use super::fields::{Fields, missing};
use super::{Activation, Architecture, Config, Heads, PairLayout, Positions};
use crate::error::Error;
use crate::files::weights::Weights;
use serde_json::{Map, Value};

/// Reads a configuration by its `model_type`.
pub(super) fn read(map: Map<String, Value>) -> Result<Config, Error> {
    let mut fields = Fields::new(map);
    let kind = fields.text("model_type")?.ok_or_else(|| missing("model_type"))?;
    let config = match kind.as_str() {
        "llama" => llama(&mut fields)?,
        "gpt2" => gpt2(&mut fields)?,
        "bert" => bert(&mut fields)?,
        "transformer_encoder_decoder" => transformer(&mut fields)?,
        other => {
            let known = "llama, gpt2, bert and transformer_encoder_decoder are known";
            return Err(Error::unsupported("model_type", &other, known));
        }
    };
    fields.finish()?;
    Ok(config)
}

fn llama(fields: &mut Fields) -> Result<Config, Error> {
    let d_model = fields.size("hidden_size")?;
    let q = fields.size("num_attention_heads")?;
    let kv = fields.optional_size("num_key_value_heads")?.unwrap_or(q);
    let head_dim = fields.optional_size("head_dim")?;
    let mut theta = fields.number("rope_theta")?;
    // The newer way to say it.
    if let Some(Value::Object(rope)) = fields.map.remove("rope_parameters") {
        let mut rope = Fields::new(rope);
        rope.only("rope_type", &["default".into()])?;
        theta = rope.number("rope_theta")?.or(theta);
        rope.finish()?;
    }
    fields.only("rope_scaling", &[])?;
    fields.only("sliding_window", &[])?;
    fields.only("partial_rotary_factor", &[1.0.into()])?;
    let neighbours = fields.bool("rope_interleaved")?.unwrap_or(false);
    let pairs = if neighbours { PairLayout::Interleaved } else { PairLayout::HalfSplit };
    Ok(Config {
        architecture: Architecture::Llama,
        d_model,
        n_layers: fields.size("num_hidden_layers")?,
        decoder_layers: None,
        heads: Heads { q, kv },
        head_dim: head_dim.map_or_else(|| Config::head_dim(d_model, q), Ok)?,
        d_ff: Some(fields.size("intermediate_size")?),
        vocab: fields.size("vocab_size")?,
        target_vocab: None,
        token_types: None,
        context: fields.optional_size("max_position_embeddings")?,
        norm_eps: Some(fields.number("rms_norm_eps")?.unwrap_or(1e-6)),
        pre_norm: true,
        positions: Positions::Rotary { theta: theta.unwrap_or(1e4), pairs },
        activation: Some(fields.activation("hidden_act")?.unwrap_or(Activation::Silu)),
        attention_bias: fields.bool("attention_bias")?.unwrap_or(false),
        feed_forward_bias: fields.bool("mlp_bias")?.unwrap_or(false),
        tie_embeddings: fields.bool("tie_word_embeddings")?.unwrap_or(false),
        embedding_scale: None,
        bos: fields.id("bos_token_id")?,
        eos: fields.ids("eos_token_id")?,
        pad: fields.id("pad_token_id")?,
        ..Config::of(Architecture::Llama)
    })
}

fn gpt2(fields: &mut Fields) -> Result<Config, Error> {
    let d_model = fields.size("n_embd")?;
    let heads = fields.size("n_head")?;
    let context = fields.optional_size("n_positions")?;
    let old = fields.optional_size("n_ctx")?;
    let context = context.or(old).ok_or_else(|| missing("n_positions"))?;
    fields.only("scale_attn_weights", &[true.into()])?;
    fields.only("scale_attn_by_inverse_layer_idx", &[false.into()])?;
    fields.only("add_cross_attention", &[false.into()])?;
    // The same numbers, in another order.
    fields.map.remove("reorder_and_upcast_attn");
    Ok(Config {
        architecture: Architecture::Gpt2,
        d_model,
        n_layers: fields.size("n_layer")?,
        decoder_layers: None,
        heads: Heads { q: heads, kv: heads },
        head_dim: Config::head_dim(d_model, heads)?,
        d_ff: Some(fields.optional_size("n_inner")?.unwrap_or(d_model.saturating_mul(4))),
        vocab: fields.size("vocab_size")?,
        target_vocab: None,
        token_types: None,
        context: Some(context),
        norm_eps: Some(fields.number("layer_norm_epsilon")?.unwrap_or(1e-5)),
        pre_norm: true,
        positions: Positions::Learned,
        activation: Some(fields.activation("activation_function")?.unwrap_or(Activation::GeluTanh)),
        attention_bias: true,
        feed_forward_bias: true,
        tie_embeddings: fields.bool("tie_word_embeddings")?.unwrap_or(true),
        embedding_scale: None,
        bos: fields.id("bos_token_id")?,
        eos: fields.ids("eos_token_id")?,
        pad: fields.id("pad_token_id")?,
        ..Config::of(Architecture::Gpt2)
    })
}

fn bert(fields: &mut Fields) -> Result<Config, Error> {
    let d_model = fields.size("hidden_size")?;
    let heads = fields.size("num_attention_heads")?;
    fields.only("position_embedding_type", &["absolute".into()])?;
    fields.only("is_decoder", &[false.into()])?;
    fields.only("add_cross_attention", &[false.into()])?;
    Ok(Config {
        architecture: Architecture::Bert,
        d_model,
        n_layers: fields.size("num_hidden_layers")?,
        decoder_layers: None,
        heads: Heads { q: heads, kv: heads },
        head_dim: Config::head_dim(d_model, heads)?,
        d_ff: Some(fields.size("intermediate_size")?),
        vocab: fields.size("vocab_size")?,
        target_vocab: None,
        token_types: Some(fields.optional_size("type_vocab_size")?.unwrap_or(2)),
        context: Some(fields.size("max_position_embeddings")?),
        norm_eps: Some(fields.number("layer_norm_eps")?.unwrap_or(1e-12)),
        pre_norm: false,
        positions: Positions::Learned,
        activation: Some(fields.activation("hidden_act")?.unwrap_or(Activation::Gelu)),
        attention_bias: true,
        feed_forward_bias: true,
        tie_embeddings: fields.bool("tie_word_embeddings")?.unwrap_or(true),
        embedding_scale: None,
        bos: fields.id("bos_token_id")?,
        eos: fields.ids("eos_token_id")?,
        pad: fields.id("pad_token_id")?,
        ..Config::of(Architecture::Bert)
    })
}

/// What we have written beside a model of CTranslate2, in sentences: each is known, or it is an error.
fn transformer(fields: &mut Fields) -> Result<Config, Error> {
    let d_model = fields.size("d_model")?;
    let heads = fields.size("num_heads")?;
    let source = fields.texts("source_vocab")?;
    let target = fields.texts("target_vocab")?;
    let mut mark = |field: &str| {
        let mark = fields.text(field)?.ok_or_else(|| missing(field))?;
        let id = target.iter().position(|token| *token == mark);
        let why = || Error::format(field, format!("`{mark}` is not a token of the target"));
        id.and_then(|id| u32::try_from(id).ok()).ok_or_else(why)
    };
    let (bos, eos) = (mark("bos")?, mark("eos")?);
    let pad = target.iter().position(|token| token == "<blank>");
    fields.only("norm", &["pre-norm, final norm on both stacks".into()])?;
    fields.only("embedding_scale", &["sqrt(d_model)".into()])?;
    let positions = "sinusoidal, [sin|cos] halves, positions start at 1, \
                     log-increment ln(10000)/(d/2-1) (tensor2tensor/OpenNMT-tf)";
    fields.only("positions", &[positions.into()])?;
    let fused = "self_attention.linear_0 = [q;k;v] (96x32), cross attention: linear_0 = q, \
                 linear_1=[k;v], linear_2=out";
    fields.only("fused", &[fused.into()])?;
    Ok(Config {
        architecture: Architecture::Transformer,
        d_model,
        n_layers: fields.size("encoder_layers")?,
        decoder_layers: Some(fields.size("decoder_layers")?),
        heads: Heads { q: heads, kv: heads },
        head_dim: Config::head_dim(d_model, heads)?,
        d_ff: Some(fields.size("d_ff")?),
        vocab: source.len(),
        target_vocab: Some(target.len()),
        token_types: None,
        context: None,
        norm_eps: Some(fields.number("layer_norm_eps")?.unwrap_or(1e-5)),
        pre_norm: true,
        positions: Positions::Sinusoidal {
            pairs: PairLayout::HalfSplit,
            first: 1,
            inclusive: true,
        },
        activation: fields.activation("activation")?,
        attention_bias: true,
        feed_forward_bias: true,
        tie_embeddings: false,
        embedding_scale: u32::try_from(d_model).ok().map(|d| f64::from(d).sqrt()),
        bos: Some(bos),
        eos: vec![eos],
        pad: pad.and_then(|id| u32::try_from(id).ok()),
        ..Config::of(Architecture::Transformer)
    })
}

/// The heads of e2k stand in its program, not in its files.
const E2K_HEADS: usize = 4;

pub(super) fn e2k(weights: &Weights) -> Result<Config, Error> {
    let matrix = |name: &str| match weights.shape(name) {
        Some([rows, cols]) => Ok([*rows, *cols]),
        _ => Err(Error::format(format!("tensor `{name}`"), "e2k has a matrix of this name")),
    };
    let id = |name: &str| {
        let text = weights.metadata().get(name).ok_or_else(|| missing(name))?;
        text.parse::<u32>().map_err(|e| Error::format(name, format!("{text}: {e}")))
    };
    let [vocab, d_model] = matrix("e_emb.weight")?;
    let [target_vocab, _] = matrix("k_emb.weight")?;
    Ok(Config {
        architecture: Architecture::E2k,
        d_model,
        n_layers: 1,
        decoder_layers: None,
        heads: Heads { q: E2K_HEADS, kv: E2K_HEADS },
        head_dim: Config::head_dim(d_model, E2K_HEADS)?,
        d_ff: None,
        vocab,
        target_vocab: Some(target_vocab),
        token_types: None,
        context: None,
        norm_eps: None,
        pre_norm: false,
        positions: Positions::None,
        activation: None,
        attention_bias: true,
        feed_forward_bias: false,
        tie_embeddings: false,
        embedding_scale: None,
        bos: Some(id("sos_idx")?),
        eos: vec![id("eos_idx")?],
        pad: None,
        ..Config::of(Architecture::E2k)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn llama_with(more: &Value) -> Result<Config, Error> {
        let mut config = json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 5,
            "num_attention_heads": 8, "vocab_size": 512, "hidden_act": "silu", "torch_dtype": "float32"
        });
        for (field, value) in more.as_object().unwrap() {
            config[field] = value.clone();
        }
        Config::from_json(&config.to_string())
    }

    #[test]
    fn what_changes_the_numbers_is_followed_or_refused() {
        let plain = llama_with(&json!({})).unwrap();
        assert_eq!(plain.heads, Heads { q: 8, kv: 8 });
        assert_eq!(plain.positions, Positions::Rotary { theta: 1e4, pairs: PairLayout::HalfSplit });
        assert!(!plain.tie_embeddings && plain.eos.is_empty());

        let more = json!({
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "head_dim": 16,
            "eos_token_id": [2, 3], "pad_token_id": -1, "rope_scaling": null, "sliding_window": null
        });
        let more = llama_with(&more).unwrap();
        assert_eq!(more.positions, Positions::Rotary { theta: 5e5, pairs: PairLayout::HalfSplit });
        assert_eq!((more.head_dim, more.eos, more.pad), (16, vec![2, 3], None));

        for (field, value) in [
            ("rope_scaling", json!({"type": "linear", "factor": 2.0})),
            ("rope_parameters", json!({"rope_type": "llama3"})),
            ("sliding_window", json!(4096)),
            ("partial_rotary_factor", json!(0.5)),
            ("hidden_act", json!("mish")),
            ("attention_multiplier", json!(0.1)),
            ("quantization_config", json!({"bits": 4})),
            ("model_type", json!("mamba")),
        ] {
            let error = llama_with(&json!({ (field): value })).unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{field}: {error}");
        }
        let error = llama_with(&json!({"rope_scaling": {"factor": 2.0}})).unwrap_err().to_string();
        assert!(error.contains("rope_scaling") && error.contains("2.0"), "{error}");
        for (field, value) in [
            ("hidden_size", json!("64")),
            ("hidden_size", json!(63)),
            ("hidden_size", json!(null)),
            ("vocab_size", json!(u64::MAX)),
            ("num_attention_heads", json!(0)),
            ("bos_token_id", json!(512)),
        ] {
            assert!(llama_with(&json!({ (field): value })).is_err(), "{field}");
        }
    }

    #[test]
    fn gpt2_is_read_as_it_was_published() {
        // As openai-community/gpt2 has it.
        let config = json!({
            "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
            "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
            "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
            "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1,
            "summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true,
            "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
            "vocab_size": 50257
        });
        let read = Config::from_json(&config.to_string()).unwrap();
        assert_eq!((read.d_model, read.d_ff, read.head_dim), (768, Some(3072), 64));
        assert_eq!((read.context, read.tie_embeddings, read.pre_norm), (Some(1024), true, true));
        assert_eq!(read.activation, Some(Activation::GeluTanh));
        assert_eq!((read.bos, read.eos), (Some(50256), vec![50256]));
        let mut other = config;
        other["scale_attn_weights"] = json!(false);
        assert!(Config::from_json(&other.to_string()).is_err());
    }

    #[test]
    fn nonsense_is_an_error() {
        for json in ["", "[]", "{}", "null", r#"{"model_type": 1}"#, r#"{"format": "other"}"#] {
            assert!(Config::from_json(json).is_err(), "{json}");
        }
    }
}
