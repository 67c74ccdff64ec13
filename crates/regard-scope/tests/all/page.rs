//! Pages of traces: spans, labels and differences in their data are those that the crate computes.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use regard::Machine;
use regard_scope::{
    Inputs, Labels, Layer, LayerData, Trace, Weights, difference_page, head_diffs, span_mass,
    trace_page,
};
use regard_testkit::Noise;
use serde_json::Value;
use std::collections::BTreeMap;

const TEXT: &str = "a b c d a b c d e f g a b c";
const HEADS: usize = 2;

/// Two layers of random heads over a text with spans, one of which overlaps another, and one reaches beyond the text.
fn trace(seed: u64, scale: f64) -> Trace {
    let n = words().len();
    let mut noise = Noise::new(seed);
    let mut layer = |layer| {
        let [q, k] = [0; 2].map(|_| noise.normals(HEADS * n * 4));
        let shape = [HEADS, n, 4];
        let inputs = Inputs { q, k, q_shape: shape, k_shape: shape, ..Inputs::default() };
        let inputs = Inputs { mask: "causal".into(), scale: Some(scale), ..inputs };
        let data = LayerData::Inputs(inputs.with_lse(Machine::detect()).expect("it fits"));
        of_layer(layer, data)
    };
    let layers = (0..2).map(&mut layer).collect();
    of_layers(layers)
}

fn words() -> Vec<String> {
    TEXT.split(' ').map(Into::into).collect()
}

fn of_layer(layer: usize, data: LayerData) -> Layer {
    let (kind, rows, cols) = ("self".into(), "text".into(), "text".into());
    Layer { layer, kind, rows, cols, data, value_norms: Vec::new() }
}

fn of_layers(layers: Vec<Layer>) -> Trace {
    let mut labels = Labels::new("text", words());
    let name = "</script><img src=x onerror=alert(1)>";
    labels.spans = vec![("a".into(), 0..5), (name.into(), 3..9), ("rest".into(), 8..usize::MAX)];
    Trace { axes: BTreeMap::from([("text".into(), labels)]), layers, ..Trace::default() }
}

/// The same heads as weights.
fn dense(trace: &Trace) -> Trace {
    let mut dense = trace.clone();
    for layer in &mut dense.layers {
        let LayerData::Inputs(inputs) = &layer.data else { unreachable!("made so") };
        let [heads, n, _] = inputs.q_shape;
        let values = inputs.view(Machine::detect()).expect("it fits").tile(0..n, 0..n);
        let shape = [heads, n, n];
        layer.data = LayerData::Weights(Weights { values: values.expect("memory"), shape });
    }
    dense
}

/// What a page holds.
fn data(page: &str) -> Value {
    let (_, rest) = page.split_once("id=\"data\">").expect("data");
    let (json, _) = rest.split_once("</script>").expect("its end");
    serde_json::from_str(json).expect("JSON")
}

/// Numbers from 0 to 1 as a page stores them.
fn decoded(text: &Value) -> Vec<f64> {
    let bytes = STANDARD.decode(text.as_str().expect("text")).expect("base64");
    let codes = bytes.as_chunks().0.iter().map(|x| u16::from_le_bytes(*x));
    codes.map(|code| (f64::from(code) / 65534.0).powi(2)).collect()
}

fn near(a: &Value, b: f64) -> bool {
    a.as_f64().is_some_and(|a| (a - b).abs() < 1e-6)
}

