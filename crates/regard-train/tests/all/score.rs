//! BLEU and chrF against sacrebleu, on the lines of `tests/score/golden.json`.

use regard_train::score::{Bleu, Chrf, Tokenize};
use serde_json::Value;

fn golden() -> Value {
    let text = include_str!("../score/golden.json");
    serde_json::from_str(text).expect("make.py writes JSON")
}

fn lines(value: &Value) -> Vec<&str> {
    list(value).iter().map(text).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a text")
}

fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

fn count(value: &Value) -> usize {
    value.as_u64().and_then(|n| n.try_into().ok()).expect("a count")
}

fn lowercase(value: &Value) -> bool {
    value["lowercase"].as_bool().expect("true or false")
}

#[track_caller]
fn close(ours: f64, theirs: &Value, of: &dyn std::fmt::Debug) {
    let theirs = number(theirs);
    assert!((ours - theirs).abs() < 1e-9, "{of:?}: {ours}, and sacrebleu says {theirs}");
}

/// Every score that the golden has of one set of lines.
fn agree(set: &str) {
    let golden = golden();
    let set = &golden[set];
    let [hypotheses, references] = [lines(&set["hypotheses"]), lines(&set["references"])];
    assert!(list(&set["bleu"]).len() >= 4 && list(&set["chrf"]).len() >= 4);
    for theirs in list(&set["bleu"]) {
        let tokenize = text(&theirs["tokenize"]).parse().expect("one of the names");
        let bleu = Bleu { tokenize, lowercase: lowercase(theirs) };
        let ours = bleu.corpus(&hypotheses, &references).expect("as many references");
        assert_eq!(ours.to_string(), text(&theirs["text"]), "{bleu:?}");
        assert_eq!(bleu.signature(), text(&theirs["signature"]));
        close(ours.score, &theirs["score"], &bleu);
        close(ours.brevity_penalty, &theirs["brevity_penalty"], &bleu);
        for n in 0..4 {
            close(ours.precisions[n], &theirs["precisions"][n], &bleu);
            assert_eq!(ours.matches[n], count(&theirs["matches"][n]), "{bleu:?}");
            assert_eq!(ours.totals[n], count(&theirs["totals"][n]), "{bleu:?}");
        }
        assert_eq!(ours.hypothesis_length, count(&theirs["hypothesis_length"]), "{bleu:?}");
        assert_eq!(ours.reference_length, count(&theirs["reference_length"]), "{bleu:?}");
    }
    for theirs in list(&set["chrf"]) {
        let chrf = Chrf {
            char_order: count(&theirs["char_order"]),
            word_order: count(&theirs["word_order"]),
            beta: number(&theirs["beta"]),
            lowercase: lowercase(theirs),
        };
        let ours = chrf.corpus(&hypotheses, &references).expect("as many references");
        assert_eq!(ours.to_string(), text(&theirs["text"]), "{chrf:?}");
        assert_eq!(chrf.signature(), text(&theirs["signature"]));
        close(ours.score, &theirs["score"], &chrf);
    }
}

#[test]
fn a_thousand_english_lines_score_as_sacrebleu_says() {
    agree("english");
}

#[test]
fn a_thousand_chinese_lines_score_as_sacrebleu_says() {
    agree("chinese");
}

#[test]
fn nasty_lines_score_as_sacrebleu_says() {
    agree("edges");
}

#[test]
fn each_nasty_line_has_the_words_and_the_scores_that_sacrebleu_says() {
    let golden = golden();
    let [hypotheses, references] =
        ["hypotheses", "references"].map(|of| lines(&golden["edges"][of]));
    let each = list(&golden["each"]);
    assert_eq!(each.len(), hypotheses.len());
    for ((hypothesis, reference), theirs) in hypotheses.into_iter().zip(references).zip(each) {
        let pair = [[hypothesis], [reference]];
        for tokenize in Tokenize::ALL {
            let (name, bleu) = (tokenize.name(), Bleu { tokenize, lowercase: false });
            let words = [hypothesis, reference].map(|line| tokenize.apply(line));
            assert_eq!(words.to_vec(), lines(&theirs["words"][name]), "{name} of {pair:?}");
            let alone = bleu.corpus(&pair[0], &pair[1]).unwrap().score;
            close(alone, &theirs["bleu"][name], &(name, pair));
            let sentence = bleu.sentence(hypothesis, reference).score;
            close(sentence, &theirs["sentence"][name], &(name, pair));
        }
        for (name, chrf) in [("chrf", Chrf::default()), ("chrf++", Chrf::plus_plus())] {
            close(chrf.corpus(&pair[0], &pair[1]).unwrap().score, &theirs[name], &(name, pair));
        }
    }
}

#[test]
fn every_character_cuts_or_joins_as_in_sacrebleu() {
    let golden = golden();
    for tokenize in [Tokenize::None, Tokenize::Mteval13a, Tokenize::Zh] {
        let mut ours: Vec<[u32; 2]> = Vec::new();
        for c in char::MIN..=char::MAX {
            if tokenize.apply(&format!("a{c}a")).split(' ').count() == 1 {
                continue;
            }
            let code = u32::from(c);
            match ours.last_mut() {
                Some([_, last]) if *last + 1 == code => *last = code,
                _ => ours.push([code, code]),
            }
        }
        assert_eq!(serde_json::json!(ours), golden["cuts"][tokenize.name()], "{tokenize}");
    }
}
