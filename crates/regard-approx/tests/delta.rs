//! The delta rule: its rows of the case table, and properties that these do not cover.

#![expect(clippy::unwrap_used, reason = "a call that is refused has failed")]

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

/// Decays that underflow in a few positions and then do not: quotients of cumulative products would be 0 / 0.
#[test]
fn strong_decays_stay_finite_and_right() {
    for g in [1, 8] {
        let mut tensors = Tensors::new([2, 2, 2], [130, 8, 8], g, true);
        let decay = tensors.g.as_mut().unwrap().data_mut();
        for (i, x) in decay.iter_mut().enumerate() {
            *x = [0.0, -300.0, -1e-3, f64::NEG_INFINITY, -1.0, -40.0, 0.0][i % 7];
        }
        let (d_out, d_state) = (tensors.d_out(), tensors.state.clone().unwrap());
        let rule = DeltaRule::new();
        let (output, grads) = both(rule, 1, &tensors, (&d_out, &d_state));
        let upstream = (d_out.data(), d_state.data());
        let exact = definition::backward(&rule, &tensors.inputs(), upstream, |x| x);
        let out = definition::forward::<f64, _>(&rule, &tensors.inputs(), |x| x).out;
        assert!(far(output.out.data(), &out) < 1e-13);
        let d_g = grads.g.unwrap();
        for (name, found, exact) in [
            ("q", grads.q.data(), &exact.q),
            ("k", grads.k.data(), &exact.k),
            ("g", d_g.data(), &exact.g),
        ] {
            assert!(far(found, exact) < 1e-13, "{name} {}", far(found, exact));
        }
    }
}

fn cut<'a>(
    x: &'a Tensor<f64>,
    data: &'a mut Vec<f64>,
    rows: std::ops::Range<usize>,
) -> View<'a, f64> {
    let Shape { batch, heads, dim, .. } = x.shape();
    for (b, h) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
        rows.clone().for_each(|i| data.extend(x.view().row(b, h, i)));
    }
    View::bhsd(data, [batch, heads, rows.len(), dim]).unwrap()
}

#[test]
fn a_state_continues_where_a_prompt_ended() {
    let machine = Machine::detect();
    for (g, beta) in variants(6) {
        let mut tensors = Tensors::new([2, 2, 4], [150, 6, 5], g, beta);
        tensors.state = None;
        let rule = DeltaRule::new().qk_l2norm();
        let whole = rule.forward(machine, tensors.inputs()).unwrap();
        let mut state = DeltaState::new(rule, [2, 4, 6, 5]).unwrap();
        let mut from = 0;
        for count in [0, 70, 1, 1, 3, 70, 1, 4] {
            let rows = from..from + count;
            let mut data: [Vec<f64>; 6] = Default::default();
            let [q, k, v, g, beta, exact] = &mut data;
            let inputs = DeltaInputs::new(
                cut(&tensors.q, q, rows.clone()),
                cut(&tensors.k, k, rows.clone()),
                cut(&tensors.v, v, rows.clone()),
            );
            let inputs = match &tensors.g {
                Some(given) => inputs.g(cut(given, g, rows.clone())),
                None => inputs,
            };
            let inputs = match &tensors.beta {
                Some(given) => inputs.beta(cut(given, beta, rows.clone())),
                None => inputs,
            };
            let fork = state.clone().step(machine, inputs).unwrap();
            let out = state.step(machine, inputs).unwrap();
            assert_eq!(out, fork);
            cut(&whole.out, exact, rows);
            assert!(far(out.data(), exact) < 1e-13, "{g:?} from {from}");
            from += count;
        }
        assert!(far(state.state().data(), whole.state.data()) < 1e-13);
    }
}

#[test]
fn later_positions_are_never_touched() {
    for (g, beta) in variants(6) {
        let tensors = Tensors::new([2, 2, 2], [150, 6, 5], g, beta);
        let (d_out, d_state) = (tensors.d_out(), tensors.state.clone().unwrap());
        let rule = DeltaRule::new();
        let before = both(rule, 1, &tensors, (&d_out, &d_state)).0.out;
        let mut poisoned = tensors.clone();
        for x in [&mut poisoned.q, &mut poisoned.k, &mut poisoned.v] {
            let (heads, dim) = (4, x.shape().dim);
            for head in 0..heads {
                x.data_mut()[(head * 150 + 100) * dim..(head + 1) * 150 * dim].fill(f64::NAN);
            }
        }
        let (output, grads) = both(rule, 1, &poisoned, (&d_out, &d_state));
        for head in 0..4 {
            let first =
                |x: &Tensor<f64>, dim: usize| x.data()[head * 150 * dim..][..100 * dim].to_vec();
            assert!(far(&first(&output.out, 5), &first(&before, 5)) < 1e-13, "{g} {beta}");
            assert!(first(&grads.q, 6).iter().all(|x| x.is_finite()), "{g} {beta}");
            assert!(output.out.data()[(head * 150 + 100) * 5..][..5].iter().all(|x| x.is_nan()));
        }
    }
}

