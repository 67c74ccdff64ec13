//! A model as it is found: a folder, or one file that has everything.

use super::chat::ChatTemplate;
use super::config::{Architecture, Config};
use super::names::NameMap;
use super::tokens::{Symbols, Tokens, Unknown};
use super::weights::Weights;
use crate::error::Error;
use std::path::Path;

/// All that a model is made of.
#[derive(Clone, Debug)]
pub struct ModelFiles {
    /// What it is.
    pub config: Config,
    /// Its tensors, under our names.
    pub weights: Weights,
    /// How its text is divided; the text that it reads, if it writes another.
    pub tokens: Option<Tokens>,
    /// How the text that it writes is divided, if it reads another.
    pub target_tokens: Option<Tokens>,
    /// What to call it.
    pub title: String,
}

/// The tensors of a folder.
pub(super) const WEIGHTS: &str = "model.safetensors";
/// The sizes and settings of a folder.
pub(super) const CONFIG: &str = "config.json";
/// Vocabularies of a folder that are JSON, and that are lists of one token a line. The first that is there is meant.
pub(super) const TOKENS: [&str; 3] = ["tokenizer.json", "tokenizer_tok512.json", "vocabulary.json"];
/// Settings of the vocabulary beside it, of which the chat template is read.
pub(super) const TOKENS_CONFIG: &str = "tokenizer_config.json";
pub(super) const SOURCE_TOKENS: [&str; 3] =
    ["source_tokenizer.json", "source_vocabulary.json", "source_vocabulary.txt"];
pub(super) const TARGET_TOKENS: [&str; 3] =
    ["target_tokenizer.json", "target_vocabulary.json", "target_vocabulary.txt"];

/// The entry of a safetensors file of ours that is its configuration.
const ENTRY: &str = "regard";

impl ModelFiles {
    /// Opens a folder with `config.json` and `model.safetensors`, or a `.safetensors` that says what it is. For folders of Hugging Face
    /// and GGUF files see [`TransformerFiles`](super::TransformerFiles).
    pub fn open(path: &Path) -> Result<Self, Error> {
        let opened = if path.is_dir() {
            folder(path)
        } else {
            match path.extension().and_then(|ending| ending.to_str()) {
                Some("safetensors") => safetensors(path),
                _ => {
                    let why = if path.exists() { "another kind of file" } else { "not there" };
                    let wanted = "a folder, a .gguf or a .safetensors";
                    Err(Error::format("model", format!("{wanted} is wanted; this is {why}")))
                }
            }
        };
        opened.and_then(Self::checked).map_err(|e| e.of(path))
    }

    /// Holds the parts against each other.
    fn checked(mut self) -> Result<Self, Error> {
        // Some files have the head of a model that shares it with the embedding.
        if self.config.tie_embeddings && self.weights.shape("head.weight").is_some() {
            let table = match (self.config.architecture, self.config.shared_vocabulary) {
                (Architecture::Transformer, true) => "source.weight",
                (Architecture::Transformer, false) => "target.weight",
                _ => "embedding.weight",
            };
            if !self.weights.same("head.weight", table) {
                let why =
                    format!("differs from `{table}`, though the configuration says they are one");
                return Err(Error::format("tensor `head.weight`", why));
            }
            self.weights.tensors.remove("head.weight");
        }
        let vocab = self.config.vocab;
        let pairs = [
            ("tokens", &self.tokens, Some(vocab)),
            ("target tokens", &self.target_tokens, self.config.target_vocab),
        ];
        pairs.into_iter().try_for_each(|(what, tokens, vocab)| fits_model(what, tokens, vocab))?;
        Ok(self)
    }
}

/// Refuses a vocabulary with more tokens than the model. The model may have rows that no token uses, to be a round number.
pub(super) fn fits_model(
    what: &str,
    tokens: &Option<Tokens>,
    vocab: Option<usize>,
) -> Result<(), Error> {
    match tokens.as_ref().map(Tokens::len).zip(vocab) {
        Some((tokens, vocab)) if tokens > vocab => {
            let why = format!("the vocabulary has {tokens}, the model {vocab}");
            Err(Error::format(what, format!("{why}; do they belong together?")))
        }
        _ => Ok(()),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|e| Error::file(path, &e))
}

