//! The KV cache of a decoder: keys and values of each layer, in pages that sequences share.

use crate::error::Error;
use crate::nn::{Block, BlockInputs, KeySource, Memory, joined};
use crate::pass::Pass;
use burn::tensor::{Device, Tensor, TensorData};
use regard::cache::{CacheShape, PAGE};
use regard::{KvCache, Machine, Mask, Plan, Problem, Score, Sequence, View};
use regard_burn::{Attention, RopePositions};
use std::collections::BTreeMap;

/// The KV cache of one layer.
#[derive(Debug)]
pub struct LayerCache {
    cache: KvCache<f32>,
}

impl LayerCache {
    /// For `heads` of keys of `head_dim` features, in at most `budget` bytes.
    pub fn new(heads: usize, head_dim: usize, budget: usize) -> Result<Self, Error> {
        Self::in_pages(PAGE, [heads, head_dim], budget)
    }

    /// The same in pages of so many positions: short sequences waste less of short ones.
    fn in_pages(page: usize, [heads, head_dim]: [usize; 2], budget: usize) -> Result<Self, Error> {
        let shape = CacheShape { heads, qk_dim: head_dim, v_dim: head_dim, page };
        Ok(Self { cache: KvCache::new(shape, budget)? })
    }

    /// A sequence that has seen nothing yet.
    pub fn start(&mut self) -> Result<Sequence, Error> {
        Ok(self.cache.start()?)
    }

    /// Where new rows of sequences stand.
    pub(crate) fn places(
        &self,
        sequences: &[Sequence],
        length: usize,
    ) -> Result<RopePositions, Error> {
        let mut list = Vec::with_capacity(sequences.len() * length);
        for sequence in sequences {
            let first = self.cache.len(*sequence)?.cast_signed() as i64;
            list.extend(first..first + length.cast_signed() as i64);
        }
        Ok(RopePositions::List(list.into()))
    }

    /// Appends keys and values `[sequences, heads, length, features]`.
    pub(crate) fn append(
        &mut self,
        sequences: &[Sequence],
        k: Tensor<4>,
        v: Tensor<4>,
    ) -> Result<(), Error> {
        let (of_k, of_v) = (k.dims(), v.dims());
        let [all_k, all_v] = [k, v].map(numbers);
        for (i, sequence) in sequences.iter().enumerate() {
            let [k, v] = [(&all_k, of_k), (&all_v, of_v)].map(|(all, [_, heads, len, dim])| {
                let item = heads * len * dim;
                View::bhsd(&all[i * item..(i + 1) * item], [1, heads, len, dim])
            });
            self.cache.append(*sequence, k?, v?)?;
        }
        Ok(())
    }

    /// Queries `[sequences, heads, length, features]` over all that their sequence has: `[sequences, length, heads x features]`.
    pub(crate) fn look(
        &self,
        sequences: &[Sequence],
        q: Tensor<4>,
        options: &Attention,
    ) -> Result<Tensor<3>, Error> {
        let (of_q, device, q) = (q.dims(), Device::flex(), numbers(q));
        let q = View::bhsd(&q, of_q)?;
        let slopes = options.alibi.clone().map(numbers);
        let table = options
            .relative
            .as_ref()
            .map(|r| (r.table.dims()[0], numbers(r.table.clone()), r.buckets));
        let mut score = Score::new();
        if let Some(scale) = options.scale {
            score = score.scale(scale);
        }
        if let Some(slopes) = &slopes {
            score = score.alibi(slopes);
        }
        if let Some((rows, table, buckets)) = &table {
            score = score.relative(buckets.bias(table, *rows));
        }
        let problem =
            Problem::cached(&q, &self.cache, sequences)?.mask(options.mask.clone()).score(score);
        let output =
            Plan::new(problem, Machine::detect())?.forward_cached(q, &self.cache, sequences)?;
        let sizes = output.out.shape().to_array();
        Ok(joined(Tensor::from_data(TensorData::new(output.out.into_data(), sizes), &device)))
    }
}

/// The numbers of a tensor, one after another.
pub(crate) fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().try_into_vec().expect("models compute in f32")
}

/// The state of one sequence: its entries in the KV caches of all layers.
#[derive(Debug)]
pub struct DecoderState {
    layers: Vec<Sequence>,
    pub(crate) len: usize,
    /// Which source it belongs to, in models that have one.
    pub(crate) row: usize,
}

/// The KV caches of all layers.
#[derive(Debug)]
pub(crate) struct KvCaches {
    layers: Vec<LayerCache>,
}

/// Positions in a page of a translator: what it reads and writes are sentences.
pub(crate) const SENTENCE: usize = 16;

impl KvCaches {
    pub(crate) fn new(
        layers: usize,
        heads: [usize; 2],
        page: usize,
        budget: usize,
    ) -> Result<Self, Error> {
        let each = budget / layers.max(1);
        let layers = (0..layers).map(|_| LayerCache::in_pages(page, heads, each));
        Ok(Self { layers: layers.collect::<Result<_, _>>()? })
    }

