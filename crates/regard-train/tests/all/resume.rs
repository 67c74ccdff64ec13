//! A run that was stopped ends as one that was not.

use crate::toy::{Folder, TestCallback, settings};
use regard_train::{Run, RunOutcome, Trainer};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Barrier;

/// Every file of a run but its times.
pub(crate) fn files(run: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut folders = vec![run.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path.strip_prefix(run).expect("it is in the run").to_path_buf();
            if path.is_dir() {
                folders.push(path);
            } else if name != Path::new("times.jsonl") {
                found.push((name, std::fs::read(path).expect("a file")));
            }
        }
    }
    found.sort();
    found
}

/// Refuses runs that differ in a byte.
pub(crate) fn assert_same(one: &Path, other: &Path, what: &str) {
    let (one, other) = (files(one), files(other));
    let names = |files: &[(PathBuf, Vec<u8>)]| {
        files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&one), names(&other), "{what}");
    assert!(one.len() >= 6, "{what}: {:?}", names(&one));
    let metrics = |files: &[(PathBuf, Vec<u8>)]| {
        let found = files.iter().find(|(name, _)| name == Path::new("metrics.jsonl"));
        String::from_utf8_lossy(&found.expect("metrics").1).into_owned()
    };
    for (one, other) in metrics(&one).lines().zip(metrics(&other).lines()) {
        assert_eq!(one, other, "{what}: the first metrics that differ");
    }
    for ((name, one), (_, other)) in one.iter().zip(&other) {
        assert!(one == other, "{what}: {} differs", name.display());
    }
}

/// The length of a header of safetensors.
fn header(bytes: &[u8]) -> usize {
    let length = bytes.first_chunk().map(|length| u64::from_le_bytes(*length));
    length.and_then(|length| usize::try_from(length).ok()).expect("it has a header")
}

#[test]
fn a_run_that_was_stopped_again_and_again_ends_with_the_same_bits() {
    let folder = Folder::new("stopped");
    for kind in ["transformer", "seq2seq"] {
        let settings = settings(&folder, &[&format!("model.kind={kind}"), "training.steps=40"]);
        let [whole, parts] = ["whole", "parts"].map(|name| folder.run(&format!("{kind}-{name}")));
        let (mut trainer, mut run) = Trainer::create(&whole, &settings).unwrap();
        assert_eq!(
            trainer.train(&mut run, &mut TestCallback::default()).unwrap(),
            RunOutcome::Completed
        );

        drop(Trainer::create(&parts, &settings).unwrap());
        let mut stops = 0;
        loop {
            let (mut trainer, mut run) = Trainer::resume(&parts).unwrap();
            let mut callback = TestCallback { left: Some(9), ..TestCallback::default() };
            match trainer.train(&mut run, &mut callback).unwrap() {
                RunOutcome::Interrupted => stops += 1,
                ended => {
                    assert_eq!(ended, RunOutcome::Completed);
                    break;
                }
            }
        }
        assert_eq!(stops, 4);
        assert_same(&whole, &parts, kind);
    }
}

#[test]
fn steps_after_the_last_checkpoint_are_made_again() {
    let folder = Folder::new("killed");
    let settings = settings(&folder, &["training.steps=20", "training.checkpoint_every=6"]);
    let whole = folder.run("whole");
    let (mut trainer, mut run) = Trainer::create(&whole, &settings).unwrap();
    trainer.train(&mut run, &mut TestCallback::default()).unwrap();
    // Killed after 9 steps: what stands there is the checkpoint of step 6 and metrics up to step 5; here, a longer file.
    let killed = folder.run("killed");
    let (mut trainer, mut run) = Trainer::create(&killed, &settings).unwrap();
    trainer
        .train(&mut run, &mut TestCallback { left: Some(6), ..TestCallback::default() })
        .unwrap();
    run.log(&"a line of step 9").unwrap();
    drop((trainer, run));
    let (mut trainer, mut run) = Trainer::resume(&killed).unwrap();
    assert_eq!(trainer.progress().step, 6);
    trainer.train(&mut run, &mut TestCallback::default()).unwrap();
    assert_same(&whole, &killed, "killed");
    let metrics = std::fs::read_to_string(killed.join("metrics.jsonl")).unwrap();
    assert!(!metrics.contains("step 9"), "{metrics}");
}

