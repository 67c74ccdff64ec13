//! Many requests at once: what an answer is does not depend on them, and what is too much is refused.

use crate::common::{JSON, Server, options, story};
use regard_serve::Options;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Requests of every kind; many share the beginnings of their prompts.
fn requests() -> Vec<Value> {
    (0..64_u32)
        .map(|i| {
            let len = [3, 40, 257, 300, 400, 13, 1, 256][i as usize % 8];
            let temperature = [0.0, 1.0, 0.7][i as usize % 3];
            let prompt: Vec<u32> =
                (0..len).map(|at| 3 + (at * (1 + i % 3) + i / 32 * (at / 256)) % 500).collect();
            json!({
                "prompt": prompt, "max_tokens": 4 + i % 24, "temperature": temperature,
                "seed": i, "logprobs": 2, "frequency_penalty": if i % 5 == 0 { 0.5 } else { 0.0 },
            })
        })
        .collect()
}

fn answers(server: &Server, requests: &[Value], at_once: bool) -> Vec<String> {
    let ask = |body: &Value| server.post("/v1/completions", body).choices().to_owned();
    if !at_once {
        return requests.iter().map(ask).collect();
    }
    std::thread::scope(|scope| {
        let ask = &ask;
        let threads: Vec<_> = requests.iter().map(|body| scope.spawn(move || ask(body))).collect();
        threads.into_iter().map(|thread| thread.join().expect("an answer")).collect()
    })
}

#[test]
fn an_answer_has_the_same_bits_alone_and_under_load() {
    let requests = requests();
    let alone = Server::new(Options { prefix_cache: false, ..options() }, vec![story()]);
    let right = answers(&alone, &requests, false);
    assert_eq!(alone.metric("regard_prefix_hits_total"), 0.0);
    drop(alone);
    for (prefix_cache, engines, threads) in
        [(true, 1, 1), (false, 1, 2), (true, 2, 1), (false, 2, 1)]
    {
        let options = Options { prefix_cache, engines, threads: Some(threads), ..options() };
        let server = Server::new(options, vec![story()]);
        for round in 0..2 {
            let found = answers(&server, &requests, true);
            for (i, (found, right)) in found.iter().zip(&right).enumerate() {
                assert_eq!(
                    found, right,
                    "request {i}, prefix cache {prefix_cache}, {engines} engines, round {round}"
                );
            }
        }
        assert_eq!(server.metric("regard_prefix_hits_total") > 0.0, prefix_cache);
        server.wait_for("regard_kv_pages{model=\"story\",state=\"reserved\"", |pages| pages == 0.0);
        assert_eq!(server.metric("regard_queued_requests"), 0.0);
    }
}

/// A request that takes a while, whose answer is read later.
fn long(server: &Server) -> crate::common::Pending {
    let body = json!({"prompt": "Once", "max_tokens": 500, "stream": true, "logit_bias": {"2": -100}, "temperature": 0});
    server.open("POST", "/v1/completions", JSON, body.to_string().as_bytes())
}

#[test]
fn a_full_queue_refuses_at_once() {
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
    let options = Options { max_batch: 2, ..options() };
    let server = Server::new(options, vec![story()]);
    let mut streams: Vec<_> = (0..3).map(|_| long(&server)).collect();
    // The first has begun, the third waits.
    while !streams[0].line().starts_with("data: ") {}
    server.wait_for("regard_queued_requests", |waiting| waiting == 1.0);
    streams.clear();
    server.wait_for("regard_cancelled_total", |gone| gone == 3.0);
    server.wait_for("regard_kv_pages{model=\"story\",state=\"reserved\"", |pages| pages == 0.0);
    assert!(server.metric("regard_tokens_total{kind=\"generated\"}") < 1400.0);
    assert_eq!(server.metric("regard_queued_requests"), 0.0);
}

#[test]
fn a_request_that_is_late_ends() {
    let server = Server::new(Options { max_batch: 1, ..options() }, vec![story()]);
    let body =
        json!({"prompt": "Once", "max_tokens": 400, "temperature": 0, "logit_bias": {"2": -100}})
            .to_string();
    let running = long(&server);
    // Behind another, it does not begin in time.
    let ask = |seconds: &str| {
        server.ask(
            "POST",
            "/v1/completions",
            &format!("{JSON}X-Request-Timeout: {seconds}\r\n"),
            body.as_bytes(),
        )
    };
    assert_eq!(ask("0.001").error(504)[2], "deadline");
    drop(running);
    server.wait_for("regard_cancelled_total", |gone| gone == 1.0);
    // Alone, it begins, and does not finish; on a machine that is fast enough, or slow enough, one of the others.
    let mut reasons = Vec::new();
    for milliseconds in [4, 8, 16, 32, 64, 128, 256] {
        let answer = ask(&format!("{}", f64::from(milliseconds) / 1000.0));
        match answer.status {
            504 => reasons.push("late".to_owned()),
            _ => reasons.push(
                answer.ok()["choices"][0]["finish_reason"].as_str().expect("a reason").to_owned(),
            ),
        }
    }
    assert!(reasons.contains(&"deadline".to_owned()), "{reasons:?}");
}

#[test]
fn clients_that_say_nothing_do_not_stand_in_the_way() {
    let server = Server::new(options(), vec![story()]);
    let idle: Vec<_> = (0..200)
        .map(|_| std::net::TcpStream::connect(server.address).expect("a connection"))
        .collect();
    let slow: Vec<_> = (0..8).map(|_| long(&server)).collect();
    let answer = server.post("/v1/completions", &json!({"prompt": "Once", "max_tokens": 3}));
    assert_eq!(answer.status, 200);
    drop((idle, slow));
}
