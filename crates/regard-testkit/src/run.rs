//! Runs the table on every instruction set of this machine, and reports.

use crate::cached::CachedCase;
use crate::cases::{AttentionKind, Case, Dtype};
use crate::close::{GradCheck, OutputCheck, Ratio, is_additive, narrowing, values, wide};
use crate::data::Data;
use crate::delta::DeltaCase;
use crate::linear::LinearCase;
use crate::lsh::LshCase;
use regard::plan::OutputGrads;
use regard::problem::{Normalizer, Selection};
use regard::reference::{self, Inputs};
use regard::{Element, Error, Grads, Isa, Machine, Number, Output, Plan, Problem, bf16, f16};
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Thread counts that each row runs with: one, two, and more than most rows have tiles.
pub const THREADS: [usize; 3] = [1, 2, 7];

/// Result of a run of the table.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Number of rows, each run on every instruction set that it depends on, with every thread count in [`THREADS`].
    pub rows: usize,
    /// Instruction sets covered.
    pub isas: Vec<&'static str>,
    /// Worst result of each mask, score option, similarity and layout, by name.
    pub groups: BTreeMap<String, Group>,
    /// All failures.
    pub failures: Vec<Failure>,
}

/// Rows that share an option.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// Number of rows.
    pub rows: usize,
    /// Largest error divided by its tolerance.
    pub worst: Ratio,
    /// Name of the worst case.
    pub case: String,
}

/// A failed row.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Name of the case.
    pub case: String,
    /// Instruction set.
    pub isa: &'static str,
    /// Number of threads.
    pub threads: usize,
    /// Reason.
    pub why: String,
}

/// Runs `cases` and compares them with the reference. `progress` receives the number of finished rows and the total.
pub fn check(cases: &[Case], progress: &mut dyn FnMut(usize, usize)) -> Report {
    let isas = Isa::available();
    let names = isas.iter().map(|isa| isa.name()).collect();
    let mut report = Report { rows: cases.len(), isas: names, ..Report::default() };
    for (i, case) in cases.iter().enumerate() {
        let worst = match case.dtype {
            Dtype::F32 => run::<f32>(case, &isas, &mut report.failures),
            Dtype::F64 => run::<f64>(case, &isas, &mut report.failures),
            Dtype::F16 => run::<f16>(case, &isas, &mut report.failures),
            Dtype::Bf16 => run::<bf16>(case, &isas, &mut report.failures),
        };
        for group in case.groups() {
            report.groups.entry(group).or_default().add(case, worst);
        }
        progress(i + 1, cases.len());
    }
    report
}

/// Runs one row on all instruction sets; returns its largest ratio.
fn run<E: Element>(case: &Case, isas: &[Isa], failures: &mut Vec<Failure>) -> Ratio {
    match case.attention {
        AttentionKind::Exact => {
            everywhere(&Exact::<E>::new(case, &Data::new(case)), isas, failures)
        }
        AttentionKind::Linear(map) => everywhere(&LinearCase::<E>::new(case, map), isas, failures),
        AttentionKind::Delta { decay, delta } => {
            everywhere(&DeltaCase::<E>::new(case, decay, delta), isas, failures)
        }
        AttentionKind::Cached { quantization, page, latent } => {
            everywhere(&CachedCase::<E>::new(case, (quantization, latent), page), isas, failures)
        }
        AttentionKind::Lsh { .. } => {
            everywhere(&LshCase::<E>::new(case, &Data::new(case)), isas, failures)
        }
    }
}

/// A row of the table that can run and be checked on any instruction set.
pub(crate) trait CheckedCase {
    /// Output and gradients of a call.
    type Output: Clone;
    /// Name of the case.
    fn name(&self) -> String;
    /// How the row runs on an instruction set.
    fn runs(&self, isa: Isa) -> Runs;
    /// Forward and backward pass.
    fn call(&self, machine: Machine) -> Result<Self::Output, Error>;
    /// Ratios of the result and the name of the worst gradient, or an error message if it is wrong regardless of the
    /// tolerances.
    fn judge(&self, found: &Self::Output) -> Result<(Ratio, &'static str), String>;
    /// Whether two results are bit-identical.
    fn same(a: &Self::Output, b: &Self::Output) -> bool;
}

/// How a row runs on an instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runs {
    /// The same as on another instruction set: skipped.
    Not,
    /// Vector kernels, bit-identical on all instruction sets with fused multiply-add.
    Vectors,
    /// AMX tiles.
    Tiles,
}

