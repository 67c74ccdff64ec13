//! `config.json` of Hugging Face's Transformers.
//!
//! A family is a set of values and the names of its fields; what families have in common is read once.

mod decoders;
mod encoders;
mod images;
mod pairs;
mod rope;

use super::fields::{Fields, missing};
use super::{
    AddedPositions, Config, HeadConfig, Heads, MAX_SIZE, NormConfig, NormOrder, Pooling,
    StackConfig, TransformerConfig, within,
};
use crate::error::Error;
use serde_json::Value;

/// Layers and features of a head that are believed: settings of each layer are made before its tensors are seen.
const MAX_LAYERS: usize = 1024;
const MAX_HEAD_DIM: usize = 4096;

type Reader = fn(&mut Fields, &mut Vec<String>) -> Result<TransformerConfig, Error>;

/// Families by what `model_type` calls them.
const FAMILIES: &[(&str, Reader)] = &[
    ("llama", |f, n| decoders::llama(f, &decoders::LLAMA, n)),
    ("mistral", |f, n| decoders::llama(f, &decoders::MISTRAL, n)),
    ("qwen2", |f, n| decoders::llama(f, &decoders::QWEN2, n)),
    ("qwen3", |f, n| decoders::llama(f, &decoders::QWEN3, n)),
    ("phi3", |f, n| decoders::llama(f, &decoders::PHI3, n)),
    ("smollm3", |f, n| decoders::llama(f, &decoders::SMOLLM3, n)),
    ("olmo2", |f, n| decoders::llama(f, &decoders::OLMO2, n)),
    ("gemma", |f, n| decoders::llama(f, &decoders::GEMMA, n)),
    ("gemma2", |f, n| decoders::llama(f, &decoders::GEMMA2, n)),
    ("gemma3_text", |f, n| decoders::llama(f, &decoders::GEMMA3, n)),
    ("gpt2", |f, _| decoders::gpt2(f)),
    ("gpt_neox", decoders::gpt_neox),
    ("bert", |f, _| encoders::bert(f, false)),
    ("roberta", |f, _| encoders::bert(f, true)),
    ("xlm-roberta", |f, _| encoders::bert(f, true)),
    ("camembert", |f, _| encoders::bert(f, true)),
    ("distilbert", |f, _| encoders::distilbert(f)),
    ("modernbert", encoders::modernbert),
    ("vit", |f, _| images::vit(f)),
    ("t5", |f, _| pairs::t5(f, "relu")),
    ("mt5", |f, _| pairs::t5(f, "gated-gelu")),
    ("marian", |f, n| pairs::bart(f, &pairs::MARIAN, n)),
    ("m2m_100", |f, n| pairs::bart(f, &pairs::M2M_100, n)),
    ("bart", |f, n| pairs::bart(f, &pairs::BART, n)),
    ("mbart", |f, n| pairs::bart(f, &pairs::MBART, n)),
];

impl TransformerConfig {
    /// Reads a `config.json` by its `model_type`, with notes about what was left out.
    ///
    /// A setting that would change the numbers is followed, or it is an error; so is one that is not known.
    pub fn from_json(json: &str) -> Result<(Self, Vec<String>), Error> {
        let value: Value =
            serde_json::from_str(json).map_err(|e| Error::format("config", e.to_string()))?;
        let Value::Object(map) = value else {
            return Err(Error::format("config", "an object `{..}` is wanted"));
        };
        let (mut fields, mut notes) = (Fields::new(map), Vec::new());
        fields.only("quantization_config", &[])?;
        let mut family = fields.text("model_type")?.ok_or_else(|| missing("model_type"))?;
        if let Some(text) = text_part(&mut fields, &family, &mut notes)? {
            fields = text;
            family = fields.text("model_type")?.unwrap_or_else(|| "gemma3_text".into());
        }
        let reader = FAMILIES.iter().find(|(name, _)| *name == family);
        let Some((_, read)) = reader else {
            let names: Vec<_> = FAMILIES.iter().map(|(name, _)| *name).collect();
            let known = format!("{} are known", names.join(", "));
            return Err(Error::unsupported("model_type", &family, known));
        };
        let mut config = read(&mut fields, &mut notes)?;
        config.family = family;
        config.suppressed = suppressed(&mut fields, &mut notes)?;
        notes.extend(fields.finish()?);
        config.check()?;
        config.known_ids(&mut notes);
        Ok((config, notes))
    }

    /// Refuses sizes that make no sense, or no sense together.
    pub(in crate::files) fn check(&self) -> Result<(), Error> {
        for stack in self.stacks() {
            stack.check()?;
        }
        Ok(())
    }

    /// Encoder and decoder, those that there are.
    pub(crate) fn stacks(&self) -> impl Iterator<Item = &StackConfig> {
        self.encoder.iter().chain(&self.decoder)
    }

