//! Tokens by the `tokenizers` crate: from its own files, or made again from what a GGUF says.

use super::guard::guarded;
use super::limits::{Limits, MAX_FILE};
use super::{label, wrong};
use crate::error::Error;
use crate::files::gguf::{Metadata, Value};
use std::collections::BTreeSet;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, DecoderWrapper, PreTokenizerWrapper, Tokenizer};

#[derive(Clone)]
pub(super) struct Library {
    tokenizer: Tokenizer,
    /// Whether a token is written in the letters that stand for bytes.
    bytes: bool,
    /// What a text is begun with, where the tokenizer does not know it itself.
    begin: Option<u32>,
    limits: Limits,
}

/// Letters, a digit and a space: something for every kind of step.
const PROBE: &str = "A \u{e9}1\u{4e00}.";
/// Letters of a text in a message about it.
const SHOWN: usize = 60;

/// What a panic of the library is told as.
fn panicked(message: String) -> Error {
    let why = format!(
        "the crate tokenizers panicked: {message}; the file is damaged, or meets a defect of it"
    );
    Error::format("tokens", why)
}

/// Kinds of tokens in a GGUF: ordinary ones, special tokens, and those that a user has added.
const NORMAL: u64 = 1;
const CONTROL: u64 = 3;
const USER: u64 = 4;

impl Library {
    pub(super) fn from_json(bytes: &[u8]) -> Result<Self, Error> {
        if bytes.len() > MAX_FILE {
            let why = format!("{} bytes; {MAX_FILE} are the most that are read", bytes.len());
            return Err(Error::format("tokens", why));
        }
        // Taken out before the tokenizer sees them: it adds and cuts as its last user wished.
        let mut value: serde_json::Value = serde_json::from_slice(bytes).map_err(wrong)?;
        if let Some(map) = value.as_object_mut() {
            map.remove("padding");
            map.remove("truncation");
        }
        let limits = Limits::check(&value)?;
        let bytes = serde_json::to_vec(&value).map_err(wrong)?;
        let tokenizer = guarded(|| Tokenizer::from_bytes(bytes)).map_err(panicked)?;
        let library = Self::new(tokenizer.map_err(wrong)?, None, limits);
        // What panics with any text is refused with its file, not with the first text. That these letters may have no tokens is fine.
        guarded(|| drop(library.tokenizer.encode_fast(PROBE, true))).map_err(panicked)?;
        Ok(library)
    }

    fn new(tokenizer: Tokenizer, begin: Option<u32>, limits: Limits) -> Self {
        let bytes = matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_)));
        Self { tokenizer, bytes, begin, limits }
    }

    pub(super) fn from_gguf(metadata: &Metadata) -> Result<Self, Error> {
        let field = |name: &str| format!("tokenizer.ggml.{name}");
        let model = metadata.text(&field("model"))?.unwrap_or("nothing");
        if model != "gpt2" {
            return Err(Error::unsupported(field("model"), &model, "`gpt2` is known"));
        }
        for name in ["add_eos_token", "add_space_prefix"] {
            if metadata.bool(&field(name))? == Some(true) {
                return Err(Error::unsupported(field(name), &true, "false is known"));
            }
        }
        let letters = ByteLevel::new(false, true, true);
        let digits = PreTokenizerWrapper::from(Digits::new(true));
        let before = match metadata.text(&field("pre"))?.unwrap_or("gpt-2") {
            "gpt-2" => PreTokenizerWrapper::from(letters),
            "smollm" => Sequence::new(vec![digits, letters.into()]).into(),
            other => {
                let known = "`smollm` and `gpt-2` are known";
                return Err(Error::unsupported(field("pre"), &other, known));
            }
        };
        let missing = |name: &str| Error::format(field(name), "missing in the file");
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
        let tokenizer = guarded(|| {
            let model = BPE::builder().vocab_and_merges(vocab, merges).build()?;
            let mut tokenizer = Tokenizer::new(model);
            tokenizer.with_pre_tokenizer(Some(before)).with_decoder(Some(letters));
            tokenizer.add_tokens(&added);
            Ok::<_, tokenizers::Error>(tokenizer)
        });
        let tokenizer = tokenizer.map_err(panicked)?.map_err(wrong)?;
        let mut begin = None;
        if metadata.bool(&field("add_bos_token"))? == Some(true) {
            let id = metadata.whole(&field("bos_token_id"))?;
            let id = id.filter(|id| usize::try_from(*id).is_ok_and(|id| id < tokens.len()));
            begin = id.and_then(|id| u32::try_from(id).ok());
            begin.ok_or_else(|| missing("bos_token_id"))?;
        }
        Ok(Self::new(tokenizer, begin, Limits::of_ours(tokens.len())))
    }

    /// One more than the highest number, where numbers are left out.
    pub(super) fn len(&self) -> usize {
        self.tokenizer.get_vocab_size(true).max(self.limits.end)
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.limits.text(text)?;
        let encoding = guarded(|| self.tokenizer.encode_fast(text, true)).map_err(panicked)?;
        let encoding = encoding.map_err(|e| Error::Tokens {
            what: format!("`{}`", text.chars().take(SHOWN).collect::<String>()),
            why: e.to_string(),
        })?;
        Ok(self.begin.iter().chain(encoding.get_ids()).copied().collect())
    }

    pub(super) fn decode(&self, ids: &[u32]) -> String {
        let bytes = |id: &u32| self.tokenizer.id_to_token(*id).map_or(0, |token| token.len() + 1);
        let fits = self.limits.tokens(|| ids.iter().map(bytes).sum());
        let text = fits.ok().and_then(|()| guarded(|| self.tokenizer.decode(ids, true)).ok());
        match text {
            Some(text) => text.unwrap_or_default(),
            None => char::REPLACEMENT_CHARACTER.into(),
        }
    }

    pub(super) fn id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    pub(super) fn token(&self, id: u32) -> Option<String> {
        let token = self.tokenizer.id_to_token(id)?;
        if self.tokenizer.get_added_vocabulary().is_special_token(&token) {
            return Some(token);
        }
        if !self.bytes {
            return Some(token.replace('▁', " "));
        }
        let bytes: Option<Vec<u8>> = token.chars().map(byte).collect();
        Some(bytes.map_or(token, |bytes| label(&bytes)))
    }

    pub(super) fn to_json(&self) -> Result<String, Error> {
        if let Some(begin) = self.begin {
            let known = "write it into the post-processor of a tokenizer.json";
            return Err(Error::unsupported("begin", &begin, known));
        }
        self.tokenizer.to_string(false).map_err(wrong)
    }
}

