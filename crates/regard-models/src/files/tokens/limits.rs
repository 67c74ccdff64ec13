//! What a `tokenizer.json` may say before the crate `tokenizers` is given it.
//!
//! That crate trusts its files. What is known to make it panic or take memory without end is refused here by name; what is not known
//! is caught (`guard.rs`). Found in version 0.22.2 and in `spm_precompiled` 0.1.4, for their authors:
//!
//! | where | what happens |
//! |---|---|
//! | `BPE`: `continuing_subword_prefix` longer than a merged token, or cutting a character | panic while the file is read |
//! | `FixedLength { length: 0 }` | panic: chunks of 0 |
//! | decoder `Strip { stop }` above 0 | panic where a token is shorter, or is only what is stripped at both ends |
//! | `TemplateProcessing`: a special token that is not listed, a sequence B for a single text | panic while a text is divided |
//! | `Precompiled`: no trie, or offsets beyond it | panic while a text is normalised; the claimed size is allocated unseen |
//! | `Sequence` of normalizers, pre-tokenizers, decoders or processors | each may double the text: 60 of them ask for 2^60 bytes |
//! | nested `Sequence` | parsed once more for each level |

use super::wrong;
use crate::error::Error;
use serde_json::Value;

/// Bytes of a `tokenizer.json`: the largest that are published have 40 million.
pub(super) const MAX_FILE: usize = 1 << 27;
/// Bytes that may come of one text, by what the parts of a tokenizer may each make of it at worst.
const MAX_MADE: usize = 1 << 28;
/// Sequences within sequences.
const MAX_DEPTH: usize = 4;
/// Normalizers, pre-tokenizers, decoders or processors, of each kind.
const MAX_STEPS: usize = 64;
/// Letters of a regular expression.
const MAX_PATTERN: usize = 1 << 14;
/// Letters of a word that `WordPiece` divides, at a cost of their square.
const MAX_WORD: u64 = 1000;
/// Numbers of tokens are below this, as in every vocabulary that can be held.
const MAX_ID: u64 = 1 << 28;

/// What the parts of a tokenizer may make of a text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    encode: Growth,
    decode: Growth,
    /// One more than the highest number of a token.
    pub(super) end: usize,
}

/// At worst, `added` bytes more than a text has, and each of them becomes `factor`.
#[derive(Clone, Copy, Debug)]
struct Growth {
    factor: usize,
    added: usize,
    steps: usize,
}

impl Limits {
    /// Of a tokenizer that is made here.
    pub(super) fn of_ours(end: usize) -> Self {
        let growth = Growth { factor: 4, added: 0, steps: 1 };
        Self { encode: growth, decode: growth, end }
    }

    /// Refuses what a tokenizer should not be made of.
    pub(super) fn check(json: &Value) -> Result<Self, Error> {
        let mut encode = Growth::NONE;
        for part in ["normalizer", "pre_tokenizer", "post_processor"] {
            let mut of_part = Growth { steps: 0, ..encode };
            of_part.walk(part, &json[part], 0)?;
            encode = of_part;
        }
        let mut decode = Growth::NONE;
        decode.walk("decoder", &json["decoder"], 0)?;
        let end = ids(json)?;
        let word = json["model"]["max_input_chars_per_word"].as_u64().unwrap_or(0);
        if word > MAX_WORD {
            let why = format!("{word}; {MAX_WORD} are the most that are tried");
            return Err(Error::format("model.max_input_chars_per_word", why));
        }
        let limits = Self { encode, decode, end };
        // The tokenizer normalises these when it is read.
        let added = json["added_tokens"].as_array().into_iter().flatten();
        added
            .filter_map(|token| token["content"].as_str())
            .try_for_each(|token| limits.text(token))?;
        Ok(limits)
    }

    /// Refuses a text of which too much could come.
    pub(super) fn text(&self, text: &str) -> Result<(), Error> {
        self.encode.check("the text", text.len())
    }