pub(crate) fn everywhere<T: CheckedCase>(
    case: &T,
    isas: &[Isa],
    failures: &mut Vec<Failure>,
) -> Ratio {
    let mut worst = Ratio::default();
    let mut fused: Option<T::Output> = None;
    for isa in isas {
        let mut first: Option<T::Output> = None;
        let runs = case.runs(*isa);
        for threads in THREADS.into_iter().filter(|_| runs != Runs::Not) {
            let mut fail = |why: String| {
                failures.push(Failure { case: case.name(), isa: isa.name(), threads, why });
            };
            let machine = Machine::detect().isa(*isa).threads(threads);
            let found = match catch_unwind(AssertUnwindSafe(|| case.call(machine))) {
                Ok(Ok(found)) => found,
                Ok(Err(error)) => return fail_all(fail, format!("refused: {error}")),
                Err(_) => return fail_all(fail, "panicked".into()),
            };
            if let Some(first) = &first {
                if !T::same(first, &found) {
                    fail(format!("other bits than with {} thread", THREADS[0]));
                }
                continue;
            }
            match case.judge(&found) {
                Err(why) => fail(why),
                Ok((ratio, which)) => {
                    if !ratio.is_close() {
                        fail(format!("of the bound: {ratio:.3?}, the gradient by {which}"));
                    }
                    worst = worst.max(ratio);
                }
            }
            // Instruction sets with fused multiply-add are bit-identical.
            if isa.is_fused() && runs == Runs::Vectors {
                if fused.as_ref().is_some_and(|fused| !T::same(fused, &found)) {
                    fail("other bits than on the instruction set before".into());
                }
                fused = Some(found.clone());
            }
            first = Some(found);
        }
    }
    worst
}

impl Runs {
    /// Without tile products, AMX runs the vector kernels of the previous instruction set. Rows with an explicit precision
    /// run on tiles only.
    pub(crate) fn of<E: Element>(case: &Case, problem: &Problem<'_, E>, isa: Isa) -> Self {
        let plan = Plan::new(problem.clone(), Machine::detect().isa(isa));
        match plan.is_ok_and(|plan| plan.tile_products().is_some()) {
            true => Self::Tiles,
            false if isa.name() == "amx" || case.precision.is_some() => Self::Not,
            false => Self::Vectors,
        }
    }
}

/// Checks the selected keys against the scores. Of scores that are equal within rounding, any may be selected.
fn right_choice<N: Number>(
    normalizer: Normalizer,
    choice: &Selection<N>,
    (scores, near): (&[Vec<(usize, f64)>], f64),
) -> Result<(), String> {
    let most = match normalizer {
        Normalizer::TopK(k) => k,
        Normalizer::Hard | Normalizer::Sampled { .. } => 1,
        _ => 0,
    };
    for (row, scores) in scores.iter().enumerate() {
        let keys = choice.keys(row);
        if keys.len() != most.min(scores.len()) {
            return Err(format!("row {row} sees {} keys and has chosen {keys:?}", scores.len()));
        }
        let of = |key: &usize| scores.iter().find(|(seen, _)| seen == key).map(|(_, score)| *score);
        let Some(chosen) = keys.iter().map(of).collect::<Option<Vec<f64>>>() else {
            return Err(format!("row {row} has chosen a key it does not see: {keys:?}"));
        };
        let others = scores.iter().filter(|(key, _)| !keys.contains(key)).map(|(_, score)| *score);
        let (lowest, best) = (
            chosen.iter().copied().fold(f64::INFINITY, f64::min),
            others.fold(f64::NEG_INFINITY, f64::max),
        );
        let draws = matches!(normalizer, Normalizer::Sampled { .. });
        if !draws && !keys.is_empty() && lowest < best - near * (1.0 + best.abs()) {
            return Err(format!("row {row} has chosen {lowest} and left {best}"));
        }
    }
    Ok(())
}

