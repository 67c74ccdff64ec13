//! `hostile TARGET [--seconds N | --inputs N] [--seed S]`, or `hostile TARGET FILE..` for inputs that were kept.

use regard_hostile::hunt::{Until, hunt};
use regard_hostile::targets::{TARGETS, Target};
use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

const USAGE: &str =
    "hostile TARGET [--seconds N | --inputs N] [--seed S], or hostile TARGET FILE..";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}\n{USAGE}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<bool, Box<dyn Error>> {
    let (name, rest) = arguments.split_first().ok_or("no target")?;
    let target = TARGETS.iter().find(|target| target.name == name).ok_or_else(|| {
        let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        format!("{name}: no such target; there are {}", names.join(", "))
    })?;
    let (mut until, mut seed, mut files) = (Until::Seconds(10), 1, Vec::new());
    let mut rest = rest.iter();
    while let Some(argument) = rest.next() {
        let mut number = || -> Result<u64, Box<dyn Error>> {
            let text = rest.next().ok_or_else(|| format!("{argument}: a number is wanted"))?;
            Ok(text.parse().map_err(|e| format!("{argument} {text}: {e}"))?)
        };
        match argument.as_str() {
            "--seconds" => until = Until::Seconds(number()?),
            "--inputs" => until = Until::Inputs(number()?),
            "--seed" => seed = number()?,
            flag if flag.starts_with('-') => return Err(format!("{flag}: no such flag").into()),
            file => files.push(file),
        }
    }
    if files.is_empty() { hunted(target, until, seed) } else { again(target, &files) }
}

/// Gives the target inputs that were kept; a panic says where it is.
fn again(target: &Target, files: &[&str]) -> Result<bool, Box<dyn Error>> {
    for file in files {
        let input = std::fs::read(file).map_err(|e| format!("{file}: {e}"))?;
        let said = if (target.call)(&input) { "accepted" } else { "refused" };
        writeln!(std::io::stdout(), "{file}: {said}")?;
    }
    Ok(true)
}

fn hunted(target: &Target, until: Until, seed: u64) -> Result<bool, Box<dyn Error>> {
    let found = hunt(target, until, seed)?;
    let mut out = std::io::stdout();
    for (said, path) in &found.failures {
        writeln!(out, "{}: {said}", path.display())?;
    }
    writeln!(
        out,
        "{}: {} inputs, {:.1} s, {} accepted, {} refused",
        target.name, found.inputs, found.seconds, found.accepted, found.refused
    )?;
    if let Some(wrong) = found.wrong() {
        eprintln!("{}: {wrong}", target.name);
        return Ok(false);
    }
    Ok(true)
}
