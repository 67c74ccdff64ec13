//! Generation with a KV cache: a new token costs one row through the layers.

use super::block::Workspace;
use super::model::Transformer;
use super::record::Recorder;
use super::stack::{Caches, Packed, SourceCaches, Stack};
use crate::error::Error;
use crate::generate::Decoder;
use regard::cache::{CacheShape, PAGE};
use regard::{KvCache, Sequence};

/// A session of a [`Transformer`].
#[derive(Debug)]
pub struct Session<'a> {
    model: &'a Transformer,
    decoder: &'a Stack,
    caches: Vec<KvCache<f32>>,
    /// Of the source, by layer.
    source_caches: Vec<KvCache<f32>>,
    /// Its sequences, by layer and then by source.
    source_sequences: Vec<Vec<Sequence>>,
    work: Workspace,
}

/// One growing sequence: its entries in the KV caches of all layers.
#[derive(Debug)]
pub struct State {
    layers: Vec<Sequence>,
    len: usize,
    /// Which source it belongs to.
    row: usize,
}

/// Positions in a page of a translator: what it reads and writes are sentences.
const SENTENCE: usize = 16;
/// Positions of a prompt that are computed together, from multiples of it on: bounds the memory of a pass.
const CHUNK: usize = 256;

impl<'a> Session<'a> {
    /// Reads the sources, if the model has an encoder; with a recorder that is on, what it sees of them is kept.
    pub(super) fn new(
        model: &'a Transformer,
        sources: &[&[u32]],
        budget: usize,
        recorder: &mut Recorder,
    ) -> Result<Self, Error> {
        let Some(decoder) = &model.decoder else {
            let known = "a model with a decoder";
            return Err(Error::unsupported("generate", &model.config().family, known));
        };
        if !model.has_head() {
            let known = "a model with a head that scores tokens (..ForCausalLM) can do that";
            return Err(Error::unsupported("generate", &model.config().family, known));
        }
        let (page, budget) = match model.encoder {
            Some(_) => (SENTENCE, budget / 2),
            None => (PAGE, budget),
        };
        let mut session = Self {
            model,
            decoder,
            caches: caches(decoder, page, budget)?,
            source_caches: Vec::new(),
            source_sequences: Vec::new(),
            work: Workspace::default(),
        };
        if let Some(encoder) = &model.encoder {
            let rows = Packed::new(sources.iter().map(|tokens| (0, *tokens)));
            session.read(encoder, &rows, budget, recorder)?;
        }
        Ok(session)
    }

    /// Caches and sequences of the source.
    pub(super) fn source(&self) -> SourceCaches<'_> {
        (&self.source_caches, &self.source_sequences)
    }

    /// Reads the sources: keys and values of each for all layers that look at them, once.
    fn read(
        &mut self,
        encoder: &Stack,
        rows: &Packed,
        budget: usize,
        recorder: &mut Recorder,
    ) -> Result<(), Error> {
        let mut memory =
            encoder.forward(rows, None, &mut self.work, recorder, ("encoder", "source"))?;
        encoder.finish(&mut memory);
        self.source_caches = caches(self.decoder, SENTENCE, budget)?;
        let step = self.decoder.step(rows);
        for (block, cache) in self.decoder.blocks.iter().zip(&mut self.source_caches) {
            let start = |_: &[usize; 2]| cache.start();
            let sequences: Vec<Sequence> =
                rows.offsets.array_windows().map(start).collect::<Result<_, _>>()?;
            if let Some((cross, _)) = &block.cross {
                cross.append_source(&memory, &step, cache, &sequences, &mut self.work)?;
            }
            self.source_sequences.push(sequences);
        }
        Ok(())
    }

    /// Feeds tokens to states, chunk by chunk; rows before the final norm, those of the first state first.
    fn feed_rows(
        &mut self,
        states: &mut [State],
        tokens: &[&[u32]],
        kept: Kept,
    ) -> Result<Vec<f32>, Error> {
        let d = self.decoder.config.d_model;
        let mut left: Vec<&[u32]> = tokens.to_vec();
        let mut rows: Vec<Vec<f32>> = vec![Vec::new(); states.len()];
        while left.iter().any(|tokens| !tokens.is_empty()) {
            let mut now = Vec::with_capacity(states.len());
            for (state, left) in states.iter().zip(&mut left) {
                let (first, later) = left.split_at(left.len().min(CHUNK - state.len % CHUNK));
                now.push(first);
                *left = later;
            }
            let x = self.feed_chunk(states, &now)?;
            let mut rest = x.as_slice();
            for (rows, now) in rows.iter_mut().zip(now).filter(|(_, now)| !now.is_empty()) {
                let (own, after) = rest.split_at(now.len() * d);
                rest = after;
                match kept {
                    Kept::All => rows.extend_from_slice(own),
                    Kept::Last => *rows = own[own.len() - d..].to_vec(),
                }
            }
        }
        Ok(rows.concat())
    }

    /// Feeds tokens to states, at most a chunk to each, to the rows of all of them before the final norm.
    fn feed_chunk(&mut self, states: &mut [State], tokens: &[&[u32]]) -> Result<Vec<f32>, Error> {
        let fed = || states.iter().zip(tokens).filter(|(_, tokens)| !tokens.is_empty());
        let rows = Packed::new(fed().map(|(state, tokens)| (state.len, *tokens)));
        let layers = self.decoder.blocks.len();
        let sequences: Vec<Vec<Sequence>> =
            (0..layers).map(|i| fed().map(|(state, _)| state.layers[i]).collect()).collect();
        let read: Option<Vec<Vec<Sequence>>> = (!self.source_caches.is_empty()).then(|| {
            let of_layer = |all: &Vec<Sequence>| fed().map(|(state, _)| all[state.row]).collect();
            self.source_sequences.iter().map(of_layer).collect()
        });
        let caches = Caches {
            own: &mut self.caches,
            sequences: &sequences,
            source: read.as_ref().map(|read| (self.source_caches.as_slice(), read.as_slice())),
        };
        let mut off = Recorder::default();
        let axes = ("decoder", "target");
        let x = self.decoder.forward(&rows, Some(caches), &mut self.work, &mut off, axes)?;
        for (state, tokens) in states.iter_mut().zip(tokens) {
            state.len += tokens.len();
        }
        Ok(x)
    }
}

