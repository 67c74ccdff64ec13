//! The `regard` command: arguments become a job that is checked as a whole, then one file does each verb.

#![forbid(unsafe_code)]

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
mod look;
mod model;
mod models;
mod plan;
mod serve;
mod shipped;
mod show;
mod source;
mod stats;
mod steps;
mod train;
mod translate;

use anyhow::Result;
use args::{Args, Verb};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read us has seen enough, as in `regard bench --list | head -1`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(Args { verb, format }: Args) -> Result<()> {
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
        Verb::Models(args) => models::run(&args, format),
        Verb::Bench(args) if args.list => bench::list(format),
        Verb::Bench(args) => bench::run(job::bench(args)?, format),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}
