//! A translator of recurrent nets (Bahdanau et al. 2015): one reads both ways, one writes and looks at what was read.

use crate::error::Error;
use crate::generate::Decoder;
use crate::nn::{Bahdanau, Embedding, Gru, GruCell, GruStates, Linear, cut};
use crate::past::numbers;
use crate::stack::ids;
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use regard::Mask;
use serde::{Deserialize, Serialize};

/// What a [`Seq2Seq`] is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seq2SeqConfig {
    /// Features of a token.
    pub embedding: usize,
    /// Features of a state of the encoder, each way.
    pub encoder_hidden: usize,
    /// Features of a state of the decoder.
    pub decoder_hidden: usize,
    /// Units of the hidden layer of the attention.
    pub attention_hidden: usize,
    /// Tokens of the source.
    pub source_vocab: usize,
    /// Tokens of the target.
    pub target_vocab: usize,
}

/// For a source of n tokens and a target `y[1..m]`:
///
/// ```text
/// h[1..n], last = encoder of source[tokens]
/// s[0]          = tanh(bridge last)
/// c[t]          = attention of the query s[t-1] over h
/// s[t]          = decoder of the input [target[y[t]]; c[t]] and the state s[t-1]
/// scores[t]     = head [s[t]; c[t]]
/// ```
#[derive(Module, Debug)]
pub struct Seq2Seq {
    /// A row for each token of the source.
    pub source: Embedding,
    /// A row for each token of the target.
    pub target: Embedding,
    /// Reads, both ways.
    pub encoder: Gru,
    /// From what was read to what writing begins with.
    pub bridge: Linear,
    /// Looks at what was read.
    pub attention: Bahdanau,
    /// Writes.
    pub decoder: GruCell,
    /// The scores of tokens of the target.
    pub head: Linear,
    #[module(skip)]
    config: Seq2SeqConfig,
}

/// A batch of sources as a [`Seq2Seq`] has read them.
#[derive(Clone, Debug)]
pub struct Seq2SeqMemory {
    /// After each position, both ways: `[batch, length, 2 encoder_hidden]`.
    pub states: Tensor<3>,
    /// The same as keys.
    keys: Tensor<3>,
    /// What writing begins with, `[batch, decoder_hidden]`.
    first: Tensor<2>,
    /// Of each row.
    lengths: Vec<usize>,
}

impl Seq2SeqMemory {
    fn mask(&self) -> Mask {
        Mask::lengths(&self.lengths)
    }

    /// These rows of it.
    fn rows(&self, rows: &[usize]) -> Self {
        Self {
            states: chosen(&self.states, rows),
            keys: chosen(&self.keys, rows),
            first: chosen(&self.first, rows),
            lengths: rows.iter().map(|row| self.lengths[*row]).collect(),
        }
    }
}

/// What a pass of the decoder leaves for each position.
struct Steps {
    /// The states that looked, `[batch, length, decoder_hidden]`.
    before: Tensor<3>,
    /// `[s; c]`
    after: Tensor<3>,
}

impl Seq2Seq {
    /// With random weights.
    pub fn new(config: &Seq2SeqConfig, device: &Device) -> Result<Self, Error> {
        let Seq2SeqConfig { embedding, encoder_hidden, decoder_hidden, attention_hidden, .. } =
            *config;
        sized(&[
            ("embedding", embedding),
            ("encoder_hidden", encoder_hidden),
            ("decoder_hidden", decoder_hidden),
            ("attention_hidden", attention_hidden),
            ("source_vocab", config.source_vocab),
            ("target_vocab", config.target_vocab),
        ])?;
        let read = 2 * encoder_hidden;
        let table = |entries: usize| Embedding::new([entries, embedding], 1.0, device);
        Ok(Self {
            source: table(config.source_vocab),
            target: table(config.target_vocab),
            encoder: Gru::new([embedding, encoder_hidden], true, device),
            bridge: Linear::new([read, decoder_hidden], true, device),
            attention: Bahdanau::new([decoder_hidden, read, attention_hidden], device),
            decoder: GruCell::new([embedding + read, decoder_hidden], device),
            head: Linear::new([decoder_hidden + read, config.target_vocab], true, device),
            config: *config,
        })
    }

