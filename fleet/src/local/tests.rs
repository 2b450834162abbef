//! Tests of the handling of processes, with a small program in the place of `stagebus`.
//!
//! The program keeps the promises that the fleet relies on: it says when it is ready, and leaves
//! when its standard input ends. The tests of the whole pipeline use the real one.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use tempfile::TempDir;

use super::*;
use crate::broker::BrokerOptions;
use crate::output::LogSink;

/// Says that it is ready, and leaves when its standard input ends.
const POLITE: &str = "echo '{\"ready\":true,\"id\":\"w1\",\"model\":\"m\",\"base_url\":\"u\"}'; \
    echo \"started $*\" >&2; cat >/dev/null; echo \"$1 leaving\" >&2";

/// A shard set of two stages and a fleet of `script` on it.
fn spec(script: &str) -> (TempDir, FleetSpec) {
    let folder = tempfile::tempdir().expect("folder");
    fs::write(folder.path().join("manifest.json"), r#"{"model":"m","stages":[{},{}]}"#)
        .expect("manifest");
    let program = folder.path().join("program");
    fs::write(&program, format!("#!/bin/sh\n{script}\n")).expect("program");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("permissions");
    let mut spec = FleetSpec::new(program, folder.path().to_owned());
    spec.broker = BrokerChoice::Running("nats://127.0.0.1:1".to_owned());
    spec.timeouts.leave = Duration::from_secs(20);
    (folder, spec)
}

#[tokio::test]
async fn a_fleet_starts_and_leaves_in_order() {
    let (_folder, mut spec) = spec(POLITE);
    let (sender, mut lines) = tokio::sync::mpsc::channel(100);
    spec.log = LogSink::Channel(sender);
    spec.broker = BrokerChoice::Private(BrokerOptions::default());
    spec.settings = vec!["worker.device=CPU".to_owned()];
    spec.gateway = Some(([127, 0, 0, 1], 8000).into());
    let mut fleet = LocalFleet::start(spec).await.expect("starts");
    let url = fleet.url().to_owned();
    assert_eq!(fleet.broker().expect("a broker").url(), url);
    assert_eq!(fleet.model(), Some("m"));
    let names: Vec<String> = fleet.members().into_iter().map(|member| member.name).collect();
    assert_eq!(names, ["worker-0.0", "worker-1.0", "coordinator.0", "gateway"]);
    assert_eq!(fleet.gateway(), Some("u"));

    let report = fleet.shutdown().await.expect("leaves");
    assert_eq!(report, ShutdownReport::default());
    let mut log = Vec::new();
    while let Some(line) = lines.recv().await {
        log.push(line);
    }
    let at = |text: &str| {
        let found = log.iter().position(|line| line.contains(text));
        found.unwrap_or_else(|| panic!("no {text} in {log:#?}"))
    };
    let told = format!("--exit-with-parent --set broker.url={url} --set worker.device=CPU");
    assert!(log[at("worker-1.0 | started worker --stage 1 --shards")].ends_with(&told));
    let gateway = &log[at("gateway | started gateway --listen 127.0.0.1:8000 --exit-with-parent")];
    assert!(gateway.contains("--set gateway.models=[\"m\"]"), "{gateway}");
    assert!(at("gateway leaving") < at("coordinator leaving"));
    assert!(at("coordinator leaving") < at("worker-0.0 | worker leaving"));
    assert!(at("coordinator leaving") < at("worker-1.0 | worker leaving"));
}

#[tokio::test]
async fn a_process_that_dies_at_once_is_reported_with_its_words() {
    let (_folder, spec) = spec("echo 'no such device: XPU' >&2; exit 3");
    match LocalFleet::start(spec).await {
        Err(FleetError::Exited { status, last_lines, .. }) => {
            assert_eq!(status.code(), Some(3));
            assert_eq!(last_lines, "no such device: XPU");
        }
        other => panic!("unexpected {other:?}"),
    }
}

#[tokio::test]
async fn one_failure_ends_the_start_though_others_are_not_ready() {
    let (_folder, spec) = spec("if [ \"$1\" = coordinator ]; then exit 4; fi; cat >/dev/null");
    assert!(matches!(
        LocalFleet::start(spec).await,
        Err(FleetError::Exited { name, .. }) if name == "coordinator.0"
    ));
}

#[tokio::test]
async fn silence_and_chatter_are_no_readiness() {
    let (_folder, mut silent) = spec("cat >/dev/null");
    silent.timeouts.ready = Duration::from_millis(50);
    assert!(matches!(LocalFleet::start(silent).await, Err(FleetError::NotReady { .. })));
    let (_folder, chatty) = spec("echo hello; cat >/dev/null");
    assert!(matches!(
        LocalFleet::start(chatty).await,
        Err(FleetError::Readiness { line, .. }) if line == "hello"
    ));
}

#[tokio::test]
async fn members_come_and_go() {
    let (_folder, mut spec) = spec(POLITE);
    spec.workers_per_stage = 2;
    let mut fleet = LocalFleet::start(spec).await.expect("starts");
    assert_eq!(fleet.members().len(), 5);
    fleet.kill("worker-0.1").await.expect("dies");
    assert!(matches!(fleet.kill("worker-0.1").await, Err(FleetError::NoMember { .. })));
    let added = fleet.add_worker(0).await.expect("starts");
    assert_eq!((added.name.as_str(), added.stage), ("worker-0.2", Some(0)));
    assert!(matches!(fleet.add_worker(2).await, Err(FleetError::NoMember { .. })));
    let status = fleet.retire("worker-1.0").await.expect("leaves");
    assert!(status.is_some_and(|status| status.success()));
    assert_eq!(fleet.members().len(), 4);
    fleet.shutdown().await.expect("leaves");
}

#[tokio::test]
async fn an_unexpected_end_is_seen() {
    let (_folder, spec) =
        spec("echo '{\"ready\":true}'; if [ \"$3\" = 1 ]; then echo oh >&2; exit 5; fi; cat");
    let mut fleet = LocalFleet::start(spec).await.expect("starts");
    let ended = fleet.ended().await.expect("ends");
    assert_eq!((ended.name.as_str(), ended.status.code()), ("worker-1.0", Some(5)));
    assert_eq!(ended.last_lines, "oh");
    assert_eq!(fleet.members().len(), 2);
    fleet.shutdown().await.expect("leaves");
}

#[tokio::test]
async fn a_stubborn_process_is_killed_at_the_deadline() {
    let (_folder, mut spec) = spec("echo '{\"ready\":true}'; while :; do sleep 1; done");
    spec.timeouts.leave = Duration::from_millis(100);
    let fleet = LocalFleet::start(spec).await.expect("starts");
    let report = fleet.shutdown().await.expect("leaves");
    assert_eq!(report.killed, ["coordinator.0", "worker-0.0", "worker-1.0"]);
}

#[tokio::test]
async fn a_folder_without_shards_is_refused() {
    let (folder, spec) = spec(POLITE);
    fs::write(folder.path().join("manifest.json"), "{}").expect("manifest");
    assert!(matches!(LocalFleet::start(spec.clone()).await, Err(FleetError::Manifest { .. })));
    fs::remove_file(folder.path().join("manifest.json")).expect("removed");
    assert!(matches!(LocalFleet::start(spec).await, Err(FleetError::File { .. })));
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn processes_can_be_tied_to_a_processor_and_measured() {
    let (_folder, mut spec) = spec(POLITE);
    spec.pinning.workers = vec![None, Some("0".to_owned())];
    let fleet = LocalFleet::start(spec).await.expect("starts");
    let member = &fleet.members()[1];
    let status = fs::read_to_string(format!("/proc/{}/status", member.pid)).expect("status");
    assert!(status.lines().any(|line| line == "Cpus_allowed_list:\t0"), "{status}");
    let (now, peak) = (rss_bytes(member.pid), peak_rss_bytes(member.pid));
    let (now, peak) = (now.expect("memory"), peak.expect("memory"));
    assert!(now > 100_000 && peak >= now, "{now} of {peak}");
    fleet.shutdown().await.expect("leaves");
}
