//! Linear layers, gates, norms, losses, lookups, residual streams.

use crate::{AnyLeaf, apart, leaf, same, uneven, values};
use burn::tensor::{Device, Int, Tensor, TensorData, activation};
use regard_burn::{
    Activation, CrossEntropy, ElementDropout, Error, Products, cross_entropy, dropout, embedding,
    gated, layer_norm, linear, residual, rms_norm, with_products,
};

fn ids<const D: usize>(list: &[i64], shape: [usize; D]) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(list.to_vec(), shape), &Device::flex())
}

#[test]
fn a_linear_layer_is_product_bias_and_activation() {
    for (rows, features, out) in [(1, 5, 7), (3, 64, 130), (40, 33, 17)] {
        for activation in [
            Activation::None,
            Activation::Relu,
            Activation::Gelu,
            Activation::GeluTanh,
            Activation::Silu,
        ] {
            let theirs = |x: Tensor<3>| match activation {
                Activation::None => x,
                Activation::Relu => activation::relu(x),
                Activation::Gelu => activation::gelu(x),
                Activation::GeluTanh => {
                    let inner = (x.clone() + x.clone().powf_scalar(3.0) * 0.044_715) * 0.797_884_6;
                    x * (inner.tanh() + 1.0) * 0.5
                }
                Activation::Silu => activation::silu(x),
            };
            let (x, w, b) = (
                || AnyLeaf::Three(leaf([2, rows, features], 1)),
                || AnyLeaf::Two(leaf([out, features], 2)),
                || AnyLeaf::One(leaf([out], 3)),
            );
            same(
                &format!("{activation:?} of {rows} x {features} x {out}"),
                [&x, &w, &b],
                |l| linear(l[0].three(), l[1].two(), Some(l[2].one()), activation),
                |l| {
                    let w = l[1].two().transpose().unsqueeze::<3>();
                    theirs(l[0].three().matmul(w) + l[2].one().unsqueeze())
                },
            );
        }
    }
}

#[test]
fn a_linear_layer_may_round_to_bf16_both_ways() {
    let run = |products| {
        let (x, w, b) = (leaf([2, 60, 70], 1), leaf([90, 70], 2), leaf([90], 3));
        let y = with_products(products, || {
            linear(x.clone(), w.clone(), Some(b.clone()), Activation::Gelu)
        });
        // The way back is taken outside of the scope, and keeps to it.
        let grads = uneven(y.clone()).backward();
        let by = |grad: Option<Vec<f32>>| grad.expect("a gradient");
        let by_x = by(x.grad(&grads).map(|grad| values(&grad)));
        [values(&y), by_x, by(w.grad(&grads).map(|grad| values(&grad)))]
    };
    for (rounded, right) in run(Products::Bf16).iter().zip(run(Products::F32)) {
        let apart = apart(rounded, &right);
        // 2^-9 for each number; sums of many forget most of it.
        assert!((1e-5..4e-3).contains(&apart), "{apart}");
    }
}

#[test]
fn a_gate_is_silu_times_the_other() {
    let leaves = [|| AnyLeaf::Two(leaf([9, 31], 4)), || AnyLeaf::Two(leaf([9, 31], 5))];
    same(
        "gated",
        [&leaves[0], &leaves[1]],
        |l| gated(l[0].two() * 3.0, l[1].two()),
        |l| activation::silu(l[0].two() * 3.0) * l[1].two(),
    );
}

#[test]
fn norms_are_their_definitions() {
    let (x, w, b) = (
        || AnyLeaf::Three(leaf([2, 71, 37], 6)),
        || AnyLeaf::One(leaf([37], 7)),
        || AnyLeaf::One(leaf([37], 8)),
    );
    same(
        "layer norm",
        [&x, &w, &b],
        |l| layer_norm(l[0].three(), l[1].one(), l[2].one(), 1e-5),
        |l| {
            let x = l[0].three();
            let centered = x.clone() - x.mean_dim(2);
            let variance = (centered.clone() * centered.clone()).mean_dim(2);
            centered / (variance + 1e-5).sqrt() * l[1].one().unsqueeze() + l[2].one().unsqueeze()
        },
    );
    same(
        "rms norm",
        [&x, &w],
        |l| rms_norm(l[0].three(), l[1].one(), 1e-5),
        |l| {
            let x = l[0].three();
            let squares = (x.clone() * x.clone()).mean_dim(2);
            x / (squares + 1e-5).sqrt() * l[1].one().unsqueeze()
        },
    );
}

