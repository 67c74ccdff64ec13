//! `ModelProto` of SentencePiece, the few fields of it that change ids.
//!
//! Numbers of fields are those of `sentencepiece_model.proto`. Every length is held against the bytes that are there, and what is
//! kept is a small multiple of the file.

use super::super::limits::MAX_FILE;
use crate::error::Error;
use serde::{Deserialize, Serialize};

/// Pieces, and how a text is made ready for them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Model {
    pub(super) algorithm: Algorithm,
    pub(super) pieces: Vec<Piece>,
    /// Replacements of characters: the length of a trie, the trie, and texts that end with a 0. Empty if there are none.
    #[serde(default)]
    pub(super) charsmap: Vec<u8>,
    pub(super) add_dummy_prefix: bool,
    pub(super) remove_extra_whitespaces: bool,
    pub(super) escape_whitespaces: bool,
}

/// How a text is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Algorithm {
    /// The most probable pieces (Kudo 2018).
    Unigram,
    /// The best neighbours are merged until none can be (Sennrich et al. 2016).
    Bpe,
}

/// A piece.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Piece {
    pub(super) text: String,
    pub(super) score: f32,
    pub(super) kind: Kind,
}

/// Kinds of pieces, the same in SentencePiece and in GGUF.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    Normal,
    Unknown,
    Control,
    User,
    Unused,
    Byte,
}

impl Kind {
    pub(super) fn of(number: u64) -> Option<Self> {
        Some(match number {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::User,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

impl Model {
    pub(super) fn read(bytes: &[u8]) -> Result<Self, Error> {
        if bytes.len() > MAX_FILE {
            let why = format!("{} bytes; {MAX_FILE} are the most that are read", bytes.len());
            return Err(Error::format("sentencepiece", why));
        }
        let mut model = Self {
            algorithm: Algorithm::Unigram,
            pieces: Vec::new(),
            charsmap: Vec::new(),
            add_dummy_prefix: true,
            remove_extra_whitespaces: true,
            escape_whitespaces: true,
        };
        for field in Fields::of(bytes, "sentencepiece") {
            let (number, value) = field?;
            match number {
                1 => {
                    let place = format!("piece {}", model.pieces.len());
                    model.pieces.push(piece(value.bytes(&place)?, &place)?);
                }
                2 => model.trainer(value.bytes("trainer_spec")?)?,
                3 => model.normalizer(value.bytes("normalizer_spec")?)?,
                5 => denormalizer(value.bytes("denormalizer_spec")?)?,
                _ => {}
            }
        }
        Ok(model)
    }

    fn trainer(&mut self, bytes: &[u8]) -> Result<(), Error> {
        for field in Fields::of(bytes, "trainer_spec") {
            let (number, value) = field?;
            match number {
                3 => {
                    let place = "trainer_spec.model_type";
                    self.algorithm = match value.varint(place)? {
                        1 => Algorithm::Unigram,
                        2 => Algorithm::Bpe,
                        other => {
                            let known = "1 (unigram) and 2 (BPE) are known";
                            return Err(Error::unsupported(place, &other, known));
                        }
                    };
                }
                24 if value.varint("trainer_spec.treat_whitespace_as_suffix")? != 0 => {
                    let place = "trainer_spec.treat_whitespace_as_suffix";
                    return Err(Error::unsupported(place, &true, "false is known"));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn normalizer(&mut self, bytes: &[u8]) -> Result<(), Error> {
        for field in Fields::of(bytes, "normalizer_spec") {
            let (number, value) = field?;
            let flag = || Ok::<_, Error>(value.varint("normalizer_spec")? != 0);
            match number {
                2 => self.charsmap = value.bytes("precompiled_charsmap")?.to_vec(),
                3 => self.add_dummy_prefix = flag()?,
                4 => self.remove_extra_whitespaces = flag()?,
                5 => self.escape_whitespaces = flag()?,
                _ => {}
            }
        }
        Ok(())
    }
}

fn denormalizer(bytes: &[u8]) -> Result<(), Error> {
    for field in Fields::of(bytes, "denormalizer_spec") {
        let (number, value) = field?;
        if number == 2 && !value.bytes("denormalizer_spec")?.is_empty() {
            let place = "denormalizer_spec.precompiled_charsmap";
            return Err(Error::unsupported(place, &"not empty", "an empty one is known"));
        }
    }
    Ok(())
}

fn piece(bytes: &[u8], place: &str) -> Result<Piece, Error> {
    let mut piece = Piece { text: String::new(), score: 0.0, kind: Kind::Normal };
    for field in Fields::of(bytes, place) {
        let (number, value) = field?;
        match number {
            1 => {
                let text = std::str::from_utf8(value.bytes(place)?);
                piece.text = text.map_err(|e| Error::format(place, e.to_string()))?.into();
            }
            2 => piece.score = value.float(place)?,
            3 => {
                let kind = value.varint(place)?;
                let known = || Error::unsupported(place, &kind, "kinds of pieces are 1 to 6");
                piece.kind = Kind::of(kind).ok_or_else(known)?;
            }
            _ => {}
        }
    }
    if piece.text.is_empty() {
        return Err(Error::format(place, "a piece without text"));
    }
    Ok(piece)
}

/// A value of a message, by its wire type.
#[derive(Clone, Copy)]
enum Value<'a> {
    Varint(u64),
    Fixed32([u8; 4]),
    Fixed64,
    Bytes(&'a [u8]),
}

impl<'a> Value<'a> {
    fn bytes(self, place: &str) -> Result<&'a [u8], Error> {
        if let Self::Bytes(bytes) = self { Ok(bytes) } else { Err(wrong_type(place)) }
    }

    fn varint(self, place: &str) -> Result<u64, Error> {
        if let Self::Varint(n) = self { Ok(n) } else { Err(wrong_type(place)) }
    }

    fn float(self, place: &str) -> Result<f32, Error> {
        if let Self::Fixed32(x) = self { Ok(f32::from_le_bytes(x)) } else { Err(wrong_type(place)) }
    }
}

fn wrong_type(place: &str) -> Error {
    Error::format(place, "a field has another wire type than in sentencepiece_model.proto")
}

/// The fields of a message, one after the other.
struct Fields<'a> {
    rest: &'a [u8],
    place: &'a str,
}

impl<'a> Fields<'a> {
    fn of(rest: &'a [u8], place: &'a str) -> Self {
        Self { rest, place }
    }

    fn varint(&mut self) -> Option<u64> {
        let mut n = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.rest.split_first()?;
            self.rest = rest;
            n |= u64::from(byte & 0x7F) << shift;
            if byte & 0x80 == 0 {
                return Some(n);
            }
        }
        None
    }

    fn field(&mut self) -> Option<(u64, Value<'a>)> {
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Value::Varint(self.varint()?),
            1 => {
                self.rest = self.rest.get(8..)?;
                Value::Fixed64
            }
            2 => {
                let len = usize::try_from(self.varint()?).ok()?;
                let (bytes, rest) = self.rest.split_at_checked(len)?;
                self.rest = rest;
                Value::Bytes(bytes)
            }
            5 => {
                let (bytes, rest) = self.rest.split_first_chunk()?;
                self.rest = rest;
                Value::Fixed32(*bytes)
            }
            _ => return None,
        };
        Some((tag >> 3, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Value<'a>), Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let left = self.rest.len();
        let field = self.field().ok_or_else(|| {
            self.rest = &[];
            let why = format!("no protobuf field {left} bytes before its end; the file is damaged");
            Error::format(self.place, why)
        });
        Some(field)
    }
}