#[test]
fn nothing_is_written_over_and_nothing_else_is_gone_on_with() {
    let folder = Folder::new("refused");
    let settings = settings(&folder, &[]);
    let error = Trainer::create(&folder.0, &settings).unwrap_err().to_string();
    assert!(error.contains("--resume"), "{error}");
    let error = Trainer::resume(&folder.0).unwrap_err().to_string();
    assert!(error.contains("settings.toml"), "{error}");
    let run = folder.run("run");
    drop(Trainer::create(&run, &settings).unwrap());
    let last = run.join("last.safetensors");
    let whole = std::fs::read(&last).unwrap();
    for length in [0, 4, 100, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&last, &whole[..length]).unwrap();
        let error = Trainer::resume(&run).unwrap_err().to_string();
        assert!(error.contains("last.safetensors: ") && error.contains("put a copy"), "{error}");
    }
    std::fs::write(&last, &whole).unwrap();
    assert!(Trainer::resume(&run).is_ok());
}

#[test]
fn a_run_whose_data_have_changed_is_not_gone_on_with() {
    let folder = Folder::new("changed");
    let settings = settings(&folder, &["training.steps=4"]);
    let run = folder.run("run");
    let (mut trainer, mut open) = Trainer::create(&run, &settings).unwrap();
    trainer
        .train(&mut open, &mut TestCallback { left: Some(2), ..TestCallback::default() })
        .unwrap();
    let error = Trainer::resume(&run).unwrap_err().to_string();
    assert!(error.contains("another process"), "{error}");
    drop((trainer, open));
    std::fs::write(folder.0.join("pairs.tsv"), "ab\tba\ncd\tdc\n").unwrap();
    let error = Trainer::resume(&run).unwrap_err().to_string();
    assert!(error.contains("`train` are not those"), "{error}");
}

#[test]
fn a_run_whose_validation_has_changed_is_not_gone_on_with() {
    let folder = Folder::new("validation");
    let validation = folder.0.join("validation.tsv");
    std::fs::write(&validation, "ab\tba\ncd\tdc\n").unwrap();
    let settings = settings(&folder, &["data.parts.0.validation=validation.tsv"]);
    let run = folder.run("run");
    drop(Trainer::create(&run, &settings).unwrap());
    drop(Trainer::resume(&run).unwrap());
    // Letters that the vocabulary does not know are all one token, and still not the same text.
    for text in ["cd\tdc\nab\tba\n", "ab\tba\n", "ab\tba\ncd\tdX\n", "ab\tba\ncd\tdY\n"] {
        std::fs::write(&validation, text).unwrap();
        let error = Trainer::resume(&run).unwrap_err().to_string();
        assert!(error.contains("`validation` are not those"), "{error}");
    }
}

/// The checkpoint of a run with something else in what it says of itself.
fn change(run: &Path, whole: &[u8], change: impl FnOnce(&mut Value)) {
    let (json, tensors) = whole[8..].split_at(header(whole));
    let mut json: Value = serde_json::from_slice(json).expect("a header");
    let progress = json["__metadata__"]["progress"].as_str().expect("an entry");
    let mut progress: Value = serde_json::from_str(progress).expect("progress");
    change(&mut progress);
    json["__metadata__"]["progress"] = progress.to_string().into();
    let json = json.to_string().into_bytes();
    let bytes = [&(json.len() as u64).to_le_bytes(), json.as_slice(), tensors].concat();
    std::fs::write(run.join("last.safetensors"), bytes).expect("a checkpoint");
}

