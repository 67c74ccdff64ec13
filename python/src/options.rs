//! One call as Python describes it: options in JSON, and arrays that they name.

use crate::array::{Array, Named, OwnedArray, refused};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use regard::machine::Precision;
use regard::mask::{Bits, KeyLists, MaskRule};
use regard::plan::ScratchPool;
use regard::problem::{Additive, Align, Dropout, Local, Normalizer, Scope, Similarity};
use regard::score::{Intervention, RelativeBias};
use regard::{Element, Isa, Machine, Mask, Plan, Problem, Score, Shape, View};
use regard_scope::parse_mask_with;
use serde::Deserialize;
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// A type that tensors are stored in, known to Python with its number.
pub(crate) trait ArrayElement: Element<Num: Named> + Named {}
impl<E: Element<Num: Named> + Named> ArrayElement for E {}

/// A call, from Python: options, q k and v (v may be missing where weights are all that is asked for), tensors that have gradients,
/// and arrays that have none. The options name the latter two in their order.
#[derive(Clone, Debug, FromPyObject)]
pub(crate) struct Described(String, Vec<Array>, Vec<Array>, Vec<Array>);

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Options {
    /// As text; `$i` is the mask that array `i` of those without gradients makes.
    mask: String,
    align: AlignAs,
    scale: Option<f64>,
    temperature: f64,
    softcap: Option<f64>,
    interventions: Vec<InterventionAs>,
    relative: Option<Relative>,
    /// Of local attention, whose centers are a tensor.
    reach: Option<usize>,
    /// `dot`, `general`, `distance`, `additive`
    similarity: String,
    /// `softmax`, `top K`, `hard`, `sampled SEED`, `sparsemax`
    normalizer: String,
    dropout: f64,
    entropy: bool,
    /// `strict`, `full`, `high`
    precision: Option<String>,
    threads: Option<usize>,
    isa: Option<String>,
    learned: Vec<String>,
    held: Vec<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum AlignAs {
    Name(String),
    At(i64),
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Relative {
    Clipped { reach: usize },
    T5 { max_distance: usize, bidirectional: bool },
}

/// What is added to the scores of some edges, nothing if they are dropped; and batch items, heads, queries and keys.
type InterventionAs = (Option<f64>, [Option<[usize; 2]>; 4]);

fn intervention((bias, ranges): &InterventionAs) -> Intervention {
    let [items, heads, rows, keys] =
        ranges.map(|range| range.map_or(0..usize::MAX, |[start, end]| start..end));
    let rule = bias.map_or_else(Intervention::drop, Intervention::add);
    rule.items(items).heads(heads).rows(rows).keys(keys)
}

impl Default for Options {
    fn default() -> Self {
        Self {
            mask: "full".into(),
            align: AlignAs::Name("end".into()),
            scale: None,
            temperature: 1.0,
            softcap: None,
            interventions: Vec::new(),
            relative: None,
            reach: None,
            similarity: "dot".into(),
            normalizer: "softmax".into(),
            dropout: 0.0,
            entropy: false,
            precision: None,
            threads: None,
            isa: None,
            learned: Vec::new(),
            held: Vec::new(),
        }
    }
}

/// The process that has loaded this module.
pub(crate) static LOADED_BY: LazyLock<u32> = LazyLock::new(std::process::id);

/// A call whose text has been read.
#[derive(Debug)]
pub(crate) struct Call {
    options: Options,
    tensors: Vec<Array>,
    learned: Vec<Array>,
    mask: Mask,
    /// The masks that arrays make, for more text that speaks of them.
    given: Vec<Mask>,
    seed: [u64; 2],
    q_offsets: Option<Vec<usize>>,
    k_offsets: Option<Vec<usize>>,
}

impl Call {
    pub(crate) fn new(call: Described) -> PyResult<Self> {
        if !(2..=3).contains(&call.1.len()) {
            return Err(PyValueError::new_err(format!(
                "q, k and v: {} tensors are given",
                call.1.len()
            )));
        }
        let keys = from_last(&call.1[1], 1);
        Self::over(call, keys)
    }

    /// A call whose keys need not lie in a tensor: so many, or as many as the item with the most of them has.
    pub(crate) fn over(
        Described(text, tensors, learned, held): Described,
        keys: usize,
    ) -> PyResult<Self> {
        let options: Options = serde_json::from_str(&text).map_err(refused)?;
        for (what, named, found) in
            [("learned", &options.learned, &learned), ("held", &options.held, &held)]
        {
            if named.len() != found.len() {
                let (n, m) = (named.len(), found.len());
                return Err(PyValueError::new_err(format!(
                    "{what}: {n} arrays are named and {m} are given"
                )));
            }
        }
        let Some(q) = tensors.first() else {
            return Err(PyValueError::new_err("q: no tensor is given"));
        };
        let array = |name: &str| {
            options.held.iter().position(|held| held == name).map(|i| held[i].counts(name))
        };
        let (q_offsets, k_offsets) =
            (array("q_offsets").transpose()?, array("k_offsets").transpose()?);
        let seed = match options.held.iter().position(|name| name == "seed") {
            Some(i) => seed(&held[i])?,
            None => [0; 2],
        };
        let scores = scores(q, q_offsets.as_deref(), k_offsets.as_deref(), keys);
        let given =
            options.held.iter().enumerate().map(|(i, name)| given(name, &held[i..], scores));
        let given = given.collect::<PyResult<Vec<_>>>()?;
        let mask = parse_mask_with(&options.mask, &given).map_err(refused)?;
        Ok(Self { options, tensors, learned, mask, given, seed, q_offsets, k_offsets })
    }

    pub(crate) fn dtype(&self) -> &str {
        self.tensors[0].dtype()
    }

    /// Names of the tensors that have gradients, in their order.
    pub(crate) fn learned(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.options.learned.iter().map(String::as_str).zip(self.learned.iter().map(Array::shape))
    }

    /// More text that may speak of the arrays of this call.
    pub(crate) fn mask(&self, text: &str) -> PyResult<Mask> {
        parse_mask_with(text, &self.given).map_err(refused)
    }

    /// Whether items may have different lengths.
    pub(crate) fn is_packed(&self) -> bool {
        self.q_offsets.is_some() || self.k_offsets.is_some()
    }

    pub(crate) fn query<E: ArrayElement>(&self) -> PyResult<View<'_, E>> {
        self.tensors[0].view("q", self.q_offsets.as_deref())
    }

    /// q, k and v; k once more where there is no v.
    pub(crate) fn views<E: ArrayElement>(&self) -> PyResult<[View<'_, E>; 3]> {
        let k_offsets = self.k_offsets.as_deref();
        let q = self.query()?;
        let k = self.tensors[1].view("k", k_offsets)?;
        let v = self.tensors.get(2).map_or(Ok(k), |v| v.view("v", k_offsets))?;
        Ok([q, k, v])
    }

    /// An array with the rows of q, as the output has.
    pub(crate) fn like_out<'a, E: ArrayElement>(
        &'a self,
        array: &'a Array,
        name: &str,
    ) -> PyResult<View<'a, E>> {
        array.view(name, self.q_offsets.as_deref())
    }

    pub(crate) fn problem<E: ArrayElement>(
        &self,
        [q, k, v]: &[View<'_, E>; 3],
    ) -> PyResult<Problem<'_, E>> {
        self.with_own_options(Problem::new(q, k, v))
    }

    /// A problem that has sizes only, with the options of this call.
    pub(crate) fn with_own_options<'c, E: ArrayElement>(
        &'c self,
        problem: Problem<'c, E>,
    ) -> PyResult<Problem<'c, E>> {
        self.with_options(&self.learned, problem)
    }

    /// The same with the tensors that have gradients elsewhere: without any, the problem borrows nothing.
    fn with_options<'c, E: ArrayElement>(
        &self,
        learned: &'c [Array],
        problem: Problem<'c, E>,
    ) -> PyResult<Problem<'c, E>> {
        let options = &self.options;
        let mut problem = problem
            .mask(self.mask.clone())
            .score(self.score(learned)?)
            .similarity(self.similarity(learned)?)
            .align(self.align()?)
            .normalizer(normalizer(&options.normalizer)?);
        problem.entropy = options.entropy;
        if options.dropout != 0.0 {
            problem = problem.dropout(Dropout::new(options.dropout, self.seed[0], self.seed[1]));
        }
        match (self.array(learned, "centers"), options.reach) {
            (Some(centers), Some(reach)) => {
                problem = problem.local(Local::new(centers.list("local")?, reach));
            }
            (None, None) => {}
            _ => return Err(PyValueError::new_err("local: centers and a reach go together")),
        }
        if let Some(name) = &options.precision {
            problem = problem.precision(one_of(
                "precision",
                name,
                &[Precision::Strict, Precision::Full, Precision::High],
                |p| p.name(),
            )?);
        }
        Ok(problem)
    }

    pub(crate) fn plan<E: ArrayElement>(&self, views: &[View<'_, E>; 3]) -> PyResult<Plan<'_, E>> {
        Plan::new(self.problem(views)?, self.machine()?).map_err(refused)
    }

    pub(crate) fn machine(&self) -> PyResult<Machine> {
        let machine = machine(self.options.threads)?;
        let Some(name) = &self.options.isa else { return Ok(machine) };
        Ok(machine.isa(one_of("isa", name, &Isa::available(), |isa| isa.name())?))
    }

    fn array<'c>(&self, learned: &'c [Array], name: &str) -> Option<&'c Array> {
        let i = self.options.learned.iter().position(|found| found == name)?;
        learned.get(i)
    }

    fn tensor<'c, E: ArrayElement>(
        &self,
        learned: &'c [Array],
        name: &str,
    ) -> PyResult<Option<View<'c, E>>> {
        self.array(learned, name).map(|array| array.view(name, None)).transpose()
    }

    fn score<'c, E: ArrayElement>(&self, learned: &'c [Array]) -> PyResult<Score<'c, E>> {
        let options = &self.options;
        let mut score = Score::new().temperature(options.temperature);
        if let Some(scale) = options.scale {
            score = score.scale(scale);
        }
        if let Some(cap) = options.softcap {
            score = score.softcap(cap);
        }
        if !options.interventions.is_empty() {
            let all: Vec<_> = options.interventions.iter().map(intervention).collect();
            score = score.interventions(all);
        }
        if let Some(bias) = self.tensor(learned, "bias")? {
            score = score.bias(bias);
        }
        if let Some(slopes) = self.array(learned, "alibi") {
            score = score.alibi(slopes.list("alibi")?);
        }
        if let Some(sinks) = self.array(learned, "sinks") {
            score = score.sinks(sinks.list("sinks")?);
        }
        match (self.array(learned, "relative"), options.relative) {
            (Some(table), Some(relative)) => {
                let (rows, numbers) =
                    (table.shape().first().copied().unwrap_or(0), table.list("relative")?);
                score = score.relative(match relative {
                    Relative::Clipped { reach } => RelativeBias::clipped(numbers, reach),
                    Relative::T5 { max_distance, bidirectional } => {
                        RelativeBias::t5(numbers, rows, max_distance, bidirectional)
                    }
                });
            }
            (None, None) => {}
            _ => {
                return Err(PyValueError::new_err("relative: a table and its buckets go together"));
            }
        }
        Ok(score)
    }

    fn similarity<'c, E: ArrayElement>(&self, learned: &'c [Array]) -> PyResult<Similarity<'c, E>> {
        let needed = |name: &str| {
            let missing = || {
                PyValueError::new_err(format!(
                    "similarity {}: {name} is missing",
                    self.options.similarity
                ))
            };
            self.tensor(learned, name)?.ok_or_else(missing)
        };
        match &self.options.similarity[..] {
            "dot" => Ok(Similarity::Dot),
            "distance" => Ok(Similarity::Distance),
            "general" => Ok(Similarity::General(needed("w")?)),
            "additive" => Ok(Similarity::Additive(Additive {
                w_q: needed("w_q")?,
                w_k: self.tensor(learned, "w_k")?,
                v: needed("w_v")?,
            })),
            other => Err(unknown("similarity", other, "dot, general, distance or additive")),
        }
    }

    fn align(&self) -> PyResult<Align> {
        match &self.options.align {
            AlignAs::At(offset) => Ok(Align::Offset(*offset)),
            AlignAs::Name(name) if name == "end" => Ok(Align::End),
            AlignAs::Name(name) if name == "start" => Ok(Align::Start),
            AlignAs::Name(name) => Err(unknown("align", name, "end, start or a whole number")),
        }
    }
}

