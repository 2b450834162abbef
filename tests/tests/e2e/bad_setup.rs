//! Wrong shards, a missing runtime and wrong settings: the start stops and names what is wrong.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use stagebus_fleet::{BrokerOptions, LocalBroker};
use stagebus_tests::program::Call;
use stagebus_tests::{shard_sets, turn};

/// A worker of stage 1 of `shards`, without a broker to find: what is wrong must come first.
fn worker(shards: &Path) -> Call {
    Call::new(["worker", "--stage", "1", "--set", "broker.url=nats://127.0.0.1:1", "--shards"])
        .arg(shards)
        .args(&["--set", "worker.connect_wait_ms=0"])
}

/// A copy of the two-stage shard set with one file changed.
async fn spoilt(file: &str, spoil: impl FnOnce(&mut Vec<u8>)) -> Result<tempfile::TempDir> {
    let folder = tempfile::tempdir()?;
    shard_sets::copy(&shard_sets::get(2).await?, folder.path())?;
    let path = folder.path().join(file);
    let mut bytes = fs::read(&path).with_context(|| path.display().to_string())?;
    spoil(&mut bytes);
    fs::write(path, bytes)?;
    Ok(folder)
}

#[tokio::test]
async fn a_damaged_shard_is_not_loaded() -> Result<()> {
    let _turn = turn::take().await;
    let flipped = spoilt("stage-1.bin", |bytes| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
    })
    .await?;
    worker(flipped.path()).run().await?.failure(&["stage-1.bin", "SHA-256"])?;
    let cut = spoilt("stage-1.bin", |bytes| bytes.truncate(bytes.len() - 1)).await?;
    worker(cut.path()).run().await?.failure(&["stage-1.bin", "bytes, the manifest says"])?;
    let graph = spoilt("stage-1.xml", |bytes| bytes[100] ^= 1).await?;
    worker(graph.path()).run().await?.failure(&["stage-1.xml", "SHA-256"])?;
    // The files of the other stages are not this worker's business: it goes on to the broker.
    let other = spoilt("stage-0.bin", |bytes| bytes[100] ^= 1).await?;
    worker(other.path()).run().await?.failure(&["cannot reach a broker"])?;
    Ok(())
}

