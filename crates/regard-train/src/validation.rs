//! How good a model is: its loss, what it writes, and what its heads look at.

use crate::corpus::Corpus;
use crate::data::Pair;
use crate::error::Error;
use crate::optim::{Snapshot, numbers};
use crate::score::{Bleu, Chrf, Tokenize};
use crate::settings::{Settings, Task};
use crate::trainable_model::{Batch, TrainableModel};
use burn::tensor::Device;
use half::f16;
use regard::Machine;
use regard_models::files::{Config, ModelFiles, Weights};
use regard_models::generate::DecodingStrategy;
use regard_models::{Model, Pass};
use regard_ranks::{Ranks, gather, gather_varied, share, shares};
use regard_scope::{HeadStats, stats};
use serde::Serialize;
use std::collections::BTreeMap;

/// A validation, as metrics have it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ValidationMetrics {
    /// After which step.
    pub step: u64,
    /// The mean loss of an answer, without smoothing.
    pub validation_loss: f64,
    /// `e^loss`
    pub validation_perplexity: f64,
    /// BLEU of translations, or the share of classes that are right, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub score: Option<f64>,
    /// chrF of translations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chrf: Option<f64>,
    /// Whether nothing was better before.
    pub best: bool,
    /// Seconds of work since the run began. With the times, not with the metrics.
    #[serde(skip)]
    pub seconds: f64,
    /// Some translations.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub samples: Vec<Sample>,
    /// What each head did in these, in the mean.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub heads: Vec<HeadStats>,
}

/// A text with what was made of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sample {
    /// What was read.
    pub source: String,
    /// What stands beside it in the data.
    pub target: String,
    /// The generated text.
    pub output: String,
}

/// Tokens of a batch that is only read.
const READ: usize = 16_384;

/// Judges the weights that a run would leave behind. Batches and texts are dealt to the ranks, and all get the same report; but what heads
/// do is told on rank 0 only, which writes it.
pub(crate) fn validate(
    settings: &Settings,
    corpus: &Corpus,
    config: &Config,
    weights: &Snapshot<'_>,
    ranks: &dyn Ranks,
) -> Result<ValidationMetrics, Error> {
    let net = TrainableModel::new(settings, config, &Device::flex())?.with(weights);
    let batches = corpus.validation_batches(READ)?;
    let mut losses = Vec::new();
    for items in &batches[share(batches.len(), ranks.rank(), ranks.count())] {
        let (examples, context) = (&corpus.validation, settings.model.context);
        let batch = Batch { examples, items, cuts: &[], context, smoothing: 0.0 };
        let loss = net.loss(&batch, &mut Pass::default())?;
        let answers = loss.answers as f64;
        losses.push([answers * f64::from(numbers(loss.mean)[0]), answers, loss.right as f64]);
    }
    let losses = gather(ranks, &losses, &shares(batches.len(), ranks.count()))?;
    let [sum, answers, right] =
        losses.iter().fold([0.0; 3], |sums, own| [0, 1, 2].map(|i| sums[i] + own[i]));
    let loss = sum / answers.max(1.0);
    let mut report = ValidationMetrics {
        validation_loss: loss,
        validation_perplexity: loss.exp(),
        ..ValidationMetrics::default()
    };
    if settings.task == Task::Classify {
        report.score = Some(100.0 * right / answers.max(1.0));
    }
    if settings.task == Task::Translate && !corpus.texts.is_empty() {
        let model = model(corpus, config, weights, settings.training.save_fp16)?;
        let v = &settings.validation;
        let some = &corpus.texts[..corpus.texts.len().min(v.max_examples)];
        let search = decoding_strategy(v.num_beams, v.length_penalty);
        let own = &some[share(some.len(), ranks.rank(), ranks.count())];
        let written = gather_texts(ranks, &translations(&model, own, &search, v.max_tokens)?)?;
        let language = settings.data.parts.first().map_or("", |part| &part.target);
        let (bleu, chrf) = scores(some, &written, language)?;
        (report.score, report.chrf) = (Some(bleu), Some(chrf));
        let shown = some.iter().zip(&written).take(v.samples);
        report.samples = shown
            .map(|(pair, written)| Sample {
                source: pair.source.clone(),
                target: pair.target.clone(),
                output: written.clone(),
            })
            .collect();
        if ranks.rank() == 0 {
            report.heads = heads(&model, &some[..some.len().min(v.samples)])?;
        }
    }
    Ok(report)
}

