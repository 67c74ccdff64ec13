//! The encoder and decoder of Vaswani et al. 2017.

use crate::error::Error;
use crate::files::{Architecture, Config};
use crate::infer;
use crate::load::inference;
use crate::nn::{Block, BlockConfig, DropoutRates, Embedding, Linear, Memory, Norm, NormKind};
use crate::pass::{Pass, RowSide};
use crate::stack::{EMBEDDINGS, TARGET_EMBEDDINGS, block_of, only, sinusoid_of, through};
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use regard::Mask;
use regard_burn::dropout;

/// A stack that reads the source, and one that writes the target and looks at what the first has read.
#[derive(Module, Debug)]
pub struct Transformer {
    /// A row for each token of the source.
    pub source: Embedding,
    /// A row for each token of the target; `None` where it shares the table of the source.
    pub target: Option<Embedding>,
    /// Reads.
    pub encoder: Vec<Block>,
    /// After it, where blocks norm what they read.
    pub encoder_norm: Option<Norm>,
    /// Writes.
    pub decoder: Vec<Block>,
    /// After it.
    pub decoder_norm: Option<Norm>,
    /// The scores of tokens of the target; `None` where their embeddings make them.
    pub head: Option<Linear>,
    #[module(skip)]
    config: Config,
    #[module(skip)]
    dropout: DropoutRates,
}

impl Transformer {
    /// With random weights, of which `dropout` says what is dropped while training.
    pub fn new(config: &Config, dropout: DropoutRates, device: &Device) -> Result<Self, Error> {
        let right = config.architecture == Architecture::Transformer;
        only(
            "architecture",
            right,
            &config.architecture,
            "transformer has an encoder and a decoder",
        )?;
        let sines = sinusoid_of(config).is_some();
        only("positions", sines, &config.positions, "a transformer adds sines and cosines")?;
        config.check()?;
        let d_model = config.d_model;
        let reads = block_of(config, NormKind::Layer, dropout);
        let writes = BlockConfig { cross: Some(reads.attention.clone()), ..reads.clone() };
        let target_vocab = config.target_vocab.unwrap_or(config.vocab);
        let deviation = match config.embedding_scale {
            // A table that is also a head makes scores of the size of 1.
            _ if config.tie_embeddings || config.shared_vocabulary => 1.0 / (d_model as f64).sqrt(),
            Some(scale) => 1.0 / scale,
            None => 1.0,
        };
        let table = |entries: usize| Embedding::new([entries, d_model], deviation, device);
        let norm =
            || config.pre_norm.then(|| Norm::new(NormKind::Layer, d_model, reads.eps, device));
        let stack =
            |n: usize, block: &BlockConfig| (0..n).map(|_| Block::new(block, device)).collect();
        Ok(Self {
            source: table(config.vocab),
            target: (!config.shared_vocabulary).then(|| table(target_vocab)),
            encoder: stack(config.n_layers, &reads),
            encoder_norm: norm(),
            decoder: stack(config.decoder_layers.unwrap_or(config.n_layers), &writes),
            decoder_norm: norm(),
            head: (!config.tie_embeddings)
                .then(|| Linear::new([d_model, target_vocab], true, device)),
            config: config.clone(),
            dropout,
        })
    }

    /// What it is.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The table of the target.
    fn written(&self) -> &Embedding {
        self.target.as_ref().unwrap_or(&self.source)
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
        if source.dims()[1] == 0 {
            let why = "no tokens in any row; a transformer reads one at least";
            return Err(Error::format("source", why));
        }
        let x = self.embedded(&self.source, source, 0)?;
        let x = dropout(x, pass.drops(self.dropout.rate, EMBEDDINGS));
        pass.now(RowSide::Source(lengths));
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
        let x = self.embedded(self.written(), target, 0)?;
        let x = dropout(x, pass.drops(self.dropout.rate, TARGET_EMBEDDINGS));
        pass.now(RowSide::Target);
        let seen = lengths.map_or_else(Mask::full, Mask::lengths);
        let memory = Some(Memory { rows: memory, mask: &seen });
        let x = through(&self.decoder, x, ("decoder", "target"), &Mask::causal(), memory, pass)?;
        Ok(self.scores(x))
    }

    fn scores(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.decoder_norm.as_ref().map_or(x.clone(), |norm| norm.forward(x));
        match &self.head {
            Some(head) => head.forward(x),
            None => self.written().scores(x),
        }
    }

