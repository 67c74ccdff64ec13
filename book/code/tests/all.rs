//! Every rung is attention: held against the definition in `f64`, by the rule that judges the engine.

#![expect(clippy::unwrap_used, reason = "what fails here has failed the test")]

use rayon::ThreadPoolBuilder;
use regard::reference::{self, Outcome};
use regard::{Error, Layout, Machine, Mask, Output, Problem, Shape, Tensor, View};
use regard_book::backward::{Grads, plain, recompute};
use regard_book::online::Partial;
use regard_book::{AttentionOutput, Head, definition, engine, lanes, online, threads, tiles};
use regard_testkit::{Noise, OutputCheck};

/// The numbers of a head.
struct Numbers {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_out: Vec<f32>,
    sizes: [usize; 4],
}

impl Numbers {
    /// `sizes` are `q_len`, `k_len`, `dim`, `v_dim`; queries are random times `spread`.
    fn new(sizes: [usize; 4], spread: f32) -> Self {
        let [q_len, k_len, dim, v_dim] = sizes;
        let mut noise = Noise::new(7);
        let q: Vec<f32> = noise.normals(q_len * dim);
        let (k, v) = (noise.normals(k_len * dim), noise.normals(k_len * v_dim));
        let d_out = noise.normals(q_len * v_dim);
        Self { q: q.into_iter().map(|x| x * spread).collect(), k, v, d_out, sizes }
    }

    fn head(&self, causal: bool) -> Head<'_> {
        let [_, _, dim, v_dim] = self.sizes;
        Head { q: &self.q, k: &self.k, v: &self.v, dim, v_dim, causal }
    }
}

/// More queries than keys and fewer, values as long as keys and not, tiles filled and not; one of everything.
const SIZES: [[usize; 4]; 9] = [
    [1, 1, 1, 1],
    [3, 5, 4, 4],
    [7, 4, 4, 3],
    [16, 64, 16, 16],
    [17, 65, 5, 6],
    [64, 64, 64, 64],
    [70, 131, 20, 33],
    [130, 97, 64, 32],
    [1, 300, 64, 64],
];

type Rung = fn(&Head<'_>) -> Result<AttentionOutput, Error>;

const RUNGS: [(&str, Rung); 6] = [
    ("definition", |head| Ok(definition::attend(head))),
    ("online", |head| Ok(online::attend(head))),
    ("tiles", |head| Ok(tiles::attend(head))),
    ("lanes", |head| Ok(lanes::attend(head))),
    ("threads", |head| Ok(threads::attend(head))),
    ("engine", |head| engine::attend(head, Machine::detect())),
];

/// How much of the error that is allowed a result has; the definition in `f64` is right.
fn ratio(head: &Head<'_>, attended: AttentionOutput) -> f64 {
    let (problem, views) = problem(head);
    let shape = Shape { batch: 1, heads: 1, len: head.q_len(), dim: head.v_dim };
    let out = Tensor::new(attended.out, shape, Layout::Bhsd).unwrap();
    let ratio = OutputCheck::new(&problem, views).ratio(&Output::new(out, attended.lse));
    ratio.unwrap().worse()
}

type Views<'a> = (View<'a, f32>, View<'a, f32>, View<'a, f32>);

fn problem<'a>(head: &Head<'a>) -> (Problem<'a, f32>, Views<'a>) {
    let rows = |x: &'a [f32], dim| View::matrix(x, [x.len() / dim, dim]).unwrap();
    let (q, k, v) = (rows(head.q, head.dim), rows(head.k, head.dim), rows(head.v, head.v_dim));
    let mask = if head.causal { Mask::causal() } else { Mask::full() };
    (Problem::new(&q, &k, &v).mask(mask), (q, k, v))
}

#[test]
fn every_rung_is_as_close_to_the_definition_as_the_engine_must_be() {
    let mut worst = [0f64; RUNGS.len()];
    // Scores of about 1, of about 30, where one key has nearly all the weight, and of thousands, where e^score overflows.
    for (sizes, spread) in SIZES.into_iter().flat_map(|s| [1.0, 30.0, 3000.0].map(|x| (s, x))) {
        let numbers = Numbers::new(sizes, spread);
        for causal in [false, true] {
            let head = numbers.head(causal);
            for (i, (name, rung)) in RUNGS.into_iter().enumerate() {
                let ratio = ratio(&head, rung(&head).unwrap());
                assert!(ratio <= 1.0, "{name} {sizes:?} x {spread} causal {causal}: {ratio}");
                worst[i] = worst[i].max(ratio);
            }
        }
    }
    println!("the nearest to its bound: {worst:.3?}");
}

#[test]
fn a_row_that_sees_nothing_is_0_and_its_lse_minus_infinity() {
    let numbers = Numbers::new([5, 2, 4, 3], 1.0);
    for (name, rung) in RUNGS {
        let AttentionOutput { out, lse } = rung(&numbers.head(true)).unwrap();
        assert_eq!(out[..9], [0.0; 9], "{name}");
        assert_eq!(lse[..3], [f32::NEG_INFINITY; 3], "{name}");
        assert!(lse[3..].iter().all(|x| x.is_finite()), "{name}");
    }
}

