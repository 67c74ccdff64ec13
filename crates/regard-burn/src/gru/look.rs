//! What a unit sees of a memory: `score . tanh(query h + key)`, a softmax of it, and the mean of the values by that.

use crate::product::{Matrix, Products};
use crate::rows::{RowWork, by_few, by_rows, column_sums};
use crate::tensors::{numbers, tensor};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use pulp::NullaryFnOnce;
use rayon::prelude::*;
use regard_matmul::math::{exp, tanh, vectorized};
use regard_matmul::sum;

/// What a recurrent net looks at before each step, and how.
#[derive(Clone, Debug)]
pub struct GruAttention {
    /// `[units, hidden]`: what is made of the state.
    pub query: Tensor<2>,
    /// `[units]`
    pub score: Tensor<1>,
    /// `[batch, keys, units]`: what was made of the memory, once for all steps.
    pub keys: Tensor<3>,
    /// `[batch, keys, features]`: what is seen.
    pub values: Tensor<3>,
    /// `[3 hidden, features]`: how it is added to the input.
    pub context: Tensor<2>,
    /// Keys of each row that are no padding.
    pub lengths: Vec<usize>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionSizes {
    hidden: usize,
    units: usize,
    keys: usize,
    pub(super) features: usize,
}

impl GruAttention {
    /// # Panics
    /// If sizes do not fit.
    pub(super) fn checked(&self, [batch, hidden]: [usize; 2]) -> AttentionSizes {
        let ([_, keys, units], [_, _, features]) = (self.keys.dims(), self.values.dims());
        let same = |what: &str, found: &[usize], right: &[usize]| {
            assert!(found == right, "{what}: its sizes are {found:?}, {right:?} is wanted");
        };
        same("query", &self.query.dims(), &[units, hidden]);
        same("score", &self.score.dims(), &[units]);
        same("keys", &self.keys.dims(), &[batch, keys, units]);
        same("values", &self.values.dims(), &[batch, keys, features]);
        same("context", &self.context.dims(), &[3 * hidden, features]);
        same("lengths of keys", &[self.lengths.len()], &[batch]);
        let most = self.lengths.iter().copied().max().unwrap_or(0);
        assert!(most <= keys, "lengths of keys: {most}, there are {keys}");
        AttentionSizes { hidden, units, keys, features }
    }
}

/// The memory of a call.
#[derive(Debug)]
pub(super) struct AttentionMemory {
    pub(super) sizes: AttentionSizes,
    pub(super) lengths: Vec<usize>,
    pub(super) products: Products,
}

/// What every step saw.
#[derive(Debug)]
pub(super) struct SavedAttention {
    /// `[steps][batch][units]`
    queries: Vec<f32>,
    /// `[steps][batch]`, of each the context `[features]` and the weights `[keys]`.
    rows: Vec<f32>,
    sizes: AttentionSizes,
}

impl SavedAttention {
    fn row(&self) -> usize {
        self.sizes.features + self.sizes.keys
    }

    pub(super) fn context(&self, i: usize) -> &[f32] {
        &self.rows[i * self.row()..][..self.sizes.features]
    }

    /// All contexts, as a matrix.
    fn contexts(rows: &[f32], AttentionSizes { features, keys, .. }: AttentionSizes) -> Matrix<'_> {
        let row = features + keys;
        Matrix::part(rows, [rows.len() / row.max(1), features], row, 0)
    }
}

impl AttentionMemory {
    /// Room for what so many steps will see.
    pub(super) fn seen(&self, steps: usize, batch: usize) -> SavedAttention {
        let AttentionSizes { units, keys, features, .. } = self.sizes;
        let rows = vec![0.0; steps * batch * (features + keys)];
        SavedAttention { queries: vec![0.0; steps * batch * units], rows, sizes: self.sizes }
    }

    /// What states `[batch, hidden]` see: what the input `[batch, length, 3 hidden]` has made at a position, and it.
    pub(super) fn look(
        &self,
        seen: &mut SavedAttention,
        step: usize,
        states: Matrix<'_>,
        memory: &[FlexTensor],
        (x, at): (&[f32], usize),
    ) -> Vec<f32> {
        let AttentionSizes { hidden, units, features, .. } = self.sizes;
        let (batch, row) = (self.lengths.len(), seen.row());
        let of = Parts::of(memory);
        let queries =
            self.products.multiply(states, Matrix::rows(of.query, [units, hidden]).turned());
        let rows = &mut seen.rows[step * batch * row..][..batch * row];
        by_few(rows, row, &Looking { memory: self, of, queries: &queries });
        let context = Matrix::rows(of.context, [3 * hidden, features]).turned();
        let mut to = self.products.multiply(SavedAttention::contexts(rows, self.sizes), context);
        let length = x.len() / (batch * 3 * hidden).max(1);
        by_rows(&mut to, 3 * hidden, &Inputs { x, at, length });
        seen.queries[step * batch * units..][..batch * units].copy_from_slice(&queries);
        to
    }

