//! Recurrent nets and their attention: layers and models against PyTorch, and e2k against itself.

use crate::golden::{Golden, device};
use crate::real::{fetched, json};
use crate::stacks::loss;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};
use regard::Mask;
use regard_burn::{CrossEntropy, cross_entropy};
use regard_models::files::ModelFiles;
use regard_models::generate::{DecodingStrategy, FinishReason, StoppingCriteria, generate};
use regard_models::nn::{Bahdanau, Gru, Linear, Luong};
use regard_models::{DropoutRates, E2k, Han, Pass, Recorder, Seq2Seq, ids, load};
use std::ops::ControlFlow;

#[test]
fn a_gru_is_that_of_pytorch() {
    let mut golden = Golden::open("gru");
    let sizes = [golden.size("in"), golden.size("hidden")];
    let gru = golden.load(Gru::new(sizes, true, &device()));
    let x = golden.input::<3>("x");
    let found = gru.forward(x.clone(), Some(&golden.list("lengths"))).expect("lengths fit");
    golden.output("states", &found.states);
    golden.output("last", &found.last);
    let grads = golden.gradients(&gru);
    golden.gradient("x", &x, &grads);
}

#[test]
fn additive_attention_is_that_of_pytorch() {
    let mut golden = Golden::open("bahdanau");
    let sizes = [golden.size("query_dim"), golden.size("key_dim"), golden.size("hidden")];
    let layer = golden.load(Bahdanau::new(sizes, &device()));
    let (queries, keys) = (golden.input::<3>("queries"), golden.input::<3>("keys"));
    let mask = Mask::lengths(&golden.list("lengths"));
    let context =
        layer.forward(queries.clone(), keys.clone(), keys.clone(), &mask, &mut Recorder::off());
    golden.output("context", &context.expect("sizes fit"));
    golden.output(
        "weights",
        &layer.weights(queries.clone(), keys.clone(), &mask).expect("sizes fit"),
    );
    let grads = golden.gradients(&layer);
    golden.gradient("queries", &queries, &grads);
    golden.gradient("keys", &keys, &grads);
}

/// The parameters of all variants, as the golden has them.
#[derive(Module, Debug)]
struct AllOfLuong {
    general: Linear,
    concat: Linear,
    score: Param<Tensor<1>>,
}

#[test]
fn the_three_scores_of_luong_are_those_of_pytorch() {
    for name in ["dot", "general", "concat"] {
        let mut golden = Golden::variant("luong", name);
        let (dim, hidden) = (golden.size("dim"), golden.size("hidden"));
        let all = golden.load(AllOfLuong {
            general: Linear::new([dim, dim], false, &device()),
            concat: Linear::new([2 * dim, hidden], false, &device()),
            score: Param::from_tensor(Tensor::zeros([hidden], &device())),
        });
        let layer = Luong {
            general: (name == "general").then(|| all.general.clone()),
            concat: (name == "concat").then(|| all.concat.clone()),
            score: (name == "concat").then(|| all.score.clone()),
        };
        let (queries, keys) = (golden.input::<3>("queries"), golden.input::<3>("keys"));
        let mask = Mask::lengths(&golden.list("lengths"));
        let context =
            layer.forward(queries.clone(), keys.clone(), keys.clone(), &mask, &mut Recorder::off());
        golden.output("context", &context.expect("sizes fit"));
        golden.output(
            "weights",
            &layer.weights(queries.clone(), keys.clone(), &mask).expect("sizes fit"),
        );
        let grads = golden.gradients(&all);
        golden.gradient("queries", &queries, &grads);
        golden.gradient("keys", &keys, &grads);
    }
}

#[test]
fn a_recurrent_translator_is_that_of_pytorch() {
    let mut golden = Golden::open("seq2seq");
    let config = serde_json::from_value(golden.config.clone()).expect("a config");
    let model = golden
        .load(Seq2Seq::new(&config, DropoutRates::default(), &device()).expect("sizes are sizes"));
    let mut pass = Pass::default();
    let memory = model
        .encode(golden.ids("source"), Some(&golden.list("source_lengths")), &mut pass)
        .expect("ids are tokens");
    let scores = model.decode(&memory, golden.ids("target"), &mut pass).expect("ids are tokens");
    golden.output("logits", &scores);
    golden.output("loss", &loss(scores, golden.ids("labels"), 0.0));
    golden
        .output("weights", &model.weights(&memory, golden.ids("target")).expect("ids are tokens"));
    golden.gradients(&model);
}

