//! Folders and texts that nobody means well with: refused with a message, at once, before memory is taken for them.

use crate::own::{NONE, folder, llama, marked};
use burn::tensor::Device;
use regard_models::files::Architecture::{
    self, Bert as Encoder, Han as Hierarchy, Llama, Seq2Seq as Gru, Transformer as Translator,
};
use regard_models::files::{
    Activation, Config, Heads, ModelFiles, PairLayout, Positions, Tokens, WeightFormat, Weights,
    save as save_tensors,
};
use regard_models::generate::DecodingStrategy;
use regard_models::{
    AttentionScore, Bert, Gpt, Han, HanConfig, Model, Seq2Seq, Seq2SeqConfig, Transformer,
};
use std::collections::BTreeMap;
use std::path::PathBuf;

const GRU: Seq2SeqConfig = Seq2SeqConfig {
    embedding: 5,
    encoder_hidden: 4,
    decoder_hidden: 6,
    attention_hidden: Some(3),
    attention_score: AttentionScore::Additive,
    source_vocab: 6,
    target_vocab: 6,
};
const HAN: HanConfig = HanConfig {
    embedding: 5,
    word_hidden: 4,
    word_attention: 3,
    sentence_hidden: 4,
    sentence_attention: 3,
    vocab: 6,
    classes: 2,
};

fn bert() -> Config {
    Config {
        d_model: 8,
        heads: Heads { q: 2, kv: 2 },
        head_dim: 4,
        d_ff: Some(12),
        vocab: 6,
        token_types: Some(2),
        context: Some(10),
        positions: Positions::Learned,
        activation: Some(Activation::Gelu),
        attention_bias: true,
        feed_forward_bias: true,
        ..Config::of(Architecture::Bert)
    }
}

fn transformer() -> Config {
    marked(Config {
        d_model: 8,
        heads: Heads { q: 2, kv: 2 },
        head_dim: 4,
        vocab: 6,
        target_vocab: Some(6),
        positions: Positions::Sinusoidal {
            pairs: PairLayout::HalfSplit,
            first: 0,
            inclusive: false,
        },
        activation: Some(Activation::Gelu),
        ..Config::of(Architecture::Transformer)
    })
}

/// The same with one of Luong's scores; the decoder is as wide as the states of the encoder, as `dot` needs it.
fn luong(score: AttentionScore) -> Seq2SeqConfig {
    let attention_hidden = (score == AttentionScore::Concat).then_some(3);
    Seq2SeqConfig { attention_score: score, attention_hidden, decoder_hidden: 8, ..GRU }
}

fn made_luong(test: &str, score: AttentionScore) -> (PathBuf, Config) {
    let (sizes, name) = (luong(score), format!("{test}-{score:?}"));
    let config = marked(Config::seq2seq(sizes));
    let model = Seq2Seq::new(&sizes, NONE, &Device::flex()).expect("fits");
    (folder(&name, &config, &model, WeightFormat::F32), config)
}

const LUONG: [AttentionScore; 3] =
    [AttentionScore::Dot, AttentionScore::General, AttentionScore::Concat];

/// A folder of a kind with random weights.
fn made(test: &str, kind: Architecture) -> (PathBuf, Config) {
    let (device, name) = (Device::flex(), format!("{test}-{kind:?}"));
    let config = match kind {
        Llama => llama(),
        Encoder => bert(),
        Translator => transformer(),
        Gru => marked(Config::seq2seq(GRU)),
        _ => Config::han(HAN, Vec::new()),
    };
    let stored = WeightFormat::F32;
    let path = match kind {
        Llama => folder(&name, &config, &Gpt::new(&config, NONE, &device).expect("fits"), stored),
        Encoder => folder(&name, &config, &Bert::new(&config, &device).expect("fits"), stored),
        Translator => {
            let model = Transformer::new(&config, NONE, &device).expect("fits");
            folder(&name, &config, &model, stored)
        }
        Gru => folder(&name, &config, &Seq2Seq::new(&GRU, NONE, &device).expect("fits"), stored),
        _ => folder(&name, &config, &Han::new(&HAN, NONE, &device).expect("fits"), stored),
    };
    (path, config)
}

/// Such a model; its folder is gone.
fn opened(test: &str, kind: Architecture) -> Model {
    let (path, _) = made(test, kind);
    let model = Model::open(&path).expect("a model");
    std::fs::remove_dir_all(path).expect("it was there");
    model
}

