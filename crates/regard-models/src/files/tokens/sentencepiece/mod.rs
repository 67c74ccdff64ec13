//! SentencePiece models: of `.spm` and `.model` files, of Marian with its own numbers, and of GGUF files.
//!
//! The ids are those of the C++ library. The crate `tokenizers` has its algorithms too, but in other widths of numbers and with
//! other rules for characters of several code points, so its ids differ; and its trie is dropped by recursion, one call for each
//! byte of a piece.

mod normalize;
mod pieces;
mod proto;
#[cfg(test)]
mod tests;

use super::{label, wrong};
use crate::error::Error;
use crate::files::gguf::{Metadata, Value};
use normalize::{Charsmap, SPACE, normalized};
use pieces::{Pieces, byte, prefixes};
use proto::{Algorithm, Kind, Model, Piece};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Numbers of tokens are below this, as in every vocabulary that can be held.
const MAX_ID: u32 = 1 << 28;
/// Special tokens of Marian.
const END: &str = "</s>";
const UNKNOWN: &str = "<unk>";
const PAD: &str = "<pad>";

/// Languages of M2M-100, in the order of their numbers.
#[rustfmt::skip]
const LANGUAGES: [&str; 100] = [
    "af", "am", "ar", "ast", "az", "ba", "be", "bg", "bn", "br", "bs", "ca", "ceb", "cs", "cy", "da", "de", "el", "en", "es",
    "et", "fa", "ff", "fi", "fr", "fy", "ga", "gd", "gl", "gu", "ha", "he", "hi", "hr", "ht", "hu", "hy", "id", "ig", "ilo",
    "is", "it", "ja", "jv", "ka", "kk", "km", "kn", "ko", "lb", "lg", "ln", "lo", "lt", "lv", "mg", "mk", "ml", "mn", "mr",
    "ms", "my", "ne", "nl", "no", "ns", "oc", "or", "pa", "pl", "ps", "pt", "ro", "ru", "sd", "si", "sk", "sl", "so", "sq",
    "sr", "ss", "su", "sv", "sw", "ta", "th", "tl", "tn", "tr", "uk", "ur", "uz", "vi", "wo", "xh", "yi", "yo", "zh", "zu",
];

/// A SentencePiece model, and what is done around it.
#[derive(Clone, Debug)]
pub(super) struct SentencePiece {
    model: Model,
    map: Charsmap,
    pieces: Pieces,
    vocabulary: Option<Vocabulary>,
    /// Tokens that are found in a text before it is divided, in the order of their bytes.
    special: Vec<Special>,
    pub(super) begin: Option<u32>,
    pub(super) end: Option<u32>,
}

#[derive(Clone, Debug)]
struct Special {
    text: Box<str>,
    id: u32,
    /// Whether white space after it is left out (Phi-3).
    strip: bool,
}

/// Numbers of pieces that are not those of the model (Marian).
#[derive(Clone, Debug)]
struct Vocabulary {
    ids: HashMap<String, u32>,
    texts: HashMap<u32, String>,
    unknown: u32,
    /// Whether a text may begin with `>>cmn<<`, the language to translate into (Marian).
    codes: bool,
    /// One more than the highest number.
    len: usize,
}

/// What [`SentencePiece::to_json`] writes.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Json {
    sentencepiece: Model,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vocabulary: Option<BTreeMap<String, u32>>,
    #[serde(default)]
    codes: bool,
    special: Vec<u32>,
    /// Those of them after which white space is left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    strip: Vec<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    begin: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    end: Option<u32>,
}

