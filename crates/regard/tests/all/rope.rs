//! Rotary position embedding (Su et al. 2021): comparison with the reference, and properties of rotations.

use proptest::prelude::*;
use regard::rope::{Positions, Rope, RopePairs};
use regard::{
    Error, Isa, Layout, Machine, Mask, Number, Plan, Problem, Shape, Tensor, View, ViewMut,
    reference,
};
use regard_testkit::{Arrangement, Noise, TestTensor};
use std::time::Instant;

const PAIRS: [RopePairs; 2] = [RopePairs::Interleaved, RopePairs::HalfSplit];

fn shape([batch, heads, len, dim]: [usize; 4]) -> Shape {
    Shape { batch, heads, len, dim }
}

fn noise<N: Number>(shape: Shape, arrangement: Arrangement) -> TestTensor<N> {
    let n = shape.to_array().iter().product();
    TestTensor::new(&Noise::new(n as u64).normals(n), shape, arrangement)
}

/// Elements `[batch, heads, len, dim]` of a view, dense.
fn dense<N: regard::Element>(x: View<'_, N>) -> Vec<N> {
    let Shape { batch, heads, len, .. } = x.shape();
    let rows = (0..batch * heads * len).map(|i| (i / len / heads, i / len % heads, i % len));
    rows.flat_map(|(b, h, i)| x.row(b, h, i).iter().copied()).collect()
}

/// Rotates the rows of one head.
fn turned<N: Number>(rope: &Rope, x: &[N], dim: usize, positions: Positions<'_>) -> Vec<N> {
    let (len, mut x) = (x.len() / dim, x.to_vec());
    let view = &mut ViewMut::bhsd(&mut x, [1, 1, len, dim]).expect("whole rows");
    rope.apply(Machine::detect(), view, positions).expect("a rope that fits");
    x
}

/// Features of the pair of a feature; `None` if it is not rotated.
fn pair_of(pairs: RopePairs, feature: usize, dim: usize) -> Option<[usize; 2]> {
    let half = dim / 2;
    (feature < dim).then_some(match pairs {
        RopePairs::Interleaved => [feature / 2 * 2, feature / 2 * 2 + 1],
        RopePairs::HalfSplit => [feature % half, feature % half + half],
    })
}

/// Pairing, and number of rotated features.
type Pair = (RopePairs, usize);

/// Compares with `expected`, relative to the norm of each pair. Cosine and sine, two products and their sum are rounded
/// once each: 3 roundings of at most sqrt 2 times the norm.
fn is_close<N: Number>(
    x: &[N],
    given: &[N],
    expected: &[f64],
    (rope, row): (Pair, usize),
    more: f64,
) {
    let roundings = 1.5 * std::f64::consts::SQRT_2 + 0.01 + more;
    for (i, (x, expected)) in x.iter().zip(expected).enumerate() {
        let first = i / row * row;
        let size = pair_of(rope.0, i % row, rope.1).map_or(0.0, |pair| {
            let [a, b] = pair.map(|feature| given[first + feature].to_f64());
            a.hypot(b)
        });
        let error: f64 = (Number::to_f64(*x) - expected).abs();
        let bound = roundings * N::epsilon().to_f64() * size;
        assert!(error <= bound, "{rope:?} {i}: {x} instead of {expected}, {error:e} > {bound:e}");
    }
}