    pub(crate) fn start(&mut self, row: usize) -> Result<DecoderState, Error> {
        let layers = self.layers.iter_mut().map(LayerCache::start);
        Ok(DecoderState { layers: layers.collect::<Result<_, _>>()?, len: 0, row })
    }

    pub(crate) fn fork(&mut self, state: &DecoderState) -> Result<DecoderState, Error> {
        let twins =
            self.layers.iter_mut().zip(&state.layers).map(|(layer, s)| layer.cache.fork(*s));
        Ok(DecoderState {
            layers: twins.collect::<Result<_, _>>()?,
            len: state.len,
            row: state.row,
        })
    }

    pub(crate) fn free(&mut self, state: DecoderState) -> Result<(), Error> {
        for (layer, sequence) in self.layers.iter_mut().zip(state.layers) {
            layer.cache.free(sequence)?;
        }
        Ok(())
    }

    /// New rows `[states, length, d_model]` through blocks that look at what each state has seen, and at its source if there are some:
    /// the last of each, `[states, 1, d_model]`.
    pub(crate) fn through(
        &mut self,
        blocks: &[Block],
        mut x: Tensor<3>,
        states: &mut [&mut DecoderState],
        sources: Option<&Sources>,
    ) -> Result<Tensor<3>, Error> {
        let (length, mut pass, causal) = (x.dims()[1], Pass::default(), Mask::causal());
        for (i, (block, layer)) in blocks.iter().zip(&mut self.layers).enumerate() {
            let sequences: Vec<Sequence> = states.iter().map(|state| state.layers[i]).collect();
            let read: Vec<Sequence> = match sources {
                Some(sources) => {
                    states.iter().map(|state| sources.rows[state.row].layers[i]).collect()
                }
                None => Vec::new(),
            };
            let memory = sources.map(|sources| Memory::Cached(&sources.caches.layers[i], &read));
            let around = BlockInputs { mask: &causal, memory, place: 0, pass: &mut pass };
            x = block.step(x, KeySource::Cache(layer, &sequences), around)?;
        }
        for state in states {
            state.len += length;
        }
        Ok(x.narrow(1, length - 1, 1))
    }
}

/// Keys and values of sources that were read, for all layers that look at them.
#[derive(Debug)]
pub(crate) struct Sources {
    caches: KvCaches,
    rows: Vec<DecoderState>,
}

impl Sources {
    /// So many, none of them read yet.
    pub(crate) fn new(caches: KvCaches, n: usize) -> Result<Self, Error> {
        let mut sources = Self { caches, rows: Vec::with_capacity(n) };
        for row in 0..n {
            sources.rows.push(sources.caches.start(row)?);
        }
        Ok(sources)
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// These sources have become `memory [rows, length, d_model]`: blocks make keys and values of it, once.
    pub(crate) fn keep(
        &mut self,
        rows: &[usize],
        memory: &Tensor<3>,
        blocks: &[Block],
    ) -> Result<(), Error> {
        for (i, (block, layer)) in blocks.iter().zip(&mut self.caches.layers).enumerate() {
            let sequences: Vec<Sequence> =
                rows.iter().map(|row| self.rows[*row].layers[i]).collect();
            if let Some(cross) = &block.cross {
                let [k, v] = cross.project(memory);
                layer.append(&sequences, k, v)?;
            }
        }
        Ok(())
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

/// KvCaches that are fed together, and where they stand among all.
#[derive(Default)]
struct Group<'a> {
    places: Vec<usize>,
    states: Vec<&'a mut DecoderState>,
    tokens: Vec<&'a [u32]>,
}

/// All states that are `alike` and get equally many tokens are fed together: prompts differ in length, answers do not.
pub(crate) fn in_groups(
    states: &mut [DecoderState],
    tokens: &[&[u32]],
    alike: impl Fn(&DecoderState) -> usize,
    mut together: impl FnMut(&mut [&mut DecoderState], &[&[u32]]) -> Result<Vec<f32>, Error>,
) -> Result<Vec<f32>, Error> {
    let mut groups: BTreeMap<_, Group<'_>> = BTreeMap::new();
    let n = states.len();
    for (i, (state, tokens)) in states.iter_mut().zip(tokens).enumerate() {
        let group = groups.entry((tokens.len(), alike(state))).or_default();
        group.places.push(i);
        group.states.push(state);
        group.tokens.push(tokens);
    }
    let mut all = Vec::new();
    for Group { places, mut states, tokens } in groups.into_values() {
        let scores = together(&mut states, &tokens)?;
        if places.len() == n {
            return Ok(scores);
        }
        let vocab = scores.len() / places.len();
        all.resize(n * vocab, 0.0);
        for (place, scores) in places.into_iter().zip(scores.chunks(vocab)) {
            all[place * vocab..(place + 1) * vocab].copy_from_slice(scores);
        }
    }
    Ok(all)
}
