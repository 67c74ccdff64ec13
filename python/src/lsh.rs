//! Attention among rows and keys that hashing puts near each other.

use crate::array::{Array, OwnedArray, by_type, refused};
use crate::attention::{own, tensor};
use crate::options::{ArrayElement, Call, Described};
use pyo3::exceptions::{PyIndexError, PyTypeError};
use pyo3::prelude::*;
use regard::Grads;
use regard::plan::OutputGrads;
use regard::problem::Dims;
use regard_approx::{Buckets, LshAttention, LshOutput};
use std::any::Any;
use std::sync::Arc;

/// Rounds, keys of a bucket, whether rows see only what came before, the seed and the scale.
#[derive(Debug, FromPyObject)]
pub(crate) struct How(usize, usize, bool, u64, Option<f64>);

impl How {
    fn attention(&self) -> LshAttention {
        let Self(rounds, bucket_size, causal, seed, scale) = *self;
        let lsh = LshAttention::new().rounds(rounds).bucket_size(bucket_size).seed(seed);
        let lsh = if causal { lsh.causal() } else { lsh };
        scale.map_or(lsh, |scale| lsh.scale(scale))
    }
}

/// What a call has returned.
#[pyclass(frozen, module = "regard._regard")]
#[derive(Debug)]
pub(crate) struct SavedLsh {
    #[pyo3(get)]
    out: Py<OwnedArray>,
    #[pyo3(get)]
    lse: Py<OwnedArray>,
    buckets: Buckets,
    /// An [`LshOutput`] of the type of the call.
    found: Arc<dyn Any + Send + Sync>,
}

impl SavedLsh {
    fn found<E: ArrayElement>(&self) -> PyResult<&LshOutput<E>> {
        let other = || PyTypeError::new_err("this output is not that of a call with this type");
        self.found.downcast_ref().ok_or_else(other)
    }
}

/// Attention by hashing; of the call's options only threads count.
#[pyfunction]
pub(crate) fn lsh(py: Python<'_>, call: Described, how: How) -> PyResult<SavedLsh> {
    let (call, lsh) = (Call::new(call)?, how.attention());
    by_type!(call.dtype(), E => {
        let ([q, k, v], machine) = (call.views::<E>()?, call.machine()?);
        let found = py.detach(|| lsh.forward(machine, q, k, v)).map_err(refused)?;
        let found = Arc::new(found);
        let (out, lse) = (&found.output.out, &found.output.lse);
        let [batch, heads, len, _] = out.shape().to_array();
        let lse = OwnedArray::part(found.clone(), lse, &[batch, heads, len], &[0, 1, 2]);
        let (out, lse) = (Py::new(py, tensor(found.clone(), out))?, Py::new(py, lse)?);
        Ok(SavedLsh { out, lse, buckets: found.buckets.clone(), found })
    })
}

#[pymethods]
impl SavedLsh {
    /// The gradients by q, k and v of the call that this is the output of.
    fn backward(
        &self,
        py: Python<'_>,
        call: Described,
        how: How,
        d_out: Array,
        d_lse: Option<Array>,
    ) -> PyResult<[OwnedArray; 3]> {
        let (call, lsh) = (Call::new(call)?, how.attention());
        by_type!(call.dtype(), E => {
            let ([q, k, v], machine) = (call.views::<E>()?, call.machine()?);
            let mut upstream = OutputGrads::new(call.like_out(&d_out, "d_out")?);
            if let Some(d_lse) = &d_lse {
                upstream = upstream.lse(d_lse.list("d_lse")?);
            }
            let found = self.found::<E>()?;
            let back = || lsh.backward(machine, q, k, v, found, upstream);
            let Grads { q, k, v, .. } = py.detach(back).map_err(refused)?;
            Ok([own(q), own(k), own(v)])
        })
    }

    /// Of all mass and of that of the largest weights, what the average and the worst row kept; and how many rows that are.
    fn recall(
        &self,
        py: Python<'_>,
        call: Described,
        top: usize,
        rows: usize,
    ) -> PyResult<([f64; 2], [f64; 2], usize)> {
        let call = Call::new(call)?;
        by_type!(call.dtype(), E => {
            let ([q, k, _], machine) = (call.views::<E>()?, call.machine()?);
            let found = self.found::<E>()?;
            let recall = py.detach(|| found.recall(machine, q, k, top, rows)).map_err(refused)?;
            let (mass, top) = (recall.mass, recall.top);
            Ok(([mass.mean, mass.worst], [top.mean, top.worst], recall.rows))
        })
    }

    /// Whether a row of an item's head has met a key.
    fn is_visible(&self, batch: usize, head: usize, row: usize, key: usize) -> PyResult<bool> {
        let Dims { batch: items, heads, q_len, k_len, .. } = self.buckets.dims();
        let places = [
            ("item", batch, items),
            ("head", head, heads.q),
            ("row", row, q_len),
            ("key", key, k_len),
        ];
        for (axis, found, n) in places {
            if found >= n {
                return Err(PyIndexError::new_err(format!("{axis} {found}: there are {n}")));
            }
        }
        Ok(self.buckets.is_visible(batch, head, row, key))
    }
}
