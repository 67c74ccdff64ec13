//! Attention statistics: all of them against the reference on the case table, and properties that the table does not cover.

use regard::cache::CacheShape;
use regard::problem::Normalizer;
use regard::{AttentionView, Error, KvCache, Machine, Mask, Output, Plan, Problem, View};
use regard_scope::{
    Inputs, Labels, Layer, LayerData, Measure, Pattern, Pool, Trace, Weights, audit, diff, rollout,
};
use regard_testkit::{Case, Dtype, Noise, cases, check_statistics};

fn look(rows: impl Fn(usize, &Case) -> bool) {
    // With a NaN, the largest weight and the top keys are not defined; it propagates to all sums.
    let table = cases().into_iter().filter(|case| case.nan.is_none());
    let rows: Vec<Case> = table.enumerate().filter(|(i, c)| rows(*i, c)).map(|(_, c)| c).collect();
    let report = check_statistics(&rows);
    assert!(report.is_green(), "{report}");
}

#[test]
fn every_statistic_agrees_with_the_definition() {
    look(|i, case| case.dtype == Dtype::F32 && i % 2 == 0);
}

#[test]
fn every_statistic_agrees_with_the_definition_in_the_other_half() {
    look(|i, case| case.dtype == Dtype::F32 && i % 2 == 1);
}

#[test]
fn every_statistic_of_other_types_agrees_with_the_definition() {
    look(|_, case| case.dtype != Dtype::F32);
}

fn col_sum(view: &AttentionView<'_, f32>) -> Vec<f32> {
    Measure::new().col_sum().of(view).expect("a view that fits").col_sum
}

/// Queries and keys of several heads.
struct Tensors {
    q: Vec<f32>,
    k: Vec<f32>,
    shape: [usize; 4],
}

impl Tensors {
    fn new(heads: usize, len: usize, dim: usize) -> Self {
        let mut noise = Noise::new(7 + len as u64);
        let n = heads * len * dim;
        Self { q: noise.normals(n), k: noise.normals(n), shape: [1, heads, len, dim] }
    }

    fn views(&self) -> (View<'_, f32>, View<'_, f32>) {
        let view = |data| View::bhsd(data, self.shape).expect("as many numbers");
        (view(&self.q), view(&self.k))
    }

    fn plan(&self, mask: Mask) -> (Plan<'_, f32>, Output<f32>) {
        let (q, k) = self.views();
        let plan = Plan::new(Problem::new(&q, &k, &k).mask(mask), Machine::detect());
        let plan = plan.expect("a problem that fits");
        let output = plan.forward(q, k, k).expect("tensors that fit");
        (plan, output)
    }
}

fn close(a: f32, b: f32) -> bool {
    (a - b).abs() < 1e-5 * (1.0 + b.abs())
}

#[test]
fn a_narrow_view_sees_a_part_of_the_whole() {
    let (t, n) = (Tensors::new(2, 300, 8), 300);
    let (q, k) = t.views();
    let (plan, output) = t.plan(Mask::causal());
    let view = AttentionView::new(&plan, q, k, &output).unwrap();
    let all = view.tile(0..n, 0..n).unwrap();
    let head = view.head(0, 1).unwrap();
    assert_eq!(head.row(77).unwrap(), all[n * n + 77 * n..][..n]);
    // Ranges are clipped to the last query and key.
    let corner = head.tile(290..400, 295..usize::MAX).unwrap();
    let expected = (290..n).flat_map(|i| all[n * n + i * n + 295..][..5].to_vec());
    assert_eq!(corner, expected.collect::<Vec<_>>());
    assert!(head.tile(300..400, 0..n).unwrap().is_empty());
    // Every third row from 10 on, in cells of two keys; the range of keys exceeds their number.
    let some = head.rows(10..40).every(3).unwrap();
    let measure = Measure::new().entropy().pooled(10, 151, Pool::Mean);
    let found = measure.of(&some.keys(0..302)).unwrap();
    let entropy = Measure::new().entropy().of(&view).unwrap().entropy;
    let expected: Vec<f32> = (10..40).step_by(3).map(|i| entropy[n + i]).collect();
    assert!(found.entropy.iter().zip(expected).all(|(a, b)| close(*a, b)));
    let map = &found.pooled[0];
    assert_eq!((map.rows, map.cols), (10, 150));
    for (i, x) in map.values.iter().enumerate() {
        let (row, key) = (10 + i / 150 * 3, i % 150 * 2);
        let pair = &all[n * n + row * n + key..][..2];
        assert!(close(*x, (pair[0] + pair[1]) / 2.0), "{row} {key}");
    }
}

