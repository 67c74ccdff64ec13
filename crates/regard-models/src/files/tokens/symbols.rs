//! Plain lists of characters.

use super::wrong;
use crate::error::Error;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

/// What becomes of a character that is not in the list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unknown {
    /// An error.
    #[default]
    Refused,
    /// Left out.
    Dropped,
    /// This token.
    Token(u32),
}

/// A list of tokens that a text is divided into by comparing: the longest that fits is taken.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Symbols {
    /// The tokens; a token's number is its place.
    pub tokens: Vec<String>,
    /// Tokens that are no text: they are never found in one, and have none.
    #[serde(default)]
    pub special_tokens: Vec<u32>,
    /// What becomes of other characters.
    #[serde(default)]
    pub unknown: Unknown,
    /// What a text is begun with.
    #[serde(default)]
    pub begin: Option<u32>,
    /// What a text is ended with.
    #[serde(default)]
    pub end: Option<u32>,
    /// Whether a text is put in small letters first.
    #[serde(default)]
    pub lowercase: bool,
}

/// Tokens by their text, and the lengths that they have: a text is divided by asking for each length, not for each token.
struct List<'a> {
    ids: HashMap<&'a str, u32>,
    lengths: BTreeSet<usize>,
}

impl List<'_> {
    /// The longest token that the text begins with, and its bytes.
    fn longest(&self, text: &str) -> Option<(u32, usize)> {
        let of_length = |len: &usize| Some((*self.ids.get(text.get(..*len)?)?, *len));
        self.lengths.iter().rev().find_map(of_length)
    }
}

impl Symbols {
    /// Refuses special tokens that are not in the list, and tokens that are there twice.
    pub(super) fn check(&self) -> Result<(), Error> {
        let unknown = if let Unknown::Token(id) = self.unknown { Some(id) } else { None };
        let ids = self.special_tokens.iter().chain(&self.begin).chain(&self.end).chain(&unknown);
        if let Some(id) = ids.into_iter().find(|id| self.get(**id).is_none()) {
            let why = format!("there is no token {id}; there are {}", self.tokens.len());
            return Err(Error::format("tokens", why));
        }
        let mut seen = BTreeSet::new();
        if let Some(token) = self.tokens.iter().find(|token| !seen.insert(token.as_str())) {
            let why = format!("`{token}` is there twice");
            return Err(Error::format("tokens", why));
        }
        Ok(())
    }

    pub(super) fn get(&self, id: u32) -> Option<&str> {
        self.tokens.get(usize::try_from(id).ok()?).map(String::as_str)
    }

