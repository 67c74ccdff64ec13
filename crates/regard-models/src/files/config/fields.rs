//! Fields of a configuration that others have written, read strictly.

use super::Activation;
use crate::error::Error;
use serde_json::{Map, Value};

/// What says nothing about the numbers of a model that is used, only about its training, its files, its programs, or how texts are
/// generated with it, which is the caller's matter.
const IGNORED_KEYS: &[&str] = &[
    "_attn_implementation_autoset",
    "_name_or_path",
    "activation_dropout",
    "architectures",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_implementation",
    "attn_pdrop",
    "auto_map",
    "begin_suppress_tokens",
    "cache_implementation",
    "chunk_size_feed_forward",
    "classif_dropout",
    "classifier_dropout",
    "cls_token_id",
    "decoder_layerdrop",
    "deterministic_flash_attn",
    "directionality",
    "diversity_penalty",
    "do_sample",
    "dropout",
    "dropout_rate",
    "dtype",
    "early_stopping",
    "embd_pdrop",
    "embedding_dropout",
    "encoder_layerdrop",
    "encoder_no_repeat_ngram_size",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "id2label",
    "init_std",
    "initializer_cutoff_factor",
    "initializer_factor",
    "initializer_range",
    "is_composition",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "layerdrop",
    "length_penalty",
    "mask_token_id",
    "max_length",
    "max_new_tokens",
    "max_sequence_length",
    "min_length",
    "mlp_dropout",
    "model_max_length",
    "model_type",
    "n_special",
    "neftune_noise_alpha",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_scores",
    "params",
    "predict_special_tokens",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "qa_dropout",
    "reference_compile",
    "remove_invalid_values",
    "repad_logits_with_grad",
    "repetition_penalty",
    "replacing_rate",
    "resid_pdrop",
    "return_dict",
    "return_dict_in_generate",
    "save_step",
    "sep_token_id",
    "seq_classif_dropout",
    "sparse_pred_ignore_index",
    "sparse_prediction",
    "student_decoder_layers",
    "student_encoder_layers",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "total_flos",
    "transformers.js_config",
    "transformers_version",
    "typical_p",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
];

pub(super) fn missing(field: &str) -> Error {
    Error::format(field, "missing in the configuration")
}

/// What a configuration says, less what has been read of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Fields {
    pub(super) map: Map<String, Value>,
}

impl Fields {
    pub(super) fn new(map: Map<String, Value>) -> Self {
        Self { map }
    }

    pub(super) fn read<T>(
        &mut self,
        field: &str,
        kind: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        match self.map.remove(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                let wrong = || Error::format(field, format!("{value}; it should be {kind}"));
                read(&value).map(Some).ok_or_else(wrong)
            }
        }
    }

    pub(super) fn optional_size(&mut self, field: &str) -> Result<Option<usize>, Error> {
        let read = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        self.read(field, "a whole number", read)
    }

    pub(super) fn size(&mut self, field: &str) -> Result<usize, Error> {
        self.optional_size(field)?.ok_or_else(|| missing(field))
    }

    pub(super) fn number(&mut self, field: &str) -> Result<Option<f64>, Error> {
        self.read(field, "a number", Value::as_f64)
    }

    pub(super) fn bool(&mut self, field: &str) -> Result<Option<bool>, Error> {
        self.read(field, "true or false", Value::as_bool)
    }

    pub(super) fn text(&mut self, field: &str) -> Result<Option<String>, Error> {
        self.read(field, "a text", |value| value.as_str().map(str::to_owned))
    }

    pub(super) fn texts(&mut self, field: &str) -> Result<Vec<String>, Error> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let texts = |value: &Value| value.as_array()?.iter().map(text).collect();
        self.read(field, "a list of texts", texts)?.ok_or_else(|| missing(field))
    }

    pub(super) fn id(&mut self, field: &str) -> Result<Option<u32>, Error> {
        // Some programs write -1 for none.
        let read = |value: &Value| match value.as_i64()? {
            -1 => Some(None),
            id => u32::try_from(id).ok().map(Some),
        };
        Ok(self.read(field, "the number of a token", read)?.flatten())
    }

    /// One, or a list of them.
    pub(super) fn ids(&mut self, field: &str) -> Result<Vec<u32>, Error> {
        if !matches!(self.map.get(field), Some(Value::Array(_))) {
            return Ok(self.id(field)?.into_iter().collect());
        }
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = |value: &Value| value.as_array()?.iter().map(id).collect();
        Ok(self.read(field, "a list of numbers of tokens", ids)?.unwrap_or_default())
    }

    pub(super) fn activation(&mut self, field: &str) -> Result<Option<Activation>, Error> {
        let Some(name) = self.text(field)? else { return Ok(None) };
        Ok(Some(match name.as_str() {
            "relu" => Activation::Relu,
            "gelu" => Activation::Gelu,
            "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Activation::GeluTanh,
            "silu" | "swish" => Activation::Silu,
            other => {
                let known = "relu, gelu, gelu_new, gelu_pytorch_tanh and silu are known";
                return Err(Error::unsupported(field, &other, known));
            }
        }))
    }

    /// Refuses any value but these. Null and nothing say that all is as usual.
    pub(super) fn only(&mut self, field: &str, known: &[Value]) -> Result<(), Error> {
        match self.map.remove(field) {
            None | Some(Value::Null) => Ok(()),
            Some(value) if known.contains(&value) || known.iter().any(|k| equal(k, &value)) => {
                Ok(())
            }
            Some(value) => {
                let known: Vec<_> = known.iter().map(Value::to_string).collect();
                let known = if known.is_empty() { "null".into() } else { known.join(" or ") };
                Err(Error::unsupported(field, &value, format!("{known} is known")))
            }
        }
    }

    /// A part of its own.
    pub(super) fn part(&mut self, field: &str) -> Result<Option<Self>, Error> {
        self.read(field, "an object `{..}`", |value| value.as_object().cloned().map(Self::new))
    }

    /// Refuses what nobody has read, unless it is known to be harmless or says that something is not there. A name with `_` before it is
    /// a program's own matter: it is told.
    pub(super) fn finish(self) -> Result<Vec<String>, Error> {
        let mut notes = Vec::new();
        for (field, value) in self.map {
            let nothing = match &value {
                Value::Null | Value::Bool(false) => true,
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                _ => false,
            };
            if nothing || IGNORED_KEYS.contains(&field.as_str()) {
                continue;
            }
            if !field.starts_with('_') {
                let known = "if it does not change the numbers, take it out of the configuration";
                return Err(Error::unsupported(field, &value, known));
            }
            notes.push(format!("{field} = {value}: ignored"));
        }
        Ok(notes)
    }
}

/// Whether two numbers are equal, as `1` and `1.0` are.
fn equal(a: &Value, b: &Value) -> bool {
    a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| a == b)
}
