//! Things are learned, and attention does what it is asked for.

use crate::toy::{Folder, TestCallback, settings};
use regard_models::Model;
use regard_models::generate::DecodingStrategy;
use regard_train::data::{Column, pairs};
use regard_train::{Trainer, ValidationMetrics, translations};

fn trained(folder: &Folder, name: &str, changes: &[&str]) -> Vec<ValidationMetrics> {
    let settings = settings(folder, changes);
    let (mut trainer, mut run) = Trainer::create(&folder.run(name), &settings).expect("a new run");
    let mut callback = TestCallback::default();
    trainer.train(&mut run, &mut callback).expect("it learns");
    callback.validated
}

#[test]
fn every_kind_of_translator_learns_to_spell_backwards() {
    let folder = Folder::new("backwards");
    let all: [(&str, &[&str]); 7] = [
        ("transformer", &[]),
        ("joint", &["model.shared_vocabulary=true"]),
        ("gru", &["model.kind=seq2seq"]),
        ("dot", &["model.kind=seq2seq", "model.attention_score=dot"]),
        ("general", &["model.kind=seq2seq", "model.attention_score=general"]),
        ("concat", &["model.kind=seq2seq", "model.attention_score=concat"]),
        ("gpt", &["model.kind=gpt", "model.shared_vocabulary=true"]),
    ];
    for (name, changes) in all {
        let plain = ["training.dropout=0", "training.attention_dropout=0", "training.steps=300"];
        let changes: Vec<&str> = changes.iter().copied().chain(plain).collect();
        let losses: Vec<f64> =
            trained(&folder, name, &changes).iter().map(|report| report.validation_loss).collect();
        // One of eight letters by chance would be 2.08.
        assert!(losses.last().unwrap() < &0.7, "{name}: {losses:?}");
        let model = Model::open(&folder.run(name).join("model")).unwrap();
        let file = folder.0.join("pairs.tsv");
        let pairs = pairs(&file, &[Column::Index(0), Column::Index(1)]).unwrap();
        let written = translations(&model, &pairs, &DecodingStrategy::Greedy, 16).unwrap();
        let right = pairs.iter().zip(&written).filter(|(pair, own)| pair.target == **own).count();
        println!("{name}: loss {:.3}, {right} of {} right", losses.last().unwrap(), pairs.len());
        assert!(right >= 48, "{name}: {right} of {}; {written:?}", pairs.len());
    }
}

/// The mean entropy of all heads after training.
fn entropy(folder: &Folder, name: &str, changes: &[&str]) -> f64 {
    let changes: Vec<&str> = changes.iter().copied().chain(["training.steps=60"]).collect();
    let reports = trained(folder, name, &changes);
    let heads = &reports.last().expect("it was judged").heads;
    heads.iter().map(|head| head.entropy).sum::<f64>() / heads.len() as f64
}

#[test]
fn the_entropy_term_moves_the_entropy_of_heads_as_it_says() {
    let folder = Folder::new("entropy");
    let plain = entropy(&folder, "plain", &[]);
    let narrow = entropy(&folder, "narrow", &["attention.entropy=1"]);
    let wide = entropy(&folder, "wide", &["attention.entropy=-1"]);
    assert!(narrow + 0.02 < plain && plain + 0.1 < wide, "{narrow} {plain} {wide}");
}

#[test]
fn a_temperature_that_rises_makes_heads_sharper_when_it_is_gone() {
    // Learned at a temperature, scores are as many times larger; looked at without it, weights are sharper.
    let folder = Folder::new("temperature");
    let cold = ["attention.temperature=0.1"];
    let hot = [
        "attention.temperature=1",
        "attention.last_temperature=8",
        "attention.temperature_steps=30",
    ];
    let (cold, hot) = (entropy(&folder, "cold", &cold), entropy(&folder, "hot", &hot));
    assert!(hot + 0.05 < cold, "{hot} {cold}");
}

#[test]
fn a_run_may_begin_where_another_ended() {
    let folder = Folder::new("start");
    let first = trained(&folder, "first", &["training.steps=60", "training.dropout=0"]);
    let start =
        format!("training.init_from={:?}", folder.run("first").join("model").display().to_string());
    let more =
        [start.as_str(), "training.steps=2", "training.lr=1e-5", "data.strip_punct_prob=0.5"];
    let second = trained(&folder, "second", &more);
    let [first, second] =
        [&first, &second].map(|reports| reports[reports.len() - 1].validation_loss);
    assert!((first - second).abs() < 0.05, "{first} {second}");
}
