//! Tokens by the `tokenizers` crate.

use super::guard::guarded;
use super::limits::{Limits, MAX_FILE};
use super::{label, wrong};
use crate::error::Error;
use std::ops::Range;
use tokenizers::{DecoderWrapper, Encoding, Tokenizer};

#[derive(Clone)]
pub(super) struct Library {
    tokenizer: Tokenizer,
    /// Whether a token is written in the letters that stand for bytes.
    bytes: bool,
    /// What a text begins and ends with, where the tokenizer does not know it itself.
    ends: [Option<u32>; 2],
    limits: Limits,
}

/// Letters, a digit and a space: something for every kind of step.
const PROBE: &str = "A \u{e9}1\u{4e00}.";
/// Letters of a text in a message about it.
const SHOWN: usize = 60;

/// What a panic of the library is told as.
pub(super) fn panicked(message: String) -> Error {
    let why = format!(
        "the crate tokenizers panicked: {message}; the file is damaged, or meets a defect of it"
    );
    Error::format("tokens", why)
}

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
        let library = Self::new(tokenizer.map_err(wrong)?, [None; 2], limits);
        // What panics with any text is refused with its file, not with the first text. That these letters may have no tokens is fine.
        guarded(|| drop(library.tokenizer.encode_fast(PROBE, true))).map_err(panicked)?;
        Ok(library)
    }

    pub(super) fn new(tokenizer: Tokenizer, ends: [Option<u32>; 2], limits: Limits) -> Self {
        let bytes = matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_)));
        Self { tokenizer, bytes, ends, limits }
    }

    /// One more than the highest number, where numbers are left out.
    pub(super) fn len(&self) -> usize {
        self.tokenizer.get_vocab_size(true).max(self.limits.end)
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        let encoding = self.encoding(text, || self.tokenizer.encode_fast(text, true))?;
        let [begin, end] = &self.ends;
        Ok(begin.iter().chain(encoding.get_ids()).chain(end).copied().collect())
    }

    /// The bytes of a text that each of its tokens covers; those that stand for no text cover none.
    pub(super) fn offsets(&self, text: &str) -> Result<Vec<Range<usize>>, Error> {
        let encoding = self.encoding(text, || self.tokenizer.encode(text, true))?;
        let [begin, end] = self.ends.map(|end| end.map(|_| 0..0));
        let own = encoding.get_offsets().iter().map(|(start, end)| *start..*end);
        Ok(begin.into_iter().chain(own).chain(end).collect())
    }

    fn encoding(
        &self,
        text: &str,
        encode: impl FnOnce() -> tokenizers::Result<Encoding>,
    ) -> Result<Encoding, Error> {
        self.limits.text(text)?;
        guarded(encode).map_err(panicked)?.map_err(|e| Error::Tokens {
            what: format!("`{}`", text.chars().take(SHOWN).collect::<String>()),
            why: e.to_string(),
        })
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
        if let Some(id) = self.ends.iter().flatten().next() {
            let known = "write it into the post-processor of a tokenizer.json";
            return Err(Error::unsupported("begin or end", id, known));
        }
        self.tokenizer.to_string(false).map_err(wrong)
    }
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
    use std::collections::BTreeSet;

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

    #[test]
    fn tokens_cover_the_bytes_that_they_are_from() {
        let path =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../regard-cli/zh-en/target_tokenizer.json");
        let tokens = Tokens::from_tokenizer_json(&std::fs::read(path).unwrap()).unwrap();
        // As the Python package says.
        let text = "  I didn't see  him yesterday.";
        let offsets = tokens.offsets(text).unwrap();
        let parts: Vec<&str> = offsets.into_iter().map(|bytes| &text[bytes]).collect();
        assert_eq!(parts, ["I", " didn't", " see", " him", " yesterday", "."]);
        // Bytes, not characters; a token that is a part of a character covers all of it.
        let text = "café 好 yesterday";
        let offsets = tokens.offsets(text).unwrap();
        let covered: String = offsets.iter().map(|bytes| &text[bytes.clone()]).collect();
        assert!(covered.contains("é") && covered.ends_with(" yesterday"), "{covered}");
        assert!(offsets.is_sorted_by_key(|bytes| (bytes.start, bytes.end)), "{offsets:?}");
    }

    #[test]
    fn nonsense_is_an_error() {
        for json in ["", "{}", "[]", r#"{"model": {}}"#, r#"{"version": "1.0", "model": null}"#] {
            assert!(Tokens::from_tokenizer_json(json.as_bytes()).is_err(), "{json}");
            assert!(Tokens::from_json(json.as_bytes()).is_err(), "{json}");
        }
    }
}
