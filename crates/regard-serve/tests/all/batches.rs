//! Embeddings and translations: the batch lane.

use crate::common::{Server, encoder, options, translator};
use serde_json::{Value, json};

#[test]
fn texts_become_vectors() {
    let server = Server::new(options(), vec![encoder()]);
    let named = encoder();
    let right = named
        .model
        .encoder()
        .expect("it is")
        .embed(&["the sky is blue.", "a man eats"])
        .expect("vectors");
    let body = json!({"model": "sentences", "input": ["the sky is blue.", "a man eats"]});
    let answer = server.post("/v1/embeddings", &body).ok();
    let vector =
        |value: &Value| -> Vec<f32> { serde_json::from_value(value.clone()).expect("numbers") };
    for i in [0, 1] {
        assert_eq!(vector(&answer["data"][i]["embedding"]), right[i]);
        assert_eq!(answer["data"][i]["index"], i);
    }
    assert_eq!(answer["usage"], json!({"prompt_tokens": 12, "total_tokens": 12}));
    // TEI's route, and one text alone.
    let answer = server.post("/embed", &json!({"inputs": "the sky is blue."})).ok();
    assert_eq!(vector(&answer[0]), right[0]);
    // As tokens, and as bytes.
    let tokens = named.model.tokens().expect("text").encode("a man eats").expect("tokens");
    for input in [json!(tokens), json!([tokens])] {
        let answer = server
            .post("/v1/embeddings", &json!({"input": input, "encoding_format": "base64"}))
            .ok();
        use base64::Engine;
        let bytes = base64::engine::general_purpose::STANDARD
            .decode(answer["data"][0]["embedding"].as_str().expect("a text"))
            .expect("base64");
        let numbers: Vec<f32> =
            bytes.as_chunks().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
        assert_eq!(numbers, right[1]);
    }
}

#[test]
fn texts_are_translated_together_as_alone() {
    let server = Server::new(options(), vec![translator(), encoder()]);
    let ask = |q: Value| {
        server
            .post("/translate", &json!({"q": q, "source": "zh", "target": "en", "format": "text"}))
            .ok()["translatedText"]
            .clone()
    };
    let texts = ["好久不见", "我喜欢喝茶。", "你好", "他是我的朋友。"];
    let alone: Vec<Value> = texts.iter().map(|text| ask(json!(text))).collect();
    assert!(alone[0].as_str().expect("a text").to_lowercase().contains("no see"), "{alone:?}");
    assert_eq!(ask(json!(texts)), json!(alone));
    assert_eq!(
        ask(json!(["", texts[2], " \n"])),
        json!(["", alone[2], ""]),
        "nothing to translate"
    );
    assert_eq!(ask(json!("")), "");
    let ask = &ask;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            for (text, right) in texts.iter().zip(&alone) {
                scope.spawn(move || assert_eq!(ask(json!(text)), *right));
            }
        }
    });
    let body = json!({"q": "你好", "source": "auto", "target": "en", "api_key": ""});
    assert_eq!(server.post("/translate", &body).ok()["translatedText"], alone[2]);
    // As a form, which is what LibreTranslate's documentation shows beside JSON.
    let form = |headers: &str, body: &str| {
        let headers = format!("Content-Type: application/x-www-form-urlencoded\r\n{headers}");
        server.ask("POST", "/translate", &headers, body.as_bytes())
    };
    let right = "q=%E4%BD%A0%E5%A5%BD&source=zh&target=en&format=text&alternatives=0&api_key=";
    for headers in ["", "Origin: http://localhost:3000\r\n"] {
        assert_eq!(form(headers, right).ok()["translatedText"], alone[2]);
    }
    for origin in ["https://example.org", "http://localhost.example.org", "null"] {
        form(&format!("Origin: {origin}\r\n"), right).error(403);
    }
    for (wrong, param) in [
        ("", "q"),
        ("q=x&source=zh", "target"),
        ("q=x&source=zh&target=en&colour=red", "colour"),
        ("q=x&q=y&source=zh&target=en", "q"),
        ("q=x&source=zh&target=en&alternatives=2", "alternatives"),
        ("q=%FF&source=zh&target=en", ""),
    ] {
        assert_eq!(form("", wrong).error(400)[1], param, "{wrong}");
    }
    // Only there.
    let headers = "Content-Type: application/x-www-form-urlencoded\r\n";
    server.ask("POST", "/embed", headers, b"inputs=x").error(415);
    let languages = server.get("/languages").ok();
    assert_eq!(
        languages,
        json!([
            {"code": "en", "name": "English", "targets": []}, {"code": "zh", "name": "Chinese", "targets": ["en"]}
        ])
    );
}
