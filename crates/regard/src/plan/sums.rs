//! What the tasks of the backward pass add to the gradients of the options.

use super::Core;
use crate::description::similarity::{Additive, Similarity};
use crate::error::Error;
use crate::kernel::backward::OPTIONS;
use crate::machine::memory::use_large_pages;
use crate::machine::simd::{Element, Number};
use crate::plan::grads::{AdditiveGrads, Grads};
use crate::tensor::view::{Layout, Shape, Tensor};

/// Adds tables `[items, heads.q, parts, entries]` to one `[entries, heads.q]`, in order.
pub(super) fn add_tables(sum: &mut [f64], tables: &[f64], [heads, parts, entries]: [usize; 3]) {
    for (i, table) in tables.chunks_exact(entries.max(1)).enumerate() {
        let head = i / parts % heads;
        for (entry, x) in table.iter().enumerate() {
            sum[entry * heads + head] += x;
        }
    }
}

/// What the rows and tasks of a call add to the gradients of the options.
pub(super) struct OptionSums<N> {
    /// Options and sinks, `[heads.q]`; nothing where there are no rows.
    by_head: Vec<[f64; OPTIONS + 1]>,
    /// Of the relative bias and of `v`, `[buckets + hidden, heads.q]`.
    pub(super) tables: Vec<f64>,
    /// By the centers of local attention, `[items, heads.q, q_len]`, and what rows are multiplied by for that.
    centers: Vec<N>,
    centre_factor: Option<f64>,
    /// `[1, heads.q or 1, q_dim, qk_dim]`
    pub(super) w: Option<Vec<N>>,
    /// In the shape of the bias.
    pub(super) bias: Option<Vec<N>>,
}

impl<N: Number> OptionSums<N> {
    pub(super) fn new(plan: &Core<'_, N>, bias: bool) -> Self {
        let (score, rows) = (&plan.problem().score, plan.problem().rows());
        let heads = plan.problem().dims().heads.q;
        let table = score.relative.as_ref().map_or(0, |r| r.table().len());
        Self {
            by_head: vec![[0.0; OPTIONS + 1]; if rows == 0 { 0 } else { heads }],
            tables: vec![0.0; table + plan.problem().similarity.hidden() * heads],
            centers: Vec::new(),
            centre_factor: plan.problem().centre_grad_factor(),
            w: plan.w_shape().map(|w| vec![N::zero(); w.to_array().iter().product()]),
            bias: score.bias.filter(|_| bias).map(|bias| {
                let mut zeros = vec![N::zero(); bias.shape().to_array().iter().product()];
                use_large_pages(&mut zeros);
                zeros
            }),
        }
    }

    /// Takes the gradient of a bias of this shape, if it is asked for, to be added to: where all keys share an entry, each of the
    /// parts has a column of its own.
    pub(super) fn take_bias(&mut self, shape: Shape, parts: usize) -> Option<(Vec<N>, Shape)> {
        let shape = Shape { dim: if shape.dim == 1 { parts } else { shape.dim }, ..shape };
        let mut data = self.bias.take()?;
        data.resize(shape.to_array().iter().product(), N::zero());
        Some((data, shape))
    }

    /// Puts it back, such columns joined.
    pub(super) fn put_bias(&mut self, data: Vec<N>, shape: Shape, parts: usize) {
        let sum = |parts: &[N]| parts.iter().fold(N::zero(), |sum, x| sum + *x);
        let joined = shape.dim == 1;
        self.bias = Some(if joined { data.chunks_exact(parts).map(sum).collect() } else { data });
    }

    /// Adds what rows `[items, heads.q, q_len]` say of the options and of the sinks, in order.
    pub(super) fn add_rows(&mut self, options: &[N], sinks: &[N], q_len: usize) {
        let heads = self.by_head.len();
        for (row, options) in options.chunks_exact(OPTIONS).enumerate() {
            if let Some(factor) = self.centre_factor {
                self.centers.push(options[OPTIONS - 1] * N::from_f64(factor));
            }
            let sums = &mut self.by_head[row / q_len % heads];
            options.iter().zip(sums).for_each(|(x, sum)| *sum += (*x).to_f64());
        }
        for (row, sink) in sinks.iter().enumerate() {
            self.by_head[row / q_len % heads][OPTIONS] += (*sink).to_f64();
        }
    }

