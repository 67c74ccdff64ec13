//! What a user of the microscope can type, and what they see.

use regard_scope::{Inputs, Labels, Layer, LayerData, Trace};
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
        Layer {
            layer,
            kind: "self".into(),
            rows,
            cols,
            data: LayerData::Inputs(heads),
            value_norms: Vec::new(),
        }
    };
    let words = ["好久", "不见", "long", "time", "see"].map(String::from).to_vec();
    let axes = BTreeMap::from([("words".to_string(), Labels::new("word", words))]);
    Trace {
        title: "a greeting".into(),
        axes,
        layers: (0..2).map(layer).collect(),
        ..Trace::default()
    }
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
    assert!(kept["window 1"]["mean"].as_f64() <= kept["top-1"]["mean"].as_f64());
    assert!(folder.told("audit q.npy k.npy").contains("window 64"));
    let same = folder.json("diff trace.safetensors trace.safetensors");
    assert!(same.iter().all(|head| head["js_max"].as_f64() < Some(1e-9)), "{same:?}");
}

/// What a smaller KV cache costs: nothing in f32, little in bf16, more in 8 bits.
#[test]
fn types_of_kv_caches_are_compared() {
    let folder = Folder::new("caches");
    std::fs::write(folder.0.join("text.txt"), "Once upon a time there was a girl").expect("a file");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/stories260K");
    let cost = |dtype: &str| {
        let heads = folder.json(&format!("diff {model} @text.txt --kv-dtype {dtype}"));
        assert_eq!(heads.len(), 40, "5 layers of 8 heads");
        let each = heads.iter().map(|head| head["js_max"].as_f64().expect("a number"));
        each.fold(0.0, f64::max)
    };
    let [exact, half, eight] = ["f32", "bf16", "fp8_e4m3"].map(cost);
    assert!(exact < 1e-9 && half > exact && eight > half && eight < 0.2, "{exact} {half} {eight}");
    let output = folder.regard("diff zh-en text --kv-dtype int8");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("give a language model"), "{error}");
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
        ("look trace.safetensors --layer 7", vec!["no such head", "layers 0 to 1"]),
        (
            "look trace.safetensors --out picture.gif",
            vec!["--out picture.gif", ".svg, .png or .html"],
        ),
        ("look trace.safetensors --layer 0 --head 0 --rows 3..9", vec!["rows 3..9", "0..5"]),
        ("look trace.safetensors --rows 5", vec!["--rows", "100..200"]),
        ("look trace.safetensors --view zoom", vec!["--view zoom", "--serve"]),
        ("look trace.safetensors --mask causal", vec!["--mask", "a trace contains it"]),
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

/// Names, words and kinds that would move a cursor, set a title or turn a line around.
#[test]
fn nothing_that_controls_reaches_the_terminal() {
    let folder = Folder::new("evil");
    let evil = "\u{1b}]0;x\u{7}\u{9b}2J\u{202e}";
    let mut inputs = trace();
    inputs.title = evil.into();
    inputs.layers.iter_mut().for_each(|layer| layer.kind = evil.into());
    let words = Labels::new(evil, (0..5).map(|i| format!("{i}{evil}")).collect());
    inputs.axes.insert("words".into(), words);
    inputs.save(&folder.0.join("inputs.safetensors")).expect("a trace");
    let weights = regard_scope::Weights { values: vec![0.2; 50], shape: [2, 5, 5] };
    inputs.layers.truncate(1);
    inputs.layers[0].data = LayerData::Weights(weights);
    inputs.save(&folder.0.join("weights.safetensors")).expect("a trace");
    std::fs::write(folder.0.join(format!("{evil}.safetensors")), "no trace").expect("a file");
    for args in [
        "look inputs.safetensors",
        "look inputs.safetensors --layer 0 --head 0",
        "look inputs.safetensors --layer 0 --head 0 --view flow",
        "look weights.safetensors --layer 7",
        "stats inputs.safetensors",
        "stats inputs.safetensors --view entropy",
        "audit inputs.safetensors",
        "audit weights.safetensors",
        "diff inputs.safetensors inputs.safetensors",
        "diff weights.safetensors weights.safetensors",
        "diff weights.safetensors trace.safetensors",
        &format!("look {evil}.safetensors"),
        &format!("stats {evil}.npy"),
        &format!("generate {evil}"),
    ] {
        let output = folder.regard(args);
        for text in [output.stdout, output.stderr] {
            let text = String::from_utf8(text).expect("text");
            let bad = text.chars().find(|c| (c.is_control() && *c != '\n') || *c == '\u{202e}');
            assert_eq!(bad, None, "{args}: {text:?}");
        }
    }
}

