//! Training by the command: learned by heart, killed, gone on with.

mod toy;

use regard_train::data::Column;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn regard(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_regard")).args(args).output().expect("it starts")
}

/// What a program said, which must have ended well.
fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// The sentences of Tatoeba.
fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tatoeba-zh-en")
}

fn scratch(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("regard-cli-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    path
}

/// The file of its settings.
fn toy(name: &str) -> PathBuf {
    let settings = r"
model = { d_model = 16, n_layers = 1, decoder_layers = 1, heads = 2, d_ff = 16 }
training = { steps = 40, batch_tokens = 40, log_every = 1, checkpoint_every = 4, validate_every = 10 }
";
    toy::write(&scratch(name), settings)
}

/// A run of the toy.
fn toy_run(toy: &Path, out: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
    command.arg("train").arg(toy).arg("--out").arg(out).stdout(Stdio::null());
    command
}

/// A file that is always full.
fn full() -> Stdio {
    std::fs::File::options().write(true).open("/dev/full").expect("a full disk").into()
}

#[test]
fn a_run_outlives_its_log() {
    let toy = toy("log");
    let run = |name: &str| toy.with_file_name(name);
    let model = |name: &str| std::fs::read(run(name).join("model/model.safetensors")).unwrap();
    let heard = toy_run(&toy, &run("heard")).output().unwrap();
    let log = String::from_utf8_lossy(&heard.stderr).into_owned();
    assert!(heard.status.success() && log.contains("step 40/40"), "{log}");
    assert!(
        log.contains("warning: the warm-up of 400 steps is longer than the run of 40"),
        "{log}"
    );
    let quiet = toy_run(&toy, &run("quiet")).arg("-q").output().unwrap();
    assert!(quiet.status.success() && quiet.stderr.is_empty(), "{quiet:?}");
    assert!(toy_run(&toy, &run("full")).stderr(full()).status().unwrap().success());
    let mut child = toy_run(&toy, &run("left")).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    assert!(child.wait().unwrap().success());
    assert_eq!(model("heard"), model("full"));
    assert_eq!(model("heard"), model("left"));
    // An error that nobody hears is still one, and no panic.
    let mut refused = Command::new(env!("CARGO_BIN_EXE_regard"));
    let status = refused.args(["generate", "/nothing/there"]).stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(3));
    std::fs::remove_dir_all(toy.parent().unwrap()).unwrap();
}

/// What the checkpoint of a run says of itself.
fn progress(run: &Path) -> Value {
    let bytes = std::fs::read(run.join("last.safetensors")).expect("there is a checkpoint");
    let json: Value = serde_json::from_slice(&bytes[8..8 + header(&bytes)]).expect("a header");
    serde_json::from_str(json["__metadata__"]["progress"].as_str().expect("an entry"))
        .expect("progress")
}

