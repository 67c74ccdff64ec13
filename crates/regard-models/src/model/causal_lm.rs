//! Decoders: text goes on.

use super::text::{GenerationOutput, Vocabulary, some, words};
use crate::error::Error;
use crate::files::{Message, Stream, Tokens, TransformerConfig};
#[cfg(feature = "grammar")]
use crate::generate::GrammarCompiler;
use crate::generate::{
    Constraint, DecodingStrategy, Emit, FinishReason, GeneratedSequence, GenerationOptions,
    LogitsProcessors, StopStrings, StoppingCriteria, Usage, generate_with,
};
use crate::infer::Transformer;
use regard_scope::{Labels, Trace};
use std::ops::ControlFlow;

/// A language model: GPT-2, Llama, Qwen, Gemma and their like.
#[derive(Debug)]
pub struct CausalLm {
    pub(super) vocabulary: Vocabulary,
    pub(super) model: Transformer,
}

/// Maximum bytes of the KV cache; pages are allocated as they fill.
pub(super) const CACHE_BYTES: usize = 4 << 30;

impl CausalLm {
    /// The network.
    #[must_use]
    pub fn transformer(&self) -> &Transformer {
        &self.model
    }

    /// How its text is divided.
    #[must_use]
    pub fn tokens(&self) -> &Tokens {
        &self.vocabulary.tokens
    }

    /// The prompt that asks for an answer to a conversation, by the chat template that comes with the model.
    pub fn chat(&self, messages: &[Message]) -> Result<String, Error> {
        let tokens = self.tokens();
        let Some(chat) = tokens.chat() else {
            let why = "the model has no chat template; give a prompt";
            return Err(Error::Tokens { what: self.vocabulary.title.clone(), why: why.into() });
        };
        let mut chat = chat.clone();
        // What the vocabulary puts before every text would be there twice.
        let begins = tokens.encode("")?;
        if begins.first().is_some_and(|first| tokens.id(&chat.bos) == Some(*first)) {
            chat.bos.clear();
        }
        chat.render(messages)
    }

    /// Makes constraints of what the model writes: JSON schemas, regular expressions, grammars.
    #[cfg(feature = "grammar")]
    pub fn grammars(&self) -> Result<GrammarCompiler, Error> {
        let json = self.tokens().to_json()?;
        Ok(GrammarCompiler::from_tokenizer_json(&json, &self.vocabulary.eos)?)
    }

    /// Continues each prompt. `on_text` is given pieces of text as they are generated, and the number of their prompt; `Break` ends that
    /// text.
    pub fn generate(
        &self,
        prompts: &[&str],
        search: &DecodingStrategy,
        max_tokens: usize,
        on_text: &mut OnText<'_>,
    ) -> Result<Vec<GenerationOutput>, Error> {
        let options = TextOptions::new(search.clone(), max_tokens);
        Ok(self.generate_with(prompts, &options, on_text)?.0)
    }

    /// The same with all that can be asked for; also tells how long it took.
    pub fn generate_with(
        &self,
        prompts: &[&str],
        options: &TextOptions,
        on_text: &mut OnText<'_>,
    ) -> Result<(Vec<GenerationOutput>, Usage), Error> {
        let prompts =
            prompts.iter().map(|text| self.prompt(text)).collect::<Result<Vec<_>, _>>()?;
        let mut session = self.model.session(&[], CACHE_BYTES)?;
        let mut streams: Vec<_> =
            prompts.iter().map(|prompt| Streamed::new(self, prompt, &options.stop)).collect();
        let mut on_token = |row: usize, token| streams[row].push(row, token, on_text);
        let asked = options.of(self.model.config(), &self.vocabulary.eos);
        let (all, usage) = generate_with(&mut session, &prompts, &asked, &mut on_token)?;
        let finished = all.into_iter().zip(streams).zip(&prompts).enumerate();
        let written = finished.map(|(row, ((one, stream), prompt))| {
            stream.finish(row, one, (self.tokens(), prompt), on_text)
        });
        Ok((written.collect(), usage))
    }

    /// The tokens of a prompt. One of no tokens begins as texts do.
    fn prompt(&self, text: &str) -> Result<Vec<u32>, Error> {
        let mut tokens = self.vocabulary.fitting(text)?;
        if tokens.is_empty() {
            tokens.extend(self.vocabulary.bos);
        }
        Ok(tokens)
    }

    /// What every head looks at in a text.
    pub fn look(&self, text: &str) -> Result<Trace, Error> {
        let tokens = some(self.vocabulary.fitting(text)?)?;
        let labels = Labels::new("target", words(self.tokens(), &tokens));
        let layers = self.model.look(None, &tokens)?;
        let axes = [("target".to_owned(), labels)].into();
        Ok(Trace { title: self.vocabulary.title.clone(), axes, layers })
    }
}

