//! What tensors are called: by the programs that wrote them, and by us.
//!
//! Our names are few. A linear map has a `weight [out, in]` and perhaps a `bias`, a norm a `weight` and perhaps a `bias`, an
//! embedding a `weight [vocab, d_model]`. Attention is `q k v out`, a feed-forward net is `up down` and `gate` if it has one.
//!
//! | model | names |
//! |---|---|
//! | decoder | `embedding`, `positions`, `blocks.{}.` with `attention_norm attention feed_forward_norm feed_forward`, `norm`, `head` |
//! | Transformer of a [`TransformerConfig`](super::TransformerConfig) | those of its `tensors()` |
//! | BERT | the same with `token_types` (of tokens) and `pooler`, without `head`; `norm` follows the embeddings |
//! | encoder and decoder | `source`, `target`, `encoder.{}.` and `decoder.{}.` as above, the latter with `cross_norm cross`, `encoder_norm`, `decoder_norm`, `head` |
//! | recurrent translator | `source`, `target`, `encoder.forward`, `encoder.backward`, `bridge`, `decoder`, `head`; `attention` (Bahdanau: `query key score`), or `luong.attention` (`general`, or `concat score`) and `luong.combine` |
//! | GRU encoder and decoder of e2k | `source`, `target`, `encoder.forward`, `encoder.backward`, `before`, `after` (with `input hidden` each), `bridge`, `attention`, `head` |

use super::weights::{Tensor, Weights, only};
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
    /// Our name; several if the rows are parts of several tensors; none if the tensor is not used.
    pub ours: &'static [&'static str],
    /// How the numbers stand in the file.
    pub layout: Layout,
}

/// How the numbers of a tensor stand in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Rows are outputs; of several names, each has an equal part of them.
    Rows,
    /// A matrix is `[in, out]`; of several names, each has an equal part of the columns.
    Columns,
    /// Rows of q, k and v after each other, by their numbers of heads (Phi-3).
    Qkv,
    /// Rows of q, k and v of a head after each other, head by head (GPT-NeoX).
    QkvOfHeads,
    /// With a first axis of 1 (`final_logits_bias`).
    OneRow,
    /// Kernels of a convolution, `[out, channels, height, width]`: each is a row (ViT).
    Kernels,
}

