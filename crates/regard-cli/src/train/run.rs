//! `regard train`: learns from files, shows how it goes, and can be stopped and gone on with.

use super::args::TrainArgs;
use crate::args::{Format, MpiArgs};
use crate::ranks::on_ranks;
use crate::say::{self, say};
use crate::status::Refused;
use anyhow::{Context, Result, bail};
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use regard_scope::printable;
use regard_train::{
    Callback, Run, RunOutcome, Settings, Size, StepMetrics, SummaryWriter, Trainer,
    ValidationMetrics, preset,
};
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Steps that an estimate is made of; the first warms up.
const TRIAL: u32 = 3;

pub(crate) fn run(args: &TrainArgs, format: Format) -> Result<()> {
    regard_burn::keep_heap();
    if args.dry_run {
        return estimate(&settings(args)?, format);
    }
    on_ranks(args.mpi, |ranks| {
        let begun = (ranks.rank() == 0).then(|| begin(args, ranks.count())).transpose();
        let started = begun.and_then(|begun| Ok(Trainer::among(ranks, begun)?));
        let (trainer, run) = started.map_err(|error| refused_at_start(args.mpi, error))?;
        go(trainer, run, args.tensorboard, format)
    })
}

/// An error before the first step of a job: to start it again would not help, unless it is one of communication.
fn refused_at_start(args: MpiArgs, error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref() {
        Some(regard_train::Error::Ranks(ranks)) if !ranks.is_refusal() => error,
        _ if args.mpi => Refused(crate::chain(&error)).into(),
        _ => error,
    }
}

/// A new run, or one that goes on.
fn begin(args: &TrainArgs, ranks: usize) -> Result<(Trainer, Run)> {
    if let Some(path) = &args.resume {
        if args.settings.is_some() || args.preset.is_some() || !args.set.is_empty() {
            bail!("--resume {}: a run goes on as it began; its settings are there", path.display());
        }
        return Ok(Trainer::resume(path)?);
    }
    let settings = settings(args)?;
    let Some(out) = &args.out else {
        bail!("--out: run directory required, for example --out runs/zh-en; or use --dry-run");
    };
    settings.refuse_more_ranks(ranks)?;
    Ok(Trainer::create(out, &settings)?)
}

/// A preset or a file, with what was changed.
fn settings(args: &TrainArgs) -> Result<Settings> {
    let text = match (&args.preset, &args.settings) {
        (Some(name), None) => preset(name)?.to_owned(),
        (None, Some(file)) => regard_train::data::text(file)?,
        _ => bail!("name a preset or a file: regard train --preset tatoeba-zh-en --out DIR"),
    };
    let mut changes = args.set.clone();
    let own = match &args.preset {
        Some(name) if args.data.is_none() => Some(folder_of(name, &text, &args.set)?),
        _ => None,
    };
    if let Some(folder) = args.data.as_ref().or(own.as_ref()) {
        // Whole, so that the run can go on from anywhere. A text of JSON is one of TOML too.
        let folder = std::path::absolute(folder).with_context(|| folder.display().to_string())?;
        let folder = serde_json::to_string(&folder.display().to_string())?;
        changes.push(format!("data.folder={folder}"));
    }
    Ok(Settings::new(&text, &changes)?)
}

/// The data of a preset, which are part of the repository.
fn folder_of(name: &str, text: &str, changes: &[String]) -> Result<PathBuf> {
    let folder = PathBuf::from(Settings::new(text, changes)?.data.folder);
    if !folder.is_dir() {
        bail!(
            "{}: the data of {name} are not here; they are part of Regard's repository (data/get-multi30k makes Multi30k): \
             work in a clone of it, or give --data DIR",
            folder.display()
        );
    }
    Ok(folder)
}

