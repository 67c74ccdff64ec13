//! Models of the Hugging Face Hub, in the cache that Python's `huggingface_hub` has too.
//!
//! A file is at `models--org--name/snapshots/<commit>/<file>`, a link to `blobs/<etag>`; `refs/<revision>` has the commit of a branch, and
//! `.no_exist/<commit>/<file>` says that a file is known not to be there.

use super::write;
use crate::error::Error;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use ureq::config::RedirectAuthHeaders;
use ureq::http::Response;
use ureq::{Agent, Body};

/// What a model is read from, but for its weights: each if the repository has it.
/// Of these, a model has the first at least.
const FILES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "chat_template.jinja",
    "1_Pooling/config.json",
    "preprocessor_config.json",
];
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Hears the name of a file, how many of its bytes are there, and how many it has.
pub type Progress<'a> = dyn FnMut(&str, u64, u64) + 'a;

/// A hub of models, and where they are kept.
#[derive(Clone)]
pub struct Hub {
    /// Its address, without a `/` at the end.
    pub endpoint: String,
    /// The folder of `models--org--name`.
    pub cache: PathBuf,
    /// What gated and private models ask for.
    pub token: Option<String>,
    /// Never asks the network.
    pub offline: bool,
    /// How often a download that brings nothing is tried again.
    pub retries: u32,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Without the token.
        let Self { endpoint, cache, offline, .. } = self;
        f.debug_struct("Hub")
            .field("endpoint", endpoint)
            .field("cache", cache)
            .field("offline", offline)
            .finish_non_exhaustive()
    }
}

/// `org/name` or `org/name:file` as its parts.
#[must_use]
pub fn split(name: &str) -> (&str, Option<&str>) {
    name.split_once(':').map_or((name, None), |(repo, file)| (repo, Some(file)))
}

/// What a repository has at a revision.
#[derive(Deserialize)]
struct Listing {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

/// What the hub says of a file.
struct Remote {
    url: String,
    etag: String,
    size: u64,
}

/// One repository at one revision.
struct Repo<'a> {
    hub: &'a Hub,
    name: &'a str,
    revision: &'a str,
    folder: PathBuf,
    agent: Agent,
}

impl Hub {
    /// As the variables of Hugging Face say: `HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_HOME`, `HF_TOKEN`, `HF_TOKEN_PATH`, `HF_HUB_OFFLINE`.
    /// `variable` reads the environment (`std::env::var_os`).
    pub fn from_env(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, Error> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let path = |name: &str| set(name).map(PathBuf::from);
        let text = |name: &str| set(name)?.into_string().ok();
        let cache = path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")));
        let home = path("HF_HOME").or_else(|| Some(cache?.join("huggingface")));
        let hub = || Some(home.as_ref()?.join("hub"));
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")).or_else(hub);
        let Some(cache) = cache else {
            let why = "no folder to keep models in; set HF_HOME or HOME".into();
            return Err(Error::Fetch { model: "Hugging Face Hub".into(), why });
        };
        let file = path("HF_TOKEN_PATH").or_else(|| Some(home.as_ref()?.join("token")));
        let from_file = || fs::read_to_string(file?).ok();
        let token = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN")).or_else(from_file);
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let on = |value: String| ["1", "ON", "YES", "TRUE"].contains(&&*value.to_uppercase());
        Ok(Self {
            endpoint: endpoint.trim_end_matches('/').into(),
            cache,
            token: token
                .map(|token| token.trim().into())
                .filter(|token: &String| !token.is_empty()),
            offline: text("HF_HUB_OFFLINE").is_some_and(on),
            retries: 5,
        })
    }

