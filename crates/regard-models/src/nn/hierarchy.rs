//! A sequence as one vector: what hierarchical attention is made of (Yang et al. 2016).

use super::additive::attended;
use super::gru::{Gru, check, outside};
use super::linear::Linear;
use crate::error::Error;
use crate::recorder::Recorder;
use burn::module::{Initializer, Module, Param};
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Tensor};
use regard::Mask;
use regard_burn::Attention;

/// Attention with one learned query, the context: `u = tanh(hidden h)`, and h is summed by `softmax(u . context)`.
#[derive(Module, Debug)]
pub struct ContextAttention {
    /// `[hidden, features]`
    pub hidden: Linear,
    /// `[hidden]`
    pub context: Param<Tensor<1>>,
}

impl ContextAttention {
    /// For rows of so many features, with random weights.
    #[must_use]
    pub fn new([features, hidden]: [usize; 2], device: &Device) -> Self {
        let reach = 1.0 / (hidden.max(1) as f64).sqrt();
        let start = Initializer::Uniform { min: -reach, max: reach };
        Self {
            hidden: Linear::new([features, hidden], true, device),
            context: start.init([hidden], device),
        }
    }

    /// `h [batch, length, features]` to `[batch, features]`; 0 for a row of length 0.
    pub fn forward(
        &self,
        h: Tensor<3>,
        lengths: Option<&[usize]>,
        recorder: &mut Recorder,
    ) -> Result<Tensor<2>, Error> {
        let [q, k] = self.asked(&h);
        Ok(attended([q, k, h], &options(lengths), recorder)?.squeeze_dim(1))
    }

    /// What the context sees of each position, `[batch, length]`; 0 beyond a length. As many numbers are made as there are units.
    pub fn weights(&self, h: Tensor<3>, lengths: Option<&[usize]>) -> Result<Tensor<2>, Error> {
        let [q, k] = self.asked(&h);
        let ([batch, length, _], device) = (k.dims(), k.device().inner());
        if batch * length == 0 {
            return Ok(Tensor::zeros([batch, length], &device));
        }
        let scores: Tensor<2> = (k * q).sum_dim(2).squeeze_dim(2);
        let Some(lengths) = lengths else { return Ok(softmax(scores, 1)) };
        check(lengths, batch, length)?;
        let outside = outside(lengths, length, &device);
        // A row of length 0 is a softmax of nothing; what is not a number there goes with all that is outside.
        let weights = softmax(scores.mask_fill(outside.clone(), f32::NEG_INFINITY), 1);
        Ok(weights.mask_fill(outside, 0.0))
    }

    /// The context as a query of each item, and the keys.
    fn asked(&self, h: &Tensor<3>) -> [Tensor<3>; 2] {
        let keys = self.hidden.forward(h.clone()).tanh();
        let [batch, _, hidden] = keys.dims();
        let context = match batch {
            // Burn expands nothing to no rows.
            0 => Tensor::zeros([0, 1, hidden], &keys.device().inner()),
            _ => self.context.val().unsqueeze::<3>().expand([batch, 1, hidden]),
        };
        [context, keys]
    }
}

fn options(lengths: Option<&[usize]>) -> Attention {
    let mask = lengths.map_or_else(Mask::full, Mask::lengths);
    Attention { mask, scale: Some(1.0), ..Attention::default() }
}

/// A sequence read both ways and summed up: words to a sentence, or sentences to a document.
#[derive(Module, Debug)]
pub struct Level {
    /// Reads.
    pub gru: Gru,
    /// Sums up.
    pub attention: ContextAttention,
}

impl Level {
    /// From `inputs` features to `2 hidden`, with so many units for the attention.
    #[must_use]
    pub fn new([inputs, hidden, attention]: [usize; 3], device: &Device) -> Self {
        Self {
            gru: Gru::new([inputs, hidden], true, device),
            attention: ContextAttention::new([2 * hidden, attention], device),
        }
    }

    /// `x [batch, length, in]` to `[batch, 2 hidden]`; `lengths` where its rows differ in length.
    pub fn forward(
        &self,
        x: Tensor<3>,
        lengths: Option<&[usize]>,
        recorder: &mut Recorder,
    ) -> Result<Tensor<2>, Error> {
        self.attention.forward(self.gru.forward(x, lengths)?.states, lengths, recorder)
    }

    /// As [`ContextAttention::weights`], of what was read.
    pub fn weights(&self, x: Tensor<3>, lengths: Option<&[usize]>) -> Result<Tensor<2>, Error> {
        self.attention.weights(self.gru.forward(x, lengths)?.states, lengths)
    }

    /// Both at once: what `x` is read once for, `[batch, 2 hidden]` and `[batch, length]`.
    pub(crate) fn looked(
        &self,
        x: Tensor<3>,
        lengths: &[usize],
    ) -> Result<(Tensor<2>, Tensor<2>), Error> {
        let states = self.gru.forward(x, Some(lengths))?.states;
        let weights = self.attention.weights(states.clone(), Some(lengths))?;
        let out = self.attention.forward(states, Some(lengths), &mut Recorder::off())?;
        Ok((out, weights))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stack::numbers;
    use burn::tensor::Distribution;

    #[test]
    fn a_row_without_positions_is_0_and_has_no_weights() {
        let level = Level::new([3, 4, 5], &Device::flex());
        let x: Tensor<3> = Tensor::random([2, 3, 3], Distribution::Default, &Device::flex());
        let lengths = Some(&[0, 3][..]);
        let found = level.forward(x.clone(), lengths, &mut Recorder::off()).expect("lengths fit");
        assert_eq!(numbers(found.narrow(0, 0, 1)), [0.0; 8]);
        let weights = numbers(level.weights(x, lengths).expect("lengths fit"));
        assert_eq!(weights[..3], [0.0; 3]);
        assert!((weights[3..].iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }

    #[test]
    fn the_weights_are_those_that_the_sum_is_made_by() {
        let layer = ContextAttention::new([3, 5], &Device::flex());
        let h: Tensor<3> = Tensor::random([3, 4, 3], Distribution::Default, &Device::flex());
        for lengths in [None, Some(&[4, 1, 2][..])] {
            let out = layer.forward(h.clone(), lengths, &mut Recorder::off()).expect("they fit");
            let weights = layer.weights(h.clone(), lengths).expect("they fit");
            let sum = (h.clone() * weights.unsqueeze_dim(2)).sum_dim(1).squeeze_dim::<2>(1);
            for (sum, out) in numbers(sum).into_iter().zip(numbers(out)) {
                assert!((sum - out).abs() < 1e-6, "{sum} {out}");
            }
        }
    }

    #[test]
    fn nothing_at_all_is_0() {
        let level = Level::new([3, 4, 5], &Device::flex());
        let x = Tensor::zeros([2, 0, 3], &Device::flex());
        let found = level.forward(x, None, &mut Recorder::off()).expect("nothing to read");
        assert_eq!(numbers(found), [0.0; 16]);
    }
}