    /// Drops special tokens that the vocabulary does not have: fine-tuned models keep those of their origin.
    pub(crate) fn known_ids(&mut self, notes: &mut Vec<String>) {
        let vocab = self.decoder.as_ref().or(self.encoder.as_ref()).map_or(0, |s| s.vocab);
        let mut known = |name: &str, id: u32| {
            let known = usize::try_from(id).is_ok_and(|id| id < vocab);
            if !known {
                notes.push(format!("{name} = {id}: ignored, there are {vocab} tokens"));
            }
            known
        };
        self.bos = self.bos.filter(|id| known("bos_token_id", *id));
        self.pad = self.pad.filter(|id| known("pad_token_id", *id));
        self.forced_bos = self.forced_bos.filter(|id| known("forced_bos_token_id", *id));
        self.eos.retain(|id| known("eos_token_id", *id));
        self.suppressed.retain(|id| known("suppressed token", *id));
    }
}

impl StackConfig {
    fn check(&self) -> Result<(), Error> {
        let entries = match self.positions {
            AddedPositions::Learned { entries, .. } => Some(entries),
            _ => None,
        };
        within(&[
            ("vocab_size", Some(self.vocab)),
            ("hidden_size", Some(self.d_model)),
            ("number of layers", Some(self.layers.len())),
            ("number of heads", Some(self.heads.q)),
            ("number of key heads", Some(self.heads.kv)),
            ("head_dim", Some(self.head_dim)),
            ("feed-forward size", Some(self.d_ff)),
            ("token types", self.token_types),
            ("positions", entries),
            ("context", self.context),
            ("window", self.layers.iter().find_map(|layer| layer.window)),
        ])?;
        let Heads { q, kv } = self.heads;
        if q % kv != 0 {
            let why = format!("{q} of queries, {kv} of keys; the former must be a multiple");
            return Err(Error::format("heads", why));
        }
        let sines = matches!(self.positions, AddedPositions::Sinusoidal { .. });
        if sines && (self.d_model < 4 || !self.d_model.is_multiple_of(2)) {
            let why = format!("{}; it must be even for sines and cosines", self.d_model);
            return Err(Error::format("d_model", why));
        }
        let numbers = [
            ("norm eps", Some(self.norm.eps)),
            ("embedding scale", self.embedding_scale),
            ("scale of scores", self.scale),
            ("soft cap", self.softcap),
        ];
        for (name, number) in numbers {
            if let Some(number) = number.filter(|number| !(number.is_finite() && *number > 0.0)) {
                return Err(Error::format(name, format!("{number}; it must be above 0")));
            }
        }
        Ok(())
    }
}

/// The part of a model of images and text that is about text.
fn text_part(
    fields: &mut Fields,
    family: &str,
    notes: &mut Vec<String>,
) -> Result<Option<Fields>, Error> {
    if family != "gemma3" {
        return Ok(None);
    }
    let mut text = fields.part("text_config")?.ok_or_else(|| missing("text_config"))?;
    notes.push("gemma3: text only, images are left out".into());
    for name in ["architectures", "bos_token_id", "eos_token_id", "pad_token_id"] {
        if let Some(value) = fields.map.remove(name) {
            text.map.entry(name).or_insert(value);
        }
    }
    if let Some(tied) = fields.map.remove("tie_word_embeddings") {
        text.map.insert("tie_word_embeddings".into(), tied);
    }
    // Sizes that older versions left out are those of the class, which is that of no published model.
    for (name, value) in [("num_attention_heads", 8), ("num_key_value_heads", 4)] {
        text.map.entry(name).or_insert_with(|| value.into());
    }
    for (name, value) in [("vocab_size", 262_208), ("head_dim", 256)] {
        text.map.entry(name).or_insert_with(|| value.into());
    }
    Ok(Some(text))
}

/// Tokens that are never generated: lists of one each. A longer list is a sequence, which is not followed.
fn suppressed(fields: &mut Fields, notes: &mut Vec<String>) -> Result<Vec<u32>, Error> {
    let mut ids = fields.ids("suppress_tokens")?;
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let list = |value: &Value| value.as_array()?.iter().map(id).collect::<Option<Vec<u32>>>();
    let lists = |value: &Value| value.as_array()?.iter().map(list).collect::<Option<Vec<_>>>();
    let words = fields.read("bad_words_ids", "a list of lists of tokens", lists)?;
    for word in words.unwrap_or_default() {
        match word.as_slice() {
            [id] => ids.push(*id),
            _ => notes.push(format!("bad_words_ids: {word:?} is a sequence, ignored")),
        }
    }
    Ok(ids)
}

/// What the head of an architecture scores.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scores {
    /// There is none.
    Nothing,
    Tokens,
    Classes,
}

