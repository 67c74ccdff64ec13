//! A whole sequence through gated recurrent units (Cho et al. 2014), and through units that look at a memory before each step
//! (Bahdanau et al. 2015), as one step of the graph.
//!
//! Step by step, a graph would make the gradients of the weights for each position and add them up: that is more traffic than
//! arithmetic. Here the way back leaves what each position says of the weights, and one product makes the gradient of all.
//!
//! What a row knows of a step is a record of five lists, `[steps][batch][5][hidden]`:
//!
//! ```text
//! forward    r    z    n     u = U_n h + c_n     the state after it
//! backward   d_n  d_r  d_z   d_u                 what the state before it gets directly
//! ```
//!
//! so that `d_n d_r d_z` is the gradient by what the input has made, and `d_r d_z d_u` that by what the state has made.

mod look;

use crate::error::Error;
use crate::op::{BackwardArgs, Operation, run};
use crate::product::{Matrix, Products};
use crate::rows::{RowSums, RowWork, by_few, by_rows, summed};
use crate::tensors::{dense, numbers, only_f32, sizes, tensor};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
pub use look::GruAttention;
use look::{AttentionMemory, SavedAttention};
use regard_matmul::math::{sigmoid, tanh};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Lists of a record.
const LISTS: usize = 5;

/// How a sequence is read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// Positions of each row that count, where they differ; a row keeps its state at the others.
    pub lengths: Option<Vec<usize>>,
    /// Whether it is read from its end.
    pub backward: bool,
}

/// The states after each position, `[batch, length, hidden]`:
///
/// ```text
/// r  = sigmoid(x_r + U_r h + c_r)
/// z  = sigmoid(x_z + U_z h + c_z)
/// n  = tanh(x_n + r (U_n h + c_n))
/// h' = (1 - z) n + z h
/// ```
///
/// `inputs [batch, length, 3 hidden]` is what the input makes of each position, x; `state [batch, hidden]` is the first, `weight
/// [3 hidden, hidden]` and `bias [3 hidden]` are U and c. The rows of each are those of r, z and n, as in PyTorch. Products are those
/// of [`with_products`](crate::with_products).
///
/// # Panics
/// If sizes do not fit, or numbers are not f32 on the Flex backend.
#[must_use]
pub fn gru(
    inputs: Tensor<3>,
    state: Tensor<2>,
    weight: Tensor<2>,
    bias: Tensor<1>,
    steps: Steps,
) -> Tensor<3> {
    let inputs = checked(inputs, state, weight, bias, &steps);
    let products = Products::here();
    run(Arc::new(Gru { steps, products, seen: None, kept: OnceLock::new() }), inputs)
}

/// The same with a look at a memory before each step: `[batch, length, hidden + features]`, the states and then what each had seen.
///
/// The state before a step is the query. What it sees, c, is added to the input: `x + context c`.
///
/// # Panics
/// If sizes do not fit, or numbers are not f32 on the Flex backend.
#[must_use]
pub fn gru_with_attention(
    inputs: Tensor<3>,
    state: Tensor<2>,
    weight: Tensor<2>,
    bias: Tensor<1>,
    look: GruAttention,
) -> Tensor<3> {
    let (sizes, steps) = (look.checked(state.dims()), Steps::default());
    let mut inputs = checked(inputs, state, weight, bias, &steps);
    let GruAttention { query, score, keys, values, context, lengths } = look;
    inputs.extend([query.into_dispatch(), score.into_dispatch(), keys.into_dispatch()]);
    inputs.extend([values.into_dispatch(), context.into_dispatch()]);
    let products = Products::here();
    let seen = Some(AttentionMemory { sizes, lengths, products });
    run(Arc::new(Gru { steps, products, seen, kept: OnceLock::new() }), inputs)
}

fn checked(
    inputs: Tensor<3>,
    state: Tensor<2>,
    weight: Tensor<2>,
    bias: Tensor<1>,
    steps: &Steps,
) -> Vec<burn::backend::DispatchTensor> {
    let ([batch, length, _], [_, hidden]) = (inputs.dims(), state.dims());
    let same = |what: &str, found: &[usize], right: &[usize]| {
        assert!(found == right, "{what}: its sizes are {found:?}, {right:?} is wanted");
    };
    same("inputs", &inputs.dims(), &[batch, length, 3 * hidden]);
    same("state", &state.dims(), &[batch, hidden]);
    same("weight", &weight.dims(), &[3 * hidden, hidden]);
    same("bias", &bias.dims(), &[3 * hidden]);
    if let Some(lengths) = &steps.lengths {
        same("lengths", &[lengths.len()], &[batch]);
    }
    vec![
        inputs.into_dispatch(),
        state.into_dispatch(),
        weight.into_dispatch(),
        bias.into_dispatch(),
    ]
}

