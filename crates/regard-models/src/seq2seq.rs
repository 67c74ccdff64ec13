//! A translator of recurrent nets: one reads both ways, one writes and looks at what was read, as Bahdanau et al. 2015 or Luong et al.
//! 2015 have it.

use crate::error::Error;
use crate::files::LuongScore;
use crate::files::Seq2SeqConfig;
use crate::generate::Decoder;
use crate::nn::{Bahdanau, DropoutRates, Embedding, Gru, GruCell, GruStates, Linear, Luong};
use crate::pass::Pass;
use crate::recorder::Recorder;
use crate::stack::numbers;
use crate::stack::{EMBEDDINGS, TARGET_EMBEDDINGS, ids};
use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use regard::Mask;
use regard_burn::{Activation, GruAttention, Steps, dropout, gru_with_attention, linear};

/// For a source of n tokens and a target `y[1..m]`:
///
/// ```text
/// h[1..n], last = encoder of source[tokens]
/// s[0]          = tanh(bridge last)
/// c[t]          = attention of the query s[t-1] over h; without attention, last
/// s[t]          = decoder of the input [target[y[t]]; c[t]] and the state s[t-1]
/// scores[t]     = head [s[t]; c[t]]
/// ```
///
/// With one of Luong's scores the query is the state of the same step, so that all positions attend in one call:
///
/// ```text
/// s[t]          = decoder of the input target[y[t]] and the state s[t-1]
/// c[t]          = attention of the query s[t] over h
/// scores[t]     = head tanh(combine [c[t]; s[t]])
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
    /// Bahdanau's attention to what was read. Without any attention, the decoder knows what both ways of the encoder ended with.
    pub attention: Option<Bahdanau>,
    /// Luong's attention, in the place of Bahdanau's.
    pub luong: Option<LuongDecoder>,
    /// Writes.
    pub decoder: GruCell,
    /// The scores of tokens of the target.
    pub head: Linear,
    #[module(skip)]
    config: Seq2SeqConfig,
    #[module(skip)]
    dropout: DropoutRates,
}

/// What Luong's decoder has behind its states.
#[derive(Module, Debug)]
pub struct LuongDecoder {
    /// Of a state over what was read.
    pub attention: Luong,
    /// `[decoder_hidden, 2 encoder_hidden + decoder_hidden]`, without a bias: what was seen, then the state.
    pub combine: Linear,
}

impl LuongDecoder {
    fn new(score: LuongScore, [hidden, read]: [usize; 2], device: &Device) -> Self {
        Self {
            attention: Luong::new(score, [hidden, read], device),
            combine: Linear::new([read + hidden, hidden], false, device),
        }
    }

    /// `tanh(combine [c; s])` of states `[batch, length, hidden]`.
    fn forward(
        &self,
        memory: &Seq2SeqMemory,
        states: Tensor<3>,
        recorder: &mut Recorder,
    ) -> Result<Tensor<3>, Error> {
        let values = memory.states.clone();
        let keys = memory.keys.clone().unwrap_or_else(|| values.clone());
        let seen =
            self.attention.attend([states.clone(), keys, values], &memory.mask(), recorder)?;
        Ok(self.combine.forward(Tensor::cat(vec![seen, states], 2)).tanh())
    }
}

/// A batch of sources as a [`Seq2Seq`] has read them.
#[derive(Clone, Debug)]
pub struct Seq2SeqMemory {
    /// After each position, both ways: `[batch, length, 2 encoder_hidden]`.
    pub states: Tensor<3>,
    /// The same as keys, where there is attention that projects them.
    keys: Option<Tensor<3>>,
    /// After all, both ways: `[batch, 2 encoder_hidden]`.
    last: Tensor<2>,
    /// What writing begins with, `[batch, decoder_hidden]`.
    first: Tensor<2>,
    /// Of each row.
    lengths: Vec<usize>,
}

impl Seq2SeqMemory {
    fn mask(&self) -> Mask {
        let length = self.states.dims()[1];
        match self.lengths.iter().all(|own| *own == length) {
            true => Mask::full(),
            false => Mask::lengths(&self.lengths),
        }
    }

