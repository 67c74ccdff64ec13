//! Engines that fail, and engines that are slow, so that requests wait, are late or are left behind. Failpoints are of the whole process,
//! so these tests are a program of their own and take turns.

mod common;

use common::{JSON, Pending, Server, encoder, options, story};
use regard_serve::Options;
use serde_json::json;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Steps take 20 ms at least: 400 tokens take 8 s, whatever the machine, or until the failpoint is removed.
fn slow() -> fail::FailScenario<'static> {
    let scenario = fail::FailScenario::setup();
    fail::cfg("step", "sleep(20)").expect("a failpoint");
    scenario
}

/// A request that takes a while, whose answer is read later.
fn long(server: &Server) -> Pending {
    let body = json!({"prompt": "Once", "max_tokens": 500, "stream": true, "logit_bias": {"2": -100}, "temperature": 0});
    server.open("POST", "/v1/completions", JSON, body.to_string().as_bytes())
}

#[test]
fn a_panic_costs_its_requests_and_nothing_else() {
    let scenario = fail::FailScenario::setup();
    let server = Server::new(options(), vec![story(), encoder()]);
    let body = json!({"model": "story", "prompt": "Once", "max_tokens": 20, "temperature": 0});
    let right = server.post("/v1/completions", &body);
    // In the third step, so that a stream has begun.
    fail::cfg("step", "2*off->1*panic->off").expect("a failpoint");
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let answer = server.post("/v1/completions", &streamed);
    assert_eq!(answer.status, 200);
    let chunks = answer.chunks();
    assert_eq!(chunks.last().expect("chunks")["error"]["type"], "server_error");
    fail::cfg("step", "1*panic->off").expect("a failpoint");
    server.post("/v1/completions", &body).error(500);
    assert_eq!(server.post("/v1/completions", &body).choices(), right.choices());
    assert_eq!(server.metric("regard_faults_total"), 2.0);
    assert_eq!(server.get("/livez").status, 200);
    server.wait_for("regard_kv_pages{model=\"story\",state=\"reserved\"", |pages| pages == 0.0);
    // The batch lane; a third fault within a minute is too much.
    let texts = json!({"input": "the sky"});
    fail::cfg("batch", "1*panic->off").expect("a failpoint");
    server.post("/v1/embeddings", &texts).error(500);
    let _right = server.post("/v1/embeddings", &texts).ok();
    server.get("/livez").error(503);
    scenario.teardown();
}

#[test]
fn a_server_that_ends_is_not_ready_and_finishes() {
    let _slow = slow();
    let options = Options { drain_delay: Duration::from_millis(500), ..options() };
    let mut server = Server::new(options, vec![story()]);
    let mut streams: Vec<_> = (0..3).map(|_| long(&server)).collect();
    while !streams[0].line().starts_with("data: ") {}
    server.end();
    // Balancers need a while to see it: until then, requests are still answered.
    while server.get("/readyz").status == 200 {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(server.get("/livez").status, 200);
    let _right = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2})).ok();
    fail::remove("step");
    let first = streams.remove(0);
    for stream in streams {
        let chunks = stream.read().chunks();
        assert_eq!(chunks.last().expect("chunks")["choices"][0]["finish_reason"], "length");
    }
    drop(first);
    let address = server.address;
    assert!(server.join().is_ok());
    assert!(std::net::TcpStream::connect(address).is_err());
}

#[test]
fn what_is_left_at_the_end_of_the_drain_is_cancelled() {
    let _slow = slow();
    let options = Options { drain: Duration::from_millis(1), max_batch: 1, ..options() };
    let mut server = Server::new(options, vec![story()]);
    let streams: Vec<_> = (0..12).map(|_| long(&server)).collect();
    server.wait_for("regard_queue_seconds_count", |begun| begun == 1.0);
    server.wait_for("regard_queued_requests", |waiting| waiting == 11.0);
    server.end();
    let waited = streams.into_iter().map(Pending::read).filter(|answer| answer.status == 503);
    assert_eq!(waited.count(), 11);
    assert!(server.join().is_ok());
}

#[test]
fn a_full_queue_refuses_at_once() {
    let _slow = slow();
    let options = Options { max_queued: 2, max_queued_tokens: 100, max_batch: 1, ..options() };
    let server = Server::new(options, vec![story()]);
    let running = long(&server);
    server.wait_for("regard_queue_seconds_count", |begun| begun == 1.0);
    let waiting = [long(&server), long(&server)];
    server.wait_for("regard_queued_requests", |waiting| waiting == 2.0);
    let start = Instant::now();
    let refused = server.post("/v1/completions", &json!({"prompt": "x"}));
    assert_eq!(refused.error(429)[2], "queue_full");
    assert!(refused.head.contains("\r\nretry-after: "), "{}", refused.head);
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(server.metric("regard_rejected_total{reason=\"queue_full\"}"), 1.0);
    fail::remove("step");
    assert_eq!(running.read().status, 200);
    for one in waiting {
        assert_eq!(one.read().status, 200);
    }
    // Tokens are bounded, too.
    let error = server.post("/v1/completions", &json!({"prompt": vec![5; 101]})).error(400);
    assert_eq!(error[2], "request_too_large");
}

