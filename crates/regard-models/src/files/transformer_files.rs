//! A Transformer as Hugging Face has it: a folder.

use super::chat::ChatTemplate;
use super::config::{ImageProcessorConfig, Pooling, TransformerConfig};
use super::folder::{
    CONFIG, SOURCE_TOKENS, TARGET_TOKENS, TOKENS, TOKENS_CONFIG, fits_model, listing, read_text,
    title, tokens_of,
};
use super::gguf::Gguf;
use super::layouts;
use super::tokens::Tokens;
use super::weights::Weights;
use crate::error::Error;
use serde_json::Value;
use std::path::Path;

/// All that a Transformer is made of.
#[derive(Clone, Debug)]
pub struct TransformerFiles {
    /// What it is.
    pub config: TransformerConfig,
    /// Its tensors under our names, exactly those of [`TransformerConfig::tensors`].
    pub weights: Weights,
    /// How its text is divided; the text that it reads, if it writes another.
    pub tokens: Option<Tokens>,
    /// How the text that it writes is divided, if it reads another.
    pub target_tokens: Option<Tokens>,
    /// How pixels become numbers, of a model that reads images.
    pub image_processor: Option<ImageProcessorConfig>,
    /// What to call it.
    pub title: String,
    /// What was left out, for the user to know.
    pub notes: Vec<String>,
}

/// Settings of generation beside the configuration.
const GENERATION: &str = "generation_config.json";
/// A chat template beside `tokenizer_config.json`.
const TEMPLATE: &str = "chat_template.jinja";
/// How sentence-transformers makes one vector of a text.
const POOLING: &str = "1_Pooling/config.json";
/// How pixels become numbers.
const PREPROCESSOR: &str = "preprocessor_config.json";

impl TransformerFiles {
    /// Whether a path is one that [`open`](Self::open) reads: a GGUF file, or a folder whose configuration has a `model_type` of
    /// Hugging Face.
    #[must_use]
    pub fn is_layout_of(path: &Path) -> bool {
        if is_gguf(path) {
            return true;
        }
        let json = read_text(&path.join(CONFIG)).unwrap_or_default();
        let value: Value = serde_json::from_str(&json).unwrap_or_default();
        value["model_type"].as_str().is_some_and(|kind| kind != "transformer_encoder_decoder")
    }

    /// Opens a GGUF file, or a folder of Hugging Face: `config.json`, weights as safetensors (one file or several), and what else there is of
    /// `tokenizer.json`, `tokenizer_config.json`, `generation_config.json` and `1_Pooling/config.json`; for images `preprocessor_config.json`.
    ///
    /// Weights are mapped: their files must not be changed in place while the result is in use.
    pub fn open(path: &Path) -> Result<Self, Error> {
        match is_gguf(path) {
            true => Gguf::open(path).and_then(|file| Self::of_gguf(file, &title(path))),
            false => Self::folder(path),
        }
        .map_err(|e| e.of(path))
    }

    /// Of a GGUF file, which has this title unless it has a name.
    pub fn of_gguf(file: Gguf, title: &str) -> Result<Self, Error> {
        let tokens = Some(Tokens::from_gguf(&file.metadata)?);
        let title = file.metadata.text("general.name")?.unwrap_or(title).to_owned();
        let (config, weights, notes) = file.transformer()?;
        let (target_tokens, image_processor) = (None, None);
        let files = Self { config, weights, tokens, target_tokens, image_processor, title, notes };
        files.check()?;
        Ok(files)
    }