    /// A copy for inference, which generates with a KV cache.
    pub fn inference(&self) -> Result<infer::Transformer, Error> {
        inference(self, &self.config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::{Activation, Heads, PairLayout, Positions};
    use crate::generate::{Decoder, DecodingStrategy, StoppingCriteria, generate};
    use crate::load::parameters;
    use crate::pass::Entropies;
    use crate::stack::{ids, numbers};
    use burn::optim::{AdamConfig, GradientsParams};
    use std::ops::ControlFlow;

    fn config() -> Config {
        Config {
            d_model: 16,
            n_layers: 2,
            heads: Heads { q: 2, kv: 2 },
            head_dim: 8,
            d_ff: Some(24),
            vocab: 11,
            pre_norm: true,
            positions: Positions::Sinusoidal {
                pairs: PairLayout::Interleaved,
                first: 0,
                inclusive: false,
            },
            activation: Some(Activation::Relu),
            attention_bias: true,
            feed_forward_bias: true,
            embedding_scale: Some(4.0),
            ..Config::of(Architecture::Transformer)
        }
    }

    fn model(config: &Config, dropout: DropoutRates, device: &Device) -> Transformer {
        device.seed(7);
        Transformer::new(config, dropout, device).expect("an encoder and a decoder")
    }

    /// Two pairs of different lengths.
    fn scores(model: &Transformer, pass: &mut Pass) -> Tensor<3> {
        let device = Device::flex();
        let source = ids(&[vec![1, 2, 3, 4, 5], vec![6, 7, 8]], &device);
        let lengths = Some(&[5, 3][..]);
        let memory = model.encode(source, lengths, pass).expect("ids are tokens");
        let target = ids(&[vec![1, 9, 8], vec![1, 2, 10]], &device);
        model.decode(&memory, lengths, target, pass).expect("ids are tokens")
    }

    #[test]
    fn a_seed_drops_the_same_again_and_none_drops_nothing() {
        let device = Device::flex();
        let first = model(&config(), DropoutRates::default(), &device);
        let plain = numbers(scores(&first, &mut Pass::default()));
        for dropout in [
            DropoutRates { rate: 0.3, attention: 0.0 },
            DropoutRates { rate: 0.0, attention: 0.3 },
            DropoutRates { rate: 0.3, attention: 0.3 },
        ] {
            // The weights of the first: the seed of the device is that of all tests, which run side by side.
            let model = model(&config(), dropout, &device).load_record(first.clone().into_record());
            let of = |seed| numbers(scores(&model, &mut Pass { seed, ..Pass::default() }));
            assert_eq!(of(None), plain);
            assert_eq!(of(Some(3)), of(Some(3)));
            assert_ne!(of(Some(3)), of(Some(4)));
            assert_ne!(of(Some(3)), plain);
        }
    }

    #[test]
    fn tables_are_shared_as_the_configuration_says() {
        let device = Device::flex().autodiff();
        for (tied, joint) in [(false, false), (true, false), (false, true), (true, true)] {
            let config = Config { tie_embeddings: tied, shared_vocabulary: joint, ..config() };
            let model = model(&config, DropoutRates::default(), &device);
            let names = parameters(&model);
            assert_eq!(names.contains_key("head.weight"), !tied);
            assert_eq!(names.contains_key("target.weight"), !joint);
            let loss = scores(&model, &mut Pass::default()).powi_scalar(2).sum();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            assert_eq!(grads.len(), names.len());
        }
        let other = Config { shared_vocabulary: true, target_vocab: Some(12), ..config() };
        let error = Transformer::new(&other, DropoutRates::default(), &device).unwrap_err();
        assert!(error.to_string().contains("12, vocab is 11"), "{error}");
    }

    #[test]
    fn entropy_follows_the_temperature_and_its_own_gradient() {
        let device = Device::flex().autodiff();
        let first = model(&config(), DropoutRates::default(), &device);
        let entropy = |model: &Transformer, temperature: f64| {
            let entropies = Some(Entropies::of(&[3, 2]));
            let mut pass = Pass { temperature, entropies, ..Pass::default() };
            scores(model, &mut pass);
            assert_eq!(pass.layer_entropies().len(), 6); // two encoders, two decoders, each of these with a look at the source
            pass.entropy().expect("it was asked for")
        };
        let number = |x: Tensor<1>| numbers(x)[0];
        let cold = number(entropy(&first, 0.2));
        let usual = number(entropy(&first, 1.0));
        let warm = number(entropy(&first, 5.0));
        assert!(0.0 < cold && cold < usual && usual < warm, "{cold} {usual} {warm}");
        for sign in [1.0, -1.0] {
            let (mut model, mut adam) = (first.clone(), AdamConfig::new().init());
            for _ in 0..20 {
                let loss = entropy(&model, 1.0) * sign;
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                model = adam.step(0.01f64, model, grads);
            }
            let after = number(entropy(&model, 1.0));
            assert!((usual - after) * sign > 0.01, "{usual} {after}");
        }
        let mut short = Pass { entropies: Some(Entropies::of(&[3])), ..Pass::default() };
        let two = ids(&[vec![1], vec![2]], &Device::flex());
        let memory = first.encode(two.clone(), None, &mut Pass::default()).expect("ids are tokens");
        let error = first.decode(&memory, None, two, &mut short).unwrap_err();
        assert!(error.to_string().contains("there are 1 for a batch of 2"), "{error}");
    }

    #[test]
    fn padding_does_not_count_as_attention() {
        let model = model(&config(), DropoutRates::default(), &Device::flex());
        let entropy = |rows: &[Vec<u32>], lengths: Option<&[usize]>| {
            let entropies = Some(Entropies::default());
            let mut pass = Pass { entropies, ..Pass::default() };
            let source = ids(rows, &Device::flex());
            model.encode(source, lengths, &mut pass).expect("ids are tokens");
            numbers(pass.entropy().expect("it was asked for"))[0]
        };
        let alone = entropy(&[vec![6, 7, 8]], None);
        let padded = entropy(&[vec![6, 7, 8, 0, 0]], Some(&[3]));
        assert!((alone - padded).abs() < 1e-6, "{alone} {padded}");
    }

    #[test]
    fn rows_are_written_as_the_whole_says_and_do_not_depend_on_one_another() {
        let model = model(&config(), DropoutRates::default(), &Device::flex());
        let copy = model.inference().expect("the same numbers");
        let (stop, mut hear) =
            (StoppingCriteria { max_tokens: 40, end: vec![] }, |_: usize, _: u32| {
                ControlFlow::Continue(())
            });
        let sources: Vec<Vec<u32>> =
            vec![vec![1, 2, 3], vec![4], vec![5, 6, 7], vec![], (1..10).cycle().take(40).collect()];
        let prompts = [vec![1], vec![1, 2], vec![3], vec![1], vec![4, 4, 4]];
        for search in
            [DecodingStrategy::Greedy, DecodingStrategy::Beam { width: 3, length_penalty: 0.5 }]
        {
            let mut session = copy.session(&sources, 1 << 26).expect("ids are tokens");
            let all = generate(&mut session, &prompts, &search, &stop, &mut hear);
            let all = all.expect("scores are finite");
            for ((source, prompt), one) in sources.iter().zip(&prompts).zip(&all) {
                let mut session =
                    copy.session(std::slice::from_ref(source), 1 << 26).expect("ids are tokens");
                let prompts = std::slice::from_ref(prompt);
                let alone = generate(&mut session, prompts, &search, &stop, &mut hear);
                assert_eq!(alone.expect("scores are finite")[0].tokens, one.tokens);
            }
            if search == DecodingStrategy::Greedy {
                let whole: Vec<u32> = prompts[2].iter().chain(&all[2].tokens).copied().collect();
                let (device, mut pass) = (Device::flex(), Pass::default());
                let source = ids(std::slice::from_ref(&sources[2]), &device);
                let memory = model.encode(source, None, &mut pass).expect("ids are tokens");
                let scores = model.decode(&memory, None, ids(&[whole], &device), &mut pass);
                let best = scores.expect("ids are tokens").argmax(2).into_data();
                let best: Vec<u32> = best.iter::<i64>().flat_map(u32::try_from).collect();
                assert_eq!(all[2].tokens, best[..40]);
            }
        }
        let mut session = copy.session(&sources, 1 << 26).expect("ids are tokens");
        assert!(session.start(5).unwrap_err().to_string().contains("there are 5"));
    }
}
