//! What a sequence keeps between steps, in the number type of its tensors.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

/// A state of one number type. Who steps it waits for others, without the interpreter.
#[derive(Debug)]
pub(crate) struct AnyState {
    pub(crate) dtype: String,
    /// A `Mutex` of the state of that type.
    state: Arc<dyn Any + Send + Sync>,
}

impl AnyState {
    pub(crate) fn new<T: Send + 'static>(dtype: &str, state: T) -> Self {
        Self { dtype: dtype.into(), state: Arc::new(Mutex::new(state)) }
    }

    /// What `work` makes of the state, which is a `T`.
    pub(crate) fn with<T: Send + 'static, O: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut T) -> O + Send,
    ) -> PyResult<O> {
        let other = || PyTypeError::new_err(format!("the state is one of {}", self.dtype));
        let state: &Mutex<T> = self.state.downcast_ref().ok_or_else(other)?;
        Ok(py.detach(|| work(&mut state.lock().unwrap_or_else(PoisonError::into_inner))))
    }

    /// A copy of a state that is a `T`.
    pub(crate) fn fork<T: Clone + Send + 'static>(&self, py: Python<'_>) -> PyResult<Self> {
        Ok(Self::new(&self.dtype, self.with(py, |state: &mut T| state.clone())?))
    }
}