/// The part of a configuration that has its sizes: a recurrent model has its own.
fn part(value: &mut serde_json::Value) -> &mut serde_json::Value {
    let own = ["seq2seq", "han"].into_iter().find(|name| value.get(name).is_some());
    match own {
        Some(name) => &mut value[name],
        None => value,
    }
}

/// All numbers of it that are sizes: where they are, by their names.
fn sizes(value: &mut serde_json::Value) -> Vec<(String, &mut serde_json::Value)> {
    let free = ["version", "bos", "eos", "pad", "norm_eps", "first", "theta"];
    let Some(map) = value.as_object_mut() else { return Vec::new() };
    let mut found = Vec::new();
    for (name, value) in map.iter_mut().filter(|(name, _)| !free.contains(&name.as_str())) {
        if value.is_u64() {
            found.push((name.clone(), value));
        } else {
            found.extend(sizes(value));
        }
    }
    found
}

#[test]
fn sizes_are_believed_only_as_far_as_there_are_tensors() {
    let all = [Llama, Encoder, Translator, Gru, Hierarchy].map(|kind| made("sizes", kind));
    let luong = LUONG.map(|score| made_luong("sizes", score));
    for (path, config) in all.into_iter().chain(luong) {
        Model::open(&path).expect("sizes that are those of the tensors");
        let whole: serde_json::Value =
            serde_json::from_str(&config.to_json().expect("json")).expect("json");
        let count = sizes(part(&mut whole.clone())).len();
        assert!(count >= 5, "{count}");
        for at in 0..count {
            // Large enough that a list of so many layers is beyond any memory, and a size that is merely wrong.
            for size in [1u64 << 28, 64] {
                let mut changed = whole.clone();
                let (name, value) = sizes(part(&mut changed)).swap_remove(at);
                *value = size.into();
                std::fs::write(path.join("config.json"), changed.to_string()).expect("a file");
                let Err(error) = Model::open(&path).map(drop) else {
                    panic!("{:?}: {name} = {size} was believed", config.architecture)
                };
                let error = error.to_string();
                let place = path.display().to_string();
                assert!(error.starts_with(&place) && error.contains(';'), "{name}: {error}");
            }
        }
        std::fs::remove_dir_all(path).expect("it was there");
    }
}

#[test]
fn the_score_of_one_translator_does_not_fit_the_weights_of_another() {
    for score in LUONG {
        let (path, _) = made_luong("score", score);
        Model::open(&path).expect("its own");
        for other in LUONG.into_iter().chain([AttentionScore::Additive]) {
            let config = marked(Config::seq2seq(luong(other)));
            std::fs::write(path.join("config.json"), config.to_json().expect("json"))
                .expect("a file");
            let opened = Model::open(&path).map(drop);
            assert_eq!(opened.is_ok(), score == other, "{score:?} {other:?} {opened:?}");
        }
        std::fs::remove_dir_all(path).expect("it was there");
    }
    // The features of queries are only those of this tensor.
    let (path, config) = made_luong("features", AttentionScore::General);
    let sizes = Seq2SeqConfig { decoder_hidden: 7, ..config.seq2seq.expect("its sizes") };
    let other = marked(Config::seq2seq(sizes));
    std::fs::write(path.join("config.json"), other.to_json().expect("json")).expect("a file");
    let error = Model::open(&path).map(drop).unwrap_err().to_string();
    std::fs::remove_dir_all(path).expect("it was there");
    assert!(error.contains("decoder_hidden: 7 in the configuration, 8 in the weights"), "{error}");
}

#[test]
fn a_wrong_number_of_layers_is_named_with_both_numbers() {
    let (path, config) = made("layers", Llama);
    let mut files = ModelFiles::open(&path).expect("a decoder");
    std::fs::remove_dir_all(path).expect("it was there");
    files.config = Config { n_layers: 1 << 28, ..config };
    let error = Model::new(files).map(drop).unwrap_err().to_string();
    assert!(
        error.contains("n_layers: 268435456 in the configuration, 1 in the weights"),
        "{error}"
    );
}

#[test]
fn a_text_is_classified_in_memory_that_grows_with_its_length() {
    // Sentences of 1 to 16,000 words: with numbers for each sentence times the square of the longest this would take 40 GB.
    let model = opened("classify", Hierarchy);
    let text = format!("{}\n{}", "abc".repeat(5333), "ab\n".repeat(40));
    let model = model.classifier().expect("it is");
    let found = model.classify(&[&text, "a"]).expect("letters");
    assert_eq!(found[0].sentences.len(), 41);
    assert_eq!(found[0].sentences[0].word_weights.len(), 15_999);
    assert!((found[0].sentences[0].word_weights.iter().sum::<f32>() - 1.0).abs() < 1e-3);
    // In another batch sums have another order.
    let alone = &model.classify(&["a"]).expect("a letter")[0];
    assert_eq!((found[1].class, &found[1].sentences), (alone.class, &alone.sentences));
    for (a, b) in found[1].probabilities.iter().zip(&alone.probabilities) {
        assert!((a - b).abs() < 1e-6, "{a} {b}");
    }
}