fn like_the_definition<N: Number>(more: f64) {
    let shapes =
        [([1, 1, 1, 2], 2), ([2, 3, 67, 8], 8), ([3, 2, 33, 19], 10), ([1, 5, 130, 64], 64)];
    for ((sizes, dim), pairs) in shapes.into_iter().flat_map(|s| PAIRS.map(|p| (s, p))) {
        let shape = shape(sizes);
        let list: Vec<i64> =
            (0..shape.batch * shape.len).map(|i| (i * i % 97) as i64 - 9).collect();
        let rope = Rope::new(dim, pairs).base(500.0).scaling(1.5);
        let places = [Positions::From(0), Positions::From(-70), Positions::From(1000)];
        let lists = [Positions::List(&list), Positions::List(&list[..shape.len])];
        for positions in places.into_iter().chain(lists) {
            for arrangement in [Arrangement::Bhsd, Arrangement::Bshd, Arrangement::Slice] {
                let given: TestTensor<N> = noise(shape, arrangement);
                let expected = reference::rotate::<f64, N>(&rope, given.view(), positions);
                let before = dense(given.view());
                for (isa, threads) in Isa::available().into_iter().flat_map(|i| [(i, 1), (i, 3)]) {
                    let machine = Machine::detect().isa(isa).threads(threads);
                    let mut x = given.clone();
                    rope.apply(machine, &mut x.view_mut(), positions).expect("a rope that fits");
                    is_close(&dense(x.view()), &before, &expected, ((pairs, dim), shape.dim), more);
                    let around = |x: &TestTensor<N>| x.data.iter().filter(|x| x.is_nan()).count();
                    assert_eq!(around(&x), around(&given), "memory around the tensor was written");
                }
            }
        }
    }
}

#[test]
fn rows_turn_as_the_definition_says() {
    like_the_definition::<f32>(0.0);
    // In `f64` the reference rounds as well: its angles, which are up to 800, and its sums.
    like_the_definition::<f64>(800.0);
}

#[test]
fn the_angle_of_a_pair_is_the_position_times_a_power_of_the_base() {
    let x = [1.0, 0.0, 0.0, 1.0, 7.0];
    let [slow, fast] = [0.03f64, 3.0];
    let rope = Rope::new(4, RopePairs::Interleaved);
    let expected = [fast.cos(), fast.sin(), -slow.sin(), slow.cos(), 7.0];
    let near = |x: &[f64], y: &[f64]| x.iter().zip(y).all(|(x, y)| (x - y).abs() < 1e-15);
    assert!(near(&turned(&rope, &x, 5, Positions::From(3)), &expected));
    let x = [1.0, 0.0, 0.0, 1.0, 7.0];
    let expected = [fast.cos(), -slow.sin(), fast.sin(), slow.cos(), 7.0];
    let rope = Rope::new(4, RopePairs::HalfSplit);
    assert!(near(&turned(&rope, &x, 5, Positions::From(3)), &expected));
    let scaled = rope.clone().scaling(4.0);
    assert!(near(&turned(&scaled, &x, 5, Positions::From(12)), &expected));
    let given = rope.base(3.0).frequencies(vec![1.0, 0.01]);
    assert!(near(&turned(&given, &x, 5, Positions::From(3)), &expected));
}

#[test]
fn threads_instructions_and_where_a_call_begins_change_no_bit() {
    let (shape, list) = (shape([2, 3, 150, 24]), (900..1050).collect::<Vec<i64>>());
    for pairs in PAIRS {
        let rope = Rope::new(22, pairs);
        let given: TestTensor<f32> = noise(shape, Arrangement::Bhsd);
        let machine = Machine::detect().isa(Isa::available()[0]).threads(1);
        let mut expected = given.clone();
        rope.apply(machine, &mut expected.view_mut(), 900..).unwrap();
        for (isa, threads) in Isa::available().into_iter().flat_map(|i| [(i, 1), (i, 2), (i, 7)]) {
            let machine = machine.isa(isa).threads(threads);
            for positions in [Positions::From(900), Positions::List(&list)] {
                let mut x = given.clone();
                rope.apply(machine, &mut x.view_mut(), positions).unwrap();
                assert_eq!(x.data, expected.data, "{isa:?} {threads} {positions:?}");
            }
        }
        for row in 0..shape.len {
            let given = given.view().row(1, 2, row);
            let alone = turned(&rope, given, 24, Positions::From(900 + row as i64));
            assert_eq!(alone, expected.view().row(1, 2, row), "{row}");
        }
    }
}