pub(super) const fn rule(theirs: &'static str, ours: &'static [&'static str]) -> Rule {
    Rule { theirs, ours, layout: Layout::Rows }
}

/// GPT-2 keeps what others call `Linear` as `Conv1D`, which is `[in, out]`.
const fn turned(theirs: &'static str, ours: &'static [&'static str]) -> Rule {
    Rule { theirs, ours, layout: Layout::Columns }
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
}

/// What is to be made of a tensor, by the first rule of these tables. None if there is none.
fn find<'a>(name: &'a str, tables: &[&'static [Rule]]) -> Option<(Rule, Place<'a>)> {
    let rules = || tables.iter().copied().flatten();
    // A name with its ending is meant before one that stands for two.
    let whole = rules().find_map(|rule| Some((*rule, rule.whole(name)?)));
    whole.or_else(|| rules().find_map(|rule| Some((*rule, rule.stem(name)?))))
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

/// The names of a model: tables of rules, of which the first that fits is meant.
#[derive(Clone, Debug)]
pub(super) struct Names {
    /// Whose names they are.
    pub(super) title: String,
    /// What names may begin with, or not; the first that fits is taken off.
    pub(super) prefixes: Vec<&'static str>,
    pub(super) tables: Vec<&'static [Rule]>,
    /// Beginnings of names of parts that are left out.
    pub(super) dropped: &'static [&'static str],
    /// Rows of q, and of k.
    pub(super) rows: [usize; 2],
    /// Features of a head.
    pub(super) head_dim: usize,
    /// Whether two tensors of one name of ours are fine if they are equal.
    pub(super) equals: bool,
}

impl Weights {
    /// The same tensors under our names. Each must have a rule, and no two may get the same name.
    pub fn renamed(self, map: &NameMap) -> Result<Self, Error> {
        let NameMap { title, prefix, rules } = *map;
        let names = Names {
            title: title.into(),
            prefixes: vec![prefix],
            tables: vec![rules],
            dropped: &[],
            rows: [0; 2],
            head_dim: 1,
            equals: false,
        };
        self.named_as(&names)
    }

    /// The same by several tables.
    pub(super) fn named_as(mut self, names: &Names) -> Result<Self, Error> {
        let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
        for (theirs, mut tensor) in std::mem::take(&mut self.tensors) {
            if names.dropped.iter().any(|part| theirs.starts_with(part)) {
                continue;
            }
            let place = || format!("tensor `{theirs}`");
            let name = names.prefixes.iter().find_map(|prefix| theirs.strip_prefix(prefix));
            let found = find(name.unwrap_or(&theirs), &names.tables);
            let Some((rule, Place { layer, ending })) = found else {
                let why = format!("not known among the names of {}", names.title);
                return Err(Error::format(place(), why));
            };
            match rule.layout {
                Layout::Columns => tensor.transpose(),
                Layout::OneRow => tensor.unwrap_first(),
                Layout::Kernels => tensor.flatten_rows(),
                Layout::Rows | Layout::Qkv | Layout::QkvOfHeads => {}
            }
            for (part, ours) in rule.ours.iter().enumerate() {
                let name = format!("{}{ending}", ours.replace("{}", layer));
                let own = names.part(&tensor, &rule, part).ok_or_else(|| {
                    let parts = match rule.layout {
                        Layout::Rows | Layout::Columns => {
                            format!("{} equal parts", rule.ours.len())
                        }
                        _ => format!("q, k and v of rows {:?}", names.rows),
                    };
                    Error::format(place(), format!("its rows do not make {parts}"))
                })?;
                match tensors.get(&name) {
                    Some(first) if names.equals && self.equal(first, &own) => {}
                    Some(_) => {
                        let why = format!("another tensor is called `{name}` already");
                        return Err(Error::format(place(), why));
                    }
                    None => {
                        tensors.insert(name, own);
                    }
                }
            }
        }
        self.tensors = tensors;
        Ok(self)
    }
}

impl Names {
    /// The rows of one of the tensors that stand as one.
    fn part(&self, tensor: &Tensor, rule: &Rule, part: usize) -> Option<Tensor> {
        let [q, k] = self.rows;
        let all = *tensor.shape().first().unwrap_or(&0);
        match rule.layout {
            Layout::Qkv => {
                let ends = [0, q, q.checked_add(k)?, q.checked_add(k.checked_mul(2)?)?];
                (all == ends[3]).then(|| tensor.select(only(ends[part]..ends[part + 1])))?
            }
            Layout::QkvOfHeads => {
                let step = self.head_dim;
                // Rows without numbers take no bytes: a file could have any number of them.
                let empty = tensor.shape().contains(&0);
                if empty || all != q.checked_mul(3)? || !q.is_multiple_of(step) {
                    return None;
                }
                let head = |head: usize| (3 * head + part) * step..(3 * head + part + 1) * step;
                tensor.select((0..q / step).map(head).collect())
            }
            _ if rule.ours.len() == 1 => Some(tensor.clone()),
            _ => tensor.part(part, rule.ours.len()),
        }
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

    #[test]
    fn parts_of_fused_tensors_are_found_by_heads() {
        const FUSED: &[Rule] = &[
            Rule { theirs: "qkv", ours: &["q", "k", "v"], layout: Layout::Qkv },
            Rule { theirs: "heads", ours: &["a", "b", "c"], layout: Layout::QkvOfHeads },
            Rule { theirs: "row", ours: &["list.bias"], layout: Layout::OneRow },
            Rule { theirs: "kernel", ours: &["patches"], layout: Layout::Kernels },
        ];
        let names = |rows, head_dim| Names {
            title: "fused".into(),
            prefixes: vec!["x."],
            tables: vec![FUSED],
            dropped: &["image."],
            rows,
            head_dim,
            equals: true,
        };
        let fused: &[Named] =
            &[("x.qkv.weight", &[8, 1]), ("image.weight", &[1]), ("row", &[1, 3])];
        let mut ours = weights(fused).named_as(&names([4, 2], 2)).unwrap();
        assert_eq!(ours.take("k.weight", &[2, 1]).unwrap(), [4., 5.]);
        assert_eq!(ours.take("v.weight", &[2, 1]).unwrap(), [6., 7.]);
        assert_eq!(ours.take("list.bias", &[3]).unwrap(), [0., 1., 2.]);
        // Two heads of two features: q q k k v v, twice.
        let heads: &[Named] = &[("heads.bias", &[12])];
        let mut ours = weights(heads).named_as(&names([4, 4], 2)).unwrap();
        assert_eq!(ours.take("b.bias", &[4]).unwrap(), [2., 3., 8., 9.]);
        assert!(weights(heads).named_as(&names([3, 3], 2)).is_err());
        assert!(weights(fused).named_as(&names([6, 2], 2)).is_err());
        // Kernels of a convolution are rows; a list stays one.
        let kernels: &[Named] = &[("kernel.weight", &[2, 3, 1, 2]), ("kernel.bias", &[2])];
        let mut ours = weights(kernels).named_as(&names([4, 2], 2)).unwrap();
        assert_eq!(ours.take("patches.weight", &[2, 6]).unwrap()[6..8], [6., 7.]);
        assert_eq!(ours.take("patches.bias", &[2]).unwrap(), [0., 1.]);
        let table: &[Named] = &[("row", &[1, 2, 3])];
        let mut ours = weights(table).named_as(&names([4, 2], 2)).unwrap();
        assert_eq!(ours.take("list.bias", &[2, 3]).unwrap()[3..], [3., 4., 5.]);
        // The same twice is once.
        let twice: &[Named] = &[("row", &[1, 3]), ("x.row", &[1, 3])];
        assert_eq!(weights(twice).named_as(&names([4, 2], 2)).unwrap().left(), ["list.bias"]);
    }
}
