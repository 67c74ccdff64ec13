//! Linear attention: its rows of the case table, and properties that these do not cover.

use regard::{Error, Machine, Tensor, View};
use regard_approx::{
    FeatureMap, LinearAttention, LinearGrads, LinearOutput, LinearState,
    linear_reference as definition,
};
use regard_testkit::cases::dims;
use regard_testkit::{Case, Data, Noise, check, linear};

const MAPS: [FeatureMap; 3] = [
    FeatureMap::EluPlusOne,
    FeatureMap::Relu,
    FeatureMap::PositiveRandom { features: 20, seed: 5 },
];

fn attention(map: FeatureMap, causal: bool) -> LinearAttention {
    let attention = LinearAttention::new(map);
    if causal { attention.causal() } else { attention }
}

fn all() -> impl Iterator<Item = LinearAttention> {
    MAPS.into_iter().flat_map(|map| [false, true].map(|causal| attention(map, causal)))
}

fn both(
    attention: LinearAttention,
    machine: Machine,
    (q, k, v): (View<'_, f32>, View<'_, f32>, View<'_, f32>),
    d_out: View<'_, f32>,
) -> (LinearOutput<f32>, LinearGrads<f32>) {
    let output = attention.forward(machine, q, k, v).expect("tensors that fit");
    let grads = attention.backward(machine, q, k, v, &output, d_out).expect("tensors that fit");
    (output, grads)
}

fn close(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-5 * (1.0 + b.abs()))
}

#[test]
fn its_rows_of_the_table_agree_with_the_definition() {
    let report = check(&linear::cases(), &mut |_, _| {});
    assert!(report.is_green(), "{report}");
    println!("{report}");
}

/// Gradients of the reference against finite differences of the reference, both in `f64`.
#[test]
fn gradients_of_the_definition_are_finite_differences_of_it() {
    for (attention, shape) in
        all().flat_map(|a| [[1, 2, 1, 5, 7, 4, 3], [2, 1, 1, 6, 4, 3, 2]].map(|shape| (a, shape)))
    {
        let data = Data::<f64>::new(&Case::new(dims(shape)));
        let d_out = data.d_out.data.clone();
        let grads = definition::backward(&attention, data.inputs(), &d_out);
        let loss = |data: &Data<f64>| -> f64 {
            let out: Vec<f64> = definition::forward(&attention, data.inputs());
            out.iter().zip(&d_out).map(|(a, b)| a * b).sum()
        };
        for (which, grad) in [&grads.q, &grads.k, &grads.v].into_iter().enumerate() {
            for (i, grad) in grad.iter().enumerate() {
                let step = 1e-6;
                let moved = |by: f64| {
                    let mut data = data.clone();
                    [&mut data.q, &mut data.k, &mut data.v][which].data[i] += by;
                    loss(&data)
                };
                let slope = (moved(step) - moved(-step)) / (2.0 * step);
                let far = (slope - grad).abs() > 1e-6 * (1.0 + slope.abs());
                assert!(!far, "{attention:?} {which} {i}: {slope} {grad}");
            }
        }
    }
}

#[test]
fn a_state_continues_where_a_prompt_ended() {
    let data = Data::<f32>::new(&Case::new(dims([2, 4, 2, 150, 150, 16, 8])));
    let machine = Machine::detect();
    let (q, k, v) = data.inputs();
    for map in MAPS {
        let whole = LinearAttention::new(map).causal().forward(machine, q, k, v).unwrap().out;
        let cut = |x: View<'_, f32>, from: usize, to: usize| {
            let shape = x.shape();
            let rows = (0..shape.batch).flat_map(|b| (0..shape.heads).map(move |h| (b, h)));
            let rows = rows.flat_map(|(b, h)| (from..to).map(move |i| (b, h, i)));
            let data = rows.flat_map(|(b, h, i)| x.row(b, h, i).to_vec()).collect();
            let shape = regard::Shape { len: to - from, ..shape };
            Tensor::new(data, shape, regard::Layout::Bhsd).unwrap()
        };
        let mut state = LinearState::new(map, [2, 2, 16, 8]).unwrap();
        let (k0, v0) = (cut(k, 0, 70), cut(v, 0, 70));
        state.absorb(machine, k0.view(), v0.view()).unwrap();
        let fork = state.clone();
        for mut state in [state, fork] {
            let mut from = 70;
            for count in [1, 1, 3, 70, 1, 4] {
                let [q, k, v] = [q, k, v].map(|x| cut(x, from, from + count));
                let out = state.step(machine, q.view(), k.view(), v.view()).unwrap();
                let expected = cut(whole.view(), from, from + count);
                assert!(close(out.data(), expected.data()), "{map:?} from {from}");
                from += count;
            }
            assert_eq!(from, 150);
        }
    }
}

