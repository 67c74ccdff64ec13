//! The tokens of llama2.c: pieces of text with scores, joined as `run.c` joins them.

use super::{label, wrong};
use crate::error::Error;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

/// Pieces of text, of which the best two neighbours are joined until none can be.
#[derive(Clone, Debug)]
pub(super) struct Pieces {
    tokens: Vec<Vec<u8>>,
    scores: Vec<f32>,
    ids: HashMap<Vec<u8>, u32>,
    /// Bytes of the longest piece.
    longest: usize,
}

/// What a text begins with.
const BEGIN: u32 = 1;
/// What a text ends with.
const END: u32 = 2;
/// The token of the byte 0; the other bytes follow. Before them are the three special tokens.
const BYTES: u32 = 3;

/// Two neighbours that can be joined: where, what they are, and what they become.
#[derive(Debug, PartialEq)]
struct Join {
    score: f32,
    at: usize,
    parts: [u32; 2],
    id: u32,
}

impl Eq for Join {}

impl Ord for Join {
    /// The best is the greatest, and of equals the first.
    fn cmp(&self, other: &Self) -> Ordering {
        // 0 and -0 are equal here, as they are in C; scores are finite.
        let score = self.score.partial_cmp(&other.score).unwrap_or(Ordering::Equal);
        score.then(other.at.cmp(&self.at))
    }
}

impl PartialOrd for Join {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Json {
    tokens: Vec<String>,
    scores: Vec<f32>,
}

impl Pieces {
    pub(super) fn from_json(bytes: &[u8]) -> Result<Self, Error> {
        let Json { tokens, scores } = serde_json::from_slice(bytes).map_err(wrong)?;
        Self::new(tokens.into_iter().map(String::into_bytes).collect(), scores)
    }

    /// The length of the longest token, then each token: its score, its length and its bytes.
    pub(super) fn from_bin(bytes: &[u8], vocab: usize) -> Result<Self, Error> {
        let cut = || Error::format("tokens", format!("the file has fewer than {vocab} tokens"));
        let (_, mut rest) = bytes.split_first_chunk::<4>().ok_or_else(cut)?;
        let (mut tokens, mut scores) = (Vec::new(), Vec::new());
        for _ in 0..vocab {
            let (score, after) = rest.split_first_chunk().ok_or_else(cut)?;
            let (len, after) = after.split_first_chunk().ok_or_else(cut)?;
            let len = usize::try_from(i32::from_le_bytes(*len)).map_err(|_| cut())?;
            let (token, after) = after.split_at_checked(len).ok_or_else(cut)?;
            tokens.push(token.to_vec());
            scores.push(f32::from_le_bytes(*score));
            rest = after;
        }
        if !rest.is_empty() {
            let why = format!("{} bytes follow the {vocab} tokens", rest.len());
            return Err(Error::format("tokens", why));
        }
        Self::new(tokens, scores)
    }

