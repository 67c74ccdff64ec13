//! Start and end.

use crate::common::{JSON, Server, options, story};
use regard_serve::{Options, ServeError};
use serde_json::json;
use std::sync::mpsc::channel;
use std::time::Duration;

#[test]
fn a_server_is_ready_when_its_models_are_open() {
    let (open, opened) = channel();
    let server = Server::opening(options(), move || {
        opened.recv().expect("a test that opens");
        Ok(vec![story()])
    });
    assert_eq!(server.get("/livez").status, 200);
    assert_eq!(server.get("/readyz").status, 503);
    server.get("/health").error(503);
    server.get("/v1/models").error(503);
    server.post("/v1/completions", &json!({"prompt": "x"})).error(503);
    open.send(()).expect("a server that waits");
    server.wait_until_ready();
    let _right = server.post("/v1/completions", &json!({"prompt": "x"})).ok();
}

#[test]
fn a_model_that_cannot_be_opened_ends_the_server() {
    let server = Server::opening(options(), || Err(ServeError::Model("cut short".into())));
    assert!(server.join().expect_err("no model").to_string().contains("cut short"));
}

fn long(server: &Server) -> crate::common::Pending {
    let body =
        json!({"prompt": "Once", "max_tokens": 500, "stream": true, "logit_bias": {"2": -100}});
    server.open("POST", "/v1/completions", JSON, body.to_string().as_bytes())
}

#[test]
fn a_server_that_ends_is_not_ready_and_finishes() {
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
    let options = Options { drain: Duration::from_millis(1), max_batch: 1, ..options() };
    let mut server = Server::new(options, vec![story()]);
    let mut streams: Vec<_> = (0..12).map(|_| long(&server)).collect();
    while !streams[0].line().starts_with("data: ") {}
    server.wait_for("regard_queued_requests", |waiting| waiting >= 5.0);
    server.end();
    let waited = streams.pop().expect("a stream").read();
    waited.error(503);
    assert!(server.join().is_ok());
}
