//! What PyTorch says of a module: parameters, inputs, outputs and gradients, made by `goldens/make.py`.

use burn::module::Module;
use burn::tensor::{Device, Gradients, Int, Tensor, TensorData};
use regard_models::files::Weights;
use regard_models::load;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The error that is allowed, over the largest number of a tensor.
const CLOSE: f32 = 1e-5;

/// One file of `goldens/`.
#[derive(Debug)]
pub(crate) struct Golden {
    name: String,
    variant: String,
    pub(crate) config: Value,
    floats: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    whole: BTreeMap<String, (Vec<usize>, Vec<i64>)>,
    /// The sum that gradients are of.
    loss: Option<Tensor<1>>,
}

impl Golden {
    pub(crate) fn open(name: &str) -> Self {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../goldens/{name}.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("a safetensors file");
        let config = header.metadata().as_ref().and_then(|m| m.get("config")).expect("a config");
        let (mut floats, mut whole) = (BTreeMap::new(), BTreeMap::new());
        for (name, view) in SafeTensors::deserialize(&bytes).expect("a safetensors file").tensors()
        {
            let (shape, data) = (view.shape().to_vec(), view.data());
            match view.dtype() {
                Dtype::F32 => {
                    let (numbers, _) = data.as_chunks::<4>();
                    floats.insert(
                        name,
                        (shape, numbers.iter().map(|b| f32::from_le_bytes(*b)).collect()),
                    );
                }
                Dtype::I64 => {
                    let (numbers, _) = data.as_chunks::<8>();
                    whole.insert(
                        name,
                        (shape, numbers.iter().map(|b| i64::from_le_bytes(*b)).collect()),
                    );
                }
                other => panic!("{name}: {other:?}"),
            }
        }
        let config = serde_json::from_str(config).expect("JSON");
        Self { name: name.into(), variant: String::new(), config, floats, whole, loss: None }
    }

    /// The same with the outputs and gradients of one of its variants.
    pub(crate) fn variant(name: &str, variant: &str) -> Self {
        Self { variant: format!("{variant}."), ..Self::open(name) }
    }

    /// A number of the config.
    pub(crate) fn size(&self, field: &str) -> usize {
        let found =
            self.config[field].as_u64().unwrap_or_else(|| panic!("{}: no {field}", self.name));
        usize::try_from(found).expect("a size")
    }

    /// The module with the golden's parameters.
    pub(crate) fn load<M: Module>(&self, module: M) -> M {
        let parameters = self.floats.iter().filter_map(|(name, (shape, numbers))| {
            Some((name.strip_prefix("parameters.")?.to_string(), shape.clone(), numbers.clone()))
        });
        let mut weights = Weights::new(parameters).expect("shapes fit");
        load(module, &mut weights).unwrap_or_else(|why| panic!("{}: {why}", self.name))
    }

    /// An input that gets a gradient.
    pub(crate) fn input<const D: usize>(&self, name: &str) -> Tensor<D> {
        let (shape, numbers) = self.floats[&format!("inputs.{name}")].clone();
        Tensor::from_data(TensorData::new(numbers, shape), &device()).require_grad()
    }

    /// An input of whole numbers.
    pub(crate) fn ids<const D: usize>(&self, name: &str) -> Tensor<D, Int> {
        let (shape, numbers) = self.whole[&format!("inputs.{name}")].clone();
        Tensor::from_data(TensorData::new(numbers, shape), &Device::flex())
    }

    /// An input of whole numbers as a list.
    pub(crate) fn list(&self, name: &str) -> Vec<usize> {
        let (_, numbers) = &self.whole[&format!("inputs.{name}")];
        numbers.iter().map(|n| usize::try_from(*n).expect("a count")).collect()
    }

