//! Transformers of GGUF files as data.

use super::super::{
    Activation, AddedPositions, Config, HeadConfig, Heads, LayerConfig, NormConfig, NormOrder,
    PairLayout, Pooling, QkNorm, RopeConfig, StackConfig, TransformerConfig,
};
use super::{names, round};
use crate::error::Error;
use crate::files::gguf::{Gguf, Metadata, Numbers, Value};
use crate::files::weights::Weights;
use std::f64::consts::TAU;

/// What is read of an architecture, or says nothing about the numbers.
const READ: &[&str] = &[
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.value_length",
    "attn_logit_softcapping",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "final_logit_softcapping",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
    "use_parallel_residual",
    "vocab_size",
];

/// What is fine if it has this value.
const DEFAULTS: &[(&str, f64)] = &[
    ("attention.causal", 1.0),
    ("attention.clamp_kqv", 0.0),
    ("attention.max_alibi_bias", 0.0),
    ("expert_count", 0.0),
    ("expert_used_count", 0.0),
    ("logit_scale", 1.0),
    ("rope.scaling.yarn_attn_factor", 1.0),
    ("rope.scaling.yarn_ext_factor", 1.0),
];

/// Tokens that end a turn of a conversation, by the names that models give them. llama.cpp ends a text by them too.
const TURN_ENDS: &[&str] =
    &["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"];

/// What an architecture is, apart from its sizes.
struct Family {
    rms: bool,
    order: NormOrder,
    gated: bool,
    activation: Activation,
    qk_norm: Option<QkNorm>,
    /// None: positions are learned.
    pairs: Option<PairLayout>,
    /// Whether embeddings are multiplied by the square root of their width.
    scaled: bool,
}

fn family(architecture: &str) -> Option<Family> {
    let llama = Family {
        rms: true,
        order: NormOrder::Pre,
        gated: true,
        activation: Activation::Silu,
        qk_norm: None,
        pairs: Some(PairLayout::HalfSplit),
        scaled: false,
    };
    let gemma = Family { activation: Activation::GeluTanh, scaled: true, ..llama };
    let gpt2 = Family { rms: false, gated: false, activation: Activation::GeluTanh, ..llama };
    Some(match architecture {
        // llama.cpp sorts the rows of queries and keys for this when it writes a Llama.
        "llama" => Family { pairs: Some(PairLayout::Interleaved), ..llama },
        "qwen2" | "phi3" => llama,
        "qwen3" => Family { qk_norm: Some(QkNorm::Head), ..llama },
        "gemma" => gemma,
        "gemma2" => Family { order: NormOrder::PreAndPost, ..gemma },
        "gemma3" => Family { order: NormOrder::PreAndPost, qk_norm: Some(QkNorm::Head), ..gemma },
        "gpt2" => Family { pairs: None, ..gpt2 },
        "gptneox" => Family { activation: Activation::Gelu, ..gpt2 },
        _ => return None,
    })
}

/// The entries of an architecture.
struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: &'a str,
}

