//! Pieces by their text, and texts as pieces.

use super::proto::{Algorithm, Kind, Model};
use crate::error::Error;
use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

/// Bytes of a piece: the time that a text takes grows with the longest. SentencePiece makes 16 characters unless told otherwise.
const MAX_PIECE: usize = 1 << 10;
/// What an unknown character costs below the worst piece (`kUnkPenalty`).
const UNKNOWN_PENALTY: f32 = 10.0;

/// Pieces in the order of their bytes: a trie without its nodes.
#[derive(Clone, Debug)]
pub(super) struct Pieces {
    texts: Vec<Box<str>>,
    scores: Vec<f32>,
    kinds: Vec<Kind>,
    sorted: Vec<u32>,
    user: Vec<u32>,
    algorithm: Algorithm,
    pub(super) unknown: Option<u32>,
    /// The pieces of all bytes, if there are such.
    bytes: Option<Box<[u32; 256]>>,
    min_score: f32,
    max_score: f32,
}

/// A part of a text: its bytes, and its piece.
pub(super) type Part<'a> = (&'a str, u32);

impl Pieces {
    pub(super) fn new(model: &Model) -> Result<Self, Error> {
        let count = u32::try_from(model.pieces.len()).unwrap_or(u32::MAX);
        let kinds: Vec<Kind> = model.pieces.iter().map(|piece| piece.kind).collect();
        let texts: Vec<Box<str>> =
            model.pieces.iter().map(|piece| piece.text.as_str().into()).collect();
        for (id, piece) in model.pieces.iter().enumerate() {
            let place = || format!("piece {id}");
            if !piece.score.is_finite() {
                return Err(Error::format(place(), format!("its score is {}", piece.score)));
            }
            if piece.text.len() > MAX_PIECE {
                let why = format!("{} bytes; {MAX_PIECE} are the most", piece.text.len());
                return Err(Error::format(place(), why));
            }
        }
        let text = |id: &u32| &*texts[at(*id)];
        let mut sorted: Vec<u32> = (0..count).filter(|id| !text(id).is_empty()).collect();
        sorted.sort_by_key(|id| text(id));
        if let Some([a, b]) = sorted.array_windows().find(|[a, b]| text(a) == text(b)) {
            let why = format!("`{}` is piece {a} already", text(a));
            return Err(Error::format(format!("piece {b}"), why));
        }
        let of = |kind: Kind| (0..count).filter(move |id| model.pieces[at(*id)].kind == kind);
        let mut unknown = of(Kind::Unknown);
        let first = unknown.next();
        if let Some(second) = unknown.next() {
            return Err(Error::format(format!("piece {second}"), "a second unknown piece"));
        }
        let normal = || model.pieces.iter().filter(|p| p.kind == Kind::Normal).map(|p| p.score);
        let user = sorted.iter().copied().filter(|id| kinds[at(*id)] == Kind::User).collect();
        let bytes = bytes(of(Kind::Byte).map(|id| (id, text(&id))))?;
        Ok(Self {
            scores: model.pieces.iter().map(|piece| piece.score).collect(),
            algorithm: model.algorithm,
            unknown: first,
            bytes,
            min_score: normal().fold(f32::MAX, f32::min),
            // FLT_MIN, the least positive number, in unigram_model.cc; scores are usually below 0.
            max_score: normal().fold(f32::MIN_POSITIVE, f32::max),
            user,
            sorted,
            kinds,
            texts,
        })
    }

    pub(super) fn len(&self) -> usize {
        self.texts.len()
    }

    pub(super) fn text(&self, id: u32) -> Option<&str> {
        self.texts.get(usize::try_from(id).ok()?).map(|text| &**text)
    }

    pub(super) fn kind(&self, id: u32) -> Option<Kind> {
        self.kinds.get(usize::try_from(id).ok()?).copied()
    }

    pub(super) fn id(&self, text: &str) -> Option<u32> {
        let found = self.sorted.binary_search_by_key(&text, |id| &self.texts[at(*id)]);
        found.ok().map(|place| self.sorted[place])
    }

    /// The piece of a text that is divided no further, not one that only its number can name.
    fn found(&self, text: &str) -> Option<u32> {
        let ordinary =
            |id: &u32| matches!(self.kinds[at(*id)], Kind::Normal | Kind::User | Kind::Unused);
        self.id(text).filter(ordinary)
    }

    fn is(&self, id: u32, kind: Kind) -> bool {
        self.kinds[at(id)] == kind
    }

