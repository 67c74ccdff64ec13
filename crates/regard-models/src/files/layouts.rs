//! Names of tensors in the files of each family of Hugging Face's Transformers, as tables that are put together.

use super::config::TransformerConfig;
use super::names::{Layout, NameMap, Names, Rule, rule};

/// What Llama's kin adds to it.
const DECODER: &[Rule] = &[
    rule("layers.{}.self_attn.q_norm", &["blocks.{}.attention.q_norm"]),
    rule("layers.{}.self_attn.k_norm", &["blocks.{}.attention.k_norm"]),
    Rule {
        theirs: "layers.{}.self_attn.qkv_proj",
        ours: &["blocks.{}.attention.q", "blocks.{}.attention.k", "blocks.{}.attention.v"],
        layout: Layout::Qkv,
    },
    rule(
        "layers.{}.mlp.gate_up_proj",
        &["blocks.{}.feed_forward.gate", "blocks.{}.feed_forward.up"],
    ),
    // Follows from the base of the angles.
    rule("rotary_emb.inv_freq", &[]),
];

/// Gemma 2 and 3 and OLMo 2 norm what a layer gives; Llama calls another norm so.
const OUTPUT_NORMS: &[Rule] = &[
    rule("layers.{}.post_attention_layernorm", &["blocks.{}.attention_post_norm"]),
    rule("layers.{}.pre_feedforward_layernorm", &["blocks.{}.feed_forward_norm"]),
    rule("layers.{}.post_feedforward_layernorm", &["blocks.{}.feed_forward_post_norm"]),
];

const GPT_NEOX: &[Rule] = &[
    rule("embed_in", &["embedding"]),
    rule("layers.{}.input_layernorm", &["blocks.{}.attention_norm"]),
    Rule {
        theirs: "layers.{}.attention.query_key_value",
        ours: &["blocks.{}.attention.q", "blocks.{}.attention.k", "blocks.{}.attention.v"],
        layout: Layout::QkvOfHeads,
    },
    rule("layers.{}.attention.dense", &["blocks.{}.attention.out"]),
    // The causal mask and the angles, kept as tensors by old versions.
    rule("layers.{}.attention.bias", &[]),
    rule("layers.{}.attention.masked_bias", &[]),
    rule("layers.{}.attention.rotary_emb.inv_freq", &[]),
    rule("rotary_emb.inv_freq", &[]),
    rule("layers.{}.post_attention_layernorm", &["blocks.{}.feed_forward_norm"]),
    rule("layers.{}.mlp.dense_h_to_4h", &["blocks.{}.feed_forward.up"]),
    rule("layers.{}.mlp.dense_4h_to_h", &["blocks.{}.feed_forward.down"]),
    rule("final_layer_norm", &["norm"]),
    rule("embed_out", &["head"]),
];

const BERT_NORM: &[Rule] = &[
    rule("embeddings.LayerNorm", &["embedding_norm"]),
    rule("embeddings.LayerNorm.gamma", &["embedding_norm.weight"]),
    rule("embeddings.LayerNorm.beta", &["embedding_norm.bias"]),
    // 0, 0, 0, ..
    rule("embeddings.token_type_ids", &[]),
];
const BERT_TOKENS: &[Rule] = &[
    rule("cls.predictions.transform.dense", &["head_dense"]),
    rule("cls.predictions.transform.LayerNorm", &["head_norm"]),
    rule("cls.predictions.transform.LayerNorm.gamma", &["head_norm.weight"]),
    rule("cls.predictions.transform.LayerNorm.beta", &["head_norm.bias"]),
    rule("cls.predictions.decoder", &["head"]),
    rule("cls.predictions.bias", &["head.bias"]),
];
const BERT_CLASSES: &[Rule] =
    &[rule("pooler.dense", &["head_dense"]), rule("classifier", &["head"])];
const ROBERTA_TOKENS: &[Rule] = &[
    rule("lm_head.dense", &["head_dense"]),
    rule("lm_head.layer_norm", &["head_norm"]),
    rule("lm_head.decoder", &["head"]),
    rule("lm_head.bias", &["head.bias"]),
];
const ROBERTA_CLASSES: &[Rule] =
    &[rule("classifier.dense", &["head_dense"]), rule("classifier.out_proj", &["head"])];

