//! A case as data: tensors of seeded normal numbers, and the problem they pose.

use super::case::{Bias, Cached, Case, Rule};
use anyhow::{Context, Result};
use regard::cache::{CacheShape, PAGE, Quantization};
use regard::mask::{Bits, KeyLists};
use regard::plan::OutputGrads;
use regard::problem::{Additive, Dims, Dropout, Local, Similarity};
use regard::score::alibi_slopes;
use regard::{
    Element, KvCache, Layout, Mask, Number, Problem, Score, Sequence, Shape, Tensor, View,
};
use regard_testkit::Noise;

pub(crate) struct Input<E: Element> {
    q: Tensor<E>,
    k: Tensor<E>,
    v: Tensor<E>,
    d_out: Tensor<E>,
    bias: Option<Tensor<E>>,
    slopes: Vec<E::Num>,
    sinks: Vec<E::Num>,
    /// `w_q`, `w_k` and `v` of an additive similarity.
    hidden: Option<[Tensor<E>; 3]>,
    centers: Vec<E::Num>,
    mask: Mask,
    /// Features of the values, if those are features of the keys.
    latent: Option<usize>,
}

impl<E: Element> Input<E> {
    pub(crate) fn new(case: &Case) -> Result<Self> {
        let noise = &mut Noise::new(0x5eed);
        let [q, k, v] = case.shapes();
        let Dims { heads, q_len, k_len, .. } = case.dims;
        let bias = Shape { batch: 1, heads: 1, len: q_len, dim: k_len };
        let bias = match case.bias {
            Some(Bias::Shared) => Some(bias),
            Some(Bias::Heads) => Some(Shape { heads: heads.q, ..bias }),
            Some(Bias::Alibi) | None => None,
        };
        let rows = q.batch * q.heads * q.len;
        let mut query_or_key = |shape, times| match case.lsh {
            true => clustered(shape, k_len, case.layout),
            false => tensor(noise, shape, case.layout, times),
        };
        let (q, k) = (query_or_key(q, case.q_scale)?, query_or_key(k, 1.0)?);
        let latent = case.latent.then_some(v.dim);
        Ok(Self {
            latent,
            v: tensor(
                noise,
                Shape { dim: if case.latent { 0 } else { v.dim }, ..v },
                case.layout,
                1.0,
            )?,
            d_out: tensor(noise, Shape { dim: v.dim, ..q.shape() }, case.layout, 1.0)?,
            q,
            k,
            bias: bias.map(|shape| tensor(noise, shape, Layout::Bhsd, 1.0)).transpose()?,
            slopes: alibi_slopes(heads.q),
            sinks: (0..if case.sinks { heads.q } else { 0 })
                .map(|_| E::Num::from_f64(noise.normal()))
                .collect(),
            hidden: if case.additive { Some(hidden(noise, case.dims.q_dim)?) } else { None },
            // A little off the diagonal, as a model that has learned something would have them.
            centers: match case.local {
                Some(_) => (0..rows)
                    .map(|row| (row % q_len) as f64 + 3.0 * noise.normal())
                    .map(E::Num::from_f64)
                    .collect(),
                None => Vec::new(),
            },
            mask: mask(case, noise)?,
        })
    }

    pub(crate) fn views(&self) -> (View<'_, E>, View<'_, E>, View<'_, E>) {
        let k = self.k.view();
        let v = self.latent.and_then(|dim| k.first_features(dim).ok());
        (self.q.view(), k, v.unwrap_or_else(|| self.v.view()))
    }