#[test]
fn position_0_changes_nothing() {
    for pairs in PAIRS {
        let x: Vec<f32> = Noise::new(1).normals(64 * 9);
        let zeros = vec![0; 9];
        let rope = Rope::new(64, pairs);
        assert_eq!(turned(&rope, &x, 64, Positions::List(&zeros)), x);
        assert_eq!(turned(&rope.inverse(), &x, 64, Positions::List(&zeros)), x);
    }
}

/// Cosine and sine of a position below 2^26 times a frequency, without rounding the angle: the products with the upper and
/// with the lower half of the frequency's bits are exact.
fn exact_turn(position: i64, frequency: f64) -> (f64, f64) {
    let upper = f64::from_bits(frequency.to_bits() & !0 << 27);
    let [a, b] = [upper, frequency - upper].map(|part| (position as f64 * part).sin_cos());
    (a.1 * b.1 - a.0 * b.0, a.0 * b.1 + a.1 * b.0)
}

fn far_positions<N: Number>(more: f64) {
    let list = [1_000_000, -1_000_000, 999_999, 131_071, 65_536, 63, 12_345_678];
    let frequencies: Vec<f64> = (0..16).map(|i| 10_000f64.powf(-f64::from(i) / 16.0)).collect();
    for pairs in PAIRS {
        let x: Vec<N> = Noise::new(3).normals(32 * list.len());
        let got = turned(&Rope::new(32, pairs), &x, 32, Positions::List(&list));
        let mut expected: Vec<f64> = x.iter().map(|x| Number::to_f64(*x)).collect();
        for (row, position) in expected.chunks_exact_mut(32).zip(list) {
            for (i, frequency) in frequencies.iter().enumerate() {
                let feature = if pairs == RopePairs::HalfSplit { i } else { 2 * i };
                let [a, b] = pair_of(pairs, feature, 32).expect("all turn");
                let (cos, sin) = exact_turn(position, *frequency);
                (row[a], row[b]) = (row[a] * cos - row[b] * sin, row[a] * sin + row[b] * cos);
            }
        }
        is_close(&got, &x, &expected, ((pairs, 32), 32), more);
    }
}

#[test]
fn a_million_positions_away_the_error_is_that_of_rounding() {
    far_positions::<f32>(0.0);
    // Allows for the rounding of this test and of products of rotations, which is negligible in `f32`.
    far_positions::<f64>(4.0);
}

/// Rotated features, other features, rows, pairing, first position.
fn cases() -> impl Strategy<Value = (usize, usize, usize, RopePairs, i64)> {
    (1..40usize, 0..5usize, 1..80usize, prop::sample::select(PAIRS.to_vec()), -5000..5000i64)
        .prop_map(|(half, rest, len, pairs, first)| (2 * half, rest, len, pairs, first))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn each_pair_keeps_its_length((dim, rest, len, pairs, first) in cases(), seed: u64) {
        let row = dim + rest;
        let x: Vec<f32> = Noise::new(seed).normals(row * len);
        let y = turned(&Rope::new(dim, pairs), &x, row, Positions::From(first));
        for (x, y) in x.chunks_exact(row).zip(y.chunks_exact(row)) {
            for i in 0..row {
                let Some([a, b]) = pair_of(pairs, i, dim) else {
                    prop_assert_eq!(x[i].to_bits(), y[i].to_bits());
                    continue;
                };
                let (before, after) = (x[a].hypot(x[b]), y[a].hypot(y[b]));
                prop_assert!((before - after).abs() <= 3.0 * f32::EPSILON * before);
            }
        }
    }

    #[test]
    fn scores_depend_on_the_distance_alone(
        (dim, rest, _, pairs, first) in cases(), seed: u64, distance in -100i64..100, far in 1..1_000_000i64,
    ) {
        let (row, mut noise) = (dim + rest, Noise::new(seed));
        let [q, k] = [noise.normals::<f64>(row), noise.normals::<f64>(row)];
        let rope = Rope::new(dim, pairs);
        let score = |q_at: i64| -> f64 {
            let q = turned(&rope, &q, row, Positions::From(q_at));
            let k = turned(&rope, &k, row, Positions::From(q_at - distance));
            q.iter().zip(k).map(|(q, k)| q * k).sum()
        };
        let (here, there) = (score(first), score(first + far));
        prop_assert!((here - there).abs() < 1e-14 * row as f64, "{} {}", here, there);
    }

    #[test]
    fn the_inverse_undoes((dim, rest, len, pairs, first) in cases(), seed: u64) {
        let row = dim + rest;
        let x: Vec<f32> = Noise::new(seed).normals(row * len);
        let rope = Rope::new(dim, pairs).scaling(3.0);
        let y = turned(&rope, &x, row, Positions::From(first));
        let back = turned(&rope.clone().inverse(), &y, row, Positions::From(first));
        for (x, back) in x.iter().zip(back) {
            prop_assert!((x - back).abs() < 4.0 * f32::EPSILON * 6.0, "{} {}", x, back);
        }
        prop_assert_eq!(rope.clone().inverse().inverse(), rope);
    }

    #[test]
    fn interleaved_is_halves_with_its_features_in_another_order((dim, rest, len, _, first) in cases(), seed: u64) {
        let row = dim + rest;
        let x: Vec<f32> = Noise::new(seed).normals(row * len);
        // Feature 2i moves to i, feature 2i + 1 to i + dim / 2.
        let place = |i: usize| if i < dim { i / 2 + i % 2 * (dim / 2) } else { i };
        let apart = |x: &[f32]| -> Vec<f32> {
            let mut y = x.to_vec();
            (0..x.len()).for_each(|i| y[i / row * row + place(i % row)] = x[i]);
            y
        };
        let [interleaved, halves] = PAIRS.map(|pairs| Rope::new(dim, pairs));
        let together = turned(&interleaved, &x, row, Positions::From(first));
        prop_assert_eq!(apart(&together), turned(&halves, &apart(&x), row, Positions::From(first)));
    }
}