#[test]
fn hierarchical_attention_is_that_of_pytorch() {
    let mut golden = Golden::open("han");
    let config = serde_json::from_value(golden.config.clone()).expect("a config");
    let model = golden
        .load(Han::new(&config, DropoutRates::default(), &device()).expect("sizes are sizes"));
    // Documents have 3 sentences of up to 6 words; those beyond a document have none.
    let rows = golden.rows("ids", Some(&golden.list("word_lengths")));
    let counts = golden.list("sentence_lengths");
    let documents: Vec<Vec<Vec<u32>>> =
        rows.chunks(3).zip(counts).map(|(rows, n)| rows[..n].to_vec()).collect();
    let scores = model.forward(&documents, &mut Pass::default()).expect("ids are words");
    golden.output("logits", &scores);
    let found = cross_entropy(scores, golden.ids("labels"), CrossEntropy::default());
    golden.output("loss", &found.expect("labels are classes"));
    let weights = model.weights(&documents).expect("ids are words");
    let (mut of_words, mut of_sentences) = (Vec::new(), Vec::new());
    for mut document in weights {
        document.sentences.resize(3, 0.0);
        document.words.resize(3, Vec::new());
        of_sentences.extend(document.sentences);
        for mut words in document.words {
            words.resize(6, 0.0);
            of_words.extend(words);
        }
    }
    let tensor = |numbers: Vec<f32>, shape: &[usize]| TensorData::new(numbers, shape.to_vec());
    golden.output("word_weights", &Tensor::<3>::from_data(tensor(of_words, &[3, 3, 6]), &device()));
    golden.output(
        "sentence_weights",
        &Tensor::<2>::from_data(tensor(of_sentences, &[3, 3]), &device()),
    );
    golden.gradients(&model);
}

#[test]
fn e2k_writes_katakana_as_its_own_program_does() {
    let path = fetched("e2k");
    let golden = json("goldens/e2k_c2k.json");
    let mut files = ModelFiles::open(&path).expect("a model of e2k");
    let model = E2k::new(&files.config, &Device::flex()).expect("recurrent nets");
    let model = load(model, &mut files.weights).expect("all parameters");
    let (source, target) = (files.tokens.expect("tokens"), files.target_tokens.expect("tokens"));
    let cases = golden["cases"].as_object().expect("words");
    let sources: Vec<Vec<u32>> =
        cases.keys().map(|word| source.encode(word).expect("letters")).collect();
    let begins = vec![vec![files.config.bos.expect("a beginning")]; sources.len()];
    let stop = StoppingCriteria { max_tokens: 16, end: files.config.eos.clone() };
    let mut session = model.session(&sources).expect("ids are tokens");
    let mut hear = |_, _| ControlFlow::Continue(());
    let all = generate(&mut session, &begins, &DecodingStrategy::Greedy, &stop, &mut hear)
        .expect("scores are finite");
    for ((word, katakana), one) in cases.iter().zip(&all) {
        assert_eq!(
            (target.decode(&one.tokens).as_str(), one.finish_reason),
            (katakana.as_str().expect("text"), FinishReason::EndToken),
            "{word}"
        );
    }

    // The whole at once says the same as step by step, and a trace of it can be looked at.
    let written: Vec<u32> = begins[0].iter().chain(&all[0].tokens).copied().collect();
    let mut pass = Pass { recorder: Recorder::on(), ..Pass::default() };
    let memory = model.encode(ids(&sources[..1], &Device::flex()), None).expect("ids are tokens");
    let scores =
        model.decode(&memory, ids(&[written], &Device::flex()), &mut pass).expect("ids are tokens");
    let best: Vec<i64> = scores.argmax(2).into_data().iter::<i64>().collect();
    let tokens: Vec<i64> = all[0].tokens.iter().map(|id| i64::from(*id)).collect();
    assert_eq!(best[..tokens.len()], tokens);
    assert_eq!(pass.recorder.trace("e2k", &[]).layers.len(), 1);

    let search = DecodingStrategy::Beam { width: 4, length_penalty: 1.0 };
    let beams =
        generate(&mut session, &begins, &search, &stop, &mut hear).expect("scores are finite");
    for (beam, greedy) in beams.iter().zip(&all) {
        let mean = |score: f64, n: usize| score / n as f64;
        assert!(
            mean(beam.score, beam.tokens.len()) >= mean(greedy.score, greedy.tokens.len()) - 1e-4
        );
    }
}
