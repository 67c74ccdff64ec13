//! Attention against a softmax of Burn's products, and against the engine itself.

use crate::{AnyLeaf, leaf, noise, same, uneven, values};
use burn::tensor::{Bool, Device, Tensor, TensorData, activation};
use regard::rope::{Rope, RopePairs};
use regard::{Machine, Mask, Plan, Problem, View};
use regard_burn::{Attention, Buckets, Relative, RopePositions, Similarity, attention, rope};

/// `[batch, length, heads, features]` as attention wants it, without a copy.
fn heads(x: &AnyLeaf) -> Tensor<4> {
    x.four().swap_dims(1, 2)
}

fn causal(rows: usize, keys: usize) -> Tensor<2, Bool> {
    let hidden: Vec<bool> = (0..rows * keys).map(|i| i % keys > i / keys + keys - rows).collect();
    Tensor::from_data(TensorData::new(hidden, [rows, keys]), &Device::flex())
}

/// The definition, by Burn's own operations; `repeat` query heads share a key head.
fn plain(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    repeat: usize,
    change: impl Fn(Tensor<4>) -> Tensor<4>,
) -> Tensor<4> {
    let [b, h, n, d] = k.dims();
    let spread = |x: Tensor<4>| {
        let last = x.dims()[3];
        x.unsqueeze_dim::<5>(2).repeat_dim(2, repeat).reshape([b, h * repeat, n, last])
    };
    let scores = q.matmul(spread(k).swap_dims(2, 3)) / (d as f64).sqrt();
    activation::softmax(change(scores), 3).matmul(spread(v))
}

#[test]
fn grouped_causal_attention_is_its_definition() {
    let (q, k, v) = (
        || AnyLeaf::Four(leaf([2, 9, 4, 8], 1)),
        || AnyLeaf::Four(leaf([2, 11, 2, 8], 2)),
        || AnyLeaf::Four(leaf([2, 11, 2, 5], 3)),
    );
    let options = Attention { mask: Mask::causal(), ..Attention::default() };
    same(
        "grouped causal attention",
        [&q, &k, &v],
        |l| attention(heads(&l[0]), heads(&l[1]), heads(&l[2]), &options).expect("sizes agree").out,
        |l| {
            plain(heads(&l[0]), heads(&l[1]), heads(&l[2]), 2, |s| {
                s.mask_fill(causal(9, 11).unsqueeze(), f32::NEG_INFINITY)
            })
        },
    );
}

#[test]
fn entropy_has_its_own_gradient_beside_that_of_the_output() {
    let (q, k, v) = (
        || AnyLeaf::Four(leaf([2, 9, 4, 8], 1)),
        || AnyLeaf::Four(leaf([2, 11, 2, 8], 2)),
        || AnyLeaf::Four(leaf([2, 11, 2, 5], 3)),
    );
    let options =
        Attention { mask: Mask::causal(), scale: Some(1.5), entropy: true, ..Attention::default() };
    // Both outputs side by side, so that each reaches q and k.
    let beside = |out: Tensor<4>, entropy: Tensor<3>| {
        Tensor::cat(vec![out, entropy.unsqueeze_dim::<4>(3)], 3)
    };
    same(
        "entropy",
        [&q, &k, &v],
        |l| {
            let found = attention(heads(&l[0]), heads(&l[1]), heads(&l[2]), &options);
            let found = found.expect("sizes agree");
            assert_eq!(found.max_score().len(), 2 * 4 * 9);
            beside(found.out, found.entropy.expect("it was asked for"))
        },
        |l| {
            let spread = |x: Tensor<4>| {
                let last = x.dims()[3];
                x.unsqueeze_dim::<5>(2).repeat_dim(2, 2).reshape([2, 4, 11, last])
            };
            let scores = heads(&l[0]).matmul(spread(heads(&l[1])).swap_dims(2, 3)) * 1.5;
            let hidden = causal(9, 11).unsqueeze::<4>().expand([2, 4, 9, 11]);
            let scores = scores.mask_fill(hidden.clone(), -1e9);
            let logs = activation::log_softmax(scores, 3);
            let weights = logs.clone().exp();
            let entropy = -(weights.clone() * logs.mask_fill(hidden, 0.0)).sum_dim(3);
            beside(weights.matmul(spread(heads(&l[2]))), entropy.squeeze_dim(3))
        },
    );
}

