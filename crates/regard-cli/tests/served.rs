//! `regard serve` as a process, and `regard check --serve` on it.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// Ends with the test.
struct Serving {
    process: Child,
    address: String,
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ended = self.process.kill();
        let _status = self.process.wait();
    }
}

fn serve(model: &Path, more: &[&str]) -> Serving {
    let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--threads", "1"]).args(more).arg(model);
    let mut process = command.stdout(Stdio::piped()).spawn().expect("it starts");
    let mut line = String::new();
    let out = process.stdout.take().expect("its output");
    BufReader::new(out).read_line(&mut line).expect("an address");
    Serving { process, address: line.trim().to_owned() }
}

fn check(servers: &[&Serving], more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
    command.args(["check", "--serve"]).args(servers.iter().map(|server| &server.address));
    command.args(more).output().expect("it starts")
}

fn stories() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/stories260K")
}

#[test]
fn answers_of_replicas_are_the_same_to_the_last_bit() {
    let plain = serve(&stories(), &["--no-prefix-cache"]);
    let other = serve(&stories(), &["--engines", "2", "--max-queued", "8"]);
    let output = check(&[&plain, &other], &[]);
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}{}", String::from_utf8_lossy(&output.stderr));
    assert!(told.contains("128 of 128 answers have the same tokens"), "{told}");
}

#[test]
fn one_weight_that_differs_is_noticed() {
    let folder = std::env::temp_dir().join(format!("regard-served-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    for file in std::fs::read_dir(stories()).expect("a model") {
        let file = file.expect("a file");
        std::fs::copy(file.path(), folder.join(file.file_name())).expect("a copy");
    }
    let weights = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).expect("weights");
    // The sign of the last weight.
    *bytes.last_mut().expect("bytes") ^= 0x80;
    std::fs::write(&weights, bytes).expect("it is written");
    let (right, wrong) = (serve(&stories(), &[]), serve(&folder, &[]));
    let output = check(&[&right, &wrong], &["--format", "json"]);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    let line: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a line");
    let differ = line["differ"].as_array().expect("a list");
    assert!(!differ.is_empty() && differ.iter().all(|one| one[0] == wrong.address.as_str()));
    std::fs::remove_dir_all(folder).expect("it is removed");
}

#[test]
fn what_is_no_server_is_named() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
    let output = command.args(["check", "--serve", "http://127.0.0.1:9"]).output();
    let output = output.expect("it starts");
    assert_eq!(output.status.code(), Some(3));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("http://127.0.0.1:9"), "{error}");
}
