//! `regard lab`: claims about attention, run.

use crate::args::{Format, ShowArgs, ThreadsArg};
use crate::show::{Target, progress, show, style, told};
use crate::status::Negative;
use anyhow::{Context, Result, bail};
use regard_lab::{EXPERIMENTS, Experiment, ExperimentResult, Report, Setup, find, number, page};
use regard_scope::render::svg;
use regard_scope::write_atomically;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

#[derive(Debug, clap::Args)]
pub(crate) struct LabArgs {
    #[command(subcommand)]
    pub(crate) what: Option<LabVerb>,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum LabVerb {
    /// List the experiments and their claims (the default)
    #[command(after_long_help = "Examples:\n  regard lab list --format json")]
    List,
    /// Run experiments: numbers, a plot, a verdict
    #[command(
        after_long_help = "Examples:\n  regard lab run scaling --dim 4096 --seed 7\n  regard lab run scaling --inject wrong-scale\n  regard lab run scaling order --quick --out pictures"
    )]
    Run(RunArgs),
    /// Run all experiments, one line each; --out is a folder for their pictures
    #[command(
        after_long_help = "Examples:\n  regard lab all --quick\n  regard lab all --out pictures --format json"
    )]
    All(SizeArgs),
}

/// How large, and where the pictures go.
#[derive(Debug, clap::Args)]
pub(crate) struct SizeArgs {
    /// Small sizes that run in seconds; timings are shown, not checked
    #[arg(long)]
    pub(crate) quick: bool,
    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) show: ShowArgs,
    #[command(flatten)]
    pub(crate) threads: ThreadsArg,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// Names or ids of experiments; of several, --out is a folder for their pictures
    #[arg(required = true, value_name = "NAME")]
    pub(crate) names: Vec<String>,
    #[command(flatten)]
    pub(crate) size: SizeArgs,
    /// Head dimension (experiments that use it)
    #[arg(long, value_name = "N")]
    pub(crate) dim: Option<usize>,
    /// Number of heads (experiments that use it)
    #[arg(long, value_name = "N")]
    pub(crate) heads: Option<usize>,
    /// Sequence length (experiments that use it)
    #[arg(long, value_name = "N")]
    pub(crate) length: Option<usize>,
    /// Number of random samples (experiments that use it)
    #[arg(long, value_name = "N")]
    pub(crate) samples: Option<usize>,
    /// Training steps (experiments that use it)
    #[arg(long, value_name = "N")]
    pub(crate) steps: Option<usize>,
    /// Fault to inject in the place of the mechanism; the claim must then fail
    #[arg(long = "inject", value_name = "FAULT")]
    pub(crate) broken: Option<String>,
}

impl LabArgs {
    pub(crate) fn threads(&self) -> ThreadsArg {
        match &self.what {
            Some(LabVerb::Run(args)) => args.size.threads,
            Some(LabVerb::All(size)) => size.threads,
            None | Some(LabVerb::List) => ThreadsArg::default(),
        }
    }
}

/// Columns for what a number is, so that a line of a table fits 80.
const WHAT: usize = 41;

pub(crate) fn run(args: &LabArgs, format: Format) -> Result<()> {
    match &args.what {
        None | Some(LabVerb::List) => list(format),
        Some(LabVerb::All(size)) => {
            let setup = Setup { seed: size.seed, quick: size.quick, ..Setup::default() };
            several(EXPERIMENTS.iter(), &setup, &size.show, format)
        }
        Some(LabVerb::Run(args)) => match args.names.as_slice() {
            [name] => one(find(name)?, args, format),
            names => {
                let found = names.iter().map(|name| find(name)).collect::<Result<Vec<_>, _>>()?;
                several(found.into_iter(), &setup(args), &args.size.show, format)
            }
        },
    }
}

