//! Tolerances: a kernel may err about as much as the reference evaluated in the same number type.
//!
//! The ground truth is the reference in `f64`. A kernel in `f32` may have twice the error of the reference evaluated in
//! `f32`, plus a floor of a few rounding steps: the plain evaluation is sometimes exact by chance (one key, equal scores),
//! and a kernel that rounds once more is not worse for it.
//!
//! A kernel for a half-precision dtype is compared with the reference evaluated as separate operations on half-precision
//! tensors, which round every score, weight and output (the rule of FlashAttention's own tests).
//!
//! All errors are maxima over a tensor, because single elements of the plain evaluation are often exact by chance.

use regard::machine::Precision;
use regard::problem::{Additive, Normalizer, Similarity};
use regard::reference::{self, Inputs, Outcome};
use regard::{Element, Grads, Number, Output, Problem, Tensor};

/// Floor of the tolerance for `f32`, in rounding steps, of `out` and of `lse`, relative to the largest score (and value).
///
/// Kernels hold scores times `log2 e`. Each is rounded once more than in the plain evaluation, by half a step of its own
/// size, which affects its weight and thus `out`; dividing the sums adds another half. `lse` is converted back with `ln 2`:
/// two more roundings, and both constants are off by half a step.
pub const FLOOR_F32: [f64; 2] = [1.0, 2.0];

/// The same for `f64`, where the plain evaluation equals the ground truth and gives no estimate: the floor must cover all
/// rounding. Sums over n keys and d features err by about `sqrt(n) + sqrt(d)` steps; 16 covers the rows of the table,
/// including the 8 ulp of the kernels' `2^x`.
pub const FLOOR_F64: [f64; 2] = [16.0, 16.0];

/// Scores below this, such as the lowest `bf16` used as a bias, overflow `f32` when multiplied by `log2 e`. The kernels
/// clamp them to the lowest number.
const SATURATED: f64 = -2.36e38;

/// Ground truth of a case, and tolerances.
#[derive(Clone, Debug)]
pub struct OutputCheck {
    exact: Outcome<f64>,
    /// Tolerance of `out`.
    pub out: f64,
    /// Tolerance of `lse`.
    pub lse: f64,
    /// Tolerance of the entropy.
    pub entropy: f64,
    /// Tolerance of the largest score of each row.
    pub max_score: f64,
}

/// Error of a result divided by its tolerance.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ratio {
    /// Ratio of `out`.
    pub out: f64,
    /// Ratio of `lse`.
    pub lse: f64,
    /// Ratio of the entropy.
    pub entropy: f64,
    /// Largest ratio of any gradient.
    pub grads: f64,
}

impl OutputCheck {
    /// Evaluates the reference in `f64` and in the number type of the kernel.
    #[must_use]
    pub fn new<E: Element>(problem: &Problem<'_, E>, inputs: Inputs<'_, E>) -> Self {
        let exact = reference::forward::<f64, E>(problem, inputs);
        let plain = reference::forward_in_steps::<E::Num, E>(problem, inputs, stored::<E>);
        let rounding = Rounding::new(problem, inputs);
        let value = largest(elements(inputs.2).map(wide)) * growth(problem);
        let error = |a: &[f64], b: &[E::Num]| {
            largest(a.iter().zip(b).filter(|(a, _)| a.is_finite()).map(|(a, b)| a - wide(*b)))
        };
        let (out, lse) = (error(&exact.out, &plain.out), error(&exact.lse, &plain.lse));
        let entropy = error(&exact.entropy, &plain.entropy);
        let spread = largest(exact.entropy.iter().copied());
        let max_score = error(&exact.max_score, &plain.max_score);
        let score = largest(exact.max_score.iter().copied());
        let dot = 1.0 + (problem.dims().qk_dim as f64).sqrt() / 4.0;
        Self {
            out: 2.0 * out + (rounding.weight + narrowing::<E>()) * value,
            lse: 2.0 * lse + rounding.lse,
            // The entropy is a sum of logarithms, so its rounding error is also relative to its size.
            entropy: 2.0 * entropy + rounding.log + rounding.step * spread,
            // A single score has the rounding error of its dot product, in whatever order it is summed.
            max_score: 2.0 * max_score + rounding.lse + rounding.step * score * dot,
            exact,
        }
    }

