//! A model with its tokens: text in, text out.

use crate::bert::{Bert, Sentences};
use crate::e2k::E2k;
use crate::error::Error;
use crate::files::{Architecture, Config, ModelFiles, Tokens};
use crate::generate::{Decoder, Ended, Generated, Search, Stop, generate};
use crate::gpt::Gpt;
use crate::load::load;
use crate::recorder::Recorder;
use crate::stack::{Pass, ids};
use crate::transformer::Transformer;
use burn::tensor::Device;
use regard_scope::Trace;
use std::ops::ControlFlow;
use std::path::Path;

/// A model that was opened, for text.
#[derive(Debug)]
pub struct Model {
    /// What to call it.
    pub title: String,
    /// What it is.
    pub config: Config,
    tokens: Tokens,
    /// Of what it writes, if that is another text than it reads.
    target: Option<Tokens>,
    kind: Kind,
}

/// What a model does.
#[derive(Debug)]
enum Kind {
    /// Goes on with a text.
    Decoder(Box<Gpt>),
    /// Turns a text into vectors.
    Encoder(Box<Bert>),
    /// Writes another text.
    Translator(Box<Transformer>),
    /// The same with recurrent layers.
    Recurrent(Box<E2k>),
}

/// What a model has written.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    /// The text, without what it was asked with.
    pub text: String,
    /// Its tokens, the end among them.
    pub tokens: Vec<u32>,
    /// The sum of their log-probabilities.
    pub score: f64,
    /// Why it ended.
    pub ended: Ended,
}

/// Bytes that keys and values of the past may take, at most; pages are allocated as they fill.
const PAST: usize = 4 << 30;