fn list(format: Format) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for e in &EXPERIMENTS {
        if format == Format::Json {
            let parameter = |k: &regard_lab::Parameter| json!({ "name": k.name, "what": k.what, "default": k.full, "quick": k.quick, "least": k.range.0, "most": k.range.1 });
            let parameters: Vec<Value> = e.parameters.iter().map(parameter).collect();
            let faults: BTreeMap<_, _> = e.faults.iter().map(|b| (b.name, b.what)).collect();
            let line = json!({ "id": e.id, "name": e.name, "claim": e.claim, "parameters": parameters, "faults": faults });
            writeln!(out, "{line}")?;
            continue;
        }
        writeln!(out, "{:4} {}", e.id, e.name)?;
        wrapped(&mut out, e.claim, 5)?;
    }
    if format == Format::Text {
        writeln!(
            out,
            "\nregard lab run NAME runs one, regard lab all runs all; --quick takes seconds"
        )?;
    }
    Ok(())
}

fn setup(args: &RunArgs) -> Setup {
    let all = [
        ("dim", args.dim),
        ("heads", args.heads),
        ("length", args.length),
        ("samples", args.samples),
        ("steps", args.steps),
    ];
    let given = all.into_iter().filter_map(|(name, value)| Some((name.to_string(), value?)));
    Setup {
        seed: args.size.seed,
        quick: args.size.quick,
        parameters: given.collect(),
        fault: args.broken.clone(),
    }
}

/// Runs it; on a terminal a line tells how far it is.
fn measured(experiment: &Experiment, setup: &Setup) -> Result<(Report, f64)> {
    let start = Instant::now();
    let bar = RefCell::new(progress(experiment.name)?);
    let watch = |done, all| (bar.borrow_mut())(done, all);
    let report = experiment
        .run_with_progress(setup, &watch)
        .with_context(|| format!("{} {}", experiment.id, experiment.name))?;
    Ok((report, start.elapsed().as_secs_f64()))
}

fn one(experiment: &Experiment, args: &RunArgs, format: Format) -> Result<()> {
    let picture = &args.size.show;
    let target = Target::of(picture.out.as_deref())?;
    if format == Format::Json && target != Target::Terminal {
        bail!(
            "--out and --format json: give one, or run all: regard lab all --out DIR --format json"
        );
    }
    let setup = setup(args);
    let (report, seconds) = measured(experiment, &setup)?;
    if format == Format::Json {
        writeln!(std::io::stdout().lock(), "{}", line(experiment, &setup, &report, seconds))?;
        return failed(&[(experiment, report)]);
    }
    tell(experiment, &setup, &report)?;
    if let (Target::Html, Some(path)) = (target, &picture.out) {
        write_atomically(path, page(experiment, &setup, &report).as_bytes())?;
        told(path)?;
    } else {
        show(&report.picture.scene(&style(picture, target)), picture, target)?;
    }
    let mut out = std::io::stdout().lock();
    wrapped(&mut out, &report.caption, 0)?;
    writeln!(out, "\n{}\n\nto try next:", verdict(&report, &setup, seconds))?;
    for command in experiment.next {
        writeln!(out, "  {command}")?;
    }
    for b in experiment.faults {
        writeln!(out, "  regard lab run {} --inject {}   # {}", experiment.name, b.name, b.what)?;
    }
    drop(out);
    failed(&[(experiment, report)])
}

/// Several, a line each; with `--out DIR` their pictures too.
fn several(
    experiments: impl Iterator<Item = &'static Experiment>,
    setup: &Setup,
    picture: &ShowArgs,
    format: Format,
) -> Result<()> {
    let mut reports = Vec::new();
    for experiment in experiments {
        let (report, seconds) = measured(experiment, setup)?;
        let mut out = std::io::stdout().lock();
        match format {
            Format::Json => writeln!(out, "{}", line(experiment, setup, &report, seconds))?,
            Format::Text => {
                let told = verdict(&report, setup, seconds);
                writeln!(out, "{:4} {:10} {told}", experiment.id, experiment.name)?;
            }
        }
        drop(out);
        if let Some(folder) = &picture.out {
            write(folder, experiment, &report, picture)?;
        }
        reports.push((experiment, report));
    }
    failed(&reports)
}