#[test]
fn any_number_of_threads_gives_the_bits_of_one() {
    for (sizes, causal) in SIZES.into_iter().flat_map(|s| [false, true].map(|c| (s, c))) {
        let numbers = Numbers::new(sizes, 1.0);
        let head = numbers.head(causal);
        for n in [1, 2, 3, 7] {
            let pool = ThreadPoolBuilder::new().num_threads(n).build().unwrap();
            assert_eq!(pool.install(|| threads::attend(&head)), lanes::attend(&head), "{n}");
            let machine = Machine::detect().threads(n);
            let one = engine::attend(&head, machine.threads(1)).unwrap();
            assert_eq!(engine::attend(&head, machine).unwrap(), one, "{n}");
        }
    }
}

#[test]
fn rows_may_be_cut_in_any_way() {
    let numbers = Numbers::new([70, 131, 20, 33], 1.0);
    let head = numbers.head(true);
    let whole = lanes::attend(&head);
    let last = |rows: usize| {
        let (mut out, mut lse) = (vec![0.0; rows * head.v_dim], vec![0.0; rows]);
        lanes::attend_rows(&head, head.q_len() - rows, &mut out, &mut lse);
        (out, lse)
    };
    for rows in [1, 2, 17, 64, 70] {
        let (out, lse) = last(rows);
        assert_eq!(out, whole.out[(head.q_len() - rows) * head.v_dim..]);
        assert_eq!(lse, whole.lse[head.q_len() - rows..]);
    }
}

/// Row 0 of a head over some of its keys.
fn partial(head: &Head<'_>, keys: std::ops::Range<usize>) -> Partial {
    let mut row = Partial::nothing_seen(head.v_dim);
    let score = |j| regard_book::dot(head.query(0), head.key(j)) * head.scale();
    keys.for_each(|j| row.add(score(j), head.value(j)));
    row
}

fn finished(row: Partial) -> AttentionOutput {
    let mut out = vec![0.0; row.out.len()];
    let lse = row.finish(&mut out);
    AttentionOutput { out, lse: vec![lse] }
}

#[test]
fn merging_does_not_care_how_keys_are_parted() {
    for spread in [1.0, 30.0] {
        let numbers = Numbers::new([1, 100, 8, 5], spread);
        let head = numbers.head(false);
        let part = |a, b| partial(&head, a..b);
        for [a, b] in [[0, 0], [1, 1], [3, 50], [50, 100], [100, 100]] {
            let left = part(0, a).merge(part(a, b)).merge(part(b, 100));
            let right = part(0, a).merge(part(a, b).merge(part(b, 100)));
            let turned = part(b, 100).merge(part(0, a)).merge(part(a, b));
            for merged in [left, right, turned] {
                let ratio = ratio(&head, finished(merged));
                assert!(ratio <= 1.0, "{a} {b} x {spread}: {ratio}");
            }
        }
    }
}

#[test]
fn merging_is_commutative_to_the_bit_and_nothing_seen_changes_no_bit() {
    let numbers = Numbers::new([1, 100, 8, 5], 1.0);
    let head = numbers.head(false);
    let (a, b) = (partial(&head, 0..30), partial(&head, 30..100));
    assert_eq!(a.clone().merge(b.clone()), b.merge(a.clone()));
    assert_eq!(a.clone().merge(Partial::nothing_seen(5)), a);
    assert_eq!(Partial::nothing_seen(5).merge(a.clone()), a);
}

/// Which rows of a causal head change when the last value becomes NaN; only the last one sees it.
fn rows_with_nan(rung: Rung) -> usize {
    let mut numbers = Numbers::new([20, 20, 4, 4], 1.0);
    *numbers.v.last_mut().unwrap() = f32::NAN;
    let attended = rung(&numbers.head(true)).unwrap();
    attended.out.chunks(4).filter(|row| row.iter().any(|x| x.is_nan())).count()
}

#[test]
fn a_weight_of_0_times_nan_is_nan_where_hidden_pairs_are_computed() {
    let found = RUNGS.map(|(name, rung)| (name, rows_with_nan(rung)));
    for (name, rows) in found {
        // Rows 16 to 19 stand beside each other in lanes, and share the tile.
        let expected = if ["lanes", "threads"].contains(&name) { 4 } else { 1 };
        assert_eq!(rows, expected, "{name}");
    }
}

#[test]
fn gradients_are_as_close_to_the_definition_as_the_engine_must_be() {
    let mut worst = [0f64; 3];
    for (sizes, causal) in SIZES.into_iter().flat_map(|s| [false, true].map(|c| (s, c))) {
        let numbers = Numbers::new(sizes, 1.0);
        let (head, d_out) = (numbers.head(causal), &numbers.d_out);
        let attended = tiles::attend(&head);
        let ways = [
            plain(&head, d_out),
            recompute(&head, &attended, d_out),
            engine::backward(&head, &attended, d_out, Machine::detect()).unwrap(),
        ];
        for (worst, grads) in worst.iter_mut().zip(&ways) {
            let ratio = grad_ratio(&head, d_out, grads);
            assert!(ratio <= 1.0, "{sizes:?} causal {causal}: {ratio}");
            *worst = worst.max(ratio);
        }
    }
    println!("the nearest to its bound: {worst:.3?}");
}