/// Exact attention and its gradients.
pub(crate) struct Exact<'d, E: Element> {
    case: &'d Case,
    data: &'d Data<E>,
    problem: Problem<'d, E>,
    /// For softmax. Other normalizers select keys: the selection is checked separately, and the results are compared with
    /// the reference for that selection.
    judges: Option<(OutputCheck, GradCheck)>,
    /// Scores, for normalizers that select keys.
    scores: Vec<Vec<(usize, f64)>>,
}

impl<'d, E: Element> Exact<'d, E> {
    fn new(case: &'d Case, data: &'d Data<E>) -> Self {
        Self::over(case, data, data.problem(case))
    }

    /// The same with the given problem.
    pub(crate) fn over(case: &'d Case, data: &'d Data<E>, problem: Problem<'d, E>) -> Self {
        let mut checked = Self { case, data, problem, judges: None, scores: Vec::new() };
        if case.normalizer == Normalizer::Softmax {
            checked.judges = Some(checked.judges(&checked.problem));
        } else {
            checked.scores = reference::scores::<f64, E>(&checked.problem, data.inputs());
        }
        checked
    }

    fn judges(&self, problem: &Problem<'_, E>) -> (OutputCheck, GradCheck) {
        let (case, data) = (self.case, self.data);
        let output_grads =
            (&data.output_grads_by_definition(case), &data.output_grads_by_definition(case));
        let judge = OutputCheck::new(problem, data.inputs());
        (judge, GradCheck::new(problem, data.inputs(), output_grads))
    }

    /// Relative difference below which rounding may swap two scores.
    fn near(&self) -> f64 {
        // Projected keys are stored in the dtype of the tensors.
        let written = if is_additive(&self.problem) { 8.0 * narrowing::<E>() } else { 0.0 };
        written.max(if E::Num::NAME == "f32" { 1e-5 } else { 1e-13 })
    }
}

impl<E: Element> CheckedCase for Exact<'_, E> {
    type Output = (Output<E>, Grads<E>);

    fn name(&self) -> String {
        self.case.to_string()
    }

    fn runs(&self, isa: Isa) -> Runs {
        Runs::of(self.case, &self.problem, isa)
    }

    fn call(&self, machine: Machine) -> Result<Self::Output, Error> {
        let (q, k, v) = self.data.inputs();
        let plan = Plan::new(self.problem.clone(), machine)?;
        let output = plan.forward(q, k, v)?;
        let grads = plan.backward(q, k, v, &output, self.data.output_grads(self.case))?;
        Ok((output, grads))
    }

    fn judge(&self, (output, grads): &Self::Output) -> Result<(Ratio, &'static str), String> {
        let mut own = None;
        if let Some(choice) = &output.selection {
            right_choice(self.case.normalizer, choice, (&self.scores, self.near()))?;
            own = Some(self.judges(&self.problem.with_selection(choice)));
        }
        let Some((judge, grad_judge)) = own.as_ref().or(self.judges.as_ref()) else {
            return Err("rows have chosen, but the output does not say what".into());
        };
        let ratio = judge.ratio(output)?;
        let (grads, which) = grad_judge.ratio(grads)?;
        Ok((Ratio { grads, ..ratio }, which))
    }

    fn same(a: &Self::Output, b: &Self::Output) -> bool {
        same_bits(&a.0, &b.0) && same_grad_bits(&a.1, &b.1)
    }
}

fn fail_all(mut fail: impl FnMut(String), why: String) -> Ratio {
    fail(why);
    Ratio { out: f64::INFINITY, ..Ratio::default() }
}

/// Forward pass, compiled here once per dtype, so that the tests that call it do not compile another copy of every kernel.
///
/// # Panics
/// If the problem is rejected.
#[inline(never)]
#[must_use]
pub fn forward<E: Element>(
    problem: &Problem<'_, E>,
    (q, k, v): Inputs<'_, E>,
    isa: Isa,
    threads: usize,
) -> Output<E> {
    let plan = Plan::new(problem.clone(), Machine::detect().isa(isa).threads(threads));
    plan.and_then(|plan| plan.forward(q, k, v)).expect("a problem that fits its tensors")
}

