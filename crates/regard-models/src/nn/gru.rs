//! Gated recurrent units (Cho et al. 2014), in the form that PyTorch has them.

use super::linear::Linear;
use crate::error::Error;
use burn::module::{Initializer, Module, Param};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Bool, Device, Tensor, TensorData};
use regard_burn::{Steps, gru};

/// One step of a recurrent net. The rows of both maps are those of the reset gate, the update gate and the new state:
///
/// ```text
/// r  = sigmoid(W_r x + b_r + U_r h + c_r)
/// z  = sigmoid(W_z x + b_z + U_z h + c_z)
/// n  = tanh(W_n x + b_n + r (U_n h + c_n))
/// h' = (1 - z) n + z h
/// ```
#[derive(Module, Debug)]
pub struct GruCell {
    /// `W` and `b`: `[3 hidden, in]`.
    pub input: Linear,
    /// `U` and `c`: `[3 hidden, hidden]`.
    pub hidden: Linear,
}

/// The states of a sequence.
#[derive(Clone, Debug)]
pub struct GruStates {
    /// After each position, `[batch, length, features]`; 0 beyond a length.
    pub states: Tensor<3>,
    /// After all, `[batch, features]`: that of the way forward at the last position, then that of the way backward at the first.
    pub last: Tensor<2>,
}

impl GruCell {
    /// From `inputs` features to a state of `hidden`, with numbers between `-1 / sqrt(hidden)` and `1 / sqrt(hidden)`.
    #[must_use]
    pub fn new([inputs, hidden]: [usize; 2], device: &Device) -> Self {
        let reach = 1.0 / (hidden.max(1) as f64).sqrt();
        let start = Initializer::Uniform { min: -reach, max: reach };
        let map = |features: usize| {
            let mut map = Linear::new([features, 3 * hidden], true, device);
            map.weight = start.init([3 * hidden, features], device);
            map.bias = Some(start.init([3 * hidden], device));
            map
        };
        Self { input: map(inputs), hidden: map(hidden) }
    }

    /// Features of the state.
    #[must_use]
    pub fn features(&self) -> usize {
        self.hidden.weight.lazy_shape()[1]
    }

    /// The state after `x [batch, in]`: `[batch, hidden]`, as is the state before.
    #[must_use]
    pub fn forward(&self, x: Tensor<2>, state: Tensor<2>) -> Tensor<2> {
        self.next(self.input.forward(x), state)
    }

    /// The same, given what `input` has made of x.
    fn next(&self, of_input: Tensor<2>, state: Tensor<2>) -> Tensor<2> {
        let n = state.dims()[1];
        let of_state = self.hidden.forward(state.clone());
        let gates =
            sigmoid(of_input.clone().narrow(1, 0, 2 * n) + of_state.clone().narrow(1, 0, 2 * n));
        let (reset, update) = (gates.clone().narrow(1, 0, n), gates.narrow(1, n, n));
        let new = (of_input.narrow(1, 2 * n, n) + reset * of_state.narrow(1, 2 * n, n)).tanh();
        new.clone() + update * (state - new)
    }

    /// The states of `x [batch, length, in]` from 0 on, read from its end if `backward`. A row keeps its state at positions that
    /// are not within its length: so it has none before it begins, and its last one after it has ended.
    pub(crate) fn over(
        &self,
        x: Tensor<3>,
        lengths: Option<&[usize]>,
        backward: bool,
    ) -> GruStates {
        let ([batch, length, _], device) = (x.dims(), x.device().inner());
        let features = self.features();
        let first = Tensor::zeros([batch, features], &device);
        if batch * length == 0 {
            let states = Tensor::zeros([batch, length, features], &device);
            return GruStates { states, last: first };
        }
        let steps = Steps { lengths: lengths.map(<[usize]>::to_vec), backward };
        let states = self.states(self.input.forward(x), first, steps);
        let at = if backward { 0 } else { length - 1 };
        let last = states.clone().narrow(1, at, 1).reshape([batch, features]);
        GruStates { states, last }
    }

    /// The states after each position, given what `input` has made of all of them.
    pub(crate) fn states(&self, of_input: Tensor<3>, first: Tensor<2>, steps: Steps) -> Tensor<3> {
        gru(of_input, first, self.hidden.weight.val(), self.bias(), steps)
    }

    /// `c`; nothing is made without one.
    pub(crate) fn bias(&self) -> Tensor<1> {
        let none =
            || Tensor::zeros([3 * self.features()], &self.hidden.weight.val().device().inner());
        self.hidden.bias.as_ref().map_or_else(none, Param::val)
    }
}