    /// Ratios of a result, or an error message if it is wrong regardless of the tolerances.
    pub fn ratio<E: Element>(&self, output: &Output<E>) -> Result<Ratio, String> {
        let shape = output.out.shape();
        let mut ratio = Ratio::default();
        let expected = shape.batch * shape.heads * shape.len;
        if output.lse.len() != expected || self.exact.lse.len() != expected {
            return Err(format!("lse has {} entries instead of {expected}", output.lse.len()));
        }
        for (row, (lse, exact)) in output.lse.iter().zip(&self.exact.lse).enumerate() {
            let (item, i) = (row / shape.len, row % shape.len);
            let out = output.out.view().row(item / shape.heads, item % shape.heads, i);
            let lse = wide(*lse);
            if *exact == f64::NEG_INFINITY {
                if lse != *exact || out.iter().any(|x| wide(*x) != 0.0) {
                    return Err(format!("row {row} sees nothing, yet has lse {lse}, out {out:?}"));
                }
                continue;
            }
            if lse > SATURATED || *exact > SATURATED || lse.is_nan() != exact.is_nan() {
                ratio.lse = ratio.lse.max(share(lse, *exact, self.lse));
            }
            if let Some(entropy) = &output.entropy {
                let found = share(wide(entropy[row]), self.exact.entropy[row], self.entropy);
                ratio.entropy = ratio.entropy.max(found);
            }
            if let Some(max_score) = &output.max_score {
                let (ours, exact) = (wide(max_score[row]), self.exact.max_score[row]);
                if exact > SATURATED || ours.is_nan() != exact.is_nan() {
                    ratio.lse = ratio.lse.max(share(ours, exact, self.max_score));
                }
            }
            for (x, exact) in out.iter().zip(&self.exact.out[row * shape.dim..]) {
                ratio.out = ratio.out.max(share(wide(*x), *exact, self.out));
            }
        }
        Ok(ratio)
    }
}

/// Rounding errors that any correct kernel has: the floors of the tolerances.
pub(crate) struct Rounding {
    /// Of a weight, relative to the weight.
    pub(crate) weight: f64,
    /// Of the logarithm of a weight.
    pub(crate) log: f64,
    /// Of `lse`.
    pub(crate) lse: f64,
    /// Of any other result, relative to the result.
    pub(crate) step: f64,
}

impl Rounding {
    pub(crate) fn new<E: Element>(problem: &Problem<'_, E>, inputs: Inputs<'_, E>) -> Self {
        let step = epsilon::<E::Num>();
        let [by_out, by_lse] = if E::Num::NAME == "f32" { FLOOR_F32 } else { FLOOR_F64 };
        // `lse` is as large as the largest score. Scores beyond 1 / step cannot be distinguished from their neighbors: the
        // weights of such a row are equal, and rounding does not affect them.
        let lse = reference::forward::<f64, E>(problem, inputs).lse;
        let sizes = score_sizes(problem, inputs, &lse);
        let score = largest(sizes.iter().copied()).max(1.0);
        let weighed = largest(sizes.into_iter().filter(|x| x.abs() * step < 1.0)).max(1.0);
        // With one or two rows the plain evaluation may be exact by chance, so its rounding errors are counted here too:
        // the sums of a projection, and projected keys, which are stored in the dtype of the tensors.
        let step = step * projected(problem);
        let coarse = coarseness(problem, inputs) + written(problem, inputs);
        Self {
            weight: by_out * step * weighed + coarse,
            log: by_lse * step * weighed + 4.0 * coarse,
            lse: by_lse * step * score + coarse,
            step: by_lse * step,
        }
    }
}

impl Ratio {
    /// Whether all errors are within their tolerances.
    #[must_use]
    pub fn is_close(self) -> bool {
        self.worse() <= 1.0
    }

    /// Largest of the ratios.
    #[must_use]
    pub fn worse(self) -> f64 {
        self.out.max(self.lse).max(self.entropy).max(self.grads)
    }
}