#[test]
fn masses_on_a_page_are_those_of_span_mass() {
    let (machine, n) = (Machine::detect(), words().len());
    for trace in [trace(1, 0.5), dense(&trace(1, 0.5))] {
        let page = trace_page(&trace, machine, 128, &mut |_, _| {}).expect("a page");
        assert!(!page.contains("<img src=x"), "a name of a span is markup");
        let data = data(&page);
        let spans = &trace.axes["text"].spans;
        let places = data["axes"]["text"]["spans"].as_array().expect("spans");
        let wanted = [[0, 5], [3, 9], [8, n]];
        for ((place, positions), (name, _)) in places.iter().zip(wanted).zip(spans) {
            assert_eq!(place["positions"], serde_json::json!(positions));
            assert_eq!(place["name"], name.as_str());
        }
        let all = span_mass(&trace, machine, spans, &mut |_, _| {}).expect("masses");
        let sites = data["sites"].as_array().expect("sites");
        assert_eq!(sites.len(), 2 * HEADS);
        for (site, masses) in sites.iter().zip(all.chunks(spans.len())) {
            for (i, mass) in masses.iter().enumerate() {
                assert!(near(&site["spans"][i][0], mass.mean), "{site} {mass:?}");
                assert!(near(&site["spans"][i][1], mass.last), "{site} {mass:?}");
            }
            let (rows, weights) = (decoded(&site["masses"]), decoded(&site["weights"]));
            for (i, mass) in rows.iter().enumerate() {
                let (row, [start, end]) = (i / spans.len(), wanted[i % spans.len()]);
                let own = &weights[row * n..][start..end.min(row + 1).max(start)];
                assert!((mass - own.iter().sum::<f64>()).abs() < 1e-3, "row {row}: {mass} {own:?}");
            }
        }
        // In a map of fewer cells a row has the mean of its queries, and a band ends within a cell.
        let page = trace_page(&trace, machine, 7, &mut |_, _| {}).expect("a page");
        let pooled = self::data(&page);
        assert_eq!(pooled["axes"]["text"]["spans"][0]["cells"], serde_json::json!([0.0, 2.5]));
        let (cells, rows) = (decoded(&pooled["sites"][0]["masses"]), decoded(&sites[0]["masses"]));
        let mean = (rows[0] + rows[spans.len()]) / 2.0;
        assert!((cells[0] - mean).abs() < 1e-3, "{} {mean}", cells[0]);
    }
}

/// Weights of a head whose row `i` attends to the keys that are wanted alike, or else to the first.
fn planted(is_wanted: impl Fn(usize, usize) -> bool) -> LayerData {
    let n = words().len();
    let mut values = vec![0.0; n * n];
    for i in 0..n {
        let keys: Vec<usize> = (0..=i).filter(|key| is_wanted(i, *key)).collect();
        let keys = if keys.is_empty() { vec![0] } else { keys };
        keys.iter().for_each(|key| values[i * n + key] = 1.0 / keys.len() as f32);
    }
    LayerData::Weights(Weights { values, shape: [1, n, n] })
}

#[test]
fn heads_are_labeled_where_a_score_is_clear() {
    let words = words();
    let heads = [
        planted(|i, j| j + 1 == i),
        planted(|i, j| j > 0 && words[j - 1] == words[i]),
        planted(|_, _| true),
    ];
    let layers = heads.into_iter().enumerate().map(|(i, data)| of_layer(i, data)).collect();
    let labels = |trace: &Trace| -> Vec<Vec<String>> {
        let page = trace_page(trace, Machine::detect(), 128, &mut |_, _| {}).expect("a page");
        let data = data(&page);
        let names = |site: &Value| {
            let all = site["labels"].as_array().expect("labels").iter();
            all.map(|label| {
                assert!(label["score"].as_f64().is_some_and(|score| score >= 0.5), "{label}");
                assert!(label["definition"].as_str().is_some_and(|text| text.len() > 20));
                label["name"].as_str().expect("a name").to_string()
            })
            .collect()
        };
        data["sites"].as_array().expect("sites").iter().map(names).collect()
    };
    let mut trace = of_layers(layers);
    let all = labels(&trace);
    assert_eq!(all[0], ["previous token"]);
    assert_eq!(all[1][0], "induction");
    assert_eq!(all[2], [""; 0]);
    // Without tokens there is nothing to be named by, and of few rows nothing is clear.
    trace.axes.insert("text".into(), Labels::counted("text", words.len()));
    assert!(labels(&trace).iter().all(Vec::is_empty));
    let short =
        Weights { values: vec![1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0], shape: [1, 3, 3] };
    let mut trace = of_layers(vec![of_layer(0, LayerData::Weights(short))]);
    trace.axes.insert("text".into(), Labels::new("text", words[..3].to_vec()));
    assert!(labels(&trace)[0].is_empty());
}