/// How much of the error that is allowed gradients have: three times that of the definition in `f32`, and a few steps of
/// rounding of the largest, because that is sometimes right by luck.
fn grad_ratio(head: &Head<'_>, d_out: &[f32], grads: &Grads) -> f64 {
    let (problem, views) = problem(head);
    let zeros = vec![0f32; head.q_len()];
    let upstream =
        Outcome { out: d_out.to_vec(), lse: zeros.clone(), entropy: zeros, max_score: Vec::new() };
    let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    let upstream_wide = Outcome {
        out: wide(&upstream.out),
        lse: wide(&upstream.lse),
        entropy: wide(&upstream.entropy),
        max_score: Vec::new(),
    };
    let exact = reference::backward::<f64, f32>(&problem, views, &upstream_wide);
    let narrow = reference::backward::<f32, f32>(&problem, views, &upstream);
    let largest = |x: &mut dyn Iterator<Item = f64>| x.fold(0.0, |a: f64, x| a.max(x.abs()));
    let of = |exact: &[f64], narrow: &[f32], found: &[f32]| {
        assert_eq!(exact.len(), found.len());
        let error = |x: &[f32]| largest(&mut wide(x).iter().zip(exact).map(|(x, y)| x - y));
        let size = largest(&mut exact.iter().copied()).max(1.0);
        error(found) / (3.0 * error(narrow) + 4.0 * f64::from(f32::EPSILON) * size)
    };
    let [q, k, v] = [
        of(&exact.q, &narrow.q, &grads.q),
        of(&exact.k, &narrow.k, &grads.k),
        of(&exact.v, &narrow.v, &grads.v),
    ];
    q.max(k).max(v)
}

/// `sum(out * d_out)` by the definition in `f64`, with one number of one input moved.
fn loss(numbers: &Numbers, causal: bool, (input, i, step): (usize, usize, f64)) -> f64 {
    let mut inputs = [&numbers.q, &numbers.k, &numbers.v]
        .map(|x| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>());
    inputs[input][i] += step;
    let [q_len, k_len, dim, v_dim] = numbers.sizes;
    let [q, k, v] = &inputs;
    let (q, k) = (View::matrix(q, [q_len, dim]).unwrap(), View::matrix(k, [k_len, dim]).unwrap());
    let v = View::matrix(v, [k_len, v_dim]).unwrap();
    let mask = if causal { Mask::causal() } else { Mask::full() };
    let outcome = reference::forward::<f64, f64>(&Problem::new(&q, &k, &v).mask(mask), (q, k, v));
    outcome.out.iter().zip(&numbers.d_out).map(|(x, d)| x * f64::from(*d)).sum()
}

#[test]
fn gradients_are_the_slopes_of_the_loss() {
    const STEP: f64 = 1e-5;
    let numbers = Numbers::new([4, 6, 3, 2], 1.0);
    for causal in [false, true] {
        let head = numbers.head(causal);
        let ways = [
            plain(&head, &numbers.d_out),
            recompute(&head, &online::attend(&head), &numbers.d_out),
        ];
        for grads in ways {
            for (input, grad) in [grads.q, grads.k, grads.v].iter().enumerate() {
                for (i, grad) in grad.iter().enumerate() {
                    let at = |step| loss(&numbers, causal, (input, i, step));
                    let slope = (at(STEP) - at(-STEP)) / (2.0 * STEP);
                    let error = (f64::from(*grad) - slope).abs();
                    assert!(error < 2e-6, "input {input}, {i}: {grad}, by differences {slope}");
                }
            }
        }
    }
}

// ANCHOR: values
/// `dL/dv_j = sum_i a_ij dL/dout_i`: two queries, two keys, values of one feature, weights that can be told by hand.
#[test]
fn a_value_hears_from_each_row_as_much_as_the_row_looked_at_it() {
    // Scores 0 and ln 3 in the first row, 0 and -ln 3 in the second: weights 1/4, 3/4 and 3/4, 1/4.
    let (q, k) = ([1.0, -1.0], [0.0, 3f32.ln()]);
    let head = Head { q: &q, k: &k, v: &[10.0, 20.0], dim: 1, v_dim: 1, causal: false };
    let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
    let attended = definition::attend(&head);
    assert!(close(&attended.out, &[17.5, 12.5]));
    for grads in [plain(&head, &[1.0, 2.0]), recompute(&head, &attended, &[1.0, 2.0])] {
        // 1/4 x 1 + 3/4 x 2, and 3/4 x 1 + 1/4 x 2
        assert!(close(&grads.v, &[1.75, 1.25]), "{grads:?}");
        // By the scores: -1.875 and 1.875, -3.75 and 3.75. Nothing is learned from moving all scores of a row alike.
        assert!(close(&grads.q, &[1.875 * k[1], 3.75 * k[1]]), "{grads:?}");
        assert!(close(&grads.k, &[1.875, -1.875]), "{grads:?}");
    }
}
// ANCHOR_END: values