/// The texts of all ranks, in their order.
fn gather_texts(ranks: &dyn Ranks, own: &[String]) -> Result<Vec<String>, Error> {
    let wrong = |e: serde_json::Error| Error::data(format!("texts of another rank: {e}"));
    let mut all = Vec::new();
    for part in gather_varied(ranks, &serde_json::to_vec(own).map_err(wrong)?)? {
        all.extend(serde_json::from_slice::<Vec<String>>(&part).map_err(wrong)?);
    }
    Ok(all)
}

/// Greedy where one hypothesis is kept.
#[must_use]
pub fn decoding_strategy(num_beams: usize, length_penalty: f32) -> DecodingStrategy {
    match num_beams {
        0 | 1 => DecodingStrategy::Greedy,
        width => DecodingStrategy::Beam { width, length_penalty },
    }
}

/// The model that a run would leave behind.
fn model(
    corpus: &Corpus,
    config: &Config,
    weights: &Snapshot<'_>,
    fp16: bool,
) -> Result<Model, Error> {
    let rounded = |x: &f32| if fp16 { f16::from_f32(*x).to_f32() } else { *x };
    let weights = weights.iter().map(|(path, shape, list)| {
        (path.into(), shape.to_vec(), list.iter().map(rounded).collect())
    });
    let files = ModelFiles {
        config: config.clone(),
        weights: Weights::new(weights)?,
        tokens: Some(corpus.tokens.clone()),
        target_tokens: corpus.target.clone(),
        title: "run".into(),
    };
    Ok(Model::new(files)?)
}

/// Translations of the sources.
pub fn translations(
    model: &Model,
    pairs: &[Pair],
    search: &DecodingStrategy,
    max_tokens: usize,
) -> Result<Vec<String>, Error> {
    let texts: Vec<&str> = pairs.iter().map(|pair| pair.source.as_str()).collect();
    let written = model.translator()?.translate(&texts, search, max_tokens)?;
    Ok(written.into_iter().map(|one| one.text.trim().to_owned()).collect())
}

/// BLEU and chrF of what was written.
fn scores(pairs: &[Pair], written: &[String], language: &str) -> Result<(f64, f64), Error> {
    let written: Vec<&str> = written.iter().map(String::as_str).collect();
    let targets: Vec<&str> = pairs.iter().map(|pair| pair.target.as_str()).collect();
    let wrong = |e: crate::score::ScoreError| Error::data(e.to_string());
    // Chinese has no spaces that words could be told by.
    let tokenize = if language.starts_with("zh") { Tokenize::Zh } else { Tokenize::default() };
    let bleu = Bleu { tokenize, ..Bleu::default() };
    let bleu = bleu.corpus(&written, &targets).map_err(wrong)?.score;
    let chrf = Chrf::default().corpus(&written, &targets).map_err(wrong)?.score;
    Ok((bleu, chrf))
}

/// What each head does in some texts, in the mean.
fn heads(model: &Model, pairs: &[Pair]) -> Result<Vec<HeadStats>, Error> {
    let mut all: BTreeMap<(String, usize, usize), Vec<HeadStats>> = BTreeMap::new();
    for pair in pairs {
        let trace = match model.look_at(&pair.source, &pair.target) {
            Ok(trace) => trace,
            // A translator without attention has nothing to look at.
            Err(regard_models::Error::Unsupported { .. }) => return Ok(vec![]),
            Err(error) => return Err(error.into()),
        };
        let found = stats(&trace, Machine::detect(), &mut |_, _| {})
            .map_err(|e| Error::Scope(e.to_string()))?;
        for one in found {
            let site = (one.site.kind.clone(), one.site.layer, one.site.head);
            all.entry(site).or_default().push(one);
        }
    }
    Ok(all.into_values().filter_map(|some| HeadStats::mean(&some)).collect())
}
