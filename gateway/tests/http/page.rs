//! The page and what it is made of: files, the fleet as it is and as it changes, times of steps.

use serde_json::{Value, json};
use stagebus_settings::Secret;

use crate::bed::{Bed, MODEL, soon};
use crate::client::{self, Connection, request};

const KEY: &str = "sk-of-the-page-0123456789";

#[tokio::test]
async fn the_files_need_no_key_and_everything_that_they_ask_for_does() {
    let bed = Bed::new().await;
    let gateway = bed.gateway(|s| s.api_keys = Some(Secret::new(KEY.to_owned()))).await;
    let index = client::get(gateway.address, "/").await;
    assert_eq!(index.status, 200);
    let header = |name| index.header(name).unwrap_or_default();
    assert_eq!(header("content-type"), "text/html; charset=utf-8");
    assert_eq!(header("x-content-type-options"), "nosniff");
    assert_eq!(header("cache-control"), "no-cache");
    let policy = header("content-security-policy");
    assert!(policy.starts_with("default-src 'none'; script-src 'self';"), "{policy}");

    // Whatever the markup names is there, and known again by its tag.
    let named = index.text().split(['"', '\'']).filter(|part| part.starts_with("page/"));
    let mut n_named = 0;
    for path in named.map(|path| format!("/{path}")) {
        n_named += 1;
        let file = client::get(gateway.address, &path).await;
        assert_eq!(file.status, 200, "{path}");
        let known = [("If-None-Match", file.header("etag").unwrap())];
        let again = client::send(gateway.address, &request("GET", &path, &known, b"")).await;
        assert_eq!((again.status, again.body.len()), (304, 0), "{path}");
    }
    assert!(n_named >= 3, "{}", index.text());

    for path in ["/fleet", "/fleet/events"] {
        assert_eq!(client::get(gateway.address, path).await.status, 401, "{path}");
    }
    let bearer = format!("Bearer {KEY}");
    let shown = request("GET", "/fleet", &[("Authorization", &bearer)], b"");
    assert_eq!(client::send(gateway.address, &shown).await.status, 200);
    gateway.end().await;
}

/// The next document of the stream.
async fn document(stream: &mut Connection) -> Value {
    loop {
        let line = stream.line().await;
        if let Some(document) = line.strip_prefix("data: ") {
            return serde_json::from_str(document).unwrap();
        }
    }
}

/// Reads documents until one fits.
async fn until(stream: &mut Connection, fits: impl Fn(&Value) -> bool) -> Value {
    soon(async {
        loop {
            let found = document(stream).await;
            if fits(&found) {
                return found;
            }
        }
    })
    .await
}

#[tokio::test]
async fn the_fleet_is_told_as_it_is_and_as_it_changes() {
    let bed = Bed::new().await;
    let gateway = bed.gateway(|_| {}).await;
    let mut stream = Connection::open(gateway.address).await;
    stream.write(&request("GET", "/fleet/events", &[], b"")).await;
    let first = document(&mut stream).await;
    assert_eq!(first["models"], json!([]), "the first one comes at once: {first}");

    let fleet = bed.fleet().await;
    let served = |found: &Value| found["models"][0]["served"] == true;
    let found = until(&mut stream, served).await;
    let model = &found["models"][0];
    assert_eq!((&found["connected"], &model["model"]), (&json!(true), &json!(MODEL)), "{found}");
    assert_eq!((&model["n_stages"], &model["problems"]), (&json!(1), &json!([])), "{found}");
    assert_eq!(model["workers"][0]["worker"]["stage"], 0, "{found}");
    let once = client::get(gateway.address, "/fleet").await;
    assert_eq!(once.header("cache-control"), Some("no-store"));
    assert_eq!(once.json()["models"][0]["model"], MODEL);

    fleet.end().await;
    until(&mut stream, |found| found["models"] == json!([])).await;
    // The stream ends with the gateway, and does not hold it up.
    gateway.end().await;
    let rest = stream.rest().await;
    assert!(rest.ends_with(b"0\r\n\r\n"), "{}", String::from_utf8_lossy(&rest));
}

#[tokio::test]
async fn chunks_tell_what_their_steps_took_if_asked() {
    let bed = Bed::new().await;
    let fleet = bed.fleet().await;
    let gateway = bed.gateway_with_model(|_| {}).await;
    let n_tokens = bed.expected(&[5], 6).len();
    for asked in [true, false] {
        let mut body = json!({"model": MODEL, "prompt": [5], "max_tokens": 6, "temperature": 0,
            "stream": true});
        if asked {
            body["stream_options"] = json!({"include_timings": true});
        }
        let response = client::post(gateway.address, "/v1/completions", &body).await;
        let chunks = response.events().into_iter().filter_map(|e| serde_json::from_str(e).ok());
        let steps: Vec<Value> = chunks
            .filter_map(|chunk: Value| chunk["steps"].as_array().cloned())
            .flatten()
            .collect();
        let n_told: u64 = steps.iter().filter_map(|step| step["tokens"].as_u64()).sum();
        assert_eq!(n_told, if asked { n_tokens as u64 } else { 0 }, "{}", response.text());
        for step in steps {
            assert_eq!(step["stage_infer_ms"].as_array().map(Vec::len), Some(1), "{step}");
            let (all, hops) = (step["round_trip_ms"].as_f64(), step["hops_ms"].as_f64());
            assert!(hops.is_some() && hops <= all, "{step}");
        }
    }
    gateway.end().await;
    fleet.end().await;
}
