//! What a model is: its sizes and settings, in our own words.
//!
//! Each source is read strictly: a setting that would change the numbers and that nothing here follows is an error, and so is one
//! that is not known at all.

mod fields;
mod foreign;
mod gguf;
mod huggingface;
mod images;
mod own;
mod recurrent;
mod transformer;

pub use images::{ImageProcessorConfig, Resample};
pub use recurrent::{AttentionScore, HanConfig, LuongScore, Seq2SeqConfig};
pub use transformer::{
    AddedPositions, DenseActivation, DenseConfig, HeadConfig, LayerConfig, NormConfig, NormOrder,
    PatchConfig, Pooling, QkNorm, RelativeConfig, RopeConfig, StackConfig, TransformerConfig,
};

use super::weights::Weights;
use crate::error::Error;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What kind of model it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Architecture {
    /// A decoder with rotary positions, root-mean-square norms and gated feed-forward nets.
    Llama,
    /// A decoder with learned positions.
    Gpt2,
    /// An encoder with learned positions, which norms what it has added.
    Bert,
    /// An encoder and a decoder that looks at it.
    Transformer,
    /// GRUs before and after a multi-head attention: e2k.
    E2k,
    /// A bidirectional GRU encoder and a GRU decoder with attention (Bahdanau, Luong) or without.
    Seq2Seq,
    /// Words make sentences, and sentences a document, which has a class.
    Han,
}

impl Architecture {
    /// Its name in a configuration.
    #[must_use]
    pub fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// How many heads there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Heads {
    /// Of queries.
    pub q: usize,
    /// Of keys and values; each serves equally many of queries.
    pub kv: usize,
}

/// Which features form the pairs of a rotary or sinusoidal position encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PairLayout {
    /// First and second half: `i` and `i + dim / 2`.
    HalfSplit,
    /// Adjacent features: `2i` and `2i + 1`.
    Interleaved,
}

/// How a model knows where a token stands.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Positions {
    /// No position encoding: recurrent models read tokens in order.
    None,
    /// A vector for each position is added to the token's; there are `context` of them.
    Learned,
    /// Queries and keys are turned by their position.
    Rotary {
        /// The base of the angles: pair `i` turns by `theta^(-2i / head_dim)` each step.
        theta: f64,
        /// What is turned.
        pairs: PairLayout,
    },
    /// Sines and cosines of the position are added to the token.
    Sinusoidal {
        /// Where they stand: `HalfSplit` has all sines before all cosines.
        pairs: PairLayout,
        /// The number of the first position.
        first: usize,
        /// Whether the slowest of the `n` pairs has frequency `1 / 10000`, as in tensor2tensor: `10000^(-i / (n - 1))`. The paper has
        /// `10000^(-i / n)`.
        inclusive: bool,
    },
}

/// What stands between the two maps of a feed-forward net.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Activation {
    /// `max(x, 0)`
    Relu,
    /// `x Φ(x)` with the error function itself.
    Gelu,
    /// The same by a hyperbolic tangent, as GPT-2 has it.
    GeluTanh,
    /// `x sigmoid(x)`, of the gate if there is one.
    Silu,
}

/// What a model is. Where an architecture has no such thing, there is none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// What kind of model.
    pub architecture: Architecture,
    /// Features of a token.
    pub d_model: usize,
    /// Blocks; of the encoder, if there is a decoder beside it.
    pub n_layers: usize,
    /// Blocks of the decoder, if there is an encoder beside it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoder_layers: Option<usize>,
    /// Heads of each attention.
    pub heads: Heads,
    /// Features of a head.
    pub head_dim: usize,
    /// Features between the two maps of a feed-forward net.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub d_ff: Option<usize>,
    /// Tokens; of the source, if there is a target.
    pub vocab: usize,
    /// Tokens of the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_vocab: Option<usize>,
    /// Number of token types (segments), as the two sentences of BERT.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_types: Option<usize>,
    /// The most positions that it was made for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<usize>,
    /// What is added to the variance in a norm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norm_eps: Option<f64>,
    /// Whether a block norms what it reads. If not, it norms what it has added.
    pub pre_norm: bool,
    /// How it knows where a token stands.
    pub positions: Positions,
    /// What stands within a feed-forward net.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activation: Option<Activation>,
    /// Whether `q k v out` have biases.
    pub attention_bias: bool,
    /// Whether `gate up down` have biases.
    pub feed_forward_bias: bool,
    /// Whether the output projection shares the embedding matrix; that of the target, if there is one.
    pub tie_embeddings: bool,
    /// Whether source and target share one vocabulary and one embedding matrix.
    #[serde(default, skip_serializing_if = "is_false")]
    pub shared_vocabulary: bool,
    /// What embeddings are multiplied by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding_scale: Option<f64>,
    /// What a text begins with; of the target, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos: Option<u32>,
    /// What a text ends with, any of them; of the target, if there is one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub eos: Vec<u32>,
    /// What fills up a batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad: Option<u32>,
    /// How a decoder is asked for a translation: `{source}` stands for the text, as in `{source}<2en>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub translate: Option<String>,
    /// What classes are called.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub labels: Vec<String>,
    /// The sizes of a `seq2seq`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq2seq: Option<Seq2SeqConfig>,
    /// The sizes of a `han`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub han: Option<HanConfig>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_false(x: &bool) -> bool {
    !x
}