impl Keys<'_> {
    fn name(&self, field: &str) -> String {
        format!("{}.{field}", self.architecture)
    }

    fn size(&self, field: &str) -> Result<Option<usize>, Error> {
        super::size(self.metadata, &self.name(field))
    }

    fn needed(&self, field: &str) -> Result<usize, Error> {
        self.size(field)?.ok_or_else(|| Error::format(self.name(field), "missing in the file"))
    }

    fn number(&self, field: &str) -> Result<Option<f64>, Error> {
        let number = self.metadata.number(&self.name(field))?.map(round);
        match number.filter(|x| !x.is_finite()) {
            Some(x) => Err(Error::format(self.name(field), format!("{x}; it must be finite"))),
            None => Ok(number),
        }
    }

    fn positive(&self, field: &str, default: f64) -> Result<f64, Error> {
        let number = self.number(field)?.unwrap_or(default);
        let why = || Error::format(self.name(field), format!("{number}; it must be above 0"));
        if number > 0.0 { Ok(number) } else { Err(why()) }
    }

    /// A cap, unless it is 0.
    fn cap(&self, field: &str, default: Option<f64>) -> Result<Option<f64>, Error> {
        Ok(self.number(field)?.or(default).filter(|cap| *cap != 0.0))
    }

    /// A size that is one for all layers, though it may be written as a list.
    fn uniform(&self, field: &str) -> Result<Option<usize>, Error> {
        let name = self.name(field);
        let Some(Value::Numbers(list)) = self.metadata.get(&name) else { return self.size(field) };
        let mut sizes = list.iter();
        let first = sizes.next();
        if sizes.any(|size| Some(size) != first) {
            return Err(Error::unsupported(name, &"a list", "the same for all layers is known"));
        }
        let whole = match first {
            Some(Value::Unsigned(n)) => usize::try_from(n).ok(),
            Some(Value::Signed(n)) => usize::try_from(n).ok(),
            _ => None,
        };
        whole.map(Some).ok_or_else(|| Error::format(name, "sizes are wanted"))
    }

    fn refuse_unknown(&self) -> Result<(), Error> {
        let prefix = self.name("");
        for (name, value) in &self.metadata.values {
            let Some(field) = name.strip_prefix(&prefix) else { continue };
            let default = DEFAULTS.iter().find(|(known, _)| *known == field).map(|(_, x)| *x);
            #[expect(clippy::cast_precision_loss, reason = "held against small numbers")]
            let number = match value {
                Value::Bool(on) => Some(f64::from(u8::from(*on))),
                Value::Float(x) => Some(*x),
                Value::Unsigned(n) => Some(*n as f64),
                Value::Signed(n) => Some(*n as f64),
                _ => None,
            };
            if !READ.contains(&field) && (default.is_none() || default != number) {
                return Err(Error::unsupported(name, value, "nothing here follows it"));
            }
        }
        Ok(())
    }
}

impl TransformerConfig {
    /// Reads what a GGUF file says of itself: its settings, the shapes of its tensors, and those that are factors of frequencies.
    /// With notes on what is followed in part.
    pub fn from_gguf(file: &Gguf) -> Result<(Self, Vec<String>), Error> {
        let architecture = file.metadata.text("general.architecture")?.unwrap_or("nothing");
        let Some(family) = family(architecture) else {
            let known = "llama, qwen2, qwen3, gemma, gemma2, gemma3, phi3, gpt2, gptneox are known";
            return Err(Error::unsupported("general.architecture", &architecture, known));
        };
        let keys = Keys { metadata: &file.metadata, architecture };
        keys.refuse_unknown()?;
        let mut notes = Vec::new();
        let stack = stack(file, &keys, &family, &mut notes)?;
        let final_cap = match architecture {
            "gemma2" => keys.cap("final_logit_softcapping", Some(30.0))?,
            _ => keys.cap("final_logit_softcapping", None)?,
        };
        let has = |name: &str| file.weights.shape(name).is_some();
        let head = HeadConfig {
            tied: !has("output.weight"),
            bias: has("output.bias"),
            dense: None,
            scale: None,
            softcap: final_cap,
        };
        let id = |name: &str| {
            let name = format!("tokenizer.ggml.{name}_token_id");
            let id = file.metadata.whole(&name)?;
            let id = id.map(|id| u32::try_from(id).map_err(|e| Error::format(name, e.to_string())));
            id.transpose()
        };
        let mut config = Self {
            family: architecture.into(),
            encoder: None,
            decoder: Some(stack),
            head: Some(head),
            pooling: Pooling::default(),
            labels: Vec::new(),
            bos: id("bos")?,
            eos: ends(&file.metadata, [id("eos")?, id("eot")?, id("eom")?])?,
            pad: id("padding")?,
            suppressed: Vec::new(),
            forced_bos: None,
            shared_embedding: false,
        };
        config.check()?;
        config.known_ids(&mut notes);
        Ok((config, notes))
    }
}

