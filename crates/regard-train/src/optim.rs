//! AdamW over plain numbers (Loshchilov and Hutter 2019), with clipping by the global norm, accumulation and a running average.
//!
//! The optimizer owns the weights: a flat list of all parameters in the order of their paths, with their moments beside it. So what a
//! checkpoint has to hold is exactly what is here, one pass over memory makes a step, and a step is the same bits for every number of
//! threads and of ranks: gradients of parts are added as a [`Tree`], each rank moves the chunks that it owns, and what is gathered is
//! added in the order of chunks.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Gradients, Tensor, TensorData};
use rayon::prelude::*;
use regard_ranks::{Node, Ranks, RanksError, Tree, gather, nodes, share, shares};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

/// How [`AdamW`] moves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamWSettings {
    /// Decay rate of the first moment, the running mean of gradients.
    pub beta1: f64,
    /// Decay rate of the second moment, the running mean of squared gradients.
    pub beta2: f64,
    /// Epsilon, added to sqrt(v).
    pub epsilon: f64,
    /// Decoupled weight decay: each step multiplies matrices by `1 - lr * weight_decay`; vectors do not decay.
    pub weight_decay: f64,
    /// Gradient clipping: maximum global norm of the gradients; 0 disables clipping.
    pub max_grad_norm: f64,
    /// Decay rate of the exponential moving average of the weights, which validation and the saved model use; 0 disables it.
    pub ema_decay: f64,
}

impl Default for AdamWSettings {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.98,
            epsilon: 1e-9,
            weight_decay: 0.01,
            max_grad_norm: 1.0,
            ema_decay: 0.0,
        }
    }
}

/// A parameter: its shape, and where its numbers lie in the flat lists.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Slot {
    pub(crate) shape: Vec<usize>,
    pub(crate) range: Range<usize>,
}

/// The weights of a model and the way that they move.
///
/// Among several ranks ([`AdamW::deal`]) each has all weights, and the moments of the run of chunks that it owns (ZeRO stage 1).
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    pub(crate) settings: AdamWSettings,
    pub(crate) steps: u64,
    /// By path; their numbers lie one after another in that order.
    pub(crate) slots: BTreeMap<String, Slot>,
    pub(crate) value: Vec<f32>,
    /// Of what this rank owns, as the average below.
    pub(crate) mean: Vec<f32>,
    pub(crate) square: Vec<f32>,
    /// Empty where none is kept.
    pub(crate) average: Vec<f32>,
    chunks: Vec<Chunk>,
    deal: Deal,
    gradients: Tree,
    /// What was added since the last step, and what it counts.
    added: usize,
    weight: f64,
}

/// Numbers of a parameter that one thread moves at a time, and sums at a time: sums do not depend on threads.
const CHUNK: usize = 1 << 14;

/// A run of at most [`CHUNK`] numbers of one parameter.
#[derive(Clone, Debug, PartialEq)]
struct Chunk {
    range: Range<usize>,
    slot: usize,
    decays: bool,
}

/// Which rank of how many this is, and how many parts a step of all of them has.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Deal {
    rank: usize,
    count: usize,
    parts: usize,
}

impl Deal {
    /// The parts of a step that a rank computes.
    fn parts(self, rank: usize) -> Range<usize> {
        share(self.parts, rank, self.count)
    }
}

/// Every weight at a moment, or its average.
#[derive(Clone, Debug)]
pub struct Snapshot<'a> {
    slots: &'a BTreeMap<String, Slot>,
    numbers: Cow<'a, [f32]>,
}

impl AdamW {
    /// Of a model as it is.
    #[must_use]
    pub fn new<M: Module>(model: &M, settings: AdamWSettings) -> Self {
        let (mut slots, mut value) = (BTreeMap::new(), Vec::new());
        for (path, (shape, numbers)) in regard_models::parameters(model) {
            let start = value.len();
            value.extend(numbers);
            slots.insert(path, Slot { shape, range: start..value.len() });
        }
        let zeros = vec![0.0; value.len()];
        let average = if settings.ema_decay > 0.0 { value.clone() } else { vec![] };
        Self::restored(settings, 0, slots, [value, zeros.clone(), zeros, average])
    }