/// What a run would be: sizes, memory, time.
fn estimate(settings: &Settings, format: Format) -> Result<()> {
    let mut trainer = Trainer::new(settings)?;
    trainer.step()?;
    let start = Instant::now();
    for _ in 1..TRIAL {
        trainer.step()?;
    }
    let step = start.elapsed().as_secs_f64() / f64::from(TRIAL - 1);
    let Size { parameters, vocabulary, examples, validation, left_out, batches, steps } =
        trainer.size();
    let (seconds, memory) = (step * steps as f64, peak_memory());
    let mut out = std::io::stdout().lock();
    if format == Format::Json {
        let line = json!({
            "parameters": parameters, "vocabulary": vocabulary, "examples": examples, "validation": validation, "left_out": left_out,
            "batches": batches, "steps": steps, "seconds_a_step": step, "seconds": seconds, "peak_bytes": memory,
        });
        writeln!(out, "{line}")?;
        return Ok(());
    }
    let tables: Vec<String> = vocabulary.iter().map(ToString::to_string).collect();
    writeln!(out, "parameters   {parameters}")?;
    writeln!(out, "vocabulary   {}", tables.join(" + "))?;
    let left = if left_out > 0 { format!("; {left_out} too long") } else { String::new() };
    writeln!(out, "examples     {examples}, and {validation} for validation{left}")?;
    writeln!(out, "steps        {steps}, {batches} batches an epoch")?;
    if let Some(bytes) = memory {
        writeln!(out, "memory       {:.2} GB at most in {TRIAL} steps", bytes as f64 / 1e9)?;
    }
    let whole = HumanDuration(Duration::from_secs_f64(seconds));
    writeln!(out, "time         {whole} without validations, {:.0} ms a step here", step * 1e3)?;
    Ok(())
}

/// The most memory that this process had, where the system tells.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

/// Whether the process was begun with a signal that is to be ignored, as `nohup` does; where the system tells.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// A flag that signals set: the run leaves a checkpoint and ends.
fn stopped_by_signals() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the second signal finds the flag that the first has set.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, stop.clone())?;
        signal_hook::flag::register(signal, stop.clone())?;
    }
    // A terminal that is closed may say so twice, so the second does not end the run at once.
    if !is_ignored(SIGHUP) {
        signal_hook::flag::register(SIGHUP, stop.clone())?;
    }
    Ok(stop)
}

/// What there is of a run that has come to its end.
fn already(trainer: &Trainer, run: &Run, ended: RunOutcome) -> Result<()> {
    let (progress, steps) = (trainer.progress(), trainer.size().steps);
    let file = run.settings_file();
    let (why, remedy) = if ended == RunOutcome::EarlyStopped {
        (format!("nothing got better in {} validations", progress.waited), "training.patience")
    } else {
        let step = progress.step;
        (format!("{step} steps are made, and {steps} were asked for"), "training.steps or epochs")
    };
    let more = format!("to go on, raise {remedy} in {}", file.display());
    match (run.model(), progress.best.first()) {
        (Some(model), Some(best)) => {
            let (step, model) = (best.step, model.display());
            say(format_args!(
                "nothing to do: {why}; the best weights are of step {step}: {model}; {more}"
            ));
            Ok(())
        }
        _ => bail!("{}: {why}, and there is no model yet; {more}", run.path().display()),
    }
}

/// Trains to the end, or until a signal. Rank 0 has the run, and tells how it goes.
fn go(mut trainer: Trainer, run: Option<Run>, tensorboard: bool, format: Format) -> Result<()> {
    let stop = stopped_by_signals()?;
    let Some(mut run) = run else {
        trainer.train(None, &mut Silent(stop))?;
        return Ok(());
    };
    if let Some(ended) = trainer.outcome() {
        return already(&trainer, &run, ended);
    }
    let size = trainer.size();
    say(format_args!(
        "{} parameters, {} examples, step {} of {}; {}",
        size.parameters,
        size.examples,
        trainer.progress().step,
        size.steps,
        run.path().display()
    ));
    let warmup = trainer.settings().training.warmup;
    if warmup > size.steps {
        say(format_args!(
            "warning: the warm-up of {warmup} steps is longer than the run of {} steps, so the learning rate never reaches training.lr; \
             set training.warmup to less than {}",
            size.steps, size.steps
        ));
    }
    let bar = say::bar(ProgressBar::new(size.steps)).with_style(ProgressStyle::with_template(
        "{bar:24} {pos}/{len} {msg} {elapsed_precise} ETA {eta}",
    )?);
    bar.set_position(trainer.progress().step);
    bar.reset_eta();
    let terminal = std::io::stderr().is_terminal();
    let summary =
        tensorboard.then(|| SummaryWriter::create(&run.path().join("tensorboard"))).transpose()?;
    let mut screen = Screen { bar, terminal, format, stop, steps: size.steps, summary };
    let ended = trainer.train(&mut run, &mut screen)?;
    screen.bar.finish_and_clear();
    let progress = trainer.progress();
    match ended {
        RunOutcome::Interrupted => say(format_args!(
            "stopped at step {}; resume with: regard train --resume {}",
            progress.step,
            run.path().display()
        )),
        RunOutcome::Completed | RunOutcome::EarlyStopped => {
            let why = if ended == RunOutcome::Completed {
                "all steps made"
            } else {
                "nothing got better"
            };
            let best = progress.best.first().map_or(0, |best| best.step);
            say(format_args!(
                "{why}: {} steps in {:.0} s; the best weights are of step {best}: {}",
                progress.step,
                trainer.seconds(),
                run.path().join("model").display()
            ));
        }
    }
    Ok(())
}