    /// An input of whole numbers row by row, each as long as its length says.
    pub(crate) fn rows(&self, name: &str, lengths: Option<&[usize]>) -> Vec<Vec<u32>> {
        let (shape, numbers) = &self.whole[&format!("inputs.{name}")];
        let width = *shape.last().expect("an axis");
        let row = |(i, row): (usize, &[i64])| {
            let n = lengths.map_or(width, |lengths| lengths[i]);
            row[..n].iter().map(|id| u32::try_from(*id).expect("an id")).collect()
        };
        numbers.chunks(width).enumerate().map(row).collect()
    }

    /// Holds an output against the golden's, and takes it into the loss.
    pub(crate) fn output<const D: usize>(&mut self, name: &str, found: &Tensor<D>) {
        let (shape, right) = &self.floats[&format!("{}outputs.{name}", self.variant)];
        if !shape.is_empty() {
            assert_eq!(found.dims().to_vec(), *shape, "{}: {name}", self.name);
        }
        self.close(name, &values(found), right, 0.0);
        if let Some((shape, upstream)) =
            self.floats.get(&format!("{}upstream.{name}", self.variant))
        {
            let shape = if shape.is_empty() { vec![1] } else { shape.clone() };
            let upstream: Tensor<D> =
                Tensor::from_data(TensorData::new(upstream.clone(), shape), &device());
            let part = (found.clone() * upstream).sum();
            self.loss = Some(match self.loss.take() {
                Some(loss) => loss + part,
                None => part,
            });
        }
    }

    /// Holds the gradients of all parameters against the golden's: each must have one.
    pub(crate) fn gradients<M: Module>(&mut self, module: &M) -> Gradients {
        let loss = self.loss.take().expect("an output with an upstream gradient");
        let grads = loss.backward();
        let prefix = format!("{}gradients.parameters.", self.variant);
        let right: BTreeMap<&str, &[f32]> = self
            .floats
            .iter()
            .filter_map(|(name, (_, numbers))| {
                Some((name.strip_prefix(&prefix)?, numbers.as_slice()))
            })
            .collect();
        let top = right.values().flat_map(|g| g.iter()).fold(0.0f32, |a, b| a.max(b.abs()));
        let all = regard_models::gradients(module, &grads);
        let names: BTreeSet<&str> = right.keys().copied().collect();
        let ours: BTreeSet<&str> =
            all.iter().filter_map(|(name, grad)| grad.as_ref().map(|_| name.as_str())).collect();
        assert_eq!(ours, names, "{}: which parameters have gradients", self.name);
        if self.variant.is_empty() {
            let lost: Vec<_> =
                all.iter().filter(|(_, grad)| grad.is_none()).map(|(name, _)| name).collect();
            assert!(lost.is_empty(), "{}: parameters without a gradient: {lost:?}", self.name);
        }
        for (name, right) in right {
            let found = all[name].as_ref().expect("compared above");
            self.close(&format!("gradient of {name}"), found, right, 0.01 * top);
        }
        grads
    }

    /// Holds the gradient of an input against the golden's.
    pub(crate) fn gradient<const D: usize>(
        &self,
        name: &str,
        input: &Tensor<D>,
        grads: &Gradients,
    ) {
        let (_, right) = &self.floats[&format!("{}gradients.inputs.{name}", self.variant)];
        let found =
            input.grad(grads).unwrap_or_else(|| panic!("{}: {name} has no gradient", self.name));
        self.close(&format!("gradient of {name}"), &values(&found), right, 0.0);
    }

    fn close(&self, what: &str, found: &[f32], right: &[f32], least: f32) {
        assert_eq!(found.len(), right.len(), "{}{}: {what}", self.variant, self.name);
        let top = right.iter().fold(least.max(1e-6), |a, b| a.max(b.abs()));
        let off = found.iter().zip(right).fold(0.0f32, |a, (x, y)| a.max((x - y).abs())) / top;
        assert!(off <= CLOSE, "{}{}: {what} is {off} apart", self.variant, self.name);
    }
}

/// Where tensors take part in autodiff.
pub(crate) fn device() -> Device {
    Device::flex().autodiff()
}

pub(crate) fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.clone().into_data().iter::<f32>().collect()
}
