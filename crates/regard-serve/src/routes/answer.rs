//! Events of engines become JSON.

use super::look::Pages;
use super::{attention, chat, completions};
use crate::app::random;
use crate::engine::{Piece, Told};
use crate::error::ApiError;
use crate::models::Entry;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::UnboundedReceiver;

/// Of which API, and whether log-probabilities are told.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) chat: bool,
    pub(super) log_probabilities: bool,
}

/// A token with its log-probability, and the likeliest.
#[derive(Clone, Debug)]
pub(super) struct Log {
    pub(super) token: String,
    pub(super) value: f64,
    pub(super) top: Vec<(String, f64)>,
    /// Characters of the answer before it.
    pub(super) offset: usize,
}

/// What is said instead of a log-probability of -inf, which JSON does not have; OpenAI says the same.
const NEVER: f64 = -9999.0;

/// A request of one choice or several, while engines work on it. Dropped, it cancels what is left.
#[derive(Debug)]
pub(super) struct Call {
    shape: Shape,
    id: String,
    created: u64,
    entry: Arc<Entry>,
    choices: Vec<Choice>,
    open: usize,
    cached: usize,
    pages: Option<Pages>,
    /// Heard before the answer began.
    early: VecDeque<(usize, Told)>,
    events: UnboundedReceiver<(usize, Told)>,
}

#[derive(Debug)]
struct Choice {
    prompt: usize,
    tokens: usize,
    /// The token before the next.
    last: Option<u32>,
    offset: usize,
}

/// What is new of a choice.
#[derive(Debug)]
pub(super) struct News {
    pub(super) index: usize,
    pub(super) text: String,
    pub(super) log: Option<Log>,
    /// What was looked at for its token.
    pub(super) attention: Option<Value>,
    pub(super) reason: Option<&'static str>,
    /// Where its page is.
    pub(super) look: Option<String>,
}

/// All of a choice.
#[derive(Clone, Debug, Default)]
struct Written {
    text: String,
    logs: Vec<Log>,
    attention: Vec<Value>,
    reason: Option<&'static str>,
    look: Option<String>,
}

impl Call {
    pub(super) fn new(
        shape: Shape,
        entry: Arc<Entry>,
        (prompts, last): (&[usize], Vec<Option<u32>>),
        pages: Option<Pages>,
        events: UnboundedReceiver<(usize, Told)>,
    ) -> Self {
        let kind = if shape.chat { "chatcmpl" } else { "cmpl" };
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let choice =
            |(prompt, last): (&usize, _)| Choice { prompt: *prompt, tokens: 0, last, offset: 0 };
        Self {
            shape,
            id: format!("{kind}-{:016x}{:016x}", random(), random()),
            created: since.map_or(0, |since| since.as_secs()),
            entry,
            choices: prompts.iter().zip(last).map(choice).collect(),
            open: prompts.len(),
            cached: 0,
            pages,
            early: VecDeque::new(),
            events,
        }
    }

    /// Waits until something was generated. What fails before has a status of its own, in a stream too.
    pub(super) async fn begin(&mut self) -> Result<(), ApiError> {
        loop {
            match self.events.recv().await {
                Some((_, Told::Started(cached))) => self.cached += cached,
                Some((_, Told::Failed(error))) => return Err(error),
                Some(first) => {
                    self.early.push_back(first);
                    return Ok(());
                }
                None => return Err(ApiError::internal()),
            }
        }
    }

    /// What comes next; nothing when all choices have ended.
    pub(super) async fn next(&mut self) -> Result<Option<News>, ApiError> {
        while self.open > 0 {
            let event = match self.early.pop_front() {
                Some(event) => Some(event),
                None => self.events.recv().await,
            };
            match event {
                None => return Err(ApiError::internal()),
                Some((_, Told::Failed(error))) => return Err(error),
                Some((_, Told::Started(cached))) => self.cached += cached,
                Some((index, Told::Piece(piece))) => return Ok(Some(self.piece(index, piece))),
                Some((index, Told::Ended(ended))) => {
                    self.open -= 1;
                    let (text, reason) = (ended.rest, Some(ended.reason));
                    let pages = self.pages.as_mut();
                    let prompt = self.choices[index].prompt;
                    let look = pages.and_then(|pages| pages.keep(index, prompt, &self.entry));
                    let (log, attention) = (None, None);
                    return Ok(Some(News { index, text, log, attention, reason, look }));
                }
            }
        }
        Ok(None)
    }

