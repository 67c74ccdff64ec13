//! Completions and chats.

use crate::common::{Server, chat_model, noise_model, options, story};
use regard_serve::Options;
use serde_json::{Value, json};

fn server() -> Server {
    Server::new(options(), vec![chat_model()])
}

#[test]
fn a_prompt_goes_on_as_the_command_continues_it() {
    let server = Server::new(options(), vec![story()]);
    let body =
        json!({"model": "story", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0});
    let answer = server.post("/v1/completions", &body).ok();
    let named = story();
    let model = named.model.causal_lm().expect("it is");
    let greedy = regard_models::generate::DecodingStrategy::Greedy;
    let silent = &mut |_: usize, _: &str| std::ops::ControlFlow::Continue(());
    let right = model.generate(&["Once upon a time"], &greedy, 24, silent).expect("a story");
    assert_eq!(answer["choices"][0]["text"], right[0].text);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let prompt = model.prompt("Once upon a time").expect("tokens");
    assert_eq!(answer["usage"]["prompt_tokens"], prompt.len());
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    assert_eq!((&answer["object"], &answer["model"]), (&json!("text_completion"), &json!("story")));
    // The same as tokens, twice, and without the name of the only model.
    let body = json!({"prompt": [prompt, prompt], "max_tokens": 24, "temperature": 0});
    let twice = server.post("/v1/completions", &body).ok();
    for choice in [0, 1] {
        assert_eq!(twice["choices"][choice]["text"], right[0].text);
        assert_eq!(twice["choices"][choice]["index"], choice);
    }
}

/// What the chunks of a stream add up to: text and log-probabilities by choice, and reasons.
fn joined(chunks: &[Value], chat: bool) -> Vec<(String, Vec<Value>, Value)> {
    let mut all: Vec<(String, Vec<Value>, Value)> = Vec::new();
    for choice in chunks.iter().filter_map(|chunk| chunk["choices"].get(0)) {
        let index = usize::try_from(choice["index"].as_u64().expect("a number")).expect("small");
        all.resize_with(all.len().max(index + 1), Default::default);
        let text = if chat { &choice["delta"]["content"] } else { &choice["text"] };
        all[index].0 += text.as_str().unwrap_or_default();
        let logs = if chat {
            &choice["logprobs"]["content"]
        } else {
            &choice["logprobs"]["token_logprobs"]
        };
        all[index].1.extend(logs.as_array().cloned().unwrap_or_default());
        if !choice["finish_reason"].is_null() {
            all[index].2 = choice["finish_reason"].clone();
        }
    }
    all
}

