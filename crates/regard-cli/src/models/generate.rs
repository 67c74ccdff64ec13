//! `regard generate`: goes on with texts.

use super::args::GenerateArgs;
use super::open;
use super::text::texts_of;
use crate::args::Format;
use crate::say::say;
use anyhow::Result;
use regard_models::files::Message;
use regard_models::generate::FinishReason;
use regard_scope::printable;
use serde_json::json;
use std::io::Write;
use std::ops::ControlFlow;
use std::time::Instant;

pub(crate) fn run(args: &GenerateArgs, format: Format) -> Result<()> {
    let search = open::search(&args.search);
    search.check()?;
    let typed: Vec<String> =
        args.system.iter().chain(&args.chat).chain(&args.prompt).cloned().collect();
    let mut prompts = texts_of(&typed)?;
    let model = open::open(&args.model.model)?;
    if args.chat.is_some() {
        let roles = if args.system.is_some() { &["system", "user"][..] } else { &["user"] };
        let said = roles.iter().zip(prompts);
        let messages: Vec<_> =
            said.map(|(role, content)| Message { role: (*role).into(), content }).collect();
        prompts = vec![model.chat(&messages)?];
    }
    if prompts.is_empty() {
        prompts.push(String::new());
    }
    let prompts: Vec<&str> = prompts.iter().map(String::as_str).collect();
    let mut out = std::io::stdout().lock();
    // One text streams as it is written; several would be mixed up.
    let streams = format == Format::Text && prompts.len() == 1;
    // Of a chat the answer alone.
    if streams && args.chat.is_none() {
        write!(out, "{}", printable(prompts[0]))?;
        out.flush()?;
    }
    let (start, mut failed) = (Instant::now(), None);
    let written = model.generate(&prompts, &search, args.search.max_tokens, &mut |_, text| {
        if !streams {
            return ControlFlow::Continue(());
        }
        match write!(out, "{}", printable(text)).and_then(|()| out.flush()) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                failed = Some(error);
                ControlFlow::Break(())
            }
        }
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    let seconds = start.elapsed().as_secs_f64();
    let tokens: usize = written.iter().map(|one| one.tokens.len()).sum();
    if streams {
        writeln!(out)?;
    }
    for (prompt, one) in prompts.iter().zip(&written).filter(|_| !streams) {
        match format {
            Format::Json => {
                let finish_reason = match one.finish_reason {
                    FinishReason::EndToken => "end_token",
                    FinishReason::MaxTokens => "max_tokens",
                    FinishReason::Context => "context",
                    FinishReason::Interrupted => "interrupted",
                };
                let line = json!({"prompt": prompt, "text": one.text, "tokens": one.tokens, "score": one.score, "finish_reason": finish_reason});
                writeln!(out, "{line}")?;
            }
            Format::Text => writeln!(out, "{}{}\n", printable(prompt), printable(&one.text))?,
        }
    }
    say(format_args!("{tokens} tokens in {seconds:.2} s, {:.1} a second", tokens as f64 / seconds));
    Ok(())
}
