//! Vocabularies: made from texts, kept as a `tokenizer.json` that says all by itself how a text is divided and put together again.

use crate::error::Error;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence as Decoders;
use tokenizers::decoders::strip::Strip as CutOff;
use tokenizers::models::bpe::{BPE, BpeTrainer, Vocab};
use tokenizers::models::unigram::{Unigram, UnigramTrainer};
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::normalizers::replace::ReplacePattern;
use tokenizers::normalizers::{Lowercase, Prepend, Replace, Sequence as Normalizers, Strip};
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;
use tokenizers::{
    AddedToken, DecoderWrapper, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper,
    OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper,
    SplitDelimiterBehavior, Tokenizer,
};

/// The special token of unknown text.
const UNKNOWN: &str = "<unk>";

/// Stands for a space, so that a token can begin with one.
const SPACE: &str = "▁";

/// The largest vocabulary; room for as much as is asked for is made at once.
const MOST: usize = 1 << 20;

/// Longer pieces are cut for learning: what is that long is no word, and costs the square of its length.
const LONGEST: usize = 64;

/// Lets a word go on while a vocabulary is made; of private use, so hardly in a text.
const END: char = '\u{E000}';

/// What stands side by side less often is not put together.
const SELDOM: u64 = 2;

// The expressions are read by Rust's `fancy-regex` and by Python's Oniguruma, and mean the same to both.

/// Characters that are written without spaces between words.
const HAN: &str = r"\p{Han}\p{Hiragana}\p{Katakana}ー";
/// A letter of all other writing.
const LETTER: &str = r"[\p{L}\p{M}&&[^\p{Han}\p{Hiragana}\p{Katakana}ー]]";
/// Endings that many words have in common: he's, I'd. Not so `n't`: `don't` is a word.
const ENDING: &str = r"(?i:s|m|d|ll|re|ve)(?![\p{L}\p{M}])";

/// How a text is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VocabularyKind {
    /// Words and parts of words, by putting together what is most often side by side.
    Bpe,
    /// Words and parts of words, by leaving out what is missed least.
    Unigram,
    /// Characters, white space among them: a text comes back exactly as it was.
    Char,
    /// Whole words, Chinese characters, and punctuation.
    Word,
}

/// What a vocabulary is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VocabularySettings {
    /// How a text is divided.
    pub kind: VocabularyKind,
    /// How many tokens there are at most, special tokens among them.
    pub size: usize,
    /// What is seen less often is unknown: words of [`VocabularyKind::Word`], else characters. 0 is 2 for words, 1 for characters.
    pub min_count: usize,
    /// Whether capital letters become small ones.
    pub lowercase: bool,
}

impl Default for VocabularySettings {
    fn default() -> Self {
        Self { kind: VocabularyKind::Bpe, size: 8000, min_count: 0, lowercase: false }
    }
}

impl VocabularySettings {
    fn min_count(&self) -> u64 {
        let usual = if self.kind == VocabularyKind::Word { 2 } else { 1 };
        if self.min_count == 0 { usual } else { u64::try_from(self.min_count).unwrap_or(u64::MAX) }
    }

    fn check(&self, special_tokens: &[&str]) -> Result<(), Error> {
        let refuse = |key: &str, why: String| Err(Error::setting(key, why));
        for (i, token) in special_tokens.iter().enumerate() {
            // So written, no word or part of one can be mistaken for a special token.
            if token.len() < 3 || !token.starts_with('<') || !token.ends_with('>') {
                return refuse(
                    "special_tokens",
                    format!("`{token}`; a special token has the form `<s>`"),
                );
            }
            if special_tokens[..i].contains(token) {
                return refuse("special_tokens", format!("`{token}` is there twice"));
            }
        }
        if matches!(self.kind, VocabularyKind::Unigram | VocabularyKind::Word)
            && !special_tokens.contains(&UNKNOWN)
        {
            let why = format!("{:?} needs `{UNKNOWN}` among them", self.kind).to_lowercase();
            return refuse("special_tokens", why);
        }
        if self.size <= special_tokens.len() {
            let why = format!(
                "{}; {} special tokens leave no room for text",
                self.size,
                special_tokens.len()
            );
            return refuse("size", why);
        }
        if self.size > MOST {
            return refuse("size", format!("{}; at most {MOST}", self.size));
        }
        Ok(())
    }
}