    /// Bytes of the longest user-defined piece that a text begins with.
    pub(super) fn user_defined(&self, text: &str) -> Option<usize> {
        let texts = |id: u32| self.texts[at(id)].as_bytes();
        prefixes(&self.user, texts, text.as_bytes()).last().map(|(len, _)| len)
    }

    /// The parts of a normalised text. A character without a piece is its bytes, or the unknown piece; neighbours of that are one.
    pub(super) fn divide<'a>(&self, text: &'a str) -> Result<Vec<Part<'a>>, Error> {
        let parts = match self.algorithm {
            Algorithm::Unigram => self.unigram(text),
            Algorithm::Bpe => self.bpe(text),
        };
        let mut out: Vec<Part<'a>> = Vec::new();
        // Where the run of unknown characters before this one begins.
        let mut run: Option<usize> = None;
        let mut from = 0;
        for (len, id) in parts {
            let part = &text[from..from + len];
            let known = id.filter(|id| !self.is(*id, Kind::Unknown));
            match (known, &self.bytes, self.unknown) {
                (Some(id), ..) => out.push((part, id)),
                (None, Some(bytes), _) => {
                    out.extend(part.bytes().map(|byte| ("", bytes[usize::from(byte)])));
                }
                (None, None, Some(unknown)) => match (run, out.last_mut()) {
                    (Some(begin), Some(last)) => last.0 = &text[begin..from + len],
                    _ => {
                        out.push((part, unknown));
                        run = Some(from);
                    }
                },
                (None, None, None) => {
                    let why = "no piece, and the vocabulary has no unknown one".into();
                    return Err(Error::Tokens { what: format!("`{part}`"), why });
                }
            }
            if known.is_some() {
                run = None;
            }
            from += len;
        }
        Ok(out)
    }

    /// The path of the highest score; `EncodeOptimized` of unigram_model.cc, in f32 as there. Lengths and pieces.
    fn unigram(&self, text: &str) -> Vec<(usize, Option<u32>)> {
        #[derive(Clone, Copy)]
        struct Node {
            score: f32,
            /// Bytes of the last part of the best path to here; 0 if there is none yet.
            len: usize,
            id: Option<u32>,
        }
        let mut ends = vec![Node { score: 0.0, len: 0, id: None }; text.len() + 1];
        let texts = |id: u32| self.texts[at(id)].as_bytes();
        for (from, first) in text.char_indices() {
            let before = ends[from].score;
            let mut single = false;
            let rest = &text.as_bytes()[from..];
            let mut reach = |len: usize, id: Option<u32>, score: f32| {
                let node = &mut ends[from + len];
                if node.len == 0 || score > node.score {
                    *node = Node { score, len, id };
                }
            };
            for (len, id) in prefixes(&self.sorted, texts, rest) {
                let score = match self.kinds[at(id)] {
                    Kind::Normal => self.scores[at(id)],
                    // Above every other way to write it.
                    #[expect(
                        clippy::cast_precision_loss,
                        reason = "a piece has 1024 bytes at most"
                    )]
                    Kind::User => len as f32 * self.max_score - 0.1,
                    _ => continue,
                };
                single |= len == first.len_utf8();
                reach(len, Some(id), score + before);
            }
            if !single {
                let score = self.min_score - UNKNOWN_PENALTY + before;
                reach(first.len_utf8(), self.unknown, score);
            }
        }
        let mut parts = Vec::new();
        let mut end = text.len();
        while end > 0 && ends[end].len > 0 {
            let Node { len, id, .. } = ends[end];
            parts.push((len, id));
            end -= len;
        }
        parts.reverse();
        parts
    }

    /// Merges the best neighbours, the first of equally good ones first; `SampleEncode` of bpe_model.cc. Lengths and pieces.
    fn bpe(&self, text: &str) -> Vec<(usize, Option<u32>)> {
        let mut parts = Chain::new(self, text);
        let mut merges: BinaryHeap<Merge> =
            (1..parts.list.len()).filter_map(|right| parts.merge(self, right - 1, right)).collect();
        while let Some(Merge { left, right, len, .. }) = merges.pop() {
            let [a, b] = [&parts.list[left], &parts.list[right]];
            if a.len == 0 || b.len == 0 || a.len + b.len != len {
                continue;
            }
            let (before, next) = (a.before, b.next);
            parts.list[left].len = len;
            parts.list[left].next = next;
            parts.list[right].len = 0;
            if let Some(next) = next {
                parts.list[next].before = Some(left);
            }
            merges.extend(before.and_then(|before| parts.merge(self, before, left)));
            merges.extend(next.and_then(|next| parts.merge(self, left, next)));
        }
        let mut out = Vec::new();
        for part in parts.list.iter().filter(|part| part.len > 0) {
            // An unused piece is taken apart again.
            let mut stack = vec![&text[part.from..part.from + part.len]];
            while let Some(part) = stack.pop() {
                let id = self.id(part);
                let unused = id.filter(|id| self.is(*id, Kind::Unused));
                match unused.and_then(|id| parts.unused.get(&id)) {
                    Some(len) => {
                        let (left, right) = part.split_at(*len);
                        stack.extend([right, left]);
                    }
                    None => out.push((part.len(), id.or(self.unknown))),
                }
            }
        }
        out
    }
}

