//! Both models write and see what the programs they come from do.

use crate::aren::{self, Aren};
use crate::dense::{Outcome, json, weights};
use crate::stories::{self, Stories};
use serde_json::from_value;

#[test]
fn names_are_written_as_ctranslate2_writes_them() -> Outcome<()> {
    let (model, goldens) = (Aren::load()?, json(aren::FOLDER, "golden_ctranslate2.json")?);
    let goldens = goldens.as_array().ok_or("a list of names")?;
    assert_eq!(goldens.len(), 10);
    for golden in goldens {
        let run = model.transliterate(golden["src"].as_str().ok_or("a name")?)?;
        assert_eq!(run.text, golden["greedy"], "{}", golden["src"]);
        assert_eq!(run.source.concat(), golden["src"]);
        assert_eq!(run.written.concat(), format!("{}</s>", run.text));
        assert_eq!(run.target.concat(), format!("<s>{}", run.text));
    }
    Ok(())
}

/// It reports head 0 of the last layer, for the steps that wrote a letter: all but the last, which wrote `</s>`.
#[test]
fn names_are_looked_at_as_ctranslate2_looks_at_them() -> Outcome<()> {
    let (model, goldens) = (Aren::load()?, json(aren::FOLDER, "golden_ctranslate2.json")?);
    for golden in goldens.as_array().ok_or("a list of names")? {
        let run = model.transliterate(golden["src"].as_str().ok_or("a name")?)?;
        let expected: Vec<Vec<f64>> = from_value(golden["greedy_attention"].clone())?;
        let seen =
            run.seen.iter().rfind(|seen| seen.kind == "cross").ok_or("no cross attention")?;
        assert_eq!((seen.layer, seen.causal), (5, false));
        assert_eq!((seen.q_len, seen.k_len), (expected.len() + 1, run.source.len()));
        let dim = seen.q.len() / Aren::HEADS / seen.q_len;
        for (q, expected) in seen.q.chunks(dim).zip(&expected) {
            let weights = weights(q, seen.k.chunks(dim).take(seen.k_len));
            assert_eq!(weights.len(), expected.len());
            for (weight, expected) in weights.iter().zip(expected) {
                assert!((weight - expected).abs() < 1e-5, "{weight} for {expected}");
            }
        }
    }
    Ok(())
}

#[test]
fn all_18_attentions_of_the_names_are_seen() -> Outcome<()> {
    let run = Aren::load()?.transliterate("محمد")?;
    for (kind, causal, q_len, k_len) in
        [("encoder", false, 4, 4), ("decoder", true, 7, 7), ("cross", false, 7, 4)]
    {
        let seen: Vec<_> = run.seen.iter().filter(|seen| seen.kind == kind).collect();
        assert!(seen.iter().map(|seen| seen.layer).eq(0..6), "{kind}");
        for seen in seen {
            assert_eq!((seen.causal, seen.q_len, seen.k_len), (causal, q_len, k_len), "{kind}");
            let len = |len| Aren::HEADS * len * 4;
            let lens = [&seen.q, &seen.k, &seen.v].map(Vec::len);
            assert_eq!(lens, [len(q_len), len(k_len), len(k_len)], "{kind}");
        }
    }
    Ok(())
}

#[test]
fn a_story_is_told_as_llama2_c_tells_it() -> Outcome<()> {
    let golden = json(stories::FOLDER, "golden.json")?;
    let run = Stories::load()?.tell(200)?;
    assert_eq!(run.text, golden["greedy_text_200_steps"]);
    assert_eq!((run.target.len(), run.written.len()), (200, 200));
    assert_eq!(run.target[..6], ["<s>", " Once", " upon", " a", " time", ","]);
    assert_eq!(run.target[1..], run.written[..199]);
    assert!(run.source.is_empty());

    assert!(run.seen.iter().map(|seen| (seen.kind, seen.layer)).eq((0..5).map(|i| ("self", i))));
    for seen in &run.seen {
        assert_eq!((seen.causal, seen.q_len, seen.k_len), (true, 200, 200));
        let len = |heads| heads * 200 * 8;
        let lens = [&seen.q, &seen.k, &seen.v].map(Vec::len);
        let (q, kv) = (len(Stories::HEADS), len(Stories::KV_HEADS));
        assert_eq!(lens, [q, kv, kv]);
    }
    Ok(())
}
