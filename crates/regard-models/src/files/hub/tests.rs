//! Against a server on this machine with the addresses and headers of the Hub.

use super::*;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

#[derive(Default)]
struct World {
    files: BTreeMap<String, Vec<u8>>,
    /// Method, path, and the range that was asked for.
    requests: Vec<(String, String, String)>,
    /// So many bytes of a body, then the connection is closed; once for each number.
    cuts: Vec<usize>,
    /// The checksum of large files is another.
    wrong: bool,
    /// What must be in `Authorization`.
    token: Option<String>,
    no_ranges: bool,
}

struct Server {
    world: Arc<Mutex<World>>,
    hub: Hub,
}

fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn server(name: &str, files: &[(&str, &[u8])]) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec())).collect();
    let world = Arc::new(Mutex::new(World { files, ..World::default() }));
    let of_server = world.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let world = of_server.clone();
            std::thread::spawn(move || drop(answer(&mut stream.unwrap(), &world)));
        }
    });
    let cache = std::env::temp_dir().join(format!("regard-hub-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&cache);
    Server { world, hub: Hub { endpoint, cache, token: None, offline: false, retries: 1 } }
}

/// One request of a connection.
fn answer(stream: &mut TcpStream, world: &Mutex<World>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or(Ok(String::new()))?;
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let mut words = first.split(' ').map(str::to_owned);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let range = headers.get("range").cloned().unwrap_or_default();
    let mut world = world.lock().unwrap();
    world.requests.push((method.clone(), path.clone(), range.clone()));
    let say = |stream: &mut TcpStream, status: &str, headers: &str, body: &[u8], size: usize| {
        write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {size}\r\nConnection: close\r\n")?;
        write!(stream, "{headers}\r\n")?;
        if method == "HEAD" { Ok(()) } else { stream.write_all(body) }
    };
    if path.starts_with("/api/models?") {
        let found = br#"[{"id": "org/model"}, {"id": "org/model-2"}]"#;
        return say(stream, "200 OK", "", found, found.len());
    }
    let wanted = world.token.as_ref().map(|token| format!("Bearer {token}"));
    if wanted.is_some()
        && headers.get("authorization") != wanted.as_ref()
        && !path.starts_with("/cdn/")
    {
        let why = "X-Error-Code: GatedRepo\r\nX-Error-Message: Access to it is restricted.\r\n";
        return say(stream, "401 Unauthorized", why, b"", 0);
    }
    if path == "/api/models/org/model/revision/main" {
        let names: Vec<_> =
            world.files.keys().map(|name| format!(r#"{{"rfilename": "{name}"}}"#)).collect();
        let body = format!(r#"{{"sha": "{COMMIT}", "siblings": [{}]}}"#, names.join(", "));
        return say(stream, "200 OK", "", body.as_bytes(), body.len());
    }
    let on_hub = path.strip_prefix(&format!("/org/model/resolve/{COMMIT}/"));
    let name = on_hub.or_else(|| path.strip_prefix("/cdn/")).unwrap_or_default();
    let Some(bytes) = world.files.get(name).cloned() else {
        return say(stream, "404 Not Found", "X-Error-Code: RepoNotFound\r\n", b"", 0);
    };
    let large = bytes.len() > 1000;
    if on_hub.is_some() && large {
        // As of files that are kept elsewhere.
        let sha = if world.wrong { "0".repeat(64) } else { digest(&bytes) };
        let (size, host) = (bytes.len(), headers["host"].clone());
        let headers = format!(
            "X-Repo-Commit: {COMMIT}\r\nX-Linked-Etag: \"{sha}\"\r\nX-Linked-Size: {size}\r\nLocation: http://{host}/cdn/{name}\r\n"
        );
        return say(stream, "302 Found", &headers, b"", 0);
    }
    let etag = format!("X-Repo-Commit: {COMMIT}\r\nETag: \"{}\"\r\n", &digest(&bytes)[..40]);
    let from = range.strip_prefix("bytes=").and_then(|range| range.strip_suffix('-')?.parse().ok());
    let from: usize = if world.no_ranges { 0 } else { from.unwrap_or(0) };
    let cut = if method == "GET" && large { world.cuts.pop() } else { None };
    let body = &bytes[from..];
    let sent = &body[..cut.unwrap_or(body.len()).min(body.len())];
    match from {
        0 => say(stream, "200 OK", &etag, sent, body.len()),
        _ => {
            let range = format!(
                "{etag}Content-Range: bytes {from}-{}/{}\r\n",
                bytes.len() - 1,
                bytes.len()
            );
            say(stream, "206 Partial Content", &range, sent, body.len())
        }
    }
}

impl Server {
    fn fetch(&self, file: Option<&str>) -> Result<PathBuf, Error> {
        self.hub.fetch("org/model", file, "main", &mut |_, _, _| {})
    }

    fn refusal(&self, file: Option<&str>) -> String {
        self.fetch(file).unwrap_err().to_string()
    }

    fn requests(&self) -> Vec<(String, String, String)> {
        std::mem::take(&mut self.world.lock().unwrap().requests)
    }

    fn set(&self, change: impl FnOnce(&mut World)) {
        change(&mut self.world.lock().unwrap());
    }

    fn blobs(&self) -> Vec<String> {
        let blobs = fs::read_dir(self.hub.cache.join("models--org--model/blobs")).unwrap();
        blobs.map(|blob| blob.unwrap().file_name().into_string().unwrap()).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.hub.cache);
    }
}

fn large() -> Vec<u8> {
    (0..100_000_u32).flat_map(u32::to_le_bytes).collect()
}

#[test]
fn a_model_is_downloaded_once_in_the_layout_of_python() {
    let weights = large();
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    let files: &[(&str, &[u8])] = &[
        ("config.json", b"{}"),
        ("1_Pooling/config.json", b"{\"a\": 1}"),
        ("README.md", b"not fetched"),
        (INDEX, index),
        ("model-1.safetensors", &weights),
        ("model-2.safetensors", b"small"),
    ];
    let server = server("whole", files);
    let mut told = Vec::new();
    let mut hear = |file: &str, done: u64, size: u64| told.push((file.to_owned(), done, size));
    let folder = server.hub.fetch("org/model", None, "main", &mut hear).unwrap();
    let base = server.hub.cache.join("models--org--model");
    assert_eq!(folder, base.join("snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(base.join("refs/main")).unwrap(), COMMIT);
    for (name, bytes) in files.iter().filter(|(name, _)| *name != "README.md") {
        assert_eq!(fs::read(folder.join(name)).unwrap(), *bytes, "{name}");
        assert!(folder.join(name).is_symlink());
    }
    assert!(!folder.join("README.md").exists());
    assert!(base.join("blobs").join(digest(&weights)).is_file());
    assert!(base.join(".no_exist").join(COMMIT).join("tokenizer.json").is_file());
    assert!(told.contains(&("model-1.safetensors".into(), 400_000, 400_000)), "{told:?}");
    assert!(server.requests().len() > 5);

    assert_eq!(server.fetch(None).unwrap(), folder);
    assert_eq!(server.fetch(Some("config.json")).unwrap(), folder.join("config.json"));
    let offline =
        Hub { offline: true, endpoint: "http://127.0.0.1:1".into(), ..server.hub.clone() };
    assert_eq!(offline.fetch("org/model", None, COMMIT, &mut |_, _, _| {}).unwrap(), folder);
    assert_eq!(server.requests(), []);
}

#[test]
fn one_file_is_enough_and_its_blob_serves_another_commit() {
    let server = server("one", &[("model.Q4.gguf", &large()), ("config.json", b"{}")]);
    let path = server.fetch(Some("model.Q4.gguf")).unwrap();
    assert_eq!(fs::read(&path).unwrap(), large());
    assert_eq!(server.blobs().len(), 1);
    server.requests();
    fs::remove_file(&path).unwrap();
    server.fetch(Some("model.Q4.gguf")).unwrap();
    assert!(server.requests().iter().all(|(_, path, _)| !path.starts_with("/cdn/")));
    let said = server.refusal(None);
    assert!(
        said.contains("no model.safetensors") && said.contains("org/model:model.Q4.gguf"),
        "{said}"
    );
}

#[test]
fn what_was_cut_off_goes_on_where_it_ended() {
    let server = server("cut", &[(WEIGHTS, &large()), ("config.json", b"{}")]);
    // In one call.
    server.set(|world| world.cuts = vec![50_000, 100_000]);
    let path = server.fetch(Some(WEIGHTS)).unwrap();
    assert_eq!(fs::read(&path).unwrap(), large());
    let ranges: Vec<_> =
        server.requests().into_iter().filter(|r| r.1.starts_with("/cdn/")).collect();
    assert_eq!(ranges.len(), 3);
    assert_eq!(
        [&*ranges[0].2, &*ranges[1].2, &*ranges[2].2],
        ["", "bytes=100000-", "bytes=150000-"]
    );

    // In two calls.
    fs::remove_dir_all(&server.hub.cache).unwrap();
    let hub = Hub { retries: 0, ..server.hub.clone() };
    server.set(|world| world.cuts = vec![0, 70_000]);
    let said = hub.fetch("org/model", Some(WEIGHTS), "main", &mut |_, _, _| {}).unwrap_err();
    assert!(said.to_string().contains("70000 of 400000 bytes"), "{said}");
    assert!(server.blobs()[0].ends_with(".incomplete"));
    server.requests();
    assert_eq!(fs::read(server.fetch(Some(WEIGHTS)).unwrap()).unwrap(), large());
    assert!(server.requests().iter().any(|(_, _, range)| range == "bytes=70000-"));
    assert_eq!(server.blobs(), [digest(&large())]);

    // From a server that cannot.
    fs::remove_dir_all(&server.hub.cache).unwrap();
    server.set(|world| (world.cuts, world.no_ranges) = (vec![90_000], true));
    assert_eq!(fs::read(server.fetch(Some(WEIGHTS)).unwrap()).unwrap(), large());
}

#[test]
fn a_wrong_checksum_is_not_kept() {
    let server = server("wrong", &[(WEIGHTS, &large())]);
    server.set(|world| world.wrong = true);
    let said = server.refusal(Some(WEIGHTS));
    assert!(said.contains("SHA-256") && said.contains(&digest(&large())), "{said}");
    assert!(server.blobs().is_empty());
    server.set(|world| world.wrong = false);
    server.fetch(Some(WEIGHTS)).unwrap();
}

#[test]
fn refusals_name_address_status_and_remedy() {
    let server = server("refused", &[(WEIGHTS, &large()), ("config.json", b"{}")]);
    let said = server.refusal(Some("modell.safetensors"));
    assert!(said.contains("it has model.safetensors, config.json"), "{said}");
    let other =
        server.hub.fetch("org/modle", None, "main", &mut |_, _, _| {}).unwrap_err().to_string();
    assert!(other.contains("/api/models/org/modle/revision/main: HTTP 404"), "{other}");
    assert!(other.contains("org/model, org/model-2"), "{other}");

    server.set(|world| world.token = Some("hf_right".into()));
    let said = server.refusal(None);
    for part in ["HTTP 401", "Access to it is restricted", "accept its terms at", "set HF_TOKEN"] {
        assert!(said.contains(part), "{said}");
    }
    let mut hub = Hub { token: Some("hf_wrong".into()), ..server.hub.clone() };
    let said = hub.fetch("org/model", None, "main", &mut |_, _, _| {}).unwrap_err().to_string();
    assert!(said.contains("the token that is set") && !said.contains("hf_wrong"), "{said}");
    assert!(!format!("{hub:?}").contains("hf_wrong"));
    hub.token = Some("hf_right".into());
    hub.fetch("org/model", None, "main", &mut |_, _, _| {}).unwrap();

    for odd in ["a/b/c", "../x", "org/..", "", "org/a:b", "org\\x", "/x"] {
        let said = hub.fetch(odd, None, "main", &mut |_, _, _| {}).unwrap_err().to_string();
        assert!(said.contains("`org/name`"), "{said}");
    }
    for odd in ["../../x", "/etc/passwd", "a//b"] {
        let said = hub.fetch("org/model", Some(odd), "main", &mut |_, _, _| {}).unwrap_err();
        assert!(said.to_string().contains("is not a path"), "{said}");
    }
    let endpoint = "http://127.0.0.1:1".into();
    let cache = server.hub.cache.join("other");
    let nowhere = Hub { endpoint, cache, ..server.hub.clone() };
    let said = nowhere.fetch("org/model", None, "main", &mut |_, _, _| {}).unwrap_err().to_string();
    assert!(said.contains("refused") && said.contains("check the network"), "{said}");
}

#[test]
fn offline_says_what_is_missing_and_asks_nobody() {
    let mut server = server("offline", &[(WEIGHTS, &large()), ("config.json", b"{}")]);
    server.hub.offline = true;
    let said = server.refusal(None);
    assert!(said.contains("offline") && said.contains("revision main"), "{said}");
    server.hub.offline = false;
    server.fetch(Some("config.json")).unwrap();
    server.requests();
    server.hub.offline = true;
    server.fetch(Some("config.json")).unwrap();
    let said = server.refusal(None);
    assert!(said.contains("model.safetensors") && !said.contains("tokenizer.json"), "{said}");
    assert_eq!(server.requests(), []);
    // What another program has downloaded is enough if it can be read: it may not have asked for all that we would ask for.
    server.hub.offline = false;
    server.fetch(Some(WEIGHTS)).unwrap();
    server.hub.offline = true;
    server.fetch(None).unwrap();
}

#[test]
fn what_a_repository_names_stays_in_the_cache() {
    let index = br#"{"weight_map": {"a": "../../../../escaped"}}"#;
    let server = server("names", &[(INDEX, index), ("config.json", b"{}")]);
    let said = server.refusal(None);
    assert!(said.contains("is not a path"), "{said}");
}

#[test]
fn the_variables_of_hugging_face_are_followed() {
    let hub = |pairs: &[(&str, &str)]| {
        let pairs: BTreeMap<_, _> = pairs.iter().copied().collect();
        Hub::from_env(|name| pairs.get(name).map(OsString::from))
    };
    let plain = hub(&[("HOME", "/h")]).unwrap();
    assert_eq!(plain.cache, Path::new("/h/.cache/huggingface/hub"));
    assert_eq!(
        (&*plain.endpoint, plain.token, plain.offline),
        ("https://huggingface.co", None, false)
    );
    assert_eq!(hub(&[("HF_HOME", "/x"), ("HOME", "/h")]).unwrap().cache, Path::new("/x/hub"));
    let all = [
        ("HF_HUB_CACHE", "/c"),
        ("HF_HOME", "/x"),
        ("HF_ENDPOINT", "https://mirror/"),
        ("HF_TOKEN", " hf_a\n"),
        ("HF_HUB_OFFLINE", "1"),
    ];
    let all = hub(&all).unwrap();
    assert_eq!((all.cache.as_path(), &*all.endpoint), (Path::new("/c"), "https://mirror"));
    assert_eq!((all.token.as_deref(), all.offline), (Some("hf_a"), true));
    assert!(hub(&[]).unwrap_err().to_string().contains("HF_HOME"));
    assert_eq!(split("org/name:a.gguf"), ("org/name", Some("a.gguf")));
    assert_eq!(split("org/name"), ("org/name", None));
}