/// A plan, what it was made from, and whether in a forked process.
struct Planned {
    options: String,
    dtype: &'static str,
    shapes: [Shape; 3],
    forked: bool,
    call: Arc<Call>,
    /// A `Plan<'static, E>`.
    plan: Arc<dyn Any + Send + Sync>,
}

/// Recent plans, the last one used last: planning takes as long as a small call.
static PLANS: Mutex<Vec<Planned>> = Mutex::new(Vec::new());
/// Scratch memory of all of them: with each token that is decoded keys are one more, and the plan is another.
static SCRATCH: LazyLock<(ScratchPool<f32>, ScratchPool<f64>)> = LazyLock::new(Default::default);
/// Plans that are kept: more than a model has kinds of layers.
const PLANS_MAX: usize = 32;

/// The plan of a call whose options have no arrays.
pub(crate) fn planned<E: ArrayElement>(
    options: &str,
    tensors: &[Array; 3],
    views: &[View<'_, E>; 3],
) -> PyResult<Arc<Plan<'static, E>>> {
    let (shapes, dtype) = (views.map(|view| view.shape()), <E as Named>::NAME);
    let forked = *LOADED_BY != std::process::id();
    let mut plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    let same = |of: &Planned| {
        of.shapes == shapes && of.dtype == dtype && of.forked == forked && of.options == options
    };
    if let Some(i) = plans.iter().rposition(same) {
        let found = plans.remove(i);
        let plan = found.plan.clone();
        plans.push(found);
        drop(plans);
        return plan.downcast().map_err(|_| refused("the plan is of another type"));
    }
    // The same options for other sizes need not be read again.
    let read = plans.iter().rfind(|of| of.options == options).map(|of| of.call.clone());
    drop(plans);
    let options = options.to_string();
    let call = match read {
        Some(call) => call,
        None => {
            let described = Described(options.clone(), tensors.to_vec(), Vec::new(), Vec::new());
            // Nothing may be read of tensors that are gone.
            Arc::new(Call { tensors: Vec::new(), ..Call::new(described)? })
        }
    };
    let problem = call.with_options(&[], Problem::new(&views[0], &views[1], &views[2]))?;
    let plan = Plan::new(problem, call.machine()?).map_err(refused)?;
    let scratch: [&dyn Any; 2] = [&SCRATCH.0, &SCRATCH.1];
    let scratch = scratch.into_iter().find_map(|pool| pool.downcast_ref::<ScratchPool<E::Num>>());
    let plan = Arc::new(match scratch {
        Some(pool) => plan.with_scratch(pool),
        None => plan,
    });
    let entry = Planned { options, dtype, shapes, forked, call, plan: plan.clone() };
    let mut plans = PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    if plans.len() == PLANS_MAX {
        plans.remove(0);
    }
    plans.push(entry);
    Ok(plan)
}

