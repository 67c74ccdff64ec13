//! Decoders: text goes on.

use super::text::{GenerationOutput, Vocabulary, some, words};
use crate::error::Error;
use crate::files::{Message, Stream, Tokens};
#[cfg(feature = "grammar")]
use crate::generate::GrammarCompiler;
use crate::generate::{
    AttentionProbe, Constraint, DecodingStrategy, Emit, FinishReason, GRID, GenerationOptions,
    LogitsProcessors, PROMPT_TOKENS, Scheduler, StopStrings, StoppingCriteria, Usage, generate_all,
};
use crate::infer::{Session, Transformer};
use regard_scope::{Labels, Trace};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// A language model: GPT-2, Llama, Qwen, Gemma and their like.
#[derive(Debug)]
pub struct CausalLm {
    pub(super) vocabulary: Vocabulary,
    pub(super) model: Transformer,
}

/// Whose beginnings of prompts a call keeps.
const OWNER: u64 = 0;

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
        let file = options.prompt_cache.as_deref();
        if let Some(folder) =
            file.and_then(Path::parent).filter(|folder| !folder.as_os_str().is_empty())
            && !folder.is_dir()
        {
            return Err(Error::file(folder, &"no such folder for the prompt cache; make it first"));
        }
        let kept = file.filter(|path| path.exists()).map(|path| session.read_prompt(path));
        let kept = kept.transpose()?;
        let mut scheduler = Scheduler::new(session, PROMPT_TOKENS);
        if let Some((tokens, states)) = kept {
            for (end, state) in (GRID..).step_by(GRID).zip(states) {
                scheduler.insert_prefix(OWNER, &tokens[..end], state);
            }
        }
        let first = prompts.first().filter(|_| file.is_some());
        let known = first.and_then(|prompt| scheduler.prefix(OWNER, prompt));
        let known = known.map_or(0, |(tokens, ..)| tokens);
        let mut streams: Vec<_> =
            prompts.iter().map(|prompt| self.stream(prompt, &options.stop)).collect();
        // `on_text` has ended it.
        let mut broken = vec![false; prompts.len()];
        let mut on_token = |row: usize, token| {
            let Emit { text, stopped } = streams[row].push(token);
            broken[row] |= !text.is_empty() && on_text(row, &text).is_break();
            if stopped || broken[row] { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let asked = self.options(options);
        let owner = file.map(|_| OWNER);
        let (all, usage) = generate_all(&mut scheduler, &prompts, &asked, owner, &mut on_token)?;
        if let (Some(path), Some(prompt)) = (file, first)
            && let Some((n, session, state)) = scheduler.prefix(OWNER, prompt)
            && n > known
        {
            session.write_prompt(&prompt[..n], state, path)?;
        }
        let finished = all.into_iter().zip(streams).zip(broken).enumerate();
        let written = finished.map(|(row, ((mut one, stream), broken))| {
            let (rest, text, stopped) = stream.finish();
            if !rest.is_empty() && !broken {
                let _ended = on_text(row, &rest);
            }
            if stopped {
                one.finish_reason = FinishReason::StopString;
            }
            GenerationOutput::new(text, one)
        });
        Ok((written.collect(), usage))
    }

    /// A scheduler for requests that come and go, with a KV cache of at most so many bytes.
    pub fn scheduler(&self, cache_bytes: usize) -> Result<Scheduler<Session<'_>>, Error> {
        Ok(Scheduler::new(self.model.session(&[], cache_bytes)?, GRID))
    }

    /// The tokens of a prompt. One of no tokens begins as texts do.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>, Error> {
        let mut tokens = self.vocabulary.fitting(text)?;
        if tokens.is_empty() {
            tokens.extend(self.vocabulary.bos);
        }
        Ok(tokens)
    }

    /// What is asked for, in tokens of this model: it ends by its end tokens.
    #[must_use]
    pub fn options(&self, options: &TextOptions) -> GenerationOptions {
        let TextOptions { strategy, max_tokens, stop: _, processors, constraint, .. } = options;
        let mut processors = processors.clone();
        processors.suppressed.extend(&self.model.config().suppressed);
        let end = self.vocabulary.eos.clone();
        GenerationOptions {
            strategy: strategy.clone(),
            stop: StoppingCriteria { max_tokens: *max_tokens, end },
            processors,
            constraint: constraint.clone(),
            prompt_lookup: options.prompt_lookup,
            top_log_probabilities: options.top_log_probabilities,
            attention: options.attention.clone(),
        }
    }

    /// The text after a prompt, as its tokens are generated, up to the first of these strings.
    #[must_use]
    pub fn stream(&self, prompt: &[u32], stops: &[String]) -> TextStream<'_> {
        let mut stream = self.tokens().stream();
        // A text that begins after its prompt keeps the space that it begins with.
        prompt.iter().for_each(|id| drop(stream.push(*id)));
        let stops = StopStrings::new(stops.iter().cloned());
        TextStream { stream, stops, told: String::new(), stopped: false }
    }

    /// What every head looks at in a text.
    pub fn look(&self, text: &str) -> Result<Trace, Error> {
        self.look_tokens(&self.vocabulary.fitting(text)?)
    }

    /// The same of tokens: a prompt with what was generated after it.
    pub fn look_tokens(&self, tokens: &[u32]) -> Result<Trace, Error> {
        let tokens = some(tokens.to_vec())?;
        let labels = Labels::new("target", words(self.tokens(), &tokens));
        let layers = self.model.look(None, &tokens)?;
        let axes = [("target".to_owned(), labels)].into();
        Ok(Trace { title: self.vocabulary.title.clone(), axes, layers, ..Trace::default() })
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
    /// With each token, the likeliest so many are told.
    pub top_log_probabilities: usize,
    /// What is told of attention with each token.
    pub attention: Option<AttentionProbe>,
    /// A file that keeps the keys and values of the first prompt, in steps of [`GRID`] tokens, for later calls with prompts that begin
    /// the same way. It is read if it is there, and written if the prompt has more than it.
    pub prompt_cache: Option<PathBuf>,
}

impl TextOptions {
    /// With nothing but these.
    #[must_use]
    pub fn new(strategy: DecodingStrategy, max_tokens: usize) -> Self {
        Self {
            strategy,
            max_tokens,
            stop: Vec::new(),
            processors: LogitsProcessors::default(),
            constraint: None,
            prompt_lookup: 0,
            top_log_probabilities: 0,
            attention: None,
            prompt_cache: None,
        }
    }
}

/// The text of one prompt, as it is generated.
#[derive(Debug)]
pub struct TextStream<'a> {
    stream: Stream<'a>,
    stops: StopStrings,
    told: String,
    stopped: bool,
}

impl TextStream<'_> {
    /// The text that a token adds, without what may still become another text.
    pub fn push(&mut self, token: u32) -> Emit {
        let text = self.stream.push(token).unwrap_or_default();
        let emit = self.stops.push(&text);
        self.told.push_str(&emit.text);
        self.stopped = emit.stopped;
        emit
    }

    /// When there are no more tokens: what was held back, the whole text, and whether it ended by one of the strings.
    #[must_use]
    pub fn finish(self) -> (String, String, bool) {
        let Self { stream, mut stops, mut told, mut stopped } = self;
        let mut rest = String::new();
        if let Some(last) = stream.finish() {
            let emit = stops.push(&last);
            (rest, stopped) = (emit.text, emit.stopped);
        }
        if !stopped {
            rest.push_str(&stops.finish());
        }
        told.push_str(&rest);
        (rest, told, stopped)
    }
}