    /// These rows of it.
    fn rows(&self, rows: &[usize]) -> Self {
        Self {
            states: chosen(&self.states, rows),
            keys: self.keys.as_ref().map(|keys| chosen(keys, rows)),
            last: chosen(&self.last, rows),
            first: chosen(&self.first, rows),
            lengths: rows.iter().map(|row| self.lengths[*row]).collect(),
        }
    }
}

impl Seq2Seq {
    /// With random weights. `dropout.rate` is dropped of embeddings and of what scores are made of, while training.
    pub fn new(
        config: &Seq2SeqConfig,
        dropout: DropoutRates,
        device: &Device,
    ) -> Result<Self, Error> {
        let Seq2SeqConfig { embedding, encoder_hidden, decoder_hidden, attention_hidden, .. } =
            *config;
        sized(&[
            ("embedding", embedding),
            ("encoder_hidden", encoder_hidden),
            ("decoder_hidden", decoder_hidden),
            ("attention_hidden", attention_hidden.unwrap_or(1)),
            ("source_vocab", config.source_vocab),
            ("target_vocab", config.target_vocab),
        ])?;
        let score = config.luong()?;
        let read = 2 * encoder_hidden;
        // What the decoder reads beside a word, and what scores are made of.
        let (beside, features) = match score {
            Some(_) => (0, decoder_hidden),
            None => (read, decoder_hidden + read),
        };
        let table = |entries: usize| Embedding::new([entries, embedding], 1.0, device);
        Ok(Self {
            source: table(config.source_vocab),
            target: table(config.target_vocab),
            encoder: Gru::new([embedding, encoder_hidden], true, device),
            bridge: Linear::new([read, decoder_hidden], true, device),
            attention: attention_hidden
                .filter(|_| score.is_none())
                .map(|hidden| Bahdanau::new([decoder_hidden, read, hidden], device)),
            luong: score.map(|score| LuongDecoder::new(score, [decoder_hidden, read], device)),
            decoder: GruCell::new([embedding + beside, decoder_hidden], device),
            head: Linear::new([features, config.target_vocab], true, device),
            config: *config,
            dropout,
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
        pass: &mut Pass,
    ) -> Result<Seq2SeqMemory, Error> {
        self.follows(pass)?;
        let [batch, length] = source.dims();
        let x = dropout(self.source.forward(source)?, pass.drops(self.dropout.rate, EMBEDDINGS));
        let GruStates { states, last } = self.encoder.forward(x, lengths)?;
        Ok(Seq2SeqMemory {
            keys: match (&self.attention, &self.luong) {
                (Some(attention), _) => Some(attention.project(states.clone())),
                (None, Some(luong)) => luong.attention.project(states.clone()),
                (None, None) => None,
            },
            states,
            first: self.bridge.forward(last.clone()).tanh(),
            last,
            lengths: lengths.map_or_else(|| vec![length; batch], <[usize]>::to_vec),
        })
    }

    /// The scores of what comes after each position of `target [batch, length]`: `[batch, length, vocab]`.
    pub fn decode(
        &self,
        memory: &Seq2SeqMemory,
        target: Tensor<2, Int>,
        pass: &mut Pass,
    ) -> Result<Tensor<3>, Error> {
        self.follows(pass)?;
        let after = self.steps(memory, target, pass)?;
        pass.recorder.at(0, "decoder", "target");
        let after =
            pass.recorder.within("cross", |recorder| self.features(memory, after, recorder))?;
        // One place for each thing that drops; embeddings have their own.
        Ok(self.head.forward(dropout(after, pass.drops(self.dropout.rate, 0))))
    }

    /// What each position of the target sees of the source, `[batch, length, source length]`. For looking.
    pub fn weights(
        &self,
        memory: &Seq2SeqMemory,
        target: Tensor<2, Int>,
    ) -> Result<Tensor<3>, Error> {
        if let Some(luong) = &self.luong {
            let states = self.steps(memory, target, &Pass::default())?;
            return luong.attention.weights(states, memory.states.clone(), &memory.mask());
        }
        let Some(attention) = &self.attention else {
            let known = "a model with attention_hidden or a score of Luong has weights";
            return Err(Error::unsupported("attention_hidden", &"none", known));
        };
        let [batch, length] = target.dims();
        let after = self.steps(memory, target, &Pass::default())?;
        if batch * length == 0 {
            let sizes = [batch, length, memory.states.dims()[1]];
            return Ok(Tensor::zeros(sizes, &memory.states.device().inner()));
        }
        // A position is looked from by the state before it; the only one of an empty translation by the first alone.
        let first = memory.first.clone().unsqueeze_dim(1);
        let before = match length - 1 {
            0 => first,
            n => {
                let states = after.narrow(2, 0, self.decoder.features()).narrow(1, 0, n);
                Tensor::cat(vec![first, states], 1)
            }
        };
        attention.weights(before, memory.states.clone(), &memory.mask())
    }

    /// Refuses what the model cannot follow. Products can be recorded.
    fn follows(&self, pass: &Pass) -> Result<(), Error> {
        match &self.luong {
            Some(luong) if luong.attention.concat.is_none() => pass.unchanged(),
            _ => pass.without_products(),
        }
    }

    /// What scores are made of, given what [`steps`](Self::steps) returns.
    fn features(
        &self,
        memory: &Seq2SeqMemory,
        after: Tensor<3>,
        recorder: &mut Recorder,
    ) -> Result<Tensor<3>, Error> {
        match &self.luong {
            Some(luong) => luong.forward(memory, after, recorder),
            None => Ok(after),
        }
    }

    /// `[s; c]` after each position of the target; `s` alone with Luong's attention, which comes after all of them.
    fn steps(
        &self,
        memory: &Seq2SeqMemory,
        target: Tensor<2, Int>,
        pass: &Pass,
    ) -> Result<Tensor<3>, Error> {
        let [batch, length] = target.dims();
        let (found, read) = (memory.lengths.len(), memory.states.dims()[2]);
        if batch != found {
            let why =
                format!("target has {batch} rows, source has {found}; they must be equally many");
            return Err(Error::format("batch", why));
        }
        if batch * length == 0 {
            let beside = if self.luong.is_some() { 0 } else { read };
            let sizes = [batch, length, beside + self.decoder.features()];
            return Ok(Tensor::zeros(sizes, &memory.states.device().inner()));
        }
        let words = self.target.forward(target)?;
        let words = dropout(words, pass.drops(self.dropout.rate, TARGET_EMBEDDINGS));
        if self.luong.is_some() {
            let x = self.decoder.input.forward(words);
            return Ok(self.decoder.states(x, memory.first.clone(), Steps::default()));
        }
        // Of the input, the part of the words is known for all positions before the first step.
        let (input, embedding) = (&self.decoder.input, self.config.embedding);
        let [of_words, context] = [(0, embedding), (embedding, read)]
            .map(|(first, n)| input.weight.val().narrow(1, first, n));
        let bias = input.bias.as_ref().map(Param::val);
        let x = linear(words, of_words, bias, Activation::None);
        let first = memory.first.clone();
        let (Some(attention), Some(keys)) = (&self.attention, &memory.keys) else {
            let hidden = 3 * self.decoder.features();
            let last = linear(memory.last.clone(), context, None, Activation::None);
            let x = x + last.unsqueeze_dim::<3>(1).expand([batch, length, hidden]);
            let states = self.decoder.states(x, first, Steps::default());
            let seen = memory.last.clone().unsqueeze_dim::<3>(1).expand([batch, length, read]);
            return Ok(Tensor::cat(vec![states, seen], 2));
        };
        let look = GruAttention {
            query: attention.query.weight.val(),
            score: attention.score.val(),
            keys: keys.clone(),
            values: memory.states.clone(),
            context,
            lengths: memory.lengths.clone(),
        };
        let (weight, bias) = (self.decoder.hidden.weight.val(), self.decoder.bias());
        Ok(gru_with_attention(x, first, weight, bias, look))
    }

    /// A generation session that translates these sources. No gradients.
    pub fn session(&self, sources: &[Vec<u32>]) -> Result<Seq2SeqSession<'_>, Error> {
        let lengths: Vec<usize> = sources.iter().map(Vec::len).collect();
        let read =
            self.encode(ids(sources, &Device::flex()), Some(&lengths), &mut Pass::default())?;
        let memory = Seq2SeqMemory {
            states: read.states.inner(),
            keys: read.keys.map(Tensor::inner),
            last: read.last.inner(),
            first: read.first.inner(),
            lengths: read.lengths,
        };
        Ok(Seq2SeqSession { model: self, memory })
    }
}

/// A [`Seq2Seq`] in a generation session: translations of its sources.
#[derive(Debug)]
pub struct Seq2SeqSession<'a> {
    model: &'a Seq2Seq,
    memory: Seq2SeqMemory,
}

