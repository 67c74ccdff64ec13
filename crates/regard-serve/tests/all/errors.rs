//! What is wrong is a 4xx that says what and where.

use crate::common::{JSON, Server, chat_model, encoder, options, translator};
use serde_json::{Value, json};
use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

fn server() -> Server {
    Server::new(options(), vec![chat_model(), encoder(), translator()])
}

#[test]
fn a_field_that_is_wrong_or_not_supported_is_named() {
    let server = server();
    let hi = json!([{"role": "user", "content": "Hi"}]);
    for (path, body, param) in [
        ("/v1/completions", json!({}), "prompt"),
        ("/v1/completions", json!({"prompt": []}), "prompt"),
        ("/v1/completions", json!({"prompt": [[]]}), "prompt"),
        ("/v1/completions", json!({"prompt": {"a": 1}}), "prompt"),
        ("/v1/completions", json!({"prompt": [1.5]}), "prompt"),
        ("/v1/completions", json!({"prompt": [99999]}), "prompt"),
        ("/v1/completions", json!({"prompt": "x", "n": 0}), "n"),
        ("/v1/completions", json!({"prompt": "x", "n": 1000}), "n"),
        ("/v1/completions", json!({"prompt": "x", "temperature": -1}), "temperature"),
        ("/v1/completions", json!({"prompt": "x", "temperature": "hot"}), "temperature"),
        ("/v1/completions", json!({"prompt": "x", "top_p": -0.5}), "top_p"),
        ("/v1/completions", json!({"prompt": "x", "top_k": 0}), "top_k"),
        ("/v1/completions", json!({"prompt": "x", "min_p": 2}), "min_p"),
        ("/v1/completions", json!({"prompt": "x", "seed": 1.5}), "seed"),
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 0}), "max_tokens"),
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 99999}), "max_tokens"),
        ("/v1/completions", json!({"prompt": "x", "logprobs": true}), "logprobs"),
        ("/v1/completions", json!({"prompt": "x", "logprobs": 21}), "logprobs"),
        ("/v1/completions", json!({"prompt": "x", "logit_bias": {"a": 1}}), "logit_bias"),
        ("/v1/completions", json!({"prompt": "x", "logit_bias": {"1": 101}}), "logit_bias"),
        ("/v1/completions", json!({"prompt": "x", "logit_bias": {"77777": 1}}), "logit_bias"),
        ("/v1/completions", json!({"prompt": "x", "stop": [1]}), "stop"),
        ("/v1/completions", json!({"prompt": "x", "echo": true}), "echo"),
        ("/v1/completions", json!({"prompt": "x", "best_of": 4}), "best_of"),
        ("/v1/completions", json!({"prompt": "x", "attention": {"layers": [0]}}), "attention"),
        ("/v1/completions", json!({"prompt": "x", "stream_options": 1}), "stream_options"),
        ("/v1/completions", json!({"prompt": "x", "colour": 1}), "colour"),
        ("/v1/chat/completions", json!({}), "messages"),
        ("/v1/chat/completions", json!({"messages": []}), "messages"),
        ("/v1/chat/completions", json!({"messages": [1]}), "messages[0]"),
        ("/v1/chat/completions", json!({"messages": [{"role": "tool"}]}), "messages[0].role"),
        ("/v1/chat/completions", json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "", "x": 1}]}),
            "messages[0].x",
        ),
        ("/v1/chat/completions", json!({"messages": hi, "tools": [{"type": "function"}]}), "tools"),
        ("/v1/chat/completions", json!({"messages": hi, "top_logprobs": 2}), "top_logprobs"),
        (
            "/v1/chat/completions",
            json!({"messages": hi, "response_format": {"type": "xml"}}),
            "response_format.type",
        ),
        ("/v1/chat/completions", json!({"messages": hi, "model": "sentences"}), "model"),
        ("/v1/embeddings", json!({"model": "sentences"}), "input"),
        ("/v1/embeddings", json!({"input": [77]}), "input"),
        ("/v1/embeddings", json!({"input": "x", "dimensions": 3}), "dimensions"),
        ("/v1/embeddings", json!({"input": "x", "encoding_format": "hex"}), "encoding_format"),
        ("/v1/embeddings", json!({"input": "the ".repeat(40)}), "input"),
        ("/embed", json!({"inputs": "x", "normalize": false}), "normalize"),
        ("/translate", json!({"source": "zh", "target": "en"}), "q"),
        ("/translate", json!({"q": [], "source": "zh", "target": "en"}), "q"),
        ("/translate", json!({"q": "好", "source": "zh", "target": "fr"}), "target"),
        (
            "/translate",
            json!({"q": "好", "source": "zh", "target": "en", "format": "html"}),
            "format",
        ),
    ] {
        assert_eq!(server.post(path, &body).error(400)[1], param, "{path} {body}");
    }
    let long = json!({"prompt": vec![5; 500], "max_tokens": 20, "model": "chat"});
    assert_eq!(server.post("/v1/completions", &long).error(400)[2], "context_length_exceeded");
    let long = json!({"prompt": "word ".repeat(2000), "model": "chat"});
    assert_eq!(server.post("/v1/completions", &long).error(400)[2], "context_length_exceeded");
    let [message, ..] =
        server.post("/v1/completions", &json!({"prompt": "x", "attention": {}})).error(400);
    assert!(message.contains("start it with --attention"), "{message}");
    assert_eq!(
        server.post("/v1/completions", &json!({"model": "x", "prompt": ""})).error(404)[2],
        "model_not_found"
    );
}

