//! The microscope: what is asked of weights, in JSON, and the arrays that answer.

use crate::array::{Array, OwnedArray, by_type, refused};
use crate::attention::SavedForward;
use crate::options::{Call, Described};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use regard::{AttentionView, Number};
use regard_scope::{Measure, MeasureOutput, Pool};
use serde::Deserialize;

/// What is looked at, and what is asked of it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Question {
    /// Item and query head; all where there is none.
    head: Option<[usize; 2]>,
    rows: Option<[usize; 2]>,
    every: Option<usize>,
    keys: Option<[usize; 2]>,
    /// The weights of some rows for some keys, themselves.
    tile: Option<[[usize; 2]; 2]>,
    entropy: bool,
    mean_distance: bool,
    col_sum: bool,
    top_k: Option<usize>,
    pooled: Option<(usize, usize, PoolAs)>,
    /// Masks as text, with the arrays of the call.
    mass: Vec<String>,
    /// Spans of keys.
    spans: Vec<[usize; 2]>,
    sink_mass: bool,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum PoolAs {
    Mean,
    Max,
    Sum,
}

/// The softmax statistics of a call: its saved forward pass, or its lse.
#[derive(Debug, FromPyObject)]
pub(crate) enum SoftmaxState {
    SavedForward(Py<SavedForward>),
    Lse(Array),
}

/// Answers a question about the weights of a call, by name.
#[pyfunction]
pub(crate) fn look<'py>(
    py: Python<'py>,
    call: Described,
    known: SoftmaxState,
    question: &str,
) -> PyResult<Bound<'py, PyDict>> {
    let call = Call::new(call)?;
    let question: Question = serde_json::from_str(question).map_err(refused)?;
    by_type!(call.dtype(), E => {
        let views = call.views::<E>()?;
        let [q, k, _] = views;
        let plan = call.plan(&views)?;
        let mut view = match &known {
            SoftmaxState::SavedForward(kept) => AttentionView::new(&plan, q, k, kept.get().output::<E>()?),
            SoftmaxState::Lse(lse) => AttentionView::from_lse(&plan, q, k, lse.list("lse")?),
        }
        .map_err(refused)?;
        if let Some([batch, head]) = question.head {
            view = view.head(batch, head).map_err(refused)?;
        }
        if let Some([start, end]) = question.rows {
            view = view.rows(start..end);
        }
        if let Some(step) = question.every {
            view = view.every(step).map_err(refused)?;
        }
        if let Some([start, end]) = question.keys {
            view = view.keys(start..end);
        }
        if call.is_packed() && question.head.is_none() {
            return Err(refused(
                "packed: items of different lengths have answers of different sizes; choose one with head(batch, head)",
            ));
        }
        answer(py, &call, &question, &view)
    })
}

fn answer<'py, N: crate::array::Named + Number>(
    py: Python<'py>,
    call: &Call,
    question: &Question,
    view: &AttentionView<'_, N>,
) -> PyResult<Bound<'py, PyDict>> {
    let dims = view.problem().dims();
    let heads = if question.head.is_some() { 1 } else { dims.batch * dims.heads.q };
    let found = PyDict::new(py);
    if let Some([rows, keys]) = question.tile {
        let weights =
            py.detach(|| view.tile(rows[0]..rows[1], keys[0]..keys[1])).map_err(refused)?;
        let within = |range: [usize; 2], n: usize| range[1].min(n).saturating_sub(range[0]);
        let [q_len, k_len] = match question.head {
            Some([batch, head]) => {
                let scope = view.problem().scope(batch, head);
                [scope.q_len, scope.k_len]
            }
            None => [dims.q_len, dims.k_len],
        };
        let shape = [heads, within(rows, q_len), within(keys, k_len)];
        found.set_item("tile", OwnedArray::new(weights, &shape))?;
    }
    let measure = measure(call, question)?;
    let measured = py.detach(|| measure.of(view)).map_err(refused)?;
    put(&found, question, measured, heads)?;
    Ok(found)
}

