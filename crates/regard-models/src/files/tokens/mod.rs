//! Text as tokens, and tokens as text.

mod gguf;
mod guard;
mod library;
mod limits;
mod pieces;
mod sentencepiece;
mod stream;
mod symbols;

use super::chat::ChatTemplate;
use super::gguf::Metadata;
use crate::error::Error;
use library::Library;
use pieces::Pieces;
use sentencepiece::SentencePiece;
use std::fmt;
use std::ops::Range;
use std::path::Path;
pub use stream::Stream;
pub use symbols::{Symbols, Unknown};

/// A vocabulary, and the rules by which a text is divided into it.
#[derive(Clone)]
pub struct Tokens {
    kind: Kind,
    /// How a conversation is written, of models that were taught one.
    chat: Option<Box<ChatTemplate>>,
}

#[derive(Clone)]
enum Kind {
    Library(Box<Library>),
    Pieces(Pieces),
    SentencePiece(Box<SentencePiece>),
    Symbols(Symbols),
}

impl Tokens {
    fn of(kind: Kind) -> Self {
        Self { kind, chat: None }
    }

    /// The same with a chat template.
    #[must_use]
    pub fn with_chat(self, chat: Option<ChatTemplate>) -> Self {
        Self { chat: chat.map(Box::new), ..self }
    }

    /// How a conversation is written, of models that were taught one.
    #[must_use]
    pub fn chat(&self) -> Option<&ChatTemplate> {
        self.chat.as_deref()
    }

    /// Reads a `tokenizer.json` of Hugging Face. Padding and cutting are the caller's matter and switched off.
    pub fn from_tokenizer_json(bytes: &[u8]) -> Result<Self, Error> {
        Ok(Self::of(Kind::Library(Box::new(Library::from_json(bytes)?))))
    }