impl Model {
    /// Opens a folder or a file, as [`ModelFiles::open`] does, on the Flex backend.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::new(ModelFiles::open(path)?)
    }

    /// Of files that are open.
    pub fn new(files: ModelFiles) -> Result<Self, Error> {
        let ModelFiles { config, mut weights, tokens, target_tokens, title } = files;
        let device = Device::flex();
        let kind = match config.architecture {
            Architecture::Llama | Architecture::Gpt2 => {
                Kind::Decoder(Box::new(load(Gpt::new(&config, &device)?, &mut weights)?))
            }
            Architecture::Bert => {
                Kind::Encoder(Box::new(load(Bert::new(&config, &device)?, &mut weights)?))
            }
            Architecture::Transformer => Kind::Translator(Box::new(load(
                Transformer::new(&config, 0.0, &device)?,
                &mut weights,
            )?)),
            Architecture::Seq2Seq => {
                Kind::Recurrent(Box::new(load(E2k::new(&config, &device)?, &mut weights)?))
            }
        };
        let none = || Error::Tokens {
            what: title.clone(),
            why: "the model has no vocabulary beside it".into(),
        };
        let tokens = tokens.ok_or_else(none)?;
        Ok(Self { title, config, tokens, target: target_tokens, kind })
    }

    /// How its text is divided.
    #[must_use]
    pub fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    fn refuse<T>(&self, what: &str, who: &str) -> Result<T, Error> {
        let is = format!("{:?}", self.config.architecture).to_lowercase();
        Err(Error::unsupported(what, &is, format!("{who} can do that")))
    }

    /// Goes on with each text. `told` hears pieces of text as they are written, and the number of the text that they belong to; it
    /// may end that text.
    pub fn generate(
        &self,
        prompts: &[&str],
        search: &Search,
        max_tokens: usize,
        told: &mut dyn FnMut(usize, &str) -> ControlFlow<()>,
    ) -> Result<Vec<Written>, Error> {
        let Kind::Decoder(model) = &self.kind else {
            return self.refuse("generate", "a decoder (llama, gpt2)");
        };
        let mut prompts =
            prompts.iter().map(|text| self.tokens.encode(text)).collect::<Result<Vec<_>, _>>()?;
        // A text that begins with nothing begins as texts do.
        for prompt in prompts.iter_mut().filter(|prompt| prompt.is_empty()) {
            prompt.extend(self.config.bos);
        }
        let mut writer = model.writer(PAST)?;
        let stop = Stop { max_tokens, end: self.config.eos.clone() };
        let mut streams: Vec<_> = prompts.iter().map(|_| self.tokens.stream()).collect();
        // A text that begins after its prompt keeps the space that it begins with.
        for (stream, prompt) in streams.iter_mut().zip(&prompts) {
            prompt.iter().for_each(|id| drop(stream.push(*id)));
        }
        let all = generate(&mut writer, &prompts, search, &stop, &mut |row, token| match streams
            [row]
            .push(token)
        {
            Some(text) => told(row, &text),
            None => ControlFlow::Continue(()),
        })?;
        for (row, stream) in streams.into_iter().enumerate() {
            if let Some(text) = stream.finish() {
                let _ = told(row, &text);
            }
        }
        let written = |(one, prompt): (Generated, &Vec<u32>)| {
            let whole: Vec<u32> = prompt.iter().chain(&one.tokens).copied().collect();
            let (before, after) = (self.tokens.decode(prompt), self.tokens.decode(&whole));
            let text = after
                .strip_prefix(&before)
                .map_or_else(|| self.tokens.decode(&one.tokens), String::from);
            Written { text, tokens: one.tokens, score: one.score, ended: one.ended }
        };
        Ok(all.into_iter().zip(&prompts).map(written).collect())
    }

    /// Each text in the other language.
    pub fn translate(
        &self,
        texts: &[&str],
        search: &Search,
        max_tokens: usize,
    ) -> Result<Vec<Written>, Error> {
        let sources =
            texts.iter().map(|text| self.tokens.encode(text)).collect::<Result<Vec<_>, _>>()?;
        let all = match &self.kind {
            Kind::Translator(model) => {
                self.answers(model.writer(&sources, PAST)?, sources.len(), search, max_tokens)?
            }
            Kind::Recurrent(model) => {
                self.answers(model.writer(&sources)?, sources.len(), search, max_tokens)?
            }
            _ => {
                return self
                    .refuse("translate", "an encoder with a decoder (transformer, seq2seq)");
            }
        };
        let written = |one: Generated| {
            let text = self.written().decode(&one.tokens);
            Written { text, tokens: one.tokens, score: one.score, ended: one.ended }
        };
        Ok(all.into_iter().map(written).collect())
    }

    /// What a model writes for each of its sources.
    fn answers<D: Decoder<Error = Error>>(
        &self,
        mut writer: D,
        sources: usize,
        search: &Search,
        max_tokens: usize,
    ) -> Result<Vec<Generated>, Error> {
        let stop = Stop { max_tokens, end: self.config.eos.clone() };
        let begins = vec![vec![self.begin()?]; sources];
        generate(&mut writer, &begins, search, &stop, &mut |_, _| ControlFlow::Continue(()))
    }

    fn begin(&self) -> Result<u32, Error> {
        let none = || {
            Error::unsupported(
                "bos",
                &"none",
                "what a text begins with must be told in the configuration",
            )
        };
        self.config.bos.ok_or_else(none)
    }

    /// The tokens of a text that the model can hold.
    fn fitting(&self, text: &str) -> Result<Vec<u32>, Error> {
        let tokens = self.tokens.encode(text)?;
        match self.config.context {
            Some(context) if tokens.len() > context => {
                let why = format!(
                    "it has {} tokens, the model holds {context}; shorten it",
                    tokens.len()
                );
                Err(Error::Tokens { what: "the text".into(), why })
            }
            _ => Ok(tokens),
        }
    }

    /// How what it writes is divided.
    fn written(&self) -> &Tokens {
        self.target.as_ref().unwrap_or(&self.tokens)
    }

    /// The tokens of the best translation, from the first on, without the end.
    fn best(&self, text: &str) -> Result<Vec<u32>, Error> {
        let best = self.translate(&[text], &Search::Greedy, LONGEST)?;
        let begin = std::iter::once(self.begin()?);
        let written = best.into_iter().flat_map(|one| one.tokens);
        Ok(begin.chain(written.filter(|id| !self.config.eos.contains(id))).collect())
    }

    /// A vector of length 1 for each text: the mean over its positions. Texts of like length share a batch.
    pub fn embed(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, Error> {
        let Kind::Encoder(model) = &self.kind else {
            return self.refuse("embed", "an encoder (bert)");
        };
        let rows = texts.iter().map(|text| self.fitting(text)).collect::<Result<Vec<_>, _>>()?;
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|i| rows[*i].len());
        let mut all = vec![Vec::new(); rows.len()];
        for some in order.chunks(BATCH) {
            let batch: Vec<Vec<u32>> = some.iter().map(|i| rows[*i].clone()).collect();
            for (i, vector) in some.iter().zip(model.embed(&batch)?) {
                all[*i] = vector;
            }
        }
        Ok(all)
    }

    /// What every head looks at in a text; of a model that translates, in a text and its best translation.
    pub fn look(&self, text: &str) -> Result<Trace, Error> {
        let source = self.fitting(text)?;
        let words = |tokens: &Tokens, ids: &[u32]| -> Vec<String> {
            ids.iter().map(|id| tokens.token(*id).unwrap_or_else(|| id.to_string())).collect()
        };
        let mut pass = Pass { seed: None, recorder: Recorder::on() };
        let device = Device::flex();
        let labels = words(&self.tokens, &source);
        let axes = match &self.kind {
            Kind::Decoder(model) => {
                model.read(ids(&[source], &device), &mut pass)?;
                vec![("target", labels)]
            }
            Kind::Encoder(model) => {
                model.forward(&Sentences { tokens: &[source], kinds: None }, &mut pass)?;
                vec![("source", labels)]
            }
            Kind::Translator(model) => {
                let target = self.best(text)?;
                let target_words = words(self.written(), &target);
                let memory = model.encode(ids(&[source], &device), None, &mut pass)?;
                model.decode(&memory, None, ids(&[target], &device), &mut pass)?;
                vec![("source", labels), ("target", target_words)]
            }
            Kind::Recurrent(model) => {
                let target = self.best(text)?;
                let target_words = words(self.written(), &target);
                let memory = model.encode(ids(&[source], &device), None)?;
                model.decode(&memory, ids(&[target], &device), &mut pass)?;
                vec![("source", labels), ("target", target_words)]
            }
        };
        Ok(pass.recorder.trace(&self.title, &axes))
    }
}

/// Texts that are read together.
const BATCH: usize = 32;
/// Tokens of a translation that is looked at.
const LONGEST: usize = 512;