#[test]
fn numbers_that_no_run_leaves_behind_are_refused_by_name() {
    let folder = Folder::new("numbers");
    let run = folder.run("run");
    let settings = settings(&folder, &["training.validate_every=1", "training.save_top_k=2"]);
    let (mut trainer, mut open) = Trainer::create(&run, &settings).unwrap();
    trainer
        .train(&mut open, &mut TestCallback { left: Some(3), ..TestCallback::default() })
        .unwrap();
    drop((trainer, open));
    let whole = std::fs::read(run.join("last.safetensors")).unwrap();
    let infinite = format!("{:016x}", f64::INFINITY.to_bits());
    let cases: [(&[&str], Value, &str); 8] = [
        (&["batch"], 1000.into(), "batch is 1000, and must be at most "),
        (&["epoch"], u64::MAX.into(), "epoch is 18446744073709551615, and must be at most 3"),
        (&["step"], u64::MAX.into(), "step is 18446744073709551615"),
        (&["tokens"], u64::MAX.into(), "tokens is "),
        (&["waited"], 9.into(), "waited is 9, and must be at most 3"),
        (&["since", "loss"], infinite.into(), "since.loss is inf"),
        (&["since", "loss"], 1.5.into(), "1.5"),
        (&["batch"], Value::Null, "null"),
    ];
    for (place, value, told) in cases {
        change(&run, &whole, |progress| {
            let place = place.iter().fold(progress, |value, key| &mut value[*key]);
            *place = value;
        });
        let error = Trainer::resume(&run).unwrap_err().to_string();
        assert!(error.contains("last.safetensors: ") && error.contains(told), "{error} / {told}");
        assert!(error.contains("begin anew"), "{error}");
    }
    // A weight that is none.
    let mut bytes = whole.clone();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(run.join("last.safetensors"), bytes).unwrap();
    let error = Trainer::resume(&run).unwrap_err().to_string();
    assert!(error.contains("last.safetensors: ") && error.contains("is NaN"), "{error}");
    std::fs::write(run.join("last.safetensors"), whole).unwrap();
    assert!(Trainer::resume(&run).is_ok());
}

#[test]
fn settings_that_would_change_a_run_are_refused_by_name() {
    let folder = Folder::new("edited");
    let run = folder.run("run");
    let settings = settings(&folder, &[]);
    drop(Trainer::create(&run, &settings).unwrap());
    let file = run.join("settings.toml");
    let edited = |from: &str, to: &str| {
        let text = settings.to_toml().unwrap();
        assert!(text.contains(from), "{from} is not in {text}");
        std::fs::write(&file, text.replacen(from, to, 1)).unwrap();
        Trainer::resume(&run)
    };
    for (from, to, told) in [
        (
            "batch_tokens = 256",
            "batch_tokens = 512000",
            "training.batch_tokens = 512000, and was 256",
        ),
        ("seed = 1", "seed = 2", "seed = 2, and was 1"),
        ("lr = 0.005", "lr = 0.006", "training.lr = 0.006, and was 0.005"),
        ("dropout = 0.1", "dropout = 0.2", "training.dropout = 0.2, and was 0.1"),
        ("validate_every = 0", "validate_every = 3", "training.validate_every = 3, and was 0"),
        (
            "metric = \"loss\"",
            "metric = \"score\"",
            "validation.metric = \"score\", and was \"loss\"",
        ),
        ("d_model = 32", "d_model = 64", "model.d_model = 64, and was 32"),
        ("source = \"ab\"", "source = \"cd\"", "data.parts.0.source = \"cd\", and was \"ab\""),
    ] {
        let error = edited(from, to).unwrap_err().to_string();
        assert!(error.contains("settings.toml: ") && error.contains(told), "{error} / {told}");
        assert!(error.contains("put the settings back"), "{error}");
    }
    for (from, to) in [
        ("steps = 0", "steps = 3"),
        ("epochs = 20", "epochs = 30"),
        ("log_every = 5", "log_every = 1"),
        ("checkpoint_every = 7", "checkpoint_every = 1"),
        ("patience = 0", "patience = 5"),
        ("save_top_k = 1", "save_top_k = 2"),
        ("samples = 4", "samples = 0"),
        ("license = \"\"", "license = \"free\""),
        ("test = \"\"", "test = \"test.tsv\""),
    ] {
        drop(edited(from, to).unwrap_or_else(|error| panic!("{to}: {error}")));
    }
}

#[test]
fn a_run_without_a_checkpoint_is_not_begun_again_in_silence() {
    let folder = Folder::new("lost");
    let run = folder.run("run");
    let (mut trainer, mut open) = Trainer::create(&run, &settings(&folder, &[])).unwrap();
    trainer
        .train(&mut open, &mut TestCallback { left: Some(6), ..TestCallback::default() })
        .unwrap();
    drop((trainer, open));
    let metrics = std::fs::read(run.join("metrics.jsonl")).unwrap();
    assert!(!metrics.is_empty());
    std::fs::remove_file(run.join("last.safetensors")).unwrap();
    let error = Trainer::resume(&run).unwrap_err().to_string();
    assert!(error.contains("last.safetensors: no checkpoint"), "{error}");
    assert_eq!(std::fs::read(run.join("metrics.jsonl")).unwrap(), metrics);
}

