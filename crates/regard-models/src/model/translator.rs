//! Models that write another text than they read.

use super::causal_lm::{CACHE_BYTES, CausalLm};
use super::text::{GenerationOutput, Vocabulary, some, words};
use crate::batches::{Batch, POSITIONS, in_batches};
use crate::error::Error;
use crate::files::TransformerConfig;
use crate::generate::{
    Decoder, DecodingStrategy, GeneratedSequence, GenerationOptions, StoppingCriteria,
    generate_with,
};
use crate::infer::Transformer;
use regard_scope::{Labels, Trace};
use std::ops::ControlFlow;

/// An encoder with a decoder, or a decoder that was trained to translate.
#[derive(Debug)]
pub struct Translator {
    pub(super) kind: Kind,
}

#[derive(Debug)]
pub(super) enum Kind {
    Transformer(Vocabulary, Box<Transformer>),
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
/// Tokens of a translation that is looked at.
const LONGEST: usize = 512;

impl Translator {
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
            _ => self.vocabulary().fitting(text),
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
        let sources =
            || texts.iter().map(|text| vocabulary.fitting(text)).collect::<Result<Vec<_>, _>>();
        let answers = Answers { vocabulary, search, max_tokens, sources: texts.len() };
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
        let source = some(vocabulary.fitting(text)?)?;
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
        Ok(Trace { title: vocabulary.title.clone(), axes, layers })
    }

    /// The token that the model always writes first.
    fn forced_bos(&self) -> Option<u32> {
        match &self.kind {
            Kind::Transformer(_, model) => model.config().forced_bos,
            _ => None,
        }
    }

    /// The tokens of a translation, the best unless one is given, from the first on, without the end.
    fn begun(&self, text: &str, target: Option<&str>) -> Result<Vec<u32>, Error> {
        let vocabulary = self.vocabulary();
        let begin = std::iter::once(vocabulary.begin()?).chain(self.forced_bos());
        if let Some(target) = target {
            let written = vocabulary.fitting_of(vocabulary.written(), target)?;
            // Some vocabularies put special tokens around every text, which are those of a source.
            let around = vocabulary.written().encode("")?;
            let is_own = |id: &u32| !around.contains(id);
            let (first, last) = (written.iter().position(is_own), written.iter().rposition(is_own));
            let own = first.zip(last).map_or(&[][..], |(first, last)| &written[first..=last]);
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
        let forced = config.and_then(|config| config.forced_bos);
        options.processors.suppressed.extend(config.into_iter().flat_map(|one| &one.suppressed));
        let begin: Vec<u32> = std::iter::once(self.vocabulary.begin()?).chain(forced).collect();
        let begins = vec![begin; self.sources];
        let mut silent = |_: usize, _: u32| ControlFlow::Continue(());
        let (all, _) = generate_with(&mut session, &begins, &options, &mut silent)?;
        let written = |one: GeneratedSequence| {
            GenerationOutput::new(self.vocabulary.written().decode(&one.tokens), one)
        };
        Ok(all.into_iter().map(written).collect())
    }
}