#[test]
fn texts_that_are_not_utf8_are_named_with_their_line() {
    let folder = Folder::new("latin");
    let file =
        |name: &str, bytes: &[u8]| std::fs::write(folder.0.join(name), bytes).expect("a file");
    file("latin.txt", b"one\ntwo\ngar\xe7on\n");
    file("long.txt", &vec![b'a'; (1 << 20) + 1]);
    for (args, parts) in [
        ("look q.npy k.npy --q-labels latin.txt", vec!["latin.txt: line 3", "0xe7", "UTF-8"]),
        ("classify nothing @latin.txt", vec!["latin.txt: line 3", "0xe7", "UTF-8"]),
        ("look nothing @latin.txt", vec!["latin.txt: line 3", "0xe7", "UTF-8"]),
        ("look nothing @long.txt", vec!["long.txt: 1048577 bytes", "at most 1048576"]),
        ("classify nothing @long.txt", vec!["long.txt: 1048577 bytes", "at most 1048576"]),
    ] {
        let error = folder.regard(args).stderr;
        let error = String::from_utf8_lossy(&error);
        for part in parts {
            assert!(error.contains(part), "{args}: no {part:?} in {error}");
        }
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

/// A served map, and its own address.
struct Served {
    server: Serving,
    _out: BufReader<std::process::ChildStdout>,
    port: u16,
    token: String,
}

impl Served {
    /// `before` goes before the command, as in `ulimit -n 20;`.
    fn new(folder: &Path, before: &str) -> Self {
        let mut command = Command::new("sh");
        let script = format!("{before} exec \"$0\" look q.npy k.npy --mask causal --serve");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_regard")]).current_dir(folder);
        let mut server = Serving(command.stdout(Stdio::piped()).spawn().expect("it starts"));
        let mut line = String::new();
        let mut out = BufReader::new(server.0.stdout.take().expect("its output"));
        out.read_line(&mut line).expect("an address");
        let rest = line.strip_prefix("http://127.0.0.1:").expect("an address");
        let (port, rest) = rest.split_once('/').expect("a port");
        let (token, _) = rest.split_once("/#site=").expect("a token");
        assert!(token.len() == 32 && token.bytes().all(|c| c.is_ascii_hexdigit()), "{line}");
        let (port, token) = (port.parse().expect("a port"), token.to_string());
        Self { server, _out: out, port, token }
    }

    fn connect(&self) -> std::io::Result<TcpStream> {
        let stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(std::time::Duration::from_secs(60)))?;
        Ok(stream)
    }

    /// The head of the answer, in small letters, and what follows; `path` as it is asked for.
    fn ask(&self, path: &str, headers: &str) -> std::io::Result<(String, Vec<u8>)> {
        let mut stream = self.connect()?;
        write!(stream, "GET {path} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n")?;
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes)?;
        let end = bytes.windows(4).position(|w| w == b"\r\n\r\n").map_or(bytes.len(), |at| at + 4);
        let body = bytes.split_off(end);
        Ok((String::from_utf8_lossy(&bytes).to_lowercase(), body))
    }

    fn host(&self) -> String {
        format!("Host: 127.0.0.1:{}\r\n", self.port)
    }

    /// As its own page asks.
    fn get(&self, path: &str) -> (String, Vec<u8>) {
        self.ask(&format!("/{}/{path}", self.token), &self.host()).expect("an answer")
    }

    fn json(&self, path: &str) -> Value {
        let (head, body) = self.get(path);
        assert!(head.starts_with("http/1.1 200"), "{path}: {head}");
        serde_json::from_slice(&body).expect(path)
    }
}