#[test]
fn learned_options_get_their_gradients() {
    let qkv = |seed| move || AnyLeaf::Four(leaf([2, 6, 3, 8], seed));
    let bias = || AnyLeaf::Four(leaf([1, 3, 6, 6], 4));
    let of = |l: &[AnyLeaf], options: &Attention| {
        attention(heads(&l[0]), heads(&l[1]), heads(&l[2]), options).expect("sizes agree").out
    };
    same(
        "bias",
        [&qkv(1), &qkv(2), &qkv(3), &bias],
        |l| of(l, &Attention { bias: Some(l[3].four()), ..Attention::default() }),
        |l| plain(heads(&l[0]), heads(&l[1]), heads(&l[2]), 1, |s| s + l[3].four()),
    );
    let table = || AnyLeaf::Two(leaf([11, 3], 5));
    let distances: Vec<i64> = (0..36).map(|i| i % 6 - i / 6 + 5).collect();
    same(
        "relative",
        [&qkv(1), &qkv(2), &qkv(3), &table],
        |l| {
            let relative = Relative { table: l[3].two(), buckets: Buckets::Clipped { reach: 5 } };
            of(l, &Attention { relative: Some(relative), ..Attention::default() })
        },
        |l| {
            let ids = Tensor::from_data(TensorData::new(distances.clone(), [36]), &Device::flex());
            let bias = l[3].two().select(0, ids).reshape([6, 6, 3]).permute([2, 0, 1]);
            plain(heads(&l[0]), heads(&l[1]), heads(&l[2]), 1, |s| s + bias.clone().unsqueeze())
        },
    );
    let sinks = || AnyLeaf::One(leaf([3], 6));
    same(
        "sinks",
        [&qkv(1), &qkv(2), &qkv(3), &sinks],
        |l| of(l, &Attention { sinks: Some(l[3].one()), ..Attention::default() }),
        |l| {
            let (q, k, v) = (heads(&l[0]), heads(&l[1]), heads(&l[2]));
            let scores = q.matmul(k.swap_dims(2, 3)) / 8f64.sqrt();
            let sink = l[3].one().reshape([1, 3, 1, 1]).expand([2, 3, 6, 1]);
            let weights = activation::softmax(Tensor::cat(vec![scores, sink], 3), 3);
            weights.narrow(3, 0, 6).matmul(v)
        },
    );
    let slopes = || AnyLeaf::One(leaf([3], 7));
    let far: Vec<f32> = (0..36i32).map(|i| (i % 6 - i / 6).abs() as f32).collect();
    same(
        "alibi",
        [&qkv(1), &qkv(2), &qkv(3), &slopes],
        |l| of(l, &Attention { alibi: Some(l[3].one()), ..Attention::default() }),
        |l| {
            let far: Tensor<4> = Tensor::from_data(
                TensorData::new(far.clone(), [1, 1, 6, 6]),
                &Device::flex().autodiff(),
            );
            plain(heads(&l[0]), heads(&l[1]), heads(&l[2]), 1, |s| {
                s - l[3].one().reshape([1, 3, 1, 1]) * far.clone()
            })
        },
    );
}

#[test]
fn learned_similarities_get_their_gradients() {
    let (q, k, v) = (
        || AnyLeaf::Four(leaf([2, 1, 4, 5], 1)),
        || AnyLeaf::Four(leaf([2, 1, 6, 7], 2)),
        || AnyLeaf::Four(leaf([2, 1, 6, 3], 3)),
    );
    let w = || AnyLeaf::Four(leaf([1, 1, 5, 7], 4));
    let of = |l: &[AnyLeaf], similarity| {
        let options = Attention { similarity, scale: Some(1.0), ..Attention::default() };
        attention(l[0].four(), l[1].four(), l[2].four(), &options).expect("sizes agree").out
    };
    same(
        "general",
        [&q, &k, &v, &w],
        |l| of(l, Similarity::General(l[3].four())),
        |l| {
            let scores = l[0].four().matmul(l[3].four()).matmul(l[1].four().swap_dims(2, 3));
            activation::softmax(scores, 3).matmul(l[2].four())
        },
    );
    let (w_q, w_k, w_v) = (
        || AnyLeaf::Four(leaf([1, 1, 5, 9], 5)),
        || AnyLeaf::Four(leaf([1, 1, 7, 9], 6)),
        || AnyLeaf::Four(leaf([1, 1, 1, 9], 7)),
    );
    same(
        "additive",
        [&q, &k, &v, &w_q, &w_k, &w_v],
        |l| {
            of(l, Similarity::Additive { w_q: l[3].four(), w_k: Some(l[4].four()), v: l[5].four() })
        },
        |l| {
            let q = l[0].four().matmul(l[3].four()).reshape([2, 4, 1, 9]);
            let k = l[1].four().matmul(l[4].four()).reshape([2, 1, 6, 9]);
            let hidden = (q.expand([2, 4, 6, 9]) + k.expand([2, 4, 6, 9])).tanh();
            let scores =
                (hidden * l[5].four().reshape([1, 1, 1, 9])).sum_dim(3).reshape([2, 1, 4, 6]);
            activation::softmax(scores, 3).matmul(l[2].four())
        },
    );
}

