//! Who may ask.

use crate::common::{JSON, Server, options, story, translator};
use regard_serve::{Options, ServeError, serve};
use serde_json::json;

fn with_keys() -> Server {
    let keys = vec!["first-key-of-this-test".to_owned(), "second-key-of-this-test".to_owned()];
    let server = Server::opening(Options { keys, ..options() }, || Ok(vec![story(), translator()]));
    server.wait_until_ready();
    server
}

#[test]
fn every_route_but_probes_needs_a_key() {
    let server = with_keys();
    for (method, path) in regard_serve::ROUTES {
        let ask = |headers: &str| {
            server.ask(&method.to_uppercase(), path, &format!("{JSON}{headers}"), b"{}")
        };
        if ["/livez", "/readyz", "/health"].contains(path) {
            assert_eq!(ask("").status, 200, "{path}");
            continue;
        }
        for wrong in
            ["", "Authorization: Bearer x\r\n", "Authorization: Bearer first-key-of-this-tes\r\n"]
        {
            assert_eq!(ask(wrong).error(401)[2], "invalid_api_key", "{path}");
        }
        for key in ["first", "second"] {
            let status = ask(&format!("Authorization: Bearer {key}-key-of-this-test\r\n")).status;
            assert!(status != 401 && status < 500, "{path}: {status}");
        }
    }
    assert_eq!(server.get("/nowhere").error(401)[2], "invalid_api_key");
    // LibreTranslate's clients have it in the body.
    let mut body =
        json!({"q": "你好", "source": "zh", "target": "en", "api_key": "first-key-of-this-test"});
    let _right = server.post("/translate", &body).ok();
    body["api_key"] = json!("wrong");
    server.post("/translate", &body).error(401);
    // In a form, too, from whatever page: who has a key may ask.
    let form = |key: &str| {
        let headers =
            "Content-Type: application/x-www-form-urlencoded\r\nOrigin: https://example.org\r\n";
        let body = format!("q=%E4%BD%A0%E5%A5%BD&source=zh&target=en&api_key={key}");
        server.ask("POST", "/translate", headers, body.as_bytes())
    };
    let _right = form("second-key-of-this-test").ok();
    form("wrong").error(401);
}

#[test]
fn a_prefix_is_not_shared_between_keys() {
    let server = with_keys();
    let body = json!({"model": "story", "prompt": vec![7; 300], "max_tokens": 2, "temperature": 0})
        .to_string();
    let cached = |key: &str| {
        let headers = format!("{JSON}Authorization: Bearer {key}-key-of-this-test\r\n");
        let answer = server.ask("POST", "/v1/completions", &headers, body.as_bytes()).ok();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    assert_eq!(["first", "first", "second", "second"].map(cached), [0, 256, 0, 256]);
}

#[test]
fn a_page_of_another_name_is_not_answered_without_keys() {
    let server = Server::new(options(), vec![story()]);
    let mut stream = std::net::TcpStream::connect(server.address).expect("a connection");
    std::io::Write::write_all(
        &mut stream,
        b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
    )
    .expect("sent");
    let pending = crate::common::Pending { stream: std::io::BufReader::new(stream) };
    pending.read().error(403);
}

#[test]
fn an_address_that_others_reach_needs_keys() {
    let listen = "0.0.0.0:0".parse().expect("an address");
    let refused = serve(Options { listen, ..options() }, || Ok(vec![]), |_| ());
    assert!(matches!(refused, Err(ServeError::NoKeys(_))), "{refused:?}");
    let refused = serve(options(), || Ok(vec![]), |_| ()).expect_err("no models");
    assert!(refused.to_string().contains("give one at least"), "{refused}");
    let refused = serve(options(), || Ok(vec![story(), story()]), |_| ()).expect_err("twice");
    assert!(refused.to_string().contains("two models"), "{refused}");
    let refused = serve(Options { engines: 0, ..options() }, || Ok(vec![story()]), |_| ());
    assert!(refused.expect_err("none").to_string().contains("engines: 0"));
}
