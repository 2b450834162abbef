//! The list of models, readiness and metrics.

use serde_json::json;

use crate::bed::{Bed, MODEL};
use crate::client;
use crate::scripted::Scripted;

#[tokio::test]
async fn models_come_and_go_with_their_coordinators() {
    let bed = Bed::new().await;
    let gateway = bed.gateway(|_| {}).await;
    gateway.until_models(&[]).await;
    let coordinator = Scripted::start(&bed).await;
    coordinator.until_listed(&gateway).await;
    let model = client::get(gateway.address, "/v1/models/tiny").await.json();
    assert_eq!(
        (&model["id"], &model["object"], &model["owned_by"]),
        (&json!(MODEL), &json!("model"), &json!("stagebus"))
    );
    assert!(model["created"].as_u64().unwrap() > 1_500_000_000, "{model}");
    coordinator.announce(false, 60_000).await;
    gateway.until_models(&[]).await;
    assert_eq!(client::get(gateway.address, "/v1/models/tiny").await.status, 404);
    // One that falls silent is gone after some intervals.
    coordinator.until_listed(&gateway).await;
    coordinator.announce(true, 50).await;
    gateway.until_models(&[]).await;
    gateway.end().await;
}

#[tokio::test]
async fn models_that_the_settings_leave_out_are_not_there() {
    let bed = Bed::new().await;
    let fleet = bed.fleet().await;
    let closed = bed.gateway(|settings| settings.models = vec!["other".parse().unwrap()]).await;
    let open =
        bed.gateway_with_model(|settings| settings.models = vec![MODEL.parse().unwrap()]).await;
    let body = json!({"model": MODEL, "prompt": "a"});
    assert_eq!(client::post(open.address, "/v1/completions", &body).await.status, 200);
    assert_eq!(client::post(closed.address, "/v1/completions", &body).await.status, 404);
    closed.until_models(&[]).await;
    let body = json!({"model": "other", "prompt": "a"});
    let missing = client::post(closed.address, "/v1/completions", &body).await;
    assert_eq!(missing.status, 503, "one that the settings name is only away: {missing:?}");
    closed.end().await;
    open.end().await;
    fleet.end().await;
}

#[tokio::test]
async fn ready_means_that_a_token_comes() {
    let bed = Bed::new().await;
    let without = bed.gateway(|_| {}).await;
    let response = client::get(without.address, "/ready").await;
    assert_eq!((response.status, response.json()), (503, json!({"status": "no model is served"})));
    assert_eq!(client::get(without.address, "/health").await.status, 200);
    without.end().await;
    let fleet = bed.fleet().await;
    let with = bed.gateway_with_model(|_| {}).await;
    let response = client::get(with.address, "/ready").await;
    assert_eq!((response.status, response.json()), (200, json!({"status": "ready"})));
    with.end().await;
    fleet.end().await;
}

#[tokio::test]
async fn a_fleet_that_fails_is_not_ready_and_asked_once_for_all() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|_| {}).await;
    coordinator.until_listed(&gateway).await;
    let ask = || client::get(gateway.address, "/ready");
    let answer = async {
        let asked = coordinator.asked().await;
        assert_eq!((asked.request.max_tokens, asked.request.stream), (Some(1), Some(false)));
        coordinator.fail(&asked, stagebus_schemas::error::ErrorClass::Internal, None).await;
    };
    let (first, second, ()) = tokio::join!(ask(), ask(), answer);
    for response in [first, second] {
        let expected = json!({"status": "no model gives a token"});
        assert_eq!((response.status, response.json()), (503, expected));
    }
    gateway.end().await;
}

#[tokio::test]
async fn metrics_count_what_happens() {
    let bed = Bed::new().await;
    let fleet = bed.fleet().await;
    let gateway = bed.gateway_with_model(|_| {}).await;
    let body = json!({"model": MODEL, "prompt": [5], "max_tokens": 3, "temperature": 0});
    let n_tokens = bed.expected(&[5], 3).len();
    for stream in [true, false] {
        let mut body = body.clone();
        body["stream"] = json!(stream);
        assert_eq!(client::post(gateway.address, "/v1/completions", &body).await.status, 200);
    }
    client::get(gateway.address, "/nowhere/at/all").await;
    let response = client::get(gateway.address, "/metrics").await;
    let content = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert_eq!((response.status, response.header("content-type")), (200, Some(content)));
    for line in [
        r#"stagebus_gateway_responses_total{route="/v1/completions",status="200"} 2"#.to_owned(),
        r#"stagebus_gateway_responses_total{route="none",status="404"} 1"#.to_owned(),
        "stagebus_gateway_first_token_seconds_count 2".to_owned(),
        "stagebus_gateway_answer_seconds_count 2".to_owned(),
        "stagebus_gateway_prompt_tokens_total 2".to_owned(),
        format!("stagebus_gateway_completion_tokens_total {}", 2 * n_tokens),
        "stagebus_gateway_answers 0".to_owned(),
        "stagebus_gateway_cancelled_total 0".to_owned(),
        "stagebus_gateway_broker_connected 1".to_owned(),
        "stagebus_gateway_models 1".to_owned(),
        "stagebus_gateway_slow_consumer_events_total 0".to_owned(),
        "stagebus_gateway_reconnects_total 0".to_owned(),
    ] {
        let found = response.text().lines().any(|found| found == line);
        assert!(found, "{line:?} is missing in\n{}", response.text());
    }
    gateway.end().await;
    fleet.end().await;
}
