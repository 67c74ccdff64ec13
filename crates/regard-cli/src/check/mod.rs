//! `regard check`: the case table against the definition, on the user's own machine; or a server against itself.

#[cfg(feature = "serve")]
mod served;

use crate::args::{CheckArgs, Format};
use crate::say;
use crate::status::Negative;
use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use regard_testkit::{Report, THREADS};
use serde_json::json;
use std::io::Write;

pub(crate) fn run(args: &CheckArgs, format: Format) -> Result<()> {
    #[cfg(feature = "serve")]
    if !args.serve.is_empty() {
        return served::run(args, format);
    }
    #[cfg(not(feature = "serve"))]
    if !args.serve.is_empty() {
        anyhow::bail!("--serve: built without the server; {}", crate::args::remedy("serve"));
    }
    let cases = regard_testkit::cases();
    // Draws on a terminal only.
    let progress = say::bar(ProgressBar::new(cases.len() as u64));
    progress.set_style(ProgressStyle::with_template(
        "{wide_bar} {pos}/{len} rows [{elapsed}, {eta} left]",
    )?);
    let report = regard_testkit::check(&cases, &mut |done, _| progress.set_position(done as u64));
    progress.finish_and_clear();
    let mut out = std::io::stdout().lock();
    match format {
        Format::Text => writeln!(out, "{report}")?,
        Format::Json => print_lines(&report, &mut out)?,
    }
    if !report.is_green() {
        let wrong = report.failures.len();
        let why = format!(
            "{wrong} runs are wrong here; please report them with the output of `regard info`"
        );
        return Err(Negative(why).into());
    }
    Ok(())
}

/// A line for each option, one for each failure, and one for the whole.
fn print_lines(report: &Report, out: &mut impl Write) -> Result<()> {
    for (name, group) in &report.groups {
        let (rows, worst) = (group.rows, group.worst);
        let line = json!({
            "option": name, "rows": rows, "worst_case": group.case,
            "of_bound_out": worst.out, "of_bound_lse": worst.lse,
            "of_bound_entropy": worst.entropy, "of_bound_grads": worst.grads,
        });
        writeln!(out, "{line}")?;
    }
    for failure in &report.failures {
        let line = json!({
            "failed": failure.case, "isa": failure.isa, "threads": failure.threads, "why": failure.why,
        });
        writeln!(out, "{line}")?;
    }
    let failures = report.failures.len();
    let line = json!({
        "rows": report.rows, "isas": report.isas, "threads": THREADS, "failures": failures,
    });
    writeln!(out, "{line}")?;
    Ok(())
}
