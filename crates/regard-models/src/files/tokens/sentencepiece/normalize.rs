//! `Normalizer` of SentencePiece: replaces characters, and makes spaces visible.

use super::pieces::Pieces;
use super::proto::Model;
use crate::error::Error;
use std::ops::Range;

/// What stands for a space.
pub(super) const SPACE: &str = "\u{2581}";
/// Bytes of a normalised text: each takes about 16 bytes while it is divided.
const MAX_NORMALIZED: usize = 1 << 24;

/// `precompiled_charsmap`: replacements of characters in a double array (Darts-clone).
#[derive(Clone, Debug, Default)]
pub(super) struct Charsmap {
    units: Vec<u32>,
    /// Replacements, each ends with a 0.
    texts: Vec<u8>,
}

impl Charsmap {
    pub(super) fn read(bytes: &[u8]) -> Result<Self, Error> {
        if bytes.is_empty() {
            return Ok(Self::default());
        }
        let parts = bytes.split_first_chunk().and_then(|(len, rest)| {
            let len = usize::try_from(u32::from_le_bytes(*len)).ok()?;
            rest.split_at_checked(len).filter(|(trie, _)| trie.len().is_multiple_of(4))
        });
        let Some((trie, texts)) = parts else {
            let why = format!("its trie is not within its {} bytes", bytes.len());
            return Err(Error::format("precompiled_charsmap", why));
        };
        let units = trie.as_chunks().0.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
        Ok(Self { units, texts: texts.to_vec() })
    }

    /// The longest rule that a text begins with: its length, and what takes its place.
    fn find(&self, text: &[u8]) -> Option<(usize, &[u8])> {
        let unit = |at: u32| self.units.get(usize::try_from(at).ok()?).copied();
        let offset = |unit: u32| (unit >> 10) << ((unit & (1 << 9)) >> 6);
        let mut at = offset(unit(0)?);
        let mut longest = None;
        for (byte, len) in text.iter().zip(1..) {
            at ^= u32::from(*byte);
            let Some(node) = unit(at).filter(|node| node & 0x8000_00FF == u32::from(*byte)) else {
                break;
            };
            at ^= offset(node);
            if node >> 8 & 1 == 1 {
                longest = unit(at).map(|leaf| (len, leaf & 0x7FFF_FFFF)).or(longest);
            }
        }
        let (len, value) = longest?;
        let text = self.texts.get(usize::try_from(value).ok()?..)?;
        Some((len, text.split(|byte| *byte == 0).next()?))
    }
}

/// What a text begins with as it will be, and how long that was.
fn next<'a>(map: &'a Charsmap, pieces: &Pieces, text: &'a str) -> Option<(&'a [u8], usize)> {
    let first = text.chars().next()?.len_utf8();
    let as_is = |len| text.as_bytes().get(..len).map(|bytes| (bytes, len));
    match pieces.user_defined(text) {
        Some(len) => as_is(len),
        None => map.find(text.as_bytes()).map(|(len, new)| (new, len)).or_else(|| as_is(first)),
    }
}

/// A text that is ready to be divided, and which bytes of the original each of its bytes is from.
#[derive(Debug, Default)]
pub(super) struct Normalized {
    pub(super) text: String,
    /// Ends of the replaced parts in the new text and in the original; the first part is the prefix, which is from nothing.
    ends: Vec<(usize, usize)>,
}

impl Normalized {
    /// The bytes of the original that these bytes of the new text are from.
    pub(super) fn original(&self, new: &Range<usize>) -> Range<usize> {
        let part = |byte: usize| self.ends.partition_point(|(end, _)| *end <= byte);
        let end_of = |part: usize| self.ends.get(part).map_or(0, |(_, end)| *end);
        let start = end_of(part(new.start).saturating_sub(1));
        start..end_of(part(new.end.saturating_sub(1))).max(start)
    }
}

/// Makes a text ready to be divided.
pub(super) fn normalized(
    model: &Model,
    map: &Charsmap,
    pieces: &Pieces,
    text: &str,
) -> Result<Normalized, Error> {
    // A damaged map may end a rule within a character.
    let cut = || Error::format("precompiled_charsmap", "a rule ends within a character");
    let after = |text, len| str::get(text, len..).ok_or_else(cut);
    let mut rest: &str = text;
    while model.remove_extra_whitespaces
        && let Some((new, len)) = next(map, pieces, rest)
        && new == b" "
    {
        rest = after(rest, len)?;
    }
    if rest.is_empty() {
        return Ok(Normalized::default());
    }
    let space = if model.escape_whitespaces { SPACE.as_bytes() } else { b" " };
    let mut out = if model.add_dummy_prefix { space.to_vec() } else { Vec::new() };
    let mut ends = vec![(out.len(), text.len() - rest.len())];
    let mut after_space = model.remove_extra_whitespaces;
    while let Some((mut new, len)) = next(map, pieces, rest) {
        rest = after(rest, len)?;
        while after_space && let Some(less) = new.strip_prefix(b" ") {
            new = less;
        }
        for byte in new {
            if *byte == b' ' { out.extend(space) } else { out.push(*byte) }
        }
        if let Some(last) = new.last() {
            after_space = *last == b' ' && model.remove_extra_whitespaces;
        }
        ends.push((out.len(), text.len() - rest.len()));
        if out.len() > MAX_NORMALIZED {
            let why = format!("more than {MAX_NORMALIZED} bytes once normalised; divide it");
            return Err(Error::Tokens { what: "the text".into(), why });
        }
    }
    while model.remove_extra_whitespaces && out.ends_with(space) {
        out.truncate(out.len() - space.len());
    }
    let text = String::from_utf8(out);
    let text = text.map_err(|e| Error::format("precompiled_charsmap", e.to_string()))?;
    Ok(Normalized { text, ends })
}
