//! A run that was stopped ends as one that was not.

use crate::toy::{Ear, Folder, settings};
use regard_train::{Ended, Run, Trainer};
use std::path::Path;
use std::sync::Barrier;

fn weights(run: &Path) -> Vec<u8> {
    let bytes = std::fs::read(run.join("last.safetensors")).expect("there is a checkpoint");
    // Behind the header, which has the seconds that the run took.
    let header = bytes.first_chunk().map(|length| u64::from_le_bytes(*length));
    let header = header.and_then(|length| usize::try_from(length).ok()).expect("it has a header");
    bytes[8 + header..].to_vec()
}

#[test]
fn a_run_that_was_stopped_again_and_again_ends_with_the_same_bits() {
    let folder = Folder::new("stopped");
    for kind in ["transformer", "gru"] {
        let settings = settings(&folder, &[&format!("model.kind={kind}"), "training.steps=40"]);
        let [whole, parts] = ["whole", "parts"].map(|name| folder.run(&format!("{kind}-{name}")));
        let (mut trainer, mut run) = Trainer::create(&whole, &settings).unwrap();
        assert_eq!(trainer.train(&mut run, &mut Ear::default()).unwrap(), Ended::Done);

        drop(Trainer::create(&parts, &settings).unwrap());
        let mut stops = 0;
        loop {
            let (mut trainer, mut run) = Trainer::resume(&parts).unwrap();
            let mut ear = Ear { left: Some(9), ..Ear::default() };
            match trainer.train(&mut run, &mut ear).unwrap() {
                Ended::Stopped => stops += 1,
                ended => {
                    assert_eq!(ended, Ended::Done);
                    break;
                }
            }
        }
        assert_eq!(stops, 4);
        assert_eq!(weights(&whole), weights(&parts), "{kind}");
        let model = |run: &Path| std::fs::read(run.join("model/model.safetensors")).unwrap();
        assert_eq!(model(&whole), model(&parts), "{kind}");
        let lines = |run: &Path| {
            std::fs::read_to_string(run.join("metrics.jsonl")).unwrap().lines().count()
        };
        assert_eq!(lines(&whole), lines(&parts), "{kind}");
    }
}

#[test]
fn steps_after_the_last_checkpoint_are_made_again() {
    let folder = Folder::new("killed");
    let settings = settings(&folder, &["training.steps=20", "training.checkpoint_every=6"]);
    let whole = folder.run("whole");
    let (mut trainer, mut run) = Trainer::create(&whole, &settings).unwrap();
    trainer.train(&mut run, &mut Ear::default()).unwrap();
    // Killed after 9 steps: what stands there is the checkpoint of step 6 and metrics up to step 5; here, a longer file.
    let killed = folder.run("killed");
    let (mut trainer, mut run) = Trainer::create(&killed, &settings).unwrap();
    trainer.train(&mut run, &mut Ear { left: Some(6), ..Ear::default() }).unwrap();
    run.log(&"a line of step 9").unwrap();
    drop((trainer, run));
    let (mut trainer, mut run) = Trainer::resume(&killed).unwrap();
    assert_eq!(trainer.progress().step, 6);
    trainer.train(&mut run, &mut Ear::default()).unwrap();
    assert_eq!(weights(&whole), weights(&killed));
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
    std::fs::write(run.join("last.safetensors"), b"half of a file").unwrap();
    assert!(Trainer::resume(&run).is_err());
}

#[test]
fn a_run_whose_data_have_changed_is_not_gone_on_with() {
    let folder = Folder::new("changed");
    let settings = settings(&folder, &["training.steps=4"]);
    let run = folder.run("run");
    let (mut trainer, mut open) = Trainer::create(&run, &settings).unwrap();
    trainer.train(&mut open, &mut Ear { left: Some(2), ..Ear::default() }).unwrap();
    let error = Trainer::resume(&run).unwrap_err().to_string();
    assert!(error.contains("another process"), "{error}");
    drop((trainer, open));
    std::fs::write(folder.0.join("pairs.tsv"), "ab\tba\ncd\tdc\n").unwrap();
    let error = Trainer::resume(&run).unwrap_err().to_string();
    assert!(error.contains("not those"), "{error}");
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
    trainer.train(&mut run, &mut Ear::default()).unwrap();
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
