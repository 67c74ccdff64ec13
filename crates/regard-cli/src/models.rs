//! `regard models`: what is known by name, whether it is here, how to get it.

use crate::args::{Format, ModelsArgs};
use crate::model::{busy, cache, names};
use anyhow::{Result, anyhow};
use regard_models::files::{KNOWN, Known, Origin};
use serde_json::json;
use std::io::Write;

pub(crate) fn run(args: &ModelsArgs, format: Format) -> Result<()> {
    let (base, mut out) = (cache()?, std::io::stdout().lock());
    if let Some(name) = &args.get {
        let known = Known::named(name)
            .ok_or_else(|| anyhow!("{name}: not known; there are {}", names()))?;
        let busy = busy(format!("{}: {} MB", known.name, known.size / 1_000_000));
        let path = known.fetch(&base, &args.python)?;
        busy.finish_and_clear();
        writeln!(out, "{}", path.display())?;
        return Ok(());
    }
    for known in KNOWN {
        let path = known.path(&base);
        let how = match known.origin {
            Origin::Package { .. } => format!("regard models --get {}", known.name),
            Origin::Folder { from } => {
                format!("copy it from {from} to {}", base.join(known.name).display())
            }
        };
        if format == Format::Json {
            let line = json!({
                "name": known.name, "what": known.what, "parameters": known.parameters, "licence": known.licence,
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
            known.licence
        )?;
        match path {
            Some(path) => writeln!(out, "{:12} here: {}", "", path.display())?,
            None => writeln!(out, "{:12} to get it: {how}", "")?,
        }
    }
    Ok(())
}
