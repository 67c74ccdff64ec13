//! Engines that fail: their requests get a 500, and the next ones an answer. Failpoints are of the whole process, so these tests are a
//! program of their own and take turns.

mod common;

use common::{Server, encoder, options, story};
use serde_json::json;

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
    assert_eq!(server.metric("regard_kv_pages{model=\"story\",state=\"reserved\""), 0.0);
    // The batch lane; a third fault within a minute is too much.
    let texts = json!({"input": "the sky"});
    fail::cfg("batch", "1*panic->off").expect("a failpoint");
    server.post("/v1/embeddings", &texts).error(500);
    let _right = server.post("/v1/embeddings", &texts).ok();
    server.get("/livez").error(503);
    scenario.teardown();
}
