//! What the fleet refuses or fails, as HTTP clients hear it.

use serde_json::{Value, json};
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::messages::public::{Event, FinishReason};

use crate::bed::{Bed, MODEL};
use crate::client::{self, Connection};
use crate::scripted::Scripted;

const PATH: &str = "/v1/completions";

fn request(stream: bool) -> Vec<u8> {
    client::json_request(PATH, &json!({"model": MODEL, "prompt": "a", "stream": stream}))
}

#[tokio::test]
async fn failures_before_the_answer_have_a_status() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|_| {}).await;
    for (class, hint, status, code, retry) in [
        (ErrorClass::InvalidRequest, None, 400, "invalid_value", None),
        (ErrorClass::Overloaded, Some(2500), 429, "overloaded", Some("3")),
        (ErrorClass::StageUnavailable, None, 503, "stage_unavailable", Some("1")),
        (ErrorClass::VersionMismatch, None, 500, "version_mismatch", None),
        (ErrorClass::Internal, None, 500, "internal_error", None),
    ] {
        for stream in [false, true] {
            let mut connection = Connection::open(gateway.address).await;
            connection.write(&request(stream)).await;
            let asked = coordinator.asked().await;
            coordinator.fail(&asked, class, hint).await;
            let response = connection.response().await;
            assert_eq!((response.status, response.header("retry-after")), (status, retry));
            assert_eq!(response.error()["code"], code);
        }
    }
    gateway.end().await;
    coordinator.no_cancellation().await;
}

#[tokio::test]
async fn failures_in_a_stream_are_its_last_event() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|_| {}).await;
    for with_gap in [false, true] {
        let mut connection = Connection::open(gateway.address).await;
        connection.write(&request(true)).await;
        let asked = coordinator.accepted().await;
        coordinator.token(&asked, 0, "one").await;
        if with_gap {
            coordinator.token(&asked, 2, "three").await;
            assert_eq!(coordinator.cancelled().await, asked.id());
        } else {
            coordinator.fail(&asked, ErrorClass::StageUnavailable, None).await;
        }
        let response = connection.response().await;
        assert_eq!(response.status, 200);
        let events = response.events();
        let error: Value = serde_json::from_str(events.last().unwrap()).unwrap();
        let code = if with_gap { "answer_lost" } else { "stage_unavailable" };
        assert_eq!((events.len(), &error["error"]["code"]), (2, &json!(code)), "{events:?}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn one_answer_that_fails_ends_the_others() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|_| {}).await;
    for stream in [false, true] {
        let mut connection = Connection::open(gateway.address).await;
        let body = json!({"model": MODEL, "prompt": "a", "n": 2, "stream": stream});
        connection.write(&client::json_request(PATH, &body)).await;
        let (first, second) = (coordinator.accepted().await, coordinator.accepted().await);
        coordinator.fail(&first, ErrorClass::Internal, None).await;
        assert_eq!(coordinator.cancelled().await, second.id());
        let response = connection.response().await;
        assert_eq!(response.status, if stream { 200 } else { 500 });
        assert!(response.text().contains("internal_error"), "{response:?}");
    }
    gateway.end().await;
}

#[tokio::test]
async fn an_answer_that_somebody_else_cancels_is_no_success() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|_| {}).await;
    let mut connection = Connection::open(gateway.address).await;
    connection.write(&request(false)).await;
    let asked = coordinator.accepted().await;
    coordinator.done(&asked, FinishReason::Cancelled).await;
    let response = connection.response().await;
    assert_eq!((response.status, &response.error()["code"]), (503, &json!("cancelled")));
    gateway.end().await;
}

#[tokio::test]
async fn an_answer_out_of_order_is_a_fault_of_the_fleet() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|_| {}).await;
    let mut connection = Connection::open(gateway.address).await;
    connection.write(&request(false)).await;
    let asked = coordinator.asked().await;
    coordinator.status(&asked).await;
    let (i, text) = (0, "early".to_owned());
    coordinator
        .tell(
            &asked,
            &Event::Token { i, text, tokens: vec![1], logprobs: Vec::new(), steps: Vec::new() },
        )
        .await;
    assert_eq!(connection.response().await.status, 500);
    gateway.end().await;
}

#[tokio::test]
async fn a_model_that_was_there_is_unavailable_and_one_that_never_was_is_unknown() {
    let bed = Bed::new().await;
    let gateway = bed.gateway(|_| {}).await;
    let response = client::send(gateway.address, &request(false)).await;
    assert_eq!((response.status, &response.error()["code"]), (404, &json!("model_not_found")));
    assert_eq!(response.error()["param"], "model");
    let coordinator = Scripted::start(&bed).await;
    coordinator.until_listed(&gateway).await;
    drop(coordinator);
    bed.settle().await;
    let response = client::send(gateway.address, &request(false)).await;
    assert_eq!((response.status, &response.error()["code"]), (503, &json!("model_unavailable")));
    gateway.end().await;
}

#[tokio::test]
async fn without_a_broker_requests_are_refused_until_it_is_back() {
    let mut bed = Bed::new().await;
    let gateway = bed.gateway(|_| {}).await;
    bed.broker.kill().await.unwrap();
    let response = client::send(gateway.address, &request(false)).await;
    assert_eq!((response.status, &response.error()["code"]), (503, &json!("broker_unavailable")));
    assert_eq!(client::get(gateway.address, "/health").await.status, 200, "the process lives");
    assert_eq!(client::get(gateway.address, "/ready").await.status, 503);
    bed.broker.restart().await.unwrap();
    let fleet = bed.fleet().await;
    gateway.until_models(&[MODEL]).await;
    assert_eq!(client::send(gateway.address, &request(false)).await.status, 200);
    gateway.end().await;
    fleet.end().await;
}
