//! Encoders: BERT (Devlin et al. 2019) and what follows it.

use crate::error::Error;
use crate::files::{Architecture, Config, Positions};
use crate::nn::{Block, DropoutRates, Embedding, Linear, Norm, NormKind};
use crate::pass::{Pass, RowSide};
use crate::stack::{block_of, ids, only, through};
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use regard::Mask;

/// A stack of blocks in which each position sees all others.
#[derive(Module, Debug)]
pub struct Bert {
    /// A row for each token.
    pub embedding: Embedding,
    /// A row for each position.
    pub positions: Embedding,
    /// A row for each kind of token.
    pub token_types: Embedding,
    /// After the sum of these.
    pub norm: Norm,
    /// The stack.
    pub blocks: Vec<Block>,
    /// What the first position says of all.
    pub pooler: Linear,
    #[module(skip)]
    config: Config,
}

/// Sentences of one batch: rows of tokens, which may differ in length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sentences<'a> {
    /// The tokens of each.
    pub tokens: &'a [Vec<u32>],
    /// The kind of each token, if not all are of kind 0.
    pub token_types: Option<&'a [Vec<u32>]>,
}

impl Bert {
    /// With random weights.
    pub fn new(config: &Config, device: &Device) -> Result<Self, Error> {
        let right = config.architecture == Architecture::Bert;
        only("architecture", right, &config.architecture, "bert is an encoder")?;
        let scale = config.embedding_scale;
        only(
            "positions",
            config.positions == Positions::Learned,
            &config.positions,
            "bert learns them",
        )?;
        only("pre_norm", !config.pre_norm, &config.pre_norm, "bert norms what it has added")?;
        only("embedding_scale", scale.is_none(), &scale, "bert has none")?;
        let d_model = config.d_model;
        let block = block_of(config, NormKind::Layer, DropoutRates::default());
        let table = |entries: usize| Embedding::new([entries, d_model], 0.02, device);
        Ok(Self {
            embedding: table(config.vocab),
            positions: table(config.context.unwrap_or(512)),
            token_types: table(config.token_types.unwrap_or(2)),
            norm: Norm::new(NormKind::Layer, d_model, block.eps, device),
            blocks: (0..config.n_layers).map(|_| Block::new(&block, device)).collect(),
            pooler: Linear::new([d_model, d_model], true, device),
            config: config.clone(),
        })
    }

    /// What it is.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What each position has become, `[batch, length, d_model]`; positions beyond the end of a sentence mean nothing.
    pub fn forward(&self, sentences: &Sentences<'_>, pass: &mut Pass) -> Result<Tensor<3>, Error> {
        let lengths: Vec<usize> = sentences.tokens.iter().map(Vec::len).collect();
        self.forward_padded(sentences, &lengths, pass)
    }

    /// The same of rows that are padded already: positions from `lengths` on are not seen.
    pub fn forward_padded(
        &self,
        sentences: &Sentences<'_>,
        lengths: &[usize],
        pass: &mut Pass,
    ) -> Result<Tensor<3>, Error> {
        let device = self.embedding.weight.val().device();
        let tokens = ids(sentences.tokens, &device);
        let [batch, length] = tokens.dims();
        let all = |of: &dyn Fn(usize) -> i64| -> Tensor<2, Int> {
            let numbers: Vec<i64> = (0..batch * length).map(|at| of(at % length.max(1))).collect();
            Tensor::from_data(TensorData::new(numbers, [batch, length]), &tokens.device())
        };
        let token_types = match sentences.token_types {
            Some(token_types) => ids(token_types, &device),
            None => all(&|_| 0),
        };
        let x = self.embedding.forward(tokens.clone())?;
        let x = regard_burn::residual(x, self.token_types.forward(token_types)?, None);
        let places = self.positions.forward(all(&|place| place.cast_signed() as i64))?;
        let x = self.norm.forward(regard_burn::residual(x, places, None));
        let whole = lengths.iter().all(|n| *n == length);
        let mask = if whole { Mask::full() } else { Mask::lengths(lengths) };
        pass.now(RowSide::Source(Some(lengths)));
        through(&self.blocks, x, ("encoder", "source"), &mask, None, pass)
    }

    /// What the first position says of all: `tanh(pooler(x))`, `[batch, d_model]`.
    #[must_use]
    pub fn pooled(&self, hidden: Tensor<3>) -> Tensor<2> {
        let [batch, _, d_model] = hidden.dims();
        self.pooler.forward(hidden.narrow(1, 0, 1).reshape([batch, d_model])).tanh()
    }

    /// One vector of length 1 for each sentence: the mean over its positions.
    pub fn embed(&self, sentences: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, Error> {
        let hidden = self
            .forward(&Sentences { tokens: sentences, token_types: None }, &mut Pass::default())?;
        let [_, length, d_model] = hidden.dims();
        let numbers = crate::stack::numbers(hidden);
        let mean = |(i, tokens): (usize, &Vec<u32>)| {
            let rows = numbers[i * length * d_model..].chunks(d_model).take(tokens.len());
            let mut sum = vec![0.0f32; d_model];
            rows.for_each(|row| sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x));
            let size = sum.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-12);
            sum.into_iter().map(|x| x / size).collect()
        };
        Ok(sentences.iter().enumerate().map(mean).collect())
    }
}
