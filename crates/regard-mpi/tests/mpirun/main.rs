//! Jobs of real ranks. This program starts itself with `mpirun`, in a role for each test, and looks at how the job ends.

#![expect(clippy::print_stdout, reason = "a test harness, and ranks that say what they see")]

mod roles;

use std::fs::{self, File};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

/// A variable that the processes of a job have, and no others.
const MARK: &str = "REGARD_MPI_JOB";

fn main() {
    // Arguments of the test harness, such as `--quiet`, are not roles.
    if let Some(role) = std::env::var_os(MARK).and(std::env::args().nth(1)) {
        return roles::play(&role);
    }
    let tests: [(&str, fn()); 9] = [
        ("every_call_brings_what_the_others_have", every_call),
        ("long_transfers_take_several_calls", long_transfers),
        ("misuse_is_refused_and_ranks_go_on", misuse),
        ("a_bound_rank_is_warned", bound),
        ("a_stopped_rank_ends_the_others_at_their_deadline", stopped),
        ("a_rank_that_sleeps_ends_in_an_abort", sleeping),
        ("a_shift_ends_at_its_deadline", no_neighbor),
        ("a_rank_that_leaves_early_hangs_nobody", early),
        ("a_panic_ends_the_job", panics),
    ];
    for (name, test) in tests {
        let start = Instant::now();
        test();
        println!("test {name} ... ok, {:.1} s", start.elapsed().as_secs_f64());
    }
}

/// How a job ended, and what its ranks said.
struct Ended {
    status: ExitStatus,
    text: String,
}

impl Ended {
    fn ok(&self) {
        assert!(self.status.success(), "{}: {}", self.status, self.text);
    }

    /// One rank at least said all of this in a line. The launcher may end the others before they say anything.
    fn says(&self, parts: &[&str]) {
        let says = |line: &str| parts.iter().all(|part| line.contains(part));
        assert!(self.text.lines().any(says), "no line with {parts:?} in: {}", self.text);
    }
}

fn every_call() {
    for ranks in 1..=4 {
        job(ranks, &["--bind-to", "none"], "calls").ok();
    }
}

fn long_transfers() {
    job(3, &["--bind-to", "none"], "long").ok();
}

fn misuse() {
    job(3, &[], "misuse").ok();
    let ended = job(2, &[], "unequal");
    ended.says(&["exchange on rank 0", "rank 1 sends 3 bytes, and 4 are expected"]);
    assert_eq!(ended.status.code(), Some(5), "{}", ended.text);
}

fn bound() {
    let processors = std::thread::available_parallelism().expect("a number").get();
    let ended = job(1, &["--bind-to", "core"], "bound");
    ended.ok();
    let own =
        ended.text.lines().find_map(|line| line.strip_prefix("processors: ")).expect("a line");
    let own: usize = own.parse().expect("a number");
    if own < processors {
        ended.says(&["rank 0 may use", "mpirun --bind-to none"]);
    }
}

fn stopped() {
    let ended = job(3, &[], "stopped");
    ended.says(&["MPI_Iallgatherv on rank", " s, the deadline"]);
    ended.says(&["again: gather on rank", "an earlier call has failed"]);
    assert_eq!(ended.status.code(), Some(3), "{}", ended.text);
}

fn sleeping() {
    let ended = job(2, &[], "sleeping");
    ended.says(&["MPI_Iallgatherv on rank 0", " s, the deadline"]);
    assert_eq!(ended.status.code(), Some(7), "{}", ended.text);
}

fn no_neighbor() {
    let ended = job(2, &[], "no-neighbor");
    ended.says(&["MPI_Isend to rank 1, MPI_Irecv from rank 1 on rank 0", " s, the deadline"]);
    assert_eq!(ended.status.code(), Some(3), "{}", ended.text);
}

fn early() {
    let ended = job(2, &[], "early");
    assert!(!ended.status.success(), "{}", ended.text);
}

fn panics() {
    let ended = job(2, &[], "panics");
    ended.says(&["a panic of rank 1"]);
    assert!(!ended.status.success(), "{}", ended.text);
}

/// Runs a job to its end, which must come by itself, and leave no process behind.
fn job(ranks: usize, options: &[&str], role: &str) -> Ended {
    let mark = format!("{}-{role}-{ranks}", std::process::id());
    let path = format!("{}/{role}-{ranks}.txt", env!("CARGO_TARGET_TMPDIR"));
    let output = File::create(&path).expect("a file for what is said");
    let mut launcher = Command::new("mpirun");
    launcher.args(["-n", &ranks.to_string(), "--oversubscribe"]).args(options);
    launcher.arg(std::env::current_exe().expect("a path")).arg(role);
    // Containers are often root; Open MPI asks for both.
    let root = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"];
    launcher.envs(root.map(|name| (name, "1"))).env(MARK, &mark);
    launcher.stdout(output.try_clone().expect("the file")).stderr(output);
    let mut launcher = launcher.spawn().expect("mpirun, of the package openmpi-bin");
    // Far more than any deadline below: what is still there then hangs.
    let patience = Instant::now() + Duration::from_secs(120);
    let status = loop {
        if let Some(status) = launcher.try_wait().expect("a child") {
            break Some(status);
        }
        if Instant::now() > patience {
            launcher.kill().expect("a child");
            break None;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let text = fs::read_to_string(&path).expect("what was said");
    let status = status.unwrap_or_else(|| panic!("{role} with {ranks} ranks hangs: {text}"));
    // What the launcher has killed may take a moment to go.
    let patience = Instant::now() + Duration::from_secs(10);
    while !alive(&mark).is_empty() && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(20));
    }
    let left = alive(&mark);
    assert!(left.is_empty(), "{role} with {ranks} ranks has left processes {left:?}: {text}");
    Ended { status, text }
}

/// Processes of a job. Zombies are not: nothing but their exit code is left of them, until their parent asks for it.
fn alive(mark: &str) -> Vec<String> {
    let variable = format!("{MARK}={mark}");
    let belongs = |id: &String| {
        let read = |file: &str| fs::read(format!("/proc/{id}/{file}")).unwrap_or_default();
        let environment = read("environ");
        let mut variables = environment.split(|byte| *byte == 0);
        let stat = String::from_utf8_lossy(&read("stat")).into_owned();
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        variables.any(|other| other == variable.as_bytes())
            && !matches!(state, None | Some('Z' | 'X'))
    };
    let entries = fs::read_dir("/proc").expect("Linux").flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.parse::<u32>().is_ok()).filter(belongs).collect()
}
