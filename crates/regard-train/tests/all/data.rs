//! Data as it really is: sentences, plays, poems and reviews.

use regard_train::data::{
    Batches, Column, Pair, VocabularyKind, VocabularySettings, documents, pairs, text, texts,
    train_vocabulary,
};
use std::path::PathBuf;
use std::process::Command;
use tokenizers::Tokenizer;

const MARKS: [&str; 4] = ["<pad>", "<s>", "</s>", "<unk>"];
const UNKNOWN: u32 = 3;

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../data").join(name)
}

fn tatoeba(part: &str) -> Vec<Pair> {
    let path = data(&format!("tatoeba-zh-en/{part}.zh-en.tsv.gz"));
    pairs(&path, &[Column::Index(0), Column::Index(1)]).expect("two columns a line")
}

fn sides(pairs: &[Pair]) -> impl Iterator<Item = &str> {
    pairs.iter().flat_map(|pair| [pair.source.as_str(), pair.target.as_str()])
}

fn made<'a>(kind: VocabularyKind, size: usize, texts: impl Iterator<Item = &'a str>) -> Tokenizer {
    let settings = VocabularySettings { kind, size, ..VocabularySettings::default() };
    let bytes = train_vocabulary(&settings, &MARKS, texts).expect("there are texts");
    // `Tokens` of the models reads it in this way.
    let value: serde_json::Value = serde_json::from_slice(&bytes).expect("it is JSON");
    assert!(["padding", "truncation", "post_processor"].iter().all(|key| value[key].is_null()));
    Tokenizer::from_bytes(value.to_string()).expect("it is a tokenizer")
}

fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
    tokenizer.encode_fast(text, true).expect("any text").get_ids().to_vec()
}

#[test]
fn sentences_of_both_languages_come_back() {
    let (train, test) = (tatoeba("train"), tatoeba("test"));
    assert_eq!((train.len(), test.len()), (27_055, 1000));
    let tiny = tatoeba("tiny2k");
    let bpe = made(VocabularyKind::Bpe, 8000, sides(&train));
    let unigram = made(VocabularyKind::Unigram, 4000, sides(&tiny));
    assert_eq!(bpe.get_vocab_size(true), 8000);
    for (table, name, lines) in [
        (&bpe, "bpe, train", &train),
        (&bpe, "bpe, test", &test),
        (&unigram, "unigram, tiny2k", &tiny),
        (&unigram, "unigram, test", &test),
    ] {
        let (mut count, mut unknown) = (0, 0);
        for line in sides(lines) {
            let ids = ids(table, line);
            count += ids.len();
            if ids.contains(&UNKNOWN) {
                unknown += 1;
            } else {
                assert_eq!(table.decode(&ids, true).unwrap(), line);
            }
        }
        let lines = 2 * lines.len();
        println!("{name}: {lines} lines, {count} tokens, {unknown} lines with something unknown");
        assert!(name != "bpe, train" || unknown == 0);
        assert!(name != "bpe, test" || unknown <= 20);
    }
}

#[test]
fn little_of_a_batch_is_filling() {
    let train = tatoeba("train");
    let table = made(VocabularyKind::Bpe, 8000, sides(&train));
    let length = |text: &str| ids(&table, text).len();
    let lengths: Vec<_> =
        train.iter().map(|pair| [length(&pair.source), length(&pair.target) + 1]).collect();
    let told: usize = lengths.iter().flatten().sum();
    for tokens in [1024, 4096, 8192] {
        let epoch = Batches::new(&lengths, tokens, 1).unwrap().epoch(0);
        let cells = |batch: &Vec<usize>| {
            let longest = |side: usize| batch.iter().map(|i| lengths[*i][side]).max().unwrap();
            batch.len() * (longest(0) + longest(1))
        };
        let cells: usize = epoch.iter().map(cells).sum();
        let filling = 1.0 - told as f64 / cells as f64;
        println!("{tokens} tokens: {} batches, {:.1} % filling", epoch.len(), 100.0 * filling);
        assert!(filling < 0.12, "{filling}");
    }
}

#[test]
fn plays_and_poems_come_back_to_the_letter() {
    let play = text(&data("tinyshakespeare/input.txt")).unwrap();
    let table = made(VocabularyKind::Char, 1000, [play.as_str()].into_iter());
    assert_eq!(table.get_vocab_size(true), 65 + MARKS.len());
    let letters = ids(&table, &play);
    assert_eq!(letters.len(), 1_115_394);
    assert!(table.decode(&letters, true).unwrap() == play);

    let poems = texts(&data("chinese-poetry/lm_tang.train.txt.gz")).unwrap();
    assert_eq!(poems.len(), 17_661);
    let table = made(VocabularyKind::Char, 10_000, poems.iter().map(String::as_str));
    assert_eq!(table.get_vocab_size(true), 5815 + MARKS.len());
    for poem in &poems {
        let ids = ids(&table, poem);
        assert_eq!(table.decode(&ids, true).unwrap(), *poem);
        assert_eq!(ids.len(), poem.chars().count());
    }
}

#[test]
fn documents_are_read_and_their_words_known() {
    let columns = [Column::Name("label".into()), Column::Name("sents".into())];
    for (folder, counts) in
        [("movie-reviews-polarity2/", [1600, 200]), ("chinese-poetry/genre.", [8800, 1200])]
    {
        let [train, val] = ["train", "val"]
            .map(|part| documents(&data(&format!("{folder}{part}.jsonl.gz")), &columns).unwrap());
        assert_eq!([train.len(), val.len()], counts);
        let table = made(
            VocabularyKind::Word,
            30_000,
            train.iter().flat_map(|document| &document.sentences).map(String::as_str),
        );
        let ids: Vec<u32> = val
            .iter()
            .flat_map(|document| &document.sentences)
            .flat_map(|sentence| ids(&table, sentence))
            .collect();
        let unknown = ids.iter().filter(|id| **id == UNKNOWN).count();
        let share = unknown as f64 / ids.len() as f64;
        let size = table.get_vocab_size(true);
        println!("{folder}: {size} words, {:.2} % of {} unknown", 100.0 * share, ids.len());
        assert!(share < 0.04, "{share}");
    }
}

/// Where another process of this test leaves what it has made.
const LEAVE_AT: &str = "REGARD_TRAIN_LEAVE_AT";

#[test]
fn the_same_texts_give_the_same_bytes_in_every_process() {
    let lines = || include_str!("data.rs").lines().chain(["好久不见。", "他们好久不见。", "不见"]);
    let made: Vec<Vec<u8>> =
        [VocabularyKind::Bpe, VocabularyKind::Unigram, VocabularyKind::Char, VocabularyKind::Word]
            .into_iter()
            .map(|kind| VocabularySettings { kind, size: 500, ..VocabularySettings::default() })
            .map(|settings| train_vocabulary(&settings, &MARKS, lines()).unwrap())
            .collect();
    let made = made.concat();
    if let Ok(path) = std::env::var(LEAVE_AT) {
        std::fs::write(path, made).unwrap();
        return;
    }
    let path = std::env::temp_dir().join(format!("regard-train-{}.json", std::process::id()));
    for threads in 1..=3 {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "data::the_same_texts_give_the_same_bytes_in_every_process"])
            .env(LEAVE_AT, &path)
            .env("RAYON_NUM_THREADS", threads.to_string())
            .output()
            .unwrap();
        assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stdout));
        assert!(std::fs::read(&path).unwrap() == made, "other bytes with {threads} threads");
        std::fs::remove_file(&path).unwrap();
    }
}
