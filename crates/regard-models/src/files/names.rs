//! What tensors are called: by the programs that wrote them, and by us.
//!
//! Our names are few. A linear map has a `weight [out, in]` and perhaps a `bias`, a norm a `weight` and perhaps a `bias`, an
//! embedding a `weight [vocab, d_model]`. Attention is `q k v out`, a feed-forward net is `up down` and `gate` if it has one.
//!
//! | model | names |
//! |---|---|
//! | decoder | `embedding`, `positions`, `blocks.{}.` with `attention_norm attention feed_forward_norm feed_forward`, `norm`, `head` |
//! | BERT | the same with `token_types` (of tokens) and `pooler`, without `head`; `norm` follows the embeddings |
//! | encoder and decoder | `source`, `target`, `encoder.{}.` and `decoder.{}.` as above, the latter with `cross_norm cross`, `encoder_norm`, `decoder_norm`, `head` |
//! | recurrent translator | `source`, `target`, `encoder.forward`, `encoder.backward`, `bridge`, `decoder`, `head`; `attention` (Bahdanau: `query key score`), or `luong.attention` (`general`, or `concat score`) and `luong.combine` |
//! | GRU encoder and decoder of e2k | `source`, `target`, `encoder.forward`, `encoder.backward`, `before`, `after` (with `input hidden` each), `bridge`, `attention`, `head` |

use super::weights::Weights;
use crate::error::Error;
use std::collections::BTreeMap;

/// How the tensors of some program are called by us.
#[derive(Clone, Copy, Debug)]
pub struct NameMap {
    /// Whose names they are.
    pub title: &'static str,
    /// What all names may begin with, or not.
    pub prefix: &'static str,
    /// One for each tensor that there may be. Where there is none, the tensor is an error.
    pub rules: &'static [Rule],
}

/// How one tensor, or one of each layer, is called by us.
///
/// `{}` stands for the number of the layer. A name without an ending stands for `.weight` and `.bias` of it.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The name in the file.
    pub theirs: &'static str,
    /// Our name; several if the rows are equal parts of several tensors; none if the tensor is not used.
    pub ours: &'static [&'static str],
    /// Whether a matrix stands as `[in, out]` in the file.
    pub transposed: bool,
}

