//! Gradients of modules that learn, beside those of PyTorch: `FOLDER/gradients` is the same model with each parameter's gradient in its
//! place.

use crate::{Result, error_of, largest};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use regard_burn::{CrossEntropy, cross_entropy};
use regard_models::files::{Architecture, ModelFiles, Weights};
use regard_models::{Bert, DropoutRates, Gpt, Pass, Sentences, gradients, ids, load, parameters};
use std::path::Path;

/// Gradients below this part of the largest of the model are rounding: that of a key's bias is 0.
const LEAST: f32 = 0.01;

/// The largest error of the gradients of all parameters, each relative to the largest of its tensor; none if the folder has no gradients.
pub(crate) fn compare(path: &Path, sequences: &[Vec<u32>]) -> Result<Option<f32>> {
    let gradients = path.join("gradients");
    if !gradients.is_dir() {
        return Ok(None);
    }
    let (files, expected) = (ModelFiles::open(path)?, ModelFiles::open(&gradients)?);
    let device = Device::flex().autodiff();
    let found = match files.config.architecture {
        Architecture::Bert => {
            let new = || Bert::new(&files.config, &device);
            of(new()?, new()?, files.weights, expected.weights, |model| pooled(model, sequences))?
        }
        _ => {
            let new = || Gpt::new(&files.config, DropoutRates::default(), &device);
            of(new()?, new()?, files.weights, expected.weights, |model| {
                entropy(model, sequences, &device)
            })?
        }
    };
    Ok(Some(found))
}

/// The same of one module, with a second one to take the gradients that are expected.
fn of<M: Module>(
    model: M,
    other: M,
    mut weights: Weights,
    mut expected: Weights,
    loss: impl Fn(&M) -> Result<Tensor<1>>,
) -> Result<f32> {
    let (model, expected) = (load(model, &mut weights)?, load(other, &mut expected)?);
    let found = gradients(&model, &loss(&model)?.backward());
    let expected = parameters(&expected);
    let top = expected.values().fold(0.0, |top: f32, (_, want)| top.max(largest(want)));
    let mut worst = 0f32;
    for (name, (_, want)) in &expected {
        let ours = found.get(name).and_then(Option::as_ref);
        let ours = ours.ok_or_else(|| format!("{name} has no gradient"))?;
        worst = worst.max(error_of(ours, want, largest(want).max(LEAST * top)));
    }
    Ok(worst)
}

/// The sum of what the first position says of each sequence.
fn pooled(model: &Bert, sequences: &[Vec<u32>]) -> Result<Tensor<1>> {
    let sentences = Sentences { tokens: sequences, token_types: None };
    Ok(model.pooled(model.forward(&sentences, &mut Pass::default())?).sum())
}

/// The sum over sequences of the mean cross-entropy of their next tokens.
fn entropy(model: &Gpt, sequences: &[Vec<u32>], device: &Device) -> Result<Tensor<1>> {
    let mut sum = Tensor::zeros([1], device);
    for tokens in sequences {
        let (read, next) = (&tokens[..tokens.len() - 1], &tokens[1..]);
        let scores = model.forward(ids(&[read], device), &mut Pass::default())?;
        let [_, length, vocab] = scores.dims();
        let labels = ids(&[next], device).reshape([length]);
        let how = CrossEntropy::default();
        sum = sum + cross_entropy(scores.reshape([length, vocab]), labels, how)?;
    }
    Ok(sum)
}