#[test]
fn all_that_is_given_is_received() {
    let t = Tensors::new(3, 200, 16);
    let (q, k) = t.views();
    for mask in [Mask::full(), Mask::causal(), Mask::full().window(9), Mask::strided(16)] {
        let (plan, output) = t.plan(mask);
        let view = AttentionView::new(&plan, q, k, &output).unwrap();
        let found = Measure::new().mass(Mask::full()).col_sum().of(&view).unwrap();
        assert!(found.masses[0].iter().all(|mass| close(*mass, 1.0)));
        for head in found.col_sum.chunks(200) {
            assert!(close(head.iter().sum(), 200.0));
        }
        // Weights computed from lse alone agree to rounding.
        let again = AttentionView::from_lse(&plan, q, k, &output.lse).unwrap();
        let pairs = again.row(50).unwrap().into_iter().zip(view.row(50).unwrap());
        assert!(pairs.into_iter().all(|(a, b)| close(a, b)));
    }
}

#[test]
fn packed_and_cached_weights_are_those_of_each_alone() {
    let t = Tensors::new(2, 90, 8);
    let (offsets, lens) = ([0, 40, 40, 90], [40, 0, 50]);
    let packed = |data| View::packed(data, &offsets, [2, 8]).unwrap();
    let (q, k) = (packed(&t.q), packed(&t.k));
    let problem = Problem::new(&q, &k, &k).mask(Mask::causal());
    let plan = Plan::new(problem, Machine::detect()).unwrap();
    let output = plan.forward(q, k, k).unwrap();
    let view = AttentionView::new(&plan, q, k, &output).unwrap();
    let all = col_sum(&view);
    let mut seen = 0;
    for (item, len) in lens.into_iter().enumerate() {
        let own = |data: &[f32]| data[offsets[item] * 16..offsets[item + 1] * 16].to_vec();
        let (q, k) = (own(&t.q), own(&t.k));
        let alone = |data| View::bshd(data, [1, len, 2, 8]).unwrap();
        let (q, k) = (alone(&q), alone(&k));
        let plan =
            Plan::new(Problem::new(&q, &k, &k).mask(Mask::causal()), Machine::detect()).unwrap();
        let output = plan.forward(q, k, k).unwrap();
        let alone = col_sum(&AttentionView::new(&plan, q, k, &output).unwrap());
        assert_eq!(all[seen..seen + alone.len()], alone);
        seen += alone.len();
    }
    assert_eq!(seen, all.len());
    let shape = CacheShape { heads: 2, qk_dim: 8, v_dim: 8, page: 16 };
    let mut cache = KvCache::<f32>::new(shape, usize::MAX).unwrap();
    let sequence = cache.start().unwrap();
    let k = View::bhsd(&t.k, t.shape).unwrap();
    cache.append(sequence, k, k).unwrap();
    let (q, sequences) = (View::bhsd(&t.q, t.shape).unwrap(), [sequence]);
    let problem = Problem::cached(&q, &cache, &sequences).unwrap().mask(Mask::causal());
    let plan = Plan::new(problem, Machine::detect()).unwrap();
    let output = plan.forward_cached(q, &cache, &sequences).unwrap();
    let cached = AttentionView::cached(&plan, q, (&cache, &sequences), &output).unwrap();
    let (plan, output) = t.plan(Mask::causal());
    let plain = AttentionView::new(&plan, q, k, &output).unwrap();
    assert_eq!(col_sum(&cached), col_sum(&plain));
}

#[test]
fn an_audit_tells_what_patterns_keep() {
    let t = Tensors::new(2, 256, 16);
    let (q, k) = t.views();
    let (plan, output) = t.plan(Mask::causal());
    let view = AttentionView::new(&plan, q, k, &output).unwrap();
    let patterns = [
        Pattern::Window(32),
        Pattern::TopK(4),
        Pattern::Mask(Mask::blocks(64)),
        Pattern::Window(256),
    ];
    let heads = audit(&view, &patterns).unwrap();
    let found = Measure::new().mass(Mask::full().window(32)).top_k(4).of(&view).unwrap();
    let (window, top) = (&found.masses[0], &found.top);
    for (head, found) in heads.iter().enumerate() {
        let rows = head * 256..(head + 1) * 256;
        let mean = rows.clone().map(|i| f64::from(window[i])).sum::<f64>() / 256.0;
        assert!((found.retained[0].mean - mean).abs() < 1e-6);
        let least = rows.map(|i| top.weights(i).iter().sum::<f32>()).fold(1.0, f32::min);
        assert!((found.retained[1].worst - f64::from(least)).abs() < 1e-6);
        assert!((found.retained[3].worst - 1.0).abs() < 1e-5);
        assert!(found.retained.iter().all(|share| share.worst <= share.mean + 1e-9));
    }
}

