//! Properties of the gradients of the kernels, and that masked inputs never reach them.

use regard::machine::Precision;
use regard::plan::OutputGrads;
use regard::problem::{Dims, Pair};
use regard::reference::backward;
use regard::score::ScoreRule;
use regard::{
    Element, Grads, Isa, Machine, Number, Output, Plan, Problem, Score, Shape, Tensor, View, bf16,
    f16,
};
use regard_testkit::cases::{SimilarityCase, dims};
use regard_testkit::masks::{MASKS, named};
use regard_testkit::run::{both_ways, forward, same_grad_bits};
use regard_testkit::scores::{Entries, ScoreOption, bias};
use regard_testkit::{Arrangement, Case, Data, GradCheck, TestTensor};

fn run<E: Element>(case: &Case, data: &Data<E>, isa: Isa) -> Grads<E> {
    both_ways(&data.problem(case), data.inputs(), data.output_grads(case), isa, 2).1
}

/// The score options with a gradient of their own or a derivative that is not constant, except for a dense bias.
const OPTIONS: [ScoreOption; 4] =
    [ScoreOption::Softcap(4.0), ScoreOption::Alibi, ScoreOption::Clipped(4), ScoreOption::Sinks];

/// Visible pairs: those that neither the mask nor a bias of `-inf` hides.
struct Sight {
    dims: Dims,
    /// `[batch, heads.q, q_len, k_len]`
    pairs: Vec<bool>,
}

impl Sight {
    fn new<E: Element>(case: &Case, data: &Data<E>) -> Self {
        let (dims, shape) = (case.dims, data.bias.shape);
        let (problem, bias) = (data.problem(case), data.bias.view());
        let on = |i: usize, n: usize| if n == 1 { 0 } else { i };
        let mut pairs = Vec::new();
        for (b, h) in heads(dims.batch, dims.heads.q) {
            let scope = problem.scope(b, h);
            for row in 0..dims.q_len {
                let line = bias.row(on(b, shape.batch), on(h, shape.heads), on(row, shape.len));
                pairs.extend((0..dims.k_len).map(|key| {
                    let hidden =
                        shape.dim > 0 && wide(line[on(key, shape.dim)]) == f64::NEG_INFINITY;
                    data.mask.is_visible(&scope, row, key) && !hidden
                }));
            }
        }
        Self { dims, pairs }
    }

    /// Visibility of each key to a row.
    fn row(&self, b: usize, h: usize, row: usize) -> &[bool] {
        let at = (b * self.dims.heads.q + h) * self.dims.q_len + row;
        &self.pairs[at * self.dims.k_len..][..self.dims.k_len]
    }

    /// Visibility for all rows that use a KV head.
    fn rows(&self, b: usize, kv_head: usize) -> impl Iterator<Item = &[bool]> {
        let served = self.dims.heads.q / self.dims.heads.kv;
        let heads = kv_head * served..(kv_head + 1) * served;
        heads.flat_map(move |h| (0..self.dims.q_len).map(move |row| self.row(b, h, row)))
    }
}

fn heads(batch: usize, heads: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..batch).flat_map(move |b| (0..heads).map(move |h| (b, h)))
}

fn bits<E: Element>(xs: &[E]) -> Vec<u64> {
    xs.iter().map(|x| wide(*x).to_bits()).collect()
}

fn wide<E: Element>(x: E) -> f64 {
    Number::to_f64(x.widen())
}

fn narrow<E: Element>(x: f64) -> E {
    E::narrow(E::Num::from_f64(x))
}

/// Whether a case uses AMX tiles. The `f32` run covers the cases that do not.
fn by_tiles<E: Element>(case: &Case, data: &Data<E>, isa: Isa) -> bool {
    let plan = Plan::new(data.problem(case), Machine::detect().isa(isa));
    plan.is_ok_and(|plan| plan.tile_products().is_some())
}

/// Runs a test for every dtype: `f32` with default precision on every instruction set, all other dtypes and precisions
/// where AMX tiles are used.
macro_rules! for_every_type {
    ($test:ident, $case:expr) => {{
        let case: Case = $case;
        $test::<f32>(&case, false);
        for precision in [Precision::Full, Precision::High] {
            $test::<f32>(&Case { precision: Some(precision), ..case.clone() }, true);
        }
        $test::<f16>(&case, true);
        $test::<bf16>(&case, true);
    }};
}