    /// Where a file of a model is, or without a file the folder of all that [`ModelFiles::open`](super::ModelFiles::open) reads. What is
    /// in the cache is used without asking the network, so a branch stays at the commit that it was first had at.
    ///
    /// What was cut off goes on where it ended, in this call or a later one. Only whole files with the right checksum come to their place.
    pub fn fetch(
        &self,
        repo: &str,
        file: Option<&str>,
        revision: &str,
        progress: &mut Progress<'_>,
    ) -> Result<PathBuf, Error> {
        let repo = Repo::new(self, repo, revision)?;
        if file.is_some_and(|file| !is_path(file)) {
            return Err(repo.error(format_args!("`{}` is not a path", file.unwrap_or_default())));
        }
        let missing = match repo.commit() {
            Some(commit) => match repo.missing(&commit, file)? {
                missing if missing.is_empty() => return Ok(repo.place(&commit, file)),
                missing => missing.join(", "),
            },
            None => format!("revision {revision}"),
        };
        if self.offline {
            return Err(repo.error(format_args!(
                "offline, and not in the cache {}: {missing}; fetch it once with a network, or copy the cache of another machine",
                self.cache.display(),
            )));
        }
        repo.download(file, progress)
    }
}

impl<'a> Repo<'a> {
    fn new(hub: &'a Hub, name: &'a str, revision: &'a str) -> Result<Self, Error> {
        let folder = hub.cache.join(format!("models--{}", name.replace('/', "--")));
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .accept_encoding("identity") // sizes are those of the file
            .user_agent(concat!("regard/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(Duration::from_secs(15)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(60)))
            .build();
        let repo = Self { hub, name, revision, folder, agent: agent.into() };
        let part = |part: &str| !part.contains("--") && is_path(part);
        if !is_path(name) || name.split('/').count() > 2 || !name.split('/').all(part) {
            return Err(repo.error("a model of the Hub is called `org/name`"));
        }
        if !is_path(revision) {
            return Err(repo.error(format_args!("`{revision}` is not a branch, tag or commit")));
        }
        Ok(repo)
    }

    fn error(&self, why: impl std::fmt::Display) -> Error {
        Error::Fetch { model: self.name.into(), why: why.to_string() }
    }

    /// The commit of the revision, if the cache knows it.
    fn commit(&self) -> Option<String> {
        if is_hex(self.revision, 40) {
            return Some(self.revision.into());
        }
        let commit = fs::read_to_string(self.folder.join("refs").join(self.revision)).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_hex(commit, 40))
    }

    fn place(&self, commit: &str, file: Option<&str>) -> PathBuf {
        let snapshot = self.folder.join("snapshots").join(commit);
        file.map_or(snapshot.clone(), |file| snapshot.join(file))
    }

    /// What the cache does not have of a file, or of all that a model is read from. Of shards that nothing is known of, their index.
    fn missing(&self, commit: &str, file: Option<&str>) -> Result<Vec<String>, Error> {
        let there = |file: &str| self.place(commit, Some(file)).is_file();
        let nowhere = |file: &str| self.folder.join(".no_exist").join(commit).join(file).is_file();
        if let Some(file) = file {
            return Ok(if there(file) { vec![] } else { vec![file.into()] });
        }
        // Without a network nobody can be asked whether there are more: Python downloads fewer, and does not note what is nowhere.
        let needed = if self.hub.offline { &FILES[..1] } else { FILES };
        let files = needed.iter().filter(|file| !there(file) && !nowhere(file));
        let mut missing: Vec<String> = files.map(|file| (*file).to_owned()).collect();
        match (there(WEIGHTS), there(INDEX)) {
            (true, _) => {}
            (false, true) => {
                let shards = self.shards(&self.place(commit, Some(INDEX)))?;
                missing.extend(shards.into_iter().filter(|shard| !there(shard)));
            }
            (false, false) => missing.push(format!("{WEIGHTS} (or {INDEX})")),
        }
        Ok(missing)
    }

    /// The files that an index names.
    fn shards(&self, index: &Path) -> Result<BTreeSet<String>, Error> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let bytes = fs::read(index).map_err(|e| Error::file(index, &e))?;
        let index: Index = serde_json::from_slice(&bytes).map_err(|e| Error::file(index, &e))?;
        let shards: BTreeSet<_> = index.weight_map.into_values().collect();
        match shards.iter().find(|shard| !is_path(shard)) {
            Some(shard) => Err(self.error(format_args!("{INDEX}: `{shard}` is not a path"))),
            None => Ok(shards),
        }
    }

