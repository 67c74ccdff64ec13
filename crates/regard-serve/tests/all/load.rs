//! Many requests at once: what an answer is does not depend on them, and what is too much is refused.

use crate::common::{Server, options, story};
use regard_serve::Options;
use serde_json::{Value, json};

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
