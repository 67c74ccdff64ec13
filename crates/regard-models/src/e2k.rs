//! The translator of e2k, which writes English words in katakana: recurrent nets before and after an attention with several heads.

use crate::error::Error;
use crate::files::{Architecture, Config};
use crate::generate::Decoder;
use crate::nn::{Embedding, Gru, GruCell, Linear, MultiHead, MultiHeadConfig, split};
use crate::pass::{Pass, RowSide};
use crate::seq2seq::{RecurrentState, chosen, in_steps};
use crate::stack::ids;
use crate::stack::numbers;
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use regard::Mask;

/// For a source of n tokens and a target `y[1..m]`:
///
/// ```text
/// h[1..n]   = tanh(bridge of the encoder of source[tokens])
/// b[t]      = before of the input target[y[t]]
/// c[t]      = attention of b[t] over h
/// a[t]      = after of the input [b[t]; c[t]]
/// scores[t] = head a[t]
/// ```
///
/// All states are 0 at first: the target knows of the source by the attention alone.
#[derive(Module, Debug)]
pub struct E2k {
    /// A row for each token of the source.
    pub source: Embedding,
    /// A row for each token of the target.
    pub target: Embedding,
    /// Reads, both ways.
    pub encoder: Gru,
    /// From both ways to `d_model`.
    pub bridge: Linear,
    /// RowSide at what was read.
    pub attention: MultiHead,
    /// Writes, before it has looked.
    pub before: GruCell,
    /// Writes, after it has looked.
    pub after: GruCell,
    /// The scores of tokens of the target.
    pub head: Linear,
    #[module(skip)]
    config: Config,
}

/// A batch of sources as an [`E2k`] has read them.
#[derive(Clone, Debug)]
pub struct E2kMemory {
    /// `[batch, heads, length, head_dim]`, both.
    keys: Tensor<4>,
    values: Tensor<4>,
    mask: Mask,
}

impl E2k {
    /// With random weights.
    pub fn new(config: &Config, device: &Device) -> Result<Self, Error> {
        if config.architecture != Architecture::E2k {
            let found = format!("{:?}", config.architecture);
            return Err(Error::unsupported(
                "architecture",
                &found,
                "e2k is made of recurrent nets",
            ));
        }
        let (d_model, n_heads) = (config.d_model, config.heads.q);
        if n_heads == 0 || !d_model.is_multiple_of(n_heads) || config.heads.kv != n_heads {
            let known = format!("equally many of keys that divide d_model, {d_model}");
            return Err(Error::unsupported("heads", &n_heads, known));
        }
        let target_vocab = config.target_vocab.unwrap_or(config.vocab);
        let table = |entries: usize| Embedding::new([entries, d_model], 1.0, device);
        Ok(Self {
            source: table(config.vocab),
            target: table(target_vocab),
            encoder: Gru::new([d_model, d_model], true, device),
            bridge: Linear::new([2 * d_model, d_model], true, device),
            attention: MultiHead::new(&MultiHeadConfig::new(d_model, n_heads), device),
            before: GruCell::new([d_model, d_model], device),
            after: GruCell::new([2 * d_model, d_model], device),
            head: Linear::new([d_model, target_vocab], true, device),
            config: config.clone(),
        })
    }

    /// What it is.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Reads `source [batch, length]`; `lengths` where its rows differ in length.
    pub fn encode(
        &self,
        source: Tensor<2, Int>,
        lengths: Option<&[usize]>,
    ) -> Result<E2kMemory, Error> {
        let read = self.encoder.forward(self.source.forward(source)?, lengths)?;
        let memory = self.bridge.forward(read.states).tanh();
        Ok(E2kMemory {
            keys: split(self.attention.k.forward(memory.clone()), self.config.heads.q),
            values: split(self.attention.v.forward(memory), self.config.heads.q),
            mask: lengths.map_or_else(Mask::full, Mask::lengths),
        })
    }

    /// The scores of what comes after each position of `target [batch, length]`: `[batch, length, vocab]`.
    pub fn decode(
        &self,
        memory: &E2kMemory,
        target: Tensor<2, Int>,
        pass: &mut Pass,
    ) -> Result<Tensor<3>, Error> {
        let before = self.before.over(self.target.forward(target)?, None, false).states;
        pass.recorder.at(0, "decoder", "target");
        pass.now(RowSide::Target);
        let seen = pass.within("cross", |pass| self.look(memory, before.clone(), pass))?;
        let after = self.after.over(Tensor::cat(vec![before, seen], 2), None, false).states;
        Ok(self.head.forward(after))
    }

    /// What `x [batch, length, d_model]` sees of what was read.
    fn look(&self, memory: &E2kMemory, x: Tensor<3>, pass: &mut Pass) -> Result<Tensor<3>, Error> {
        let q = split(self.attention.q.forward(x), self.config.heads.q);
        let options = self.attention.options(&memory.mask, pass);
        self.attention.attend([q, memory.keys.clone(), memory.values.clone()], &options, pass)
    }

    /// A generation session that translates these sources. No gradients.
    pub fn session(&self, sources: &[Vec<u32>]) -> Result<E2kSession<'_>, Error> {
        let lengths: Vec<usize> = sources.iter().map(Vec::len).collect();
        let E2kMemory { keys, values, mask } =
            self.encode(ids(sources, &Device::flex()), Some(&lengths))?;
        let memory = E2kMemory { keys: keys.inner(), values: values.inner(), mask };
        Ok(E2kSession { model: self, memory, lengths })
    }
}

/// An [`E2k`] in a generation session: translations of its sources.
#[derive(Debug)]
pub struct E2kSession<'a> {
    model: &'a E2k,
    memory: E2kMemory,
    lengths: Vec<usize>,
}