    /// As a checkpoint has it: values, their moments, and their average. Gradients begin at nothing.
    pub(crate) fn restored(
        settings: AdamWSettings,
        steps: u64,
        slots: BTreeMap<String, Slot>,
        [value, mean, square, average]: [Vec<f32>; 4],
    ) -> Self {
        let chunks = slots.values().enumerate().flat_map(|(slot, Slot { shape, range })| {
            let (end, decays) = (range.end, shape.len() > 1);
            let starts = range.clone().step_by(CHUNK);
            starts.map(move |start| Chunk { range: start..end.min(start + CHUNK), slot, decays })
        });
        Self {
            settings,
            steps,
            chunks: chunks.collect(),
            slots,
            value,
            mean,
            square,
            average,
            deal: Deal { rank: 0, count: 1, parts: 1 },
            gradients: Tree::default(),
            added: 0,
            weight: 0.0,
        }
    }

    /// Gives up what other ranks own. A step has so many parts, of which this rank adds [`AdamW::parts`].
    pub fn deal(&mut self, ranks: &dyn Ranks, parts: usize) {
        self.deal = Deal { rank: ranks.rank(), count: ranks.count(), parts };
        let owned = self.owned(ranks.rank());
        for list in [&mut self.mean, &mut self.square, &mut self.average] {
            if !list.is_empty() {
                *list = list[owned.clone()].to_vec();
            }
        }
    }

    /// The parts of a step that this rank adds.
    #[must_use]
    pub fn parts(&self) -> Range<usize> {
        self.deal.parts(self.deal.rank)
    }

