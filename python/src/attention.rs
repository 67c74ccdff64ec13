//! Attention there and back, and what is kept between.

use crate::array::{Array, Named, OwnedArray, by_type, refused};
use crate::options::{ArrayElement, Call, Described, planned};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use regard::plan::{OutputGrads, OutputMut, OutputView};
use regard::problem::Normalizer;
use regard::{Grads, Layout, Output, Tensor};
use std::any::Any;
use std::sync::Arc;

/// What a call has returned: its arrays, and all that the way back and the microscope need.
#[pyclass(frozen, module = "regard._regard")]
#[derive(Debug)]
pub(crate) struct SavedForward {
    #[pyo3(get)]
    out: Py<OwnedArray>,
    #[pyo3(get)]
    lse: Py<OwnedArray>,
    #[pyo3(get)]
    states: Py<OwnedArray>,
    #[pyo3(get)]
    entropy: Option<Py<OwnedArray>>,
    #[pyo3(get)]
    max_score: Option<Py<OwnedArray>>,
    /// An [`Output`] of the type of the call.
    output: Arc<dyn Any + Send + Sync>,
}

/// A tensor in its own memory; `[total, heads, features]` if it is packed.
pub(crate) fn tensor<E: Named>(
    owner: Arc<dyn Any + Send + Sync>,
    tensor: &Tensor<E>,
) -> OwnedArray {
    let [batch, heads, len, dim] = tensor.shape().to_array();
    if let Some(offsets) = tensor.offsets() {
        let total = offsets.last().copied().unwrap_or(0);
        return OwnedArray::part(owner, tensor.data(), &[total, heads, dim], &[0, 1, 2]);
    }
    let axes = match tensor.layout() {
        Layout::Bhsd => [0, 1, 2, 3],
        Layout::Bshd => [0, 2, 1, 3],
    };
    OwnedArray::part(owner, tensor.data(), &[batch, heads, len, dim], &axes)
}

/// A tensor that only Python keeps.
pub(crate) fn own<E: Named>(found: Tensor<E>) -> OwnedArray {
    let found = Arc::new(found);
    tensor(found.clone(), &found)
}

impl SavedForward {
    pub(crate) fn new<E: ArrayElement>(py: Python<'_>, output: Output<E>) -> PyResult<Self> {
        let output = Arc::new(output);
        let shape = output.out.shape();
        let rows = match output.out.offsets() {
            Some(offsets) => vec![offsets.last().copied().unwrap_or(0), shape.heads],
            None => vec![shape.batch, shape.heads, shape.len],
        };
        let axes: Vec<usize> = (0..=rows.len()).collect();
        let by_row = |data: &[E::Num], each: Option<usize>| {
            let shape: Vec<usize> = rows.iter().copied().chain(each).collect();
            Py::new(py, OwnedArray::part(output.clone(), data, &shape, &axes[..shape.len()]))
        };
        let watched =
            |data: &Option<Vec<E::Num>>| data.as_deref().map(|data| by_row(data, None)).transpose();
        Ok(Self {
            out: Py::new(py, tensor(output.clone(), &output.out))?,
            lse: by_row(&output.lse, None)?,
            states: by_row(output.states.as_flattened(), Some(2))?,
            entropy: watched(&output.entropy)?,
            max_score: watched(&output.max_score)?,
            output,
        })
    }

    pub(crate) fn output<E: ArrayElement>(&self) -> PyResult<&Output<E>> {
        let other = || {
            PyTypeError::new_err(format!(
                "this output is not that of a call with {}",
                <E as Named>::NAME
            ))
        };
        self.output.downcast_ref().ok_or_else(other)
    }
}

/// Attention.
#[pyfunction]
pub(crate) fn forward(py: Python<'_>, call: Described) -> PyResult<SavedForward> {
    let call = Call::new(call)?;
    by_type!(call.dtype(), E => {
        let views = call.views::<E>()?;
        let [q, k, v] = views;
        let plan = call.plan(&views)?;
        let output = py.detach(|| plan.forward(q, k, v)).map_err(refused)?;
        SavedForward::new(py, output)
    })
}

/// Attention into `out`, a new array, for options without arrays. Does not plan again if an earlier call had these options and shapes.
#[pyfunction]
pub(crate) fn attend(
    py: Python<'_>,
    options: &str,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
) -> PyResult<()> {
    attend_into(py, options, &[q, k, v], out)
}

/// [`attend`] from Rust.
#[expect(clippy::needless_pass_by_value, reason = "nobody else writes to the output")]
pub(crate) fn attend_into(
    py: Python<'_>,
    options: &str,
    tensors: &[Array; 3],
    out: Array,
) -> PyResult<()> {
    by_type!(tensors[0].dtype(), E => {
        let [q, k, v] = tensors;
        let views = [q.view::<E>("q", None)?, k.view("k", None)?, v.view("v", None)?];
        let plan = planned(options, tensors, &views)?;
        // One number for each row; an error where there is no memory for them.
        let zeros = || Tensor::zeros(&views[0], 1).map_err(refused);
        let mut lse = zeros()?;
        let mut entropy = plan.problem().entropy.then(zeros).transpose()?;
        // SAFETY: the caller has just made this array and holds the only reference.
        let out = unsafe { out.view_mut::<E>("out") }?;
        let [q, k, v] = views;
        let entropy = entropy.as_mut().map(Tensor::data_mut);
        let to = OutputMut { out, lse: lse.data_mut(), entropy };
        py.detach(|| plan.forward_into(q, (k, v), to)).map_err(refused)
    })
}

