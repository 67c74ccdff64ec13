//! The models that learn, and how wrong they are about a batch.

use crate::corpus::{BEGIN, Corpus, END, Examples, PAD, tag};
use crate::error::Error;
use crate::optim::{AdamW, AdamWSettings, Snapshot};
use crate::settings::{ModelKind, ModelSettings, Settings, Task};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Gradients, Int, Tensor, TensorData};
use regard_burn::{CrossEntropy, cross_entropy};
use regard_models::files::{
    Activation, Architecture, Config, Heads, PairLayout, Positions, Tokens, Weights,
};
use regard_models::{
    AttentionScore, DropoutRates, Entropies, Gpt, Han, HanConfig, Pass, Seq2Seq, Seq2SeqConfig,
    Transformer, ids, load,
};
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// A module that can be trained: it knows how wrong it is about a batch.
pub trait Learner: Module {
    /// How wrong it is. Examples of another kind than it learns from are an error.
    fn loss(&self, batch: &Batch<'_>, pass: &mut Pass) -> Result<Loss, Error>;
}

/// Some of the examples.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// All of them.
    pub examples: &'a Examples,
    /// The numbers of those of the batch; of a stream, where windows begin.
    pub items: &'a [usize],
    /// How many tokens the source of each is cut to; those beyond the list are not cut.
    pub cuts: &'a [usize],
    /// Tokens of a window of a stream.
    pub context: usize,
    /// Of the labels.
    pub smoothing: f64,
}

impl Batch<'_> {
    /// The loss of tokens: padding is not answered.
    fn of_tokens(&self) -> CrossEntropy {
        CrossEntropy { smoothing: self.smoothing, ignored: Some(i64::from(PAD)) }
    }

    /// The loss of answers that are all there.
    fn of_all(&self) -> CrossEntropy {
        CrossEntropy { smoothing: self.smoothing, ignored: None }
    }
}

fn other_data<T>() -> Result<T, Error> {
    Err(Error::setting("model.kind", "this model does not learn from such data"))
}

/// A [`Learner`] of any type.
pub struct TrainableModel(Box<dyn AnyLearner>);

/// What training asks of a [`Learner`], without its type.
trait AnyLearner: Send {
    fn loss(&self, batch: &Batch<'_>, pass: &mut Pass) -> Result<Loss, Error>;
    fn load(&self, weights: &mut Weights) -> Result<TrainableModel, Error>;
    fn optimizer(&self, settings: AdamWSettings) -> AdamW;
    fn with(&self, weights: &Snapshot<'_>) -> TrainableModel;
    fn add(&self, optimizer: &mut AdamW, gradients: &Gradients, weight: f64);
}

impl<M: Learner + 'static> AnyLearner for M {
    fn loss(&self, batch: &Batch<'_>, pass: &mut Pass) -> Result<Loss, Error> {
        Learner::loss(self, batch, pass)
    }

    fn load(&self, weights: &mut Weights) -> Result<TrainableModel, Error> {
        Ok(TrainableModel(Box::new(load(self.clone(), weights)?)))
    }

    fn optimizer(&self, settings: AdamWSettings) -> AdamW {
        AdamW::new(self, settings)
    }

    fn with(&self, weights: &Snapshot<'_>) -> TrainableModel {
        TrainableModel(Box::new(weights.put(self.clone())))
    }

    fn add(&self, optimizer: &mut AdamW, gradients: &Gradients, weight: f64) {
        optimizer.add(self, gradients, weight);
    }
}

/// Burn has one source of chance for the whole process, and draws a weight when it is first read: one model at a time, or the weights of
/// neither would follow from its seed.
static DRAWING: Mutex<()> = Mutex::new(());

/// Reads every weight.
struct Draw;

impl ModuleVisitor for Draw {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        drop(param.val());
    }
}

/// How wrong a model is about a batch.
#[derive(Debug)]
pub struct Loss {
    /// The mean over what was answered.
    pub mean: Tensor<1>,
    /// How many answers there were: tokens or documents.
    pub answers: usize,
    /// How many of them were the likeliest; counted of documents only.
    pub right: usize,
    /// Tokens that were read and written, without padding.
    pub tokens: usize,
}