/// Is given pieces of text with the number of their prompt.
pub type OnText<'a> = dyn FnMut(usize, &str) -> ControlFlow<()> + 'a;

/// What is asked of a language model.
#[derive(Clone, Debug)]
pub struct TextOptions {
    /// How tokens are chosen.
    pub strategy: DecodingStrategy,
    /// Tokens of a text at most.
    pub max_tokens: usize,
    /// Texts that end generation; they are not part of what comes out. In a beam search they cut the text of the best hypothesis; its
    /// tokens and score are of the whole.
    pub stop: Vec<String>,
    /// What changes the scores before a token is chosen.
    pub processors: LogitsProcessors,
    /// What the text must be a sentence of.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Tokens that are guessed at once by prompt lookup; 0 for none.
    pub prompt_lookup: usize,
}

impl TextOptions {
    /// With nothing but these.
    #[must_use]
    pub fn new(strategy: DecodingStrategy, max_tokens: usize) -> Self {
        let (stop, processors) = (Vec::new(), LogitsProcessors::default());
        Self { strategy, max_tokens, stop, processors, constraint: None, prompt_lookup: 0 }
    }

    /// The same for tokens of a model.
    fn of(&self, config: &TransformerConfig, eos: &[u32]) -> GenerationOptions {
        let mut processors = self.processors.clone();
        processors.suppressed.extend(&config.suppressed);
        GenerationOptions {
            strategy: self.strategy.clone(),
            stop: StoppingCriteria { max_tokens: self.max_tokens, end: eos.to_vec() },
            processors,
            constraint: self.constraint.clone(),
            prompt_lookup: self.prompt_lookup,
        }
    }
}

/// The text of one prompt, as it is generated.
struct Streamed<'a> {
    stream: Option<Stream<'a>>,
    stops: Option<StopStrings>,
    /// What was told, if it may be cut by a stop string.
    told: String,
    stopped: bool,
    /// `on_text` has ended it.
    broken: bool,
}

impl<'a> Streamed<'a> {
    fn new(model: &'a CausalLm, prompt: &[u32], stops: &[String]) -> Self {
        let mut stream = model.tokens().stream();
        // A text that begins after its prompt keeps the space that it begins with.
        prompt.iter().for_each(|id| drop(stream.push(*id)));
        let stops = (!stops.is_empty()).then(|| StopStrings::new(stops.iter().cloned()));
        Self { stream: Some(stream), stops, told: String::new(), stopped: false, broken: false }
    }

    fn push(&mut self, row: usize, token: u32, on_text: &mut OnText<'_>) -> ControlFlow<()> {
        match self.stream.as_mut().and_then(|stream| stream.push(token)) {
            Some(text) => self.tell(row, &text, on_text),
            None => ControlFlow::Continue(()),
        }
    }

    fn tell(&mut self, row: usize, text: &str, on_text: &mut OnText<'_>) -> ControlFlow<()> {
        if self.broken {
            return ControlFlow::Break(());
        }
        let Some(stops) = &mut self.stops else {
            let told = on_text(row, text);
            self.broken = told.is_break();
            return told;
        };
        let Emit { text, stopped } = stops.push(text);
        self.told.push_str(&text);
        self.stopped |= stopped;
        let told = if text.is_empty() { ControlFlow::Continue(()) } else { on_text(row, &text) };
        self.broken = told.is_break();
        if stopped { ControlFlow::Break(()) } else { told }
    }

    fn finish(
        mut self,
        row: usize,
        one: GeneratedSequence,
        (tokens, prompt): (&Tokens, &[u32]),
        on_text: &mut OnText<'_>,
    ) -> GenerationOutput {
        let rest = self.stream.take().and_then(Stream::finish);
        if let Some(text) = rest.filter(|_| !self.stopped) {
            let _ = self.tell(row, &text, on_text);
        }
        if let Some(stops) = self.stops {
            let rest = if self.stopped || self.broken { String::new() } else { stops.finish() };
            if !rest.is_empty() {
                let _ = on_text(row, &rest);
            }
            let reason = if self.stopped { FinishReason::StopString } else { one.finish_reason };
            let one = GeneratedSequence { finish_reason: reason, ..one };
            return GenerationOutput::new(self.told + &rest, one);
        }
        let whole: Vec<u32> = prompt.iter().chain(&one.tokens).copied().collect();
        let (before, after) = (tokens.decode(prompt), tokens.decode(&whole));
        let text = after.strip_prefix(&before);
        let text = text.map_or_else(|| tokens.decode(&one.tokens), String::from);
        GenerationOutput::new(text, one)
    }
}