impl Gguf {
    /// The configuration, the tensors under our names, exactly those of [`TransformerConfig::tensors`], and notes.
    pub fn transformer(self) -> Result<(TransformerConfig, Weights, Vec<String>), Error> {
        let (config, notes) = TransformerConfig::from_gguf(&self)?;
        let weights = self.weights.named_as(&names::names(&config))?;
        config.fits(&weights)?;
        Ok((config, weights, notes))
    }
}

/// Tokens that end a text: those that the file names, and special ones that end a turn by their names.
fn ends(metadata: &Metadata, named: [Option<u32>; 3]) -> Result<Vec<u32>, Error> {
    let mut ends: Vec<u32> = named.into_iter().flatten().collect();
    let tokens = metadata.texts("tokenizer.ggml.tokens")?.unwrap_or_default();
    let kinds = match metadata.get("tokenizer.ggml.token_type") {
        Some(Value::Numbers(kinds)) => Some(kinds),
        _ => None,
    };
    // Special tokens, and those that a user has added.
    let special = [3, 4].map(|kind| [Value::Signed(kind), Value::Unsigned(kind.unsigned_abs())]);
    let kinds = kinds.into_iter().flat_map(Numbers::iter);
    for ((id, token), kind) in (0..).zip(tokens).zip(kinds) {
        if TURN_ENDS.contains(&token) && special.as_flattened().contains(&kind) {
            ends.push(id);
        }
    }
    ends.sort_unstable();
    ends.dedup();
    Ok(ends)
}

fn stack(
    file: &Gguf,
    keys: &Keys<'_>,
    family: &Family,
    notes: &mut Vec<String>,
) -> Result<StackConfig, Error> {
    let d_model = keys.needed("embedding_length")?;
    let missing = |field| Error::format(keys.name(field), "missing in the file");
    let uniform = |field| keys.uniform(field)?.ok_or_else(|| missing(field));
    let q = uniform("attention.head_count")?;
    let kv = keys.uniform("attention.head_count_kv")?.unwrap_or(q);
    let key = keys.size("attention.key_length")?;
    let head_dim = key.map_or_else(|| Config::head_dim(d_model, q), Ok)?;
    let value = "attention.value_length";
    if let Some(other) = keys.size(value)?.filter(|other| *other != head_dim) {
        return Err(Error::unsupported(keys.name(value), &other, format!("{head_dim} is known")));
    }
    let (eps, bias) = if family.rms {
        ("attention.layer_norm_rms_epsilon", false)
    } else {
        ("attention.layer_norm_epsilon", true)
    };
    let eps = keys.number(eps)?.ok_or_else(|| missing(eps))?;
    let mut context = keys.size("context_length")?;
    let heads = Heads { q, kv };
    // Whatever is allocated by layer and feature follows from tensors that are there.
    let layers = layers_there(file, keys.needed("block_count")?, heads, head_dim)?;
    let layers = layers_of(file, keys, family, (layers, head_dim), &mut context, notes)?;
    let shape = |name: &str| file.weights.shape(name).ok_or_else(|| file.weights.missing(name));
    let vocab = shape("token_embd.weight")?.first().copied().unwrap_or_default();
    let positions = match family.pairs {
        Some(_) => AddedPositions::None,
        None => {
            let entries = shape("position_embd.weight")?.first().copied().unwrap_or_default();
            AddedPositions::Learned { entries, offset: 0 }
        }
    };
    let parallel = || keys.metadata.bool(&keys.name("use_parallel_residual"));
    let order = match keys.architecture {
        "gptneox" if parallel()?.unwrap_or(true) => NormOrder::Parallel,
        _ => family.order,
    };
    let has = |name: &str| file.weights.shape(&format!("blk.0.{name}")).is_some();
    Ok(StackConfig {
        vocab,
        patches: None,
        d_model,
        embedding_scale: family.scaled.then(|| real(d_model).sqrt()),
        embedding_norm: false,
        token_types: None,
        positions,
        context,
        heads,
        head_dim,
        d_ff: uniform("feed_forward_length")?,
        activation: family.activation,
        gated: family.gated,
        // The converter of llama.cpp has added 1 to the weights of Gemma.
        norm: NormConfig { rms: family.rms, bias, eps, plus_one: false },
        order,
        final_norm: true,
        qk_norm: family.qk_norm,
        qkv_bias: has("attn_q.bias") || has("attn_qkv.bias"),
        out_bias: has("attn_output.bias"),
        feed_forward_bias: has("ffn_up.bias"),
        scale: scale(keys.architecture, layers.len(), d_model, q),
        softcap: match keys.architecture {
            "gemma2" => keys.cap("attn_logit_softcapping", Some(50.0))?,
            _ => keys.cap("attn_logit_softcapping", None)?,
        },
        relative: None,
        residual_scale: None,
        layers,
    })
}

