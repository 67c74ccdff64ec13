//! What is refused, by its type; nothing panics.

use crate::plain::noise;
use candle_core::{DType, Tensor, Var};
use regard::Mask;
use regard::problem::{Dropout, Normalizer};
use regard::rope::{Rope, RopePairs};
use regard_candle::{Attention, Buckets, Error, Relative, RopePositions, attention, rope};

fn x(sizes: &[usize]) -> Tensor {
    noise(1, sizes, DType::F32)
}

fn refused(options: &Attention) -> Error {
    let x = x(&[1, 2, 5, 4]);
    attention(&x, &x, &x, options).unwrap_err()
}

/// Options with a tensor in each place, made of one that has no past or one that has.
fn each(of: impl Fn(&[usize]) -> Tensor) -> Vec<(&'static str, Attention)> {
    let usual = Attention::default;
    let relative = Relative { table: of(&[5, 2]), buckets: Buckets::Clipped { reach: 2 } };
    vec![
        ("bias", Attention { bias: Some(of(&[1, 2, 5, 5])), ..usual() }),
        ("alibi", Attention { alibi: Some(of(&[2])), ..usual() }),
        ("sinks", Attention { sinks: Some(of(&[2])), ..usual() }),
        ("relative table", Attention { relative: Some(relative), ..usual() }),
        ("centers", Attention { centers: Some((of(&[1, 2, 5]), 2)), ..usual() }),
    ]
}

#[test]
fn an_option_that_a_variable_stands_behind_is_refused_and_detached_it_is_not() {
    let var = |sizes: &[usize]| Var::from_tensor(&x(sizes)).unwrap().into_inner();
    for (option, options) in each(var) {
        assert_eq!(refused(&options), Error::Tracked { option });
    }
    for (option, options) in each(|sizes| (var(sizes) * 2.0).unwrap()) {
        assert_eq!(refused(&options), Error::Tracked { option });
        let told = refused(&options).to_string();
        assert!(
            told.starts_with(option) && told.contains("detach") && told.contains("regard-burn")
        );
    }
    let q = x(&[1, 2, 5, 4]);
    for (_, options) in each(|sizes| (var(sizes) * 2.0).unwrap().detach()) {
        attention(&q, &q, &q, &options).unwrap();
    }
}

#[test]
fn a_choice_through_which_nothing_is_learned_is_refused() {
    let (fixed, var) = (x(&[1, 2, 5, 4]), Var::from_tensor(&x(&[1, 2, 5, 4])).unwrap());
    for normalizer in [Normalizer::Hard, Normalizer::Sampled { seed: 1 }] {
        let options = Attention { normalizer, ..Default::default() };
        let found = attention(&fixed, &var, &fixed, &options).unwrap_err();
        assert_eq!(found, Error::NothingLearned { normalizer: normalizer.name() });
        let out = attention(&fixed, &fixed, &var, &options).unwrap().out;
        assert!(out.backward().unwrap().get(var.as_tensor()).is_some());
    }
}

#[test]
fn types_that_do_not_fit() {
    let q = x(&[1, 2, 5, 4]);
    let half = q.to_dtype(DType::F16).unwrap();
    let whole = q.to_dtype(DType::U32).unwrap();
    let usual = Attention::default();
    let found = attention(&whole, &q, &q, &usual).unwrap_err();
    assert_eq!(
        found.to_string(),
        "q: its numbers are u32, they must be f32, f64, f16, bf16; cast it with to_dtype"
    );
    let found = attention(&q, &half, &q, &usual).unwrap_err();
    assert_eq!(found, Error::Type { tensor: "k", found: DType::F16, accepted: &[DType::F32] });
    for (tensor, options) in each(|sizes| noise(1, sizes, DType::F64)) {
        let found = DType::F64;
        assert_eq!(refused(&options), Error::Type { tensor, found, accepted: &[DType::F32] });
    }
    // Lists are in f32 where q is of a half type.
    let sinks = Some(x(&[2]));
    attention(&half, &half, &half, &Attention { sinks, ..Default::default() }).unwrap();
    let turn = Rope::new(4, RopePairs::HalfSplit);
    assert!(matches!(rope(&whole, &turn, RopePositions::From(0)), Err(Error::Type { .. })));
}

#[test]
fn shapes_that_do_not_fit() {
    let (usual, q) = (Attention::default(), x(&[1, 2, 5, 4]));
    let engine = |q: &[usize], k: &[usize], v: &[usize]| {
        let found = attention(&x(q), &x(k), &x(v), &usual).unwrap_err();
        assert!(matches!(found, Error::Engine(_)), "{found}");
    };
    engine(&[2, 2, 5, 4], &[1, 2, 5, 4], &[1, 2, 5, 4]);
    engine(&[1, 3, 5, 4], &[1, 2, 5, 4], &[1, 2, 5, 4]);
    engine(&[1, 2, 5, 4], &[1, 2, 5, 3], &[1, 2, 5, 3]);
    engine(&[1, 2, 5, 4], &[1, 2, 5, 4], &[1, 2, 6, 4]);
    engine(&[1, 2, 5, 0], &[1, 2, 5, 0], &[1, 2, 5, 4]);
    let found = attention(&q, &x(&[2, 5, 4]), &q, &usual).unwrap_err();
    let expected = "[batch, heads, length, features]";
    assert_eq!(found, Error::Axes { tensor: "k", found: vec![2, 5, 4], expected });
    for (name, options) in each(|sizes| x(&[sizes, &[1]].concat())) {
        let found = refused(&options);
        assert!(matches!(found, Error::Axes { tensor, .. } if tensor == name), "{found}");
    }
    for (_, options) in each(|sizes| x(&sizes.iter().map(|n| n + 1).collect::<Vec<_>>())) {
        let found = refused(&options);
        assert!(matches!(found, Error::Engine(_)), "{found}");
    }
}

#[test]
fn axes_in_another_order_are_refused_though_the_entries_are_as_many() {
    let table = x(&[2, 5]);
    let relative = Some(Relative { table, buckets: Buckets::Clipped { reach: 2 } });
    let found = refused(&Attention { relative, ..Default::default() });
    assert_eq!(found.to_string(), "heads: q has 2, relative table has 5; they must be equal");
    let found = refused(&Attention { centers: Some((x(&[1, 5, 2]), 2)), ..Default::default() });
    assert_eq!(found.to_string(), "heads: q has 2, centers has 5; they must be equal");
}

#[test]
fn what_the_engine_refuses_keeps_its_type() {
    let dropout = Some(Dropout::new(1.0, 1, 0));
    let found = refused(&Attention { dropout, ..Default::default() });
    assert!(matches!(found, Error::Engine(regard::Error::Value { option: "dropout", .. })));
    let found = refused(&Attention { mask: Mask::lengths(&[1, 2]), ..Default::default() });
    assert!(matches!(found, Error::Engine(_)));
    // And it can pass for an error of Candle, which may have a backtrace.
    let told = candle_core::Error::from(found.clone()).to_string();
    assert!(told.starts_with(&found.to_string()));
}