    fn download(&self, file: Option<&str>, progress: &mut Progress<'_>) -> Result<PathBuf, Error> {
        let Listing { sha, siblings } = self.listing()?;
        let has: BTreeSet<String> = siblings.into_iter().map(|one| one.rfilename).collect();
        if let Some(file) = file {
            if !has.contains(file) {
                let near = near(file, has.iter().map(String::as_str));
                return Err(self.error(format_args!(
                    "{}: no such file at revision {}; it has {near}",
                    self.url(&sha, file),
                    self.revision
                )));
            }
            self.file(&sha, file, progress)?;
        } else {
            let weights = [WEIGHTS, INDEX].into_iter().find(|file| has.contains(*file));
            let weights = weights.ok_or_else(|| self.no_weights(&has))?;
            for file in FILES {
                match has.contains(*file) {
                    true => self.file(&sha, file, progress)?,
                    false => self.put(&self.folder.join(".no_exist").join(&sha).join(file), b"")?,
                }
            }
            self.file(&sha, weights, progress)?;
            if weights == INDEX {
                for shard in self.shards(&self.place(&sha, Some(INDEX)))? {
                    self.file(&sha, &shard, progress)?;
                }
            }
        }
        // Last: until all is there, the revision is what it was.
        if self.revision != sha {
            self.put(&self.folder.join("refs").join(self.revision), sha.as_bytes())?;
        }
        Ok(self.place(&sha, file))
    }

    fn no_weights(&self, has: &BTreeSet<String>) -> Error {
        let others = has.iter().filter(|file| {
            [".gguf", ".safetensors", ".bin", ".pt", ".onnx"].iter().any(|end| file.ends_with(end))
        });
        let others: Vec<_> = others.take(12).map(|file| format!("{}:{file}", self.name)).collect();
        self.error(match others.is_empty() {
            true => "the repository has no weights".into(),
            false => format!("no {WEIGHTS}; ask for one of its files: {}", others.join(", ")),
        })
    }

    fn url(&self, revision: &str, file: &str) -> String {
        let revision = revision.replace('/', "%2F");
        let file: String = file.bytes().map(escaped).collect();
        format!("{}/{}/resolve/{revision}/{file}", self.hub.endpoint, self.name)
    }

    /// What the repository has.
    fn listing(&self) -> Result<Listing, Error> {
        let revision = self.revision.replace('/', "%2F");
        let url = format!("{}/api/models/{}/revision/{revision}", self.hub.endpoint, self.name);
        let mut answer = self.ask(&url, None)?;
        if !answer.status().is_success() {
            return Err(self.refused(&url, &answer));
        }
        let text = answer.body_mut().read_to_string();
        let text = text.map_err(|e| self.unreachable(&url, &e))?;
        let listing: Listing = serde_json::from_str(&text)
            .map_err(|e| self.error(format_args!("{url}: not an answer of the Hub: {e}")))?;
        match is_hex(&listing.sha, 40) {
            true => Ok(listing),
            false => Err(self.error(format_args!("{url}: `{}` is not a commit", listing.sha))),
        }
    }