const DISTILBERT: &[Rule] = &[
    rule("transformer.layer.{}.attention.q_lin", &["blocks.{}.attention.q"]),
    rule("transformer.layer.{}.attention.k_lin", &["blocks.{}.attention.k"]),
    rule("transformer.layer.{}.attention.v_lin", &["blocks.{}.attention.v"]),
    rule("transformer.layer.{}.attention.out_lin", &["blocks.{}.attention.out"]),
    rule("transformer.layer.{}.sa_layer_norm", &["blocks.{}.attention_norm"]),
    rule("transformer.layer.{}.ffn.lin1", &["blocks.{}.feed_forward.up"]),
    rule("transformer.layer.{}.ffn.lin2", &["blocks.{}.feed_forward.down"]),
    rule("transformer.layer.{}.output_layer_norm", &["blocks.{}.feed_forward_norm"]),
];
const DISTILBERT_TOKENS: &[Rule] = &[
    rule("vocab_transform", &["head_dense"]),
    rule("vocab_layer_norm", &["head_norm"]),
    rule("vocab_projector", &["head"]),
];
const DISTILBERT_CLASSES: &[Rule] =
    &[rule("pre_classifier", &["head_dense"]), rule("classifier", &["head"])];

const MODERNBERT: &[Rule] = &[
    rule("embeddings.tok_embeddings", &["embedding"]),
    rule("embeddings.norm", &["embedding_norm"]),
    rule("layers.{}.attn_norm", &["blocks.{}.attention_norm"]),
    rule(
        "layers.{}.attn.Wqkv",
        &["blocks.{}.attention.q", "blocks.{}.attention.k", "blocks.{}.attention.v"],
    ),
    rule("layers.{}.attn.Wo", &["blocks.{}.attention.out"]),
    rule("layers.{}.mlp_norm", &["blocks.{}.feed_forward_norm"]),
    rule("layers.{}.mlp.Wi", &["blocks.{}.feed_forward.gate", "blocks.{}.feed_forward.up"]),
    rule("layers.{}.mlp.Wo", &["blocks.{}.feed_forward.down"]),
    rule("final_norm", &["norm"]),
    rule("head.dense", &["head_dense"]),
    rule("head.norm", &["head_norm"]),
    rule("decoder", &["head"]),
    rule("classifier", &["head"]),
];

const VIT: &[Rule] = &[
    Rule { theirs: "embeddings.cls_token", ours: &["embedding.weight"], layout: Layout::OneRow },
    Rule {
        theirs: "embeddings.position_embeddings",
        ours: &["positions.weight"],
        layout: Layout::OneRow,
    },
    Rule {
        theirs: "embeddings.patch_embeddings.projection",
        ours: &["patches"],
        layout: Layout::Kernels,
    },
    rule("encoder.layer.{}.layernorm_before", &["blocks.{}.attention_norm"]),
    rule("encoder.layer.{}.attention.attention.query", &["blocks.{}.attention.q"]),
    rule("encoder.layer.{}.attention.attention.key", &["blocks.{}.attention.k"]),
    rule("encoder.layer.{}.attention.attention.value", &["blocks.{}.attention.v"]),
    rule("encoder.layer.{}.attention.output.dense", &["blocks.{}.attention.out"]),
    rule("encoder.layer.{}.layernorm_after", &["blocks.{}.feed_forward_norm"]),
    rule("encoder.layer.{}.intermediate.dense", &["blocks.{}.feed_forward.up"]),
    rule("encoder.layer.{}.output.dense", &["blocks.{}.feed_forward.down"]),
    rule("layernorm", &["norm"]),
    rule("classifier", &["head"]),
];

/// One table of embeddings, and two.
const SHARED: &[Rule] = &[
    rule("shared", &["source"]),
    rule("encoder.embed_tokens", &["source"]),
    rule("decoder.embed_tokens", &["source"]),
];
const OWN: &[Rule] =
    &[rule("encoder.embed_tokens", &["source"]), rule("decoder.embed_tokens", &["target"])];
const PAIR_HEAD: &[Rule] = &[
    rule("lm_head", &["head"]),
    Rule { theirs: "final_logits_bias", ours: &["head.bias"], layout: Layout::OneRow },
    rule("encoder.version", &[]),
    rule("decoder.version", &[]),
];

