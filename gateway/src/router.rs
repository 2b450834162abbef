//! The paths, and what every request passes on its way to them.

use std::net::IpAddr;
use std::str::FromStr as _;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{MatchedPath, Path, Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use axum::http::{HeaderMap, Method, Response, StatusCode, Uri};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use serde::Serialize;
use serde_json::json;
use stagebus_schemas::trace::{TRACEPARENT, TraceContext};
use stagebus_telemetry::mirror;
use tokio::time::Instant;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};
use tracing::debug;

use crate::answers;
use crate::api_error::ApiError;
use crate::body::read_json;
use crate::fleet::Model;
use crate::gateway::{Gateway, Shared};
use crate::live;
use crate::openai::chat::ChatRequest;
use crate::openai::completions::CompletionRequest;
use crate::page;
use crate::readiness::Readiness;
use crate::text;

/// Whose models these are, in OpenAI's list of models.
const OWNER: &str = "stagebus";

/// How long a browser may rely on what it was told about other origins, in seconds.
const CORS_MAX_AGE: std::time::Duration = std::time::Duration::from_secs(3600);

type Answer = Result<Response<Body>, ApiError>;

/// Makes the service of all connections.
pub(crate) fn make(gateway: Shared) -> Router {
    let with_key = Router::new()
        .route("/v1/models", get(list_models))
        .route("/v1/models/{id}", get(show_model))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(complete))
        .route("/v1/embeddings", post(embed))
        .route("/tokenize", post(text::tokenize))
        .route("/detokenize", post(text::detokenize))
        .route("/metrics", get(show_metrics))
        .route("/fleet", get(live::show))
        .route("/fleet/events", get(live::follow))
        .route_layer(from_fn_with_state(Arc::clone(&gateway), check_key));
    let cors = cors(&gateway.settings.cors_origins);
    let all = Router::new()
        .route("/health", get(health))
        .route("/ready", get(ready))
        .merge(page::routes())
        .merge(with_key)
        .fallback(async || ApiError::no_route())
        .method_not_allowed_fallback(async || ApiError::wrong_method())
        .layer(from_fn_with_state(Arc::clone(&gateway), check_host))
        .layer(from_fn_with_state(Arc::clone(&gateway), observe))
        .with_state(gateway);
    match cors {
        Some(cors) => all.layer(cors),
        None => all,
    }
}

/// Browsers ask before they send a page's request to another origin; without origins in the
/// settings nobody answers, and they refuse.
fn cors(origins: &[String]) -> Option<CorsLayer> {
    let origins: Vec<_> =
        origins.iter().filter_map(|text| HeaderValue::from_str(text).ok()).collect();
    (!origins.is_empty()).then(|| {
        CorsLayer::new()
            .allow_origin(AllowOrigin::list(origins))
            .allow_methods([Method::GET, Method::POST])
            .allow_headers(AllowHeaders::mirror_request())
            .max_age(CORS_MAX_AGE)
    })
}

/// Counts the response.
async fn observe(
    State(gateway): State<Shared>,
    route: Option<MatchedPath>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let began = Instant::now();
    let response = next.run(request).await;
    let status = response.status().as_u16();
    let route = route.as_ref().map_or("none", MatchedPath::as_str);
    gateway.metrics.response(route, status);
    debug!(route, status, elapsed_us = began.elapsed().as_micros(), "response");
    response
}

/// Without keys whoever reaches the address may ask, which is this machine, and every page in its
/// browser whose name is made to lead here. Such a request still carries the page's name.
async fn check_host(State(gateway): State<Shared>, request: Request, next: Next) -> Response<Body> {
    if gateway.keys.is_none() && !is_local(request.headers(), request.uri()) {
        return ApiError::misdirected().into_response();
    }
    next.run(request).await
}

fn is_local(headers: &HeaderMap, uri: &Uri) -> bool {
    let header = headers.get(HOST).map(|value| value.to_str().unwrap_or("?"));
    let given = [uri.authority().map(|authority| authority.as_str()), header];
    given.into_iter().flatten().all(|authority| {
        let host = match authority.rsplit_once(':') {
            Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
            _ => authority,
        };
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        host.eq_ignore_ascii_case("localhost")
            || IpAddr::from_str(bare).is_ok_and(|address| address.is_loopback())
    })
}

/// Lets in whoever shows a key, where keys are needed.
async fn check_key(State(gateway): State<Shared>, request: Request, next: Next) -> Response<Body> {
    if let Some(keys) = &gateway.keys {
        let shown = request.headers().get(AUTHORIZATION).and_then(|value| bearer(value.as_bytes()));
        let Some(holder) = shown.and_then(|key| keys.holder(key)) else {
            return ApiError::unauthorized().into_response();
        };
        debug!(holder, "key accepted");
    }
    next.run(request).await
}

fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, key) = header.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
}

