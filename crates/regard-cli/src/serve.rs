//! The server behind `regard look --serve`: for a browser on this machine alone.

use anyhow::{Context, Result};
use regard_scope::Pool;
use regard_scope::{Theme, Zoom, zoom_page};
use regard_serve::{Limits, Page, pages};
use serde::Serialize;
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Words that may be asked for at once.
const WORDS: usize = 1024;
/// Connections at once, far more than a browser opens: a process may have a few hundred descriptors anywhere.
const CONNECTIONS: usize = 256;

/// What is served, and the head that was asked about last.
struct Shared {
    zoom: Zoom,
    last: AtomicUsize,
    /// A part of every path that only who reads our output knows: other users of this machine can connect, too.
    token: String,
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
    drop(out);
    let shared = Arc::new(Shared { zoom, last: AtomicUsize::new(first), token });
    let surveyor = shared.clone();
    // Without it, tiles from a sample of rows stay what they are.
    let _ = thread::Builder::new().spawn(move || surveyor.survey());
    let limits = Limits { connections: CONNECTIONS, ..Limits::default() };
    Ok(pages(listener, limits, move |path, query| shared.answer(path, query))?)
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

    fn answer(&self, path: &str, query: &str) -> Page {
        // Without the slash at its end, the page would ask for its parts elsewhere.
        let own = path.strip_prefix('/').and_then(|path| path.strip_prefix(self.token.as_str()));
        let Some(path) = own.and_then(|path| path.strip_prefix('/')) else {
            return Page::refused(403, "give the whole address that `regard look` printed");
        };
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        match self.reply(&parts, query) {
            Some(Ok(page)) => page,
            Some(Err(error)) => Page::refused(404, &error.to_string()),
            None => Page::refused(404, "no such page"),
        }
    }

    /// What a path stands for; nothing for one that stands for nothing.
    fn reply(&self, parts: &[&str], query: &str) -> Option<Result<Page>> {
        let zoom = &self.zoom;
        let number = |text: &str| text.parse::<usize>().ok();
        Some(match parts {
            [""] => zoom.info(0).map_err(Into::into).map(|info| {
                let body = zoom_page(info.title()).into_bytes();
                Page { status: 200, kind: "text/html; charset=utf-8", header: None, body }
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
                    let rows = |[some, all]: [usize; 2]| ("x-regard-rows", format!("{some}/{all}"));
                    let (header, body) = (tile.sampled.map(rows), tile.png(theme));
                    Page { status: 200, kind: "image/png", header, body }
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

fn json(data: Result<impl Serialize, regard_scope::Error>) -> Result<Page> {
    let body = serde_json::to_vec(&data?)?;
    Ok(Page { status: 200, kind: "application/json", header: None, body })
}