impl E2kSession<'_> {
    /// The memory of these sources.
    fn rows(&self, rows: &[usize]) -> E2kMemory {
        let lengths: Vec<usize> = rows.iter().map(|row| self.lengths[*row]).collect();
        E2kMemory {
            keys: chosen(&self.memory.keys, rows),
            values: chosen(&self.memory.values, rows),
            mask: Mask::lengths(&lengths),
        }
    }

    /// The states after one more token: of `before`, then of `after`.
    fn step(
        &self,
        rows: &[usize],
        ids: Tensor<2, Int>,
        states: Tensor<2>,
    ) -> Result<[Tensor<2>; 2], Error> {
        let (model, n) = (self.model, self.model.config.d_model);
        let (before, after) = (states.clone().narrow(1, 0, n), states.narrow(1, n, n));
        let before = model.before.forward(model.target.forward(ids)?.squeeze_dim(1), before);
        let seen =
            model.look(&self.rows(rows), before.clone().unsqueeze_dim(1), &mut Pass::default())?;
        let x = Tensor::cat(vec![before.clone(), seen.squeeze_dim(1)], 1);
        Ok([before, model.after.forward(x, after)])
    }
}

impl Decoder for E2kSession<'_> {
    type State = RecurrentState;
    type Error = Error;

    fn vocab(&self) -> usize {
        self.model.config.target_vocab.unwrap_or(self.model.config.vocab)
    }

    fn context(&self) -> Option<usize> {
        self.model.config.context
    }

    fn start(&mut self, row: usize) -> Result<RecurrentState, Error> {
        if row >= self.lengths.len() {
            return Err(Error::no_source(row, self.lengths.len()));
        }
        Ok(RecurrentState { row, state: vec![0.0; 2 * self.model.config.d_model] })
    }

    fn fork(&mut self, state: &RecurrentState) -> Result<RecurrentState, Error> {
        Ok(state.clone())
    }

    fn free(&mut self, _: RecurrentState) -> Result<(), Error> {
        Ok(())
    }

    fn feed(
        &mut self,
        states: &mut [RecurrentState],
        tokens: &[&[u32]],
        scored: &[usize],
    ) -> Result<Vec<f32>, Error> {
        let last = in_steps(states, tokens, scored, |rows, ids, states| {
            let [before, after] = self.step(rows, ids, states)?;
            Ok((Tensor::cat(vec![before, after.clone()], 1), after))
        })?;
        Ok(last.map_or_else(Vec::new, |last| numbers(self.model.head.forward(last))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::{Heads, Positions};
    use crate::generate::{DecodingStrategy, StoppingCriteria, generate};
    use crate::load::parameters;
    use burn::optim::GradientsParams;
    use std::ops::ControlFlow;

    fn model() -> E2k {
        let config = Config {
            architecture: Architecture::E2k,
            d_model: 8,
            n_layers: 1,
            decoder_layers: None,
            heads: Heads { q: 2, kv: 2 },
            head_dim: 4,
            d_ff: None,
            vocab: 9,
            target_vocab: Some(7),
            token_types: None,
            context: None,
            norm_eps: None,
            pre_norm: false,
            positions: Positions::None,
            activation: None,
            attention_bias: true,
            feed_forward_bias: false,
            tie_embeddings: false,
            embedding_scale: None,
            bos: Some(1),
            eos: vec![2],
            pad: None,
            ..Config::of(Architecture::E2k)
        };
        let heads = Heads { q: 3, kv: 3 };
        assert!(E2k::new(&Config { heads, ..config.clone() }, &Device::flex()).is_err());
        Device::flex().seed(7);
        E2k::new(&config, &Device::flex()).expect("sizes fit")
    }

    #[test]
    fn every_parameter_has_a_gradient() {
        let config = model().config;
        let model = E2k::new(&config, &Device::flex().autodiff()).expect("sizes fit");
        let device = Device::flex();
        let memory = model
            .encode(ids(&[vec![1, 2, 3], vec![4]], &device), Some(&[3, 1]))
            .expect("ids are tokens");
        let target = ids(&[vec![1, 2], vec![1, 3]], &device);
        let scores = model.decode(&memory, target, &mut Pass::default()).expect("ids are tokens");
        let grads = GradientsParams::from_grads(scores.powi_scalar(2).sum().backward(), &model);
        assert_eq!(grads.len(), parameters(&model).len());
        let of_first = grads.get::<2>(model.source.weight.id).map(numbers).unwrap_or_default();
        assert!(of_first.iter().any(|x| *x != 0.0) && of_first.iter().all(|x| x.is_finite()));
    }

    #[test]
    fn rows_do_not_depend_on_one_another_and_may_be_empty() {
        let (model, stop) = (model(), StoppingCriteria { max_tokens: 5, end: vec![] });
        let mut hear = |_, _| ControlFlow::Continue(());
        let sources = [vec![1, 2, 3, 4], vec![], vec![5, 6]];
        let prompts = [vec![1], vec![1, 2], vec![1]];
        for search in
            [DecodingStrategy::Greedy, DecodingStrategy::Beam { width: 3, length_penalty: 0.5 }]
        {
            let mut session = model.session(&sources).expect("ids are tokens");
            let all = generate(&mut session, &prompts, &search, &stop, &mut hear)
                .expect("scores are finite");
            for ((source, prompt), one) in sources.iter().zip(&prompts).zip(&all) {
                let mut session =
                    model.session(std::slice::from_ref(source)).expect("ids are tokens");
                let alone =
                    generate(&mut session, std::slice::from_ref(prompt), &search, &stop, &mut hear);
                assert_eq!(alone.expect("scores are finite")[0].tokens, one.tokens);
            }
        }
    }
}