/// Makes a vocabulary from texts: the bytes of a `tokenizer.json`, the same bytes for the same texts in the same order.
///
/// The `special_tokens` have the first numbers, in their order; in a text they are found before anything else is, and decoding leaves them
/// out. `<unk>`, if among them, stands for what is not known. Encoding adds none of them.
pub fn train<'a>(
    settings: &VocabularySettings,
    special_tokens: &[&str],
    texts: impl Iterator<Item = &'a str>,
) -> Result<Vec<u8>, Error> {
    settings.check(special_tokens)?;
    let pipeline = TokenizerPipeline::new(settings).map_err(library)?;
    let pieces = pipeline.count(special_tokens, texts)?;
    if pieces.is_empty() {
        return Err(Error::data("no text to make a vocabulary of"));
    }
    let model = match settings.kind {
        VocabularyKind::Bpe | VocabularyKind::Unigram => {
            let alphabet = alphabet(settings, special_tokens, &pieces)?;
            let words = known_parts(&pieces, &alphabet);
            if settings.kind == VocabularyKind::Bpe {
                bpe(settings, special_tokens, &words)?
            } else {
                unigram(settings, special_tokens, words)?
            }
        }
        VocabularyKind::Char => {
            let tokens = most_frequent(settings, special_tokens, characters(&pieces));
            let tokens = numbered(special_tokens, tokens.iter().map(char::to_string).collect());
            merging(special_tokens, tokens.collect())?.into()
        }
        VocabularyKind::Word => {
            let tokens = numbered(special_tokens, most_frequent(settings, special_tokens, pieces));
            let words = WordLevel::builder().vocab(tokens.collect()).unk_token(UNKNOWN.into());
            words.build().map_err(library)?.into()
        }
    };
    let mut tokenizer = Tokenizer::new(model);
    tokenizer
        .with_normalizer(pipeline.normalizer)
        .with_pre_tokenizer(pipeline.pre_tokenizer)
        .with_decoder(pipeline.decoder);
    tokenizer.add_special_tokens(&added(special_tokens));
    Ok(tokenizer.to_string(false).map_err(library)?.into_bytes())
}

/// What of the library fails here fails by what it was given.
fn library(error: tokenizers::Error) -> Error {
    Error::data(format!("the vocabulary cannot be made: {error}"))
}

fn added(special_tokens: &[&str]) -> Vec<AddedToken> {
    special_tokens.iter().map(|token| AddedToken::from(*token, true)).collect()
}

/// Tokens and their numbers, those of the special tokens first.
fn numbered(special_tokens: &[&str], tokens: Vec<String>) -> impl Iterator<Item = (String, u32)> {
    special_tokens.iter().map(|token| (*token).to_owned()).chain(tokens).zip(0..)
}

/// The normalizer, pre-tokenizer and decoder of a tokenizer.
struct TokenizerPipeline {
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    decoder: Option<DecoderWrapper>,
}

