use super::super::Tokens;
use super::*;
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/marian")
}

fn spm(side: &str) -> Vec<u8> {
    std::fs::read(folder().join(format!("{side}.spm"))).unwrap()
}

/// Texts, their ids and what is made of those again, as tests/hub/make_spm.py wrote them.
type Rows = Vec<(String, Vec<u32>, String)>;

fn expected() -> HashMap<String, Rows> {
    let json = std::fs::read(folder().join("expected.json")).unwrap();
    serde_json::from_slice(&json).unwrap()
}

#[test]
fn ids_are_those_of_sentencepiece() {
    let expected = expected();
    for side in ["source", "target"] {
        let tokens = Tokens::sentencepiece(&spm(side)).unwrap();
        for (text, ids, decoded) in &expected[&format!("{side}.spm")] {
            assert_eq!(tokens.encode(text).unwrap(), *ids, "{side} {text:?}");
            // The library writes ⁇ for unknown pieces; they are special here.
            if !ids.contains(&0) {
                assert_eq!(tokens.decode(ids), *decoded, "{side} {text:?}");
            }
        }
    }
}

#[test]
fn ids_are_those_of_marian_in_transformers() {
    let (expected, (source, target)) = (expected(), Tokens::marian(&folder()).unwrap());
    for (side, tokens) in [("source", source), ("target", target)] {
        let again = Tokens::from_json(tokens.to_json().unwrap().as_bytes()).unwrap();
        for (text, ids, decoded) in &expected[side] {
            assert_eq!(tokens.encode(text).unwrap(), *ids, "{side} {text:?}");
            assert_eq!(tokens.decode(ids), *decoded, "{side} {text:?}");
            assert_eq!(again.encode(text).unwrap(), *ids, "{side} {text:?}");
        }
    }
}

#[test]
fn ids_are_those_of_m2m_100_in_transformers() {
    let vocabulary = std::fs::read(folder().join("vocab.json")).unwrap();
    let model = SentencePiece::m2m100(&spm("target"), &vocabulary, "zh").unwrap();
    for (text, ids, decoded) in &expected()["m2m100"] {
        assert_eq!(model.encode(text).unwrap(), *ids, "{text:?}");
        assert_eq!(model.decode(ids), *decoded, "{text:?}");
    }
    assert_eq!(model.id("__af__").map(|id| id + 99), model.id("__zu__"));
    assert_eq!(model.len(), model.id("__zu__").unwrap() as usize + 1);
    let error = SentencePiece::m2m100(&spm("target"), &vocabulary, "xx").unwrap_err();
    assert!(error.to_string().contains("xx"), "{error}");
}

#[test]
fn tokens_cover_the_bytes_that_they_are_from() {
    let (source, _) = Tokens::marian(&folder()).unwrap();
    for (text, parts) in [
        ("", &[""][..]),
        // The space of the prefix is from nothing, spaces that are left out belong to the one that stays, and the end covers nothing.
        ("  The   cat  sees. ", &["", "T", "he", "   cat", "  se", "e", "s", ".", ""]),
        // A ligature becomes two letters, and a letter without a piece is unknown.
        ("café ﬁnd", &["", "c", "a", "f", "é", " ﬁ", "ﬁnd", ""]),
        ("the<sep>cat", &["t", "he", "<sep>", "c", "a", "t", ""]),
        (">>cmn<< cat", &[">>cmn<<", "cat", ""]),
    ] {
        let found = source.offsets(text).unwrap();
        let found: Vec<&str> = found.into_iter().map(|bytes| &text[bytes]).collect();
        assert_eq!(found, parts, "{text:?}");
    }
    let ended = Tokens::sentencepiece(&spm("target")).unwrap().with_ends(Some(1), Some(2)).unwrap();
    for (text, ..) in expected().values().flatten() {
        for tokens in [&source, &ended] {
            let offsets = tokens.offsets(text).unwrap();
            assert_eq!(offsets.len(), tokens.encode(text).unwrap().len(), "{text:?}");
            assert!(offsets.iter().all(|bytes| text.get(bytes.clone()).is_some()), "{text:?}");
            assert!(offsets[..offsets.len() - 1].is_sorted_by_key(|bytes| bytes.start), "{text:?}");
        }
    }
}

#[test]
fn a_model_that_is_cut_or_changed_never_panics() {
    let texts = ["the old cat Ａe\u{301}㍿ ÿ <sep>", "  <s> ▁ "];
    let tried = |bytes: &[u8]| {
        let Ok(tokens) = Tokens::sentencepiece(bytes) else { return };
        for text in texts {
            let _ = tokens.encode(text).map(|ids| tokens.decode(&ids));
        }
    };
    for whole in [spm("source"), spm("target")] {
        for len in (0..whole.len()).step_by(7) {
            tried(&whole[..len]);
        }
        // The charsmap is at the end.
        let places = (0..whole.len()).filter(|at| at % 13 == 0 || at + 1500 > whole.len());
        for at in places {
            for byte in [0, 127, 255] {
                let mut changed = whole.clone();
                changed[at] = byte;
                tried(&changed);
            }
        }
    }
}

