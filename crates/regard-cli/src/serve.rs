//! The server behind `regard look --serve`: for a browser on this machine alone.
//!
//! One request a connection, one thread a connection: a browser opens a handful, and loopback makes new ones for nothing.
//! (Servers that keep connections and hand them to a pool left tiles waiting behind idle ones.)

use anyhow::{Context, Result};
use regard_scope::Pool;
use regard_scope::{Theme, Zoom, zoom_page};
use serde::Serialize;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Words that may be asked for at once.
const WORDS: usize = 1024;
/// Bytes of a request, at most.
const REQUEST: usize = 1 << 14;
/// How long a browser may take to ask, and to take each part of an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections at once, far more than a browser opens: each has a thread, and a process may have a few hundred of these and of
/// descriptors anywhere.
const CONNECTIONS: usize = 256;
/// How long no connection is taken after one could not be: descriptors come back when others end.
const PAUSE: Duration = Duration::from_millis(50);

/// What is served, and the head that was asked about last.
struct Shared {
    zoom: Zoom,
    last: AtomicUsize,
    port: u16,
    /// A part of every path that only who reads our output knows: other users of this machine can connect, too.
    token: String,
    connections: AtomicUsize,
}

/// Counts a connection while it lasts.
struct Counted(Arc<Shared>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What of a request matters here.
#[derive(Default)]
struct Request {
    /// Of `GET`.
    path: Option<String>,
    host: Option<String>,
    origin: Option<String>,
}

/// What goes back.
struct Answer {
    status: &'static str,
    kind: &'static str,
    /// Of a tile from a sample of rows: how many, of how many.
    sampled: Option<[usize; 2]>,
    body: Vec<u8>,
}

pub(crate) fn run(zoom: Zoom, first: usize, port: u16) -> Result<()> {
    let listener =
        TcpListener::bind(("127.0.0.1", port)).with_context(|| format!("--port {port}"))?;
    let port = listener.local_addr()?.port();
    let token = token().context("/dev/urandom")?;
    let text = "Open it in a browser on this machine; Ctrl-C ends it.";
    let mut out = std::io::stdout().lock();
    out.write_all(format!("http://127.0.0.1:{port}/{token}/#site={first}\n{text}\n").as_bytes())?;
    out.flush()?;
    let (last, connections) = (AtomicUsize::new(first), AtomicUsize::new(0));
    let shared = Arc::new(Shared { zoom, last, port, token, connections });
    let surveyor = shared.clone();
    // Without it, tiles from a sample of rows stay what they are.
    let _ = thread::Builder::new().spawn(move || surveyor.survey());
    for stream in listener.incoming() {
        match stream {
            Ok(stream) => shared.take(stream),
            Err(_) => thread::sleep(PAUSE),
        }
    }
    Ok(())
}

/// Whether this is what a browser calls us: by a name of this machine, and by the port unless it is that of HTTP.
fn is_own(host: &str, port: u16) -> bool {
    let (name, own) = host.split_once(':').unwrap_or((host, "80"));
    ["127.0.0.1", "localhost"].contains(&name) && own.parse() == Ok(port)
}

/// 128 bits that nobody can guess.
fn token() -> std::io::Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

impl Shared {
    /// Makes coarse tiles of the head that was asked about last exact, one head at a time.
    fn survey(&self) {
        loop {
            let site = self.last.load(Ordering::Relaxed);
            let other = || self.last.load(Ordering::Relaxed) != site;
            // Tiles from a sample of rows stay what they are, if this fails.
            let _ = self.zoom.survey(site, &other);
            while !other() {
                thread::sleep(Duration::from_millis(50));
            }
        }
    }

    /// Serves a connection in a thread of its own, or says that there are too many.
    fn take(self: &Arc<Self>, stream: TcpStream) {
        let before = self.connections.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(self.clone());
        if before >= CONNECTIONS {
            let busy = refused("503 Service Unavailable", "too many connections; try again");
            // So little fits the buffers of a socket: this does not wait. Who has gone away is no error, here and below.
            let _ = busy.write(&stream);
            return;
        }
        // Where no thread can be made the connection ends, and the next is waited for.
        let _ = thread::Builder::new().spawn(move || counted.0.serve(stream).ok());
    }

    fn serve(&self, stream: TcpStream) -> std::io::Result<()> {
        stream.set_write_timeout(Some(PATIENCE))?;
        let request = Request::read(&stream)?;
        let answer = || self.answer(&request);
        let answer = catch_unwind(AssertUnwindSafe(answer)).unwrap_or_else(|_| {
            refused("500 Internal Server Error", "this request could not be answered")
        });
        answer.write(&stream)
    }

    fn answer(&self, request: &Request) -> Answer {
        // A page from elsewhere must not read what is served here, whatever name it reaches this machine by.
        let origin = request.origin.as_deref();
        let from_here = origin.is_none_or(|origin| {
            origin.strip_prefix("http://").is_some_and(|host| is_own(host, self.port))
        });
        if !from_here || !request.host.as_deref().is_some_and(|host| is_own(host, self.port)) {
            return refused("403 Forbidden", "only for this machine");
        }
        let Some(path) = &request.path else {
            return refused("400 Bad Request", "give GET and a path");
        };
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        // Without the slash at its end, the page would ask for its parts elsewhere.
        let own = path.strip_prefix('/').and_then(|path| path.strip_prefix(self.token.as_str()));
        let Some(path) = own.and_then(|path| path.strip_prefix('/')) else {
            return refused("403 Forbidden", "give the whole address that `regard look` printed");
        };
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        match self.reply(&parts, query) {
            Some(Ok(answer)) => answer,
            Some(Err(error)) => refused("404 Not Found", &error.to_string()),
            None => refused("404 Not Found", "no such page"),
        }
    }

    /// What a path stands for; nothing for one that stands for nothing.
    fn reply(&self, parts: &[&str], query: &str) -> Option<Result<Answer>> {
        let zoom = &self.zoom;
        let number = |text: &str| text.parse::<usize>().ok();
        Some(match parts {
            [""] => zoom.info(0).map_err(Into::into).map(|info| {
                let body = zoom_page(info.title()).into_bytes();
                Answer { status: "200 OK", kind: "text/html; charset=utf-8", sampled: None, body }
            }),
            ["info.json"] => {
                let site = query.split('&').find_map(|part| part.strip_prefix("site="));
                let site = number(site.unwrap_or("0"))?;
                if site < zoom.sites().len() {
                    self.last.store(site, Ordering::Relaxed);
                }
                json(zoom.info(site))
            }
            ["tile", site, how, theme, level, x, y] => {
                let pool = match *how {
                    "max" => Pool::Max,
                    "mean" => Pool::Mean,
                    _ => return None,
                };
                let theme = match *theme {
                    "dark" => Theme::Dark,
                    "light" => Theme::Light,
                    _ => return None,
                };
                let place = [number(x)?, number(y.strip_suffix(".png")?)?];
                let tile = zoom.tile(number(site)?, pool, level.parse().ok()?, place);
                tile.map_err(Into::into).map(|tile| {
                    let (sampled, body) = (tile.sampled, tile.png(theme));
                    Answer { status: "200 OK", kind: "image/png", sampled, body }
                })
            }
            ["weight", site, row, key] => {
                json(zoom.weight(number(site)?, number(row)?, number(key)?))
            }
            ["row", site, row] => json(zoom.row(number(site)?, number(row)?)),
            ["labels", site, axis @ ("q" | "k"), start, end] => {
                let (start, end) = (number(start)?, number(end)?);
                let end = end.min(start.saturating_add(WORDS));
                let words = zoom.words(number(site)?, *axis == "k", start..end);
                json(words.map(|labels| serde_json::json!({ "start": start, "labels": labels })))
            }
            _ => return None,
        })
    }
}

impl Request {
    fn read(mut stream: &TcpStream) -> std::io::Result<Self> {
        let late = Instant::now() + PATIENCE;
        let (mut bytes, mut some) = (Vec::new(), [0; 2048]);
        while bytes.len() < REQUEST && !bytes.windows(4).any(|end| end == b"\r\n\r\n") {
            // However slowly it comes: no time left is an error here.
            stream.set_read_timeout(Some(late.saturating_duration_since(Instant::now())))?;
            match stream.read(&mut some)? {
                0 => break,
                n => bytes.extend(&some[..n]),
            }
        }
        let text = String::from_utf8_lossy(&bytes);
        let mut lines = text.lines();
        let first = lines.next().unwrap_or_default();
        let path = first.strip_prefix("GET ").and_then(|rest| rest.split(' ').next());
        let mut request = Self { path: path.map(Into::into), ..Self::default() };
        for (name, value) in lines.filter_map(|line| line.split_once(':')) {
            let value = Some(value.trim().to_string());
            if name.eq_ignore_ascii_case("host") {
                request.host = value;
            } else if name.eq_ignore_ascii_case("origin") {
                request.origin = value;
            }
        }
        Ok(request)
    }
}

fn json(data: Result<impl Serialize, regard_scope::Error>) -> Result<Answer> {
    let body = serde_json::to_vec(&data?)?;
    Ok(Answer { status: "200 OK", kind: "application/json", sampled: None, body })
}

fn refused(status: &'static str, why: &str) -> Answer {
    Answer { status, kind: "text/plain; charset=utf-8", sampled: None, body: why.into() }
}

impl Answer {
    fn write(&self, mut stream: &TcpStream) -> std::io::Result<()> {
        let Self { status, kind, sampled, body } = self;
        let sampled = sampled
            .map_or_else(String::new, |[some, all]| format!("x-regard-rows: {some}/{all}\r\n"));
        // Another run may serve something else under the same address.
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\ncache-control: no-store\r\n\
             x-content-type-options: nosniff\r\ncross-origin-resource-policy: same-origin\r\n\
             referrer-policy: no-referrer\r\n{sampled}connection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)?;
        stream.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn browsers_leave_out_the_port_of_http() {
        for (host, port, own) in [
            ("127.0.0.1:8000", 8000, true),
            ("localhost:8000", 8000, true),
            ("localhost:80", 80, true),
            ("localhost", 80, true),
            ("127.0.0.1", 80, true),
            ("127.0.0.1", 8000, false),
            ("127.0.0.1:80", 8000, false),
            ("127.0.0.1.example:8000", 8000, false),
            ("", 80, false),
        ] {
            assert_eq!(is_own(host, port), own, "{host} {port}");
        }
    }
}