#[test]
fn the_gradient_is_the_way_back() {
    let (row, len) = (11, 5);
    for pairs in PAIRS {
        let rope = Rope::new(8, pairs);
        let mut noise = Noise::new(5);
        let [x, d] = [noise.normals::<f64>(row * len), noise.normals::<f64>(row * len)];
        let loss = |x: &[f64]| -> f64 {
            turned(&rope, x, row, Positions::From(40)).iter().zip(&d).map(|(y, d)| y * d).sum()
        };
        let gradient = turned(&rope.clone().inverse(), &d, row, Positions::From(40));
        for (i, gradient) in gradient.iter().enumerate() {
            let moved = |by: f64| {
                let mut x = x.clone();
                x[i] += by;
                loss(&x)
            };
            let slope = moved(0.5) - moved(-0.5); // the map is linear, so a step of 1 is exact
            assert!((slope - gradient).abs() < 1e-12, "{pairs:?} {i}: {slope} {gradient}");
        }
    }
}

#[test]
fn gradients_of_attention_turn_in_their_own_memory() {
    let shape = shape([1, 2, 40, 8]);
    let x = Tensor::new(Noise::new(9).normals::<f32>(640), shape, Layout::Bshd).unwrap();
    let plan = Plan::new(Problem::new(&x.view(), &x.view(), &x.view()), Machine::detect()).unwrap();
    let output = plan.forward(x.view(), x.view(), x.view()).unwrap();
    let mut grads = plan.backward(x.view(), x.view(), x.view(), &output, x.view()).unwrap();
    let rope = Rope::new(8, RopePairs::HalfSplit).inverse();
    let expected = reference::rotate::<f32, f32>(&rope, grads.q.view(), Positions::From(7));
    rope.apply(Machine::detect(), &mut grads.q.view_mut(), 7..).unwrap();
    let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
    assert!(dense(grads.q.view()).iter().zip(&expected).all(near));
}

/// Compares the error, and looks for each word in its message.
fn refused(result: Result<(), Error>, expected: Error, words: &[&str]) {
    let error = result.expect_err("must be refused");
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "`{message}` does not say `{word}`");
    }
    assert_eq!(message, expected.to_string()); // as text, because NaN is not equal to itself
}

