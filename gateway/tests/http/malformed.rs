//! What no well-meaning client sends: every answer has the right status, and the gateway goes on.

use std::net::SocketAddr;

use serde_json::{Value, json};

use crate::bed::{Bed, MODEL};
use crate::client::{self, Connection, request};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const JSON: (&str, &str) = ("Content-Type", "application/json");

/// A raw body for a chat, with `more` put behind the members that every request has.
fn raw(more: &str) -> Vec<u8> {
    let body =
        format!(r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"hi"}}]{more}}}"#);
    request("POST", CHAT, &[JSON], body.as_bytes())
}

/// Fields that are refused, each with the beginning of the place that the error names.
async fn are_refused(gateway: SocketAddr, cases: &[(&str, &str)]) {
    for (more, param) in cases {
        let response = client::send(gateway, &raw(more)).await;
        let shown: String = more.chars().take(60).collect();
        assert_eq!(response.status, 400, "{shown}: {response:?}");
        let found = response.error()["param"].as_str().unwrap_or("").to_owned();
        assert!(found.starts_with(param), "{shown}: {response:?}");
    }
}

#[tokio::test]
async fn wrong_functions_and_forms_are_refused_with_their_place() {
    let bed = Bed::new().await;
    let gateway = bed.gateway(|_| {}).await;
    let schema = format!(
        r#","response_format":{{"type":"json_schema","json_schema":{{"name":"n","schema":{}}}}}"#,
        json!({"enum": vec!["x".repeat(100); 2000]})
    );
    let cases = [
        (r#","tools":[{"type":"function"}]"#, "tools[0]"),
        (r#","tools":{}"#, "tools"),
        (r#","tools":[{"type":"custom","custom":{"name":"f"}}]"#, "tools[0].type"),
        (r#","tools":[{"type":"function","function":{"name":"a b"}}]"#, "tools[0].function.name"),
        (
            r#","tools":[{"type":"function","function":{"name":"f","parameters":{"type":"array"}}}]"#,
            "tools[0].function.parameters",
        ),
        (r#","tool_choice":"required""#, "tool_choice"),
        (r#","tool_choice":{"type":"function","function":{"name":"f"}}"#, "tool_choice"),
        (r#","tool_choice":"any""#, "tool_choice"),
        (r#","functions":[{"name":"f"}]"#, "functions"),
        (r#","function_call":"auto""#, "function_call"),
        (r#","response_format":{"type":"json_schema"}"#, "response_format"),
        (r#","response_format":{"type":"yaml"}"#, "response_format"),
        (
            r#","response_format":{"type":"json_schema","json_schema":{"name":"n","schema":[]}}"#,
            "response_format.json_schema.schema",
        ),
        (schema.as_str(), "response_format"),
    ];
    are_refused(gateway.address, &cases).await;
    gateway.end().await;
}

#[tokio::test]
async fn wrong_values_are_refused_with_their_place() {
    let bed = Bed::new().await;
    let gateway = bed.gateway(|_| {}).await;
    let stops = format!(r#","stop":{}"#, json!(vec!["x"; 10_000]));
    let long = format!(r#","stop":["{}"]"#, "x".repeat(257));
    let biases: serde_json::Map<String, Value> =
        (0..5000).map(|token| (token.to_string(), json!(1))).collect();
    let biases = format!(r#","logit_bias":{}"#, Value::from(biases));
    let cases = [
        (stops.as_str(), "stop"),
        (&long, "stop"),
        (r#","stop":"""#, "stop"),
        (r#","stop":["a","b","c","d","e"]"#, "stop"),
        (r#","stop":[1]"#, "stop"),
        (&biases, "logit_bias"),
        (r#","logit_bias":{"1":101}"#, "logit_bias"),
        (r#","temperature":NaN"#, "temperature"),
        (r#","temperature":-1"#, "temperature"),
        (r#","temperature":1e30"#, "temperature"),
        (r#","temperature":1e39"#, "temperature"),
        (r#","temperature":1e999"#, "temperature"),
        (r#","temperature":"hot""#, "temperature"),
        (r#","top_p":0"#, "top_p"),
        (r#","top_p":1.5"#, "top_p"),
        (r#","top_k":-1"#, "top_k"),
        (r#","min_p":2"#, "min_p"),
        (r#","presence_penalty":2.5"#, "presence_penalty"),
        (r#","frequency_penalty":-2.5"#, "frequency_penalty"),
        (r#","repetition_penalty":0"#, "repetition_penalty"),
        (r#","max_tokens":0"#, "max_tokens"),
        (r#","max_tokens":-5"#, "max_tokens"),
        (r#","max_tokens":4294967296"#, "max_tokens"),
        (r#","max_tokens":1.5"#, "max_tokens"),
        (r#","max_tokens":5,"max_completion_tokens":5"#, "max_tokens"),
        (r#","n":0"#, "n"),
        (r#","n":17"#, "n"),
        (r#","n":4294967295"#, "n"),
        (r#","top_logprobs":3"#, "top_logprobs"),
        (r#","logprobs":true,"top_logprobs":21"#, "top_logprobs"),
        (r#","seed":0.5"#, "seed"),
        (r#","stream_options":{"include_usage":true}"#, "stream_options"),
        (r#","temprature":1"#, "temprature"),
    ];
    are_refused(gateway.address, &cases).await;
    // What is passed over may be as deep as it likes; nobody serves the model here.
    let deep = format!(r#","metadata":{}{}"#, "[".repeat(5000), "]".repeat(5000));
    assert_eq!(client::send(gateway.address, &raw(&deep)).await.status, 404);
    for (body, param) in [
        (json!({"model": MODEL}), ""),
        (json!({"prompt": "a"}), ""),
        (json!({"model": 3, "prompt": "a"}), "model"),
        (json!({"model": MODEL, "prompt": ""}), "prompt"),
        (json!({"model": MODEL, "prompt": []}), "prompt"),
        (json!({"model": MODEL, "prompt": ["a", ""]}), "prompt"),
        (json!({"model": MODEL, "prompt": vec!["a"; 17]}), "n"),
        (json!({"model": MODEL, "prompt": "a", "echo": true}), "echo"),
        (json!({"model": MODEL, "prompt": "a", "suffix": "b"}), "suffix"),
        (json!({"model": MODEL, "prompt": "a", "best_of": 3}), "best_of"),
        (json!({"model": MODEL, "prompt": "a", "logprobs": 21}), "top_logprobs"),
    ] {
        let response = client::post(gateway.address, TEXT, &body).await;
        assert_eq!(response.status, 400, "{body}: {response:?}");
        assert_eq!(response.error()["param"].as_str().unwrap_or(""), param, "{response:?}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn what_is_no_json_is_refused() {
    let bed = Bed::new().await;
    let gateway = bed.gateway(|settings| settings.max_body_bytes = 4096).await;
    let post = |headers: &[(&str, &str)], body: &[u8]| request("POST", CHAT, headers, body);
    let good = json!({"model": "other", "messages": [{"role": "user", "content": "hi"}]});
    let good = good.to_string();
    for (sent, status) in [
        (post(&[JSON], good.as_bytes()), 404),
        (post(&[], good.as_bytes()), 415),
        (post(&[("Content-Type", "text/plain")], good.as_bytes()), 415),
        (post(&[("Content-Type", "multipart/form-data; boundary=x")], b"--x--"), 415),
        (post(&[("Content-Type", "application/x-www-form-urlencoded")], b"model=m"), 415),
        (post(&[JSON, ("Content-Encoding", "gzip")], good.as_bytes()), 415),
        (post(&[JSON], b""), 400),
        (post(&[JSON], b"{"), 400),
        (post(&[JSON], b"null"), 400),
        (post(&[JSON], b"[]"), 400),
        (post(&[JSON], b"\"\""), 400),
        (post(&[JSON], b"{\"model\":\"\xff\xfe\"}"), 400),
        (post(&[JSON], b"\xef\xbb\xbf{}"), 400),
        (post(&[JSON], &[0; 100]), 400),
        (post(&[JSON], "[".repeat(4000).as_bytes()), 400),
        (post(&[JSON], format!("{good}{good}").as_bytes()), 400),
        (post(&[JSON], format!("{good}{}", " ".repeat(4096)).as_bytes()), 413),
        (post(&[JSON], &vec![b'x'; 100_000]), 413),
    ] {
        let response = client::send(gateway.address, &sent).await;
        let shown = String::from_utf8_lossy(&sent[..sent.len().min(200)]).into_owned();
        assert_eq!(response.status, status, "{shown}: {response:?}");
        response.error();
    }
    gateway.end().await;
}

#[tokio::test]
async fn large_bodies_are_refused_however_they_are_sent() {
    let bed = Bed::new().await;
    let gateway = bed.gateway(|settings| settings.max_body_bytes = 4096).await;
    // In chunks, without a length.
    let mut connection = Connection::open(gateway.address).await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Transfer-Encoding: chunked\r\n\r\n"
    );
    connection.write(head.as_bytes()).await;
    for _ in 0..20 {
        connection.write(format!("400\r\n{}\r\n", "x".repeat(0x400)).as_bytes()).await;
    }
    connection.write(b"0\r\n\r\n").await;
    assert_eq!(connection.response().await.status, 413);
    // Far too large by its own word: refused before it is sent.
    let mut connection = Connection::open(gateway.address).await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: 1000000000000\r\n\r\n"
    );
    connection.write(head.as_bytes()).await;
    assert_eq!(connection.response().await.status, 413);
    gateway.end().await;
}

#[tokio::test]
async fn heads_that_are_none_are_refused_or_cut_off() {
    let bed = Bed::new().await;
    let gateway = bed.gateway(|_| {}).await;
    let large =
        format!("GET /health HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(33 << 10));
    let many = format!("GET /health HTTP/1.1\r\nHost: localhost\r\n{}\r\n", "X: y\r\n".repeat(200));
    for (head, status) in [
        (&b"rubbish\r\n\r\n"[..], "400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "400"),
        (b"GET /health HTTP/9.9\r\n\r\n", "400"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nBad Header: x\r\n\r\n", "400"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n", "400"),
        (large.as_bytes(), "431"),
        (many.as_bytes(), "431"),
    ] {
        let mut connection = Connection::open(gateway.address).await;
        connection.write(head).await;
        let line = connection.line().await;
        assert_eq!(line.split(' ').nth(1), Some(status), "{line}");
    }
    assert_eq!(client::get(gateway.address, "/health").await.status, 200, "it goes on");
    gateway.end().await;
}

#[tokio::test]
async fn unknown_paths_and_methods_are_refused_in_the_same_form() {
    let bed = Bed::new().await;
    let gateway = bed.gateway(|_| {}).await;
    for (method, path, status) in [
        ("GET", "/page/../keys", 404),
        ("POST", "/", 405),
        ("GET", "/v1", 404),
        ("POST", "/v1/chat/completions/x", 404),
        ("GET", "/v1/models/none", 404),
        ("GET", "/v1/models/%ff", 404),
        ("GET", "/v1/models/a.b", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/health", 405),
        ("POST", "/v1/embeddings", 501),
    ] {
        let response = client::send(gateway.address, &request(method, path, &[], b"")).await;
        assert_eq!(response.status, status, "{method} {path}: {response:?}");
        response.error();
    }
    for model in ["", "a.b", "a b", "*", ">", "x\u{0}", &"m".repeat(1000)] {
        let body = json!({"model": model, "prompt": "a"});
        let response = client::post(gateway.address, TEXT, &body).await;
        assert_eq!(
            (response.status, &response.error()["param"]),
            (404, &json!("model")),
            "{model}"
        );
    }
    gateway.end().await;
}
