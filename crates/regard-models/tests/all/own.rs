//! Folders that we have written ourselves, with random weights: what a training run leaves.

use burn::module::Module;
use burn::tensor::Device;
use regard_models::files::{
    Activation, Architecture, Config, Heads, PairLayout, Positions, WeightFormat, Weights,
};
use regard_models::generate::DecodingStrategy;
use regard_models::{
    AttentionScore, DropoutRates, Gpt, Han, HanConfig, Model, Pass, Seq2Seq, Seq2SeqConfig,
    Transformer, ids, load, save,
};
use std::collections::BTreeMap;
use std::path::PathBuf;

pub(crate) const NONE: DropoutRates = DropoutRates { rate: 0.0, attention: 0.0 };
/// `<`, `>`, three letters and what a translation is asked for with.
const TOKENS: &str = r#"{"tokens": ["<", ">", "a", "b", "c", "="], "special_tokens": [0, 1]}"#;
const BEAM: DecodingStrategy = DecodingStrategy::Beam { width: 3, length_penalty: 1.0 };

/// A folder of its own, with everything in it.
pub(crate) fn folder(
    name: &str,
    config: &Config,
    model: &impl Module,
    stored: WeightFormat,
) -> PathBuf {
    let path = std::env::temp_dir().join(format!("regard-own-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&path).expect("a folder");
    std::fs::write(path.join("config.json"), config.to_json().expect("a config")).expect("a file");
    save(model, &path.join("model.safetensors"), &BTreeMap::new(), stored).expect("a file");
    let tokens: &[&str] = match config.target_vocab {
        Some(_) => &["source_vocabulary.json", "target_vocabulary.json"],
        None => &["vocabulary.json"],
    };
    for file in tokens {
        std::fs::write(path.join(file), TOKENS).expect("a file");
    }
    path
}

pub(crate) fn marked(config: Config) -> Config {
    Config { bos: Some(0), eos: vec![1], pad: Some(0), ..config }
}

fn opened(path: &PathBuf) -> Model {
    let model = Model::open(path).expect("a model of ours");
    std::fs::remove_dir_all(path).expect("it was there");
    model
}

/// Many texts at once are translated as each one alone.
fn translates(model: &Model) {
    let letters = ["a", "b", "c"];
    let texts: Vec<String> =
        (0..70).map(|i| letters.concat().repeat(1 + i % 5) + letters[i % 3]).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    for search in [DecodingStrategy::Greedy, BEAM] {
        let all =
            model.translator().expect("it is").translate(&texts, &search, 8).expect("letters");
        for i in [0, 1, 33, 69] {
            let alone = model
                .translator()
                .expect("it is")
                .translate(&texts[i..=i], &search, 8)
                .expect("letters");
            assert_eq!(all[i].text, alone[0].text);
            assert_eq!(all[i].tokens, alone[0].tokens);
        }
    }
}

#[test]
fn recurrent_translators_are_opened_with_and_without_attention() {
    for (attention_hidden, target_vocab) in [(Some(4), None), (None, Some(6))] {
        let sizes = Seq2SeqConfig {
            embedding: 5,
            encoder_hidden: 4,
            decoder_hidden: 6,
            attention_hidden,
            attention_score: AttentionScore::Additive,
            source_vocab: 6,
            target_vocab: 6,
        };
        let config = marked(Config { target_vocab, ..Config::seq2seq(sizes) });
        let model = Seq2Seq::new(&sizes, NONE, &Device::flex()).expect("sizes are sizes");
        let name = if target_vocab.is_some() { "plain" } else { "gru" };
        let model = opened(&folder(name, &config, &model, WeightFormat::F32));
        translates(&model);
        match attention_hidden {
            Some(_) => {
                let trace = model.look("abc").expect("a trace");
                let told = model.look_at("abc", "ab").expect("a trace");
                assert_eq!(told.labels("target").len(), 3, "the beginning and two letters");
                assert_eq!((trace.layers.len(), trace.layers[0].data.size()[1]), (1, 3));
            }
            None => {
                assert!(model.look("abc").unwrap_err().to_string().contains("attention_hidden"));
            }
        }
        assert!(model.classifier().unwrap_err().to_string().contains("han"));
    }
}

#[test]
fn translators_with_each_score_of_luong_are_opened_with_the_same_scores() {
    for (attention_score, attention_hidden) in [
        (AttentionScore::Dot, None),
        (AttentionScore::General, None),
        (AttentionScore::Concat, Some(4)),
    ] {
        let sizes = Seq2SeqConfig {
            embedding: 5,
            encoder_hidden: 4,
            decoder_hidden: if attention_score == AttentionScore::Dot { 8 } else { 6 },
            attention_hidden,
            attention_score,
            source_vocab: 6,
            target_vocab: 6,
        };
        let config = marked(Config { target_vocab: None, ..Config::seq2seq(sizes) });
        let device = Device::flex();
        let made = || Seq2Seq::new(&sizes, NONE, &device).expect("sizes are sizes");
        let model = made();
        let path = folder(&format!("{attention_score:?}"), &config, &model, WeightFormat::F32);
        let file = std::fs::read(path.join("model.safetensors")).expect("a file");
        let mut weights = Weights::safetensors(file).expect("a file of ours");
        let again = load(made(), &mut weights).expect("its own weights");
        let bits = |model: &Seq2Seq| -> Vec<u32> {
            let [source, target] = [[2, 3, 4, 2], [0, 4, 3, 2]].map(|row| ids(&[row], &device));
            let mut pass = Pass::default();
            let memory = model.encode(source, None, &mut pass).expect("ids are tokens");
            let scores = model.decode(&memory, target, &mut pass).expect("ids are tokens");
            scores.into_data().iter::<f32>().map(f32::to_bits).collect()
        };
        assert_eq!(bits(&model), bits(&again));
        assert_ne!(bits(&model), bits(&made()));
        let model = opened(&path);
        translates(&model);
        let told = model.look_at("abc", "ab").expect("a trace");
        assert_eq!(told.labels("target").len(), 3, "the beginning and two letters");
        assert_eq!((told.layers.len(), told.layers[0].data.size()), (1, [3, 3]));
    }
}

#[test]
fn transformers_that_share_their_tables_are_opened() {
    let config = marked(Config {
        d_model: 8,
        heads: Heads { q: 2, kv: 2 },
        head_dim: 4,
        vocab: 6,
        tie_embeddings: true,
        shared_vocabulary: true,
        positions: Positions::Sinusoidal {
            pairs: PairLayout::HalfSplit,
            first: 0,
            inclusive: false,
        },
        activation: Some(Activation::Gelu),
        ..Config::of(Architecture::Transformer)
    });
    let model = Transformer::new(&config, NONE, &Device::flex()).expect("a translator");
    translates(&opened(&folder("tables", &config, &model, WeightFormat::F16)));
}

/// A small decoder.
pub(crate) fn llama() -> Config {
    marked(Config {
        d_model: 8,
        heads: Heads { q: 2, kv: 1 },
        head_dim: 4,
        d_ff: Some(12),
        vocab: 6,
        pre_norm: true,
        positions: Positions::Rotary { theta: 1e4, pairs: PairLayout::HalfSplit },
        activation: Some(Activation::Silu),
        ..Config::of(Architecture::Llama)
    })
}

#[test]
fn a_decoder_translates_where_it_is_told_how_it_is_asked() {
    let plain = llama();
    let asked = Config { translate: Some("{source}=".into()), ..plain.clone() };
    let model = Gpt::new(&asked, NONE, &Device::flex()).expect("a decoder");
    let told = opened(&folder("asked", &asked, &model, WeightFormat::F32));
    translates(&told);
    let silent = opened(&folder("silent", &plain, &model, WeightFormat::F32));
    let mut hear = |_: usize, _: &str| std::ops::ControlFlow::Continue(());
    let right = silent
        .causal_lm()
        .expect("it is")
        .generate(&["ab="], &DecodingStrategy::Greedy, 8, &mut hear)
        .expect("letters");
    assert_eq!(
        told.translator()
            .expect("it is")
            .translate(&["ab"], &DecodingStrategy::Greedy, 8)
            .expect("letters"),
        right
    );
    let error = silent.translator().unwrap_err().to_string();
    assert!(error.contains("template"), "{error}");
}

#[test]
fn a_hierarchy_tells_what_a_text_is_and_what_it_looked_at() {
    let sizes = HanConfig {
        embedding: 5,
        word_hidden: 4,
        word_attention: 3,
        sentence_hidden: 4,
        sentence_attention: 3,
        vocab: 6,
        classes: 2,
    };
    let config = Config::han(sizes, vec!["good".into(), "bad".into()]);
    let model = Han::new(&sizes, NONE, &Device::flex()).expect("sizes are sizes");
    let model = opened(&folder("han", &config, &model, WeightFormat::F16));
    let texts = ["abc\nba\n\nc", "a", ""];
    let all = model.classifier().expect("it is").classify(&texts).expect("letters");
    for one in &all {
        assert_eq!(one.label, ["good", "bad"][one.class]);
        assert!((one.probabilities.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert!(one.probabilities[one.class] >= 0.5);
    }
    let words: Vec<_> = all[0].sentences.iter().map(|one| one.words.clone()).collect();
    assert_eq!(words, [vec!["a", "b", "c"], vec!["b", "a"], vec!["c"]]);
    assert!(all[0].sentences.iter().all(|one| one.word_weights.len() == one.words.len()));
    assert!((all[0].sentences.iter().map(|one| one.weight).sum::<f32>() - 1.0).abs() < 1e-5);
    assert!(model.translator().is_err() && model.look("a").is_err());
}