/// This machine, with so many threads if they are given.
pub(crate) fn machine(threads: Option<usize>) -> PyResult<Machine> {
    let machine = match threads {
        Some(0) => return Err(refused(regard::Error::Zero { option: "threads" })),
        Some(threads) => Machine::detect().threads(threads),
        None => Machine::detect(),
    };
    // The threads of a process stay behind when it forks: a child that waited for them would wait forever.
    Ok(if *LOADED_BY == std::process::id() { machine } else { machine.threads(1) })
}

fn unknown(option: &str, found: &str, known: &str) -> PyErr {
    PyValueError::new_err(format!("{option}: expected {known}, found {found:?}"))
}

fn one_of<T: Copy>(
    option: &str,
    name: &str,
    all: &[T],
    name_of: fn(T) -> &'static str,
) -> PyResult<T> {
    let names = || all.iter().map(|one| name_of(*one)).collect::<Vec<_>>().join(", ");
    all.iter()
        .copied()
        .find(|one| name_of(*one) == name)
        .ok_or_else(|| unknown(option, name, &names()))
}

fn normalizer(text: &str) -> PyResult<Normalizer> {
    let known = "softmax, top-K, hard, sampled-SEED or sparsemax";
    let wrong = || unknown("normalizer", text, known);
    match text.split_once('-') {
        None if text == "softmax" => Ok(Normalizer::Softmax),
        None if text == "hard" => Ok(Normalizer::Hard),
        None if text == "sparsemax" => Ok(Normalizer::Sparsemax),
        Some(("top", k)) => Ok(Normalizer::TopK(k.parse().map_err(|_| wrong())?)),
        Some(("sampled", seed)) => {
            Ok(Normalizer::Sampled { seed: seed.parse().map_err(|_| wrong())? })
        }
        _ => Err(wrong()),
    }
}