#[test]
fn descriptions_that_make_no_sense_are_errors() {
    let rope = Rope::new(8, RopePairs::HalfSplit);
    let odd = Error::OddDim { option: "rope dim", found: 7 };
    refused(
        Rope::new(7, RopePairs::HalfSplit).check(),
        odd,
        &["rope dim: 7 is odd", "even", "pairs"],
    );
    for found in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let accepted = "a finite number above 0";
        let e = Error::Value { option: "rope base", found, accepted };
        refused(rope.clone().base(found).check(), e, &["rope base", accepted]);
        let e = Error::Value { option: "rope scaling", found, accepted };
        refused(rope.clone().scaling(found).check(), e, &["rope scaling", accepted]);
    }
    let expected = (4, "one for each pair of features");
    let e = Error::Count { option: "rope frequencies", expected, found: 3 };
    let words = ["rope frequencies: 3 entries", "give 4", "each pair"];
    refused(rope.clone().frequencies(vec![1.0; 3]).check(), e, &words);
    for found in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300] {
        let accepted = "finite numbers, small enough for finite angles";
        let e = Error::Value { option: "rope frequencies", found, accepted };
        let rope = rope.clone().frequencies(vec![1.0, 0.5, found, 0.1]);
        refused(rope.check(), e, &["rope frequencies", "finite"]);
    }
    assert_eq!(rope.frequencies(vec![1.0, -0.5, 0.0, 1e-30]).check(), Ok(()));
}

#[test]
fn tensors_and_positions_that_do_not_fit_are_errors_and_stay_as_they_are() {
    let mut data = [1f32; 48];
    let mut apply = |rope: &Rope, positions: Positions<'_>| {
        let result = rope.apply(
            Machine::detect(),
            &mut ViewMut::bhsd(&mut data, [2, 1, 3, 8]).unwrap(),
            positions,
        );
        assert!(result.is_ok() || data == [1f32; 48]);
        result
    };
    let e = Error::TooFewFeatures { needed: 10, found: 8 };
    let words = ["rope rotates 10", "tensor has 8", "smaller dim"];
    refused(apply(&Rope::new(10, RopePairs::HalfSplit), Positions::From(0)), e, &words);
    refused(
        apply(&Rope::new(5, RopePairs::HalfSplit), Positions::From(0)),
        Error::OddDim { option: "rope dim", found: 5 },
        &[],
    );
    let (rope, option) = (Rope::new(6, RopePairs::Interleaved), "rope positions");
    let expected = (6, "batch x length, or the length alone for all items");
    let e = Error::Count { option, expected, found: 2 };
    refused(apply(&rope, Positions::List(&[1, 2])), e, &["2 entries", "give 6", "length"]);
    let limit = 1i64 << 53;
    for (positions, found) in [
        (Positions::From(i64::MAX), i64::MAX as f64),
        (Positions::From(i64::MIN), i64::MIN as f64),
        (Positions::From(limit - 1), limit as f64 + 1.0),
        (Positions::List(&[0, i64::MIN, 0]), i64::MIN as f64),
    ] {
        let accepted = "whole numbers from -2^53 to 2^53";
        let e = Error::Value { option, found, accepted };
        refused(apply(&rope, positions), e, &["rope positions", "2^53"]);
    }
    assert_eq!(apply(&rope, Positions::List(&[limit, -limit, 0])), Ok(()));
    assert!(data.iter().all(|x| x.is_finite()));
}

#[test]
fn tensors_without_elements_and_ropes_without_features_are_left_alone() {
    let rope = Rope::new(0, RopePairs::HalfSplit);
    let mut data = [1f32; 12];
    rope.apply(Machine::detect(), &mut ViewMut::bhsd(&mut data, [1, 2, 2, 3]).unwrap(), 5..)
        .unwrap();
    assert_eq!(data, [1f32; 12]);
    for sizes in [[0, 1, 1, 2], [1, 0, 1, 2], [1, 1, 0, 2]] {
        let rope = Rope::new(2, RopePairs::HalfSplit);
        let mut empty = ViewMut::<f32>::bhsd(&mut [], sizes).unwrap();
        rope.apply(Machine::detect(), &mut empty, 5..).unwrap();
    }
    let mut rows = ViewMut::<f32>::bhsd(&mut [], [usize::MAX, 1, usize::MAX, 0]);
    if let Ok(rows) = &mut rows {
        assert!(rope.apply(Machine::detect(), rows, Positions::List(&[])).is_err());
    }
}

