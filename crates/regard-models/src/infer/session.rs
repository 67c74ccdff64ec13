//! Generation with a KV cache: a new token costs one row through the layers.

use super::cache::{KvDtype, LayerCache};
use super::model::Transformer;
use super::record::Recorder;
use super::stack::{Caches, Packed, SourceCaches, Stack};
use super::work::Workspace;
use crate::error::Error;
use crate::generate::{AttentionProbe, AttentionRow, Decoder, GRID, Pages};
use regard::Sequence;
use regard::cache::{CacheShape, PAGE};
use std::sync::Arc;

/// A session of a [`Transformer`].
#[derive(Debug)]
pub struct Session<'a> {
    model: &'a Transformer,
    decoder: &'a Stack,
    pub(super) caches: Vec<LayerCache>,
    /// Of the source, by layer.
    source_caches: Vec<LayerCache>,
    /// Its sequences, by layer and then by source.
    source_sequences: Vec<Vec<Sequence>>,
    work: Workspace,
    /// Memory for scores.
    scores: Vec<f32>,
}

/// One growing sequence: its entries in the KV caches of all layers.
#[derive(Debug)]
pub struct State {
    pub(super) layers: Vec<Sequence>,
    pub(super) len: usize,
    /// Which source it belongs to.
    row: usize,
    probe: Option<Arc<AttentionProbe>>,
    /// What the probe saw in the last row.
    seen: Vec<AttentionRow>,
}

/// Positions in a page of a translator: what it reads and writes are sentences.
const SENTENCE: usize = 16;

impl<'a> Session<'a> {
    /// Reads the sources, if the model has an encoder; with a recorder that is on, what it sees of them is kept.
    pub(super) fn new(
        model: &'a Transformer,
        sources: &[&[u32]],
        (budget, dtype): (usize, KvDtype),
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
            caches: caches(decoder, page, (budget, dtype))?,
            source_caches: Vec::new(),
            source_sequences: Vec::new(),
            work: Workspace::default(),
            scores: Vec::new(),
        };
        if let Some(encoder) = &model.encoder {
            let rows = Packed::new(sources.iter().map(|tokens| (0, *tokens)));
            session.read(encoder, &rows, (budget, dtype), recorder)?;
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
        limits: (usize, KvDtype),
        recorder: &mut Recorder,
    ) -> Result<(), Error> {
        let mut memory =
            encoder.forward(rows, None, &mut self.work, recorder, ("encoder", "source"))?;
        encoder.finish(&mut memory);
        self.source_caches = caches(self.decoder, SENTENCE, limits)?;
        let step = self.decoder.step(rows);
        for (block, cache) in self.decoder.blocks.iter().zip(&mut self.source_caches) {
            let start = |_: &[usize; 2]| cache.start();
            let sequences: Vec<Sequence> =
                rows.offsets.array_windows().map(start).collect::<Result<_, _>>()?;
            if let Some((cross, _)) = &block.cross {
                cross.append_source(&mut memory, &step, cache, &sequences, &mut self.work)?;
            }
            self.source_sequences.push(sequences);
        }
        Ok(())
    }

    /// Feeds tokens to states, piece by piece; the last `kept` rows of each before the final norm, those of the first state first.
    fn feed_rows(
        &mut self,
        states: &mut [State],
        tokens: &[&[u32]],
        kept: &[usize],
    ) -> Result<Vec<f32>, Error> {
        let d = self.decoder.config.d_model;
        let mut left: Vec<&[u32]> = tokens.to_vec();
        let mut rows: Vec<Vec<f32>> = vec![Vec::new(); states.len()];
        while left.iter().any(|tokens| !tokens.is_empty()) {
            let mut now = Vec::with_capacity(states.len());
            for (state, left) in states.iter().zip(&mut left) {
                let (first, later) = left.split_at(left.len().min(GRID - state.len % GRID));
                now.push(first);
                *left = later;
            }
            let x = self.feed_piece(states, &now)?;
            let mut rest = x.as_slice();
            for (i, now) in now.iter().enumerate() {
                let (own, after) = rest.split_at(now.len() * d);
                rest = after;
                // Of these, so many come before what is kept.
                let skipped = (now.len() + left[i].len()).saturating_sub(kept[i]).min(now.len());
                rows[i].extend_from_slice(&own[skipped * d..]);
            }
        }
        Ok(rows.concat())
    }

