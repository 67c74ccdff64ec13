//! Head detectors: planted heads have the scores that they must have, and scores from q and k are those of the weights.

use regard::Machine;
use regard_scope::{
    HeadScores, Inputs, Labels, Layer, LayerData, Needle, Trace, Weights, heads_page, span_mass,
};
use regard_testkit::Noise;
use std::collections::BTreeMap;

/// A haystack with a needle, a question, and the needle once more; `.` is a delimiter, and words repeat.
const TEXT: &str = "<s> a b c . a b d . x1 x2 x3 x4 . c a e f . a b c g h . b ? x1 x2 x3 x4";

fn words() -> Vec<&'static str> {
    TEXT.split_whitespace().collect()
}

fn trace(data: Vec<LayerData>) -> Trace {
    let labels = Labels::new("text", words().iter().map(ToString::to_string).collect());
    let (rows, cols) = ("text".to_string(), "text".to_string());
    let layer = |(layer, data)| Layer {
        layer,
        kind: "self".into(),
        rows: rows.clone(),
        cols: cols.clone(),
        data,
        value_norms: Vec::new(),
    };
    let layers = data.into_iter().enumerate().map(layer).collect();
    Trace {
        title: "planted".into(),
        axes: BTreeMap::from([("text".to_string(), labels)]),
        layers,
        ..Trace::default()
    }
}

fn scores(data: Vec<LayerData>) -> Vec<HeadScores> {
    let trace = trace(data);
    let needle = Needle::find(&trace.axes["text"], "x1 x2x3  x4").expect("twice");
    assert_eq!((&needle.hidden, &needle.answer), (&(9..13), &(27..31)));
    let all = HeadScores::of(&trace, Machine::detect(), Some(&needle), &mut |_, _| {});
    all.expect("a trace that fits")
}

/// One head whose row `i` attends to all keys `j` with `is_wanted(i, j)` alike, and to others next to nothing.
fn planted(is_wanted: impl Fn(usize, usize) -> bool) -> LayerData {
    let n = words().len();
    let mut q = vec![0.0; n * n];
    let mut k = vec![0.0; n * n];
    for i in 0..n {
        k[i * n + i] = 1.0;
        for j in 0..n {
            q[i * n + j] = if is_wanted(i, j) { 200.0 } else { 0.0 };
        }
    }
    LayerData::Inputs(Inputs::new((q, [1, n, n]), (k, [1, n, n]), "causal").expect("it fits"))
}

#[test]
fn planted_heads_have_the_scores_of_their_kind() {
    let words = words();
    let is = |i: usize, j: usize| words[i] == words[j];
    let all = scores(vec![
        planted(|i, j| j + 1 == i),
        planted(|i, j| j < i && is(i, j)),
        planted(|i, j| j > 0 && j <= i && is(i, j - 1)),
        planted(|i, j| j + 3 == i),
        planted(|_, j| words[j] == "."),
        planted(|_, j| j == 0),
        planted(|i, j| i + 1 < words.len() && j <= i && is(i + 1, j)),
    ]);
    let near = |x: f64, wanted: f64| (x - wanted).abs() < 1e-5;
    for (i, name) in ["previous", "duplicate", "induction"].into_iter().enumerate() {
        assert!(near(all[i].get(name).expect("a score"), 1.0), "{name}: {:?}", all[i]);
    }
    assert!(near(all[0].positional, 1.0) && all[0].distance == -1, "{:?}", all[0]);
    // The first rows have no key so far back: they attend to what they see.
    assert!(all[3].positional > 0.9 && all[3].distance == -3, "{:?}", all[3]);
    // Rows before the first delimiter attend to all they see alike.
    assert!(all[4].delimiter > 0.85, "{:?}", all[4]);
    assert!(near(all[5].sink, 1.0) && near(all[5].delimiter, 0.0), "{:?}", all[5]);
    assert!(near(all[6].copy, 1.0) && near(all[6].retrieval, 1.0), "{:?}", all[6]);
    for (i, name) in [(0, "induction"), (1, "sink"), (2, "previous"), (5, "copy"), (3, "retrieval")]
    {
        assert!(all[i].get(name).expect("a score") < 0.35, "{name}: {:?}", all[i]);
    }
    let page = heads_page("planted <s>", &all);
    for text in ["induction", "arxiv.org/abs/2209.11895", "planted &lt;s&gt;", "data:image/svg+xml"]
    {
        assert!(page.contains(text), "{text}");
    }
}