    fn ask(&self, url: &str, from: Option<u64>) -> Result<Response<Body>, Error> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.hub.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some(from) = from.filter(|from| *from > 0) {
            request = request.header("Range", format!("bytes={from}-"));
        }
        request.call().map_err(|e| self.unreachable(url, &e))
    }

    /// An answer that is no file and no list.
    fn refused(&self, url: &str, answer: &Response<Body>) -> Error {
        let said = header(answer, "x-error-message");
        let said = said.map_or(String::new(), |said| format!(" ({said})"));
        let page = format!("{}/{}", self.hub.endpoint, self.name);
        let token = match self.hub.token {
            Some(_) => "the token that is set must be allowed to read it",
            None => "set HF_TOKEN to a token of https://huggingface.co/settings/tokens",
        };
        let remedy = match answer.status().as_u16() {
            401 | 403 => format!(
                "no such model, or a gated or private one: check the name, accept its terms at {page}, and {token}{}",
                self.like()
            ),
            404 => format!("check the name and the revision {}{}", self.revision, self.like()),
            429 => "too many requests; wait, or set HF_TOKEN".into(),
            500.. => "the Hub is in trouble; try again later".into(),
            _ => "check HF_ENDPOINT".into(),
        };
        self.error(format_args!("{url}: HTTP {}{said}; {remedy}", answer.status()))
    }

    /// Models of a like name, as the search of the Hub has them. Whatever goes wrong: none.
    fn like(&self) -> String {
        let name = self.name.rsplit('/').next().unwrap_or_default();
        let url = format!("{}/api/models?limit=5&search={name}", self.hub.endpoint);
        #[derive(Deserialize)]
        struct Found {
            id: String,
        }
        let text = self.agent.get(&url).call().ok().filter(|a| a.status().is_success());
        let text = text.and_then(|mut answer| answer.body_mut().read_to_string().ok());
        let found: Vec<Found> =
            text.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
        match found.is_empty() {
            true => String::new(),
            false => {
                let found: Vec<_> = found.into_iter().map(|found| found.id).collect();
                format!("; models of a like name: {}", found.join(", "))
            }
        }
    }

    fn unreachable(&self, url: &str, error: &ureq::Error) -> Error {
        let mut causes = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            causes = format!("{causes}: {cause}");
            source = cause.source();
        }
        self.error(format_args!(
            "{url}: {causes}; check the network, HTTPS_PROXY and HF_ENDPOINT; offline, only what is in {} can be had",
            self.hub.cache.display()
        ))
    }

    /// What the hub says of a file. Answers that lead elsewhere say it already; those that stay on the hub are followed.
    fn remote(&self, commit: &str, file: &str) -> Result<Remote, Error> {
        let first = self.url(commit, file);
        let mut url = first.clone();
        let mut hops = 0;
        let answer = loop {
            let mut request = self.agent.head(&url).config().max_redirects(0);
            request = request.max_redirects_will_error(false);
            let mut request = request.build();
            if let Some(token) = &self.hub.token {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            let answer = request.call().map_err(|e| self.unreachable(&url, &e))?;
            match header(&answer, "location").filter(|to| to.starts_with('/')) {
                Some(to) if answer.status().is_redirection() && hops < 5 => {
                    hops += 1;
                    url = format!("{}{to}", origin(&self.hub.endpoint));
                }
                _ => break answer,
            }
        };
        if !answer.status().is_success() && !answer.status().is_redirection() {
            return Err(self.refused(&url, &answer));
        }
        let etag = header(&answer, "x-linked-etag").or_else(|| header(&answer, "etag"));
        let etag = etag.map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_owned());
        // The length of an answer that leads elsewhere is its own.
        let length = || header(&answer, "content-length").filter(|_| answer.status().is_success());
        let size = header(&answer, "x-linked-size").or_else(length);
        let size = size.and_then(|size| size.parse().ok());
        match (etag.filter(|etag| !etag.contains('/') && is_path(etag)), size) {
            (Some(etag), Some(size)) => Ok(Remote { url: first, etag, size }),
            _ => Err(self.error(format_args!(
                "{url}: no ETag and no size; HF_ENDPOINT must be a hub, or a mirror that hands on its headers"
            ))),
        }
    }

    /// Has a file in the cache.
    fn file(&self, commit: &str, file: &str, progress: &mut Progress<'_>) -> Result<(), Error> {
        let place = self.place(commit, Some(file));
        if place.is_file() {
            return Ok(());
        }
        let remote = self.remote(commit, file)?;
        let blob = self.folder.join("blobs").join(&remote.etag);
        let lock = self.hub.cache.join(".locks").join(self.folder.file_name().unwrap_or_default());
        let lock = lock.join(format!("{}.lock", remote.etag));
        parent(&blob)?;
        parent(&lock)?;
        // The lock of Python's library: two that fetch the same file do not write into it together.
        let lock = File::create(&lock).and_then(|file| file.lock().map(|()| file));
        let lock = lock.map_err(|e| Error::file(&blob, &e))?;
        if !blob.is_file() {
            let part = self.folder.join("blobs").join(format!("{}.incomplete", remote.etag));
            self.whole(&remote, file, &part, progress)?;
            self.check(&remote, file, &part)?;
            fs::rename(&part, &blob).map_err(|e| Error::file(&blob, &e))?;
        }
        drop(lock);
        parent(&place)?;
        link(&blob, &place, file.split('/').count()).map_err(|e| Error::file(&place, &e))
    }

    /// Downloads until all bytes are there. What fails without a new byte is tried again, `retries` times.
    fn whole(
        &self,
        remote: &Remote,
        file: &str,
        part: &Path,
        progress: &mut Progress<'_>,
    ) -> Result<(), Error> {
        let failed = |e: &std::io::Error| Error::file(part, e);
        let out = OpenOptions::new().create(true).append(true).open(part);
        let mut out = out.map_err(|e| failed(&e))?;
        let mut done = out.metadata().map_err(|e| failed(&e))?.len();
        if done > remote.size {
            out.set_len(0).map_err(|e| failed(&e))?;
            done = 0;
        }
        progress(file, done, remote.size);
        let mut tries = 0;
        while done < remote.size {
            let before = done;
            let result = self.some(remote, &mut out, &mut done, &mut |done| {
                progress(file, done, remote.size);
            });
            tries = if done > before { 0 } else { tries + 1 };
            match result {
                Ok(()) if done == remote.size => return Ok(()),
                Err(Stop::Final(error)) => return Err(error),
                Err(Stop::Cut(error)) if tries > self.hub.retries => return Err(error),
                Ok(()) if tries > self.hub.retries => {
                    let (url, size) = (&remote.url, remote.size);
                    return Err(self.error(format_args!(
                        "{url}: ended after {done} of {size} bytes; ask again to go on from there"
                    )));
                }
                _ if tries > 0 => std::thread::sleep(Duration::from_secs(1 << tries.min(5))),
                _ => {}
            }
        }
        Ok(())
    }

    /// One request for the bytes from `done` on.
    fn some(
        &self,
        remote: &Remote,
        out: &mut File,
        done: &mut u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), Stop> {
        let url = &remote.url;
        let answer = self.ask(url, Some(*done)).map_err(Stop::Cut)?;
        let failed = |e: &std::io::Error| Stop::Final(self.error(format_args!("{url}: {e}")));
        match answer.status().as_u16() {
            206 => {
                let range = header(&answer, "content-range").unwrap_or_default();
                if !range.starts_with(&format!("bytes {done}-")) {
                    let why = format!("{url}: asked for bytes from {done} on, got `{range}`");
                    return Err(Stop::Final(self.error(why)));
                }
            }
            // All of it, whatever was asked for.
            200 => {
                out.set_len(0).map_err(|e| failed(&e))?;
                *done = 0;
            }
            500.. => return Err(Stop::Cut(self.refused(url, &answer))),
            _ => return Err(Stop::Final(self.refused(url, &answer))),
        }
        let mut body = answer.into_body().into_with_config().limit(u64::MAX).reader();
        let mut buffer = vec![0; 1 << 16];
        loop {
            let n = match body.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(n) => n,
                Err(e) => {
                    let (cut, size) = ("cut off; ask again to go on from there", remote.size);
                    let why = format!("{url}: {e} after {done} of {size} bytes; {cut}");
                    return Err(Stop::Cut(self.error(why)));
                }
            };
            *done += n as u64;
            // One that swells is not the one that was told of.
            if *done > remote.size {
                out.set_len(0).map_err(|e| failed(&e))?;
                let why = format!("{url}: more than its {} bytes; not kept", remote.size);
                return Err(Stop::Final(self.error(why)));
            }
            out.write_all(&buffer[..n]).map_err(|e| failed(&e))?;
            progress(*done);
        }
    }

    /// Whether a file is what its ETag says: for large files their SHA-256. That of small ones is another, and they are told by size only.
    fn check(&self, remote: &Remote, file: &str, part: &Path) -> Result<(), Error> {
        if !is_hex(&remote.etag, 64) {
            return Ok(());
        }
        let failed = |e: std::io::Error| Error::file(part, &e);
        let mut from = File::open(part).map_err(failed)?;
        let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
        loop {
            match from.read(&mut buffer).map_err(failed)? {
                0 => break,
                n => hash.update(&buffer[..n]),
            }
        }
        let digits: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        if digits == remote.etag {
            return Ok(());
        }
        drop(from);
        fs::remove_file(part).map_err(failed)?;
        Err(self.error(format_args!(
            "{}: the SHA-256 of {file} is {digits}, not {}; not kept, ask again",
            remote.url, remote.etag
        )))
    }

    fn put(&self, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        parent(path)?;
        write::atomically(path, |file| file.write_all(bytes))
    }
}

