//! The case table: checked against the definition, and exported row by row for tests of the front ends.

use crate::array::{OwnedArray, refused};
use crate::attention::{Gradients, SavedForward, gradients};
use crate::options::{ArrayElement, Ranges};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use regard::problem::{Align, Dims, Normalizer};
use regard::{Machine, Mask, Plan, Problem, bf16, f16};
use regard_scope::parse_mask;
use regard_testkit::cases::SimilarityCase;
use regard_testkit::scores::ScoreOption;
use regard_testkit::{AttentionKind, Case, Data, Dtype, Report, cases, data};
use serde_json::{Map, Value, json};
use std::any::Any;
use std::sync::Arc;

/// Rows that are run between two looks at Python: whether it wants to stop, and how it is told of progress.
const AT_ONCE: usize = 16;

/// Buckets and largest distance of T5's bias in the table.
const T5: [usize; 2] = [8, 20];

/// Runs the table on this machine, or those of its rows whose names have `part` in them. `progress` hears of rows done and rows
/// in all. What was found is JSON; the second is for people.
#[pyfunction]
pub(crate) fn check(
    py: Python<'_>,
    part: &str,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<(String, String)> {
    let cases = cases().into_iter().filter(|case| case.to_string().contains(part));
    let cases: Vec<Case> = cases.collect();
    let mut report = Report::default();
    for some in cases.chunks(AT_ONCE) {
        report.join(py.detach(|| regard_testkit::check(some, &mut |_, _| {})));
        py.check_signals()?;
        if let Some(progress) = &progress {
            progress.call1((report.rows, cases.len()))?;
        }
    }
    Ok((in_json(&report).to_string(), report.to_string()))
}

fn in_json(report: &Report) -> Value {
    let groups = report.groups.iter().map(|(name, group)| {
        let worst = group.worst;
        let found = json!({
            "rows": group.rows, "case": group.case,
            "out": worst.out, "lse": worst.lse, "entropy": worst.entropy, "grads": worst.grads,
        });
        (name.clone(), found)
    });
    let failures = report.failures.iter().map(|failure| {
        json!({
            "case": failure.case, "isa": failure.isa,
            "threads": failure.threads, "why": failure.why,
        })
    });
    json!({
        "rows": report.rows,
        "isas": report.isas,
        "groups": groups.collect::<Map<_, _>>(),
        "failures": failures.collect::<Vec<_>>(),
    })
}

/// All rows of the table that are attention.
#[pyclass(frozen, module = "regard._regard")]
#[derive(Debug)]
pub(crate) struct Table(Vec<Case>);

#[pymethods]
impl Table {
    #[new]
    fn new() -> Self {
        Self(cases().into_iter().filter(|case| case.attention == AttentionKind::Exact).collect())
    }

    fn names(&self) -> Vec<String> {
        self.0.iter().map(ToString::to_string).collect()
    }

    /// Whether a row has a score rule written in Rust, which no front end accepts.
    fn has_rule(&self, row: usize) -> PyResult<bool> {
        Ok(self.case(row)?.scores.contains(&ScoreOption::Custom))
    }

    /// A row with its data and what the engine makes of it.
    fn row(&self, py: Python<'_>, row: usize) -> PyResult<Row> {
        let case = self.case(row)?;
        match case.dtype {
            Dtype::F32 => Row::new::<f32>(py, case),
            Dtype::F64 => Row::new::<f64>(py, case),
            Dtype::F16 => Row::new::<f16>(py, case),
            Dtype::Bf16 => Row::new::<bf16>(py, case),
        }
    }
}

impl Table {
    fn case(&self, row: usize) -> PyResult<&Case> {
        let n = self.0.len();
        self.0.get(row).ok_or_else(|| PyIndexError::new_err(format!("row {row}: there are {n}")))
    }
}

/// A row: a call as the front ends take it, what a loss says of it, and the engine's own answers, both ways.
#[pyclass(frozen, module = "regard._regard")]
#[derive(Debug)]
pub(crate) struct Row {
    /// Options that are numbers or words, in JSON.
    #[pyo3(get)]
    options: String,
    /// Tensors that learn, by name; `ranges`, if they are the mask.
    #[pyo3(get)]
    arrays: Vec<(&'static str, Py<OwnedArray>)>,
    /// q, k and v, as they lie in memory.
    #[pyo3(get)]
    tensors: Vec<Py<OwnedArray>>,
    /// By out, lse and the entropy; the latter two if the loss depends on them.
    #[pyo3(get)]
    output_grads: Vec<Option<Py<OwnedArray>>>,
    #[pyo3(get)]
    saved: Py<SavedForward>,
    /// As those of a call, by `arrays` but for the mask.
    #[pyo3(get)]
    gradients: Gradients,
}

impl Row {
    fn new<E: ArrayElement>(py: Python<'_>, case: &Case) -> PyResult<Self> {
        let data = Arc::new(py.detach(|| Data::<E>::new(case)));
        let mut problem = data.problem(case);
        let mask = DoorMask::new(case, &problem)?;
        if let (DoorMask::Ranges(ranges), true) = (&mask, NESTED.contains(&case.mask.name)) {
            problem = problem.mask(Mask::custom(ranges.clone()));
        }
        let (output, grads) = py
            .detach(|| {
                let (q, k, v) = data.inputs();
                let plan = Plan::new(problem.clone(), Machine::detect())?;
                let output = plan.forward(q, k, v)?;
                let grads = plan.backward(q, k, v, &output, data.output_grads(case))?;
                Ok((output, grads))
            })
            .map_err(|error: regard::Error| refused(error))?;
        let learned = learned(case, &data);
        let sizes: Vec<(&str, Vec<usize>)> =
            learned.iter().map(|(name, array)| (*name, array.shape().to_vec())).collect();
        let sizes = sizes.iter().map(|(name, shape)| (*name, &shape[..]));
        let gradients = gradients(py, sizes, grads)?;
        let ranges = match &mask {
            DoorMask::Ranges(ranges) => Some(("ranges", ranges.owned())),
            DoorMask::Text(_) => None,
        };
        let arrays = learned.into_iter().chain(ranges);
        let arrays = arrays.map(|(name, array)| Ok((name, Py::new(py, array)?)));
        let tensors = [&data.q, &data.k, &data.v].map(|stored| Py::new(py, strided(&data, stored)));
        let Dims { batch, heads, q_len, .. } = case.dims;
        let by_row = |numbers: &[E::Num], given: bool| {
            let shape = [batch, heads.q, q_len];
            let array = || Py::new(py, OwnedArray::part(data.clone(), numbers, &shape, &[0, 1, 2]));
            given.then(array).transpose()
        };
        let [d_lse, d_entropy] = &data.d_rows;
        let has_lse = case.normalizer != Normalizer::Sparsemax;
        Ok(Self {
            options: options(case, &mask).to_string(),
            arrays: arrays.collect::<PyResult<_>>()?,
            tensors: tensors.into_iter().collect::<PyResult<_>>()?,
            output_grads: vec![
                Some(Py::new(py, strided(&data, &data.d_out))?),
                by_row(d_lse, has_lse)?,
                by_row(d_entropy, case.entropy)?,
            ],
            saved: Py::new(py, SavedForward::new(py, output)?)?,
            gradients,
        })
    }
}

/// A tensor as it lies in memory. The engine tells no strides; where rows lie does.
fn strided<E: ArrayElement>(owner: &Arc<Data<E>>, stored: &data::TestTensor<E>) -> OwnedArray {
    let shape = stored.shape.to_array();
    let view = stored.view();
    let address = |[b, h, i]: [usize; 3]| view.row(b, h, i).as_ptr() as usize;
    let mut strides = [0, 0, 0, 1];
    for axis in (0..3).filter(|axis| shape[*axis] > 1 && !shape.contains(&0)) {
        let mut next = [0; 3];
        next[axis] = 1;
        strides[axis] = (address(next) - address([0; 3])) / size_of::<E>();
    }
    let owner: Arc<dyn Any + Send + Sync> = owner.clone();
    OwnedArray::strided(owner, &stored.data, &shape, &strides)
}

/// The tensors of a case that have gradients, beside q, k and v.
fn learned<E: ArrayElement>(case: &Case, data: &Arc<Data<E>>) -> Vec<(&'static str, OwnedArray)> {
    let list = |numbers: &[E::Num], shape: &[usize]| {
        let axes: Vec<usize> = (0..shape.len()).collect();
        OwnedArray::part(data.clone(), numbers, shape, &axes)
    };
    let Dims { batch, heads, q_len, .. } = case.dims;
    let mut found = Vec::new();
    for option in &case.scores {
        found.push(match option {
            ScoreOption::Bias { .. } => ("bias", strided(data, &data.bias)),
            ScoreOption::Alibi => ("alibi", list(&data.slopes, &[heads.q])),
            ScoreOption::Sinks => ("sinks", list(&data.sinks, &[heads.q])),
            ScoreOption::Clipped(reach) => {
                ("relative", list(&data.table, &[2 * reach + 1, heads.q]))
            }
            ScoreOption::T5 { .. } => ("relative", list(&data.table, &[T5[0], heads.q])),
            _ => continue,
        });
    }
    if case.reach.is_some() {
        found.push(("centers", list(&data.centers, &[batch, heads.q, q_len])));
    }
    let [w_k, w_v] = &data.hidden;
    match case.similarity {
        SimilarityCase::Dot | SimilarityCase::Distance => {}
        SimilarityCase::General | SimilarityCase::GeneralPerHead => {
            found.push(("w", strided(data, &data.w)));
        }
        SimilarityCase::Additive | SimilarityCase::AdditivePerHead => {
            found.push(("w_q", strided(data, &data.w)));
            found.push(("w_k", strided(data, w_k)));
            found.push(("w_v", strided(data, w_v)));
        }
        SimilarityCase::AdditiveProjected => {
            found.push(("w_q", strided(data, &data.w)));
            found.push(("w_v", strided(data, w_v)));
        }
    }
    found
}

/// Masks that the front ends take as text. Some walk along diagonals, and so add up in another order than their ranges would.
const TEXTS: [(&str, &str); 6] = [
    ("full", "full"),
    ("causal", "causal"),
    ("dilated_3", "dilated 3"),
    ("dilated_11_causal", "dilated 11 & causal"),
    ("strided", "strided 7"),
    ("strided_causal", "strided 5 & causal"),
];

/// Masks with such diagonals among other rules, and key lists, whose rows are computed in smaller tiles: the engine is asked what it makes of their ranges.
const NESTED: [&str; 7] = [
    "nested_sparse",
    "nested_everything",
    "keys",
    "keys_per_block",
    "keys_per_key_head",
    "keys_per_both_causal",
    "keys_or_window",
];

/// The mask of a case as a front end takes it.
enum DoorMask {
    Text(&'static str),
    Ranges(Ranges),
}

impl DoorMask {
    fn new<E: ArrayElement>(case: &Case, problem: &Problem<'_, E>) -> PyResult<Self> {
        let Dims { batch, heads, q_len, .. } = case.dims;
        let seen = |mask: &Mask| {
            let heads = (0..batch).flat_map(|b| (0..heads.q).map(move |h| (b, h)));
            let row = |(b, h)| (0..q_len).map(move |row| (problem.scope(b, h), row));
            heads.flat_map(row).map(|(scope, row)| mask.visible(&scope, row)).collect::<Vec<_>>()
        };
        let Some((name, text)) = TEXTS.iter().find(|(name, _)| *name == case.mask.name) else {
            return Ok(Self::Ranges(Ranges::padded(seen(&problem.mask), [batch, heads.q, q_len])));
        };
        if seen(&parse_mask(text).map_err(refused)?) != seen(&problem.mask) {
            return Err(refused(format!("the mask {name} of the table is not {text}")));
        }
        Ok(Self::Text(text))
    }
}

/// `regard_testkit::scores::interventions` as a front end takes them; other ones would give other bits than the engine.
fn interventions(drops: bool) -> Value {
    let mut all = vec![
        json!({"heads": [0], "rows": [1, 70], "keys": [2, 67], "times": 2.5}),
        json!({"items": [0], "rows": [5, 1_000_000], "keys": [0, 3], "add": -1.25}),
        json!({"heads": [1], "keys": [1, 2], "times": 0.3}),
    ];
    if drops {
        all.push(json!({"rows": [2, 9], "keys": [1, 66], "drop": true}));
        all.push(json!({"heads": [0], "rows": [3, 4], "times": 0.0}));
        all.push(json!({"items": [1], "rows": [4, 5], "keys": [1, 5], "add": 3.0}));
    }
    all.into()
}

/// The options of a case as keywords of a front end, but for arrays.
fn options(case: &Case, mask: &DoorMask) -> Value {
    let mut options = Map::new();
    let mut put = |name: &str, value: Value| options.insert(name.into(), value);
    if let DoorMask::Text(text) = mask {
        put("mask", (*text).into());
    }
    match case.align {
        Align::End => put("align", "end".into()),
        Align::Start => put("align", "start".into()),
        Align::Offset(at) => put("align", at.into()),
    };
    for option in &case.scores {
        match option {
            ScoreOption::Scale(x) => put("scale", (*x).into()),
            ScoreOption::Temperature(x) => put("temperature", (*x).into()),
            ScoreOption::Softcap(x) => put("softcap", (*x).into()),
            ScoreOption::Clipped(reach) => put("relative", json!(["clipped", reach])),
            ScoreOption::T5 { bidirectional } => {
                put("relative", json!(["t5", T5[1], bidirectional]))
            }
            ScoreOption::Interventions(drops) => put("interventions", interventions(*drops)),
            _ => None,
        };
    }
    put("similarity", case.similarity.name().split('_').next().into());
    put("normalizer", case.normalizer.to_string().into());
    if let Some(rate) = case.dropout {
        put("dropout", rate.into());
        put("seed", json!([case.seed, 3]));
    }
    if let Some(precision) = case.precision {
        put("precision", precision.name().into());
    }
    put("entropy", case.entropy.into());
    put("reach", case.reach.into());
    Value::Object(options)
}
