//! The `regard` command: arguments become a job that is checked as a whole, then one file does each verb.
//!
//! A library, so that the Python packages can be the command too ([`run`]), and know the same models by name ([`place`], [`Shipped`]).

#![forbid(unsafe_code)]
// `eprintln!` panics where nobody reads: see `say`.
#![deny(clippy::print_stderr)]

mod args;
mod audit;
mod bench;
mod check;
mod diff;
mod heads;
mod info;
mod job;
#[cfg(feature = "lab")]
mod lab;
mod long_arrays;
mod look;
#[cfg(feature = "models")]
mod models;
mod plan;
mod ranks;
mod say;
mod serve;
mod show;
mod source;
mod stats;
mod status;
mod steps;
mod text;
#[cfg(feature = "train")]
mod train;

#[cfg(feature = "models")]
pub use models::{Shipped, place};

use anyhow::{Context, Result};
use args::{Args, BenchVerb, Verb};
use clap::{CommandFactory, Parser};
use regard::Machine;
use std::ffi::OsString;
use std::io::Write;

/// Runs the command with these arguments, the name of the program first; returns its exit status.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let args = match Args::try_parse_from(arguments) {
        Ok(args) => args,
        // Help and versions come this way too. Where nobody reads them, nothing is left to tell.
        Err(error) => {
            match args::feature_of(&error) {
                Some((verb, feature)) => say::error(format_args!(
                    "error: {verb}: this program was built without it; {}",
                    args::remedy(feature)
                )),
                None => drop(error.print()),
            }
            return u8::try_from(error.exit_code()).unwrap_or(status::FAILURE);
        }
    };
    say::set_level(args.quiet, args.verbose);
    let threads = args.verb.threads();
    match job::on_threads(threads, |name| std::env::var(name).ok(), || run_verb(args)) {
        Ok(()) => 0,
        // Whoever read us has seen enough, as in `regard bench list | head -1`.
        Err(error) if is_broken_pipe(&error) => 0,
        Err(error) => {
            say::error(format_args!("error: {}", chain(&error)));
            status::of(&error)
        }
    }
}

fn run_verb(Args { verb, format, .. }: Args) -> Result<()> {
    let Machine { isa, threads, .. } = Machine::detect();
    let version = env!("CARGO_PKG_VERSION");
    say::detail(format_args!("regard {version}, {}, {threads} threads", isa.name()));
    match verb {
        Verb::Info => info::run(format),
        Verb::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "regard", &mut script);
            Ok(std::io::stdout().write_all(&script)?)
        }
        Verb::Man { dir } => std::fs::create_dir_all(&dir)
            .and_then(|()| clap_mangen::generate_to(Args::command(), &dir))
            .with_context(|| dir.display().to_string()),
        Verb::Plan(args) => plan::run(job::plan(*args)?, format),
        Verb::Steps(args) => steps::run(&job::steps(*args, format)?, format),
        Verb::Check(args) => check::run(&args, format),
        Verb::Look(args) => look::run(&args, format),
        Verb::Stats(args) => stats::run(&args, format),
        Verb::Audit(args) => audit::run(&args, format),
        Verb::Heads(args) => heads::run(&args, format),
        Verb::Diff(args) => diff::run(&args, format),
        Verb::Bench(BenchVerb::List(args)) => bench::list(&args, format),
        Verb::Bench(BenchVerb::Run(args)) => bench::run(job::bench(*args)?, format),
        Verb::Bench(BenchVerb::Suite(args)) => bench::run(job::bench_suite(args)?, format),
        Verb::Bench(BenchVerb::Ranks(args)) => bench::ranks::run(&args, format),
        #[cfg(feature = "models")]
        Verb::Models(verb) => models::run(&verb, format),
        #[cfg(feature = "train")]
        Verb::Train(verb) => train::run(&verb, format),
        #[cfg(feature = "lab")]
        Verb::Lab(args) => lab::run(&args, format),
    }
}

/// An error and its causes. A message that already contains that of its cause is not followed by it.
fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_told_once() {
        let cause = anyhow::anyhow!("no room").context("writing a.txt: no room").context("--out");
        assert_eq!(chain(&cause), "--out: writing a.txt: no room");
        assert_eq!(chain(&anyhow::anyhow!("no room").context("a.txt")), "a.txt: no room");
    }
}