/// A sequence read forward, or both ways.
#[derive(Module, Debug)]
pub struct Gru {
    /// From the first position to the last.
    pub forward: GruCell,
    /// From the last to the first.
    pub backward: Option<GruCell>,
}

impl Gru {
    /// From `inputs` features to states of `hidden`, twice as many if it reads both ways.
    #[must_use]
    pub fn new(sizes: [usize; 2], both: bool, device: &Device) -> Self {
        Self {
            forward: GruCell::new(sizes, device),
            backward: both.then(|| GruCell::new(sizes, device)),
        }
    }

    /// `x [batch, length, in]`; `lengths` where its rows differ in length. The way backward begins at the end of each row.
    pub fn forward(&self, x: Tensor<3>, lengths: Option<&[usize]>) -> Result<GruStates, Error> {
        let [batch, length, _] = x.dims();
        if let Some(lengths) = lengths {
            check(lengths, batch, length)?;
        }
        let ahead = self.forward.over(x.clone(), lengths, false);
        let GruStates { states, last } = match &self.backward {
            Some(cell) => {
                let back = cell.over(x, lengths, true);
                GruStates {
                    states: Tensor::cat(vec![ahead.states, back.states], 2),
                    last: Tensor::cat(vec![ahead.last, back.last], 1),
                }
            }
            None => ahead,
        };
        Ok(GruStates { states: within(states, lengths), last })
    }
}

pub(super) fn check(lengths: &[usize], batch: usize, length: usize) -> Result<(), Error> {
    if lengths.len() != batch {
        let why = format!(
            "there are {} for a batch of {batch}; they must be equally many",
            lengths.len()
        );
        return Err(Error::format("lengths", why));
    }
    match lengths.iter().find(|n| **n > length) {
        Some(n) => Err(Error::format(
            "lengths",
            format!("{n}, the rows have {length}; none may be longer"),
        )),
        None => Ok(()),
    }
}

/// 0 beyond the lengths.
fn within(states: Tensor<3>, lengths: Option<&[usize]>) -> Tensor<3> {
    let sizes @ [_, length, _] = states.dims();
    let Some(lengths) = lengths.filter(|lengths| lengths.iter().any(|n| *n < length)) else {
        return states;
    };
    let outside = outside(lengths, length, &states.device().inner());
    states.mask_fill(outside.unsqueeze_dim::<3>(2).expand(sizes), 0.0)
}

/// Which positions lie beyond the lengths, `[batch, length]`.
pub(super) fn outside(lengths: &[usize], length: usize, device: &Device) -> Tensor<2, Bool> {
    let outside: Vec<bool> =
        lengths.iter().flat_map(|n| (0..length).map(move |at| at >= *n)).collect();
    Tensor::from_data(TensorData::new(outside, [lengths.len(), length]), device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stack::numbers;
    use burn::tensor::Distribution;

    fn input(sizes: [usize; 3]) -> Tensor<3> {
        Tensor::random(sizes, Distribution::Default, &Device::flex())
    }

    #[test]
    fn a_row_does_not_depend_on_what_lies_beyond_it() {
        let gru = Gru::new([3, 4], true, &Device::flex());
        let x = input([2, 5, 3]);
        let padded = gru.forward(x.clone(), Some(&[5, 2])).expect("lengths fit");
        let alone = gru.forward(x.narrow(0, 1, 1).narrow(1, 0, 2), None).expect("no lengths");
        let row = padded.states.narrow(0, 1, 1);
        assert_eq!(numbers(row.clone().narrow(1, 0, 2)), numbers(alone.states));
        assert_eq!(numbers(padded.last.narrow(0, 1, 1)), numbers(alone.last));
        assert!(numbers(row.narrow(1, 2, 3)).iter().all(|x| *x == 0.0));
    }

    #[test]
    fn a_row_without_positions_has_a_state_of_0() {
        let gru = Gru::new([3, 4], true, &Device::flex());
        let found = gru.forward(input([2, 2, 3]), Some(&[0, 2])).expect("lengths fit");
        assert_eq!(numbers(found.last.narrow(0, 0, 1)), [0.0; 8]);
        let found = gru.forward(input([2, 0, 3]), None).expect("nothing to read");
        assert_eq!((found.states.dims(), found.last.dims()), ([2, 0, 8], [2, 8]));
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let gru = Gru::new([3, 4], false, &Device::flex());
        let refused = |lengths: &[usize]| {
            gru.forward(input([2, 5, 3]), Some(lengths)).unwrap_err().to_string()
        };
        assert!(refused(&[5]).contains("1 for a batch of 2"));
        assert!(refused(&[5, 6]).contains("6, the rows have 5"));
    }
}
