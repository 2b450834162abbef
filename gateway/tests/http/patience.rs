//! Clients that leave, dawdle or do not read, and answers that take too long.

use serde_json::{Value, json};
use stagebus_schemas::messages::public::FinishReason;

use crate::bed::{Bed, MODEL};
use crate::client::{self, Connection};
use crate::scripted::Scripted;

const PATH: &str = "/v1/completions";

fn request(stream: bool) -> Vec<u8> {
    client::json_request(PATH, &json!({"model": MODEL, "prompt": "a", "stream": stream}))
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_request() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|_| {}).await;
    // Before it is accepted.
    let mut connection = Connection::open(gateway.address).await;
    connection.write(&request(false)).await;
    let asked = coordinator.asked().await;
    drop(connection);
    assert_eq!(coordinator.cancelled().await, asked.id());
    // While it waits for the whole answer.
    let mut connection = Connection::open(gateway.address).await;
    connection.write(&request(false)).await;
    let asked = coordinator.accepted().await;
    drop(connection);
    assert_eq!(coordinator.cancelled().await, asked.id());
    // In the middle of a stream, with all of its answers.
    let mut connection = Connection::open(gateway.address).await;
    let body = json!({"model": MODEL, "prompt": "a", "stream": true, "n": 2});
    connection.write(&client::json_request(PATH, &body)).await;
    let (first, second) = (coordinator.accepted().await, coordinator.accepted().await);
    coordinator.token(&first, 0, "one").await;
    while !connection.line().await.contains("one") {}
    drop(connection);
    let mut cancelled = [coordinator.cancelled().await, coordinator.cancelled().await];
    let mut expected = [first.id(), second.id()];
    cancelled.sort();
    expected.sort();
    assert_eq!(cancelled, expected);
    gateway.end().await;
}

#[tokio::test]
async fn a_request_that_ended_is_not_cancelled() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|_| {}).await;
    for stream in [true, false] {
        let mut connection = Connection::open(gateway.address).await;
        connection.write(&request(stream)).await;
        let asked = coordinator.accepted().await;
        coordinator.done(&asked, FinishReason::Stop).await;
        assert_eq!(connection.response().await.status, 200);
    }
    gateway.end().await;
    coordinator.no_cancellation().await;
}

#[tokio::test]
async fn a_client_that_does_not_read_is_cut_off() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|settings| settings.write_timeout_ms = 100).await;
    let mut connection = Connection::open(gateway.address).await;
    connection.write(&request(true)).await;
    let asked = coordinator.accepted().await;
    // More than the buffers of both sides hold.
    let text = "x".repeat(64 << 10);
    for i in 0..512 {
        coordinator.token(&asked, i, &text).await;
    }
    assert_eq!(coordinator.cancelled().await, asked.id());
    gateway.end().await;
}

#[tokio::test]
async fn a_client_that_dawdles_is_not_waited_for() {
    let bed = Bed::new().await;
    let gateway = bed
        .gateway(|settings| {
            settings.header_timeout_ms = 200;
            settings.body_timeout_ms = 200;
        })
        .await;
    // A head that never ends.
    let mut connection = Connection::open(gateway.address).await;
    connection.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-").await;
    assert_eq!(connection.rest().await, b"", "closed without a word");
    // A connection that says nothing.
    let mut connection = Connection::open(gateway.address).await;
    assert_eq!(connection.rest().await, b"");
    // A body that never ends.
    let mut connection = Connection::open(gateway.address).await;
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n\
                Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"model\"";
    connection.write(head.as_bytes()).await;
    let response = connection.response().await;
    assert_eq!((response.status, response.header("connection")), (408, Some("close")));
    assert_eq!(response.error()["code"], "request_timeout");
    assert_eq!(connection.rest().await, b"", "what follows is no request");
    gateway.end().await;
}

#[tokio::test]
async fn an_answer_that_takes_too_long_is_given_up() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|settings| settings.request_timeout_ms = 2000).await;
    let mut connection = Connection::open(gateway.address).await;
    connection.write(&request(false)).await;
    let asked = coordinator.accepted().await;
    let response = connection.response().await;
    assert_eq!((response.status, &response.error()["code"]), (504, &json!("deadline_exceeded")));
    assert_eq!(coordinator.cancelled().await, asked.id());

    let mut connection = Connection::open(gateway.address).await;
    connection.write(&request(true)).await;
    let asked = coordinator.accepted().await;
    coordinator.token(&asked, 0, "one").await;
    let response = connection.response().await;
    let events = response.events();
    let error: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "deadline_exceeded", "{events:?}");
    assert_eq!(coordinator.cancelled().await, asked.id());
    gateway.end().await;
}

#[tokio::test]
async fn more_answers_than_there_is_room_for_are_refused_at_once() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|settings| settings.max_requests = 2).await;
    let mut first = Connection::open(gateway.address).await;
    first.write(&request(true)).await;
    let asked = coordinator.accepted().await;
    let body = json!({"model": MODEL, "prompt": "a", "n": 2});
    let response = client::post(gateway.address, PATH, &body).await;
    assert_eq!((response.status, response.header("retry-after")), (429, Some("1")));
    assert_eq!(response.error()["type"], "rate_limit_error");
    coordinator.done(&asked, FinishReason::Stop).await;
    assert_eq!(first.response().await.status, 200);
    let mut both = Connection::open(gateway.address).await;
    both.write(&client::json_request(PATH, &body)).await;
    for asked in [coordinator.accepted().await, coordinator.accepted().await] {
        coordinator.done(&asked, FinishReason::Stop).await;
    }
    assert_eq!(both.response().await.status, 200);
    gateway.end().await;
}

#[tokio::test]
async fn connections_beyond_the_bound_wait_for_their_turn() {
    let bed = Bed::new().await;
    let gateway = bed.gateway(|settings| settings.max_connections = 1).await;
    let mut first = Connection::open(gateway.address).await;
    first.write(&client::request("GET", "/health", &[], b"")).await;
    assert_eq!(first.response().await.status, 200);
    let mut second = Connection::open(gateway.address).await;
    second.write(&client::request("GET", "/health", &[], b"")).await;
    // The first one is still answered, the second one is not.
    first.write(&client::request("GET", "/health", &[], b"")).await;
    assert_eq!(first.response().await.status, 200);
    drop(first);
    assert_eq!(second.response().await.status, 200);
    drop(second);
    gateway.end().await;
}

#[tokio::test]
async fn a_stream_tells_that_its_request_lives() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|_| {}).await;
    let mut connection = Connection::open(gateway.address).await;
    connection.write(&request(true)).await;
    let asked = coordinator.accepted().await;
    coordinator.status(&asked).await;
    while connection.line().await != ": waiting" {}
    coordinator.done(&asked, FinishReason::Length).await;
    while !connection.line().await.contains("[DONE]") {}
    gateway.end().await;
}
