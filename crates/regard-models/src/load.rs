//! Weights into modules and out of them, each parameter under the path of its fields.

use crate::error::Error;
use crate::files::{Config, WeightFormat, Weights, save_as};
use crate::infer::Transformer;
use crate::stack::numbers;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Gradients, Tensor, TensorData};
use std::collections::BTreeMap;
use std::path::Path;

/// The module with all of its parameters taken from the weights: `blocks.0.attention.q.weight` and so on. A parameter that is
/// missing, has another shape, is not finite, or is left over, is an error.
pub fn load<M: Module>(module: M, weights: &mut Weights) -> Result<M, Error> {
    let mut loader = Loader { path: Vec::new(), weights, error: None };
    let module = module.map(&mut loader);
    if let Some(error) = loader.error {
        return Err(weights.named(error));
    }
    weights.all_taken().map_err(|error| weights.named(error))?;
    Ok(module)
}

struct Loader<'a> {
    path: Vec<String>,
    weights: &'a mut Weights,
    error: Option<Error>,
}

impl ModuleMapper for Loader<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        let shape = param.lazy_shape().to_vec();
        let name = self.path.join(".");
        match self.weights.finite(&name, &shape) {
            Ok(found) => {
                let device = param.lazy_device();
                // Asking the parameter itself would first draw its random numbers, from a
                // generator that the whole process shares.
                let tracked = device.is_autodiff();
                let tensor = Tensor::from_data(TensorData::new(found, shape), &device);
                Param::initialized(param.id, tensor.set_require_grad(tracked))
            }
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}

/// Every parameter with its path, in their order.
#[must_use]
pub fn parameters<M: Module>(module: &M) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let mut gatherer = Gatherer { path: Vec::new(), found: BTreeMap::new() };
    module.visit(&mut gatherer);
    gatherer.found
}

/// The gradient of every parameter, under its path; none where it has none.
#[must_use]
pub fn gradients<M: Module>(
    module: &M,
    gradients: &Gradients,
) -> BTreeMap<String, Option<Vec<f32>>> {
    let mut gatherer = GradientGatherer { path: Vec::new(), gradients, found: BTreeMap::new() };
    module.visit(&mut gatherer);
    gatherer.found
}

struct GradientGatherer<'a> {
    path: Vec<String>,
    gradients: &'a Gradients,
    found: BTreeMap<String, Option<Vec<f32>>>,
}

impl ModuleVisitor for GradientGatherer<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = param.val().grad(self.gradients).map(numbers);
        self.found.insert(self.path.join("."), gradient);
    }
}

struct Gatherer {
    path: Vec<String>,
    found: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

impl ModuleVisitor for Gatherer {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let tensor = param.val();
        self.found.insert(self.path.join("."), (tensor.dims().to_vec(), numbers(tensor)));
    }
}

/// A copy of a module for inference.
pub(crate) fn inference<M: Module>(module: &M, config: &Config) -> Result<Transformer, Error> {
    let all = parameters(module).into_iter().map(|(name, (shape, numbers))| (name, shape, numbers));
    Transformer::of_config(config, Weights::new(all)?)
}

/// Writes all parameters as safetensors, whole or not at all.
pub fn save<M: Module>(
    module: &M,
    path: &Path,
    metadata: &BTreeMap<String, String>,
    stored: WeightFormat,
) -> Result<(), Error> {
    let all = parameters(module);
    let tensors = all
        .iter()
        .map(|(name, (shape, numbers))| (name.clone(), shape.clone(), numbers.as_slice()));
    save_as(stored, path, tensors, metadata)
}