/// Waits until a run has made a step and kept it.
fn wait_for_a_step(run: &Path) {
    let last = run.join("last.safetensors");
    while !last.exists() || progress(run)["step"] == 0 {
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn send(signal: &str, process: u32) {
    let sent = Command::new("kill").args([signal, &process.to_string()]).status().expect("kill");
    assert!(sent.success());
}

#[test]
fn a_terminal_that_is_closed_leaves_a_checkpoint_unless_nobody_minds() {
    let toy = toy("hangup");
    let run = |name: &str| toy.with_file_name(name);
    let long = ["--set", "training.steps=1000000", "--set", "training.checkpoint_every=1"];
    let closed = toy_run(&toy, &run("closed"));
    // Also where the tests themselves run under nohup.
    let mut command = Command::new("env");
    command
        .arg("--default-signal=HUP")
        .arg(closed.get_program())
        .args(closed.get_args())
        .args(long);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_a_step(&run("closed"));
    send("-HUP", child.id());
    drop(child.stderr.take());
    assert!(child.wait().unwrap().success());
    // As nohup begins a program.
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' HUP; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_regard"), "train"]);
    shell.arg(&toy).arg("--out").arg(run("nohup")).args(long);
    let mut child = shell.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_for_a_step(&run("nohup"));
    send("-HUP", child.id());
    let before = progress(&run("nohup"))["step"].as_u64().unwrap();
    while progress(&run("nohup"))["step"].as_u64().unwrap() < before + 20 {
        std::thread::sleep(Duration::from_millis(10));
        assert!(child.try_wait().unwrap().is_none(), "the signal was to be ignored");
    }
    send("-TERM", child.id());
    assert!(child.wait().unwrap().success());
    std::fs::remove_dir_all(toy.parent().unwrap()).unwrap();
}

#[test]
fn a_run_past_its_steps_says_so_and_names_the_model_that_is_there() {
    let toy = toy("past");
    let run = toy.with_file_name("run");
    assert!(toy_run(&toy, &run).stderr(Stdio::null()).status().unwrap().success());
    let resume = || regard(&["train", "--resume", run.to_str().unwrap()]);
    let told = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let again = resume();
    assert!(again.status.success(), "{}", told(&again));
    assert!(told(&again).contains("nothing to do: 40 steps are made, and 40 were asked for"));
    assert!(told(&again).contains(run.join("model").to_str().unwrap()), "{}", told(&again));
    std::fs::remove_dir_all(run.join("model")).unwrap();
    let again = resume();
    assert_eq!(again.status.code(), Some(3));
    assert!(told(&again).contains("there is no model"), "{}", told(&again));
    std::fs::remove_dir_all(toy.parent().unwrap()).unwrap();
}

#[test]
fn files_that_are_no_text_are_told_with_their_line_and_cannot_control_a_terminal() {
    let folder = scratch("no-text");
    std::fs::create_dir_all(&folder).unwrap();
    let put = |name: &str, bytes: &[u8]| {
        std::fs::write(folder.join(name), bytes).unwrap();
        folder.join(name).to_str().unwrap().to_owned()
    };
    let test = put("test.tsv", b"a\tb\nc\td\n");
    let settings = put("settings.toml", b"seed = 1\n\n# \xff\n");
    let lines = put("lines.txt", b"b\nd \xff\n");
    let evil = put("evil.toml", b"task = \"\\u001b]0;owned\\u0007\\u001b[31mred\"\n");
    let row = put("row.tsv", b"a\tb\n\x1b[2Jred\n");
    let label = put("keys.jsonl", b"{\"\\u001b[31m\": 1}\n");
    for (args, told) in [
        (vec!["train", &settings, "--dry-run"], "settings.toml, line 3: not UTF-8"),
        (vec!["eval", "--hypotheses", &lines, "--test", &test], "lines.txt, line 2: not UTF-8"),
        (vec!["train", &evil, "--dry-run"], "[31mred"),
        (vec!["eval", "--hypotheses", &lines, "--test", &row], "row.tsv, line 2: "),
        (vec!["eval", "--hypotheses", &lines, "--test", &label, "--columns", "a,b"], "[31m"),
    ] {
        let output = regard(&args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(3), "{error}");
        assert!(error.contains(told), "{error:?} / {told}");
        assert!(!error.contains(['\u{1b}', '\u{7}']), "{error:?}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_full_disk_leaves_the_checkpoint_whole_and_is_told_with_the_file() {
    let toy = toy("disk");
    let run = |name: &str| toy.with_file_name(name);
    for name in ["room", "full"] {
        let out = run(name);
        let first = toy_run(&toy, &out).args(["--set", "training.steps=20"]).output().unwrap();
        said(&first);
        let settings = std::fs::read_to_string(out.join("settings.toml")).unwrap();
        let settings = settings.replace("\nsteps = 20\n", "\nsteps = 40\n");
        std::fs::write(out.join("settings.toml"), settings).unwrap();
    }
    let last = run("full").join("last.safetensors");
    let before = std::fs::read(&last).unwrap();
    // No file may be larger than 64 blocks of 512 bytes, so a checkpoint ends in the middle.
    let mut shell = Command::new("sh");
    shell.args([
        "-c",
        "trap '' XFSZ; ulimit -f 64; exec \"$@\"",
        "sh",
        env!("CARGO_BIN_EXE_regard"),
    ]);
    let output = shell.args(["train", "--resume"]).arg(run("full")).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{error}");
    assert!(error.contains("full/last.safetensors: File too large"), "{error}");
    assert_eq!(std::fs::read(&last).unwrap(), before);
    let names = std::fs::read_dir(run("full")).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with('.')).collect();
    assert!(left.is_empty(), "{left:?}");
    for name in ["room", "full"] {
        said(&regard(&["train", "--resume", run(name).to_str().unwrap()]));
    }
    let model = |name: &str| std::fs::read(run(name).join("model/model.safetensors")).unwrap();
    assert_eq!(weights(&run("room")), weights(&run("full")));
    assert_eq!(model("room"), model("full"));
    std::fs::remove_dir_all(toy.parent().unwrap()).unwrap();
}

fn begun(data: &Path, out: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
    command.args(["train", "--preset", "tatoeba-tiny", "--data"]).arg(data).arg("--out").arg(out);
    command.args(more).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

#[test]
fn twenty_sentences_are_learned_by_heart() {
    let data = data();
    let out = scratch("heart");
    assert!(begun(&data, &out, &[]).status().unwrap().success());
    let (model, test) = (out.join("model"), data.join("tiny2k.zh-en.tsv.gz"));
    let [model, test] = [&model, &test].map(|path| path.to_str().unwrap());
    let (file, limits) = (out.join("lines.txt"), ["--limit", "21", "-n", "64", "-t", "2"]);
    let judged = ["eval", model, "--test", test, "--format", "json", "-o", file.to_str().unwrap()];
    let score = regard(&[&judged[..], &limits].concat());
    let score: Value = serde_json::from_str(&said(&score)).unwrap();
    assert_eq!(std::fs::read_to_string(&file).unwrap().lines().count(), 21);
    assert!(score["bleu"].as_f64().unwrap() > 95.0, "{score}");

    // Each of the 20 sentences, to any of the translations that it has.
    let mut wanted: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for pair in regard_train::data::pairs(Path::new(test), &[Column::Index(0), Column::Index(1)])
        .unwrap()
        .drain(..21)
    {
        wanted.entry(pair.source).or_default().push(pair.target);
    }
    assert_eq!(wanted.len(), 20);
    let mut args = vec!["translate", model];
    args.extend(wanted.keys().map(String::as_str));
    let lines = said(&regard(&args));
    for (line, (source, targets)) in lines.lines().zip(&wanted) {
        assert!(targets.iter().any(|target| target == line), "{source}: {line}, not {targets:?}");
    }
    assert_eq!(lines.lines().count(), 20);
    let aligned =
        said(&regard(&["translate", model, "好久不见。", "--alignment", "--format", "json"]));
    let aligned: Value = serde_json::from_str(&aligned).unwrap();
    assert!(aligned["alignment"].as_array().unwrap().len() > 3, "{aligned}");
    every_test_set_of_a_run_is_judged(&out, test);
    std::fs::remove_dir_all(&out).unwrap();
}

/// As after a run on several languages.
fn every_test_set_of_a_run_is_judged(run: &Path, test: &str) {
    let file = run.join("settings.toml");
    let settings = std::fs::read_to_string(&file).expect("settings");
    let part = |columns| {
        format!("[[data.parts]]\ntest = \"{test}\"\ncolumns = {columns}\ntarget = \"en\"\n\n")
    };
    let parts = part("[0, 1]") + &part("[1, 0]");
    let settings = settings.replacen("[[data.parts]]", &(parts + "[[data.parts]]"), 1);
    std::fs::write(&file, settings).expect("it is written");
    let judged = ["eval", run.to_str().expect("a name"), "--limit", "2", "--num-beams", "1"];
    let scores = said(&regard(&[&judged[..], &["--format", "json"]].concat()));
    let scores: Vec<Value> =
        scores.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert!(scores.iter().all(|score| score["test"] == test), "{scores:?}");
    let [forth, back] = &scores[..] else { panic!("{scores:?}") };
    assert!(forth["bleu"].as_f64() > back["bleu"].as_f64(), "{scores:?}");
    let refused = regard(&[&judged[..], &["--write", "lines.txt"]].concat());
    assert_eq!(refused.status.code(), Some(3));
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(why.contains("several test sets") && why.contains("--test"), "{why}");
}

/// Everything of a checkpoint but its header, which says how long the run took.
fn weights(run: &Path) -> Vec<u8> {
    let bytes = std::fs::read(run.join("last.safetensors")).expect("there is a checkpoint");
    bytes[8 + header(&bytes)..].to_vec()
}

/// The length of a header of safetensors.
fn header(bytes: &[u8]) -> usize {
    let length = bytes.first_chunk().map(|length| u64::from_le_bytes(*length));
    length.and_then(|length| usize::try_from(length).ok()).expect("a file has a header")
}

#[test]
fn a_run_that_is_killed_ten_times_ends_with_the_same_bits() {
    let data = data();
    let [whole, killed] = ["whole", "killed"].map(scratch);
    let more = ["--set", "training.checkpoint_every=5", "--set", "training.dropout=0.1"];
    let start = Instant::now();
    assert!(begun(&data, &whole, &more).status().unwrap().success());
    let whole_time = start.elapsed();

    let mut child = begun(&data, &killed, &more).spawn().unwrap();
    let mut state = 7u32;
    for _ in 0..10 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Moments all over a run, and the first of them while it begins.
        let share = f64::from(state >> 16) / 65536.0;
        std::thread::sleep(Duration::from_secs_f64(share * whole_time.as_secs_f64() / 4.0));
        let _ = child.kill();
        child.wait().unwrap();
        let last = killed.join("last.safetensors");
        if last.exists() {
            let bytes = std::fs::read(&last).unwrap();
            safetensors_is_whole(&bytes);
        }
        let mut again = Command::new(env!("CARGO_BIN_EXE_regard"));
        let again = if last.exists() {
            again.args(["train", "--resume"]).arg(&killed)
        } else {
            let _ = std::fs::remove_dir_all(&killed);
            again = begun(&data, &killed, &more);
            &mut again
        };
        child = again.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    }
    assert!(child.wait().unwrap().success());
    assert_eq!(weights(&whole), weights(&killed));
    let model = |run: &Path| std::fs::read(run.join("model/model.safetensors")).unwrap();
    assert_eq!(model(&whole), model(&killed));
    let lines =
        |run: &Path| std::fs::read_to_string(run.join("metrics.jsonl")).unwrap().lines().count();
    assert_eq!(lines(&whole), lines(&killed));
    for run in [whole, killed] {
        std::fs::remove_dir_all(&run).unwrap();
    }
}

fn safetensors_is_whole(bytes: &[u8]) {
    let header = header(bytes);
    let json: Value = serde_json::from_slice(&bytes[8..8 + header]).expect("a header is JSON");
    let tensors = json.as_object().into_iter().flatten();
    let end = tensors.filter_map(|(_, tensor)| tensor["data_offsets"][1].as_u64()).max();
    assert_eq!(end, Some((bytes.len() - 8 - header) as u64));
}

#[test]
fn a_signal_leaves_a_checkpoint_and_settings_say_what_is_wrong() {
    let data = data();
    let out = scratch("signal");
    let mut child = begun(&data, &out, &["--set", "training.epochs=100000"]);
    let child = child.stderr(Stdio::piped()).spawn().unwrap();
    let last = out.join("last.safetensors");
    while !last.exists() {
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(300));
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let resume = format!("resume with: regard train --resume {}\n", out.display());
    assert!(told.ends_with(&resume), "{told}");
    // What the checkpoint says of itself: it is of a step after the first, and of all metrics.
    let progress = progress(&out);
    let metrics = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    assert!(progress["step"].as_u64().unwrap() > 0, "{progress}");
    assert_eq!(progress["metrics"].as_u64().unwrap(), metrics.len() as u64);
    assert!(metrics.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()));

    let again = regard(&[
        "train",
        "--preset",
        "tatoeba-tiny",
        "--data",
        data.to_str().unwrap(),
        "--out",
        out.to_str().unwrap(),
    ]);
    let error = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(!again.status.success() && error.contains("--resume"), "{error}");
    let wrong =
        regard(&["train", "--preset", "tatoeba-tiny", "--set", "training.epoch=1", "--dry-run"]);
    let error = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(error.contains("did you mean `epochs`"), "{error}");
    std::fs::remove_dir_all(&out).unwrap();
}