#[test]
fn the_gradient_of_a_value_is_the_weighted_sum_of_output_gradients() {
    let case = Case::new(dims([2, 4, 2, 33, 40, 8, 5])).mask(named("causal")).scores(&OPTIONS);
    for (isa, dropout) in Isa::available().into_iter().flat_map(|i| [(i, None), (i, Some(0.3))]) {
        let case = Case { dropout, ..case.clone() };
        let data = Data::<f32>::new(&case);
        let Dims { batch, heads: n, q_len, k_len, .. } = case.dims;
        // With one-hot values and as many features as keys, the output is the row of weights.
        let hot = (0..batch * n.kv * k_len * k_len).map(|i| i / k_len % k_len == i % k_len);
        let hot: Vec<f32> = hot.map(|hot| f32::from(u8::from(hot))).collect();
        let shape = Shape { batch, heads: n.kv, len: k_len, dim: k_len };
        let mut one_hot = data.clone();
        one_hot.v = TestTensor::new(&hot, shape, Arrangement::Bhsd);
        let weights = forward(&one_hot.problem(&case), one_hot.inputs(), isa, 2).out;
        let grads = run(&case, &data, isa);
        for (b, kv_head) in heads(batch, n.kv) {
            let served = (0..n.q).filter(|h| h * n.kv / n.q == kv_head);
            let rows: Vec<_> =
                served.flat_map(|h| (0..q_len).map(move |row| (b, h, row))).collect();
            for key in 0..k_len {
                for (d, gradient) in grads.v.view().row(b, kv_head, key).iter().enumerate() {
                    let terms = rows.iter().map(|(b, h, row)| {
                        let weight = weights.view().row(*b, *h, *row)[key];
                        f64::from(weight) * f64::from(data.d_out.view().row(*b, *h, *row)[d])
                    });
                    let (sum, size) =
                        terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                    let error = (f64::from(*gradient) - sum).abs();
                    assert!(error <= 1e-6 * size, "{} key {key}: {gradient} {sum}", isa.name());
                }
            }
        }
    }
}

/// Puts NaN, infinity and 0 into the queries of fully masked rows and into the gradients of their outputs. No gradient may
/// change.
fn unseeing_rows_give_nothing<E: Element>(case: &Case, tiles: bool) {
    let data = Data::<E>::new(case);
    let sight = Sight::new(case, &data);
    let d = case.dims;
    let sunk = case.scores.contains(&ScoreOption::Sinks);
    let blind = |(b, h): (usize, usize)| {
        (0..d.q_len).filter(|row| sight.row(b, h, *row).iter().all(|sees| !sees)).collect()
    };
    let blind: Vec<(usize, usize, Vec<usize>)> =
        heads(d.batch, d.heads.q).map(|(b, h)| (b, h, blind((b, h)))).collect();
    assert!(blind.iter().any(|(_, _, rows)| !rows.is_empty()), "{case}");
    for isa in Isa::available() {
        if tiles && !by_tiles(case, &data, isa) {
            continue;
        }
        let clean = run(case, &data, isa);
        for (b, h, rows) in &blind {
            let gradients = rows.iter().flat_map(|row| clean.q.view().row(*b, *h, *row));
            assert!(gradients.into_iter().all(|x| wide(*x) == 0.0), "{case} on {}", isa.name());
        }
        for anything in [f64::NAN, f64::INFINITY, 0.0] {
            let mut other = data.clone();
            for (b, h, rows) in &blind {
                for row in rows {
                    other.q.row_mut(*b, *h, *row).fill(narrow(anything));
                    other.d_out.row_mut(*b, *h, *row).fill(narrow(anything));
                    // A sink is visible even to a fully masked row.
                    if !sunk {
                        let at = (b * d.heads.q + h) * d.q_len + row;
                        let anything = E::Num::from_f64(anything);
                        other.d_rows.iter_mut().for_each(|d| d[at] = anything);
                    }
                }
            }
            let grads = run(case, &other, isa);
            let same = same_grad_bits(&grads, &clean);
            assert!(same, "{case} on {}: {anything} in rows that see nothing", isa.name());
        }
    }
}

