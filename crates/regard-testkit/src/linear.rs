//! Linear attention in the case table: its rows and its tolerance.

use crate::cases::{AttentionKind, Case, Dtype, EMPTY, dims};
use crate::close::{
    FLOOR_F32, FLOOR_F64, GRAD_FLOORS, Ratio, elements, epsilon, largest, narrowing, share, stored,
    wide,
};
use crate::data::{Arrangement, Data};
use crate::masks::named;
use crate::run::{CheckedCase, Runs};
use regard::{Element, Error, Isa, Machine, Number, Tensor};
use regard_approx::{
    FeatureMap, LinearAttention, LinearGrads, LinearOutput, linear_reference as definition,
};

/// Batch, query heads, KV heads, queries, keys, key features, value features: around chunks of 64, with more queries than
/// keys, with fewer, with one, and long enough for several parts.
const SHAPES: &[[usize; 7]] = &[
    [1, 1, 1, 1, 1, 1, 1],
    [2, 2, 1, 5, 7, 3, 4],
    [2, 2, 2, 33, 31, 8, 8],
    [1, 2, 1, 63, 63, 16, 24],
    [1, 2, 1, 64, 64, 16, 16],
    [1, 1, 1, 65, 65, 24, 15],
    [1, 1, 1, 127, 129, 17, 24],
    [2, 1, 1, 128, 128, 8, 40],
    [1, 1, 1, 129, 63, 8, 40],
    [1, 3, 1, 1, 200, 8, 16],
    [1, 4, 2, 70, 200, 8, 16],
    [3, 1, 1, 13, 65, 40, 3],
    [1, 1, 1, 200, 200, 64, 64],
    [1, 1, 1, 96, 96, 72, 128],
    [1, 8, 2, 100, 100, 8, 8],
    [1, 1, 1, 2051, 2051, 3, 4],
    [1, 2, 1, 40, 3100, 3, 3],
    [1, 2, 2, 2200, 70, 4, 3],
];

/// All rows of linear attention.
#[must_use]
pub fn cases() -> Vec<Case> {
    let mut table = Vec::new();
    for (i, shape) in SHAPES.iter().chain(EMPTY).enumerate() {
        let features = [5, 16, 40][i % 3];
        let random = FeatureMap::PositiveRandom { features, seed: i as u64 };
        for map in [FeatureMap::EluPlusOne, FeatureMap::Relu, random] {
            for mask in ["full", "causal"] {
                let attention = AttentionKind::Linear(map);
                table.push(Case { attention, ..Case::new(dims(*shape)).mask(named(mask)) });
            }
        }
    }
    let mut all = Vec::new();
    for dtype in [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16] {
        // The reference is slow on the longest rows.
        let short = |case: &&Case| case.dims.q_len * case.dims.k_len < 1 << 20;
        let some = table.iter().filter(|case| dtype == Dtype::F32 || short(case));
        all.extend(some.map(|case| Case { dtype, ..case.clone() }));
    }
    for (i, case) in all.iter_mut().enumerate() {
        case.seed = 9000 + i as u64;
        case.arrangement = [Arrangement::Bhsd, Arrangement::Bshd, Arrangement::Slice][i % 3];
    }
    all
}