/// The largest size that is believed: beyond any model, and small enough to multiply two of.
const MAX_SIZE: usize = 1 << 28;

/// What our own files say they are.
const FORMAT: &str = "regard";
/// The format that is written, and the newest that is read.
const VERSION: u64 = 1;

impl Config {
    /// The least model of its kind: every size is 1, and every option left out. For
    /// `Config { d_model: 256, .., ..Config::of(architecture) }`.
    #[must_use]
    pub fn of(architecture: Architecture) -> Self {
        Self {
            architecture,
            d_model: 1,
            n_layers: 1,
            decoder_layers: None,
            heads: Heads { q: 1, kv: 1 },
            head_dim: 1,
            d_ff: None,
            vocab: 1,
            target_vocab: None,
            token_types: None,
            context: None,
            norm_eps: None,
            pre_norm: false,
            positions: Positions::None,
            activation: None,
            attention_bias: false,
            feed_forward_bias: false,
            tie_embeddings: false,
            shared_vocabulary: false,
            embedding_scale: None,
            bos: None,
            eos: Vec::new(),
            pad: None,
            translate: None,
            labels: Vec::new(),
            seq2seq: None,
            han: None,
        }
    }

    /// Reads a `config.json`: our own, or that of a model of Hugging Face by its `model_type`.
    pub fn from_json(json: &str) -> Result<Self, Error> {
        let value: Value =
            serde_json::from_str(json).map_err(|e| Error::format("config", e.to_string()))?;
        let Value::Object(mut map) = value else {
            return Err(Error::format("config", "an object `{..}` is wanted"));
        };
        let config = match map.remove("format") {
            Some(Value::String(format)) if format == FORMAT => own(map)?,
            Some(other) => {
                return Err(Error::unsupported("format", &other, format!("`{FORMAT}` is known")));
            }
            None => foreign::read(map)?,
        };
        config.check()?;
        Ok(config)
    }

    /// Our own format, which [`Config::from_json`] reads.
    pub fn to_json(&self) -> Result<String, Error> {
        let wrong = |e: serde_json::Error| Error::format("config", e.to_string());
        let mut value = serde_json::to_value(self).map_err(wrong)?;
        value["format"] = FORMAT.into();
        value["version"] = VERSION.into();
        serde_json::to_string_pretty(&value).map_err(wrong)
    }

    /// Reads what a model of e2k says of itself: it has no configuration but the shapes of its tensors, under their own names.
    pub fn from_e2k(weights: &Weights) -> Result<Self, Error> {
        let config = foreign::e2k(weights)?;
        config.check()?;
        Ok(config)
    }