    /// The way back of all steps, before any was made.
    pub(super) fn undone<'a>(
        &'a self,
        seen: &'a SavedAttention,
        memory: &'a [FlexTensor],
        steps: usize,
    ) -> AttentionBackward<'a> {
        let AttentionSizes { hidden, units, keys, features } = self.sizes;
        let (batch, of) = (self.lengths.len(), Parts::of(memory));
        // Records have what is said of n before what is said of the gates.
        let (gates, new) = of.context.split_at(2 * hidden * features);
        let context = [new, gates].concat();
        let each = keys * (units + features) + units;
        let (by_memory, by_queries) = (vec![0.0; batch * each], vec![0.0; steps * batch * units]);
        AttentionBackward { memory: self, seen, of, context, by_memory, by_queries }
    }
}

/// The tensors of a memory.
#[derive(Clone, Copy, Debug)]
struct Parts<'a> {
    query: &'a [f32],
    score: &'a [f32],
    keys: &'a [f32],
    values: &'a [f32],
    context: &'a [f32],
}

impl<'a> Parts<'a> {
    fn of(inputs: &'a [FlexTensor]) -> Self {
        let [query, score, keys, values, context] = [0, 1, 2, 3, 4].map(|i| numbers(&inputs[i]));
        Self { query, score, keys, values, context }
    }
}

/// Writes contexts and weights.
struct Looking<'a> {
    memory: &'a AttentionMemory,
    of: Parts<'a>,
    queries: &'a [f32],
}

impl RowWork for Looking<'_> {
    #[inline(always)]
    fn row(&self, i: usize, row: &mut [f32]) {
        let AttentionSizes { units, keys, features, .. } = self.memory.sizes;
        let (context, weights) = row.split_at_mut(features);
        let weights = &mut weights[..self.memory.lengths[i]];
        let (query, score) = (&self.queries[i * units..][..units], self.of.score);
        let mut most = f32::NEG_INFINITY;
        for (j, weight) in weights.iter_mut().enumerate() {
            let key = &self.of.keys[(i * keys + j) * units..][..units];
            *weight = sum!(query in query, key in key, score in score => score * tanh(query + key));
            most = most.max(*weight);
        }
        let mut total = 0.0;
        for weight in &mut *weights {
            *weight = exp(*weight - most);
            total += *weight;
        }
        for (j, weight) in weights.iter_mut().enumerate() {
            *weight /= total;
            let value = &self.of.values[(i * keys + j) * features..][..features];
            for (sum, x) in context.iter_mut().zip(value) {
                *sum = weight.mul_add(*x, *sum);
            }
        }
    }
}

/// Adds what the input has made at one position.
struct Inputs<'a> {
    x: &'a [f32],
    at: usize,
    length: usize,
}

impl RowWork for Inputs<'_> {
    #[inline(always)]
    fn row(&self, i: usize, row: &mut [f32]) {
        let x = &self.x[(i * self.length + self.at) * row.len()..];
        for (to, x) in row.iter_mut().zip(x) {
            *to += x;
        }
    }
}

/// The way back, from the last step to the first.
#[derive(Debug)]
pub(super) struct AttentionBackward<'a> {
    memory: &'a AttentionMemory,
    seen: &'a SavedAttention,
    of: Parts<'a>,
    /// Rows of n, r and z.
    context: Vec<f32>,
    /// `[batch]`, of each the gradients by its keys, its values and the score.
    by_memory: Vec<f32>,
    /// `[steps][batch][units]`
    by_queries: Vec<f32>,
}

/// Rows of one task.
const ROWS: usize = 8;

