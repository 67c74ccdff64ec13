//! What a run learns from, as numbers: examples, and how they are put into batches.

use crate::data::{Batches, Pair, documents, first_pairs, text, train_vocabulary, windows};
use crate::error::Error;
use crate::settings::{ModelKind, Part, Settings, Task};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use regard_models::files::Tokens;
use std::path::{Path, PathBuf};

/// Fills up rows; never looked at, and never an answer.
pub(crate) const PAD: u32 = 0;
/// Begins a text.
pub(crate) const BEGIN: u32 = 1;
/// Ends a text.
pub(crate) const END: u32 = 2;

/// The special tokens of every vocabulary, in the order of their numbers.
const SPECIAL_TOKENS: [&str; 4] = ["<pad>", "<s>", "</s>", "<unk>"];

/// Examples as numbers.
#[derive(Clone, Debug, PartialEq)]
pub enum Examples {
    /// Sources and targets.
    Pairs(Vec<[Vec<u32>; 2]>),
    /// One long text.
    Stream(Vec<u32>),
    /// Sentences of documents, and their class.
    Documents(Vec<(Vec<Vec<u32>>, u32)>),
}

impl Examples {
    /// How many there are: pairs, tokens, documents.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Pairs(all) => all.len(),
            Self::Stream(all) => all.len(),
            Self::Documents(all) => all.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of each example on both sides.
    fn lengths(&self) -> Vec<[usize; 2]> {
        match self {
            Self::Pairs(all) => all.iter().map(|[a, b]| [a.len(), b.len() + 1]).collect(),
            Self::Stream(_) => vec![],
            Self::Documents(all) => {
                let words = |(sentences, _): &(Vec<Vec<u32>>, u32)| {
                    let longest = sentences.iter().map(Vec::len).max().unwrap_or(0);
                    [0, sentences.len() * longest]
                };
                all.iter().map(words).collect()
            }
        }
    }
}

/// Everything that is learned from, ready to be learned.
#[derive(Debug)]
pub struct Corpus {
    /// How texts are divided; of the source, where there are two vocabularies.
    pub tokens: Tokens,
    /// Of the target, where it has a table of its own.
    pub target: Option<Tokens>,
    /// The names of classes.
    pub labels: Vec<String>,
    /// To learn from.
    pub train: Examples,
    /// To judge the run by.
    pub validation: Examples,
    /// The texts of the latter, where they are translated.
    pub texts: Vec<Pair>,
    /// Pairs to learn from that are longer than the settings allow.
    pub left_out: usize,
    /// Tokens of each source to learn from without the punctuation that ends it.
    bare: Vec<usize>,
    batches: Batches,
    context: usize,
    rows: usize,
    seed: u64,
}

/// Vocabularies as they stand in a run directory.
#[derive(Clone, Debug, PartialEq)]
pub struct Vocabularies {
    /// Of the source, or of everything.
    pub tokens: Vec<u8>,
    /// Of the target.
    pub target: Option<Vec<u8>>,
}

/// The file of a part, in the folder of the data.
fn place(settings: &Settings, name: &str) -> PathBuf {
    Path::new(&settings.data.folder).join(name)
}

/// The special token of a target language: `<2en>`.
#[must_use]
pub(crate) fn tag(language: &str) -> String {
    format!("<2{language}>")
}

/// The language token that ends every source of a decoder: that of the target language.
fn language_token(settings: &Settings) -> Option<String> {
    let asks = settings.task == Task::Translate && settings.model.kind == ModelKind::Gpt;
    settings.data.parts.first().filter(|_| asks).map(|part| tag(&part.target))
}

/// The texts of one split of all parts.
#[derive(Debug, Default)]
struct Raw {
    pairs: Vec<Pair>,
    text: String,
    documents: Vec<crate::data::Document>,
}

impl Raw {
    fn read(settings: &Settings, file: impl Fn(&Part) -> &str, most: usize) -> Result<Self, Error> {
        let mut raw = Self::default();
        for (i, part) in settings.data.parts.iter().enumerate() {
            let name = file(part);
            if name.is_empty() {
                continue;
            }
            let path = place(settings, name);
            let columns = || {
                <[_; 2]>::try_from(part.columns.clone()).map_err(|found| {
                    let why = format!("{} of them; there must be 2", found.len());
                    Error::setting(format!("data.parts.{i}.columns"), why)
                })
            };
            match settings.task {
                Task::Translate => {
                    let most = if most == 0 { usize::MAX } else { most };
                    raw.pairs.extend(first_pairs(&path, &columns()?, most)?);
                }
                Task::Generate => {
                    if !raw.text.is_empty() && !raw.text.ends_with('\n') {
                        raw.text.push('\n');
                    }
                    raw.text.push_str(&text(&path)?);
                }
                Task::Classify => raw.documents.extend(documents(&path, &columns()?)?),
            }
        }
        Ok(raw)
    }
}