#[test]
fn the_adapter_has_the_bits_of_the_engine() {
    let (shape, data) = ([2, 3, 33, 16], noise(2 * 3 * 33 * 16, 8));
    let x: Tensor<4> = Tensor::from_data(TensorData::new(data.clone(), shape), &Device::flex());
    let options =
        Attention { mask: Mask::causal().window(7), softcap: Some(5.0), ..Attention::default() };
    let ours = attention(x.clone(), x.clone(), x, &options).expect("sizes agree");
    let view = View::bhsd(&data, shape).expect("sizes agree");
    let problem = Problem::new(&view, &view, &view)
        .mask(options.mask.clone())
        .score(regard::Score::new().softcap(5.0));
    let output = Plan::new(problem, Machine::detect())
        .expect("a fine problem")
        .forward(view, view, view)
        .expect("the same views");
    assert_eq!(values(&ours.out), output.out.data());
    assert_eq!(ours.lse(), output.lse);
}

#[test]
fn mistakes_are_errors_that_name_them() {
    let (q, k) = (leaf([1, 2, 3, 4], 1), leaf([1, 2, 3, 5], 2));
    let error = attention(q, k.clone(), k, &Attention::default()).expect_err("features differ");
    assert!(error.to_string().contains("features"), "{error}");
    let hard = Attention { normalizer: regard::problem::Normalizer::Hard, ..Attention::default() };
    let x = || leaf([1, 2, 3, 4], 1);
    assert_eq!(attention(x(), x(), x(), &hard).err(), Some(regard_burn::Error::NothingLearned));
    let estimated = Attention { straight_through: true, ..hard };
    let q = x();
    let out = attention(q.clone(), x(), x(), &estimated).expect("an estimate was asked for").out;
    let grads = uneven(out).backward();
    assert!(values(&q.grad(&grads).expect("a gradient")).iter().any(|x| *x != 0.0));
    let turned = Relative { table: leaf([2, 5], 3), buckets: Buckets::Clipped { reach: 2 } };
    let turned = Attention { relative: Some(turned), ..Attention::default() };
    let error = attention(x(), x(), x(), &turned).expect_err("heads and buckets are swapped");
    assert!(
        error.to_string().contains("[5, 2]") || error.to_string().contains("[2, 2]"),
        "{error}"
    );
    let odd =
        rope(leaf([1, 2, 3, 5], 1), &Rope::new(5, RopePairs::HalfSplit), RopePositions::From(0));
    assert!(odd.is_err());
}

#[test]
fn turning_back_undoes_turning() {
    for pairs in [RopePairs::HalfSplit, RopePairs::Interleaved] {
        let x = || AnyLeaf::Four(leaf([2, 5, 3, 8], 1));
        let turn = Rope::new(8, pairs);
        let places = RopePositions::List([3i64, 1, 4, 1, 5].into());
        let angles: Vec<f32> = [3f32, 1.0, 4.0, 1.0, 5.0]
            .iter()
            .flat_map(|p| (0..4).map(move |i| p * 10_000f32.powf(-(i as f32) / 4.0)))
            .collect();
        same(
            &format!("{pairs:?}"),
            [&x],
            |l| rope(heads(&l[0]), &turn, places.clone()).expect("positions fit"),
            |l| {
                let device = Device::flex().autodiff();
                let angles: Tensor<4> =
                    Tensor::from_data(TensorData::new(angles.clone(), [1, 1, 5, 4]), &device);
                let x = heads(&l[0]);
                let (a, b) = match pairs {
                    RopePairs::HalfSplit => (x.clone().narrow(3, 0, 4), x.narrow(3, 4, 4)),
                    RopePairs::Interleaved => {
                        let pairs = x.reshape([2, 3, 5, 4, 2]);
                        let side = |i| pairs.clone().narrow(4, i, 1).reshape([2, 3, 5, 4]);
                        (side(0), side(1))
                    }
                };
                let (cos, sin) = (angles.clone().cos(), angles.sin());
                let (c, d) = (a.clone() * cos.clone() - b.clone() * sin.clone(), a * sin + b * cos);
                match pairs {
                    RopePairs::HalfSplit => Tensor::cat(vec![c, d], 3),
                    RopePairs::Interleaved => {
                        Tensor::stack::<5>(vec![c, d], 4).reshape([2, 3, 5, 8])
                    }
                }
            },
        );
    }
}
