//! Outputs and gradients against plain operations.

use crate::plain::{difference, noise, plain, pulled};
use candle_core::{DType, Device, Tensor, Var};
use regard::problem::{Align, Dropout, Local, Normalizer};
use regard::score::RelativeBias;
use regard::{AttentionView, Machine, Mask, Plan, Problem, Score, View};
use regard_candle::{Attention, Buckets, Relative, Similarity, attention};

const F64: DType = DType::F64;

fn var(seed: u64, sizes: &[usize], dtype: DType) -> Var {
    Var::from_tensor(&noise(seed, sizes, dtype)).unwrap()
}

/// Differences of output and gradients from the definition in f64, of `[batch, heads, length, dim]` in memory or transposed.
fn differences(
    sizes: [[usize; 4]; 3],
    transposed: bool,
    dtype: DType,
    options: &Attention,
) -> [f64; 4] {
    let own = |i: u64, [b, h, s, d]: [usize; 4]| {
        var(i, &if transposed { [b, s, h, d] } else { [b, h, s, d] }, dtype)
    };
    let vars = [own(1, sizes[0]), own(2, sizes[1]), own(3, sizes[2])];
    let exact = vars.each_ref().map(|x| Var::from_tensor(&x.to_dtype(F64).unwrap()).unwrap());
    let of = |x: &Var| if transposed { x.transpose(1, 2).unwrap() } else { x.as_tensor().clone() };
    let [q, k, v] = vars.each_ref().map(of);
    let out = attention(&q, &k, &v, options).unwrap().out;
    assert_eq!(out.dtype(), dtype);
    let found = pulled(&out, &vars.each_ref());
    let [q, k, v] = exact.each_ref().map(of);
    let bias = options.bias.as_ref().map(|bias| bias.to_dtype(F64).unwrap());
    let options = Attention { bias, ..options.clone() };
    let expected = pulled(&plain(&q, &k, &v, &options).unwrap(), &exact.each_ref());
    std::array::from_fn(|i| difference(&found[i], &expected[i]))
}

fn near(options: &Attention) {
    let (q, kv) = ([2, 4, 37, 16], [2, 2, 70, 16]);
    for (dtype, most) in [(F64, 1e-12), (DType::F32, 5e-6), (DType::F16, 4e-3), (DType::BF16, 3e-2)]
    {
        let bias = options.bias.as_ref().map(|bias| bias.to_dtype(dtype).unwrap());
        let options = Attention { bias, ..options.clone() };
        for transposed in [false, true] {
            let found = differences([q, kv, [2, 2, 70, 24]], transposed, dtype, &options);
            assert!(found.iter().all(|x| *x <= most), "{dtype:?} {found:?} {options:?}");
        }
    }
}

#[test]
fn every_key() {
    near(&Attention::default());
}

#[test]
fn masks() {
    near(&Attention { mask: Mask::causal(), ..Default::default() });
    let mask = Mask::causal().window(9).and(Mask::lengths(&[70, 51]));
    near(&Attention { mask, align: Align::Offset(20), ..Default::default() });
}

#[test]
fn scores() {
    let bias = Some(noise(4, &[1, 4, 37, 70], F64));
    near(&Attention { scale: Some(0.7), softcap: Some(1.5), bias, ..Default::default() });
    let bias = Some(noise(5, &[2, 1, 1, 70], F64));
    near(&Attention { bias, mask: Mask::causal(), ..Default::default() });
}

#[test]
fn dropped_weights() {
    near(&Attention { dropout: Some(Dropout::new(0.3, 7, 1)), ..Default::default() });
}

#[test]
fn a_row_that_sees_nothing_is_0_and_so_are_its_gradients() {
    let mask = Mask::lengths(&[70, 0]);
    near(&Attention { mask: mask.clone(), ..Default::default() });
    let [q, k, v] = [1, 2, 3].map(|i| var(i, &[2, 2, 70, 8], DType::F32));
    let attended = attention(&q, &k, &v, &Attention { mask, ..Default::default() }).unwrap();
    assert!(attended.lse()[2 * 70..].iter().all(|x| *x == f32::NEG_INFINITY));
    for x in pulled(&attended.out, &[&q, &k, &v]) {
        let x = x.get(1).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(x.iter().all(|x| *x == 0.0));
    }
}

