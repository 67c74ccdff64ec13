//! `_regard_models`: models as the Python package `regard` has them. Private: `regard/_model.py` is the interface.
//!
//!   threads      a thread pool of each process
//!   request      what is asked of a model, in JSON
//!   fingerprint  what the results of a model depend on
//!   statistics   attention statistics of a trace
//!   trace        the attention of one text
//!   model        a model, by what it does
//!   stream       a text as it is generated

mod fingerprint;
mod model;
mod request;
mod statistics;
mod stream;
mod threads;
mod trace;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::fmt::Display;

/// An error of the caller, with its message.
fn refused(why: impl Display) -> PyErr {
    PyValueError::new_err(why.to_string())
}

#[pymodule]
mod _regard_models {
    #[pymodule_export]
    use super::model::Model;
    #[pymodule_export]
    use super::stream::TextIterator;
    #[pymodule_export]
    use super::trace::Trace;

    /// The version of the package.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
