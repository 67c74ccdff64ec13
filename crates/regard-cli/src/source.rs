//! What the microscope looks at: a trace, or queries and keys from NumPy.

use crate::args::SourceArgs;
#[cfg(feature = "models")]
use crate::models::{look, look_at_image};
use crate::say;
use crate::text;
use anyhow::{Context, Result, anyhow, bail};
use indicatif::ProgressBar;
use regard::Machine;
use regard_scope::{Inputs, Labels, Layer, LayerData, Trace, parse_mask, read_npy};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Reads a trace, or makes one.
pub(crate) fn read(args: &SourceArgs) -> Result<Trace> {
    weighted(read_plain(args)?, args)
}

/// Reads the trace that another one is compared with.
pub(crate) fn read_against(path: &Path, args: &SourceArgs) -> Result<Trace> {
    weighted(read_trace(path)?, args)
}

fn weighted(trace: Trace, args: &SourceArgs) -> Result<Trace> {
    if !args.value_weighted {
        return Ok(trace);
    }
    trace.value_weighted(Machine::detect()).map_err(|e| anyhow!("--value-weighted: {e}"))
}

fn read_plain(args: &SourceArgs) -> Result<Trace> {
    if args.target.is_some()
        && !matches!(args.files.as_slice(), [model, _] if !has_ending(model, "npy"))
    {
        bail!("--target: give a model that translates, and a text");
    }
    if let Some(image) = &args.image {
        if let Some(flag) = flag_of_arrays(args) {
            bail!("{flag}: only for .npy files; a model defines it");
        }
        let [model] = args.files.as_slice() else {
            bail!("--image: give a model that reads images, and no text");
        };
        return look_at_image(model, image, args.value_weighted);
    }
    match args.files.as_slice() {
        [trace] if has_ending(trace, "npy") => {
            bail!("{}: keys are missing; give two files, q.npy k.npy", trace.display())
        }
        [trace] => {
            if let Some(flag) = flag_of_arrays(args) {
                bail!("{flag}: only for .npy files; a trace contains it");
            }
            read_trace(trace)
        }
        [q, k] if has_ending(q, "npy") && has_ending(k, "npy") => of_arrays(q, k, args),
        [model, text] if !has_ending(model, "npy") => {
            if let Some(flag) = flag_of_arrays(args) {
                bail!("{flag}: only for .npy files; a model defines it");
            }
            let text = text.to_str().ok_or_else(|| anyhow!("the text is not UTF-8"))?;
            look(model, text, args.target.as_deref(), args.value_weighted)
        }
        _ => bail!(
            "give one trace (.safetensors), a model and a text, or queries and keys, as in q.npy k.npy"
        ),
    }
}

#[cfg(not(feature = "models"))]
fn look(model: &Path, _: &str, _: Option<&str>, _: bool) -> Result<Trace> {
    bail!(
        "{}: a model and a text: this program was built without models; {}",
        model.display(),
        crate::args::remedy("models")
    )
}

#[cfg(not(feature = "models"))]
fn look_at_image(model: &Path, _: &Path, _: bool) -> Result<Trace> {
    look(model, "", None, false)
}

/// A flag that only arrays need, if one is given.
fn flag_of_arrays(args: &SourceArgs) -> Option<&'static str> {
    let flags = [
        (args.mask.is_some(), "--mask"),
        (args.scale.is_some(), "--scale"),
        (args.q_labels.is_some(), "--q-labels"),
        (args.k_labels.is_some(), "--k-labels"),
    ];
    flags.into_iter().find_map(|(given, flag)| given.then_some(flag))
}

/// Reads a trace.
pub(crate) fn read_trace(path: &Path) -> Result<Trace> {
    let trace = Trace::load(path, Machine::detect())?;
    if trace.layers.is_empty() {
        bail!("{}: the trace holds no layers", path.display());
    }
    Ok(trace)
}

/// A part of a text: its name, its positions.
pub(crate) type Span = (String, Range<usize>);

