//! What the experiments that learn share: chance as tensors, and descent along a gradient.

use crate::Error;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use regard_testkit::Noise;
use regard_train::{AdamW, AdamWSettings, Alone};

/// Normal numbers with this deviation, as a tensor. Chance is never Burn's own: that is one for the whole process.
pub(crate) fn normal<const D: usize>(
    noise: &mut Noise,
    sizes: [usize; D],
    deviation: f64,
) -> Tensor<D> {
    let numbers: Vec<f32> = noise.normals(sizes.iter().product());
    Tensor::from_data(TensorData::new(numbers, sizes), &Device::flex().autodiff()) * deviation
}

/// A matrix to be learned, `[inputs, outputs]`. It begins with variance `1 / inputs`, which leaves the size of what passes it as it is.
pub(crate) fn matrix(noise: &mut Noise, sizes: [usize; 2]) -> Param<Tensor<2>> {
    Param::from_tensor(normal(noise, sizes, (sizes[0] as f64).powf(-0.5)))
}

/// `x [batch, n, inputs]` through a matrix, as one product of all rows.
pub(crate) fn through(x: &Tensor<3>, w: Tensor<2>) -> Tensor<3> {
    let [batch, n, inputs] = x.dims();
    let outputs = w.dims()[1];
    x.clone().reshape([batch * n, inputs]).matmul(w).reshape([batch, n, outputs])
}

/// The numbers of a tensor.
pub(crate) fn numbers<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// How a model goes down.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Descent {
    pub(crate) steps: usize,
    /// Of the first step; the last one's is nearly 0, so that what is measured then is not the noise of large steps.
    pub(crate) rate: f64,
}

impl Descent {
    /// Makes the steps (AdamW without decay): the model after all of them, and its loss before each. `loss` is told which step it is for.
    pub(crate) fn run<M: Module + Clone>(
        self,
        mut model: M,
        mut loss: impl FnMut(&M, usize) -> Result<Tensor<1>, Error>,
    ) -> Result<(M, Vec<f64>), Error> {
        let settings = AdamWSettings { weight_decay: 0.0, ..AdamWSettings::default() };
        let mut optimizer = AdamW::new(&model, settings);
        let mut losses = Vec::with_capacity(self.steps);
        for step in 0..self.steps {
            let wrong = loss(&model, step)?;
            losses.extend(numbers(wrong.clone()));
            optimizer.add(&model, &wrong.backward(), 1.0);
            let rate = self.rate * (1.0 - step as f64 / self.steps as f64);
            optimizer.step(rate, &Alone).map_err(regard_train::Error::Ranks)?;
            model = optimizer.current().put(model);
        }
        Ok((model, losses))
    }
}

/// The model with all of its numbers drawn anew: as those of [`matrix`], for matrices that lie `[outputs, inputs]` as those of models do.
pub(crate) fn drawn<M: Module>(model: M, noise: &mut Noise) -> M {
    model.map(&mut Drawer(noise))
}

struct Drawer<'n>(&'n mut Noise);

impl ModuleMapper for Drawer<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let sizes = param.val().dims();
        Param::from_tensor(normal(self.0, sizes, (sizes[D - 1] as f64).powf(-0.5)))
    }
}
