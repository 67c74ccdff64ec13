//! The server behind `regard look --serve`: for a browser on this machine alone.
//!
//! One request a connection, one thread a connection: a browser opens a handful, and loopback makes new ones for nothing.
//! (Servers that keep connections and hand them to a pool left tiles waiting behind idle ones.)

use anyhow::{Context, Result};
use regard::Pool;
use regard_scope::{Theme, Zoom, zoom_page};
use serde::Serialize;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Words that may be asked for at once.
const WORDS: usize = 1024;
/// Bytes of a request, at most.
const REQUEST: u64 = 1 << 14;
/// How long a browser may take to ask.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is served, and the head that was asked about last.
struct Shared {
    zoom: Zoom,
    last: AtomicUsize,
    port: u16,
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
    let text = "Open it in a browser on this machine; Ctrl-C ends it.";
    let mut out = std::io::stdout().lock();
    out.write_all(format!("http://127.0.0.1:{port}/#site={first}\n{text}\n").as_bytes())?;
    out.flush()?;
    let shared = Arc::new(Shared { zoom, last: AtomicUsize::new(first), port });
    let surveyor = shared.clone();
    thread::spawn(move || surveyor.survey());
    for stream in listener.incoming() {
        let shared = shared.clone();
        // A browser that has gone away is no error.
        thread::spawn(move || stream.and_then(|stream| shared.serve(stream)).ok());
    }
    Ok(())
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

    fn serve(&self, stream: TcpStream) -> std::io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut lines = BufReader::new((&stream).take(REQUEST)).lines();
        let first = lines.next().transpose()?.unwrap_or_default();
        let mut host = None;
        for line in lines {
            let line = line?;
            match line.split_once(':') {
                Some((name, value)) if name.eq_ignore_ascii_case("host") => {
                    host = Some(value.trim().to_string());
                }
                _ if line.is_empty() => break,
                _ => {}
            }
        }
        let path = first.strip_prefix("GET ").and_then(|rest| rest.split(' ').next());
        let answer = || self.answer(path, host.as_deref());
        let answer = catch_unwind(AssertUnwindSafe(answer)).unwrap_or_else(|_| {
            refused("500 Internal Server Error", "this request could not be answered")
        });
        answer.write(&stream)
    }

    fn answer(&self, path: Option<&str>, host: Option<&str>) -> Answer {
        // A page from elsewhere must not read what is served here, whatever name it reaches this machine by.
        let own = ["127.0.0.1", "localhost"].map(|name| format!("{name}:{}", self.port));
        if !host.is_some_and(|host| own.iter().any(|own| own == host)) {
            return refused("403 Forbidden", "only for this machine");
        }
        let Some(path) = path else { return refused("400 Bad Request", "give GET and a path") };
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
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
             x-content-type-options: nosniff\r\n{sampled}connection: close\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)?;
        stream.flush()
    }
}
