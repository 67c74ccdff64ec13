//! The delta rule with decay in the case table: its rows and its tolerance.

use crate::cases::{AttentionKind, Case, DecayCase, Dtype, dims};
use crate::close::{
    FLOOR_F64, GRAD_FLOORS, Ratio, elements, epsilon, largest, narrow, narrowing, stored, wide,
};
use crate::data::{Arrangement, TestTensor};
use crate::linear::{bits, worst, worst_if_given};
use crate::noise::Noise;
use crate::run::{CheckedCase, Runs};
use regard::{Element, Error, Isa, Machine, Number, Shape};
use regard_approx::{
    DeltaGrads, DeltaInputs, DeltaOutput, DeltaRule, delta_reference as definition,
};

/// Batch, heads of v and of the output, heads of q and k, positions twice, features of k and of v: around chunks of 64 and
/// their halves, and without positions, items, heads or value features.
const SHAPES: &[[usize; 7]] = &[
    [1, 1, 1, 1, 1, 1, 1],
    [2, 2, 1, 5, 5, 3, 4],
    [2, 2, 2, 33, 33, 8, 8],
    [1, 2, 1, 63, 63, 16, 24],
    [1, 2, 2, 64, 64, 16, 16],
    [1, 1, 1, 65, 65, 24, 15],
    [1, 1, 1, 127, 127, 17, 24],
    [2, 1, 1, 128, 128, 8, 40],
    [1, 4, 2, 129, 129, 40, 8],
    [3, 1, 1, 13, 13, 40, 3],
    [1, 1, 1, 200, 200, 64, 64],
    [1, 1, 1, 300, 300, 72, 128],
    [2, 2, 1, 0, 0, 3, 4],
    [0, 2, 1, 5, 5, 3, 4],
    [1, 0, 0, 5, 5, 3, 4],
    [1, 1, 1, 70, 70, 3, 0],
];

/// All rows of the delta rule.
#[must_use]
pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for dtype in [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16] {
        for shape in SHAPES {
            for decay in [DecayCase::None, DecayCase::Head, DecayCase::Feature] {
                for delta in [false, true] {
                    let attention = AttentionKind::Delta { decay, delta };
                    all.push(Case { dtype, attention, ..Case::new(dims(*shape)) });
                }
            }
        }
    }
    for (i, case) in all.iter_mut().enumerate() {
        case.seed = 12_000 + i as u64;
        case.arrangement = [Arrangement::Bhsd, Arrangement::Bshd, Arrangement::Slice][i % 3];
    }
    all
}

