//! Reading a request's body: bounded in size and time, JSON only, with the place of what is wrong.

use axum::body::Body;
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use axum::http::{HeaderMap, Request};
use http_body_util::BodyExt as _;
use hyper::body::Body as _;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::api_error::ApiError;
use crate::config::GatewaySettings;

/// Bytes beyond the limit that are read and thrown away, so that a client that is still sending
/// gets to read why it is refused.
const DISCARDED: usize = 16 << 20;

/// Bodies beyond this are decoded beside the tasks that serve others.
const LARGE: usize = 64 << 10;

/// Reads a JSON body into its type.
///
/// # Errors
/// 415 for another content, 413 for too much of it, 408 for too slow a client, 400 for what cannot
/// be read.
pub(crate) async fn read_json<T: DeserializeOwned + Send + 'static>(
    settings: &GatewaySettings,
    request: Request<Body>,
) -> Result<T, ApiError> {
    check_content(request.headers())?;
    let limit = settings.body_timeout();
    let bytes = timeout(limit, read(request.into_body(), settings.max_body_bytes))
        .await
        .map_err(|_elapsed| ApiError::slow_body(limit))??;
    if bytes.len() < LARGE {
        return decode(&bytes);
    }
    tokio::task::spawn_blocking(move || decode(&bytes))
        .await
        .map_err(|_panicked| ApiError::internal("the body could not be decoded"))?
}

fn check_content(headers: &HeaderMap) -> Result<(), ApiError> {
    let content = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let essence = content.split(';').next().unwrap_or("").trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::wrong_content("send the header `Content-Type: application/json`"));
    }
    match headers.get(CONTENT_ENCODING) {
        Some(encoding) if encoding != "identity" => {
            Err(ApiError::wrong_content("send the body without Content-Encoding"))
        }
        _ => Ok(()),
    }
}

async fn read(mut body: Body, limit: usize) -> Result<Vec<u8>, ApiError> {
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if announced > limit + DISCARDED {
        return Err(ApiError::large_body(limit));
    }
    let mut bytes = Vec::with_capacity(announced.min(limit));
    let mut n_read = 0_usize;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_broken| ApiError::invalid(None, "the body broke off"))?;
        let Ok(data) = frame.into_data() else { continue };
        n_read += data.len();
        if n_read > limit + DISCARDED {
            break;
        }
        if n_read <= limit {
            bytes.extend_from_slice(&data);
        }
    }
    if n_read > limit {
        return Err(ApiError::large_body(limit));
    }
    Ok(bytes)
}

fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let param = (path != ".").then_some(path);
        ApiError::invalid(param, format!("the body cannot be read: {}", error.inner()))
    })?;
    json.end()
        .map_err(|error| ApiError::invalid(None, format!("the body cannot be read: {error}")))?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;
    use axum::http::StatusCode;
    use futures::stream;
    use serde::Deserialize;

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Pair {
        a: u32,
        b: Vec<String>,
    }

    fn request(content: &str, body: Body) -> Request<Body> {
        let mut request = Request::new(body);
        let content = HeaderValue::from_str(content).expect("a header");
        request.headers_mut().insert(CONTENT_TYPE, content);
        request
    }

    fn settings() -> GatewaySettings {
        GatewaySettings { max_body_bytes: 64, ..GatewaySettings::default() }
    }

    async fn status(content: &str, body: Body) -> StatusCode {
        let read = read_json::<Pair>(&settings(), request(content, body)).await;
        read.expect_err("refused").status()
    }

    #[tokio::test]
    async fn what_is_no_json_of_bounded_size_is_refused() {
        let settings = settings();
        let good = r#"{"a":1,"b":["x"]}"#;
        for content in ["application/json", "Application/JSON; charset=utf-8"] {
            let read = read_json::<Pair>(&settings, request(content, Body::from(good))).await;
            assert_eq!(read.expect("valid"), Pair { a: 1, b: vec!["x".to_owned()] });
        }
        for content in ["text/plain", "application/jsonx", ""] {
            let found = status(content, Body::from(good)).await;
            assert_eq!(found, StatusCode::UNSUPPORTED_MEDIA_TYPE, "{content}");
        }
        let mut zipped = request("application/json", Body::from(good));
        zipped.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        let error = read_json::<Pair>(&settings, zipped).await.expect_err("refused");
        assert_eq!(error.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
        let json = "application/json";
        let too_large = StatusCode::PAYLOAD_TOO_LARGE;
        assert_eq!(status(json, Body::from(vec![b' '; 65])).await, too_large);
        assert_eq!(status(json, Body::from(vec![b' '; 65 + DISCARDED])).await, too_large);
        let parts = stream::iter((0..65).map(|_| Ok::<_, std::io::Error>(" ")));
        assert_eq!(status(json, Body::from_stream(parts)).await, too_large);
        let broken = stream::iter([Ok("{"), Err(std::io::Error::other("gone"))]);
        assert_eq!(status(json, Body::from_stream(broken)).await, StatusCode::BAD_REQUEST);
    }

    #[tokio::test]
    async fn a_body_that_never_comes_is_not_waited_for() {
        let silent = Body::from_stream(stream::pending::<Result<&str, std::io::Error>>());
        let settings = GatewaySettings { body_timeout_ms: 1, ..settings() };
        let read = read_json::<Pair>(&settings, request("application/json", silent)).await;
        assert_eq!(read.expect_err("refused").status(), StatusCode::REQUEST_TIMEOUT);
    }

    #[test]
    fn the_place_of_a_fault_is_named() {
        let check = |json: &[u8], param: &str, message: &str| {
            let error = decode::<Pair>(json).expect_err("refused");
            let body: serde_json::Value = serde_json::from_str(&error.to_json()).expect("JSON");
            let found = body["error"]["param"].as_str().unwrap_or("");
            assert_eq!(found, param, "{body}");
            assert!(body["error"]["message"].as_str().expect("a text").contains(message), "{body}");
        };
        check(br#"{"a":-1,"b":[]}"#, "a", "-1");
        check(br#"{"a":1,"b":["x",2]}"#, "b[1]", "expected a string");
        check(br#"{"a":1e999,"b":[]}"#, "a", "number out of range");
        check(br#"{"a":NaN,"b":[]}"#, "a", "expected");
        check(br#"{"a":1,"b":[],"c":3}"#, "c", "unknown field `c`");
        check(b"{\"a\":1,\"b\":[\"\xff\"]}", "b[0]", "unicode");
        check(br#"{"a":1,"b":[]} x"#, "", "trailing");
        check(b"", "", "EOF");
    }
}
