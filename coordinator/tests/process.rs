//! The `coordinator` program: ready line, orderly end with its parent, and errors that help.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]

#[path = "support/shard_set.rs"]
mod shard_set;

use std::process::{Output, Stdio};

use stagebus_fleet::{BrokerOptions, LocalBroker};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;

fn coordinator(shards: &std::path::Path, url: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_coordinator"));
    command
        .arg("--shards")
        .arg(shards)
        .args(["--set", &format!("broker.url={url}")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

async fn refused(mut command: Command) -> String {
    let Output { status, stderr, stdout } = command.output().await.unwrap();
    assert!(!status.success() && stdout.is_empty());
    String::from_utf8(stderr).unwrap()
}

#[tokio::test]
async fn it_says_when_it_is_ready_and_ends_with_its_parent() {
    let broker = LocalBroker::start(BrokerOptions::default()).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    shard_set::write(folder.path(), 2);
    let mut child =
        coordinator(folder.path(), &broker.url()).arg("--exit-with-parent").spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = lines.next_line().await.unwrap().unwrap();
    let ready: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(
        (&ready["ready"], &ready["role"], &ready["model"], &ready["stages"]),
        (&true.into(), &"coordinator".into(), &"tiny".into(), &2.into())
    );
    drop(child.stdin.take());
    assert!(child.wait().await.unwrap().success());
    assert_eq!(lines.next_line().await.unwrap(), None);
}

#[tokio::test]
async fn what_is_wrong_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let nobody = "nats://127.0.0.1:1";
    let error = refused(coordinator(folder.path(), nobody)).await;
    assert!(error.contains("manifest.json"), "{error}");

    shard_set::write(folder.path(), 1);
    let mut command = coordinator(folder.path(), nobody);
    command.args(["--set", "coordinator.prefill_chunk=1"]);
    let error = refused(command).await;
    assert!(error.contains("coordinator.prefill_chunk is 1"), "{error}");

    let mut command = coordinator(folder.path(), nobody);
    command.args(["--set", "coordinator.max_sesions=1"]);
    let error = refused(command).await;
    assert!(error.contains("max_sesions") && error.contains("max_sessions"), "{error}");

    std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    let error = refused(coordinator(folder.path(), nobody)).await;
    assert!(error.contains("tokenizer.json"), "{error}");
}