#[test]
fn rows_that_see_nothing_have_no_gradient_and_give_none() {
    for shape in [[2, 2, 1, 70, 9, 8, 5], [1, 2, 1, 9, 1100, 3, 4]] {
        let case = Case::new(dims(shape)).mask(named("bits_hidden_rows"));
        for similarity in SimilarityCase::ALL {
            let case = case.clone().similarity(similarity);
            for scores in [&[][..], &[ScoreOption::Scale(0.0)], &OPTIONS] {
                for_every_type!(unseeing_rows_give_nothing, case.clone().scores(scores));
            }
            let case = Case { dropout: Some(0.3), entropy: true, ..case };
            for_every_type!(unseeing_rows_give_nothing, case.clone().scores(&OPTIONS[..3]));
            for_every_type!(unseeing_rows_give_nothing, case.scores(&OPTIONS));
        }
        for axes in ["1hq1", "bhqk", "111k"] {
            for_every_type!(
                unseeing_rows_give_nothing,
                case.clone().scores(&[bias(axes, Entries::Finite)])
            );
        }
        // Rows masked by a bias.
        let case = Case::new(dims(shape)).scores(&[bias("1hq1", Entries::Hiding)]);
        for_every_type!(unseeing_rows_give_nothing, case.clone());
        for_every_type!(
            unseeing_rows_give_nothing,
            Case { dropout: Some(0.3), entropy: true, ..case }
        );
    }
}

/// Puts `poison` into key `p` and its value. Gradients may change except those of rows to which the key is masked, and of
/// keys that share no row with it. If no row attends to it, no gradient may change.
fn poison_one<E: Element>(
    (case, data, sight): (&Case, &Data<E>, &Sight),
    clean: &Grads<E>,
    (p, poison, isa): (usize, f64, Isa),
) {
    let d = case.dims;
    let mut poisoned = data.clone();
    for (b, h) in heads(d.batch, d.heads.kv) {
        poisoned.k.row_mut(b, h, p).fill(narrow(poison));
        poisoned.v.row_mut(b, h, p).fill(narrow(poison));
    }
    let grads = run(case, &poisoned, isa);
    let assert_same = |what: &str, [now, before]: [&Tensor<E>; 2], [b, h, i]: [usize; 3]| {
        let [now, before] = [now, before].map(|t| t.view().row(b, h, i));
        assert_eq!(
            bits(now),
            bits(before),
            "{case} on {}: {poison} in key {p} changed the gradient of {what} {b} {h} {i}: {now:?}",
            isa.name()
        );
    };
    for (b, h) in heads(d.batch, d.heads.q) {
        for row in (0..d.q_len).filter(|row| !sight.row(b, h, *row)[p]) {
            assert_same("query", [&grads.q, &clean.q], [b, h, row]);
        }
    }
    let mut by_nobody = true;
    for (b, h) in heads(d.batch, d.heads.kv) {
        let mut together = vec![false; d.k_len];
        for row in sight.rows(b, h).filter(|row| row[p]) {
            together.iter_mut().zip(row).for_each(|(together, sees)| *together |= sees);
        }
        by_nobody &= !together[p];
        for key in (0..d.k_len).filter(|key| !together[*key]) {
            assert_same("key", [&grads.k, &clean.k], [b, h, key]);
            assert_same("value", [&grads.v, &clean.v], [b, h, key]);
        }
    }
    let same = !by_nobody || same_grad_bits(&grads, clean);
    assert!(same, "{case} on {}: {poison} in key {p}, which nobody sees", isa.name());
}

fn hidden_keys_change_nothing<E: Element>(case: &Case, tiles: bool) {
    let data = Data::<E>::new(case);
    let sight = Sight::new(case, &data);
    for isa in Isa::available() {
        if tiles && !by_tiles(case, &data, isa) {
            continue;
        }
        let clean = run(case, &data, isa);
        for p in [0, case.dims.k_len / 2, case.dims.k_len - 1] {
            for poison in [f64::NAN, f64::INFINITY] {
                poison_one((case, &data, &sight), &clean, (p, poison, isa));
            }
        }
    }
}