/// The size of an axis, counted from the last.
fn from_last(array: &Array, back: usize) -> usize {
    array.shape().iter().rev().nth(back).copied().unwrap_or(1)
}

/// Batch, query heads, queries and keys, which arrays for single rows must fit; none of those that packed items do not share.
type Scores = (usize, usize, Option<usize>, Option<usize>);

fn scores(
    q: &Array,
    q_offsets: Option<&[usize]>,
    k_offsets: Option<&[usize]>,
    keys: usize,
) -> Scores {
    let items = |offsets: &[usize]| offsets.len().saturating_sub(1);
    let keys = k_offsets.is_none().then_some(keys);
    match q_offsets {
        Some(offsets) => (items(offsets), from_last(q, 1), None, keys),
        None => (from_last(q, 3), from_last(q, 2), Some(from_last(q, 1)), keys),
    }
}

fn seed(array: &Array) -> PyResult<[u64; 2]> {
    let both: [i64; 2] = array
        .list("seed")?
        .try_into()
        .map_err(|_| unknown("seed", "another number of them", "seed and offset"))?;
    Ok(both.map(i64::cast_unsigned))
}

/// The mask that an array makes; all, where it is not one of a mask.
fn given(name: &str, arrays: &[Array], scores: Scores) -> PyResult<Mask> {
    let array = &arrays[0];
    // The name has the number of rows that share a list.
    if let Some(row_block) = name.strip_prefix("keys ").and_then(|n| n.parse().ok()) {
        return key_lists(array, row_block, scores);
    }
    let documents = |array: &Array| -> PyResult<Vec<u32>> {
        let ids = array.counts(name)?.into_iter().map(u32::try_from).collect::<Result<_, _>>();
        ids.map_err(|_| unknown(name, "a larger one", "documents below 2^32"))
    };
    Ok(match name {
        "lengths" => Mask::lengths(&array.counts(name)?),
        "spans" => Mask::spans(&ranges(array, name)?),
        "segments" => Mask::segments(&documents(array)?),
        "segments_q" => match arrays.get(1) {
            Some(keys) => Mask::segments_between(&documents(array)?, &documents(keys)?),
            None => {
                return Err(unknown(
                    name,
                    "none",
                    "the documents of the keys behind those of the rows",
                ));
            }
        },
        "global" => Mask::global(&array.counts(name)?),
        "tree" => tree(array)?,
        "bits" => bits(array, scores)?,
        "ranges" => Mask::custom(Ranges::new(array, scores)?),
        "segments_k" | "q_offsets" | "k_offsets" | "seed" => Mask::full(),
        other => {
            return Err(unknown("held", other, "an array that a mask, packing or dropout needs"));
        }
    })
}

