//! Pages of the attention of answers.

use crate::common::{Answer, JSON, Server, chat_model, options, story};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use regard_serve::Options;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

fn server() -> Server {
    Server::new(Options { attention: true, ..options() }, vec![chat_model()])
}

/// Asks greedily, and returns the only choice.
fn ask(server: &Server, path: &str, mut body: Value) -> Value {
    body["temperature"] = json!(0);
    server.post(path, &body).ok()["choices"][0].clone()
}

fn path(choice: &Value) -> &str {
    choice["look"].as_str().expect("a path")
}

/// A page and the data that is in it.
fn page(server: &Server, choice: &Value) -> (Answer, Value) {
    let answer = server.get(path(choice));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let data = between(&answer.body, "<script type=\"application/json\" id=\"data\">", "</script>");
    let data = serde_json::from_str(data).expect("JSON");
    (answer, data)
}

fn between<'t>(text: &'t str, begin: &str, end: &str) -> &'t str {
    let (_, rest) = text.split_once(begin).expect(begin);
    rest.split_once(end).expect(end).0
}

fn labels(data: &Value) -> Vec<&str> {
    let labels = data["axes"]["target"]["labels"].as_array().expect("labels");
    labels.iter().filter_map(Value::as_str).collect()
}

/// Tokens as pages name them.
fn words(tokens: &[u32]) -> Vec<String> {
    let model = story().model;
    tokens
        .iter()
        .map(|id| model.tokens().expect("it has a vocabulary").token(*id).expect("a token"))
        .collect()
}

/// The tokens that are generated greedily after a text.
fn generated(text: &str, count: usize) -> Vec<u32> {
    let named = story();
    let model = named.model.causal_lm().expect("it is");
    let greedy = regard_models::generate::DecodingStrategy::Greedy;
    let silent = &mut |_: usize, _: &str| std::ops::ControlFlow::Continue(());
    model.generate(&[text], &greedy, count, silent).expect("a text").remove(0).tokens
}

