//! AdamW over plain numbers (Loshchilov and Hutter 2019), with clipping by the global norm, accumulation and a running average.
//!
//! The optimizer owns the weights: a flat list for each parameter under the path of its fields, with its moments beside it. So what
//! a checkpoint has to hold is exactly what is here, one pass over memory makes a step, and a step is the same bits for every number
//! of threads.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Gradients, Tensor, TensorData};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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

/// One parameter and what is known of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Slot {
    pub(crate) shape: Vec<usize>,
    pub(crate) value: Vec<f32>,
    pub(crate) mean: Vec<f32>,
    pub(crate) square: Vec<f32>,
    /// Empty where none is kept.
    pub(crate) average: Vec<f32>,
    pub(crate) gradient: Vec<f32>,
}

/// The weights of a model and the way that they move.
#[derive(Clone, Debug, PartialEq)]
pub struct AdamW {
    pub(crate) settings: AdamWSettings,
    pub(crate) steps: u64,
    pub(crate) slots: BTreeMap<String, Slot>,
    /// What gradients were added up with.
    weight: f64,
}

/// Numbers of a parameter that one thread moves at a time, and sums at a time: sums do not depend on threads.
const CHUNK: usize = 1 << 14;

impl AdamW {
    /// Of a model as it is.
    #[must_use]
    pub fn new<M: Module>(model: &M, settings: AdamWSettings) -> Self {
        let slot = |(shape, value): (Vec<usize>, Vec<f32>)| {
            let zeros = vec![0.0; value.len()];
            let average = if settings.ema_decay > 0.0 { value.clone() } else { vec![] };
            Slot {
                shape,
                mean: zeros.clone(),
                square: zeros.clone(),
                gradient: zeros,
                average,
                value,
            }
        };
        let slots = regard_models::parameters(model);
        let slots = slots.into_iter().map(|(path, found)| (path, slot(found))).collect();
        Self { settings, steps: 0, slots, weight: 0.0 }
    }

    /// As a checkpoint has it. Gradients begin at nothing.
    pub(crate) fn restored(
        settings: AdamWSettings,
        steps: u64,
        mut slots: BTreeMap<String, Slot>,
    ) -> Self {
        for slot in slots.values_mut() {
            slot.gradient = vec![0.0; slot.value.len()];
        }
        Self { settings, steps, slots, weight: 0.0 }
    }

    /// Steps that were made.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// How many numbers there are to learn.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.slots.values().map(|slot| slot.value.len()).sum()
    }

    /// Adds gradients of a part of the batch, which counts as much as its weight says.
    pub fn add<M: Module>(&mut self, model: &M, gradients: &Gradients, weight: f64) {
        let mut adder = Adder { path: Vec::new(), optimizer: self, gradients, weight };
        model.visit(&mut adder);
        self.weight += weight;
    }

    /// Moves all weights by what was added, and returns how long the gradient was before it was cut. A gradient that is no number
    /// moves nothing.
    pub fn step(&mut self, lr: f64) -> f64 {
        let share = if self.weight > 0.0 { 1.0 / self.weight } else { 0.0 };
        self.weight = 0.0;
        let norm =
            share * self.slots.values().map(|slot| squares(&slot.gradient)).sum::<f64>().sqrt();
        if !norm.is_finite() {
            return norm;
        }
        self.steps += 1;
        let AdamWSettings { beta1, beta2, epsilon, weight_decay, max_grad_norm, ema_decay } =
            self.settings;
        let clip =
            if max_grad_norm > 0.0 && norm > max_grad_norm { max_grad_norm / norm } else { 1.0 };
        let steps = i32::try_from(self.steps).unwrap_or(i32::MAX);
        // Early on the average would be mostly the first, random weights.
        let ema_decay = ema_decay.min((1.0 + self.steps as f64) / (10.0 + self.steps as f64));
        for slot in self.slots.values_mut() {
            let decay = if slot.shape.len() > 1 { weight_decay } else { 0.0 };
            let by = Move {
                gradient: narrow(share * clip),
                beta1: narrow(beta1),
                rest1: narrow(1.0 - beta1),
                beta2: narrow(beta2),
                rest2: narrow(1.0 - beta2),
                lr: narrow(lr / (1.0 - beta1.powi(steps))),
                unbias: narrow(1.0 / (1.0 - beta2.powi(steps))),
                epsilon: narrow(epsilon),
                keep: narrow(1.0 - lr * decay),
                ema_decay: narrow(ema_decay),
            };
            slot.apply(by);
        }
        norm
    }

    /// The model with these weights, or with their average.
    #[must_use]
    pub fn put<M: Module>(&self, model: M, average: bool) -> M {
        model.map(&mut Putter { path: Vec::new(), optimizer: self, average })
    }

    /// Every weight under its path, or its average where there is one: what a run leaves behind.
    pub fn weights(&self) -> impl Iterator<Item = (&str, &[usize], &[f32])> {
        self.slots.iter().map(|(path, slot)| (path.as_str(), slot.shape.as_slice(), slot.best()))
    }
}

