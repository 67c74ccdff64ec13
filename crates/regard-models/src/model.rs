//! A model with its tokens: text in, text out.

use crate::bert::{Bert, Sentences};
use crate::e2k::E2k;
use crate::error::Error;
use crate::files::{Architecture, Config, Message, ModelFiles, Tokens, fits};
use crate::generate::{
    Decoder, DecodingStrategy, FinishReason, GeneratedSequence, StoppingCriteria, generate,
};
use crate::gpt::Gpt;
use crate::han::{Han, HanWeights};
use crate::load::load;
use crate::nn::DropoutRates;
use crate::pass::Pass;
use crate::recorder::Recorder;
use crate::seq2seq::Seq2Seq;
use crate::stack::{Batch, POSITIONS, ids, in_batches};
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
    Seq2Seq(Box<Seq2Seq>),
    /// The same with several heads.
    E2k(Box<E2k>),
    /// Tells texts apart.
    Classifier(Box<Han>),
}

/// What a model has written.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationOutput {
    /// The text, without what it was asked with.
    pub text: String,
    /// Its tokens, the end among them.
    pub tokens: Vec<u32>,
    /// The sum of their log-probabilities.
    pub score: f64,
    /// Why it ended.
    pub finish_reason: FinishReason,
}

/// What a model says a text is.
#[derive(Clone, Debug, PartialEq)]
pub struct Classification {
    /// The likeliest class.
    pub class: usize,
    /// What it is called.
    pub label: String,
    /// Of each class, in their order.
    pub probabilities: Vec<f32>,
    /// The words of each sentence, as the model divides them.
    pub words: Vec<Vec<String>>,
    /// What it looked at.
    pub weights: HanWeights,
}

/// Maximum bytes of the KV cache; pages are allocated as they fill.
const CACHE_BYTES: usize = 4 << 30;

impl Model {
    /// Opens a folder or a file, as [`ModelFiles::open`] does, on the Flex backend.
    pub fn open(path: &Path) -> Result<Self, Error> {
        Self::new(ModelFiles::open(path)?).map_err(|e| e.of(path))
    }

    /// Of files that are open.
    pub fn new(files: ModelFiles) -> Result<Self, Error> {
        let ModelFiles { config, mut weights, tokens, target_tokens, title } = files;
        fits(&config, &weights)?;
        let (device, none) = (Device::flex(), DropoutRates::default());
        let kind = match config.architecture {
            Architecture::Llama | Architecture::Gpt2 => {
                Kind::Decoder(Box::new(load(Gpt::new(&config, none, &device)?, &mut weights)?))
            }
            Architecture::Bert => {
                Kind::Encoder(Box::new(load(Bert::new(&config, &device)?, &mut weights)?))
            }
            Architecture::Transformer => Kind::Translator(Box::new(load(
                Transformer::new(&config, none, &device)?,
                &mut weights,
            )?)),
            Architecture::E2k => {
                Kind::E2k(Box::new(load(E2k::new(&config, &device)?, &mut weights)?))
            }
            Architecture::Seq2Seq => {
                let sizes = config.seq2seq.as_ref().ok_or_else(|| sizes_of("seq2seq"))?;
                let model = Seq2Seq::new(sizes, none, &device)?;
                Kind::Seq2Seq(Box::new(load(model, &mut weights)?))
            }
            Architecture::Han => {
                let sizes = config.han.as_ref().ok_or_else(|| sizes_of("han"))?;
                let model = Han::new(sizes, none, &device)?;
                Kind::Classifier(Box::new(load(model, &mut weights)?))
            }
        };
        let no_tokens = || Error::Tokens {
            what: title.clone(),
            why: "the model has no vocabulary beside it".into(),
        };
        let tokens = tokens.ok_or_else(no_tokens)?;
        Ok(Self { title, config, tokens, target: target_tokens, kind })
    }