#[test]
fn cross_entropy_is_its_definition() {
    let targets = [3i64, 0, -100, 50, 7, -100, 3];
    for smoothing in [0.0, 0.1] {
        let scores = || AnyLeaf::Two(leaf([7, 51], 9));
        let how = CrossEntropy { smoothing, ignored: Some(-100) };
        same(
            &format!("cross entropy, smoothing {smoothing}"),
            [&scores],
            |l| {
                cross_entropy(l[0].two() * 5.0, ids(&targets, [7]), how)
                    .expect("targets are classes")
            },
            |l| {
                let logs = activation::log_softmax(l[0].two() * 5.0, 1);
                let kept = (0i64..).zip(targets).filter(|(_, target)| *target >= 0).map(|(i, _)| i);
                let kept: Vec<i64> = kept.collect();
                let logs = logs.select(0, ids(&kept, [5]));
                let valid: Vec<i64> = targets.iter().copied().filter(|t| *t >= 0).collect();
                let hit = logs.clone().gather(1, ids(&valid, [5, 1])).mean();
                let all = logs.mean();
                -(hit * (1.0 - smoothing) + all * smoothing)
            },
        );
    }
    let scores = leaf([2, 4], 1);
    let wrong = cross_entropy(scores.clone(), ids(&[1, 4], [2]), CrossEntropy::default());
    assert_eq!(wrong.err(), Some(Error::Target { row: 1, found: 4, classes: 4 }));
    let wrong = cross_entropy(scores.clone(), ids(&[1], [1]), CrossEntropy::default());
    assert_eq!(wrong.err(), Some(Error::Targets { rows: 2, found: 1 }));
    let none = CrossEntropy { ignored: Some(1), ..CrossEntropy::default() };
    let nothing =
        cross_entropy(scores.clone(), ids(&[1, 1], [2]), none).expect("targets are classes");
    assert_eq!(values(&nothing), [0.0]);
}

#[test]
fn a_lookup_is_a_choice_of_rows() {
    let chosen = [4i64, 0, 4, 4, 2, 1];
    let table = || AnyLeaf::Two(leaf([6, 13], 10));
    same(
        "embedding",
        [&table],
        |l| embedding(l[0].two(), ids(&chosen, [2, 3])).expect("ids are rows"),
        |l| l[0].two().select(0, ids(&chosen, [6])).reshape([2, 3, 13]),
    );
    let wrong = embedding(leaf([6, 13], 10), ids(&[0, 6], [1, 2]));
    assert_eq!(wrong.err(), Some(Error::Id { place: 1, found: 6, entries: 6 }));
}

#[test]
fn a_residual_stream_adds_what_is_not_dropped() {
    let leaves = [|| AnyLeaf::Two(leaf([300, 31], 11)), || AnyLeaf::Two(leaf([300, 31], 12))];
    same(
        "residual",
        [&leaves[0], &leaves[1]],
        |l| residual(l[0].two(), l[1].two(), None),
        |l| l[0].two() + l[1].two(),
    );
    let drop = Some(ElementDropout { rate: 0.3, seed: 5 });
    // What is dropped from ones is what is dropped from anything.
    let mask = || dropout(leaf::<2>([300, 31], 11).ones_like().detach(), drop);
    same(
        "residual with dropout",
        [&leaves[0], &leaves[1]],
        |l| residual(l[0].two(), l[1].two(), drop),
        |l| l[0].two() + l[1].two() * mask(),
    );
    same("dropout", [&leaves[0]], |l| dropout(l[0].two(), drop), |l| l[0].two() * mask());
}

#[test]
fn tensors_outside_of_the_graph_get_no_gradient_and_do_no_harm() {
    let x: Tensor<2> =
        Tensor::from_data(TensorData::new(crate::noise(12, 1), [3, 4]), &Device::flex());
    let w = leaf([5, 4], 2);
    let y = linear(x.clone(), w.clone(), None, Activation::None);
    let grads = uneven(y.clone()).backward();
    assert_eq!(w.grad(&grads).expect("a gradient").dims(), [5, 4]);
    let plain = linear(x.clone(), w.inner(), None, Activation::None);
    assert_eq!(apart(&values(&plain), &values(&y)), 0.0);
}

/// A block's worth of operations, forward and backward, as bits.
fn all_bits() -> Vec<u32> {
    let (x, w, up) = (leaf([4, 50, 48], 1), leaf([48, 48], 2), leaf([200, 48], 3));
    let (one, zero) = (leaf([48], 4), leaf([48], 5));
    let y = layer_norm(x.clone(), one.clone(), zero.clone(), 1e-5);
    let y = linear(y, w.clone(), Some(one.clone()), Activation::Gelu);
    let y = residual(x.clone(), y, Some(ElementDropout { rate: 0.1, seed: 3 }));
    let scores = linear(rms_norm(y, one.clone(), 1e-5), up.clone(), None, Activation::None);
    let targets: Vec<i64> = (0..200).collect();
    let loss =
        cross_entropy(scores.reshape([200, 200]), ids(&targets, [200]), CrossEntropy::default());
    let loss = loss.expect("targets are classes");
    let grads = loss.backward();
    let by = [
        x.grad(&grads).map(|g| values(&g)),
        w.grad(&grads).map(|g| values(&g)),
        up.grad(&grads).map(|g| values(&g)),
    ];
    let by = by
        .into_iter()
        .chain([one.grad(&grads).map(|g| values(&g)), zero.grad(&grads).map(|g| values(&g))]);
    by.flat_map(|grad| grad.expect("a gradient")).chain(values(&loss)).map(f32::to_bits).collect()
}

#[test]
fn threads_change_no_bit() {
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        pool.install(all_bits)
    };
    let one = with(1);
    assert!(one == with(2) && one == with(7));
}