#[test]
fn a_text_that_is_too_long_is_refused_at_once_with_the_limit() {
    let [llama, bert, transformer, gru, han] =
        [Llama, Encoder, Translator, Gru, Hierarchy].map(|kind| opened("long", kind));
    let (tokens, bytes) = ("a".repeat(16_385), "a".repeat((1 << 20) + 1));
    for (text, limit) in [(&tokens, "16384"), (&bytes, "1048576")] {
        let text = text.as_str();
        let mut hear = |_: usize, _: &str| std::ops::ControlFlow::Continue(());
        let all = [
            llama
                .causal_lm()
                .expect("it is")
                .generate(&[text], &DecodingStrategy::Greedy, 1, &mut hear)
                .map(drop),
            transformer
                .translator()
                .expect("it is")
                .translate(&[text], &DecodingStrategy::Greedy, 1)
                .map(drop),
            gru.translator()
                .expect("it is")
                .translate(&["a", text], &DecodingStrategy::Greedy, 1)
                .map(drop),
            gru.look_at("a", text).map(drop),
            han.classifier().expect("it is").classify(&[text]).map(drop),
        ];
        for refused in all {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(limit) && error.contains(&text.len().to_string()), "{error}");
        }
        assert!(
            bert.encoder()
                .expect("it is")
                .embed(&[text])
                .unwrap_err()
                .to_string()
                .contains("shorten")
        );
    }
}

/// A tokenizer.json that is well: words, and letters of which words are made.
fn tokenizer() -> serde_json::Value {
    serde_json::json!({
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "_"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "_"}]},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "_"}, "behavior": "MergedWithNext", "invert": false},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "unk_token": "<s>", "vocab": {"<s>": 0, "_": 1, "a": 2, "b": 3, "ab": 4},
                  "merges": [["a", "b"]]}
    })
}

#[test]
fn a_tokenizer_that_would_break_its_library_is_refused() {
    let whole = tokenizer();
    let read = |json: &serde_json::Value| Tokens::from_json(json.to_string().as_bytes());
    let tokens = read(&whole).expect("a tokenizer");
    assert_eq!(tokens.encode("ab a").expect("letters"), [0, 1, 4, 1, 2]);
    assert_eq!(tokens.decode(&[0, 1, 4, 1, 2]), "ab a");

    let replace =
        serde_json::json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    let many = |n: usize| vec![replace.clone(); n];
    let nested = (0..20).fold(
        replace.clone(),
        |part, _| serde_json::json!({"type": "Sequence", "normalizers": [part]}),
    );
    let charsmap =
        |base64: &str| serde_json::json!({"type": "Precompiled", "precompiled_charsmap": base64});
    let special = "/post_processor/special_tokens/<s>/ids/0";
    // Where, what is put there, and what the message must name.
    let cases = [
        (
            "/pre_tokenizer",
            serde_json::json!({"type": "FixedLength", "length": 0}),
            "pre_tokenizer.length",
        ),
        ("/decoder/decoders/2/stop", 2.into(), "decoder.stop"),
        ("/model/continuing_subword_prefix", "##########".into(), "tokenizers panicked"),
        ("/post_processor/single/0/SpecialToken/id", "<t>".into(), "`<t>` is not among"),
        ("/post_processor/single/1/Sequence/id", "B".into(), "sequence A"),
        ("/normalizer/normalizers", many(60).into(), ""),
        ("/normalizer/normalizers", many(70).into(), "too many"),
        ("/normalizer", nested, "too many"),
        ("/normalizer", charsmap("AAAA"), "precompiled_charsmap"),
        ("/normalizer", charsmap("/////////////////////w=="), "precompiled_charsmap"),
        ("/normalizer", charsmap("BAAAAP////9hAA=="), "tokenizers panicked"),
        ("/normalizer", charsmap("AAAAAA=="), "precompiled_charsmap"),
        (
            "/post_processor",
            serde_json::json!({"type": "BertProcessing", "sep": ["a", 1u64 << 31], "cls": ["b", 3]}),
            "2147483648",
        ),
        (special, (1u64 << 31).into(), "2147483648"),
        (special, u64::from(u32::MAX).into(), "4294967295"),
        ("/added_tokens/0/id", (1u64 << 40).into(), "the id of a token"),
        ("/model/vocab/a", (-1).into(), "the id of a token"),
    ];
    for (place, value, named) in cases {
        let mut json = whole.clone();
        let (parent, field) = place.rsplit_once('/').expect("a path");
        let parent = json.pointer_mut(parent).expect("a place in it");
        match parent.as_array_mut() {
            Some(list) => list[field.parse::<usize>().expect("a number")] = value,
            None => parent[field] = value,
        }
        let error =
            read(&json).and_then(|tokens| tokens.encode("aaaaaaaaaa")).unwrap_err().to_string();
        assert!(error.contains(named), "{place}: {error}");
    }
}

