//! Settings say what is wrong with them.

use regard_train::{PRESETS, Settings, preset};

fn refused(file: &str, changes: &[&str]) -> String {
    let changes: Vec<String> = changes.iter().map(|change| change.to_string()).collect();
    Settings::new(file, &changes).expect_err("refused").to_string()
}

#[test]
fn every_preset_is_read_and_comes_back_as_it_was() {
    for (name, text) in PRESETS {
        let settings = Settings::new(text, &[]).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(Settings::new(&settings.to_toml().unwrap(), &[]).unwrap(), settings, "{name}");
        assert!(text.starts_with("# "), "{name} says what it is");
    }
}

#[test]
fn a_key_that_is_not_known_is_refused_with_the_one_that_is_meant() {
    let error = refused("[training]\nepoch = 3", &[]);
    assert!(error.contains("training.epoch") && error.contains("`epochs`"), "{error}");
    let error = refused("[[data.parts]]\ntrian = \"x\"", &[]);
    assert!(error.contains("data.parts.0.trian") && error.contains("`train`"), "{error}");
    let text = preset("shakespeare").unwrap();
    let error = refused(text, &["training.lrs=1"]);
    assert!(error.contains("training.lrs") && error.contains("`lr`"), "{error}");
    // A part of a key suggests the whole key.
    let error = refused(text, &["validation.beams=4"]);
    assert!(error.contains("`num_beams`"), "{error}");
    let error = refused(text, &["data.parts.1.train=x"]);
    assert!(error.contains("there are 1"), "{error}");
    assert!(refused(text, &["training"]).contains("key=value"));
    assert!(refused(text, &["training=1"]).contains("table"));
    let error = preset("shakespear").unwrap_err().to_string();
    assert!(error.contains("`shakespeare`"), "{error}");
}

#[test]
fn values_that_make_no_sense_are_refused_by_name() {
    let text = preset("shakespeare").unwrap();
    for (change, wanted) in [
        ("training.dropout=1", "training.dropout"),
        ("training.lr=-1", "training.lr"),
        ("training.batch_tokens=0", "training.batch_tokens"),
        ("model.kind=han", "model.kind"),
        ("attention.temperature=0", "attention.temperature"),
        ("training.epochs=abc", "training.epochs"),
        ("training.epochs=0", "training.epochs"),
        ("model.heads=5", "model.heads"),
        ("optimizer.max_grad_norm=nan", "optimizer.max_grad_norm"),
        ("attention.entropy=inf", "attention.entropy"),
    ] {
        let error = refused(text, &[change]);
        assert!(error.contains(wanted), "{change}: {error}");
    }
    assert!(refused("", &[]).contains("data.parts"));
    let text = preset("multi30k-de-en-luong").unwrap();
    let error = refused(text, &["model.attention_score=cosine"]);
    for part in ["attention_score", "cosine", "`additive`", "`dot`", "`general`", "`concat`"] {
        assert!(error.contains(part), "{error}");
    }
    let error = refused(text, &["model.attention_score=concat", "model.attention=0"]);
    assert!(error.contains("model.attention:") && error.contains("1 or more"), "{error}");
}

#[test]
fn a_change_is_toml_or_else_a_text() {
    let text = preset("tatoeba-zh-en").unwrap();
    let changes = ["training.lr=1", "data.folder=some/where", "data.parts.0.columns=[\"a\", 1]"];
    let changes: Vec<String> = changes.iter().map(|change| change.to_string()).collect();
    let settings = Settings::new(text, &changes).unwrap();
    assert_eq!(settings.training.lr, 1.0);
    assert_eq!(settings.data.folder, "some/where");
    assert_eq!(settings.data.parts[0].columns.len(), 2);
}
