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
        let new = text.get(same..).filter(|new| !new.is_empty())?.to_owned();
        self.ids.drain(..self.told);
        self.told = self.ids.len();
        self.given = self.tokens.decode(&self.ids);
        Some(new)
    }
}
