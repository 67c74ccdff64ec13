//! The `regard` command: arguments become a job that is checked as a whole, then one file does each verb.
//!
//! A library, so that the Python package can be the command too; [`run`] is all there is to call.

#![forbid(unsafe_code)]
// `eprintln!` panics where nobody reads: see `say`.
#![deny(clippy::print_stderr)]

mod args;
mod audit;
mod bench;
mod check;
mod classify;
mod diff;
mod embed;
mod eval;
mod generate;
mod info;
mod job;
mod lab;
mod look;
mod model;
mod models;
mod plan;
mod say;
mod serve;
mod shipped;
mod show;
mod source;
mod stats;
mod steps;
mod text;
mod train;
mod translate;

use anyhow::Result;
use args::{Args, Verb};
use clap::Parser;
use std::ffi::OsString;

/// Runs the command with these arguments, the name of the program first; returns its exit status.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let args = match Args::try_parse_from(arguments) {
        Ok(args) => args,
        // Help and versions come this way too. Where nobody reads them, nothing is left to tell.
        Err(error) => {
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(1);
        }
    };
    match run_verb(args) {
        Ok(()) => 0,
        // Whoever read us has seen enough, as in `regard bench --list | head -1`.
        Err(error) if is_broken_pipe(&error) => 0,
        Err(error) => {
            say::say(format_args!("error: {error:#}"));
            1
        }
    }
}

fn run_verb(Args { verb, format }: Args) -> Result<()> {
    job::start_threads(|name| std::env::var(name).ok())?;
    match verb {
        Verb::Info => info::run(format),
        Verb::Plan(args) => plan::run(job::plan(*args)?, format),
        Verb::Steps(args) => steps::run(&job::steps(*args, format)?, format),
        Verb::Check => check::run(format),
        Verb::Look(args) => look::run(&args, format),
        Verb::Stats(args) => stats::run(&args, format),
        Verb::Audit(args) => audit::run(&args, format),
        Verb::Diff(args) => diff::run(&args, format),
        Verb::Generate(args) => generate::run(&args, format),
        Verb::Translate(args) => translate::run(&args, format),
        Verb::Train(args) => train::run(&args, format),
        Verb::Eval(args) => eval::run(&args, format),
        Verb::Classify(args) => classify::run(&args, format),
        Verb::Embed(args) => embed::run(&args, format),
        Verb::Lab(args) => lab::run(&args, format),
        Verb::Models(args) => models::run(&args, format),
        Verb::Bench(args) if args.list => bench::list(format),
        Verb::Bench(args) => bench::run(job::bench(args)?, format),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}