/// The text of a file. What is no text is named with its line.
pub(super) fn read_text(path: &Path) -> Result<String, Error> {
    text(read(path)?).map_err(|why| Error::file(path, &why))
}

/// Bytes as a text, or what is wrong with them and where.
fn text(bytes: Vec<u8>) -> Result<String, String> {
    String::from_utf8(bytes).map_err(|e| {
        let (at, bytes) = (e.utf8_error().valid_up_to(), e.as_bytes());
        let before = &bytes[..at];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        let column = 1 + before.iter().rev().take_while(|byte| **byte != b'\n').count();
        format!(
            "line {line}, byte {column}: 0x{:02X} is not UTF-8; write the file as UTF-8",
            bytes[at]
        )
    })
}

/// What a file is called, without its ending.
pub(super) fn title(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.into());
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned())
}

fn folder(path: &Path) -> Result<ModelFiles, Error> {
    for file in [CONFIG, WEIGHTS] {
        if !path.join(file).is_file() {
            let wanted = format!("no {file}; a model is {CONFIG}, {WEIGHTS} and its tokens");
            return Err(Error::format("folder", format!("{wanted}; there is {}", listing(path))));
        }
    }
    let json = read_text(&path.join(CONFIG))?;
    let config = Config::from_json(&json).map_err(|e| e.of(&path.join(CONFIG)))?;
    let weights = Weights::open(&path.join(WEIGHTS));
    let weights = weights.and_then(|weights| renamed(weights, &config, &json));
    let weights = weights.map_err(|e| e.of(&path.join(WEIGHTS)))?;
    let (tokens, target_tokens) = if config.target_vocab.is_some() {
        (tokens_of(path, &SOURCE_TOKENS)?, tokens_of(path, &TARGET_TOKENS)?)
    } else {
        (tokens_of(path, &TOKENS)?, None)
    };
    Ok(ModelFiles { config, weights, tokens, target_tokens, title: title(path) })
}

/// Tensors under our names. A folder that we wrote has them already.
fn renamed(weights: Weights, config: &Config, json: &str) -> Result<Weights, Error> {
    let value: serde_json::Value = serde_json::from_str(json).unwrap_or_default();
    if value.get("format").is_some() {
        return Ok(weights);
    }
    let names = match config.architecture {
        Architecture::Llama => &NameMap::LLAMA,
        Architecture::Gpt2 => &NameMap::GPT2,
        Architecture::Bert => &NameMap::BERT,
        Architecture::Transformer => &NameMap::CTRANSLATE2,
        Architecture::E2k => &NameMap::E2K,
        // Nobody else writes such a one.
        Architecture::Seq2Seq | Architecture::Han => return Ok(weights),
    };
    weights.renamed(names)
}

/// The names of what is in a folder, as a sentence has them.
pub(super) fn listing(path: &Path) -> String {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    let (all, most) = (names.len(), 12);
    names.truncate(most);
    match all {
        0 => "nothing".into(),
        n if n > most => format!("{} and {} more", names.join(", "), n - most),
        _ => names.join(", "),
    }
}

pub(super) fn tokens_of(folder: &Path, names: &[&str]) -> Result<Option<Tokens>, Error> {
    let path = names.iter().map(|name| folder.join(name)).find(|path| path.is_file());
    let Some(path) = path else { return Ok(None) };
    if path.extension().is_some_and(|ending| ending == "txt") {
        return lines(&read_text(&path)?).map(Some).map_err(|e| e.of(&path));
    }
    let (tokens, beside) = (Tokens::open(&path)?, folder.join(TOKENS_CONFIG));
    if !beside.is_file() {
        return Ok(Some(tokens));
    }
    let chat = ChatTemplate::from_json(&read_text(&beside)?).map_err(|e| e.of(&beside))?;
    Ok(Some(tokens.with_chat(chat)))
}

