//! The delta rule: its rows of the case table, and properties that these do not cover.

use regard::{Error, Layout, Machine, Shape, Tensor, View};
use regard_approx::{
    DeltaGrads, DeltaInputs, DeltaOutput, DeltaRule, DeltaState, delta_reference as definition,
};
use regard_testkit::{Noise, check, delta};

/// Tensors of a call, dense: q, k and v with 2, 2 and 4 heads unless said otherwise.
#[derive(Clone)]
struct Tensors {
    q: Tensor<f64>,
    k: Tensor<f64>,
    v: Tensor<f64>,
    g: Option<Tensor<f64>>,
    beta: Option<Tensor<f64>>,
    state: Option<Tensor<f64>>,
}

fn tensor(noise: &mut Noise, [batch, heads, len, dim]: [usize; 4], size: f64) -> Tensor<f64> {
    let data: Vec<f64> = noise.normals(batch * heads * len * dim);
    let data = data.into_iter().map(|x| x * size).collect();
    Tensor::new(data, Shape { batch, heads, len, dim }, Layout::Bhsd).unwrap()
}

impl Tensors {
    /// Of heads of q, k and v, and with `g` of so many features (0: none).
    fn new([hq, hk, hv]: [usize; 3], [len, dim, v_dim]: [usize; 3], g: usize, beta: bool) -> Self {
        let mut noise = Noise::new(17 + len as u64);
        let size = (dim as f64).powf(-0.5);
        let [q, k] = [hq, hk].map(|heads| tensor(&mut noise, [2, heads, len, dim], size));
        let v = tensor(&mut noise, [2, hv, len, v_dim], 1.0);
        let mut g = tensor(&mut noise, [2, hv, len, g], 0.3);
        g.data_mut().iter_mut().for_each(|g| *g = -g.abs());
        let mut betas = tensor(&mut noise, [2, hv, len, 1], 1.0);
        betas.data_mut().iter_mut().for_each(|x| *x = 1.0 / (1.0 + x.exp()));
        let state = Some(tensor(&mut noise, [2, hv, dim, v_dim], 0.5));
        let g = Some(g).filter(|g| g.shape().dim > 0);
        Self { q, k, v, g, beta: beta.then_some(betas), state }
    }

    fn inputs(&self) -> DeltaInputs<'_, f64> {
        let mut inputs = DeltaInputs::new(self.q.view(), self.k.view(), self.v.view());
        inputs = self.g.iter().fold(inputs, |inputs, g| inputs.g(g.view()));
        inputs = self.beta.iter().fold(inputs, |inputs, beta| inputs.beta(beta.view()));
        self.state.iter().fold(inputs, |inputs, state| inputs.state(state.view()))
    }

    fn each(&mut self) -> Vec<&mut Tensor<f64>> {
        let Self { q, k, v, g, beta, state } = self;
        [q, k, v].into_iter().chain(g).chain(beta).chain(state).collect()
    }

    fn d_out(&self) -> Tensor<f64> {
        let like = if self.q.shape().heads > self.v.shape().heads { &self.q } else { &self.v };
        let shape = Shape { dim: self.v.shape().dim, ..like.shape() };
        tensor(&mut Noise::new(5), shape.to_array(), 1.0)
    }
}

/// No decay, one per head and one per feature; without beta and with it.
fn variants(dim: usize) -> impl Iterator<Item = (usize, bool)> {
    [0, 1, dim].into_iter().flat_map(|g| [(g, false), (g, true)])
}

fn far(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let size = b.iter().fold(1e-3, |size: f64, b| size.max(b.abs()));
    a.iter().zip(b).fold(0.0, |far: f64, (a, b)| far.max((a - b).abs())) / size
}

fn both(
    rule: DeltaRule,
    threads: usize,
    tensors: &Tensors,
    (d_out, d_state): (&Tensor<f64>, &Tensor<f64>),
) -> (DeltaOutput<f64>, DeltaGrads<f64>) {
    let machine = Machine::detect().threads(threads);
    let output = rule.forward(machine, tensors.inputs()).expect("tensors that fit");
    let d_state = Some(d_state.view());
    let grads = rule.backward(machine, tensors.inputs(), d_out.view(), d_state);
    (output, grads.expect("tensors that fit"))
}