    /// How its text is divided.
    #[must_use]
    pub fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    /// The prompt that asks for an answer to a conversation, by the chat template that comes with the model.
    pub fn chat(&self, messages: &[Message]) -> Result<String, Error> {
        let Some(chat) = self.tokens.chat() else {
            let why = "the model has no chat template; give a prompt";
            return Err(Error::Tokens { what: self.title.clone(), why: why.into() });
        };
        let mut chat = chat.clone();
        // What the vocabulary puts before every text would be there twice.
        let begins = self.tokens.encode("")?;
        if begins.first().is_some_and(|first| self.tokens.id(&chat.bos) == Some(*first)) {
            chat.bos.clear();
        }
        chat.render(messages)
    }

    fn refuse<T>(&self, what: &str, who: &str) -> Result<T, Error> {
        let is = format!("{:?}", self.config.architecture).to_lowercase();
        Err(Error::unsupported(what, &is, format!("{who} can do that")))
    }

    /// Goes on with each text. `on_text` hears pieces of text as they are written, and the number of the text that they belong to; it
    /// may end that text.
    pub fn generate(
        &self,
        prompts: &[&str],
        search: &DecodingStrategy,
        max_tokens: usize,
        on_text: &mut dyn FnMut(usize, &str) -> ControlFlow<()>,
    ) -> Result<Vec<GenerationOutput>, Error> {
        let Kind::Decoder(model) = &self.kind else {
            return self.refuse("generate", "a decoder (llama, gpt2)");
        };
        let mut prompts =
            prompts.iter().map(|text| self.fitting(text)).collect::<Result<Vec<_>, _>>()?;
        // A text that begins with nothing begins as texts do.
        for prompt in prompts.iter_mut().filter(|prompt| prompt.is_empty()) {
            prompt.extend(self.config.bos);
        }
        let mut session = model.session(CACHE_BYTES)?;
        let stop = StoppingCriteria { max_tokens, end: self.config.eos.clone() };
        let mut streams: Vec<_> = prompts.iter().map(|_| self.tokens.stream()).collect();
        // A text that begins after its prompt keeps the space that it begins with.
        for (stream, prompt) in streams.iter_mut().zip(&prompts) {
            prompt.iter().for_each(|id| drop(stream.push(*id)));
        }
        let all = generate(&mut session, &prompts, search, &stop, &mut |row, token| match streams
            [row]
            .push(token)
        {
            Some(text) => on_text(row, &text),
            None => ControlFlow::Continue(()),
        })?;
        for (row, stream) in streams.into_iter().enumerate() {
            if let Some(text) = stream.finish() {
                let _ = on_text(row, &text);
            }
        }
        let written = |(one, prompt): (GeneratedSequence, &Vec<u32>)| {
            let whole: Vec<u32> = prompt.iter().chain(&one.tokens).copied().collect();
            let (before, after) = (self.tokens.decode(prompt), self.tokens.decode(&whole));
            let text = after
                .strip_prefix(&before)
                .map_or_else(|| self.tokens.decode(&one.tokens), String::from);
            GenerationOutput {
                text,
                tokens: one.tokens,
                score: one.score,
                finish_reason: one.finish_reason,
            }
        };
        Ok(all.into_iter().zip(&prompts).map(written).collect())
    }