    /// Makes again what a GGUF file says of its tokens.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, Error> {
        let tokens = Self::of(gguf::read(metadata)?);
        Ok(tokens.with_chat(ChatTemplate::from_gguf(metadata)?))
    }

    /// Reads a SentencePiece model: `tokenizer.model`, `spiece.model`, `.spm`. Its control pieces are found in a text before anything
    /// else. It does not say which of them a text begins and ends with: see [`Tokens::with_ends`].
    pub fn sentencepiece(bytes: &[u8]) -> Result<Self, Error> {
        Ok(Self::of(Kind::SentencePiece(Box::new(SentencePiece::from_spm(bytes)?))))
    }

    /// Reads the tokens of a folder of Marian: `source.spm`, `target.spm` and `vocab.json`, of the text that is read and of the one
    /// that is written. With a `target_vocab.json`, the latter has numbers of its own.
    pub fn marian(folder: &Path) -> Result<(Self, Self), Error> {
        let read = |path: &Path| std::fs::read(path).map_err(|e| Error::file(path, &e));
        let own = folder.join("target_vocab.json");
        let source = folder.join("vocab.json");
        let target = if own.is_file() { &own } else { &source };
        let side = |spm: &str, vocabulary: &Path| {
            let (path, numbers) = (folder.join(spm), read(vocabulary)?);
            let side = SentencePiece::marian(&read(&path)?, &numbers).map_err(|e| e.of(&path))?;
            Ok::<_, Error>(Self::of(Kind::SentencePiece(Box::new(side))))
        };
        Ok((side("source.spm", &source)?, side("target.spm", target)?))
    }

    /// Reads the tokens of a folder of M2M-100: `sentencepiece.bpe.model` and `vocab.json`, of texts in this language (`en`, `zh`). The
    /// languages are tokens as `__en__`.
    pub fn m2m100(folder: &Path, language: &str) -> Result<Self, Error> {
        let read = |name: &str| {
            let path = folder.join(name);
            std::fs::read(&path).map_err(|e| Error::file(&path, &e))
        };
        let (model, numbers) = (read("sentencepiece.bpe.model")?, read("vocab.json")?);
        let own = SentencePiece::m2m100(&model, &numbers, language).map_err(|e| e.of(folder))?;
        Ok(Self::of(Kind::SentencePiece(Box::new(own))))
    }

    /// The same with these tokens before and after each text, where the vocabulary is a SentencePiece model.
    pub fn with_ends(self, begin: Option<u32>, end: Option<u32>) -> Result<Self, Error> {
        let Kind::SentencePiece(model) = self.kind else {
            return Err(Error::format("tokens", "not of SentencePiece: it has its own ends"));
        };
        Ok(Self { kind: Kind::SentencePiece(Box::new(model.with_ends(begin, end)?)), ..self })
    }

    /// Reads a `tokenizer.bin` of llama2.c with so many tokens.
    pub fn from_llama2c(bytes: &[u8], vocab: usize) -> Result<Self, Error> {
        Ok(Self::of(Kind::Pieces(Pieces::from_bin(bytes, vocab)?)))
    }

    /// Reads the same as JSON: `{"tokens": [..], "scores": [..]}`.
    pub fn from_llama2c_json(bytes: &[u8]) -> Result<Self, Error> {
        Ok(Self::of(Kind::Pieces(Pieces::from_json(bytes)?)))
    }

    /// A plain list of characters.
    pub fn from_symbols(symbols: Symbols) -> Result<Self, Error> {
        symbols.check()?;
        Ok(Self::of(Kind::Symbols(symbols)))
    }

    /// How many tokens there are; where numbers are left out, one more than the highest.
    pub fn len(&self) -> usize {
        match &self.kind {
            Kind::Library(library) => library.len(),
            Kind::Pieces(pieces) => pieces.len(),
            Kind::SentencePiece(model) => model.len(),
            Kind::Symbols(symbols) => symbols.tokens.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A text as the model wants to read it, with the special tokens that it expects at its ends.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        match &self.kind {
            Kind::Library(library) => library.encode(text),
            Kind::Pieces(pieces) => Ok(pieces.encode(text)),
            Kind::SentencePiece(model) => model.encode(text),
            Kind::Symbols(symbols) => symbols.encode(text),
        }
    }

    /// The bytes of the text that each token of [`encode`](Self::encode) covers. Tokens that are no part of it cover none.
    pub fn offsets(&self, text: &str) -> Result<Vec<Range<usize>>, Error> {
        let tokens = match &self.kind {
            Kind::Library(library) => return library.offsets(text),
            Kind::Pieces(_) => {
                let known = "tokenizer.json, SentencePiece and lists of characters have them";
                return Err(Error::unsupported("offsets of tokens", &"llama2.c", known));
            }
            Kind::SentencePiece(model) => model.encode_with_offsets(text)?,
            Kind::Symbols(symbols) => symbols.encode_with_offsets(text)?,
        };
        Ok(tokens.into_iter().map(|(_, bytes)| bytes).collect())
    }

    /// The tokens of the text itself: without the special tokens that [`encode`](Self::encode) puts around every text.
    pub fn without_ends<'a>(&self, tokens: &'a [u32]) -> Result<&'a [u32], Error> {
        Ok(&tokens[self.own(tokens)?])
    }

    /// Where the tokens of the text itself are.
    pub(crate) fn own(&self, tokens: &[u32]) -> Result<Range<usize>, Error> {
        let around = self.encode("")?;
        let is_own = |id: &u32| !around.contains(id);
        let (first, last) = (tokens.iter().position(is_own), tokens.iter().rposition(is_own));
        Ok(first.zip(last).map_or(0..0, |(first, last)| first..last + 1))
    }

    /// The text of tokens, without their special tokens. Bytes that are no text become `�`, and numbers that are no tokens nothing. Where the
    /// library that a `tokenizer.json` asks for fails, all of it is `�`.
    pub fn decode(&self, ids: &[u32]) -> String {
        match &self.kind {
            Kind::Library(library) => library.decode(ids),
            Kind::Pieces(pieces) => pieces.decode(ids),
            Kind::SentencePiece(model) => model.decode(ids),
            Kind::Symbols(symbols) => symbols.decode(ids),
        }
    }

    /// A decoder for tokens that come one after the other.
    pub fn stream(&self) -> Stream<'_> {
        Stream::new(self)
    }

    /// A token as it may be shown in a picture: ` the`, `\n`, `<0xE4>`.
    pub fn token(&self, id: u32) -> Option<String> {
        let token = match &self.kind {
            Kind::Library(library) => library.token(id),
            Kind::Pieces(pieces) => pieces.token(id),
            Kind::SentencePiece(model) => model.token(id),
            Kind::Symbols(symbols) => symbols.get(id).map(str::to_owned),
        };
        token.map(|token| shown(&token))
    }

    /// The number of a token by its name in the vocabulary, as `<|im_start|>` or `[CLS]`.
    pub fn id(&self, token: &str) -> Option<u32> {
        match &self.kind {
            Kind::Library(library) => library.id(token),
            Kind::Pieces(pieces) => pieces.id(token),
            Kind::SentencePiece(model) => model.id(token),
            Kind::Symbols(symbols) => symbols.id(token),
        }
    }

    /// Writes the vocabulary as a file that `ModelFiles::open` reads again.
    pub fn to_json(&self) -> Result<String, Error> {
        match &self.kind {
            Kind::Library(library) => library.to_json(),
            Kind::Pieces(pieces) => pieces.to_json(),
            Kind::SentencePiece(model) => model.to_json(),
            Kind::Symbols(symbols) => symbols.to_json(),
        }
    }

    /// Reads any JSON that [`Tokens::to_json`] writes.
    pub fn from_json(bytes: &[u8]) -> Result<Self, Error> {
        let value: serde_json::Value = serde_json::from_slice(bytes).map_err(wrong)?;
        if value.get("model").is_some() {
            Self::from_tokenizer_json(bytes)
        } else if value.get("sentencepiece").is_some() {
            Ok(Self::of(Kind::SentencePiece(Box::new(SentencePiece::from_json(bytes)?))))
        } else if value.get("scores").is_some() {
            Self::from_llama2c_json(bytes)
        } else {
            Self::from_symbols(serde_json::from_value(value).map_err(wrong)?)
        }
    }

    /// Reads such a file.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let bytes = std::fs::read(path).map_err(|e| Error::file(path, &e))?;
        Self::from_json(&bytes).map_err(|e| e.of(path))
    }
}

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Library(_) => "tokenizer.json",
            Kind::Pieces(_) => "llama2.c",
            Kind::SentencePiece(_) => "SentencePiece",
            Kind::Symbols(_) => "characters",
        };
        write!(f, "Tokens({kind}, {})", self.len())
    }
}

fn wrong(e: impl fmt::Display) -> Error {
    Error::format("tokens", e.to_string())
}

/// A text without anything that would move a cursor.
fn shown(text: &str) -> String {
    let shown =
        |c: char| -> String { if c.is_control() { c.escape_debug().collect() } else { c.into() } };
    text.chars().map(shown).collect()
}

/// Bytes as text, where those that are no text show as `<0xE4>`.
fn label(bytes: &[u8]) -> String {
    let mut label = String::new();
    for chunk in bytes.utf8_chunks() {
        label.push_str(chunk.valid());
        label.extend(chunk.invalid().iter().map(|byte| format!("<0x{byte:02X}>")));
    }
    label
}