#[test]
fn a_page_of_two_traces_has_both_and_how_far_they_are_apart() {
    let machine = Machine::detect();
    let (before, mut after) = (trace(1, 0.5), trace(1, 0.1));
    after.layers[0] = before.layers[0].clone();
    after.title = "after".into();
    after.interventions = vec!["layers 1: <b>".into()];
    let diffs = head_diffs(&before, &after, machine, &mut |_, _| {}).expect("comparable");
    assert!(diffs[..HEADS].iter().all(|diff| diff.mean.js < 1e-12));
    assert!(diffs[HEADS..].iter().all(|diff| diff.mean.js > 1e-3));
    let page = difference_page(&before, &after, machine, 128, &mut |_, _| {}).expect("a page");
    let data = data(&page);
    assert_eq!(data["against"]["interventions"][0], "layers 1: <b>");
    let after_page = trace_page(&after, machine, 128, &mut |_, _| {}).expect("a page");
    let alone = self::data(&after_page);
    assert_eq!(data["sites"][0]["change"], 0.0);
    for (i, diff) in diffs.iter().enumerate() {
        let site = &data["sites"][i];
        assert!(near(&site["change"], diff.mean.js), "{site}");
        for part in ["weights", "masses", "spans", "stats", "labels"] {
            assert_eq!(site["after"][part], alone["sites"][i][part], "{part}");
        }
    }
    assert!(alone["sites"][0]["change"].is_null() && alone["against"].is_null());
}

#[test]
fn divergences_of_weights_are_those_of_queries_and_keys() {
    let machine = Machine::detect();
    let (a, b) = (trace(1, 0.5), trace(2, 0.5));
    let diffs = |a: &Trace, b: &Trace| head_diffs(a, b, machine, &mut |_, _| {}).expect("alike");
    let streamed = diffs(&a, &b);
    for other in [diffs(&dense(&a), &dense(&b)), diffs(&a, &dense(&b))] {
        for (x, y) in streamed.iter().zip(&other) {
            assert_eq!((&x.site, x.worst), (&y.site, y.worst));
            for (x, y) in [(x.mean, y.mean), (x.most, y.most)] {
                assert!((x.js - y.js).abs() < 1e-5 && (x.kl - y.kl).abs() < 1e-4, "{x:?} {y:?}");
            }
        }
    }
}

#[test]
fn layers_without_queries_have_pages() {
    let machine = Machine::detect();
    let mut trace = trace(1, 0.5);
    let none = Weights { values: Vec::new(), shape: [HEADS, 0, 0] };
    trace.layers[0] = of_layer(0, LayerData::Weights(none));
    (trace.layers[0].rows, trace.layers[0].cols) = ("none".into(), "none".into());
    trace.axes.insert("none".into(), Labels::counted("none", 0));
    let diffs = head_diffs(&trace, &trace, machine, &mut |_, _| {}).expect("comparable");
    assert_eq!(diffs.len(), HEADS * trace.layers.len());
    difference_page(&trace, &trace, machine, 128, &mut |_, _| {}).expect("a page");
}

#[test]
fn traces_of_other_texts_are_refused() {
    let machine = Machine::detect();
    let a = trace(1, 0.5);
    let why =
        |b: &Trace| head_diffs(&a, b, machine, &mut |_, _| {}).expect_err("refused").to_string();
    let mut other = a.clone();
    other.axes.get_mut("text").expect("an axis").labels[3] = "x".into();
    assert!(why(&other).contains("self layer 0: the words are not the same"), "{}", why(&other));
    let mut more = a.clone();
    more.layers.push(of_layer(2, a.layers[0].data.clone()));
    assert!(why(&more).contains("only the second trace has it"), "{}", why(&more));
    let mut fewer = a.clone();
    fewer.layers.pop();
    assert!(why(&fewer).contains("self layer 1 head 1: not found"), "{}", why(&fewer));
    let mut short = a.clone();
    let weights = Weights { values: vec![0.5; 18], shape: [2, 3, 3] };
    short.layers[0].data = LayerData::Weights(weights);
    assert!(why(&short).contains("14 queries and 14 keys in the first trace, 3 and 3"));
}