    /// Each text in the other language. Texts of like length are translated together.
    ///
    /// A decoder can do it if its configuration says how it is asked: see [`Config::translate`].
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
            DecodingStrategy::Sample { .. } => Batch { rows: usize::MAX, positions: usize::MAX },
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
        if let (Kind::Decoder(_), Some(template)) = (&self.kind, &self.config.translate) {
            let asked: Vec<String> =
                texts.iter().map(|text| template.replace("{source}", text)).collect();
            let asked: Vec<&str> = asked.iter().map(String::as_str).collect();
            return self.generate(
                &asked,
                search,
                max_tokens,
                &mut |_, _| ControlFlow::Continue(()),
            );
        }
        let sources = texts.iter().map(|text| self.fitting(text)).collect::<Result<Vec<_>, _>>()?;
        let all = match &self.kind {
            Kind::Translator(model) => self.answers(
                model.session(&sources, CACHE_BYTES)?,
                sources.len(),
                search,
                max_tokens,
            )?,
            Kind::Seq2Seq(model) => {
                self.answers(model.session(&sources)?, sources.len(), search, max_tokens)?
            }
            Kind::E2k(model) => {
                self.answers(model.session(&sources)?, sources.len(), search, max_tokens)?
            }
            _ => {
                let who = "an encoder with a decoder (transformer, seq2seq, e2k), or a decoder with a template";
                return self.refuse("translate", who);
            }
        };
        let written = |one: GeneratedSequence| {
            let text = self.written().decode(&one.tokens);
            GenerationOutput {
                text,
                tokens: one.tokens,
                score: one.score,
                finish_reason: one.finish_reason,
            }
        };
        Ok(all.into_iter().map(written).collect())
    }

    /// What each text is, of the classes that the model was taught. Its sentences are those of [`sentences`].
    pub fn classify(&self, texts: &[&str]) -> Result<Vec<Classification>, Error> {
        let Kind::Classifier(model) = &self.kind else {
            return self.refuse("classify", "hierarchical attention (han)");
        };
        let read = |text: &&str| -> Result<Vec<Vec<u32>>, Error> {
            short(text)?;
            sentences(text).map(|sentence| self.fitting(sentence)).collect()
        };
        let documents = texts.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let looked = model.look(&documents)?.into_iter().zip(&documents);
        looked
            .map(|((scores, weights), document)| {
                finite("classify", &scores)?;
                Ok(self.classified(&scores, document, weights))
            })
            .collect()
    }

    fn classified(
        &self,
        scores: &[f32],
        document: &[Vec<u32>],
        weights: HanWeights,
    ) -> Classification {
        let shares = shares(scores);
        let best = (0..shares.len()).reduce(|a, b| if shares[b] > shares[a] { b } else { a });
        let class = best.unwrap_or(0);
        let label = self.config.labels.get(class).cloned().unwrap_or_else(|| class.to_string());
        let words = document.iter().map(|ids| words(&self.tokens, ids)).collect();
        Classification { class, label, probabilities: shares, words, weights }
    }

    /// What a model writes for each of its sources.
    fn answers<D: Decoder<Error = Error>>(
        &self,
        mut session: D,
        sources: usize,
        search: &DecodingStrategy,
        max_tokens: usize,
    ) -> Result<Vec<GeneratedSequence>, Error> {
        let stop = StoppingCriteria { max_tokens, end: self.config.eos.clone() };
        let begins = vec![vec![self.begin()?]; sources];
        generate(&mut session, &begins, search, &stop, &mut |_, _| ControlFlow::Continue(()))
    }

    fn begin(&self) -> Result<u32, Error> {
        let none = || {
            Error::unsupported(
                "bos",
                &"none",
                "what a text begins with must be on_text in the configuration",
            )
        };
        self.config.bos.ok_or_else(none)
    }

    /// The tokens of a text that the model can hold.
    fn fitting(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.fitting_of(&self.tokens, text)
    }

    /// The same of the tokens that it reads, or of those that it writes.
    fn fitting_of(&self, tokens: &Tokens, text: &str) -> Result<Vec<u32>, Error> {
        short(text)?;
        let tokens = tokens.encode(text)?;
        let most = self.config.context.unwrap_or(MAX_TOKENS);
        if tokens.len() > most {
            let why = format!("it has {} tokens, the model holds {most}; shorten it", tokens.len());
            return Err(Error::Tokens { what: "the text".into(), why });
        }
        Ok(tokens)
    }

    /// How what it writes is divided.
    fn written(&self) -> &Tokens {
        self.target.as_ref().unwrap_or(&self.tokens)
    }

    /// The tokens of a translation, the best unless one is given, from the first on, without the end.
    fn begun(&self, text: &str, target: Option<&str>) -> Result<Vec<u32>, Error> {
        let begin = std::iter::once(self.begin()?);
        if let Some(target) = target {
            return Ok(begin.chain(self.fitting_of(self.written(), target)?).collect());
        }
        let best = self.translate(&[text], &DecodingStrategy::Greedy, LONGEST)?;
        let written = best.into_iter().flat_map(|one| one.tokens);
        Ok(begin.chain(written.filter(|id| !self.config.eos.contains(id))).collect())
    }

    /// A vector of length 1 for each text: the mean over its positions. Texts of like length share a batch.
    pub fn embed(&self, texts: &[&str]) -> Result<Vec<Vec<f32>>, Error> {
        let Kind::Encoder(model) = &self.kind else {
            return self.refuse("embed", "an encoder (bert)");
        };
        let rows = texts.iter().map(|text| some(self.fitting(text)?));
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        let lengths: Vec<usize> = rows.iter().map(Vec::len).collect();
        in_batches(&lengths, BATCH, |some| {
            let batch: Vec<Vec<u32>> = some.iter().map(|i| rows[*i].clone()).collect();
            let vectors = model.embed(&batch)?;
            vectors.iter().try_for_each(|vector| finite("embed", vector))?;
            Ok(vectors)
        })
    }

    /// What every head looks at in a text; of a model that translates, in a text and its best translation.
    pub fn look(&self, text: &str) -> Result<Trace, Error> {
        if let (Kind::Decoder(_), Some(_)) = (&self.kind, &self.config.translate) {
            let best = self.translate(&[text], &DecodingStrategy::Greedy, LONGEST)?;
            return self.look_at(text, best.first().map_or("", |one| one.text.trim()));
        }
        self.looked(text, None)
    }

    /// The same where the translation is given: what a model looks at as it is on_text each word of it.
    pub fn look_at(&self, text: &str, target: &str) -> Result<Trace, Error> {
        match (&self.kind, &self.config.translate) {
            (Kind::Decoder(_), Some(template)) => {
                self.looked(&format!("{}{target}", template.replace("{source}", text)), None)
            }
            (Kind::Translator(_) | Kind::Seq2Seq(_) | Kind::E2k(_), _) => {
                self.looked(text, Some(target))
            }
            _ => self.refuse("target", "a model that translates"),
        }
    }

    fn looked(&self, text: &str, target: Option<&str>) -> Result<Trace, Error> {
        let source = some(self.fitting(text)?)?;
        let mut pass = Pass { recorder: Recorder::on(), ..Pass::default() };
        let device = Device::flex();
        let labels = words(&self.tokens, &source);
        let axes = match &self.kind {
            Kind::Decoder(model) => {
                model.read(ids(&[source], &device), &mut pass)?;
                vec![("target", labels)]
            }
            Kind::Encoder(model) => {
                model.forward(&Sentences { tokens: &[source], token_types: None }, &mut pass)?;
                vec![("source", labels)]
            }
            Kind::Translator(model) => {
                let target = self.begun(text, target)?;
                let target_words = words(self.written(), &target);
                let memory = model.encode(ids(&[source], &device), None, &mut pass)?;
                model.decode(&memory, None, ids(&[target], &device), &mut pass)?;
                vec![("source", labels), ("target", target_words)]
            }
            Kind::Seq2Seq(model) => {
                let target = self.begun(text, target)?;
                let target_words = words(self.written(), &target);
                let mut plain = Pass::default();
                let memory = model.encode(ids(&[source], &device), None, &mut plain)?;
                pass.recorder.at(0, "decoder", "target");
                let weights = model.weights(&memory, ids(&[target], &device))?;
                pass.recorder.within("cross", |recorder| recorder.keep(weights));
                vec![("source", labels), ("target", target_words)]
            }
            Kind::Classifier(_) => {
                return self.refuse("look", "any other; what this one looks at, classify tells");
            }
            Kind::E2k(model) => {
                let target = self.begun(text, target)?;
                let target_words = words(self.written(), &target);
                let memory = model.encode(ids(&[source], &device), None)?;
                model.decode(&memory, ids(&[target], &device), &mut pass)?;
                vec![("source", labels), ("target", target_words)]
            }
        };
        Ok(pass.recorder.trace(&self.title, &axes))
    }
}