impl TokenizerPipeline {
    fn new(settings: &VocabularySettings) -> tokenizers::Result<Self> {
        let lower = settings.lowercase.then_some(NormalizerWrapper::from(Lowercase));
        let isolated = |pattern: String| {
            let pattern = SplitPattern::Regex(pattern);
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                .map(PreTokenizerWrapper::from)
        };
        Ok(match settings.kind {
            VocabularyKind::Char => {
                Self { normalizer: lower, pre_tokenizer: None, decoder: Some(Fuse::new().into()) }
            }
            VocabularyKind::Word => {
                let pre_tokenizers = vec![WhitespaceSplit.into(), isolated(whole_words())?];
                // Without a decoder, words are joined by spaces.
                Self {
                    normalizer: lower,
                    pre_tokenizer: Some(PreTokenizers::new(pre_tokenizers).into()),
                    decoder: None,
                }
            }
            VocabularyKind::Bpe | VocabularyKind::Unigram => {
                let replace = |pattern: String, content: &str| {
                    Replace::new(ReplacePattern::Regex(pattern), content)
                        .map(NormalizerWrapper::from)
                };
                let mut normalizers = vec![Strip::new(true, true).into()];
                normalizers.extend(lower);
                normalizers.push(Prepend::new(SPACE.into()).into());
                normalizers.push(replace(r"\s+".into(), SPACE)?);
                // Where words are written without spaces, the first needs none.
                let wide = r"\x{3000}-\x{303F}\x{FF00}-\x{FFEF}“‘";
                normalizers.push(replace(format!(r"\A{SPACE}(?=[{HAN}{wide}])"), "")?);
                let spaces = DecoderWrapper::from(Replace::new(SPACE, " ")?);
                let decoders = vec![spaces, Fuse::new().into(), CutOff::new(' ', 1, 0).into()];
                Self {
                    normalizer: Some(Normalizers::new(normalizers).into()),
                    pre_tokenizer: Some(isolated(parts())?),
                    decoder: Some(Decoders::new(decoders).into()),
                }
            }
        })
    }

    /// The pieces of the texts, and how often each occurs.
    fn count<'a>(
        &self,
        special_tokens: &[&str],
        texts: impl Iterator<Item = &'a str>,
    ) -> Result<BTreeMap<String, u64>, Error> {
        let mut counts = BTreeMap::new();
        for text in texts {
            let mut between = vec![text];
            for token in special_tokens {
                between = between.iter().flat_map(|text| text.split(token)).collect();
            }
            for text in between.into_iter().filter(|text| !text.is_empty()) {
                let pieces = self.divide(text).map_err(library)?;
                for (piece, _, _) in
                    pieces.get_splits(OffsetReferential::Normalized, OffsetType::Byte)
                {
                    match counts.get_mut(piece) {
                        Some(count) => *count += 1,
                        None => drop(counts.insert(piece.to_owned(), 1)),
                    }
                }
            }
        }
        counts.remove("");
        Ok(counts)
    }

    fn divide(&self, text: &str) -> tokenizers::Result<PreTokenizedString> {
        let mut text = NormalizedString::from(text);
        if let Some(normalizer) = &self.normalizer {
            normalizer.normalize(&mut text)?;
        }
        let mut pieces = PreTokenizedString::from(text);
        if let Some(pre_tokenizer) = &self.pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        Ok(pieces)
    }
}

/// What tokens are parts of: an ending, a word, a run of Han, a digit, dots or dashes, another sign, a space before Han. A
/// space belongs to what follows it.
fn parts() -> String {
    let word = format!("{SPACE}?{LETTER}+(?:['’](?!{ENDING}){LETTER}+)*");
    let signs = format!(r"{SPACE}?(?:\.{{2,}}|-{{2,}}|[^\p{{L}}\p{{M}}{SPACE}])");
    format!(r"['’]{ENDING}|{word}|[{HAN}]+|{signs}|{SPACE}")
}

/// Words with what joins them (story-line, it's, 1,000.5), single Han, single signs: close to the `13a` tokenization of BLEU.
fn whole_words() -> String {
    let letter = format!(r"[\p{{L}}\p{{M}}\p{{N}}&&[^{HAN}]]");
    format!(r"{letter}+(?:(?:['’-]|(?<=\p{{N}})[.,](?=\p{{N}})){letter}+)*|\S")
}

fn characters(pieces: &BTreeMap<String, u64>) -> BTreeMap<char, u64> {
    let mut counts = BTreeMap::new();
    for (piece, count) in pieces {
        for character in piece.chars() {
            *counts.entry(character).or_default() += count;
        }
    }
    counts
}

/// As many as there is room for, the most frequent first.
fn most_frequent<T: Ord>(
    settings: &VocabularySettings,
    special_tokens: &[&str],
    counts: BTreeMap<T, u64>,
) -> Vec<T> {
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.retain(|(_, count)| *count >= settings.min_count());
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    counts.truncate(settings.size - special_tokens.len());
    counts.into_iter().map(|(token, _)| token).collect()
}