#[derive(Debug)]
struct Gru {
    steps: Steps,
    products: Products,
    /// What is looked at, if anything is.
    seen: Option<AttentionMemory>,
    kept: OnceLock<SavedStates>,
}

/// What the way forward found out.
#[derive(Debug)]
struct SavedStates {
    /// `[1 + steps][batch][5][hidden]`; of the first, which is no step, the state alone.
    records: Vec<f32>,
    seen: Option<SavedAttention>,
}

#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    length: usize,
    hidden: usize,
}

impl Sizes {
    fn of(inputs: &[FlexTensor]) -> Self {
        let (of_inputs, of_state) = (sizes(&inputs[0]), sizes(&inputs[1]));
        Self { batch: of_inputs[0], length: of_inputs[1], hidden: of_state[1] }
    }

    /// Numbers of a record.
    fn record(self) -> usize {
        LISTS * self.hidden
    }

    /// Numbers of all records of a step.
    fn step(self) -> usize {
        self.batch * self.record()
    }

    /// These lists of all records, as the columns of a matrix.
    fn lists(self, records: &[f32], lists: Range<usize>) -> Matrix<'_> {
        let rows = records.len() / self.record().max(1);
        let (first, columns) = (lists.start * self.hidden, lists.len() * self.hidden);
        Matrix::part(records, [rows, columns], self.record(), first)
    }
}

impl Gru {
    /// Which position a step reads.
    fn position(&self, step: usize, length: usize) -> usize {
        if self.steps.backward { length - 1 - step } else { step }
    }

    /// Whether a position is not within the length of a row.
    #[inline(always)]
    fn outside(&self, row: usize, at: usize) -> bool {
        self.steps.lengths.as_ref().is_some_and(|lengths| at >= lengths[row])
    }
}

impl Operation for Gru {
    fn forward(&self, inputs: &[FlexTensor], keep: bool) -> Result<FlexTensor, Error> {
        only_f32("gru", inputs);
        let of = Sizes::of(inputs);
        let Sizes { batch, length, hidden } = of;
        let inputs: Vec<FlexTensor> = inputs.iter().map(dense).collect();
        let list = |i: usize| numbers::<f32>(&inputs[i]);
        let weight = Matrix::rows(list(2), [3 * hidden, hidden]).turned();
        let mut records = vec![0.0; (1 + length) * of.step()];
        let firsts = records.chunks_mut(of.record().max(1));
        for (record, state) in firsts.zip(list(1).chunks(hidden.max(1))) {
            record[4 * hidden..].copy_from_slice(state);
        }
        let mut seen = self.seen.as_ref().map(|memory| memory.seen(length, batch));
        for step in 0..length {
            let (done, next) = records.split_at_mut((step + 1) * of.step());
            let before = &done[step * of.step()..];
            let states = of.lists(before, 4..5);
            let at = self.position(step, length);
            let seen = match (&self.seen, &mut seen) {
                (Some(memory), Some(seen)) => {
                    Some(memory.look(seen, step, states, &inputs[4..], (list(0), at)))
                }
                _ => None,
            };
            let x = match &seen {
                Some(x) => (&x[..], [3 * hidden, 0]),
                None => (list(0), [length * 3 * hidden, at * 3 * hidden]),
            };
            let of_state = self.products.multiply(states, weight);
            let cell = Cell { op: self, of, at, x, of_state: &of_state, bias: list(3), before };
            by_few(&mut next[..of.step()], of.record(), &cell);
        }
        let features = self.seen.as_ref().map_or(0, |memory| memory.sizes.features);
        let width = hidden + features;
        let mut out = vec![0.0; batch * length * width];
        for (i, row) in out.chunks_mut(width.max(1)).enumerate() {
            let (item, at) = (i / length, i % length);
            let step = self.position(at, length);
            let record = &records[((1 + step) * batch + item) * of.record()..][..of.record()];
            row[..hidden].copy_from_slice(&record[4 * hidden..]);
            if let Some(seen) = &seen {
                row[hidden..].copy_from_slice(seen.context(step * batch + item));
            }
        }
        if keep {
            let _ = self.kept.set(SavedStates { records, seen });
        }
        Ok(tensor(out, &[batch, length, width]))
    }

