//! The delta rule one position after another.

use super::{DeltaInputs, DeltaRule, state_of_zeros};
use regard::{Element, Error, Machine, Tensor};

/// The states of all heads of some sequences, of a size that does not grow: `[batch, heads.v, dim, v_dim]`.
///
/// A clone of it is a fork of all its sequences.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaState<E: Element> {
    rule: DeltaRule,
    state: Tensor<E::Num>,
}

impl<E: Element> DeltaState<E> {
    /// Of `[batch, heads.v, dim, v_dim]`, all 0.
    pub fn new(rule: DeltaRule, sizes: [usize; 4]) -> Result<Self, Error> {
        if sizes[2] == 0 {
            return Err(Error::NoFeatures { tensor: "k" });
        }
        Ok(Self { rule, state: state_of_zeros(sizes)? })
    }

    /// The state itself.
    #[must_use]
    pub fn state(&self) -> &Tensor<E::Num> {
        &self.state
    }

    /// The outputs of new positions, which are those of [`DeltaRule::forward`]'s last rows to rounding. An initial state
    /// among the inputs replaces this one. The state is as before if the call is refused.
    pub fn step(
        &mut self,
        machine: Machine,
        inputs: DeltaInputs<'_, E>,
    ) -> Result<Tensor<E>, Error> {
        let call = self.rule.call(machine, inputs)?;
        let (own, found) = (self.state.shape().to_array(), call.sizes.state());
        for (i, axis) in
            ["batch", "heads", "features of k", "features of v"].into_iter().enumerate()
        {
            Error::unless_same(axis, ("the state", own[i]), ("the call", found[i]))?;
        }
        let Some(state) = inputs.state else { return call.forward(&mut self.state) };
        let mut state = super::state_from(&state)?;
        let out = call.forward(&mut state)?;
        self.state = state;
        Ok(out)
    }
}