    /// What it is.
    #[must_use]
    pub fn config(&self) -> &Seq2SeqConfig {
        &self.config
    }

    /// Reads `source [batch, length]`; `lengths` where its rows differ in length.
    pub fn encode(
        &self,
        source: Tensor<2, Int>,
        lengths: Option<&[usize]>,
    ) -> Result<Seq2SeqMemory, Error> {
        let [batch, length] = source.dims();
        let GruStates { states, last } =
            self.encoder.forward(self.source.forward(source)?, lengths)?;
        Ok(Seq2SeqMemory {
            keys: self.attention.project(states.clone()),
            states,
            first: self.bridge.forward(last).tanh(),
            lengths: lengths.map_or_else(|| vec![length; batch], <[usize]>::to_vec),
        })
    }

    /// The scores of what comes after each position of `target [batch, length]`: `[batch, length, vocab]`.
    pub fn decode(
        &self,
        memory: &Seq2SeqMemory,
        target: Tensor<2, Int>,
    ) -> Result<Tensor<3>, Error> {
        Ok(self.head.forward(self.steps(memory, target)?.after))
    }

    /// What each position of the target sees of the source, `[batch, length, source length]`. For looking.
    pub fn weights(
        &self,
        memory: &Seq2SeqMemory,
        target: Tensor<2, Int>,
    ) -> Result<Tensor<3>, Error> {
        let before = self.steps(memory, target)?.before;
        self.attention.weights(before, memory.states.clone(), &memory.mask())
    }

    fn steps(&self, memory: &Seq2SeqMemory, target: Tensor<2, Int>) -> Result<Steps, Error> {
        let ([batch, length], mask) = (target.dims(), memory.mask());
        let (found, features) =
            (memory.lengths.len(), memory.states.dims()[2] + self.decoder.features());
        if batch != found {
            let why =
                format!("target has {batch} rows, source has {found}; they must be equally many");
            return Err(Error::format("batch", why));
        }
        if length == 0 {
            let none = |features: usize| {
                Tensor::zeros([batch, 0, features], &memory.states.device().inner())
            };
            return Ok(Steps { before: none(self.decoder.features()), after: none(features) });
        }
        let (mut before, mut after) = (Vec::with_capacity(length), Vec::with_capacity(length));
        let mut state = memory.first.clone();
        for word in cut(self.target.forward(target)?.swap_dims(0, 1)) {
            before.push(state.clone());
            let (next, context) = self.step(memory, &mask, word, state)?;
            after.push(Tensor::cat(vec![next.clone(), context], 1));
            state = next;
        }
        Ok(Steps { before: Tensor::stack(before, 1), after: Tensor::stack(after, 1) })
    }

    /// `s[t]` and `c[t]`.
    fn step(
        &self,
        memory: &Seq2SeqMemory,
        mask: &Mask,
        word: Tensor<2>,
        state: Tensor<2>,
    ) -> Result<(Tensor<2>, Tensor<2>), Error> {
        let query = state.clone().unsqueeze_dim(1);
        let context =
            self.attention.attend(query, memory.keys.clone(), memory.states.clone(), mask)?;
        let context: Tensor<2> = context.squeeze_dim(1);
        Ok((self.decoder.forward(Tensor::cat(vec![word, context.clone()], 1), state), context))
    }

    /// To translate these sources with. Gradients are not.
    pub fn writer(&self, sources: &[Vec<u32>]) -> Result<Seq2SeqWriter<'_>, Error> {
        let lengths: Vec<usize> = sources.iter().map(Vec::len).collect();
        let read = self.encode(ids(sources, &Device::flex()), Some(&lengths))?;
        let memory = Seq2SeqMemory {
            states: read.states.inner(),
            keys: read.keys.inner(),
            first: read.first.inner(),
            lengths: read.lengths,
        };
        Ok(Seq2SeqWriter { model: self, memory })
    }
}

/// A [`Seq2Seq`] that writes translations of its sources.
#[derive(Debug)]
pub struct Seq2SeqWriter<'a> {
    model: &'a Seq2Seq,
    memory: Seq2SeqMemory,
}

