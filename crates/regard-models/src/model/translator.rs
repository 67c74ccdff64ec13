//! Models that write another text than they read.

use super::causal_lm::{CACHE_BYTES, CausalLm};
use super::text::{GenerationOutput, Vocabulary, some, words};
use crate::batches::{Batch, POSITIONS, in_batches};
use crate::error::Error;
use crate::files::{Tokens, TransformerConfig};
use crate::generate::{
    Decoder, DecodingStrategy, GeneratedSequence, GenerationOptions, StoppingCriteria,
    generate_with,
};
use crate::infer::Transformer;
use regard_scope::{Labels, Trace};
use std::ops::{ControlFlow, Range};

/// An encoder with a decoder, or a decoder that was trained to translate.
#[derive(Debug)]
pub struct Translator {
    pub(super) kind: Kind,
    /// Tokens of the languages of a text and of its translation, of a model of many.
    languages: [Option<u32>; 2],
}

#[derive(Debug)]
pub(super) enum Kind {
    Transformer(Box<Vocabulary>, Box<Transformer>),
    /// A decoder with a prompt.
    Prompted(Box<CausalLm>, String),
    #[cfg(feature = "burn")]
    Seq2Seq(Vocabulary, Box<crate::Seq2Seq>),
    #[cfg(feature = "burn")]
    E2k(Vocabulary, Box<crate::E2k>),
}

/// Texts that are translated together.
const TRANSLATED: Batch = Batch { rows: 64, positions: POSITIONS };
/// Beams of texts that are translated together.
const BEAMS: usize = 512;
/// What can translate between languages that are named.
const MANY: &str =
    "M2M-100 and NLLB translate between languages that are named, others between two";
/// Tokens of a translation that is looked at.
const LONGEST: usize = 512;

impl Translator {
    pub(super) fn new(kind: Kind) -> Self {
        Self { kind, languages: [None; 2] }
    }

    /// Sets the languages of texts and of translations, as `eng_Latn` (NLLB) or `en` (M2M-100). Without them, texts are in the
    /// language that the files of the model name, usually English.
    ///
    /// # Errors
    ///
    /// If the model is not one of many languages, or has no such language.
    pub fn set_languages(
        &mut self,
        source: Option<&str>,
        target: Option<&str>,
    ) -> Result<(), Error> {
        let Kind::Transformer(vocabulary, model) = &self.kind else {
            return Err(Error::unsupported("language", &"this model", MANY));
        };
        let family = &model.config().family;
        if family != "m2m_100" {
            return Err(Error::unsupported("language", family, MANY));
        }
        let token = |code: &str| {
            // Other words of the vocabulary are no languages.
            let is_nllb = code.len() == 8 && code.as_bytes()[3] == b'_';
            let name = if is_nllb { code.to_owned() } else { format!("__{code}__") };
            let known =
                "a language of the model, as en or zh (M2M-100), eng_Latn or zho_Hans (NLLB)";
            vocabulary.tokens.id(&name).ok_or_else(|| Error::unsupported("language", &code, known))
        };
        self.languages = [source.map(token).transpose()?, target.map(token).transpose()?];
        Ok(())
    }

    /// The tokens of a text that the model can read, in its language.
    fn source(&self, text: &str) -> Result<Vec<u32>, Error> {
        let vocabulary = self.vocabulary();
        let tokens = vocabulary.fitting(text)?;
        let Some(language) = self.languages[0] else { return Ok(tokens) };
        let own = vocabulary.tokens.without_ends(&tokens)?;
        let end = vocabulary.eos.first();
        Ok(std::iter::once(&language).chain(own).chain(end).copied().collect())
    }

    pub(super) fn vocabulary(&self) -> &Vocabulary {
        match &self.kind {
            Kind::Transformer(vocabulary, _) => vocabulary,
            Kind::Prompted(model, _) => &model.vocabulary,
            #[cfg(feature = "burn")]
            Kind::Seq2Seq(vocabulary, _) | Kind::E2k(vocabulary, _) => vocabulary,
        }
    }