    fn folder(path: &Path) -> Result<Self, Error> {
        let file = path.join(CONFIG);
        if !file.is_file() {
            let why = format!("no {CONFIG}; there is {}", listing(path));
            return Err(Error::format("folder", why));
        }
        let json = read_text(&file)?;
        let (mut config, mut notes) =
            TransformerConfig::from_json(&json).map_err(|e| e.of(&file))?;
        beside(path, GENERATION, |value| generation(&mut config, value))?;
        config.known_ids(&mut notes);
        beside(path, POOLING, |value| pooling(&mut config, value))?;
        let image_processor = image_processor(path, &config)?;
        let weights = Weights::open_folder(path)?;
        let arranged = arrange(&mut config, weights.clone(), &mut notes);
        let weights = arranged.map_err(|e| weights.named(e))?;
        let (tokens, target_tokens) = vocabularies(path, &config, &mut notes)?;
        let tokens = tokens.map(|tokens| with_template(tokens, path)).transpose()?;
        let title = title(path);
        let files = Self { config, weights, tokens, target_tokens, image_processor, title, notes };
        files.check()?;
        Ok(files)
    }

    /// A vocabulary may not have more tokens than the model; the other way round fills up to a round number.
    fn check(&self) -> Result<(), Error> {
        let vocab =
            |stack: &Option<_>| stack.as_ref().map(|stack: &super::StackConfig| stack.vocab);
        let (source, target) = (vocab(&self.config.encoder), vocab(&self.config.decoder));
        let pairs = [
            ("tokens", &self.tokens, source.or(target)),
            ("target tokens", &self.target_tokens, target),
        ];
        pairs.into_iter().try_for_each(|(what, tokens, vocab)| fits_model(what, tokens, vocab))
    }
}

/// Newer folders have the chat template as a file of its own; the names of tokens that it writes stay in the JSON.
fn with_template(tokens: Tokens, folder: &Path) -> Result<Tokens, Error> {
    let path = folder.join(TEMPLATE);
    if !path.is_file() {
        return Ok(tokens);
    }
    let mut json = Value::Object(serde_json::Map::new());
    beside(folder, TOKENS_CONFIG, |value| {
        json = value.clone();
        Ok(())
    })?;
    if !json.is_object() {
        return Err(Error::file(&folder.join(TOKENS_CONFIG), &"an object `{..}` is wanted"));
    }
    json["chat_template"] = read_text(&path)?.into();
    Ok(tokens.with_chat(ChatTemplate::from_json(&json.to_string())?))
}

/// The tokens of a folder, and those of the text that is written if that is another: a `tokenizer.json`, or models of SentencePiece.
fn vocabularies(
    path: &Path,
    config: &TransformerConfig,
    notes: &mut Vec<String>,
) -> Result<(Option<Tokens>, Option<Tokens>), Error> {
    if let Some(source) = tokens_of(path, &SOURCE_TOKENS)? {
        return Ok((Some(source), tokens_of(path, &TARGET_TOKENS)?));
    }
    if let Some(tokens) = tokens_of(path, &TOKENS)? {
        return Ok((Some(tokens), None));
    }
    if path.join("source.spm").is_file() {
        let (source, target) = Tokens::marian(path)?;
        return Ok((Some(source), Some(target)));
    }
    if path.join("sentencepiece.bpe.model").is_file() && path.join("vocab.json").is_file() {
        notes.push("the source is taken as English; its first token tells the language".into());
        return Ok((Some(Tokens::m2m100(path, "en")?), None));
    }
    let Some(file) = ["tokenizer.model", "spiece.model"]
        .map(|name| path.join(name))
        .into_iter()
        .find(|file| file.is_file())
    else {
        return Ok((None, None));
    };
    let bytes = std::fs::read(&file).map_err(|e| Error::file(&file, &e))?;
    // The file does not say it: what encoders read ends, what decoders continue begins.
    let ends = match config.encoder {
        Some(_) => (None, config.eos.first().copied()),
        None => (config.bos, None),
    };
    let tokens = Tokens::sentencepiece(&bytes).and_then(|tokens| tokens.with_ends(ends.0, ends.1));
    Ok((Some(tokens.map_err(|e| e.of(&file))?), None))
}