    /// Steps that were made.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// How many numbers there are to learn.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.value.len()
    }

    /// The numbers that a rank moves.
    fn owned(&self, rank: usize) -> Range<usize> {
        let own = &self.chunks[share(self.chunks.len(), rank, self.deal.count)];
        match own {
            [first, .., last] => first.range.start..last.range.end,
            [only] => only.range.clone(),
            [] => 0..0,
        }
    }

    /// How many numbers each rank moves.
    fn counts(&self) -> Vec<usize> {
        (0..self.deal.count).map(|rank| self.owned(rank).len()).collect()
    }

    /// Adds gradients of the next part of the batch, which counts as much as its weight says.
    pub fn add<M: Module>(&mut self, model: &M, gradients: &Gradients, weight: f64) {
        let mut taker = Taker {
            path: Vec::new(),
            slots: &self.slots,
            gradients,
            weight: narrow(weight),
            found: vec![0.0; self.value.len()],
        };
        model.visit(&mut taker);
        let start = self.parts().start + self.added;
        self.gradients.push(Node { start, size: 1 }, taker.found);
        self.added += 1;
        self.weight += weight;
    }

    /// Moves all weights by what all ranks have added, and returns how long the gradient was before it was cut. A gradient that is no
    /// number moves nothing.
    pub fn step(&mut self, lr: f64, ranks: &dyn Ranks) -> Result<f64, RanksError> {
        // Weights count answers: sums of whole numbers, exact in any order.
        let weights = gather(ranks, &[std::mem::take(&mut self.weight)], &vec![1; ranks.count()])?;
        let weight: f64 = weights.iter().sum();
        let scale = if weight > 0.0 { 1.0 / weight } else { 0.0 };
        let gradient = self.gradient(ranks)?;
        let norm = scale * self.squares(&gradient, ranks)?.sqrt();
        if !norm.is_finite() {
            return Ok(norm);
        }
        self.steps += 1;
        let AdamWSettings { max_grad_norm, .. } = self.settings;
        let clip =
            if max_grad_norm > 0.0 && norm > max_grad_norm { max_grad_norm / norm } else { 1.0 };
        self.apply(&gradient, lr, scale * clip);
        if ranks.count() > 1 {
            let mine = &self.value[self.owned(ranks.rank())];
            self.value = gather(ranks, mine, &self.counts())?;
        }
        Ok(norm)
    }

    /// The sum of the gradients of all parts, of the numbers that this rank owns.
    fn gradient(&mut self, ranks: &dyn Ranks) -> Result<Vec<f32>, RanksError> {
        self.added = 0;
        let sums = std::mem::take(&mut self.gradients);
        if ranks.count() == 1 {
            return Ok(sums.sum().unwrap_or_else(|| vec![0.0; self.value.len()]));
        }
        let (mut send, mut to) = (Vec::new(), Vec::new());
        for rank in 0..ranks.count() {
            let owned = self.owned(rank);
            to.push(size_of::<f32>() * owned.len() * sums.parts().len());
            for (_, part) in sums.parts() {
                send.extend_from_slice(&part[owned.clone()]);
            }
        }
        let length = self.owned(ranks.rank()).len();
        let theirs: Vec<Vec<Node>> =
            (0..ranks.count()).map(|rank| nodes(self.deal.parts(rank))).collect();
        let from: Vec<usize> =
            theirs.iter().map(|nodes| size_of::<f32>() * length * nodes.len()).collect();
        let theirs = theirs.concat();
        let mut receive = vec![0.0f32; length * theirs.len()];
        let (send, into) = (bytemuck::cast_slice(&send), bytemuck::cast_slice_mut(&mut receive));
        ranks.exchange(send, &to, into, &from)?;
        let mut all = Tree::default();
        for (i, node) in theirs.into_iter().enumerate() {
            all.push(node, receive[i * length..][..length].to_vec());
        }
        Ok(all.sum().unwrap_or_default())
    }

    /// The sum of squares of the gradients of all ranks: of chunks, then of parameters, then of all.
    fn squares(&self, gradient: &[f32], ranks: &dyn Ranks) -> Result<f64, RanksError> {
        let (rank, count) = (ranks.rank(), ranks.count());
        let start = self.owned(rank).start;
        let own = &self.chunks[share(self.chunks.len(), rank, count)];
        let sums: Vec<f64> = own
            .par_iter()
            .map(|Chunk { range, .. }| squares(&gradient[range.start - start..range.end - start]))
            .collect();
        let sums = gather(ranks, &sums, &shares(self.chunks.len(), count))?;
        let mut slots = vec![0.0; self.slots.len()];
        for (Chunk { slot, .. }, sum) in self.chunks.iter().zip(sums) {
            slots[*slot] += sum;
        }
        Ok(slots.iter().sum())
    }

    /// Moves what this rank owns.
    fn apply(&mut self, gradient: &[f32], lr: f64, scale: f64) {
        let AdamWSettings { beta1, beta2, epsilon, weight_decay, ema_decay, .. } = self.settings;
        let steps = i32::try_from(self.steps).unwrap_or(i32::MAX);
        // Early on the average would be mostly the first, random weights.
        let ema_decay = ema_decay.min((1.0 + self.steps as f64) / (10.0 + self.steps as f64));
        let of = |weight_decay: f64| Move {
            gradient: narrow(scale),
            beta1: narrow(beta1),
            rest1: narrow(1.0 - beta1),
            beta2: narrow(beta2),
            rest2: narrow(1.0 - beta2),
            lr: narrow(lr / (1.0 - beta1.powi(steps))),
            unbias: narrow(1.0 / (1.0 - beta2.powi(steps))),
            epsilon: narrow(epsilon),
            keep: narrow(1.0 - lr * weight_decay),
            ema_decay: narrow(ema_decay),
        };
        let (matrices, vectors) = (of(weight_decay), of(0.0));
        let Deal { rank, count, .. } = self.deal;
        let owned = self.owned(rank);
        let mut lists = (
            &mut self.value[owned],
            self.mean.as_mut_slice(),
            self.square.as_mut_slice(),
            self.average.as_mut_slice(),
            gradient,
        );
        let mut work = Vec::new();
        for Chunk { range, decays, .. } in &self.chunks[share(self.chunks.len(), rank, count)] {
            let (value, mean, square, average, gradient) = lists;
            let length = range.len();
            let (value, values) = value.split_at_mut(length);
            let (mean, means) = mean.split_at_mut(length);
            let (square, squares) = square.split_at_mut(length);
            let (average, averages) = average.split_at_mut(length.min(average.len()));
            let (gradient, gradients) = gradient.split_at(length);
            work.push((Piece { value, mean, square, average, gradient }, *decays));
            lists = (values, means, squares, averages, gradients);
        }
        work.into_par_iter()
            .for_each(|(piece, decays)| piece.apply(if decays { matrices } else { vectors }));
    }

    /// The weights as they are.
    #[must_use]
    pub fn current(&self) -> Snapshot<'_> {
        Snapshot { slots: &self.slots, numbers: Cow::Borrowed(&self.value) }
    }

    /// Their average where there is one: what a run leaves behind.
    pub fn averaged(&self, ranks: &dyn Ranks) -> Result<Snapshot<'_>, RanksError> {
        Ok(match self.average.as_slice() {
            _ if self.settings.ema_decay <= 0.0 => self.current(),
            all if ranks.count() == 1 => {
                Snapshot { slots: &self.slots, numbers: Cow::Borrowed(all) }
            }
            own => {
                let numbers = Cow::Owned(gather(ranks, own, &self.counts())?);
                Snapshot { slots: &self.slots, numbers }
            }
        })
    }

    /// What all ranks have, on rank 0: what a checkpoint holds, which does not tell how many there were.
    pub fn collect(&self, ranks: &dyn Ranks) -> Result<Option<Cow<'_, Self>>, RanksError> {
        if ranks.count() == 1 {
            return Ok(Some(Cow::Borrowed(self)));
        }
        let first = ranks.rank() == 0;
        let counts = if first { self.counts() } else { vec![0; ranks.count()] };
        let from: Vec<usize> = counts.iter().map(|count| size_of::<f32>() * count).collect();
        let to_first = |list: &[f32]| {
            let mut to = vec![0; ranks.count()];
            to[0] = size_of_val(list);
            let mut all = vec![0.0f32; counts.iter().sum()];
            let (send, into) = (bytemuck::cast_slice(list), bytemuck::cast_slice_mut(&mut all));
            ranks.exchange(send, &to, into, &from)?;
            Ok(all)
        };
        let (mean, square) = (to_first(&self.mean)?, to_first(&self.square)?);
        let averages = self.settings.ema_decay > 0.0;
        let average = if averages { to_first(&self.average)? } else { vec![] };
        let lists = [self.value.clone(), mean, square, average];
        let whole = Self::restored(self.settings, self.steps, self.slots.clone(), lists);
        Ok(first.then_some(Cow::Owned(whole)))
    }
}