#[test]
fn a_page_shows_what_the_answer_told() {
    let server = server();
    let prompt = "Once upon a time there was";
    let told = json!({"layers": [0, -1], "heads": [1, 3], "top_k": 3, "page": true});
    let body = json!({"prompt": prompt, "max_tokens": 6, "attention": told});
    let choice = ask(&server, "/v1/completions", body);
    let (_, data) = page(&server, &choice);
    let mut tokens =
        story().model.tokens().expect("it has a vocabulary").encode(prompt).expect("tokens");
    let read = tokens.len();
    tokens.extend(generated(prompt, 6));
    assert_eq!(labels(&data), words(&tokens), "the client gave the prompt: its words are named");
    assert_eq!(data["title"], "chat");
    let sites = data["sites"].as_array().expect("sites");
    assert_eq!(sites.len(), 5 * 8, "all heads of all layers");
    let rows = choice["attention"].as_array().expect("rows");
    assert_eq!(rows.len(), 6);
    for (i, row) in rows.iter().enumerate() {
        for one in row["sites"].as_array().expect("sites") {
            let own =
                |site: &&Value| (&site["layer"], &site["head"]) == (&one["layer"], &one["head"]);
            let site = sites.iter().find(own).expect("a head");
            let codes = STANDARD.decode(site["weights"].as_str().expect("text")).expect("base64");
            let codes: Vec<u16> =
                codes.chunks(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
            for top in one["top"].as_array().expect("positions") {
                let key: usize = top[0].to_string().parse().expect("a position");
                let weight = top[1].as_f64().expect("a weight");
                // The token before is the one that looked.
                let at = (read + i - 1) * tokens.len() + key;
                let shown = (f64::from(codes[at]) / 65534.0).powi(2);
                // Pages hold square roots in 16 bits: half a step is 1.6e-5 where the weight is 1.
                assert!((shown - weight).abs() < 2e-5, "{one}: {shown}, not {weight}");
            }
        }
    }
}

#[test]
fn words_before_what_a_chat_answers_are_not_named() {
    let server = server();
    let messages =
        json!([{"role": "system", "content": "Zebra secret"}, {"role": "user", "content": "Hi"}]);
    let body = json!({"messages": messages, "max_tokens": 5, "attention": {"page": true}});
    let choice = ask(&server, "/v1/chat/completions", body);
    assert_eq!(choice.get("attention"), None, "no heads were named");
    let (answer, data) = page(&server, &choice);
    let text = "system: Zebra secret\nuser: Hi\nassistant:";
    let read =
        story().model.tokens().expect("it has a vocabulary").encode(text).expect("tokens").len();
    let shown = labels(&data);
    let positions: Vec<String> = (0..read).map(|position| format!("·{position}")).collect();
    assert_eq!(shown[..read], positions);
    assert_eq!(shown[read..], words(&generated(text, 5)));
    assert!(!answer.body.contains("Zebra") && answer.body.contains("·n: token n of the prompt"));
}

#[test]
fn a_browser_runs_the_script_of_the_page_and_nothing_else() {
    let server = server();
    let body = json!({"prompt": "<script>alert(1)</script>", "max_tokens": 2, "attention": {"page": true}});
    let (answer, _) = page(&server, &ask(&server, "/v1/completions", body));
    for header in [
        "content-type: text/html; charset=utf-8",
        "cache-control: no-store",
        "x-content-type-options: nosniff",
        "referrer-policy: no-referrer",
        "cross-origin-resource-policy: same-origin",
    ] {
        assert!(answer.head.contains(&format!("\r\n{header}\r\n")), "{}", answer.head);
    }
    let policy = between(&answer.head, "\r\ncontent-security-policy: ", "\r\n");
    // One block of data, which is not run, one script and one style. Heads are in small letters here.
    let page = &answer.body;
    assert_eq!((page.matches("<script").count(), page.matches("<style").count()), (2, 1));
    let hash = |[begin, end]: [&str; 2]| {
        let digest = STANDARD.encode(Sha256::digest(between(page, begin, end)));
        format!("'sha256-{}'", digest.to_lowercase())
    };
    let script = hash(["<script type=\"module\">", "</script>"]);
    let style = hash(["<style>", "</style>"]);
    assert_eq!(
        policy,
        format!(
            "default-src 'none'; script-src {script}; style-src {style}; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
    );
    assert!(!page.contains("style=") && !page.contains(" onload="), "they would be refused");
}

#[test]
fn a_stream_names_the_same_page_at_its_end() {
    let server = server();
    let mut body = json!({"prompt": "The dog", "max_tokens": 8, "attention": {"page": true}});
    let whole = ask(&server, "/v1/completions", body.clone());
    body["stream"] = json!(true);
    body["temperature"] = json!(0);
    let chunks = server.post("/v1/completions", &body).chunks();
    let (last, rest) = chunks.split_last().expect("chunks");
    assert!(rest.iter().all(|chunk| chunk["choices"][0].get("look").is_none()));
    let streamed = &last["choices"][0];
    assert!(streamed["finish_reason"] == "length" && path(streamed) != path(&whole));
    assert_eq!(page(&server, streamed).0.body, page(&server, &whole).0.body);
}

#[test]
fn every_choice_has_a_page_of_its_own() {
    let server = server();
    let ask = |n: usize| {
        let prompts = ["Once", "The dog"];
        let body = json!({"prompt": prompts, "n": n, "max_tokens": 4, "attention": {"page": true}});
        server.post("/v1/completions", &body)
    };
    let answer = ask(2).ok();
    for choice in answer["choices"].as_array().expect("choices") {
        let (_, data) = page(&server, choice);
        let first = if choice["index"].as_u64() < Some(2) { "Once" } else { "The" };
        assert!(labels(&data).concat().contains(first), "{choice}: {:?}", labels(&data));
        assert!(path(choice).len() == "/v1/look/".len() + 32);
    }
    let [message, param, _] = ask(9).error(400);
    assert!(param == "attention.page" && message.contains("18 choices; 16 at most"), "{message}");
}

#[test]
fn a_page_is_for_who_asked_for_it() {
    let keys = ["first-key-of-this-test", "second-key-of-this-test"].map(str::to_owned).to_vec();
    let options = Options { keys, attention: true, ..options() };
    let server = Server::new(options, vec![story()]);
    let with = |key: &str| format!("{JSON}Authorization: Bearer {key}-key-of-this-test\r\n");
    let body = json!({"prompt": "Once", "max_tokens": 2, "attention": {"page": true}}).to_string();
    let answer = server.ask("POST", "/v1/completions", &with("first"), body.as_bytes()).ok();
    let path = path(&answer["choices"][0]);
    let get = |path: &str, key: &str| server.ask("GET", path, &with(key), b"");
    assert_eq!(get(path, "first").status, 200);
    assert_eq!(get(path, "first").status, 200, "more than once");
    server.get(path).error(401);
    let refused = get(path, "second");
    assert_eq!(refused.error(404)[2], "look_not_found");
    let longer = format!("{path}0");
    let none = format!("/v1/look/{}", "0".repeat(32));
    let upper = path.to_uppercase().replace("/V1/LOOK/", "/v1/look/");
    let wrong = [&longer, &path[..path.len() - 1], &none, "/v1/look/%FF", "/v1/look/..%2F", &upper];
    for wrong in wrong.into_iter().filter(|wrong| *wrong != path) {
        assert_eq!(get(wrong, "first").body, refused.body, "{wrong}");
        assert_eq!(get(wrong, "first").status, 404, "{wrong}");
    }
    for elsewhere in ["/v1/look/", "/v1/look/a/b", "/v1/look"] {
        get(elsewhere, "first").error(404);
    }
    server.ask("POST", path, &with("first"), b"{}").error(405);
}

#[test]
fn nothing_is_kept_unless_it_is_asked_for() {
    let server = server();
    for attention in [json!(null), json!({"layers": [0], "heads": [0], "page": false})] {
        let body = json!({"prompt": "Once", "max_tokens": 2, "attention": attention});
        assert_eq!(ask(&server, "/v1/completions", body).get("look"), None);
    }
    for (attention, param) in [
        (json!({"page": false}), "attention.layers"),
        (json!({"page": 1}), "attention.page"),
        (json!({"page": true, "heads": [0]}), "attention.layers"),
        (json!({"page": true, "top_k": 4}), "attention.layers"),
        (json!({"page": true, "cells": 4}), "attention.cells"),
    ] {
        let body = json!({"prompt": "x", "max_tokens": 2, "attention": attention});
        assert_eq!(server.post("/v1/completions", &body).error(400)[1], param, "{attention}");
    }
    let quiet = Server::new(options(), vec![story()]);
    let body = json!({"prompt": "x", "attention": {"page": true}});
    let [message, param, _] = quiet.post("/v1/completions", &body).error(400);
    assert!(param == "attention" && message.contains("--attention"), "{message}");
}
