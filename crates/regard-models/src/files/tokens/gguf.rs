//! The tokens of a GGUF file.

use super::guard::guarded;
use super::library::{Library, panicked};
use super::limits::Limits;
use super::sentencepiece::SentencePiece;
use super::{Kind, wrong};
use crate::error::Error;
use crate::files::gguf::{Metadata, Value};
use std::collections::BTreeSet;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

/// Kinds of tokens: ordinary ones, the unknown one, special tokens, those that a user has added, and rows without a token.
const NORMAL: u64 = 1;
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER: u64 = 4;
const UNUSED: u64 = 5;

/// How a text is divided into words before merges (`tokenizer.ggml.pre`).
#[derive(Clone, Copy)]
struct Words {
    /// One after the other; what a pattern does not match stays as it is between its matches.
    patterns: &'static [&'static str],
    /// Whether a word that is a token is not merged (Llama 3).
    whole: bool,
    /// Whether a text begins with a special token unless the file says otherwise.
    begin: bool,
    /// Whether characters are composed first.
    nfc: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// The names that llama.cpp has for what models' own `tokenizer.json` files say.
fn words(pre: &str) -> Option<Words> {
    let plain = |patterns| Words { patterns, whole: false, begin: false, nfc: false };
    Some(match pre {
        "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling"
        | "exaone4" | "gigachat" | "a.x-4.0" | "mellum" => plain(&[GPT2]),
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b" => {
            plain(&[r"\p{N}", GPT2])
        }
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0"
        | "lfm2" => Words { whole: true, begin: true, ..plain(&[LLAMA3]) },
        "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => plain(&[LLAMA3]),
        "qwen2" | "deepseek-r1-qwen" => Words { nfc: true, ..plain(&[QWEN2]) },
        "stablelm2" | "megrez" | "hunyuan" | "solar-open" | "grok-2" => plain(&[QWEN2]),
        "tekken" => Words { whole: true, begin: true, ..plain(&[TEKKEN]) },
        "gpt-4o" | "llama4" => plain(&[GPT4O]),
        "deepseek-v3" => plain(&[r"\p{N}{1,3}", "[一-龥\u{3040}-ゟ゠-ヿ]+", DEEPSEEK3]),
        "deepseek-coder" => plain(&[
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            "[一-龥\u{800}-一가-\u{d7ff}]+",
            r"\p{N}",
        ]),
        "falcon" => plain(&[r"[\p{P}$+<=>\^~|`]+", GPT2, "[0-9][0-9][0-9]"]),
        "default" => plain(&[r"[\p{P}$+<=>\^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
        _ => return None,
    })
}

pub(super) fn read(metadata: &Metadata) -> Result<Kind, Error> {
    let model = metadata.text("tokenizer.ggml.model")?.unwrap_or("nothing");
    match model {
        "gpt2" => Ok(Kind::Library(Box::new(bpe(metadata)?))),
        "llama" => Ok(Kind::SentencePiece(Box::new(SentencePiece::from_gguf(metadata)?))),
        other => {
            let known = "`gpt2` and `llama` are known";
            Err(Error::unsupported("tokenizer.ggml.model", &other, known))
        }
    }
}

fn field(name: &str) -> String {
    format!("tokenizer.ggml.{name}")
}

fn missing(name: &str) -> Error {
    Error::format(field(name), "missing in the file")
}

/// BPE on bytes.
fn bpe(metadata: &Metadata) -> Result<Library, Error> {
    let name = field("add_space_prefix");
    if metadata.bool(&name)? == Some(true) {
        return Err(Error::unsupported(name, &true, "false is known"));
    }
    let pre = metadata.text(&field("pre"))?.unwrap_or("default");
    let Some(words) = words(pre) else {
        let known = "`llama-bpe`, `qwen2`, `gpt-2`, `smollm`, `tekken`, `gpt-4o` and others are";
        return Err(Error::unsupported(field("pre"), &pre, known));
    };
    let tokens = metadata.texts(&field("tokens"))?.ok_or_else(|| missing("tokens"))?;
    let merges = metadata.texts(&field("merges"))?.ok_or_else(|| missing("merges"))?;
    let mut seen = BTreeSet::new();
    if let Some(token) = tokens.iter().find(|token| !seen.insert(**token)) {
        return Err(Error::format(field("tokens"), format!("`{token}` is there twice")));
    }
    let vocab: Vocab = tokens.iter().map(|token| (*token).to_owned()).zip(0..).collect();
    let pair = |merge: &&str| match merge.split_once(' ') {
        Some((a, b)) => Ok((a.to_owned(), b.to_owned())),
        None => Err(Error::format(field("merges"), format!("`{merge}` has no space"))),
    };
    let merges = merges.iter().map(pair).collect::<Result<Vec<_>, _>>()?;
    let added = added(metadata, &field("token_type"), &tokens)?;
    let (begin, end) = ends(metadata, words.begin, tokens.len())?;
    let tokenizer = guarded(|| {
        let split = |pattern: &&str| {
            let pattern = SplitPattern::Regex((*pattern).into());
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map(Into::into)
        };
        let mut steps =
            words.patterns.iter().map(split).collect::<Result<Vec<PreTokenizerWrapper>, _>>()?;
        // Bytes become letters; words are divided already.
        let letters = ByteLevel::new(false, true, false);
        steps.push(letters.into());
        let model = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(words.whole);
        let mut tokenizer = Tokenizer::new(model.build()?);
        tokenizer.with_pre_tokenizer(Some(Sequence::new(steps))).with_decoder(Some(letters));
        if words.nfc {
            tokenizer.with_normalizer(Some(NFC));
        }
        tokenizer.add_tokens(&added);
        Ok::<_, tokenizers::Error>(tokenizer)
    });
    let tokenizer = tokenizer.map_err(panicked)?.map_err(wrong)?;
    Ok(Library::new(tokenizer, [begin, end], Limits::of_ours(tokens.len())))
}

/// The tokens that a text begins and ends with, out of so many.
pub(super) fn ends(
    metadata: &Metadata,
    begin: bool,
    tokens: usize,
) -> Result<(Option<u32>, Option<u32>), Error> {
    // The numbers that SentencePiece gives unless told otherwise.
    let spm = metadata.text(&field("model"))? == Some("llama");
    let end = |name: &str, default: bool, number: u64| {
        if !metadata.bool(&field(&format!("add_{name}_token")))?.unwrap_or(default) {
            return Ok(None);
        }
        let name = format!("{name}_token_id");
        let id = metadata.whole(&field(&name))?.or(spm.then_some(number));
        let id = id.ok_or_else(|| missing(&name))?;
        let id = u32::try_from(id).ok().filter(|id| (*id as usize) < tokens);
        let beyond = || Error::format(field(&name), format!("there are {tokens} tokens"));
        id.map(Some).ok_or_else(beyond)
    };
    Ok((end("bos", begin, 1)?, end("eos", false, 2)?))
}

/// The tokens that are found in a text before anything else is: special tokens, and what a user has added.
fn added(metadata: &Metadata, field: &str, tokens: &[&str]) -> Result<Vec<AddedToken>, Error> {
    let Some(value) = metadata.get(field) else { return Ok(Vec::new()) };
    let Value::Numbers(kinds) = value else {
        return Err(Error::format(field, format!("{value}; it should be a list of numbers")));
    };
    if kinds.len() != tokens.len() {
        let why =
            format!("{} of them, {} tokens; they must be equally many", kinds.len(), tokens.len());
        return Err(Error::format(field, why));
    }
    let mut added = Vec::new();
    for (kind, token) in kinds.iter().zip(tokens) {
        let kind = match kind {
            Value::Unsigned(kind) => kind,
            Value::Signed(kind) => u64::try_from(kind).unwrap_or_default(),
            _ => 0,
        };
        match kind {
            NORMAL | UNUSED => {}
            CONTROL | UNKNOWN | USER => {
                added.push(AddedToken::from(*token, kind != USER).normalized(false));
            }
            other => {
                let known = format!("of `{token}`; {NORMAL} to {UNUSED} are known");
                return Err(Error::unsupported(field, &other, known));
            }
        }
    }
    Ok(added)
}

#[cfg(test)]
mod tests {
    use super::super::Tokens;
    use super::*;

    fn metadata() -> Metadata {
        let mut metadata = Metadata::default();
        let texts = |list: &[&str]| {
            Value::List(list.iter().map(|text| Value::Text((*text).into())).collect())
        };
        let tokens = ["<end>", "a", "b", "Ġ", "ab", "Ġab", "1", "2", "12", "Ã", "©"];
        let token_types = (0..tokens.len()).map(|id| if id == 0 { 3 } else { 1 });
        for (name, value) in [
            ("model", Value::Text("gpt2".into())),
            ("pre", Value::Text("smollm".into())),
            ("tokens", texts(&tokens)),
            ("merges", texts(&["a b", "Ġ ab", "1 2"])),
            ("token_type", Value::Numbers(token_types.collect())),
            ("bos_token_id", Value::Unsigned(0)),
        ] {
            metadata.values.insert(format!("tokenizer.ggml.{name}"), value);
        }
        metadata
    }

    #[test]
    fn a_tokenizer_is_made_again_from_a_gguf() {
        let tokens = Tokens::from_gguf(&metadata()).unwrap();
        assert_eq!(tokens.len(), 11);
        assert_eq!(tokens.encode("ab ab12<end>é").unwrap(), [4, 5, 6, 7, 0, 9, 10]);
        assert_eq!(tokens.decode(&[4, 5, 6, 7, 0, 9, 10]), "ab ab12é");
        assert_eq!(tokens.token(5).unwrap(), " ab");
        assert_eq!(tokens.token(9).unwrap(), "<0xC3>");
        assert_eq!(tokens.token(0).unwrap(), "<end>");
        assert_eq!(tokens.token(11), None);

        let mut stream = tokens.stream();
        let text: Vec<_> = [4, 9, 10, 5].into_iter().map(|id| stream.push(id)).collect();
        let expected = [Some("ab"), None, Some("é"), Some(" ab")];
        assert_eq!(text, expected.map(|text| text.map(str::to_owned)));
        assert_eq!(stream.finish(), None);

        let again = Tokens::from_json(tokens.to_json().unwrap().as_bytes()).unwrap();
        assert_eq!(again.encode("ab ab12<end>").unwrap(), [4, 5, 6, 7, 0]);
    }

    #[test]
    fn settings_are_followed_or_refused() {
        let with = |name: &str, value: Value| {
            let mut metadata = metadata();
            metadata.values.insert(format!("tokenizer.ggml.{name}"), value);
            Tokens::from_gguf(&metadata)
        };
        let begun = with("add_bos_token", Value::Bool(true)).unwrap();
        assert_eq!(begun.encode("ab").unwrap(), [0, 4]);
        let plain = with("pre", Value::Text("gpt-2".into())).unwrap();
        assert_eq!(plain.encode("12").unwrap(), [8]);
        for (name, value) in [
            ("pre", Value::Text("nobody".into())),
            ("model", Value::Text("bert".into())),
            ("add_eos_token", Value::Bool(true)),
            ("token_type", Value::List(Vec::new())),
            ("tokens", Value::List(vec![Value::Text("a".into()); 2])),
            ("merges", Value::List(vec![Value::Text("ab".into())])),
            ("merges", Value::List(vec![Value::Text("x y".into())])),
        ] {
            assert!(with(name, value).is_err(), "{name}");
        }
    }

    #[test]
    fn every_way_to_make_words_is_a_pattern() {
        let names = [
            "gpt-2",
            "smollm",
            "llama-bpe",
            "dbrx",
            "qwen2",
            "stablelm2",
            "tekken",
            "gpt-4o",
            "deepseek-v3",
            "deepseek-coder",
            "falcon",
            "default",
        ];
        for pre in names {
            let mut metadata = metadata();
            metadata.values.insert("tokenizer.ggml.pre".into(), Value::Text(pre.into()));
            let tokens = Tokens::from_gguf(&metadata).unwrap();
            let ids = tokens.encode("ab ab").unwrap();
            assert!(ids.ends_with(&[4, 5]), "{pre}: {ids:?}");
        }
    }

    #[test]
    fn llama_3_takes_words_whole_and_three_digits() {
        let mut metadata = metadata();
        let mut set = |name: &str, value: Value| {
            metadata.values.insert(format!("tokenizer.ggml.{name}"), value);
        };
        let texts = |list: &[&str]| {
            Value::List(list.iter().map(|text| Value::Text((*text).into())).collect())
        };
        set("pre", Value::Text("llama-bpe".into()));
        set("tokens", texts(&["<s>", "1", "11", "111", "a", "b", "ab", "Ã", "©", "Ì", "ģ", "e"]));
        set("merges", texts(&["1 1"]));
        set(
            "token_type",
            Value::Numbers([3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1].into_iter().collect()),
        );
        let tokens = Tokens::from_gguf(&metadata).unwrap();
        // `111` and `ab` have no merges.
        assert_eq!(tokens.encode("11111ab").unwrap(), [0, 3, 2, 6]);
        metadata.values.insert("tokenizer.ggml.pre".into(), Value::Text("qwen2".into()));
        let tokens = Tokens::from_gguf(&metadata).unwrap();
        assert_eq!(tokens.encode("11ab").unwrap(), [1, 1, 4, 5]);
        // Composed first.
        assert_eq!(tokens.encode("e\u{301}").unwrap(), [7, 8]);
    }
}