#[test]
fn the_highest_number_of_a_token_is_held_against_the_model() {
    let (path, _) = made("ids", Llama);
    std::fs::remove_file(path.join("vocabulary.json")).expect("it was there");
    let mut json = tokenizer();
    std::fs::write(path.join("tokenizer.json"), json.to_string()).expect("a file");
    Model::open(&path).expect("5 tokens of 6");
    json["post_processor"]["special_tokens"]["<s>"]["ids"][0] = 6.into();
    std::fs::write(path.join("tokenizer.json"), json.to_string()).expect("a file");
    let error = Model::open(&path).map(drop).unwrap_err().to_string();
    std::fs::remove_dir_all(path).expect("it was there");
    assert!(error.contains("the vocabulary has 7, the model 6"), "{error}");
}

#[test]
fn a_text_of_no_tokens_is_refused_where_there_is_nothing_to_say() {
    let model = opened("empty", Translator);
    // To a translator nothing is its end, which is a token.
    assert_eq!(
        model
            .translator()
            .expect("it is")
            .translate(&[""], &DecodingStrategy::Greedy, 2)
            .expect("its end")
            .len(),
        1
    );
    assert_eq!(
        model
            .translator()
            .expect("it is")
            .translate(&["", "a"], &DecodingStrategy::Greedy, 2)
            .expect("a letter")
            .len(),
        2
    );
    let error = opened("empty", Encoder)
        .encoder()
        .expect("it is")
        .embed(&["a", ""])
        .unwrap_err()
        .to_string();
    assert!(error.contains("no tokens"), "{error}");
    assert!(opened("empty", Llama).look("").is_err());
}

#[test]
fn a_translation_of_nothing_is_looked_at() {
    for kind in [Translator, Gru] {
        let model = opened("nothing", kind);
        let refused = [model.look_at("", "").map(drop), model.look("").map(drop)];
        assert!(
            refused.iter().all(|one| one.as_ref().is_err_and(|e| e.to_string().contains("token")))
        );
        for text in ["ab", "a"] {
            let trace = model.look_at(text, "").expect("a trace");
            assert_eq!(trace.labels("target").len(), 1, "only the beginning");
            let cross = trace.layers.iter().find(|layer| layer.kind == "cross").expect("it looks");
            assert_eq!(cross.data.size(), [1, text.len()]);
        }
    }
}

#[test]
fn weights_that_are_no_numbers_are_refused_with_their_tensor_and_file() {
    for (kind, bad) in [(Encoder, f32::NAN), (Hierarchy, f32::INFINITY), (Gru, f32::NAN)] {
        let (path, _) = made("finite", kind);
        let file = path.join("model.safetensors");
        let mut weights =
            Weights::safetensors(std::fs::read(&file).expect("a file")).expect("fine");
        let shapes: Vec<(String, Vec<usize>)> = (weights.names())
            .map(|name| (name.to_owned(), weights.shape(name).expect("it is there").to_vec()))
            .collect();
        let mut all: Vec<_> = (shapes.into_iter())
            .map(|(name, shape)| {
                let numbers = weights.take(&name, &shape).expect("f32");
                (name, shape, numbers)
            })
            .collect();
        let last = all.len() - 1;
        *all[last].2.last_mut().expect("numbers") = bad;
        let tensors =
            all.iter().map(|(name, shape, numbers)| (name.clone(), shape.clone(), &numbers[..]));
        save_tensors(&file, tensors, &BTreeMap::new()).expect("a file");
        let error = Model::open(&path).map(drop).unwrap_err().to_string();
        std::fs::remove_dir_all(path).expect("it was there");
        assert!(error.starts_with(&file.display().to_string()), "{error}");
        assert!(error.contains(&all[last].0) && error.contains(&bad.to_string()), "{error}");
    }
}