/// The head by the name of the architecture.
fn scores(fields: &mut Fields, unnamed: Scores, known: &[Scores]) -> Result<Scores, Error> {
    let Some(name) = fields.map.remove("architectures") else { return Ok(unnamed) };
    let Some(name) = name.get(0).and_then(Value::as_str) else { return Ok(unnamed) };
    let of_tokens = ["ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForPreTraining"];
    let of_both = ["ForConditionalGeneration", "MTModel"];
    let found = if of_tokens.iter().chain(&of_both).any(|ending| name.ends_with(ending)) {
        Some(Scores::Tokens)
    } else if name.ends_with("ForSequenceClassification") {
        Some(Scores::Classes)
    } else if name.ends_with("Model") {
        Some(Scores::Nothing)
    } else {
        None
    };
    found.filter(|scores| known.contains(scores)).ok_or_else(|| {
        let ending = |scores: &Scores| match scores {
            Scores::Nothing => "..Model",
            Scores::Tokens => "..ForCausalLM, ..ForMaskedLM, ..ForConditionalGeneration",
            Scores::Classes => "..ForSequenceClassification",
        };
        let known: Vec<_> = known.iter().map(ending).collect();
        Error::unsupported("architectures", &name, format!("{} are known", known.join(", ")))
    })
}

/// Names of classes, or their numbers.
fn labels(fields: &mut Fields) -> Result<Vec<String>, Error> {
    let unnamed = fields.optional_size("num_labels")?.unwrap_or(2).min(MAX_LAYERS);
    fields.map.remove("label2id");
    let Some(names) = fields.part("id2label")? else {
        return Ok((0..unnamed).map(|class| format!("LABEL_{class}")).collect());
    };
    let name = |class: usize| names.map.get(&class.to_string())?.as_str().map(str::to_owned);
    let all: Option<Vec<_>> = (0..names.map.len()).map(name).collect();
    all.filter(|all| !all.is_empty())
        .ok_or_else(|| Error::format("id2label", "names of classes 0, 1, 2, .. are wanted"))
}

/// Which layers have a window, if the configuration has them one by one.
fn sliding(fields: &mut Fields, layers: usize) -> Result<Option<Vec<bool>>, Error> {
    if fields.map.get("layer_types").is_none_or(Value::is_null) {
        return Ok(None);
    }
    let kinds = fields.texts("layer_types")?;
    if kinds.len() != layers {
        let why = format!("{} of them; the model has {layers} layers", kinds.len());
        return Err(Error::format("layer_types", why));
    }
    let kind = |kind: &String| match kind.as_str() {
        "full_attention" => Ok(false),
        "sliding_attention" => Ok(true),
        other => {
            let known = "full_attention and sliding_attention are known";
            Err(Error::unsupported("layer_types", &other, known))
        }
    };
    kinds.iter().map(kind).collect::<Result<_, _>>().map(Some)
}

/// A number of layers that is believed.
fn layer_count(fields: &mut Fields, name: &str) -> Result<usize, Error> {
    let layers = fields.size(name)?;
    let why = || Error::format(name, format!("{layers}; at most {MAX_LAYERS} are read"));
    if layers <= MAX_LAYERS { Ok(layers) } else { Err(why()) }
}

/// Features of a head: what is said, or the equal share.
fn head_dim(said: Option<usize>, d_model: usize, heads: usize) -> Result<usize, Error> {
    let dim = said.map_or_else(|| Config::head_dim(d_model, heads), Ok)?;
    let why = || Error::format("head_dim", format!("{dim}; at most {MAX_HEAD_DIM} is read"));
    if dim <= MAX_HEAD_DIM { Ok(dim) } else { Err(why()) }
}

/// The square root of a size.
fn root(size: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "sizes are below 2^53")]
    let size = size.min(MAX_SIZE) as f64;
    size.sqrt()
}

/// Which tokens have a part of their own.
fn with_ids(fields: &mut Fields, config: TransformerConfig) -> Result<TransformerConfig, Error> {
    let eos = fields.ids("eos_token_id")?;
    Ok(TransformerConfig {
        bos: fields.id("bos_token_id")?.or(config.bos),
        eos: if eos.is_empty() { config.eos } else { eos },
        pad: fields.id("pad_token_id")?.or(config.pad),
        ..config
    })
}

/// A model of one stack, or of none yet.
fn model(head: Option<HeadConfig>) -> TransformerConfig {
    TransformerConfig {
        family: String::new(),
        encoder: None,
        decoder: None,
        head,
        pooling: Pooling::default(),
        labels: Vec::new(),
        bos: None,
        eos: Vec::new(),
        pad: None,
        suppressed: Vec::new(),
        forced_bos: None,
        shared_embedding: false,
    }
}

/// A stack with biases and layer norms everywhere, as BERT and GPT-2 have them, and without layers yet.
fn biased(vocab: usize, d_model: usize, heads: usize, head_dim: usize) -> StackConfig {
    StackConfig {
        vocab,
        patches: None,
        d_model,
        embedding_scale: None,
        embedding_norm: false,
        token_types: None,
        positions: AddedPositions::None,
        context: None,
        heads: Heads { q: heads, kv: heads },
        head_dim,
        d_ff: d_model.saturating_mul(4),
        activation: super::Activation::Gelu,
        gated: false,
        norm: NormConfig { rms: false, bias: true, eps: 1e-5, plus_one: false },
        order: NormOrder::Pre,
        final_norm: true,
        qk_norm: None,
        qkv_bias: true,
        out_bias: true,
        feed_forward_bias: true,
        scale: None,
        softcap: None,
        relative: None,
        residual_scale: None,
        layers: Vec::new(),
    }
}

#[cfg(test)]
mod tests;
