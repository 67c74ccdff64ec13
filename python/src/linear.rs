//! Linear attention, and its state.

use crate::array::{Array, OwnedArray, by_type, refused};
use crate::attention::{own, tensor};
use crate::options::{Call, Described};
use crate::states::AnyState;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use regard_approx::{FeatureMap, LinearAttention, LinearGrads, LinearOutput, LinearState};
use std::any::Any;
use std::sync::Arc;

/// How features are made, by text and a seed, and whether rows see only the keys up to their own.
#[derive(Debug, FromPyObject)]
pub(crate) struct How(String, u64, bool);

impl How {
    fn attention(&self) -> PyResult<LinearAttention> {
        let attention = LinearAttention::new(map(&self.0, self.1)?);
        Ok(if self.2 { attention.causal() } else { attention })
    }
}

fn map(text: &str, seed: u64) -> PyResult<FeatureMap> {
    let wrong = || {
        let known = "elu, relu or random FEATURES";
        PyValueError::new_err(format!("map: expected {known}, found {text:?}"))
    };
    match text.split_once(' ') {
        None if text == "elu" => Ok(FeatureMap::EluPlusOne),
        None if text == "relu" => Ok(FeatureMap::Relu),
        Some(("random", features)) => {
            let features = features.parse().map_err(|_| wrong())?;
            Ok(FeatureMap::PositiveRandom { features, seed })
        }
        _ => Err(wrong()),
    }
}

/// What a call has returned.
#[pyclass(frozen, module = "regard._regard")]
#[derive(Debug)]
pub(crate) struct SavedLinear {
    #[pyo3(get)]
    out: Py<OwnedArray>,
    /// A [`LinearOutput`] of the type of the call.
    output: Arc<dyn Any + Send + Sync>,
}

/// Linear attention; of the call's options only packing and threads count.
#[pyfunction]
pub(crate) fn linear(py: Python<'_>, call: Described, how: How) -> PyResult<SavedLinear> {
    let (call, attention) = (Call::new(call)?, how.attention()?);
    by_type!(call.dtype(), E => {
        let ([q, k, v], machine) = (call.views::<E>()?, call.machine()?);
        let output = py.detach(|| attention.forward(machine, q, k, v)).map_err(refused)?;
        let output = Arc::new(output);
        let out = Py::new(py, tensor(output.clone(), &output.out))?;
        Ok(SavedLinear { out, output })
    })
}

#[pymethods]
impl SavedLinear {
    /// The gradients by q, k and v of the call that this is the output of.
    fn backward(
        &self,
        py: Python<'_>,
        call: Described,
        how: How,
        d_out: Array,
    ) -> PyResult<[OwnedArray; 3]> {
        let (call, attention) = (Call::new(call)?, how.attention()?);
        by_type!(call.dtype(), E => {
            let ([q, k, v], machine) = (call.views::<E>()?, call.machine()?);
            let d_out = call.like_out(&d_out, "d_out")?;
            let other = || PyTypeError::new_err("this output is not that of a call with this type");
            let output: &LinearOutput<E> = self.output.downcast_ref().ok_or_else(other)?;
            let back = || attention.backward(machine, q, k, v, output, d_out);
            let LinearGrads { q, k, v, .. } = py.detach(back).map_err(refused)?;
            Ok([own(q), own(k), own(v)])
        })
    }
}

/// What causal linear attention keeps of the positions before.
#[pyclass(frozen, module = "regard._regard")]
#[derive(Debug)]
pub(crate) struct State(AnyState);

#[pymethods]
impl State {
    /// Of so many items, key heads, features of a key and of a value.
    #[new]
    fn new(dtype: &str, text: &str, seed: u64, sizes: [usize; 4]) -> PyResult<Self> {
        let map = map(text, seed)?;
        by_type!(dtype, E => {
            let state = LinearState::<E>::new(map, sizes).map_err(refused)?;
            Ok(Self(AnyState::new(dtype, state)))
        })
    }

    #[getter]
    fn dtype(&self) -> &str {
        &self.0.dtype
    }

    /// The outputs of new positions.
    fn step(&self, py: Python<'_>, call: Described) -> PyResult<OwnedArray> {
        let call = Call::new(call)?;
        by_type!(self.dtype(), E => {
            let ([q, k, v], machine) = (call.views::<E>()?, call.machine()?);
            let step = |state: &mut LinearState<E>| state.step(machine, q, k, v);
            Ok(own(self.0.with(py, step)?.map_err(refused)?))
        })
    }

    /// A second one that knows the same.
    fn fork(&self, py: Python<'_>) -> PyResult<Self> {
        by_type!(self.dtype(), E => self.0.fork::<LinearState<E>>(py).map(Self))
    }
}