#[test]
fn a_run_that_has_ended_goes_on_when_it_is_given_more_steps() {
    let folder = Folder::new("more");
    let run = folder.run("run");
    let settings = settings(&folder, &["training.steps=4"]);
    let (mut trainer, mut open) = Trainer::create(&run, &settings).unwrap();
    assert_eq!(trainer.outcome(), None);
    trainer.train(&mut open, &mut TestCallback::default()).unwrap();
    drop((trainer, open));
    let (mut trainer, mut open) = Trainer::resume(&run).unwrap();
    assert_eq!(trainer.outcome(), Some(RunOutcome::Completed));
    assert_eq!(open.model(), Some(run.join("model")));
    let mut callback = TestCallback::default();
    assert_eq!(trainer.train(&mut open, &mut callback).unwrap(), RunOutcome::Completed);
    assert!(callback.stepped.is_empty() && callback.validated.is_empty());
    drop((trainer, open));
    let more = settings.to_toml().unwrap().replace("steps = 4", "steps = 6");
    std::fs::write(run.join("settings.toml"), more).unwrap();
    let (mut trainer, mut open) = Trainer::resume(&run).unwrap();
    trainer.train(&mut open, &mut TestCallback::default()).unwrap();
    assert_eq!(trainer.progress().step, 6);
}

#[test]
fn what_cannot_be_learned_from_leaves_no_directory() {
    let folder = Folder::new("nothing");
    let settings = settings(&folder, &["data.parts.0.train=missing.tsv"]);
    let run = folder.run("run");
    let error = Trainer::create(&run, &settings).unwrap_err().to_string();
    assert!(error.contains("missing.tsv") && !run.exists(), "{error}");
}

#[test]
fn of_runs_that_begin_at_once_one_gets_the_directory_and_its_settings() {
    const RUNS: u64 = 4;
    let folder = Folder::new("at-once");
    let all: Vec<_> = (0..RUNS).map(|seed| settings(&folder, &[&format!("seed={seed}")])).collect();
    for round in 0..50 {
        let path = folder.run(&format!("run-{round}"));
        let (begin, end) = (Barrier::new(all.len()), Barrier::new(all.len()));
        let one = |settings| {
            begin.wait();
            let run = Run::create(&path, settings);
            end.wait();
            run.is_ok()
        };
        let begun = std::thread::scope(|scope| {
            let threads: Vec<_> = all.iter().map(|own| scope.spawn(|| one(own))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let got: Vec<_> =
            all.iter().zip(begun).filter_map(|(own, got)| got.then_some(own)).collect();
        assert_eq!(got.len(), 1, "round {round}");
        assert_eq!(&Run::settings(&path).unwrap(), got[0], "round {round}");
    }
}

#[test]
fn half_written_files_of_a_run_that_was_killed_are_removed_by_the_next() {
    let folder = Folder::new("half");
    let settings = settings(&folder, &["training.steps=2"]);
    let path = folder.run("run");
    let (mut trainer, mut run) = Trainer::create(&path, &settings).unwrap();
    trainer.train(&mut run, &mut TestCallback::default()).unwrap();
    let places = ["last.safetensors", "best/step-0000002.safetensors", "model/model.safetensors"];
    let half: Vec<_> =
        places.iter().map(|place| regard_scope::temporary(&path.join(place)).unwrap()).collect();
    half.iter().for_each(|file| std::fs::write(file, "half").unwrap());
    let note = path.join(".note.regard");
    std::fs::write(&note, "of a user").unwrap();
    // Whoever does not get the directory leaves it alone.
    assert!(Trainer::resume(&path).is_err());
    assert!(half.iter().all(|file| file.exists()));
    drop((trainer, run));
    drop(Trainer::resume(&path).unwrap());
    assert!(half.iter().all(|file| !file.exists()) && note.exists());
}