/// The tokens that are found in a text before anything else is: special tokens, and what a user has added.
fn added(metadata: &Metadata, field: &str, tokens: &[&str]) -> Result<Vec<AddedToken>, Error> {
    let Some(value) = metadata.get(field) else { return Ok(Vec::new()) };
    let Value::Numbers(token_types) = value else {
        return Err(Error::format(field, format!("{value}; it should be a list of numbers")));
    };
    if token_types.len() != tokens.len() {
        let why = format!(
            "{} token_types, {} tokens; they must be equally many",
            token_types.len(),
            tokens.len()
        );
        return Err(Error::format(field, why));
    }
    let mut added = Vec::new();
    for (kind, token) in token_types.iter().zip(tokens) {
        let kind = match kind {
            Value::Unsigned(kind) => kind,
            Value::Signed(kind) => u64::try_from(kind).unwrap_or_default(),
            _ => 0,
        };
        match kind {
            NORMAL => {}
            CONTROL | USER => {
                added.push(AddedToken::from(*token, kind == CONTROL).normalized(false));
            }
            other => {
                let known = format!("of `{token}`; {NORMAL}, {CONTROL} and {USER} are known");
                return Err(Error::unsupported(field, &other, known));
            }
        }
    }
    Ok(added)
}

/// The byte that a letter stands for in the vocabularies of GPT-2 and its kin: printable ones for themselves, the others, in
/// order, for the letters from U+0100 on.
fn byte(letter: char) -> Option<u8> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match u32::from(letter).checked_sub(0x100) {
        None => u8::try_from(letter).ok().filter(printable),
        Some(n) => (0..=255).filter(|byte| !printable(byte)).nth(usize::try_from(n).ok()?),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Tokens;
    use super::*;

    #[test]
    fn letters_stand_for_bytes_as_in_gpt2() {
        assert_eq!(byte('Ġ'), Some(b' '));
        assert_eq!(byte('Ċ'), Some(b'\n'));
        assert_eq!(byte('a'), Some(b'a'));
        assert_eq!(byte('Ń'), Some(0xAD));
        assert_eq!((byte(' '), byte('ń'), byte('中')), (None, None, None));
        let all: BTreeSet<_> = (0..0x144).filter_map(char::from_u32).filter_map(byte).collect();
        assert_eq!(all.len(), 256);
    }

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
            ("pre", Value::Text("llama-bpe".into())),
            ("model", Value::Text("llama".into())),
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
    fn nonsense_is_an_error() {
        for json in ["", "{}", "[]", r#"{"model": {}}"#, r#"{"version": "1.0", "model": null}"#] {
            assert!(Tokens::from_tokenizer_json(json.as_bytes()).is_err(), "{json}");
            assert!(Tokens::from_json(json.as_bytes()).is_err(), "{json}");
        }
    }
}