impl Corpus {
    /// Reads all files, and makes vocabularies unless a run has them already.
    pub fn read(
        settings: &Settings,
        vocabularies: Option<Vocabularies>,
    ) -> Result<(Self, Vocabularies), Error> {
        let mut train = Raw::read(settings, |part| &part.train, settings.data.max_examples)?;
        let mut validation =
            Raw::read(settings, |part| &part.validation, settings.data.max_examples)?;
        if settings.task == Task::Generate && validation.text.is_empty() {
            validation.text = last_tenth(&mut train.text);
        }
        let vocabularies = match vocabularies {
            Some(vocabularies) => vocabularies,
            None => train_vocabularies(settings, &train)?,
        };
        let tokens = Tokens::from_json(&vocabularies.tokens)?;
        let target = vocabularies.target.as_deref().map(Tokens::from_json).transpose()?;
        let mut labels: Vec<String> = train.documents.iter().map(|d| d.label.clone()).collect();
        labels.sort_unstable();
        labels.dedup();
        let both = (&tokens, target.as_ref().unwrap_or(&tokens));
        let found = train.pairs.len();
        let (learned, kept) = numbered(settings, train, both, &labels, settings.data.max_length)?;
        let (judged, texts) = numbered(settings, validation, both, &labels, usize::MAX)?;
        if learned.is_empty() {
            return Err(Error::data(
                "there is nothing to learn from; look at data.parts and data.max_length",
            ));
        }
        let (context, budget) = (settings.model.context, settings.training.batch_tokens);
        let bare = match &learned {
            Examples::Pairs(all) if settings.data.strip_punct_prob > 0.0 => {
                bare(all, &kept, &tokens)?
            }
            _ => vec![],
        };
        let corpus = Self {
            bare,
            left_out: found - kept.len(),
            batches: Batches::new(&learned.lengths(), budget, settings.seed)?,
            context,
            rows: (budget / context.max(1)).max(1),
            seed: settings.seed,
            labels,
            train: learned,
            validation: judged,
            texts,
            tokens,
            target,
        };
        Ok((corpus, vocabularies))
    }

    /// Two numbers that other examples would not have, but by chance (FNV-1a): of what is learned from, and of what the run is judged by.
    #[must_use]
    pub fn fingerprints(&self) -> [u64; 2] {
        let texts = self.texts.iter().flat_map(|pair| [&pair.source, &pair.target]);
        [
            fingerprint(&self.train, self.labels.iter()),
            // What a vocabulary does not know is one token; the texts differ still.
            fingerprint(&self.validation, texts),
        ]
    }

    /// The batches of an epoch: a pure function of the seed and the epoch.
    #[must_use]
    pub fn epoch(&self, epoch: u64) -> Vec<Vec<usize>> {
        match &self.train {
            Examples::Stream(all) => windows(all.len(), self.context, self.seed, epoch, self.rows),
            _ => self.batches.epoch(epoch),
        }
    }

    /// How many tokens of each source of a batch are read: all but the punctuation that ends it, by the chance of a seed.
    #[must_use]
    pub fn cuts(&self, batch: &[usize], share: f64, seed: u64) -> Vec<usize> {
        let Examples::Pairs(all) = &self.train else { return vec![] };
        let mut chance = ChaCha8Rng::seed_from_u64(seed);
        let cut = |i: &usize| {
            let drawn = f64::from(chance.next_u32()) / f64::from(u32::MAX);
            let whole = all[*i][0].len();
            if drawn < share { self.bare.get(*i).copied().unwrap_or(whole) } else { whole }
        };
        batch.iter().map(cut).collect()
    }

    /// All of the validation, in batches.
    pub fn validation_batches(&self, budget: usize) -> Result<Vec<Vec<usize>>, Error> {
        match &self.validation {
            Examples::Stream(all) => {
                let last = all.len().saturating_sub(1);
                let starts: Vec<usize> = (0..last).step_by(self.context.max(1)).collect();
                // The last window may be shorter than others, and stands alone.
                let whole = starts.len() - usize::from(!last.is_multiple_of(self.context.max(1)));
                let (whole, rest) = starts.split_at(whole);
                let batches = whole.chunks(self.rows).chain(rest.chunks(1));
                Ok(batches.map(<[usize]>::to_vec).collect())
            }
            some if some.is_empty() => Ok(vec![]),
            some => Ok(Batches::new(&some.lengths(), budget, 0)?.epoch(0)),
        }
    }
}

