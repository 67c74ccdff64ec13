//! `regard._regard`: the engine as the Python package sees it. Private: `regard/*.py` is the interface.
//!
//!   array      arrays that lie in Python's memory, and in ours
//!   options    a call as Python describes it
//!   attention  there and back
//!   look       the microscope
//!   cache      keys and values of the past
//!   delta      the delta rule with decay
//!   linear     linear attention
//!   lsh        attention by hashing
//!   steps      the definition with all its numbers; small helpers
//!   table      the case table: checked here, and exported for tests of the front ends
//!   scope      traces, pages and pictures of what a lens has seen
//!   torch      tensors and threads of PyTorch

mod array;
mod attention;
mod cache;
mod delta;
mod linear;
mod look;
mod lsh;
mod options;
mod scope;
mod states;
mod steps;
mod table;
mod torch;

use pyo3::prelude::*;

#[pymodule]
mod _regard {
    #[pymodule_export]
    use super::array::OwnedArray;
    #[pymodule_export]
    use super::attention::{SavedForward, attend, backward, forward, plan};
    #[pymodule_export]
    use super::cache::{Cache, Sequence};
    #[pymodule_export]
    use super::delta::{DeltaState, delta_rule, delta_rule_backward};
    #[pymodule_export]
    use super::linear::{SavedLinear, State, linear};
    #[pymodule_export]
    use super::look::look;
    #[pymodule_export]
    use super::lsh::{SavedLsh, lsh};
    #[pymodule_export]
    use super::scope::{Trace, picture, write};
    #[pymodule_export]
    use super::steps::{alibi_slopes, merge, rope, steps};
    #[pymodule_export]
    use super::table::{Row, Table, check};
    #[pymodule_export]
    use super::torch::{attend_torch, load_torch};

    use pyo3::prelude::*;

    /// The version of the package.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_init]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        std::sync::LazyLock::force(&super::options::LOADED_BY);
        Ok(())
    }

    /// Functions of PyTorch that `load_torch` takes the addresses of.
    #[pyfunction]
    fn torch_functions() -> (Vec<&'static str>, Vec<&'static str>) {
        (super::torch::TENSOR_FUNCTIONS.to_vec(), super::torch::THREAD_FUNCTIONS.to_vec())
    }

    /// Instruction sets of this machine, the best last.
    #[pyfunction]
    fn isas() -> Vec<&'static str> {
        regard::Isa::available().into_iter().map(regard::Isa::name).collect()
    }

    /// The command line; returns its exit status.
    #[cfg(feature = "cli")]
    #[pyfunction]
    fn main(py: Python<'_>, arguments: Vec<std::ffi::OsString>) -> u8 {
        py.detach(|| regard_cli::run(arguments))
    }
}