/// True gradients of a case, and tolerances: three times the error of the plain evaluation, plus a floor as for the output.
#[derive(Clone, Debug)]
pub struct GradCheck {
    /// Name, true values, tolerance.
    grads: Vec<(&'static str, Vec<f64>, f64)>,
}

/// Floor of the tolerance of gradients, in rounding steps, for `f32` and `f64`.
///
/// A score gradient is a difference (see [`reference::Grads::size`]) and is propagated by sums, some over all pairs of a
/// head. The plain evaluation of such a sum is often exact by chance. Each step is as large as the terms of the sum, times
/// the square root of their number, because errors are random. If a row has a single visible key, the plain weight is 1 and
/// the plain difference is 0, whatever the dot products are; a kernel that recomputes them in another order has their
/// rounding error, about `sqrt(d) / 4` steps.
pub const GRAD_FLOORS: [f64; 2] = [1.0, 16.0];

impl GradCheck {
    /// Evaluates the reference in `f64` and in the number type of the kernel.
    #[must_use]
    pub fn new<E: Element>(
        problem: &Problem<'_, E>,
        inputs: Inputs<'_, E>,
        (exact, plain): (&Outcome<f64>, &Outcome<E::Num>),
    ) -> Self {
        let Outcome { lse, entropy, .. } = reference::forward::<f64, E>(problem, inputs);
        let [d_out, d_lse, d_entropy] =
            [&exact.out, &exact.lse, &exact.entropy].map(|d| largest(d.iter().copied()));
        // Bounds a (ln a + H).
        let others = d_lse + d_entropy * (largest(entropy.into_iter()) + 0.4);
        let exact = reference::backward(problem, inputs, exact);
        let plain = named(reference::backward_in_steps(problem, inputs, plain, stored::<E>));
        let step = epsilon::<E::Num>() * GRAD_FLOORS[usize::from(E::Num::NAME == "f64")];
        let sizes = score_sizes(problem, inputs, &lse).into_iter();
        let weighed = largest(sizes.filter(|x| x.abs() * epsilon::<E::Num>() < 1.0)).max(1.0);
        let dims = problem.dims();
        let step = step * (1.0 + (dims.qk_dim.max(dims.v_dim) as f64).sqrt() / 4.0);
        let rows = (dims.batch * dims.heads.q * dims.q_len) as f64;
        let root = |terms: f64, entries: usize| (terms / entries.max(1) as f64).max(1.0).sqrt();
        let size = exact.size + others;
        let offset = problem.scope(0, 0).offset.unsigned_abs() as f64;
        let farthest = offset.max((dims.q_len + dims.k_len) as f64);
        let [q, k] = [inputs.0, inputs.1].map(|x| largest(elements(x).map(wide)));
        let scale = problem.scale();
        let sizes = Sizes::of(problem, [q, k]);
        let (exact, coarse) = (named(exact), coarseness(problem, inputs));
        let judged = exact.into_iter().zip(plain).map(|((name, exact), (_, plain))| {
            let errors = exact.iter().zip(&plain).map(|(a, b)| a - wide(*b));
            let pairs = rows * dims.k_len as f64;
            let terms = match name {
                "q" => scale * sizes.by_q,
                "k" => scale * sizes.by_k,
                "w" => scale * q * k,
                "w_q" => scale * sizes.v * q,
                "w_k" => scale * sizes.v * k,
                "v of additive" => scale,
                "alibi" => farthest * root(pairs, exact.len()),
                "scale" => sizes.similarity * root(pairs, 1),
                "temperature" => sizes.similarity * scale * root(pairs, 1),
                "sinks" => root(rows, exact.len()),
                "centers" => 1.0,
                "v" => d_out * growth(problem) / size,
                _ => root(pairs, exact.len()),
            };
            // Gradients of keys and values are sums over rows. Rows with equal weights also have equal errors from the bits
            // that `Precision::High` drops.
            let summed = match name {
                "k" | "v" => root(rows, dims.batch * dims.heads.kv),
                _ => 1.0,
            };
            // Gradients of projected keys are sums over rows, and are stored before they are propagated.
            let written = match name {
                "k" | "w_k" if is_additive(problem) => root(rows, dims.batch * dims.heads.kv),
                _ => 1.0,
            };
            let rounding = step * weighed + narrowing::<E>() * written + coarse * summed;
            let floor = rounding * size * terms.abs();
            let bound = 3.0 * largest(errors) + floor;
            (name, exact, bound)
        });
        Self { grads: judged.collect() }
    }

