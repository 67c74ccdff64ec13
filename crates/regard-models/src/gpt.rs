//! Decoders: GPT (Radford et al. 2019) and Llama (Touvron et al. 2023) are one model with other settings.

use crate::error::Error;
use crate::files::{Activation, Architecture, Config, Positions};
use crate::infer;
use crate::load::inference;
use crate::nn::{Block, DropoutRates, Embedding, Linear, Norm, NormKind};
use crate::pass::{Pass, RowSide};
use crate::stack::{EMBEDDINGS, block_of, only, through};
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use regard::Mask;

/// A stack of blocks in which each position sees those before it, and scores what comes next.
#[derive(Module, Debug)]
pub struct Gpt {
    /// A row for each token.
    pub embedding: Embedding,
    /// A row for each position, where they are learned.
    pub positions: Option<Embedding>,
    /// The stack.
    pub blocks: Vec<Block>,
    /// After it, where blocks norm what they read.
    pub norm: Norm,
    /// The scores of tokens; `None` where the embedding makes them.
    pub head: Option<Linear>,
    #[module(skip)]
    config: Config,
    #[module(skip)]
    dropout: DropoutRates,
}

impl Gpt {
    /// With random weights, of which `dropout` says what is dropped while training.
    pub fn new(config: &Config, dropout: DropoutRates, device: &Device) -> Result<Self, Error> {
        let kind = match config.architecture {
            Architecture::Llama => NormKind::Rms,
            Architecture::Gpt2 => NormKind::Layer,
            other => {
                return Err(Error::unsupported(
                    "architecture",
                    &format!("{other:?}"),
                    "llama and gpt2 are decoders",
                ));
            }
        };
        let rotary = matches!(config.positions, Positions::Rotary { .. });
        let (scale, act) = (config.embedding_scale, config.activation);
        match kind {
            NormKind::Rms => {
                only("positions", rotary, &config.positions, "llama turns queries and keys")?;
                only("activation", act == Some(Activation::Silu), &act, "llama gates with silu")?;
            }
            NormKind::Layer => {
                only(
                    "positions",
                    config.positions == Positions::Learned,
                    &config.positions,
                    "gpt2 learns them",
                )?;
            }
        }
        only("pre_norm", config.pre_norm, &config.pre_norm, "decoders norm what they read")?;
        only("embedding_scale", scale.is_none(), &scale, "decoders have none")?;
        let (d_model, vocab) = (config.d_model, config.vocab);
        let block = block_of(config, kind, dropout);
        let table = |entries: usize| Embedding::new([entries, d_model], 0.02, device);
        Ok(Self {
            embedding: table(vocab),
            positions: (kind == NormKind::Layer).then(|| table(config.context.unwrap_or(1024))),
            blocks: (0..config.n_layers).map(|_| Block::new(&block, device)).collect(),
            norm: Norm::new(kind, d_model, block.eps, device),
            head: (!config.tie_embeddings).then(|| Linear::new([d_model, vocab], false, device)),
            config: config.clone(),
            dropout,
        })
    }

    /// What it is.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The scores of what comes after each position: `ids [batch, length]` to `[batch, length, vocab]`.
    pub fn forward(&self, ids: Tensor<2, Int>, pass: &mut Pass) -> Result<Tensor<3>, Error> {
        Ok(self.scores(self.read(ids, pass)?))
    }

    /// What each position has become, before it is scored: `[batch, length, d_model]`.
    pub fn read(&self, ids: Tensor<2, Int>, pass: &mut Pass) -> Result<Tensor<3>, Error> {
        let length = ids.dims()[1];
        let x = self.embedded(ids, &(0..length).collect::<Vec<_>>())?;
        let x = regard_burn::dropout(x, pass.drops(self.dropout.rate, EMBEDDINGS));
        pass.now(RowSide::Target);
        let x = through(&self.blocks, x, ("decoder", "target"), &Mask::causal(), None, pass)?;
        Ok(self.norm.forward(x))
    }

    /// Rows of tokens, with their positions if these are learned: one for each row of the batch, or one list for all.
    fn embedded(&self, ids: Tensor<2, Int>, places: &[usize]) -> Result<Tensor<3>, Error> {
        let ([batch, length], device) = (ids.dims(), ids.device());
        let x = self.embedding.forward(ids)?;
        let Some(positions) = &self.positions else { return Ok(x) };
        let places: Vec<i64> = if places.len() == length {
            places.iter().cycle().take(batch * length).map(|p| p.cast_signed() as i64).collect()
        } else {
            places.iter().map(|p| p.cast_signed() as i64).collect()
        };
        let places = Tensor::from_data(TensorData::new(places, [batch, length]), &device);
        Ok(regard_burn::residual(x, positions.forward(places)?, None))
    }

    fn scores(&self, x: Tensor<3>) -> Tensor<3> {
        match &self.head {
            Some(head) => head.forward(x),
            None => self.embedding.scores(x),
        }
    }

    /// A copy for inference, which generates with a KV cache.
    pub fn inference(&self) -> Result<infer::Transformer, Error> {
        inference(self, &self.config)
    }
}