#[test]
fn its_rows_of_the_table_agree_with_the_definition() {
    let report = check(&delta::cases(), &mut |_, _| {});
    assert!(report.is_green(), "{report}");
    println!("{report}");
}

#[test]
fn gradients_of_the_definition_are_finite_differences_of_it() {
    for (g, beta) in variants(3) {
        for heads in [[1, 1, 2], [2, 2, 2], [4, 2, 2]] {
            let mut tensors = Tensors::new(heads, [5, 3, 2], g, beta);
            for rule in [DeltaRule::new().scale(0.7), DeltaRule::new().qk_l2norm()] {
                let (d_out, d_state) = (tensors.d_out(), tensors.state.clone().unwrap());
                let upstream = (d_out.data(), d_state.data());
                let grads = definition::backward(&rule, &tensors.inputs(), upstream, |x| x);
                let loss = |tensors: &Tensors| -> f64 {
                    let found = definition::forward::<f64, _>(&rule, &tensors.inputs(), |x| x);
                    let out = found.out.iter().zip(upstream.0).map(|(a, b)| a * b);
                    out.chain(found.state.iter().zip(upstream.1).map(|(a, b)| a * b)).sum()
                };
                let all = [&grads.q, &grads.k, &grads.v].into_iter();
                let all = all.chain((g > 0).then_some(&grads.g));
                let all = all.chain(beta.then_some(&grads.beta)).chain([&grads.state]);
                for (which, grad) in all.enumerate() {
                    for (i, grad) in grad.iter().enumerate() {
                        let mut moved = |by: f64| {
                            tensors.each()[which].data_mut()[i] += by;
                            let loss = loss(&tensors);
                            tensors.each()[which].data_mut()[i] -= by;
                            loss
                        };
                        let slope = (moved(1e-6) - moved(-1e-6)) / 2e-6;
                        let far = (slope - grad).abs() / (1.0 + slope.abs());
                        assert!(far < 1e-6, "{heads:?} {g} {beta} {which} {i}: {slope} {grad}");
                    }
                }
            }
        }
    }
}

/// Heads in all their groups, with gradients of the final state, on any number of threads.
#[test]
fn chunks_are_the_definition_for_all_groups_of_heads() {
    for (g, beta) in variants(6) {
        for heads in [[1, 1, 4], [2, 2, 4], [2, 1, 4], [4, 4, 4], [8, 4, 4], [8, 2, 4]] {
            let tensors = Tensors::new(heads, [150, 6, 5], g, beta);
            let (d_out, d_state) = (tensors.d_out(), tensors.state.clone().unwrap());
            for rule in [DeltaRule::new().scale(0.7), DeltaRule::new().qk_l2norm()] {
                let found = both(rule, 1, &tensors, (&d_out, &d_state));
                assert_eq!(found, both(rule, 3, &tensors, (&d_out, &d_state)));
                let exact = definition::forward::<f64, _>(&rule, &tensors.inputs(), |x| x);
                let upstream = (d_out.data(), d_state.data());
                let grads = definition::backward(&rule, &tensors.inputs(), upstream, |x| x);
                let none = Vec::new();
                let [d_g, d_beta] = [&found.1.g, &found.1.beta]
                    .map(|grad| grad.as_ref().map_or(&none[..], Tensor::data));
                for (name, found, exact) in [
                    ("out", found.0.out.data(), &exact.out),
                    ("state", found.0.state.data(), &exact.state),
                    ("d_q", found.1.q.data(), &grads.q),
                    ("d_k", found.1.k.data(), &grads.k),
                    ("d_v", found.1.v.data(), &grads.v),
                    ("d_g", d_g, if g > 0 { &grads.g } else { &none }),
                    ("d_beta", d_beta, if beta { &grads.beta } else { &none }),
                    ("d_state", found.1.state.data(), &grads.state),
                ] {
                    let far = far(found, exact);
                    assert!(far < 1e-11, "{name} of {heads:?}, {g} {beta} {rule:?}: {far}");
                }
            }
        }
    }
}