/// A line for each span: a name without spaces, and positions from 0 on, `A..B` or `A..` up to the last one.
pub(crate) fn spans(file: &Path) -> Result<Vec<Span>> {
    let wanted = "give a name and positions, as in: context 40..900";
    let text = text::read(file, text::WORDS)?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parsed = lines.map(|(i, line)| {
        let parse = || {
            let (name, range) = line.trim().rsplit_once(char::is_whitespace)?;
            let (start, end) = range.split_once("..")?;
            let end = if end.is_empty() { usize::MAX } else { end.parse().ok()? };
            let range = start.parse().ok()?..end;
            (range.start <= range.end).then(|| (name.trim().to_owned(), range))
        };
        parse().ok_or_else(|| anyhow!("line {}: {:?}: {wanted}", i + 1, line.trim()))
    });
    let spans: Vec<Span> =
        parsed.collect::<Result<_>>().with_context(|| file.display().to_string())?;
    if spans.is_empty() {
        bail!("{}: no spans; {wanted}", file.display());
    }
    Ok(spans)
}

/// Names parts of the text of a trace: positions of every axis of keys.
pub(crate) fn name_spans(trace: &mut Trace, spans: &[Span]) {
    for layer in &trace.layers {
        if let Some(axis) = trace.axes.get_mut(&layer.cols) {
            axis.spans = spans.to_vec();
        }
    }
}

pub(crate) fn has_ending(path: &Path, ending: &str) -> bool {
    path.extension().is_some_and(|own| own.eq_ignore_ascii_case(ending))
}

fn of_arrays(q_path: &Path, k_path: &Path, args: &SourceArgs) -> Result<Trace> {
    let read = |path: &Path| array(path).with_context(|| path.display().to_string());
    let ((q, q_shape), (k, k_shape)) = (read(q_path)?, read(k_path)?);
    let mask = args.mask.clone().unwrap_or_else(|| "full".into());
    parse_mask(&mask).map_err(|e| anyhow!("--mask: {e}"))?;
    let scale = args.scale;
    let heads = Inputs { q, k, q_shape, k_shape, mask, scale, ..Inputs::default() };
    // Draws on a terminal only.
    let busy = say::bar(ProgressBar::new_spinner());
    busy.set_message(format!("lse of {} queries", q_shape[1]));
    busy.enable_steady_tick(Duration::from_millis(100));
    let heads = heads.with_lse(Machine::detect())?;
    busy.finish_and_clear();
    Ok(trace_of_arrays(args, labels(args, [q_shape[1], k_shape[1]])?, LayerData::Inputs(heads)))
}

/// What so many queries and keys of arrays stand for.
pub(crate) fn labels(args: &SourceArgs, [queries, keys]: [usize; 2]) -> Result<[Labels; 2]> {
    let q_labels = args.q_labels.as_deref().map(words).transpose()?;
    let k_labels = args.k_labels.as_deref().map(words).transpose()?;
    let k_labels = k_labels.or_else(|| q_labels.clone().filter(|words| words.len() == keys));
    let labels = |name: &str, words: Option<Vec<String>>, len: usize| match words {
        Some(words) if words.len() != len => Err(anyhow!(
            "{name} words: the file has {}, the array has {len}; they must be equal",
            words.len()
        )),
        Some(words) => Ok(Labels::new(name, words)),
        None => Ok(Labels::counted(name, len)),
    };
    Ok([labels("query", q_labels, queries)?, labels("key", k_labels, keys)?])
}

/// A trace of one attention, that of two arrays.
pub(crate) fn trace_of_arrays(args: &SourceArgs, labels: [Labels; 2], data: LayerData) -> Trace {
    let [q_labels, k_labels] = labels;
    let axes = BTreeMap::from([("query".to_string(), q_labels), ("key".to_string(), k_labels)]);
    let (rows, cols) = ("query".into(), "key".into());
    let (kind, value_norms) = ("attention".into(), Vec::new());
    let layers = vec![Layer { layer: 0, kind, rows, cols, data, value_norms }];
    let name = |path: &PathBuf| {
        path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
    };
    let names: Vec<String> = args.files.iter().map(name).collect();
    Trace { title: names.join(" "), axes, layers, ..Trace::default() }
}

fn words(path: &Path) -> Result<Vec<String>> {
    Ok(text::read(path, text::WORDS)?.lines().map(Into::into).collect())
}

fn array(path: &Path) -> Result<(Vec<f32>, [usize; 3])> {
    let file = File::open(path)?;
    let about = file.metadata()?;
    Ok(read_npy(BufReader::new(file), about.is_file().then_some(about.len()))?)
}