/// The characters that parts of words are made of. All of them are tokens, so there must be room.
fn alphabet(
    settings: &VocabularySettings,
    special_tokens: &[&str],
    pieces: &BTreeMap<String, u64>,
) -> Result<BTreeSet<char>, Error> {
    let least = settings.min_count();
    let counts = characters(pieces).into_iter().filter(|(_, count)| *count >= least);
    let alphabet: BTreeSet<char> = counts.map(|(character, _)| character).collect();
    let needed = special_tokens.len() + alphabet.len() + 1;
    if settings.size < needed {
        let why = format!(
            "{}; {} special tokens and {} characters (seen {least} times or more) need {needed}: raise it, or min_count",
            settings.size,
            special_tokens.len(),
            alphabet.len(),
        );
        return Err(Error::setting("size", why));
    }
    if alphabet.is_empty() {
        return Err(Error::data(format!("no character is there {least} times; lower min_count")));
    }
    Ok(alphabet)
}

/// Pieces cut where a character is unknown, and where they are too long to learn from.
fn known_parts(pieces: &BTreeMap<String, u64>, alphabet: &BTreeSet<char>) -> BTreeMap<String, u64> {
    let mut parts = BTreeMap::new();
    for (piece, count) in pieces {
        for known in piece.split(|character| !alphabet.contains(&character)) {
            let characters: Vec<char> = known.chars().collect();
            for part in characters.chunks(LONGEST) {
                *parts.entry(part.iter().collect()).or_default() += count;
            }
        }
    }
    parts
}

/// A table of which nothing is put together yet.
fn merging(special_tokens: &[&str], tokens: Vocab) -> Result<BPE, Error> {
    let mut model = BPE::builder().vocab_and_merges(tokens, Vec::new());
    if special_tokens.contains(&UNKNOWN) {
        model = model.unk_token(UNKNOWN.into());
    }
    model.build().map_err(library)
}

fn bpe(
    settings: &VocabularySettings,
    special_tokens: &[&str],
    words: &BTreeMap<String, u64>,
) -> Result<ModelWrapper, Error> {
    let trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(settings.size)
        .min_frequency(SELDOM)
        .special_tokens(added(special_tokens))
        .build();
    let mut model = merging(special_tokens, Vocab::default())?;
    // It goes through hash maps, but its sums are of whole numbers, and of equal pairs the one of older tokens wins.
    let words = words.iter().map(|(word, count)| (word.into(), *count)).collect();
    trainer.do_train(&words, &mut model).map_err(library)?;
    Ok(model.into())
}

fn unigram(
    settings: &VocabularySettings,
    special_tokens: &[&str],
    words: BTreeMap<String, u64>,
) -> Result<ModelWrapper, Error> {
    // The trainer thinks of what goes on in more than one way. A word that always ends where it ends is thus no candidate however
    // frequent it is, unless it is also seen to go on.
    let going_on = words.values().any(|n| *n > 1);
    let words = words.into_iter().flat_map(|(word, n)| {
        let other = (n > 1).then(|| (format!("{word}{END}"), 1));
        let n = n - u64::from(other.is_some());
        other.into_iter().chain([(word, u32::try_from(n).unwrap_or(u32::MAX))])
    });
    let size = settings.size + usize::from(going_on);
    let trainer = UnigramTrainer::builder()
        .show_progress(false)
        .vocab_size(u32::try_from(size).unwrap_or(u32::MAX))
        .special_tokens(added(special_tokens))
        .unk_token(Some(UNKNOWN.into()))
        .build()
        .map_err(|e| library(e.to_string().into()))?;
    // Sums are rounded in the order they are made in, and that hangs on the threads: so one thread.
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build();
    let one = one.map_err(|e| library(e.into()))?;
    let mut model = Unigram::default();
    one.install(|| trainer.do_train(words.collect(), &mut model)).map_err(library)?;
    let pieces = model.iter().skip(special_tokens.len()).filter(|(piece, _)| !piece.contains(END));
    let mut pieces: Vec<(String, f64)> = pieces.cloned().collect();
    // Characters that the trainer had dropped, it takes in again at the end, in the order of a hash map, each for a little more
    // than the lowest score. They shall all have the lowest.
    let lowest = pieces.iter().map(|(_, score)| *score).fold(f64::INFINITY, f64::min);
    let seldom = lowest + 1e-4 * (pieces.iter().filter(|(piece, _)| single(piece)).count() as f64);
    for (piece, score) in &mut pieces {
        if single(piece) && *score < seldom {
            *score = lowest;
        }
    }
    pieces.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let special = special_tokens.iter().map(|token| ((*token).to_owned(), 0.0));
    let unknown = special_tokens.iter().position(|token| *token == UNKNOWN);
    let model = Unigram::from(special.chain(pieces).collect(), unknown, false);
    Ok(model.map_err(library)?.into())
}