impl Vocabulary {
    fn new(ids: impl IntoIterator<Item = (String, u32)>, codes: bool) -> Result<Self, Error> {
        let ids: HashMap<String, u32> = ids.into_iter().collect();
        let mut texts = HashMap::new();
        for (text, id) in &ids {
            if *id >= MAX_ID {
                let why = format!("{id}; the number of a token is from 0 to {}", MAX_ID - 1);
                return Err(Error::format(format!("`{text}`"), why));
            }
            if let Some(other) = texts.insert(*id, text.clone()) {
                let why = format!("{id}, the number of `{other}` too");
                return Err(Error::format(format!("`{text}`"), why));
            }
        }
        let unknown = ids.get(UNKNOWN).copied();
        let unknown = unknown.ok_or_else(|| Error::format(UNKNOWN, "not in the vocabulary"))?;
        let len = texts.keys().max().map_or(0, |id| *id as usize + 1);
        Ok(Self { ids, texts, unknown, codes, len })
    }
}

impl SentencePiece {
    fn new(model: Model, vocabulary: Option<Vocabulary>) -> Result<Self, Error> {
        let (map, pieces) = (Charsmap::read(&model.charsmap)?, Pieces::new(&model)?);
        let (special, begin, end) = (Vec::new(), None, None);
        Ok(Self { model, map, pieces, vocabulary, special, begin, end })
    }

    /// The same with these tokens found first.
    fn special(mut self, ids: impl IntoIterator<Item = u32>) -> Result<Self, Error> {
        let mut special = Vec::new();
        for id in ids {
            let missing = || Error::format("special", format!("there is no token {id}"));
            let text = self.text(id).filter(|text| !text.is_empty()).ok_or_else(missing)?;
            special.push(Special { text: text.into(), id, strip: false });
        }
        special.sort_unstable_by(|a, b| a.text.cmp(&b.text));
        special.dedup_by_key(|special| special.id);
        self.special = special;
        Ok(self)
    }

    /// The pieces of these kinds.
    fn of_kinds(&self, kinds: &[Kind]) -> Vec<u32> {
        let count = u32::try_from(self.pieces.len()).unwrap_or(u32::MAX);
        let listed = |id: &u32| self.pieces.kind(*id).is_some_and(|kind| kinds.contains(&kind));
        (0..count).filter(listed).collect()
    }

    /// A `.spm` or `.model` file.
    pub(super) fn from_spm(bytes: &[u8]) -> Result<Self, Error> {
        let model = Self::new(Model::read(bytes)?, None)?;
        if model.pieces.unknown.is_none() {
            return Err(Error::format("sentencepiece", "there is no unknown piece"));
        }
        let special = model.of_kinds(&[Kind::Control, Kind::Unknown]);
        model.special(special)
    }

    /// A side of Marian: its `.spm`, and `vocab.json`, which has the numbers.
    pub(super) fn marian(spm: &[u8], vocabulary: &[u8]) -> Result<Self, Error> {
        let model = Self::from_spm(spm)?.model;
        let ids: HashMap<String, u32> = serde_json::from_slice(vocabulary).map_err(wrong)?;
        let of = |text: &str| ids.get(text).copied();
        let special: Vec<u32> = [END, UNKNOWN, PAD].iter().filter_map(|text| of(text)).collect();
        let end = of(END).ok_or_else(|| Error::format(END, "not in the vocabulary"))?;
        let marian = Self::new(model, Some(Vocabulary::new(ids, true)?))?.special(special)?;
        Ok(Self { end: Some(end), ..marian })
    }

    /// M2M-100: its model and its `vocab.json`, after which the languages are numbered. A text begins with its language.
    pub(super) fn m2m100(spm: &[u8], vocabulary: &[u8], language: &str) -> Result<Self, Error> {
        let model = Self::from_spm(spm)?.model;
        let mut ids: HashMap<String, u32> = serde_json::from_slice(vocabulary).map_err(wrong)?;
        let count = u32::try_from(ids.len()).map_err(wrong)?;
        let of = |ids: &HashMap<String, u32>, text: &str| ids.get(text).copied();
        let mut special: Vec<u32> =
            ["<s>", END, UNKNOWN, PAD].iter().filter_map(|text| of(&ids, text)).collect();
        for (code, id) in LANGUAGES.iter().zip(count..) {
            ids.insert(format!("__{code}__"), id);
            special.push(id);
        }
        let begin = of(&ids, &format!("__{language}__"));
        let known = || Error::unsupported("language", &language, LANGUAGES.join(", "));
        let begin = begin.ok_or_else(known)?;
        let end = of(&ids, END).ok_or_else(|| Error::format(END, "not in the vocabulary"))?;
        let own = Self::new(model, Some(Vocabulary::new(ids, false)?))?.special(special)?;
        Ok(Self { begin: Some(begin), end: Some(end), ..own })
    }