    pub(crate) fn id(&self, token: &str) -> Option<u32> {
        let id = self.tokens.iter().position(|own| own == token)?;
        u32::try_from(id).ok()
    }

    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        Ok(self.encode_with_offsets(text)?.into_iter().map(|(id, _)| id).collect())
    }

    /// The tokens of a text, each with the bytes that it covers; the ends cover none.
    pub(super) fn encode_with_offsets(
        &self,
        text: &str,
    ) -> Result<Vec<(u32, Range<usize>)>, Error> {
        let lower;
        let mut rest = text;
        // Where characters end in the text that is divided and in the original: small letters may have other lengths.
        let mut ends = Vec::new();
        if self.lowercase {
            lower = text.to_lowercase();
            rest = &lower;
            let (mut end, mut original) = (0, 0);
            for c in text.chars() {
                end += c.to_lowercase().map(char::len_utf8).sum::<usize>();
                original += c.len_utf8();
                ends.push((end, original));
            }
        }
        // A token that begins or ends within the small letters of a character covers all of it.
        let original = |bytes: Range<usize>| {
            if ends.is_empty() {
                return bytes;
            }
            let before = ends.partition_point(|(end, _)| *end <= bytes.start).checked_sub(1);
            let last = ends.partition_point(|(end, _)| *end < bytes.end).min(ends.len() - 1);
            before.map_or(0, |at| ends[at].1)..ends[last].1
        };
        let list = self.list();
        let mut ids: Vec<(u32, Range<usize>)> =
            self.begin.map(|id| (id, 0..0)).into_iter().collect();
        let mut at = 0;
        while let Some(first) = rest.chars().next() {
            let fits = list.longest(rest);
            let (id, len) = match (fits, self.unknown) {
                (Some((id, len)), _) => (Some(id), len),
                (None, Unknown::Token(id)) => (Some(id), first.len_utf8()),
                (None, Unknown::Dropped) => (None, first.len_utf8()),
                (None, Unknown::Refused) => {
                    let what = format!("`{first}` (U+{:04X})", u32::from(first));
                    let why = "not in the vocabulary of this model; leave it out".into();
                    return Err(Error::Tokens { what, why });
                }
            };
            ids.extend(id.map(|id| (id, original(at..at + len))));
            (rest, at) = (&rest[len..], at + len);
        }
        ids.extend(self.end.map(|id| (id, 0..0)));
        Ok(ids)
    }

    /// The tokens that are found in a text.
    fn list(&self) -> List<'_> {
        let special_tokens: BTreeSet<u32> = self.special_tokens.iter().copied().collect();
        let tokens = (0u32..).zip(&self.tokens);
        let texts = tokens.filter(|(id, token)| !token.is_empty() && !special_tokens.contains(id));
        let ids: HashMap<&str, u32> = texts.map(|(id, token)| (token.as_str(), id)).collect();
        List { lengths: ids.keys().map(|token| token.len()).collect(), ids }
    }

    pub(super) fn decode(&self, ids: &[u32]) -> String {
        let ids = ids.iter().filter(|id| !self.special_tokens.contains(id));
        ids.filter_map(|id| self.get(*id)).collect()
    }

    pub(super) fn to_json(&self) -> Result<String, Error> {
        serde_json::to_string_pretty(self).map_err(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Tokens;
    use super::*;

    fn letters() -> Symbols {
        let tokens = ["<s>", "</s>", "a", "b", "é", "abc", "\n"].map(String::from).to_vec();
        Symbols { tokens, special_tokens: vec![0, 1], ..Symbols::default() }
    }

    #[test]
    fn the_longest_that_fits_is_taken_and_marks_never() {
        let tokens = Tokens::from_symbols(letters()).unwrap();
        assert_eq!(tokens.encode("ababcé\n").unwrap(), [2, 3, 5, 4, 6]);
        assert_eq!(tokens.decode(&[0, 2, 3, 5, 4, 1, 99]), "ababcé");
        let error = tokens.encode("a<s>").unwrap_err().to_string();
        assert!(error.contains("`<`"), "{error}");
        assert_eq!(tokens.token(6).unwrap(), "\\n");
        assert_eq!((tokens.id("</s>"), tokens.id("x")), (Some(1), None));
    }

    #[test]
    fn unknown_characters_are_dropped_or_marked_as_asked() {
        let ids = |symbols: Symbols| Tokens::from_symbols(symbols).unwrap().encode("aXb").unwrap();
        assert_eq!(ids(Symbols { unknown: Unknown::Dropped, ..letters() }), [2, 3]);
        assert_eq!(ids(Symbols { unknown: Unknown::Token(1), ..letters() }), [2, 1, 3]);
        let ends = Symbols { unknown: Unknown::Dropped, begin: Some(0), end: Some(1), ..letters() };
        assert_eq!(ids(ends), [0, 2, 3, 1]);
    }

    #[test]
    fn tokens_cover_the_bytes_that_they_are_from() {
        let parts = |symbols: Symbols, text: &'static str| {
            let offsets = Tokens::from_symbols(symbols).unwrap().offsets(text).unwrap();
            offsets.into_iter().map(|bytes| &text[bytes]).collect::<Vec<_>>()
        };
        let ends = Symbols { unknown: Unknown::Dropped, begin: Some(0), end: Some(1), ..letters() };
        assert_eq!(parts(ends, "abcXéa"), ["", "abc", "é", "a", ""]);
        // The small letter of İ has three bytes, that of K (Kelvin) has one.
        let lower = Symbols { unknown: Unknown::Token(1), lowercase: true, ..letters() };
        assert_eq!(parts(lower, "İAB\u{212a}É"), ["İ", "İ", "A", "B", "\u{212a}", "É"]);
    }

    #[test]
    fn lists_that_make_no_sense_are_refused() {
        assert!(Tokens::from_symbols(Symbols { begin: Some(7), ..letters() }).is_err());
        let twice = vec!["a".to_owned(), "a".to_owned()];
        assert!(Tokens::from_symbols(Symbols { tokens: twice, ..Symbols::default() }).is_err());
    }

    #[test]
    fn a_list_is_written_and_read_again() {
        let tokens = Tokens::from_symbols(letters()).unwrap();
        let again = Tokens::from_json(tokens.to_json().unwrap().as_bytes()).unwrap();
        assert_eq!(again.encode("abé").unwrap(), tokens.encode("abé").unwrap());
        assert!(Tokens::from_json(br#"{"token": []}"#).is_err());
    }
}