/// Forward and backward pass.
///
/// # Panics
/// If the problem is rejected.
#[inline(never)]
#[must_use]
pub fn both_ways<E: Element>(
    problem: &Problem<'_, E>,
    (q, k, v): Inputs<'_, E>,
    output_grads: OutputGrads<'_, E>,
    isa: Isa,
    threads: usize,
) -> (Output<E>, Grads<E>) {
    let plan = Plan::new(problem.clone(), Machine::detect().isa(isa).threads(threads));
    let plan = plan.expect("a problem that fits its tensors");
    let output = plan.forward(q, k, v).expect("tensors that fit the plan");
    let grads =
        plan.backward(q, k, v, &output, output_grads).expect("gradients that fit the output");
    (output, grads)
}

/// Bits of a number. All NaN are equal: which operand's payload an instruction keeps is not specified.
fn comparable(x: f64) -> u64 {
    if x.is_nan() { f64::NAN.to_bits() } else { x.to_bits() }
}

/// Whether two outputs are bit-identical. All NaN are equal; the sign of 0 counts.
#[must_use]
pub fn same_bits<E: Element>(a: &Output<E>, b: &Output<E>) -> bool {
    fn same<E: Element>(a: &[E], b: &[E]) -> bool {
        let bits = |x: &E| comparable(wide(*x));
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| bits(a) == bits(b))
    }
    let none = Vec::new();
    let entropy = [a, b].map(|o| o.entropy.as_ref().unwrap_or(&none));
    let max_score = [a, b].map(|o| o.max_score.as_ref().unwrap_or(&none));
    a.out.shape() == b.out.shape()
        && same(a.out.data(), b.out.data())
        && same(&a.lse, &b.lse)
        && same(a.states.as_flattened(), b.states.as_flattened())
        && same(entropy[0], entropy[1])
        && same(max_score[0], max_score[1])
        && a.selection == b.selection
}

/// Whether gradients are bit-identical.
#[must_use]
pub fn same_grad_bits<E: Element>(a: &Grads<E>, b: &Grads<E>) -> bool {
    let same = |(a, b): (&Vec<f64>, &Vec<f64>)| {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| comparable(*a) == comparable(*b))
    };
    values(a).iter().zip(&values(b)).all(same)
}

impl Ratio {
    /// Elementwise maximum.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            out: self.out.max(other.out),
            lse: self.lse.max(other.lse),
            entropy: self.entropy.max(other.entropy),
            grads: self.grads.max(other.grads),
        }
    }
}

impl Group {
    fn add(&mut self, case: &Case, ratio: Ratio) {
        self.rows += 1;
        if self.case.is_empty() || ratio.worse() > self.worst.worse() {
            self.case = case.to_string();
        }
        self.worst = self.worst.max(ratio);
    }
}

impl Report {
    /// Whether no row failed.
    #[must_use]
    pub fn is_green(&self) -> bool {
        self.failures.is_empty()
    }

    /// Adds the report of another part of the table.
    pub fn join(&mut self, other: Self) {
        self.rows += other.rows;
        self.isas = other.isas;
        self.failures.extend(other.failures);
        for (name, theirs) in other.groups {
            let ours = self.groups.entry(name).or_default();
            if theirs.worst.worse() > ours.worst.worse() {
                ours.case = theirs.case;
            }
            ours.rows += theirs.rows;
            ours.worst = ours.worst.max(theirs.worst);
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [out, lse, entropy, grads] = ["out", "lse", "entropy", "grads"];
        writeln!(
            f,
            "{:34} {:>6} {out:>8} {lse:>8} {entropy:>8} {grads:>8}",
            "of the allowed error", "rows"
        )?;
        for (name, Group { rows, worst, .. }) in &self.groups {
            let Ratio { out, lse, entropy, grads } = worst;
            writeln!(f, "{name:34} {rows:6} {out:8.3} {lse:8.3} {entropy:8.3} {grads:8.3}")?;
        }
        for Failure { case, isa, threads, why } in &self.failures {
            writeln!(f, "FAILED {case} on {isa} with {threads} threads: {why}")?;
        }
        let isas = self.isas.join(", ");
        write!(f, "{} rows on each of {isas}, threads {THREADS:?}: ", self.rows)?;
        write!(f, "{} failures", self.failures.len())
    }
}
