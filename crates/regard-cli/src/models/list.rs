//! `regard models`: what is known by name, whether it is here, how to get it.

use super::args::ModelsVerb;
use super::open::{busy, cache, how, hub_of_env, installed, is_hub_name, names};
use super::shipped::{SHIPPED, Shipped};
use crate::args::Format;
use anyhow::{Result, anyhow, bail};
use regard_models::files::{KNOWN_MODELS, KnownModel, hub};
use regard_scope::printable;
use serde_json::json;
use std::io::Write;

pub(crate) fn run(what: Option<&ModelsVerb>, format: Format) -> Result<()> {
    match what {
        None | Some(ModelsVerb::List) => list(format),
        Some(ModelsVerb::Get { names, revision, offline, python }) => {
            names.iter().try_for_each(|name| match is_hub_name(name) {
                true => get_of_hub(name, revision, *offline),
                false => get(name, python),
            })
        }
        Some(ModelsVerb::Rm { name }) => {
            let path = named(name)?.remove(&cache()?)?;
            Ok(writeln!(std::io::stdout().lock(), "removed {}", path.display())?)
        }
        Some(ModelsVerb::Path { name }) => {
            Ok(writeln!(std::io::stdout().lock(), "{}", installed(named(name)?)?.display())?)
        }
    }
}

/// A model that is kept as files.
fn named(name: &str) -> Result<&'static KnownModel> {
    if Shipped::named(name).is_some() {
        bail!("{name}: part of the program, not a file");
    }
    KnownModel::named(name)
        .ok_or_else(|| anyhow!("{name}: unknown model; known models: {}", names()))
}

fn get(name: &str, python: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if Shipped::named(name).is_some() {
        return Ok(writeln!(out, "{name} is part of the program")?);
    }
    let known = named(name)?;
    let busy = busy(format!("{}: {} MB", known.name, known.size / 1_000_000));
    let path = known.fetch(&cache()?, python);
    busy.finish_and_clear();
    Ok(writeln!(out, "{}", path?.display())?)
}

/// Downloads a model of the Hub, or one file of it.
fn get_of_hub(name: &str, revision: &str, offline: bool) -> Result<()> {
    let (repo, file) = hub::split(name);
    let mut hub = hub_of_env()?;
    hub.offline |= offline;
    let busy = busy(format!("{name}: asking the Hub"));
    let path = hub.fetch(repo, file, revision, &mut |file, done, total| {
        let file = printable(file);
        busy.set_message(format!("{file}: {} of {} MB", done / 1_000_000, total / 1_000_000));
    });
    busy.finish_and_clear();
    Ok(writeln!(std::io::stdout().lock(), "{}", path?.display())?)
}

fn list(format: Format) -> Result<()> {
    let mut out = std::io::stdout().lock();
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
        let how = how(known, &base);
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