impl Snapshot<'_> {
    /// The model with these weights.
    #[must_use]
    pub fn put<M: Module>(&self, model: M) -> M {
        model.map(&mut Putter { path: Vec::new(), weights: self })
    }

    /// Every weight with its path and shape.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[usize], &[f32])> {
        let of = |(path, slot)| {
            let (path, Slot { shape, range }): (&String, &Slot) = (path, slot);
            (path.as_str(), shape.as_slice(), &self.numbers[range.clone()])
        };
        self.slots.iter().map(of)
    }
}

fn squares(x: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    for group in x.chunks(8) {
        for (lane, x) in lanes.iter_mut().zip(group) {
            *lane += f64::from(*x) * f64::from(*x);
        }
    }
    lanes.iter().sum()
}

#[expect(clippy::cast_possible_truncation, reason = "weights are f32")]
fn narrow(x: f64) -> f32 {
    x as f32
}

/// The numbers of one step.
#[derive(Clone, Copy)]
struct Move {
    gradient: f32,
    beta1: f32,
    /// `1 - beta1`, taken in f64: of 0.999 in f32 only four digits would be left.
    rest1: f32,
    beta2: f32,
    rest2: f32,
    lr: f32,
    unbias: f32,
    epsilon: f32,
    keep: f32,
    ema_decay: f32,
}

/// What one thread moves at a time.
struct Piece<'a> {
    value: &'a mut [f32],
    mean: &'a mut [f32],
    square: &'a mut [f32],
    /// Empty where none is kept.
    average: &'a mut [f32],
    gradient: &'a [f32],
}

impl Piece<'_> {
    fn apply(self, by: Move) {
        let rows =
            self.value.iter_mut().zip(self.mean).zip(self.square.iter_mut().zip(self.gradient));
        for ((value, mean), (square, gradient)) in rows {
            // ANCHOR: adamw
            let g = gradient * by.gradient;
            *mean = by.beta1 * *mean + by.rest1 * g;
            *square = by.beta2 * *square + by.rest2 * g * g;
            let root = (*square * by.unbias).sqrt() + by.epsilon;
            *value = *value * by.keep - by.lr * *mean / root;
            // ANCHOR_END: adamw
        }
        let rest = 1.0 - by.ema_decay;
        for (average, value) in self.average.iter_mut().zip(self.value) {
            *average += rest * (*value - *average);
        }
    }
}

/// Takes the gradients of a model, times a weight.
struct Taker<'a> {
    path: Vec<String>,
    slots: &'a BTreeMap<String, Slot>,
    gradients: &'a Gradients,
    weight: f32,
    found: Vec<f32>,
}

