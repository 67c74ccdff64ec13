//! A Transformer for inference: weights as they are stored, no gradients.

use super::block::Role;
use super::cache::{KvDtype, LayerCache};
use super::layers::{Linear, Norm, project};
use super::ops::{self, each_row};
use super::record::Recorder;
use super::session::{Session, caches};
use super::stack::{Caches, Packed, Part, Stack};
use super::work::Workspace;
use crate::error::Error;
use crate::files::{
    Architecture, Config, DenseActivation, DenseConfig, HeadConfig, Pooling, TransformerConfig,
    Weights,
};
use regard::cache::PAGE;
use regard_matmul::{Isa, Matrix, Rows, multiply};
use regard_scope::Layer;
use std::sync::Arc;

/// An encoder, a decoder or both, with its weights.
#[derive(Debug)]
pub struct Transformer {
    config: TransformerConfig,
    pub(super) encoder: Option<Stack>,
    pub(super) decoder: Option<Stack>,
    head: Option<Head>,
    kv_dtype: KvDtype,
    value_norms: bool,
}

/// From the last rows to scores.
#[derive(Debug)]
struct Head {
    config: HeadConfig,
    dense: Option<Linear>,
    norm: Option<Norm>,
    matrix: Arc<Matrix>,
    bias: Option<Vec<f32>>,
}

impl Transformer {
    /// Takes the weights, each tensor once; one that is left over is an error.
    pub fn new(config: TransformerConfig, mut weights: Weights) -> Result<Self, Error> {
        Self::take(config, &mut weights).map_err(|error| weights.named(error))
    }

    /// A Transformer of our own configuration.
    pub fn of_config(config: &Config, weights: Weights) -> Result<Self, Error> {
        let known = "llama, gpt2, bert and transformer are Transformers";
        let refused = || Error::unsupported("architecture", &config.architecture.name(), known);
        let weights = match config.architecture {
            // The pooler reads the first token alone, which no task here asks for.
            Architecture::Bert => {
                weights.with_module("norm", "embedding_norm").without_module("pooler")
            }
            _ => weights,
        };
        Self::new(config.transformer()?.ok_or_else(refused)?, weights)
    }

    fn take(config: TransformerConfig, weights: &mut Weights) -> Result<Self, Error> {
        let both = config.encoder.is_some() && config.decoder.is_some();
        let part = |part| if both { part } else { Part::Whole };
        let role = Role { is_causal: false, has_cross: false };
        let encoder = config.encoder.as_ref();
        let encoder =
            encoder.map(|stack| Stack::take(weights, part(Part::Encoder), stack, role, None));
        let encoder = encoder.transpose()?;
        // One table for both languages is the source's.
        let shared = encoder.as_ref().filter(|_| config.shared_embedding);
        let shared = shared.map(|encoder| encoder.embedding.clone());
        let role = Role { is_causal: true, has_cross: both };
        let decoder = config.decoder.as_ref();
        let decoder = decoder
            .map(|stack| Stack::take(weights, part(Part::Decoder), stack, role, shared.as_ref()));
        let decoder = decoder.transpose()?;
        let last = decoder.as_ref().or(encoder.as_ref());
        let head = match (config.head, last) {
            (Some(head), Some(last)) => Some(Head::take(weights, head, last, config.labels.len())?),
            _ => None,
        };
        weights.all_taken()?;
        Ok(Self {
            config,
            encoder,
            decoder,
            head,
            kv_dtype: KvDtype::default(),
            value_norms: false,
        })
    }

    /// What it is.
    #[must_use]
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// Sets the type of numbers in the KV caches: of sessions, and of a decoder alone in [`look`](Self::look) and [`logits`](Self::logits).
    pub fn set_kv_dtype(&mut self, dtype: KvDtype) {
        self.kv_dtype = dtype;
    }

    /// Whether [`look`](Self::look) records [`Layer::value_norms`] as well. Costs a product with the output projection for each layer.
    pub fn set_value_norms(&mut self, on: bool) {
        self.value_norms = on;
    }

