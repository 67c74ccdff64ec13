//! Rotary positions against plain operations.

use crate::plain::{difference, noise, pulled};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use regard::rope::{Rope, RopePairs};
use regard_candle::{Error, RopePositions, rope};

/// The definition, halves turning together.
fn plain(x: &Tensor, positions: &[i64]) -> Result<Tensor> {
    let dim = x.dims()[3];
    let angle = |i: usize| {
        let frequency = 10_000f64.powf(-2.0 * (i % (dim / 2)) as f64 / dim as f64);
        positions[i / (dim / 2)] as f64 * frequency
    };
    let of = |f: fn(f64) -> f64| {
        let numbers: Vec<f64> = (0..positions.len() * dim / 2).map(|i| f(angle(i))).collect();
        Tensor::from_vec(numbers, (1, 1, positions.len(), dim / 2), &Device::Cpu)
    };
    let (cos, sin) = (of(f64::cos)?, of(f64::sin)?);
    let (a, b) = (x.narrow(3, 0, dim / 2)?, x.narrow(3, dim / 2, dim / 2)?);
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
    Tensor::cat(&[first, second], D::Minus1)
}

#[test]
fn outputs_and_gradients_are_those_of_plain_operations() {
    let turn = Rope::new(8, RopePairs::HalfSplit);
    let list: Vec<i64> = vec![3, 1, 4, 1, 5];
    for (dtype, most) in
        [(DType::F64, 1e-12), (DType::F32, 1e-6), (DType::F16, 2e-3), (DType::BF16, 2e-2)]
    {
        for (places, positions) in [
            (RopePositions::From(7), vec![7, 8, 9, 10, 11]),
            (RopePositions::List(list.clone().into()), list.clone()),
        ] {
            for transposed in [false, true] {
                let sizes = if transposed { [2, 5, 3, 8] } else { [2, 3, 5, 8] };
                let var = Var::from_tensor(&noise(1, &sizes, dtype)).unwrap();
                let exact = Var::from_tensor(&var.to_dtype(DType::F64).unwrap()).unwrap();
                let of = |x: &Var| {
                    if transposed { x.transpose(1, 2).unwrap() } else { x.as_tensor().clone() }
                };
                let out = rope(&of(&var), &turn, places.clone()).unwrap();
                assert_eq!(out.stride(), of(&var).stride());
                let (found, expected) =
                    (pulled(&out, &[&var]), plain(&of(&exact), &positions).unwrap());
                for (found, expected) in found.iter().zip(&pulled(&expected, &[&exact])) {
                    assert!(difference(found, expected) < most);
                }
            }
        }
    }
}

#[test]
fn features_that_lie_apart_are_copied_and_have_gradients() {
    let var = Var::from_tensor(&noise(1, &[2, 3, 8, 5], DType::F64)).unwrap();
    let x = var.transpose(2, 3).unwrap();
    let out = rope(&x, &Rope::new(8, RopePairs::HalfSplit), RopePositions::From(0)).unwrap();
    let expected = pulled(&plain(&x, &[0, 1, 2, 3, 4]).unwrap(), &[&var]);
    for (found, expected) in pulled(&out, &[&var]).iter().zip(&expected) {
        assert!(difference(found, expected) < 1e-12);
    }
}

#[test]
fn what_cannot_be_turned_is_refused() {
    let x = noise(1, &[2, 3, 5, 8], DType::F32);
    let refused = |x: &Tensor, turn: Rope, places| rope(x, &turn, places).unwrap_err();
    let halves = |dim| Rope::new(dim, RopePairs::HalfSplit);
    let few = refused(&x, halves(10), RopePositions::From(0));
    assert_eq!(few, Error::Engine(regard::Error::TooFewFeatures { needed: 10, found: 8 }));
    assert!(matches!(refused(&x, halves(3), RopePositions::From(0)), Error::Engine(_)));
    assert!(matches!(refused(&x, halves(8), RopePositions::List([1, 2].into())), Error::Engine(_)));
    let flat = x.flatten_all().unwrap();
    assert!(matches!(
        refused(&flat, halves(8), RopePositions::From(0)),
        Error::Axes { tensor: "x", .. }
    ));
}