/// How the call would be run.
#[pyfunction]
pub(crate) fn plan(call: Described) -> PyResult<String> {
    let call = Call::new(call)?;
    by_type!(call.dtype(), E => Ok(call.plan(&call.views::<E>()?)?.to_string()))
}

/// What a loss says: gradients by out, lse and entropy, the advantage of what was drawn, whether a dense bias learns, and whether
/// choices are passed straight through.
#[derive(Debug, FromPyObject)]
pub(crate) struct Loss(Array, Option<Array>, Option<Array>, Option<Array>, bool, bool);

impl Loss {
    fn upstream<'a, E: ArrayElement>(&'a self, call: &'a Call) -> PyResult<OutputGrads<'a, E>> {
        let Self(d_out, d_lse, d_entropy, advantage, bias, straight_through) = self;
        let mut upstream = OutputGrads::new(call.like_out(d_out, "d_out")?);
        if let Some(d_lse) = d_lse {
            upstream = upstream.lse(d_lse.list("d_lse")?);
        }
        if let Some(d_entropy) = d_entropy {
            upstream = upstream.entropy(d_entropy.list("d_entropy")?);
        }
        if let Some(advantage) = advantage {
            upstream = upstream.advantage(advantage.list("advantage")?);
        }
        if *bias {
            upstream = upstream.with_bias();
        }
        Ok(if *straight_through { upstream.straight_through() } else { upstream })
    }
}

/// An output in memory of the caller: out, lse, states, entropy.
#[derive(Debug, FromPyObject)]
pub(crate) struct Outputs(Array, Array, Array, Option<Array>);

/// The gradients of a call, from its output in memory of the caller: those by q, k and v, by each tensor that learns in their order
/// (nothing where there is none), by the scale and by the temperature.
///
/// What a normalizer other than the softmax has chosen is not among those arrays: it is found once more.
#[pyfunction]
pub(crate) fn backward(
    py: Python<'_>,
    call: Described,
    output: Outputs,
    loss: Loss,
) -> PyResult<Gradients> {
    let call = Call::new(call)?;
    by_type!(call.dtype(), E => {
        let views = call.views::<E>()?;
        let [q, k, v] = views;
        let plan = call.plan(&views)?;
        let upstream = loss.upstream::<E>(&call)?;
        let Outputs(out, lse, states, entropy) = &output;
        let states = states.list("states")?.as_chunks().0;
        let entropy = entropy.as_ref().map(|entropy| entropy.list("entropy")).transpose()?;
        let (out, lse) = (call.like_out(out, "out")?, lse.list("lse")?);
        let given = OutputView { out, lse, states, entropy, selection: None };
        let soft = plan.problem().normalizer == Normalizer::Softmax;
        let grads = py.detach(|| match soft {
            true => plan.backward(q, k, v, given, upstream),
            false => plan.backward(q, k, v, &plan.forward(q, k, v)?, upstream),
        });
        gradients(py, call.learned(), grads.map_err(refused)?)
    })
}

#[pymethods]
impl SavedForward {
    /// The gradients of the call that this is the output of.
    fn backward(&self, py: Python<'_>, call: Described, loss: Loss) -> PyResult<Gradients> {
        let call = Call::new(call)?;
        by_type!(call.dtype(), E => {
            let views = call.views::<E>()?;
            let [q, k, v] = views;
            let (plan, output) = (call.plan(&views)?, self.output::<E>()?);
            let upstream = loss.upstream::<E>(&call)?;
            let grads = py.detach(|| plan.backward(q, k, v, output, upstream)).map_err(refused)?;
            gradients(py, call.learned(), grads)
        })
    }
}

pub(crate) type Gradients = (Vec<Option<Py<OwnedArray>>>, f64, f64);

/// The gradients by q, k and v, by each tensor that learns, known by its name and sizes, by the scale and by the temperature.
pub(crate) fn gradients<'l, E: ArrayElement>(
    py: Python<'_>,
    learned: impl Iterator<Item = (&'l str, &'l [usize])>,
    grads: Grads<E>,
) -> PyResult<Gradients> {
    let Grads {
        q,
        k,
        v,
        scale,
        temperature,
        mut bias,
        alibi,
        relative,
        sinks,
        centers,
        mut w,
        additive,
        ..
    } = grads;
    let mut found = vec![Some(own(q)), Some(own(k)), Some(own(v))];
    let (mut w_q, mut w_k, mut w_v) = (None, None, None);
    if let Some(additive) = additive {
        (w_q, w_k, w_v) = (Some(additive.w_q), additive.w_k, Some(additive.v));
    }
    for (name, shape) in learned {
        let list = |numbers: &Vec<E::Num>| Some(OwnedArray::new(numbers.clone(), shape));
        found.push(match name {
            "bias" => bias.take().map(own),
            "w" => w.take().map(own),
            "w_q" => w_q.take().map(own),
            "w_k" => w_k.take().map(own),
            "w_v" => w_v.take().map(own),
            "alibi" => list(&alibi),
            "relative" => list(&relative),
            "sinks" => list(&sinks),
            "centers" => list(&centers),
            other => {
                return Err(PyValueError::new_err(format!(
                    "no tensor of a call is called {other}"
                )));
            }
        });
    }
    let found = found.into_iter().map(|one| one.map(|one| Py::new(py, one)).transpose());
    Ok((found.collect::<PyResult<_>>()?, scale, temperature))
}