#[test]
fn a_client_that_leaves_frees_its_pages() {
    let _slow = slow();
    let options = Options { max_batch: 2, ..options() };
    let server = Server::new(options, vec![story()]);
    let mut streams: Vec<_> = (0..3).map(|_| long(&server)).collect();
    // Two have begun, whichever came first; one waits.
    server.wait_for("regard_queue_seconds_count", |begun| begun == 2.0);
    server.wait_for("regard_queued_requests", |waiting| waiting == 1.0);
    streams.clear();
    server.wait_for("regard_cancelled_total", |gone| gone == 3.0);
    server.wait_for("regard_kv_pages{model=\"story\",state=\"reserved\"", |pages| pages == 0.0);
    assert!(server.metric("regard_tokens_total{kind=\"generated\"}") < 1400.0);
    assert_eq!(server.metric("regard_queued_requests"), 0.0);
}

#[test]
fn a_request_that_is_late_ends() {
    let _slow = slow();
    let server = Server::new(Options { max_batch: 1, ..options() }, vec![story()]);
    let body =
        json!({"prompt": "Once", "max_tokens": 400, "temperature": 0, "logit_bias": {"2": -100}})
            .to_string();
    let running = long(&server);
    server.wait_for("regard_queue_seconds_count", |begun| begun == 1.0);
    // Behind another, it does not begin in time.
    let ask = |seconds: &str| {
        server.ask(
            "POST",
            "/v1/completions",
            &format!("{JSON}X-Request-Timeout: {seconds}\r\n"),
            body.as_bytes(),
        )
    };
    assert_eq!(ask("0.1").error(504)[2], "deadline");
    drop(running);
    server.wait_for("regard_cancelled_total", |gone| gone == 1.0);
    // Alone, it begins, and does not finish.
    let answer = ask("1").ok();
    assert_eq!(answer["choices"][0]["finish_reason"], "deadline");
}

#[test]
fn clients_that_say_nothing_do_not_stand_in_the_way() {
    let _slow = slow();
    let server = Server::new(options(), vec![story()]);
    let idle: Vec<_> = (0..200)
        .map(|_| std::net::TcpStream::connect(server.address).expect("a connection"))
        .collect();
    let slow: Vec<_> = (0..8).map(|_| long(&server)).collect();
    let answer = server.post("/v1/completions", &json!({"prompt": "Once", "max_tokens": 3}));
    assert_eq!(answer.status, 200);
    drop((idle, slow));
}

#[test]
fn pages_are_made_one_at_a_time() {
    let scenario = fail::FailScenario::setup();
    let server = Server::new(Options { attention: true, ..options() }, vec![story()]);
    let body = json!({"prompt": "Once", "max_tokens": 4, "attention": {"page": true}});
    let answer = server.post("/v1/completions", &body).ok();
    let path = answer["choices"][0]["look"].as_str().expect("a path");
    // A page begins, says so, and waits until it may go on.
    let ((begin, begun), (go, went)) = (sync_channel(0), sync_channel(0));
    let went = Arc::new(Mutex::new(went));
    fail::cfg_callback("look", move || {
        begin.send(()).expect("a test that waits");
        went.lock().expect("one at a time").recv().expect("a test that lets it go on");
    })
    .expect("a failpoint");
    let first = server.open("GET", path, "", b"");
    begun.recv().expect("it begins");
    let refused = server.get(path);
    assert_eq!(refused.error(429)[2], "queue_full");
    assert!(refused.head.contains("\r\nretry-after: 2\r\n"), "{}", refused.head);
    server.get("/v1/look/other").error(404);
    // Answers do not wait for it.
    let _right = server.post("/v1/completions", &body).ok();
    go.send(()).expect("it waits");
    let right = first.read();
    assert_eq!(right.status, 200);
    // One that is late is made to its end, and until then there is no other.
    let late = server.open("GET", path, "X-Request-Timeout: 0.1\r\n", b"");
    begun.recv().expect("it begins");
    assert_eq!(late.read().error(504)[2], "deadline");
    server.get(path).error(429);
    go.send(()).expect("it waits");
    fail::remove("look");
    let again = (0..).map(|_| server.get(path)).find(|answer| answer.status != 429);
    assert_eq!(again.expect("in the end").body, right.body);
    fail::cfg("look", "1*panic->off").expect("a failpoint");
    server.get(path).error(500);
    assert_eq!(server.get(path).body, right.body);
    scenario.teardown();
}
