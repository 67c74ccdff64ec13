//! The definition with all its numbers, and small helpers around attention.

use crate::array::{Array, OwnedArray, by_type, refused};
use crate::attention::own;
use crate::options::{ArrayElement, Call, Described, machine};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use regard::rope::{Positions, Rope, RopePairs};
use regard::{Layout, Machine, Output, Shape, Tensor, View};
use serde::Deserialize;

/// Similarities, scores, weights and the output.
#[pyfunction]
pub(crate) fn steps(py: Python<'_>, call: Described) -> PyResult<[OwnedArray; 4]> {
    let call = Call::new(call)?;
    by_type!(call.dtype(), E => {
        let views = call.views::<E>()?;
        let ([q, k, v], problem) = (views, call.problem(&views)?);
        let steps = py.detach(|| regard::reference::steps(&problem, q, k, v)).map_err(refused)?;
        Ok([own(steps.similarities), own(steps.scores), own(steps.weights), own(steps.out)])
    })
}

/// Slopes for so many heads.
#[pyfunction]
pub(crate) fn alibi_slopes(heads: usize) -> PyResult<OwnedArray> {
    const MOST: usize = 1 << 20;
    if heads > MOST {
        let why = format!("heads: {heads} is out of range; give at most {MOST}");
        return Err(PyValueError::new_err(why));
    }
    Ok(OwnedArray::new(regard::score::alibi_slopes::<f64>(heads), &[heads]))
}

/// A copy, dense in the memory order of the view.
fn copied<E: ArrayElement>(view: View<'_, E>) -> PyResult<Tensor<E>> {
    let Shape { batch, heads, len, .. } = view.shape();
    let n = view.shape().to_array().iter().try_fold(1usize, |n, size| n.checked_mul(*size));
    let mut data = Vec::new();
    let refuse = || refused("memory: the system has none for a copy of this size");
    data.try_reserve_exact(n.ok_or_else(refuse)?).map_err(|_| refuse())?;
    let (outer, inner) = match view.layout() {
        Layout::Bhsd => (heads, len),
        Layout::Bshd => (len, heads),
    };
    for place in 0..if n == Some(0) { 0 } else { batch * outer * inner } {
        let (b, i, j) = (place / inner / outer, place / inner % outer, place % inner);
        let (head, row) = match view.layout() {
            Layout::Bhsd => (i, j),
            Layout::Bshd => (j, i),
        };
        data.extend_from_slice(view.row(b, head, row));
    }
    Tensor::new(data, view.shape(), view.layout()).map_err(refused)
}

/// Joins outputs of the same queries over different keys: `out` and `lse`.
#[pyfunction]
pub(crate) fn merge(
    py: Python<'_>,
    outs: Vec<Array>,
    lses: Vec<Array>,
) -> PyResult<[OwnedArray; 2]> {
    if outs.len() != lses.len() {
        let (n, m) = (outs.len(), lses.len());
        return Err(PyValueError::new_err(format!(
            "merge: {n} outputs and {m} lses; give one for each"
        )));
    }
    let Some(first) = outs.first() else { return Err(refused(regard::Error::NothingToMerge)) };
    by_type!(first.dtype(), E => {
        let part = |(out, lse): (&Array, &Array)| -> PyResult<Output<E>> {
            let lse = lse.list::<<E as regard::Element>::Num>("lse")?;
            Ok(Output::new(copied(out.view::<E>("out", None)?)?, lse.to_vec()))
        };
        let parts = outs.iter().zip(&lses).map(part).collect::<PyResult<Vec<_>>>()?;
        let Output { out, lse, .. } = py.detach(|| Output::merge(Machine::detect(), &parts)).map_err(refused)?;
        let lse = OwnedArray::new(lse, &first.shape()[..3]);
        Ok([own(out), lse])
    })
}

/// How features turn, in JSON.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Turn {
    /// Features that turn; all where it is missing.
    dim: Option<usize>,
    /// `halves`, `interleaved`
    pairs: String,
    base: f64,
    scaling: f64,
    frequencies: Option<Vec<f64>>,
    inverse: bool,
    threads: Option<usize>,
    /// The position of row 0, where no list says that of each.
    first: i64,
}

impl Turn {
    fn rope(self, dim: usize) -> PyResult<Rope> {
        let pairs = match &self.pairs[..] {
            "halves" => RopePairs::HalfSplit,
            "interleaved" => RopePairs::Interleaved,
            other => {
                let why = format!("pairs: expected halves or interleaved, found {other:?}");
                return Err(PyValueError::new_err(why));
            }
        };
        let rope = Rope::new(self.dim.unwrap_or(dim), pairs).base(self.base).scaling(self.scaling);
        let rope = self.frequencies.into_iter().fold(rope, Rope::frequencies);
        Ok(if self.inverse { rope.inverse() } else { rope })
    }
}

/// A copy of x whose rows are turned by their positions.
#[pyfunction]
pub(crate) fn rope(
    py: Python<'_>,
    x: Array,
    how: &str,
    positions: Option<Array>,
) -> PyResult<OwnedArray> {
    let how: Turn = serde_json::from_str(how).map_err(refused)?;
    let (first, machine) = (how.first, machine(how.threads)?);
    let positions = match &positions {
        Some(list) => Positions::List(list.list("positions")?),
        None => Positions::From(first),
    };
    by_type!(x.dtype(), E => {
        let view = x.view::<E>("x", None)?;
        let rope = how.rope(view.shape().dim)?;
        py.detach(|| {
            let mut turned = copied(view)?;
            rope.apply(machine, &mut turned.view_mut(), positions).map_err(refused)?;
            Ok(own(turned))
        })
    })
}