/// Gemma 2 and 3 of 27 billion parameters scale by the width of all heads; a GGUF says so by the number of layers alone.
fn scale(architecture: &str, layers: usize, d_model: usize, heads: usize) -> Option<f64> {
    let large = matches!((architecture, layers), ("gemma2", 46) | ("gemma3", 62));
    large.then(|| (real(heads) / real(d_model)).sqrt())
}

/// The number of layers, each of which has its queries.
fn layers_there(file: &Gguf, layers: usize, heads: Heads, dim: usize) -> Result<usize, Error> {
    let rows = |heads: usize| heads.checked_mul(dim);
    let q = rows(heads.q);
    let fused = heads.kv.checked_mul(2).and_then(|n| n.checked_add(heads.q)).and_then(rows);
    for layer in 0..layers {
        let name = format!("blk.{layer}.attn_q.weight");
        let own = file.weights.shape(&name);
        let all = file.weights.shape(&format!("blk.{layer}.attn_qkv.weight"));
        let (there, wanted) = if own.is_some() { (own, q) } else { (all, fused) };
        let there = there.ok_or_else(|| file.weights.missing(&name))?;
        if there.first().copied() != wanted {
            let why = format!("{there:?}; {} heads of {dim} features are claimed", heads.q);
            return Err(Error::format(format!("tensor `{name}`"), why));
        }
    }
    Ok(layers)
}

/// Windows and rotations.
fn layers_of(
    file: &Gguf,
    keys: &Keys<'_>,
    family: &Family,
    (layers, head_dim): (usize, usize),
    context: &mut Option<usize>,
    notes: &mut Vec<String>,
) -> Result<Vec<LayerConfig>, Error> {
    let windows = windows(keys, layers, *context)?;
    let Some(pairs) = family.pairs else {
        let layer = |window| LayerConfig { window, ..LayerConfig::default() };
        return Ok(windows.into_iter().map(layer).collect());
    };
    let dim = keys.size("rope.dimension_count")?.unwrap_or(head_dim);
    if dim > head_dim || !dim.is_multiple_of(2) || dim == 0 {
        let why = format!("{dim} of {head_dim} features; rotated are pairs");
        return Err(Error::format(keys.name("rope.dimension_count"), why));
    }
    let base = keys.positive("rope.freq_base", 1e4)?;
    let rope = |frequencies, magnitude| RopeConfig { dim, pairs, frequencies, magnitude };
    let (scaled, magnitude) = scaled(file, keys, (dim, base), context, notes)?;
    let wide = rope(scaled, magnitude);
    // Gemma 3 rotates by another base within windows, and does not scale there.
    let narrow = if keys.architecture == "gemma3" {
        rope(frequencies(dim, keys.positive("rope.freq_base_swa", 1e4)?), 1.0)
    } else {
        let name = "rope.freq_base_swa";
        if let Some(other) = keys.number(name)?.filter(|other| *other != base) {
            return Err(Error::unsupported(keys.name(name), &other, "gemma3 has one"));
        }
        wide.clone()
    };
    let gemma3 = keys.architecture == "gemma3";
    let layer = |window: Option<usize>| {
        let rope = if gemma3 && window.is_some() { narrow.clone() } else { wide.clone() };
        LayerConfig { window, rope: Some(rope), ..LayerConfig::default() }
    };
    Ok(windows.into_iter().map(layer).collect())
}

