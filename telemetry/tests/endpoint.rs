//! The endpoint over real connections.

use std::net::SocketAddr;
use std::time::Duration;

use stagebus_settings::{MetricsSettings, TelemetrySettings};
use stagebus_telemetry::{Telemetry, TelemetryError};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Longest wait for an answer; only a hang takes that long.
const PATIENCE: Duration = Duration::from_secs(20);

fn anywhere() -> MetricsSettings {
    MetricsSettings { listen: Some("0".parse().expect("a port")) }
}

async fn start(metrics: &MetricsSettings) -> Result<Telemetry, TelemetryError> {
    Telemetry::start(metrics, &TelemetrySettings::default(), "test").await
}

/// Sends bytes and reads to the end of the connection.
async fn exchange(address: SocketAddr, request: &str) -> String {
    let answer = async {
        let mut stream = TcpStream::connect(address).await.expect("it listens");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("an answer");
        answer
    };
    tokio::time::timeout(PATIENCE, answer).await.expect("an answer in time")
}

#[tokio::test]
async fn metrics_and_health_are_answered_and_nothing_else() {
    let mut telemetry = start(&anywhere()).await.expect("a free port");
    let worker = telemetry.worker(3).metrics;
    let _coordinator = telemetry.coordinator();
    let address = telemetry.metrics_address().expect("an address");
    assert!(address.ip().is_loopback(), "{address}");
    telemetry.serve();
    worker.rows.inc_by(42);
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: here\r\n\r\n");

    let answer = exchange(address, &get("/metrics")).await;
    let (head, body) = answer.split_once("\r\n\r\n").expect("head and body");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    assert!(head.to_lowercase().contains("content-type: application/openmetrics-text"), "{head}");
    assert!(body.contains("stagebus_worker_rows_total{stage=\"3\"} 42\n"), "{body}");
    assert!(body.contains("stagebus_coordinator_sessions 0\n"), "{body}");
    assert!(body.ends_with("# EOF\n"), "{body}");

    let head = exchange(address, "HEAD /metrics HTTP/1.1\r\nHost: here\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200") && head.ends_with("\r\n\r\n"), "{head}");
    let health = exchange(address, &get("/health")).await;
    assert!(health.starts_with("HTTP/1.1 200") && health.ends_with("\r\nok\n"), "{health}");
    assert!(exchange(address, &get("/")).await.starts_with("HTTP/1.1 404"));
    let posted = exchange(address, "POST /metrics HTTP/1.1\r\nHost: here\r\n\r\n").await;
    assert!(posted.starts_with("HTTP/1.1 405") && posted.contains("GET, HEAD"), "{posted}");
    assert!(exchange(address, "nonsense\r\n\r\n").await.starts_with("HTTP/1.1 400"));

    telemetry.end().await;
    assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
}

#[tokio::test]
async fn the_end_does_not_wait_for_connections() {
    let mut telemetry = start(&anywhere()).await.expect("a free port");
    let address = telemetry.metrics_address().expect("an address");
    telemetry.serve();
    let mut idle = TcpStream::connect(address).await.expect("it listens");
    idle.write_all(b"GET /metrics HTTP/1.1\r\n").await.expect("sent");
    // The one that was accepted after it has been answered, so both have been.
    exchange(address, "GET /health HTTP/1.1\r\n\r\n").await;
    tokio::time::timeout(PATIENCE, telemetry.end()).await.expect("an end in time");
    let mut rest = Vec::new();
    // The system may tell the end as a reset.
    drop(tokio::time::timeout(PATIENCE, idle.read_to_end(&mut rest)).await.expect("closed"));
    assert_eq!(rest, b"");
}

#[tokio::test]
async fn an_address_that_is_taken_is_named() {
    let first = start(&anywhere()).await.expect("a free port");
    let address = first.metrics_address().expect("an address");
    let settings =
        MetricsSettings { listen: Some(address.to_string().parse().expect("an address")) };
    let error = start(&settings).await.expect_err("it is taken");
    let TelemetryError::Metrics(error) = error else { panic!("{error}") };
    assert_eq!(error.address, address);
    assert_eq!(error.source.kind(), std::io::ErrorKind::AddrInUse);
}

#[tokio::test]
async fn nothing_listens_unless_told() {
    let mut telemetry = start(&MetricsSettings::default()).await.expect("nothing to do");
    assert_eq!(telemetry.metrics_address(), None);
    telemetry.serve();
    telemetry.end().await;
}