impl Decoder for Seq2SeqWriter<'_> {
    type Past = RecurrentPast;
    type Error = Error;

    fn vocab(&self) -> usize {
        self.model.config.target_vocab
    }

    fn context(&self) -> Option<usize> {
        None
    }

    fn start(&mut self, row: usize) -> Result<RecurrentPast, Error> {
        has_source(row, self.memory.lengths.len())?;
        Ok(RecurrentPast { row, state: numbers(self.memory.first.clone().narrow(0, row, 1)) })
    }

    fn fork(&mut self, past: &RecurrentPast) -> Result<RecurrentPast, Error> {
        Ok(past.clone())
    }

    fn free(&mut self, _: RecurrentPast) -> Result<(), Error> {
        Ok(())
    }

    fn feed(&mut self, pasts: &mut [RecurrentPast], tokens: &[&[u32]]) -> Result<Vec<f32>, Error> {
        let (model, memory) = (self.model, &self.memory);
        let last = in_steps(pasts, tokens, |rows, ids, state| {
            let memory = memory.rows(rows);
            let word = model.target.forward(ids)?.squeeze_dim(1);
            let (state, context) = model.step(&memory, &memory.mask(), word, state)?;
            Ok((state.clone(), Tensor::cat(vec![state, context], 1)))
        })?;
        Ok(numbers(model.head.forward(last)))
    }
}

/// What a recurrent decoder knows of what it has written: its state, and nothing that grows.
#[derive(Clone, Debug, PartialEq)]
pub struct RecurrentPast {
    /// Which source it belongs to.
    pub(crate) row: usize,
    /// All states of the model, one after another.
    pub(crate) state: Vec<f32>,
}

/// Refuses sizes of which a model has nothing.
pub(crate) fn sized(sizes: &[(&str, usize)]) -> Result<(), Error> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((name, size)) => Err(Error::unsupported(*name, size, "it must be 1 or more")),
        None => Ok(()),
    }
}

/// Refuses a row that has no source.
pub(crate) fn has_source(row: usize, sources: usize) -> Result<(), Error> {
    match row < sources {
        true => Ok(()),
        false => {
            let why =
                format!("it has no source, there are {sources}; there must be one for each prompt");
            Err(Error::format(format!("prompt {row}"), why))
        }
    }
}

/// Rows of a tensor.
pub(crate) fn chosen<const D: usize>(x: &Tensor<D>, rows: &[usize]) -> Tensor<D> {
    let places: Vec<i64> = rows.iter().map(|row| row.cast_signed() as i64).collect();
    let places = TensorData::new(places, [rows.len()]);
    x.clone().select(0, Tensor::from_data(places, &x.device().inner()))
}