const fn rule(theirs: &'static str, ours: &'static [&'static str]) -> Rule {
    Rule { theirs, ours, transposed: false }
}

/// GPT-2 keeps what others call `Linear` as `Conv1D`, which is `[in, out]`.
const fn turned(theirs: &'static str, ours: &'static [&'static str]) -> Rule {
    Rule { theirs, ours, transposed: true }
}

impl NameMap {
    /// Llama as Hugging Face has it.
    pub const LLAMA: Self = Self {
        title: "Llama (Hugging Face)",
        prefix: "model.",
        rules: &[
            rule("embed_tokens", &["embedding"]),
            rule("layers.{}.input_layernorm", &["blocks.{}.attention_norm"]),
            rule("layers.{}.self_attn.q_proj", &["blocks.{}.attention.q"]),
            rule("layers.{}.self_attn.k_proj", &["blocks.{}.attention.k"]),
            rule("layers.{}.self_attn.v_proj", &["blocks.{}.attention.v"]),
            rule("layers.{}.self_attn.o_proj", &["blocks.{}.attention.out"]),
            // Follows from the base of the angles.
            rule("layers.{}.self_attn.rotary_emb.inv_freq", &[]),
            rule("layers.{}.post_attention_layernorm", &["blocks.{}.feed_forward_norm"]),
            rule("layers.{}.mlp.gate_proj", &["blocks.{}.feed_forward.gate"]),
            rule("layers.{}.mlp.up_proj", &["blocks.{}.feed_forward.up"]),
            rule("layers.{}.mlp.down_proj", &["blocks.{}.feed_forward.down"]),
            rule("norm", &["norm"]),
            rule("lm_head", &["head"]),
        ],
    };

    /// Llama as llama.cpp has it.
    pub const LLAMA_GGUF: Self = Self {
        title: "Llama (GGUF)",
        prefix: "",
        rules: &[
            rule("token_embd", &["embedding"]),
            rule("blk.{}.attn_norm", &["blocks.{}.attention_norm"]),
            rule("blk.{}.attn_q", &["blocks.{}.attention.q"]),
            rule("blk.{}.attn_k", &["blocks.{}.attention.k"]),
            rule("blk.{}.attn_v", &["blocks.{}.attention.v"]),
            rule("blk.{}.attn_output", &["blocks.{}.attention.out"]),
            rule("blk.{}.ffn_norm", &["blocks.{}.feed_forward_norm"]),
            rule("blk.{}.ffn_gate", &["blocks.{}.feed_forward.gate"]),
            rule("blk.{}.ffn_up", &["blocks.{}.feed_forward.up"]),
            rule("blk.{}.ffn_down", &["blocks.{}.feed_forward.down"]),
            rule("output_norm", &["norm"]),
            rule("output", &["head"]),
        ],
    };

    /// GPT-2 as Hugging Face has it.
    pub const GPT2: Self = Self {
        title: "GPT-2 (Hugging Face)",
        prefix: "transformer.",
        rules: &[
            rule("wte", &["embedding"]),
            rule("wpe", &["positions"]),
            rule("h.{}.ln_1", &["blocks.{}.attention_norm"]),
            turned(
                "h.{}.attn.c_attn",
                &["blocks.{}.attention.q", "blocks.{}.attention.k", "blocks.{}.attention.v"],
            ),
            turned("h.{}.attn.c_proj", &["blocks.{}.attention.out"]),
            // The causal mask, kept as a tensor by old versions.
            rule("h.{}.attn.bias", &[]),
            rule("h.{}.attn.masked_bias", &[]),
            rule("h.{}.ln_2", &["blocks.{}.feed_forward_norm"]),
            turned("h.{}.mlp.c_fc", &["blocks.{}.feed_forward.up"]),
            turned("h.{}.mlp.c_proj", &["blocks.{}.feed_forward.down"]),
            rule("ln_f", &["norm"]),
            rule("lm_head", &["head"]),
        ],
    };

    /// BERT as Hugging Face has it. Old files say `gamma` and `beta` for the weight and the bias of a norm.
    pub const BERT: Self = Self {
        title: "BERT (Hugging Face)",
        prefix: "bert.",
        rules: &[
            rule("embeddings.word_embeddings", &["embedding"]),
            rule("embeddings.position_embeddings", &["positions"]),
            rule("embeddings.token_type_embeddings", &["token_types"]),
            // 0, 1, 2, ..
            rule("embeddings.position_ids", &[]),
            rule("embeddings.LayerNorm", &["norm"]),
            rule("embeddings.LayerNorm.gamma", &["norm.weight"]),
            rule("embeddings.LayerNorm.beta", &["norm.bias"]),
            rule("encoder.layer.{}.attention.self.query", &["blocks.{}.attention.q"]),
            rule("encoder.layer.{}.attention.self.key", &["blocks.{}.attention.k"]),
            rule("encoder.layer.{}.attention.self.value", &["blocks.{}.attention.v"]),
            rule("encoder.layer.{}.attention.output.dense", &["blocks.{}.attention.out"]),
            rule("encoder.layer.{}.attention.output.LayerNorm", &["blocks.{}.attention_norm"]),
            rule(
                "encoder.layer.{}.attention.output.LayerNorm.gamma",
                &["blocks.{}.attention_norm.weight"],
            ),
            rule(
                "encoder.layer.{}.attention.output.LayerNorm.beta",
                &["blocks.{}.attention_norm.bias"],
            ),
            rule("encoder.layer.{}.intermediate.dense", &["blocks.{}.feed_forward.up"]),
            rule("encoder.layer.{}.output.dense", &["blocks.{}.feed_forward.down"]),
            rule("encoder.layer.{}.output.LayerNorm", &["blocks.{}.feed_forward_norm"]),
            rule(
                "encoder.layer.{}.output.LayerNorm.gamma",
                &["blocks.{}.feed_forward_norm.weight"],
            ),
            rule("encoder.layer.{}.output.LayerNorm.beta", &["blocks.{}.feed_forward_norm.bias"]),
            rule("pooler.dense", &["pooler"]),
        ],
    };

    /// A Transformer as CTranslate2 has it.
    pub const CTRANSLATE2: Self = Self {
        title: "Transformer (CTranslate2)",
        prefix: "",
        rules: &[
            rule("encoder.embeddings", &["source"]),
            rule("encoder.layer_{}.self_attention.norm", &["encoder.{}.attention_norm"]),
            rule(
                "encoder.layer_{}.self_attention.linear_0",
                &["encoder.{}.attention.q", "encoder.{}.attention.k", "encoder.{}.attention.v"],
            ),
            rule("encoder.layer_{}.self_attention.linear_1", &["encoder.{}.attention.out"]),
            rule("encoder.layer_{}.ffn.norm", &["encoder.{}.feed_forward_norm"]),
            rule("encoder.layer_{}.ffn.linear_0", &["encoder.{}.feed_forward.up"]),
            rule("encoder.layer_{}.ffn.linear_1", &["encoder.{}.feed_forward.down"]),
            rule("encoder.norm", &["encoder_norm"]),
            rule("decoder.embeddings", &["target"]),
            rule("decoder.layer_{}.self_attention.norm", &["decoder.{}.attention_norm"]),
            rule(
                "decoder.layer_{}.self_attention.linear_0",
                &["decoder.{}.attention.q", "decoder.{}.attention.k", "decoder.{}.attention.v"],
            ),
            rule("decoder.layer_{}.self_attention.linear_1", &["decoder.{}.attention.out"]),
            rule("decoder.layer_{}.attention.norm", &["decoder.{}.cross_norm"]),
            rule("decoder.layer_{}.attention.linear_0", &["decoder.{}.cross.q"]),
            rule(
                "decoder.layer_{}.attention.linear_1",
                &["decoder.{}.cross.k", "decoder.{}.cross.v"],
            ),
            rule("decoder.layer_{}.attention.linear_2", &["decoder.{}.cross.out"]),
            rule("decoder.layer_{}.ffn.norm", &["decoder.{}.feed_forward_norm"]),
            rule("decoder.layer_{}.ffn.linear_0", &["decoder.{}.feed_forward.up"]),
            rule("decoder.layer_{}.ffn.linear_1", &["decoder.{}.feed_forward.down"]),
            rule("decoder.norm", &["decoder_norm"]),
            rule("decoder.projection", &["head"]),
        ],
    };

    /// The GRU encoder and decoder of e2k. The rows of a GRU are its reset gate, its update gate and its new state, as in PyTorch.
    pub const E2K: Self = Self {
        title: "GRU encoder and decoder (e2k)",
        prefix: "",
        rules: &[
            rule("e_emb", &["source"]),
            rule("k_emb", &["target"]),
            rule("encoder.weight_ih_l0", &["encoder.forward.input.weight"]),
            rule("encoder.bias_ih_l0", &["encoder.forward.input.bias"]),
            rule("encoder.weight_hh_l0", &["encoder.forward.hidden.weight"]),
            rule("encoder.bias_hh_l0", &["encoder.forward.hidden.bias"]),
            rule("encoder.weight_ih_l0_reverse", &["encoder.backward.input.weight"]),
            rule("encoder.bias_ih_l0_reverse", &["encoder.backward.input.bias"]),
            rule("encoder.weight_hh_l0_reverse", &["encoder.backward.hidden.weight"]),
            rule("encoder.bias_hh_l0_reverse", &["encoder.backward.hidden.bias"]),
            rule("encoder_fc.0", &["bridge"]),
            rule(
                "attn.in_proj_weight",
                &["attention.q.weight", "attention.k.weight", "attention.v.weight"],
            ),
            rule(
                "attn.in_proj_bias",
                &["attention.q.bias", "attention.k.bias", "attention.v.bias"],
            ),
            rule("attn.out_proj", &["attention.out"]),
            rule("pre_decoder.weight_ih_l0", &["before.input.weight"]),
            rule("pre_decoder.bias_ih_l0", &["before.input.bias"]),
            rule("pre_decoder.weight_hh_l0", &["before.hidden.weight"]),
            rule("pre_decoder.bias_hh_l0", &["before.hidden.bias"]),
            rule("post_decoder.weight_ih_l0", &["after.input.weight"]),
            rule("post_decoder.bias_ih_l0", &["after.input.bias"]),
            rule("post_decoder.weight_hh_l0", &["after.hidden.weight"]),
            rule("post_decoder.bias_hh_l0", &["after.hidden.bias"]),
            rule("fc", &["head"]),
        ],
    };

    /// What is to be made of a tensor. None if there is no rule for it.
    fn find<'a>(&self, theirs: &'a str) -> Option<(Rule, Place<'a>)> {
        let name = theirs.strip_prefix(self.prefix).unwrap_or(theirs);
        // A name with its ending is meant before one that stands for two.
        let whole = self.rules.iter().find_map(|rule| Some((*rule, rule.whole(name)?)));
        whole.or_else(|| self.rules.iter().find_map(|rule| Some((*rule, rule.stem(name)?))))
    }
}

/// What a name has that its rule leaves open.
struct Place<'a> {
    layer: &'a str,
    ending: &'a str,
}