/// Parents of draft tokens, `[tokens]` or `[batch or 1, tokens]`: -1 is none.
fn tree(array: &Array) -> PyResult<Mask> {
    let parent = |x: &i64| match *x {
        -1 => Ok(None),
        x => usize::try_from(x).map(Some).map_err(|_| {
            PyValueError::new_err(format!(
                "tree: parent {x} is not usable; give the index of a token, or -1 for none"
            ))
        }),
    };
    let parents = array.list::<i64>("tree")?.iter().map(parent).collect::<PyResult<Vec<_>>>()?;
    match *array.shape() {
        [_] => Ok(Mask::tree(&parents)),
        [batch, tokens] => {
            let trees: Vec<_> = (0..batch).map(|b| &parents[b * tokens..][..tokens]).collect();
            Ok(Mask::trees(&trees))
        }
        _ => Err(PyValueError::new_err(format!(
            "tree: expected [tokens] or [batch or 1, tokens], found {:?}",
            array.shape()
        ))),
    }
}

/// Lists of keys `[batch or 1, heads or a divisor of them, rows or blocks of them, n]`, padded with -1.
fn key_lists(array: &Array, row_block: usize, (_, heads, ..): Scores) -> PyResult<Mask> {
    let &[batch, own_heads, rows, n] = array.shape() else {
        return Err(PyValueError::new_err(format!(
            "keys: expected [batch or 1, heads or 1, rows, n], found {:?}",
            array.shape()
        )));
    };
    let mut lists = Vec::with_capacity(batch * own_heads * rows);
    let all = array.list::<i64>("keys")?;
    for i in 0..batch * own_heads * rows {
        let list = all[i * n..][..n].iter().filter(|key| **key != -1);
        let list = list.map(|key| usize::try_from(*key)).collect::<Result<Vec<_>, _>>();
        lists.push(list.map_err(|_| {
            PyValueError::new_err(
                "keys: a list has a number below -1; give indices of keys, and -1 for none",
            )
        })?);
    }
    let lists = KeyLists::new(&lists, [batch, own_heads, rows]).map_err(refused)?;
    let whole = own_heads > 0 && heads.is_multiple_of(own_heads);
    let head_block = if whole { (heads / own_heads).max(1) } else { 1 };
    Ok(Mask::keys(lists.row_block(row_block).head_block(head_block)))
}