#[test]
fn a_difference_is_what_its_formula_says() {
    let (a, b) = (Tensors::new(2, 150, 8), Tensors::new(2, 151, 8));
    let b = Tensors { q: b.q[..a.q.len()].into(), k: b.k[..a.k.len()].into(), shape: a.shape };
    let ((first, p), (second, r)) = (a.plan(Mask::causal()), b.plan(Mask::causal()));
    let first = AttentionView::new(&first, a.views().0, a.views().1, &p).unwrap();
    let second = AttentionView::new(&second, b.views().0, b.views().1, &r).unwrap();
    let found = diff(&first, &second).unwrap();
    let maps = [&first, &second].map(|view| view.tile(0..150, 0..150).unwrap());
    for (row, found) in found.iter().enumerate() {
        let weights = |i: usize| maps[i][row * 150..][..150].iter().map(|a| f64::from(*a));
        let pairs: Vec<_> = weights(0).zip(weights(1)).filter(|(p, _)| *p > 0.0).collect();
        let kl: f64 = pairs.iter().map(|(p, q)| p * (p / q).ln()).sum();
        let half = |p: f64, q: f64| p * (2.0 * p / (p + q)).ln() / 2.0;
        let js: f64 = pairs.iter().map(|(p, q)| half(*p, *q) + half(*q, *p)).sum();
        assert!(
            (found.kl - kl).abs() < 1e-4 && (found.js - js).abs() < 1e-4,
            "{found:?} {kl} {js}"
        );
        assert!((0.0..=std::f64::consts::LN_2).contains(&found.js));
    }
    let same = diff(&first, &first).unwrap();
    assert!(same.iter().all(|apart| apart.kl.abs() < 1e-12 && apart.js < 1e-12));
    // The window masks keys that are visible in the first run.
    let (narrow, output) = a.plan(Mask::causal().window(3));
    let narrow = AttentionView::new(&narrow, a.views().0, a.views().1, &output).unwrap();
    let apart = diff(&first, &narrow).unwrap();
    assert_eq!(apart[149].kl, f64::INFINITY);
    assert!(diff(&narrow, &first).unwrap()[149].kl.is_finite());
}

#[test]
fn a_rollout_is_a_product_of_matrices() {
    let (layers, n) = ([Tensors::new(2, 40, 8), Tensors::new(3, 40, 4)], 40);
    let planned: Vec<_> = layers.iter().map(|t| t.plan(Mask::causal())).collect();
    let views: Vec<_> = layers
        .iter()
        .zip(&planned)
        .map(|(t, (plan, output))| {
            AttentionView::new(plan, t.views().0, t.views().1, output).unwrap()
        })
        .collect();
    let mut from = vec![0.0; n];
    from[n - 1] = 1.0;
    let rows = rollout(&views, &from, 0.5).unwrap();
    // ANCHOR: rollout
    let mut r = from.clone();
    for (view, expected) in views.iter().zip(&rows).rev() {
        let all = view.tile(0..n, 0..n).unwrap();
        let heads = all.len() / n / n;
        let mut next = vec![0.0; n];
        for (i, a) in all.iter().enumerate() {
            next[i % n] += 0.5 * r[i / n % n] * f64::from(*a) / heads as f64;
        }
        next.iter_mut().zip(&r).for_each(|(next, r)| *next += 0.5 * r);
        assert!(next.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6));
        assert!((next.iter().sum::<f64>() - 1.0).abs() < 1e-5);
        r = next;
    }
    // ANCHOR_END: rollout
    assert!(rollout(&views, &from[1..], 0.5).is_err());
    assert!(rollout(&views, &from, f64::NAN).is_err());
}