/// Why a request ended: whether another may go on.
enum Stop {
    Cut(Error),
    Final(Error),
}

fn header(answer: &Response<Body>, name: &str) -> Option<String> {
    Some(answer.headers().get(name)?.to_str().ok()?.to_owned())
}

/// Scheme and host of an address.
fn origin(url: &str) -> &str {
    let host = url.find("://").map_or(0, |at| at + 3);
    url[host..].find('/').map_or(url, |at| &url[..host + at])
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Whether it leads to a place below, on every system, as what a stranger names must.
fn is_path(path: &str) -> bool {
    let odd = |c: char| c.is_control() || "\\:*?\"<>|#%".contains(c);
    !path.contains(odd)
        && path.split('/').all(|part| !matches!(part, "" | "." | "..") && part.len() < 250)
}

fn escaped(byte: u8) -> String {
    match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    }
}

fn parent(path: &Path) -> Result<(), Error> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(|e| Error::file(parent, &e))
}

/// Puts a blob to its place in a snapshot, `depth` folders below it.
fn link(blob: &Path, place: &Path, depth: usize) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        let name = blob.file_name().unwrap_or_default();
        let target = PathBuf::from("../".repeat(depth + 1)).join("blobs").join(name);
        match std::os::unix::fs::symlink(target, place) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
            done => done,
        }
    }
    // As Python does where links need rights that few have.
    #[cfg(not(unix))]
    {
        let _ = depth;
        fs::rename(blob, place)
    }
}

/// The names that are most like one, best first.
fn near<'a>(name: &str, all: impl Iterator<Item = &'a str>) -> String {
    let pairs = |text: &str| -> BTreeSet<(char, char)> {
        let text = text.to_lowercase();
        text.chars().zip(text.chars().skip(1)).collect()
    };
    let wanted = pairs(name);
    let mut all: Vec<_> = all
        .map(|other| {
            let has = pairs(other);
            let both = has.intersection(&wanted).count();
            (has.len() + wanted.len() - 2 * both, other)
        })
        .collect();
    all.sort_unstable();
    let names: Vec<_> = all.into_iter().take(5).map(|(_, other)| other).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

#[cfg(test)]
mod tests;