#[test]
fn hidden_keys_never_reach_a_gradient() {
    for shape in [[2, 2, 1, 33, 40, 8, 8], [1, 1, 1, 70, 67, 16, 3], [1, 1, 1, 3, 1100, 4, 4]] {
        for mask in MASKS {
            let case = Case::new(dims(shape)).mask(*mask);
            for_every_type!(hidden_keys_change_nothing, case.clone());
            let case = Case { dropout: Some(0.3), entropy: true, ..case };
            for_every_type!(hidden_keys_change_nothing, case.scores(&OPTIONS));
        }
    }
}

#[test]
fn hidden_keys_never_reach_a_gradient_of_any_similarity() {
    for (similarity, mask) in SimilarityCase::ALL
        .into_iter()
        .flat_map(|s| ["lengths_causal", "bits", "strided"].map(|mask| (s, mask)))
    {
        let case = Case::new(dims([2, 2, 1, 33, 40, 8, 8])).mask(named(mask));
        for_every_type!(
            hidden_keys_change_nothing,
            case.similarity(similarity).scores(&OPTIONS[..1])
        );
    }
}

#[test]
fn keys_hidden_by_a_bias_never_reach_a_gradient() {
    for axes in ["11qk", "b11k", "111k", "1hqk", "bhqk"] {
        for mask in ["full", "causal"] {
            let case = Case::new(dims([2, 2, 1, 33, 40, 8, 8])).mask(named(mask));
            for_every_type!(
                hidden_keys_change_nothing,
                case.clone().scores(&[bias(axes, Entries::Hiding)])
            );
            let scores = [ScoreOption::Softcap(4.0), bias(axes, Entries::Hiding)];
            let case = Case { dropout: Some(0.3), entropy: true, ..case };
            for_every_type!(hidden_keys_change_nothing, case.scores(&scores));
        }
    }
}

/// Without dropout, whose random numbers depend on the index of the item in its batch.
#[test]
fn the_gradients_of_an_item_do_not_depend_on_its_batch() {
    for (shape, similarity) in [[5, 4, 2, 33, 40, 8, 5], [5, 1, 1, 70, 1100, 4, 4]]
        .into_iter()
        .flat_map(|shape| SimilarityCase::ALL.map(|s| (shape, s)))
    {
        let scores = [&OPTIONS[..], &[bias("1hqk", Entries::Finite)]].concat();
        let case = Case::new(dims(shape)).mask(named("causal")).scores(&scores);
        let case = Case { entropy: true, ..case }.similarity(similarity);
        let data = Data::<f32>::new(&case);
        for isa in Isa::available() {
            let all = run(&case, &data, isa);
            for b in 0..5 {
                let mut alone = data.clone();
                let part = |xs: &Vec<f32>| xs[b * xs.len() / 5..(b + 1) * xs.len() / 5].to_vec();
                for tensor in [&mut alone.q, &mut alone.k, &mut alone.v, &mut alone.d_out] {
                    tensor.data = part(&tensor.data);
                    tensor.shape.batch = 1;
                }
                alone.d_rows = data.d_rows.each_ref().map(part);
                let one = run(&case, &alone, isa);
                for (all, one) in [(&all.q, &one.q), (&all.k, &one.k), (&all.v, &one.v)] {
                    let (n, one) = (one.data().len(), bits(one.data()));
                    assert_eq!(bits(&all.data()[b * n..][..n]), one, "{case} on {}", isa.name());
                }
            }
        }
    }
}