    fn backward(&self, back: BackwardArgs<'_>) -> Vec<Option<FlexTensor>> {
        let of = Sizes::of(back.inputs);
        let Sizes { batch, length, hidden } = of;
        let inputs: Vec<FlexTensor> = back.inputs.iter().map(dense).collect();
        let weight = Matrix::rows(numbers(&inputs[2]), [3 * hidden, hidden]);
        let SavedStates { records, seen } =
            self.kept.get().expect("forward has been before backward");
        let output_grad = dense(&back.output_grad);
        let output_grad: &[f32] = numbers(&output_grad);
        let mut undone = vec![0.0; length * of.step()];
        let mut d_state = vec![0.0; batch * hidden];
        let mut d_seen = match (&self.seen, seen) {
            (Some(memory), Some(seen)) => Some(memory.undone(seen, &inputs[4..], length)),
            _ => None,
        };
        for step in (0..length).rev() {
            let at = self.position(step, length);
            let [before, after] = [0, 1].map(|i| &records[(step + i) * of.step()..][..of.step()]);
            let undo = Undo { op: self, of, at, before, after, output_grad, d_state: &d_state };
            let now = &mut undone[step * of.step()..][..of.step()];
            by_few(now, of.record(), &undo);
            d_state = self.products.multiply(of.lists(now, 1..4), weight);
            by_rows(&mut d_state, hidden, &Direct { records: now, of });
            if let Some(d_seen) = &mut d_seen {
                let by_query = d_seen.step(step, of.lists(now, 0..3), (output_grad, at));
                by_rows(&mut d_state, hidden, &BiasAdd(&by_query));
            }
        }
        let states = of.lists(&records[..length * of.step()], 4..5);
        let of_state = of.lists(&undone, 1..4);
        let wanted = |i: usize| back.needs_grad.get(i).copied().unwrap_or(false);
        let by_weight = || {
            let by_weight = self.products.multiply(of_state.turned(), states);
            tensor(by_weight, &[3 * hidden, hidden])
        };
        let by_bias = || {
            let sums = summed(length * batch, 3 * hidden, &StateSums { records: &undone, of });
            tensor(sums, &[3 * hidden])
        };
        let by_inputs = || {
            let mut by_inputs = vec![0.0; batch * length * 3 * hidden];
            by_rows(&mut by_inputs, 3 * hidden, &InOrder { op: self, records: &undone, of });
            tensor(by_inputs, &[batch, length, 3 * hidden])
        };
        let mut all = vec![
            wanted(0).then(by_inputs),
            wanted(1).then(|| tensor(d_state, &[batch, hidden])),
            wanted(2).then(by_weight),
            wanted(3).then(by_bias),
        ];
        if let Some(d_seen) = d_seen {
            all.extend(d_seen.finish(states, of.lists(&undone, 0..3)));
            all.iter_mut()
                .zip(back.needs_grad)
                .filter(|(_, needs_grad)| !**needs_grad)
                .for_each(|(x, _)| *x = None);
        }
        all
    }
}

/// One step: writes records.
struct Cell<'a> {
    op: &'a Gru,
    of: Sizes,
    at: usize,
    /// What the input has made, the distance of its rows, and where the first begins.
    x: (&'a [f32], [usize; 2]),
    of_state: &'a [f32],
    bias: &'a [f32],
    /// The records before.
    before: &'a [f32],
}

impl RowWork for Cell<'_> {
    #[inline(always)]
    fn row(&self, i: usize, record: &mut [f32]) {
        let (h, (x, [stride, first])) = (self.of.hidden, self.x);
        let state = &self.before[i * record.len() + 4 * h..][..h];
        if self.op.outside(i, self.at) {
            record[4 * h..].copy_from_slice(state);
            return;
        }
        let (x, y) = (&x[i * stride + first..][..3 * h], &self.of_state[i * 3 * h..][..3 * h]);
        let (gates, rest) = record.split_at_mut(2 * h);
        let ((of_gates, x), (by_state, y)) = (x.split_at(2 * h), y.split_at(2 * h));
        let (biases, bias) = self.bias.split_at(2 * h);
        for (k, gate) in gates.iter_mut().enumerate() {
            *gate = sigmoid(of_gates[k] + by_state[k] + biases[k]);
        }
        let (n, rest) = rest.split_at_mut(h);
        let (u, after) = rest.split_at_mut(h);
        let (r, z) = gates.split_at(h);
        let (x, y, bias) = (&x[..h], &y[..h], &bias[..h]);
        for k in 0..h {
            u[k] = y[k] + bias[k];
            n[k] = tanh(r[k].mul_add(u[k], x[k]));
            after[k] = z[k].mul_add(state[k] - n[k], n[k]);
        }
    }
}

