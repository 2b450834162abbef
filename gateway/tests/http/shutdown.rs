//! The end of a gateway, asked for or not.

use serde_json::json;
use stagebus_gateway::GatewayError;
use stagebus_schemas::messages::public::FinishReason;
use tokio::net::TcpStream;

use crate::bed::{Bed, MODEL, soon};
use crate::client::{self, Connection};
use crate::scripted::Scripted;

fn request() -> Vec<u8> {
    let body = json!({"model": MODEL, "prompt": "a", "stream": true});
    client::json_request("/v1/completions", &body)
}

#[tokio::test]
async fn answers_that_are_under_way_finish() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|_| {}).await;
    let mut idle = Connection::open(gateway.address).await;
    idle.write(&client::request("GET", "/health", &[], b"")).await;
    assert_eq!(idle.response().await.status, 200);
    let mut busy = Connection::open(gateway.address).await;
    busy.write(&request()).await;
    let asked = coordinator.accepted().await;
    coordinator.token(&asked, 0, "one").await;
    while !busy.line().await.contains("one") {}
    gateway.stop.cancel();
    assert_eq!(idle.rest().await, b"", "an idle connection is closed");
    soon(async { while TcpStream::connect(gateway.address).await.is_ok() {} }).await;
    coordinator.token(&asked, 1, "two").await;
    coordinator.done(&asked, FinishReason::Stop).await;
    let rest = String::from_utf8(busy.rest().await).unwrap();
    assert!(rest.contains("two") && rest.contains("[DONE]"), "{rest}");
    gateway.ended().await.unwrap();
    coordinator.no_cancellation().await;
}

#[tokio::test]
async fn answers_that_do_not_finish_are_cut_off_and_cancelled() {
    let bed = Bed::new().await;
    let mut coordinator = Scripted::start(&bed).await;
    let gateway = bed.gateway(|settings| settings.drain_ms = 100).await;
    let mut connection = Connection::open(gateway.address).await;
    connection.write(&request()).await;
    let asked = coordinator.accepted().await;
    gateway.stop.cancel();
    let error = gateway.ended().await.unwrap_err();
    assert!(matches!(error, GatewayError::DrainDeadline { n_connections: 1 }), "{error}");
    assert_eq!(coordinator.cancelled().await, asked.id());
}

#[tokio::test]
async fn an_address_in_use_is_named() {
    let bed = Bed::new().await;
    let gateway = bed.gateway(|_| {}).await;
    let address = gateway.address;
    let broker = stagebus_settings::BrokerSettings {
        url: bed.broker.url(),
        ..stagebus_settings::BrokerSettings::default()
    };
    let config = crate::bed::config(broker, |settings| settings.listen = address);
    let stop = tokio_util::sync::CancellationToken::new();
    let error = soon(Box::pin(stagebus_gateway::run(config, stop, |_| Ok(())))).await.unwrap_err();
    assert!(matches!(error, GatewayError::Listen { listen, .. } if listen == address), "{error}");
    gateway.end().await;
}