/// The picture of an experiment into a folder.
fn write(folder: &Path, experiment: &Experiment, report: &Report, args: &ShowArgs) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let scene = report.picture.scene(&style(args, Target::Svg));
    let path = folder.join(format!("{}.svg", experiment.name));
    Ok(write_atomically(&path, svg(&scene).as_bytes())?)
}

/// An error that names what does not hold: the status of the command is the verdict.
fn failed(reports: &[(&Experiment, Report)]) -> Result<()> {
    let failed = reports.iter().filter(|(_, report)| !report.holds());
    let names: Vec<&str> = failed.map(|(experiment, _)| experiment.name).collect();
    if names.is_empty() {
        return Ok(());
    }
    Err(Negative(format!("claims that do not hold: {}", names.join(", "))).into())
}

fn verdict(report: &Report, setup: &Setup, seconds: f64) -> String {
    let checked = || report.results.iter().filter(|f| f.is_checked());
    let good = checked().filter(|f| f.holds()).count();
    let holds = if report.holds() { "holds" } else { "DOES NOT HOLD" };
    let fault = setup.fault.as_ref().map_or_else(String::new, |b| format!(", fault {b}"));
    let (all, seed) = (checked().count(), setup.seed);
    format!(
        "{holds}: {good} of {all} numbers are as predicted ({seconds:.1} s, seed {seed}{fault})"
    )
}

fn line(experiment: &Experiment, setup: &Setup, report: &Report, seconds: f64) -> Value {
    let result = |f: &ExperimentResult| {
        let finite = |x: f64| x.is_finite().then_some(x);
        json!({
            "what": f.what, "predicted": finite(f.predicted), "measured": finite(f.measured),
            "tolerance": f.tolerance.words(), "checked": f.is_checked(), "holds": f.holds(),
        })
    };
    json!({
        "id": experiment.id, "name": experiment.name, "claim": experiment.claim, "holds": report.holds(),
        "seed": setup.seed, "quick": setup.quick, "parameters": setup.parameters, "fault": setup.fault,
        "results": report.results.iter().map(result).collect::<Vec<_>>(),
        "caption": report.caption, "seconds": (seconds * 10.0).round() / 10.0,
    })
}

/// The claim and the table of what was found.
fn tell(experiment: &Experiment, setup: &Setup, report: &Report) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{} {}", experiment.id, experiment.name)?;
    wrapped(&mut out, experiment.claim, 0)?;
    if let Some(name) = &setup.fault {
        let what = experiment.faults.iter().find(|b| b.name == name).map_or("", |b| b.what);
        writeln!(out, "fault {name}: {what}")?;
    }
    let (what, predicted, measured) = ("", "predicted", "measured");
    writeln!(out, "\n  {what:WHAT$} {predicted:>9} {measured:>9}  {:11} holds", "tolerance")?;
    for f in &report.results {
        let (predicted, measured) = (number(f.predicted), number(f.measured));
        let holds = match (f.is_checked(), f.holds()) {
            (false, _) => "-",
            (true, true) => "yes",
            (true, false) => "NO",
        };
        // One that is too long for its column stands on a line of its own.
        let mut what = f.what.as_str();
        if what.chars().count() > WHAT {
            writeln!(out, "  {what}")?;
            what = "";
        }
        let tolerance = f.tolerance.words();
        writeln!(out, "  {what:WHAT$} {predicted:>9} {measured:>9}  {tolerance:11} {holds}")?;
    }
    writeln!(out)?;
    Ok(())
}

/// Words in lines of at most 80 columns.
fn wrapped(out: &mut impl Write, text: &str, indent: usize) -> Result<()> {
    let mut line = String::new();
    for word in text.split(' ') {
        if !line.is_empty() && indent + line.chars().count() + 1 + word.chars().count() > 80 {
            writeln!(out, "{:indent$}{line}", "")?;
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    writeln!(out, "{:indent$}{line}", "")?;
    Ok(())
}