fn single(piece: &str) -> bool {
    piece.chars().nth(1).is_none()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::LazyLock;

    const SPECIAL_TOKENS: [&str; 5] = ["<pad>", "<s>", "</s>", "<unk>", "<2en>"];
    const TEXTS: [&str; 6] = [
        "Tom's mother doesn't think he'd know it.",
        "Don't tell Tom: 30, 1,000.5 -- \"it's\" late... isn't it?",
        "我喜欢 Tom 的书。",
        "“我们喜欢书！” 他们喜欢 30 本书，不喜欢 12 本。",
        "Überall läuft der Hund über die Straße.",
        "The dog runs\nover the road;\tthe road runs.",
    ];

    fn made(kind: VocabularyKind, size: usize, special_tokens: &[&str]) -> Tokenizer {
        let settings = VocabularySettings { kind, size, min_count: 1, lowercase: false };
        Tokenizer::from_bytes(train(&settings, special_tokens, TEXTS.into_iter()).unwrap()).unwrap()
    }

    fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        tokenizer.encode(text, true).unwrap().get_ids().to_vec()
    }

    fn tokens(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
        tokenizer.encode(text, true).unwrap().get_tokens().to_vec()
    }

    fn back(tokenizer: &Tokenizer, text: &str) -> String {
        tokenizer.decode(&ids(tokenizer, text), true).unwrap()
    }

    fn pieces(kind: VocabularyKind, text: &str) -> Vec<String> {
        let settings = VocabularySettings { kind, ..VocabularySettings::default() };
        let pieces = TokenizerPipeline::new(&settings).unwrap().divide(text).unwrap();
        let pieces = pieces.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
        pieces.into_iter().map(|(piece, _, _)| piece.to_owned()).collect()
    }

    #[test]
    fn words_keep_the_space_before_them_and_lose_common_endings() {
        let found =
            pieces(VocabularyKind::Bpe, " Tom's dog  doesn't bark at 10 o'clock, I’d say... ");
        let expected = [
            "▁Tom",
            "'s",
            "▁dog",
            "▁doesn't",
            "▁bark",
            "▁at",
            "▁1",
            "0",
            "▁o'clock",
            ",",
            "▁I",
            "’d",
            "▁say",
            "...",
        ];
        assert_eq!(found, expected);
        assert_eq!(pieces(VocabularyKind::Bpe, "l'homme d'or"), ["▁l'homme", "▁d'or"]);
    }

    #[test]
    fn han_stand_together_and_cost_no_space_at_the_beginning() {
        assert_eq!(pieces(VocabularyKind::Bpe, "好久不见。"), ["好久不见", "。"]);
        assert_eq!(
            pieces(VocabularyKind::Bpe, "“我”有 Tom 的《书》"),
            ["“", "我", "”", "有", "▁Tom", "▁", "的", "《", "书", "》"]
        );
        assert_eq!(pieces(VocabularyKind::Bpe, "カー 3台"), ["カー", "▁3", "台"]);
    }

    #[test]
    fn whole_words_keep_what_joins_them() {
        let found = pieces(VocabularyKind::Word, "it's a story-line -- 1,000.5 , mr. x 好久");
        let expected =
            ["it's", "a", "story-line", "-", "-", "1,000.5", ",", "mr", ".", "x", "好", "久"];
        assert_eq!(found, expected);
    }

    #[test]
    fn marks_have_the_first_numbers_and_are_left_out_in_decoding() {
        for kind in [
            VocabularyKind::Bpe,
            VocabularyKind::Unigram,
            VocabularyKind::Char,
            VocabularyKind::Word,
        ] {
            let tokenizer = made(kind, 140, &SPECIAL_TOKENS);
            for (token, id) in SPECIAL_TOKENS.into_iter().zip(0..) {
                assert_eq!(tokenizer.token_to_id(token), Some(id), "{kind:?}");
            }
            let found = ids(&tokenizer, "<2en>书</s>");
            assert_eq!((found[0], found.len(), found[2]), (4, 3, 2), "{kind:?}");
            assert_eq!(back(&tokenizer, "<2en>书</s>"), "书", "{kind:?}");
            assert_eq!(ids(&tokenizer, "书☃")[1], 3, "{kind:?}");
            assert!(tokenizer.get_vocab_size(true) <= 140, "{kind:?}");
        }
    }

    #[test]
    fn marks_in_the_texts_are_not_learned() {
        let settings = VocabularySettings { size: 60, ..VocabularySettings::default() };
        let with = train(&settings, &SPECIAL_TOKENS, ["<2en>ab ab", "cd</s>"].into_iter()).unwrap();
        let without = train(&settings, &SPECIAL_TOKENS, ["ab ab", "cd"].into_iter()).unwrap();
        assert_eq!(with, without);
    }

    #[test]
    fn frequent_words_are_tokens() {
        let text = "the dog's road and the dog's mother and the dog's house";
        for kind in [VocabularyKind::Bpe, VocabularyKind::Unigram] {
            let settings = VocabularySettings { kind, size: 40, ..VocabularySettings::default() };
            let made = train(&settings, &SPECIAL_TOKENS, std::iter::repeat_n(text, 3)).unwrap();
            let made = Tokenizer::from_bytes(made).unwrap();
            assert_eq!(tokens(&made, "the dog's"), ["▁the", "▁dog", "'s"], "{kind:?}");
        }
    }

    #[test]
    fn characters_are_kept_as_they_are() {
        let made = made(VocabularyKind::Char, 200, &SPECIAL_TOKENS);
        for text in ["\n\n dog\t runs ", "我 \n", " "] {
            assert_eq!(back(&made, text), text);
            assert_eq!(ids(&made, text).len(), text.chars().count());
        }
    }

    #[test]
    fn what_is_rare_is_unknown() {
        let texts = || ["aab b c", "a b"].into_iter();
        let with = |kind, size, min_count| {
            let settings = VocabularySettings { kind, size, min_count, lowercase: false };
            Tokenizer::from_bytes(train(&settings, &SPECIAL_TOKENS, texts()).unwrap()).unwrap()
        };
        assert_eq!(tokens(&with(VocabularyKind::Word, 20, 0), "aab b c"), [UNKNOWN, "b", UNKNOWN]);
        assert_eq!(tokens(&with(VocabularyKind::Word, 20, 1), "aab b c"), ["aab", "b", "c"]);
        assert_eq!(tokens(&with(VocabularyKind::Word, 6, 1), "aab b c"), [UNKNOWN, "b", UNKNOWN]);
        assert_eq!(tokens(&with(VocabularyKind::Char, 20, 2), "abc"), ["a", "b", UNKNOWN]);
        assert_eq!(tokens(&with(VocabularyKind::Bpe, 20, 2), "c").last().unwrap(), UNKNOWN);
    }

    #[test]
    fn capitals_become_small_where_asked() {
        for kind in [
            VocabularyKind::Bpe,
            VocabularyKind::Unigram,
            VocabularyKind::Char,
            VocabularyKind::Word,
        ] {
            let settings = VocabularySettings { kind, size: 140, min_count: 1, lowercase: true };
            let made = train(&settings, &SPECIAL_TOKENS, TEXTS.into_iter()).unwrap();
            let made = Tokenizer::from_bytes(made).unwrap();
            assert_eq!(back(&made, "The DOG"), "the dog", "{kind:?}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let fail = |kind, size, special_tokens: &[&str], texts: &[&str]| {
            let settings = VocabularySettings { kind, size, ..VocabularySettings::default() };
            train(&settings, special_tokens, texts.iter().copied()).unwrap_err().to_string()
        };
        let told = [
            (fail(VocabularyKind::Bpe, 100, &["pad"], &TEXTS), "special_tokens: `pad`"),
            (
                fail(VocabularyKind::Bpe, 100, &["<s>", "<s>"], &TEXTS),
                "special_tokens: `<s>` is there twice",
            ),
            (
                fail(VocabularyKind::Word, 100, &["<s>"], &TEXTS),
                "special_tokens: word needs `<unk>`",
            ),
            (fail(VocabularyKind::Char, 5, &SPECIAL_TOKENS, &TEXTS), "size: 5; 5 special tokens"),
            (fail(VocabularyKind::Char, usize::MAX, &SPECIAL_TOKENS, &TEXTS), "at most"),
            (
                fail(VocabularyKind::Bpe, 9, &SPECIAL_TOKENS, &["abcd"]),
                "size: 9; 5 special tokens and 5 characters",
            ),
            (fail(VocabularyKind::Unigram, 9, &SPECIAL_TOKENS, &["abcd"]), "need 11"),
            (fail(VocabularyKind::Bpe, 100, &SPECIAL_TOKENS, &["", " \n"]), "no text"),
            (fail(VocabularyKind::Word, 100, &SPECIAL_TOKENS, &[]), "no text"),
        ];
        for (message, part) in told {
            assert!(message.contains(part), "{message} / {part}");
        }
    }

    #[test]
    fn settings_are_read_and_unknown_keys_refused() {
        let text = r#"{"kind": "unigram", "size": 9, "min_count": 0, "lowercase": true}"#;
        let settings: VocabularySettings = serde_json::from_str(text).unwrap();
        let expected = VocabularySettings {
            kind: VocabularyKind::Unigram,
            size: 9,
            min_count: 0,
            lowercase: true,
        };
        assert_eq!(settings, expected);
        let text = text.replace("size", "sise");
        assert!(serde_json::from_str::<VocabularySettings>(&text).is_err());
    }

    static BPE_MADE: LazyLock<Tokenizer> =
        LazyLock::new(|| made(VocabularyKind::Bpe, 140, &SPECIAL_TOKENS));
    static UNIGRAM: LazyLock<Tokenizer> =
        LazyLock::new(|| made(VocabularyKind::Unigram, 140, &SPECIAL_TOKENS));
    static CHAR: LazyLock<Tokenizer> =
        LazyLock::new(|| made(VocabularyKind::Char, 140, &SPECIAL_TOKENS));

    proptest! {
        #[test]
        fn a_text_comes_back(text in "[Tomthe dogisn'tß我喜欢书。，“”！ 0-3.,\"?:-]{0,40}") {
            let plain = text.split_whitespace().collect::<Vec<_>>().join(" ");
            prop_assert_eq!(back(&BPE_MADE, &text), &*plain);
            prop_assert_eq!(back(&UNIGRAM, &text), &*plain);
            prop_assert_eq!(back(&CHAR, &text), text);
        }

        #[test]
        fn no_text_is_refused(text in any::<String>()) {
            for tokenizer in [&BPE_MADE, &UNIGRAM, &CHAR] {
                prop_assert!(tokenizer.encode(text.as_str(), true).is_ok());
            }
            let settings = VocabularySettings { size: 1000, ..VocabularySettings::default() };
            let made = train(&settings, &SPECIAL_TOKENS, [text.as_str(), "a"].into_iter());
            prop_assert!(made.is_ok(), "{:?}", made);
        }
    }
}