#[test]
fn a_map_is_served() {
    let folder = Folder::new("serve");
    let served = Served::new(&folder.0, "");
    assert!(served.get("").1.starts_with(b"<!doctype html>"));
    let info = served.json("info.json?site=1");
    assert_eq!((&info["q_len"], &info["sites"][1]["head"]), (&50.into(), &1.into()));
    let (head, body) = served.get("tile/1/max/dark/6/0/0.png");
    assert!(head.contains("image/png") && body.starts_with(b"\x89PNG"), "{head}");
    let pair = served.json("weight/1/20/3");
    assert!(pair["weight"].as_f64() > Some(0.0) && pair["hidden"] == false);
    assert_eq!(served.json("weight/1/3/20")["hidden"], true);
    assert_eq!(served.json("row/0/9")["top"].as_array().map(Vec::len), Some(8));
    assert_eq!(served.json("labels/0/k/48/99")["labels"], serde_json::json!(["48", "49"]));
    for path in ["tile/9/max/dark/6/0/0.png", "tile/0/max/dark/99/0/0.png", "weight/0/50/0", "../x"]
    {
        assert!(served.get(path).0.starts_with("http/1.1 404"), "{path}");
    }
}

#[test]
fn a_map_is_served_to_its_reader_alone() {
    let folder = Folder::new("alone");
    let served = Served::new(&folder.0, "");
    let Served { port, token, .. } = &served;
    let (own, page) = (served.host(), format!("/{token}/"));
    let status = |path: &str, headers: &str| {
        let (head, _) = served.ask(path, headers).expect("an answer");
        assert!(head.contains("\r\ncross-origin-resource-policy: same-origin\r\n"), "{head}");
        head["http/1.1 ".len()..][..3].to_string()
    };
    assert_eq!(status(&page, &own), "200");
    let here = format!("{own}Origin: http://localhost:{port}\r\n");
    assert_eq!(status(&page, &here), "200");
    // Another user of this machine.
    let wrong = format!("/{}/", "0".repeat(32));
    for path in ["/", "/info.json", &wrong, &page[..20], &format!("/{token}")] {
        assert_eq!(status(path, &own), "403", "{path}");
    }
    // Another page in the same browser.
    for headers in [
        String::new(),
        "Host: elsewhere.example\r\n".into(),
        "Host: 127.0.0.1:1\r\n".into(),
        "Host: 127.0.0.1\r\n".into(),
        format!("{own}Origin: https://elsewhere.example\r\n"),
        format!("{own}Origin: http://localhost:1\r\n"),
        format!("{own}Origin: null\r\n"),
    ] {
        assert_eq!(status(&page, &headers), "403", "{headers}");
    }
}

/// Opens connections that say nothing.
fn idle(served: &Served, count: usize) -> Vec<TcpStream> {
    (0..count).map(|_| served.connect().expect("a connection")).collect()
}

#[test]
fn a_server_out_of_descriptors_waits_for_some() {
    let folder = Folder::new("descriptors");
    let served = Served::new(&folder.0, "ulimit -n 24;");
    let idle = idle(&served, 60);
    // Clock ticks, usually of 10 ms, that it has worked: fields 14 and 15 (proc(5)), the name in brackets is the second.
    let worked = || -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", served.server.0.id()));
        let stat = stat.expect("it is there");
        let fields: Vec<_> = stat.rsplit(')').next().expect("fields").split(' ').collect();
        fields[12..14].iter().map(|ticks| ticks.parse::<u64>().expect("ticks")).sum()
    };
    std::thread::sleep(std::time::Duration::from_millis(500)); // its first survey ends meanwhile
    let before = worked();
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert!(worked() - before < 50, "{} ticks in a second", worked() - before);
    drop(idle);
    assert_eq!(served.json("info.json")["q_len"], 50);
}

#[test]
fn a_server_refuses_more_connections_than_it_has_room_for() {
    let folder = Folder::new("busy");
    let served = Served::new(&folder.0, "");
    let idle = idle(&served, 256);
    // Who takes connections in their order takes this one last.
    let mut answer = String::new();
    served.connect().expect("a connection").read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    drop(idle);
    let free = || served.ask(&format!("/{}/", served.token), &served.host());
    let free = || free().is_ok_and(|(head, _)| head.starts_with("http/1.1 200"));
    let mut tries = (0..100).map(|_| std::thread::sleep(std::time::Duration::from_millis(50)));
    assert!(tries.any(|()| free()), "it never has room again");
}