#[test]
fn what_cannot_be_looked_at_is_refused() {
    let t = Tensors::new(2, 20, 8);
    let (q, k) = t.views();
    let (plan, output) = t.plan(Mask::full());
    let view = AttentionView::new(&plan, q, k, &output).unwrap();
    let out_of_range = |option, found, limit| Error::OutOfRange { option, found, limit };
    assert_eq!(view.head(0, 2).unwrap_err(), out_of_range("head", 2, 2));
    assert_eq!(view.row(20).unwrap_err(), out_of_range("row", 20, 20));
    assert_eq!(view.every(0).unwrap_err(), Error::Zero { option: "step" });
    let refused = |measure: Measure| measure.of(&view).unwrap_err();
    assert_eq!(refused(Measure::new().top_k(0)), Error::Zero { option: "top_k" });
    assert_eq!(refused(Measure::new().pooled(0, 3, Pool::Max)), Error::Zero { option: "rows" });
    assert!(Measure::new().mass(Mask::lengths(&[1, 2])).of(&view).is_err());
    assert!(AttentionView::from_lse(&plan, q, k, &output.lse[1..]).is_err());
    let other = View::bhsd(&t.k, [1, 2, 10, 16]).unwrap();
    assert!(AttentionView::new(&plan, q, other, &output).is_err());
    let top = Problem::new(&q, &k, &k).normalizer(Normalizer::TopK(3));
    let top = Plan::new(top, Machine::detect()).unwrap();
    let refused = AttentionView::from_lse(&top, q, k, &output.lse).unwrap_err();
    assert!(matches!(refused, Error::NoSelection { .. }));
    // A step beyond all rows leaves the first.
    let one = view.every(usize::MAX).unwrap();
    assert_eq!(Measure::new().entropy().of(&one).unwrap().entropy.len(), 2);
}

/// Long enough for several strips, with more heads than are processed at once.
#[test]
fn strips_and_waves_add_up_to_the_whole() {
    for (heads, n) in [(3, 2500), (70, 1100)] {
        let t = Tensors::new(heads, n, 4);
        let (q, k) = t.views();
        let problem = Problem::new(&q, &k, &k).mask(Mask::causal().window(700));
        let all = Measure::new().col_sum().top_k(2).entropy().pooled(13, 17, Pool::Sum);
        let found = [1, 2, 7].map(|threads| {
            let plan = Plan::new(problem.clone(), Machine::detect().threads(threads)).unwrap();
            let output = plan.forward(q, k, k).unwrap();
            let view = AttentionView::new(&plan, q, k, &output).unwrap();
            let last = view.head(0, heads - 1).unwrap().tile(0..n, 0..n).unwrap();
            (all.of(&view).unwrap(), last)
        });
        assert!(found[0] == found[1] && found[1] == found[2]);
        let (measured, map) = &found[0];
        let col_sum = &measured.col_sum[(heads - 1) * n..];
        let mut cells = vec![0.0f64; 13 * 17];
        for (key, sum) in col_sum.iter().enumerate() {
            let column = (0..n).map(|row| f64::from(map[row * n + key]));
            assert!((column.clone().sum::<f64>() - f64::from(*sum)).abs() < 1e-4);
            for (row, a) in column.enumerate() {
                cells[row * 13 / n * 17 + key * 17 / n] += a;
            }
        }
        let pooled = &measured.pooled[heads - 1];
        assert_eq!((measured.pooled.len(), pooled.rows, pooled.cols), (heads, 13, 17));
        assert!(pooled.values.iter().zip(cells).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-3));
        let top = &measured.top;
        for row in [0, 1, 1023, 1024, n - 1] {
            let (weights, at) = (&map[row * n..][..n], (heads - 1) * n + row);
            assert_eq!(top.keys(at).len(), 2.min(row + 1));
            let mut pairs = top.keys(at).iter().zip(top.weights(at));
            assert!(pairs.all(|(key, a)| close(weights[*key], *a)));
            assert!(weights.iter().all(|a| *a <= top.weights(at)[0] + 1e-6));
        }
    }
}

#[test]
fn a_row_that_met_a_nan_says_nothing_of_keys_it_does_not_see() {
    let mut t = Tensors::new(1, 64, 8);
    t.q[0] = f32::NAN;
    let (q, k) = t.views();
    let (plan, output) = t.plan(Mask::causal());
    let view = AttentionView::new(&plan, q, k, &output).unwrap();
    let (first, received) = (view.row(0).unwrap(), col_sum(&view));
    assert!(first[0].is_nan() && first[1..].iter().all(|a| *a == 0.0));
    assert!(received[0].is_nan() && received[1..].iter().all(|a| a.is_finite()));
    assert!(diff(&view, &view).unwrap()[1..].iter().all(|apart| apart.js < 1e-12));
}