/// A row, its ground truth and its tolerances.
pub(crate) struct DeltaCase<E: Element> {
    name: String,
    decay: DecayCase,
    rule: DeltaRule,
    data: Data<E>,
    /// Of the output and the final state.
    out: [(&'static str, Vec<f64>, f64); 2],
    grads: [(&'static str, Vec<f64>, f64); 6],
}

/// The tensors of a row.
struct Data<E: Element> {
    q: TestTensor<E>,
    k: TestTensor<E>,
    v: TestTensor<E>,
    g: Option<TestTensor<E::Num>>,
    beta: Option<TestTensor<E::Num>>,
    state: TestTensor<E::Num>,
    d_out: TestTensor<E>,
    d_state: TestTensor<E::Num>,
}

/// Normal numbers, changed by `change`, which gets the number of its row and the numbers of the row.
fn tensor<E: Element>(
    (case, noise): (&Case, &mut Noise),
    [heads, len, dim]: [usize; 3],
    mut change: impl FnMut(&mut [f64]),
) -> TestTensor<E> {
    let shape = Shape { batch: case.dims.batch, heads, len, dim };
    let mut values: Vec<f64> = noise.normals(shape.batch * heads * len * dim);
    values.chunks_mut(dim.max(1)).for_each(&mut change);
    let values: Vec<E> = values.into_iter().map(narrow).collect();
    TestTensor::new(&values, shape, case.arrangement)
}

impl<E: Element> Data<E> {
    fn new(case: &Case, decay: DecayCase, delta: bool) -> Self {
        let (dims, noise) = (case.dims, &mut Noise::new(case.seed));
        let (states, heads, len) = (dims.heads.q, dims.heads.kv, dims.k_len);
        let (dim, v_dim) = (dims.qk_dim, dims.v_dim);
        // Keys of a norm below 1: the states of the delta rule grow without bounds otherwise.
        let unit = |x: &mut [f64]| {
            let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt().max(1e-3);
            x.iter_mut().for_each(|x| *x *= 0.9 / norm);
        };
        let own = |_: &mut [f64]| {};
        let q = tensor((case, noise), [heads, len, dim], own);
        let k = tensor((case, noise), [heads, len, dim], unit);
        let v = tensor((case, noise), [states, len, v_dim], own);
        // From almost none to 1e-9, and now and then one that clears the state.
        let logarithm =
            |x: &mut f64| *x = if *x > 2.5 { f64::NEG_INFINITY } else { -x.abs().powi(4) };
        let log = |x: &mut [f64]| x.iter_mut().for_each(logarithm);
        let g_dim = if decay == DecayCase::Feature { dim } else { 1 };
        let g = tensor((case, noise), [states, len, g_dim], log);
        let sigmoid = |x: &mut [f64]| x.iter_mut().for_each(|x| *x = 1.0 / (1.0 + x.exp()));
        let beta = tensor((case, noise), [states, len, 1], sigmoid);
        let [state, d_state] = [0, 1].map(|_| tensor((case, noise), [states, dim, v_dim], own));
        let d_out = tensor((case, noise), [states, len, v_dim], own);
        let g = (decay != DecayCase::None).then_some(g);
        Self { q, k, v, g, beta: delta.then_some(beta), state, d_out, d_state }
    }

    fn inputs(&self) -> DeltaInputs<'_, E> {
        let inputs = DeltaInputs::new(self.q.view(), self.k.view(), self.v.view());
        let inputs = inputs.state(self.state.view());
        let inputs = self.g.iter().fold(inputs, |inputs, g| inputs.g(g.view()));
        self.beta.iter().fold(inputs, |inputs, beta| inputs.beta(beta.view()))
    }
}

/// Ground truth, and tolerance: the error of the plain evaluation, plus a floor for the rounding of the largest number.
fn judged<N: Number>(
    name: &'static str,
    (exact, plain): (Vec<f64>, Vec<N>),
    (times, step): (f64, f64),
    size: f64,
) -> (&'static str, Vec<f64>, f64) {
    let error = largest(exact.iter().zip(plain).map(|(a, b)| a - wide(b)));
    let size = size + largest(exact.iter().copied());
    (name, exact, times * error + step * size)
}

impl<E: Element> DeltaCase<E> {
    pub(crate) fn new(case: &Case, decay: DecayCase, delta: bool) -> Self {
        let data = Data::<E>::new(case, decay, delta);
        let rule = DeltaRule::new();
        let rule = if case.seed.is_multiple_of(2) { rule.qk_l2norm() } else { rule.scale(0.3) };
        let inputs = data.inputs();
        let exact = definition::forward::<f64, E>(&rule, &inputs, |x| x);
        let plain = definition::forward::<E::Num, E>(&rule, &inputs, stored::<E>);
        let is_f64 = usize::from(E::Num::NAME == "f64");
        let dot = 1.0 + (case.dims.qk_dim.max(case.dims.v_dim) as f64).sqrt() / 4.0;
        let step = epsilon::<E::Num>() * [GRAD_FLOORS[0], FLOOR_F64[0]][is_f64] * dot;
        let value = largest(elements(data.v.view()).map(wide));
        let narrow = step + narrowing::<E>();
        let out = [
            judged("out", (exact.out, plain.out), (2.0, narrow), value),
            judged("state", (exact.state, plain.state), (2.0, step), value),
        ];
        let upstream = |view| elements::<E>(view).map(wide).collect::<Vec<f64>>();
        let (d_out, d_state) = (upstream(data.d_out.view()), elements(data.d_state.view()));
        let d_state: Vec<f64> = d_state.map(wide).collect();
        let exact = definition::backward::<f64, E>(&rule, &inputs, (&d_out, &d_state), |x| x);
        let own = |x: &[f64]| x.iter().map(|x| E::Num::from_f64(*x)).collect::<Vec<_>>();
        let upstream = (&own(&d_out)[..], &own(&d_state)[..]);
        let plain = definition::backward::<E::Num, E>(&rule, &inputs, upstream, stored::<E>);
        let size = largest(d_out.into_iter());
        let grads = [
            judged("q", (exact.q, plain.q), (3.0, narrow), size),
            judged("k", (exact.k, plain.k), (3.0, narrow), size),
            judged("v", (exact.v, plain.v), (3.0, narrow), size),
            judged("g", (exact.g, plain.g), (3.0, step), size),
            judged("beta", (exact.beta, plain.beta), (3.0, step), size),
            judged("state", (exact.state, plain.state), (3.0, step), size),
        ];
        Self { name: case.to_string(), decay, rule, data, out, grads }
    }
}

impl<E: Element> CheckedCase for DeltaCase<E> {
    type Output = (DeltaOutput<E>, DeltaGrads<E>);

    fn name(&self) -> String {
        self.name.clone()
    }

    fn runs(&self, isa: Isa) -> Runs {
        // Products choose their instructions themselves, exponentials of a decay for each feature are those of the machine.
        match self.decay == DecayCase::Feature || isa == Isa::best() {
            true => Runs::Vectors,
            false => Runs::Not,
        }
    }

    fn call(&self, machine: Machine) -> Result<Self::Output, Error> {
        let Data { d_out, d_state, .. } = &self.data;
        let inputs = self.data.inputs();
        let output = self.rule.forward(machine, inputs)?;
        let d_state = Some(d_state.view());
        let grads = self.rule.backward(machine, inputs, d_out.view(), d_state)?;
        Ok((output, grads))
    }

    fn judge(&self, (output, grads): &Self::Output) -> Result<(Ratio, &'static str), String> {
        let [(_, out, out_bound), (_, state, state_bound)] = &self.out;
        let out = worst("out", &output.out, out, *out_bound)?;
        let out = out.max(worst("state", &output.state, state, *state_bound)?);
        let (mut nearest, mut which) = (0.0, "q");
        for (name, exact, bound) in &self.grads {
            let ratio = match *name {
                "q" => worst(name, &grads.q, exact, *bound)?,
                "k" => worst(name, &grads.k, exact, *bound)?,
                "v" => worst(name, &grads.v, exact, *bound)?,
                "state" => worst(name, &grads.state, exact, *bound)?,
                "g" => worst_if_given(name, (&self.data.g, &grads.g), exact, *bound)?,
                _ => worst_if_given(name, (&self.data.beta, &grads.beta), exact, *bound)?,
            };
            if ratio > nearest {
                (nearest, which) = (ratio, name);
            }
        }
        Ok((Ratio { out, grads: nearest, ..Ratio::default() }, which))
    }

    fn same((a, a_grads): &Self::Output, (b, b_grads): &Self::Output) -> bool {
        let elements = |output: &DeltaOutput<E>, grads: &DeltaGrads<E>| {
            let of_inputs = [&output.out, &grads.q, &grads.k, &grads.v].into_iter().flat_map(bits);
            let others =
                [&output.state, &grads.state].into_iter().chain(&grads.g).chain(&grads.beta);
            of_inputs.chain(others.flat_map(bits)).collect::<Vec<_>>()
        };
        elements(a, a_grads) == elements(b, b_grads)
    }
}
