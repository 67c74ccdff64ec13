//! `regard models`: what is known by name, whether it is here, how to get it.

use super::args::ListArgs;
use super::open::{busy, cache, names};
use super::shipped::{SHIPPED, Shipped};
use crate::args::Format;
use anyhow::{Result, anyhow};
use regard_models::files::{KNOWN_MODELS, KnownModel, Origin};
use serde_json::json;
use std::io::Write;

pub(crate) fn run(args: &ListArgs, format: Format) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if let Some(name) = &args.get {
        if Shipped::named(name).is_some() {
            writeln!(out, "{name} is part of the program")?;
            return Ok(());
        }
        let base = cache()?;
        let known = KnownModel::named(name)
            .ok_or_else(|| anyhow!("{name}: unknown model; known models: {}", names()))?;
        let busy = busy(format!("{}: {} MB", known.name, known.size / 1_000_000));
        let path = known.fetch(&base, &args.python)?;
        busy.finish_and_clear();
        writeln!(out, "{}", path.display())?;
        return Ok(());
    }
    for own in SHIPPED {
        let (parameters, bytes) = own.size()?;
        if format == Format::Json {
            let line = json!({
                "name": own.name, "what": own.what, "parameters": parameters, "license": own.license, "bytes": bytes,
                "path": null, "how": "part of the program",
            });
            writeln!(out, "{line}")?;
            continue;
        }
        writeln!(out, "{:12} {}", own.name, own.what)?;
        let (millions, megabytes) = (parameters as f64 / 1e6, bytes as f64 / 1e6);
        writeln!(out, "{:12} {millions:.1} M parameters, {megabytes:.1} MB, {}", "", own.license)?;
        writeln!(out, "{:12} here: part of the program", "")?;
    }
    let base = cache()?;
    for known in KNOWN_MODELS {
        let path = known.path(&base);
        let how = match known.origin {
            Origin::Package { .. } => format!("regard models --get {}", known.name),
            Origin::Folder { from } => {
                format!("copy it from {from} to {}", base.join(known.name).display())
            }
        };
        if format == Format::Json {
            let line = json!({
                "name": known.name, "what": known.what, "parameters": known.parameters, "license": known.license,
                "bytes": known.size, "path": path, "how": how,
            });
            writeln!(out, "{line}")?;
            continue;
        }
        writeln!(out, "{:12} {}", known.name, known.what)?;
        writeln!(
            out,
            "{:12} {:.1} M parameters, {:.1} MB, {}",
            "",
            known.parameters as f64 / 1e6,
            known.size as f64 / 1e6,
            known.license
        )?;
        match path {
            Some(path) => writeln!(out, "{:12} here: {}", "", path.display())?,
            None => writeln!(out, "{:12} to get it: {how}", "")?,
        }
    }
    Ok(())
}