/// How pixels become numbers, if the model reads images.
fn image_processor(
    folder: &Path,
    config: &TransformerConfig,
) -> Result<Option<ImageProcessorConfig>, Error> {
    let Some(patches) = config.patches() else { return Ok(None) };
    let path = folder.join(PREPROCESSOR);
    if !path.is_file() {
        let why = format!("no {PREPROCESSOR}, which says how pixels become numbers");
        return Err(Error::format("folder", format!("{why}; there is {}", listing(folder))));
    }
    let json = read_text(&path)?;
    ImageProcessorConfig::from_json(&json, patches.image).map(Some).map_err(|e| e.of(&path))
}

fn is_gguf(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|ending| ending == "gguf")
}

/// Reads a file if it is there.
fn beside(
    folder: &Path,
    name: &str,
    read: impl FnOnce(&Value) -> Result<(), Error>,
) -> Result<(), Error> {
    let path = folder.join(name);
    if !path.is_file() {
        return Ok(());
    }
    let json = read_text(&path)?;
    let value: Result<Value, _> = serde_json::from_str(&json);
    let value = value.map_err(|e| Error::file(&path, &e))?;
    read(&value).map_err(|e| e.of(&path))
}

/// Special tokens of generation are meant before those of the configuration. All else is the caller's matter.
fn generation(config: &mut TransformerConfig, value: &Value) -> Result<(), Error> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let one = |name: &str| match &value[name] {
        Value::Null => Ok(None),
        other => id(other).map(Some).ok_or_else(|| {
            Error::format(name, format!("{other}; the number of a token is wanted"))
        }),
    };
    let start = if config.encoder.is_some() { "decoder_start_token_id" } else { "bos_token_id" };
    if config.decoder.is_some() {
        config.bos = one(start)?.or(config.bos);
        config.forced_bos = one("forced_bos_token_id")?.or(config.forced_bos);
    }
    config.pad = one("pad_token_id")?.or(config.pad);
    match &value["eos_token_id"] {
        Value::Null => {}
        Value::Array(all) => {
            let ids: Option<Vec<u32>> = all.iter().map(id).collect();
            let why = || Error::format("eos_token_id", "numbers of tokens are wanted");
            config.eos = ids.ok_or_else(why)?;
        }
        _ => config.eos = one("eos_token_id")?.into_iter().collect(),
    }
    let words = value["bad_words_ids"].as_array().into_iter().flatten();
    let words = words.filter_map(|word| word.as_array().filter(|word| word.len() == 1)?.first());
    let suppressed = value["suppress_tokens"].as_array().into_iter().flatten();
    for id in words.chain(suppressed).filter_map(id) {
        if !config.suppressed.contains(&id) {
            config.suppressed.push(id);
        }
    }
    Ok(())
}

fn pooling(config: &mut TransformerConfig, value: &Value) -> Result<(), Error> {
    let kinds = [
        ("pooling_mode_mean_tokens", Pooling::Mean),
        ("pooling_mode_cls_token", Pooling::First),
        ("pooling_mode_lasttoken", Pooling::Last),
    ];
    // Newer versions have one field for all.
    let named = match value["pooling_mode"].as_str() {
        Some("mean") => Some(Pooling::Mean),
        Some("cls") => Some(Pooling::First),
        Some("lasttoken") => Some(Pooling::Last),
        _ => None,
    };
    let modes = value.as_object().into_iter().flatten();
    let used: Vec<_> = modes
        .filter(|(name, on)| name.starts_with("pooling_mode") && **on == Value::Bool(true))
        .map(|(name, _)| name.as_str())
        .collect();
    let found = match used.as_slice() {
        [] => named,
        [one] => kinds.iter().find(|(name, _)| name == one).map(|(_, kind)| *kind),
        _ => None,
    };
    config.pooling = found.ok_or_else(|| {
        let value = if used.is_empty() { value.to_string() } else { used.join(", ") };
        Error::unsupported("pooling", &value, "one of mean, cls and lasttoken is known")
    })?;
    Ok(())
}

