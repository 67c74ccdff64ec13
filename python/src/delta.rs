//! The delta rule with decay, and its state.

use crate::array::{Array, OwnedArray, by_type, refused};
use crate::attention::own;
use crate::options::{ArrayElement, machine};
use crate::states::AnyState;
use pyo3::prelude::*;
use regard_approx::{DeltaInputs, DeltaRule, DeltaState as State};

/// The scale, whether queries and keys are normalized, and threads.
#[derive(Clone, Debug, FromPyObject)]
pub(crate) struct How(Option<f64>, bool, Option<usize>);

impl How {
    fn rule(&self) -> DeltaRule {
        let rule = if self.1 { DeltaRule::new().qk_l2norm() } else { DeltaRule::new() };
        self.0.map_or(rule, |scale| rule.scale(scale))
    }
}

/// q, k and v; g, beta and the initial state, if there are any; offsets, if items are packed.
#[derive(Debug, FromPyObject)]
pub(crate) struct Tensors([Array; 3], [Option<Array>; 3], Option<Array>);

impl Tensors {
    fn dtype(&self) -> &str {
        self.0[0].dtype()
    }

    fn offsets(&self) -> PyResult<Option<Vec<usize>>> {
        self.2.as_ref().map(|offsets| offsets.counts("offsets")).transpose()
    }

    fn inputs<'a, E: ArrayElement>(
        &'a self,
        offsets: Option<&'a [usize]>,
    ) -> PyResult<DeltaInputs<'a, E>> {
        let Self([q, k, v], [g, beta, state], _) = self;
        let (q, k, v) = (q.view("q", offsets)?, k.view("k", offsets)?, v.view("v", offsets)?);
        let mut inputs = DeltaInputs::new(q, k, v);
        if let Some(g) = g {
            inputs = inputs.g(g.view("g", offsets)?);
        }
        if let Some(beta) = beta {
            inputs = inputs.beta(beta.view("beta", offsets)?);
        }
        if let Some(state) = state {
            inputs = inputs.state(state.view("state", None)?);
        }
        Ok(inputs)
    }
}

/// The outputs and the final states.
#[pyfunction]
pub(crate) fn delta_rule(py: Python<'_>, tensors: Tensors, how: How) -> PyResult<[OwnedArray; 2]> {
    let (offsets, rule, machine) = (tensors.offsets()?, how.rule(), machine(how.2)?);
    by_type!(tensors.dtype(), E => {
        let inputs = tensors.inputs::<E>(offsets.as_deref())?;
        let found = py.detach(|| rule.forward(machine, inputs)).map_err(refused)?;
        Ok([own(found.out), own(found.state)])
    })
}

/// The gradients by q, k, v, g, beta and the initial states.
#[pyfunction]
pub(crate) fn delta_rule_backward(
    py: Python<'_>,
    tensors: Tensors,
    how: How,
    d_out: Array,
    d_state: Option<Array>,
) -> PyResult<Vec<Option<OwnedArray>>> {
    let (offsets, rule, machine) = (tensors.offsets()?, how.rule(), machine(how.2)?);
    by_type!(tensors.dtype(), E => {
        let offsets = offsets.as_deref();
        let (inputs, d_out) = (tensors.inputs::<E>(offsets)?, d_out.view("d_out", offsets)?);
        let d_state = d_state.as_ref().map(|d_state| d_state.view("d_state", None)).transpose()?;
        let grads = py.detach(|| rule.backward(machine, inputs, d_out, d_state)).map_err(refused)?;
        let of_inputs = [grads.q, grads.k, grads.v].map(own).map(Some);
        let others = [grads.g.map(own), grads.beta.map(own), Some(own(grads.state))];
        Ok(of_inputs.into_iter().chain(others).collect())
    })
}

/// The states of some sequences.
#[pyclass(frozen, module = "regard._regard")]
#[derive(Debug)]
pub(crate) struct DeltaState(AnyState);

#[pymethods]
impl DeltaState {
    /// Of items, heads of v, features of a key and of a value.
    #[new]
    fn new(dtype: &str, how: How, sizes: [usize; 4]) -> PyResult<Self> {
        by_type!(dtype, E => {
            let state = State::<E>::new(how.rule(), sizes).map_err(refused)?;
            Ok(Self(AnyState::new(dtype, state)))
        })
    }

    #[getter]
    fn dtype(&self) -> &str {
        &self.0.dtype
    }

    /// The outputs of new positions.
    fn step(
        &self,
        py: Python<'_>,
        tensors: Tensors,
        threads: Option<usize>,
    ) -> PyResult<OwnedArray> {
        let (offsets, machine) = (tensors.offsets()?, machine(threads)?);
        by_type!(self.dtype(), E => {
            let inputs = tensors.inputs::<E>(offsets.as_deref())?;
            let step = |state: &mut State<E>| state.step(machine, inputs);
            Ok(own(self.0.with(py, step)?.map_err(refused)?))
        })
    }

    /// A copy of the states, `[batch, heads, dim, v_dim]`.
    fn array(&self, py: Python<'_>) -> PyResult<OwnedArray> {
        by_type!(self.dtype(), E => {
            Ok(own(self.0.with(py, |state: &mut State<E>| state.state().clone())?))
        })
    }

    /// A copy.
    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        by_type!(self.dtype(), E => self.0.fork::<State<E>>(py).map(Self))
    }
}