    /// The gradient of the output.
    pub(crate) fn d_out(&self) -> View<'_, E> {
        self.d_out.view()
    }

    /// The gradient of the output, and the wish for all that could be learned.
    pub(crate) fn output_grads(&self) -> OutputGrads<'_, E> {
        OutputGrads::new(self.d_out.view()).with_bias()
    }

    /// The problem of a case, over tensors or over what sequences have in a cache.
    pub(crate) fn problem(
        &self,
        case: &Case,
        cached: Option<&(KvCache<E>, Vec<Sequence>)>,
    ) -> Result<Problem<'_, E>> {
        let (q, k, v) = self.views();
        let mut score = Score::new();
        score = case.softcap.into_iter().fold(score, Score::softcap);
        score = self.bias.iter().fold(score, |score, bias| score.bias(bias.view()));
        if case.bias == Some(Bias::Alibi) {
            score = score.alibi(&self.slopes);
        }
        if case.sinks {
            score = score.sinks(&self.sinks);
        }
        let problem = match cached {
            Some((cache, sequences)) => Problem::cached(&q, cache, sequences)?,
            None => Problem::new(&q, &k, &v),
        };
        let problem = problem.mask(self.mask.clone()).score(score).normalizer(case.normalizer);
        let problem = match &self.hidden {
            Some([w_q, w_k, v]) => problem.similarity(Similarity::Additive(Additive {
                w_q: w_q.view(),
                w_k: Some(w_k.view()),
                v: v.view(),
            })),
            None => problem,
        };
        let local = case.local.map(|reach| Local::new(&self.centers, reach));
        let problem = local.into_iter().fold(problem, Problem::local);
        let problem = case.precision.into_iter().fold(problem, Problem::precision);
        let dropout = case.dropout.map(|rate| Dropout::new(rate, 7, 0));
        Ok(dropout.into_iter().fold(problem, Problem::dropout))
    }

    /// What the sequences of a case have in a cache.
    pub(crate) fn cache(
        &self,
        how: Cached,
        quantization: Option<Quantization>,
    ) -> Result<(KvCache<E>, Vec<Sequence>)> {
        let Shape { batch, heads, len, dim } = self.k.shape();
        let v_dim = self.v.shape().dim;
        let shape = CacheShape { heads, qk_dim: dim, v_dim, page: PAGE };
        let latent = self.latent.map(|v_dim| CacheShape { v_dim, ..shape });
        let mut cache = match (latent, quantization) {
            (Some(shape), Some(bits)) => KvCache::latent_quantized(shape, bits, usize::MAX)?,
            (Some(shape), None) => KvCache::latent(shape, usize::MAX)?,
            (None, Some(bits)) => KvCache::quantized(shape, bits, usize::MAX)?,
            (None, None) => KvCache::new(shape, usize::MAX)?,
        };
        let mut sequences: Vec<Sequence> = Vec::new();
        for b in 0..batch {
            if let (Cached::Shared, Some(first)) = (how, sequences.first()) {
                sequences.push(cache.fork(*first)?);
                continue;
            }
            let sequence = cache.start()?;
            let item = |of: &'_ Tensor<E>, dim: usize| b * heads * len * dim..of.data().len();
            let (k, v) = (&self.k.data()[item(&self.k, dim)], &self.v.data()[item(&self.v, v_dim)]);
            let k = View::bhsd(k, [1, heads, len, dim])?;
            cache.append(sequence, k, View::bhsd(v, [1, heads, len, v_dim])?)?;
            sequences.push(sequence);
        }
        Ok((cache, sequences))
    }

    /// Bytes of keys and values.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(self.k.data()) + size_of_val(self.v.data())
    }
}

/// The weights of a hidden layer of `dim` units.
fn hidden<E: Element>(noise: &mut Noise, dim: usize) -> Result<[Tensor<E>; 3]> {
    let square = Shape { batch: 1, heads: 1, len: dim, dim };
    let size = 1.0 / (dim as f64).sqrt();
    let mut weights = |len| tensor(noise, Shape { len, ..square }, Layout::Bhsd, size);
    Ok([weights(dim)?, weights(dim)?, weights(1)?])
}

