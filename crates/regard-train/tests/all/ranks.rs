//! A run of several ranks ends with the bytes of one process.

use crate::resume::assert_same;
use crate::toy::{Folder, TestCallback, settings};
use regard_train::{Error, Ranks, RunOutcome, Settings, Threads, Trainer};
use std::path::Path;
use std::rc::Rc;

/// What each rank of a run returns: one that is created where there are settings, or else resumed.
fn on_ranks(
    path: &Path,
    begin: Option<&Settings>,
    count: usize,
    callback: impl Fn(usize) -> TestCallback + Sync,
) -> Vec<Result<RunOutcome, Error>> {
    let callback = &callback;
    let one = |ranks: Threads| {
        let rank = ranks.rank();
        let begun = match begin {
            _ if rank > 0 => None,
            Some(settings) => Some(Trainer::create(path, settings)?),
            None => Some(Trainer::resume(path)?),
        };
        let (mut trainer, mut run) = Trainer::among(Rc::new(ranks), begun)?;
        assert_eq!(run.is_some(), rank == 0);
        trainer.train(run.as_mut(), &mut callback(rank))
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            Threads::new(count).into_iter().map(|own| scope.spawn(move || one(own))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    })
}

fn to_the_end(_: usize) -> TestCallback {
    TestCallback::default()
}

#[test]
fn runs_of_any_number_of_ranks_end_with_the_bytes_of_one_process() {
    let folder = Folder::new("ranks");
    for kind in ["transformer", "seq2seq", "gpt"] {
        for parts in [8, 5] {
            let settings = settings(
                &folder,
                &[
                    &format!("model.kind={kind}"),
                    &format!("model.shared_vocabulary={}", kind == "gpt"),
                    &format!("training.accumulate={parts}"),
                    "training.batch_tokens=48",
                    "training.steps=12",
                    "training.validate_every=5",
                    "training.save_top_k=2",
                ],
            );
            let whole = folder.run(&format!("{kind}-{parts}"));
            let (mut trainer, mut run) = Trainer::create(&whole, &settings).unwrap();
            trainer.train(&mut run, &mut TestCallback::default()).unwrap();
            drop((trainer, run));
            for count in [2, 3, 4, 5, 8].into_iter().filter(|count| *count <= parts) {
                let dealt = folder.run(&format!("{kind}-{parts}-{count}"));
                for ended in on_ranks(&dealt, Some(&settings), count, to_the_end) {
                    assert_eq!(ended, Ok(RunOutcome::Completed));
                }
                assert_same(&whole, &dealt, &format!("{kind}, {parts} parts, {count} ranks"));
            }
        }
    }
}

#[test]
fn a_run_goes_on_with_another_number_of_ranks_after_a_stop_on_any_of_them() {
    let folder = Folder::new("ranks-stopped");
    let changes = ["training.accumulate=8", "training.batch_tokens=48", "training.steps=20"];
    let settings = settings(&folder, &changes);
    let [whole, parts] = ["whole", "parts"].map(|name| folder.run(name));
    let (mut trainer, mut run) = Trainer::create(&whole, &settings).unwrap();
    trainer.train(&mut run, &mut TestCallback::default()).unwrap();
    drop((trainer, run));
    let mut begin = Some(&settings);
    for (count, stops) in [(3, 2), (1, 0), (8, 7), (2, 1)] {
        let told = |rank| {
            // Four steps are no multiple of `checkpoint_every`.
            let left = (rank == stops).then_some(4);
            TestCallback { left, ..TestCallback::default() }
        };
        for ended in on_ranks(&parts, begin.take(), count, told) {
            assert_eq!(ended, Ok(RunOutcome::Interrupted), "{count} ranks");
        }
    }
    for ended in on_ranks(&parts, None, 4, to_the_end) {
        assert_eq!(ended, Ok(RunOutcome::Completed));
    }
    assert_same(&whole, &parts, "stopped");
}

#[test]
fn what_fails_on_one_rank_ends_all_and_the_run_can_be_resumed() {
    let folder = Folder::new("ranks-failed");
    let changes = ["training.accumulate=2", "training.batch_tokens=48", "training.steps=9"];
    let settings = settings(&folder, &changes);
    let run = folder.run("run");
    // More ranks than parts.
    for ended in on_ranks(&run, Some(&settings), 3, to_the_end) {
        let told = ended.unwrap_err().to_string();
        assert!(told.contains("training.accumulate: 2, and there are 3 ranks"), "{told}");
    }
    // Rank 0 does not get the directory: the others do not wait for it.
    for (rank, ended) in on_ranks(&run, Some(&settings), 2, to_the_end).into_iter().enumerate() {
        let told = ended.unwrap_err().to_string();
        let wanted = ["not empty", "rank 0 has ended"][rank];
        assert!(told.contains(wanted), "{told}");
    }
    // What was begun goes on.
    for ended in on_ranks(&run, None, 2, to_the_end) {
        assert_eq!(ended, Ok(RunOutcome::Completed));
    }
}