#[test]
fn packed_sequences_have_the_bits_of_calls_of_their_own() {
    let offsets = [0, 3, 3, 4, 90, 160];
    let data: Vec<f32> = Noise::new(3).normals(160 * 4 * 8);
    let data: Vec<f32> = data.into_iter().map(|x| x * 0.3).collect();
    let decay: Vec<f32> = data.iter().map(|x| -x.abs()).collect();
    let packed = |x: &'static str, heads: usize, dim: usize| {
        let data = if x == "g" { &decay } else { &data };
        View::packed(&data[..160 * heads * dim], &offsets, [heads, dim]).unwrap()
    };
    let inputs = DeltaInputs::new(packed("x", 2, 8), packed("x", 2, 8), packed("x", 4, 8));
    let inputs = inputs.g(packed("g", 4, 8)).beta(packed("x", 4, 1));
    let (rule, machine) = (DeltaRule::new().qk_l2norm(), Machine::detect());
    let output = rule.forward(machine, inputs).unwrap();
    let grads = rule.backward(machine, inputs, output.out.view(), None).unwrap();
    for (item, ends) in offsets.windows(2).enumerate() {
        let own = |x: &'static str, heads: usize, dim: usize| {
            let data = if x == "g" { &decay } else { &data };
            let rows = &data[ends[0] * heads * dim..ends[1] * heads * dim];
            View::bshd(rows, [1, ends[1] - ends[0], heads, dim]).unwrap()
        };
        let inputs = DeltaInputs::new(own("x", 2, 8), own("x", 2, 8), own("x", 4, 8));
        let inputs = inputs.g(own("g", 4, 8)).beta(own("x", 4, 1));
        let one = rule.forward(machine, inputs).unwrap();
        let one_grads = rule.backward(machine, inputs, one.out.view(), None).unwrap();
        let rows =
            |x: &Tensor<f32>, width: usize| x.data()[ends[0] * width..ends[1] * width].to_vec();
        assert_eq!(rows(&output.out, 32), one.out.data(), "{item}");
        assert_eq!(output.state.data()[item * 256..][..256], *one.state.data(), "{item}");
        assert_eq!(rows(&grads.q, 16), one_grads.q.data(), "{item}");
        assert_eq!(rows(&grads.k, 16), one_grads.k.data(), "{item}");
        assert_eq!(rows(&grads.v, 32), one_grads.v.data(), "{item}");
        let [d_g, own_g] = [&grads.g, &one_grads.g].map(|g| g.as_ref().unwrap());
        assert_eq!(rows(d_g, 32), own_g.data(), "{item}");
        assert_eq!(grads.state.data()[item * 256..][..256], *one_grads.state.data(), "{item}");
    }
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let data = vec![0f32; 4 * 4 * 4 * 4];
    let view = |shape: [usize; 4]| View::bhsd(&data[..shape.iter().product()], shape).unwrap();
    let (x, machine) = (view([1, 2, 3, 4]), Machine::detect());
    let forward = |rule: DeltaRule, inputs| rule.forward(machine, inputs).map(|_| ()).unwrap_err();
    let says = |error: Error, words: &str| assert!(error.to_string().contains(words), "{error}");
    let (rule, inputs) = (DeltaRule::new(), DeltaInputs::new(x, x, x));
    let refuses = |inputs, words| says(forward(rule, inputs), words);
    refuses(DeltaInputs::new(view([1, 2, 3, 3]), x, x), "features: q has 3, k has 4");
    refuses(DeltaInputs::new(x, view([1, 2, 2, 4]), x), "length: v has 3, k has 2");
    refuses(
        DeltaInputs::new(x, view([1, 4, 3, 4]), x),
        "heads of k: 4 entries; give 2 (as many as v",
    );
    refuses(
        DeltaInputs::new(view([1, 3, 3, 4]), x, x),
        "heads of q: 3 entries; give 2 (as many as v",
    );
    refuses(
        inputs.g(view([1, 2, 3, 2])),
        "features of g: 2 entries; give 1 (one for each head, or",
    );
    refuses(inputs.g(view([1, 1, 3, 1])), "heads: v has 2, g has 1");
    refuses(inputs.beta(view([2, 2, 3, 1])), "batch: the call has 1, beta has 2");
    refuses(
        inputs.state(view([1, 2, 4, 3])),
        "features of v: the call has 4, the initial state has 3",
    );
    let no_heads = view([1, 0, 3, 4]);
    refuses(DeltaInputs::new(no_heads, x, x), "heads of q: 0 entries; give 2");
    refuses(DeltaInputs::new(x, no_heads, x), "heads of k: 0 entries; give 2");
    refuses(DeltaInputs::new(x, x, no_heads), "heads of k: 2 entries; give 0");
    let none = view([1, 2, 3, 0]);
    refuses(DeltaInputs::new(none, none, x), "features: k has 0");
    says(forward(rule.scale(f64::NAN), inputs), "scale: NaN is invalid");
    let back =
        |d_out, d_state| rule.backward(machine, inputs, d_out, d_state).map(|_| ()).unwrap_err();
    says(
        back(view([1, 2, 2, 4]), None),
        "length: the call has 3, the gradient of the output has 2",
    );
    says(back(x, Some(x)), "features of k: the call has 4, the gradient of the final state has 3");
    let mut state = DeltaState::<f32>::new(rule, [1, 3, 4, 4]).unwrap();
    says(state.step(machine, inputs).unwrap_err(), "heads: the state has 3, the call has 2");
    says(
        state.step(machine, inputs.state(view([1, 2, 4, 3]))).unwrap_err(),
        "features of v: the call has 4, the initial state has 3",
    );
    let huge = DeltaState::<f32>::new(rule, [usize::MAX, 2, 4, 4]).unwrap_err();
    assert!(matches!(huge, Error::ShapeOverflow { .. }), "{huge}");
    assert!(DeltaState::<f32>::new(rule, [1, 1, 1 << 31, 1 << 30]).is_err());
    let empty = View::<f32>::bhsd(&[], [0, 1, 1000, 1 << 40]).unwrap();
    let inputs = DeltaInputs::new(empty, empty, empty);
    assert!(rule.forward(machine, inputs).is_ok());
    assert!(rule.backward(machine, inputs, empty, None).is_ok());
}

#[test]
fn a_state_can_go_to_other_threads() {
    fn goes<T: Send + Sync>() {}
    goes::<DeltaState<f32>>();
}
