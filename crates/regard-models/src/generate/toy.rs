//! A decoder for tests: its scores are a function of all it was fed, it counts its states, and it fails when told to.

use super::{
    Decoder, DecodingStrategy, GenerateError, GeneratedSequence, GenerationOptions, Pages,
    Sampling, StoppingCriteria, Usage, generate_with,
};
use std::collections::HashMap;
use std::fmt;
use std::ops::ControlFlow;

type Scores = Box<dyn Fn(&[u32]) -> Vec<f32>>;

pub(super) struct Toy {
    vocab: usize,
    score: Scores,
    states: HashMap<u64, Vec<u32>>,
    made: u64,
    pub(super) context: Option<usize>,
    pub(super) memory: Option<Pages>,
    /// Whether it scores guesses.
    pub(super) speculates: bool,
    /// How many states each feed had.
    pub(super) fed: Vec<usize>,
    /// Fails after so many calls that can fail.
    pub(super) calls_left: Option<usize>,
}

/// Not `Clone`: what is freed twice would not compile.
pub(super) struct ToyState(u64);

#[derive(Debug)]
pub(super) enum ToyError {
    Broken,
    Generate(GenerateError),
}

impl fmt::Display for ToyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl std::error::Error for ToyError {}

impl From<GenerateError> for ToyError {
    fn from(error: GenerateError) -> Self {
        Self::Generate(error)
    }
}

impl Toy {
    pub(super) fn new(vocab: usize, score: impl Fn(&[u32]) -> Vec<f32> + 'static) -> Self {
        let (states, score) = (HashMap::new(), Box::new(score));
        Self {
            vocab,
            score,
            states,
            made: 0,
            context: None,
            memory: None,
            speculates: false,
            fed: vec![],
            calls_left: None,
        }
    }

    /// Scores between -2 and 2 that depend on every token before.
    pub(super) fn noise(vocab: usize, seed: u64) -> Self {
        let mix = |hash: u64, token: u32| {
            let hash = (hash ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            hash ^ (hash >> 29)
        };
        Self::new(vocab, move |history| {
            let hash = history.iter().fold(seed + 1, |hash, token| mix(hash, *token));
            let ids = (0..).take(vocab);
            ids.map(|id| (mix(mix(hash, id), 1) >> 40) as f32 / (1 << 22) as f32 - 2.0).collect()
        })
    }

    /// The probabilities after each token; the scores are their logarithms and a constant that must not matter.
    pub(super) fn markov<const N: usize>(table: [[f32; N]; N]) -> Self {
        Self::new(N, move |history| {
            table[history[history.len() - 1] as usize].map(|p| p.ln() + 3.0).to_vec()
        })
    }

    pub(super) fn alive(&self) -> usize {
        self.states.len()
    }

    pub(super) fn scores(&self, history: &[u32]) -> Vec<f32> {
        (self.score)(history)
    }

    fn call(&mut self) -> Result<(), ToyError> {
        match &mut self.calls_left {
            Some(0) => Err(ToyError::Broken),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn state(&mut self, history: Vec<u32>) -> ToyState {
        self.made += 1;
        self.states.insert(self.made, history);
        ToyState(self.made)
    }
}

impl Decoder for Toy {
    type State = ToyState;
    type Error = ToyError;

    fn vocab(&self) -> usize {
        self.vocab
    }

    fn context(&self) -> Option<usize> {
        self.context
    }

    fn start(&mut self, _row: usize) -> Result<ToyState, ToyError> {
        self.call()?;
        Ok(self.state(vec![]))
    }

    fn fork(&mut self, state: &ToyState) -> Result<ToyState, ToyError> {
        self.call()?;
        let history = self.states[&state.0].clone();
        Ok(self.state(history))
    }

    fn free(&mut self, state: ToyState) -> Result<(), ToyError> {
        self.states.remove(&state.0).unwrap();
        self.call()
    }

    fn feed(
        &mut self,
        states: &mut [ToyState],
        tokens: &[&[u32]],
        scored: &[usize],
    ) -> Result<Vec<f32>, ToyError> {
        self.call()?;
        assert_eq!((states.len(), states.len()), (tokens.len(), scored.len()));
        self.fed.push(states.len());
        let mut scores = Vec::new();
        for ((state, tokens), scored) in states.iter().zip(tokens).zip(scored) {
            let history = self.states.get_mut(&state.0).unwrap();
            history.extend_from_slice(tokens);
            assert!(!tokens.is_empty() && self.context.is_none_or(|most| history.len() <= most));
            assert!(*scored <= if self.speculates { tokens.len() } else { 1 });
            for len in history.len() + 1 - scored..=history.len() {
                scores.extend((self.score)(&history[..len]));
            }
        }
        Ok(scores)
    }

    fn speculates(&self) -> bool {
        self.speculates
    }

    fn memory(&self) -> Option<Pages> {
        self.memory
    }

    fn truncate(&mut self, state: &mut ToyState, len: usize) -> Result<(), ToyError> {
        self.call()?;
        let history = self.states.get_mut(&state.0).unwrap();
        assert!(len <= history.len());
        history.truncate(len);
        Ok(())
    }
}

pub(super) fn sample(seed: u64) -> DecodingStrategy {
    DecodingStrategy::Sample(Sampling { seed, ..Sampling::default() })
}

pub(super) fn beam(width: usize, length_penalty: f32) -> DecodingStrategy {
    DecodingStrategy::Beam { width, length_penalty }
}

pub(super) fn stop(max_tokens: usize) -> StoppingCriteria {
    StoppingCriteria { max_tokens, end: vec![0] }
}

/// All that comes of it; every state must have been freed.
pub(super) fn run(
    toy: &mut Toy,
    prompts: &[Vec<u32>],
    search: &DecodingStrategy,
    stop: &StoppingCriteria,
) -> Result<Vec<GeneratedSequence>, ToyError> {
    let options = GenerationOptions::new(search.clone(), stop.clone());
    Ok(run_with(toy, prompts, &options)?.0)
}

pub(super) fn run_with(
    toy: &mut Toy,
    prompts: &[Vec<u32>],
    options: &GenerationOptions,
) -> Result<(Vec<GeneratedSequence>, Usage), ToyError> {
    let result = generate_with(toy, prompts, options, &mut |_, _| ControlFlow::Continue(()));
    assert_eq!(toy.alive(), 0, "{options:?}");
    result
}