/// Tensors under our names, held against the configuration. What files may have or not is settled by what is there.
fn arrange(
    config: &mut TransformerConfig,
    weights: Weights,
    notes: &mut Vec<String>,
) -> Result<Weights, Error> {
    let mut weights = weights.named_as(&layouts::names(config))?;
    let table = match (&config.encoder, &config.decoder) {
        (Some(_), Some(_)) if config.shared_embedding => "source.weight",
        (Some(_), Some(_)) => "target.weight",
        _ => "embedding.weight",
    };
    let pair = config.encoder.is_some() && config.decoder.is_some();
    let t5 = matches!(config.family.as_str(), "t5" | "mt5");
    let (there, same) = {
        let there = weights.shape("head.weight").is_some();
        (there, there && weights.same("head.weight", table))
    };
    if let Some(head) = &mut config.head {
        // T5 1.1 has a head of its own whatever Transformers 5 says.
        if t5 {
            head.tied = !there || same;
        }
        if head.tied && there && !same {
            let why = format!("differs from `{table}`, though the configuration says they are one");
            return Err(Error::format("tensor `head.weight`", why));
        }
        if head.tied {
            weights.tensors.remove("head.weight");
        }
        // BART and Marian add a bias to their scores that is 0 where no file has it.
        if pair && head.bias && weights.shape("head.bias").is_none() {
            head.bias = false;
        }
    }
    // Of a model that only embeds.
    if config.head.is_none() && there && config.decoder.is_some() {
        weights.tensors.remove("head.weight");
        notes.push("architectures: a model without head; that of the file is left out".into());
    }
    config.fits(&weights)?;
    Ok(weights)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::save;
    use serde_json::json;
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("regard-hub-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    /// A Llama of one layer in so many files, with these tensors more.
    fn llama(folder: &Path, files: usize, more: &[(&str, Vec<usize>)]) -> Value {
        let config = json!({
            "model_type": "llama", "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 5, "tie_word_embeddings": true
        });
        std::fs::write(folder.join(CONFIG), config.to_string()).unwrap();
        let layer = |name: &str| format!("model.layers.0.{name}.weight");
        let mut tensors = vec![
            ("model.embed_tokens.weight".into(), vec![5, 4]),
            (layer("input_layernorm"), vec![4]),
            (layer("self_attn.q_proj"), vec![4, 4]),
            (layer("self_attn.k_proj"), vec![2, 4]),
            (layer("self_attn.v_proj"), vec![2, 4]),
            (layer("self_attn.o_proj"), vec![4, 4]),
            (layer("post_attention_layernorm"), vec![4]),
            (layer("mlp.gate_proj"), vec![6, 4]),
            (layer("mlp.up_proj"), vec![6, 4]),
            (layer("mlp.down_proj"), vec![4, 6]),
            ("model.norm.weight".into(), vec![4]),
        ];
        tensors.extend(more.iter().map(|(name, shape)| ((*name).to_owned(), shape.clone())));
        let numbers: Vec<f32> = (0u8..60).map(f32::from).collect();
        let none = BTreeMap::new();
        let mut map = serde_json::Map::new();
        for part in 0..files {
            let file = if files == 1 {
                "model.safetensors".into()
            } else {
                format!("part-{part}.safetensors")
            };
            let own = tensors.iter().skip(part).step_by(files);
            let own = own.map(|(name, shape): &(String, Vec<usize>)| {
                map.insert(name.clone(), file.as_str().into());
                (name.clone(), shape.clone(), &numbers[..shape.iter().product()])
            });
            save(&folder.join(&file), own.collect::<Vec<_>>(), &none).unwrap();
        }
        let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
        if files > 1 {
            std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
        }
        config
    }

    #[test]
    fn one_file_and_several_are_the_same_model() {
        let folder = scratch("shards");
        llama(&folder, 3, &[]);
        let mut files = TransformerFiles::open(&folder).unwrap();
        let k = files.weights.take("blocks.0.attention.k.weight", &[2, 4]).unwrap();
        assert_eq!(k[..3], [0., 1., 2.]);
        let matrix = files.weights.matrix("blocks.0.feed_forward.up.weight", [6, 4]).unwrap();
        let mut row = [0.0; 4];
        matrix.row(5, &mut row).unwrap();
        assert_eq!(row, [20., 21., 22., 23.]);
        let index = folder.join("model.safetensors.index.json");
        let said = std::fs::read_to_string(&index).unwrap();
        for (from, to, word) in [
            ("part-1.safetensors", "part-9.safetensors", "part-9.safetensors"),
            ("part-1.safetensors", "../part-1.safetensors", "name of a file"),
            ("model.norm.weight", "model.norms.weight", "model.norms.weight"),
        ] {
            std::fs::write(&index, said.replacen(from, to, 1)).unwrap();
            let error = TransformerFiles::open(&folder).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn what_does_not_belong_together_is_named() {
        let folder = scratch("wrong");
        let error = TransformerFiles::open(&folder).unwrap_err().to_string();
        assert!(error.contains("no config.json"), "{error}");
        let config = llama(&folder, 1, &[("lm_head.weight", vec![5, 4])]);
        TransformerFiles::open(&folder).unwrap();
        for (field, value, word) in [
            ("num_hidden_layers", json!(2), "blocks.1."),
            ("vocab_size", json!(1 << 27), "embedding.weight"),
            ("intermediate_size", json!(7), "feed_forward"),
            ("attention_bias", json!(true), "bias"),
            ("tie_word_embeddings", json!("x"), "true or false"),
        ] {
            let mut other = config.clone();
            other[field] = value;
            std::fs::write(folder.join(CONFIG), other.to_string()).unwrap();
            let error = TransformerFiles::open(&folder).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
        llama(&folder, 1, &[("model.layers.0.self_attn.q_proj.bias", vec![4])]);
        let error = TransformerFiles::open(&folder).unwrap_err().to_string();
        assert!(error.contains("attention.q.bias"), "{error}");
        std::fs::remove_file(folder.join("model.safetensors")).unwrap();
        std::fs::write(folder.join("pytorch_model.bin"), "").unwrap();
        let error = TransformerFiles::open(&folder).unwrap_err().to_string();
        assert!(error.contains("save_pretrained"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn files_beside_the_configuration_are_followed() {
        let folder = scratch("beside");
        llama(&folder, 1, &[]);
        let generation = json!({"eos_token_id": [3, 4, 9], "bos_token_id": 1, "bad_words_ids": [[2], [1, 2]],
            "temperature": 0.6});
        std::fs::write(folder.join(GENERATION), generation.to_string()).unwrap();
        std::fs::create_dir(folder.join("1_Pooling")).unwrap();
        let pooling = json!({"word_embedding_dimension": 4, "pooling_mode_cls_token": true,
            "pooling_mode_mean_tokens": false, "include_prompt": true});
        std::fs::write(folder.join(POOLING), pooling.to_string()).unwrap();
        std::fs::write(folder.join("vocabulary.json"), r#"{"tokens": ["a", "b"]}"#).unwrap();
        std::fs::write(folder.join(TOKENS_CONFIG), r#"{"bos_token": "<s>"}"#).unwrap();
        std::fs::write(folder.join(TEMPLATE), "{{ bos_token }}x").unwrap();
        let files = TransformerFiles::open(&folder).unwrap();
        let chat = files.tokens.unwrap().chat().unwrap().render(&[]).unwrap();
        assert_eq!(chat, "<s>x");
        let config = files.config;
        assert_eq!((config.bos, config.eos, config.suppressed), (Some(1), vec![3, 4], vec![2]));
        assert_eq!((config.pooling, files.notes.len()), (Pooling::First, 1));
        std::fs::write(folder.join(POOLING), r#"{"pooling_mode_max_tokens": true}"#).unwrap();
        let error = TransformerFiles::open(&folder).unwrap_err().to_string();
        assert!(error.contains("pooling_mode_max_tokens"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