fn ranges(array: &Array, name: &str) -> PyResult<Vec<Range<usize>>> {
    if array.shape().last() != Some(&2) {
        return Err(PyValueError::new_err(format!(
            "{name}: expected [.., 2], where ranges begin and end, found {:?}",
            array.shape()
        )));
    }
    Ok(array.counts(name)?.chunks_exact(2).map(|pair| pair[0]..pair[1].max(pair[0])).collect())
}

/// Batch, heads and queries of a mask for single rows: each whole, or 1 and so for all.
fn fit(name: &str, found: &[usize], (batch, heads, rows, _): Scores) -> PyResult<()> {
    let axes = [("batch", batch), ("heads", heads), ("queries", rows.unwrap_or(1))];
    for ((axis, of), n) in axes.into_iter().zip(found) {
        if *n != of && *n != 1 {
            let packed = if axis == "queries" && rows.is_none() { ", for q is packed" } else { "" };
            return Err(PyValueError::new_err(format!(
                "{axis}: {name} has {n}, the scores have {of}; give as many, or 1 for all{packed}"
            )));
        }
    }
    Ok(())
}

/// Booleans `[batch or 1, heads or 1, q_len or 1, k_len]`: bits, or, where all rows are alike, ranges.
fn bits(array: &Array, scores: Scores) -> PyResult<Mask> {
    let shape = array.shape();
    let &[batch, heads, rows, keys] = shape else {
        return Err(PyValueError::new_err(format!(
            "mask: expected [batch or 1, heads or 1, q_len or 1, k_len], found {shape:?}"
        )));
    };
    fit("the mask", &shape[..3], scores)?;
    let visible: Vec<bool> = array.list::<u8>("mask")?.iter().map(|byte| *byte != 0).collect();
    let Some(of) = scores.3 else {
        return Err(PyValueError::new_err(
            "mask: packed sequences have no common axis of keys; give masks.ranges, or call for each",
        ));
    };
    if keys != of {
        return Err(PyValueError::new_err(format!(
            "keys: the mask has {keys}, k has {of}; they must be equal"
        )));
    }
    if Some(rows) == scores.2 {
        return Ok(Mask::bits(
            Bits::from_bools(&visible, [batch, heads, rows, keys]).map_err(refused)?,
        ));
    }
    let seen = visible.chunks_exact(keys.max(1)).map(runs).collect();
    Ok(Mask::custom(Ranges::padded(seen, [batch, heads, rows])))
}