/// A row, its ground truth and its tolerances.
pub(crate) struct LinearCase<E: Element> {
    name: String,
    attention: LinearAttention,
    data: Data<E>,
    out: (Vec<f64>, f64),
    grads: [(&'static str, Vec<f64>, f64); 3],
}

impl<E: Element> LinearCase<E> {
    pub(crate) fn new(case: &Case, map: FeatureMap) -> Self {
        let attention = LinearAttention::new(map);
        let attention = if case.mask.name == "causal" { attention.causal() } else { attention };
        let data = Data::<E>::new(case);
        let (out, grads) = (judge(&attention, &data), judge_grads(&attention, &data));
        Self { name: case.to_string(), attention, data, out, grads }
    }
}

/// Ground truth, and tolerance: the error of the plain evaluation, plus a floor for the rounding of the largest value.
fn judge<E: Element>(attention: &LinearAttention, data: &Data<E>) -> (Vec<f64>, f64) {
    let inputs = data.inputs();
    let exact: Vec<f64> = definition::forward(attention, inputs);
    let plain: Vec<E::Num> = definition::forward_in_steps(attention, inputs, stored::<E>);
    let floor = if E::Num::NAME == "f32" { FLOOR_F32[0] } else { FLOOR_F64[0] };
    let value = largest(elements(inputs.2).map(wide));
    let error = largest(exact.iter().zip(plain).map(|(a, b)| a - wide(b)));
    let bound = 2.0 * error + (floor * epsilon::<E::Num>() + narrowing::<E>()) * value;
    (exact, bound)
}

fn judge_grads<E: Element>(
    attention: &LinearAttention,
    data: &Data<E>,
) -> [(&'static str, Vec<f64>, f64); 3] {
    let (inputs, d_out) = (data.inputs(), || elements(data.d_out.view()).map(wide));
    let output_grads: Vec<f64> = d_out().collect();
    let exact = definition::backward(attention, inputs, &output_grads);
    let output_grads: Vec<E::Num> = d_out().map(E::Num::from_f64).collect();
    let plain = definition::backward_in_steps(attention, inputs, &output_grads, stored::<E>);
    let (dim, v_dim) = (inputs.1.shape().dim as f64, inputs.2.shape().dim as f64);
    let floor = GRAD_FLOORS[usize::from(E::Num::NAME == "f64")];
    let step = floor * epsilon::<E::Num>() * (1.0 + dim.max(v_dim).sqrt() / 4.0);
    // The norm of a direction is about the square root of the dimension; inputs are divided by its fourth root.
    let along = match attention.map() {
        FeatureMap::PositiveRandom { .. } => 2.0 * dim.powf(0.25),
        _ => 1.0,
    };
    let (size, d_out) = (exact.size * along, largest(d_out()));
    let judged = |name, exact: Vec<f64>, plain: Vec<E::Num>, size: f64| {
        let error = largest(exact.iter().zip(plain).map(|(a, b)| a - wide(b)));
        (name, exact, 3.0 * error + (step + narrowing::<E>()) * size)
    };
    [
        judged("q", exact.q, plain.q, size),
        judged("k", exact.k, plain.k, size),
        judged("v", exact.v, plain.v, d_out),
    ]
}

impl<E: Element> CheckedCase for LinearCase<E> {
    type Output = (LinearOutput<E>, LinearGrads<E>);

    fn name(&self) -> String {
        self.name.clone()
    }

    fn runs(&self, isa: Isa) -> Runs {
        // Its products choose their instructions themselves.
        if isa == Isa::best() { Runs::Vectors } else { Runs::Not }
    }

    fn call(&self, machine: Machine) -> Result<Self::Output, Error> {
        let (q, k, v) = self.data.inputs();
        let output = self.attention.forward(machine, q, k, v)?;
        let d_out = self.data.d_out.view();
        let grads = self.attention.backward(machine, q, k, v, &output, d_out)?;
        Ok((output, grads))
    }

    fn judge(&self, (output, grads): &Self::Output) -> Result<(Ratio, &'static str), String> {
        let out = worst("out", &output.out, &self.out.0, self.out.1)?;
        let (mut nearest, mut which) = (0.0, "q");
        for ((name, exact, bound), grad) in self.grads.iter().zip([&grads.q, &grads.k, &grads.v]) {
            let ratio = worst(name, grad, exact, *bound)?;
            if ratio > nearest {
                (nearest, which) = (ratio, name);
            }
        }
        Ok((Ratio { out, grads: nearest, ..Ratio::default() }, which))
    }

    fn same(a: &Self::Output, b: &Self::Output) -> bool {
        let tensors = |found: &Self::Output| {
            let (LinearOutput { out, .. }, LinearGrads { q, k, v, .. }) = found;
            [out, q, k, v].into_iter().flat_map(bits).collect::<Vec<_>>()
        };
        tensors(a) == tensors(b) && bits(&a.0.sums).eq(bits(&b.0.sums))
    }
}

/// The bits of each element; a NaN is as good as any other.
pub(crate) fn bits<E: Element>(x: &Tensor<E>) -> impl Iterator<Item = (bool, u64)> + '_ {
    x.data().iter().map(|x| (wide(*x).is_nan(), wide(*x).to_bits()))
}

/// Largest error divided by its tolerance.
pub(crate) fn worst<E: Element>(
    name: &str,
    found: &Tensor<E>,
    exact: &[f64],
    bound: f64,
) -> Result<f64, String> {
    let found: Vec<f64> = elements(found.view()).map(wide).collect();
    if found.len() != exact.len() {
        return Err(format!("{} elements of {name} instead of {}", found.len(), exact.len()));
    }
    Ok(found.iter().zip(exact).fold(0.0, |worst, (a, b)| worst.max(share(*a, *b, bound))))
}

/// The same of a gradient that is there if its input is.
pub(crate) fn worst_if_given<E: Element, F>(
    name: &str,
    (input, found): (&Option<F>, &Option<Tensor<E>>),
    exact: &[f64],
    bound: f64,
) -> Result<f64, String> {
    match (input, found) {
        (Some(_), Some(found)) => worst(name, found, exact, bound),
        (None, None) => Ok(0.0),
        (Some(_), None) => Err(format!("no gradient by {name}")),
        (None, Some(_)) => Err(format!("a gradient by {name}, which is not an input")),
    }
}
