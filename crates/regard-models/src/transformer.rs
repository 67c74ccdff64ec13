//! The encoder and decoder of Vaswani et al. 2017.

use crate::error::Error;
use crate::files::{Architecture, Config};
use crate::generate::Decoder;
use crate::nn::{Block, BlockConfig, Embedding, Linear, Norm, NormKind};
use crate::past::{Past, Pasts, in_turns, numbers};
use crate::stack::{Pass, block_of, ids, only, sinusoid_of, through};
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use regard::Mask;

/// A stack that reads the source, and one that writes the target and looks at what the first has read.
#[derive(Module, Debug)]
pub struct Transformer {
    /// A row for each token of the source.
    pub source: Embedding,
    /// A row for each token of the target.
    pub target: Embedding,
    /// Reads.
    pub encoder: Vec<Block>,
    /// After it, where blocks norm what they read.
    pub encoder_norm: Option<Norm>,
    /// Writes.
    pub decoder: Vec<Block>,
    /// After it.
    pub decoder_norm: Option<Norm>,
    /// The scores of tokens of the target.
    pub head: Linear,
    #[module(skip)]
    config: Config,
}

impl Transformer {
    /// With random weights, of which `dropout` is dropped after each layer while training.
    pub fn new(config: &Config, dropout: f64, device: &Device) -> Result<Self, Error> {
        let right = config.architecture == Architecture::Transformer;
        only(
            "architecture",
            right,
            &config.architecture,
            "transformer has an encoder and a decoder",
        )?;
        let sines = sinusoid_of(config).is_some();
        only("positions", sines, &config.positions, "a transformer adds sines and cosines")?;
        only("tied", !config.tied, &config.tied, "a transformer has a head of its own")?;
        let d_model = config.d_model;
        let reads = BlockConfig { dropout, ..block_of(config, NormKind::Layer) };
        let writes = BlockConfig { cross: Some(reads.attention.clone()), ..reads.clone() };
        let target_vocab = config.target_vocab.unwrap_or(config.vocab);
        let deviation = config.embedding_scale.map_or(1.0, |scale| 1.0 / scale);
        let table = |entries: usize| Embedding::new([entries, d_model], deviation, device);
        let norm =
            || config.pre_norm.then(|| Norm::new(NormKind::Layer, d_model, reads.eps, device));
        let stack =
            |n: usize, block: &BlockConfig| (0..n).map(|_| Block::new(block, device)).collect();
        Ok(Self {
            source: table(config.vocab),
            target: table(target_vocab),
            encoder: stack(config.n_layers, &reads),
            encoder_norm: norm(),
            decoder: stack(config.decoder_layers.unwrap_or(config.n_layers), &writes),
            decoder_norm: norm(),
            head: Linear::new([d_model, target_vocab], true, device),
            config: config.clone(),
        })
    }

    /// What it is.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    fn embedded(
        &self,
        table: &Embedding,
        ids: Tensor<2, Int>,
        start: usize,
    ) -> Result<Tensor<3>, Error> {
        let x = table.forward(ids)?;
        let ([batch, length, d_model], device) = (x.dims(), x.device());
        let x = match self.config.embedding_scale {
            Some(scale) => x * scale,
            None => x,
        };
        let sinusoid = sinusoid_of(&self.config).unwrap_or_default();
        let places: Tensor<2> = sinusoid.at(start, [length, d_model], &device.inner());
        Ok(regard_burn::residual(x, places.unsqueeze::<3>().expand([batch, length, d_model]), None))
    }

    /// What the source has become, `[batch, length, d_model]`; `lengths` where its rows differ in length.
    pub fn encode(
        &self,
        source: Tensor<2, Int>,
        lengths: Option<&[usize]>,
        pass: &mut Pass,
    ) -> Result<Tensor<3>, Error> {
        let x = self.embedded(&self.source, source, 0)?;
        let mask = lengths.map_or_else(Mask::full, Mask::lengths);
        let x = through(&self.encoder, x, ("encoder", "source"), &mask, None, pass)?;
        Ok(self.encoder_norm.as_ref().map_or(x.clone(), |norm| norm.forward(x)))
    }

    /// The scores of what comes after each position of the target, `[batch, length, vocab]`.
    pub fn decode(
        &self,
        memory: &Tensor<3>,
        lengths: Option<&[usize]>,
        target: Tensor<2, Int>,
        pass: &mut Pass,
    ) -> Result<Tensor<3>, Error> {
        let x = self.embedded(&self.target, target, 0)?;
        let seen = lengths.map_or_else(Mask::full, Mask::lengths);
        let memory = Some((memory, &seen));
        let x = through(&self.decoder, x, ("decoder", "target"), &Mask::causal(), memory, pass)?;
        Ok(self.scores(x))
    }

    fn scores(&self, x: Tensor<3>) -> Tensor<3> {
        self.head.forward(self.decoder_norm.as_ref().map_or(x.clone(), |norm| norm.forward(x)))
    }

    /// To translate these sources with, keeping what was written in at most `budget` bytes.
    pub fn writer(
        &self,
        sources: &[Vec<u32>],
        budget: usize,
    ) -> Result<TransformerWriter<'_>, Error> {
        let device = Device::flex();
        let read = |source: &Vec<u32>| {
            self.encode(ids(std::slice::from_ref(source), &device), None, &mut Pass::default())
        };
        let memories = sources.iter().map(read).collect::<Result<_, _>>()?;
        let heads = self.config.heads.kv;
        let pasts = Pasts::new(self.decoder.len(), heads, self.config.head_dim, budget)?;
        Ok(TransformerWriter { model: self, pasts, memories })
    }
}

/// A [`Transformer`] that writes translations of its sources.
#[derive(Debug)]
pub struct TransformerWriter<'a> {
    model: &'a Transformer,
    pasts: Pasts,
    /// What each source has become.
    memories: Vec<Tensor<3>>,
}

impl TransformerWriter<'_> {
    /// Pasts of one source and one length, to the scores after the last token of each.
    fn together(&mut self, pasts: &mut [Past], tokens: &[&[u32]]) -> Result<Vec<f32>, Error> {
        let Past { len, row, .. } = pasts[0];
        let x = self.model.embedded(&self.model.target, ids(tokens, &Device::flex()), len)?;
        let [_, source, d_model] = self.memories[row].dims();
        let memory = self.memories[row].clone().expand([tokens.len(), source, d_model]);
        let last = self.pasts.through(&self.model.decoder, x, pasts, Some(&memory))?;
        Ok(numbers(self.model.scores(last)))
    }
}

impl Decoder for TransformerWriter<'_> {
    type Past = Past;
    type Error = Error;

    fn vocab(&self) -> usize {
        self.model.config.target_vocab.unwrap_or(self.model.config.vocab)
    }

    fn context(&self) -> Option<usize> {
        self.model.config.context
    }

    fn start(&mut self, row: usize) -> Result<Past, Error> {
        self.pasts.start(row)
    }

    fn fork(&mut self, past: &Past) -> Result<Past, Error> {
        self.pasts.fork(past)
    }

    fn free(&mut self, past: Past) -> Result<(), Error> {
        self.pasts.free(past)
    }

    fn feed(&mut self, pasts: &mut [Past], tokens: &[&[u32]]) -> Result<Vec<f32>, Error> {
        let alike = |a: &Past, b: &Past| (a.len, a.row) == (b.len, b.row);
        in_turns(pasts, tokens, alike, |pasts, tokens| self.together(pasts, tokens))
    }
}
