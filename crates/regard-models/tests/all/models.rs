//! Real models say what they are known to say.

use crate::real::{fetched, fixture, json, kept};
use regard::Machine;
use regard_models::Model;
use regard_models::generate::DecodingStrategy;
use regard_scope::Trace;
use serde_json::Value;
use std::ops::ControlFlow;

fn silent(_: usize, _: &str) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[expect(clippy::cast_possible_truncation, reason = "models compute in f32")]
fn numbers(list: &Value) -> Vec<f32> {
    list.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number") as f32).collect()
}

/// The weights of one row of one head.
fn row(trace: &Trace, kind: &str, [layer, head, row]: [usize; 3]) -> Vec<f32> {
    let site = trace
        .sites()
        .into_iter()
        .find(|s| (s.kind.as_str(), s.layer, s.head) == (kind, layer, head));
    let map = trace
        .map(Machine::detect(), &site.expect("a head"), row..row + 1, [1, usize::MAX])
        .expect("a row");
    map.values
}

fn close(found: &[f32], right: &[f32]) {
    assert_eq!(found.len(), right.len());
    for (x, y) in found.iter().zip(right) {
        assert!((x - y).abs() < 1e-4, "{x} for {y}");
    }
}

#[test]
fn a_story_is_told_as_llama2_c_tells_it() {
    let (files, golden) = (kept("stories260K"), json("stories260K/golden.json"));
    let model = Model::new(files).expect("a decoder");
    let mut heard = String::new();
    let told = &mut |_: usize, text: &str| {
        heard.push_str(text);
        ControlFlow::Continue(())
    };
    let written = model
        .causal_lm()
        .expect("it is")
        .generate(&[""], &DecodingStrategy::Greedy, 200, told)
        .expect("a story");
    assert_eq!(written[0].text, golden["greedy_text_200_steps"]);
    assert_eq!(heard, golden["greedy_text_200_steps"]);
}

#[test]
fn names_are_written_as_ctranslate2_writes_them() {
    let (files, golden) =
        (kept("aren-transliteration"), json("aren-transliteration/golden_ctranslate2.json"));
    let (model, golden) =
        (Model::new(files).expect("a translator"), golden.as_array().expect("a list").clone());
    let names: Vec<&str> = golden.iter().map(|one| one["src"].as_str().expect("a name")).collect();
    let greedy = model
        .translator()
        .expect("it is")
        .translate(&names, &DecodingStrategy::Greedy, 64)
        .expect("names");
    let beam = DecodingStrategy::Beam { width: 2, length_penalty: 1.0 };
    let beams = model.translator().expect("it is").translate(&names, &beam, 64).expect("names");
    assert_eq!(names.len(), 10);
    for ((one, greedy), beam) in golden.iter().zip(&greedy).zip(&beams) {
        assert_eq!(one["greedy"], greedy.text, "{}", one["src"]);
        assert_eq!(one["beam2"][0], beam.text, "{}", one["src"]);
        // What CTranslate2 reports of attention: the last layer's first head, for each letter that was written.
        let trace = model.look(one["src"].as_str().expect("a name")).expect("a trace");
        for (i, right) in one["greedy_attention"].as_array().expect("rows").iter().enumerate() {
            close(&row(&trace, "cross", [5, 0, i]), &numbers(right));
        }
    }
}

#[test]
fn sentences_are_as_near_as_they_are_known_to_be() {
    let path = fetched("minilm");
    let golden = json("goldens/minilm.json");
    let model = Model::open(&path).expect("an encoder");
    let texts: Vec<&str> =
        golden["sentences"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    let vectors = model.encoder().expect("it is").embed(&texts).expect("sentences");
    close(&vectors[0][..8], &numbers(&golden["embedding0_first8"]));
    let cosines: Vec<f32> =
        vectors[1..].iter().map(|v| v.iter().zip(&vectors[0]).map(|(a, b)| a * b).sum()).collect();
    close(&cosines, &numbers(&golden["cosine_vs_first"]));
    let trace = model.look(texts[0]).expect("a trace");
    close(
        &row(&trace, "encoder", [0, 0, 0]),
        &numbers(&golden["attention_layer0_head0_row0_sentence0"]),
    );
    close(
        &row(&trace, "encoder", [5, 11, 1]),
        &numbers(&golden["attention_layer5_head11_row1_sentence0"]),
    );
}

#[test]
fn a_language_model_goes_on_as_it_is_known_to() {
    let path = fetched("smollm2");
    let golden = json("goldens/smollm2.json");
    let model = Model::open(&path).expect("a decoder");
    let cases = golden["cases"].as_array().expect("a list");
    let prompts: Vec<&str> =
        cases.iter().map(|one| one["prompt"].as_str().expect("a text")).collect();
    // Two prompts of other lengths, together.
    let written = model
        .causal_lm()
        .expect("it is")
        .generate(&prompts, &DecodingStrategy::Greedy, 16, &mut silent)
        .expect("texts");
    for (one, written) in cases.iter().zip(&written) {
        let ids: Vec<u64> = written.tokens.iter().map(|id| u64::from(*id)).collect();
        assert_eq!(one["next_ids"], Value::from(ids));
        assert_eq!(one["text"], written.text);
    }
}

#[test]
fn a_model_is_asked_for_what_it_can_do() {
    let path = fixture("stories260K");
    let model = Model::open(&path).expect("a decoder");
    let error = model.encoder().map(drop).expect_err("a decoder has no vectors of sentences");
    assert!(error.to_string().contains("embed = a causal language model"), "{error}");
    let error = model.translator().map(drop).expect_err("a decoder does not translate");
    assert!(error.to_string().contains("template"), "{error}");
}