    /// Adds the sums of other items.
    pub(super) fn add(&mut self, other: &Self) {
        let Self { by_head, tables, w, bias, .. } = self;
        for (sum, x) in by_head.as_flattened_mut().iter_mut().zip(other.by_head.as_flattened()) {
            *sum += x;
        }
        tables.iter_mut().zip(&other.tables).for_each(|(sum, x)| *sum += x);
        for (sum, x) in [(w, &other.w), (bias, &other.bias)] {
            let both = sum.iter_mut().flatten().zip(x.iter().flatten());
            both.for_each(|(sum, x)| *sum = *sum + *x);
        }
    }

    pub(super) fn into_options(self, plan: &Core<'_, N>) -> Result<OptionGrads<N>, Error> {
        let problem = plan.problem();
        let by_head = self.by_head;
        let column = |given: Option<&[N]>, i: usize| -> Vec<N> {
            let sum = |head: usize| N::from_f64(by_head.get(head).map_or(0.0, |sums| sums[i]));
            (0..given.map_or(0, <[_]>::len)).map(sum).collect()
        };
        let scale: f64 = by_head.iter().map(|sums| sums[0]).sum();
        let score = &problem.score;
        let tensor = |data: Vec<N>, shape| Tensor::new(data, shape, Layout::Bhsd);
        let buckets = score.relative.as_ref().map_or(0, |r| r.table().len());
        let w = self.w.zip(plan.w_shape()).map(|(data, shape)| tensor(data, shape));
        let mut w = w.transpose()?;
        let mut additive = None;
        if let Similarity::Additive(Additive { v, .. }) = problem.similarity {
            // similarity = v^T ..., score = scale * similarity
            let d_v = by_v(&self.tables[buckets..], v.shape(), problem.scale());
            let v = tensor(d_v, v.shape())?;
            additive = w.take().map(|w_q| AdditiveGrads { w_q, w_k: None, v });
        }
        let bias = self.bias.map(|data| tensor(data, plan.bias_shape())).transpose()?;
        Ok(OptionGrads {
            scale,
            // scale = given / temperature
            temperature: -scale * problem.scale() / score.temperature,
            alibi: column(score.alibi, 1),
            sinks: column(score.sinks, OPTIONS),
            relative: self.tables[..buckets].iter().map(|x| N::from_f64(*x)).collect(),
            bias,
            centers: self.centers,
            w,
            additive,
        })
    }
}

/// The gradients of the options of a call: see [`Grads`].
pub(super) struct OptionGrads<N: Number> {
    scale: f64,
    temperature: f64,
    alibi: Vec<N>,
    sinks: Vec<N>,
    relative: Vec<N>,
    bias: Option<Tensor<N>>,
    centers: Vec<N>,
    w: Option<Tensor<N>>,
    pub(super) additive: Option<AdditiveGrads<N>>,
}

impl<N: Number> OptionGrads<N> {
    /// With the gradients by q, k and v.
    pub(super) fn into_grads<E: Element<Num = N>>(self, [q, k, v]: [Tensor<E>; 3]) -> Grads<E> {
        let Self { scale, temperature, alibi, sinks, relative, bias, centers, w, additive } = self;
        Grads { q, k, v, scale, temperature, alibi, sinks, relative, bias, centers, w, additive }
    }
}

/// From sums `[hidden, heads.q]` to the gradient by `v [1, heads.q or 1, 1, hidden]`.
fn by_v<N: Number>(sums: &[f64], v: Shape, factor: f64) -> Vec<N> {
    let heads = sums.len().checked_div(v.dim).unwrap_or(0);
    let shared = v.heads == 1;
    let of = |head: usize, unit: usize| {
        let own = if shared { 0..heads } else { head..head + 1 };
        sums[unit * heads..][own].iter().sum::<f64>()
    };
    let entries = (0..v.heads).flat_map(|head| (0..v.dim).map(move |unit| (head, unit)));
    entries.map(|(head, unit)| N::from_f64(of(head, unit) * factor)).collect()
}