    /// The same of tokens that become a text.
    pub(super) fn tokens(&self, bytes: impl FnOnce() -> usize) -> Result<(), Error> {
        // Nearly all make so little that the bytes need not be counted.
        if self.decode.factor <= 64 {
            return Ok(());
        }
        self.decode.check("the tokens", bytes())
    }
}

impl Growth {
    const NONE: Self = Self { factor: 1, added: 0, steps: 0 };

    fn check(self, what: &str, bytes: usize) -> Result<(), Error> {
        let most = bytes.saturating_add(self.added).saturating_mul(self.factor);
        if most <= MAX_MADE {
            return Ok(());
        }
        let why = format!(
            "{bytes} bytes, of which its tokenizer.json may make {most}; {MAX_MADE} are allowed: \
             shorten it, or take steps out of that file"
        );
        Err(Error::Tokens { what: what.into(), why })
    }

    fn grow(&mut self, factor: usize) {
        self.factor = self.factor.saturating_mul(factor.max(1));
    }

    fn add(&mut self, bytes: usize) {
        self.added = self.added.saturating_add(bytes);
    }

    /// One part of a file, and all that it is a sequence of. The token types are those of tokenizers 0.22; a part without a `type` is known
    /// there by its fields, and so it is here.
    fn walk(&mut self, name: &str, part: &Value, depth: usize) -> Result<(), Error> {
        let Some(map) = part.as_object() else { return Ok(()) };
        self.steps += 1;
        if depth > MAX_DEPTH || self.steps > MAX_STEPS {
            let limits =
                format!("{MAX_STEPS} steps, sequences of sequences up to {MAX_DEPTH} deep");
            return Err(Error::format(name, format!("too many; {limits}, are read")));
        }
        self.grow(match map.get("type").and_then(Value::as_str) {
            Some("NFKC" | "NFKD") => 12,
            Some("NFC" | "NFD" | "BertNormalizer" | "ByteLevel" | "Lowercase") => 4,
            Some("Metaspace") => 8,
            Some("WordPiece" | "BPEDecoder" | "CTC") => 2,
            None if map.contains_key("replacement") => 8,
            None if map.contains_key("trim_offsets") => 4,
            None if map.contains_key("suffix") => 2,
            _ => 1,
        });
        for (field, value) in map {
            match (field.as_str(), value) {
                (
                    "normalizers" | "pretokenizers" | "decoders" | "processors",
                    Value::Array(all),
                ) => {
                    all.iter().try_for_each(|part| self.walk(name, part, depth + 1))?;
                }
                ("content", Value::String(content)) => {
                    self.grow(replaced(name, map.get("pattern"), content.len())?);
                }
                ("pattern", pattern) => {
                    replaced(name, Some(pattern), 0)?;
                }
                ("prepend" | "prefix" | "suffix" | "replacement", Value::String(text)) => {
                    self.add(text.len());
                }
                ("precompiled_charsmap", Value::String(map)) => self.grow(charsmap(name, map)?),
                ("length", length) if length.as_u64() == Some(0) => {
                    let why = "0; a length is 1 or more";
                    return Err(Error::format(format!("{name}.length"), why));
                }
                ("stop", stop) if stop.as_u64() != Some(0) => {
                    let why = format!("{stop}; 0 is known, for tokens may be shorter");
                    return Err(Error::format(format!("{name}.stop"), why));
                }
                ("single", Value::Array(pieces)) => {
                    self.template(pieces, map.get("special_tokens"))?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// What is put around a single text.
    fn template(&mut self, pieces: &[Value], special: Option<&Value>) -> Result<(), Error> {
        let (place, special) = ("post_processor.single", special.unwrap_or(&Value::Null));
        let mut texts = 0;
        for piece in pieces {
            if let Some(id) = piece["SpecialToken"]["id"].as_str() {
                let Some(ids) = special[id]["ids"].as_array() else {
                    let why = format!("`{id}` is not among special_tokens; list it there");
                    return Err(Error::format(place, why));
                };
                self.add(ids.len());
            } else if piece["Sequence"]["id"] == "A" {
                texts += 1;
            } else {
                let why = format!("{piece}; a single text is the sequence A");
                return Err(Error::format(place, why));
            }
        }
        self.grow(texts);
        Ok(())
    }
}

/// What each byte may become where a pattern is replaced.
fn replaced(name: &str, pattern: Option<&Value>, content: usize) -> Result<usize, Error> {
    let Some(pattern) = pattern else { return Ok(1) };
    match (pattern["String"].as_str(), pattern["Regex"].as_str()) {
        (Some(text), _) if !text.is_empty() => Ok(content.div_ceil(text.len())),
        (_, Some(regex)) if regex.len() > MAX_PATTERN => {
            let why = format!("{} bytes; {MAX_PATTERN} are the most", regex.len());
            Err(Error::format(format!("{name}.pattern"), why))
        }
        // A pattern may fit between any two bytes.
        _ => Ok(content.saturating_add(1)),
    }
}

/// What each byte may become by the map of SentencePiece: the length of its trie, the trie, and texts that end with a 0.
fn charsmap(name: &str, base64: &str) -> Result<usize, Error> {
    let place = || format!("{name}.precompiled_charsmap");
    let Some(bytes) = decoded(base64) else {
        return Err(Error::format(place(), "no base64"));
    };
    let trie = bytes.split_first_chunk().and_then(|(len, rest)| {
        let len = usize::try_from(u32::from_le_bytes(*len)).ok()?;
        (len >= 4).then(|| rest.split_at_checked(len)).flatten()
    });
    let Some((_, texts)) = trie else {
        let why = format!("its trie is not within its {} bytes; get the file again", bytes.len());
        return Err(Error::format(place(), why));
    };
    Ok(texts.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(1))
}

/// Base64 of the usual alphabet, with or without its padding.
fn decoded(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: &u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits: Vec<u8> =
        text.trim_end_matches('=').bytes().map(|b| digit(&b)).collect::<Option<_>>()?;
    let three = |four: &[u8]| {
        let word =
            four.iter().chain(&[0; 3]).take(4).fold(0u32, |word, d| (word << 6) | u32::from(*d));
        let [_, bytes @ ..] = word.to_be_bytes();
        bytes.into_iter().take(four.len() * 6 / 8)
    };
    Some(digits.chunks(4).flat_map(three).collect())
}

/// Refuses numbers of tokens that no vocabulary has. Returns one more than the highest.
fn ids(json: &Value) -> Result<usize, Error> {
    let vocab = &json["model"]["vocab"];
    let of_vocab = vocab.as_object().into_iter().flatten().map(|(_, id)| id);
    let added = json["added_tokens"].as_array().into_iter().flatten().map(|token| &token["id"]);
    let mut special = Vec::new();
    of_processor(&json["post_processor"], &mut special);
    let mut end = vocab.as_array().map_or(0, |pieces| pieces.len() as u64);
    for id in of_vocab.chain(added).chain(special).filter(|id| !id.is_null()) {
        let Some(id) = id.as_u64().filter(|id| *id < MAX_ID) else {
            let why = format!("{id}; the number of a token is from 0 to {}", MAX_ID - 1);
            return Err(Error::format("the id of a token", why));
        };
        end = end.max(id + 1);
    }
    usize::try_from(end).map_err(wrong)
}

/// The numbers that a processor puts around a text. How deep it may nest has been checked.
fn of_processor<'a>(part: &'a Value, found: &mut Vec<&'a Value>) {
    for (_, token) in part["special_tokens"].as_object().into_iter().flatten() {
        found.extend(token["ids"].as_array().into_iter().flatten());
    }
    found.extend([&part["sep"][1], &part["cls"][1]]);
    for part in part["processors"].as_array().into_iter().flatten() {
        of_processor(part, found);
    }
}