    /// Refuses sizes that make no sense, or no sense together.
    pub fn check(&self) -> Result<(), Error> {
        let sizes = [
            ("d_model", Some(self.d_model)),
            ("n_layers", Some(self.n_layers)),
            ("decoder_layers", self.decoder_layers),
            ("heads.q", Some(self.heads.q)),
            ("heads.kv", Some(self.heads.kv)),
            ("head_dim", Some(self.head_dim)),
            ("d_ff", self.d_ff),
            ("vocab", Some(self.vocab)),
            ("target_vocab", self.target_vocab),
            ("token_types", self.token_types),
            ("context", self.context),
        ];
        within(&sizes)?;
        let Heads { q, kv } = self.heads;
        if q % kv != 0 {
            let why = format!("{q} of queries, {kv} of keys; the former must be a multiple");
            return Err(Error::format("heads", why));
        }
        let theta =
            if let Positions::Rotary { theta, .. } = self.positions { Some(theta) } else { None };
        let numbers = [
            ("norm_eps", self.norm_eps),
            ("theta", theta),
            ("embedding_scale", self.embedding_scale),
        ];
        for (name, number) in numbers {
            if let Some(number) = number.filter(|number| !(number.is_finite() && *number > 0.0)) {
                return Err(Error::format(name, format!("{number}; it must be above 0")));
            }
        }
        if theta.is_some() && !self.head_dim.is_multiple_of(2) {
            let why = format!("{}; it must be even where pairs are turned", self.head_dim);
            return Err(Error::format("head_dim", why));
        }
        if matches!(self.positions, Positions::Sinusoidal { .. }) && !self.d_model.is_multiple_of(2)
        {
            let why = format!("{}; it must be even for sines and cosines", self.d_model);
            return Err(Error::format("d_model", why));
        }
        if let Some(target) =
            self.target_vocab.filter(|n| self.shared_vocabulary && *n != self.vocab)
        {
            let why =
                format!("{target}, vocab is {}; a shared vocabulary has one size", self.vocab);
            return Err(Error::format("target_vocab", why));
        }
        self.check_parts()?;
        let last = self.target_vocab.unwrap_or(self.vocab);
        let ids = self.bos.iter().chain(&self.eos).chain(&self.pad);
        if let Some(id) = ids.copied().find(|id| usize::try_from(*id).is_ok_and(|id| id >= last)) {
            return Err(Error::format("bos, eos or pad", format!("{id}; there are {last} tokens")));
        }
        Ok(())
    }

    /// Holds the sizes of recurrent models, the labels and the template against the rest.
    fn check_parts(&self) -> Result<(), Error> {
        let same = |field: &str, of_part: usize, found: usize| {
            let why = format!("{found}, its own sizes say {of_part}; they must be equal");
            if of_part == found { Ok(()) } else { Err(Error::format(field, why)) }
        };
        if let Some(sizes) = self.seq2seq {
            within(&[
                ("embedding", Some(sizes.embedding)),
                ("encoder_hidden", Some(sizes.encoder_hidden)),
                ("decoder_hidden", Some(sizes.decoder_hidden)),
                ("attention_hidden", sizes.attention_hidden),
            ])?;
            sizes.luong()?;
            same("vocab", sizes.source_vocab, self.vocab)?;
            same("target_vocab", sizes.target_vocab, self.target_vocab.unwrap_or(self.vocab))?;
        }
        if let Some(sizes) = self.han {
            within(&[
                ("embedding", Some(sizes.embedding)),
                ("word_hidden", Some(sizes.word_hidden)),
                ("word_attention", Some(sizes.word_attention)),
                ("sentence_hidden", Some(sizes.sentence_hidden)),
                ("sentence_attention", Some(sizes.sentence_attention)),
                ("classes", Some(sizes.classes)),
            ])?;
            same("vocab", sizes.vocab, self.vocab)?;
            if !self.labels.is_empty() {
                same("labels", sizes.classes, self.labels.len())?;
            }
        }
        match &self.translate {
            Some(template) if template.matches("{source}").count() != 1 => Err(Error::format(
                "translate",
                format!("`{template}`; it must have one {{source}}"),
            )),
            _ => Ok(()),
        }
    }

    /// How the whole width is divided among heads. An error if it does not come out even.
    fn head_dim(d_model: usize, heads: usize) -> Result<usize, Error> {
        if heads == 0 || !d_model.is_multiple_of(heads) {
            let why = format!("{d_model} features do not divide among {heads}");
            return Err(Error::format("heads", why));
        }
        Ok(d_model / heads)
    }
}

/// Refuses sizes of nothing, and those that are beyond belief.
fn within(sizes: &[(&str, Option<usize>)]) -> Result<(), Error> {
    for (name, size) in sizes {
        if let Some(size) = size.filter(|size| !(1..=MAX_SIZE).contains(size)) {
            let why = format!("{size}; it must be from 1 to {MAX_SIZE}");
            return Err(Error::format(*name, why));
        }
    }
    Ok(())
}