/// What ranks other than 0 show.
struct Silent(Arc<AtomicBool>);

impl Callback for Silent {
    fn on_step(&mut self, _: &StepMetrics) {}

    fn on_validation(&mut self, _: &ValidationMetrics) {}

    fn should_stop(&mut self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A bar on a terminal, lines elsewhere.
struct Screen {
    bar: ProgressBar,
    terminal: bool,
    format: Format,
    stop: Arc<AtomicBool>,
    steps: u64,
    summary: Option<SummaryWriter>,
}

impl Screen {
    fn draw(&mut self, step: u64, numbers: &[(&str, f64)]) {
        // A picture that cannot be drawn is no reason to end a run.
        if let Some(Err(error)) =
            self.summary.as_mut().map(|summary| summary.scalars(step, numbers))
        {
            self.summary = None;
            self.say(&format!("no more events for TensorBoard: {error}"));
        }
    }

    fn say(&self, line: &str) {
        if self.terminal {
            self.bar.println(printable(line));
        } else {
            say(line);
        }
    }

    /// A line of metrics, with the times that those of the run leave out.
    fn json(&self, line: &impl serde::Serialize, times: &[(&str, f64)]) {
        if self.format == Format::Json
            && let Ok(serde_json::Value::Object(mut line)) = serde_json::to_value(line)
        {
            line.extend(times.iter().map(|(name, number)| ((*name).to_owned(), json!(number))));
            let line = serde_json::Value::Object(line);
            // Whoever read us may have gone; the run goes on, and its metrics are in its directory.
            let _ = writeln!(std::io::stdout().lock(), "{line}");
        }
    }
}

impl Callback for Screen {
    fn on_step(&mut self, report: &StepMetrics) {
        let StepMetrics {
            step,
            epoch,
            loss,
            perplexity,
            lr,
            grad_norm,
            tokens_per_second,
            seconds,
        } = report;
        let times = [("tokens_per_second", *tokens_per_second), ("seconds", *seconds)];
        self.json(report, &times);
        let numbers = [
            ("loss", *loss),
            ("lr", *lr),
            ("grad_norm", *grad_norm),
            ("tokens_per_second", *tokens_per_second),
        ];
        self.draw(*step, &numbers);
        let message = format!(
            "epoch {epoch:.2}  loss {loss:.3}  perplexity {perplexity:.1}  {tokens_per_second:.0} tokens/s"
        );
        self.bar.set_position(*step);
        if self.terminal {
            self.bar.set_message(message);
        } else {
            say(format_args!("step {step}/{}  {message}", self.steps));
        }
    }

    fn on_validation(&mut self, report: &ValidationMetrics) {
        self.json(report, &[("seconds", report.seconds)]);
        let mut numbers = vec![("validation/loss", report.validation_loss)];
        numbers.extend(report.score.map(|score| ("validation/score", score)));
        let heads: Vec<_> = report
            .heads
            .iter()
            .map(|head| {
                (
                    format!("entropy/{}-{}-{}", head.site.kind, head.site.layer, head.site.head),
                    head.entropy,
                )
            })
            .collect();
        numbers.extend(heads.iter().map(|(name, entropy)| (name.as_str(), *entropy)));
        self.draw(report.step, &numbers);
        let score = report.score.map_or_else(String::new, |score| format!("  score {score:.2}"));
        self.say(&format!(
            "validation at step {}: loss {:.3}  perplexity {:.2}{score}{}",
            report.step,
            report.validation_loss,
            report.validation_perplexity,
            if report.best { "  (best)" } else { "" }
        ));
        for sample in report.samples.iter().take(1) {
            self.say(&format!("    {} -> {}", sample.source, sample.output));
        }
    }

    fn should_stop(&mut self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}