#[test]
fn parts_of_one_projection_share_its_gradient() {
    let (batch, len, heads, dim) = (2, 23, 3, 8);
    let run = |own: bool| {
        let qkv = var(1, &[batch, len, 3, heads, dim], F64);
        let part = |i| qkv.narrow(2, i, 1)?.squeeze(2)?.transpose(1, 2);
        let [q, k, v] = [0, 1, 2].map(|i| part(i).unwrap());
        assert!(q.stride()[3] == 1 && !q.is_contiguous());
        let options = Attention { mask: Mask::causal(), ..Default::default() };
        let out = if own {
            attention(&q, &k, &v, &options).unwrap().out
        } else {
            plain(&q, &k, &v, &options).unwrap()
        };
        pulled(&out, &[&qkv])
    };
    for (found, expected) in run(true).iter().zip(&run(false)) {
        assert!(difference(found, expected) < 1e-12);
    }
}

#[test]
fn the_output_lies_in_memory_as_q_does() {
    let x = noise(1, &[2, 9, 3, 8], DType::F32).transpose(1, 2).unwrap();
    let out = attention(&x, &x, &x, &Attention::default()).unwrap().out;
    assert_eq!((out.dims(), out.stride()), (x.dims(), x.stride()));
    let x = x.contiguous().unwrap();
    let out = attention(&x, &x, &x, &Attention::default()).unwrap().out;
    assert!(out.is_contiguous());
}

#[test]
fn features_that_lie_apart_and_repeated_heads_have_gradients_too() {
    let run = |own: bool| {
        let (apart, one, v) =
            (var(1, &[2, 4, 8, 9], F64), var(2, &[2, 1, 9, 8], F64), var(3, &[2, 4, 9, 1], F64));
        let q = apart.transpose(2, 3).unwrap();
        let k = one.broadcast_as((2, 4, 9, 8)).unwrap();
        let out = if own {
            attention(&q, &k, &v, &Attention::default()).unwrap().out
        } else {
            plain(&q, &k, &v, &Attention::default()).unwrap()
        };
        pulled(&out, &[&apart, &one, &v])
    };
    for (found, expected) in run(true).iter().zip(&run(false)) {
        assert!(difference(found, expected) < 1e-12);
    }
}

#[test]
fn one_tensor_may_be_q_and_k_and_v() {
    let x = var(1, &[1, 2, 19, 8], F64);
    let own = attention(&x, &x, &x, &Attention::default()).unwrap().out;
    let (own, expected) = (pulled(&own, &[&x]), plain(&x, &x, &x, &Attention::default()).unwrap());
    for (found, expected) in own.iter().zip(&pulled(&expected, &[&x])) {
        assert!(difference(found, expected) < 1e-12);
    }
}

#[test]
fn a_graph_may_be_gone_back_through_twice_and_constants_have_no_gradients() {
    let (q, k, v) =
        (var(1, &[1, 2, 9, 8], F64), var(2, &[1, 2, 9, 8], F64), noise(3, &[1, 2, 9, 8], F64));
    let loss = attention(&q, &k, &v, &Attention::default()).unwrap().out.sqr().unwrap();
    let [first, second] = [(); 2].map(|()| loss.backward().unwrap());
    for x in [&q, &k] {
        let [first, second] = [&first, &second].map(|grads| grads.get(x.as_tensor()).unwrap());
        assert_eq!(difference(first, second), 0.0);
    }
    assert!(first.get(&v).is_none());
}