#[test]
fn the_gradients_of_grouped_heads_are_sums_over_repeated_keys_and_values() {
    for mask in ["causal", "bits_per_head", "strided"] {
        let case = Case::new(dims([2, 6, 2, 33, 40, 8, 5])).mask(named(mask)).scores(&OPTIONS);
        let case = Case { dropout: Some(0.3), entropy: true, ..case };
        let data = Data::<f32>::new(&case);
        let Dims { batch, heads: n, k_len, .. } = case.dims;
        let mut repeated = data.clone();
        for tensor in [&mut repeated.k, &mut repeated.v] {
            let (view, shape) = (tensor.view(), Shape { heads: n.q, ..tensor.shape });
            let rows = heads(batch, n.q).flat_map(|(b, h)| (0..k_len).map(move |i| (b, h, i)));
            let values: Vec<f32> =
                rows.flat_map(|(b, h, i)| view.row(b, h * n.kv / n.q, i)).copied().collect();
            *tensor = TestTensor::new(&values, shape, Arrangement::Bhsd);
        }
        let output_grads =
            (&data.output_grads_by_definition(&case), &data.output_grads_by_definition(&case));
        let judge = GradCheck::new(&data.problem(&case), data.inputs(), output_grads);
        for isa in Isa::available() {
            let mut grads = run(&case, &repeated, isa);
            for tensor in [&mut grads.k, &mut grads.v] {
                let shape = Shape { heads: n.kv, ..tensor.shape() };
                let (head, served) = (shape.len * shape.dim, n.q / n.kv);
                let groups = tensor.data().chunks_exact(served * head);
                let sum = |group: &[f32], i: usize| (0..served).map(|h| group[h * head + i]).sum();
                let sums = groups.flat_map(|group| (0..head).map(move |i| sum(group, i)));
                *tensor = Tensor::new(sums.collect(), shape, tensor.layout()).unwrap();
            }
            let (ratio, which) = judge.ratio(&grads).unwrap();
            assert!(ratio <= 1.0, "{case} on {}: {ratio} of the bound by {which}", isa.name());
        }
    }
}

#[test]
fn the_layout_changes_no_bit_of_a_gradient() {
    for (mask, similarity) in ["causal", "bits", "strided", "longformer"]
        .into_iter()
        .flat_map(|mask| SimilarityCase::ALL.map(|s| (mask, s)))
    {
        let scores = [&OPTIONS[..], &[bias("b1qk", Entries::Hiding)]].concat();
        let case = Case::new(dims([2, 4, 2, 33, 70, 8, 5])).mask(named(mask)).scores(&scores);
        let case = Case { dropout: Some(0.3), entropy: true, ..case }.similarity(similarity);
        let data = Data::<f32>::new(&case);
        for isa in Isa::available() {
            let expected = run(&case, &data, isa);
            for arrangement in [Arrangement::Bshd, Arrangement::Slice] {
                let case = case.clone().arrangement(arrangement);
                let grads = run(&case, &Data::<f32>::new(&case), isa);
                assert!(same_grad_bits(&grads, &expected), "{case} on {}", isa.name());
            }
        }
    }
}

#[test]
fn a_constant_added_to_all_scores_moves_every_lse_by_as_much() {
    let case = Case::new(dims([2, 4, 2, 70, 33, 8, 5])).mask(named("bits_hidden_rows"));
    let data = Data::<f32>::new(&case);
    let [d_lse, _] = &data.d_rows;
    let (q, k, v) = data.inputs();
    let nothing = vec![0.0; data.d_out.data.len()];
    let d_out = View::bhsd(&nothing, data.d_out.shape.to_array()).unwrap();
    let constant = [0.7];
    let score = Score::new().bias(View::matrix(&constant, [1, 1]).unwrap());
    let problem = data.problem(&case).score(score);
    for isa in Isa::available() {
        let output_grads = OutputGrads::new(d_out).lse(d_lse).with_bias();
        let (output, grads) = both_ways(&problem, (q, k, v), output_grads, isa, 2);
        let seeing = output.lse.iter().zip(d_lse).filter(|(lse, _)| lse.is_finite());
        let sum: f64 = seeing.map(|(_, d)| f64::from(*d)).sum();
        let gradient = f64::from(grads.bias.unwrap().data()[0]);
        assert!((gradient - sum).abs() < 1e-4, "{} {gradient} {sum}", isa.name());
    }
}

/// Scores so large that lse cannot resolve their differences: one head, one feature, queries of 1.
fn large_scores(base: f32) -> (Vec<f32>, Vec<f32>) {
    // The spacing of floats at that magnitude.
    let step = base * f32::EPSILON;
    (
        (0..200).map(|i| base + step * (i % 3) as f32).collect(),
        (0..200).map(|i| (i as f32).cos()).collect(),
    )
}

