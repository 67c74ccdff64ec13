//! Edge cases: rules that call the engine recursively, numbers near the limits of their range, sizes that overflow.

use regard::machine::Precision;
use regard::mask::MaskRule;
use regard::problem::{Normalizer, Pair, Scope};
use regard::score::ScoreRule;
use regard::{Error, Isa, Machine, Mask, Plan, Problem, Score, Shape, View, bf16};
use regard_testkit::{Noise, run::forward};
use std::ops::Range;

const SHAPE: [usize; 4] = [1, 2, 70, 32];

fn normals<E: regard::Element>(seed: u64) -> Vec<E> {
    Noise::new(seed).normals(SHAPE.iter().product())
}

/// Calls the engine, on AMX tiles if available, and rayon, which may run any other task on this thread.
fn call_back() {
    let x: Vec<bf16> = normals(3);
    let view = View::bhsd(&x, SHAPE).expect("a tensor");
    let problem = Problem::new(&view, &view, &view);
    let run = || forward(&problem, (view, view, view), Isa::best(), 2);
    let (a, b) = rayon::join(run, run);
    assert_eq!(a.out.data(), b.out.data());
}

/// Changes nothing, but calls the engine for some pairs.
#[derive(Debug)]
struct Recursive;

impl ScoreRule for Recursive {
    fn apply(&self, at: Pair, score: f64) -> f64 {
        if at.row % 35 == 1 && at.key % 33 == 1 {
            call_back();
        }
        score
    }
    fn derivative(&self, at: Pair, score: f64) -> f64 {
        self.apply(at, score) * 0.0 + 1.0
    }
}

impl MaskRule for Recursive {
    fn visible(&self, scope: &Scope, row: usize, ranges: &mut Vec<Range<usize>>) {
        if row % 35 == 1 {
            call_back();
        }
        ranges.push(0..scope.k_len);
    }
}

#[test]
fn rules_may_call_the_engine_and_rayon() {
    let [q, k, v] = [1, 2, 4].map(normals::<bf16>);
    for (rows, isa) in
        [70, 2].into_iter().flat_map(|n| Isa::available().into_iter().map(move |i| (n, i)))
    {
        let shape = [1, 2, rows, 32];
        let q = View::bhsd(&q[..2 * rows * 32], shape).expect("a tensor");
        let [k, v] = [&k, &v].map(|x| View::bhsd(x, SHAPE).expect("a tensor"));
        let plain = Problem::new(&q, &k, &v);
        let expected = forward(&plain, (q, k, v), isa, 1);
        let ruled = plain.clone().score(Score::default().custom(&Recursive));
        let masked = plain.clone().mask(Mask::custom(Recursive));
        for problem in [ruled, masked] {
            let plan = Plan::new(problem, Machine::detect().isa(isa).threads(2)).expect("a plan");
            let output = plan.forward(q, k, v).expect("an output");
            for (a, b) in output.lse.iter().zip(&expected.lse) {
                assert!((a - b).abs() < 1e-4, "{}: {a} {b}", isa.name());
            }
            let d_out = expected.out.view();
            let output_grads = regard::plan::OutputGrads::new(d_out);
            let grads = plan.backward(q, k, v, &output, output_grads).expect("gradients");
            assert!(grads.q.data().iter().all(|x| x.is_finite()));
        }
    }
}

/// Keys near the largest `f32`, which must not be rounded to infinity when they are split into bf16 terms.
#[test]
fn numbers_that_would_round_to_infinity_are_cut_off() {
    let n = 64;
    let k = vec![f32::MAX; n * 32];
    let q: Vec<f32> = Noise::new(5).normals::<f32>(n * 32).iter().map(|x| x * 1e-38).collect();
    let v: Vec<f32> = Noise::new(6).normals(n * 32);
    let [q, k, v] = [&q, &k, &v].map(|x| View::bhsd(x, [1, 1, n, 32]).expect("a tensor"));
    for precision in [Precision::Strict, Precision::Full, Precision::High] {
        let problem = Problem::new(&q, &k, &v).precision(precision);
        for isa in Isa::available() {
            let output = forward(&problem, (q, k, v), isa, 1);
            let finite = output.out.data().iter().chain(&output.lse).all(|x| x.is_finite());
            assert!(finite, "{} {}", isa.name(), precision.name());
        }
    }
}