/// A vocabulary of CTranslate2: a token a line, and one more for all that is not there.
fn lines(text: &str) -> Result<Tokens, Error> {
    let lines = text.strip_suffix('\n').unwrap_or(text).split('\n');
    let mut symbols = Symbols { tokens: lines.map(str::to_owned).collect(), ..Symbols::default() };
    if symbols.id("<unk>").is_none() {
        symbols.tokens.push("<unk>".into());
    }
    let special_tokens = ["<blank>", "<s>", "</s>", "<unk>"];
    symbols.special_tokens = special_tokens.iter().filter_map(|mark| symbols.id(mark)).collect();
    symbols.unknown = symbols.id("<unk>").map_or(Unknown::Refused, Unknown::Token);
    Tokens::from_symbols(symbols)
}

/// A file of ours that is its own configuration, or one of e2k.
fn safetensors(path: &Path) -> Result<ModelFiles, Error> {
    let weights = Weights::open(path)?;
    let title = title(path);
    if let Some(json) = weights.metadata().get(ENTRY) {
        let config = Config::from_json(json)?;
        let tokens = |name: &str| {
            let json = weights.metadata().get(name);
            json.map(|json| Tokens::from_json(json.as_bytes())).transpose()
        };
        let (tokens, target_tokens) = (tokens("tokens")?, tokens("target_tokens")?);
        return Ok(ModelFiles { config, weights, tokens, target_tokens, title });
    }
    let (Some(source), Some(target)) =
        (weights.metadata().get("in_table"), weights.metadata().get("out_table"))
    else {
        let entries: Vec<_> = weights.metadata().keys().map(String::as_str).collect();
        let there = if entries.is_empty() { "nothing".into() } else { entries.join(", ") };
        let wanted = format!("`{ENTRY}` (ours) or `in_table` and `out_table` (e2k)");
        let folder = "if a config.json is beside it, open the folder";
        let why = format!("{wanted} is wanted, there is {there}; {folder}");
        return Err(Error::format("metadata", why));
    };
    let config = Config::from_e2k(&weights)?;
    let tokens = e2k_tokens(source, &config, true)?;
    let target_tokens = e2k_tokens(target, &config, false)?;
    let weights = weights.renamed(&NameMap::E2K)?;
    Ok(ModelFiles {
        config,
        weights,
        tokens: Some(tokens),
        target_tokens: Some(target_tokens),
        title,
    })
}