#[test]
fn what_is_wrong_is_named() {
    let piece = |text: &str, score: f32, kind: u8| {
        let len = u8::try_from(text.len()).unwrap();
        let mut bytes = vec![10, len + 9, 10, len];
        bytes.extend(text.as_bytes());
        bytes.push(21);
        bytes.extend(score.to_le_bytes());
        bytes.extend([24, kind]);
        bytes
    };
    let refused = |parts: &[Vec<u8>]| {
        Tokens::sentencepiece(&parts.concat()).map(|_| ()).unwrap_err().to_string()
    };
    let unknown = piece("<unk>", 0.0, 2);
    assert!(Tokens::sentencepiece(&[unknown.clone(), piece("a", -1.0, 1)].concat()).is_ok());
    for (parts, message) in [
        (vec![piece("a", 0.0, 1)], "no unknown piece"),
        (vec![unknown.clone(), piece("<unk2>", 0.0, 2)], "second unknown"),
        (vec![unknown.clone(), piece("a", 0.0, 1), piece("a", 0.0, 1)], "is piece 1 already"),
        (vec![unknown.clone(), piece("a", f32::NAN, 1)], "score is NaN"),
        (vec![unknown.clone(), piece("a", 0.0, 7)], "kinds of pieces"),
        (vec![unknown.clone(), piece("", 0.0, 1)], "without text"),
        (vec![unknown.clone(), piece("<0x0A>", 0.0, 6)], "256 or none"),
        (vec![unknown.clone(), piece("x", 0.0, 6)], "no byte"),
        // WORD, and lengths beyond the file.
        (vec![unknown.clone(), vec![18, 2, 24, 3]], "model_type"),
        (vec![unknown.clone(), vec![10, 255, 255, 255, 255, 15]], "damaged"),
        (vec![unknown.clone(), vec![10, 3, 10, 1, 255]], "piece 1"),
        (vec![unknown.clone(), vec![26, 3, 18, 1, 9]], "charsmap"),
        (vec![unknown, vec![255; 12]], "damaged"),
    ] {
        let error = refused(&parts);
        assert!(error.contains(message), "{message}: {error}");
    }
}

#[test]
fn numbers_of_marian_are_held_against_each_other() {
    let refused = |json: &str| {
        SentencePiece::marian(&spm("source"), json.as_bytes()).map(|_| ()).unwrap_err().to_string()
    };
    for (json, message) in [
        (r#"{"</s>": 0}"#, "<unk>"),
        (r#"{"<unk>": 0}"#, "</s>"),
        (r#"{"<unk>": 0, "</s>": 0}"#, "too"),
        (r#"{"<unk>": 0, "</s>": 4294967295}"#, "4294967295"),
        (r#"{"<unk>": -1}"#, "invalid value"),
        ("[]", "map"),
    ] {
        let error = refused(json);
        assert!(error.contains(message), "{message}: {error}");
    }
}

#[test]
fn ends_are_tokens() {
    let tokens = Tokens::sentencepiece(&spm("source")).unwrap();
    let [begin, end] = ["<s>", "</s>"].map(|text| tokens.id(text).unwrap());
    let tokens = tokens.with_ends(Some(begin), Some(end)).unwrap();
    let ids = tokens.encode("the cat</s>").unwrap();
    assert_eq!((ids[0], &ids[ids.len() - 2..]), (begin, &[end, end][..]));
    assert_eq!(tokens.decode(&ids), "the cat");
    assert!(tokens.with_ends(Some(1000), None).is_err());
}

/// A GGUF as llama.cpp writes it of a SentencePiece model.
fn metadata(bytes: &[u8]) -> Metadata {
    let model = Model::read(bytes).unwrap();
    let texts = model.pieces.iter().map(|piece| Value::Text(piece.text.clone())).collect();
    let kinds = model.pieces.iter().map(|piece| piece.kind as i32 + 1);
    let scores: Vec<u8> = model.pieces.iter().flat_map(|p| p.score.to_le_bytes()).collect();
    let mut metadata = Metadata::default();
    for (name, value) in [
        ("model", Value::Text("llama".into())),
        ("tokens", Value::List(texts)),
        ("token_type", Value::Numbers(kinds.collect())),
        ("scores", Value::Numbers(crate::files::Numbers::floats(scores))),
        ("bos_token_id", Value::Unsigned(1)),
    ] {
        metadata.values.insert(format!("tokenizer.ggml.{name}"), value);
    }
    metadata
}

#[test]
fn a_gguf_has_the_ids_of_its_model() {
    let bytes = spm("target");
    let mut metadata = metadata(&bytes);
    let tokens = Tokens::from_gguf(&metadata).unwrap();
    let own = Tokens::sentencepiece(&bytes).unwrap();
    for text in ["the old cat", "  two  spaces ", "ÿ👍", "", "The teacher writes, 42!"] {
        let ids = own.encode(text).unwrap();
        assert_eq!(tokens.encode(text).unwrap(), [&[1], &ids[..]].concat(), "{text:?}");
        assert_eq!(tokens.decode(&ids), text);
    }
    // A special token is one wherever it stands, and what follows is a text of its own.
    let ids = tokens.encode("cat</s>cat").unwrap();
    let cat = own.encode("cat").unwrap();
    assert_eq!(ids, [&[1], &cat[..], &[2], &cat].concat());

    let mut set = |name: &str, value| {
        metadata.values.insert(name.into(), value);
        Tokens::from_gguf(&metadata)
    };
    let tokens = set("tokenizer.ggml.add_space_prefix", Value::Bool(false)).unwrap();
    assert_eq!(tokens.decode(&tokens.encode(" cat").unwrap()), " cat");
    let tokens = set("tokenizer.ggml.add_bos_token", Value::Bool(false)).unwrap();
    let plain = tokens.encode("cat").unwrap();
    // Phi-3 leaves out white space after special tokens.
    let tokens = set("general.name", Value::Text("Phi-3 mini".into())).unwrap();
    assert_eq!(tokens.encode("</s> \ncat").unwrap(), [&[2], &plain[..]].concat());
    assert!(
        set("tokenizer.ggml.token_type", Value::Numbers([7; 400].into_iter().collect())).is_err()
    );
    assert!(set("tokenizer.ggml.scores", Value::Numbers([7].into_iter().collect())).is_err());
}