async fn chat(State(gateway): State<Shared>, request: Request) -> Answer {
    let trace = trace(request.headers());
    let request: ChatRequest = read_json(&gateway.settings, request).await?;
    let (order, format) = request.order(&gateway)?;
    answers::give(&gateway, order, trace, format).await
}

async fn complete(State(gateway): State<Shared>, request: Request) -> Answer {
    let trace = trace(request.headers());
    let request: CompletionRequest = read_json(&gateway.settings, request).await?;
    let format = request.format();
    let order = request.order(&gateway)?;
    answers::give(&gateway, order, trace, format).await
}

/// The client's span, which the fleet goes on with.
fn trace(headers: &HeaderMap) -> Option<TraceContext> {
    headers.get(TRACEPARENT)?.to_str().ok()?.parse().ok()
}

async fn embed() -> ApiError {
    let message = "embeddings are not made here: the fleet's models generate text";
    ApiError::not_here("embeddings_unavailable", message)
}

#[derive(Serialize)]
struct ModelEntry {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
}

impl From<Model> for ModelEntry {
    fn from(model: Model) -> Self {
        let Model { name, since, .. } = model;
        Self { id: name.to_string(), object: "model", created: since, owned_by: OWNER }
    }
}

async fn list_models(State(gateway): State<Shared>) -> Response<Body> {
    let data: Vec<_> = gateway.models().into_iter().map(ModelEntry::from).collect();
    json_body(StatusCode::OK, &json!({"object": "list", "data": data}))
}

async fn show_model(
    State(gateway): State<Shared>,
    id: Result<Path<String>, PathRejection>,
) -> Answer {
    // A path that is no text names no model.
    let Path(id) = id.map_err(|_no_text| ApiError::no_model(""))?;
    let model = gateway.allowed_model(&id)?;
    let model = gateway.model(&model).ok_or_else(|| ApiError::no_model(&id))?;
    Ok(json_body(StatusCode::OK, &json!(ModelEntry::from(model))))
}

/// The process lives.
async fn health() -> Response<Body> {
    json_body(StatusCode::OK, &json!({"status": "ok"}))
}

/// Requests can be answered.
async fn ready(State(gateway): State<Shared>) -> Response<Body> {
    let readiness = gateway.readiness().await;
    let (status, text) = match readiness {
        Readiness::Ready => (StatusCode::OK, "ready"),
        Readiness::NoModel => (StatusCode::SERVICE_UNAVAILABLE, "no model is served"),
        Readiness::NoToken => (StatusCode::SERVICE_UNAVAILABLE, "no model gives a token"),
        Readiness::Unknown => (StatusCode::SERVICE_UNAVAILABLE, "not known"),
    };
    json_body(status, &json!({"status": text}))
}

async fn show_metrics(State(gateway): State<Shared>) -> Answer {
    let Gateway { bus, metrics, registry, .. } = gateway.as_ref();
    metrics.broker_connected.set(u64::from(bus.is_connected()));
    metrics.models.set(gateway.models().len() as u64);
    mirror(&metrics.slow_consumer, bus.slow_consumer_reports());
    mirror(&metrics.reconnects, bus.reconnects());
    let text = stagebus_telemetry::encode(registry)
        .map_err(|error| ApiError::internal(format!("metrics cannot be written: {error}")))?;
    let content = HeaderValue::from_static(stagebus_telemetry::CONTENT_TYPE);
    Ok(([(CONTENT_TYPE, content)], text).into_response())
}

fn json_body(status: StatusCode, body: &serde_json::Value) -> Response<Body> {
    let content = [(CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    (status, content, body.to_string()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bearer_key_is_read() {
        assert_eq!(bearer(b"Bearer abc"), Some(&b"abc"[..]));
        assert_eq!(bearer(b"bearer  abc "), Some(&b"abc"[..]));
        for wrong in [&b"Basic abc"[..], b"Bearer", b"", b"Bearerabc"] {
            assert_eq!(bearer(wrong), None);
        }
    }

    #[test]
    fn only_names_of_this_machine_are_local() {
        let local = |host: &'static str| {
            let headers = HeaderMap::from_iter([(HOST, HeaderValue::from_static(host))]);
            is_local(&headers, &Uri::from_static("/v1/models"))
        };
        for host in ["localhost", "LocalHost:8000", "127.0.0.1:1", "127.8.0.1", "[::1]:80", "[::1]"]
        {
            assert!(local(host), "{host}");
        }
        for host in ["example.org", "localhost.example.org:8000", "10.0.0.1", "", "127.0.0.1.x:1"] {
            assert!(!local(host), "{host}");
        }
        let absolute = Uri::from_static("http://example.org/v1/models");
        assert!(!is_local(&HeaderMap::new(), &absolute));
        assert!(is_local(&HeaderMap::new(), &Uri::from_static("/")), "HTTP/1.0 has no name");
    }
}