impl ModuleVisitor for Taker<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let found = param.val().grad(self.gradients);
        let slot = self.slots.get(&self.path.join("."));
        let (Some(found), Some(slot)) = (found, slot) else { return };
        let (found, weight) = (numbers(found), self.weight);
        let all = self.found[slot.range.clone()].par_chunks_mut(CHUNK).zip(found.par_chunks(CHUNK));
        all.for_each(|(into, found)| {
            for (into, found) in into.iter_mut().zip(found) {
                *into = weight * found;
            }
        });
    }
}

struct Putter<'a> {
    path: Vec<String>,
    weights: &'a Snapshot<'a>,
}

impl ModuleMapper for Putter<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(slot) = self.weights.slots.get(&self.path.join(".")) else { return param };
        let numbers = self.weights.numbers[slot.range.clone()].to_vec();
        let data = TensorData::new(numbers, slot.shape.clone());
        let tensor = Tensor::from_data(data, &param.lazy_device());
        Param::initialized(param.id, tensor.set_require_grad(param.is_require_grad()))
    }
}

/// The numbers of a tensor, one after another.
pub(crate) fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().try_into_vec().expect("models compute in f32")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Decay, Schedule};
    use regard_models::files::Weights;
    use regard_ranks::Alone;
    use serde_json::Value;

    const SHAPES: [(&str, &[usize]); 3] = [("bias", &[7]), ("table", &[5, 3]), ("weight", &[4, 6])];

    /// How far a list is from another, in units of the last place of the latter's largest number.
    fn ulps(found: &[f32], wanted: &[f32]) -> f32 {
        let largest = wanted.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let far = found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        far / (largest * f32::EPSILON)
    }

    #[test]
    fn ten_steps_are_those_of_pytorch() {
        let bytes = include_bytes!("../../../goldens/adamw.safetensors").to_vec();
        let mut golden = Weights::safetensors(bytes).unwrap();
        let config: Value = serde_json::from_str(&golden.metadata()["config"]).unwrap();
        let number = |key: &str| config[key].as_f64().unwrap();
        let settings = AdamWSettings {
            beta1: number("beta1"),
            beta2: number("beta2"),
            epsilon: number("epsilon"),
            weight_decay: number("weight_decay"),
            max_grad_norm: number("clip"),
            ema_decay: number("average"),
        };
        let (warmup, steps) =
            (config["warmup"].as_u64().unwrap(), config["steps"].as_u64().unwrap());
        let (lr, min_lr) = (number("rate"), number("lowest"));
        let schedule = Schedule { lr, min_lr, warmup, steps, decay: Decay::Cosine };
        let (mut slots, mut value) = (BTreeMap::new(), Vec::new());
        for (name, shape) in SHAPES {
            let start = value.len();
            value.extend(golden.take(&format!("start.{name}"), shape).unwrap());
            let slot = Slot { shape: shape.to_vec(), range: start..value.len() };
            slots.insert(name.to_owned(), slot);
        }
        let (zeros, average) = (vec![0.0; value.len()], value.clone());
        let lists = [value, zeros.clone(), zeros, average];
        let mut optimizer = AdamW::restored(settings, 0, slots.clone(), lists);
        for (i, step) in (1..=steps).enumerate() {
            // Twice the gradient, with a weight of 2: no rounding, and the mean is taken.
            let mut gradient = Vec::new();
            for (name, shape) in SHAPES {
                let some = golden.take(&format!("{step}.gradient.{name}"), shape).unwrap();
                gradient.extend(some.iter().map(|g| 2.0 * g));
            }
            optimizer.gradients.push(Node { start: 0, size: 1 }, gradient);
            optimizer.weight = 2.0;
            let lr = schedule.lr(step);
            let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-12;
            assert!(near(lr, config["rates"][i].as_f64().unwrap()), "rate of step {step}");
            let norm = optimizer.step(lr, &Alone).unwrap();
            assert!(near(norm, config["norms"][i].as_f64().unwrap()), "norm of step {step}");
            for (name, shape) in SHAPES {
                for (kind, found) in [
                    ("value", &optimizer.value),
                    ("mean", &optimizer.mean),
                    ("square", &optimizer.square),
                    ("average", &optimizer.average),
                ] {
                    let found = &found[slots[name].range.clone()];
                    let wanted = golden.take(&format!("{step}.{kind}.{name}"), shape).unwrap();
                    let far = ulps(found, &wanted);
                    println!("step {step}, {kind} of {name}: {far:.2} ulp");
                    assert!(far <= 4.0, "step {step}, {kind} of {name}: {far} ulp");
                }
            }
        }
    }
}
