//! From what is asked to an answer: tokens, admission, engine.

use super::answer::{Call, Shape};
use super::ask::Ask;
use super::attention;
use super::completions::Text;
use super::look::Pages;
use super::sse;
use crate::app::App;
use crate::engine::Job;
use crate::error::ApiError;
use crate::keys::KeyId;
use crate::models::Entry;
use axum::Json;
use axum::response::{IntoResponse, Response};
use regard_models::CausalLm;
use regard_models::files::Message;
use regard_models::generate::Request;
use std::time::Instant;
use tokio::sync::mpsc::unbounded_channel;

/// What is to go on.
#[derive(Debug)]
pub(super) enum Prompts {
    Texts(Vec<Text>),
    Chat(Vec<Message>),
}

pub(super) async fn answer(
    app: &App,
    (model, prompts): (Option<String>, Prompts),
    ask: Ask,
    (key, deadline): (KeyId, Instant),
    shape: Shape,
) -> Result<Response, ApiError> {
    let came = Instant::now();
    let models = app.models()?;
    let entry = models.get(model.as_deref(), |entry| entry.causal_lm().is_ok())?.clone();
    entry.causal_lm()?;
    entry.queue.has_room()?;
    let (stream, include_usage) = (ask.stream, ask.include_usage);
    let page = ask.attention.as_ref().is_some_and(|asked| asked.page);
    let (own, prefix) = (entry.clone(), app.options.prefix_cache.then_some(key.0));
    let most = app.options.max_tokens;
    // Long texts and grammars take many milliseconds, in which the one thread of HTTP would do nothing else.
    let requests = tokio::task::spawn_blocking(move || requests(&own, prompts, ask, prefix, most));
    let (requests, stops) = requests.await.map_err(|_| ApiError::internal())??;
    let pages = page.then(|| Pages::new(app, key, shape.chat, &requests)).transpose()?;
    let tokens: Vec<usize> = requests.iter().map(|request| request.prompt.len()).collect();
    let last: Vec<Option<u32>> = requests.iter().map(|one| one.prompt.last().copied()).collect();
    let (_, engines) = entry.causal_lm()?;
    let places = entry.queue.enter(&tokens)?;
    let (tell, events) = unbounded_channel();
    for (index, (request, place)) in requests.into_iter().zip(places).enumerate() {
        let (stops, tell) = (stops.clone(), tell.clone());
        let job = |load| Job { request, stops, index, came, deadline, tell, place, load };
        if !engines.submit(job) {
            return Err(ApiError::unavailable("the engine has ended; try again"));
        }
    }
    drop(tell);
    let mut call = Call::new(shape, entry, (&tokens, last), pages, events);
    call.begin().await?;
    match stream {
        true => Ok(sse::response(call, include_usage)),
        false => Ok(Json(call.whole().await?).into_response()),
    }
}

/// One request for each choice, and the strings that end them.
fn requests(
    entry: &Entry,
    prompts: Prompts,
    mut ask: Ask,
    prefix: Option<u64>,
    most: usize,
) -> Result<(Vec<Request>, Vec<String>), ApiError> {
    let (model, _) = entry.causal_lm()?;
    let (name, prompts) = match prompts {
        Prompts::Texts(texts) => ("prompt", texts),
        Prompts::Chat(messages) => {
            let text = model.chat(&messages).map_err(|e| ApiError::text("messages", &e))?;
            ("messages", vec![Text::Text(text)])
        }
    };
    let prompts = prompts.into_iter().map(|text| match text {
        Text::Tokens(tokens) => Ok(tokens),
        Text::Text(text) => model
            .prompt(&text)
            .map_err(|e| ApiError::text(name, &e).with_code("context_length_exceeded")),
    });
    let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
    ask.constrain(entry)?;
    let most = if ask.attention.is_some() { most.min(attention::ROWS) } else { most };
    let mut requests = Vec::with_capacity(prompts.len() * ask.n);
    for prompt in prompts {
        ask.options.max_tokens = room(model, &prompt, ask.max_tokens, (name, most))?;
        let tokens = ask.options.max_tokens;
        let probe = ask.attention.as_ref().map(|one| one.probe(model, prompt.len(), tokens));
        ask.options.attention = probe.transpose()?.flatten();
        let options = model.options(&ask.options);
        for row in 0..ask.n {
            let (prompt, options) = (prompt.clone(), options.clone());
            requests.push(Request { prompt, options, row, prefix });
        }
    }
    Ok((requests, ask.options.stop))
}

/// Tokens that may be generated after a prompt.
fn room(
    model: &CausalLm,
    prompt: &[u32],
    asked: Option<usize>,
    (name, most): (&str, usize),
) -> Result<usize, ApiError> {
    let context = model.transformer().config().decoder.as_ref().and_then(|stack| stack.context);
    let Some(context) = context else { return Ok(asked.unwrap_or(most)) };
    let room = context.saturating_sub(prompt.len());
    if asked.unwrap_or(1) > room {
        let message = format!(
            "the prompt has {} tokens and {} are to be generated; the model holds {context} together; shorten `{name}`, or lower `max_tokens`",
            prompt.len(),
            asked.unwrap_or(1)
        );
        return Err(ApiError::field(name, message).with_code("context_length_exceeded"));
    }
    Ok(asked.unwrap_or(room.min(most)))
}