    /// Largest ratio and the name of its gradient, or an error message if the gradients are wrong regardless of the
    /// tolerances.
    pub fn ratio<E: Element>(&self, grads: &Grads<E>) -> Result<(f64, &'static str), String> {
        let mut worst = (0.0, "q");
        for ((name, exact, bound), ours) in self.grads.iter().zip(values(grads)) {
            if ours.len() != exact.len() {
                return Err(format!(
                    "{} gradients by {name} instead of {}",
                    ours.len(),
                    exact.len()
                ));
            }
            for (exact, ours) in exact.iter().zip(ours) {
                let ratio = share(ours, *exact, *bound);
                if ratio > worst.0 {
                    worst = (ratio, name);
                }
            }
        }
        Ok(worst)
    }
}

/// Factor by which a projection of the queries increases the rounding error of scores: its sums are rounded too.
fn projected<E: Element>(problem: &Problem<'_, E>) -> f64 {
    match problem.similarity {
        Similarity::General(_) => 1.0 + (problem.dims().q_dim as f64).sqrt() / 4.0,
        _ => 1.0,
    }
}

/// Error of an additive score from storing projected keys in the dtype of the tensors.
fn written<E: Element>(problem: &Problem<'_, E>, (q, k, _): Inputs<'_, E>) -> f64 {
    let sizes = [q, k].map(|x| largest(elements(x).map(wide)));
    let similarity = Sizes::of(problem, sizes).similarity;
    if is_additive(problem) { narrowing::<E>() * problem.scale().abs() * similarity } else { 0.0 }
}

/// Factor that dropout applies to the weights it keeps; 1 without dropout.
fn growth<E: Element>(problem: &Problem<'_, E>) -> f64 {
    problem.dropout.map_or(1.0, |dropout| dropout.growth())
}

pub(crate) fn is_additive<E: Element>(problem: &Problem<'_, E>) -> bool {
    matches!(problem.similarity, Similarity::Additive(_))
}

/// Magnitudes of the terms of gradients, as the similarity determines them from the largest query and key elements.
struct Sizes {
    /// Magnitude of the similarity.
    similarity: f64,
    /// Magnitudes of its gradients with respect to a query and a key.
    by_q: f64,
    by_k: f64,
    /// Largest element of `v` of an additive similarity.
    v: f64,
}

impl Sizes {
    fn of<E: Element>(problem: &Problem<'_, E>, [q, k]: [f64; 2]) -> Self {
        let Similarity::Additive(Additive { w_q, w_k, v }) = problem.similarity else {
            let similarity = (problem.dims().qk_dim as f64).sqrt() * q * k;
            return Self { similarity, by_q: k, by_k: q, v: 0.0 };
        };
        let largest = |x: regard::View<'_, E>| largest(elements(x).map(wide));
        let (units, v) = ((v.shape().dim as f64).sqrt(), largest(v));
        let by_k = v * w_k.map_or(1.0, |w_k| largest(w_k) * units);
        Self { similarity: v * units, by_q: v * largest(w_q) * units, by_k, v }
    }
}

/// Gradients of the reference, by name.
fn named<N: Number>(g: reference::Grads<N>) -> Vec<(&'static str, Vec<N>)> {
    let [w_q, w_k, v] = g.additive;
    vec![
        ("q", g.q),
        ("k", g.k),
        ("v", g.v),
        ("w", g.w),
        ("w_q", w_q),
        ("w_k", w_k),
        ("v of additive", v),
        ("bias", g.bias),
        ("alibi", g.alibi),
        ("relative", g.relative),
        ("sinks", g.sinks),
        ("centers", g.centers),
        ("scale", vec![g.scale]),
        ("temperature", vec![g.temperature]),
    ]
}

/// Gradients of a kernel, in the order of [`named`].
pub(crate) fn values<E: Element>(g: &Grads<E>) -> Vec<Vec<f64>> {
    fn tensor<E: Element>(t: &Tensor<E>) -> Vec<f64> {
        elements(t.view()).map(wide).collect()
    }
    let list = |x: &[E::Num]| x.iter().copied().map(wide).collect();
    let optional = |t: &Option<Tensor<E::Num>>| t.as_ref().map_or_else(Vec::new, tensor);
    let additive = g.additive.clone();
    let (w_q, w_k, of_v) = additive.map_or((None, None, None), |g| (Some(g.w_q), g.w_k, Some(g.v)));
    let tensors = [tensor(&g.q), tensor(&g.k), tensor(&g.v), optional(&g.w)];
    let tensors = tensors.into_iter().chain([
        optional(&w_q),
        optional(&w_k),
        optional(&of_v),
        optional(&g.bias),
    ]);
    let lists = [
        list(&g.alibi),
        list(&g.relative),
        list(&g.sinks),
        list(&g.centers),
        vec![g.scale],
        vec![g.temperature],
    ];
    tensors.chain(lists).collect()
}

/// Magnitude of the scores of each row: their lse, except for sparsemax, whose lse is always 0.
fn score_sizes<E: Element>(
    problem: &Problem<'_, E>,
    inputs: Inputs<'_, E>,
    lse: &[f64],
) -> Vec<f64> {
    if problem.normalizer != Normalizer::Sparsemax {
        return lse.to_vec();
    }
    let scores = reference::scores::<f64, E>(problem, inputs);
    // Only scores near the row maximum have weights.
    let top = |row: Vec<(usize, f64)>| row.iter().map(|(_, score)| *score).fold(f64::MIN, f64::max);
    scores.into_iter().map(top).collect()
}

/// Error divided by its tolerance; infinite if exactly one of the numbers is NaN.
pub(crate) fn share(ours: f64, exact: f64, bound: f64) -> f64 {
    let error = ours - exact;
    if error == 0.0 || (ours.is_nan() && exact.is_nan()) {
        0.0
    } else if error.is_nan() {
        f64::INFINITY
    } else {
        error.abs() / bound
    }
}

/// Converts an element to `f64`, exactly.
#[must_use]
pub fn wide<E: Element>(x: E) -> f64 {
    Number::to_f64(x.widen())
}

/// Rounds to the nearest element.
pub(crate) fn narrow<E: Element>(x: f64) -> E {
    E::narrow(E::Num::from_f64(x))
}

/// Rounds a number to the dtype of a tensor.
pub(crate) fn stored<E: Element>(x: E::Num) -> E::Num {
    E::narrow(x).widen()
}

/// One rounding step of a number type.
pub(crate) fn epsilon<N: Number>() -> f64 {
    wide(N::epsilon())
}

/// Half a rounding step of a half-precision dtype: the error of storing an exact result. 0 for other dtypes.
pub(crate) fn narrowing<E: Element>() -> f64 {
    match E::NAME {
        "f16" => 0.5f64.powi(11),
        "bf16" => 0.5f64.powi(8),
        _ => 0.0,
    }
}

/// Error that `Precision::High` causes in a score of `f32` tensors, and thus in the logarithm of each weight: it keeps 16
/// bits of each factor.
fn coarseness<E: Element>(problem: &Problem<'_, E>, (q, k, _): Inputs<'_, E>) -> f64 {
    if E::NAME != "f32" || problem.precision != Precision::High {
        return 0.0;
    }
    let [q, k] = [q, k].map(|x| largest(elements(x).map(wide)));
    let product = (problem.dims().qk_dim as f64).sqrt() * q * k;
    0.5f64.powi(15) * (1.0 + problem.scale().abs() * product)
}

/// Lowest finite number of a dtype.
pub(crate) fn lowest<E: Element>() -> f64 {
    fn of_number<N: Number>() -> f64 {
        -wide(N::max_value())
    }
    match E::NAME {
        "f16" => -65504.0,
        "bf16" => -wide(regard::bf16::MAX),
        _ => of_number::<E::Num>(),
    }
}

pub(crate) fn elements<E: Element>(v: regard::View<'_, E>) -> impl Iterator<Item = E> + '_ {
    let regard::Shape { batch, heads, len, .. } = v.shape();
    let rows = move |b| (0..heads).flat_map(move |h| (0..len).map(move |i| (b, h, i)));
    (0..batch).flat_map(rows).flat_map(move |(b, h, i)| v.row(b, h, i).iter().copied())
}

/// Largest magnitude of the finite numbers.
pub(crate) fn largest(xs: impl Iterator<Item = f64>) -> f64 {
    xs.filter(|x| x.is_finite()).fold(0.0, |a, x| a.max(x.abs()))
}