/// The engine itself, by its own views.
fn engine<'a>(q: &Tensor, options: impl FnOnce(Problem<'a, f64>) -> Problem<'a, f64>) -> Tensor {
    let (b, h, s, d) = q.dims4().unwrap();
    let data = q.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    let x = View::bhsd(&data, [b, h, s, d]).unwrap();
    let plan = Plan::new(options(Problem::new(&x, &x, &x)), Machine::detect()).unwrap();
    let out = plan.forward(x, x, x).unwrap().out.into_data();
    Tensor::from_vec(out, q.shape(), &Device::Cpu).unwrap()
}

#[test]
fn the_other_options_are_those_of_the_engine() {
    let x = noise(1, &[2, 2, 11, 8], F64);
    let [table, t5] = [noise(2, &[5, 2], F64), noise(3, &[8, 2], F64)];
    let heads = noise(4, &[2], F64);
    let centers = (noise(5, &[2, 2, 11], F64) * 4.0).unwrap().affine(1.0, 5.0).unwrap();
    let same = |options: Attention, expected: Tensor| {
        let out = attention(&x, &x, &x, &options).unwrap().out;
        assert_eq!(difference(&out, &expected), 0.0, "{options:?}");
    };
    let usual = Attention::default;
    let [by_head, clipped, by_bucket, around] =
        [&heads, &table, &t5, &centers].map(|x| x.flatten_all().unwrap().to_vec1::<f64>().unwrap());
    same(
        Attention { alibi: Some(heads.clone()), ..usual() },
        engine(&x, |p| p.score(Score::new().alibi(&by_head))),
    );
    same(
        Attention { sinks: Some(heads), ..usual() },
        engine(&x, |p| p.score(Score::new().sinks(&by_head))),
    );
    let relative = Relative { table, buckets: Buckets::Clipped { reach: 2 } };
    let expected = RelativeBias::clipped(&clipped, 2);
    same(
        Attention { relative: Some(relative), ..usual() },
        engine(&x, |p| p.score(Score::new().relative(expected))),
    );
    let buckets = Buckets::T5 { max_distance: 16, bidirectional: true };
    let expected = RelativeBias::t5(&by_bucket, 8, 16, true);
    same(
        Attention { relative: Some(Relative { table: t5, buckets }), ..usual() },
        engine(&x, |p| p.score(Score::new().relative(expected))),
    );
    same(
        Attention { centers: Some((centers, 3)), ..usual() },
        engine(&x, |p| p.local(Local::new(&around, 3))),
    );
    same(
        Attention { normalizer: Normalizer::TopK(3), ..usual() },
        engine(&x, |p| p.normalizer(Normalizer::TopK(3))),
    );
    same(
        Attention { similarity: Similarity::Distance, ..usual() },
        engine(&x, |p| p.similarity(regard::problem::Similarity::Distance)),
    );
}

#[test]
fn lse_is_what_the_microscope_needs() {
    let (q, k) = (noise(1, &[1, 2, 10, 8], DType::F32), noise(2, &[1, 2, 10, 8], DType::F32));
    let attended =
        attention(&q, &k, &k, &Attention { mask: Mask::causal(), ..Default::default() }).unwrap();
    let [q, k] = [q, k].map(|x| x.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    let [q, k] = [&q, &k].map(|x| View::bhsd(x, [1, 2, 10, 8]).unwrap());
    let plan = Plan::new(Problem::new(&q, &k, &k).mask(Mask::causal()), Machine::detect()).unwrap();
    let view = AttentionView::from_lse(&plan, q, k, attended.lse()).unwrap();
    let row = view.head(0, 1).unwrap().row(4).unwrap();
    assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-5 && row[5..] == [0.0; 5]);
}

#[test]
fn empty_tensors_are_no_trouble() {
    for (batch, q_len, k_len) in [(0, 3, 3), (2, 0, 3), (2, 3, 0)] {
        let (q, k) = (var(1, &[batch, 2, q_len, 8], F64), var(2, &[batch, 2, k_len, 8], F64));
        let out = attention(&q, &k, &k, &Attention::default()).unwrap().out;
        assert_eq!(out.dims(), [batch, 2, q_len, 8]);
        assert!(out.sum_all().unwrap().backward().unwrap().get(q.as_tensor()).is_some());
    }
}
