//! What a decoder has seen: keys and values of each layer, in pages that sequences share.

use crate::error::Error;
use crate::nn::{Around, Block, Over, joined};
use crate::recorder::Recorder;
use burn::tensor::{Device, Tensor, TensorData};
use regard::{CacheShape, KvCache, Machine, Mask, PAGE, Plan, Problem, Score, Sequence, View};
use regard_burn::{Attention, Places};

/// Keys and values of one layer.
#[derive(Debug)]
pub struct LayerPast {
    cache: KvCache<f32>,
}

impl LayerPast {
    /// For `heads` of keys of `head_dim` features, in at most `budget` bytes.
    pub fn new(heads: usize, head_dim: usize, budget: usize) -> Result<Self, Error> {
        let shape = CacheShape { heads, qk_dim: head_dim, v_dim: head_dim, page: PAGE };
        Ok(Self { cache: KvCache::new(shape, budget)? })
    }

    /// Where new rows of sequences stand.
    pub(crate) fn places(&self, sequences: &[Sequence], length: usize) -> Result<Places, Error> {
        let mut list = Vec::with_capacity(sequences.len() * length);
        for sequence in sequences {
            let first = self.cache.len(*sequence)?.cast_signed() as i64;
            list.extend(first..first + length.cast_signed() as i64);
        }
        Ok(Places::List(list.into()))
    }

    /// Appends keys and values `[sequences, heads, length, features]`, and lets the queries look at all that their sequence has:
    /// `[sequences, length, heads x features]`.
    pub(crate) fn attend(
        &mut self,
        sequences: &[Sequence],
        [q, k, v]: [Tensor<4>; 3],
        options: &Attention,
    ) -> Result<Tensor<3>, Error> {
        let (of_k, of_v, device) = (k.dims(), v.dims(), Device::flex());
        let [all_k, all_v] = [k, v].map(numbers);
        for (i, sequence) in sequences.iter().enumerate() {
            let [k, v] = [(&all_k, of_k), (&all_v, of_v)].map(|(all, [_, heads, len, dim])| {
                let item = heads * len * dim;
                View::bhsd(&all[i * item..(i + 1) * item], [1, heads, len, dim])
            });
            self.cache.append(*sequence, k?, v?)?;
        }
        let (of_q, q) = (q.dims(), numbers(q));
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
            Plan::new(problem, Machine::here())?.forward_cached(q, &self.cache, sequences)?;
        let sizes = output.out.shape().to_array();
        Ok(joined(Tensor::from_data(TensorData::new(output.out.into_data(), sizes), &device)))
    }
}

/// The numbers of a tensor, one after another.
pub(crate) fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().try_into_vec().expect("models compute in f32")
}

/// What one sequence has seen, in all layers.
#[derive(Debug)]
pub struct Past {
    layers: Vec<Sequence>,
    pub(crate) len: usize,
    /// Which source it belongs to, in models that have one.
    pub(crate) row: usize,
}

/// The caches of all layers.
#[derive(Debug)]
pub(crate) struct Pasts {
    layers: Vec<LayerPast>,
}

impl Pasts {
    pub(crate) fn new(
        layers: usize,
        heads: usize,
        head_dim: usize,
        budget: usize,
    ) -> Result<Self, Error> {
        let each = budget / layers.max(1);
        let layers = (0..layers).map(|_| LayerPast::new(heads, head_dim, each));
        Ok(Self { layers: layers.collect::<Result<_, _>>()? })
    }

    pub(crate) fn start(&mut self, row: usize) -> Result<Past, Error> {
        let layers = self.layers.iter_mut().map(|layer| layer.cache.start());
        Ok(Past { layers: layers.collect::<Result<_, _>>()?, len: 0, row })
    }

    pub(crate) fn fork(&mut self, past: &Past) -> Result<Past, Error> {
        let twins = self.layers.iter_mut().zip(&past.layers).map(|(layer, s)| layer.cache.fork(*s));
        Ok(Past { layers: twins.collect::<Result<_, _>>()?, len: past.len, row: past.row })
    }

    pub(crate) fn free(&mut self, past: Past) -> Result<(), Error> {
        for (layer, sequence) in self.layers.iter_mut().zip(past.layers) {
            layer.cache.free(sequence)?;
        }
        Ok(())
    }

    /// New rows `[pasts, length, d_model]` through blocks that look at what each past has seen, and at a memory if there is one: the
    /// last of each, `[pasts, 1, d_model]`.
    pub(crate) fn through(
        &mut self,
        blocks: &[Block],
        mut x: Tensor<3>,
        pasts: &mut [Past],
        memory: Option<&Tensor<3>>,
    ) -> Result<Tensor<3>, Error> {
        let (length, mut recorder) = (x.dims()[1], Recorder::off());
        let (causal, full) = (Mask::causal(), Mask::full());
        for (i, (block, layer)) in blocks.iter().zip(&mut self.layers).enumerate() {
            let sequences: Vec<Sequence> = pasts.iter().map(|past| past.layers[i]).collect();
            let memory = memory.map(|memory| (memory, &full));
            let around = Around { mask: &causal, memory, seed: None, recorder: &mut recorder };
            x = block.step(x, Over::Past(layer, &sequences), around)?;
        }
        for past in pasts {
            past.len += length;
        }
        Ok(x.narrow(1, length - 1, 1))
    }
}

/// All at once where tokens are equally many and pasts alike, and else one past after another: prompts differ in length, answers do
/// not.
pub(crate) fn in_turns(
    pasts: &mut [Past],
    tokens: &[&[u32]],
    alike: impl Fn(&Past, &Past) -> bool,
    mut together: impl FnMut(&mut [Past], &[&[u32]]) -> Result<Vec<f32>, Error>,
) -> Result<Vec<f32>, Error> {
    let equally_many = tokens.windows(2).all(|pair| pair[0].len() == pair[1].len());
    if equally_many && pasts.windows(2).all(|pair| alike(&pair[0], &pair[1])) {
        return together(pasts, tokens);
    }
    let mut scores = Vec::new();
    for (past, tokens) in pasts.chunks_mut(1).zip(tokens.chunks(1)) {
        scores.extend(together(past, tokens)?);
    }
    Ok(scores)
}