/// The window of each layer.
fn windows(
    keys: &Keys<'_>,
    layers: usize,
    context: Option<usize>,
) -> Result<Vec<Option<usize>>, Error> {
    let (window, pattern) = ("attention.sliding_window", "attention.sliding_window_pattern");
    let size = keys.size(window)?.filter(|size| *size > 0);
    let (size, period) = match keys.architecture {
        "gemma2" => (Some(size.unwrap_or(4096)), 2),
        "gemma3" => (size, 6),
        "phi3" => (size, 0),
        _ => {
            // Nothing says which layers it is for; beyond the context it is for none.
            if let Some(size) = size.filter(|size| context.is_none_or(|n| *size < n)) {
                let known = "gemma2, gemma3 and phi3 have windows";
                return Err(Error::unsupported(keys.name(window), &size, known));
            }
            (None, 0)
        }
    };
    let on: Vec<bool> = match keys.metadata.get(&keys.name(pattern)) {
        Some(Value::Numbers(list)) if list.len() == layers => {
            list.iter().map(|on| on == Value::Bool(true)).collect()
        }
        Some(Value::Numbers(list)) => {
            let why = format!("{} of them, there are {layers} layers", list.len());
            return Err(Error::format(keys.name(pattern), why));
        }
        _ => {
            let period = keys.size(pattern)?.unwrap_or(period);
            // The last of each period sees everything.
            (0..layers).map(|i| period == 0 || i % period < period - 1).collect()
        }
    };
    Ok(on.into_iter().map(|on| size.filter(|_| on)).collect())
}