fn at(id: u32) -> usize {
    id as usize
}

/// The pieces that a text begins with, the shortest first: their lengths and numbers.
pub(super) fn prefixes<'a>(
    sorted: &'a [u32],
    text_of: impl Fn(u32) -> &'a [u8],
    text: &'a [u8],
) -> impl Iterator<Item = (usize, u32)> {
    let (mut range, mut depth) = (sorted, 0);
    std::iter::from_fn(move || {
        loop {
            let byte = Some(text.get(depth)?);
            let from = range.partition_point(|id| text_of(*id).get(depth) < byte);
            range = &range[from..];
            range = &range[..range.partition_point(|id| text_of(*id).get(depth) == byte)];
            depth += 1;
            let first = *range.first()?;
            if text_of(first).len() == depth {
                return Some((depth, first));
            }
        }
    })
}

/// The pieces `<0x00>` to `<0xFF>`: all, or none.
fn bytes<'a>(
    pieces: impl Iterator<Item = (u32, &'a str)>,
) -> Result<Option<Box<[u32; 256]>>, Error> {
    let (mut ids, mut found) = (Box::new([0; 256]), 0);
    for (id, text) in pieces {
        let byte = byte(text).ok_or_else(|| {
            Error::format(format!("piece {id}"), format!("`{text}` is no byte as `<0x0A>` is"))
        })?;
        ids[usize::from(byte)] = id;
        found += 1;
    }
    match found {
        0 => Ok(None),
        // Texts are unlike, so each byte is there.
        256 => Ok(Some(ids)),
        some => Err(Error::format("byte pieces", format!("{some}; 256 or none are wanted"))),
    }
}

/// The byte that `<0x0A>` names.
pub(super) fn byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let upper = |digit: u8| matches!(digit, b'0'..=b'9' | b'A'..=b'F');
    (digits.len() == 2 && digits.bytes().all(upper)).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// Parts of a text that are merged; one that is merged into another has no length.
struct Chain<'a> {
    text: &'a str,
    list: Vec<Link>,
    /// Where a merged piece that is not to be used is taken apart.
    unused: HashMap<u32, usize>,
}

struct Link {
    from: usize,
    len: usize,
    before: Option<usize>,
    next: Option<usize>,
    /// A user-defined piece, which is merged with nothing.
    frozen: bool,
}

impl<'a> Chain<'a> {
    fn new(pieces: &Pieces, text: &'a str) -> Self {
        let (mut list, mut from) = (Vec::new(), 0);
        while let Some(first) = text[from..].chars().next() {
            let user = pieces.user_defined(&text[from..]);
            let (len, index) = (user.unwrap_or(first.len_utf8()), list.len());
            let before = index.checked_sub(1);
            let next = (from + len < text.len()).then_some(index + 1);
            list.push(Link { from, len, before, next, frozen: user.is_some() });
            from += len;
        }
        Self { text, list, unused: HashMap::new() }
    }

    fn merge(&mut self, pieces: &Pieces, left: usize, right: usize) -> Option<Merge> {
        let [a, b] = [&self.list[left], &self.list[right]];
        let (len, split) = (a.len + b.len, a.len);
        if a.frozen || b.frozen || len > MAX_PIECE {
            return None;
        }
        let id = pieces.found(&self.text[a.from..a.from + len])?;
        if pieces.is(id, Kind::Unused) {
            self.unused.insert(id, split);
        }
        Some(Merge { score: pieces.scores[at(id)], left, right, len })
    }
}

/// Two neighbours that may become one piece.
#[derive(PartialEq)]
struct Merge {
    score: f32,
    left: usize,
    right: usize,
    len: usize,
}

impl Eq for Merge {}

impl Ord for Merge {
    fn cmp(&self, other: &Self) -> Ordering {
        // Scores are finite; 0 and -0 are equal, as in C.
        let score = self.score.partial_cmp(&other.score).unwrap_or(Ordering::Equal);
        score.then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Merge {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