/// Runs of `true`.
fn runs(row: &[bool]) -> Vec<Range<usize>> {
    let mut at = 0;
    let stretches = row.chunk_by(|a, b| a == b).map(|run| {
        at += run.len();
        (run[0], at - run.len()..at)
    });
    stretches.filter(|(seen, _)| *seen).map(|(_, run)| run).collect()
}

/// For each row a few ranges of keys: `[batch or 1, heads or 1, q_len or 1, n]`.
#[derive(Clone)]
pub(crate) struct Ranges {
    ranges: Vec<Range<usize>>,
    sizes: [usize; 4],
}

impl Ranges {
    fn new(array: &Array, scores: Scores) -> PyResult<Self> {
        let shape = array.shape();
        let &[batch, heads, rows, n, 2] = shape else {
            return Err(PyValueError::new_err(format!(
                "ranges: expected [batch or 1, heads or 1, q_len or 1, n, 2], found {shape:?}"
            )));
        };
        fit("ranges", &shape[..3], scores)?;
        Ok(Self { ranges: ranges(array, "ranges")?, sizes: [batch, heads, rows, n] })
    }

    /// Of what each row sees.
    pub(crate) fn padded(seen: Vec<Vec<Range<usize>>>, [batch, heads, rows]: [usize; 3]) -> Self {
        let most = seen.iter().map(Vec::len).max().unwrap_or(0);
        let padded = |row: Vec<_>| row.into_iter().chain(std::iter::repeat(0..0)).take(most);
        let ranges = seen.into_iter().flat_map(padded).collect();
        Self { ranges, sizes: [batch, heads, rows, most] }
    }

    /// As Python writes it: `[batch, heads, q_len, n, 2]`.
    pub(crate) fn owned(&self) -> OwnedArray {
        let [batch, heads, rows, n] = self.sizes;
        let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let bounds = self.ranges.iter().flat_map(|keys| [number(keys.start), number(keys.end)]);
        OwnedArray::new(bounds.collect(), &[batch, heads, rows, n, 2])
    }
}

impl fmt::Debug for Ranges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ranges {}", self.sizes[3])
    }
}

impl MaskRule for Ranges {
    fn visible(&self, scope: &Scope, row: usize, found: &mut Vec<Range<usize>>) {
        let [batch, heads, rows, n] = self.sizes;
        let of = |i: usize, n: usize| if n == 1 { 0 } else { i };
        let row = (of(scope.batch, batch) * heads + of(scope.head, heads)) * rows + of(row, rows);
        found.extend(self.ranges[row * n..][..n].iter().filter(|keys| !keys.is_empty()).cloned());
    }
}