/// What a model of these settings is, for these vocabularies.
#[must_use]
pub(crate) fn config(settings: &Settings, corpus: &Corpus) -> Config {
    let vocab = corpus.tokens.len();
    let target_vocab = corpus.target.as_ref().map(Tokens::len);
    let ModelSettings { kind, d_model, hidden, attention, attention_score, .. } = settings.model;
    let marked =
        |config: Config| Config { bos: Some(BEGIN), eos: vec![END], pad: Some(PAD), ..config };
    match kind {
        ModelKind::Transformer => marked(transformer(&settings.model, vocab, target_vocab)),
        ModelKind::Gpt => {
            let config = marked(decoder(&settings.model, vocab));
            Config { translate: template(settings), ..config }
        }
        ModelKind::Seq2Seq => marked(Config {
            target_vocab,
            ..Config::seq2seq(Seq2SeqConfig {
                embedding: d_model,
                encoder_hidden: hidden,
                decoder_hidden: 2 * hidden,
                attention_hidden: match attention_score {
                    AttentionScore::Additive | AttentionScore::Concat => {
                        (attention > 0).then_some(attention)
                    }
                    AttentionScore::Dot | AttentionScore::General => None,
                },
                attention_score,
                source_vocab: vocab,
                target_vocab: target_vocab.unwrap_or(vocab),
            })
        }),
        ModelKind::Han => {
            let han = HanConfig {
                embedding: d_model,
                word_hidden: hidden,
                word_attention: attention,
                sentence_hidden: hidden,
                sentence_attention: attention,
                vocab,
                classes: corpus.labels.len(),
            };
            Config::han(han, corpus.labels.clone())
        }
    }
}

fn transformer(model: &ModelSettings, vocab: usize, target_vocab: Option<usize>) -> Config {
    Config {
        d_model: model.d_model,
        n_layers: model.n_layers,
        decoder_layers: Some(model.decoder_layers),
        heads: Heads { q: model.heads, kv: model.heads },
        head_dim: model.d_model / model.heads.max(1),
        d_ff: Some(model.d_ff),
        vocab,
        target_vocab,
        norm_eps: Some(1e-5),
        pre_norm: model.pre_norm,
        positions: Positions::Sinusoidal {
            pairs: PairLayout::Interleaved,
            first: 0,
            inclusive: false,
        },
        activation: Some(Activation::Relu),
        attention_bias: true,
        feed_forward_bias: true,
        tie_embeddings: model.tie_embeddings,
        shared_vocabulary: model.shared_vocabulary,
        embedding_scale: Some((model.d_model as f64).sqrt()),
        ..Config::of(Architecture::Transformer)
    }
}

fn decoder(model: &ModelSettings, vocab: usize) -> Config {
    Config {
        d_model: model.d_model,
        n_layers: model.n_layers,
        heads: Heads { q: model.heads, kv: model.heads },
        head_dim: model.d_model / model.heads.max(1),
        d_ff: Some(model.d_ff),
        vocab,
        context: Some(model.context),
        norm_eps: Some(1e-5),
        pre_norm: true,
        positions: Positions::Learned,
        activation: Some(Activation::Gelu),
        attention_bias: true,
        feed_forward_bias: true,
        tie_embeddings: model.tie_embeddings,
        ..Config::of(Architecture::Gpt2)
    }
}

/// How a decoder is asked for a translation: by the mark of its language.
fn template(settings: &Settings) -> Option<String> {
    let target = &settings.data.parts.first()?.target;
    (settings.task == Task::Translate).then(|| format!("{{source}}{}", tag(target)))
}