fn mask(case: &Case, noise: &mut Noise) -> Result<Mask> {
    let Dims { q_len, k_len, .. } = case.dims;
    case.rules.iter().try_fold(Mask::full(), |mask, rule| {
        Ok(mask.and(match rule {
            Rule::Causal => Mask::causal(),
            Rule::Window { keys } => Mask::full().window(*keys),
            Rule::Lengths { lengths } => Mask::lengths(lengths),
            Rule::Blocks { size } => Mask::blocks(*size),
            Rule::Longformer { window, global } => Mask::longformer(*window, global),
            Rule::Strided { stride } => Mask::strided(*stride),
            Rule::Fixed { block, summary } => Mask::fixed(*block, *summary),
            Rule::Tree { parents } => {
                let parents = parents.iter().map(|parent| usize::try_from(*parent).ok());
                Mask::tree(&parents.collect::<Vec<_>>())
            }
            Rule::Keys { keys } => {
                let list = |_| (0..*keys).map(|_| noise.below(k_len)).collect::<Vec<_>>();
                let lists: Vec<_> = (0..q_len).map(list).collect();
                Mask::keys(KeyLists::new(&lists, [1, 1, q_len])?)
            }
            Rule::Bits => {
                let pairs = q_len.checked_mul(k_len).context("too many pairs for a bool mask")?;
                let coins: Vec<bool> = (0..pairs).map(|_| noise.bits() >> 63 == 1).collect();
                Mask::bits(Bits::from_bools(&coins, [1, 1, q_len, k_len])?)
            }
        }))
    })
}

/// Rows that have about 64 neighbours each, their cosines about 0.92; queries and keys of the same shape are the same.
fn clustered<E: Element>(shape: Shape, k_len: usize, layout: Layout) -> Result<Tensor<E>> {
    let Shape { batch, heads, len, dim } = shape;
    let clusters = k_len.div_ceil(64);
    let data = regard_testkit::lsh::clustered(batch * heads * len, dim, clusters, 0.3, 1);
    Ok(Tensor::new(data, shape, layout)?)
}

fn tensor<E: Element>(
    noise: &mut Noise,
    shape: Shape,
    layout: Layout,
    times: f64,
) -> Result<Tensor<E>> {
    let count: usize = shape.to_array().iter().product();
    let data = (0..count).map(|_| E::narrow(E::Num::from_f64(noise.normal() * times))).collect();
    Ok(Tensor::new(data, shape, layout)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use regard::{Machine, Plan};

    #[test]
    fn every_option_becomes_a_problem_that_runs() {
        for option in [
            "",
            "-causal",
            "-window7",
            "-padding",
            "-bool",
            "-blocks5",
            "-longformer7",
            "-strided",
            "-fixed",
            "-tree",
            "-keys9",
            "-bias",
            "-headbias",
            "-alibi",
            "-softcap",
            "-sinks",
            "-dropout",
            "-large-logit",
            "-bshd",
            "-q9",
            "-kv1",
            "-v3",
            "-strict",
            "-high",
            "-additive",
            "-top-3",
            "-hard",
            "-sampled-causal",
            "-sparsemax",
            "-local4",
            "-b2-padding-causal-softcap",
        ] {
            let case = |dtype| Case::parse(&format!("prefill-{dtype}-n37-d8-h2{option}")).unwrap();
            runs::<f32>(&case("f32"));
            runs::<f64>(&case("f64"));
            runs::<regard::f16>(&case("f16"));
            runs::<regard::bf16>(&case("bf16"));
        }
    }

    fn runs<E: Element>(case: &Case) {
        let input = Input::<E>::new(case).unwrap();
        let plan = Plan::new(input.problem(case, None).unwrap(), Machine::detect()).unwrap();
        let (q, k, v) = input.views();
        let out = plan.forward(q, k, v).unwrap().out;
        assert_eq!(out.shape().dim, case.dims.v_dim);
        assert!(out.data().iter().all(|x| x.widen().to_f64().is_finite()), "{}", case.name);
        let bytes = case.dims.k_len * (case.dims.qk_dim + case.dims.v_dim) * size_of::<E>();
        let read = input.bytes();
        assert_eq!(read, bytes * case.dims.batch * case.dims.heads.kv);
    }
}