/// Duration of the fastest of 15 calls, in seconds.
fn fastest(mut call: impl FnMut()) -> f64 {
    let time = |_| {
        let start = Instant::now();
        call();
        start.elapsed().as_secs_f64()
    };
    (0..15).map(time).fold(f64::INFINITY, f64::min)
}

/// `cargo test --release -p regard --test all rope -- --ignored --nocapture`
#[test]
#[ignore = "prints times, asserts nothing"]
fn time_of_the_pass_beside_a_copy_and_the_attention_it_prepares() {
    for (dim, threads) in [(64, 1), (128, 1), (64, 2), (128, 2)] {
        let sizes = [1, 8, 2048, dim];
        let mut noise = Noise::new(1);
        let n = sizes.iter().product();
        let [mut q, mut k, v] = [(); 3].map(|()| noise.normals::<f32>(n));
        let machine = Machine::detect().threads(threads);
        let (mut to, from) = ([vec![0f32; n], vec![0f32; n]], [q.clone(), k.clone()]);
        let copy = fastest(|| (0..2).for_each(|i| to[i].copy_from_slice(&from[i])));
        let rope = PAIRS.map(|pairs| {
            let rope = Rope::new(dim, pairs);
            fastest(|| {
                rope.apply(machine, &mut ViewMut::bhsd(&mut q, sizes).unwrap(), 0..).unwrap();
                rope.apply(machine, &mut ViewMut::bhsd(&mut k, sizes).unwrap(), 0..).unwrap();
            })
        });
        let apart = fastest(|| {
            let rope = Rope::new(dim, RopePairs::HalfSplit);
            let sizes = [1, 2048, 8, dim];
            rope.apply(machine, &mut ViewMut::bshd(&mut q, sizes).unwrap(), 0..).unwrap();
            rope.apply(machine, &mut ViewMut::bshd(&mut k, sizes).unwrap(), 0..).unwrap();
        });
        let [q, k, v] = [&q, &k, &v].map(|x| View::bhsd(x, sizes).unwrap());
        let attention = [Mask::full(), Mask::causal()].map(|mask| {
            let plan = Plan::new(Problem::new(&q, &k, &v).mask(mask), machine).unwrap();
            fastest(|| drop(plan.forward(q, k, v).unwrap()))
        });
        let ms = |seconds: f64| format!("{:.3} ms", seconds * 1e3);
        println!("dim {dim} t{threads}: copy (t1) {}", ms(copy));
        let passes = [("interleaved", rope[0]), ("halves", rope[1]), ("halves, bshd", apart)];
        for (name, time) in passes {
            let share = attention.map(|all| 100.0 * time / all);
            println!(
                "  {name} {}: {:.2} % of full, {:.2} % of causal",
                ms(time),
                share[0],
                share[1]
            );
        }
        println!("  attention {}, causal {}", ms(attention[0]), ms(attention[1]));
    }
}

/// As above, for a single row as in decoding.
#[test]
#[ignore = "prints times, asserts nothing"]
fn time_of_a_single_row() {
    for (dim, pairs) in [(64, RopePairs::HalfSplit), (128, RopePairs::HalfSplit)] {
        let mut q = vec![1f32; 8 * dim];
        let rope = Rope::new(dim, pairs);
        let time = fastest(|| {
            for i in 0..1000 {
                let mut q = ViewMut::bhsd(&mut q, [1, 8, 1, dim]).unwrap();
                rope.apply(Machine::detect(), &mut q, 4000 + i..).unwrap();
            }
        });
        println!("one row of 8 heads, dim {dim}: {:.2} us", time * 1e3);
    }
}