    /// Feeds tokens to states, at most a piece to each, to the rows of all of them before the final norm.
    fn feed_piece(&mut self, states: &mut [State], tokens: &[&[u32]]) -> Result<Vec<f32>, Error> {
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
        let probes = fed().enumerate();
        let probes = probes.filter_map(|(i, (state, _))| Some((i, state.probe.clone()?)));
        let mut recorder = Recorder::probing(probes.collect());
        let axes = ("decoder", "target");
        let x = self.decoder.forward(&rows, Some(caches), &mut self.work, &mut recorder, axes)?;
        let fed = states.iter_mut().zip(tokens).filter(|(_, tokens)| !tokens.is_empty());
        for (i, (state, tokens)) in fed.enumerate() {
            state.len += tokens.len();
            let own = recorder.seen.extract_if(.., |(item, _)| *item == i);
            state.seen = own.map(|(_, row)| row).collect();
        }
        Ok(x)
    }
}

/// Empty caches for the layers of a decoder.
pub(super) fn caches(
    decoder: &Stack,
    page: usize,
    (budget, dtype): (usize, KvDtype),
) -> Result<Vec<LayerCache>, Error> {
    let config = &decoder.config;
    let (heads, dim) = (config.heads.kv, config.head_dim);
    let shape = CacheShape { heads, qk_dim: dim, v_dim: dim, page };
    let each = budget / config.layers.len().max(1);
    config.layers.iter().map(|_| LayerCache::new(dtype, shape, each)).collect()
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
        let layers = self.caches.iter_mut().map(LayerCache::start).collect::<Result<_, _>>()?;
        Ok(State { layers, len: 0, row, probe: None, seen: Vec::new() })
    }

    fn fork(&mut self, state: &State) -> Result<State, Error> {
        let caches = self.caches.iter_mut().zip(&state.layers);
        let layers = caches.map(|(cache, own)| cache.fork(*own)).collect::<Result<_, _>>()?;
        Ok(State { layers, len: state.len, row: state.row, probe: None, seen: Vec::new() })
    }

    fn free(&mut self, state: State) -> Result<(), Error> {
        for (cache, own) in self.caches.iter_mut().zip(state.layers) {
            cache.free(own)?;
        }
        Ok(())
    }

    fn feed(
        &mut self,
        states: &mut [State],
        tokens: &[&[u32]],
        scored: &[usize],
    ) -> Result<Vec<f32>, Error> {
        let mut rows = self.feed_rows(states, tokens, scored)?;
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        self.decoder.finish(&mut rows);
        self.model.scores(&mut rows, std::mem::take(&mut self.scores))
    }

    fn recycle(&mut self, scores: Vec<f32>) {
        self.scores = scores;
    }

    fn speculates(&self) -> bool {
        true
    }

    /// All layers have as many.
    fn memory(&self) -> Option<Pages> {
        let [count, tokens] = self.caches.first()?.pages();
        Some(Pages { count, tokens })
    }

    fn attention(&self) -> [usize; 2] {
        [self.decoder.config.layers.len(), self.decoder.config.heads.q]
    }

    fn probe(&mut self, state: &mut State, probe: &AttentionProbe) {
        state.probe = Some(Arc::new(probe.clone()));
    }

    fn seen(&mut self, state: &mut State) -> Vec<AttentionRow> {
        std::mem::take(&mut state.seen)
    }

    fn truncate(&mut self, state: &mut State, len: usize) -> Result<(), Error> {
        for (cache, own) in self.caches.iter_mut().zip(&state.layers) {
            cache.truncate(*own, len)?;
        }
        state.len = len;
        Ok(())
    }
}
