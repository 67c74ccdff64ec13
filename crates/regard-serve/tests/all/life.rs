//! Start and end.

use crate::common::{Server, options, story};
use regard_serve::ServeError;
use serde_json::json;
use std::sync::mpsc::channel;

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