    /// The tokens of a text that the model can read.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>, Error> {
        match &self.kind {
            Kind::Prompted(model, template) => model.prompt(&template.replace("{source}", text)),
            _ => self.source(text),
        }
    }

    /// Each text in the other language. Texts of like length are translated together.
    pub fn translate(
        &self,
        texts: &[&str],
        search: &DecodingStrategy,
        max_tokens: usize,
    ) -> Result<Vec<GenerationOutput>, Error> {
        search.check()?;
        let lengths: Vec<usize> = texts.iter().map(|text| text.len()).collect();
        // A draw belongs to the place of its text in the call, so there all are one batch.
        let batch = match search {
            DecodingStrategy::Sample(_) => Batch { rows: usize::MAX, positions: usize::MAX },
            // Each beam is a row of what is computed.
            DecodingStrategy::Beam { width, .. } => {
                Batch { rows: (BEAMS / width).clamp(1, TRANSLATED.rows), ..TRANSLATED }
            }
            DecodingStrategy::Greedy => TRANSLATED,
        };
        in_batches(&lengths, batch, |some| {
            let texts: Vec<&str> = some.iter().map(|i| texts[*i]).collect();
            self.translate_together(&texts, search, max_tokens)
        })
    }

    fn translate_together(
        &self,
        texts: &[&str],
        search: &DecodingStrategy,
        max_tokens: usize,
    ) -> Result<Vec<GenerationOutput>, Error> {
        let vocabulary = self.vocabulary();
        let sources = || texts.iter().map(|text| self.source(text)).collect::<Result<Vec<_>, _>>();
        let forced = self.forced_bos();
        let answers = Answers { vocabulary, search, max_tokens, forced, sources: texts.len() };
        match &self.kind {
            Kind::Prompted(model, template) => {
                let asked: Vec<String> =
                    texts.iter().map(|text| template.replace("{source}", text)).collect();
                let asked: Vec<&str> = asked.iter().map(String::as_str).collect();
                let mut silent = |_: usize, _: &str| ControlFlow::Continue(());
                model.generate(&asked, search, max_tokens, &mut silent)
            }
            Kind::Transformer(_, model) => {
                answers.of(model.session(&sources()?, CACHE_BYTES)?, Some(model.config()))
            }
            #[cfg(feature = "burn")]
            Kind::Seq2Seq(_, model) => answers.of(model.session(&sources()?)?, None),
            #[cfg(feature = "burn")]
            Kind::E2k(_, model) => answers.of(model.session(&sources()?)?, None),
        }
    }

    /// The Transformer that it is.
    pub(super) fn transformer(&mut self) -> Option<&mut Transformer> {
        match &mut self.kind {
            Kind::Transformer(_, model) => Some(model),
            Kind::Prompted(model, _) => Some(&mut model.model),
            #[cfg(feature = "burn")]
            Kind::Seq2Seq(..) | Kind::E2k(..) => None,
        }
    }

    /// What every head looks at in a text and its best translation, or a given one.
    pub fn look(&self, text: &str, target: Option<&str>) -> Result<Trace, Error> {
        let vocabulary = self.vocabulary();
        if let Kind::Prompted(model, template) = &self.kind {
            let written = match target {
                Some(target) => target.to_owned(),
                None => {
                    let best = self.translate(&[text], &DecodingStrategy::Greedy, LONGEST)?;
                    best.first().map_or("", |one| one.text.trim()).to_owned()
                }
            };
            return model.look(&format!("{}{written}", template.replace("{source}", text)));
        }
        let source = some(self.source(text)?)?;
        let target = self.begun(text, target)?;
        let labels = [
            ("source", words(&vocabulary.tokens, &source)),
            ("target", words(vocabulary.written(), &target)),
        ];
        let layers = match &self.kind {
            Kind::Prompted(..) => Vec::new(),
            Kind::Transformer(_, model) => model.look(Some(&source), &target)?,
            #[cfg(feature = "burn")]
            Kind::Seq2Seq(_, model) => super::recurrent::look_seq2seq(model, source, target)?,
            #[cfg(feature = "burn")]
            Kind::E2k(_, model) => super::recurrent::look_e2k(model, source, target)?,
        };
        let axes = labels.map(|(name, list)| (name.to_owned(), Labels::new(name, list))).into();
        Ok(Trace { title: vocabulary.title.clone(), axes, layers, ..Trace::default() })
    }

    /// The bytes of a text and of a given translation that each token on the axes `source` and `target` of [`look`](Self::look) covers;
    /// special tokens cover none.
    pub fn offsets(&self, text: &str, target: &str) -> Result<[Vec<Range<usize>>; 2], Error> {
        let vocabulary = self.vocabulary();
        // Without the ends that belong to every text.
        let own = |tokens: &Tokens, text: &str| {
            let (ids, mut offsets) = (tokens.encode(text)?, tokens.offsets(text)?);
            let own = tokens.own(&ids)?;
            Ok::<_, Error>(offsets.drain(own).collect::<Vec<_>>())
        };
        let source = match self.languages[0] {
            None => vocabulary.tokens.offsets(text)?,
            Some(_) => {
                let end = vocabulary.eos.first().map(|_| 0..0);
                let own = own(&vocabulary.tokens, text)?;
                std::iter::once(0..0).chain(own).chain(end).collect()
            }
        };
        let begin = std::iter::once(0..0).chain(self.forced_bos().map(|_| 0..0));
        Ok([source, begin.chain(own(vocabulary.written(), target)?).collect()])
    }

    /// The token that the model always writes first.
    fn forced_bos(&self) -> Option<u32> {
        match &self.kind {
            Kind::Transformer(_, model) => self.languages[1].or(model.config().forced_bos),
            _ => None,
        }
    }

    /// The tokens of a translation, the best unless one is given, from the first on, without the end.
    fn begun(&self, text: &str, target: Option<&str>) -> Result<Vec<u32>, Error> {
        let vocabulary = self.vocabulary();
        let begin = std::iter::once(vocabulary.begin()?).chain(self.forced_bos());
        if let Some(target) = target {
            let written = vocabulary.fitting_of(vocabulary.written(), target)?;
            let own = vocabulary.written().without_ends(&written)?;
            return Ok(begin.chain(own.iter().copied()).collect());
        }
        let best = self.translate(&[text], &DecodingStrategy::Greedy, LONGEST)?;
        let written = best.into_iter().flat_map(|one| one.tokens);
        Ok(begin.chain(written.filter(|id| !vocabulary.eos.contains(id))).collect())
    }
}

