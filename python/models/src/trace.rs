//! The attention of one text.

use crate::refused;
use crate::statistics::{Head, Question, weights};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use regard::Machine;
use regard_scope::Site;
use std::path::PathBuf;

/// What every head looked at.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct Trace(pub(crate) regard_scope::Trace);

#[pymethods]
impl Trace {
    /// Kind, layer and head of every head.
    fn sites(&self) -> Vec<(String, usize, usize)> {
        self.0.sites().into_iter().map(|site| (site.kind, site.layer, site.head)).collect()
    }

    /// The tokens of the queries and of the keys of a layer.
    fn tokens(&self, kind: String, layer: usize) -> PyResult<(Vec<String>, Vec<String>)> {
        let site = Site { layer, kind, head: 0 };
        let layer = self.0.layer(&site).map_err(refused)?;
        let [q_len, k_len] = layer.data.size();
        let labels = |axis: &str, n: usize| {
            let labels = self.0.labels(axis);
            (0..n).map(|i| labels.label(i)).collect()
        };
        Ok((labels(&layer.rows, q_len), labels(&layer.cols, k_len)))
    }

    /// The weights of a head: queries, keys, and f32 numbers one row after another.
    fn weights<'py>(
        &self,
        py: Python<'py>,
        kind: String,
        layer: usize,
        head: usize,
    ) -> PyResult<(usize, usize, Bound<'py, PyBytes>)> {
        let site = Site { layer, kind, head };
        let data = &self.0.layer(&site).map_err(refused)?.data;
        let [q_len, k_len] = data.size();
        let weights =
            py.detach(|| weights(Machine::detect(), data, head, 0..q_len)).map_err(refused)?;
        Ok((q_len, k_len, floats(py, &weights)))
    }

    /// Statistics of each head.
    fn statistics(&self, py: Python<'_>, question: &str) -> PyResult<Vec<Head>> {
        let question: Question = serde_json::from_str(question).map_err(refused)?;
        py.detach(|| question.of(&self.0)).map_err(refused)
    }

    /// Writes a trace file.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| self.0.save(&path)).map_err(refused)
    }
}

/// The bytes of f32 numbers, in the order of this machine.
pub(crate) fn floats<'py>(py: Python<'py>, numbers: &[f32]) -> Bound<'py, PyBytes> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_ne_bytes()).collect();
    PyBytes::new(py, &bytes)
}