/// Frequencies with the scaling that the file asks for, and what rotated queries and keys are multiplied by.
fn scaled(
    file: &Gguf,
    keys: &Keys<'_>,
    (dim, base): (usize, f64),
    context: &mut Option<usize>,
    notes: &mut Vec<String>,
) -> Result<(Vec<f64>, f64), Error> {
    let mut frequencies = frequencies(dim, base);
    let kind = keys.metadata.text(&keys.name("rope.scaling.type"))?.unwrap_or("linear");
    let factor = match keys.number("rope.scaling.factor")? {
        Some(factor) => factor,
        None => keys.number("rope.scale_linear")?.unwrap_or(0.0),
    };
    let factor = if factor == 0.0 { 1.0 } else { factor };
    if factor < 0.0 {
        let why = format!("{factor}; it must be above 0");
        return Err(Error::format(keys.name("rope.scaling.factor"), why));
    }
    let original = keys.size("rope.scaling.original_context_length")?.or(*context);
    let mut magnitude = keys.positive("rope.scaling.attn_factor", 1.0)?;
    match kind {
        "none" => {}
        "linear" => frequencies.iter_mut().for_each(|f| *f /= factor),
        "yarn" => {
            let name = "rope.scaling.original_context_length";
            let missing = || Error::format(keys.name(name), "missing in the file");
            let original = real(original.ok_or_else(missing)?);
            let fast = keys.positive("rope.scaling.yarn_beta_fast", 32.0)?;
            let slow = keys.positive("rope.scaling.yarn_beta_slow", 1.0)?;
            let dim = real(dim);
            let pair = |turns: f64| dim * (original / (turns * TAU)).ln() / (2.0 * base.ln());
            let (low, high) = (pair(fast).floor().max(0.0), pair(slow).ceil().min(dim - 1.0));
            for (i, f) in frequencies.iter_mut().enumerate() {
                let ramp = ((real(i) - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                *f *= ramp / factor + (1.0 - ramp);
            }
            magnitude *= 1.0 + 0.1 * factor.ln();
        }
        "longrope" => {
            // Factors of sequences within the trained context; those of longer ones would turn what is cached.
            if let Some(original) = original.filter(|n| context.is_none_or(|all| *n < all)) {
                notes.push(format!(
                    "rope.scaling.type = longrope: followed up to {original} tokens"
                ));
                *context = Some(original);
            }
        }
        other => {
            let known = "none, linear, yarn and longrope are known";
            return Err(Error::unsupported(keys.name("rope.scaling.type"), &other, known));
        }
    }
    for name in ["rope_freqs.weight", "rope_factors_short.weight"] {
        if file.weights.shape(name).is_none() {
            continue;
        }
        let factors = file.weights.clone().take(name, &[dim / 2])?;
        for (f, factor) in frequencies.iter_mut().zip(factors) {
            *f /= f64::from(factor);
        }
    }
    match frequencies.iter().find(|f| !f.is_finite()) {
        Some(wrong) => Err(Error::format(keys.name("rope"), format!("a frequency of {wrong}"))),
        None => Ok((frequencies, magnitude)),
    }
}

fn frequencies(dim: usize, base: f64) -> Vec<f64> {
    (0..dim / 2).map(|i| base.powf(-2.0 * real(i) / real(dim))).collect()
}

/// A size as a number; sizes are far below what would be rounded.
#[expect(clippy::cast_precision_loss, reason = "sizes are below 2^53")]
fn real(n: usize) -> f64 {
    n as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: usize = 8;
    const FF: usize = 16;
    const LAYERS: usize = 6;

    /// A file of six layers, with two heads of four features.
    fn file(architecture: &str, more: &[(&str, Value)], tensors: &[(&str, &[usize])]) -> Gguf {
        let mut metadata = Metadata::default();
        let eps = Value::Float(f64::from(1e-6f32));
        let fields = [
            ("embedding_length", Value::Unsigned(8)),
            ("attention.head_count", Value::Unsigned(2)),
            ("attention.head_count_kv", Value::Unsigned(1)),
            ("block_count", Value::Unsigned(6)),
            ("feed_forward_length", Value::Unsigned(16)),
            ("context_length", Value::Unsigned(128)),
            ("attention.layer_norm_rms_epsilon", eps),
        ];
        for (name, value) in fields.iter().chain(more) {
            metadata.values.insert(format!("{architecture}.{name}"), value.clone());
        }
        metadata.values.insert("general.architecture".into(), Value::Text(architecture.into()));
        let whole = [("token_embd.weight", &[10, D][..]), ("output_norm.weight", &[D])];
        let mut named: Vec<(String, Vec<usize>)> =
            whole.map(|(name, shape)| (name.into(), shape.to_vec())).into();
        for (name, shape) in tensors {
            let layers = if name.starts_with("blk.") { LAYERS } else { 1 };
            let own = (0..layers).map(|i| (name.replace("{}", &i.to_string()), shape.to_vec()));
            named.extend(own);
        }
        let filled = |(name, shape): (String, Vec<usize>)| {
            let numbers = vec![2.0; shape.iter().product()];
            (name, shape, numbers)
        };
        Gguf { metadata, weights: Weights::new(named.into_iter().map(filled)).unwrap() }
    }

    const LLAMA: &[(&str, &[usize])] = &[
        ("blk.{}.attn_norm.weight", &[D]),
        ("blk.{}.attn_q.weight", &[D, D]),
        ("blk.{}.attn_k.weight", &[4, D]),
        ("blk.{}.attn_v.weight", &[4, D]),
        ("blk.{}.attn_output.weight", &[D, D]),
        ("blk.{}.ffn_norm.weight", &[D]),
        ("blk.{}.ffn_gate.weight", &[FF, D]),
        ("blk.{}.ffn_up.weight", &[FF, D]),
        ("blk.{}.ffn_down.weight", &[D, FF]),
    ];

    fn close(a: &[f64], b: &[f64]) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12)
    }

    #[test]
    fn llama_3_divides_its_frequencies_and_owns_its_pairs() {
        let tensors = [LLAMA, &[("rope_freqs.weight", &[2]), ("output.weight", &[10, D])]].concat();
        let base = ("rope.freq_base", Value::Float(100.0));
        let (config, weights, notes) =
            file("llama", std::slice::from_ref(&base), &tensors).transformer().unwrap();
        let stack = config.decoder.unwrap();
        let rope = stack.layers[5].rope.as_ref().unwrap();
        assert!(close(&rope.frequencies, &[0.5, 0.05]), "{rope:?}");
        assert_eq!((rope.pairs, rope.magnitude), (PairLayout::Interleaved, 1.0));
        assert_eq!((stack.layers.len(), stack.norm.eps, stack.vocab), (LAYERS, 1e-6, 10));
        assert!(!config.head.unwrap().tied && notes.is_empty());
        assert_eq!(weights.shape("blocks.5.attention.k.weight"), Some(&[4, D][..]));
        let tied = file("llama", &[base], LLAMA).transformer().unwrap().0;
        assert!(tied.head.unwrap().tied);
    }

    #[test]
    fn gemma_3_has_windows_with_their_own_base() {
        let more = [
            ("blk.{}.attn_q_norm.weight", &[4][..]),
            ("blk.{}.attn_k_norm.weight", &[4]),
            ("blk.{}.post_attention_norm.weight", &[D]),
            ("blk.{}.post_ffw_norm.weight", &[D]),
        ];
        let tensors = [LLAMA, &more].concat();
        let settings = [
            ("attention.sliding_window", Value::Unsigned(32)),
            ("rope.freq_base", Value::Float(1e6)),
            ("rope.scaling.type", Value::Text("linear".into())),
            ("rope.scaling.factor", Value::Float(8.0)),
        ];
        let (config, _, _) = file("gemma3", &settings, &tensors).transformer().unwrap();
        let stack = config.decoder.unwrap();
        let windows: Vec<_> = stack.layers.iter().map(|layer| layer.window).collect();
        assert_eq!(windows, [Some(32), Some(32), Some(32), Some(32), Some(32), None]);
        let frequencies = |i: usize| &stack.layers[i].rope.as_ref().unwrap().frequencies;
        assert!(close(frequencies(0), &[1.0, 0.01]));
        assert!(close(frequencies(5), &[0.125, 0.001 / 8.0]));
        assert_eq!(stack.embedding_scale, Some(8f64.sqrt()));
        assert!(!stack.norm.plus_one && stack.qk_norm == Some(QkNorm::Head));
        assert_eq!((stack.order, stack.softcap), (NormOrder::PreAndPost, None));

        let norms = &more[2..];
        let (config, _, _) = file("gemma2", &[], &[LLAMA, norms].concat()).transformer().unwrap();
        let stack = config.decoder.unwrap();
        assert_eq!((stack.layers[0].window, stack.layers[1].window), (Some(4096), None));
        assert_eq!((stack.softcap, config.head.unwrap().softcap), (Some(50.0), Some(30.0)));
    }

    #[test]
    fn fused_tensors_of_phi_3_are_parted() {
        let tensors: Vec<_> = LLAMA
            .iter()
            .filter(|(name, _)| {
                !["_q.", "_k.", "_v.", "gate", "ffn_up"].iter().any(|part| name.contains(part))
            })
            .copied()
            .chain([
                ("blk.{}.attn_qkv.weight", &[16, D][..]),
                ("blk.{}.ffn_up.weight", &[2 * FF, D]),
                ("rope_factors_short.weight", &[2]),
                ("rope_factors_long.weight", &[2]),
            ])
            .collect();
        let settings = [
            ("rope.scaling.type", Value::Text("longrope".into())),
            ("rope.scaling.attn_factor", Value::Float(1.25)),
            ("rope.scaling.original_context_length", Value::Unsigned(64)),
        ];
        let (config, weights, notes) = file("phi3", &settings, &tensors).transformer().unwrap();
        let stack = config.decoder.unwrap();
        assert_eq!((stack.context, notes.len()), (Some(64), 1));
        assert_eq!(stack.layers[0].rope.as_ref().unwrap().magnitude, 1.25);
        assert_eq!(weights.shape("blocks.0.attention.v.weight"), Some(&[4, D][..]));
        assert_eq!(weights.shape("blocks.0.feed_forward.gate.weight"), Some(&[FF, D][..]));
    }

    #[test]
    fn yarn_is_between_both_frequencies() {
        let settings = [
            ("rope.scaling.type", Value::Text("yarn".into())),
            ("rope.scaling.factor", Value::Float(4.0)),
            ("rope.scaling.original_context_length", Value::Unsigned(32)),
        ];
        let (config, _) = TransformerConfig::from_gguf(&file("qwen2", &settings, LLAMA)).unwrap();
        let rope = config.decoder.unwrap().layers[0].rope.clone().unwrap();
        assert!((rope.magnitude - (1.0 + 0.1 * 4f64.ln())).abs() < 1e-12);
        assert!(close(&rope.frequencies, &[1.0, 0.01 / 4.0]), "{rope:?}");
    }

    #[test]
    fn what_nothing_follows_is_refused() {
        for (name, value) in [
            ("rope.scaling.type", Value::Text("other".into())),
            ("rope.scaling.factor", Value::Float(-1.0)),
            ("rope.freq_base", Value::Float(0.0)),
            ("rope.freq_base_swa", Value::Float(5.0)),
            ("attention.sliding_window", Value::Unsigned(64)),
            ("attention.causal", Value::Bool(false)),
            ("expert_count", Value::Unsigned(8)),
            ("rope.dimension_count", Value::Unsigned(6)),
            ("rope.dimension_sections", Value::Unsigned(6)),
            ("attention.key_length", Value::Unsigned(1 << 27)),
            ("attention.value_length", Value::Unsigned(2)),
            ("block_count", Value::Unsigned(1 << 40)),
            ("attention.head_count", Value::Unsigned(0)),
            ("attention.head_count_kv", Value::Numbers([1, 2].into_iter().collect())),
        ] {
            let file = file("llama", &[(name, value)], LLAMA);
            assert!(TransformerConfig::from_gguf(&file).is_err(), "{name}");
        }
        for (name, value) in [
            ("attention.sliding_window", Value::Unsigned(128)),
            ("expert_count", Value::Unsigned(0)),
            ("attention.causal", Value::Bool(true)),
            ("attention.head_count_kv", Value::Numbers([1; 6].into_iter().collect())),
        ] {
            let file = file("llama", &[(name, value)], LLAMA);
            assert!(TransformerConfig::from_gguf(&file).is_ok(), "{name}");
        }
        let error = TransformerConfig::from_gguf(&file("rwkv", &[], LLAMA)).unwrap_err();
        assert!(error.to_string().contains("rwkv"), "{error}");
    }

    #[test]
    fn turns_end_by_special_tokens_that_are_named_so() {
        let mut file = file("llama", &[], LLAMA);
        let texts = ["a", "<|im_end|>", "<|end|>", "</s>"].map(|text| Value::Text(text.into()));
        for (name, value) in [
            ("tokens", Value::List(texts.into())),
            ("token_type", Value::Numbers([1, 3, 1, 3].into_iter().collect())),
            ("eos_token_id", Value::Unsigned(3)),
            ("bos_token_id", Value::Unsigned(77)),
        ] {
            file.metadata.values.insert(format!("tokenizer.ggml.{name}"), value);
        }
        let (config, notes) = TransformerConfig::from_gguf(&file).unwrap();
        assert_eq!((config.eos, config.bos, notes.len()), (vec![1, 3], None, 1));
    }
}