impl Rule {
    fn whole<'a>(&self, name: &'a str) -> Option<Place<'a>> {
        let Some((before, after)) = self.theirs.split_once("{}") else {
            return (name == self.theirs).then_some(Place { layer: "", ending: "" });
        };
        let layer = name.strip_prefix(before)?.strip_suffix(after)?;
        // As numbers are written: else `0` and `00` would be one layer.
        let number = layer.parse::<u32>().is_ok_and(|n| n.to_string() == layer);
        number.then_some(Place { layer, ending: "" })
    }

    fn stem<'a>(&self, name: &'a str) -> Option<Place<'a>> {
        [".weight", ".bias"]
            .into_iter()
            .find_map(|ending| Some(Place { ending, ..self.whole(name.strip_suffix(ending)?)? }))
    }
}

impl Weights {
    /// The same tensors under our names. Each must have a rule, and no two may get the same name.
    pub fn renamed(mut self, map: &NameMap) -> Result<Self, Error> {
        let mut tensors = BTreeMap::new();
        for (theirs, mut tensor) in std::mem::take(&mut self.tensors) {
            let place = || format!("tensor `{theirs}`");
            let Some((rule, Place { layer, ending })) = map.find(&theirs) else {
                let why = format!("not known among the names of {}", map.title);
                return Err(Error::format(place(), why));
            };
            if rule.transposed {
                tensor.transpose();
            }
            let parts = rule.ours.len();
            for (part, ours) in rule.ours.iter().enumerate() {
                let name = format!("{}{ending}", ours.replace("{}", layer));
                let own = if parts == 1 { Some(tensor.clone()) } else { tensor.part(part, parts) };
                let own = own.ok_or_else(|| {
                    let why = format!("its rows do not make {parts} equal parts");
                    Error::format(place(), why)
                })?;
                if tensors.insert(name.clone(), own).is_some() {
                    let why = format!("another tensor is called `{name}` already");
                    return Err(Error::format(place(), why));
                }
            }
        }
        self.tensors = tensors;
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Named = (&'static str, &'static [usize]);

    /// Tensors of these names and shapes, each counting up from 0.
    fn weights(named: &[Named]) -> Weights {
        let numbers = |shape: &[usize]| (0u8..).take(shape.iter().product()).map(f32::from);
        let named = named.iter().map(|(name, shape)| {
            ((*name).to_owned(), shape.to_vec(), numbers(shape).collect::<Vec<f32>>())
        });
        Weights::new(named).unwrap()
    }

    fn names(weights: &Weights) -> Vec<&str> {
        weights.names().collect()
    }

    #[test]
    fn a_fused_matrix_of_gpt2_is_turned_and_split() {
        let named: &[Named] = &[
            ("h.0.attn.c_attn.weight", &[2, 6]),
            ("h.0.attn.c_attn.bias", &[6]),
            ("h.0.attn.bias", &[1, 1, 4, 4]),
            ("h.0.attn.masked_bias", &[]),
            ("wte.weight", &[3, 2]),
        ];
        let mut ours = weights(named).renamed(&NameMap::GPT2).unwrap();
        assert_eq!(
            names(&ours),
            [
                "blocks.0.attention.k.bias",
                "blocks.0.attention.k.weight",
                "blocks.0.attention.q.bias",
                "blocks.0.attention.q.weight",
                "blocks.0.attention.v.bias",
                "blocks.0.attention.v.weight",
                "embedding.weight",
            ]
        );
        // [[0 1 2 3 4 5], [6 7 8 9 10 11]], of which k has columns 2 and 3.
        assert_eq!(ours.take("blocks.0.attention.k.weight", &[2, 2]).unwrap(), [2., 8., 3., 9.]);
        assert_eq!(ours.take("blocks.0.attention.v.bias", &[2]).unwrap(), [4., 5.]);
        assert_eq!(ours.take("embedding.weight", &[3, 2]).unwrap()[..2], [0., 1.]);
    }

    #[test]
    fn prefixes_may_be_there_or_not() {
        for name in ["transformer.h.11.ln_1.weight", "h.11.ln_1.weight"] {
            let ours = weights(&[(name, &[2])]).renamed(&NameMap::GPT2).unwrap();
            assert_eq!(names(&ours), ["blocks.11.attention_norm.weight"]);
        }
    }

    #[test]
    fn norms_of_bert_are_known_by_their_old_names_too() {
        let named: &[Named] = &[
            ("bert.embeddings.LayerNorm.gamma", &[2]),
            ("bert.embeddings.LayerNorm.beta", &[2]),
            ("bert.encoder.layer.0.attention.output.LayerNorm.gamma", &[2]),
            ("bert.encoder.layer.0.output.LayerNorm.bias", &[2]),
        ];
        let ours = weights(named).renamed(&NameMap::BERT).unwrap();
        let expected = [
            "blocks.0.attention_norm.weight",
            "blocks.0.feed_forward_norm.bias",
            "norm.bias",
            "norm.weight",
        ];
        assert_eq!(names(&ours), expected);
    }

    #[test]
    fn a_tensor_without_a_rule_is_an_error() {
        for name in ["rope_freqs.weight", "blk.x.attn_q.weight", "blk.00.attn_q.weight"] {
            let error = weights(&[(name, &[2])]).renamed(&NameMap::LLAMA_GGUF);
            let error = error.unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("GGUF"), "{error}");
        }
    }

    #[test]
    fn two_tensors_of_one_name_and_odd_parts_are_errors() {
        let both: &[Named] = &[("wte.weight", &[2]), ("transformer.wte.weight", &[2])];
        let error = weights(both).renamed(&NameMap::GPT2).unwrap_err().to_string();
        assert!(error.contains("already"), "{error}");
        let odd: &[Named] = &[("attn.in_proj_bias", &[7])];
        let error = weights(odd).renamed(&NameMap::E2K).unwrap_err().to_string();
        assert!(error.contains("3 equal parts"), "{error}");
    }
}