/// Refuses a text that is longer than any that is read, before time is spent on its tokens.
fn short(text: &str) -> Result<(), Error> {
    if text.len() <= MAX_TEXT {
        return Ok(());
    }
    let why = format!("it has {} bytes, {MAX_TEXT} are read at most; shorten it", text.len());
    Err(Error::Tokens { what: "the text".into(), why })
}

/// Refuses a text of no tokens where there is nothing to do with it.
fn some(tokens: Vec<u32>) -> Result<Vec<u32>, Error> {
    match tokens.is_empty() {
        true => {
            let why = "it has no tokens in the vocabulary of this model; give at least one";
            Err(Error::Tokens { what: "the text".into(), why: why.into() })
        }
        false => Ok(tokens),
    }
}

/// Refuses results that are none: weights that are finite may still be too large to compute with.
fn finite(what: &str, numbers: &[f32]) -> Result<(), Error> {
    match numbers.iter().find(|x| !x.is_finite()) {
        None => Ok(()),
        Some(x) => {
            let why = format!("{x} came out; the weights of the model are too large for f32");
            Err(Error::format(what, why))
        }
    }
}

/// Scores as probabilities.
fn shares(scores: &[f32]) -> Vec<f32> {
    let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f32> = scores.iter().map(|score| (score - most).exp()).collect();
    let sum: f32 = powers.iter().sum();
    powers.into_iter().map(|power| power / sum).collect()
}