/// Random inputs, and their weights.
fn random(mask: &str, heads: usize) -> [LayerData; 2] {
    let (n, dim) = (words().len(), 4);
    let mut noise = Noise::new(5);
    let [q, k] = [0; 2].map(|_| noise.normals(heads * n * dim));
    let inputs = Inputs::new((q, [heads, n, dim]), (k, [heads, n, dim]), mask).expect("it fits");
    let view = inputs.view(Machine::detect()).expect("it fits");
    let values = view.tile(0..n, 0..n).expect("memory");
    let weights = Weights { values, shape: [heads, n, n] };
    [LayerData::Inputs(inputs), LayerData::Weights(weights)]
}

#[test]
fn scores_from_queries_and_keys_are_those_of_the_weights() {
    for mask in ["causal", "full", "causal & window 9"] {
        let all = scores(random(mask, 3).into());
        let (streamed, dense) = all.split_at(3);
        for (a, b) in streamed.iter().zip(dense) {
            assert_eq!(a.distance, b.distance);
            for name in HeadScores::NAMES {
                let [a, b] = [a, b].map(|one| one.get(name).expect("a score"));
                assert!((a - b).abs() < 1e-5, "{mask} {name}: {a} {b}");
            }
        }
    }
}

#[test]
fn mass_on_spans_is_the_sum_of_the_weights() {
    let spans =
        [("a".to_string(), 0..5), ("b".to_string(), 3..usize::MAX), ("c".to_string(), 40..50)];
    for mask in ["causal", "full"] {
        let [inputs, weights] = random(mask, 2);
        let LayerData::Weights(dense) = &weights else { unreachable!("two kinds of data") };
        let n = words().len();
        let trace = trace(vec![inputs, weights.clone()]);
        let all = span_mass(&trace, Machine::detect(), &spans, &mut |_, _| {}).expect("it fits");
        assert_eq!(all.len(), 2 * 2 * 3);
        for (i, one) in all.iter().enumerate() {
            let (head, (name, keys)) = (i / 3 % 2, &spans[i % 3]);
            let row = |row: usize| -> f64 {
                let row = &dense.values[(head * n + row) * n..][..n];
                row.iter().take(keys.end).skip(keys.start).map(|a| f64::from(*a)).sum()
            };
            let mean = (0..n).map(row).sum::<f64>() / n as f64;
            assert_eq!((&one.span, one.site.head), (name, head));
            assert!((one.mean - mean).abs() < 1e-5 && (one.last - row(n - 1)).abs() < 1e-5);
        }
    }
}

#[test]
fn what_has_no_scores_is_refused() {
    let mut cross = trace(random("full", 1).into());
    cross.layers.iter_mut().for_each(|layer| layer.cols = "other".into());
    let error = HeadScores::of(&cross, Machine::detect(), None, &mut |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("self-attention with tokens as labels"), "{error}");
    let labels = &trace(Vec::new()).axes["text"];
    for sentence in ["x1 x2 x5", "e f", ""] {
        let error = Needle::find(labels, sentence).unwrap_err().to_string();
        assert!(error.contains("needle, twice in the text: not found"), "{error}");
    }
    let own = trace(random("full", 1).into());
    let needle = Needle { hidden: 3..5, answer: 30..40 };
    let error = HeadScores::of(&own, Machine::detect(), Some(&needle), &mut |_, _| {}).unwrap_err();
    assert!(
        error.to_string().starts_with("answer: positions 30..40 of a text of 31 tokens"),
        "{error}"
    );
}