#[test]
fn packed_sequences_have_the_bits_of_calls_of_their_own() {
    let (q_offsets, k_offsets) = ([0, 3, 3, 90, 160], [0, 70, 75, 80, 210]);
    let mut noise = Noise::new(3);
    let data: Vec<f32> = noise.normals(210 * 4 * 8);
    let q = View::packed(&data[..160 * 4 * 8], &q_offsets, [4, 8]).unwrap();
    let k = View::packed(&data[..210 * 2 * 8], &k_offsets, [2, 8]).unwrap();
    let v = View::packed(&data[7..][..210 * 2 * 8], &k_offsets, [2, 8]).unwrap();
    for attention in all() {
        let (output, grads) = both(attention, Machine::detect(), (q, k, v), q);
        for b in 0..4 {
            let (qs, ks) = (q_offsets[b]..q_offsets[b + 1], k_offsets[b]..k_offsets[b + 1]);
            let own = |x: &'static str, rows: std::ops::Range<usize>, heads: usize| {
                let from = if x == "v" { 7 } else { 0 };
                let data = &data[from + rows.start * heads * 8..from + rows.end * heads * 8];
                View::bshd(data, [1, rows.len(), heads, 8]).unwrap()
            };
            let (q, k, v) =
                (own("q", qs.clone(), 4), own("k", ks.clone(), 2), own("v", ks.clone(), 2));
            let (one, one_grads) = both(attention, Machine::detect(), (q, k, v), q);
            let rows = |x: &Tensor<f32>, rows: std::ops::Range<usize>, width: usize| {
                x.data()[rows.start * width..rows.end * width].to_vec()
            };
            assert_eq!(rows(&output.out, qs.clone(), 32), one.out.data(), "{attention:?} {b}");
            assert_eq!(rows(&output.sums, qs.clone(), 8), one.sums.data());
            assert_eq!(rows(&grads.q, qs, 32), one_grads.q.data(), "{attention:?} {b}");
            assert_eq!(rows(&grads.k, ks.clone(), 16), one_grads.k.data(), "{attention:?} {b}");
            assert_eq!(rows(&grads.v, ks, 16), one_grads.v.data(), "{attention:?} {b}");
        }
    }
}

#[test]
fn hidden_keys_are_never_touched() {
    let mut data = Data::<f32>::new(&Case::new(dims([1, 1, 1, 130, 130, 8, 8])));
    for map in MAPS {
        let attention = LinearAttention::new(map).causal();
        let (q, k, v) = data.inputs();
        let before = attention.forward(Machine::detect(), q, k, v).unwrap().out;
        let mut poisoned = data.clone();
        poisoned.k.data[100 * 8..].fill(f32::NAN);
        poisoned.v.data[100 * 8..].fill(f32::NAN);
        let (q, k, v) = poisoned.inputs();
        let (output, grads) = both(attention, Machine::detect(), (q, k, v), data.d_out.view());
        let (after, d_q) = (output.out.data(), grads.q.data());
        assert_eq!(before.data()[..100 * 8], after[..100 * 8], "{map:?}");
        assert!(after[100 * 8..].iter().all(|x| x.is_nan()), "{map:?}");
        assert!(d_q[..100 * 8].iter().all(|x| x.is_finite()), "{map:?}");
    }
    // Fully masked rows are 0, even if their queries are NaN.
    data.q.data[..8].fill(f32::NAN);
    let (q, k, v) = data.inputs();
    let k = View::bhsd(&data.k.data[..40 * 8], [1, 1, 40, 8]).unwrap_or(k);
    let v = View::bhsd(&data.v.data[..40 * 8], [1, 1, 40, 8]).unwrap_or(v);
    for map in MAPS {
        let attention = LinearAttention::new(map).causal();
        let (output, grads) = both(attention, Machine::detect(), (q, k, v), data.d_out.view());
        assert!(output.out.data()[..90 * 8].iter().all(|x| *x == 0.0), "{map:?}");
        assert!(grads.q.data()[..90 * 8].iter().all(|x| *x == 0.0), "{map:?}");
        assert!(grads.k.data().iter().all(|x| x.is_finite()), "{map:?}");
    }
}

/// Keys whose random features are far from 1: no exponential overflows, and none that matters underflows.
#[test]
fn large_inputs_stay_finite_and_right() {
    let map = FeatureMap::PositiveRandom { features: 64, seed: 1 };
    for (dim, size) in [(16, 4.0), (64, 3.0), (256, 1.0), (256, 3.0)] {
        let mut data = Data::<f32>::new(&Case::new(dims([1, 1, 1, 150, 150, dim, 8])));
        for x in [&mut data.q.data, &mut data.k.data] {
            x.iter_mut().for_each(|x| *x *= size);
        }
        for attention in [attention(map, false), attention(map, true)] {
            let (output, grads) =
                both(attention, Machine::detect(), data.inputs(), data.d_out.view());
            let exact: Vec<f64> = definition::forward(&attention, data.inputs());
            let worst =
                output.out.data().iter().zip(&exact).map(|(a, b)| (f64::from(*a) - b).abs());
            let worst = worst.fold(0.0, f64::max);
            assert!(worst < 1e-3, "{dim} {size} {attention:?}: {worst}");
            for grad in [&grads.q, &grads.k, &grads.v] {
                assert!(grad.data().iter().all(|x| x.is_finite()), "{dim} {size} {attention:?}");
            }
        }
    }
}