const T5: &[Rule] = &[
    rule("encoder.block.{}.layer.0.SelfAttention.q", &["encoder.{}.attention.q"]),
    rule("encoder.block.{}.layer.0.SelfAttention.k", &["encoder.{}.attention.k"]),
    rule("encoder.block.{}.layer.0.SelfAttention.v", &["encoder.{}.attention.v"]),
    rule("encoder.block.{}.layer.0.SelfAttention.o", &["encoder.{}.attention.out"]),
    rule("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", &["encoder_relative"]),
    rule("encoder.block.{}.layer.0.layer_norm", &["encoder.{}.attention_norm"]),
    rule("encoder.block.{}.layer.1.DenseReluDense.wi", &["encoder.{}.feed_forward.up"]),
    rule("encoder.block.{}.layer.1.DenseReluDense.wi_0", &["encoder.{}.feed_forward.gate"]),
    rule("encoder.block.{}.layer.1.DenseReluDense.wi_1", &["encoder.{}.feed_forward.up"]),
    rule("encoder.block.{}.layer.1.DenseReluDense.wo", &["encoder.{}.feed_forward.down"]),
    rule("encoder.block.{}.layer.1.layer_norm", &["encoder.{}.feed_forward_norm"]),
    rule("encoder.final_layer_norm", &["encoder_norm"]),
    rule("decoder.block.{}.layer.0.SelfAttention.q", &["decoder.{}.attention.q"]),
    rule("decoder.block.{}.layer.0.SelfAttention.k", &["decoder.{}.attention.k"]),
    rule("decoder.block.{}.layer.0.SelfAttention.v", &["decoder.{}.attention.v"]),
    rule("decoder.block.{}.layer.0.SelfAttention.o", &["decoder.{}.attention.out"]),
    rule("decoder.block.0.layer.0.SelfAttention.relative_attention_bias", &["decoder_relative"]),
    rule("decoder.block.{}.layer.0.layer_norm", &["decoder.{}.attention_norm"]),
    rule("decoder.block.{}.layer.1.EncDecAttention.q", &["decoder.{}.cross.q"]),
    rule("decoder.block.{}.layer.1.EncDecAttention.k", &["decoder.{}.cross.k"]),
    rule("decoder.block.{}.layer.1.EncDecAttention.v", &["decoder.{}.cross.v"]),
    rule("decoder.block.{}.layer.1.EncDecAttention.o", &["decoder.{}.cross.out"]),
    rule("decoder.block.{}.layer.1.layer_norm", &["decoder.{}.cross_norm"]),
    rule("decoder.block.{}.layer.2.DenseReluDense.wi", &["decoder.{}.feed_forward.up"]),
    rule("decoder.block.{}.layer.2.DenseReluDense.wi_0", &["decoder.{}.feed_forward.gate"]),
    rule("decoder.block.{}.layer.2.DenseReluDense.wi_1", &["decoder.{}.feed_forward.up"]),
    rule("decoder.block.{}.layer.2.DenseReluDense.wo", &["decoder.{}.feed_forward.down"]),
    rule("decoder.block.{}.layer.2.layer_norm", &["decoder.{}.feed_forward_norm"]),
    rule("decoder.final_layer_norm", &["decoder_norm"]),
    // Published with the first version, and never read.
    rule("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias", &[]),
];

const BART: &[Rule] = &[
    rule("encoder.layernorm_embedding", &["encoder_embedding_norm"]),
    rule("encoder.layer_norm", &["encoder_norm"]),
    rule("encoder.layers.{}.self_attn.q_proj", &["encoder.{}.attention.q"]),
    rule("encoder.layers.{}.self_attn.k_proj", &["encoder.{}.attention.k"]),
    rule("encoder.layers.{}.self_attn.v_proj", &["encoder.{}.attention.v"]),
    rule("encoder.layers.{}.self_attn.out_proj", &["encoder.{}.attention.out"]),
    rule("encoder.layers.{}.self_attn_layer_norm", &["encoder.{}.attention_norm"]),
    rule("encoder.layers.{}.fc1", &["encoder.{}.feed_forward.up"]),
    rule("encoder.layers.{}.fc2", &["encoder.{}.feed_forward.down"]),
    rule("encoder.layers.{}.final_layer_norm", &["encoder.{}.feed_forward_norm"]),
    rule("decoder.layernorm_embedding", &["decoder_embedding_norm"]),
    rule("decoder.layer_norm", &["decoder_norm"]),
    rule("decoder.layers.{}.self_attn.q_proj", &["decoder.{}.attention.q"]),
    rule("decoder.layers.{}.self_attn.k_proj", &["decoder.{}.attention.k"]),
    rule("decoder.layers.{}.self_attn.v_proj", &["decoder.{}.attention.v"]),
    rule("decoder.layers.{}.self_attn.out_proj", &["decoder.{}.attention.out"]),
    rule("decoder.layers.{}.self_attn_layer_norm", &["decoder.{}.attention_norm"]),
    rule("decoder.layers.{}.encoder_attn.q_proj", &["decoder.{}.cross.q"]),
    rule("decoder.layers.{}.encoder_attn.k_proj", &["decoder.{}.cross.k"]),
    rule("decoder.layers.{}.encoder_attn.v_proj", &["decoder.{}.cross.v"]),
    rule("decoder.layers.{}.encoder_attn.out_proj", &["decoder.{}.cross.out"]),
    rule("decoder.layers.{}.encoder_attn_layer_norm", &["decoder.{}.cross_norm"]),
    rule("decoder.layers.{}.fc1", &["decoder.{}.feed_forward.up"]),
    rule("decoder.layers.{}.fc2", &["decoder.{}.feed_forward.down"]),
    rule("decoder.layers.{}.final_layer_norm", &["decoder.{}.feed_forward_norm"]),
];
const POSITIONS: &[Rule] = &[
    rule("encoder.embed_positions", &["encoder_positions"]),
    rule("decoder.embed_positions", &["decoder_positions"]),
];
/// Sines follow from their formula.
const SINES: &[Rule] = &[
    rule("encoder.embed_positions", &[]),
    rule("decoder.embed_positions", &[]),
    rule("encoder.embed_positions.weights", &[]),
    rule("decoder.embed_positions.weights", &[]),
];