/// e2k reads small letters between two special tokens and drops what it does not know.
fn e2k_tokens(table: &str, config: &Config, source: bool) -> Result<Tokens, Error> {
    let mut symbols =
        Symbols { tokens: table.split('\0').map(str::to_owned).collect(), ..Symbols::default() };
    symbols.special_tokens =
        ["<pad>", "<sos>", "<eos>"].iter().filter_map(|m| symbols.id(m)).collect();
    if source {
        symbols.unknown = Unknown::Dropped;
        symbols.lowercase = true;
        symbols.begin = config.bos;
        symbols.end = config.eos.first().copied();
    }
    Tokens::from_symbols(symbols)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::save;
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("regard-open-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    fn config(vocab: usize) -> String {
        let json = serde_json::json!({
            "model_type": "llama", "hidden_size": 2, "intermediate_size": 2, "num_hidden_layers": 1,
            "num_attention_heads": 1, "vocab_size": vocab, "tie_word_embeddings": true
        });
        json.to_string()
    }

    #[test]
    fn what_is_missing_is_named_with_what_is_there() {
        let folder = scratch("missing");
        let error = ModelFiles::open(&folder).unwrap_err().to_string();
        assert!(error.contains("config.json") && error.contains("nothing"), "{error}");
        std::fs::write(folder.join("config.json"), config(3)).unwrap();
        let error = ModelFiles::open(&folder).unwrap_err().to_string();
        assert!(error.contains("no model.safetensors"), "{error}");
        assert!(error.contains("there is config.json"), "{error}");
        let error = ModelFiles::open(&folder.join("model.bin")).unwrap_err().to_string();
        assert!(error.contains("not there") && error.contains(".gguf"), "{error}");
        let file = folder.join("x.safetensors");
        save(&file, [("a".to_owned(), vec![1], &[1.0][..])], &BTreeMap::new()).unwrap();
        let error = ModelFiles::open(&file).unwrap_err().to_string();
        assert!(error.contains("in_table") && error.contains("nothing"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn what_is_no_text_is_named_with_its_line() {
        let said = |bytes: &[u8]| text(bytes.to_vec());
        assert_eq!(said("a\né".as_bytes()), Ok("a\né".into()));
        let error = said(b"a\nbc\xff").unwrap_err();
        assert!(error.starts_with("line 2, byte 3: 0xFF"), "{error}");
        let error = said(b"\xc3").unwrap_err();
        assert!(error.starts_with("line 1, byte 1: 0xC3"), "{error}");
        let folder = scratch("text");
        std::fs::write(folder.join("config.json"), b"{\n\"a\xff\": 1}").unwrap();
        std::fs::write(folder.join("model.safetensors"), b"").unwrap();
        let error = ModelFiles::open(&folder).unwrap_err().to_string();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(error.contains("config.json: line 2, byte 3"), "{error}");
    }

    #[test]
    fn files_that_are_cut_anywhere_are_named() {
        let folder = scratch("cut");
        let (config_file, file) = (folder.join("config.json"), folder.join("model.safetensors"));
        let json = config(3);
        std::fs::write(&config_file, &json).unwrap();
        let embedding = [1., 2., 3., 4., 5., 6.];
        let name = "model.embed_tokens.weight".to_owned();
        save(&file, [(name, vec![3, 2], &embedding[..])], &BTreeMap::new()).unwrap();
        let whole = std::fs::read(&file).unwrap();
        let tokens = folder.join("vocabulary.json");
        let vocabulary = r#"{"tokens": ["a", "b", "c"]}"#;
        for (path, bytes) in
            [(config_file, json.as_bytes()), (file, &whole[..]), (tokens, vocabulary.as_bytes())]
        {
            for len in 0..bytes.len() {
                std::fs::write(&path, &bytes[..len]).unwrap();
                let error = ModelFiles::open(&folder).unwrap_err().to_string();
                assert!(error.starts_with(&path.display().to_string()), "{len} bytes: {error}");
            }
            std::fs::write(&path, bytes).unwrap();
        }
        ModelFiles::open(&folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_head_that_is_the_embedding_is_left_out_and_another_refused() {
        let folder = scratch("tied");
        std::fs::write(folder.join("config.json"), config(3)).unwrap();
        let (embedding, other) = ([1., 2., 3., 4., 5., 6.], [0.; 6]);
        for (head, fine) in [(embedding, true), (other, false)] {
            let tensors = [
                ("model.embed_tokens.weight".to_owned(), vec![3, 2], &embedding[..]),
                ("lm_head.weight".to_owned(), vec![3, 2], &head[..]),
            ];
            save(&folder.join("model.safetensors"), tensors, &BTreeMap::new()).unwrap();
            let opened = ModelFiles::open(&folder);
            assert_eq!(opened.is_ok(), fine);
            if let Ok(files) = opened {
                assert_eq!(files.weights.left(), ["embedding.weight"]);
            }
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_model_of_ours_is_opened_as_a_folder_and_as_a_file() {
        let folder = scratch("ours");
        let json = Config::from_json(&config(3)).unwrap().to_json().unwrap();
        let vocabulary = r#"{"tokens": ["a", "b", "\n"]}"#;
        std::fs::write(folder.join("config.json"), &json).unwrap();
        std::fs::write(folder.join("vocabulary.json"), vocabulary).unwrap();
        let entries = [("regard", json.as_str()), ("tokens", vocabulary)];
        let metadata = entries.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let file = folder.join("model.safetensors");
        save(&file, [("norm.weight".to_owned(), vec![2], &[1., 2.][..])], &metadata).unwrap();
        for path in [&folder, &file] {
            let mut files = ModelFiles::open(path).unwrap();
            assert_eq!(files.weights.take("norm.weight", &[2]).unwrap(), [1., 2.]);
            assert_eq!(files.tokens.unwrap().encode("ab\n").unwrap(), [0, 1, 2]);
        }
        std::fs::write(folder.join("vocabulary.json"), r#"{"tokens": ["a", "b", "c", "d"]}"#)
            .unwrap();
        let error = ModelFiles::open(&folder).unwrap_err().to_string();
        assert!(error.contains("has 4, the model 3"), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
