//! Names of tensors in GGUF files of each architecture.

use crate::files::config::TransformerConfig;
use crate::files::names::{Layout, NameMap, Names, Rule, rule};

/// What others add to Llama.
const MORE: &[Rule] = &[
    rule("blk.{}.attn_q_norm", &["blocks.{}.attention.q_norm"]),
    rule("blk.{}.attn_k_norm", &["blocks.{}.attention.k_norm"]),
    rule("blk.{}.post_attention_norm", &["blocks.{}.attention_post_norm"]),
    rule("blk.{}.post_ffw_norm", &["blocks.{}.feed_forward_post_norm"]),
    rule("position_embd", &["positions"]),
    Rule {
        theirs: "blk.{}.attn_qkv",
        ours: &["blocks.{}.attention.q", "blocks.{}.attention.k", "blocks.{}.attention.v"],
        layout: Layout::Qkv,
    },
    // The configuration has them in its frequencies.
    rule("rope_freqs", &[]),
    rule("rope_factors_long", &[]),
    rule("rope_factors_short", &[]),
];

/// Phi-3 has gate and up in one.
const GATE_AND_UP: &[Rule] =
    &[rule("blk.{}.ffn_up", &["blocks.{}.feed_forward.gate", "blocks.{}.feed_forward.up"])];

/// The names in the files of an architecture.
pub(super) fn names(config: &TransformerConfig) -> Names {
    let stack = config.decoder.as_ref();
    let rows = |heads: usize| stack.map_or(0, |stack| heads.saturating_mul(stack.head_dim));
    let tables = [MORE, NameMap::LLAMA_GGUF.rules];
    let first: &[&[Rule]] = if config.family == "phi3" { &[GATE_AND_UP] } else { &[] };
    Names {
        title: format!("{} (GGUF)", config.family),
        prefixes: vec![""],
        tables: first.iter().chain(&tables).copied().collect(),
        dropped: &[],
        rows: stack.map_or([0; 2], |stack| [rows(stack.heads.q), rows(stack.heads.kv)]),
        head_dim: stack.map_or(1, |stack| stack.head_dim),
        equals: false,
    }
}