fn fingerprint<'a>(examples: &Examples, texts: impl Iterator<Item = &'a String>) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut eat = |numbers: &mut dyn Iterator<Item = u32>| {
        for number in numbers.chain([u32::MAX]) {
            hash = (hash ^ u64::from(number)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    match examples {
        Examples::Pairs(all) => {
            all.iter().flatten().for_each(|side| eat(&mut side.iter().copied()));
        }
        Examples::Stream(all) => eat(&mut all.iter().copied()),
        Examples::Documents(all) => all.iter().for_each(|(sentences, class)| {
            sentences.iter().for_each(|words| eat(&mut words.iter().copied()));
            eat(&mut std::iter::once(*class));
        }),
    }
    texts.for_each(|text| eat(&mut text.bytes().map(u32::from)));
    hash
}

/// Cuts off what a text is judged by where no other text is named.
fn last_tenth(text: &mut String) -> String {
    let mut cut = text.len() / 10 * 9;
    while !text.is_char_boundary(cut) {
        cut += 1;
    }
    text.split_off(cut)
}

/// Tokens of each source without the punctuation that ends it, where these are the first of all.
fn bare(all: &[[Vec<u32>; 2]], texts: &[Pair], tokens: &Tokens) -> Result<Vec<usize>, Error> {
    let mut lengths = Vec::with_capacity(all.len());
    for ([source, _], pair) in all.iter().zip(texts) {
        let text = pair.source.trim_end_matches(|c: char| !c.is_alphanumeric());
        let short = tokens.encode(text)?;
        let fits = !short.is_empty() && source.starts_with(&short);
        lengths.push(if fits { short.len() } else { source.len() });
    }
    Ok(lengths)
}

/// An error of a vocabulary, with the table that it is about.
fn of(table: &str, error: Error) -> Error {
    match error {
        Error::Setting { key, why } => Error::Setting { key: format!("{table}.{key}"), why },
        other => other,
    }
}

fn train_vocabularies(settings: &Settings, raw: &Raw) -> Result<Vocabularies, Error> {
    let language_token = language_token(settings);
    let special_tokens: Vec<&str> =
        SPECIAL_TOKENS.into_iter().chain(language_token.as_deref()).collect();
    let sources = || raw.pairs.iter().map(|pair| pair.source.as_str());
    let targets = || raw.pairs.iter().map(|pair| pair.target.as_str());
    let table = &settings.vocabulary;
    let tokens = match settings.task {
        Task::Translate if settings.model.shared_vocabulary => {
            train_vocabulary(table, &special_tokens, sources().chain(targets()))
        }
        Task::Translate => train_vocabulary(table, &special_tokens, sources()),
        Task::Generate => {
            train_vocabulary(table, &special_tokens, std::iter::once(raw.text.as_str()))
        }
        Task::Classify => {
            let sentences = raw.documents.iter().flat_map(|d| &d.sentences).map(String::as_str);
            train_vocabulary(table, &special_tokens, sentences)
        }
    };
    let tokens = tokens.map_err(|e| of("vocabulary", e))?;
    let two = settings.task == Task::Translate && !settings.model.shared_vocabulary;
    let target = two
        .then(|| train_vocabulary(&settings.target_vocabulary, &special_tokens, targets()))
        .transpose()
        .map_err(|e| of("target_vocabulary", e))?;
    Ok(Vocabularies { tokens, target })
}

/// Texts as numbers; examples that are longer than the longest are left out. Pairs come back with the texts of those that are left.
fn numbered(
    settings: &Settings,
    raw: Raw,
    (source, target): (&Tokens, &Tokens),
    labels: &[String],
    longest: usize,
) -> Result<(Examples, Vec<Pair>), Error> {
    match settings.task {
        Task::Translate => {
            let (mut all, mut texts, language_token) =
                (Vec::new(), Vec::new(), language_token(settings));
            for pair in raw.pairs {
                let read =
                    format!("{}{}", pair.source, language_token.as_deref().unwrap_or_default());
                let both = [source.encode(&read)?, target.encode(&pair.target)?];
                // A decoder holds both, and the end.
                let whole = both[0].len() + both[1].len() + 1;
                let fits = language_token.is_none() || whole <= settings.model.context;
                if fits && both.iter().all(|side| (1..=longest).contains(&side.len())) {
                    all.push(both);
                    texts.push(pair);
                }
            }
            Ok((Examples::Pairs(all), texts))
        }
        Task::Generate => Ok((Examples::Stream(source.encode(&raw.text)?), vec![])),
        Task::Classify => {
            let mut all = Vec::with_capacity(raw.documents.len());
            for document in raw.documents {
                let class = labels.binary_search(&document.label).map_err(|_| {
                    let why = format!(
                        "`{}` is a label that no document to learn from has",
                        document.label
                    );
                    Error::data(why)
                })?;
                let mut sentences = Vec::new();
                // As they will be cut where the model is used.
                let cut = document.sentences.iter().flat_map(|line| regard_models::sentences(line));
                for sentence in cut {
                    let mut words = source.encode(sentence)?;
                    words.truncate(settings.data.max_length);
                    sentences.push(words);
                }
                all.push((sentences, u32::try_from(class).unwrap_or(u32::MAX)));
            }
            Ok((Examples::Documents(all), vec![]))
        }
    }
}