impl Decoder for Seq2SeqSession<'_> {
    type State = RecurrentState;
    type Error = Error;

    fn vocab(&self) -> usize {
        self.model.config.target_vocab
    }

    fn context(&self) -> Option<usize> {
        None
    }

    fn start(&mut self, row: usize) -> Result<RecurrentState, Error> {
        if row >= self.memory.lengths.len() {
            return Err(Error::no_source(row, self.memory.lengths.len()));
        }
        Ok(RecurrentState { row, state: numbers(self.memory.first.clone().narrow(0, row, 1)) })
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
        let (model, memory) = (self.model, &self.memory);
        let last = in_steps(states, tokens, scored, |rows, ids, state| {
            let memory = Seq2SeqMemory { first: state, ..memory.rows(rows) };
            let after = model.steps(&memory, ids, &Pass::default())?;
            let state = after.clone().narrow(2, 0, model.decoder.features());
            let features = model.features(&memory, after, &mut Recorder::off())?;
            Ok((state.squeeze_dim::<2>(1), features.squeeze_dim::<2>(1)))
        })?;
        Ok(last.map_or_else(Vec::new, |last| numbers(model.head.forward(last))))
    }
}

/// What a recurrent decoder knows of what it has written: its state, and nothing that grows.
#[derive(Clone, Debug, PartialEq)]
pub struct RecurrentState {
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

/// Rows of a tensor.
pub(crate) fn chosen<const D: usize>(x: &Tensor<D>, rows: &[usize]) -> Tensor<D> {
    let places: Vec<i64> = rows.iter().map(|row| row.cast_signed() as i64).collect();
    let places = TensorData::new(places, [rows.len()]);
    x.clone().select(0, Tensor::from_data(places, &x.device().inner()))
}

/// Feeds a token to all states, then the next to those that have one more, and so on. A step takes the sources, ids `[states, 1]` and
/// states `[states, features]` to the next states, and to what scores are made of. Returns the last of these, `[scored, ..]`.
pub(crate) fn in_steps(
    all: &mut [RecurrentState],
    tokens: &[&[u32]],
    scored: &[usize],
    mut step: impl FnMut(&[usize], Tensor<2, Int>, Tensor<2>) -> Result<(Tensor<2>, Tensor<2>), Error>,
) -> Result<Option<Tensor<2>>, Error> {
    let device = Device::flex();
    let mut found: Vec<Vec<f32>> = vec![Vec::new(); all.len()];
    for t in 0..tokens.iter().map(|tokens| tokens.len()).max().unwrap_or(0) {
        let fed: Vec<usize> = (0..all.len()).filter(|i| t < tokens[*i].len()).collect();
        let rows: Vec<usize> = fed.iter().map(|i| all[*i].row).collect();
        let words: Vec<Vec<u32>> = fed.iter().map(|i| vec![tokens[*i][t]]).collect();
        let states: Vec<f32> = fed.iter().flat_map(|i| all[*i].state.iter().copied()).collect();
        let sizes = [fed.len(), states.len() / fed.len()];
        let states = Tensor::from_data(TensorData::new(states, sizes), &device);
        let (states, last) = step(&rows, ids(&words, &device), states)?;
        let (widths, states, last) =
            ([states.dims()[1], last.dims()[1]], numbers(states), numbers(last));
        for ((i, state), last) in
            fed.iter().zip(states.chunks(widths[0])).zip(last.chunks(widths[1]))
        {
            all[*i].state = state.to_vec();
            found[*i] = last.to_vec();
        }
    }
    let found = found.into_iter().zip(scored).filter(|(_, scored)| **scored > 0);
    let found: Vec<Vec<f32>> = found.map(|(found, _)| found).collect();
    Ok(found.first().map(Vec::len).map(|width| {
        Tensor::from_data(TensorData::new(found.concat(), [found.len(), width]), &device)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::AttentionScore;
    use crate::generate::{DecodingStrategy, StoppingCriteria, generate};
    use std::ops::ControlFlow;

    const CONFIG: Seq2SeqConfig = Seq2SeqConfig {
        embedding: 6,
        encoder_hidden: 5,
        decoder_hidden: 7,
        attention_hidden: Some(4),
        attention_score: AttentionScore::Additive,
        source_vocab: 9,
        target_vocab: 8,
    };

    /// With Bahdanau's attention, without attention, and with each score of Luong.
    fn models() -> Vec<Seq2Seq> {
        let without = Seq2SeqConfig { attention_hidden: None, ..CONFIG };
        [of(&CONFIG), of(&without)].into_iter().chain(luongs()).collect()
    }

    fn luongs() -> [Seq2Seq; 3] {
        let scores = [
            (AttentionScore::Dot, None, 10),
            (AttentionScore::General, None, 7),
            (AttentionScore::Concat, Some(4), 7),
        ];
        scores.map(|(attention_score, attention_hidden, decoder_hidden)| {
            of(&Seq2SeqConfig { attention_score, attention_hidden, decoder_hidden, ..CONFIG })
        })
    }

    fn model() -> Seq2Seq {
        of(&CONFIG)
    }

    fn of(config: &Seq2SeqConfig) -> Seq2Seq {
        let device = Device::flex();
        device.seed(7);
        Seq2Seq::new(config, DropoutRates::default(), &device).expect("sizes are sizes")
    }

    fn close(found: &[f32], wanted: &[f32]) {
        assert_eq!(found.len(), wanted.len());
        for (a, b) in found.iter().zip(wanted) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
    }

    fn written(
        model: &Seq2Seq,
        sources: &[Vec<u32>],
        prompts: &[Vec<u32>],
        search: &DecodingStrategy,
    ) -> Vec<Vec<u32>> {
        let mut session = model.session(sources).expect("ids are tokens");
        let stop = StoppingCriteria { max_tokens: 6, end: vec![] };
        let said =
            generate(&mut session, prompts, search, &stop, &mut |_, _| ControlFlow::Continue(()));
        said.expect("scores are finite").into_iter().map(|one| one.tokens).collect()
    }

    #[test]
    fn what_is_written_is_what_the_scores_of_the_whole_say() {
        for model in models() {
            let (source, prompt) = (vec![1, 2, 3, 4], vec![1, 5, 2]);
            let said = written(
                &model,
                std::slice::from_ref(&source),
                std::slice::from_ref(&prompt),
                &DecodingStrategy::Greedy,
            )
            .remove(0);
            let whole: Vec<u32> = prompt.iter().chain(&said).copied().collect();
            let (device, mut pass) = (Device::flex(), Pass::default());
            let memory = model
                .encode(ids(std::slice::from_ref(&source), &device), None, &mut pass)
                .expect("ids are tokens");
            let target = ids(std::slice::from_ref(&whole), &device);
            let scores = model.decode(&memory, target, &mut pass).expect("ids are tokens");
            let best: Vec<u32> = (scores.clone().argmax(2).into_data().iter::<i64>())
                .flat_map(u32::try_from)
                .collect();
            assert_eq!(said, best[2..8]);
            let mut session = model.session(&[source]).expect("ids are tokens");
            let mut states = [session.start(0).expect("a source")];
            let fed = whole.iter().flat_map(|token| {
                session.feed(&mut states, &[&[*token]], &[1]).expect("ids are tokens")
            });
            close(&fed.collect::<Vec<f32>>(), &numbers(scores));
        }
    }

    /// The definition of Luong's decoder for one source, step by step: scores, and weights.
    fn defined(model: &Seq2Seq, source: &[u32], target: &[u32]) -> [Vec<f32>; 2] {
        let (device, luong) = (Device::flex(), model.luong.as_ref().expect("one of Luong's"));
        let row = |x: Tensor<3>, t: usize| x.narrow(1, t, 1).squeeze_dim::<2>(1);
        let words = |ids: Tensor<2, Int>, table: &Embedding| table.forward(ids).expect("tokens");
        let read = model.encoder.forward(words(ids(&[source], &device), &model.source), None);
        let GruStates { states: h, last } = read.expect("lengths fit");
        let y = words(ids(&[target], &device), &model.target);
        let mut s = model.bridge.forward(last).tanh();
        let (mut scores, mut weights) = (Vec::new(), Vec::new());
        for t in 0..target.len() {
            s = model.decoder.forward(row(y.clone(), t), s);
            let score = |h: Tensor<2>| {
                let Luong { general, concat, score } = &luong.attention;
                match (general, concat, score) {
                    (Some(general), _, _) => (s.clone() * general.forward(h)).sum(),
                    (_, Some(concat), Some(score)) => {
                        let hidden = concat.forward(Tensor::cat(vec![s.clone(), h], 1)).tanh();
                        (hidden * score.val().unsqueeze()).sum()
                    }
                    _ => (s.clone() * h).sum(),
                }
            };
            let of_keys = (0..source.len()).map(|i| numbers(score(row(h.clone(), i)))[0].exp());
            let of_keys: Vec<f32> = of_keys.collect();
            let sum: f32 = of_keys.iter().sum();
            let mut c = Tensor::zeros([1, 2 * CONFIG.encoder_hidden], &device);
            for (i, weight) in of_keys.iter().map(|x| x / sum).enumerate() {
                c = c + row(h.clone(), i) * weight;
                weights.push(weight);
            }
            let o = luong.combine.forward(Tensor::cat(vec![c, s.clone()], 1)).tanh();
            scores.extend(numbers(model.head.forward(o)));
        }
        [scores, weights]
    }

    #[test]
    fn the_decoder_of_luong_is_its_definition_for_each_score() {
        let (sources, targets) =
            ([vec![1, 2, 3, 4, 5], vec![6, 7]], [vec![1, 5, 2], vec![3, 1, 4]]);
        let device = Device::flex();
        for model in luongs() {
            let mut pass = Pass::default();
            let memory = model
                .encode(ids(&sources, &device), Some(&[5, 2]), &mut pass)
                .expect("ids are tokens");
            let target = ids(&targets, &device);
            let scores = model.decode(&memory, target.clone(), &mut pass).expect("ids are tokens");
            let weights = model.weights(&memory, target).expect("it attends");
            assert_eq!(weights.dims(), [2, 3, 5]);
            for (i, (source, target)) in sources.iter().zip(&targets).enumerate() {
                let [of_scores, of_weights] = defined(&model, source, target);
                close(&numbers(scores.clone().narrow(0, i, 1)), &of_scores);
                let seen = weights.clone().narrow(0, i, 1).narrow(2, 0, source.len());
                close(&numbers(seen), &of_weights);
            }
            let padding = weights.narrow(0, 1, 1).narrow(2, 2, 3);
            assert_eq!(numbers(padding), [0.0; 9]);
        }
    }

    #[test]
    fn products_are_recorded_and_hidden_layers_are_not() {
        let device = Device::flex();
        for model in models() {
            let score = model.config.attention_score;
            let products = matches!(score, AttentionScore::Dot | AttentionScore::General);
            let mut pass = Pass { recorder: Recorder::on(), ..Pass::default() };
            let memory = model.encode(ids(&[vec![1, 2, 3]], &device), None, &mut pass);
            if !products {
                assert!(memory.unwrap_err().to_string().contains("hidden layer"));
                continue;
            }
            let memory = memory.expect("products");
            model.decode(&memory, ids(&[vec![1, 2]], &device), &mut pass).expect("products");
            let trace = pass.recorder.trace("", &[]);
            assert_eq!(trace.layers.len(), 1);
            let layer = &trace.layers[0];
            assert_eq!((layer.kind.as_str(), layer.data.size()), ("cross", [2, 3]));
            assert_eq!([layer.rows.as_str(), layer.cols.as_str()], ["target", "source"]);
            let mut hot = Pass { temperature: 2.0, ..Pass::default() };
            let error = model.encode(ids(&[vec![1]], &device), None, &mut hot).unwrap_err();
            assert!(error.to_string().contains("temperature"), "{error}");
        }
    }

    #[test]
    fn rows_do_not_depend_on_one_another() {
        let sources = [vec![1, 2, 3, 4, 5], vec![6], vec![7, 8]];
        let prompts = [vec![1], vec![1, 2, 3], vec![2, 1]];
        let searches =
            [DecodingStrategy::Greedy, DecodingStrategy::Beam { width: 3, length_penalty: 1.0 }];
        for (model, search) in
            models().into_iter().flat_map(|m| searches.clone().map(|s| (m.clone(), s)))
        {
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
        let error =
            Seq2Seq::new(&none, DropoutRates::default(), &Device::flex()).unwrap_err().to_string();
        assert!(error.contains("decoder_hidden = 0"), "{error}");
        let uneven = Seq2SeqConfig {
            attention_score: AttentionScore::Dot,
            attention_hidden: None,
            ..CONFIG
        };
        let error = Seq2Seq::new(&uneven, DropoutRates::default(), &Device::flex())
            .unwrap_err()
            .to_string();
        assert!(error.contains('7') && error.contains("10 features"), "{error}");
        let model = model();
        let error = model.session(&[vec![1], vec![9]]).unwrap_err().to_string();
        assert!(error.contains("id 9"), "{error}");
        let mut session = model.session(&[vec![1]]).expect("ids are tokens");
        assert!(session.start(1).unwrap_err().to_string().contains("there are 1"));
        let memory = session.memory.clone();
        let two = ids(&[vec![1], vec![2]], &Device::flex());
        let error = model.decode(&memory, two, &mut Pass::default()).unwrap_err();
        assert!(error.to_string().contains("target has 2 rows"), "{error}");
    }

    #[test]
    fn an_empty_source_says_something_finite() {
        for model in models() {
            for sources in [vec![vec![], vec![1, 2]], vec![vec![]; 2]] {
                let begins = [vec![1], vec![1]];
                assert_eq!(written(&model, &sources, &begins, &DecodingStrategy::Greedy).len(), 2);
            }
            assert!(written(&model, &[], &[], &DecodingStrategy::Greedy).is_empty());
            let device = Device::flex();
            let memory = model
                .encode(ids(&[vec![], vec![1]], &device), Some(&[0, 1]), &mut Pass::default())
                .expect("ids are tokens");
            for (length, target) in [(0, vec![]), (2, vec![1, 2])] {
                let target = ids(&[target.clone(), target], &device);
                let scores = model.decode(&memory, target.clone(), &mut Pass::default());
                let scores = scores.expect("ids are tokens");
                assert_eq!(scores.dims(), [2, length, 8]);
                assert!(numbers(scores).iter().all(|x| x.is_finite()));
                if model.attention.is_some() || model.luong.is_some() {
                    let weights = model.weights(&memory, target).expect("it attends");
                    assert_eq!(weights.dims(), [2, length, 1]);
                    assert_eq!(numbers(weights), [vec![0.0; length], vec![1.0; length]].concat());
                }
            }
        }
    }

    #[test]
    fn a_seed_drops_the_same_again_and_none_drops_nothing() {
        let (device, dropout) = (Device::flex(), DropoutRates { rate: 0.5, attention: 0.0 });
        for model in models() {
            let model = Seq2Seq { dropout, ..model };
            let scores = |seed: Option<u64>| {
                let mut pass = Pass { seed, ..Pass::default() };
                let source = ids(&[vec![1, 2, 3]], &device);
                let memory = model.encode(source, None, &mut pass).expect("ids are tokens");
                let target = ids(&[vec![1, 2]], &device);
                numbers(model.decode(&memory, target, &mut pass).expect("ids are tokens"))
            };
            assert_eq!(scores(Some(1)), scores(Some(1)));
            assert_ne!(scores(Some(1)), scores(Some(2)));
            assert_eq!(scores(None), scores(None));
            assert_ne!(scores(None), scores(Some(1)));
        }
    }
}