#[test]
fn a_stream_says_what_a_whole_answer_says() {
    let server = server();
    for (path, chat, mut body) in [
        (
            "/v1/completions",
            false,
            json!({"prompt": ["Once upon", "The dog"], "logprobs": 2, "n": 2}),
        ),
        (
            "/v1/completions",
            false,
            json!({"prompt": "A", "stop": [" was", "th"], "max_tokens": 60}),
        ),
        (
            "/v1/completions",
            false,
            json!({"prompt": "A girl", "temperature": 0, "max_tokens": 40, "stop": "."}),
        ),
        (
            "/v1/chat/completions",
            true,
            json!({"messages": [{"role": "user", "content": "Hi"}], "logprobs": true, "top_logprobs": 3, "max_tokens": 12}),
        ),
    ] {
        body["seed"] = json!(-5);
        let whole = server.post(path, &body).ok();
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let chunks = server.post(path, &body).chunks();
        let (last, rest) = chunks.split_last().expect("chunks");
        for name in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(last["usage"][name], whole["usage"][name], "{body}");
        }
        assert!(last["choices"].as_array().is_some_and(Vec::is_empty));
        assert!(rest.iter().all(|chunk| chunk["usage"].is_null() && chunk["id"] == last["id"]));
        if chat {
            assert_eq!(rest[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
        }
        for (choice, (text, logs, reason)) in joined(rest, chat).into_iter().enumerate() {
            let choice = &whole["choices"][choice];
            let right = if chat { &choice["message"]["content"] } else { &choice["text"] };
            assert_eq!(*right, text);
            assert_eq!(choice["finish_reason"], reason);
            let right = if chat {
                &choice["logprobs"]["content"]
            } else {
                &choice["logprobs"]["token_logprobs"]
            };
            assert_eq!(right.as_array().cloned().unwrap_or_default(), logs);
        }
    }
}

#[test]
fn choices_of_a_seed_are_the_same_each_time_and_differ_from_each_other() {
    let server = server();
    let body = json!({"prompt": "Once", "n": 3, "seed": 7, "max_tokens": 16});
    let [first, second] = [(); 2].map(|()| server.post("/v1/completions", &body));
    assert_eq!(first.choices(), second.choices());
    let texts: Vec<Value> = (0..3).map(|i| first.json()["choices"][i]["text"].clone()).collect();
    assert!(texts[0] != texts[1] && texts[1] != texts[2], "{texts:?}");
    let mut one = body.clone();
    one["n"] = json!(1);
    assert_eq!(server.post("/v1/completions", &one).ok()["choices"][0]["text"], texts[0]);
    // Without a seed, another each time; greedily, chance has no part.
    let body = json!({"prompt": "Once", "max_tokens": 16});
    let texts =
        [(); 4].map(|()| server.post("/v1/completions", &body).ok()["choices"][0]["text"].clone());
    assert!(texts.iter().any(|text| *text != texts[0]), "{texts:?}");
}

#[test]
fn log_probabilities_have_the_forms_of_both_routes() {
    let server = server();
    let body =
        json!({"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0, "logprobs": 3});
    let answer = server.post("/v1/completions", &body).ok();
    let (text, logs) = (&answer["choices"][0]["text"], &answer["choices"][0]["logprobs"]);
    let tokens: Vec<&str> =
        logs["tokens"].as_array().expect("tokens").iter().filter_map(Value::as_str).collect();
    assert_eq!(*text, tokens.concat());
    for i in 0..5 {
        // The token that greedy decoding takes is the likeliest.
        let own = &logs["token_logprobs"][i];
        let top = logs["top_logprobs"][i].as_object().expect("an object");
        assert_eq!((&top[tokens[i]], top.len()), (own, 3));
        let start: usize = tokens[..i].iter().map(|token| token.chars().count()).sum();
        assert_eq!(logs["text_offset"][i], start);
    }
    let body = json!({
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "max_tokens": 3, "temperature": 0, "logprobs": true, "top_logprobs": 2,
    });
    let answer = server.post("/v1/chat/completions", &body).ok();
    let content = answer["choices"][0]["logprobs"]["content"].as_array().expect("a list");
    assert_eq!(content.len(), 3);
    assert_eq!(content[0]["token"], content[0]["top_logprobs"][0]["token"]);
    assert_eq!(content[0]["logprob"], content[0]["top_logprobs"][0]["logprob"]);
    assert_eq!(answer["choices"][0]["message"]["role"], "assistant");
}

#[test]
fn answers_tell_what_heads_looked_at() {
    let server = Server::new(Options { attention: true, ..options() }, vec![story()]);
    let mut body = json!({
        "prompt": "Once upon a time there was", "max_tokens": 6, "temperature": 0,
        "attention": {"layers": [0, -1], "heads": [1, 3], "top_k": 3},
    });
    let whole = server.post("/v1/completions", &body).ok()["choices"][0].clone();
    let rows = whole["attention"].as_array().expect("rows");
    assert_eq!(rows.len(), 6);
    let prompt = story()
        .model
        .tokens()
        .expect("text")
        .encode("Once upon a time there was")
        .expect("tokens")
        .len();
    for (i, row) in rows.iter().enumerate() {
        assert_eq!(row["position"], prompt + i);
        let sites = row["sites"].as_array().expect("sites");
        let places: Vec<_> = sites.iter().map(|one| (&one["layer"], &one["head"])).collect();
        let layers = [0, 0, 4, 4].map(Value::from);
        let heads = [1, 3, 1, 3].map(Value::from);
        assert_eq!(places, layers.iter().zip(&heads).collect::<Vec<_>>());
        for site in sites {
            let top = site["top"].as_array().expect("positions");
            let weights: Vec<f64> = top.iter().filter_map(|one| one[1].as_f64()).collect();
            let sum: f64 = weights.iter().sum();
            assert!(weights.is_sorted_by(|a, b| a >= b) && sum > 0.1 && sum < 1.0001, "{site}");
            let all = ((prompt + i) as f64).ln();
            assert!((0.0..=all + 1e-4).contains(&site["entropy"].as_f64().expect("a number")));
            assert!(
                top.iter().all(|one| one[0].as_u64().expect("a position") < (prompt + i) as u64)
            );
        }
    }
    // A stream tells the same, token by token; and the text is that without attention.
    body["stream"] = json!(true);
    let parts = server.post("/v1/completions", &body).chunks();
    let streamed: Vec<Value> = parts
        .iter()
        .filter_map(|part| part["choices"][0]["attention"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(streamed, *rows);
    let body = json!({"prompt": "Once upon a time there was", "max_tokens": 6, "temperature": 0});
    assert_eq!(server.post("/v1/completions", &body).ok()["choices"][0]["text"], whole["text"]);
    for (attention, param) in [
        (json!({"layers": [5], "heads": [0]}), "attention"),
        (json!({"layers": [-6], "heads": [0]}), "attention.layers"),
        (json!({"layers": [0], "heads": [8]}), "attention"),
        (json!({"layers": [], "heads": [0]}), "attention"),
        (json!({"layers": [0], "heads": [0], "rows": "all"}), "attention.rows"),
        (json!({"heads": [0]}), "attention.layers"),
        (json!(true), "attention"),
    ] {
        let body = json!({"prompt": "x", "max_tokens": 2, "attention": attention});
        let answer = server.post("/v1/completions", &body);
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some(param)));
    }
}

#[test]
fn options_change_what_is_generated() {
    let server = server();
    let ask = |more: Value| {
        let mut body = json!({"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0});
        let more = more.as_object().expect("an object").clone();
        body.as_object_mut().expect("an object").extend(more);
        server.post("/v1/completions", &body).ok()["choices"][0].clone()
    };
    let plain = ask(json!({}));
    let text = plain["text"].as_str().expect("a text");
    let stopped = ask(json!({"stop": [&text[10..14]]}));
    assert_eq!(
        (stopped["text"].as_str(), &stopped["finish_reason"]),
        (Some(&text[..text.find(&text[10..14]).expect("it is there")]), &json!("stop"))
    );
    let long = json!({"max_tokens": 200});
    let penalized = json!({"max_tokens": 200, "frequency_penalty": 2, "presence_penalty": 2});
    assert_ne!(ask(penalized)["text"], ask(long)["text"]);
    let tokens = story().model.tokens().expect("text").encode(text).expect("tokens");
    let forbidden: serde_json::Map<String, Value> =
        tokens.iter().map(|id| (id.to_string(), json!(-100))).collect();
    assert_ne!(ask(json!({"logit_bias": forbidden}))["text"], plain["text"]);
    for one in [json!({"top_k": 1}), json!({"top_p": 1e-6}), json!({"min_p": 1})] {
        let mut one = one;
        one["temperature"] = json!(1);
        assert_eq!(ask(one)["text"], plain["text"], "only the likeliest is left");
    }
    for name in ["user", "metadata", "store", "service_tier"] {
        assert_eq!(
            ask(json!({name: "x", "echo": false, "best_of": 1, "suffix": null}))["text"],
            plain["text"]
        );
    }
}

#[test]
fn what_is_written_fits_the_format() {
    let server = Server::new(options(), vec![noise_model()]);
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["name", "age"],
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    });
    for seed in 0..4 {
        let format = json!({"type": "json_schema", "json_schema": {"name": "person", "strict": true, "schema": schema}});
        let body = json!({"prompt": "A person:", "max_tokens": 1000, "seed": seed, "response_format": format});
        let answer = server.post("/v1/completions", &body).ok();
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        let text = answer["choices"][0]["text"].as_str().expect("a text");
        let value: Value = serde_json::from_str(text).expect(text);
        assert!(value["age"].as_u64().is_some_and(|age| age <= 120), "{text}");
    }
    let body = json!({"prompt": "x", "max_tokens": 30, "response_format": {"type": "json_object"}});
    let text = server.post("/v1/completions", &body).ok()["choices"][0]["text"].clone();
    assert!(text.as_str().is_some_and(|text| text.trim_start().starts_with('{')), "{text}");
    let mut wrong = body;
    wrong["response_format"] =
        json!({"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}});
    let [message, param, _] = server.post("/v1/completions", &wrong).error(400);
    assert!(param == "response_format" && message.contains("nonsense"), "{message}");
    // A vocabulary that grammars cannot be made of.
    let server = Server::new(options(), vec![story()]);
    let body = json!({"prompt": "x", "response_format": {"type": "json_object"}});
    assert_eq!(server.post("/v1/completions", &body).error(400)[2], "unsupported_parameter");
}

#[test]
fn models_are_listed() {
    let server = Server::new(options(), vec![story(), chat_model()]);
    let list = server.get("/v1/models").ok();
    assert_eq!((&list["data"][0]["id"], &list["data"][1]["id"]), (&json!("story"), &json!("chat")));
    assert_eq!(server.get("/v1/models/chat").ok()["object"], "model");
    assert_eq!(server.get("/v1/models/org/none").error(404)[2], "model_not_found");
    assert!(
        server.post("/v1/completions", &json!({"prompt": "x"})).error(400)[0].contains("several")
    );
    assert_eq!(server.get("/health").ok()["status"], "ok");
    assert_eq!(server.get("/livez").body, "ok");
    let document = server.get("/openapi.json").ok();
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    let model = &document["components"]["schemas"]["ChatRequest"]["properties"]["model"];
    assert_eq!(
        model["enum"],
        json!(["story", "chat", null]),
        "the document is that of this server"
    );
    let described: std::collections::BTreeSet<(String, String)> = document["paths"]
        .as_object()
        .expect("paths")
        .iter()
        .flat_map(|(path, methods)| {
            methods
                .as_object()
                .expect("methods")
                .keys()
                .map(|method| (method.clone(), path.clone()))
        })
        .collect();
    let served =
        regard_serve::ROUTES.iter().map(|(method, path)| ((*method).into(), (*path).into()));
    assert_eq!(described, served.collect());
    for (method, path) in regard_serve::ROUTES.iter().filter(|(_, path)| !path.contains('{')) {
        let status = server.ask(&method.to_uppercase(), path, "", b"").status;
        assert!(status == 200 || (*method == "post" && status == 415), "{path}: {status}");
    }
}
