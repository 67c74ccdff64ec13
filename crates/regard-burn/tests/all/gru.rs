//! Recurrent nets against their steps.

use crate::{AnyLeaf, apart, leaf, same, uneven, values};
use burn::tensor::{Bool, Device, Tensor, TensorData, activation};
use regard_burn::{GruAttention, Products, Steps, gru, gru_with_attention, with_products};

/// One step by Burn's own operations.
fn cell(x: Tensor<2>, state: Tensor<2>, weight: Tensor<2>, bias: Tensor<1>) -> Tensor<2> {
    let n = state.dims()[1];
    let of_state = state.clone().matmul(weight.transpose()) + bias.unsqueeze();
    let part = |x: &Tensor<2>, i: usize| x.clone().narrow(1, i * n, n);
    let [r, z] = [0, 1].map(|i| activation::sigmoid(part(&x, i) + part(&of_state, i)));
    let new = (part(&x, 2) + r * part(&of_state, 2)).tanh();
    new.clone() + z * (state - new)
}

#[test]
fn a_sequence_through_a_gru_is_its_steps() {
    let lengths = vec![5, 0, 3, 4];
    for backward in [false, true] {
        for lengths in [None, Some(lengths.clone())] {
            let (x, state) =
                (|| AnyLeaf::Three(leaf([4, 5, 21], 1)), || AnyLeaf::Two(leaf([4, 7], 2)));
            let (weight, bias) =
                (|| AnyLeaf::Two(leaf([21, 7], 3)), || AnyLeaf::One(leaf([21], 4)));
            same(
                "gru",
                [&x, &state, &weight, &bias],
                |l| {
                    let steps = Steps { lengths: lengths.clone(), backward };
                    gru(l[0].three(), l[1].two(), l[2].two(), l[3].one(), steps)
                },
                |l| {
                    let mut state = l[1].two();
                    let mut states = Vec::new();
                    let order: Vec<usize> =
                        if backward { (0..5).rev().collect() } else { (0..5).collect() };
                    for at in order {
                        let x = l[0].three().narrow(1, at, 1).reshape([4, 21]);
                        let next = cell(x, state.clone(), l[2].two(), l[3].one());
                        let outside: Vec<bool> = (0..4)
                            .map(|row| lengths.as_ref().is_some_and(|n| at >= n[row]))
                            .collect();
                        let outside: Tensor<2, Bool> =
                            Tensor::from_data(TensorData::new(outside, [4, 1]), &Device::flex());
                        state = next.mask_where(outside.expand([4, 7]), state);
                        states.push(state.clone());
                    }
                    if backward {
                        states.reverse();
                    }
                    Tensor::stack(states, 1)
                },
            );
        }
    }
}

#[test]
fn a_gru_that_looks_is_its_steps() {
    let (x, state) = (|| AnyLeaf::Three(leaf([3, 4, 15], 1)), || AnyLeaf::Two(leaf([3, 5], 2)));
    let (weight, bias) = (|| AnyLeaf::Two(leaf([15, 5], 3)), || AnyLeaf::One(leaf([15], 4)));
    let (query, score) = (|| AnyLeaf::Two(leaf([6, 5], 5)), || AnyLeaf::One(leaf([6], 6)));
    let (keys, values) =
        (|| AnyLeaf::Three(leaf([3, 7, 6], 7)), || AnyLeaf::Three(leaf([3, 7, 9], 8)));
    let context = || AnyLeaf::Two(leaf([15, 9], 9));
    let lengths = [7, 1, 4];
    same(
        "gru that looks",
        [&x, &state, &weight, &bias, &query, &score, &keys, &values, &context],
        |l| {
            let look = GruAttention {
                query: l[4].two(),
                score: l[5].one(),
                keys: l[6].three(),
                values: l[7].three(),
                context: l[8].two(),
                lengths: lengths.to_vec(),
            };
            gru_with_attention(l[0].three(), l[1].two(), l[2].two(), l[3].one(), look)
        },
        |l| {
            let hidden: Vec<bool> = (0..21).map(|i| i % 7 >= lengths[i / 7]).collect();
            let hidden: Tensor<2, Bool> =
                Tensor::from_data(TensorData::new(hidden, [3, 7]), &Device::flex());
            let (mut state, mut after) = (l[1].two(), Vec::new());
            for at in 0..4 {
                let query = state.clone().matmul(l[4].two().transpose());
                let inner = (query.unsqueeze_dim::<3>(1).expand([3, 7, 6]) + l[6].three()).tanh();
                let score = l[5].one().reshape([1, 1, 6]).expand([3, 7, 6]);
                let scores = (inner * score).sum_dim(2).reshape([3, 7]);
                let scores = scores.mask_fill(hidden.clone(), f32::NEG_INFINITY);
                let weights = activation::softmax(scores, 1).reshape([3, 1, 7]);
                let seen: Tensor<2> = weights.matmul(l[7].three()).reshape([3, 9]);
                let x = l[0].three().narrow(1, at, 1).reshape([3, 15]);
                let x = x + seen.clone().matmul(l[8].two().transpose());
                state = cell(x, state, l[2].two(), l[3].one());
                after.push(Tensor::cat(vec![state.clone(), seen], 1));
            }
            Tensor::stack(after, 1)
        },
    );
}

#[test]
fn a_gru_may_round_to_bf16_both_ways() {
    let run = |products: Products| {
        let (x, state) = (leaf::<3>([16, 3, 24], 1), leaf::<2>([16, 8], 2));
        let (weight, bias) = (leaf::<2>([24, 8], 3), leaf::<1>([24], 4));
        let steps = Steps::default();
        let y = with_products(products, || gru(x.clone(), state, weight.clone(), bias, steps));
        let out = values(&y);
        let grads = uneven(y).backward();
        let by = [x.grad(&grads).map(|g| values(&g)), weight.grad(&grads).map(|g| values(&g))];
        (out, by.map(|g| g.expect("a gradient")))
    };
    let ((exact, by), (rounded, rounded_by)) = (run(Products::F32), run(Products::Bf16));
    let off =
        [apart(&rounded, &exact), apart(&rounded_by[0], &by[0]), apart(&rounded_by[1], &by[1])];
    assert!(off.iter().all(|off| (1e-6..2e-2).contains(off)), "{off:?}");
}