    /// What a GGUF of `tokenizer.ggml.model = llama` says, as llama.cpp divides by it.
    pub(super) fn from_gguf(metadata: &Metadata) -> Result<Self, Error> {
        let field = |name: &str| format!("tokenizer.ggml.{name}");
        let missing = |name: &str| Error::format(field(name), "missing in the file");
        let tokens = metadata.texts(&field("tokens"))?.ok_or_else(|| missing("tokens"))?;
        let scores = numbers(metadata, &field("scores"), tokens.len())?;
        let kinds = numbers(metadata, &field("token_type"), tokens.len())?;
        let mut pieces = Vec::new();
        for (id, text) in tokens.iter().enumerate() {
            #[expect(clippy::cast_possible_truncation, reason = "it is written as f32")]
            let score = scores.as_ref().map_or(0.0, |scores| scores[id]) as f32;
            let kind = kinds.as_ref().map_or(1.0, |kinds| kinds[id]);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "1 to 6")]
            let known = Kind::of(kind as u64);
            let known = known.ok_or_else(|| {
                let known = format!("of `{text}`; kinds of tokens are 1 to 6");
                Error::unsupported(field("token_type"), &kind, known)
            })?;
            pieces.push(Piece { text: (*text).into(), score, kind: known });
        }
        let model = Model {
            algorithm: Algorithm::Bpe,
            pieces,
            charsmap: Vec::new(),
            add_dummy_prefix: metadata.bool(&field("add_space_prefix"))?.unwrap_or(true),
            remove_extra_whitespaces: false,
            escape_whitespaces: true,
        };
        let model = Self::new(model, None)?;
        let special = model.of_kinds(&[Kind::Control, Kind::Unknown, Kind::User]);
        let special = special.into_iter().filter(|id| !tokens[*id as usize].is_empty());
        let mut model = model.special(special.collect::<Vec<_>>())?;
        // Phi-3's tokenizer.json says so of all but three; a GGUF has no field for it.
        let name = metadata.text("general.name")?.unwrap_or_default().to_lowercase();
        if name.contains("phi-3") || name.contains("phi3") {
            for special in &mut model.special {
                special.strip = !["<unk>", "<s>", "<|endoftext|>"].contains(&&*special.text);
            }
        }
        let (begin, end) = super::gguf::ends(metadata, true, tokens.len())?;
        Ok(Self { begin, end, ..model })
    }

    pub(super) fn len(&self) -> usize {
        self.vocabulary.as_ref().map_or_else(|| self.pieces.len(), |vocabulary| vocabulary.len)
    }

    /// A token as its vocabulary has it.
    fn text(&self, id: u32) -> Option<&str> {
        match &self.vocabulary {
            Some(vocabulary) => vocabulary.texts.get(&id).map(String::as_str),
            None => self.pieces.text(id),
        }
    }

    pub(super) fn id(&self, text: &str) -> Option<u32> {
        match &self.vocabulary {
            Some(vocabulary) => vocabulary.ids.get(text).copied(),
            None => self.pieces.id(text),
        }
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        Ok(self.encode_with_offsets(text)?.into_iter().map(|(id, _)| id).collect())
    }

    /// The tokens of a text, each with the bytes that it covers; the ends cover none.
    pub(super) fn encode_with_offsets(
        &self,
        text: &str,
    ) -> Result<Vec<(u32, Range<usize>)>, Error> {
        let mut tokens: Vec<(u32, Range<usize>)> = Vec::new();
        tokens.extend(self.begin.map(|id| (id, 0..0)));
        let order: Vec<u32> = (0..).take(self.special.len()).collect();
        let texts = |index: u32| self.special[index as usize].text.as_bytes();
        let mut begun = 0;
        let mut at = 0;
        while at < text.len() {
            match prefixes(&order, texts, &text.as_bytes()[at..]).last() {
                Some((len, index)) => {
                    self.divide(text, begun..at, &mut tokens)?;
                    let Special { id, strip, .. } = self.special[index as usize];
                    tokens.push((id, at..at + len));
                    at += len;
                    if strip {
                        at = text.len() - text[at..].trim_ascii_start().len();
                    }
                    begun = at;
                }
                None => at += text[at..].chars().next().map_or(1, char::len_utf8),
            }
        }
        self.divide(text, begun..text.len(), &mut tokens)?;
        tokens.extend(self.end.map(|id| (id, 0..0)));
        Ok(tokens)
    }

    /// A part of a text without special tokens.
    fn divide(
        &self,
        text: &str,
        Range { mut start, end }: Range<usize>,
        tokens: &mut Vec<(u32, Range<usize>)>,
    ) -> Result<(), Error> {
        let number = |vocabulary: &Vocabulary, text: &str| {
            vocabulary.ids.get(text).copied().unwrap_or(vocabulary.unknown)
        };
        if let Some(vocabulary) = self.vocabulary.as_ref().filter(|own| own.codes)
            && let Some(len) = text[start..end].strip_prefix(">>").and_then(|rest| rest.find("<<"))
        {
            let code = start..start + len + 4;
            start = code.end;
            tokens.push((number(vocabulary, &text[code.clone()]), code));
        }
        let own = normalized(&self.model, &self.map, &self.pieces, &text[start..end])?;
        let mut from = 0;
        for (part, id) in self.pieces.divide(&own.text)? {
            // A piece of a byte comes without its text.
            let to = from + part.len().max(1);
            let Range { start: first, end: last } = own.original(&(from..to));
            from = to;
            // A character that the model has no piece for may have a number all the same. A byte has the name of its piece.
            let part = if part.is_empty() { self.pieces.text(id).unwrap_or(part) } else { part };
            let id = self.vocabulary.as_ref().map_or(id, |vocabulary| number(vocabulary, part));
            tokens.push((id, start + first..start + last));
        }
        Ok(())
    }

    fn is_special(&self, id: u32) -> bool {
        match &self.vocabulary {
            Some(_) => self.special.iter().any(|special| special.id == id),
            None => matches!(self.pieces.kind(id), Some(Kind::Control | Kind::Unknown)),
        }
    }

    /// `Decode` of SentencePiece: the first space is the one that was put there, and bytes that are no text become `�`.
    pub(super) fn decode(&self, ids: &[u32]) -> String {
        let (mut out, mut bytes) = (String::new(), Vec::new());
        let Model { add_dummy_prefix, remove_extra_whitespaces, .. } = self.model;
        let (mut begin, mut consumed) = (true, false);
        for id in ids.iter().filter(|id| !self.is_special(**id)) {
            let Some(text) = self.text(*id) else { continue };
            let own = if self.vocabulary.is_some() { self.pieces.id(text) } else { Some(*id) };
            let kind = own.and_then(|own| self.pieces.kind(own)).unwrap_or(Kind::Unknown);
            if let Some(byte) = byte(text).filter(|_| kind == Kind::Byte) {
                bytes.push(byte);
                continue;
            }
            flush(&mut bytes, &mut out);
            if consumed || !out.is_empty() {
                begin = false;
            }
            consumed = false;
            match kind {
                Kind::Control => {}
                Kind::Unknown => out.push_str(text),
                _ => {
                    let first = begin && (add_dummy_prefix || remove_extra_whitespaces);
                    let less = text.strip_prefix(SPACE).filter(|_| first);
                    consumed = less.is_some() && !remove_extra_whitespaces;
                    out.push_str(&less.unwrap_or(text).replace(SPACE, " "));
                }
            }
        }
        flush(&mut bytes, &mut out);
        if self.vocabulary.is_none() {
            return out;
        }
        // As Transformers does: Python counts these separators as white space.
        let white = |c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c);
        out.replace(SPACE, " ").trim_matches(white).to_owned()
    }

    pub(super) fn token(&self, id: u32) -> Option<String> {
        let text = self.text(id)?;
        let own = if self.vocabulary.is_some() { self.pieces.id(text) } else { Some(id) };
        let is_byte = own.and_then(|own| self.pieces.kind(own)) == Some(Kind::Byte);
        let byte = byte(text).filter(|_| is_byte);
        Some(byte.map_or_else(|| text.replace(SPACE, " "), |byte| label(&[byte])))
    }

    pub(super) fn to_json(&self) -> Result<String, Error> {
        let vocabulary = self.vocabulary.as_ref();
        let json = Json {
            sentencepiece: self.model.clone(),
            vocabulary: vocabulary.map(|v| v.ids.clone().into_iter().collect()),
            codes: vocabulary.is_some_and(|v| v.codes),
            special: self.special.iter().map(|special| special.id).collect(),
            strip: self.special.iter().filter(|s| s.strip).map(|special| special.id).collect(),
            begin: self.begin,
            end: self.end,
        };
        serde_json::to_string(&json).map_err(wrong)
    }

    pub(super) fn from_json(bytes: &[u8]) -> Result<Self, Error> {
        let json: Json = serde_json::from_slice(bytes).map_err(wrong)?;
        let vocabulary = json.vocabulary.map(|ids| Vocabulary::new(ids, json.codes)).transpose()?;
        let mut own = Self::new(json.sentencepiece, vocabulary)?.special(json.special)?;
        for special in &mut own.special {
            special.strip = json.strip.contains(&special.id);
        }
        own.with_ends(json.begin, json.end)
    }

    /// The same with other tokens before and after each text.
    pub(super) fn with_ends(self, begin: Option<u32>, end: Option<u32>) -> Result<Self, Error> {
        if let Some(id) = begin.iter().chain(&end).find(|id| self.text(**id).is_none()) {
            return Err(Error::format("begin or end", format!("there is no token {id}")));
        }
        Ok(Self { begin, end, ..self })
    }
}

/// Bytes as text, each that is no text as `�`.
fn flush(bytes: &mut Vec<u8>, out: &mut String) {
    for chunk in bytes.utf8_chunks() {
        out.push_str(chunk.valid());
        out.extend(chunk.invalid().iter().map(|_| char::REPLACEMENT_CHARACTER));
    }
    bytes.clear();
}

/// A list of numbers, one for each token.
fn numbers(metadata: &Metadata, field: &str, tokens: usize) -> Result<Option<Vec<f64>>, Error> {
    let Some(value) = metadata.get(field) else { return Ok(None) };
    let wrong = || Error::format(field, format!("{value}; {tokens} numbers are wanted"));
    let Value::Numbers(numbers) = value else { return Err(wrong()) };
    #[expect(clippy::cast_precision_loss, reason = "kinds of tokens are small")]
    let number = |value: Value| match value {
        Value::Float(x) => Some(x),
        Value::Unsigned(n) => Some(n as f64),
        Value::Signed(n) => Some(n as f64),
        _ => None,
    };
    let numbers: Option<Vec<f64>> = numbers.iter().map(number).collect();
    numbers.filter(|numbers| numbers.len() == tokens).map(Some).ok_or_else(wrong)
}