impl TrainableModel {
    /// With the random weights that follow from the seed.
    pub fn new(settings: &Settings, config: &Config, device: &Device) -> Result<Self, Error> {
        let _alone = DRAWING.lock().unwrap_or_else(PoisonError::into_inner);
        device.seed(settings.seed);
        let dropping = DropoutRates {
            rate: settings.training.dropout,
            attention: settings.training.attention_dropout,
        };
        let none = || Error::setting("model.kind", "the configuration is of another kind");
        Ok(match settings.model.kind {
            ModelKind::Transformer => Self::of(Transformer::new(config, dropping, device)?),
            ModelKind::Gpt => Self::of(Gpt::new(config, dropping, device)?),
            ModelKind::Seq2Seq => {
                let sizes = config.seq2seq.as_ref().ok_or_else(none)?;
                Self::of(Seq2Seq::new(sizes, dropping, device)?)
            }
            ModelKind::Han => {
                let han = config.han.as_ref().ok_or_else(none)?;
                Self::of(Han::new(han, dropping, device)?)
            }
        })
    }

    fn of(model: impl Learner + 'static) -> Self {
        model.visit(&mut Draw);
        Self(Box::new(model))
    }

    /// The same with weights of a file.
    pub fn load(&self, weights: &mut Weights) -> Result<Self, Error> {
        self.0.load(weights)
    }

    /// Its weights and the way that they move.
    #[must_use]
    pub fn optimizer(&self, settings: &Settings) -> AdamW {
        self.0.optimizer(settings.optimizer)
    }

    /// The same with weights of an optimizer.
    #[must_use]
    pub fn with(&self, weights: &Snapshot<'_>) -> Self {
        self.0.with(weights)
    }

    /// Adds its gradients to what the optimizer has.
    pub fn add(&self, optimizer: &mut AdamW, gradients: &Gradients, weight: f64) {
        self.0.add(optimizer, gradients, weight);
    }

    /// How wrong it is about a batch.
    pub fn loss(&self, batch: &Batch<'_>, pass: &mut Pass) -> Result<Loss, Error> {
        self.0.loss(batch, pass)
    }
}

impl fmt::Debug for TrainableModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainableModel").finish_non_exhaustive()
    }
}

impl Learner for Transformer {
    fn loss(&self, batch: &Batch<'_>, pass: &mut Pass) -> Result<Loss, Error> {
        let Examples::Pairs(all) = batch.examples else { return other_data() };
        let (rows, read) = Rows::of_pairs(all, batch);
        let lengths: Vec<usize> = read.iter().map(|source| source.len()).collect();
        rows.set_lengths(pass);
        let device = Device::flex();
        let memory = self.encode(ids(&read, &device), Some(&lengths), pass)?;
        let scores = self.decode(&memory, Some(&lengths), ids(&rows.inputs, &device), pass)?;
        rows.loss(scores, lengths.iter().sum(), batch.of_tokens())
    }
}

impl Learner for Seq2Seq {
    fn loss(&self, batch: &Batch<'_>, pass: &mut Pass) -> Result<Loss, Error> {
        let Examples::Pairs(all) = batch.examples else { return other_data() };
        let (rows, read) = Rows::of_pairs(all, batch);
        let lengths: Vec<usize> = read.iter().map(|source| source.len()).collect();
        let device = Device::flex();
        let memory = self.encode(ids(&read, &device), Some(&lengths), pass)?;
        let scores = self.decode(&memory, ids(&rows.inputs, &device), pass)?;
        rows.loss(scores, lengths.iter().sum(), batch.of_tokens())
    }
}

impl Learner for Gpt {
    fn loss(&self, batch: &Batch<'_>, pass: &mut Pass) -> Result<Loss, Error> {
        let (rows, how) = match batch.examples {
            Examples::Pairs(all) => {
                let rows = Rows::of_prompts(all, batch.items);
                rows.set_lengths(pass);
                (rows, batch.of_tokens())
            }
            Examples::Stream(all) => {
                (Rows::of_stream(all, batch.items, batch.context), batch.of_all())
            }
            Examples::Documents(_) => return other_data(),
        };
        let scores = self.forward(ids(&rows.inputs, &Device::flex()), pass)?;
        rows.loss(scores, 0, how)
    }
}

