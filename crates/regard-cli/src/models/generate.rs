//! `regard generate`: goes on with texts.

use super::args::GenerateArgs;
use super::open;
use super::text::{lines, texts_of};
use crate::args::Format;
use crate::say::say;
use anyhow::{Result, anyhow};
use regard_models::files::Message;
use regard_models::generate::{Constraint, FinishReason, LogitsProcessors, Usage};
use regard_models::{CausalLm, TextOptions};
use regard_scope::printable;
use serde_json::json;
use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;

pub(crate) fn run(args: &GenerateArgs, format: Format) -> Result<()> {
    let search = open::search(&args.search);
    search.check()?;
    let typed: Vec<String> =
        args.system.iter().chain(&args.chat).chain(&args.prompt).cloned().collect();
    let mut prompts = texts_of(&typed)?;
    let mut model = open::open(&args.model.model)?;
    model.set_kv_dtype(args.kv.dtype);
    let model = model.causal_lm()?;
    let options = TextOptions {
        stop: args.stop.clone(),
        processors: LogitsProcessors {
            repetition_penalty: args.repetition_penalty,
            presence_penalty: args.presence_penalty,
            frequency_penalty: args.frequency_penalty,
            logit_bias: args.logit_bias.iter().copied().collect(),
            ..LogitsProcessors::default()
        },
        constraint: constraint(args, model)?,
        prompt_lookup: args.prompt_lookup,
        prompt_cache: args.prompt_cache.clone(),
        ..TextOptions::new(search, args.search.max_tokens)
    };
    let system = args.system.as_ref().map(|_| prompts.remove(0));
    let system = system.map(|content| message("system", content));
    if args.interactive {
        return converse(model, system, &options);
    }
    if args.chat.is_some() {
        let said = system.into_iter().chain(prompts.into_iter().map(|text| message("user", text)));
        prompts = vec![model.chat(&said.collect::<Vec<_>>())?];
    }
    if prompts.is_empty() {
        prompts.push(String::new());
    }
    let prompts: Vec<&str> = prompts.iter().map(String::as_str).collect();
    // One text streams as it is generated; several would be mixed up.
    if format == Format::Text && prompts.len() == 1 {
        // Of a chat the answer alone.
        if args.chat.is_none() {
            write!(std::io::stdout(), "{}", printable(prompts[0]))?;
        }
        let (_, usage) = stream(model, prompts[0], &options)?;
        tell(&usage);
        return Ok(());
    }
    let silent = &mut |_: usize, _: &str| ControlFlow::Continue(());
    let (written, usage) = model.generate_with(&prompts, &options, silent)?;
    let mut out = std::io::stdout().lock();
    for (prompt, one) in prompts.iter().zip(&written) {
        match format {
            Format::Json => {
                let reason = reason(one.finish_reason);
                let line = json!({"prompt": prompt, "text": one.text, "tokens": one.tokens, "score": one.score, "finish_reason": reason});
                writeln!(out, "{line}")?;
            }
            Format::Text => writeln!(out, "{}{}\n", printable(prompt), printable(&one.text))?,
        }
    }
    tell(&usage);
    Ok(())
}

fn message(role: &str, content: String) -> Message {
    Message { role: role.into(), content }
}

fn reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::EndToken => "end_token",
        FinishReason::MaxTokens => "max_tokens",
        FinishReason::Context => "context",
        FinishReason::Interrupted => "interrupted",
        FinishReason::StopString => "stop_string",
    }
}

fn constraint(args: &GenerateArgs, model: &CausalLm) -> Result<Option<Box<dyn Constraint>>> {
    let grammar = match (&args.json_schema, &args.regex) {
        (Some(schema), _) => {
            let schema = texts_of(std::slice::from_ref(schema))?.concat();
            model.grammars()?.json_schema(&schema)?
        }
        (None, Some(regex)) => model.grammars()?.regex(regex)?,
        (None, None) => return Ok(None),
    };
    Ok(Some(Box::new(grammar)))
}

/// Generates one text, which is printed as it comes.
fn stream(model: &CausalLm, prompt: &str, options: &TextOptions) -> Result<(String, Usage)> {
    let (mut out, mut failed) = (std::io::stdout().lock(), None);
    out.flush()?;
    let on_text = &mut |_: usize, text: &str| match write!(out, "{}", printable(text))
        .and_then(|()| out.flush())
    {
        Ok(()) => ControlFlow::Continue(()),
        Err(error) => {
            failed = Some(error);
            ControlFlow::Break(())
        }
    };
    let (mut written, usage) = model.generate_with(&[prompt], options, on_text)?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    writeln!(std::io::stdout())?;
    let one = written.pop().ok_or_else(|| anyhow!("no text"))?;
    Ok((one.text, usage))
}

fn tell(usage: &Usage) {
    let cached = match usage.cached_tokens {
        0 => String::new(),
        cached => format!(" ({cached} from the prompt cache)"),
    };
    say(format_args!(
        "prompt: {} tokens{cached}, {:.1} a second; generated: {} tokens, {:.1} a second",
        usage.prompt_tokens,
        usage.prompt_tokens_per_second(),
        usage.generated_tokens,
        usage.generated_tokens_per_second()
    ));
}

/// A conversation: a message on each line, and its answer.
fn converse(model: &CausalLm, system: Option<Message>, options: &TextOptions) -> Result<()> {
    let input = std::io::stdin();
    let is_terminal = input.is_terminal();
    if is_terminal {
        say("a message on each line; end with Ctrl-D");
    }
    let mut said: Vec<Message> = system.into_iter().collect();
    let ask = || -> Result<()> {
        if is_terminal {
            write!(std::io::stdout(), "> ")?;
            std::io::stdout().flush()?;
        }
        Ok(())
    };
    ask()?;
    for line in lines(input.lock()) {
        said.push(message("user", line?));
        let (answer, _) = stream(model, &model.chat(&said)?, options)?;
        said.push(message("assistant", answer.trim().into()));
        ask()?;
    }
    Ok(())
}