/// The way back of one step.
struct Undo<'a> {
    op: &'a Gru,
    of: Sizes,
    at: usize,
    before: &'a [f32],
    after: &'a [f32],
    /// The gradient of the output.
    output_grad: &'a [f32],
    /// And what later steps say of the state after this one.
    d_state: &'a [f32],
}

impl RowWork for Undo<'_> {
    #[inline(always)]
    fn row(&self, i: usize, to: &mut [f32]) {
        let Sizes { length, hidden: h, .. } = self.of;
        let width = h + self.op.seen.as_ref().map_or(0, |memory| memory.sizes.features);
        let up = &self.output_grad[(i * length + self.at) * width..][..h];
        let later = &self.d_state[i * h..][..h];
        let state = &self.before[i * to.len() + 4 * h..][..h];
        let record = &self.after[i * to.len()..][..4 * h];
        let (d_n, to) = to.split_at_mut(h);
        let (d_r, to) = to.split_at_mut(h);
        let (d_z, to) = to.split_at_mut(h);
        let (d_u, direct) = to.split_at_mut(h);
        if self.op.outside(i, self.at) {
            for k in 0..h {
                direct[k] = up[k] + later[k];
            }
            return;
        }
        let [r, z, n, u] = [0, 1, 2, 3].map(|list| &record[list * h..][..h]);
        for k in 0..h {
            let d = up[k] + later[k];
            // after = n + z (state - n), n = tanh(x + r u)
            let d_sum = d * (1.0 - z[k]) * (1.0 - n[k] * n[k]);
            d_n[k] = d_sum;
            d_u[k] = d_sum * r[k];
            d_r[k] = d_sum * u[k] * r[k] * (1.0 - r[k]);
            d_z[k] = d * (state[k] - n[k]) * z[k] * (1.0 - z[k]);
            direct[k] = d * z[k];
        }
    }
}

/// Adds what states get directly.
struct Direct<'a> {
    records: &'a [f32],
    of: Sizes,
}

impl RowWork for Direct<'_> {
    #[inline(always)]
    fn row(&self, i: usize, row: &mut [f32]) {
        let direct = &self.records[i * self.of.record() + 4 * self.of.hidden..][..row.len()];
        for (x, direct) in row.iter_mut().zip(direct) {
            *x += direct;
        }
    }
}

/// Adds rows.
struct BiasAdd<'a>(&'a [f32]);

impl RowWork for BiasAdd<'_> {
    #[inline(always)]
    fn row(&self, i: usize, row: &mut [f32]) {
        let others = &self.0[i * row.len()..][..row.len()];
        for (x, other) in row.iter_mut().zip(others) {
            *x += other;
        }
    }
}

/// The gradients by what the input has made, in the order of positions and of gates.
struct InOrder<'a> {
    op: &'a Gru,
    records: &'a [f32],
    of: Sizes,
}

impl RowWork for InOrder<'_> {
    #[inline(always)]
    fn row(&self, i: usize, row: &mut [f32]) {
        let Sizes { batch, length, hidden: h } = self.of;
        let step = self.op.position(i % length, length);
        let record = &self.records[(step * batch + i / length) * self.of.record()..][..3 * h];
        row[..2 * h].copy_from_slice(&record[h..]);
        row[2 * h..].copy_from_slice(&record[..h]);
    }
}

/// The sums of the gradients by what the state has made.
struct StateSums<'a> {
    records: &'a [f32],
    of: Sizes,
}

impl RowSums for StateSums<'_> {
    #[inline(always)]
    fn add(&self, rows: Range<usize>, sums: &mut [f32]) {
        for i in rows {
            let row = &self.records[i * self.of.record() + self.of.hidden..][..sums.len()];
            for (sum, x) in sums.iter_mut().zip(row) {
                *sum += x;
            }
        }
    }
}
