//! What a user of the microscope can type, and what they see.

use regard_scope::{Inputs, Labels, Layer, Seen, Trace};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// A folder of its own for each test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("regard-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        let folder = Self(path);
        folder.array("q.npy", [2, 50, 8], 0.37);
        folder.array("k.npy", [2, 50, 8], 0.11);
        trace().save(&folder.0.join("trace.safetensors")).expect("a trace");
        folder
    }

    /// An array as NumPy saves it.
    fn array(&self, name: &str, [heads, len, dim]: [usize; 3], step: f32) {
        let header = format!(
            "{{'descr': '<f4', 'fortran_order': False, 'shape': ({heads}, {len}, {dim}), }}"
        );
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        let padded = format!("{header:<117}\n");
        bytes.extend(118u16.to_le_bytes());
        bytes.extend(padded.as_bytes());
        let numbers = (0..heads * len * dim).map(|i| (i as f32 * step).sin() * 2.0);
        bytes.extend(numbers.flat_map(f32::to_le_bytes));
        std::fs::write(self.0.join(name), bytes).expect("a file");
    }

    fn regard(&self, args: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
        command.args(args.split(' ')).current_dir(&self.0).env_remove("CLICOLOR_FORCE");
        command.output().expect("it starts")
    }

    fn told(&self, args: &str) -> String {
        let output = self.regard(args);
        assert!(output.status.success(), "{args}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    fn json(&self, args: &str) -> Vec<Value> {
        let text = self.told(&format!("{args} --format json"));
        text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Two layers of two heads over five words.
fn trace() -> Trace {
    let numbers =
        |n: usize, step: f32| (0..n).map(|i| (i as f32 * step).cos()).collect::<Vec<f32>>();
    let layer = |layer: usize| {
        let (q, k) = (numbers(40, 0.3 + layer as f32), numbers(40, 0.7));
        let heads = Inputs::new((q, [2, 5, 4]), (k, [2, 5, 4]), "causal").expect("a small problem");
        let (rows, cols) = ("words".to_string(), "words".to_string());
        Layer { layer, kind: "self".into(), rows, cols, seen: Seen::Inputs(heads) }
    };
    let words = ["好久", "不见", "long", "time", "see"].map(String::from).to_vec();
    let axes = BTreeMap::from([("words".to_string(), Labels::new("word", words))]);
    Trace { title: "a greeting".into(), axes, layers: (0..2).map(layer).collect() }
}

#[test]
fn heads_are_drawn_in_the_terminal() {
    let folder = Folder::new("terminal");
    let grid = folder.told("look trace.safetensors --width 80");
    assert!(grid.contains("a greeting") && grid.contains("layer"), "{grid}");
    let heat = folder.told("look trace.safetensors --layer 1 --head 0");
    for part in ["layer 1 head 0", "好久", "see", "weight"] {
        assert!(heat.contains(part), "{part}: {heat}");
    }
    let flow = folder.told("look trace.safetensors --head 1 --layer 0 --view flow --rows 2..4");
    assert!(flow.contains("long") && flow.contains("time"), "{flow}");
    folder.array("long.npy", [1, 3000, 2], 0.01);
    let pooled = folder.told("look long.npy long.npy --mask causal --width 80");
    assert!(pooled.contains("2500") && pooled.contains("each cell is the largest of"), "{pooled}");
    let some = folder.told("look long.npy long.npy --rows 2000..2040 --width 80");
    assert!(some.contains("2010") && some.contains("2030"), "{some}");
    let long = folder.told("look q.npy k.npy --mask causal --head 0 --width 60");
    assert!(long.lines().all(|line| line.chars().count() <= 60), "{long}");
    let weights = &folder.json("look trace.safetensors --layer 0 --head 0")[0];
    assert_eq!(weights["weights"][0][0], 1.0);
    assert!(weights["weights"][0][1].is_null());
    assert_eq!(weights["rows"][1], "不见");
}

#[test]
fn pictures_and_pages_are_written_whole() {
    let folder = Folder::new("files");
    let read = |name: &str| std::fs::read(folder.0.join(name)).expect(name);
    folder.told("look trace.safetensors --layer 0 --head 0 --out head.svg");
    assert!(read("head.svg").starts_with(b"<svg"));
    folder.told("look trace.safetensors --out all.png --theme dark --width 500");
    assert!(read("all.png").starts_with(b"\x89PNG"));
    folder.told("look trace.safetensors --out page.html");
    folder.told("look q.npy k.npy --head 1 --view zoom --out zoom.html");
    for name in ["page.html", "zoom.html"] {
        let page = String::from_utf8(read(name)).expect("text");
        assert!(page.starts_with("<!doctype html>") && !page.contains("/*DATA*/"), "{name}");
    }
    folder.told("stats trace.safetensors --view entropy --out entropy.svg");
    assert!(read("entropy.svg").starts_with(b"<svg"));
    let left = std::fs::read_dir(&folder.0).expect("a folder");
    let hidden =
        left.filter(|f| f.as_ref().is_ok_and(|f| f.file_name().as_encoded_bytes()[0] == b'.'));
    assert_eq!(hidden.count(), 0);
}

#[test]
fn numbers_are_told_for_people_and_programs() {
    let folder = Folder::new("numbers");
    let stats = folder.json("stats trace.safetensors");
    assert_eq!(stats.len(), 4);
    assert!(stats.iter().all(|s| s["entropy"].as_f64() > Some(0.0) && s["queries"] == 5));
    let text = folder.told("stats q.npy k.npy --mask causal");
    assert!(
        text.lines().all(|line| line.chars().count() <= 100) && text.contains("entropy"),
        "{text}"
    );
    let audit = folder.json("audit trace.safetensors --windows 1,8 --top 1 --lsh");
    assert_eq!(audit.len(), 4);
    let kept = &audit[0]["kept"];
    assert!((kept["window 8"]["worst"].as_f64().expect("a number") - 1.0).abs() < 1e-5, "{kept}");
    assert!(kept["window 1"]["mean"].as_f64() <= kept["top 1"]["mean"].as_f64());
    assert!(folder.told("audit q.npy k.npy").contains("window 64"));
    let same = folder.json("diff trace.safetensors trace.safetensors");
    assert!(same.iter().all(|head| head["js_max"].as_f64() < Some(1e-9)), "{same:?}");
}

#[test]
fn mistakes_are_named_with_their_remedy() {
    let folder = Folder::new("mistakes");
    folder.array("wide.npy", [2, 50, 9], 0.1);
    for (args, parts) in [
        ("look nothing.safetensors", vec!["nothing.safetensors", "No such file"]),
        ("look q.npy", vec!["q.npy", "q.npy k.npy"]),
        ("look q.npy wide.npy", vec!["features", "8", "9"]),
        ("look k.npy trace.safetensors", vec!["one trace", "q.npy k.npy"]),
        ("look trace.safetensors --layer 7", vec!["no such head", "layers up to 1"]),
        (
            "look trace.safetensors --out picture.gif",
            vec!["--out picture.gif", ".svg, .png or .html"],
        ),
        ("look trace.safetensors --layer 0 --head 0 --rows 3..9", vec!["rows 3..9", "0..5"]),
        ("look trace.safetensors --rows 5", vec!["--rows", "100..200"]),
        ("look trace.safetensors --view zoom", vec!["--view zoom", "--serve"]),
        ("look trace.safetensors --mask causal", vec!["--mask", "a trace says that itself"]),
        ("look trace.safetensors --layer 0 --out x.html", vec!["--layer", "all heads"]),
        ("look trace.safetensors --out x.svg --format json", vec!["--out", "give one"]),
        ("stats trace.safetensors --view entropy --out x.html", vec!["x.html", ".svg or .png"]),
        ("look q.npy k.npy --mask caused", vec!["--mask", "`caused`"]),
        ("stats trace.safetensors --view speed", vec!["speed", "entropy"]),
        ("audit trace.safetensors --pattern windw", vec!["--pattern", "`windw`"]),
        ("audit q.npy k.npy --mask window+3 --lsh", vec!["--mask"]),
    ] {
        let output = folder.regard(args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{args}");
        for part in parts {
            assert!(error.contains(part), "{args}: no {part:?} in {error}");
        }
        assert!(!error.contains("panicked"), "{args}: {error}");
    }
}

/// Ends the server with the test.
struct Serving(Child);

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn get(port: &str, host: &str, path: &str) -> (String, Vec<u8>) {
    let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).expect("a server");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
        .expect("sent");
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("an answer");
    let end = bytes.windows(4).position(|w| w == b"\r\n\r\n").expect("headers") + 4;
    (String::from_utf8_lossy(&bytes[..end]).to_lowercase(), bytes.split_off(end))
}

fn serve(folder: &Path) -> (Serving, String, impl Read) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
    command.args(["look", "q.npy", "k.npy", "--mask", "causal", "--serve"]).current_dir(folder);
    let mut server = Serving(command.stdout(Stdio::piped()).spawn().expect("it starts"));
    let mut line = String::new();
    let mut out = BufReader::new(server.0.stdout.take().expect("its output"));
    out.read_line(&mut line).expect("an address");
    let port = line.trim().rsplit(':').next().and_then(|rest| rest.split('/').next());
    (server, port.expect("a port").to_string(), out)
}

#[test]
fn a_map_is_served_to_this_machine_alone() {
    let folder = Folder::new("serve");
    let (_server, port, _out) = serve(&folder.0);
    let own = format!("127.0.0.1:{port}");
    let json = |path: &str| -> Value {
        let (head, body) = get(&port, &own, path);
        assert!(head.starts_with("http/1.1 200"), "{path}: {head}");
        serde_json::from_slice(&body).expect(path)
    };
    assert!(get(&port, &own, "/").1.starts_with(b"<!doctype html>"));
    let info = json("/info.json?site=1");
    assert_eq!((&info["q_len"], &info["sites"][1]["head"]), (&50.into(), &1.into()));
    let (head, body) = get(&port, &own, "/tile/1/max/dark/6/0/0.png");
    assert!(head.contains("image/png") && body.starts_with(b"\x89PNG"), "{head}");
    let pair = json("/weight/1/20/3");
    assert!(pair["weight"].as_f64() > Some(0.0) && pair["hidden"] == false);
    assert_eq!(json("/weight/1/3/20")["hidden"], true);
    assert_eq!(json("/row/0/9")["top"].as_array().map(Vec::len), Some(8));
    assert_eq!(json("/labels/0/k/48/99")["labels"], serde_json::json!(["48", "49"]));
    for path in
        ["/tile/9/max/dark/6/0/0.png", "/tile/0/max/dark/99/0/0.png", "/weight/0/50/0", "/../x"]
    {
        assert!(get(&port, &own, path).0.starts_with("http/1.1 404"), "{path}");
    }
    assert!(get(&port, "elsewhere.example", "/").0.starts_with("http/1.1 403"));
}