    fn new(tokens: Vec<Vec<u8>>, scores: Vec<f32>) -> Result<Self, Error> {
        if tokens.len() != scores.len() {
            let why = format!("{} tokens, {} scores", tokens.len(), scores.len());
            return Err(Error::format("tokens", format!("{why}; they must be equally many")));
        }
        if tokens.len() < 256 + 3 {
            let why = format!("{}; three special_tokens and 256 bytes are needed", tokens.len());
            return Err(Error::format("tokens", why));
        }
        if let Some(score) = scores.iter().find(|score| !score.is_finite()) {
            let why = format!("a score is {score}; scores must be finite to be compared");
            return Err(Error::format("tokens", why));
        }
        // Marks and bytes are written as text, but are not found in one. Where a piece is there twice, the first is meant.
        let mut ids = HashMap::new();
        for (id, token) in (0u32..).zip(&tokens) {
            if id >= BYTES + 256 {
                ids.entry(token.clone()).or_insert(id);
            }
        }
        let longest = ids.keys().map(Vec::len).max().unwrap_or(0);
        Ok(Self { tokens, scores, ids, longest })
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn id(&self, token: &str) -> Option<u32> {
        let named = |own: &Vec<u8>| own.trim_ascii() == token.as_bytes();
        let mark = self.tokens.iter().take(256 + 3).position(named);
        let mark = mark.and_then(|id| u32::try_from(id).ok());
        mark.or_else(|| self.ids.get(token.as_bytes()).copied())
    }

    fn score(&self, id: u32) -> f32 {
        usize::try_from(id).ok().and_then(|id| self.scores.get(id)).copied().unwrap_or(f32::MIN)
    }

    /// `encode` of run.c: the mark, a space, each character (or its bytes), and then the joins.
    pub(super) fn encode(&self, text: &str) -> Vec<u32> {
        self.joined(self.parts(text))
    }

    /// What is joined.
    fn parts(&self, text: &str) -> Vec<u32> {
        let mut ids = vec![BEGIN];
        if !text.is_empty() {
            ids.extend(self.ids.get(&b" "[..]));
        }
        for c in text.chars() {
            let mut buffer = [0; 4];
            let bytes = c.encode_utf8(&mut buffer).as_bytes();
            match self.ids.get(bytes) {
                Some(id) => ids.push(*id),
                None => ids.extend(bytes.iter().map(|byte| u32::from(*byte) + BYTES)),
            }
        }
        ids
    }

    /// Joins the best neighbours until none can be, the first of equally good ones first. Run.c looks through all of them for each
    /// join, at a cost of the square of the length; here they wait in a heap, and one that is gone is passed over: n log n.
    fn joined(&self, mut ids: Vec<u32>) -> Vec<u32> {
        // A part that was joined to the one before it stays in the list as nothing.
        let mut after: Vec<usize> = (1..=ids.len()).collect();
        let mut before: Vec<Option<usize>> = (0..ids.len()).map(|at| at.checked_sub(1)).collect();
        let mut gone = vec![false; ids.len()];
        let pair = |ids: &[u32], at: usize, next: usize| self.join(at, ids[at], *ids.get(next)?);
        let mut joins: BinaryHeap<Join> =
            (0..ids.len()).filter_map(|at| pair(&ids, at, at + 1)).collect();
        while let Some(Join { at, parts, id, .. }) = joins.pop() {
            let next = after[at];
            if gone[at] || next == ids.len() || [ids[at], ids[next]] != parts {
                continue;
            }
            ids[at] = id;
            gone[next] = true;
            after[at] = after[next];
            if let Some(before) = before.get_mut(after[at]) {
                *before = Some(at);
            }
            joins.extend(pair(&ids, at, after[at]));
            joins.extend(before[at].and_then(|first| pair(&ids, first, at)));
        }
        ids.iter().zip(gone).filter(|(_, gone)| !gone).map(|(id, _)| *id).collect()
    }

    /// What two neighbours become, if they become anything.
    fn join(&self, at: usize, a: u32, b: u32) -> Option<Join> {
        let [left, right] = [self.written(a), self.written(b)];
        if left.len() + right.len() > self.longest {
            return None;
        }
        let id = *self.ids.get(&[left, right].concat())?;
        Some(Join { score: self.score(id), at, parts: [a, b], id })
    }

    /// A token as it stands in the list.
    fn written(&self, id: u32) -> &[u8] {
        usize::try_from(id).ok().and_then(|id| self.tokens.get(id)).map_or(&[], Vec::as_slice)
    }

    /// The bytes that a token stands for.
    fn bytes(&self, id: u32) -> Vec<u8> {
        let byte = id.checked_sub(BYTES).and_then(|byte| u8::try_from(byte).ok());
        byte.map_or_else(|| self.written(id).to_vec(), |byte| vec![byte])
    }

    /// `decode` of run.c: after the mark, one leading space is taken away.
    pub(super) fn decode(&self, ids: &[u32]) -> String {
        let (mut text, mut begun) = (Vec::new(), false);
        for id in ids {
            if matches!(*id, BEGIN | END) {
                begun = *id == BEGIN;
                continue;
            }
            let bytes = self.bytes(*id);
            text.extend(bytes.strip_prefix(b" ").filter(|_| begun).unwrap_or(&bytes));
            begun = false;
        }
        String::from_utf8_lossy(&text).into_owned()
    }

    pub(super) fn token(&self, id: u32) -> Option<String> {
        let known = usize::try_from(id).is_ok_and(|id| id < self.len());
        // Marks are written on lines of their own.
        let bytes = self.bytes(id);
        known.then(|| label(if id < BYTES { bytes.trim_ascii() } else { &bytes }))
    }

    pub(super) fn to_json(&self) -> Result<String, Error> {
        let text = |bytes: &Vec<u8>| String::from_utf8(bytes.clone()).map_err(wrong);
        let tokens = self.tokens.iter().map(text).collect::<Result<_, _>>()?;
        let json = Json { tokens, scores: self.scores.clone() };
        serde_json::to_string_pretty(&json).map_err(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Tokens;
    use super::*;

    fn pieces() -> Pieces {
        let mut tokens = ["<unk>", "\n<s>\n", "\n</s>\n"].map(String::from).to_vec();
        tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
        let own = ["ab", "bc", "abc", " a", "a", "b", "c", " "];
        tokens.extend(own.map(String::from));
        let mut scores = vec![0.0; 259];
        scores.extend([-1.0, -0.5, -2.0, -3.0, -1e6, -1e6, -1e6, -1e6]);
        Pieces::new(tokens.into_iter().map(String::into_bytes).collect(), scores).unwrap()
    }

    #[test]
    fn the_best_neighbours_are_joined_first() {
        let pieces = pieces();
        // `bc` is best, and then `abc` is better than ` a`.
        assert_eq!(pieces.encode("abc"), [1, 266, 261]);
        assert_eq!(pieces.encode("a c"), [1, 262, 266, 265]);
        assert_eq!(pieces.encode(""), [1]);
        assert_eq!(pieces.encode("ab"), [1, 266, 259]);
    }

    /// The joins as run.c makes them: all neighbours are looked at for each.
    fn joined_slowly(pieces: &Pieces, mut ids: Vec<u32>) -> Vec<u32> {
        loop {
            let mut best: Option<(usize, u32)> = None;
            for (at, [a, b]) in ids.array_windows().enumerate() {
                let both = [pieces.written(*a), pieces.written(*b)].concat();
                let Some(id) = pieces.ids.get(&both).copied() else { continue };
                if best.is_none_or(|(_, other)| pieces.score(id) > pieces.score(other)) {
                    best = Some((at, id));
                }
            }
            let Some((at, id)) = best else { return ids };
            ids[at] = id;
            ids.remove(at + 1);
        }
    }

    #[test]
    fn joins_are_those_of_the_simple_form() {
        // Pieces of up to five letters of an alphabet of three, many with equal scores.
        let mut tokens: Vec<Vec<u8>> = pieces().tokens[..259].to_vec();
        let mut chance = 1u64;
        let mut draw = |n: u64| {
            chance = chance.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (chance >> 33) % n
        };
        for _ in 0..3 {
            for _ in 0..60 {
                let length = 1 + draw(5);
                tokens
                    .push((0..length).map(|_| b"ab "[usize::try_from(draw(3)).unwrap()]).collect());
            }
            let scores =
                tokens.iter().map(|_| -f32::from(u8::try_from(draw(9)).unwrap())).collect();
            let pieces = Pieces::new(tokens.clone(), scores).unwrap();
            for length in 0..200 {
                let letter = |_| ['a', 'b', ' ', 'é'][usize::try_from(draw(4)).unwrap()];
                let text: String = (0..length).map(letter).collect();
                let parts = pieces.parts(&text);
                assert_eq!(pieces.joined(parts.clone()), joined_slowly(&pieces, parts), "{text}");
            }
        }
    }

    #[test]
    fn a_long_text_is_divided_in_no_time() {
        // The simple form would look at 10^11 pairs.
        let ids = pieces().encode(&"abc ab ".repeat(60_000));
        assert_eq!(ids.len(), 1 + 1 + 4 * 60_000);
    }

    #[test]
    fn what_is_no_piece_is_bytes() {
        let pieces = pieces();
        let ids = pieces.encode("é");
        assert_eq!(ids, [1, 266, 3 + 0xC3, 3 + 0xA9]);
        assert_eq!(pieces.decode(&ids), "é");
        assert_eq!(pieces.token(3 + 0xC3).unwrap(), "<0xC3>");
        assert_eq!(pieces.token(3 + 0x41).unwrap(), "A");
        assert_eq!(pieces.token(1).unwrap(), "<s>");
        assert_eq!(pieces.token(267), None);
        assert_eq!((pieces.id("<s>"), pieces.id("abc")), (Some(1), Some(261)));
    }

    #[test]
    fn one_space_after_the_mark_goes_and_no_other() {
        let pieces = pieces();
        assert_eq!(pieces.decode(&[1, 262, 262]), "a a");
        assert_eq!(pieces.decode(&[262, 262]), " a a");
        assert_eq!(pieces.decode(&[1, 266, 262]), " a");
    }

    #[test]
    fn a_character_in_two_tokens_comes_whole() {
        let tokens = Tokens::of(super::super::Kind::Pieces(pieces()));
        let mut stream = tokens.stream();
        assert_eq!(stream.push(1), None);
        assert_eq!(stream.push(262).as_deref(), Some("a"));
        assert_eq!(stream.push(3 + 0xC3), None);
        assert_eq!(stream.push(3 + 0xA9).as_deref(), Some("é"));
        assert_eq!(stream.push(262).as_deref(), Some(" a"));
        assert_eq!(stream.push(3 + 0xC3), None);
        assert_eq!(stream.finish().as_deref(), Some("\u{FFFD}"));
    }

    #[test]
    fn a_file_that_is_cut_anywhere_is_an_error() {
        let pieces = pieces();
        let mut file = 7i32.to_le_bytes().to_vec();
        for (token, score) in pieces.tokens.iter().zip(&pieces.scores) {
            file.extend(score.to_le_bytes());
            file.extend(i32::try_from(token.len()).unwrap().to_le_bytes());
            file.extend(token);
        }
        let read = Pieces::from_bin(&file, pieces.len()).unwrap();
        assert_eq!(read.tokens, pieces.tokens);
        for len in 0..file.len() {
            assert!(Pieces::from_bin(&file[..len], pieces.len()).is_err(), "{len} bytes");
        }
        assert!(Pieces::from_bin(&file, 260).is_err());
    }
}