/// Prefixes, tables, and beginnings of what is left out.
type Parts = (&'static [&'static str], Vec<&'static [Rule]>, &'static [&'static str]);

/// The names in the files of a family.
pub(super) fn names(config: &TransformerConfig) -> Names {
    let (prefixes, tables, dropped) = parts(config);
    let stack = config.decoder.as_ref().or(config.encoder.as_ref());
    let rows = |heads: usize| stack.map_or(0, |stack| heads.saturating_mul(stack.head_dim));
    Names {
        title: format!("{} (Hugging Face)", config.family),
        prefixes: prefixes.to_vec(),
        tables,
        dropped,
        rows: stack.map_or([0; 2], |stack| [rows(stack.heads.q), rows(stack.heads.kv)]),
        head_dim: stack.map_or(1, |stack| stack.head_dim),
        equals: true,
    }
}

fn parts(config: &TransformerConfig) -> Parts {
    let llama = NameMap::LLAMA.rules;
    let tables: &[Rule] = if config.shared_embedding { SHARED } else { OWN };
    let classifies = !config.labels.is_empty();
    match config.family.as_str() {
        "gemma2" | "olmo2" => (&["model."], vec![OUTPUT_NORMS, DECODER, llama], &[]),
        "gemma3_text" => (
            &["model.language_model.", "language_model.model.", "language_model.", "model."],
            vec![OUTPUT_NORMS, DECODER, llama],
            &[
                "vision_tower.",
                "multi_modal_projector.",
                "model.vision_tower.",
                "model.multi_modal_projector.",
            ],
        ),
        "gpt2" => (&["transformer."], vec![NameMap::GPT2.rules], &[]),
        "gpt_neox" => (&["gpt_neox."], vec![GPT_NEOX], &[]),
        "bert" => {
            let (heads, dropped): (&[Rule], &[&str]) = match config.head {
                None => (&[], &["cls.", "bert.pooler.", "pooler."]),
                Some(_) if classifies => (BERT_CLASSES, &["cls."]),
                Some(_) => (BERT_TOKENS, &["cls.seq_relationship.", "bert.pooler.", "pooler."]),
            };
            (&["bert."], vec![BERT_NORM, heads, NameMap::BERT.rules], dropped)
        }
        "roberta" | "xlm-roberta" | "camembert" => {
            let (heads, dropped): (&[Rule], &[&str]) = match config.head {
                None => (&[], &["lm_head.", "roberta.pooler.", "pooler."]),
                Some(_) if classifies => (ROBERTA_CLASSES, &["lm_head.", "roberta.pooler."]),
                Some(_) => (ROBERTA_TOKENS, &["roberta.pooler."]),
            };
            (&["roberta."], vec![BERT_NORM, heads, NameMap::BERT.rules], dropped)
        }
        "distilbert" => {
            let (heads, dropped): (&[Rule], &[&str]) = match config.head {
                None => (&[], &["vocab_"]),
                Some(_) if classifies => (DISTILBERT_CLASSES, &["vocab_"]),
                Some(_) => (DISTILBERT_TOKENS, &[]),
            };
            (&["distilbert."], vec![BERT_NORM, DISTILBERT, heads, NameMap::BERT.rules], dropped)
        }
        "modernbert" => {
            let dropped: &[&str] = if config.head.is_none() { &["head.", "decoder."] } else { &[] };
            (&["model."], vec![MODERNBERT], dropped)
        }
        "vit" => (&["vit."], vec![VIT], &[]),
        "t5" | "mt5" => (&["model."], vec![tables, PAIR_HEAD, T5], &[]),
        "marian" | "m2m_100" => (&["model."], vec![tables, PAIR_HEAD, SINES, BART], &[]),
        "bart" | "mbart" => (&["model."], vec![tables, PAIR_HEAD, POSITIONS, BART], &[]),
        _ => (&["model."], vec![DECODER, llama], &[]),
    }
}