fn own(mut map: serde_json::Map<String, Value>) -> Result<Config, Error> {
    let version = map.remove("version").unwrap_or_default();
    if version.as_u64().is_none_or(|version| version > VERSION) {
        let known = format!("this program reads up to {VERSION}");
        return Err(Error::unsupported("version", &version, known));
    }
    serde_json::from_value(Value::Object(map)).map_err(|e| Error::format("config", e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config {
            architecture: Architecture::Llama,
            d_model: 64,
            n_layers: 5,
            decoder_layers: None,
            heads: Heads { q: 8, kv: 4 },
            head_dim: 8,
            d_ff: Some(172),
            vocab: 512,
            target_vocab: None,
            token_types: None,
            context: Some(512),
            norm_eps: Some(1e-5),
            pre_norm: true,
            positions: Positions::Rotary { theta: 1e4, pairs: PairLayout::Interleaved },
            activation: Some(Activation::Silu),
            attention_bias: false,
            feed_forward_bias: false,
            tie_embeddings: true,
            embedding_scale: None,
            bos: Some(1),
            eos: vec![2],
            pad: None,
            ..Config::of(Architecture::Llama)
        }
    }

    #[test]
    fn our_own_format_comes_back_as_it_was() {
        let json = config().to_json().unwrap();
        assert!(json.contains(r#""format": "regard""#), "{json}");
        assert_eq!(Config::from_json(&json).unwrap(), config());
        let unknown = json.replace("d_ff", "d_fff");
        assert!(Config::from_json(&unknown).unwrap_err().to_string().contains("d_fff"));
        let newer = json.replace(r#""version": 1"#, r#""version": 2"#);
        assert!(Config::from_json(&newer).unwrap_err().to_string().contains("version = 2"));
    }

    #[test]
    fn sizes_that_make_no_sense_are_refused() {
        let refused = |change: &dyn Fn(&mut Config)| {
            let mut config = config();
            change(&mut config);
            config.check().unwrap_err().to_string()
        };
        assert!(refused(&|c| c.vocab = 0).contains("vocab"));
        assert!(refused(&|c| c.context = Some(usize::MAX)).contains("context"));
        assert!(refused(&|c| c.heads.kv = 3).contains("multiple"));
        assert!(refused(&|c| c.norm_eps = Some(f64::NAN)).contains("above 0"));
        assert!(refused(&|c| c.head_dim = 7).contains("even"));
        assert!(refused(&|c| c.eos = vec![512]).contains("512 tokens"));
        assert!(
            refused(&|c| (c.shared_vocabulary, c.target_vocab) = (true, Some(9)))
                .contains("9, vocab is 512")
        );
        assert!(refused(&|c| c.translate = Some("<2en>".into())).contains("one {source}"));
    }

    #[test]
    fn recurrent_models_have_their_own_sizes() {
        let sizes = Seq2SeqConfig {
            embedding: 4,
            encoder_hidden: 5,
            decoder_hidden: 6,
            attention_hidden: None,
            attention_score: AttentionScore::Additive,
            source_vocab: 7,
            target_vocab: 8,
        };
        let config = Config::seq2seq(sizes);
        assert_eq!(Config::from_json(&config.to_json().unwrap()).unwrap(), config);
        let other = Config { target_vocab: Some(9), ..config };
        assert!(other.check().unwrap_err().to_string().contains("9, its own sizes say 8"));
    }

    #[test]
    fn a_score_of_luong_is_a_word_of_the_file_and_is_held_against_the_sizes() {
        let sizes = Seq2SeqConfig {
            embedding: 4,
            encoder_hidden: 5,
            decoder_hidden: 10,
            attention_hidden: None,
            attention_score: AttentionScore::Additive,
            source_vocab: 7,
            target_vocab: 8,
        };
        let of = |attention_score, attention_hidden| {
            let sizes = Seq2SeqConfig { attention_score, attention_hidden, ..sizes };
            Config::seq2seq(sizes)
        };
        // Files from before there was a choice do not have the key.
        let json = of(AttentionScore::Additive, Some(3)).to_json().unwrap();
        assert!(!json.contains("attention_score"), "{json}");
        for (score, hidden, word) in [
            (AttentionScore::Dot, None, "dot"),
            (AttentionScore::General, None, "general"),
            (AttentionScore::Concat, Some(3), "concat"),
        ] {
            let config = of(score, hidden);
            let json = config.to_json().unwrap();
            assert!(json.contains(&format!(r#""attention_score": "{word}""#)), "{json}");
            assert_eq!(Config::from_json(&json).unwrap(), config);
            let unknown = json.replace(&format!(r#""{word}""#), r#""cosine""#);
            let error = Config::from_json(&unknown).unwrap_err().to_string();
            assert!(error.contains("cosine") && error.contains("`general`"), "{error}");
            // The other way about of what it needs.
            let hidden = if hidden.is_some() { None } else { Some(3) };
            let error = of(score, hidden).check().unwrap_err().to_string();
            assert!(error.contains("attention_hidden") && error.contains(word), "{error}");
        }
        let uneven =
            Seq2SeqConfig { decoder_hidden: 6, attention_score: AttentionScore::Dot, ..sizes };
        let error = Config::seq2seq(uneven).check().unwrap_err().to_string();
        for part in ["decoder_hidden", "6", "10 features", "`general`"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
