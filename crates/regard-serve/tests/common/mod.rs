//! A server in a thread of its own, and a client that knows as much of HTTP as a test needs.

#![allow(dead_code, unused_imports, reason = "each test program uses a part of it")]

mod models;

pub(crate) use models::{chat_model, encoder, noise_model, story, translator};

use regard_serve::{NamedModel, Options, ServeError, serve_until};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// A server; it ends with the test.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<Result<(), ServeError>>>,
}

/// Options of tests: any port, no waiting at the end.
pub(crate) fn options() -> Options {
    Options {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        kv_memory: 64 << 20,
        drain_delay: Duration::ZERO,
        drain: Duration::from_secs(20),
        threads: Some(1),
        ..Options::default()
    }
}

impl Server {
    /// With models that are open at once.
    pub(crate) fn new(options: Options, models: Vec<NamedModel>) -> Self {
        let server = Self::opening(options, move || Ok(models));
        server.wait_until_ready();
        server
    }

    pub(crate) fn opening(
        options: Options,
        open: impl FnOnce() -> Result<Vec<NamedModel>, ServeError> + Send + 'static,
    ) -> Self {
        let (tell, told) = channel();
        let (end, ended) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            let listening = move |address| tell.send(address).expect("a test that waits");
            let ended = async {
                let _dropped = ended.await;
            };
            runtime.block_on(serve_until(options, open, listening, ended))
        });
        let address = told.recv().expect("an address");
        Self { address, end: Some(end), thread: Some(thread) }
    }

    pub(crate) fn wait_until_ready(&self) {
        let start = Instant::now();
        while self.get("/readyz").status != 200 {
            assert!(start.elapsed() < Duration::from_secs(60), "it is never ready");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Asks for the end.
    pub(crate) fn end(&mut self) {
        drop(self.end.take());
    }

    /// Waits for the end.
    pub(crate) fn join(mut self) -> Result<(), ServeError> {
        self.thread.take().expect("it was started").join().expect("no panic")
    }

    pub(crate) fn ask(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> Answer {
        self.open(method, path, headers, body).read()
    }

    /// Sends a request, and leaves the answer to be read.
    pub(crate) fn open(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> Pending {
        let mut stream = TcpStream::connect(self.address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a time limit");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{headers}Content-Length: {}\r\n\r\n",
            self.address,
            body.len()
        );
        stream.write_all(head.as_bytes()).expect("it is sent");
        // A server that has refused it may have closed the connection.
        let _refused = stream.write_all(body);
        Pending { stream: BufReader::new(stream) }
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, "", b"")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Answer {
        self.ask("POST", path, JSON, body.to_string().as_bytes())
    }

    /// The value of a metric without its labels, summed over them.
    pub(crate) fn metric(&self, start: &str) -> f64 {
        let text = self.get("/metrics").body;
        let lines = text.lines().filter(|line| line.starts_with(start));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Waits until a metric has a value.
    pub(crate) fn wait_for(&self, start: &str, wanted: impl Fn(f64) -> bool) {
        let began = Instant::now();
        while !wanted(self.metric(start)) {
            assert!(began.elapsed() < Duration::from_secs(30), "{start}: {}", self.metric(start));
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

pub(crate) const JSON: &str = "Content-Type: application/json\r\n";

/// An answer that is still being sent.
pub(crate) struct Pending {
    pub(crate) stream: BufReader<TcpStream>,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// In small letters.
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Pending {
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("a line");
        line
    }

    pub(crate) fn read(mut self) -> Answer {
        let mut head = String::new();
        loop {
            let line = self.line();
            head.push_str(&line.to_lowercase());
            if line.trim().is_empty() {
                break;
            }
        }
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        let mut bytes = Vec::new();
        if head.contains("transfer-encoding: chunked") {
            loop {
                let size = usize::from_str_radix(self.line().trim(), 16).expect("a size");
                let mut chunk = vec![0; size + 2];
                self.stream.read_exact(&mut chunk).expect("a chunk");
                bytes.extend(&chunk[..size]);
                if size == 0 {
                    break;
                }
            }
        } else {
            self.stream.read_to_end(&mut bytes).expect("a body");
        }
        let body = String::from_utf8(bytes).expect("text");
        Answer { status: status.expect("a status"), head, body }
    }
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// Of an answer that must be right.
    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.json()
    }

    /// The error of an answer that must be one: its message, `param` and `code`.
    pub(crate) fn error(&self, status: u16) -> [String; 3] {
        assert_eq!(self.status, status, "{}", self.body);
        let error = &self.json()["error"];
        assert!(error["type"].is_string() && error["message"].is_string(), "{}", self.body);
        ["message", "param", "code"].map(|name| error[name].as_str().unwrap_or_default().to_owned())
    }

    /// The choices as they were written: numbers have all their bits.
    pub(crate) fn choices(&self) -> &str {
        assert_eq!(self.status, 200, "{}", self.body);
        let (_, rest) = self.body.split_once("\"choices\":").expect("choices");
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        assert!(values.next().is_some_and(|value| value.is_ok()));
        &rest[..values.byte_offset()]
    }

    /// The chunks of a stream, which must end as streams do.
    pub(crate) fn chunks(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.body);
        assert!(self.head.contains("content-type: text/event-stream"), "{}", self.head);
        let data: Vec<&str> =
            self.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        let (last, chunks) = data.split_last().expect("chunks");
        assert_eq!(*last, "[DONE]");
        chunks.iter().map(|chunk| serde_json::from_str(chunk).expect("JSON")).collect()
    }
}