impl Learner for Han {
    fn loss(&self, batch: &Batch<'_>, pass: &mut Pass) -> Result<Loss, Error> {
        let Examples::Documents(all) = batch.examples else { return other_data() };
        let documents: Vec<_> = batch.items.iter().map(|i| all[*i].0.clone()).collect();
        let classes: Vec<i64> = batch.items.iter().map(|i| i64::from(all[*i].1)).collect();
        let tokens = documents.iter().flatten().map(Vec::len).sum();
        let scores = self.forward(&documents, pass)?;
        let likeliest = scores.clone().argmax(1).into_data();
        let right = likeliest.iter::<i64>().zip(&classes).filter(|(a, b)| a == *b).count();
        let answers = classes.len();
        let targets = Tensor::from_data(TensorData::new(classes, [answers]), &Device::flex());
        let mean = cross_entropy(scores, targets, batch.of_all())?;
        Ok(Loss { mean, answers, right, tokens })
    }
}

/// What a decoder reads, and what it should say after each token.
struct Rows {
    inputs: Vec<Vec<u32>>,
    answers: Vec<Vec<u32>>,
}

impl Rows {
    // ANCHOR: teacher
    /// Teacher forcing: the target behind its beginning, and the target before its end. With the sources.
    fn of_pairs<'a>(all: &'a [[Vec<u32>; 2]], batch: &Batch<'_>) -> (Self, Vec<&'a [u32]>) {
        let some = || batch.items.iter().map(|i| &all[*i]);
        let begun = |[_, target]: &[Vec<u32>; 2]| [&[BEGIN], target.as_slice()].concat();
        let ended = |[_, target]: &[Vec<u32>; 2]| [target.as_slice(), &[END]].concat();
        let rows =
            Self { inputs: some().map(begun).collect(), answers: some().map(ended).collect() };
        let cuts = batch.cuts.iter().copied().chain(std::iter::repeat(usize::MAX));
        let sources = some().zip(cuts).map(|([source, _], cut)| &source[..cut.min(source.len())]);
        (rows, sources.collect())
    }
    // ANCHOR_END: teacher

    /// The target behind the source; only the former is answered.
    fn of_prompts(all: &[[Vec<u32>; 2]], batch: &[usize]) -> Self {
        let some = || batch.iter().map(|i| &all[*i]);
        let inputs = |[source, target]: &[Vec<u32>; 2]| [source.as_slice(), target].concat();
        let answers = |[source, target]: &[Vec<u32>; 2]| {
            let silent = std::iter::repeat_n(PAD, source.len().saturating_sub(1));
            silent.chain(target.iter().copied()).chain([END]).collect()
        };
        Self { inputs: some().map(inputs).collect(), answers: some().map(answers).collect() }
    }

    /// Windows of a text, each shifted by one.
    fn of_stream(all: &[u32], starts: &[usize], context: usize) -> Self {
        let last = all.len().saturating_sub(1);
        let windows = starts.iter().map(|start| *start.min(&last)..(start + context).min(last));
        let shifted = |window: &std::ops::Range<usize>| all[window.start + 1..=window.end].to_vec();
        Self {
            answers: windows.clone().map(|window| shifted(&window)).collect(),
            inputs: windows.map(|window| all[window].to_vec()).collect(),
        }
    }

    /// Which rows of attention are padding, where their entropy is asked for.
    fn set_lengths(&self, pass: &mut Pass) {
        if pass.entropies.is_some() {
            let lengths: Vec<usize> = self.inputs.iter().map(Vec::len).collect();
            pass.entropies = Some(Entropies::of(&lengths));
        }
    }

    fn loss(self, scores: Tensor<3>, read: usize, how: CrossEntropy) -> Result<Loss, Error> {
        let [batch, length, vocab] = scores.dims();
        let answers = self.answers.iter().flatten();
        let answers = match how.ignored {
            Some(ignored) => answers.filter(|id| i64::from(**id) != ignored).count(),
            None => answers.count(),
        };
        let tokens = read + self.inputs.iter().map(Vec::len).sum::<usize>();
        let targets: Tensor<1, Int> = ids(&self.answers, &Device::flex()).reshape([batch * length]);
        let mean = cross_entropy(scores.reshape([batch * length, vocab]), targets, how)?;
        Ok(Loss { mean, answers, right: 0, tokens })
    }
}