#[test]
fn sizes_whose_product_overflows_are_refused() {
    let data = [0f32; 5];
    for shape in [[usize::MAX, 2], [2, usize::MAX], [usize::MAX, usize::MAX], [1 << 33, 1 << 33]] {
        assert!(View::packed(&data, &[0], shape).is_err());
        assert!(View::packed(&data, &[0, 5], shape).is_err());
        assert!(View::bhsd(&data, [1, 1, shape[0], shape[1]]).is_err());
    }
}

/// A plan depends on sizes alone, so it can describe more rows than fit into memory.
#[test]
fn memory_that_is_refused_is_an_error() {
    // With strides of 0 the tensors take no memory, but lse needs an entry per row.
    let rows = 1 << 59;
    let q = Shape { batch: 1, heads: 1, len: rows, dim: 1 };
    let k = Shape { len: 1, ..q };
    let problem = Problem::<f32>::of_shapes(q, k, k).normalizer(Normalizer::TopK(4));
    let plan = Plan::new(problem, Machine::detect()).expect("a plan");
    assert!(plan.work().pairs == rows as u128);
    // All rows share the same memory.
    let data = [1f32];
    let strides = regard::tensor::Strides { batch: 0, heads: 0, len: 0 };
    let view = |shape| View::strided(&data, shape, strides).expect("a tensor");
    let refused = plan.forward(view(q), view(k), view(k));
    assert!(matches!(refused, Err(Error::OutOfMemory { .. } | Error::ShapeOverflow { .. })));
}

/// Every score tile of a row has its own random number, also tiles of gathered keys. Otherwise draws would be correlated,
/// and keys would be drawn too often or never.
#[test]
fn picked_pieces_have_draws_of_their_own() {
    // Two keys of each 128 are visible: 200 keys in tiles of 64 gathered keys, no two of which start in the same key block,
    // and one regular key block.
    let (keys, rows) = (12_800, 4096);
    #[derive(Debug)]
    struct Few;
    impl MaskRule for Few {
        fn visible(&self, scope: &Scope, _: usize, ranges: &mut Vec<Range<usize>>) {
            ranges.push(0..64);
            (64..scope.k_len).step_by(128).for_each(|key| ranges.push(key..key + 2));
        }
    }
    let data = [0f32];
    let strides = regard::tensor::Strides { batch: 0, heads: 0, len: 0 };
    let view = |len| {
        let shape = Shape { batch: 1, heads: 1, len, dim: 1 };
        View::strided(&data, shape, strides).expect("a tensor")
    };
    let (q, k) = (view(rows), view(keys));
    let problem = Problem::new(&q, &k, &k).mask(Mask::custom(Few));
    let problem = problem.normalizer(Normalizer::Sampled { seed: 11 });
    let output = forward(&problem, (q, k, k), Isa::best(), 2);
    let choice = output.selection.expect("a draw");
    let mut drawn = vec![0usize; keys];
    (0..rows).for_each(|row| drawn[choice.keys(row)[0]] += 1);
    let seen = 64 + (keys - 64).div_ceil(128) * 2;
    // All scores are equal, so each key is drawn with equal probability. The statistic has `seen - 1` degrees of freedom.
    let expected = rows as f64 / seen as f64;
    let chi2: f64 = (0..keys)
        .filter(|key| *key < 64 || (key - 64) % 128 < 2)
        .map(|key| (drawn[key] as f64 - expected).powi(2) / expected)
        .sum();
    let freedom = (seen - 1) as f64;
    assert!(chi2 < freedom + 5.0 * (2.0 * freedom).sqrt(), "chi^2 {chi2} for {freedom}");
}

/// Weights far below the largest one are 0, not subnormal, and the others match the reference.
#[test]
fn negligible_weights_are_nothing() {
    let n = 64;
    let mut q: Vec<f32> = Noise::new(8).normals(n * 32);
    q.iter_mut().for_each(|x| *x *= 40.0);
    let [k, v] = [9, 10].map(|seed| Noise::new(seed).normals::<f32>(n * 32));
    let [q, k, v] = [&q, &k, &v].map(|x| View::bhsd(x, [1, 1, n, 32]).expect("a tensor"));
    let problem = Problem::new(&q, &k, &v);
    let exact = regard::reference::forward::<f64, f32>(&problem, (q, k, v));
    for isa in Isa::available() {
        let output = forward(&problem, (q, k, v), isa, 1);
        for (x, exact) in output.out.data().iter().zip(&exact.out) {
            assert!((f64::from(*x) - exact).abs() < 1e-3, "{}: {x} {exact}", isa.name());
        }
    }
}