fn measure(call: &Call, question: &Question) -> PyResult<Measure> {
    let mut measure = Measure::new();
    if question.entropy {
        measure = measure.entropy();
    }
    if question.mean_distance {
        measure = measure.mean_distance();
    }
    if question.col_sum {
        measure = measure.col_sum();
    }
    if question.sink_mass {
        measure = measure.sink_mass();
    }
    if let Some(k) = question.top_k {
        measure = measure.top_k(k);
    }
    if let Some((rows, cols, pool)) = question.pooled {
        let pool = match pool {
            PoolAs::Mean => Pool::Mean,
            PoolAs::Max => Pool::Max,
            PoolAs::Sum => Pool::Sum,
        };
        measure = measure.pooled(rows, cols, pool);
    }
    for text in &question.mass {
        measure = measure.mass(call.mask(text)?);
    }
    Ok(measure.span_mass(question.spans.iter().map(|[start, end]| *start..*end)))
}

/// Numbers of each row, `[heads, rows]`.
fn by_row<N: crate::array::Named>(numbers: Vec<N>, heads: usize) -> OwnedArray {
    let rows = numbers.len().checked_div(heads).unwrap_or(0);
    OwnedArray::new(numbers, &[heads, rows])
}

fn put<N: crate::array::Named + Number>(
    found: &Bound<'_, PyDict>,
    question: &Question,
    measured: MeasureOutput<N>,
    heads: usize,
) -> PyResult<()> {
    let MeasureOutput {
        entropy,
        mean_distance,
        col_sum,
        sink_mass,
        top,
        pooled,
        masses,
        spans,
        ..
    } = measured;
    for (name, asked, numbers) in [
        ("entropy", question.entropy, entropy),
        ("mean_distance", question.mean_distance, mean_distance),
        ("col_sum", question.col_sum, col_sum),
        ("sink_mass", question.sink_mass, sink_mass),
    ] {
        if asked {
            found.set_item(name, by_row(numbers, heads))?;
        }
    }
    for (i, mass) in masses.into_iter().enumerate() {
        found.set_item(format!("mass {i}"), by_row(mass, heads))?;
    }
    if !question.spans.is_empty() {
        let rows = spans[0].len().checked_div(heads).unwrap_or(0);
        let count = spans.len();
        let of_row = |row: usize| spans.iter().map(move |mass| mass[row]);
        let masses: Vec<N> = (0..heads * rows).flat_map(of_row).collect();
        found.set_item("span_mass", OwnedArray::new(masses, &[heads, rows, count]))?;
    }
    if let Some(k) = question.top_k {
        let (mut keys, mut weights) = (Vec::new(), Vec::new());
        let all = top.rows().saturating_mul(k);
        let large =
            |_| refused(format!("top_k: {k} is out of range; the system has no memory for it"));
        keys.try_reserve_exact(all).map_err(large)?;
        weights.try_reserve_exact(all).map_err(large)?;
        for row in 0..top.rows() {
            let end = (row + 1) * k;
            keys.extend(top.keys(row).iter().map(|key| key.cast_signed() as i64));
            keys.resize(end, -1);
            weights.extend_from_slice(top.weights(row));
            weights.resize(end, N::default());
        }
        let shape = [heads, top.rows().checked_div(heads).unwrap_or(0), k];
        found.set_item("top_keys", OwnedArray::new(keys, &shape))?;
        found.set_item("top_weights", OwnedArray::new(weights, &shape))?;
    }
    if question.pooled.is_some() {
        let [rows, cols] = pooled.first().map_or([0; 2], |map| [map.rows, map.cols]);
        if pooled.iter().any(|map| [map.rows, map.cols] != [rows, cols]) {
            return Err(refused(
                "pooled: items of different lengths have maps of different sizes; ask for one head at a time",
            ));
        }
        let values: Vec<N> = pooled.into_iter().flat_map(|map| map.values).collect();
        found.set_item("pooled", OwnedArray::new(values, &[heads, rows, cols]))?;
    }
    Ok(())
}