#[test]
fn value_weighted_statistics_are_those_of_dense_weights() {
    let (n, heads) = (40, 2);
    let mut noise = Noise::new(3);
    let mut numbers = |n: usize| noise.normals::<f32>(n);
    let (q, k) = ((numbers(heads * n * 8), [heads, n, 8]), (numbers(n * 8), [1, n, 8]));
    let inputs = Inputs::new(q, k, "causal").unwrap();
    let mut value_norms: Vec<f32> = numbers(heads * n).iter().map(|x| x.abs()).collect();
    // A value of 0 moves nothing; a row whose values are all 0 has no weights.
    value_norms[0] = 0.0;
    value_norms[7] = 0.0;
    let plain = inputs.view(Machine::detect()).unwrap().tile(0..n, 0..n).unwrap();
    let layer = |data| Layer {
        layer: 0,
        kind: "self".into(),
        rows: "text".into(),
        cols: "text".into(),
        data,
        value_norms: value_norms.clone(),
    };
    let weights = Weights { values: plain.clone(), shape: [heads, n, n] };
    let mut layers = vec![layer(LayerData::Inputs(inputs)), layer(LayerData::Weights(weights))];
    layers[1].layer = 1;
    let axes = [("text".to_string(), Labels::counted("text", n))].into();
    let trace = Trace { title: "values".into(), axes, layers, ..Trace::default() };
    // What is recorded goes through a file, before and after.
    assert_eq!(Trace::from_bytes(&trace.to_bytes().unwrap()).unwrap(), trace);
    let moved = trace.value_weighted(Machine::detect()).unwrap();
    let read = Trace::from_bytes(&moved.to_bytes().unwrap()).unwrap();
    assert_eq!(read, moved);
    let [LayerData::Inputs(inputs), LayerData::Weights(weights)] =
        [&read.layers[0].data, &read.layers[1].data]
    else {
        panic!("as they were");
    };
    let view = inputs.view(Machine::detect()).unwrap();
    let found = Measure::new().entropy().span_mass(std::iter::once(0..5)).of(&view).unwrap();
    for head in 0..heads {
        for i in 0..n {
            let row = &plain[(head * n + i) * n..][..n];
            let norms = &value_norms[head * n..][..n];
            let product: Vec<f64> =
                row.iter().zip(norms).map(|(a, f)| f64::from(*a) * f64::from(*f)).collect();
            let sum: f64 = product.iter().sum();
            let dense = product.iter().map(|x| if sum > 0.0 { x / sum } else { 0.0 });
            let dense: Vec<f64> = dense.collect();
            let term = |a: &f64| if *a == 0.0 { 0.0 } else { -a * a.ln() };
            let entropy: f64 = dense.iter().map(term).sum();
            assert!((f64::from(found.entropy[head * n + i]) - entropy).abs() < 1e-5);
            let mass: f64 = dense[..5].iter().sum();
            assert!((f64::from(found.spans[0][head * n + i]) - mass).abs() < 1e-5);
            let kept = &weights.values[(head * n + i) * n..][..n];
            let near = kept.iter().zip(&dense).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-6);
            assert!(near, "{head} {i}");
        }
    }
    // Rollout reads the same weights.
    let from: Vec<f64> = (0..n).map(|i| f64::from(u8::from(i == n - 1))).collect();
    let rows = rollout(std::slice::from_ref(&view), &from, 0.5).unwrap();
    let tile = view.tile(n - 1..n, 0..n).unwrap();
    for (j, share) in rows[0].iter().enumerate() {
        let mean = tile.chunks(n).map(|row| f64::from(row[j])).sum::<f64>() / heads as f64;
        assert!((share - 0.5 * mean - 0.5 * from[j]).abs() < 1e-6);
    }
}

#[test]
fn norms_of_values_that_make_no_sense_are_refused() {
    let inputs = || Inputs::new((vec![0.1; 12], [1, 3, 4]), (vec![0.2; 12], [1, 3, 4]), "full");
    for (value_norms, why) in [
        (vec![1.0; 2], "2 numbers; 3 are needed, one for each head and key"),
        (vec![1.0, -0.5, 1.0], "-0.5; give numbers of at least 0"),
        (vec![1.0, f32::NAN, 1.0], "NaN; give numbers of at least 0"),
        (vec![], "no norms of values; record them together with the trace"),
    ] {
        let (rows, cols) = ("text".to_string(), "text".to_string());
        let data = LayerData::Inputs(inputs().unwrap());
        let layer = Layer { layer: 0, kind: "self".into(), rows, cols, data, value_norms };
        let axes = [("text".to_string(), Labels::counted("text", 3))].into();
        let trace = Trace { title: String::new(), axes, layers: vec![layer], ..Trace::default() };
        let error = trace.value_weighted(Machine::detect()).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}