#[tokio::test]
async fn a_shard_set_that_is_none_is_refused_by_everybody() -> Result<()> {
    let _turn = turn::take().await;
    let changed = spoilt("manifest.json", |bytes| {
        let text = String::from_utf8_lossy(bytes)
            .replace("\"context_length\": 8192", "\"context_length\": 4096");
        *bytes = text.into_bytes();
    })
    .await?;
    let cut = spoilt("manifest.json", |bytes| bytes.truncate(100)).await?;
    let empty = tempfile::tempdir()?;
    let cases = [(&changed, "fingerprint"), (&cut, "is not a manifest"), (&empty, "cannot read")];
    for (folder, part) in cases {
        for command in ["worker", "coordinator", "up"] {
            let mut call = Call::new([command, "--shards"]).arg(folder.path());
            if command == "worker" {
                call = call.args(&["--stage", "0"]);
            }
            call.run().await?.failure(&["manifest.json", part])?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_stage_that_does_not_exist_is_refused() -> Result<()> {
    let _turn = turn::take().await;
    let shards = shard_sets::get(2).await?;
    let call = Call::new(["worker", "--stage", "2", "--shards"]).arg(&shards);
    call.run().await?.failure(&["stage 2 does not exist", "0 to 1"])?;
    let call = Call::new(["worker", "--shards"]).arg(&shards);
    call.run().await?.failure(&["worker.stage is not set"])?;
    Ok(())
}

#[tokio::test]
async fn a_missing_runtime_is_named_with_what_to_do() -> Result<()> {
    let _turn = turn::take().await;
    let shards = shard_sets::get(2).await?;
    let nowhere = tempfile::tempdir()?;
    let named = |variable: &'static str| worker(&shards).env(variable, nowhere.path());
    named("STAGEBUS_OPENVINO").run().await?.failure(&["STAGEBUS_OPENVINO", "OpenVINO"])?;
    let ended = named("STAGEBUS_RUNTIME_DIR")
        .env("LD_LIBRARY_PATH", "")
        .env("OPENVINO_INSTALL_DIR", "")
        .run()
        .await?;
    ended.failure(&["OpenVINO", "cargo xtask setup", "STAGEBUS_OPENVINO"])?;
    // A file that is no library.
    let file = nowhere.path().join("libopenvino_c.so");
    fs::write(&file, "no library")?;
    let wrong = worker(&shards).env("STAGEBUS_OPENVINO", &file).run().await?;
    wrong.failure(&["OpenVINO", &file.display().to_string()])?;

    let up = Call::new(["up", "--broker-port", "0", "--shards"]).arg(&shards);
    let without = up.clone().env("STAGEBUS_NATS_SERVER", nowhere.path().join("no"));
    without.run().await?.failure(&["STAGEBUS_NATS_SERVER", "nats-server"])?;
    let without = up.env("STAGEBUS_RUNTIME_DIR", nowhere.path()).env("PATH", "");
    without.run().await?.failure(&["nats-server", "cargo xtask setup"])?;
    Ok(())
}

#[tokio::test]
async fn without_a_broker_every_command_says_so() -> Result<()> {
    let _turn = turn::take().await;
    let shards = shard_sets::get(2).await?;
    worker(&shards).run().await?.failure(&["nats://127.0.0.1:1", "cannot reach a broker"])?;
    let set = ["--set", "broker.url=nats://127.0.0.1:1"];
    let coordinator = Call::new(["coordinator", "--shards"]).arg(&shards).args(&set);
    coordinator.run().await?.failure(&["cannot reach a broker"])?;
    for command in [&["ask", "hello"][..], &["status"]] {
        let call = Call::new(command.iter().copied()).args(&["--broker", "nats://127.0.0.1:1"]);
        call.run().await?.failure(&["nats://127.0.0.1:1", "cannot reach a broker"])?;
    }
    Ok(())
}

#[tokio::test]
async fn a_broker_elsewhere_needs_protection() -> Result<()> {
    let call = Call::new(["ask", "hello", "--broker", "nats://192.0.2.1:4222"]);
    call.run().await?.failure(&["not on this machine", "TLS"])?;
    Ok(())
}

#[tokio::test]
async fn nobody_there_is_not_a_hang() -> Result<()> {
    let _turn = turn::take().await;
    let broker = LocalBroker::start(BrokerOptions::default()).await?;
    let url = broker.url();
    let ask = Call::new(["ask", "hello", "--broker", &url]);
    ask.run().await?.failure(&["nobody announces itself", &url])?;
    let ask = Call::new(["ask", "hello", "--model", "m", "--broker", &url]);
    ask.run().await?.failure(&["nobody listens", "coordinator"])?;
    let status = Call::new(["status", "--json", "--broker", &url]).run().await?;
    anyhow::ensure!(status.code() == Some(1), "{}", status.report());
    anyhow::ensure!(status.json()?["served"] == false, "{}", status.report());
    Ok(())
}

#[tokio::test]
async fn a_wrong_setting_is_named_with_value_and_source() -> Result<()> {
    let shards = shard_sets::get(2).await?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("wrong.toml");
    fs::write(&file, "[worker]\nthreads = \"many\"\n")?;
    let worker = || worker(&shards);
    let cases = [
        (worker().env("STAGEBUS_WORKER__THREADS", "many"), "STAGEBUS_WORKER__THREADS"),
        (worker().args(&["--set", "worker.threads=many"]), "--set"),
        (worker().arg("--config").arg(&file), "wrong.toml"),
    ];
    for (call, source) in cases {
        call.run().await?.failure(&["worker.threads", "many", source])?;
    }
    let set = |text: &'static str| worker().args(&["--set", text]);
    set("worker.thread=1").run().await?.failure(&["worker.thread ", "--set", "threads"])?;
    set("worker.max_sessions=0").run().await?.failure(&["worker.max_sessions is 0", "1 to"])?;
    set("worker.profile=best").run().await?.failure(&["worker.profile", "best", "exact"])?;
    set("worker.threads").run().await?.failure(&["worker.threads", "TABLE.KEY=VALUE"])?;
    let missing = worker().args(&["--config", "no/such.toml"]);
    missing.run().await?.failure(&["no/such.toml"])?;
    Call::new(["coordinator", "--set", "coordinator.prefill_chunk=1", "--shards"])
        .arg(&shards)
        .run()
        .await?
        .failure(&["coordinator.prefill_chunk is 1"])?;
    Ok(())
}

#[tokio::test]
async fn an_unknown_device_is_named() -> Result<()> {
    let _turn = turn::take().await;
    let shards = shard_sets::get(2).await?;
    worker(&shards).args(&["--device", "XPU"]).run().await?.failure(&["XPU"])?;
    Ok(())
}