/// The sum of squares, in an order that threads do not change.
fn squares(x: &[f32]) -> f64 {
    let parts: Vec<f64> = x
        .par_chunks(CHUNK)
        .map(|part| {
            let mut lanes = [0.0f64; 8];
            for group in part.chunks(8) {
                for (lane, x) in lanes.iter_mut().zip(group) {
                    *lane += f64::from(*x) * f64::from(*x);
                }
            }
            lanes.iter().sum()
        })
        .collect();
    parts.iter().sum()
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

impl Slot {
    /// The average where there is one.
    fn best(&self) -> &[f32] {
        if self.average.is_empty() { &self.value } else { &self.average }
    }

    fn apply(&mut self, by: Move) {
        let all = self.value.par_chunks_mut(CHUNK).zip(self.mean.par_chunks_mut(CHUNK));
        let all =
            all.zip(self.square.par_chunks_mut(CHUNK)).zip(self.gradient.par_chunks_mut(CHUNK));
        all.for_each(|(((value, mean), square), gradient)| {
            let rows = value.iter_mut().zip(mean).zip(square.iter_mut().zip(gradient));
            for ((value, mean), (square, gradient)) in rows {
                // ANCHOR: adamw
                let g = *gradient * by.gradient;
                *gradient = 0.0;
                *mean = by.beta1 * *mean + by.rest1 * g;
                *square = by.beta2 * *square + by.rest2 * g * g;
                let root = (*square * by.unbias).sqrt() + by.epsilon;
                *value = *value * by.keep - by.lr * *mean / root;
                // ANCHOR_END: adamw
            }
        });
        let (value, share) = (&self.value, 1.0 - by.ema_decay);
        let average = self.average.par_chunks_mut(CHUNK).zip(value.par_chunks(CHUNK));
        average.for_each(|(average, value)| {
            for (average, value) in average.iter_mut().zip(value) {
                *average += share * (value - *average);
            }
        });
    }
}

struct Adder<'a> {
    path: Vec<String>,
    optimizer: &'a mut AdamW,
    gradients: &'a Gradients,
    weight: f64,
}

impl ModuleVisitor for Adder<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let found = param.val().grad(self.gradients);
        let slot = self.optimizer.slots.get_mut(&self.path.join("."));
        let (Some(found), Some(slot)) = (found, slot) else { return };
        let found = numbers(found);
        let weight = narrow(self.weight);
        let all = slot.gradient.par_chunks_mut(CHUNK).zip(found.par_chunks(CHUNK));
        all.for_each(|(sum, found)| {
            for (sum, found) in sum.iter_mut().zip(found) {
                *sum += weight * found;
            }
        });
    }
}

struct Putter<'a> {
    path: Vec<String>,
    optimizer: &'a AdamW,
    average: bool,
}

impl ModuleMapper for Putter<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(slot) = self.optimizer.slots.get(&self.path.join(".")) else { return param };
        let numbers = if self.average { slot.best() } else { &slot.value };
        let data = TensorData::new(numbers.to_vec(), slot.shape.clone());
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
        let mut slots = BTreeMap::new();
        for (name, shape) in SHAPES {
            let value = golden.take(&format!("start.{name}"), shape).unwrap();
            let (zeros, average) = (vec![0.0; value.len()], value.clone());
            let (mean, square, gradient) = (zeros.clone(), zeros.clone(), zeros);
            let shape = shape.to_vec();
            slots.insert(name.into(), Slot { shape, value, mean, square, average, gradient });
        }
        let mut optimizer = AdamW::restored(settings, 0, slots);
        for (i, step) in (1..=steps).enumerate() {
            // Twice the gradient, with a weight of 2: no rounding, and the mean is taken.
            for (name, shape) in SHAPES {
                let gradient = golden.take(&format!("{step}.gradient.{name}"), shape).unwrap();
                let slot = optimizer.slots.get_mut(name).unwrap();
                slot.gradient = gradient.iter().map(|g| 2.0 * g).collect();
            }
            optimizer.weight = 2.0;
            let lr = schedule.lr(step);
            let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-12;
            assert!(near(lr, config["rates"][i].as_f64().unwrap()), "rate of step {step}");
            let norm = optimizer.step(lr);
            assert!(near(norm, config["norms"][i].as_f64().unwrap()), "norm of step {step}");
            for (name, shape) in SHAPES {
                let slot = &optimizer.slots[name];
                for (kind, found) in [
                    ("value", &slot.value),
                    ("mean", &slot.mean),
                    ("square", &slot.square),
                    ("average", &slot.average),
                ] {
                    let wanted = golden.take(&format!("{step}.{kind}.{name}"), shape).unwrap();
                    let far = ulps(found, &wanted);
                    println!("step {step}, {kind} of {name}: {far:.2} ulp");
                    assert!(far <= 4.0, "step {step}, {kind} of {name}: {far} ulp");
                }
            }
        }
    }
}