#[test]
fn weights_sum_to_one_however_large_the_scores_are() {
    for (isa, base) in
        Isa::available().into_iter().flat_map(|i| [2e3f32, 1e6, -3e9, -1e30].map(|b| (i, b)))
    {
        let (keys, values) = large_scores(base);
        let (one, column) = ([1f32], [200, 1]);
        let q = View::matrix(&one, [1, 1]).unwrap();
        let (k, v) = (View::matrix(&keys, column).unwrap(), View::matrix(&values, column).unwrap());
        let part = |range: std::ops::Range<usize>| {
            let column = [range.len(), 1];
            let (k, v) = (&keys[range.clone()], &values[range]);
            (View::matrix(k, column).unwrap(), View::matrix(v, column).unwrap())
        };
        let problem = |k: &View<'_, f32>, v: &View<'_, f32>| {
            Problem::new(&q, k, v).score(Score::new().scale(1.0))
        };
        let parts: Vec<Output<f32>> = [0..70, 70..200]
            .map(part)
            .iter()
            .map(|(k, v)| forward(&problem(k, v), (q, *k, *v), isa, 1))
            .collect();
        let whole = forward(&problem(&k, &v), (q, k, v), isa, 1);
        let plan = Plan::new(problem(&k, &v), Machine::detect().isa(isa)).unwrap();
        for output in [whole, Output::merge(Machine::detect(), &parts).unwrap()] {
            let grads = plan.backward(q, k, v, &output, q).unwrap();
            let sum: f32 = grads.v.data().iter().sum();
            assert!((sum - 1.0).abs() < 1e-4, "{} {base}: {sum}", isa.name());
        }
    }
}

#[test]
fn a_scale_near_zero_has_a_gradient() {
    for scale in [0.0, 1e-45, 3e-39, 1e-30, 1e-15] {
        let case = Case::new(dims([1, 2, 1, 33, 40, 8, 5])).scores(&[ScoreOption::Scale(scale)]);
        let data = Data::<f32>::new(&case);
        let output_grads = data.output_grads_by_definition::<f64>(&case);
        let exact = backward(&data.problem(&case), data.inputs(), &output_grads).scale;
        for isa in Isa::available() {
            let found = run(&case, &data, isa).scale;
            assert!((found / exact - 1.0).abs() < 1e-4, "{case}: {found} for {exact}");
        }
    }
}

#[test]
fn a_sink_of_minus_infinity_has_no_gradient() {
    let case = Case { entropy: true, ..Case::new(dims([1, 2, 2, 5, 7, 4, 4])) };
    let case = case.mask(named("nothing")).scores(&[ScoreOption::Sinks]);
    let mut data = Data::<f32>::new(&case);
    data.sinks.fill(f32::NEG_INFINITY);
    data.d_rows.iter_mut().for_each(|d| d.fill(f32::NAN));
    for isa in Isa::available() {
        assert_eq!(run(&case, &data, isa).sinks, [0.0; 2]);
    }
}

/// Masks every third key.
#[derive(Debug)]
struct Hiding;

impl ScoreRule for Hiding {
    fn apply(&self, at: Pair, score: f64) -> f64 {
        if at.key.is_multiple_of(3) { f64::NEG_INFINITY } else { score }
    }
    fn derivative(&self, at: Pair, _: f64) -> f64 {
        if at.key.is_multiple_of(3) { f64::NAN } else { 1.0 }
    }
}

#[test]
fn what_a_rule_of_ones_own_hides_is_hidden() {
    let case = Case::new(dims([1, 1, 1, 20, 70, 8, 8]));
    let mut data = Data::<f32>::new(&case);
    (0..70).step_by(3).for_each(|key| data.v.row_mut(0, 0, key).fill(f32::NAN));
    let (q, k, v) = data.inputs();
    let problem = Problem::new(&q, &k, &v).score(Score::new().custom(&Hiding));
    for isa in Isa::available() {
        let (output, grads) = both_ways(&problem, (q, k, v), data.output_grads(&case), isa, 1);
        assert!(output.out.data().iter().all(|x| x.is_finite()), "{}", isa.name());
        for (key, row) in grads.k.data().chunks_exact(8).enumerate() {
            assert!(row.iter().all(|x| if key % 3 == 0 { *x == 0.0 } else { x.is_finite() }));
        }
    }
}
