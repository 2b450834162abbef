//! The registered sets are the lists of names, and show what happened.

use std::collections::BTreeSet;
use std::time::Duration;

use prometheus_client::registry::Registry;
use stagebus_schemas::error::ErrorClass;
use stagebus_schemas::ids::StageIndex;
use stagebus_schemas::messages::forward::Phase;
use stagebus_schemas::messages::public::FinishReason;

use super::{CoordinatorMetrics, GatewayMetrics, Outcome, Recovery, WorkerMetrics, encode, mirror};
use crate::names::{self, Kind, Metric};

fn exposition(registry: &Registry) -> String {
    encode(registry).expect("text")
}

/// Name (as samples have it), kind and help of every family.
fn families(body: &str) -> BTreeSet<(String, String, String)> {
    let line_of = |word: &str, name: &str| {
        let start = format!("# {word} {name} ");
        body.lines().find_map(|line| line.strip_prefix(&start)).unwrap_or_default().to_owned()
    };
    let types = body.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types
        .map(|line| {
            let (name, kind) = line.split_once(' ').expect("name and kind");
            let ending = if kind == "counter" { "_total" } else { "" };
            (format!("{name}{ending}"), kind.to_owned(), line_of("HELP", name))
        })
        .collect()
}

fn expected(metrics: &[Metric]) -> BTreeSet<(String, String, String)> {
    let of = |metric: &Metric| {
        (metric.name.to_owned(), metric.kind.as_str().to_owned(), format!("{}.", metric.meaning))
    };
    metrics.iter().map(of).collect()
}

fn has(body: &str, line: &str) {
    assert!(body.lines().any(|found| found == line), "{line} is not in\n{body}");
}

#[test]
fn the_registered_sets_are_the_lists() {
    let mut registry = Registry::default();
    let _worker = WorkerMetrics::registered(&mut registry, 1);
    assert_eq!(families(&exposition(&registry)), expected(&names::worker::ALL));
    let mut registry = Registry::default();
    let coordinator = CoordinatorMetrics::registered(&mut registry);
    // A family without a member is not shown.
    coordinator.workers(StageIndex::FIRST, 1);
    assert_eq!(families(&exposition(&registry)), expected(&names::coordinator::ALL));
    let mut registry = Registry::default();
    let gateway = GatewayMetrics::registered(&mut registry);
    gateway.response("/v1/models", 200);
    assert_eq!(families(&exposition(&registry)), expected(&names::gateway::ALL));
}

#[test]
fn names_follow_the_rules() {
    let mut seen = BTreeSet::new();
    let workers_and_coordinators = names::worker::ALL.iter().chain(&names::coordinator::ALL);
    for metric in workers_and_coordinators.chain(&names::gateway::ALL) {
        let Metric { name, kind, labels, meaning } = metric;
        assert!(seen.insert(*name), "{name} stands twice");
        assert!(name.starts_with(names::PREFIX), "{name}");
        assert_eq!(name.ends_with("_total"), *kind == Kind::Counter, "{name}");
        assert!(!name.contains("_ms") && !name.contains("_us"), "{name} has no base unit");
        assert!(!meaning.ends_with('.'), "{name}: {meaning}");
        let known = [
            names::STAGE,
            names::OUTCOME,
            names::CLASS,
            names::PHASE,
            names::WAY,
            names::ROUTE,
            names::STATUS,
        ];
        assert!(labels.iter().all(|label| known.contains(label)), "{name}: {labels:?}");
    }
    assert_eq!(names::worker::DECODE.unit(), Some("seconds"));
    assert_eq!(names::worker::SENT.unit(), Some("bytes"));
    assert_eq!(names::worker::ROWS.unit(), None);
}

#[test]
fn a_worker_shows_what_happened() {
    let mut registry = Registry::default();
    let worker = WorkerMetrics::registered(&mut registry, 2);
    worker.micro_batch(3, 2);
    worker.decode(Duration::from_millis(3));
    worker.step_started(Duration::from_millis(1));
    worker.kv(10, 5_000, 100_000);
    worker.steps_done.inc_by(2);
    mirror(&worker.steps_refused, 7);
    worker.sent_bulk.inc_by(70_000);
    let body = exposition(&registry);
    has(&body, r#"stagebus_worker_micro_batch_rows_sum{stage="2"} 3.0"#);
    has(&body, r#"stagebus_worker_micro_batch_rows_bucket{stage="2",le="4.0"} 1"#);
    has(&body, r#"stagebus_worker_decode_seconds_count{stage="2"} 1"#);
    has(&body, r#"stagebus_worker_prefill_seconds_count{stage="2"} 0"#);
    has(&body, r#"stagebus_worker_kv_capacity_tokens{stage="2"} 200"#);
    has(&body, r#"stagebus_worker_steps_total{stage="2",outcome="done"} 2"#);
    has(&body, r#"stagebus_worker_steps_total{stage="2",outcome="refused"} 7"#);
    has(&body, r#"stagebus_worker_steps_total{stage="2",outcome="failed"} 0"#);
    has(&body, r#"stagebus_worker_sent_bytes_total{stage="2",way="bulk"} 70000"#);
    has(&body, "# UNIT stagebus_worker_decode_seconds seconds");
    worker.kv(0, 0, 100_000);
    has(&exposition(&registry), r#"stagebus_worker_kv_capacity_tokens{stage="2"} 200"#);
}

#[test]
fn a_coordinator_shows_what_happened() {
    let mut registry = Registry::default();
    let coordinator = CoordinatorMetrics::registered(&mut registry);
    coordinator.request_ended(Outcome::Done(FinishReason::Length));
    coordinator.request_ended(Outcome::Failed(ErrorClass::Overloaded));
    coordinator.recovered(Recovery::WorkerGone);
    coordinator.first_token(Duration::from_millis(40));
    coordinator.more_tokens(4, Duration::from_secs(2));
    coordinator.step(Phase::Decode, Duration::from_millis(9));
    let body = exposition(&registry);
    has(&body, r#"stagebus_coordinator_requests_total{outcome="length"} 1"#);
    has(&body, r#"stagebus_coordinator_requests_total{outcome="overloaded"} 1"#);
    has(&body, r#"stagebus_coordinator_requests_total{outcome="internal"} 0"#);
    has(&body, r#"stagebus_coordinator_recoveries_total{class="worker_gone"} 1"#);
    has(&body, r#"stagebus_coordinator_recoveries_total{class="step_lost"} 0"#);
    has(&body, "stagebus_coordinator_inter_token_seconds_count 4");
    has(&body, "stagebus_coordinator_inter_token_seconds_sum 2.0");
    has(&body, r#"stagebus_coordinator_step_seconds_count{phase="decode"} 1"#);
    has(&body, r#"stagebus_coordinator_step_seconds_count{phase="prefill"} 0"#);
}

#[test]
fn a_gateway_shows_what_happened() {
    let mut registry = Registry::default();
    let gateway = GatewayMetrics::registered(&mut registry);
    gateway.response("/v1/models", 200);
    gateway.response("/v1/models", 200);
    gateway.response("none", 404);
    gateway.first_token(Duration::from_millis(15));
    let body = exposition(&registry);
    has(&body, r#"stagebus_gateway_responses_total{route="/v1/models",status="200"} 2"#);
    has(&body, r#"stagebus_gateway_responses_total{route="none",status="404"} 1"#);
    has(&body, r#"stagebus_gateway_first_token_seconds_bucket{le="0.016"} 1"#);
    has(&body, r#"stagebus_gateway_first_token_seconds_bucket{le="0.008"} 0"#);
    has(&body, "stagebus_gateway_answer_seconds_count 0");
}
