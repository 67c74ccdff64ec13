//! The command on the ranks of an MPI job: training with the bytes of one process, whatever is killed; statistics and maps of long arrays.
//! Needs `mpirun` of Open MPI.

#![expect(clippy::unwrap_used, reason = "what cannot be started has failed")]

mod toy;

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A folder of this test alone, gone when it ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("regard-mpi-{name}-{}", std::process::id()));
        let settings = r"
model = { d_model = 64, n_layers = 1, decoder_layers = 1, heads = 2, d_ff = 128 }
training = { steps = 300, accumulate = 8, batch_tokens = 40, checkpoint_every = 3, validate_every = 50 }
optimizer.ema_decay = 0.9
";
        toy::write(&folder, settings);
        Self(folder)
    }

    /// A run that begins, or goes on where it has a checkpoint.
    fn train(&self, run: &str, count: usize, more: &[&str]) -> Command {
        let run = self.0.join(run);
        let mut command = mpirun(count, &["train", "--mpi"]);
        if run.join("last.safetensors").exists() {
            command.arg("--resume").arg(&run);
        } else {
            let _ = std::fs::remove_dir_all(&run);
            command.arg(self.0.join("toy.toml")).arg("--out").arg(&run);
        }
        command.args(more).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    /// The run of one process.
    fn alone(&self, run: &str) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
        command.args(["--quiet", "train"]).arg(self.0.join("toy.toml"));
        assert!(command.arg("--out").arg(self.0.join(run)).status().unwrap().success());
    }

    /// Refuses runs that differ in more than their times.
    fn assert_same(&self, one: &str, other: &str) {
        let mut command = Command::new("diff");
        command
            .args(["-rq", "--exclude=times.jsonl"])
            .args([one, other].map(|run| self.0.join(run)));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The command on so many ranks.
fn mpirun(count: usize, args: &[&str]) -> Command {
    let mut command = Command::new("mpirun");
    command
        // More ranks than cores, and root in a container.
        .args(["--oversubscribe", "--bind-to", "none", "-n", &count.to_string()])
        .envs(["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"].map(|k| (k, "1")))
        .env("RAYON_NUM_THREADS", "1")
        .args([env!("CARGO_BIN_EXE_regard"), "--quiet"])
        .args(args);
    command
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The processes that `mpirun` has started, in the order of their ranks.
fn ranks(launcher: &Child, count: usize) -> Vec<String> {
    let parent = format!("PPid:\t{}", launcher.id());
    let start = Instant::now();
    loop {
        let own = |process: PathBuf| {
            let status = std::fs::read_to_string(process.join("status")).ok()?;
            let environment = std::fs::read(process.join("environ")).ok()?;
            let environment = String::from_utf8_lossy(&environment).into_owned();
            let rank =
                environment.split('\0').find_map(|one| one.strip_prefix("OMPI_COMM_WORLD_RANK="));
            let id = process.file_name()?.to_str()?.to_owned();
            status.lines().any(|line| line == parent).then_some((rank?.parse::<usize>().ok()?, id))
        };
        let all = std::fs::read_dir("/proc").unwrap();
        let mut found: Vec<_> = all.filter_map(|entry| own(entry.ok()?.path())).collect();
        if found.len() == count {
            found.sort();
            return found.into_iter().map(|(_, id)| id).collect();
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{} of {count} ranks", found.len());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn signal(process: &str, signal: &str) {
    assert!(Command::new("kill").args([signal, process]).status().unwrap().success());
}

/// Waits until a run has a checkpoint of a step that is at least this.
fn await_metrics(run: &Path) {
    let start = Instant::now();
    while std::fs::metadata(run.join("metrics.jsonl")).map_or(0, |file| file.len()) == 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "no metrics");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn any_number_of_ranks_writes_the_bytes_of_one_process() {
    let folder = Folder::new("bytes");
    folder.alone("alone");
    for count in [1, 2, 3, 4, 8] {
        let run = format!("ranks-{count}");
        let output = folder.train(&run, count, &[]).output().unwrap();
        assert!(output.status.success(), "{}", told(&output));
        folder.assert_same("alone", &run);
    }
}

/// `REGARD_KILLS` says how often; 3 times in the gate.
#[test]
fn ranks_that_are_killed_are_started_again_in_other_numbers_and_end_with_the_same_bytes() {
    let kills: usize = std::env::var("REGARD_KILLS").map_or(3, |n| n.parse().unwrap());
    let folder = Folder::new("kills");
    folder.alone("alone");
    let (mut state, mut steps) = (std::process::id(), Vec::new());
    let mut next = |limit: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % limit
    };
    for kill in 0..kills {
        let count = [2, 4, 3, 1, 8, 5, 4, 2, 6, 7][kill % 10];
        let mut job = folder.train("killed", count, &[]).stderr(Stdio::null()).spawn().unwrap();
        let all = ranks(&job, count);
        std::thread::sleep(Duration::from_millis(300 + u64::from(next(900))));
        if job.try_wait().unwrap().is_none() {
            signal(&all[next(8) as usize % count], "-KILL");
        }
        let status = job.wait().unwrap();
        steps.push((count, status.code()));
    }
    println!("ranks and exit codes: {steps:?}");
    let output = folder.train("killed", 2, &[]).output().unwrap();
    assert!(output.status.success(), "{}", told(&output));
    folder.assert_same("alone", "killed");
}

#[test]
fn a_signal_to_any_rank_leaves_a_checkpoint_and_one_that_is_stopped_ends_the_job() {
    let folder = Folder::new("signals");
    let run = folder.0.join("run");
    let job = folder.train("run", 3, &["--set", "training.steps=1000000"]).spawn().unwrap();
    let all = ranks(&job, 3);
    await_metrics(&run);
    signal(&all[2], "-TERM");
    let output = job.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", told(&output));

    let job = folder.train("run", 3, &["--mpi-timeout", "2"]).spawn().unwrap();
    let all = ranks(&job, 3);
    std::thread::sleep(Duration::from_secs(2));
    signal(&all[1], "-STOP");
    let output = job.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", told(&output));
    let told = told(&output);
    assert!(told.contains("have not come in 2.0 s") && told.contains("MPI_I"), "{told}");
    for id in all {
        let state = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
        assert!(state.is_empty() || state.contains("State:\tZ"), "rank {id} is left: {state}");
    }
}

#[test]
fn what_would_fail_again_is_refused_with_status_2() {
    let folder = Folder::new("refused");
    let output = folder.train("run", 9, &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", told(&output));
    assert!(told(&output).contains("training.accumulate: 8, and there are 9 ranks"));
    assert!(!folder.0.join("run").exists(), "nothing is begun");
    let output = folder.train("run", 2, &["--set", "training.epoch=1"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", told(&output));
    assert!(told(&output).contains("did you mean `epochs`"));
    // Two processes that know nothing of each other.
    let job = folder.train("run", 2, &[]);
    let mut plain = Command::new(job.get_program());
    plain.args(job.get_args().filter(|argument| *argument != "--mpi"));
    plain.envs(job.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = plain.output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", told(&output));
    assert!(told(&output).contains("is one of 2") && told(&output).contains("add --mpi"));
}

/// Writes an array as NumPy does, of numbers that follow from a seed.
fn write_npy(path: &Path, shape: [usize; 3], seed: u64) {
    let [heads, len, dim] = shape;
    let header =
        format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({heads}, {len}, {dim}), }}\n");
    let mut bytes = b"\x93NUMPY\x01\0".to_vec();
    bytes.extend(u16::try_from(header.len()).unwrap().to_le_bytes());
    bytes.extend(header.bytes());
    let mut noise = regard_testkit::Noise::new(seed);
    bytes.extend(noise.normals::<f32>(heads * len * dim).iter().flat_map(|x| x.to_le_bytes()));
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn arrays_are_measured_and_drawn_alike_by_any_number_of_ranks() {
    let folder = Folder::new("arrays");
    let [q, k] = ["q.npy", "k.npy"].map(|name| folder.0.join(name).display().to_string());
    write_npy(Path::new(&q), [4, 3000, 16], 1);
    write_npy(Path::new(&k), [2, 3000, 16], 2);
    let source = [q.as_str(), k.as_str(), "--mask", "causal", "--format", "json"];
    let said = |mut command: Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", told(&output));
        output.stdout
    };
    let of_ranks =
        |verb: &[&str], count| said(mpirun(count, &[verb, source.as_slice(), &["--mpi"]].concat()));
    let alone = |verb: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
        command.args(verb).args(source);
        let lines = String::from_utf8(said(command)).unwrap();
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>()
    };
    for verb in [&["stats"][..], &["look", "--head", "3", "--rows", "100..2000"]] {
        let [one, two, four] = [1, 2, 4].map(|count| of_ranks(verb, count));
        assert!(one == two && one == four, "{verb:?}: other bytes on several ranks");
        let found = String::from_utf8(one).unwrap();
        let found = found.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let (found, expected) = (found.collect::<Vec<_>>(), alone(verb));
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert_near(found, expected);
        }
    }
    for (args, why) in [
        (&["look", &q, &k, "--mpi", "--head", "4"][..], "--head 4: heads 0 to 3"),
        (&["look", &q, &k, "--mpi", "--rows", "9..3001"], "--rows 9..3001: rows 0..3000"),
        (&["stats", "a.safetensors", "--mpi"], "q.npy k.npy"),
    ] {
        let output = mpirun(2, args).output().unwrap();
        assert!(!output.status.success() && told(&output).contains(why), "{}", told(&output));
    }
}

/// Refuses values that differ by more than the rounding of sums in another order.
fn assert_near(found: &Value, expected: &Value) {
    match (found, expected) {
        (Value::Array(found), Value::Array(expected)) => {
            assert_eq!(found.len(), expected.len());
            found.iter().zip(expected).for_each(|(a, b)| assert_near(a, b));
        }
        (Value::Object(found), Value::Object(expected)) => {
            assert!(found.keys().eq(expected.keys()), "{found:?} and {expected:?}");
            found.values().zip(expected.values()).for_each(|(a, b)| assert_near(a, b));
        }
        (Value::Number(found), Value::Number(expected)) => {
            let [a, b] = [found, expected].map(|x| x.as_f64().unwrap());
            assert!((a - b).abs() <= 3e-6 * b.abs(), "{a} and {b}");
        }
        _ => assert_eq!(found, expected),
    }
}