/// Which rows of what is fed are returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    /// The last of each state.
    Last,
    All,
}

fn caches(decoder: &Stack, page: usize, budget: usize) -> Result<Vec<KvCache<f32>>, Error> {
    let config = &decoder.config;
    let (heads, dim) = (config.heads.kv, config.head_dim);
    let shape = CacheShape { heads, qk_dim: dim, v_dim: dim, page };
    let each = budget / config.layers.len().max(1);
    config.layers.iter().map(|_| Ok(KvCache::new(shape, each)?)).collect()
}

impl Decoder for Session<'_> {
    type State = State;
    type Error = Error;

    fn vocab(&self) -> usize {
        self.decoder.config.vocab
    }

    fn context(&self) -> Option<usize> {
        self.decoder.config.context
    }

    fn start(&mut self, row: usize) -> Result<State, Error> {
        let sources = self.source_sequences.first().map_or(0, Vec::len);
        if self.model.encoder.is_some() && row >= sources {
            return Err(Error::no_source(row, sources));
        }
        let layers = self.caches.iter_mut().map(KvCache::start).collect::<Result<_, _>>()?;
        Ok(State { layers, len: 0, row })
    }

    fn fork(&mut self, state: &State) -> Result<State, Error> {
        let caches = self.caches.iter_mut().zip(&state.layers);
        let layers = caches.map(|(cache, own)| cache.fork(*own)).collect::<Result<_, _>>()?;
        Ok(State { layers, len: state.len, row: state.row })
    }

    fn free(&mut self, state: State) -> Result<(), Error> {
        for (cache, own) in self.caches.iter_mut().zip(state.layers) {
            cache.free(own)?;
        }
        Ok(())
    }

    fn feed(&mut self, states: &mut [State], tokens: &[&[u32]]) -> Result<Vec<f32>, Error> {
        let mut last = self.feed_rows(states, tokens, Kept::Last)?;
        self.decoder.finish(&mut last);
        self.model.scores(&mut last)
    }

    fn feed_all(
        &mut self,
        states: &mut [State],
        tokens: &[&[u32]],
    ) -> Result<Option<Vec<f32>>, Error> {
        let mut all = self.feed_rows(states, tokens, Kept::All)?;
        self.decoder.finish(&mut all);
        self.model.scores(&mut all).map(Some)
    }

    fn truncate(&mut self, state: &mut State, len: usize) -> Result<(), Error> {
        for (cache, own) in self.caches.iter_mut().zip(&state.layers) {
            cache.truncate(*own, len)?;
        }
        state.len = len;
        Ok(())
    }
}