/// What is asked of a model that has read its sources.
struct Answers<'a> {
    vocabulary: &'a Vocabulary,
    search: &'a DecodingStrategy,
    max_tokens: usize,
    /// What is always written first.
    forced: Option<u32>,
    sources: usize,
}

impl Answers<'_> {
    fn of<D: Decoder<Error = Error>>(
        &self,
        mut session: D,
        config: Option<&TransformerConfig>,
    ) -> Result<Vec<GenerationOutput>, Error> {
        let stop =
            StoppingCriteria { max_tokens: self.max_tokens, end: self.vocabulary.eos.clone() };
        let mut options = GenerationOptions::new(self.search.clone(), stop);
        options.processors.suppressed.extend(config.into_iter().flat_map(|one| &one.suppressed));
        let begin = std::iter::once(self.vocabulary.begin()?).chain(self.forced);
        let begin: Vec<u32> = begin.collect();
        let begins = vec![begin; self.sources];
        let mut silent = |_: usize, _: u32| ControlFlow::Continue(());
        let (all, _) = generate_with(&mut session, &begins, &options, &mut silent)?;
        let written = |one: GeneratedSequence| {
            GenerationOutput::new(self.vocabulary.written().decode(&one.tokens), one)
        };
        Ok(all.into_iter().map(written).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::Weights;
    use std::path::Path;

    /// A translator of M2M-100 with a small vocabulary and constant weights.
    fn of_many() -> Translator {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/marian");
        let folder = std::env::temp_dir().join(format!("regard-m2m-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (own, name) in [("target.spm", "sentencepiece.bpe.model"), ("vocab.json", "vocab.json")]
        {
            std::fs::copy(from.join(own), folder.join(name)).unwrap();
        }
        let tokens = Tokens::m2m100(&folder, "en").unwrap();
        std::fs::remove_dir_all(folder).unwrap();
        let end = tokens.id("</s>").unwrap();
        let json = serde_json::json!({
            "architectures": ["M2M100ForConditionalGeneration"], "model_type": "m2m_100", "d_model": 8,
            "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
            "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_position_embeddings": 64, "scale_embedding": true,
            "activation_function": "relu", "vocab_size": tokens.len(), "bos_token_id": 0, "pad_token_id": 1,
            "eos_token_id": end, "decoder_start_token_id": end,
        });
        let (config, _) = TransformerConfig::from_json(&json.to_string()).unwrap();
        let constant = |(name, shape): (String, Vec<usize>)| {
            let count = shape.iter().product();
            (name, shape, vec![0.1; count])
        };
        let weights = Weights::new(config.tensors().into_iter().map(constant)).unwrap();
        let vocabulary = Vocabulary::new("many".into(), Some(tokens), None, &config).unwrap();
        let model = Transformer::new(config, weights).unwrap();
        Translator::new(Kind::Transformer(Box::new(vocabulary), Box::new(model)))
    }

    #[test]
    fn languages_are_around_texts_and_before_translations() {
        let mut model = of_many();
        let tokens = &model.vocabulary().tokens;
        let [en, de, zh] = ["__en__", "__de__", "__zh__"].map(|name| tokens.id(name).unwrap());
        let english = model.prompt("the old cat").unwrap();
        assert_eq!((english[0], model.forced_bos()), (en, None));
        model.set_languages(Some("de"), Some("zh")).unwrap();
        let german = model.prompt("the old cat").unwrap();
        assert_eq!(german, [&[de], &english[1..]].concat());
        assert_eq!(model.forced_bos(), Some(zh));
        assert_eq!(model.begun("the old cat", Some("")).unwrap()[1..], [zh]);
        // Languages and ends cover no text, the beginning and the language of the target do not either.
        let [source, target] = model.offsets("the cat", "the cat").unwrap();
        assert_eq!(source.len(), model.prompt("the cat").unwrap().len());
        assert_eq!((&source[0], source.last()), (&(0..0), Some(&(0..0))));
        assert_eq!(target[..2], [0..0, 0..0]);
        assert_eq!(source[1..source.len() - 1], target[2..]);
        assert_eq!(target.last().map(|bytes| bytes.end), Some("the cat".len()));
        let trace = model.look("the cat", Some("the cat")).unwrap();
        for (axis, offsets) in [("source", &source), ("target", &target)] {
            assert_eq!(trace.labels(axis).len(), offsets.len());
        }
        // A word of the vocabulary, and a language of another model.
        for code in ["the", "zho_Hans", ""] {
            let error = model.set_languages(None, Some(code)).unwrap_err().to_string();
            assert!(error.contains("eng_Latn"), "{error}");
        }
    }
}