#[test]
fn random_features_come_near_to_softmax_attention() {
    let data = Data::<f32>::new(&Case::new(dims([1, 1, 1, 60, 60, 8, 8])));
    let (q, k, v) = data.inputs();
    let exact = regard::attend(q, k, v, regard::Mask::causal()).unwrap().out;
    let map = FeatureMap::PositiveRandom { features: 4096, seed: 2 };
    let near = LinearAttention::new(map).causal().forward(Machine::detect(), q, k, v).unwrap().out;
    let difference = exact.data().iter().zip(near.data()).map(|(a, b)| (a - b).powi(2));
    let mean = (difference.sum::<f32>() / exact.data().len() as f32).sqrt();
    assert!(mean < 0.2, "{mean}");
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let data = vec![0f32; 4 * 4 * 4 * 4];
    let view = |shape: [usize; 4]| View::bhsd(&data[..shape.iter().product()], shape).unwrap();
    let x = view([1, 2, 3, 4]);
    let forward = |attention: LinearAttention, q, k, v| {
        attention.forward(Machine::detect(), q, k, v).map(|_| ()).unwrap_err().to_string()
    };
    let elu = LinearAttention::new(FeatureMap::EluPlusOne);
    let says = |said: String, words: &str| assert!(said.contains(words), "{said}");
    says(forward(elu, x, view([1, 2, 3, 3]), x), "features: q has 4, k has 3");
    says(forward(elu, x, x, view([1, 2, 2, 4])), "keys: k has 3, v has 2");
    says(forward(elu, view([1, 3, 3, 4]), x, x), "heads: q has 3, k and v have 2");
    let random = |features| LinearAttention::new(FeatureMap::PositiveRandom { features, seed: 0 });
    says(forward(random(0), x, x, x), "random features: 0; it must be at least 1");
    says(forward(random(usize::MAX), x, x, x), "random features: 18446744073709551615 is out of");
    let output = elu.forward(Machine::detect(), x, x, x).unwrap();
    let y = view([1, 2, 2, 4]);
    let back = elu.backward(Machine::detect(), x, x, x, &output, y).unwrap_err();
    assert!(matches!(back, Error::Axis { axis: "length", .. }), "{back}");
    let mut state = LinearState::<f32>::new(FeatureMap::Relu, [1, 2, 4, 4]).unwrap();
    let wrong = state.step(Machine::detect(), x, y, y).unwrap_err().to_string();
    says(wrong, "queries of new positions: 3 is out of range; give a value below 3");
    let none = view([1, 2, 0, 4]);
    let wrong = state.step(Machine::detect(), x, none, none).unwrap_err().to_string();
    says(wrong, "queries of new positions: 3 is out of range; give a value below 1");
    let wrong =
        state.step(Machine::detect(), view([1, 1, 3, 4]), view([1, 1, 3, 4]), view([1, 1, 3, 4]));
    says(wrong.unwrap_err().to_string(), "heads: the state has 2, k has 1");
    let huge = LinearState::<f32>::new(FeatureMap::Relu, [usize::MAX, 2, 4, 4]).unwrap_err();
    assert!(matches!(huge, Error::ShapeOverflow { .. }), "{huge}");
}

#[test]
fn tensors_of_nothing_may_be_as_large_as_they_like() {
    let of = |shape| View::<f32>::bhsd(&[], shape).unwrap();
    let attention = LinearAttention::new(FeatureMap::EluPlusOne).causal();
    for shape in [[1, 1 << 40, 0, 8], [1, 1, 0, 1 << 60], [0, 1, 1000, 1 << 40]] {
        let x = of(shape);
        let output = attention.forward(Machine::detect(), x, x, x).unwrap();
        attention.backward(Machine::detect(), x, x, x, &output, x).unwrap();
    }
    let random = FeatureMap::PositiveRandom { features: 1 << 20, seed: 0 };
    assert!(LinearState::<f32>::new(random, [1, 1, 1 << 62, 1]).is_err());
}

#[test]
fn weights_too_small_to_divide_by_count_as_none() {
    let (x, v) = ([1e-20f32], [1f32]);
    let (x, v) = (View::matrix(&x, [1, 1]).unwrap(), View::matrix(&v, [1, 1]).unwrap());
    let attention = LinearAttention::new(FeatureMap::Relu);
    let out = attention.forward(Machine::detect(), x, x, v).unwrap().out;
    assert_eq!(out.data(), [0.0]);
}

#[test]
fn a_state_can_go_to_other_threads() {
    fn goes<T: Send + Sync>() {}
    goes::<LinearState<f32>>();
}