    /// A generation session: of a decoder alone with no sources, of a translator with one for each prompt. Its KV caches, that of the
    /// sources among them, take at most `budget` bytes.
    pub fn session(&self, sources: &[Vec<u32>], budget: usize) -> Result<Session<'_>, Error> {
        let sources: Vec<&[u32]> = sources.iter().map(Vec::as_slice).collect();
        Session::new(self, &sources, (budget, self.kv_dtype), &mut Recorder::default())
    }

    /// Scores of what comes after each token, `[tokens, vocab]`, or of each token of an encoder; with the source in a translator. Of
    /// a model without a head its last rows, `[tokens, d_model]`.
    pub fn logits(&self, source: Option<&[u32]>, tokens: &[u32]) -> Result<Vec<f32>, Error> {
        let (mut x, _) = self.run(source, tokens, Recorder::default())?;
        self.scores(&mut x, Vec::new())
    }

    /// What every head looks at: layers of a trace between the axes `source` and `target`.
    pub fn look(&self, source: Option<&[u32]>, tokens: &[u32]) -> Result<Vec<Layer>, Error> {
        Ok(self.run(source, tokens, Recorder::on(self.value_norms))?.1.layers)
    }

    /// Rows of the last stack after its final norm.
    fn run(
        &self,
        source: Option<&[u32]>,
        tokens: &[u32],
        mut recorder: Recorder,
    ) -> Result<(Vec<f32>, Recorder), Error> {
        let mut work = Workspace::default();
        let rows = Packed::new([(0, tokens)].into_iter());
        let (stack, x) = match (&self.decoder, &self.encoder, source) {
            (Some(decoder), Some(_), Some(source)) => {
                let session =
                    Session::new(self, &[source], (usize::MAX >> 8, KvDtype::F32), &mut recorder)?;
                let caches =
                    Caches { own: &mut [], sequences: &[], source: Some(session.source()) };
                let axes = ("decoder", "target");
                (decoder, decoder.forward(&rows, Some(caches), &mut work, &mut recorder, axes)?)
            }
            (Some(_), Some(_), None) => {
                let why = "missing; a model with an encoder reads a source";
                return Err(Error::format("source", why));
            }
            (Some(stack), None, _) => {
                // One of `f32` would hold the rows themselves.
                let mut own = match self.kv_dtype {
                    KvDtype::F32 => Vec::new(),
                    dtype => caches(stack, PAGE, (usize::MAX >> 8, dtype))?,
                };
                let start = |cache: &mut LayerCache| Ok(vec![cache.start()?]);
                let sequences = own.iter_mut().map(start).collect::<Result<Vec<_>, Error>>()?;
                let caches = Caches { own: &mut own, sequences: &sequences, source: None };
                let axes = ("decoder", "target");
                (stack, stack.forward(&rows, Some(caches), &mut work, &mut recorder, axes)?)
            }
            (None, Some(stack), _) => (
                stack,
                stack.forward(&rows, None, &mut work, &mut recorder, ("encoder", "source"))?,
            ),
            (None, None, _) => return Err(Error::format("model", "it has no layers")),
        };
        let mut x = x;
        stack.finish(&mut x);
        Ok((x, recorder))
    }

    fn encoder(&self, what: &str) -> Result<&Stack, Error> {
        let known = "a model with an encoder can do that";
        let refused = || Error::unsupported(what, &self.config.family, known);
        self.encoder.as_ref().ok_or_else(refused)
    }

    /// Rows of the encoder after its final norm, for each text: `[tokens, d_model]`.
    pub fn encode(&self, texts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, Error> {
        let encoder = self.encoder("encode")?;
        if let Some(i) = texts.iter().position(Vec::is_empty) {
            return Err(Error::format(format!("text {i}"), "it has no tokens; give at least one"));
        }
        let rows = Packed::new(texts.iter().map(|tokens| (0, tokens.as_slice())));
        encoded(encoder, &rows, "source", &mut Recorder::default())
    }

    /// One vector for each text, by the pooling of the configuration.
    pub fn pooled(&self, texts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, Error> {
        Ok(self.pool(self.encode(texts)?))
    }

    fn pool(&self, rows: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
        let d = self.encoder.as_ref().map_or(1, |encoder| encoder.config.d_model);
        let pool = |rows: Vec<f32>| match self.config.pooling {
            Pooling::First => rows[..d].to_vec(),
            Pooling::Last => rows[rows.len() - d..].to_vec(),
            Pooling::Mean => {
                let n = (rows.len() / d) as f32;
                let mut mean = vec![0.0; d];
                for row in rows.chunks_exact(d) {
                    mean.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
                }
                mean.iter_mut().for_each(|x| *x /= n);
                mean
            }
        };
        rows.into_iter().map(pool).collect()
    }

    /// Scores of the classes of each text.
    pub fn classify(&self, texts: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, Error> {
        if self.config.labels.is_empty() {
            let known = "a model with a head that classifies";
            return Err(Error::unsupported("classify", &self.config.family, known));
        }
        self.each_scores(self.pooled(texts)?)
    }

    /// Scores of the classes of each image: pixels `[channels, height, width]`, all of the size that the model reads.
    pub fn classify_images(&self, images: &[Vec<f32>]) -> Result<Vec<Vec<f32>>, Error> {
        let encoder = self.encoder("classify")?;
        let rows = encoder.patch_rows(images)?;
        self.each_scores(self.pool(encoded(encoder, &rows, "patch", &mut Recorder::default())?))
    }

    /// What every head looks at in an image: layers of a trace, whose axes are both `patch`. Row 0 is the class token.
    pub fn look_at_image(&self, image: Vec<f32>) -> Result<Vec<Layer>, Error> {
        let (encoder, mut recorder) = (self.encoder("look")?, Recorder::on(self.value_norms));
        encoded(encoder, &encoder.patch_rows(&[image])?, "patch", &mut recorder)?;
        Ok(recorder.layers)
    }

    fn each_scores(&self, rows: Vec<Vec<f32>>) -> Result<Vec<Vec<f32>>, Error> {
        rows.into_iter().map(|mut row| self.scores(&mut row, Vec::new())).collect()
    }

    pub(super) fn has_head(&self) -> bool {
        self.head.is_some()
    }

    /// Scores of rows that are finished, `[rows, d_model]`, which are changed; in the memory of other scores.
    pub(super) fn scores(&self, rows: &mut Vec<f32>, to: Vec<f32>) -> Result<Vec<f32>, Error> {
        match &self.head {
            Some(head) => head.scores(rows, to),
            None => Ok(std::mem::take(rows)),
        }
    }
}

/// Rows of an encoder after its final norm, for each sequence.
fn encoded(
    encoder: &Stack,
    rows: &Packed,
    axis: &'static str,
    recorder: &mut Recorder,
) -> Result<Vec<Vec<f32>>, Error> {
    let axes = ("encoder", axis);
    let mut x = encoder.forward(rows, None, &mut Workspace::default(), recorder, axes)?;
    encoder.finish(&mut x);
    let d = encoder.config.d_model;
    Ok(rows.offsets.array_windows().map(|[from, to]| x[from * d..to * d].to_vec()).collect())
}

impl Head {
    fn take(
        weights: &mut Weights,
        config: HeadConfig,
        last: &Stack,
        classes: usize,
    ) -> Result<Self, Error> {
        let d = last.config.d_model;
        let outputs = if classes > 0 { classes } else { last.config.vocab };
        let dense = config.dense.map(|of| Linear::take(weights, "head_dense", [d, d], of.bias));
        let has_norm = config.dense.is_some_and(|dense| dense.norm);
        let norm = has_norm.then(|| Norm::take(weights, "head_norm", d, last.config.norm));
        let matrix = match config.tied {
            true => last.embedding.clone(),
            false => Arc::new(weights.matrix("head.weight", [outputs, d])?),
        };
        let bias = config.bias.then(|| weights.finite("head.bias", &[outputs]));
        Ok(Self {
            config,
            dense: dense.transpose()?,
            norm: norm.transpose()?,
            matrix,
            bias: bias.transpose()?,
        })
    }

    fn scores(&self, rows: &mut Vec<f32>, mut scores: Vec<f32>) -> Result<Vec<f32>, Error> {
        let d = self.matrix.inputs();
        let mut input = Rows::new();
        if let (Some(dense), Some(DenseConfig { activation, .. })) =
            (&self.dense, self.config.dense)
        {
            input.set(rows, d)?;
            project(&input, &mut [(dense, &mut *rows)])?;
            match activation {
                DenseActivation::Tanh => each_row(rows, d, &ops::Tanh),
                DenseActivation::Of(activation) => {
                    each_row(rows, d, &ops::Activate { activation, other: None });
                }
            }
        }
        if let Some(norm) = &self.norm {
            norm.apply(rows, d);
        }
        if let Some(scale) = self.config.scale {
            #[expect(clippy::cast_possible_truncation, reason = "numbers are f32")]
            rows.iter_mut().for_each(|x| *x *= scale as f32);
        }
        input.set(rows, d)?;
        let outputs = self.matrix.outputs();
        scores.resize(input.rows() * outputs, 0.0);
        multiply(&input, &mut [(&*self.matrix, &mut scores[..])], Isa::detect())?;
        if let Some(bias) = &self.bias {
            each_row(&mut scores, outputs, &ops::Add { other: bias, factor: 1.0 });
        }
        if let Some(cap) = self.config.softcap {
            #[expect(clippy::cast_possible_truncation, reason = "numbers are f32")]
            each_row(&mut scores, outputs, &ops::SoftCap(cap as f32));
        }
        Ok(scores)
    }
}