impl AttentionBackward<'_> {
    /// What a step says of the state before it through what that has seen, `[batch, hidden]`: from the gradient by what the input
    /// has made, rows of n, r and z, and that of the output.
    pub(super) fn step(
        &mut self,
        step: usize,
        by_input: Matrix<'_>,
        output_grad: (&[f32], usize),
    ) -> Vec<f32> {
        let AttentionSizes { hidden, units, features, keys } = self.memory.sizes;
        let batch = self.memory.lengths.len();
        let contexts = self
            .memory
            .products
            .multiply(by_input, Matrix::rows(&self.context, [3 * hidden, features]));
        let each = keys * (units + features) + units;
        let to = &mut self.by_queries[step * batch * units..][..batch * units];
        let row = self.seen.row();
        let seen = &self.seen.rows[step * batch * row..][..batch * row];
        let queries = &self.seen.queries[step * batch * units..][..batch * units];
        let (memory, of) = (self.memory, self.of);
        let pieces = to
            .par_chunks_mut((ROWS * units).max(1))
            .zip(self.by_memory.par_chunks_mut((ROWS * each).max(1)));
        pieces.enumerate().for_each(|(piece, (by_queries, by_memory))| {
            let first = piece * ROWS;
            vectorized(AttentionBackwardRows {
                memory,
                of,
                seen,
                queries,
                contexts: &contexts,
                output_grad,
                first,
                to: [by_queries, by_memory],
            });
        });
        memory
            .products
            .multiply(Matrix::rows(to, [batch, units]), Matrix::rows(of.query, [units, hidden]))
    }

    /// The gradients by query, score, keys, values and context, from the states `[steps x batch, hidden]` that have looked and from
    /// the gradients by what the input has made.
    pub(super) fn finish(
        self,
        states: Matrix<'_>,
        by_input: Matrix<'_>,
    ) -> Vec<Option<FlexTensor>> {
        let AttentionSizes { hidden, units, keys, features } = self.memory.sizes;
        let batch = self.memory.lengths.len();
        let rows = self.by_queries.len() / units.max(1);
        let by_query = self
            .memory
            .products
            .multiply(Matrix::rows(&self.by_queries, [rows, units]).turned(), states);
        let contexts = SavedAttention::contexts(&self.seen.rows, self.memory.sizes);
        let by_context = self.memory.products.multiply(by_input.turned(), contexts);
        let (new, gates) = by_context.split_at(hidden * features);
        let by_context = [gates, new].concat();
        let each = keys * (units + features) + units;
        let part = |first: usize, n: usize| -> Vec<f32> {
            let rows = self.by_memory.chunks(each.max(1));
            rows.flat_map(|row| row[first..first + n].iter().copied()).collect()
        };
        let by_score = column_sums(&part(keys * (units + features), units), units);
        vec![
            Some(tensor(by_query, &[units, hidden])),
            Some(tensor(by_score, &[units])),
            Some(tensor(part(0, keys * units), &[batch, keys, units])),
            Some(tensor(part(keys * units, keys * features), &[batch, keys, features])),
            Some(tensor(by_context, &[3 * hidden, features])),
        ]
    }
}

/// The way back of some rows of one step.
struct AttentionBackwardRows<'a> {
    memory: &'a AttentionMemory,
    of: Parts<'a>,
    seen: &'a [f32],
    queries: &'a [f32],
    contexts: &'a [f32],
    output_grad: (&'a [f32], usize),
    first: usize,
    /// By the queries, and by the memory.
    to: [&'a mut [f32]; 2],
}

impl NullaryFnOnce for AttentionBackwardRows<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let AttentionSizes { hidden, units, keys, features } = self.memory.sizes;
        let (batch, (output_grad, at)) = (self.memory.lengths.len(), self.output_grad);
        let width = hidden + features;
        let length = output_grad.len() / (batch * width).max(1);
        let each = keys * (units + features) + units;
        let [by_queries, by_memory] = self.to;
        let rows = by_queries.chunks_mut(units.max(1)).zip(by_memory.chunks_mut(each.max(1)));
        for (i, (by_query, by_memory)) in rows.enumerate() {
            let i = self.first + i;
            let up = &output_grad[(i * length + at) * width + hidden..][..features];
            let mut d_context = self.contexts[i * features..][..features].to_vec();
            for (d, up) in d_context.iter_mut().zip(up) {
                *d += up;
            }
            let n = self.memory.lengths[i];
            let weights = &self.seen[i * (features + keys) + features..][..n];
            let (query, score) = (&self.queries[i * units..][..units], self.of.score);
            let (by_keys, rest) = by_memory.split_at_mut(keys * units);
            let (by_values, by_score) = rest.split_at_mut(keys * features);
            let mut slopes = vec![0.0; n];
            let mut mean = 0.0;
            for (j, (slope, weight)) in slopes.iter_mut().zip(weights).enumerate() {
                let value = &self.of.values[(i * keys + j) * features..][..features];
                *slope = sum!(d in &d_context, value in value => d * value);
                mean += *slope * weight;
                let by_value = &mut by_values[j * features..][..features];
                for (to, d) in by_value.iter_mut().zip(&d_context) {
                    *to = weight.mul_add(*d, *to);
                }
            }
            for (j, (slope, weight)) in slopes.iter().zip(weights).enumerate() {
                let d = weight * (slope - mean);
                let key = &self.of.keys[(i * keys + j) * units..][..units];
                let by_key = &mut by_keys[j * units..][..units];
                for k in 0..units {
                    let t = tanh(query[k] + key[k]);
                    let inner = d * score[k] * (1.0 - t * t);
                    by_score[k] = d.mul_add(t, by_score[k]);
                    by_key[k] += inner;
                    by_query[k] += inner;
                }
            }
        }
    }
}