/// Feeds a token to all pasts, then the next to those that have one more, and so on. A step takes the sources, ids `[pasts, 1]` and
/// states `[pasts, features]` to the next states, and to what scores are made of. Returns the last of these, `[pasts, ..]`.
pub(crate) fn in_steps(
    pasts: &mut [RecurrentPast],
    tokens: &[&[u32]],
    mut step: impl FnMut(&[usize], Tensor<2, Int>, Tensor<2>) -> Result<(Tensor<2>, Tensor<2>), Error>,
) -> Result<Tensor<2>, Error> {
    let device = Device::flex();
    let mut found: Vec<Vec<f32>> = vec![Vec::new(); pasts.len()];
    for t in 0..tokens.iter().map(|tokens| tokens.len()).max().unwrap_or(0) {
        let fed: Vec<usize> = (0..pasts.len()).filter(|i| t < tokens[*i].len()).collect();
        let rows: Vec<usize> = fed.iter().map(|i| pasts[*i].row).collect();
        let words: Vec<Vec<u32>> = fed.iter().map(|i| vec![tokens[*i][t]]).collect();
        let states: Vec<f32> = fed.iter().flat_map(|i| pasts[*i].state.iter().copied()).collect();
        let sizes = [fed.len(), states.len() / fed.len()];
        let states = Tensor::from_data(TensorData::new(states, sizes), &device);
        let (states, last) = step(&rows, ids(&words, &device), states)?;
        let (widths, states, last) =
            ([states.dims()[1], last.dims()[1]], numbers(states), numbers(last));
        for ((i, state), last) in
            fed.iter().zip(states.chunks(widths[0])).zip(last.chunks(widths[1]))
        {
            pasts[*i].state = state.to_vec();
            found[*i] = last.to_vec();
        }
    }
    let width = found.first().map_or(0, Vec::len);
    Ok(Tensor::from_data(TensorData::new(found.concat(), [pasts.len(), width]), &device))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Search, Stop, generate};
    use std::ops::ControlFlow;

    const CONFIG: Seq2SeqConfig = Seq2SeqConfig {
        embedding: 6,
        encoder_hidden: 5,
        decoder_hidden: 7,
        attention_hidden: 4,
        source_vocab: 9,
        target_vocab: 8,
    };

    fn model() -> Seq2Seq {
        let device = Device::flex();
        device.seed(7);
        Seq2Seq::new(&CONFIG, &device).expect("sizes are sizes")
    }

    fn written(
        model: &Seq2Seq,
        sources: &[Vec<u32>],
        prompts: &[Vec<u32>],
        search: &Search,
    ) -> Vec<Vec<u32>> {
        let mut writer = model.writer(sources).expect("ids are tokens");
        let stop = Stop { max_tokens: 6, end: vec![] };
        let said =
            generate(&mut writer, prompts, search, &stop, &mut |_, _| ControlFlow::Continue(()));
        said.expect("scores are finite").into_iter().map(|one| one.tokens).collect()
    }

    #[test]
    fn what_is_written_is_what_the_scores_of_the_whole_say() {
        let model = model();
        let (source, prompt) = (vec![1, 2, 3, 4], vec![1, 5, 2]);
        let said = written(
            &model,
            std::slice::from_ref(&source),
            std::slice::from_ref(&prompt),
            &Search::Greedy,
        )
        .remove(0);
        let whole: Vec<u32> = prompt.iter().chain(&said).copied().collect();
        let memory = model.encode(ids(&[source], &Device::flex()), None).expect("ids are tokens");
        let scores = model.decode(&memory, ids(&[whole], &Device::flex())).expect("ids are tokens");
        let best: Vec<u32> =
            scores.argmax(2).into_data().iter::<i64>().flat_map(u32::try_from).collect();
        assert_eq!(said, best[2..8]);
    }

    #[test]
    fn rows_do_not_depend_on_one_another() {
        let model = model();
        let sources = [vec![1, 2, 3, 4, 5], vec![6], vec![7, 8]];
        let prompts = [vec![1], vec![1, 2, 3], vec![2, 1]];
        for search in [Search::Greedy, Search::Beam { width: 3, length_penalty: 1.0 }] {
            let together = written(&model, &sources, &prompts, &search);
            for ((source, prompt), one) in sources.iter().zip(&prompts).zip(together) {
                assert_eq!(
                    written(
                        &model,
                        std::slice::from_ref(source),
                        std::slice::from_ref(prompt),
                        &search
                    ),
                    [one]
                );
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let none = Seq2SeqConfig { decoder_hidden: 0, ..CONFIG };
        let error = Seq2Seq::new(&none, &Device::flex()).unwrap_err().to_string();
        assert!(error.contains("decoder_hidden = 0"), "{error}");
        let model = model();
        let error = model.writer(&[vec![1], vec![9]]).unwrap_err().to_string();
        assert!(error.contains("id 9"), "{error}");
        let mut writer = model.writer(&[vec![1]]).expect("ids are tokens");
        assert!(writer.start(1).unwrap_err().to_string().contains("there are 1"));
        let memory = writer.memory.clone();
        let error = model.decode(&memory, ids(&[vec![1], vec![2]], &Device::flex())).unwrap_err();
        assert!(error.to_string().contains("target has 2 rows"), "{error}");
    }

    #[test]
    fn an_empty_source_says_something_finite() {
        let model = model();
        for sources in [vec![vec![], vec![1, 2]], vec![vec![]; 2]] {
            assert_eq!(written(&model, &sources, &[vec![1], vec![1]], &Search::Greedy).len(), 2);
        }
        assert!(written(&model, &[], &[], &Search::Greedy).is_empty());
    }
}