/// Tokens as they are written.
fn words(tokens: &Tokens, ids: &[u32]) -> Vec<String> {
    ids.iter().map(|id| tokens.token(*id).unwrap_or_else(|| id.to_string())).collect()
}

fn sizes_of(field: &str) -> Error {
    Error::format(field, "missing in the configuration; such a model has its sizes there")
}

/// The sentences of a text, as a [`Han`] is given them: a line each, and lines are cut behind full stops and what is like them.
/// What has no letters in it still counts; what is only space does not.
pub fn sentences(text: &str) -> impl Iterator<Item = &str> {
    text.lines().flat_map(cut_behind_stops).map(str::trim).filter(|sentence| !sentence.is_empty())
}

fn cut_behind_stops(line: &str) -> Vec<&str> {
    let (mut parts, mut from) = (Vec::new(), 0);
    let mut after = line.char_indices().skip(1).map(|(_, c)| c).chain([' ']);
    for (at, c) in line.char_indices() {
        let next = after.next().unwrap_or(' ');
        // In scripts without spaces a stop is an end wherever it stands.
        let ends = match c {
            '.' | '!' | '?' | '…' => next.is_whitespace(),
            '。' | '！' | '？' => !matches!(next, '。' | '！' | '？' | '”' | '」' | '’'),
            _ => false,
        };
        if ends {
            parts.push(&line[from..at + c.len_utf8()]);
            from = at + c.len_utf8();
        }
    }
    parts.push(&line[from..]);
    parts
}

/// Bytes of a text.
const MAX_TEXT: usize = 1 << 20;
/// Tokens of a text, or of a sentence that is classified, where a model has no context of its own to be held to.
const MAX_TOKENS: usize = 1 << 14;
/// Texts that are read together.
const BATCH: Batch = Batch { rows: 32, positions: POSITIONS };
/// Texts that are translated together.
const TRANSLATED: Batch = Batch { rows: 64, positions: POSITIONS };
/// Beams of texts that are translated together.
const BEAMS: usize = 512;
/// Tokens of a translation that is looked at.
const LONGEST: usize = 512;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_into_its_sentences() {
        let cut = |text: &'static str| sentences(text).collect::<Vec<_>>();
        assert_eq!(cut("A cat. It is 3.5 m!\n\nLong?  "), ["A cat.", "It is 3.5 m!", "Long?"]);
        assert_eq!(cut("你好。“再见！”他说"), ["你好。", "“再见！”他说"]);
        assert_eq!(cut("..."), ["..."]);
        assert_eq!(cut(" \n"), [""; 0]);
    }
}
