//! Text that comes token by token.

use super::Tokens;

/// Turns tokens into text as they come. A character whose bytes are spread over several tokens comes with the last of them.
///
/// What a token adds may depend on the one before it (a space, or none), so the last tokens are always decoded together.
#[derive(Clone, Debug)]
pub struct Stream<'a> {
    tokens: &'a Tokens,
    ids: Vec<u32>,
    /// The text of `ids` that has been given out.
    given: String,
    /// How many of `ids` that was.
    told: usize,
}

/// Tokens that wait for the rest of a character. More than a character has bytes: it will not come.
const PATIENCE: usize = 8;

impl<'a> Stream<'a> {
    pub(super) fn new(tokens: &'a Tokens) -> Self {
        Self { tokens, ids: Vec::new(), given: String::new(), told: 0 }
    }

    /// The text that this token completes, if it completes any.
    pub fn push(&mut self, id: u32) -> Option<String> {
        self.ids.push(id);
        let text = self.tokens.decode(&self.ids);
        let waits = self.ids.len() - self.told < PATIENCE;
        if text.ends_with('\u{FFFD}') && waits {
            return None;
        }
        self.give(&text)
    }

    /// What is left at the end: bytes that never became a character, as `�`.
    pub fn finish(mut self) -> Option<String> {
        let text = self.tokens.decode(&self.ids);
        self.give(&text)
    }

    fn give(&mut self, text: &str) -> Option<String> {
        // A decoder may take back what it gave (a space before a full stop); that is left as it is.
        let same = text.chars().zip(self.given.chars()).take_while(|(a, b)| a == b);
        let same: usize = same.map(|(c, _)| c.len_utf8()).sum();
        let new = text.get(same..).unwrap_or_default();
        // Tokens that have no text are kept for a while, for what they say of the next, and not for ever: all of them are decoded
        // with each token.
        if new.is_empty() && self.ids.len() - self.told < PATIENCE {
            return None;
        }
        self.ids.drain(..self.told);
        self.told = self.ids.len();
        self.given = self.tokens.decode(&self.ids);
        Some(new.to_owned()).filter(|new| !new.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Symbols, Tokens};

    #[test]
    fn tokens_without_text_are_not_kept_for_ever() {
        let tokens = vec!["<s>".to_owned(), "a".to_owned()];
        let symbols = Symbols { tokens, special_tokens: vec![0], ..Symbols::default() };
        let tokens = Tokens::from_symbols(symbols).unwrap();
        let mut stream = tokens.stream();
        for _ in 0..100 {
            assert_eq!(stream.push(0), None);
            assert!(stream.ids.len() <= 2 * super::PATIENCE);
        }
        assert_eq!(stream.push(1).as_deref(), Some("a"));
        assert_eq!(stream.push(0), None);
        assert_eq!(stream.push(1).as_deref(), Some("a"));
        assert_eq!(stream.finish(), None);
    }
}