    fn piece(&mut self, index: usize, Piece { text, choice }: Piece) -> News {
        let last = self.choices[index].last.replace(choice.token);
        self.choices[index].tokens += 1;
        if let Some(pages) = &mut self.pages {
            pages.push(index, choice.token);
        }
        let probed = !choice.attention.is_empty();
        let token = match self.shape.log_probabilities || probed {
            true => self.token(last, choice.token),
            false => String::new(),
        };
        let attention = probed.then(|| {
            let Choice { prompt, tokens, .. } = self.choices[index];
            attention::told(prompt + tokens - 1, &token, &choice.attention)
        });
        let log = self.shape.log_probabilities.then(|| {
            let value = |value: f64| value.max(NEVER);
            let offset = self.choices[index].offset;
            self.choices[index].offset += token.chars().count();
            let top = choice.top.iter();
            let top = top.map(|(id, log)| (self.token(last, *id), value(*log))).collect();
            Log { token, value: value(choice.log_probability.unwrap_or(NEVER)), top, offset }
        });
        News { index, text, log, attention, reason: None, look: None }
    }

    /// The text of a token after another: some vocabularies leave out a space at the beginning.
    fn token(&self, last: Option<u32>, id: u32) -> String {
        let Some(tokens) = self.entry.model.tokens() else { return String::new() };
        let both = last.map(|last| (tokens.decode(&[last, id]), tokens.decode(&[last])));
        let after = both.and_then(|(both, last)| both.strip_prefix(&last).map(str::to_owned));
        after.unwrap_or_else(|| tokens.decode(&[id]))
    }

    /// Tokens that were read and generated.
    pub(super) fn usage(&self) -> Value {
        let [prompt, made] = self
            .choices
            .iter()
            .fold([0, 0], |[prompt, made], choice| [prompt + choice.prompt, made + choice.tokens]);
        json!({
            "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }

    fn logs(&self, logs: &[Log]) -> Value {
        match (self.shape.log_probabilities, self.shape.chat) {
            (false, _) => Value::Null,
            (true, true) => chat::logs(logs),
            (true, false) => completions::logs(logs),
        }
    }

    fn object(&self, kind: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id, "object": kind, "created": self.created, "model": self.entry.name,
            "system_fingerprint": concat!("regard-", env!("CARGO_PKG_VERSION")), "choices": choices,
        })
    }

    /// A chunk of a stream with these choices.
    pub(super) fn chunk(&self, choices: Vec<Value>) -> Value {
        let kind = if self.shape.chat { "chat.completion.chunk" } else { "text_completion" };
        self.object(kind, choices)
    }

    /// What a stream of chats begins with.
    pub(super) fn greetings(&self) -> Vec<Value> {
        if !self.shape.chat {
            return Vec::new();
        }
        let delta = json!({"role": "assistant", "content": ""});
        let one = |index| json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
        (0..self.choices.len()).map(|index| self.chunk(vec![one(index)])).collect()
    }

    /// News as the choice of a chunk; none if there is nothing to tell.
    pub(super) fn part(&self, news: &News) -> Option<Value> {
        let News { index, text, log, attention, reason, look } = news;
        if text.is_empty() && log.is_none() && attention.is_none() && reason.is_none() {
            return None;
        }
        let logs = log.as_ref().map_or(Value::Null, |log| self.logs(std::slice::from_ref(log)));
        let mut part = match self.shape.chat {
            true => {
                let delta = if text.is_empty() { json!({}) } else { json!({"content": text}) };
                json!({"index": index, "delta": delta, "logprobs": logs, "finish_reason": reason})
            }
            false => {
                json!({"index": index, "text": text, "logprobs": logs, "finish_reason": reason})
            }
        };
        if let Some(row) = attention {
            part["attention"] = json!([row]);
        }
        if let Some(path) = look {
            part["look"] = json!(path);
        }
        Some(part)
    }

    /// The answer as a whole.
    pub(super) async fn whole(mut self) -> Result<Value, ApiError> {
        let mut written: Vec<Written> = vec![Written::default(); self.choices.len()];
        while let Some(News { index, text, log, attention, reason, look }) = self.next().await? {
            let whole = &mut written[index];
            whole.text.push_str(&text);
            whole.logs.extend(log);
            whole.attention.extend(attention);
            whole.reason = reason.or(whole.reason);
            whole.look = look.or(whole.look.take());
        }
        let choices = written.into_iter().enumerate().map(|(index, whole)| {
            let Written { text, logs, attention, reason, look } = whole;
            let logs = self.logs(&logs);
            let mut choice = match self.shape.chat {
                true => {
                    let message = json!({"role": "assistant", "content": text, "refusal": null});
                    json!({"index": index, "message": message, "logprobs": logs, "finish_reason": reason})
                }
                false => json!({"index": index, "text": text, "logprobs": logs, "finish_reason": reason}),
            };
            if !attention.is_empty() {
                choice["attention"] = Value::Array(attention);
            }
            if let Some(path) = look {
                choice["look"] = json!(path);
            }
            choice
        });
        let kind = if self.shape.chat { "chat.completion" } else { "text_completion" };
        let mut whole = self.object(kind, choices.collect());
        whole["usage"] = self.usage();
        Ok(whole)
    }
}
