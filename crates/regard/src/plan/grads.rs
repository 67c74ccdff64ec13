//! What a loss says of the outputs, and what follows from it for everything that they depend on.

use crate::error::Error;
use crate::machine::simd::Element;
use crate::tensor::view::{Tensor, View};

/// What a loss says of the outputs: its gradients by them. Those by rows are `[total, heads.q]` where queries are packed,
/// as the rows of an [`Output`](crate::Output) are.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct OutputGrads<'a, E: Element> {
    /// By `out`.
    pub out: View<'a, E>,
    /// By `lse`, if the loss depends on it.
    pub lse: Option<&'a [E::Num]>,
    pub(crate) entropy: Option<&'a [E::Num]>,
    pub(crate) bias: bool,
    pub(crate) advantage: Option<&'a [E::Num]>,
    pub(crate) straight_through: bool,
}

impl<'a, E: Element> OutputGrads<'a, E> {
    /// The gradient by `out`, `[batch, heads.q, q_len, v_dim]`.
    #[must_use]
    pub fn new(d_out: View<'a, E>) -> Self {
        let (advantage, straight_through) = (None, false);
        Self { out: d_out, lse: None, entropy: None, bias: false, advantage, straight_through }
    }

    /// The gradient by `lse` too, `[batch, heads.q, q_len]`. Rows that see nothing have none.
    #[must_use]
    pub fn lse(self, d_lse: &'a [E::Num]) -> Self {
        Self { lse: Some(d_lse), ..self }
    }

    /// The gradient by `entropy` too, `[batch, heads.q, q_len]`: to reward or punish spread attention. The output must
    /// have the entropies, so the problem must have asked for them.
    #[must_use]
    pub fn entropy(self, d_entropy: &'a [E::Num]) -> Self {
        Self { entropy: Some(d_entropy), ..self }
    }

    /// Asks for the gradient of the dense bias; without this there is none, for a bias that is not learned needs none. Who
    /// shares a bias is then worked through in one task, so the last bits of the other gradients may differ.
    #[must_use]
    pub fn with_bias(self) -> Self {
        Self { bias: true, ..self }
    }

    /// For [`Normalizer::Sampled`](crate::problem::Normalizer::Sampled): how much larger than expected the loss was with the key that
    /// each row has drawn, `[batch, heads.q, q_len]`: the loss less a baseline that does not depend on the draw, such as
    /// the mean of earlier losses. The gradient by the scores is then `advantage d ln p(drawn)` (Williams 1992): the mean over
    /// draws is the gradient of the expected loss, whatever the baseline; a good one makes it less noisy.
    #[must_use]
    pub fn advantage(self, advantage: &'a [E::Num]) -> Self {
        Self { advantage: Some(advantage), ..self }
    }

    /// For [`Normalizer::Hard`](crate::problem::Normalizer::Hard) and [`Sampled`](crate::problem::Normalizer::Sampled): the gradient by the
    /// scores is that of the softmax, as if its weighted mean had been the output (Bengio et al. 2013). Little noise, but
    /// not the gradient of anything.
    #[must_use]
    pub fn straight_through(self) -> Self {
        Self { straight_through: true, ..self }
    }

    /// What it says of `out` alone.
    pub(crate) fn output_only(self) -> Self {
        Self { lse: None, entropy: None, ..self }
    }

    /// Refuses estimates that a normalizer without a choice does not have.
    pub(crate) fn without_selection(self, normalizer: &'static str) -> Result<(), Error> {
        let estimate = match self {
            Self { straight_through: true, .. } => "straight-through",
            Self { advantage: Some(_), .. } => "advantage",
            _ => return Ok(()),
        };
        Err(Error::NoEstimate { estimate, normalizer })
    }

    pub(crate) fn without_estimates(self) -> Self {
        Self { advantage: None, straight_through: false, ..self }
    }
}

impl<'a, E: Element> From<View<'a, E>> for OutputGrads<'a, E> {
    fn from(d_out: View<'a, E>) -> Self {
        Self::new(d_out)
    }
}

/// The gradients of a loss by everything that attention depends on; empty where an option is not in use.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Grads<E: Element> {
    /// By q, in its shape and layout.
    pub q: Tensor<E>,
    /// By k, in its shape and layout.
    pub k: Tensor<E>,
    /// By v, in its shape and layout.
    pub v: Tensor<E>,
    /// By the scale after the temperature, the number that [`Problem::scale`](crate::Problem::scale) tells.
    pub scale: f64,
    /// By the temperature.
    pub temperature: f64,
    /// By the dense bias, in its own shape, if it was asked for: summed over the axes it is broadcast along.
    pub bias: Option<Tensor<E::Num>>,
    /// By the ALiBi slopes, `[heads.q]`.
    pub alibi: Vec<E::Num>,
    /// By the table of the relative bias, `[buckets, heads.q]`.
    pub relative: Vec<E::Num>,
    /// By the sinks, `[heads.q]`.
    pub sinks: Vec<E::Num>,
    /// By the centers of [`Local`](crate::problem::Local) attention, `[batch, heads.q, q_len]`.
    pub centers: Vec<E::Num>,
    /// By `W` of [`Similarity::General`](crate::problem::Similarity::General), in its own shape.
    pub w: Option<Tensor<E::Num>>,
    /// By the weights of [`Similarity::Additive`](crate::problem::Similarity::Additive), each in its own shape.
    pub additive: Option<AdditiveGrads<E::Num>>,
}

/// Gradients by the weights of an additive similarity: see [`Additive`](crate::problem::Additive).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct AdditiveGrads<N> {
    /// By `w_q`.
    pub w_q: Tensor<N>,
    /// By `w_k`, if it was given.
    pub w_k: Option<Tensor<N>>,
    /// By `v`.
    pub v: Tensor<N>,
}