#[test]
fn malformed_requests_are_never_a_fault_of_the_server() {
    let server = server();
    let deep = "[".repeat(100_000);
    let bodies: Vec<Vec<u8>> = vec![
        b"".to_vec(),
        b"{".to_vec(),
        b"null".to_vec(),
        b"[]".to_vec(),
        b"{\"prompt\": \"\\ud800\"}".to_vec(),
        b"{\"prompt\": 1e999}".to_vec(),
        vec![0xff; 100],
        deep.into_bytes(),
        format!("{{\"prompt\": \"x\", \"{}\": 1}}", "k".repeat(5000)).into_bytes(),
    ];
    for (_, path) in regard_serve::ROUTES.iter().filter(|(method, _)| *method == "post") {
        for body in &bodies {
            let answer = server.ask("POST", path, JSON, body);
            assert!((400..500).contains(&answer.status), "{path}: {}", answer.body);
            let _is_error = answer.error(answer.status);
        }
    }
    // Values of every kind in every field.
    let values = [
        json!(null),
        json!(-1),
        json!(1e300),
        json!(""),
        json!("\u{0}"),
        json!([]),
        json!({}),
        json!([[]]),
        json!(true),
        json!([null]),
    ];
    for (path, body) in [
        (
            "/v1/completions",
            json!({"model": "chat", "prompt": "x", "max_tokens": 2, "temperature": 0, "top_p": 1, "min_p": 0, "top_k": 2, "seed": 1, "stop": "x", "logit_bias": {}, "logprobs": 0, "response_format": {"type": "text"}, "n": 1}),
        ),
        (
            "/v1/chat/completions",
            json!({"model": "chat", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logprobs": true, "top_logprobs": 1}),
        ),
        (
            "/v1/embeddings",
            json!({"model": "sentences", "input": "x", "encoding_format": "float", "dimensions": 16, "user": ""}),
        ),
        ("/embed", json!({"inputs": "x", "normalize": true, "truncate": false})),
        (
            "/translate",
            json!({"q": "好", "source": "zh", "target": "en", "format": "text", "alternatives": 0}),
        ),
    ] {
        let _right = server.post(path, &body).ok();
        for field in body.as_object().expect("an object").keys() {
            for value in &values {
                let mut body: Value = body.clone();
                body[field] = value.clone();
                let answer = server.post(path, &body);
                assert!(answer.status < 500, "{path} {body}: {}", answer.body);
            }
        }
    }
}

#[test]
fn what_http_has_a_status_for_has_it() {
    let mut small = options();
    small.max_body = 1000;
    let server = Server::new(small, vec![chat_model()]);
    server.get("/nowhere").error(404);
    server.get("/v1/completions").error(405);
    server.ask("POST", "/v1/completions", "", b"{}").error(415);
    server.ask("POST", "/v1/completions", "Content-Type: text/plain\r\n", b"{}").error(415);
    let [message, ..] =
        server.post("/v1/completions", &json!({"prompt": "x".repeat(1000)})).error(413);
    assert!(message.contains("1000 bytes"), "{message}");
    for time in ["soon", "0", "0.01", "-1", "NaN", "inf"] {
        let header = format!("{JSON}X-Request-Timeout: {time}\r\n");
        let [message, ..] = server.ask("POST", "/v1/completions", &header, b"{}").error(400);
        assert!(message.contains("x-request-timeout"), "{time}: {message}");
    }
    let [message, ..] = server
        .ask("POST", "/v1/completions", &format!("{JSON}X-Request-Timeout: 1e308\r\n"), b"{}")
        .error(400);
    assert!(message.contains("prompt"), "as long as the server allows: {message}");
    // A body that does not come, and a head that does not come.
    let mut slow = TcpStream::connect(server.address).expect("a connection");
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Length: 9\r\n{JSON}\r\n",
        server.address
    );
    slow.write_all(head.as_bytes()).expect("it is sent");
    slow.set_read_timeout(Some(Duration::from_secs(30))).expect("a time limit");
    let slow = crate::common::Pending { stream: std::io::BufReader::new(slow) };
    let mut slow = slow;
    assert!(slow.line().starts_with("HTTP/1.1 408"));
}
