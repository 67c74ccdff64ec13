//! The models that learn, and how wrong they are about a batch.

use crate::corpus::{BEGIN, Corpus, END, Examples, PAD, tag};
use crate::error::Error;
use crate::optim::AdamW;
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
use std::sync::{Mutex, PoisonError};

/// A model with a loss, to be trained.
#[derive(Clone, Debug)]
pub enum TrainableModel {
    /// An encoder and a decoder.
    Transformer(Box<Transformer>),
    /// A decoder.
    Gpt(Box<Gpt>),
    /// Two GRUs.
    Seq2Seq(Box<Seq2Seq>),
    /// A hierarchy.
    Han(Box<Han>),
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
        let model = match settings.model.kind {
            ModelKind::Transformer => {
                Self::Transformer(Box::new(Transformer::new(config, dropping, device)?))
            }
            ModelKind::Gpt => Self::Gpt(Box::new(Gpt::new(config, dropping, device)?)),
            ModelKind::Seq2Seq => {
                let sizes = config.seq2seq.as_ref().ok_or_else(none)?;
                Self::Seq2Seq(Box::new(Seq2Seq::new(sizes, dropping, device)?))
            }
            ModelKind::Han => {
                let han = config.han.as_ref().ok_or_else(none)?;
                Self::Han(Box::new(Han::new(han, dropping, device)?))
            }
        };
        match &model {
            Self::Transformer(model) => model.visit(&mut Draw),
            Self::Gpt(model) => model.visit(&mut Draw),
            Self::Seq2Seq(model) => model.visit(&mut Draw),
            Self::Han(model) => model.visit(&mut Draw),
        }
        Ok(model)
    }

    /// The same with weights of a file.
    pub fn load(self, weights: &mut Weights) -> Result<Self, Error> {
        Ok(match self {
            Self::Transformer(model) => Self::Transformer(Box::new(load(*model, weights)?)),
            Self::Gpt(model) => Self::Gpt(Box::new(load(*model, weights)?)),
            Self::Seq2Seq(model) => Self::Seq2Seq(Box::new(load(*model, weights)?)),
            Self::Han(model) => Self::Han(Box::new(load(*model, weights)?)),
        })
    }

    /// Its weights and the way that they move.
    #[must_use]
    pub fn optimizer(&self, settings: &Settings) -> AdamW {
        match self {
            Self::Transformer(model) => AdamW::new(&**model, settings.optimizer),
            Self::Gpt(model) => AdamW::new(&**model, settings.optimizer),
            Self::Seq2Seq(model) => AdamW::new(&**model, settings.optimizer),
            Self::Han(model) => AdamW::new(&**model, settings.optimizer),
        }
    }

    /// The same with the weights of the optimizer, or their average.
    #[must_use]
    pub fn with(self, optimizer: &AdamW, average: bool) -> Self {
        match self {
            Self::Transformer(model) => Self::Transformer(Box::new(optimizer.put(*model, average))),
            Self::Gpt(model) => Self::Gpt(Box::new(optimizer.put(*model, average))),
            Self::Seq2Seq(model) => Self::Seq2Seq(Box::new(optimizer.put(*model, average))),
            Self::Han(model) => Self::Han(Box::new(optimizer.put(*model, average))),
        }
    }

    /// Adds its gradients to what the optimizer has.
    pub fn add(&self, optimizer: &mut AdamW, gradients: &Gradients, weight: f64) {
        match self {
            Self::Transformer(model) => optimizer.add(&**model, gradients, weight),
            Self::Gpt(model) => optimizer.add(&**model, gradients, weight),
            Self::Seq2Seq(model) => optimizer.add(&**model, gradients, weight),
            Self::Han(model) => optimizer.add(&**model, gradients, weight),
        }
    }

    /// How wrong it is about some of the examples, whose sources may be cut to so many tokens each.
    pub fn loss(
        &self,
        examples: &Examples,
        (batch, cuts): (&[usize], &[usize]),
        context: usize,
        smoothing: f64,
        pass: &mut Pass,
    ) -> Result<Loss, Error> {
        let how = CrossEntropy { smoothing, ignored: Some(i64::from(PAD)) };
        let device = Device::flex();
        match (self, examples) {
            (Self::Transformer(model), Examples::Pairs(all)) => {
                let (rows, read) = Rows::of_pairs(all, batch, cuts);
                let lengths: Vec<usize> = read.iter().map(|source| source.len()).collect();
                rows.set_lengths(pass);
                let memory = model.encode(ids(&read, &device), Some(&lengths), pass)?;
                let inputs = ids(&rows.inputs, &device);
                let scores = model.decode(&memory, Some(&lengths), inputs, pass)?;
                rows.loss(scores, lengths.iter().sum(), how)
            }
            (Self::Seq2Seq(model), Examples::Pairs(all)) => {
                let (rows, read) = Rows::of_pairs(all, batch, cuts);
                let lengths: Vec<usize> = read.iter().map(|source| source.len()).collect();
                let memory = model.encode(ids(&read, &device), Some(&lengths), pass)?;
                let scores = model.decode(&memory, ids(&rows.inputs, &device), pass)?;
                rows.loss(scores, lengths.iter().sum(), how)
            }
            (Self::Gpt(model), Examples::Pairs(all)) => {
                let rows = Rows::of_prompts(all, batch);
                rows.set_lengths(pass);
                let scores = model.forward(ids(&rows.inputs, &device), pass)?;
                rows.loss(scores, 0, how)
            }
            (Self::Gpt(model), Examples::Stream(all)) => {
                let rows = Rows::of_stream(all, batch, context);
                let scores = model.forward(ids(&rows.inputs, &device), pass)?;
                rows.loss(scores, 0, CrossEntropy { ignored: None, ..how })
            }
            (Self::Han(model), Examples::Documents(all)) => {
                let documents: Vec<_> = batch.iter().map(|i| all[*i].0.clone()).collect();
                let classes: Vec<i64> = batch.iter().map(|i| i64::from(all[*i].1)).collect();
                let tokens = documents.iter().flatten().map(Vec::len).sum();
                let scores = model.forward(&documents, pass)?;
                let likeliest = scores.clone().argmax(1).into_data();
                let right = likeliest.iter::<i64>().zip(&classes).filter(|(a, b)| a == *b).count();
                let answers = classes.len();
                let targets = Tensor::from_data(TensorData::new(classes, [answers]), &device);
                let mean = cross_entropy(scores, targets, CrossEntropy { ignored: None, ..how })?;
                Ok(Loss { mean, answers, right, tokens })
            }
            _ => Err(Error::setting("model.kind", "this model does not learn from such data")),
        }
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
    fn of_pairs<'a>(
        all: &'a [[Vec<u32>; 2]],
        batch: &[usize],
        cuts: &[usize],
    ) -> (Self, Vec<&'a [u32]>) {
        let some = || batch.iter().map(|i| &all[*i]);
        let begun = |[_, target]: &[Vec<u32>; 2]| [&[BEGIN], target.as_slice()].concat();
        let ended = |[_, target]: &[Vec<u32>; 2]| [target.as_slice(), &[END]].concat();
        let rows =
            Self { inputs: some().map(begun).collect(), answers: some().map(ended).collect() };
        let cuts = cuts.iter().copied().chain(std::iter::repeat(usize::MAX));
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
