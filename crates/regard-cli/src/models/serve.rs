//! `regard serve`: models behind an HTTP API.

use super::args::ServeArgs;
use super::open;
use anyhow::{Context, Result, bail};
use regard_serve::{NamedModel, Options, ServeError};
use std::io::Write;
use std::path::{Path, PathBuf};
use tracing_subscriber::filter::LevelFilter;

pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    let models = args.models.iter().map(|typed| named(typed)).collect::<Result<Vec<_>>>()?;
    let options = Options {
        listen: args.listen,
        keys: args.key_file.as_deref().map(keys).transpose()?.unwrap_or_default(),
        max_queued: args.max_queued,
        max_queued_tokens: args.max_queued_tokens,
        max_tokens: args.max_tokens,
        max_batch: args.max_batch,
        timeout: args.timeout,
        kv_memory: args.kv_memory,
        prefix_cache: !args.no_prefix_cache,
        attention: args.attention,
        drain_delay: args.drain_delay,
        drain: args.drain,
        engines: args.engines,
        threads: args.threads,
        ..Options::default()
    };
    // Who has set a subscriber before wants to keep it.
    let _set = tracing_subscriber::fmt()
        .with_max_level(if crate::say::is_verbose() {
            LevelFilter::INFO
        } else {
            LevelFilter::WARN
        })
        .with_writer(std::io::stderr)
        .with_target(false)
        .try_init();
    let kv_dtype = args.kv.dtype;
    let opening = move || {
        let open = |(name, path): (String, PathBuf)| {
            let mut model = open::open(&path).map_err(|e| ServeError::Model(crate::chain(&e)))?;
            model.set_kv_dtype(kv_dtype);
            Ok(NamedModel { name, model })
        };
        models.into_iter().map(open).collect()
    };
    let listening = |address| {
        // Whoever started it may not read; it serves all the same.
        let _gone = writeln!(std::io::stdout(), "http://{address}")
            .and_then(|()| std::io::stdout().flush());
    };
    Ok(regard_serve::serve(options, opening, listening)?)
}

/// The name of a model and where it is: `NAME=PATH`, or a path whose stem is the name.
fn named(typed: &str) -> Result<(String, PathBuf)> {
    let (name, path) = match typed.split_once('=') {
        Some((name, path)) => (name.to_owned(), Path::new(path)),
        None => {
            let path = Path::new(typed);
            // Names of the Hub are their own; of a file, the ending is no part of its name.
            let is_file =
                path.extension().is_some_and(|ending| ending == "gguf" || ending == "safetensors");
            let stem = if is_file { path.file_stem() } else { path.file_name() };
            let stem = if path.exists() { stem } else { Some(path.as_os_str()) };
            (stem.map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default(), path)
        }
    };
    if name.is_empty() || path.as_os_str().is_empty() {
        bail!("{typed}: a model has a name and a path; give PATH, or NAME=PATH");
    }
    Ok((name, path.to_owned()))
}

/// One key a line.
fn keys(path: &Path) -> Result<Vec<String>> {
    let what = || format!("--key-file {}", path.display());
    let text = std::fs::read_to_string(path).with_context(what)?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let keys: Vec<String> = lines.map(str::to_owned).collect();
    match keys
        .iter()
        .position(|key| key.len() < SHORTEST || !key.bytes().all(|c| c.is_ascii_graphic()))
    {
        Some(at) => bail!(
            "{}: key {}: a key has {SHORTEST} characters at least, of ASCII and without spaces",
            what(),
            at + 1
        ),
        None if keys.is_empty() => bail!("{}: no key; give one a line", what()),
        None => Ok(keys),
    }
}

/// Characters of a key, at least: shorter ones are guessed.
const SHORTEST: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_has_the_name_that_is_given_or_that_of_its_file() {
        let name = |typed| named(typed).map(|(name, _)| name).map_err(|e| e.to_string());
        assert_eq!(name("chat=models/a.gguf").as_deref(), Ok("chat"));
        assert_eq!(name("smollm2").as_deref(), Ok("smollm2"));
        assert_eq!(name("org/name").as_deref(), Ok("org/name"));
        assert_eq!(name(env!("CARGO_MANIFEST_DIR")).as_deref(), Ok("regard-cli"));
        assert!(name("=x").is_err() && name("x=").is_err());
    }
}
